"""Policies for several agents that were not trained for all of them: one shared policy, or random actions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rlox.envs import EnvSpec
from rlox.evaluation.agents import AgentsEvaluation, evaluate_agents
from rlox.kernels.rng import Rng
from rlox.multi_agent.acting import ColumnMemory, choose_rows
from rlox.multi_agent.players import Player
from rlox.multi_agent.spec import Group, MultiAgentSpec, MultiAgentStep
from rlox.nn.acting import Inputs, acting_policy

if TYPE_CHECKING:
    from rlox.nn.policies import Actor


def random_actions(spec: EnvSpec, obs: np.ndarray, mask: np.ndarray | None, rng: Rng) -> np.ndarray:
    """Draw uniformly random actions (N, A, …) for observations (N, A, …) of N environments with A agents each.

    `mask` (N, A, n_choices) bool marks legal actions; None allows all.
    """
    if mask is None:
        n, n_agents = obs.shape[:2]
        return spec.random_actions(rng, n * n_agents).reshape(n, n_agents, *spec.action_shape)
    drawn = rng.uniform(mask.shape)
    parts = np.split(np.where(mask, drawn, -1.0), np.cumsum(spec.choices)[:-1], -1)
    actions = np.stack([part.argmax(-1) for part in parts], -1)
    return actions[..., 0] if spec.discrete else actions


class RandomPolicy:
    """Uniformly random legal actions for all agents; a ValueError names a group whose actions have no bounds."""

    def __init__(self, spec: MultiAgentSpec, where: str):
        for group in spec.groups:
            _require_bounds(group, where)
        self._spec = spec

    def begin(self, n: int) -> None:
        """Remember nothing in `n` environments."""

    def actions(self, step: MultiAgentStep, memories: None, deterministic: bool, rng: Rng) -> list[np.ndarray]:
        """Return actions by group (N, A_g, …) for the inputs in `step`."""
        return [
            random_actions(group.spec, rows, mask, rng)
            for group, rows, mask in zip(self._spec.groups, step.obs, step.masks, strict=True)
        ]


class SharedPolicy:
    """One policy for all agents with the observations and actions of the policy; other agents act at random.

    Masks of legal actions are respected, and a policy with a memory remembers the life of each agent. `own` describes
    the policy's observations, (D,) f32, and actions, and `spec` the environment's agents; `transform` is applied to
    observations (B, D) before the policy sees them.

    Attributes
    ----------
    groups : tuple of Group
        The groups whose agents it acts for.

    Raises
    ------
    ValueError
        If it can act for no agent, or another agent has actions without bounds.
    """

    def __init__(
        self,
        policy: Actor,
        own: EnvSpec,
        spec: MultiAgentSpec,
        device: str = "cpu",
        transform: Callable[[np.ndarray], np.ndarray] | None = None,
        where: str = "SharedPolicy",
    ):
        self.groups = tuple(group for group in spec.groups if _alike(group.spec, own))
        if not self.groups:
            seen = ", ".join(
                f"{group.name} ({group.spec.obs_dim} numbers; {group.spec.describe_actions()})" for group in spec.groups
            )
            raise ValueError(
                f"{where}: the environment must have agents that observe {own.obs_dim} numbers and have "
                f"{own.describe_actions()}, like the policy, got {seen}"
            )
        for group in spec.groups:
            if group not in self.groups:
                _require_bounds(group, where)
        self._policy, self._own, self._spec, self._transform = acting_policy(policy, device), own, spec, transform
        self._players = [
            Player(group.name, g, tuple(range(len(group.agents))), group.slots, group.agents, group.spec, 0, None)
            for g, group in enumerate(spec.groups)
        ]

    @property
    def slots(self) -> list[int]:
        """Indices, among all agents, of those for which the policy acts."""
        return sorted(slot for group in self.groups for slot in group.slots)

    @property
    def others(self) -> list[str]:
        """The agents that act at random."""
        return [agent for group in self._spec.groups if group not in self.groups for agent in group.agents]

    def begin(self, n: int) -> list[ColumnMemory | None]:
        """Return what the agents of each group remember in `n` environments, for `actions`."""
        states = [
            self._policy.initial(n * len(group.agents)) if group in self.groups else None for group in self._spec.groups
        ]
        return [None if state is None else ColumnMemory(state) for state in states]

    def actions(
        self, step: MultiAgentStep, memories: Sequence[ColumnMemory | None], deterministic: bool, rng: Rng
    ) -> list[np.ndarray]:
        """Return clipped actions by group (N, A_g, …) for the inputs in `step`, the result of the last step.

        Call it once for each step, with the `memories` that `begin` returned.
        """
        return [
            self._play(player, memory, step, deterministic, rng)
            if group in self.groups
            else random_actions(group.spec, rows, mask, rng)
            for group, player, memory, rows, mask in zip(
                self._spec.groups, self._players, memories, step.obs, step.masks, strict=True
            )
        ]

    def _play(
        self, player: Player, memory: ColumnMemory | None, step: MultiAgentStep, deterministic: bool, rng: Rng
    ) -> np.ndarray:
        rows = player.pick_rows(step.obs)
        seen = np.ascontiguousarray(rows if self._transform is None else self._transform(rows), np.float32)
        inputs = Inputs(seen, player.pick_rows(step.masks))
        taken = choose_rows(self._policy, player, memory, inputs, step, deterministic, rng)
        return self._own.clip(taken).reshape(-1, len(player.members), *self._own.action_shape)


def share_policy(algorithm: Any, spec: MultiAgentSpec, where: str) -> SharedPolicy:
    """Return the policy of an offline algorithm as a shared policy for the agents of an environment.

    Raises ValueError as `SharedPolicy`.
    """
    return SharedPolicy(algorithm.policy, algorithm.spec, spec, algorithm.device, algorithm.normalizer.normalize, where)


def evaluate_shared(policy: SharedPolicy, **arguments: Any) -> AgentsEvaluation:
    """Run `rlox.evaluation.agents.evaluate_agents`; `returns` are sums over the agents of the policy."""
    evaluation = evaluate_agents(policy, **arguments)  # type: ignore[arg-type]  # it acts as Actors do
    return replace(evaluation, returns=evaluation.agent_returns[:, policy.slots].sum(1))


def read_group(spec: MultiAgentSpec, dataset: Any) -> Group:
    """Return the group of a dataset's agents: by their names, else by the sizes of observations and actions.

    If no group has these sizes, return the first group.
    """
    agents = set(getattr(dataset, "metadata", {}).get("agents", ()))
    named = [group for group in spec.groups if agents and agents <= set(group.agents)]
    kind = (getattr(dataset, "obs_shape", None), getattr(dataset, "n_actions", None) is not None)
    alike = [group for group in spec.groups if (group.spec.obs_shape, group.spec.discrete) == kind]
    return [*named, *alike, *spec.groups][0]


def _alike(spec: EnvSpec, other: EnvSpec) -> bool:
    """Return whether observations and actions are the same, regardless of their names."""
    names = ("obs_shape", "n_actions", "n_choices", "act_dim", "act_low", "act_high")
    return not spec.image and all(np.array_equal(getattr(spec, name), getattr(other, name)) for name in names)


def _require_bounds(group: Group, where: str) -> None:
    low, high = group.spec.act_low, group.spec.act_high
    if low is not None and high is not None and not np.isfinite([low, high]).all():
        raise ValueError(
            f"{where}: actions of {group.name} must be bounded, because its agents act at random, got bounds "
            f"{low.tolist()} and {high.tolist()}"
        )
