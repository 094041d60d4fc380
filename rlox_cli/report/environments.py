"""``rlox ls envs``: the environments that can run on this machine, and what the others need."""

from __future__ import annotations

import functools
import pkgutil
import re
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from rich.console import Console

from rlox.config.offers import offers
from rlox.envs import native_env_ids, origin
from rlox.envs.gym_make import register_atari
from rlox.envs.registry import ENV_GROUP, TASKS, ZOO
from rlox.envs.tensor.table import TENSOR_AGENT_ENVS, TENSOR_ENVS, tensor_agent_ids, tensor_env_ids
from rlox.kernels.envs import NATIVE_ENVS
from rlox.kernels.envs.native_env import native_multi_agent_ids

_OLD_MUJOCO = ("Pusher-v4",)  # needs MuJoCo 2


def list_envs(console: Console) -> None:
    """Print the ids of all environments that can run here, by where they come from, and what the others lack."""
    import gymnasium

    def print_ids(names: list[str]) -> None:
        for name in names:
            console.print(f"  {name}")

    console.print("native (compiled, same dynamics as gymnasium's):")
    print_ids(list(NATIVE_ENVS))
    native = native_env_ids()
    if outside := [name for name in native if name not in NATIVE_ENVS]:
        console.print("native, from other packages:")
        print_ids([f"{name} ({_source(name)})" for name in outside])
    console.print("native, with several agents (algo=mappo):")
    print_ids(native_multi_agent_ids())
    console.print("with a version of tensors (env.backend=tensor), on a GPU or the CPU:")
    print_ids([*map(_describe_tensor_env, [*tensor_env_ids(), *tensor_agent_ids()])])
    console.print("rlox's own, in Python (for agents with a memory, and with masks of invalid actions):")
    print_ids(list(TASKS))
    lacking: dict[str, str] = {}
    try:
        register_atari()
    except ImportError:
        lacking["ALE"] = 'pip install "rlox-cli[atari]"'
    groups: dict[str, list[str]] = {}
    for name, spec in gymnasium.registry.items():
        if name in native or name in TASKS or name.startswith("rlox/"):
            continue
        entry = spec.entry_point if isinstance(spec.entry_point, str) else "other"
        group = entry.removeprefix("gymnasium.envs.").split(".")[0].split(":")[0]
        if (reason := _obstacle(spec)) is None:
            groups.setdefault(group, []).append(name)
        elif reason:
            lacking[group] = reason
    console.print("gymnasium's (one process, one core):")
    for group, names in sorted(groups.items()):
        console.print(f"  {group}: {', '.join(sorted(names))}")
    _list_other_packages(console, lacking)
    if lacking:
        console.print("not on this machine, for lack of a package:")
        print_ids([f"{group}: {reason}" for group, reason in sorted(lacking.items())])


def _list_other_packages(console: Console, lacking: dict[str, str]) -> None:
    """Print the environments of PettingZoo and EnvPool; what is not installed is added to `lacking`."""
    if find_spec("pettingzoo") is None or find_spec("mpe2") is None:
        lacking["pettingzoo"] = 'pip install "rlox-cli[multi-agent]"'
    else:
        folder = import_module("mpe2").__path__
        names = [item.name for item in pkgutil.iter_modules(folder) if re.search(r"_v\d+$", item.name)]
        console.print("PettingZoo's, with several agents (algo=mappo), and any module with a parallel environment:")
        console.print(f"  mpe2: {', '.join(f'{ZOO}mpe2.{name}' for name in sorted(names))}")
    if find_spec("envpool") is None:
        lacking["envpool"] = 'pip install "rlox-cli[envpool]"'
    else:
        console.print(
            "EnvPool's, with env.backend=envpool, if gymnasium has the same: envpool.list_all_envs() lists them"
        )


def _describe_tensor_env(env_id: str) -> str:
    algos = "mappo" if env_id in tensor_agent_ids() else "ppo, a2c, mappo"
    source = "" if env_id in TENSOR_ENVS or env_id in TENSOR_AGENT_ENVS else "registered by a module; "
    return f"{env_id} ({source}algo={algos})"


def _source(name: str) -> str | None:
    offer = offers(ENV_GROUP).get(name)
    return offer.module if offer else origin(name)


def _obstacle(spec: Any) -> str | None:
    """Return None if an environment can be created here, else how to change that; empty if there is no way."""
    entry = spec.entry_point
    if entry is None or getattr(entry, "__name__", "").startswith("_raise_"):
        return ""  # gymnasium's old names only raise an error
    if not isinstance(entry, str):
        return None
    module = entry.partition(":")[0]
    if module.partition(".")[0] == "ale_py" and not spec.id.startswith("ALE/"):
        return ""  # ale-py's old names, of which a training says what they are called now
    if module.startswith("gymnasium.envs.mujoco."):
        if find_spec("mujoco") is None:
            return 'pip install "rlox-cli[mujoco]"'
        return "" if spec.id in _OLD_MUJOCO and _major("mujoco") > 2 else None
    return _import_error(module)


@functools.cache
def _import_error(module: str) -> str | None:
    """Return None if a module can be imported, else the first line of its error."""
    try:
        import_module(module)
    except Exception as e:  # other packages' code
        return (str(e).strip().splitlines() or [type(e).__name__])[0]
    return None


def _major(package: str) -> int:
    try:
        return int(version(package).partition(".")[0])
    except (PackageNotFoundError, ValueError):
        return 0
