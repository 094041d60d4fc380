"""Shared code of off-policy algorithms such as DQN, SAC and TD3: a replay memory, and updates from its samples."""

from __future__ import annotations

import math
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rlox.buffers import (
    Buffer,
    OfflineDataset,
    buffer_class,
    buffer_config,
    buffer_config_class,
    buffer_names,
    make_buffer,
)
from rlox.buffers import files as replay_files
from rlox.callbacks import Callback
from rlox.callbacks.loggers import LoggerCallback
from rlox.checkpoint import Checkpoint, load_checkpoint, one_line, save_checkpoint
from rlox.checkpoint.streams import Stream
from rlox.collectors import ReplayCollector
from rlox.compiled import bounded_obstacle
from rlox.compiled.shadows import difference
from rlox.config import BufferConfig, MmapBufferConfig, integer, require
from rlox.distributed.ranks import memory_folder
from rlox.envs import env_name
from rlox.kernels.buffers.replay import ReplayBuffer
from rlox.kernels.rng import Rng
from rlox.nn.batch import SequenceBatch, TransitionBatch
from rlox.nn.modes import evaluating
from rlox.nn.modules import load_weights_
from rlox.offline.mixing import identity, joined, require_mixable
from rlox.training import environments, loops
from rlox.training.algorithm import Algorithm
from rlox.training.bounded import (
    bounded_size,
    fitted_policy,
    make_action_noise,
    make_bounded_policy,
    twin_critics_size,
)
from rlox.training.loops import Rounds
from rlox.training.schedules import interpolated
from rlox.world_models.pretraining import fill
from rlox.world_models.pretraining import n_rows as dataset_rows

if TYPE_CHECKING:
    from torch import nn

    from rlox.collectors.exploration import ActionNoise
    from rlox.collectors.vec_normalize import VecNormalize
    from rlox.nn.policies import BoundedPolicy


# Methods that the kernel's `rounds` replaces; if a subclass overrides one of them, it must be called.
_AT_ONCE = ("explore", "sample", "update", "update_native")


class OffPolicyAlgorithm(Algorithm):
    """Base class of algorithms that learn from a replay memory of transitions of any policy.

    ``update(batch)`` receives a `rlox.nn.batch.TransitionBatch`, with normalised observations if the configuration asks
    for it; rewards are never normalised. ``update_native``, if defined, runs the same as a kernel.

    The default policy is a `Policy` of bounded actions; algorithms with other policies override `make_policy`. The
    memory stores actions in the environment's units, as they were taken; a bounded policy and its critics see them in
    [-1, 1].

    With a dataset, round(`dataset_share` * B) of every batch's B rows are drawn from it and the rest from the memory,
    with the run's own generator: the symmetric sampling of RLPD (Ball et al. 2023, arXiv:2302.02948, section 4.1).
    Updates begin after `learning_starts`, once the memory has as many transitions as a batch takes from it. The
    dataset's rows are single steps and are drawn uniformly, independently of the memory's n-step returns and
    priorities, and its rewards must be on the environment's scale. For a policy from `init_from`, set
    ``learning_starts=0``, so that it acts from the first step.

    Parameters
    ----------
    env_id, n_envs, seed, policy, logger, callbacks, **arguments
        As for `rlox.training.on_policy.OnPolicyAlgorithm`, including ``config``.
    buffer : str, BufferConfig, mapping or Buffer, optional
        The replay memory: a name (``uniform``, ``prioritized``, ``mmap``, or a registered one), its configuration, the
        configuration as a mapping, or the memory itself. Uniform by default.
    buffer_size, n_step : int, optional
        Short for the configuration's ``size`` and ``n_step``.
    prioritized : bool, optional
        True is short for ``buffer="prioritized"``.
    dataset : OfflineDataset, optional
        A dataset, for example from `rlox.open_dataset`, without normalised observations (``normalize=False``), for an
        algorithm whose configuration has a `dataset_share`. Checkpoints do not contain it: pass the same dataset to
        `from_checkpoint` to continue training.

    Raises
    ------
    TypeError, ValueError
        As `OnPolicyAlgorithm`; also for an unknown buffer, or a buffer that is smaller than a batch.
    """

    loop = staticmethod(loops.off_policy)
    stream = Stream.REPLAY
    Collector: ClassVar[type[ReplayCollector]] = ReplayCollector  # collects experience
    min_rows = 1  # rows that the memory must contain for an update
    Policy: ClassVar[type[BoundedPolicy] | None] = None  # the class of policy that `make_policy` creates
    outputs: ClassVar[str] = ""  # description of the outputs of this policy's network, for messages

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
        self.dataset = dataset
        self._mixed: Any = None  # identity of the dataset, known even if a checkpoint's dataset was not passed
        if buffer_size is not None:
            buffer_size = integer(where, "buffer_size", buffer_size, 1)
        if n_step is not None:
            n_step = integer(where, "n_step", n_step, 1)
        if prioritized is not None:
            require(where, "prioritized", prioritized, bool)
        self._default_buffer = buffer is None
        self._lost_buffer: str | None = None  # a checkpoint's kind of buffer that is unknown in this process
        self._folder: tempfile.TemporaryDirectory | None = None
        self._files: replay_files.ReplayFiles | None = None
        self._saved_memory: Checkpoint | None = None  # the source from which the memory is loaded on first use
        self._goes_on = False  # whether the environments are where that memory's newest transitions led to
        self._buffer: Buffer | None = None
        self.buffer_config: BufferConfig | None = None  # None: the memory itself was passed
        self.memory_start = 0  # environment steps that had been taken when the memory was empty
        self._owed = 0.0  # replayed steps that are due by the replay ratio, less than one update's
        # The differences between a memory of transitions and one of sequences.
        self._use = _Sequences() if self.Config.replays == "sequences" else _Transitions()
        if isinstance(buffer, Buffer):
            self._buffer = buffer
            if not (buffer_size is n_step is prioritized is None):
                raise ValueError(
                    f"{where}: buffer_size, n_step and prioritized must not be given together with a buffer object"
                )
        else:
            self.buffer_config = buffer_config(buffer, prioritized, self._use.usual, size=buffer_size, n_step=n_step)
            if self.buffer_config.holds != self.Config.replays:
                able = [name for name in buffer_names() if buffer_config_class(name).holds == self.Config.replays]
                raise ValueError(
                    f"{where}: buffer must hold {self.Config.replays}, got {self.buffer_config.name!r}; try "
                    f"{', '.join(able)}"
                )
        environments.construct(
            self, env_id, n_envs, seed, policy, logger, callbacks, collector=self.Collector, **arguments
        )
        if self.native is not None:
            why = self._step_by_step()
            self.backend_reason += "; whole rounds in one call" if why is None else f"; step by step, since {why}"
        self._use.require_room(self, where)
        if self.ranks.joined and isinstance(self.buffer_config, MmapBufferConfig):
            raise ValueError(f"{where}: buffer must be uniform or prioritized with distributed=ddp, got mmap")
        if self.buffer_config is not None:
            self.collector.n_step = self.buffer_config.n_step
        if dataset is None:
            return
        require_mixable(dataset, self.spec, where)
        if self.collector.reward_fn is not None:
            raise ValueError(f"{where}: reward_fn must be None with a dataset, which has the environment's rewards")
        self._use.take_dataset(self, where)

    def pretraining_due(self) -> int:
        """Fill the memory with the dataset's sequences; return how many updates on them precede the first step."""
        return 0 if self.dataset is None or self.counters.env_steps else self._use.pretraining_due(self)

    @property
    def state_dim(self) -> int:
        """S, the size of the agent's own state that the memory stores with every step; 0 for none."""
        return self._use.state_dim(self)

    @property
    def _n_rows(self) -> int:
        """Rows of a batch; with several ranks, of this rank's part."""
        return self.config.batch_size // self.ranks.size

    @property
    def _n_mixed(self) -> int:
        """The number of a batch's rows (`_n_rows`) that are drawn from the dataset."""
        return round(self.config.dataset_share * self._n_rows)

    def make_policy(self, rng: Rng, policy: nn.Module | None) -> None:
        make_bounded_policy(self, rng, policy)

    def _kernel_obstacle(self, policy: nn.Module | None) -> str | None:
        return bounded_obstacle(self.config, policy)

    def _policy_size(self) -> int:
        return bounded_size(self)

    def _critics_size(self) -> int:
        return 0 if self.Policy is None else twin_critics_size(self)

    def make_noise(self, n_envs: int) -> ActionNoise | None:
        return None if self.collector.action_noise is None else make_action_noise(self, n_envs)

    def _require_complete(self) -> None:
        environments.require_reward_fn(self)
        if self.dataset is None and self._mixed is not None:
            raise ValueError(
                f"{type(self).__name__}.train: the checkpoint was trained with a dataset that it does not contain, "
                f"{one_line(self._mixed, 200)}; pass it to from_checkpoint(dataset=...)"
            )

    @property
    def buffer(self) -> Buffer:
        """The replay memory, created on first access, because an evaluation does not need it.

        Raises
        ------
        ValueError
            If the checkpoint was trained with a kind of memory that is unknown here.
        """
        if self._lost_buffer is not None:
            raise ValueError(
                f"{type(self).__name__}: the checkpoint was trained with the buffer {self._lost_buffer}, which is not "
                "registered here; import the package that registers it, or pass from_checkpoint(buffer=...)"
            )
        if self._buffer is None:
            config: Any = self.buffer_config
            if self.ranks.size > 1:
                config = replace(config, size=-(-config.size // self.ranks.size))
            if isinstance(config, MmapBufferConfig) and config.folder is None:
                self._folder = tempfile.TemporaryDirectory(prefix="rlox-replay-")
                config = replace(config, folder=self._folder.name)
            elif isinstance(config, MmapBufferConfig):
                os.makedirs(config.folder, exist_ok=True)  # the memory would take a path that is new as its file's
            try:
                self._buffer = make_buffer(config, self.spec, self.collector.n_envs, self.config.gamma, self.state_dim)
            except MemoryError as e:
                raise ValueError(
                    f"{type(self).__name__}: buffer_size must fit in memory, got {config.size:,}: {e}"
                ) from e
        if self._saved_memory is not None:
            saved, self._saved_memory = self._saved_memory, None
            folder, entry = self._memory_folder(saved.folder), saved.header["memory"]
            replay_files.load(self._buffer, folder, entry, saved.tensors.get("memory", {}))
            self._files = replay_files.ReplayFiles(folder, entry, self._buffer)
            if self._goes_on:
                self.collector.remember_buffer(self._buffer)
        return self._buffer

    def _require_outputs(self, policy: nn.Module, size: int, what: str) -> None:
        """Raise ValueError unless `policy` takes the environment's observations and returns `size` numbers for each."""
        import torch

        spec, where = self.spec, type(self).__name__
        probe = torch.zeros((2, *spec.obs_shape), dtype=torch.uint8 if spec.image else torch.float32, device="cpu")
        try:
            with torch.no_grad(), evaluating(policy):
                shape = tuple(policy(probe.to(next(policy.parameters()).device)).shape)
        except RuntimeError as e:
            raise ValueError(
                f"{where}: policy must take observations of shape (B, {str(spec.obs_shape)[1:]}: {e}"
            ) from e
        if shape != (2, size):
            raise ValueError(f"{where}: policy must return {what}, (B, {size}), got {shape} for B = 2")

    def explore(self) -> None:
        """Set the policy's exploration for the current step; called before each step of the environments."""

    def schedule_values(self, progress: float) -> dict[str, float]:
        found, beta = super().schedule_values(progress), self._beta(progress)
        return found if beta is None else {**found, "beta": beta}

    def _beta(self, progress: float) -> float | None:
        """Return the exponent of the importance weights; None if the memory has no importance weights."""
        beta = getattr(self.buffer_config, "beta", None)
        return None if beta is None else interpolated(beta, 1.0, progress, 1.0)

    @property
    def round_steps(self) -> int:
        """Environment steps of a round, over all environments."""
        return -(-getattr(self.config, "train_freq", 1) // self.n_envs) * self.n_envs

    def updates_due(self, n_steps: int) -> int:
        """Return the number of updates after a round of `n_steps` environment steps.

        With a replay ratio, these are as many updates as the due replayed steps allow; the rest counts in later rounds.
        """
        return self._use.updates_due(self, n_steps)

    def _step_by_step(self) -> str | None:
        """Return why Python must see each step, regardless of callbacks; None if `rounds` can run without Python."""
        place = {name: i for i, cls in reversed([*enumerate(type(self).__mro__)]) for name in vars(cls)}
        changed = [name for name in _AT_ONCE if place.get(name, math.inf) < place["rounds"]]
        kind = type(self._buffer) if self.buffer_config is None else buffer_class(self.buffer_config.name)
        if changed:
            return f"{type(self).__name__} changes {changed[0]}"
        if type(self.collector) is not ReplayCollector or not self.collector.env.native:
            return "the environment is not native"
        if self.collector.reward_fn is not None:
            return "there is a reward_fn"
        if self.dataset is not None:
            return "a dataset is mixed into the batches"
        if self.normalizer is not None:
            return "observations are normalised"
        if self.collector.action_noise is not None:
            return "Python adds the exploration noise"
        if kind is not ReplayBuffer:
            return "the replay memory is not uniform"
        definer = next(cls for cls in type(self).__mro__ if "rounds" in vars(cls))
        return difference("rounds", self, self.collector) if definer.__module__.startswith("rlox.") else None

    def fused(self) -> bool:
        """Return whether the loop may call `rounds`: no Python code needs to see single steps."""
        return (
            self.native is not None
            and self._step_by_step() is None
            and self.buffer.access() is not None
            and not self.callbacks.listens("on_rollout_end")
        )

    def rounds(self, n_steps: int) -> Rounds:
        """Run rounds for at least `n_steps` environment steps in the kernel alone, and advance the counters.

        Fewer rounds are run if `n_steps` would be too many for one call. Only called if `fused` returns true.
        """
        raise NotImplementedError

    def _kernel_rounds(self, n_steps: int, names: Iterable[str], **arguments: Any) -> tuple:
        """Return the result of the kernel's ``rounds``, given `arguments` and the hyper-parameters `names`."""
        c, counters, collector = self.config, self.counters, self.collector
        per_round = self.round_steps
        per_update = per_round if c.gradient_steps == -1 else c.gradient_steps
        # The kernel has room for the metrics of all updates before it begins.
        n_rounds = min(-(-n_steps // per_round), max(1, 100_000 // per_update))
        obs = collector.observe()  # the first call starts the environments
        buffer = self.buffer
        collector.continue_in(buffer)
        names = ("train_freq", "gradient_steps", "batch_size", "learning_starts", "learning_rate", "gamma", *names)
        found = self.native.net.rounds(
            collector.env.stepper(),
            buffer.access(),
            collector.rng,
            self.rng,
            obs,
            n_rounds,
            env_steps=counters.env_steps,
            horizon_start=counters.horizon_start,
            horizon_steps=counters.schedule_steps,
            update_from=self.memory_start + c.learning_starts,
            annealed=c.learning_rate_schedule == "linear",
            **{name: getattr(c, name) for name in names},
            **arguments,
        )
        collector.remember_buffer(buffer)
        return found

    def require_finite_memory(self, n: int) -> None:
        """Raise, naming the environment, if the newest `n` transitions of a plain float32 memory are not finite."""
        count = self.buffer.get_state(since=2**62)["count"]
        rows = self.buffer.get_state(since=max(0, count - n))["rows"]
        self.collector.require_finite_rows(rows.view(np.float32))

    def sample(self) -> TransitionBatch | SequenceBatch:
        """Return the transitions of the next update, or its sequences if the algorithm learns from sequences."""
        rows = self._rows(self._n_rows)
        if self.normalizer is not None:
            # The memory stores unnormalised observations, so old transitions are normalised with current statistics.
            rows = {**rows, **{name: self.normalizer.normalize(rows[name]) for name in ("obs", "next_obs")}}
        return TransitionBatch.from_rows(rows, self.config.gamma, self.spec, self.device)

    def _rows(self, n: int) -> Mapping[str, np.ndarray]:
        """Return `n` transitions, in the format of `rlox.buffers.Buffer.sample`."""
        beta = self._beta(self.counters.progress)
        if beta is not None:
            self.buffer.set_beta(beta)
        if self.dataset is None:
            return self.buffer.sample(n, self.rng.integers(2**63))
        online = self.buffer.sample(n - self._n_mixed, self.rng.integers(2**63))
        return joined(online, self.dataset.sample(self._n_mixed, self.rng.integers(2**63)), self.config.gamma)

    def _own_state(self) -> tuple[dict[str, Any], dict[str, dict[str, np.ndarray]]]:
        info, tensors = environments.state(self)
        noise = self.collector.action_noise
        info |= {"buffer": self._saved_buffer(), **self._use.info(self)}
        if self._mixed is not None:
            info["dataset"] = self._mixed
        if noise is not None:
            tensors["action_noise"] = noise.state()
        return info, {**super()._own_state()[1], **tensors}

    def _saved_buffer(self) -> dict[str, Any]:
        """Return the memory's configuration for a checkpoint's header."""
        config = self.buffer_config
        if config is None:
            return {"name": type(self._buffer).__name__}
        # The folder is only valid on this machine; the user who restores the run chooses another.
        folder = {"folder": None} if isinstance(config, MmapBufferConfig) else {}
        return {**config.to_dict(), **folder}

    @classmethod
    def _saved_arguments(cls, header: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        saved = header.get("buffer", {})
        if "buffer" in given or saved.get("name", "uniform") not in buffer_names():
            return {}
        if buffer_config_class(saved.get("name", "uniform")).holds != cls.Config.replays:
            return {}
        config = buffer_config(saved)
        # The user, not the checkpoint, decides where files are written.
        return {"buffer": replace(config, folder=None) if isinstance(config, MmapBufferConfig) else config}

    def _restore(self, checkpoint: Checkpoint, same_env: bool) -> bool:
        mixed = checkpoint.header.get("dataset")
        if self.dataset is not None and self._mixed != mixed:
            raise ValueError(
                f"the dataset must be that of the saved training, {one_line(mixed or 'none', 200)}, got "
                f"{self._mixed}; to start a new training from a checkpoint, use init_from"
            )
        self._mixed = mixed
        exact = super()._restore(checkpoint, same_env)
        noise, saved_noise = self.collector.action_noise, checkpoint.tensors.get("action_noise")
        if exact and noise is not None and saved_noise is not None:
            noise.set_state(saved_noise)
        self.memory_start = self.counters.env_steps
        self._owed = float(checkpoint.header.get("replay_owed", 0.0))
        if self._default_buffer:
            self._lost_buffer = checkpoint.header["buffer"]["name"]
        entry = checkpoint.header.get("memory")
        if entry is None or self._buffer is not None:
            return exact
        if not self._same_buffer(saved := checkpoint.header["buffer"]):
            own = self._saved_buffer()
            differs = ", ".join(f"{k}={own.get(k)} not {v}" for k, v in saved.items() if own.get(k) != v)
            warnings.warn(
                "from_checkpoint: the replay memory starts empty, because its configuration differs from the saved one "
                f"({differs})",
                RuntimeWarning,
                stacklevel=4,
            )
            return exact
        folder = getattr(self.buffer_config, "folder", None)
        if lost := replay_files.missing(self._memory_folder(checkpoint.folder), entry, folder):
            warnings.warn(
                f"from_checkpoint: the replay memory starts empty, because there is no {lost[0]}",
                RuntimeWarning,
                stacklevel=4,
            )
            return exact
        self._saved_memory, self.memory_start, self._goes_on = checkpoint, entry["start"], exact
        return exact

    def _same_buffer(self, saved: dict[str, Any]) -> bool:
        """Return whether a header's memory has the same contents as this one; settings that it lacks (written by
        rlox 0.6.0) count as equal."""
        own = self.buffer_config
        if own is None or saved.get("name") != own.name:
            return self._saved_buffer() == saved
        here = {"folder": own.folder} if isinstance(own, MmapBufferConfig) else {}
        theirs = buffer_config({**own.to_dict(), **saved, **here})
        return (theirs.n_step, theirs.arguments()) == (own.n_step, own.arguments())

    def snapshot(self, path: str | os.PathLike, memory: bool = False, **header: Any) -> Callable[[], None]:
        if not memory:
            return super().snapshot(path, **header)
        folder = Path(path).parent
        checkpoint = self.ranks.with_all_ranks(self._checkpoint(**header), folder)
        write_memory, remove_unneeded = self._take_memory(folder)

        def write() -> None:
            checkpoint.header["memory"], checkpoint.tensors["memory"] = write_memory()
            save_checkpoint(path, checkpoint)
            remove_unneeded()
            self.ranks.remove_unneeded(checkpoint.header, memory_folder(folder))

        return write

    def _memory_folder(self, folder: Path | None) -> Path:
        """Return the folder of the replay memory's files for a checkpoint in `folder`."""
        return memory_folder(Path(folder or "."), self.ranks.rank)

    def remember(self, folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Write the new part of the replay memory next to a checkpoint that another rank writes into `folder`.

        Returns the data on this memory for that checkpoint.
        """
        return self._take_memory(folder)[0]()

    def _take_memory(self, folder: Path) -> tuple[Callable[[], Any], Callable[[], None]]:
        """Copy the new part of the memory. Returns a function that writes it, and one that removes unneeded files."""
        mine, start, buffer = self._memory_folder(folder), self.memory_start, self.buffer
        if self._files is None or self._files.folder != mine:
            self._files = replay_files.ReplayFiles(mine)
        taken = self._files.take(buffer)

        def write() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
            entry, arrays = taken.write()
            return {**entry, "start": start}, arrays

        return write, taken.remove_unneeded

    def _start_from(self, checkpoint: Checkpoint, where: str) -> None:
        """Load weights as `Algorithm._start_from`, including critics, because new critics would ruin the policy.

        For SAC and TD3 the checkpoint may be one of SAC, TD3, TD3BC, CQL or IQL. The policy's actions without noise are
        always taken over; see `_fitted` for standard deviations. IQL's V is not used.
        """
        if "critics" not in self.parts:
            super()._start_from(checkpoint, where)
            return
        critics, activation = checkpoint.tensors.get("critics"), checkpoint.header["config"].get("activation")
        if not critics:
            raise ValueError(
                f"{where}: it must contain critics, because new ones would soon ruin its policy, got a checkpoint of "
                f"{one_line(checkpoint.header['algorithm'])}; TD3, SAC, TD3BC, CQL and IQL have critics"
            )
        if activation != self.config.activation:
            raise ValueError(f"{where}: activation must be the checkpoint's, {one_line(activation)}")
        super()._start_from(checkpoint, where)
        for name in ("critics", "target"):
            load_weights_(self.parts[name], critics, f"{where}: {name}")

    def _fitted(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return arrays if self.Policy is None else fitted_policy(self, arrays)

    def save_buffer(self, path: str | os.PathLike) -> None:
        """Write the replay memory to a file. This needs as much memory again while it runs.

        Raises
        ------
        OSError
            As `rlox.checkpoint.save_checkpoint`.
        """
        state = self.buffer.get_state()
        arrays = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
        header = {
            "memory": self._saved_buffer(),
            "memory_start": self.memory_start,
            "env_id": env_name(self.env_id),
            "position": self.collector.position(),
            "values": {name: value for name, value in state.items() if name not in arrays},
        }
        save_checkpoint(path, Checkpoint(header, {"memory": arrays}))

    def load_buffer(self, path: str | os.PathLike) -> None:
        """Continue with the replay memory that `save_buffer` wrote.

        If the environments are not in the state that its newest transitions led to, no n-step return spans both.

        Raises
        ------
        FileNotFoundError, ValueError
            As `rlox.checkpoint.load_checkpoint`; also if the file does not fit this memory.
        """
        saved = load_checkpoint(path, ("memory", "memory_start", "values"))
        if (env := saved.header.get("env_id", env_name(self.env_id))) != env_name(self.env_id):
            warnings.warn(
                f"load_buffer: {path} contains transitions of {one_line(env, 80)}, but these environments are "
                f"{env_name(self.env_id)}",
                RuntimeWarning,
                stacklevel=2,
            )
        self.buffer.set_state({**saved.header["values"], **saved.tensors["memory"]})
        self.memory_start = saved.header["memory_start"]
        if saved.header.get("position") == self.collector.position() is not None:
            self.collector.remember_buffer(self.buffer)
        else:
            self.collector.forget_buffer()

    def close(self) -> None:
        """End the environments' worker processes, and close a memory that uses files."""
        super().close()
        if self._buffer is not None and hasattr(self._buffer, "close"):
            self._buffer.close()
        if self._folder is not None:
            self._folder.cleanup()


class _Transitions:
    """Use of a memory of transitions: the size it needs, and the number of updates per round."""

    usual = "uniform"  # the default memory

    def state_dim(self, algorithm: OffPolicyAlgorithm) -> int:
        return 0

    def require_room(self, algorithm: OffPolicyAlgorithm, where: str) -> None:
        """Raise ValueError unless the memory has room for a batch."""
        memory = algorithm.buffer_config
        batch_size, n_envs = algorithm.config.batch_size, algorithm.n_envs
        if memory is not None and memory.size < max(batch_size, n_envs):
            raise ValueError(
                f"{where}: the buffer's size must be at least batch_size ({batch_size}) and n_envs ({n_envs}), got "
                f"buffer_size={memory.size}"
            )

    def take_dataset(self, algorithm: OffPolicyAlgorithm, where: str) -> None:
        """Mix the dataset's rows into the batches."""
        c, n_rows, n_mixed = algorithm.config, algorithm._n_rows, algorithm._n_mixed
        if not 0 < n_mixed < n_rows:
            raise ValueError(
                f"{where}: dataset_share must leave at least one row of a batch of {c.batch_size} to the dataset and "
                f"one to the replay memory, got {c.dataset_share}"
            )
        algorithm.min_rows = n_rows - n_mixed
        algorithm._mixed = identity(algorithm.dataset)

    def pretraining_due(self, algorithm: OffPolicyAlgorithm) -> int:
        return 0

    def updates_due(self, algorithm: OffPolicyAlgorithm, n_steps: int) -> int:
        c = algorithm.config
        return n_steps if c.gradient_steps == -1 else c.gradient_steps

    def info(self, algorithm: OffPolicyAlgorithm) -> dict[str, Any]:
        """Return values for a checkpoint's header."""
        return {}


class _Sequences:
    """Use of a memory of sequences, like `_Transitions`."""

    usual = "sequence"

    def state_dim(self, algorithm: OffPolicyAlgorithm) -> int:
        return algorithm.actor.initial(1).shape[1]

    def require_room(self, algorithm: OffPolicyAlgorithm, where: str) -> None:
        """Raise ValueError unless the memory fits the environments and has room for a sequence of each."""
        length, n, spec = algorithm.config.seq_len, algorithm.collector.n_envs, algorithm.spec
        memory: Any = algorithm._buffer
        algorithm.min_rows = length * n
        if memory is not None:
            expected = (spec.obs_dim, spec.model_width, n, self.state_dim(algorithm))
            found = [getattr(memory, name, None) for name in ("obs_dim", "act_dim", "n_envs", "state_dim")]
            if tuple(found) != expected:
                raise ValueError(
                    f"{where}: buffer must be a SequenceReplayBuffer of obs_dim, act_dim, n_envs and state_dim "
                    f"{', '.join(map(str, expected))}, got {type(memory).__name__} of {', '.join(map(str, found))}"
                )
        size = self._size(algorithm)
        if size // n < length:
            raise ValueError(
                f"{where}: the buffer's size must be at least seq_len ({length}) for each of the {n} environments, "
                f"{length * n:,}, got {size:,}"
            )

    def _size(self, algorithm: OffPolicyAlgorithm) -> int:
        memory: Any = algorithm._buffer
        config: Any = algorithm.buffer_config
        return config.size if memory is None else memory.capacity

    def take_dataset(self, algorithm: OffPolicyAlgorithm, where: str) -> None:
        """Raise an error unless the dataset's episodes fit into the memory, before the environments' episodes."""
        dataset: Any = algorithm.dataset
        if not (hasattr(dataset, "get_state") and hasattr(dataset, "n_episodes")):
            raise TypeError(
                f"{where}: dataset must have get_state() and n_episodes, like rlox.OfflineDatasetBuffer, got "
                f"{type(dataset).__name__}"
            )
        n = dataset_rows(dataset)
        # Episodes are stored whole, so the part of one environment can be full before the others are.
        needed = n + algorithm.collector.n_envs * (int(dataset.stats()["max_episode_length"]) + 1)
        size = self._size(algorithm)
        if size < needed:
            raise ValueError(
                f"{where}: the buffer's size must be at least {needed:,} for the dataset's {n:,} observations, "
                f"got {size:,}"
            )

    def pretraining_due(self, algorithm: OffPolicyAlgorithm) -> int:
        if not len(algorithm.buffer):
            fill(algorithm.buffer, algorithm.dataset, algorithm.spec)
        return max(0, algorithm.config.pretrain_updates - algorithm.counters.updates)

    def updates_due(self, algorithm: OffPolicyAlgorithm, n_steps: int) -> int:
        c = algorithm.config
        algorithm._owed += c.replay_ratio * n_steps
        n_updates = int(algorithm._owed // c.update_rows)
        algorithm._owed -= n_updates * c.update_rows
        return n_updates

    def info(self, algorithm: OffPolicyAlgorithm) -> dict[str, Any]:
        """Return values for a checkpoint's header."""
        return {"replay_owed": algorithm._owed}
