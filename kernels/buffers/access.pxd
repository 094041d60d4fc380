"""The capsule through which one kernel fills and samples the replay memory of another."""

from rlox.kernels.types cimport f32, i64, u8, u64

cdef extern from "replay_access.h":
    const char* RLOX_REPLAY_CAPSULE
    ctypedef struct rlox_replay_access:
        void* self
        i64 obs_dim
        i64 act_dim
        i64 n_step
        void (*push)(void* self, i64 n, const f32* obs, const f32* next_obs, const f32* actions, const f32* rewards,
                     const u8* terminated, const u8* truncated) noexcept nogil
        void (*sample)(void* self, i64 n, u64 seed, f32* obs, f32* next_obs, f32* actions, f32* rewards,
                       u8* terminated, u8* truncated, f32* discounts) noexcept nogil
