"""Callbacks: every hook is called, stopping stops, evaluation and checkpoints happen when they should."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import rlox
from rlox.algorithms import PPO
from rlox.callbacks import Callback, CallbackList, CheckpointCallback, EarlyStoppingCallback, EvalCallback
from rlox.checkpoint import load_checkpoint
from rlox.evaluation import evaluate
from rlox.logging import LoggerCallback, tracker_name


class Spy(Callback):
    def __init__(self):
        self.calls = []

    def __getattribute__(self, name):
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def hook(**info):
            self.calls.append((name, info))
            return True

        return hook


def small(**kwargs):
    return PPO("CartPole-v1", **{"n_envs": 4, "n_steps": 32, "seed": 0, **kwargs})


def test_every_hook_is_called_in_order(tmp_path):
    spy = Spy()
    small(callbacks=[EvalCallback(2, 3), CheckpointCallback(tmp_path), spy]).train(256)
    names = [name for name, _ in spy.calls if name != "on_checkpoint"]
    one = ["on_rollout_end", "on_evaluation", "on_step"]
    assert names == ["on_training_start", *one, *one, "on_training_end"]
    saved = [(info["kind"], info["step"]) for name, info in spy.calls if name == "on_checkpoint"]
    assert saved[0] == ("best", 128)
    assert saved[-1] == ("last", 256)
    step = dict(spy.calls)["on_step"]
    assert step["step"] == 256
    assert step["reward"] == step["metrics"]["mean_reward"]
    assert {"policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "mean_length"} <= set(step["metrics"])


def test_returning_false_stops():
    class StopAt(Callback):
        def on_step(self, *, step, **info):
            return step < 300

    ppo = small(callbacks=[StopAt()])
    ppo.train(10_000)
    assert ppo.counters.env_steps == 384


def test_early_stopping_counts_calls_without_improvement():
    callback = EarlyStoppingCallback(patience=3)
    goes_on = [callback.on_step(reward=r, step=i) for i, r in enumerate([math.nan, 1, 2, 2, 1.5, 3, 3, 3, 3])]
    assert goes_on == [True] * 8 + [False]
    both = CallbackList([EarlyStoppingCallback(patience=1), EarlyStoppingCallback(patience=5)])
    both.on_training_start()
    assert both.on_step(reward=1.0, step=1) is True
    assert both.on_step(reward=1.0, step=2) is False
    both.on_training_end()
    with pytest.raises(ValueError, match="patience must be >= 1"):
        EarlyStoppingCallback(patience=0)
    with pytest.raises(TypeError, match=r"must be rlox\.callbacks\.Callback, got function"):
        CallbackList([lambda **info: True])


def test_evaluations_are_evenly_spaced_and_end_at_the_end():
    callback = EvalCallback(n_points=4, n_episodes=2)
    small(callbacks=[callback]).train(2_000)
    assert [step for step, _ in callback.evaluations] == [512, 1024, 1536, 2048]
    only_end = EvalCallback(n_points=0, n_episodes=2)
    small(callbacks=[only_end]).train(300)
    assert [step for step, _ in only_end.evaluations] == [384]


def test_best_checkpoint_holds_the_best_evaluation_and_reproduces_it(tmp_path):
    callback = EvalCallback(n_points=8, n_episodes=5)
    small(learning_rate=3e-3, callbacks=[callback, CheckpointCallback(tmp_path)]).train(8_000)
    means = [evaluation.returns.mean() for _, evaluation in callback.evaluations]
    header = load_checkpoint(tmp_path / "best.safetensors").header
    assert header["evaluation"]["mean_return"] == max(means)
    assert header["counters"]["env_steps"] == callback.evaluations[means.index(max(means))][0]
    again = PPO.from_checkpoint(tmp_path / "best.safetensors")
    assert again.evaluate(5).returns.mean() == max(means)
    assert load_checkpoint(tmp_path / "last.safetensors").header["counters"]["env_steps"] == 8_064


def test_loggers_get_tracker_names():
    class Rows(LoggerCallback):
        def __init__(self):
            self.rows = []

        def log(self, step, metrics):
            self.rows.append((step, metrics))

    logger = Rows()
    small(logger=logger, callbacks=[EvalCallback(1, 2)]).train(128)
    evaluation, training = sorted((set(metrics) for _, metrics in logger.rows), key=len)
    assert "eval/mean_return" in evaluation
    assert {"episode/return", "episode/length", "loss/policy", "loss/value", "time/steps_per_second"} <= training
    assert tracker_name("approx_kl") == "loss/approx_kl"


def test_native_evaluation_equals_one_environment_played_through():
    """Side by side or one after the other: the same starts, hence for a fixed action rule the same episodes."""

    class Heuristic(nn.Module):
        def mode(self, obs):
            return (obs[:, 2] > 0).long()

    together = evaluate(Heuristic(), "CartPole-v1", n_episodes=6, seed=77)
    env, returns, total = rlox.VecEnv(1, 77, "CartPole-v1"), [], 0.0
    obs = env.reset_all()
    while len(returns) < 6:
        step = env.step_all(Heuristic().mode(torch.from_numpy(obs)).numpy())
        obs, total = step["obs"], total + step["rewards"][0]
        if step["terminated"][0] or step["truncated"][0]:
            returns.append(total)
            total = 0.0
    np.testing.assert_array_equal(together.returns, returns)
    assert len(set(returns)) > 1
    with pytest.raises(ValueError, match="n_episodes"):
        evaluate(Heuristic(), "CartPole-v1", n_episodes=0)


def test_stochastic_evaluation_is_seeded():
    ppo = small()
    first, again, other = (ppo.evaluate(10, seed, deterministic=False).returns for seed in (1, 1, 2))
    assert (first == again).all()
    assert (first != other).any()


def test_gymnasium_evaluation_plays_whole_episodes():
    ppo = PPO("MountainCarContinuous-v0", n_envs=2, n_steps=8)
    evaluation = ppo.evaluate(2)
    assert (evaluation.lengths == 999).all()
    assert set(evaluation.summary()) == {
        *("mean_return", "std_return", "min_return", "max_return", "mean_length", "n_episodes")
    }
