"""What the modules of rlox contained when they were imported, so that a function replaced later can be noticed.

Once it is in place, a function of another file, a wrapped class or a constant of another value looks like any other
object. So the contents of each module are noted when its code has run, before anybody else can reach it.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_noted: dict[str, dict[str, dict[str, Any]]] = {}


class _Noting:
    """A finder of modules that notes the contents of each Python module of rlox after its code has run."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith("rlox.") or name.startswith("rlox.kernels"):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        run: Any = spec.loader.exec_module

        def run_and_note(module: ModuleType) -> None:
            run(module)
            _noted[name] = {owner: dict(held) for owner, held in _namespaces(module).items()}

        spec.loader.exec_module = run_and_note  # type: ignore[method-assign]
        return spec


def note_imports() -> None:
    """Note the contents of all modules that are imported from now on."""
    sys.meta_path.insert(0, _Noting)


def find_replaced(module: ModuleType) -> list[str]:
    """Return the names in `module` that it does not hold as its code defined them; methods as ``Class.method``."""
    noted = _noted.get(module.__name__)
    if noted is None:
        return ["__spec__"]  # it was not imported from a file
    now, replaced = _namespaces(module), []
    for owner, before in noted.items():
        after = now.get(owner, {})
        try:
            same = bool(before == after)  # the same objects are equal without a call of their `__eq__`
        except Exception:  # of an object that was put in place of another
            same = False
        if not same:
            names = [name for name in before if name not in after or after[name] is not before[name]]
            # Python adds entries such as `__warningregistry__`, which are not functions.
            names += [name for name, value in after.items() if name not in before and callable(value)]
            replaced += [f"{owner}.{name}" if owner else name for name in names]
    return replaced


def _namespaces(module: ModuleType) -> dict[str, Any]:
    """Return what the module contains, under "", and what its own classes and its tables contain, under their names."""
    held = vars(module)
    spaces: dict[str, Any] = {"": held}
    for name, value in held.items():
        if isinstance(value, type) and value.__module__ == module.__name__:
            spaces[name] = vars(value)
        elif isinstance(value, dict) and name.isupper():
            spaces[name] = value
    return spaces
