"""``rlox export``: write the policy of a checkpoint for programs without rlox."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlox.checkpoint import run_files
from rlox.exporting.check import TOLERANCE
from rlox.exporting.write import SUFFIXES, Exported, export
from rlox_cli.families.evaluation import require_acts, restore_to_act
from rlox_cli.families.imports import import_modules
from rlox_cli.records.checkpoints import read_known_header
from rlox_cli.records.pulled import find_checkpoint, find_pulled
from rlox_cli.terminal.console import TextConsole, make_table, print_table, print_text
from rlox_cli.terminal.errors import UsageError
from rlox_cli.terminal.paths import output_path, shown

_KINDS = {"float": "float32", "byte": "uint8", "bool": "bool", "int": "int64"}
_KINDS_OF_C = {"float": "float", "byte": "unsigned char", "bool": "unsigned char", "int": "int"}


def main(path: Path, to: str | None, out: Path | None, observations: int, as_json: bool, imports: list[str]) -> None:
    """Write the files, and print what they take and return, and how they compare with the agent."""
    import_modules(imports)
    pulled = find_pulled(str(path)) is not None
    if pulled:
        folder = Path()  # what is pulled stays as it was verified
    elif path.is_dir():
        folder = path
    else:
        folder = path.parent.parent if path.parent.name == run_files.CHECKPOINTS else path.parent
    path = find_checkpoint(path)
    header = read_known_header(path)
    require_acts(path, header)
    if out is None:
        name = f"export/policy{SUFFIXES[to or 'onnx']}"
        out = folder / name
        if not pulled:
            run_files.check(folder, name)  # a folder of somebody else may have a link there
    if to is None and out.suffix not in SUFFIXES.values():
        raise UsageError(f"--out must end in {', '.join(SUFFIXES.values())} if --to is left out, got {out}")
    out = output_path("--out", out)
    agent = restore_to_act(path, header, imports)
    try:
        with _show_progress() as progress:
            results = export(agent, out, to, observations=observations, progress=progress)
    finally:
        agent.close()
    for exported in results:
        if as_json:
            print(json.dumps(_as_object(exported)))
        else:
            _print_result(exported, header)


@contextmanager
def _show_progress() -> Iterator[Callable[[str], None]]:
    """Show on a terminal what is being done, and nothing elsewhere."""
    console = TextConsole(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status("restoring") as status:
        yield lambda text: status.update(text)


def _as_object(exported: Exported) -> dict[str, Any]:
    """Return what ``--json`` prints."""
    check, kinds = exported.check, _kinds_of(exported)
    return {
        "policy": exported.name,
        "files": [str(file) for file in exported.files],
        "inputs": {name: [kinds[kind], *shape] for name, (kind, shape) in exported.inputs.items()},
        "outputs": {name: [kinds[kind], *shape] for name, (kind, shape) in exported.outputs.items()},
        "runtime": check and check.runtime,
        "n_observations": check.n if check else 0,
        "differences": check.differences if check else {},
        "n_ties": check.n_ties if check else 0,
    }


def _kinds_of(exported: Exported) -> dict[str, str]:
    return _KINDS_OF_C if exported.files[0].suffix == SUFFIXES["c"] else _KINDS


def _print_result(exported: Exported, header: dict[str, Any]) -> None:
    check, kinds = exported.check, _kinds_of(exported)
    size = sum(file.stat().st_size for file in exported.files)
    names = " and ".join(shown(file) for file in exported.files)
    print_text(f"{names}: {header['algorithm']}, {exported.n_parameters:,} constants, {_describe_size(size)}")
    table = make_table("", "name", "type", "shape", "largest difference")
    for side, values in (("input", exported.inputs), ("output", exported.outputs)):
        for name, (kind, shape) in values.items():
            difference = check.differences.get(name) if check and side == "output" else None
            table.add_row(side, name, kinds[kind], ", ".join(map(str, shape)) or "-", _describe_difference(difference))
    print_table(TextConsole(), table)
    if check is None:
        print_text("not checked, since --observations is 0")
        return
    print_text(
        f"checked with {check.n:,} {check.source} by {check.runtime}: equal to the agent's answers up to {TOLERANCE:g}"
    )
    if check.n_ties:
        print_text(f"in {check.n_ties} of them another choice has the same score up to rounding")


def _describe_difference(difference: float | None) -> str:
    return "" if difference is None else f"{difference:.2g}" if difference else "none"


def _describe_size(n: int) -> str:
    return f"{n / 1e6:,.1f} MB" if n >= 1e6 else f"{n / 1e3:,.1f} kB"
