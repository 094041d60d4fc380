"""Sweeps: whatever is killed whenever, every job comes to its one end, and to the end it would have had."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from outcomes import outcome

RLOX = [sys.executable, "-m", "rlox_cli.main"]
# Sweeps killed with each launcher; a soak sets it.
ROUNDS = int(os.environ.get("RLOX_SWEEP_ROUNDS", "1"))
LAUNCHERS = {
    "basic": [],
    "joblib": ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
    "submitit_local": ["hydra/launcher=submitit_local", "hydra.sweeper.max_batch_size=4"],
    "ray": ["hydra/launcher=ray", "hydra.launcher.ray.init.address=local", "+hydra.launcher.ray.init.num_cpus=2"],
}
EIGHT = ["-m", "algo=ppo,dqn", "seed=0,1,2,3", "env=CartPole-v1", "tuned=off", "logger=none", "algo.hidden_sizes=[16]"]
EIGHT += ["total_timesteps=12_000", "eval.n_points=4", "eval.n_episodes=2", "checkpoint.every_steps=2_000"]
EIGHT += ["hydra.sweep.dir=sweep", "hydra.sweeper.plot=false"]
SHORT = ["env=CartPole-v1", "tuned=off", "logger=none", "total_timesteps=512", "algo.n_steps=64", "eval.n_points=1"]
SHORT += ["algo.hidden_sizes=[8]", "eval.n_episodes=1", "hydra.sweep.dir=sweep", "hydra.sweeper.plot=false"]


def rlox(cwd, *args, code=0):
    done = subprocess.run([*RLOX, *args], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def jobs(cwd, *args):
    return json.loads(rlox(cwd, "sweep", "status", "sweep", "--json", *args))


def ends(run):
    rows = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    return Counter(row["status"] for row in rows if row.get("event") == "end")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What each of the eight runs comes to when nothing disturbs them, and how long all take, in seconds."""
    folder = tmp_path_factory.mktemp("whole")
    started = time.monotonic()
    rlox(folder, "train", *EIGHT)
    seconds = time.monotonic() - started
    return {Path(job["folder"]).name: outcome(Path(job["folder"])) for job in jobs(folder)}, seconds


def descendants(pid):
    table = subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True, check=True).stdout
    children = {}
    for line in table.splitlines()[1:]:
        child, parent = map(int, line.split())
        children.setdefault(parent, []).append(child)
    found, todo = [], [pid]
    while todo:
        found += (more := children.get(todo.pop(), []))
        todo += more
    return found


def kill(process, victim):
    """kill -9 of the parent, of one of its processes (itself where it has none), or of all."""
    family = descendants(process.pid)
    working = []
    for path in (process.cwd / "sweep").glob("*/run.lock"):
        with contextlib.suppress(ValueError, OSError):
            working.append(int(path.read_text()))
    child = random.choice([pid for pid in family if pid in working] or family or [process.pid])
    for pid in {"parent": [process.pid], "child": [child], "both": [process.pid, *family]}[victim]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def killed(cwd, after, victim, *args):
    """Run the command and kill some of it `after` seconds; whether it came to its end all the same."""
    with open(cwd / "printed.txt", "a") as out:
        process = subprocess.Popen([*RLOX, *args], cwd=cwd, stdout=out, stderr=out, start_new_session=True)
    process.cwd = cwd
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(after)
    if process.poll() is None:
        kill(process, victim)
    assert process.wait(120) in (0, -signal.SIGKILL), (cwd / "printed.txt").read_text()
    return process.returncode == 0


@pytest.mark.parametrize("round_", range(ROUNDS))
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_killed_at_any_moment_it_loses_nothing_and_repeats_nothing(launcher, round_, whole, tmp_path):
    if launcher != "basic":
        pytest.importorskip(f"hydra_plugins.hydra_{launcher.split('_')[0]}_launcher")
    outcomes, seconds = whole
    kills, command = 0, ["train", *EIGHT, *LAUNCHERS[launcher]]
    for victim in random.choices(["parent", "child", "both"], k=random.choice([1, 2])):
        done = killed(tmp_path, random.uniform(0.2, 1) * seconds, victim, *command)
        kills += 1
        if done:
            break
        if (tmp_path / "sweep/sweep.jsonl").exists():
            command = ["sweep", "resume", "sweep"]
    if not done:
        rlox(tmp_path, *command)
    found = jobs(tmp_path)
    assert [job["state"] for job in found] == ["finished"] * 8
    assert {Path(job["folder"]).name: outcome(Path(job["folder"])) for job in found} == outcomes
    assert [ends(job["folder"])["finished"] for job in found] == [1] * 8
    assert max(job["attempts"] for job in found) <= 1 + kills
    assert len(list((tmp_path / "sweep").glob("*/metrics.jsonl"))) == 8
