"""How experience is gathered: whole rollouts for on-policy learning, step by step into a memory for off-policy."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rlox.batch import FrameStacks, RolloutBatch
from rlox.envs import EnvSpec, env_name, make_vec_env, spec_of
from rlox.exploration import ActionNoise
from rlox.failures import Diverged, blame
from rlox.kernels.advantage.gae import compute_gae_batched_f32
from rlox.kernels.reward import NativeReward
from rlox.kernels.rng import Rng
from rlox.native import NativeActor, NativePolicy
from rlox.streams import Stream
from rlox.vec_normalize import VecNormalize

if TYPE_CHECKING:
    from torch import nn

    from rlox.acting import ModuleRollout
    from rlox.policies import Actor

# (obs, actions, raw_rewards) -> rewards, a "rlox.reward.v1" capsule, or a name in REWARDS.
RewardFn = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray] | Any


def sign(obs: np.ndarray, actions: np.ndarray, raw_rewards: np.ndarray) -> np.ndarray:
    """-1, 0 or 1: what Mnih et al. 2015 learn Atari games from, so that one set of settings serves all of them."""
    return np.sign(raw_rewards)


REWARDS = {"sign": sign}

_LARGEST = 1e150  # that a running variance can take in

# In the state of foreign environments: the observations that the next actions answer.
_OBS = "env_obs"


def reward_name(reward_fn: Callable[..., np.ndarray]) -> str:
    """What a checkpoint calls `reward_fn`: one of `REWARDS` by ``rlox:NAME``, which no function's own name can be."""
    ours = next((name for name, found in REWARDS.items() if found is reward_fn), None)
    return env_name(reward_fn) if ours is None else f"rlox:{ours}"


def all_finite(numbers: np.ndarray) -> bool:
    """Whether there is neither NaN nor infinity; a fraction of a microsecond for a few numbers."""
    flat = numbers.reshape(-1)
    # Both show in the sum of squares, which overflows before they do.
    return flat.dtype.kind != "f" or math.isfinite(np.dot(flat, flat)) or bool(np.isfinite(flat).all())


def as_reward_fn(reward_fn: RewardFn | None, spec: EnvSpec, where: str) -> Callable[..., np.ndarray] | None:
    """`reward_fn` as a callable; a name is looked up, a capsule becomes a `NativeReward` that fits the environment.

    Raises
    ------
    TypeError
        For what is neither callable nor a capsule nor a name in `REWARDS`.
    ValueError
        For a capsule that breaks the contract of rlox_native.h, or that is written for another environment.
    """
    if reward_fn is None:
        return None
    if isinstance(reward_fn, str) and reward_fn in REWARDS:
        return REWARDS[reward_fn]
    if not callable(reward_fn):
        if type(reward_fn).__name__ != "PyCapsule":
            raise TypeError(
                f"{where}: reward_fn must be a callable or a 'rlox.reward.v1' capsule, got {type(reward_fn).__name__}"
            )
        reward_fn = NativeReward(reward_fn)
    if isinstance(reward_fn, NativeReward):
        if spec.obs_dtype != np.float32 or len(spec.obs_shape) != 1 or spec.n_choices is not None:
            raise ValueError(
                f"{where}: reward_fn {reward_fn.name} must be a Python function here: a native one takes (N, D) "
                "float32 observations, and one integer or A floats as an action"
            )
        if reward_fn.obs_dim not in (None, spec.obs_dim):
            raise ValueError(
                f"{where}: reward_fn must fit observations of length {spec.obs_dim}, got {reward_fn.name} for "
                f"{reward_fn.obs_dim}"
            )
    return reward_fn


class _FrameStore:
    """Keeps a rollout's stacked images by their frames: one new frame a step, a whole stack where an episode starts."""

    def __init__(self, n_steps: int, first: np.ndarray, n_stacked: int):
        n, channels, *size = first.shape
        self._k = n_stacked
        self._frames = np.empty((n * (n_steps + 2 * n_stacked), channels // n_stacked, *size), first.dtype)
        self._used = 0
        self._index = np.empty((n_steps + 1, n, n_stacked), np.int64)
        self._t = 0
        self._index[0] = self._put(self._split(first))

    def _split(self, stacks: np.ndarray) -> np.ndarray:
        """(m, K * C, H, W) -> (m, K, C, H, W)."""
        return stacks.reshape(len(stacks), self._k, -1, *stacks.shape[2:])

    def _put(self, frames: np.ndarray) -> np.ndarray:
        """Store (m, j, C, H, W) frames; returns where each is, (m, j)."""
        count = frames.shape[0] * frames.shape[1]
        if self._used + count > len(self._frames):
            # Only where many episodes start within one rollout.
            more = np.empty((max(count, len(self._frames) // 2), *self._frames.shape[1:]), self._frames.dtype)
            self._frames = np.concatenate([self._frames[: self._used], more])
        at = np.arange(self._used, self._used + count)
        self._frames[at] = frames.reshape(count, *frames.shape[2:])
        self._used += count
        return at.reshape(frames.shape[:2])

    def append(self, stacks: np.ndarray, started: np.ndarray) -> None:
        """Take in the next step's images (N, K * C, H, W); `started` (N,) marks those that begin an episode."""
        split, row = self._split(stacks), self._index[self._t + 1]
        on = ~started
        row[on, :-1] = self._index[self._t][on, 1:]
        row[on, -1:] = self._put(split[on, -1:])
        row[started] = self._put(split[started])
        self._t += 1

    def rows(self, device: str) -> FrameStacks:
        """All steps' images but the last, row t * N + n."""
        import torch

        frames = torch.from_numpy(self._frames[: self._used]).to(device)
        return FrameStacks(frames, torch.from_numpy(self._index[:-1].reshape(-1, self._k)).to(device))


class _Collector:
    """The environments of a collector, and what both kinds do with them."""

    _where: ClassVar[str]  # whom errors name

    def __init__(
        self,
        env_id: str | Callable[[], Any],
        n_envs: int,
        seed: int,
        reward_fn: RewardFn | None,
        env_kwargs: dict[str, Any] | None,
        device: str,
        env_wrappers: Sequence[Any],
        env_workers: int,
        env_backend: str,
    ):
        self.env = make_vec_env(env_id, n_envs, seed, env_kwargs, env_wrappers, env_workers, env_backend)
        self.spec = spec_of(self.env)
        self.n_envs = n_envs
        self.reward_fn = as_reward_fn(reward_fn, self.spec, self._where)
        self.device = device
        self.rng = Rng(seed, Stream.ACTION)
        self._name = env_name(env_id)
        # (N, *obs_shape), where the next step starts, as the environment says it.
        self._raw: np.ndarray | None = None
        self._lost: str | None = None  # why a checkpoint's episodes did not go on here, though such ones can
        self.env_steps = 0  # over all environments together; a training sets it to its own count

    def _shaped(self, obs: np.ndarray, actions: np.ndarray, raw: np.ndarray) -> np.ndarray:
        obs, actions = obs.view(), actions.view()
        # What is learned from must not be changed under way.
        obs.flags.writeable = actions.flags.writeable = False
        try:
            shaped = np.asarray(self.reward_fn(obs, actions, raw))
        except Exception as e:
            blame(e, f"reward_fn {reward_name(self.reward_fn)} on {self._name}")
            raise
        if shaped.dtype.kind not in "fiub":
            raise TypeError(f"{self._where}: reward_fn must return numbers, got an array of dtype {shaped.dtype}")
        if shaped.shape != raw.shape:
            raise ValueError(f"{self._where}: reward_fn must return an array of shape {raw.shape}, got {shaped.shape}")
        return shaped

    def _refuse_numbers(self, what: str, numbers: np.ndarray, step: int, said: str = "") -> None:
        """Raise for observations (N, *obs_shape), or rewards (N,), that are not finite after `step`.

        The episodes that run are given up, so that no checkpoint holds them.
        """
        bad = tuple(np.argwhere(~(np.abs(numbers) < (_LARGEST if said else np.inf)))[0])
        at = f" in {self.spec.part(int(np.ravel_multi_index(bad[1:], numbers.shape[1:])))}" if len(bad) > 1 else ""
        remedy = "set env.reward_fn" if what == "rewards" else "cut it off by a wrapper"
        if what == "rewards" and self.reward_fn is not None:
            what, remedy = f"rewards of reward_fn {reward_name(self.reward_fn)}", "mend that function"
        self._raw = None
        raise FloatingPointError(
            f"{self._where}: {self._name}: {what} must be finite{said}, got {numbers[bad]}{at} from environment "
            f"{bad[0]} at step {step:,}; mend the environment, or {remedy}"
        )

    def _refuse_policy(self, e: Exception, actions: np.ndarray | None) -> None:
        """Raise `Diverged` from `e` if `actions` are why the environments raised it."""
        if actions is not None and not all_finite(actions):
            raise Diverged(
                f"{self._where}: the policy's actions on {self._name} became {actions[~np.isfinite(actions)][0]} about "
                f"step {self.env_steps:,}, where observations were finite: its weights have diverged. Try a lower "
                "learning_rate or max_grad_norm"
            ) from e

    def _refuse_action(self, action: np.ndarray) -> None:
        raise ValueError(
            f"{self._where}: the policy must act with shape {(self.n_envs, *self.spec.action_shape)} on {self._name} "
            f"({self.spec.describe_actions()}), got {tuple(action.shape)}"
        )

    def state(self) -> dict[str, np.ndarray] | None:
        """Exact snapshot of the environments; None before they have started, or where they are not `restorable`."""
        found = None if self._raw is None else self.env.get_state()
        return found if self.native or found is None else {**found, _OBS: self._raw.copy()}

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Continue from what `state` returned.

        Raises
        ------
        ValueError, TypeError
            If it is no state of such environments, or damaged.
        """
        if self.native:
            self.env.set_state(state)
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
        """`set_state`, where `state` is of environments such as these; returns whether it was, or they start afresh.

        Raises
        ------
        ValueError, TypeError
            If it is damaged.
        """
        if not state:
            self._lost = "the checkpoint holds no state of it"
        elif _OBS in state if self.native else not self.env.fits(state):
            self._lost = "the checkpoint's was made of other parts"
        elif self.restorable:
            self.set_state(state)
            return True
        return False

    @property
    def native(self) -> bool:
        """Whether kernels step the environments."""
        from rlox.kernels.envs.vec_env import VecEnv

        return isinstance(self.env, VecEnv)

    @property
    def restorable(self) -> bool:
        """Whether the environments can be saved and restored exactly."""
        return self.native or self.env.why_not is None

    def restore_note(self) -> str | None:
        """For the user: that, and why, the environments do not go on where the saved ones were; None where they do."""
        reason = self._lost if self.restorable else self.env.why_not
        if reason is None:
            return None
        episodes = "a fresh episode" if self.n_envs == 1 else "fresh episodes"
        return f"{self._name} cannot be restored ({reason}): it starts with {episodes}, everything else is exact"

    def close(self) -> None:
        """End foreign environments and their worker processes; native ones hold nothing."""
        if not self.native:
            self.env.close()


class _NativeRollout:
    """What `rlox.acting.ModuleRollout` is for a module."""

    context = nullcontext

    def __init__(self, policy: NativePolicy, rng: Rng, n_steps: int, n: int):
        self.policy = policy
        self.noise = np.empty((n_steps, *policy.noise_shape(n)), np.float32)
        policy.fill_noise(rng, self.noise)

    def act(self, obs: np.ndarray, t: int) -> np.ndarray:
        return self.policy.act(obs, self.noise[t])

    def place(self, column: np.ndarray) -> np.ndarray:
        return column

    def judge(self, seen: np.ndarray, actions: np.ndarray, after: np.ndarray) -> tuple[np.ndarray, ...]:
        net = self.policy.net
        return seen, actions, *net.log_probs(seen, actions), net.values(after)


class RolloutCollector(_Collector):
    """Steps N environments with a policy and returns whole rollouts with their advantages.

    Parameters
    ----------
    env_id : str, callable or gymnasium.Env
        A native id, any gymnasium id, a callable that returns a ``gymnasium.Env``, or (with one environment) such an
        object.
    n_envs : int
        Number of environments N.
    seed : int
        Decides the environments and, for rlox's policies, the actions.
    gamma, gae_lambda : float
        Discount and trace decay of the advantages (GAE, Schulman et al. 2016, arXiv:1506.02438).
    reward_fn : callable or PyCapsule, optional
        ``reward_fn(obs, actions, raw_rewards) -> rewards``, called once a step with (N, D), (N,) or (N, A), and (N,)
        arrays in the environment's own units; actions are those that were executed, clipped to their bounds. What it
        returns replaces the rewards that are learned from. Episode statistics stay the environment's. Or a PyCapsule
        ``rlox.reward.v1`` (rlox_native.h): one call of C a step. Or ``"sign"`` for that of the rewards, as is usual for
        Atari.
    env_kwargs : dict, optional
        Keyword arguments of ``gymnasium.make``.
    device : str
        Where the policy lives and the batches go.
    normalizer : VecNormalize, optional
        Normalises observations and (after `reward_fn`) rewards, and learns its statistics on the way.
    env_wrappers, env_workers, env_backend
        gymnasium wrappers, worker processes and what implements the environments (see `rlox.envs.make_vec_env`).
    """

    _where = "RolloutCollector.collect"

    def __init__(
        self,
        env_id: str | Callable[[], Any],
        n_envs: int = 8,
        seed: int = 0,
        gamma: float = 0.99,
        gae_lambda: float = 0.95,
        reward_fn: RewardFn | None = None,
        env_kwargs: dict[str, Any] | None = None,
        device: str = "cpu",
        normalizer: VecNormalize | None = None,
        env_wrappers: Sequence[Any] = (),
        env_workers: int = 0,
        env_backend: str = "auto",
    ):
        super().__init__(env_id, n_envs, seed, reward_fn, env_kwargs, device, env_wrappers, env_workers, env_backend)
        self.gamma = gamma
        self.gae_lambda = gae_lambda
        self.normalizer = normalizer

    def collect(self, policy: nn.Module | NativePolicy, n_steps: int) -> RolloutBatch:
        """Take `n_steps` steps in every environment.

        A `NativePolicy` on native environments is one call of a kernel, where nothing of Python's (a normalisation, a
        `reward_fn`) must see each step.

        A time limit is no termination: where an episode was truncated, its last step bootstraps from the value of the
        observation it truly led to, and no advantage reaches across the boundary.

        Returns
        -------
        RolloutBatch
            B = n_steps * N transitions.

        Raises
        ------
        TypeError
            If the policy lacks one of the three methods (see `rlox.policies`).
        ValueError
            If the policy's actions do not fit the environment, or `reward_fn` returns another shape.
        """
        if n_steps < 1:
            raise ValueError(f"RolloutCollector.collect: n_steps must be >= 1, got {n_steps}")
        n, spec, normalizer = self.n_envs, self.spec, self.normalizer
        native = isinstance(policy, NativePolicy)
        normalize_obs = normalizer is not None and normalizer.obs
        stacked = spec.n_stacked > 1
        # Of stacked images only this step's and the next one's are held whole; row t is `t % kept`.
        kept = 2 if stacked else n_steps + 1
        try:
            obs = np.empty((kept, n, *spec.obs_shape), spec.obs_dtype)
            actions = np.empty((n_steps, n, *spec.action_shape), spec.action_dtype)
            rewards = np.empty((n_steps, n))
            terminated = np.empty((n_steps, n), np.bool_)
            truncated = np.empty((n_steps, n), np.bool_)
            episode_return = np.empty((n_steps, n))
            episode_length = np.empty((n_steps, n), np.int64)
        except (MemoryError, ValueError, OverflowError) as e:  # NumPy's, by how far it is too much
            raise ValueError(
                f"RolloutCollector.collect: n_steps must fit in memory, got {n_steps} in {n} environments ({e})"
            ) from e
        acting = _NativeRollout(policy, self.rng, n_steps, n) if native else self._by_module(policy, n_steps)

        if self._raw is None:
            self._raw = self.env.reset_all()
            if not all_finite(self._raw):
                self._refuse_numbers("observations", self._raw, self.env_steps)
            if normalizer is not None:
                normalizer.update(self._raw)
        obs[0] = normalizer.normalize(self._raw) if normalize_obs else self._raw
        frames = _FrameStore(n_steps, obs[0], spec.n_stacked) if stacked else None
        results = (rewards, terminated, truncated, episode_return, episode_length)
        compiled = self.reward_fn is None or isinstance(self.reward_fn, NativeReward)
        if native and self.native and compiled and normalizer is None:
            try:
                limits, reached = policy.net.rollout(self.env.stepper(), n_steps, acting.noise, obs, actions, *results)
            except BaseException:
                self._raw = self.env.observe()  # stopped in the middle, the environments have moved on
                raise
            self._raw = obs[n_steps].copy()
            if self.reward_fn is not None:
                for t in range(n_steps):
                    self.reward_fn.apply_(obs[t], spec.clip(actions[t]), rewards[t])
        else:
            limits, reached = self._step_by_step(acting, obs, actions, frames, *results)

        rewards_f32 = rewards.astype(np.float32)
        self._require_finite(obs, limits, reached, rewards_f32)
        self.env_steps += n_steps * n
        last = obs[n_steps % kept]
        seen = obs[:n_steps].reshape(-1, *spec.obs_shape) if frames is None else frames.rows(self.device)
        flat_actions = actions.reshape(-1, *spec.action_shape)
        columns = acting.judge(seen, flat_actions, np.concatenate([last, reached]))
        seen, flat_actions, log_probs, values, after_values = columns
        next_values = np.zeros((n_steps, n), np.float32)
        next_values[limits[:, 0], limits[:, 1]] = after_values[n:]
        values_np = values if native else values.cpu().numpy()
        advantages, returns = compute_gae_batched_f32(
            rewards_f32,
            values_np.reshape(n_steps, n),
            terminated,
            after_values[:n],
            n_steps,
            self.gamma,
            self.gae_lambda,
            truncated=truncated,
            next_values=next_values,
        )
        ended = terminated | truncated
        return RolloutBatch(
            obs=seen,
            actions=flat_actions,
            log_probs=log_probs,
            values=values,
            advantages=acting.place(advantages.reshape(-1)),
            returns=acting.place(returns.reshape(-1)),
            rewards=acting.place(rewards_f32.reshape(-1)),
            episode_returns=episode_return[ended],
            episode_lengths=episode_length[ended],
            dones=acting.place(ended.reshape(-1)),
        )

    def _require_finite(self, obs: np.ndarray, limits: np.ndarray, reached: np.ndarray, rewards: np.ndarray) -> None:
        """Raise for what is not finite in a rollout: its observations, those `reached` where time limits cut, its
        rewards."""
        if all_finite(obs) and all_finite(reached) and all_finite(rewards):
            return
        said = "" if self.normalizer is None else " after normalisation"
        for t, row in enumerate(rewards):
            step = self.env_steps + (t + 1) * self.n_envs
            # What one step has led to; observations of stacked images are whole numbers.
            if len(obs) > len(rewards) and not all_finite(obs[t + 1]):
                self._refuse_numbers("observations", obs[t + 1], step, said)
            if not all_finite(row):
                self._refuse_numbers("rewards", row, step, said)
            at_limit = np.zeros((self.n_envs, *self.spec.obs_shape), self.spec.obs_dtype)
            at_limit[limits[limits[:, 0] == t, 1]] = reached[limits[:, 0] == t]
            if not all_finite(at_limit):
                self._refuse_numbers("observations", at_limit, step, said)

    def _refuse_row(self, rewards: np.ndarray, step: int) -> None:
        """Raise if the observations that one step has led to, or its rewards, are none to normalise by."""
        if not all_finite(self._raw):
            self._refuse_numbers("observations", self._raw, step)
        if not np.abs(rewards).max() < _LARGEST:
            self._refuse_numbers("rewards", rewards, step, " and have a finite square")

    def _by_module(self, policy: nn.Module, n_steps: int) -> ModuleRollout:
        from rlox.acting import ModuleRollout
        from rlox.policies import check_policy

        check_policy(policy, "RolloutCollector.collect")
        return ModuleRollout(policy, self.device, self.rng, n_steps, self.n_envs)

    def _step_by_step(
        self,
        acting: ModuleRollout | _NativeRollout,
        obs: np.ndarray,
        actions: np.ndarray,
        frames: _FrameStore | None,
        rewards: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        episode_return: np.ndarray,
        episode_length: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Fill the arrays; returns what the kernel's ``rollout`` does: where a limit cut, and what was reached."""
        spec, normalizer, kept = self.spec, self.normalizer, len(obs)
        normalize_obs = normalizer is not None and normalizer.obs
        final_obs = np.empty(obs.shape[1:], spec.obs_dtype)
        limits, reached = [np.empty((0, 2), np.int64)], [np.empty((0, *spec.obs_shape), spec.obs_dtype)]
        t, action = 0, None
        try:
            with acting.context():
                for t in range(len(actions)):
                    action = acting.act(obs[t % kept], t)
                    if action.shape != actions.shape[1:]:
                        self._refuse_action(action)
                    actions[t] = action
                    # The log-probability is of the action that was sampled; what is executed is clipped.
                    taken, after = spec.clip(actions[t]), obs[(t + 1) % kept]
                    self.env.step_all(
                        taken,
                        {
                            "obs": after,
                            "rewards": rewards[t],
                            "terminated": terminated[t],
                            "truncated": truncated[t],
                            "final_obs": final_obs,
                            "episode_return": episode_return[t],
                            "episode_length": episode_length[t],
                        },
                    )
                    before, self._raw = self._raw, after.copy() if normalize_obs else after
                    if isinstance(self.reward_fn, NativeReward):
                        self.reward_fn.apply_(before, taken, rewards[t])
                    elif self.reward_fn is not None:
                        rewards[t] = self._shaped(before, taken, rewards[t])
                    if normalizer is not None:
                        # Its statistics would never be finite again.
                        flat, row = self._raw.reshape(-1), rewards[t]
                        if not math.isfinite(np.dot(flat, flat)) or not np.dot(row, row) < _LARGEST**2:
                            self._refuse_row(row, self.env_steps + (t + 1) * self.n_envs)
                        normalizer.update(self._raw)
                        rewards[t] = normalizer.normalize_rewards(row, terminated[t] | truncated[t])
                        if normalize_obs:
                            after[:] = normalizer.normalize(self._raw)
                    if frames is not None:
                        frames.append(after, terminated[t] | truncated[t])
                    if b"\1" in truncated[t].tobytes():
                        which = np.flatnonzero(truncated[t])
                        states = final_obs[which]
                        limits.append(np.stack([np.full_like(which, t), which], 1))
                        reached.append(normalizer.normalize(states) if normalize_obs else states)
        except (RuntimeError, ValueError) as e:
            # Such observations make such actions.
            if normalizer is None:
                self._require_finite(obs[: t + 1], np.concatenate(limits), np.concatenate(reached), rewards[:t])
            self._refuse_policy(e, action)
            if "mat1 and mat2" not in str(e):
                raise
            raise ValueError(
                f"RolloutCollector.collect: the policy must take the {spec.obs_dim} observations of {self._name}: {e}"
            ) from e
        self._raw = self._raw.copy()
        return np.concatenate(limits), np.concatenate(reached)


class ReplayCollector(_Collector):
    """Steps N environments with a policy and keeps every transition in a replay memory.

    Parameters
    ----------
    env_id, n_envs, seed, reward_fn, env_kwargs, device, env_wrappers, env_workers, env_backend
        As `RolloutCollector` takes them.
    """

    _where = "ReplayCollector.step"

    def __init__(
        self,
        env_id: str | Callable[[], Any],
        n_envs: int = 1,
        seed: int = 0,
        reward_fn: RewardFn | None = None,
        env_kwargs: dict[str, Any] | None = None,
        device: str = "cpu",
        env_wrappers: Sequence[Any] = (),
        env_workers: int = 0,
        env_backend: str = "auto",
    ):
        super().__init__(env_id, n_envs, seed, reward_fn, env_kwargs, device, env_wrappers, env_workers, env_backend)
        n, spec = n_envs, self.spec
        self._out = {
            "obs": np.empty((n, *spec.obs_shape), spec.obs_dtype),
            "rewards": np.empty(n),
            "terminated": np.empty(n, np.bool_),
            "truncated": np.empty(n, np.bool_),
            "final_obs": np.empty((n, *spec.obs_shape), spec.obs_dtype),
            "episode_return": np.empty(n),
            "episode_length": np.empty(n, np.int64),
        }
        self._final, self._floats = self._out["final_obs"].reshape(-1), spec.obs_dtype == np.float32
        self._noise: np.ndarray | None = None
        self.n_step = 1  # of the returns that the memory makes
        self._fed: tuple[Any, int | None] | None = None  # the memory of the last step, and how much was pushed to it
        self.normalizer: VecNormalize | None = None  # of what the policy sees; learns its statistics on the way
        self.action_noise: ActionNoise | None = None  # added to what the policy chooses, not to random actions

    def step(self, policy: Actor | NativeActor, buffer: Any, random: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Take one step in every environment and push N transitions.

        The next observation of a transition is the one its step truly led to, also where the episode ended there.

        Parameters
        ----------
        policy : Actor or NativeActor
            This collector's generator gives the noise it acts by, and that of `action_noise`.
        buffer : rlox.buffers.Buffer
            Where the transitions go.
        random : bool
            Uniformly random actions instead of the policy's.

        Returns
        -------
        returns, lengths : arrays (E,) f64 and int64
            Of the episodes that ended, from the environment's own statistics.

        Raises
        ------
        ValueError
            If the policy's actions do not fit the environment, or `reward_fn` returns another shape.
        """
        obs, out = self.observe(), self._out
        actions = self.spec.clip(
            self.spec.random_actions(self.rng, self.n_envs) if random else self._explore(policy, obs)
        )
        try:
            self.env.step_all(actions, out)
        except ValueError as e:
            self._refuse_policy(e, actions)
            raise
        self._raw, out["obs"] = out["obs"], obs
        rewards = out["rewards"]
        if isinstance(self.reward_fn, NativeReward):
            self.reward_fn.apply_(obs, actions, rewards)
        elif self.reward_fn is not None:
            # It may keep what it is given, and these arrays are used again.
            rewards = self._shaped(obs.copy(), actions.copy(), rewards.copy())
        terminated, truncated, n = out["terminated"], out["truncated"], self.n_envs
        self.env_steps += n
        # The memory, which is saved, must not hold them. Faster than `all_finite`, which is asked where this says no.
        flat, rewards = self._final, rewards.astype(np.float32)
        if self._floats and not math.isfinite(np.dot(flat, flat)) and not all_finite(flat):
            self._refuse_numbers("observations", out["final_obs"], self.env_steps)
        if not math.isfinite(np.dot(rewards, rewards)) and not all_finite(rewards):
            self._refuse_numbers("rewards", rewards, self.env_steps)
        self.follow_on(buffer)
        buffer.push_batch(
            obs.reshape(n, -1),
            out["final_obs"].reshape(n, -1),
            actions.reshape(n, -1).astype(np.float32, copy=False),
            rewards,
            terminated,
            truncated,
        )
        self.has_fed(buffer)
        ended = terminated | truncated
        returns, lengths = out["episode_return"][ended], out["episode_length"][ended]
        if len(returns) and not all_finite(self._raw):
            self._refuse_numbers("observations", self._raw, self.env_steps)
        self._see(self._raw)
        if self.action_noise is not None:
            self.action_noise.end(ended)
        return returns, lengths

    def follow_on(self, buffer: Any) -> None:
        """Cut the memory's n-step returns, unless its newest transitions are those of this collector's last step.

        Raises
        ------
        TypeError
            If the memory makes n-step returns and has no ``cut``.
        """
        if self._fed is not None and self._fed[0] is buffer and self._fed[1] == getattr(buffer, "n_pushed", None):
            return
        if hasattr(buffer, "cut"):
            buffer.cut()
        elif max(self.n_step, getattr(buffer, "n_step", 1)) > 1 and len(buffer):
            raise TypeError(
                f"{self._where}: a buffer of n-step returns must define cut() where environments start afresh, "
                f"{type(buffer).__name__} does not; see rlox.buffers.Buffer, or take n_step=1"
            )

    def has_fed(self, buffer: Any) -> None:
        """Note that the memory's newest transitions led to where the environments are."""
        self._fed = (buffer, getattr(buffer, "n_pushed", None))

    def forget(self) -> None:
        """Note that no memory's newest transitions led to where the environments are."""
        self._fed = None

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        super().set_state(state)
        self.forget()

    def position(self) -> str | None:
        """A digest of where the environments are; None before they have started."""
        return None if self._raw is None else hashlib.sha256(np.ascontiguousarray(self._raw)).hexdigest()

    def observe(self) -> np.ndarray:
        """Where the environments are, (N, *obs_shape); they start when this is first asked for. Not a copy."""
        if self._raw is None:
            self._raw = self.env.reset_all()
            if not all_finite(self._raw):
                self._refuse_numbers("observations", self._raw, self.env_steps)
            self._see(self._raw)
        return self._raw

    def require_finite_rows(self, rows: np.ndarray) -> None:
        """Raise for transitions (M, …) of the memory, the newest last, whose numbers are not finite.

        Parameters
        ----------
        rows : array
            f32; D numbers of the observation, D of the next one, A of the action, then the reward. One of each
            environment in turn.
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

    def _see(self, obs: np.ndarray) -> None:
        if self.normalizer is not None:
            self.normalizer.update(obs)

    def _explore(self, policy: Actor | NativeActor, obs: np.ndarray) -> np.ndarray:
        actions = self._act(policy, obs)
        return actions if self.action_noise is None else actions + self.action_noise.draw(self.rng)

    def _act(self, policy: Actor | NativeActor, obs: np.ndarray) -> np.ndarray:
        if self.normalizer is not None:
            obs = self.normalizer.normalize(obs)
        if self._noise is None:
            self._noise = np.empty(policy.noise_shape(self.n_envs), np.float32)
        policy.fill_noise(self.rng, self._noise)
        if isinstance(policy, NativeActor):
            return policy.act(obs, self._noise)
        import torch

        seen, noise = torch.from_numpy(obs), torch.from_numpy(self._noise)
        with torch.inference_mode():
            if self.device == "cpu":
                actions = policy.act(seen, noise).numpy()
            else:
                actions = policy.act(seen.to(self.device), noise.to(self.device)).cpu().numpy()
        if actions.shape != (self.n_envs, *self.spec.action_shape):
            self._refuse_action(actions)
        return actions
