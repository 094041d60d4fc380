"""The native update of PPO, A2C and MAPPO, as defined by their PyTorch `update`, for actor-critics of plain perceptrons.

Parameters are one flat float32 block in the order of ``policy.parameters()``, each weight (n_out, n_in) as in PyTorch,
so that a module whose parameters are views of the block always has the same numbers as this code. A minibatch is
processed in chunks of `CHUNK` rows, so that activations stay in the cache for any batch size; gradients are added up.
"""

import numpy as np

cimport numpy as cnp
from libc.string cimport memcpy
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid

from rlox.kernels.checks cimport as_index, check_out
from rlox.kernels.envs.stepper cimport RLOX_STEPPER_CAPSULE, rlox_stepper
from rlox.kernels.nn.actor_critic cimport (
    ActorCriticLearner, Data, Loss, Options, explained_variance, options_of,
)
from rlox.kernels.nn.layers cimport CHUNK, given, last_of, legal, number, pack
from rlox.kernels.signals cimport Watch, check_signals, watching
from rlox.kernels.types cimport f32, f64, i64, u8

from rlox.kernels.nn.actor_critic import n_parameters

cnp.import_array()


cdef class NativeActorCritic(ActorCriticLearner):
    """A perceptron actor and a perceptron critic on one flat block of parameters, and their optimiser.

    The critic may have other inputs than the actor, and actions may be masked, as MAPPO needs it. Calls from several threads wait for each other. The block is kept, but no other argument.

    Parameters
    ----------
    parameters
        (P,) float32, C-contiguous and writeable: the block, kept and changed in place. Order: `log_std` (A) if
        Gaussian, weight (out, in) and bias of each layer of the actor, then those of the critic.
    obs_dim, n_outputs
        D, and the number of outputs of the actor: the number of actions, or A.
    hidden_sizes
        Widths of the hidden layers of both actor and critic, at most 8.
    activation
        ``tanh`` or ``relu``.
    gaussian
        Whether actions are continuous.
    optimizer
        ``adam`` (betas 0.9, 0.999) or ``rmsprop`` (decay 0.99), both with eps 1e-5 outside the root, as in PyTorch.
    state_dim
        S, the number of inputs of a critic with its own inputs (`central`); None if it reads the observations.

    Attributes
    ----------
    parameters, gradient, moments, step
        See `FlatLearner`. The gradient is that of the last minibatch.

    Raises
    ------
    TypeError
        If `parameters` is not a float32 array, or a size is not an integer.
    ValueError
        For a size below 1, more than 8 hidden layers, an unknown activation or optimiser, or a block of another length
        or not C-contiguous and writeable.
    """

    def __cinit__(self, parameters, obs_dim, n_outputs, hidden_sizes, activation: str = "tanh",
                  gaussian: bool = False, optimizer: str = "adam", state_dim=None):
        self.make("NativeActorCritic", parameters, obs_dim, n_outputs, hidden_sizes, activation, gaussian, optimizer,
                  state_dim)

    def outputs(self, obs, states=None):
        """Return actor outputs (B, n_outputs) and values (B,), float32, for observations (B, D) float32.

        `states` (B, S) float32 are the inputs of a central critic.
        """
        cdef str where = "NativeActorCritic.outputs"
        cdef cnp.ndarray obs_ = self.rows_of(obs, where)
        return self.outputs_of(obs_, self.states_of(states, cnp.PyArray_DIM(obs_, 0), where), None, None)[:2]

    cdef tuple outputs_of(self, cnp.ndarray obs, cnp.ndarray states, cnp.ndarray masks, cnp.ndarray after):
        """Return actor outputs and values for `obs`, and values for `after` (None if that is None), in one pass.

        All arrays were checked; `states` is None if the critic reads `obs`, `masks` if all actions are legal.
        """
        cdef Py_ssize_t n = cnp.PyArray_DIM(obs, 0), start = 0, rows, i, a = self.n_outputs, m = 0
        cdef cnp.ndarray out = np.empty((n, a), np.float32), values = np.empty(n, np.float32), later = None
        cdef f32* out_ = <f32*>cnp.PyArray_DATA(out)
        cdef f32* later_ = NULL
        cdef const f32* x = <const f32*>cnp.PyArray_DATA(obs)
        cdef const f32* judged = x if states is None else <const f32*>cnp.PyArray_DATA(states)
        cdef u8* masks_ = NULL if masks is None else <u8*>cnp.PyArray_DATA(masks)
        cdef const f32* after_ = NULL
        cdef const f32* y
        cdef Py_ssize_t ld = last_of(&self.actor).out_pad
        if after is not None:
            m = cnp.PyArray_DIM(after, 0)
            later = np.empty(m, np.float32)
            later_ = <f32*>cnp.PyArray_DATA(later)
            after_ = <const f32*>cnp.PyArray_DATA(after)
        with self.lock:
            with nogil:
                pack(&self.actor, False)
                while start < n:
                    rows = min(CHUNK, n - start)
                    y = self.acted(x + start * self.obs_dim, self.obs_dim, masks_, start, rows)
                    for i in range(rows):
                        memcpy(out_ + (start + i) * a, y + i * ld, a * sizeof(f32))
                    start += rows
                pack(&self.critic, False)
                self.values_of(judged, n, <f32*>cnp.PyArray_DATA(values))
                self.values_of(after_, m, later_)
        return out, values, later

    def values(self, states):
        """Return values (B,) float32 for the critic's inputs: observations (B, D), or (B, S) if it is central."""
        cdef str where = "NativeActorCritic.values"
        cdef cnp.ndarray inputs = self.critic_rows(states, where)
        cdef cnp.ndarray out = np.empty(cnp.PyArray_DIM(inputs, 0), np.float32)
        with self.lock:
            with nogil:
                pack(&self.critic, False)
                self.values_of(<const f32*>cnp.PyArray_DATA(inputs), cnp.PyArray_DIM(inputs, 0),
                               <f32*>cnp.PyArray_DATA(out))
        return out

    def mode(self, obs, masks=None):
        """Return the most likely actions for observations (B, D): (B,) int64, or (B, A) float32."""
        cdef cnp.ndarray obs_ = self.rows_of(obs, "NativeActorCritic.mode")
        return self.act(obs_, np.zeros((cnp.PyArray_DIM(obs_, 0), self.n_outputs), np.float32), masks)

    def act(self, obs, noise, masks=None):
        """Sample actions, (N,) int64 or (N, A) float32, for observations (N, D) and noise (N, n_outputs) float32.

        Categorical: argmax(outputs + noise) over the actions that `masks` (N, n_outputs) bool allow, the first of equal
        ones, which is a sample if the noise is Gumbel noise. Gaussian: mean + noise * std, not clipped.
        """
        return self.sampled("NativeActorCritic.act", obs, noise, masks)

    def rollout(self, stepper, n_steps, noise, obs, actions, rewards, terminated, truncated, episode_return,
                episode_length):
        """Act and step `n_steps` times in one call, starting from the observations in ``obs[0]``.

        Parameters
        ----------
        stepper
            Return value of ``VecEnv.stepper()``; the environments must outlive the call, and nothing else may use them
            meanwhile.
        n_steps
            T >= 1.
        noise
            (T, N, n_outputs) float32, for each step as in `act`.
        obs
            (T + 1, N, D) float32; rows from 1 on are written.
        actions
            (T, N) int64, or (T, N, A) float32 as sampled, before they are clipped for the environment; written.
        rewards, terminated, truncated, episode_return, episode_length
            (T, N) float64, bool, bool, float64, int64, as from ``VecEnv.step_all``; written.

        Returns
        -------
        limits, reached
            (K, 2) int64: the steps and environments that were truncated; (K, D): the observations they led to.

        Raises
        ------
        BaseException
            Whatever the handler of a signal raises. The environments have then been stepped.
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
                        check_signals(&watch)
                    self.act_on(obs_ + t * n * d, n, noise_ + t * n * a, NULL, choices + t * n,
                                continuous + t * n * a)
                    taken = choices + t * n
                    if self.gaussian:
                        for i in range(n):
                            for j in range(a):
                                clipped_[i * a + j] = <f32>legal(continuous[(t * n + i) * a + j], env.act_low[j],
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

    def log_probs(self, obs, actions, after=None, states=None, masks=None):
        """Return log-probabilities (B,) of actions, (B,) int64 or (B, A) float32, and values (B,) for `obs` (B, D).

        With further inputs `after` of the critic, (K, D) or (K, S), also returns their values (K,). `states` (B, S) are
        the inputs of a central critic, `masks` (B, n_outputs) bool the legal actions; None: all.
        """
        cdef str where = "NativeActorCritic.log_probs"
        cdef cnp.ndarray obs_ = self.rows_of(obs, where)
        cdef Py_ssize_t n = cnp.PyArray_DIM(obs_, 0)
        further = None if after is None else self.critic_rows(after, where)
        outputs, values, later = self.outputs_of(obs_, self.states_of(states, n, where), self.masks_of(masks, n, where),
                                                 further)
        cdef cnp.ndarray y = outputs, taken = self.actions_of(actions, n, where)
        cdef cnp.ndarray out = np.empty(n, np.float32)
        with nogil:
            self.log_probs_of(<const f32*>cnp.PyArray_DATA(y), self.n_outputs, n, <const i64*>cnp.PyArray_DATA(taken),
                              <const f32*>cnp.PyArray_DATA(taken), <f32*>cnp.PyArray_DATA(out))
        return (out, values) if after is None else (out, values, later)

    cdef cnp.ndarray critic_rows(self, object rows, str where):
        """Return inputs of the critic, (B, D) or (B, S) float32, after checking them."""
        if not self.central:
            return self.rows_of(rows, where)
        shape = np.shape(rows)
        expected = (shape[0] if len(shape) == 2 else "B", self.state_dim)
        return given(rows, cnp.NPY_FLOAT32, "float32", expected, where, "states")

    def ppo(self, obs, actions, log_probs, advantages, returns, values, rng, *, n_epochs, batch_size, learning_rate,
            clip_eps, vf_coef, ent_coef, max_grad_norm=None, clip_vf=None, target_kl=None, normalize_advantages=True,
            states=None, masks=None, clip_vf_max=False, huber_delta=None, moments=None):
        """Run all epochs of an update, as defined by `rlox.algorithms.PPO.update` and `rlox.algorithms.MAPPO.update`.

        Parameters
        ----------
        obs
            (B, D) float32.
        actions
            (B,) int64, or (B, A) float32.
        log_probs, advantages, returns, values
            (B,) float32, from the policy that acted; `values` in the critic's units.
        rng
            `Rng` for shuffling; it advances as for one permutation of B rows per epoch.
        n_epochs, batch_size, learning_rate, clip_eps, vf_coef, ent_coef, max_grad_norm, clip_vf, target_kl, \
        normalize_advantages
            As in `rlox.config.PPOConfig`, with schedules resolved; None if off.
        states
            (B, S) float32, the inputs of a central critic.
        masks
            (B, n_outputs) bool, legal actions; None if all actions are legal.
        clip_vf_max, huber_delta
            `maximum` and `huber_delta` of `rlox.nn.losses.value_loss`.
        moments
            (3,) float64 of `rlox.multi_agent.players.ValueNorm`, changed in place; None if values are not normalised.

        Returns
        -------
        dict
            Means over the minibatches: ``policy_loss value_loss entropy approx_kl clip_fraction grad_norm``; and the
            ``explained_variance`` of the values before the update. NaN in the data or the weights makes them NaN.
        """
        cdef str where = "NativeActorCritic.ppo"
        cdef Loss loss = Loss(
            ppo=True, clip_eps=number(clip_eps, 0.0, where, "clip_eps"), vf_coef=number(vf_coef, 0.0, where, "vf_coef"),
            ent_coef=number(ent_coef, 0.0, where, "ent_coef"),
            clip_vf=0.0 if clip_vf is None else number(clip_vf, 0.0, where, "clip_vf"), maximum=clip_vf_max,
            huber=0.0 if huber_delta is None else number(huber_delta, 0.0, where, "huber_delta"),
        )
        cdef Options options = options_of(n_epochs, batch_size, learning_rate, max_grad_norm, target_kl,
                                          normalize_advantages, where)
        return self.learn_from(where, &loss, &options, obs, actions, log_probs, advantages, returns, values, rng,
                               states, masks, moments)

    def a2c(self, obs, actions, advantages, returns, values, *, learning_rate, vf_coef, ent_coef, max_grad_norm=None,
            normalize_advantages=False, masks=None):
        """Take one gradient step on the whole rollout, as defined by `rlox.algorithms.A2C.update`.

        Arguments as in `ppo`.

        Returns
        -------
        dict
            ``policy_loss value_loss entropy grad_norm explained_variance``.
        """
        cdef str where = "NativeActorCritic.a2c"
        cdef Loss loss = Loss(ppo=False, vf_coef=number(vf_coef, 0.0, where, "vf_coef"),
                              ent_coef=number(ent_coef, 0.0, where, "ent_coef"), clip_eps=0.0, clip_vf=0.0,
                              maximum=False, huber=0.0)
        cdef Options options = options_of(1, max(1, len(obs)), learning_rate, max_grad_norm, None,
                                          normalize_advantages, where)
        metrics = self.learn_from(where, &loss, &options, obs, actions, values, advantages, returns, values, None, None,
                                  masks, None)
        return {name: metrics[name] for name in metrics if name not in ("approx_kl", "clip_fraction")}

    cdef dict learn_from(self, str where, const Loss* loss, const Options* options, obs, actions, log_probs, advantages,
                         returns, values, rng, states, masks, moments):
        """Run `learn`; return its metrics and the explained variance of the values before it."""
        cdef Data data
        cdef cnp.ndarray errors
        held = self.take(where, &data, obs, actions, log_probs, advantages, returns, values, states, masks)
        *_, advantages, returns, values = held  # as contiguous arrays
        if moments is None:
            errors = returns - values
        else:
            running = given(moments, cnp.NPY_FLOAT64, "float64", (3,), where, "moments")
            if running is not moments:
                raise ValueError(f"{where}: moments must be C-contiguous, since they are changed in place")
            data.moments = <f64*>cnp.PyArray_DATA(<cnp.ndarray>running)
            errors = advantages  # returns minus values in the units of rewards; `values` have other units
        metrics = self.learn(loss, options, &data, rng)
        metrics["explained_variance"] = explained_variance(<const f32*>cnp.PyArray_DATA(errors), data.returns, data.n)
        return metrics
