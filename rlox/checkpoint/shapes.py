"""Shapes of the weights in a checkpoint, compared with its header before networks of any size are created."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from rlox.checkpoint.checks import one_line
from rlox.checkpoint.file import Checkpoint


class SavedShapes(NamedTuple):
    """Shapes (n_out, n_in) of the weights in a checkpoint that the algorithm itself has created."""

    policy: frozenset[tuple[int, ...]]  # empty for a custom policy
    critics: frozenset[tuple[int, ...]]
    n_critics: int  # 0: unknown


def weight_shapes(checkpoint: Checkpoint) -> SavedShapes | None:
    """Return the shapes of all weights that the algorithm itself has created; None if there are none."""
    tensors, own = checkpoint.tensors, checkpoint.header["policy"] == "custom"
    policy = [] if own else [array.shape[-2:] for array in tensors["policy"].values() if array.ndim > 1]
    arrays = [array for array in tensors.get("critics", {}).values() if array.ndim > 1]
    # The weights of critics have the shape (N, n_in, n_out).
    critics = frozenset(array.shape[:-3:-1] for array in arrays)
    n_critics = max((len(array) for array in arrays if array.ndim == 3), default=0)
    return None if own and not critics else SavedShapes(frozenset(policy), critics, n_critics)


def require_shapes(where: str, shapes: SavedShapes, config: Any, spec: Any) -> None:
    """Raise ValueError unless a checkpoint contains weights of the `shapes` that its header describes."""
    policy, critics, n_critics = shapes
    if config.replays == "sequences":
        require_model_widths(where, policy | critics, *config.shape)
        return
    # Networks for images take features as input, and critics take actions in addition to the observation.
    n_in = None if spec.image else {spec.obs_dim, spec.obs_dim + (spec.act_dim or 0)}
    if policy:
        require_widths(where, policy | critics, config.hidden_sizes, n_in)
    if critics:
        name = "hidden_sizes" if getattr(config, "critic_hidden_sizes", None) is None else "critic_hidden_sizes"
        require_widths(where, critics, getattr(config, name), n_in, name)
    own = getattr(config, "n_critics", n_critics)
    if n_critics and own != n_critics:
        raise ValueError(f"{where}: from_checkpoint: n_critics must be the checkpoint's, {n_critics}, got {own}")
    require_memory(where, policy, config)


def require_model_widths(
    where: str, shapes: frozenset[tuple[int, ...]], deter: int, units: int, stoch: int, classes: int
) -> None:
    """Counterpart of `require_widths` for a world model: raise ValueError unless there are weights from both of its
    states to a hidden layer."""
    if not shapes.issuperset({(units, deter), (units, stoch * classes)}):
        raise ValueError(
            f"{where}: from_checkpoint: size does not fit the checkpoint: it contains no weights of a model with "
            f"deter_dim={deter}, hidden_dim={units}, stoch_dim={stoch} and stoch_classes={classes}"
        )


def require_widths(
    where: str,
    shapes: frozenset[tuple[int, ...]],
    hidden: Sequence[int],
    n_inputs: Iterable[int] | None,
    name: str = "hidden_sizes",
) -> None:
    """Raise ValueError unless a checkpoint contains weights (n_out, n_in) of the header's widths `hidden`.

    `name` is that of the setting, and `n_inputs` are the allowed input widths of the first layer; None allows any.
    Loading the weights would fail as well, but only after networks of any size had been created.
    """
    if not hidden:
        return
    first = {n for n_out, n in shapes if n_out == hidden[0]}
    if not first or not shapes.issuperset((n_out, n) for n, n_out in pairwise(hidden)):
        raise ValueError(
            f"{where}: from_checkpoint: {name} does not fit the checkpoint: it contains no weights of the widths "
            f"{one_line(hidden, 80)}"
        )
    if n_inputs is not None and first.isdisjoint(n_inputs):
        raise ValueError(
            f"{where}: from_checkpoint: the environment does not fit the checkpoint, whose weights take no "
            f"observations of {min(n_inputs):,} numbers"
        )


def require_memory(where: str, shapes: frozenset[tuple[int, ...]], config: Any) -> None:
    """Raise ValueError if the header's memory is not that of the checkpoint's weights, as `require_widths`."""
    if not config.recurrent:
        return
    kind, size = config.memory, config.memory_size
    if ((4 if kind == "lstm" else 3) * size, size) not in shapes:
        raise ValueError(
            f"{where}: from_checkpoint: memory and memory_size do not fit the checkpoint: it contains no weights of a "
            f"{kind} of {size} units"
        )
