"""Trainings with a peer: recorded, and timed alternately with rlox's, each in a process of its own."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path


def compare_speed(script, peer_side, peer_python, rounds, steps):
    """Run ``script one SIDE CELL``, which prints CPU seconds, for both sides of each cell, `rounds` times.

    Parameters
    ----------
    script : str
        Path of the benchmark.
    peer_side, peer_python : str
        The peer's name in `script`, and the Python interpreter that has it.
    rounds : int
        How often each side trains; the median counts.
    steps : dict
        Environment steps of the training of each cell.

    Returns
    -------
    dict
        For each cell its steps, the seconds of both sides, and the ratio of rlox's median to the peer's.
    """
    root = Path(__file__).resolve().parents[2]
    quiet = {**os.environ, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    cells = {}
    for cell, n_steps in steps.items():
        seconds = {"rlox": [], peer_side: []}
        for _ in range(rounds):
            for side, python in (("rlox", sys.executable), (peer_side, peer_python)):
                words = [python, script, "one", side, cell]
                done = subprocess.run(words, check=True, capture_output=True, text=True, env=quiet)
                seconds[side].append(float(done.stdout.splitlines()[-1]))
        ours, theirs = (statistics.median(seconds[side]) for side in ("rlox", peer_side))
        cells[cell] = {"steps": n_steps, **seconds, "ratio": ours / theirs}
        print(f"{cell}: rlox {ours:.2f} s CPU, {peer_side} {theirs:.2f} s: {ours / theirs:.2f}", flush=True)
    return cells


def find_curve(settings):
    """Return the function that trains with the library that has the algorithm, and returns the evaluations."""
    if settings["algo"] == "DiscreteSAC":
        import tianshou_trainings

        return tianshou_trainings.curve
    from trainings import SB3

    return SB3().curve


def record(cell, settings, seed, folder):
    """Train with the peer once, unless it is recorded, and write ``folder/CELL-sSEED.json`` with its evaluations."""
    os.environ["OMP_NUM_THREADS"] = "1"
    path = Path(folder) / f"{cell}-s{seed}.json"
    if path.is_file():
        return
    answer = find_curve(settings)(settings, seed, 10_000 + seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"cell": cell, "seed": seed, "settings": settings, **answer}) + "\n")
    print(cell, seed, answer["evaluations"][-1], flush=True)


def time_peer(settings, steps):
    """Return the CPU seconds of a training with the peer of so many steps."""
    short = {**settings, "steps": steps, "n_points": 1, "n_episodes": 1}
    return find_curve(settings)(short, 0, 0)["evaluations"][-1]["cpu_s"]
