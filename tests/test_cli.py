"""The command line as a user meets it: subprocesses, real files, real MLflow, exit codes and messages."""

from __future__ import annotations

import base64
import csv
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import forked
import gymnasium
import pytest
import typer
import yaml

from rlox.checkpoint import load_checkpoint
from rlox.config.base import masked
from rlox.config.run import to_plain
from rlox.envs.gym_make import register_atari
from rlox_cli.config.compose import compose_jobs
from rlox_cli.config.overrides import split_args, without_password
from rlox_cli.config.schema import with_env
from rlox_cli.main import app
from rlox_cli.terminal.errors import UsageError

SMALL = ["total_timesteps=1500", "eval.n_episodes=3", "eval.n_points=3"]


def rlox(*args, cwd, check=True, **env):
    done = forked.run(*args, cwd=cwd, env={**os.environ, **env})
    if check:
        assert done.returncode == 0, done.stderr
    return done


def rows(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def run_folders(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.rglob("metrics.jsonl"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """One run with the default logger, shared by the tests that only read it."""
    cwd = tmp_path_factory.mktemp("trained")
    done = rlox("train", "algo=ppo", "env=CartPole-v1", *SMALL, cwd=cwd)
    (run,) = run_folders(cwd / "outputs")
    return cwd, run, done


@pytest.mark.slow
def test_train_writes_a_complete_run_and_prints_its_folder(trained):
    cwd, run, done = trained
    for name in ("config.yaml", "metrics.jsonl", "checkpoints/last.safetensors", "checkpoints/best.safetensors"):
        assert (run / name).is_file()
        assert str((run / name).parent.relative_to(cwd)) in done.stdout
        assert Path(name).name in done.stdout
    assert "tuned settings: ppo/CartPole-v1" in done.stdout
    assert "backend: native (perceptrons on the CPU" in done.stdout
    assert "rlox eval outputs/" in done.stdout
    assert "rlox ui" in done.stdout
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["algo"]["name"] == "ppo"
    assert config["algo"]["n_steps"] == 32
    assert config["backend"] == "native"
    assert config["total_timesteps"] == 1500
    assert config["logger"]["mlflow"]["tracking_uri"] == f"sqlite:///{cwd}/outputs/mlflow.db"
    record = rows(run)
    assert record[0]["event"] == "start"
    assert record[-1]["event"] == "end"
    assert record[-1]["status"] == "finished"
    steps = [row["step"] for row in record if "loss/policy" in row]
    assert steps == list(range(256, 1537, 256))
    assert sum("eval/mean_return" in row for row in record) == 3


@pytest.mark.slow
def test_the_chosen_backend_is_recorded_and_an_unknown_one_is_an_error(tmp_path):
    small = ("total_timesteps=128", "algo.n_steps=8", "eval.n_episodes=1", "logger=none", "tuned=off")
    done = rlox("train", "algo=ppo", "env=CartPole-v1", "backend=torch", *small, "hydra.run.dir=by_torch", cwd=tmp_path)
    assert "backend: torch (as requested; a kernel collects)" in done.stdout
    assert yaml.safe_load((tmp_path / "by_torch/config.yaml").read_text())["backend"] == "torch"
    assert load_checkpoint(tmp_path / "by_torch/checkpoints/last.safetensors").header["backend"] == "torch"
    done = rlox("train", "algo=ppo", "env=CartPole-v1", "backend=numpy", *small, cwd=tmp_path, check=False)
    assert done.returncode != 0
    assert "backend must be one of auto, native, torch, got 'numpy'" in done.stderr


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.exhaustive
def test_every_listed_environment_of_gymnasium_can_be_made(tmp_path):
    listed = rlox("ls", "envs", cwd=tmp_path).stdout.partition("\ngymnasium's")[2].partition("PettingZoo's")[0]
    names = [name for line in listed.splitlines()[1:] for name in line.partition(": ")[2].split(", ")]
    assert len(names) > 100
    register_atari()
    for name in names:
        gymnasium.make(name).close()


@pytest.mark.parametrize(
    ("word", "hint"), [("--trial=9", "did you mean '--trials'?"), ("--seach", "did you mean '--search'?")]
)
def test_a_wrong_flag_of_tune_names_those_of_tune(word, hint, command):
    code, _, err = command("tune", "env=CartPole-v1", word)
    assert (code, err) == (2, f"rlox tune: {word.partition('=')[0]} is no flag; {hint}\n")


@pytest.mark.slow
def test_lists_and_explanations(trained):
    cwd, run, _ = trained
    assert re.search(r"^ppo +Proximal", rlox("ls", "algos", cwd=cwd).stdout, re.MULTILINE)
    envs = rlox("ls", "envs", cwd=cwd).stdout
    assert "CartPole-v1" in envs
    assert "Acrobot-v1" in envs
    for some in ("GridPursuit-v0", "ALE/Pong-v5", "pettingzoo:mpe2.simple_spread_v3", "Ant-v5", "LunarLander-v3"):
        assert some in envs
    for old in ("Ant-v3", "GymV21Environment-v0", "phys2d/CartPole-v1", "Pusher-v4", " Pong-v4,"):  # cannot run here
        assert old not in envs
    assert re.search(r"algo=ppo env=Pendulum-v1 +100,000 +-200", rlox("ls", "tuned", cwd=cwd).stdout)
    assert re.search(rf"{run.name} +ppo +CartPole-v1 +0 +1,536 +finished", rlox("ls", "runs", cwd=cwd).stdout)
    experiments = rlox("ls", "experiments", cwd=cwd).stdout
    assert re.search(r"^experiment=ppo-smoke +A quick test", experiments, re.MULTILINE)
    shown = rlox("show", "algo=ppo", "env=CartPole-v1", cwd=cwd).stdout
    assert re.search(r"algo\.clip_eps_schedule +str +constant +linear +constant, or linear", shown)
    everything = rlox("show", cwd=cwd).stdout
    for key in (
        "total_timesteps",
        "env.n_envs",
        "eval.n_episodes",
        "checkpoint.every_s",
        "logger.wandb.mode",
        "max_time",
    ):
        assert key in everything
    for key in (
        "eval.stop_at",
        "init_from",
        "env.wrappers",
        "logger.tensorboard.folder",
        "logger.csv.file",
        "output_dir",
    ):
        assert key in everything


@pytest.mark.slow
def test_help_is_quick_and_complete(tmp_path):
    out = rlox("--help", cwd=tmp_path).stdout
    for verb in ("train", "eval", "ls", "show", "cp", "sync", "ui"):
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


def test_examples_in_help_fit_in_80_columns():
    """Their lines are not wrapped otherwise: a terminal of 80 columns has room for 78 characters of help."""

    def helps(command):
        yield command.name, command.help or ""
        for child in getattr(command, "commands", {}).values():
            yield from helps(child)

    seen = 0
    for name, text in helps(typer.main.get_command(app)):
        for block in text.split("\n\n"):
            if block.startswith("\b"):
                lines = [line.replace("\\[", "[") for line in block.splitlines()]
                assert max(map(len, lines)) <= 78, (name, max(lines, key=len))
                seen += len(lines)
    assert seen > 50


@pytest.mark.slow
def test_hydra_flags(tmp_path):
    job = rlox("train", "--cfg", "job", "env=Pendulum-v1", "seed=4", cwd=tmp_path).stdout
    plain = yaml.safe_load(job)
    assert (plain["seed"], plain["env"]["id"], plain["algo"]["gamma"]) == (4, "Pendulum-v1", 0.9)
    # Flags before overrides; Hydra itself rejects this order.
    part = yaml.safe_load(rlox("train", "--cfg", "job", "-p", "env", "tuned=off", cwd=tmp_path).stdout)
    assert part["n_envs"] == 8
    assert "Defaults Tree" in rlox("train", "--info", "defaults-tree", cwd=tmp_path).stdout
    assert not (tmp_path / "outputs").exists()


@pytest.mark.slow
def test_completion_of_overrides(tmp_path):
    def complete(word):
        env = {"_RLOX_COMPLETE": "complete_bash", "COMP_WORDS": f"rlox train {word}", "COMP_CWORD": "2"}
        return forked.run(cwd=tmp_path, env={**os.environ, **env}).stdout.split()

    assert "algo=ppo" in complete("algo=")
    assert complete("experiment=ppo") == ["experiment=ppo-smoke"]
    assert "algo.clip_eps=" in complete("algo.clip")
    assert complete("env=Cart") == ["env=CartPole-v1"]
    (tmp_path / "outputs/day/run").mkdir(parents=True)
    (tmp_path / "outputs/day/run/metrics.jsonl").touch()
    assert complete("output") == ["output_dir="]
    assert complete("resume=out") == ["resume=outputs/day/run"]


BAD_INPUT = [
    (["algo.clip_epz=1"], "algo.clip_epz is no key of PPOConfig; did you mean 'clip_eps'?"),
    (["gamma=0.9"], "gamma is no key of RunConfig; did you mean algo.gamma?"),
    (["algo.gamma=high"], "algo.gamma must be a number, got 'high'"),
    (["algo.gamma=1.5"], "algo.gamma must be in [0, 1], got 1.5"),
    (["algo.gamma=1.5", "--cfg", "job"], "algo.gamma must be in [0, 1], got 1.5"),
    (["total_timesteps=1.5e0"], "total_timesteps must be an integer, got '1.5'"),
    (["algo=pppo"], "algo=pppo does not exist; did you mean 'ppo'?"),
    (["algo=trpo"], "algo=trpo does not exist; the nearest is algo=ppo, and `rlox ls algos` lists all"),
    (["algo=RecurrentPPO"], "algo=RecurrentPPO does not exist; the nearest is algo=ppo algo.memory=lstm, and"),
    (["env=CartPol-v1"], "env=CartPol-v1 is no environment; did you mean 'CartPole-v1'?"),
    (["env=CartPole"], "env=CartPole does not exist; did you mean 'CartPole-v1'?"),
    (["tuned=best"], "tuned=best does not exist"),
    (["env.id=Pendulum-v1"], "type env=Pendulum-v1, or tuned=off"),
    (["logger=tensorbored"], "logger=tensorbored does not exist; did you mean 'tensorboard'?"),
    (["logger=[mlflow,cvs]"], "logger=cvs does not exist; did you mean 'csv'?"),
    (["logger=csv", "logger.csv.file=../m.csv"], "logger.csv.file must be a relative path to a .csv, without .., got"),
    (["experiment=smoke"], "experiment=smoke does not exist; did you mean 'ppo-smoke'?"),
    (["max_time=30"], "max_time must be a time above 0 such as 90s, 30m, 2h or 1h30m, or null, got '30'"),
    (["max_time=1h30", "--cfg", "job"], "max_time must be a time above 0"),
    (["eval.stop_at=high"], "eval.stop_at must be a number, got 'high'"),
    (["eval.patience=0"], "eval.patience must be >= 1 or null, got 0"),
    (["eval.n_points=0", "eval.stop_at=9"], "eval.n_points must be >= 1 if stop_at or patience is set"),
    (["eval.workers=1", "eval.stop_at=9"], "eval.workers must be 0 or -1 if stop_at or patience is set, got 1"),
    (["init_from=absent.safetensors"], "init_from=absent.safetensors must be a checkpoint that loads: "),
    (["init_from=blocked"], "init_from=blocked must be a checkpoint that loads: "),
    (["init_from=."], "init_from=. must be a run folder with checkpoints/best.safetensors, or name a checkpoint"),
    (["-cd", "absent"], "--config-dir must be a folder of YAML, got absent"),
    (["seed=1", "-cd"], "-cd must be followed by its value, got nothing; type -cd VALUE, or leave it out"),
    (["-cn", "-m", "seed=0,1"], "-cn must be followed by its value, got -m; type -cn VALUE, or leave it out"),
    (["--config-dir=", "seed=1"], "--config-dir must be followed by its value, got nothing; type --config-dir VALUE"),
    (["--import"], "--import must be followed by a module's name, got nothing"),
    (["--import", "absent_package"], "--import absent_package: there is no such module in "),
    (["--import", "./mine.py"], "--import must be a module's dotted name, got './mine.py'; try --import mine"),
    (["--import", "bare"], "/bare is a folder without __init__.py"),
    (["imports=[absent_package]"], "--import absent_package: there is no such module in "),
    (["env=absent_package:Mine-v0"], "env=absent_package:Mine-v0 imports absent_package: there is no such module in "),
    (["logger.wandb.mode=offline"], "the logger wandb is not chosen; add logger=wandb"),
    (["logger.csv={a: 1}"], "logger.csv={a: 1}: the logger csv is not chosen; add logger=csv"),
    (["env=Acrobot-v1", "tuned=off", "reference.mean_return=-100"], "type +reference.mean_return=… to add it"),
    (["algo=sft", "model=rlox.llm.toy:make_model", "dataset=none.jsonl"], "must be an existing file of rows (.jsonl, "),
    (["seed=-1"], "seed must be in [0, 2**63 - 10_000), got -1"),
    (["fast"], "'fast' must be KEY=VALUE or a flag"),
    (["-m", "seed=0,1", "algo.gamma=0.9,2"], "job 1 of the sweep (seed=0 algo.gamma=2): algo.gamma must be in [0, 1]"),
    (["env=my_envs:Mine"], "a class needs an id: add gymnasium.register('Mine-v0', Mine) to my_envs"),
    (["env=my_envs.Mine"], "then my_envs:Mine-v0 is its id, or Mine-v0 with --import my_envs"),
    (["-m", "env=CartPole-v1,Acrobot-v1,Nope-v1"], "job 2 of the sweep (env=Nope-v1): env=Nope-v1 is no environment"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("args", "message"), BAD_INPUT, ids=[" ".join(args) for args, _ in BAD_INPUT])
def test_bad_input_is_one_paragraph_and_nothing_runs(args, message, tmp_path, monkeypatch, capsys):
    """Runs in this process: starting Python for each case would take a minute."""
    (tmp_path / "blocked").touch()
    (tmp_path / "bare").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    code = app(["train", *args], prog_name="rlox", standalone_mode=False)
    captured = capsys.readouterr()
    assert message in captured.err
    assert code == 2
    assert captured.err.startswith("rlox train: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert not (tmp_path / "outputs").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["env.kwargs.nonsense=1"], "does not take kwargs {'nonsense': 1}"),
        (["hydra.run.dir=blocked/run"], "hydra.run.dir must be in a folder, got blocked/run: "),
        (["algo.gamma=1.5"], "algo.gamma must be in [0, 1], got 1.5"),
    ],
)
def test_a_run_that_cannot_start_prints_one_paragraph_and_an_exit_code(args, message, tmp_path):
    (tmp_path / "blocked").touch()
    done = rlox("train", *args, "logger=none", cwd=tmp_path, check=False)
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert done.stderr.startswith("rlox train: ")
    assert "Traceback" not in done.stderr
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
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(r"rlox eval: (?!load_checkpoint).*\n", done.stderr)
    assert str(path) in done.stderr


def test_a_folder_that_holds_a_run_is_not_touched(trained):
    cwd, run, _ = trained
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    done = rlox("train", f"hydra.run.dir={run}", "hydra.output_subdir=null", "logger=none", cwd=cwd, check=False)
    assert done.returncode == 2
    assert "must be a new folder, but contains a run" in done.stderr
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_diverged_training_prints_an_error_and_keeps_the_record(tmp_path):
    args = ["algo.learning_rate=1e30", "algo.max_grad_norm=null", "logger=none"]
    done = rlox("train", *args, cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert re.search(r"became nan at step \d+; training cannot continue", done.stderr)
    assert done.stderr.count("\n") == 1
    (run,) = run_folders(tmp_path)
    assert rows(run)[-1]["status"] == "failed"


@pytest.mark.slow
def test_one_diverging_job_does_not_stop_the_sweep(tmp_path):
    args = ["-m", "algo.learning_rate=1e30,1e-3", "algo.max_grad_norm=null", "logger=none", *SMALL]
    done = rlox("train", *args, cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert "became nan" in done.stderr
    assert [rows(run)[-1]["status"] for run in run_folders(tmp_path)] == ["failed", "finished"]


def training(cwd: Path, *args: str) -> forked.Rlox:
    """A long training in its own process, after its first update; its output is in out.txt and err.txt."""
    with open(cwd / "out.txt", "w") as out, open(cwd / "err.txt", "w") as err:
        words = [*args, "total_timesteps=100_000_000", "logger=none", "eval.n_points=0"]
        process = forked.Rlox("train", *words, cwd=cwd, stdout=out, stderr=err)
    deadline = time.monotonic() + 60
    while not any("loss/policy" in f.read_text() for f in cwd.rglob("metrics.jsonl")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return process


@pytest.mark.slow
@pytest.mark.parametrize("fate", ["moved", "deleted"])
def test_a_training_ends_when_its_folder_is_moved_or_deleted(fate, tmp_path):
    process = training(tmp_path, "checkpoint.every_s=1")
    (run,) = run_folders(tmp_path)
    while not (run / "checkpoints" / "last.safetensors").exists():
        assert process.poll() is None
        time.sleep(0.1)
    if fate == "moved":
        run.rename(tmp_path / "moved")
    else:
        shutil.rmtree(run)
    assert process.wait(60) == 1
    err = (tmp_path / "err.txt").read_text()
    assert "folder must stay where it is during the training, but was moved or deleted" in err
    assert f"{run.relative_to(tmp_path)}" in err
    assert "What was saved before that is in it\n" in err
    assert not run.exists()
    if fate == "moved":
        rlox("train", "resume=moved", "max_time=1s", cwd=tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_stops(number, tmp_path):
    process = training(tmp_path)
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    out, err = ((tmp_path / name).read_text() for name in ("out.txt", "err.txt"))
    assert err == ""
    assert "everything up to it is saved" in out
    (run,) = run_folders(tmp_path)
    last = rows(run)[-1]
    assert last["status"] == "interrupted"
    assert load_checkpoint(run / "checkpoints" / "last.safetensors").header["counters"]["env_steps"] == last["step"]


@pytest.mark.slow
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


MINE = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

class Mine(CartPoleEnv):
    pass

gymnasium.register("Mine-v0", Mine, max_episode_steps=25)
print("imported", __name__)
"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """One run on an environment of a module in the working directory."""
    cwd = tmp_path_factory.mktemp("imported")
    (cwd / "my_envs.py").write_text(MINE)
    done = rlox("train", "--import", "my_envs", "env=Mine-v0", "logger=none", *SMALL, cwd=cwd)
    (run,) = run_folders(cwd)
    return cwd, run, done


@pytest.mark.slow
def test_import_registers_an_environment_and_is_recorded(imported):
    cwd, run, done = imported
    assert done.stdout.count("imported my_envs") == 1
    assert f"rlox eval {run.relative_to(cwd)} --import my_envs\n" in done.stdout
    assert yaml.safe_load((run / "config.yaml").read_text())["imports"] == ["my_envs"]
    assert max(row["episode/length"] for row in rows(run) if row.get("episode/length")) <= 25
    assert "Mine-v0" in rlox("ls", "envs", "--import", "my_envs", cwd=cwd).stdout
    assert "Mine-v0" not in rlox("ls", "envs", cwd=cwd).stdout
    assert "imported my_envs" in rlox("show", "eval", "--import=my_envs", cwd=cwd).stdout
    both = rlox("train", "--import", "my_envs", "imports=[os]", cwd=cwd, check=False)
    assert "--import must not be combined with imports=" in both.stderr


def test_eval_imports_a_checkpoints_module_only_with_import(imported):
    cwd, run, _ = imported
    refused = rlox("eval", str(run), cwd=cwd, check=False)
    assert refused.returncode == 2
    assert refused.stderr.endswith("which is not loaded unless you name it; if you trust it, add --import my_envs\n")
    assert "imported" not in refused.stdout
    assert "reproduced exactly" in rlox("eval", str(run), "--import", "my_envs", cwd=cwd).stdout


def test_an_error_in_an_imported_module_shows_its_location(tmp_path):
    (tmp_path / "broken.py").write_text("import absent_dependency\n")
    done = rlox("ls", "algos", "--import", "broken", cwd=tmp_path, check=False)
    output, place, source, _ = done.stderr.splitlines()
    assert output == "rlox ls: --import broken: it needs the module absent_dependency, which is not installed"
    assert place == f'  File "{tmp_path / "broken.py"}", line 1, in <module>'
    assert source == "    import absent_dependency"
    (tmp_path / "broken.py").write_text("1 / 0\n")
    done = rlox("show", "--import", "broken", cwd=tmp_path, check=False)
    output, place, source, _ = done.stderr.splitlines()
    assert output == "rlox show: --import broken: its code failed with ZeroDivisionError: division by zero"
    assert (place.rpartition(", ")[0], source) == (f'  File "{tmp_path / "broken.py"}", line 1', "    1 / 0")


@pytest.mark.slow
def test_environment_named_with_its_module(tmp_path):
    (tmp_path / "my_envs.py").write_text(MINE)
    rlox("train", "env=my_envs:Mine-v0", "logger=none", *SMALL, cwd=tmp_path)
    (run,) = run_folders(tmp_path)
    refused = rlox("eval", str(run), cwd=tmp_path, check=False)
    assert "add --import my_envs" in refused.stderr
    assert "imported" not in refused.stdout
    assert "reproduced exactly" in rlox("eval", str(run), "--import", "my_envs", cwd=tmp_path).stdout


@pytest.mark.slow
def test_wrappers_reach_the_environment(tmp_path):
    wrappers = "env.wrappers=[{TimeLimit: {max_episode_steps: 12}}]"
    rlox("train", wrappers, "logger=none", *SMALL, cwd=tmp_path)
    (run,) = run_folders(tmp_path)
    assert max(row["episode/length"] for row in rows(run) if row.get("episode/length")) <= 12
    assert "reproduced exactly" in rlox("eval", str(run), cwd=tmp_path).stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["eval.stop_at=5"], "the evaluation's mean return .* reached stop_at=5"),
        (["eval.patience=1", "algo.learning_rate=1e-30"], "1 evaluations in a row were no better than .*"),
        (["max_time=1s", "eval.n_points=0"], "max_time=1s was reached"),
    ],
    ids=["stop_at", "patience", "max_time"],
)
def test_a_run_that_stops_early_is_finished_with_a_reason(args, reason, tmp_path):
    size = ["total_timesteps=1_000_000_000", "eval.n_episodes=3", "eval.n_points=500_000", "logger=none"]
    done = rlox("train", *size, *args, cwd=tmp_path)
    assert re.search(f"^stopped early: {reason}$", done.stdout, re.MULTILINE)
    (run,) = run_folders(tmp_path)
    record = rows(run)
    assert record[-1]["status"] == "finished"
    assert re.fullmatch(f"stopped early: {reason}", record[-1]["message"])
    # The run was saved and evaluated at the step where it stopped.
    end = record[-1]["step"]
    assert [row["step"] for row in record if "eval/mean_return" in row][-1] == end
    assert load_checkpoint(run / "checkpoints" / "last.safetensors").header["counters"]["env_steps"] == end


@pytest.mark.slow
def test_init_from_starts_where_another_run_ended(trained, tmp_path):
    _, run, _ = trained
    best = run / "checkpoints" / "best.safetensors"
    frozen = ["algo.learning_rate=1e-30", "algo.learning_rate_schedule=constant", "logger=none", "eval.n_points=1"]
    rlox("train", f"init_from={os.path.relpath(run, tmp_path)}", *frozen, *SMALL[:2], cwd=tmp_path)
    (child,) = run_folders(tmp_path)
    recorded = load_checkpoint(best).header["evaluation"]
    (evaluation,) = [row for row in rows(child) if "eval/mean_return" in row]
    assert evaluation["eval/mean_return"] == recorded["mean_return"]
    assert yaml.safe_load((child / "config.yaml").read_text())["init_from"] == str(best)
    assert rows(child)[-1]["step"] == 1536
    unfit = rlox("train", f"init_from={best}", "env=Pendulum-v1", "logger=none", cwd=tmp_path, check=False)
    assert unfit.returncode == 2
    assert "does not fit the checkpoint" in unfit.stderr
    assert len(run_folders(tmp_path)) == 1


@pytest.mark.slow
def test_experiment_csv_and_tensorboard_together(tmp_path):
    done = rlox("train", "experiment=ppo-smoke", "logger=[csv,tensorboard]", *SMALL, cwd=tmp_path)
    (run,) = run_folders(tmp_path)
    with open(run / "metrics.csv", newline="") as file:
        table = list(csv.DictReader(file))
    losses = [(row["step"], row["loss/value"]) for row in rows(run) if "loss/value" in row]
    assert [(int(row["step"]), float(row["loss/value"])) for row in table if row["loss/value"]] == losses
    assert len(list((run / "tensorboard").glob("events.out.tfevents.*"))) == 1
    assert str((run / "metrics.csv").relative_to(tmp_path)) in done.stdout
    assert "tensorboard --logdir outputs\n" in done.stdout
    assert not (tmp_path / "outputs" / "mlflow.db").exists()
    assert re.search(
        r"time +collect \d+%, update \d+%, evaluate \d+%, log \d+%, checkpoint \d+%, other \d+%", done.stdout
    )


@pytest.mark.slow
def test_advice_is_printed_once_and_only_for_bad_runs(trained, tmp_path):
    assert "advice:" not in trained[2].stdout
    sick = ["algo.learning_rate=0.1", "algo.learning_rate_schedule=constant", "total_timesteps=10_000"]
    done = rlox("train", *sick, "logger=none", "eval.n_points=0", "eval.n_episodes=1", cwd=tmp_path)
    advice = re.findall(r"^advice: (.*)$", done.stdout, re.MULTILINE)
    assert any("lower learning_rate" in line for line in advice)
    assert len(advice) == len(set(advice))


@pytest.mark.slow
def test_an_experiment_of_seeds_is_swept(tmp_path):
    done = rlox("train", "-m", "experiment=cartpole-seeds", "seed=3,4", "logger=none", *SMALL, cwd=tmp_path)
    assert "2 jobs, all valid" in done.stdout
    assert [run.name for run in run_folders(tmp_path)] == ["0-ppo-CartPole-v1-s3", "1-ppo-CartPole-v1-s4"]
    done = rlox("train", "-m", "experiment=cartpole-seeds", "algo.gamma=7", cwd=tmp_path, check=False)
    assert "job 0 of the sweep (seed=0 experiment=cartpole-seeds algo.gamma=7): algo.gamma must be" in done.stderr


@pytest.mark.parametrize(
    ("name", "several"),
    [
        *(("hydra/sweeper/optuna", True), ("experiment/cartpole-seeds", True), ("experiment/ppo-smoke", False)),
        *(("tuned/ppo/CartPole-v1", False), ("buffer/sequence", False), ("buffer/mmap", False), ("conf", False)),
    ],
)
def test_cp_prints_a_command_that_works(name, several, command):
    code, printed, _ = command("cp", name, "my conf")
    assert not code
    (line,) = re.findall(r"use it with +rlox train (.*)", printed)
    assert (len(compose_jobs(*split_args(shlex.split(line)))) > 1) == several


@pytest.mark.parametrize("name", ["algo/bc", "tuned/iql/Pendulum-v1"])
def test_cp_names_the_dataset_that_an_algorithm_needs(name, command):
    code, printed, _ = command("cp", name)
    assert not code
    (line,) = re.findall(r"use it with +rlox train (.*)", printed)
    assert line.endswith(" dataset=data/medium.arrow")
    assert not command("collect", "--env", "Pendulum-v1", "--steps", "9", "--out", "data/medium.arrow")[0]
    flags, overrides = split_args(shlex.split(line))
    (job,) = compose_jobs(flags, with_env(overrides))
    assert (job.algo, job.config.env.id) == (name.split("/")[1], "Pendulum-v1")


@pytest.mark.parametrize("algo", ["sft", "grpo"])
def test_cp_names_what_a_language_model_needs(algo, command):
    code, printed, _ = command("cp", f"algo/{algo}")
    assert not code
    assert f"rlox train -cd conf algo={algo} model=FOLDER dataset=data/rows.jsonl" in printed
    assert ("reward=my_package:score --import my_package" in printed) == (algo == "grpo")


@pytest.mark.slow
def test_cp_copies_settings_to_a_folder_that_takes_precedence(tmp_path):
    done = rlox("cp", "tuned/ppo/CartPole-v1", "mine", cwd=tmp_path)
    assert "rlox train -cd mine algo=ppo env=CartPole-v1" in done.stdout
    copy = tmp_path / "mine" / "tuned" / "ppo" / "CartPole-v1.yaml"
    copy.write_text(copy.read_text().replace("total_timesteps: 100_000", "total_timesteps: 512"))
    rlox("train", "-cd", "mine", "eval.n_points=0", "eval.n_episodes=1", "logger=none", cwd=tmp_path)
    (run,) = run_folders(tmp_path)
    assert rows(run)[-1]["step"] == 512
    again = rlox("cp", "tuned/ppo/CartPole-v1", "mine", cwd=tmp_path, check=False)
    assert again.returncode == 2
    assert "must not exist yet; add --force to overwrite" in again.stderr
    rlox("cp", "tuned/ppo/CartPole-v1", "mine", "--force", cwd=tmp_path)
    assert "total_timesteps: 100_000" in copy.read_text()
    unknown = rlox("cp", "algo/ppu", cwd=tmp_path, check=False)
    assert "got 'algo/ppu'; did you mean 'algo/ppo'?" in unknown.stderr
    assert "rlox train -cd all" in rlox("cp", "conf", "all", cwd=tmp_path).stdout
    assert (tmp_path / "all" / "config.yaml").is_file()
    assert (tmp_path / "all" / "env" / "CartPole-v1.yaml").is_file()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("imageio_ffmpeg") is None, reason='pip install "rlox-cli[video]"')
def test_eval_records_and_renders_an_episode(trained, tmp_path):
    import imageio.v2 as imageio

    _, run, _ = trained
    done = rlox("eval", str(run), "--video", "film.mp4", "--render", cwd=tmp_path, SDL_VIDEODRIVER="dummy")
    filmed, shown = re.findall(r"an episode (recorded in film.mp4|shown): return [\d.]+, (\d+) steps", done.stderr)
    assert filmed[1] == shown[1]
    with imageio.get_reader(tmp_path / "film.mp4") as film:
        assert film.count_frames() == int(filmed[1]) + 1
    assert "reproduced exactly" in done.stdout  # the filmed episode does not count for the score
    bad = rlox("eval", str(run), "--video", "film.avi", cwd=tmp_path, check=False)
    assert "path must end in .mp4 or .gif, got 'film.avi'" in bad.stderr
    assert bad.stdout == ""


@pytest.mark.slow
def test_wandb_offline_and_none(tmp_path):
    rlox("train", "logger=wandb", "logger.wandb.mode=offline", *SMALL, cwd=tmp_path)
    assert list(tmp_path.rglob("*.wandb"))
    assert not (tmp_path / "outputs" / "mlflow.db").exists()


class Refusing(BaseHTTPRequestHandler):
    """A server that notes who asks, and refuses everything."""

    def do_GET(self):
        self.server.asked.append(self.headers.get("Authorization"))
        self.send_error(403)

    do_POST = do_GET

    def log_message(self, *_):
        pass


@pytest.mark.slow
@pytest.mark.skipif(find_spec("mlflow") is None, reason="needs mlflow")
def test_the_password_of_a_tracker_is_used_and_not_stored(tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    server.asked = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_TRACKING_URI": ""}
    address = "http://me:{}@127.0.0.1:" + str(server.server_port)
    uri = f"logger.mlflow.tracking_uri={address.format('s3cret')}"
    done = rlox("train", "logger=mlflow", uri, *SMALL, "output_dir=run", cwd=tmp_path, **env)
    (tmp_path / "own/experiment").mkdir(parents=True)
    text = f"# @package _global_\nlogger:\n  mlflow:\n    tracking_uri: {address.format('s3cret')}\n"
    (tmp_path / "own/experiment/mine.yaml").write_text(text)
    words = ["-cd", "own", "experiment=mine", "logger=mlflow"]
    swept = rlox("train", "-m", *words, *SMALL, "output_dir=sweep", cwd=tmp_path, **env)
    again = "resume=run", "total_timesteps=4096"
    refused = rlox("train", *again, cwd=tmp_path, check=False, **env)
    assert refused.returncode == 2
    assert f"tracking_uri must be given again, since passwords are not stored, got {address.format('***')}; type" in (
        refused.stderr
    )
    assert rlox("train", *again[:1], "logger=none", "total_timesteps=2048", cwd=tmp_path, **env).returncode == 0
    resumed = rlox("train", *again, "logger=mlflow", uri, cwd=tmp_path, **env)
    synced = rlox("sync", "run", cwd=tmp_path, check=False, **{**env, "MLFLOW_TRACKING_URI": uri.partition("=")[2]})
    assert synced.returncode == 1
    assert set(server.asked) == {f"Basic {base64.b64encode(b'me:s3cret').decode()}"}
    server.shutdown()
    server.server_close()
    filed = rlox("train", *words, *SMALL, "output_dir=filed", cwd=tmp_path, **env)
    assert "Connection refused" in (tmp_path / "filed/mirrors/mlflow.log").read_text()
    for command in (done, swept, refused, resumed, synced, filed):
        assert "s3cret" not in command.stdout + command.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file() and "own" not in path.parts]
    assert not [path for path in files if b"s3cret" in path.read_bytes()]
    assert address.format("***") in (tmp_path / "run/config.yaml").read_text()


@pytest.mark.parametrize(
    ("address", "hidden"),
    [
        ("http://me:pw@h:5000", "http://me:***@h:5000"),
        ("http://me:p@ss@h", "http://me:***@h"),
        ("http://me@example.org:pw@h/x@y", "http://me@example.org:***@h/x@y"),
        ("https://T0KEN@h:5000/x@y", "https://***@h:5000/x@y"),
        ("https://T0KEN:@h", "https://***@h"),
        ("http://me:a/b#c@h", "http://me:***@h"),
        ("http://h:5000/x@y", "http://h:5000/x@y"),
        ("http://[::1]:5000/x@y", "http://[::1]:5000/x@y"),
        ("sqlite:///me@h/x.db", "sqlite:///me@h/x.db"),
        ("http://h:80 refuses me@example.org", "http://h:80 refuses me@example.org"),
        ("['http://a:b@h', 'https://c@h']", "['http://a:***@h', 'https://***@h']"),
    ],
)
def test_passwords_and_tokens_in_addresses_are_masked(address, hidden):
    assert masked(address) == hidden == masked(hidden)


@pytest.mark.parametrize(
    ("typed", "uri", "hidden"),
    [
        (r"{key}=http://me:pw@h", "http://me:pw@h", "{key}='http://me:***@h'"),
        (r"++{key}='https://pw@h'", "https://pw@h", "++{key}='https://***@h'"),
        (r"""{key}="http://me:a,pw'b@h" """, "http://me:a,pw'b@h", "{key}='http://me:***@h'"),
        (r"""{key}="http://me:pw\"b@h" """, 'http://me:pw"b@h', "{key}='http://me:***@h'"),
        (r"{key}=http://me:a=pw,b@h", "http://me:a=pw,b@h", "{key}='http://me:***@h'"),
        (r"{key}=http://me:${{oc.env:PW}}@h", "http://me:pw@h", "{key}='http://me:***@h'"),
        (
            r"""logger.mlflow={{tracking_uri:"http://me:pw@h",experiment:x}}""",
            "http://me:pw@h",
            """logger.mlflow={{tracking_uri:"http://me:***@h",experiment:x}}""",
        ),
        (r"{key}=sqlite:///a.db,http://me:pw@h", "http://me:pw@h", "{key}=sqlite:///a.db,http://me:***@h"),
        (
            r"""hydra.sweeper.params.{key}="'http://me:pw@h'" """,
            "http://me:pw@h",
            "hydra.sweeper.params.{key}='http://me:***@h'",
        ),
        (r"{key}=http://h:5000/x@y", "", "{key}=http://h:5000/x@y"),
        (
            r"logger.mlflow={{tracking_uri:http://h:5000,experiment:me@x}}",
            "",
            "logger.mlflow={{tracking_uri:http://h:5000,experiment:me@x}}",
        ),
    ],
)
def test_a_password_is_taken_out_of_every_form_in_which_it_is_typed(typed, uri, hidden, monkeypatch):
    monkeypatch.setenv("PW", "pw")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    key = "logger.mlflow.tracking_uri"
    assert split_args([typed.strip().format(key=key)]) == ([], [hidden.format(key=key)])
    assert os.environ["MLFLOW_TRACKING_URI"] == uri


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("logger.mlflow.tracking_uri=http://me:s3@h,http://me:cret@h", "must name one server with a password, got 2"),
        (
            "logger.mlflow.tracking_uri=http://me:s3cret@${env.id}",
            "must refer to nothing that is unknown before the run",
        ),
        (r"logger.mlflow={tracking_uri:http\://me\:s3cret@h}", "must have an address without backslashes"),
    ],
)
def test_a_password_that_cannot_be_taken_out_is_refused(typed, message, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    with pytest.raises(UsageError, match=message) as caught:
        without_password(typed)
    assert "cret" not in str(caught.value)


@pytest.mark.slow
def test_no_file_of_a_run_has_a_password_in_whatever_form_it_is_typed(tmp_path):
    (tmp_path / "none").mkdir()
    (tmp_path / "none/mlflow.py").write_text("raise ImportError")  # a tracker that fails at once
    env = {"PYTHONPATH": str(tmp_path / "none"), "MLFLOW_TRACKING_URI": ""}
    small = ["logger=mlflow", "total_timesteps=512", "eval.n_episodes=1", "eval.n_points=1", "tuned=off"]
    comma = 'logger.mlflow.tracking_uri="http://me:s3cret,and\'more@127.0.0.1:9"'
    section = 'logger.mlflow={tracking_uri:"https://s3cret@127.0.0.1:9"}'
    (tmp_path / "own/experiment").mkdir(parents=True)
    text = (
        "# @package _global_\nhydra:\n  sweeper:\n    params:\n      logger.mlflow.tracking_uri: http://me:s3cret@h\n"
    )
    (tmp_path / "own/experiment/mine.yaml").write_text(text)
    for words in (
        ["output_dir=comma", comma],
        ["output_dir=section", section],
        ["-m", "output_dir=sweep", "seed=0,1", section],
        ["-m", "output_dir=params", "-cd", "own", "experiment=mine"],
    ):
        done = rlox("train", *small, *words, cwd=tmp_path, **env)
        assert "s3cret" not in done.stdout + done.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file() and "own" not in path.parts]
    assert {".hydra", "mirrors"} <= {path.parent.name for path in files}
    assert not [path for path in files if b"s3cret" in path.read_bytes()]
    assert "http://me:***@127.0.0.1:9" in (tmp_path / "comma/.hydra/overrides.yaml").read_text()
    assert "https://***@127.0.0.1:9" in (tmp_path / "sweep/sweep.jsonl").read_text()
    again = rlox("train", "resume=section", "total_timesteps=4096", cwd=tmp_path, check=False, **env)
    assert (again.returncode, "tracking_uri must be given again" in again.stderr) == (2, True), again.stderr
    rlox("train", "resume=section", "total_timesteps=4096", section, cwd=tmp_path, **env)
    uri = {"MLFLOW_TRACKING_URI": "https://s3cret@127.0.0.1:9"}
    rlox("train", "resume=section", "total_timesteps=6144", cwd=tmp_path, **{**env, **uri})


def test_files_that_a_run_reads_again_are_stored_by_whole_paths(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    remote = [
        "remote.token_file='~/token'",
        "remote.ca=ca.pem",
        "remote.cert=keys/cert.pem",
        "remote.key=keys/../key.pem",
    ]
    (job,) = compose_jobs([], ["remote.addresses=[127.0.0.1:9]", *remote, "logger=none"])
    plain = to_plain(replace(job.config, sampler_folder="weights"), job.algo)
    names = {"token_file": "home/token", "ca": "ca.pem", "cert": "keys/cert.pem", "key": "key.pem"}
    assert {key: plain["remote"][key] for key in names} == {key: str(tmp_path / name) for key, name in names.items()}
    assert plain["sampler_folder"] == str(tmp_path / "weights")


@pytest.mark.slow
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
    assert done.returncode == 2
    assert "must be a run folder" in done.stderr
    done = rlox("ui", "--store", "absent.db", cwd=tmp_path, check=False)
    assert "no MLflow database absent.db" in done.stderr


@pytest.mark.slow
def test_a_killed_worker_ends_the_run_with_a_checkpoint_and_no_orphans(tmp_path):
    process = training(tmp_path, "env=Acrobot-v1", "env.workers=2")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 2
    os.kill(int(children[0]), signal.SIGKILL)
    assert process.wait(60) == 1
    err = (tmp_path / "err.txt").read_text()
    assert err.startswith("rlox train: ")
    assert err.count("\n") == 1
    assert children[0] in err
    assert "last.safetensors" in err
    (run,) = run_folders(tmp_path)
    header = load_checkpoint(run / "checkpoints" / "last.safetensors").header
    assert header["counters"]["env_steps"] == rows(run)[-1]["step"] > 0
    assert rows(run)[-1]["status"] == "failed"
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline, "a worker outlives the run"
        time.sleep(0.05)
