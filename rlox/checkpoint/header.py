"""A checkpoint's JSON header: the versions that it records, and its validation before another module sees it."""

from __future__ import annotations

import json
import math
import platform
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from rlox.checkpoint.checks import is_count, one_line
from rlox.checkpoint.counters import Counters
from rlox.checkpoint.values import decode_value
from rlox.config.base import MOST_THREADS

FORMAT = "rlox-checkpoint"
FORMAT_VERSION = 1
# Keys that every header must have for `from_checkpoint`.
HEADER_KEYS = ("algorithm", "config", "counters", "env", "generators", "policy", "sections", "seed", "threads")
# The parts with values of any type, such as the arguments of an environment.
VALUES_OF_USERS = ("callbacks", "env")
# The parts with settings: plain JSON, except that some settings may be infinite.
SETTINGS = ("config", "run")
# A header has about ten kilobytes. One that is longer than this, or has more parts, is not even parsed.
_MOST_BYTES = 8 << 20
_MOST_PARTS = 200_000


@cache
def versions(device: str = "cpu") -> dict[str, str]:
    """Return the versions of everything that can change a run's results, without importing any of it.

    For a run on ``cuda``, whose PyTorch is imported already, they include the GPU's name and compute capability, the
    driver, CUDA and cuDNN.
    """
    from rlox import __version__
    from rlox.kernels import CPU_LEVEL

    packages = {}
    for name in ("torch", "numpy", "gymnasium"):
        try:
            packages[name] = metadata.version(name)  # slow, hence the cache: parses the package's whole description
        except metadata.PackageNotFoundError:
            continue
    gpu = _gpu_versions() if device == "cuda" else {}
    machine = {"platform": f"{sys.platform}-{platform.machine()}", "cpu_level": str(CPU_LEVEL)}
    return {"rlox": __version__, "python": platform.python_version(), **packages, **machine, **gpu}


def _gpu_versions() -> dict[str, str]:
    import torch

    major, minor = torch.cuda.get_device_capability()
    versions = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return {
        "gpu": torch.cuda.get_device_name(),
        "compute_capability": f"{major}.{minor}",
        **{name: str(version) for name, version in versions.items()},
        **({} if (driver := _driver_version()) is None else {"driver": driver}),
    }


def _driver_version() -> str | None:
    """Return the version of NVIDIA's driver; None where Linux does not say it."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    version = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return None if version is None else version[0]


def trained_for(header: dict[str, Any]) -> tuple[int, str]:
    """Return how long a header's training ran, and the unit: environment steps, or updates if it was offline.

    >>> trained_for({"counters": {"env_steps": 0, "updates": 500}})
    (500, 'updates')
    """
    counters = header["counters"]
    steps = counters["env_steps"]
    return (steps, "steps") if steps or not counters["updates"] else (counters["updates"], "updates")


def _is_name(value: Any) -> bool:
    """Whether `value` may be printed and looked up in a table."""
    return isinstance(value, str) and 0 < len(value) <= 500 and value.isprintable()


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _are_settings(value: Any) -> bool:
    """Whether `value` maps names to values that kernels accept: no integer has more than 64 bits."""
    items = [x for item in value.values() for x in (item if isinstance(item, list) else [item])] if value else []
    return all(abs(x) < 2**63 for x in items if isinstance(x, int))


_COUNTERS = {item.name for item in fields(Counters) if item.type == "int"}


def _are_counters(value: Any) -> bool:
    known = {"env_steps", "updates", "episodes", "horizon_start", "horizon_steps"}
    return _is_object(value) and known <= value.keys() <= _COUNTERS and all(map(is_count, value.values()))


def _is_env(value: Any) -> bool:
    return (
        _is_object(value)
        and "id" in value
        and (value["id"] is None or _is_name(value["id"]))
        and is_count(value.get("n_envs"))
        and value["n_envs"] >= 1
        and _is_object(value.get("kwargs"))
        and all(isinstance(name, str) for name in value["kwargs"])
        and isinstance(value.get("callable", False), bool)
        and isinstance(value.get("wrappers"), list)
        and all(_is_name(x) or (_is_object(x) and len(x) == 1) for x in value["wrappers"])
        and is_count(value.get("workers"))
        and _is_name(value.get("backend", "auto"))
    )


def _are_spaces(value: Any) -> bool:
    sizes = ("obs_dim", "act_dim")
    return (
        _is_object(value)
        and value.keys() - {"masked"} == {*sizes, "continuous"}
        and isinstance(value.get("masked", False), bool)
        and all(is_count(value[name]) and value[name] >= 1 for name in sizes)
        and isinstance(value["continuous"], bool)
    )


def _are_generators(value: Any) -> bool:
    return _is_object(value) and all(
        _is_object(x) and x.keys() == {"key", "position"} and all(is_count(n, 2**64) for n in x.values())
        for x in value.values()
    )


def _integer(text: str) -> int:
    # An environment's seed may have 128 bits.
    if len(text) > 40:
        raise ValueError("it has an integer of more than 40 digits")
    return int(text)


def _real(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"it contains the number {text}")
    return value


def _parts(text: str) -> int:
    """Approximate number of objects in the JSON `text`."""
    return sum(map(text.count, "[{,"))


def parse_json(text: str) -> Any:
    """Parse JSON like `json.loads`, for untrusted text.

    Raises
    ------
    ValueError
        If it is not JSON, is nested too deeply, has too many parts, integers of more than 40 digits or numbers that are
        not finite.
    """
    if _parts(text) > _MOST_PARTS:
        raise ValueError(f"it has more than {_MOST_PARTS:,} parts")
    try:
        return json.loads(text, parse_int=_integer, parse_float=_real, parse_constant=_real)
    except RecursionError:
        raise ValueError("its objects are nested too deeply") from None


def _header(path: Path, text: str, keys: Sequence[str]) -> dict[str, Any]:
    """Return the JSON header, with every known value checked."""
    try:
        header = parse_json(text)
        version = header["format_version"]
        header |= {key: decode_value(header[key]) for key in (*VALUES_OF_USERS, *SETTINGS) if key in header}
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise ValueError(
            f"load_checkpoint: {path} is damaged: its header is not a valid JSON object ({one_line(e)})"
        ) from e
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise ValueError(
            f"load_checkpoint: {path} has format version {one_line(version, 40)}, this rlox reads {FORMAT_VERSION}; "
            "update rlox-cli"
        )
    missing = [key for key in keys if key not in header]
    if missing:
        raise ValueError(f"load_checkpoint: {path} is damaged: its header lacks {', '.join(missing)}")
    for key, (holds, rule) in _RULES.items():
        if key in header and not holds(header[key]):
            raise ValueError(
                f"load_checkpoint: {path} is damaged: {key} in its header must {rule}, got {one_line(header[key], 80)}"
            )
    return header


# Rules for the values of a header, by key.
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "algorithm": (_is_name, "be a name"),
    "backend": (_is_name, "be a name"),
    "buffer": (lambda x: _is_object(x) and _is_name(x.get("name")) and _are_settings(x), "be settings with a name"),
    "callbacks": (_is_object, "be an object"),
    "config": (lambda x: _is_object(x) and _are_settings(x), "be settings"),
    "counters": (_are_counters, f"contain counts named {', '.join(sorted(_COUNTERS))}"),
    "env": (_is_env, "contain id, n_envs >= 1, kwargs, wrappers and workers"),
    "file": (_is_name, "be a name"),
    "generators": (_are_generators, "contain key and position, integers below 2**64, of each generator"),
    "memory": (_is_object, "be an object"),
    "memory_start": (is_count, "be a count"),
    "policy": (lambda x: x in ("default", "custom"), "be default or custom"),
    "reward_fn": (lambda x: x is None or _is_name(x), "be a name or null"),
    "spaces": (_are_spaces, "contain obs_dim, act_dim and continuous"),
    "seed": (lambda x: is_count(x, 2**64), "be an integer in [0, 2**64)"),
    "threads": (lambda x: is_count(x, MOST_THREADS + 1), f"be an integer in [0, {MOST_THREADS}]"),
    "values": (_is_object, "be an object"),
}
