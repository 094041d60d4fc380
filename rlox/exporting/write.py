"""`rlox.export`: write an agent's policies in a format that needs no rlox, and prove that they are the same."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlox.config import integer, nearest
from rlox.exporting.c import write_c
from rlox.exporting.check import TOLERANCE, Check, compare
from rlox.exporting.graph import Graph
from rlox.exporting.module import write_torchscript
from rlox.exporting.observations import record
from rlox.exporting.onnx import write_onnx
from rlox.exporting.policies import export_graphs
from rlox.exporting.runtimes import load_c, load_onnx, load_torchscript

SUFFIXES = {"onnx": ".onnx", "torchscript": ".pt", "c": ".c"}
_WRITERS: dict[str, Callable[[Graph, Path], Any]] = {"onnx": write_onnx, "torchscript": write_torchscript, "c": write_c}
_LOADERS = {"onnx": load_onnx, "torchscript": load_torchscript, "c": load_c}


@dataclass(frozen=True)
class Exported:
    """One policy that was written.

    Attributes
    ----------
    name : str
        Its agents: ``agent``, or with several agents the name of their group or of the only one.
    files : tuple of Path
        What was written.
    inputs, outputs : dict of str to (str, tuple of int)
        Type and shape of each, without the axis of the rows.
    n_parameters : int
        Constant numbers in the file.
    check : Check or None
        The proof; None if it was not asked for.
    """

    name: str
    files: tuple[Path, ...]
    inputs: dict[str, tuple[str, tuple[int, ...]]]
    outputs: dict[str, tuple[str, tuple[int, ...]]]
    n_parameters: int
    check: Check | None = None


def export(
    agent: Any,
    path: str | os.PathLike,
    to: str | None = None,
    *,
    observations: int = 1000,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> list[Exported]:
    """Write the deterministic policy of an agent as ONNX, TorchScript or C, which run without rlox.

    A file contains the normalisation of observations, the networks, and the bounds of actions: it takes observations as
    the environment gives them, as rows of numbers or images of bytes with the channels first, and returns what
    `predict` does. Masks of legal actions, states of a memory, the index of one of several agents and the random
    numbers of a world model are further inputs, if the agent has them.

    Parameters
    ----------
    agent : rlox.training.Agent
        The agent.
    path : path
        The file to write. With several policies, each has the name of its agents at the end of the stem, with ``_`` for
        characters that files cannot have.
    to : str, optional
        ``onnx``, ``torchscript`` or ``c``; by default what the ending of `path` says: .onnx, .pt or .c.
    observations : int
        Number of observations of the agent's environment with which the file is run and compared with `predict`; 0: it
        is not checked.
    seed : int
        Determines these observations.
    progress : callable, optional
        Called with what is done next.

    Returns
    -------
    list of Exported
        One for each policy; several only with several agents.

    Raises
    ------
    TypeError, ValueError
        For something that is no agent, and for a policy that cannot be written; the message says why.
    ImportError
        Without the packages that write and run a format.
    RuntimeError
        If a file computes something else than `predict`, or cannot be run.

    Examples
    --------
    >>> import rlox
    >>> rlox.export(rlox.PPO("CartPole-v1"), "policy.onnx")  # doctest: +SKIP
    """
    path = Path(path)
    to = _format(path, to)
    n = integer("export", "observations", observations, 0, 10_000_000)
    report = progress or (lambda text: None)
    policies = export_graphs(agent)
    several = len(policies) > 1
    ends: list[str] = []
    for policy in policies:
        # Without the characters that a system does not allow in the name of a file.
        end = "_" + re.sub(r'[\x00-\x1f<>:"/\\|?*]', "_", policy.player.name) if several else ""
        while end in ends:
            end += "_"
        ends.append(end)
    paths = [path.with_name(f"{path.stem}{end}{path.suffix}") for end in ends]
    inputs: list[dict[str, np.ndarray]] = []
    source = ""
    if n:
        report(f"collecting {n:,} observations")
        inputs, source = record(agent, policies, n, integer("export", "seed", seed, 0))
    path.parent.mkdir(parents=True, exist_ok=True)
    results = []
    # What is not proven does not get its name.
    with tempfile.TemporaryDirectory(prefix=".rlox-export-", dir=path.parent) as folder:
        for i, (policy, file) in enumerate(zip(policies, paths, strict=True)):
            graph, check = policy.graph, None
            report(f"writing {file.name}")
            new = Path(folder) / file.name
            written = _WRITERS[to](graph, new) or [new]
            if n:
                report(f"checking {file.name}")
                run, runtime = _LOADERS[to](graph, new)
                check = compare(agent, policy, run, runtime, inputs[i], source)
                _require_equal(file, check)
            sides = ({value.name: value for value in graph.inputs}, graph.outputs)
            given, returned = ({name: (x.kind, x.shape) for name, x in side.items()} for side in sides)
            files = tuple(path.with_name(part.name) for part in written)
            results.append(Exported(policy.player.name, files, given, returned, graph.n_parameters, check))
        for name in os.listdir(folder):
            os.replace(Path(folder) / name, path.with_name(name))
    return results


def _format(path: Path, to: str | None) -> str:
    """Return the format of a file, by its name or its ending."""
    if to is None:
        to = next((name for name, suffix in SUFFIXES.items() if suffix == path.suffix), None)
        if to is None:
            raise ValueError(f"export: path must end in {', '.join(SUFFIXES.values())}, or name to=, got {path}")
    if to not in SUFFIXES:
        raise ValueError(f"export: to must be onnx, torchscript or c, got {to!r}; {nearest(str(to), SUFFIXES)}")
    if to == "c" and path.suffix != ".c":
        raise ValueError(f"export: path must end in .c, beside which the header is written, got {path}")
    return to


def _require_equal(file: Path, check: Check) -> None:
    if not check.passed:
        worst = max(check.differences, key=lambda name: check.differences[name])
        raise RuntimeError(
            f"export: {file} must compute what predict does, up to {TOLERANCE:g}, but {worst} differs by "
            f"{check.differences[worst]:.3g} in {check.n} {check.source}; nothing was written"
        )
