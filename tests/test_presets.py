"""Presets: other choices of ``algo=`` than the algorithms, which are one of them with other settings."""

import re
from pathlib import Path

import pytest
import yaml

import rlox
from rlox.config import RunConfig
from rlox_cli.bench.learn import compose_cells
from rlox_cli.config.compose import compose_jobs
from rlox_cli.config.presets import choice_names, config_of, name_choice, preset_settings, read_presets
from rlox_cli.records.runs import group_runs, read_run
from rlox_cli.report.choosing import START_WITH

PRESET = """# @package _global_
# DQN that updates sooner.
defaults:
  - dqn_schema@algo
  - override /buffer: prioritized
  - _self_
env: {n_envs: 1}
buffer: {n_step: 3}
algo: {learning_starts: 20, batch_size: 8, hidden_sizes: [8]}
"""
SHORT = ["total_timesteps=60", "eval.n_points=1", "eval.n_episodes=1", "logger=none"]


@pytest.fixture
def folder(tmp_path):
    """A folder for ``-cd`` with a preset ``eager``."""
    (tmp_path / "conf" / "algo").mkdir(parents=True)
    (tmp_path / "conf" / "algo" / "eager.yaml").write_text(PRESET)
    return tmp_path / "conf"


def test_a_preset_of_the_users_own_is_its_algorithm_with_its_settings(folder):
    (job,) = compose_jobs(["-cd", str(folder)], ["algo=eager", "algo.batch_size=16"])
    assert (job.algo, job.choice, job.tuned) == ("dqn", "eager", None)
    assert (job.config.algo.learning_starts, job.config.algo.batch_size) == (20, 16)
    assert (job.config.buffer.name, job.config.buffer.n_step) == ("prioritized", 3)
    with pytest.raises(ValueError, match="algo=eager"):
        compose_jobs([], ["algo=eager"])


def test_tuned_settings_are_those_of_the_preset(folder):
    tuned = folder / "tuned" / "eager" / "CartPole-v1.yaml"
    tuned.parent.mkdir(parents=True)
    tuned.write_text("# @package _global_\nalgo: {gamma: 0.9}\n")
    (job,) = compose_jobs(["-cd", str(folder)], ["algo=eager"])
    assert (job.tuned, job.config.algo.gamma) == ("eager/CartPole-v1", 0.9)


def test_cells_of_a_benchmark_are_named_by_the_preset(folder):
    cells = compose_cells(["-cd", str(folder), "algo=dqn,eager", "env=CartPole-v1"])
    assert {name: job.algo for name, job in cells.items()} == {"dqn-CartPole-v1": "dqn", "eager-CartPole-v1": "dqn"}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [[], ["-m", "hydra/sweeper=basic"]])
def test_a_run_names_the_algorithm_and_its_folder_the_preset(folder, command, tmp_path, launcher):
    code, printed, error = command("train", "-cd", str(folder), "algo=eager", *SHORT, *launcher)
    assert not code, error
    (path,) = (tmp_path / "outputs").rglob("metrics.jsonl")
    run = path.parent
    assert "eager-CartPole-v1-s0" in str(run)
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert (config["algo"]["name"], config["preset"]) == ("dqn", "eager")
    assert "eager CartPole-v1 seed 0" in printed or launcher
    assert re.search(r"eager-CartPole-v1-s0\S* +eager +CartPole-v1 ", command("ls", "runs")[1])
    assert group_runs([read_run(run, ["eval/mean_return"])])[0].label == "eager"
    assert rlox.load_checkpoint(run / "checkpoints" / "last.safetensors").header["algorithm"] == "dqn"
    code, out, error = command("train", f"resume={run}", "total_timesteps=80")
    assert not code, error
    assert "eager CartPole-v1 seed 0" in out
    assert "80 steps" in out
    assert yaml.safe_load((run / "config.yaml").read_text())["preset"] == "eager"


@pytest.mark.slow
def test_runs_of_a_preset_are_one_group_with_those_whose_record_lacks_it(folder, command, tmp_path):
    words = ["-cd", str(folder), "algo=eager", "env=CartPole-v1", *SHORT[:3]]
    for seed in (0, 1, 2):
        assert not command("train", *words, f"seed={seed}", "logger=none", f"output_dir=runs/{seed}")[0]
    assert not command("train", "algo=dqn", *SHORT, "tuned=off", "algo.learning_starts=10", "output_dir=runs/other")[0]
    config = tmp_path / "runs" / "0" / "config.yaml"
    config.write_text(config.read_text().replace("preset: eager\n", ""))
    groups = group_runs([read_run(tmp_path / "runs" / name, ["eval/mean_return"]) for name in ("0", "1", "2", "other")])
    assert [(group.label.split()[0], len(group.runs)) for group in groups] == [("eager", 3), ("dqn", 1)]
    code, out, error = command("train", "resume=runs/2", "algo=eager", "total_timesteps=80")
    assert not code, error
    assert "80 steps" in out
    assert "algo=sac must stay algo=dqn" in command("train", "resume=runs/2", "algo=sac")[2]
    # A benchmark takes runs of former versions, whose configuration has no `preset`.
    learn = ["bench", "learn", *words, "--seeds", "2", "--first-seed", "0", "--runs", "learned", "--score-only"]
    code, out, error = command(*learn)
    assert not code, error
    for config in (tmp_path / "learned").rglob("config.yaml"):
        config.write_text(config.read_text().replace("preset: eager\n", ""))
    code, _, error = command(*learn)
    assert not code, error


def test_the_algorithm_of_a_choice():
    run = RunConfig(algo=rlox.DQNConfig())
    assert (name_choice("eager", run), run.preset) == ("dqn", "eager")
    assert (name_choice("sac", run), run.preset) == ("sac", None)
    run.algo = None
    assert (name_choice("eager", run), run.preset) == ("eager", "eager")
    assert config_of("eager") is None
    assert config_of("dqn") is rlox.DQNConfig


@pytest.mark.parametrize("name", read_presets())
def test_shipped_presets_compose_and_are_listed(name, command):
    algo, settings = read_presets()[name], preset_settings(name)
    (job,) = compose_jobs([], [f"algo={name}", "env=CartPole-v1" if algo == "dqn" else "env=Pendulum-v1", "tuned=off"])
    assert job.algo == algo
    assert all(getattr(job.config.algo, key) == value for key, value in settings["algo"].items())
    assert name in choice_names()
    listed = command("ls", "algos")[1]
    assert f"(a preset of {algo})" in next(line for line in listed.splitlines() if line.startswith(name + " "))
    table = command("show", f"algo={name}")[1]
    assert all(f"algo.{key} " in table for key in settings["algo"])
    assert "preset" in table
    env = "CartPole-v1" if algo == "dqn" else "Pendulum-v1"
    assert f"\npreset: {name}\n" in command("train", f"algo={name}", f"env={env}", "--cfg", "job")[1]


def test_when_to_start_with_an_algorithm_stands_in_the_manual_and_in_show(command):
    page = (Path(__file__).parents[1] / "docs" / "algorithms" / "index.md").read_text()
    rows = re.findall(r"^\| \[[^]]+\]\((\w+)\.md\) \|.*\| ([^|]+) \|$", page, re.MULTILINE)
    shipped = {name for name in choice_names() if not name.startswith("_")}
    assert {name: text for name, text in rows if name in shipped} == START_WITH
    assert set(START_WITH) == shipped
    _, shown, _ = command("show", "algo=sac")
    assert f"start with it when: {START_WITH['sac']}\npresets of it:\n  algo=crossq: {START_WITH['crossq']}\n" in shown
    _, shown, _ = command("show", "algo=xqc")
    assert START_WITH["xqc"] in shown
    assert "presets of it" not in shown


@pytest.mark.parametrize("name", sorted(read_presets()))
def test_a_preset_in_the_library_has_the_memory_of_the_command_line(name):
    (job,) = compose_jobs([], [f"algo={name}", "tuned=off"])
    cls = rlox.DQN if job.algo == "dqn" else rlox.SAC
    agent = cls("CartPole-v1" if job.algo == "dqn" else "Pendulum-v1", **rlox.preset(name))
    ours, theirs = agent._memory.config, job.config.buffer
    assert (ours.name, ours.n_step) == (theirs.name, theirs.n_step)
    assert agent.config.to_dict() == job.config.algo.to_dict()
