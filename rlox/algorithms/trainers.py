"""One door to all algorithms: `Trainer`, and the documents' trainers of one algorithm each."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rlox.config import Config, DatasetConfig, nearest, shown

if TYPE_CHECKING:
    from rlox.collectors.evaluation import Evaluation

# Sizes and bounds that an algorithm which learns from a dataset must be given; the environment has them.
_SIZES = ("obs_dim", "act_dim")


class Trainer:
    """``Trainer("ppo", env="CartPole-v1", config={"n_envs": 16}).train(50_000)``; the algorithm is ``.algorithm``.

    Parameters
    ----------
    algorithm : str or class
        A name of `rlox.training.table.ALGORITHMS`, or the class itself.
    env : str or callable, optional
        Environment id, or a callable that returns a ``gymnasium.Env``. An algorithm that learns from a dataset takes
        its sizes and bounds from it, and is evaluated on it; by default it is the one that the dataset was gathered in.
    config : mapping or Config, optional
        Hyper-parameters, and further arguments of the class.
    dataset : str, path, DatasetConfig or OfflineDataset, optional
        What BC, TD3+BC, IQL and CQL learn from, and SAC and TD3 may: what `rlox.open_dataset` takes, or the dataset.
    **arguments
        As in `config`: ``seed policy logger callbacks device threads n_envs``, and every hyper-parameter.

    Raises
    ------
    TypeError, ValueError
        For an unknown algorithm (with the nearest name), an argument that is given twice, a missing `env` or
        `dataset`, a dataset whose environment is of a module that was not imported; and as the algorithm's class.
    """

    def __init__(
        self,
        algorithm: str | type,
        env: str | Callable[[], Any] | None = None,
        config: Mapping[str, Any] | Config | None = None,
        *,
        dataset: Any = None,
        **arguments: Any,
    ):
        cls = _class_of(algorithm)
        if config is not None and not isinstance(config, (Config, Mapping)):
            raise TypeError(f"Trainer: config must be a mapping of names to values or a Config, got {shown(config)}")
        config = config.to_dict() if isinstance(config, Config) else dict(config or {})
        if twice := sorted(config.keys() & arguments.keys()):
            raise TypeError(f"Trainer: {', '.join(twice)} must be given once, got config and an argument of that name")
        arguments |= config
        if isinstance(dataset, (str, os.PathLike, DatasetConfig)):
            from rlox.offline.dataset import dataset_metadata, open_dataset

            source = dataset.source if isinstance(dataset, DatasetConfig) else dataset
            dataset = open_dataset(dataset)
            if env is None and cls.Config.uses_dataset == "must":
                env = dataset_metadata(source).get("env", {}).get("id")
                _require_no_module(env)
        if cls.Config.uses_dataset == "must":
            if dataset is None:
                raise TypeError(f"Trainer: dataset must be given, for {cls.name} learns from one")
            if not all(name in arguments for name in _SIZES):
                if env is None:
                    raise TypeError(
                        "Trainer: env must be given, for the dataset does not say which it was gathered in; or pass "
                        "obs_dim and act_dim in config"
                    )
                arguments = {**offline_sizes(env, arguments.get("env_kwargs"), dataset=dataset), **arguments}
            self.algorithm = cls(dataset, env_id=env, **arguments)
            return
        if env is None:
            raise TypeError(f"Trainer: env must be given, for {cls.name} acts in one")
        self.algorithm = cls(env, **arguments, **({} if dataset is None else {"dataset": dataset}))

    @classmethod
    def from_checkpoint(
        cls, path: str | os.PathLike, algorithm: str | type | None = None, env: Any = None, **arguments: Any
    ) -> Trainer:
        """Go on from a checkpoint, which says whose it is; arguments as ``from_checkpoint`` of the algorithm has them.

        Raises
        ------
        FileNotFoundError, ValueError
            As ``from_checkpoint`` of the algorithm; also for a checkpoint of an algorithm that is not known here.
        """
        from rlox.checkpoint import load_checkpoint

        kind = _class_of(load_checkpoint(path).header["algorithm"] if algorithm is None else algorithm)
        trainer = cls.__new__(cls)
        trainer.algorithm = kind.from_checkpoint(path, **({} if env is None else {"env_id": env}), **arguments)
        return trainer

    load = from_checkpoint

    @property
    def algo(self) -> Any:
        """`algorithm`, by the documents' word."""
        return self.algorithm

    @property
    def env(self) -> Any:
        """The environment's id, or what was given for it."""
        return self.algorithm.env_id

    def train(self, total_timesteps: int | None = None, **options: Any) -> dict[str, float]:
        """Train for `total_timesteps` environment steps, or offline updates; returns the last metrics.

        See ``train`` of the algorithm, which takes the `options`.
        """
        return self.algorithm.train(total_timesteps, **options)

    def predict(self, obs: Any, deterministic: bool = True) -> np.ndarray | int:
        """Action for an observation (see `Algorithm.predict`)."""
        return self.algorithm.predict(obs, deterministic)

    def evaluate(self, n_episodes: int = 20, seed: int | None = None, **options: Any) -> Evaluation:
        """Play whole episodes (see `Algorithm.evaluate`, which takes the `options`)."""
        return self.algorithm.evaluate(n_episodes, seed, **options)

    def save(self, path: str | os.PathLike, **options: Any) -> None:
        """Write a checkpoint (see ``save`` of the algorithm)."""
        self.algorithm.save(path, **options)


def _require_no_module(env: Any) -> None:
    """A ValueError for the id of an environment that a dataset names, where making it would import a module."""
    from rlox.envs.registry import unimported_module

    if isinstance(env, str) and (module := unimported_module(env)):
        raise ValueError(
            f"Trainer: env must be given for a dataset that was gathered in {shown(env)}, since a file may not choose "
            f"the module {shown(module)} to import; if you trust it, pass env={shown(env)}"
        )


def _class_of(algorithm: str | type) -> type[Any]:
    """The class of an algorithm by its name, or itself."""
    from rlox.training.table import algorithm_names, entry_of, resolve

    if not isinstance(algorithm, str):
        if not hasattr(algorithm, "Config"):
            raise TypeError(f"Trainer: algorithm must be a name or an algorithm's class, got {algorithm!r}")
        return algorithm
    name = algorithm.lower().replace("-", "_").replace("+", "_")
    entry = entry_of(name)
    if entry is None:
        raise ValueError(f"Trainer: algorithm must be known, got {algorithm!r}; {nearest(name, algorithm_names())}")
    return resolve(entry.cls)


def offline_sizes(
    env: str | Callable[[], Any],
    kwargs: dict[str, Any] | None = None,
    wrappers: Any = (),
    where: str = "Trainer: env",
    dataset: Any = None,
) -> dict[str, Any]:
    """What the constructor of an offline algorithm is given of the environment: its sizes, and the actions' bounds.

    With several agents they are those of the agents that the `dataset` shows.

    Raises
    ------
    ValueError
        For one whose observations are no vectors, or whose actions are several choices; for wrappers of one with
        several agents.
    """
    from rlox.envs import env_name, make_vec_env, spec_of
    from rlox.multi_agent import is_multi_agent, make_multi_agent_env
    from rlox.offline.acting import recorded_group

    vec: Any
    if is_multi_agent(env):
        if wrappers:
            raise ValueError(f"{where}={env}: wrappers must be empty with several agents, got {list(wrappers)}")
        vec = make_multi_agent_env(env, 1, 0, kwargs)
        spec = recorded_group(vec.spec, dataset).spec
    else:
        vec = make_vec_env(env, 1, 0, kwargs, wrappers)
        spec = spec_of(vec)
    if hasattr(vec, "close"):
        vec.close()
    spec.refuse_mixed_images(f"{where}={env_name(env)}")
    if len(spec.obs_shape) != 1 or spec.n_choices is not None:
        raise ValueError(
            f"{where}={env_name(env)} must have vectors for observations, and numbers or one choice for actions, where "
            f"the algorithm learns from a dataset; got observations {spec.obs_shape} and {spec.describe_actions()}"
        )
    bounds = {"act_low": spec.act_low, "act_high": spec.act_high} if spec.continuous else {}
    sizes = {"obs_dim": spec.obs_dim, "act_dim": spec.act_dim or spec.n_actions}
    return {**sizes, "continuous": spec.continuous, **bounds}


class PPOTrainer(Trainer):
    """``PPOTrainer(env="CartPole-v1", seed=42).train(total_timesteps=50_000)``; the algorithm itself is ``.algorithm``.

    Parameters
    ----------
    env : str or callable
        Environment id, or a callable that returns a ``gymnasium.Env``.
    **kwargs
        Everything `rlox.algorithms.PPO` takes: ``n_envs seed policy logger callbacks device threads`` and every field
        of `rlox.config.PPOConfig`.
    """

    def __init__(self, env: Any, **kwargs: Any):
        super().__init__("ppo", env, **kwargs)


class A2CTrainer(Trainer):
    """`A2C` as `PPOTrainer` is PPO; every field of `rlox.config.A2CConfig`."""

    def __init__(self, env: Any, **kwargs: Any):
        super().__init__("a2c", env, **kwargs)


class DQNTrainer(Trainer):
    """`DQN` as `PPOTrainer` is PPO; every field of `rlox.config.DQNConfig`, and ``buffer`` and its short forms."""

    def __init__(self, env: Any, **kwargs: Any):
        super().__init__("dqn", env, **kwargs)


class SACTrainer(Trainer):
    """`SAC` as `PPOTrainer` is PPO; every field of `rlox.config.SACConfig`, and ``buffer`` and its short forms."""

    def __init__(self, env: Any, **kwargs: Any):
        super().__init__("sac", env, **kwargs)


class TD3Trainer(Trainer):
    """`TD3` as `PPOTrainer` is PPO; every field of `rlox.config.TD3Config`, and ``buffer`` and its short forms."""

    def __init__(self, env: Any, **kwargs: Any):
        super().__init__("td3", env, **kwargs)
