"""Description of an environment for the vectorised loop: the C struct that external environments fill in too.

The .pxd file of an environment fills in an `rlox_env_v1` in ``spec()`` (its fields and functions are documented in
kernels/include/rlox_native.h). The loop in episodes.pxd calls the functions once per block of environments, so the
indirection costs nothing per environment. State is float64 in structure-of-arrays form: component s of environment i in
a batch of n is ``state[s * n + i]``. Observations are float32 rows.
"""

from rlox.kernels.philox cimport DOMAIN_ENV_RESET, DOMAIN_ENV_STEP, Block, philox
from rlox.kernels.types cimport f32, f64, i64, u8, u32, u64


cdef extern from "rlox_native.h":
    const char* RLOX_ENV_CAPSULE
    const u32 RLOX_ENV_AGENTS
    const u32 RLOX_ENV_MASKS
    const size_t RLOX_ENV_V1_ONE_AGENT
    const size_t RLOX_ENV_V1_NO_MASKS

    ctypedef struct rlox_batch_v1:
        i64 n
        f64* state
        const u64* keys
        const u64* episodes
        const i64* steps

    ctypedef void (*reset_n_f)(const void* params, const rlox_batch_v1* batch, i64 m, const i64* index,
                               f32* obs) noexcept nogil
    ctypedef void (*step_n_f)(const void* params, const rlox_batch_v1* batch, const void* actions, f32* obs,
                              f64* rewards, u8* terminated) noexcept nogil
    ctypedef void (*observe_n_f)(const void* params, const rlox_batch_v1* batch, f32* obs) noexcept nogil

    ctypedef void (*mask_n_f)(const void* params, const rlox_batch_v1* batch, u8* mask) noexcept nogil

    ctypedef struct rlox_env_v1:
        u32 struct_size
        u32 flags
        const char* env_id
        i64 state_size
        i64 obs_dim
        i64 n_actions
        i64 act_dim
        const f32* act_low
        const f32* act_high
        i64 max_episode_steps
        const void* params
        reset_n_f reset_n
        step_n_f step_n
        observe_n_f observe_n
        # For several agents; read only if `flags` has RLOX_ENV_AGENTS: see agents_of.
        i64 n_agents
        i64 central_dim
        observe_n_f central_n
        mask_n_f mask_n  # read only if `flags` has RLOX_ENV_MASKS: see flags_of


cdef inline i64 agents_of(const rlox_env_v1* spec) noexcept nogil:
    """Return the number of rows of observations, actions and rewards of one environment."""
    return spec.n_agents if spec.flags & RLOX_ENV_AGENTS else 1


cdef inline i64 flags_of(const rlox_env_v1* spec) noexcept nogil:
    """Return the number of flags of an environment's mask of legal actions; 0 without masks."""
    return spec.n_actions if spec.flags & RLOX_ENV_MASKS else 0


cdef inline Block reset_block(const rlox_batch_v1* batch, Py_ssize_t i) noexcept nogil:
    """Return random words for the start of environment i's episode, a pure function of its key and episode number."""
    return philox(batch.keys[i], batch.episodes[i], DOMAIN_ENV_RESET)


cdef inline Block step_block(const rlox_batch_v1* batch, Py_ssize_t i) noexcept nogil:
    """Return random words for environment i's current step, a pure function of its key, episode and step."""
    return philox(batch.keys[i], batch.episodes[i], DOMAIN_ENV_STEP | <u64>batch.steps[i] << 32)
