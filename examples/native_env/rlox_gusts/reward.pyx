"""A native reward: CartPole's own minus half the squared angle of the pole, in one C call for the whole batch."""

from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport int64_t, uint32_t

cdef extern from "rlox_native.h":
    const char* RLOX_REWARD_CAPSULE

    ctypedef struct rlox_reward_v1:
        uint32_t struct_size
        uint32_t flags
        const char* name
        int64_t obs_dim
        const void* params
        void (*reward_n)(const void* params, int64_t n, int64_t obs_dim, const float* obs, int64_t act_dim,
                         const void* actions, double* rewards) noexcept nogil


cdef void penalise(const void* params, int64_t n, int64_t obs_dim, const float* obs, int64_t act_dim,
                   const void* actions, double* rewards) noexcept nogil:
    cdef int64_t i
    cdef double angle
    for i in range(n):
        angle = obs[obs_dim * i + 2]
        rewards[i] -= 0.5 * angle * angle


cdef rlox_reward_v1 REWARD = rlox_reward_v1(
    struct_size=sizeof(rlox_reward_v1), flags=0, name="angle_penalty", obs_dim=4, params=NULL, reward_n=penalise,
)

angle_penalty = PyCapsule_New(&REWARD, RLOX_REWARD_CAPSULE, NULL)
