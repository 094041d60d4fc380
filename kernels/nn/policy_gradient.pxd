"""What MAPPO takes from PPO: the loss of the policy, row by row."""

from rlox.kernels.types cimport cf32_r, f32, f64, i64


cdef struct Loss:
    bint ppo            # else A2C's policy gradient
    f64 clip_eps
    f64 vf_coef
    f64 ent_coef
    f64 clip_vf         # 0: off


cdef struct Sums:
    f64 policy_loss
    f64 value_loss
    f64 entropy
    f64 approx_kl
    f64 clipped


# A chunk of a minibatch, gathered.
cdef struct Rows:
    const f32* obs      # (B, in_pad)
    const i64* choices  # (B) categorical
    const f32* actions  # (B, A) Gaussian
    const f32* log_probs
    const f32* advantages
    const f32* returns
    const f32* values


cdef void categorical_loss(const Loss* loss, const f32* logits, Py_ssize_t ld, Py_ssize_t n, Py_ssize_t n_actions,
                           const Rows* rows, f64 scale, f32* d_logits, Sums* sums) noexcept nogil
cdef void gaussian_loss(const Loss* loss, const f32* mean, Py_ssize_t ld, Py_ssize_t n, Py_ssize_t act_dim,
                        const f32* log_std, const Rows* rows, f64 scale, f32* d_mean, f64* d_log_std,
                        Sums* sums) noexcept nogil
cdef f64 explained_variance(cf32_r returns, cf32_r values, Py_ssize_t n) noexcept nogil
