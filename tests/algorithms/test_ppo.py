"""PPO's own mathematics, a pinned trajectory, a custom policy."""

import copy

import numpy as np
import pytest
import torch
from run_results import Losses
from torch import nn

from rlox.algorithms import A2C, IMPALA, PPO
from rlox.algorithms.trainers import PPOTrainer
from rlox.callbacks import Callback
from rlox.callbacks.loggers import LoggerCallback
from rlox.collectors.rollout import RolloutBatch
from rlox.kernels.rng import Rng
from rlox.nn.policies import DiscretePolicy


def reference_update(policy, batch, config, order):
    """PPO's update in textbook form: autograd, torch's Adam, torch's clipping, torch.distributions."""
    adam = torch.optim.Adam(policy.parameters(), lr=config.learning_rate, eps=1e-5)
    for permutation in order:
        for i in range(0, len(batch), config.batch_size):
            rows = permutation[i : i + config.batch_size]
            dist = torch.distributions.Categorical(logits=policy.actor(batch.obs[rows]))
            adv = batch.advantages[rows]
            adv = (adv - adv.mean()) / (adv.std() + 1e-8)
            ratio = torch.exp(dist.log_prob(batch.actions[rows]) - batch.log_probs[rows])
            surrogate = torch.min(ratio * adv, ratio.clamp(1 - config.clip_eps, 1 + config.clip_eps) * adv).mean()
            value_loss = torch.nn.functional.mse_loss(policy.critic(batch.obs[rows]).squeeze(-1), batch.returns[rows])
            loss = -surrogate + config.vf_coef * value_loss - config.ent_coef * dist.entropy().mean()
            adam.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm)
            adam.step()


def test_update_equals_the_textbook():
    ppo = PPO("CartPole-v1", n_envs=4, seed=0, n_steps=50, batch_size=64, learning_rate=1e-3)
    other = copy.deepcopy(DiscretePolicy(4, 2))
    other.load_state_dict({k: v.clone() for k, v in ppo.policy.state_dict().items()})
    batch = ppo.collector.collect(ppo.policy, 50)
    rng = Rng(0)
    rng.set_state(ppo.rng.get_state())
    order = [torch.from_numpy(rng.permutation(200)) for _ in range(ppo.config.n_epochs)]
    ppo.update(batch)
    reference_update(other, batch, ppo.config, order)
    for (name, ours), theirs in zip(ppo.policy.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-6, msg=name)


# Five updates of (value_loss, entropy, grad_norm) with one thread. Actions are sampled and weights change in between,
# so any numerical change is visible here and must be explained in the change log. Losses that are sums of cancelling
# terms (policy_loss, approx_kl) are left out, since their last digits are noise.
PINNED = {
    "CartPole-v1": [
        [68.52908325195312, 0.6931257247924805, 14.635065078735352],
        [52.48118591308594, 0.6929506659507751, 12.62588119506836],
        [61.296546936035156, 0.6922799348831177, 14.0113525390625],
        [77.92312622070312, 0.6921406984329224, 15.900218963623047],
        [53.06029510498047, 0.6913228034973145, 14.453906059265137],
    ],
    "Pendulum-v1": [
        [5447.12548828125, 1.41972815990448, 186.96603393554688],
        [4902.4384765625, 1.421238660812378, 167.54066467285156],
        [4003.364501953125, 1.4222373962402344, 128.41188049316406],
        [4713.28173828125, 1.4236738681793213, 140.07498168945312],
        [4993.89013671875, 1.4247660636901855, 133.70326232910156],
    ],
}


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("env", PINNED)
def test_pinned_trajectory(env, backend):
    log = Losses("value", "entropy", "grad_norm")
    PPO(env, n_envs=4, seed=7, n_steps=32, batch_size=64, logger=log, backend=backend).train(640)
    np.testing.assert_allclose(log.rows, PINNED[env], rtol=1e-4)


def test_the_last_update_of_a_linear_schedule_learns():
    rates = []

    class Watch(Callback):
        def on_step(self, *, algorithm, **info):
            rates.append(algorithm.optimizer.learning_rate)
            return True

    PPO(
        "CartPole-v1",
        n_envs=4,
        n_steps=25,
        learning_rate=1.0e-3,
        learning_rate_schedule="linear",
        callbacks=[Watch()],
    ).train(400)
    np.testing.assert_allclose(rates, [1e-3, 7.5e-4, 5e-4, 2.5e-4], atol=1e-12)


def test_target_kl_stops_the_epochs():
    class Count(LoggerCallback):
        def log(self, step, metrics):
            self.kl = metrics["loss/approx_kl"]

    free, held = Count(), Count()
    common = {"n_envs": 4, "n_steps": 128, "learning_rate": 1e-2, "n_epochs": 20, "seed": 0}
    PPO("CartPole-v1", logger=free, **common).train(512)
    PPO("CartPole-v1", logger=held, target_kl=0.005, **common).train(512)
    assert held.kl < 0.0075 < free.kl


class UserPolicy(nn.Module):
    """The methods that the documents require of a policy, without base classes of rlox."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 32), nn.Tanh())
        self.pi, self.v = nn.Linear(32, 2), nn.Linear(32, 1)

    def dist(self, obs):
        return torch.distributions.Categorical(logits=self.pi(self.body(obs)))

    def get_action_and_logprob(self, obs):
        dist = self.dist(obs)
        actions = dist.sample()
        return actions, dist.log_prob(actions)

    def get_value(self, obs):
        return self.v(self.body(obs)).squeeze(-1)

    def get_logprob_and_entropy(self, obs, actions):
        dist = self.dist(obs)
        return dist.log_prob(actions), dist.entropy()


class ColumnPolicy(UserPolicy):
    """Returns one of its outputs as a column, which subtraction would turn into (B, B)."""

    def __init__(self, column):
        super().__init__()
        self.column = column

    def get_value(self, obs):
        values = super().get_value(obs)
        return values[:, None] if self.column == "values" else values

    def get_logprob_and_entropy(self, obs, actions):
        log_probs, entropy = super().get_logprob_and_entropy(obs, actions)
        if self.column == "entropies":
            return log_probs, entropy[:, None]
        return (log_probs[:, None] if self.column == "log-probabilities" else log_probs), entropy


@pytest.mark.parametrize("column", ["values", "log-probabilities", "entropies"])
@pytest.mark.parametrize("cls", [PPO, A2C, IMPALA])
def test_columns_of_a_user_policy_are_refused(cls, column):
    algorithm = cls("CartPole-v1", n_envs=4, seed=0, policy=ColumnPolicy(column), n_steps=16)
    wrong = rf"the policy's {column} must have shape \(B,\), got \(64, 1\) for B = 64"
    with pytest.raises(ValueError, match=wrong):
        algorithm.train(128)


@pytest.mark.slow
def test_user_policy_trains_saves_and_continues(tmp_path):
    torch.manual_seed(0)
    ppo = PPO("CartPole-v1", n_envs=8, seed=0, policy=UserPolicy(), learning_rate=2e-3)
    metrics = ppo.train(20_000)
    assert metrics["mean_reward"] > 40  # a random policy gets 22
    with pytest.raises(TypeError, match=r"must define mode\(obs\)"):
        ppo.predict(np.zeros(4))
    assert ppo.predict(np.zeros(4), deterministic=False) in (0, 1)
    path = tmp_path / "user.safetensors"
    ppo.save(path)
    ppo.train(2048)
    with pytest.raises(ValueError, match="pass policy="):
        PPO.from_checkpoint(path)
    with pytest.raises(ValueError, match="does not fit"):
        PPO.from_checkpoint(path, policy=DiscretePolicy(4, 2))
    again = PPO.from_checkpoint(path, policy=UserPolicy())
    again.train(2048)
    for a, b in zip(ppo.policy.parameters(), again.policy.parameters(), strict=True):
        assert torch.equal(a, b)


def test_training_without_the_given_reward_fn_is_an_error(tmp_path):
    def halved(obs, actions, raw_rewards):
        return 0.5 * raw_rewards

    ppo = PPO("CartPole-v1", n_envs=4, n_steps=16, reward_fn=halved)
    ppo.train(64)
    path = tmp_path / "shaped.safetensors"
    ppo.save(path)
    assert PPO.from_checkpoint(path).evaluate(2).returns.min() > 0
    with pytest.raises(ValueError, match=r"trained with reward_fn halved.*from_checkpoint\(reward_fn="):
        PPO.from_checkpoint(path).train(64)
    again = PPO.from_checkpoint(path, reward_fn=halved)
    assert again.train(64)["value_loss"] == ppo.train(64)["value_loss"]


def test_trainer_is_the_algorithm(tmp_path):
    trainer = PPOTrainer(env="CartPole-v1", seed=3, n_envs=4)
    plain = PPO("CartPole-v1", seed=3, n_envs=4)
    assert trainer.train(total_timesteps=1024)["policy_loss"] == plain.train(1024)["policy_loss"]
    assert trainer.predict(np.zeros(4)) == plain.predict(np.zeros(4))
    trainer.save(tmp_path / "t.safetensors")
    assert PPO.from_checkpoint(tmp_path / "t.safetensors").counters.env_steps == 1024


def test_mean_reward_is_the_return_of_whole_episodes():
    returns = []

    class Watch(Callback):
        def on_rollout_end(self, *, batch, **info):
            assert isinstance(batch, RolloutBatch)
            returns.extend(batch.episode_returns)

    metrics = PPO("CartPole-v1", n_envs=4, seed=0, callbacks=[Watch()]).train(4096)
    assert metrics["mean_reward"] == pytest.approx(np.mean(returns[-100:]))
    short = PPO("Pendulum-v1", n_envs=2, n_steps=8).train(16)
    assert np.isnan(short["mean_reward"])


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_epochs_stop_where_the_divergence_passes_one_and_a_half_times_target_kl(backend):
    """With one minibatch per epoch, the divergence before each step follows from the means over 1, 2, … epochs."""
    learning_rate, most = 3e-3, 6

    def trained(**settings):
        common = {"n_envs": 4, "n_steps": 64, "batch_size": 256, "seed": 3, "learning_rate": learning_rate}
        ppo = PPO("CartPole-v1", backend=backend, **common, **settings)
        return ppo, ppo.train(256)

    means = [trained(n_epochs=n)[1]["approx_kl"] for n in range(1, most + 1)]
    kls = np.diff(np.arange(1, most + 1) * means, prepend=0.0)  # divergence before the step of each epoch
    assert (np.diff(kls[:4]) > 1e-4).all()
    for stop in (2, 3):
        for factor, n_epochs in ((0.99, stop), (1.01, stop + 1)):
            # Epoch `stop` (from 0) takes its step only if its divergence is at most 1.5 times the target.
            capped = {"n_epochs": stop + 1, "target_kl": factor * kls[stop] / 1.5}
            one, other = trained(**capped)[0], trained(n_epochs=n_epochs)[0]
            for ours, theirs in zip(one.policy.parameters(), other.policy.parameters(), strict=True):
                assert torch.equal(ours, theirs), (stop, factor)
