"""`rlox bench learn` as a user runs it: verdicts, reused run folders, and bugs that the score does not show."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import forked
import numpy as np
import pytest
from rich.console import Console

from rlox.checkpoint import locks
from rlox.tracking import durable_rows
from rlox.tracking.record import LOCK
from rlox_cli.bench import fingerprint
from rlox_cli.bench.curves import align_curves
from rlox_cli.bench.judge import (
    MORE,
    PASS,
    area,
    first_reach,
    interval_text,
    judge_fingerprint,
    judge_others,
    judge_reference,
    list_task_changes,
)
from rlox_cli.bench.learn import compose_cells
from rlox_cli.bench.sb3 import read_curves, settings_of, train_curves
from rlox_cli.bench.seeds import Run, changes, settings, train
from rlox_cli.config.compose import compose_jobs
from rlox_cli.report.statistics import Interval
from rlox_cli.terminal.errors import UsageError

pytestmark = pytest.mark.slow

SHORT = ("algo=ppo", "env=CartPole-v1", "total_timesteps=12_800", "eval.n_episodes=10")


def rlox(*words, cwd=None, **env):
    environment = {**os.environ, **env}
    if "PYTHONPATH" not in env:
        return forked.run(*words, cwd=cwd or ".", env=environment)
    command = [sys.executable, "-m", "rlox_cli.main", *words]  # runs a sitecustomize as it starts
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def learn(*words, **kwargs):
    return rlox("bench", "learn", *map(str, words), **kwargs)


def numbers(folder):
    """The metrics that a run recorded, without times."""
    return [
        {key: value for key, value in row.items() if key != "time" and not key.startswith("time/")}
        for row in durable_rows(folder)
    ]


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    """Eight short trainings and their result; nothing is judged, so they cannot fail."""
    folder = tmp_path_factory.mktemp("before")
    done = learn(*SHORT, "--seeds", 8, "--runs", folder / "runs", "--out", folder, "--score-only", "~reference")
    return folder, done


def test_runs_equal_those_of_rlox_train_and_the_result_describes_them(before, tmp_path):
    folder, done = before
    assert done.returncode == 0, done.stderr
    assert "nothing to judge against" in done.stdout
    assert done.stderr.count("ppo-CartPole-v1 seed 10") == 8
    single = rlox("train", *SHORT, "~reference", "seed=101", "logger=none", f"hydra.run.dir={tmp_path / 'one'}")
    assert single.returncode == 0, single.stderr
    ours, theirs = folder / "runs" / "ppo-CartPole-v1-s101", tmp_path / "one"
    assert numbers(ours) == numbers(theirs)
    assert (ours / "config.yaml").read_text() == (theirs / "config.yaml").read_text()

    found = json.loads((folder / "learn.json").read_text())
    assert {"command", "date", "machine", "python", "versions"} <= set(found)
    cell = found["cells"]["ppo-CartPole-v1"]
    rows = [row for row in numbers(theirs) if "eval/mean_return" in row]
    assert [row["mean"] for row in cell["curves"]["101"]] == [row["eval/mean_return"] for row in rows]
    assert cell["final"]["101"] == rows[-1]["eval/mean_return"]
    assert cell["iqm"] == np.sort(list(cell["final"].values()))[2:6].mean()
    assert cell["iqm_low"] <= cell["iqm"] <= cell["iqm_high"]
    for one in cell["curves"].values():
        cpu = [row["cpu_s"] for row in one]
        assert cpu == sorted(cpu)
        assert 0 < cpu[0] < cpu[-1]
    assert (folder / "learn.png").read_bytes().startswith(b"\x89PNG")


def test_finished_runs_are_reused_and_interrupted_ones_resumed(before, tmp_path):
    folder, _ = before
    runs = tmp_path / "runs"
    shutil.copytree(folder / "runs", runs)
    kept, stopped = runs / "ppo-CartPole-v1-s100", runs / "ppo-CartPole-v1-s101"
    whole = numbers(stopped)
    shutil.rmtree(stopped)
    half = rlox("train", *SHORT, "~reference", "seed=101", "logger=none", "eval.stop_at=20", f"hydra.run.dir={stopped}")
    assert half.returncode == 0, half.stderr
    # The state after a kill: a checkpoint in the middle, and a record without an end, with the requested settings.
    config = (stopped / "config.yaml").read_text()
    assert "stop_at: 20.0" in config
    (stopped / "config.yaml").write_text(config.replace("stop_at: 20.0", "stop_at: null"))
    lines = (stopped / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert '"finished"' in lines[-1]
    (stopped / "metrics.jsonl").write_text("".join(lines[:-1]))
    assert len(numbers(stopped)) < len(whole)
    stamp = (kept / "metrics.jsonl").stat().st_mtime_ns
    done = learn(*SHORT, "~reference", "--seeds", 2, "--runs", runs, "--score-only", "--json")
    assert done.returncode == 0, done.stderr
    assert (kept / "metrics.jsonl").stat().st_mtime_ns == stamp
    assert {row["segment"] for row in numbers(stopped)} == {0, 1}
    assert [{**row, "segment": 0} for row in numbers(stopped)] == whole
    first = json.loads((folder / "learn.json").read_text())["cells"]["ppo-CartPole-v1"]
    again = json.loads(done.stdout)["cells"]["ppo-CartPole-v1"]
    assert again["final"] == {seed: first["final"][seed] for seed in ("100", "101")}
    # A run with other settings is not reused.
    other = learn(*SHORT, "~reference", "--seeds", 1, "--runs", runs, "algo.gamma=0.9")
    assert other.returncode == 2
    assert "algo.gamma 0.98 -> 0.9" in other.stderr
    assert "Traceback" not in other.stderr


@pytest.mark.parametrize(
    ("score", "verdict", "code"), [("15", "PASS", 0), ("480", "FAIL", 1), ("{iqm}", "NEED MORE SEEDS", 3)]
)
def test_the_score_is_judged_by_the_reference(before, score, verdict, code):
    folder, _ = before
    iqm = json.loads((folder / "learn.json").read_text())["cells"]["ppo-CartPole-v1"]["iqm"]
    reference = f"reference={{mean_return:{score.format(iqm=iqm)}}}"
    done = learn(*SHORT, reference, "--seeds", 8, "--runs", folder / "runs")
    assert done.returncode == code, done.stderr
    assert f"reference         {verdict}: IQM" in done.stdout
    assert done.stdout.rstrip().endswith(verdict)
    # The settings differ from those of the nominal runs: this is reported and does not affect the verdict.
    assert "no verdict, because the nominal runs had other settings: total_timesteps 100000 -> 12800" in done.stdout


def test_a_bug_that_the_score_hides_is_found_by_comparison_with_an_earlier_result(before, tmp_path):
    folder, _ = before
    # Python runs sitecustomize before anything else: here it halves the weight of the value loss.
    (tmp_path / "sitecustomize.py").write_text(
        "from dataclasses import replace\n"
        "from rlox.algorithms.ppo import PPO\n"
        "update = PPO.update_native\n"
        "def planted(self, batch):\n"
        "    asked, self.config = self.config, replace(self.config, vf_coef=self.config.vf_coef / 2)\n"
        "    try:\n"
        "        return update(self, batch)\n"
        "    finally:\n"
        "        self.config = asked\n"
        "PPO.update_native = planted\n"
    )
    words = (*SHORT, "~reference", "--against", folder / "learn.json", "--first-seed", 200, "--seeds", 8)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    buggy = learn(*words, "--runs", tmp_path / "buggy", "--margin", 500, PYTHONPATH=path)
    assert buggy.returncode == 1, buggy.stderr
    assert "others            PASS" in buggy.stdout
    assert "fingerprint       FAIL" in buggy.stdout
    assert "loss/grad_norm 1%-5%" in buggy.stdout
    sound = learn(*words, "--runs", tmp_path / "sound", "--margin", 500)
    assert sound.returncode == 0, sound.stdout
    assert "fingerprint       PASS" in sound.stdout


def test_a_run_that_was_killed_before_it_saved_anything_starts_over(before, tmp_path):
    made, killed = before[0] / "runs" / "ppo-CartPole-v1-s100", tmp_path / "ppo-CartPole-v1-s100"
    killed.mkdir()
    (killed / "metrics.jsonl").write_text((made / "metrics.jsonl").read_text().partition("\n")[0] + "\n")
    (killed / "notes.txt").touch()
    done = learn(*SHORT, "~reference", "--seeds", 1, "--runs", tmp_path, "--score-only", "--json")
    assert done.returncode == 0, done.stderr
    assert {row["segment"] for row in numbers(killed)} == {1}
    assert [{**row, "segment": 0} for row in numbers(killed)] == numbers(made)
    assert (killed / "notes.txt").exists()


def test_a_run_that_another_command_has_begun_meanwhile_is_left_alone(tmp_path):
    (job,) = compose_cells(
        ["algo=ppo", "env=CartPole-v1", "total_timesteps=256", "eval.n_episodes=1", "tuned=off"]
    ).values()
    other, taken = tmp_path / "1", []

    def begin(seed, run):
        other.mkdir()
        taken.append(locks.take_lock(other, LOCK))
        (other / "metrics.jsonl").touch()

    with pytest.raises(
        UsageError, match="1 is being trained by another process; wait for it, or choose another --runs"
    ):
        train(job.config, job.algo, [0, 1], lambda seed: tmp_path / str(seed), 1, begin)
    assert sorted(path.name for path in other.iterdir()) == ["metrics.jsonl", LOCK]
    taken[0].release()
    runs, diverged = train(job.config, job.algo, [0, 1], lambda seed: tmp_path / str(seed), 1, lambda seed, run: None)
    assert ([*runs], diverged) == ([0, 1], {})


def test_a_folder_of_something_else_is_refused(tmp_path):
    other = tmp_path / "ppo-CartPole-v1-s100"
    other.mkdir()
    (other / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    done = learn(*SHORT, "~reference", "--seeds", 1, "--runs", tmp_path)
    assert done.returncode == 2
    assert "ppo-CartPole-v1-s100 must hold a run, or be new: " in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.read_text() for path in other.iterdir()] == ['{"step": 1, "loss": 0.5}\n']


def test_the_result_has_no_password(tmp_path):
    uri = "logger.mlflow.tracking_uri=http://me:s3cret@127.0.0.1:9"
    words = ("logger=mlflow", uri, "total_timesteps=256", "eval.n_episodes=1", "tuned=off", "--seeds", 1)
    env = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_TRACKING_URI": ""}
    done = learn(*words, "--runs", "runs", "--out", "out", "--json", cwd=tmp_path, **env)
    assert done.returncode == 0, done.stderr
    assert "logger.mlflow.tracking_uri='\"'\"'http://me:***@127.0.0.1:9" in json.loads(done.stdout)["command"]
    assert "s3cret" not in done.stdout + done.stderr
    assert "s3cret" not in (tmp_path / "out/learn.json").read_text()
    assert "***" in (tmp_path / "runs/ppo-CartPole-v1-s100/config.yaml").read_text()


def test_a_killed_process_is_explained(tmp_path):
    (tmp_path / "greedy.py").write_text(
        "import multiprocessing, os, signal\n"
        "if multiprocessing.parent_process():\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = learn(*SHORT, "--seeds", 2, "--jobs", 2, "--runs", "runs", "--import", "greedy", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "rlox bench: a process of --jobs was killed, perhaps because the memory was full; use a lower --jobs: the same "
        "command with --runs continues"
    )


def test_several_processes_and_cells(tmp_path):
    words = ("algo=a2c,ppo", "env=CartPole-v1", "total_timesteps=2560", "eval.n_points=2", "~reference")
    done = learn(*words, "--seeds", 2, "--jobs", 2, "--runs", tmp_path, "--json", "--score-only")
    assert done.returncode == 0, done.stderr
    assert list(json.loads(done.stdout)["cells"]) == ["a2c-CartPole-v1", "ppo-CartPole-v1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("a2c-CartPole-v1-s100", "a2c-CartPole-v1-s101", "ppo-CartPole-v1-s100", "ppo-CartPole-v1-s101")
    ]


def test_recorded_curves_of_sb3(before, tmp_path):
    folder, _ = before
    for seed, last in zip(range(100, 105), (30.0, 31.0, 32.0, 33.0, 34.0), strict=True):
        rows = [{"step": 6400, "mean": 20.0, "std": 1.0, "cpu_s": 1.0}, {"step": 12800, "mean": last, "std": 0.0}]
        saved = {"sb3": "2.9.9", "evaluations": rows}
        (tmp_path / f"ppo-CartPole-v1-s{seed}.json").write_text(json.dumps(saved))
    words = (*SHORT, "~reference", "--seeds", 8, "--runs", folder / "runs", "--against", "sb3")
    done = learn(*words, "--reference", tmp_path, "--out", tmp_path / "out", "--threshold", 30)
    assert done.returncode == 0, done.stderr
    assert "others            PASS: IQM minus that of Stable-Baselines3 2.9.9 +" in done.stdout
    cell = json.loads((tmp_path / "out" / "learn.json").read_text())["cells"]["ppo-CartPole-v1"]
    assert cell["final_sb3"] == {"100": 30.0, "101": 31.0, "102": 32.0, "103": 33.0, "104": 34.0}
    assert cell["iqm_sb3"] == 32.0
    assert cell["difference"] == pytest.approx(cell["iqm"] - 32.0)
    assert cell["passes"] is True
    assert cell["improvement"]["value"] > 0.9
    assert cell["threshold_sb3"] == {"score": 30, "reached": 5, "of": 5, "steps": 12800, "cpu_s": None, "wall_s": None}
    command = json.loads((tmp_path / "out" / "learn.json").read_text())["command"]
    asked = ["--seeds", "8", "--first-seed", "100", "--against", "sb3", "--reference", str(tmp_path)]
    assert shlex.split(command) == ["rlox", "bench", "learn", *SHORT, "~reference", *asked, "--threshold", "30.0"]
    longer = learn(*words, "--reference", tmp_path, "total_timesteps=40_000", "--runs", tmp_path / "longer")
    assert longer.returncode == 2
    assert "must be of about as many steps as ours (40,000), got 12,800" in longer.stderr


def test_recorded_curves_name_their_trainer(tmp_path):
    (job,) = compose_jobs([], ["algo=ppo", "env=CartPole-v1", "total_timesteps=12_800"])
    rows = [{"step": 12800, "mean": 20.0, "std": 1.0, "cpu_s": 1.0}]
    for seed, named in ((100, {"peer": "tianshou 2.0.1"}), (101, {"sb3": "2.9.9"})):
        (tmp_path / f"ppo-s{seed}.json").write_text(json.dumps({**named, "evaluations": rows}))
    assert read_curves(tmp_path, "ppo", job, [100]) == ("tianshou 2.0.1", {100: rows})
    assert read_curves(tmp_path, "ppo", job, [101])[0] == "Stable-Baselines3 2.9.9"


def test_curves_of_an_id_with_a_slash_are_saved_whole_and_read_again(tmp_path):
    peer = tmp_path / "peer"  # an interpreter that has trained
    rows = [{"step": 12800, "mean": 20.0, "std": 1.0, "cpu_s": 1.0}]
    peer.write_text(f"#!/bin/sh\necho '{json.dumps({'sb3': '2.9.9', 'evaluations': rows})}'\n")
    peer.chmod(0o755)
    (job,) = compose_jobs([], ["algo=ppo", "env=CartPole-v1", "total_timesteps=12_800"])
    label, path = "ppo-ours/Env-v0 algo.gamma=0.9", tmp_path / "sb3" / "ppo-ours_Env-v0_algo.gamma_0.9-s100.json"
    path.parent.mkdir()
    path.write_text('{"settings": "other ones"}')
    found = "Stable-Baselines3 2.9.9", {100: rows}
    with path.open() as before:
        assert train_curves(str(peer), label, job, [100], path.parent, Console(quiet=True)) == found
        assert before.read() == '{"settings": "other ones"}'  # replaced by a whole file, and not written over
    assert list(path.parent.iterdir()) == [path]
    assert read_curves(path.parent, label, job, [100]) == found
    peer.write_text("#!/bin/sh\nexit 1\n")
    assert train_curves(str(peer), label, job, [100], path.parent, Console(quiet=True)) == found  # not again


def test_a_reference_does_not_judge_another_task(before):
    folder, _ = before
    done = learn(*SHORT, "--seeds", 8, "--runs", folder / "runs")
    assert done.returncode == 0, done.stderr
    assert (
        "reference         no verdict, because 475 is for another task: total_timesteps 100000 -> 12800; "
        "eval.n_episodes 20 -> 10; use --against, or reference={mean_return:SCORE}" in done.stdout
    )
    assert "reference         FAIL" not in done.stdout
    assert done.stdout.rstrip().endswith("nothing to judge against")


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ([], []),
        (["algo.gamma=0.9", "eval.n_points=5", "env.workers=1", "device=cpu"], []),
        (["total_timesteps=50_000"], ["total_timesteps 100000 -> 50000"]),
        (["env.n_envs=16"], ["env.n_envs 8 -> 16"]),
        (["env.wrappers=[{TimeLimit: {max_episode_steps: 9}}]"], None),
        (["eval.n_episodes=3", "eval.stop_at=400"], ["eval.n_episodes 20 -> 3", "eval.stop_at None -> 400.0"]),
        (["max_time=5s"], ["max_time None -> 5s"]),
        (["total_timesteps=50_000", "reference={mean_return:100}"], []),
    ],
)
def test_changes_that_make_it_another_task(words, changes):
    (job,) = compose_cells(["algo=ppo", "env=CartPole-v1", *words]).values()
    found = list_task_changes(job, ())
    assert found == changes if changes is not None else len(found) == 1


def test_the_reference_is_that_of_the_pair_which_an_experiment_chooses(tmp_path):
    file = tmp_path / "experiment" / "short.yaml"
    file.parent.mkdir()
    file.write_text(
        "# @package _global_\n"
        "defaults: [override /algo: sac, override /env: Pendulum-v1, _self_]\n"
        "total_timesteps: 1000\n"
    )
    flags = ["-cd", str(tmp_path)]
    (job,) = compose_cells([*flags, "experiment=short"]).values()
    assert list_task_changes(job, flags) == ["total_timesteps 10000 -> 1000"]


def test_seeds_of_an_experiment_are_left_out():
    assert list(compose_cells(["experiment=cartpole-seeds"])) == ["ppo-CartPole-v1"]


def test_an_earlier_result_of_another_task_is_refused(before, tmp_path):
    folder, _ = before
    words = ("~reference", "--score-only", "--runs", tmp_path / "runs", "--against", folder / "learn.json")
    done = learn(*SHORT, *words, "total_timesteps=6_400", "env.n_envs=4")
    assert done.returncode == 2
    assert "must be of the same task, but differs: total_timesteps 12800 -> 6400; env.n_envs 8 -> 4" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_recorded_curves_of_another_task_are_refused(tmp_path):
    saved = {"sb3": "2.9.9", "settings": {"n_envs": 1}, "evaluations": [{"step": 12800, "mean": 1.0}]}
    (tmp_path / "ppo-CartPole-v1-s100.json").write_text(json.dumps(saved))
    words = (*SHORT, "--seeds", 1, "--runs", tmp_path / "runs", "--against", "sb3", "--reference", tmp_path)
    done = learn(*words)
    assert done.returncode == 2
    assert "ppo-CartPole-v1-s100.json must be of the same task as ours, but differs: n_envs 1 -> 8" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_curves_of_different_lengths_are_drawn_whole():
    whole = [{"step": step, "mean": step / 10} for step in (10, 20, 30, 40)]
    steps, heights = align_curves([whole, whole[:2], [{"step": 20, "mean": 0.0}, {"step": 40, "mean": 8.0}]])
    assert steps.tolist() == [20, 30, 40]
    assert heights.tolist() == [[2.0, 2.0, 0.0], [3.0, 2.0, 4.0], [4.0, 2.0, 8.0]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["seed=3"], "seed must be left out"),
        (["eval.seed=${seed}"], "eval.seed must not depend on seed, since there are several"),
        (["algo=pppo"], "did you mean 'ppo'?"),
        (["--against", "sb3"], "must be used with either --reference FOLDER"),
        (["--against", "nothing.json"], "--against must be sb3 or the learn.json of an earlier --out"),
        (["--against", "sb3", "--reference", "."], "--reference . must hold ppo-CartPole-v1-s100.json"),
    ],
)
def test_errors_before_training(words, message, tmp_path):
    """All of these are rejected before anything is trained."""
    done = learn(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ({}, "must be sb3 or the learn.json of an earlier --out"),
        ({"curves": {}}, "must hold a curve of ppo-CartPole-v1, but all its seeds diverged"),
        ({"curves": {"100": [{"mean": 1.0}]}}, "must be sb3 or the learn.json of an earlier --out"),
        ({"curves": {"100": [{"step": 5, "mean": 1.0}]}}, "no fingerprint of ppo-CartPole-v1; add --score-only"),
        (None, "must hold ppo-CartPole-v1, but has a2c-CartPole-v1"),
    ],
)
def test_an_earlier_result_is_checked_before_training(cell, message, tmp_path):
    earlier = {"a2c-CartPole-v1": {}} if cell is None else {"ppo-CartPole-v1": cell}
    (tmp_path / "learn.json").write_text(json.dumps({"cells": earlier}))
    done = learn("--against", "learn.json", cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["learn.json"]


@pytest.mark.parametrize(("ours", "nominal", "fewest"), [(4, 4, 6), (10, 2, 19), (1, 60, 2)])
def test_the_fingerprint_needs_enough_runs_on_both_sides(ours, nominal, fewest):
    """With fewer, not even the most extreme difference has a p-value below the level."""
    ran = [Run(seed, [], {"loss": 9.0 + seed}) for seed in range(ours)]
    table = fingerprint.as_table({seed: {"loss": float(-seed)} for seed in range(nominal)})
    verdict, why = judge_fingerprint(ran, {"settings": {}}, {"settings": {}, "quantities": table})
    assert (verdict, f"at least {fewest} seeds are needed" in why) == (MORE, True)
    apart = [{"loss": 9.0 + seed} for seed in range(5)]
    nominal_runs = [{"loss": float(-seed)} for seed in range(5)]
    assert fingerprint.count_fewest(5) == 5
    assert fingerprint.compare(apart, nominal_runs).differs
    assert not fingerprint.compare(apart[:4], nominal_runs).differs


def test_another_algorithm_on_the_same_environment_is_compared_with(before, tmp_path):
    folder, _ = before
    earlier = ("--against", folder / "learn.json")
    done = learn("algo=a2c", *SHORT[1:], "~reference", "--seeds", 5, *earlier, "--margin", 500, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "others            PASS" in done.stdout
    assert "fingerprint no verdict, because the nominal runs had other settings: " in " ".join(done.stdout.split())
    two = learn("algo=a2c,dqn", *SHORT[1:], *earlier, cwd=tmp_path)
    assert two.returncode == 2
    assert "must hold a2c-CartPole-v1, but has ppo-CartPole-v1" in " ".join(two.stderr.split())


def test_a_score_is_compared_with_results_that_have_no_fingerprint(before, tmp_path):
    folder, _ = before
    curves = {seed: [{"step": 6400, "mean": 20.0}, {"step": 12800, "mean": 20.0 + seed}] for seed in range(5)}
    (tmp_path / "learn.json").write_text(json.dumps({"cells": {"ppo-CartPole-v1": {"curves": curves}}}))
    earlier = tmp_path / "an earlier result"
    (tmp_path / "learn.json").rename(earlier)
    (tmp_path / "nothing.py").touch()
    words = (*SHORT, "~reference", "--seeds", 8, "--runs", folder / "runs", "--against", earlier, "--margin", 5)
    done = learn(*words, "--score-only", "--import", "nothing", "--out", tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "others            PASS" in done.stdout
    # The result names everything that decides.
    asked = ["--import", "nothing", "--against", str(earlier), "--margin", "5.0", "--score-only"]
    command = json.loads((tmp_path / "learn.json").read_text())["command"]
    start = ["rlox", "bench", "learn", *SHORT, "~reference", "--seeds", "8", "--first-seed", "100"]
    assert shlex.split(command) == start + asked


def test_the_suggested_number_of_seeds_is_enough_for_a_verdict():
    rng = np.random.default_rng(0)
    few = rng.normal(101.0, 10.0, 5)
    verdict, why = judge_reference(few, 100.0)
    assert verdict == MORE
    asked = int(why.split("about ")[1].split(" seeds")[0].replace(",", ""))
    assert asked > 5
    verdicts = [judge_reference(rng.normal(np.sort(few)[1:4].mean(), few.std(), 2 * asked), 100.0)[0] for _ in range(9)]
    assert verdicts.count(PASS if np.sort(few)[1:4].mean() > 100 else "FAIL") >= 7
    assert judge_reference([500.0] * 4, 475.0)[0] == MORE
    assert judge_reference([450.0], 475.0)[1].startswith("IQM 450.0, no interval from one seed, reference 475")
    assert judge_reference([500.0] * 5, 475.0)[0] == PASS
    theirs = [10.0] * 5
    assert judge_others([9.0, 9.0, 9.1, 9.2, 9.3], theirs, 5.0, "theirs")[0] == "FAIL"
    assert judge_others([9.0, 9.0, 10.5, 10.6, 10.7], theirs, 1.5, "theirs")[0] == PASS
    assert judge_others([9.0, 9.0, 10.5, 10.6, 10.7], theirs, 0.5, "theirs")[0] == MORE
    # Fewer than five seeds never decide, on either side.
    for ours in ([9.0, 9.0, 9.1, 9.2, 9.3], [11.0] * 5):
        assert judge_others(ours, theirs[:4], 5.0, "theirs")[0] == MORE
        assert judge_others(ours[:4], theirs, 5.0, "theirs")[0] == MORE


def test_small_scores_are_shown_with_more_digits():
    assert interval_text(Interval(475.04, 470.0, 480.0)) == "475.0 [470.0, 480.0]"
    assert interval_text(Interval(0.5123, 0.4, 0.6), "+") == "+0.512 [0.400, 0.600]"
    assert interval_text(Interval(0.0, 0.0, 0.0)) == "0.0 [0.0, 0.0]"
    assert judge_reference([0.25] * 5, 0.9)[1] == "IQM 0.250 [0.250, 0.250], reference 0.9"


def test_summaries_of_curves():
    curve = [{"step": 10, "mean": 0.0}, {"step": 20, "mean": 10.0}, {"step": 50, "mean": 10.0, "cpu_s": 3.0}]
    assert area(curve) == pytest.approx((5 * 10 + 10 * 30) / 40)
    assert area(curve[:1]) == 0.0
    late = [{"step": 40, "mean": 10.0, "cpu_s": 2.0}]
    found = first_reach([curve, late, late], 10.0)
    assert found == {"score": 10.0, "reached": 3, "of": 3, "steps": 40.0, "cpu_s": None, "wall_s": None}
    assert first_reach([curve, [{"step": 9, "mean": 1.0}]], 10.0)["steps"] is None


def test_the_rate_of_false_alarms_is_as_documented_and_changes_are_named():
    rng = np.random.default_rng(0)

    def runs(n, shift=0.0):
        # Sixty correlated quantities: one is NaN in some runs, and one never changes.
        table = rng.normal(size=(n, 60)) + rng.normal(size=(n, 1))
        table[:, 7] += shift
        table[::5, 3] = np.nan
        table[:, 4] = 20.0
        return [{f"q{k}": float(value) for k, value in enumerate(row)} for row in table]

    nominal = runs(60)
    alarms = sum(fingerprint.compare(runs(5), runs(60), level=0.1).differs for _ in range(60))
    assert alarms <= 13  # Binomial(60, 0.1) is above this with probability 0.003
    found = fingerprint.compare(runs(5, shift=9.0), nominal)
    assert [one.name for one in found.differing] == ["q7"]
    assert "higher" in str(found.differing[0])
    assert found.n_quantities == 59
    # Compared with all possible splits: two runs of seven, one quantity.
    few = [{"q": float(k)} for k in (9, 8, 1, 2, 3, 4, 5)]
    assert fingerprint.compare(few[:2], few[2:]).smallest_p == pytest.approx(2 / 21, abs=0.01)


def test_the_settings_of_sb3():
    (job,) = compose_jobs([], ["algo=ppo", "env=CartPole-v1"])
    found = settings_of(job.config, job.algo)
    assert (found["algo"], found["steps"], found["n_envs"], found["normalize"]) == ("PPO", 100_000, 8, None)
    recorded = {"n_steps": 32, "batch_size": 256, "gamma": 0.98, "gae_lambda": 0.8, "n_epochs": 20, "ent_coef": 0.0}
    assert recorded.items() <= found["kw"].items()
    assert found["kw"]["clip_range"] == {"falls_from": 0.2}
    assert found["kw"]["learning_rate"] == {"falls_from": 0.001}
    assert "max_steps" not in found  # a recording from before this setting has equal ones
    (job,) = compose_jobs([], ["algo=ppo", "env=CartPole-v1", "eval.max_steps=40"])
    assert settings_of(job.config, job.algo) == {**found, "max_steps": 40}
    (job,) = compose_jobs([], ["algo=dqn", "env=CartPole-v1", "algo.double_dqn=true"])
    with pytest.raises(UsageError, match=r"no counterpart for algo.double_dqn"):
        settings_of(job.config, job.algo)
    for word in ("eval.stop_at=400", "eval.patience=3"):
        (job,) = compose_jobs([], ["algo=dqn", "env=CartPole-v1", word])
        with pytest.raises(UsageError, match=r"no counterpart for eval\.stop_at and eval\.patience"):
            settings_of(job.config, job.algo)
    for word in ("algo.distribution=quantile", "algo.noisy=true", "algo.memory=gru", "algo.adam_eps=0.001"):
        (job,) = compose_jobs([], ["algo=dqn", "env=CartPole-v1", word])
        with pytest.raises(UsageError, match=f"no counterpart for {word.lower()}".replace("true", "True")):
            settings_of(job.config, job.algo)
    (job,) = compose_jobs([], ["algo=dqn", "env=CartPole-v1"])
    assert set(settings_of(job.config, job.algo)["kw"]) == {
        *("learning_rate", "batch_size", "max_grad_norm", "gamma", "learning_starts", "train_freq", "gradient_steps"),
        *("target_update_interval", "tau", "exploration_fraction", "exploration_initial_eps", "exploration_final_eps"),
        *("buffer_size", "policy_kwargs"),
    }


def test_options_that_are_off_do_not_change_the_settings():
    jobs = [compose_jobs([], ["algo=dqn", *words])[0] for words in ([], ["algo.n_atoms=9"], ["algo.noisy=true"])]
    plain, unused, noisy = (settings(job.config, job.algo) for job in jobs)
    assert plain == unused
    assert changes(plain, noisy) == ["algo.noisy None -> True", "algo.noisy_sigma None -> 0.5"]


@pytest.mark.parametrize("path", sorted(Path(fingerprint.__file__).parent.glob("nominal/*.json")), ids=lambda p: p.stem)
def test_nominal_runs_are_of_the_tuned_settings_that_ship(path):
    saved = json.loads(path.read_text())
    algo, env = path.stem.split("-", 1)
    (job,) = compose_jobs([], [f"algo={algo}", f"env={env}", *saved["overrides"]])
    assert changes(saved["settings"], settings(job.config, algo)) == []
    assert len(saved["quantities"]["seeds"]) == 60
