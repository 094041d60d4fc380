"""Rollouts, from which on-policy algorithms learn, and their collection in steps of N environments."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rlox.collectors.base import _LARGEST, Collector, _FrameStore
from rlox.collectors.rewards import RewardFn
from rlox.collectors.vec_normalize import VecNormalize
from rlox.collectors.whole_sequences import SequenceRows
from rlox.compiled import NativePolicy
from rlox.config import RemoteConfig
from rlox.envs.protocols import RESULTS, VecEnv
from rlox.kernels.advantage.gae import compute_gae_batched_f32
from rlox.kernels.reward import NativeReward
from rlox.kernels.rng import Rng
from rlox.kernels.stats import all_finite
from rlox.nn.acting import ActingPolicy, Inputs, acting_policy
from rlox.nn.batch import Column, FrameStacks, draw_order
from rlox.nn.modules import to_array
from rlox.processes.failures import failure_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from rlox.nn.memory import Sequences

_MEMORY, _IS_FIRST = "policy_memory", "policy_is_first"  # in the state of a collector


@dataclass
class Rollout(SequenceRows):
    """B = T * N transitions of T steps in N environments, flat, step after step: row ``t * N + n``.

    Every column with a row for each transition is read as a tensor on the learner's device, even if it was given as a
    NumPy array, and is part of every minibatch. ``episode_*``, which minibatches lack, are NumPy arrays with a row for
    each episode that ended in this rollout, in order, from the environment's own statistics (before any ``reward_fn``).

    The rollout of a group of agents has a row for each step of each living agent: step after step, environment after
    environment, agent after agent. Since dead agents have none, it is not divided into sequences (`n_envs` is None).

    With a memory it is: `n_envs` is the number M of agents in environments, and `obs`, `states`, `is_first` and
    `running` have T * M rows, of which those that are `running` are the rows of the other columns.
    """

    obs: torch.Tensor | FrameStacks = Column()  # (B, D) f32 or (B, C, H, W) uint8, observation before the action
    actions: torch.Tensor = Column()  # (B,) or (B, K) int64, or (B, A) f32, as sampled
    log_probs: torch.Tensor = Column()  # (B,) f32, nats
    values: torch.Tensor = Column()  # (B,) f32, in the critic's units (normalised by a value norm, if there is one)
    advantages: torch.Tensor = Column()  # (B,) f32, not normalised, in units of rewards
    returns: torch.Tensor = Column()  # (B,) f32, advantages + values, in units of rewards
    rewards: torch.Tensor = Column()  # (B,) f32, after reward_fn
    episode_returns: np.ndarray = field(default_factory=lambda: np.empty(0))  # (E,) f64, undiscounted
    episode_lengths: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # (E,) int64, steps
    dones: torch.Tensor | None = Column(optional=True)  # (B,) bool, terminated or truncated; None: unknown
    taken: int | None = None  # environment steps taken for this batch; None: one for each row
    masks: torch.Tensor | None = Column(optional=True)  # (B, n_actions) bool, legal actions; None: all are
    states: torch.Tensor | None = Column(optional=True)  # (B, S) f32, the critic's input; None: `obs`
    is_first: torch.Tensor | None = Column(optional=True)  # (B,) bool, first step of an episode; None: unknown
    running: torch.Tensor | None = Column(optional=True)  # (T * M,) bool, the agent acts; None: there is no other row
    n_envs: int | None = None  # N; None: the rows are no whole sequences
    # (C, N, S) f32, on the host or the device: the memory before the first step of each of C parts of the rollout, of
    # equal length; None: the policy has no memory.
    memories: Any = None
    reused: bool = False  # whether the collector's next rollout overwrites the memory of these columns

    def __len__(self) -> int:
        return len(self.__dict__["actions"])

    @property
    def n_taken(self) -> int:
        """Environment steps taken for this batch: its length, without replayed rows."""
        return len(self) if self.taken is None else self.taken

    @property
    def players(self) -> list[Rollout | None]:
        """The rollout by players, as with several agents: one agent is one player."""
        return [self]

    @property
    def sequences(self) -> Sequences | None:
        """The rows as sequences of whole rollouts, for a policy with a memory; None without one."""
        if self.memories is None:
            return None
        import torch

        from rlox.nn.memory import Sequences

        state = torch.as_tensor(self.memories[0], device=self.is_first.device)  # type: ignore[union-attr]
        return Sequences(state, self.is_first, self.running)

    def explained_variance(self, errors: torch.Tensor | None = None) -> torch.Tensor:
        """Return the share of the returns' variance that the values explain, (): 1 is perfect, below 0 is worse than a
        constant, NaN if all returns are equal. `errors`, (B,), are by default the returns minus the values."""
        errors = self.returns - self.values if errors is None else errors
        total = self.returns.var()
        return 1.0 - errors.var() / total.where(total > 0.0, math.nan)

    def sample_minibatches(self, batch_size: int, shuffle: bool = True, rng: Rng | None = None) -> Iterator[Rollout]:
        """Yield every transition once, `batch_size` at a time; the last minibatch may be smaller, or one row larger.

        A single remaining row is added to the previous minibatch, because one row has no standard deviation (PyTorch
        returns NaN). A minibatch of one row therefore occurs only if `batch_size` is 1 or the rollout has one row.
        `rng` determines the order; without it, a generator seeded from PyTorch's is used.

        With a memory the minibatches consist of whole sequences, see `sample_sequences`: of as many as have at most
        `batch_size` rows, but at least one. Where agents do not act in every step, that is their mean number of rows.

        Raises
        ------
        ValueError
            If `batch_size` < 1.
        """
        if batch_size < 1:
            raise ValueError(f"sample_minibatches: batch_size must be >= 1, got {batch_size}")
        if self.memories is not None:
            n = len(self._whole_sequences())
            yield from self.sample_sequences(max(1, batch_size * n // max(1, len(self))), rng)
            return
        columns = self.columns()
        slices, order = list(minibatches(len(self), batch_size)), None
        if shuffle:
            order = draw_order(rng, len(self), self.obs.device)
        if self.obs.dim() > 2:
            # Avoid a second copy of a whole rollout of images.
            for rows in slices:
                yield Rollout(**{name: x[rows if order is None else order[rows]] for name, x in columns.items()})
            return
        if order is not None:
            # Gather once for the whole epoch; the minibatches are then slices without a copy.
            columns = {name: column[order] for name, column in columns.items()}
        sizes = [rows.stop - rows.start for rows in slices]
        for parts in zip(*(column.split(sizes) for column in columns.values()), strict=True):
            yield Rollout(**dict(zip(columns, parts, strict=True)))


RolloutBatch = Rollout  # its public name, `rlox.RolloutBatch`


def minibatches(n: int, batch_size: int) -> Iterator[slice]:
    """Yield the rows of each minibatch of `n` rows; a single remaining row is added to the previous minibatch.

    >>> [rows.stop - rows.start for rows in minibatches(129, 64)]
    [64, 65]
    """
    start = 0
    while start < n:
        stop = n if n - start - batch_size == 1 and batch_size > 1 else min(start + batch_size, n)
        yield slice(start, stop)
        start = stop


class _Sampler:
    """A policy in one rollout of T steps, for which it draws the noise of all steps at once.

    `memory` (N, S) and `is_first` (N,) are the state of the policy's memory, and where an episode starts; None without
    one. With a memory, `memories` has the states before every `length` steps.
    """

    def __init__(self, policy: Any, rng: Rng, n_steps: int, n: int, memory: Any, is_first: Any, length: int | None):
        self.policy = policy
        self.memory, self.is_first, self._length = memory, is_first, length or n_steps
        self.memories: list[np.ndarray] = []
        self.firsts: list[np.ndarray] = []  # (N,) bool of each step
        noise = np.empty((n_steps, *policy.noise_shape(n)), np.float32)
        policy.fill_noise(rng, noise)
        self.noise = policy.place(noise)
        self._given = noise.shape[-1] > 0
        self.drawn: list[Any] = []  # log-probabilities (N,) of each step, if the policy draws its own noise

    def act(self, obs: np.ndarray, t: int, mask: np.ndarray | None = None) -> np.ndarray:
        """Return the actions (N, …) of step `t`, of those that `mask` (N, n_choices) allows."""
        noise = self.noise[t] if self._given else self.noise
        if self.memory is None:
            actions = self.policy.act(Inputs(obs, mask), noise)[0]
        else:
            if t % self._length == 0:
                self.memories.append(np.where(self.is_first[:, None], np.float32(0), self.memory))
            self.firsts.append(self.is_first)
            actions, self.memory = self.policy.act(Inputs(obs, mask, self.memory, self.is_first), noise)
        if not self._given:
            self.drawn.append(self.policy.drawn_log_probs.float())
        return actions

    def take_log_probs(self) -> Any:
        """Return the log-probabilities (T * N,) from acting, where the policy drew its own noise."""
        import torch

        return torch.stack(self.drawn).reshape(-1).clone()

    def log_probs(
        self,
        seen: np.ndarray,
        actions: np.ndarray,
        masks: np.ndarray | None = None,
        is_first: np.ndarray | None = None,
    ) -> np.ndarray:
        """Return log-probabilities (B,) f32 of the actions (T, N, …) taken on the B observations `seen`.

        `masks` (T, N, n_choices) are the legal actions; with a memory, episodes start where `is_first` (T, N).
        """
        if self.drawn:
            return to_array(self.take_log_probs())
        taken = actions.reshape(-1, *actions.shape[2:])
        legal = None if masks is None else masks.reshape(-1, masks.shape[-1])
        if is_first is None:
            return to_array(self.policy.log_probs(seen, taken, legal))
        return to_array(self.policy.sequence_log_probs(seen, taken, self.memories[0], is_first.reshape(-1), legal))


@dataclass  # not frozen, which would add 1 us to the 90 us of an A2C round
class Steps:
    """T steps in N environments, and the policy that acted; with the observations and rewards to learn from."""

    sampler: _Sampler
    obs: np.ndarray  # (T + 1, N, *obs_shape); with `frames`, row t is t % 2
    frames: _FrameStore | None  # frames of stacked images, if they are stored by frame
    actions: np.ndarray  # (T, N, *action_shape), as sampled
    rewards: np.ndarray  # (T, N) f32
    terminated: np.ndarray  # (T, N) bool
    truncated: np.ndarray  # (T, N) bool
    ended: np.ndarray  # (T, N) bool: terminated or truncated
    limits: np.ndarray  # (K, 2) int64: step and environment of each truncation
    reached: np.ndarray  # (K, *obs_shape): observations that these steps led to
    episode_returns: np.ndarray  # (E,) f64, undiscounted, of the episodes that ended
    episode_lengths: np.ndarray  # (E,) int64
    masks: np.ndarray | None = None  # (T, N, n_choices) bool, the legal actions; None: all
    # With a memory: its state before the first step of each part of the rollout (C, N, S), where episodes start (T, N),
    # and its states after the last step (N, S) and after the truncated steps (K, S).
    memories: np.ndarray | None = None
    is_first: np.ndarray | None = None
    last_memory: np.ndarray | None = None
    limit_memories: np.ndarray | None = None

    def seen(self, device: str) -> Any:
        """Return the T * N observations of the actions: an array, or `rlox.nn.batch.FrameStacks`."""
        if self.frames is not None:
            return self.frames.rows(device)
        return self.obs[:-1].reshape(-1, *self.obs.shape[2:])

    def memory_before(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the states (N, S) of the memory before the first step, and where episodes start (T * N,) bool."""
        return self.memories[0], self.is_first.reshape(-1)  # type: ignore[index,union-attr]

    def memory_after(self) -> np.ndarray:
        """Return the states (N + K, S) of the memory after the last step, and after the K truncated ones."""
        return np.concatenate([self.last_memory, self.limit_memories])


class RolloutCollector(Collector):
    """Collector that steps N environments with a policy and returns rollouts with their advantages.

    PyTorch runs on as many CPU threads as the caller has set. For small networks, call ``torch.set_num_threads(1)``
    before a hand-written loop: it is several times faster (the algorithms' own trainings do so).

    Parameters
    ----------
    env_id : str, callable, gymnasium.Env or VecEnv
        A native id, any gymnasium id, a callable that returns a ``gymnasium.Env``, or (with one environment) an
        environment object. Or the N environments themselves, from `rlox.envs.make_vec_env`; `n_envs` and the arguments
        with which they are created have no effect then.
    n_envs : int
        Number of environments N.
    seed : int
        Seed of the environments and, for rlox's policies, of the actions.
    gamma, gae_lambda : float
        Discount and trace decay of the advantages (GAE, Schulman et al. 2016, arXiv:1506.02438).
    reward_fn : callable or PyCapsule, optional
        ``reward_fn(obs, actions, raw_rewards) -> rewards``, called once per step with (N, D), (N,) or (N, A), and (N,)
        arrays in the environment's units. The actions are the executed ones, clipped to their bounds. The returned
        rewards are for learning; episode statistics remain those of the environment. A PyCapsule ``rlox.reward.v1``
        (rlox_native.h) is called once per step in C. ``"sign"``, usual for Atari, takes the signs of the rewards.
    env_kwargs : dict, optional
        Keyword arguments of ``gymnasium.make``.
    device : str
        Device of the policy and of the batches.
    normalizer : VecNormalize, optional
        Normalises observations and (after `reward_fn`) rewards, and updates its statistics in each step.
    env_wrappers, env_workers, env_backend, remote
        gymnasium wrappers, worker processes, implementation of the environments, and workers on other machines (see
        `rlox.envs.make_vec_env`).
    """

    _where = "RolloutCollector.collect"
    noise_axis = 1  # the noise of a whole rollout is drawn at once
    sequence_length: int | None = None  # steps of the parts of a rollout, for a policy with a memory; None: all
    value_norm: Any = None  # `rlox.multi_agent.players.ValueNorm` that converts the critic's values to units of rewards

    def __init__(
        self,
        env_id: str | Callable[[], Any] | VecEnv,
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
        remote: RemoteConfig | None = None,
    ):
        super().__init__(
            env_id, n_envs, seed, reward_fn, env_kwargs, device, env_wrappers, env_workers, env_backend, remote
        )
        self.gamma = gamma
        self.gae_lambda = gae_lambda
        self.normalizer = normalizer
        self._memory: np.ndarray | None = None  # (N, S): state of the policy's memory; None without one
        self._is_first: np.ndarray | None = None  # (N,): where that state counts as the one before an episode

    def collect(self, policy: nn.Module | NativePolicy, n_steps: int) -> Rollout:
        """Take `n_steps` steps in every environment.

        A `NativePolicy` on native environments takes a single kernel call, unless Python code (a normalisation or a
        `reward_fn`) must see each step.

        A time limit is not a termination: the last step of a truncated episode bootstraps from the value of the
        observation that it led to, and no advantage reaches across the end of the episode.

        Returns
        -------
        Rollout
            B = n_steps * N transitions.

        Raises
        ------
        TypeError
            If the policy lacks one of the three methods (see `rlox.nn.policies`).
        ValueError
            If the policy's actions do not fit the environment, or `reward_fn` returns another shape.
        """
        steps = self.gather(policy, n_steps)
        n, cut, sampler, actions = self.n_envs, len(steps.limits) > 0, steps.sampler, steps.actions
        after = steps.obs[n_steps % len(steps.obs)]  # observations from which the next step starts
        if cut:
            after = np.concatenate([after, steps.reached])
        taken, masks = actions.reshape(-1, *actions.shape[2:]), steps.masks
        if masks is not None:
            masks = masks.reshape(-1, masks.shape[-1])
        if steps.memories is None:
            drawn = sampler.take_log_probs() if sampler.drawn else None
            seen, actions, log_probs, values, after_values = sampler.policy.evaluate_actions(
                steps.seen(self.device), taken, after, drawn, masks=masks
            )
        else:
            seen, actions, log_probs, values, after_values = sampler.policy.evaluate_sequences(
                steps.seen(self.device), taken, *steps.memory_before(), after, steps.memory_after(), masks=masks
            )
        # Advantages are in units of rewards, of which a value norm changes those that the critic predicts.
        estimates, ahead = to_array(values).reshape(n_steps, n), after_values
        if self.value_norm is not None:
            estimates, ahead = self.value_norm.denormalized(estimates), self.value_norm.denormalized(ahead)
        next_values = None
        if cut:
            next_values = np.zeros((n_steps, n), np.float32)
            next_values[steps.limits[:, 0], steps.limits[:, 1]] = ahead[n:]
        advantages, returns = compute_gae_batched_f32(
            steps.rewards,
            estimates,
            steps.terminated,
            ahead[:n],
            n_steps,
            self.gamma,
            self.gae_lambda,
            truncated=steps.truncated if cut else None,
            next_values=next_values,
        )
        place = sampler.policy.place
        return Rollout(
            obs=seen,
            actions=actions,
            log_probs=log_probs,
            values=values,
            advantages=place(advantages.reshape(-1)),
            returns=place(returns.reshape(-1)),
            rewards=place(steps.rewards.reshape(-1)),
            episode_returns=steps.episode_returns,
            episode_lengths=steps.episode_lengths,
            dones=place(steps.ended.reshape(-1)),
            masks=place(masks),
            is_first=None if steps.is_first is None else place(steps.is_first.reshape(-1)),
            n_envs=n,
            memories=steps.memories,
        )

    def gather(self, policy: nn.Module | NativePolicy, n_steps: int, whole: bool = False) -> Steps:
        """Collect a rollout without values and advantages. Raises the same errors as `collect`.

        With `whole`, stacked images are stored unchanged instead of by frame.
        """
        if n_steps < 1:
            raise ValueError(f"RolloutCollector.collect: n_steps must be >= 1, got {n_steps}")
        n, spec, normalizer = self.n_envs, self.spec, self.normalizer
        stacked = spec.n_stacked > 1 and not whole
        # Stacked images are only kept whole for this step and the next one; row t is `t % kept`.
        kept = 2 if stacked else n_steps + 1
        try:
            obs = np.empty((kept, n, *spec.obs_shape), spec.obs_dtype)
            actions = np.empty((n_steps, n, *spec.action_shape), spec.action_dtype)
            # (T, N) of every other array of a step, in the order in which the kernel takes them.
            results: dict[str, Any] = {name: np.empty((n_steps, n), dtype) for name, dtype in RESULTS.items()}
        except (MemoryError, ValueError, OverflowError) as e:  # the type depends on how much is requested
            raise ValueError(
                f"RolloutCollector.collect: n_steps must fit in memory, got {n_steps} in {n} environments ({e})"
            ) from e
        acting = policy if isinstance(policy, ActingPolicy) else self._adapt(policy)
        if not acting.state_dim:
            self._memory = self._is_first = None
        elif self._memory is None or self._memory.shape[1] != acting.state_dim:
            self._memory, self._is_first = acting.initial(n), np.ones(n, np.bool_)
        sampler = _Sampler(acting, self.rng, n_steps, n, self._memory, self._is_first, self.sequence_length)

        if self._raw is None or not getattr(self.env, "at_rest", True):  # or a step failed midway
            self._raw = self.env.reset_all()
            if acting.state_dim:
                sampler.is_first = np.ones(n, np.bool_)
            if not all_finite(self._raw):
                self._refuse_numbers("observations", self._raw, self.env_steps)
            if normalizer is not None:
                normalizer.update(self._raw)
        obs[0] = self._raw if normalizer is None or not normalizer.obs else normalizer.normalize(self._raw)
        frames = _FrameStore(n_steps, obs[0], spec.n_stacked) if stacked else None
        rewards, terminated, truncated, episode_return, episode_length = results.values()
        compiled = self.reward_fn is None or isinstance(self.reward_fn, NativeReward)
        masks, limit_memories = None, None
        if spec.masked:
            masks = np.empty((n_steps + 1, n, sum(spec.choices)), np.bool_)
            masks[0] = self.env.action_masks()
        plain = masks is None and normalizer is None
        if isinstance(policy, NativePolicy) and self.env.native and compiled and plain:
            try:
                net, noise = policy.net, sampler.noise
                limits, reached = net.rollout(self.env.stepper(), n_steps, noise, obs, actions, *results.values())
            except BaseException:
                self._raw = self.env.observe()  # the environments have moved, even if the rollout stopped midway
                raise
            self._raw = obs[n_steps].copy()
            if isinstance(self.reward_fn, NativeReward):
                for t in range(n_steps):
                    self.reward_fn.apply_(obs[t], spec.clip(actions[t]), rewards[t])
        else:
            try:
                limits, reached, limit_memories = self._step_by_step(sampler, obs, actions, frames, results, masks)
            except BaseException as e:
                if sampler.memory is not None:
                    self._raw = None  # new episodes start, since the memory's state is that before the rollout
                if isinstance(e, RuntimeError):
                    self._refuse_width(e, policy)
                raise

        rewards_f32 = rewards.astype(np.float32)
        if not (all_finite(obs) and all_finite(reached) and all_finite(rewards_f32)):
            self._require_finite(obs, limits, reached, rewards_f32)
        self.env_steps += n_steps * n
        ended = terminated | truncated
        some = b"\1" in ended.tobytes()  # fast check: in most short rollouts no episode ends
        steps = Steps(
            sampler,
            obs,
            frames,
            actions,
            rewards_f32,
            terminated,
            truncated,
            ended,
            limits,
            reached,
            episode_return[ended] if some else np.empty(0),
            episode_length[ended] if some else np.empty(0, np.int64),
            None if masks is None else masks[:-1],
        )
        if sampler.memory is not None:
            self._memory, self._is_first = sampler.memory, sampler.is_first  # for the next rollout
            steps.memories, steps.is_first = np.stack(sampler.memories), np.stack(sampler.firsts)
            steps.last_memory, steps.limit_memories = sampler.memory, limit_memories
        return steps

    def _require_finite(self, obs: np.ndarray, limits: np.ndarray, reached: np.ndarray, rewards: np.ndarray) -> None:
        """Raise if numbers of a rollout are not finite: observations, those `reached` at time limits, or rewards."""
        suffix = "" if self.normalizer is None else " after normalisation"
        for t, row in enumerate(rewards):
            step = self.env_steps + (t + 1) * self.n_envs
            # Observations after the step; those of stacked images are integers.
            if len(obs) > len(rewards) and not all_finite(obs[t + 1]):
                self._refuse_numbers("observations", obs[t + 1], step, suffix)
            if not all_finite(row):
                self._refuse_numbers("rewards", row, step, suffix)
            at_limit = np.zeros((self.n_envs, *self.spec.obs_shape), self.spec.obs_dtype)
            at_limit[limits[limits[:, 0] == t, 1]] = reached[limits[:, 0] == t]
            if not all_finite(at_limit):
                self._refuse_numbers("observations", at_limit, step, suffix)

    def _refuse_row(self, rewards: np.ndarray, step: int) -> None:
        """Raise if the observations after a step, or its rewards, cannot be used for normalisation."""
        if not all_finite(self._raw):
            self._refuse_numbers("observations", self._raw, step)
        if not np.abs(rewards).max() < _LARGEST:
            self._refuse_numbers("rewards", rewards, step, " and have a finite square")

    def _refuse_width(self, e: RuntimeError, policy: Any) -> None:
        """Raise a ValueError from `e` if the policy's first layer takes another number of observations.

        Only for errors that no environment raised.
        """
        from torch import nn

        module = getattr(policy, "module", policy)
        layers = module.modules() if isinstance(module, nn.Module) and not failure_of(e).what else ()
        first = next((one for one in layers if not [*one.children()] and [*one.parameters()]), None)
        taken = first.in_features if isinstance(first, nn.Linear) else self.spec.obs_dim
        if taken != self.spec.obs_dim:
            raise ValueError(
                f"{self._where}: the policy must take the {self.spec.obs_dim} observations of {self.name}, got a "
                f"policy whose first layer takes {taken}"
            ) from e

    def _adapt(self, policy: nn.Module) -> ActingPolicy:
        from rlox.nn.policies import check_policy

        check_policy(policy, "RolloutCollector.collect")
        return acting_policy(policy, self.device)

    def _step_by_step(
        self,
        sampler: _Sampler,
        obs: np.ndarray,
        actions: np.ndarray,
        frames: _FrameStore | None,
        results: dict[str, np.ndarray],
        masks: np.ndarray | None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Fill the arrays and return the same as the kernel's ``rollout``, and states of a memory.

        That is the truncated steps and the observations that they led to, with the states after them.
        """
        spec, normalizer, kept = self.spec, self.normalizer, len(obs)
        rewards, terminated, truncated = (results[name] for name in ("rewards", "terminated", "truncated"))
        normalize_obs = normalizer is not None and normalizer.obs
        final_obs = np.empty(obs.shape[1:], spec.obs_dtype)
        limits, reached = [np.empty((0, 2), np.int64)], [np.empty((0, *spec.obs_shape), spec.obs_dtype)]
        memories = None if sampler.memory is None else [sampler.memory[:0]]
        t, action = 0, None
        try:
            with sampler.policy.context():
                for t in range(len(actions)):
                    action = sampler.act(obs[t % kept], t, None if masks is None else masks[t])
                    if action.shape != actions.shape[1:]:
                        self._refuse_action(action)
                    actions[t] = action
                    # The log-probability belongs to the sampled action; the executed action is clipped.
                    taken, after = spec.clip(actions[t]), obs[(t + 1) % kept]
                    row = {name: array[t] for name, array in results.items()}
                    if masks is not None:
                        row["action_mask"] = masks[t + 1]
                    self.env.step_all(taken, {"obs": after, "final_obs": final_obs, **row})
                    before, self._raw = self._raw, after.copy() if normalize_obs else after
                    if isinstance(self.reward_fn, NativeReward):
                        self.reward_fn.apply_(before, taken, rewards[t])
                    elif self.reward_fn is not None:
                        rewards[t] = self._shape_rewards(before, taken, rewards[t])
                    if normalizer is not None:
                        # Otherwise the statistics would never be finite again.
                        self._refuse_row(rewards[t], self.env_steps + (t + 1) * self.n_envs)
                        normalizer.update(self._raw)
                        rewards[t] = normalizer.normalize_rewards(rewards[t], terminated[t] | truncated[t])
                        if normalize_obs:
                            after[:] = normalizer.normalize(self._raw)
                    if frames is not None:
                        frames.append(after, terminated[t] | truncated[t])
                    if sampler.memory is not None:
                        sampler.is_first = terminated[t] | truncated[t]
                    if b"\1" in truncated[t].tobytes():
                        which = np.flatnonzero(truncated[t])
                        states = final_obs[which]
                        limits.append(np.stack([np.full_like(which, t), which], 1))
                        reached.append(normalizer.normalize(states) if normalize_obs and all_finite(states) else states)  # type: ignore[union-attr]
                        if memories is not None:
                            memories.append(sampler.memory[which])
        except (RuntimeError, ValueError) as e:
            # Observations that are not finite cause such actions, so they are reported first.
            if normalizer is None:
                self._require_finite(obs[: t + 1], np.concatenate(limits), np.concatenate(reached), rewards[:t])
            self._refuse_policy(e, action)
            raise
        self._raw = self._raw.copy()
        return np.concatenate(limits), np.concatenate(reached), None if memories is None else np.concatenate(memories)

    # ---- checkpoints

    def state(self) -> dict[str, np.ndarray] | None:
        """Return an exact snapshot of the environments and of the policy's memory in them, see `Collector.state`."""
        saved = super().state()
        if saved is None or self._memory is None:
            return saved
        return {**saved, _MEMORY: self._memory.copy(), _IS_FIRST: self._is_first.copy()}  # type: ignore[union-attr]

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        memory, is_first = state.get(_MEMORY), state.get(_IS_FIRST)
        if memory is not None:
            fits = memory.ndim == 2 and memory.dtype == np.float32 and len(memory) == self.n_envs
            if not fits or is_first is None or (is_first.shape, is_first.dtype) != ((self.n_envs,), np.bool_):
                raise ValueError(f"{type(self).__name__}.set_state: the memory must have a row for each environment")
        super().set_state({name: x for name, x in state.items() if name not in (_MEMORY, _IS_FIRST)})
        self._memory, self._is_first = memory, is_first
