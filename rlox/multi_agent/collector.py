"""Rollouts of several agents, or of one agent, as the batches that MAPPO learns from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlox.checkpoint.streams import Stream
from rlox.collectors.base import Collector
from rlox.collectors.rollout import RolloutCollector, Steps
from rlox.config import MAPPOConfig, RemoteConfig
from rlox.envs import env_name
from rlox.kernels.advantage.gae import compute_gae_batched_f32
from rlox.kernels.rng import Rng
from rlox.kernels.stats import all_finite
from rlox.multi_agent.players import AgentReturns, Player, ValueNorm, players_of
from rlox.multi_agent.self_play import SelfPlay
from rlox.multi_agent.spec import MultiAgentSpec, MultiAgentStep
from rlox.multi_agent.vec_env import make_multi_agent_env
from rlox.nn.batch import Rollout
from rlox.processes.failures import Diverged

# Names of the inputs of the next actions in the state of the environments.
_OBS, _ALIVE, _MASKS, _STATE = "step_obs", "step_alive", "step_masks", "step_state"


@dataclass(frozen=True)
class MultiAgentBatch:
    """The rollout of each policy from T steps in N environments."""

    players: list[Rollout | None]  # in the order of the policies; None if no agent was alive
    n_taken: int  # environment steps, T * N
    episode_returns: np.ndarray  # (E,) f64, undiscounted, over all agents
    episode_lengths: np.ndarray  # (E,) int64, steps

    def __len__(self) -> int:
        """Number of agent steps over all policies."""
        return sum(len(batch) for batch in self.players if batch is not None)


class SingleAgentCollector(RolloutCollector):
    """`rlox.collectors.RolloutCollector` for MAPPO, whose batch is that of one player."""

    norm: ValueNorm | None = None

    def collect(self, policy: Any, n_steps: int) -> MultiAgentBatch:  # type: ignore[override]  # the algorithm's own
        """Collect a rollout; see `RolloutCollector.collect`."""
        batch = super().collect(policy, n_steps)
        return MultiAgentBatch([batch], len(batch), batch.episode_returns, batch.episode_lengths)

    def _advantages(
        self, steps: Steps, values: np.ndarray, last_values: np.ndarray, next_values: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        if self.norm is not None:
            values, last_values = self.norm.denormalized(values), self.norm.denormalized(last_values)
            next_values = None if next_values is None else self.norm.denormalized(next_values)
        return super()._advantages(steps, values, last_values, next_values)


class Actors:
    """The policies of all players.

    Parameters
    ----------
    players : list of Player
        The agents of each policy.
    parts : list
        For each player a `rlox.nn.players.ModulePart` or `rlox.compiled.NativePart`.
    """

    def __init__(self, players: Sequence[Player], parts: Sequence[Any]):
        self.players = list(players)
        self.parts = list(parts)

    def actions(
        self, obs: Sequence[np.ndarray], masks: Sequence[np.ndarray | None], deterministic: bool, rng: Rng
    ) -> list[np.ndarray]:
        """Return clipped actions by group (N, A_g, …) for observations (N, A_g, …) and masks by group."""
        found: list[Any] = [None] * len(obs)
        for player, part in zip(self.players, self.parts, strict=True):
            n, a = len(obs[player.group]), len(player.members)
            rows = flat(player.of_group(obs[player.group]))
            seen = player.observed(rows, np.tile(np.arange(a), n))
            mask = masks[player.group]
            legal = None if mask is None else flat(player.of_group(mask))
            taken = part.mode(seen, legal) if deterministic else part.sample(seen, legal, rng)
            put(
                found,
                player,
                player.spec.clip(taken).reshape(n, a, *player.spec.action_shape),
                len(obs[player.group][0]),
            )
        return found


def flat(rows: np.ndarray) -> np.ndarray:
    """Reshape (N, A, …) to (N * A, …)."""
    return rows.reshape(-1, *rows.shape[2:])


def put(actions: list[Any], player: Player, taken: np.ndarray, n_group: int) -> None:
    """Write a player's actions (N, A, …) into those of its group (N, `n_group`, …)."""
    if taken.shape[1] == n_group:
        actions[player.group] = taken
        return
    if actions[player.group] is None:
        actions[player.group] = np.zeros((len(taken), n_group, *taken.shape[2:]), taken.dtype)
    actions[player.group][:, player.members] = taken


class MultiAgentCollector(Collector):
    """Steps N environments with several agents and returns whole rollouts, one batch for each player.

    Batches contain no rows of agents that are not alive. A trace of advantages ends where its agent is terminated (with
    value 0 after it) or truncated (with the value of this agent's final observation or state), or with the rollout.

    Parameters
    ----------
    env_id : str or callable
        See `rlox.multi_agent.make_multi_agent_env`, also for `env_kwargs` and `env_workers`.
    n_envs, seed : int
        Number of environments N, and the seed of environments and actions.
    config : MAPPOConfig
        Determines which agents share a policy, and the inputs of critics.
    """

    _where = "MultiAgentCollector.collect"
    noise_axis = 1

    def __init__(
        self,
        env_id: str | Callable[[], Any],
        n_envs: int,
        seed: int,
        config: MAPPOConfig,
        env_kwargs: dict[str, Any] | None = None,
        env_workers: int = 0,
        env_wrappers: Sequence[Any] = (),
        env_backend: str = "auto",
        reward_fn: Any = None,
        remote: RemoteConfig | None = None,
    ):
        where = "MAPPO"
        for name, given, meant in (
            ("env_wrappers", bool(env_wrappers) and list(env_wrappers), "empty"),
            ("env_backend", env_backend != "auto" and env_backend, "auto"),
            ("reward_fn", reward_fn is not None and reward_fn, "None"),
            ("remote", remote is not None and remote.addresses, "left out"),
            ("normalize_obs", config.normalize_obs, "false"),
            ("normalize_rewards", config.normalize_rewards, "false (value_norm=true normalises critics' values)"),
        ):
            if given:
                raise ValueError(f"{where}: {name} must be {meant} with several agents, got {given}")
        self.env = make_multi_agent_env(env_id, n_envs, seed, env_kwargs, env_workers)
        self.agents: MultiAgentSpec = self.env.spec
        try:
            self.players = players_of(self.agents, config, where)
        except ValueError:
            self.env.close()
            raise
        self.spec = self.agents.groups[0].spec
        self.config = config
        self.n_envs = n_envs
        self.reward_fn = None
        self.normalizer = None
        self.device = "cpu"
        self.rng = Rng(seed, Stream.ACTION)
        self.norms: dict[str, ValueNorm] = {}
        self.returns = AgentReturns(self.agents)
        self.self_play: SelfPlay | None = None
        self._name = env_name(env_id)
        self._raw: MultiAgentStep | None = None
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
        parts, learning = (actors.parts, [True] * len(players)) if self.self_play is None else self.self_play.begin()
        noise = []
        for player, part in zip(players, parts, strict=True):
            drawn = np.empty((n_steps, *part.noise_shape(n * len(player.members))), np.float32)
            part.fill_noise(self.rng, drawn)
            noise.append(drawn)
        who = [np.tile(np.arange(len(player.members)), n) for player in players]
        acted: list[list[np.ndarray]] = [[] for _ in players]
        try:
            steps = self._steps(parts, noise, who, acted)
        except BaseException:
            self._raw = None  # abandon the episodes, so that no checkpoint contains a rollout in progress
            raise
        self._raw = steps[-1]
        self.env_steps += n_steps * n
        batches = [
            self._batch(player, part, steps, acted[p], who[p]) if learning[p] else None
            for p, (player, part) in enumerate(zip(players, parts, strict=True))
        ]
        ended = np.stack([step.ended for step in steps[1:]])
        returns = np.stack([step.episode_returns for step in steps[1:]])[ended]
        lengths = np.stack([step.episode_lengths for step in steps[1:]])[ended]
        self.returns.extend(returns)
        if self.self_play is not None:
            self.self_play.end(returns)
        return MultiAgentBatch(batches, n_steps * n, returns.sum(1), lengths)

    def _steps(
        self,
        parts: Sequence[Any],
        noise: Sequence[np.ndarray],
        who: Sequence[np.ndarray],
        acted: list[list[np.ndarray]],
    ) -> list[MultiAgentStep]:
        """Return the inputs of the first step and the results of T steps; append the sampled actions to `acted`."""
        n = self.n_envs
        steps = [self.env.reset_all() if self._raw is None else self._raw]
        for t in range(len(noise[0])):
            now = steps[-1]
            taken: list[Any] = [None] * len(now.obs)
            for p, (player, part) in enumerate(zip(self.players, parts, strict=True)):
                seen = player.observed(flat(player.of_group(now.obs[player.group])), who[p])
                mask = now.masks[player.group]
                legal = None if mask is None else flat(player.of_group(mask))
                actions = part.act(seen, noise[p][t], legal)
                acted[p].append(actions)
                clipped = player.spec.clip(actions)
                if player.spec.continuous and not all_finite(clipped):
                    self._refuse_policies(player, actions)
                shape = (n, len(player.members), *player.spec.action_shape)
                put(taken, player, clipped.reshape(shape), now.obs[player.group].shape[1])
            steps.append(self.env.step_all(taken))
        return steps

    def _batch(
        self, player: Player, part: Any, steps: Sequence[MultiAgentStep], acted: list[np.ndarray], who: np.ndarray
    ) -> Rollout | None:
        """Return one player's batch from T + 1 steps, of which the first is before any action."""
        g, n_steps, m = player.group, len(acted), len(who)

        def column(name: str, rows: Sequence[MultiAgentStep]) -> np.ndarray:
            """Return the array (T, M, …) of this player's agents."""
            found = np.stack([player.of_group(getattr(step, name)[g]) for step in rows])
            return found.reshape(len(rows), m, *found.shape[3:])

        before, results = steps[:-1], steps[1:]
        alive = column("alive", before)
        live = np.flatnonzero(alive)
        if not len(live):
            return None
        t_of, m_of = np.divmod(live, m)
        terminated, truncated = column("terminated", results), column("truncated", results)
        rewards = column("rewards", results).astype(np.float32)
        here = who[m_of]

        obs = player.observed(column("obs", before)[t_of, m_of], here)
        actions = np.stack(acted)[t_of, m_of]
        masks = None if not player.masked else column("masks", before)[t_of, m_of]
        # Values are needed after the last step, for agents that continue, and where time limits cut.
        goes_on = np.flatnonzero(column("alive", steps[-1:])[0])
        cut_t, cut_m = np.nonzero(truncated)
        states = None
        if player.state_dim is None:
            reached = [column("obs", steps[-1:])[0][goes_on], column("final_obs", results)[cut_t, cut_m]]
            after = player.observed(np.concatenate(reached), np.concatenate([who[goes_on], who[cut_m]]))
        else:
            n_members = len(player.members)
            seen = np.stack([step.state for step in before])
            states = player.judged(seen[t_of, m_of // n_members], here)
            final = np.stack([step.final_state for step in results])
            reached = [steps[-1].state[goes_on // n_members], final[cut_t, cut_m // n_members]]
            after = player.judged(np.concatenate(reached), np.concatenate([who[goes_on], who[cut_m]]))
        log_probs, seen_values, after_values = part.evaluate_actions(obs, states, masks, actions, after)
        values, final_values = np.zeros((2, n_steps, m), np.float32)
        last_values = np.zeros(m, np.float32)
        values[t_of, m_of] = seen_values
        last_values[goes_on] = after_values[: len(goes_on)]
        final_values[cut_t, cut_m] = after_values[len(goes_on) :]
        if (norm := self.norms.get(player.name)) is not None:
            values, last_values, final_values = map(norm.denormalized, (values, last_values, final_values))
        advantages, returns = compute_gae_batched_f32(
            rewards,
            values,
            terminated | ~alive,  # no trace may pass the gap between two lives of an agent
            last_values,
            n_steps,
            self.config.gamma,
            self.config.gae_lambda,
            truncated=truncated,
            next_values=final_values,
        )
        place = part.place
        return Rollout(
            obs=place(obs),
            actions=place(actions),
            log_probs=place(log_probs),
            values=place(seen_values),
            advantages=place(advantages[t_of, m_of]),
            returns=place(returns[t_of, m_of]),
            rewards=place(rewards[t_of, m_of]),
            dones=place((terminated | truncated)[t_of, m_of]),
            states=place(states),
            masks=place(masks),
        )

    def _refuse_policies(self, player: Player, actions: np.ndarray) -> None:
        raise Diverged(
            f"{self._where}: the actions of {player.name} on {self._name} became {actions[~np.isfinite(actions)][0]} "
            f"about step {self.env_steps:,}, though observations were finite: the policy's weights have diverged. Try "
            "a lower learning_rate or max_grad_norm"
        )

    # ---- checkpoints

    def state(self) -> dict[str, np.ndarray] | None:
        """Return an exact snapshot of the environments; None before they have started, or if not `restorable`."""
        found = None if self._raw is None else self.env.get_state()
        return None if found is None else {**found, **self._answered()}

    def _answered(self) -> dict[str, np.ndarray]:
        """Return the inputs of the next actions."""
        now = self._raw
        assert now is not None
        found = {_STATE: now.state.copy()}
        for g, (obs, alive, mask) in enumerate(zip(now.obs, now.alive, now.masks, strict=True)):
            found |= {f"{_OBS}.{g}": obs.copy(), f"{_ALIVE}.{g}": alive.copy()}
            if mask is not None:
                found[f"{_MASKS}.{g}"] = mask.copy()
        return found

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Continue from the result of `state`.

        Raises
        ------
        ValueError, TypeError
            If `state` is damaged, or does not fit the environments.
        """
        now = MultiAgentStep.empty(self.agents, self.n_envs)
        targets = {_STATE: now.state}
        for g, mask in enumerate(now.masks):
            targets |= {f"{_OBS}.{g}": now.obs[g], f"{_ALIVE}.{g}": now.alive[g]}
            if mask is not None:
                targets[f"{_MASKS}.{g}"] = mask
        for name, target in targets.items():
            array = state.get(name)
            if not isinstance(array, np.ndarray) or (array.shape, array.dtype) != (target.shape, target.dtype):
                raise ValueError(
                    f"{type(self).__name__}.set_state: {name} must be an array {target.shape} of {target.dtype}, got "
                    f"{getattr(array, 'shape', array)}"
                )
            target[...] = array
        self.env.set_state({name: array for name, array in state.items() if name not in targets})
        self._raw = now
        self._lost = None

    def metrics(self) -> dict[str, float]:
        """Return the mean return of each agent over the last 100 episodes, and the ratings of self-play."""
        return self.returns.metrics() | ({} if self.self_play is None else self.self_play.metrics())

    def lines(self) -> list[str]:
        """Return one line for each agent and group with its mean return, for a live view."""
        start = "episode/return/"
        found = {name.removeprefix(start): x for name, x in self.returns.metrics().items() if name.startswith(start)}
        return [f"{name}  return {value:.1f}" for name, value in found.items()]

    def close(self) -> None:
        """Close the environments and their worker processes."""
        self.env.close()
