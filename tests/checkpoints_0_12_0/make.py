"""The script that wrote the files in this folder, with rlox 0.12.0: ``PYTHONPATH=tests/helpers python make.py FOLDER``.

Each algorithm is trained, saved, loaded again and trained on; ``expected.json`` has what it computed then.
"""

import json
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
import toy

import rlox
from rlox.algorithms import ALGORITHMS, resolve
from rlox.llm.tokens import Sequences

ON_POLICY = {"n_envs": 2, "n_steps": 16, "seed": 3, "hidden_sizes": [8]}
OFF_POLICY = {"n_envs": 2, "seed": 3, "hidden_sizes": [8], "batch_size": 8, "learning_starts": 20, "buffer_size": 200}
OFFLINE = {"seed": 3, "hidden_sizes": [8], "batch_size": 8, "act_low": -2.0, "act_high": 2.0, "env_id": "Pendulum-v1"}
NORMALIZED = {"normalize_obs": True, "normalize_rewards": True, "learning_rate_schedule": "linear"}
ACTORS = {**ON_POLICY, "n_actors": 1, "actor_order": "fixed"}
WORLD = {
    "deter_dim": 16, "hidden_dim": 8, "stoch_dim": 2, "stoch_classes": 4, "batch_size": 2, "seq_len": 4,
    "replay_ratio": 1.0, "learning_starts": 20, "imagination_horizon": 3, "buffer_size": 200, "n_envs": 2, "seed": 3,
}  # fmt: skip
ENVS = {
    "ppo": ("Pendulum-v1", {**ON_POLICY, **NORMALIZED}),
    "a2c": ("CartPole-v1", ON_POLICY),
    "mappo": ("GridPursuit-v0", ON_POLICY),
    "impala": ("CartPole-v1", ACTORS),
    "appo": ("CartPole-v1", ACTORS),
    "dqn": ("CartPole-v1", {**OFF_POLICY, "prioritized": True, "dueling": True, "n_step": 3}),
    "sac": ("Pendulum-v1", OFF_POLICY),
    "td3": ("Pendulum-v1", {**OFF_POLICY, "normalize_obs": True}),
    "dreamer": ("CartPole-v1", WORLD),
}
MODELS = {
    "sft": {"dataset": toy.ROWS},
    "reward_model": {"dataset": toy.PAIRS},
    "dpo": {"dataset": toy.PAIRS},
    "grpo": {"dataset": toy.PROMPTS, "max_new_tokens": 4, "group_size": 3},
    "online_dpo": {"dataset": toy.PROMPTS, "max_new_tokens": 4},
}
ONE_BACKEND = {"impala", "appo", "dreamer"}
STEPS = 64  # before saving, and again after loading


def dataset():
    rng = np.random.default_rng(0)
    obs, next_obs = rng.standard_normal((2, 64, 3)).astype(np.float32)
    actions, rewards = rng.uniform(-2, 2, (64, 1)).astype(np.float32), rng.standard_normal(64).astype(np.float32)
    return rlox.OfflineDatasetBuffer(obs, next_obs, actions, rewards, np.arange(64) % 16 == 15, np.zeros(64, bool))


def lengths(prompts, completions):
    return [float(len(c)) for c in completions]


def prefer_longer(prompts, completions):
    return [None if len(a) == len(b) else int(len(b) > len(a)) for a, b in completions]


FUNCTIONS = {"grpo": {"reward_fn": lengths}, "online_dpo": {"preference_fn": prefer_longer}}


def weights_of(algorithm):
    """The sum of the absolute weights, and how many there are."""
    state = algorithm.policy.state_dict()
    if "encoder.variance" in state:  # 0.12.0 had the mean of squares
        state["encoder.variance"] = state["encoder.variance"] + state["encoder.mean"].square()
    return [sum(float(w.double().abs().sum()) for w in state.values()), sum(w.numel() for w in state.values())]


def answer(algorithm):
    """What a trained algorithm computes for a fixed input."""
    if algorithm.name == "reward_model":
        return np.asarray(algorithm.score_batch(["1+2="], ["03"]), np.float64).tolist()
    if hasattr(algorithm, "log_probs"):
        with torch.no_grad():
            return algorithm.log_probs(Sequences([[2, 3]], [[4, 5]])).flatten().tolist()
    obs_dim = 8 if algorithm.name == "mappo" else algorithm.spec.obs_dim
    acted = algorithm.predict(np.full((1, obs_dim), 0.25, np.float32))
    if isinstance(acted, tuple):  # the action and the next state of a memory
        return np.concatenate([np.ravel(part) for part in acted]).tolist()
    return np.asarray(acted).tolist()


def load(name, path):
    """Load a checkpoint and what is stored beside it."""
    cls, memory = resolve(ALGORITHMS[name].cls), path.with_suffix(".memory")
    if name in MODELS:
        return cls.from_checkpoint(path, dataset=MODELS[name]["dataset"], **FUNCTIONS.get(name, {}))
    if name not in ENVS:
        return cls.from_checkpoint(path, dataset())
    algorithm = cls.from_checkpoint(path)
    if memory.exists():
        algorithm.load_buffer(memory)
    return algorithm


def train_on(algorithm):
    """Train for as long as before the checkpoint was saved."""
    steps = algorithm.counters.steps
    algorithm.train(steps) if algorithm.name in MODELS else algorithm.train(until=2 * steps)


def describe(algorithm):
    c = algorithm.counters
    return {"answer": answer(algorithm), "weights": weights_of(algorithm), "updates": c.updates, "steps": c.steps}


def make(name, backend):
    """Return a new algorithm, and for how long it is trained."""
    cls = resolve(ALGORITHMS[name].cls)
    options = {} if backend is None else {"backend": backend}
    if name in MODELS:
        settings = {"learning_rate": 1e-2, "batch_size": 4, "seed": 3, **MODELS[name], **FUNCTIONS.get(name, {})}
        return cls(toy.model(), tokenizer=toy.tokenizer(), **settings), 3
    if name in ENVS:
        env, settings = ENVS[name]
        return cls(env, **settings, **options), STEPS
    return cls(dataset(), 3, 1, **OFFLINE, **options), STEPS // 4


def save(path, algorithm, n):
    """Train, save, load, train on, and return the expected numbers."""
    name, backend = algorithm.name, getattr(algorithm, "backend", None)
    algorithm.train(n)
    algorithm.save(path)
    if hasattr(algorithm, "save_buffer") and getattr(algorithm, "buffer", None) is not None and name in ENVS:
        algorithm.save_buffer(path.with_suffix(".memory"))
    expected = {"algorithm": name, "backend": None if name in (*MODELS, *ONE_BACKEND) else backend}
    again = load(name, path)
    expected["saved"] = describe(again)
    train_on(again)
    return expected | {"trained": describe(again)}


def save_all(folder):
    """Save every algorithm with every backend; return the expected numbers by the names of the files."""
    expected = {}
    for name in ALGORITHMS:
        for backend in [None] if name in (*MODELS, *ONE_BACKEND) else ["native", "torch"]:
            key = name if backend is None else f"{name}-{backend}"
            expected[key] = save(folder / f"{key}.safetensors", *make(name, backend))
    return expected


def write(folder, expected):
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    assert rlox.__version__ == "0.12.0"
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    write(Path(sys.argv[1]), save_all(Path(sys.argv[1])))
