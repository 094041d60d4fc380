"""``rlox collect``: write a dataset with the policies of checkpoints, or from a run's replay memory."""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from rlox.algorithms import load
from rlox.checkpoint import load_checkpoint, trained_for
from rlox.config import nearest
from rlox.envs.registry import find_module
from rlox.multi_agent import is_multi_agent
from rlox.nn.modes import torch_threads
from rlox.offline.collect import Behaviour, collect, write_replay
from rlox.offline.dataset import open_dataset
from rlox.offline.export import check_destination, export
from rlox.offline.sources import ARROW_SUFFIXES
from rlox_cli.families.environment import check_env_id
from rlox_cli.families.evaluation import require_acts, restore_to_act
from rlox_cli.families.imports import import_modules, list_needed_modules, require_typed
from rlox_cli.records.checkpoints import read_known_header
from rlox_cli.records.pulled import find_checkpoint
from rlox_cli.terminal.console import TextConsole
from rlox_cli.terminal.errors import UsageError
from rlox_cli.terminal.paths import output_path, with_home

_RANDOM = "random"


def main(
    checkpoints: list[str],
    steps: int | None,
    mix: str | None,
    out: str,
    seed: int,
    n_envs: int,
    deterministic: bool,
    replay: Path | None,
    env_id: str | None,
    agents: str | None,
    force: bool,
    imports: list[str],
) -> str:
    """Gather a dataset and write it. Return where it is."""
    import_modules(imports)
    console = TextConsole()
    if replay is not None:
        if checkpoints or mix or steps is not None or env_id is not None or deterministic or agents is not None:
            raise UsageError("--replay must be used alone: it writes a run's replay memory, and no policy acts")
        out = _destination(out, force)
        with _write_dataset(out) as path, _shown(console, "reading", None) as progress:
            _from_memory(replay, path, imports, progress)
        return out
    if steps is None:
        raise UsageError("--steps must be given: how many transitions to gather")
    if env_id is not None and (module := find_module(env_id)):
        import_modules([module])
    if env_id is not None and not is_multi_agent(env_id):
        check_env_id(env_id.rpartition(":")[2], {})
    shares = _shares(mix, checkpoints)
    loaded = _load(checkpoints, shares, imports)
    env = _env(loaded, env_id)
    behaviours = []
    for name, share in shares.items():
        if name == _RANDOM:
            behaviours.append(Behaviour(name, share, None, {"algorithm": "random"}))
            continue
        path, header = loaded[name]
        behaviours.append(Behaviour(name, share, restore_to_act(path, header, imports), _origin(path, header)))
    try:
        out = _destination(out, force)  # last, so that it hides no other mistake
        with _write_dataset(out) as path, _shown(console, "collecting", steps) as progress, torch_threads(1):
            collect(
                behaviours,
                env,
                steps,
                path,
                seed=seed,
                n_envs=n_envs,
                deterministic=deterministic,
                agents=None if agents is None else [name.strip() for name in agents.split(",")],
                progress=progress,
            )
    finally:
        for behaviour in behaviours:
            if hasattr(behaviour.algorithm, "close"):
                behaviour.algorithm.close()
    return out


def _shares(mix: str | None, checkpoints: list[str]) -> dict[str, float]:
    """Return the shares in ``--mix medium:0.5,random:0.5``; by default all checkpoints alike, or random actions."""
    if mix is None:
        names = [_name(word) or str(i + 1) for i, word in enumerate(checkpoints)]
        if any(_name(word) == "" for word in checkpoints):
            raise UsageError("CHECKPOINT must have a name before its =, such as expert=PATH, or no =")
        if len(set(names)) < len(names):
            raise UsageError(f"each CHECKPOINT must have its own name, got {', '.join(names)}")
        return dict.fromkeys(names or [_RANDOM], 1.0)
    shares: dict[str, float] = {}
    for part in mix.split(","):
        name, _, share = part.rpartition(":")
        try:
            value = float(share)
        except ValueError:
            name = ""
        if not name or name in shares or not 0 < value < float("inf"):
            raise UsageError(f"--mix must be NAME:SHARE,…, each name once and shares above 0, got {part!r} in {mix!r}")
        shares[name] = value
    return shares


def _name(word: str) -> str | None:
    """Return the name in ``name=path``, or None. A path may contain = after its first slash."""
    name, equals, _ = word.partition("=")
    return name if equals and "/" not in name else None


def _load(words: list[str], shares: dict[str, float], imports: list[str]) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Return the path and the header of the checkpoint for each name in the mix."""
    by_name = {name: word.partition("=")[2] for word in words if (name := _name(word)) is not None}
    unnamed = [word for word in words if _name(word) is None]
    numbers = {str(i + 1): word for i, word in enumerate(words)}
    paths: dict[str, str] = {}
    for name in shares:
        if name == _RANDOM:
            if name in by_name:
                raise UsageError("CHECKPOINT must not be named random, which stands for uniformly random actions")
        elif name in by_name:
            paths[name] = by_name[name]
        elif name in numbers and _name(numbers[name]) is None:
            paths[name] = numbers[name]
            unnamed.remove(numbers[name])
        elif unnamed:
            paths[name] = unnamed.pop(0)
        else:
            hint = nearest(name, [*by_name, _RANDOM])
            raise UsageError(f"--mix: {name} must be one of the checkpoints, as {name}=PATH, or random; {hint}")
    left = [*unnamed, *(f"{name}={path}" for name, path in by_name.items() if name not in paths)]
    if left:
        raise UsageError(f"--mix must name every checkpoint, got no share for {', '.join(left)}")
    loaded = {}
    for name, text in paths.items():
        path = find_checkpoint(Path(with_home("CHECKPOINT", text)))
        loaded[name] = (path, read_known_header(path))
        require_acts(*loaded[name])
    return loaded


def _env(loaded: dict[str, tuple[Path, dict[str, Any]]], env_id: str | None) -> dict[str, Any]:
    """Return the environment, which must be the same for all checkpoints."""
    envs = {name: header["env"] for name, (_, header) in loaded.items()}
    own: dict[str, Any] = {"id": env_id, "kwargs": {}, "wrappers": [], "backend": "auto"}
    if not envs:
        if env_id is None:
            raise UsageError("--env must be given if there is no checkpoint, such as --env Pendulum-v1")
        return own
    (first, env), *others = envs.items()
    for name, other in others:
        for key in ("id", "kwargs", "wrappers"):
            if other[key] != env[key]:
                raise ValueError(f"{name} must be of the environment of {first}, {env[key]}, got {other[key]}")
    return env if env_id is None else {**env, "id": env_id}


def _origin(path: Path, header: dict[str, Any]) -> dict[str, Any]:
    """Return what the dataset records about a checkpoint's policy."""
    weights = load_checkpoint(path).tensors["policy"]
    digest = hashlib.sha256()
    for name in sorted(weights):
        array = weights[name]
        digest.update(f"{name}\0{array.dtype.str}\0{array.shape}\0".encode())
        digest.update(array.tobytes())
    count, unit = trained_for(header)
    return {
        "algorithm": header["algorithm"],
        "sha256": digest.hexdigest(),
        "trained_for": f"{count} {unit}",
        "seed": header["seed"],
    }


def _from_memory(run: Path, path: Path, imports: list[str], progress: Callable[[int], None]) -> None:
    """Write the replay memory that is stored with a run's last checkpoint."""
    saved = run / "checkpoints" / "last.safetensors" if run.is_dir() else run
    header = read_known_header(saved)
    require_acts(saved, header)
    require_typed(list_needed_modules(header["env"], header.get("run", {})), imports, saved)
    if "memory" not in header:
        raise ValueError(
            f"--replay {run}: {saved} must have a replay memory next to it; an off-policy run saves one with "
            "checkpoint.memory=true"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # files that are missing
        try:
            algorithm = load(saved)
        except RuntimeWarning as e:
            raise ValueError(f"--replay {run}: {e}") from e
    try:
        write_replay(algorithm, path, _origin(saved, header), progress)
    finally:
        algorithm.close()


def _destination(out: str, force: bool) -> str:
    """Return `out`, with ``~`` expanded, if the dataset may be written there."""
    out = out if out.startswith("minari:") else str(output_path("--out", out))
    check_destination(out, force)
    return out


@contextlib.contextmanager
def _write_dataset(out: str) -> Iterator[Path]:
    """Yield the path for the Arrow file, and convert it to another format afterwards if necessary."""
    if out.endswith(ARROW_SUFFIXES):
        yield Path(out)
        return
    here = Path.cwd() if out.startswith("minari:") else Path(out).parent
    here.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".rlox-collect-", dir=here) as folder:
        path = Path(folder) / "data.arrow"
        yield path
        export(open_dataset(path), out)


@contextlib.contextmanager
def _shown(console: Console, what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal, and nothing elsewhere."""
    if not console.is_terminal:
        yield lambda n: None
        return
    columns = (TextColumn(what), BarColumn(bar_width=24), TaskProgressColumn(), TimeRemainingColumn(compact=True))
    with Progress(*columns, console=TextConsole(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda n: bar.advance(task, n)
