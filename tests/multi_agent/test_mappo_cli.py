"""MAPPO from the command line: train, check, resume, sweep, evaluate, film, compare."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec

import numpy as np
import pytest

import rlox

pytestmark = pytest.mark.skipif(find_spec("mpe2") is None, reason="needs mpe2")

SPREAD = "env=pettingzoo:mpe2.simple_spread_v3"
PURSUIT = "env=GridPursuit-v0"
SHORT = ["tuned=off", "algo.n_steps=16", "env.n_envs=2", "logger=none", "eval.n_points=2", "eval.n_episodes=2"]


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def metrics_of(folder):
    found = {}
    for row in rows_of(folder):
        found |= row
    return found


@pytest.mark.slow
def test_it_trains_on_pettingzoo_and_scores_each_agent(command, tmp_path):
    run = tmp_path / "run"
    code, out, _ = command(
        "train", "algo=mappo", SPREAD, "env.kwargs={N: 2, max_cycles: 10}", "total_timesteps=320", *SHORT,
        f"output_dir={run}",
    )  # fmt: skip
    assert not code
    assert "trained mappo pettingzoo:mpe2.simple_spread_v3" in out
    found = metrics_of(run)
    assert found["episode/return"] == pytest.approx(
        found["episode/return/agent_0"] + found["episode/return/agent_1"], rel=1e-6
    )
    assert "eval/return/agent_1" in found
    code, out, _ = command("eval", str(run))
    assert not code
    assert "reproduced exactly" in out
    assert "agent_0" in out
    assert "agent_1" in out
    code, out, _ = command("eval", str(run), "--json", "--stochastic")
    found = json.loads(out)
    assert found["mean_return"] == pytest.approx(found["return/agent_0"] + found["return/agent_1"])
    code, _, err = command("eval", str(run), "--video", str(tmp_path / "scene.gif"))
    assert not code
    assert "recorded in" in err
    assert (tmp_path / "scene.gif").stat().st_size > 1000


@pytest.mark.slow
def test_a_stopped_run_resumes_bit_for_bit(command, tmp_path):
    same = ["algo=mappo", PURSUIT, *SHORT, "checkpoint.every_steps=64"]
    assert not command("train", *same, "total_timesteps=128", f"output_dir={tmp_path / 'whole'}")[0]
    assert not command("train", *same, "total_timesteps=64", f"output_dir={tmp_path / 'part'}")[0]
    assert not command("train", f"resume={tmp_path / 'part'}", "total_timesteps=128")[0]
    one, other = (
        rlox.load_checkpoint(tmp_path / name / "checkpoints" / "last.safetensors") for name in ("whole", "part")
    )
    assert one.tensors.keys() == other.tensors.keys()
    for section, arrays in one.tensors.items():
        for name, array in arrays.items():
            assert np.array_equal(array, other.tensors[section][name], equal_nan=True), (section, name)


@pytest.mark.slow
@pytest.mark.parametrize("env", [SPREAD, PURSUIT])
def test_check_describes_the_agents(command, env):
    code, out, _ = command("train", "algo=mappo", env, "total_timesteps=64", *SHORT, "--check")
    assert not code
    assert "3 agents; observations of" in out
    assert "state" in out
    assert "nothing was trained" in out


@pytest.mark.slow
def test_a_sweep_trains_every_job(command, tmp_path):
    code, _, err = command(
        "train", "-m", "algo=mappo", PURSUIT, "algo.critic=central,local", "total_timesteps=64", *SHORT,
        f"hydra.sweep.dir={tmp_path / 'sweep'}", "hydra.sweeper.plot=false",
    )  # fmt: skip
    assert not code, err
    assert len(list((tmp_path / "sweep").glob("*/checkpoints/last.safetensors"))) == 2


def test_bench_learn(command, tmp_path):
    code, out, err = command(
        "bench", "learn", "algo=mappo", PURSUIT, "total_timesteps=64",
        *(word for word in SHORT if not word.startswith("logger")), "--seeds", "2", "--runs", str(tmp_path / "runs"),
    )  # fmt: skip
    assert not code, err
    assert "mappo-GridPursuit-v0: 2 seeds" in out


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["ppo", "dqn", "appo"])
def test_algorithms_for_one_agent_are_an_error(command, algo):
    code, _, err = command("train", f"algo={algo}", SPREAD)
    assert code
    assert f"has several agents, but algo={algo} trains only one; try algo=mappo" in err


def test_a_missing_package_is_named_with_its_remedy(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "mpe2", None)
    monkeypatch.delitem(sys.modules, "mpe2.simple_spread_v3", raising=False)
    code, _, err = command("train", "algo=mappo", SPREAD)
    assert code
    assert 'pip install "rlox-cli[multi-agent]"' in err


@pytest.mark.slow
def test_a_checkpoint_may_not_choose_a_module(command, tmp_path, monkeypatch):
    (tmp_path / "own_game.py").write_text(
        "from mpe2.simple_spread_v3 import parallel_env as made\n\n"
        "def parallel_env(**kwargs):\n    return made(**kwargs)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    run = tmp_path / "run"
    code, out, err = command(
        "train", "algo=mappo", "env=pettingzoo:own_game", "total_timesteps=64", *SHORT, f"output_dir={run}"
    )
    assert not code, err
    assert "--import own_game" in out
    code, _, err = command("eval", str(run))
    assert code
    assert "add --import own_game" in err
    assert not command("eval", str(run), "--import", "own_game")[0]
