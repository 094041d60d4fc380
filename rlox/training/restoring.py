"""An algorithm from a checkpoint: what its header may ask for, and how its state is put back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from rlox.checkpoint import Checkpoint, one_line
from rlox.config import shown
from rlox.envs import env_name
from rlox.envs.registry import imported_module
from rlox.kernels.envs import NATIVE_ENVS
from rlox.nn.modules import is_module, load_weights_

if TYPE_CHECKING:
    from torch import nn

    from rlox.collectors import RewardFn

# So many environments, and processes for them, a file may ask for by itself.
_MOST_NATIVE_ENVS, _MOST_ENVS, _MOST_WORKERS = 65_536, 1_024, 64


def with_environments(
    cls: Any,
    checkpoint: Checkpoint,
    path: str | os.PathLike,
    env_id: str | Callable[[], Any] | None,
    policy: nn.Module | None,
    reward_fn: RewardFn | None,
    env_wrappers: Sequence[Any] | None,
    given: dict[str, Any],
    arguments: dict[str, Any],
) -> Any:
    """An algorithm of `cls` that acts, from a `checkpoint`; arguments as `Algorithm.from_checkpoint` has them, `given`
    its named ones that the constructor takes too."""
    where, header = f"{cls.__name__}.from_checkpoint", checkpoint.header
    if fixed := {"n_envs", "seed", "env_kwargs"} & arguments.keys():
        raise TypeError(
            f"{where}: {min(fixed)} must be the checkpoint's, got {shown(arguments[min(fixed)])}; leave it out, or "
            f"make a new {cls.__name__} and call init_from(path)"
        )
    require_algorithm(cls, header, path)
    if header["policy"] == "custom" and policy is None:
        raise ValueError(f"{where}: {path} holds a policy of your own; pass policy=YourPolicy(...)")
    env = header["env"]
    if env["id"] is None:
        raise ValueError(f"{where}: {path} is damaged: env must have an id")
    require_no_code(where, path, env, env_id, env_wrappers)
    _require_counts(checkpoint, f"{where}: {path}", trusted=env_id is not None)
    try:
        cls.Config.from_kwargs(cls.__name__, **header["config"])
    except (TypeError, ValueError) as e:
        raise ValueError(f"{where}: {path} is damaged: {one_line(e)}") from e
    saved_reward = header.get("reward_fn")
    if reward_fn is None and saved_reward and saved_reward.startswith("rlox:"):
        reward_fn = saved_reward.removeprefix("rlox:")
    saved = {
        "n_envs": env["n_envs"],
        "seed": header["seed"],
        "threads": header["threads"],
        "env_kwargs": env["kwargs"],
        "env_workers": env["workers"],
        **({} if "config" in arguments else header["config"]),
    }
    given = {
        **given,
        "backend": saved_backend(header, given["device"]) if given["backend"] is None else given["backend"],
        "env_backend": env.get("backend", "auto") if given["env_backend"] is None else given["env_backend"],
        "env_wrappers": env["wrappers"] if env_wrappers is None else list(env_wrappers),
    }
    algorithm = cls.__new__(cls)
    # Before anything is made that the file decides the size of.
    algorithm._saved_shapes = _weight_shapes(checkpoint) if _makes_perceptrons(cls) else None
    try:
        algorithm.__init__(
            env["id"] if env_id is None else env_id,
            policy=policy,
            reward_fn=reward_fn,
            **{**saved, **cls._saved_arguments(header, arguments), **given, **arguments},
        )
    except (MemoryError, TypeError, ValueError) as e:
        raise _kind(e, arguments)(f"{where}: {path}: {one_line(e, 1000)}") from e
    algorithm._lost_reward_fn = None if reward_fn is not None else saved_reward
    try:
        own = algorithm.ranks.own(checkpoint, algorithm.seed)
        algorithm._restore(own, same_env=env_id is None or env_name(env_id) == env["id"])
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        algorithm.close()
        raise ValueError(f"{where}: {path} cannot be restored: {one_line(e, 1000)}") from e
    return algorithm


def with_dataset(
    cls: Any,
    checkpoint: Checkpoint,
    path: str | os.PathLike,
    dataset: Any,
    env_id: str | Callable[[], Any] | None,
    env_wrappers: Sequence[Any] | None,
    given: dict[str, Any],
    arguments: dict[str, Any],
) -> Any:
    """An algorithm of `cls` that learns from a `dataset`, from a `checkpoint`; arguments as `with_environments`."""
    where, header, tensors = f"{cls.__name__}.from_checkpoint", checkpoint.header, checkpoint.tensors
    require_algorithm(cls, header, path)
    env, spaces, bounds = header["env"], header.get("spaces"), tensors.get("bounds", {})
    require_no_code(where, path, env, env_id, env_wrappers)
    if spaces is None or (spaces["continuous"] and set(bounds) != {"low", "high"}):
        raise ValueError(f"{where}: {path} is damaged: it must say which actions its policy takes")
    typed = {name: value for name, value in arguments.items() if name in cls.Config.__dataclass_fields__}
    kept = {} if "config" in arguments else header["config"]
    try:
        config = arguments.get("config") or cls.Config.from_kwargs(cls.__name__, **{**kept, **typed})
        # Before anything is made that the file decides the size of.
        shapes = [array.shape for array in tensors["policy"].values() if array.ndim == 2]
        require_widths(cls.__name__, frozenset(shapes), config.hidden_sizes, {spaces["obs_dim"]})
        n_outputs = max((shape[0] for shape in shapes), default=0)
        if spaces["act_dim"] > n_outputs:
            raise ValueError(f"act_dim must be what its weights have, got {spaces['act_dim']}")
        algorithm = cls(
            dataset,
            **{
                **spaces,
                **({"act_low": bounds["low"], "act_high": bounds["high"]} if bounds else {}),
                **given,
                "seed": header["seed"],
                "threads": header["threads"],
                "backend": saved_backend(header, given["device"]),
                "env_id": env["id"] if env_id is None else env_id,
                "env_kwargs": env["kwargs"],
                "env_wrappers": env["wrappers"] if env_wrappers is None else env_wrappers,
                **kept,
                **arguments,
            },
        )
        algorithm._restore(checkpoint, same_env=False)
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError) as e:
        raise _kind(e, arguments)(f"{where}: {path} cannot be restored: {one_line(e, 1000)}") from e
    return algorithm


def _kind(error: Exception, arguments: dict[str, Any]) -> type[Exception]:
    """What the caller adds to the file may be at fault as well, and keeps its kind of error."""
    return TypeError if arguments and isinstance(error, TypeError) else ValueError


def require_algorithm(cls: type[Any], header: dict[str, Any], path: str | os.PathLike) -> None:
    """A ValueError where the header is of another algorithm than `cls`."""
    if header["algorithm"] != cls.name:
        raise ValueError(f"{cls.__name__}.from_checkpoint: {path} must hold {cls.name}, got {header['algorithm']}")


def saved_backend(header: dict[str, Any], device: str) -> str:
    """The backend that goes on: what was native is so again where it is exact."""
    # A file without one was trained by PyTorch, before there was a choice.
    return "auto" if device != "cuda" and header.get("backend") == "native" else "torch"


def load_part(part: Any, arrays: dict[str, np.ndarray], what: str) -> None:
    """Put a section of a checkpoint into a module, an optimiser or another object with ``set_state``."""
    if is_module(part):
        load_weights_(part, arrays, what)
    else:
        part.set_state(arrays)


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
    return next(k for k in cls.__mro__ if "make_policy" in vars(k)).__module__.startswith("rlox.")


def _weight_shapes(checkpoint: Checkpoint) -> frozenset[tuple[int, ...]] | None:
    """(n_out, n_in) of all weights that the algorithm itself has made; None where there are none."""
    tensors, own = checkpoint.tensors, checkpoint.header["policy"] == "custom"
    policy = [] if own else [array.shape[-2:] for array in tensors["policy"].values() if array.ndim > 1]
    # Twin critics have theirs the other way round.
    critics = [array.shape[:-3:-1] for array in tensors.get("critics", {}).values() if array.ndim > 1]
    return None if own and not critics else frozenset([*policy, *critics])


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
        if env_id is None and imported_module(str(name)):
            raise ValueError(
                f"{where}: the environment {name} of {path} names a module to import; if you trust it, pass "
                f"env_id={env['id']!r}"
            )


def require_model_widths(
    where: str, shapes: frozenset[tuple[int, ...]], deter: int, units: int, stoch: int, classes: int
) -> None:
    """As `require_widths`, of a world model: a ValueError unless there are weights from its two states to a hidden
    layer."""
    if not shapes.issuperset({(units, deter), (units, stoch * classes)}):
        raise ValueError(
            f"{where}: from_checkpoint: size does not fit the checkpoint: it holds no weights of a model with "
            f"deter_dim={deter}, hidden_dim={units}, stoch_dim={stoch} and stoch_classes={classes}"
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
