"""Common parts of PPO, A2C and MAPPO: a perceptron actor and a perceptron critic on one block, and their update."""

cimport numpy as cnp

from rlox.kernels.nn.core cimport FlatLearner
from rlox.kernels.nn.layers cimport Net
from rlox.kernels.signals cimport Watch
from rlox.kernels.types cimport cf32_r, f32, f64, i64, u8


cdef struct Loss:
    bint ppo            # else A2C's policy gradient
    f64 clip_eps
    f64 vf_coef
    f64 ent_coef
    f64 clip_vf         # 0: off
    bint maximum        # use the maximum of the value loss and the clipped one; else the clipped one
    f64 huber           # delta of the Huber loss; 0: squared errors


# Options of an update; a limit or target of 0 means none.
cdef struct Options:
    Py_ssize_t epochs
    Py_ssize_t size     # of a minibatch
    f64 rate
    f64 limit           # of the gradient's norm
    f64 target_kl
    bint normalize      # advantages, in each minibatch


# The columns from which minibatches are taken, with all rows; NULL if a column is absent.
cdef struct Data:
    Py_ssize_t n
    const f32* obs
    const f32* states
    const u8* masks
    const i64* choices      # (n) categorical
    const f32* actions      # (n, A) Gaussian
    const f32* log_probs
    const f32* advantages
    const f32* returns
    const f32* values
    f64* moments            # running moments of the returns, which normalise the critic's targets; updated in place


# A chunk of a minibatch, gathered.
cdef struct Rows:
    i64* choices
    f32* actions
    f32* log_probs
    f32* advantages
    f32* returns
    f32* values


cdef struct Sums:
    f64 policy_loss
    f64 value_loss
    f64 entropy
    f64 approx_kl
    f64 clipped


cdef f64 explained_variance(cf32_r errors, cf32_r returns, Py_ssize_t n) noexcept nogil
cdef Options options_of(n_epochs, batch_size, learning_rate, max_grad_norm, target_kl, bint normalize,
                        str where) except *


cdef class ActorCriticLearner(FlatLearner):
    cdef readonly Py_ssize_t n_outputs
    cdef readonly Py_ssize_t state_dim
    cdef readonly bint gaussian
    cdef readonly bint central
    cdef Py_ssize_t state_pad
    cdef Net actor
    cdef Net critic
    cdef f32* x             # (CHUNK, obs_pad): the actor's inputs
    cdef f32* s             # (CHUNK, state_pad): the critic's inputs; equal to `x` if they are the actor's
    cdef Rows rows
    cdef f64* d_log_std

    cdef int make(self, str where, parameters, obs_dim, n_outputs, hidden_sizes, activation, bint gaussian, optimizer,
                  state_dim) except -1
    cdef object actions_of(self, object actions, Py_ssize_t n, str where)
    cdef object masks_of(self, object masks, Py_ssize_t n, str where)
    cdef object states_of(self, object states, Py_ssize_t n, str where)
    cdef list take(self, str where, Data* data, obs, actions, log_probs, advantages, returns, values, states, masks)
    cdef const f32* acted(self, const f32* obs, Py_ssize_t ld, const u8* masks, Py_ssize_t first,
                          Py_ssize_t rows) noexcept nogil
    cdef void act_on(self, const f32* obs, Py_ssize_t n, const f32* noise, const u8* masks, i64* choices,
                     f32* actions) noexcept nogil
    cdef object sampled(self, str where, obs, noise, masks)
    cdef void values_of(self, const f32* states, Py_ssize_t n, f32* values) noexcept nogil
    cdef void log_probs_of(self, const f32* outputs, Py_ssize_t ld, Py_ssize_t n, const i64* choices,
                           const f32* actions, f32* log_probs) noexcept nogil
    cdef int gradients(self, const Loss* loss, const Data* data, const i64* order, Py_ssize_t n, bint normalize,
                       Sums* sums, Watch* watch) except -1 nogil
    cdef dict learn(self, const Loss* loss, const Options* options, const Data* data, rng)
