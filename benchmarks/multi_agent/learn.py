"""Measure what several agents learn: MAPPO and IPPO on simple_spread, different agents, opponents, native pursuit.

    python benchmarks/multi_agent/learn.py spread-mappo spread-ippo listener tag pursuit --seeds 100 101 102 103 104

This writes benchmarks/multi_agent/learn.json, with a cell for each task: for each seed, the curve of deterministic
evaluations (sums over agents of undiscounted returns), the last score, and environment steps per CPU second, including
learning but not evaluation. ``tag`` trains both sides at once, ``tag-self-play`` in turns against earlier policies;
each side is then scored against random, motionless and trained opponents.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

import rlox
from rlox.evaluation.agents import evaluate_agents
from rlox.kernels.rng import Rng
from rlox.multi_agent.acting import Actors
from rlox.nn.acting import ActingPolicy, Inputs
from rlox_cli.report.statistics import interval, iqm

SPREAD, PURSUIT = "pettingzoo:mpe2.simple_spread_v3", "GridPursuit-v0"


def tuned(env: str) -> dict[str, Any]:
    """Return the settings of the tuned file, in the form that MAPPO takes."""
    found = rlox.tuned("mappo", env)
    return {"n_envs": found["env"]["n_envs"], **found["algo"]}


MPE = tuned(SPREAD)  # other MPE tasks use the same settings
SPREAD_TASK = rlox.tuned("mappo", SPREAD)["env"]["kwargs"]
PLAY = {**MPE, "self_play": True, "self_play_every": 10, "self_play_pool": 20}
# Environment, its arguments, steps, evaluations, settings.
CELLS: dict[str, tuple[str, dict[str, Any], int, int, dict[str, Any]]] = {
    "spread-mappo": (SPREAD, SPREAD_TASK, 160_000, 10, MPE),
    "spread-ippo": (SPREAD, SPREAD_TASK, 160_000, 10, {**MPE, "critic": "local"}),
    "spread-mappo-1M": (SPREAD, SPREAD_TASK, 1_000_000, 20, {**MPE, "learning_rate_schedule": "linear"}),
    "spread-ippo-1M": (
        SPREAD, SPREAD_TASK, 1_000_000, 20, {**MPE, "critic": "local", "learning_rate_schedule": "linear"},
    ),
    "listener": ("pettingzoo:mpe2.simple_speaker_listener_v4", {"max_cycles": 25}, 320_000, 10, MPE),
    "tag": ("pettingzoo:mpe2.simple_tag_v3", {"max_cycles": 25}, 160_000, 4, MPE),
    "tag-self-play": ("pettingzoo:mpe2.simple_tag_v3", {"max_cycles": 25}, 320_000, 4, PLAY),
    "pursuit": (PURSUIT, {}, 500_000, 10, tuned(PURSUIT)),
}  # fmt: skip
EPISODES, EVAL_SEED = 100, 50_000


class Fixed(ActingPolicy):
    """A player that does not learn: random actions, or action 0, with which MPE's agents stay where they are."""

    def __init__(self, n_actions: int, random: bool):
        self.n_actions, self.random = n_actions, random
        self.rng = Rng(0)

    def mode(self, inputs: Inputs, noise: np.ndarray | None = None) -> tuple[np.ndarray, None]:
        n = len(inputs.obs)
        return self.rng.integers(self.n_actions, n) if self.random else np.zeros(n, np.int64), None


def opponents(algorithm: rlox.MAPPO, kwargs: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return each side's mean returns, trained and random, against random, motionless and trained opponents."""
    found: dict[str, dict[str, float]] = {}
    trained, players = algorithm.actor.policies, algorithm.players
    for p, player in enumerate(players):
        scores = {}
        for name in ("random", "still", "trained"):
            others = [Fixed(other.spec.n_actions, name == "random") for other in players]
            for who, part in (("trained", trained[p]), ("untrained", Fixed(player.spec.n_actions, True))):
                parts = list(trained if name == "trained" else others)
                parts[p] = part
                played = evaluate_agents(
                    Actors(players, parts), algorithm.env_id, EPISODES, EVAL_SEED, env_kwargs=kwargs
                )
                scores[f"{who} against {name}"] = float(played.agent_returns[:, list(player.slots)].mean())
        found[player.name] = scores
    return found


def train(cell: str, seed: int, backend: str) -> dict[str, Any]:
    """Train one seed."""
    env, kwargs, steps, n_points, settings = CELLS[cell]
    algorithm = rlox.MAPPO(env, seed=seed, env_kwargs=kwargs, backend=backend, **settings)
    curve, cpu = [[0, float(algorithm.evaluate(EPISODES, EVAL_SEED).returns.mean())]], 0.0
    algorithm.plan(steps)
    every = algorithm.n_envs * settings["n_steps"]
    points = [-(-steps * (i + 1) // n_points // every) * every for i in range(n_points)]

    class Evaluate(rlox.Callback):
        """Evaluates at the points, outside the measured time."""

        def on_step(self, *, step: int, **info: Any) -> bool:
            nonlocal cpu, since
            if points and step >= points[0]:
                points.pop(0)
                cpu += time.process_time() - since
                curve.append([step, float(algorithm.evaluate(EPISODES, EVAL_SEED).returns.mean())])
                print(cell, seed, curve[-1], flush=True)
                since = time.process_time()
            return True

    algorithm.callbacks.extend([Evaluate()])
    since = time.process_time()
    algorithm.train()
    cpu += time.process_time() - since
    found = {
        "curve": curve,
        "final": curve[-1][1],
        "steps_per_cpu_s": algorithm.counters.env_steps / cpu,
        "backend": algorithm.backend,
    }
    if cell.startswith("tag"):
        found["opponents"] = opponents(algorithm, kwargs)
    if settings.get("self_play"):
        found["ratings"] = {k: v for k, v in algorithm.collector.metrics().items() if k.startswith("rating/")}
    algorithm.close()
    return found


def summary(seeds: dict[str, Any]) -> dict[str, Any]:
    """Return IQM and 95 % bootstrap interval [value, low, high] of the last scores, of their gain by training, and of
    each side's scores against its opponents: trained, and trained less untrained."""

    def of(scores: list[float]) -> list[float]:
        return [round(float(number), 3) for number in interval([scores])]

    runs = list(seeds.values())
    found: dict[str, Any] = {
        "final": of([run["final"] for run in runs]),
        "learned": of([run["final"] - run["curve"][0][1] for run in runs]),
        "steps_per_cpu_s": float(np.median([run["steps_per_cpu_s"] for run in runs])),
    }
    if "opponents" in runs[0]:
        found["opponents"] = {}
        for side, scores in runs[0]["opponents"].items():
            each = {name: np.array([run["opponents"][side][name] for run in runs]) for name in scores}
            for other in ("random", "still", "trained"):
                trained, untrained = each[f"trained against {other}"], each[f"untrained against {other}"]
                found["opponents"][f"{side} against {other}"] = {
                    "trained": of(list(trained)), "trained less untrained": of(list(trained - untrained)),
                }  # fmt: skip
    return found


def draw(cells: dict[str, Any], path: Path) -> None:
    """Draw the curves of a million steps: each seed, and their interquartile mean."""
    titles = {"spread-mappo-1M": "MAPPO", "spread-ippo-1M": "IPPO"}
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for colour, (cell, title) in zip(("tab:blue", "tab:orange"), titles.items(), strict=True):
        if cell not in cells:
            continue
        curves = np.array([run["curve"] for run in cells[cell]["seeds"].values()])
        for curve in curves:
            axis.plot(curve[:, 0], curve[:, 1], color=colour, alpha=0.25, lw=1)
        axis.plot(
            curves[0, :, 0], iqm(curves[..., 1], axis=0), color=colour, lw=2, label=f"{title}, IQM of {len(curves)}"
        )
    axis.set(xlabel="environment steps", ylabel="sum of the agents' returns", title="simple_spread_v3", ylim=(-90, -35))
    axis.grid(alpha=0.2)
    axis.legend()
    figure.savefig(path, dpi=90, metadata={"Software": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", metavar="CELL", help=f"none: only summarise the file; {', '.join(CELLS)}")
    parser.add_argument("--seeds", nargs="+", type=int, default=[100, 101, 102, 103, 104])
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("learn.json"))
    given = parser.parse_args()
    if unknown := set(given.cells) - set(CELLS):
        parser.error(f"CELL must be one of {', '.join(CELLS)}, got {', '.join(sorted(unknown))}")
    result = json.loads(given.out.read_text()) if given.out.exists() else {"cells": {}}
    for cell in given.cells:
        env, kwargs, steps, _, settings = CELLS[cell]
        result["cells"][cell] = {"env": env, "kwargs": kwargs, "steps": steps, "settings": settings, "seeds": {}}
        for seed in given.seeds:
            result["cells"][cell]["seeds"][str(seed)] = train(cell, seed, given.backend)
            result |= {"episodes": EPISODES, "rlox": rlox.__version__, "python": platform.python_version()}
            given.out.write_text(json.dumps(result, indent=1) + "\n")
    for name, cell in result["cells"].items():
        keys = ("env", "kwargs", "steps", "settings", "seeds")
        result["cells"][name] = {**{key: cell[key] for key in keys}, "summary": summary(cell["seeds"])}
        print(name, json.dumps(result["cells"][name]["summary"]))
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    if any(name.endswith("-1M") for name in result["cells"]):
        draw(result["cells"], given.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
