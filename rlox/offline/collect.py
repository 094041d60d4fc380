"""Collection of a dataset: policies act in vectorised environments, or a replay memory is written to a file."""

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
from rlox.config import MOST_AT_ONCE
from rlox.envs import EnvSpec, env_name, make_vec_env
from rlox.kernels.buffers.replay import ReplayBuffer
from rlox.kernels.rng import Rng
from rlox.multi_agent import is_multi_agent
from rlox.nn.acting import EpisodeActor, acting_policy
from rlox.offline.agents import AgentEpisodes
from rlox.offline.arrow import ArrowWriter, block_rows
from rlox.offline.rows import COLUMNS, Block, Rows, allocate_block
from rlox.offline.scores import reference_returns


@dataclass
class Behaviour:
    """One of the policies that collect a dataset."""

    name: str
    share: float  # of the steps; shares are relative to each other
    algorithm: Any = None  # its `actor` acts; None: uniformly random actions
    info: dict[str, Any] = field(default_factory=dict)  # entries for the dataset's metadata


class _Episodes:
    """Joins the interleaved rows of N environments (or agents) into whole episodes."""

    def __init__(self, rows: Rows, n_envs: int):
        self._rows = rows
        self._open: list[list[Block]] = [[] for _ in range(n_envs)]
        self.n_cut = 0

    def push(self, env: int, block: Block) -> None:
        """Add the next rows of one environment."""
        ends = np.flatnonzero(block["terminated"] | block["truncated"])
        if len(ends):
            stop = int(ends[-1]) + 1
            self._emit([*self._open[env], {name: column[:stop] for name, column in block.items()}])
            self._open[env], block = [], {name: column[stop:] for name, column in block.items()}
        if len(block["rewards"]):
            self._open[env].append(block)

    def cut(self, env: int) -> None:
        """Truncate the running episode of one environment after its last step, whose next observation is known."""
        if self._open[env]:
            self._emit(self._open[env], cut=True)
        self._open[env] = []

    def finish(self) -> None:
        """Truncate the running episodes of all environments, as `cut`."""
        for env in range(len(self._open)):
            self.cut(env)

    def _emit(self, pieces: list[Block], cut: bool = False) -> None:
        block = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
        if cut:
            block["truncated"][-1] = True
            self.n_cut += 1
        self._rows.push(block)


def _limits(spec: EnvSpec) -> dict[str, Any]:
    """Return the limits that `Rows` checks actions against; unbounded actions have none."""
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
    """Collect `n_steps` transitions and write them to an Arrow file that `rlox.open_dataset` maps.

    Policies act one after the other, each in its own environments, in proportion to their shares. Rewards are the
    environment's. Only the running episodes and a block of rows are in memory; the file appears complete or not at all.

    With several agents, each life of an agent is an episode, with its own rewards and end; absent agents have no rows.

    Parameters
    ----------
    behaviours : sequence of Behaviour
        At least one.
    env : dict
        ``id kwargs wrappers backend``, as in a checkpoint's header.
    n_steps : int
        Rows of the dataset; with several agents, a step of the environment gives one row for each agent that acts.
    path : path
        Path of the file.
    seed, n_envs : int
        Seed of environments and actions, and number of environments side by side, whose episodes are in memory.
    deterministic : bool
        Take the most likely actions instead of acting as in training, where actions are sampled with exploration noise.
    agents : sequence of str, optional
        With several agents, those to record: names of a group, or of agents of one group. None records all agents,
        which must then have equal spaces.
    progress : callable, optional
        Called with the number of rows since its last call.

    Returns
    -------
    dict
        The file's metadata: ``env``, ``seed``, ``policies`` (each with its steps, episodes, returns, whether it acted
        deterministically, and the added noise), ``versions``, ``reference_returns`` if both are known, ``agents`` if
        there are several.

    Raises
    ------
    ValueError
        For a number below 1, more rows than fit on the disk, shares that leave a policy without a step, or actions that
        are neither discrete nor continuous; for unknown `agents`, agents of several groups, or policies that cannot act
        for the environment's agents.
    """
    for name, value in (("n_steps", n_steps), ("n_envs", n_envs)):
        if value < 1:
            raise ValueError(f"collect: {name} must be >= 1, got {value}")
    if n_envs > MOST_AT_ONCE:
        raise ValueError(f"collect: n_envs must be at most {MOST_AT_ONCE:,}, got {n_envs}")
    counts = _counts([behaviour.share for behaviour in behaviours], n_steps)
    for behaviour, count in zip(behaviours, counts, strict=True):
        if count < 1:
            raise ValueError(f"collect: n_steps must give {behaviour.name} a step, got {n_steps}")
    several = _require_agents(behaviours, env, agents)
    seeds = Rng(seed, Stream.FOREIGN_ENVS).integers(2**62, len(behaviours))
    with ArrowWriter(path) as writer:
        rows: Any = None  # created with the first environment
        entries: list[dict[str, Any]] = []
        n_cut, names = 0, None
        for behaviour, count, own_seed in zip(behaviours, counts, seeds, strict=True):
            side_by_side = min(n_envs, count)
            vec: Any
            if several:
                vec = AgentEpisodes(env["id"], side_by_side, int(own_seed), env["kwargs"], agents)
                spec, names = vec.spec, vec.agents
            else:
                backend = env.get("backend", "auto")
                vec = make_vec_env(env["id"], side_by_side, int(own_seed), env["kwargs"], env["wrappers"], 0, backend)
                spec = vec.spec
            try:
                if rows is None:
                    _require_disk(path, n_steps, spec)
                    rows = Rows("collect", writer.write, **_limits(spec))
                episodes = _Episodes(rows, side_by_side * len(names or [""]))
                if several:
                    own = (behaviour.algorithm, count, int(own_seed), deterministic)
                    returns = vec.gather(*own, episodes.push, progress)
                    episodes.finish()
                else:
                    returns = _act(vec, behaviour, count, int(own_seed), deterministic, episodes, progress)
            finally:
                vec.close()
            n_cut += episodes.n_cut
            acting = {"name": behaviour.name, **behaviour.info, **_exploration(behaviour.algorithm, deterministic)}
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
    """Return whether the environment has several agents. Raises ValueError if other arguments contradict that."""
    trained = next((each for each in behaviours if getattr(each.algorithm, "several", False)), None)
    several = is_multi_agent(env["id"]) or (trained is not None and not isinstance(env["id"], str))
    name = env_name(env["id"])
    if several and env["wrappers"]:
        raise ValueError(f"collect: wrappers must be empty with several agents, got {list(env['wrappers'])}")
    if not several and agents is not None:
        raise ValueError(f"collect: agents must be left out for {name}, which has one agent, got {', '.join(agents)}")
    if not several and trained is not None:
        raise ValueError(
            f"collect: env must have several agents for {trained.algorithm.name}, which was trained for "
            f"{len(trained.algorithm.agents)}, got {name}"
        )
    return several


def _require_disk(path: str | os.PathLike, n_steps: int, spec: EnvSpec) -> None:
    # Next observations are stored as well; the rest of a row is small in comparison, or has at least 10 bytes.
    row = 2 * math.prod(spec.obs_shape) * np.dtype(spec.obs_dtype).itemsize + 10
    folder = next(folder for folder in Path(path).absolute().parents if folder.exists())
    free = shutil.disk_usage(folder).free
    if n_steps * row > free:
        raise ValueError(
            f"collect: n_steps must fit on the disk, got {n_steps:,}, whose rows take {n_steps * row / 2**30:,.1f} "
            f"GiB, but {free / 2**30:,.1f} GiB are free at {folder}"
        )


def _exploration(algorithm: Any, deterministic: bool) -> dict[str, Any]:
    """Return how actions were chosen: whether they were always the most likely ones, and the added noise."""
    if algorithm is None:
        return {"deterministic": False}
    if getattr(algorithm, "several", False):
        return {"deterministic": deterministic}
    from rlox.nn.actors import DeterministicPolicy

    c: Any = getattr(algorithm, "config", None)
    noise = 0.0 if deterministic else getattr(c, "exploration_noise", 0.0)
    if noise:
        return {"deterministic": False, "exploration_noise": noise, "noise_correlation": c.noise_correlation}
    return {"deterministic": deterministic or isinstance(getattr(algorithm, "policy", None), DeterministicPolicy)}


def _summary(returns: list[float]) -> dict[str, Any]:
    """Return statistics of the completed episodes."""
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
    """Divide `n` in proportion to `shares`, by the method of largest remainders."""
    if not shares or not all(math.isfinite(share) and share > 0 for share in shares):
        raise ValueError(f"collect: shares must be above 0 and finite, got {shares}")
    exact = [n * share / sum(shares) for share in shares]
    counts = [int(part) for part in exact]
    by_remainder = sorted(range(len(shares)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: n - sum(counts)]:
        counts[i] += 1
    return counts


def _begin(algorithm: Any, n: int, seed: int, deterministic: bool, rng: Rng) -> EpisodeActor:
    """Return the policy of an algorithm in `n` environments, which acts as in training unless `deterministic`."""
    algorithm.backend.require_unchanged("collect")
    policy = acting_policy(algorithm.actor, algorithm.device)
    if deterministic:
        policy.require_mode("collect")
    else:
        import torch

        torch.manual_seed(seed)  # which policies without a memory draw from
        if hasattr(algorithm, "_explore"):
            algorithm._explore()
    transform = None if algorithm.normalizer is None else algorithm.normalizer.normalize
    explore = getattr(algorithm, "_make_noise", None)
    return EpisodeActor(policy, n, rng if policy.state_dim else None, deterministic, transform, explore, rng)


def _act(
    vec: Any,
    behaviour: Behaviour,
    count: int,
    seed: int,
    deterministic: bool,
    episodes: _Episodes,
    progress: Callable[[int], None] | None,
) -> list[float]:
    """Take `count` steps. Returns the returns of completed episodes."""
    spec, algorithm, rng = vec.spec, behaviour.algorithm, Rng(seed, Stream.ACTION)
    obs, masked = np.array(vec.reset_all()), spec.masked
    mask = vec.action_masks() if masked else None
    n = len(obs)
    agent = None if algorithm is None else _begin(algorithm, n, seed, deterministic, rng)
    row_bytes = 2 * obs[0].nbytes + 4 * math.prod(spec.action_shape) + 6
    n_rows = min(-(-count // n), max(1, min(1024, block_rows(row_bytes) // n)))
    block = allocate_block(spec, (n_rows, n))
    returns: list[float] = []
    taken = 0
    while taken < count:
        used = min(n_rows, -(-(count - taken) // n))
        for t in range(used):
            actions = spec.random_actions(rng, n, mask) if agent is None else spec.clip(agent.act(obs, mask))
            block["obs"][t], block["actions"][t] = obs, actions
            if masked:
                block["action_masks"][t] = mask
            step = vec.step_all(block["actions"][t])
            ended = step["terminated"] | step["truncated"]
            if agent is not None:
                agent.end(ended)
            block["next_obs"][t], block["rewards"][t] = step["final_obs"], step["rewards"]
            block["terminated"][t], block["truncated"][t] = step["terminated"], step["truncated"]
            kept = min(n, count - taken - t * n)  # the last step may give more rows than are needed
            returns += step["episode_return"][:kept][ended[:kept]].tolist()
            obs = step["obs"]
            if masked:
                block["next_action_masks"][t], mask = step["final_action_mask"], np.array(step["action_mask"])
        for env in range(n):
            stop = min(used, -(-(count - taken - env) // n))
            episodes.push(env, {name: column[:stop, env].copy() for name, column in block.items()})
        done = min(used * n, count - taken)
        taken += done
        if progress is not None:
            progress(done)
    episodes.finish()
    return returns


def _ranges_without_seams(first: int, stop: int, size: int, seams: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield ranges of at most `size` numbers from `first` to `stop`, without a seam inside a range."""
    for start, end in pairwise([first, *(int(seam) for seam in seams if first < seam < stop), stop]):
        for at in range(start, end, size):
            yield at, min(end, at + size)


def _differ(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return which observations (T, …) differ, (T,) bool; NaN equals NaN."""
    same = (a == b) | ((a != a) & (b != b))
    return ~same.all(axis=tuple(range(1, same.ndim)))


def write_replay(
    algorithm: Any,
    path: str | os.PathLike,
    info: dict[str, Any],
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Write the contents of an off-policy algorithm's replay memory, oldest first, in the format of `collect`.

    An episode is truncated where the next transition does not continue it: where environments started new episodes
    after a resume. `algorithm` comes from `from_checkpoint`, with its memory; `info` has entries on the learning policy
    for the dataset's metadata; `path` and `progress` are as for `collect`.

    Raises ValueError if the memory is empty, is neither uniform nor prioritized, or contains n-step returns.
    """
    buffer, n_envs, spec, options = algorithm.buffer, algorithm.n_envs, algorithm.spec, algorithm.env_options
    if not isinstance(buffer, ReplayBuffer):
        raise ValueError(f"collect: the memory must be uniform or prioritized, got {type(buffer).__name__}")
    if buffer.n_step > 1:
        raise ValueError(f"collect: the memory must contain single steps, got returns of {buffer.n_step} steps")
    if getattr(buffer, "mask_dim", 0):
        raise ValueError(
            "collect: the environment must not mask actions, since the memory has no masks of episodes' first "
            "observations; collect with the policy of the checkpoint"
        )
    if len(buffer) == 0:
        raise ValueError("collect: the memory must contain transitions, got none; did the run use checkpoint.memory?")
    count = buffer.get_state(since=2**62)["count"]
    # The k-th pushed row belongs to environment k % n_envs.
    first = -(-(count - len(buffer)) // n_envs) * n_envs
    with ArrowWriter(path) as writer:
        rows = Rows("collect", writer.write, **_limits(spec))
        episodes = _Episodes(rows, n_envs)
        size = max(1, block_rows(8 * spec.obs_dim) // n_envs) * n_envs
        reached: list[np.ndarray | None] = [None] * n_envs  # the observation after each environment's last row
        for start, stop in _ranges_without_seams(first, count, size, buffer.seams):
            if start in buffer.seams:
                episodes.finish()
            batch = buffer.gather(np.arange(start, stop) % buffer.capacity)
            block = {name: np.asarray(batch[name]) for name in COLUMNS}
            block["actions"] = block["actions"].reshape(-1, *spec.action_shape).astype(spec.action_dtype)
            for env in range(n_envs):
                rows_of = {name: column[env::n_envs].copy() for name, column in block.items()}
                obs, after = rows_of["obs"], rows_of["next_obs"]
                # Memories of rlox 0.6.0 have no seams, but an observation that differs from the last one shows a seam.
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
            "env": {"id": env_name(algorithm.env_id), "kwargs": options.kwargs, "wrappers": options.wrappers},
            "seed": algorithm.seed,
            "policies": [{**info, "name": "replay", "n_steps": count - first}],
            "n_cut_episodes": episodes.n_cut,
            "versions": versions(),
        }
        metadata |= _references(algorithm.env_id, [])
        metadata |= rows.finish()
        writer.finish(metadata)
    return metadata
