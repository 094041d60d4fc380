"""Is PPO the same algorithm as Stable-Baselines3's? Both train from the same parameters with the same random numbers.

usage: same_numbers.py --peer-python PYTHON [--rollouts 8] [--out FILE]
       PYTHON is an interpreter with stable_baselines3 and gymnasium[mujoco], in the versions that are used here.

It uses HalfCheetah-v5 with the tuned settings (normalised observations and rewards, one environment whose episode is
cut off at 200 steps), except that a minibatch is a whole rollout, so that the order of minibatches does not matter.
rlox trains first and records its initial parameters and the normal deviates behind its actions; SB3 gets both. For each
rollout, the script prints the largest difference in the inputs of the update and in the parameters, and how far the
parameters have moved. The remaining differences are rounding errors, which grow from rollout to rollout, most of all
through the contacts of the simulation.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import gymnasium
import numpy as np
from gymnasium.envs.mujoco.half_cheetah_v5 import HalfCheetahEnv

ENV = "SameNumbersHalfCheetah-v5"
COLUMNS = ("obs", "actions", "values", "log_probs", "advantages", "returns")
# SB3's names of the layers.
LAYERS = {
    "actor.0": "mlp_extractor.policy_net.0",
    "actor.2": "mlp_extractor.policy_net.2",
    "actor.4": "action_net",
    "critic.0": "mlp_extractor.value_net.0",
    "critic.2": "mlp_extractor.value_net.2",
    "critic.4": "value_net",
}


class Cheetah(HalfCheetahEnv):
    """HalfCheetah whose episode k always starts the same, whichever library resets it."""

    n_episodes = 0

    def reset(self, *, seed=None, options=None):
        self.n_episodes += 1
        return super().reset(seed=self.n_episodes, options=options)


gymnasium.register(ENV, entry_point=Cheetah, max_episode_steps=200)


def ours(n_rollouts: int, seed: int) -> dict[str, np.ndarray]:
    """Return what rlox collected, rollout by rollout, and the parameters it collected it with."""
    import torch

    import rlox
    from rlox.callbacks import Callback

    config = {**rlox.tuned("ppo", "HalfCheetah-v5")["algo"]}
    config["batch_size"] = config["n_steps"]
    found = {"config": np.array(json.dumps(config))}

    class Keep(Callback):
        n = 0

        def on_rollout_end(self, algorithm, batch, **_):
            policy, k = algorithm.policy, self.n
            columns = {name: torch.as_tensor(getattr(batch, name)).numpy().copy() for name in COLUMNS}
            with torch.no_grad():
                mean = policy.actor(torch.as_tensor(columns["obs"])).numpy()
                parameters = {name: value.numpy().copy() for name, value in policy.named_parameters()}
            deviates = (columns["actions"] - mean) / np.exp(parameters["log_std"])
            found.update({f"{name}/{k}": value for name, value in {**columns, "deviates": deviates}.items()})
            found.update({f"parameters/{k}/{name}": value for name, value in parameters.items()})
            self.n += 1

    agent = rlox.PPO(ENV, n_envs=1, seed=seed, callbacks=[Keep()], **config)
    agent.train(n_rollouts * config["n_steps"])
    return found


def theirs(path: Path) -> list[dict[str, float]]:
    """Train SB3 with the numbers in `path`, and return the largest differences, a row for each rollout."""
    import stable_baselines3 as sb3
    import torch
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.distributions import DiagGaussianDistribution
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    torch.set_num_threads(1)
    given = dict(np.load(path))
    c = json.loads(str(given["config"]))
    env = VecNormalize(DummyVecEnv([lambda: gymnasium.make(ENV)]), gamma=c["gamma"])
    names = ("n_steps", "batch_size", "n_epochs", "learning_rate", "gamma", "gae_lambda", "ent_coef", "vf_coef")
    widths = c["hidden_sizes"]
    agent = sb3.PPO(
        "MlpPolicy",
        env,
        device="cpu",
        clip_range=c["clip_eps"],
        max_grad_norm=c["max_grad_norm"],
        policy_kwargs={
            "log_std_init": c["log_std_init"],
            "ortho_init": c["ortho_init"],
            "activation_fn": {"relu": torch.nn.ReLU, "tanh": torch.nn.Tanh}[c["activation"]],
            "net_arch": {"pi": widths, "vf": widths},
        },
        **{name: c[name] for name in names},
    )
    own = dict(agent.policy.named_parameters())

    def parameter(name: str):
        layer, _, kind = name.rpartition(".")
        return own[f"{LAYERS[layer]}.{kind}" if layer else name]

    parameters = [name.removeprefix("parameters/0/") for name in given if name.startswith("parameters/0/")]
    with torch.no_grad():
        for name in parameters:
            parameter(name).copy_(torch.as_tensor(given[f"parameters/0/{name}"]))
    deviates = np.concatenate([given[f"deviates/{k}"] for k in range(len(given)) if f"deviates/{k}" in given])
    drawn = iter(torch.as_tensor(deviates)[:, None])
    DiagGaussianDistribution.sample = lambda self: self.distribution.mean + self.distribution.stddev * next(drawn)
    rows: list[dict[str, float]] = []

    class Compare(BaseCallback):
        def _on_step(self):
            return True

        def _on_rollout_end(self):
            buffer, k = self.model.rollout_buffer, len(rows)
            held = {"obs": buffer.observations, **{name: getattr(buffer, name) for name in COLUMNS[1:]}}
            row = {name: float(abs(held[name].ravel() - given[f"{name}/{k}"].ravel()).max()) for name in COLUMNS}
            now = {name: given[f"parameters/{k}/{name}"] for name in parameters}
            row["parameters"] = max(float(abs(v - parameter(n).detach().numpy()).max()) for n, v in now.items())
            row["moved"] = max(float(abs(v - given[f"parameters/0/{n}"]).max()) for n, v in now.items())
            rows.append(row)

    agent.learn(len(deviates), callback=Compare())
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", type=Path)
    parser.add_argument("--rollouts", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON")
    parser.add_argument("--given", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.given:
        print(json.dumps(theirs(args.given)))
        return
    if args.peer_python is None:
        parser.error("--peer-python must name an interpreter that has stable_baselines3")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "given.npz"
        np.savez(path, **ours(args.rollouts, args.seed))
        command = [args.peer_python, Path(__file__).resolve(), "--given", path]
        # In another folder, so that the peer does not find this library.
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=folder)
    rows = json.loads(done.stdout.splitlines()[-1])
    print(f"{'rollout':>7} " + " ".join(f"{name:>11}" for name in rows[0]))
    for k, row in enumerate(rows):
        print(f"{k:>7} " + " ".join(f"{value:>11.2g}" for value in row.values()))
    if args.out:
        from rlox.checkpoint import versions
        from rlox_cli.bench.machine import provenance

        command = (
            f"python benchmarks/same_numbers.py --rollouts {args.rollouts} --seed {args.seed} --peer-python PYTHON"
        )
        args.out.write_text(json.dumps({**provenance(command), "versions": versions(), "rollouts": rows}) + "\n")


if __name__ == "__main__":
    sys.exit(main())
