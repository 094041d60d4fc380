"""Specification of an environment with several agents, and the arrays of a step in N environments."""

from __future__ import annotations

import math
import os
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlox.envs.spec import EnvSpec, check_actions


@dataclass(frozen=True)
class Group:
    """Agents with equal observation and action spaces."""

    name: str  # "agents" for the only group, else the common prefix of its agents' names, or the name of its only agent
    agents: tuple[str, ...]  # names, in the order of possible_agents
    slots: tuple[int, ...]  # their indices in `MultiAgentSpec.agents`
    spec: EnvSpec  # of one agent


@dataclass(frozen=True)
class MultiAgentSpec:
    """All possible agents, A in G groups, and the state that a central critic sees."""

    agents: tuple[str, ...]  # all possible agents, in the order of possible_agents
    groups: tuple[Group, ...]  # every agent is in exactly one
    state_dim: int  # S: length of the flat f32 state
    state_source: str  # "environment": its state(); "observations": of all agents in order, zeros for dead agents
    turns: bool = False  # whether agents take turns: one acts in each step, and the others live on

    @property
    def n_agents(self) -> int:
        """Number of agents A."""
        return len(self.agents)

    @property
    def masked(self) -> tuple[bool, ...]:
        """By group: whether the environment offers masks of legal actions."""
        return tuple(group.spec.masked for group in self.groups)


# Arrays of a step that exist once for each group.
_BY_GROUP = ("obs", "alive", "masks", "rewards", "terminated", "truncated", "final_obs")


@dataclass
class MultiAgentStep:
    """The result of ``reset_all`` and ``step_all`` of N environments; group g has A_g agents.

    The first four attributes are the inputs of the next actions, after same-step auto-reset. The others describe the
    last step; after ``reset_all`` they are zero (`episode_returns` nan).
    """

    obs: list[np.ndarray]  # by group (N, A_g, *obs_shape) f32 or uint8 images; 0 for dead agents
    alive: list[np.ndarray]  # by group (N, A_g) bool: whether the agent acts next
    masks: list[
        np.ndarray | None
    ]  # by group (N, A_g, n_choices) bool: legal actions, all of them for agents that do not act; or None
    state: np.ndarray  # (N, S) f32
    rewards: list[np.ndarray]  # by group (N, A_g) f64; 0 for agents that were not alive before the step
    terminated: list[np.ndarray]  # by group (N, A_g) bool: ended by the task; only of agents that were alive before
    truncated: list[np.ndarray]  # by group (N, A_g) bool: cut by a time limit of its own
    final_obs: list[np.ndarray]  # like obs, but before any reset; 0 if the step led to no observation
    final_state: np.ndarray  # (N, S) f32, before any reset; of joined observations, 0 for agents that terminated
    ended: np.ndarray  # (N,) bool: no agent was left, and the environment was reset
    episode_returns: np.ndarray  # (N, A) f64: undiscounted return of each agent over the episode that ended; else nan
    episode_lengths: np.ndarray  # (N,) int64: steps of the episode that ended; else 0

    @classmethod
    def empty(cls, spec: MultiAgentSpec, n: int) -> MultiAgentStep:
        """Return new arrays for `n` environments: zeros, all masks True, returns nan."""
        step = cls.over({key: np.zeros(*like) for key, like in step_layout(spec, n).items()})
        step.clear()
        return step

    @classmethod
    def over(cls, arrays: Mapping[str, np.ndarray]) -> MultiAgentStep:
        """Return a step that uses the arrays with the names of `step_layout`."""
        n_groups = sum(key.startswith("obs.") for key in arrays)
        by_group: dict[str, Any] = {name: [arrays.get(f"{name}.{g}") for g in range(n_groups)] for name in _BY_GROUP}
        whole: dict[str, Any] = {key: array for key, array in arrays.items() if "." not in key}
        return cls(**by_group, **whole)

    def clear(self) -> None:
        """Reset all arrays to zeros, masks to True, and returns to nan."""
        for array in self._arrays():
            array.fill(0)
        for mask in self.masks:
            if mask is not None:
                mask.fill(True)
        self.episode_returns.fill(np.nan)

    def take(self, other: MultiAgentStep) -> None:
        """Copy the numbers of `other`, a step of the same environments, into these arrays."""
        for mine, theirs in zip(self._arrays(), other._arrays(), strict=True):
            mine[...] = theirs

    def _arrays(self) -> Iterable[np.ndarray]:
        for value in vars(self).values():
            yield from [array for array in value if array is not None] if isinstance(value, list) else [value]


def step_layout(spec: MultiAgentSpec, n: int) -> dict[str, tuple[tuple[int, ...], type]]:
    """Return shape and dtype of every array of a `MultiAgentStep` of `n` environments, by name.

    Names of a group's arrays end in its number.
    """
    arrays: dict[str, tuple[tuple[int, ...], type]] = {}
    for g, group in enumerate(spec.groups):
        rows = (n, len(group.agents))
        obs = ((*rows, *group.spec.obs_shape), group.spec.obs_dtype)
        arrays |= {f"obs.{g}": obs, f"final_obs.{g}": obs, f"rewards.{g}": (rows, np.float64)}
        arrays |= {f"{name}.{g}": (rows, np.bool_) for name in ("alive", "terminated", "truncated")}
        if group.spec.masked:
            arrays[f"masks.{g}"] = ((*rows, sum(group.spec.choices)), np.bool_)
    return arrays | {
        "state": ((n, spec.state_dim), np.float32),
        "final_state": ((n, spec.state_dim), np.float32),
        "ended": ((n,), np.bool_),
        "episode_returns": ((n, len(spec.agents)), np.float64),
        "episode_lengths": ((n,), np.int64),
    }


def action_layout(spec: MultiAgentSpec, n: int) -> dict[str, tuple[tuple[int, ...], type]]:
    """Return shape and dtype of the actions of `n` environments, by group."""
    return {
        f"actions.{g}": ((n, len(group.agents), *group.spec.action_shape), group.spec.action_dtype)
        for g, group in enumerate(spec.groups)
    }


def group_agents(agents: Sequence[str], kinds: Sequence[Hashable], specs: Sequence[EnvSpec]) -> tuple[Group, ...]:
    """Group A agents, given by name, kind and specification; those of one kind form a group."""
    slots: dict[Hashable, list[int]] = {}
    for slot, kind in enumerate(kinds):
        slots.setdefault(kind, []).append(slot)
    groups: list[Group] = []
    for members in slots.values():
        names = tuple(agents[slot] for slot in members)
        prefix = os.path.commonprefix(names)  # noqa: RUF071 (of strings)
        common = prefix.rstrip("_-. 0123456789") if len(names) > 1 else names[0]
        # If the prefix is already used, the group is named after its first agent.
        used = {group.name for group in groups}
        name = common if common and common not in used else names[0]
        while name in used:
            name += "_"
        groups.append(Group("agents" if len(slots) == 1 else name, names, tuple(members), specs[members[0]]))
    return tuple(groups)


def check_group_actions(
    spec: MultiAgentSpec, actions: Sequence[Any], n: int, alive: Sequence[np.ndarray] | None, where: str
) -> list[np.ndarray]:
    """Check `actions` of N environments by group, and return them as (N, A_g, …) int64 or f32.

    Rows of dead agents are ignored.

    Raises
    ------
    TypeError
        If choices are not integers.
    ValueError
        If the number of groups or actions is wrong, or a living agent's action is out of range or not a number. The
        message names the group.
    """
    if len(actions) != len(spec.groups):
        names = ", ".join(group.name for group in spec.groups)
        raise ValueError(
            f"{where}: actions must be {len(spec.groups)} arrays, one for each of {names}, got {len(actions)}"
        )
    checked = []
    for g, group in enumerate(spec.groups):
        rows, n_agents = np.asarray(actions[g]), len(group.agents)
        shape = (n, n_agents, *group.spec.action_shape)
        if rows.size != math.prod(shape):
            raise ValueError(f"{where}: actions of {group.name} must have shape {shape}, got {rows.shape}")
        rows = rows.reshape(shape)
        if alive is not None and not alive[g].all():
            rows = rows.copy()
            rows[~alive[g]] = 0
        checked.append(check_actions(group.spec, rows, n * n_agents, f"{where}: {group.name}").reshape(shape))
    return checked
