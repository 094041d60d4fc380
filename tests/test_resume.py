"""`rlox train resume=`: what is killed and goes on ends as what was never stopped."""

import hashlib
import json
import multiprocessing
import os
import random
import shutil
import time

import numpy as np
import pytest
import resume_children

from rlox.algorithms import ALGORITHMS, resolve
from rlox.checkpoint import load_checkpoint
from rlox.tracking import durable_rows

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["resume_children"])
# How often each pair of runs is made; a soak sets it: 5 rounds are 110 runs that are killed.
ROUNDS = int(os.environ.get("RLOX_RESUME_ROUNDS", "1"))

COMMON = ["tuned=off", "logger=none", "eval.n_points=3", "eval.n_episodes=1", "seed=3", "algo.hidden_sizes=[16]"]
OFF_POLICY = ["env.n_envs=2", "algo.batch_size=16", "algo.learning_starts=100"]
RUNS = {
    "ppo": ["env=CartPole-v1", "algo.n_steps=64"],
    "a2c": ["env=Pendulum-v1", "algo.gamma=0.9"],
    "dqn": ["env=CartPole-v1", *OFF_POLICY, "algo.target_update_freq=50"],
    "sac": ["env=Pendulum-v1", *OFF_POLICY],
    "td3": ["env=Pendulum-v1", *OFF_POLICY, "algo.learning_rate_schedule=linear"],
}
# Environment steps: long enough to be killed in the middle of.
TOTAL = {(algo, "torch"): 10_000 if algo in ("ppo", "a2c") else 1_000 for algo in RUNS}
TOTAL |= {("ppo", "native"): 60_000, ("a2c", "native"): 100_000}
TOTAL |= {(algo, "native"): 10_000 for algo in ("dqn", "sac", "td3")}
# Something of what each algorithm can do beside: it all has to be restored.
MORE = {
    "ppo": ["algo.learning_rate_schedule=linear", "algo.normalize_obs=true", "algo.normalize_rewards=true"],
    "dqn": ["buffer.n_step=3", "algo.dueling=true"],
}
BUFFERS = {
    "uniform": ["buffer.size=1000"],
    "prioritized": ["buffer.size=1000"],
    "mmap": ["buffer.size=1000", "buffer.hot_size=128"],
}
CASES = [
    (algo, buffer, backend)
    for algo in RUNS
    for buffer in (BUFFERS if algo in ("dqn", "sac", "td3") else [None])
    for backend in ("native", "torch")
]


def start(folder, *arguments):
    folder.mkdir(exist_ok=True)
    process = CONTEXT.Process(target=resume_children.train, args=(folder, list(arguments)))
    process.start()
    return process


def train(folder, *arguments):
    process = start(folder, *arguments)
    process.join(120)
    assert process.exitcode == 0, (folder / "out.txt").read_text()
    return (folder / "out.txt").read_text()


def newest_step(folder):
    try:
        with open(folder / "run/metrics.jsonl", "rb") as file:
            file.seek(-min(4096, file.seek(0, os.SEEK_END)), os.SEEK_END)
            return json.loads(file.read().split(b"\n")[-2])["step"]
    except (OSError, IndexError, ValueError):
        return 0


def killed(folder, *arguments, at):
    """Kill -9 once it has a checkpoint and is past the step `at`; whether that came before its end."""
    process, last = start(folder, *arguments), folder / "run/checkpoints/last.safetensors"
    deadline = time.monotonic() + 60
    while not (last.exists() and newest_step(folder) >= at) and process.is_alive() and time.monotonic() < deadline:
        pass
    time.sleep(random.uniform(0, 0.01))
    process.kill()
    process.join()
    assert process.exitcode in (0, -9), (folder / "out.txt").read_text()
    return process.exitcode == -9


def outcome(folder):
    """SHA-256 of everything the run has come to, section by section, and its metrics without times."""
    path = folder / "run/checkpoints/last.safetensors"
    checkpoint = load_checkpoint(path)
    header = checkpoint.header
    sections = {name: arrays for name, arrays in checkpoint.tensors.items() if name != "memory"}
    if "memory" in header:
        # Which files hold it depends on when it was saved, what it holds does not.
        algorithm = resolve(ALGORITHMS[header["algorithm"]].cls).from_checkpoint(path)
        sections["memory"] = {name: x for name, x in algorithm.buffer.get_state().items() if isinstance(x, np.ndarray)}
        algorithm.close()
    digests = {
        section: hashlib.sha256(b"".join(name.encode() + arrays[name].tobytes() for name in sorted(arrays))).hexdigest()
        for section, arrays in sections.items()
    }
    kept = {name: header[name] for name in ("counters", "generators", "callbacks")}
    rows = [
        {name: x for name, x in row.items() if name not in ("segment", "time") and not name.startswith("time/")}
        for row in durable_rows(folder / "run")
    ]
    return digests, kept, rows


@pytest.mark.parametrize("round_", range(ROUNDS))
@pytest.mark.parametrize(("algo", "buffer", "backend"), CASES, ids=lambda value: str(value))
def test_killed_and_resumed_is_never_stopped(algo, buffer, backend, round_, tmp_path):
    more = [*MORE.get(algo, []), *([f"buffer={buffer}", *BUFFERS[buffer]] if buffer else [])]
    total = TOTAL[algo, backend]
    command = [f"algo={algo}", *RUNS[algo], *COMMON, *more, f"backend={backend}", f"total_timesteps={total}"]
    command += [f"checkpoint.every_steps={total // 16}", "hydra.run.dir=run"]
    train(tmp_path / "whole", *command)
    first, second = sorted(random.uniform(0.1, 0.8) * total for _ in range(2))
    for _ in range(5):
        if killed(tmp_path / "again", *command, at=first):
            break
        shutil.rmtree(tmp_path / "again")
    killed(tmp_path / "again", "resume=run", at=second)
    train(tmp_path / "again", "resume=run")
    rows = [json.loads(line) for line in (tmp_path / "again/run/metrics.jsonl").read_text().splitlines()]
    starts = [row["step"] for row in rows if row.get("event") == "start"]
    assert 0 < starts[1] < total, "it was not stopped in the middle"
    whole, again = outcome(tmp_path / "whole"), outcome(tmp_path / "again")
    assert again == whole
    assert rows[-1]["status"] == "finished"
