"""Evaluation of several agents with whole episodes in a separate environment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlox.checkpoint.streams import Stream
from rlox.evaluation.episodes import Episodes, Evaluation
from rlox.kernels.rng import Rng
from rlox.multi_agent.acting import Actors
from rlox.multi_agent.players import AgentReturns
from rlox.multi_agent.spec import MultiAgentSpec
from rlox.multi_agent.vec_env import make_multi_agent_env

_SIDE_BY_SIDE = 100  # maximum number of simultaneous native episodes


@dataclass(frozen=True)
class AgentsEvaluation(Evaluation):
    """Evaluation of several agents; `returns` are sums of the undiscounted returns of all agents."""

    agent_returns: np.ndarray = field(default_factory=lambda: np.empty((0, 0)))  # (E, A) f64, of each agent
    by_name: dict[str, float] = field(default_factory=dict)  # mean returns of agents, and of groups of several agents

    def summary(self) -> dict[str, float | int]:
        """Return the summary of `Evaluation`, and ``return/<name>`` of each agent and group."""
        return {**super().summary(), **{f"return/{name}": value for name, value in self.by_name.items()}}


def evaluate_agents(
    policy: Actors,
    env_id: str | Callable[..., Any],
    n_episodes: int = 20,
    seed: int = 10_000,
    deterministic: bool = True,
    env_kwargs: dict[str, Any] | None = None,
    wrappers: Any = (),
    frames: Callable[[np.ndarray], None] | None = None,
    render: bool = False,
    max_steps: int | None = None,
    longest: int | None = None,
) -> AgentsEvaluation:
    """Run episodes of several agents; arguments and errors as for `rlox.evaluation.episodes.evaluate`.

    The policies of `policy` act with their modes if `deterministic`, otherwise with samples. `wrappers` must be empty,
    and `env_id` and `env_kwargs` are those of `rlox.multi_agent.make_multi_agent_env`. Native episodes run
    simultaneously; `frames` is called with each picture of the first episode, (H, W, 3) uint8.
    """
    episodes = Episodes(env_id, n_episodes, seed, deterministic, frames, render, max_steps, longest)
    n_episodes, seed, mode = episodes.n_episodes, episodes.seed, episodes.render_mode
    if wrappers:
        raise ValueError(f"evaluate: wrappers must be empty with several agents, got {list(wrappers)}")
    kwargs = dict(env_kwargs or {}) if mode is None else {**(env_kwargs or {}), "render_mode": mode}
    backend = "auto" if mode is None else "pettingzoo"
    env: Any = make_multi_agent_env(env_id, 1, seed, kwargs, backend=backend)
    spec: MultiAgentSpec = env.spec
    rng = Rng(seed, Stream.EVALUATION)
    returns, lengths, n_cut = np.zeros((n_episodes, len(spec.agents))), np.zeros(n_episodes, np.int64), 0
    done = 0
    try:
        while done < n_episodes:
            n = min(_SIDE_BY_SIDE, n_episodes - done) if env.native else 1
            if env.native:
                # Each batch of episodes has its own seed; each environment runs one episode.
                env.close()
                env = make_multi_agent_env(env_id, n, (seed + done) % 2**64, kwargs, backend=backend)
            # PettingZoo has no common name for a limit, which ends the episodes of training, too.
            limit = episodes.step_limit(env.kernel.max_episode_steps if env.native else None)
            rows, running, step = slice(done, done + n), np.ones(n, bool), env.reset_all()
            memories = policy.begin(n)
            if done == 0:
                episodes.show(env)
            while running.any():
                step = env.step_all(policy.actions(step, memories, episodes.deterministic, rng))
                for group, rewards in zip(spec.groups, step.rewards, strict=True):
                    returns[rows][np.ix_(running, np.array(group.slots))] += rewards[running]
                lengths[rows][running] += 1
                if done == 0 and not step.ended[0]:  # otherwise its next episode has already started
                    episodes.show(env)
                running &= ~step.ended
                if running.any() and lengths[rows][running].max() >= limit:
                    episodes.warn_of_cut(limit)
                    n_cut += int(running.sum())
                    break
            done += n
    finally:
        env.close()
    episodes.require_finite(returns, lengths)
    return AgentsEvaluation(
        returns.sum(1), lengths, seed, deterministic, n_cut, returns, AgentReturns(spec).by_name(returns.mean(0))
    )
