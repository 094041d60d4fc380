"""``rlox train resume=RUN``: continue a run with its own configuration and the changes that were typed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from rlox.checkpoint import Checkpoint, decode_value, load_checkpoint, one_line, run_files, trained_for, versions
from rlox.checkpoint.meaning import DEFINES_MEANING, DEFINES_WEIGHTS
from rlox.config import RunConfig
from rlox.config.run import differences, to_plain
from rlox.distributed.ranks import count_saved_ranks, current
from rlox.tracking.record import FILE, Ledger, is_alive
from rlox.tracking.store import read_config
from rlox_cli.config.compose import composed
from rlox_cli.config.explain import explain
from rlox_cli.config.overrides import refuse_blanks
from rlox_cli.config.saved import add_types, algorithm_name, check_saved
from rlox_cli.config.schema import CONFIG_MODULE, CONFIG_NAME, register, to_run_config
from rlox_cli.families.family import OFF_POLICY_ONLY, family_of
from rlox_cli.families.received import require_again
from rlox_cli.records.folders import resume_command
from rlox_cli.records.runs import plain
from rlox_cli.run.session import Outcome, Resumption, Stopper, resume
from rlox_cli.terminal.errors import UsageError
from rlox_cli.terminal.paths import shown

# Keys that define a run: a change would make it a different run, or make its checkpoints useless.
_FIXED = (
    *("seed", "init_from", "imports", "env.id", "env.n_envs", "env.kwargs", "env.wrappers", "env.backend"),
    *("env.reward_fn", "algo.name", *(f"algo.{name}" for name in (*DEFINES_WEIGHTS, *DEFINES_MEANING))),
    *("buffer", "dataset", "model", "model_dtype", "tokenizer", "reward", "reward_weights", "conversation"),
)
_ANEW = "start a new run, since its weights would not fit or mean something else"
_GROUPS = ("algo", "env", "buffer", "dataset")


def main(
    run: str,
    flags: list[str],
    overrides: list[str],
    modules: list[str],
    console: Console,
    stop_flag: Path | None = None,
    more: Sequence[Stopper] = (),
    trusted: bool = False,
    again: Sequence[tuple[str, Any]] = (),
) -> Outcome | None:
    """Resume a run, as `prepare` finds it. Return None if nothing is left to do."""
    resumption = prepare(run, flags, overrides, modules, console, trusted, again)
    return None if resumption is None else resume(resumption, console, stop_flag, more)


def prepare(
    run: str,
    flags: list[str],
    overrides: list[str],
    modules: list[str],
    console: Console,
    trusted: bool = False,
    again: Sequence[tuple[str, Any]] = (),
) -> Resumption | None:
    """Read the run in the folder `run`, or of the checkpoint `run`, and apply the typed changes.

    Return None if nothing is left to do: the run is finished, or the flags only print.

    Parameters
    ----------
    trusted : bool
        Whether the run's files are of this very command.
    again : sequence of (str, object)
        Settings of the run that were typed again, in addition to `overrides`.

    Raises
    ------
    UsageError
        If the folder contains no run, a key is unknown or cannot change, or a flag cannot be used here.
    """
    only_prints = _only_prints(flags)
    path = _checkpoint_of(Path(run), only_prints)
    folder = path.parent.parent
    register()
    saved = read_config(folder)
    algo = algorithm_name(saved, modules, folder / "config.yaml")
    config = _apply_changes(saved, algo, overrides)
    now = to_plain(config, algo)
    if not (only_prints or trusted):
        typed = {override.lstrip("+").partition("=")[0] for override in overrides}

        def is_typed(key: str, value: Any) -> bool:
            return key in typed or (key, value) in again

        require_again(now, folder, folder / "config.yaml", is_typed)
    check_saved(config, algo, folder / "config.yaml")
    before = to_plain(to_run_config(add_types(saved, algo)), algo)
    changed = dict(differences(before, now))
    for key, (old, new) in changed.items():
        if _is_fixed(key):
            fits = key.removeprefix("algo.") not in (*DEFINES_WEIGHTS, *DEFINES_MEANING)
            raise UsageError(
                f"{key} must stay {plain(old)} in a run that is resumed, got {plain(new)}; "
                + (f"a new run can start from its weights: rlox train … init_from={shown(path)}" if fits else _ANEW)
            )
    typed_backend = any(override.startswith("backend=") for override in overrides)
    if config.backend == "native" and not typed_backend and any(key.startswith("algo.") for key in changed):
        config.backend = "auto"  # it was chosen for the settings before, and kernels may not compute those of now
    if only_prints:
        print(yaml.safe_dump(to_plain(config, algo), sort_keys=False), end="")
        return None
    try:
        checkpoint = load_checkpoint(path, mapped=True)  # for its header
    except ValueError as e:
        raise ValueError(f"{e}{_best_hint(path)}") from e
    steps, unit = trained_for(checkpoint.header)
    if checkpoint.header["algorithm"] != algo:
        raise UsageError(f"{shown(path)} must hold {algo}, as the run's config.yaml says, got another algorithm")
    env = family_of(config.algo, config.env.id).recorded_task(checkpoint.header)
    if env is not None and env != config.env.id:
        raise UsageError(
            f"{shown(path)} must be of {config.env.id}, as the run's config.yaml says, got {one_line(env, 80)}; "
            "restore the file, or start a new run"
        )
    _require_unedited(checkpoint.header.get("run"), before, path)
    if "total_timesteps" in changed and config.total_timesteps < steps:
        raise UsageError(
            f"total_timesteps must be at least that of {shown(path)}, {steps:,}, got {config.total_timesteps:,}"
        )
    ledger = Ledger(folder)
    ledger.scan()
    more = any(override.lstrip("+").startswith("total_timesteps=") for override in overrides)
    if path.stem == "last" and (ended := _describe_end(ledger, checkpoint, config, changed, more)):
        text, further = ended
        console.print(f"{shown(folder)} is finished: {text}. To train on: {resume_command(folder)} {further}")
        return None
    console.print(f"resuming {shown(folder)} at {unit[:-1]} {steps:,} of {config.total_timesteps:,}")
    if path.stem == "last" and ledger.last < steps:
        console.print(
            f"warning: {FILE} has rows up to {unit[:-1]} {ledger.last:,} only, so curves of this run have a gap until "
            f"{steps:,}; restore the file to close it"
        )
    for key, (old, new) in changed.items():
        console.print(f"changed: {key} {plain(old)} -> {plain(new)}")
    earlier = checkpoint.header.get("versions")
    earlier = earlier if isinstance(earlier, dict) else {}
    now = versions("cuda" if "gpu" in earlier and config.device != "cpu" and _has_gpu() else "cpu")
    others = [f"{name} {was} -> {now.get(name)}" for name, was in earlier.items() if now.get(name) != was]
    if others:
        console.print(f"saved with other versions, so results may differ in the last bits: {', '.join(others)}")
    if (n_saved := count_saved_ranks(checkpoint.header)) != (ranks := current().size):
        who = f"{n_saved} ranks" if n_saved > 1 else "1 rank"
        console.print(
            f"saved by {who}, resumed by {ranks}: weights, optimisers, statistics, counters and native environments "
            "continue; random numbers from now on differ"
        )
    if config.buffer is not None and ("memory" not in checkpoint.header or n_saved != ranks):
        lacks = "holds no replay memory" if n_saved == ranks else "holds the replay memory of other ranks"
        console.print(
            f"{path.name} {lacks}: the memory starts empty, and the restored policy fills it with "
            f"{config.algo.learning_starts:,} steps before the first update"
        )
    # A user who types the number of environments, or their modules, has checked what the files request.
    trusted = trusted or bool(modules) or any(word.lstrip("+").startswith("env.n_envs=") for word in overrides)
    return Resumption(config, algo, path, changed, trusted)


def _is_fixed(key: str) -> bool:
    return any(f"{key}.".startswith(f"{fixed}.") for fixed in _FIXED)


def _require_unedited(recorded: Any, saved: dict[str, Any], path: Path) -> None:
    """Raise a UsageError if config.yaml differs from the checkpoint in a setting that a resume cannot change."""
    for key, (old, new) in differences(decode_value(recorded), saved) if isinstance(recorded, dict) else ():
        if _is_fixed(key) and old is not None:  # a checkpoint of an older version lacks new settings
            raise UsageError(
                f"{shown(path)} must have {key}={one_line(plain(new), 80)}, as the run's config.yaml says, got "
                f"{one_line(plain(old), 80)}; restore config.yaml, or start a new run"
            )


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _only_prints(flags: list[str]) -> bool:
    """Return whether the flags are ``--cfg job``. All others are Hydra's, which does not run this job."""
    if not flags:
        return False
    if flags in (["--cfg", "job"], ["-c", "job"], ["--cfg=job"]):
        return True
    raise UsageError(
        f"{flags[0]} must not be combined with resume=, which continues one run; the only flag allowed is --cfg job"
    )


def _checkpoint_of(run: Path, only_prints: bool) -> Path:
    path = run / "checkpoints" / "last.safetensors" if run.is_dir() else run
    folder = path.parent.parent
    if not run.exists():
        raise UsageError(f"resume={run} does not exist; name a run folder (`rlox ls runs`) or a checkpoint in one")
    if os.path.lexists(run / "sweep.jsonl"):
        raise UsageError(f"resume={run} is a sweep, not a run; resume it: rlox sweep resume {run}")
    if not all(run_files.is_file(folder, name) for name in (FILE, "config.yaml")):
        raise UsageError(
            f"resume={run} must be a run folder, or a checkpoint in the checkpoints/ of one, which has config.yaml and "
            f"{FILE}; a new run can start from a checkpoint's weights: rlox train … init_from={run}"
        )
    if is_alive(folder) and not only_prints:
        raise UsageError(f"{shown(folder)} is being trained by another process; stop it first, or wait")
    if not run_files.is_file(*run_files.locate(path)):
        raise UsageError(
            f"{shown(folder)} has no {path.name}, so there is nothing to resume"
            f"{_best_hint(path) or '; start a new run'}"
        )
    return path.absolute()


def _best_hint(path: Path) -> str:
    """Return a hint about the best checkpoint, for an error about `path`."""
    best = path.with_name("best.safetensors")
    return f"; the best checkpoint is there: {resume_command(best)}" if best != path and best.is_file() else ""


def _apply_changes(saved: dict[str, Any], algo: str, overrides: list[str]) -> RunConfig:
    """Return the run's configuration with the typed changes."""
    cfg = add_types(saved, algo)
    if cfg.reference is None:  # no key can be added to null
        cfg.reference = {}
    GlobalHydra.instance().clear()
    with initialize_config_module(CONFIG_MODULE, version_base="1.3", job_name="rlox"):
        try:
            parsed = OverridesParser.create(GlobalHydra.instance().config_loader()).parse_overrides(overrides)
            for override in sorted(parsed, key=lambda item: item.key_or_group != "logger"):  # before their keys
                _apply(cfg, override, algo)
            return to_run_config(cfg)
        except UsageError:
            raise
        except (HydraException, OmegaConfBaseException, ValueError, TypeError) as e:
            raise UsageError(explain(e)) from e


def _apply(cfg: DictConfig, override: Override, algo: str) -> None:
    line, key = override.input_line, override.key_or_group
    refuse_blanks(key, line.partition("=")[2])
    if override.type is OverrideType.DEL or override.is_sweep_override():
        raise UsageError(f"{line} must be KEY=VALUE with one value: resume= continues one run")
    if key.split(".")[0].split("/")[0] in ("hydra", "output_dir", "tuned", "experiment", "preset"):
        raise UsageError(f"{line} must not be combined with resume=, which continues with the run's own settings")
    if key == "logger":
        cfg.logger = composed([f"algo={algo}", "tuned=off", line], CONFIG_NAME, "").logger
        return
    if key in _GROUPS:
        was = {
            "algo": algo,
            "env": cfg.env.id,
            "buffer": None if cfg.buffer is None else cfg.buffer.name,
            "dataset": None if cfg.dataset is None else cfg.dataset.source,
        }[key]
        if override.value() not in (was, cfg.preset if key == "algo" else was):
            raise UsageError(f"{line} must stay {key}={was} in a run that is resumed; leave it out, or start a new run")
        return
    _require_section(cfg, line, key, override.value())
    OmegaConf.update(cfg, key, override.value(), merge=True)


def _require_section(cfg: DictConfig, line: str, key: str, value: Any) -> None:
    """Raise a UsageError if `key` is below a section that is null, to which no key can be added."""
    parts = key.split(".")
    n = len(parts) + (isinstance(value, dict) and parts[0] == "logger")
    above = (".".join(parts[:i]) for i in range(1, n))
    name = next((name for name in above if OmegaConf.select(cfg, name, default="") is None), None)
    if name is not None and name.startswith("logger."):
        logger = name.removeprefix("logger.")
        raise UsageError(f"{line}: the logger {logger} is not chosen; add logger={logger}")
    if name is not None:
        why = f"needs a replay memory; {OFF_POLICY_ONLY}" if name == "buffer" else f"must be left out: {name} is null"
        raise UsageError(f"{key} {why}")


def _describe_end(
    ledger: Ledger, checkpoint: Checkpoint, config: RunConfig, changed: dict[str, Any], more: bool
) -> tuple[str, str] | None:
    """Return how the run ended and what lets it go on; None if it did not end, or what was typed lets it go on.

    `more` says whether a number of steps was typed.
    """
    if ledger.end is None or ledger.end["status"] != "finished":
        return None
    (steps, unit), message = trained_for(checkpoint.header), ledger.end["message"]
    if steps >= config.total_timesteps:
        return f"{steps:,} {unit}", f"total_timesteps={2 * steps}"
    if "max_time=" in message or "the time limit of" in message:
        return None
    text = ", ".join(filter(None, [f"{steps:,} {unit}", message]))
    for key in ("stop_at", "patience"):
        # With the same rule, it would stop again before its first update.
        if f"{key}=" in message and (f"eval.{key}" in changed or getattr(config.eval, key) is not None):
            return None if f"eval.{key}" in changed else (text, f"eval.{key}=null")
    return None if more else (text, f"total_timesteps={max(2 * steps, config.total_timesteps)}")
