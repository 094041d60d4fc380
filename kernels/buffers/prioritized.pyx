"""The prioritised replay memory: a `ReplayBuffer` with a tree of priorities (see sumtree.pxd)."""

import numpy as np

cimport numpy as cnp
from cpython.float cimport PyFloat_AS_DOUBLE, PyFloat_CheckExact
from libc.string cimport memcpy, memset

from rlox.kernels.buffers.replay cimport ReplayBuffer
from rlox.kernels.buffers.rows cimport seed_key
from rlox.kernels.buffers.store cimport CHUNK, DOMAIN_PRIORITY, draw_words
from rlox.kernels.buffers.sumtree cimport (
    SumTree, find_leaf, importance, inside, leaf_value, sum_above, sum_range,
)
from rlox.kernels.checks cimport as_array, as_fraction, as_number
from rlox.kernels.fmath cimport log_positive
from rlox.kernels.philox cimport join, unit_f64
from rlox.kernels.prefetch cimport prefetch
from rlox.kernels.types cimport f32, f64, i64, u32, u64

cnp.import_array()

# What importance weights are divided by, in the order of WEIGHT_NORMS.
cdef enum:
    BY_MEMORY = 0
    BY_BATCH = 1
    BY_NOTHING = 2

WEIGHT_NORMS = ("memory", "batch", "none")


cdef cnp.ndarray as_priorities(object value, Py_ssize_t n, f64 alpha, f64 eps, str where, f64* highest):
    """Return priorities ** alpha as leaves (n,), after raising priorities to at least `eps`; write the highest one."""
    cdef cnp.ndarray array
    cdef cnp.npy_intp size = n
    cdef cnp.ndarray leaves
    cdef const f64* p
    cdef f32* leaf
    cdef Py_ssize_t i
    cdef f64 most = 0.0
    cdef int bad = 0
    if isinstance(value, cnp.ndarray):
        array = value
    else:
        array = as_array(value, where, "priorities")
    if cnp.PyArray_NDIM(array) != 1 or cnp.PyArray_DIM(array, 0) != n:
        raise ValueError(f"{where}: priorities must have shape ({n},), got {(<object>array).shape}")
    if cnp.PyArray_TYPE(array) != cnp.NPY_FLOAT64 or not cnp.PyArray_ISCARRAY_RO(array):
        if array.dtype.kind not in "iuf" and n:
            raise TypeError(f"{where}: priorities must be real numbers, got dtype {array.dtype}")
        array = np.asarray(array, np.float64, order="C")
    leaves = cnp.PyArray_EMPTY(1, &size, cnp.NPY_FLOAT32, 0)
    p = <const f64*>cnp.PyArray_DATA(array)
    leaf = <f32*>cnp.PyArray_DATA(leaves)
    for i in range(n):
        # Also true for NaN.
        bad |= (not p[i] >= 0.0) | (not p[i] <= 1.7976931348623157e308)
        most = most if most > p[i] else p[i]
    if bad:
        for i in range(n):
            if not (p[i] >= 0.0 and p[i] <= 1.7976931348623157e308):
                raise ValueError(
                    f"{where}: priorities must be finite and at least 0, got {p[i]} at position {i}"
                )
    powers(p, n, alpha, eps, leaf)
    highest[0] = most
    return leaves


cdef void powers(const f64* p, Py_ssize_t n, f64 alpha, f64 eps, f32* leaf) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n):
        leaf[i] = leaf_value(p[i] if p[i] > eps else eps, alpha)


cdef void weigh(const f32* leaf, Py_ssize_t n, f64 log_unit, f64 beta, bint above, f32* weights) noexcept nogil:
    cdef f64 most = 700.0 if above else 0.0
    cdef Py_ssize_t i
    for i in range(n):
        weights[i] = importance(leaf[i], log_unit, beta, most)


cdef void search(const SumTree* tree, const u32* words, Py_ssize_t n, i64* slots) noexcept nogil:
    """Find the leaves of n <= CHUNK draws of two words each, descending one level for all draws at a time.

    Within a level, the draws do not depend on each other, so the processor works on many at once.
    """
    cdef f64[CHUNK] targets
    cdef const f64* before
    cdef const f64* totals
    cdef f64 target
    cdef Py_ssize_t i
    cdef i64 node, k
    cdef int level
    for i in range(n):
        targets[i] = inside(tree.total * unit_f64(join(words[2 * i], words[2 * i + 1])), tree.total)
        slots[i] = 0
    for level in range(tree.n_levels - 1, -1, -1):
        totals = tree.totals[level]
        for i in range(n):
            target = targets[i]
            node = 16 * slots[i]
            before = tree.before[level] + node
            # First by groups of four, then within a group: half the work of comparing all, and faster than summing a
            # vector.
            k = 4 * ((before[4] <= target) + (before[8] <= target) + (before[12] <= target))
            k += (before[k + 1] <= target) + (before[k + 2] <= target) + (before[k + 3] <= target)
            node += k
            targets[i] = inside(target - before[k], totals[node])
            slots[i] = node
            if level == 0:
                prefetch(tree.leaves + 16 * node)
    for i in range(n):
        slots[i] = find_leaf(tree, slots[i], targets[i])


cdef class PrioritizedReplayBuffer(ReplayBuffer):
    """A `ReplayBuffer` that draws transition i with probability P(i) = p_i**alpha / sum_k p_k**alpha.

    Draws are independent and with replacement (not stratified). p**alpha is stored as float32, clamped to
    [1.2e-38, 3.4e38]. Everything else, n-step returns and images included, is as in `ReplayBuffer`.

    Parameters
    ----------
    capacity, obs_dim, act_dim
        As in `ReplayBuffer`, like all further keywords.
    alpha
        In [0, 1]: 0 draws uniformly.
    beta
        In [0, 1]: exponent of the importance weights, annealed to 1 with `set_beta`.
    eps
        The smallest priority, finite and at least 0. Lower priorities count as `eps`, so that a transition whose error
        was 0 is still drawn. (Schaul et al. add eps; here a priority above it stays unchanged.) With 0, a transition
        with priority 0 is not drawn until its priority is raised again.
    weight_norm
        What the importance weights are divided by: ``memory``, the largest weight of all stored transitions;
        ``batch``, the largest weight of the batch; ``none``, nothing.

    References
    ----------
    Schaul, Quan, Antonoglou, Silver 2016, "Prioritized experience replay", arXiv:1511.05952, eq. 1 and
    sec. 3.4.
    """

    cdef SumTree tree
    cdef cnp.ndarray tree_memory
    cdef cnp.ndarray work
    cdef f64 alpha_
    cdef f64 beta_
    cdef f64 eps_
    cdef int scale  # what the weights are divided by
    cdef f64 highest  # the largest priority ever given, at least 1
    cdef f64 last_priority  # kept with its leaf, because most pushes repeat one priority
    cdef f32 last_leaf
    cdef i64 summed  # number of pushed transitions that are included in the tree's sums

    def __init__(self, capacity, obs_dim, act_dim, alpha=0.6, beta=0.4, eps=1e-6, weight_norm="memory", **keywords):
        cdef str where = type(self).__name__
        alpha = as_fraction(alpha, where, "alpha")
        self.alpha_ = alpha
        self.eps_ = as_number(eps, where, "eps")
        if not (0.0 <= self.eps_ <= 1.7976931348623157e308):
            raise ValueError(f"{where}: eps must be finite and at least 0, got {eps}")
        if weight_norm not in WEIGHT_NORMS:
            raise ValueError(f"{where}: weight_norm must be one of {', '.join(WEIGHT_NORMS)}, got {weight_norm!r}")
        self.scale = WEIGHT_NORMS.index(weight_norm)
        ReplayBuffer.__init__(self, capacity, obs_dim, act_dim, **keywords)
        self.set_beta(beta)
        self.config.update(alpha=alpha, eps=self.eps_, weight_norm=weight_norm)
        self.weighted = True
        self.create_tree()

    cdef int create_tree(self) except -1:
        """Create an empty tree. Its memory is zero pages until it is written to.

        Other threads use the current tree until the new one is complete.
        """
        cdef SumTree created
        cdef SumTree* tree = &created
        cdef cnp.ndarray memory, work
        cdef i64 n = (self.layout.capacity + 15) >> 4
        cdef i64 padded, nodes
        cdef int level = 0
        memset(tree, 0, sizeof(SumTree))
        tree.n_blocks = n
        total = 64 * int(n) + 64
        while True:
            nodes = (n + 15) >> 4
            padded = 16 * nodes
            tree.n_children[level] = padded
            total += int(padded) * 24 + 64
            level += 1
            n = nodes
            if nodes == 1:
                break
        tree.n_levels = level
        try:
            memory = np.zeros(total, np.uint8)
            work = np.empty(tree.n_blocks + 1, np.int64)
        except MemoryError:
            self.too_large("the priorities", total)
        cdef char* at = <char*>cnp.PyArray_DATA(memory)
        at += (64 - <u64>at % 64) % 64
        tree.leaves = <f32*>at
        at += 64 * tree.n_blocks
        for level in range(tree.n_levels):
            padded = tree.n_children[level]
            tree.before[level] = <f64*>at
            tree.totals[level] = <f64*>(at + 8 * padded)
            tree.minima[level] = <u32*>(at + 16 * padded)
            tree.stamps[level] = <u32*>(at + 20 * padded)
            at += 24 * padded
        self.tree = created
        self.tree_memory = memory
        self.work = work
        self.summed = 0
        self.highest = 1.0
        self.last_priority = 1.0
        self.last_leaf = leaf_value(1.0 if self.eps_ < 1.0 else self.eps_, self.alpha_)
        return 0

    cdef void left(self, i64 slot) noexcept:
        self.tree.leaves[slot] = 0
        sum_range(&self.tree, slot, slot)

    cdef int ready(self, str where) except -1:
        """Update the sums with what was pushed since the last draw."""
        cdef i64 first, last
        cdef i64 capacity = self.layout.capacity
        ReplayBuffer.ready(self, where)
        if self.summed < self.count:
            if self.count - self.summed >= capacity:
                sum_range(&self.tree, 0, capacity - 1)
            else:
                first = self.summed % capacity
                last = (self.count - 1) % capacity
                if first <= last:
                    sum_range(&self.tree, first, last)
                else:
                    sum_range(&self.tree, first, capacity - 1)
                    sum_range(&self.tree, 0, last)
            self.summed = self.count
        if not self.tree.total > 0.0:
            raise ValueError(
                f"{where}: priorities must not all be 0, got 0 for each of {self.size} transitions; "
                "update_priorities with a small positive number, or create the buffer with eps > 0"
            )
        return 0

    cdef void draw(self, u64 key, Py_ssize_t first, Py_ssize_t n, i64* slots) noexcept nogil:
        cdef u32[CHUNK * 2 + 64] words
        draw_words(key, <u64>(first >> 1), DOMAIN_PRIORITY, 2 * n, words)
        search(&self.tree, words, n, slots)

    cdef f32 leaf_of(self, object priority, str where) except -1:
        """Return the leaf of one priority; None means the highest priority so far."""
        cdef f64 p
        if priority is None:
            p = self.highest
        else:
            p = as_number(priority, where, "priority")
            if not (p >= 0.0 and p <= 1.7976931348623157e308):
                raise ValueError(f"{where}: priority must be finite and at least 0, got {p}")
        if p != self.last_priority:
            self.last_leaf = leaf_value(p if p > self.eps_ else self.eps_, self.alpha_)
            self.last_priority = p
        return self.last_leaf

    def push(self, obs, action, reward, terminated, truncated, next_obs=None, priority=1.0):
        """Append one transition as `ReplayBuffer.push` does, with a priority.

        Parameters
        ----------
        priority
            Finite, at least 0; None for the highest priority given so far (at least 1), as in Schaul et al.
        """
        cdef f32 leaf
        if PyFloat_CheckExact(priority) and PyFloat_AS_DOUBLE(priority) == self.last_priority:
            leaf = self.last_leaf
        else:
            leaf = self.leaf_of(priority, f"{self.name}.push")
        cdef i64 slot = self.store(obs, action, reward, terminated, truncated, next_obs)
        self.tree.leaves[slot] = leaf
        if self.last_priority > self.highest:
            self.highest = self.last_priority

    def push_batch(self, obs, next_obs, actions, rewards, terminated, truncated, priorities=None, *,
                   next_masks=None):
        """Append n transitions as `ReplayBuffer.push_batch` does.

        Parameters
        ----------
        priorities
            (n,) finite, at least 0; None for the highest priority given so far (at least 1).
        """
        cdef str where = self.in_batch
        cdef f64 highest = 0.0
        cdef cnp.ndarray leaves = None
        cdef f32 leaf = 0
        cdef Py_ssize_t n, i
        if priorities is None:
            leaf = self.leaf_of(None, where)
        else:
            leaves = as_priorities(priorities, np.size(rewards), self.alpha_, self.eps_, where, &highest)
        n = self.store_batch(obs, next_obs, actions, rewards, terminated, truncated, next_masks)
        for i in range(n):
            if leaves is not None:
                leaf = (<const f32*>cnp.PyArray_DATA(leaves))[i]
            # If the batch is larger than the buffer, its first rows have been dropped again and have no leaves.
            if n - i <= self.size:
                self.tree.leaves[(self.count - n + i) % self.layout.capacity] = leaf
        if highest > self.highest:
            self.highest = highest

    def sample(self, batch_size, seed=42, out=None):
        """Draw `batch_size` transitions in proportion to priority**alpha, independently.

        Like `ReplayBuffer.sample`, but the batch also contains

        weights
            (B,) float32, (N P(i))**-beta, divided by the largest such weight of the buffer or of the batch, or by
            nothing, depending on `weight_norm`. The first two give weights in (0, 1].
        indices
            (B,) uint64, for `update_priorities`.

        Raises
        ------
        ValueError
            As for `ReplayBuffer.sample`, and if every priority is 0, which only ``eps=0`` allows.
        """
        cdef str where = self.in_sample
        cdef Py_ssize_t n = self.as_batch_size(batch_size, where)
        cdef u64 key = seed_key(seed, where)
        cdef cnp.npy_intp size = n
        cdef cnp.ndarray indices, weights
        if out is None:
            indices = cnp.PyArray_EMPTY(1, &size, cnp.NPY_UINT64, 0)
            weights = cnp.PyArray_EMPTY(1, &size, cnp.NPY_FLOAT32, 0)
        else:
            indices = self.output(out, "indices", cnp.NPY_UINT64, "uint64", (n,))
            weights = self.output(out, "weights", cnp.NPY_FLOAT32, "float32", (n,))
        cdef i64* slots = <i64*>cnp.PyArray_DATA(indices)
        # With the GIL held: an update by another thread in the middle of a search would mislead it.
        self.ready(where)
        self.draw_weighted(n, key, slots, <f32*>cnp.PyArray_DATA(weights))
        batch = self.gather_batch(n, slots, 0, 0, out)
        if out is None:
            batch["weights"] = weights
            batch["indices"] = indices
        return batch

    cdef void draw_weighted(self, Py_ssize_t n, u64 key, i64* slots, f32* weights) noexcept nogil:
        cdef f32 minimum
        cdef f64 log_unit  # logarithm of the leaf whose weight is 1
        cdef f32[CHUNK] leaf
        cdef Py_ssize_t at = 0
        cdef Py_ssize_t m, i
        while at < n:
            m = n - at if n - at < CHUNK else CHUNK
            self.draw(key, at, m, slots + at)
            at += m
        if self.scale == BY_NOTHING:
            log_unit = log_positive(self.tree.total / <f64>self.size)
        elif self.scale == BY_BATCH:
            minimum = self.tree.leaves[slots[0]]
            for i in range(1, n):
                minimum = min(minimum, self.tree.leaves[slots[i]])
            log_unit = log_positive(<f64>minimum)
        else:
            memcpy(&minimum, &self.tree.minimum, sizeof(minimum))
            log_unit = log_positive(<f64>minimum)
        at = 0
        while at < n:
            m = n - at if n - at < CHUNK else CHUNK
            for i in range(m):
                leaf[i] = self.tree.leaves[slots[at + i]]
            weigh(leaf, m, log_unit, self.beta_, self.scale == BY_NOTHING, weights + at)
            at += m

    def update_priorities(self, indices, priorities):
        """Set the priorities of transitions, for example to ``|TD error|`` plus a small number.

        Parameters
        ----------
        indices
            (n,) integers of any dtype, from ``batch["indices"]``. If an index occurs twice, the later priority counts.
        priorities
            (n,) finite, at least 0.

        Raises
        ------
        IndexError
            If an index has no stored transition; nothing is changed then.
        ValueError, TypeError
            If a priority is negative, infinite or NaN, or lengths differ; nothing is changed then.
        """
        cdef str where = self.in_update
        cdef cnp.ndarray slots_ = self.occupied(indices, where)
        cdef Py_ssize_t n = cnp.PyArray_DIM(slots_, 0)
        cdef f64 highest = 0.0
        cdef cnp.ndarray leaves_ = as_priorities(priorities, n, self.alpha_, self.eps_, where, &highest)
        cdef const i64* slots = <const i64*>cnp.PyArray_DATA(slots_)
        cdef const f32* leaves = <const f32*>cnp.PyArray_DATA(leaves_)
        cdef Py_ssize_t i
        for i in range(n):
            self.tree.leaves[slots[i]] = leaves[i]
        if n:
            sum_above(&self.tree, slots, n, <i64*>cnp.PyArray_DATA(self.work))
        if highest > self.highest:
            self.highest = highest

    def set_beta(self, beta):
        """Set the exponent of the importance weights, in [0, 1]."""
        self.beta_ = as_fraction(beta, f"{self.name}.set_beta", "beta")

    @property
    def alpha(self):
        return self.alpha_

    @property
    def beta(self):
        return self.beta_

    @property
    def eps(self):
        return self.eps_

    @property
    def nbytes(self):
        """Bytes reserved for transitions and priorities; those never written to are not resident."""
        return ReplayBuffer.nbytes.__get__(self) + self.tree_memory.nbytes + self.work.nbytes

    def clear(self):
        """Remove all transitions and priorities."""
        self.create_tree()
        ReplayBuffer.clear(self)

    def get_state(self, since=0, since_frame=None):
        """Like `ReplayBuffer.get_state`, plus all leaves (size,) float32 of the tree, oldest first."""
        cdef i64 i
        cdef cnp.ndarray leaves = np.empty(self.size, np.float32)
        for i in range(self.size):
            (<f32*>cnp.PyArray_DATA(leaves))[i] = self.tree.leaves[
                (self.count - self.size + i) % self.layout.capacity
            ]
        state = ReplayBuffer.get_state(self, since, since_frame)
        state.update(leaves=leaves, beta=self.beta_, highest_priority=self.highest)
        return state

    def set_state(self, state):
        """Restore a state from `get_state` of a buffer with the same configuration; see `ReplayBuffer.set_state`."""
        cdef str where = f"{self.name}.set_state"
        cdef i64 i
        cdef cnp.ndarray leaves
        if not isinstance(state, dict):
            raise TypeError(f"{where}: state must be a dict, got {type(state).__name__}")
        own = {"leaves", "beta", "highest_priority"}
        if not own <= set(state):
            raise ValueError(f"{where}: state must have the keys {sorted(own)}, got {sorted(state)}")
        value = state["leaves"]
        beta = as_number(state["beta"], where, "state['beta']")
        highest = as_number(state["highest_priority"], where, "state['highest_priority']")
        if not (
            isinstance(value, np.ndarray) and value.dtype == np.float32
            and value.shape == np.shape(state.get("rows"))[:1]
            and bool(np.all(np.isfinite(value) & (value >= 0))) and 0 <= beta <= 1 and 1 <= highest < np.inf
        ):
            raise ValueError(f"{where}: state must be what get_state returned, got parts that do not fit together")
        # The state may come from a buffer with eps=0, or from rlox 0.6.0, which had no eps: raise its leaves, so that
        # transitions that would never be drawn again are drawn.
        leaves = np.maximum(value, np.float32(leaf_value(self.eps_, self.alpha_)))
        state = {k: v for k, v in state.items() if k not in own}
        if state.get("config") == repr({k: v for k, v in self.config.items() if k not in ("eps", "weight_norm")}):
            state["config"] = repr(self.config)
        ReplayBuffer.set_state(self, state)
        self.create_tree()
        for i in range(min(self.size, cnp.PyArray_DIM(leaves, 0))):
            self.tree.leaves[(self.count - self.size + i) % self.layout.capacity] = (
                <const f32*>cnp.PyArray_DATA(leaves))[i]
        if self.size:
            sum_range(&self.tree, 0, self.layout.capacity - 1)
        self.summed = self.count
        self.beta_ = beta
        self.highest = highest
