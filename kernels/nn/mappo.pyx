"""The native update of MAPPO: what `rlox.algorithms.MAPPO.update` defines, for one policy of plain perceptrons.

As `rlox.kernels.nn.policy_gradient`, and the critic may read other inputs than the actor, actions may be masked, the
value loss may be Huber's or the maximum with the clipped one, and values may be normalised by running moments.
"""

import numpy as np

cimport numpy as cnp
from libc.math cimport NAN, exp, expf, fabs, log, sqrt
from libc.string cimport memcpy, memset

from rlox.kernels.checks cimport as_index
from rlox.kernels.nn.core cimport FlatLearner, clear, move
from rlox.kernels.nn.layers cimport (
    CHUNK, PAD, Layer, Net, backward, bounded, build, clear_padded, forward, given, last_of, number, pack, padded,
    scratch, size_of, unpad,
)
from rlox.kernels.nn.policy_gradient cimport Loss, Rows, Sums, categorical_loss, gaussian_loss
from rlox.kernels.philox cimport fill_permutation
from rlox.kernels.signals cimport Watch, look, watching
from rlox.kernels.types cimport cf32_r, f32, f64, i64, u8, u64

cnp.import_array()

cdef f64 LOG_SQRT_2PI = 0.91893853320467274178
# As rlox.nn.players and rlox.multi_agent.players have them.
cdef f32 LOWEST = <f32>-1e9
cdef f64 DECAY = 0.99999
cdef f64 LEAST_VARIANCE = 1e-2
cdef f64 LEAST_WEIGHT = 1e-5


cdef struct Value:
    f64 clip            # 0: off
    bint maximum
    f64 huber           # 0: squares
    f64 mean            # of returns, where values are normalised
    f64 deviation


# What a minibatch is made of, all rows of it; NULL where there is none.
cdef struct Data:
    const f32* obs
    const f32* states
    const u8* masks
    const i64* choices
    const f32* actions
    const f32* log_probs
    const f32* advantages
    const f32* returns
    const f32* values


def n_player_parameters(obs_dim: int, n_outputs: int, hidden_sizes, gaussian: bool = False, state_dim=None) -> int:
    """How many numbers the block of `NativePlayer` holds."""
    actor = [obs_dim, *hidden_sizes, n_outputs]
    critic = [obs_dim if state_dim is None else state_dim, *hidden_sizes, 1]
    return (n_outputs if gaussian else 0) + size_of(actor) + size_of(critic)


cdef inline f64 error_of(const Value* by, f64 error, f64* slope) noexcept nogil:
    """The loss of one error, and its derivative."""
    if by.huber <= 0.0:
        slope[0] = 2.0 * error
        return error * error
    if fabs(error) <= by.huber:
        slope[0] = error
        return 0.5 * error * error
    slope[0] = by.huber if error > 0.0 else -by.huber
    return by.huber * (fabs(error) - 0.5 * by.huber)


cdef void value_loss(const Value* by, f64 weight, const f32* values, Py_ssize_t ld, Py_ssize_t n, const Rows* rows,
                     f32* d_values, Sums* sums) noexcept nogil:
    """Gradients by the values, times `weight`; `rows.returns` are in the critic's units."""
    cdef Py_ssize_t i
    cdef f64 value, moved, slope, loss, clipped_slope, clipped_loss
    for i in range(n):
        value = values[i * ld]
        loss = error_of(by, value - rows.returns[i], &slope)
        if by.clip > 0.0:
            moved = value - rows.values[i]
            if fabs(moved) > by.clip:
                clipped_loss = error_of(by, rows.values[i] + bounded(moved, -by.clip, by.clip) - rows.returns[i],
                                        &clipped_slope)
                if not by.maximum or clipped_loss > loss:
                    loss, slope = clipped_loss, 0.0
        sums.value_loss += loss
        d_values[i * ld] = <f32>(weight * slope)


cdef f64 explained(cf32_r advantages, cf32_r returns, Py_ssize_t n) noexcept nogil:
    """1 less the variance of the advantages over that of the returns; NaN where all returns are equal."""
    cdef Py_ssize_t i
    cdef f64 a = 0.0, r = 0.0, total = 0.0, left = 0.0
    for i in range(n):
        a += advantages[i]
        r += returns[i]
    a /= n
    r /= n
    for i in range(n):
        left += (advantages[i] - a) * (advantages[i] - a)
        total += (returns[i] - r) * (returns[i] - r)
    return NAN if total == 0.0 else 1.0 - left / total


cdef class NativePlayer(FlatLearner):
    """A perceptron actor and a perceptron critic with inputs of its own, on one flat block, and their optimiser.

    Calls from several threads wait for each other. Nothing that is given in is kept, but for the block.

    Parameters
    ----------
    parameters
        (P,) float32, C-contiguous and writeable: the block, kept and changed in place. Order: `log_std` (A) where
        Gaussian, the actor's weight (out, in) and bias of each layer, the critic's.
    obs_dim, n_outputs
        D, and the actor's outputs: the number of actions, or A.
    hidden_sizes
        Widths of the hidden layers, at most 8, actor and critic alike.
    activation
        ``tanh`` or ``relu``.
    gaussian
        Whether actions are continuous.
    optimizer
        ``adam`` or ``rmsprop``, as `rlox.kernels.nn.policy_gradient.NativeActorCritic` has them.
    state_dim
        S, what the critic reads; None: it reads what the actor does.

    Raises
    ------
    TypeError
        `parameters` is no float32 array, or a size no integer.
    ValueError
        A size below 1, more than 8 hidden layers, an unknown activation or optimiser, a block of another length or not
        C-contiguous and writeable.
    """

    cdef readonly Py_ssize_t n_outputs
    cdef readonly Py_ssize_t state_dim
    cdef readonly bint gaussian
    cdef readonly bint central
    cdef Py_ssize_t state_pad
    cdef Net actor
    cdef Net critic
    cdef f32* x
    cdef f32* s
    cdef f32* gathered
    cdef f64* d_log_std

    def __cinit__(self, parameters, obs_dim, n_outputs, hidden_sizes, activation: str = "tanh",
                  gaussian: bool = False, optimizer: str = "adam", state_dim=None):
        cdef Py_ssize_t at = 0
        cdef str where = "NativePlayer"
        self.n_outputs = n_outputs = self.begin(where, obs_dim, n_outputs, "n_outputs", hidden_sizes, activation)
        obs_dim = self.obs_dim
        if optimizer not in ("adam", "rmsprop"):
            raise ValueError(f"{where}: optimizer must be adam or rmsprop, got {optimizer!r}")
        self.gaussian, self.central = gaussian, state_dim is not None
        self.state_dim = as_index(state_dim, where, "state_dim") if self.central else self.obs_dim
        if self.state_dim < 1:
            raise ValueError(f"{where}: state_dim must be >= 1, got {self.state_dim}")
        self.state_pad = padded(self.state_dim)
        size = n_player_parameters(obs_dim, n_outputs, self.hidden, gaussian, self.state_dim)
        self.hold(parameters, size, where, 1e-5, optimizer == "adam")
        self.x = scratch(self.held, CHUNK * self.obs_pad)
        self.s = scratch(self.held, CHUNK * self.state_pad) if self.central else self.x
        self.gathered = scratch(self.held, CHUNK * (4 + 2 * self.n_outputs))
        self.d_log_std = <f64*>scratch(self.held, 2 * self.n_outputs)
        cdef f32* block = self.weights.p
        cdef f32* d_block = self.weights.g
        if gaussian:
            at = n_outputs
        at = build(&self.actor, [obs_dim, *self.hidden, n_outputs], self.tanh, block, d_block, at, self.held)
        build(&self.critic, [self.state_dim, *self.hidden, 1], self.tanh, block, d_block, at, self.held)

    cdef object actions_of(self, object actions, Py_ssize_t n, str where):
        """`actions` after their checks: (n,) int64 in range, or (n, A) float32."""
        if self.gaussian:
            return given(actions, cnp.NPY_FLOAT32, "float32", (n, self.n_outputs), where, "actions")
        cdef cnp.ndarray choices = given(actions, cnp.NPY_INT64, "int64", (n,), where, "actions")
        cdef const i64* x = <const i64*>cnp.PyArray_DATA(choices)
        cdef Py_ssize_t i
        for i in range(n):
            if x[i] < 0 or x[i] >= self.n_outputs:
                raise ValueError(f"{where}: actions must be in [0, {self.n_outputs}), got {x[i]}")
        return choices

    cdef object masks_of(self, object masks, Py_ssize_t n, str where):
        """`masks` after their checks: (n, n_outputs) bool, or None."""
        if masks is None:
            return None
        if self.gaussian:
            raise ValueError(f"{where}: masks must be None where actions are continuous")
        return given(masks, cnp.NPY_BOOL, "bool", (n, self.n_outputs), where, "masks")

    cdef object states_of(self, object states, Py_ssize_t n, str where):
        """`states` after their checks: (n, S) float32 where the critic is central, else None."""
        if not self.central:
            if states is not None:
                raise ValueError(f"{where}: states must be None where the critic reads the observations")
            return None
        return given(states, cnp.NPY_FLOAT32, "float32", (n, self.state_dim), where, "states")

    cdef const f32* acted(self, const f32* obs, Py_ssize_t ld, const u8* masks, Py_ssize_t rows) noexcept nogil:
        """The actor's outputs (rows, out_pad), those of illegal actions the lowest. The actor must be packed."""
        cdef Py_ssize_t i, j, a = self.n_outputs, out = last_of(&self.actor).out_pad
        cdef f32* y = <f32*>forward(&self.actor, obs, ld, rows)
        if masks != NULL:
            for i in range(rows):
                for j in range(a):
                    if not masks[i * a + j]:
                        y[i * out + j] = LOWEST
        return y

    cdef void act_on(self, const f32* obs, Py_ssize_t n, const f32* noise, const u8* masks, i64* choices,
                     f32* actions) noexcept nogil:
        """Sample actions: argmax(logits + Gumbel noise), or mean + noise * std. The actor must be packed."""
        cdef Py_ssize_t start = 0, rows, i, j, best, a = self.n_outputs
        cdef const f32* y
        cdef const f32* log_std = self.weights.p
        cdef const f32* z
        cdef Py_ssize_t ld = last_of(&self.actor).out_pad
        while start < n:
            rows = min(CHUNK, n - start)
            y = self.acted(obs + start * self.obs_dim, self.obs_dim, NULL if masks == NULL else masks + start * a, rows)
            for i in range(rows):
                z = noise + (start + i) * a
                if self.gaussian:
                    for j in range(a):
                        actions[(start + i) * a + j] = y[i * ld + j] + z[j] * expf(log_std[j])
                else:
                    best = 0
                    for j in range(1, a):
                        if y[i * ld + j] + z[j] > y[i * ld + best] + z[best]:
                            best = j
                    choices[start + i] = best
            start += rows

    def act(self, obs, noise, masks=None):
        """Sampled actions, (B,) int64 or (B, A) float32, for observations (B, D) and noise (B, n_outputs) float32.

        Categorical: argmax(outputs + noise) over the actions that `masks` (B, n_outputs) bool allow. Gaussian: mean +
        noise * std, not clipped.
        """
        cdef str where = "NativePlayer.act"
        cdef cnp.ndarray obs_ = self.rows_of(obs, where)
        cdef Py_ssize_t n = cnp.PyArray_DIM(obs_, 0)
        cdef cnp.ndarray noise_ = given(noise, cnp.NPY_FLOAT32, "float32", (n, self.n_outputs), where, "noise")
        legal = self.masks_of(masks, n, where)
        cdef const u8* masks_ = NULL
        if legal is not None:
            masks_ = <const u8*>cnp.PyArray_DATA(<cnp.ndarray>legal)
        cdef cnp.ndarray out = np.empty((n, self.n_outputs), np.float32) if self.gaussian else np.empty(n, np.int64)
        with self.lock:
            with nogil:
                pack(&self.actor, False)
                self.act_on(<const f32*>cnp.PyArray_DATA(obs_), n, <const f32*>cnp.PyArray_DATA(noise_), masks_,
                            <i64*>cnp.PyArray_DATA(out), <f32*>cnp.PyArray_DATA(out))
        return out

    def mode(self, obs, masks=None):
        """The most likely actions for observations (B, D): (B,) int64, or (B, A) float32."""
        return self.act(obs, np.zeros((len(obs), self.n_outputs), np.float32), masks)

    def values(self, states):
        """Values (B,) float32 for what the critic reads, (B, S) float32."""
        shape = np.shape(states)
        cdef cnp.ndarray x = given(states, cnp.NPY_FLOAT32, "float32",
                                   (shape[0] if len(shape) == 2 else "B", self.state_dim), "NativePlayer.values", "states")
        cdef Py_ssize_t n = cnp.PyArray_DIM(x, 0), start = 0, rows, i
        cdef cnp.ndarray out = np.empty(n, np.float32)
        cdef f32* values = <f32*>cnp.PyArray_DATA(out)
        cdef const f32* y
        with self.lock:
            with nogil:
                pack(&self.critic, False)
                while start < n:
                    rows = min(CHUNK, n - start)
                    y = forward(&self.critic, <const f32*>cnp.PyArray_DATA(x) + start * self.state_dim, self.state_dim,
                                rows)
                    for i in range(rows):
                        values[start + i] = y[i * PAD]
                    start += rows
        return out

    def log_probs(self, obs, actions, masks=None):
        """Log-probabilities (B,) of actions, (B,) int64 or (B, A) float32, for observations (B, D), in nats."""
        cdef str where = "NativePlayer.log_probs"
        cdef cnp.ndarray obs_ = self.rows_of(obs, where)
        cdef Py_ssize_t n = cnp.PyArray_DIM(obs_, 0), start = 0, rows, i, j, a = self.n_outputs
        cdef Py_ssize_t ld = last_of(&self.actor).out_pad
        cdef cnp.ndarray actions_ = self.actions_of(actions, n, where)
        legal = self.masks_of(masks, n, where)
        cdef const u8* masks_ = NULL
        if legal is not None:
            masks_ = <const u8*>cnp.PyArray_DATA(<cnp.ndarray>legal)
        cdef cnp.ndarray out = np.empty(n, np.float32)
        cdef f32* out_ = <f32*>cnp.PyArray_DATA(out)
        cdef const f32* x
        cdef const f32* y
        cdef const f32* log_std = self.weights.p
        cdef const i64* choices = <const i64*>cnp.PyArray_DATA(actions_)
        cdef const f32* continuous = <const f32*>cnp.PyArray_DATA(actions_)
        cdef f32 top
        cdef f64 total, z
        with self.lock:
            with nogil:
                pack(&self.actor, False)
                while start < n:
                    rows = min(CHUNK, n - start)
                    y = self.acted(<const f32*>cnp.PyArray_DATA(obs_) + start * self.obs_dim, self.obs_dim,
                                   NULL if masks_ == NULL else masks_ + start * a, rows)
                    for i in range(rows):
                        x = y + i * ld
                        if self.gaussian:
                            total = -a * LOG_SQRT_2PI
                            for j in range(a):
                                z = (continuous[(start + i) * a + j] - x[j]) * exp(-<f64>log_std[j])
                                total -= 0.5 * z * z + log_std[j]
                            out_[start + i] = <f32>total
                        else:
                            top = x[0]
                            for j in range(1, a):
                                top = max(top, x[j])
                            total = 0.0
                            for j in range(a):
                                total += expf(x[j] - top)
                            out_[start + i] = <f32>(x[choices[start + i]] - top - log(total))
                    start += rows
        return out

    cdef int gradients(self, const Loss* loss, const Value* by, const Data* data, const i64* order, Py_ssize_t n,
                       bint normalize, Sums* sums, Watch* watch) except -1 nogil:
        """Gradient of the n minibatch rows `order`, into self.gradient."""
        cdef Py_ssize_t start, rows, i, k, a = self.n_outputs, d = self.obs_dim, s = self.state_dim
        cdef f64 scale = 1.0 / n, mean = 0.0, deviation = 1.0, square = 0.0, shift
        cdef f32* log_probs_ = self.gathered
        cdef f32* advantages_ = self.gathered + CHUNK
        cdef f32* returns_ = self.gathered + 2 * CHUNK
        cdef f32* values_ = self.gathered + 3 * CHUNK
        cdef i64* choices_ = <i64*>(self.gathered + 4 * CHUNK)
        cdef f32* actions_ = self.gathered + 4 * CHUNK
        cdef Rows held
        cdef Layer* head = last_of(&self.actor)
        cdef Layer* value = last_of(&self.critic)
        clear(&self.weights, &self.actor, 1)
        clear_padded(&self.critic)
        for k in range(a):
            self.d_log_std[k] = 0.0
        if normalize and n > 1:
            for i in range(n):
                mean += data.advantages[order[i]]
            mean *= scale
            for i in range(n):
                shift = data.advantages[order[i]] - mean
                square += shift * shift
            deviation = sqrt(square / (n - 1)) + 1e-8
        held = Rows(obs=self.x, choices=choices_, actions=actions_, log_probs=log_probs_, advantages=advantages_,
                    returns=returns_, values=values_)
        start = 0
        while start < n:
            look(watch)
            rows = min(CHUNK, n - start)
            for i in range(rows):
                k = order[start + i]
                memcpy(self.x + i * self.obs_pad, data.obs + k * d, d * sizeof(f32))
                if self.central:
                    memcpy(self.s + i * self.state_pad, data.states + k * s, s * sizeof(f32))
                log_probs_[i] = data.log_probs[k]
                advantages_[i] = <f32>((data.advantages[k] - mean) / deviation)
                returns_[i] = <f32>((data.returns[k] - by.mean) / by.deviation)
                values_[i] = data.values[k]
                if self.gaussian:
                    memcpy(actions_ + i * a, data.actions + k * a, a * sizeof(f32))
                else:
                    choices_[i] = data.choices[k]
            forward(&self.actor, self.x, self.obs_pad, rows)
            forward(&self.critic, self.s, self.state_pad, rows)
            if data.masks != NULL:
                for i in range(rows):
                    for k in range(a):
                        if not data.masks[order[start + i] * a + k]:
                            head.out[i * head.out_pad + k] = LOWEST
            if self.gaussian:
                gaussian_loss(loss, head.out, head.out_pad, rows, a, self.weights.p, &held, scale, head.d_out,
                              self.d_log_std, sums)
            else:
                categorical_loss(loss, head.out, head.out_pad, rows, a, &held, scale, head.d_out, sums)
            value_loss(by, scale * loss.vf_coef, value.out, value.out_pad, rows, &held, value.d_out, sums)
            backward(&self.actor, self.x, self.obs_pad, rows)
            backward(&self.critic, self.s, self.state_pad, rows)
            start += rows
        unpad(&self.actor)
        unpad(&self.critic)
        if self.gaussian:
            for k in range(a):
                self.weights.g[k] = <f32>self.d_log_std[k]
        return 0

    def ppo(self, obs, actions, log_probs, advantages, returns, values, rng, *, n_epochs, batch_size, learning_rate,
            clip_eps, vf_coef, ent_coef, max_grad_norm=None, clip_vf=None, target_kl=None, normalize_advantages=True,
            states=None, masks=None, clip_vf_max=False, huber_delta=None, moments=None):
        """All epochs of an update of one policy, what `rlox.algorithms.MAPPO.update` defines.

        Parameters
        ----------
        obs, actions, log_probs, advantages, returns, values, rng, n_epochs, batch_size, learning_rate, clip_eps, \
        vf_coef, ent_coef, max_grad_norm, clip_vf, target_kl, normalize_advantages
            As `rlox.kernels.nn.policy_gradient.NativeActorCritic.ppo` takes them; `values` in the critic's units.
        states
            (B, S) float32, what a central critic reads.
        masks
            (B, n_outputs) bool, legal actions; None: all are.
        clip_vf_max, huber_delta
            As `rlox.nn.players.critic_loss` takes them.
        moments
            (3,) float64 of `rlox.multi_agent.players.ValueNorm`, changed in place; None: values are not normalised.

        Returns
        -------
        dict
            Means over the minibatches taken: ``policy_loss value_loss entropy approx_kl clip_fraction grad_norm``; and
            ``explained_variance`` of the values before. NaN in the data or the weights makes them NaN.
        """
        cdef str where = "NativePlayer.ppo"
        cdef Loss loss = Loss(ppo=True, clip_eps=number(clip_eps, 0.0, where, "clip_eps"),
                              vf_coef=number(vf_coef, 0.0, where, "vf_coef"),
                              ent_coef=number(ent_coef, 0.0, where, "ent_coef"), clip_vf=0.0)
        cdef Value by = Value(clip=0.0 if clip_vf is None else number(clip_vf, 0.0, where, "clip_vf"),
                              maximum=clip_vf_max,
                              huber=0.0 if huber_delta is None else number(huber_delta, 0.0, where, "huber_delta"),
                              mean=0.0, deviation=1.0)
        cdef f64 rate = number(learning_rate, 0.0, where, "learning_rate")
        cdef f64 limit = 0.0 if max_grad_norm is None else number(max_grad_norm, 0.0, where, "max_grad_norm")
        cdef f64 kl = 0.0 if target_kl is None else number(target_kl, 0.0, where, "target_kl")
        cdef Py_ssize_t epochs = as_index(n_epochs, where, "n_epochs"), size = as_index(batch_size, where, "batch_size")
        if epochs < 1 or size < 1:
            raise ValueError(f"{where}: n_epochs and batch_size must be >= 1, got {epochs} and {size}")
        cdef bint normalize = normalize_advantages
        cdef cnp.ndarray x = self.rows_of(obs, where)
        cdef Py_ssize_t n = cnp.PyArray_DIM(x, 0), start, rows, epoch, i
        if n < 1:
            raise ValueError(f"{where}: obs must hold at least one row, got none")
        taken = self.actions_of(actions, n, where)
        seen, legal = self.states_of(states, n, where), self.masks_of(masks, n, where)
        cdef list columns = [
            given(column, cnp.NPY_FLOAT32, "float32", (n,), where, name)
            for name, column in (("log_probs", log_probs), ("advantages", advantages), ("returns", returns),
                                 ("values", values))
        ]
        cdef Data data
        memset(&data, 0, sizeof(data))
        data.obs = <const f32*>cnp.PyArray_DATA(x)
        if seen is not None:
            data.states = <const f32*>cnp.PyArray_DATA(<cnp.ndarray>seen)
        if legal is not None:
            data.masks = <const u8*>cnp.PyArray_DATA(<cnp.ndarray>legal)
        data.choices = <const i64*>cnp.PyArray_DATA(<cnp.ndarray>taken)
        data.actions = <const f32*>cnp.PyArray_DATA(<cnp.ndarray>taken)
        data.log_probs = <const f32*>cnp.PyArray_DATA(<cnp.ndarray>columns[0])
        data.advantages = <const f32*>cnp.PyArray_DATA(<cnp.ndarray>columns[1])
        data.returns = <const f32*>cnp.PyArray_DATA(<cnp.ndarray>columns[2])
        data.values = <const f32*>cnp.PyArray_DATA(<cnp.ndarray>columns[3])
        cdef f64* running = NULL
        if moments is not None:
            held = given(moments, cnp.NPY_FLOAT64, "float64", (3,), where, "moments")
            if held is not moments:
                raise ValueError(f"{where}: moments must be C-contiguous, since they are changed in place")
            running = <f64*>cnp.PyArray_DATA(<cnp.ndarray>held)
        cdef cnp.ndarray order = np.empty(n, np.int64)
        cdef i64* at = <i64*>cnp.PyArray_DATA(order)
        cdef u64 key = rng.key
        cdef u64 position = rng.position
        cdef u64 begun = position
        cdef Sums sums
        cdef f64[6] totals
        cdef f64 norm, mean, square, explained_ = 0.0
        cdef i64 count = 0
        cdef bint stop = False
        cdef Watch watch = watching()
        memset(totals, 0, sizeof(totals))
        try:
            with self.lock:
                with nogil:
                    explained_ = explained(data.advantages, data.returns, n)
                    for epoch in range(epochs):
                        fill_permutation(at, n, key, position)
                        position += <u64>(n + 1) // 2
                        start = 0
                        while start < n:
                            rows = min(size, n - start)
                            if n - start - rows == 1 and size > 1:
                                rows += 1  # as rlox.nn.batch.minibatches: no minibatch of the one row left over
                            if running != NULL:
                                mean = square = 0.0
                                for i in range(start, start + rows):
                                    mean += data.returns[at[i]]
                                    square += <f64>data.returns[at[i]] * data.returns[at[i]]
                                running[0] = running[0] * DECAY + (1.0 - DECAY) * (mean / rows)
                                running[1] = running[1] * DECAY + (1.0 - DECAY) * (square / rows)
                                running[2] = running[2] * DECAY + (1.0 - DECAY)
                                by.mean = running[0] / max(running[2], LEAST_WEIGHT)
                                square = running[1] / max(running[2], LEAST_WEIGHT)
                                by.deviation = sqrt(max(square - by.mean * by.mean, LEAST_VARIANCE))
                            pack(&self.actor, True)
                            pack(&self.critic, True)
                            memset(&sums, 0, sizeof(sums))
                            self.gradients(&loss, &by, &data, at + start, rows, normalize, &sums, &watch)
                            if kl > 0.0 and count and sums.approx_kl / rows > 1.5 * kl:
                                stop = True
                                break
                            norm = move(&self.weights, rate, limit)
                            totals[0] += sums.policy_loss / rows
                            totals[1] += sums.value_loss / rows
                            totals[2] += sums.entropy / rows
                            totals[3] += sums.approx_kl / rows
                            totals[4] += sums.clipped / rows
                            totals[5] += norm
                            count += 1
                            start += rows
                        if stop:
                            break
        finally:
            rng.skip(position - begun)
        names = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm")
        metrics = {name: totals[k] / count for k, name in enumerate(names)}
        metrics["explained_variance"] = explained_
        return metrics
