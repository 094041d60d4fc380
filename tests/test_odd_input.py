"""Errors in typed input name the key, the rule and the remedy; nothing is accepted and then ignored."""

from __future__ import annotations

import json
import os
import pwd
import re
import shlex
import subprocess
import sys
from pathlib import Path

import forked
import numpy as np
import pytest
import yaml

import rlox
from rlox.checkpoint import load_checkpoint
from rlox.config import WandbConfig
from rlox.config.servers import is_reachable
from rlox.tracking.wandb import has_login
from rlox.tracking.writer import explain
from rlox_cli.config.compose import compose_jobs, compose_typed
from rlox_cli.config.schema import run_name

SMALL = ["logger=none", "total_timesteps=64", "algo.n_steps=8", "eval.n_episodes=1", "eval.n_points=1"]


REFUSED = [
    (["+algo.x=1"], "algo.x is no key of PPOConfig; try one of activation"),
    (["++algo.gama=0.9"], "algo.gama is no key of PPOConfig; did you mean 'gamma'?"),
    (["+env.x=1"], "env.x is no key of EnvConfig"),
    (["+eval.n_pts=1"], "eval.n_pts is no key of EvalConfig; did you mean 'n_points'?"),
    (["+logger.x=1"], "logger.x is no key of LoggerConfig"),
    (["algo=dqn", "+buffer.x=1"], "buffer.x is no key of "),
    (["-m", "seed=0,1", "+algo.x=1"], "algo.x is no key of PPOConfig"),
    (["algo.learning_rate=${oops}"], "algo.learning_rate refers to 'oops', which is no key"),
    (["algo.learning_rate=${oops:1}"], "algo.learning_rate refers to 'oops', which is no key"),
    (["algo=[ppo,a2c]"], "algo must be one choice, got [ppo,a2c]; one run for each: -m algo=ppo,a2c"),
    (
        ["env=[CartPole-v1,Acrobot-v1]"],
        "env must be one choice, got [CartPole-v1,Acrobot-v1]; one run for each: -m env=",
    ),
    (["algo={gamma:0.9}"], "algo must be one choice, got {gamma:0.9}; keys are set as algo.KEY=VALUE"),
    (["~algo.gamma"], "~algo.gamma must not delete a key"),
    (["~algo"], "~algo must not delete a key"),
    (["~seed"], "~seed must not delete a key"),
    (["algo.hidden_sizes=abc"], "algo.hidden_sizes must be a list such as [1,2], got a value of type str"),
    (["env.wrappers={a:1}"], "env.wrappers must be a list such as [1,2], got a mapping"),
    (["env.kwargs=3"], "env.kwargs must be a mapping such as {name: 1}, got a value of type int"),
    (["device=[cpu]"], "device must be a text, got a value of type list"),
    (["algo=ppo,a2c"], "algo=ppo,a2c has several values, which need a sweep: rlox train -m"),
    (["seed=0,1"], "seed=0,1 has several values, which need a sweep: rlox train -m"),
    (["algo.gamma=[0.9]"], "algo.gamma must be a number, got '[0.9]'"),
    (["env=../../x"], "env=../../x does not exist"),
    (["env=/etc/passwd"], "env=/etc/passwd does not exist"),
    (["env=" + 5000 * "x"], "env must be a name of at most 200 characters, got one of 5,000: xxxxx"),
    (["algo=" + 5000 * "x"], "algo must be a name of at most 200 characters, got one of 5,000: xxxxx"),
    (["env.id=" + 5000 * "x" + "-v0"], "env=xxxxx"),
    (["env=Ca\0rt-v1"], "must be KEY=VALUE, and a value with other characters than"),
    (["env=ünï-v0"], "must be KEY=VALUE, and a value with other characters than"),
    (["env='ünï-v0'"], "env=ünï-v0 is no environment"),
    (["algo.gamma = 0.9"], "must be KEY=VALUE, and a value with other characters than"),
    (["algo.gamma=${"], "must be KEY=VALUE, and a value with other characters than"),
    (["=3"], "'=3' must be KEY=VALUE, got no key"),
    (["--nope"], "--nope is no flag"),
    (["--multirum"], "--multirum is no flag; did you mean '--multirun'?"),
    (["--resolve"], "--resolve must be used with --cfg job"),
    (["-p", "algo"], "-p must be used with --cfg job"),
    (["--experimental-rerun", "x"], "--experimental-rerun is no flag"),
    (["seed=???"], "seed must have a value, got ???"),
    (["algo.gamma=???"], "algo.gamma must have a value, got ???"),
    (["seed=null"], "seed must have a value, got null"),
    (["compile=maybe"], "compile must be true or false, got 'maybe'"),
    (["env=null"], "env must be a name, got null; leave it out"),
    (["buffer=null"], "buffer must be a name, got null; leave it out"),
    (["tuned=null"], "tuned must be a name, got null; leave it out"),
    (["hydra/launcher=null"], "hydra/launcher must be a name, got null; leave it out"),
    (["-m", "seed=0,1", "logger=null"], "logger must be a name, got null; leave it out"),
    (["algo.gamma=" + 5000 * "9"], "algo.gamma=99999"),
    ([300 * "a" + "=1"], "aaaaa … must be a key of at most 200 characters, got one of 300"),
    (["init_from="], "init_from must be a run folder or a checkpoint file, or null, got ''"),
    (["hydra.job.chdir=true"], "hydra.job.chdir must be false, got True: paths are relative to the folder where rlox"),
    (["output_dir=${oops}"], "output_dir refers to 'oops', which is no key"),
    (["-m", "seed=0,1", "output_dir=${oops}"], "output_dir refers to 'oops', which is no key"),
    (["output_dir=" + 300 * "x"], "output_dir must name a folder of at most 255 bytes, got xxxxx"),
    (["resume=a", "resume=b"], "resume must be given once, got resume=a and resume=b"),
    (["env.kwargs.x=nan"], "env.kwargs must contain no NaN and no infinity"),
    (["env.kwargs.x=[1,{a:-inf}]"], "env.kwargs must contain no NaN and no infinity"),
    (["dataset="], "dataset must name a file, or minari:ID, got ''"),
    (["hydra.run.dir="], "hydra.run.dir must name a folder, got nothing"),
    (["output_dir="], "output_dir must name a folder, got nothing"),
    (["output_dir=a", "hydra.run.dir=b"], "output_dir must not be combined with hydra.run.dir, which it sets"),
    (["total_timesteps=1.5"], "total_timesteps must be an integer, got '1.5'"),
    (["total_timesteps=1.5e0"], "total_timesteps must be an integer, got '1.5'"),
    (["seed=-1e3"], "seed must be an integer, got '-1000.0'"),
    (["algo.hidden_sizes=[1e1,8.5]"], "algo.hidden_sizes[1] must be an integer, got '8.5'"),
    (
        ["algo.hidden_sizes=[100000,100000]"],
        "algo.hidden_sizes must ",
    ),
    (["max_time=99999999999999999999h"], "max_time must be at most 2147483647s, which is 68 years"),
    (["eval.workers=99999"], "eval.workers must be between 0 and 4096, or -1, got 99999"),
    (["env.n_envs=9999", "env.workers=9999"], "env.workers must be at most 4096, got 9999"),
    (["threads=99999"], "threads must be between 0 and 1024, got 99999"),
    (["distributed_timeout_s=1e30"], "distributed_timeout_s must be > 0 and at most 2147483647, got 1e+30"),
    (["remote.addresses=[a:1]", "remote.timeout_s=1e30"], "remote.timeout_s must be > 0 and at most 2147483647"),
    (["remote.addresses=[a:1]", "remote.reconnect_s=1e30"], "remote.reconnect_s must be >= 0 and at most 2147483647"),
    (["seed= 3"], "seed must not begin or end with a blank, got ' 3'"),
    (["seed='3 '"], "seed must not begin or end with a blank, got '3 '"),
    (["algo.gamma=' 0.9'"], "algo.gamma must not begin or end with a blank, got ' 0.9'"),
    (["compile=' true'"], "compile must not begin or end with a blank, got ' true'"),
    (["-m", "seed=0,'1 '"], "seed must not begin or end with a blank, got '1 '"),
    (["-m", "seed=range(0)"], "seed=range(0) must contain a number, got an empty range"),
    (["-m", "seed=range(5,1)"], "seed=range(5,1) must contain a number, got an empty range"),
    (["-m", "seed=range(0,10,0)"], "seed=range(0,10,0) must have a step that is not 0"),
    (["-m", "seed=range(0,3,nan)"], "seed=range(0,3,nan) must have finite numbers as its ends and its step"),
    (["-m", "algo.gamma=range(0,1,1e-300)"], " must give at most 100,000 jobs, got "),
    (["-m", "seed=range(200000)"], "seed=range(200000) must give at most 100,000 jobs, got 200,000"),
    (["-m", "seed=range(0,1e30)"], " must give at most 100,000 jobs, got 1,000,000,000,000,000,000,000,000,000,000"),
    (["-m", "seed=range(999)", "env.n_envs=range(1,999)"], "a sweep must have at most 100,000 jobs, got 997,002"),
    (["-m", "seed=glob(*)"], "seed=glob(*) must match a name, got none"),
    (["-m", "algo=glob(zz*)"], "algo=glob(zz*) must match a name, got none"),
    (["-m", "seed=interval(0,1)"], "seed=interval(0,1) must list its values, as seed=1,2"),
    (["-m", "seed=choice()"], "empty choice is not legal"),
    (["-m", "hydra/sweeper=optuna", "algo.n_steps=range(5,5)"], "algo.n_steps=range(5,5) must contain a number"),
    (["-m", "hydra/sweeper=optuna", "algo.n_steps=range(1,1e30)"], "algo.n_steps must be between "),
    (["-m", "seed=0,1", "--cfg", "job"], "-m and --cfg must not be combined"),
    (["--info", "all", "--cfg", "job"], "--info and --cfg must not be combined"),
    (["env.n_envs=1e12"], "env.n_envs must "),
    (["env.n_envs=1e7"], "env.n_envs must be at most 1,000,000, got 10000000"),
    (["eval.n_episodes=1e7"], "eval.n_episodes must be at most 1,000,000, got 10000000"),
    (["eval.n_points=1e12"], "eval.n_points must be at most 1,000,000, got 1000000000000"),
    (["algo.n_steps=1e18"], "algo.n_steps must "),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "message"), REFUSED, ids=[" ".join(args)[:40].replace("\0", "0") for args, _ in REFUSED]
)
def test_errors_are_one_paragraph_that_names_the_key(args, message, command, tmp_path):
    code, _, err = command("train", "logger=none", *args)
    assert message in err
    assert code == 2
    assert err.startswith("rlox train: ")
    assert err.count("\n") == 1
    assert len(err) < 900
    assert not list(tmp_path.rglob("metrics.jsonl"))


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--check"], ["-m", "seed=0,1"]])
def test_a_configuration_that_could_not_be_read_again_is_refused_at_the_start(more, command, tmp_path):
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    text = f"# @package _global_\nenv:\n  kwargs:\n    values: {list(range(30_000))}\n"
    (tmp_path / "own" / "experiment" / "long.yaml").write_text(text)
    code, _, err = command("train", *SMALL, "-cd", "own", "experiment=long", "output_dir=run", *more)
    assert code == 2
    assert "env.kwargs must be shorter: with it, the run's config.yaml would have " in err
    assert "bytes, but at most 262,144 are read again; put long values in a file, and pass its path" in err
    assert not (tmp_path / "run").exists()


def test_whole_numbers_may_be_written_with_an_exponent():
    words = ["algo=dqn", "total_timesteps=2.5e5", "buffer.size=1e5", "seed=1e3", "algo.hidden_sizes=[1e2,64]"]
    (job,) = compose_jobs([], _split([*words, "env.kwargs.gravity=1e1", "algo.learning_rate=1e-3"]))
    c = job.config
    assert (c.total_timesteps, c.buffer.size, c.seed, c.algo.hidden_sizes) == (250_000, 100_000, 1000, [100, 64])
    assert type(c.env.kwargs["gravity"]) is float
    assert c.algo.learning_rate == 1e-3
    swept = compose_jobs(["-m"], _split(["total_timesteps=1e4,2e4", "seed=range(0,1e1,5)"]))
    assert [job.config.total_timesteps for job in swept] == [10_000, 10_000, 20_000, 20_000]


def _split(words):
    from rlox_cli.config.overrides import split_args

    return split_args(words)[1]


def test_whole_floats_are_whole_numbers_in_the_library(tmp_path):
    algorithm = rlox.PPO("CartPole-v1", 2, 0, n_steps=8.0, hidden_sizes=[8])
    algorithm.train(3.2e1)
    algorithm.save(tmp_path / "a.safetensors")
    assert load_checkpoint(tmp_path / "a.safetensors").header["counters"]["horizon_steps"] == 32
    with pytest.raises(TypeError, match=r"total_timesteps must be an integer, got 1.5"):
        algorithm.train(1.5)
    with pytest.raises(TypeError, match=r"n_steps must be of type int, got 8.5"):
        rlox.PPO("CartPole-v1", n_steps=8.5)


def test_a_rollout_larger_than_memory_is_an_error_that_names_the_argument():
    for n_steps in (10**18, 10**12, 2**31 - 1):
        with pytest.raises(ValueError, match=f"n_steps must .*, got {n_steps}"):
            rlox.PPO("CartPole-v1", n_steps=n_steps).train(100)


@pytest.mark.slow
def test_settings_that_do_not_fit_in_memory_are_errors_that_name_the_key(command, monkeypatch):
    monkeypatch.setattr("rlox_cli.families.limits.memory", lambda: (10**7, 10**8))
    for word, says in (
        ("algo.hidden_sizes=[1000,1000]", "algo.hidden_sizes must fit in memory, got [1000, 1000], whose weights"),
        ("env.n_envs=200_000", "env.n_envs must fit in memory, got 200000, whose states"),
    ):
        code, _, err = command("train", *SMALL, word)
        assert (code, says in err) == (2, True), err


@pytest.mark.slow
def test_a_folder_with_a_run_or_a_sweep_accepts_no_other(command, tmp_path):
    few = [*SMALL, "hydra.sweeper.plot=false"]
    assert not command("train", *few, "output_dir=run")[0]
    assert not command("train", "-m", *few, "seed=0,1", "output_dir=sweep")[0]
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    for folder, says in (
        ("run", "output_dir=run must be a new folder, but contains a run; choose another, or resume it: rlox train"),
        ("sweep", "output_dir=sweep must be a new folder, but contains a sweep; choose another, or resume it: rlox"),
        ("file/x", "must be in a folder, got "),
    ):
        for words in ([], ["-m", "seed=0,1"], ["--check"]):
            code, _, err = command("train", *few, *words, f"output_dir={folder}")
            assert (code, says in err) == (2, True), err
    assert sorted(tmp_path.rglob("*")) == before
    assert not command("train", "resume=run", "total_timesteps=128")[0]


@pytest.mark.slow
def test_other_commands_check_arguments_before_they_start(command, tmp_path, monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    assert not command("train", *SMALL, "output_dir=run")[0]
    (tmp_path / "file").touch()
    (tmp_path / "folder.arrow").mkdir()
    (tmp_path / "folder.gif").mkdir()
    for words, says in (
        (["compare", "run", "run", "--threshold", "nan"], "--threshold must be a finite number, got nan"),
        (["bench", "learn", "--threshold", "inf"], "--threshold must be a finite number, got inf"),
        (["eval", "run", "--pass-at", "nan"], "--pass-at must be a finite number, got nan"),
        (["eval", "run", "--pass-at", "1"], "--pass-at must be left out for ppo, which completes no prompts"),
        (["ui", "--store", "run/metrics.jsonl"], "--store must be a database of MLflow (SQLite), got run/metrics"),
        (["bench", "data", "--peer-python", "/bin/echo"], "--peer-python must be a Python interpreter, got /bin/echo"),
        (
            ["bench", "learn", "--against", "sb3", "--peer-python", "/bin/echo"],
            "--peer-python must be a Python interpreter, got /bin/echo",
        ),
        (["bench", "learn", "--out", "file"], "--out must be a folder, got the file file"),
        (["cp", "algo/ppo", "file"], "DEST must be a folder, got the file file"),
        (["plot", "run", "--out", "folder.arrow"], "--out must end in .png, .pdf, .svg or .html, got folder.arrow"),
        (["eval", "run", "--render"], "--render must have a display, but DISPLAY is not set"),
        (["enjoy", "run", "--import", "json"], "rlox eval run --video episode.mp4 --import json"),
        (
            ["collect", "run", "--steps", "9", "--out", "folder.arrow", "--force"],
            "--out must be a file, but there is",
        ),
        (
            ["collect", "run", "--steps", "10" + 15 * "0", "--out", "a.arrow"],
            "rlox collect: n_steps must fit",
        ),
        (["collect", "run", "--steps", "10000000", "--n-envs", "10000000"], "rlox collect: n_envs must be at most"),
        (["collect", "=run", "--steps", "10"], "CHECKPOINT must have a name before its ="),
    ):
        code, _, err = command(*words)
        assert (code, says in err) == (2, True), err
        assert err.count("\n") <= 2
    assert not list(tmp_path.glob("*a.arrow*"))


@pytest.mark.slow
def test_an_empty_argument_does_not_mean_the_working_folder(tmp_path):
    for words in (["eval", ""], ["sync", ""], ["plot", "a", ""]):
        done = forked.run(*words, cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr == f"rlox: argument {len(words)} must not be empty, got ''\n"


@pytest.mark.slow
def test_a_run_whose_config_names_another_environment_cannot_be_resumed(command, tmp_path):
    assert not command("train", *SMALL, "output_dir=run")[0]
    config = tmp_path / "run/config.yaml"
    config.write_text(config.read_text().replace("id: CartPole-v1", "id: Acrobot-v1"))
    code, _, err = command("train", "resume=run", "total_timesteps=128")
    assert code == 2
    assert "run/checkpoints/last.safetensors must be of Acrobot-v1, as the run's config.yaml says, got CartPole" in err


@pytest.mark.slow
def test_a_run_whose_config_was_edited_cannot_be_resumed(command, tmp_path):
    assert not command("train", *SMALL, "seed=3", "env.n_envs=4", "output_dir=run")[0]
    config = tmp_path / "run/config.yaml"
    text = config.read_text()
    for was, now, key in (
        ("seed: 3", "seed: 4", "seed=4"),
        ("n_envs: 4", "n_envs: 2", "env.n_envs=2"),
        ("gamma: 0.98", "gamma: 0.9", None),
        ("activation: tanh", "activation: relu", "algo.activation=relu"),
    ):
        assert text.count(was) == 1, was
        config.write_text(text.replace(was, now))
        code, _, err = command("train", "resume=run", "total_timesteps=128")
        if key is None:  # may change in a resume
            assert not code, err
            continue
        assert code == 2
        assert f"checkpoints/last.safetensors must have {key}, as the run's config.yaml says, got " in err


@pytest.mark.slow
def test_output_dir_is_the_folder_of_a_run_or_a_sweep(command, tmp_path, monkeypatch):
    assert not command("train", *SMALL, "output_dir=runs/first")[0]
    assert (tmp_path / "runs/first/checkpoints/last.safetensors").is_file()
    assert not command("train", *SMALL, "output_dir=runs/both", "-m", "seed=0,1")[0]
    assert len(list((tmp_path / "runs/both").glob("*/metrics.jsonl"))) == 2
    for odd in ("a b,[c]", "it's"):
        code, out, _ = command("train", *SMALL, f"output_dir={odd}")
        assert not code
        assert f"rlox eval {shlex.quote(odd)}\n" in out
        assert f"rlox train {shlex.quote(f'resume={odd}')} " in command("train", f"resume={odd}")[1]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert not command("train", *SMALL, "output_dir=~/home")[0]
    assert (tmp_path / "home/config.yaml").is_file()
    code, _, err = command("train", "resume=runs/first", "output_dir=elsewhere")
    assert code == 2
    assert "output_dir" in err


@pytest.mark.slow
def test_a_setting_in_the_name_of_a_run_folder_is_replaced(command, tmp_path):
    assert not command("train", *SMALL, "output_dir=runs/${env.id}-${seed}", "seed=3")[0]
    assert (tmp_path / "runs/CartPole-v1-3/metrics.jsonl").is_file()
    for folder, says in (
        ("a-${sed}", "output_dir refers to 'sed', which is no key"),
        ("a-${", "output_dir must have references of the form ${SECTION.KEY}, got one that cannot be read"),
        ("a-\\${seed}", "output_dir must have no ${ in its path, which Hydra reads as a reference"),
    ):
        code, _, err = command("train", *SMALL, f"output_dir={folder}")
        assert (code, err.count("\n")) == (2, 1)
        assert err.startswith(f"rlox train: {says}")
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


@pytest.mark.slow
def test_many_jobs_are_counted_and_a_sample_is_checked_first(command):
    words = ["train", "-m", "--check", "logger=none", "seed=range(250)"]
    code, _, err = command(*words, "algo.batch_size=range(2,100)", "algo.gamma=0.9,2")
    assert (code, "got 49,000" in err) == (2, False)
    assert "algo.gamma must be in [0, 1], got 2" in err
    lines = []
    _, jobs = compose_typed(["-m"], _split(["logger=none", "seed=range(201)"]), lines.append)
    assert [job.config.seed for job in jobs] == [*range(201)]
    assert len(lines) == 1
    assert re.fullmatch(r"201 jobs: 32 of them are valid; checking all takes about \d+ s", lines[0])


@pytest.mark.slow
def test_init_from_another_algorithm_reports_what_is_loaded_or_is_an_error(command):
    rlox.PPO("CartPole-v1", 2, 0).save("ppo.safetensors")
    code, out, _ = command("train", *SMALL, "algo=a2c", "init_from=ppo.safetensors")
    assert not code
    assert "init_from: the networks and normalisation of ppo at step 0 are taken over" in out
    words = ["algo=dqn", "algo.learning_starts=32", "buffer.size=100", "algo.batch_size=8"]
    code, _, err = command("train", *SMALL[:2], *words, "init_from=ppo.safetensors")
    assert code == 2
    assert "the policy must have the networks of dqn, got those of ppo; start from" in err


def test_names_of_folders_are_bounded_and_safe():
    name = run_name("ppo", "my_module:../" + 400 * "x" + "/Mine-v0", 3)
    assert len(name) < 150
    assert name.endswith("-s3")
    assert re.fullmatch(r"[\w.-]+", name)


def test_wandb_mode_is_taken_from_the_environment_unless_it_is_typed(monkeypatch):
    for output, typed, found in (
        (None, None, "online"),
        ("offline", None, "offline"),
        ("dryrun", None, "offline"),
        ("disabled", None, "disabled"),
        ("disabled", "offline", "offline"),
    ):
        monkeypatch.delenv("WANDB_MODE", raising=False)
        if output is not None:
            monkeypatch.setenv("WANDB_MODE", output)
        assert WandbConfig(mode=typed).in_effect == found
    monkeypatch.setenv("WANDB_MODE", "ofline")
    with pytest.raises(ValueError, match="WANDB_MODE must be one of online, offline, disabled, got 'ofline'"):
        _ = WandbConfig().in_effect


@pytest.mark.slow
def test_wandb_mode_decides_what_is_recorded(command, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert not command("train", "logger=wandb", *SMALL[1:], "output_dir=off")[0]
    assert yaml.safe_load((tmp_path / "off/config.yaml").read_text())["logger"]["wandb"] is None
    monkeypatch.setenv("WANDB_MODE", "nonsense")
    code, _, err = command("train", "logger=wandb", *SMALL[1:])
    assert (code, "WANDB_MODE must be one of" in err) == (2, True)


@pytest.mark.slow
def test_wandb_without_a_login_is_an_error_before_training(command, tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for words in ([], ["-m", "seed=0,1"], ["--check"]):
        code, out, err = command("train", "logger=wandb", *SMALL[1:], "output_dir=run", *words)
        assert (code, "logger=wandb must be able to log in, got no API key; type `wandb login`" in err) == (2, True), (
            err
        )
        assert "trained" not in out
    assert not (tmp_path / "run").exists()
    assert not command("train", "logger=wandb", "--cfg", "job")[0]
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert not command("train", "logger=wandb", *SMALL[1:], "--check")[0]


@pytest.mark.slow
def test_a_check_asks_the_wandb_server_of_the_settings_file(command, tmp_path, monkeypatch):
    for name in ("WANDB_MODE", "WANDB_BASE_URL", "WANDB_CONFIG_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_API_KEY", 40 * "0")
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb/settings").write_text("[default]\nbase_url = http://127.0.0.1:9\n")
    code, out, err = command("train", "logger=wandb", *SMALL[1:], "--check")
    assert (code, "logger=wandb: http://127.0.0.1:9 does not answer" in out) == (None, True), err


@pytest.fixture
def homeless(monkeypatch):
    """A user of whom the system knows no home folder, as in containers that run under any user id."""

    def unknown(user):
        raise KeyError(user)

    for name in ("HOME", "NETRC", "XDG_CACHE_HOME", "XDG_DATA_HOME", "RLOX_PULLED"):
        monkeypatch.delenv(name, raising=False)
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_CONFIG_DIR", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(pwd, "getpwnam", unknown)


def test_a_user_without_a_home_gets_errors_with_a_remedy(homeless, command, tmp_path, monkeypatch):
    rows = {"obs": np.zeros((4, 2), np.float32), "actions": np.zeros((4, 1), np.float32), "rewards": np.zeros(4)}
    np.savez(tmp_path / "rows.npz", **rows, terminations=np.ones(4, bool), truncations=np.zeros(4, bool))
    words = ["algo=bc", "dataset=rows.npz", "env=Pendulum-v1", "total_timesteps=1", "logger=none"]
    remedy = "HOME must be set for a user without a home folder, or XDG_CACHE_HOME; set one to a folder to use"
    code, _, err = command("train", *words)
    assert (code, remedy in err) == (1, True), err
    code, _, err = command("train", *SMALL[1:], "logger=wandb")
    assert (code, "wandb login" in err) == (2, True), err
    code, _, err = command("eval", "nobody/nothing")
    assert (code, "nobody/nothing must be a checkpoint or a run folder, got nothing there" in err) == (2, True), err
    code, _, err = command("train", *SMALL, "output_dir=~/run")
    assert (code, "HOME must be set for output_dir=~/run, since this user has no home folder" in err) == (2, True), err
    assert not (tmp_path / "~").exists()


def test_where_a_login_of_wandb_is_found(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL", "WANDB_CONFIG_DIR", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert not has_login()
    netrc = tmp_path / ".netrc"
    netrc.write_text("machine api.wandb.ai\n  login user\n  password 0123\n")
    netrc.chmod(0o600)
    assert has_login()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert not has_login()
    monkeypatch.delenv("WANDB_BASE_URL")
    settings = tmp_path / ".config/wandb/settings"
    settings.parent.mkdir(parents=True)
    settings.write_text("[default]\nbase_url = https://wandb.example.org\n")
    assert not has_login()
    monkeypatch.setenv("WANDB_API_KEY", 40 * "0")
    assert has_login()


def test_a_login_of_wandb_is_not_in_files_that_cannot_be_read(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL", "WANDB_CONFIG_DIR", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for content in (b"machine api.wandb.ai login user password \xe9\n", b"machine"):
        (tmp_path / ".netrc").write_bytes(content)
        (tmp_path / ".netrc").chmod(0o600)
        assert not has_login()


@pytest.mark.parametrize("address", ["http://host:port", "http://[::1", "http://me:s3/cret@h", "host", "http://"])
def test_an_address_without_a_host_or_a_port_names_its_key(address, command, tmp_path, monkeypatch):
    pytest.importorskip("huggingface_hub.constants")  # it reads HF_ENDPOINT once, when it is imported
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_CONFIG_DIR", "MLFLOW_TRACKING_URI", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    shown = address.replace("s3/cret", "***")
    uri = f'logger.mlflow.tracking_uri="{address}"'
    for words in ([uri], [uri, "--check"]):
        code, out, err = command("train", "logger=mlflow", uri, *SMALL[1:], *words)
        assert (code, "MLFLOW_TRACKING_URI must be" in err or "tracking_uri must be" in err) == (2, True), err
        assert (shown in err, "s3" in out + err, "Traceback" in err) == (True, False, False), err
    monkeypatch.setenv("WANDB_BASE_URL", address)
    code, _, err = command("train", "logger=wandb", *SMALL[1:], "--check")
    rule = f"must be an address such as https://HOST or http://HOST:5000, got {shown!r}"
    assert (code, f"WANDB_BASE_URL {rule}" in err) == (2, True), err
    monkeypatch.setenv("HF_ENDPOINT", address)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    code, _, err = command("pull", "me/agent")
    assert (code, f"HF_ENDPOINT {rule}" in err) == (2, True), err
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("http_proxy", address)
    if "://" in address:  # without, it is the host itself
        code, _, err = command("pull", "me/agent")
        assert (code, f"http_proxy {rule}" in err) == (2, True), err


def test_a_host_that_is_no_name_does_not_answer():
    assert not is_reachable("HF_ENDPOINT", "http://a..b:80")


@pytest.mark.slow
def test_a_model_or_a_dataset_that_is_nowhere_names_the_nearest(command, tmp_path, monkeypatch):
    # A port that nobody listens on.
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    for name in ("tiny-model", "runs/first"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    words = ["algo=sft", "dataset=rows.jsonl", "logger=none"]
    for model, says in (
        (
            "runs/frist",
            "must be a folder, a run or a name on the hub, but runs has none; did you mean 'first'?",
        ),
        ("tiny-modle", "(http://127.0.0.1:9 cannot be reached); did you mean 'tiny-model'?"),
        ("far/away", "model=far/away must be a folder, or a model that was downloaded or is on the hub (http://127"),
    ):
        code, _, err = command("train", *words, f"model={model}")
        assert (code, says in err) == (2, True), err
        assert err.count("\n") == 1
    code, _, err = command("train", "algo=bc", "env=Pendulum-v1", "logger=none", "dataset=minari:pendulum/nope-v0")
    assert (code, "it cannot be downloaded (http://127.0.0.1:9 cannot be reached)" in err) == (2, True), err


def test_arguments_of_a_wrapper_have_the_types_that_it_needs():
    for wrapper, says in (
        ({"TransformReward": {"func": "sign"}}, "func of the wrapper TransformReward must be a function, got 'sign'"),
        (
            {"TransformObservation": {"func": 3, "observation_space": 3}},
            "func of the wrapper TransformObservation must",
        ),
        ({"RescaleObservation": {"min_obs": "a", "max_obs": 1}}, "min_obs of the wrapper RescaleObservation must be"),
        ({"ClipReward": {"min_reward": "a"}}, "min_reward of the wrapper ClipReward must be"),
        ({"StickyAction": {"repeat_action_probability": "a"}}, "repeat_action_probability of the wrapper Sticky"),
        ({"FrameStackObservation": {"stack_size": "a"}}, "stack_size of the wrapper FrameStackObservation must be int"),
        ({"TimeLimit": {"max_episode_steps": 1.5}}, "max_episode_steps of the wrapper TimeLimit must be int, got 1.5"),
    ):
        with pytest.raises(ValueError, match=re.escape(says)):
            rlox.PPO("CartPole-v1", 1, env_wrappers=[wrapper])
    low, high = [-1.0, -1.0], [1.0, 1.0]
    scaled = rlox.PPO("MountainCar-v0", 1, env_wrappers=[{"RescaleObservation": {"min_obs": low, "max_obs": high}}])
    assert scaled.spec.obs_dim == 2
    rlox.PPO("CartPole-v1", 1, env_wrappers=[{"ClipReward": {"min_reward": 0, "max_reward": 0.5}}]).close()


def test_an_unreachable_tracker_is_one_short_sentence(tmp_path):
    text = (
        "API request to http://127.0.0.1:9/api/2.0/mlflow/experiments/get-by-name failed with exception "
        "HTTPConnectionPool(host='127.0.0.1', port=9): Max retries exceeded with url: /api/2.0/mlflow/experiments/"
        "get-by-name?experiment_name=rlox (Caused by NewConnectionError('<urllib3.connection.HTTPConnection object at "
        "0x7f>: Failed to establish a new connection: [Errno 111] Connection refused'))"
    )
    output = explain(RuntimeError(text), Path("run"))
    assert output.startswith("the tracker at ")
    assert "127.0.0.1:9" in output
    assert "urllib3" not in output
    assert "rlox sync run" in output
    assert len(output) < 200


@pytest.mark.slow
def test_a_full_disk_names_only_existing_checkpoints(tmp_path):
    program = (
        "import resource, signal, sys, rlox\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "a = rlox.PPO('CartPole-v1', 2, 0)\n"
        "if sys.argv[1] == 'there':\n"
        "    a.save('c.safetensors')\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        "try:\n"
        "    a.save('c.safetensors')\n"
        "except OSError as e:\n"
        "    print(e)\n"
    )
    for before, says in (("none", "there was no earlier"), ("there", "the earlier checkpoint there is untouched")):
        done = subprocess.run(
            [sys.executable, "-c", program, before], capture_output=True, text=True, cwd=tmp_path, timeout=120
        )
        assert f"save_checkpoint: cannot write (File too large); {says}" in done.stdout, done.stderr
    assert load_checkpoint(tmp_path / "c.safetensors")


@pytest.mark.slow
def test_exit_codes_depend_on_the_kind_of_error(command, tmp_path):
    (tmp_path / "damaged.safetensors").write_bytes(b"no checkpoint")
    os.mkfifo(tmp_path / "pipe")
    for words in (
        ["eval", "absent"],
        ["eval", "damaged.safetensors"],
        ["collect", "absent", "--steps", "10"],
        ["collect"],
        ["show", "algo=pppo"],
        ["show", "nonsense"],
        ["ls", "nonsense"],
        ["plot", "absent"],
        ["compare", "absent", "absent"],
        ["sweep", "status", "absent"],
        ["sweep", "resume", "absent"],
        ["cp", "absent"],
        ["sync", "absent"],
        ["ui", "--store", "absent.db"],
        ["train", "resume=absent"],
        ["train", "init_from=absent"],
        ["train", "env.kwargs.nonsense=1", "logger=none"],
        ["bench", "learn", "algo=pppo"],
        ["bench", "train", "nonsense"],
        ["bench", "data", "--only", "nonsense"],
        ["worker", "--env", "nonsense"],
        ["generate", "absent", "a"],
        ["doctor", "nonsense"],
        ["doctor", "127.0.0.1:9", "--token-file", "pipe"],
        ["plot", 300 * "x"],
        ["train", "resume=" + 300 * "x"],
        ["train", "logger=none", "output_dir=damaged.safetensors/x"],
    ):
        code, _, err = command(*words)
        assert code == 2, (words, err)
        assert err.startswith(f"rlox {words[0]}: "), err
        assert "Traceback" not in err
    # What failed outside: a worker, the system.
    for words in (
        ["doctor", "127.0.0.1:9"],
        ["train", *SMALL, "remote.addresses=[127.0.0.1:9]", "remote.timeout_s=1"],
        ["train", *SMALL, "output_dir=/proc/x"],
        ["train", "-m", *SMALL, "seed=0,1", "output_dir=/proc/x"],
        ["collect", "--env", "CartPole-v1", "--steps", "9", "--out", "/proc/x.npz"],
    ):
        code, _, err = command(*words)
        assert code == 1, (words, err)
        assert "Traceback" not in err
    code, _, err = command("train", "logger=none", "algo.learning_rate=1e30", "algo.max_grad_norm=null")
    assert code == 1
    assert json.loads(next(tmp_path.rglob("metrics.jsonl")).read_text().splitlines()[-1])["status"] == "failed"
    assert not os.path.exists(tmp_path / "absent")
