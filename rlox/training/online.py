"""What every online algorithm shares: construction, training, acting, saving. The update is each algorithm's own."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rlox.callbacks import Callback
from rlox.callbacks.loggers import LoggerCallback
from rlox.checkpoint import Checkpoint, Counters, load_checkpoint, one_line, save_checkpoint, versions
from rlox.checkpoint.streams import Stream
from rlox.collectors import ReplayCollector, RewardFn, RolloutCollector, reward_name
from rlox.collectors.evaluation import Evaluation, evaluate, torch_threads, unchecked_distributions
from rlox.collectors.vec_normalize import VecNormalize
from rlox.config import (
    BACKENDS,
    DEVICES,
    ENV_BACKENDS,
    MOST_AT_ONCE,
    Config,
    choice,
    integer,
    require,
    shown,
    usual_settings,
)
from rlox.envs import env_name
from rlox.envs.envpool_env import evaluation_kwargs
from rlox.envs.gym_make import whole_games
from rlox.kernels.rng import Rng
from rlox.native import NativeActor, NativeOptimizer, Watch
from rlox.native.shadows import update_difference

# PyTorch is imported where it is used: a native run needs none of it.
from rlox.training.parts import (
    CUDA_PAYS_FROM,
    MOST_THREADS,
    _makes_perceptrons,
    _require_counts,
    _weight_shapes,
    callback_list,
    choose_device,
    load_weights_,
    predicted,
    require_env_arguments,
    require_laid_out,
    require_no_code,
    require_widths,
    uncopied,
    weights_of,
)
from rlox.training.plan import plan, running, warn_if_done
from rlox.training.schedules import schedule_values

if TYPE_CHECKING:
    import torch
    from torch import nn

    from rlox.collectors.exploration import ActionNoise
    from rlox.nn.optimizers import FlatOptimizer


class OnlineAlgorithm:
    """Base of algorithms that learn while they act.

    Parameters
    ----------
    env_id : str or callable
        A native id, any gymnasium id, or a callable that returns a ``gymnasium.Env``.
    n_envs : int
        Environments stepped side by side.
    seed : int
        Decides initial weights, environments, actions, and what each update sees.
    policy : nn.Module, optional
        A module of your own in place of the one that fits the environment; what it must define, the family says. It is
        moved to the device and trained in place.
    logger : LoggerCallback, optional
        Given every metric.
    callbacks : list of Callback, optional
        Called in order, the logger last.
    device : str
        ``cpu``, ``cuda``, or ``auto``: CUDA where there is one and the policy has a million parameters or more.
    backend : str
        ``torch``; ``native``: a kernel collects and updates what the PyTorch `update` defines; ``auto``: native
        wherever that is exact for what is asked, whatever callbacks and loggers there are. A function of `update` that
        was edited, replaced or overridden is computed by PyTorch (see `rlox.native.shadows`); one that is replaced when
        a native run is already made is an error, and so is a `policy` that was converted, frozen or given hooks. The
        attribute holds which one it is, `backend_reason` why.
    threads : int
        PyTorch's CPU threads while training, restored afterwards; 0 leaves them as they are.
    compile : bool
        Whether PyTorch compiles the losses (`rlox.nn.compiling`), which takes it some ten seconds at the first update.
    env_kwargs : dict, optional
        Keyword arguments of ``gymnasium.make``.
    reward_fn : callable or str, optional
        Replaces the rewards that are learned from (see `rlox.collectors.RolloutCollector`). ``auto``: their signs in
        ``ALE/…`` games, where ``hidden_sizes`` is empty by default too, elsewhere none. None: none anywhere.
    env_wrappers : sequence, optional
        gymnasium wrappers, in order: ``"Name"``, ``"module:Name"`` or ``{"Name": {"argument": value}}``.
    env_workers : int
        Processes that step foreign environments; 0: this one does.
    env_backend : str
        ``gymnasium``, ``envpool``, or ``auto``: native where there is one, else gymnasium. Evaluation is on one
        environment of ``auto`` in any case, which must exist.
    **config
        Any field of the algorithm's ``Config``.

    Raises
    ------
    TypeError, ValueError
        For an unknown or ill-typed hyper-parameter, a value out of range, an unknown environment, an unfit policy.
    """

    name: ClassVar[str]
    Config: ClassVar[type[Config]]
    loop: ClassVar[Callable[[OnlineAlgorithm], dict[str, float]]]  # of `rlox.training.loops`
    stream: ClassVar[Stream]  # what `rng` decides
    actions: ClassVar[tuple[str, ...]] = ("discrete", "multi-discrete", "continuous")  # what it can learn to take

    collector: RolloutCollector | ReplayCollector
    optimizer: FlatOptimizer | NativeOptimizer
    native: NativeActor | None = None  # what the kernel computes, where the backend is native
    _watch: Watch | None = None
    normalizer: VecNormalize | None = None
    _trains = False  # whether `train` is running
    _saved_shapes: frozenset[tuple[int, ...]] | None = None  # (n_out, n_in) of the weights that are to be restored

    def __init__(
        self,
        env_id: str | Callable[[], Any],
        n_envs: int = 8,
        seed: int = 42,
        policy: nn.Module | None = None,
        logger: LoggerCallback | None = None,
        callbacks: Iterable[Callback] | None = None,
        *,
        device: str = "auto",
        backend: str = "auto",
        threads: int = 1,
        compile: bool = False,
        env_kwargs: dict[str, Any] | None = None,
        reward_fn: RewardFn | None = "auto",
        env_wrappers: Sequence[Any] = (),
        env_workers: int = 0,
        env_backend: str = "auto",
        **config: Any,
    ):
        where = type(self).__name__
        usual = usual_settings(env_id)
        usual_reward = usual.pop("reward_fn", None)
        if isinstance(reward_fn, str) and reward_fn == "auto":
            reward_fn = usual_reward
        fields = self.Config.__dataclass_fields__
        config = {**{name: value for name, value in usual.items() if name in fields}, **config}
        self.config = self.Config.from_kwargs(where, **config)
        self.env_id = env_id
        self.n_envs = integer(where, "n_envs", n_envs, 1, MOST_AT_ONCE)
        self.seed = integer(where, "seed", seed, 0)
        self.threads = integer(where, "threads", threads, 0, MOST_THREADS)
        require_env_arguments(where, env_kwargs, env_wrappers)
        if not isinstance(compile, bool):
            raise TypeError(f"{where}: compile must be true or false, got {shown(compile)}")
        self.compile = compile
        self._compiled: dict[Callable[..., Any], Callable[..., Any]] = {}
        self.env_kwargs = dict(env_kwargs or {})
        self.callbacks = callback_list(where, callbacks, logger)
        self.counters = Counters()
        self.env_wrappers = list(env_wrappers)
        self.env_workers = integer(where, "env_workers", env_workers, 0, self.n_envs)
        self.env_backend = choice(where, "env_backend", env_backend, ENV_BACKENDS)
        choice(where, "device", device, DEVICES)
        choice(where, "backend", backend, BACKENDS)
        self.collector = self._make_collector(
            env_id,
            self.n_envs,
            self.seed,
            reward_fn=reward_fn,
            env_kwargs=self.env_kwargs,
            env_wrappers=self.env_wrappers,
            env_workers=self.env_workers,
            env_backend=env_backend,
        )
        self.spec = self.collector.spec
        if self.spec.action_kind not in self.actions:
            from rlox.training.table import ALGORITHMS, resolve

            classes = {name: resolve(entry.cls) for name, entry in ALGORITHMS.items()}
            kinds = {name: cls.actions for name, cls in classes.items() if issubclass(cls, OnlineAlgorithm)}
            able = [name.upper() for name, takes in kinds.items() if self.spec.action_kind in takes]
            raise ValueError(
                f"{where}: the environment's actions must be {' or '.join(self.actions)}, got "
                f"{self.spec.describe_actions()}; {self.spec.action_kind} ones are for {', '.join(able)}"
            )
        pool = env_backend == "envpool"
        self.eval_kwargs = evaluation_kwargs(self.collector.env) if pool else self.env_kwargs
        self._own_policy = policy is not None  # a checkpoint then holds weights that only its user can place
        self._lost_reward_fn: str | None = None  # what a checkpoint was trained with and cannot hold
        self._require_saved_sizes()
        self.backend, self.backend_reason = self._choose_backend(backend, policy, device)
        self._make_policy(policy)
        self.device = "cpu" if self.native is not None else choose_device(device, self.policy, where)
        self.collector.device = self.device
        if self.native is None:
            self.policy.to(self.device)
        self.rng = Rng(self.seed, self.stream)
        self._setup()
        if isinstance(self.optimizer, NativeOptimizer):
            self.optimizer.actor = self.native
        self._watch = None if self.native is None else Watch(self, self.native)

    def _make_collector(self, *args: Any, **kwargs: Any) -> RolloutCollector | ReplayCollector:
        raise NotImplementedError

    def _require_saved_sizes(self) -> None:
        """A ValueError where a checkpoint's weights are not of the widths that its header asks for."""
        shapes, spec = self._saved_shapes, self.spec
        if shapes is None:
            return
        # Of an image, features go in, and of critics, actions beside the observation.
        n_in = None if spec.image else {spec.obs_dim, spec.obs_dim + (spec.act_dim or 0)}
        require_widths(type(self).__name__, shapes, self.config.hidden_sizes, n_in)

    def _choose_backend(self, backend: str, policy: nn.Module | None, device: str) -> tuple[str, str]:
        """``native`` or ``torch``, and why."""
        where = type(self).__name__
        if backend == "torch":
            return "torch", "as asked"
        obstacle = "compile is for PyTorch" if self.compile else self._native_obstacle(policy, device)
        if obstacle is None:
            return "native", "a perceptron on the CPU, computed as the PyTorch update defines it"
        if backend == "native":
            raise ValueError(f"{where}: backend must be auto or torch here, got 'native': {obstacle}")
        return "torch", obstacle

    def _native_obstacle(self, policy: nn.Module | None, device: str) -> str | None:
        """Why the native path cannot run; None where it can."""
        if not hasattr(self, "update_native"):
            return f"{self.name} has no native update yet"
        if device == "cuda":
            return "it runs on the CPU, and device is cuda"
        definer = next(cls for cls in type(self).__mro__ if "update" in vars(cls))
        if "update_native" not in vars(definer):
            return f"{definer.__name__} has an update of its own"
        found = self._kernel_obstacle(policy)
        if found is None:
            found = self._update_difference()
        if found is None and device == "auto" and self._kernel_size() >= CUDA_PAYS_FROM:
            import torch

            if torch.cuda.is_available():
                return "so large a policy is faster on the GPU"
        return found

    def check_kernel(self, where: str, functions: bool = False) -> None:
        """A ValueError where a kernel would no longer compute what Python says: something was changed since.

        The loops call it before each round. The `functions` are looked at where that is asked for, and every second.
        """
        if self._watch is not None:
            self._watch.require(where, functions, partial(self._update_difference, reread=False))

    def _update_difference(self, reread: bool = True) -> str | None:
        return update_difference(self, self.collector, self.counters, reread=reread)

    def _kernel_obstacle(self, policy: nn.Module | None) -> str | None:
        """Why the kernel cannot compute this policy exactly; None where it can."""
        raise NotImplementedError

    def _kernel_size(self) -> int:
        """How many parameters the default policy has."""
        raise NotImplementedError

    def _make_policy(self, policy: nn.Module | None) -> None:
        """Set `policy` to the default one, or the user's after its checks; or `native`."""
        raise NotImplementedError

    def _normalize(self, rewards: bool = False, clip_rewards: float = math.inf) -> None:
        """Set the normaliser, here and where the experience is gathered, if there is anything to normalise."""
        c = self.config
        if not (c.normalize_obs or rewards):
            return
        if c.normalize_obs and self.spec.image:
            raise ValueError(
                f"{type(self).__name__}: normalize_obs must be false for images, which are scaled to [0, 1] already"
            )
        self.normalizer = self.collector.normalizer = VecNormalize(
            self.n_envs, self.spec.obs_shape, c.gamma, c.normalize_obs, rewards, c.clip_obs, clip_rewards
        )

    @property
    def policy(self) -> nn.Module:
        """The module that is trained; on the native path it is made when it is first asked for, and has views of the
        kernel's parameters for its own."""
        return self._policy if self.native is None else self.native.module()

    @policy.setter
    def policy(self, module: nn.Module) -> None:
        if self.native is not None or hasattr(self, "_policy"):
            raise AttributeError(f"{type(self).__name__}: policy must be given to the constructor, and stays the same")
        self._policy = module

    @property
    def actor(self) -> nn.Module | NativeActor:
        """What acts in collection and evaluation."""
        return self.policy if self.native is None else self.native

    def _setup(self) -> None:
        """What comes once policy and device are there: optimisers, normalisation, further networks."""
        raise NotImplementedError

    def compiled(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """`loss` itself, or where `compile` asks for it what PyTorch makes of it, the same at every call."""
        if not self.compile:
            return loss
        if loss not in self._compiled:
            from rlox.nn.compiling import CompiledLoss

            self._compiled[loss] = CompiledLoss(loss, self.device)
        return self._compiled[loss]

    def update(self, batch) -> dict[str, torch.Tensor]:
        """One update; scalar metrics, still tensors."""
        raise NotImplementedError

    def schedule_values(self, progress: float) -> dict[str, float]:
        """The learning rate, and all else that a schedule moves, by their metrics' names, as they stand at `progress`
        in [0, 1]."""
        return schedule_values(self.config, progress)

    def plan(
        self, total_timesteps: int | None = None, *, until: int | None = None, schedule_timesteps: int | None = None
    ) -> None:
        """Set the end of the training and of its schedules as `train` does, which may then be called without any."""
        plan(self, "total_timesteps", total_timesteps, until, schedule_timesteps)

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
            Another end for the training that is gone on with, in environment steps since the algorithm was made. Its
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
            is already past, or a `schedule_timesteps` that leaves a learning rate of 0 for all that is left.
        """
        if self._lost_reward_fn is not None:
            raise ValueError(
                f"{type(self).__name__}.train: the checkpoint was trained with reward_fn {self._lost_reward_fn}, which "
                "a file cannot hold; pass it to from_checkpoint(reward_fn=...)"
            )
        self.plan(total_timesteps, until=until, schedule_timesteps=schedule_timesteps)
        warn_if_done(self.counters)
        require_laid_out(self)
        with torch_threads(self.threads), unchecked_distributions(), running(self):
            return type(self).loop(self)

    def __reduce_ex__(self, protocol: int) -> Any:
        raise uncopied(self)

    def predict(self, obs: Any, deterministic: bool = True) -> np.ndarray | int:
        """Action for one observation (D,), or actions for a batch (B, D); without what `make_noise` adds in training.

        Returns
        -------
        int or array
            Discrete: an int, or (B,) int64. Continuous: (A,) or (B, A) f32, clipped to the action space.

        Raises
        ------
        ValueError
            If the observation has another size, or holds what is not finite.
        TypeError
            For what is no array of numbers; if `deterministic` and the policy is a user's module without ``mode``.
        """
        where = f"{type(self).__name__}.predict"
        self.check_kernel("predict")
        actor = self.native
        if actor is None:
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
        actions = self.predict(obs, deterministic=False)
        return actions if noise is None else self.spec.clip(actions + noise.draw(rng))

    def evaluate(
        self, n_episodes: int = 20, seed: int | None = None, deterministic: bool = True, **options: Any
    ) -> Evaluation:
        """Play whole episodes on a fresh environment, without disturbing training; statistics are frozen.

        Not `deterministic`: as training acts, with its exploration noise. `seed` None stands for 10_000 + the
        algorithm's own; `options` go to `rlox.collectors.evaluation.evaluate`.
        """
        require(f"{type(self).__name__}.evaluate", "deterministic", deterministic, bool)
        with torch_threads(self.threads):
            if not deterministic:
                options["noise"] = self.make_noise
            return evaluate(**self.evaluation_arguments(n_episodes, seed, deterministic), **options)

    def evaluation_arguments(self, n_episodes: int, seed: int | None, deterministic: bool = True) -> dict[str, Any]:
        """What `evaluate` gives `rlox.collectors.evaluation.evaluate`, beside its options."""
        self.check_kernel("evaluate")
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

    def save(self, path: str | os.PathLike, memory: bool = False, **header: Any) -> None:
        """Write a checkpoint (see `rlox.checkpoint`); `header` adds JSON values to its header.

        `memory`: off-policy, the replay memory too, in files of ``memory/`` beside it that hold what is new since the
        last time; `from_checkpoint` finds them there.
        """
        self.snapshot(path, memory, **header)()

    def snapshot(self, path: str | os.PathLike, memory: bool = False, **header: Any) -> Callable[[], None]:
        """Copy what `save` is to write, and return the function that writes it.

        Training may go on before that is called, or while another thread runs it.
        """
        return partial(save_checkpoint, path, self._checkpoint(**header))

    def _checkpoint(self, **header: Any) -> Checkpoint:
        self.check_kernel("save")
        c = self.counters
        generators = {"action": self.collector.rng.get_state(), self.stream.name.lower(): self.rng.get_state()}
        reward_fn = self.collector.reward_fn
        info = {
            "algorithm": self.name,
            "env": {
                "id": env_name(self.env_id),
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
            "reward_fn": self._lost_reward_fn if reward_fn is None else reward_name(reward_fn),
            "counters": c.scalars(),
            "generators": generators,
            "callbacks": self.callbacks.state(),
            "versions": versions(),
            **header,
        }
        tensors = {
            "policy": weights_of(self.policy) if self.native is None else self.native.weights(),
            "optimizer": self.optimizer.state(),
            "normalization": {} if self.normalizer is None else self.normalizer.state(),
            "environment": self.collector.state() or {},
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

    def _torch_generator(self) -> dict[str, np.ndarray]:
        if self.native is not None:
            return {}
        import torch

        from rlox.nn.policies import Actor

        return {} if isinstance(self.policy, Actor) else {"torch": torch.get_rng_state().numpy()}

    def _own_state(self) -> tuple[dict[str, Any], dict[str, dict[str, np.ndarray]]]:
        """What a family or an algorithm adds to a checkpoint: header values, and tensors by section."""
        return {}, {}

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
        if fixed := {"n_envs", "seed", "env_kwargs"} & arguments.keys():
            raise TypeError(
                f"{cls.__name__}.from_checkpoint: {min(fixed)} must be the checkpoint's, got "
                f"{shown(arguments[min(fixed)])}; leave it out, or make a new {cls.__name__} and call init_from(path)"
            )
        checkpoint = load_checkpoint(path)
        header = checkpoint.header
        if header["algorithm"] != cls.name:
            raise ValueError(f"{cls.__name__}.from_checkpoint: {path} must hold {cls.name}, got {header['algorithm']}")
        if header["policy"] == "custom" and policy is None:
            raise ValueError(
                f"{cls.__name__}.from_checkpoint: {path} holds a policy of your own; pass policy=YourPolicy(...)"
            )
        env = header["env"]
        if env["id"] is None:
            raise ValueError(f"{cls.__name__}.from_checkpoint: {path} is damaged: env must have an id")
        wrappers = env["wrappers"] if env_wrappers is None else list(env_wrappers)
        require_no_code(f"{cls.__name__}.from_checkpoint", path, env, env_id, env_wrappers)
        _require_counts(checkpoint, f"{cls.__name__}.from_checkpoint: {path}", trusted=env_id is not None)
        try:
            cls.Config.from_kwargs(cls.__name__, **header["config"])
        except (TypeError, ValueError) as e:
            raise ValueError(f"{cls.__name__}.from_checkpoint: {path} is damaged: {one_line(e)}") from e
        saved_reward = header.get("reward_fn")
        if reward_fn is None and saved_reward and saved_reward.startswith("rlox:"):
            reward_fn = saved_reward.removeprefix("rlox:")
        algorithm = cls.__new__(cls)
        # Before anything is made that the file decides the size of.
        algorithm._saved_shapes = _weight_shapes(checkpoint) if _makes_perceptrons(cls) else None
        try:
            algorithm.__init__(
                env["id"] if env_id is None else env_id,
                env["n_envs"],
                header["seed"],
                policy,
                logger,
                callbacks,
                device=device,
                backend=cls._saved_backend(header, device) if backend is None else backend,
                env_kwargs=env["kwargs"],
                reward_fn=reward_fn,
                env_wrappers=wrappers,
                env_backend=env.get("backend", "auto") if env_backend is None else env_backend,
                **{
                    "threads": header["threads"],
                    "env_workers": env["workers"],
                    **header["config"],
                    **cls._saved_arguments(header, arguments),
                    **arguments,
                },
            )
        except (MemoryError, TypeError, ValueError) as e:
            # What the caller adds to the file may be at fault as well, and keeps its kind of error.
            kind = TypeError if arguments and isinstance(e, TypeError) else ValueError
            raise kind(f"{cls.__name__}.from_checkpoint: {path}: {one_line(e, 1000)}") from e
        algorithm._lost_reward_fn = None if reward_fn is not None else saved_reward
        try:
            algorithm._restore(checkpoint, same_env=env_id is None or env_name(env_id) == env["id"])
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
            algorithm.close()
            raise ValueError(f"{cls.__name__}.from_checkpoint: {path} cannot be restored: {one_line(e, 1000)}") from e
        return algorithm

    @staticmethod
    def _saved_backend(header: dict[str, Any], device: str) -> str:
        # One written before there was a choice was trained by PyTorch. What was native is so again where it is exact.
        return "auto" if device != "cuda" and header.get("backend") == "native" else "torch"

    @classmethod
    def _saved_arguments(cls, header: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        """Further arguments of the class that the header holds."""
        return {}

    def _restore(self, checkpoint: Checkpoint, same_env: bool) -> bool:
        """Take up a checkpoint's state; returns whether the environments go on where they were."""
        header, tensors = checkpoint.header, checkpoint.tensors
        self._load_weights(tensors["policy"], "from_checkpoint")
        self.optimizer.set_state(tensors["optimizer"])
        self.counters.restore(header["counters"])
        self.callbacks.set_state(header.get("callbacks", {}))
        self.counters.recent_returns.extend(tensors["statistics"]["episode_returns"].tolist())
        self.counters.recent_lengths.extend(tensors["statistics"]["episode_lengths"].tolist())
        self.collector.rng.set_state(header["generators"]["action"])
        self.rng.set_state(header["generators"][self.stream.name.lower()])
        if "torch" in tensors["generators"]:
            import torch

            torch.set_rng_state(torch.from_numpy(tensors["generators"]["torch"].copy()))
        exact = same_env and self.collector.restore(tensors["environment"])
        if self.normalizer is not None:
            self.normalizer.set_state(tensors["normalization"], returns=exact)
        return exact

    def close(self) -> None:
        """End the environments' worker processes, if there are any; what was learned stays usable."""
        self.collector.close()

    def init_from(self, path: str | os.PathLike) -> None:
        """Start from the weights and the normalisation of a checkpoint; everything else stays new.

        Raises
        ------
        FileNotFoundError, ValueError
            See `rlox.checkpoint.load_checkpoint`; also if the policy or the observations have another shape.
        """
        checkpoint = load_checkpoint(path)
        tensors, theirs = checkpoint.tensors, checkpoint.header["algorithm"]
        if "obs_std" in tensors["normalization"]:
            raise ValueError(
                f"{type(self).__name__}: init_from {path}: its policy must see observations as they are, got one that "
                "sees them normalised by its dataset's statistics; train it with normalize_obs=false"
            )
        try:
            self._load_weights(self._fitted(tensors["policy"]), f"init_from {path}")
        except ValueError as e:
            if theirs == self.name:
                raise
            raise ValueError(
                f"{type(self).__name__}: init_from {path}: the policy must have the networks of {self.name}, got "
                f"that of {one_line(theirs, 40)}, which has others; start from a checkpoint of {self.name}"
            ) from e
        if self.normalizer is not None and tensors["normalization"]:
            self.normalizer.set_state(tensors["normalization"], returns=False)

    def _fitted(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """What `init_from` puts into the policy of a checkpoint's, which may be another algorithm's."""
        return arrays

    def _load_weights(self, arrays: dict[str, np.ndarray], where: str) -> None:
        """Put a checkpoint's weights into the policy, and into what starts as a copy of it."""
        what = f"{type(self).__name__}: {where}: the policy"
        if self.native is not None:
            self.native.load(arrays, what)
        else:
            load_weights_(self.policy, arrays, what)
