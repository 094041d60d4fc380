"""Learning curves of Stable-Baselines3, recorded or trained now, with our settings and our protocol.

A file ``LABEL-sSEED.json``, with the label as `file_name` returns it, holds ``settings``, the version as ``sb3``, and
``evaluations``, rows ``step mean std cpu_s``. For another trainer than Stable-Baselines3, its name and version are
``peer``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from rlox.checkpoint import run_files
from rlox.config import OnPolicyConfig, RunConfig
from rlox_cli.bench.peers import ask_worker, find_systems
from rlox_cli.bench.seeds import SWITCHES, file_name
from rlox_cli.config.compose import Job
from rlox_cli.records.runs import short
from rlox_cli.terminal.errors import UsageError

_ALGORITHMS = ("ppo", "a2c", "dqn", "sac", "td3")
# Ours -> theirs, where the names differ.
_NAMES = {
    "clip_eps": "clip_range",
    "clip_vf": "clip_range_vf",
    "normalize_advantages": "normalize_advantage",
    "target_update_freq": "target_update_interval",
    "target_noise": "target_policy_noise",
    "noise_clip": "target_noise_clip",
}
# Settings that do not map to a single argument of theirs.
_SPECIAL = (
    *("learning_rate_schedule", "clip_eps_schedule", "hidden_sizes", "activation", "ortho_init", "log_std_init"),
    *("optimizer", "normalize_obs", "normalize_rewards", "clip_obs", "clip_rewards", "double_dqn", "dueling", "loss"),
    *("exploration_noise", "noise_correlation", "auto_entropy", "target_entropy"),
)
_AT_MOST = 1.2  # largest ratio of the lengths of a recorded training and ours, which is rounded to whole rollouts


def read_curves(folder: Path, label: str, job: Job, seeds: Sequence[int]) -> tuple[str, dict[int, list]]:
    """Return the title, and the curves of those `seeds` that were recorded.

    Raises
    ------
    UsageError
        If there are none, a file is damaged, or a training had another length.
    """
    found, version = {}, ""
    for seed in seeds:
        path = folder / _file_name(label, seed)
        if path.is_file():
            found[seed], version = _read(path, job.config)
    if not found:
        raise UsageError(
            f"--reference {folder} must hold {_file_name(label, seeds[0])} or another of the seeds; train them with "
            "--peer-python"
        )
    return version, found


def _file_name(label: str, seed: int) -> str:
    return f"{file_name(label)}-s{seed}.json"


def _read(path: Path, config: RunConfig) -> tuple[list[dict[str, float]], str]:
    steps = config.total_timesteps
    try:
        saved = json.loads(path.read_text("utf-8"))
        curve = [
            {key: row[key] for key in ("step", "mean", "std", "cpu_s") if key in row} for row in saved["evaluations"]
        ]
        last = curve[-1]["step"]
        version = saved["peer"] if "peer" in saved else f"Stable-Baselines3 {saved['sb3']}"
        theirs = {key: saved.get("settings", {}).get(key, ours) for key, ours in _task(config).items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as e:
        raise UsageError(f"{path} must hold the evaluations of a run: {e!r}") from e
    if not steps / _AT_MOST <= last <= steps * _AT_MOST:
        raise UsageError(f"{path} must be of about as many steps as ours ({steps:,}), got {last:,}")
    if others := [f"{key} {theirs[key]} -> {ours}" for key, ours in _task(config).items() if theirs[key] != ours]:
        raise UsageError(f"{path} must be of the same task as ours, but differs: {'; '.join(others)}")
    return curve, version


def _task(config: RunConfig) -> dict[str, Any]:
    """Return the settings that must be equal in a recording, in addition to its length, for comparable scores."""
    return {
        "env": config.env.id,
        "env_kwargs": config.env.kwargs,
        "n_envs": config.env.n_envs,
        "n_episodes": config.eval.n_episodes,
        **({} if config.eval.max_steps is None else {"max_steps": config.eval.max_steps}),
    }


def find_python(pythons: Sequence[Path]) -> str:
    """Return the first of `pythons` that has Stable-Baselines3.

    Raises
    ------
    UsageError
        If none has it, or one is no interpreter.
    """
    python = find_systems(pythons).get("sb3")
    if python is None:
        raise UsageError(f"--peer-python must have Stable-Baselines3, got {', '.join(map(str, pythons))}")
    return python


def train_curves(
    python: str, label: str, job: Job, seeds: Sequence[int], folder: Path, console: Console
) -> tuple[str, dict[int, list]]:
    """Return the title and curves of trainings with Stable-Baselines3 of the interpreter `python`.

    Each training has its own process. Trainings with the same settings that are already in `folder` are not repeated.

    Raises
    ------
    UsageError
        If it has no counterpart for a setting.
    RuntimeError
        If a training fails.
    """
    settings = settings_of(job.config, job.algo)
    folder.mkdir(parents=True, exist_ok=True)
    curves, version = {}, ""
    for seed in seeds:
        path = folder / _file_name(label, seed)
        if not (path.is_file() and json.loads(path.read_text("utf-8"))["settings"] == settings):
            eval_seed = 10_000 + seed if job.config.eval.seed is None else job.config.eval.seed
            answer = ask_worker(python, {"system": "sb3", "curve": settings, "seed": seed, "eval_seed": eval_seed}, 1)
            saved = {"cell": label, "seed": seed, "settings": settings, **answer}
            run_files.replace_text(folder, path.name, json.dumps(saved) + "\n")
        curves[seed], version = _read(path, job.config)
        last = curves[seed][-1]
        console.print(f"{label} seed {seed}: Stable-Baselines3 {short(last['mean'])}, {last['cpu_s']:.1f} s CPU")
    return version, curves


def settings_of(config: RunConfig, algo: str) -> dict[str, Any]:
    """Return the settings with which benchmarks/peers/trainings.py runs the same training.

    Raises
    ------
    UsageError
        If a setting has no counterpart.
    """
    if missing := list(_missing(config, algo)):
        raise UsageError(f"Stable-Baselines3 has no counterpart for {', '.join(missing)}")
    c = config.algo
    unused = {name for _, names in SWITCHES.values() for name in names}
    arguments = {_NAMES.get(name, name): value for name, value in asdict(c).items() if name not in {*_SPECIAL, *unused}}
    for name, key in (("learning_rate", "learning_rate"), ("clip_eps", "clip_range")):
        if getattr(c, f"{name}_schedule", "constant") == "linear":
            arguments[key] = {"falls_from": getattr(c, name)}
    policy: dict[str, Any] = {"activation_fn": c.activation, "net_arch": c.hidden_sizes}
    if isinstance(c, OnPolicyConfig):
        policy |= {"net_arch": {"pi": c.hidden_sizes, "vf": c.hidden_sizes}, "ortho_init": c.ortho_init}
        policy["log_std_init"] = c.log_std_init
        arguments["max_grad_norm"] = 1e30 if c.max_grad_norm is None else c.max_grad_norm
        if algo == "a2c":
            arguments["use_rms_prop"] = c.optimizer == "rmsprop"
    else:
        arguments["buffer_size"] = config.buffer.size
        # Theirs counts a step of all environments together as one.
        arguments["train_freq"] = math.ceil(c.train_freq / config.env.n_envs)
        if algo != "dqn":
            del arguments["max_grad_norm"]
            arguments["action_noise"] = c.exploration_noise or None
        if algo == "sac":
            arguments["ent_coef"] = f"auto_{c.ent_coef}" if c.auto_entropy else c.ent_coef
            arguments["target_entropy"] = "auto" if c.target_entropy is None else c.target_entropy
    normalize = {"norm_obs": c.normalize_obs, "norm_reward": getattr(c, "normalize_rewards", False)}
    limits = {"clip_obs": c.clip_obs, "clip_reward": getattr(c, "clip_rewards", 10.0), "gamma": c.gamma}
    return {
        **_task(config),
        "algo": algo.upper(),
        "steps": config.total_timesteps,
        "normalize": {**normalize, **limits} if any(normalize.values()) else None,
        "kw": {**arguments, "policy_kwargs": policy},
        "n_points": config.eval.n_points,
    }


def _missing(config: RunConfig, algo: str) -> Iterator[str]:
    c = config.algo
    if algo not in _ALGORITHMS:
        yield f"algo={algo}"
        return
    if config.env.wrappers or config.env.reward_fn is not None:
        yield "env.wrappers and env.reward_fn"
    if any(x is not None for x in (config.schedule_timesteps, config.init_from, config.max_time, config.dataset)):
        yield "schedule_timesteps, init_from, max_time and dataset"
    if config.eval.stop_at is not None or config.eval.patience is not None:
        yield "eval.stop_at and eval.patience"
    for name, (off, _) in SWITCHES.items():
        if getattr(c, name, off) != off:
            yield f"algo.{name}={getattr(c, name)}"
    if algo == "ppo" and c.optimizer != "adam":
        yield f"algo.optimizer={c.optimizer}"
    if algo == "dqn" and (c.double_dqn or c.dueling or c.loss != "huber"):
        yield "algo.double_dqn, algo.dueling and algo.loss=mse"
    if algo in ("sac", "td3") and (c.max_grad_norm is not None or c.noise_correlation):
        yield "algo.max_grad_norm and algo.noise_correlation"
    if config.buffer is not None and (config.buffer.name != "uniform" or config.buffer.n_step != 1):
        yield "a buffer that is not uniform, or of several steps"
