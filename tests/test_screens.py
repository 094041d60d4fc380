"""What every verb prints on a terminal of 40, 80 and 120 columns. All tests look at the same runs."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import forked
import pytest
from pseudo_terminal import on_a_terminal, too_wide

pytestmark = pytest.mark.slow

WIDTHS = (80, 40, 120)
SMALL = ["total_timesteps=512", "eval.n_points=1", "eval.n_episodes=2"]
RUN = "outputs/2026-11-25/ppo-CartPole-v1-s0-120000-0a1b"
JOBS = [f"seed={seed} algo.gamma={gamma}" for seed in (0, 1) for gamma in (0.98, 0.99)]
# Commands, and what their screens must contain. {run}, {sweep} and {failing} are folders, {data} is a file.
SCREENS = {
    "sweep status {sweep}": [*JOBS, "4 of 4 jobs are finished"],
    "sweep resume {sweep}": [*JOBS, "ppo gamma=0.98", "ppo gamma=0.99", "{sweep}/plot.png"],
    "sweep status {failing}": ["algo.learning_rate=1e+30", "failed", "rlox sweep resume {failing}"],
    "plot {sweep} --out curves.png": ["ppo gamma=0.98", "ppo gamma=0.99", "59.75|final evaluation return"],
    "compare {sweep} {failing}": ["final evaluation return", "verdict:", "CartPole-v1"],
    "compare {sweep}": ["baseline", "not shown"],
    "eval {run}": ["reproduced exactly"],
    "train resume={run} total_timesteps={total}": ["changed: total_timesteps", "trained ppo"],
    "train env=Pendulum-v1 --check total_timesteps=512": ["memory", "folder"],
    "collect {run} --steps 64 --out data/new.arrow": ["written: data/new.arrow", "rlox train algo=bc dataset="],
    "show": ["total_timesteps", "logger.csv.file"],
    "show algo=ppo env=CartPole-v1": ["algo.clip_eps_schedule"],
    "show hydra.sweeper": ["hydra.sweeper.n_trials"],
    "show dataset={data}": ["episodes"],
    "ls algos": ["ppo", "reward_model"],
    "ls buffers": ["prioritized"],
    "ls envs": ["LunarLander-v3", "rlox/DrawnCatch-v0"],
    "ls experiments": ["experiment=grpo-copy"],
    "ls tuned": ["algo=ppo env=CartPole-v1"],
    "ls runs": ["{run}", "finished"],
    "ls sweeps --folder {sweep}": ["4 of 4 jobs are finished"],
    "env": ["rlox", "packages"],
    "enjoy {run}": ["a window needs a display", "--video"],
    "doctor 127.0.0.1:1": ["127.0.0.1:1", "failed"],
    "bench data --only buffers --samples 3 --rounds 1": ["rlox"],
    "bench learn --seeds 2 --runs learn total_timesteps=512 eval.n_points=1 eval.n_episodes=2": ["verdict"],
    "cp tuned/ppo/CartPole-v1 mine": ["rlox train -cd mine"],
    "sync {run}": ["no tracker configured"],
    "train algo.clip_range=0.1": ["did you mean algo.clip_eps?"],
    "generate {run} x": ["must hold a language model"],
}
HELP = ["", "train", "tune", "sweep", "sweep resume", "bench", "bench learn", "eval", "enjoy", "collect", "ls"]
HELP += ["worker", "doctor", "env", "export"]
# Screens that are looked at in every run of the tests, at 80 columns; the rest are exhaustive.
DEFAULT = {"sweep status {sweep}", "sweep resume {sweep}", "sweep status {failing}", "compare {sweep} {failing}"}
DEFAULT |= {
    "compare {sweep}",
    "eval {run}",
    "show",
    "ls runs",
    "ls sweeps --folder {sweep}",
    "plot {sweep} --out curves.png",
}
DEFAULT |= {"doctor 127.0.0.1:1", "train algo.clip_range=0.1", "ls envs", "show dataset={data}"}


def check(columns: int, lines: list[str]) -> None:
    text = "\n".join(lines)
    assert "Traceback" not in text
    assert "This is a bug in rlox" not in text
    assert "Warning:" not in text
    assert too_wide(lines, columns) == []
    assert not re.search(r"\w…( |$)", text, re.MULTILINE)  # a cell that is cut


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a run, a sweep, a sweep with a failed job and a dataset; the first two were made on a terminal."""
    cwd = tmp_path_factory.mktemp("screens")
    screens = {
        "train": on_a_terminal(80, "train", *SMALL, "logger=none", f"hydra.run.dir={RUN}", cwd=cwd),
        # The README's line, with small settings.
        "sweep": on_a_terminal(
            80, "train", "-m", "seed=0,1", "algo.gamma=0.98,0.99", *SMALL, "logger=none", "hydra.sweep.dir=sw", cwd=cwd
        ),
    }
    words = ["algo.learning_rate=0.001,1e30", "logger=none", "hydra.sweep.dir=failing", "hydra.sweeper.plot=false"]
    forked.run("train", "-m", *SMALL, *words, cwd=cwd)
    forked.run("collect", RUN, "--steps", "64", "--out", "data/old.arrow", cwd=cwd)
    return cwd, screens


def test_a_training_at_80_columns(made):
    code, lines = made[1]["train"]
    assert code == 0
    check(80, lines)
    assert f"  evaluate     rlox eval {RUN}" in lines


def test_a_sweep_at_80_columns_ends_with_its_tables_and_its_plot(made):
    code, lines = made[1]["sweep"]
    assert code == 0
    check(80, lines)
    header = next(line for line in lines if line.startswith("job "))
    assert header.split() == ["job", "state", "steps", "last", "best", "seconds"]
    for job in JOBS:
        assert sum(line.startswith(f"{job}  finished") for line in lines) == 1
    assert any(line.startswith("group ") for line in lines)
    assert "  png     sw/plot.png" in lines
    assert "  compare rlox compare sw" in lines


@pytest.mark.parametrize(
    ("columns", "command"),
    [
        pytest.param(columns, line, marks=() if columns == 80 and line in DEFAULT else pytest.mark.exhaustive)
        for columns in WIDTHS
        for line in SCREENS
    ],
)
def test_every_verb_fits_the_terminal(made, columns, command):
    cwd, _ = made
    for path in ("data/new.arrow", "mine", "curves.png"):
        with contextlib.suppress(OSError):
            Path(cwd, path).unlink()
    names = {"run": RUN, "sweep": "sw", "failing": "failing", "data": "data/old.arrow"}
    names["total"] = str(1024 * (1 + WIDTHS.index(columns)))
    words = command.format(**names).split()
    code, lines = on_a_terminal(columns, *(words + ["--force"] * (words[0] == "cp")), cwd=cwd)
    text = "\n".join(lines)
    assert code == (
        1 if words[0] == "doctor" else 2 if words[0] in ("generate", "enjoy") or "clip_range" in command else 0
    ), text
    check(columns, lines)
    joined = " ".join(text.split())
    for must in SCREENS[command]:
        assert any(" ".join(one.format(**names).split()) in joined for one in must.split("|")), must


@pytest.mark.parametrize("columns", [88, 90, 92])
def test_no_width_cuts_what_tells_jobs_apart(made, columns):
    code, lines = on_a_terminal(columns, "sweep", "status", "sw", cwd=made[0])
    assert code == 0
    check(columns, lines)
    assert all(any(line.startswith(f"{job} ") for line in lines) for job in JOBS)


@pytest.mark.parametrize(
    ("columns", "verb"),
    [
        pytest.param(columns, verb, marks=() if columns == 80 and verb == "train" else pytest.mark.exhaustive)
        for columns in WIDTHS
        for verb in HELP
    ],
)
def test_help_fits_the_terminal(tmp_path, columns, verb):
    code, lines = on_a_terminal(columns, *verb.split(), "--help", cwd=tmp_path)
    assert code == 0
    check(columns, [line for line in lines if "│" not in line])
    assert max(map(len, lines)) <= columns
