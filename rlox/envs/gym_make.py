"""Creation of gymnasium environments with arguments and wrappers."""

from __future__ import annotations

import functools
import importlib
import re
import sys
import types
import typing
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from rlox.config import nearest
from rlox.config.base import closest
from rlox.envs.registry import announce_all, env_name, foreign_id, native_env_ids
from rlox.processes.failures import frames_of, note_cause, require_exception

# Environments that `rlox.envs.gym_vec_env.GymVecEnv` steps in this process, without wrappers, by their ``id()``.
stepped: WeakValueDictionary[int, Any] = WeakValueDictionary()

_said_by_mujoco: set[str] = set()  # warnings, without their numbers

# Extras that install the libraries of gymnasium's own ids, by the module that gymnasium names as missing.
_EXTRAS = {"Box2D": "box2d", "mujoco": "mujoco", "ale_py": "atari", "opencv": "atari"}

# Ids of Atari games before ALE/NAME-v5, such as Pong-v4, Pong-ram-v0 and PongNoFrameskip-v4.
_OLD_ATARI = re.compile(r"(?:ALE/)?([A-Z][A-Za-z0-9]*?)((?:-ram)?(?:NoFrameskip|Deterministic))?(?:-ram)?-v\d+")
# A class, as in my_package:Mine, where an id is needed.
_CLASS = re.compile(r"([A-Za-z_][\w.]*)[:.]([A-Z]\w*)")
_VERSION = re.compile(r"-v\d+$")
# Ids that a package registers when it is imported: pattern, package and module.
_PACKAGES = (
    (r"MiniGrid-|BabyAI-", "minigrid", "minigrid"),
    (r"dm_control|dmc[_:/]", "'shimmy[dm-control]'", "shimmy"),
    (
        r"Fetch|Adroit|HandManipulate|HandReach|FrankaKitchen|AntMaze|PointMaze",
        "gymnasium-robotics",
        "gymnasium_robotics",
    ),
    (r"(highway|merge|roundabout|parking|intersection|racetrack)(-\w+)?-v\d", "highway-env", "highway_env"),
    (r"procgen[-:]", "procgen-gym", "procgen"),
)

# Default wrappers of `ALE/…` ids: up to 30 no-ops, the maximum of the last two of 4 frames, 84 x 84 greys, 4 of them
# stacked. Losing a life does not end the episode, as Machado et al. 2018 (arXiv:1709.06009, 4.1) advise.
ATARI_WRAPPERS = ("AtariPreprocessing", {"FrameStackObservation": {"stack_size": 4}})

# Wrappers that would make training differ from evaluation, or that repeat what rlox already does.
_REFUSED_WRAPPERS = {
    "NormalizeObservation": "its statistics would differ between training and evaluation; use normalize_obs=True",
    "NormalizeReward": "episode returns would no longer be the environment's; use normalize_rewards=True",
    "Autoreset": "rlox restarts episodes by itself",
}


def register_atari() -> None:
    """Register the ``ALE/…`` ids with gymnasium; raise an ImportError with the remedy if ale-py is not installed."""
    try:
        import ale_py
    except ImportError as e:
        raise ImportError('ALE environments need ale-py, which is not installed; pip install "rlox-cli[atari]"') from e
    import gymnasium

    gymnasium.register_envs(ale_py)
    # Otherwise its banner would appear in the output of this process.
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)


def make_gym_env(env: Any, kwargs: dict[str, Any] | None = None, wrappers: Sequence[Any] = ()):
    """Create one gymnasium environment.

    Parameters
    ----------
    env : str, callable or gymnasium.Env
        An id, a callable that returns an environment, or an environment (which is only wrapped).
    kwargs : dict, optional
        Arguments of ``gymnasium.make`` or of the callable.
    wrappers : sequence
        Innermost first; each is the name of a wrapper in ``gymnasium.wrappers``, a path such as
        ``my_package.wrappers:Mine``, or ``{name or path: {argument: value}}`` (lists are passed as tuples). The default
        for ``ALE/…`` ids is `ATARI_WRAPPERS`.

    Raises
    ------
    ValueError
        If the id or a wrapper is unknown (the message names the nearest), or does not accept its arguments.
    ImportError
        If a required package is not installed; the message names the extra that installs it.
    TypeError
        If `env` or a wrapper is none of the above.
    """
    if isinstance(wrappers, (str, Mapping)):
        raise TypeError(f"make_gym_env: wrappers must be a list, got {wrappers!r}")
    try:
        return _make_one(env, kwargs, wrappers)
    except BaseException as e:
        require_exception(e, f"make_gym_env: {env_name(env)}", f"making environment {env_name(env)}")
        # Errors of this module, and those about missing packages, already name the cause.
        if frames_of(e.__traceback__)[-1].module != "rlox" and not isinstance(e, ImportError):
            note_cause(e, f"making environment {env_name(env)}")
        raise


def _make_one(env: Any, kwargs: dict[str, Any] | None, wrappers: Sequence[Any]):
    import gymnasium

    if isinstance(env, gymnasium.Env):
        if kwargs:
            raise ValueError(f"make_gym_env: kwargs must be empty for an existing environment, got {kwargs}")
        created = env
    elif isinstance(env, str):
        env = foreign_id(env)
        kwargs = dict(kwargs or {})
        if env.startswith("ALE/"):
            register_atari()
            wrappers = wrappers or ATARI_WRAPPERS
            if any(_split_item(item)[0] == "AtariPreprocessing" for item in wrappers):
                kwargs.setdefault("frameskip", 1)  # the wrapper skips frames itself
        created = _from_id(env, kwargs)
    elif callable(env):
        created = env(**(kwargs or {}))
        if not isinstance(created, gymnasium.Env):
            several = hasattr(created, "possible_agents")
            hint = "; for an environment with several agents, use MAPPO(NAME, env_fn=FUNCTION)" if several else ""
            raise TypeError(f"make_gym_env: env must return a gymnasium.Env, got {type(created).__name__}{hint}")
    else:
        raise TypeError(f"make_gym_env: env must be an id, a callable or a gymnasium.Env, got {env!r}")
    for item in wrappers:
        created = _wrap(created, item)
    return created


def whole_games(wrappers: Sequence[Any]) -> list[Any]:
    """Return `wrappers` without the option that ends an episode at a lost life, since scores are of whole games."""
    items = []
    for item in wrappers:
        name, arguments = _split_item(item)
        ends = re.split("[.:]", name)[-1] == "AtariPreprocessing" and arguments.pop("terminal_on_life_loss", False)
        items.append({name: arguments} if ends else item)
    return items


def make_fresh_gym_env(env: Any, kwargs: dict[str, Any] | None = None, wrappers: Sequence[Any] = ()):
    """Same as `make_gym_env`, but create a new environment from the spec of a given one, which stays unchanged.

    A function that returns an environment in use (see `stepped`) also gives such an environment. A ValueError is raised
    if the environment has no spec, or ``gymnasium.make`` fails with it.
    """
    import gymnasium

    if not isinstance(env, gymnasium.Env):
        created = make_gym_env(env, kwargs, wrappers)
        if stepped.get(id(created.unwrapped)) is None:
            return created
        env, kwargs, wrappers = created, None, ()
    try:
        if env.spec is None:
            raise ValueError("it has no spec")
        copy = gymnasium.make(env.spec, **(kwargs or {}))
    except Exception as e:
        raise ValueError(
            f"make_fresh_gym_env: env must be an id or a callable here, got an environment ({type(env).__name__}) "
            f"that cannot be created again: {e}; pass lambda: {type(env.unwrapped).__name__}(...) instead"
        ) from e
    return make_gym_env(copy, None, wrappers)


def least_limit(limits: Iterable[Any]) -> int | None:
    """Return the smallest of the time limits, in steps; None if none of them is a positive integer."""
    return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)


def limit_of_layers(env: Any) -> int | None:
    """Return the smallest TimeLimit among a gymnasium environment and its wrappers, in steps; None without one."""
    limits = []
    while env is not None:
        limits.append(getattr(env, "_max_episode_steps", None))
        env = getattr(env, "env", None)
    return least_limit(limits)


def _from_id(env: str, kwargs: dict[str, Any]):
    import gymnasium
    from gymnasium import error

    if env.startswith("rlox/") and env not in gymnasium.registry:
        announce_all()
    _listen_to_mujoco(gymnasium.registry.get(env))
    try:
        return gymnasium.make(env, **kwargs)
    except error.Error as e:
        if isinstance(e, error.DependencyNotInstalled) or isinstance(e.__cause__, ImportError):
            raise _missing(env, f"{e} {e.__cause__ or ''}") from e
        # A registered environment may itself create others that are not registered.
        if isinstance(e, error.UnregisteredEnv) and env.rpartition(":")[2] not in gymnasium.registry:
            raise ValueError(f"make_gym_env: env must be a registered id, got {env!r}; {nearest_id(env)}") from e
        raise ValueError(f"make_gym_env: {env} cannot be created: {e}") from e
    except TypeError as e:
        if "render_mode" in kwargs and "unexpected keyword argument 'render_mode'" in str(e):
            raise ValueError(f"make_gym_env: {env} draws nothing: it does not take a render_mode") from e
        what = f"does not take kwargs {kwargs!r}" if kwargs else "cannot be created"
        raise ValueError(f"make_gym_env: {env} {what}: {e}") from e


def _listen_to_mujoco(spec: Any) -> None:
    """Let MuJoCo warn through Python, each kind once. By itself it prints them all, and appends them to a file in the
    working directory. A handler that is already set stays."""
    if "mujoco" not in sys.modules and "mujoco" not in str(getattr(spec, "entry_point", "")):
        return
    with suppress(ImportError, AttributeError):  # it is not installed, or older than these functions
        import mujoco

        if mujoco.get_mju_user_warning() is None:
            mujoco.set_mju_user_warning(_warn_for_mujoco)


def _warn_for_mujoco(text: str) -> None:
    kind = re.sub(r"[\d.]+", "…", text)
    if kind not in _said_by_mujoco:
        _said_by_mujoco.add(kind)
        with suppress(Warning):  # an exception cannot pass through MuJoCo
            warnings.warn(f"MuJoCo: {text}", RuntimeWarning, stacklevel=2)


def _missing(what: str, text: str) -> ImportError:
    extra = next((extra for module, extra in _EXTRAS.items() if module.lower() in text.lower()), None)
    remedy = f'pip install "rlox-cli[{extra}]"' if extra else text.strip()
    return ImportError(f"make_gym_env: {what} needs a package that is not installed; {remedy}")


def nearest_id(env: str) -> str:
    """Return a hint for an id that is not registered: what it is called here, the package that has it, or a near id."""
    import gymnasium

    known = [name for name in gymnasium.registry if not name.startswith("rlox/") or env.startswith("rlox/")]
    if game := _OLD_ATARI.fullmatch(env):
        with suppress(ImportError):
            register_atari()
        if (now := f"ALE/{game[1]}-v5") in gymnasium.registry:
            return f"did you mean {now!r}? (its frames are skipped, scaled and stacked by default)"
        if game[2]:
            return f'Atari games are ALE/{game[1]}-v5 here, and need pip install "rlox-cli[atari]"'
    for pattern, package, module in _PACKAGES:
        if re.match(pattern, env):
            install = "" if find_spec(module) else f"pip install {package}, then "
            return f"{module} registers such ids: {install}add --import {module} (library: import {module})"
    if named := _CLASS.fullmatch(env):
        module, name = named.groups()
        return (
            f"a class needs an id: add gymnasium.register('{name}-v0', {name}) to {module}; then {module}:{name}-v0 is "
            f"its id, or {name}-v0 with --import {module} (library: import {module})"
        )
    # Equal versions do not make two ids alike. The newest version comes last, and native ids after all others.
    newest = {_VERSION.sub("", name): name for name in (*sorted(known), *native_env_ids())}
    close = closest(_VERSION.sub("", env), newest)
    return f"did you mean {newest[close]!r}?" if close is not None else "`rlox ls envs` lists the ids"


def _split_item(item: Any) -> tuple[str, dict[str, Any]]:
    """Return the name and arguments of one item of `wrappers`."""
    if isinstance(item, Mapping):
        arguments = next(iter(item.values()), None)
        if len(item) == 1 and (arguments is None or isinstance(arguments, Mapping)):
            converted = {key: tuple(v) if isinstance(v, list) else v for key, v in (arguments or {}).items()}
            return str(next(iter(item))), converted
    elif isinstance(item, str):
        return item, {}
    raise TypeError(
        f"make_gym_env: each of wrappers must be a name or {{name: {{argument: value}}}}, got {item!r}; for anything "
        "else, pass a callable as env"
    )


def _wrapper_class(name: str) -> Callable[..., Any]:
    from gymnasium import wrappers

    module, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    if not module:
        if name in _REFUSED_WRAPPERS:
            raise ValueError(f"make_gym_env: wrappers must not contain {name}: {_REFUSED_WRAPPERS[name]}")
        known = [n for n in wrappers.__all__ if n[0].isupper()]
        if name not in known:
            raise ValueError(
                f"make_gym_env: wrappers must be names of gymnasium.wrappers or paths package.module:Name, got "
                f"{name!r}; {nearest(name, known)}"
            )
        return getattr(wrappers, name)
    try:
        target: Any = importlib.import_module(module)
        target = functools.reduce(getattr, attribute.split("."), target)
    except ImportError as e:
        own = isinstance(e, ModuleNotFoundError) and f"{module}.".startswith(f"{e.name}.")
        remedy = f"; add --import {module}, which also looks in the working folder (library: sys.path)" if own else ""
        raise ImportError(f"make_gym_env: wrapper {name!r} cannot be imported: {e}{remedy}") from e
    except AttributeError as e:
        public = [n for n in vars(importlib.import_module(module)) if not n.startswith("_")]
        if module == "__main__":  # which is another module in a process of env_workers or of a checkpoint's user
            raise ValueError(
                f"make_gym_env: wrapper {name!r} is not in the script of this process; define it in a module"
            ) from e
        raise ValueError(
            f"make_gym_env: wrapper {name!r} does not exist in {module}; {nearest(attribute, public)}"
        ) from e
    for refused, reason in _REFUSED_WRAPPERS.items():
        if target is getattr(wrappers, refused, None):
            raise ValueError(f"make_gym_env: wrappers must not contain {name}: {reason}")
    return target


def _convert_arguments(name: str, wrapper: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of one of gymnasium's wrappers, with lists as arrays where it needs an array.

    A ValueError is raised for other types: some wrappers check no types, and fail later, in a step.
    """
    try:
        hints = typing.get_type_hints(wrapper.__init__)
    except (AttributeError, NameError, TypeError):
        return arguments
    converted = {}
    for key, value in arguments.items():
        hint = hints.get(key, Any)
        options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
        if not any(_fits(value, option) for option in options):
            if np.ndarray in options and isinstance(value, tuple):
                value = np.array(value)
            else:
                function = any(typing.get_origin(option) is Callable for option in options)
                kind = "a function" if function else re.sub(r"<class '(.*)'>", r"\1", str(hint))
                remedy = "; write a wrapper of your own, and name it as my_package:Wrapper" if function else ""
                raise ValueError(f"make_gym_env: {key} of the wrapper {name} must be {kind}, got {value!r}{remedy}")
        converted[key] = value
    return converted


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a value of a configuration may be meant by an annotation."""
    origin = typing.get_origin(kind) or kind
    if kind is Any or not isinstance(origin, type) or value is None:
        return True
    if origin is Callable:
        return callable(value)
    if issubclass(origin, (float, np.number)) or origin is typing.SupportsFloat:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if issubclass(origin, Sequence) and origin is not str:
        return isinstance(value, (list, tuple))
    return isinstance(value, origin)


def _wrap(env, item: Any):
    import gymnasium

    name, arguments = _split_item(item)
    wrapper = _wrapper_class(name)
    if wrapper.__module__.startswith("gymnasium."):
        arguments = _convert_arguments(name, wrapper, arguments)
    try:
        wrapped = wrapper(env, **arguments)
    except gymnasium.error.DependencyNotInstalled as e:
        raise _missing(f"wrapper {name}", str(e)) from e
    except (TypeError, ValueError, AssertionError, gymnasium.error.Error) as e:
        raise ValueError(f"make_gym_env: wrapper {name} does not accept {env} with {arguments!r}: {e}") from e
    if not isinstance(wrapped, gymnasium.Env):
        raise TypeError(f"make_gym_env: wrapper {name} must return a gymnasium.Env, got {type(wrapped).__name__}")
    return wrapped
