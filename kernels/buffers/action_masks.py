"""Masks of the legal actions of a dataset's rows."""

import numpy as np


def read_masks(given, actions, n_actions, lazy: bool, where: str) -> dict:
    """Return masks, `given` by name or None, as read-only arrays (N, n_actions) of bytes 0 and 1, without the missing.

    Raises ValueError for other shapes or values, for masks of continuous actions, and, unless `lazy`, if one of the
    `actions` (N, 1) is illegal.
    """
    given = {name: masks for name, masks in given.items() if masks is not None}
    if given and "action_masks" not in given:
        raise ValueError(f"{where}: action_masks must be given with {', '.join(given)}")
    if given and n_actions is None:
        raise ValueError(f"{where}: action_masks must be None for continuous actions")
    read = {}
    for name, masks in given.items():
        flags = np.asarray(masks)
        if flags.shape != (len(actions), n_actions) or flags.dtype.kind not in "biuf":
            raise ValueError(
                f"{where}: {name} must have shape ({len(actions)}, {n_actions}), a flag for each action, got "
                f"{flags.dtype} of shape {flags.shape}"
            )
        if flags.dtype != np.bool_ and not ((flags == 0) | (flags == 1)).all():
            raise ValueError(f"{where}: {name} must hold only 0 and 1")
        read[name] = np.ascontiguousarray(flags, None if flags.dtype == np.bool_ else np.uint8).view(np.uint8)
        read[name].flags.writeable = False
    if read and not lazy:
        require_legal(read["action_masks"], actions, where)
    return read


def require_legal(masks, actions, where: str) -> None:
    """Raise a ValueError that names the first row of the `actions` (N, 1) that its mask (n_actions,) does not allow."""
    legal = np.take_along_axis(masks, actions.astype(np.int64), 1)[:, 0]
    if not legal.all():
        row = int(legal.argmin())
        raise ValueError(
            f"{where}: actions must be legal by action_masks, got {int(actions[row, 0])} in row {row}, whose mask "
            f"allows {np.flatnonzero(masks[row]).tolist()}"
        )
