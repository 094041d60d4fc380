"""Shared code of algorithms that act and learn from a replay memory, of transitions or of sequences: their loop too."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rlox.buffers import Buffer, OfflineDataset
from rlox.callbacks import Callback
from rlox.callbacks.loggers import LoggerCallback
from rlox.checkpoint import Checkpoint, one_line, save_checkpoint
from rlox.checkpoint.streams import Stream
from rlox.collectors import ReplayCollector
from rlox.config import BufferConfig
from rlox.distributed.ranks import memory_folder
from rlox.offline.mixing import require_mixable
from rlox.processes.failures import Diverged
from rlox.training.agent import Agent
from rlox.training.loops import average_metrics, choose_update, require_finite
from rlox.training.memory import ReplayMemory, choose_saved_buffer

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
    collector, buffer, clock = algorithm.collector, algorithm.buffer, time.perf_counter
    update = choose_update(algorithm)
    end = c.end
    report_every = min(1000, max(1, c.horizon_steps // 100))
    metrics: dict[str, float] = {"mean_reward": c.mean_reward}
    history: list[dict[str, Any]] = []
    collect_s = update_s = 0.0
    collector.env_steps = c.env_steps
    go_on = ranks.call_hook(algorithm, "on_training_start")
    algorithm.backend.require_unchanged("train")
    fused = algorithm._can_run_rounds()
    left = algorithm._pretraining_due() if go_on else 0
    while go_on and left:
        begun = clock()
        c.in_round = 0
        for _ in range(min(left, 100)):
            history.append(update(algorithm.sample()))
            c.updates += 1
            left -= 1
        times = {"time/collect_s": 0.0, "time/update_s": clock() - begun}
        metrics = {"mean_reward": c.mean_reward, **ranks.metrics(average_metrics(history)), **times}
        history.clear()
        require_finite({name: value for name, value in metrics.items() if name != "mean_reward"}, algorithm)
        go_on = ranks.call_hook(algorithm, "on_step", step=c.env_steps, reward=c.mean_reward, metrics=metrics)
    since, since_steps, cpu = clock(), c.env_steps, time.process_time()
    while go_on and c.env_steps < end:
        started, round_start, c.in_round = clock(), c.env_steps, 0
        if fused:
            done = algorithm._rounds(
                min(report_every - (c.env_steps - c.horizon_start) % report_every, end - c.env_steps)
            )
            collector.env_steps = c.env_steps
            algorithm._require_finite_memory(len(done))
            c.ended(done.episode_returns, done.episode_lengths)
            if done.metrics:
                history.append(done.metrics)
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
                require_finite(average_metrics(history), algorithm)
                raise
            except Exception as e:
                # A policy that is no longer finite also causes such errors, and its weights are not worth keeping.
                require_finite(average_metrics(history), algorithm)
                # An environment failed, not the learner, so the weights of the last update are worth keeping.
                if not ranks.joined:
                    callbacks.on_collection_error(algorithm=algorithm, error=e)
                raise
            if algorithm.normalizer is not None:
                ranks.merge(algorithm.normalizer)
            ended = ranks.episodes(np.asarray(returns), np.asarray(lengths, np.int64))
            done = Episodes(c.env_steps - round_start, *ended)
            c.in_round = len(done)
            c.ended(done.episode_returns, done.episode_lengths)
            callbacks.on_rollout_end(algorithm=algorithm, batch=done)
            collected = clock()
            begun = c.env_steps - algorithm._memory.start >= config.learning_starts
            if begun and not ranks.any(len(buffer) < algorithm._min_rows):
                for _ in range(algorithm._updates_due(len(done))):
                    history.append(update(algorithm.sample()))
                    c.updates += 1
            now = clock()
            collect_s += collected - started
            update_s += now - collected
        so_far = c.env_steps - c.horizon_start
        if so_far // report_every == (so_far - len(done)) // report_every and c.env_steps < end:
            continue
        losses = ranks.metrics(average_metrics(history, rounds=bool(fused)))
        history.clear()
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
        go_on = ranks.call_hook(algorithm, "on_step", step=c.env_steps, reward=c.mean_reward, metrics=metrics)
        # Evaluation and saving do not count towards the training's speed.
        since += clock() - now
        cpu = time.process_time()
    algorithm.backend.require_unchanged("train")
    ranks.call_hook(algorithm, "on_training_end")
    return metrics


class ReplayAgent(Agent):
    """Base class of `rlox.training.off_policy.OffPolicyAlgorithm`, which documents the arguments, and of
    `rlox.training.sequences.SequenceAlgorithm`."""

    _loop = staticmethod(off_policy)
    _stream = Stream.REPLAY
    _usual_memory: ClassVar[str]
    _min_rows = 1  # rows that the memory must contain for an update

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

    def _state_dim(self) -> int:
        """Return S, the size of the agent's own state that the memory stores with every step; 0 for none."""
        return 0

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

    def _require_complete(self) -> None:
        super()._require_complete()
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
        if self.collector.action_noise is not None:
            tensors["action_noise"] = self.collector.action_noise.state()
        return info, tensors

    def _state_of_rank(self) -> dict[str, dict[str, np.ndarray]]:
        noise = self.collector.action_noise
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
        noise, saved_noise = self.collector.action_noise, checkpoint.tensors.get("action_noise")
        if exact and noise is not None and saved_noise is not None:
            noise.set_state(saved_noise)
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
