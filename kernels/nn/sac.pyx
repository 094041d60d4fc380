"""The native update of SAC, as defined by `rlox.algorithms.SAC.update`."""

cimport numpy as cnp
from libc.math cimport INFINITY, copysign, exp, fabs, log1p
from libc.stdint cimport int32_t as i32
from libc.string cimport memcpy, memset

from rlox.kernels.nn.layers cimport (
    CHUNK, Layer, Net, backward, backward_to_input, bounded, forward, last_of, number, unpad,
)
from rlox.kernels.signals cimport check_signals
from rlox.kernels.types cimport f32, f64
from rlox.kernels.nn.core cimport clear, move, move_number
from rlox.kernels.nn.twin_critics cimport Batch, Options, Squashed, Sums, TwinCritics, options_of, smaller

from rlox.kernels.nn.twin_critics import METRICS

cnp.import_array()

cdef f64 LOG_2 = 0.69314718055994530942
cdef f64 LOG_SQRT_2PI = 0.91893853320467274178
cdef f64 LOG_STD_MIN = -20.0
cdef f64 LOG_STD_MAX = 2.0


cdef void squash(const f32* y, Py_ssize_t ld, Py_ssize_t rows, Py_ssize_t a, const f32* noise,
                 Squashed* to) noexcept nogil:
    """Compute actions tanh(u), u = mean + sigma * noise, from outputs (rows, ld): means, then log sigmas.

    The density of tanh(u) is that of u divided by 1 - tanh^2 u, whose logarithm, without cancellation, is
    2 (log 2 - |u| - log(1 + exp(-2 |u|))). See Haarnoja et al. 2018, arXiv:1812.05905, appendix C.
    """
    cdef Py_ssize_t i, j
    cdef f64 log_std, eps, shift, u, t, log_prob
    for i in range(rows):
        log_prob = 0.0
        for j in range(a):
            log_std = bounded(y[i * ld + a + j], LOG_STD_MIN, LOG_STD_MAX)
            eps = noise[i * a + j]
            shift = exp(log_std) * eps
            u = y[i * ld + j] + shift
            t = exp(-2.0 * fabs(u))
            to.actions[i * a + j] = <f32>copysign((1.0 - t) / (1.0 + t), u)
            to.slopes[i * a + j] = <f32>(4.0 * t / ((1.0 + t) * (1.0 + t)))
            to.shifts[i * a + j] = <f32>shift
            log_prob -= 0.5 * eps * eps + log_std + LOG_SQRT_2PI + 2.0 * (LOG_2 - fabs(u) - log1p(t))
        to.log_probs[i] = <f32>log_prob


cdef class SoftCritics(TwinCritics):
    """Common parts of SAC and CQL: a squashed Gaussian policy, a temperature, and the update except for the penalty."""

    cdef dict steps(self):
        return {**TwinCritics.steps(self), "log_alpha": self.temperature.step}

    cdef void set_steps(self, dict steps):
        TwinCritics.set_steps(self, steps)
        self.temperature.step = steps["log_alpha"]

    def act(self, obs, noise):
        """Return actions (B, A) float32 in [-1, 1] for `obs` (B, D) and standard normal noise (B, A), float32."""
        return self.actions_of(obs, noise, 0.0, f"{type(self).__name__}.act")

    cdef void act_on(self, const f32* obs, Py_ssize_t n, const f32* noise, f64 noise_std, f32* actions) noexcept nogil:
        cdef Py_ssize_t start = 0, rows, d = self.obs_dim, a = self.act_dim
        cdef const f32* y
        while start < n:
            rows = min(<Py_ssize_t>CHUNK, n - start)
            y = forward(&self.actor, obs + start * d, d, rows)
            squash(y, last_of(&self.actor).out_pad, rows, a, noise + start * a, &self.pi)
            memcpy(actions + start * a, self.pi.actions, rows * a * sizeof(f32))
            start += rows

    cdef int learn(self, const Batch* batch, const Options* options, f32* td_errors, Sums* sums) except -1 nogil:
        cdef Py_ssize_t n = batch.n, d = self.obs_dim, a = self.act_dim, start = 0, rows, ahead = 0
        cdef Py_ssize_t ld = last_of(&self.actor).out_pad
        cdef f64 alpha = exp(self.temperature.p[0])
        # If so, both states of a transition are one product, and its outputs are still there for the policy's gradient.
        cdef bint whole = n <= CHUNK
        cdef const f32* y
        clear(&self.critic_weights, self.critics, 2)
        while start < n:
            check_signals(&self.watch)
            rows = min(<Py_ssize_t>CHUNK, n - start)
            if whole or self.n_random:
                self.fill(self.x, self.obs_pad, batch.obs + start * d, NULL, rows)
                ahead = rows
            self.fill(self.x + ahead * self.obs_pad, self.obs_pad, batch.next_obs + start * d, NULL, rows)
            y = forward(&self.actor, self.x, self.obs_pad, ahead + rows)
            squash(y + ahead * ld, ld, rows, a, batch.noise + (n + start) * a, &self.pi)
            # With the penalty, the targets have no entropy.
            self.compute_targets(batch, start, rows, 0.0 if self.n_random else alpha)
            self.critic_gradient(batch, start, rows, self.conservatism, td_errors, sums)
            if self.n_random:
                self.penalty_gradient(batch, start, rows, sums)
            start += rows
        self.move_critics(options, self.critic_targets, sums)
        clear(&self.policy_weights, &self.actor, 1)
        start = 0
        while start < n:
            check_signals(&self.watch)
            rows = min(<Py_ssize_t>CHUNK, n - start)
            if not whole:
                self.fill(self.x, self.obs_pad, batch.obs + start * d, NULL, rows)
                forward(&self.actor, self.x, self.obs_pad, rows)
            self.add_policy_gradient(batch, start, rows, alpha, sums)
            start += rows
        unpad(&self.actor)
        sums.policy_norm = move(&self.policy_weights, options.rate, options.limit)
        sums.own[0], sums.own[1] = sums.own[0] / n, alpha
        if options.tune:
            # d/d log(alpha) of -log(alpha) (log pi + target entropy), averaged
            move_number(&self.temperature, sums.own[0] - options.target_entropy, options.rate)
        return 0

    cdef void penalty_gradient(self, const Batch* batch, Py_ssize_t start, Py_ssize_t rows, Sums* sums) noexcept nogil:
        """Add the gradient of the penalty's soft maxima for the critics, from the policy's last `forward`."""

    cdef void add_policy_gradient(self, const Batch* batch, Py_ssize_t start, Py_ssize_t rows, f64 alpha,
                                  Sums* sums) noexcept nogil:
        """Add the gradient of alpha log pi - min Q for the policy, from its last `forward`."""
        cdef Py_ssize_t i, j, d = self.obs_dim, a = self.act_dim
        cdef Py_ssize_t ld = last_of(&self.actor).out_pad, ldq = last_of(&self.critics[0]).out_pad
        cdef const f32* y = last_of(&self.actor).out
        cdef f32* d_y = last_of(&self.actor).d_out
        cdef const f32* values[2]
        cdef f64 scale = 1.0 / batch.n, share, d_u, log_std
        cdef int k
        squash(y, ld, rows, a, batch.noise + start * a, &self.pi)
        self.fill(self.pairs, self.in_pad, batch.obs + start * d, self.pi.actions, rows)
        for k in range(2):
            values[k] = forward(&self.critics[k], self.pairs, self.in_pad, rows)
        for i in range(rows):
            sums.policy_loss += alpha * self.pi.log_probs[i] - smaller(values[0][i * ldq], values[1][i * ldq])
            sums.own[0] -= self.pi.log_probs[i]
            # For equal values the gradient is shared, as in PyTorch.
            share = 0.5 if values[0][i * ldq] == values[1][i * ldq] else <f64>(values[0][i * ldq] < values[1][i * ldq])
            self.first_shares[i] = <f32>share
        memset(self.d_actions, 0, rows * a * sizeof(f32))
        for k in range(2):
            self.action_gradient(&self.critics[k], rows, k == 1, <f32>-scale)
        for i in range(rows):
            for j in range(a):
                d_u = self.d_actions[i * a + j] * self.pi.slopes[i * a + j]
                d_u += 2.0 * alpha * scale * self.pi.actions[i * a + j]
                d_y[i * ld + j] = <f32>d_u
                log_std = y[i * ld + a + j]
                d_y[i * ld + a + j] = 0.0
                if LOG_STD_MIN <= log_std <= LOG_STD_MAX:
                    d_y[i * ld + a + j] = <f32>(d_u * self.pi.shifts[i * a + j] - alpha * scale)
        backward(&self.actor, self.x, self.obs_pad, rows)

    cdef void action_gradient(self, Net* critic, Py_ssize_t rows, bint second, f32 scale) noexcept nogil:
        """Add to `d_actions` the gradient of one critic's value times `scale`, in the rows where it is the smaller one.

        On average these are half of the rows, so their outputs of the last `forward` are first moved together.
        """
        cdef Py_ssize_t i, j, m = 0, d = self.obs_dim, a = self.act_dim
        cdef int l
        cdef f32 share
        cdef f32* to = self.d_actions
        cdef Layer* layer
        for i in range(rows):
            share = <f32>1.0 - self.first_shares[i] if second else self.first_shares[i]
            if share != 0.0:
                last_of(critic).d_out[m * last_of(critic).out_pad] = share * scale
                self.chosen[m] = <i32>i
                m += 1
        for l in range(critic.n_layers - 1):
            layer = &critic.layers[l]
            for j in range(m):
                if self.chosen[j] != j:
                    memcpy(layer.out + j * layer.out_pad, layer.out + self.chosen[j] * layer.out_pad,
                           layer.out_pad * sizeof(f32))
        backward_to_input(critic, m, self.d_pairs)
        for j in range(m):
            i = self.chosen[j]
            for l in range(a):
                to[i * a + l] += self.d_pairs[j * self.in_pad + d + l]

    cdef Options options(self, target_entropy, learning_rate, tau, max_grad_norm, str where) except *:
        cdef Options found = options_of(learning_rate, tau, max_grad_norm, where)
        found.tune = target_entropy is not None
        if found.tune:
            found.target_entropy = number(target_entropy, -INFINITY, where, "target_entropy")
        return found


cdef class NativeSAC(SoftCritics):
    """Soft actor-critic (Haarnoja et al. 2018, arXiv:1812.05905): a squashed Gaussian policy, two critics, temperature.

    Calls from several threads wait for each other. The blocks are kept, but no other argument.

    Parameters
    ----------
    policy
        (P,) float32, C-contiguous and writeable like all blocks, which are kept and changed in place: a perceptron with
        2 A outputs, means and then log standard deviations, which are clipped to [-20, 2].
    critics, target
        (Q,) float32: the critics and their target.
    log_alpha
        (1,) float32: the logarithm of the temperature.
    obs_dim, act_dim
        D and A.
    hidden_sizes
        Widths of the hidden layers of both policy and critics, at most 8.
    activation
        ``relu`` or ``tanh``.

    Raises
    ------
    TypeError
        If a block is not a float32 array, or a size is not an integer.
    ValueError
        For a size below 1, more than 8 hidden layers, an unknown activation, or a block of another length, one that is
        not C-contiguous and writeable, or one that overlaps another.
    """

    def __cinit__(self, policy, critics, target, log_alpha, obs_dim, act_dim, hidden_sizes, activation: str = "relu"):
        self.make("NativeSAC", {"policy": policy, "critics": critics, "log_alpha": log_alpha}, {"target": target},
                  obs_dim, act_dim, hidden_sizes, activation, True)
        self.temperature = self.weights_of("log_alpha")

    def update(self, obs, actions, rewards, next_obs, discounts, noise, weights=None, *, learning_rate, tau,
               target_entropy=None, max_grad_norm=None):
        """Update critics, policy, temperature and target once, as defined by `rlox.algorithms.SAC.update`.

        Parameters
        ----------
        obs, next_obs
            (B, D) float32.
        actions
            (B, A) float32, scaled to [-1, 1].
        rewards, discounts, weights
            (B,) float32; a discount is the factor of the value of `next_obs`, 0 where the episode terminated. Weights
            are for the loss of the critics; without them, all rows have equal weights.
        noise
            (2, B, A) float32, standard normal: for the actions at `obs`, and for those at `next_obs`.
        target_entropy
            Entropy in nats to which the temperature is tuned; None leaves the temperature unchanged.
        learning_rate, tau, max_grad_norm
            As in `rlox.config.SACConfig`, with schedules resolved; None if off.

        Returns
        -------
        metrics, td_errors
            ``q_loss q_value td_error grad_norm policy_loss policy_grad_norm entropy alpha``; and (B,) float32, the
            distance of the values from their target, averaged over both critics. NaN in the data or the weights makes
            them NaN.
        """
        cdef str where = "NativeSAC.update"
        cdef Options options = self.options(target_entropy, learning_rate, tau, max_grad_norm, where)
        return self.learn_from(where, options, METRICS, obs, actions, rewards, next_obs, discounts, noise, weights)

    def rounds(self, stepper, memory, action_rng, replay_rng, obs, n_rounds, *, train_freq, gradient_steps, batch_size,
               env_steps, horizon_start, horizon_steps, learning_starts, update_from, annealed, gamma, learning_rate,
               tau, target_entropy, max_grad_norm, seconds=0.2):
        """Run rounds of acting, stepping, storing and learning, without Python in between.

        Uses the random numbers and changes all state in the same way as `rlox.training.replay.off_policy` does step by
        step; results do not depend on how rounds are divided into calls. The memory stores actions in the units of the
        environment.

        Parameters
        ----------
        stepper, memory
            Return values of ``VecEnv.stepper()`` and ``ReplayBuffer.access()``; no other thread may use the objects
            meanwhile.
        action_rng, replay_rng
            `Rng` of the actions, and of the updates: for transitions from the memory, and noise.
        obs
            (N, D) float32, the current observations; replaced in place by those after the last step.
        n_rounds
            Maximum number of rounds.
        env_steps, horizon_start, horizon_steps
            Of `rlox.checkpoint.Counters`, before the call.
        update_from
            Number of environment steps from which on there are updates.
        annealed
            Whether the learning rate decreases linearly to 0 at the horizon.
        target_entropy
            As in `update`.
        seconds
            No round begins after this time, so that signals are handled. No round begins after an update whose
            gradients are not finite, either.
        train_freq, gradient_steps, batch_size, learning_starts, learning_rate, gamma, tau, max_grad_norm
            As in `rlox.config.SACConfig`.

        Returns
        -------
        n_steps
            Environment steps taken.
        metrics
            (U, 8) float64, a row for each of the U updates: `METRICS`.
        update_s
            Time of the updates in seconds.
        episode_returns, episode_lengths
            (E,) float64 and int64 of the episodes that ended.
        """
        cdef str where = "NativeSAC.rounds"
        counts = {
            "n_rounds": n_rounds, "train_freq": train_freq, "gradient_steps": gradient_steps, "batch_size": batch_size,
            "env_steps": env_steps, "horizon_start": horizon_start, "horizon_steps": horizon_steps,
            "learning_starts": learning_starts, "update_from": update_from, "updates": 0, "gamma": gamma,
            "seconds": seconds,
        }
        return self.train(where, self.options(target_entropy, learning_rate, tau, max_grad_norm, where), 1, 0.0,
                          annealed, stepper, memory, action_rng, replay_rng, obs, counts)
