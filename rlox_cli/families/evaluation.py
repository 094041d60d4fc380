"""``rlox eval`` for a policy: the score of a checkpoint from the file alone, and pictures of its episodes."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from rlox.algorithms import load
from rlox.checkpoint import one_line, trained_for
from rlox.envs.registry import find_module
from rlox.evaluation.episodes import Evaluation
from rlox.evaluation.pictures import require_kind
from rlox.evaluation.pictures import save as save_predictions
from rlox.evaluation.predictions import open_loop
from rlox.evaluation.video import VideoWriter, render_fps
from rlox.offline.scores import normalized_score
from rlox_cli.families.family import Evaluation as Typed
from rlox_cli.families.family import family_of_checkpoint
from rlox_cli.families.imports import list_needed_modules, require_typed
from rlox_cli.terminal.console import print_text
from rlox_cli.terminal.errors import UsageError

_MOST_EPISODES = 100_000  # that a file may request by itself


def evaluate(path: Path, header: dict[str, Any], typed: Typed) -> None:
    """Evaluate and print. Missing settings come from the checkpoint, else 20 episodes and seed 10_000 + seed."""
    of_language = (("--samples", typed.samples), ("--pass-at", typed.pass_at), ("--reward", typed.rewards or None))
    for option, value in of_language:
        if value is not None:
            raise ValueError(f"{option} must be left out for {header['algorithm']}, which completes no prompts")
    recorded = _object(header, "evaluation")
    deterministic = not typed.stochastic
    episodes, seed, max_steps = plan(path, header, typed)
    algorithm = restore_to_act(path, header, list(typed.imports))
    if typed.predictions is not None:
        require_kind(typed.predictions, algorithm.spec.shows_images)
    evaluation = algorithm.evaluate(episodes, seed, deterministic=deterministic, max_steps=max_steps)
    summary = evaluation.summary()
    # Separate from the score: pictures come from gymnasium's environment, also for native ids.
    if typed.video is not None:
        with VideoWriter(typed.video, render_fps(header["env"]["id"])) as film:
            shown = algorithm.evaluate(1, seed, deterministic=deterministic, frames=film.add, max_steps=max_steps)
        _print_episode(f"recorded in {typed.video}", shown)
    if typed.render:
        episode = algorithm.evaluate(1, seed, deterministic=deterministic, render=True, max_steps=max_steps)
        _print_episode("shown", episode)
    if typed.predictions is not None:
        foreseen = open_loop(algorithm, seed=seed, deterministic=deterministic, max_steps=max_steps)
        save_predictions(foreseen, typed.predictions)
        steps = f"{foreseen.horizon} predicted steps after {foreseen.context}"
        print_text(f"{steps}, drawn in {typed.predictions}", stderr=True)
        summary |= foreseen.summary()
    score = normalized_score(header["env"]["id"], summary["mean_return"])
    if typed.json:
        print(json.dumps(summary if score is None else {**summary, "normalized_score": score}))
        return
    kind = "deterministic" if deterministic else "sampled"
    step, unit = trained_for(header)
    print_text(
        f"{header['algorithm']} on {header['env']['id']}, {unit[:-1]} {step:,}: "
        f"{episodes} {kind} episodes, seed {evaluation.seed}"
    )
    spread = f"{summary['min_return']:.2f} to {summary['max_return']:.2f}"
    print_text(f"  return  {summary['mean_return']:.2f} ± {summary['std_return']:.2f}  ({spread})")
    _print_agents(evaluation)
    print_text(f"  length  {summary['mean_length']:.1f}")
    if typed.predictions is not None:
        print_text(
            f"  open loop  mean squared error {summary['open_loop_mse']:.4g}, "
            f"{summary['open_loop_share']:.1%} of the observations' variance; "
            f"{summary['open_loop_last_share']:.1%} in the last step"
        )
    if score is not None:
        print_text(f"  normalized_score {score:.1f}  (0: random, 100: expert, D4RL's references)")
    if deterministic and episodes == recorded.get("n_episodes") and evaluation.seed == recorded.get("seed"):
        print_reproduction(summary["mean_return"], recorded, 2)


def show(path: Path, header: dict[str, Any], typed: Typed) -> None:
    """Show episodes in a window, one after the other, and print the return of each."""
    _, seed, max_steps = plan(path, header, typed)
    algorithm = restore_to_act(path, header, list(typed.imports))
    played = algorithm.evaluate(
        typed.episodes, seed, deterministic=not typed.stochastic, render=True, max_steps=max_steps
    )
    for i, (result, length) in enumerate(zip(played.returns, played.lengths, strict=True), 1):
        print_text(f"episode {i}: return {result:.2f}, {length} steps")


def plan(path: Path, header: dict[str, Any], typed: Typed) -> tuple[int, int | None, int | None]:
    """Return the number of episodes, the seed and the largest number of steps: as typed, else as in the training."""
    if header["env"]["id"] is None:
        raise ValueError(
            f"{path} must name the environment of its evaluation, but was trained without one; in Python, "
            f"from_checkpoint('{path}', env_id=…) takes one"
        )
    recorded = _object(header, "evaluation")
    planned = _object(_object(header, "run"), "eval")
    episodes, seed, max_steps = typed.episodes, typed.seed, typed.max_steps
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
    return episodes, seed, max_steps


def print_reproduction(score: float, recorded: dict[str, Any], digits: int) -> None:
    """Print the score that was `recorded` by the same evaluation in training, and whether it is equal."""
    if isinstance(before := recorded.get("mean_return"), (int, float)):
        same = "reproduced exactly" if score == before else "NOT reproduced"
        print_text(f"  in training {before:.{digits}f}: {same}")


def _print_agents(evaluation: Evaluation) -> None:
    """Print a line for each of several agents and each group of them; the return above is the sum over agents."""
    means = getattr(evaluation, "by_name", {})
    wide = max(map(len, means), default=0)
    for name, mean in means.items():
        print_text(f"    {name:<{wide}}  {mean:.2f}")


def require_acts(path: Path, header: dict[str, Any]) -> None:
    """Raise a UsageError for the checkpoint of a language model."""
    if family_of_checkpoint(header).completes_prompts:
        raise UsageError(
            f"{path} must hold a policy that acts in an environment, got the language model of {header['algorithm']}; "
            "`rlox generate` completes prompts with it"
        )


def restore_to_act(path: Path, header: dict[str, Any], imports: list[str]) -> Any:
    """Return the algorithm of a checkpoint, to act with it. Code of the user must be among `imports`."""
    env = header["env"]
    # All modules that the file needs must be typed, since a file must not decide what code runs.
    require_typed(list_needed_modules(env, _object(header, "run")), imports, path)
    # Acting needs no replay memory.
    warnings.filterwarnings("ignore", "from_checkpoint: the replay memory", RuntimeWarning)
    # Passing the environment and its wrappers lets gymnasium import their modules, which were typed.
    return load(
        path,
        env_id=env["id"] if any(map(find_module, (env["id"], str(env["kwargs"].get("env_id"))))) else None,
        env_wrappers=env["wrappers"] if any("." in name or ":" in name for name in _wrapper_names(env)) else None,
    )


def _object(within: dict[str, Any], name: str) -> dict[str, Any]:
    value = within.get(name)
    return value if isinstance(value, dict) else {}


def _wrapper_names(env: dict[str, Any]) -> list[str]:
    return [wrapper if isinstance(wrapper, str) else next(iter(wrapper)) for wrapper in env["wrappers"]]


def _print_episode(what: str, episode: Evaluation) -> None:
    print_text(f"an episode {what}: return {episode.returns[0]:.2f}, {episode.lengths[0]} steps", stderr=True)
