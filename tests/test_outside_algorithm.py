"""An algorithm of another package: examples/reinforce is installed and used on the command line and in the library."""

from __future__ import annotations

import ast
import importlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import forked
import numpy as np
import pytest
import torch

import rlox
from rlox.algorithms import ALGORITHMS
from rlox.envs import registry
from rlox.training import Learner

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "reinforce"
SMALL = ["algo=reinforce", "env=CartPole-v1", "logger=none", "eval.n_points=1", "eval.n_episodes=3"]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder with the installed example, as after `pip install --target`, but without using the network."""
    pytest.importorskip("setuptools")
    tmp = tmp_path_factory.mktemp("reinforce")
    shutil.copytree(EXAMPLE, tmp / "source", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-build-isolation", "--no-deps"]
    done = subprocess.run([*pip, "--target", tmp / "site", tmp / "source"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return tmp / "site"


@pytest.fixture
def installed(site, monkeypatch):
    """The same installation, importable in this process."""
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, "rlox_reinforce", raising=False)
    registry.offers.cache_clear()
    yield
    ALGORITHMS.pop("reinforce", None)
    sys.modules.pop("rlox_reinforce", None)
    registry.offers.cache_clear()


def command(path, *args, cwd, code=(0,)):
    done = forked.run(*args, cwd=cwd, env={**os.environ, "PYTHONPATH": str(path)})
    assert done.returncode in code, done.stderr
    return done


def weights(folder):
    (path,) = folder.rglob("last.safetensors")
    return rlox.load_checkpoint(path).tensors


@pytest.mark.slow
def test_the_example_is_short_and_defines_only_update(installed):
    module = importlib.import_module("rlox_reinforce")
    assert len((EXAMPLE / "rlox_reinforce.py").read_text().splitlines()) <= 80
    assert isinstance(module.Reinforce, type)
    assert issubclass(module.Reinforce, rlox.training.OnPolicyAlgorithm)
    made = module.Reinforce("CartPole-v1", n_envs=2)
    assert isinstance(made, Learner)
    body = ast.parse((EXAMPLE / "rlox_reinforce.py").read_text()).body
    (cls,) = (node for node in body if isinstance(node, ast.ClassDef) and node.name == "Reinforce")
    assert [node.name for node in cls.body if isinstance(node, ast.FunctionDef)] == ["update"]


def test_by_name_in_the_library(installed, tmp_path):
    trainer = rlox.Trainer("reinforce", env="CartPole-v1", config={"n_envs": 4, "seed": 1})
    trainer.train(20_000)
    assert trainer.evaluate(10).returns.mean() > 60  # a random policy has 22
    trainer.save(tmp_path / "a.safetensors")
    again = rlox.Trainer.load(tmp_path / "a.safetensors")
    obs = np.zeros((5, 4), np.float32)
    assert np.array_equal(again.predict(obs), trainer.predict(obs))
    with pytest.raises(ValueError, match=r"gae_lambda must be 1, because REINFORCE learns from whole returns, got 0.9"):
        rlox.Trainer("reinforce", env="CartPole-v1", config={"gae_lambda": 0.9})


@pytest.mark.slow
def test_the_command_line_checks_trains_resumes_and_evaluates(site, tmp_path):
    checked = command(site, "train", *SMALL, "--check", "total_timesteps=4000", cwd=tmp_path)
    assert "Reinforce has an update of its own" in checked.stdout
    command(site, "train", *SMALL, "total_timesteps=4000", "output_dir=straight", cwd=tmp_path)
    command(site, "train", *SMALL, "total_timesteps=2048", "schedule_timesteps=4000", "output_dir=parts", cwd=tmp_path)
    command(site, "train", "resume=parts", "total_timesteps=4000", cwd=tmp_path)
    straight, parts = weights(tmp_path / "straight"), weights(tmp_path / "parts")
    for section in ("policy", "optimizer"):
        for name, array in straight[section].items():
            assert np.array_equal(array, parts[section][name]), name
    scored = json.loads(command(site, "eval", "parts", "--json", cwd=tmp_path).stdout)
    assert scored["n_episodes"] == 3
    listed = command(site, "ls", "algos", cwd=tmp_path).stdout
    assert "REINFORCE with a learned baseline" in listed
    assert "use_baseline" in command(site, "show", "algo=reinforce", cwd=tmp_path).stdout
    wrong = command(site, "train", *SMALL, "algo.use_baselin=false", cwd=tmp_path, code=(2,)).stderr
    assert "did you mean 'use_baseline'" in wrong


@pytest.mark.slow
def test_verdicts_compare_it(site, tmp_path):
    learn = ["bench", "learn", *SMALL, "total_timesteps=2000", "--seeds", "2"]
    assert "nothing to judge against" in command(site, *learn, "--out", "before", cwd=tmp_path).stdout
    against = ["algo.use_baseline=false", "--against", "before/learn.json", "--out", "after"]
    output = command(site, *learn, *against, cwd=tmp_path, code=(3,)).stdout
    assert "reinforce-CartPole-v1" in output
    assert "others            NEED MORE SEEDS: IQM minus that of before/learn.json" in output
    assert output.splitlines()[-1] == "NEED MORE SEEDS"
    for name, verdict in (("before", None), ("after", "NEED MORE SEEDS")):
        found = json.loads((tmp_path / name / "learn.json").read_text())
        assert found["verdict"] == found["cells"]["reinforce-CartPole-v1"]["verdict"] == verdict
        assert found["cells"]["reinforce-CartPole-v1"]["final"].keys() == {"100", "101"}


@pytest.mark.slow
def test_an_error_in_its_update_is_shown_with_its_line(site, tmp_path):
    broken = tmp_path / "site"
    shutil.copytree(site, broken)
    source = broken / "rlox_reinforce.py"
    source.write_text(source.read_text().replace("batch.returns - values.detach()", "batch.returns - value.detach()"))
    output = command(broken, "train", *SMALL, "total_timesteps=2000", cwd=tmp_path, code=(1,)).stderr
    line = next(i for i, text in enumerate(source.read_text().splitlines(), 1) if "value.detach()" in text)
    assert "name 'value' is not defined" in output
    assert "rlox_reinforce.py" in output
    assert str(line) in output


@pytest.mark.parametrize("base", [rlox.A2C, rlox.DQN, rlox.BC])
@pytest.mark.parametrize(
    ("returned", "got"),
    [
        ({"loss": torch.ones(3)}, "loss: a tensor of shape (3,)"),
        ({"good": 0.5, "bad": None}, "bad: None"),
        ({"name": "text"}, "name: 'text'"),
        ({"losses": np.ones(3)}, "losses: array([1., 1., 1.])"),
        (None, "metrics as a dict, got None"),
    ],
)
def test_invalid_return_values_of_update(base, returned, got):
    with pytest.raises(TypeError, match=re.escape(got)):
        trained(base, returned)


@pytest.mark.parametrize("base", [rlox.A2C, rlox.DQN, rlox.BC])
def test_an_update_may_return_numbers_of_any_type(base):
    metrics = trained(base, {"a": 1, "b": torch.tensor(2.0), "c": np.float32(3), "d": 4.0, "e": torch.tensor(5)})
    assert [metrics[name] for name in "abcde"] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert all(type(metrics[name]) is float for name in "abcde")


@pytest.mark.parametrize("first", [0.0, torch.tensor(0.0)])
@pytest.mark.parametrize("base", [rlox.DQN, rlox.BC])
def test_a_metric_may_be_a_number_in_one_update_and_a_tensor_in_the_next(base, first):
    other = torch.tensor(2.0) if isinstance(first, float) else 2.0
    rows = itertools.cycle([{"loss": first}, {"loss": other}])
    assert 0.0 < trained(base, rows)["loss"] < 2.0


@pytest.mark.parametrize("base", [rlox.DQN, rlox.BC])
def test_every_update_must_return_metrics(base):
    with pytest.raises(TypeError, match="update must return its metrics as a dict, got None"):
        trained(base, itertools.cycle([{"loss": 0.5}, None]))


def trained(base, returned):
    """The last metrics of an algorithm whose update only returns `returned`, or its next item if it is an iterator."""

    class Own(base):
        def update(self, batch):
            return next(returned) if isinstance(returned, Iterator) else returned

    if base is rlox.BC:
        obs, flags = np.zeros((64, 4), np.float32), np.zeros(64, bool)
        data = rlox.OfflineDatasetBuffer(obs, obs, np.zeros((64, 1)), np.zeros(64), flags, flags)
        return Own(data, obs_dim=4, act_dim=1, seed=0).train(200)
    return Own("CartPole-v1", n_envs=2, seed=0, **({"learning_starts": 8} if base is rlox.DQN else {})).train(400)


@pytest.mark.slow
def test_an_invalid_algorithm_is_an_error(site, tmp_path):
    broken = tmp_path / "site"
    shutil.copytree(site, broken)
    source = broken / "rlox_reinforce.py"
    source.write_text(source.read_text().replace('name = "reinforce"', 'name = "other"'))
    output = command(broken, "train", *SMALL, cwd=tmp_path, code=(2,)).stderr
    assert "rlox.algorithms: reinforce (rlox_reinforce:Reinforce) must be a class with name = 'reinforce'" in output
    gone = command("", "train", *SMALL, cwd=tmp_path, code=(2,)).stderr
    assert "algo=reinforce" in gone
