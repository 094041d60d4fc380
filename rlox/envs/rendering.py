"""Pictures: what ``render()`` of an environment returns, as RGB."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlox.processes.failures import frames_of, no_exit, note_cause

_CHANNELS = (1, 3, 4)  # grey, RGB, RGBA
_RULE = (
    "render() must return one picture, an array (H, W, 3) of uint8; or one of another type that can only mean one "
    "thing: grey, channels first, opaque RGBA, bool, integers in [0, 255], floats in [0, 1]"
)


def draw_frame(env: Any, where: str) -> np.ndarray:
    """Return what ``env.render()`` draws, (H, W, 3) uint8; see `rgb_frame`.

    A ValueError says what an environment lacks that draws nothing, an ImportError which package does.
    """
    try:
        with no_exit(f"{where}: the environment"):
            rendered = env.render()
    except Exception as e:
        if type(e).__name__ == "DependencyNotInstalled":  # of gymnasium; its message has the command that installs it
            raise ImportError(f"{where}: render() needs a package that is missing: {e}") from e
        if frames_of(e.__traceback__)[-1].module == "gymnasium":
            metadata = getattr(env, "metadata", None) or {}
            modes = metadata.get("render_modes")
            if isinstance(e, NotImplementedError):
                raise ValueError(f"{where}: the environment must have a method render() to be drawn, got none") from e
            if isinstance(e, AssertionError) and getattr(env, "render_mode", None) not in (modes or ()):
                raise ValueError(
                    f"{where}: metadata['render_modes'] of the environment must contain {env.render_mode!r} to be "
                    f"drawn, got {modes!r}; add it, if render() can draw that"
                ) from e
        note_cause(e, f"{where.removeprefix('evaluate: ')}: render")
        raise
    return rgb_frame(rendered, where)


def rgb_frame(rendered: Any, where: str) -> np.ndarray:
    """Return what ``render()`` returned as a picture, (H, W, 3) uint8.

    Converted is what has exactly one meaning: one channel, (H, W) or (H, W, 1); channels first, unless the last axis
    can be the channels; an alpha channel without transparency; bool; integers in [0, 255]; floats in [0, 1]; nested
    lists, a list with one picture, and images of Pillow. A ValueError is raised for anything else.
    """
    if hasattr(rendered, "getbands"):  # an image of Pillow, whose pixels may be numbers of colours
        rendered = rendered.convert("RGBA")
    try:
        frame = np.asarray(rendered)
    except ValueError:  # a list of arrays of several shapes
        raise ValueError(f"{where}: {_RULE}; got {_kind(rendered)}") from None
    if frame.dtype.kind not in "buif" or not frame.size:
        raise ValueError(f"{where}: {_RULE}; got {_kind(rendered)}")
    got = f"an array {frame.shape} of {frame.dtype}"
    if frame.ndim == 4 and frame.shape[0] == 1:
        frame = frame[0]
    if frame.ndim == 4:
        raise ValueError(f"{where}: {_RULE}; got {got}, which are {frame.shape[0]} pictures")
    if frame.ndim == 2:
        frame = frame[:, :, None]
    if frame.ndim == 3 and frame.shape[2] not in _CHANNELS and frame.shape[0] in _CHANNELS:
        frame = np.moveaxis(frame, 0, 2)
    if frame.ndim != 3 or frame.shape[2] not in _CHANNELS:
        raise ValueError(f"{where}: {_RULE}; got {got}")
    frame = _bytes(frame, where, got)
    if frame.shape[2] == 4:
        if (frame[:, :, 3] != 255).any():
            raise ValueError(f"{where}: {_RULE}; got {got} with transparency, and no background")
        frame = frame[:, :, :3]
    return frame if frame.shape[2] == 3 else np.repeat(frame, 3, axis=2)


def _bytes(frame: np.ndarray, where: str, got: str) -> np.ndarray:
    """Return the values of a picture as uint8."""
    if frame.dtype == np.uint8:
        return frame
    if frame.dtype == bool:
        return frame.astype(np.uint8) * np.uint8(255)
    most = 1 if frame.dtype.kind == "f" else 255
    low, high = frame.min(), frame.max()
    if not 0 <= low <= high <= most:  # also NaN
        raise ValueError(f"{where}: {_RULE}; got {got} with values in [{low}, {high}]")
    return np.rint(frame * 255.0).astype(np.uint8) if most == 1 else frame.astype(np.uint8)


def _kind(rendered: Any) -> str:
    """Return what is no picture, in words."""
    if rendered is None:
        return "None"
    if isinstance(rendered, (list, tuple)) and len(rendered):
        return f"a {type(rendered).__name__} of {len(rendered)} values of type {type(rendered[0]).__name__}"
    return f"an empty {type(rendered).__name__}" if not np.size(rendered) else f"a {type(rendered).__name__}"
