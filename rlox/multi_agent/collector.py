"""Rollouts of several agents, with the rows of each player's living agents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlox.checkpoint.streams import Stream
from rlox.collectors.base import Collector
from rlox.collectors.rollout import Rollout
from rlox.config import MAPPOConfig
from rlox.envs import env_name
from rlox.kernels.advantage.gae import compute_gae_batched_f32
from rlox.kernels.rng import Rng
from rlox.kernels.stats import all_finite
from rlox.multi_agent.acting import Actors, ColumnMemory, PlayerSampler, begin_memories, choose_actions
from rlox.multi_agent.players import AgentReturns, ValueNorm, players_of
from rlox.multi_agent.self_play import SelfPlay
from rlox.multi_agent.spec import MultiAgentSpec, MultiAgentStep
from rlox.multi_agent.turns import estimate_turns
from rlox.multi_agent.vec_env import MultiAgentVecEnv
from rlox.nn.acting import Inputs
from rlox.nn.modules import to_array
from rlox.processes.failures import Diverged

_MEMORY, _IS_FIRST = "step_memory.", "step_is_first."  # in the state of a collector, followed by a player's index


@dataclass(frozen=True)
class MultiAgentBatch:
    """The rollout of each policy from T steps in N environments."""

    players: list[Rollout | None]  # in the order of the policies; None if no agent was alive
    n_taken: int  # environment steps, T * N
    episode_returns: np.ndarray  # (E,) f64, undiscounted, over all agents
    episode_lengths: np.ndarray  # (E,) int64, steps

    reused: bool = False  # whether the next batch overwrites the memory of its columns

    def columns(self) -> dict[str, Any]:
        """Return the columns of all players' rollouts, by ``player.column``."""
        return {
            f"{p}.{name}": column
            for p, rollout in enumerate(self.players)
            if rollout is not None
            for name, column in rollout.columns().items()
        }

    def with_columns(self, columns: Mapping[str, Any], reused: bool = False) -> MultiAgentBatch:
        """Return a copy of this batch with other columns, by the names of `columns`."""
        players = [
            None
            if rollout is None
            else rollout.with_columns({name: columns[f"{p}.{name}"] for name in rollout.columns()})
            for p, rollout in enumerate(self.players)
        ]
        return replace(self, players=players, reused=reused)

    def __len__(self) -> int:
        """Number of agent steps over all policies."""
        return sum(len(batch) for batch in self.players if batch is not None)


class MultiAgentCollector(Collector):
    """Steps N environments with several agents and returns whole rollouts, one batch for each player.

    Batches contain no rows of agents that are not alive. A trace of advantages ends where its agent is terminated (with
    value 0 after it) or truncated (with the value of this agent's final observation or state), or with the rollout.
    `config` determines which agents share a policy, and the inputs of critics.

    A player's memory lasts until the end of an agent's life, whichever of its policies acts: in self-play, an earlier
    one goes on in the middle of an episode with what the player remembers of it.
    """

    _where = "MultiAgentCollector.collect"
    noise_axis = 1

    def __init__(self, env: MultiAgentVecEnv, seed: int, config: MAPPOConfig):
        self.env = env
        self.agents: MultiAgentSpec = env.spec
        self.players = players_of(self.agents, config, "MAPPO")
        self.spec = self.agents.groups[0].spec
        self.config = config
        self.n_envs = env.n_envs
        self.reward_fn = None
        self.normalizer = None
        self.device = "cpu"
        self.rng = Rng(seed, Stream.ACTION)
        self.norms: dict[str, ValueNorm] = {}
        self.returns = AgentReturns(self.agents)
        self.self_play: SelfPlay | None = None
        self.name = env_name(env)
        self._raw: MultiAgentStep | None = None
        self._memories: list[ColumnMemory | None] = []  # by player; empty before the first step
        self._lost: str | None = None
        self.notify = lambda text: None
        self.env_steps = 0

    def collect(self, actors: Actors, n_steps: int) -> MultiAgentBatch:
        """Take `n_steps` steps in every environment.

        In self-play, the players that do not learn act with earlier policies, and have no batch.

        Raises
        ------
        ValueError, FloatingPointError
            If the environment breaks PettingZoo's interface, or numbers are not finite. The message names the agent.
        """
        n, players = self.n_envs, self.players
        policies, learning = actors.policies, [True] * len(players)
        if self.self_play is not None:
            policies, learning = self.self_play.begin()
        sizes = [0 if memory is None else memory.state.shape[1] for memory in self._memories]
        if self._raw is None or sizes != [policy.state_dim for policy in policies]:
            self._memories = begin_memories(players, policies, n)
        samplers = [
            PlayerSampler(player, policy, memory, self.rng, n_steps, n, self.config.sequence_length)
            for player, policy, memory in zip(players, policies, self._memories, strict=True)
        ]
        try:
            steps = self._take_steps(samplers, n_steps)
        except BaseException:
            self._raw = None  # abandon the episodes, so that no checkpoint contains a rollout in progress
            raise
        self._raw = steps[-1]
        self.env_steps += n_steps * n
        rollouts = [
            self._make_rollout(sampler, steps) if learns else None
            for sampler, learns in zip(samplers, learning, strict=True)
        ]
        ended = np.stack([step.ended for step in steps[1:]])
        returns = np.stack([step.episode_returns for step in steps[1:]])[ended]
        lengths = np.stack([step.episode_lengths for step in steps[1:]])[ended]
        self.returns.extend(returns)
        if self.self_play is not None:
            self.self_play.end(returns)
        return MultiAgentBatch(rollouts, n_steps * n, returns.sum(1), lengths)

    def _take_steps(self, samplers: Sequence[PlayerSampler], n_steps: int) -> list[MultiAgentStep]:
        """Return the inputs of the first step and the results of T steps; the samplers keep what the players did."""
        steps = [self.env.reset_all() if self._raw is None else self._raw]

        def choose(p: int, inputs: Inputs) -> np.ndarray:
            actions, spec = samplers[p].act(inputs, steps[-1]), self.players[p].spec
            if spec.continuous and not all_finite(spec.clip(actions)):
                raise Diverged(
                    f"{self._where}: the actions of {self.players[p].name} on {self.name} became "
                    f"{actions[~np.isfinite(actions)][0]} about step {self.env_steps:,}, though observations were "
                    "finite: the policy's weights have diverged. Try a lower learning_rate or max_grad_norm"
                )
            return actions

        with ExitStack() as contexts:
            for sampler in samplers:
                contexts.enter_context(sampler.policy.context())
            for _ in range(n_steps):
                steps.append(self.env.step_all(choose_actions(self.players, steps[-1], choose)))
                for sampler in samplers:
                    sampler.end(steps[-1])
        return steps

    def _make_rollout(self, sampler: PlayerSampler, steps: Sequence[MultiAgentStep]) -> Rollout | None:
        """Return one player's rollout of T steps from T + 1 results, of which the first is before any action.

        An index m of the M = N * A columns is an agent in an environment. Only the rows of living agents are kept, but
        all observations that a memory reads; None if there are none.
        """
        player, policy, memory = sampler.player, sampler.policy, sampler.memory

        def column(name: str, rows: Sequence[MultiAgentStep]) -> np.ndarray:
            return np.stack([player.pick_rows(getattr(step, name)) for step in rows])

        before, results, last = steps[:-1], steps[1:], steps[-1]
        alive = column("alive", before)
        t, m = np.nonzero(alive)
        if not len(t):
            return None
        members = len(player.members)
        terminated, truncated = column("terminated", results), column("truncated", results)
        rewards = column("rewards", results).astype(np.float32)
        taken = np.stack(sampler.actions)[t, m]
        masks = column("masks", before)[t, m] if player.spec.masked else None
        # A memory also passes the steps in which agents do not act.
        seen_t, seen_m = (t, m) if memory is None else np.indices(alive.shape).reshape(2, -1)
        obs = player.identify(column("obs", before)[seen_t, seen_m], seen_m % members)
        # Values are also needed after the last step, for agents that continue, and where time limits cut.
        goes_on = np.flatnonzero(player.pick_rows(last.alive))
        cut_t, cut_m = np.nonzero(truncated)
        states = None
        if player.state_dim is None:
            after = [player.pick_rows(last.obs)[goes_on], column("final_obs", results)[cut_t, cut_m]]
        else:
            states = player.identify(
                np.stack([step.state for step in before])[seen_t, seen_m // members], seen_m % members
            )
            final = np.stack([step.final_state for step in results])
            after = [last.state[goes_on // members], final[cut_t, cut_m // members]]
        reached = player.identify(np.concatenate(after), np.concatenate([goes_on, cut_m]) % members)
        of_memory: dict[str, Any] = {}
        if memory is None:
            obs, actions, log_probs, seen_values, after_values = policy.evaluate_actions(
                obs, taken, reached, states=states, masks=masks
            )
        else:
            firsts = np.concatenate(sampler.firsts)
            obs, actions, log_probs, seen_values, after_values = policy.evaluate_sequences(
                obs,
                taken,
                sampler.memories[0],
                firsts,
                reached,
                np.concatenate([memory.before()[goes_on], *sampler.limits]),
                states=states,
                masks=masks,
                running=alive.reshape(-1),
            )
            of_memory = {
                "is_first": policy.place(firsts),
                "n_envs": alive.shape[1],
                "memories": np.stack(sampler.memories),
            }
        values, final_values = np.zeros((2, *alive.shape), np.float32)
        last_values = np.zeros(alive.shape[1], np.float32)
        values[t, m] = to_array(seen_values)
        last_values[goes_on] = after_values[: len(goes_on)]
        final_values[cut_t, cut_m] = after_values[len(goes_on) :]
        if (norm := self.norms.get(player.name)) is not None:
            values, last_values, final_values = map(norm.denormalized, (values, last_values, final_values))
        place, gamma, gae_lambda = policy.place, self.config.gamma, self.config.gae_lambda
        if self.agents.turns:
            on = player.pick_rows(last.alive)
            ends = (alive, terminated, truncated, on, last_values, final_values)
            advantages, known = estimate_turns(rewards, values, *ends, gamma, gae_lambda)
            returns, kept = advantages + values, known[t, m]
            if not kept.any():
                return None
            t, m, alive, at = t[kept], m[kept], known, place(np.flatnonzero(kept))
            actions, log_probs, seen_values = actions[at], log_probs[at], seen_values[at]
            masks = None if masks is None else masks[kept]
            if memory is None:
                obs, states = obs[at], None if states is None else states[kept]
        else:
            advantages, returns = compute_gae_batched_f32(
                rewards,
                values,
                terminated | ~alive,  # no trace may pass the gap between two lives of an agent
                last_values,
                len(alive),
                gamma,
                gae_lambda,
                truncated=truncated,
                next_values=final_values,
            )
        if memory is not None:
            # A turn that is not learned from is the last one of its agent in the rollout: no later one remembers it.
            of_memory["running"] = place(alive.reshape(-1))
        return Rollout(
            obs=obs,
            actions=actions,
            log_probs=log_probs,
            values=seen_values,
            advantages=place(advantages[t, m]),
            returns=place(returns[t, m]),
            rewards=place(rewards[t, m]),
            dones=place((terminated | truncated)[t, m]),
            states=place(states),
            masks=place(masks),
            **of_memory,
        )

    # ---- checkpoints

    def state(self) -> dict[str, np.ndarray] | None:
        """Return an exact snapshot of the environments and of memories; None before they have started, or if the
        environments cannot be restored."""
        if self._raw is None or (saved := self.env.get_state()) is None:
            return None
        mine = name_inputs(self._raw) | self._name_memories()
        return saved | {name: array.copy() for name, array in mine.items()}

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Continue from the result of `state`; raise a ValueError or TypeError if it is damaged or does not fit."""
        now = MultiAgentStep.empty(self.agents, self.n_envs)
        targets = name_inputs(now)
        for name, target in targets.items():
            _check_array(name, state.get(name), target.shape, target.dtype)
            target[...] = state[name]
        memories = [self._read_memory(p, state) for p in range(len(self.players))]
        known = (*targets, *(name for name in state if name.startswith((_MEMORY, _IS_FIRST))))
        self.env.set_state({name: array for name, array in state.items() if name not in known})
        self._raw, self._memories = now, memories if any(memories) else []
        self._lost = None

    def _name_memories(self) -> dict[str, np.ndarray]:
        """Return the memories of all players that have one, by their names in a checkpoint."""
        named: dict[str, np.ndarray] = {}
        for p, memory in enumerate(self._memories):
            if memory is not None:
                named |= {f"{_MEMORY}{p}": memory.state, f"{_IS_FIRST}{p}": memory.is_first}
        return named

    def _read_memory(self, p: int, state: dict[str, np.ndarray]) -> ColumnMemory | None:
        """Return the memory of player `p` in a checkpoint, if it has one there."""
        rows = state.get(f"{_MEMORY}{p}")
        if rows is None:
            return None
        n = self.n_envs * len(self.players[p].members)
        _check_array(f"{_MEMORY}{p}", rows, (n, *rows.shape[1:2]), np.float32)
        _check_array(f"{_IS_FIRST}{p}", state.get(f"{_IS_FIRST}{p}"), (n,), np.bool_)
        memory = ColumnMemory(rows.copy())
        memory.is_first = state[f"{_IS_FIRST}{p}"].copy()
        return memory

    def metrics(self) -> dict[str, float]:
        """Return the mean return of each agent over the last 100 episodes, and the ratings of self-play."""
        return self.returns.metrics() | ({} if self.self_play is None else self.self_play.metrics())

    def lines(self) -> list[str]:
        """Return one line for each agent and group with its mean return, for a live view."""
        means = self.returns.metrics().items()
        return [f"{name.removeprefix('episode/return/')}  return {value:.1f}" for name, value in means]

    def close(self) -> None:
        """Close the environments and their worker processes."""
        self.env.close()


def _check_array(name: str, array: Any, shape: tuple[int, ...], dtype: Any) -> None:
    """Raise a ValueError unless a checkpoint's `array` has this shape and data type."""
    if not isinstance(array, np.ndarray) or (array.shape, array.dtype) != (shape, dtype):
        raise ValueError(
            f"MultiAgentCollector.set_state: {name} must be an array {shape} of {np.dtype(dtype)}, got "
            f"{getattr(array, 'shape', array)}"
        )


def name_inputs(step: MultiAgentStep) -> dict[str, np.ndarray]:
    """Return the inputs of the next actions, by their names in a checkpoint."""
    named = {"step_state": step.state}
    for g, (obs, alive, mask) in enumerate(zip(step.obs, step.alive, step.masks, strict=True)):
        named |= {f"step_obs.{g}": obs, f"step_alive.{g}": alive}
        if mask is not None:
            named[f"step_masks.{g}"] = mask
    return named
