"""Small algorithms that train within about a second, for tests that all of them must pass."""

from __future__ import annotations

import hashlib

import numpy as np

import rlox
from rlox.algorithms import ALGORITHMS, resolve
from rlox.config import OfflineConfig

OFFLINE = [name for name, entry in ALGORITHMS.items() if issubclass(resolve(entry.config), OfflineConfig)]
# The algorithms for language models are tested in tests/llm.
LANGUAGE = [name for name, entry in ALGORITHMS.items() if resolve(entry.config).uses_dataset == "text"]
ONLINE = [name for name in ALGORITHMS if name not in (*OFFLINE, *LANGUAGE)]
# Algorithms with a native path are also run with PyTorch.
BY_TORCH = [f"{name}-torch" for name in ONLINE if hasattr(resolve(ALGORITHMS[name].cls), "update_native")]
# Those with a class of its own for discrete actions.
DISCRETE = [f"{name}-discrete" for name in ONLINE if ALGORITHMS[name].discrete]
NAMES = [*ONLINE, *DISCRETE, *BY_TORCH]


def entry(name):
    base = ALGORITHMS[name.partition("-")[0]]
    return base._replace(cls=base.discrete) if name in DISCRETE else base


# Settings with which each algorithm finishes a test in about a second.
ON_POLICY = {"n_steps": 16, "hidden_sizes": [16, 16]}
OFF_POLICY = {
    "learning_starts": 40,
    "train_freq": 8,
    "gradient_steps": 2,
    "batch_size": 16,
    "buffer_size": 10_000,
    "hidden_sizes": [16, 16],
}
# One update per round of four steps: an update takes several times as long as those above.
SEQUENCES = {
    "learning_starts": 40,
    "batch_size": 4,
    "seq_len": 4,
    "replay_ratio": 4.0,
    "buffer_size": 10_000,
    "deter_dim": 16,
    "hidden_dim": 8,
    "stoch_dim": 2,
    "stoch_classes": 4,
    "imagination_horizon": 3,
    "warmup_updates": 0,
    "free_nats": 0.0,
}


def off_policy(name) -> bool:
    return resolve(entry(name).config).replays != "nothing"


def of_sequences(name) -> bool:
    return resolve(entry(name).config).replays == "sequences"


def steps(name, n) -> int:
    """`n`, or a quarter of it for a world model, whose updates take longer."""
    return n // 4 if of_sequences(name) else n


def takes(kind) -> list[str]:
    """The algorithms that support actions of this kind."""
    return [name for name in NAMES if kind in resolve(entry(name).cls).actions]


def make(name, env="CartPole-v1", on=None, off=None, **kwargs):
    """A small algorithm; `on` and `off` are settings for on-policy and off-policy algorithms."""
    if env == "CartPole-v1" and name not in takes("discrete"):
        env = "Pendulum-v1"
    family = {**OFF_POLICY, **(off or {})} if off_policy(name) else {**ON_POLICY, **(on or {})}
    if of_sequences(name):
        known = resolve(entry(name).config).__dataclass_fields__
        family = {**SEQUENCES, **{key: value for key, value in (off or {}).items() if key in known}}
    if name in BY_TORCH:
        kwargs["backend"] = "torch"
    return resolve(entry(name).cls)(env, **{"n_envs": 4, "seed": 1, **family, **kwargs})


def fingerprint(algorithm) -> str:
    digest = hashlib.sha256()
    if algorithm.name in OFFLINE:
        parts = algorithm._checkpoint().tensors.values()
    else:
        parts = [algorithm.policy.state_dict(), algorithm.optimizer.state(), *algorithm._own_state()[1].values()]
    for array in (array for part in parts for array in part.values()):
        digest.update(np.ascontiguousarray(array))
    return digest.hexdigest()


def bring_memory(saved, loaded, folder):
    """Copy the replay memory, if there is one, as a run stores it next to the checkpoint."""
    if off_policy(saved.name):
        saved.save_buffer(folder / "a.memory")
        loaded.load_buffer(folder / "a.memory")


def recorded(kind="continuous", n=512, expert=False, seed=0, **options):
    """Episodes of one step of `probes.ReachTheTarget` or `probes.MatchTheSign`, with uniform or optimal actions."""
    rng = np.random.default_rng(seed)
    over = np.ones(n, bool)
    if kind == "continuous":
        obs = rng.uniform(-0.8, 0.8, (n, 1)).astype(np.float32)
        actions = obs if expert else rng.uniform(-1, 1, (n, 1)).astype(np.float32)
        rewards = -np.square(actions - obs)[:, 0]
    else:
        obs = rng.choice([-1.0, 1.0], (n, 1)).astype(np.float32)
        actions = (obs[:, 0] > 0).astype(np.int64) if expert else rng.integers(2, size=n)
        rewards = (actions == (obs[:, 0] > 0)).astype(np.float32)
    return rlox.OfflineDatasetBuffer(obs, obs, actions, rewards, over, ~over, **options)


def learner(name, kind="continuous", dataset=None, **kwargs):
    """A small algorithm on the dataset of the probe."""
    dataset = recorded(kind) if dataset is None else dataset
    sizes = {"act_dim": 1 if kind == "continuous" else 2, "continuous": kind == "continuous"}
    settings = {"hidden_sizes": [16, 16], "batch_size": 16, "seed": 1}
    return resolve(ALGORITHMS[name].cls)(dataset, 1, **sizes, **{**settings, **kwargs})
