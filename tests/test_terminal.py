"""Output on terminals, and commands whose reader closes the pipe, with real pipes and pseudo-terminals."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import forked
import pytest
from pseudo_terminal import on_a_terminal
from rich.console import Console

from rlox.algorithms import PPO, SAC
from rlox.callbacks import EvalCallback
from rlox_cli.run.session import Outcome
from rlox_cli.run.train import _print_outcomes
from rlox_cli.terminal import progress
from rlox_cli.terminal.console import TextConsole, make_table, print_table
from rlox_cli.terminal.progress import ProgressCallback

pytestmark = pytest.mark.slow
EXHAUSTIVE = pytest.mark.exhaustive

RLOX = [sys.executable, "-m", "rlox_cli.main"]
SMALL = ["algo=ppo", "env=CartPole-v1", "total_timesteps=2000", "eval.n_episodes=2", "logger=none"]


def rlox(*words, cwd, **env):
    return forked.run(*words, cwd=cwd, env={**os.environ, **env})


def finished(run: Path) -> bool:
    assert (run / "checkpoints" / "last.safetensors").is_file()
    assert (run / "checkpoints" / "best.safetensors").is_file()
    return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1]).get("status") == "finished"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with runs that have long names, and a sweep with one job that fails."""
    cwd = tmp_path_factory.mktemp("terminal")
    name = "outputs/2026-11-22/a-run-whose-folder-has-a-long-name-and-a-longer-one-s{}"
    for seed in (0, 1):
        done = rlox("train", *SMALL, f"seed={seed}", f"hydra.run.dir={name.format(seed)}", cwd=cwd)
        assert done.returncode == 0, done.stderr
    words = [*SMALL, "algo.hidden_sizes=[16,16]", "hydra.sweeper.plot=false", "hydra.sweep.dir=sweep"]
    rlox("train", "-m", *words, "algo.learning_rate=0.001,1e30", "algo.max_grad_norm=0.5,null", cwd=cwd)
    return cwd


@pytest.mark.parametrize("error_too", [False, True])
def test_training_continues_when_its_reader_closes_the_pipe(tmp_path, error_too):
    words = ["train", *SMALL, "hydra.run.dir=run"]
    errors = subprocess.STDOUT if error_too else subprocess.PIPE
    with subprocess.Popen([*RLOX, *words], cwd=tmp_path, stdout=subprocess.PIPE, stderr=errors) as process:
        assert process.stdout.readline().startswith(b"tuned settings")
        process.stdout.close()
        output = b"" if error_too else process.stderr.read()
        assert process.wait(timeout=240) == 0
    assert output == b""
    assert finished(tmp_path / "run")


def test_a_sweep_continues_when_its_reader_closes_the_pipe(tmp_path):
    words = ["train", "-m", *SMALL, "seed=0,1", "hydra/launcher=joblib", "hydra.sweep.dir=sweep"]
    words += ["hydra.sweeper.plot=false"]
    with subprocess.Popen([*RLOX, *words], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout.readline() == b"2 jobs, all valid\n"
        process.stdout.close()
        assert process.wait(timeout=240) == 0
    runs = sorted(tmp_path.glob("sweep/*-s*"))
    assert len(runs) == 2
    assert all(map(finished, runs))


@pytest.mark.parametrize(
    "verb",
    [
        "show",
        "ls runs",
        "train --help",
        *(pytest.param(x, marks=EXHAUSTIVE) for x in ("ls envs", "sweep status sweep")),
    ],
)
def test_other_commands_exit_cleanly_when_their_reader_closes_the_pipe(trained, verb):
    # The reading end is closed from the start, so every write fails.
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([*RLOX, *verb.split()], cwd=trained, stdout=write, stderr=subprocess.PIPE, timeout=240)
    os.close(write)
    assert done.stderr == b""
    assert done.returncode == 0


@pytest.mark.parametrize("closed", [pytest.param(">&-", marks=EXHAUSTIVE), "2>&-", ">&- 2>&- <&-"])
def test_training_works_with_closed_streams(tmp_path, closed):
    command = " ".join([*RLOX, "train", *SMALL, "hydra.run.dir=run", closed])
    done = subprocess.run(command, shell=True, cwd=tmp_path, timeout=240, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert finished(tmp_path / "run")
    # Output was not written to files that reused the descriptors of the closed streams.
    assert all(json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    wrong = subprocess.run(command.replace("env=", "nope="), shell=True, cwd=tmp_path, timeout=240, capture_output=True)
    assert wrong.returncode == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has /dev/full")
def test_training_continues_when_its_output_cannot_be_written(tmp_path):
    warning = "rlox: warning: standard output cannot be written: No space left on device; the command goes on without"
    with open("/dev/full", "w") as full:
        for words in (["train", *SMALL, "hydra.run.dir=run"], ["ls", "algos"], ["--help"]):
            done = subprocess.run(
                [*RLOX, *words],
                cwd=tmp_path,
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                timeout=240,
            )
            assert (done.returncode, done.stderr) == (1, f"{warning} it\n")
        both = subprocess.run([*RLOX, "ls", "algos"], cwd=tmp_path, stdout=full, stderr=full, timeout=240)
        assert both.returncode == 1
    assert finished(tmp_path / "run")


POSIX = {"LC_ALL": "C", "PYTHONIOENCODING": ""}
# Runs a command for each argument in forks of one new interpreter, with output in 0.txt, 1.txt, …
ONE_BY_ONE = """
import gc, os, sys
import rlox_cli.report.compare, rlox_cli.run.train
from rlox_cli.main import main
gc.collect()
gc.freeze()  # or each fork would copy every page
for number, line in enumerate(sys.argv[1:]):
    if not (pid := os.fork()):
        out = os.open(f"{number}.txt", os.O_CREAT | os.O_WRONLY)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.argv = ["rlox", *line.split()]
        try:
            main()
        except SystemExit:
            pass
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    os.waitpid(pid, 0)
"""


@pytest.mark.parametrize(
    ("env", "encoding", "sign"),
    [
        ({"PYTHONIOENCODING": "latin-1"}, "latin-1", "±"),
        (POSIX, "ascii", "+-"),
        pytest.param({"PYTHONIOENCODING": "ascii"}, "ascii", "+-", marks=EXHAUSTIVE),
        pytest.param({"PYTHONIOENCODING": "utf-8"}, "utf-8", "±", marks=EXHAUSTIVE),
    ],
)
def test_characters_that_a_terminal_cannot_print_are_replaced(tmp_path, env, encoding, sign):
    lines = [" ".join(["train", *SMALL, "hydra.run.dir=run"]), "show", "ls buffers", "--help", "train --help"]
    lines += ["compare run run", "eval run", "nope"]
    environment = {**os.environ, **env}  # Python reads it as it starts
    done = subprocess.run(
        [sys.executable, "-c", ONE_BY_ONE, *lines], cwd=tmp_path, env=environment, capture_output=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    texts = [(tmp_path / f"{number}.txt").read_bytes().decode(encoding) for number in range(len(lines))]
    assert f" {sign} " in texts[0]
    assert finished(tmp_path / "run")
    for text in texts:
        assert "Traceback" not in text
        assert len(text) > 50


@pytest.mark.parametrize(
    ("columns", "locale"),
    [
        (80, {}),
        (39, POSIX),
        pytest.param(80, POSIX, marks=EXHAUSTIVE),
        pytest.param(39, {}, marks=EXHAUSTIVE),
        (20, {}),
        pytest.param(20, POSIX, marks=EXHAUSTIVE),
    ],
)
def test_the_live_line_fits_and_drops_losses_first(tmp_path, columns, locale):
    words = ["train", *SMALL, "total_timesteps=40_000", "eval.n_points=2", "hydra.run.dir=run"]
    code, lines = on_a_terminal(columns, *words, cwd=tmp_path, **locale)
    assert code == 0
    end = next(i for i, line in enumerate(lines) if line.startswith("trained"))
    live = [line for line in lines[:end] if re.search(r"\d%", line)]
    assert live
    assert max(map(len, live)) < columns
    assert all(re.search(r"\d%(  \d+:\d\d left|$)", line) for line in live)
    assert any("left" in line for line in live)
    bar = "-" if locale else "━"
    if columns > 20:
        assert all(line.count(bar) >= 4 for line in live[1:])
    if columns == 80:
        assert all("ppo CartPole-v1 seed 0" in line for line in live)
        assert any("steps/s" in line and "return" in line for line in live)
        assert not any("policy" in line for line in live)
    assert not any("±" in line for line in lines) or not locale


def test_no_speed_is_estimated_from_the_random_phase(monkeypatch):
    monkeypatch.setattr(progress, "_LINE_EVERY_S", 0.0)
    out = io.StringIO()
    with ProgressCallback(Console(file=out, width=200), "sac", 2000) as shown:
        sac = SAC(
            *("Pendulum-v1", 1, 0),
            **{"hidden_sizes": [16], "batch_size": 16, "learning_starts": 1005},
            callbacks=[EvalCallback(4, 1), shown],
        )
        sac.train(2000)
    lines = {int(re.search(r"([\d,]+)/", line)[1].replace(",", "")): line for line in out.getvalue().splitlines()}
    assert {20, 1000, 1020, 1040, 2000} <= set(lines)
    for step, line in lines.items():
        if "eval" in line and "over" in line:
            continue
        assert ("warming up" in line) == (step <= 1020)
        assert ("steps/s" in line) == (step > 1020)
        assert ("left" in line) == (step > 1020)
    assert not re.search(r"(?<![\d.,])0 steps/s|nan", out.getvalue())


def test_speeds_of_0_are_not_shown(monkeypatch):
    monkeypatch.setattr(progress, "_LINE_EVERY_S", 0.0)
    out = io.StringIO()
    with ProgressCallback(Console(file=out, width=200), "ppo", 512) as shown:
        PPO("CartPole-v1", 4, 0, n_steps=32, callbacks=[EvalCallback(4, 1), shown]).train(512)
    assert "warming up" not in out.getvalue()
    assert out.getvalue().count("steps/s") >= 4
    assert not re.search(r"(?<![\d.,])0 steps/s|nan", out.getvalue())


def test_paths_can_be_copied_whole_at_80_columns(trained):
    code, lines = on_a_terminal(80, "ls", "runs", cwd=trained)
    assert code == 0
    for seed in (0, 1):
        run = f"outputs/2026-11-22/a-run-whose-folder-has-a-long-name-and-a-longer-one-s{seed}"
        assert run in [line.rstrip() for line in lines]
        found = lines[[line.rstrip() for line in lines].index(run) + 1]
        assert f"algo ppo  env CartPole-v1  seed {seed}  steps 2,048  status finished" in found
    # In a pipe, each run is one line of any length.
    piped = rlox("ls", "runs", cwd=trained).stdout.splitlines()
    assert any(re.search(rf"{re.escape(run)} +ppo +CartPole-v1 +1 +2,048 +finished", line) for line in piped)


def test_a_sweep_stays_readable_at_80_columns(trained):
    code, lines = on_a_terminal(80, "sweep", "status", "sweep", cwd=trained)
    assert code == 0
    finished = lines.index("algo.learning_rate=0.001 algo.max_grad_norm=0.5")
    assert lines[finished + 1].startswith("    state finished  steps 2,048/2,000  last ")
    failed = lines.index("algo.learning_rate=1e+30 algo.max_grad_norm=null")
    output = " ".join(line.strip() for line in lines[failed : failed + 8])
    assert "training cannot continue. Try a lower learning_rate or max_grad_norm" in output
    assert max(len(line) for line in lines if "/checkpoints/" not in line) <= 80


@pytest.mark.parametrize(
    ("topic", "columns"),
    [
        ("algo=ppo", 80),
        ("algo=ppo", 40),
        ("env=CartPole-v1", 40),
        pytest.param("eval", 80, marks=EXHAUSTIVE),
        pytest.param("eval", 40, marks=EXHAUSTIVE),
        pytest.param("env=CartPole-v1", 80, marks=EXHAUSTIVE),
    ],
)
def test_show_breaks_no_word(trained, columns, topic):
    code, lines = on_a_terminal(columns, "show", topic, cwd=trained)
    assert code == 0
    words = {word for line in rlox("show", topic, cwd=trained).stdout.splitlines() for word in line.split()}
    assert {word for line in lines for word in line.split()} - words <= {"type", "default", "tuned", "search"}


def test_tables_do_not_interpret_markup():
    out = io.StringIO()
    console = Console(file=out, width=40)
    table = make_table("sweep", "jobs", "typed")
    table.add_row("outputs/" + "x" * 60, "1 of 2", "hydra.sweeper.search=[learning_rate,gamma] algo=ppo")
    print_table(console, table)
    assert out.getvalue().splitlines() == [
        "outputs/" + "x" * 60,
        "    jobs 1 of 2",
        "    hydra.sweeper.search=[learning_rate,gamma]",
        "    algo=ppo",
    ]


def test_help_does_not_drop_brackets(tmp_path):
    output = rlox("train", "--help", cwd=tmp_path, COLUMNS="120").stdout
    assert "'hydra.sweeper.search=[gamma,gae_lambda]'" in output
    assert "'logger=[mlflow,csv]'" in output
    assert "--info [TOPIC]" in output


def test_a_missing_score_is_not_shown_as_none(tmp_path):
    lines = rlox("ls", "tuned", cwd=tmp_path).stdout.splitlines()
    assert "None" not in " ".join(lines)
    assert any(line.split() == ["algo=cql", "env=Pendulum-v1", "5,000"] for line in lines)


def test_scores_below_one_have_digits_in_the_table_of_jobs(capsys):
    score = {"mean_return": 0.12345, "std_return": 0.05}
    _print_outcomes([Outcome(Path("run"), 10, 1.0, score, 0.25)], TextConsole())
    line = capsys.readouterr().out.splitlines()[-1]
    assert "0.1235 ± 0.05" in line
    assert "0.25" in line


def test_evaluation_points_are_warned_about_only_if_set(tmp_path):
    short = ["train", *SMALL, "total_timesteps=512", "eval.n_episodes=1"]
    assert "eval.n_points" not in rlox(*short, "hydra.run.dir=a", cwd=tmp_path).stdout
    assert "eval.n_points=12" in rlox(*short, "eval.n_points=12", "hydra.run.dir=b", cwd=tmp_path).stdout
