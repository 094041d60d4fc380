"""The environment that `VecEnv`, `AgentVecEnv` and `Env` run, and the memory of N copies of it."""

cimport numpy as cnp

from rlox.kernels.envs.base cimport rlox_env_v1
from rlox.kernels.envs.episodes cimport Envs
from rlox.kernels.envs.stepper cimport rlox_stepper, rows_step_f
from rlox.kernels.types cimport u64


cdef class NativeEnv:
    cdef rlox_env_v1 spec
    cdef object capsule  # keeps an external environment alive

    cdef int choose(self, object env_id, str where) except -1
    cdef int find(self, object env_id, str where) except -1


cdef class NativeEnvs(NativeEnv):
    cdef readonly Py_ssize_t n_envs
    cdef readonly u64 seed
    cdef Envs envs
    cdef bint ready     # whether all environments have started an episode
    # The arrays own the memory that `envs` points into.
    cdef cnp.ndarray state, keys, episodes, steps, returns
    cdef rlox_stepper access

    cdef int hold(self, object n, tuple shape, object seed, str where) except -1
    cdef int rekey(self, object seed, str where) except -1
    cdef int require_ready(self, str method) except -1
    cdef object stepper_of(self, void* stepped, Py_ssize_t n, rows_step_f step)
    cdef dict arrays(self)
    cdef dict snapshot(self)
    cdef int put_back(self, state, str where) except -1
