"""Base class of all algorithms: construction, backend, training, acting, evaluation, checkpoints.

The families (`on_policy`, `off_policy`, `offline`) add the source of batches; an algorithm adds its `update`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, SupportsIndex, TypeVar, runtime_checkable

import numpy as np

from rlox.callbacks import Callback
from rlox.callbacks.history import HistoryCallback
from rlox.callbacks.loggers import LoggerCallback
from rlox.checkpoint import Checkpoint, Counters, load_checkpoint, one_line, save_checkpoint, versions
from rlox.checkpoint.streams import Stream
from rlox.collectors import RewardFn
from rlox.collectors.evaluation import (
    Evaluation,
    evaluate,
    outside_inference_mode,
    torch_threads,
    unchecked_distributions,
)
from rlox.collectors.recurrent import FirstStep, RecurrentActor
from rlox.compiled import NativeAdam, NativeOptimizer, Watch
from rlox.compiled.shadows import update_difference
from rlox.config import BACKENDS, DEVICES, Config, choice, integer, require, shown
from rlox.config.base import LARGEST_SEED, MOST_THREADS
from rlox.config.sb3 import Elsewhere, refuse
from rlox.distributed.ranks import ALONE, OWN, Ranks, current
from rlox.envs import EnvSpec, env_name
from rlox.envs.gym_make import whole_games
from rlox.kernels.rng import Rng
from rlox.nn.devices import computes_bfloat16, generator_states, set_generator_states
from rlox.nn.modes import learning
from rlox.nn.modules import load_weights_, state_of, weights_of

# PyTorch is imported where it is used, because native runs do not need it.
from rlox.training import restoring
from rlox.training.parts import (
    CUDA_PAYS_FROM,
    callback_list,
    choose_device,
    described,
    device_for,
    read_observations,
    require_env_arguments,
    require_laid_out,
    shown_progress,
    uncopied,
    write_actions,
)
from rlox.training.schedules import plan, running, schedule_values, warn_if_done

if TYPE_CHECKING:
    import torch
    from torch import nn

    from rlox.callbacks import History
    from rlox.callbacks.run_folder import RunFolder
    from rlox.collectors.exploration import ActionNoise
    from rlox.collectors.vec_normalize import VecNormalize
    from rlox.nn.optimizers import FlatOptimizer
    from rlox.nn.sharding import ShardedAdam
    from rlox.offline.statistics import DatasetStatistics

Batch = TypeVar("Batch", contravariant=True)


@runtime_checkable
class Learner(Protocol[Batch]):
    """Interface that the author of an algorithm implements; the base class of its family provides the rest.

    A subclass may also override `Algorithm.make_policy` for another kind of policy, `Algorithm.setup` for further
    networks and optimisers, and `Algorithm.schedule_values` for further schedules. It may define ``update_native``,
    which runs `update` as a kernel.
    """

    name: ClassVar[str]  # its key in `rlox.algorithms.ALGORITHMS`, and the name of its YAML file
    Config: ClassVar[type[Config]]  # a dataclass below the family's configuration

    def update(self, batch: Batch, /) -> Mapping[str, torch.Tensor | float]:
        """Learn from a batch, whose type the family defines; return the metrics by name, as tensors () or floats."""
        ...


class Algorithm:
    """Base class of the families; their classes document the arguments.

    Attributes
    ----------
    config : Config
        Hyper-parameters, never changed after construction.
    counters : Counters
        Steps, updates and episodes so far.
    parts : dict
        Contents of a checkpoint in addition to `policy` and `optimizer`, by section: modules, optimisers, and other
        objects with ``state()`` and ``set_state(arrays)``. `setup` adds to it with `keep`.
    rng : Rng
        Determines what each update sees; its stream is the class's `stream`.
    spec : EnvSpec
        Shapes and bounds of observations and actions.
    collector : RolloutCollector, ReplayCollector or None
        Collects experience; None if the algorithm learns from a dataset only.
    normalizer : VecNormalize, DatasetStatistics or None
        Transforms observations before the networks see them.
    """

    name: ClassVar[str]
    Config: ClassVar[type[Config]]
    loop: ClassVar[Callable[..., dict[str, float]]]  # of `rlox.training.loops`
    stream: ClassVar[Stream]  # the stream of `rng`
    actions: ClassVar[tuple[str, ...]] = ("discrete", "multi-discrete", "continuous")  # supported kinds of actions
    mixed_images: ClassVar[bool] = False  # whether it supports images next to other numbers, see `EnvSpec.images`
    length: ClassVar[str] = "total_timesteps"  # name of `train`'s argument for the length of a training

    data_parallel: ClassVar[bool] = False  # whether several ranks may train it together, see `rlox.distributed.ranks`

    spec: EnvSpec
    n_envs: int = 1  # environments of all ranks together
    env_workers: int = 0
    env_backend: str = "auto"
    collector: Any = None
    normalizer: VecNormalize | DatasetStatistics | None = None
    optimizer: FlatOptimizer | NativeOptimizer | NativeAdam
    native: Any = None  # a NativeActor, if the kernel also holds the policy's weights
    _watch: Watch | None = None
    _trains = False  # whether `train` is running
    _own_policy = False  # whether the policy is custom; only the user can then map weights to it
    _lost_reward_fn: str | None = None  # name of a checkpoint's reward_fn that was not passed again
    _saved_shapes: frozenset[tuple[int, ...]] | None = None  # (n_out, n_in) of the weights to restore

    learn = Elsewhere("agent.train(total_timesteps)")
    load = Elsewhere("{}.from_checkpoint(path)")
    num_timesteps = Elsewhere("agent.counters.env_steps")
    get_env = Elsewhere("agent.collector.env")
    set_env = Elsewhere("{}.from_checkpoint(path, env_id=…)")
    get_parameters = Elsewhere("agent.policy.state_dict()")
    set_parameters = Elsewhere("agent.init_from(path)")

    def __init__(
        self,
        env_id: str | Callable[[], Any] | None,
        seed: int,
        logger: LoggerCallback | None,
        callbacks: Iterable[Callback] | None,
        config: Mapping[str, Any],
        *,
        device: str,
        backend: str,
        threads: int,
        env_kwargs: dict[str, Any] | None,
        env_wrappers: Sequence[Any],
        compile: bool = False,
        clock: str = "env_steps",
    ):
        where = type(self).__name__
        self.config = self._configured(where, dict(config))
        self.env_id = env_id
        self.seed = integer(where, "seed", seed, 0, LARGEST_SEED)  # evaluations use 10_000 + seed
        self.threads = integer(where, "threads", threads, 0, MOST_THREADS)
        require_env_arguments(where, env_kwargs, env_wrappers)
        if not isinstance(compile, bool):
            raise TypeError(f"{where}: compile must be true or false, got {shown(compile)}")
        self.compile = compile
        self._compiled: dict[Callable[..., Any], Callable[..., Any]] = {}
        self.env_kwargs = self.eval_kwargs = dict(env_kwargs or {})
        self.env_wrappers = list(env_wrappers)
        self.requested_device = choice(where, "device", device, DEVICES)
        choice(where, "backend", backend, BACKENDS)
        self.ranks: Ranks = current() if type(self).data_parallel else ALONE
        if hasattr(self.config, "batch_size"):
            self.ranks.share(where, "batch_size", self.config.batch_size)
        # Only rank 0 has callbacks, so that evaluating, recording and saving happen once.
        self._history = HistoryCallback()
        self._run_folder: RunFolder | None = None
        if logger is not None and not isinstance(logger, Callback):
            from rlox.callbacks.run_folder import run_folder

            self._run_folder, logger = run_folder(where, logger), None
        given = callback_list(where, callbacks, logger)
        self.callbacks = given if self.ranks.rank == 0 else callback_list(where, None, None)
        self.callbacks.extend([self._history])
        self.counters = Counters(clock=clock)
        self.parts: dict[str, Any] = {}
        self._switches: dict[str, str] = {}  # by part, the hyper-parameter that switches it on
        self.optimizers: list[FlatOptimizer | NativeAdam | ShardedAdam] = []

    def _configured(self, where: str, values: dict[str, Any]) -> Any:
        """Return the configuration passed as ``config``, or one built from single hyper-parameters."""
        given = values.pop("config", None)
        if given is None:
            return self.Config.from_kwargs(where, **values)
        if not isinstance(given, self.Config):
            raise TypeError(f"{where}: config must be a {self.Config.__name__}, got {shown(given)}")
        if values:
            raise TypeError(f"{where}: {min(values)} must not be given together with config, which contains it")
        return given

    @outside_inference_mode()
    def _assemble(self, policy: nn.Module | None, backend: str, device: str) -> None:
        """Choose the backend, then create networks and optimisers; the last step of construction."""
        self._own_policy = policy is not None
        where = type(self).__name__
        device = device_for(device, policy, where)
        self.backend, self.backend_reason = self._choose_backend(backend, policy, device)
        rng = Rng(self.seed, Stream.INIT)
        self.make_policy(rng, policy)
        native = self.backend == "native"
        self.device = "cpu"
        if not native:
            self.device = choose_device(device, self.policy, where, self.ranks, self._critics_size())
        if self.collector is not None:
            self.collector.device = self.device
        if not native:
            self.policy.to(self.device)
        self.rng = self.ranks.rng(self.seed, self.stream)
        self.setup(rng)
        self.ranks.average(self)
        if isinstance(self.optimizer, NativeOptimizer):
            self.optimizer.actor = self.native
        self._watch = Watch(self, self.native) if native else None

    # ---- what an algorithm defines

    def make_policy(self, rng: Rng, policy: nn.Module | None) -> None:
        """Set `policy` to the custom policy after checking it, or to the default one with weights drawn from `rng`; or
        set `native`."""
        raise NotImplementedError

    def setup(self, rng: Rng) -> None:
        """Set `optimizer`, and create further networks (weights drawn from `rng`) and their optimisers.

        Policy and device are already set.
        """
        raise NotImplementedError

    def update(self, batch: Any) -> Mapping[str, torch.Tensor | float]:
        """Take one update. Returns scalar metrics, still tensors."""
        raise NotImplementedError

    def schedule_values(self, progress: float) -> dict[str, float]:
        """Return the learning rate and all other scheduled values at `progress` in [0, 1], by metric name."""
        return schedule_values(self.config, progress)

    # ---- helpers for `setup` and `update`

    def keep(self, name: str, part: Any, switch: str | None = None) -> Any:
        """Store `part` in checkpoints, in the section `name`. Returns it.

        The hyper-parameter `switch` determines whether the part exists. If it was off in a checkpoint, the part stays
        new when that checkpoint is loaded.
        """
        self.parts[name] = part
        if switch is not None:
            self._switches[name] = switch
        return part

    def adam(self, block: str, parameters: Iterable[nn.Parameter]) -> FlatOptimizer | NativeAdam:
        """Create an Adam for `parameters` and add it to `optimizers`; `block` is the kernel's name for them."""
        from rlox.nn.optimizers import FlatOptimizer

        rate = self.config.learning_rate
        native = self.backend == "native"
        made = NativeAdam(parameters, block, rate) if native else FlatOptimizer(parameters, rate, eps=1e-8)
        self.optimizers.append(made)
        return made

    def use_kernel(self, kernel: Callable[..., Any], **blocks: torch.Tensor) -> None:
        """Let `kernel` compute updates, and actions if it acts, in the memory of the networks.

        `blocks` are the networks' flat parameters, by the argument names of the kernel's constructor.
        """
        spec, c = self.spec, self.config
        arrays = {name: block.detach().numpy() for name, block in blocks.items()}
        sizes = {"obs_dim": spec.obs_dim, "act_dim": spec.act_dim, "hidden_sizes": c.hidden_sizes}
        if self.native is None:
            self.net = kernel(**arrays, **sizes, activation=c.activation)
        else:
            self.native.use(kernel, arrays, **sizes, activation=c.activation)
            self.net = self.native.net
        for optimizer in self.optimizers:
            if isinstance(optimizer, NativeAdam):
                optimizer.net = self.net

    def compiled(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """Return `loss` itself or, with `compile`, its compiled version, which is the same at every call."""
        if not self.compile:
            return loss
        if loss not in self._compiled:
            from rlox.nn.compiling import CompiledLoss

            self._compiled[loss] = CompiledLoss(loss, self.device)
        return self._compiled[loss]

    def _precision(self) -> str:
        """Return ``float32`` or ``bfloat16``, for configurations with a `precision`."""
        wanted = self.config.precision
        if wanted == "auto":
            wanted = "bfloat16" if self.device == "cuda" and computes_bfloat16() else "float32"
        return wanted

    def cast(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context that sets the precision of passes over a model; trained weights stay float32."""
        if self._precision() == "float32":
            return contextlib.nullcontext()
        import torch

        return torch.autocast(self.device, torch.bfloat16)

    # ---- backend

    def _choose_backend(self, backend: str, policy: nn.Module | None, device: str) -> tuple[str, str]:
        """Return ``native`` or ``torch``, and the reason."""
        if backend == "torch":
            return "torch", "as requested"
        obstacle = "compile is for PyTorch" if self.compile else self._native_obstacle(policy, device)
        if obstacle is None and backend == "auto" and self._gpu_pays(device):
            obstacle = "networks this large are faster on the GPU"
        if obstacle is None:
            return "native", "perceptrons on the CPU, computed as the PyTorch update defines them"
        if backend == "native":
            raise ValueError(f"{type(self).__name__}: backend must be auto or torch here, got 'native': {obstacle}")
        return "torch", obstacle

    def _native_obstacle(self, policy: nn.Module | None, device: str) -> str | None:
        """Return why the native path cannot run; None if it can."""
        if not hasattr(self, "update_native"):
            return f"{self.name} has no native update"
        if device == "cuda":
            return "it runs on the CPU, and device is cuda"
        if self.ranks.joined:
            return "distributed=ddp averages gradients in PyTorch"
        definer = next(cls for cls in type(self).__mro__ if "update" in vars(cls))
        if "update_native" not in vars(definer):
            return f"{definer.__name__} has an update of its own"
        found = self._kernel_obstacle(policy)
        return self._update_difference() if found is None else found

    def _gpu_pays(self, device: str) -> bool:
        """Return whether there is a GPU and PyTorch on it is the faster backend."""
        if device != "auto" or self._policy_size() + self._critics_size() < CUDA_PAYS_FROM:
            return False
        import torch

        return torch.cuda.is_available()

    def _kernel_obstacle(self, policy: nn.Module | None) -> str | None:
        """Return why the kernel cannot compute this policy exactly; None if it can."""
        raise NotImplementedError

    def _policy_size(self) -> int:
        """Return the number of parameters of the default policy."""
        raise NotImplementedError

    def _critics_size(self) -> int:
        """Return the number of parameters of critics that are not part of the policy."""
        return 0

    def check_kernel(self, where: str, functions: bool = False) -> None:
        """Raise ValueError if the kernel would no longer compute the same as the Python code, which was changed.

        The loops call it before each round. Functions are checked with `functions=True`, and once a second.
        """
        watch = self._watch
        if watch is not None and (functions or where != "train" or watch.due()):
            watch.require(where, functions, partial(self._update_difference, reread=False))

    def _update_difference(self, reread: bool = True) -> str | None:
        collector = () if self.collector is None else (self.collector,)
        return update_difference(self, *collector, self.counters, reread=reread)

    # ---- training

    @property
    def policy(self) -> nn.Module:
        """The trained module. If a kernel holds its weights, the module is created on first access, with views of the
        kernel's parameters."""
        return self._policy if self.native is None else self.native.module()

    @policy.setter
    def policy(self, module: nn.Module) -> None:
        if self.native is not None or hasattr(self, "_policy"):
            raise AttributeError(
                f"{type(self).__name__}: policy must be given to the constructor and cannot be replaced"
            )
        self._policy = module

    @property
    def actor(self) -> Any:
        """The actor of collection and evaluation: a module, a `NativeActor` or a `RecurrentActor`."""
        return self.policy if self.native is None else self.native

    def plan(
        self, total_timesteps: int | None = None, *, until: int | None = None, schedule_timesteps: int | None = None
    ) -> None:
        """Set the end of the training and of its schedules as `train` does, which then needs no arguments."""
        plan(self, total_timesteps, until, schedule_timesteps)

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
        refuse(where, unknown, (self.length, "until", "schedule_timesteps", "progress"))
        require(where, "progress", progress, bool)
        self._require_complete()
        plan(self, length, until, schedule_timesteps)
        warn_if_done(self.counters)
        require_laid_out(self)
        with (
            torch_threads(self.threads),
            unchecked_distributions(),
            outside_inference_mode(),
            self._learning(),
            self._recording(),
            shown_progress(self, progress),
            running(self),
            self.ranks.training(self),
        ):
            return type(self).loop(self)

    def _learning(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context that puts a custom policy in training mode; collection leaves it for evaluation mode."""
        return learning(self.policy) if self._own_policy and self.native is None else contextlib.nullcontext()

    def _recording(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context that records a training in its run folder, if there is one."""
        if self._run_folder is None or self.ranks.rank:
            return contextlib.nullcontext()
        return self._run_folder.recording(self)

    @property
    def history(self) -> History:
        """The metrics of all trainings of this object, by name and step."""
        return self._history.history

    @property
    def run_folder(self) -> Path | None:
        """The run folder that ``logger`` names; None without one, or before its name is chosen by the first
        training."""
        return None if self._run_folder is None else self._run_folder.path

    def _require_complete(self) -> None:
        """Raise ValueError if a checkpoint was trained with an object that a file cannot store and that was not passed
        again."""

    # ---- acting

    def predict(self, obs: Any, deterministic: bool = True) -> np.ndarray | int:
        """Return the action for one observation, or actions for a batch of B, without `make_noise`'s noise.

        A recurrent agent acts as in the first step of an episode.

        Parameters
        ----------
        obs : Any
            An observation as the environment returns it, or a batch of them as gymnasium's vector environments return
            it; or the array that the policy sees (`SpaceAdapter` describes it), (D,) or (B, D).
        deterministic : bool
            Whether to take the most likely action instead of sampling. A deterministic policy takes the same action
            either way.

        Returns
        -------
        int or array
            As the environment's ``step`` takes it. Discrete: an int, or (B,) int64. Box: an array of the space's shape,
            or (B, …), clipped to its bounds. MultiDiscrete and MultiBinary: integers of the space's shape, or (B, …).

        Raises
        ------
        ValueError
            If `obs` is neither, or contains values that are not finite.
        TypeError
            If `obs` is not an array of numbers; if `deterministic` and the policy is a custom module without ``mode``.
        """
        where = f"{type(self).__name__}.predict"
        require(where, "deterministic", deterministic, bool)
        rows, single = read_observations(where, self.spec, obs)
        return write_actions(self.spec, self.act_on(rows, deterministic), single)

    def act_on(self, rows: np.ndarray, deterministic: bool = True) -> np.ndarray:
        """Return the policy's actions (B, …), clipped, for observations (B, …) as they are stored in a batch."""
        self.check_kernel("predict")
        actor: Any = self.actor
        if isinstance(actor, RecurrentActor):
            actor = FirstStep(actor)
        elif self.native is None:
            from rlox.collectors.acting import ModuleActor, require_mode

            actor = ModuleActor(self.policy, self.device)
            if deterministic:
                require_mode(self.policy, f"{type(self).__name__}.predict")
        rows = rows if self.normalizer is None else self.normalizer.normalize(rows)
        return self.spec.clip(actor.mode(rows) if deterministic else actor.sample(rows))

    def make_noise(self, n_envs: int) -> ActionNoise | None:
        """Return new action noise, as training adds it in `n_envs` environments; None if there is only the policy's."""
        return None

    def explored(self, obs: np.ndarray, noise: ActionNoise | None, rng: Rng) -> np.ndarray:
        """Return actions (B, …) for observations (B, …) as in training: sampled, with the next step's `noise` (from
        `make_noise`, drawn from `rng`) added, and clipped."""
        actions = self.act_on(obs, deterministic=False)
        return actions if noise is None else self.spec.clip(actions + noise.draw(rng))

    def evaluate(
        self, n_episodes: int = 20, seed: int | None = None, deterministic: bool = True, **options: Any
    ) -> Evaluation:
        """Run whole episodes in a new environment, without affecting training; normalisation statistics are frozen.

        With ``deterministic=False`` the agent acts as in training, with exploration noise. `seed` defaults to 10_000 +
        the algorithm's own; `options` are passed to `rlox.collectors.evaluation.evaluate`. With several agents,
        `returns` are sums over the agents and `agent_returns` the returns of each agent.

        Raises
        ------
        ValueError
            If there is no environment, or its observations are not those of the training.
        """
        require(f"{type(self).__name__}.evaluate", "deterministic", deterministic, bool)
        with torch_threads(self.threads):
            arguments = self.evaluation_arguments(n_episodes, seed, deterministic)
            by = arguments.pop("by", evaluate)
            if by is evaluate and not deterministic:
                options["noise"] = self.make_noise
            return by(**arguments, **options)

    def evaluation_arguments(self, n_episodes: int, seed: int | None, deterministic: bool = True) -> dict[str, Any]:
        """Return the arguments of `rlox.collectors.evaluation.evaluate`, without its options.

        If the result contains ``by``, they are the arguments of that function instead.
        """
        self.check_kernel("evaluate")
        if self.env_id is None:
            raise ValueError(
                f"{type(self).__name__}.evaluate: there must be an environment; pass env_id='…' to the constructor"
            )
        c, seen = self.counters, {}
        if c.clock == "env_steps" and c.env_steps:
            # If no episode has ended yet, they are at least as long as the steps of one environment.
            seen["longest"] = max(c.recent_lengths, default=-(-c.env_steps // self.n_envs))
        return {
            "policy": self.actor,
            "env_id": self.env_id,
            "n_episodes": n_episodes,
            "seed": 10_000 + self.seed if seed is None else seed,
            "deterministic": deterministic,
            "env_kwargs": self.eval_kwargs,
            "device": self.device,
            "wrappers": whole_games(self.env_wrappers),
            "transform": None if self.normalizer is None else self.normalizer.normalize,
            **seen,
        }

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
        return partial(save_checkpoint, path, self.ranks.with_all_ranks(self._checkpoint(**header)))

    def _checkpoint(self, **header: Any) -> Checkpoint:
        self.check_kernel("save")
        c = self.counters
        info = {
            "algorithm": self.name,
            "env": {
                "id": None if self.env_id is None else env_name(self.env_id),
                "callable": self.env_id is not None and not isinstance(self.env_id, str),
                "n_envs": self.n_envs,
                "kwargs": self.env_kwargs,
                "wrappers": self.env_wrappers,
                "workers": self.env_workers,
                "backend": self.env_backend,
            },
            "seed": self.seed,
            "threads": self.threads,
            "backend": self.backend,
            "config": self.config.to_dict(),
            "policy": "custom" if self._own_policy else "default",
            "counters": c.scalars(),
            "generators": self.generators(),
            "callbacks": self.callbacks.state(),
            "versions": versions(),
            **header,
        }
        tensors = {
            "policy": self._weights(),
            "optimizer": self.optimizer.state(),
            "normalization": {} if self.normalizer is None else self.normalizer.state(),
            "statistics": {
                "episode_returns": np.asarray(c.recent_returns, np.float64),
                "episode_lengths": np.asarray(c.recent_lengths, np.int64),
            },
            # A custom policy samples, and a language model's dropout draws, from PyTorch's generators.
            "generators": self._torch_generators(),
        }
        own_info, own_tensors = self._own_state()
        tensors.update(own_tensors)
        # Copy the arrays, because most are views of memory that training changes.
        owned = {section: {name: np.array(x) for name, x in arrays.items()} for section, arrays in tensors.items()}
        return Checkpoint({**info, **own_info}, owned)

    def generators(self) -> dict[str, dict[str, int]]:
        """Return the states of the algorithm's random streams."""
        found = {self.stream.name.lower(): self.rng.get_state()}
        if self.collector is not None:
            found["action"] = self.collector.rng.get_state()
        return found

    def own_state(self) -> dict[str, dict[str, np.ndarray]]:
        """Return copies of those checkpoint tensors that differ between ranks, by section."""
        found = {name: state_of(part) for name, part in self.parts.items() if name in OWN}
        if self.collector is not None:
            found["environment"] = self.collector.state() or {}
            noise = getattr(self.collector, "action_noise", None)
            found["action_noise"] = {} if noise is None else noise.state()
        found["generators"] = self._torch_generators()
        if self.normalizer is not None:
            found["normalization"] = {k: x for k, x in self.normalizer.state().items() if k == "returns"}
        return {section: {name: np.array(x) for name, x in arrays.items()} for section, arrays in found.items()}

    def _weights(self) -> dict[str, np.ndarray]:
        """Return the policy's weights for a checkpoint."""
        return weights_of(self.policy) if self.native is None else self.native.weights()

    def _torch_generators(self) -> dict[str, np.ndarray]:
        if self.native is not None:
            return {}
        from rlox.nn.policies import Actor

        drawn = self._own_policy or not isinstance(self.policy, Actor)
        return generator_states(self.device) if drawn else {}

    def _own_state(self) -> tuple[dict[str, Any], dict[str, dict[str, np.ndarray]]]:
        """Return what a family or an algorithm adds to a checkpoint: header values, and tensors by section."""
        return {}, {name: state_of(part) for name, part in self.parts.items()}

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike,
        env_id: str | Callable[[], Any] | None = None,
        policy: nn.Module | None = None,
        logger: LoggerCallback | None = None,
        callbacks: Iterable[Callback] | None = None,
        device: str = "auto",
        backend: str | None = None,
        reward_fn: RewardFn | None = None,
        env_wrappers: Sequence[Any] | None = None,
        env_backend: str | None = None,
        **arguments: Any,
    ):
        """Restore an algorithm from a checkpoint.

        `train` without arguments continues as if it had never stopped, in native environments and in those foreign
        environments that can be restored (see `rlox.envs.state`). Other environments start new episodes, and everything
        else is exact; ``collector.restore_note()`` reports this with the reason.

        Off-policy algorithms restore the replay memory when it is first used, from the files next to a checkpoint of
        ``rlox train`` or ``save(path, memory=True)``; or `load_buffer` loads a file of `save_buffer`. Otherwise the
        memory starts empty (with a `RuntimeWarning` if files are missing), and the restored policy fills it with
        `learning_starts` steps before the first update.

        Parameters
        ----------
        path : path
            The checkpoint.
        env_id : str or callable, optional
            By default the environment of the training. Another environment starts new episodes.
        policy : nn.Module, optional
            Required, with the same parameters, if the checkpoint contains a custom policy.
        backend : str, optional
            By default the backend of the training, if it can run.
        reward_fn : callable, optional
            Required for further training if the checkpoint was trained with one.
        env_wrappers : sequence, optional
            Required if the checkpoint names wrappers from outside gymnasium, because a file must not choose what is
            imported.
        env_backend : str, optional
            By default the environment backend of the training.
        **arguments
            Further arguments of the class, including hyper-parameters, which override the saved values.

        Raises
        ------
        FileNotFoundError, ValueError
            See `rlox.checkpoint.load_checkpoint`; also for another algorithm's checkpoint, a policy that does not fit,
            or a damaged state of the environments.
        """
        return restoring.with_environments(
            cls,
            load_checkpoint(path),
            path,
            env_id,
            policy,
            reward_fn,
            env_wrappers,
            {
                "logger": logger,
                "callbacks": callbacks,
                "device": device,
                "backend": backend,
                "env_backend": env_backend,
            },
            arguments,
        )

    @classmethod
    def _saved_arguments(cls, header: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        """Return further arguments of the class from the header."""
        return {}

    def _restore(self, checkpoint: Checkpoint, same_env: bool) -> bool:
        """Restore a checkpoint's state. Returns whether the environments continue where they were."""
        header, tensors = checkpoint.header, checkpoint.tensors
        self._load_weights(tensors["policy"], f"{type(self).__name__}: from_checkpoint")
        self.optimizer.set_state(tensors["optimizer"])
        for name, part in self.parts.items():
            if name in self._switches and not header["config"].get(self._switches[name]):
                continue
            restoring.load_part(part, tensors.get(name, {}), f"{type(self).__name__}: from_checkpoint: {name}")
        self.counters.restore(header["counters"])
        self.callbacks.set_state(header.get("callbacks", {}))
        statistics, none = tensors.get("statistics", {}), np.empty(0)
        self.counters.remember(statistics.get("episode_returns", none), statistics.get("episode_lengths", none))
        self.rng.set_state(header["generators"][self.stream.name.lower()])
        if tensors["generators"]:
            set_generator_states(tensors["generators"], self.device)
        exact = False
        if self.collector is not None:
            self.collector.rng.set_state(header["generators"]["action"])
            exact = same_env and self.collector.restore(tensors["environment"])
        if self.normalizer is not None:
            self.normalizer.set_state(tensors["normalization"], returns=exact)
        return exact

    def init_from(self, path: str | os.PathLike) -> None:
        """Load the weights and the normalisation of a checkpoint; everything else stays new.

        Raises
        ------
        FileNotFoundError, ValueError
            See `rlox.checkpoint.load_checkpoint`; also if the policy or the observations have another shape.
        """
        self._start_from(load_checkpoint(path), f"{type(self).__name__}: init_from {path}")

    def _start_from(self, checkpoint: Checkpoint, where: str) -> None:
        tensors, theirs = checkpoint.tensors, checkpoint.header["algorithm"]
        if "obs_std" in tensors["normalization"]:
            raise ValueError(
                f"{where}: its policy must take unchanged observations, got a policy that "
                "takes them normalised by its dataset's statistics; train it with normalize_obs=false"
            )
        try:
            self._load_weights(self._fitted(tensors["policy"]), where)
        except ValueError as e:
            if theirs == self.name:
                raise
            raise ValueError(
                f"{where}: the policy must have the networks of {self.name}, got "
                f"those of {one_line(theirs, 40)}; start from a checkpoint of {self.name}"
            ) from e
        if self.normalizer is not None and tensors["normalization"]:
            self.normalizer.set_state(tensors["normalization"], returns=False)

    def _fitted(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Convert a checkpoint's policy weights, which may be another algorithm's, for `init_from`."""
        return arrays

    def _load_weights(self, arrays: dict[str, np.ndarray], where: str) -> None:
        """Load a checkpoint's weights into the policy, and into networks that start as a copy of it."""
        what = f"{where}: the policy"
        if self.native is not None:
            self.native.load(arrays, what)
        else:
            load_weights_(self.policy, arrays, what)

    def __repr__(self) -> str:
        return described(self)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        raise uncopied(self)

    def close(self) -> None:
        """End the environments' worker processes, if there are any. The trained policy remains usable."""
        if self.collector is not None:
            self.collector.close()
