"""Losses compiled by PyTorch: the training is the same, and continues without a compiler."""

import os
import warnings

import forked
import numpy as np
import pytest
import torch

from rlox import A2C, DQN, PPO, SAC, TD3, DreamerV3, preset

pytestmark = pytest.mark.slow

ON = {"n_steps": 8, "n_envs": 2}
OFF = {"n_envs": 2, "learning_starts": 24, "batch_size": 8}
CASES = {
    "ppo": (PPO, {**ON, "batch_size": 12, "clip_eps_schedule": "linear"}, 2),
    "a2c": (A2C, ON, 1),
    "dqn": (DQN, OFF, 1),
    "sac": (SAC, OFF, 2),
    "td3": (TD3, {**OFF, "prioritized": True}, 2),
    "crossq": (SAC, {**preset("crossq"), **OFF, "critic_hidden_sizes": [8]}, 2),
    "tqc": (SAC, {**preset("tqc"), **OFF, "critic_hidden_sizes": [8]}, 2),
}


# Compiling a graph takes five seconds, so only one algorithm of each family runs.
OFTEN = ("ppo", "dqn")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in OFTEN else pytest.mark.exhaustive) for case in CASES]
)
def test_a_compiled_loss_trains_as_without_compilation(case):
    """PPO: minibatches of 12 of 16 rows, so that the last has another size; schedules do not cause recompilation."""
    cls, sizes, most = CASES[case]
    env = "Pendulum-v1" if "continuous" in cls.actions and "discrete" not in cls.actions else "CartPole-v1"
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    trained = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for compile in (False, True):
            one = cls(env, seed=0, backend="torch", compile=compile, hidden_sizes=[8], **sizes)
            metrics = one.train(64)
            trained.append((np.concatenate([p.detach().numpy().ravel() for p in one.policy.parameters()]), metrics))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 1 <= graphs <= most
    assert not torch._dynamo.utils.counters["graph_break"]
    (plain, reported), (compiled, told_compiled) = trained
    np.testing.assert_allclose(compiled, plain, rtol=0, atol=1e-4)
    assert {name for name in reported if not name.startswith("time/")} == {
        name for name in told_compiled if not name.startswith("time/")
    }
    assert told_compiled["grad_norm"] == pytest.approx(reported["grad_norm"], rel=1e-3)


def test_without_a_compiler_training_continues_with_a_warning(tmp_path):
    command = ["train", "algo=a2c", "compile=true", "hydra.run.dir=run"]
    small = ["total_timesteps=64", "algo.n_steps=8", "env.n_envs=2", "eval.n_episodes=1", "logger=none", "tuned=off"]
    without = {**os.environ, "CXX": "/nowhere/c++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = forked.run(*command, *small, cwd=tmp_path, env=without)
    assert done.returncode == 0, done.stderr
    assert "backend: torch (compile is for PyTorch" in done.stdout
    assert done.stderr.count("compile: continuing without") == 1
    assert (tmp_path / "run/checkpoints/last.safetensors").is_file()


def test_a_native_run_is_not_compiled_by_pytorch():
    with pytest.raises(ValueError, match="backend must be auto or torch here, got 'native': compile is for PyTorch"):
        PPO("CartPole-v1", backend="native", compile=True)
    with pytest.raises(TypeError, match="compile must be true or false, got 1"):
        PPO("CartPole-v1", compile=1)


def test_dropout_of_critics_is_not_compiled():
    with pytest.raises(ValueError, match=r"SAC: compile must be false with dropout=0\.01, outside PyTorch"):
        SAC("Pendulum-v1", compile=True, **preset("droq"))


@pytest.mark.exhaustive  # the C++ compiler takes a minute and a half
def test_a_compiled_world_model_learns_as_without_compilation():
    """The loops over steps are compiled with the rest, once for all updates."""
    sizes = {
        "deter_dim": 16, "hidden_dim": 8, "stoch_dim": 2, "stoch_classes": 4, "batch_size": 2, "seq_len": 3,
        "imagination_horizon": 2, "replay_ratio": 6, "learning_starts": 16, "buffer_size": 200,
    }  # fmt: skip
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for compile in (False, True):
            one = DreamerV3("CartPole-v1", seed=0, compile=compile, **sizes)
            one.train(16)
            assert one.counters.updates == 1
            found.append((one.optimizer.grad.clone(), one.train(3), one.buffer.get_state()["state"]))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    (grad, reported, states), (compiled, with_compiler, compiled_states) = found
    torch.testing.assert_close(compiled, grad, rtol=0, atol=1e-4 * float(grad.abs().max()))
    np.testing.assert_allclose(compiled_states, states, atol=1e-4)
    assert reported.keys() == with_compiler.keys()
