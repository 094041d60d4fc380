"""Common parts of PPO, A2C and MAPPO: a perceptron actor and a perceptron critic on one block, and their update."""

import numpy as np

cimport numpy as cnp
from libc.math cimport NAN, exp, expf, fabs, log, sqrt
from libc.string cimport memcpy, memset

from rlox.kernels.checks cimport as_index
from rlox.kernels.nn.core cimport FlatLearner, clear, move
from rlox.kernels.nn.layers cimport (
    CHUNK, PAD, Layer, backward, bounded, build, clear_padded, forward, given, last_of, number, numbers_below, pack,
    padded, scratch, size_of, unpad,
)
from rlox.kernels.philox cimport fill_permutation
from rlox.kernels.signals cimport Watch, check_signals, watching
from rlox.kernels.types cimport cf32_r, f32, f64, i64, u8, u64

cnp.import_array()

cdef f64 LOG_SQRT_2PI = 0.91893853320467274178
# The same as in rlox.nn.policies and rlox.multi_agent.players.
cdef f32 LOWEST = <f32>-1e9
cdef f64 DECAY = 0.99999
cdef f64 LEAST_VARIANCE = 1e-2
cdef f64 LEAST_WEIGHT = 1e-5


def n_parameters(obs_dim: int, n_outputs: int, hidden_sizes, gaussian: bool = False, state_dim=None) -> int:
    """Return the size of the block of an actor and a critic with `state_dim` inputs (None: those of the actor)."""
    actor = [obs_dim, *hidden_sizes, n_outputs]
    critic = [obs_dim if state_dim is None else state_dim, *hidden_sizes, 1]
    return (n_outputs if gaussian else 0) + size_of(actor) + size_of(critic)


cdef inline f64 policy_term(const Loss* loss, f64 log_prob, f64 old, f64 advantage, Sums* sums) noexcept nogil:
    """Add the policy loss of one row; return its derivative with respect to the log-probability."""
    cdef f64 log_ratio, ratio, clipped, first, second
    if not loss.ppo:
        sums.policy_loss -= log_prob * advantage
        return -advantage
    log_ratio = log_prob - old
    ratio = exp(log_ratio)
    clipped = bounded(ratio, 1.0 - loss.clip_eps, 1.0 + loss.clip_eps)
    first = ratio * advantage
    second = clipped * advantage
    sums.approx_kl += ratio - 1.0 - log_ratio
    sums.clipped += ratio != clipped
    sums.policy_loss -= min(first, second)
    # If the clipped term is smaller, the loss does not depend on the ratio.
    return -first if first <= second else 0.0


cdef void categorical_loss(const Loss* loss, const f32* logits, Py_ssize_t ld, Py_ssize_t n, Py_ssize_t n_actions,
                           const Rows* rows, f64 scale, f32* d_logits, Sums* sums) noexcept nogil:
    """Write gradients (n, ld) with respect to the logits, times `scale` = 1 / B, and add to the metrics' sums."""
    cdef Py_ssize_t i, j
    cdef const f32* x
    cdef f32* d
    cdef f32 top
    cdef f64 total, log_total, entropy, d_log_prob, p, log_p
    for i in range(n):
        x = logits + i * ld
        d = d_logits + i * ld
        top = x[0]
        for j in range(1, n_actions):
            top = max(top, x[j])
        total = 0.0
        for j in range(n_actions):
            d[j] = expf(x[j] - top)
            total += d[j]
        log_total = log(total)
        entropy = 0.0
        for j in range(n_actions):
            log_p = x[j] - top - log_total
            d[j] = <f32>(d[j] / total)
            entropy -= d[j] * log_p
        j = rows.choices[i]
        d_log_prob = policy_term(loss, x[j] - top - log_total, rows.log_probs[i], rows.advantages[i], sums)
        sums.entropy += entropy
        for j in range(n_actions):
            p = d[j]
            log_p = x[j] - top - log_total
            d[j] = <f32>(scale * (
                d_log_prob * ((1.0 if j == rows.choices[i] else 0.0) - p)
                + loss.ent_coef * p * (log_p + entropy)))


cdef void gaussian_loss(const Loss* loss, const f32* mean, Py_ssize_t ld, Py_ssize_t n, Py_ssize_t act_dim,
                        const f32* log_std, const Rows* rows, f64 scale, f32* d_mean, f64* d_log_std,
                        Sums* sums) noexcept nogil:
    cdef Py_ssize_t i, j
    cdef f64 z, log_prob, d_log_prob, total = 0.0, entropy
    for j in range(act_dim):
        total += log_std[j]
    entropy = total + act_dim * (0.5 + LOG_SQRT_2PI)
    for i in range(n):
        log_prob = -total - act_dim * LOG_SQRT_2PI
        for j in range(act_dim):
            z = (rows.actions[i * act_dim + j] - mean[i * ld + j]) * exp(-<f64>log_std[j])
            log_prob -= 0.5 * z * z
        d_log_prob = policy_term(loss, log_prob, rows.log_probs[i], rows.advantages[i], sums)
        sums.entropy += entropy
        for j in range(act_dim):
            z = (rows.actions[i * act_dim + j] - mean[i * ld + j]) * exp(-<f64>log_std[j])
            d_mean[i * ld + j] = <f32>(scale * d_log_prob * z * exp(-<f64>log_std[j]))
            d_log_std[j] += scale * (d_log_prob * (z * z - 1.0) - loss.ent_coef)


cdef inline f64 error_of(const Loss* loss, f64 error) noexcept nogil:
    """Return the loss of one error: its square, or the Huber loss."""
    if loss.huber <= 0.0:
        return error * error
    if fabs(error) <= loss.huber:
        return 0.5 * error * error
    return loss.huber * (fabs(error) - 0.5 * loss.huber)


cdef inline f64 slope_of(const Loss* loss, f64 error) noexcept nogil:
    """Return the derivative of `error_of`."""
    return 2.0 * error if loss.huber <= 0.0 else bounded(error, -loss.huber, loss.huber)


cdef void value_loss(const Loss* loss, const f32* values, Py_ssize_t ld, Py_ssize_t n, const Rows* rows, f64 scale,
                     f32* d_values, Sums* sums) noexcept nogil:
    """Write gradients with respect to the values, times `scale` = 1 / B; `rows.returns` are in the critic's units."""
    cdef Py_ssize_t i
    cdef f64 moved, error, clipped
    cdef bint free
    for i in range(n):
        error = <f64>values[i * ld] - rows.returns[i]
        free = True
        if loss.clip_vf > 0.0:
            moved = <f64>values[i * ld] - rows.values[i]
            if not fabs(moved) <= loss.clip_vf:
                clipped = rows.values[i] + bounded(moved, -loss.clip_vf, loss.clip_vf) - rows.returns[i]
                if not loss.maximum or error_of(loss, clipped) > error_of(loss, error):
                    error, free = clipped, False
        sums.value_loss += error_of(loss, error)
        d_values[i * ld] = <f32>(scale * loss.vf_coef * slope_of(loss, error)) if free else 0.0


cdef void follow(f64* moments, const f32* returns, const i64* order, Py_ssize_t n, f64* mean,
                 f64* deviation) noexcept nogil:
    """Update the running moments with the rows `order`, and write the new mean and deviation."""
    cdef Py_ssize_t i
    cdef f64 sums = 0.0, square = 0.0
    for i in range(n):
        sums += returns[order[i]]
        square += <f64>returns[order[i]] * returns[order[i]]
    moments[0] = moments[0] * DECAY + (1.0 - DECAY) * (sums / n)
    moments[1] = moments[1] * DECAY + (1.0 - DECAY) * (square / n)
    moments[2] = moments[2] * DECAY + (1.0 - DECAY)
    mean[0] = moments[0] / max(moments[2], LEAST_WEIGHT)
    square = moments[1] / max(moments[2], LEAST_WEIGHT)
    deviation[0] = sqrt(max(square - mean[0] * mean[0], LEAST_VARIANCE))


cdef f64 explained_variance(cf32_r errors, cf32_r returns, Py_ssize_t n) noexcept nogil:
    """Return 1 minus the ratio of the variances of errors and returns; NaN if all returns are equal."""
    cdef Py_ssize_t i
    cdef f64 mean = 0.0, shift = 0.0, total = 0.0, left = 0.0, x
    for i in range(n):
        mean += returns[i]
        shift += errors[i]
    mean /= n
    shift /= n
    for i in range(n):
        x = returns[i] - mean
        total += x * x
        x = errors[i] - shift
        left += x * x
    return NAN if total == 0.0 else 1.0 - left / total


cdef Options options_of(n_epochs, batch_size, learning_rate, max_grad_norm, target_kl, bint normalize,
                        str where) except *:
    """Return the options of an update after checking them."""
    cdef Options options = Options(
        epochs=as_index(n_epochs, where, "n_epochs"), size=as_index(batch_size, where, "batch_size"),
        rate=number(learning_rate, 0.0, where, "learning_rate"),
        limit=0.0 if max_grad_norm is None else number(max_grad_norm, 0.0, where, "max_grad_norm"),
        target_kl=0.0 if target_kl is None else number(target_kl, 0.0, where, "target_kl"), normalize=normalize,
    )
    if options.epochs < 1 or options.size < 1:
        raise ValueError(
            f"{where}: n_epochs and batch_size must be >= 1, got {options.epochs} and {options.size}"
        )
    return options


cdef class ActorCriticLearner(FlatLearner):
    """A perceptron actor and a perceptron critic on one block: ``log_std`` (A) if Gaussian, the actor, the critic.

    The critic may have other inputs than the actor, and actions may be masked.

    Attributes
    ----------
    n_outputs, gaussian
        Number of outputs of the actor (the number of actions, or A if Gaussian), and whether it is Gaussian.
    state_dim, central
        S, the number of inputs of the critic, and whether they are other inputs than the observations.
    """

    cdef int make(self, str where, parameters, obs_dim, n_outputs, hidden_sizes, activation, bint gaussian, optimizer,
                  state_dim) except -1:
        """Check and store the arguments, and set up the networks on the block."""
        cdef Py_ssize_t at
        self.n_outputs = self.begin(where, obs_dim, n_outputs, "n_outputs", hidden_sizes, activation)
        if optimizer not in ("adam", "rmsprop"):
            raise ValueError(f"{where}: optimizer must be adam or rmsprop, got {optimizer!r}")
        self.gaussian, self.central = gaussian, state_dim is not None
        self.state_dim = as_index(state_dim, where, "state_dim") if self.central else self.obs_dim
        if self.state_dim < 1:
            raise ValueError(f"{where}: state_dim must be >= 1, got {self.state_dim}")
        self.state_pad = padded(self.state_dim)
        size = n_parameters(self.obs_dim, self.n_outputs, self.hidden, gaussian, self.state_dim)
        self.hold(parameters, size, where, 1e-5, optimizer == "adam")
        self.x = scratch(self.held, CHUNK * self.obs_pad)
        self.s = scratch(self.held, CHUNK * self.state_pad) if self.central else self.x
        cdef f32* gathered = scratch(self.held, CHUNK * (4 + 2 * self.n_outputs))
        # Both kinds of actions share the last part, because only one of them is used.
        self.rows = Rows(log_probs=gathered, advantages=gathered + CHUNK, returns=gathered + 2 * CHUNK,
                         values=gathered + 3 * CHUNK, choices=<i64*>(gathered + 4 * CHUNK),
                         actions=gathered + 4 * CHUNK)
        self.d_log_std = <f64*>scratch(self.held, 2 * self.n_outputs)
        at = self.n_outputs if gaussian else 0
        at = build(&self.actor, [self.obs_dim, *self.hidden, self.n_outputs], self.tanh, self.weights.p,
                   self.weights.g, at, self.held)
        build(&self.critic, [self.state_dim, *self.hidden, 1], self.tanh, self.weights.p, self.weights.g, at, self.held)
        return 0

    cdef object actions_of(self, object actions, Py_ssize_t n, str where):
        """Return `actions`, (n,) int64 in range or (n, A) float32, after checking them."""
        if self.gaussian:
            return given(actions, cnp.NPY_FLOAT32, "float32", (n, self.n_outputs), where, "actions")
        return numbers_below(actions, n, self.n_outputs, where, "actions")

    cdef object masks_of(self, object masks, Py_ssize_t n, str where):
        """Return `masks`, (n, n_outputs) bool or None, after checking them."""
        if masks is None:
            return None
        if self.gaussian:
            raise ValueError(f"{where}: masks must be None if actions are continuous")
        return given(masks, cnp.NPY_BOOL, "bool", (n, self.n_outputs), where, "masks")

    cdef object states_of(self, object states, Py_ssize_t n, str where):
        """Return `states`, (n, S) float32 if the critic is central, else None, after checking them."""
        if not self.central:
            if states is not None:
                raise ValueError(f"{where}: states must be None if the critic reads the observations")
            return None
        return given(states, cnp.NPY_FLOAT32, "float32", (n, self.state_dim), where, "states")

    cdef list take(self, str where, Data* data, obs, actions, log_probs, advantages, returns, values, states, masks):
        """Check the columns of B rows and point `data` at them; return the arrays that own the memory."""
        cdef cnp.ndarray x = self.rows_of(obs, where)
        cdef Py_ssize_t n = cnp.PyArray_DIM(x, 0)
        if n < 1:
            raise ValueError(f"{where}: obs must have at least one row, got none")
        cdef cnp.ndarray taken = self.actions_of(actions, n, where)
        seen, legal = self.states_of(states, n, where), self.masks_of(masks, n, where)
        cdef list columns = [
            given(column, cnp.NPY_FLOAT32, "float32", (n,), where, name)
            for name, column in (("log_probs", log_probs), ("advantages", advantages), ("returns", returns),
                                 ("values", values))
        ]
        memset(data, 0, sizeof(Data))
        data.n = n
        data.obs = <const f32*>cnp.PyArray_DATA(x)
        if seen is not None:
            data.states = <const f32*>cnp.PyArray_DATA(<cnp.ndarray>seen)
        if legal is not None:
            data.masks = <const u8*>cnp.PyArray_DATA(<cnp.ndarray>legal)
        data.choices = <const i64*>cnp.PyArray_DATA(taken)
        data.actions = <const f32*>cnp.PyArray_DATA(taken)
        data.log_probs = <const f32*>cnp.PyArray_DATA(<cnp.ndarray>columns[0])
        data.advantages = <const f32*>cnp.PyArray_DATA(<cnp.ndarray>columns[1])
        data.returns = <const f32*>cnp.PyArray_DATA(<cnp.ndarray>columns[2])
        data.values = <const f32*>cnp.PyArray_DATA(<cnp.ndarray>columns[3])
        return [x, taken, seen, legal, *columns]

    cdef const f32* acted(self, const f32* obs, Py_ssize_t ld, const u8* masks, Py_ssize_t first,
                          Py_ssize_t rows) noexcept nogil:
        """Return the actor's outputs (rows, out_pad), very low for illegal actions. The actor must be packed."""
        cdef Py_ssize_t i, j, a = self.n_outputs, out = last_of(&self.actor).out_pad
        cdef f32* y = <f32*>forward(&self.actor, obs, ld, rows)
        if masks != NULL:
            for i in range(rows):
                for j in range(a):
                    if not masks[(first + i) * a + j]:
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
            y = self.acted(obs + start * self.obs_dim, self.obs_dim, masks, start, rows)
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

    cdef object sampled(self, str where, obs, noise, masks):
        """Return actions, (B,) int64 or (B, A) float32, for observations (B, D) and noise (B, n_outputs)."""
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

    cdef void values_of(self, const f32* states, Py_ssize_t n, f32* values) noexcept nogil:
        """Write values (n,) for inputs (n, S) of the critic. The critic must be packed."""
        cdef Py_ssize_t start = 0, rows, i, s = self.state_dim
        cdef const f32* y
        while start < n:
            rows = min(CHUNK, n - start)
            y = forward(&self.critic, states + start * s, s, rows)
            for i in range(rows):
                values[start + i] = y[i * PAD]
            start += rows

    cdef void log_probs_of(self, const f32* outputs, Py_ssize_t ld, Py_ssize_t n, const i64* choices,
                           const f32* actions, f32* log_probs) noexcept nogil:
        """Write log-probabilities (n,) of actions, in nats, from the actor's outputs (n, ld)."""
        cdef Py_ssize_t i, j, a = self.n_outputs
        cdef const f32* x
        cdef const f32* log_std = self.weights.p
        cdef f32 top
        cdef f64 total, z
        for i in range(n):
            x = outputs + i * ld
            if self.gaussian:
                total = -a * LOG_SQRT_2PI
                for j in range(a):
                    z = (actions[i * a + j] - x[j]) * exp(-<f64>log_std[j])
                    total -= 0.5 * z * z + log_std[j]
                log_probs[i] = <f32>total
            else:
                top = x[0]
                for j in range(1, a):
                    top = max(top, x[j])
                total = 0.0
                for j in range(a):
                    total += expf(x[j] - top)
                log_probs[i] = <f32>(x[choices[i]] - top - log(total))

    cdef int gradients(self, const Loss* loss, const Data* data, const i64* order, Py_ssize_t n, bint normalize,
                       Sums* sums, Watch* watch) except -1 nogil:
        """Compute self.gradient for the n minibatch rows `order`, after updating the moments of the returns."""
        cdef Py_ssize_t start, rows, i, k, a = self.n_outputs, d = self.obs_dim, s = self.state_dim
        cdef f64 scale = 1.0 / n, mean = 0.0, deviation = 1.0, square = 0.0, shift, middle = 0.0, unit = 1.0
        cdef Rows* held = &self.rows
        cdef Layer* head = last_of(&self.actor)
        cdef Layer* value = last_of(&self.critic)
        clear(&self.weights, &self.actor, 1)
        clear_padded(&self.critic)
        for k in range(a):
            self.d_log_std[k] = 0.0
        if data.moments != NULL:
            follow(data.moments, data.returns, order, n, &middle, &unit)
        if normalize and n > 1:
            for i in range(n):
                mean += data.advantages[order[i]]
            mean *= scale
            for i in range(n):
                shift = data.advantages[order[i]] - mean
                square += shift * shift
            deviation = sqrt(square / (n - 1)) + 1e-8
        start = 0
        while start < n:
            check_signals(watch)
            rows = min(CHUNK, n - start)
            for i in range(rows):
                k = order[start + i]
                memcpy(self.x + i * self.obs_pad, data.obs + k * d, d * sizeof(f32))
                if self.central:
                    memcpy(self.s + i * self.state_pad, data.states + k * s, s * sizeof(f32))
                held.log_probs[i] = data.log_probs[k]
                held.advantages[i] = <f32>((data.advantages[k] - mean) / deviation)
                held.returns[i] = <f32>((data.returns[k] - middle) / unit)
                held.values[i] = data.values[k]
                if self.gaussian:
                    memcpy(held.actions + i * a, data.actions + k * a, a * sizeof(f32))
                else:
                    held.choices[i] = data.choices[k]
            forward(&self.actor, self.x, self.obs_pad, rows)
            forward(&self.critic, self.s, self.state_pad, rows)
            if data.masks != NULL:
                for i in range(rows):
                    for k in range(a):
                        if not data.masks[order[start + i] * a + k]:
                            head.out[i * head.out_pad + k] = LOWEST
            if self.gaussian:
                gaussian_loss(loss, head.out, head.out_pad, rows, a, self.weights.p, held, scale, head.d_out,
                              self.d_log_std, sums)
            else:
                categorical_loss(loss, head.out, head.out_pad, rows, a, held, scale, head.d_out, sums)
            value_loss(loss, value.out, value.out_pad, rows, held, scale, value.d_out, sums)
            backward(&self.actor, self.x, self.obs_pad, rows)
            backward(&self.critic, self.s, self.state_pad, rows)
            start += rows
        unpad(&self.actor)
        unpad(&self.critic)
        if self.gaussian:
            for k in range(a):
                self.weights.g[k] = <f32>self.d_log_std[k]
        return 0

    cdef dict learn(self, const Loss* loss, const Options* options, const Data* data, rng):
        """Take minibatch steps, without shuffling if `rng` is None; return means of the metrics over these steps."""
        cdef Py_ssize_t n = data.n, start, rows, epoch
        cdef cnp.ndarray order = np.arange(n) if rng is None else np.empty(n, np.int64)
        cdef i64* at = <i64*>cnp.PyArray_DATA(order)
        cdef bint shuffled = rng is not None
        cdef u64 key = rng.key if shuffled else 0
        cdef u64 position = rng.position if shuffled else 0
        cdef u64 begun = position
        cdef Sums sums
        cdef f64[6] totals
        cdef f64 norm
        cdef i64 count = 0
        cdef bint stop = False
        cdef Watch watch = watching()
        memset(totals, 0, sizeof(totals))
        try:
            with self.lock:
                with nogil:
                    for epoch in range(options.epochs):
                        if shuffled:
                            fill_permutation(at, n, key, position)
                            position += <u64>(n + 1) // 2
                        start = 0
                        while start < n:
                            rows = min(options.size, n - start)
                            if n - start - rows == 1 and options.size > 1:
                                rows += 1  # like rlox.nn.batch.minibatches: no minibatch of one remaining row
                            pack(&self.actor, True)
                            pack(&self.critic, True)
                            memset(&sums, 0, sizeof(sums))
                            self.gradients(loss, data, at + start, rows, options.normalize, &sums, &watch)
                            if options.target_kl > 0.0 and count and sums.approx_kl / rows > 1.5 * options.target_kl:
                                stop = True
                                break
                            norm = move(&self.weights, options.rate, options.limit)
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
            if shuffled:
                rng.skip(position - begun)
        names = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm")
        return {name: totals[k] / count for k, name in enumerate(names)}
