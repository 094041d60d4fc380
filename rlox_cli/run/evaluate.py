"""``rlox eval``: compute a checkpoint's score from the file alone."""

from __future__ import annotations

import json as jsonlib
import math
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from rlox.algorithms import entry_of, resolve
from rlox.checkpoint import one_line, trained_for
from rlox.collectors.evaluation import Evaluation
from rlox.collectors.video import VideoWriter, render_fps
from rlox.envs.registry import imported_module
from rlox.offline.scores import normalized_score
from rlox.world_models.pictures import require_kind
from rlox.world_models.pictures import save as save_predictions
from rlox.world_models.predictions import open_loop
from rlox_cli.config.imports import import_modules, needed_modules, require_typed
from rlox_cli.records.checkpoints import best_of, known_header
from rlox_cli.run.evaluate_language import evaluate as evaluate_language
from rlox_cli.run.evaluate_language import is_language
from rlox_cli.terminal.console import print_text
from rlox_cli.terminal.paths import output_path

_MOST_EPISODES = 100_000  # that a file may request by itself
_DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER")  # if one is set, a window can be shown or is not wanted


def main(
    path: Path,
    episodes: int | None,
    seed: int | None,
    stochastic: bool,
    as_json: bool,
    video: Path | None,
    render: bool,
    imports: list[str],
    max_steps: int | None = None,
    samples: int | None = None,
    pass_at: float | None = None,
    predictions: Path | None = None,
) -> None:
    """Evaluate and print. Missing settings come from the checkpoint, else 20 episodes and seed 10_000 + seed."""
    if pass_at is not None and not math.isfinite(pass_at):
        raise ValueError(f"--pass-at must be a finite number, got {pass_at}")
    import_modules(imports)
    if video is not None:
        video = output_path("--video", video)
        VideoWriter(video)  # reports a wrong extension or a missing package before any episode is run
    if predictions is not None:
        predictions = output_path("--predictions", predictions)
    if render and sys.platform == "linux" and not any(os.environ.get(name) for name in _DISPLAYS):
        raise ValueError(
            "--render must have a display, but DISPLAY is not set; --video FILE records an episode instead"
        )
    if path.is_dir():
        path = best_of(path)
        print_text(f"evaluating {path}", stderr=True)
    header = known_header(path)
    if is_language(header):
        for flag, given in (
            ("--stochastic", stochastic),
            ("--video", video),
            ("--render", render),
            ("--max-steps", max_steps),
            ("--predictions", predictions),
        ):
            if given:
                raise ValueError(f"{flag} must be left out for a language model, which has no episodes")
        evaluate_language(path, header, episodes, seed, samples, 1.0 if pass_at is None else pass_at, as_json, imports)
        return
    for option, value in (("--samples", samples), ("--pass-at", pass_at)):
        if value is not None:
            raise ValueError(f"{option} must be left out for {header['algorithm']}, which completes no prompts")
    if header["env"]["id"] is None:
        raise ValueError(
            f"{path} must name the environment of its evaluation, but was trained without one; in Python, "
            f"from_checkpoint('{path}', env_id=…) takes one"
        )
    recorded = _object(header, "evaluation")
    planned = _object(_object(header, "run"), "eval")
    if episodes is None:
        episodes = recorded.get("n_episodes") or planned.get("n_episodes") or 20
        if type(episodes) is not int or not 1 <= episodes <= _MOST_EPISODES:
            raise ValueError(
                f"{path} requests n_episodes={one_line(episodes, 40)}, but a file may request 1 to {_MOST_EPISODES}; "
                "set --episodes"
            )
    if seed is None:
        seed = recorded.get("seed", planned.get("seed"))
        if seed is not None and (type(seed) is not int or not 0 <= seed < 2**63):
            raise ValueError(f"{path}: seed must be in [0, 2**63), got {one_line(seed, 40)}; set --seed")
    if max_steps is None:
        max_steps = planned.get("max_steps")
        if max_steps is not None and (type(max_steps) is not int or max_steps < 1):
            raise ValueError(
                f"{path}: eval.max_steps must be >= 1, or null, got {one_line(max_steps, 40)}; set --max-steps"
            )
    algorithm = restored(path, header, imports)
    if predictions is not None:
        require_kind(predictions, algorithm.spec.shows_images)
    evaluation = algorithm.evaluate(episodes, seed, deterministic=not stochastic, max_steps=max_steps)
    summary = evaluation.summary()
    # Separate from the score: pictures come from gymnasium's environment, also for native ids.
    if video is not None:
        with VideoWriter(video, render_fps(header["env"]["id"])) as film:
            shown = algorithm.evaluate(1, seed, deterministic=not stochastic, frames=film.add, max_steps=max_steps)
        _print_episode(f"recorded in {video}", shown)
    if render:
        one = algorithm.evaluate(1, seed, deterministic=not stochastic, render=True, max_steps=max_steps)
        _print_episode("shown", one)
    if predictions is not None:
        foreseen = open_loop(algorithm, seed=seed, deterministic=not stochastic, max_steps=max_steps)
        save_predictions(foreseen, predictions)
        print_text(f"{foreseen.horizon} predicted steps after {foreseen.context}, drawn in {predictions}", stderr=True)
        summary |= foreseen.summary()
    score = normalized_score(header["env"]["id"], summary["mean_return"])
    if as_json:
        print(jsonlib.dumps(summary if score is None else {**summary, "normalized_score": score}))
        return
    kind = "sampled" if stochastic else "deterministic"
    step, unit = trained_for(header)
    print_text(
        f"{header['algorithm']} on {header['env']['id']}, {unit[:-1]} {step:,}: "
        f"{episodes} {kind} episodes, seed {evaluation.seed}"
    )
    spread = f"{summary['min_return']:.2f} to {summary['max_return']:.2f}"
    print_text(f"  return  {summary['mean_return']:.2f} ± {summary['std_return']:.2f}  ({spread})")
    _print_agents(evaluation)
    print_text(f"  length  {summary['mean_length']:.1f}")
    if predictions is not None:
        print_text(
            f"  open loop  mean squared error {summary['open_loop_mse']:.4g}, "
            f"{summary['open_loop_share']:.1%} of the observations' variance; "
            f"{summary['open_loop_last_share']:.1%} in the last step"
        )
    if score is not None:
        print_text(f"  normalized_score {score:.1f}  (0: random, 100: expert, D4RL's references)")
    same = not stochastic and episodes == recorded.get("n_episodes") and evaluation.seed == recorded.get("seed")
    if same and isinstance(recorded.get("mean_return"), (int, float)):
        exact = "reproduced exactly" if summary["mean_return"] == recorded["mean_return"] else "NOT reproduced"
        print_text(
            f"  in training {recorded['mean_return']:.2f}: {'reproduced exactly' if exact else 'NOT reproduced'}"
        )


def _print_agents(evaluation: Evaluation) -> None:
    """Print a line for each of several agents and each group of them; the return above is the sum over agents."""
    means = getattr(evaluation, "by_name", {})
    wide = max(map(len, means), default=0)
    for name, mean in means.items():
        print_text(f"    {name:<{wide}}  {mean:.2f}")


def restored(path: Path, header: dict[str, Any], imports: list[str]) -> Any:
    """Return the algorithm of a checkpoint, to act with it. Code of the user must be among `imports`."""
    env = header["env"]
    _require_imports(header, path, imports)
    # Acting needs no replay memory.
    warnings.filterwarnings("ignore", "from_checkpoint: the replay memory", RuntimeWarning)
    # Passing the environment and its wrappers lets gymnasium import their modules, which were typed.
    return resolve(entry_of(header["algorithm"]).cls).from_checkpoint(
        path,
        env_id=env["id"] if any(map(imported_module, (env["id"], str(env["kwargs"].get("env_id"))))) else None,
        env_wrappers=env["wrappers"] if any("." in name or ":" in name for name in _wrapper_names(env)) else None,
    )


def _object(within: dict[str, Any], name: str) -> dict[str, Any]:
    found = within.get(name)
    return found if isinstance(found, dict) else {}


def _wrapper_names(env: dict[str, Any]) -> list[str]:
    return [wrapper if isinstance(wrapper, str) else next(iter(wrapper)) for wrapper in env["wrappers"]]


def _print_episode(what: str, episode: Evaluation) -> None:
    print_text(f"an episode {what}: return {episode.returns[0]:.2f}, {episode.lengths[0]} steps", stderr=True)


def _require_imports(header: dict[str, Any], path: Path, typed: list[str]) -> None:
    """Check that all modules that the file needs were typed, since a file must not decide what code runs."""
    require_typed(needed_modules(header["env"], _object(header, "run")), typed, path)
