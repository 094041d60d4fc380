"""The native update of MAPPO, as defined by `rlox.algorithms.MAPPO.update`, for one policy of plain perceptrons.

Like `rlox.kernels.nn.policy_gradient`, but the critic may have other inputs than the actor, actions may be masked, the
value loss may be the Huber loss or the maximum with the clipped loss, and values may be normalised by running moments.
"""

import numpy as np

cimport numpy as cnp

from rlox.kernels.nn.actor_critic cimport (
    ActorCriticLearner, Data, Loss, Options, explained_variance, options_of, ppo_loss,
)
from rlox.kernels.nn.layers cimport CHUNK, given, last_of, number, pack
from rlox.kernels.types cimport f32, f64, i64, u8

cnp.import_array()


cdef class NativePlayer(ActorCriticLearner):
    """A perceptron actor and a perceptron critic with its own inputs, on one flat block, and their optimiser.

    Calls from several threads wait for each other. The block is kept, but no other argument.

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
        ``adam`` or ``rmsprop``, as in `rlox.kernels.nn.policy_gradient.NativeActorCritic`.
    state_dim
        S, the number of inputs of the critic; None if it reads the actor's inputs.

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
        self.make("NativePlayer", parameters, obs_dim, n_outputs, hidden_sizes, activation, gaussian, optimizer,
                  state_dim)

    def act(self, obs, noise, masks=None):
        """Sample actions, (B,) int64 or (B, A) float32, for observations (B, D) and noise (B, n_outputs) float32.

        Categorical: argmax(outputs + noise) over the actions that `masks` (B, n_outputs) bool allow. Gaussian: mean +
        noise * std, not clipped.
        """
        return self.sampled("NativePlayer.act", obs, noise, masks)

    def mode(self, obs, masks=None):
        """Return the most likely actions for observations (B, D): (B,) int64, or (B, A) float32."""
        return self.act(obs, np.zeros((len(obs), self.n_outputs), np.float32), masks)

    def values(self, states):
        """Return values (B,) float32 for inputs (B, S) float32 of the critic."""
        shape = np.shape(states)
        expected = (shape[0] if len(shape) == 2 else "B", self.state_dim)
        return self.checked_values(given(states, cnp.NPY_FLOAT32, "float32", expected, "NativePlayer.values", "states"))

    def log_probs(self, obs, actions, masks=None):
        """Return log-probabilities (B,) of actions, (B,) int64 or (B, A) float32, for `obs` (B, D), in nats."""
        cdef str where = "NativePlayer.log_probs"
        cdef cnp.ndarray obs_ = self.rows_of(obs, where)
        cdef Py_ssize_t n = cnp.PyArray_DIM(obs_, 0), start = 0, rows, a = self.n_outputs
        cdef cnp.ndarray actions_ = self.actions_of(actions, n, where)
        legal = self.masks_of(masks, n, where)
        cdef const u8* masks_ = NULL
        if legal is not None:
            masks_ = <const u8*>cnp.PyArray_DATA(<cnp.ndarray>legal)
        cdef cnp.ndarray out = np.empty(n, np.float32)
        cdef f32* out_ = <f32*>cnp.PyArray_DATA(out)
        cdef const f32* x = <const f32*>cnp.PyArray_DATA(obs_)
        cdef const i64* choices = <const i64*>cnp.PyArray_DATA(actions_)
        cdef const f32* continuous = <const f32*>cnp.PyArray_DATA(actions_)
        cdef const f32* y
        with self.lock:
            with nogil:
                pack(&self.actor, False)
                while start < n:
                    rows = min(CHUNK, n - start)
                    y = self.acted(x + start * self.obs_dim, self.obs_dim, masks_, start, rows)
                    self.log_probs_of(y, last_of(&self.actor).out_pad, rows, choices + start, continuous + start * a,
                                      out_ + start)
                    start += rows
        return out

    def ppo(self, obs, actions, log_probs, advantages, returns, values, rng, *, n_epochs, batch_size, learning_rate,
            clip_eps, vf_coef, ent_coef, max_grad_norm=None, clip_vf=None, target_kl=None, normalize_advantages=True,
            states=None, masks=None, clip_vf_max=False, huber_delta=None, moments=None):
        """Run all epochs of an update of one policy, as defined by `rlox.algorithms.MAPPO.update`.

        Parameters
        ----------
        obs, actions, log_probs, advantages, returns, values, rng, n_epochs, batch_size, learning_rate, clip_eps, \
        vf_coef, ent_coef, max_grad_norm, clip_vf, target_kl, normalize_advantages
            As in `rlox.kernels.nn.policy_gradient.NativeActorCritic.ppo`; `values` in the critic's units.
        states
            (B, S) float32, the inputs of a central critic.
        masks
            (B, n_outputs) bool, legal actions; None if all actions are legal.
        clip_vf_max, huber_delta
            As in `rlox.nn.players.critic_loss`.
        moments
            (3,) float64 of `rlox.multi_agent.players.ValueNorm`, changed in place; None if values are not normalised.

        Returns
        -------
        dict
            Means over the minibatches: ``policy_loss value_loss entropy approx_kl clip_fraction grad_norm``; and the
            ``explained_variance`` of the values before the update. NaN in the data or the weights makes them NaN.
        """
        cdef str where = "NativePlayer.ppo"
        cdef Loss loss = ppo_loss(clip_eps, vf_coef, ent_coef, clip_vf, where)
        cdef Options options = options_of(n_epochs, batch_size, learning_rate, max_grad_norm, target_kl,
                                          normalize_advantages, where)
        cdef Data data
        loss.maximum = clip_vf_max
        loss.huber = 0.0 if huber_delta is None else number(huber_delta, 0.0, where, "huber_delta")
        held = self.take(where, &data, obs, actions, log_probs, advantages, returns, values, states, masks)
        if moments is not None:
            running = given(moments, cnp.NPY_FLOAT64, "float64", (3,), where, "moments")
            if running is not moments:
                raise ValueError(f"{where}: moments must be C-contiguous, since they are changed in place")
            data.moments = <f64*>cnp.PyArray_DATA(<cnp.ndarray>running)
        metrics = self.learn(&loss, &options, &data, rng)
        # Advantages are returns minus values, in the units of the returns; `values` may be in other units.
        metrics["explained_variance"] = explained_variance(data.advantages, data.returns, data.n)
        return metrics
