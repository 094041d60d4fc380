"""``rlox train`` on a dataset: the environment comes from it, a run that was killed goes on as if it had not been."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import yaml

import rlox
from rlox.algorithms import IQL
from rlox.checkpoint import load_checkpoint

SMALL = ["algo.hidden_sizes=[16,16]", "algo.batch_size=32", "logger=none", "eval.n_episodes=2", "eval.n_points=2"]


def words(*args):
    return [sys.executable, "-m", "rlox_cli.main", *args]


def rlox_cli(*args, cwd, fails=False):
    done = subprocess.run(words(*args), cwd=cwd, capture_output=True, text=True, timeout=300)
    assert (done.returncode != 0) is fails, done.stdout + done.stderr
    return done.stderr if fails else done.stdout


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """600 random steps of Pendulum, as `rlox collect` writes them."""
    folder = tmp_path_factory.mktemp("data")
    rlox_cli("collect", "--env", "Pendulum-v1", "--steps", "600", "--out", "random.arrow", cwd=folder)
    return folder / "random.arrow"


def weights(path):
    return {f"{s}/{k}": v for s, part in load_checkpoint(path).tensors.items() for k, v in part.items()}


def test_trains_resumes_and_evaluates_on_the_datasets_own_environment(data, tmp_path):
    command = ["train", "algo=iql", f"dataset={data}", "algo.normalize_obs=true", *SMALL]
    told = rlox_cli(*command, "total_timesteps=300", "hydra.run.dir=whole", cwd=tmp_path)
    assert "iql Pendulum-v1 seed 0: 300 updates in" in told
    config = yaml.safe_load((tmp_path / "whole/config.yaml").read_text())
    assert (config["env"]["id"], config["dataset"]["source"]) == ("Pendulum-v1", str(data))
    rows = [json.loads(line) for line in (tmp_path / "whole/metrics.jsonl").read_text().splitlines()]
    told = {key for row in rows for key in row}
    assert {"dataset/log_prob", "dataset/q", "dataset/return", "time/updates_per_second", "eval/mean_return"} <= told
    assert "episode/return" not in told
    assert [row["step"] for row in rows if "eval/mean_return" in row] == [150, 300]

    # Half of it, then the rest.
    rlox_cli(*command, "total_timesteps=300", "hydra.run.dir=cut", "eval.stop_at=-1e9", cwd=tmp_path)
    assert load_checkpoint(tmp_path / "cut/checkpoints/last.safetensors").header["counters"]["updates"] == 150
    told = rlox_cli("train", "resume=cut", "eval.stop_at=null", cwd=tmp_path)
    assert "at update 150 of 300" in told
    whole, cut = (weights(tmp_path / name / "checkpoints/last.safetensors") for name in ("whole", "cut"))
    assert whole.keys() == cut.keys()
    assert all(np.array_equal(whole[key], cut[key]) for key in whole)

    told = rlox_cli("eval", "whole/checkpoints/last.safetensors", "--episodes", "2", cwd=tmp_path)
    assert "iql on Pendulum-v1, update 300" in told
    acting = IQL.from_checkpoint(tmp_path / "whole/checkpoints/last.safetensors")
    dataset = rlox.open_dataset(data, normalize=True)
    assert np.array_equal(acting._statistics[0], dataset.obs_mean)


def test_a_killed_run_goes_on_bit_for_bit(data, tmp_path):
    command = ["train", "algo=td3_bc", f"dataset={data}", "env=Pendulum-v1", "tuned=off", *SMALL]
    command += ["total_timesteps=20_000", "checkpoint.every_steps=200"]
    last = tmp_path / "killed/checkpoints/last.safetensors"
    running = subprocess.Popen(words(*command, "hydra.run.dir=killed"), cwd=tmp_path, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 200
        while not last.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        os.kill(running.pid, signal.SIGKILL)
        running.wait()
    done = load_checkpoint(last).header["counters"]["updates"]
    assert 0 < done < 20_000
    # Where it ends is the same as without the pause: schedules and horizon were set at the beginning.
    rlox_cli("train", "resume=killed", f"total_timesteps={done + 400}", cwd=tmp_path)
    again = [*command, f"total_timesteps={done + 400}", "schedule_timesteps=20_000", "hydra.run.dir=straight"]
    rlox_cli(*[word for word in again if word != "total_timesteps=20_000"], cwd=tmp_path)
    one, other = weights(last), weights(tmp_path / "straight/checkpoints/last.safetensors")
    assert all(np.array_equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["env=CartPole-v1"], "actions"),
        (["env=MountainCarContinuous-v0"], "observations of shape"),
        (["backend=native"], "iql has no native update"),
        (["algo.expectile=1.0"], "algo.expectile must be in (0, 1), got 1.0"),
        (["compile=true"], "compile must be false with algo=iql"),
        (["env.reward_fn=sign"], "env.reward_fn must be null with algo=iql"),
    ],
)
def test_what_cannot_be_is_said_in_one_paragraph(data, tmp_path, arguments, message):
    told = rlox_cli("train", "algo=iql", f"dataset={data}", *SMALL, *arguments, cwd=tmp_path, fails=True)
    assert message in told
    assert "Traceback" not in told
