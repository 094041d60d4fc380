"""The native update of CQL, as defined by `rlox.algorithms.CQL.update`."""

cimport numpy as cnp
from libc.math cimport INFINITY, exp, log

from rlox.kernels.nn.layers cimport CHUNK, backward, bounded, forward, last_of, number, scratch
from rlox.kernels.nn.off_policy cimport whole
from rlox.kernels.types cimport f32, f64
from rlox.kernels.nn.core cimport Weights, move_number
from rlox.kernels.nn.sac cimport SoftCritics, squash
from rlox.kernels.nn.twin_critics cimport Batch, Options, Sums

from rlox.kernels.nn.twin_critics import METRICS

cnp.import_array()

cdef f64 LOG_2 = 0.69314718055994530942
cdef f64 LOG_WEIGHT_MAX = log(1e6)  # of a penalty weight that is learned


cdef class NativeCQL(SoftCritics):
    """Conservative Q-learning, CQL(H) (Kumar et al. 2020, arXiv:2006.04779), on soft actor-critic.

    Parameters and errors are those of `NativeSAC`, plus:

    Parameters
    ----------
    log_cql_alpha
        (1,) float32: logarithm of the weight of the penalty.
    n_random_actions
        M >= 1: number of uniform actions, and of actions of the policy, that are compared in each state.
    """

    cdef Weights penalty_weight
    cdef Py_ssize_t n_states    # number of states whose actions are passed to the critics at a time
    cdef f32* candidates        # (2 M n_states, in_pad): the critics' inputs
    cdef f32* log_ratios        # (2 M n_states): log of the density of each action over the uniform density

    def __cinit__(self, policy, critics, target, log_alpha, log_cql_alpha, obs_dim, act_dim, hidden_sizes,
                  activation: str = "relu", n_random_actions: int = 10):
        cdef str where = "NativeCQL"
        cdef Py_ssize_t n = whole(n_random_actions, 1, where, "n_random_actions")
        blocks = {"policy": policy, "critics": critics, "log_alpha": log_alpha, "log_cql_alpha": log_cql_alpha}
        self.make(where, blocks, {"target": target}, obs_dim, act_dim, hidden_sizes, activation, True, False, n)
        self.temperature, self.penalty_weight = self.weights_of("log_alpha"), self.weights_of("log_cql_alpha")
        self.n_states = max(1, CHUNK // (2 * n))
        self.candidates = scratch(self.held, 2 * n * self.n_states * self.in_pad)
        self.log_ratios = scratch(self.held, 2 * n * self.n_states)

    cdef dict steps(self):
        return {**SoftCritics.steps(self), "log_cql_alpha": self.penalty_weight.step}

    cdef void set_steps(self, dict steps):
        SoftCritics.set_steps(self, steps)
        self.penalty_weight.step = steps["log_cql_alpha"]

    cdef int learn(self, const Batch* batch, const Options* options, f32* td_errors, Sums* sums) except -1 nogil:
        cdef f32* log_weight = self.penalty_weight.p
        self.conservatism = exp(log_weight[0])
        SoftCritics.learn(self, batch, options, td_errors, sums)
        sums.own[2], sums.own[3] = sums.own[2] - sums.value / batch.n, self.conservatism
        if options.tune_penalty:
            # Dual ascent on the logarithm of the weight (appendix F), which grows while the penalty is too large.
            move_number(&self.penalty_weight, self.conservatism * (options.target_penalty - sums.own[2]), options.rate)
            log_weight[0] = <f32>bounded(log_weight[0], -INFINITY, LOG_WEIGHT_MAX)
        return 0

    cdef void penalty_gradient(self, const Batch* batch, Py_ssize_t start, Py_ssize_t rows, Sums* sums) noexcept nogil:
        cdef Py_ssize_t n = self.n_random, first = 0, states
        while first < rows:
            states = min(self.n_states, rows - first)
            self.fill_candidates(batch, start + first, states,
                                 last_of(&self.actor).out + first * last_of(&self.actor).out_pad)
            self.add_soft_maxima(states, 0.5 / batch.n, sums)
            first += states

    cdef void fill_candidates(self, const Batch* batch, Py_ssize_t start, Py_ssize_t states,
                              const f32* y) noexcept nogil:
        """Fill in pairs (2 M, states) of state and action, and their log ratios, from the policy's outputs y."""
        cdef Py_ssize_t c, i, n = self.n_random, a = self.act_dim, ld = last_of(&self.actor).out_pad
        cdef Py_ssize_t to, own_to
        cdef const f32* obs = batch.obs + start * self.obs_dim
        for c in range(n):
            to, own_to = c * states, (n + c) * states
            squash(y, ld, states, a, batch.noise + ((2 + c) * batch.n + start) * a, &self.pi)
            self.fill(self.candidates + to * self.in_pad, self.in_pad, obs, batch.uniform + (c * batch.n + start) * a,
                      states)
            self.fill(self.candidates + own_to * self.in_pad, self.in_pad, obs, self.pi.actions, states)
            for i in range(states):
                self.log_ratios[to + i] = 0.0
                self.log_ratios[own_to + i] = <f32>(self.pi.log_probs[i] + a * LOG_2)

    cdef void add_soft_maxima(self, Py_ssize_t states, f64 share, Sums* sums) noexcept nogil:
        """Add the gradients of the soft maxima over the proposed actions, each times `share`, and sum the maxima."""
        cdef Py_ssize_t c, i, n = 2 * self.n_random, ld = last_of(&self.critics[0]).out_pad
        cdef int k
        cdef f64 top, total, value
        cdef const f32* q
        cdef f32* d_q
        for k in range(2):
            q = forward(&self.critics[k], self.candidates, self.in_pad, n * states)
            d_q = last_of(&self.critics[k]).d_out
            for i in range(states):
                top, total = -INFINITY, 0.0
                for c in range(n):
                    top = max(top, <f64>q[(c * states + i) * ld] - self.log_ratios[c * states + i])
                for c in range(n):
                    value = exp(q[(c * states + i) * ld] - self.log_ratios[c * states + i] - top)
                    total += value
                    d_q[(c * states + i) * ld] = <f32>value
                for c in range(n):
                    d_q[(c * states + i) * ld] *= <f32>(self.conservatism * share / total)
                sums.own[2] += share * (top + log(total / n))
            backward(&self.critics[k], self.candidates, self.in_pad, n * states)

    def update(self, obs, actions, rewards, next_obs, discounts, noise, uniform, *, learning_rate, tau,
               target_entropy=None, cql_target_value=None, max_grad_norm=None):
        """Update critics, policy, temperature, penalty weight and target once.

        The update is defined by `rlox.algorithms.CQL.update`.

        Parameters
        ----------
        obs, actions, rewards, next_obs, discounts, target_entropy
            As in `NativeSAC.update`.
        noise
            (2 + M, B, A) float32, standard normal: for the actions at `obs`, for those at `next_obs`, and for those of
            the policy in the penalty.
        uniform
            (M, B, A) float32, uniform on [-1, 1]: the other actions in the penalty.
        cql_target_value
            Target of the penalty, to which its weight is tuned; None leaves the weight unchanged.
        learning_rate, tau, max_grad_norm
            As in `rlox.config.CQLConfig`, with schedules resolved; None if off.

        Returns
        -------
        metrics, td_errors
            As in `NativeSAC.update`, plus the metrics ``cql_penalty cql_alpha``.
        """
        cdef str where = "NativeCQL.update"
        cdef Options options = self.options(target_entropy, learning_rate, tau, max_grad_norm, where)
        options.tune_penalty = cql_target_value is not None
        if options.tune_penalty:
            options.target_penalty = number(cql_target_value, -INFINITY, where, "cql_target_value")
        names = (*METRICS, "cql_penalty", "cql_alpha")
        return self.learn_from(where, options, names, obs, actions, rewards, next_obs, discounts, noise, None, uniform)
