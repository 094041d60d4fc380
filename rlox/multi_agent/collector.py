"""Rollouts of several agents, with the rows of each player's living agents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from rlox.multi_agent.players import AgentReturns, Player, ValueNorm, players_of
from rlox.multi_agent.self_play import SelfPlay
from rlox.multi_agent.spec import MultiAgentSpec, MultiAgentStep
from rlox.multi_agent.vec_env import MultiAgentVecEnv
from rlox.nn.acting import Inputs, draw_noise
from rlox.nn.modules import to_array
from rlox.processes.failures import Diverged


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


class Actors:
    """The policies of all players, each an `rlox.nn.acting.ActingPolicy`."""

    def __init__(self, players: Sequence[Player], policies: Sequence[Any]):
        self.players = list(players)
        self.policies = list(policies)

    def actions(
        self, obs: Sequence[np.ndarray], masks: Sequence[np.ndarray | None], deterministic: bool, rng: Rng
    ) -> list[np.ndarray]:
        """Return clipped actions by group (N, A_g, …) for observations (N, A_g, …) and masks by group."""

        def choose(p: int, inputs: Inputs) -> np.ndarray:
            policy = self.policies[p]
            if deterministic:
                return policy.mode(inputs)[0]
            return policy.act(inputs, draw_noise(policy, len(inputs.obs), rng))[0]

        return choose_actions(self.players, obs, masks, choose)


def choose_actions(
    players: Sequence[Player],
    obs: Sequence[np.ndarray],
    masks: Sequence[np.ndarray | None],
    choose: Callable[[int, Inputs], np.ndarray],
) -> list[np.ndarray]:
    """Return clipped actions by group (N, A_g, …); `choose` returns those of a player's rows, by its index."""
    actions: list[Any] = [None] * len(obs)
    for p, player in enumerate(players):
        chosen = choose(p, Inputs(player.identify(player.pick_rows(obs)), player.pick_rows(masks)))
        player.put_rows(actions, player.spec.clip(chosen), obs[player.group].shape[1])
    return actions


class MultiAgentCollector(Collector):
    """Steps N environments with several agents and returns whole rollouts, one batch for each player.

    Batches contain no rows of agents that are not alive. A trace of advantages ends where its agent is terminated (with
    value 0 after it) or truncated (with the value of this agent's final observation or state), or with the rollout.
    `config` determines which agents share a policy, and the inputs of critics.
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
        noise = []
        for player, policy in zip(players, policies, strict=True):
            noise.append(np.empty((n_steps, *policy.noise_shape(n * len(player.members))), np.float32))
            policy.fill_noise(self.rng, noise[-1])
        acted: list[list[np.ndarray]] = [[] for _ in players]
        try:
            steps = self._take_steps(policies, noise, acted)
        except BaseException:
            self._raw = None  # abandon the episodes, so that no checkpoint contains a rollout in progress
            raise
        self._raw = steps[-1]
        self.env_steps += n_steps * n
        rollouts = [
            self._make_rollout(player, policy, steps, np.stack(acted[p])) if learning[p] else None
            for p, (player, policy) in enumerate(zip(players, policies, strict=True))
        ]
        ended = np.stack([step.ended for step in steps[1:]])
        returns = np.stack([step.episode_returns for step in steps[1:]])[ended]
        lengths = np.stack([step.episode_lengths for step in steps[1:]])[ended]
        self.returns.extend(returns)
        if self.self_play is not None:
            self.self_play.end(returns)
        return MultiAgentBatch(rollouts, n_steps * n, returns.sum(1), lengths)

    def _take_steps(
        self, policies: Sequence[Any], noise: Sequence[np.ndarray], acted: list[list[np.ndarray]]
    ) -> list[MultiAgentStep]:
        """Return the inputs of the first step and the results of T steps; append the sampled actions to `acted`."""
        steps = [self.env.reset_all() if self._raw is None else self._raw]

        def choose(p: int, inputs: Inputs) -> np.ndarray:
            actions = policies[p].act(inputs, noise[p][len(steps) - 1])[0]
            acted[p].append(actions)
            spec = self.players[p].spec
            if spec.continuous and not all_finite(spec.clip(actions)):
                raise Diverged(
                    f"{self._where}: the actions of {self.players[p].name} on {self.name} became "
                    f"{actions[~np.isfinite(actions)][0]} about step {self.env_steps:,}, though observations were "
                    "finite: the policy's weights have diverged. Try a lower learning_rate or max_grad_norm"
                )
            return actions

        for _ in range(len(noise[0])):
            now = steps[-1]
            steps.append(self.env.step_all(choose_actions(self.players, now.obs, now.masks, choose)))
        return steps

    def _make_rollout(
        self, player: Player, policy: Any, steps: Sequence[MultiAgentStep], acted: np.ndarray
    ) -> Rollout | None:
        """Return one player's rollout of T steps from T + 1 results, of which the first is before any action.

        An index m of the M = N * A columns is an agent in an environment. Only the rows of living agents are kept;
        None if there are none.
        """

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
        obs = player.identify(column("obs", before)[t, m], m % members)
        masks = column("masks", before)[t, m] if player.spec.masked else None
        # Values are also needed after the last step, for agents that continue, and where time limits cut.
        goes_on = np.flatnonzero(player.pick_rows(last.alive))
        cut_t, cut_m = np.nonzero(truncated)
        states = None
        if player.state_dim is None:
            after = [player.pick_rows(last.obs)[goes_on], column("final_obs", results)[cut_t, cut_m]]
        else:
            states = player.identify(np.stack([step.state for step in before])[t, m // members], m % members)
            final = np.stack([step.final_state for step in results])
            after = [last.state[goes_on // members], final[cut_t, cut_m // members]]
        reached = player.identify(np.concatenate(after), np.concatenate([goes_on, cut_m]) % members)
        obs, actions, log_probs, seen_values, after_values = policy.evaluate_actions(
            obs, acted[t, m], reached, states=states, masks=masks
        )
        values, final_values = np.zeros((2, *alive.shape), np.float32)
        last_values = np.zeros(alive.shape[1], np.float32)
        values[t, m] = to_array(seen_values)
        last_values[goes_on] = after_values[: len(goes_on)]
        final_values[cut_t, cut_m] = after_values[len(goes_on) :]
        if (norm := self.norms.get(player.name)) is not None:
            values, last_values, final_values = map(norm.denormalized, (values, last_values, final_values))
        advantages, returns = compute_gae_batched_f32(
            rewards,
            values,
            terminated | ~alive,  # no trace may pass the gap between two lives of an agent
            last_values,
            len(alive),
            self.config.gamma,
            self.config.gae_lambda,
            truncated=truncated,
            next_values=final_values,
        )
        place = policy.place
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
        )

    # ---- checkpoints

    def state(self) -> dict[str, np.ndarray] | None:
        """Return an exact snapshot of the environments; None before they have started, or if not `restorable`."""
        if self._raw is None or (saved := self.env.get_state()) is None:
            return None
        return saved | {name: array.copy() for name, array in _name_inputs(self._raw).items()}

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Continue from the result of `state`; raise a ValueError or TypeError if it is damaged or does not fit."""
        now = MultiAgentStep.empty(self.agents, self.n_envs)
        targets = _name_inputs(now)
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
        means = self.returns.metrics().items()
        return [f"{name.removeprefix('episode/return/')}  return {value:.1f}" for name, value in means]

    def close(self) -> None:
        """Close the environments and their worker processes."""
        self.env.close()


def _name_inputs(step: MultiAgentStep) -> dict[str, np.ndarray]:
    """Return the inputs of the next actions, by their names in a checkpoint."""
    named = {"step_state": step.state}
    for g, (obs, alive, mask) in enumerate(zip(step.obs, step.alive, step.masks, strict=True)):
        named |= {f"step_obs.{g}": obs, f"step_alive.{g}": alive}
        if mask is not None:
            named[f"step_masks.{g}"] = mask
    return named
