"""``rlox eval``: a checkpoint's score, from the file alone."""

from __future__ import annotations

import json as jsonlib
import sys
from pathlib import Path

from rlox.algorithms import ALGORITHMS, resolve
from rlox.checkpoint import load_checkpoint


def main(path: Path, episodes: int | None, seed: int | None, stochastic: bool, as_json: bool) -> None:
    """Evaluate and print; what is not given is taken from the checkpoint, else 20 episodes and seed 10_000 + seed."""
    if path.is_dir():
        path = best_of(path)
        print(f"evaluating {path}", file=sys.stderr)
    header = load_checkpoint(path).header
    if header["algorithm"] not in ALGORITHMS:
        raise ValueError(f"{path} holds a {header['algorithm']}, which this rlox does not know; update rlox-cli")
    recorded = header.get("evaluation") or {}
    planned = (header.get("run") or {}).get("eval") or {}
    if episodes is None:
        episodes = recorded.get("n_episodes") or planned.get("n_episodes") or 20
    if seed is None:
        seed = recorded.get("seed", planned.get("seed"))
    algorithm = resolve(ALGORITHMS[header["algorithm"]].cls).from_checkpoint(path)
    evaluation = algorithm.evaluate(episodes, seed, deterministic=not stochastic)
    summary = evaluation.summary()
    if as_json:
        print(jsonlib.dumps(summary))
        return
    kind = "sampled" if stochastic else "deterministic"
    step = header["counters"]["env_steps"]
    print(
        f"{header['algorithm']} on {header['env']['id']}, step {step:,}: "
        f"{episodes} {kind} episodes, seed {evaluation.seed}"
    )
    spread = f"{summary['min_return']:.2f} to {summary['max_return']:.2f}"
    print(f"  return  {summary['mean_return']:.2f} ± {summary['std_return']:.2f}  ({spread})")
    print(f"  length  {summary['mean_length']:.1f}")
    same = not stochastic and episodes == recorded.get("n_episodes") and evaluation.seed == recorded.get("seed")
    if same:
        exact = summary["mean_return"] == recorded["mean_return"]
        print(f"  in training {recorded['mean_return']:.2f}: {'reproduced exactly' if exact else 'NOT reproduced'}")


def best_of(folder: Path) -> Path:
    """The best checkpoint of a run folder, else its last."""
    for name in ("best", "last"):
        path = folder / "checkpoints" / f"{name}.safetensors"
        if path.is_file():
            return path
    raise ValueError(f"{folder} must be a run folder with checkpoints/best.safetensors, or name a checkpoint file")
