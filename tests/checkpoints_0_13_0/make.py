"""The script that wrote the files in this folder, with rlox 0.13.0: ``PYTHONPATH=tests/helpers python make.py FOLDER``.

As the script of 0.12.0, which it runs, and with what is new in 0.13.0: agents with a memory and masks, and the presets
of SAC and DQN.
"""

import runpy
import sys
import warnings
from pathlib import Path

import torch

import rlox
from rlox.algorithms import ALGORITHMS, resolve

FOLDER = Path(__file__).parent
common = runpy.run_path(str(FOLDER.with_name("checkpoints_0_12_0") / "make.py"))
globals().update({name: common[name] for name in ("load", "train_on", "describe")})

ON_POLICY = common["ON_POLICY"]
OFF_POLICY = common["OFF_POLICY"]
CRITICS = {**OFF_POLICY, "critic_hidden_sizes": [16]}
BLOCKS = {**CRITICS, "hidden_sizes": [4], "critic_hidden_sizes": [8]}
DQN = {**OFF_POLICY, "n_atoms": 5}
SEQUENCES = {"sequence_length": 4, "burn_in": 2}
SMALL = {  # of presets
    "crossq": ("sac", "Pendulum-v1", CRITICS),
    "xqc": ("sac", "Pendulum-v1", {**CRITICS, "n_bins": 11}),
    "tqc": ("sac", "Pendulum-v1", {**CRITICS, "n_quantiles": 5}),
    "droq": ("sac", "Pendulum-v1", {**CRITICS, "gradient_steps": 2, "policy_delay": 2}),
    "redq": ("sac", "Pendulum-v1", {**CRITICS, "gradient_steps": 2, "policy_delay": 2}),
    "flashsac": ("sac", "Pendulum-v1", {**BLOCKS, "n_bins": 11}),
    "qr_dqn": ("dqn", "CartPole-v1", DQN),
    "c51": ("dqn", "CartPole-v1", DQN),
    "rainbow": ("dqn", "CartPole-v1", DQN),
}
MORE = {
    "discrete_sac": ("sac", "CartPole-v1", OFF_POLICY),
    "ppo-lstm": ("ppo", "rlox/TMaze-v0", {**ON_POLICY, "memory": "lstm", "memory_size": 4}),
    "dqn-gru": ("dqn", "rlox/TMaze-v0", {**OFF_POLICY, "memory": "gru", "memory_size": 4, **SEQUENCES}),
    "a2c-masks": ("a2c", "rlox/InvalidActions-v0", ON_POLICY),
}


def make_all():
    """Yield the names of the files and the algorithms that are new in 0.13.0."""
    cases = {name: (algorithm, env, {**rlox.preset(name), **small}) for name, (algorithm, env, small) in SMALL.items()}
    for name, (algorithm, env, settings) in {**cases, **MORE}.items():
        yield name, resolve(ALGORITHMS[algorithm].cls)(env, **settings)


if __name__ == "__main__":
    assert rlox.__version__ == "0.13.0"
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    expected = common["save_all"](folder)
    for key, algorithm in make_all():
        expected[key] = common["save"](folder / f"{key}.safetensors", algorithm, common["STEPS"])
    common["write"](folder, expected)
