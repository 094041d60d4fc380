"""Commands that start a Python interpreter with the modules of this one, and warnings that are shown as in this one."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

from rlox.checkpoint.checks import visible


def python_command(module: str, function: str, *arguments: int | str) -> list[str]:
    """Return a command that calls ``module.function(*arguments)`` in a new interpreter with this one's import path.

    A user's ``random.py`` next to an environment does no harm here if the standard library's was loaded before the
    folder joined the import path. In the new interpreter it would come first, so such modules are imported early. The
    filters of Python's option ``-W`` apply there too, and the command line's form of warnings.
    """
    folders, names = _shadowing()
    lines = ["import sys"]
    if names:
        lines.append(f"sys.path[:] = {[folder for folder in sys.path if folder not in folders] + folders!r}")
        lines += [f"import {name}" for name in names]
    lines.append(f"sys.path[:] = {sys.path!r}")
    if warnings.formatwarning is format_warning:
        lines.append(f"import warnings, {__name__} as this")
        lines.append("warnings.formatwarning = this.format_warning")
    lines.append(f"from {module} import {function}")
    lines.append(f"{function}({', '.join(map(repr, arguments))})")
    return [sys.executable, *(f"-W{filter_}" for filter_ in sys.warnoptions), "-c", "; ".join(lines)]


def _shadowing() -> tuple[list[str], list[str]]:
    """Return the folders whose modules would now be imported instead of those loaded here, and the modules' names."""
    loaded = {
        name: Path(str(module.__file__)).parent
        for name, module in list(sys.modules.items())
        if "." not in name and isinstance(getattr(module, "__file__", None), str)
    }
    folders, names = [], []
    for folder in dict.fromkeys(sys.path):
        here = Path(folder or os.getcwd())
        try:
            entries = {entry.stem if entry.suffix == ".py" else entry.name for entry in here.iterdir()}
        except OSError:  # an archive, or a folder that is gone
            continue
        first = [
            name
            for name in sorted(entries & loaded.keys())
            if (here / f"{name}.py").is_file() or (here / name / "__init__.py").is_file()
        ]
        shadowed = [name for name in first if loaded.pop(name) not in (here, here / name)]
        if shadowed:
            folders.append(folder)
            names += shadowed
    return folders, names


def format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: Any = None
) -> str:
    """Return a warning as the line that the command line prints, for `warnings.formatwarning`.

    Warnings of other packages end with their category and their place in the code.
    """
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__") in (__name__, "warnings", "_py_warnings"):
        frame = frame.f_back
    # The place of rlox's own warnings is that of a caller; that of NumPy's compiled code is the line that called it.
    at_caller = (filename, lineno) != (frame.f_code.co_filename, frame.f_lineno)
    if at_caller and str(frame.f_globals.get("__name__")).partition(".")[0] in ("rlox", "rlox_cli"):
        return f"warning: {visible(str(message))}\n"
    return f"warning: {visible(str(message))} ({category.__name__}, {filename}:{lineno})\n"
