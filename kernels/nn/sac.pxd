"""Declarations of SAC for CQL."""

from rlox.kernels.nn.layers cimport Net
from rlox.kernels.types cimport f32, f64
from rlox.kernels.nn.core cimport Weights
from rlox.kernels.nn.twin_critics cimport Batch, Options, Squashed, Sums, TwinCritics


cdef void squash(const f32* y, Py_ssize_t ld, Py_ssize_t rows, Py_ssize_t a, const f32* noise,
                 Squashed* to) noexcept nogil


cdef class SoftCritics(TwinCritics):
    cdef Weights temperature
    cdef f64 conservatism   # the penalty's weight, in an update

    cdef void penalty_gradient(self, const Batch* batch, Py_ssize_t start, Py_ssize_t rows, Sums* sums) noexcept nogil
    cdef void add_policy_gradient(self, const Batch* batch, Py_ssize_t start, Py_ssize_t rows, f64 alpha,
                                  Sums* sums) noexcept nogil
    cdef void action_gradient(self, Net* critic, Py_ssize_t rows, bint second, f32 scale) noexcept nogil
    cdef Options options(self, target_entropy, learning_rate, tau, max_grad_norm, str where) except *
