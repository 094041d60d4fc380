"""An actor: environments and a policy that collect rollouts with the weights they are given."""

from __future__ import annotations

import time

import numpy as np

from rlox.collectors import RolloutCollector
from rlox.collectors.vec_normalize import VecNormalize
from rlox.distributed.protocol import ActorPlan, Trajectory, Weights
from rlox.nn.modules import generator_states, set_generator_states

_RNG, _SUMS, _TORCH = "rng", "discounted_sums", "torch"  # in an actor's state


class Actor:
    """Collects rollouts, in the same way wherever it runs (thread, process, Ray, worker).

    It follows `plan`, except that the weights of its policy are replaced. `index` is its number, and `start` how many
    times it was started before. `alone` says that nothing else in this process draws from PyTorch's generator, from
    which a custom policy samples; the actor then seeds and saves that generator. Raises the errors of
    `rlox.collectors.RolloutCollector`.
    """

    def __init__(self, plan: ActorPlan, index: int, start: int = 0, alone: bool = False):
        c = plan.config
        self.policy = plan.policy
        self.n_steps = plan.n_steps
        custom, seed = getattr(plan.policy, "custom", False), plan.seed_of(index, plan.start + start)
        self._exact_policy, self._has_torch = alone or not custom, alone and custom
        if self._has_torch:
            import torch

            torch.manual_seed(seed)
        self.collector = RolloutCollector(
            plan.env_id,
            plan.n_envs,
            seed,
            reward_fn=plan.reward_fn,
            env_kwargs=plan.env_kwargs,
            env_wrappers=plan.env_wrappers,
            env_workers=plan.env_workers,
            env_backend=plan.env_backend,
            remote=plan.remote,
        )
        self.collector.sequence_length = plan.sequence_length
        if c.normalize_obs or c.normalize_rewards:
            spec = self.collector.spec
            self.collector.normalizer = VecNormalize(
                plan.n_envs, spec.obs_shape, c.gamma, c.normalize_obs, c.normalize_rewards, c.clip_obs, c.clip_rewards,
                spec.part if spec.rounded else None,
            )  # fmt: skip

    def rollout(self, weights: Weights) -> Trajectory:
        """Collect one rollout with `weights`; raises the errors of `rlox.collectors.RolloutCollector.collect`."""
        began = time.perf_counter()
        self.policy.load(weights.policy, "Actor.rollout: the policy")
        normalizer = self.collector.normalizer
        before = {}
        if normalizer is not None:
            normalizer.set_state({**normalizer.state(), **weights.normalization}, returns=False)
            before = normalizer.state()
        steps = self.collector.gather(self.policy, self.n_steps, whole=True)
        log_probs = steps.sampler.log_probs(steps.seen("cpu"), steps.actions, steps.masks, steps.is_first)
        return Trajectory(
            steps.obs,
            steps.actions,
            log_probs.reshape(steps.rewards.shape),
            steps.rewards,
            steps.terminated,
            steps.truncated,
            steps.limits,
            steps.reached,
            steps.episode_returns,
            steps.episode_lengths,
            weights.version,
            time.perf_counter() - began,
            {} if normalizer is None else normalizer.since(before),
            steps.masks,
            steps.memories,
            steps.is_first,
            steps.limit_memories,
        )

    @property
    def exact(self) -> bool:
        """Whether `state` contains everything that its rollouts depend on."""
        return self.collector.restorable and self._exact_policy

    def state(self) -> dict[str, np.ndarray]:
        """Return a snapshot of its environments, memory, generators and discounted sums; empty before any rollout."""
        state = dict(self.collector.state() or {})
        if not state:
            return {}
        rng = self.collector.rng.get_state()
        state[_RNG] = np.array([rng["key"], rng["position"]], np.uint64)
        if self.collector.normalizer is not None:
            state[_SUMS] = self.collector.normalizer.returns.copy()
        if self._has_torch:
            state.update(generator_states("cpu"))
        return state

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Continue from the result of `state`; raises a ValueError or TypeError if that does not fit."""
        if not state:
            return
        rest = dict(state)
        self.collector.rng.set_state(dict(zip(("key", "position"), map(int, rest.pop(_RNG)), strict=True)))
        returns, generator = rest.pop(_SUMS, None), rest.pop(_TORCH, None)
        if returns is not None and self.collector.normalizer is not None:
            self.collector.normalizer.returns = returns.copy()
        self.collector.set_state(rest)
        if self._has_torch and generator is not None:
            set_generator_states({_TORCH: generator}, "cpu")

    def close(self) -> None:
        """Close its environments."""
        self.collector.close()
