"""One life for all algorithms: construction, backend, training, acting, evaluation, checkpoints.

The families (`on_policy`, `off_policy`, `offline`) add where batches come from; an algorithm adds its `update`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, SupportsIndex, TypeVar, cast, runtime_checkable

import numpy as np

from rlox.callbacks import Callback
from rlox.callbacks.loggers import LoggerCallback
from rlox.checkpoint import Checkpoint, Counters, load_checkpoint, one_line, save_checkpoint, versions
from rlox.checkpoint.streams import Stream
from rlox.collectors import RewardFn
from rlox.collectors.evaluation import Evaluation, evaluate, torch_threads, unchecked_distributions
from rlox.collectors.recurrent import FirstStep, RecurrentActor
from rlox.config import BACKENDS, DEVICES, Config, choice, integer, require, shown
from rlox.distributed.ranks import ALONE, OWN, Ranks, current
from rlox.envs import EnvSpec, env_name
from rlox.envs.gym_make import whole_games
from rlox.kernels.rng import Rng
from rlox.native import NativeAdam, NativeOptimizer, Watch
from rlox.native.shadows import update_difference
from rlox.nn.modules import load_weights_, state_of, weights_of

# PyTorch is imported where it is used: a native run needs none of it.
from rlox.training import restoring
from rlox.training.parts import (
    CUDA_PAYS_FROM,
    MOST_THREADS,
    callback_list,
    choose_device,
    predicted,
    require_env_arguments,
    require_laid_out,
    uncopied,
)
from rlox.training.schedules import plan, running, schedule_values, warn_if_done

if TYPE_CHECKING:
    import torch
    from torch import nn

    from rlox.collectors.exploration import ActionNoise
    from rlox.collectors.vec_normalize import VecNormalize
    from rlox.nn.optimizers import FlatOptimizer
    from rlox.nn.sharding import ShardedAdam
    from rlox.offline.statistics import DatasetStatistics

Batch = TypeVar("Batch", contravariant=True)


@runtime_checkable
class Learner(Protocol[Batch]):
    """What the author of an algorithm provides; the base class of its family provides the rest.

    A family's base class may be given more than this: `Algorithm.make_policy` for a policy of another kind,
    `Algorithm.setup` for further networks and optimisers, `Algorithm.schedule_values` for further schedules, and
    ``update_native``, which does by a kernel what `update` does.
    """

    name: ClassVar[str]  # its key in `rlox.algorithms.ALGORITHMS`, and the name of its YAML file
    Config: ClassVar[type[Config]]  # a dataclass below the family's configuration

    def update(self, batch: Batch, /) -> Mapping[str, torch.Tensor | float]:
        """Learn from a batch, which the family defines; return the metrics by name, as tensors () or floats."""
        ...


class Algorithm:
    """Base of the families; their classes say which arguments they take.

    Attributes
    ----------
    config : Config
        Hyper-parameters, never changed after construction.
    counters : Counters
        Steps, updates and episodes so far.
    parts : dict
        What a checkpoint holds beside `policy` and `optimizer`, by section: modules, optimisers, and other objects with
        ``state()`` and ``set_state(arrays)``. `setup` adds to it by `keep`.
    rng : Rng
        Decides what each update sees; its stream is the class's `stream`.
    spec : EnvSpec
        Shapes and bounds of observations and actions.
    collector : RolloutCollector, ReplayCollector or None
        What gathers experience; None where a dataset is all there is.
    normalizer : VecNormalize, DatasetStatistics or None
        What observations go through before the networks see them.
    """

    name: ClassVar[str]
    Config: ClassVar[type[Config]]
    loop: ClassVar[Callable[..., dict[str, float]]]  # of `rlox.training.loops`
    stream: ClassVar[Stream]  # what `rng` decides
    actions: ClassVar[tuple[str, ...]] = ("discrete", "multi-discrete", "continuous")  # what it can learn to take
    mixed_images: ClassVar[bool] = False  # whether it takes images beside other numbers, see `EnvSpec.images`
    length: ClassVar[str] = "total_timesteps"  # how `train` calls the length of a training

    data_parallel: ClassVar[bool] = False  # whether several ranks may train it together, see `rlox.distributed.ranks`

    spec: EnvSpec
    n_envs: int = 1  # of all ranks together
    env_workers: int = 0
    env_backend: str = "auto"
    collector: Any = None
    normalizer: VecNormalize | DatasetStatistics | None = None
    optimizer: FlatOptimizer | NativeOptimizer | NativeAdam
    native: Any = None  # a NativeActor, where the kernel also holds the policy's weights
    _watch: Watch | None = None
    _trains = False  # whether `train` is running
    _own_policy = False  # whether the policy is the user's, whose weights only the user can place
    _lost_reward_fn: str | None = None  # of a checkpoint, the name of the reward_fn that was not given again
    _saved_shapes: frozenset[tuple[int, ...]] | None = None  # (n_out, n_in) of the weights that are to be restored

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
        self.seed = integer(where, "seed", seed, 0)
        self.threads = integer(where, "threads", threads, 0, MOST_THREADS)
        require_env_arguments(where, env_kwargs, env_wrappers)
        if not isinstance(compile, bool):
            raise TypeError(f"{where}: compile must be true or false, got {shown(compile)}")
        self.compile = compile
        self._compiled: dict[Callable[..., Any], Callable[..., Any]] = {}
        self.env_kwargs = self.eval_kwargs = dict(env_kwargs or {})
        self.env_wrappers = list(env_wrappers)
        choice(where, "device", device, DEVICES)
        choice(where, "backend", backend, BACKENDS)
        self.ranks: Ranks = current() if type(self).data_parallel else ALONE
        if hasattr(self.config, "batch_size"):
            self.ranks.share(where, "batch_size", self.config.batch_size)
        # What evaluates, records and saves does so once.
        given = callback_list(where, callbacks, logger)
        self.callbacks = given if self.ranks.rank == 0 else callback_list(where, None, None)
        self.counters = Counters(clock=clock)
        self.parts: dict[str, Any] = {}
        self._switches: dict[str, str] = {}  # by part, the hyper-parameter that says whether there is one
        self.optimizers: list[FlatOptimizer | NativeAdam | ShardedAdam] = []

    def _configured(self, where: str, values: dict[str, Any]) -> Any:
        """The configuration: what was given as ``config``, or one of single hyper-parameters."""
        given = values.pop("config", None)
        if given is None:
            return self.Config.from_kwargs(where, **values)
        if not isinstance(given, self.Config):
            raise TypeError(f"{where}: config must be a {self.Config.__name__}, got {shown(given)}")
        if values:
            raise TypeError(f"{where}: {min(values)} must not be given beside config, which holds it")
        return given

    def _assemble(self, policy: nn.Module | None, backend: str, device: str) -> None:
        """Choose the backend, then make networks and optimisers: what comes last in construction."""
        self._own_policy = policy is not None
        self.backend, self.backend_reason = self._choose_backend(backend, policy, device)
        rng = Rng(self.seed, Stream.INIT)
        self.make_policy(rng, policy)
        native = self.backend == "native"
        self.device = "cpu" if native else choose_device(device, self.policy, type(self).__name__)
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
        """Set `policy` to the user's after its checks, or to the default one with weights drawn from `rng`; or set
        `native`."""
        raise NotImplementedError

    def setup(self, rng: Rng) -> None:
        """Set `optimizer`, and make further networks (weights drawn from `rng`) and their optimisers; policy and device
        are there."""
        raise NotImplementedError

    def update(self, batch: Any) -> Mapping[str, torch.Tensor | float]:
        """One update; scalar metrics, still tensors."""
        raise NotImplementedError

    def schedule_values(self, progress: float) -> dict[str, float]:
        """The learning rate, and all else that a schedule moves, by their metrics' names, as they stand at `progress`
        in [0, 1]."""
        return schedule_values(self.config, progress)

    # ---- what `setup` and `update` are written with

    def keep(self, name: str, part: Any, switch: str | None = None) -> Any:
        """Have checkpoints hold `part` in the section `name`; returns it.

        Where a hyper-parameter is the `switch` that there is such a part, one of a checkpoint that had it off is new.
        """
        self.parts[name] = part
        if switch is not None:
            self._switches[name] = switch
        return part

    def adam(self, block: str, parameters: Iterable[nn.Parameter]) -> FlatOptimizer | NativeAdam:
        """Adam for `parameters`, listed in `optimizers`; `block` is a kernel's name for them."""
        from rlox.nn.optimizers import FlatOptimizer

        rate = self.config.learning_rate
        native = self.backend == "native"
        made = NativeAdam(parameters, block, rate) if native else FlatOptimizer(parameters, rate, eps=1e-8)
        self.optimizers.append(made)
        return made

    def use_kernel(self, kernel: Callable[..., Any], **blocks: torch.Tensor) -> None:
        """Have `kernel` compute updates, and actions where it acts, in the memory of the networks; `blocks` are their
        flat parameters by the names of its constructor."""
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
        """`loss` itself, or where `compile` asks for it what PyTorch makes of it, the same at every call."""
        if not self.compile:
            return loss
        if loss not in self._compiled:
            from rlox.nn.compiling import CompiledLoss

            self._compiled[loss] = CompiledLoss(loss, self.device)
        return self._compiled[loss]

    def _precision(self) -> str:
        """``float32`` or ``bfloat16``, where the configuration has a `precision`."""
        wanted = self.config.precision
        if wanted == "auto":
            import torch

            wanted = "bfloat16" if self.device == "cuda" and torch.cuda.is_bf16_supported() else "float32"
        return wanted

    def cast(self) -> contextlib.AbstractContextManager[Any]:
        """The precision of passes over a model; what is trained stays float32."""
        if self._precision() == "float32":
            return contextlib.nullcontext()
        import torch

        return torch.autocast(self.device, torch.bfloat16)

    # ---- backend

    def _choose_backend(self, backend: str, policy: nn.Module | None, device: str) -> tuple[str, str]:
        """``native`` or ``torch``, and why."""
        if backend == "torch":
            return "torch", "as asked"
        obstacle = "compile is for PyTorch" if self.compile else self._native_obstacle(policy, device)
        if obstacle is None and backend == "auto" and self._gpu_pays(device):
            obstacle = "so large a policy is faster on the GPU"
        if obstacle is None:
            return "native", "perceptrons on the CPU, computed as the PyTorch update defines them"
        if backend == "native":
            raise ValueError(f"{type(self).__name__}: backend must be auto or torch here, got 'native': {obstacle}")
        return "torch", obstacle

    def _native_obstacle(self, policy: nn.Module | None, device: str) -> str | None:
        """Why the native path cannot run; None where it can."""
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
        """Whether PyTorch on a GPU is the faster backend, and there is one."""
        if device != "auto" or self._kernel_size() < CUDA_PAYS_FROM:
            return False
        import torch

        return torch.cuda.is_available()

    def _kernel_obstacle(self, policy: nn.Module | None) -> str | None:
        """Why the kernel cannot compute this policy exactly; None where it can."""
        raise NotImplementedError

    def _kernel_size(self) -> int:
        """How many parameters the default policy has."""
        raise NotImplementedError

    def check_kernel(self, where: str, functions: bool = False) -> None:
        """A ValueError where a kernel would no longer compute what Python says: something was changed since.

        The loops call it before each round. The `functions` are looked at where that is asked for, and every second.
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
        """The module that is trained; where a kernel holds its weights it is made when it is first asked for, and has
        views of the kernel's parameters."""
        return self._policy if self.native is None else self.native.module()

    @policy.setter
    def policy(self, module: nn.Module) -> None:
        if self.native is not None or hasattr(self, "_policy"):
            raise AttributeError(f"{type(self).__name__}: policy must be given to the constructor, and stays the same")
        self._policy = module

    @property
    def actor(self) -> Any:
        """What acts in collection and evaluation: a module, a `NativeActor` or a `RecurrentActor`."""
        return self.policy if self.native is None else self.native

    def plan(
        self, total_timesteps: int | None = None, *, until: int | None = None, schedule_timesteps: int | None = None
    ) -> None:
        """Set the end of the training and of its schedules as `train` does, which may then be called without any."""
        plan(self, total_timesteps, until, schedule_timesteps)

    def train(
        self, total_timesteps: int | None = None, *, until: int | None = None, schedule_timesteps: int | None = None
    ) -> dict[str, float]:
        """Train for `total_timesteps` more environment steps, rounded up to whole rollouts or rounds.

        Without `total_timesteps` it goes on with the training that was stopped, or that a checkpoint was saved in the
        middle of, to the end that was set for it then, as if there had been no pause.

        Parameters
        ----------
        total_timesteps : int, optional
            A new training of so many steps.
        until : int, optional
            Another end for the training that is continued, in environment steps since the algorithm was made. Its
            schedules are stretched to the new end, so that a learning rate that had fallen rises again.
        schedule_timesteps : int, optional
            Steps after which schedules (learning rate, exploration, …) have come to their end, counted from the
            training's beginning; by default `total_timesteps`, or what `until` says.

        Returns
        -------
        dict
            The last metrics; ``mean_reward`` is the mean undiscounted return of the last 100 completed
            episodes, NaN if none has ended; ``learning_rate``, and every other value that a schedule moves, are those
            of the last update.

        Warns
        -----
        RuntimeWarning
            Where schedules get another end: it has their values before and after. Where nothing is left to train.

        Raises
        ------
        FloatingPointError
            If a loss or gradient is no longer finite.
        ValueError
            For a number below 1, both `total_timesteps` and `until`, neither where nothing was begun, an `until` that
            is already past, or a `schedule_timesteps` that leaves a learning rate of 0 for all that is left; where a
            checkpoint was trained with a `reward_fn` or a dataset that was not given again.
        """
        return self._train(total_timesteps, until, schedule_timesteps)

    def _train(self, length: int | None, until: int | None, schedule_timesteps: int | None) -> dict[str, float]:
        self._require_complete()
        plan(self, length, until, schedule_timesteps)
        warn_if_done(self.counters)
        require_laid_out(self)
        with torch_threads(self.threads), unchecked_distributions(), running(self), self.ranks.training(self):
            return type(self).loop(self)

    def _require_complete(self) -> None:
        """A ValueError where a checkpoint was trained with what a file cannot hold, and it was not given again."""

    # ---- acting

    def predict(self, obs: Any, deterministic: bool = True) -> np.ndarray | int:
        """Action for one observation (D,), or actions for a batch (B, D); without what `make_noise` adds in training.

        An agent that carries a state from step to step acts as in the first step of an episode.

        Returns
        -------
        int or array
            Discrete: an int, or (B,) int64. Continuous: (A,) or (B, A) f32, clipped to the action space. A
            deterministic policy takes the same action either way.

        Raises
        ------
        ValueError
            If the observation has another size, or holds what is not finite.
        TypeError
            For what is no array of numbers; if `deterministic` and the policy is a user's module without ``mode``.
        """
        where = f"{type(self).__name__}.predict"
        self.check_kernel("predict")
        actor: Any = self.actor
        if isinstance(actor, RecurrentActor):
            actor = FirstStep(actor)
        elif self.native is None:
            from rlox.collectors.acting import ModuleActor, require_mode

            actor = ModuleActor(self.policy, self.device)
            if deterministic:
                require_mode(self.policy, where)
        transform = None if self.normalizer is None else self.normalizer.normalize
        return predicted(where, self.spec, actor, obs, deterministic, transform)

    def make_noise(self, n_envs: int) -> ActionNoise | None:
        """The noise that training adds to the actions in `n_envs` environments, new; None beyond the policy's own."""
        return None

    def explored(self, obs: np.ndarray, noise: ActionNoise | None, rng: Rng) -> np.ndarray:
        """Actions (B, …) for observations (B, …) as training takes them: sampled, with the next step's `noise` (of
        `make_noise`, drawn from `rng`) added, and clipped."""
        actions = cast(np.ndarray, self.predict(obs, deterministic=False))
        return actions if noise is None else self.spec.clip(actions + noise.draw(rng))

    def evaluate(
        self, n_episodes: int = 20, seed: int | None = None, deterministic: bool = True, **options: Any
    ) -> Evaluation:
        """Play whole episodes on a fresh environment, without disturbing training; statistics are frozen.

        Not `deterministic`: as training acts, with its exploration noise. `seed` None stands for 10_000 + the
        algorithm's own; `options` go to `rlox.collectors.evaluation.evaluate`. Of several agents `returns` are sums
        over them, and `agent_returns` those of each.

        Raises
        ------
        ValueError
            If there is no environment, or its observations are not those that were learned from.
        """
        require(f"{type(self).__name__}.evaluate", "deterministic", deterministic, bool)
        with torch_threads(self.threads):
            arguments = self.evaluation_arguments(n_episodes, seed, deterministic)
            by = arguments.pop("by", evaluate)
            if by is evaluate and not deterministic:
                options["noise"] = self.make_noise
            return by(**arguments, **options)

    def evaluation_arguments(self, n_episodes: int, seed: int | None, deterministic: bool = True) -> dict[str, Any]:
        """The arguments of `rlox.collectors.evaluation.evaluate`, without its options; with ``by``, of that function
        instead."""
        self.check_kernel("evaluate")
        if self.env_id is None:
            raise ValueError(f"{type(self).__name__}.evaluate: there must be an environment; pass env_id='…' when made")
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
        }

    # ---- checkpoints

    def save(self, path: str | os.PathLike, memory: bool = False, **header: Any) -> None:
        """Write a checkpoint (see `rlox.checkpoint`), without a dataset; `header` adds JSON values to its header.

        `memory`: off-policy, the replay memory too, in files of ``memory/`` beside it that hold what is new since the
        last time; `from_checkpoint` finds them there.
        """
        self.snapshot(path, memory, **header)()

    def snapshot(self, path: str | os.PathLike, memory: bool = False, **header: Any) -> Callable[[], None]:
        """Copy what `save` is to write, and return the function that writes it.

        Training may go on before that is called, or while another thread runs it.
        """
        return partial(save_checkpoint, path, self.ranks.whole(self._checkpoint(**header)))

    def _checkpoint(self, **header: Any) -> Checkpoint:
        self.check_kernel("save")
        c = self.counters
        info = {
            "algorithm": self.name,
            "env": {
                "id": None if self.env_id is None else env_name(self.env_id),
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
            # A user's policy samples from PyTorch's generator.
            "generators": self._torch_generator(),
        }
        own_info, own_tensors = self._own_state()
        tensors.update(own_tensors)
        # Copies, since most are views of what training changes.
        owned = {section: {name: np.array(x) for name, x in arrays.items()} for section, arrays in tensors.items()}
        return Checkpoint({**info, **own_info}, owned)

    def generators(self) -> dict[str, dict[str, int]]:
        """The states of its random streams."""
        found = {self.stream.name.lower(): self.rng.get_state()}
        if self.collector is not None:
            found["action"] = self.collector.rng.get_state()
        return found

    def own_state(self) -> dict[str, dict[str, np.ndarray]]:
        """What of a checkpoint's tensors each rank has of its own, by section; copies."""
        found = {name: state_of(part) for name, part in self.parts.items() if name in OWN}
        if self.collector is not None:
            found["environment"] = self.collector.state() or {}
            noise = getattr(self.collector, "action_noise", None)
            found["action_noise"] = {} if noise is None else noise.state()
        found["generators"] = self._torch_generator()
        if self.normalizer is not None:
            found["normalization"] = {k: x for k, x in self.normalizer.state().items() if k == "returns"}
        return {section: {name: np.array(x) for name, x in arrays.items()} for section, arrays in found.items()}

    def _weights(self) -> dict[str, np.ndarray]:
        """What checkpoints hold of the policy."""
        return weights_of(self.policy) if self.native is None else self.native.weights()

    def _torch_generator(self) -> dict[str, np.ndarray]:
        if self.native is not None:
            return {}
        import torch

        from rlox.nn.policies import Actor

        return {} if isinstance(self.policy, Actor) else {"torch": torch.get_rng_state().numpy()}

    def _own_state(self) -> tuple[dict[str, Any], dict[str, dict[str, np.ndarray]]]:
        """What a family or an algorithm adds to a checkpoint: header values, and tensors by section."""
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
        """Restore an algorithm; `train` without arguments continues as if it had never stopped, on native environments
        and on those foreign ones that can be restored (see `rlox.envs.state`). Others start with fresh episodes,
        everything else is exact; ``collector.restore_note()`` says so, and why.

        Off-policy, the replay memory is restored when it is first used, from the files that stand beside the
        checkpoints of `rlox train` (and of ``save(path, memory=True)``), or by `load_buffer` from what `save_buffer`
        kept. Without either it starts empty, a `RuntimeWarning` says so where files are missing, and the restored
        policy fills it with `learning_starts` steps before the first update.

        Parameters
        ----------
        path : path
            The checkpoint.
        env_id : str or callable, optional
            By default the one it was trained on. Another one starts with fresh episodes.
        policy : nn.Module, optional
            Needed, with the same parameters, where the checkpoint holds a user's own policy.
        backend : str, optional
            By default the one that ran, where it can.
        reward_fn : callable, optional
            Needed to train on, where the checkpoint was trained with one.
        env_wrappers : sequence, optional
            Needed where the checkpoint names wrappers from outside gymnasium: a file must not decide what is imported.
        env_backend : str, optional
            By default the one it was trained on.
        **arguments
            Further arguments of the class, hyper-parameters among them, in place of the saved ones.

        Raises
        ------
        FileNotFoundError, ValueError
            See `rlox.checkpoint.load_checkpoint`; also for another algorithm's checkpoint, a policy that does not fit,
            or a state of the environments that is damaged.
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
        """Further arguments of the class that the header holds."""
        return {}

    def _restore(self, checkpoint: Checkpoint, same_env: bool) -> bool:
        """Take up a checkpoint's state; returns whether the environments go on where they were."""
        header, tensors = checkpoint.header, checkpoint.tensors
        self._load_weights(tensors["policy"], f"{type(self).__name__}: from_checkpoint")
        self.optimizer.set_state(tensors["optimizer"])
        for name, part in self.parts.items():
            if name in self._switches and not header["config"].get(self._switches[name]):
                continue
            restoring.load_part(part, tensors.get(name, {}), f"{type(self).__name__}: from_checkpoint: {name}")
        self.counters.restore(header["counters"])
        self.callbacks.set_state(header.get("callbacks", {}))
        statistics = tensors.get("statistics", {})
        self.counters.recent_returns.extend(statistics.get("episode_returns", np.empty(0)).tolist())
        self.counters.recent_lengths.extend(statistics.get("episode_lengths", np.empty(0)).tolist())
        self.rng.set_state(header["generators"][self.stream.name.lower()])
        if "torch" in tensors["generators"]:
            import torch

            torch.set_rng_state(torch.from_numpy(tensors["generators"]["torch"].copy()))
        exact = False
        if self.collector is not None:
            self.collector.rng.set_state(header["generators"]["action"])
            exact = same_env and self.collector.restore(tensors["environment"])
        if self.normalizer is not None:
            self.normalizer.set_state(tensors["normalization"], returns=exact)
        return exact

    def init_from(self, path: str | os.PathLike) -> None:
        """Start from the weights and the normalisation of a checkpoint; everything else stays new.

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
                f"{where}: its policy must see observations as they are, got one that "
                "sees them normalised by its dataset's statistics; train it with normalize_obs=false"
            )
        try:
            self._load_weights(self._fitted(tensors["policy"]), where)
        except ValueError as e:
            if theirs == self.name:
                raise
            raise ValueError(
                f"{where}: the policy must have the networks of {self.name}, got "
                f"that of {one_line(theirs, 40)}, which has others; start from a checkpoint of {self.name}"
            ) from e
        if self.normalizer is not None and tensors["normalization"]:
            self.normalizer.set_state(tensors["normalization"], returns=False)

    def _fitted(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """What `init_from` puts into the policy of a checkpoint's, which may be another algorithm's."""
        return arrays

    def _load_weights(self, arrays: dict[str, np.ndarray], where: str) -> None:
        """Put a checkpoint's weights into the policy, and into what starts as a copy of it."""
        what = f"{where}: the policy"
        if self.native is not None:
            self.native.load(arrays, what)
        else:
            load_weights_(self.policy, arrays, what)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        raise uncopied(self)

    def close(self) -> None:
        """End the environments' worker processes, if there are any; what was learned stays usable."""
        if self.collector is not None:
            self.collector.close()
