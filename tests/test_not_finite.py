"""NaN and infinity: errors name the environment, the value and the step, or the policy if it diverged."""

from __future__ import annotations

import re

import failing_user_code
import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

import rlox
from rlox.checkpoint import load_checkpoint
from rlox.collectors import ReplayCollector, RolloutCollector, all_finite

OFF_POLICY = {"learning_starts": 40, "buffer_size": 1000, "batch_size": 16}
AT = "from environment {} at step {}; fix the environment, or"
OBS = rf"observations must be finite, got {{}} in number 0 of 'leg' {AT} replace such values"
REWARD = rf"rewards must be finite(?: and have a finite square)?, got {{}} {AT} set env.reward_fn"


def made(algo, broken, value="nan", **more):
    continuous = algo in (rlox.SAC, rlox.TD3)
    more = {"n_steps": 32, **more} if algo in (rlox.PPO, rlox.A2C) else {**OFF_POLICY, **more}
    kwargs = {"broken": broken, "value": value, "continuous": continuous}
    return algo("NanAt-v0", 4, 0, env_kwargs=kwargs, hidden_sizes=[8], **more)


@pytest.mark.parametrize(
    ("algo", "more"),
    [
        (rlox.PPO, {"backend": "native"}),
        (rlox.PPO, {"backend": "torch"}),
        (rlox.PPO, {"normalize_obs": True, "normalize_rewards": True}),
        (rlox.A2C, {"env_workers": 1}),
        (rlox.DQN, {"backend": "native"}),
        (rlox.DQN, {"backend": "torch", "normalize_obs": True}),
        (rlox.SAC, {"backend": "native"}),
        (rlox.TD3, {"env_workers": 1}),
    ],
    ids=lambda item: getattr(item, "__name__", None) or "-".join(item),
)
@pytest.mark.parametrize(("broken", "value", "says"), [("obs", "nan", OBS), ("reward", "-inf", REWARD)])
def test_the_environment_the_step_and_the_key_are_named(algo, more, broken, value, says, tmp_path):
    algorithm = made(algo, broken, value, **more)
    # Step 201 in total is step 51 of the first environment, after 50 steps of each of the four.
    with pytest.raises(FloatingPointError, match=says.format(value, 0, 204)):
        algorithm.train(10_000)
    # A checkpoint at this point contains no such values, and the training can continue.
    algorithm.save(tmp_path / "after.safetensors")
    saved = load_checkpoint(tmp_path / "after.safetensors")
    for group in saved.tensors.values():
        assert all(np.isfinite(array).all() for array in group.values() if array.dtype.kind == "f")
    if hasattr(algorithm, "_buffer"):
        assert np.isfinite(algorithm.buffer.sample(100, 0)["next_obs"]).all()
    algorithm.train(until=400)
    assert algorithm.counters.env_steps >= 400


def test_a_reward_function_is_named():
    for algo in (rlox.PPO("CartPole-v1", 2, 0, n_steps=8), rlox.DQN("CartPole-v1", 2, 0, learning_starts=8)):
        collector = algo.collector
        collector.reward_fn = failing_user_code.nan_reward
        with pytest.raises(FloatingPointError, match=r"rewards of reward_fn nan_reward must be finite, got nan from"):
            algo.train(64)


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("algo", [rlox.PPO, rlox.A2C, rlox.SAC, rlox.TD3])
def test_a_policy_that_diverges_is_named_as_such(algo, backend, tmp_path):
    algorithm = made(algo, "", learning_rate=1e30, max_grad_norm=None, backend=backend)
    with pytest.raises(FloatingPointError, match=r"became (nan|inf|-inf) (at|about) step [\d,]+.*lower learning_rate"):
        algorithm.train(2000)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_the_policy_loss_of_the_last_update_is_checked(backend):
    algorithm = rlox.TD3(
        "Pendulum-v1", 1, 0, backend=backend, learning_starts=32, batch_size=16, policy_delay=2, hidden_sizes=[8]
    )
    with torch.no_grad():
        next(algorithm.policy.parameters()).fill_(np.nan)  # actions are still random, and targets use the target policy
    assert "policy_loss" not in algorithm.train(32)  # the first update only trains the critics
    algorithm = rlox.TD3(
        "Pendulum-v1", 1, 0, backend=backend, learning_starts=32, batch_size=16, policy_delay=1, hidden_sizes=[8]
    )
    with torch.no_grad():
        next(algorithm.policy.parameters()).fill_(np.nan)
    with pytest.raises(FloatingPointError, match="policy_loss became nan at step 32"):
        algorithm.train(32)


def test_diverged_weights_that_act_are_no_fault_of_the_environment():
    algorithm = rlox.PPO("NanAt-v0", 4, 0, env_kwargs={"broken": "", "continuous": True}, n_steps=8, backend="torch")
    algorithm.train(32)
    with torch.no_grad():
        next(algorithm.policy.parameters()).fill_(np.nan)
    with pytest.raises(FloatingPointError, match="the policy's actions on NanAt-v0 became nan near step 32") as caught:
        algorithm.train(until=64)
    assert isinstance(caught.value.__cause__, ValueError), "what the environments reported about such actions is lost"


def test_values_that_overflow_in_the_memory_or_after_normalisation_are_named():
    with pytest.raises(FloatingPointError, match=r"rewards must be finite, got inf"):
        made(rlox.DQN, "reward", "1e39").train(1000)
    with pytest.raises(FloatingPointError, match=r"rewards must be finite and have a finite square, got 1e\+200"):
        made(rlox.PPO, "reward", "1e200", normalize_rewards=True).train(1000)


def test_evaluation_names_values_that_are_not_finite():
    for broken, says in (
        ("obs", "got nan in number 0 of 'leg' after 3 steps of episode 1"),
        ("reward", "in episode 1"),
    ):
        algorithm = made(rlox.PPO, broken)
        algorithm.env_options.kwargs["after"] = 12
        with pytest.raises(FloatingPointError, match=f"evaluate: NanAt-v0: .* must be finite, .*{re.escape(says)}"):
            algorithm.evaluate(3)


def test_errors_of_a_memory_name_environment_and_step():
    collector = ReplayCollector("CartPole-v1", 3)
    collector.env_steps = 1000
    rows = np.zeros((30, 12), np.float32)
    collector.require_finite_rows(rows)
    rows[19, 6] = np.nan
    with pytest.raises(FloatingPointError, match=r"observations .* got nan in number 2 from environment 1 at step 991"):
        collector.require_finite_rows(rows)
    rows[:] = 0
    rows[29, 9] = np.inf
    with pytest.raises(FloatingPointError, match=r"rewards .* got inf from environment 2 at step 1,000"):
        collector.require_finite_rows(rows)


def test_large_finite_numbers_are_accepted():
    assert all_finite(np.full(10, 1e30, np.float32))
    assert all_finite(np.array([[255]], np.uint8))
    assert not all_finite(np.array([[1.0, -np.inf]]))
    assert RolloutCollector("CartPole-v1", 2).env_steps == 0


class Strict(nn.Module):
    """A custom policy that checks its observations."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(()))

    def get_action_and_logprob(self, obs):
        if not torch.isfinite(obs).all():
            raise ValueError("observations of no use")
        return torch.zeros(len(obs), dtype=torch.int64), torch.zeros(len(obs))

    def get_value(self, obs):
        return torch.zeros(len(obs))

    def get_logprob_and_entropy(self, obs, actions):
        return torch.zeros(len(obs)) + self.unused, torch.zeros(len(obs))


def test_the_environment_is_named_if_the_policy_rejects_its_nan():
    kwargs = {"broken": "obs", "value": "nan", "continuous": False}
    collector = RolloutCollector("NanAt-v0", 4, 0, env_kwargs=kwargs)
    with pytest.raises(FloatingPointError, match=r"must be finite, got nan .* from environment 0 at step 204"):
        collector.collect(Strict(), 64)


class Counted(gymnasium.Env):
    """Observes 1,000 times the number of the episode, plus the step; the sixth step of all has the reward NaN."""

    observation_space, action_space = spaces.Box(-1e6, 1e6, (1,)), spaces.Discrete(2)
    episodes = steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        Counted.episodes, self.t = Counted.episodes + 1, 0
        return self.look(), {}

    def look(self):
        return np.array([1000 * Counted.episodes + self.t], np.float32)

    def step(self, action):
        self.t += 1
        Counted.steps += 1
        return self.look(), np.nan if Counted.steps == 6 else 1.0, False, False, {}


def test_returns_of_several_steps_end_where_a_number_was_refused():
    Counted.episodes = Counted.steps = 0
    dqn = rlox.DQN(Counted, n_envs=1, n_step=3, learning_starts=1000, buffer_size=100, batch_size=4)
    with pytest.raises(FloatingPointError, match="rewards must be finite"):
        dqn.train(20)
    dqn.train(10)
    rows = dqn.buffer.gather(np.arange(len(dqn.buffer)))
    first, last = rows["obs"][:, 0] // 1000, rows["next_obs"][:, 0] // 1000
    assert {1.0, 2.0} <= set(first.tolist())
    assert np.array_equal(first, last)


class InfiniteEnd(gymnasium.Env):
    """Its observation is infinite in the step of the time limit alone."""

    observation_space, action_space = spaces.Box(-np.inf, np.inf, (2,), np.float32), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.array([0, np.inf if self.t == 5 else 0], np.float32), 1.0, False, self.t == 5, {}


@pytest.mark.parametrize("normalize", [False, True])
def test_an_infinite_observation_at_a_time_limit_is_named(normalize):
    agent = rlox.PPO(InfiniteEnd, n_envs=2, n_steps=16, hidden_sizes=[8], normalize_obs=normalize)
    with pytest.raises(FloatingPointError, match=r"observations must be finite.*, got inf in number 1 from"):
        agent.train(64)
