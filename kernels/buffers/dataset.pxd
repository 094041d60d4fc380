"""Drawing rows, and windows of consecutive rows, from a fixed dataset."""

from libc.string cimport memcpy, memset

from rlox.kernels.buffers.gather cimport CHUNK, PREFETCH_AHEAD, draw_indices, draw_one, gather_two
from rlox.kernels.philox cimport DOMAIN_OFFLINE_TRAJECTORIES, DOMAIN_OFFLINE_TRANSITIONS
from rlox.kernels.prefetch cimport prefetch
from rlox.kernels.types cimport cf32_r, f32, f32_r, i64, u8, u64


cdef inline void standardise(f32_r rows, Py_ssize_t n, Py_ssize_t width, cf32_r mean,
                             cf32_r inverse) noexcept nogil:
    cdef Py_ssize_t i, j
    for i in range(n):
        for j in range(width):
            rows[i * width + j] = (rows[i * width + j] - mean[j]) * inverse[j]


cdef struct Dataset:
    Py_ssize_t n
    Py_ssize_t obs_bytes     # of one observation
    Py_ssize_t obs_size      # numbers in one observation
    Py_ssize_t act_dim
    const char* obs
    const char* next_obs
    const f32* actions
    const f32* rewards
    const u8* terminated
    const u8* truncated
    const u8* flags          # terminated + 2 truncated, to read both at once
    const f32* mean          # NULL: observations are not normalised
    const f32* inverse       # 1 / standard deviation
    Py_ssize_t n_episodes
    const i64* ends          # one past the last step of each episode, ascending


cdef inline void gather_rest(const Dataset* data, const i64* at, Py_ssize_t n, f32* actions, f32* rewards,
                             u8* terminated, u8* truncated) noexcept nogil:
    cdef Py_ssize_t i, j
    cdef Py_ssize_t act_dim = data.act_dim
    cdef i64 row
    for i in range(n):
        if i + PREFETCH_AHEAD < n:
            row = at[i + PREFETCH_AHEAD]
            prefetch(data.rewards + row)
            prefetch(data.actions + row * act_dim)
            prefetch(data.flags + row)
        row = at[i]
        rewards[i] = data.rewards[row]
        terminated[i] = data.flags[row] & 1
        truncated[i] = data.flags[row] >> 1
        if act_dim == 1:
            actions[i] = data.actions[row]
        else:
            for j in range(act_dim):
                actions[i * act_dim + j] = data.actions[row * act_dim + j]


cdef inline void sample_rows(const Dataset* data, u64 key, Py_ssize_t b, char* obs, char* next_obs, f32* actions,
                      f32* rewards, u8* terminated, u8* truncated) noexcept nogil:
    cdef i64[CHUNK] at
    cdef Py_ssize_t start = 0
    cdef Py_ssize_t n
    while start < b:
        n = min(<Py_ssize_t>CHUNK, b - start)
        draw_indices(<u64>data.n, key, <u64>start, DOMAIN_OFFLINE_TRANSITIONS, at, n)
        gather_two(data.obs, data.next_obs, data.obs_bytes, at, n, obs + start * data.obs_bytes,
                   next_obs + start * data.obs_bytes)
        gather_rest(data, at, n, actions + start * data.act_dim, rewards + start, terminated + start,
                    truncated + start)
        start += n
    if data.mean != NULL:
        standardise(<f32*>obs, b, data.obs_size, data.mean, data.inverse)
        standardise(<f32*>next_obs, b, data.obs_size, data.mean, data.inverse)


cdef inline Py_ssize_t episode_at(const Dataset* data, i64 row) noexcept nogil:
    """Return the episode that a row belongs to: the first one that ends after the row."""
    cdef Py_ssize_t low = 0
    cdef Py_ssize_t high = data.n_episodes - 1
    cdef Py_ssize_t middle
    while low < high:
        middle = (low + high) >> 1
        if data.ends[middle] > row:
            high = middle
        else:
            low = middle + 1
    return low


cdef struct Trajectories:
    char* obs
    f32* actions
    f32* rewards
    f32* returns_to_go
    i64* timesteps
    u8* terminated
    u8* truncated
    u8* mask


cdef inline void copy_padded(char* out, const char* source, Py_ssize_t used, Py_ssize_t whole) noexcept nogil:
    memcpy(out, source, used)
    memset(out + used, 0, whole - used)


cdef inline void sample_windows(const Dataset* data, const f32* to_go, u64 key, Py_ssize_t b, Py_ssize_t length,
                         bint by_episode, Trajectories* out) noexcept nogil:
    cdef i64[CHUNK] at
    cdef Py_ssize_t base, i, j, k, n, used
    cdef i64 row, begin, stop
    cdef Py_ssize_t act = data.act_dim * <Py_ssize_t>sizeof(f32), one = sizeof(f32)
    base = 0
    while base < b:
        n = min(<Py_ssize_t>CHUNK, b - base)
        if not by_episode:
            draw_indices(<u64>data.n, key, <u64>base, DOMAIN_OFFLINE_TRAJECTORIES, at, n)
        for i in range(n):
            k = base + i
            if by_episode:
                j = draw_one(<u64>data.n_episodes, key, 2 * <u64>k, DOMAIN_OFFLINE_TRAJECTORIES)
            else:
                row = at[i]
                j = episode_at(data, row)
            begin = data.ends[j - 1] if j else 0
            stop = data.ends[j]
            if by_episode:
                row = begin + draw_one(max(<i64>1, stop - begin - length + 1), key, 2 * <u64>k + 1,
                                       DOMAIN_OFFLINE_TRAJECTORIES)
            used = min(length, <Py_ssize_t>(stop - row))
            k *= length
            copy_padded(out.obs + k * data.obs_bytes, data.obs + row * data.obs_bytes,
                        used * data.obs_bytes, length * data.obs_bytes)
            if data.mean != NULL:
                standardise(<f32*>(out.obs + k * data.obs_bytes), used, data.obs_size, data.mean, data.inverse)
            copy_padded(<char*>out.actions + k * act, <const char*>data.actions + row * act, used * act, length * act)
            copy_padded(<char*>(out.rewards + k), <const char*>(data.rewards + row), used * one, length * one)
            copy_padded(<char*>(out.returns_to_go + k), <const char*>(to_go + row), used * one, length * one)
            copy_padded(<char*>out.terminated + k, <const char*>data.terminated + row, used, length)
            copy_padded(<char*>out.truncated + k, <const char*>data.truncated + row, used, length)
            memset(out.mask + k, 1, used)
            memset(out.mask + k + used, 0, length - used)
            for j in range(used):
                out.timesteps[k + j] = row - begin + j
            memset(out.timesteps + k + used, 0, (length - used) * sizeof(i64))
        base += n
