"""Warnings that Python's `warnings` show on the command line are lines like its own, and in the library as Python's."""

import os
import re
import subprocess
import sys

import forked
import pytest
from pseudo_terminal import on_a_terminal

pytestmark = pytest.mark.slow

CODE = """
import warnings
import gymnasium
import numpy as np


class Endless(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        warnings.warn("the motor is hot")
        return np.zeros(2, np.float32), 1.0, False, False, {}


gymnasium.register("Endless-v0", Endless)
"""
WORDS = ["train", "algo=ppo", "env=endless:Endless-v0", "env.n_envs=2", "algo.n_steps=16", "total_timesteps=64"]
WORDS += ["eval.n_points=1", "eval.n_episodes=1", "tuned=off", "logger=none"]
PLAIN = "warning: evaluate: an episode of endless:Endless-v0 did not end within 10 times"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "endless.py").write_text(CODE)
    return tmp_path


def lines_of(folder, text):
    """The lines of warnings, each once: several processes show the same ones."""
    place = f"(UserWarning, {folder / 'endless.py'}:15)"
    lines = {line.replace(place, "PLACE") for line in text.splitlines()}
    return sorted(line if line.startswith("warning: the") else line[: len(PLAIN)] for line in lines)


@pytest.mark.parametrize("words", [[], ["env.workers=2"]], ids=["one process", "workers"])
def test_a_training_prints_them_as_its_own(words, folder):
    done = forked.run(*WORDS, *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert lines_of(folder, done.stderr) == [PLAIN, "warning: the motor is hot PLACE"]


def test_jobs_of_a_launcher_print_them_too(folder):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    words = ["-m", "seed=0,1", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "hydra.sweeper.plot=false"]
    done = forked.run(*WORDS, *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert {PLAIN, "warning: the motor is hot PLACE"} <= {*lines_of(folder, done.stderr)}
    assert "Warning: " not in done.stderr


def test_a_terminal_with_a_progress_bar_shows_whole_lines(folder):
    code, lines = on_a_terminal(80, *WORDS, cwd=folder)
    assert code == 0
    (at,) = [i for i, line in enumerate(lines) if line.startswith("warning: evaluate: an episode")]
    assert re.sub(r"\s+", " ", " ".join(lines[at : at + 5])).startswith(PLAIN)
    assert max(map(len, lines[at : at + 3])) <= 80


@pytest.mark.parametrize("place", ["variable", "flag"])
@pytest.mark.parametrize(("filters", "fails"), [("ignore", False), ("error:the motor", True)])
def test_filters_of_the_user_apply_to_all_processes(filters, fails, place, folder):
    flags, variables = ([f"-W{filters}"], {}) if place == "flag" else ([], {"PYTHONWARNINGS": filters})
    command = [sys.executable, *flags, "-m", "rlox_cli.start", *WORDS, "env.workers=2"]
    done = subprocess.run(command, cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True)
    assert (done.returncode != 0) == fails, done.stderr
    assert "warning: " not in done.stderr
    assert ("the motor is hot" in done.stderr) == fails


def test_the_library_shows_them_as_python_does(folder):
    code = "import rlox, endless; rlox.PPO(endless.Endless, n_envs=1, n_steps=8).train(8)"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "endless.py:15: UserWarning: the motor is hot\n  warnings.warn(" in done.stderr
