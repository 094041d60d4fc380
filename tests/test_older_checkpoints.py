"""Checkpoints and a run folder of rlox 0.6.0, and checkpoints of 0.12.0 and 0.13.0, load, act as before and resume.

The scripts make.py in their folders wrote them.
"""

import json
import runpy
import shutil
from pathlib import Path

import numpy as np
import pytest

import rlox
from rlox.algorithms import ALGORITHMS, resolve
from rlox.checkpoint import load_checkpoint
from rlox_cli.config.presets import read_presets

FOLDER = Path(__file__).parent / "checkpoints_0_6_0"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())
OFFLINE = {"bc", "td3_bc", "iql", "cql"}


def dataset():
    rng = np.random.default_rng(0)
    obs, next_obs = rng.standard_normal((2, 64, 3)).astype(np.float32)
    actions, rewards = rng.uniform(-2, 2, (64, 1)).astype(np.float32), rng.standard_normal(64).astype(np.float32)
    return rlox.OfflineDatasetBuffer(obs, next_obs, actions, rewards, np.arange(64) % 16 == 15, np.zeros(64, bool))


def test_every_algorithm_of_0_6_0_has_a_checkpoint():
    since = {name for name, entry in ALGORITHMS.items() if resolve(entry.config).uses_dataset == "text"}
    since |= {"appo", "dreamer", "impala", "mappo"}
    assert {name.rpartition("-")[0] for name in EXPECTED} == set(ALGORITHMS) - since


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # schedules are stretched; memories were not saved
@pytest.mark.parametrize("name", EXPECTED)
def test_a_checkpoint_of_0_6_0_loads_acts_and_trains(name):
    path, expected = FOLDER / f"{name}.safetensors", EXPECTED[name]
    assert load_checkpoint(path).header["versions"]["rlox"] == "0.6.0"
    algo = name.rpartition("-")[0]
    cls = resolve(ALGORITHMS[algo].cls)
    algorithm = cls.from_checkpoint(path, dataset()) if algo in OFFLINE else cls.from_checkpoint(path)
    counters = algorithm.counters
    for counter in ("env_steps", "updates", "episodes"):
        assert getattr(counters, counter) == expected[counter]
    assert algorithm.backend == expected["backend"]
    observation = np.full((1, algorithm.spec.obs_dim), expected["observation"], np.float32)
    np.testing.assert_allclose(algorithm.predict(observation), expected["action"], rtol=1e-4, atol=1e-6)
    updates = counters.updates
    algorithm.train(until=counters.steps + 64)
    assert counters.updates > updates


def test_a_run_of_0_6_0_resumes(tmp_path, command):
    run = tmp_path / "run"
    shutil.copytree(FOLDER / "run", run)
    code, out, err = command("train", f"resume={run}", "total_timesteps=600", "logger=none")
    assert not code, err
    header = load_checkpoint(run / "checkpoints" / "last.safetensors").header
    assert header["counters"]["env_steps"] == 600
    assert header["versions"]["rlox"] == rlox.__version__
    assert "fresh" not in out + err  # environments and the memory are restored


# The folders of 0.12.0 and 0.13.0, and the algorithms that learn otherwise since then: see CHANGELOG.
NEWER = {"0.12.0": {"grpo", "appo"}, "0.13.0": set()}


def folder_of(version):
    return FOLDER.with_name(f"checkpoints_{version.replace('.', '_')}")


EXPECTED_OF_NEWER = {version: json.loads((folder_of(version) / "expected.json").read_text()) for version in NEWER}


@pytest.mark.parametrize("version", NEWER)
def test_every_algorithm_has_a_checkpoint(version):
    assert {expected["algorithm"] for expected in EXPECTED_OF_NEWER[version].values()} == set(ALGORITHMS)


def test_every_preset_has_a_checkpoint_of_0_13_0():
    assert set(read_presets()) <= set(EXPECTED_OF_NEWER["0.13.0"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:train. schedules now end:RuntimeWarning")
@pytest.mark.parametrize(
    ("version", "name"), [(version, name) for version in NEWER for name in EXPECTED_OF_NEWER[version]]
)
def test_a_newer_checkpoint_loads_acts_and_resumes(version, name):
    folder, expected = folder_of(version), EXPECTED_OF_NEWER[version][name]
    make, path = runpy.run_path(str(folder / "make.py")), folder / f"{name}.safetensors"
    assert load_checkpoint(path).header["versions"]["rlox"] == version
    algorithm = make["load"](expected["algorithm"], path)
    if expected["backend"]:
        assert algorithm.backend == expected["backend"], algorithm.backend_reason
    same(make["describe"](algorithm), expected["saved"], rtol=1e-6)
    make["train_on"](algorithm)
    if expected["algorithm"] not in NEWER[version]:
        # Rounding errors of other CPUs grow while it learns.
        same(make["describe"](algorithm), expected["trained"], rtol=1e-3)
    assert algorithm.counters.updates == expected["trained"]["updates"]


def same(one, other, rtol):
    for what in ("updates", "steps"):
        assert one[what] == other[what]
    np.testing.assert_allclose(one["weights"], other["weights"], rtol=rtol)
    np.testing.assert_allclose(one["answer"], other["answer"], rtol=10 * rtol, atol=rtol)
