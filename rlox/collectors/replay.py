"""Collection of transitions into a replay memory."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from rlox.collectors.base import Collector
from rlox.collectors.exploration import ActionNoise, HeldNoise
from rlox.collectors.rewards import RewardFn
from rlox.collectors.vec_normalize import VecNormalize
from rlox.config import RemoteConfig
from rlox.config.arguments import warn_renamed
from rlox.envs.protocols import VecEnv, step_arrays
from rlox.kernels.reward import NativeReward
from rlox.kernels.stats import all_finite
from rlox.nn.acting import ActingPolicy, Inputs, acting_policy

if TYPE_CHECKING:
    from rlox.nn.policies import Actor


class ReplayCollector(Collector):
    """Collector that steps N environments with a policy and stores every transition in a replay memory.

    Parameters
    ----------
    env_id, n_envs, seed, reward_fn, env_kwargs, device, env_wrappers, env_workers, env_backend, remote
        Same as in `RolloutCollector`.
    """

    _where = "ReplayCollector.step"

    def __init__(
        self,
        env_id: str | Callable[[], Any] | VecEnv,
        n_envs: int = 1,
        seed: int = 0,
        reward_fn: RewardFn | None = None,
        env_kwargs: dict[str, Any] | None = None,
        device: str = "cpu",
        env_wrappers: Sequence[Any] = (),
        env_workers: int = 0,
        env_backend: str = "auto",
        remote: RemoteConfig | None = None,
    ):
        super().__init__(
            env_id, n_envs, seed, reward_fn, env_kwargs, device, env_wrappers, env_workers, env_backend, remote
        )
        self._noise: np.ndarray | None = None
        self._mask: np.ndarray | None = None  # (N, n_actions) bool: the legal actions in `_raw`, if there are masks
        self.n_step = 1  # steps of the memory's n-step returns
        self.stores_masks = False  # whether the flags of the actions legal in `obs` follow the numbers of an action
        self._fed: tuple[Any, int | None] | None = None  # memory of the last step, and its n_pushed
        self.normalizer: VecNormalize | None = None  # normalises the policy's observations; updated in each step
        # What explores in addition to the policy, in the actions that it chooses.
        self.exploration: ActionNoise | HeldNoise | None = None

    @property
    def action_noise(self) -> ActionNoise | HeldNoise | None:
        """Former name of `exploration`."""
        warn_renamed("action_noise", "exploration", "0.14.0")
        return self.exploration

    @action_noise.setter
    def action_noise(self, noise: ActionNoise | None) -> None:
        warn_renamed("action_noise", "exploration", "0.14.0")
        self.exploration = noise

    @cached_property
    def _out(self) -> dict[str, np.ndarray]:
        """The arrays of a step, which a kernel that runs whole rounds does not need."""
        return step_arrays(self.spec, self.n_envs)

    def step(self, policy: Actor | ActingPolicy, buffer: Any, random: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Take one step in every environment and push N transitions.

        The next observation of a transition is the one that its step led to, also at the end of an episode. If the
        environments mask actions, the mask of the next observation is pushed, too, and random actions are legal.

        Parameters
        ----------
        policy : Actor or ActingPolicy
            Acts with noise from this collector's generator, which is also used for `exploration`.
        buffer : rlox.buffers.Buffer
            Memory to push the transitions to.
        random : bool
            Whether to take uniformly random actions instead of the policy's.

        Returns
        -------
        returns, lengths : arrays (E,) f64 and int64
            Statistics of the episodes that ended, from the environments.

        Raises
        ------
        ValueError
            If the policy's actions do not fit the environment, or `reward_fn` returns another shape.
        """
        obs, out = self.observe(), self._out
        actions = self.spec.clip(
            self.spec.random_actions(self.rng, self.n_envs, self._mask) if random else self._explore(policy, obs)
        )
        legal = self._mask.astype(np.float32) if self.stores_masks and self._mask is not None else None
        rewards, reached = self._advance(obs, actions)
        terminated, truncated, n = out["terminated"], out["truncated"], self.n_envs
        self.continue_in(buffer)
        stored = actions.reshape(n, -1).astype(np.float32, copy=False)
        if legal is not None:
            stored = np.concatenate([stored, legal], 1, dtype=np.float32)
        buffer.push_batch(
            obs.reshape(n, -1),
            out["final_obs"].reshape(n, -1),
            stored,
            rewards,
            terminated,
            truncated,
            **({"next_masks": out["final_action_mask"]} if self.spec.masked else {}),
        )
        self.remember_buffer(buffer)
        self._raw = reached
        ended = terminated | truncated
        returns, lengths = self._end_episodes(ended)
        if self.normalizer is not None:
            self.normalizer.update(self._raw)
            self.normalizer.normalize_rewards(rewards, ended)
        if self.exploration is not None:
            self.exploration.end(ended)
        return returns, lengths

    def _advance(self, obs: np.ndarray, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Take `actions` at the observations `obs`; return the rewards (N,) f32, after `reward_fn` if there is one, and
        the observations from which the next step starts.

        All other results are in ``_out``. The caller sets ``_raw`` once the memory has the step: if it is lost, because
        of an exception, new episodes start.
        """
        out = self._out
        try:
            self.env.step_all(actions, out)
        except ValueError as e:
            self._refuse_policy(e, actions)
            raise
        self._raw, reached, out["obs"] = None, out["obs"], obs
        if self._mask is not None:
            self._mask, out["action_mask"] = out["action_mask"], self._mask
        rewards = out["rewards"]
        if isinstance(self.reward_fn, NativeReward):
            self.reward_fn.apply_(obs, actions, rewards)
        elif self.reward_fn is not None:
            # Copies, because the function may keep its arguments, and these arrays are reused.
            rewards = self._shape_rewards(obs.copy(), actions.copy(), rewards.copy())
        self.env_steps += self.n_envs
        rewards = rewards.astype(np.float32)
        # The memory, which is saved, must not contain numbers that are not finite.
        if not all_finite(out["final_obs"]):
            self._refuse_numbers("observations", out["final_obs"], self.env_steps)
        if not all_finite(rewards):
            self._refuse_numbers("rewards", rewards, self.env_steps)
        return rewards, reached

    def _end_episodes(self, ended: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return returns and lengths of the episodes that `ended` (N,); observations after them must be finite."""
        returns, lengths = self._out["episode_return"][ended], self._out["episode_length"][ended]
        if len(returns) and not all_finite(self._raw):
            self._refuse_numbers("observations", self._raw, self.env_steps)
        return returns, lengths

    def continue_in(self, buffer: Any) -> None:
        """Cut the memory's n-step returns, unless its newest transitions come from this collector's last step.

        Raises
        ------
        TypeError
            If the memory has n-step returns and no ``cut``.
        """
        if self._fed is not None and self._fed[0] is buffer and self._fed[1] == getattr(buffer, "n_pushed", None):
            return
        if hasattr(buffer, "cut"):
            buffer.cut()
        elif max(self.n_step, getattr(buffer, "n_step", 1)) > 1 and len(buffer):
            raise TypeError(
                f"{self._where}: a buffer of n-step returns must define cut() in case environments restart, "
                f"{type(buffer).__name__} does not; see rlox.buffers.Buffer, or set n_step=1"
            )

    def remember_buffer(self, buffer: Any) -> None:
        """Record that the memory's newest transitions led to the environments' current observations."""
        self._fed = (buffer, getattr(buffer, "n_pushed", None))

    def forget_buffer(self) -> None:
        """Record that no memory's newest transitions led to the environments' current observations."""
        self._fed = None

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        super().set_state(state)
        self._mask = self.env.action_masks() if self.spec.masked else None
        self.forget_buffer()

    def position(self) -> str | None:
        """Return a digest of the environments' current observations; None before they have started."""
        return None if self._raw is None else hashlib.sha256(np.ascontiguousarray(self._raw)).hexdigest()  # type: ignore[arg-type]

    def observe(self) -> np.ndarray:
        """Return the current observations ``(N, *obs_shape)``, not a copy. The first call starts the environments, and
        so does the first one after a number was refused or a step failed midway."""
        if self._raw is None or not getattr(self.env, "at_rest", True):
            self._fed = None
            if self.exploration is not None:
                self.exploration.end(np.ones(self.n_envs, np.bool_))
            self._raw = self.env.reset_all()
            self._mask = self.env.action_masks() if self.spec.masked else None
            if not all_finite(self._raw):
                self._refuse_numbers("observations", self._raw, self.env_steps)
            if self.normalizer is not None:
                self.normalizer.update(self._raw)
        return self._raw

    def require_finite_rows(self, rows: np.ndarray) -> None:
        """Raise for transitions (M, …) of the memory, the newest last, whose numbers are not finite.

        Parameters
        ----------
        rows : array
            f32; D numbers of the observation, D of the next one, A of the action, then the reward. The rows come from
            each environment in turn.
        """
        d, n = self.spec.obs_dim, self.n_envs
        reward = 2 * d + max(1, math.prod(self.spec.action_shape))
        if all_finite(rows[:, : reward + 1]):
            return
        for first in range(0, len(rows), n):
            some, step = rows[first : first + n], self.env_steps - len(rows) + first + n
            for what, numbers in (("observations", some[:, d : 2 * d]), ("rewards", some[:, reward])):
                if not all_finite(numbers):
                    self._refuse_numbers(what, numbers, step)
            if not all_finite(some[:, :d]):
                self._refuse_numbers("observations", some[:, :d], step - n)

    def _explore(self, policy: Actor | ActingPolicy, obs: np.ndarray) -> np.ndarray:
        actions = self._act(policy, obs)
        return actions if self.exploration is None else self.exploration.add(actions, self.rng)

    def _act(self, policy: Actor | ActingPolicy, obs: np.ndarray) -> np.ndarray:
        if self.normalizer is not None:
            obs = self.normalizer.normalize(obs)
        actor = acting_policy(policy, self.device)
        if self._noise is None:
            self._noise = np.empty(actor.noise_shape(self.n_envs), np.float32)
        actor.fill_noise(self.rng, self._noise)
        noise = self._noise if self.exploration is None else self.exploration.hold(self._noise, self.rng)
        actions = actor.act(Inputs(obs, self._mask), noise)[0]
        if actions.shape != (self.n_envs, *self.spec.action_shape):
            self._refuse_action(actions)
        return actions
