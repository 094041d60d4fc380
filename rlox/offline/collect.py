"""Gathering a dataset: policies act in vectorised environments, or a replay memory is written out."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from rlox.checkpoint import versions
from rlox.checkpoint.streams import Stream
from rlox.collectors.recurrent import RecurrentActor, Remembering
from rlox.config import MOST_AT_ONCE
from rlox.envs import EnvSpec, env_name, make_vec_env, spec_of
from rlox.kernels.buffers.replay import ReplayBuffer
from rlox.kernels.rng import Rng
from rlox.multi_agent import is_multi_agent
from rlox.offline.agents import Lives
from rlox.offline.arrow import ArrowWriter, block_rows
from rlox.offline.rows import COLUMNS, Block, Rows
from rlox.offline.scores import reference_returns


@dataclass
class Behaviour:
    """One of the policies that a dataset is gathered with."""

    name: str
    share: float  # of the steps; shares are relative to each other
    algorithm: Any = None  # acts by ``predict``, or as in training by ``explored``; None: uniformly random actions
    info: dict[str, Any] = field(default_factory=dict)  # what the dataset is to say of it


class _Episodes:
    """Puts the rows of N environments (or agents), which come interleaved, together into whole episodes."""

    def __init__(self, rows: Rows, n_envs: int):
        self._rows = rows
        self._open: list[list[Block]] = [[] for _ in range(n_envs)]
        self.n_cut = 0

    def push(self, env: int, block: Block) -> None:
        """The next rows of one environment."""
        ends = np.flatnonzero(block["terminated"] | block["truncated"])
        if len(ends):
            stop = int(ends[-1]) + 1
            self._emit([*self._open[env], {name: column[:stop] for name, column in block.items()}])
            self._open[env], block = [], {name: column[stop:] for name, column in block.items()}
        if len(block["rewards"]):
            self._open[env].append(block)

    def cut(self, env: int) -> None:
        """The episode that still runs in one environment ends where it is: what the last step led to is known."""
        if self._open[env]:
            self._emit(self._open[env], cut=True)
        self._open[env] = []

    def finish(self) -> None:
        """As `cut`, in every environment."""
        for env in range(len(self._open)):
            self.cut(env)

    def _emit(self, pieces: list[Block], cut: bool = False) -> None:
        block = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
        if cut:
            block["truncated"][-1] = True
            self.n_cut += 1
        self._rows.push(block)


def _limits(spec: EnvSpec) -> dict[str, Any]:
    """What `Rows` is to hold the actions to; an unbounded action has no bounds to keep."""
    if spec.discrete:
        return {"n_actions": spec.n_actions}
    if not spec.continuous:
        raise ValueError(f"collect: actions must be one integer or a vector of numbers, got {spec.describe_actions()}")
    bounded = np.isfinite(spec.act_low).all() and np.isfinite(spec.act_high).all()
    return {"act_low": spec.act_low, "act_high": spec.act_high} if bounded else {}


def collect(
    behaviours: Sequence[Behaviour],
    env: dict[str, Any],
    n_steps: int,
    path: str | os.PathLike,
    *,
    seed: int = 0,
    n_envs: int = 8,
    deterministic: bool = False,
    agents: Sequence[str] | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Gather `n_steps` transitions and write them as an Arrow file that `rlox.open_dataset` maps.

    Policies act one after the other, each on environments of its own, in proportion to their shares. Rewards are the
    environment's. Memory holds the episodes that run and a block of rows; the file appears whole, or not at all.

    With several agents each life of an agent is an episode, with its own rewards and end; who is not there has no rows.

    Parameters
    ----------
    behaviours : sequence of Behaviour
        At least one.
    env : dict
        ``id kwargs wrappers backend``, as a checkpoint's header has them.
    n_steps : int
        Rows of the dataset; with several agents a step of the environment gives one for each agent that acts.
    path : path
        Where the file goes.
    seed : int
        Decides environments and actions.
    n_envs : int
        Environments stepped side by side, whose unfinished episodes are in memory.
    deterministic : bool
        Take the most likely actions rather than act as in training: sampled, with its exploration noise.
    agents : sequence of str, optional
        With several agents, whose lives are recorded: names of a group, or of agents of one group. None: of all, which
        must then have equal spaces.
    progress : callable, optional
        Called with the number of rows since its last call.

    Returns
    -------
    dict
        The file's metadata: ``env``, ``seed``, ``policies`` (of each, steps, episodes, returns, whether it acted
        deterministically, and what noise was added), ``versions``,
        ``reference_returns`` where both are known, ``agents`` where there are several.

    Raises
    ------
    ValueError
        For a number below 1, more rows than the disk has room for, shares that leave a policy without a step, actions
        that are neither discrete nor continuous; for `agents` that there are not, or of several groups, and policies
        that cannot act for the environment's agents.
    """
    for name, value in (("n_steps", n_steps), ("n_envs", n_envs)):
        if value < 1:
            raise ValueError(f"collect: {name} must be >= 1, got {value}")
    if min(n_envs, n_steps) > MOST_AT_ONCE:
        raise ValueError(f"collect: n_envs must be at most {MOST_AT_ONCE:,}, got {n_envs}")
    counts = _counts([behaviour.share for behaviour in behaviours], n_steps)
    for behaviour, count in zip(behaviours, counts, strict=True):
        if count < 1:
            raise ValueError(f"collect: n_steps must give {behaviour.name} a step, got {n_steps}")
    several = _require_agents(behaviours, env, agents)
    seeds = Rng(seed, Stream.FOREIGN_ENVS).integers(2**62, len(behaviours))
    with ArrowWriter(path) as writer:
        rows: Any = None  # made with the first environment
        entries: list[dict[str, Any]] = []
        n_cut, names = 0, None
        for behaviour, count, own_seed in zip(behaviours, counts, seeds, strict=True):
            side_by_side = min(n_envs, count)
            vec: Any
            if several:
                vec = Lives(env["id"], side_by_side, int(own_seed), env["kwargs"], agents)
                spec, names = vec.spec, vec.agents
            else:
                backend = env.get("backend", "auto")
                vec = make_vec_env(env["id"], side_by_side, int(own_seed), env["kwargs"], env["wrappers"], 0, backend)
                spec = spec_of(vec)
            try:
                if rows is None:
                    _require_disk(path, n_steps, spec)
                    rows = Rows("collect", writer, **_limits(spec))
                episodes = _Episodes(rows, side_by_side * len(names or [""]))
                if several:
                    returns = vec.gather(
                        behaviour.algorithm, count, int(own_seed), deterministic, episodes.push, progress
                    )
                    episodes.finish()
                else:
                    returns = _act(vec, behaviour, count, int(own_seed), deterministic, episodes, progress)
            finally:
                if hasattr(vec, "close"):
                    vec.close()
            n_cut += episodes.n_cut
            acting = {**_told(behaviour), **_exploration(behaviour.algorithm, deterministic)}
            entries.append({**acting, "n_steps": count, **_summary(returns)})
        metadata = {
            "env": {name: env[name] for name in ("id", "kwargs", "wrappers")},
            **({} if names is None else {"agents": list(names)}),
            "seed": seed,
            "policies": entries,
            "n_cut_episodes": n_cut,
            "versions": versions(),
        }
        metadata |= _references(env["id"], entries)
        metadata |= rows.finish()
        writer.finish(metadata)
    return metadata


def _require_agents(behaviours: Sequence[Behaviour], env: dict[str, Any], agents: Sequence[str] | None) -> bool:
    """Whether the environment has several agents; a ValueError where something else does not go with that."""
    trained = next((one for one in behaviours if getattr(one.algorithm, "several", False)), None)
    several = is_multi_agent(env["id"]) or (trained is not None and not isinstance(env["id"], str))
    name = env_name(env["id"])
    if several and env["wrappers"]:
        raise ValueError(f"collect: wrappers must be empty with several agents, got {list(env['wrappers'])}")
    if not several and agents is not None:
        raise ValueError(f"collect: agents must be left out for {name}, which has one, got {', '.join(agents)}")
    if not several and trained is not None:
        raise ValueError(
            f"collect: env must have several agents for {trained.algorithm.name}, which was trained for "
            f"{len(trained.algorithm.agents)}, got {name}"
        )
    return several


def _require_disk(path: str | os.PathLike, n_steps: int, spec: EnvSpec) -> None:
    # Next observations are stored too; the rest of a row is small beside them, or at least 10 bytes.
    row = 2 * math.prod(spec.obs_shape) * np.dtype(spec.obs_dtype).itemsize + 10
    folder = next(folder for folder in Path(path).absolute().parents if folder.exists())
    free = shutil.disk_usage(folder).free
    if n_steps * row > free:
        raise ValueError(
            f"collect: n_steps must fit on the disk, got {n_steps:,}, whose rows take {n_steps * row / 2**30:,.1f} "
            f"GiB, where {free / 2**30:,.1f} GiB are free at {folder}"
        )


def _told(behaviour: Behaviour) -> dict[str, Any]:
    return {"name": behaviour.name, **behaviour.info}


def _exploration(algorithm: Any, deterministic: bool) -> dict[str, Any]:
    """How the actions were chosen: whether always the most likely ones, and the noise that was added to them."""
    if algorithm is None:
        return {"deterministic": False}
    if getattr(algorithm, "several", False):
        return {"deterministic": deterministic}
    from rlox.nn.policies import DeterministicPolicy

    c: Any = getattr(algorithm, "config", None)
    noise = 0.0 if deterministic else getattr(c, "exploration_noise", 0.0)
    if noise:
        return {"deterministic": False, "exploration_noise": noise, "noise_correlation": c.noise_correlation}
    return {"deterministic": deterministic or isinstance(getattr(algorithm, "policy", None), DeterministicPolicy)}


def _summary(returns: list[float]) -> dict[str, Any]:
    """Of the episodes that came to their end."""
    if not returns:
        return {"n_episodes": 0}
    return {"n_episodes": len(returns), "mean_return": float(np.mean(returns)), "std_return": float(np.std(returns))}


def _references(env_id: str, entries: list[dict[str, Any]]) -> dict[str, Any]:
    known = {policy["name"]: policy["mean_return"] for policy in entries if "mean_return" in policy}
    if "random" in known and "expert" in known:
        return {"reference_returns": {"random": known["random"], "expert": known["expert"]}}
    reference = reference_returns(env_id)
    return {} if reference is None else {"reference_returns": reference._asdict()}


def _counts(shares: list[float], n: int) -> list[int]:
    """`n` in proportion to `shares`, by the largest remainders."""
    if not shares or not all(math.isfinite(share) and share > 0 for share in shares):
        raise ValueError(f"collect: shares must be above 0 and finite, got {shares}")
    exact = [n * share / sum(shares) for share in shares]
    counts = [int(part) for part in exact]
    by_remainder = sorted(range(len(shares)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: n - sum(counts)]:
        counts[i] += 1
    return counts


def _act(
    vec: Any,
    behaviour: Behaviour,
    count: int,
    seed: int,
    deterministic: bool,
    episodes: _Episodes,
    progress: Callable[[int], None] | None,
) -> list[float]:
    """Take `count` steps; returns the returns of the episodes that came to their end."""
    spec, algorithm, rng = spec_of(vec), behaviour.algorithm, Rng(seed, Stream.ACTION)
    obs = np.array(vec.reset_all())
    n, noise = len(obs), None
    actor, remembering = getattr(algorithm, "actor", None), None
    if isinstance(actor, RecurrentActor):
        remembering = Remembering(actor, n, rng, deterministic)
    if algorithm is not None and not deterministic:
        import torch

        torch.manual_seed(seed)  # what `predict` draws from
        if hasattr(algorithm, "explore"):
            algorithm.explore()
        if hasattr(algorithm, "make_noise"):
            noise = algorithm.make_noise(n)
    row_bytes = 2 * obs[0].nbytes + 4 * math.prod(spec.action_shape) + 6
    n_rows = min(-(-count // n), max(1, min(1024, block_rows(row_bytes) // n)))
    block = {
        "obs": np.empty((n_rows, n, *spec.obs_shape), spec.obs_dtype),
        "next_obs": np.empty((n_rows, n, *spec.obs_shape), spec.obs_dtype),
        "actions": np.empty((n_rows, n, *spec.action_shape), spec.action_dtype),
        "rewards": np.empty((n_rows, n), np.float32),
        "terminated": np.empty((n_rows, n), np.bool_),
        "truncated": np.empty((n_rows, n), np.bool_),
    }
    returns: list[float] = []
    taken = 0
    while taken < count:
        used = min(n_rows, -(-(count - taken) // n))
        for t in range(used):
            if algorithm is None:
                actions = spec.random_actions(rng, n)
            elif remembering is not None:
                actions = spec.clip(remembering(obs))
            elif not deterministic and hasattr(algorithm, "explored"):
                actions = algorithm.explored(obs, noise, rng)
            else:
                actions = algorithm.predict(obs, deterministic=deterministic)
            block["obs"][t], block["actions"][t] = obs, actions
            step = vec.step_all(block["actions"][t])
            ended = step["terminated"] | step["truncated"]
            for keeper in (noise, remembering):
                if keeper is not None:
                    keeper.end(ended)
            block["next_obs"][t], block["rewards"][t] = step["final_obs"], step["rewards"]
            block["terminated"][t], block["truncated"][t] = step["terminated"], step["truncated"]
            kept = min(n, count - taken - t * n)  # of the last step only so many rows are asked for
            returns += step["episode_return"][:kept][ended[:kept]].tolist()
            obs = step["obs"]
        for env in range(n):
            stop = min(used, -(-(count - taken - env) // n))
            episodes.push(env, {name: column[:stop, env].copy() for name, column in block.items()})
        done = min(used * n, count - taken)
        taken += done
        if progress is not None:
            progress(done)
    episodes.finish()
    return returns


def _stretches(first: int, stop: int, size: int, seams: np.ndarray) -> Iterator[tuple[int, int]]:
    """Ranges of at most `size` numbers from `first` to `stop`; none has a seam within."""
    for start, end in pairwise([first, *(int(seam) for seam in seams if first < seam < stop), stop]):
        for at in range(start, end, size):
            yield at, min(end, at + size)


def _differ(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Of observations (T, …), which are not the same, (T,) bool; NaN is NaN."""
    same = (a == b) | ((a != a) & (b != b))
    return ~same.reshape(len(same), -1).all(1)


def write_replay(
    algorithm: Any,
    path: str | os.PathLike,
    info: dict[str, Any],
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Write what the replay memory of an off-policy algorithm holds, oldest first, as `collect` writes its dataset.

    An episode is cut where the next transition does not follow on: where environments started afresh after a resume.

    Parameters
    ----------
    algorithm
        As `from_checkpoint` gives it, with its memory.
    path, progress
        As of `collect`.
    info : dict
        What the dataset is to say of the policy that was learning.

    Raises
    ------
    ValueError
        For a memory that is empty, of another kind than uniform or prioritized, or that holds n-step returns.
    """
    buffer, n_envs, spec = algorithm.buffer, algorithm.n_envs, algorithm.spec
    if not isinstance(buffer, ReplayBuffer):
        raise ValueError(f"collect: the memory must be uniform or prioritized, got {type(buffer).__name__}")
    if buffer.n_step > 1:
        raise ValueError(f"collect: the memory must hold single steps, got returns of {buffer.n_step} steps")
    if len(buffer) == 0:
        raise ValueError(
            "collect: the memory must hold transitions, got none; was the run made with checkpoint.memory?"
        )
    count = buffer.get_state(since=2**62)["count"]
    # Row k that was ever pushed is of environment k % n_envs.
    first = -(-(count - len(buffer)) // n_envs) * n_envs
    with ArrowWriter(path) as writer:
        rows = Rows("collect", writer, **_limits(spec))
        episodes = _Episodes(rows, n_envs)
        size = max(1, block_rows(8 * spec.obs_dim) // n_envs) * n_envs
        reached: list[np.ndarray | None] = [None] * n_envs  # what the last row of each environment led to
        for start, stop in _stretches(first, count, size, buffer.seams):
            if start in buffer.seams:
                episodes.finish()
            batch = buffer.gather(np.arange(start, stop) % buffer.capacity)
            block = {name: np.asarray(batch[name]) for name in COLUMNS}
            block["actions"] = block["actions"].reshape(-1, *spec.action_shape).astype(spec.action_dtype)
            for env in range(n_envs):
                rows_of = {name: column[env::n_envs].copy() for name, column in block.items()}
                obs, after = rows_of["obs"], rows_of["next_obs"]
                # Memories of rlox 0.6.0 have no seams; an observation that does not follow on shows one too.
                parts = [0, *(np.flatnonzero(_differ(after[:-1], obs[1:])) + 1), len(obs)]
                before = reached[env]
                if before is not None and len(obs) and _differ(before, obs[:1])[0]:
                    episodes.cut(env)
                for at, end in pairwise(parts):
                    if at:
                        episodes.cut(env)
                    episodes.push(env, {name: column[at:end] for name, column in rows_of.items()})
                reached[env] = after[-1:] if len(obs) else reached[env]
            if progress is not None:
                progress(stop - start)
        episodes.finish()
        metadata = {
            "env": {"id": algorithm.env_id, "kwargs": algorithm.env_kwargs, "wrappers": algorithm.env_wrappers},
            "seed": algorithm.seed,
            "policies": [{**info, "name": "replay", "n_steps": count - first}],
            "n_cut_episodes": episodes.n_cut,
            "versions": versions(),
        }
        metadata |= _references(algorithm.env_id, [])
        metadata |= rows.finish()
        writer.finish(metadata)
    return metadata
