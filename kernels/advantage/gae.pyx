"""Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, eq. 16).

    delta_t = r_t + gamma * v'_t - v_t
    A_t     = delta_t + gamma * lam * A_{t+1}     (no trace across a boundary)

v'_t is 0 where the episode terminated, next_values[t] where a time limit cut it, else v_{t+1} (at the last
step: last_value). Termination, truncation and the value of the true next observation travel apart, so a
truncated episode never bootstraps from the next episode's first observation.
"""

cimport numpy as cnp

from kernels.checks cimport as_flags, as_fraction, as_index, as_real, check_out, share_memory
from kernels.types cimport f32, f64, real, u8

cnp.import_array()


# Cores. `truncated` is NULL where no time limit cuts the data, and `next_values` is not read then.

cdef inline real bootstrap(real next_value, const u8* done, const u8* truncated,
                           const real* next_values, Py_ssize_t t) noexcept nogil:
    """v'_t. Selects, no products: what must not count may be NaN."""
    if truncated != NULL and truncated[t]:
        next_value = next_values[t]
    return 0 if done[t] else next_value


cdef inline real trace(real decay, const u8* done, const u8* truncated, Py_ssize_t t) noexcept nogil:
    """gamma * lam, or 0 where the trace stops."""
    return 0 if done[t] or (truncated != NULL and truncated[t]) else decay


cdef void scan(Py_ssize_t n_steps, const real* rewards, const real* values, const u8* done,
               const u8* truncated, const real* next_values, real last_value, real gamma, real decay,
               real* advantages, real* returns) noexcept nogil:
    """One trajectory, four steps at a time.

    A_t = delta_t + c_t * A_{t+1} is a chain of one multiply and one add per step, which the processor can
    only wait for. Within four steps, e and p with A_i = e_i + p_i * A_{t+4} do not depend on the chain, so
    it advances once per four steps.
    """
    cdef Py_ssize_t t = n_steps
    cdef Py_ssize_t j
    cdef real advantage = 0
    cdef real next_value = last_value
    cdef real[4] e
    cdef real[4] p
    cdef real sum_, product, c
    while t & 3:
        t -= 1
        advantage = (rewards[t] + gamma * bootstrap(next_value, done, truncated, next_values, t)
                     - values[t] + trace(decay, done, truncated, t) * advantage)
        next_value = values[t]
        advantages[t] = advantage
        returns[t] = advantage + values[t]
    while t > 0:
        t -= 4
        sum_ = 0
        product = 1
        for j in range(3, -1, -1):
            c = trace(decay, done, truncated, t + j)
            sum_ = (rewards[t + j]
                    + gamma * bootstrap(next_value, done, truncated, next_values, t + j)
                    - values[t + j] + c * sum_)
            product = product * c
            next_value = values[t + j]
            e[j] = sum_
            p[j] = product
        for j in range(4):
            sum_ = e[j] + p[j] * advantage
            advantages[t + j] = sum_
            returns[t + j] = sum_ + values[t + j]
        advantage = e[0] + p[0] * advantage


cdef inline const u8* after(const u8* flags, Py_ssize_t n) noexcept nogil:
    """flags + n, where NULL stays NULL: it is what `truncated` is tested for."""
    if flags == NULL:
        return NULL
    return flags + n


cdef inline void row(Py_ssize_t n, const real* rewards, const real* values, const u8* done,
                     const u8* truncated, const real* next_values, const real* values_after,
                     const real* advantages_after, real gamma, real decay,
                     real* advantages, real* returns) noexcept nogil:
    """One step of all environments."""
    cdef Py_ssize_t i
    cdef real advantage
    if truncated == NULL:
        for i in range(n):
            advantage = (rewards[i] + gamma * (0 if done[i] else values_after[i]) - values[i]
                         + (0 if done[i] else decay) * advantages_after[i])
            advantages[i] = advantage
            returns[i] = advantage + values[i]
    else:
        for i in range(n):
            advantage = (
                rewards[i]
                + gamma * bootstrap(values_after[i], done, truncated, next_values, i)
                - values[i] + trace(decay, done, truncated, i) * advantages_after[i]
            )
            advantages[i] = advantage
            returns[i] = advantage + values[i]


cdef void sweep(Py_ssize_t n_steps, Py_ssize_t n, const real* rewards, const real* values,
                const u8* done, const u8* truncated, const real* next_values,
                const real* last_values, const real* zeros, real gamma, real decay,
                real* advantages, real* returns) noexcept nogil:
    """Time-major: rows from the last to the first, each vectorised over the environments."""
    cdef Py_ssize_t t, at
    cdef const real* values_after = last_values
    cdef const real* advantages_after = zeros
    for t in range(n_steps - 1, -1, -1):
        at = t * n
        row(n, rewards + at, values + at, done + at, after(truncated, at), next_values + at,
            values_after, advantages_after, gamma, decay, advantages + at, returns + at)
        values_after = values + at
        advantages_after = advantages + at


cdef void run(bint time_major, Py_ssize_t n_steps, Py_ssize_t n, const real* rewards,
              const real* values, const u8* done, const u8* truncated, const real* next_values,
              const real* last_values, const real* zeros, real gamma, real decay,
              real* advantages, real* returns) noexcept nogil:
    cdef Py_ssize_t i, at
    if time_major:
        sweep(n_steps, n, rewards, values, done, truncated, next_values, last_values, zeros,
              gamma, decay, advantages, returns)
        return
    for i in range(n):
        at = i * n_steps
        scan(n_steps, rewards + at, values + at, done + at, after(truncated, at), next_values + at,
             last_values[i], gamma, decay, advantages + at, returns + at)


# Wrappers.

cdef inline int same_shape(cnp.ndarray array, cnp.ndarray rewards, str where, str name) except -1:
    cdef int ndim = cnp.PyArray_NDIM(rewards)
    if (cnp.PyArray_NDIM(array) == ndim
            and cnp.PyArray_DIM(array, 0) == cnp.PyArray_DIM(rewards, 0)
            and cnp.PyArray_DIM(array, ndim - 1) == cnp.PyArray_DIM(rewards, ndim - 1)):
        return 0
    raise ValueError(
        f"{where}: {name} must have the shape of rewards {(<object>rewards).shape}, "
        f"got {(<object>array).shape}"
    )


cdef (Py_ssize_t, Py_ssize_t) batch_shape(cnp.ndarray rewards, object n_steps,
                                          cnp.ndarray last_values, str where):
    """Return (T, N) of a batch after checking that `n_steps` and `last_values` agree with it."""
    cdef Py_ssize_t size = cnp.PyArray_SIZE(rewards)
    cdef Py_ssize_t length, n
    shape = (<object>rewards).shape
    if cnp.PyArray_NDIM(last_values) != 1:
        raise ValueError(
            f"{where}: last_values must have shape (N,), got {(<object>last_values).shape}"
        )
    if cnp.PyArray_NDIM(rewards) == 2:
        length, n = cnp.PyArray_DIM(rewards, 0), cnp.PyArray_DIM(rewards, 1)
        if n_steps is not None and as_index(n_steps, where, "n_steps") != length:
            raise ValueError(
                f"{where}: n_steps must be {length} for rewards of shape (T, N) = {shape}, got "
                f"{n_steps}; pass None, or flat env-major arrays"
            )
    else:
        if n_steps is None:
            raise TypeError(f"{where}: n_steps must be given for flat (env-major) rewards, got None")
        wanted = as_index(n_steps, where, "n_steps")
        if wanted < 0 or (size % wanted if wanted else size):
            raise ValueError(
                f"{where}: n_steps must divide the length of the flat rewards {size}, got {wanted}"
            )
        length = wanted
        n = size // length if length else cnp.PyArray_DIM(last_values, 0)
    if cnp.PyArray_DIM(last_values, 0) != n:
        raise ValueError(
            f"{where}: last_values must have one entry per environment, shape ({n},), got "
            f"{(<object>last_values).shape}"
        )
    return length, n


cdef tuple estimate(str where, int type_num, object rewards, object values, object dones,
                    object last, bint single, object n_steps, object gamma, object lam,
                    object truncated, object next_values, object out):
    """Check the arguments of the three functions, allocate, and run the core once."""
    cdef f64 gamma_ = as_fraction(gamma, where, "gamma")
    cdef f64 decay = gamma_ * as_fraction(lam, where, "lam")
    cdef cnp.ndarray r = as_real(rewards, type_num, where, "rewards")
    cdef int ndim = cnp.PyArray_NDIM(r)
    cdef cnp.ndarray v, d, advantages, returns
    cdef cnp.ndarray last_values = None, cut = None, nexts = None, zeros = None
    cdef bint time_major = ndim == 2
    cdef Py_ssize_t length, n
    cdef f64 single_last = 0.0
    cdef void* last_data
    if ndim != 1 and (single or ndim != 2):
        raise ValueError(
            f"{where}: rewards must be 1-D{'' if single else ' (env-major) or 2-D (T, N)'}, "
            f"got shape {(<object>r).shape}" + ("; use compute_gae_batched" if single and ndim == 2 else "")
        )
    v = as_real(values, type_num, where, "values")
    same_shape(v, r, where, "values")
    d = as_flags(dones, where, "dones")
    same_shape(d, r, where, "dones")
    if truncated is not None:
        if next_values is None:
            raise ValueError(
                f"{where}: next_values must be given with truncated (the values of the true final "
                "observations), got None"
            )
        cut = as_flags(truncated, where, "truncated")
        same_shape(cut, r, where, "truncated")
        nexts = as_real(next_values, type_num, where, "next_values")
        same_shape(nexts, r, where, "next_values")

    if single:
        length, n = cnp.PyArray_DIM(r, 0), 1
        try:
            single_last = last
        except TypeError as e:
            raise TypeError(
                f"{where}: last_value must be a number, got {type(last).__name__}"
            ) from e
        last_data = &single_last
    else:
        last_values = as_real(last, type_num, where, "last_values")
        length, n = batch_shape(r, n_steps, last_values, where)
        last_data = cnp.PyArray_DATA(last_values)

    if out is None:
        advantages = cnp.PyArray_EMPTY(ndim, cnp.PyArray_DIMS(r), type_num, 0)
        returns = cnp.PyArray_EMPTY(ndim, cnp.PyArray_DIMS(r), type_num, 0)
        out = (advantages, returns)
    else:
        if not isinstance(out, tuple) or len(out) != 2:
            raise TypeError(f"{where}: out must be a tuple (advantages, returns), got {out!r}")
        dtype = "float32" if type_num == cnp.NPY_FLOAT32 else "float64"
        shape = (<object>r).shape
        check_out(out[0], type_num, dtype, shape, where, "out[0]")
        check_out(out[1], type_num, dtype, shape, where, "out[1]")
        advantages, returns = out
        for source in (r, v, d, last_values, cut, nexts, returns):
            if source is not None and (
                share_memory(advantages, source)
                or (source is not returns and share_memory(returns, source))
            ):
                raise ValueError(f"{where}: out must be two arrays that share no memory with an input")
    if time_major:
        zeros = cnp.PyArray_ZEROS(1, cnp.PyArray_DIMS(r) + 1, type_num, 0)

    cdef const void* r_data = cnp.PyArray_DATA(r)
    cdef const void* v_data = cnp.PyArray_DATA(v)
    cdef const u8* done = <const u8*>cnp.PyArray_DATA(d)
    # Without truncations next_values is never read, and `zeros` only by the time-major sweep: then any
    # array stands in.
    cdef const u8* cut_data = NULL
    if cut is not None:
        cut_data = <const u8*>cnp.PyArray_DATA(cut)
    cdef const void* nexts_data = cnp.PyArray_DATA(v if nexts is None else nexts)
    cdef const void* zero_data = cnp.PyArray_DATA(v if zeros is None else zeros)
    cdef void* adv_data = cnp.PyArray_DATA(advantages)
    cdef void* ret_data = cnp.PyArray_DATA(returns)
    with nogil:
        if type_num == cnp.NPY_FLOAT64:
            run[f64](time_major, length, n, <const f64*>r_data, <const f64*>v_data, done, cut_data,
                     <const f64*>nexts_data, <const f64*>last_data, <const f64*>zero_data,
                     gamma_, decay, <f64*>adv_data, <f64*>ret_data)
        else:
            run[f32](time_major, length, n, <const f32*>r_data, <const f32*>v_data, done, cut_data,
                     <const f32*>nexts_data, <const f32*>last_data, <const f32*>zero_data,
                     <f32>gamma_, <f32>decay, <f32*>adv_data, <f32*>ret_data)
    return out


def compute_gae(rewards, values, dones, last_value, gamma, lam, *, truncated=None, next_values=None,
                out=None):
    """Estimate advantages and returns of one trajectory, in float64.

    Parameters
    ----------
    rewards, values
        (T,) r_t and V(s_t). Other dtypes and layouts are converted.
    dones
        (T,) true terminations, 0 or 1 as bool, uint8 or float: nothing bootstraps across them.
    last_value
        V of the observation after the last step; not used if that step is done or truncated.
    gamma, lam
        Discount and GAE's lambda, both in [0, 1]. lam=0 is the TD residual, lam=1 the Monte-Carlo return.
    truncated
        (T,) time limits, 0 or 1: the trace stops, and the step bootstraps from `next_values`.
    next_values
        (T,) V of the true next observation; read only where truncated and not done.
    out
        (advantages, returns) to write into, float64 and C-contiguous, sharing no memory with the inputs.

    Returns
    -------
    advantages, returns
        (T,) float64 each; returns = advantages + values.

    Raises
    ------
    ValueError
        Shapes that differ, gamma or lam outside [0, 1], flags other than 0 and 1, truncated without
        next_values, an unusable `out`.
    TypeError
        What cannot be read as numbers.

    References
    ----------
    Schulman et al. 2016, "High-dimensional continuous control using generalized advantage estimation",
    arXiv:1506.02438, eq. 16. Time limits: Pardo et al. 2018, arXiv:1712.00378, sec. 2.3.
    """
    return estimate("compute_gae", cnp.NPY_FLOAT64, rewards, values, dones, last_value, True, None,
                    gamma, lam, truncated, next_values, out)


def compute_gae_batched(rewards, values, dones, last_values, n_steps, gamma, lam, *, truncated=None,
                        next_values=None, out=None):
    """Estimate advantages and returns of N environments over T steps, in float64.

    As `compute_gae`, for arrays of either layout; the result has the layout of `rewards`:

    - flat (N * T,): env-major, [env0_step0, env0_step1, ..., env1_step0, ...];
    - (T, N): time-major, one row per step.

    Parameters
    ----------
    last_values
        (N,) V of the observation after the last step of each environment.
    n_steps
        T; None is allowed for (T, N) arrays.

    Raises
    ------
    ValueError, TypeError
        As `compute_gae`, and for an `n_steps` or a length of `last_values` that does not fit `rewards`.
    """
    return estimate("compute_gae_batched", cnp.NPY_FLOAT64, rewards, values, dones, last_values, False,
                    n_steps, gamma, lam, truncated, next_values, out)


def compute_gae_batched_f32(rewards, values, dones, last_values, n_steps, gamma, lam, *,
                            truncated=None, next_values=None, out=None):
    """Estimate advantages and returns of N environments over T steps, all in float32.

    Arguments, layouts and errors as for `compute_gae_batched`. Half the memory traffic, about 1e-6 relative.
    """
    return estimate("compute_gae_batched_f32", cnp.NPY_FLOAT32, rewards, values, dones, last_values,
                    False, n_steps, gamma, lam, truncated, next_values, out)
