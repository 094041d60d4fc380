"""Native reward functions of other packages: one C call for the whole batch, as declared in rlox_native.h."""

import numpy as np

cimport numpy as cnp
from cpython.pycapsule cimport PyCapsule_CheckExact, PyCapsule_GetName, PyCapsule_GetPointer, PyCapsule_IsValid
from libc.stdint cimport int64_t, uint32_t

from rlox.kernels.checks cimport as_array, check_out, describe
from rlox.kernels.types cimport f32, f64

cnp.import_array()

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

# As in envs/vec_env.pyx: a smaller batch finishes before another thread could use the time.
cdef Py_ssize_t RELEASE_GIL_FROM = 256


cdef class NativeReward:
    """A native reward function, which ``reward_fn=capsule`` creates. Also a way to try one out.

    Calling it does what the collector does, on any arrays: ``NativeReward(capsule)(obs, actions, raw_rewards)``
    returns the new rewards.

    Parameters
    ----------
    capsule
        A PyCapsule named ``rlox.reward.v1`` that contains the address of an `rlox_reward_v1` (see rlox_native.h). This
        object keeps the capsule; the struct must live as long.

    Attributes
    ----------
    name
        The name in the struct; recorded with a run.
    obs_dim
        Length D of the observations that the function expects, or None for any length.

    Raises
    ------
    TypeError
        If `capsule` is not a PyCapsule.
    ValueError
        For a capsule with another name, and for a struct that is too small or has invalid fields.
    """

    cdef object capsule
    cdef const rlox_reward_v1* given
    cdef readonly str name

    def __cinit__(self, capsule) -> None:
        cdef const char* found
        if not PyCapsule_CheckExact(capsule):
            raise TypeError(
                f"NativeReward: capsule must be a PyCapsule named {RLOX_REWARD_CAPSULE.decode()!r}, got "
                f"{type(capsule).__name__}"
            )
        if not PyCapsule_IsValid(capsule, RLOX_REWARD_CAPSULE):
            found = PyCapsule_GetName(capsule)
            name = None if found == NULL else found.decode(errors="replace")
            raise ValueError(
                f"NativeReward: capsule must be named {RLOX_REWARD_CAPSULE.decode()!r}, got {name!r}"
            )
        self.given = <const rlox_reward_v1*>PyCapsule_GetPointer(capsule, RLOX_REWARD_CAPSULE)
        # Later versions grow the struct at its end.
        if self.given.struct_size < sizeof(rlox_reward_v1):
            raise ValueError(
                f"NativeReward: struct_size must be at least {sizeof(rlox_reward_v1)}, got "
                f"{self.given.struct_size}; set it to sizeof(rlox_reward_v1) and build against rlox.get_include()"
            )
        if self.given.flags != 0:
            raise ValueError(f"NativeReward: flags must be 0, got {self.given.flags}")
        if self.given.name == NULL or self.given.name[0] == 0:
            raise ValueError("NativeReward: name must not be empty, got none")
        if self.given.reward_n == NULL:
            raise ValueError("NativeReward: reward_n must be a function, got NULL")
        if self.given.obs_dim < 0:
            raise ValueError(f"NativeReward: obs_dim must be at least 0 (0: any), got {self.given.obs_dim}")
        self.name = self.given.name.decode(errors="replace")
        self.capsule = capsule

    def __repr__(self) -> str:
        return f"NativeReward({self.name!r})"

    @property
    def __name__(self) -> str:
        return self.name

    @property
    def obs_dim(self) -> int | None:
        return self.given.obs_dim or None

    def __call__(self, obs, actions, raw_rewards) -> np.ndarray:
        """Return the new rewards; the arguments stay unchanged.

        Parameters
        ----------
        obs
            (N, D) real numbers, converted to float32: the observations before the step.
        actions
            (N,) integers, converted to int64, or (N, A) floats, converted to float32.
        raw_rewards
            (N,) real numbers, converted to float64.

        Returns
        -------
        rewards
            (N,) float64. How NaN is treated is up to the function.

        Raises
        ------
        ValueError, TypeError
            For an array of another shape or kind.
        """
        rewards = np.array(_real(raw_rewards, "raw_rewards"), np.float64)
        if rewards.ndim != 1:
            raise ValueError(f"NativeReward: raw_rewards must have shape (N,), got {rewards.shape}")
        self.apply_(obs, actions, rewards)
        return rewards

    def apply_(self, obs, actions, rewards) -> None:
        """Change `rewards`, (N,) float64 and C-contiguous, in place. Otherwise like a call of this object.

        Raises
        ------
        ValueError, TypeError
            For an array of another shape or kind.
        """
        cdef cnp.ndarray seen, taken, changed
        cdef Py_ssize_t n, obs_dim, act_dim = 1
        if not isinstance(rewards, cnp.ndarray) or rewards.ndim != 1:
            raise TypeError(f"NativeReward: rewards must be a NumPy array of shape (N,), got {_shown(rewards)}")
        n = len(rewards)
        check_out(rewards, cnp.NPY_FLOAT64, np.dtype(np.float64), (n,), "NativeReward", "rewards")
        changed = rewards
        seen = np.ascontiguousarray(_real(obs, "obs"), np.float32)
        if cnp.PyArray_NDIM(seen) != 2 or cnp.PyArray_DIM(seen, 0) != n:
            raise ValueError(
                f"NativeReward: obs must have shape (N, D) with N = {n}, as rewards, got {(<object>seen).shape}"
            )
        obs_dim = cnp.PyArray_DIM(seen, 1)
        if self.given.obs_dim != 0 and obs_dim != self.given.obs_dim:
            raise ValueError(
                f"NativeReward: obs must have shape (N, {self.given.obs_dim}), which {self.name} expects, got "
                f"{(<object>seen).shape}"
            )
        held = as_array(actions, "NativeReward", "actions")
        if held.dtype.kind in "iu" and held.ndim == 1:
            taken = np.ascontiguousarray(held, np.int64)
        elif held.dtype.kind == "f" and held.ndim == 2:
            taken = np.ascontiguousarray(held, np.float32)
            act_dim = cnp.PyArray_DIM(taken, 1)
        else:
            raise ValueError(
                f"NativeReward: actions must be (N,) integers or (N, A) floats, got {describe(held)}"
            )
        if cnp.PyArray_DIM(taken, 0) != n:
            raise ValueError(
                f"NativeReward: actions must have {n} rows, as rewards, got {(<object>taken).shape}"
            )
        if n == 0:
            return
        cdef const f32* obs_data = <const f32*>cnp.PyArray_DATA(seen)
        cdef const void* action_data = cnp.PyArray_DATA(taken)
        cdef f64* data = <f64*>cnp.PyArray_DATA(changed)
        if n < RELEASE_GIL_FROM:
            self.given.reward_n(self.given.params, n, obs_dim, obs_data, act_dim, action_data, data)
        else:
            with nogil:
                self.given.reward_n(self.given.params, n, obs_dim, obs_data, act_dim, action_data, data)


cdef object _real(object value, str name):
    array = as_array(value, "NativeReward", name)
    if array.dtype.kind not in "iuf":
        raise TypeError(f"NativeReward: {name} must be real numbers, got dtype {array.dtype}")
    return array


cdef str _shown(object value):
    return describe(value) if isinstance(value, cnp.ndarray) else type(value).__name__
