"""Custom modules act in evaluation mode and learn in training mode; the caller's modes stay as they were."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from rlox.algorithms import A2C, APPO, DQN, IMPALA, PPO, SAC, TD3
from rlox.callbacks import Callback
from rlox.collectors import RolloutCollector
from rlox.evaluation.episodes import evaluate
from rlox.evaluation.evaluator import make_job, play
from rlox.nn.modes import evaluating, learning


class Noisy(nn.Module):
    """Batch normalisation and dropout; records in which mode each of its passes runs."""

    def __init__(self, n_in, n_out):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(n_in, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, n_out)
        )
        self.seen = set()

    def forward(self, x):
        self.seen.add((self.training, torch.is_grad_enabled()))
        return self.layers(x)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor, self.critic = Noisy(4, 2), Noisy(4, 1)

    def _distribution(self, obs):
        return torch.distributions.Categorical(logits=self.actor(obs))

    def get_action_and_logprob(self, obs):
        distribution = self._distribution(obs)
        actions = distribution.sample()
        return actions, distribution.log_prob(actions)

    def get_value(self, obs):
        return self.critic(obs).squeeze(-1)

    def get_logprob_and_entropy(self, obs, actions):
        distribution = self._distribution(obs)
        return distribution.log_prob(actions), distribution.entropy()

    def mode(self, obs):
        return self.actor(obs).argmax(-1)


SIZES = {DQN: ("CartPole-v1", 4, 2), SAC: ("Pendulum-v1", 3, 2), TD3: ("Pendulum-v1", 3, 1)}
EVALUATED, LEARNED = (False, False), (True, True)


def made(cls, **settings):
    if cls in SIZES:
        env, *sizes = SIZES[cls]
        policy = Noisy(*sizes)
        return cls(env, policy=policy, n_envs=1, learning_starts=8, batch_size=8, seed=1, **settings), policy
    policy = Policy()
    return cls("CartPole-v1", policy=policy, n_envs=2, n_steps=16, seed=1), policy


def networks(policy):
    return [policy.actor, policy.critic] if isinstance(policy, Policy) else [policy]


@pytest.mark.parametrize("cls", [PPO, A2C, IMPALA, APPO, DQN, SAC, TD3])
@pytest.mark.parametrize("training", [True, False])
def test_a_custom_module_acts_in_evaluation_mode_and_learns_in_training_mode(cls, training):
    torch.manual_seed(0)
    algorithm, policy = made(cls)
    policy.train(training)
    algorithm.train(64)
    # The targets of double DQN and SAC use the policy too, without a gradient.
    targets = {(True, False)} if cls in (DQN, SAC) else set()
    for network in networks(policy):
        assert {EVALUATED, LEARNED} <= network.seen <= {EVALUATED, LEARNED, *targets}
    assert all(part.training is training for part in policy.modules())
    obs = np.full(networks(policy)[0].layers[0].in_features, 0.1)
    assert len({str(algorithm.predict(obs)) for _ in range(20)}) == 1
    returns = algorithm.evaluate(2, seed=3).returns
    assert np.array_equal(returns, algorithm.evaluate(2, seed=3).returns)
    # A process of its own evaluates a copy of the policy.
    assert np.array_equal(returns, play(make_job(algorithm._evaluation_arguments(2, 3), 1)).returns)
    assert all(part.training is training for part in policy.modules())
    algorithm.close()


@pytest.mark.parametrize("cls", [DQN, TD3])
def test_target_networks_stay_in_evaluation_mode(cls):
    algorithm, _ = made(cls, **({"target_update_freq": 8} if cls is DQN else {}))
    algorithm.train(32)
    target = algorithm.target if cls is DQN else algorithm.target_policy
    (network,) = [part for part in target.modules() if isinstance(part, Noisy)]
    assert network.seen == {EVALUATED}
    # They follow the statistics of batch normalisation too.
    assert network.layers[1].running_mean.all()


class Drawing(Policy):
    """Draws in each pass, also for the most likely action."""

    def mode(self, obs):
        return (self.actor(obs) + torch.rand(2)).argmax(-1)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_custom_module_that_draws_is_evaluated_by_the_seed_and_trains_the_same(deterministic):
    def trained(*callbacks):
        torch.manual_seed(1)
        ppo = PPO("CartPole-v1", 2, 1, Drawing(), callbacks=callbacks, n_steps=16, batch_size=16)
        ppo.train(64)
        return ppo

    class Evaluate(Callback):
        def on_step(self, algorithm, step, reward, metrics):
            algorithm.evaluate(1, deterministic=deterministic)
            return True

    plain, evaluated = trained(), trained(Evaluate())
    for name, array in plain._weights().items():
        np.testing.assert_array_equal(evaluated._weights()[name], array, err_msg=name)
    first, again, other = (plain.evaluate(5, seed, deterministic).returns.tolist() for seed in (1, 1, 2))
    assert first == again != other


def test_a_hand_written_loop_keeps_the_mode_of_its_policy():
    collector, policy = RolloutCollector("CartPole-v1", n_envs=2), Policy()
    batch = collector.collect(policy, 8)
    assert all(network.seen == {EVALUATED} for network in networks(policy))
    assert all(part.training for part in policy.modules())
    evaluate(policy, "CartPole-v1", 1)
    policy.get_logprob_and_entropy(batch.obs, batch.actions)
    assert policy.actor.seen == {EVALUATED, LEARNED}


def test_frozen_parts_stay_frozen():
    algorithm, policy = made(PPO)
    policy.critic.eval()
    algorithm.train(32)
    assert policy.actor.seen == {EVALUATED, LEARNED}
    assert policy.critic.seen == {EVALUATED, (False, True)}
    assert policy.actor.training
    assert not any(part.training for part in policy.critic.modules())


def test_modes_are_restored_by_the_modules_own_train():
    """Some modules do more in `train` than to set a flag, and parts may be frozen below parts that are not."""

    class Merging(nn.Linear):
        merged = False

        def train(self, mode=True):
            self.merged = not mode
            return super().train(mode)

    module = nn.Sequential(Merging(2, 2), nn.Sequential(nn.Dropout(), nn.Dropout()))
    module[1].eval()
    module[1][0].train()
    for context, merged in ((evaluating, True), (learning, False)):
        with context(module):
            assert module[0].merged is merged
        assert not module[0].merged
        assert [part.training for part in module.modules()] == [True, True, False, True, False]


def test_what_computes_the_same_in_both_modes_is_not_touched():
    own = PPO("CartPole-v1", backend="torch", seed=0).policy
    hooked = nn.utils.spectral_norm(nn.Linear(2, 2))  # its hook changes weights in training mode
    for module, mode in ((own, True), (hooked, False)):
        with evaluating(module):
            assert module.training is mode
