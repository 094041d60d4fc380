"""Presets of SAC for few environment steps on MuJoCo, beside SAC and beside the peers' versions.

usage: few_steps.py peer CELL SEED FOLDER         one training with the peer (needs nothing of rlox)
       few_steps.py rlox CELL [OPTION...]         `rlox bench learn` of the same cell; without trainings of the peer
                                                  recorded for its seeds the score alone
       few_steps.py list                          the cells, and rlox's settings for each
       few_steps.py merge OUT.json FILE.json...   one file of several results of `rlox bench learn`, each of some seeds,
                                                  and of trainings with the peer
       few_steps.py figure OUT.png FILE.json...   return over environment steps and over CPU seconds, and the ratios of
                                                  the presets' scores to SAC's
       few_steps.py speed PYTHON ROUNDS [CELL...] CPU seconds of short trainings, alternately with rlox and with the
                                                  peer, which PYTHON has
       few_steps.py one SIDE CELL                 CPU seconds of one short training; SIDE is rlox or peer

A cell is a preset and an environment. All have 100,000 steps, of which the first 5,000 are random (as in the papers),
and otherwise the preset's settings, the same for all environments. The peer of sac is Stable-Baselines3's SAC, those of
crossq and tqc are sb3-contrib's, with critics of the same width as ours; the others have no peer. Evaluation is that of
``rlox bench learn``: 20 deterministic episodes of one fresh environment seeded 10,000 + seed, at ten points and at the
end; ``cpu_s`` are CPU seconds of training alone, on one thread.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ENVS = ("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Ant-v5")
PRESETS = ("sac", "crossq", "xqc", "flashsac", "droq", "redq", "tqc")
STEPS, RANDOM_STEPS, SHORT = 100_000, 5000, 6000
PEER_KEYS = ("step", "mean", "cpu_s")  # of an evaluation of the peer
CELLS = [f"{preset}-{env_id}" for preset in PRESETS for env_id in ENVS]
# Peers' settings by their names.
COMMON = {"learning_starts": RANDOM_STEPS, "buffer_size": STEPS, "batch_size": 256, "gamma": 0.99}
PEERS = {
    "sac": {"algo": "SAC", "kw": {"learning_rate": 3e-4, "tau": 0.005}, "policy": {"net_arch": [256, 256]}},
    "crossq": {
        "algo": "CrossQ", "kw": {"learning_rate": {"falls_from": 1e-3, "to": 1e-4}, "policy_delay": 3},
        "policy": {"net_arch": {"pi": [256, 256], "qf": [256, 256]}},
    },
    "tqc": {
        "algo": "TQC", "kw": {"learning_rate": 3e-4, "tau": 0.005, "top_quantiles_to_drop_per_net": 2},
        "policy": {"net_arch": [256, 256], "n_quantiles": 25, "n_critics": 2},
    },
}  # fmt: skip


def their_settings(cell):
    """Return a cell's settings as benchmarks/peers/trainings.py takes them."""
    preset, env_id = cell.split("-", 1)
    peer = PEERS[preset]
    return {
        "algo": peer["algo"],
        "env": env_id,
        "env_kwargs": {},
        "n_envs": 1,
        "steps": STEPS,
        "normalize": None,
        "kw": {**COMMON, **peer["kw"], "policy_kwargs": {"activation_fn": "relu", **peer["policy"]}},
        "n_points": 10,
        "n_episodes": 20,
    }


def our_words(cell):
    """Return a cell's settings as words of rlox's command line."""
    preset, env_id = cell.split("-", 1)
    settings = {"total_timesteps": STEPS, "algo.learning_starts": RANDOM_STEPS, "buffer.size": STEPS, "tuned": "off"}
    return [f"algo={preset}", f"env={env_id}", *(f"{name}={value}" for name, value in settings.items())]


def learn(cell, options):
    """Run `rlox bench learn` of a cell, against the trainings recorded for its seeds, if any; return the exit code."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--first-seed", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=5)
    asked, _ = parser.parse_known_args(options)
    seeds = range(asked.first_seed, asked.first_seed + asked.seeds)
    reference = HERE / "few_steps"
    recorded = any((reference / f"{cell}-s{seed}.json").exists() for seed in seeds)
    against = ["--against", "sb3", "--reference", str(reference)] if recorded else []
    words = [sys.executable, "-m", "rlox", "bench", "learn", *our_words(cell), "--score-only", *against, *options]
    return subprocess.run(words, cwd=HERE.parent).returncode


def time_rlox(cell):
    """Return the CPU seconds of a short training."""
    import torch

    import rlox

    torch.set_num_threads(1)
    preset, env_id = cell.split("-", 1)
    settings = {} if preset == "sac" else rlox.preset(preset)
    agent = rlox.SAC(env_id, seed=0, **settings, learning_starts=RANDOM_STEPS)
    began = time.process_time()
    agent.train(SHORT)
    return time.process_time() - began


def merge(out, paths):
    """Write the curves of all seeds of each cell, and the peer's, to `out`, with the settings and the files' origins.

    Each of `paths` is a result of ``rlox bench learn``, a training with the peer, or a file that this function wrote.

    Raises ValueError if files have different settings for a cell, or different curves for a seed of it.
    """
    cells, sources = {}, []
    for path in paths:
        content = json.loads(Path(path).read_text())
        if "evaluations" in content:
            content = read_peer(content)
        if "sources" not in content:
            content["sources"] = [{key: content[key] for key in ("command", "date", "machine", "versions")}]
        for source in content["sources"]:
            if source not in sources:
                sources.append(source)
        for label, cell in content["cells"].items():
            kept = {key: cell[key] for key in ("algo", "env", "settings", "settings_sb3") if key in cell}
            merged = cells.setdefault(label, {})
            if any(merged.setdefault(key, value) != value for key, value in kept.items()):
                raise ValueError(f"{path}: {label} has other settings than the files before")
            for side in ("curves", "curves_sb3"):
                for seed, curve in cell.get(side, {}).items():
                    if side == "curves_sb3":  # the same, from whichever file
                        curve = [{key: row[key] for key in PEER_KEYS} for row in curve]
                    if merged.setdefault(side, {}).setdefault(seed, curve) != curve:
                        raise ValueError(f"{path}: {label} has another curve of seed {seed} than a file before")
    Path(out).write_text(json.dumps({"sources": sources, "cells": cells}) + "\n")


def read_peer(content):
    """Return a recorded training with the peer as `merge` writes it."""
    curve = [{key: row[key] for key in PEER_KEYS} for row in content["evaluations"]]
    settings = content["settings"]
    cell = {"env": settings["env"], "settings_sb3": settings, "curves_sb3": {str(content["seed"]): curve}}
    source = {key: value for key, value in content.items() if key not in ("settings", "evaluations")}
    return {"sources": [source], "cells": {content["cell"]: cell}}


def read_cells(paths):
    """Return the cells of files of `rlox bench learn` or of `merge`, by preset and environment.

    The curves of a cell, {seed: [{step, mean, cpu_s}, ...]}, stand under ``rlox`` and, where it has some, ``peer``.
    """
    cells = {}
    for path in paths:
        for label, cell in json.loads(Path(path).read_text())["cells"].items():
            cells[label.split("-", 1)[0], cell["env"]] = {
                "rlox": cell.get("curves", {}),
                "peer": cell.get("curves_sb3", {}),
            }
    return cells


def score(curves):
    """Return the interquartile mean of the last evaluations."""
    import numpy as np
    from scipy.stats import trim_mean

    return float(trim_mean(np.array([curve[-1]["mean"] for curve in curves.values()]), 0.25))


def compare(cells):
    """Return the ratios of each preset's scores to those of rlox's SAC, by environment, and their geometric mean."""
    table, cells = {}, {cell: sides for cell, sides in cells.items() if sides["rlox"]}
    for preset in sorted({preset for preset, _ in cells} - {"sac"}):
        both = [env_id for env_id in ENVS if (preset, env_id) in cells and ("sac", env_id) in cells]
        ratios = {e: score(cells[preset, e]["rlox"]) / score(cells["sac", e]["rlox"]) for e in both}
        if ratios:
            logs = [math.log(max(ratio, 1e-9)) for ratio in ratios.values()]
            table[preset] = {**ratios, "geometric mean": math.exp(sum(logs) / len(logs))}
    return table


def draw(out, cells):
    """Draw the mean return over steps (upper row) and over CPU seconds (lower row), a column for each environment.

    The CPU seconds are those of the seed that took the fewest, since seeds have run on machines of different speed.
    """
    import matplotlib as mpl
    import numpy as np

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    env_ids = [env_id for env_id in ENVS if any(env_id == other for _, other in cells)]
    figure, axes = plt.subplots(2, len(env_ids), figsize=(4.2 * len(env_ids), 7), squeeze=False)
    colors = {preset: f"C{i}" for i, preset in enumerate(PRESETS)}
    for (preset, env_id), sides in cells.items():
        for side, style in (("rlox", "-"), ("peer", "--")):
            if not sides[side]:
                continue
            curves = list(sides[side].values())
            n = min(map(len, curves))
            returns = np.array([[row["mean"] for row in curve[:n]] for curve in curves])
            peer = "Stable-Baselines3" if preset == "sac" else "sb3-contrib"
            label = preset if side == "rlox" else f"{preset} of {peer}"
            for axis, key in ((0, "step"), (1, "cpu_s")):
                along = np.min([[row[key] for row in curve[:n]] for curve in curves], 0)
                ax = axes[axis, env_ids.index(env_id)]
                ax.plot(along, returns.mean(0), style, color=colors[preset], label=label)
                ax.fill_between(along, returns.min(0), returns.max(0), color=colors[preset], alpha=0.12, lw=0)
    for i, env_id in enumerate(env_ids):
        axes[0, i].set(title=env_id, xlabel="environment steps")
        axes[1, i].set(xlabel="CPU seconds of training")
    axes[0, 0].set_ylabel("return: mean of seeds, and range")
    axes[1, 0].set_ylabel("return")
    lines = {line.get_label(): line for ax in axes.flat for line in ax.get_lines()}
    axes[0, 0].legend(lines.values(), lines, frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(out, dpi=120)


def main(command, *words):
    sys.path.insert(0, str(HERE / "peers"))
    import alternate

    if command == "peer":
        cell, seed, folder = words
        alternate.record(cell, their_settings(cell), int(seed), folder)
    elif command == "rlox":
        cell, *options = words
        raise SystemExit(learn(cell, options))
    elif command == "merge":
        out, *paths = words
        merge(out, paths)
    elif command == "figure":
        out, *paths = words
        cells = read_cells(paths)
        draw(out, cells)
        print(json.dumps(compare(cells), indent=1))
    elif command == "one":
        side, cell = words
        print(time_rlox(cell) if side == "rlox" else alternate.time_peer(their_settings(cell), SHORT))
    elif command == "speed":
        python, rounds, *chosen = words
        steps = dict.fromkeys(chosen or [cell for cell in CELLS if cell.split("-")[0] in PEERS], SHORT)
        print(json.dumps(alternate.compare_speed(__file__, "peer", python, int(rounds), steps)))
    elif command == "list":
        for cell in CELLS:
            print("rlox train", *our_words(cell))
    elif command == "--help":
        print(__doc__[__doc__.index("usage:") :])
        raise SystemExit
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(*(sys.argv[1:] or [""]))
