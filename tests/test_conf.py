"""The YAML that ships: complete, minimal, and all of it composes."""

from dataclasses import fields
from importlib.resources import files
from pathlib import Path

import pytest
import yaml

from rlox import config as configs
from rlox import tuned
from rlox.algorithms import ALGORITHMS, resolve
from rlox.config import Config, RunConfig, tuned_pairs
from rlox_cli.compose import compose_jobs
from rlox_cli.show import comments

CONF = Path(str(files("rlox_cli.conf")))


def test_yaml_set_is_the_registry():
    assert {path.stem for path in (CONF / "algo").glob("*.yaml")} == set(ALGORITHMS)
    for name, entry in ALGORITHMS.items():
        assert resolve(entry.cls).name == name
        assert resolve(entry.cls).Config is resolve(entry.config)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_algo_yaml_restates_no_default(name):
    plain = yaml.safe_load((CONF / "algo" / f"{name}.yaml").read_text())
    defaults = resolve(ALGORITHMS[name].config)().to_dict()
    for key, value in plain.items():
        assert key == "defaults" or defaults[key] != value, key


@pytest.mark.parametrize(("algo", "env"), tuned_pairs())
def test_tuned_settings_compose_apply_and_carry_their_reference(algo, env):
    settings = tuned(algo, env)
    assert isinstance(settings["reference"]["mean_return"], float)
    assert settings["reference"]["source"]
    (job,) = compose_jobs([], [f"algo={algo}", f"env={env}"])
    assert job.tuned == f"{algo}/{env}"
    for key, value in settings["algo"].items():
        assert getattr(job.config.algo, key) == value
    assert job.config.env.n_envs == settings["env"]["n_envs"]
    assert job.config.total_timesteps == settings["total_timesteps"]
    (off,) = compose_jobs([], [f"algo={algo}", f"env={env}", "tuned=off"])
    assert off.tuned is None
    assert off.config.algo == resolve(ALGORITHMS[algo].config)()
    (typed,) = compose_jobs([], [f"algo={algo}", f"env={env}", "algo.gamma=0.5", "total_timesteps=7"])
    assert (typed.config.algo.gamma, typed.config.total_timesteps) == (0.5, 7)


@pytest.mark.parametrize("logger", [path.stem for path in (CONF / "logger").glob("*.yaml")])
def test_loggers_compose(logger):
    config = compose_jobs([], [f"logger={logger}"])[0].config.logger
    assert (config.mlflow is not None) is (logger in ("mlflow", "both"))
    assert (config.wandb is not None) is (logger in ("wandb", "both"))


def test_any_gymnasium_id_needs_no_yaml():
    jobs = compose_jobs(["-m"], ["env=Acrobot-v1,MountainCarContinuous-v0", "seed=0,1"])
    assert [(job.config.env.id, job.config.seed) for job in jobs] == [
        ("Acrobot-v1", 0),
        ("Acrobot-v1", 1),
        ("MountainCarContinuous-v0", 0),
        ("MountainCarContinuous-v0", 1),
    ]
    assert all(job.tuned is None for job in jobs)


def test_tuned_of_the_library():
    with pytest.raises(ValueError, match="there are: ppo/CartPole-v1"):
        tuned("ppo", "Nothing-v0")
    with pytest.raises(ValueError, match="no settings ship"):
        tuned("ppo", "../ppo/CartPole-v1")
    assert RunConfig(seed=5).eval_seed == 10_005


@pytest.mark.parametrize("cls", [c for c in vars(configs).values() if isinstance(c, type) and issubclass(c, Config)])
def test_every_field_says_what_it_means(cls):
    assert set(comments(cls)) >= {item.name for item in fields(cls)}
    assert all(len(text) > 10 for text in comments(cls).values())
