"""Checks and small functions used by all families."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from rlox.callbacks import Callback, CallbackList, ProgressCallback
from rlox.config import shown
from rlox.envs import env_name
from rlox.nn.devices import device_of
from rlox.nn.modules import is_module

# PyTorch is imported where it is used, because native runs do not need it.

if TYPE_CHECKING:
    from torch import nn

    from rlox.distributed.ranks import Ranks
    from rlox.envs import EnvSpec


# Below this many parameters, a GPU's launch latency costs more than its arithmetic saves.
CUDA_PAYS_FROM = 1_000_000


def require_laid_out(algorithm: Any) -> None:
    """Raise ValueError if parameters have left the memory that their optimiser updates, and would no longer learn."""
    if algorithm.backend == "native":
        return
    from rlox.nn.optimizers import FlatOptimizer, holds_all

    for optimizer in [*vars(algorithm).values(), *getattr(algorithm, "optimizers", ())]:
        if isinstance(optimizer, FlatOptimizer) and not holds_all(optimizer):
            raise ValueError(
                f"{type(algorithm).__name__}.train: the networks' parameters must stay in the optimiser's memory, but "
                "they were moved, converted or replaced, and would no longer learn. Copy values into them with "
                "load_state_dict or copy_, or pass the module as policy= to a new algorithm"
            )


def uncopied(algorithm: object) -> TypeError:
    """Return the error for copying an algorithm: its networks and optimisers share memory, but a copy's would not."""
    where = type(algorithm).__name__
    return TypeError(
        f"{where}: an algorithm must not be copied or pickled; call save(path) and {where}.from_checkpoint(path) to "
        "get another one. copy.deepcopy(algorithm.policy) copies only the policy"
    )


def callback_list(where: str, callbacks: Iterable[Callback] | None, logger: Callback | None) -> CallbackList:
    """Return `callbacks` followed by the `logger`. Raises TypeError for other objects."""
    if logger is not None and not isinstance(logger, Callback):
        raise TypeError(f"{where}: logger must be a LoggerCallback or another Callback, got {shown(logger)}")
    try:
        given = [] if callbacks is None else [*callbacks]
    except TypeError:
        given = [callbacks]
    if not all(isinstance(item, Callback) for item in given):
        raise TypeError(f"{where}: callbacks must be a list of rlox.callbacks.Callback, got {shown(callbacks)}")
    return CallbackList([*given, *([logger] if logger is not None else ())])


@contextmanager
def shown_progress(algorithm: Any, shown: bool) -> Iterator[None]:
    """Show the progress of one training on stderr, if `shown` and on the first rank."""
    if not shown or algorithm.ranks.rank:
        yield
        return
    progress = ProgressCallback(live=None)
    algorithm.callbacks.extend([progress])
    try:
        yield
    finally:
        progress.close()
        algorithm.callbacks.callbacks.remove(progress)


def described(algorithm: Any) -> str:
    """Return the text of an algorithm's ``repr``: what learns where, how large it is, and how far it has come.

    It also works for an object whose construction has failed.
    """
    known = vars(algorithm)
    parts = []
    if known.get("env_id") is not None:
        parts.append(env_name(known["env_id"]))
    config = known.get("config")
    if getattr(config, "hidden_sizes", None):
        parts.append(f"hidden_sizes={list(config.hidden_sizes)}")
    if known.get("native") is not None:
        parts.append(f"{algorithm._policy_size():,} parameters")
    elif "_policy" in known:
        parts.append(f"{sum(p.numel() for p in known['_policy'].parameters()):,} parameters")
    if "counters" in known:
        c = known["counters"]
        parts.append(f"{c.steps:,} {c.unit} trained")
    parts += [f"{name}={known[name]}" for name in ("backend", "device") if name in known]
    return f"{type(algorithm).__name__}({', '.join(parts)})"


def require_env_arguments(where: str, env_kwargs: Any, env_wrappers: Any) -> None:
    """Raise TypeError unless these arguments of an algorithm's constructor have the right types."""
    if env_kwargs is not None and not (
        isinstance(env_kwargs, Mapping) and all(isinstance(key, str) for key in env_kwargs)
    ):
        raise TypeError(f"{where}: env_kwargs must be a dict of keyword arguments, got {shown(env_kwargs)}")
    if not isinstance(env_wrappers, (list, tuple)):
        raise TypeError(f"{where}: env_wrappers must be a list, got {shown(env_wrappers)}")
    for item in env_wrappers:
        if not isinstance(item, (str, Mapping)):
            raise TypeError(
                f"{where}: env_wrappers must contain names or {{name: {{argument: value}}}}, got {shown(item)}"
            )


def read_observations(where: str, spec: EnvSpec, obs: Any) -> tuple[np.ndarray, bool]:
    """Convert the argument of `Algorithm.predict` to rows (B, …) of the policy's arrays.

    Returns
    -------
    rows, single
        The rows, and whether `obs` was one observation.

    Raises
    ------
    ValueError, TypeError
        As `Algorithm.predict`.
    """
    shape = ", ".join(map(str, spec.obs_shape))
    try:
        if spec.adapter is None:
            given = np.asarray(obs)
            single = given.ndim == len(spec.obs_shape)
            given = given[None] if single else given
        else:
            given, single = spec.adapter.read(obs, where)
        if given.dtype.kind not in "biufO":
            raise TypeError(f"it contains {given.dtype}")
        if spec.image and given.dtype.kind == "f":
            raise ValueError(
                f"{where}: obs must be of dtype uint8, since the environment shows images, got {given.dtype}"
            )
        with np.errstate(over="ignore"):
            rows = np.asarray(given, spec.obs_dtype)
    except (OverflowError, TypeError, ValueError) as e:
        if str(e).startswith(where):
            raise
        raise TypeError(f"{where}: obs must be an array of numbers, got {shown(obs)}") from e
    if rows.shape[1:] != spec.obs_shape:
        own = "" if spec.adapter is None else ", or be an observation of the environment"
        raise ValueError(f"{where}: obs must have shape ({shape}) or (B, {shape}){own}, got {np.shape(obs)}")
    if not np.isfinite(rows).all():
        raise ValueError(f"{where}: obs must contain numbers that are finite as float32, got {shown(obs)}")
    return rows, single


def write_actions(spec: EnvSpec, actions: np.ndarray, single: bool) -> np.ndarray | int:
    """Convert the policy's actions (B, …) to those of the environment; the first one if `single`."""
    if spec.adapter is not None:
        actions = spec.adapter.write(actions)
    if single:
        return int(actions[0]) if spec.discrete else actions[0]
    return actions


def choose_device(device: str, policy: nn.Module, where: str, ranks: Ranks, n_others: int = 0) -> str:
    """Return ``cpu`` or ``cuda`` for a policy, and for other networks that have `n_others` parameters."""
    import torch

    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ValueError(
            f"{where}: device=cuda needs a GPU that this PyTorch ({torch.__version__}) can use; try device=cpu"
        )
    large = sum(p.numel() for p in policy.parameters()) + n_others >= CUDA_PAYS_FROM
    if device == "cpu" or not (device == "cuda" or (available and large)):
        return "cpu"
    if not ranks.has_gpu():
        raise ValueError(
            f"{where}: device={device} needs a GPU for each of the {ranks.size} ranks; start at most as many processes "
            f"as a machine has GPUs ({torch.cuda.device_count()}; torchrun --nproc-per-node=…), or try device=cpu"
        )
    return "cuda"


def device_for(device: str, policy: nn.Module | None, where: str) -> str:
    """Return the `device` argument, or for ``auto`` that of a policy which its creator has moved to a GPU."""
    if policy is None or not is_module(policy):
        return device
    own = device_of(policy, where)
    if device == "cpu":
        policy.to("cpu")
    return "cuda" if device == "auto" and own == "cuda" else device
