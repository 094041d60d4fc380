"""What BC, TD3+BC, IQL and CQL share: a dataset to learn from, acting, saving. The update is each algorithm's own."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import nn

from rlox.buffers import OfflineDataset
from rlox.callbacks import Callback
from rlox.callbacks.loggers import LoggerCallback
from rlox.checkpoint import Checkpoint, Counters, load_checkpoint, one_line, save_checkpoint, versions
from rlox.checkpoint.streams import Stream
from rlox.collectors.acting import ModuleActor
from rlox.collectors.evaluation import Evaluation, evaluate, torch_threads
from rlox.config import BACKENDS, DEVICES, MOST_AT_ONCE, OfflineConfig, choice, integer, require, shown
from rlox.envs import EnvSpec, env_name
from rlox.envs.gym_make import whole_games
from rlox.kernels.nn.learner import MAX_HIDDEN
from rlox.kernels.rng import Rng
from rlox.native import NativeAdam, Watch
from rlox.native.shadows import update_difference
from rlox.nn.batch import TransitionBatch
from rlox.nn.networks import TwinQNetwork
from rlox.nn.optimizers import FlatOptimizer, flatten_
from rlox.nn.policies import Actor
from rlox.offline.dataset import require_fit
from rlox.offline.returns import returns_to_go
from rlox.training import loops
from rlox.training.parts import (
    MOST_THREADS,
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
from rlox.training.schedules import schedule_values, scheduled

_COMPARED = 500  # rows of the dataset that policy and values are compared with


class _Compared(NamedTuple):
    """M rows of the dataset, as the networks see them, and what followed them."""

    obs: torch.Tensor  # (M, D)
    actions: torch.Tensor  # (M, A) in [-1, 1], or (M,) int64
    returns: torch.Tensor  # (M,) discounted, to the end of the episode
    rest: torch.Tensor  # (M,) factor of the value of `last_obs`: 0 after a termination
    last_obs: torch.Tensor  # (M, D) what the last step led to


def _seen(
    where: str, shape: tuple[int, ...], statistics: tuple[np.ndarray, np.ndarray] | None, obs: np.ndarray
) -> np.ndarray:
    """Observations (B, D) as the networks see them; a ValueError for another size."""
    if obs.shape[1:] != shape:
        raise ValueError(
            f"{where}: the environment's observations must be those of the dataset, {shape[0]} numbers, got shape "
            f"{obs.shape[1:]}"
        )
    if statistics is None:
        return obs
    mean, std = statistics
    return ((obs - mean) / std).astype(np.float32)


class OfflineAlgorithm:
    """Base of algorithms that learn from a dataset and never act while they learn.

    A training is counted in updates: `train` takes their number, and callbacks get it as ``step``.

    Parameters
    ----------
    dataset : OfflineDataset
        Such as `rlox.OfflineDatasetBuffer`; None for a policy that is only to act. Where its samples are normalised
        (``normalize=True``), or `normalize_obs` asks for it, `predict` and `evaluate` normalise by its statistics too,
        which are part of checkpoints.
    obs_dim : int
        Observation size D.
    act_dim : int
        Action size A, or the number of discrete actions.
    callbacks : list of Callback, optional
        Called in order, the logger last.
    logger : LoggerCallback, optional
        Given every metric.
    continuous : bool
        Whether actions are numbers or one of `act_dim` choices, which `BC` alone can learn.
    act_high, act_low : float or array (A,)
        Bounds of the dataset's actions, which the policy keeps; `act_low` None stands for ``-act_high``.
    hidden : int, optional
        Short for ``hidden_sizes=[hidden, hidden]``.
    seed : int
        Decides initial weights, and what each update sees.
    device : str
        ``cpu``, ``cuda``, or ``auto``: CUDA where there is one and the policy has a million parameters or more.
    backend : str
        ``torch``; ``native``: a kernel does the updates, where there is one, as of all four; ``auto``: native where it
        is exact. The attribute holds which one it is, `backend_reason` why.
    threads : int
        PyTorch's CPU threads while training, restored afterwards; 0 leaves them as they are.
    env_id : str or callable, optional
        What `evaluate` plays; nothing else needs an environment.
    env_kwargs, env_wrappers
        As `rlox.training.online.OnlineAlgorithm` takes them.
    **config
        Any field of the algorithm's ``Config``.

    Raises
    ------
    TypeError, ValueError
        For an unknown or ill-typed hyper-parameter, a value out of range, a dataset of other sizes, actions out of
        their bounds.
    """

    name: ClassVar[str]
    Config: ClassVar[type[OfflineConfig]]
    loop: ClassVar[Callable[[OfflineAlgorithm], dict[str, float]]] = staticmethod(loops.offline)
    stream: ClassVar[Stream] = Stream.REPLAY
    actions: ClassVar[tuple[str, ...]] = ("continuous",)  # what it can learn to take
    _trains = False  # whether `train` is running

    policy: Actor
    optimizer: FlatOptimizer | NativeAdam
    critics: TwinQNetwork | None = None
    target: TwinQNetwork | None = None

    def __init__(
        self,
        dataset: OfflineDataset | None,
        obs_dim: int,
        act_dim: int,
        callbacks: Iterable[Callback] | None = None,
        logger: LoggerCallback | None = None,
        *,
        continuous: bool = True,
        act_high: float | np.ndarray = 1.0,
        act_low: float | np.ndarray | None = None,
        hidden: int | None = None,
        seed: int = 42,
        device: str = "auto",
        backend: str = "auto",
        threads: int = 1,
        env_id: str | Callable[[], Any] | None = None,
        env_kwargs: dict[str, Any] | None = None,
        env_wrappers: Sequence[Any] = (),
        **config: Any,
    ):
        where = type(self).__name__
        if hidden is not None and "hidden_sizes" in config:
            raise TypeError(f"{where}: hidden must not stand beside hidden_sizes, which it is short for")
        if hidden is not None:
            config["hidden_sizes"] = [integer(where, "hidden", hidden, 1, MOST_AT_ONCE)] * 2
        self.config = self.Config.from_kwargs(where, **config)
        choice(where, "device", device, DEVICES)
        choice(where, "backend", backend, BACKENDS)
        self.seed = integer(where, "seed", seed, 0)
        self.threads = integer(where, "threads", threads, 0, MOST_THREADS)
        require_env_arguments(where, env_kwargs, env_wrappers)
        require(where, "continuous", continuous, bool)
        if not (env_id is None or isinstance(env_id, str) or callable(env_id) or hasattr(env_id, "step")):
            raise TypeError(f"{where}: env_id must be an id, a callable or an environment, got {shown(env_id)}")
        self.env_id = env_id
        self.env_kwargs = dict(env_kwargs or {})
        self.env_wrappers = list(env_wrappers)
        self.spec = self._make_spec(obs_dim, act_dim, continuous, act_low, act_high)
        self.dataset = dataset
        self._statistics: tuple[np.ndarray, np.ndarray] | None = None  # mean and deviation (D,) of the observations
        self._compared: _Compared | None = None
        if dataset is not None:
            self._take(dataset)
        self.callbacks = callback_list(where, callbacks, logger)
        self.counters = Counters(clock="updates")
        rng = Rng(seed, Stream.INIT)
        self.policy = self._make_policy(rng)
        self.backend, self.backend_reason = self._choose_backend(backend, device)
        self.device = "cpu" if self.backend == "native" else choose_device(device, self.policy, where)
        self.policy.to(self.device)
        self.rng = Rng(seed, self.stream)
        self._saved: dict[
            str, nn.Module | FlatOptimizer | NativeAdam
        ] = {}  # what a checkpoint holds beside policy and optimizer
        self._optimizers: list[FlatOptimizer | NativeAdam] = []
        self._setup(rng)
        self._watch = Watch(self) if self.backend == "native" else None

    def _choose_backend(self, backend: str, device: str) -> tuple[str, str]:
        """``native`` or ``torch``, and why."""
        if backend == "torch":
            return "torch", "as asked"
        definer = next(cls for cls in type(self).__mro__ if "update" in vars(cls))
        if not hasattr(self, "update_native"):
            obstacle = f"{self.name} has no native update"
        elif "update_native" not in vars(definer):
            obstacle = f"{definer.__name__} has an update of its own"
        elif device == "cuda":
            obstacle = "it runs on the CPU, and device is cuda"
        elif len(self.config.hidden_sizes) > MAX_HIDDEN:
            obstacle = f"the kernel takes at most {MAX_HIDDEN} hidden layers"
        elif (found := update_difference(self, self.counters)) is not None:
            obstacle = found
        elif backend == "auto" and choose_device(device, self.policy, type(self).__name__) == "cuda":
            obstacle = "so large a policy is faster on the GPU"
        else:
            return "native", "perceptrons on the CPU, computed as the PyTorch update defines them"
        if backend == "native":
            raise ValueError(f"{type(self).__name__}: backend must be auto or torch here, got 'native': {obstacle}")
        return "torch", obstacle

    def check_kernel(self, where: str, functions: bool = False) -> None:
        """As `rlox.training.online.OnlineAlgorithm.check_kernel`."""
        if self._watch is not None:
            self._watch.require(where, functions, partial(update_difference, self, self.counters, reread=False))

    def _make_spec(self, obs_dim: int, act_dim: int, continuous: bool, act_low: Any, act_high: Any) -> EnvSpec:
        where = type(self).__name__
        obs_dim = integer(where, "obs_dim", obs_dim, 1, MOST_AT_ONCE)
        act_dim = integer(where, "act_dim", act_dim, 1, MOST_AT_ONCE)
        kind = "continuous" if continuous else "discrete"
        if kind not in self.actions:
            raise ValueError(
                f"{where}: actions must be {' or '.join(self.actions)}, got {kind} ones; BC learns those "
                f"(continuous={continuous})"
            )
        if not continuous:
            return EnvSpec((obs_dim,), n_actions=act_dim)
        high = _bound(where, "act_high", act_high, act_dim)
        low = -high if act_low is None else _bound(where, "act_low", act_low, act_dim)
        if not (np.isfinite(low) & np.isfinite(high) & (low < high)).all():
            raise ValueError(
                f"{where}: act_low must lie below act_high, both finite, got {low.tolist()} and {high.tolist()}"
            )
        return EnvSpec((obs_dim,), act_dim=act_dim, act_low=low, act_high=high)

    def _take(self, dataset: OfflineDataset) -> None:
        """Check the dataset against the sizes, and take its statistics where they are to be used."""
        where, spec = type(self).__name__, self.spec
        if not isinstance(dataset, OfflineDataset):
            raise TypeError(
                f"{where}: dataset must be one such as rlox.OfflineDatasetBuffer, got {type(dataset).__name__}"
            )
        try:
            require_fit(dataset, spec, where)
        except ValueError as e:
            told = "act_dim" if spec.discrete else "act_dim, act_low and act_high"
            raise ValueError(f"{e}; obs_dim, {told} are what {where} was told of the environment") from e
        normalized = getattr(dataset, "normalized", False)
        if not (normalized or self.config.normalize_obs):
            return
        if not hasattr(dataset, "obs_mean"):
            raise ValueError(
                f"{where}: normalize_obs must be false for a dataset without obs_mean and obs_std, as "
                f"{type(dataset).__name__} is; rlox.OfflineDatasetBuffer has them"
            )
        self._statistics = (np.array(dataset.obs_mean), np.array(dataset.obs_std))

    def _make_policy(self, rng: Rng) -> Actor:
        """The policy, its initial weights drawn from `rng`."""
        raise NotImplementedError

    def _setup(self, rng: Rng) -> None:
        """What comes once policy and device are there: further networks, drawn from `rng`, and optimisers."""
        raise NotImplementedError

    def _policy_arguments(self) -> dict[str, Any]:
        """What the constructor of every policy within bounds takes."""
        spec, c = self.spec, self.config
        bounds = {"low": spec.act_low, "high": spec.act_high}
        return {
            "obs_dim": spec.obs_dim,
            "act_dim": spec.act_dim,
            "hidden": c.hidden_sizes,
            "activation": c.activation,
            **bounds,
        }

    def _make_critics(self, rng: Rng) -> None:
        """Set `critics`, and `target`, whose parameters are views of one flat tensor."""
        spec, c = self.spec, self.config
        self.critics = TwinQNetwork(spec.obs_dim, spec.act_dim, c.hidden_sizes, c.activation, rng).to(self.device)
        self.target = copy.deepcopy(self.critics).requires_grad_(False)
        self._target_block = flatten_(list(self.target.parameters()))
        self._saved |= {"critics": self.critics, "target": self.target}

    def _adam(self, block: str, *modules: nn.Module | nn.Parameter) -> FlatOptimizer | NativeAdam:
        """One more optimiser that follows the schedule of the learning rate; `block` is a kernel's name for it."""
        parameters = [p for m in modules for p in (m.parameters() if isinstance(m, nn.Module) else [m])]
        rate = self.config.learning_rate
        native = self.backend == "native"
        one = NativeAdam(parameters, block, rate) if native else FlatOptimizer(parameters, rate, eps=1e-8)
        self._optimizers.append(one)
        return one

    def _use(self, kernel: Callable[..., Any], **blocks: torch.Tensor) -> None:
        """Let `kernel` compute the updates on the memory of the networks; `blocks` in its constructor's words."""
        spec, c = self.spec, self.config
        arrays = {name: block.detach().numpy() for name, block in blocks.items()}
        sizes = {"obs_dim": spec.obs_dim, "act_dim": spec.act_dim, "hidden_sizes": c.hidden_sizes}
        self.net = kernel(**arrays, **sizes, activation=c.activation)
        for optimizer in self._optimizers:
            optimizer.net = self.net

    def _settings(self, *names: str) -> dict[str, Any]:
        """These hyper-parameters, as a kernel takes them."""
        return {name: getattr(self.config, name) for name in names}

    def _learn_native(self, batch: TransitionBatch, *drawn: np.ndarray, **options: Any) -> dict[str, float]:
        """One update of policy and critics by the kernel, which takes what was `drawn` behind the batch."""
        metrics, _ = self.net.update(
            batch.array("obs"),
            self._unit_array(batch.array("actions")),
            *map(batch.array, ("rewards", "next_obs", "discounts")),
            *drawn,
            **options,
        )
        return metrics

    def _unit_array(self, actions: np.ndarray) -> np.ndarray:
        """The dataset's continuous actions (B, A) in [-1, 1]."""
        low, high = self.spec.act_low, self.spec.act_high
        return (actions - (high + low) / 2) / ((high - low) / 2)

    def _follow_schedule(self) -> None:
        c = self.config
        for optimizer in self._optimizers:
            optimizer.learning_rate = scheduled(c.learning_rate, c.learning_rate_schedule, self.counters.progress)

    def _noise(self, *shape: int) -> torch.Tensor:
        """Standard normal numbers (*shape, A) from the run's own generator."""
        return torch.from_numpy(self.rng.normal((*shape, self.spec.act_dim))).to(self.device)

    def _move_target(self, online: torch.Tensor) -> None:
        """The target critics go the share `tau` of the way to the online ones, with which the flat `online` begins."""
        self._target_block.lerp_(online[: self._target_block.numel()], self.config.tau)

    def sample(self) -> TransitionBatch:
        """The next update's transitions, normalised where observations are."""
        if self.dataset is None:
            raise ValueError(
                f"{type(self).__name__}.train: there must be a dataset to learn from; pass from_checkpoint(dataset=...)"
            )
        rows = self.dataset.sample(self.config.batch_size, self.rng.integers(2**63))
        if self._statistics is not None and not getattr(self.dataset, "normalized", False):
            rows = {**rows, **{name: self._seen(rows[name]) for name in ("obs", "next_obs")}}
        # Cloning has no discount, and looks at no reward.
        return TransitionBatch.from_rows(rows, getattr(self.config, "gamma", 1.0), self.spec, self.device)

    def _seen(self, obs: np.ndarray) -> np.ndarray:
        """Observations (B, D) as the networks see them; a ValueError for another size."""
        return _seen(type(self).__name__, self.spec.obs_shape, self._statistics, obs)

    def update(self, batch: TransitionBatch) -> dict[str, torch.Tensor]:
        """One update; scalar metrics, still tensors."""
        raise NotImplementedError

    def schedule_values(self, progress: float) -> dict[str, float]:
        """What schedules move, the learning rate first, by metrics' names, at `progress` in [0, 1]."""
        return schedule_values(self.config, progress)

    def plan(
        self, n_updates: int | None = None, *, until: int | None = None, schedule_timesteps: int | None = None
    ) -> None:
        """Set the end of the training and of its schedules as `train` does, which may then be called without any."""
        plan(self, "n_updates", n_updates, until, schedule_timesteps)

    def train(
        self, n_updates: int | None = None, *, until: int | None = None, schedule_timesteps: int | None = None
    ) -> dict[str, float]:
        """Train for `n_updates` more updates.

        Without `n_updates` it goes on with the training that was stopped, or that a checkpoint was saved in the middle
        of, to the end that was set for it then.

        Parameters
        ----------
        n_updates : int, optional
            A new training of so many updates.
        until : int, optional
            Another end for the training that is gone on with, in updates since the algorithm was made. Its schedules
            are stretched to the new end, so that a learning rate that had fallen rises again.
        schedule_timesteps : int, optional
            Updates after which schedules have come to their end; by default `n_updates`, or what `until` says.

        Returns
        -------
        dict
            The last metrics, among them what 500 transitions from all over the dataset say of the policy:
            ``dataset/log_prob`` of their actions (nats, of actions in [-1, 1]), or for a deterministic policy
            ``dataset/mse``; and of the critics: ``dataset/q`` and ``dataset/return``, mean values of these actions
            and the discounted returns that followed them. Behind a time limit a return goes on with what the critics
            say of the policy there, as the updates have it; that part shrinks with the steps before it.
            ``learning_rate``, and every other value that a schedule moves, are those of the last update.

        Warns
        -----
        RuntimeWarning
            Where schedules get another end, with their values before and after; where nothing is left to train.

        Raises
        ------
        FloatingPointError
            If a loss is no longer finite.
        ValueError
            For a number below 1, both `n_updates` and `until`, neither where nothing was begun, an `until` that is
            already past, a `schedule_timesteps` that leaves a learning rate of 0 for all that is left, or without a
            dataset.
        """
        self.plan(n_updates, until=until, schedule_timesteps=schedule_timesteps)
        warn_if_done(self.counters)
        require_laid_out(self)
        with torch_threads(self.threads), running(self):
            return type(self).loop(self)

    def __reduce_ex__(self, protocol: int) -> Any:
        raise uncopied(self)

    @torch.no_grad()
    def compare_with_data(self) -> dict[str, torch.Tensor]:
        """The metrics ``dataset/…`` of `train`, as tensors (); empty for a dataset that only gives samples."""
        if not hasattr(self.dataset, "get_state"):
            return {}
        if self._compared is None:
            self._compared = self._compare()
        rows = self._compared
        if hasattr(self.policy, "log_prob"):
            found = {"dataset/log_prob": self.policy.log_prob(rows.obs, rows.actions).mean()}
        else:
            found = {"dataset/mse": (self.policy.unit_mode(rows.obs) - rows.actions).square().mean()}
        if self.critics is not None:
            ahead = self.critics(rows.last_obs, self.policy.unit_mode(rows.last_obs)).amin(0)
            found["dataset/q"] = self.critics(rows.obs, rows.actions).mean()
            found["dataset/return"] = torch.addcmul(rows.returns, rows.rest, ahead).mean()
        return found

    def _compare(self) -> _Compared:
        """Rows from all over the dataset, evenly spaced."""
        state = self.dataset.get_state()
        rewards, terminated, truncated = (np.asarray(state[k]) for k in ("rewards", "terminated", "truncated"))
        n, spec = len(rewards), self.spec
        rows = np.linspace(0, n - 1, min(n, _COMPARED)).astype(np.int64)
        gamma = getattr(self.config, "gamma", 1.0)
        returns, rest, last = returns_to_go(rewards, terminated, truncated, rows, gamma)
        actions = torch.from_numpy(
            np.asarray(state["actions"][rows], spec.action_dtype).reshape(-1, *spec.action_shape)
        )

        def placed(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.asarray(array, np.float32)).to(self.device)

        return _Compared(
            placed(self._seen(state["obs"][rows])),
            self._unit(actions.to(self.device)),
            placed(returns),
            placed(rest),
            placed(self._seen(state["next_obs"][last])),
        )

    def _unit(self, actions: torch.Tensor) -> torch.Tensor:
        """Actions of the dataset as policy and critics see them: in [-1, 1], or (B,) int64."""
        return actions if self.spec.discrete else self.policy.to_unit(actions)

    def predict(self, obs: Any, deterministic: bool = True) -> np.ndarray | int:
        """Action for one observation (D,), or actions for a batch (B, D).

        Returns
        -------
        int or array
            Discrete: an int, or (B,) int64. Continuous: (A,) or (B, A) f32, within the bounds. A deterministic policy
            takes the same action either way.

        Raises
        ------
        ValueError
            If the observation has another size.
        """
        where = f"{type(self).__name__}.predict"
        return predicted(where, self.spec, ModuleActor(self.policy, self.device), obs, deterministic, self._seen)

    def evaluate(
        self, n_episodes: int = 20, seed: int | None = None, deterministic: bool = True, **options: Any
    ) -> Evaluation:
        """Play whole episodes of the environment.

        `seed` None stands for 10_000 + the algorithm's own; `options` go to `rlox.collectors.evaluation.evaluate`.

        Raises
        ------
        ValueError
            If the algorithm was given no `env_id`, or its observations are not the dataset's.
        """
        require(f"{type(self).__name__}.evaluate", "deterministic", deterministic, bool)
        with torch_threads(self.threads):
            return evaluate(**self.evaluation_arguments(n_episodes, seed, deterministic), **options)

    def evaluation_arguments(self, n_episodes: int, seed: int | None, deterministic: bool = True) -> dict[str, Any]:
        """What `evaluate` gives `rlox.collectors.evaluation.evaluate`, beside its options."""
        if self.env_id is None:
            raise ValueError(f"{type(self).__name__}.evaluate: there must be an environment; pass env_id='…' when made")
        return {
            "policy": self.policy,
            "env_id": self.env_id,
            "n_episodes": n_episodes,
            "seed": 10_000 + self.seed if seed is None else seed,
            "deterministic": deterministic,
            "env_kwargs": self.env_kwargs,
            "device": self.device,
            "wrappers": whole_games(self.env_wrappers),
            "transform": partial(_seen, type(self).__name__, self.spec.obs_shape, self._statistics),
        }

    def save(self, path: str | os.PathLike, **header: Any) -> None:
        """Write a checkpoint (see `rlox.checkpoint`) without the dataset; `header` adds JSON values to its header."""
        self.snapshot(path, **header)()

    def snapshot(self, path: str | os.PathLike, memory: bool = False, **header: Any) -> Callable[[], None]:
        """Copy what `save` is to write, and return the function that writes it; there is no `memory` to be saved."""
        return partial(save_checkpoint, path, self._checkpoint(**header))

    def _checkpoint(self, **header: Any) -> Checkpoint:
        spec = self.spec
        env_id = None if self.env_id is None else env_name(self.env_id)
        env = {"id": env_id, "n_envs": 1, "kwargs": self.env_kwargs, "wrappers": self.env_wrappers, "workers": 0}
        info = {
            "algorithm": self.name,
            "env": env,
            "spaces": {
                "obs_dim": spec.obs_dim,
                "act_dim": spec.act_dim or spec.n_actions,
                "continuous": spec.continuous,
            },
            "seed": self.seed,
            "threads": self.threads,
            "backend": self.backend,
            "config": self.config.to_dict(),
            "policy": "default",
            "counters": self.counters.scalars(),
            "generators": {self.stream.name.lower(): self.rng.get_state()},
            "callbacks": self.callbacks.state(),
            "versions": versions(),
            **header,
        }
        tensors = {"policy": weights_of(self.policy), "optimizer": self.optimizer.state()}
        for name, part in self._saved.items():
            tensors[name] = weights_of(part) if isinstance(part, nn.Module) else part.state()
        if spec.continuous:
            tensors["bounds"] = {"low": spec.act_low, "high": spec.act_high}
        if self._statistics is not None:
            tensors["normalization"] = dict(zip(("obs_mean", "obs_std"), self._statistics, strict=True))
        # Copies, since most are views of what training changes.
        return Checkpoint(info, {part: {k: np.array(x) for k, x in arrays.items()} for part, arrays in tensors.items()})

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike,
        dataset: OfflineDataset | None = None,
        env_id: str | Callable[[], Any] | None = None,
        callbacks: Iterable[Callback] | None = None,
        logger: LoggerCallback | None = None,
        device: str = "auto",
        env_wrappers: Sequence[Any] | None = None,
        **arguments: Any,
    ):
        """Restore an algorithm; `train` without arguments continues as if it had never stopped.

        Parameters
        ----------
        path : path
            The checkpoint.
        dataset : OfflineDataset, optional
            Needed to train on: no checkpoint holds it.
        env_id : str or callable, optional
            What `evaluate` plays; by default what the saved one did.
        env_wrappers : sequence, optional
            Needed where the checkpoint names wrappers from outside gymnasium: a file must not decide what is imported.
        **arguments
            Further arguments of the class, hyper-parameters among them, in place of the saved ones.

        Raises
        ------
        FileNotFoundError, ValueError
            See `rlox.checkpoint.load_checkpoint`; also for another algorithm's checkpoint, and a dataset whose
            normalisation is not the one that was trained with.
        """
        where = f"{cls.__name__}.from_checkpoint"
        checkpoint = load_checkpoint(path)
        header, tensors = checkpoint.header, checkpoint.tensors
        if header["algorithm"] != cls.name:
            raise ValueError(f"{where}: {path} must hold {cls.name}, got {header['algorithm']}")
        env, spaces = header["env"], header.get("spaces")
        require_no_code(where, path, env, env_id, env_wrappers)
        bounds = tensors.get("bounds", {})
        sound = spaces is not None and (not spaces["continuous"] or set(bounds) == {"low", "high"})
        if not sound:
            raise ValueError(f"{where}: {path} is damaged: it must say which actions its policy takes")
        try:
            config = cls.Config.from_kwargs(cls.__name__, **{**header["config"], **_fields(cls, arguments)})
            # Before anything is made that the file decides the size of.
            shapes = [array.shape for array in tensors["policy"].values() if array.ndim == 2]
            require_widths(cls.__name__, frozenset(shapes), config.hidden_sizes, {spaces["obs_dim"]})
            n_outputs = max((shape[0] for shape in shapes), default=0)
            if spaces["act_dim"] > n_outputs:
                raise ValueError(f"act_dim must be what its weights have, got {spaces['act_dim']}")
            algorithm = cls(
                dataset,
                spaces["obs_dim"],
                spaces["act_dim"],
                callbacks,
                logger,
                **{
                    **({"act_low": bounds["low"], "act_high": bounds["high"]} if bounds else {}),
                    "continuous": spaces["continuous"],
                    "device": device,
                    "seed": header["seed"],
                    "threads": header["threads"],
                    "backend": "auto" if device != "cuda" and header.get("backend") == "native" else "torch",
                    "env_id": env["id"] if env_id is None else env_id,
                    "env_kwargs": env["kwargs"],
                    "env_wrappers": env["wrappers"] if env_wrappers is None else env_wrappers,
                    **header["config"],
                    **arguments,
                },
            )
            algorithm._restore(checkpoint)
        except (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError) as e:
            # What the caller adds to the file may be at fault as well, and keeps its kind of error.
            kind = TypeError if arguments and isinstance(e, TypeError) else ValueError
            raise kind(f"{where}: {path} cannot be restored: {one_line(e, 1000)}") from e
        return algorithm

    def _restore(self, checkpoint: Checkpoint) -> None:
        header, tensors = checkpoint.header, checkpoint.tensors
        self.optimizer.set_state(tensors["optimizer"])
        self._load("from_checkpoint", {"policy": self.policy, **self._saved}, tensors)
        self.counters.restore(header["counters"])
        self.callbacks.set_state(header.get("callbacks", {}))
        self.rng.set_state(header["generators"][self.stream.name.lower()])
        self._restore_statistics(tensors["normalization"])

    def _restore_statistics(self, saved: Mapping[str, np.ndarray]) -> None:
        names = ("obs_mean", "obs_std")
        shape = self.spec.obs_shape
        if saved and (
            set(saved) != set(names) or any(x.shape != shape or x.dtype != np.float32 for x in saved.values())
        ):
            raise ValueError(f"{type(self).__name__}: obs_mean and obs_std of its normalisation must be f32 of {shape}")
        restored = tuple(saved[name] for name in names) if saved else None
        if self.dataset is not None:
            ours = self._statistics
            same = (ours is None) is (restored is None)
            if not same or (ours is not None and not all(map(np.array_equal, ours, restored))):
                raise ValueError(
                    f"{type(self).__name__}: the dataset's normalisation must be the one that was trained with; pass "
                    "the same dataset, with normalize as it was"
                )
        self._statistics = restored

    def _load(
        self, where: str, parts: Mapping[str, nn.Module | FlatOptimizer | NativeAdam], tensors: Mapping[str, Any]
    ) -> None:
        for name, part in parts.items():
            if isinstance(part, nn.Module):
                load_weights_(part, tensors.get(name, {}), f"{type(self).__name__}: {where}: {name}")
            else:
                part.set_state(tensors.get(name, {}))

    def init_from(self, path: str | os.PathLike) -> None:
        """Start from the weights of a checkpoint: of its policy, and of its critics where both have some.

        Raises
        ------
        FileNotFoundError, ValueError
            See `rlox.checkpoint.load_checkpoint`; also where networks or normalisation differ.
        """
        tensors = load_checkpoint(path).tensors
        where = f"init_from {path}"
        self._restore_statistics(tensors["normalization"])
        parts = {name: part for name, part in self._saved.items() if isinstance(part, nn.Module) and name in tensors}
        self._load(where, {"policy": self.policy, **parts}, tensors)

    def close(self) -> None:
        """Nothing is held that would have to be ended."""


def _bound(where: str, name: str, value: Any, act_dim: int) -> np.ndarray:
    """A bound of the actions as an array (A,)."""
    try:
        with np.errstate(over="ignore"):
            array = np.asarray(value, np.float32)
        if np.asarray(value).dtype.kind not in "fiu":
            raise TypeError("no numbers")
        return np.broadcast_to(array, (act_dim,)).copy()
    except (OverflowError, TypeError, ValueError) as e:
        raise ValueError(
            f"{where}: {name} must be a number, or one for each of {act_dim} components, got {shown(value)}"
        ) from e


def _fields(cls: type[OfflineAlgorithm], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `arguments` that are hyper-parameters."""
    return {name: value for name, value in arguments.items() if name in cls.Config.__dataclass_fields__}
