"""Rollouts of several agents in environments on a device: policies, environments and advantages never leave it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rlox.collectors.tensor_rollout import Seat, StepTensors, TensorRolloutCollector
from rlox.config import MAPPOConfig
from rlox.envs.tensor.vec_env import TensorVecEnv
from rlox.multi_agent.acting import Actors
from rlox.multi_agent.collector import MultiAgentBatch, MultiAgentCollector, name_inputs
from rlox.multi_agent.players import AgentReturns, Player, ValueNorm, players_of
from rlox.multi_agent.spec import MultiAgentSpec, MultiAgentStep
from rlox.multi_agent.tensor import merge_state, spec_of, split_rows, spread_state


class PlayerSeat(Seat):
    """A player in environments on a device: row ``n * A + a`` of a step is its agent a in environment n.

    Parameters
    ----------
    player : Player
        The agents, and what their networks read. They are neighbours in the environments' arrays.
    agents : MultiAgentSpec
        All agents.
    policy, memory, norm
        As for `Seat`.
    """

    def __init__(self, player: Player, agents: MultiAgentSpec, policy: Any, memory: StepTensors, norm: Any):
        self._player, self._agents = player, agents
        n = self._n = len(player.members)
        self._range = slice(player.members[0], player.members[-1] + 1)
        self._ids = torch.eye(n, player.n_ids, device=memory.obs.device) if player.n_ids else None
        super().__init__(policy, memory, norm, n)
        rows = self.noise.shape[:2]

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty((*rows, *shape), dtype=dtype, device=memory.obs.device)

        self.obs, self.rewards, self.terminated = empty(player.obs_dim), empty(), empty(dtype=torch.bool)
        self.ended, self.actions = empty(dtype=torch.bool), empty(*player.spec.action_shape, dtype=memory.actions.dtype)
        if player.state_dim is not None:
            self.states = empty(player.state_dim)

    def _rows(self, obs: torch.Tensor, central: bool) -> torch.Tensor:
        """Return (…, M, D) or with `central` (…, M, S) for observations (…, N, …) of all agents as one."""
        flat = obs.flatten(0, -2)
        own, state = split_rows(flat, self._agents)
        own = state.unsqueeze(1).expand(-1, self._n, -1) if central else own[:, self._range]
        if self._ids is not None:
            own = torch.cat([own, self._ids.expand(len(own), -1, -1)], -1)
        return own.reshape(*obs.shape[:-2], obs.shape[-2] * self._n, own.shape[-1])

    def see(self, obs: torch.Tensor) -> torch.Tensor:
        return self._rows(obs, False)

    def judge(self, obs: torch.Tensor) -> torch.Tensor:
        return self._rows(obs, self.states is not None)

    def write_actions(self, t: int, actions: torch.Tensor) -> None:
        self.actions[t].copy_(actions)
        joined = self._memory.actions[t].view(-1, self._agents.n_agents, *self._player.spec.action_shape)
        joined[:, self._range].copy_(self.actions[t].view(-1, self._n, *joined.shape[2:]))

    def write_columns(self) -> None:
        m = self._memory
        self.obs.copy_(self.see(m.obs[:-1]))
        if self.states is not None:
            self.states.copy_(self.judge(m.obs[:-1]))
        # What holds for an environment holds for each of its agents.
        for name in ("rewards", "terminated", "ended"):
            column = getattr(m, name)
            getattr(self, name).view(*column.shape, self._n).copy_(column.unsqueeze(-1))


class TensorAgentCollector(TensorRolloutCollector):
    """Collector that steps N environments with A agents on a device, see `TensorRolloutCollector`.

    Batches, metrics and states are those of `rlox.multi_agent.collector.MultiAgentCollector`.

    Parameters
    ----------
    env : TensorVecEnv
        The N environments, with several agents.
    seed : int
        Seed of the actions. They are drawn as `MultiAgentCollector` draws them.
    config : MAPPOConfig
        Discount and trace decay; which agents share a policy, and what critics read.
    compiled : bool
        As for `TensorRolloutCollector`.

    Raises
    ------
    ValueError
        If the environment has one agent.
    """

    _where = "TensorAgentCollector.collect"
    lines = MultiAgentCollector.lines

    def __init__(self, env: TensorVecEnv, seed: int, config: MAPPOConfig, compiled: bool = False):
        super().__init__(env, seed, config.gamma, config.gae_lambda, None, compiled)
        self.agents = spec_of(env.env)
        self.players = players_of(self.agents, config, "MAPPO")
        self.spec = self.agents.groups[0].spec
        self.norms: dict[str, ValueNorm] = {}
        self.returns = AgentReturns(self.agents)
        self.self_play = None

    def collect(self, actors: Actors, n_steps: int) -> MultiAgentBatch:  # type: ignore[override]  # of several policies
        """Take `n_steps` steps in every environment; see `MultiAgentCollector.collect`."""
        together, lengths = self._take_steps([policy.module for policy in actors.policies], n_steps)
        returns = np.repeat(together[:, None], self.agents.n_agents, 1)
        self.returns.extend(returns)
        rollouts = [seat.make_rollout() for seat in self._seats]
        return MultiAgentBatch(rollouts, n_steps * self.n_envs, returns.sum(1), lengths, reused=True)

    def _make_seats(self, policies: list[Any], memory: StepTensors) -> list[Any]:
        parts = zip(self.players, policies, strict=True)
        return [PlayerSeat(one, self.agents, policy, memory, self.norms.get(one.name)) for one, policy in parts]

    def state(self) -> dict[str, np.ndarray] | None:
        if self._raw is None:
            return None
        now = MultiAgentStep.empty(self.agents, self.n_envs)
        now.obs[0][...], now.state[...] = split_rows(self.env.observe().cpu().numpy(), self.agents)
        now.alive[0].fill(True)
        return spread_state(self.env.get_state(), self.agents.n_agents) | name_inputs(now)

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        known = name_inputs(MultiAgentStep.empty(self.agents, self.n_envs))
        own = {name: array for name, array in state.items() if name not in known}
        super().set_state(merge_state(own, self.agents.n_agents))

    def metrics(self) -> dict[str, float]:
        """Return the mean return of each agent over the last 100 episodes."""
        return self.returns.metrics()
