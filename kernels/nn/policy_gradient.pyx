"""The native update of PPO and A2C: what their PyTorch `update` defines, for actor-critics of plain perceptrons.

Parameters are one flat float32 block in the order of ``policy.parameters()``, each weight (n_out, n_in) as PyTorch has
it, so that a module whose parameters are views of the block and this code always see the same numbers. A minibatch is
worked through `CHUNK` rows at a time, so that activations stay in the cache whatever the batch size; gradients add up.
"""

import numpy as np

cimport numpy as cnp
from libc.math cimport NAN, exp, expf, fabs, log, sqrt
from libc.string cimport memcpy, memset
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid

from rlox.kernels.checks cimport as_index, check_out
from rlox.kernels.envs.stepper cimport RLOX_STEPPER_CAPSULE, rlox_stepper
from rlox.kernels.nn.layers cimport (
    CHUNK, PAD, Layer, Net, backward, bounded, build, clear_padded, forward, given, last_of, number, pack, scratch,
    size_of, unpad,
)
from rlox.kernels.philox cimport fill_permutation
from rlox.kernels.signals cimport Watch, look, watching
from rlox.kernels.types cimport cf32_r, f32, f64, i64, u8, u64
from rlox.kernels.nn.core cimport FlatLearner, clear, move

cnp.import_array()

cdef enum Head:
    CATEGORICAL
    GAUSSIAN

cdef f64 LOG_SQRT_2PI = 0.91893853320467274178


cdef inline f64 policy_term(const Loss* loss, f64 log_prob, f64 old, f64 advantage, Sums* sums) noexcept nogil:
    """Add the policy loss of one row; return its derivative by the log-probability."""
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
    # Where the clipped term is the smaller one, nothing depends on the ratio.
    return -first if first <= second else 0.0


cdef void categorical_loss(const Loss* loss, const f32* logits, Py_ssize_t ld, Py_ssize_t n, Py_ssize_t n_actions,
                           const Rows* rows, f64 scale, f32* d_logits, Sums* sums) noexcept nogil:
    """Gradients (n, ld) by the logits, times `scale` = 1 / B, and the sums that metrics are made of."""
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


cdef void value_loss(const Loss* loss, const f32* values, Py_ssize_t ld, Py_ssize_t n, const Rows* rows, f64 scale,
                     f32* d_values, Sums* sums) noexcept nogil:
    cdef Py_ssize_t i
    cdef f64 value, error, moved
    cdef bint inside
    for i in range(n):
        value = values[i * ld]
        inside = True
        if loss.clip_vf > 0.0:
            moved = value - rows.values[i]
            inside = fabs(moved) <= loss.clip_vf
            value = rows.values[i] + bounded(moved, -loss.clip_vf, loss.clip_vf)
        error = value - rows.returns[i]
        sums.value_loss += error * error
        d_values[i * ld] = <f32>(scale * loss.vf_coef * 2.0 * error) if inside else 0.0


cdef f64 explained_variance(cf32_r returns, cf32_r values, Py_ssize_t n) noexcept nogil:
    """Share of the returns' variance that the values explain; NaN where all returns are equal."""
    cdef Py_ssize_t i
    cdef f64 mean = 0.0, shift = 0.0, total = 0.0, left = 0.0, x
    for i in range(n):
        mean += returns[i]
        shift += returns[i] - values[i]
    mean /= n
    shift /= n
    for i in range(n):
        x = returns[i] - mean
        total += x * x
        x = returns[i] - values[i] - shift
        left += x * x
    if total == 0.0:
        return NAN
    return 1.0 - left / total


def n_parameters(obs_dim: int, n_outputs: int, hidden_sizes, gaussian: bool = False) -> int:
    """How many numbers the block of `NativeActorCritic` holds."""
    actor, critic = ([obs_dim, *hidden_sizes, n] for n in (n_outputs, 1))
    return (n_outputs if gaussian else 0) + size_of(actor) + size_of(critic)


cdef class NativeActorCritic(FlatLearner):
    """A perceptron actor and a perceptron critic on one flat block of parameters, and their optimiser.

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
        ``adam`` (betas 0.9, 0.999) or ``rmsprop`` (decay 0.99), both with eps 1e-5 outside the root, as PyTorch has
        them.

    Attributes
    ----------
    parameters, gradient, moments, step
        Of the last minibatch, and of the optimiser; see `FlatLearner`.

    Raises
    ------
    TypeError
        `parameters` is no float32 array, or a size no integer.
    ValueError
        A size below 1, more than 8 hidden layers, an unknown activation or optimiser, a block of another length or not
        C-contiguous and writeable.
    """

    cdef readonly Py_ssize_t n_outputs
    cdef readonly bint gaussian
    cdef Net actor
    cdef Net critic
    cdef f32* x
    cdef f32* gathered
    cdef f64* d_log_std

    def __cinit__(self, parameters, obs_dim, n_outputs, hidden_sizes, activation: str = "tanh",
                  gaussian: bool = False, optimizer: str = "adam"):
        cdef Py_ssize_t at = 0
        cdef str where = "NativeActorCritic"
        self.n_outputs = n_outputs = self.begin(where, obs_dim, n_outputs, "n_outputs", hidden_sizes, activation)
        obs_dim = self.obs_dim
        if optimizer not in ("adam", "rmsprop"):
            raise ValueError(f"{where}: optimizer must be adam or rmsprop, got {optimizer!r}")
        self.gaussian = gaussian
        self.hold(parameters, n_parameters(obs_dim, n_outputs, self.hidden, gaussian), where, 1e-5, optimizer == "adam")
        self.x = scratch(self.held, CHUNK * self.obs_pad)
        self.gathered = scratch(self.held, CHUNK * (4 + 2 * self.n_outputs))
        self.d_log_std = <f64*>scratch(self.held, 2 * self.n_outputs)
        cdef f32* block = self.weights.p
        cdef f32* d_block = self.weights.g
        if gaussian:
            at = n_outputs
        at = build(&self.actor, [obs_dim, *self.hidden, n_outputs], self.tanh, block, d_block, at, self.held)
        build(&self.critic, [obs_dim, *self.hidden, 1], self.tanh, block, d_block, at, self.held)

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

    def outputs(self, obs):
        """Actor outputs (B, n_outputs) and values (B,), float32, for observations (B, D) float32."""
        cdef cnp.ndarray obs_ = self.rows_of(obs, "NativeActorCritic.outputs")
        cdef Py_ssize_t n = cnp.PyArray_DIM(obs_, 0)
        cdef cnp.ndarray out = np.empty((n, self.n_outputs), np.float32)
        cdef cnp.ndarray values = np.empty(n, np.float32)
        with self.lock:
            with nogil:
                pack(&self.actor, False)
                pack(&self.critic, False)
                self.run(<const f32*>cnp.PyArray_DATA(obs_), n, <f32*>cnp.PyArray_DATA(out),
                         <f32*>cnp.PyArray_DATA(values))
        return out, values

    def values(self, obs):
        """Values (B,) float32 for observations (B, D) float32."""
        cdef cnp.ndarray obs_ = self.rows_of(obs, "NativeActorCritic.values")
        cdef Py_ssize_t n = cnp.PyArray_DIM(obs_, 0)
        cdef cnp.ndarray values = np.empty(n, np.float32)
        with self.lock:
            with nogil:
                pack(&self.critic, False)
                self.run(<const f32*>cnp.PyArray_DATA(obs_), n, NULL, <f32*>cnp.PyArray_DATA(values))
        return values

    def mode(self, obs):
        """The most likely actions for observations (B, D): (B,) int64, or (B, A) float32."""
        cdef cnp.ndarray obs_ = self.rows_of(obs, "NativeActorCritic.mode")
        cdef Py_ssize_t n = cnp.PyArray_DIM(obs_, 0)
        noise = np.zeros((n, self.n_outputs), np.float32)
        return self.act(obs, noise)

    cdef void run(self, const f32* obs, Py_ssize_t n, f32* out, f32* values) noexcept nogil:
        cdef Py_ssize_t start, i, rows
        cdef const f32* y
        cdef Py_ssize_t ld = last_of(&self.actor).out_pad
        start = 0
        while start < n:
            rows = min(CHUNK, n - start)
            if out != NULL:
                y = forward(&self.actor, obs + start * self.obs_dim, self.obs_dim, rows)
                for i in range(rows):
                    memcpy(out + (start + i) * self.n_outputs, y + i * ld, self.n_outputs * sizeof(f32))
            y = forward(&self.critic, obs + start * self.obs_dim, self.obs_dim, rows)
            for i in range(rows):
                values[start + i] = y[i * PAD]
            start += rows

    cdef int gradients(self, const Loss* loss, const f32* obs, const i64* choices, const f32* actions,
                       const f32* log_probs, const f32* advantages, const f32* returns, const f32* values,
                       const i64* order, Py_ssize_t n, bint normalize, Sums* sums, Watch* watch) except -1 nogil:
        """Gradient of the minibatch rows `order` (NULL: the first n), into self.gradient."""
        cdef Py_ssize_t start, rows, i, k, a = self.n_outputs, d = self.obs_dim
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
                mean += advantages[order[i] if order != NULL else i]
            mean *= scale
            for i in range(n):
                shift = advantages[order[i] if order != NULL else i] - mean
                square += shift * shift
            deviation = sqrt(square / (n - 1)) + 1e-8
        held = Rows(obs=self.x, choices=choices_, actions=actions_, log_probs=log_probs_, advantages=advantages_,
                    returns=returns_, values=values_)
        start = 0
        while start < n:
            look(watch)
            rows = min(CHUNK, n - start)
            for i in range(rows):
                k = order[start + i] if order != NULL else start + i
                memcpy(self.x + i * self.obs_pad, obs + k * d, d * sizeof(f32))
                log_probs_[i] = log_probs[k]
                advantages_[i] = <f32>((advantages[k] - mean) / deviation)
                returns_[i] = returns[k]
                values_[i] = values[k]
                if self.gaussian:
                    memcpy(actions_ + i * a, actions + k * a, a * sizeof(f32))
                else:
                    choices_[i] = choices[k]
            forward(&self.actor, self.x, self.obs_pad, rows)
            forward(&self.critic, self.x, self.obs_pad, rows)
            if self.gaussian:
                gaussian_loss(loss, head.out, head.out_pad, rows, a, self.weights.p, &held, scale, head.d_out,
                              self.d_log_std, sums)
            else:
                categorical_loss(loss, head.out, head.out_pad, rows, a, &held, scale, head.d_out, sums)
            value_loss(loss, value.out, value.out_pad, rows, &held, scale, value.d_out, sums)
            backward(&self.actor, self.x, self.obs_pad, rows)
            backward(&self.critic, self.x, self.obs_pad, rows)
            start += rows
        unpad(&self.actor)
        unpad(&self.critic)
        if self.gaussian:
            for k in range(a):
                self.weights.g[k] = <f32>self.d_log_std[k]
        return 0

    cdef void act_on(self, const f32* obs, Py_ssize_t n, const f32* noise, i64* choices, f32* actions) noexcept nogil:
        """Sample actions: argmax(logits + Gumbel noise), or mean + noise * std. The actor must be packed."""
        cdef Py_ssize_t start = 0, rows, i, j, best, a = self.n_outputs
        cdef const f32* y
        cdef const f32* log_std = self.weights.p
        cdef const f32* z
        cdef Py_ssize_t ld = last_of(&self.actor).out_pad
        while start < n:
            rows = min(CHUNK, n - start)
            y = forward(&self.actor, obs + start * self.obs_dim, self.obs_dim, rows)
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

    def act(self, obs, noise):
        """Sampled actions, (N,) int64 or (N, A) float32, for observations (N, D) and noise (N, n_outputs) float32.

        Categorical: argmax(outputs + noise), which samples where the noise is Gumbel's; the first of equals. Gaussian:
        mean + noise * std, not clipped.
        """
        cdef cnp.ndarray obs_ = self.rows_of(obs, "NativeActorCritic.act")
        cdef Py_ssize_t n = cnp.PyArray_DIM(obs_, 0)
        cdef cnp.ndarray noise_ = given(noise, cnp.NPY_FLOAT32, "float32", (n, self.n_outputs),
                                        "NativeActorCritic.act", "noise")
        cdef cnp.ndarray out = np.empty((n, self.n_outputs), np.float32) if self.gaussian else np.empty(n, np.int64)
        with self.lock:
            with nogil:
                pack(&self.actor, False)
                self.act_on(<const f32*>cnp.PyArray_DATA(obs_), n, <const f32*>cnp.PyArray_DATA(noise_),
                            <i64*>cnp.PyArray_DATA(out), <f32*>cnp.PyArray_DATA(out))
        return out

    def rollout(self, stepper, n_steps, noise, obs, actions, rewards, terminated, truncated, episode_return,
                episode_length):
        """Act and step `n_steps` times in one go, from the observations in ``obs[0]``.

        Parameters
        ----------
        stepper
            What ``VecEnv.stepper()`` returned; the environments must outlive the call, and nothing else may use them
            meanwhile.
        n_steps
            T >= 1.
        noise
            (T, N, n_outputs) float32, as `act` takes it for each step.
        obs
            (T + 1, N, D) float32; rows 1 on are written.
        actions
            (T, N) int64, or (T, N, A) float32 as sampled, before they are clipped for the environment; written.
        rewards, terminated, truncated, episode_return, episode_length
            (T, N) float64, bool, bool, float64, int64, as ``VecEnv.step_all`` gives them; written.

        Returns
        -------
        limits, reached
            (K, 2) int64 steps and environments that a time limit cut, and (K, D) what they truly led to.

        Raises
        ------
        BaseException
            What the handler of a signal raises. The environments have moved on then.
        """
        cdef str where = "NativeActorCritic.rollout"
        if not PyCapsule_IsValid(stepper, RLOX_STEPPER_CAPSULE):
            raise TypeError(f"{where}: stepper must be what VecEnv.stepper() returns, got {type(stepper).__name__}")
        cdef rlox_stepper* env = <rlox_stepper*>PyCapsule_GetPointer(stepper, RLOX_STEPPER_CAPSULE)
        cdef Py_ssize_t n = env.n, d = env.obs_dim, a = self.n_outputs, steps, t, i, j, k = 0, most
        if d != self.obs_dim or (env.act_dim if self.gaussian else env.n_actions) != a or self.gaussian == (
                env.n_actions > 0):
            raise ValueError(
                f"{where}: stepper must have obs_dim {self.obs_dim} and {a} "
                f"{'action components' if self.gaussian else 'actions'}, got obs_dim {d}, n_actions {env.n_actions}, "
                f"act_dim {env.act_dim}"
            )
        if as_index(n_steps, where, "n_steps") < 1:
            raise ValueError(f"{where}: n_steps must be >= 1, got {n_steps}")
        steps = n_steps
        noise = given(noise, cnp.NPY_FLOAT32, "float32", (steps, n, a), where, "noise")
        check_out(obs, cnp.NPY_FLOAT32, "float32", (steps + 1, n, d), where, "obs")
        if self.gaussian:
            check_out(actions, cnp.NPY_FLOAT32, "float32", (steps, n, a), where, "actions")
        else:
            check_out(actions, cnp.NPY_INT64, "int64", (steps, n), where, "actions")
        check_out(rewards, cnp.NPY_FLOAT64, "float64", (steps, n), where, "rewards")
        check_out(terminated, cnp.NPY_BOOL, "bool", (steps, n), where, "terminated")
        check_out(truncated, cnp.NPY_BOOL, "bool", (steps, n), where, "truncated")
        check_out(episode_return, cnp.NPY_FLOAT64, "float64", (steps, n), where, "episode_return")
        check_out(episode_length, cnp.NPY_INT64, "int64", (steps, n), where, "episode_length")
        most = n * (steps // env.max_episode_steps + 1) if env.max_episode_steps else 0
        cdef cnp.ndarray limits = np.empty((most, 2), np.int64)
        cdef cnp.ndarray reached = np.empty((most, d), np.float32)
        cdef cnp.ndarray final_obs = np.empty((n, d), np.float32)
        cdef cnp.ndarray clipped = np.empty((n, a), np.float32)
        cdef f32* final_ = <f32*>cnp.PyArray_DATA(final_obs)
        cdef f32* clipped_ = <f32*>cnp.PyArray_DATA(clipped)
        cdef i64* limits_ = <i64*>cnp.PyArray_DATA(limits)
        cdef f32* reached_ = <f32*>cnp.PyArray_DATA(reached)
        cdef const f32* noise_ = <const f32*>cnp.PyArray_DATA(<cnp.ndarray>noise)
        cdef f32* obs_ = <f32*>cnp.PyArray_DATA(<cnp.ndarray>obs)
        cdef i64* choices = <i64*>cnp.PyArray_DATA(<cnp.ndarray>actions)
        cdef f32* continuous = <f32*>cnp.PyArray_DATA(<cnp.ndarray>actions)
        cdef f64* rewards_ = <f64*>cnp.PyArray_DATA(<cnp.ndarray>rewards)
        cdef u8* terminated_ = <u8*>cnp.PyArray_DATA(<cnp.ndarray>terminated)
        cdef u8* truncated_ = <u8*>cnp.PyArray_DATA(<cnp.ndarray>truncated)
        cdef f64* return_ = <f64*>cnp.PyArray_DATA(<cnp.ndarray>episode_return)
        cdef i64* length_ = <i64*>cnp.PyArray_DATA(<cnp.ndarray>episode_length)
        cdef const void* taken
        cdef Watch watch = watching()
        with self.lock:
            with nogil:
                pack(&self.actor, False)
                for t in range(steps):
                    if n > 64 or t & 63 == 0:
                        look(&watch)
                    self.act_on(obs_ + t * n * d, n, noise_ + t * n * a, choices + t * n, continuous + t * n * a)
                    taken = choices + t * n
                    if self.gaussian:
                        for i in range(n):
                            for j in range(a):
                                clipped_[i * a + j] = <f32>bounded(continuous[(t * n + i) * a + j], env.act_low[j],
                                                                   env.act_high[j])
                        taken = clipped_
                    env.step(env.self, taken, obs_ + (t + 1) * n * d, rewards_ + t * n, terminated_ + t * n,
                             truncated_ + t * n, final_, return_ + t * n, length_ + t * n)
                    for i in range(n):
                        if truncated_[t * n + i]:
                            limits_[2 * k] = t
                            limits_[2 * k + 1] = i
                            memcpy(reached_ + k * d, final_ + i * d, d * sizeof(f32))
                            k += 1
        return limits[:k], reached[:k]

    def log_probs(self, obs, actions):
        """Log-probabilities (B,) of actions, (B,) int64 or (B, A) float32, and values (B,), for observations (B, D)."""
        outputs, values = self.outputs(obs)
        actions = self.actions_of(actions, len(outputs), "NativeActorCritic.log_probs")
        cdef cnp.ndarray y = outputs
        cdef Py_ssize_t n = cnp.PyArray_DIM(y, 0), a = self.n_outputs, i, j
        cdef cnp.ndarray out = np.empty(n, np.float32)
        cdef f32* out_ = <f32*>cnp.PyArray_DATA(out)
        cdef const f32* x
        cdef const f32* log_std = self.weights.p
        cdef const i64* choices = <const i64*>cnp.PyArray_DATA(<cnp.ndarray>actions)
        cdef const f32* continuous = <const f32*>cnp.PyArray_DATA(<cnp.ndarray>actions)
        cdef f32 top
        cdef f64 total, z
        with nogil:
            for i in range(n):
                x = <const f32*>cnp.PyArray_DATA(y) + i * a
                if self.gaussian:
                    total = -a * LOG_SQRT_2PI
                    for j in range(a):
                        z = (continuous[i * a + j] - x[j]) * exp(-<f64>log_std[j])
                        total -= 0.5 * z * z + log_std[j]
                    out_[i] = <f32>total
                else:
                    top = x[0]
                    for j in range(1, a):
                        top = max(top, x[j])
                    total = 0.0
                    for j in range(a):
                        total += expf(x[j] - top)
                    out_[i] = <f32>(x[choices[i]] - top - log(total))
        return out, values

    def ppo(self, obs, actions, log_probs, advantages, returns, values, rng, *, n_epochs, batch_size, learning_rate,
            clip_eps, vf_coef, ent_coef, max_grad_norm=None, clip_vf=None, target_kl=None, normalize_advantages=True):
        """All epochs of a PPO update, what `rlox.algorithms.PPO.update` defines.

        Parameters
        ----------
        obs
            (B, D) float32.
        actions
            (B,) int64, or (B, A) float32.
        log_probs, advantages, returns, values
            (B,) float32: of the policy that acted.
        rng
            `Rng` that shuffles; it moves on as B rows shuffled once per epoch move it.
        n_epochs, batch_size, learning_rate, clip_eps, vf_coef, ent_coef, max_grad_norm, clip_vf, target_kl, \
        normalize_advantages
            Of `rlox.config.PPOConfig`, schedules resolved; None where it is off.

        Returns
        -------
        dict
            Means over the minibatches taken: ``policy_loss value_loss entropy approx_kl clip_fraction grad_norm``; and
            ``explained_variance`` of the values before. NaN in the data or the weights makes them NaN.
        """
        cdef str where = "NativeActorCritic.ppo"
        cdef Loss loss = Loss(ppo=True, clip_eps=number(clip_eps, 0.0, where, "clip_eps"),
                              vf_coef=number(vf_coef, 0.0, where, "vf_coef"),
                              ent_coef=number(ent_coef, 0.0, where, "ent_coef"),
                              clip_vf=0.0 if clip_vf is None else number(clip_vf, 0.0, where, "clip_vf"))
        cdef f64 limit = 0.0 if max_grad_norm is None else number(max_grad_norm, 0.0, where, "max_grad_norm")
        cdef f64 kl = 0.0 if target_kl is None else number(target_kl, 0.0, where, "target_kl")
        epochs, size = as_index(n_epochs, where, "n_epochs"), as_index(batch_size, where, "batch_size")
        if epochs < 1 or size < 1:
            raise ValueError(f"{where}: n_epochs and batch_size must be >= 1, got {epochs} and {size}")
        return self.learn(where, &loss, obs, actions, log_probs, advantages, returns, values, rng, epochs, size,
                          number(learning_rate, 0.0, where, "learning_rate"), limit, kl, normalize_advantages)

    def a2c(self, obs, actions, advantages, returns, values, *, learning_rate, vf_coef, ent_coef, max_grad_norm=None,
            normalize_advantages=False):
        """One gradient step on the whole rollout, what `rlox.algorithms.A2C.update` defines; arguments as in `ppo`.

        Returns
        -------
        dict
            ``policy_loss value_loss entropy grad_norm explained_variance``.
        """
        cdef str where = "NativeActorCritic.a2c"
        cdef Loss loss = Loss(ppo=False, vf_coef=number(vf_coef, 0.0, where, "vf_coef"),
                              ent_coef=number(ent_coef, 0.0, where, "ent_coef"), clip_eps=0.0, clip_vf=0.0)
        cdef f64 limit = 0.0 if max_grad_norm is None else number(max_grad_norm, 0.0, where, "max_grad_norm")
        metrics = self.learn(where, &loss, obs, actions, values, advantages, returns, values, None, 1, len(obs),
                             number(learning_rate, 0.0, where, "learning_rate"), limit, 0.0, normalize_advantages)
        return {name: metrics[name] for name in metrics if name not in ("approx_kl", "clip_fraction")}

    cdef dict learn(self, str where, const Loss* loss, obs, actions, log_probs, advantages, returns, values, rng,
                    Py_ssize_t epochs, Py_ssize_t size, f64 rate, f64 limit, f64 target_kl, bint normalize):
        """Minibatch steps; in the rows' own order where `rng` is None."""
        cdef cnp.ndarray x = self.rows_of(obs, where)
        cdef Py_ssize_t n = cnp.PyArray_DIM(x, 0), start, rows, epoch
        if n < 1:
            raise ValueError(f"{where}: obs must hold at least one row, got none")
        cdef cnp.ndarray actions_ = self.actions_of(actions, n, where)
        cdef list columns = [
            given(column, cnp.NPY_FLOAT32, "float32", (n,), where, name)
            for name, column in (("log_probs", log_probs), ("advantages", advantages), ("returns", returns),
                                 ("values", values))
        ]
        cdef const f32* log_probs_ = <const f32*>cnp.PyArray_DATA(<cnp.ndarray>columns[0])
        cdef const f32* advantages_ = <const f32*>cnp.PyArray_DATA(<cnp.ndarray>columns[1])
        cdef const f32* returns_ = <const f32*>cnp.PyArray_DATA(<cnp.ndarray>columns[2])
        cdef const f32* values_ = <const f32*>cnp.PyArray_DATA(<cnp.ndarray>columns[3])
        cdef const f32* obs_ = <const f32*>cnp.PyArray_DATA(x)
        cdef const i64* choices = <const i64*>cnp.PyArray_DATA(actions_)
        cdef const f32* continuous = <const f32*>cnp.PyArray_DATA(actions_)
        cdef cnp.ndarray order = None if rng is None else np.empty(n, np.int64)
        cdef i64* at = NULL if rng is None else <i64*>cnp.PyArray_DATA(order)
        cdef u64 key = 0 if rng is None else rng.key
        cdef u64 position = 0 if rng is None else rng.position
        cdef u64 begun = position
        cdef Sums sums
        cdef f64[6] totals
        cdef f64 norm, explained = 0.0
        cdef i64 count = 0
        cdef bint stop = False
        cdef Watch watch = watching()
        memset(totals, 0, sizeof(totals))
        try:
            with self.lock:
                with nogil:
                    explained = explained_variance(returns_, values_, n)
                    for epoch in range(epochs):
                        if at != NULL:
                            fill_permutation(at, n, key, position)
                            position += <u64>(n + 1) // 2
                        start = 0
                        while start < n:
                            rows = min(size, n - start)
                            if n - start - rows == 1 and size > 1:
                                rows += 1  # as rlox.nn.batch.minibatches: no minibatch of the one row left over
                            pack(&self.actor, True)
                            pack(&self.critic, True)
                            memset(&sums, 0, sizeof(sums))
                            self.gradients(loss, obs_, choices, continuous, log_probs_, advantages_, returns_, values_,
                                           at + start if at != NULL else NULL, rows, normalize, &sums, &watch)
                            if target_kl > 0.0 and count and sums.approx_kl / rows > 1.5 * target_kl:
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
            if rng is not None:
                rng.skip(position - begun)
        names = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm")
        metrics = {name: totals[k] / count for k, name in enumerate(names)}
        metrics["explained_variance"] = explained
        return metrics
