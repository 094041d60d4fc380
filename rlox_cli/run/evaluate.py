"""``rlox eval`` and ``rlox generate``: what a checkpoint's agent scores, or writes."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rlox.checkpoint import one_line
from rlox.checkpoint.checks import visible
from rlox.config import RunConfig, shown
from rlox.evaluation.video import VideoWriter
from rlox.llm.templates import COLUMNS
from rlox_cli.config.saved import configuration
from rlox_cli.families.family import NO_SAMPLER, Evaluation, family_of_checkpoint
from rlox_cli.families.imports import import_modules, import_words, require_typed
from rlox_cli.records.checkpoints import read_known_header
from rlox_cli.records.pulled import find_checkpoint
from rlox_cli.terminal.console import print_text
from rlox_cli.terminal.errors import UsageError
from rlox_cli.terminal.paths import output_path
from rlox_cli.terminal.paths import shown as shown_path

_DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER")  # if one is set, a window can be shown or is not wanted


def main(path: Path, typed: Evaluation) -> None:
    """Evaluate and print. What is not typed comes from the checkpoint."""
    if typed.pass_at is not None and not math.isfinite(typed.pass_at):
        raise ValueError(f"--pass-at must be a finite number, got {typed.pass_at}")
    import_modules(typed.imports)
    if typed.video is not None:
        VideoWriter(
            video := output_path("--video", typed.video)
        )  # reports a wrong extension or a missing package before any episode is run
        typed = replace(typed, video=video)
    if typed.predictions is not None:
        typed = replace(typed, predictions=output_path("--predictions", typed.predictions))
    if typed.render and not _has_display():
        raise ValueError(
            "--render must have a display, but DISPLAY is not set; --video FILE records an episode instead"
        )
    given, path = path, find_checkpoint(path)
    if path != given:
        print_text(f"evaluating {path}", stderr=True)
    header = read_known_header(path)
    read_config = partial(_read_config, path, header, list(typed.imports))
    family_of_checkpoint(header).evaluate(path, header, typed, read_config)


def enjoy(path: Path, typed: Evaluation) -> None:
    """Show episodes in a window.

    Raises
    ------
    UsageError
        If there is no display, or nothing acts in an environment.
    """
    if not _has_display():
        words = [shown_path(path), "--video", "episode.mp4", *import_words(typed.imports)]
        raise UsageError(
            f"a window needs a display, but DISPLAY is not set; to record a film instead: rlox eval {shlex.join(words)}"
        )
    import_modules(typed.imports)
    given, path = path, find_checkpoint(path)
    if path != given:
        print_text(f"showing {path}", stderr=True)
    header = read_known_header(path)
    family_of_checkpoint(header).show(path, header, typed)


def _has_display() -> bool:
    """Return whether windows can be opened; without trying, only Linux says so."""
    return sys.platform != "linux" or any(os.environ.get(name) for name in _DISPLAYS)


def generate(
    path: Path,
    prompts: list[str],
    n: int,
    seed: int | None,
    settings: dict[str, Any],
    as_json: bool,
    chat: bool,
    imports: list[str],
) -> None:
    """Complete `prompts`, or the lines of standard input, and print the completions. With `chat`, prompts are JSON."""
    import_modules(imports)
    path = find_checkpoint(path)
    header = read_known_header(path)
    family: Any = family_of_checkpoint(header)
    if not family.completes_prompts:
        raise UsageError(
            f"{path} must hold a language model, got {header['algorithm']}; use `rlox eval` for its policy"
        )
    try:
        prompts = prompts or [line for line in sys.stdin.read().splitlines() if line]
        "".join(prompts).encode()
    except UnicodeError as e:
        raise UsageError("PROMPT must be text in UTF-8, got other bytes") from e
    if not prompts:
        raise UsageError("PROMPT must be given, or lines on standard input")
    rows: list[Any] = [_chat(prompt, i) for i, prompt in enumerate(prompts)] if chat else prompts
    config = _read_config(path, header, imports)
    algorithm = family.restore(config, path, trusted=False, acts=True)
    completed = algorithm.generate(rows, n, seed=seed, **settings)
    for row, texts in zip(rows, completed, strict=True):
        prompt = row["prompt"] if chat else row
        if as_json:
            print(json.dumps({"prompt": prompt, "completions": texts}))
            continue
        for text in texts:
            whole = text if chat else f"{prompt}{text}"
            print(visible(whole) if sys.stdout.isatty() else whole)  # a pipe gets what the model wrote


def _chat(text: str, row: int) -> dict[str, Any]:
    """Return a chat that is given as JSON, as a row of a dataset."""
    names = ("prompt", *COLUMNS)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise UsageError(f"PROMPT {row} must be JSON with --chat, got {shown(text)} ({one_line(e)})") from e
    fields = value if isinstance(value, dict) else {"prompt": value}
    if not isinstance(fields.get("prompt"), list) or not fields.keys() <= {*names}:
        raise UsageError(
            f"PROMPT {row} must be a list of messages with --chat, or an object with {', '.join(names)}, got "
            f"{shown(value)}"
        )
    return {name: fields.get(name) for name in names}


def _read_config(path: Path, header: dict[str, Any], imports: list[str]) -> RunConfig:
    """Return the configuration of the run that wrote a checkpoint."""
    run = header.get("run")
    if not isinstance(run, dict):
        raise UsageError(f"{path} must be a checkpoint of `rlox train`, which holds its run's configuration")
    require_typed(map(str, run.get("imports") or ()), imports, path)
    import_modules(imports)
    config, _ = configuration(run, imports, path)
    # Here the model samples by itself: a server may be gone, or used by another training by now.
    return replace(config, **NO_SAMPLER)
