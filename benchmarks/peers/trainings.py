"""Run and time one training with one system, under any interpreter that has it; `rlox bench train` starts this.

``python trainings.py REQUEST`` takes a JSON object ``{"system", "case", "steps", "seed", "threads"}`` and prints
another one on its last line: ``cpu_s`` and ``wall_s`` of the training call alone (imports and construction excluded),
the ``steps`` it took, ``mean_return`` of its last 100 training episodes (null if the system reports none),
``eval_return``, the mean of 20 deterministic episodes in gymnasium, the ``versions``, for rlox the ``shares`` of that
time by section, and for the case ``solve`` whether it is ``solved``. With ``"whole": true`` it works like a user's
script (training, ten evaluations of 20 episodes, a saved model) without a clock, and prints the last evaluation's
``eval_return``; the caller measures the time. For Stable-Baselines3, ``"curve": SETTINGS`` (see `rlox_cli.bench.sb3`)
with a ``seed`` and an ``eval_seed`` runs a training and prints its ``evaluations``.

Settings are the same in every system; only their names differ.
"""

import json
import sys
import time
import warnings

ENV = "CartPole-v1"
# PPO, except in the cases ``solve`` and ``process``.
PPO = {
    "n_steps": 128, "n_epochs": 4, "batch_size": 256, "learning_rate": 2.5e-4, "gamma": 0.99, "gae_lambda": 0.95,
    "ent_coef": 0.01, "vf_coef": 0.5, "max_grad_norm": 0.5,
}  # fmt: skip
# rl-zoo3's settings for CartPole-v1, which are also in conf/tuned/ppo: learning rate and clipping fall to 0.
TUNED = {
    "n_steps": 32, "n_epochs": 20, "batch_size": 256, "learning_rate": 1e-3, "gamma": 0.98, "gae_lambda": 0.8,
    "ent_coef": 0.0, "vf_coef": 0.5, "max_grad_norm": 0.5,
}  # fmt: skip
A2C = {
    "n_steps": 5, "learning_rate": 7e-4, "gamma": 0.99, "gae_lambda": 1.0, "ent_coef": 0.01, "vf_coef": 0.5,
    "max_grad_norm": 0.5,
}  # fmt: skip
# DQN with an update for each step; without double DQN, which not all systems have.
DQN = {
    "learning_rate": 1e-4, "buffer_size": 50_000, "batch_size": 64, "gamma": 0.99, "learning_starts": 1000,
    "train_freq": 1, "gradient_steps": 1, "exploration_fraction": 0.1, "exploration_initial_eps": 1.0,
    "exploration_final_eps": 0.05, "max_grad_norm": 10.0,
}  # fmt: skip
DQN_HIDDEN, DQN_TARGET_EVERY = 256, 1000
# rl-zoo3's settings for Pendulum-v1, with a quarter of its batch.
SAC = {
    "learning_rate": 1e-3, "buffer_size": 50_000, "batch_size": 64, "gamma": 0.99, "tau": 0.005, "learning_starts": 100,
    "train_freq": 1, "gradient_steps": 1,
}  # fmt: skip
SAC_ENV = "Pendulum-v1"
N_ENVS = 8
SOLVED = 475.0  # mean return of the last 100 episodes


def evaluated(predict, n_episodes=20, seed=10_000, env_id=ENV):
    """Return the mean return of deterministic episodes in gymnasium's own environment."""
    import gymnasium
    import numpy as np

    env = gymnasium.make(env_id)
    continuous = env.action_space.shape != ()
    total = 0.0
    for k in range(n_episodes):
        obs, _ = env.reset(seed=seed + k)
        done = False
        while not done:
            action = predict(obs)
            action = np.asarray(action, np.float32).reshape(-1) if continuous else int(action)
            obs, reward, terminated, truncated, _ = env.step(action)
            total += float(reward)
            done = terminated or truncated
    return total / n_episodes


def custom_policy():
    """Return a user's own module, as written with PyTorch alone: 64-64 tanh, separate actor and critic."""
    import torch
    from torch import nn

    class Custom(nn.Module):
        def __init__(self):
            super().__init__()
            self.pi = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
            self.v = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

        def get_action_and_logprob(self, obs):
            d = torch.distributions.Categorical(logits=self.pi(obs))
            action = d.sample()
            return action, d.log_prob(action)

        def get_value(self, obs):
            return self.v(obs).squeeze(-1)

        def mode(self, obs):
            return self.pi(obs).argmax(-1)

        def get_logprob_and_entropy(self, obs, actions):
            d = torch.distributions.Categorical(logits=self.pi(obs))
            return d.log_prob(actions), d.entropy()

    return Custom()


class Rlox:
    """rlox on its native path."""

    backend = "native"

    def versions(self):
        import rlox
        from rlox.kernels import CPU_LEVEL

        return {"rlox": rlox.__version__, "cpu_level": CPU_LEVEL}

    def build(self, case, seed, threads):
        from rlox.algorithms import A2C as A2CAlgorithm
        from rlox.algorithms import DQN as DQNAlgorithm
        from rlox.algorithms import PPO as PPOAlgorithm
        from rlox.algorithms import SAC as SACAlgorithm
        from rlox.callbacks import Callback, TimingCallback

        class Solved(Callback):
            def on_step(self, *, reward, algorithm, **info):
                return not (len(algorithm.counters.recent_returns) == 100 and reward >= SOLVED)

        self.timing = TimingCallback()
        options = {
            "n_envs": N_ENVS,
            "seed": seed,
            "threads": threads,
            "backend": self.backend,
            "callbacks": [self.timing],
        }
        if case == "a2c":
            return A2CAlgorithm(ENV, **options, **A2C)
        if case == "dqn":
            plain = {"double_dqn": False, "hidden_sizes": [DQN_HIDDEN] * 2, "target_update_freq": DQN_TARGET_EVERY}
            return DQNAlgorithm(ENV, **{**options, "n_envs": 1}, **plain, **DQN)
        if case == "sac":
            return SACAlgorithm(SAC_ENV, **{**options, "n_envs": 1}, **SAC)
        if case == "solve":
            options["callbacks"].append(Solved())
            schedules = {"learning_rate_schedule": "linear", "clip_eps": 0.2, "clip_eps_schedule": "linear"}
            return PPOAlgorithm(ENV, **options, **TUNED, **schedules)
        policy = custom_policy() if case == "custom" else None
        return PPOAlgorithm(ENV, policy=policy, **options, **PPO, learning_rate_schedule="linear", clip_eps=0.2)

    def train(self, steps):
        self.algorithm.train(steps)

    def result(self):
        counters = self.algorithm.counters
        shares = {name: share for name, share in self.timing.summary().items() if name != "total_s"}
        return {"steps": counters.env_steps, "mean_return": counters.mean_reward, "shares": shares}

    def predict(self, obs):
        return self.algorithm.predict(obs)


class RloxTorch(Rlox):
    """rlox on its PyTorch path, which supports custom modules and losses."""

    backend = "torch"


class RloxHybrid(Rlox):
    """rlox's HybridPPO, which collects in a separate thread."""

    def build(self, case, seed, threads):
        from rlox.algorithms.hybrid_ppo import HybridPPO

        options = {"learning_rate_schedule": "linear", "clip_eps": 0.2}
        return HybridPPO(ENV, n_envs=N_ENVS, seed=seed, hidden=64, **PPO, **options)

    def result(self):
        counters = self.algorithm.algorithm.counters
        shares = {name: share for name, share in self.algorithm.timing_summary().items() if name != "total_s"}
        return {"steps": counters.env_steps, "mean_return": counters.mean_reward, "shares": shares}


class SB3:
    def versions(self):
        import stable_baselines3
        import torch

        return {"stable_baselines3": stable_baselines3.__version__, "torch": torch.__version__}

    def build(self, case, seed, threads):
        import stable_baselines3 as sb3
        import torch
        from stable_baselines3.common.callbacks import BaseCallback
        from stable_baselines3.common.env_util import make_vec_env

        class Solved(BaseCallback):
            def _on_step(self):
                if self.n_calls % TUNED["n_steps"]:
                    return True
                returns = [e["r"] for e in self.model.ep_info_buffer]
                return not (len(returns) == 100 and sum(returns) / 100 >= SOLVED)

        torch.set_num_threads(threads)
        single = case in ("dqn", "sac")
        env = make_vec_env(SAC_ENV if case == "sac" else ENV, 1 if single else N_ENVS, seed=seed)
        self.callback = Solved() if case == "solve" else None
        options = {"seed": seed, "device": "cpu"}
        if case == "a2c":
            return sb3.A2C("MlpPolicy", env, **options, **A2C)
        if case == "dqn":
            nets = {"policy_kwargs": {"net_arch": [DQN_HIDDEN] * 2}, "target_update_interval": DQN_TARGET_EVERY}
            return sb3.DQN("MlpPolicy", env, **options, **nets, **DQN)
        if case == "sac":
            return sb3.SAC("MlpPolicy", env, **options, **SAC)
        settings = dict(TUNED if case in ("solve", "process") else PPO)
        start = settings.pop("learning_rate")
        clip = (lambda left: 0.2 * left) if case in ("solve", "process") else 0.2
        return sb3.PPO(
            "MlpPolicy", env, **options, **settings, learning_rate=lambda left: start * left, clip_range=clip
        )

    def train(self, steps):
        self.algorithm.learn(steps, callback=self.callback)

    def result(self):
        returns = [e["r"] for e in self.algorithm.ep_info_buffer]
        return {"steps": self.algorithm.num_timesteps, "mean_return": sum(returns) / max(1, len(returns))}

    def predict(self, obs):
        return self.algorithm.predict(obs, deterministic=True)[0]

    def whole(self, steps, seed):
        import os
        import tempfile

        from stable_baselines3.common.callbacks import EvalCallback
        from stable_baselines3.common.env_util import make_vec_env
        from stable_baselines3.common.logger import configure

        folder = tempfile.mkdtemp()
        model = self.build("process", seed, 1)
        model.set_logger(configure(folder, ["csv"]))
        watch = EvalCallback(
            make_vec_env(ENV, 1, seed=10_000 + seed), n_eval_episodes=20, eval_freq=steps // 10 // N_ENVS,
            best_model_save_path=folder, deterministic=True, verbose=0,
        )  # fmt: skip
        model.learn(steps, callback=watch)
        model.save(os.path.join(folder, "last"))
        return float(watch.last_mean_reward)

    def curve(self, settings, seed, eval_seed):
        """Return the evaluations of a training, each in a fresh environment, with the CPU seconds of training.

        The algorithm is one of Stable-Baselines3 or sb3-contrib.
        ``settings["module"]`` registers the environment.
        """
        import importlib

        import gymnasium
        import numpy as np
        import stable_baselines3 as sb3
        import torch
        from stable_baselines3.common.callbacks import BaseCallback
        from stable_baselines3.common.env_util import make_vec_env
        from stable_baselines3.common.noise import NormalActionNoise
        from stable_baselines3.common.vec_env import VecNormalize

        torch.set_num_threads(1)
        algo = settings["algo"]
        has_memory, has_masks = algo == "RecurrentPPO", algo == "MaskablePPO"
        library = sb3 if hasattr(sb3, algo) else importlib.import_module("sb3_contrib")
        if "module" in settings:
            importlib.import_module(settings["module"])
        env_kwargs = settings["env_kwargs"]
        env = make_vec_env(settings["env"], settings["n_envs"], seed=seed, env_kwargs=env_kwargs)
        if settings["normalize"] is not None:
            env = VecNormalize(env, **settings["normalize"])
        arguments = {**settings["kw"], "policy_kwargs": dict(settings["kw"]["policy_kwargs"])}
        activation = {"tanh": torch.nn.Tanh, "relu": torch.nn.ReLU}[arguments["policy_kwargs"]["activation_fn"]]
        arguments["policy_kwargs"]["activation_fn"] = activation
        for name, value in arguments.items():
            if isinstance(value, dict) and "falls_from" in value:
                start, end = value["falls_from"], value.get("to", 0.0)
                arguments[name] = lambda left, start=start, end=end: end + (start - end) * left
        if arguments.get("action_noise") is not None:
            size = env.action_space.shape
            arguments["action_noise"] = NormalActionNoise(np.zeros(size), np.full(size, arguments["action_noise"]))
        policy = "MlpLstmPolicy" if has_memory else "MlpPolicy"
        model = getattr(library, algo)(policy, env, seed=seed, device="cpu", **arguments)
        rows, n_points, steps = [], settings["n_points"], settings["steps"]
        started, spent = time.process_time(), 0.0

        def evaluate():
            nonlocal spent
            at = time.process_time()
            one = gymnasium.make(settings["env"], **env_kwargs)
            returns = np.zeros(settings["n_episodes"])
            for k in range(len(returns)):
                obs, _ = one.reset(seed=eval_seed if k == 0 else None)
                done, left = False, settings.get("max_steps", 108_000)  # as in rlox's evaluation
                state, first = None, np.ones(1, bool)
                while not done and left:
                    left -= 1
                    seen = obs if settings["normalize"] is None else env.normalize_obs(obs)
                    known = {"state": state, "episode_start": first} if has_memory else {}
                    if has_masks:
                        known = {"action_masks": one.get_wrapper_attr("action_masks")()}
                    action, state = model.predict(seen, deterministic=True, **known)
                    obs, reward, terminated, truncated, _ = one.step(action)
                    first[:] = False
                    returns[k] += float(reward)
                    done = terminated or truncated
            one.close()
            spent += time.process_time() - at
            cpu = round(time.process_time() - started - spent, 3)
            rows.append({"step": model.num_timesteps, "mean": returns.mean(), "std": returns.std(), "cpu_s": cpu})

        class Watch(BaseCallback):
            def _on_step(self):
                if len(rows) < n_points and self.num_timesteps >= round(steps * (len(rows) + 1) / n_points):
                    evaluate()
                return True

        model.learn(steps, callback=Watch())
        if rows[-1]["step"] != model.num_timesteps:
            evaluate()
        contrib = {} if library is sb3 else {"sb3_contrib": library.__version__}
        return {"sb3": sb3.__version__, **contrib, "torch": torch.__version__, "gymnasium": gymnasium.__version__,
                "evaluations": rows}  # fmt: skip


class Original:
    """rlox 1.2.0, which this project is named after."""

    def versions(self):
        from importlib.metadata import version

        return {"rlox (the original)": version("rlox")}

    def build(self, case, seed, threads):
        import torch

        from rlox.algorithms import A2C as A2CAlgorithm
        from rlox.algorithms import PPO as PPOAlgorithm
        from rlox.algorithms.dqn import DQN as DQNAlgorithm
        from rlox.algorithms.sac import SAC as SACAlgorithm

        torch.set_num_threads(threads)
        if case == "a2c":
            return A2CAlgorithm(ENV, n_envs=N_ENVS, seed=seed, **A2C)
        if case == "dqn":
            plain = {"double_dqn": False, "hidden": DQN_HIDDEN, "target_update_freq": DQN_TARGET_EVERY}
            return DQNAlgorithm(ENV, seed=seed, **plain, **DQN)
        if case == "sac":
            return SACAlgorithm(SAC_ENV, seed=seed, **SAC)
        settings = TUNED if case == "process" else PPO
        policy = custom_policy() if case == "custom" else None
        return PPOAlgorithm(ENV, n_envs=N_ENVS, seed=seed, policy=policy, clip_eps=0.2, **settings)

    def train(self, steps):
        self.steps = steps
        self.algorithm.train(steps)

    def result(self):
        # Its mean_reward is the reward of a rollout per environment, not an episode's return.
        return {"steps": self.steps, "mean_return": None}

    def predict(self, obs):
        import torch

        with torch.no_grad():
            if hasattr(self.algorithm, "actor"):
                return self.algorithm.predict(obs)
            if hasattr(self.algorithm, "q_network"):
                return self.algorithm.q_network(torch.as_tensor(obs)[None]).argmax()
            policy = self.algorithm.policy
            return getattr(policy, "pi", getattr(policy, "actor", None))(torch.as_tensor(obs)).argmax()

    def whole(self, steps, seed):
        import os
        import tempfile

        self.algorithm = self.build("process", seed, 1)
        for k in range(10):
            self.algorithm.train(steps // 10)
            score = evaluated(self.predict, seed=10_000 + seed + 100 * k)
        self.algorithm.save(os.path.join(tempfile.mkdtemp(), "last.pt"))
        return score


class OriginalHybrid(Original):
    """HybridPPO of the original: fast, and the reason why every speed is shown with what was learned."""

    def build(self, case, seed, threads):
        import torch

        from rlox.algorithms.hybrid_ppo import HybridPPO

        torch.set_num_threads(threads)
        return HybridPPO(ENV, n_envs=N_ENVS, seed=seed, hidden=64, clip_eps=0.2, **PPO)


SYSTEMS = {
    "rlox": Rlox,
    "rlox hybrid": RloxHybrid,
    "rlox torch": RloxTorch,
    "sb3": SB3,
    "original": Original,
    "original hybrid": OriginalHybrid,
}


def main(request):
    warnings.filterwarnings("ignore")
    one = SYSTEMS[request["system"]]()
    if "curve" in request:
        print(json.dumps(one.curve(request["curve"], request["seed"], request["eval_seed"])))
        return
    steps, seed = request["steps"], request["seed"]
    if request.get("whole"):
        print(json.dumps({"eval_return": one.whole(steps, seed)}))
        return
    one.algorithm = one.build(request["case"], seed, request["threads"])
    cpu, wall = time.process_time(), time.perf_counter()
    one.train(steps)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    score = evaluated(one.predict, env_id=SAC_ENV if request["case"] == "sac" else ENV)
    found = {"cpu_s": cpu, "wall_s": wall, "versions": one.versions(), **one.result(), "eval_return": score}
    if request["case"] == "solve":
        found["solved"] = found["mean_return"] >= SOLVED
    print(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
