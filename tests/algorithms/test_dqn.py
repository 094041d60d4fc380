"""DQN's own mathematics, each part of Rainbow on its own, the memory around it, and a pinned trajectory."""

import copy

import numpy as np
import probes
import pytest
import torch
from run_results import Losses
from torch import nn

from rlox.algorithms import DQN
from rlox.algorithms.trainers import DQNTrainer
from rlox.callbacks import Callback
from rlox.kernels.rng import Rng
from rlox.nn.actors import DiscreteQNetwork, polyak_update
from rlox.nn.batch import TransitionBatch

SMALL = {"hidden_sizes": [16, 16], "buffer_size": 2_000, "batch_size": 16, "learning_starts": 20}


def batch_of(n=32, weights=None, seed=0):
    """Random transitions of CartPole's shapes; a third of them terminate."""
    rng = np.random.default_rng(seed)
    return TransitionBatch(
        obs=torch.from_numpy(rng.normal(size=(n, 4)).astype(np.float32)),
        actions=torch.from_numpy(rng.integers(2, size=n)),
        rewards=torch.from_numpy(3 * rng.normal(size=n).astype(np.float32)),
        next_obs=torch.from_numpy(rng.normal(size=(n, 4)).astype(np.float32)),
        discounts=torch.from_numpy(np.where(rng.random(n) < 1 / 3, 0.0, 0.9).astype(np.float32)),
        weights=weights,
    )


def shaken(dqn):
    """`dqn` with a target network that differs from the online one."""
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in dqn.target.parameters():
            p += 0.3 * torch.randn(p.shape, generator=rng)
    return dqn


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("loss", ["huber", "mse"])
@pytest.mark.parametrize("weighted", [False, True])
def test_update_equals_the_textbook(double, loss, weighted):
    dqn = shaken(
        DQN("CartPole-v1", seed=0, double_dqn=double, loss=loss, max_grad_norm=0.5, learning_rate=1e-3, **SMALL)
    )
    q, target = copy.deepcopy(dqn.policy), copy.deepcopy(dqn.target)
    weights = torch.linspace(0.1, 1.0, 32) if weighted else None
    batch = batch_of(weights=weights)
    adam = torch.optim.Adam(q.parameters(), lr=1e-3)
    targets = []
    for i in range(32):
        with torch.no_grad():
            ahead = target(batch.next_obs[i : i + 1])[0]
            best = (q(batch.next_obs[i : i + 1])[0] if double else ahead).argmax()
        targets.append(batch.rewards[i] + batch.discounts[i] * ahead[best])
    errors = q(batch.obs)[torch.arange(32), batch.actions] - torch.stack(targets)
    small = errors.abs() < 1
    huber = torch.where(small, 0.5 * errors**2, errors.abs() - 0.5)
    assert 4 < small.sum() < 28
    each = huber if loss == "huber" else errors**2
    total = (each * weights).mean() if weighted else each.mean()
    total.backward()
    norm = torch.nn.utils.clip_grad_norm_(q.parameters(), 0.5)
    adam.step()
    metrics = dqn.update(batch)
    torch.testing.assert_close(metrics["q_loss"], total.detach())
    torch.testing.assert_close(metrics["td_error"], errors.detach().abs().mean())
    torch.testing.assert_close(metrics["grad_norm"], norm)
    for ours, theirs in zip(dqn.policy.parameters(), q.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_double_dqn_overestimates_less():
    def bootstrapped(double):
        found = []

        class Watch(Callback):
            def on_step(self, *, step, algorithm, **info):
                if step > 1_500:
                    with torch.no_grad():
                        found.append(algorithm.policy(torch.zeros(1, 1)).mean().item())
                return True

        settings = {"n_envs": 4, "train_freq": 4, "learning_starts": 400, "buffer_size": 400, "target_update_freq": 800}
        explore = {"exploration_fraction": 0.0, "exploration_final_eps": 1.0}
        DQN(
            probes.NoisyArms, seed=0, double_dqn=double, gamma=1.0, learning_rate=3e-3, hidden_sizes=[32],
            callbacks=[Watch()], **settings, **explore,
        ).train(6_000)  # fmt: skip
        return np.mean(found)

    single, double = bootstrapped(False), bootstrapped(True)
    assert single > 0.2  # the truth is 0
    assert double < 0.7 * single


def test_dueling_centres_its_advantages():
    plain, dueling = (DiscreteQNetwork(3, 4, (8, 6), dueling=d, rng=Rng(1)) for d in (False, True))
    obs = torch.randn(5, 3)
    assert plain(obs).shape == dueling(obs).shape == (5, 4)
    features = torch.relu(obs @ dueling.trunk[0].weight.T + dueling.trunk[0].bias)
    advantages = dueling.head(features)
    torch.testing.assert_close(dueling(obs).mean(-1), dueling.value(features).squeeze(-1))
    torch.testing.assert_close(dueling(obs).diff(), advantages.diff())
    assert DiscreteQNetwork((1, 36, 36), 2, (), dueling=True, rng=Rng(1))(
        torch.zeros(2, 1, 36, 36, dtype=torch.uint8)
    ).shape == (2, 2)


def test_polyak_update():
    ours, theirs = nn.Linear(2, 2), nn.Linear(2, 2)
    expected = 0.75 * ours.weight.detach() + 0.25 * theirs.weight.detach()
    polyak_update(theirs, ours, 0.25)
    torch.testing.assert_close(ours.weight.detach(), expected)
    polyak_update(theirs, ours, 1.0)
    assert torch.equal(ours.weight, theirs.weight)
    with pytest.raises(ValueError, match=r"tau must be in \(0, 1\], got 0"):
        polyak_update(theirs, ours, 0)
    with pytest.raises(ValueError, match="must have the parameters of source"):
        polyak_update(nn.Linear(3, 2), ours)


@pytest.mark.parametrize("truncate", [False, True])
def test_n_step_returns_through_the_memory_equal_those_by_hand(truncate):
    """Countdown pays 1 per step for four steps and shows the number of steps; n = 3, gamma = 0.5."""
    dqn = DQN(
        lambda: probes.Countdown(4, truncate), n_envs=2, seed=0, n_step=3, gamma=0.5, **{**SMALL, "batch_size": 512}
    )
    for _ in range(40):
        dqn.collector.step(dqn.policy, dqn.buffer, random=True)
    batch = dqn.sample()
    by_hand = {}  # first observation -> (return, last observation, discount)
    for t in range(4):
        steps = min(3, 4 - t)
        ends = t + steps == 4
        by_hand[t] = (sum(0.5**k for k in range(steps)), t + steps, 0.0 if ends and not truncate else 0.5**steps)
    seen = set()
    for i in range(512):
        t = int(batch.obs[i, 0])
        seen.add(t)
        found = (batch.rewards[i].item(), batch.next_obs[i, 0].item(), batch.discounts[i].item())
        assert found == pytest.approx(by_hand[t]), t
    assert seen == {0, 1, 2, 3}


def test_one_step_targets_bootstrap_from_the_final_observation():
    for truncate in (False, True):
        dqn = DQN(lambda cut=truncate: probes.Countdown(4, cut), n_envs=2, seed=0, gamma=0.5, **SMALL)
        for _ in range(40):
            dqn.collector.step(dqn.policy, dqn.buffer, random=True)
        batch = dqn.sample()
        assert torch.equal(batch.next_obs, batch.obs + 1)  # never the next episode's 0
        last = batch.next_obs[:, 0] == 4
        assert last.any()
        assert (batch.discounts[~last] == 0.5).all()
        assert (batch.discounts[last] == (0.5 if truncate else 0.0)).all()


def test_prioritised_replay_receives_errors_and_weights_samples():
    dqn = DQN("CartPole-v1", seed=0, prioritized=True, **SMALL)
    dqn.train(200)
    assert dqn._memory.config.name == "prioritized"
    batch = dqn.sample()
    assert batch.weights.shape == batch.indices.shape == (16,)
    assert 0 < batch.weights.min() < 1 < batch.weights.max()  # weights correct the mean without reducing it
    reported = []
    update_priorities = dqn.buffer.update_priorities

    class Recorder:
        def update_priorities(self, indices, priorities):
            reported.append((indices, priorities))
            update_priorities(indices, priorities)

    dqn._memory._buffer = Recorder()
    with torch.no_grad():
        ahead = dqn.target(batch.next_obs).gather(-1, dqn.policy(batch.next_obs).argmax(-1, keepdim=True)).squeeze(-1)
        values = dqn.policy(batch.obs).gather(-1, batch.actions[:, None]).squeeze(-1)
        errors = values - batch.rewards - batch.discounts * ahead
    metrics = dqn.update(batch)
    ((indices, priorities),) = reported
    assert np.array_equal(indices, batch.indices)
    np.testing.assert_allclose(priorities, errors.abs().numpy(), rtol=1e-4, atol=1e-6)
    losses = torch.where(errors.abs() < 1, 0.5 * errors**2, errors.abs() - 0.5)
    torch.testing.assert_close(metrics["q_loss"], (batch.weights * losses).mean())


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_transition_without_an_error_is_still_drawn(backend):
    """Rewards, discounts and values of 0 make every TD error exactly 0."""
    nothing = lambda obs, actions, raw_rewards: 0 * raw_rewards  # noqa: E731
    settings = {**SMALL, "buffer_size": None, "gamma": 0.0}
    dqn = DQN("CartPole-v1", seed=0, backend=backend, reward_fn=nothing, buffer={"name": "prioritized", "size": 64},
              learning_rate=1e-30, **settings)  # fmt: skip
    with torch.no_grad():
        for p in [*dqn.policy.parameters(), *dqn.target.parameters()]:
            p.zero_()
    dqn.train(500)
    leaves = dqn.buffer.get_state()["leaves"]
    np.testing.assert_allclose(leaves.min(), dqn._memory.config.eps**0.6, rtol=1e-6)
    assert len(set(dqn.buffer.sample(5000, 1).indices.tolist())) == 64


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_divergence_with_a_prioritised_memory_is_named_by_the_loop(backend):
    dqn = DQN("CartPole-v1", seed=0, backend=backend, prioritized=True, loss="mse", learning_rate=1e30, **SMALL)
    with pytest.raises(FloatingPointError):
        dqn.train(2000)


def test_importance_weights_correct_the_expectation():
    """Transitions drawn by priority have a different mean; weighted with beta = 1 they have the true mean."""
    dqn = DQN(
        lambda: probes.Countdown(20), seed=0, buffer={"name": "prioritized", "size": 64, "alpha": 1.0, "beta": 1.0},
        **{**SMALL, "buffer_size": None, "batch_size": 64},
    )  # fmt: skip
    for _ in range(64):
        dqn.collector.step(dqn.policy, dqn.buffer, random=True)
    everything = dqn.buffer.gather(np.arange(64))["obs"][:, 0]
    dqn.buffer.update_priorities(np.arange(64), (everything + 1.0).astype(np.float64))
    batches = [dqn.sample() for _ in range(400)]
    x, w = (torch.cat([getattr(b, name).reshape(-1) for b in batches]) for name in ("obs", "weights"))
    truth = everything.mean()
    assert x.mean() > 1.2 * truth  # late steps have higher priorities
    assert ((w * x).sum() / w.sum()).item() == pytest.approx(truth, rel=0.02)


def test_prioritised_sampling_prefers_large_errors():
    """One reward in sixteen is -20, the others are 1: its errors stay large, so it is drawn more often."""

    def rare(obs, actions, raw_rewards):
        return np.where(obs[:, 0] == 15, -20.0, raw_rewards)

    def share(buffer):
        settings = {**SMALL, "buffer_size": None, "batch_size": 32, "gamma": 0.0, "learning_rate": 1e-3}
        dqn = DQN(
            lambda: probes.Countdown(16), seed=0, reward_fn=rare, buffer={"name": buffer, "size": 512}, **settings
        )
        dqn.train(512)
        return torch.cat([dqn.sample().rewards for _ in range(100)]).eq(-20.0).float().mean().item()

    assert share("uniform") == pytest.approx(1 / 16, rel=0.15)
    assert share("prioritized") > 2 / 16


def test_beta_rises_to_one_at_the_horizon():
    """An update uses the fraction of the horizon that was done at the start of its round."""
    betas = []
    dqn = DQN("CartPole-v1", seed=0, buffer={"name": "prioritized", "beta": 0.5}, train_freq=10, **SMALL)

    class Spy:
        """The memory itself, which records calls of `set_beta`."""

        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def __len__(self):
            return len(self.inner)

        def set_beta(self, beta):
            betas.append(beta)
            self.inner.set_beta(beta)

    dqn._memory._buffer = Spy(dqn.buffer)
    dqn.train(100)
    np.testing.assert_allclose(betas, [0.5 + 0.5 * step / 100 for step in range(10, 100, 10)])


def test_rounds_count_environment_steps():
    def counts(**settings):
        dqn = DQN("CartPole-v1", seed=0, **{**SMALL, **settings})
        dqn.train(100)
        return dqn.counters.env_steps, dqn.counters.updates

    assert counts() == (100, 81)  # the first update at step 20
    assert counts(train_freq=8) == (104, 11)  # updates at 24, 32, ..., 104
    assert counts(train_freq=8, gradient_steps=3) == (104, 33)
    assert counts(train_freq=8, gradient_steps=-1) == (104, 88)
    assert counts(n_envs=3, train_freq=8, gradient_steps=-1) == (108, 90)  # rounds of 9, the first at 27


def test_target_moves_at_multiples_of_its_period():
    changes = []

    class Watch(Callback):
        last = None

        def on_step(self, *, step, algorithm, **info):
            now = algorithm.target.q.head[0].weight.clone()
            if self.last is not None and not torch.equal(now, self.last):
                changes.append(step)
            self.last = now
            return True

    DQN("CartPole-v1", seed=0, target_update_freq=25, callbacks=[Watch()], **SMALL).train(100)
    assert changes == [25, 50, 75, 100]
    soft = DQN("CartPole-v1", seed=0, tau=0.1, target_update_freq=1, **SMALL)
    soft.train(100)
    q, target = soft.policy.q.head[0].weight, soft.target.q.head[0].weight
    assert 0 < (q - target).abs().max() < 0.1


def test_epsilon_falls_linearly_and_random_actions_come_first():
    epsilons, actions = [], []

    class Watch(Callback):
        def on_step(self, *, metrics, **info):
            epsilons.append(metrics["exploration/epsilon"])
            return True

    def watched(obs, taken, raw_rewards):
        actions.extend(taken.tolist())
        return raw_rewards

    settings = {"exploration_fraction": 0.5, "exploration_initial_eps": 0.8, "exploration_final_eps": 0.0}
    dqn = DQN("CartPole-v1", seed=0, callbacks=[Watch()], reward_fn=watched, **settings, **SMALL)
    dqn.train(100)
    np.testing.assert_allclose(epsilons, [max(0.0, 0.8 - 0.8 * step / 50) for step in range(100)], atol=1e-12)
    assert 0 < sum(actions[:20]) < 20
    assert not any(
        dqn.policy.act(torch.zeros(1, 4), torch.tensor([[0.0, u]])) != dqn.predict(np.zeros(4)) for u in (0.1, 0.9)
    )
    dqn.policy.epsilon = 1.0
    assert [dqn.policy.act(torch.zeros(1, 4), torch.tensor([[0.5, u]])).item() for u in (0.1, 0.9)] == [0, 1]


class UserQ(nn.Module):
    def __init__(self, n_actions=2):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, n_actions))

    def forward(self, obs):
        return self.layers(obs)


def test_a_custom_network(tmp_path):
    torch.manual_seed(0)
    dqn = DQN("CartPole-v1", policy=UserQ(), **SMALL)
    dqn.train(100)
    dqn.save(tmp_path / "mine.safetensors")
    with pytest.raises(ValueError, match="pass policy="):
        DQN.from_checkpoint(tmp_path / "mine.safetensors")
    again = DQN.from_checkpoint(tmp_path / "mine.safetensors", policy=UserQ())
    assert torch.equal(again.policy.q.layers[0].weight, dqn.policy.q.layers[0].weight)
    with pytest.raises(ValueError, match=r"must return the values of all actions, \(B, 2\), got \(2, 3\)"):
        DQN("CartPole-v1", policy=UserQ(3))
    with pytest.raises(ValueError, match=r"must take observations of shape \(B, 6,\)"):
        DQN("Acrobot-v1", policy=UserQ(3))


def test_a_restored_run_fills_its_memory_before_it_learns(tmp_path):
    dqn = DQN("CartPole-v1", seed=0, **SMALL)
    dqn.train(100)
    dqn.save(tmp_path / "a.safetensors")
    again = DQN.from_checkpoint(tmp_path / "a.safetensors")
    assert len(again.buffer) == 0
    updates = again.counters.updates
    again.train(19)
    assert again.counters.updates == updates
    again.train(1)
    assert again.counters.updates == updates + 1
    changed = DQN.from_checkpoint(tmp_path / "a.safetensors", learning_rate=1e-2, buffer="prioritized")
    assert (changed.config.learning_rate, changed._memory.config.name) == (1e-2, "prioritized")
    assert changed.config.hidden_sizes == [16, 16]


def test_weights_of_another_run_are_loaded_into_both_networks(tmp_path):
    dqn = DQN("CartPole-v1", seed=0, **SMALL)
    dqn.train(100)
    dqn.save(tmp_path / "a.safetensors")
    new = DQN("CartPole-v1", seed=1, **SMALL)
    new.init_from(tmp_path / "a.safetensors")
    for module in (new.policy, new.target):
        assert torch.equal(module.q.head[0].weight, dqn.policy.q.head[0].weight)
    with pytest.raises(ValueError, match="does not fit"):
        DQN("CartPole-v1", dueling=True, **SMALL).init_from(tmp_path / "a.safetensors")


def test_a_policy_of_ones_own_is_not_dueling():
    with pytest.raises(ValueError, match="DQN: policy must be left out with dueling, got a Linear"):
        DQN("CartPole-v1", policy=torch.nn.Linear(4, 2), dueling=True, **SMALL)


def test_a_memory_smaller_than_a_batch_is_an_error():
    least = r"size must be at least batch_size \(64\) and n_envs \(1\), got buffer_size=10"
    with pytest.raises(ValueError, match=least):
        DQN("CartPole-v1", buffer_size=10)


def test_trainer_is_the_algorithm():
    trainer, plain = DQNTrainer(env="CartPole-v1", seed=3, **SMALL), DQN("CartPole-v1", seed=3, **SMALL)
    assert trainer.train(200)["q_loss"] == plain.train(200)["q_loss"]
    assert trainer.predict(np.zeros(4)) == plain.predict(np.zeros(4))


# (q_loss, q_value, td_error, grad_norm) of five updates with one thread; see test_ppo.py.
PINNED = {
    "plain": [
        [0.743232786655426, -0.006610646843910217, 1.2432327270507812, 1.0710393190383911],
        [0.5822954177856445, 0.1747325211763382, 1.0822060108184814, 0.9658183455467224],
        [0.6179945468902588, 0.2189742773771286, 1.1179945468902588, 1.0086137056350708],
        [0.4577665627002716, 0.3944067358970642, 0.9252455234527588, 1.1003992557525635],
        [0.5684827566146851, 0.47567427158355713, 1.064629316329956, 1.3965853452682495],
    ],
    "rainbow": [
        [2.380250930786133, 0.19417716562747955, 2.880250930786133, 1.2025216817855835],
        [2.2369372844696045, 0.2658984959125519, 2.55609393119812, 1.2118295431137085],
        [1.9968922138214111, 0.4191262423992157, 2.590362310409546, 1.3239701986312866],
        [2.1658971309661865, 0.5708372592926025, 2.66119384765625, 1.4139260053634644],
        [2.9667482376098633, 0.48935312032699585, 2.8296351432800293, 1.5571521520614624],
    ],
}


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("kind", PINNED)
def test_pinned_trajectory(kind, backend):
    log = Losses("q", "q_value", "td_error", "grad_norm")
    settings = {"batch_size": 16, "buffer_size": 500, "learning_starts": 32, "train_freq": 8, "learning_rate": 1e-2}
    settings |= {"double_dqn": False} if kind == "plain" else {"dueling": True, "n_step": 3, "prioritized": True}
    settings |= {"hidden_sizes": [16, 16], "target_update_freq": 16, "n_envs": 4, "seed": 7}
    DQN("CartPole-v1", logger=log, backend=backend, **settings).train(64)
    np.testing.assert_allclose(log.rows, PINNED[kind], rtol=1e-4)


def test_a_subclass_that_changes_the_sample_is_asked_for_each():
    class Counting(DQN):
        n_drawn = 0

        def sample(self):
            self.n_drawn += 1
            return super().sample()

    dqn = Counting("CartPole-v1", seed=0, **{**SMALL, "learning_starts": 40})
    dqn.train(100)
    assert dqn.n_drawn == dqn.counters.updates > 0
    assert "step by step, since Counting changes sample" in dqn.backend_reason
