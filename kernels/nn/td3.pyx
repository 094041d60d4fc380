"""The native update of TD3 and TD3+BC, as defined by `update` of `rlox.algorithms.TD3` and `rlox.algorithms.TD3BC`."""

cimport numpy as cnp
from libc.math cimport fabs

from rlox.kernels.checks cimport as_flag
from rlox.kernels.nn.layers cimport (
    CHUNK, Net, backward, backward_to_input, bounded, build, forward, last_of, number, pack, unpad,
)
from rlox.kernels.nn.off_policy cimport whole
from rlox.kernels.signals cimport check_signals
from rlox.kernels.types cimport f32, f64
from rlox.kernels.nn.core cimport clear, move
from rlox.kernels.nn.twin_critics cimport N_COMMON, Batch, Options, Sums, TwinCritics, options_of

from rlox.kernels.nn.twin_critics import METRICS

cnp.import_array()


cdef class NativeTD3(TwinCritics):
    """Twin delayed DDPG (Fujimoto et al. 2018, arXiv:1802.09477): a deterministic policy, two critics, delayed targets.

    Parameters and errors are those of `NativeSAC`, without a temperature, except for:

    Parameters
    ----------
    policy, target_policy
        (P,) float32: a perceptron with A outputs, whose tanh is the action, and its target.
    """

    cdef f32* policy_target
    cdef Net target_actor

    def __cinit__(self, policy, critics, target_policy, target, obs_dim, act_dim, hidden_sizes,
                  activation: str = "relu"):
        self.make("NativeTD3", {"policy": policy, "critics": critics},
                  {"target_policy": target_policy, "target": target}, obs_dim, act_dim, hidden_sizes, activation, False)
        self.policy_target = <f32*>cnp.PyArray_DATA(<cnp.ndarray>target_policy)
        build(&self.target_actor, [obs_dim, *self.hidden, act_dim], self.tanh, self.policy_target,
              self.policy_weights.g, 0, self.held)

    def act(self, obs, noise, noise_std):
        """Return actions (B, A) float32 in [-1, 1] for observations (B, D) float32.

        Adds `noise_std` times the standard normal `noise` (B, A) float32, then clips.
        """
        cdef str where = "NativeTD3.act"
        return self.actions_of(obs, noise, number(noise_std, 0.0, where, "noise_std"), where)

    cdef void pack_moved(self) noexcept nogil:
        TwinCritics.pack_moved(self)
        pack(&self.target_actor, False)

    cdef int learn(self, const Batch* batch, const Options* options, f32* td_errors, Sums* sums) except -1 nogil:
        cdef Py_ssize_t n = batch.n, d = self.obs_dim, a = self.act_dim, start = 0, rows, i
        cdef Py_ssize_t ldq = last_of(&self.critics[0]).out_pad
        cdef const f32* q
        cdef f64 noise, weight = 1.0
        cdef const f32* draws
        clear(&self.critic_weights, self.critics, 2)
        while start < n:
            check_signals(&self.watch)
            rows = min(<Py_ssize_t>CHUNK, n - start)
            self.decide(&self.target_actor, batch.next_obs + start * d, d, rows, self.pi.actions)
            draws = batch.noise + start * a
            for i in range(rows * a):
                # Target policy smoothing, section 5.3.
                noise = bounded(options.target_noise * draws[i], -options.noise_clip, options.noise_clip)
                self.pi.actions[i] = <f32>bounded(self.pi.actions[i] + noise, -1.0, 1.0)
            self.compute_targets(batch, start, rows, 0.0)
            self.critic_gradient(batch, start, rows, 0.0, td_errors, sums)
            start += rows
        self.move_critics(options, self.critic_targets if options.move_policy else NULL, sums)
        if not options.move_policy:
            return 0
        clear(&self.policy_weights, &self.actor, 1)
        if options.clone:
            # The weight of the values depends on all of them.
            weight = 0.0
            start = 0
            while start < n:
                check_signals(&self.watch)
                rows = min(<Py_ssize_t>CHUNK, n - start)
                q = self.policy_values(batch, start, rows)
                for i in range(rows):
                    weight += fabs(q[i * ldq])
                start += rows
            weight = options.alpha * n / weight
        start = 0
        while start < n:
            check_signals(&self.watch)
            rows = min(<Py_ssize_t>CHUNK, n - start)
            if not options.clone or n > CHUNK:
                self.policy_values(batch, start, rows)
            self.add_policy_gradient(batch, start, rows, weight, options.clone, sums)
            start += rows
        unpad(&self.actor)
        sums.policy_norm = move(&self.policy_weights, options.rate, options.limit, self.policy_target, options.tau)
        return 0

    cdef const f32* policy_values(self, const Batch* batch, Py_ssize_t start, Py_ssize_t rows) noexcept nogil:
        """Write the policy's actions to `pi`, and return their values by the first critic."""
        self.fill(self.x, self.obs_pad, batch.obs + start * self.obs_dim, NULL, rows)
        self.decide(&self.actor, self.x, self.obs_pad, rows, self.pi.actions)
        self.fill(self.pairs, self.in_pad, batch.obs + start * self.obs_dim, self.pi.actions, rows)
        return forward(&self.critics[0], self.pairs, self.in_pad, rows)

    cdef void add_policy_gradient(self, const Batch* batch, Py_ssize_t start, Py_ssize_t rows, f64 weight, bint clone,
                                  Sums* sums) noexcept nogil:
        """Add the gradient of -`weight` Q for the policy, right after `policy_values`.

        With `clone`, also add the gradient of the squared distance to the batch's actions.
        """
        cdef Py_ssize_t i, j, d = self.obs_dim, a = self.act_dim
        cdef Py_ssize_t ld = last_of(&self.actor).out_pad, ldq = last_of(&self.critics[0]).out_pad
        cdef f32* d_y = last_of(&self.actor).d_out
        cdef f32* d_q = last_of(&self.critics[0]).d_out
        cdef const f32* q = last_of(&self.critics[0]).out
        cdef f64 action, error, slope
        for i in range(rows):
            sums.policy_loss -= weight * q[i * ldq]
            d_q[i * ldq] = <f32>(-weight / batch.n)
        backward_to_input(&self.critics[0], rows, self.d_pairs)
        for i in range(rows):
            for j in range(a):
                action = self.pi.actions[i * a + j]
                slope = self.d_pairs[i * self.in_pad + d + j]
                if clone:
                    error = action - batch.actions[(start + i) * a + j]
                    slope += 2.0 * error / (batch.n * a)
                    sums.policy_loss += error * error / a
                    sums.own[0] += error * error / (a * batch.n)
                d_y[i * ld + j] = <f32>(slope * (1.0 - action * action))
        backward(&self.actor, self.x, self.obs_pad, rows)

    def update(self, obs, actions, rewards, next_obs, discounts, noise, weights=None, *, move_policy, learning_rate,
               tau, target_noise, noise_clip, max_grad_norm=None, alpha=None):
        """Update the critics, and with `move_policy` the policy and all targets, once.

        The update is defined by `rlox.algorithms.TD3.update`, or with `alpha` by `rlox.algorithms.TD3BC.update`.

        Parameters
        ----------
        obs, actions, rewards, next_obs, discounts, weights
            As in `NativeSAC.update`.
        noise
            (B, A) float32, standard normal: for the actions at `next_obs`.
        move_policy
            Whether to update the policy and the targets too: ``(updates + 1) % policy_delay == 0``.
        learning_rate, tau, target_noise, noise_clip, max_grad_norm
            As in `rlox.config.TD3Config`, with schedules resolved; None if off.
        alpha
            As in `rlox.config.TD3BCConfig`: the policy also imitates `actions` (arXiv:2106.06860, eq. 3 to 5).

        Returns
        -------
        metrics, td_errors
            ``q_loss q_value td_error grad_norm``, and with `move_policy` also ``policy_loss policy_grad_norm`` (and
            with `alpha` ``bc_loss``); and the errors as in `NativeSAC.update`.
        """
        cdef str where = "NativeTD3.update"
        cdef Options options = self.options(target_noise, noise_clip, learning_rate, tau, max_grad_norm, where)
        options.clone = alpha is not None
        if options.clone:
            options.alpha = number(alpha, 0.0, where, "alpha")
        options.move_policy = as_flag(move_policy, where, "move_policy")
        names = (*METRICS[:N_COMMON], "bc_loss") if options.clone else METRICS[:N_COMMON]
        return self.learn_from(where, options, names, obs, actions, rewards, next_obs, discounts, noise, weights)

    def rounds(self, stepper, memory, action_rng, replay_rng, obs, n_rounds, *, train_freq, gradient_steps, batch_size,
               env_steps, horizon_start, horizon_steps, learning_starts, update_from, updates, annealed, gamma,
               learning_rate, tau, policy_delay, target_noise, noise_clip, exploration_noise, max_grad_norm,
               seconds=0.2):
        """Like `NativeSAC.rounds`, except for:

        Parameters
        ----------
        updates
            Of `rlox.checkpoint.Counters`, before the call.
        policy_delay, target_noise, noise_clip, exploration_noise
            As in `rlox.config.TD3Config`.

        Returns
        -------
        metrics
            (U, 6) float64: the first six of `METRICS`; those of the policy are NaN if it was not updated.
        """
        cdef str where = "NativeTD3.rounds"
        counts = {
            "n_rounds": n_rounds, "train_freq": train_freq, "gradient_steps": gradient_steps, "batch_size": batch_size,
            "env_steps": env_steps, "horizon_start": horizon_start, "horizon_steps": horizon_steps,
            "learning_starts": learning_starts, "update_from": update_from, "updates": updates, "gamma": gamma,
            "seconds": seconds,
        }
        return self.train(where, self.options(target_noise, noise_clip, learning_rate, tau, max_grad_norm, where),
                          whole(policy_delay, 1, where, "policy_delay"),
                          number(exploration_noise, 0.0, where, "exploration_noise"), annealed, stepper, memory,
                          action_rng, replay_rng, obs, counts)

    cdef Options options(self, target_noise, noise_clip, learning_rate, tau, max_grad_norm, str where) except *:
        cdef Options found = options_of(learning_rate, tau, max_grad_norm, where)
        found.target_noise = number(target_noise, 0.0, where, "target_noise")
        found.noise_clip = number(noise_clip, 0.0, where, "noise_clip")
        return found
