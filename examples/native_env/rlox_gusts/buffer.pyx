"""A replay memory that prefers recent transitions: the i-th newest of n is sampled in proportion to decay**i."""

from typing import Any

import numpy as np

from rlox.kernels.buffers.batch import Batch
from rlox_gusts.config import RecencyBufferConfig

cimport numpy as cnp
from libc.math cimport expm1, log, log1p
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

cnp.import_array()

cdef extern from "rlox_native.h":
    void rlox_random(uint64_t key, uint64_t counter, uint32_t domain, uint32_t block, uint32_t* out) noexcept nogil

cdef enum:
    DOMAIN = 0x52454345  # "RECE": a separate stream of random numbers for the same seed


cdef void choose(uint64_t seed, Py_ssize_t count, Py_ssize_t capacity, Py_ssize_t end, double decay, Py_ssize_t m,
                 int64_t* rows) noexcept nogil:
    """Draw the rows of `m` samples, where the newest transition is in the row before `end`.

    The age i of a sample follows from a uniform u by inverting the distribution: the i newest have
    (1 - decay**i) / (1 - decay**count) of the probability, so i = floor(log(1 - u (1 - decay**count)) / log(decay)).
    """
    cdef double rate = log(decay)
    cdef double mass = -expm1(count * rate)  # 1 - decay**count
    cdef double u
    cdef uint32_t[4] words = [0, 0, 0, 0]
    cdef Py_ssize_t k, age
    for k in range(m):
        if k % 2 == 0:
            rlox_random(seed, <uint64_t>(k // 2), DOMAIN, 0, &words[0])
        else:
            words[0] = words[2]
            words[1] = words[3]
        u = <double>(((<uint64_t>words[1] << 32) | words[0]) >> 11) * 1.1102230246251565e-16  # [0, 1)
        age = <Py_ssize_t>(log1p(-u * mass) / rate)
        age = min(max(age, 0), count - 1)
        rows[k] = (end - 1 - age + capacity) % capacity


cdef void gather(const char* source, char* to, Py_ssize_t size, Py_ssize_t m, const int64_t* rows) noexcept nogil:
    cdef Py_ssize_t k
    for k in range(m):
        memcpy(to + k * size, source + rows[k] * size, size)


cdef class RecencyBuffer:
    """Store of the last `capacity` transitions that samples recent ones more often.

    Parameters
    ----------
    capacity
        Number of transitions to keep.
    obs_dim, act_dim
        Lengths D and A.
    decay
        How much less likely each older transition is than the next newer one, in (0, 1).
    """

    Config = RecencyBufferConfig  # settings of `rlox train buffer=recency`

    cdef readonly Py_ssize_t capacity, obs_dim, act_dim
    cdef readonly double decay
    cdef Py_ssize_t end, count  # where the next transition goes; how many there are
    cdef dict columns  # name -> (capacity, ...) array
    cdef int with_next  # whether transitions come with next_obs; -1 before the first

    def __init__(self, capacity: int, obs_dim: int, act_dim: int = 1, decay: float = 0.9999) -> None:
        for name, value in (("capacity", capacity), ("obs_dim", obs_dim), ("act_dim", act_dim)):
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                raise TypeError(f"RecencyBuffer: {name} must be an integer, got {type(value).__name__}")
            if value < 1:
                raise ValueError(f"RecencyBuffer: {name} must be at least 1, got {value}")
        if not 0.0 < decay < 1.0:
            raise ValueError(f"RecencyBuffer: decay must be in (0, 1), got {decay}")
        self.capacity, self.obs_dim, self.act_dim, self.decay = capacity, obs_dim, act_dim, decay
        self.columns = {
            "obs": np.zeros((capacity, obs_dim), np.float32),
            "next_obs": np.zeros((capacity, obs_dim), np.float32),
            "actions": np.zeros((capacity, act_dim), np.float32),
            "rewards": np.zeros(capacity, np.float32),
            "terminated": np.zeros(capacity, np.bool_),
            "truncated": np.zeros(capacity, np.bool_),
        }
        self.end, self.count, self.with_next = 0, 0, -1

    def __len__(self) -> int:
        return self.count

    def len(self) -> int:
        return self.count

    def push(self, obs, action, reward, terminated, truncated, next_obs=None) -> None:
        """Add one transition. Pass `next_obs` always or never."""
        after = None if next_obs is None else np.reshape(next_obs, (1, -1))
        self.push_batch(np.reshape(obs, (1, -1)), after, np.reshape(action, (1, -1)), [reward], [terminated], [truncated])

    def push_batch(self, obs, next_obs, actions, rewards, terminated, truncated) -> None:
        """Copy N transitions, the oldest first, into the buffer: (N, D), (N, D), (N, A) and three times (N,).

        Raises
        ------
        ValueError
            If a shape is wrong, or if `next_obs` is given now and was not given before, or the other way round.
        """
        given = {"obs": obs, "next_obs": next_obs, "actions": actions, "rewards": rewards,
                 "terminated": terminated, "truncated": truncated}
        n = len(rewards)
        cdef int with_next = next_obs is not None
        if self.with_next >= 0 and self.with_next != with_next:
            raise ValueError("RecencyBuffer: next_obs must be given with every transition or with none")
        if not with_next:
            del given["next_obs"]
        arrays = {}
        for name, value in given.items():
            array = np.asarray(value)
            shape = (n, *self.columns[name].shape[1:])
            if array.size != n * self.columns[name][0].size:
                raise ValueError(f"RecencyBuffer: {name} must have shape {shape}, got {array.shape}")
            arrays[name] = array.reshape(shape)[-self.capacity:]
        kept = min(n, self.capacity)
        rows = (self.end + n - kept + np.arange(kept)) % self.capacity
        for name, array in arrays.items():
            self.columns[name][rows] = array
        self.with_next = with_next if n else self.with_next
        self.end = (self.end + n) % self.capacity
        self.count = min(self.count + n, self.capacity)

    def sample(self, batch_size: int, seed: int) -> Batch:
        """Sample `batch_size` transitions with replacement; `seed` (0 <= seed < 2**64) and contents determine them."""
        if self.count == 0:
            raise ValueError("RecencyBuffer.sample: the buffer must contain a transition, got none; push first")
        if batch_size < 1:
            raise ValueError(f"RecencyBuffer.sample: batch_size must be at least 1, got {batch_size}")
        if not 0 <= seed < 1 << 64:
            raise ValueError(f"RecencyBuffer.sample: seed must be at least 0 and below 2**64, got {seed}")
        cdef Py_ssize_t m = batch_size, size
        cdef uint64_t key = seed
        cdef cnp.ndarray rows = np.empty(m, np.int64), source, to
        cdef int64_t* at = <int64_t*>cnp.PyArray_DATA(rows)
        with nogil:
            choose(key, self.count, self.capacity, self.end, self.decay, m, at)
        batch = Batch()
        for name, column in self.columns.items():
            if name == "next_obs" and self.with_next == 0:
                continue
            source = column
            to = np.empty((m, *column.shape[1:]), column.dtype)
            size = column[0].nbytes
            with nogil:
                gather(<const char*>cnp.PyArray_DATA(source), <char*>cnp.PyArray_DATA(to), size, m, at)
            batch[name] = to
        return batch

    def get_state(self) -> dict[str, Any]:
        """Return the whole state as arrays and numbers."""
        state = {name: column[: self.count].copy() for name, column in self.columns.items()}
        return {**state, "end": self.end, "capacity": self.capacity, "decay": self.decay, "with_next": self.with_next}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a state that `get_state` of a buffer with the same capacity and sizes returned."""
        if set(state) != set(self.get_state()):
            raise ValueError(f"RecencyBuffer.set_state: state must be what get_state returned, got {sorted(state)}")
        if state["capacity"] != self.capacity or state["decay"] != self.decay:
            raise ValueError(
                f"RecencyBuffer.set_state: capacity and decay must be {self.capacity} and {self.decay}, got "
                f"{state['capacity']} and {state['decay']}"
            )
        count, end = len(state["rewards"]), int(state["end"])
        if not (0 <= end < self.capacity and (count == self.capacity or end == count)):
            raise ValueError(f"RecencyBuffer.set_state: end must fit {count} transitions, got {end}")
        for name, column in self.columns.items():
            if state[name].shape != (count, *column.shape[1:]):
                raise ValueError(f"RecencyBuffer.set_state: {name} must have {column.shape[1:]} per row")
        for name, column in self.columns.items():
            column[:count] = state[name]
        self.count, self.end = count, end
        self.with_next = state["with_next"]

    def __reduce__(self):
        return RecencyBuffer, (self.capacity, self.obs_dim, self.act_dim, self.decay), self.get_state()

    def __setstate__(self, state):
        self.set_state(state)
