"""The capsule through which one kernel steps the environments of another."""

from rlox.kernels.types cimport f32, f64, i64, u8

ctypedef void (*rows_step_f)(void* self, const void* actions, f32* obs, f64* rewards, u8* terminated, u8* truncated,
                             f32* final_obs, f64* episode_return, i64* episode_length) noexcept nogil

cdef extern from "stepper.h":
    const char* RLOX_STEPPER_CAPSULE
    ctypedef struct rlox_stepper:
        void* self
        i64 n
        i64 obs_dim
        i64 n_actions
        i64 act_dim
        i64 max_episode_steps
        const f32* act_low
        const f32* act_high
        rows_step_f step
