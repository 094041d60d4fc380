"""``rlox train`` on a dataset: the environment comes from the dataset, and killed runs resume bit for bit."""

import json
import re
import shlex
import shutil
import sys

import forked
import numpy as np
import pytest
import yaml
from run_results import kill_when_there, weights

import rlox
from rlox.algorithms import IQL
from rlox.checkpoint import load_checkpoint
from rlox_cli.config.compose import compose_jobs, compose_typed
from rlox_cli.config.overrides import split_args
from rlox_cli.config.ranges import read_search
from rlox_cli.config.schema import with_env

SMALL = ["algo.hidden_sizes=[16,16]", "algo.batch_size=32", "logger=none", "eval.n_episodes=2", "eval.n_points=2"]


def rlox_cli(*args, cwd, fails=False):
    done = forked.run(*args, cwd=cwd)
    assert (done.returncode != 0) is fails, done.stdout + done.stderr
    return done.stderr if fails else done.stdout


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """600 random steps of Pendulum, written by `rlox collect`."""
    folder = tmp_path_factory.mktemp("data")
    rlox_cli("collect", "--env", "Pendulum-v1", "--steps", "600", "--out", "random.arrow", cwd=folder)
    return folder / "random.arrow"


def test_the_environment_of_a_dataset_with_a_quoted_name_is_found(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("é, 1.arrow", "two.arrow"):
        shutil.copyfile(data, name)
    for line in ("dataset='é, 1.arrow'", "+dataset='é, 1.arrow',two.arrow", "dataset.source=two.arrow"):
        assert with_env(["algo=bc", line]) == ["algo=bc", line, "env=Pendulum-v1"]
    for line in ("dataset='é, 1.arrow',none.arrow", "dataset=é.arrow", "dataset=null", "dataset=glob(*)"):
        assert with_env([line]) == [line]


def test_the_printed_command_trains_on_a_file_with_any_name(command):
    for name in ("my données, d'été.arrow", "plain.arrow"):
        code, printed, _ = command("collect", "--env", "Pendulum-v1", "--steps", "9", "--out", name)
        assert not code
        (line,) = re.findall(r"train +rlox train (.*)", printed)
        flags, overrides = split_args(shlex.split(line))
        (job,) = compose_jobs(flags, with_env(overrides))
        assert (job.config.dataset.source, job.config.env.id) == (name, "Pendulum-v1")
    assert line == "algo=td3_bc dataset=plain.arrow"


@pytest.mark.slow
def test_trains_resumes_and_evaluates_on_the_datasets_own_environment(data, tmp_path):
    command = ["train", "algo=iql", f"dataset={data}", "algo.normalize_obs=true", *SMALL]
    printed = rlox_cli(*command, "total_timesteps=300", "hydra.run.dir=whole", cwd=tmp_path)
    assert "iql Pendulum-v1 seed 0: 300 updates in" in printed
    config = yaml.safe_load((tmp_path / "whole/config.yaml").read_text())
    assert (config["env"]["id"], config["dataset"]["source"]) == ("Pendulum-v1", str(data))
    rows = [json.loads(line) for line in (tmp_path / "whole/metrics.jsonl").read_text().splitlines()]
    printed = {key for row in rows for key in row}
    assert {"dataset/log_prob", "dataset/q", "dataset/return", "time/updates_per_second", "eval/mean_return"} <= printed
    assert "episode/return" not in printed
    assert [row["step"] for row in rows if "eval/mean_return" in row] == [150, 300]

    # First half of the updates, then the rest.
    rlox_cli(*command, "total_timesteps=300", "hydra.run.dir=cut", "eval.stop_at=-1e9", cwd=tmp_path)
    assert load_checkpoint(tmp_path / "cut/checkpoints/last.safetensors").header["counters"]["updates"] == 150
    printed = rlox_cli("train", "resume=cut", "eval.stop_at=null", cwd=tmp_path)
    assert "at update 150 of 300" in printed
    whole, cut = (weights(tmp_path / name / "checkpoints/last.safetensors") for name in ("whole", "cut"))
    assert whole.keys() == cut.keys()
    assert all(np.array_equal(whole[key], cut[key]) for key in whole)

    printed = rlox_cli("eval", "whole/checkpoints/last.safetensors", "--episodes", "2", cwd=tmp_path)
    assert "iql on Pendulum-v1, update 300" in printed
    acting = IQL.from_checkpoint(tmp_path / "whole/checkpoints/last.safetensors")
    dataset = rlox.open_dataset(data, normalize=True)
    assert np.array_equal(acting.normalizer.mean, dataset.obs_mean)


@pytest.mark.slow
def test_a_killed_run_resumes_bit_for_bit(data, tmp_path):
    command = ["train", "algo=td3_bc", f"dataset={data}", "env=Pendulum-v1", "tuned=off", *SMALL]
    command += ["total_timesteps=2_000_000", "checkpoint.every_steps=200"]
    last = tmp_path / "killed/checkpoints/last.safetensors"
    kill_when_there(last, [*command, "hydra.run.dir=killed"], tmp_path)
    done = load_checkpoint(last).header["counters"]["updates"]
    assert 0 < done < 2_000_000
    # The result is the same as without the interruption: schedules and horizon were set at the start.
    rlox_cli("train", "resume=killed", f"total_timesteps={done + 400}", cwd=tmp_path)
    again = [*command, f"total_timesteps={done + 400}", "schedule_timesteps=2_000_000", "hydra.run.dir=straight"]
    rlox_cli(*[word for word in again if word != "total_timesteps=2_000_000"], cwd=tmp_path)
    one, other = weights(last), weights(tmp_path / "straight/checkpoints/last.safetensors")
    assert all(np.array_equal(one[key], other[key]) for key in one)


@pytest.mark.slow
def test_a_killed_sweep_resumes_bit_for_bit_and_counts_updates(data, tmp_path):
    command = ["train", "-m", "algo=bc,td3_bc", f"dataset={data}", "seed=0,1", "tuned=off", *SMALL]
    command += ["total_timesteps=1_000", "checkpoint.every_steps=100"]
    rlox_cli(*command, "hydra.sweep.dir=whole", cwd=tmp_path)
    third = tmp_path / "killed/2-td3_bc-Pendulum-v1-s0/checkpoints/last.safetensors"
    kill_when_there(third, [*command, "hydra.sweep.dir=killed"], tmp_path)
    # The third job may have ended before the kill.
    assert re.search("[23] of 4 jobs are finished", rlox_cli("sweep", "status", "killed", cwd=tmp_path))
    rlox_cli("sweep", "resume", "killed", cwd=tmp_path)
    for run in (tmp_path / "whole").glob("*-s*"):
        one, other = (
            weights(tmp_path / name / run.name / "checkpoints/last.safetensors") for name in ("whole", "killed")
        )
        assert all(np.array_equal(one[key], other[key]) for key in one)

    printed = rlox_cli("sweep", "status", "killed", cwd=tmp_path)
    assert "4 of 4 jobs are finished" in printed
    assert " updates " in printed
    assert "1,000/1,000" in printed
    assert "updates/s" in rlox_cli("plot", "whole", "--out", "page.html", cwd=tmp_path)
    page = (tmp_path / "page.html").read_text()
    assert ">updates</th>" in page
    assert "environment steps" not in page
    printed = rlox_cli("compare", "whole/0-bc-Pendulum-v1-s0", "whole/2-td3_bc-Pendulum-v1-s0", cwd=tmp_path)
    assert "mean over updates 500 to 1,000" in printed
    assert "updates per second" in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algo", "own"),
    [("bc", []), ("td3_bc", ["alpha"]), ("iql", ["expectile", "temperature"]), ("cql", ["cql_alpha"])],
)
def test_parameters_of_a_search(algo, own, data):
    arguments = ["hydra/sweeper=optuna", f"algo={algo}", f"dataset={data}", "env=Pendulum-v1", "tuned=off"]
    cfg, corners = compose_typed(["-m"], arguments)
    found = {space.key for space in read_search(arguments, cfg).spaces}
    assert {f"algo.{name}" for name in ("learning_rate", "batch_size", *own)} <= found
    assert {job.config.dataset.source for job in corners} == {str(data)}


@pytest.mark.slow
def test_seeds_are_judged_and_algorithms_missing_in_sb3_are_an_early_error(data, tmp_path):
    command = ["bench", "learn", "algo=td3_bc", f"dataset={data}", "tuned=off", *SMALL, "total_timesteps=200"]
    printed = rlox_cli(*command, "--seeds", "2", "--first-seed", "0", "--out", "out", cwd=tmp_path)
    assert "td3_bc-Pendulum-v1: 2 seeds of 200 updates" in printed
    (cell,) = json.loads((tmp_path / "out/learn.json").read_text())["cells"].values()
    assert all(curve[-1]["cpu_s"] > 0 for curve in cell["curves"].values())
    printed = rlox_cli(
        *command, "--against", "sb3", "--peer-python", sys.executable, "--runs", "none", cwd=tmp_path, fails=True
    )
    assert "Stable-Baselines3 has no counterpart for algo=td3_bc" in printed
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["env=CartPole-v1"], "actions"),
        (["env=MountainCarContinuous-v0"], "observations of shape"),
        (
            ["backend=native", f"algo.hidden_sizes={[8] * 9}"],
            "backend must be auto or torch here, got 'native': the kernel supports at most 8 hidden layers",
        ),
        (["algo.expectile=1.0"], "algo.expectile must be in (0, 1), got 1.0"),
        (["compile=true"], "compile must be false with algo=iql"),
        (["env.reward_fn=sign"], "env.reward_fn must be null with algo=iql"),
    ],
)
def test_errors_are_one_paragraph(data, tmp_path, arguments, message):
    printed = rlox_cli("train", "algo=iql", f"dataset={data}", *SMALL, *arguments, cwd=tmp_path, fails=True)
    assert message in printed
    assert "Traceback" not in printed
