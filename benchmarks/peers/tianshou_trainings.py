"""Trainings of discrete SAC with tianshou 2, evaluated as `trainings.SB3.curve` does. Needs nothing of rlox."""

import time


def build(settings, seed):
    """Return tianshou's DiscreteSAC and the collector that steps its environments into its replay memory."""
    import gymnasium
    import torch
    from tianshou.algorithm.modelfree.discrete_sac import DiscreteSAC, DiscreteSACPolicy
    from tianshou.algorithm.modelfree.sac import AutoAlpha
    from tianshou.algorithm.optim import AdamOptimizerFactory
    from tianshou.data import Collector, VectorReplayBuffer
    from tianshou.env import DummyVectorEnv
    from tianshou.utils.net.common import Net
    from tianshou.utils.net.discrete import DiscreteActor, DiscreteCritic

    kw, n_envs = settings["kw"], settings["n_envs"]
    envs = DummyVectorEnv([lambda: gymnasium.make(settings["env"], **settings["env_kwargs"]) for _ in range(n_envs)])
    envs.seed(seed)
    space = gymnasium.make(settings["env"]).action_space
    space.seed(seed)
    n_actions, shape = int(space.n), envs.observation_space[0].shape

    def body():
        return Net(state_shape=shape, hidden_sizes=kw["hidden_sizes"])

    def adam():
        return AdamOptimizerFactory(lr=kw["learning_rate"])

    actor = DiscreteActor(preprocess_net=body(), action_shape=n_actions, softmax_output=False)
    critics = [DiscreteCritic(preprocess_net=body(), last_size=n_actions) for _ in range(2)]
    policy = DiscreteSACPolicy(actor=actor, action_space=space, observation_space=envs.observation_space[0])
    alpha = kw["ent_coef"]
    if kw["target_entropy"] is not None:
        alpha = AutoAlpha(kw["target_entropy"], float(torch.tensor(alpha).log()), adam())
    algorithm = DiscreteSAC(
        policy=policy, policy_optim=adam(), critic=critics[0], critic_optim=adam(), critic2=critics[1],
        critic2_optim=adam(), tau=kw["tau"], gamma=kw["gamma"], alpha=alpha, n_step_return_horizon=kw["n_step"],
    )  # fmt: skip
    collector = Collector(algorithm, envs, VectorReplayBuffer(kw["buffer_size"], n_envs))
    collector.reset()
    return algorithm, collector


def play(policy, settings, seed):
    """Return the returns of deterministic episodes in one fresh environment."""
    import gymnasium
    import numpy as np
    import torch

    env = gymnasium.make(settings["env"], **settings["env_kwargs"])
    returns = np.zeros(settings["n_episodes"])
    for k in range(len(returns)):
        obs, _ = env.reset(seed=seed if k == 0 else None)
        ended = False
        while not ended:
            with torch.no_grad():
                action = int(policy.actor(obs[None])[0].argmax())
            obs, reward, terminated, truncated, _ = env.step(action)
            returns[k] += float(reward)
            ended = terminated or truncated
    env.close()
    return returns


def curve(settings, seed, eval_seed):
    """Return the evaluations of a training, each in a fresh environment, with the CPU seconds of training.

    A round is `train_freq` steps of all environments together, then `gradient_steps` updates, as in rlox.
    """
    import random
    from importlib.metadata import version

    import numpy as np
    import torch
    from tianshou.utils.torch_utils import policy_within_training_step

    torch.set_num_threads(1)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (tianshou draws from the global generator)
    torch.manual_seed(seed)
    kw, steps, n_points = settings["kw"], settings["steps"], settings["n_points"]
    algorithm, collector = build(settings, seed)
    rows, taken, spent, started = [], 0, 0.0, time.process_time()
    while taken < steps:
        random_steps = taken < kw["learning_starts"]
        with policy_within_training_step(algorithm.policy):
            collector.collect(n_step=kw["train_freq"], random=random_steps)
            taken += kw["train_freq"]
            for _ in range(0 if taken < kw["learning_starts"] else kw["gradient_steps"]):
                algorithm.update(collector.buffer, kw["batch_size"])
        if taken >= round(steps * (len(rows) + 1) / n_points):
            at = time.process_time()
            returns = play(algorithm.policy, settings, eval_seed)
            spent += time.process_time() - at
            cpu = round(time.process_time() - started - spent, 3)
            rows.append({"step": taken, "mean": returns.mean(), "std": returns.std(), "cpu_s": cpu})
    versions = {name: version(name) for name in ("tianshou", "torch", "gymnasium")}
    return {"peer": f"tianshou {versions['tianshou']}", **versions, "evaluations": rows}
