"""Creation of PettingZoo environments."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from typing import Any

from rlox.envs.registry import ZOO, env_name, is_native_multi_agent
from rlox.processes.failures import frames_of, note_cause, require_exception

# Packages with environments, searched for a module that is given without its package.
_PACKAGES = ("mpe2", "pettingzoo.butterfly", "pettingzoo.classic", "pettingzoo.sisl", "pettingzoo.atari")
_REMEDY = 'pip install "rlox-cli[multi-agent]" installs pettingzoo and mpe2'


def make_zoo_env(env: str | Callable[..., Any], kwargs: Mapping[str, Any] | None = None) -> Any:
    """Create a PettingZoo environment with the parallel interface.

    `env` is ``pettingzoo:package.module``, ``package.module:factory``, a native id, or a callable that returns an
    environment. An AEC environment is converted by ``pettingzoo.utils.conversions.aec_to_parallel``, or, unless it says
    that its agents may act together, by ``turn_based_aec_to_parallel``.

    Raises
    ------
    ValueError, TypeError
        If the environment does not exist, rejects its arguments, or has another interface.
    ImportError
        If a package is missing. The message names the remedy.
    """
    where = f"make_zoo_env: {env_name(env)}"
    try:
        created = _factory(env)(**(kwargs or {}))
    except BaseException as e:
        require_exception(e, f"{where}: the environment", f"making environment {env_name(env)}")
        if isinstance(env, str) and kwargs and isinstance(e, TypeError) and "unexpected keyword argument" in str(e):
            raise ValueError(f"{where} does not take kwargs {dict(kwargs)}: {e}") from e
        if frames_of(e.__traceback__)[-1].module != "rlox":
            note_cause(e, f"making environment {env_name(env)}")
        raise
    zoo = sys.modules.get("pettingzoo")  # already imported if this is an AEC environment
    if zoo is not None and isinstance(created, zoo.AECEnv):
        from pettingzoo.utils.conversions import aec_to_parallel, turn_based_aec_to_parallel

        together = created.metadata.get("is_parallelizable", False)
        return aec_to_parallel(created) if together else turn_based_aec_to_parallel(created)
    missing = [name for name in ("reset", "step", "observation_space", "action_space") if not hasattr(created, name)]
    if missing:
        raise TypeError(
            f"{where} must be a PettingZoo environment with the parallel interface, got {type(created).__name__}, "
            f"which has no {missing[0]}"
        )
    return created


def takes_turns(env: Any) -> bool:
    """Return whether one agent of an environment acts in each step: one that ``turn_based_aec_to_parallel`` made."""
    return type(env).__name__ == "turn_based_aec_to_parallel_wrapper"


def _factory(env: str | Callable[..., Any]) -> Callable[..., Any]:
    if not isinstance(env, str):
        if not callable(env):
            raise TypeError(
                f"make_zoo_env: env must be an id or a callable that returns an environment, got {type(env).__name__}"
            )
        return env
    if is_native_multi_agent(env):
        from rlox.multi_agent.scene import parallel_env

        return lambda **kwargs: parallel_env(env, **kwargs)
    path, _, attribute = env.removeprefix(ZOO).partition(":")
    if not path or (":" not in env):
        raise ValueError(
            f"make_zoo_env: env must be pettingzoo:package.module, package.module:factory or a native id with several "
            f"agents, got {env!r}; try pettingzoo:mpe2.simple_spread_v3 or GridPursuit-v0"
        )
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as e:
        raise ImportError(f"make_zoo_env: {env} cannot be imported: {e}; {_hint(path, e)}") from e
    names = [attribute] if attribute else ["parallel_env", "env"]
    factory = next((getattr(module, name) for name in names if hasattr(module, name)), None)
    if not callable(factory):
        raise ValueError(
            f"make_zoo_env: {env} must name a module with a function {' or '.join(names)} that returns an environment, "
            f"got one without; name the function, like {ZOO}{path}:my_env"
        )
    return factory


def _hint(path: str, e: ModuleNotFoundError) -> str:
    if e.name is None or not (path == e.name or path.startswith(e.name + ".")):
        return f"it needs {e.name}; for PettingZoo's own families use extras, like pip install 'pettingzoo[butterfly]'"
    for package in _PACKAGES:
        try:
            if importlib.util.find_spec(f"{package}.{path}") is not None:
                return f"did you mean {ZOO}{package}.{path}?"
        except ImportError:
            continue
    return _REMEDY
