"""Collection from several agents: each life of an agent, from its first step to its end, becomes an episode."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlox.checkpoint.streams import Stream
from rlox.config import nearest
from rlox.envs import env_name
from rlox.kernels.rng import Rng
from rlox.multi_agent import make_multi_agent_env
from rlox.multi_agent.spec import MultiAgentSpec
from rlox.offline.acting import RandomPolicy, share_policy
from rlox.offline.arrow import block_rows
from rlox.offline.rows import AGENT, Block, allocate_block

_PATIENCE = 10_000  # steps without an action of any chosen agent after which an error is raised


class AgentEpisodes:
    """N environments with several agents, of which only the chosen agents are recorded.

    `chosen` contains names of agents with equal spaces, or of their group; None records all agents, which must then
    have equal spaces. The other arguments are those of `rlox.multi_agent.make_multi_agent_env`. `spec` describes
    observations and actions of one agent; `agents` are the names of the M recorded agents.

    Raises ValueError, with the groups, for an unknown name, or agents of different groups.
    """

    def __init__(
        self,
        env_id: str | Callable[..., Any],
        n_envs: int,
        seed: int,
        kwargs: dict[str, Any] | None,
        chosen: Sequence[str] | None = None,
    ):
        self._name = env_name(env_id)
        self.env = make_multi_agent_env(env_id, n_envs, seed, kwargs)
        try:
            self._group, self._members = _choose_group(self.env.spec, chosen)
        except ValueError:
            self.env.close()
            raise
        group = self.env.spec.groups[self._group]
        self.spec = group.spec
        self.agents = tuple(group.agents[a] for a in self._members)

    def gather(
        self,
        algorithm: Any,
        count: int,
        seed: int,
        deterministic: bool,
        push: Callable[[int, Block], None],
        progress: Callable[[int], None] | None,
    ) -> list[float]:
        """Take steps until there are `count` rows. Returns the returns of completed lives.

        Where agents take turns, a row reaches from a turn of an agent to its next one, or to the end of its life; its
        reward is the sum of all rewards meanwhile.

        `algorithm` acts for all agents; None takes uniformly random legal actions. `push` is called with the number of
        an agent, environment * M + its index, and its next rows; `progress` with the number of new rows.
        """
        spec, env, g, members = self.spec, self.env, self._group, self._members
        rng, policy = Rng(seed, Stream.ACTION), _load_acting(algorithm, env.spec, self._name)
        n, m = env.n_envs, len(members)
        row_bytes = 2 * math.prod(spec.obs_shape) * np.dtype(spec.obs_dtype).itemsize + 4 * (spec.act_dim or 2) + 16
        n_rows = max(1, min(1024, block_rows(row_bytes) // (n * m)))
        block = allocate_block(spec, (n_rows, n, m))
        block.pop("next_action_masks", None)  # unknown where an agent's life was cut
        turns, begun = env.spec.turns, np.zeros((n, m), np.bool_)  # rows that have no end yet ...
        open_rows = {name: np.zeros_like(block[name][0]) for name in block}  # ... and what is known of them
        lived = np.empty((n_rows, n, m), np.bool_)
        running, returns = np.zeros((n, m)), []
        taken = idle = 0
        step, memories = env.reset_all(), policy.begin(n)
        while taken < count:
            used = reported = 0
            while used < n_rows and taken + reported < count:
                alive = step.alive[g][:, members]
                idle = 0 if alive.any() else idle + 1
                if idle == _PATIENCE:
                    raise ValueError(
                        f"collect: agents must act in the environment, got {', '.join(self.agents)}, of which none did "
                        f"in {_PATIENCE:,} steps of {self._name}"
                    )
                actions = policy.actions(step, memories, deterministic, rng)
                open_rows["obs"][alive] = step.obs[g][:, members][alive]
                open_rows["actions"][alive] = actions[g][:, members][alive]
                if spec.masked:
                    open_rows["action_masks"][alive] = step.masks[g][:, members][alive]
                begun |= alive
                step = env.step_all(actions)
                rewards, terminated, truncated = (
                    column[g][:, members] for column in (step.rewards, step.terminated, step.truncated)
                )
                ended = terminated | truncated
                open_rows["rewards"] += rewards
                open_rows["terminated"][...], open_rows["truncated"][...] = terminated, truncated
                open_rows["next_obs"][...] = step.final_obs[g][:, members]
                complete = begun
                if turns:
                    complete = begun & (ended | step.alive[g][:, members])
                    goes_on = complete & ~ended
                    open_rows["next_obs"][goes_on] = step.obs[g][:, members][goes_on]
                for name, values in open_rows.items():
                    block[name][used] = values
                # The last step may give more rows than are needed.
                order = np.cumsum(complete).reshape(complete.shape)
                kept = lived[used] = complete & (order <= count - taken - reported)
                begun = begun & ~complete
                open_rows["rewards"][~begun] = 0.0
                running += rewards
                returns += running[ended & kept].tolist()
                running[ended] = 0.0
                reported += int(kept.sum())
                used += 1
            for i in range(n):
                for a in range(m):
                    rows = np.flatnonzero(lived[:used, i, a])
                    own = {name: column[rows, i, a] for name, column in block.items()}
                    push(i * m + a, {**own, AGENT: np.full(len(rows), a, np.int32)})
            taken += reported
            if progress is not None:
                progress(reported)
        return returns

    def close(self) -> None:
        """End the environments."""
        self.env.close()


def _load_acting(algorithm: Any, spec: MultiAgentSpec, name: str) -> Any:
    """Return an object that acts for all agents as `rlox.multi_agent.acting.Actors` do."""
    if algorithm is None:
        return RandomPolicy(spec, "collect")
    if getattr(algorithm, "several", False):
        theirs = algorithm.collector.agents
        if theirs.groups != spec.groups:
            raise ValueError(
                f"collect: env must have the agents that {algorithm.name} was trained for, {_spell(theirs)}, with "
                f"their spaces, got {name} with {_spell(spec)}"
            )
        return algorithm.actor
    if getattr(getattr(algorithm, "config", None), "uses_dataset", "") == "must":
        return share_policy(algorithm, spec, "collect")
    kind = getattr(algorithm, "name", type(algorithm).__name__)
    raise ValueError(
        f"collect: a policy must act for several agents in {name}, but {kind} acts for one; use a "
        "checkpoint of mappo, or of bc, td3_bc, iql or cql, whose policy then acts for all agents of its kind"
    )


def _spell(spec: MultiAgentSpec) -> str:
    return ", ".join(f"{group.name} ({', '.join(group.agents)})" for group in spec.groups)


def _choose_group(spec: MultiAgentSpec, names: Sequence[str] | None) -> tuple[int, list[int]]:
    """Return the index of the group of the agents `names`, and their indices in it. Group names take precedence."""
    if names is None:
        if len(spec.groups) > 1:
            raise ValueError(
                "collect: agents must name a group, or agents of one group, if agents have different spaces, got "
                f"none; the groups are {_spell(spec)}; try {spec.groups[0].name}"
            )
        return 0, list(range(spec.n_agents))
    known = {agent: {(g, a)} for g, group in enumerate(spec.groups) for a, agent in enumerate(group.agents)}
    known |= {group.name: {(g, a) for a in range(len(group.agents))} for g, group in enumerate(spec.groups)}
    members: set[tuple[int, int]] = set()
    for name in names:
        if name not in known:
            raise ValueError(
                f"collect: agents must be among {_spell(spec)}, got {name!r}; {nearest(name, list(known))}"
            )
        members |= known[name]
    groups = {g for g, _ in members}
    if len(groups) != 1:
        got = ", ".join(names) or "none"
        raise ValueError(f"collect: agents must be of one group, whose spaces are equal, got {got}; {_spell(spec)}")
    return groups.pop(), sorted(a for _, a in members)
