"""Real run folders, damaged at random: links, pipes, cut and edited files.

``python tests/helpers/damaged_folders.py 0 2000`` runs the cases 0 to 1999, and prints those that fail.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import numpy as np
import yaml
from safetensors.numpy import save

from rlox.checkpoint import load_checkpoint
from rlox.checkpoint.file import _digest

_PATIENCE_S = 60
_SMALL = (
    *("env=CartPole-v1", "tuned=off", "env.n_envs=2", "algo.hidden_sizes=[8]", "eval.n_episodes=1", "eval.workers=0"),
    *("eval.n_points=1", "logger=none"),
)
PPO = ("algo=ppo", "algo.n_steps=16", "total_timesteps=64", *_SMALL)
DQN = ("algo=dqn", "algo.learning_starts=20", "algo.batch_size=8", "buffer.size=100", "total_timesteps=60", *_SMALL)
TARGETS = ("runs/ppo", "runs/dqn", "runs/mmap", "sweep")
# Values that rlox does not write at that place.
ODD: list[Any] = [
    *(10**400, -(10**400), 10**18, -1, 0, 1.5, float("nan"), float("inf"), True, None, "", "x", "../../outside/secret"),
    *(
        [],
        [1],
        [[]],
        {},
        {"x": 1},
        {"_target_": "os.system"},
        "\x1b[2J",
        "a\nb",
        "a\0b",
        "x" * 70_000,
        "${oc.env:HOME}",
    ),
    *("outside/secret", "/dev/zero", ["x"] * 3, "\ud800"),
]


def make(folder: Path) -> None:
    """Train the runs that are damaged, and one that is not; and write the files outside that must not change."""
    for words in (
        (*PPO, "output_dir=runs/ppo"),
        (*DQN, "output_dir=runs/dqn"),
        (*DQN, "buffer=mmap", "buffer.hot_size=20", "output_dir=runs/mmap"),
        ("-m", *PPO, "seed=0,1", "output_dir=sweep", "hydra.sweeper.plot=false"),
        (*PPO, "seed=7", "output_dir=good"),
    ):
        done = forked.run("train", *words, cwd=folder)
        assert done.returncode == 0, done.stderr
    (folder / "runs/ppo/traceback.txt").write_text("of an earlier failure\n")
    outside = folder / "outside"
    (outside / "folder/rank1").mkdir(parents=True)
    for name in ("secret", "folder/000000000000-1.safetensors", "folder/rank1/1.safetensors", "folder/.x.1.partial"):
        (outside / name).write_text("secret")


def contents(folder: Path) -> dict[str, Any]:
    """Return what is in a folder: names, kinds, sizes and the bytes of files."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        found[str(path.relative_to(folder))] = path.read_bytes() if path.is_file() else "folder"
    return found


# ---- damages: each changes one path of a folder


def _replace(path: Path) -> None:
    """Remove what is at `path`, and create the folders above it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()
    path.parent.mkdir(parents=True, exist_ok=True)


def link(path: Path, root: Path, rng: random.Random) -> None:
    """Replace a file or a folder with a link: to its own copy, another file or folder, a device, nothing, itself."""
    copy = root / "outside" / path.name
    targets = [root / "outside/secret", root / "outside/folder", root / "outside/new", Path("/dev/zero"), path]
    if path.is_dir() and not path.is_symlink():
        shutil.copytree(path, copy, symlinks=True, ignore=_not_copied, dirs_exist_ok=True)
        targets += [copy] * 5
    elif path.is_file() and not path.is_symlink() and not _is_huge(path):
        shutil.copyfile(path, copy)
        targets += [copy] * 5
    target = rng.choice(targets)
    _replace(path)
    path.symlink_to(target)


def _is_huge(path: Path) -> bool:
    """Return whether `cut` has made a file huge."""
    return path.stat().st_size > 1 << 24


def _not_copied(folder: str, names: list[str]) -> list[str]:
    """Return the names of what was damaged before and cannot be copied: pipes, sockets and huge files."""
    paths = [Path(folder, name) for name in names]
    others = [path for path in paths if not path.is_symlink() and not path.is_dir()]
    return [path.name for path in others if not path.is_file() or _is_huge(path)]


def special(path: Path, root: Path, rng: random.Random) -> None:
    """Replace a file with a pipe, a socket or a folder; a folder with a file."""
    kind = rng.choice(["pipe", "pipe", "pipe", "socket", "folder", "file"])
    _replace(path)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "file":
        path.write_text("x")
    else:
        with socket.socket(socket.AF_UNIX) as one, contextlib_chdir(path.parent):
            one.bind(path.name)


class contextlib_chdir:
    """Sockets have short names only."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __enter__(self) -> None:
        self.before = os.getcwd()
        os.chdir(self.folder)

    def __exit__(self, *_: object) -> None:
        os.chdir(self.before)


def cut(path: Path, root: Path, rng: random.Random) -> None:
    """Remove a file or folder, cut a file, change its bytes, append to it, or make it huge."""
    huge = path.is_file() and _is_huge(path)
    if not path.is_file() or path.is_symlink() or huge or (way := rng.randrange(8)) == 0:
        _replace(path)
        return
    data = bytearray(path.read_bytes())
    if way == 1:
        data = data[: rng.randrange(len(data) + 1)]
    elif way == 2:
        data = bytearray()
    elif way == 3:
        data += rng.choice([b"\0" * 100, b"\xff\xfe\n", b"{}\n", b"[" * 200_000 + b"\n", b"x" * (5 << 20), b"- a\n"])
    elif way == 4:
        for _ in range(rng.choice([1, 30])):
            data[rng.randrange(len(data)) if data else 0 :][:1] = rng.randbytes(1)
    elif way == 5 and data:
        at = rng.randrange(len(data))
        data[at : at + 1] = rng.choice([b"\0", b"\xff", b"\n", b"9" * 400, b"\xed\xa0\x80"])
    elif way == 6:
        lines = bytes(data).splitlines(keepends=True)
        rng.shuffle(lines)
        data = bytearray(b"".join(lines[: rng.randrange(len(lines) + 1)]))
    path.write_bytes(data)
    if way == 7:
        os.truncate(path, 1 << 36)


def _places(value: Any, at: tuple = ()) -> Iterator[tuple]:
    """Yield the places of a nested value, as keys and numbers."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*at, key)
        yield from _places(item, (*at, key))


def _edited(value: Any, rng: random.Random) -> Any:
    """Change, remove or add one entry of a nested value."""
    places = list(_places(value))
    if not places or rng.random() < 0.05:
        return rng.choice(ODD)
    *above, key = rng.choice(places)
    inner = value
    for step in above:
        inner = inner[step]
    way = rng.random()
    if way < 0.25:
        del inner[key]
    elif way < 0.35 and isinstance(inner, dict):
        inner[rng.choice(["x", "_target_", "buffer", "dataset", "name", "evaluation", "__class__"])] = rng.choice(ODD)
    elif way < 0.45:
        deep: Any = 1
        for _ in range(rng.choice([40, 900])):
            deep = [deep]
        inner[key] = deep
    else:
        inner[key] = rng.choice(ODD)
    return value


def edit(path: Path, root: Path, rng: random.Random) -> None:
    """Change values in a file whose format stays valid."""
    if not path.is_file() or path.is_symlink() or _is_huge(path):
        cut(path, root, rng)
    elif path.suffix == ".jsonl":
        lines = path.read_text().splitlines()
        for _ in range(rng.choice([1, 1, 4])):
            number = rng.choice([0, len(lines) - 1, rng.randrange(len(lines))])
            try:
                lines[number] = json.dumps(_edited(json.loads(lines[number]), rng))
            except (ValueError, RecursionError):
                continue
        path.write_text("".join(f"{line}\n" for line in lines))
    elif path.suffix == ".json":
        path.write_text(json.dumps(_edited(json.loads(path.read_text()), rng)))
    elif path.suffix == ".yaml":
        plain = _edited(yaml.safe_load(path.read_text()), rng)
        try:
            text = yaml.safe_dump(plain, sort_keys=False)
        except RecursionError:
            text = json.dumps(plain)  # which is YAML, too
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
    elif path.suffix == ".safetensors":
        try:
            checkpoint = load_checkpoint(path, ("format",))
        except ValueError:
            return
        header = _edited(checkpoint.header, rng)
        flat = {f"{name}/{key}": x for name, arrays in checkpoint.tensors.items() for key, x in arrays.items()}
        if flat and rng.random() < 0.2:
            name = rng.choice(sorted(flat))
            flat[name] = np.atleast_1d(flat[name])
            flat[name] = rng.choice([flat[name][:0], flat[name] * np.nan, flat[name].reshape(-1), flat[name][None]])
            flat[name] = np.ascontiguousarray(flat[name])
        try:
            text = json.dumps(header)
            path.write_bytes(save(flat, {"rlox": text, "sha256": _digest(text, flat)}))
        except (ValueError, RecursionError, TypeError):
            return
    else:
        cut(path, root, rng)


DAMAGES = (link, link, special, cut, edit, edit, edit)
# Names that a run may write, besides those that exist.
NAMES = ("traceback.txt", "mirrors", "out.txt", "stop", "sweep.lock", "plot.png", "plot.html", "completions.json")


def damage(target: Path, root: Path, rng: random.Random) -> str:
    """Damage one path below `target`, and return what was done."""
    paths = sorted(path for path in target.rglob("*") if ".hydra" not in path.parts)
    # The files that are read most, and folders, more often.
    weights = [4 if path.suffix in (".yaml", ".jsonl", ".lock") or path.is_dir() else 2 for path in paths]
    paths += [target / name for name in NAMES]
    path = rng.choices(paths, [*weights, *[1] * len(NAMES)])[0]
    way = rng.choice(DAMAGES)
    way(path, root, rng)
    return f"{way.__name__} {path.relative_to(root)}"


def command(target: str, rng: random.Random) -> list[str]:
    """Return the words of a command that reads or continues the runs in `target`."""
    general = [
        *([["ls", "runs", "--folder", "."]] * 2),
        *([["plot", target, "good", "--out", "plot.html"]] * 2),
        ["compare", target, "good"],
    ]
    if target == "sweep":
        job = rng.choice(["sweep/0-ppo-CartPole-v1-s0", "sweep/1-ppo-CartPole-v1-s1"])
        special = [
            ["sweep", "status", target],
            ["sweep", "resume", target],
            ["ls", "sweeps", "--folder", "."],
            ["eval", job],
            ["train", f"resume={job}", "total_timesteps=128"],
            ["plot", target],
        ]
        return rng.choice([*special, *special, *general])
    special = [
        *([["train", f"resume={target}", "total_timesteps=128"]] * 4),
        ["train", f"resume={target}"],
        ["train", f"resume={target}/checkpoints/best.safetensors", "total_timesteps=128"],
        *([["eval", target]] * 2),
        ["eval", f"{target}/checkpoints/last.safetensors", "--json"],
        ["collect", target, "--steps", "20", "--out", "data.arrow"],
        ["collect", "--replay", target, "--out", "data.arrow"],
        ["generate", target, "x"],
        ["sync", target],
        ["train", "--cfg", "job", f"resume={target}"],
        ["train", *PPO, f"init_from={target}/checkpoints/last.safetensors", "output_dir=new"],
    ]
    return rng.choice([*special, *special, *general])


def case(number: int, pristine: Path, root: Path) -> tuple[str, list[str]]:
    """Run a case in the empty folder `root`: copies of the runs, damaged. Return it in words, and what went wrong."""
    rng = random.Random(number)
    shutil.copytree(pristine, root, symlinks=True, dirs_exist_ok=True)
    target = rng.choice(TARGETS)
    done = [damage(root / target, root, rng) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
    words = command(target, rng)
    before = contents(root / "outside")
    text = f"case {number}: {', '.join(done)}; rlox {' '.join(words)}"
    try:
        ended = forked.run(*words, cwd=root, timeout=_PATIENCE_S)
    except subprocess.TimeoutExpired:
        return text, ["it hangs"]
    return text, [
        *_wrong(ended, words),
        *(["a file outside has changed"] if contents(root / "outside") != before else []),
    ]


def _wrong(ended: subprocess.CompletedProcess[str], words: list[str]) -> Iterator[str]:
    output = ended.stdout + ended.stderr
    if "Traceback" in output or "bug in rlox" in output:
        yield f"a traceback: {output[-3000:]}"
    a_job_failed = words[:2] == ["sweep", "resume"] and "jobs are not finished" in ended.stderr
    if ended.returncode not in (0, 2) and not a_job_failed:
        yield f"exit code {ended.returncode}: {output[-1500:]}"
    if ended.returncode == 2 and f"rlox {words[0]}: " not in ended.stderr:
        yield f"no error: {output[-1500:]}"
    if words[:2] == ["ls", "runs"] and "good" not in ended.stdout:
        yield f"the other runs are not listed: {output[-1500:]}"
    if max(map(len, ended.stderr.splitlines()), default=0) > 3000:
        yield f"a long error: {output[:1500]}"
    if "\x1b" in output or "\0" in output:
        yield f"control characters: {output[-1500:]!r}"


def main(first: int, last: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        pristine = Path(name, "pristine")
        pristine.mkdir()
        make(pristine)
        failed = 0
        for number in range(first, last):
            root = Path(name, "case")
            text, wrong = case(number, pristine, root)
            shutil.rmtree(root)
            if wrong:
                failed += 1
                print(f"{text}\n    " + "\n    ".join(wrong), flush=True)
    print(f"{last - first} cases, {failed} failed")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
