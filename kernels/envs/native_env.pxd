"""The environment that `VecEnv` and `Env` play."""

from rlox.kernels.envs.base cimport rlox_env_v1


cdef class NativeEnv:
    cdef rlox_env_v1 spec
    cdef object capsule  # what keeps an environment from outside alive

    cdef int choose(self, object env_id, str where) except -1
    cdef int find(self, object env_id, str where) except -1
