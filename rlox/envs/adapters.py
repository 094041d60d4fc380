"""gymnasium's spaces as arrays: observations of several parts, images, actions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from rlox.envs.failures import described
from rlox.envs.spec import EnvSpec


class SpaceAdapter:
    """Between what one gymnasium environment observes and takes, and the arrays that an `EnvSpec` describes.

    - Observations: Box becomes (D,) float32, flattened if it has more dimensions; Discrete, MultiDiscrete,
      MultiBinary, Dict and Tuple as ``gymnasium.spaces.flatten`` does (choices one-hot). A uint8 Box of three
      dimensions is an image, of four a stack of images: (C, H, W) uint8, the frames of a stack one after the other
      in C. The channels are the smaller of first and last dimension. A Dict or Tuple of one
      part is that part.
    - Actions: Discrete is an integer from 0; MultiDiscrete and MultiBinary K integers from 0; Box (A,) float32 in the
      environment's own units.

    Raises
    ------
    ValueError
        For any other space, with the remedy.
    """

    def __init__(self, obs_space, act_space, where: str = "SpaceAdapter"):
        self._where = where
        obs_shape, obs_dtype, self.observe = _observer(obs_space, where)
        unscaled = _bytes_shape(obs_space)
        from gymnasium import spaces

        if isinstance(act_space, spaces.Discrete):
            first = int(act_space.start)
            self.spec = EnvSpec(obs_shape, obs_dtype, n_actions=int(act_space.n), obs_bytes=unscaled)
            self.to_env: Callable[[Any], Any] = lambda action: int(action) + first
        elif isinstance(act_space, (spaces.MultiDiscrete, spaces.MultiBinary)):
            shape, dtype = act_space.shape, act_space.dtype
            multi = isinstance(act_space, spaces.MultiDiscrete)
            choices = act_space.nvec.ravel().tolist() if multi else [2] * math.prod(shape)
            start = act_space.start if multi else 0
            self.spec = EnvSpec(obs_shape, obs_dtype, n_choices=tuple(choices), obs_bytes=unscaled)
            self.to_env = lambda action: (action.reshape(shape) + start).astype(dtype)
        elif isinstance(act_space, spaces.Box) and act_space.dtype.kind == "f":
            shape, dtype = act_space.shape, act_space.dtype
            with np.errstate(over="ignore"):
                low, high = (bound.ravel().astype(np.float32) for bound in (act_space.low, act_space.high))
            bounds = {"act_low": low, "act_high": high}
            self.spec = EnvSpec(obs_shape, obs_dtype, act_dim=low.size, **bounds, obs_bytes=unscaled)
            # A copy: an environment may keep or change what it is given.
            self.to_env = lambda action: action.reshape(shape).astype(dtype)
        else:
            raise ValueError(
                f"{where}: the action space must be Discrete, MultiDiscrete, MultiBinary or a Box of floats, got "
                f"{act_space}; pass a callable that wraps the environment in "
                "gymnasium.wrappers.TransformAction(env, func, action_space), or name a wrapper of your own"
            )
        self.spec = replace(self.spec, parts=tuple(_parts(obs_space)))
        self._plain_shape = None if self.spec.image else obs_shape

    def row(self, obs: Any) -> Any:
        """`observe`, where assigning the result to a row of an array could not bend it, or lose a part of it, silently.

        Raises
        ------
        ValueError
            For another shape, and for an image of floats.
        """
        obs, spec = self.observe(obs), self.spec
        if type(obs) is np.ndarray and obs.shape == self._plain_shape and obs.dtype.kind in "fiub":
            return obs
        array = np.asarray(obs)
        if array.shape != spec.obs_shape or array.dtype.kind not in ("iub" if spec.image else "fiub"):
            raise ValueError(
                f"{self._where}: observations must have shape {spec.obs_shape} and dtype {np.dtype(spec.obs_dtype)}, "
                f"as the space says, got {described(obs)}"
            )
        return obs


def _parts(space, key: str = "") -> Iterator[tuple[str, int]]:
    """The keys of a Dict's or Tuple's parts, a part's own parts behind a dot, with the numbers that each becomes."""
    from gymnasium import spaces

    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        items = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        for name, part in items:
            yield from _parts(part, f"{key}.{name}" if key else str(name))
    elif key:
        yield key, spaces.flatdim(space)


def _observer(space, where: str) -> tuple[tuple[int, ...], type, Callable[[Any], Any]]:
    """Shape, dtype and the function that makes such an array of an observation."""
    from gymnasium import spaces

    if isinstance(space, (spaces.Dict, spaces.Tuple)) and len(space.spaces) == 1:
        key = next(iter(space.spaces)) if isinstance(space, spaces.Dict) else 0
        shape, dtype, inner = _observer(space[key], where)
        return shape, dtype, lambda obs: inner(obs[key])
    if _is_image(space):
        return _image_observer(space.shape)
    if isinstance(space, spaces.Box):
        if len(space.shape) == 1:
            return space.shape, np.float32, lambda obs: obs
        return (math.prod(space.shape),), np.float32, lambda obs: np.asarray(obs).reshape(-1)
    if _holds_image(space):
        raise ValueError(
            f"{where}: the observation space must not mix images with other parts, got {space}; keep the image or the "
            "rest with the wrapper {FilterObservation: {filter_keys: [...]}}"
        )
    if not space.is_np_flattenable:
        raise ValueError(
            f"{where}: the observation space must be one that gymnasium.spaces.flatten makes a vector of, got {space}; "
            "pass a callable that wraps the environment in "
            "gymnasium.wrappers.TransformObservation(env, func, observation_space), or name a wrapper of your own"
        )
    return (spaces.flatdim(space),), np.float32, functools.partial(spaces.flatten, space)


def _is_image(space) -> bool:
    from gymnasium import spaces

    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) in (3, 4)


def _bytes_shape(space) -> tuple[int, ...] | None:
    """Shape of a Box of bytes that is no image; None for any other space."""
    from gymnasium import spaces

    whole = isinstance(space, spaces.Box) and space.dtype == np.uint8 and not _is_image(space)
    return space.shape if whole and space.high.max(initial=0) == 255 else None


def _holds_image(space) -> bool:
    from gymnasium import spaces

    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        parts = space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces
        return any(_holds_image(part) for part in parts)
    return _is_image(space)


def _image_observer(shape: tuple[int, ...]) -> tuple[tuple[int, ...], type, Callable[[Any], Any]]:
    *stack, first, _, last = shape
    channels_last = last < first
    *_, c, h, w = (*stack, last, *shape[-3:-1]) if channels_last else shape
    out = (math.prod(stack) * c, h, w)

    def observe(obs: Any) -> np.ndarray:
        frames = np.asarray(obs)
        return (np.moveaxis(frames, -1, -3) if channels_last else frames).reshape(out)

    return out, np.uint8, observe


def checked_actions(spec: EnvSpec, actions: Any, n: int, where: str) -> np.ndarray:
    """`actions` of N environments as (N,) or (N, K) int64 or (N, A) f32.

    Raises
    ------
    TypeError
        For choices that are no integers.
    ValueError
        For another number of actions, one out of range, or one that is not a number.
    """
    actions = np.asarray(actions)
    if actions.size != n * math.prod(spec.action_shape):
        raise ValueError(f"{where}: actions must have shape {(n, *spec.action_shape)}, got {actions.shape}")
    if spec.continuous:
        actions = actions.astype(np.float32, copy=False)
        if np.isnan(actions).any():
            raise ValueError(f"{where}: actions must be numbers, got nan")
    else:
        if actions.dtype.kind not in "iub":
            raise TypeError(f"{where}: discrete actions must be integers, got dtype {actions.dtype}")
        actions = actions.astype(np.int64, copy=False)
    actions = actions.reshape(n, *spec.action_shape)
    if spec.discrete and (actions.min() < 0 or actions.max() >= spec.n_actions):
        raise ValueError(f"{where}: actions must be in [0, {spec.n_actions}), got {actions.tolist()}")
    if spec.n_choices is not None and ((actions < 0) | (actions >= spec.n_choices)).any():
        raise ValueError(f"{where}: actions must be >= 0 and below {spec.n_choices}, got {actions.tolist()}")
    return actions
