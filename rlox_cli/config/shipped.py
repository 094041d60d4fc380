"""``rlox cp``: copy shipped YAML and its JSON Schemas into a folder, to edit and use with ``-cd``."""

from __future__ import annotations

import os
import re
import shlex
from importlib.resources import files
from pathlib import Path

from rlox.algorithms import entry_of, resolve
from rlox.checkpoint import run_files
from rlox.config import nearest
from rlox_cli.terminal.console import TextConsole
from rlox_cli.terminal.errors import UsageError
from rlox_cli.terminal.paths import output_path, shown

SCHEMA_FOLDER = "schema"  # within conf/ and every copy of it
_ALL = "conf"  # the name for everything
_SCHEMA = re.compile(r"^# yaml-language-server: \$schema=\S*?(schema/[\w-]+\.json)$", re.MULTILINE)


def read_shipped(below: str = "") -> dict[str, str]:
    """Return the text of the shipped YAML files below the group `below` (all: ""), by their name within it."""
    texts: dict[str, str] = {}
    folders = [("", files("rlox_cli.conf").joinpath(below))]
    while folders:
        prefix, folder = folders.pop()
        for item in folder.iterdir():
            if item.is_dir():
                folders.append((f"{prefix}{item.name}/", item))
            elif item.name.endswith(".yaml"):
                texts[prefix + item.name.removesuffix(".yaml")] = item.read_text(encoding="utf-8")
    return dict(sorted(texts.items()))


def read_schema(name: str) -> str:
    """Return the text of a shipped JSON Schema, such as ``schema/run.json``."""
    return files("rlox_cli.conf").joinpath(name).read_text(encoding="utf-8")


def copy(name: str, dest: Path, force: bool) -> None:
    """Copy the file `name` (``algo/ppo``) to ``<dest>/algo/ppo.yaml``, or all files with the name ``conf``.

    The JSON Schemas that they name are copied to ``<dest>/schema``.

    Raises
    ------
    UsageError
        If there is no such file, or a file to write already exists and `force` is false.
    OSError
        If `dest` cannot be written to.
    """
    everything = read_shipped()
    key = name.removesuffix(".yaml").strip("/")
    if key != _ALL and key not in everything:
        raise UsageError(f"NAME must be a shipped config, got {name!r}; {nearest(key, [*everything, _ALL])}")
    chosen = everything if key == _ALL else {key: everything[key]}
    dest = output_path("DEST", dest, folder=True)
    targets = {dest / f"{item}.yaml": text for item, text in chosen.items()}
    there = [path for path in targets if os.path.lexists(path)]
    schemas = {name: read_schema(name) for text in chosen.values() for name in _SCHEMA.findall(text)}
    if schemas:  # all refer to this one
        schemas[f"{SCHEMA_FOLDER}/run.json"] = read_schema(f"{SCHEMA_FOLDER}/run.json")
    if there and not force:
        more = f" and {len(there) - 1} more" if len(there) > 1 else ""
        raise UsageError(
            f"{shown(there[0])}{more} must not exist yet; add --force to overwrite, or name another folder"
        )
    # Schemas belong to the version of rlox, so those of another one are replaced.
    for path, text in {**targets, **{dest / name: text for name, text in schemas.items()}}.items():
        with run_files.replace_file(dest, str(path.relative_to(dest))) as file:
            file.write(text.encode())
    console = TextConsole()
    what = shown(next(iter(targets))) if len(targets) == 1 else f"{len(targets)} files to {shown(dest)}"
    group, _, choice = key.rpartition("/") if key.startswith("hydra/") else key.partition("/")
    # Launchers, sweepers and presets with settings for them need a sweep, and replay memories an algorithm with one.
    words = ["-m"] * (group.startswith("hydra/") or (group == "experiment" and "\nhydra:" in everything[key]))
    words += [f"algo={'dreamer' if choice == 'sequence' else 'dqn'}"] * (group == "buffer")
    words += [f"{group}={choice}"] * bool(choice and group != "tuned")
    if group == "tuned" and choice.count("/"):
        words = "algo={} env={}".format(*choice.split("/", 1)).split()
    words += _needed(choice.partition("/")[0]) if group in ("algo", "tuned") else []
    console.print(f"copied {what}")
    console.print(f"  {'use it with':<12} {shlex.join(['rlox', 'train', '-cd', str(dest), *words])}")


def _needed(algo: str) -> list[str]:
    """Return words, with examples of values, for what an algorithm needs and no shipped file chooses."""
    entry = entry_of(algo)
    kind = "" if entry is None else resolve(entry.config).uses_dataset
    if kind == "must":
        return ["dataset=data/medium.arrow"]
    reward = ["reward=my_package:score", "--import", "my_package"] if algo in ("grpo", "online_dpo") else []
    return ["model=FOLDER", "dataset=data/rows.jsonl", *reward] if kind == "text" else []
