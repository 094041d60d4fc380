"""The native update of IQL, as defined by `rlox.algorithms.IQL.update`."""

cimport numpy as cnp
from libc.math cimport exp, tanh

from rlox.kernels.nn.layers cimport (
    CHUNK, Net, backward, bounded, build, clear_padded, forward, last_of, number, pack, scratch, unpad,
)
from rlox.kernels.signals cimport check_signals
from rlox.kernels.types cimport f32, f64
from rlox.kernels.nn.core cimport clear, move
from rlox.kernels.nn.twin_critics cimport N_COMMON, Batch, Options, Sums, TwinCritics, options_of, smaller

from rlox.kernels.nn.twin_critics import METRICS

cnp.import_array()

cdef f64 LOG_SQRT_2PI = 0.91893853320467274178
cdef f64 LOG_STD_MIN = -5.0
cdef f64 LOG_STD_MAX = 2.0


cdef class NativeIQL(TwinCritics):
    """Implicit Q-learning (Kostrikov et al. 2021, arXiv:2110.06169): a policy, two critics, values of states.

    Parameters and errors are those of `NativeSAC`, without a temperature, except for:

    Parameters
    ----------
    policy
        (A + P,) float32: log standard deviations, which are clipped to [-5, 2], and a perceptron with A outputs, whose
        tanh is the mean.
    critics
        (Q + V,) float32: the critics, and a perceptron with one output, the values of states.
    """

    cdef Net values
    cdef f32* shares        # (CHUNK): weight of the action of each row

    def __cinit__(self, policy, critics, target, obs_dim, act_dim, hidden_sizes, activation: str = "relu"):
        self.make("NativeIQL", {"policy": policy, "critics": critics}, {"target": target}, obs_dim, act_dim,
                  hidden_sizes, activation, False, True)
        self.draws = None
        build(&self.values, [obs_dim, *self.hidden, 1], self.tanh, self.critic_weights.p, self.critic_weights.g,
              self.critic_weights.followed, self.held, False, False, 2 * CHUNK)
        self.shares = scratch(self.held, CHUNK)

    cdef void pack_moved(self) noexcept nogil:
        TwinCritics.pack_moved(self)
        pack(&self.values, True)

    cdef int learn(self, const Batch* batch, const Options* options, f32* td_errors, Sums* sums) except -1 nogil:
        cdef Py_ssize_t n = batch.n, start = 0, rows
        cdef int k
        clear(&self.critic_weights, self.critics, 2)
        clear_padded(&self.values)
        clear(&self.policy_weights, &self.actor, 1)
        while start < n:
            check_signals(&self.watch)
            rows = min(<Py_ssize_t>CHUNK, n - start)
            self.value_gradient(batch, start, rows, options, sums)
            self.critic_gradient(batch, start, rows, 0.0, td_errors, sums)
            self.add_cloning_gradient(batch, start, rows, sums)
            start += rows
        for k in range(2):
            unpad(&self.critics[k])
        unpad(&self.values)
        unpad(&self.actor)
        sums.norm = move(&self.critic_weights, options.rate, options.limit, self.critic_targets, options.tau)
        sums.policy_norm = move(&self.policy_weights, options.policy_rate, options.limit)
        return 0

    cdef void value_gradient(self, const Batch* batch, Py_ssize_t start, Py_ssize_t rows, const Options* options,
                             Sums* sums) noexcept nogil:
        """Add the gradient of the expectile loss for the values (eq. 5).

        Also compute the critics' targets (eq. 6) and the weights of actions (eq. 7) from the current values.
        """
        cdef Py_ssize_t i, d = self.obs_dim, ld = last_of(&self.values).out_pad
        cdef Py_ssize_t ldq = last_of(&self.target_critics[0]).out_pad
        cdef f64 advantage, share
        cdef const f32* v
        cdef const f32* first
        cdef const f32* second
        cdef f32* d_v = last_of(&self.values).d_out
        self.fill(self.x, self.obs_pad, batch.obs + start * d, NULL, rows)
        self.fill(self.x + rows * self.obs_pad, self.obs_pad, batch.next_obs + start * d, NULL, rows)
        v = forward(&self.values, self.x, self.obs_pad, 2 * rows)
        self.fill(self.next_pairs, self.in_pad, batch.obs + start * d, batch.actions + start * self.act_dim, rows)
        first = forward(&self.target_critics[0], self.next_pairs, self.in_pad, rows)
        second = forward(&self.target_critics[1], self.next_pairs, self.in_pad, rows)
        for i in range(rows):
            self.q_targets[i] = batch.rewards[start + i] + batch.discounts[start + i] * v[(rows + i) * ld]
            advantage = <f64>smaller(first[i * ldq], second[i * ldq]) - v[i * ld]
            share = (1.0 - options.expectile if advantage < 0.0 else options.expectile) / batch.n
            sums.own[0] += share * advantage * advantage
            sums.own[1] += <f64>v[i * ld] / batch.n
            d_v[i * ld] = <f32>(-2.0 * share * advantage)
            self.shares[i] = <f32>bounded(exp(options.inverse_scale * advantage), 0.0, options.max_weight)
        backward(&self.values, self.x, self.obs_pad, rows)

    cdef void add_cloning_gradient(self, const Batch* batch, Py_ssize_t start, Py_ssize_t rows,
                                   Sums* sums) noexcept nogil:
        """Add the gradient of the weighted log-densities for the policy, with inputs and shares of `value_gradient`."""
        cdef Py_ssize_t i, j, a = self.act_dim, ld = last_of(&self.actor).out_pad
        cdef const f32* y = forward(&self.actor, self.x, self.obs_pad, rows)
        cdef f32* d_y = last_of(&self.actor).d_out
        cdef f32* gradient = self.policy_weights.g
        cdef f64 log_std, precision, mean, z, slope
        for j in range(a):
            log_std = bounded(self.policy_weights.p[j], LOG_STD_MIN, LOG_STD_MAX)
            precision, slope = exp(-log_std), 0.0
            for i in range(rows):
                mean = tanh(y[i * ld + j])
                z = (batch.actions[(start + i) * a + j] - mean) * precision
                sums.policy_loss += self.shares[i] * (0.5 * z * z + log_std + LOG_SQRT_2PI)
                slope += self.shares[i] * (1.0 - z * z)
                d_y[i * ld + j] = <f32>(-self.shares[i] / batch.n * z * precision * (1.0 - mean * mean))
            if log_std == self.policy_weights.p[j]:
                gradient[j] += <f32>(slope / batch.n)
        backward(&self.actor, self.x, self.obs_pad, rows)

    def update(self, obs, actions, rewards, next_obs, discounts, *, learning_rate, policy_learning_rate, tau, expectile,
               temperature, max_weight, max_grad_norm=None):
        """Update values, critics, policy and target once, as defined by `rlox.algorithms.IQL.update`.

        Parameters
        ----------
        obs, actions, rewards, next_obs, discounts
            As in `NativeSAC.update`.
        learning_rate, policy_learning_rate
            Of critics and values; of the policy.
        tau, expectile, temperature, max_weight, max_grad_norm
            As in `rlox.config.IQLConfig`; None if off.

        Returns
        -------
        metrics, td_errors
            ``q_loss q_value td_error grad_norm policy_loss policy_grad_norm value_loss value``; and the errors as in
            `NativeSAC.update`.
        """
        cdef str where = "NativeIQL.update"
        cdef Options options = options_of(learning_rate, tau, max_grad_norm, where)
        options.policy_rate = number(policy_learning_rate, 0.0, where, "policy_learning_rate")
        options.expectile = number(expectile, 0.0, where, "expectile")
        if not 0.0 < options.expectile < 1.0:
            raise ValueError(f"{where}: expectile must be in (0, 1), got {expectile}")
        options.inverse_scale = number(temperature, 0.0, where, "temperature")
        options.max_weight = number(max_weight, 0.0, where, "max_weight")
        names = (*METRICS[:N_COMMON], "value_loss", "value")
        return self.learn_from(where, options, names, obs, actions, rewards, next_obs, discounts)
