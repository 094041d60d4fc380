"""`rlox bench` as a user runs it."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import forked
import pytest

from rlox_cli.bench.train import process_once

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
FEW = ("--samples", "3", "--rounds", "1")


# Each named script prints its help, in forks of one new interpreter with the most common imports.
ASK_ALL = """
import gc, os, runpy, sys
import matplotlib.figure, scipy.stats, torch
import rlox_cli.bench.learn
gc.collect()
gc.freeze()  # or each fork would copy every page
for script in sys.argv[1:]:
    if not (pid := os.fork()):
        out = os.open(os.path.basename(script) + ".txt", os.O_CREAT | os.O_WRONLY)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.argv[:], sys.path[0] = [script, "--help"], os.path.dirname(script)
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as e:
            sys.stdout.flush()
            os._exit(e.code or 0)
        sys.exit("it has gone on")
    print(os.path.basename(script), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def bench(*words, **env):
    return forked.run("bench", *words, env={**os.environ, **env})


def test_the_scripts_behind_committed_results_start(tmp_path):
    scripts = sorted(BENCHMARKS.glob("*.py"))
    command = [sys.executable, "-c", ASK_ALL, *map(str, scripts)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{path.name} 0" for path in scripts] != []
    for path in scripts:
        assert (tmp_path / f"{path.name}.txt").read_text().startswith("usage: "), path.name


def test_data_measures_prints_and_writes(tmp_path):
    done = bench("data", "--only", "^(token_kl|gae_batched)$", *FEW, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "compute_token_kl f64" in done.stdout
    assert "numpy /rlox" in done.stdout
    assert "(1 of " in done.stderr  # without a progress bar, one line for each part
    result = json.loads((tmp_path / "data.json").read_text())
    assert result["command"] == "rlox bench data --only '^(token_kl|gae_batched)$' --samples 3 --rounds 1"
    assert {"date", "machine", "python", "versions"} <= set(result)
    assert {row["operation"] for row in result["results"]} == {"token_kl", "gae_batched"}
    for row in result["results"]:
        ours, numpy = row["systems"]["rlox"], row["systems"]["numpy"]
        assert 0 < ours["median_us"] <= ours["p99_us"]
        assert ours["samples"] == 3
        assert row["ratio"]["numpy"] == pytest.approx(numpy["median_us"] / ours["median_us"], abs=0.006)
    assert (tmp_path / "data.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "words", [("data", "--only", "^gae$", *FEW), ("train", "a2c", "--steps", "100", "--rounds", "1")]
)
def test_without_the_checkout_the_error_names_what_is_needed(words, tmp_path):
    shutil.copytree(BENCHMARKS.parent / "rlox_cli", tmp_path / "rlox_cli")
    command = [sys.executable, "-m", "rlox_cli.main", "bench", *words, "--out", "made"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert not (tmp_path / "made").exists()
    assert "must run from a checkout of rlox" in done.stderr
    assert "pip install -e ." in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "nothing-like-it"], "--only must match an operation or a group"),
        (["--only", "("], "--only must be a regular expression"),
        (["--peer-python", "/no/such/python"], "--peer-python must be a Python interpreter"),
        (["--peer-python", "/bin/false"], "--peer-python must be a Python interpreter"),
    ],
)
def test_errors_of_data(words, message):
    done = bench("data", *words)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_system_with_wrong_results_is_detected(tmp_path):
    # Python runs sitecustomize before anything else: here it makes NumPy's exp 1 % wrong in the measured processes.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if sys.orig_argv[-1] == 'numpy':\n"
        "    import numpy\n"
        "    exact = numpy.exp\n"
        "    numpy.exp = lambda x: 1.01 * exact(x)\n"
    )
    done = bench("data", "--only", "^token_kl$", *FEW, PYTHONPATH=str(tmp_path))
    assert done.returncode != 0
    assert "numpy and rlox must agree" in done.stderr


def test_a_system_may_print_more_errors_than_a_pipe_holds(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nif sys.orig_argv[-1] == 'numpy':\n    sys.stderr.write(1_000_000 * '.' + '\\nthe end\\n')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = forked.run("bench", "data", "--only", "^gae_batched$", *FEW, env=environment, timeout=100)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "sitecustomize.py").open("a") as file:
        file.write("    import os\n    sys.stderr.flush()\n    os._exit(3)\n")
    done = forked.run("bench", "data", "--only", "^gae_batched$", *FEW, env=environment, timeout=100)
    assert f"numpy in {sys.executable} ended with status 3: the end" in done.stderr


def test_train_measures_what_each_system_learned(tmp_path):
    done = bench("train", "a2c", "--steps", "3000", "--rounds", "2", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "a2c, 3,000 steps (1 of 1)\n" in done.stderr
    assert "rlox torch" in done.stdout
    # Not every system reports the returns of training episodes, so no column shows them.
    assert re.search(r"system +CPU s +ratio +wall s +evaluation", done.stdout)
    assert "last 100 episodes" not in done.stdout
    result = json.loads((tmp_path / "train.json").read_text())
    assert result["command"] == "rlox bench train a2c --steps 3000 --rounds 2"
    assert [row["case"] for row in result["results"]] == ["a2c"]
    for row in result["results"]:
        ours = row["runs"]["rlox"]
        assert len(ours) == 2
        assert row["median"]["rlox"]["cpu_s"] == pytest.approx(sum(one["cpu_s"] for one in ours) / 2)
        for name, ratio in row["ratio"].items():
            quotient = row["median"][name]["cpu_s"] / row["median"]["rlox"]["cpu_s"]
            assert ratio == pytest.approx(quotient, abs=0.006), name  # it is rounded
        assert row["ratio"].keys() == row["median"].keys() >= {"rlox", "rlox torch"}
        for one in [*ours, *row["runs"]["rlox torch"]]:
            assert sum(one["shares"].values()) == pytest.approx(1.0)
            assert one["shares"]["collect"] > 0
            assert one["steps"] >= 3000
            assert 8 < one["mean_return"] < 500
            assert 8 < one["eval_return"] <= 500
    assert (tmp_path / "train.png").read_bytes().startswith(b"\x89PNG")


def test_train_times_the_command_and_its_children(tmp_path):
    child = "import time\nwhile time.process_time() < 1: pass"
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]); print('started')"
    found = process_once([sys.executable, "-c", parent], str(tmp_path))
    assert found["cpu_s"] >= 1  # of the child process, for which the command does not wait
    assert found["wall_s"] > 0
    assert found["output"] == "started\n"
    refused = [sys.executable, "-m", "rlox_cli.main", "train", "algo=ppo", "env=CartPole-v1", "total_timesteps=0"]
    with pytest.raises(RuntimeError, match="total_timesteps"):
        process_once(refused, str(tmp_path))


def test_train_reports_a_peer_that_fails(tmp_path):
    package = tmp_path / "stable_baselines3"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('broken on purpose')\n")
    done = bench("train", "solve", "--rounds", "1", PYTHONPATH=str(tmp_path))
    assert done.returncode != 0
    assert "solve, sb3: ImportError: broken on purpose" in done.stderr
    assert "of 1 solved" in done.stdout
    assert "Traceback" not in done.stderr


def test_train_rejects_an_unknown_case():
    done = bench("train", "pp")
    assert done.returncode != 0
    cases = "ppo, a2c, dqn, sac, custom, solve, process, busy, grpo, grpo-sum, grpo-large, dpo"
    assert f"case must be one of {cases}, got 'pp'" in done.stderr
