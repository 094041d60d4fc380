"""`Trainer`, one interface to all algorithms, and trainers for a single algorithm each."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rlox.config import Config, DatasetConfig, shown
from rlox.config.arguments import missing_attribute, refuse_policy_name

if TYPE_CHECKING:
    from rlox.callbacks import History
    from rlox.evaluation.episodes import Evaluation

# Sizes that the constructor of an offline algorithm needs; by default the environment provides them.
_SIZES = ("obs_dim", "act_dim")


class Trainer:
    """``Trainer("ppo", env="CartPole-v1", config={"n_envs": 16}).train(50_000)``; the algorithm is ``.algorithm``.

    Parameters
    ----------
    algorithm : str or class
        A name of `rlox.algorithms.table.ALGORITHMS`, or the class itself.
    env : str or callable, optional
        Environment id, or a callable that returns a ``gymnasium.Env``. An algorithm that learns from a dataset takes
        sizes and bounds from the environment and is evaluated in it; by default it is the environment in which the
        dataset was collected.
    config : mapping or Config, optional
        Hyper-parameters, and further arguments of the class.
    dataset : str, path, DatasetConfig or OfflineDataset, optional
        The dataset, or a source for `rlox.open_dataset`. BC, TD3+BC, IQL and CQL require one; SAC and TD3 can use one.
    **arguments
        As in `config`: ``seed policy logger callbacks device threads n_envs``, and every hyper-parameter.

    Raises
    ------
    TypeError, ValueError
        For an unknown algorithm (with the nearest name), an argument given twice, a missing `env` or `dataset`, or a
        dataset whose environment needs a module that was not imported; otherwise as the algorithm's class.
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
        if cls.Config.uses_dataset == "text":
            raise TypeError(
                "Trainer: algorithm must learn from an environment or a dataset of steps, got "
                f"{cls.name}, which trains a language model; create it with rlox.{cls.__name__}(model, ...)"
            )
        refuse_policy_name("Trainer", "env", env)
        if config is not None and not isinstance(config, (Config, Mapping)):
            raise TypeError(f"Trainer: config must be a mapping of names to values or a Config, got {shown(config)}")
        config = config.to_dict() if isinstance(config, Config) else dict(config or {})
        if twice := sorted(config.keys() & arguments.keys()):
            raise TypeError(f"Trainer: {', '.join(twice)} must be given once, got it in config and as an argument")
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
                raise TypeError(f"Trainer: dataset must be given, because {cls.name} learns from a dataset")
            if not all(name in arguments for name in _SIZES):
                if env is None:
                    raise TypeError(
                        "Trainer: env must be given, because the dataset does not name its environment; or pass "
                        "obs_dim and act_dim in config"
                    )
                arguments = {**offline_sizes(env, arguments.get("env_kwargs"), dataset=dataset), **arguments}
            self.algorithm = cls(dataset, env_id=env, **arguments)
            return
        if env is None:
            raise TypeError(f"Trainer: env must be given, because {cls.name} acts in an environment")
        self.algorithm = cls(env, **arguments, **({} if dataset is None else {"dataset": dataset}))

    @classmethod
    def from_checkpoint(
        cls, path: str | os.PathLike, algorithm: str | type | None = None, env: Any = None, **arguments: Any
    ) -> Trainer:
        """Continue from a checkpoint, which names its algorithm; arguments as for the algorithm's ``from_checkpoint``.

        Raises
        ------
        FileNotFoundError, ValueError
            As the algorithm's ``from_checkpoint``; also for a checkpoint of an unknown algorithm.
        """
        from rlox.algorithms.table import load

        arguments = {**({} if env is None else {"env_id": env}), **arguments}
        trainer = cls.__new__(cls)
        trainer.algorithm = (
            load(path, **arguments) if algorithm is None else _class_of(algorithm).from_checkpoint(path, **arguments)
        )
        return trainer

    load = from_checkpoint

    def __getattr__(self, name: str) -> Any:
        raise missing_attribute(type(self), name)

    @property
    def algo(self) -> Any:
        """Alias of `algorithm`."""
        return self.algorithm

    @property
    def history(self) -> History:
        """The metrics of all trainings (see `Algorithm.history`)."""
        return self.algorithm.history

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.algorithm!r})"

    @property
    def env(self) -> Any:
        """The environment's id, or the callable that was passed instead."""
        return self.algorithm.env_id

    def train(self, total_timesteps: int | None = None, **options: Any) -> dict[str, float]:
        """Train for `total_timesteps` environment steps, or offline updates. Returns the last metrics.

        The `options` are those of the algorithm's ``train``.
        """
        return self.algorithm.train(total_timesteps, **options)

    def predict(self, obs: Any, deterministic: bool = True, *, state: Any = None, mask: Any = None) -> Any:
        """Return the action for an observation, and the state of an agent with a memory (see `Algorithm.predict`)."""
        return self.algorithm.predict(obs, deterministic, state=state, mask=mask)

    def evaluate(self, n_episodes: int = 20, seed: int | None = None, **options: Any) -> Evaluation:
        """Run whole episodes. The `options` are those of `Algorithm.evaluate`."""
        return self.algorithm.evaluate(n_episodes, seed, **options)

    def save(self, path: str | os.PathLike, **options: Any) -> None:
        """Write a checkpoint (see the algorithm's ``save``)."""
        self.algorithm.save(path, **options)


def _require_no_module(env: Any) -> None:
    """Raise ValueError if creating the environment named by a dataset would import a module."""
    from rlox.envs.registry import find_unimported_module

    if isinstance(env, str) and (module := find_unimported_module(env)):
        raise ValueError(
            f"Trainer: env must be given for a dataset that was collected in {shown(env)}, because a file may not "
            f"choose the module {shown(module)} to import; if you trust it, pass env={shown(env)}"
        )


def _class_of(algorithm: str | type) -> type[Any]:
    """Return the class of the algorithm with this name, or the class itself."""
    from rlox.algorithms.table import class_of

    if not isinstance(algorithm, str):
        if not hasattr(algorithm, "Config"):
            raise TypeError(f"Trainer: algorithm must be a name or an algorithm's class, got {algorithm!r}")
        return algorithm
    return class_of(algorithm.lower().replace("-", "_").replace("+", "_"), "Trainer: algorithm must be known")


def offline_sizes(
    env: str | Callable[[], Any],
    kwargs: dict[str, Any] | None = None,
    wrappers: Any = (),
    where: str = "Trainer: env",
    dataset: Any = None,
) -> dict[str, Any]:
    """Return an offline algorithm's constructor arguments from the environment: sizes and action bounds.

    With several agents, these are the sizes and bounds of the agents in the `dataset`.

    Raises
    ------
    ValueError
        If observations are not vectors, if actions have several choices, or for wrappers with several agents.
    """
    from rlox.envs import env_name, make_vec_env
    from rlox.multi_agent import is_multi_agent, make_multi_agent_env
    from rlox.offline.acting import read_group

    vec: Any
    if is_multi_agent(env):
        if wrappers:
            raise ValueError(f"{where}={env}: wrappers must be empty with several agents, got {list(wrappers)}")
        vec = make_multi_agent_env(env, 1, 0, kwargs)
        spec = read_group(vec.spec, dataset).spec
    else:
        vec = make_vec_env(env, 1, 0, kwargs, wrappers)
        spec = vec.spec
    vec.close()
    spec.refuse_mixed_images(f"{where}={env_name(env)}")
    if len(spec.obs_shape) != 1 or spec.n_choices is not None:
        raise ValueError(
            f"{where}={env_name(env)} must have vectors as observations, and numbers or one choice as actions, for an "
            f"algorithm that learns from a dataset; got observations {spec.obs_shape} and {spec.describe_actions()}"
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
    """Trainer for `A2C`, like `PPOTrainer`; takes every field of `rlox.config.A2CConfig`."""

    def __init__(self, env: Any, **kwargs: Any):
        super().__init__("a2c", env, **kwargs)


class DQNTrainer(Trainer):
    """Trainer for `DQN`, like `PPOTrainer`; takes every field of `rlox.config.DQNConfig`, ``buffer`` and its short
    forms."""

    def __init__(self, env: Any, **kwargs: Any):
        super().__init__("dqn", env, **kwargs)


class SACTrainer(Trainer):
    """Trainer for `SAC`, like `PPOTrainer`; takes every field of `rlox.config.SACConfig`, ``buffer`` and its short
    forms."""

    def __init__(self, env: Any, **kwargs: Any):
        super().__init__("sac", env, **kwargs)


class TD3Trainer(Trainer):
    """Trainer for `TD3`, like `PPOTrainer`; takes every field of `rlox.config.TD3Config`, ``buffer`` and its short
    forms."""

    def __init__(self, env: Any, **kwargs: Any):
        super().__init__("td3", env, **kwargs)
