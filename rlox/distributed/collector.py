"""Batches for one learner from the rollouts of many actors, wherever the actors run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from rlox.collectors.base import Collector
from rlox.collectors.rollout import RolloutBatch
from rlox.config import ActorLearnerConfig, RayConfig, RemoteConfig, shown
from rlox.distributed.protocol import ActorLost, ActorPlan, ActorPool, Trajectory, Weights
from rlox.envs import EnvSpec
from rlox.envs.remote.client import WorkerLost
from rlox.kernels.advantage.vtrace import compute_vtrace
from rlox.nn.acting import ActingPolicy, acting_policy
from rlox.processes.memory import Layout

if TYPE_CHECKING:
    from torch import nn

_LOOK_EVERY = 0.5  # seconds between two checks for late actors
_RETRY_AFTER = (0.5, 1.0, 2.0, 5.0, 10.0)  # seconds before the next attempts to restart an actor
_MOST_SHOWN = 32  # maximum number of actors for metrics per actor
_TURN, _VERSION = "turn", "version"  # in the state


class _ActorRecord:
    """The learner's record of one actor."""

    def __init__(self) -> None:
        self.asked = 0  # number of rollouts that it owes, and of those that `state` has collected from it
        self.since = 0.0  # time at which it could start the oldest rollout that it owes
        self.restarts = 0
        self.down_since: float | None = None  # time at which it was lost; None if it runs
        self.retry_at = 0.0
        self.attempts = 0
        self.lag = 0
        self.steps_per_second = 0.0


class ActorCollector(Collector):
    """Counterpart of `rlox.collectors.RolloutCollector` for a pool of actors.

    Each actor has its own environments, and collects with the weights it was last given while the learner updates. A
    batch consists of the oldest rollouts. Its advantages and value targets are computed by V-trace (Espeholt et al.
    2018, arXiv:1802.01561) with the learner's own values. An actor owes at most ``rollouts_ahead`` rollouts, so that
    they cannot pile up: a slow learner makes the actors wait. If the order of actors is fixed (`ActorLearnerConfig`),
    the run depends only on the seed, not on the speed of the actors.

    Each actor has `n_envs` environments, stepped by `env_workers` processes. `remote` are the workers that run the
    actors, or for other kinds of actors their environments; `ray` is for ``actors="ray"``. `weighted` says whether
    advantages contain V-trace's importance weight rho_t: they must not if the loss multiplies them by the ratio of
    the policies. The other arguments are those of `rlox.collectors.RolloutCollector`.
    """

    _where = "ActorCollector.collect"

    def __init__(
        self,
        env_id: str | Callable[[], Any],
        n_envs: int,
        seed: int,
        *,
        config: ActorLearnerConfig,
        reward_fn: Any = None,
        env_kwargs: dict[str, Any] | None = None,
        env_wrappers: Iterable[Any] = (),
        env_workers: int = 0,
        env_backend: str = "auto",
        remote: RemoteConfig | None = None,
        ray: RayConfig | None = None,
        weighted: bool = True,
    ):
        self._weighted = weighted
        if not isinstance(env_id, str) and not callable(env_id):
            raise TypeError(
                "ActorCollector: env_id must be an id or a function that creates an environment, since each actor "
                f"needs its own, got {shown(env_id)}; pass a function: lambda: MyEnv()"
            )
        if ray is not None and not isinstance(ray, RayConfig):
            raise TypeError(f"ActorCollector: ray must be a RayConfig, got {shown(ray)}")
        wrappers, remote = list(env_wrappers), _workers(config, remote)
        # One environment, only for its specification; the actors have the environments that are stepped.
        probe = (env_id, 1, seed, reward_fn, env_kwargs, "cpu", wrappers, 0, env_backend)
        if remote is None:
            super().__init__(*probe)
        else:
            for address in remote.addresses:
                try:
                    super().__init__(*probe, replace(remote, addresses=[address]))
                    break
                except WorkerLost:
                    if address == remote.addresses[-1]:
                        raise
            self.env.close()  # one session less at the worker
        self.n_envs = n_envs
        self.normalizer = None
        self._config = config
        self._ray = ray
        self._arguments = {
            "env_id": env_id,
            "n_envs": n_envs,
            "seed": seed,
            "reward_fn": reward_fn,
            "env_kwargs": dict(env_kwargs or {}),
            "env_wrappers": wrappers,
            "env_workers": env_workers,
            "env_backend": env_backend,
            "remote": remote,
        }
        self._pool: ActorPool | None = None
        self._records = [_ActorRecord() for _ in range(config.n_actors)]
        self._answered: list[deque[Trajectory]] = [deque() for _ in range(config.n_actors)]  # collected by `state`
        self._replay: deque[Trajectory] = deque(maxlen=config.replay_size)
        self._turn = 0  # the actor whose rollout is next, if their order is fixed
        self._version = 0  # number of batches so far
        self._saved: dict[str, np.ndarray] | None = None  # state of a checkpoint, until the actors have started
        self._no_state: list[int] = []  # actors without a state in that checkpoint, because they were lost
        self._drops_generators = False  # whether threads drop PyTorch's generators in that checkpoint
        self._waited = 0.0
        self._checked_at = time.monotonic()  # time of the last check for late actors
        self._failure: Exception | None = None  # of an environment, found while a checkpoint was created
        self._numbers: dict[str, float] = {}

    def collect(self, policy: nn.Module | ActingPolicy, n_steps: int) -> RolloutBatch:
        """Return a batch of the next ``rollouts_per_update`` rollouts of T = `n_steps` steps, and of old rollouts.

        Row ``t * N + n`` is step t in environment n of the N environments of all rollouts. ``log_probs`` are those of
        the policies that acted, `advantages` and `returns` come from V-trace. ``n_taken`` is the number of steps of the
        new rollouts.

        Raises TimeoutError if an actor does not answer within ``actor_timeout`` and cannot be restarted, RuntimeError
        if one was lost more than ``max_restarts`` times, and the exceptions of the actors' environments.
        """
        c = self._config
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        pool = self._pool if self._pool is not None else self._start(policy, n_steps)
        self._request(pool, policy)
        if time.monotonic() - self._checked_at > _LOOK_EVERY:
            self._check_timeouts(pool)
        began = time.perf_counter()
        new = [self._take(pool, policy) for _ in range(c.rollouts_per_update)]
        self._waited = time.perf_counter() - began
        batch = self.estimate(policy, new, self._replayed())
        if c.replay_rollouts:
            self._replay.extend(new)
        self.env_steps += batch.n_taken
        self._version += 1
        return batch

    def metrics(self) -> dict[str, float]:
        return self._numbers

    def lines(self) -> list[str]:
        """Return one line for each actor: its speed, its lag behind the learner, and its restarts."""
        described = [f"actor {i}" for i in range(len(self._records))]
        if self._pool is not None:
            described = [self._pool.describe(i) for i in range(len(self._records))]
        return [
            f"{what}: {s.steps_per_second:,.0f} steps/s, lag {s.lag}, "
            f"{s.restarts} restart{'' if s.restarts == 1 else 's'}{'' if s.down_since is None else ', lost'}"
            for what, s in zip(described, self._records, strict=True)
        ]

    # ---- actors

    def _start(self, policy: nn.Module | ActingPolicy, n_steps: int) -> ActorPool:
        plan = ActorPlan(
            policy=policy, n_steps=n_steps, config=self._config, start=self.env_steps,
            sequence_length=getattr(self._config, "sequence_length", None), **self._arguments,
        )  # fmt: skip
        pool = self._pool = make_pool(plan, self._config, self.spec, self._ray)
        if self._saved is not None:
            saved, self._saved = self._saved, None
            self._continue(pool, saved, plan.layout(self.spec))
        return pool

    def _request(self, pool: ActorPool, policy: nn.Module | ActingPolicy) -> None:
        """Request from every actor as many rollouts as it may owe, after retrying the restart of lost actors."""
        self._retry(pool)
        weights, now = None, time.monotonic()
        for actor, record in enumerate(self._records):
            while record.down_since is None and record.asked < self._config.rollouts_ahead:
                if weights is None:
                    weights = Weights(self._version, acting_policy(policy).weights(), self._statistics())
                if record.asked == len(self._answered[actor]):
                    record.since = now
                record.asked += 1
                pool.request(actor, weights)

    def _statistics(self) -> dict[str, np.ndarray]:
        if self.normalizer is None:
            return {}
        return {name: array for name, array in self.normalizer.state().items() if name != "returns"}

    def _take(self, pool: ActorPool, policy: nn.Module | ActingPolicy) -> Trajectory:
        """Return the next rollout, from the actor whose turn it is, or from the first to answer."""
        c = self._config
        while True:
            candidates = [self._turn] if c.in_turn else range(c.n_actors)
            actor = next((actor for actor in candidates if self._answered[actor]), None)
            if actor is not None:
                trajectory = self._answered[actor].popleft()
                break
            # A lost actor has no rollout; what its old connection or process still answers is not another loss.
            running = [actor for actor in candidates if self._records[actor].down_since is None]
            if ready := pool.ready(running, _LOOK_EVERY):
                actor = ready[0]
                try:
                    trajectory = self._result(pool, actor)
                    break
                except ActorLost as e:
                    self._restart_lost(pool, actor, e)
            else:
                self._check_timeouts(pool)
            self._request(pool, policy)
        self._turn = (actor + 1) % c.n_actors
        record = self._records[actor]
        record.asked -= 1
        record.since = time.monotonic()
        record.attempts = 0
        record.lag = self._version - trajectory.version
        record.steps_per_second = len(trajectory) / max(trajectory.seconds, 1e-9)
        if self.normalizer is not None and trajectory.moments:
            self.normalizer.merge(trajectory.moments)
        return trajectory

    def _result(self, pool: ActorPool, actor: int) -> Trajectory:
        """Return the oldest answer of an actor that is ready. It no longer owes one that is an exception."""
        try:
            return pool.result(actor)
        except ActorLost:
            raise
        except Exception:
            self._records[actor].asked -= 1
            raise

    def _check_timeouts(self, pool: ActorPool) -> None:
        now, most = time.monotonic(), self._config.actor_timeout
        # A long time without a check counts as half the timeout: the whole process may have been suspended.
        skipped = max(0.0, now - self._checked_at - most / 2)
        self._checked_at = now
        for actor, record in enumerate(self._records):
            owed = record.asked - len(self._answered[actor])
            record.since = min(now, record.since + skipped)
            if record.down_since is not None:
                record.down_since = min(now, record.down_since + skipped)
                # The other actors continue without it, unless it is its turn.
                all_lost = all(other.down_since is not None for other in self._records)
                needed = self._turn == actor if self._config.in_turn else all_lost
                if needed and now - record.down_since > most:
                    raise TimeoutError(
                        f"{self._where}: {pool.describe(actor)} could not be reached for {most:g} s; fix it, or raise "
                        "algo.actor_timeout"
                    )
            elif owed and now - record.since > most and not pool.ready([actor], 0.0):
                self._restart_lost(pool, actor, ActorLost(f"it has not answered for {most:g} s (algo.actor_timeout)"))

    def _restart_lost(self, pool: ActorPool, actor: int, e: ActorLost) -> None:
        """Restart a lost actor now, or if that fails, later."""
        record, c = self._records[actor], self._config
        record.asked = 0
        record.down_since = time.monotonic()
        record.retry_at = 0.0
        self._answered[actor].clear()
        what = pool.describe(actor)
        if record.restarts >= c.max_restarts:
            raise RuntimeError(
                f"{self._where}: {what} was lost ({e}) after {record.restarts} restarts, the limit of algo.max_restarts"
            ) from e
        record.restarts += 1
        self.notify(f"{what} was lost: {e}; its rollout is dropped, and it restarts with fresh episodes")
        self._retry(pool)

    def _retry(self, pool: ActorPool) -> None:
        for actor, record in enumerate(self._records):
            if record.down_since is None or time.monotonic() < record.retry_at:
                continue
            try:
                pool.restart(actor)
            except ActorLost:
                wait = _RETRY_AFTER[min(record.attempts, len(_RETRY_AFTER) - 1)]
                record.attempts += 1
                record.retry_at = time.monotonic() + wait
                continue
            record.down_since = None

    # ---- batches

    def _replayed(self) -> list[Trajectory]:
        """Draw old rollouts for the next batch, with replacement."""
        n = self._config.replay_rollouts if self._replay else 0
        return [self._replay[int(self.rng.integers(len(self._replay)))] for _ in range(n)]

    def estimate(self, policy: Any, new: Sequence[Trajectory], old: Sequence[Trajectory] = ()) -> RolloutBatch:
        """Combine rollouts of T steps to a batch as `collect` returns, with log-probabilities and values by `policy`.

        Environment steps and episodes of `old` rollouts are not counted.
        """
        c, rollouts = self._config, [*new, *old]
        obs, actions, behaviour, rewards, terminated, truncated = (
            _join_envs([getattr(rollout, name) for rollout in rollouts])
            for name in ("obs", "actions", "log_probs", "rewards", "terminated", "truncated")
        )
        n_steps, n = rewards.shape
        limits, reached = _limits(rollouts)
        after = np.concatenate([obs[-1], reached]) if len(limits) else obs[-1]
        seen, taken = obs[:-1].reshape(-1, *obs.shape[2:]), actions.reshape(-1, *actions.shape[2:])
        acting = acting_policy(policy, self.device)
        place = acting.place
        masks = memories = is_first = None
        if rollouts[0].masks is not None:
            masks = _join_envs([rollout.masks for rollout in rollouts]).reshape(n_steps * n, -1)
        if rollouts[0].memories is None:
            seen, taken, log_probs, values, after_values = acting.evaluate_actions(seen, taken, after, masks=masks)
        else:
            # The learner's memory starts from the states that the actors had, and so do values at time limits.
            memories = _join_envs([rollout.memories for rollout in rollouts])
            is_first = _join_envs([rollout.is_first for rollout in rollouts]).reshape(-1)
            at_limits = np.concatenate([rollout.limit_memories for rollout in rollouts])
            seen, taken, log_probs, values, after_values = acting.evaluate_sequences(
                seen, taken, memories[0], is_first, after, at_limits, masks=masks
            )
        next_values = np.zeros((n_steps, n), np.float32)
        if len(limits):
            next_values[limits[:, 0], limits[:, 1]] = after_values[n:]
        log_ratios = _array(log_probs).reshape(n_steps, n) - behaviour
        now = _array(values).reshape(n_steps, n)
        returns, advantages = compute_vtrace(
            log_ratios,
            rewards,
            now,
            terminated,
            after_values[:n],
            c.gamma,
            c.rho_bar,
            c.c_bar,
            truncated=truncated,
            next_values=next_values,
            gae_lambda=c.gae_lambda,
        )
        if not self._weighted:
            later = np.where(truncated, next_values, np.concatenate([returns[1:], after_values[None, :n]]))
            advantages = rewards + c.gamma * np.where(terminated, np.float32(0), later) - now
        self._count(rollouts, log_ratios)
        return RolloutBatch(
            obs=seen,
            actions=taken,
            log_probs=place(behaviour.reshape(-1)),
            values=values,
            advantages=place(advantages.reshape(-1)),
            returns=place(returns.reshape(-1)),
            rewards=place(rewards.reshape(-1)),
            episode_returns=np.concatenate([rollout.episode_returns for rollout in new]),
            episode_lengths=np.concatenate([rollout.episode_lengths for rollout in new]),
            dones=place((terminated | truncated).reshape(-1)),
            taken=sum(map(len, new)),
            masks=place(masks),
            is_first=place(is_first),
            n_envs=n,
            memories=memories,
        )

    def _count(self, rollouts: Sequence[Trajectory], log_ratios: np.ndarray) -> None:
        """Compute the metrics of a batch."""
        lags = np.array([self._version - rollout.version for rollout in rollouts])
        with np.errstate(over="ignore"):
            ratios = np.exp(log_ratios)
        records = self._records
        self._numbers = {
            "actors/lag_mean": float(lags.mean()),
            "actors/lag_max": float(lags.max()),
            "actors/ratio_mean": float(ratios.mean()),
            "actors/ratio_clipped": float((ratios > self._config.rho_bar).mean()),
            "time/answers_waiting": float(self._waiting()),
            "actors/restarts": float(sum(s.restarts for s in records)),
            "actors/lost": float(sum(s.down_since is not None for s in records)),
            "time/learner_waits_s": self._waited,
        }
        if len(records) <= _MOST_SHOWN:
            for i, s in enumerate(records):
                self._numbers[f"time/actor{i}_steps_per_second"] = s.steps_per_second
                self._numbers[f"actors/{i}/lag"] = float(s.lag)
                self._numbers[f"actors/{i}/restarts"] = float(s.restarts)

    def _waiting(self) -> int:
        """Return the number of actors whose rollouts wait for the learner."""
        collected = sum(1 for answers in self._answered if answers)
        return collected if self._pool is None else collected + len(self._pool.ready(range(len(self._records)), 0.0))

    # ---- checkpoints

    @property
    def restorable(self) -> bool:
        return self._config.local and super().restorable

    def restore_note(self) -> str | None:
        n, of = len(self._no_state), len(self._records)
        rest = "everything else is exact"
        if self._drops_generators:
            rest = "threads cannot restore the random numbers of a custom policy in processes: its actions are new ones"
        if self._config.local and n:
            return (
                f"{self.name} cannot be restored in {n} of {of} actors (the checkpoint holds no state of "
                f"{'it): it starts' if n == 1 else 'them): they start'} with fresh episodes, {rest}"
            )
        if self._drops_generators:
            return rest
        if self._config.local:
            return super().restore_note()
        return f"actors={self._config.actors} start with fresh episodes; everything else is exact"

    def state(self) -> dict[str, np.ndarray] | None:
        """Return a snapshot of all actors, the rollouts they owe, and old rollouts that may be replayed.

        It waits for the rollouts. Before the actors have started, it returns the state that `restore` was given or
        None; it also returns None if they are not `restorable`.
        """
        pool = self._pool
        if pool is None:
            return self._saved
        if not self.restorable or not pool.exact:
            return None
        state = {_TURN: np.array(self._turn), _VERSION: np.array(self._version)}
        for actor in range(len(self._records)):
            try:
                own = self._actor_state(pool, actor)
            except Exception as e:
                self._failure = e  # raised by the next `collect`; this checkpoint is still written
                return None
            if own is None:
                return None
            state.update(own)
        for k, trajectory in enumerate(self._replay):
            state.update(_name_arrays(f"replay{k}", trajectory))
        return dict(sorted(state.items()))

    def _actor_state(self, pool: ActorPool, actor: int) -> dict[str, np.ndarray] | None:
        """Return the state of an actor and the rollouts that it owes, or None if it is late and will be restarted."""
        record, answered = self._records[actor], self._answered[actor]
        try:
            while len(answered) < record.asked:
                if not pool.ready([actor], self._config.actor_timeout):
                    return None
                answered.append(self._result(pool, actor))
            state = {} if record.down_since is not None else pool.state(actor)
        except ActorLost as e:
            self._restart_lost(pool, actor, e)
            state = {}
        arrays = {f"actor{actor}/{name}": array for name, array in state.items()}
        for k, trajectory in enumerate(answered):
            arrays.update(_name_arrays(f"answer{actor}.{k}", trajectory))
        return arrays

    def restore(self, state: dict[str, np.ndarray]) -> bool:
        if not state:
            self._lost = "the checkpoint holds no state of it"
            if self._config.actors == "threads":
                self._lost += "; with a custom policy, threads cannot save one"
            return False
        parts = _sections(state)
        actors = {name for name in parts if name.startswith("actor")}
        if _VERSION not in state or _TURN not in state:
            raise ValueError(f"{type(self).__name__}.restore: the state must contain {_TURN} and {_VERSION}")
        if not self.restorable or not actors <= {f"actor{i}" for i in range(len(self._records))}:
            self._lost = "the checkpoint's state is of other actors"
            return False
        for name, arrays in parts.items():
            if not name.startswith("actor"):
                Trajectory.of(arrays)
        self._no_state = [i for i in range(len(self._records)) if f"actor{i}" not in actors]
        # Actors in processes save PyTorch's generator if they have a custom policy.
        self._drops_generators = self._config.actors == "threads" and any("torch" in parts[actor] for actor in actors)
        self._saved = dict(sorted(state.items()))
        self._version, self._turn = int(state[_VERSION]), int(state[_TURN]) % len(self._records)
        return True

    def _continue(self, pool: ActorPool, state: dict[str, np.ndarray], layout: Layout) -> None:
        """Restore the actors, and the rollouts that they owe, from the state of a checkpoint.

        Rollouts of another `layout` are dropped: those of a run with another number of steps.
        """
        parts = _sections(state)
        for actor, record in enumerate(self._records):
            pool.set_state(actor, parts.get(f"actor{actor}", {}))
            self._answered[actor].extend(_saved_rollouts(parts, f"answer{actor}.", layout))
            record.asked = len(self._answered[actor])
        self._replay.extend(_saved_rollouts(parts, "replay", layout))

    def close(self) -> None:
        """Stop all actors."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()
        super().close()


def _workers(config: ActorLearnerConfig, remote: RemoteConfig | None) -> RemoteConfig | None:
    """Return the workers to use, or None if there are none."""
    if config.worker_addresses:
        remote = replace(remote or RemoteConfig(), addresses=list(config.worker_addresses))
    if config.actors == "grpc" and (remote is None or not remote.addresses):
        raise ValueError("ActorCollector: worker_addresses must name the workers of actors=grpc, host:port, got none")
    return remote if remote is not None and remote.addresses else None


def _array(column: Any) -> np.ndarray:
    return column if isinstance(column, np.ndarray) else column.cpu().numpy()


def _join_envs(arrays: list[Any]) -> np.ndarray:
    """Join arrays (T, N, …) to one array (T, sum of N, …)."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, 1)


def _limits(rollouts: list[Trajectory]) -> tuple[np.ndarray, np.ndarray]:
    """Return step and environment of every truncation in the batch, and the observation it led to."""
    first = np.cumsum([0, *(rollout.rewards.shape[1] for rollout in rollouts)])
    at = [rollout.limits + np.array([0, start]) for rollout, start in zip(rollouts, first, strict=False)]
    return np.concatenate(at), np.concatenate([rollout.reached for rollout in rollouts])


def _name_arrays(section: str, trajectory: Trajectory) -> dict[str, np.ndarray]:
    """Return a trajectory's arrays for a checkpoint, without the elapsed time, so that equal runs have equal files."""
    arrays = replace(trajectory, seconds=0.0).arrays()
    return {f"{section}/{name}": array for name, array in arrays.items()}


def _sections(state: dict[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """Group arrays named "section/name" by section."""
    sections: dict[str, dict[str, np.ndarray]] = {}
    for key, array in state.items():
        section, slash, name = key.partition("/")
        if slash:
            sections.setdefault(section, {})[name] = array
    return sections


def _saved_rollouts(parts: dict[str, dict[str, np.ndarray]], name: str, layout: Layout) -> Iterator[Trajectory]:
    """Return the rollouts of `layout` among the sections `name` 0, 1, …."""
    for k in count():
        if (arrays := parts.get(f"{name}{k}")) is None:
            return
        rollout = Trajectory.of(arrays)
        if all(np.shape(getattr(rollout, field)) == shape for field, (shape, _) in layout.items()):
            yield rollout


def make_pool(plan: ActorPlan, config: ActorLearnerConfig, spec: EnvSpec, ray: RayConfig | None = None) -> ActorPool:
    """Start the actors of `config`, each from `plan`, in environments of `spec`. `ray` configures actors on Ray."""
    if config.actors == "processes":
        from rlox.distributed.processes import ProcessActors

        return ProcessActors(plan, config.n_actors, spec, config.rollouts_ahead)
    if config.actors == "ray":
        from rlox.distributed.ray_actors import RayActors

        return RayActors(plan, config.n_actors, ray)
    if config.actors == "grpc" and plan.remote is not None:
        from rlox.distributed.grpc_actors import GrpcActors

        return GrpcActors(plan, config.n_actors, spec, plan.remote, config.actor_timeout)
    from rlox.distributed.threads import ThreadActors

    return ThreadActors(plan, config.n_actors)
