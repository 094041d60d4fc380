"""Multi-agent PPO (Yu et al. 2022, arXiv:2103.01955): PPO's clipped loss for each policy, with a critic that sees the
observations of all agents, or with local critics (IPPO; de Witt et al. 2020, arXiv:2011.09533).

Departures from the paper's code: time limits bootstrap and are not terminations; advantages are normalised in each
minibatch; actor and critic of a policy share one Adam, and their gradient norm is clipped together.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from rlox.callbacks import Callback
from rlox.callbacks.loggers import LoggerCallback
from rlox.checkpoint.counters import scheduled
from rlox.checkpoint.shapes import require_widths
from rlox.collectors import RewardFn
from rlox.compiled import NativePlayers, obstacle
from rlox.config import MAPPOConfig, integer, require, shown
from rlox.config.arguments import refuse_policy_name
from rlox.envs.registry import is_multi_agent
from rlox.envs.spec import read_mask, read_observations, split_mask, write_actions
from rlox.evaluation.agents import evaluate_agents
from rlox.gpu.collection import GpuPolicy, HostCollection
from rlox.kernels.nn.actor_critic import n_parameters
from rlox.kernels.rng import Rng
from rlox.multi_agent.acting import Actors
from rlox.multi_agent.collector import MultiAgentBatch, MultiAgentCollector
from rlox.multi_agent.players import Player, ValueNorm, ValueNorms, only_player
from rlox.multi_agent.self_play import SelfPlay
from rlox.multi_agent.vec_env import make_multi_agent_env
from rlox.nn.acting import Inputs, acting_policy, draw_noise, read_state
from rlox.training.on_policy import OnPolicyAlgorithm

if TYPE_CHECKING:
    import torch
    from torch import nn

    from rlox.multi_agent.tensor_rollout import TensorAgentCollector


@dataclass
class Learner:
    """One policy with its optimiser and value normalisation."""

    name: str
    policy: Any  # nn.Module; with the native backend, the `NativePolicy`
    optimizer: Any
    norm: ValueNorm | None


class MAPPO(OnPolicyAlgorithm):
    """PPO for several agents. With a single-agent gymnasium environment it is PPO.

    Parameters
    ----------
    env_id : str or callable
        ``pettingzoo:mpe2.simple_spread_v3`` (any module with a parallel environment), ``GridPursuit-v0``, or, with one
        agent, any environment of `rlox.PPO`.
    n_agents : int, optional
        Required number of agents of the environment; None accepts any number.
    n_envs, seed, policy, logger, callbacks
        As for `rlox.PPO`; `policy` with one agent only.
    env_fn : callable, optional
        Returns a PettingZoo environment, which replaces `env_id`.
    **arguments
        Further arguments of `rlox.PPO`; hyper-parameters of `rlox.config.MAPPOConfig`.
    """

    name = "mappo"
    Config = MAPPOConfig
    _resident = True

    players: list[Player]  # one for each policy, with the agents that use it
    agents: tuple[str, ...] = ()  # names of all agents; empty for a single-agent environment

    def __init__(
        self,
        env_id: str | Callable[[], Any],
        n_agents: int | None = None,
        n_envs: int = 4,
        seed: int = 42,
        policy: nn.Module | None = None,
        logger: LoggerCallback | None = None,
        callbacks: Iterable[Callback] | None = None,
        *,
        env_fn: Callable[..., Any] | None = None,
        **arguments: Any,
    ):
        refuse_policy_name("MAPPO", "env_id", env_id)
        if env_fn is not None and not callable(env_fn):
            raise TypeError(f"MAPPO: env_fn must be a callable that returns an environment, got {shown(env_fn)}")
        self._n_agents = None if n_agents is None else integer("MAPPO", "n_agents", n_agents, 1, 100_000)
        env = env_id if env_fn is None else env_fn
        more = callable(env_id) and n_agents not in (None, 1)
        self.several = env_fn is not None or more or is_multi_agent(env)
        if self.several and policy is not None:
            raise ValueError(
                "MAPPO: policy must be None with several agents, whose policies are built from their spaces, got "
                f"{type(policy).__name__}"
            )
        super().__init__(env, n_envs, seed, policy, logger, callbacks, **arguments)

    # ---- construction

    def _choose_env_device(self, where: str, device: str, reward_fn: RewardFn | None) -> str | None:
        if device == "auto" and self.env_options.backend == "auto":
            return None  # from how many environments on a GPU pays has not been measured
        return super()._choose_env_device(where, device, reward_fn)

    def _make_collector(self, n: int, reward_fn: RewardFn | None) -> Any:
        c, options = self.config, self.env_options
        if not self.several:
            for name in ("self_play", "agent_id"):
                if getattr(c, name):
                    raise ValueError(f"MAPPO: {name} must be false with one agent, got True")
            single = super()._make_collector(n, reward_fn)
            if self._n_agents not in (None, 1):
                single.close()
                raise ValueError(
                    f"MAPPO: n_agents must be 1 on {shown(self.env_id)}, which has one agent, got {self._n_agents}; "
                    "for several agents, use pettingzoo:MODULE or env_fn=FUNCTION"
                )
            self.players = [only_player(single.spec)]
            return single
        remote = options.remote
        for name, value, rule in (
            ("env_wrappers", options.wrappers, "empty"),
            ("env_backend", options.backend not in ("auto", "tensor") and options.backend, "auto or tensor"),
            ("reward_fn", reward_fn is not None and reward_fn, "None"),
            ("remote", remote is not None and remote.addresses, "left out"),
            ("normalize_obs", c.normalize_obs, "false"),
            ("normalize_rewards", c.normalize_rewards, "false (value_norm=true normalises critics' values)"),
        ):
            if value:
                raise ValueError(f"MAPPO: {name} must be {rule} with several agents, got {value}")
        env: Any
        if options.device is None:
            env = make_multi_agent_env(self.env_id, n, self.seed, options.kwargs, options.workers)
        else:
            env = options.make(self.env_id, n, self.seed)
        try:
            collector = self._make_agents_collector(env)
            self._require_agents(collector)
        except ValueError:
            env.close()
            raise
        self.players, self.agents = collector.players, collector.agents.agents
        return collector

    def _make_agents_collector(self, env: Any) -> MultiAgentCollector | TensorAgentCollector:
        if self.env_options.device is None:
            return MultiAgentCollector(env, self.seed, self.config)
        from rlox.multi_agent.tensor_rollout import TensorAgentCollector

        return TensorAgentCollector(env, self.seed, self.config, self.env_options.compiled)

    def _require_agents(self, collector: MultiAgentCollector | TensorAgentCollector) -> None:
        """Raise ValueError unless the agents of an environment are those that the arguments and a checkpoint expect."""
        c, players, n_agents = self.config, collector.players, collector.agents.n_agents
        if self._n_agents not in (None, n_agents):
            raise ValueError(f"MAPPO: n_agents must be {n_agents}, the environment's number, got {self._n_agents}")
        if c.self_play and len(players) < 2:
            raise ValueError(
                "MAPPO: self_play must be false where all agents share one policy, got true; share_parameters=false "
                "gives each agent its own"
            )
        if self._saved_shapes is not None:
            seen = {player.obs_dim for player in players} | {player.state_dim or 0 for player in players}
            vectors = None if any(player.spec.image for player in players) else seen
            require_widths("MAPPO", self._saved_shapes.policy, c.hidden_sizes, vectors)
            self._saved_shapes = None  # checked

    def _kernel_obstacle(self, policy: nn.Module | None) -> str | None:
        for player in self.players:
            reason = obstacle(player.network_spec, self.config, policy)
            if reason is not None:
                return f"for {player.name}, {reason}" if self.several else reason
        return None

    def _network_sizes(self) -> tuple[int, int]:
        sizes = self.config.hidden_sizes
        specs = [(player.network_spec, player.state_dim) for player in self.players]
        size = sum(
            n_parameters(spec.obs_dim, spec.n_actions or spec.act_dim, sizes, spec.continuous, state_dim)
            for spec, state_dim in specs
            if not spec.image and spec.n_choices is None
        )
        return size, 0

    def make_policy(self, rng: Rng, policy: nn.Module | None) -> None:
        policies = [self._make_one(player.network_spec, rng, policy, player.state_dim) for player in self.players]
        # The weights of an only agent have the same names as PPO's.
        if self.backend == "native":
            self.native = NativePlayers(policies) if self.several else policies[0]
        else:
            from rlox.nn.policies import PlayerPolicies

            self.policy = PlayerPolicies(policies) if self.several else policies[0]

    def setup(self, rng: Rng) -> None:
        c, names = self.config, [player.name for player in self.players]
        norms: dict[str, ValueNorm] = {}
        on_device = self.device != "cpu" or self.env_options.device is not None
        if c.value_norm and not on_device:
            norms = self.keep("value_norm", ValueNorms(names)).by_name
        elif c.value_norm:
            from rlox.gpu.value_norm import DeviceValueNorm

            norms = self.keep("value_norm", ValueNorms(names, partial(DeviceValueNorm, self.device))).by_name
        if self.several:
            self.collector.norms = norms
            self.keep("returns", self.collector.returns)
            policies: Any = self._policy.players if self.native is None else self.native.policies
            optimizers: list[Any] = [self._make_optimizer(policy) for policy in policies]
            self._optimizers, self.optimizer = optimizers, Optimizers(optimizers)
            acting = [acting_policy(policy, self.device) for policy in policies]
            if self.device != "cpu" and self.env_options.device is None:
                parts = zip(policies, optimizers, self.players, strict=True)
                trained = [GpuPolicy(one, by.flat, who.network_spec, who.state_dim) for one, by, who in parts]
                self._host = HostCollection(self, trained)
                acting = self._host.kernels or acting
            self._actors = Actors(self.players, acting)
        else:
            self.collector.value_norm = norms.get("agent")
            super().setup(rng)
            policies, optimizers = [self.native or self._policy], [self.optimizer]
        self.learners = [
            Learner(name, policy, optimizer, norms.get(name))
            for name, policy, optimizer in zip(names, policies, optimizers, strict=True)
        ]
        if c.self_play:
            slots, copies = [player.slots for player in self.players], [copy.deepcopy(policy) for policy in acting]
            game = SelfPlay(names, slots, acting, copies, c.self_play_pool, c.self_play_every, self.seed)
            self.collector.self_play = self.keep("self_play", game, switch="self_play")

    @property
    def actor(self) -> Any:
        """The actor of collection and evaluation."""
        if not self.several:
            return super().actor
        if self._host is not None:
            self._host.refresh()
        return self._actors

    # ---- learning

    def _capture_obstacle(self) -> str | None:
        if self.config.target_kl is not None:
            return "target_kl looks at the divergence after each minibatch"
        return None

    def update(self, batch: MultiAgentBatch) -> dict[str, torch.Tensor]:
        """Run, for each policy, `n_epochs` passes over its agents' steps in minibatches.

        Returns means over all minibatches as scalar tensors; with several policies, also each policy's own means as
        ``<metric>/<name>``.
        """
        import torch

        from rlox.nn.losses import PPOLoss, normalized

        c, progress = self.config, self.counters.progress
        clip_eps = scheduled(c.clip_eps, c.clip_eps_schedule, progress)
        if self.backend.compiles and c.clip_eps_schedule != "constant":
            # Each new Python number would recompile.
            clip_eps = torch.as_tensor(clip_eps, dtype=torch.float32, device=self.device)
        delta = c.huber_delta if c.value_loss == "huber" else None
        loss_fn = PPOLoss(clip_eps, c.vf_coef, c.ent_coef, c.clip_vf, c.clip_vf_max, delta)
        compute = self.backend.compiled(PPOLoss.__call__)
        self.optimizer.learning_rate = scheduled(c.learning_rate, c.learning_rate_schedule, progress)

        tables: dict[str, dict[str, torch.Tensor]] = {}
        for learner, rows in zip(self.learners, batch.players, strict=True):
            if rows is None:  # none of its agents was alive
                continue
            norm = learner.norm
            history: list[dict[str, torch.Tensor]] = []
            for _ in range(c.n_epochs):
                for mb in rows.sample_minibatches(c.batch_size, rng=self.rng):
                    advantages = normalized(mb.advantages) if c.normalize_advantages else mb.advantages
                    returns = mb.returns
                    if norm is not None:
                        returns = norm.follow(returns)
                    loss, metrics = compute(
                        loss_fn, learner.policy, mb.obs, mb.actions, mb.log_probs, advantages, returns, mb.values,
                        mb.states, mb.masks, mb.sequences,
                    )  # fmt: skip
                    if c.target_kl is not None and history and metrics["approx_kl"] > 1.5 * c.target_kl:
                        break
                    metrics["grad_norm"] = learner.optimizer.step(loss, c.max_grad_norm)
                    history.append(metrics)
                else:
                    continue
                break
            means = {name: torch.stack([metrics[name] for metrics in history]).mean() for name in history[0]}
            # With a value norm, values have other units than returns; their difference is the advantage.
            explained = rows.explained_variance(None if norm is None else rows.advantages)
            tables[learner.name] = {**means, "explained_variance": explained}
        return _join_metrics(tables, lambda values: torch.stack(values).mean())

    def update_native(self, batch: MultiAgentBatch) -> dict[str, float]:  # type: ignore[override]  # its collector's
        """Run `update` as one kernel call for each policy. Returns the same metrics."""
        c, progress = self.config, self.counters.progress
        self.optimizer.learning_rate = scheduled(c.learning_rate, c.learning_rate_schedule, progress)
        columns = ("obs", "actions", "log_probs", "advantages", "returns", "values")
        tables = {
            learner.name: learner.policy.net.ppo(
                *map(rows.array, columns),
                self.rng,
                n_epochs=c.n_epochs,
                batch_size=c.batch_size,
                learning_rate=self.optimizer.learning_rate,
                clip_eps=scheduled(c.clip_eps, c.clip_eps_schedule, progress),
                vf_coef=c.vf_coef,
                ent_coef=c.ent_coef,
                max_grad_norm=c.max_grad_norm,
                clip_vf=c.clip_vf,
                target_kl=c.target_kl,
                normalize_advantages=c.normalize_advantages,
                states=rows.array("states"),
                masks=rows.array("masks"),
                clip_vf_max=c.clip_vf_max,
                huber_delta=c.huber_delta if c.value_loss == "huber" else None,
                moments=None if learner.norm is None else learner.norm.moments,
            )
            for learner, rows in zip(self.learners, batch.players, strict=True)
            if rows is not None  # none of its agents was alive
        }
        return _join_metrics(tables, lambda values: sum(values) / len(values))

    # ---- acting

    def predict(
        self, obs: Any, deterministic: bool = True, agent_idx: int = 0, mask: Any = None, *, state: Any = None
    ) -> Any:
        """Return the action of agent `agent_idx` for one observation, or actions for a batch, as `rlox.PPO.predict`.

        `mask` (n_choices,) or (B, n_choices) marks the legal actions, if the environment has masks. With a memory the
        result is the action and the next `state`, which belongs to this agent's next observation in the same episode.

        Raises
        ------
        ValueError, TypeError
            As `rlox.PPO.predict`; also for an agent that does not exist, or a mask if the environment has none.
        """
        where = "MAPPO.predict"
        index = integer(where, "agent_idx", agent_idx, 0, max(0, len(self.agents) - 1))
        at, player = next((p, player) for p, player in enumerate(self.players) if index in player.slots)
        if not self.several:
            return super().predict(obs, deterministic, state=state, mask=mask)
        obs, mask = split_mask(player.spec, obs, mask)
        self.backend.require_unchanged("predict")
        require(where, "deterministic", deterministic, bool)
        rows, single = read_observations(where, player.spec, obs)
        policy, n = self.actor.policies[at], len(rows)
        seen = player.identify(rows, np.full(n, player.slots.index(index)))
        inputs = Inputs(seen, read_mask(where, player.spec, mask, n))
        if state is not None:
            inputs.state = read_state(where, state, n, policy.state_dim)
        actions, after = policy.mode(inputs) if deterministic else policy.act(inputs, draw_noise(policy, n))
        action = write_actions(player.spec, player.spec.clip(actions), single)
        if after is None:
            return action
        return action, (after[0] if single else after)

    def predict_all(
        self,
        observations: Mapping[str, Any],
        deterministic: bool = True,
        masks: Mapping[str, Any] | None = None,
        *,
        states: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return actions by agent name, as for PettingZoo's ``step``, for observations (and masks) by agent name.

        With a memory the result is the actions and the next `states` by agent name, also of agents without an
        observation, which wait for their turn. Pass none of them at the start of an episode.

        Raises
        ------
        ValueError
            For a name that is not an agent's.
        """
        known, legal, actions = dict(states or {}), masks or {}, {}
        for part, given in (("observations", observations), ("states", known), ("masks", legal)):
            if unknown := [name for name in given if name not in self.agents]:
                raise ValueError(
                    f"MAPPO.predict_all: {part} must belong to {', '.join(self.agents) or 'several agents'}, got "
                    f"{shown(unknown[0])}"
                )
        for name, obs in observations.items():
            index = self.agents.index(name)
            actions[name] = self.predict(obs, deterministic, index, legal.get(name), state=known.get(name))
            if self.config.recurrent:
                actions[name], known[name] = actions[name]
        return (actions, known) if self.config.recurrent else actions

    def _evaluation_arguments(self, n_episodes: int, seed: int | None, deterministic: bool = True) -> dict[str, Any]:
        """As `Algorithm._evaluation_arguments`; several agents are evaluated by `evaluate_agents`."""
        arguments = super()._evaluation_arguments(n_episodes, seed, deterministic)
        if self.several:
            for name in ("device", "transform"):
                del arguments[name]
            arguments["by"] = evaluate_agents
        return arguments


class Optimizers:
    """The optimisers of all policies, with one learning rate, saved together."""

    def __init__(self, optimizers: list[Any]):
        self._optimizers = optimizers

    @property
    def learning_rate(self) -> float:
        return self._optimizers[0].learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        for optimizer in self._optimizers:
            optimizer.learning_rate = value

    def state(self) -> dict[str, np.ndarray]:
        """Return copies of moments and step counts, by the index of the policy."""
        states = [optimizer.state() for optimizer in self._optimizers]
        return {f"{i}.{name}": array for i, state in enumerate(states) for name, array in state.items()}

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state` returned. Raises ValueError if kind or size differ."""
        for i, optimizer in enumerate(self._optimizers):
            start = f"{i}."
            optimizer.set_state({k.removeprefix(start): x for k, x in state.items() if k.startswith(start)})


def _join_metrics(tables: dict[str, dict[str, Any]], mean: Callable[[list[Any]], Any]) -> dict[str, Any]:
    """Join metrics by policy into one table: the means over policies and, with several policies, each one's own."""
    first = next(iter(tables.values()), {})
    if len(tables) == 1:
        return first
    joined = {name: mean([table[name] for table in tables.values()]) for name in first}
    return joined | {f"{name}/{who}": value for who, table in tables.items() for name, value in table.items()}
