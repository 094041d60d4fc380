"""The table of algorithms.

Adding one: a Config in `rlox.config`, a file here, a line below, a YAML in ``conf/algo``.
"""

from importlib import import_module
from typing import NamedTuple


class Entry(NamedTuple):
    """Where an algorithm lives; imported when it is first used."""

    cls: str  # "module:Class"
    config: str  # "module:Config"


ALGORITHMS: dict[str, Entry] = {
    "a2c": Entry("rlox.algorithms.a2c:A2C", "rlox.config.on_policy:A2CConfig"),
    "bc": Entry("rlox.algorithms.bc:BC", "rlox.config.offline:BCConfig"),
    "cql": Entry("rlox.algorithms.cql:CQL", "rlox.config.offline:CQLConfig"),
    "dqn": Entry("rlox.algorithms.dqn:DQN", "rlox.config.off_policy:DQNConfig"),
    "iql": Entry("rlox.algorithms.iql:IQL", "rlox.config.offline:IQLConfig"),
    "ppo": Entry("rlox.algorithms.ppo:PPO", "rlox.config.on_policy:PPOConfig"),
    "sac": Entry("rlox.algorithms.sac:SAC", "rlox.config.off_policy:SACConfig"),
    "td3": Entry("rlox.algorithms.td3:TD3", "rlox.config.off_policy:TD3Config"),
    "td3_bc": Entry("rlox.algorithms.td3_bc:TD3BC", "rlox.config.offline:TD3BCConfig"),
}

_CLASSES = {path.split(":")[1]: path for entry in ALGORITHMS.values() for path in entry}

__all__ = ["ALGORITHMS", "resolve", *sorted(_CLASSES)]


def resolve(path: str):
    """The object that "module:Name" names."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def __getattr__(name: str):
    if name not in _CLASSES:
        raise AttributeError(f"module 'rlox.algorithms' has no attribute {name!r}")
    return resolve(_CLASSES[name])
