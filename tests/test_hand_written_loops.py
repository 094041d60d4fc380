"""Callbacks in training loops written by hand, as the documents print them: `on_training_start()`, then
`on_step(reward=, step=)`, and nothing else."""

import io
import math
import re
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import rlox
from rlox import GymVecEnv, compute_gae
from rlox.algorithms import PPO
from rlox.callbacks import (
    AdviceCallback,
    Callback,
    CallbackList,
    CheckpointCallback,
    EarlyStoppingCallback,
    EvalCallback,
    ProgressCallback,
    TimeLimitCallback,
    TimingCallback,
    VideoCallback,
)
from rlox.callbacks.loggers import LoggerCallback, RecordLogger
from rlox.checkpoint import load_checkpoint
from rlox.nn.policies import DiscretePolicy
from rlox.tracking.record import Record, read_rows


class Kept(LoggerCallback):
    def __init__(self):
        self.rows = []

    def log(self, step, metrics):
        self.rows.append((step, metrics))


def loop(callbacks, updates=4, **info):
    """The loop of section 2.2 of the tutorial without its update; `info` are additional arguments for the callbacks."""
    callbacks, step = CallbackList(callbacks), 0
    callbacks.on_training_start()
    for _ in range(updates):
        step += 1
        if not callbacks.on_step(reward=float(10 * step), step=step, **info):
            break
    callbacks.on_training_end()
    return step


class REINFORCE:
    """The class of section 2.2 of the tutorial, word for word except for docstrings and comments."""

    def __init__(
        self,
        env_id: str,
        n_envs: int = 8,
        seed: int = 42,
        learning_rate: float = 1e-3,
        gamma: float = 0.99,
        use_baseline: bool = True,
        callbacks=None,
    ):
        self.env_id = env_id
        self.n_envs = n_envs
        self.gamma = gamma
        self.use_baseline = use_baseline
        self.env = GymVecEnv(env_id, n_envs=n_envs, seed=seed)

        import gymnasium as gym

        tmp = gym.make(env_id)
        obs_dim = int(np.prod(tmp.observation_space.shape))
        n_actions = int(tmp.action_space.n)
        tmp.close()

        self.policy = DiscretePolicy(obs_dim=obs_dim, n_actions=n_actions)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=learning_rate)
        self.callbacks = CallbackList(callbacks)
        self._obs = None
        self._global_step = 0

    @torch.no_grad()
    def _collect_rollout(self, n_steps: int):
        if self._obs is None:
            self._obs = self.env.reset_all()

        all_obs, all_actions, all_log_probs, all_rewards, all_dones, all_values = ([], [], [], [], [], [])

        for _ in range(n_steps):
            obs_t = torch.as_tensor(self._obs, dtype=torch.float32)
            actions, log_probs = self.policy.get_action_and_logprob(obs_t)
            values = self.policy.get_value(obs_t) if self.use_baseline else torch.zeros(self.n_envs)

            actions_np = actions.cpu().numpy().astype(np.uint32).tolist()
            result = self.env.step_all(actions_np)

            all_obs.append(obs_t)
            all_actions.append(actions)
            all_log_probs.append(log_probs)
            all_values.append(values)
            all_rewards.append(torch.as_tensor(result["rewards"].astype(np.float32)))

            dones = result["terminated"].astype(bool) | result["truncated"].astype(bool)
            all_dones.append(torch.as_tensor(dones.astype(np.float32)))
            self._obs = result["obs"].copy()

        last_obs_t = torch.as_tensor(self._obs, dtype=torch.float32)
        last_values = self.policy.get_value(last_obs_t) if self.use_baseline else torch.zeros(self.n_envs)

        all_returns = []
        for env_idx in range(self.n_envs):
            rewards_env = torch.stack([r[env_idx] for r in all_rewards])
            values_env = torch.stack([v[env_idx] for v in all_values])
            dones_env = torch.stack([d[env_idx] for d in all_dones])

            _advantages, returns = compute_gae(
                rewards=rewards_env.numpy().astype(np.float64),
                values=values_env.numpy().astype(np.float64),
                dones=dones_env.numpy().astype(np.float64),
                last_value=float(last_values[env_idx]),
                gamma=self.gamma,
                lam=1.0,
            )
            all_returns.append(torch.as_tensor(returns, dtype=torch.float32))

        obs = torch.stack(all_obs).reshape(-1, all_obs[0].shape[-1])
        actions = torch.stack(all_actions).reshape(-1)
        log_probs = torch.stack(all_log_probs).reshape(-1)
        values = torch.stack(all_values).reshape(-1)
        returns = torch.stack(all_returns).T.reshape(-1)
        rewards = torch.stack(all_rewards).reshape(-1)

        return obs, actions, log_probs, values, returns, rewards

    def train(self, total_timesteps: int, n_steps: int = 128) -> dict[str, float]:
        steps_per_rollout = self.n_envs * n_steps
        n_updates = max(1, total_timesteps // steps_per_rollout)

        self.callbacks.on_training_start()
        all_rewards = []

        for _update in range(n_updates):
            obs, actions, _old_log_probs, values, returns, rewards = self._collect_rollout(n_steps)

            advantage = returns - values.detach() if self.use_baseline else returns
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)

            new_log_probs, entropy = self.policy.get_logprob_and_entropy(obs, actions)
            loss = -(new_log_probs * advantage.detach()).mean() - 0.01 * entropy.mean()

            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.policy.parameters(), 0.5)
            self.optimizer.step()

            mean_reward = rewards.sum().item() / self.n_envs
            all_rewards.append(mean_reward)
            self._global_step += 1

            should_continue = self.callbacks.on_step(reward=mean_reward, step=self._global_step)
            if not should_continue:
                break

        self.callbacks.on_training_end()
        return {"mean_reward": float(np.mean(all_rewards))}


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: Callback(),
        lambda folder: CallbackList([TimingCallback()]),
        lambda folder: TimingCallback(),
        lambda folder: ProgressCallback(file=io.StringIO()),
        lambda folder: EarlyStoppingCallback(patience=20),
        lambda folder: TimeLimitCallback(3600.0),
        lambda folder: Kept(),
        lambda folder: RecordLogger(Record(folder)),
        lambda folder: EvalCallback(every_steps=2, n_episodes=2),
        lambda folder: CheckpointCallback(folder),
    ],
)
def test_reinforce_as_printed_with_each_callback(make, tmp_path):
    callback = make(tmp_path)
    reinforce = REINFORCE("CartPole-v1", n_envs=2, callbacks=[callback])
    if isinstance(callback, (EvalCallback, CheckpointCallback)):
        # The loop creates its policy after it has received the callbacks.
        callback.policy, callback.env_id = reinforce.policy, reinforce.env_id
    assert reinforce.train(total_timesteps=96, n_steps=16) == {"mean_reward": 16.0}
    if isinstance(callback, EvalCallback):
        assert [step for step, _ in callback.evaluations] == [2, 3]
    if isinstance(callback, CheckpointCallback):
        assert load_checkpoint(tmp_path / "last.safetensors").header["counters"]["env_steps"] == 3


@pytest.fixture
def policy():
    torch.manual_seed(0)
    return DiscretePolicy(obs_dim=4, n_actions=2, hidden=8)


def test_callbacks_without_requirements_work_in_the_loop_as_printed(tmp_path):
    timing, logger, lines = TimingCallback(), Kept(), io.StringIO()
    callbacks = [
        timing,
        logger,
        ProgressCallback(every_s=0.0, file=lines),
        EarlyStoppingCallback(patience=20),
        TimeLimitCallback(3600.0),
    ]
    assert loop(callbacks) == 4
    shares = timing.summary()
    assert shares["total_s"] > 0.0
    assert math.isclose(sum(share for name, share in shares.items() if name != "total_s"), 1.0)
    assert logger.rows == [(step, {"episode/return": 10.0 * step}) for step in range(1, 5)]
    assert re.search(r"(?m)^4 steps: done, [\d,]+ steps/s, return 40\.0$", lines.getvalue())
    with Record(tmp_path) as record:
        loop([RecordLogger(record)])
    rows = [row for row, _ in read_rows(tmp_path / "metrics.jsonl") if "episode/return" in row]
    assert [(row["step"], row["episode/return"]) for row in rows] == [(1, 10.0), (2, 20.0), (3, 30.0), (4, 40.0)]
    assert loop([EarlyStoppingCallback(threshold=20.0)]) == 2
    assert loop([TimeLimitCallback(1e-9)]) == 1


def test_evaluation_reaches_logger_and_checkpoints(tmp_path, policy):
    evaluation, logger = EvalCallback(n_episodes=3, every_steps=2, policy=policy, env_id="CartPole-v1"), Kept()
    loop([CallbackList([evaluation]), logger, CheckpointCallback(tmp_path, policy=policy)], updates=5)
    assert [step for step, _ in evaluation.evaluations] == [2, 4, 5]
    found = [metrics["eval/mean_return"] for _, metrics in logger.rows if "eval/mean_return" in metrics]
    assert found == [result.summary()["mean_return"] for _, result in evaluation.evaluations]
    assert found[0] == rlox.evaluate(policy, "CartPole-v1", 3).summary()["mean_return"]
    for kind, step in (("best", 2), ("last", 5)):
        saved = load_checkpoint(tmp_path / f"{kind}.safetensors")
        assert saved.header["counters"]["env_steps"] == step
        for name, value in policy.state_dict().items():
            np.testing.assert_array_equal(saved.tensors["policy"][name], value.numpy())
    # A policy that was trained by hand can be loaded by an algorithm.
    ppo = PPO("CartPole-v1", n_envs=2, n_steps=8, hidden_sizes=[8, 8])
    ppo.init_from(tmp_path / "best.safetensors")
    assert torch.equal(ppo.policy.actor[0].weight, policy.actor[0].weight)


def test_the_policy_of_a_custom_agent_is_used(tmp_path, policy):
    agent = SimpleNamespace(policy=policy, env_id="CartPole-v1")
    evaluation = EvalCallback(n_episodes=2, every_steps=2)
    loop([evaluation, CheckpointCallback(tmp_path)], algorithm=agent)
    assert [step for step, _ in evaluation.evaluations] == [2, 4]
    assert load_checkpoint(tmp_path / "last.safetensors").header["env"]["id"] == "CartPole-v1"
    timed = EvalCallback(n_episodes=2, every_steps=100)
    assert loop([TimeLimitCallback(1e-9, timed), timed], policy=policy, env_id="CartPole-v1") == 1
    assert [step for step, _ in timed.evaluations] == [1]


@pytest.mark.skipif(not (find_spec("imageio_ffmpeg") and find_spec("pygame")), reason="needs the extra video")
def test_a_film_of_an_evaluation(tmp_path, policy):
    video = VideoCallback(tmp_path, kind="gif")
    loop([EvalCallback(n_episodes=1, every_steps=4, policy=policy, env_id="CartPole-v1"), video])
    assert video.paths == [tmp_path / "step-000000004.gif"]


def test_missing_arguments_are_errors_of_one_line(tmp_path, policy):
    reported = {
        EvalCallback(): "EvalCallback needs algorithm=…; pass algorithm=agent to on_training_start and on_step, or",
        EvalCallback(every_steps=1): "EvalCallback needs algorithm=…, or policy=…; pass algorithm=agent to on_step, or",
        EvalCallback(every_steps=1, policy=policy): "EvalCallback needs algorithm=…, or env_id=…",
        CheckpointCallback(tmp_path): "CheckpointCallback needs algorithm=…, or policy=…; pass algorithm=agent to",
        AdviceCallback(): "AdviceCallback needs metrics=…; pass metrics=",
    }
    for callback, line in reported.items():
        with pytest.raises(TypeError) as refused:
            loop([callback])
        assert str(refused.value).startswith(line)
        assert "\n" not in str(refused.value)
    for callback, name in ((EarlyStoppingCallback(), "reward"), (Kept(), "metrics")):
        callbacks = CallbackList([callback])
        callbacks.on_training_start()
        with pytest.raises(TypeError, match=rf"{type(callback).__name__} needs {name}=…; pass {name}="):
            callbacks.on_step(step=1)


def test_advice_on_metrics_that_a_loop_passes():
    lines = []
    loop([AdviceCallback(lines.append)], updates=12, metrics={"approx_kl": 0.5, "entropy": 0.1})
    assert len(lines) == 1
    assert "approx_kl is above 0.1" in lines[0]
