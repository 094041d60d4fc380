"""The command line as a user meets it: subprocesses, real files, real MLflow, exit codes and messages."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from rlox.checkpoint import load_checkpoint

RLOX = [sys.executable, "-m", "rlox_cli.main"]
SMALL = ["total_timesteps=1500", "eval.n_episodes=3", "eval.n_points=3"]


def rlox(*args, cwd, check=True, **env):
    done = subprocess.run(
        [*RLOX, *args], cwd=cwd, capture_output=True, text=True, timeout=240, env={**os.environ, **env}
    )
    if check:
        assert done.returncode == 0, done.stderr
    return done


def rows(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def run_folders(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.rglob("metrics.jsonl"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """One run with the default logger, for every test that only looks."""
    cwd = tmp_path_factory.mktemp("trained")
    done = rlox("train", "algo=ppo", "env=CartPole-v1", *SMALL, cwd=cwd)
    (run,) = run_folders(cwd / "outputs")
    return cwd, run, done


def test_train_leaves_a_complete_run_and_says_where(trained):
    cwd, run, done = trained
    for name in ("config.yaml", "metrics.jsonl", "checkpoints/last.safetensors", "checkpoints/best.safetensors"):
        assert (run / name).is_file()
        assert str((run / name).relative_to(cwd)) in done.stdout
    assert "tuned settings: ppo/CartPole-v1" in done.stdout
    assert "rlox eval outputs/" in done.stdout
    assert "rlox ui" in done.stdout
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["algo"]["name"] == "ppo"
    assert config["algo"]["n_steps"] == 32
    assert config["total_timesteps"] == 1500
    assert config["logger"]["mlflow"]["tracking_uri"] == f"sqlite:///{cwd}/outputs/mlflow.db"
    record = rows(run)
    assert record[0]["event"] == "start"
    assert record[-1]["event"] == "end"
    assert record[-1]["status"] == "finished"
    steps = [row["step"] for row in record if "loss/policy" in row]
    assert steps == list(range(256, 1537, 256))
    assert sum("eval/mean_return" in row for row in record) == 3


def test_mlflow_holds_what_the_record_holds(trained):
    cwd, run, _ = trained
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{cwd}/outputs/mlflow.db")
    (experiment,) = client.search_experiments(filter_string="name = 'rlox'")
    (mirrored,) = client.search_runs([experiment.experiment_id])
    assert mirrored.info.status == "FINISHED"
    assert mirrored.data.params["algo.clip_eps"] == "0.2"
    expected = [(row["step"], row["loss/value"]) for row in rows(run) if "loss/value" in row]
    history = client.get_metric_history(mirrored.info.run_id, "loss/value")
    assert sorted((m.step, m.value) for m in history) == expected
    names = {item.path for item in client.list_artifacts(mirrored.info.run_id, "checkpoints")}
    assert names == {"checkpoints/best.safetensors", "checkpoints/last.safetensors"}


def test_eval_reproduces_the_evaluation_that_chose_best(trained, tmp_path):
    cwd, run, _ = trained
    best = run / "checkpoints" / "best.safetensors"
    recorded = load_checkpoint(best).header["evaluation"]
    alone = tmp_path / "moved.safetensors"
    alone.write_bytes(best.read_bytes())
    out = json.loads(rlox("eval", "moved.safetensors", "--json", cwd=tmp_path).stdout)
    assert set(out) == {"mean_return", "std_return", "min_return", "max_return", "mean_length", "n_episodes"}
    assert out == {key: recorded[key] for key in out}
    assert max(row["eval/mean_return"] for row in rows(run) if "eval/mean_return" in row) == out["mean_return"]
    assert "reproduced exactly" in rlox("eval", str(run), cwd=cwd).stdout
    other = json.loads(
        rlox("eval", str(best), "--episodes", "7", "--seed", "5", "--stochastic", "--json", cwd=cwd).stdout
    )
    assert other["n_episodes"] == 7
    assert other != out


def test_lists_and_explanations(trained):
    cwd, run, _ = trained
    assert re.search(r"^ppo +Proximal", rlox("ls", "algos", cwd=cwd).stdout, re.MULTILINE)
    envs = rlox("ls", "envs", cwd=cwd).stdout
    assert "CartPole-v1" in envs
    assert "Acrobot-v1" in envs
    assert re.search(r"algo=ppo env=Pendulum-v1 +100,000 +-200", rlox("ls", "tuned", cwd=cwd).stdout)
    assert re.search(rf"{run.name} +ppo +CartPole-v1 +0 +1,536 +finished", rlox("ls", "runs", cwd=cwd).stdout)
    shown = rlox("show", "algo=ppo", "env=CartPole-v1", cwd=cwd).stdout
    assert re.search(r"algo\.clip_eps_schedule +str +constant +linear +constant, or linear", shown)
    everything = rlox("show", cwd=cwd).stdout
    for key in ("total_timesteps", "env.n_envs", "eval.n_episodes", "checkpoint.every_s", "logger.wandb.mode"):
        assert key in everything


def test_help_is_quick_and_complete(tmp_path):
    out = rlox("--help", cwd=tmp_path).stdout
    for verb in ("train", "eval", "ls", "show", "sync", "ui"):
        assert re.search(rf"\b{verb}\b", out)
        assert "Usage" in rlox(verb, "--help", cwd=tmp_path).stdout
    program = (
        "import sys; from rlox_cli import main\n"
        "try: main.app(['--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'hydra', 'numpy', 'mlflow', 'wandb', 'gymnasium') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert rlox("--version", cwd=tmp_path).stdout.startswith("rlox 0.")


def test_hydra_flags(tmp_path):
    job = rlox("train", "--cfg", "job", "env=Pendulum-v1", "seed=4", cwd=tmp_path).stdout
    plain = yaml.safe_load(job)
    assert (plain["seed"], plain["env"]["id"], plain["algo"]["gamma"]) == (4, "Pendulum-v1", 0.9)
    # Flags before overrides, which Hydra alone refuses.
    part = yaml.safe_load(rlox("train", "--cfg", "job", "-p", "env", "tuned=off", cwd=tmp_path).stdout)
    assert part["n_envs"] == 8
    assert "Defaults Tree" in rlox("train", "--info", "defaults-tree", cwd=tmp_path).stdout
    assert not (tmp_path / "outputs").exists()


def test_completion_of_overrides(tmp_path):
    def complete(word):
        env = {"_RLOX_COMPLETE": "complete_bash", "COMP_WORDS": f"rlox train {word}", "COMP_CWORD": "2"}
        program = "import sys; sys.argv = ['rlox']; from rlox_cli.main import app; app(prog_name='rlox')"
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, env={**os.environ, **env}
        )
        return done.stdout.split()

    assert complete("algo=") == ["algo=ppo"]
    assert "algo.clip_eps=" in complete("algo.clip")
    assert complete("env=Cart") == ["env=CartPole-v1"]


BAD_INPUT = [
    (["algo.clip_epz=1"], "algo.clip_epz is no key of PPOConfig; did you mean 'clip_eps'?"),
    (["gamma=0.9"], "gamma is no key of RunConfig; did you mean algo.gamma?"),
    (["algo.gamma=high"], "algo.gamma must be a number, got 'high'"),
    (["algo.gamma=1.5"], "algo.gamma must be in [0, 1], got 1.5"),
    (["algo.gamma=1.5", "--cfg", "job"], "algo.gamma must be in [0, 1], got 1.5"),
    (["total_timesteps=1e6"], "total_timesteps must be an integer, got '1000000.0' (write 1_000_000, not 1e6)"),
    (["algo=pppo"], "algo=pppo does not exist; did you mean 'ppo'?"),
    (["env=CartPol-v1"], "env=CartPol-v1 is no environment; did you mean 'CartPole-v1'?"),
    (["env=CartPole"], "env=CartPole does not exist; did you mean 'CartPole-v1'?"),
    (["tuned=best"], "tuned=best does not exist"),
    (["env.id=Pendulum-v1"], "type env=Pendulum-v1, or tuned=off"),
    (["logger=tensorbored"], "logger=tensorbored does not exist"),
    (["logger.wandb.mode=offline"], "the logger wandb is not chosen; add logger=wandb"),
    (["seed=-1"], "seed must be in [0, 2**63), got -1"),
    (["fast"], "'fast' must be KEY=VALUE or a flag"),
    (["-m", "seed=0,1", "algo.gamma=0.9,2"], "job 1 of the sweep (seed=0 algo.gamma=2): algo.gamma must be in [0, 1]"),
    (["-m", "env=CartPole-v1,Acrobot-v1,Nope-v1"], "job 2 of the sweep (env=Nope-v1): env=Nope-v1 is no environment"),
    (["env=Taxi-v4", "logger=none"], "the observation space must be a Box of one dimension"),
    (["hydra.run.dir=blocked/run", "logger=none"], "Not a directory: blocked/run"),
]


@pytest.mark.parametrize(("args", "message"), BAD_INPUT, ids=[" ".join(args) for args, _ in BAD_INPUT])
def test_bad_input_is_one_paragraph_and_nothing_runs(args, message, tmp_path):
    (tmp_path / "blocked").touch()
    done = rlox("train", *args, cwd=tmp_path, check=False)
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert done.stderr.startswith("rlox train: ")
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.rglob("metrics.jsonl"))


@pytest.mark.parametrize("damage", ["absent", "empty", "text", "cut", "flipped", "foreign"])
def test_eval_of_a_bad_checkpoint(damage, trained, tmp_path):
    data = (trained[1] / "checkpoints" / "best.safetensors").read_bytes()
    path = tmp_path / "c.safetensors"
    middle = len(data) // 2
    contents = {
        "empty": b"",
        "text": b"hello",
        "cut": data[:middle],
        "flipped": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
    }
    if damage == "foreign":
        import numpy as np
        from safetensors.numpy import save_file

        save_file({"w": np.zeros(3)}, path)
    elif damage != "absent":
        path.write_bytes(contents[damage])
    done = rlox("eval", str(path), cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert re.fullmatch(r"rlox eval: load_checkpoint: .*\n", done.stderr)
    assert str(path) in done.stderr


def test_a_folder_that_holds_a_run_is_not_touched(trained):
    cwd, run, _ = trained
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    done = rlox("train", f"hydra.run.dir={run}", "hydra.output_subdir=null", "logger=none", cwd=cwd, check=False)
    assert done.returncode == 1
    assert "must be a new folder, but holds a run" in done.stderr
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_diverged_training_says_so_and_leaves_the_record(tmp_path):
    args = ["algo.learning_rate=1e30", "algo.max_grad_norm=null", "logger=none"]
    done = rlox("train", *args, cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert re.search(r"became nan at step \d+; training cannot go on", done.stderr)
    assert done.stderr.count("\n") == 1
    (run,) = run_folders(tmp_path)
    assert rows(run)[-1]["status"] == "failed"


def test_one_diverging_job_does_not_take_the_sweep_along(tmp_path):
    args = ["-m", "algo.learning_rate=1e30,1e-3", "algo.max_grad_norm=null", "logger=none", *SMALL]
    done = rlox("train", *args, cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert "became nan" in done.stderr
    assert [rows(run)[-1]["status"] for run in run_folders(tmp_path)] == ["failed", "finished"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_stops(number, tmp_path):
    process = subprocess.Popen(
        [*RLOX, "train", "total_timesteps=100_000_000", "logger=none", "eval.n_points=0"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not any("loss/policy" in f.read_text() for f in tmp_path.rglob("metrics.jsonl")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert err == ""
    assert "everything up to it is saved" in out
    (run,) = run_folders(tmp_path)
    last = rows(run)[-1]
    assert last["status"] == "interrupted"
    assert load_checkpoint(run / "checkpoints" / "last.safetensors").header["counters"]["env_steps"] == last["step"]


def test_sweep_leaves_complete_runs_in_one_database(tmp_path):
    done = rlox("train", "-m", "algo=ppo", "seed=0,1", *SMALL, cwd=tmp_path)
    assert "2 jobs, all valid" in done.stdout
    runs = run_folders(tmp_path)
    assert [run.name for run in runs] == ["0-ppo-CartPole-v1-s0", "1-ppo-CartPole-v1-s1"]
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/outputs/mlflow.db")
    (experiment,) = client.search_experiments(filter_string="name = 'rlox'")
    mirrored = client.search_runs([experiment.experiment_id])
    assert sorted(item.data.params["seed"] for item in mirrored) == ["0", "1"]
    assert {item.info.status for item in mirrored} == {"FINISHED"}


def test_own_config_folder_and_foreign_environment(tmp_path):
    (tmp_path / "mine" / "env").mkdir(parents=True)
    (tmp_path / "mine" / "env" / "short.yaml").write_text(
        "id: CartPole-v1\nn_envs: 2\nkwargs: {max_episode_steps: 20}\n"
    )
    rlox("train", "-cd", "mine", "env=short", "logger=none", *SMALL, cwd=tmp_path)
    (run,) = run_folders(tmp_path)
    assert max(row["episode/length"] for row in rows(run) if row.get("episode/length")) <= 20


def test_wandb_offline_and_none(tmp_path):
    rlox("train", "logger=wandb", "logger.wandb.mode=offline", *SMALL, cwd=tmp_path)
    assert list(tmp_path.rglob("*.wandb"))
    assert not (tmp_path / "outputs" / "mlflow.db").exists()


def test_sync_after_the_fact(tmp_path):
    rlox("train", "logger=none", *SMALL, cwd=tmp_path)
    (run,) = run_folders(tmp_path)
    assert "no tracker configured" in rlox("sync", cwd=tmp_path).stdout
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["logger"]["mlflow"] = {
        "tracking_uri": f"sqlite:///{tmp_path}/late.db",
        "experiment": "late",
        "run_name": None,
    }
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert "mlflow complete" in rlox("sync", str(run), cwd=tmp_path).stdout
    done = rlox("sync", "nowhere", cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert "must be a run folder" in done.stderr
    done = rlox("ui", "--store", "absent.db", cwd=tmp_path, check=False)
    assert "no MLflow database absent.db" in done.stderr
