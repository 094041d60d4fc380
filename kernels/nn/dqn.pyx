"""The native update of DQN, as defined by its PyTorch `update`, and its whole training on native environments.

Two perceptrons on flat blocks of parameters, online and target (see layers.pxd). A batch is processed in chunks of
`HALF` rows, which together with their next states are one product per layer.
"""

import numpy as np

cimport numpy as cnp
from libc.math cimport fabs
from libc.string cimport memcpy, memset

from rlox.kernels.checks cimport check_out, share_memory
from rlox.kernels.nn.layers cimport (
    CHUNK, PAD, Layer, Net, backward, bounded, build, clear_padded, forward, given, input_gradient, last_of, lerp,
    number, numbers_below, pack, padded, scratch, size_of, unpad,
)
from rlox.kernels.nn.off_policy cimport Loop, close_loop, draw, open_loop, progress_of, take_in, whole
from rlox.kernels.philox cimport DOMAIN_RNG, Block, fill_integers, philox, unit_f32
from rlox.kernels.signals cimport check_signals, now, watching
from rlox.kernels.types cimport f32, f64, i64, u8, u64
from rlox.kernels.nn.core cimport FlatLearner, clear, move

cnp.import_array()

cdef enum:
    HALF = CHUNK >> 1  # a division would be a call in the debug build

METRICS = ("q_loss", "q_value", "td_error", "grad_norm")  # of an update, means over its batch


# Q(s, .): a trunk (possibly without layers), a head, and with dueling a head for the value.
cdef struct Values:
    Net trunk
    Net head
    Net value
    bint dueling


cdef struct Options:
    bint double_dqn
    bint huber
    f64 max_grad_norm   # 0: off


cdef struct Sums:
    f64 loss
    f64 value
    f64 td_error


# A batch; weights are NULL if all rows have equal weights, and next_masks if all actions are legal.
cdef struct Rows:
    const f32* obs
    const f32* next_obs
    const i64* actions
    const f32* rewards
    const f32* discounts
    const f32* weights
    const u8* next_masks


cdef void pack_all(Values* q, bint backward_too) noexcept nogil:
    pack(&q.trunk, backward_too)
    pack(&q.head, backward_too)
    if q.dueling:
        pack(&q.value, backward_too)


cdef const f32* values_of(Values* q, const f32* x, Py_ssize_t ldx, Py_ssize_t rows) noexcept nogil:
    """Return values (rows, out_pad) of all actions for inputs (rows, ldx), rows <= CHUNK."""
    cdef Layer* out = last_of(&q.head)
    cdef const f32* v
    cdef f32* a
    cdef f64 mean
    cdef Py_ssize_t i, j
    if q.trunk.n_layers:
        x = forward(&q.trunk, x, ldx, rows)
        ldx = last_of(&q.trunk).out_pad
    forward(&q.head, x, ldx, rows)
    if q.dueling:
        v = forward(&q.value, x, ldx, rows)
        for i in range(rows):
            a = out.out + i * out.out_pad
            mean = 0.0
            for j in range(out.n_out):
                mean += a[j]
            mean /= out.n_out
            for j in range(out.n_out):
                a[j] = <f32>(v[i * PAD] + a[j] - mean)
    return out.out


cdef inline Py_ssize_t best_of(const f32* q, Py_ssize_t n) noexcept nogil:
    """Return the index of the first largest value; NaN counts as the largest, as in PyTorch, so that it is noticed."""
    cdef Py_ssize_t j, best = 0
    for j in range(1, n):
        if q[j] > q[best] or (q[j] != q[j] and q[best] == q[best]):
            best = j
    return best


cdef inline Py_ssize_t best_legal(const f32* q, const u8* mask, Py_ssize_t n) noexcept nogil:
    """Like `best_of`, among the actions that `mask` (n,) allows; 0 if there is none, as at the end of a game."""
    cdef Py_ssize_t j, best = -1
    for j in range(n):
        if mask[j] and (best < 0 or q[j] > q[best] or (q[j] != q[j] and q[best] == q[best])):
            best = j
    return best if best > 0 else 0


cdef inline i64 explored(const f32* noise, Py_ssize_t n_actions, f64 epsilon) noexcept nogil:
    """Return a random action if the first number is below `epsilon`, else -1."""
    # As in `rlox.nn.actors.QPolicy`, which compares and multiplies float32 numbers.
    if noise[0] < <f32>epsilon:
        return <i64>(noise[1] * <f32>n_actions)
    return -1


cdef inline i64 explored_legal(const f32* noise, const u8* mask, Py_ssize_t n_actions, f64 epsilon) noexcept nogil:
    """Like `explored`, among the actions that `mask` (n_actions,) allows."""
    cdef Py_ssize_t j, n_legal = 0
    cdef i64 place
    for j in range(n_actions):
        n_legal += mask[j] != 0
    place = explored(noise, n_legal, epsilon)
    if place < 0:
        return -1
    for j in range(n_actions):
        place -= mask[j] != 0
        if place < 0:
            return j
    return 0  # if none is allowed


cdef inline f64 interpolated(f64 start, f64 end, f64 progress, f64 fraction) noexcept nogil:
    """Return the same as `rlox.checkpoint.counters.interpolate`."""
    return end if progress >= fraction else start + (end - start) * progress / fraction


cdef f64 as_share(object tau, str where) except? -1.0:
    cdef f64 share = number(tau, 0.0, where, "tau")
    if not 0.0 < share <= 1.0:
        raise ValueError(f"{where}: tau must be in (0, 1], got {share:g}")
    return share


def n_parameters(obs_dim: int, n_actions: int, hidden_sizes, dueling: bool = False) -> int:
    """Return the size of the block of `NativeQ`."""
    trunk, rest = _shared([obs_dim, *hidden_sizes], dueling)
    return sum([size_of(widths) for widths in (trunk, [*rest, n_actions], [*rest, 1] if dueling else [])])


def _shared(widths, dueling):
    """Return the widths of the trunk, and those of the layers of each head."""
    layers = max(0, len(widths) - 2) if dueling else 0
    return widths[:layers + 1], widths[layers:]


cdef class NativeQ(FlatLearner):
    """A perceptron on a flat block for the values of all actions, its target network, and Adam.

    Calls from several threads wait for each other. The blocks are kept, but no other argument.

    Parameters
    ----------
    parameters, target
        (P,) float32, C-contiguous and writeable: the blocks, kept and changed in place, in the order of
        ``rlox.nn.actors.DiscreteQNetwork.parameters()``: trunk, head, and with dueling the head of the value.
    obs_dim, n_actions
        D, and the number of actions A.
    hidden_sizes
        Widths of the hidden layers, at most 8. With dueling, each head has a last hidden layer of its own.
    activation
        ``relu`` or ``tanh``.
    dueling
        Q = V + A - mean(A).
    adam_eps
        Added to the denominator of Adam's steps.

    Attributes
    ----------
    gradient, moments, step
        See `FlatLearner`. The gradient is that of the last batch; Adam has betas 0.9 and 0.999.

    Raises
    ------
    TypeError
        If a block is not a float32 array, or a size is not an integer.
    ValueError
        For a size below 1, more than 8 hidden layers, an unknown activation, or a block of another length or not
        C-contiguous and writeable.
    """

    cdef readonly cnp.ndarray target
    cdef readonly Py_ssize_t n_outputs
    cdef Values online
    cdef Values target_net
    cdef f32* t
    cdef f32* x             # (CHUNK, obs_pad): states, then their next states
    cdef f32* ahead         # (HALF): values of the next states
    cdef f32* next_values   # (HALF, A) of the target network
    cdef f32* from_value    # (CHUNK, out_pad of the trunk)

    def __cinit__(self, parameters, target, obs_dim, n_actions, hidden_sizes, activation: str = "relu",
                  dueling: bool = False, adam_eps: float = 1e-8):
        cdef str where = "NativeQ"
        self.n_outputs = self.begin(where, obs_dim, n_actions, "n_actions", hidden_sizes, activation)
        size = n_parameters(self.obs_dim, self.n_outputs, self.hidden, dueling)
        self.hold(parameters, size, where, number(adam_eps, 0.0, where, "adam_eps"))
        check_out(target, cnp.NPY_FLOAT32, "float32", (size,), where, "target")
        if share_memory(parameters, target):
            raise ValueError(f"{where}: parameters and target must share no memory")
        self.target = target
        self.t = <f32*>cnp.PyArray_DATA(self.target)
        self.make(&self.online, self.weights.p, dueling)
        self.make(&self.target_net, self.t, dueling)
        self.x = scratch(self.held, CHUNK * self.obs_pad)
        self.ahead = scratch(self.held, HALF)
        self.next_values = scratch(self.held, HALF * self.n_outputs)
        if self.online.trunk.n_layers:
            self.from_value = scratch(self.held, CHUNK * last_of(&self.online.trunk).out_pad)

    cdef int make(self, Values* q, f32* block, bint dueling) except -1:
        cdef Py_ssize_t at = 0
        trunk, rest = _shared([self.obs_dim, *self.hidden], dueling)
        q.dueling = dueling
        at = build(&q.trunk, trunk, self.tanh, block, self.weights.g, at, self.held)
        q.trunk.activated = True
        cdef bint inner = q.trunk.n_layers > 0
        at = build(&q.head, [*rest, self.n_outputs], self.tanh, block, self.weights.g, at, self.held, inner)
        if dueling:
            build(&q.value, [*rest, 1], self.tanh, block, self.weights.g, at, self.held, inner)
        return 0

    def values(self, obs):
        """Return values (B, A) float32 of all actions for observations (B, D) float32."""
        cdef cnp.ndarray obs_ = self.rows_of(obs, "NativeQ.values")
        cdef Py_ssize_t n = cnp.PyArray_DIM(obs_, 0), start = 0, rows, i, a = self.n_outputs
        cdef cnp.ndarray out = np.empty((n, a), np.float32)
        cdef f32* out_ = <f32*>cnp.PyArray_DATA(out)
        cdef const f32* x = <const f32*>cnp.PyArray_DATA(obs_)
        cdef const f32* q
        with self.lock:
            with nogil:
                pack_all(&self.online, False)
                while start < n:
                    rows = min(<Py_ssize_t>CHUNK, n - start)
                    q = values_of(&self.online, x + start * self.obs_dim, self.obs_dim, rows)
                    for i in range(rows):
                        memcpy(out_ + (start + i) * a, q + i * padded(a), a * sizeof(f32))
                    start += rows
        return out

    cdef u64 choose(self, const f32* obs, i64* actions, Py_ssize_t n, f64 epsilon, u64 key,
                    u64 position) noexcept nogil:
        """Act like `act` with noise from ``Rng.uniform`` of shape (n, 2); return the generator's new position."""
        cdef Py_ssize_t i
        cdef Block x
        cdef f32[4] noise
        cdef bint greedy = False
        for i in range(n):
            if i & 1 == 0:
                x = philox(key, position, DOMAIN_RNG)
                position += 1
                noise[0], noise[1], noise[2], noise[3] = unit_f32(x.a), unit_f32(x.b), unit_f32(x.c), unit_f32(x.d)
            actions[i] = explored(noise + 2 * (i & 1), self.n_outputs, epsilon)
            greedy = greedy or actions[i] < 0
        if greedy:
            self.fill_greedy(obs, NULL, actions, n)
        return position

    cdef void fill_greedy(self, const f32* obs, const u8* masks, i64* actions, Py_ssize_t n) noexcept nogil:
        """Replace negative actions by the best ones, of those that `masks` allow if given. The weights must be packed.
        """
        cdef Py_ssize_t start = 0, rows, i, a = self.n_outputs
        cdef const f32* q
        while start < n:
            rows = min(<Py_ssize_t>CHUNK, n - start)
            q = values_of(&self.online, obs + start * self.obs_dim, self.obs_dim, rows)
            for i in range(rows):
                if actions[start + i] < 0 and masks != NULL:
                    actions[start + i] = best_legal(q + i * padded(a), masks + (start + i) * a, a)
                elif actions[start + i] < 0:
                    actions[start + i] = best_of(q + i * padded(a), a)
            start += rows

    cdef cnp.ndarray masks_of(self, object masks, Py_ssize_t n, str where, str name):
        """Return `masks`, (n, A) bool or None, after checking them."""
        return None if masks is None else given(masks, cnp.NPY_BOOL, "bool", (n, self.n_outputs), where, name)

    def act(self, obs, noise, epsilon, masks=None):
        """Return actions (B,) int64 for observations (B, D): random ones with probability `epsilon`, else the best.

        The columns of the uniform `noise` (B, 2) float32 decide whether an action is random, and which one it is. Both
        kinds are actions that `masks` (B, A) bool allow, if given.
        """
        cdef str where = "NativeQ.act"
        cdef cnp.ndarray obs_ = self.rows_of(obs, where)
        cdef Py_ssize_t n = cnp.PyArray_DIM(obs_, 0), i
        cdef cnp.ndarray noise_ = given(noise, cnp.NPY_FLOAT32, "float32", (n, 2), where, "noise")
        cdef cnp.ndarray masks_ = self.masks_of(masks, n, where, "masks")
        cdef f64 chance = number(epsilon, 0.0, where, "epsilon")
        cdef cnp.ndarray out = np.empty(n, np.int64)
        cdef i64* actions = <i64*>cnp.PyArray_DATA(out)
        cdef const f32* draws = <const f32*>cnp.PyArray_DATA(noise_)
        cdef const u8* legal = NULL
        cdef bint greedy = False
        if masks_ is not None:
            legal = <const u8*>cnp.PyArray_DATA(masks_)
        for i in range(n):
            if legal != NULL:
                actions[i] = explored_legal(draws + 2 * i, legal + i * self.n_outputs, self.n_outputs, chance)
            else:
                actions[i] = explored(draws + 2 * i, self.n_outputs, chance)
            greedy = greedy or actions[i] < 0
        if greedy:
            with self.lock:
                with nogil:
                    pack_all(&self.online, False)
                    self.fill_greedy(<const f32*>cnp.PyArray_DATA(obs_), legal, actions, n)
        return out

    def mode(self, obs, masks=None):
        """Return the actions with the highest value, (B,) int64, for observations (B, D) float32.

        They are among those that `masks` (B, A) bool allow, if given.
        """
        values = self.values(obs)
        if masks is not None:
            values[~self.masks_of(masks, len(values), "NativeQ.mode", "masks")] = -np.inf
        return values.argmax(-1)

    cdef int gradients(self, const Rows* rows, Py_ssize_t n, const Options* options, f32* td_errors,
                       Sums* sums) except -1 nogil:
        """Compute self.gradient of the batch, and write |TD errors| (n,). The weights must be packed."""
        cdef Py_ssize_t start = 0, half, i, j, a = self.n_outputs, d = self.obs_dim, ld = padded(a)
        cdef f64 scale = 1.0 / n, weight, error, slope, loss, mean
        cdef const f32* q
        cdef const f32* chooser
        cdef f32* d_q
        cdef Layer* head = last_of(&self.online.head)
        cdef Layer* value
        cdef Layer* below_
        clear(&self.weights, &self.online.trunk, 1)
        clear_padded(&self.online.head)
        clear_padded(&self.online.value)
        while start < n:
            check_signals(&self.watch)
            half = min(<Py_ssize_t>HALF, n - start)
            for i in range(half):
                memcpy(self.x + i * self.obs_pad, rows.obs + (start + i) * d, d * sizeof(f32))
                memcpy(self.x + (half + i) * self.obs_pad, rows.next_obs + (start + i) * d, d * sizeof(f32))
            q = values_of(&self.target_net, self.x + half * self.obs_pad, self.obs_pad, half)
            for i in range(half):
                memcpy(self.next_values + i * a, q + i * ld, a * sizeof(f32))
            # Double Q-learning (van Hasselt et al. 2016, arXiv:1509.06461): one network chooses, the other evaluates.
            q = values_of(&self.online, self.x, self.obs_pad, 2 * half if options.double_dqn else half)
            for i in range(half):
                chooser = q + (half + i) * ld if options.double_dqn else self.next_values + i * a
                if rows.next_masks != NULL:
                    j = best_legal(chooser, rows.next_masks + (start + i) * a, a)
                else:
                    j = best_of(chooser, a)
                self.ahead[i] = self.next_values[i * a + j]
            for i in range(half):
                j = rows.actions[start + i]
                weight = 1.0 if rows.weights == NULL else rows.weights[start + i]
                mean = q[i * ld + j]
                # The target is a float32, as in PyTorch.
                error = <f32>(q[i * ld + j] - (rows.rewards[start + i] + rows.discounts[start + i] * self.ahead[i]))
                sums.value += mean
                sums.td_error += fabs(error)
                td_errors[start + i] = <f32>fabs(error)
                if options.huber:
                    slope = bounded(error, -1.0, 1.0)
                    loss = 0.5 * error * error if fabs(error) < 1.0 else fabs(error) - 0.5
                else:
                    slope = 2.0 * error
                    loss = error * error
                sums.loss += weight * loss
                slope *= weight * scale
                d_q = head.d_out + i * ld
                memset(d_q, 0, a * sizeof(f32))
                if self.online.dueling:
                    value = last_of(&self.online.value)
                    value.d_out[i * PAD] = <f32>slope
                    for j in range(a):
                        d_q[j] = <f32>(-slope / a)
                    j = rows.actions[start + i]
                d_q[j] += <f32>slope
            if self.online.trunk.n_layers:
                below_ = last_of(&self.online.trunk)
                backward(&self.online.head, below_.out, below_.out_pad, half)
                backward(&self.online.value, below_.out, below_.out_pad, half)
                input_gradient(&self.online.head, half, &self.online.trunk, below_.d_out)
                input_gradient(&self.online.value, half, &self.online.trunk, self.from_value)
                for i in range(half * below_.out_pad):
                    below_.d_out[i] += self.from_value[i]
                backward(&self.online.trunk, self.x, self.obs_pad, half)
            else:
                backward(&self.online.head, self.x, self.obs_pad, half)
                if self.online.dueling:
                    backward(&self.online.value, self.x, self.obs_pad, half)
            start += half
        unpad(&self.online.trunk)
        unpad(&self.online.head)
        unpad(&self.online.value)
        return 0

    cdef int learn(self, const Rows* rows, Py_ssize_t n, const Options* options, f64 rate, f32* td_errors,
                   f64* metrics) except -1 nogil:
        """Take one gradient step and write its `METRICS`. The weights must be packed before it, and again after it."""
        cdef Sums sums
        memset(&sums, 0, sizeof(sums))
        self.gradients(rows, n, options, td_errors, &sums)
        metrics[0], metrics[1], metrics[2] = sums.loss / n, sums.value / n, sums.td_error / n
        metrics[3] = move(&self.weights, rate, options.max_grad_norm)
        return 0

    def move_target(self, tau) -> None:
        """Move the target network towards the online network by the fraction tau in (0, 1]; 1 copies it."""
        cdef f64 share = as_share(tau, "NativeQ.move_target")
        with self.lock:
            lerp(self.t, self.weights.p, self.weights.size, <f32>share)

    cdef Options options(self, double_dqn, loss, max_grad_norm, str where) except *:
        cdef Options found
        if loss not in ("huber", "mse"):
            raise ValueError(f"{where}: loss must be huber or mse, got {loss!r}")
        found.double_dqn, found.huber, found.max_grad_norm = double_dqn, loss == "huber", 0.0
        if max_grad_norm is not None:
            found.max_grad_norm = number(max_grad_norm, 0.0, where, "max_grad_norm")
        return found

    def update(self, obs, actions, rewards, next_obs, discounts, weights=None, next_masks=None, *, learning_rate,
               double_dqn=True, loss="huber", max_grad_norm=None):
        """Take one gradient step, as defined by `rlox.algorithms.DQN.update`.

        Parameters
        ----------
        obs, next_obs
            (B, D) float32.
        actions
            (B,) int64.
        rewards, discounts, weights
            (B,) float32; a discount is the factor of the value of `next_obs`, 0 where the episode terminated. Without
            weights, all rows have equal weights.
        next_masks
            (B, A) bool, the legal actions in `next_obs`, among which a target takes the best one; None: all.
        learning_rate, double_dqn, loss, max_grad_norm
            As in `rlox.config.DQNConfig`, with schedules resolved; None if off.

        Returns
        -------
        metrics, td_errors
            ``q_loss q_value td_error grad_norm``, means over the batch; and (B,) float32, the distance of each value
            from its target. NaN in the data or the weights makes them NaN.
        """
        cdef str where = "NativeQ.update"
        cdef Options options = self.options(double_dqn, loss, max_grad_norm, where)
        cdef f64 rate = number(learning_rate, 0.0, where, "learning_rate")
        cdef cnp.ndarray obs_ = self.rows_of(obs, where)
        cdef Py_ssize_t n = cnp.PyArray_DIM(obs_, 0)
        if n < 1:
            raise ValueError(f"{where}: obs must have at least one row, got none")
        cdef cnp.ndarray next_ = given(next_obs, cnp.NPY_FLOAT32, "float32", (n, self.obs_dim), where, "next_obs")
        cdef cnp.ndarray actions_ = numbers_below(actions, n, self.n_outputs, where, "actions")
        cdef cnp.ndarray rewards_ = given(rewards, cnp.NPY_FLOAT32, "float32", (n,), where, "rewards")
        cdef cnp.ndarray discounts_ = given(discounts, cnp.NPY_FLOAT32, "float32", (n,), where, "discounts")
        cdef cnp.ndarray weights_ = None
        cdef cnp.ndarray masks_ = self.masks_of(next_masks, n, where, "next_masks")
        cdef const i64* choices = <const i64*>cnp.PyArray_DATA(actions_)
        cdef Rows rows = Rows(
            obs=<const f32*>cnp.PyArray_DATA(obs_), next_obs=<const f32*>cnp.PyArray_DATA(next_), actions=choices,
            rewards=<const f32*>cnp.PyArray_DATA(rewards_), discounts=<const f32*>cnp.PyArray_DATA(discounts_),
            weights=NULL, next_masks=NULL,
        )
        if masks_ is not None:
            rows.next_masks = <const u8*>cnp.PyArray_DATA(masks_)
        if weights is not None:
            weights_ = given(weights, cnp.NPY_FLOAT32, "float32", (n,), where, "weights")
            rows.weights = <const f32*>cnp.PyArray_DATA(weights_)
        cdef cnp.ndarray td_errors = np.empty(n, np.float32)
        cdef f64[4] metrics
        with self.lock:
            self.watch = watching()
            with nogil:
                pack_all(&self.online, True)
                pack_all(&self.target_net, False)
                self.learn(&rows, n, &options, rate, <f32*>cnp.PyArray_DATA(td_errors), metrics)
        return dict(zip(METRICS, [metrics[0], metrics[1], metrics[2], metrics[3]])), td_errors

    def rounds(self, stepper, memory, action_rng, replay_rng, obs, n_rounds, *, train_freq, gradient_steps, batch_size,
               env_steps, horizon_start, horizon_steps, learning_starts, update_from, epsilon, learning_rate, annealed,
               gamma, double_dqn, loss, max_grad_norm, tau, target_update_freq, target_period, seconds=0.2):
        """Run rounds of acting, stepping, storing and learning, without Python in between.

        Uses the random numbers and changes all state in the same way as `rlox.training.replay.off_policy` does step by
        step; results do not depend on how rounds are divided into calls.

        Parameters
        ----------
        stepper, memory
            Return values of ``VecEnv.stepper()`` and ``ReplayBuffer.access()``; no other thread may use the objects
            meanwhile.
        action_rng, replay_rng
            `Rng` of the actions, and of the draws from the memory.
        obs
            (N, D) float32, the current observations; replaced in place by those after the last step.
        n_rounds
            Maximum number of rounds.
        env_steps, horizon_start, horizon_steps
            Of `rlox.checkpoint.Counters`, before the call.
        update_from
            Number of environment steps from which on there are updates.
        epsilon
            Its start, its end, and the fraction of the horizon over which it changes from one to the other.
        annealed
            Whether the learning rate decreases linearly to 0 at the horizon.
        target_period
            ``env_steps // target_update_freq`` at the last update of the target network.
        seconds
            No round begins after this time, so that signals are handled.
        train_freq, gradient_steps, batch_size, learning_starts, learning_rate, gamma, double_dqn, loss, \
        max_grad_norm, tau, target_update_freq
            As in `rlox.config.DQNConfig`.

        Returns
        -------
        n_steps
            Environment steps taken.
        metrics
            (U, 4) float64, a row for each of the U updates: `METRICS`.
        target_period
            The new value.
        update_s
            Time of the updates in seconds.
        episode_returns, episode_lengths
            (E,) float64 and int64 of the episodes that ended.
        """
        cdef str where = "NativeQ.rounds"
        cdef Options options = self.options(double_dqn, loss, max_grad_norm, where)
        cdef f64 rate = number(learning_rate, 0.0, where, "learning_rate"), share = as_share(tau, where)
        cdef bint falling = annealed
        if not isinstance(epsilon, (tuple, list)) or len(epsilon) != 3:
            raise ValueError(f"{where}: epsilon must be its start, its end and a fraction, got {epsilon!r}")
        cdef f64 first = number(epsilon[0], 0.0, where, "epsilon"), last = number(epsilon[1], 0.0, where, "epsilon")
        cdef f64 fraction = number(epsilon[2], 0.0, where, "epsilon")
        cdef i64 period = whole(target_update_freq, 1, where, "target_update_freq")
        cdef i64 moved = whole(target_period, 0, where, "target_period")
        counts = {
            "n_rounds": n_rounds, "train_freq": train_freq, "gradient_steps": gradient_steps, "batch_size": batch_size,
            "env_steps": env_steps, "horizon_start": horizon_start, "horizon_steps": horizon_steps,
            "learning_starts": learning_starts, "update_from": update_from, "gamma": gamma, "seconds": seconds,
        }
        cdef Loop loop
        cdef list arrays = open_loop(&loop, stepper, memory, obs, action_rng, replay_rng, counts, self.obs_dim,
                                     self.n_outputs, 1, where)
        cdef Py_ssize_t i, n = loop.n, size = loop.size
        cdef i64 k, n_updates = 0, before = loop.env_steps
        cdef cnp.ndarray chosen = np.empty(n, np.int64)
        cdef cnp.ndarray picked = np.empty(size, np.int64)
        cdef cnp.ndarray metrics = np.empty((loop.n_rounds * loop.updates_per_round, 4), np.float64)
        cdef i64* choices = <i64*>cnp.PyArray_DATA(chosen)
        cdef i64* batch_choices = <i64*>cnp.PyArray_DATA(picked)
        cdef f64* metrics_ = <f64*>cnp.PyArray_DATA(metrics)
        cdef u64 key = action_rng.key, position = action_rng.position, begun = position, replay_begun = loop.position
        cdef Rows rows = Rows(obs=loop.batch_obs, next_obs=loop.batch_next, actions=batch_choices,
                              rewards=loop.batch_rewards, discounts=loop.discounts, weights=NULL, next_masks=NULL)
        cdef i64 round_start
        cdef f64 update_s = 0.0, began, chance, progress
        try:
            with self.lock:
                self.watch = watching()
                with nogil:
                    pack_all(&self.online, True)
                    pack_all(&self.target_net, False)
                    for _ in range(loop.n_rounds):
                        round_start = loop.env_steps
                        for k in range(loop.steps_per_round):
                            if loop.env_steps < loop.learning_starts:
                                fill_integers(choices, n, self.n_outputs, key, position)
                                position += <u64>(n + 1) // 2
                            else:
                                chance = interpolated(first, last, progress_of(&loop, loop.env_steps), fraction)
                                position = self.choose(loop.here, choices, n, chance, key, position)
                            for i in range(n):
                                loop.actions[i] = <f32>choices[i]
                            take_in(&loop, choices)
                        began = now()
                        if loop.env_steps >= loop.update_from:
                            progress = progress_of(&loop, round_start)
                            if loop.env_steps // period != moved:
                                lerp(self.t, self.weights.p, self.weights.size, <f32>share)
                                pack_all(&self.target_net, False)
                                moved = loop.env_steps // period
                            for k in range(loop.updates_per_round):
                                draw(&loop)
                                for i in range(size):
                                    batch_choices[i] = <i64>loop.batch_actions[i]
                                self.learn(&rows, size, &options, rate * (1.0 - progress) if falling else rate,
                                           loop.td_errors, metrics_ + 4 * n_updates)
                                pack_all(&self.online, True)
                                n_updates += 1
                            update_s += now() - began
                        if now() - loop.began > loop.patience:
                            break
        finally:
            action_rng.skip(position - begun)
            returns, lengths = close_loop(&loop, arrays, obs, replay_rng, replay_begun)
        return loop.env_steps - before, metrics[:n_updates], moved, update_s, returns, lengths
