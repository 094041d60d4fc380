"""DreamerV3's update against a computation in float64 with loops, and which gradients must be stopped."""

import copy

import numpy as np
import probes
import pytest
import torch
from gymnasium import spaces

from rlox.algorithms import DreamerV3
from rlox.nn.acting import Inputs
from rlox.nn.batch import SequenceBatch
from rlox.world_models.acting import DreamerPolicy
from rlox.world_models.laprop import LEAST_NORM

SMALL = {
    "deter_dim": 16, "hidden_dim": 12, "stoch_dim": 3, "stoch_classes": 4, "batch_size": 3, "seq_len": 6,
    "imagination_horizon": 4, "learning_starts": 40, "buffer_size": 1000, "warmup_updates": 0,
}  # fmt: skip
B, T, H = 3, 6, 4


def made(**changes):
    algorithm = DreamerV3("CartPole-v1", seed=0, **{**SMALL, **changes})
    with torch.no_grad():
        # Heads with zero weights would not depend on their input.
        for module in (algorithm.heads.reward, algorithm.heads.critic, algorithm.slow_critic):
            weight = module.mlp.out.weight
            weight.copy_(torch.from_numpy(0.3 * np.random.default_rng(1).standard_normal(weight.shape)))
        algorithm.slow_critic.mlp.out.weight *= 0.5
    return algorithm


def batch(algorithm, **columns):
    """Three sequences: one continues, one terminates in the middle, one is truncated by a time limit."""
    g = np.random.default_rng(0)
    given = {
        "obs": g.standard_normal((B, T, 4)),
        "actions": np.eye(2)[g.integers(0, 2, (B, T))],
        "rewards": g.standard_normal((B, T)),
        "is_first": np.zeros((B, T), bool),
        "terminated": np.zeros((B, T), bool),
        "truncated": np.zeros((B, T), bool),
        "state": np.zeros((B, algorithm.policy.n_carried)),
    }
    given["terminated"][1, 2] = given["truncated"][2, 3] = True
    given["is_first"][1, 3] = given["is_first"][2, 4] = True
    given["rewards"][given["is_first"]] = 0
    given |= columns
    as_f32 = {name: x if x.dtype == bool else x.astype(np.float32) for name, x in given.items()}
    for _ in range(B * T):  # rows of the memory to which the new states are written
        algorithm.buffer.push(np.zeros(4), np.zeros(2), 0, False, False, state=np.zeros(algorithm.policy.n_carried))
    return SequenceBatch(**as_f32, indices=np.arange(B) * T)


def bce(logit, target):
    return np.logaddexp(0, logit) - target * logit


def test_the_losses_of_an_update(monkeypatch):
    algorithm = made(
        gamma=0.9, gae_lambda=0.8, ent_coef=0.1, free_nats=0.05, vector_coef=3.0, kl_coef=0.7, kl_balance=0.3,
        slow_coef=0.4, return_rate=0.9, vf_coef=1.7, replay_vf_coef=0.6,
    )  # fmt: skip
    total, compute = [], algorithm.loss

    def loss(*arguments):
        found, metrics = compute(*arguments)
        total.append(found.item())
        return found, metrics

    monkeypatch.setattr(algorithm, "loss", loss)
    given, generator = batch(algorithm), algorithm.rng.get_state()
    policy, heads, slow = (
        copy.deepcopy(m).double() for m in (algorithm.policy, algorithm.heads, algorithm.slow_critic)
    )
    metrics = {name: float(value) for name, value in algorithm.update(given).items()}

    algorithm.rng.set_state(generator)
    obs, actions, rewards, first, terminated, truncated = (
        np.moveaxis(given.array(name), 0, 1).astype(np.float64)
        for name in ("obs", "actions", "rewards", "is_first", "terminated", "truncated")
    )
    tensor = torch.from_numpy
    with torch.no_grad():
        policy.encoder.see(tensor(obs))
        draws = tensor(algorithm.rng.uniform((T, B, 3))).double()
        before = np.concatenate([np.zeros((1, B, 2)), actions[:-1]])
        states, post = policy.rssm.observe(
            policy.encoder(tensor(obs)), tensor(before), tensor(first > 0), policy.rssm.initial(B), draws
        )
        feat = states.feat
        continue_logits = heads.continues(feat)[..., 0].numpy()
        # Discounts are learned: gamma if the episode continues, 0 after a termination, which a time limit is not.
        expected = {"continue_loss": bce(continue_logits, 0.9 * (1 - terminated)).mean()}
        expected["reward_loss"] = heads.reward.loss(heads.reward(feat), tensor(rewards)).mean().item()
        predicted = heads.decoder(feat).numpy()
        wide = (obs - obs.mean((0, 1))) / obs.std((0, 1))
        target = np.sign(wide) * np.log1p(np.abs(wide))
        expected["reconstruction_loss"] = ((predicted - target) ** 2).sum(-1).mean()
        dyn, rep, *_ = policy.rssm.kl(states.deter, post, 0.05)
        expected |= {"dynamics_loss": dyn.mean().item(), "representation_loss": rep.mean().item()}

        # Imagination, step by step.
        state = states.flat_states()
        uniform = algorithm.rng.uniform((H, T * B, 3))
        noise = algorithm.rng.uniform((H, T * B, 1))
        feats, taken = [state.feat], []
        for t in range(H):
            taken.append(policy.actor.sample(feats[-1], tensor(noise[t]).double()))
            deter = policy.rssm.step(state, policy.rssm.embed(taken[-1]))
            stoch = policy.rssm.draw(policy.rssm.prior(deter), tensor(uniform[t]).double())
            state = type(state)(deter, stoch)
            feats.append(state.feat)
        feats = torch.stack(feats)
        values = heads.critic.mean(heads.critic(feats)).numpy()
        going = 1 / (1 + np.exp(-heads.continues(feats)[..., 0].numpy()))
        arriving = heads.reward.mean(heads.reward(feats)).numpy()
        returns = np.empty((H + 1, T * B))
        returns[H] = values[H]
        for t in reversed(range(H)):
            ahead = 0.2 * values[t + 1] + 0.8 * returns[t + 1]
            returns[t] = arriving[t + 1] + going[t + 1] * ahead
        weights = np.empty((H, T * B))
        for t in range(H):
            weights[t] = going[: t + 1].prod(0)  # including the discount of the starting state
        spread = 0.9 * (np.quantile(returns[:H], 0.95) - np.quantile(returns[:H], 0.05))
        assert spread > 1.0
        advantages = (returns[:H] - values[:H]) / max(1.0, spread)
        log_probs, entropy = (x.numpy() for x in policy.actor.distribution(feats[:H], torch.stack(taken)))
        expected["policy_loss"] = -(weights * (log_probs * advantages + 0.1 * entropy)).mean()
        both = [tensor(returns[:H]), slow.mean(slow(feats[:H]))]
        errors = heads.critic.loss(heads.critic(feats[:H]), *both).numpy()
        expected["value_loss"] = (weights * (errors[..., 0] + 0.4 * errors[..., 1])).mean()

        # The loss of the critic on replayed states.
        boot = returns[0].reshape(T, B)
        seen = np.empty((T, B))
        seen[-1] = boot[-1]
        over = (terminated + truncated) > 0
        for t in reversed(range(T - 1)):
            trace = 0.8 * (1 - over[t + 1])
            ahead = (1 - trace) * boot[t + 1] + trace * seen[t + 1]
            seen[t] = rewards[t + 1] + 0.9 * (1 - terminated[t + 1]) * ahead
        both = [tensor(seen[:-1]), slow.mean(slow(feat))[:-1]]
        errors = heads.critic.loss(heads.critic(feat)[:-1], *both).numpy()
        expected["replay_value_loss"] = ((1 - over[:-1]) * (errors[..., 0] + 0.4 * errors[..., 1])).mean()
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=2e-4, abs=2e-5), name
    assert metrics["imagined_return"] == pytest.approx(returns[:H].mean(), rel=1e-4, abs=1e-5)
    coefs = {"reconstruction_loss": 3.0, "dynamics_loss": 0.7 * 0.3, "representation_loss": 0.7 * 0.7}
    coefs |= {"value_loss": 1.7, "replay_value_loss": 0.6}
    weighted = sum(coefs.get(name, 1.0) * value for name, value in expected.items())
    assert total == [pytest.approx(weighted, rel=2e-4)]


def moved(one, other, module):
    """Names of the parameters of a module that differ between two algorithms."""
    ours, theirs = (dict(getattr(a, module).named_parameters()) for a in (one, other))
    return {name for name in ours if not torch.equal(ours[name], theirs[name])}


def test_imagined_losses_train_only_actor_and_critic_and_the_replayed_one_trains_the_model():
    plain, valued, acted, replayed = made(), made(vf_coef=3.0), made(ent_coef=0.5), made(replay_vf_coef=2.0)
    for algorithm in (plain, valued, acted, replayed):
        algorithm.update(batch(algorithm))
    for changed, part in ((valued, "critic."), (acted, "actor.")):
        names = moved(plain, changed, "policy") | moved(plain, changed, "heads")
        assert names
        assert all(name.startswith(part) for name in names)
    assert any(name.startswith("rssm.") for name in moved(plain, replayed, "policy"))
    assert not any(name.startswith("actor.") for name in moved(plain, replayed, "policy"))


def test_one_update_moves_every_parameter_and_the_slow_critic_after_it():
    # Below the free nats the prior has no gradient.
    algorithm, still = made(free_nats=0.0, slow_rate=0.3), made()
    before = {k: v.clone() for k, v in algorithm.slow_critic.state_dict().items()}
    algorithm.update(batch(algorithm))
    for module in ("policy", "heads"):
        untouched = set(dict(getattr(algorithm, module).named_parameters())) - moved(algorithm, still, module)
        assert not untouched
    critic = algorithm.heads.critic.state_dict()
    for name, slow in algorithm.slow_critic.state_dict().items():
        torch.testing.assert_close(slow, before[name] + 0.3 * (critic[name] - before[name]), rtol=0, atol=1e-6)


def test_gradients_are_clipped_to_a_share_of_the_weights():
    algorithm = made(gradient_clip=0.002)
    parameters = [*algorithm.policy.parameters(), *algorithm.heads.parameters()]
    most = [0.002 * max(p.detach().norm().item(), LEAST_NORM) for p in parameters]
    algorithm.update(batch(algorithm))
    shares = [p.grad.norm().item() / limit for p, limit in zip(parameters, most, strict=True)]
    assert max(shares) == pytest.approx(1.0, rel=1e-4)


def test_training_writes_updated_states_into_the_memory():
    algorithm = made()
    algorithm.train(41)
    states = algorithm.buffer.get_state()["state"]
    random = states[0, :, : algorithm.policy.rssm.deter]
    assert (np.abs(random).max(-1) > 0).any()  # also for the random steps, which had no state


def test_documented_arguments_are_accepted():
    algorithm = DreamerV3(
        "CartPole-v1", n_envs=1, seed=42, latent_dim=64, imagination_horizon=5, buffer_size=10000, batch_size=32,
        seq_len=16, learning_rate=3e-4, gamma=0.99, obs_dim=4, n_actions=2, deter_dim=64, stoch_dim=8, stoch_classes=8,
        kl_balance=0.8, free_nats=1.0,
    )  # fmt: skip
    assert algorithm.policy.rssm.deter == 64
    with pytest.raises(ValueError, match="DreamerV3: obs_dim must be the environment's 4, got 5; leave it out"):
        DreamerV3("CartPole-v1", obs_dim=5)
    with pytest.raises(TypeError, match="DreamerV3: policy must be a DreamerPolicy, got Linear"):
        DreamerV3("CartPole-v1", policy=torch.nn.Linear(4, 2))


def test_a_custom_policy():
    algorithm = made()
    other = DreamerPolicy(algorithm.spec, algorithm.config, algorithm.rng)
    assert made(policy=other).policy is other


@pytest.mark.slow
def test_a_nan_stops_the_training():
    algorithm = made()
    algorithm.train(60)
    with torch.no_grad():
        algorithm.policy.rssm.norm.scale[0] = torch.nan
    with pytest.raises(FloatingPointError, match=r"dreamer: .* became nan"):
        algorithm.train(60)


@pytest.mark.slow
@pytest.mark.parametrize("env_id", ["Pendulum-v1", "CartPole-v1"])
def test_a_run_resumes_bit_for_bit(env_id, tmp_path):
    options = {**SMALL, "replay_ratio": 4.0, "learning_rate_schedule": "constant"}
    whole, first = (DreamerV3(env_id, n_envs=2, seed=3, **options) for _ in range(2))
    whole.train(200)
    first.train(120)
    first.save(tmp_path / "a.safetensors", memory=True)
    second = DreamerV3.from_checkpoint(tmp_path / "a.safetensors")
    second.train(80)
    assert second.counters.updates == whole.counters.updates > 10
    for module in ("policy", "heads", "slow_critic", "returns"):
        ours, theirs = getattr(whole, module).state_dict(), getattr(second, module).state_dict()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours), module
    obs = np.zeros(whole.spec.obs_dim, np.float32)
    np.testing.assert_array_equal(whole.predict(obs), second.predict(obs))


# ---- probes with a known answer

PROBE = {
    "n_envs": 8, "seed": 1, "learning_starts": 100, "batch_size": 8, "seq_len": 8, "replay_ratio": 8.0, "gamma": 0.9,
    "deter_dim": 32, "hidden_dim": 16, "stoch_dim": 4, "stoch_classes": 4, "imagination_horizon": 3,
    "warmup_updates": 0, "learning_rate": 3e-3, "buffer_size": 10_000,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "n_steps", "least", "changes"),
    [
        # The latent state is also sampled during evaluation. A policy that ignores the sign gets at most 0.5 and 0.75.
        (probes.MatchTheSign, 2000, 0.95, {"learning_rate": 1e-2}),
        pytest.param(probes.TwoSwitches, 3000, 0.95, {"learning_rate": 1e-2}, marks=pytest.mark.exhaustive),
        (probes.ReachTheTarget, 4000, -0.08, {"ent_coef": 1e-4, "learning_rate": 1e-2}),  # acting 0 gives -0.21
        (probes.BrightSide, 1300, 0.95, {"hidden_dim": 32, "batch_size": 4}),
    ],
)
def test_solves_its_probes(env, n_steps, least, changes):
    algorithm = DreamerV3(env, **{**PROBE, **changes})
    algorithm.train(n_steps)
    assert algorithm.evaluate(50).returns.mean() >= least


def test_actions_without_bounds_are_an_error_at_the_start():
    def unbounded():
        env = probes.ReachTheTarget()
        env.action_space = spaces.Box(-np.inf, np.inf, (1,))
        return env

    with pytest.raises(ValueError, match="bounds of the environment's actions must be finite and apart"):
        DreamerV3(unbounded, **PROBE)


@pytest.mark.slow
def test_value_is_one_over_one_minus_gamma_under_a_time_limit():
    algorithm = DreamerV3(lambda: probes.ConstantReward(5), **{**PROBE, "gamma": 0.8, "slow_coef": 0.0})
    algorithm.train(5000)
    actor = algorithm.actor
    _, carry = actor.mode(Inputs(np.zeros((1, 1), np.float32)))
    with torch.no_grad():
        state, _ = algorithm.policy.unpack(torch.from_numpy(carry))
        value = float(algorithm.heads.critic.mean(algorithm.heads.critic(state.feat)))
    assert value == pytest.approx(5.0, rel=0.03)  # if the limit were a termination it would be 3.4
