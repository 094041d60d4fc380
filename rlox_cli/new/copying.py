"""The source of an algorithm's update and of its losses, to be changed in a file of its own.

Read from the installed code, so that what a new algorithm starts from is always what rlox trains with.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import textwrap
from dataclasses import dataclass, field
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any

# The modules whose functions are mathematics of one algorithm or a few: they are copied. Others are imported.
_LOSSES = ("rlox.nn.losses", "rlox.nn.value_losses", "rlox.nn.critics.losses")
_SHARED = {"normalized"}  # functions in them that nobody changes


@dataclass
class Copied:
    """Code of an algorithm, and what it needs."""

    losses: list[str] = field(default_factory=list)  # functions, those that are called first
    update: str = ""  # the method, indented as in a class
    imports: set[str] = field(default_factory=set)  # statements


def copy_update(cls: type) -> Copied:
    """Return the update of an algorithm, with its losses and the imports of both."""
    copied, done = Copied(), set[str]()
    module = import_module(cls.__module__)
    source = textwrap.dedent(inspect.getsource(vars(cls)["update"]))
    source, local = _split_imports(source)
    copied.update = textwrap.indent(source, "    ").rstrip()
    _collect(source, {**_imports_of(module), **local}, module, copied, done)
    return copied


def _collect(source: str, imports: dict[str, str], module: ModuleType, copied: Copied, done: set[str]) -> None:
    """Add what the names in `source` stand for: a copy of a loss, or an import."""
    for name in _names(source):
        if name in done or hasattr(builtins, name):
            continue
        statement = imports.get(name)
        if statement is not None:
            origin = re.match(r"from (\S+) import ", statement)
            value = getattr(import_module(origin[1]), name, None) if origin and origin[1] in _LOSSES else None
        else:
            value = getattr(module, name, None)
        defined: str = getattr(value, "__module__", "")
        mine = defined == module.__name__ and isinstance(value, FunctionType)
        if value is not None and name not in _SHARED and (defined in _LOSSES or mine):
            done.add(name)
            theirs = import_module(defined)
            text = _shorten(inspect.getsource(value).rstrip())
            _collect(text, _imports_of(theirs), theirs, copied, done)
            copied.losses.append(text)
        elif statement is not None:
            done.add(name)
            copied.imports.add(statement)
        elif value is not None:
            done.add(name)
            copied.imports.add(f"from {module.__name__} import {name}")


def _names(source: str) -> list[str]:
    """Return the global names that some code uses, in order; those of annotations too."""
    tree = ast.parse(source)
    bound = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    bound |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    used = (node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
    return [name for name in dict.fromkeys(used) if name not in bound]


def _imports_of(module: ModuleType) -> dict[str, str]:
    """Return the import statement of each name that a module imports at its top, for type checkers too."""
    tree = ast.parse(inspect.getsource(module))
    found: dict[str, str] = {}
    for top in tree.body:
        guarded = top.body if isinstance(top, ast.If) and ast.unparse(top.test) == "TYPE_CHECKING" else [top]
        for node in guarded:
            found |= _statements(node)
    return found


def _statements(node: ast.AST) -> dict[str, str]:
    if isinstance(node, ast.ImportFrom) and node.module != "__future__":
        return {alias.asname or alias.name: f"from {node.module} import {ast.unparse(alias)}" for alias in node.names}
    if isinstance(node, ast.Import):
        return {(alias.asname or alias.name).partition(".")[0]: f"import {ast.unparse(alias)}" for alias in node.names}
    return {}


def _split_imports(source: str) -> tuple[str, dict[str, str]]:
    """Return a function's source without the imports in its body, and those imports by name."""
    (function,) = ast.parse(source).body
    lines = source.splitlines()
    local: dict[str, str] = {}
    for node in reversed([node for node in ast.walk(function) if isinstance(node, (ast.Import, ast.ImportFrom))]):
        local |= _statements(node)
        del lines[node.lineno - 1 : node.end_lineno]
    return re.sub(r'("""\n)\n+', r"\1", "\n".join(lines), count=1), local


def _shorten(source: str) -> str:
    """Cut the docstrings of copied code to their first paragraph; rlox's manual has the rest."""
    lines = source.splitlines()
    for node in reversed([*ast.walk(ast.parse(textwrap.dedent(source)))]):
        body: Any = getattr(node, "body", None)
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or ast.get_docstring(node) is None:
            continue
        first, last = body[0].lineno - 1, body[0].end_lineno
        blank = next((i for i in range(first, last) if not lines[i].strip()), None)
        if blank is not None:
            lines[first:last] = [*lines[first : blank - 1], f'{lines[blank - 1]}"""']
    return "\n".join(lines)
