"""Common parts of native learners: blocks of parameters trained in place, an optimiser for each, and their state."""

cimport numpy as cnp

from rlox.kernels.nn.layers cimport Net
from rlox.kernels.signals cimport Watch
from rlox.kernels.types cimport f32, f64, i64


# A block of parameters and its optimiser.
cdef struct Weights:
    Py_ssize_t size
    Py_ssize_t followed     # how many of the first parameters a target follows
    f32* p
    f32* g
    f32* m                  # NULL: RMSprop, else Adam
    f32* v
    f64 eps
    i64 step


cdef f64 move(Weights* w, f64 rate, f64 limit, f32* target=*, f64 tau=*) noexcept nogil
cdef void clear(Weights* w, Net* nets, int n_nets) noexcept nogil


cdef inline void move_number(Weights* w, f64 slope, f64 rate) noexcept nogil:
    """Like `move`, for a single number with an unclipped gradient."""
    w.g[0] = <f32>slope
    move(w, rate, 0.0)


cdef class Learner:
    cdef readonly Py_ssize_t obs_dim
    cdef Py_ssize_t obs_pad
    cdef list hidden
    cdef bint tanh
    cdef list held          # the arrays that own the memory of pointers
    cdef object lock
    cdef Watch watch

    cdef Py_ssize_t begin(self, str where, obs_dim, width, str label, hidden_sizes, activation) except -1
    cdef cnp.ndarray rows_of(self, object obs, str where)


cdef class FlatLearner(Learner):
    cdef readonly cnp.ndarray parameters
    cdef readonly cnp.ndarray gradient
    cdef readonly dict moments
    cdef Weights weights

    cdef int hold(self, parameters, size, str where, f64 eps, bint adam=*) except -1


cdef class BlockLearner(Learner):
    cdef readonly dict parameters
    cdef readonly dict gradients
    cdef readonly dict moments

    cdef int hold(self, str where, dict trained, dict others, dict sizes) except -1
    cdef Weights weights_of(self, str name) except *
    cdef dict steps(self)
    cdef void set_steps(self, dict steps)
