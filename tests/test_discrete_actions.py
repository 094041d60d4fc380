"""The cells of benchmarks/discrete_actions.py."""

import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import discrete_actions
from rlox_cli.config.compose import compose_jobs

NAMES = {"buffer_size": "size", "target_update_interval": "target_update_freq"}  # theirs -> ours


QR_DQN = [cell for cell in discrete_actions.CELLS if cell.startswith("qr_dqn-")]
SAC = [cell for cell in discrete_actions.CELLS if cell.startswith("sac-")]


@pytest.mark.parametrize("cell", QR_DQN)
def test_both_sides_have_the_same_settings(cell):
    theirs = discrete_actions.their_settings(cell)
    (job,) = compose_jobs([], discrete_actions.our_words(cell))
    assert job.tuned == cell.replace("-", "/", 1)
    values = {**vars(job.config.algo), **vars(job.config.buffer)}
    for name, value in theirs["kw"].items():
        if name == "policy_kwargs":
            assert (value["n_quantiles"], value["net_arch"]) == (values["n_atoms"], values["hidden_sizes"])
        elif isinstance(value, dict):
            assert (value["falls_from"], values["learning_rate_schedule"]) == (values["learning_rate"], "linear")
        else:
            assert value == values[NAMES.get(name, name)], name
    assert (theirs["steps"], theirs["n_envs"]) == (job.config.total_timesteps, job.config.env.n_envs)
    assert values["adam_eps"] == 0.01 / theirs["kw"]["batch_size"]  # sb3-contrib's own default


@pytest.mark.parametrize("cell", SAC)
def test_both_sides_of_discrete_sac_have_the_same_settings(cell):
    theirs = discrete_actions.their_settings(cell)
    (job,) = compose_jobs([], discrete_actions.our_words(cell))
    run, values = job.config, vars(job.config.algo)
    n_actions = {"CartPole-v1": 2, "LunarLander-v3": 4}[theirs["env"]]
    wanted = pytest.approx(values["entropy_fraction"] * math.log(n_actions)) if values["auto_entropy"] else None
    memory = {"target_entropy": wanted, "buffer_size": run.buffer.size, "n_step": run.buffer.n_step}
    for name, value in theirs["kw"].items():
        assert value == (memory[name] if name in memory else values[name]), name
    assert (theirs["env"], theirs["steps"], theirs["n_envs"]) == (run.env.id, run.total_timesteps, run.env.n_envs)
    # tianshou has no other values of these.
    assert (values["n_critics"], values["policy_value"], values["max_grad_norm"]) == (2, "min", None)
    assert (values["adam_beta1"], values["weight_decay"], values["activation"]) == (0.9, 0.0, "relu")
