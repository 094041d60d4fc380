"""`rlox.Trainer`, the common entry point to all algorithms, and configurations as dicts and YAML files."""

import dataclasses
import typing

import numpy as np
import pytest

import rlox
from rlox import config as configs
from rlox.algorithms import ALGORITHMS, PPO, resolve
from rlox.offline.collect import Behaviour, collect

SMALL = {
    "a2c": {"n_envs": 2},
    "ppo": {"n_envs": 2, "n_steps": 16, "batch_size": 16},
    "dqn": {"learning_starts": 10, "batch_size": 8, "buffer_size": 100},
    "sac": {"learning_starts": 10, "batch_size": 8, "buffer_size": 100, "hidden_sizes": [8, 8]},
    "td3": {"learning_starts": 10, "batch_size": 8, "buffer_size": 100, "hidden_sizes": [8, 8]},
}
OFFLINE = sorted(name for name, entry in ALGORITHMS.items() if resolve(entry.config).uses_dataset == "must")


def transitions(n=200):
    rng = np.random.default_rng(0)
    obs, next_obs = rng.normal(size=(2, n, 3)).astype(np.float32)
    actions, rewards = rng.uniform(-2, 2, (n, 1)).astype(np.float32), rng.normal(size=n).astype(np.float32)
    return {
        "obs": obs,
        "next_obs": next_obs,
        "actions": actions,
        "rewards": rewards,
        "terminated": rng.random(n) < 0.05,
        "truncated": np.zeros(n, bool),
    }


@pytest.mark.parametrize("name", SMALL)
def test_trainer_for_each_online_algorithm(name, tmp_path):
    env = "Pendulum-v1" if name in ("sac", "td3") else "CartPole-v1"
    trainer = rlox.Trainer(name, env=env, config=SMALL[name], seed=3)
    metrics = trainer.train(64)
    assert "mean_reward" in metrics
    assert (trainer.env, trainer.algorithm.seed) == (env, 3)
    assert trainer.algo is trainer.algorithm
    trainer.save(tmp_path / "a.safetensors")
    obs = np.zeros(trainer.algorithm.spec.obs_dim, np.float32)
    for again in (
        rlox.Trainer.from_checkpoint(tmp_path / "a.safetensors"),
        rlox.Trainer.load(tmp_path / "a.safetensors", name.upper(), env),
    ):
        assert type(again.algorithm) is type(trainer.algorithm)
        np.testing.assert_array_equal(again.predict(obs), trainer.predict(obs))
        assert again.evaluate(2).summary() == trainer.evaluate(n_episodes=2).summary()


@pytest.mark.parametrize("name", OFFLINE)
def test_trainer_for_each_offline_algorithm(name, tmp_path):
    np.savez(tmp_path / "data.npz", **transitions())
    small = {"hidden_sizes": [8, 8], "batch_size": 8}
    trainer = rlox.Trainer(name, env="Pendulum-v1", dataset=tmp_path / "data.npz", config=small)
    assert np.isfinite(list(trainer.train(5).values())).all()
    assert trainer.algorithm.spec.act_high == 2.0
    assert trainer.predict(np.zeros(3, np.float32)).shape == (1,)
    assert len(trainer.evaluate(1).returns) == 1
    trainer.save(tmp_path / "a.safetensors")
    again = rlox.Trainer.from_checkpoint(tmp_path / "a.safetensors")
    np.testing.assert_array_equal(again.predict(np.ones(3)), trainer.predict(np.ones(3)))
    # A dataset object, and sizes instead of an environment.
    dataset = rlox.open_dataset(tmp_path / "data.npz")
    sizes = {"obs_dim": 3, "act_dim": 1, "act_high": 2.0}
    sized = rlox.Trainer(name, dataset=dataset, config={**small, **sizes})
    sized.train(5)
    np.testing.assert_array_equal(sized.predict(np.ones(3)), trainer.predict(np.ones(3)))
    with pytest.raises(TypeError, match="env must be given, because the dataset does not name"):
        rlox.Trainer(name, dataset=tmp_path / "data.npz")
    with pytest.raises(TypeError, match=f"dataset must be given, because {name} learns from a dataset"):
        rlox.Trainer(name, env="Pendulum-v1")


def test_the_environment_is_taken_from_the_dataset(tmp_path):
    path = tmp_path / "pendulum.arrow"
    env = {"id": "Pendulum-v1", "kwargs": {}, "wrappers": [], "backend": "auto"}
    collect([Behaviour("random", 1.0)], env, 50, path)
    trainer = rlox.Trainer("bc", dataset=str(path), hidden_sizes=[8], batch_size=8)
    assert trainer.env == "Pendulum-v1"
    assert trainer.algorithm.spec.act_high == 2.0


def test_a_trainer_equals_its_algorithm_and_rejects_bad_arguments():
    one = rlox.Trainer("ppo", "CartPole-v1", seed=1, **SMALL["ppo"])
    other = PPO("CartPole-v1", seed=1, **SMALL["ppo"])
    third = rlox.Trainer(PPO, env="CartPole-v1", config=configs.PPOConfig(n_steps=16, batch_size=16), seed=1, n_envs=2)
    found = [algorithm.train(128) for algorithm in (one, other, third)]
    assert found[0]["policy_loss"] == found[1]["policy_loss"] == found[2]["policy_loss"]
    for arguments, error, text in (
        ({"algorithm": "pppo", "env": "CartPole-v1"}, ValueError, "algorithm must be known, got 'pppo'; did you mean"),
        ({"algorithm": 3, "env": "CartPole-v1"}, TypeError, "algorithm must be a name or an algorithm's class, got 3"),
        ({"algorithm": "ppo"}, TypeError, "env must be given, because ppo acts in an environment"),
        ({"algorithm": "ppo", "env": "CartPole-v1", "config": {"seed": 1}, "seed": 2}, TypeError, "seed must be given"),
        ({"algorithm": "ppo", "env": "CartPole-v1", "config": {"clip": 1}}, TypeError, "hyper-parameter 'clip'; did"),
    ):
        with pytest.raises(error, match=text):
            rlox.Trainer(**arguments)


def every_config():
    kinds, found = [configs.Config], []
    while kinds:
        kinds += (kind := kinds.pop()).__subclasses__()
        if kind.__module__ == "rlox.config" and kind not in found:
            found.append(kind)
    return sorted(found, key=lambda kind: kind.__name__)


@pytest.mark.parametrize("cls", every_config())
def test_a_configuration_survives_dicts_and_files(cls, tmp_path):
    needed = {"source": "data.npz"} if cls is configs.DatasetConfig else {}
    if cls is configs.LoggerConfig:
        needed = {"csv": configs.CsvConfig(file="a.csv"), "wandb": configs.WandbConfig(tags=["x"])}
    original = cls(**needed)
    hints = typing.get_type_hints(cls)
    floats = [item.name for item in dataclasses.fields(cls) if hints[item.name] is float]
    if floats and isinstance(getattr(original, floats[0]), float):
        original = dataclasses.replace(original, **{floats[0]: np.float64(getattr(original, floats[0]))})
    if "hidden_sizes" in hints:
        original = dataclasses.replace(original, hidden_sizes=(32, 32))
    assert cls.from_dict(original.to_dict()) == original
    original.to_yaml(tmp_path / "config.yaml")
    assert cls.from_yaml(tmp_path / "config.yaml") == original


def test_errors_in_a_configuration_file_are_named(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("learning_rate: 3e-4\nmax_grad_norm: null\nhidden_sizes: [32]\n")
    read = configs.PPOConfig.from_yaml(path)
    assert (read.learning_rate, read.max_grad_norm, read.hidden_sizes) == (3e-4, None, [32])
    path.write_text("")
    assert configs.PPOConfig.from_yaml(path) == configs.PPOConfig()
    for text, error, says in (
        ("clip_esp: 0.1", TypeError, "PPOConfig: unknown hyper-parameter 'clip_esp'; did you mean 'clip_eps'"),
        ("clip_eps: 2", ValueError, r"PPOConfig: clip_eps must be in \(0, 1\), got 2"),
        ("clip_eps: high", TypeError, "PPOConfig: clip_eps must be of type float, got 'high'"),
        ("[1, 2]", TypeError, r"PPOConfig: a configuration must map fields to values, got \[1, 2\]"),
        ("a: [", ValueError, "PPOConfig.from_yaml: .* must be a YAML file"),
        ("!!python/object/apply:os.getcwd []", ValueError, "must be a YAML file"),
    ):
        path.write_text(text)
        with pytest.raises(error, match=says):
            configs.PPOConfig.from_yaml(path)
    with pytest.raises(TypeError, match="CsvConfig: unknown hyper-parameter 'fil'; did you mean 'file'"):
        configs.LoggerConfig.from_dict({"csv": {"fil": "a.csv"}})


@pytest.mark.parametrize("config", [[1], [], "ppo", 3])
def test_a_config_that_is_not_a_mapping_is_an_error(config):
    with pytest.raises(TypeError, match="Trainer: config must be a mapping of names to values or a Config, got"):
        rlox.Trainer("ppo", env="CartPole-v1", config=config)
