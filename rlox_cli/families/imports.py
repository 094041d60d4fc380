"""``--import``: modules of the user, loaded before environments or algorithms are looked up."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from rlox.checkpoint import one_line
from rlox.collectors import REWARDS
from rlox.config import nearest
from rlox.config.offers import load, offers
from rlox.envs.registry import REWARD_GROUP, find_module, worker_imports
from rlox.kernels.envs import NATIVE_ENVS
from rlox_cli.terminal.errors import UsageError

_OWN = "rlox.llm.toy"  # its functions need no --import


def import_modules(names: Iterable[str], source: str = "--import") -> None:
    """Import each module, looking in the working directory first and then in the environment, as ``python -m`` does.

    `source` names what was typed, for error messages.

    Raises
    ------
    UsageError
        If a name cannot be a module's, a module does not exist, or its own code fails.
    """
    names = list(names)
    if names and not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            hint = name.removesuffix(".py").strip("./").replace("/", ".")
            raise UsageError(
                f"{source} must be a module's dotted name, got {name!r}; try {source} {hint or 'my_package'}"
            )
        try:
            module = import_module(name)
        except ModuleNotFoundError as e:
            if e.name is None or not f"{name}.".startswith(f"{e.name}."):
                raise UsageError(f"{source} {name}: it needs the module {e.name}, which is not installed") from e
            raise UsageError(
                f"{source} {name}: there is no such module in {os.getcwd()} or the environment; run rlox from the "
                "folder that contains it, or install it with pip"
            ) from e
        except Exception as e:  # the user's own code
            raise UsageError(f"{source} {name}: its code failed with {type(e).__name__}: {e}") from e
        if getattr(module, "__file__", "") is None:
            folder = next(iter(module.__path__))
            raise UsageError(
                f"{source} {name}: {folder} is a folder without __init__.py, which has no code; if the module is in "
                "it, run rlox from there"
            )
        if name not in worker_imports:
            worker_imports.append(name)


def import_words(modules: Iterable[str]) -> list[str]:
    """Return the words of a command that import `modules`."""
    return [word for name in modules for word in ("--import", name)]


def list_needed_modules(env: dict[str, Any], run: dict[str, Any]) -> Iterator[str]:
    """Yield the modules that a user's environment came from; `env` is as in a checkpoint or a configuration."""
    # Wrappers of old gym take the id as an argument.
    for name in (env["id"], str(env["kwargs"].get("env_id", ""))):
        if module := find_module(name):
            yield module
    for wrapper in env["wrappers"]:
        name = wrapper if isinstance(wrapper, str) else next(iter(wrapper), "")
        if module := name.rpartition(":")[0] or name.rpartition(".")[0]:
            yield module
    if env["id"] not in NATIVE_ENVS or env["kwargs"] or env["wrappers"]:
        imports = run.get("imports")
        yield from map(str, imports if isinstance(imports, list) else ())


def require_typed(modules: Iterable[str], typed: Iterable[str], path: Path) -> None:
    """Check that all `modules` that a file needs were typed, since a file must not decide what code runs.

    Raises
    ------
    UsageError
        If a module was not typed; the message has the missing flags.
    """
    typed = list(typed)
    missing = [m for m in dict.fromkeys(modules) if not any(f"{m}.".startswith(f"{t}.") for t in typed)]
    if missing:
        names, flags = one_line(", ".join(missing)), one_line(" ".join(f"--import {module}" for module in missing))
        raise UsageError(
            f"{path} was trained with code of your own ({names}), which is not loaded unless you name it; "
            f"if you trust it, add {flags}"
        )


def resolve_reward(name: str | None, imports: Iterable[str]) -> Any:
    """Return the reward function that ``env.reward_fn`` names.

    It is ``module:NAME`` from a module that was typed, one of rlox's own, or one from an installed package. A
    configuration must not decide what code runs, so a module is used only if it is among `imports`.

    Raises
    ------
    ValueError
        If the module was not typed, or the name does not exist or is not a reward function.
    """
    if name is None:
        return None
    module, _, attribute = name.partition(":")
    if not attribute:
        if name in REWARDS:
            return name
        if name not in offers(REWARD_GROUP):
            hint = nearest(name, [*REWARDS, *offers(REWARD_GROUP)])
            raise ValueError(f"env.reward_fn={name} must be module:NAME or the name of an installed reward; {hint}")
        found = load(REWARD_GROUP, name)
    else:
        if not any(f"{module}.".startswith(f"{typed}.") for typed in imports):
            raise ValueError(f"env.reward_fn={name} names a module to import; if you trust it, add --import {module}")
        import_modules([module])
        home = sys.modules[module]
        if not hasattr(home, attribute):
            public = [n for n in vars(home) if not n.startswith("_")]
            raise ValueError(
                f"env.reward_fn={name} must exist, but {module} has no such name; {nearest(attribute, public)}"
            )
        found = getattr(home, attribute)
    if not callable(found) and type(found).__name__ != "PyCapsule":
        raise ValueError(
            f"env.reward_fn={name} must be a callable or a 'rlox.reward.v1' capsule, got {type(found).__name__}"
        )
    return found


def is_function(name: str) -> bool:
    """Return whether `name` has the form ``module:FUNCTION``."""
    module, colon, attribute = name.partition(":")
    return bool(colon) and attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))


def load_function(name: str, imports: Iterable[str]) -> Any:
    """Return the function that ``module:FUNCTION`` names, from a module that was typed.

    Raises
    ------
    ValueError
        If the module was not typed, or the name does not exist or cannot be called.
    """
    module, _, attribute = name.partition(":")
    if module != _OWN and not any(f"{module}.".startswith(f"{typed}.") for typed in imports):
        raise ValueError(f"{name} names a module to import; if you trust it, add --import {module}")
    import_modules([module])
    home = sys.modules[module]
    if not callable(value := getattr(home, attribute, None)):
        public = [n for n in vars(home) if not n.startswith("_")]
        raise ValueError(f"{name} must be a function, but {module} has none of that name; {nearest(attribute, public)}")
    return value
