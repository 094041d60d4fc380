"""Shared code of BC, TD3+BC, IQL and CQL, which learn from a dataset."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import nn

from rlox.buffers import OfflineDataset
from rlox.callbacks import Callback
from rlox.callbacks.loggers import LoggerCallback
from rlox.checkpoint import Checkpoint, load_checkpoint
from rlox.checkpoint.meaning import require_same_meaning
from rlox.checkpoint.shapes import require_memory, require_widths
from rlox.checkpoint.streams import Stream
from rlox.compiled import NativeAdam
from rlox.config import MOST_AT_ONCE, OfflineConfig, integer, require, shown
from rlox.envs import EnvSpec
from rlox.envs.make import EnvOptions
from rlox.gpu.memories import dataset_fits
from rlox.gpu.sampled import SampledUpdates
from rlox.kernels.nn.core import MAX_HIDDEN
from rlox.kernels.nn.twin_critics import n_parameters
from rlox.multi_agent import MultiAgentSpec, is_multi_agent, make_multi_agent_env
from rlox.nn.batch import TransitionBatch
from rlox.nn.optimizers import FlatOptimizer
from rlox.nn.policies import Actor
from rlox.offline.acting import evaluate_shared, share_policy
from rlox.offline.dataset import action_bounds, require_fit
from rlox.offline.returns import returns_to_go
from rlox.offline.statistics import DatasetStatistics
from rlox.training import loops, restoring
from rlox.training.agent import Agent
from rlox.training.algorithm import Algorithm, load_part
from rlox.training.backend import SeparateNetworks

N_COMPARED = 500  # rows of the dataset with which policy and values are compared


class _Compared(NamedTuple):
    """M rows of the dataset, as the networks see them, with the returns that followed."""

    obs: torch.Tensor  # (M, D)
    actions: torch.Tensor  # (M, A) in [-1, 1], or (M,) int64
    returns: torch.Tensor  # (M,) discounted, to the end of the episode
    rest: torch.Tensor  # (M,) factor of the value of `last_obs`: 0 after a termination
    last_obs: torch.Tensor  # (M, D) observation after the last step


class OfflineAlgorithm(SampledUpdates, SeparateNetworks, Agent):
    """Base class of algorithms that learn from a dataset and never act during training.

    Training is counted in updates: `train` takes their number, and callbacks receive it as ``step``.

    Parameters
    ----------
    dataset : OfflineDataset
        For example a `rlox.OfflineDatasetBuffer`; None for a policy that only acts. If its samples are normalised
        (``normalize=True``) or `normalize_obs` is true, `predict` and `evaluate` also normalise with the dataset's
        statistics, which are part of checkpoints.
    obs_dim : int
        Observation size D.
    act_dim : int
        Action size A, or the number of discrete actions.
    callbacks : list of Callback, optional
        Called in order, the logger last.
    logger : LoggerCallback, path, str or list, optional
        As for `rlox.training.on_policy.OnPolicyAlgorithm`.
    continuous : bool
        Whether actions are numbers (True) or one of `act_dim` choices (False), which only `BC` can learn.
    act_high, act_low : float or array (A,), optional
        Bounds of the actions, which the policy respects; `act_low` is ``-act_high`` by default. Without both, they are
        the bounds that the dataset's file names, else [-1, 1], or the smallest and the largest action of each component
        that leaves [-1, 1]. Checkpoints contain them.
    hidden : int, optional
        Short for ``hidden_sizes=[hidden, hidden]``.
    seed : int
        Determines initial weights, and what each update sees.
    device : str
        ``cpu``, ``cuda``, or ``auto``: CUDA if it is available and the policy has a million parameters or more.
    backend : str
        ``torch``; ``native``: a kernel runs the updates, if the algorithm has one, as all four do; ``auto``: native if
        it is exact. The attributes `backend` and `backend_reason` contain the chosen backend and the reason.
    threads : int
        PyTorch's CPU threads while training, restored afterwards; 0 leaves them unchanged.
    env_id : str or callable, optional
        Environment of `evaluate`; nothing else needs one. In an environment with several agents, the policy acts for
        all agents whose observations and actions are the dataset's, see `rlox.offline.acting.SharedPolicy`.
    env_kwargs, env_wrappers
        As for `rlox.training.on_policy.OnPolicyAlgorithm`.
    config : Config, optional
        All hyper-parameters, as the algorithm's ``Config``.
    **hyper_parameters
        Instead of `config`: any of its fields; the others have their defaults.

    Warns
    -----
    RuntimeWarning
        If bounds other than [-1, 1] are taken from the dataset, with their values.

    Raises
    ------
    TypeError, ValueError
        For an unknown hyper-parameter, a value of the wrong type or out of range, a dataset of other sizes, or actions
        out of their bounds.
    """

    _loop = staticmethod(loops.offline)
    _stream = Stream.REPLAY
    actions: ClassVar[tuple[str, ...]] = ("continuous",)
    _has_critics: ClassVar[bool] = True  # whether it learns twin critics
    _length = "n_updates"

    config: OfflineConfig
    policy: Actor
    optimizer: FlatOptimizer | NativeAdam
    normalizer: DatasetStatistics
    _on_device = False  # whether a captured update draws from a copy of the dataset on the GPU

    def __init__(
        self,
        dataset: OfflineDataset | None,
        obs_dim: int,
        act_dim: int,
        callbacks: Iterable[Callback] | None = None,
        logger: LoggerCallback | None = None,
        *,
        continuous: bool = True,
        act_high: float | np.ndarray | None = None,
        act_low: float | np.ndarray | None = None,
        hidden: int | None = None,
        seed: int = 42,
        device: str = "auto",
        backend: str = "auto",
        threads: int = 1,
        env_id: str | Callable[[], Any] | None = None,
        env_kwargs: dict[str, Any] | None = None,
        env_wrappers: Sequence[Any] = (),
        config: OfflineConfig | None = None,
        **hyper_parameters: Any,
    ):
        where = type(self).__name__
        if hidden is not None and "hidden_sizes" in hyper_parameters:
            raise TypeError(f"{where}: hidden must not be given together with hidden_sizes, which it is short for")
        if hidden is not None:
            hyper_parameters["hidden_sizes"] = [integer(where, "hidden", hidden, 1, MOST_AT_ONCE)] * 2
        self.env_id = env_id
        Algorithm.__init__(
            self,
            seed,
            logger,
            callbacks,
            {"config": config, **hyper_parameters},
            device=device,
            backend=backend,
            threads=threads,
            clock="updates",
        )
        self.env_options = EnvOptions.of(where, env_kwargs, env_wrappers)
        require(where, "continuous", continuous, bool)
        if not (env_id is None or isinstance(env_id, str) or callable(env_id) or hasattr(env_id, "step")):
            raise TypeError(f"{where}: env_id must be an id, a callable or an environment, got {shown(env_id)}")
        self.spec = self._make_spec(obs_dim, act_dim, continuous, act_low, act_high, dataset)
        self.dataset: Any = dataset  # an OfflineDataset; None if a checkpoint is loaded only to act
        self._compared: _Compared | None = None
        self._agents: MultiAgentSpec | None = None  # the environment's, after the first evaluation
        self.normalizer = self._statistics_of(dataset)
        self._create_networks(None, backend, device)
        if self.backend.captures and dataset is not None:
            self._on_device = dataset_fits(self)

    def _kernel_obstacle(self, policy: nn.Module | None) -> str | None:
        if self.config.recurrent:
            return "PyTorch computes a memory, with a kernel for its steps"
        if self.spec.masked:
            return "the dataset has masks of legal actions, which the kernel does not follow"
        too_deep = len(self.config.hidden_sizes) > MAX_HIDDEN
        return f"the kernel supports at most {MAX_HIDDEN} hidden layers" if too_deep else None

    def _network_sizes(self) -> tuple[int, int]:
        spec, hidden = self.spec, self.config.hidden_sizes
        sizes = [spec.obs_dim, *hidden, spec.act_dim or spec.n_actions]
        critics = n_parameters(spec.obs_dim, spec.act_dim, hidden, False)[1] if self._has_critics else 0
        return sum((n_in + 1) * n_out for n_in, n_out in pairwise(sizes)), critics

    def _make_spec(
        self, obs_dim: int, act_dim: int, continuous: bool, act_low: Any, act_high: Any, dataset: Any
    ) -> EnvSpec:
        where = type(self).__name__
        obs_dim = integer(where, "obs_dim", obs_dim, 1, MOST_AT_ONCE)
        act_dim = integer(where, "act_dim", act_dim, 1, MOST_AT_ONCE)
        kind = "continuous" if continuous else "discrete"
        if kind not in self.actions:
            raise ValueError(
                f"{where}: actions must be {' or '.join(self.actions)}, got {kind} actions; BC can learn them "
                f"(continuous={continuous})"
            )
        if not continuous:
            return EnvSpec((obs_dim,), n_actions=act_dim, masked=bool(getattr(dataset, "masked", False)))
        if act_low is None and act_high is None:
            act_low, act_high = _bounds_in(where, dataset, act_dim)
        high = _bound(where, "act_high", 1.0 if act_high is None else act_high, act_dim)
        low = -high if act_low is None else _bound(where, "act_low", act_low, act_dim)
        if not (np.isfinite(low) & np.isfinite(high) & (low < high)).all():
            raise ValueError(
                f"{where}: act_low must be below act_high, both finite, got {low.tolist()} and {high.tolist()}"
            )
        return EnvSpec((obs_dim,), act_dim=act_dim, act_low=low, act_high=high)

    def _statistics_of(self, dataset: OfflineDataset | None) -> DatasetStatistics:
        """Check the dataset against the sizes, and return its statistics if they are used."""
        where, spec = type(self).__name__, self.spec
        if dataset is None:
            return DatasetStatistics(where, spec.obs_shape)
        if not isinstance(dataset, OfflineDataset):
            raise TypeError(
                f"{where}: dataset must be a dataset such as rlox.OfflineDatasetBuffer, got {type(dataset).__name__}"
            )
        try:
            require_fit(dataset, spec, where)
        except ValueError as e:
            sizes = "act_dim" if spec.discrete else "act_dim, act_low and act_high"
            raise ValueError(f"{e}; in {where}, obs_dim, {sizes} are the environment's") from e
        if not (getattr(dataset, "normalized", False) or self.config.normalize_obs):
            return DatasetStatistics(where, spec.obs_shape, fixed=True)
        if not hasattr(dataset, "obs_mean"):
            raise ValueError(
                f"{where}: normalize_obs must be false for a dataset without obs_mean and obs_std, such as "
                f"{type(dataset).__name__}; rlox.OfflineDatasetBuffer has them"
            )
        return DatasetStatistics(
            where, spec.obs_shape, np.array(dataset.obs_mean), np.array(dataset.obs_std), fixed=True
        )

    def _policy_arguments(self) -> dict[str, Any]:
        """Return the constructor arguments common to all bounded policies."""
        spec, c = self.spec, self.config
        bounds = {"low": spec.act_low, "high": spec.act_high}
        return {
            "obs_dim": spec.obs_dim,
            "act_dim": spec.act_dim,
            "hidden": c.hidden_sizes,
            "activation": c.activation,
            **bounds,
        }

    def sample(self) -> TransitionBatch:
        """Return the transitions of the next update, normalised if observations are."""
        return TransitionBatch.from_rows(self._host_rows(), self._gamma, self.spec, self.device)

    @property
    def _gamma(self) -> float:
        """The discount; behavioural cloning has none, and ignores rewards."""
        return getattr(self.config, "gamma", 1.0)

    def _host_rows(self) -> Mapping[str, Any]:
        """Return the rows of the next update, normalised if observations are."""
        rows = self.dataset.sample(self._n_rows, self.rng.integers(2**63))
        if self.normalizer.mean is not None and not getattr(self.dataset, "normalized", False):
            rows = {**rows, **{name: self.normalizer.normalize(rows[name]) for name in ("obs", "next_obs")}}
        return rows

    def _make_source(self) -> Any:
        from rlox.gpu.sources import DatasetSource, HostSource

        if not self._on_device:
            return HostSource(self, self._gamma, 1)
        from rlox.buffers.device_dataset import DeviceDataset

        rows = DeviceDataset(self.dataset, self.normalizer.normalize, self.device)
        return DatasetSource(rows, self._n_rows, self._gamma, self.spec)

    def _prepare_training(self) -> None:
        if self.dataset is None:
            raise ValueError(
                f"{type(self).__name__}.train: there must be a dataset to learn from; pass from_checkpoint(dataset=...)"
            )

    def plan(
        self, n_updates: int | None = None, *, until: int | None = None, schedule_timesteps: int | None = None
    ) -> None:
        """Set the end of the training and of its schedules as `train` does, which then needs no arguments."""
        self._plan(n_updates, until, schedule_timesteps)

    def train(  # type: ignore[override]  # counts updates
        self,
        n_updates: int | None = None,
        *,
        until: int | None = None,
        schedule_timesteps: int | None = None,
        progress: bool = False,
        **unknown: Any,
    ) -> dict[str, float]:
        """Train for `n_updates` more updates.

        Without `n_updates`, continue an interrupted training, or the one in progress when a checkpoint was saved, up to
        its planned end.

        Parameters
        ----------
        n_updates : int, optional
            Start a new training of this many updates.
        until : int, optional
            A new end for the continued training, in updates since the algorithm was created. Its schedules are
            stretched to the new end, so a learning rate that had decayed rises again.
        schedule_timesteps : int, optional
            Updates after which schedules reach their end; by default the end given by `n_updates` or `until`.
        progress : bool
            As for `rlox.training.algorithm.Algorithm.train`.

        Returns
        -------
        dict
            The last metrics, including metrics on 500 transitions, evenly spaced over the dataset. For the policy:
            ``dataset/log_prob`` of their actions (nats, of actions in [-1, 1]) or, if it is deterministic,
            ``dataset/mse``. For the critics: ``dataset/q`` and ``dataset/return``, the mean values of these actions and
            the mean discounted returns that followed them. After a time limit, a return continues with the critics'
            value of the policy there, as in the updates; this part shrinks with the number of steps before it.
            ``learning_rate`` and all other scheduled values are those of the last update.

        Warns
        -----
        RuntimeWarning
            If the end of the schedules changes, with their values before and after; if nothing is left to train.

        Raises
        ------
        FloatingPointError
            If a loss is no longer finite.
        ValueError
            For a number below 1; if both `n_updates` and `until` are given, or neither is and there is no training to
            continue; if `until` has already passed; if `schedule_timesteps` would leave a learning rate of 0 for the
            rest of the training; without a dataset.
        """
        return self._train(n_updates, until, schedule_timesteps, progress, unknown)

    # ---- acting

    def _evaluation_arguments(self, n_episodes: int, seed: int | None, deterministic: bool = True) -> dict[str, Any]:
        """Return the arguments of `rlox.evaluation.episodes.evaluate` or, with ``by``, of that function."""
        found = super()._evaluation_arguments(n_episodes, seed, deterministic)
        if not is_multi_agent(self.env_id):
            return found
        if self._agents is None:
            env = make_multi_agent_env(self.env_id, 1, 0, self.env_options.kwargs)
            self._agents = env.spec
            env.close()
        own = {"policy": share_policy(self, self._agents, f"{type(self).__name__}.evaluate"), "by": evaluate_shared}
        return {name: x for name, x in found.items() if name not in ("device", "transform")} | own

    @torch.no_grad()
    def _compare_with_data(self) -> dict[str, torch.Tensor]:
        """Return the metrics ``dataset/…`` of `train` as scalar tensors; none for a dataset that only gives samples."""
        if not hasattr(self.dataset, "get_state"):
            return {}
        if self._compared is None:
            self._compared = self._compare()
        rows = self._compared
        if hasattr(self.policy, "log_prob"):
            found = {"dataset/log_prob": self.policy.log_prob(rows.obs, rows.actions).mean()}
        else:
            found = {"dataset/mse": (self.policy.unit_mode(rows.obs) - rows.actions).square().mean()}
        if self._has_critics:
            ahead = self.critics(rows.last_obs, self.policy.unit_mode(rows.last_obs)).amin(0)
            found["dataset/q"] = self.critics(rows.obs, rows.actions).mean()
            found["dataset/return"] = torch.addcmul(rows.returns, rows.rest, ahead).mean()
        return found

    def _compare(self) -> _Compared:
        """Return evenly spaced rows from the whole dataset."""
        state = self.dataset.get_state()
        rewards, terminated, truncated = (np.asarray(state[k]) for k in ("rewards", "terminated", "truncated"))
        n, spec = len(rewards), self.spec
        rows = np.linspace(0, n - 1, min(n, N_COMPARED)).astype(np.int64)
        returns, rest, last = returns_to_go(rewards, terminated, truncated, rows, self._gamma)
        actions = torch.from_numpy(
            np.asarray(state["actions"][rows], spec.action_dtype).reshape(-1, *spec.action_shape)
        )

        def placed(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.asarray(array, np.float32)).to(self.device)

        return _Compared(
            placed(self.normalizer.normalize(state["obs"][rows])),
            self._unit(actions.to(self.device)),
            placed(returns),
            placed(rest),
            placed(self.normalizer.normalize(state["next_obs"][last])),
        )

    def _unit(self, actions: torch.Tensor) -> torch.Tensor:
        """Convert the dataset's actions to those that policy and critics see: in [-1, 1], or (B,) int64."""
        return actions if self.spec.discrete else self.policy.to_unit(actions)

    def _own_state(self) -> tuple[dict[str, Any], dict[str, dict[str, np.ndarray]]]:
        spec = self.spec
        sizes = {"obs_dim": spec.obs_dim, "act_dim": spec.act_dim or spec.n_actions, "continuous": spec.continuous}
        masked = {"masked": True} if spec.masked else {}
        bounds = {"bounds": {"low": spec.act_low, "high": spec.act_high}} if spec.continuous else {}
        info, tensors = super()._own_state()
        return {**info, "spaces": {**sizes, **masked}}, {**tensors, **bounds}

    @classmethod
    def from_checkpoint(  # type: ignore[override]  # the dataset comes first, as in the constructor
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
            Required for further training, because checkpoints do not contain it.
        env_id : str or callable, optional
            Environment of `evaluate`; by default the saved one.
        env_wrappers : sequence, optional
            Required if the checkpoint names wrappers from outside gymnasium, because a file must not choose what is
            imported.
        **arguments
            Further arguments of the class, including hyper-parameters, which override the saved values.

        Raises
        ------
        FileNotFoundError, ValueError
            See `rlox.checkpoint.load_checkpoint`; also for another algorithm's checkpoint, and a dataset whose
            normalisation differs from that of the saved training.
        """
        where, checkpoint = f"{cls.__name__}.from_checkpoint", load_checkpoint(path)
        header, tensors = checkpoint.header, checkpoint.tensors
        restoring.require_algorithm(cls, header, path)
        env, spaces, bounds = header["env"], header.get("spaces"), tensors.get("bounds", {})
        restoring.require_no_code(where, path, env, env_id, env_wrappers)
        kwargs = {} if "env_kwargs" in arguments else restoring.complete_kwargs(where, path, env["kwargs"], arguments)
        if spaces is None or (spaces["continuous"] and set(bounds) != {"low", "high"}):
            raise ValueError(f"{where}: {path} is damaged: it must specify the actions of its policy")
        masked = bool(spaces.pop("masked", False))
        typed = {name: value for name, value in arguments.items() if name in cls.Config.__dataclass_fields__}
        saved = {} if "config" in arguments else header["config"]
        with restoring.explained(f"{where}: {path} cannot be restored", arguments):
            config = arguments.get("config") or cls.Config.from_kwargs(cls.__name__, **{**saved, **typed})
            # Checked before anything is created whose size the file determines.
            shapes = [array.shape for array in tensors["policy"].values() if array.ndim == 2]
            require_widths(cls.__name__, frozenset(shapes), config.hidden_sizes, {spaces["obs_dim"]})
            require_memory(cls.__name__, frozenset(shapes), config)
            if spaces["act_dim"] > max((shape[0] for shape in shapes), default=0):
                raise ValueError(f"act_dim must be that of its weights, got {spaces['act_dim']}")
            agent = cls(
                dataset,
                **{
                    **spaces,
                    **({"act_low": bounds["low"], "act_high": bounds["high"]} if bounds else {}),
                    "callbacks": callbacks,
                    "logger": logger,
                    "device": device,
                    "seed": header["seed"],
                    "threads": header["threads"],
                    "backend": restoring.choose_saved_backend(header, device),
                    "env_id": env["id"] if env_id is None else env_id,
                    "env_kwargs": kwargs,
                    "env_wrappers": env["wrappers"] if env_wrappers is None else env_wrappers,
                    **saved,
                    **arguments,
                },
            )
            agent._restore(checkpoint)
        require_same_meaning(agent, header, where)
        agent.spec = replace(agent.spec, masked=masked or agent.spec.masked)
        return agent

    def _start_from(self, checkpoint: Checkpoint, where: str) -> None:
        """Load the policy's weights, and those of each other network that both have, such as critics."""
        tensors = checkpoint.tensors
        require_same_meaning(self, checkpoint.header, where)
        self.normalizer.set_state(tensors["normalization"])
        self._captured = None  # its dataset was normalised before
        self._load_weights(tensors["policy"], where)
        for name, part in self._parts.items():
            if isinstance(part, nn.Module) and name in tensors:
                load_part(part, tensors[name], f"{where}: {name}")


def _bounds_in(where: str, dataset: Any, act_dim: int) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
    """Return the bounds of the dataset's actions, and warn about them; None if they are [-1, 1] or unknown."""
    fits = isinstance(dataset, OfflineDataset) and getattr(dataset, "act_dim", act_dim) == act_dim
    if not fits or getattr(dataset, "n_actions", None) is not None:
        return None, None  # reported later
    bounds = action_bounds(dataset)
    if bounds is None or np.abs(bounds).max() == np.abs(bounds).min() == 1:
        return None, None
    low, high = (", ".join(f"{value:.4g}" for value in bound) for bound in bounds)
    warnings.warn(
        f"{where}: act_low=[{low}] and act_high=[{high}] are taken from the dataset; pass the environment's bounds if "
        "they are wider",
        RuntimeWarning,
        stacklevel=4,
    )
    return bounds


def _bound(where: str, name: str, value: Any, act_dim: int) -> np.ndarray:
    """Convert a bound of the actions to an array (A,)."""
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
