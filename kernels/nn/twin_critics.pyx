"""Common parts of SAC, TD3, IQL and CQL: a policy, two critics, their targets, and the critics' update.

Each network is a flat float32 block (see layers.pxd). The policy's block is in the order of ``parameters()``, with
weights (n_out, n_in). The block of the two critics is in the order of `rlox.nn.actors.TwinQNetwork.parameters()`: the
weights (2, n_in, n_out) of all layers, then their biases (2, 1, n_out). A batch is processed in chunks of `CHUNK` rows.
"""

import numpy as np

cimport numpy as cnp
from libc.math cimport NAN, fabs, isfinite, tanh
from libc.stdint cimport int32_t as i32
from libc.string cimport memcpy, memset

from rlox.kernels.nn.layers cimport (
    CHUNK, Layer, Net, backward, bounded, build, forward, given, last_of, legal, number, pack, padded, scratch, size_of,
    unpad,
)
from rlox.kernels.nn.off_policy cimport Loop, close_loop, draw, open_loop, progress_of, take_in, whole
from rlox.kernels.philox cimport fill_normal_f32, fill_uniform_f32
from rlox.kernels.signals cimport now, watching
from rlox.kernels.types cimport f32, f64, i64, u64
from rlox.kernels.nn.core cimport BlockLearner, move

cnp.import_array()

# Metrics of an update, means over its batch. The last two are SAC's; other algorithms have up to four others instead.
METRICS = ("q_loss", "q_value", "td_error", "grad_norm", "policy_loss", "policy_grad_norm", "entropy", "alpha")


cdef inline const f32* data_of(dict arrays, str name):
    """Return the data of an array, or NULL if there is none of this name."""
    return <const f32*>cnp.PyArray_DATA(<cnp.ndarray>arrays[name]) if name in arrays else NULL


def n_parameters(obs_dim: int, act_dim: int, hidden_sizes, gaussian: bool) -> tuple[int, int]:
    """Return the sizes of the blocks of the policy and of the critics."""
    policy = [obs_dim, *hidden_sizes, act_dim * (2 if gaussian else 1)]
    return size_of(policy), 2 * size_of([obs_dim + act_dim, *hidden_sizes, 1])


cdef Options options_of(learning_rate, tau, max_grad_norm, str where) except *:
    cdef Options found
    memset(&found, 0, sizeof(found))
    found.rate, found.tau = number(learning_rate, 0.0, where, "learning_rate"), number(tau, 0.0, where, "tau")
    if not 0.0 < found.tau <= 1.0:
        raise ValueError(f"{where}: tau must be in (0, 1], got {tau}")
    if max_grad_norm is not None:
        found.limit = number(max_grad_norm, 0.0, where, "max_grad_norm")
    found.move_policy = True
    return found


cdef class TwinCritics(BlockLearner):
    """A learner with a policy, two critics and their targets; subclasses implement `learn`."""

    cdef int make(self, str where, dict trained, dict targets, obs_dim, act_dim, hidden_sizes, str activation,
                  bint gaussian, bint valued=False, Py_ssize_t n_random=0) except -1:
        """Check the arguments and set up everything but a target actor and a temperature.

        `valued`: the critics' block also has room for a perceptron of values at its end, and the policy's block for a
        number per action dimension at its beginning.
        """
        self.act_dim = act_dim = self.begin(where, obs_dim, act_dim, "act_dim", hidden_sizes, activation)
        obs_dim = self.obs_dim
        policy_size, critics_size = n_parameters(obs_dim, act_dim, self.hidden, gaussian)
        sizes = {"policy": policy_size, "target_policy": policy_size, "critics": critics_size, "target": critics_size}
        if valued:
            sizes["policy"] += act_dim
            sizes["critics"] += size_of([obs_dim, *self.hidden, 1])
        self.hold(where, trained, targets, sizes)
        self.targets = targets
        self.gaussian, self.n_random = gaussian, n_random
        self.draws = (2 + n_random,) if gaussian else ()
        self.in_pad = padded(obs_dim + act_dim)
        self.policy_weights = self.weights_of("policy")
        self.critic_weights = self.weights_of("critics")
        self.critic_weights.followed = critics_size
        self.critic_targets = <f32*>cnp.PyArray_DATA(<cnp.ndarray>targets["target"])
        build(&self.actor, [obs_dim, *self.hidden, act_dim * (2 if gaussian else 1)], self.tanh, self.policy_weights.p,
              self.policy_weights.g, act_dim if valued else 0, self.held, False, False, 2 * CHUNK)
        widths = [obs_dim + act_dim, *self.hidden, 1]
        self.make_pair(self.critics, widths, self.critic_weights.p, max(<Py_ssize_t>CHUNK, 2 * n_random))
        self.make_pair(self.target_critics, widths, self.critic_targets, CHUNK)
        self.x = scratch(self.held, 2 * CHUNK * self.obs_pad)
        self.pairs = scratch(self.held, CHUNK * self.in_pad)
        self.next_pairs = scratch(self.held, CHUNK * self.in_pad)
        self.d_pairs = scratch(self.held, CHUNK * self.in_pad)
        self.q_targets = scratch(self.held, CHUNK)
        self.first_shares = scratch(self.held, CHUNK)
        self.d_actions = scratch(self.held, CHUNK * self.act_dim)
        self.chosen = <i32*>scratch(self.held, CHUNK)
        self.pi.actions = scratch(self.held, CHUNK * self.act_dim)
        self.pi.slopes = scratch(self.held, CHUNK * self.act_dim)
        self.pi.shifts = scratch(self.held, CHUNK * self.act_dim)
        self.pi.log_probs = scratch(self.held, CHUNK)
        return 0

    cdef int make_pair(self, Net* nets, list widths, f32* block, Py_ssize_t rows) except -1:
        """Set up two perceptrons whose parameters alternate, the weights of all layers first."""
        cdef Py_ssize_t at = 0
        cdef f32* gradient = self.critic_weights.g
        cdef Layer* layer
        cdef int k, l
        for k in range(2):
            build(&nets[k], widths, self.tanh, block, gradient, 0, self.held, True, True, rows)
        for l in range(nets[0].n_layers):
            for k in range(2):
                layer = &nets[k].layers[l]
                layer.weight, layer.d_weight = block + at, gradient + at
                at += layer.n_in * layer.n_out
        for l in range(nets[0].n_layers):
            for k in range(2):
                layer = &nets[k].layers[l]
                layer.bias, layer.d_bias = block + at, gradient + at
                at += layer.n_out
        return 0

    cdef dict steps(self):
        return {"policy": self.policy_weights.step, "critics": self.critic_weights.step}

    cdef void set_steps(self, dict steps):
        self.policy_weights.step, self.critic_weights.step = steps["policy"], steps["critics"]

    cdef dict take(self, str where, Batch* batch, obs, actions, rewards, next_obs, discounts, noise, weights, uniform):
        """Check the arrays and fill in the batch; return the arrays it points to."""
        cdef cnp.ndarray obs_ = self.rows_of(obs, where)
        cdef Py_ssize_t n = cnp.PyArray_DIM(obs_, 0)
        if n < 1:
            raise ValueError(f"{where}: obs must have at least one row, got none")
        rows = (n, self.act_dim)
        columns = {
            "next_obs": (next_obs, (n, self.obs_dim)), "actions": (actions, rows), "rewards": (rewards, (n,)),
            "discounts": (discounts, (n,)),
        }
        if self.draws is not None:
            columns["noise"] = (noise, (*self.draws, *rows))
        if weights is not None:
            columns["weights"] = (weights, (n,))
        if self.n_random:
            columns["uniform"] = (uniform, (self.n_random, *rows))
        cdef dict arrays = {"obs": obs_}
        for name, (array, shape) in columns.items():
            arrays[name] = given(array, cnp.NPY_FLOAT32, "float32", shape, where, name)
        batch.n, batch.obs, batch.next_obs = n, data_of(arrays, "obs"), data_of(arrays, "next_obs")
        batch.actions, batch.rewards = data_of(arrays, "actions"), data_of(arrays, "rewards")
        batch.discounts, batch.noise = data_of(arrays, "discounts"), data_of(arrays, "noise")
        batch.weights, batch.uniform = data_of(arrays, "weights"), data_of(arrays, "uniform")
        return arrays

    cdef void pack_critics(self) noexcept nogil:
        cdef int k
        for k in range(2):
            pack(&self.critics[k], True)

    cdef void pack_moved(self) noexcept nogil:
        """Pack the networks that `learn` has changed, except the critics, which it packs itself."""
        cdef int k
        pack(&self.actor, True)
        for k in range(2):
            pack(&self.target_critics[k], False)

    cdef void fill(self, f32* to, Py_ssize_t ld, const f32* obs, const f32* actions, Py_ssize_t rows) noexcept nogil:
        """Write rows of observations, followed by actions unless NULL."""
        cdef Py_ssize_t i, d = self.obs_dim, a = self.act_dim
        for i in range(rows):
            memcpy(to + i * ld, obs + i * d, d * sizeof(f32))
            if actions != NULL:
                memcpy(to + i * ld + d, actions + i * a, a * sizeof(f32))

    cdef void compute_targets(self, const Batch* batch, Py_ssize_t start, Py_ssize_t rows, f64 alpha) noexcept nogil:
        """Compute the critics' targets from the next actions in `pi`: r + discount (min Q' - alpha log pi')."""
        cdef Py_ssize_t i, ld
        cdef f32 ahead
        cdef const f32* first
        cdef const f32* second
        self.fill(self.next_pairs, self.in_pad, batch.next_obs + start * self.obs_dim, self.pi.actions, rows)
        first = forward(&self.target_critics[0], self.next_pairs, self.in_pad, rows)
        second = forward(&self.target_critics[1], self.next_pairs, self.in_pad, rows)
        ld = last_of(&self.target_critics[0]).out_pad
        for i in range(rows):
            ahead = smaller(first[i * ld], second[i * ld])
            if alpha != 0.0:
                ahead = <f32>(ahead - alpha * self.pi.log_probs[i])
            self.q_targets[i] = batch.rewards[start + i] + batch.discounts[start + i] * ahead

    cdef void critic_gradient(self, const Batch* batch, Py_ssize_t start, Py_ssize_t rows, f64 lift, f32* td_errors,
                              Sums* sums) noexcept nogil:
        """Add the gradient of half the sum of both mean squared errors, less `lift` times the mean value."""
        cdef Py_ssize_t i, ld = last_of(&self.critics[0]).out_pad
        cdef int k
        cdef f64 error, weight
        cdef const f32* q
        cdef f32* d_q
        self.fill(self.pairs, self.in_pad, batch.obs + start * self.obs_dim, batch.actions + start * self.act_dim, rows)
        for k in range(2):
            q = forward(&self.critics[k], self.pairs, self.in_pad, rows)
            d_q = last_of(&self.critics[k]).d_out
            for i in range(rows):
                weight = 1.0 if batch.weights == NULL else batch.weights[start + i]
                error = q[i * ld] - self.q_targets[i]
                sums.q_loss += 0.5 * weight * error * error
                sums.value += 0.5 * q[i * ld]
                sums.td_error += 0.5 * fabs(error)
                td_errors[start + i] = <f32>(0.5 * fabs(error) + (td_errors[start + i] if k else 0.0))
                d_q[i * ld] = <f32>((weight * error - 0.5 * lift) / batch.n)
            backward(&self.critics[k], self.pairs, self.in_pad, rows)

    cdef void move_critics(self, const Options* options, f32* target, Sums* sums) noexcept nogil:
        cdef int k
        for k in range(2):
            unpad(&self.critics[k])
        sums.norm = move(&self.critic_weights, options.rate, options.limit, target, options.tau)
        self.pack_critics()

    cdef tuple learn_from(self, str where, Options options, tuple names, obs, actions, rewards, next_obs, discounts,
                          noise=None, weights=None, uniform=None):
        """Run one update; return its metrics with these names, and its errors."""
        cdef Batch batch
        cdef f64[N_METRICS] metrics
        cdef dict arrays = self.take(where, &batch, obs, actions, rewards, next_obs, discounts, noise, weights,
                                     uniform)
        cdef cnp.ndarray td_errors = np.empty(batch.n, np.float32)
        with self.lock:
            self.watch = watching()
            with nogil:
                self.pack_critics()
                self.pack_moved()
                self.update_once(&batch, &options, <f32*>cnp.PyArray_DATA(td_errors), metrics)
        return {name: metrics[k] for k, name in enumerate(names) if k < 4 or options.move_policy}, td_errors

    cdef int update_once(self, const Batch* batch, const Options* options, f32* td_errors,
                         f64* metrics) except -1 nogil:
        """Run one update and write its metrics, NaN for a policy that was not updated.

        Returns whether the gradients are finite.
        """
        cdef Sums sums
        cdef f64 n = batch.n
        memset(&sums, 0, sizeof(sums))
        self.learn(batch, options, td_errors, &sums)
        metrics[0], metrics[1], metrics[2], metrics[3] = sums.q_loss / n, sums.value / n, sums.td_error / n, sums.norm
        metrics[4] = sums.policy_loss / n if options.move_policy else NAN
        metrics[5] = sums.policy_norm if options.move_policy else NAN
        memcpy(metrics + N_COMMON, sums.own, sizeof(sums.own))
        return isfinite(sums.norm) and isfinite(sums.policy_norm)

    cdef int learn(self, const Batch* batch, const Options* options, f32* td_errors, Sums* sums) except -1 nogil:
        """Run one update. Everything must be packed before, and `pack_moved` must be called afterwards."""
        return 0

    cdef void act_on(self, const f32* obs, Py_ssize_t n, const f32* noise, f64 noise_std, f32* actions) noexcept nogil:
        """Write actions (n, A) in [-1, 1]. The policy must be packed."""
        cdef Py_ssize_t start = 0, rows, i, d = self.obs_dim, a = self.act_dim
        while start < n:
            rows = min(<Py_ssize_t>CHUNK, n - start)
            self.decide(&self.actor, obs + start * d, d, rows, actions + start * a)
            start += rows
        for i in range(n * a):
            actions[i] = <f32>bounded(actions[i] + noise_std * noise[i], -1.0, 1.0)

    cdef void decide(self, Net* actor, const f32* obs, Py_ssize_t ld, Py_ssize_t rows, f32* actions) noexcept nogil:
        """Write actions (rows, A) of the policy or its target for observations (rows, ld)."""
        cdef Py_ssize_t i, j, a = self.act_dim, out_pad = last_of(actor).out_pad
        cdef const f32* y = forward(actor, obs, ld, rows)
        for i in range(rows):
            for j in range(a):
                actions[i * a + j] = <f32>tanh(y[i * out_pad + j])

    cdef object actions_of(self, object obs, object noise, f64 noise_std, str where):
        """Return actions (B, A) float32 in [-1, 1] for `obs` (B, D) and standard normal noise (B, A), None for 0."""
        cdef cnp.ndarray obs_ = self.rows_of(obs, where)
        cdef Py_ssize_t n = cnp.PyArray_DIM(obs_, 0)
        shape = (n, self.act_dim)
        if noise is None:
            noise = np.zeros(shape, np.float32)
        cdef cnp.ndarray noise_ = given(noise, cnp.NPY_FLOAT32, "float32", shape, where, "noise")
        cdef cnp.ndarray out = np.empty(shape, np.float32)
        with self.lock:
            with nogil:
                pack(&self.actor, False)
                self.act_on(<const f32*>cnp.PyArray_DATA(obs_), n, <const f32*>cnp.PyArray_DATA(noise_), noise_std,
                            <f32*>cnp.PyArray_DATA(out))
        return out

    def mode(self, obs):
        """Return the most likely actions, (B, A) float32 in [-1, 1], for observations (B, D) float32."""
        return self.actions_of(obs, None, 0.0, f"{type(self).__name__}.mode")

    cdef tuple train(self, str where, Options options, i64 policy_delay, f64 noise_std, bint annealed, stepper, memory,
                     action_rng, replay_rng, obs, dict counts):
        """Implementation of `rounds`."""
        cdef Loop loop
        cdef list arrays = open_loop(&loop, stepper, memory, obs, action_rng, replay_rng, counts, self.obs_dim, 0,
                                     self.act_dim, where)
        cdef Py_ssize_t i, j, n = loop.n, a = self.act_dim, size = loop.size
        cdef Py_ssize_t n_draws = 2 * size * a if self.gaussian else size * a
        cdef i64 updates = whole(counts["updates"], 0, where, "updates"), k, n_updates = 0, before = loop.env_steps
        cdef cnp.ndarray noise = np.empty(max(n_draws, n * a), np.float32)
        cdef cnp.ndarray bounds = np.empty((2, a), np.float32)
        cdef cnp.ndarray metrics = np.empty((loop.n_rounds * loop.updates_per_round, N_METRICS), np.float64)
        cdef f64* metrics_ = <f64*>cnp.PyArray_DATA(metrics)
        cdef f32* draws = <f32*>cnp.PyArray_DATA(noise)
        cdef f32* scale = <f32*>cnp.PyArray_DATA(bounds)
        cdef f32* centre = scale + a
        cdef const f32* low = loop.env.act_low
        cdef const f32* high = loop.env.act_high
        cdef u64 key = action_rng.key, position = action_rng.position, begun = position, replay_begun = loop.position
        cdef i64 round_start
        cdef f64 rate = options.rate, update_s = 0.0, began
        cdef bint sound = True
        cdef Batch batch = Batch(n=size, obs=loop.batch_obs, next_obs=loop.batch_next, actions=loop.batch_actions,
                                 rewards=loop.batch_rewards, discounts=loop.discounts, weights=NULL, noise=draws,
                                 uniform=NULL)
        for j in range(a):
            # As in `rlox.nn.policies.BoundedPolicy`.
            scale[j], centre[j] = (high[j] - low[j]) / 2, (high[j] + low[j]) / 2
        try:
            with self.lock:
                self.watch = watching()
                with nogil:
                    self.pack_critics()
                    self.pack_moved()
                    for _ in range(loop.n_rounds):
                        round_start = loop.env_steps
                        for k in range(loop.steps_per_round):
                            if loop.env_steps < loop.learning_starts:
                                fill_uniform_f32(draws, n * a, key, position)
                                for i in range(n):
                                    for j in range(a):
                                        loop.actions[i * a + j] = low[j] + (high[j] - low[j]) * draws[i * a + j]
                            else:
                                fill_normal_f32(draws, n * a, key, position)
                                self.act_on(loop.here, n, draws, noise_std, loop.actions)
                                for i in range(n):
                                    for j in range(a):
                                        loop.actions[i * a + j] = centre[j] + loop.actions[i * a + j] * scale[j]
                            position += <u64>(n * a + 3) // 4
                            for i in range(n):
                                for j in range(a):
                                    loop.actions[i * a + j] = <f32>legal(loop.actions[i * a + j], low[j], high[j])
                            take_in(&loop, loop.actions)
                        began = now()
                        if loop.env_steps >= loop.update_from:
                            options.rate = rate * (1.0 - progress_of(&loop, round_start)) if annealed else rate
                            for k in range(loop.updates_per_round):
                                draw(&loop)
                                for i in range(size):
                                    for j in range(a):
                                        loop.batch_actions[i * a + j] = (
                                            loop.batch_actions[i * a + j] - centre[j]) / scale[j]
                                fill_normal_f32(draws, n_draws, loop.key, loop.position)
                                loop.position += <u64>(n_draws + 3) // 4
                                options.move_policy = (updates + n_updates + 1) % policy_delay == 0
                                sound = self.update_once(&batch, &options, loop.td_errors,
                                                         metrics_ + N_METRICS * n_updates)
                                n_updates += 1
                                if not sound:
                                    break
                                if options.move_policy:
                                    self.pack_moved()
                            update_s += now() - began
                        # Do not act with NaN weights: the metrics show what happened.
                        if not sound or now() - loop.began > loop.patience:
                            break
        finally:
            action_rng.skip(position - begun)
            returns, lengths = close_loop(&loop, arrays, obs, replay_rng, replay_begun)
        rows = metrics[:n_updates, :len(METRICS) if self.gaussian else N_COMMON]
        return loop.env_steps - before, rows, update_s, returns, lengths
