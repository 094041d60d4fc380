"""Shared code of algorithms that act and learn from a replay memory, of transitions or of sequences.

Their loop, and the memory, which is chosen at construction, created on first use and stored next to checkpoints.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rlox.buffers import (
    Buffer,
    OfflineDataset,
    buffer_config,
    buffer_config_class,
    buffer_names,
    make_buffer,
    takes_masks,
)
from rlox.buffers import files as replay_files
from rlox.callbacks import Callback
from rlox.callbacks.loggers import LoggerCallback
from rlox.checkpoint import Checkpoint, load_checkpoint, one_line, save_checkpoint
from rlox.checkpoint.streams import Stream
from rlox.collectors import ReplayCollector
from rlox.collectors.exploration import restore_noise
from rlox.config import BufferConfig, MmapBufferConfig, integer, require
from rlox.distributed.ranks import Ranks, memory_folder
from rlox.envs import EnvSpec, env_name
from rlox.offline.mixing import require_mixable
from rlox.processes.failures import Diverged
from rlox.training.agent import Agent
from rlox.training.algorithm import Updates, require_finite

if TYPE_CHECKING:
    from torch import nn

    from rlox.collectors.vec_normalize import VecNormalize


@dataclass(frozen=True)
class Episodes:
    """Result of one round of off-policy collection; its length is the number of environment steps taken."""

    n_steps: int  # over all environments together
    episode_returns: np.ndarray  # (E,) f64, undiscounted, of the episodes that ended
    episode_lengths: np.ndarray  # (E,) int64, steps

    def __len__(self) -> int:
        return self.n_steps


@dataclass(frozen=True)
class Rounds(Episodes):
    """Result of whole rounds of collection and updates."""

    metrics: dict[str, np.ndarray]  # (U,) f64 each, one number per update; empty if there was no update
    update_s: float  # seconds spent in updates


def off_policy(algorithm) -> dict[str, float]:
    """Collect into the replay memory and update from it until the horizon is reached or a callback stops the training.

    A round is ``round_steps`` environment steps, followed by the due updates (`gradient_steps`, or as many as the
    replay ratio requires), once the memory has received `learning_starts` steps and contains ``min_rows`` rows. Metrics
    are means over the updates since the last report. A training has a hundred reports, a long one a report every 1,000
    steps; callbacks receive metrics, and can stop the training, only at reports. If no Python code needs to see single
    steps, all rounds up to the next report are one call of the algorithm's kernel, with the same results.

    Raises
    ------
    FloatingPointError
        When a metric of a report is not finite.
    """
    c, config, callbacks = algorithm.counters, algorithm.config, algorithm.callbacks
    ranks = algorithm.ranks
    hooks = ranks if ranks.joined else callbacks  # ranks call hooks, and learn their answers, together
    collector, buffer, clock = algorithm.collector, algorithm._memory.buffer, time.perf_counter
    update = algorithm._make_updates() if algorithm.backend.captures else Updates(algorithm)
    end = c.end
    report_every = min(1000, max(1, c.horizon_steps // 100))
    metrics: dict[str, float] = {"mean_reward": c.mean_reward}
    collect_s = update_s = 0.0
    device_clock: Any = contextlib.nullcontext()
    if algorithm.device == "cuda":
        from rlox.gpu.clock import UpdateClock

        device_clock = UpdateClock()
    collector.env_steps = c.env_steps
    go_on = hooks.call_hook("on_training_start", algorithm=algorithm)
    algorithm.backend.require_unchanged("train")
    fused = algorithm._can_run_rounds()
    left = algorithm._pretraining_due() if go_on and algorithm._dataset is not None else 0
    while go_on and left:
        begun = clock()
        c.in_round = 0
        for _ in range(min(left, 100)):
            update()
            c.updates += 1
            left -= 1
        times = {"time/collect_s": 0.0, "time/update_s": clock() - begun}
        losses = update.average()
        metrics = {"mean_reward": c.mean_reward, **(ranks.metrics(losses) if ranks.joined else losses), **times}
        require_finite({name: value for name, value in metrics.items() if name != "mean_reward"}, algorithm)
        go_on = hooks.call_hook("on_step", algorithm=algorithm, step=c.env_steps, reward=c.mean_reward, metrics=metrics)
    since, since_steps, cpu = clock(), c.env_steps, time.process_time()
    while go_on and c.env_steps < end:
        started, round_start, c.in_round = clock(), c.env_steps, 0
        if fused:
            done = algorithm._rounds(
                min(report_every - (c.env_steps - c.horizon_start) % report_every, end - c.env_steps)
            )
            collector.env_steps = c.env_steps
            # The memory is plain, so that its newest rows are transitions of float32.
            count = buffer.get_state(since=2**62)["count"]
            rows = buffer.get_state(since=max(0, count - done.n_steps))["rows"]
            collector.require_finite_rows(rows.view(np.float32))
            c.ended(done.episode_returns, done.episode_lengths)
            if done.metrics:
                update.history.append(done.metrics)
                update.in_rounds = True
            update_s += done.update_s
            collect_s += clock() - started - done.update_s
        else:
            returns: list[float] = []
            lengths: list[int] = []
            try:
                while c.env_steps - round_start < algorithm._round_steps():
                    algorithm._explore()
                    random = c.env_steps < config.learning_starts
                    ended_returns, ended_lengths = collector.step(algorithm.actor, buffer, random)
                    c.env_steps += algorithm.n_envs
                    if len(ended_returns):
                        returns += ended_returns.tolist()
                        lengths += ended_lengths.tolist()
            except Diverged:
                require_finite(update.average(), algorithm)
                raise
            except Exception as e:
                # A policy that is no longer finite also causes such errors, and its weights are not worth keeping.
                require_finite(update.average(), algorithm)
                # An environment failed, not the learner, so the weights of the last update are worth keeping.
                if not ranks.joined:
                    callbacks.on_collection_error(algorithm=algorithm, error=e)
                raise
            if algorithm.normalizer is not None:
                ranks.merge(algorithm.normalizer)
            ended = ranks.episodes(np.asarray(returns), np.asarray(lengths, np.int64))
            done = Episodes(c.env_steps - round_start, *ended)
            c.in_round = done.n_steps
            c.ended(done.episode_returns, done.episode_lengths)
            callbacks.on_rollout_end(algorithm=algorithm, batch=done)
            collected = clock()
            begun = c.env_steps - algorithm._memory.start >= config.learning_starts
            if begun and not ranks.any(len(buffer) < algorithm._min_rows):
                with device_clock:
                    for _ in range(algorithm._updates_due(done.n_steps)):
                        update()
                        c.updates += 1
            now = clock()
            collect_s += collected - started
            update_s += now - collected
        so_far = c.env_steps - c.horizon_start
        if so_far // report_every == (so_far - done.n_steps) // report_every and c.env_steps < end:
            continue
        losses = update.average()
        if algorithm.device == "cuda":
            collect_s, update_s = device_clock.divide(collect_s, update_s)
        if ranks.joined:
            losses = ranks.metrics(losses)
        require_finite(losses, algorithm)
        metrics = {
            "mean_reward": c.mean_reward,
            "mean_length": c.mean_length,
            **losses,
            **algorithm.schedule_values(c.progress),
            "time/steps_per_second": (c.env_steps - since_steps) / (clock() - since),
            "time/collect_s": collect_s,
            "time/update_s": update_s,
            "time/cpu_s": time.process_time() - cpu,
        }
        collect_s = update_s = 0.0
        now = clock()
        go_on = hooks.call_hook("on_step", algorithm=algorithm, step=c.env_steps, reward=c.mean_reward, metrics=metrics)
        # Evaluation and saving do not count towards the training's speed.
        since += clock() - now
        cpu = time.process_time()
    algorithm.backend.require_unchanged("train")
    hooks.call_hook("on_training_end", algorithm=algorithm)
    return metrics


class ReplayAgent(Agent):
    """Base class of `rlox.training.off_policy.OffPolicyAlgorithm`, which documents the arguments, and of
    `rlox.training.sequences.SequenceAlgorithm`."""

    _loop = staticmethod(off_policy)
    _stream = Stream.REPLAY
    _usual_memory: ClassVar[str]
    _min_rows = 1  # rows that the memory must contain for an update
    _state_dim = 0  # S, the size of the agent's own state that the memory stores with every step; 0 for none
    _keeps_masks = False  # whether the memory stores the masks of observations acted on, besides those of the next

    collector: ReplayCollector
    normalizer: VecNormalize | None = None

    def __init__(
        self,
        env_id: str | Callable[[], Any],
        n_envs: int = 1,
        seed: int = 42,
        policy: nn.Module | None = None,
        logger: LoggerCallback | None = None,
        callbacks: Iterable[Callback] | None = None,
        *,
        buffer: str | BufferConfig | Mapping[str, Any] | Buffer | None = None,
        buffer_size: int | None = None,
        n_step: int | None = None,
        prioritized: bool | None = None,
        dataset: OfflineDataset | None = None,
        **arguments: Any,
    ):
        where = type(self).__name__
        if dataset is not None and self.Config.uses_dataset == "never":
            raise TypeError(f"{where}: dataset must be None, because {self.name} learns only from its replay memory")
        self._dataset = dataset
        self._dataset_id: Any = None  # identity of a mixed dataset, known even if a checkpoint's was not passed
        self._memory = ReplayMemory(
            where, self.Config.replays, self._usual_memory, buffer, buffer_size, n_step, prioritized
        )
        super().__init__(env_id, n_envs, seed, policy, logger, callbacks, **arguments)
        self._require_room(where)
        self.collector.stores_masks = self._keeps_masks and self.spec.masked
        self._memory.connect(self.ranks, self.collector, self.spec, self.config.gamma, self._state_dim)
        if dataset is not None:
            self._take_dataset(where)

    def _require_mixable(self, where: str) -> None:
        """Raise an error unless the dataset fits the environment, and its rewards are those learned from."""
        require_mixable(self._dataset, self.spec, where)
        if self.collector.reward_fn is not None:
            raise ValueError(f"{where}: reward_fn must be None with a dataset, which has the environment's rewards")

    # ---- what a family defines

    def sample(self) -> Any:
        """Return the batch of the next update."""
        raise NotImplementedError

    def _require_room(self, where: str) -> None:
        """Raise ValueError unless the memory fits the environments and has room for a batch."""
        raise NotImplementedError

    def _take_dataset(self, where: str) -> None:
        """Check the dataset, and prepare to learn from it."""
        raise NotImplementedError

    def _round_steps(self) -> int:
        """Return the environment steps of a round, over all environments."""
        return -(-getattr(self.config, "train_freq", 1) // self.n_envs) * self.n_envs

    def _updates_due(self, n_steps: int) -> int:
        """Return the number of updates after a round of `n_steps` environment steps."""
        raise NotImplementedError

    def _pretraining_due(self) -> int:
        """Return how many updates on a dataset precede the first step."""
        return 0

    def _explore(self) -> None:
        """Set the policy's exploration for the current step; called before each step of the environments."""

    def _can_run_rounds(self) -> bool:
        """Return whether the loop may call `rounds`: no Python code needs to see single steps."""
        return False

    # ---- memory and dataset

    @property
    def buffer(self) -> Buffer:
        """The replay memory, created on first access, because an evaluation does not need it.

        Raises
        ------
        ValueError
            If the checkpoint was trained with a kind of memory that is unknown here.
        """
        return self._memory.buffer

    def _prepare_training(self) -> None:
        super()._prepare_training()
        if self._dataset is None and self._dataset_id is not None:
            raise ValueError(
                f"{type(self).__name__}.train: the checkpoint was trained with a dataset that it does not contain, "
                f"{one_line(self._dataset_id, 200)}; pass it to from_checkpoint(dataset=...)"
            )

    def save_buffer(self, path: str | os.PathLike) -> None:
        """Write the replay memory to a file. This needs as much memory again while it runs.

        Raises
        ------
        OSError
            As `rlox.checkpoint.save_checkpoint`.
        """
        self._memory.save(path, self.env_id)

    def load_buffer(self, path: str | os.PathLike) -> None:
        """Continue with the replay memory that `save_buffer` wrote.

        If the environments are not in the state that its newest transitions led to, no n-step return spans both.

        Raises
        ------
        FileNotFoundError, ValueError
            As `rlox.checkpoint.load_checkpoint`; also if the file does not fit this memory.
        """
        self._memory.load(path, self.env_id)

    # ---- checkpoints

    def _own_state(self) -> tuple[dict[str, Any], dict[str, dict[str, np.ndarray]]]:
        info, tensors = super()._own_state()
        info["buffer"] = self._memory.describe()
        if self._dataset_id is not None:
            info["dataset"] = self._dataset_id
        if self.collector.exploration is not None:
            tensors["action_noise"] = self.collector.exploration.state()
        return info, tensors

    def _state_of_rank(self) -> dict[str, dict[str, np.ndarray]]:
        noise = self.collector.exploration
        return {**super()._state_of_rank(), "action_noise": {} if noise is None else noise.state()}

    @classmethod
    def _saved_arguments(cls, header: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        return {} if "buffer" in given else choose_saved_buffer(header, cls.Config.replays)

    def _restore(self, checkpoint: Checkpoint, same_env: bool = False) -> bool:
        saved = checkpoint.header.get("dataset")
        if self._dataset is not None and self._dataset_id != saved:
            raise ValueError(
                f"the dataset must be that of the saved training, {one_line(saved or 'none', 200)}, got "
                f"{self._dataset_id}; to start a new training from a checkpoint, use init_from"
            )
        self._dataset_id = saved
        exact = super()._restore(checkpoint, same_env)
        restore_noise(self.collector.exploration, checkpoint.tensors.get("action_noise"), exact)
        self._memory.restore(checkpoint, self.counters.env_steps, exact)
        return exact

    def snapshot(self, path: str | os.PathLike, memory: bool = False, **header: Any) -> Callable[[], None]:
        if not memory:
            return super().snapshot(path, **header)
        folder = Path(path).parent
        checkpoint = self.ranks.with_all_ranks(self._checkpoint(**header), folder)
        write_memory, remove_unneeded = self._memory.take(folder)

        def write() -> None:
            checkpoint.header["memory"], checkpoint.tensors["memory"] = write_memory()
            save_checkpoint(path, checkpoint)
            remove_unneeded()
            self.ranks.remove_unneeded(checkpoint.header, memory_folder(folder))

        return write

    def _write_memory(self, folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Write the new part of the replay memory next to a checkpoint that another rank writes into `folder`.

        Returns the data on this memory for that checkpoint.
        """
        return self._memory.take(folder)[0]()

    def close(self) -> None:
        """End the environments' worker processes, and close a memory that uses files."""
        super().close()
        self._memory.close()


class ReplayMemory:
    """A memory for what an algorithm `holds`: ``transitions`` or ``sequences``.

    Parameters
    ----------
    where : str
        The algorithm's class, for messages.
    holds, usual : str
        Contents of the memory, and its default kind.
    buffer, buffer_size, n_step, prioritized
        As for `rlox.training.off_policy.OffPolicyAlgorithm`.

    Attributes
    ----------
    config : BufferConfig or None
        None if the memory itself was passed.
    start : int
        Environment steps that had been taken when the memory was empty.
    device : str
        Whose memory it takes: that of ``cpu``, the host, or ``cuda``.

    Raises
    ------
    TypeError, ValueError
        For an unknown or unsuitable buffer.
    """

    def __init__(
        self,
        where: str,
        holds: str,
        usual: str,
        buffer: str | BufferConfig | Mapping[str, Any] | Buffer | None,
        buffer_size: int | None,
        n_step: int | None,
        prioritized: bool | None,
    ):
        if buffer_size is not None:
            buffer_size = integer(where, "buffer_size", buffer_size, 1)
        if n_step is not None:
            n_step = integer(where, "n_step", n_step, 1)
        if prioritized is not None:
            require(where, "prioritized", prioritized, bool)
        self._where = where
        self._is_default = buffer is None
        self._lost_kind: str | None = None  # a checkpoint's kind of buffer that is unknown in this process
        self._folder: tempfile.TemporaryDirectory | None = None
        self._files: replay_files.ReplayFiles | None = None
        self._saved: Checkpoint | None = None  # the source from which the memory is loaded on first use
        self._goes_on = False  # whether the environments are where that memory's newest transitions led to
        self._buffer: Buffer | None = None
        self.config: BufferConfig | None = None
        self.start = 0
        self.device = "cpu"
        if isinstance(buffer, Buffer):
            self._buffer = buffer
            if not (buffer_size is n_step is prioritized is None):
                raise ValueError(
                    f"{where}: buffer_size, n_step and prioritized must not be given together with a buffer object"
                )
            return
        self.config = buffer_config(buffer, prioritized, usual, size=buffer_size, n_step=n_step)
        if self.config.holds != holds:
            able = [name for name in buffer_names() if buffer_config_class(name).holds == holds]
            raise ValueError(f"{where}: buffer must hold {holds}, got {self.config.name!r}; try {', '.join(able)}")

    def connect(self, ranks: Ranks, collector: ReplayCollector, spec: EnvSpec, gamma: float, state_dim: int) -> None:
        """Remember what the memory is created for; the last argument is the size of the agent's own state."""
        if ranks.joined and isinstance(self.config, MmapBufferConfig):
            raise ValueError(f"{self._where}: buffer must be uniform or prioritized with distributed=ddp, got mmap")
        if self.config is not None:
            collector.n_step = self.config.n_step
        if not state_dim:  # a memory of sequences has been checked with its agent
            self._require_masks(spec, collector)
        self._ranks, self._collector, self._spec = ranks, collector, spec
        self._gamma, self._state_dim = gamma, state_dim

    def _require_masks(self, spec: EnvSpec, collector: ReplayCollector) -> None:
        """Raise ValueError unless the memory stores the masks of legal actions that the environment has."""
        wanted = sum(spec.choices) if spec.masked else 0
        if self.config is None and collector.stores_masks:
            raise ValueError(f"{self._where}: buffer must be a name or a configuration with action masks, not a memory")
        if self.config is None:
            got, kind = getattr(self._buffer, "mask_dim", 0), type(self._buffer).__name__
        elif wanted and self.config.holds == "transitions" and not takes_masks(self.config.name):
            got, kind = 0, self.config.name
        else:
            return
        if got != wanted:
            masks = f"masks of {wanted} actions" if wanted else "no masks"
            raise ValueError(
                f"{self._where}: buffer must have mask_dim={wanted}, because the environment has {masks}, got {kind} "
                f"with {got}"
            )

    @property
    def given(self) -> Any:
        """The memory, if it exists already; else None."""
        return self._buffer

    @property
    def size(self) -> int:
        """Rows for which it has room."""
        memory: Any = self._buffer
        config: Any = self.config
        return config.size if memory is None else memory.capacity

    def choose_folder(self, folder: Path) -> None:
        """Keep a memory of files in `folder`, unless its configuration names one."""
        if isinstance(self.config, MmapBufferConfig) and self.config.folder is None:
            self.config = replace(self.config, folder=str(folder.absolute()))

    @property
    def buffer(self) -> Buffer:
        """The memory, created on first access, because an evaluation does not need it.

        Raises
        ------
        ValueError
            If the checkpoint was trained with a kind of memory that is unknown here.
        """
        if self._lost_kind is not None:
            raise ValueError(
                f"{self._where}: the checkpoint was trained with the buffer {self._lost_kind}, which is not "
                "registered here; import the package that registers it, or pass from_checkpoint(buffer=...)"
            )
        if self._buffer is None:
            self._buffer = self._create()
        if self._saved is not None:
            saved, self._saved = self._saved, None
            folder, entry = self._folder_of(saved.folder), saved.header["memory"]
            replay_files.load(self._buffer, folder, entry, saved.tensors.get("memory", {}))
            self._files = replay_files.ReplayFiles(folder, entry, self._buffer)
            if self._goes_on:
                self._collector.remember_buffer(self._buffer)
        return self._buffer

    def _create(self) -> Buffer:
        config: Any = self.config
        if self._ranks.size > 1:
            config = replace(config, size=-(-config.size // self._ranks.size))
        if isinstance(config, MmapBufferConfig) and config.folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="rlox-replay-")
            config = replace(config, folder=self._folder.name)
        elif isinstance(config, MmapBufferConfig):
            os.makedirs(config.folder, exist_ok=True)  # the memory would take a path that is new as its file's
        try:
            sizes = (self._spec, self._collector.n_envs, self._gamma, self._state_dim, self.device)
            return make_buffer(config, *sizes, with_masks=self._collector.stores_masks)
        except MemoryError as e:
            raise ValueError(f"{self._where}: buffer_size must fit in memory, got {config.size:,}: {e}") from e

    # ---- checkpoints

    def describe(self) -> dict[str, Any]:
        """Return the memory's configuration for a checkpoint's header."""
        config = self.config
        if config is None:
            return {"name": type(self._buffer).__name__}
        # The folder is only valid on this machine; the user who restores the run chooses another.
        folder = {"folder": None} if isinstance(config, MmapBufferConfig) else {}
        return {**config.to_dict(), **folder}

    def restore(self, checkpoint: Checkpoint, n_steps: int, exact: bool) -> None:
        """Load the memory of a checkpoint, taken after `n_steps`, when it is first used; warn if it starts empty.

        `exact` says whether the environments continue where its newest transitions led to.
        """
        self.start = n_steps
        if self._is_default:
            self._lost_kind = checkpoint.header["buffer"]["name"]
        entry = checkpoint.header.get("memory")
        if entry is None or self._buffer is not None:
            return
        saved = checkpoint.header["buffer"]
        why = None
        if not self._is_same(saved):
            own = self.describe()
            differs = ", ".join(f"{k}={own.get(k)} not {v}" for k, v in saved.items() if own.get(k) != v)
            why = f"its configuration differs from the saved one ({differs})"
        elif lost := replay_files.list_missing_files(
            self._folder_of(checkpoint.folder), entry, getattr(self.config, "folder", None)
        ):
            why = f"there is no {lost[0]}"
        elif self._lacks_masks(entry):
            why = "it was saved without the masks of legal actions that the environment has"
        if why is not None:
            warnings.warn(
                f"from_checkpoint: the replay memory starts empty, because {why}", RuntimeWarning, stacklevel=6
            )
            return
        self._saved, self.start, self._goes_on = checkpoint, entry["start"], exact

    def _lacks_masks(self, entry: dict[str, Any]) -> bool:
        """Return whether a saved memory of transitions has no masks of next actions, but this one needs them."""
        if self.config is None or self.config.holds != "transitions" or self._state_dim or not self._spec.masked:
            return False
        values = entry.get("values")
        return isinstance(values, dict) and "mask_dim" not in str(values.get("config"))

    def _is_same(self, saved: dict[str, Any]) -> bool:
        """Return whether a header's memory has the same contents as this one; settings that it lacks (written by
        rlox 0.6.0) count as equal."""
        own = self.config
        if own is None or saved.get("name") != own.name:
            return self.describe() == saved
        here = {"folder": own.folder} if isinstance(own, MmapBufferConfig) else {}
        theirs = buffer_config({**own.to_dict(), **saved, **here})
        return (theirs.n_step, theirs.arguments()) == (own.n_step, own.arguments())

    def _folder_of(self, folder: Path | None) -> Path:
        """Return the folder of the memory's files for a checkpoint in `folder`."""
        return memory_folder(Path(folder or "."), self._ranks.rank)

    def take(self, folder: Path) -> tuple[Callable[[], tuple[dict[str, Any], dict[str, np.ndarray]]], Any]:
        """Copy the new part of the memory. Returns a function that writes it for a checkpoint in `folder`, and one
        that removes unneeded files."""
        mine, start, buffer = self._folder_of(folder), self.start, self.buffer
        if self._folder is not None:
            warnings.warn(
                f"{self._where}: a checkpoint's replay memory is lost when this process ends, because its file is in a "
                'temporary folder; pass buffer={"name": "mmap", "folder": …} to keep it',
                RuntimeWarning,
                stacklevel=5,
            )
        if self._files is None or self._files.folder != mine:
            self._files = replay_files.ReplayFiles(mine)
        taken = self._files.take(buffer)

        def write() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
            entry, arrays = taken.write()
            return {**entry, "start": start}, arrays

        return write, taken.remove_unneeded

    # ---- a file of its own

    def save(self, path: str | os.PathLike, env_id: Any) -> None:
        """Write the whole memory to a file; see `OffPolicyAlgorithm.save_buffer`."""
        state = self.buffer.get_state()
        arrays = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
        header = {
            "memory": self.describe(),
            "memory_start": self.start,
            "env_id": env_name(env_id),
            "position": self._collector.position(),
            "values": {name: value for name, value in state.items() if name not in arrays},
        }
        save_checkpoint(path, Checkpoint(header, {"memory": arrays}))

    def load(self, path: str | os.PathLike, env_id: Any) -> None:
        """Continue with the memory that `save` wrote; see `OffPolicyAlgorithm.load_buffer`."""
        saved = load_checkpoint(path, ("memory", "memory_start", "values"))
        if (env := saved.header.get("env_id", env_name(env_id))) != env_name(env_id):
            warnings.warn(
                f"load_buffer: {path} contains transitions of {one_line(env, 80)}, but these environments are "
                f"{env_name(env_id)}",
                RuntimeWarning,
                stacklevel=3,
            )
        self.buffer.set_state({**saved.header["values"], **saved.tensors["memory"]})
        self.start = saved.header["memory_start"]
        if saved.header.get("position") == self._collector.position() is not None:
            self._collector.remember_buffer(self.buffer)
        else:
            self._collector.forget_buffer()

    def close(self) -> None:
        """Close a memory that uses files, and remove its temporary folder."""
        if self._buffer is not None and hasattr(self._buffer, "close"):
            self._buffer.close()
        if self._folder is not None:
            self._folder.cleanup()


def choose_saved_buffer(header: dict[str, Any], holds: str) -> dict[str, Any]:
    """Return the argument ``buffer`` with which to restore a checkpoint; none if its kind is unknown here."""
    saved = header.get("buffer", {})
    name = saved.get("name", "uniform")
    if name not in buffer_names() or buffer_config_class(name).holds != holds:
        return {}
    config = buffer_config(saved)
    if config.device == "cuda":  # the learner's device now may be another
        config = replace(config, device="auto")
    # The user, not the checkpoint, decides where files are written.
    return {"buffer": replace(config, folder=None) if isinstance(config, MmapBufferConfig) else config}
