"""Count how often SAC ends badly on Pendulum-v1 after 10,000 steps: natively, with PyTorch, and in Stable-Baselines3.

usage: sac_pendulum.py train SIDE FIRST N FOLDER     SIDE: native, torch or sb3
       sac_pendulum.py report FOLDER [--out FILE]

`train` makes one JSON file for each of the seeds FIRST to FIRST + N - 1, and keeps existing files; `train sb3` needs
Stable-Baselines3 and nothing of rlox. `report` prints intervals and tests, and counts the runs below -250.

All sides use the tuned settings, which are Stable-Baselines3's defaults with learning_rate 1e-3. A run is scored by its
final deterministic evaluation: 20 episodes of one fresh environment seeded 10,000 + seed. The study's seeds are 300 to
339. The folder sac_pendulum contains its runs, and sac_pendulum.json the output of `report`;
`train SIDE 300 40 benchmarks/sac_pendulum` makes the seeds that are missing there.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ENV, STEPS, EPISODES, BAD = "Pendulum-v1", 10_000, 20, -250.0
SIDES = ("native", "torch", "sb3")


def ours(backend: str, seed: int) -> dict[str, Any]:
    from rlox import SAC, tuned
    from rlox.checkpoint import versions

    settings = tuned("sac", ENV)
    agent = SAC(ENV, n_envs=settings["env"]["n_envs"], seed=seed, backend=backend, **settings["algo"])
    metrics = agent.train(STEPS)
    evaluation = agent.evaluate(EPISODES)
    return {
        "returns": evaluation.returns.tolist(),
        "train_return": metrics["mean_reward"],
        "ent_coef": metrics.get("ent_coef"),
        "versions": versions(),
    }


def theirs(seed: int) -> dict[str, Any]:
    import gymnasium
    import stable_baselines3 as sb3
    import torch
    from stable_baselines3.common.env_util import make_vec_env

    torch.set_num_threads(1)
    model = sb3.SAC("MlpPolicy", make_vec_env(ENV, 1, seed=seed), learning_rate=1e-3, seed=seed, device="cpu")
    model.learn(STEPS)
    env = gymnasium.make(ENV)
    returns = []
    for episode in range(EPISODES):
        obs, _ = env.reset(seed=10_000 + seed if episode == 0 else None)
        total, over = 0.0, False
        while not over:
            action, _ = model.predict(obs, deterministic=True)
            obs, reward, terminated, truncated, _ = env.step(action)
            total += float(reward)
            over = terminated or truncated
        returns.append(total)
    episodes = [episode["r"] for episode in model.ep_info_buffer]
    return {
        "returns": returns,
        "train_return": float(np.mean(episodes)),
        "ent_coef": float(torch.exp(model.log_ent_coef.detach())),
        "versions": {"stable-baselines3": sb3.__version__, "torch": torch.__version__},
    }


def train(side: str, first: int, n: int, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    run: Callable[[int], dict[str, Any]] = theirs if side == "sb3" else lambda seed: ours(side, seed)
    for seed in range(first, first + n):
        path = folder / f"{side}-s{seed}.json"
        if path.is_file():
            continue
        cpu = time.process_time()
        found = run(seed)
        found |= {"side": side, "seed": seed, "cpu_s": round(time.process_time() - cpu, 1)}
        path.write_text(json.dumps(found) + "\n")
        print(side, seed, round(float(np.mean(found["returns"])), 1), flush=True)


def report(folder: Path, out: Path | None) -> None:
    from scipy import stats

    from rlox_cli.bench.machine import provenance
    from rlox_cli.report.statistics import difference, interval, iqm

    runs = {side: [json.loads(path.read_text()) for path in sorted(folder.glob(f"{side}-s*.json"))] for side in SIDES}
    scores = {side: np.array([np.mean(run["returns"]) for run in found]) for side, found in runs.items() if found}
    rows = {}
    for side, values in scores.items():
        middle = interval([values])
        rows[side] = {
            "seeds": [run["seed"] for run in runs[side]],
            "scores": [round(float(value), 1) for value in values],
            "iqm": round(float(iqm(values)), 1),
            "interval": [round(float(middle.low), 1), round(float(middle.high), 1)],
            "worst": round(float(values.min()), 1),
            "bad_runs": int((values < BAD).sum()),
            "bad_episodes": int(sum((np.array(run["returns"]) < 3 * BAD).sum() for run in runs[side])),
            "cpu_s_median": float(np.median([run["cpu_s"] for run in runs[side]])),
            "versions": runs[side][0]["versions"],
        }
        print(side, {key: value for key, value in rows[side].items() if key not in ("seeds", "scores", "versions")})
    tests = {}
    for side in scores.keys() - {"sb3"}:
        if "sb3" not in scores:
            break
        a, b = scores[side], scores["sb3"]
        gap = difference([a], [b])
        counts = [[int((x < BAD).sum()), int((x >= BAD).sum())] for x in (a, b)]
        tests[f"{side} against sb3"] = {
            "difference": [round(float(x), 1) for x in gap],
            "mann_whitney_p": round(float(stats.mannwhitneyu(a, b).pvalue), 3),
            "bad_runs_fisher_p": round(float(stats.fisher_exact(counts).pvalue), 3),
        }
        print(side, "against sb3", tests[f"{side} against sb3"])
    if out is not None:
        command = f"sac_pendulum.py train SIDE FIRST N {folder.name} for each side, then report {folder.name}"
        found = {**provenance(f"python benchmarks/{command}"), "bad_below": BAD, "sides": rows, "tests": tests}
        out.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    training = verbs.add_parser("train")
    training.add_argument("side", choices=SIDES)
    training.add_argument("first", type=int)
    training.add_argument("n", type=int)
    training.add_argument("folder", type=Path)
    reporting = verbs.add_parser("report")
    reporting.add_argument("folder", type=Path)
    reporting.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.verb == "train":
        train(given.side, given.first, given.n, given.folder)
    else:
        report(given.folder, given.out)


if __name__ == "__main__":
    main()
