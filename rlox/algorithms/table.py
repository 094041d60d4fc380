"""The table of algorithms.

To add an algorithm, add a Config to `rlox.config`, a file to `rlox.algorithms`, a line below, and a YAML file to
``conf/algo``. Other packages add theirs with an entry point of the group ``rlox.algorithms``,
``name = "module:Class"``.
"""

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from rlox.config import nearest, shown
from rlox.config.offers import load as load_offer
from rlox.config.offers import offers

ALGORITHM_GROUP = "rlox.algorithms"


class Entry(NamedTuple):
    """Location of an algorithm, which is imported when it is first used."""

    cls: str  # "module:Class"
    config: str  # "module:Config"
    discrete: str | None = None  # "module:Class" for environments with discrete actions, if that is another one


ALGORITHMS: dict[str, Entry] = {
    "a2c": Entry("rlox.algorithms.a2c:A2C", "rlox.config.on_policy:A2CConfig"),
    "appo": Entry("rlox.algorithms.appo:APPO", "rlox.config.actor_learner:APPOConfig"),
    "bc": Entry("rlox.algorithms.bc:BC", "rlox.config.offline:BCConfig"),
    "cql": Entry("rlox.algorithms.cql:CQL", "rlox.config.offline:CQLConfig"),
    "dpo": Entry("rlox.algorithms.dpo:DPO", "rlox.config.llm:DPOConfig"),
    "dqn": Entry("rlox.algorithms.dqn:DQN", "rlox.config.off_policy:DQNConfig"),
    "dreamer": Entry("rlox.algorithms.dreamer:DreamerV3", "rlox.config.world_models:DreamerConfig"),
    "grpo": Entry("rlox.algorithms.grpo:GRPO", "rlox.config.llm:GRPOConfig"),
    "impala": Entry("rlox.algorithms.impala:IMPALA", "rlox.config.actor_learner:IMPALAConfig"),
    "iql": Entry("rlox.algorithms.iql:IQL", "rlox.config.offline:IQLConfig"),
    "mappo": Entry("rlox.algorithms.mappo:MAPPO", "rlox.config.on_policy:MAPPOConfig"),
    "online_dpo": Entry("rlox.algorithms.online_dpo:OnlineDPO", "rlox.config.llm:OnlineDPOConfig"),
    "ppo": Entry("rlox.algorithms.ppo:PPO", "rlox.config.on_policy:PPOConfig"),
    "reward_model": Entry("rlox.algorithms.reward_model:RewardModel", "rlox.config.llm:RewardModelConfig"),
    "sac": Entry(
        "rlox.algorithms.sac:SAC", "rlox.config.off_policy:SACConfig", "rlox.algorithms.discrete_sac:DiscreteSAC"
    ),
    "sft": Entry("rlox.algorithms.sft:SFT", "rlox.config.llm:SFTConfig"),
    "td3": Entry("rlox.algorithms.td3:TD3", "rlox.config.off_policy:TD3Config"),
    "td3_bc": Entry("rlox.algorithms.td3_bc:TD3BC", "rlox.config.offline:TD3BCConfig"),
}

_CLASSES = {path.split(":")[1]: path for entry in ALGORITHMS.values() for path in entry if path}

__all__ = [
    "ALGORITHMS",
    "ALGORITHM_GROUP",
    "algorithm_names",
    "class_of",
    "entry_of",
    "load",
    "resolve",
    *sorted(_CLASSES),
]


def algorithm_names() -> list[str]:
    """Return the names of all algorithms, including those of installed packages."""
    return sorted({*ALGORITHMS, *offers(ALGORITHM_GROUP)})


def entry_of(name: str) -> Entry | None:
    """Return the entry of `name`; None if it is unknown. The algorithm of an installed package is imported and added to
    `ALGORITHMS`.

    Raises
    ------
    ImportError
        If the package's code fails.
    TypeError
        If the package's object is not an algorithm class of this name.
    """
    if name not in ALGORITHMS and name in offers(ALGORITHM_GROUP):
        cls, path = load_offer(ALGORITHM_GROUP, name), offers(ALGORITHM_GROUP)[name].value
        if getattr(cls, "name", None) != name or not hasattr(cls, "Config") or not hasattr(cls, "update"):
            raise TypeError(
                f"{ALGORITHM_GROUP}: {name} ({path}) must be a class with name = {name!r}, Config and update, "
                f"got {cls!r}"
            )
        ALGORITHMS[name] = Entry(path, f"{cls.Config.__module__}:{cls.Config.__qualname__}")
    return ALGORITHMS.get(name)


def class_of(name: str, where: str) -> Any:
    """Return the class of the algorithm `name`. Raises ValueError, which begins with `where`, if it is unknown."""
    entry = entry_of(name)
    if entry is None:
        raise ValueError(f"{where}, got {shown(name)}; {nearest(name, algorithm_names())}")
    return resolve(entry.cls)


def load(path: str | os.PathLike, **arguments: Any) -> Any:
    """Return the agent, or the trainer of a language model, that a checkpoint contains.

    Parameters
    ----------
    path : path
        The checkpoint. It names its algorithm.
    **arguments
        As for the ``from_checkpoint`` of the algorithm's class, for example `env_id`, `policy`, `dataset` or `model`.

    Returns
    -------
    Algorithm
        An object of the algorithm's class, which acts as at the time of saving; `train` without arguments continues.

    Raises
    ------
    FileNotFoundError, ValueError
        As ``from_checkpoint``; also for a checkpoint of an unknown algorithm.

    Examples
    --------
    >>> import rlox
    >>> rlox.PPO("CartPole-v1", n_envs=1).save("agent.safetensors")  # doctest: +SKIP
    >>> rlox.load("agent.safetensors").evaluate(10)  # doctest: +SKIP
    """
    from rlox.checkpoint import read_header

    name = read_header(path)["algorithm"]
    return class_of(name, f"load: {path} must contain a known algorithm").from_checkpoint(path, **arguments)


def list_able(is_able: Callable[[Any], bool]) -> str:
    """Return the names of the algorithms that act and have a class for which `is_able` holds, for a message."""
    kinds = {name: [resolve(path) for path in (e.cls, e.discrete) if path] for name, e in ALGORITHMS.items()}
    return ", ".join(
        name.upper() for name, some in kinds.items() if any(hasattr(cls, "actions") and is_able(cls) for cls in some)
    )


def explain_actions(cls: Any, spec: Any) -> str:
    """Return which actions the algorithm class `cls` takes, those of `spec`, and which algorithms take these."""
    entry, kinds = ALGORITHMS.get(cls.name), list(cls.actions)
    if entry is not None and entry.discrete is not None and cls is resolve(entry.cls):
        kinds += resolve(entry.discrete).actions
    able = list_able(lambda other: spec.action_kind in other.actions and other.Config.uses_dataset != "must")
    return f"{' or '.join(kinds)}, got {spec.describe_actions()}; {spec.action_kind} actions are for {able}"


def resolve(path: str):
    """Import and return the object at the path "module:Name"."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def __getattr__(name: str):
    if name not in _CLASSES:
        raise AttributeError(f"module 'rlox.algorithms' has no attribute {name!r}")
    return resolve(_CLASSES[name])
