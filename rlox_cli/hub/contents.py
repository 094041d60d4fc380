"""The folder that is shared of a run: checkpoint, settings, record, curve, film, card, and a list with their hashes.

Everything in it is data: safetensors, YAML, JSON and pictures. Nothing in it can run.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlox import __version__
from rlox.checkpoint import load_checkpoint, run_files, trained_for
from rlox.config.base import HIDDEN
from rlox.config.run import MOST_BYTES
from rlox.evaluation.video import VideoWriter, render_fps
from rlox.tracking.record import FILE, read_rows
from rlox.tracking.store import read_config, read_plain
from rlox_cli.families.evaluation import plan, restore_to_act
from rlox_cli.families.family import Evaluation as Typed
from rlox_cli.families.family import family_of_checkpoint
from rlox_cli.families.imports import import_modules, list_needed_modules, require_typed
from rlox_cli.hub.card import NO_FOLDER, Facts, Score, interval_of_mean, write_card
from rlox_cli.records.checkpoints import best_of, read_known_header
from rlox_cli.records.pulled import MANIFEST, find_pulled, hint
from rlox_cli.records.runs import EVALUATION, choose_metric, group_runs, plain, read_run, read_runs
from rlox_cli.terminal.account import paragraph
from rlox_cli.terminal.errors import UsageError
from rlox_cli.terminal.paths import shown

CARD, CONFIG, CURVE, FILM = "README.md", "config.yaml", "curve.png", "replay.mp4"
FORMAT = 1
_OVERRIDES, _SOURCES = ".hydra/overrides.yaml", ".hydra/hydra.yaml"
_OWN_FOLDER = re.compile(rb"- path: .+\n +schema: file\n +provider: command-line\n")  # of -cd
# Settings of where and how a run was trained, not of what was trained.
_NOT_REPEATED = ("output_dir=", "hydra.", "hydra/", "logger=", "logger.", "resume=", "~logger")
# A user and a password, which some drivers accept with a slash (5000/ is a port), or a token alone.
_CREDENTIALS = re.compile(r"\w+://(?:[^/\s@:\[]*:(?!\d+(?:[/?#]|$))[^\s@]+|[^/\s@]+)@")
_FRESH_SEEDS = 1_000_000  # between the seeds of evaluations in training and those of one afterwards


@dataclass(frozen=True)
class Options:
    """What was typed about the contents."""

    episodes: int | None = None  # of a new evaluation; None: the score that the checkpoint records
    film: bool = True
    licence: str | None = None
    imports: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """A run, or a checkpoint alone, that is shared."""

    checkpoint: Path
    run: Path | None  # its folder; None for a checkpoint that is in no run folder
    header: dict[str, Any]
    file: Path  # the checkpoint itself, or a copy of it, which a training that goes on does not replace

    @property
    def max_steps(self) -> int | None:
        """The number of steps after which the training's evaluations cut an episode, if it was set."""
        return plan(self.checkpoint, self.header, Typed())[2]

    def restore(self, imports: tuple[str, ...]) -> Any:
        """Return the agent. Code of the user must be among `imports`."""
        run = self.header.get("run")
        needed = list_needed_modules(self.header["env"], run if isinstance(run, dict) else {})
        require_typed(needed, imports, self.checkpoint)
        return restore_to_act(self.file, self.header, list(imports))


def find_source(path: Path) -> Source:
    """Return what `path`, a run folder, a checkpoint or the name of a pulled run, stands for.

    Raises
    ------
    ValueError, FileNotFoundError
        If it is neither, or the checkpoint cannot be read.
    UsageError
        If something that would be shared contains a password or a token.
    """
    path = find_pulled(str(path)) or path
    if path.is_dir():
        folder, checkpoint = path, best_of(path)
    elif path.exists():
        folder, checkpoint = run_files.locate(path)[0], path
    else:
        raise FileNotFoundError(f"{path} must be a run folder or a checkpoint, got nothing there{hint(path)}")
    run = folder if run_files.is_file(folder, FILE) else None
    source = Source(checkpoint, run, read_known_header(checkpoint), checkpoint)
    for where, key, value in _texts(source):
        if _CREDENTIALS.search(value.replace(f"{HIDDEN}@", "")):
            raise UsageError(
                f"{key} of {shown(where)} contains a password or a token, which would be shared; take it out of that "
                "file, or train without it"
            )
    return source


def _texts(source: Source) -> Iterator[tuple[Path, str, str]]:
    """Yield all texts that would be shared, each with its file and its key."""
    yield from ((source.checkpoint, key, value) for key, value in _strings(source.header))
    if (run := source.run) is None:
        return
    yield from ((run / CONFIG, key, value) for key, value in _strings(read_config(run)))
    yield from ((run / _OVERRIDES, word.partition("=")[0], word) for word in shlex.split(_command(run) or ""))
    for row, _ in read_rows(run / FILE):
        if "event" in row:
            yield from ((run / FILE, key, value) for key, value in _strings(row))


def _strings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _strings(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _strings(inner, key)


def collect(source: Source, folder: Path, name: str, options: Options) -> tuple[Facts, list[str]]:
    """Write everything that is shared into the empty `folder`.

    Returns
    -------
    Facts
        What the card says.
    list of str
        A note on each part that is missing, and why.
    """
    import_modules(options.imports)
    (folder / run_files.CHECKPOINTS).mkdir()
    copy = folder / _shared_name(source.checkpoint)
    shutil.copyfile(source.checkpoint, copy)
    source = replace(source, file=copy, header=load_checkpoint(copy).header)
    facts, notes = describe(source, options)
    if source.run is not None:
        for file in (CONFIG, FILE):
            with run_files.open_file(source.run, file) as read, open(folder / file, "wb") as write:
                shutil.copyfileobj(read, write)
        try:
            _draw_curve(source.run, folder / CURVE)
            facts = replace(facts, curve=CURVE)
        except (ImportError, UsageError) as e:
            notes.append(f"no curve: {paragraph(e)}")
    if options.film and not facts.language:
        try:
            _film(source, folder / FILM, options.imports)
            facts = replace(facts, film=FILM)
        except Exception as e:  # of the environment, which may have no renderer
            notes.append(f"no film: {paragraph(e)}")
    (folder / CARD).write_text(write_card(facts, name), encoding="utf-8")
    write_manifest(folder, facts)
    verify(folder, read_manifest(folder))
    return facts, notes


def _shared_name(checkpoint: Path) -> str:
    """Return the name of a checkpoint in the shared folder: one of those that are looked for in a pulled run."""
    name = checkpoint.name if checkpoint.name == "best.safetensors" else "last.safetensors"
    return f"{run_files.CHECKPOINTS}/{name}"


def describe(source: Source, options: Options) -> tuple[Facts, list[str]]:
    """Return what the card says about the agent, without pictures, and notes on what is missing."""
    header, notes = source.header, []
    family = family_of_checkpoint(header)
    step, unit = trained_for(header)
    recorded = header.get("run")
    run: dict[str, Any] = recorded if isinstance(recorded, dict) else {}
    command = None if source.run is None else _command(source.run)
    if command is None:
        notes.append("no command to repeat the training: the run was not started by `rlox train`")
    score = None
    if options.episodes is not None and family.completes_prompts:
        raise UsageError("--episodes must be left out for a language model; its card has the score of the training")
    if options.episodes is not None:
        score = _evaluate(source, options)
    elif (score := _recorded_score(source)) is None:
        how = "" if family.completes_prompts else "; --episodes N measures one"
        notes.append(f"no score: the checkpoint records none{how}")
    reference, known, n_steps = run.get("reference"), header.get("versions"), run.get("total_timesteps")
    required = reference.get("mean_return") if isinstance(reference, dict) else None
    own = "rows of its own" if family.completes_prompts else "an environment of its own"
    facts = Facts(
        algorithm=header["algorithm"],
        task=str(family.recorded_task(header) or own),
        step=step,
        n_steps=n_steps if isinstance(n_steps, int) else step,
        unit=unit,
        seed=header["seed"],
        checkpoint=_shared_name(source.checkpoint),
        command=command,
        changes=[] if source.run is None else _changes(source.run, step),
        versions={str(key): str(value) for key, value in (known if isinstance(known, dict) else {}).items()},
        score=score,
        score_name=family.measure(header["algorithm"]),
        reference=required if isinstance(required, (int, float)) else None,
        language=family.completes_prompts,
        licence=options.licence,
        imports=sorted(set(list_needed_modules(header["env"], run))) if not family.completes_prompts else [],
    )
    return facts, notes


def _recorded_score(source: Source) -> Score | None:
    """Return the score with which the checkpoint was saved; None if there was no evaluation."""
    recorded = source.header.get("evaluation")
    if not isinstance(recorded, dict):
        return None
    mean, std, n = recorded.get("mean_return"), recorded.get("std_return", 0.0), recorded.get("n_episodes")
    if not (isinstance(mean, (int, float)) and isinstance(std, (int, float)) and isinstance(n, int)):
        return None
    n_choices = 1
    if source.checkpoint.stem == "best" and source.run is not None:
        evaluations = read_run(source.run, {EVALUATION}).series.get(EVALUATION)
        n_choices = 1 if evaluations is None else len(evaluations.values)
    deterministic = bool(recorded.get("deterministic", True))
    return Score(mean, std, *interval_of_mean(mean, std, n), n, recorded.get("seed"), deterministic, n_choices)


def _evaluate(source: Source, options: Options) -> Score:
    """Return the score in new episodes, with a seed that the training did not use."""
    assert options.episodes is not None
    agent = source.restore(options.imports)
    seed = 10_000 + _FRESH_SEEDS + source.header["seed"]
    evaluation = agent.evaluate(options.episodes, seed, max_steps=source.max_steps)
    summary = evaluation.summary()
    mean, std = summary["mean_return"], summary["std_return"]
    bounds = interval_of_mean(mean, std, options.episodes)
    return Score(mean, std, *bounds, options.episodes, evaluation.seed, True, None)


def _command(run: Path) -> str | None:
    """Return the command that repeats a training; None if it was not started on the command line."""
    try:
        typed = read_plain(run, _OVERRIDES)
    except (OSError, ValueError):
        return None
    if not isinstance(typed, list) or not all(isinstance(word, str) and word.isprintable() for word in typed):
        return None
    words, config = [word for word in typed if not word.lstrip("+").startswith(_NOT_REPEATED)], read_config(run)
    if "seed" in config and not any(word.startswith("seed=") for word in typed):
        words.append(f"seed={config['seed']}")
    with suppress(OSError, ValueError):
        if _OWN_FOLDER.search(run_files.read_bytes(run, _SOURCES, MOST_BYTES)):
            words[:0] = ["-cd", NO_FOLDER]
    return shlex.join(["rlox", "train", *words]).replace("`", "")


def _changes(run: Path, most: int) -> list[tuple[int, str]]:
    """Return the settings with which a run was resumed, up to the step `most`, each with its step."""
    changes = []
    for row, _ in read_rows(run / FILE):
        changed = row.get("changed") if row.get("event") == "start" and row["step"] <= most else None
        if isinstance(changed, dict) and changed:
            words = [f"{key}={plain(pair[-1])}" for key, pair in changed.items() if isinstance(pair, list) and pair]
            changes.append((row["step"], shlex.join(words).replace("`", "")))
    return changes


def _draw_curve(run: Path, file: Path) -> None:
    """Draw the learning curve of a run."""
    from rlox_cli.report.picture import Picture

    metric = choose_metric(None, [run])
    runs, _ = read_runs([run], metric)
    Picture(group_runs(runs), metric, False).save([file])


def _film(source: Source, file: Path, imports: tuple[str, ...]) -> None:
    """Film one episode."""
    agent = source.restore(imports)
    writer = VideoWriter(file, render_fps(source.header["env"]["id"]))
    with writer as film:
        agent.evaluate(1, frames=film.add, max_steps=source.max_steps)


def write_manifest(folder: Path, facts: Facts) -> None:
    """List the files of `folder` with sizes and hashes, except for the card, which is text that may be edited."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    files = {name: file_entry(folder / name) for name in names if name not in (CARD, MANIFEST)}
    manifest = {
        "format": FORMAT,
        "rlox": __version__,
        "algorithm": facts.algorithm,
        "task": facts.task,
        "step": facts.step,
        "checkpoint": facts.checkpoint,
        "score": None if facts.score is None else facts.score.text,
        "files": files,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def file_entry(path: Path) -> dict[str, Any]:
    """Return the size and the SHA-256 of a file."""
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return {"size": path.stat().st_size, "sha256": digest.hexdigest()}


# What a shared folder may contain, besides the card and the manifest.
ALLOWED = re.compile(
    rf"{re.escape(CONFIG)}|{re.escape(FILE)}|curve\.png|replay\.(mp4|gif)|{run_files.CHECKPOINTS}/[\w-]+\.safetensors",
    re.ASCII,
)
_MOST_FILES, _MOST_BYTES = 16, 1 << 20


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a folder.

    Raises
    ------
    ValueError
        If it is not one, or lists a file that rlox does not write.
    """
    where = f"{MANIFEST} of {folder.name}"
    try:
        manifest = json.loads(run_files.read_bytes(folder, MANIFEST, _MOST_BYTES))
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{where} must be JSON that rlox wrote, got {paragraph(e)}") from e
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict) or type(manifest.get("format")) is not int:
        raise ValueError(f"{where} must list files, as `rlox push` writes it; the repository holds something else")
    if manifest["format"] > FORMAT:
        raise ValueError(f"{where} must be of format {FORMAT}, got {manifest['format']}; update rlox-cli")
    for name, entry in files.items():
        if ALLOWED.fullmatch(name) is None or len(files) > _MOST_FILES:
            raise ValueError(f"{where} must list files that rlox writes, got {name[:100]!r}; nothing was pulled")
        sound = isinstance(entry, dict) and type(entry.get("size")) is int and entry["size"] >= 0
        if not sound or not isinstance(entry.get("sha256"), str):
            raise ValueError(f"{where} must have the size and the SHA-256 of {name}")
    if not isinstance(manifest.get("checkpoint"), str) or manifest["checkpoint"] not in files:
        raise ValueError(f"{where} must name its checkpoint among its files")
    return manifest


def verify(folder: Path, manifest: dict[str, Any]) -> None:
    """Compare the files of `folder` with the manifest, and read them as strictly as any file of somebody else.

    Raises
    ------
    ValueError
        If a file differs, or is not what its name says.
    """
    for name, entry in manifest["files"].items():
        if not run_files.is_file(folder, name):
            raise ValueError(f"{name} is in {MANIFEST}, but not in the repository")
        if (got := file_entry(folder / name)) != {"size": entry["size"], "sha256": entry["sha256"]}:
            raise ValueError(
                f"{name} must have the SHA-256 {entry['sha256'][:16]}… of {MANIFEST}, got {got['sha256'][:16]}…: it "
                "was changed or cut short"
            )
    load_checkpoint(folder / manifest["checkpoint"])
    if CONFIG in manifest["files"]:
        with suppress(FileNotFoundError):
            read_config(folder)
