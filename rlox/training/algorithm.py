"""Base class of all algorithms: configuration, training, checkpoints. It knows neither environments nor models.

`rlox.training.agent` adds environments and acting; `rlox.training.post_training` adds language models.
"""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, SupportsIndex, TypeVar, runtime_checkable

import numpy as np

from rlox.callbacks import Callback, CallbackList, ProgressCallback
from rlox.callbacks.base import HistoryCallback
from rlox.callbacks.loggers import LoggerCallback
from rlox.checkpoint import Checkpoint, Counters, load_checkpoint, save_checkpoint, versions
from rlox.checkpoint.counters import scheduled
from rlox.checkpoint.streams import Stream
from rlox.config import BACKENDS, DEVICES, Config, choice, integer, shown
from rlox.config.arguments import Hinting, find_renamed, refuse
from rlox.config.base import LARGEST_SEED, MOST_THREADS
from rlox.distributed.ranks import OWN, Ranks
from rlox.kernels.memory import keep_freed
from rlox.kernels.rng import Rng
from rlox.nn.modes import learning, outside_inference_mode, skip_distribution_checks, torch_threads
from rlox.nn.modules import is_module, load_weights_, set_generator_states, state_of
from rlox.training.backend import Backend

# PyTorch is imported where it is used, because native runs do not need it.

if TYPE_CHECKING:
    import torch
    from torch import nn

    from rlox.callbacks import History
    from rlox.callbacks.run_folder import RunFolder

Batch = TypeVar("Batch", contravariant=True)

# In a checkpoint's header: the environment of an algorithm that has none.
_NO_ENV: dict[str, Any] = {"id": None, "callable": False, "n_envs": 1, "kwargs": {}, "wrappers": [], "workers": 0,
                           "backend": "auto"}  # fmt: skip


@runtime_checkable
class Learner(Protocol[Batch]):
    """Interface that the author of an algorithm implements; the base class of its family provides the rest.

    A subclass may also override `Agent.make_policy` for another kind of policy, `Algorithm.setup` for further networks
    and optimisers, and `Algorithm.schedule_values` for further schedules. It may define ``update_native``, which runs
    `update` as a kernel, and ``reads = ("masks", "sequences")``: which of a batch's masks of legal actions, and its
    sequences for a memory, `update` uses. Without it, an environment with masks, or a memory, is refused.
    """

    name: ClassVar[str]  # its key in `rlox.algorithms.ALGORITHMS`, and the name of its YAML file
    Config: ClassVar[type[Config]]  # a dataclass below the family's configuration

    def update(self, batch: Batch, /) -> Mapping[str, torch.Tensor | float]:
        """Learn from a batch, whose type the family defines; return the metrics by name, as tensors () or floats."""
        ...


class Algorithm(metaclass=Hinting):
    """Base class of the families; their classes document the arguments.

    Attributes
    ----------
    config : Config
        Hyper-parameters, never changed after construction.
    counters : Counters
        Steps, updates and episodes so far.
    backend : Backend
        ``native`` or ``torch``, a string; its ``reason`` is also `backend_reason`.
    rng : Rng
        Determines what each update sees.
    """

    name: ClassVar[str]
    Config: ClassVar[type[Config]]
    _data_parallel: ClassVar[bool] = False  # whether several ranks may train it together, see `rlox.distributed.ranks`
    _loop: ClassVar[Callable[..., dict[str, float]]]  # of the family
    _stream: ClassVar[Stream]  # the stream of `rng`
    _length: ClassVar[str] = "total_timesteps"  # name of `train`'s argument for the length of a training

    backend: Backend
    device: str = "cpu"
    optimizer: Any
    rng: Rng
    native: Any = None
    _own_policy = False  # whether the policy is custom; only the user can then map weights to it
    _trains = False  # whether `train` is running

    def __init__(
        self,
        seed: int,
        logger: LoggerCallback | None,
        callbacks: Iterable[Callback] | None,
        config: Mapping[str, Any],
        *,
        device: str,
        backend: str,
        threads: int,
        clock: str,
    ):
        where = type(self).__name__
        whole, values = config.get("config"), {name: value for name, value in config.items() if name != "config"}
        if whole is not None and not isinstance(whole, self.Config):
            raise TypeError(f"{where}: config must be a {self.Config.__name__}, got {shown(whole)}")
        if whole is not None and values:
            raise TypeError(f"{where}: {min(values)} must not be given together with config, which contains it")
        self.config: Any = self.Config.from_arguments(where, **values) if whole is None else whole
        fields = vars(self.config)
        schedules = {name: fields[f"{name}_schedule"] for name in fields if f"{name}_schedule" in fields}
        self._schedules: dict[str, str] = {  # constant or linear, by the field that follows it
            name: kind for name, kind in schedules.items() if kind != "constant" or name == "learning_rate"
        }
        self.seed = integer(where, "seed", seed, 0, LARGEST_SEED)  # evaluations use 10_000 + seed
        self._threads = integer(where, "threads", threads, 0, MOST_THREADS)
        self._requested_device = choice(where, "device", device, DEVICES)
        choice(where, "backend", backend, BACKENDS)
        self.ranks = Ranks.current
        if self.ranks.joined:
            self.ranks.admit(self)
        # Only rank 0 has callbacks, so that evaluating, recording and saving happen once.
        self._history = HistoryCallback()
        self._run_folder: RunFolder | None = None
        if logger is not None and not isinstance(logger, Callback):
            from rlox.callbacks.run_folder import run_folder

            self._run_folder, logger = run_folder(where, logger), None
        try:
            given = [] if callbacks is None else [*callbacks]
        except TypeError:  # not of a list, or of a NumPy array without dimensions
            given = [callbacks]
        if not all(isinstance(item, Callback) for item in given):
            raise TypeError(f"{where}: callbacks must be a list of rlox.callbacks.Callback, got {shown(callbacks)}")
        given += [] if logger is None else [logger]
        self.callbacks = CallbackList([*(given if self.ranks.rank == 0 else ()), self._history])
        self.counters = Counters(clock=clock)
        # Contents of a checkpoint in addition to policy and optimizer, by section; see `keep`.
        self._parts: dict[str, Any] = {}
        self._optimizers: list[Any] = []  # in addition to `optimizer`
        self._switches: dict[str, str] = {}  # by part, the hyper-parameter that switches it on

    # ---- what an algorithm defines

    def setup(self, rng: Rng) -> None:
        """Set `optimizer`, and create further networks (weights drawn from `rng`) and their optimisers.

        Policy and device are already set.
        """
        raise NotImplementedError

    def update(self, batch: Any) -> Mapping[str, torch.Tensor | float]:
        """Take one update. Returns scalar metrics, still tensors."""
        raise NotImplementedError

    def _capture_obstacle(self) -> str | None:
        """Return why a GPU cannot replay `update` as one graph (`rlox.gpu.capture`); None if it can.

        It can if `update` decides nothing by a number that is on the device, or that changes on the host, except for
        `counters.progress`.
        """
        return f"the update of {self.name} waits for numbers of the device"

    def schedule_values(self, progress: float) -> dict[str, float]:
        """Return the learning rate and all other scheduled values at `progress` in [0, 1], by metric name."""
        values = {}
        for name, schedule in self._schedules.items():
            values[name] = scheduled(getattr(self.config, name), schedule, progress)
        return values

    def keep(self, name: str, part: Any, switch: str | None = None) -> Any:
        """Store `part` in checkpoints, in the section `name`. Returns it.

        A part is a module, an optimiser, or another object with ``state()`` and ``set_state(arrays)``. The
        hyper-parameter `switch` determines whether the part exists. If it was off in a checkpoint, the part stays new
        when that checkpoint is loaded.
        """
        self._parts[name] = part
        if switch is not None:
            self._switches[name] = switch
        return part

    @property
    def backend_reason(self) -> str:
        """Why this `backend` was chosen."""
        return self.backend.reason

    @property
    def policy(self) -> nn.Module:
        """The trained module."""
        return self._policy

    # ---- training

    def plan(
        self, total_timesteps: int | None = None, *, until: int | None = None, schedule_timesteps: int | None = None
    ) -> None:
        """Set the end of the training and of its schedules as `train` does, which then needs no arguments."""
        self._plan(total_timesteps, until, schedule_timesteps)

    def _plan(self, length: int | None, until: int | None, schedule_timesteps: int | None) -> None:
        """Set the end of a training and of its schedules from the arguments of ``train``."""
        where = f"{type(self).__name__}.train"
        if self._trains:
            raise ValueError(
                f"{where}: train must not be called by a callback or another thread while this algorithm trains; "
                "return False from on_step to end that training, and call train after it"
            )
        self.counters.in_round = 0
        if length is not None:
            self.counters.plan(where, self._length, length, until, schedule_timesteps)
        else:
            self.counters.replan(where, self._length, until, schedule_timesteps, self.schedule_values)

    def train(
        self,
        total_timesteps: int | None = None,
        *,
        until: int | None = None,
        schedule_timesteps: int | None = None,
        progress: bool = False,
        **unknown: Any,
    ) -> dict[str, float]:
        """Train for `total_timesteps` more environment steps, rounded up to whole rollouts or rounds.

        Without `total_timesteps`, continue an interrupted training, or the one in progress when a checkpoint was saved,
        up to its planned end, as if there had been no pause.

        Parameters
        ----------
        total_timesteps : int, optional
            Start a new training of this many steps.
        until : int, optional
            A new end for the continued training, in environment steps since the algorithm was created. Its schedules
            are stretched to the new end, so a learning rate that had decayed rises again.
        schedule_timesteps : int, optional
            Steps after which schedules (learning rate, exploration, …) reach their end, counted from the start of the
            training; by default the end given by `total_timesteps` or `until`.
        progress : bool
            Whether to show the progress: one line that is redrawn, in a terminal or a notebook, and a line every few
            seconds elsewhere.

        Returns
        -------
        dict
            The last metrics; ``mean_reward`` is the mean undiscounted return of the last 100 completed
            episodes, NaN if none has ended; ``learning_rate`` and all other scheduled values are those of the last
            update.

        Warns
        -----
        RuntimeWarning
            If the end of the schedules changes; the message lists their values before and after. If nothing is left to
            train.

        Raises
        ------
        FloatingPointError
            If a loss or gradient is no longer finite.
        ValueError
            For a number below 1; if both `total_timesteps` and `until` are given, or neither is and there is no
            training to continue; if `until` has already passed; if `schedule_timesteps` would leave a learning rate of
            0 for the rest of the training; if a checkpoint was trained with a `reward_fn` or a dataset that was not
            passed again.
        """
        return self._train(total_timesteps, until, schedule_timesteps, progress, unknown)

    def _train(
        self,
        length: int | None,
        until: int | None,
        schedule_timesteps: int | None,
        progress: bool,
        unknown: Mapping[str, Any],
    ) -> dict[str, float]:
        where = f"{type(self).__name__}.train"
        if unknown:
            refuse(where, unknown, (self._length, "until", "schedule_timesteps", "progress"))
        if not isinstance(progress, bool):
            raise TypeError(f"{where}: progress must be of type bool, got {shown(progress)}")
        self._prepare_training()
        self._plan(length, until, schedule_timesteps)
        c = self.counters
        if c.steps >= c.end:
            warnings.warn(
                f"train: nothing is left to train, all {c.horizon_steps:,} {c.unit} are done; train(until=...) with "
                f"more than {c.steps} continues, train(number) starts a new training",
                RuntimeWarning,
                stacklevel=3,
            )
        if self.backend == "torch":
            from rlox.nn.optimizers import require_laid_out

            require_laid_out(where, [*vars(self).values(), *self._optimizers])
            keep_freed()
        with (
            torch_threads(self._threads),
            skip_distribution_checks(),
            outside_inference_mode(),
            # Only a custom policy has other modes; collection leaves training mode for evaluation mode.
            learning(self.policy) if self._own_policy and self.native is None else contextlib.nullcontext(),
            self._running(progress),
            self.ranks.training(self) if self.ranks.joined else contextlib.nullcontext(),
        ):
            return type(self)._loop(self)

    @contextlib.contextmanager
    def _running(self, shows_progress: bool) -> Iterator[None]:
        """Mark the algorithm as training, so that no other training can start, record it in its run folder, if there is
        one, show its progress on stderr, if asked for, and report exceptions to callbacks. Only rank 0 has callbacks.
        """
        leads = self.ranks.rank == 0
        progress = [ProgressCallback(live=None)] if shows_progress and leads else []
        recording = (
            contextlib.nullcontext() if self._run_folder is None or not leads else self._run_folder.recording(self)
        )
        with recording:
            self.callbacks.extend(progress)
            self._trains = True
            try:
                yield
            except Exception as e:
                self.callbacks.on_training_error(algorithm=self, error=e)
                raise
            finally:
                self._trains = False
                for callback in progress:
                    callback.close()
                    self.callbacks.callbacks.remove(callback)

    def _prepare_training(self) -> None:
        """Called before each training. Raise ValueError if the checkpoint was trained with an object that a file cannot
        store and that was not passed again."""

    @property
    def history(self) -> History:
        """The metrics of all trainings of this object, by name and step."""
        return self._history.history

    @property
    def run_folder(self) -> Path | None:
        """The run folder that ``logger`` names; None without one, or before its name is chosen by the first
        training."""
        return None if self._run_folder is None else self._run_folder.path

    # ---- checkpoints

    def save(self, path: str | os.PathLike, memory: bool = False, **header: Any) -> None:
        """Write a checkpoint (see `rlox.checkpoint`), without a dataset; `header` adds JSON values to its header.

        With `memory`, an off-policy algorithm also writes its replay memory, to files in ``memory/`` next to the
        checkpoint. Each save adds the steps since the last one; `from_checkpoint` finds the files there.
        """
        self.snapshot(path, memory, **header)()

    def snapshot(self, path: str | os.PathLike, memory: bool = False, **header: Any) -> Callable[[], None]:
        """Copy the data that `save` writes, and return the function that writes it.

        Training may continue before that function is called, or while another thread runs it.
        """
        own = self._checkpoint(**header)
        return partial(save_checkpoint, path, self.ranks.with_all_ranks(own) if self.ranks.joined else own)

    def _checkpoint(self, **header: Any) -> Checkpoint:
        self.backend.require_unchanged("save")
        c = self.counters
        own_info, own_tensors = self._own_state()
        info = {
            "algorithm": self.name,
            "env": _NO_ENV,
            "seed": self.seed,
            "threads": self._threads,
            "backend": str(self.backend),
            "config": self.config.to_dict(),
            "policy": "default",
            "counters": c.scalars(),
            "generators": self._generators(),
            "callbacks": self.callbacks.state(),
            "versions": versions(self.device),
            **header,
            **own_info,
        }
        tensors = {
            "policy": self._weights(),
            "optimizer": self.optimizer.state(),
            "normalization": {},
            "statistics": {
                "episode_returns": np.asarray(c.recent_returns, np.float64),
                "episode_lengths": np.asarray(c.recent_lengths, np.int64),
            },
            "generators": self._torch_generators(),
            **own_tensors,
        }
        if self.device != "cpu":
            from rlox.gpu.numerics import describe_numerics

            info["numerics"] = describe_numerics(self)
        # Copy the arrays, because most are views of memory that training changes.
        return Checkpoint(info, _copy_arrays(tensors))

    def _generators(self) -> dict[str, dict[str, int]]:
        """Return the states of the algorithm's random streams."""
        raise NotImplementedError

    def _torch_generators(self) -> dict[str, np.ndarray]:
        """Return the states of PyTorch's generators, if they decide a training."""
        raise NotImplementedError

    def _weights(self) -> dict[str, np.ndarray]:
        """Return the policy's weights for a checkpoint."""
        raise NotImplementedError

    def _own_state(self) -> tuple[dict[str, Any], dict[str, dict[str, np.ndarray]]]:
        """Return what a family or an algorithm adds to a checkpoint: header values, and tensors by section."""
        return {}, {name: state_of(part) for name, part in self._parts.items()}

    def _state_of_rank(self) -> dict[str, dict[str, np.ndarray]]:
        """Return copies of those checkpoint tensors that differ between ranks, by section."""
        parts = {name: state_of(part) for name, part in self._parts.items() if name in OWN}
        return _copy_arrays({**parts, "generators": self._torch_generators()})

    def _restore(self, checkpoint: Checkpoint, same_env: bool = False) -> bool:
        """Restore a checkpoint's state. Returns whether the environments continue where they were."""
        header, tensors, where = checkpoint.header, checkpoint.tensors, f"{type(self).__name__}: from_checkpoint"
        self._restored_from = checkpoint.folder
        self._load_weights(tensors["policy"], where)
        self.optimizer.set_state(tensors["optimizer"])
        for name, part in self._parts.items():
            if name not in self._switches or header["config"].get(self._switches[name]):
                load_part(part, tensors.get(name, {}), f"{where}: {name}")
        self.counters.restore(header["counters"])
        self.callbacks.set_state(header.get("callbacks", {}))
        statistics, none = tensors.get("statistics", {}), np.empty(0)
        self.counters.remember(statistics.get("episode_returns", none), statistics.get("episode_lengths", none))
        self.rng.set_state(header["generators"][self._stream.name.lower()])
        if tensors["generators"]:
            set_generator_states(tensors["generators"], self.device)
        return False

    def init_from(self, path: str | os.PathLike) -> None:
        """Load the weights and the normalisation of a checkpoint; everything else stays new.

        Raises
        ------
        FileNotFoundError, ValueError
            See `rlox.checkpoint.load_checkpoint`; also if the policy or the observations have another shape.
        """
        self._start_from(load_checkpoint(path), f"{type(self).__name__}: init_from {path}")

    def _start_from(self, checkpoint: Checkpoint, where: str) -> None:
        raise NotImplementedError

    def _load_weights(self, arrays: dict[str, np.ndarray], where: str) -> None:
        """Load a checkpoint's weights into the policy, and into networks that start as a copy of it."""
        raise NotImplementedError

    # ---- the object

    def __repr__(self) -> str:
        """What learns where, how large it is, and how far it has come; also if its construction has failed."""
        known = vars(self)
        parts = self._described()
        if "counters" in known:
            parts.append(f"{self.counters.steps:,} {self.counters.unit} trained")
        if "backend" in known:
            parts += [f"backend={self.backend}", f"device={self.device}"]
        return f"{type(self).__name__}({', '.join(parts)})"

    def _described(self) -> list[str]:
        """Return what `repr` says about the networks."""
        policy = vars(self).get("_policy")
        return [] if policy is None else [f"{sum(p.numel() for p in policy.parameters()):,} parameters"]

    def __getattr__(self, name: str) -> Any:
        return find_renamed(self, name)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        # Networks and optimisers share memory, but a copy's would not.
        where = type(self).__name__
        raise TypeError(
            f"{where}: an algorithm must not be copied or pickled; call save(path) and {where}.from_checkpoint(path) "
            "to get another one. copy.deepcopy(algorithm.policy) copies only the policy"
        )

    def close(self) -> None:
        """Release what is not memory: processes, connections, files. The trained policy remains usable."""


def load_part(part: Any, arrays: dict[str, np.ndarray], what: str) -> None:
    """Load a section of a checkpoint into a module, an optimiser or another object with ``set_state``."""
    if is_module(part):
        load_weights_(part, arrays, what)
    else:
        part.set_state(arrays)


def _copy_arrays(sections: dict[str, dict[str, np.ndarray]]) -> dict[str, dict[str, np.ndarray]]:
    return {section: {name: np.array(x) for name, x in arrays.items()} for section, arrays in sections.items()}


# ---- what all training loops share

_NUMBERS = (float, int, np.number)


def to_floats(metrics: Mapping[str, torch.Tensor | float]) -> dict[str, float]:
    """Convert scalars to floats, with a single transfer from the device.

    Raises
    ------
    TypeError
        If `metrics` is not a mapping, or a metric is neither a number nor a tensor of shape ().
    """
    if type(metrics) is dict and {float}.issuperset(map(type, metrics.values())):
        return metrics
    if not isinstance(metrics, Mapping):
        raise _refuse_metrics(metrics)
    tensors = {name: value for name, value in metrics.items() if not isinstance(value, _NUMBERS)}
    numbers: Iterator[float] = iter(())
    if tensors:
        import torch

        for name, value in tensors.items():
            if not isinstance(value, torch.Tensor) or value.dim():
                raise _refuse_metrics(value, name)
        numbers = iter(torch.stack([*tensors.values()]).tolist())
    return {name: float(value) if isinstance(value, _NUMBERS) else next(numbers) for name, value in metrics.items()}


def _refuse_metrics(value: Any, name: str | None = None) -> TypeError:
    """Return the error for what an update returned instead of metrics by name, or instead of the metric `name`."""
    if name is None:
        return TypeError(f"update must return its metrics as a dict, got {shown(value)}")
    got = f"a tensor of shape {tuple(value.shape)}" if hasattr(value, "dim") else shown(value)
    return TypeError(f"update must return metrics that are numbers or tensors of shape (), got {name}: {got}")


def require_finite(losses: dict[str, float], algorithm) -> None:
    """Raise FloatingPointError if a metric of an update is not finite."""
    if math.isfinite(sum(losses.values())):  # so is each of them
        return
    c = algorithm.counters
    for name, value in losses.items():
        # Explained variance is undefined (NaN) if all returns are equal; every other metric must be finite.
        if not math.isfinite(value) and name.partition("/")[0] != "explained_variance":
            raise FloatingPointError(
                f"{algorithm.name}: {name} became {value} at {c.unit[:-1]} {c.steps}; training cannot continue. "
                "Try a lower learning_rate or max_grad_norm, and look for extreme rewards or observations"
            )


def average_metrics(history: list[dict[str, Any]], rounds: bool = False) -> dict[str, float]:
    """Return the mean of each metric over the updates that report it; a delayed policy does not report in every update.

    A row of `history` contains numbers or tensors; with `rounds`, arrays with one number per update (see `Rounds`).
    """
    numbers = (*_NUMBERS, np.ndarray) if rounds else _NUMBERS
    for row in history:
        if not isinstance(row, Mapping):
            raise _refuse_metrics(row)
    names = dict.fromkeys(name for row in history for name in row)
    means: dict[str, torch.Tensor | float] = {}
    for name in names:
        values = [row[name] for row in history if name in row]
        tensors = [value for value in values if not isinstance(value, numbers)]
        if not tensors:
            means[name] = float(np.hstack(values).mean())
            continue
        import torch

        for value in tensors:
            if not isinstance(value, torch.Tensor) or value.dim():
                raise _refuse_metrics(value, name)
        # One update may report a number, such as 0.0, and another one a tensor.
        device = tensors[0].device
        stacked = torch.stack([torch.as_tensor(value, device=device) for value in values])
        means[name] = (stacked if stacked.is_floating_point() else stacked.double()).mean()
    return to_floats(means)


def choose_update(algorithm) -> Callable[[Any], dict[str, Any]]:
    """Return the function that updates from a batch; PyTorch's records gradients, also for a caller without them."""
    if algorithm.backend == "native":
        return algorithm.update_native
    if algorithm.backend.captures:
        return algorithm.backend.captured(algorithm)
    import torch

    return torch.enable_grad()(algorithm.update)


class Updates:
    """The updates of an algorithm from its own samples, and their metrics since the last report."""

    def __init__(self, algorithm: Any):
        self._algorithm, self._update = algorithm, choose_update(algorithm)
        self.history: list[dict[str, Any]] = []
        self.in_rounds = False  # whether a row has the metrics of all updates of whole rounds, as arrays

    def __call__(self) -> None:
        """Sample and update once."""
        self.history.append(self._update(self._algorithm.sample()))

    def average(self) -> dict[str, float]:
        """Return the mean of each metric over the updates since the last call."""
        history, self.history = self.history, []
        return average_metrics(history, self.in_rounds)
