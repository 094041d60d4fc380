"""Environments with several agents, trained together or evaluated after learning from a dataset."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rlox.config import RunConfig
from rlox.envs.registry import is_native_multi_agent
from rlox.multi_agent import make_multi_agent_env
from rlox_cli.families.environment import Environment, OnPolicy, describe_observations, spell
from rlox_cli.families.offline import Offline


class _SeveralAgents(Environment):
    """What differs if the environment has several agents, whatever learns."""

    def time_limit_warnings(self, algorithm: Any, config: RunConfig) -> Iterator[str]:
        yield from ()

    def make_env(self, algorithm: Any) -> Any:
        return make_multi_agent_env(algorithm.env_id, 1, algorithm.seed, algorithm.env_options.kwargs)

    def limit_of(self, env: Any, algorithm: Any) -> int | None:
        # PettingZoo has no common name for it; this is the one in MPE and SISL.
        own = env.kernel.max_episode_steps if env.native else getattr(env, "max_episode_steps", None)
        limit = algorithm.env_options.kwargs.get("max_cycles") or own
        return limit if isinstance(limit, int) and limit > 0 else None

    def probe(self, algorithm: Any, config: RunConfig) -> Any:
        from rlox_cli.families.probe import probe_agents

        return probe_agents(self, algorithm, config)

    def evaluation_costs(self, algorithm: Any, config: RunConfig) -> tuple[np.ndarray, np.ndarray, bool]:
        from rlox_cli.families.estimate import measure_call

        limit = config.eval.max_steps or 1000
        took, played = measure_call(lambda: algorithm.evaluate(2, config.eval_seed, max_steps=limit))
        side_by_side = is_native_multi_agent(config.env.id)
        n_steps = played.lengths.max() if side_by_side else played.lengths.sum()
        return np.zeros(2), took / max(1, int(n_steps)), side_by_side


class Agents(_SeveralAgents, OnPolicy):
    """Algorithms that train several agents of one environment together."""

    several_transitions = True  # one for each agent

    def describe_spaces(self, algorithm: Any) -> list[tuple[str, str]]:
        """Return a line for each policy."""
        lines = [
            (
                "agents",
                f"{player.name}: {spell(len(player.agents), 'agent')}; {describe_observations(player.spec)}; "
                f"{player.spec.describe_actions()}{player.spec.describe_masks()}",
            )
            for player in algorithm.players
        ]
        if algorithm.config.critic == "central":
            agents = algorithm.collector.agents
            source = "of the environment" if agents.state_source == "environment" else "all observations joined"
            lines.append(("state", f"{spell(agents.state_dim, 'number')}, {source}"))
        return lines


class OfflineAgents(_SeveralAgents, Offline):
    """Algorithms that learn from a dataset, for an environment with several agents."""

    def warnings(self, algorithm: Any, config: RunConfig, folder: Path) -> Iterator[str]:
        yield from super().warnings(algorithm, config, folder)
        policy = algorithm._evaluation_arguments(1, 0)["policy"]
        if policy.others:
            played = ", ".join(agent for group in policy.groups for agent in group.agents)
            yield (
                f"in evaluations the learned policy acts for {played}; the actions of {', '.join(policy.others)} are "
                "random, since their spaces differ; the return is that of the former"
            )
