"""QR-DQN beside sb3-contrib's and discrete SAC beside tianshou's, with the same settings and the same protocol.

usage: discrete_actions.py peer CELL SEED FOLDER     one training with the peer (needs nothing of rlox)
       discrete_actions.py rlox CELL [OPTION...]     `rlox bench learn` of the same cell, against those trainings
       discrete_actions.py list                      the cells, and rlox's settings for each
       discrete_actions.py speed PYTHON ROUNDS [CELL...]  CPU seconds of short trainings, alternately with rlox and with
                                                     the peer, which PYTHON has
       discrete_actions.py one SIDE CELL             CPU seconds of one short training; SIDE is rlox or peer

A cell is an algorithm and an environment; the folder discrete_actions contains the trainings with the peers. Evaluation
is that of ``rlox bench learn``: 20 deterministic episodes of one fresh environment seeded 10,000 + seed, at ten points
and at the end; ``cpu_s`` are CPU seconds of training alone, on one thread.

Both sides of QR-DQN have rl-zoo3's tuned settings, on LunarLander with fewer quantiles. Those of discrete SAC are not
tuned: rlox's defaults, with smaller networks, larger steps and fewer updates. Its peer needs
``pip install tianshou "gymnasium[box2d]"``.
"""

import json
import math
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent

# rl-zoo3's settings by the peers' names, LunarLander's for version 2; `kw` are those of the algorithm. LunarLander has
# 50 quantiles instead of 170, with which a loss takes the peer 72 ms instead of 5, and 100,000 of them two hours.
CARTPOLE = {
    "learning_rate": 2.3e-3, "batch_size": 64, "buffer_size": 100_000, "learning_starts": 1000, "gamma": 0.99,
    "target_update_interval": 10, "train_freq": 256, "gradient_steps": 128, "exploration_fraction": 0.16,
    "exploration_final_eps": 0.04,
}  # fmt: skip
ACROBOT = {
    "learning_rate": 6.3e-4, "batch_size": 128, "buffer_size": 50_000, "learning_starts": 0, "gamma": 0.99,
    "target_update_interval": 250, "train_freq": 4, "gradient_steps": -1, "exploration_fraction": 0.12,
    "exploration_final_eps": 0.1,
}  # fmt: skip
LANDER = {
    "learning_rate": {"falls_from": 1.5e-3}, "batch_size": 128, "buffer_size": 100_000, "learning_starts": 10_000,
    "gamma": 0.995, "target_update_interval": 1, "train_freq": 256, "gradient_steps": -1, "exploration_fraction": 0.24,
    "exploration_final_eps": 0.18,
}  # fmt: skip
# Discrete SAC; `entropy_fraction` is a part of log(n_actions), and without it the temperature is `ent_coef`.
SAC_CARTPOLE = {
    "learning_rate": 1e-3, "batch_size": 64, "buffer_size": 50_000, "learning_starts": 500, "gamma": 0.99, "tau": 0.02,
    "train_freq": 8, "gradient_steps": 2, "hidden_sizes": [64, 64], "entropy_fraction": 0.5,
    "ent_coef": 1.0, "n_step": 1,
}  # fmt: skip
SAC_LANDER = {
    "learning_rate": 1e-3, "batch_size": 128, "buffer_size": 100_000, "learning_starts": 2000, "gamma": 0.99,
    "tau": 0.01, "train_freq": 16, "gradient_steps": 4, "hidden_sizes": [128, 128], "entropy_fraction": 0.5,
    "ent_coef": 1.0, "n_step": 1,
}  # fmt: skip
CELLS = {
    "qr_dqn-CartPole-v1": {"peer": "QRDQN", "steps": 50_000, "kw": CARTPOLE, "n_quantiles": 10},
    "qr_dqn-Acrobot-v1": {"peer": "QRDQN", "steps": 100_000, "kw": ACROBOT, "n_quantiles": 25},
    "qr_dqn-LunarLander-v3": {"peer": "QRDQN", "steps": 100_000, "kw": LANDER, "n_quantiles": 50},
    "sac-CartPole-v1": {"peer": "DiscreteSAC", "steps": 20_000, "kw": SAC_CARTPOLE, "n_actions": 2, "n_envs": 4},
    "sac-LunarLander-v3": {"peer": "DiscreteSAC", "steps": 100_000, "kw": SAC_LANDER, "n_actions": 4, "n_envs": 8},
}
SHORT = 12_000  # steps of a training whose speed is measured


def their_settings(cell):
    """Return a cell's settings as the programs in benchmarks/peers take them."""
    c = CELLS[cell]
    if c["peer"] == "DiscreteSAC":
        kw = dict(c["kw"])
        fraction = kw.pop("entropy_fraction", None)  # None: the temperature stays at ent_coef
        kw["target_entropy"] = None if fraction is None else fraction * math.log(c["n_actions"])
    else:
        policy = {"activation_fn": "relu", "net_arch": [256, 256], "n_quantiles": c["n_quantiles"]}
        kw = {**c["kw"], "policy_kwargs": policy}
    return {
        "algo": c["peer"],
        "env": cell.split("-", 1)[1],
        "env_kwargs": {},
        "n_envs": c.get("n_envs", 1),
        "steps": c["steps"],
        "normalize": None,
        "kw": kw,
        "n_points": 10,
        "n_episodes": 20,
    }


def our_words(cell):
    """Return a cell's settings as words of rlox's command line, which adds the tuned ones of QR-DQN."""
    algo, env_id = cell.split("-", 1)
    c = CELLS[cell]
    words = [f"algo={algo}", f"env={env_id}", f"total_timesteps={c['steps']}"]
    if algo == "qr_dqn":
        words.append(f"algo.n_atoms={c['n_quantiles']}")
    if algo == "sac":
        sections = {"buffer_size": "buffer.size", "n_step": "buffer.n_step"}
        kw = {sections.get(name, f"algo.{name}"): value for name, value in c["kw"].items()}
        kw |= {"algo.auto_entropy": "entropy_fraction" in c["kw"], "env.n_envs": c["n_envs"]}
        words += ["tuned=off", *(f"{key}={json.dumps(value, separators=(',', ':'))}" for key, value in kw.items())]
    return words


def time_rlox(cell):
    """Return the CPU seconds of a short training."""
    import torch

    from rlox.algorithms import class_of
    from rlox.config import BufferConfig
    from rlox_cli.config.compose import compose_jobs

    torch.set_num_threads(1)
    (job,) = compose_jobs([], our_words(cell))
    run = job.config
    memory = BufferConfig(size=run.buffer.size, n_step=run.buffer.n_step)
    agent = class_of(job.algo, "speed")(run.env.id, n_envs=run.env.n_envs, seed=0, config=run.algo, buffer=memory)
    began = time.process_time()
    agent.train(SHORT, schedule_timesteps=run.total_timesteps)
    return time.process_time() - began


def main(command, *words):
    sys.path.insert(0, str(HERE / "peers"))
    import alternate

    if command == "peer":
        cell, seed, folder = words
        alternate.record(cell, their_settings(cell), int(seed), folder)
    elif command == "rlox":
        cell, *options = words
        against = ["--against", "sb3", "--reference", str(HERE / "discrete_actions"), "--score-only"]
        learn = [sys.executable, "-m", "rlox", "bench", "learn", *our_words(cell)]
        raise SystemExit(subprocess.run([*learn, *against, *options], cwd=HERE.parent).returncode)
    elif command == "one":
        side, cell = words
        print(time_rlox(cell) if side == "rlox" else alternate.time_peer(their_settings(cell), SHORT))
    elif command == "speed":
        python, rounds, *chosen = words
        steps = dict.fromkeys(chosen or CELLS, SHORT)
        print(json.dumps(alternate.compare_speed(__file__, "peer", python, int(rounds), steps)))
    elif command == "list":
        for cell in CELLS:
            print("rlox train", *our_words(cell))
    elif command == "--help":
        print(__doc__[__doc__.index("usage:") :])
        raise SystemExit
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(*(sys.argv[1:] or [""]))
