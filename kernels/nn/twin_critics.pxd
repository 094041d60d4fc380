"""Common parts of SAC, TD3, IQL and CQL: a policy, two critics, their targets, and the critics' update."""

from libc.stdint cimport int32_t as i32

from rlox.kernels.nn.layers cimport Net
from rlox.kernels.types cimport f32, f64, i64
from rlox.kernels.nn.core cimport BlockLearner, Weights

cdef enum:
    N_COMMON = 6
    N_METRICS = 10


# A batch; weights are NULL if all rows have equal weights.
cdef struct Batch:
    Py_ssize_t n
    const f32* obs
    const f32* next_obs
    const f32* actions
    const f32* rewards
    const f32* discounts
    const f32* weights
    const f32* noise
    const f32* uniform


# Options of an update; a limit of 0 means none.
cdef struct Options:
    f64 rate
    f64 tau
    f64 limit           # of each gradient's norm
    bint tune           # whether to tune the temperature
    f64 target_entropy  # to this entropy
    bint move_policy
    f64 target_noise
    f64 noise_clip
    bint clone          # whether to clone the batch's actions too, as in TD3+BC
    f64 alpha           # weight of the values then
    f64 policy_rate     # IQL's, like the next three
    f64 expectile
    f64 inverse_scale   # of the advantages
    f64 max_weight
    bint tune_penalty   # whether to tune the weight of CQL's penalty
    f64 target_penalty  # to this penalty


# Actions of a chunk of rows, and the terms of their derivatives.
cdef struct Squashed:
    f32* actions        # (CHUNK, A): tanh u
    f32* slopes         # (CHUNK, A): 1 - tanh^2 u
    f32* shifts         # (CHUNK, A): du / dlog sigma
    f32* log_probs      # (CHUNK)


cdef struct Sums:
    f64 q_loss
    f64 value
    f64 td_error
    f64 norm
    f64 policy_loss
    f64 policy_norm
    f64[N_METRICS - N_COMMON] own  # metrics of one algorithm; means at the end


cdef inline f32 smaller(f32 a, f32 b) noexcept nogil:
    """Return the smaller number, or NaN if one of them is NaN."""
    return b if b < a or b != b else a


cdef Options options_of(learning_rate, tau, max_grad_norm, str where) except *


cdef class TwinCritics(BlockLearner):
    cdef readonly Py_ssize_t act_dim
    cdef bint gaussian
    cdef tuple draws        # leading dimensions of the noise, before (B, A); None without noise
    cdef Py_ssize_t n_random    # uniform actions in CQL's penalty, and as many of the policy; 0 without a penalty
    cdef dict targets
    cdef Weights policy_weights
    cdef Weights critic_weights
    cdef f32* critic_targets
    cdef Net actor
    cdef Net[2] critics
    cdef Net[2] target_critics
    cdef Py_ssize_t in_pad
    cdef f32* x             # (2 * CHUNK, obs_pad): the actor's inputs, states and then their next states
    cdef f32* pairs         # (CHUNK, in_pad): the critics' inputs
    cdef f32* next_pairs    # (CHUNK, in_pad): their targets' inputs
    cdef f32* d_pairs       # (CHUNK, in_pad)
    cdef f32* q_targets     # (CHUNK): the critics' targets
    cdef f32* first_shares  # (CHUNK): share of the first critic in the smaller value: 0, 1, or 1/2 for equal values
    cdef f32* d_actions     # (CHUNK, A)
    cdef i32* chosen        # (CHUNK): rows
    cdef Squashed pi

    cdef int make(self, str where, dict trained, dict targets, obs_dim, act_dim, hidden_sizes, str activation,
                  bint gaussian, bint valued=*, Py_ssize_t n_random=*) except -1
    cdef int make_pair(self, Net* nets, list widths, f32* block, Py_ssize_t rows) except -1
    cdef dict take(self, str where, Batch* batch, obs, actions, rewards, next_obs, discounts, noise, weights, uniform)
    cdef void pack_critics(self) noexcept nogil
    cdef void pack_moved(self) noexcept nogil
    cdef void fill(self, f32* to, Py_ssize_t ld, const f32* obs, const f32* actions, Py_ssize_t rows) noexcept nogil
    cdef void compute_targets(self, const Batch* batch, Py_ssize_t start, Py_ssize_t rows, f64 alpha) noexcept nogil
    cdef void critic_gradient(self, const Batch* batch, Py_ssize_t start, Py_ssize_t rows, f64 lift, f32* td_errors,
                              Sums* sums) noexcept nogil
    cdef void move_critics(self, const Options* options, f32* target, Sums* sums) noexcept nogil
    cdef tuple learn_from(self, str where, Options options, tuple names, obs, actions, rewards, next_obs, discounts,
                          noise=*, weights=*, uniform=*)
    cdef int update_once(self, const Batch* batch, const Options* options, f32* td_errors,
                         f64* metrics) except -1 nogil
    cdef int learn(self, const Batch* batch, const Options* options, f32* td_errors, Sums* sums) except -1 nogil
    cdef void act_on(self, const f32* obs, Py_ssize_t n, const f32* noise, f64 noise_std, f32* actions) noexcept nogil
    cdef void decide(self, Net* actor, const f32* obs, Py_ssize_t ld, Py_ssize_t rows, f32* actions) noexcept nogil
    cdef object actions_of(self, object obs, object noise, f64 noise_std, str where)
    cdef tuple train(self, str where, Options options, i64 policy_delay, f64 noise_std, bint annealed, stepper, memory,
                     action_rng, replay_rng, obs, dict counts)
