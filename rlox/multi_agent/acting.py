"""How the policies of several agents act: in evaluation and, for training, in rollouts; with a memory or without.

Letters: T steps, N environments, A agents of a player, M = N * A columns (one for each agent in an
environment), S numbers of a memory's state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlox.kernels.rng import Rng
from rlox.multi_agent.players import Player
from rlox.multi_agent.spec import MultiAgentStep
from rlox.nn.acting import Inputs, draw_noise


class ColumnMemory:
    """The state of a policy's memory in M columns.

    It stays as it is where an agent does not act, because it has died or waits for its turn, and begins anew after the
    end of the agent or of the episode.

    Attributes
    ----------
    state : array (M, S) f32
        After the last step.
    is_first : array (M,) bool
        Where the next step begins anew.
    """

    def __init__(self, state: np.ndarray):
        self.state, self.is_first = state, np.ones(len(state), np.bool_)

    def before(self) -> np.ndarray:
        """Return the states (M, S) before the next step."""
        return np.where(self.is_first[:, None], np.float32(0), self.state)

    def act(
        self, act: Callable[[Inputs], tuple[np.ndarray, np.ndarray]], inputs: Inputs, alive: np.ndarray
    ) -> np.ndarray:
        """Return the actions (M, …) of `act`, and keep the states after them where an agent is `alive`, (M,) bool."""
        inputs.state = self.before()
        actions, after = act(inputs)
        self.state = np.where(alive[:, None], after, inputs.state)
        self.is_first = np.zeros(len(alive), np.bool_)
        return actions

    def end(self, player: Player, step: MultiAgentStep) -> None:
        """Begin anew where a step ended the life of an agent of `player`, or the episode."""
        over = player.pick_rows(step.terminated) | player.pick_rows(step.truncated)
        self.is_first = self.is_first | over | np.repeat(step.ended, len(player.members))


def begin_memories(players: Sequence[Player], policies: Sequence[Any], n: int) -> list[ColumnMemory | None]:
    """Return the memories of all players before an episode in `n` environments; None for policies without one."""
    states = [policy.initial(n * len(player.members)) for player, policy in zip(players, policies, strict=True)]
    return [None if state is None else ColumnMemory(state) for state in states]


def choose_actions(
    players: Sequence[Player], step: MultiAgentStep, choose: Callable[[int, Inputs], np.ndarray]
) -> list[np.ndarray]:
    """Return clipped actions by group (N, A_g, …); `choose` returns those of a player's rows, by its index."""
    actions: list[Any] = [None] * len(step.obs)
    for p, player in enumerate(players):
        chosen = choose(p, Inputs(player.identify(player.pick_rows(step.obs)), player.pick_rows(step.masks)))
        player.put_rows(actions, player.spec.clip(chosen), step.obs[player.group].shape[1])
    return actions


def choose_rows(
    policy: Any,
    player: Player,
    memory: ColumnMemory | None,
    inputs: Inputs,
    step: MultiAgentStep,
    deterministic: bool,
    rng: Rng,
) -> np.ndarray:
    """Return the actions (M, …) of a player's policy, not clipped: its modes if `deterministic`, otherwise samples.

    `step` is the result of the last step; `inputs` are what the policy sees of it. The `memory` is kept up to date.
    """

    def act(inputs: Inputs) -> Any:
        if deterministic:
            return policy.mode(inputs)
        return policy.act(inputs, draw_noise(policy, len(inputs.obs), rng))

    if memory is None:
        return act(inputs)[0]
    memory.end(player, step)
    return memory.act(act, inputs, player.pick_rows(step.alive))


class Actors:
    """The policies of all players, each an `rlox.nn.acting.ActingPolicy`."""

    def __init__(self, players: Sequence[Player], policies: Sequence[Any]):
        self.players = list(players)
        self.policies = list(policies)

    def begin(self, n: int) -> list[ColumnMemory | None]:
        """Return what the players remember in `n` environments, for `actions`."""
        return begin_memories(self.players, self.policies, n)

    def actions(
        self, step: MultiAgentStep, memories: Sequence[ColumnMemory | None], deterministic: bool, rng: Rng
    ) -> list[np.ndarray]:
        """Return clipped actions by group (N, A_g, …) for the inputs in `step`, the result of the last step.

        Call it once for each step, with the `memories` that `begin` returned.
        """

        def choose(p: int, inputs: Inputs) -> np.ndarray:
            return choose_rows(self.policies[p], self.players[p], memories[p], inputs, step, deterministic, rng)

        return choose_actions(self.players, step, choose)


class PlayerSampler:
    """What one player does in a rollout of T steps, for which it draws the noise of all steps at once.

    Parameters
    ----------
    player : Player
        The player.
    policy : ActingPolicy
        Acts for it.
    memory : ColumnMemory, optional
        Continues in this rollout; None: the policy has none.
    rng : Rng
        Draws the noise.
    n_steps, n : int
        Steps T and environments N.
    length : int, optional
        Steps of each part of the rollout that begins with a stored state; None: all.

    Attributes
    ----------
    actions : list of arrays (M, …)
        Sampled actions of each step.
    memories : list of arrays (M, S)
        States of the memory before the first step of each part.
    firsts : list of arrays (M,) bool
        Where the memory began anew, for each step.
    limits : list of arrays (K, S)
        States after each step of the agents that it truncated.
    """

    def __init__(
        self,
        player: Player,
        policy: Any,
        memory: ColumnMemory | None,
        rng: Rng,
        n_steps: int,
        n: int,
        length: int | None = None,
    ):
        self.player, self.policy, self.memory = player, policy, memory
        self._length = length or n_steps
        self._noise = np.empty((n_steps, *policy.noise_shape(n * len(player.members))), np.float32)
        policy.fill_noise(rng, self._noise)
        self.actions: list[np.ndarray] = []
        self.memories: list[np.ndarray] = []
        self.firsts: list[np.ndarray] = []
        self.limits: list[np.ndarray] = []

    def act(self, inputs: Inputs, step: MultiAgentStep) -> np.ndarray:
        """Return the actions (M, …) of the next step, not clipped; `step` is the result of the last one."""
        t, memory = len(self.actions), self.memory
        if memory is None:
            actions = self.policy.act(inputs, self._noise[t])[0]
        else:
            if t % self._length == 0:
                self.memories.append(memory.before())
            self.firsts.append(memory.is_first)
            player, alive = self.player, self.player.pick_rows(step.alive)
            if player.state_dim is not None:
                inputs.central = player.identify(np.repeat(step.state, len(player.members), 0))
            actions = memory.act(lambda inputs: self.policy.act(inputs, self._noise[t]), inputs, alive)
        self.actions.append(actions)
        return actions

    def end(self, step: MultiAgentStep) -> None:
        """Look at the result of the step that was taken with the last actions."""
        if self.memory is not None:
            self.limits.append(self.memory.state[self.player.pick_rows(step.truncated)])
            self.memory.end(self.player, step)
