"""Environments in messages: their description in a welcome, their name in a hello, and checks of received arrays."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlox.envs.masks import describe_blocked
from rlox.envs.protocols import step_layout
from rlox.envs.remote.codec import Message, ProtocolError
from rlox.envs.spec import EnvSpec

MOST_ENVS = 2**20  # environments of a learner, on all its workers
_MOST_NUMBERS = 2**24  # numbers in one observation
_LONGEST_NAME = 200
_MOST_PARTS = 1000
NO_SEED = -1


def spec_message(spec: EnvSpec) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Convert an `EnvSpec` to fields and arrays of a message."""
    fields = {
        "obs_shape": list(spec.obs_shape),
        "obs_dtype": np.dtype(spec.obs_dtype).name,
        "n_stacked": spec.n_stacked,
        "obs_bytes": None if spec.obs_bytes is None else list(spec.obs_bytes),
        "n_actions": spec.n_actions,
        "n_choices": None if spec.n_choices is None else list(map(int, spec.n_choices)),
        "act_dim": spec.act_dim,
        "masked": spec.masked,
        "mask_source": spec.mask_source,
        "parts": [list(part) for part in spec.parts],
        "images": [list(image) for image in spec.images],
    }
    return fields, {} if spec.act_dim is None else {"act_low": spec.act_low, "act_high": spec.act_high}  # type: ignore[dict-item]


def read_spec(message: Message) -> EnvSpec:
    """Return the `EnvSpec` in a welcome; raise a `ProtocolError` if it is invalid, or has implausible sizes."""
    fields = message.fields.get("spec")
    if not isinstance(fields, dict):
        raise ProtocolError(f"spec must be an object, got {str(fields)[:80]}")
    obs_shape = _sizes(fields, "obs_shape", 4)
    dtype = fields.get("obs_dtype")
    if dtype not in ("float32", "uint8"):
        raise ProtocolError(f"obs_dtype must be float32 or uint8, got {str(dtype)[:40]!r}")
    kinds = [name for name in ("n_actions", "n_choices", "act_dim") if fields.get(name) is not None]
    if len(kinds) != 1:
        raise ProtocolError(f"actions must be of one kind, got {kinds}")
    actions: dict[str, Any] = {}
    if kinds == ["n_choices"]:
        actions["n_choices"] = _sizes(fields, "n_choices", 4096, 2**31)
    else:
        actions[kinds[0]] = _size(fields, kinds[0], 2**31 if kinds == ["n_actions"] else 2**20)
    if kinds == ["act_dim"]:
        for name in ("act_low", "act_high"):
            bound = message.arrays.get(name)
            if bound is None or bound.dtype != np.float32 or bound.shape != (actions["act_dim"],):
                raise ProtocolError(f"{name} must be {actions['act_dim']} float32 numbers, got {_describe(bound)}")
            actions[name] = np.array(bound)
    masked, source = fields.get("masked", False), fields.get("mask_source", "")
    if type(masked) is not bool or (masked and "act_dim" in actions):
        raise ProtocolError(f"masked must be a flag, and false without choices, got {str(masked)[:40]}")
    if not isinstance(source, str) or len(source) > _LONGEST_NAME:
        raise ProtocolError(f"mask_source must be a text, got {str(source)[:80]}")
    parts = fields.get("parts")
    sound = isinstance(parts, list) and len(parts) <= _MOST_PARTS and all(_is_part(part) for part in parts)
    if not sound:
        raise ProtocolError(f"parts must be names with sizes, got {str(parts)[:80]}")
    images = fields.get("images", [])
    if not isinstance(images, list) or len(images) > _MOST_PARTS:
        raise ProtocolError(f"images must be a list, got {str(images)[:80]}")
    end = 0  # of the previous images
    for image in images:
        sound = isinstance(image, list) and len(image) == 4 and all(type(v) is int and v >= 0 for v in image)
        if not sound or len(obs_shape) != 1 or image[0] < end or 0 in image[1:]:
            raise ProtocolError(f"images must be parts of the observation, one after the other, got {str(image)[:80]}")
        end = image[0] + math.prod(image[1:])
        if end > obs_shape[0]:
            raise ProtocolError(f"images must be within the observation, got {str(image)[:80]}")
    return EnvSpec(
        obs_shape,
        np.float32 if dtype == "float32" else np.uint8,
        images=tuple(tuple(image) for image in images),
        n_stacked=_size(fields, "n_stacked", 1000),
        obs_bytes=None if fields.get("obs_bytes") is None else _sizes(fields, "obs_bytes", 8),
        masked=masked,
        mask_source=source,
        parts=tuple((name, size) for name, size in parts),  # type: ignore[union-attr]
        **actions,
    )


def _is_part(part: Any) -> bool:
    return (
        isinstance(part, list)
        and len(part) == 2
        and isinstance(part[0], str)
        and len(part[0]) <= _LONGEST_NAME
        and type(part[1]) is int
        and 0 <= part[1] <= _MOST_NUMBERS
    )


def _size(fields: Mapping[str, Any], name: str, most: int) -> int:
    value = fields.get(name)
    if type(value) is not int or not 1 <= value <= most:
        raise ProtocolError(f"{name} must be an integer from 1 to {most:,}, got {str(value)[:40]}")
    return value


def _sizes(fields: Mapping[str, Any], name: str, n: int, most: int = _MOST_NUMBERS) -> tuple[int, ...]:
    value = fields.get(name)
    sound = isinstance(value, list) and len(value) <= n and all(type(v) is int and 0 < v <= most for v in value)
    if not sound or (most == _MOST_NUMBERS and math.prod(value) > most):  # type: ignore[arg-type]
        raise ProtocolError(
            f"{name} must be at most {n} sizes above 0, with a product of at most {most:,}, got {str(value)[:80]}"
        )
    return tuple(value)  # type: ignore[arg-type]


def _describe(array: np.ndarray | None) -> str:
    return "nothing" if array is None else f"{array.dtype} {array.shape}"


def require_array(message: Message, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return an array of a message; raise a `ProtocolError` unless it has this shape and dtype."""
    array = message.arrays.get(name)
    if array is None or array.shape != shape or array.dtype != dtype:
        raise ProtocolError(f"{message.kind}: {name} must be {np.dtype(dtype)} {shape}, got {_describe(array)}")
    return array


def require_masks(message: Message, name: str, n: int, spec: EnvSpec) -> np.ndarray:
    """Return an array of masks of a message; raise a `ProtocolError` unless each of the `n` allows some action."""
    masks = require_array(message, name, (n, sum(spec.choices)), np.bool_)
    if (wrong := describe_blocked(masks, spec.choices)) is not None:
        raise ProtocolError(f"{message.kind}: {name} must allow {wrong[1]}, got none in row {wrong[0]}")
    return masks


def step_bytes(spec: EnvSpec, n: int) -> int:
    """Return the approximate bytes of the largest answer to a step of `n` environments."""
    return 4096 + sum(math.prod(shape) * np.dtype(dtype).itemsize + 8 for shape, dtype in step_layout(spec, n).values())


def describe(env: str, kwargs: Mapping[str, Any] | None, wrappers: Sequence[Any]) -> dict[str, Any]:
    """Return the description of an environment in a hello."""
    # Converted to JSON types, so that two descriptions can be compared.
    return json.loads(json.dumps({"id": env, "kwargs": dict(kwargs or {}), "wrappers": list(wrappers)}, default=str))
