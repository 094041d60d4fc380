"""Sweeps: whatever is killed at any time, every job ends exactly once, with the result of an undisturbed sweep."""

import contextlib
import errno
import json
import os
import random
import re
import signal
import subprocess
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import forked
import pytest
import yaml
from run_results import outcome

from rlox.checkpoint import load_checkpoint
from rlox.tracking.record import Record
from rlox_cli.commands.train import main as train
from rlox_cli.config.compose import compose_jobs, compose_typed
from rlox_cli.records import ledger
from rlox_cli.records.ledger import Head, Sweep, job_id
from rlox_cli.sweep.control import plan_jobs, resume, status
from rlox_cli.sweep.launch import Work, _line, launcher_overrides
from rlox_cli.terminal.errors import UsageError

# Number of killed sweeps for each launcher except Ray (tests/distributed/test_ray.py); long test runs set it.
ROUNDS = int(os.environ.get("RLOX_SWEEP_ROUNDS", "1"))
LAUNCHERS = {
    "basic": [],
    "joblib": ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
    # Each job starts Python, so only half of the runs, in two batches.
    "submitit_local": ["hydra/launcher=submitit_local", "hydra.sweeper.max_batch_size=2", "seed=0,1"],
}
EIGHT = ["-m", "algo=ppo,dqn", "seed=0,1,2,3", "env=CartPole-v1", "tuned=off", "logger=none", "algo.hidden_sizes=[16]"]
EIGHT += ["total_timesteps=12_000", "eval.n_points=4", "eval.n_episodes=2", "checkpoint.every_steps=1_000"]
EIGHT += ["hydra.sweep.dir=sweep", "hydra.sweeper.plot=false"]
SHORT = ["env=CartPole-v1", "tuned=off", "logger=none", "total_timesteps=512", "algo.n_steps=64", "eval.n_points=1"]
SHORT += ["algo.hidden_sizes=[8]", "eval.n_episodes=1", "hydra.sweep.dir=sweep", "hydra.sweeper.plot=false"]


def rlox(cwd, *args, code=0):
    done = forked.run(*args, cwd=cwd)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def jobs(cwd):
    return list(Sweep.read(cwd / "sweep").scan().values())


def outcomes(cwd):
    return {job.folder.name: outcome(job.folder) for job in jobs(cwd)}


def by_run(found):
    """The same by run: the keys without the number of the job at the start of the folder name."""
    return {name.partition("-")[2]: run for name, run in found.items()}


def rows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def ends(run):
    return Counter(row["status"] for row in rows(run) if row.get("event") == "end")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The results of the eight runs when nothing disturbs them, and how many seconds they take in all."""
    folder = tmp_path_factory.mktemp("whole")
    started = time.monotonic()
    rlox(folder, "train", *EIGHT)
    seconds = time.monotonic() - started
    return outcomes(folder), seconds


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
    """Send SIGKILL to the parent, to one of its processes (itself if it has none), or to all."""
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
    """Run the command and kill parts of it after `after` seconds; return whether it finished anyway."""
    with open(cwd / "printed.txt", "a") as out:
        process = forked.Rlox(*args, cwd=cwd, stdout=out)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(after)
    if process.poll() is None:
        kill(process, victim)
    assert process.wait(120) in (0, -signal.SIGKILL), (cwd / "printed.txt").read_text()
    return process.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("round_", range(ROUNDS))
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_killed_at_any_moment_it_loses_nothing_and_repeats_nothing(launcher, round_, whole, tmp_path):
    if launcher != "basic":
        pytest.importorskip(f"hydra_plugins.hydra_{launcher.split('_')[0]}_launcher")
    expected, seconds = whole
    chosen = LAUNCHERS[launcher]
    again = [word.partition("=")[0] for word in chosen]
    kills, command = 0, ["train", *(word for word in EIGHT if word.partition("=")[0] not in again), *chosen]
    seeds = 2 if "seed" in again else 4
    expected = {name: run for name, run in by_run(expected).items() if int(name.rpartition("-s")[2]) < seeds}
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
    assert [job.state for job in found] == ["finished"] * 2 * seeds
    assert by_run(outcomes(tmp_path)) == expected
    assert [ends(job.folder)["finished"] for job in found] == [1] * 2 * seeds
    assert max(job.attempts for job in found) <= 1 + kills
    for job in found:
        saved = 0
        for row in rows(job.folder):
            if row.get("event") == "start":
                assert row["step"] >= saved  # it resumed from the checkpoint, or from the start if there was none
            saved = row["step"] if row.get("kind") == "last" else saved
    assert len(list((tmp_path / "sweep").glob("*/metrics.jsonl"))) == 2 * seeds


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["basic", pytest.param("joblib", marks=pytest.mark.exhaustive)])
def test_ctrl_c_saves_running_jobs_and_prints_how_to_resume(launcher, whole, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    process = forked.Rlox("train", *EIGHT, *LAUNCHERS[launcher], cwd=tmp_path, stdout=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not any("loss/q" in path.read_text() for path in (tmp_path / "sweep").glob("*-dqn-*/metrics.jsonl")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Resume with: rlox sweep resume sweep" in printed
    states = Counter(job.state for job in jobs(tmp_path))
    assert states["finished"] >= 3
    assert states["interrupted"] >= 1
    assert set(states) <= {"finished", "interrupted", "waiting"}
    rlox(tmp_path, "sweep", "resume", "sweep")
    assert outcomes(tmp_path) == whole[0]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_processes_of_a_killed_sweep_end_after_their_jobs(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    words = [word for word in SHORT if not word.startswith("total_timesteps")]
    words += ["-m", "seed=0,1", "total_timesteps=10_000_000", *LAUNCHERS["joblib"]]
    process = forked.Rlox("train", *words, cwd=tmp_path)
    deadline = time.monotonic() + 60
    while len([*tmp_path.glob("sweep/*/metrics.jsonl")]) < 2:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    family = descendants(process.pid)
    assert len(family) >= 2
    process.kill()
    process.wait(60)
    time.sleep(1)
    assert len([*tmp_path.glob("sweep/*/run.lock")]) == 2
    assert {job.state for job in jobs(tmp_path)} == {"running"}  # the jobs go on
    (tmp_path / "sweep/stop").touch()
    while any(Path(f"/proc/{pid}").exists() for pid in family):
        assert time.monotonic() < deadline + 60
        time.sleep(0.1)
    assert {job.state for job in jobs(tmp_path)} == {"interrupted"}


@pytest.mark.slow
def test_status_shows_where_a_killed_job_resumes(tmp_path):
    words = [word for word in SHORT if not word.startswith("total_timesteps")]
    words += ["-m", "seed=0,1", "total_timesteps=10_000_000", "checkpoint.every_steps=2_000"]
    process = forked.Rlox("train", *words, cwd=tmp_path)
    last, deadline = tmp_path / "sweep/0-ppo-CartPole-v1-s0/checkpoints/last.safetensors", time.monotonic() + 60
    while not last.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.wait(60)
    at = load_checkpoint(last).header["counters"]["env_steps"]
    reported = json.loads(rlox(tmp_path, "sweep", "status", "sweep", "--json"))
    assert [(job["state"], job["resumes_at"]) for job in reported] == [("killed", at), ("waiting", 0)]
    assert f"resumes at step {at:,}" in " ".join(rlox(tmp_path, "sweep", "status", "sweep").split())
    # The job resumes at that step.
    process = forked.Rlox("sweep", "resume", "sweep", cwd=tmp_path)
    out = last.parent.parent / "out.txt"
    while "resuming" not in out.read_text() and time.monotonic() < deadline + 60:
        time.sleep(0.05)
    process.kill()
    process.wait(60)
    assert f"at step {at:,} of 10,000,000" in out.read_text()


FLAKY = """
import os
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

class Flaky(CartPoleEnv):
    def __init__(self, fails, **kwargs):
        super().__init__(**kwargs)
        self.fails = fails
        # When the sweep is checked beforehand it is well; the sweep's folder comes after that.
        if fails == "wrong" and os.path.exists("sweep") and not os.path.exists("mended"):
            raise ValueError("this cannot be")

    def step(self, action):
        if self.fails in ("once", "always") and not os.path.exists("mended"):
            if self.fails == "always" or not os.path.exists("failed"):
                open("failed", "w").close()
                raise OSError("the licence server is away")
        return super().step(action)

gymnasium.register("Flaky-v0", Flaky)
"""


@pytest.mark.slow
def test_failures_that_may_be_temporary_are_retried_and_others_reported(tmp_path):
    (tmp_path / "flaky.py").write_text(FLAKY)
    words = ["-m", "--import", "flaky", *SHORT[1:], "env=Flaky-v0", "env.kwargs.fails=never,once,always,wrong"]
    printed = rlox(tmp_path, "train", *words, code=1)
    assert "2 of 4 jobs are finished; 2 failed" in printed
    assert "the licence server is away" in printed
    assert "this cannot be" in printed
    found = jobs(tmp_path)
    assert [(job.state, job.attempts) for job in found] == [
        *(("finished", 1), ("finished", 2), ("failed", 3)),
        ("failed", 0),  # failed before its record was opened, so the ledger has the error
    ]
    again = "resume with: rlox sweep resume sweep --import flaky --retry-failed"
    assert again in rlox(tmp_path, "sweep", "status", "sweep")
    assert "add --import flaky" in rlox(tmp_path, "sweep", "resume", "sweep", code=2)
    (tmp_path / "mended").touch()
    assert "3 of 4 jobs are finished" in rlox(tmp_path, "sweep", "resume", "sweep", "--import", "flaky", code=1)
    assert "4 of 4 jobs are finished" in rlox(
        tmp_path, "sweep", "resume", "sweep", "--retry-failed", "--import", "flaky"
    )
    assert all(ends(job.folder)["finished"] == 1 for job in jobs(tmp_path))


def plan(folder, *words):
    """Create a sweep in `folder` without starting any job."""
    master, composed = compose_typed(["-m"], list(words))
    head = Head("0.0.1", ["-m"], list(words), [], launcher_overrides(master, list(words)))
    Sweep.create(folder, head, plan_jobs(composed)).release()


def test_a_new_sweep_takes_no_run_of_another_command_for_its_own(tmp_path):
    words = ["algo=ppo", "seed=0,1", "hydra.sweep.subdir='seed${seed}'"]
    Record(tmp_path / "mix/seed1").close()
    with pytest.raises(UsageError, match=r"mix/seed1 must be a new folder, but contains a run; choose another"):
        plan(tmp_path / "mix", *words)
    assert not (tmp_path / "mix/sweep.jsonl").exists()
    plan(tmp_path / "other", *words)
    sweep = Sweep.read(tmp_path / "other")
    Record(tmp_path / "other/seed2").close()
    job = replace(list(sweep.jobs.values())[1], id="00000000", folder="seed2")
    with pytest.raises(UsageError, match="other/seed2 must be a new folder"):
        sweep.add([job])


def test_the_progress_of_a_job_that_goes_back_has_only_the_evaluations_that_count(tmp_path):
    plan(tmp_path / "sweep", "algo=ppo", "seed=0,1")
    sweep = Sweep.read(tmp_path / "sweep")
    job, progress = next((job, sweep.progress[job.id]) for job in sweep.jobs.values())
    for start, scores, found in (
        (None, {10: 3.0, 20: 9.0, 30: 8.0}, (9.0, 8.0, 30)),
        (10, {}, (3.0, 3.0, 10)),
        (10, {20: 2.0}, (3.0, 2.0, 20)),
        (None, {}, (None, None, 0)),
        (None, {10: 1.0}, (1.0, 1.0, 10)),
        (10, {25: 4.0}, (4.0, 4.0, 25)),
    ):
        with Record(progress.folder, resume_step=start) as record:
            for step, score in scores.items():
                record.metrics(step, {"eval/mean_return": score, "eval/std_return": 0.0})
            progress.scan()
            assert (progress.best, progress.last, progress.step) == found
            line = _line(sweep, job, progress)
    # The job was at step 25 when this was printed.
    assert line == "[1/2] seed=0: resumes at step 10, attempt 6"


def test_a_job_that_cannot_be_read_does_not_hide_the_others(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    plan(tmp_path / "sweep", "algo=ppo", "seed=0,1")
    unreadable, whole = (progress.folder for progress in Sweep.read(Path("sweep")).progress.values())
    for folder in (unreadable, whole):
        with Record(folder) as record:
            record.end(9, "finished")
    read_rows = ledger.read_rows

    def read(path, offset):
        if path.parent == unreadable:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read_rows(path, offset)

    monkeypatch.setattr(ledger, "read_rows", read)
    status(Path("sweep"), False)
    lines = capsys.readouterr().out.splitlines()
    assert any("failed" in line and "Permission denied: " in line for line in lines)
    assert any("finished" in line and "9/" in line for line in lines)
    assert [progress.may_pass for progress in jobs(tmp_path)] == [False, False]


@pytest.mark.slow
def test_a_job_that_starts_later_uses_the_planned_settings(tmp_path):
    plan(tmp_path / "sweep", *SHORT[:1], *SHORT[2:-2], "algo=ppo", "seed=0,1")
    path = tmp_path / "sweep/sweep.jsonl"
    # As if the default settings had been different when the sweep was planned.
    path.write_text(path.read_text().replace('"gamma":0.98', '"gamma":0.91'))
    printed = rlox(tmp_path, "sweep", "resume", "sweep")
    assert "planned by rlox 0.0.1" in printed
    for job in jobs(tmp_path):
        assert yaml.safe_load((job.folder / "config.yaml").read_text())["algo"]["gamma"] == 0.91
    assert (tmp_path / "sweep/plot.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('{"sweep":1', '{"sweep":2', "line 1 must be the head of a sweep"),
        ('"retries":2', '"retries":"x"', "line 1 must be the head of a sweep"),
        ('"seed=0",', "0,", "line 2 must be a job with id"),
        ('"folder":"0-', '"folder":"../0-', "line 2 must be a job: hydra.sweep.subdir must be a path below"),
        (
            '"folder":"1-ppo-CartPole-v1-s1',
            '"folder":"0-ppo-CartPole-v1-s0',
            "line 3 must be a job: hydra.sweep.subdir",
        ),
        ('"extra":{}}\n', "\n", "line 2 must be one JSON object"),
        ('"gamma":', '"gama":', "algo.gama is no key of PPOConfig"),
        ('"imports":[],"device"', '"imports":["os"],"device"', "add --import os"),
        ("hydra/launcher=basic", "hydra.launcher._target_=os.system", "which is not used unless you type it"),
        ("hydra/launcher=basic", "hydra.launcher.setup=[reboot]", "which is not used unless you type it"),
        ("hydra/launcher=basic", "hydra/launcher=slurn", "hydra/launcher=slurn does not exist"),
    ],
)
def test_a_damaged_ledger_is_an_error(old, new, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    plan(tmp_path / "sweep", "algo=ppo", "seed=0,1", *SHORT)
    path = tmp_path / "sweep/sweep.jsonl"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises((UsageError, RuntimeError)) as caught:
        resume(Path("sweep"), [], False)
    assert says in str(caught.value) + capsys.readouterr().err


def test_keys_that_are_no_texts_stay_as_they_are_in_jobs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["env=Pendulum-v1", "++env.kwargs.table={1:a,2.5:b}", "env.n_envs=1"]
    plan(tmp_path / "sweep", "algo=ppo", "seed=0", *words, *SHORT)
    (job,) = Sweep.read(tmp_path / "sweep").jobs.values()
    assert repr(job.config["env"]["kwargs"]) == "{'table': {1: 'a', 2.5: 'b'}}"
    assert Work.parse(str(Work(job, "sweep", [], True))).job == job


@pytest.mark.slow
def test_a_received_sweep_writes_elsewhere_only_if_that_is_typed_again(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folders = [f"{tmp_path}/memory/{name}" for name in "ab"]
    words = [
        "algo=dqn",
        "buffer=mmap",
        "buffer.size=99",
        f"buffer.folder={','.join(folders)}",
        "algo.learning_starts=8",
    ]
    plan(tmp_path / "sweep", *words, *(word for word in SHORT if "n_steps" not in word))
    again = [f"buffer.folder={folder}" for folder in folders]
    for missing, typed in ((again[0], []), (again[1], again[:1])):
        with pytest.raises(UsageError, match=f"sweep/sweep.jsonl writes its replay memory .* add {missing}$"):
            resume(Path("sweep"), typed, False)
    with pytest.raises(UsageError, match=r"buffer\.folder=x must be as in a job of the sweep, whose jobs cannot"):
        resume(Path("sweep"), [*again, "buffer.folder=x"], False)
    assert not (tmp_path / "memory").exists()
    status(Path("sweep"), False)
    assert f"resume with: rlox sweep resume sweep {' '.join(again)}" in " ".join(capsys.readouterr().out.split())
    rlox(tmp_path, "sweep", "resume", "sweep", *again)
    assert [job.state for job in jobs(tmp_path)] == ["finished"] * 2
    assert all(any(Path(folder).iterdir()) for folder in folders)


def test_a_ledger_without_its_jobs_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan(tmp_path / "sweep", "algo=ppo", "seed=0", *SHORT)
    path = tmp_path / "sweep/sweep.jsonl"
    head, job = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(head + job[:50])
    with pytest.raises(UsageError, match=r"sweep.jsonl is damaged: line 1 must be followed by whole lines"):
        resume(Path("sweep"), [], False)


@pytest.mark.slow
def test_errors_of_sweep_commands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rlox(tmp_path, "train", "-m", "seed=0,1", *SHORT)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for says, command, *words in [
        ("but contains a sweep; choose another, or resume it: rlox sweep resume", train, "-m", "seed=2", *SHORT),
        ("must be the folder of a sweep", resume, "sweep/0-ppo-CartPole-v1-s0"),
        ("must be the folder of a sweep", resume, "nowhere"),
        ("is a sweep, not a run; resume it: rlox sweep resume sweep", train, "resume=sweep"),
        ("seed=5 must not be given to resume a sweep", resume, "sweep", "seed=5"),
        ("DIR must come before -cd, got -cd first", resume, "-cd", "conf", "sweep"),
        ("-cd must be followed by its value, got nothing", resume, "sweep", "-cd"),
        ("give each job a folder of its own", train, "-m", "seed=0,1", *SHORT[:-2], "hydra.sweep.subdir=same"),
        ("hydra.sweeper.retries must be >= 0, got -1", train, "-m", *SHORT[:-2], "hydra.sweeper.retries=-1"),
        ("must be a path below", train, "-m", "seed=0,1", *SHORT[:-2], "hydra.sweep.subdir=../${seed}"),
    ]:
        with pytest.raises(UsageError, match=re.escape(says)):
            command(words) if command is train else resume(Path(words[0]), words[1:], False)
    sweep = Sweep.read(Path("sweep"))
    sweep.hold()
    assert "is being run by another process" in rlox(tmp_path, "sweep", "resume", "sweep", code=2)
    sweep.release()
    assert "2 of 2 jobs are finished" in rlox(tmp_path, "sweep", "resume", "sweep")
    reported = json.loads(rlox(tmp_path, "sweep", "status", "sweep", "--json"))
    assert [(job["state"], job["attempts"], job["step"]) for job in reported] == [("finished", 1, 512)] * 2
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["algo=ppo,dqn", "env=CartPole-v1,Acrobot-v1", "seed=1", "algo.gamma=0.9"],
        ["algo=dqn", "buffer=uniform,prioritized", "buffer.size=300,10_000", "algo.batch_size=16"],
        ["experiment=cartpole-seeds", "algo.gamma=0.9", "+env.kwargs.gravity=9.0", "logger=[csv,mlflow]"],
        ["eval={n_points:1},{n_points:2}", "total_timesteps=range(100,300,100)", "algo.learning_starts=10", "algo=sac"],
        ["algo.hidden_sizes=[8],[16,16]", "tuned=off", "max_time=1h", "seed=choice(3,4)", "env=Pendulum-v1"],
    ],
)
def test_jobs_composed_together_equal_those_composed_one_by_one(words):
    for job in compose_jobs(["-m"], words):
        (alone,) = compose_jobs([], job.overrides)
        assert (job.config, job.algo, job.tuned) == (alone.config, alone.algo, alone.tuned)


def test_an_id_depends_on_the_settings_of_the_run():
    name = job_id(["seed=1", "algo=ppo"])
    assert name == job_id(["algo=ppo", "seed=1", "hydra.sweep.dir=elsewhere"])
    assert name != job_id(["algo=ppo", "seed=2"])
    assert job_id(["algo=ppo", "seed=1"], [name]) == f"{name}-1"
    assert job_id(["algo=ppo", "seed=1"], [name, f"{name}-1"]) == f"{name}-2"


def test_ids_of_a_large_sweep_take_no_longer_for_the_last_job():
    class Ids(dict):
        def __iter__(self):
            raise AssertionError("all other ids were looked at")

    taken = Ids()
    taken[job_id(["seed=1"])] = taken[job_id(["seed=2"])] = None
    assert job_id(["seed=3"], taken) not in taken
    assert job_id(["seed=1"], taken).endswith("-1")
