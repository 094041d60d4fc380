"""Checks and small functions that trainings of all families use."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from rlox.callbacks import Callback, CallbackList
from rlox.checkpoint import Checkpoint, one_line
from rlox.config import (
    require,
    shown,
)
from rlox.kernels.envs import NATIVE_ENVS
from rlox.native import NativeActor

# PyTorch is imported where it is used: a native run needs none of it.

if TYPE_CHECKING:
    from torch import nn

    from rlox.collectors.acting import ModuleActor
    from rlox.envs import EnvSpec

MOST_THREADS = 1024  # of PyTorch's

# Below this many parameters a GPU's launch latency costs more than its arithmetic saves.
CUDA_PAYS_FROM = 1_000_000

# So many environments, and processes for them, a file may ask for by itself.
_MOST_NATIVE_ENVS, _MOST_ENVS, _MOST_WORKERS = 65_536, 1_024, 64


def require_laid_out(algorithm: Any) -> None:
    """A ValueError where parameters have left the memory that their optimiser moves, and would no longer learn."""
    if algorithm.backend == "native":
        return
    from rlox.nn.optimizers import FlatOptimizer, holds_all

    for optimizer in vars(algorithm).values():
        if isinstance(optimizer, FlatOptimizer) and not holds_all(optimizer):
            raise ValueError(
                f"{type(algorithm).__name__}.train: the networks' parameters must stay where they were laid out, got "
                "others: they were moved, converted or replaced, and would no longer learn. Copy numbers into them, "
                "by load_state_dict or copy_, or pass the module as policy= to a new algorithm"
            )


def uncopied(algorithm: object) -> TypeError:
    """For what would copy an algorithm: its networks and optimisers share memory, which a copy would not."""
    where = type(algorithm).__name__
    return TypeError(
        f"{where}: it must not be copied or pickled; write it with save(path), and {where}.from_checkpoint(path) is "
        "another one. copy.deepcopy(algorithm.policy) copies the policy alone"
    )


def callback_list(where: str, callbacks: Iterable[Callback] | None, logger: Callback | None) -> CallbackList:
    """`callbacks` and the `logger` behind them; a TypeError for what is none."""
    if logger is not None and not isinstance(logger, Callback):
        raise TypeError(f"{where}: logger must be a LoggerCallback or another Callback, got {shown(logger)}")
    try:
        given = [] if callbacks is None else [*callbacks]
    except TypeError:
        given = [callbacks]
    if not all(isinstance(item, Callback) for item in given):
        raise TypeError(f"{where}: callbacks must be a list of rlox.callbacks.Callback, got {shown(callbacks)}")
    return CallbackList([*given, *([logger] if logger is not None else ())])


def require_env_arguments(where: str, env_kwargs: Any, env_wrappers: Any) -> None:
    """A TypeError unless these are such as every algorithm's constructor takes."""
    if env_kwargs is not None and not (
        isinstance(env_kwargs, Mapping) and all(isinstance(key, str) for key in env_kwargs)
    ):
        raise TypeError(f"{where}: env_kwargs must be a dict of keyword arguments, got {shown(env_kwargs)}")
    if not isinstance(env_wrappers, (list, tuple)):
        raise TypeError(f"{where}: env_wrappers must be a list, got {shown(env_wrappers)}")
    for item in env_wrappers:
        if not isinstance(item, (str, Mapping)):
            raise TypeError(
                f"{where}: env_wrappers must hold names or {{name: {{argument: value}}}}, got {shown(item)}"
            )


def _require_counts(checkpoint: Checkpoint, where: str, trusted: bool) -> None:
    """A ValueError where a header asks for more environments than its tensors, or good sense, account for."""
    env, saved = checkpoint.header["env"], checkpoint.tensors["environment"].get("keys")
    n, workers = env["n_envs"], env["workers"]
    statistics = checkpoint.tensors["statistics"]
    for name in ("episode_returns", "episode_lengths"):
        if name not in statistics or statistics[name].ndim != 1:
            raise ValueError(f"{where} is damaged: {name} must be there, one number for each episode")
    if saved is not None and (saved.shape, saved.dtype) != ((n,), np.uint64):
        raise ValueError(f"{where} is damaged: n_envs must be that of its environments' state, {saved.shape}, got {n}")
    if trusted:
        return
    most = _MOST_ENVS
    if env["id"] in NATIVE_ENVS:
        most = _MOST_NATIVE_ENVS if saved is None else n
    for name, value, bound in (("n_envs", n, most), ("workers", workers, _MOST_WORKERS)):
        if value > bound:
            raise ValueError(
                f"{where} asks for {name}={value}, and a file may ask for {bound}; if you trust it, pass "
                f"env_id={env['id']!r}, or type env.n_envs={n} beside resume="
            )


def _makes_perceptrons(cls: type) -> bool:
    """Whether the default policy is one of rlox's own, whose weights have the widths of ``hidden_sizes``."""
    return next(k for k in cls.__mro__ if "_make_policy" in vars(k)).__module__.startswith("rlox.")


def _weight_shapes(checkpoint: Checkpoint) -> frozenset[tuple[int, ...]] | None:
    """(n_out, n_in) of all weights that the algorithm itself has made; None where there are none."""
    tensors, own = checkpoint.tensors, checkpoint.header["policy"] == "custom"
    policy = [] if own else [array.shape[-2:] for array in tensors["policy"].values() if array.ndim > 1]
    # Twin critics have theirs the other way round.
    critics = [array.shape[:-3:-1] for array in tensors.get("critics", {}).values() if array.ndim > 1]
    return None if own and not critics else frozenset([*policy, *critics])


def predicted(
    where: str,
    spec: EnvSpec,
    actor: ModuleActor | NativeActor,
    obs: Any,
    deterministic: bool,
    transform: Callable[[np.ndarray], np.ndarray] | None,
) -> np.ndarray | int:
    """Action for one observation, or actions for a batch of them, as `OnlineAlgorithm.predict` has them.

    `transform` is what observations go through before the `actor` sees them.
    """
    require(where, "deterministic", deterministic, bool)
    try:
        given = np.asarray(obs)
        if given.dtype.kind not in "biufO":
            raise TypeError(f"it holds {given.dtype}")
        with np.errstate(over="ignore"):
            rows = np.asarray(given, spec.obs_dtype)
    except (OverflowError, TypeError, ValueError) as e:
        raise TypeError(f"{where}: obs must be an array of numbers, got {shown(obs)}") from e
    single = rows.ndim == len(spec.obs_shape)
    rows = rows[None] if single else rows
    if rows.shape[1:] != spec.obs_shape:
        shape = ", ".join(map(str, spec.obs_shape))
        raise ValueError(f"{where}: obs must have shape ({shape}) or (B, {shape}), got {np.shape(obs)}")
    if not np.isfinite(rows).all():
        raise ValueError(f"{where}: obs must hold finite numbers, as float32 has them, got {shown(obs)}")
    if transform is not None:
        rows = transform(rows)
    actions = spec.clip(actor.mode(rows) if deterministic else actor.sample(rows))
    if single:
        return int(actions[0]) if spec.discrete else actions[0]
    return actions


def require_no_code(where: str, path: str | os.PathLike, env: dict[str, Any], env_id: Any, env_wrappers: Any) -> None:
    """A ValueError where a header's `env` would have code run, or files written, that only its file has chosen.

    What is given in its place (`env_id`, `env_wrappers`) is trusted.
    """
    names = [name if isinstance(name, str) else next(iter(name), "") for name in env["wrappers"]]
    if env_wrappers is None and any(":" in name or "." in name for name in names):
        raise ValueError(
            f"{where}: the wrappers {names} of {path} name a module to import; if you trust it, pass env_wrappers=[...]"
        )
    if env_wrappers is None and "RecordVideo" in names:
        raise ValueError(
            f"{where}: the wrapper RecordVideo of {path} writes to a folder of the file's choice; if you trust it, "
            "pass env_wrappers=[...]"
        )
    # gymnasium imports the part before the colon, and a file must not decide what code runs. Its wrappers of old
    # gym take the id as an argument.
    for name in (env["id"], env["kwargs"].get("env_id")):
        if env_id is None and ":" in str(name):
            raise ValueError(
                f"{where}: the environment {name} of {path} names a module to import; if you trust it, pass "
                f"env_id={env['id']!r}"
            )


def require_widths(
    where: str, shapes: frozenset[tuple[int, ...]], hidden: Sequence[int], n_inputs: Iterable[int] | None
) -> None:
    """A ValueError unless a checkpoint holds weights (n_out, n_in) of the widths `hidden` that its header asks for.

    `n_inputs` are the numbers that the first layer may take; None: any. Loading the weights would say so as well, but
    only once networks of any size had been made.
    """
    if not hidden:
        return
    first = any(n_out == hidden[0] and (n_inputs is None or n in n_inputs) for n_out, n in shapes)
    if not first or not shapes.issuperset((n_out, n) for n, n_out in pairwise(hidden)):
        raise ValueError(
            f"{where}: from_checkpoint: hidden_sizes does not fit the checkpoint: for observations as its header has "
            f"them it holds no weights of the widths {one_line(hidden, 80)}"
        )


def weights_of(module: nn.Module) -> dict[str, np.ndarray]:
    """All parameters and buffers by their ``state_dict`` names, on the CPU."""
    return {name: value.detach().cpu().numpy() for name, value in module.state_dict().items()}


def load_weights_(module: nn.Module, arrays: dict[str, np.ndarray], what: str) -> None:
    """Put what `weights_of` returned into `module`; a ValueError that names `what` where it does not fit."""
    import torch

    try:
        module.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in arrays.items()})
    except RuntimeError as e:
        raise ValueError(f"{what} does not fit the checkpoint: {e}") from e


def choose_device(device: str, policy: nn.Module, where: str) -> str:
    import torch

    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ValueError(
            f"{where}: device=cuda needs a GPU that this PyTorch ({torch.__version__}) can use; try device=cpu"
        )
    large = sum(p.numel() for p in policy.parameters()) >= CUDA_PAYS_FROM
    return "cuda" if device == "cuda" or (device == "auto" and available and large) else "cpu"
