"""``rlox push``, ``rlox pull`` and ``rlox card``."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rlox_cli.families.imports import import_modules
from rlox_cli.hub.card import NO_NAME, Facts, write_card
from rlox_cli.hub.contents import Options, collect, describe, find_source
from rlox_cli.hub.remote import download, require_login, require_name, upload
from rlox_cli.terminal.console import print_text
from rlox_cli.terminal.errors import UsageError
from rlox_cli.terminal.paths import output_path, shown


def card(path: Path, out: Path | None, name: str | None, options: Options) -> None:
    """Print the card of a run, or write it."""
    if name is not None:
        require_name(name, owner=True)
    import_modules(options.imports)
    source = find_source(path)
    facts, notes = describe(source, options)
    _print_notes("card", notes)
    text = write_card(facts, name or NO_NAME)
    if out is None:
        print(text, end="")
        return
    file = output_path("--out", out)
    file.write_text(text, encoding="utf-8")
    print_text(f"  card  {shown(file)}")


def push(path: Path, name: str, private: bool | None, dry_run: bool, out: Path | None, options: Options) -> None:
    """Collect what is shared of a run, and upload it, or only leave it in a folder."""
    require_name(name, owner=False)
    if out is not None and not dry_run:
        raise UsageError("--out must be given with --dry-run, which writes the folder instead of uploading it")
    source = find_source(path)
    if dry_run:
        folder = output_path("--out", out or Path("outputs", "hub", name.replace("/", "-")), folder=True)
        if folder.exists() and any(folder.iterdir()):
            raise UsageError(f"--out must be a new or an empty folder, got {shown(folder)}")
        folder.mkdir(parents=True, exist_ok=True)
        facts, notes = collect(source, folder, name, options)
        _print_notes("push", notes)
        _print_contents(folder, facts)
        print_text(f"  folder  {shown(folder)} (dry run: nothing was uploaded)")
        return
    require_login()
    with tempfile.TemporaryDirectory(prefix="rlox-push-") as temporary:
        folder = Path(temporary)
        facts, notes = collect(source, folder, name, options)
        _print_notes("push", notes)
        _print_contents(folder, facts)
        full, address = upload(folder, name, private)
    print_text(f"  pushed  {address}")
    print_text(f"  pull    rlox pull {full}")


def pull(name: str, revision: str | None) -> None:
    """Pull a run, and print what can be done with it."""
    require_name(name, owner=True)
    folder, manifest, is_new = download(name, revision)
    score = f": {manifest['score']}" if isinstance(manifest.get("score"), str) else ""
    done = "pulled" if is_new else "is up to date and intact"
    print_text(f"{name} {done}{score}" if not is_new else f"{done} {name}{score}")
    print_text(f"  folder    {shown(folder)}")
    print_text(f"  evaluate  rlox eval {name}")
    print_text(f"  go on     rlox train … init_from={name}")


def _print_notes(verb: str, notes: list[str]) -> None:
    for note in notes:
        print_text(f"rlox {verb}: {note}", stderr=True)


def _print_contents(folder: Path, facts: Facts) -> None:
    score = "" if facts.score is None else f": {facts.score.text}, 95 % interval {facts.score.interval}"
    print_text(f"{facts.algorithm} on {facts.task}, {facts.unit[:-1]} {facts.step:,}{score}")
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            size = file.stat().st_size
            print_text(f"  {file.relative_to(folder).as_posix():<32} {size:>12,} B")
