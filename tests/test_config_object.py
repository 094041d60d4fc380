"""A configuration passed as one object."""

from __future__ import annotations

from dataclasses import replace

import pytest

import rlox
from rlox import BC, DQN, PPO, BCConfig, DQNConfig, PPOConfig


@pytest.mark.parametrize(
    ("cls", "config", "arguments"),
    [(PPO, PPOConfig(n_steps=32, hidden_sizes=[16]), ("CartPole-v1",)),
     (DQN, DQNConfig(hidden_sizes=[16], learning_starts=10), ("CartPole-v1",)),
     (BC, BCConfig(hidden_sizes=[16]), (None, 3, 1))],
)  # fmt: skip
def test_the_object_is_used_as_the_configuration(cls, config, arguments, tmp_path):
    algorithm = cls(*arguments, config=config)
    assert algorithm.config is config
    algorithm.save(tmp_path / "a.safetensors")
    assert cls.from_checkpoint(tmp_path / "a.safetensors").config == config
    other = replace(config, learning_rate=0.5)
    assert cls.from_checkpoint(tmp_path / "a.safetensors", config=other).config is other
    with pytest.raises(TypeError, match=rf"{cls.__name__}: learning_rate must not be given together with config"):
        cls(*arguments, config=config, learning_rate=0.1)
    with pytest.raises(TypeError, match=rf"{cls.__name__}: config must be a {type(config).__name__}, got "):
        cls(*arguments, config={"learning_rate": 0.1})
    wrong = replace(config, hidden_sizes=[17])
    with pytest.raises(ValueError, match=r"hidden_sizes|fit the checkpoint"):
        cls.from_checkpoint(tmp_path / "a.safetensors", config=wrong)


def test_the_command_line_hands_its_object_over(tmp_path):
    from rlox_cli.config.compose import compose_jobs
    from rlox_cli.run.session import build

    (job,) = compose_jobs([], ["algo=ppo", "env=CartPole-v1"])
    algorithm = build(job.config, "ppo", tmp_path)
    assert algorithm.config is job.config.algo
    assert isinstance(algorithm, rlox.PPO)
