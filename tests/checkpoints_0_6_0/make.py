"""The script that wrote the files in this folder, with rlox 0.6.0: ``python make.py FOLDER``.

The run folder was written by ``rlox train algo=dqn env=CartPole-v1 tuned=off total_timesteps=400 algo.hidden_sizes=[8]
algo.batch_size=8 algo.learning_starts=50 buffer.size=300 eval.n_points=2 eval.n_episodes=2 logger=none seed=5``.
"""

import json
import sys
import warnings
from pathlib import Path

import numpy as np

import rlox
from rlox.algorithms import A2C, BC, CQL, DQN, IQL, PPO, SAC, TD3, TD3BC

ON_POLICY = {"n_envs": 2, "seed": 3, "hidden_sizes": [8]}
OFF_POLICY = {"seed": 3, "hidden_sizes": [8], "batch_size": 8, "learning_starts": 20, "buffer_size": 200}
OFFLINE = {"seed": 3, "hidden_sizes": [8], "batch_size": 8, "act_low": -2.0, "act_high": 2.0, "env_id": "Pendulum-v1"}


def dataset():
    rng = np.random.default_rng(0)
    obs, next_obs = rng.standard_normal((2, 64, 3)).astype(np.float32)
    actions, rewards = rng.uniform(-2, 2, (64, 1)).astype(np.float32), rng.standard_normal(64).astype(np.float32)
    return rlox.OfflineDatasetBuffer(obs, next_obs, actions, rewards, np.arange(64) % 16 == 15, np.zeros(64, bool))


def algorithms(backend):
    normalized = {"normalize_obs": True, "normalize_rewards": True, "learning_rate_schedule": "linear"}
    return {
        "ppo": PPO("Pendulum-v1", backend=backend, n_steps=16, **normalized, **ON_POLICY),
        "a2c": A2C("CartPole-v1", backend=backend, **ON_POLICY),
        "dqn": DQN("CartPole-v1", backend=backend, prioritized=True, dueling=True, n_step=3, **OFF_POLICY),
        "sac": SAC("Pendulum-v1", backend=backend, **OFF_POLICY),
        "td3": TD3("Pendulum-v1", backend=backend, **OFF_POLICY),
        "bc": BC(dataset(), 3, 1, backend=backend, **OFFLINE),
        "td3_bc": TD3BC(dataset(), 3, 1, backend=backend, **OFFLINE),
        "iql": IQL(dataset(), 3, 1, backend=backend, **OFFLINE),
        "cql": CQL(dataset(), 3, 1, backend=backend, **OFFLINE),
    }


def main(folder):
    expected = {}
    for backend in ("native", "torch"):
        for name, algorithm in algorithms(backend).items():
            algorithm.train(64 if algorithm.counters.clock == "env_steps" else 20)
            algorithm.save(folder / f"{name}-{backend}.safetensors")
            action = algorithm.predict(np.full((1, 4 if name in ("a2c", "dqn") else 3), 0.25, np.float32))
            c = algorithm.counters
            counts = {"env_steps": c.env_steps, "updates": c.updates, "episodes": c.episodes}
            about = {"observation": 0.25, "action": np.asarray(action).tolist(), "backend": algorithm.backend}
            expected[f"{name}-{backend}"] = {**about, **counts}
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    assert rlox.__version__ == "0.6.0"
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
