"""Recurrent PPO and masked PPO beside sb3-contrib's, with the same settings and the same protocol.

usage: memory_masks.py contrib CELL SEED FOLDER    one training with sb3-contrib (needs nothing of rlox)
       memory_masks.py rlox CELL [OPTION...]        `rlox bench learn` of the same cell, against those trainings
       memory_masks.py list                         the cells, and rlox's settings for each
       memory_masks.py speed PYTHON ROUNDS [CELL...]    CPU seconds of short trainings, alternately with rlox and with
                                                        sb3-contrib, which PYTHON has

A cell is an environment of `peers/environments.py`; the folder memory_masks contains the trainings with sb3-contrib.
Evaluation is that of ``rlox bench learn``: 20 deterministic episodes of one fresh environment seeded 10,000 + seed, at
ten points and at the end, with frozen normalisation; ``cpu_s`` are CPU seconds of training alone, on one thread.

The three cells with hidden velocities have rl-zoo3's tuned settings of ``ppo_lstm``, without its state-dependent
exploration (gSDE), which rlox does not have. InvalidActions has those of sb3-contrib's documentation: defaults, and
gamma 0.4. The others are ours: nobody has published settings for as few steps.

Two things differ. sb3-contrib's LSTM reads the observations and its perceptron the LSTM's output; rlox's perceptron
reads the observations and its LSTM the perceptron's output. A minibatch of sb3-contrib is any stretch of successive
steps, one of rlox consists of sequences of equal length, which `sequence_length` gives; both have `batch_size` steps.
Pendulum was first run with sequences of 32 steps: seeds 100 to 104 were 24.1 [0.5, 51.6] below sb3-contrib's. On seeds
0 to 4, 128 steps (the length of sb3-contrib's stretches) had -204 and 32 had -232, so all ten seeds ran with 128.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
MODULE = "benchmarks.peers.environments"

# Settings by rlox's names.
ZOO = {"memory": "lstm", "memory_size": 64, "hidden_sizes": [64], "activation": "relu", "ortho_init": False,
       "normalize_obs": True, "normalize_rewards": True}  # fmt: skip
POPGYM = {
    "n_envs": 16, "steps": 250_000, "n_steps": 128, "batch_size": 512, "n_epochs": 10, "learning_rate": 1e-3,
    "gamma": 0.99, "gae_lambda": 0.95, "memory": "lstm", "memory_size": 64, "hidden_sizes": [64],
    "activation": "relu", "ortho_init": False,
}  # fmt: skip
CELLS = {
    "InvalidActions-v0": {"n_envs": 1, "steps": 5000, "n_steps": 2048, "gamma": 0.4},
    "CartPoleNoVel-v1": {
        "n_envs": 8, "steps": 100_000, "n_steps": 32, "batch_size": 256, "n_epochs": 20, "learning_rate": 1e-3,
        "learning_rate_schedule": "linear", "clip_eps_schedule": "linear", "gamma": 0.98, "gae_lambda": 0.8, **ZOO,
    },
    "PendulumNoVel-v1": {
        "n_envs": 4, "steps": 100_000, "n_steps": 1024, "batch_size": 128, "n_epochs": 10, "learning_rate": 1e-3,
        "gamma": 0.9, "gae_lambda": 0.95, **ZOO, "sequence_length": 128,
    },
    "MountainCarContinuousNoVel-v0": {
        "n_envs": 8, "steps": 300_000, "n_steps": 1024, "batch_size": 256, "n_epochs": 10, "learning_rate": 7.77e-5,
        "gamma": 0.9999, "gae_lambda": 0.9, "clip_eps": 0.1, "ent_coef": 0.00429, "max_grad_norm": 5.0,
        "vf_coef": 0.19, **ZOO, "memory_size": 32, "activation": "tanh", "sequence_length": 64,
    },
    "ConnectFour-v0": {
        "n_envs": 8, "steps": 100_000, "n_steps": 128, "batch_size": 256, "n_epochs": 10, "ent_coef": 0.01,
    },
    "RepeatPreviousEasy-v0": POPGYM,
    "PositionOnlyCartPoleEasy-v0": POPGYM,
    "AutoencodeEasy-v0": POPGYM,
}  # fmt: skip
# Defaults of sb3-contrib's MaskablePPO, where a cell has no value of its own.
DEFAULTS = {
    "batch_size": 64, "n_epochs": 10, "learning_rate": 3e-4, "gamma": 0.99, "gae_lambda": 0.95, "clip_eps": 0.2,
    "ent_coef": 0.0, "vf_coef": 0.5, "max_grad_norm": 0.5, "hidden_sizes": [64, 64], "activation": "tanh",
    "ortho_init": True, "log_std_init": 0.0, "learning_rate_schedule": "constant", "clip_eps_schedule": "constant",
}  # fmt: skip
SAME_NAME = ("n_steps", "batch_size", "n_epochs", "gamma", "gae_lambda", "ent_coef", "vf_coef", "max_grad_norm")


def count_whole_rollouts(env_id, steps):
    """Return the steps of the whole rollouts that contain at least `steps` steps."""
    rollout = CELLS[env_id]["n_envs"] * CELLS[env_id]["n_steps"]
    return rollout * -(-steps // rollout)


def their_settings(env_id):
    """Return a cell's settings as benchmarks/peers/trainings.py takes them."""
    c = {**DEFAULTS, **CELLS[env_id]}
    policy = {"activation_fn": c["activation"], "ortho_init": c["ortho_init"],
              "net_arch": {"pi": c["hidden_sizes"], "vf": c["hidden_sizes"]}}  # fmt: skip
    if "memory" in c:
        policy |= {"lstm_hidden_size": c["memory_size"], "enable_critic_lstm": True, "log_std_init": c["log_std_init"]}
    arguments = {name: c[name] for name in SAME_NAME}
    for ours, theirs in (("learning_rate", "learning_rate"), ("clip_eps", "clip_range")):
        falls = c[f"{ours}_schedule"] == "linear"
        arguments[theirs] = {"falls_from": c[ours]} if falls else c[ours]
    normalize = {"norm_obs": True, "norm_reward": True, "gamma": c["gamma"]} if "normalize_obs" in c else None
    return {
        "algo": "RecurrentPPO" if "memory" in c else "MaskablePPO",
        "module": "environments",
        "env": env_id,
        "env_kwargs": {},
        "n_envs": c["n_envs"],
        "steps": c["steps"],
        "normalize": normalize,
        "kw": {**arguments, "policy_kwargs": policy},
        "n_points": 10,
        "n_episodes": 20,
    }


def our_words(env_id):
    """Return a cell's settings as words of rlox's command line."""
    c = {**DEFAULTS, **CELLS[env_id]}
    # sb3-contrib always completes a rollout.
    steps = count_whole_rollouts(env_id, c.pop("steps"))
    words = ["algo=ppo", f"env={env_id}", f"env.n_envs={c.pop('n_envs')}", f"total_timesteps={steps}"]
    return words + [f"algo.{name}={json.dumps(value).replace(' ', '')}" for name, value in c.items()]


def time_rlox(env_id):
    """Return the CPU seconds of a short training."""
    import torch

    import benchmarks.peers.environments  # noqa: F401
    from rlox import PPO

    torch.set_num_threads(1)
    c = {**DEFAULTS, **CELLS[env_id]}
    del c["steps"]
    agent = PPO(env_id, seed=0, **c)
    began = time.process_time()
    agent.train(count_whole_rollouts(env_id, 4000))
    return time.process_time() - began


def main(command, *words):
    sys.path.insert(0, str(HERE / "peers"))
    import alternate

    if command == "contrib":
        env_id, seed, folder = words
        alternate.record(f"ppo-{env_id}", their_settings(env_id), int(seed), folder)
    elif command == "rlox":
        env_id, *options = words
        against = ["--against", "sb3", "--reference", str(HERE / "memory_masks"), "--score-only"]
        learn = [sys.executable, "-m", "rlox", "bench", "learn", "--import", MODULE, *our_words(env_id)]
        raise SystemExit(subprocess.run([*learn, *against, *options], cwd=HERE.parent).returncode)
    elif command == "one":
        side, env_id = words
        # An evaluation before the last step of a rollout would miss its update.
        steps = count_whole_rollouts(env_id, 4000) - CELLS[env_id]["n_envs"]
        print(time_rlox(env_id) if side == "rlox" else alternate.time_peer(their_settings(env_id), steps))
    elif command == "speed":
        python, rounds, *chosen = words
        steps = {env_id: count_whole_rollouts(env_id, 4000) for env_id in chosen or CELLS}
        print(json.dumps(alternate.compare_speed(__file__, "contrib", python, int(rounds), steps)))
    elif command == "list":
        for env_id in CELLS:
            print(f"rlox train --import {MODULE}", *our_words(env_id))
    elif command == "--help":
        print(__doc__[__doc__.index("usage:") :])
        raise SystemExit
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(*(sys.argv[1:] or [""]))
