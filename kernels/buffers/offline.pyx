"""Fixed datasets for offline reinforcement learning, which are only read."""

from functools import partial

import numpy as np

from rlox.kernels.buffers.action_masks import read_masks, require_legal
from rlox.kernels.buffers.batch import Batch

cimport numpy as cnp

from rlox.kernels.buffers.dataset cimport Dataset, Trajectories, sample_rows, sample_windows, standardise
from rlox.kernels.buffers.gather cimport draw_indices
from rlox.kernels.buffers.rows cimport as_size, first_not_finite, read_only, real_array, seed_key
from rlox.kernels.checks cimport as_array, as_flags, as_index, show
from rlox.kernels.philox cimport DOMAIN_OFFLINE_TRANSITIONS
from rlox.kernels.types cimport f32, f64, i64, u8, u64

cnp.import_array()

ctypedef fused stored:
    f32
    u8

# As in TD3+BC (Fujimoto and Gu 2021, arXiv:2106.06860, section 5): keeps constant features finite.
cdef f64 STD_EPS = 1e-3

# Below this many bytes a sample takes a few microseconds, too short for another thread to use.
cdef Py_ssize_t RELEASE_GIL_FROM = 1 << 15

# Rows of a chunk: it stays in the cache between the two passes over it.
cdef Py_ssize_t CHUNK_BYTES = 1 << 15


cdef void moments(const stored* rows, Py_ssize_t n, Py_ssize_t width, f64* mean, f64* square,
                  f64* sums, f64* squares) noexcept nogil:
    """Mean and sum of squared deviations of each column, chunk by chunk.

    Deviations within a chunk are from its mean; chunks are merged as in Chan, Golub and LeVeque 1983, eq. 1.5.
    """
    cdef Py_ssize_t per = max(<Py_ssize_t>1, CHUNK_BYTES // (width * <Py_ssize_t>sizeof(stored)))
    cdef Py_ssize_t start, stop, i, j
    cdef f64 delta, m
    for j in range(width):
        mean[j] = 0
        square[j] = 0
    start = 0
    while start < n:
        stop = min(start + per, n)
        m = <f64>(stop - start)
        for j in range(width):
            sums[j] = 0
            squares[j] = 0
        for i in range(start, stop):
            for j in range(width):
                sums[j] += <f64>rows[i * width + j]
        for j in range(width):
            sums[j] /= m
        for i in range(start, stop):
            for j in range(width):
                delta = <f64>rows[i * width + j] - sums[j]
                squares[j] += delta * delta
        for j in range(width):
            delta = sums[j] - mean[j]
            mean[j] += delta * (m / <f64>stop)
            square[j] += squares[j] + delta * delta * (<f64>start * m / <f64>stop)
        start = stop


cdef int rows_of(object array, Py_ssize_t n, str where, str name) except -1:
    if array.shape != (n,) and array.shape != (n, 1):
        raise ValueError(
            f"{where}: {name} must have one entry per transition, shape ({n},) as rewards, got {array.shape}"
        )
    return 0


cdef class OfflineDatasetBuffer:
    """A fixed dataset of transitions, for TD3+BC, IQL, CQL, behavioural cloning and Decision Transformers.

    A C-contiguous array of the right dtype (float32, or uint8 for images, or bool or uint8 for flags) is **kept, not
    copied**, so that a memory-mapped file larger than memory works. It must not be changed afterwards; this class
    returns it only as read-only views. Other arrays are converted, which copies them. All rows are read once to check
    them; with `lazy`, only the flags are read at first, and every sample is checked instead.

    Transitions must be in the order in which they happened. An episode ends where `terminated` or `truncated`
    is set; the transitions after the last end count as one more episode, which is unfinished.

    Parameters
    ----------
    obs, next_obs
        (N, D), (N, ...) or flat (N * D,). float32, or both uint8 for images; other real dtypes are converted to
        float32.
    actions
        (N, A), or flat (N * A,). Discrete actions are integers (N,) or (N, 1), stored as float32.
    rewards
        (N,) or (N, 1).
    terminated, truncated
        (N,) or (N, 1) flags 0 and 1 as bool, uint8 or any other numeric dtype.
    normalize
        Whether to sample observations as ``(obs - obs_mean) / obs_std``, both per feature.
    obs_dim, act_dim
        D and A. They follow from the arrays; if given, the arrays must match them.
    n_actions
        Number of discrete actions, which are numbered from 0. The default is the largest action plus one if `actions`
        are non-negative integers, else None, for continuous actions.
    lazy
        Assume that obs, next_obs, actions and rewards are finite until a sample shows otherwise. For files that
        were checked when they were written and are too large to be read before use.
    obs_mean, obs_std
        Values for the attributes of these names, if they are already known. By default they are computed when they are
        first needed.
    metadata
        Further information on the data, such as its environment. It is kept but not used.
    action_masks, next_action_masks
        (N, n_actions) flags of the legal actions in `obs` and in `next_obs`, the latter only with the former. The
        recorded actions must be legal. None if all actions were.

    Attributes
    ----------
    obs_shape, obs_dim, act_dim
        Shape of one observation, how many numbers it has, and A.
    n_actions
        The number of discrete actions; None for continuous ones.
    metadata
        The dict that was given, or an empty one.
    normalized
        Whether samples are normalised.
    obs_mean, obs_std
        (\*obs_shape) float32: mean of `obs`, and standard deviation **plus 1e-3** (as in TD3+BC, so that a constant
        feature is normalised to 0).
    masked
        Whether there are masks of legal actions.

    Raises
    ------
    ValueError
        If there are no transitions, lengths or shapes do not match, flags are not 0 and 1, there are NaN or infinities
        (the message names the array and the row), or `normalize` is used with uint8 observations.
    TypeError
        If an argument cannot be converted to numbers, or only one of `obs` and `next_obs` is uint8.

    References
    ----------
    Fujimoto and Gu 2021, "A minimalist approach to offline reinforcement learning", arXiv:2106.06860,
    section 5 (normalisation). Chen et al. 2021, "Decision Transformer", arXiv:2106.01345.
    """

    cdef Dataset data
    # These own the memory that `data` points into.
    cdef object obs, next_obs, actions, rewards, terminated, truncated, flags, ends, to_go, mean, std, inverse
    cdef dict masks  # by the names of the constructor
    cdef dict described
    cdef f64 to_go_gamma
    cdef bint images, lazy
    cdef readonly bint normalized
    cdef readonly tuple obs_shape
    cdef readonly Py_ssize_t act_dim
    cdef readonly object n_actions
    cdef readonly dict metadata

    def __init__(self, obs, next_obs, actions, rewards, terminated, truncated, normalize=False, *,
                 obs_dim=None, act_dim=None, n_actions=None, lazy=False, obs_mean=None, obs_std=None,
                 metadata=None, action_masks=None, next_action_masks=None) -> None:
        self.load("OfflineDatasetBuffer", obs, next_obs, actions, rewards, terminated, truncated, normalize,
                  obs_dim, act_dim, n_actions, lazy, obs_mean, obs_std, metadata, action_masks, next_action_masks)

    cdef int load(self, str where, object obs, object next_obs, object actions, object rewards,
                  object terminated, object truncated, object normalize, object obs_dim, object act_dim,
                  object n_actions, object lazy, object obs_mean, object obs_std, object metadata,
                  object action_masks, object next_action_masks) except -1:
        """Check everything, then store it; an error leaves the object unchanged."""
        for name, value in (("normalize", normalize), ("lazy", lazy)):
            if not isinstance(value, (bool, np.bool_)):
                raise TypeError(f"{where}: {name} must be True or False, got {value!r}")
        if metadata is not None and not isinstance(metadata, dict):
            raise TypeError(f"{where}: metadata must be a dict, got {type(metadata).__name__}")
        for name, value in (("obs", obs), ("next_obs", next_obs), ("actions", actions), ("rewards", rewards),
                            ("terminated", terminated), ("truncated", truncated)):
            if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
                count = np.ma.count_masked(value)
                raise ValueError(f"{where}: {name} must have no masked values, got {count} of them")
        rewards = real_array(rewards, where, "rewards")
        if rewards.ndim not in (1, 2) or (rewards.ndim == 2 and rewards.shape[1] != 1):
            raise ValueError(f"{where}: rewards must have shape (N,), got {rewards.shape}")
        cdef Py_ssize_t n = rewards.shape[0]
        if n == 0:
            raise ValueError(f"{where}: rewards must have at least one transition, got none")
        obs = columns(real_array(obs, where, "obs"), n, obs_dim, where, "obs", "obs_dim")
        next_obs = real_array(next_obs, where, "next_obs")
        if next_obs.dtype != obs.dtype:
            raise TypeError(f"{where}: next_obs must have the dtype of obs ({obs.dtype}), got {next_obs.dtype}")
        if next_obs.ndim == 1:
            next_obs = columns(next_obs, n, None, where, "next_obs", "obs_dim")
        if next_obs.shape != obs.shape and next_obs.size == obs.size and 2 in (obs.ndim, next_obs.ndim):
            # One of the two is flat or has rows of numbers.
            next_obs = next_obs.reshape(obs.shape) if next_obs.shape[0] == n else next_obs
        if next_obs.shape != obs.shape:
            raise ValueError(f"{where}: next_obs must have the shape of obs {obs.shape}, got {next_obs.shape}")
        integers = as_array(actions, where, "actions").dtype.kind in "iu"
        actions = real_array(actions, where, "actions")
        actions = columns(actions, n, act_dim, where, "actions", "act_dim")
        if actions.ndim != 2:
            raise ValueError(f"{where}: actions must have shape (N, A) or (N,), got {actions.shape}")
        if n_actions is None and action_masks is not None:
            n_actions = np.shape(action_masks)[1] if np.ndim(action_masks) == 2 else None
        n_actions = discrete(actions, integers, n_actions, lazy, where)
        masks = read_masks({"action_masks": action_masks, "next_action_masks": next_action_masks}, actions, n_actions,
                           lazy, where)
        terminated = (<object>as_flags(terminated, where, "terminated")).view(np.uint8)
        truncated = (<object>as_flags(truncated, where, "truncated")).view(np.uint8)
        rows_of(terminated, n, where, "terminated")
        rows_of(truncated, n, where, "truncated")
        images = obs.dtype == np.uint8
        if images and normalize:
            raise ValueError(
                f"{where}: normalize must be False for uint8 observations; scale them by 1/255 in the network"
            )
        if not lazy:
            require_finite(obs, next_obs, actions, rewards, where)
        mean = given_moment(obs_mean, obs.shape[1:], False, where, "obs_mean")
        std = given_moment(obs_std, obs.shape[1:], True, where, "obs_std")
        if (mean is None) != (std is None):
            raise ValueError(f"{where}: obs_mean and obs_std must be given together, got one of them")
        flags = terminated.ravel() + 2 * truncated.ravel()
        ends = np.flatnonzero(flags) + 1
        if not len(ends) or ends.max() != n:
            ends = np.append(ends, n)

        self.images, self.lazy = images, lazy
        self.normalized = normalize
        self.n_actions, self.metadata, self.masks = n_actions, metadata or {}, masks
        self.obs_shape = obs.shape[1:]
        self.act_dim = actions.shape[1]
        self.obs, self.next_obs, self.actions = read_only(obs), read_only(next_obs), read_only(actions)
        self.rewards = read_only(rewards.ravel())
        self.terminated, self.truncated = read_only(terminated.ravel()), read_only(truncated.ravel())
        self.ends = np.ascontiguousarray(ends, np.int64)
        self.flags, self.described = flags, None
        self.to_go = None
        self.mean, self.std = mean, std
        self.inverse = None if std is None else inverse_of(std)
        self.data = Dataset(
            n=n,
            obs_bytes=self.obs[0].nbytes,
            obs_size=self.obs[0].size,
            act_dim=self.act_dim,
            obs=<const char*>cnp.PyArray_DATA(self.obs),
            next_obs=<const char*>cnp.PyArray_DATA(self.next_obs),
            actions=<const f32*>cnp.PyArray_DATA(self.actions),
            rewards=<const f32*>cnp.PyArray_DATA(self.rewards),
            terminated=<const u8*>cnp.PyArray_DATA(self.terminated),
            truncated=<const u8*>cnp.PyArray_DATA(self.truncated),
            flags=<const u8*>cnp.PyArray_DATA(self.flags),
            mean=NULL,
            inverse=NULL,
            n_episodes=len(self.ends),
            ends=<const i64*>cnp.PyArray_DATA(self.ends),
        )
        if self.normalized:
            self.measure()
            self.data.mean = <const f32*>cnp.PyArray_DATA(self.mean)
            self.data.inverse = <const f32*>cnp.PyArray_DATA(self.inverse)
        return 0

    cdef int measure(self) except -1:
        """Compute mean and standard deviation of the observations, once."""
        if self.mean is not None:
            return 0
        cdef Py_ssize_t width = self.data.obs_size
        cdef cnp.ndarray scratch = np.empty((4, width))
        cdef f64* work = <f64*>cnp.PyArray_DATA(scratch)
        with nogil:
            if self.images:
                moments[u8](<const u8*>self.data.obs, self.data.n, width, work, work + width, work + 2 * width,
                            work + 3 * width)
            else:
                moments[f32](<const f32*>self.data.obs, self.data.n, width, work, work + width, work + 2 * width,
                             work + 3 * width)
        std = np.sqrt(scratch[1] / self.data.n) + STD_EPS
        self.std = read_only(std.astype(np.float32).reshape(self.obs_shape))
        self.inverse = inverse_of(self.std)
        self.mean = read_only(scratch[0].astype(np.float32).reshape(self.obs_shape))
        return 0

    def __len__(self) -> int:
        return self.data.n

    def __repr__(self) -> str:
        return (f"OfflineDatasetBuffer({self.data.n} transitions, {self.data.n_episodes} episodes, "
                f"obs_shape={self.obs_shape}, act_dim={self.act_dim}, normalize={bool(self.normalized)})")

    def __reduce__(self):
        state = self.get_state()
        names = ("obs", "next_obs", "actions", "rewards", "terminated", "truncated")
        arrays = [state.pop(name) for name in names]
        normalize = bool(state.pop("normalize"))
        known = {"lazy": bool(self.lazy), "metadata": self.metadata, "obs_mean": self.mean, "obs_std": self.std}
        return partial(OfflineDatasetBuffer, **known, **state), (*arrays, normalize)

    @property
    def masked(self) -> bool:
        return bool(self.masks)

    @property
    def obs_dim(self) -> int:
        return self.data.obs_size

    @property
    def obs_mean(self) -> np.ndarray:
        self.measure()
        return self.mean

    @property
    def obs_std(self) -> np.ndarray:
        self.measure()
        return self.std

    def len(self) -> int:
        """Return the number of transitions, like ``len(buffer)``."""
        return self.data.n

    def n_episodes(self) -> int:
        """Return the number of episodes, including an unfinished last one."""
        return self.data.n_episodes

    def stats(self) -> dict:
        """Describe the dataset.

        Returns
        -------
        dict
            - ``n_transitions``, ``n_episodes``, ``obs_dim``, ``act_dim``: ints;
            - ``mean_return``, ``std_return``, ``min_return``, ``max_return``: of the episodes' undiscounted
              returns, including an unfinished last episode (``std_return`` divides by n_episodes - 1, and is 0
              for one episode);
            - ``mean_episode_length``, ``min_episode_length``, ``max_episode_length``;
            - ``n_terminated``, ``n_truncated``: number of set flags; ``unfinished``: bool, whether the last episode
              has no end;
            - ``mean_reward``; ``obs_mean``, ``obs_std``: as the attributes.
        """
        if self.described is None:
            self.describe()
        return self.described.copy()

    cdef int describe(self) except -1:
        starts = np.concatenate([[0], self.ends[: len(self.ends) - 1]])
        returns = np.add.reduceat(self.rewards, starts, dtype=np.float64)
        lengths = self.ends - starts
        last = len(self.rewards) - 1
        self.described = {
            "n_transitions": int(self.data.n),
            "n_episodes": int(self.data.n_episodes),
            "obs_dim": int(self.data.obs_size),
            "act_dim": int(self.act_dim),
            "mean_return": float(returns.mean()),
            "std_return": float(returns.std(ddof=1)) if len(returns) > 1 else 0.0,
            "min_return": float(returns.min()),
            "max_return": float(returns.max()),
            "mean_episode_length": float(lengths.mean()),
            "min_episode_length": int(lengths.min()),
            "max_episode_length": int(lengths.max()),
            "n_terminated": int(np.count_nonzero(self.terminated)),
            "n_truncated": int(np.count_nonzero(self.truncated)),
            "unfinished": not (self.terminated[last] or self.truncated[last]),
            "mean_reward": float(self.rewards.mean(dtype=np.float64)),
            "obs_mean": self.obs_mean,
            "obs_std": self.obs_std,
        }
        return 0

    def normalize(self, obs) -> np.ndarray:
        """Return observations in the form that a policy trained on this dataset expects.

        Parameters
        ----------
        obs
            (..., \*obs_shape) real numbers. NaN stays NaN.

        Returns
        -------
        numpy.ndarray
            float32 of the same shape: ``(obs - obs_mean) / obs_std``.

        Raises
        ------
        ValueError
            If the buffer was created with ``normalize=False``, or `obs` has another shape.
        TypeError
            If `obs` cannot be converted to numbers.
        """
        where = "OfflineDatasetBuffer.normalize"
        if not self.normalized:
            raise ValueError(f"{where}: the buffer must be created with normalize=True")
        cdef cnp.ndarray array = np.array(real_array(obs, where, "obs"), np.float32, order="C")
        shape = (<object>array).shape
        if shape[max(0, len(shape) - len(self.obs_shape)):] != self.obs_shape:
            raise ValueError(f"{where}: obs must have shape (..., {self.obs_dim}), got {shape}")
        standardise(<f32*>cnp.PyArray_DATA(array), cnp.PyArray_SIZE(array) // self.data.obs_size,
                    self.data.obs_size, self.data.mean, self.data.inverse)
        return array

    def sample(self, batch_size, seed):
        """Draw transitions independently and uniformly, with replacement.

        Parameters
        ----------
        batch_size
            B, at least 1.
        seed
            0 <= seed < 2**64. The same dataset and seed give the same batch; a smaller B gives the beginning of that
            batch.

        Returns
        -------
        Batch
            New arrays ``obs``, ``next_obs`` (B, \*obs_shape) float32 (normalised if the buffer is) or
            uint8, ``actions`` (B, A) float32, ``rewards`` (B,) float32, ``terminated``, ``truncated`` (B,)
            bool; if there are masks, ``masks`` and ``next_masks`` (B, n_actions) bool.

        Raises
        ------
        ValueError, TypeError
            If `batch_size` or `seed` is out of range or not an integer.
        """
        cdef Py_ssize_t b = as_size(batch_size, "OfflineDatasetBuffer.sample", "batch_size")
        cdef u64 key = seed_key(seed, "OfflineDatasetBuffer.sample")
        cdef cnp.ndarray obs = self.empty_obs(b, -1)
        cdef cnp.ndarray next_obs = self.empty_obs(b, -1)
        cdef cnp.npy_intp[2] shape
        shape[0], shape[1] = b, self.act_dim
        cdef cnp.ndarray actions = cnp.PyArray_EMPTY(2, shape, cnp.NPY_FLOAT32, 0)
        cdef cnp.ndarray rewards = cnp.PyArray_EMPTY(1, shape, cnp.NPY_FLOAT32, 0)
        cdef cnp.ndarray terminated = cnp.PyArray_EMPTY(1, shape, cnp.NPY_BOOL, 0)
        cdef cnp.ndarray truncated = cnp.PyArray_EMPTY(1, shape, cnp.NPY_BOOL, 0)
        cdef char* o = <char*>cnp.PyArray_DATA(obs)
        cdef char* p = <char*>cnp.PyArray_DATA(next_obs)
        cdef f32* a = <f32*>cnp.PyArray_DATA(actions)
        cdef f32* r = <f32*>cnp.PyArray_DATA(rewards)
        cdef u8* d = <u8*>cnp.PyArray_DATA(terminated)
        cdef u8* t = <u8*>cnp.PyArray_DATA(truncated)
        if b * self.data.obs_bytes < RELEASE_GIL_FROM:
            sample_rows(&self.data, key, b, o, p, a, r, d, t)
        else:
            with nogil:
                sample_rows(&self.data, key, b, o, p, a, r, d, t)
        if self.lazy and not (
            first_not_finite(r, b) < 0
            and first_not_finite(a, b * self.act_dim) < 0
            and (self.images or (first_not_finite(<f32*>o, b * self.data.obs_size) < 0
                                 and first_not_finite(<f32*>p, b * self.data.obs_size) < 0))
        ):
            self.refuse("OfflineDatasetBuffer.sample")
        columns = {"obs": obs, "next_obs": next_obs, "actions": actions, "rewards": rewards,
                   "terminated": terminated, "truncated": truncated}
        if self.masks:
            self.add_masks(columns, key, b)
        return Batch(columns)

    cdef int add_masks(self, dict columns, u64 key, Py_ssize_t b) except -1:
        """Add the masks of the rows that `sample` draws with this key."""
        cdef cnp.ndarray at = np.empty(b, np.int64)
        draw_indices(<u64>self.data.n, key, 0, DOMAIN_OFFLINE_TRANSITIONS, <i64*>cnp.PyArray_DATA(at), b)
        for name, masks in self.masks.items():
            columns[name.replace("action_", "")] = masks.take(at, 0).view(np.bool_)
        if self.lazy and not np.take_along_axis(columns["masks"], columns["actions"].astype(np.int64), 1).all():
            require_legal(self.masks["action_masks"], self.actions, "OfflineDatasetBuffer.sample")
        return 0

    def sample_trajectories(self, batch_size, seq_len, seed, *, gamma=1.0, start="transitions"):
        """Draw sequences of consecutive steps, each within one episode, with replacement.

        Parameters
        ----------
        batch_size, seq_len
            B and T, at least 1.
        seed
            0 <= seed < 2**64, as for `sample`.
        gamma
            Discount of ``returns_to_go``, in [0, 1]. They are computed over the whole dataset when a `gamma` is first
            used; those for the last `gamma` are kept.
        start
            ``"transitions"``: the first step is uniform over all transitions, so that long episodes count
            for more, as in the Decision Transformer. ``"episodes"``: the episode is uniform, then the first step is
            uniform among those from which T steps remain (the beginning, if the episode is shorter than T).

        Returns
        -------
        Batch
            New arrays ``obs`` (B, T, \*obs_shape), ``actions`` (B, T, A), ``rewards``, ``returns_to_go``
            (B, T) float32, ``timesteps`` (B, T) int64, ``terminated``, ``truncated``, ``mask`` (B, T) bool.
            If the episode ends before T steps, the rest is padding: ``mask`` False, everything else 0.
            ``timesteps`` count from the beginning of the episode. ``returns_to_go`` sum the rewards from that step to
            the end of the episode (not of the sequence), or to the end of the data for an unfinished episode.

        Raises
        ------
        ValueError, TypeError
            If an argument is out of range or of the wrong kind.
        """
        where = "OfflineDatasetBuffer.sample_trajectories"
        cdef Py_ssize_t b = as_size(batch_size, where, "batch_size")
        cdef Py_ssize_t length = as_size(seq_len, where, "seq_len")
        cdef u64 key = seed_key(seed, where)
        if start not in ("transitions", "episodes"):
            raise ValueError(f"{where}: start must be 'transitions' or 'episodes', got {start!r}")
        cdef f64 discount
        if isinstance(gamma, float):
            discount = gamma
        elif isinstance(gamma, (str, bytes, bool)):
            raise TypeError(f"{where}: gamma must be a number, got {show(gamma)}")
        else:
            try:
                discount = float(gamma)
            except Exception as e:
                raise TypeError(f"{where}: gamma must be a number, got {type(gamma).__name__}") from e
        if not 0.0 <= discount <= 1.0:
            raise ValueError(f"{where}: gamma must lie in [0, 1], got {show(gamma)}")
        if b > (1 << 40) // length:
            raise ValueError(f"{where}: batch_size * seq_len must be at most 2**40, got {b} * {length}")
        self.sum_rewards(discount)
        cdef bint by_episode = start == "episodes"
        cdef cnp.npy_intp[3] shape
        shape[0], shape[1], shape[2] = b, length, self.act_dim
        cdef cnp.ndarray obs = self.empty_obs(b, length)
        cdef cnp.ndarray actions = cnp.PyArray_EMPTY(3, shape, cnp.NPY_FLOAT32, 0)
        cdef cnp.ndarray rewards = cnp.PyArray_EMPTY(2, shape, cnp.NPY_FLOAT32, 0)
        cdef cnp.ndarray returns_to_go = cnp.PyArray_EMPTY(2, shape, cnp.NPY_FLOAT32, 0)
        cdef cnp.ndarray timesteps = cnp.PyArray_EMPTY(2, shape, cnp.NPY_INT64, 0)
        cdef cnp.ndarray terminated = cnp.PyArray_EMPTY(2, shape, cnp.NPY_BOOL, 0)
        cdef cnp.ndarray truncated = cnp.PyArray_EMPTY(2, shape, cnp.NPY_BOOL, 0)
        cdef cnp.ndarray mask = cnp.PyArray_EMPTY(2, shape, cnp.NPY_BOOL, 0)
        cdef Trajectories out = Trajectories(
            obs=<char*>cnp.PyArray_DATA(obs),
            actions=<f32*>cnp.PyArray_DATA(actions),
            rewards=<f32*>cnp.PyArray_DATA(rewards),
            returns_to_go=<f32*>cnp.PyArray_DATA(returns_to_go),
            timesteps=<i64*>cnp.PyArray_DATA(timesteps),
            terminated=<u8*>cnp.PyArray_DATA(terminated),
            truncated=<u8*>cnp.PyArray_DATA(truncated),
            mask=<u8*>cnp.PyArray_DATA(mask),
        )
        # A reference of its own: another thread may use another gamma while this one copies without the GIL.
        cdef cnp.ndarray sums = self.to_go
        cdef const f32* to_go = <const f32*>cnp.PyArray_DATA(sums)
        with nogil:
            sample_windows(&self.data, to_go, key, b, length, by_episode, &out)
        if self.lazy and not (
            first_not_finite(out.returns_to_go, b * length) < 0
            and first_not_finite(out.actions, b * length * self.act_dim) < 0
            and (self.images or first_not_finite(<f32*>out.obs, b * length * self.data.obs_size) < 0)
        ):
            self.refuse(where)
        return Batch({"obs": obs, "actions": actions, "rewards": rewards, "returns_to_go": returns_to_go,
                           "timesteps": timesteps, "terminated": terminated, "truncated": truncated, "mask": mask})

    def get_state(self) -> dict:
        """Return the constructor's arrays (read-only, not copied), masks only if there are any, ``normalize`` as 0 or
        1, and ``n_actions`` if actions are discrete. Moments of observations and metadata are no part of it."""
        return {"obs": self.obs, "next_obs": self.next_obs, "actions": self.actions, "rewards": self.rewards,
                "terminated": self.terminated, "truncated": self.truncated, "normalize": int(self.normalized),
                **self.masks, **({} if self.n_actions is None else {"n_actions": self.n_actions})}

    def set_state(self, dict state not None) -> None:
        """Replace the dataset by a state from `get_state`; its arrays are kept, like those of the constructor.

        Raises ValueError for other keys and in the same cases as the constructor, and then leaves the buffer unchanged.
        """
        where = "OfflineDatasetBuffer.set_state"
        keys = ["obs", "next_obs", "actions", "rewards", "terminated", "truncated", "normalize"]
        optional = ("action_masks", "next_action_masks", "n_actions")
        if set(state) != {*keys, *(name for name in optional if name in state)}:
            raise ValueError(
                f"{where}: state must have the keys {', '.join(keys)}, got {sorted(map(str, state))}; "
                "pass what get_state returned"
            )
        if as_index(state["normalize"], where, "normalize") not in (0, 1):
            raise ValueError(f"{where}: normalize must be 0 or 1, got {state['normalize']}")
        self.load(where, state["obs"], state["next_obs"], state["actions"], state["rewards"], state["terminated"],
                  state["truncated"], bool(state["normalize"]), None, None, state.get("n_actions"), False,
                  None, None, None,
                  state.get("action_masks"), state.get("next_action_masks"))

    cdef int refuse(self, str where) except -1:
        """Raise for a sample that was not finite; the message names the first such row of the dataset."""
        require_finite(self.obs, self.next_obs, self.actions, self.rewards, where)
        raise ValueError(f"{where}: obs_mean and obs_std must be those of the dataset, since observations overflow")

    cdef cnp.ndarray empty_obs(self, Py_ssize_t b, Py_ssize_t length):
        """Return an empty array for observations (b, length, ...), or (b, ...) if the length is negative."""
        cdef cnp.npy_intp[3] shape
        if len(self.obs_shape) == 1:
            shape[0], shape[1], shape[2] = b, length, self.data.obs_size
            if length < 0:
                shape[1] = self.data.obs_size
            return cnp.PyArray_EMPTY(2 if length < 0 else 3, shape, cnp.NPY_UINT8 if self.images else cnp.NPY_FLOAT32,
                                     0)
        if length < 0:
            return np.empty((b, *self.obs_shape), self.obs.dtype)
        return np.empty((b, length, *self.obs_shape), self.obs.dtype)

    cdef int sum_rewards(self, f64 gamma) except -1:
        if self.to_go is not None and self.to_go_gamma == gamma:
            return 0
        cdef cnp.ndarray sums = np.empty(self.data.n, np.float32)
        cdef f32* out = <f32*>cnp.PyArray_DATA(sums)
        cdef const f32* rewards = self.data.rewards
        cdef Py_ssize_t i
        cdef f64 total = 0.0
        with nogil:
            for i in range(self.data.n - 1, -1, -1):
                if self.data.terminated[i] | self.data.truncated[i]:
                    total = 0.0
                total = rewards[i] + gamma * total
                out[i] = <f32>total
        self.to_go, self.to_go_gamma = sums, gamma
        return 0


cdef int require_finite(object obs, object next_obs, object actions, object rewards, str where) except -1:
    """Raise a ValueError that names the array and row of the first number that is NaN or infinite."""
    cdef cnp.ndarray array
    cdef Py_ssize_t bad, size, n = rewards.size
    for name, value in (("obs", obs), ("next_obs", next_obs), ("actions", actions), ("rewards", rewards)):
        if value.dtype == np.uint8:
            continue
        array = value
        size = cnp.PyArray_SIZE(array)
        with nogil:
            bad = first_not_finite(<const f32*>cnp.PyArray_DATA(array), size)
        if bad >= 0:
            raise ValueError(
                f"{where}: {name} must be finite float32 numbers, got {array.ravel()[bad]} in row "
                f"{bad // (size // n)}"
            )
    return 0


cdef object discrete(object actions, bint integers, object n_actions, bint lazy, str where):
    """Return the number of discrete actions, or None for continuous ones."""
    if n_actions is None:
        return int(actions.max()) + 1 if integers and actions.shape[1] == 1 and actions.min() >= 0 else None
    count = as_size(n_actions, where, "n_actions")
    if actions.shape[1] != 1:
        raise ValueError(f"{where}: n_actions must be None for {actions.shape[1]} numbers per action, got {count}")
    if not lazy:
        wrong = ~((actions >= 0) & (actions < count) & (actions == np.floor(actions)))
        if wrong.any():
            row = int(wrong.argmax())
            raise ValueError(
                f"{where}: actions must be integers below n_actions ({count}), got {actions[row, 0]} in row {row}"
            )
    return count


cdef object given_moment(object value, tuple shape, bint positive, str where, str name):
    """Return a given mean or deviation as a read-only float32 array of `shape`, or None if it was not given."""
    if value is None:
        return None
    array = np.array(real_array(value, where, name), np.float32, order="C")
    if array.shape != shape:
        raise ValueError(f"{where}: {name} must have shape {shape}, got {array.shape}")
    if not np.isfinite(array).all() or (positive and not (array > 0).all()):
        raise ValueError(f"{where}: {name} must be finite{' and above 0' if positive else ''}")
    return read_only(array)


cdef object inverse_of(object std):
    """Return 1 / std as a flat array, from the float32 numbers, since files and pickles keep those."""
    return read_only((1 / std.astype(np.float64)).astype(np.float32).ravel())


cdef object columns(object array, Py_ssize_t n, object dim, str where, str name, str dim_name):
    """Return an array as (n, ...), from that shape or from a flat array."""
    if array.ndim == 0:
        raise ValueError(f"{where}: {name} must have one row per transition ({n}), got a single number")
    if array.ndim == 1:
        if array.size == 0 or array.size % n:
            raise ValueError(
                f"{where}: {name} must have a multiple of the {n} transitions as length, got {array.size}"
            )
        array = array.reshape(n, array.size // n)
    if array.shape[0] != n:
        raise ValueError(f"{where}: {name} must have one row per transition ({n}), got shape {array.shape}")
    width = array.size // n
    if width == 0:
        raise ValueError(f"{where}: {name} must have at least one number per row, got shape {array.shape}")
    if dim is not None and as_index(dim, where, dim_name) != width:
        raise ValueError(f"{where}: {dim_name} must be {width}, the numbers per row of {name}, got {dim}")
    return array
