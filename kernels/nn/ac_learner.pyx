"""The native updates of SAC, TD3, IQL, CQL and BC, as their PyTorch `update` defines them, for plain perceptrons.

Each network is a flat float32 block (see layers.pxd). The policy's is in the order of ``parameters()``, weights
(n_out, n_in); that of the two critics is in the order of `rlox.nn.networks.TwinQNetwork.parameters()`: the weights
(2, n_in, n_out) of all layers, then their biases (2, 1, n_out). A batch is worked through `CHUNK` rows at a time.
"""

import threading

import numpy as np

cimport numpy as cnp
from libc.math cimport INFINITY, NAN, copysign, exp, fabs, isfinite, log, log1p, sqrt, tanh
from libc.stdint cimport int32_t as i32
from libc.string cimport memcpy, memset

from kernels.checks cimport as_flag, as_index, check_out, share_memory
from kernels.nn.layers cimport (
    CHUNK, Layer, Net, adam, backward, backward_to_input, bounded, build, clear_padded, forward, given, is_tanh,
    last_of, lerp, moments_fit, moments_in, moments_out, norm_of, number, pack, padded, scratch, unpad, widths_of,
)
from kernels.nn.off_policy cimport Loop, close_loop, draw, open_loop, progress_of, take_in, whole
from kernels.philox cimport fill_normal_f32, fill_uniform_f32
from kernels.signals cimport Watch, look, now, watching
from kernels.types cimport f32, f64, i64, u64

cnp.import_array()

# Of an update, means over its batch; in place of the last two, SAC's, others tell up to four of their own.
METRICS = ("q_loss", "q_value", "td_error", "grad_norm", "policy_loss", "policy_grad_norm", "entropy", "alpha")

cdef enum:
    N_COMMON = 6
    N_METRICS = 10
    SWEEP = 4096  # parameters that Adam and the target's move take at a time, from the cache

cdef f64 LOG_2 = 0.69314718055994530942
cdef f64 LOG_SQRT_2PI = 0.91893853320467274178
cdef f64 LOG_STD_MIN = -20.0
cdef f64 LOG_STD_MAX = 2.0
cdef f64 LOG_WEIGHT_MAX = log(1e6)  # of CQL's penalty, where it is learned
cdef f64 FREE_LOG_STD_MIN = -5.0  # of deviations that depend on no observation


# A block of parameters and its Adam.
cdef struct Weights:
    Py_ssize_t size
    Py_ssize_t followed  # so many of the first a target follows
    f32* p
    f32* g
    f32* m
    f32* v
    i64 step


# A batch; weights NULL where all rows count alike.
cdef struct Batch:
    Py_ssize_t n
    const f32* obs
    const f32* next_obs
    const f32* actions
    const f32* rewards
    const f32* discounts
    const f32* weights
    const f32* noise
    const f32* uniform


# What an update is told; a limit of 0 is none.
cdef struct Options:
    f64 rate
    f64 tau
    f64 limit           # of each gradient's norm
    bint tune           # the temperature,
    f64 target_entropy  # to this
    bint move_policy
    f64 target_noise
    f64 noise_clip
    bint clone          # the batch's actions too, as TD3+BC,
    f64 alpha           # and weigh values so beside them
    f64 policy_rate     # IQL's, as the next three
    f64 expectile
    f64 inverse_scale   # of the advantages
    f64 max_weight
    bint tune_penalty   # its weight,
    f64 target_penalty  # so that it comes to this


# Actions of a chunk of rows, and what their derivatives are made of.
cdef struct Squashed:
    f32* actions        # (CHUNK, A): tanh u
    f32* slopes         # (CHUNK, A): 1 - tanh^2 u
    f32* shifts         # (CHUNK, A): du / dlog sigma
    f32* log_probs      # (CHUNK)


cdef struct Sums:
    f64 q_loss
    f64 value
    f64 td_error
    f64 norm
    f64 policy_loss
    f64 policy_norm
    f64[N_METRICS - N_COMMON] own  # of one algorithm, means in the end


cdef f64 move(Weights* w, const Options* options, f32* target) noexcept nogil:
    """One step of Adam along the gradient clipped to the limit, whose norm before is returned; then `target`, unless
    NULL, moves by the share tau of the way, while both are in the cache."""
    cdef Py_ssize_t at = 0, n
    cdef f64 norm = norm_of(w.g, w.size), clip = 1.0
    if options.limit > 0.0:
        clip = bounded(options.limit / (norm + 1e-6), 0.0, 1.0)
    w.step += 1
    cdef f32 step_size = <f32>(options.rate / (1.0 - 0.9 ** <f64>w.step))
    cdef f32 root2 = <f32>sqrt(1.0 - 0.999 ** <f64>w.step)
    while at < w.size:
        n = min(<Py_ssize_t>SWEEP, w.size - at)
        adam(w.p + at, w.g + at, w.m + at, w.v + at, n, <f32>clip, step_size, root2, <f32>1e-8)
        if target != NULL and at < w.followed:
            lerp(target + at, w.p + at, min(n, w.followed - at), <f32>options.tau)
        at += n
    return norm


cdef void move_logarithm(Weights* w, f64 slope, const Options* options) noexcept nogil:
    """`move` of a single number, along a gradient that has no limit."""
    cdef Options told = options[0]
    told.limit = 0.0
    w.g[0] = <f32>slope
    move(w, &told, NULL)


cdef void squash(const f32* y, Py_ssize_t ld, Py_ssize_t rows, Py_ssize_t a, const f32* noise,
                 Squashed* to) noexcept nogil:
    """Actions tanh(u), u = mean + sigma * noise, of outputs (rows, ld): means, then log sigmas.

    The density of tanh(u) divides that of u by 1 - tanh^2 u, whose logarithm is 2 (log 2 - |u| - log(1 + exp(-2 |u|)))
    without a cancellation (Haarnoja et al. 2018, arXiv:1812.05905, appendix C, has the change of variables).
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


cdef inline f32 smaller(f32 a, f32 b) noexcept nogil:
    """The smaller one, or a NaN."""
    return b if b < a or b != b else a


cdef inline const f32* data_of(dict arrays, str name):
    """Where the numbers of an array are; NULL for none."""
    return <const f32*>cnp.PyArray_DATA(<cnp.ndarray>arrays[name]) if name in arrays else NULL


cdef object size_of(list widths):
    """How many parameters a perceptron has."""
    return sum((a + 1) * b for a, b in zip(widths, widths[1:]))


def n_parameters(obs_dim: int, act_dim: int, hidden_sizes, gaussian: bool) -> tuple[int, int]:
    """How many numbers the policy's and the critics' blocks hold."""
    policy = [obs_dim, *hidden_sizes, act_dim * (2 if gaussian else 1)]
    return size_of(policy), 2 * size_of([obs_dim + act_dim, *hidden_sizes, 1])


cdef class _Trained:
    """What all kernels here share: blocks of parameters, and the Adam of each.

    Attributes
    ----------
    parameters, gradients, moments
        By block: the arrays given, the gradients of the last update, not clipped, and Adam's arrays by PyTorch's
        names (betas 0.9 and 0.999, eps 1e-8).
    """

    cdef readonly dict parameters
    cdef readonly dict gradients
    cdef readonly dict moments
    cdef readonly Py_ssize_t obs_dim
    cdef list held
    cdef object lock
    cdef Watch watch

    cdef int hold(self, str where, dict trained, dict others, dict sizes) except -1:
        """Take the blocks, `trained` ones and `others`, after their checks; `sizes` where one is not a single number."""
        seen = {}
        for name, block in {**trained, **others}.items():
            check_out(block, cnp.NPY_FLOAT32, "float32", (sizes.get(name, 1),), where, name)
            for other, before in seen.items():
                if share_memory(block, before):
                    raise ValueError(f"{where}: {name} must share no memory with {other}, got one array for both")
            seen[name] = block
        self.parameters = trained
        self.gradients = {name: np.zeros_like(block) for name, block in trained.items()}
        self.moments = {
            name: {moment: np.zeros_like(block) for moment in ("exp_avg", "exp_avg_sq")}
            for name, block in trained.items()
        }
        self.held = []
        self.lock = threading.Lock()
        return 0

    cdef Weights weights_of(self, str name) except *:
        cdef Weights w
        cdef cnp.ndarray block = self.parameters[name]
        w.size, w.p, w.step = cnp.PyArray_SIZE(block), <f32*>cnp.PyArray_DATA(block), 0
        w.followed = w.size
        w.g = <f32*>cnp.PyArray_DATA(<cnp.ndarray>self.gradients[name])
        w.m = <f32*>cnp.PyArray_DATA(<cnp.ndarray>self.moments[name]["exp_avg"])
        w.v = <f32*>cnp.PyArray_DATA(<cnp.ndarray>self.moments[name]["exp_avg_sq"])
        return w

    cdef dict steps(self):
        """Optimiser steps taken, by block."""
        raise NotImplementedError

    cdef void set_steps(self, dict steps):
        """Put in what `steps` returned."""

    def get_state(self) -> dict:
        """By block, copies of the optimiser's moments (P,) and step count (), as `FlatOptimizer.state` returns them."""
        with self.lock:
            steps = self.steps()
            return {name: moments_out(self.moments[name], steps[name]) for name in self.moments}

    def set_state(self, state) -> None:
        """Restore what `get_state` returned; a ValueError where blocks, kind or size differ, and nothing is changed."""
        where = f"{type(self).__name__}.set_state"
        if set(state) != set(self.moments):
            raise ValueError(f"{where}: state must hold {', '.join(self.moments)}, got {sorted(state)}")
        for name, moments in self.moments.items():
            moments_fit(moments, state[name], where)
        with self.lock:
            self.set_steps({name: moments_in(self.moments[name], state[name], where) for name in self.moments})

    cdef object rows_of(self, object obs, str where):
        """`obs` after its checks: (B, D) float32."""
        shape = np.shape(obs)
        n = shape[0] if len(shape) == 2 else "B"
        return given(obs, cnp.NPY_FLOAT32, "float32", (n, self.obs_dim), where, "obs")

    cdef void clear(self, Weights* w, Net* nets, int n_nets) noexcept nogil:
        """Zero the gradient of these networks."""
        cdef int k
        memset(w.g, 0, w.size * sizeof(f32))
        for k in range(n_nets):
            clear_padded(&nets[k])


cdef class _TwinCritics(_Trained):
    """What all but BC share: a policy, two critics, their targets, and the critics' update."""

    cdef readonly Py_ssize_t act_dim
    cdef bint gaussian
    cdef tuple draws        # shape of the noise before (B, A); None where there is none
    cdef Py_ssize_t n_random    # actions of CQL's penalty, uniform ones and as many of the policy; else 0
    cdef list hidden
    cdef dict targets
    cdef Weights policy_weights
    cdef Weights critic_weights
    cdef f32* critic_targets
    cdef Net actor
    cdef Net[2] critics
    cdef Net[2] aims
    cdef Py_ssize_t obs_pad
    cdef Py_ssize_t in_pad
    cdef f32* x             # (2 * CHUNK, obs_pad): the actor's inputs, states and then those they led to
    cdef f32* pairs         # (CHUNK, in_pad): the critics' inputs
    cdef f32* next_pairs    # (CHUNK, in_pad): their targets' inputs
    cdef f32* d_pairs       # (CHUNK, in_pad)
    cdef f32* goals         # (CHUNK): what the critics are to say; or the first one's share in the smaller value
    cdef f32* d_actions     # (CHUNK, A)
    cdef i32* chosen        # (CHUNK): rows
    cdef Squashed pi

    cdef int make(self, str where, dict trained, dict targets, obs_dim, act_dim, hidden_sizes, str activation,
                  bint gaussian, bint valued=False, Py_ssize_t n_random=0) except -1:
        """Everything but a target actor and a temperature, after all checks.

        `valued`: behind the critics is room for a perceptron of values, and before the policy for a number each action.
        """
        obs_dim, act_dim = as_index(obs_dim, where, "obs_dim"), as_index(act_dim, where, "act_dim")
        cdef bint hyperbolic = is_tanh(activation, where)
        self.hidden = widths_of(hidden_sizes, where)
        if obs_dim < 1 or act_dim < 1:
            raise ValueError(f"{where}: obs_dim and act_dim must be >= 1, got {obs_dim} and {act_dim}")
        policy_size, critics_size = n_parameters(obs_dim, act_dim, self.hidden, gaussian)
        sizes = {"policy": policy_size, "target_policy": policy_size, "critics": critics_size, "target": critics_size}
        if valued:
            sizes["policy"] += act_dim
            sizes["critics"] += size_of([obs_dim, *self.hidden, 1])
        self.hold(where, trained, targets, sizes)
        self.targets = targets
        self.obs_dim, self.act_dim, self.gaussian = obs_dim, act_dim, gaussian
        self.n_random = n_random
        self.draws = (2 + n_random,) if gaussian else ()
        self.obs_pad, self.in_pad = padded(obs_dim), padded(obs_dim + act_dim)
        self.policy_weights = self.weights_of("policy")
        self.critic_weights = self.weights_of("critics")
        self.critic_weights.followed = critics_size
        self.critic_targets = <f32*>cnp.PyArray_DATA(<cnp.ndarray>targets["target"])
        build(&self.actor, [obs_dim, *self.hidden, act_dim * (2 if gaussian else 1)], hyperbolic, self.policy_weights.p,
              self.policy_weights.g, act_dim if valued else 0, self.held, False, False, 2 * CHUNK)
        widths = [obs_dim + act_dim, *self.hidden, 1]
        self.make_pair(self.critics, widths, hyperbolic, self.critic_weights.p, max(<Py_ssize_t>CHUNK, 2 * n_random))
        self.make_pair(self.aims, widths, hyperbolic, self.critic_targets, CHUNK)
        self.x = scratch(self.held, 2 * CHUNK * self.obs_pad)
        self.pairs = scratch(self.held, CHUNK * self.in_pad)
        self.next_pairs = scratch(self.held, CHUNK * self.in_pad)
        self.d_pairs = scratch(self.held, CHUNK * self.in_pad)
        self.goals = scratch(self.held, CHUNK)
        self.d_actions = scratch(self.held, CHUNK * self.act_dim)
        self.chosen = <i32*>scratch(self.held, CHUNK)
        self.pi.actions = scratch(self.held, CHUNK * self.act_dim)
        self.pi.slopes = scratch(self.held, CHUNK * self.act_dim)
        self.pi.shifts = scratch(self.held, CHUNK * self.act_dim)
        self.pi.log_probs = scratch(self.held, CHUNK)
        return 0

    cdef int make_pair(self, Net* nets, list widths, bint hyperbolic, f32* block, Py_ssize_t rows) except -1:
        """Two perceptrons whose parameters alternate, weights of all layers first."""
        cdef Py_ssize_t at = 0
        cdef f32* gradient = self.critic_weights.g
        cdef Layer* layer
        cdef int k, l
        for k in range(2):
            build(&nets[k], widths, hyperbolic, block, gradient, 0, self.held, True, True, rows)
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
        """Fill in the batch after its checks; returns the arrays it points to."""
        cdef cnp.ndarray obs_ = self.rows_of(obs, where)
        cdef Py_ssize_t n = cnp.PyArray_DIM(obs_, 0)
        if n < 1:
            raise ValueError(f"{where}: obs must hold at least one row, got none")
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
        """Pack what `learn` has moved, but for the critics, which it packs itself."""
        cdef int k
        pack(&self.actor, True)
        for k in range(2):
            pack(&self.aims[k], False)

    cdef void fill(self, f32* to, Py_ssize_t ld, const f32* obs, const f32* actions, Py_ssize_t rows) noexcept nogil:
        """Rows of observations, and of actions behind them unless NULL."""
        cdef Py_ssize_t i, d = self.obs_dim, a = self.act_dim
        for i in range(rows):
            memcpy(to + i * ld, obs + i * d, d * sizeof(f32))
            if actions != NULL:
                memcpy(to + i * ld + d, actions + i * a, a * sizeof(f32))

    cdef void aim(self, const Batch* batch, Py_ssize_t start, Py_ssize_t rows, f64 alpha) noexcept nogil:
        """What the critics are to say, from the chunk's next actions in `pi`: r + discount (min Q' - alpha log pi')."""
        cdef Py_ssize_t i, ld
        cdef f32 ahead
        cdef const f32* first
        cdef const f32* second
        self.fill(self.next_pairs, self.in_pad, batch.next_obs + start * self.obs_dim, self.pi.actions, rows)
        first = forward(&self.aims[0], self.next_pairs, self.in_pad, rows)
        second = forward(&self.aims[1], self.next_pairs, self.in_pad, rows)
        ld = last_of(&self.aims[0]).out_pad
        for i in range(rows):
            ahead = smaller(first[i * ld], second[i * ld])
            if alpha != 0.0:
                ahead = <f32>(ahead - alpha * self.pi.log_probs[i])
            self.goals[i] = batch.rewards[start + i] + batch.discounts[start + i] * ahead

    cdef void criticise(self, const Batch* batch, Py_ssize_t start, Py_ssize_t rows, f64 lift, f32* td_errors,
                        Sums* sums) noexcept nogil:
        """Add the gradient of half the sum of both mean squared errors, from `goals`, less `lift` times the mean value.
        """
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
                error = q[i * ld] - self.goals[i]
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
        sums.norm = move(&self.critic_weights, options, target)
        self.pack_critics()

    cdef tuple learn_from(self, str where, Options options, tuple names, obs, actions, rewards, next_obs, discounts,
                          noise=None, weights=None, uniform=None):
        """Metrics of these names, and errors, of one update."""
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
        """One update and its metrics, NaN for those of a policy that did not move; whether gradients are finite."""
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
        """One update. Everything is packed before, and afterwards `pack_moved` has to follow."""
        return 0

    cdef void act_on(self, const f32* obs, Py_ssize_t n, const f32* noise, f64 noise_std, f32* actions) noexcept nogil:
        """Actions (n, A) in [-1, 1]; the policy is packed."""
        cdef Py_ssize_t start = 0, rows, i, d = self.obs_dim, a = self.act_dim
        while start < n:
            rows = min(<Py_ssize_t>CHUNK, n - start)
            self.decide(&self.actor, obs + start * d, d, rows, actions + start * a)
            start += rows
        for i in range(n * a):
            actions[i] = <f32>bounded(actions[i] + noise_std * noise[i], -1.0, 1.0)

    cdef void decide(self, Net* actor, const f32* obs, Py_ssize_t ld, Py_ssize_t rows, f32* actions) noexcept nogil:
        """Actions (rows, A) of the policy or its target for observations (rows, ld)."""
        cdef Py_ssize_t i, j, a = self.act_dim, out_pad = last_of(actor).out_pad
        cdef const f32* y = forward(actor, obs, ld, rows)
        for i in range(rows):
            for j in range(a):
                actions[i * a + j] = <f32>tanh(y[i * out_pad + j])

    cdef object actions_of(self, object obs, object noise, f64 noise_std, str where):
        """Actions (B, A) float32 in [-1, 1] for observations (B, D) and standard normal noise (B, A); None is 0."""
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
        """The most likely actions, (B, A) float32 in [-1, 1], for observations (B, D) float32."""
        return self.actions_of(obs, None, 0.0, f"{type(self).__name__}.mode")

    cdef tuple train(self, str where, Options options, i64 policy_delay, f64 noise_std, bint annealed, stepper, memory,
                     action_rng, replay_rng, obs, dict counts):
        """What `rounds` does."""
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
            # As `rlox.nn.policies.BoundedPolicy` has them.
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
                                    loop.actions[i * a + j] = <f32>bounded(loop.actions[i * a + j], low[j], high[j])
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
                        # Weights that are NaN must not act: the metrics say what happened.
                        if not sound or now() - loop.began > loop.patience:
                            break
        finally:
            action_rng.skip(position - begun)
            returns, lengths = close_loop(&loop, arrays, obs, replay_rng, replay_begun)
        told = metrics[:n_updates, :len(METRICS) if self.gaussian else N_COMMON]
        return loop.env_steps - before, told, update_s, returns, lengths


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


cdef class _SoftCritics(_TwinCritics):
    """What SAC and CQL share: a squashed Gaussian policy, a temperature, and but for the penalty the update."""

    cdef Weights temperature
    cdef f64 conservatism   # the penalty's weight, in an update

    cdef dict steps(self):
        return {**_TwinCritics.steps(self), "log_alpha": self.temperature.step}

    cdef void set_steps(self, dict steps):
        _TwinCritics.set_steps(self, steps)
        self.temperature.step = steps["log_alpha"]

    def act(self, obs, noise):
        """Actions (B, A) float32 in [-1, 1] for observations (B, D) and standard normal noise (B, A), float32."""
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
        # If so, one product for both states of a transition, and outputs that are still there at the policy's own turn.
        cdef bint whole = n <= CHUNK
        cdef const f32* y
        self.clear(&self.critic_weights, self.critics, 2)
        while start < n:
            look(&self.watch)
            rows = min(<Py_ssize_t>CHUNK, n - start)
            if whole or self.n_random:
                self.fill(self.x, self.obs_pad, batch.obs + start * d, NULL, rows)
                ahead = rows
            self.fill(self.x + ahead * self.obs_pad, self.obs_pad, batch.next_obs + start * d, NULL, rows)
            y = forward(&self.actor, self.x, self.obs_pad, ahead + rows)
            squash(y + ahead * ld, ld, rows, a, batch.noise + (n + start) * a, &self.pi)
            # With the penalty, the targets have no entropy.
            self.aim(batch, start, rows, 0.0 if self.n_random else alpha)
            self.criticise(batch, start, rows, self.conservatism, td_errors, sums)
            if self.n_random:
                self.conserve(batch, start, rows, sums)
            start += rows
        self.move_critics(options, self.critic_targets, sums)
        self.clear(&self.policy_weights, &self.actor, 1)
        start = 0
        while start < n:
            look(&self.watch)
            rows = min(<Py_ssize_t>CHUNK, n - start)
            if not whole:
                self.fill(self.x, self.obs_pad, batch.obs + start * d, NULL, rows)
                forward(&self.actor, self.x, self.obs_pad, rows)
            self.improve(batch, start, rows, alpha, sums)
            start += rows
        unpad(&self.actor)
        sums.policy_norm = move(&self.policy_weights, options, NULL)
        sums.own[0], sums.own[1] = sums.own[0] / n, alpha
        if options.tune:
            # d/d log(alpha) of -log(alpha) (log pi + target entropy), averaged
            move_logarithm(&self.temperature, sums.own[0] - options.target_entropy, options)
        return 0

    cdef void conserve(self, const Batch* batch, Py_ssize_t start, Py_ssize_t rows, Sums* sums) noexcept nogil:
        """Add the critics' gradient of the penalty's soft maxima, from the policy's last `forward`."""

    cdef void improve(self, const Batch* batch, Py_ssize_t start, Py_ssize_t rows, f64 alpha,
                      Sums* sums) noexcept nogil:
        """Add the policy's gradient of alpha log pi - min Q, from its last `forward`."""
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
            # Between equal ones the gradient is shared, as in PyTorch.
            share = 0.5 if values[0][i * ldq] == values[1][i * ldq] else <f64>(values[0][i * ldq] < values[1][i * ldq])
            self.goals[i] = <f32>share
        memset(self.d_actions, 0, rows * a * sizeof(f32))
        for k in range(2):
            self.blame(&self.critics[k], rows, k == 1, <f32>-scale)
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

    cdef void blame(self, Net* critic, Py_ssize_t rows, bint second, f32 scale) noexcept nogil:
        """Add to `d_actions` what one critic's value, times `scale`, says of those rows where it is the smaller one.

        On average these are half of the rows: what the last `forward` left of them moves together first.
        """
        cdef Py_ssize_t i, j, m = 0, d = self.obs_dim, a = self.act_dim
        cdef int l
        cdef f32 share
        cdef f32* to = self.d_actions
        cdef Layer* layer
        for i in range(rows):
            share = <f32>1.0 - self.goals[i] if second else self.goals[i]
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


cdef class NativeSAC(_SoftCritics):
    """Soft actor-critic (Haarnoja et al. 2018, arXiv:1812.05905): a squashed Gaussian policy, two critics, temperature.

    Calls from several threads wait for each other. Nothing that is given in is kept, but for the blocks.

    Parameters
    ----------
    policy
        (P,) float32, C-contiguous and writeable like all blocks, which are kept and changed in place: a perceptron with
        2 A outputs, means and then log standard deviations, which are held to [-20, 2].
    critics, target
        (Q,) float32: the critics and their target.
    log_alpha
        (1,) float32: the temperature's logarithm.
    obs_dim, act_dim
        D and A.
    hidden_sizes
        Widths of the hidden layers, at most 8, of policy and critics alike.
    activation
        ``relu`` or ``tanh``.

    Raises
    ------
    TypeError
        A block is no float32 array, or a size no integer.
    ValueError
        A size below 1, more than 8 hidden layers, an unknown activation, a block of another length, not C-contiguous
        and writeable, or one that overlaps another.
    """

    def __cinit__(self, policy, critics, target, log_alpha, obs_dim, act_dim, hidden_sizes, activation: str = "relu"):
        self.make("NativeSAC", {"policy": policy, "critics": critics, "log_alpha": log_alpha}, {"target": target},
                  obs_dim, act_dim, hidden_sizes, activation, True)
        self.temperature = self.weights_of("log_alpha")

    def update(self, obs, actions, rewards, next_obs, discounts, noise, weights=None, *, learning_rate, tau,
               target_entropy=None, max_grad_norm=None):
        """One update of critics, policy, temperature and target, what `rlox.algorithms.SAC.update` defines.

        Parameters
        ----------
        obs, next_obs
            (B, D) float32.
        actions
            (B, A) float32, scaled to [-1, 1].
        rewards, discounts, weights
            (B,) float32; a discount is the factor of the value of `next_obs`, 0 where the episode terminated. Weights
            are of the critics' loss; without them all rows count alike.
        noise
            (2, B, A) float32, standard normal: for the actions at `obs`, and for those at `next_obs`.
        target_entropy
            Nats that the temperature is tuned to; None leaves it as it is.
        learning_rate, tau, max_grad_norm
            Of `rlox.config.SACConfig`, schedules resolved; None where it is off.

        Returns
        -------
        metrics, td_errors
            ``q_loss q_value td_error grad_norm policy_loss policy_grad_norm entropy alpha``; and (B,) float32, how far
            the values were from their target, mean of both critics. NaN in the data or the weights makes them NaN.
        """
        cdef str where = "NativeSAC.update"
        cdef Options options = self.options(target_entropy, learning_rate, tau, max_grad_norm, where)
        return self.learn_from(where, options, METRICS, obs, actions, rewards, next_obs, discounts, noise, weights)

    def rounds(self, stepper, memory, action_rng, replay_rng, obs, n_rounds, *, train_freq, gradient_steps, batch_size,
               env_steps, horizon_start, horizon_steps, learning_starts, update_from, annealed, gamma, learning_rate,
               tau, target_entropy, max_grad_norm, seconds=0.2):
        """Rounds of acting, stepping, remembering and learning, without Python in between.

        Takes the numbers from the generators, and changes everything, as `rlox.training.loops.off_policy` does step by
        step; how they are cut into calls changes nothing. The memory holds actions in the environment's units.

        Parameters
        ----------
        stepper, memory
            What ``VecEnv.stepper()`` and ``ReplayBuffer.access()`` return; no other thread may use them meanwhile.
        action_rng, replay_rng
            `Rng` of the actions, and of what the updates draw: transitions from the memory, and noise.
        obs
            (N, D) float32, where the environments are; in place, where they are afterwards.
        n_rounds
            How many rounds at most.
        env_steps, horizon_start, horizon_steps
            Of `rlox.checkpoint.Counters`, as they stand before.
        update_from
            Environment steps from which on there are updates.
        annealed
            Whether the learning rate goes linearly to 0 at the horizon.
        target_entropy
            As `update` takes it.
        seconds
            No round begins after this time, so that a signal is seen; nor after an update whose gradients were not
            finite.
        train_freq, gradient_steps, batch_size, learning_starts, learning_rate, gamma, tau, max_grad_norm
            Of `rlox.config.SACConfig`.

        Returns
        -------
        n_steps
            Environment steps taken.
        metrics
            (U, 8) float64, a row for each of the U updates: `METRICS`.
        update_s
            Seconds of the updates.
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


cdef class NativeTD3(_TwinCritics):
    """Twin delayed DDPG (Fujimoto et al. 2018, arXiv:1802.09477): a deterministic policy, two critics, delayed targets.

    Parameters and errors as of `NativeSAC`, but there is no temperature, and

    Parameters
    ----------
    policy, target_policy
        (P,) float32: a perceptron with A outputs, whose tanh is the action, and its target.
    """

    cdef f32* policy_target
    cdef Net aim_actor

    def __cinit__(self, policy, critics, target_policy, target, obs_dim, act_dim, hidden_sizes,
                  activation: str = "relu"):
        self.make("NativeTD3", {"policy": policy, "critics": critics},
                  {"target_policy": target_policy, "target": target}, obs_dim, act_dim, hidden_sizes, activation, False)
        self.policy_target = <f32*>cnp.PyArray_DATA(<cnp.ndarray>target_policy)
        build(&self.aim_actor, [obs_dim, *self.hidden, act_dim], self.actor.tanh, self.policy_target,
              self.policy_weights.g, 0, self.held)

    def act(self, obs, noise, noise_std):
        """Actions (B, A) float32 in [-1, 1] for observations (B, D) float32: `noise_std` times the standard normal
        `noise` (B, A) float32 is added to them, and they are clipped."""
        cdef str where = "NativeTD3.act"
        return self.actions_of(obs, noise, number(noise_std, 0.0, where, "noise_std"), where)

    cdef void pack_moved(self) noexcept nogil:
        _TwinCritics.pack_moved(self)
        pack(&self.aim_actor, False)

    cdef int learn(self, const Batch* batch, const Options* options, f32* td_errors, Sums* sums) except -1 nogil:
        cdef Py_ssize_t n = batch.n, d = self.obs_dim, a = self.act_dim, start = 0, rows, i
        cdef Py_ssize_t ldq = last_of(&self.critics[0]).out_pad
        cdef const f32* q
        cdef f64 noise, weight = 1.0
        cdef const f32* draws
        self.clear(&self.critic_weights, self.critics, 2)
        while start < n:
            look(&self.watch)
            rows = min(<Py_ssize_t>CHUNK, n - start)
            self.decide(&self.aim_actor, batch.next_obs + start * d, d, rows, self.pi.actions)
            draws = batch.noise + start * a
            for i in range(rows * a):
                # Smoothing of the target, section 5.3.
                noise = bounded(options.target_noise * draws[i], -options.noise_clip, options.noise_clip)
                self.pi.actions[i] = <f32>bounded(self.pi.actions[i] + noise, -1.0, 1.0)
            self.aim(batch, start, rows, 0.0)
            self.criticise(batch, start, rows, 0.0, td_errors, sums)
            start += rows
        self.move_critics(options, self.critic_targets if options.move_policy else NULL, sums)
        if not options.move_policy:
            return 0
        self.clear(&self.policy_weights, &self.actor, 1)
        if options.clone:
            # The values' weight is known once all of them are.
            weight = 0.0
            start = 0
            while start < n:
                look(&self.watch)
                rows = min(<Py_ssize_t>CHUNK, n - start)
                q = self.judge(batch, start, rows)
                for i in range(rows):
                    weight += fabs(q[i * ldq])
                start += rows
            weight = options.alpha * n / weight
        start = 0
        while start < n:
            look(&self.watch)
            rows = min(<Py_ssize_t>CHUNK, n - start)
            if not options.clone or n > CHUNK:
                self.judge(batch, start, rows)
            self.improve(batch, start, rows, weight, options.clone, sums)
            start += rows
        unpad(&self.actor)
        sums.policy_norm = move(&self.policy_weights, options, self.policy_target)
        return 0

    cdef const f32* judge(self, const Batch* batch, Py_ssize_t start, Py_ssize_t rows) noexcept nogil:
        """What the first critic says of the policy's actions, which `pi` holds then."""
        self.fill(self.x, self.obs_pad, batch.obs + start * self.obs_dim, NULL, rows)
        self.decide(&self.actor, self.x, self.obs_pad, rows, self.pi.actions)
        self.fill(self.pairs, self.in_pad, batch.obs + start * self.obs_dim, self.pi.actions, rows)
        return forward(&self.critics[0], self.pairs, self.in_pad, rows)

    cdef void improve(self, const Batch* batch, Py_ssize_t start, Py_ssize_t rows, f64 weight, bint clone,
                      Sums* sums) noexcept nogil:
        """Add the policy's gradient of -`weight` Q, as `judge` has just left it, and of the squared distance to the
        batch's actions where it is to `clone` them."""
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
        """One update of the critics, and of policy and all targets too, what `rlox.algorithms.TD3.update` defines; with
        `alpha` what `rlox.algorithms.TD3BC.update` does.

        Parameters
        ----------
        obs, actions, rewards, next_obs, discounts, weights
            As `NativeSAC.update` takes them.
        noise
            (B, A) float32, standard normal: for the actions at `next_obs`.
        move_policy
            Whether it is the turn of policy and targets: ``(updates + 1) % policy_delay == 0``.
        learning_rate, tau, target_noise, noise_clip, max_grad_norm
            Of `rlox.config.TD3Config`, schedules resolved; None where it is off.
        alpha
            Of `rlox.config.TD3BCConfig`: the policy is held to `actions`, too (arXiv:2106.06860, eq. 3 to 5).

        Returns
        -------
        metrics, td_errors
            ``q_loss q_value td_error grad_norm``, and where the policy moved ``policy_loss policy_grad_norm`` (with
            `alpha` also ``bc_loss``); and as `NativeSAC.update`.
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
        """As `NativeSAC.rounds`, but for

        Parameters
        ----------
        updates
            Of `rlox.checkpoint.Counters`, as they stand before.
        policy_delay, target_noise, noise_clip, exploration_noise
            Of `rlox.config.TD3Config`.

        Returns
        -------
        metrics
            (U, 6) float64: the first of `METRICS`, those of the policy NaN where it did not move.
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


cdef class NativeIQL(_TwinCritics):
    """Implicit Q-learning (Kostrikov et al. 2021, arXiv:2110.06169): a policy, two critics, values of states.

    Parameters and errors as of `NativeSAC`, but there is no temperature, and

    Parameters
    ----------
    policy
        (A + P,) float32: log standard deviations, which are held to [-5, 2], and a perceptron with A outputs, whose
        tanh is the mean.
    critics
        (Q + V,) float32: the critics, and a perceptron with one output, the values of states.
    """

    cdef Net values
    cdef f32* shares        # (CHUNK): how much a row's action counts

    def __cinit__(self, policy, critics, target, obs_dim, act_dim, hidden_sizes, activation: str = "relu"):
        self.make("NativeIQL", {"policy": policy, "critics": critics}, {"target": target}, obs_dim, act_dim,
                  hidden_sizes, activation, False, True)
        self.draws = None
        build(&self.values, [obs_dim, *self.hidden, 1], self.actor.tanh, self.critic_weights.p, self.critic_weights.g,
              self.critic_weights.followed, self.held, False, False, 2 * CHUNK)
        self.shares = scratch(self.held, CHUNK)

    cdef void pack_moved(self) noexcept nogil:
        _TwinCritics.pack_moved(self)
        pack(&self.values, True)

    cdef int learn(self, const Batch* batch, const Options* options, f32* td_errors, Sums* sums) except -1 nogil:
        cdef Py_ssize_t n = batch.n, start = 0, rows
        cdef int k
        cdef Options told = options[0]
        self.clear(&self.critic_weights, self.critics, 2)
        clear_padded(&self.values)
        self.clear(&self.policy_weights, &self.actor, 1)
        while start < n:
            look(&self.watch)
            rows = min(<Py_ssize_t>CHUNK, n - start)
            self.appraise(batch, start, rows, options, sums)
            self.criticise(batch, start, rows, 0.0, td_errors, sums)
            self.imitate(batch, start, rows, sums)
            start += rows
        for k in range(2):
            unpad(&self.critics[k])
        unpad(&self.values)
        unpad(&self.actor)
        sums.norm = move(&self.critic_weights, options, self.critic_targets)
        told.rate = options.policy_rate
        sums.policy_norm = move(&self.policy_weights, &told, NULL)
        return 0

    cdef void appraise(self, const Batch* batch, Py_ssize_t start, Py_ssize_t rows, const Options* options,
                       Sums* sums) noexcept nogil:
        """Add the values' gradient of the expectile loss (eq. 5); what the critics are to say (eq. 6), and how much
        each action counts (eq. 7), as the values stand."""
        cdef Py_ssize_t i, d = self.obs_dim, ld = last_of(&self.values).out_pad
        cdef Py_ssize_t ldq = last_of(&self.aims[0]).out_pad
        cdef f64 advantage, share
        cdef const f32* v
        cdef const f32* first
        cdef const f32* second
        cdef f32* d_v = last_of(&self.values).d_out
        self.fill(self.x, self.obs_pad, batch.obs + start * d, NULL, rows)
        self.fill(self.x + rows * self.obs_pad, self.obs_pad, batch.next_obs + start * d, NULL, rows)
        v = forward(&self.values, self.x, self.obs_pad, 2 * rows)
        self.fill(self.next_pairs, self.in_pad, batch.obs + start * d, batch.actions + start * self.act_dim, rows)
        first = forward(&self.aims[0], self.next_pairs, self.in_pad, rows)
        second = forward(&self.aims[1], self.next_pairs, self.in_pad, rows)
        for i in range(rows):
            self.goals[i] = batch.rewards[start + i] + batch.discounts[start + i] * v[(rows + i) * ld]
            advantage = <f64>smaller(first[i * ldq], second[i * ldq]) - v[i * ld]
            share = (1.0 - options.expectile if advantage < 0.0 else options.expectile) / batch.n
            sums.own[0] += share * advantage * advantage
            sums.own[1] += <f64>v[i * ld] / batch.n
            d_v[i * ld] = <f32>(-2.0 * share * advantage)
            self.shares[i] = <f32>bounded(exp(options.inverse_scale * advantage), 0.0, options.max_weight)
        backward(&self.values, self.x, self.obs_pad, rows)

    cdef void imitate(self, const Batch* batch, Py_ssize_t start, Py_ssize_t rows, Sums* sums) noexcept nogil:
        """Add the policy's gradient of the actions' log-densities, each by its share, from `appraise`'s inputs."""
        cdef Py_ssize_t i, j, a = self.act_dim, ld = last_of(&self.actor).out_pad
        cdef const f32* y = forward(&self.actor, self.x, self.obs_pad, rows)
        cdef f32* d_y = last_of(&self.actor).d_out
        cdef f32* gradient = self.policy_weights.g
        cdef f64 log_std, precision, mean, z, slope
        for j in range(a):
            log_std = bounded(self.policy_weights.p[j], FREE_LOG_STD_MIN, LOG_STD_MAX)
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
        """One update of values, critics, policy and target, what `rlox.algorithms.IQL.update` defines.

        Parameters
        ----------
        obs, actions, rewards, next_obs, discounts
            As `NativeSAC.update` takes them.
        learning_rate, policy_learning_rate
            Of critics and values; of the policy.
        tau, expectile, temperature, max_weight, max_grad_norm
            Of `rlox.config.IQLConfig`; None where it is off.

        Returns
        -------
        metrics, td_errors
            ``q_loss q_value td_error grad_norm policy_loss policy_grad_norm value_loss value``; and as
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


cdef class NativeCQL(_SoftCritics):
    """Conservative Q-learning, CQL(H) (Kumar et al. 2020, arXiv:2006.04779), on soft actor-critic.

    Parameters and errors as of `NativeSAC`, but

    Parameters
    ----------
    log_cql_alpha
        (1,) float32: logarithm of the penalty's weight.
    n_random_actions
        M >= 1: so many uniform actions and as many of the policy's are compared in each state.
    """

    cdef Weights penalty_weight
    cdef Py_ssize_t n_states    # whose actions go through the critics at a time
    cdef f32* candidates        # (2 M n_states, in_pad): the critics' inputs
    cdef f32* log_ratios        # (2 M n_states): of the densities they were drawn with over the uniform one

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
        return {**_SoftCritics.steps(self), "log_cql_alpha": self.penalty_weight.step}

    cdef void set_steps(self, dict steps):
        _SoftCritics.set_steps(self, steps)
        self.penalty_weight.step = steps["log_cql_alpha"]

    cdef int learn(self, const Batch* batch, const Options* options, f32* td_errors, Sums* sums) except -1 nogil:
        cdef f32* log_weight = self.penalty_weight.p
        self.conservatism = exp(log_weight[0])
        _SoftCritics.learn(self, batch, options, td_errors, sums)
        sums.own[2], sums.own[3] = sums.own[2] - sums.value / batch.n, self.conservatism
        if options.tune_penalty:
            # Dual ascent by the weight's logarithm (appendix F): it grows while the penalty is too large.
            move_logarithm(&self.penalty_weight, self.conservatism * (options.target_penalty - sums.own[2]), options)
            log_weight[0] = <f32>bounded(log_weight[0], -INFINITY, LOG_WEIGHT_MAX)
        return 0

    cdef void conserve(self, const Batch* batch, Py_ssize_t start, Py_ssize_t rows, Sums* sums) noexcept nogil:
        cdef Py_ssize_t n = self.n_random, first = 0, states
        while first < rows:
            states = min(self.n_states, rows - first)
            self.propose(batch, start + first, states,
                         last_of(&self.actor).out + first * last_of(&self.actor).out_pad)
            self.hold_down(states, 0.5 / batch.n, sums)
            first += states

    cdef void propose(self, const Batch* batch, Py_ssize_t start, Py_ssize_t states, const f32* y) noexcept nogil:
        """Fill in pairs (2 M, states) of state and action, and their ratios, from the policy's outputs y."""
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

    cdef void hold_down(self, Py_ssize_t states, f64 share, Sums* sums) noexcept nogil:
        """Add the gradient of the soft maxima over the proposed actions, each by its `share`; and these."""
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
        """One update of critics, policy, both weights and target, what `rlox.algorithms.CQL.update` defines.

        Parameters
        ----------
        obs, actions, rewards, next_obs, discounts, target_entropy
            As `NativeSAC.update` takes them.
        noise
            (2 + M, B, A) float32, standard normal: for the actions at `obs`, for those at `next_obs`, and for those of
            the policy in the penalty.
        uniform
            (M, B, A) float32, uniform on [-1, 1]: the penalty's other actions.
        cql_target_value
            What the penalty is to come to; None leaves its weight as it is.
        learning_rate, tau, max_grad_norm
            Of `rlox.config.CQLConfig`, schedules resolved; None where it is off.

        Returns
        -------
        metrics, td_errors
            As `NativeSAC.update`, with ``cql_penalty cql_alpha``.
        """
        cdef str where = "NativeCQL.update"
        cdef Options options = self.options(target_entropy, learning_rate, tau, max_grad_norm, where)
        options.tune_penalty = cql_target_value is not None
        if options.tune_penalty:
            options.target_penalty = number(cql_target_value, -INFINITY, where, "cql_target_value")
        names = (*METRICS, "cql_penalty", "cql_alpha")
        return self.learn_from(where, options, names, obs, actions, rewards, next_obs, discounts, noise, None, uniform)


cdef class NativeBC(_Trained):
    """Behavioural cloning: a perceptron whose outputs' tanh is the action, or whose softmax is how likely each is.

    Parameters and errors as of `NativeSAC`, but there is one block, and

    Parameters
    ----------
    policy
        (P,) float32: the perceptron.
    obs_dim, n_outputs
        D, and the outputs: A, or the number of actions.
    discrete
        Whether an action is one of `n_outputs`.
    """

    cdef readonly Py_ssize_t n_outputs
    cdef readonly bint discrete
    cdef Weights weights
    cdef Net actor
    cdef Py_ssize_t obs_pad
    cdef f32* x             # (CHUNK, obs_pad)

    def __cinit__(self, policy, obs_dim, n_outputs, hidden_sizes, activation: str = "relu", discrete: bool = False):
        cdef str where = "NativeBC"
        self.obs_dim, self.n_outputs = as_index(obs_dim, where, "obs_dim"), as_index(n_outputs, where, "n_outputs")
        cdef bint hyperbolic = is_tanh(activation, where)
        hidden = widths_of(hidden_sizes, where)
        if self.obs_dim < 1 or self.n_outputs < 1:
            raise ValueError(f"{where}: obs_dim and n_outputs must be >= 1, got {obs_dim} and {n_outputs}")
        self.discrete = as_flag(discrete, where, "discrete")
        widths = [self.obs_dim, *hidden, self.n_outputs]
        self.hold(where, {"policy": policy}, {}, {"policy": size_of(widths)})
        self.weights = self.weights_of("policy")
        build(&self.actor, widths, hyperbolic, self.weights.p, self.weights.g, 0, self.held)
        self.obs_pad = padded(self.obs_dim)
        self.x = scratch(self.held, CHUNK * self.obs_pad)

    cdef dict steps(self):
        return {"policy": self.weights.step}

    cdef void set_steps(self, dict steps):
        self.weights.step = steps["policy"]

    cdef void regress(self, const f32* actions, Py_ssize_t rows, f64 share, f64* loss) noexcept nogil:
        """From outputs, what goes backward from the squared distance, of which this is added up."""
        cdef Layer* head = last_of(&self.actor)
        cdef Py_ssize_t i, j, a = self.n_outputs, ld = head.out_pad
        cdef f64 action, error
        for i in range(rows):
            for j in range(a):
                action = tanh(head.out[i * ld + j])
                error = action - actions[i * a + j]
                loss[0] += share / a * error * error
                head.d_out[i * ld + j] = <f32>(2.0 * share / a * error * (1.0 - action * action))

    cdef void classify(self, const i64* labels, Py_ssize_t rows, f64 share, f64* loss, f64* accuracy) noexcept nogil:
        """As `regress` of the cross-entropy; and the share of the rows whose likeliest action is theirs."""
        cdef Layer* head = last_of(&self.actor)
        cdef Py_ssize_t i, j, best
        cdef const f32* y
        cdef f32* d_y
        cdef f64 total
        for i in range(rows):
            y, d_y = head.out + i * head.out_pad, head.d_out + i * head.out_pad
            best, total = 0, 0.0
            for j in range(1, self.n_outputs):
                if y[j] > y[best]:
                    best = j
            for j in range(self.n_outputs):
                total += exp(<f64>y[j] - y[best])
            for j in range(self.n_outputs):
                d_y[j] = <f32>(share * (exp(<f64>y[j] - y[best]) / total - (j == labels[i])))
            loss[0] += share * (log(total) + y[best] - y[labels[i]])
            accuracy[0] += share * (best == labels[i])

    def update(self, obs, actions, *, learning_rate, max_grad_norm=None):
        """One update, what `rlox.algorithms.BC.update` defines.

        Parameters
        ----------
        obs
            (B, D) float32.
        actions
            (B, A) float32, scaled to [-1, 1]; or (B,) int64.
        learning_rate, max_grad_norm
            Of `rlox.config.BCConfig`, schedules resolved; None where it is off.

        Returns
        -------
        dict
            ``policy_loss grad_norm``, and of discrete actions ``accuracy``. NaN in the data or the weights makes the
            first two NaN.
        """
        cdef str where = "NativeBC.update"
        cdef Options options = options_of(learning_rate, 1.0, max_grad_norm, where)
        cdef cnp.ndarray obs_ = self.rows_of(obs, where)
        cdef Py_ssize_t n = cnp.PyArray_DIM(obs_, 0), start = 0, rows, i, d = self.obs_dim
        cdef cnp.ndarray actions_
        cdef f64 loss = 0.0, accuracy = 0.0, norm = 0.0
        if n < 1:
            raise ValueError(f"{where}: obs must hold at least one row, got none")
        if self.discrete:
            actions_ = given(actions, cnp.NPY_INT64, "int64", (n,), where, "actions")
            if actions_.min() < 0 or actions_.max() >= self.n_outputs:
                raise ValueError(f"{where}: actions must be in [0, {self.n_outputs}), got {actions_.min()} to "
                                 f"{actions_.max()}")
        else:
            actions_ = given(actions, cnp.NPY_FLOAT32, "float32", (n, self.n_outputs), where, "actions")
        cdef const f32* from_obs = <const f32*>cnp.PyArray_DATA(obs_)
        cdef const void* from_actions = cnp.PyArray_DATA(actions_)
        with self.lock:
            self.watch = watching()
            with nogil:
                pack(&self.actor, True)
                self.clear(&self.weights, &self.actor, 1)
                while start < n:
                    look(&self.watch)
                    rows = min(<Py_ssize_t>CHUNK, n - start)
                    for i in range(rows):
                        memcpy(self.x + i * self.obs_pad, from_obs + (start + i) * d, d * sizeof(f32))
                    forward(&self.actor, self.x, self.obs_pad, rows)
                    if self.discrete:
                        self.classify(<const i64*>from_actions + start, rows, 1.0 / n, &loss, &accuracy)
                    else:
                        self.regress(<const f32*>from_actions + start * self.n_outputs, rows, 1.0 / n, &loss)
                    backward(&self.actor, self.x, self.obs_pad, rows)
                    start += rows
                unpad(&self.actor)
                norm = move(&self.weights, &options, NULL)
        return {"policy_loss": loss, "grad_norm": norm, **({"accuracy": accuracy} if self.discrete else {})}
