"""Collect steps into a sequence memory, for a recurrent agent."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlox.collectors.replay import ReplayCollector
from rlox.kernels.stats import all_finite
from rlox.nn.acting import ActingPolicy, Inputs, acting_policy, draw_noise

_CARRY, _REWARDS, _FIRST = "agent_carry", "agent_rewards", "agent_first"  # names in the state of the environments


class SequenceCollector(ReplayCollector):
    """Steps N environments with a recurrent agent and stores every step in a sequence memory.

    A row of the memory consists of an observation, the action taken after it, the reward that came with it (0 with an
    episode's first observation) and the agent's state before it. An episode's last observation has its own row, with
    an action of zeros and the flags of termination and truncation. A step therefore pushes N rows, and one more for
    each episode that ends. If environments restart in the middle of an episode, its newest row becomes truncated.

    While actions are random, the agent's model does not run: the state before a row then consists of zeros and the
    previous action, until updates write a better state.
    """

    _where = "SequenceCollector.step"

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        n = self.n_envs
        self._carry: np.ndarray | None = None  # (N, S), the agent's state before the next observations
        self._rewards = np.zeros(n, np.float32)  # rewards that came with these observations
        self._first = np.ones(n, np.bool_)  # whether they start an episode

    def step(self, agent: ActingPolicy, buffer: Any, random: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Step every environment once, with actions of the agent or `random` ones, and push the rows.

        The agent's states end with the last actions in the model's form, whose width is the ``act_dim`` of `buffer`, an
        `rlox.SequenceReplayBuffer`. Returns the returns (E,) f64 and lengths (E,) int64 of the episodes that ended.
        """
        n, out = self.n_envs, self._out
        obs = self.observe()
        self.continue_in(buffer)
        policy = acting_policy(agent, self.device)
        initial = policy.initial(n)
        carry = initial if self._carry is None else self._carry
        if carry.shape != initial.shape:
            raise ValueError(f"{self._where}: the agent's state must have shape {initial.shape}, got {carry.shape}")
        first = self._first
        carry = np.where(first[:, None], initial, carry)
        actions, taken, after = self._choose(policy, obs, carry, first, random)
        rewards, reached = self._advance(obs, actions)
        ended = out["terminated"] | out["truncated"]
        over = np.flatnonzero(ended)
        no, yes = np.zeros(n, np.bool_), np.zeros(len(over), np.bool_)
        columns = [
            (obs, out["final_obs"][over]),
            (taken, self._end_rows(over, taken.shape[1])),
            (self._rewards, rewards[over]),
            (no, out["terminated"][over]),
            (no, out["truncated"][over]),
            (first, yes),
            (carry, after[over]),
            (np.arange(n), over),
        ]
        rows = [np.concatenate(pair) if len(over) else pair[0] for pair in columns]
        buffer.push_batch(rows[0], None, *rows[1:5], is_first=rows[5], state=rows[6], envs=rows[7])
        self.remember_buffer(buffer)
        self._carry, self._first = after, ended
        self._rewards = np.where(ended, np.float32(0), rewards)
        self._raw = reached
        returns, lengths = self._end_episodes(ended)
        if self.normalizer is not None:
            self.normalizer.update(self._raw)
        return returns, lengths

    def _choose(
        self, policy: ActingPolicy, obs: np.ndarray, carry: np.ndarray, first: np.ndarray, random: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return actions for the environments, their rows (N, A) f32 for the memory, and the next states (N, S)."""
        n, spec = self.n_envs, self.spec
        if random:
            actions, after = spec.clip(spec.random_actions(self.rng, n)), policy.initial(n)
            taken = spec.to_model(actions)
            after[:, after.shape[1] - taken.shape[1] :] = taken
            return actions, taken, after
        actions, after = policy.act(Inputs(obs, None, carry, first), draw_noise(policy, n, self.rng))
        if actions.shape != (n, *spec.action_shape):
            self._refuse_action(actions)
        return spec.clip(actions), after[:, -spec.model_width :], after

    def _end_rows(self, over: np.ndarray, width: int) -> np.ndarray:
        """Return what the memory stores as the actions (E, A) at the last observations of the environments `over`."""
        return np.zeros((len(over), width), np.float32)

    def continue_in(self, buffer: Any) -> None:
        """Start new episodes, unless the memory's newest rows are those of this collector's last step.

        The newest row of an episode that does not continue becomes truncated.
        """
        if self._fed is not None and self._fed[0] is buffer and self._fed[1] == buffer.n_pushed:
            return
        buffer.cut(truncated=True)
        self._carry = None
        self._rewards[:] = 0
        self._first[:] = True

    def state(self) -> dict[str, np.ndarray] | None:
        """Return an exact snapshot of the environments and the agent's states; None as for other collectors."""
        state = super().state()
        if state is None or self._carry is None:
            return state
        return {**state, _CARRY: self._carry.copy(), _REWARDS: self._rewards.copy(), _FIRST: self._first.copy()}

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        own = {name: state[name] for name in (_CARRY, _REWARDS, _FIRST) if name in state}
        super().set_state({name: array for name, array in state.items() if name not in own})
        self._carry, self._rewards, self._first = None, np.zeros(self.n_envs, np.float32), np.ones(self.n_envs, bool)
        if not own:
            return
        for name, dtype, width in ((_CARRY, np.float32, 2), (_REWARDS, np.float32, 1), (_FIRST, np.bool_, 1)):
            array = own.get(name)
            if array is None or array.dtype != dtype or array.ndim != width or len(array) != self.n_envs:
                raise ValueError(
                    f"SequenceCollector.set_state: {name} must be an array of {np.dtype(dtype)} with a row for each of "
                    f"the {self.n_envs} environments, got {'nothing' if array is None else (array.dtype, array.shape)}"
                )
            if not all_finite(array):
                raise ValueError(f"SequenceCollector.set_state: {name} must be finite")
        self._carry, self._rewards, self._first = (own[name].copy() for name in (_CARRY, _REWARDS, _FIRST))


class RecurrentCollector(SequenceCollector):
    """Steps N environments with a policy that has a memory, such as the recurrent DQN's, and stores every step.

    Rows are those of `SequenceCollector`. The memory also reads the observations at which actions are random, so that
    every stored state is that of the weights at its time. If the environments mask actions, a row's action is followed
    by the flags of the actions that were legal.
    """

    _where = "RecurrentCollector.step"

    def _choose(
        self, policy: ActingPolicy, obs: np.ndarray, carry: np.ndarray, first: np.ndarray, random: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        n, spec = self.n_envs, self.spec
        mask = self._mask
        inputs = Inputs(obs if self.normalizer is None else self.normalizer.normalize(obs), mask, carry, first)
        if random:
            actions, after = spec.random_actions(self.rng, n, mask), policy.mode(inputs)[1]
        else:
            actions, after = policy.act(inputs, draw_noise(policy, n, self.rng))
            if actions.shape != (n, *spec.action_shape):
                self._refuse_action(actions)
        taken = spec.to_model(actions)
        return actions, taken if mask is None else np.concatenate([taken, mask], 1, dtype=np.float32), after

    def _end_rows(self, over: np.ndarray, width: int) -> np.ndarray:
        rows = super()._end_rows(over, width)
        if self.spec.masked:
            rows[:, self.spec.model_width :] = self._out["final_action_mask"][over]
        return rows
