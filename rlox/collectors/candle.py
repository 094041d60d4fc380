"""Rollouts by a native policy in a background thread: `CandleCollector`."""

from __future__ import annotations

import queue
import threading
import weakref
from typing import Any

import numpy as np

from rlox.checkpoint.streams import Stream
from rlox.collectors.rollout import RolloutCollector
from rlox.compiled import NativePolicy
from rlox.compiled.guard import find_difference
from rlox.config import PPOConfig
from rlox.kernels.rng import Rng


class CandleCollector:
    """Collector of rollouts of a native environment in a background thread, with weights that the caller sets.

    The thread works one rollout ahead: rollout k + 1 is collected while the caller learns from rollout k, and then
    waits until `recv` takes it. It uses the weights from the last `sync_weights` before the call of `recv` that
    returned rollout k - 1, independent of the machine's load. A rollout is therefore at most one update old, and the
    same calls give the same rollouts. Rollouts 0 and 1 use the weights from before the first `recv`.

    Parameters
    ----------
    env_id : str
        A native environment with discrete actions.
    n_envs : int
        Environments N.
    obs_dim, n_actions : int, optional
        Sizes of the environment; checked if given.
    n_steps : int
        Steps T of a rollout.
    hidden : int
        Width of both hidden layers of actor and critic.
    seed : int
        Seed of environments, initial weights and actions.
    gamma, gae_lambda : float
        Discount and trace decay of the advantages.
    activation : str
        ``tanh`` or ``relu``.

    Raises
    ------
    TypeError, ValueError
        For an argument that does not fit the environment or is out of range; also if a function of the policies was
        edited or replaced, because the kernel would not follow the change.
    """

    def __init__(
        self,
        env_id: str = "CartPole-v1",
        n_envs: int = 16,
        obs_dim: int | None = None,
        n_actions: int | None = None,
        n_steps: int = 128,
        hidden: int = 64,
        seed: int = 42,
        gamma: float = 0.99,
        gae_lambda: float = 0.95,
        activation: str = "tanh",
    ):
        config = PPOConfig(
            n_steps=n_steps, hidden_sizes=[hidden, hidden], gamma=gamma, gae_lambda=gae_lambda, activation=activation
        )
        self._collector = RolloutCollector(env_id, n_envs, seed, gamma, gae_lambda)
        spec = self._collector.spec
        if not (self._collector.env.native and spec.discrete):
            raise ValueError(f"CandleCollector: env_id must be native with discrete actions, got {env_id!r}")
        for name, given, have in (("obs_dim", obs_dim, spec.obs_dim), ("n_actions", n_actions, spec.n_actions)):
            if given is not None and given != have:
                raise ValueError(f"CandleCollector: {name} must be {have} for {env_id}, got {given}")
        if (found := find_difference("acting", self._collector)) is not None:
            raise ValueError(
                f"CandleCollector: its kernel must act as rlox.DiscretePolicy does: {found}; undo that, or use "
                "rlox.RolloutCollector with a policy"
            )
        self.n_steps = n_steps
        self._policy = NativePolicy.make(spec, config, Rng(seed, Stream.INIT))
        self._weights = self._policy.net.parameters.copy()  # of the last sync
        # Each `recv` orders the rollout after the one that it returns, so that at most one is ready. An order contains
        # the weights to use; None ends the thread.
        self._ready: queue.SimpleQueue[tuple[dict[str, np.ndarray], tuple] | BaseException] = queue.SimpleQueue()
        self._reached: tuple[dict[str, int], dict[str, np.ndarray] | None] = (self._collector.rng.get_state(), None)
        self._orders: queue.SimpleQueue[np.ndarray | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._stopped = False
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._orders.put, None)  # the thread must not outlive this object

    def recv(self) -> dict[str, np.ndarray]:
        """Wait for the next rollout of B = T * N transitions, row ``t * N + n``.

        Returns
        -------
        dict
            ``observations`` (B, D) f32, ``actions`` (B,) int64, ``rewards log_probs values advantages returns`` (B,)
            f32, ``dones`` (B,) bool (terminated or truncated), and ``episode_returns`` (E,) f64 and
            ``episode_lengths`` (E,) int64 of the episodes that ended.

        Raises
        ------
        RuntimeError
            After `stop`, or if the collection failed.
        """
        with self._lock:
            if self._stopped:
                raise RuntimeError("CandleCollector.recv: the collector must not be stopped")
            if self._failure is not None:
                raise RuntimeError(f"CandleCollector.recv: the collection failed: {self._failure}") from self._failure
            if self._thread is None:
                arguments = (self._collector, self._policy, self.n_steps, self._orders, self._ready)
                self._thread = threading.Thread(target=_work, args=arguments, name="rlox-collector", daemon=True)
                self._thread.start()
                self._orders.put(self._weights.copy())
            self._orders.put(self._weights.copy())
            found = self._ready.get()
            if isinstance(found, BaseException):
                self._failure = found
                raise RuntimeError(f"CandleCollector.recv: the collection failed: {found}") from found
            rollout, self._reached = found
            return rollout

    def reached(self) -> tuple[dict[str, int], dict[str, np.ndarray] | None]:
        """Return the states of the actions' generator and of the environments after the last rollout from `recv`.

        The thread itself is ahead of them. Before the first `recv`: the initial state of the generator, and None.
        """
        with self._lock:
            return self._reached

    def sync_weights(self, params: Any) -> None:
        """Use these weights from the next rollout that has not been started: see the class.

        Parameters
        ----------
        params : array-like (P,)
            All parameters in the order of ``torch.nn.utils.parameters_to_vector(policy.parameters())`` of a
            `rlox.DiscretePolicy`; copied, as float32.

        Raises
        ------
        ValueError
            If the number of parameters is wrong, or one is not finite.
        """
        weights = np.array(params, np.float32)
        if weights.shape != self._weights.shape:
            raise ValueError(
                f"CandleCollector.sync_weights: params must have shape {self._weights.shape}, got {weights.shape}"
            )
        if not np.isfinite(weights).all():
            raise ValueError("CandleCollector.sync_weights: params must be finite, got NaN or infinity")
        with self._lock:
            self._weights = weights

    def get_weights(self) -> np.ndarray:
        """Return a copy of the last synced (or initial) weights, (P,) f32, in the order of `sync_weights`."""
        with self._lock:
            return self._weights.copy()

    def stop(self) -> None:
        """End the thread after the running rollout; may be called again."""
        with self._lock:
            self._stopped = True
            if self._thread is not None:
                self._orders.put(None)
                self._thread.join()
                self._thread = None

    def __enter__(self) -> CandleCollector:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _work(
    collector: RolloutCollector,
    policy: NativePolicy,
    n_steps: int,
    orders: queue.SimpleQueue,
    ready: queue.SimpleQueue,
) -> None:
    """Run the thread. It has no reference to the `CandleCollector`, which can therefore be deleted without `stop`."""
    names = {name: name for name in ("actions", "rewards", "dones", "log_probs", "values", "advantages", "returns")}
    try:
        while (weights := orders.get()) is not None:
            policy.net.parameters[:] = weights
            batch = collector.collect(policy, n_steps)
            rollout = {key: batch.array(name) for key, name in {"observations": "obs", **names}.items()}
            ended = {name: getattr(batch, name) for name in ("episode_returns", "episode_lengths")}
            ready.put(({**rollout, **ended}, (collector.rng.get_state(), collector.state())))
    except BaseException as e:  # `recv` waits for an answer in any case
        ready.put(e)
