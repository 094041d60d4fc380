"""What torchrun starts as two ranks: trains on ranks with a GPU each; writes digests of weights to rank0 and rank1."""

import hashlib
import os
import sys
from pathlib import Path

if os.environ.get("RLOX_PRETEND_CUDA"):
    sys.path.insert(0, os.path.join(os.path.dirname(__file__), os.pardir, "helpers"))
    import pretend_cuda

    pretend_cuda.install()
    pretend_cuda.install_collectives()

import numpy as np

import rlox
from rlox.distributed.ranks import join

SMALL = {"n_envs": 4, "hidden_sizes": [8], "seed": 1, "device": "cuda"}
REPLAY = {**SMALL, "batch_size": 8, "learning_starts": 20, "buffer_size": 500}
TRAININGS = [
    (rlox.PPO, "CartPole-v1", {**SMALL, "n_steps": 16, "batch_size": 16, "normalize_obs": True, "target_kl": 0.05}),
    (rlox.SAC, "Pendulum-v1", REPLAY),
    (rlox.DQN, "CartPole-v1", {**REPLAY, "prioritized": True}),
]

ranks, lines = join(timeout_s=120), []
for cls, env, settings in TRAININGS:
    algorithm = cls(env, **settings)
    algorithm.train(48 if cls in (rlox.SAC, rlox.DQN) else 96)
    weights = algorithm._checkpoint().tensors["policy"]
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(x).tobytes() for x in weights.values())).hexdigest()
    lines.append(f"{cls.__name__} {algorithm.device} {algorithm.counters.updates > 0} {digest[:12]}")
Path(f"rank{ranks.rank}").write_text("\n".join(lines))
ranks.leave()
