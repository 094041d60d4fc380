"""Players: the agents of each policy, the inputs of its networks, and running moments of its returns."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlox.config import MAPPOConfig
from rlox.envs.spec import EnvSpec
from rlox.multi_agent.spec import MultiAgentSpec

DECAY = 0.99999  # of the running moments, per minibatch
LEAST_VARIANCE = 1e-2
LEAST_WEIGHT = 1e-5


@dataclass(frozen=True)
class Player:
    """Agents that act with one policy: a group that shares its parameters, or one agent."""

    name: str
    group: int  # index of its group
    members: tuple[int, ...]  # indices of its agents in the arrays of the group
    slots: tuple[int, ...]  # their indices among all agents
    agents: tuple[str, ...]  # their names
    spec: EnvSpec  # of one agent
    n_ids: int  # length of the one-hot vector that identifies an agent; 0: networks do not see it
    state_dim: int | None  # input size of a central critic, including the one-hot vector; None: the critic is local

    @property
    def obs_dim(self) -> int:
        """Size of the actor's input."""
        return self.spec.obs_dim + self.n_ids

    @property
    def network_spec(self) -> EnvSpec:
        """`spec`, with the actor's input as the observation."""
        if not self.n_ids:
            return self.spec
        return replace(self.spec, obs_shape=(self.obs_dim,), obs_dtype=np.float32)

    def pick_rows(self, by_group: Sequence[Any]) -> Any:
        """Return this player's rows (N * A, …) of arrays by group (N, A_g, …); None if the group has no array."""
        array = by_group[self.group]
        if array is None:
            return None
        own = array if len(self.members) == array.shape[1] else array[:, self.members]
        return own.reshape(-1, *own.shape[2:])

    def put_rows(self, by_group: list[Any], rows: np.ndarray, n_group: int) -> None:
        """Write this player's rows (N * A, …) into the array of its group, which has (N, `n_group`, …)."""
        own = rows.reshape(-1, len(self.members), *rows.shape[1:])
        if len(self.members) == n_group:
            by_group[self.group] = own
            return
        if by_group[self.group] is None:
            by_group[self.group] = np.zeros((len(own), n_group, *rows.shape[1:]), rows.dtype)
        by_group[self.group][:, self.members] = own

    def identify(self, rows: np.ndarray, who: np.ndarray | None = None) -> np.ndarray:
        """Return the inputs of a network for observations or states (B, …): with `n_ids`, each followed by its agent.

        The rows are of the agents `who` (B,), indices of members; None: of all of them in turn.
        """
        if not self.n_ids:
            return np.ascontiguousarray(rows)
        who = np.resize(np.arange(len(self.members)), len(rows)) if who is None else who
        out = np.zeros((len(rows), rows.shape[1] + self.n_ids), np.float32)
        out[:, : rows.shape[1]] = rows
        out[np.arange(len(rows)), rows.shape[1] + who] = 1.0
        return out


def only_player(spec: EnvSpec) -> Player:
    """Return the player of an environment with one agent."""
    return Player("agent", 0, (0,), (0,), ("agent",), spec, 0, None)


def players_of(spec: MultiAgentSpec, config: MAPPOConfig, where: str) -> list[Player]:
    """Return the players of an environment; raise a ValueError for images with settings that need vectors."""
    players = []
    for g, group in enumerate(spec.groups):
        for name, wrong in (("critic", config.critic == "central"), ("agent_id", config.agent_id)):
            if group.spec.image and wrong:
                raise ValueError(
                    f"{where}: {name} must be {'local' if name == 'critic' else 'false'} if agents see images, as "
                    f"those of {group.name} do, got {getattr(config, name)}"
                )
        n = len(group.agents)
        parts = [(group.name, range(n))] if config.share_parameters else [(group.agents[i], [i]) for i in range(n)]
        for name, members in parts:
            n_ids = n if config.agent_id else 0
            players.append(
                Player(
                    name,
                    g,
                    tuple(members),
                    tuple(group.slots[i] for i in members),
                    tuple(group.agents[i] for i in members),
                    group.spec,
                    n_ids,
                    spec.state_dim + n_ids if config.critic == "central" else None,
                )
            )
    return players


class ValueNorm:
    """Running mean and standard deviation of returns, which normalise a critic's values.

    They are bias-corrected exponential averages over minibatches, as in the code of Yu et al. 2022 (arXiv:2103.01955).
    Before the first minibatch the mean is 0 and the standard deviation 0.1.

    Attributes
    ----------
    moments : array (3,) f64
        Averages of the returns, of their squares, and of 1.
    """

    def __init__(self) -> None:
        self.moments = np.zeros(3)

    @property
    def mean(self) -> float:
        return float(self.moments[0] / max(self.moments[2], LEAST_WEIGHT))

    @property
    def deviation(self) -> float:
        square = self.moments[1] / max(self.moments[2], LEAST_WEIGHT)
        return math.sqrt(max(float(square) - self.mean**2, LEAST_VARIANCE))

    def update(self, mean: float, square: float) -> None:
        """Update the averages with a minibatch of returns, given by its mean and its mean square."""
        self.moments *= DECAY
        self.moments += (1.0 - DECAY) * np.array([mean, square, 1.0])

    def follow(self, returns: Any) -> Any:
        """Update the averages with a minibatch of returns, a tensor (B,) f32. Returns them normalised."""
        wide = returns.double()
        self.update(wide.mean().item(), wide.square().mean().item())
        return (returns - self.mean) / self.deviation

    def state(self) -> np.ndarray:
        """Return a copy of `moments`, for a checkpoint."""
        return self.moments.copy()

    def set_state(self, moments: np.ndarray) -> None:
        """Restore the result of `state`."""
        self.moments[:] = moments

    def denormalized(self, values: np.ndarray) -> np.ndarray:
        """Convert a critic's outputs (…) f32 to units of returns."""
        return (values * np.float32(self.deviation) + np.float32(self.mean)).astype(np.float32, copy=False)


class ValueNorms:
    """The `ValueNorm` of each player, which `make` creates, as a part of a checkpoint."""

    def __init__(self, names: Iterable[str], make: Callable[[], ValueNorm] = ValueNorm):
        self.by_name = {name: make() for name in names}

    def state(self) -> dict[str, np.ndarray]:
        return {name: norm.state() for name, norm in self.by_name.items()}

    def set_state(self, arrays: dict[str, np.ndarray]) -> None:
        """Restore the result of `state`; raise a ValueError if it belongs to other players."""
        if set(arrays) != set(self.by_name) or any(array.shape != (3,) for array in arrays.values()):
            raise ValueError(f"it must have three moments for each of {', '.join(self.by_name)}, got {sorted(arrays)}")
        for name, norm in self.by_name.items():
            norm.set_state(arrays[name])


class AgentReturns:
    """Undiscounted returns of each agent over the last 100 episodes, as a part of a checkpoint."""

    def __init__(self, spec: MultiAgentSpec):
        self.agents = spec.agents
        self._groups = {group.name: list(group.slots) for group in spec.groups}
        self._recent: deque[np.ndarray] = deque(maxlen=100)

    def extend(self, returns: np.ndarray) -> None:
        """Add the returns of ended episodes, (E, A) f64."""
        self._recent.extend(returns)

    def metrics(self) -> dict[str, float]:
        """Return mean returns ``episode/return/<name>`` of agents and groups; empty before an episode has ended.

        Groups are included if there are several and they have several agents; their value is the mean over the agents.
        """
        if not self._recent:
            return {}
        return {f"episode/return/{name}": value for name, value in self.by_name(np.stack(self._recent).mean(0)).items()}

    def by_name(self, returns: Sequence[float] | np.ndarray) -> dict[str, float]:
        """Return `returns` (A,) by the names of agents and groups."""
        named = {name: float(value) for name, value in zip(self.agents, returns, strict=True)}
        if len(self._groups) > 1:
            for name, slots in self._groups.items():
                if len(slots) > 1:
                    named[name] = float(np.mean([returns[slot] for slot in slots]))
        return named

    def state(self) -> dict[str, np.ndarray]:
        return {"returns": np.array(self._recent).reshape(-1, len(self.agents))}

    def set_state(self, arrays: dict[str, np.ndarray]) -> None:
        """Restore the result of `state`; raise a ValueError if it belongs to other agents."""
        returns = arrays.get("returns")
        if returns is None or returns.ndim != 2 or returns.shape[1] != len(self.agents):
            raise ValueError(
                f"it must have returns of {len(self.agents)} agents, got {getattr(returns, 'shape', None)}"
            )
        self._recent.clear()
        self._recent.extend(np.array(returns))
