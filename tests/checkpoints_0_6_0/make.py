"""Checkpoints of rlox 0.6.0, one per algorithm and backend: small networks, a few updates, the middle of a training."""

import json
import sys
import warnings
from pathlib import Path

import numpy as np

import rlox
from rlox.algorithms import A2C, BC, CQL, DQN, IQL, PPO, SAC, TD3, TD3BC

assert rlox.__version__ == "0.6.0"
warnings.simplefilter("ignore")
out = Path(sys.argv[1])
ON = dict(n_envs=2, seed=3, n_steps=16, hidden_sizes=[8])
OFF = dict(seed=3, hidden_sizes=[8], batch_size=8, learning_starts=20, buffer_size=200)


def dataset():
    rng = np.random.default_rng(0)
    obs, nxt = rng.standard_normal((2, 64, 3)).astype(np.float32)
    actions, rewards = rng.uniform(-2, 2, (64, 1)).astype(np.float32), rng.standard_normal(64).astype(np.float32)
    never = np.zeros(64, bool)
    return rlox.OfflineDatasetBuffer(obs, nxt, actions, rewards, np.arange(64) % 16 == 15, never)


def offline(kind, **k):
    return kind(
        dataset(), 3, 1, seed=3, hidden_sizes=[8], batch_size=8, act_low=-2.0, act_high=2.0, env_id="Pendulum-v1", **k
    )


expected = {}
for backend in ("native", "torch"):
    made = {
        "ppo": PPO(
            "Pendulum-v1",
            backend=backend,
            normalize_obs=True,
            normalize_rewards=True,
            learning_rate_schedule="linear",
            **ON,
        ),
        "a2c": A2C("CartPole-v1", 2, 3, hidden_sizes=[8], backend=backend),
        "dqn": DQN("CartPole-v1", backend=backend, prioritized=True, dueling=True, n_step=3, **OFF),
        "sac": SAC("Pendulum-v1", backend=backend, **OFF),
        "td3": TD3("Pendulum-v1", backend=backend, **OFF),
        "bc": offline(BC, backend=backend),
        "td3_bc": offline(TD3BC, backend=backend),
        "iql": offline(IQL, backend=backend),
        "cql": offline(CQL, backend=backend),
    }
    for name, algorithm in made.items():
        length = 20 if name in ("bc", "td3_bc", "iql", "cql") else 64
        algorithm.train(length) if algorithm.counters.clock != "env_steps" else algorithm.train(length)
        algorithm.save(out / f"{name}-{backend}.safetensors")
        x = algorithm.predict(np.full((1, 4 if name in ("a2c", "dqn") else 3), 0.25, np.float32))
        c = algorithm.counters
        expected[f"{name}-{backend}"] = {
            "observation": 0.25,
            "action": np.asarray(x).tolist(),
            "backend": algorithm.backend,
            "env_steps": c.env_steps,
            "updates": c.updates,
            "episodes": c.episodes,
        }
(out / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
