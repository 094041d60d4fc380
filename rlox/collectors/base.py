"""Base of the collectors of rollouts and of transitions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from rlox.checkpoint.streams import Stream
from rlox.collectors.rewards import RewardFn, as_reward_fn, reward_name
from rlox.config import RemoteConfig
from rlox.envs import env_name, make_vec_env
from rlox.envs.protocols import VecEnv
from rlox.kernels.rng import Rng
from rlox.kernels.stats import all_finite
from rlox.nn.batch import FrameStacks
from rlox.processes.failures import Diverged, note_cause, require_exception

_LARGEST = 1e150  # largest number that a running variance can include

# Key in the state of environments that cannot compute them again: the observations that the next actions respond to.
_OBS = "env_obs"


class _FrameStore:
    """Stored frames of a rollout's stacked images: one new frame per step, a whole stack at the start of an episode."""

    def __init__(self, n_steps: int, first: np.ndarray, n_stacked: int):
        n, channels, *size = first.shape
        self._k = n_stacked
        self._frames = np.empty((n * (n_steps + 2 * n_stacked), channels // n_stacked, *size), first.dtype)
        self._used = 0
        self._index = np.empty((n_steps + 1, n, n_stacked), np.int64)
        self._t = 0
        self._index[0] = self._put(self._split(first))

    def _split(self, stacks: np.ndarray) -> np.ndarray:
        """Reshape (m, K * C, H, W) to (m, K, C, H, W)."""
        return stacks.reshape(len(stacks), self._k, -1, *stacks.shape[2:])

    def _put(self, frames: np.ndarray) -> np.ndarray:
        """Store (m, j, C, H, W) frames and return their positions (m, j)."""
        count = frames.shape[0] * frames.shape[1]
        if self._used + count > len(self._frames):
            # Only if many episodes start within one rollout.
            more = np.empty((max(count, len(self._frames) // 2), *self._frames.shape[1:]), self._frames.dtype)
            self._frames = np.concatenate([self._frames[: self._used], more])
        at = np.arange(self._used, self._used + count)
        self._frames[at] = frames.reshape(count, *frames.shape[2:])
        self._used += count
        return at.reshape(frames.shape[:2])

    def append(self, stacks: np.ndarray, started: np.ndarray) -> None:
        """Add the images (N, K * C, H, W) of the next step; `started` (N,) marks those that begin an episode."""
        split, row = self._split(stacks), self._index[self._t + 1]
        on = ~started
        row[on, :-1] = self._index[self._t][on, 1:]
        row[on, -1:] = self._put(split[on, -1:])
        row[started] = self._put(split[started])
        self._t += 1

    def rows(self, device: str) -> FrameStacks:
        """Return the images of all steps except the last, row t * N + n."""
        import torch

        frames = torch.from_numpy(self._frames[: self._used]).to(device)
        return FrameStacks(frames, torch.from_numpy(self._index[:-1].reshape(-1, self._k)).to(device))


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=3)


class Collector:
    """Base of all collectors, with their environments: those of `env_id` if it is a `rlox.envs.protocols.VecEnv`, or
    new ones.

    Attributes
    ----------
    name : str
        The environment's name in messages.
    notify : callable
        Called with a sentence when an actor or worker is lost or back; by default it issues a `RuntimeWarning`.
    """

    _where: ClassVar[str]  # start of error messages
    noise_axis: ClassVar[int] = 0  # axis of the environments in the noise that actions are drawn from

    def __init__(
        self,
        env_id: str | Callable[[], Any] | VecEnv,
        n_envs: int,
        seed: int,
        reward_fn: RewardFn | None,
        env_kwargs: dict[str, Any] | None,
        device: str,
        env_wrappers: Sequence[Any],
        env_workers: int,
        env_backend: str,
        remote: RemoteConfig | None = None,
    ):
        env: Any = env_id
        if not hasattr(env, "step_all"):
            env = make_vec_env(env, n_envs, seed, env_kwargs, env_wrappers, env_workers, env_backend, remote)
        self.env = env
        self.spec = env.spec
        self.n_envs = env.n_envs
        self.reward_fn = None if reward_fn is None else as_reward_fn(reward_fn, self.spec, self._where)
        self.device = device
        self.rng = Rng(seed, Stream.ACTION)
        self.name = env_name(env_id)
        # (N, *obs_shape): unnormalised observations from which the next step starts; None before the first step.
        self._raw: Any = None
        self._lost: str | None = None  # why a checkpoint's episodes did not continue, although they are restorable
        self.notify: Callable[[str], None] = _warn
        self.env_steps = 0  # over all environments; a training run sets it to its own count

    def _shape_rewards(self, obs: np.ndarray, actions: np.ndarray, raw: np.ndarray) -> np.ndarray:
        reward_fn = self.reward_fn
        if reward_fn is None:
            return raw
        obs, actions = obs.view(), actions.view()
        # The function must not change the data to learn from.
        obs.flags.writeable = actions.flags.writeable = False
        try:
            shaped = np.asarray(reward_fn(obs, actions, raw))
        except BaseException as e:
            require_exception(e, f"{self._where}: reward_fn", f"reward_fn {reward_name(reward_fn)} on {self.name}")
            note_cause(e, f"reward_fn {reward_name(reward_fn)} on {self.name}")
            raise
        if shaped.dtype.kind not in "fiub":
            raise TypeError(f"{self._where}: reward_fn must return numbers, got an array of dtype {shaped.dtype}")
        if shaped.shape != raw.shape:
            raise ValueError(f"{self._where}: reward_fn must return an array of shape {raw.shape}, got {shaped.shape}")
        return shaped

    def _refuse_numbers(self, what: str, numbers: np.ndarray, step: int, suffix: str = "") -> None:
        """Raise for observations (N, *obs_shape), or rewards (N,), that are not finite after `step`.

        The running episodes are dropped, so that no checkpoint contains them.
        """
        bad = tuple(np.argwhere(~(np.abs(numbers) < (_LARGEST if suffix else np.inf)))[0])
        at = f" in {self.spec.part(int(np.ravel_multi_index(bad[1:], numbers.shape[1:])))}" if len(bad) > 1 else ""
        remedy = "set env.reward_fn" if what == "rewards" else "replace such values in a wrapper"
        if what == "rewards" and self.reward_fn is not None:
            what, remedy = f"rewards of reward_fn {reward_name(self.reward_fn)}", "fix that function"
        self._raw = None
        raise FloatingPointError(
            f"{self._where}: {self.name}: {what} must be finite{suffix}, got {numbers[bad]}{at} from environment "
            f"{bad[0]} at step {step:,}; fix the environment, or {remedy}"
        )

    def _refuse_policy(self, e: Exception, actions: np.ndarray | None) -> None:
        """Raise `Diverged` from `e` if the environments raised it because `actions` are not finite."""
        if actions is not None and not all_finite(actions):
            raise Diverged(
                f"{self._where}: the policy's actions on {self.name} became {actions[~np.isfinite(actions)][0]} near "
                f"step {self.env_steps:,}, although observations were finite: its weights have diverged. Try a lower "
                "learning_rate or max_grad_norm"
            ) from e

    def _refuse_action(self, action: np.ndarray) -> None:
        raise ValueError(
            f"{self._where}: the policy must act with shape {(self.n_envs, *self.spec.action_shape)} on {self.name} "
            f"({self.spec.describe_actions()}), got {tuple(action.shape)}"
        )

    def state(self) -> dict[str, np.ndarray] | None:
        """Return an exact snapshot of the environments; None before they start, or if they are not `restorable`."""
        found = None if self._raw is None else self.env.get_state()
        return found if hasattr(self.env, "observe") or found is None else {**found, _OBS: self._raw.copy()}

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Continue from a state that `state` returned.

        Raises
        ------
        ValueError, TypeError
            If it is damaged or not a state of such environments.
        """
        if hasattr(self.env, "observe"):
            # Earlier checkpoints also have the observations of a user's tensor environment.
            self.env.set_state({name: array for name, array in state.items() if name != _OBS})
            self._raw = self.env.observe()
        else:
            obs, shape = state.get(_OBS), (self.n_envs, *self.spec.obs_shape)
            if not isinstance(obs, np.ndarray) or obs.dtype != self.spec.obs_dtype or obs.shape != shape:
                got = getattr(obs, "shape", obs)
                raise ValueError(
                    f"{type(self).__name__}.set_state: {_OBS} must be an array {shape} of "
                    f"{np.dtype(self.spec.obs_dtype)}, got {got}"
                )
            self.env.set_state(state)
            self._raw = obs.copy()
        self._lost = None

    def restore(self, state: dict[str, np.ndarray]) -> bool:
        """Call `set_state` if `state` fits the environments. Return False if it does not, and new episodes start.

        Raises
        ------
        ValueError, TypeError
            If it is damaged.
        """
        if not state:
            self._lost = "the checkpoint has no state of it"
        elif not self.env.fits(state):
            self._lost = "in the checkpoint it is made of other parts"
        elif self.restorable:
            self.set_state(state)
            return True
        if hasattr(self.env, "n_skipped"):
            self.env.n_skipped = self.env_steps  # otherwise the run would begin again with its first episodes
        return False

    @property
    def restorable(self) -> bool:
        """Whether the environments can be saved and restored exactly."""
        return self.env.unrestorable_reason is None

    def restore_note(self) -> str | None:
        """Return a note about why the saved episodes do not continue; None if they do."""
        reason = self._lost if self.restorable else self.env.unrestorable_reason
        if reason is None:
            return None
        episodes = "a fresh episode" if self.n_envs == 1 else "fresh episodes"
        return f"{self.name} cannot be restored ({reason}): it starts with {episodes}, everything else is exact"

    def lines(self) -> list[str]:
        """Return lines for a live view, one for each actor that collects independently."""
        return []

    def metrics(self) -> dict[str, float]:
        """Return metrics of the last collection, in addition to those of the batch."""
        return {}

    def close(self) -> None:
        """Close the environments and their worker processes."""
        self.env.close()
