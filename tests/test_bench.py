"""`rlox bench` as a user runs it."""

import json
import os
import subprocess
import sys

import pytest

FEW = ("--samples", "3", "--rounds", "1")


def bench(*words, **env):
    command = [sys.executable, "-m", "rlox_cli.main", "bench", *words]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True)


def test_data_measures_prints_and_writes(tmp_path):
    done = bench("data", "--only", "^(token_kl|gae_batched)$", *FEW, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "compute_token_kl f64" in done.stdout
    assert "numpy /rlox" in done.stdout
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
    ("words", "said"),
    [
        (["--only", "nothing-like-it"], "--only must match an operation or a group"),
        (["--only", "("], "--only must be a regular expression"),
        (["--peer-python", "/no/such/python"], "--peer-python must be a Python interpreter"),
        (["--peer-python", "/bin/false"], "--peer-python must be a Python interpreter"),
    ],
)
def test_data_refuses(words, said):
    done = bench("data", *words)
    assert done.returncode != 0
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_system_that_computes_something_else_is_found_out(tmp_path):
    # Python runs sitecustomize before anything else: here, in the processes that measure, exp is 1 % off in NumPy's.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if any(\"'numpy'\" in word for word in sys.orig_argv):\n"
        "    import numpy\n"
        "    exact = numpy.exp\n"
        "    numpy.exp = lambda x: 1.01 * exact(x)\n"
    )
    done = bench("data", "--only", "^token_kl$", *FEW, PYTHONPATH=str(tmp_path))
    assert done.returncode != 0
    assert "numpy and rlox must agree" in done.stderr
