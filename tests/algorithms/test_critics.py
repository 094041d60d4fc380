"""Ensembles of critics, compared with a loop over networks in float64; what updates do with them."""

from dataclasses import fields

import numpy as np
import pytest
import torch

from rlox import DQN, SAC, TD3, preset
from rlox.algorithms import ALGORITHMS, resolve
from rlox.checkpoint.counters import scheduled
from rlox.checkpoint.meaning import DEFINES_MEANING, DEFINES_WEIGHTS
from rlox.kernels.rng import Rng
from rlox.nn.critics.ensemble import CriticEnsemble, draw_critics, follow_critics_
from rlox.nn.critics.losses import critic_loss
from rlox.nn.critics.norms import EPSILON
from rlox.nn.modules import flat_copy
from rlox.nn.optimizers import FlatOptimizer
from rlox.nn.value_losses import soft_policy_loss

D, A, B = 3, 2, 7


def ensemble(norm="none", after=False, n=3, head=None):
    made = CriticEnsemble(D, A, [6, 5], "relu", Rng(1), n, head, norm, after).double()
    rng = np.random.default_rng(4)
    with torch.no_grad():
        for part in made.norms:
            for name, parameter in (*part.named_parameters(), *part.named_buffers()):
                parameter.copy_(torch.from_numpy(rng.uniform(0.5, 1.5, parameter.shape)))
                assert name in ("scale", "shift", "mean", "var")
    return made


def pairs(seed=0, n=B):
    rng = np.random.default_rng(seed)
    return (torch.from_numpy(rng.normal(size=(n, size))) for size in (D, A))


def by_loop(made, i, x, norm, after, mode):
    """Return the outputs of critic i, computed layer by layer in NumPy; `mode` is running or batch."""

    def normed(part, x):
        scale, shift = (p[i].detach().numpy() for p in (part.scale, part.shift))
        if norm == "layer":
            return (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5) * scale + shift
        if mode == "batch":
            mean, var = x.mean(0), x.var(0)
        else:
            mean, var = part.mean[i].numpy(), part.var[i].numpy()
        return (x - mean) / np.sqrt(var + EPSILON) * scale + shift

    norms, biases = list(made.norms), list(made.biases)
    if norm == "batch":
        x = normed(norms.pop(0), x)
    for layer, weight in enumerate(made.weights):
        if layer:
            part = norms.pop(0) if norms else None
            if part is not None and not after:
                x = normed(part, x)
            x = np.maximum(x, 0)
            if part is not None and after:
                x = normed(part, x)
        x = x @ weight[i].detach().numpy()
        if len(made.weights) - layer <= len(biases):
            x = x + biases[layer - len(made.weights)][i].detach().numpy()
    return x


CASES = [("none", False), ("layer", False), ("layer", True), ("batch", False), ("batch", True)]


@pytest.mark.parametrize(("norm", "after"), CASES)
def test_an_ensemble_computes_each_critic_by_itself(norm, after):
    made = ensemble(norm, after)
    obs, actions = pairs()
    x = np.concatenate([obs, actions], 1)
    expected = np.stack([by_loop(made, i, x, norm, after, "running")[:, 0] for i in range(3)])
    np.testing.assert_allclose(made(obs, actions).detach(), expected, rtol=1e-9)
    np.testing.assert_allclose(made.first(obs, actions).detach(), expected[0], rtol=1e-9)
    np.testing.assert_allclose(made(obs, actions, torch.tensor([2, 0])).detach(), expected[[2, 0]], rtol=1e-9)


@pytest.mark.parametrize("after", [False, True])
def test_both_halves_of_a_joint_batch_share_its_statistics(after):
    made = ensemble("batch", after)
    (obs, actions), (next_obs, next_actions) = pairs(), pairs(1)
    x = np.concatenate([np.concatenate([obs, actions], 1), np.concatenate([next_obs, next_actions], 1)])
    expected = np.stack([by_loop(made, i, x, "batch", after, "batch")[:, 0] for i in range(3)])
    before = made.norms[1].mean.clone()
    ours, ahead = made.joint(obs, actions, next_obs, next_actions, learn=False)
    assert torch.equal(made.norms[1].mean, before)
    np.testing.assert_allclose(torch.cat([ours, ahead], 1).detach(), expected, rtol=1e-9)
    made.joint(obs, actions, next_obs, next_actions)
    assert not torch.equal(made.norms[1].mean, before)
    np.testing.assert_allclose(
        made.norms[0].mean[1, 0],
        0.99 * ensemble("batch", after).norms[0].mean[1, 0] + 0.01 * torch.from_numpy(x.mean(0)),
        rtol=1e-9,
    )


def columns(seed=0):
    rng = np.random.default_rng(seed)
    obs, actions = pairs(seed)
    next_obs, next_actions = pairs(seed + 1)
    rewards, discounts = torch.from_numpy(rng.normal(size=B)), torch.from_numpy(rng.choice([0.0, 0.9], B))
    return obs, actions, rewards, next_obs, next_actions, discounts


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("chosen", [None, [0, 2], [1]])
def test_targets_are_the_minimum_over_the_chosen_critics(chosen, weighted):
    critics, target = ensemble(), ensemble()
    with torch.no_grad():
        for p in target.parameters():
            p.add_(0.1)
    obs, actions, rewards, next_obs, next_actions, discounts = columns()
    weights = torch.linspace(0.1, 1.0, B, dtype=torch.float64) if weighted else None
    penalties = torch.from_numpy(np.random.default_rng(9).normal(size=B))
    which = None if chosen is None else torch.tensor(chosen)
    loss, metrics = critic_loss(
        critics, target, obs, actions, rewards, next_obs, next_actions, discounts, weights, penalties, which
    )
    values, ahead = critics(obs, actions).detach().numpy(), target(next_obs, next_actions).detach().numpy()
    y = rewards.numpy() + discounts.numpy() * (ahead[chosen or [0, 1, 2]].min(0) - penalties.numpy())
    share = np.ones(B) if weights is None else weights.numpy()
    np.testing.assert_allclose(loss.detach(), (share * (values - y) ** 2).mean(), rtol=1e-9)
    np.testing.assert_allclose(metrics["td_errors"], np.abs(values - y).mean(0), rtol=1e-9)
    assert all(p.grad is None for p in target.parameters())


def test_with_batch_statistics_targets_come_from_the_joint_batch_without_gradient():
    made = ensemble("batch", True)
    obs, actions, rewards, next_obs, next_actions, discounts = columns()
    loss, _ = critic_loss(made, made, obs, actions, rewards, next_obs, next_actions, discounts, None, None)
    again = ensemble("batch", True)
    values, ahead = again.joint(obs, actions, next_obs, next_actions)
    expected = (values - (rewards + discounts * ahead.detach().amin(0))).square().mean()
    assert torch.allclose(loss, expected, rtol=1e-12)
    parts = list(made.parameters())
    theirs = torch.autograd.grad(expected, list(again.parameters()))
    for our, their in zip(torch.autograd.grad(loss, parts), theirs, strict=True):
        assert torch.allclose(our, their, rtol=1e-9, atol=1e-14)


def test_a_target_network_with_batch_statistics_uses_those_of_the_joint_batch_and_learns_none():
    made = ensemble("batch")
    target, block = flat_copy(made)
    with torch.no_grad():
        block.add_(0.2)
    before = target.norms[1].mean.clone()
    obs, actions, rewards, next_obs, next_actions, discounts = columns()
    ahead = target.joint(obs, actions, next_obs, next_actions, learn=False)[1].amin(0)
    loss, _ = critic_loss(made, target, obs, actions, rewards, next_obs, next_actions, discounts, None, None)
    values = ensemble("batch").joint(obs, actions, next_obs, next_actions)[0]
    assert torch.allclose(loss, (values - (rewards + discounts * ahead)).square().mean(), rtol=1e-12)
    assert torch.equal(target.norms[1].mean, before)
    old = block.clone()
    flat = torch.cat([p.detach().reshape(-1) for p in made.parameters()])
    follow_critics_(target, block, made, flat, 0.25)
    assert torch.allclose(block, 0.75 * old + 0.25 * flat)
    assert torch.equal(target.norms[1].mean, made.norms[1].mean)


def test_the_critics_of_a_target_are_different_and_drawn_anew():
    class Options:
        n_critics, n_target_critics = 5, 2

    rng = Rng(3)
    drawn = [draw_critics(Options, rng, "cpu").tolist() for _ in range(200)]
    assert all(len({*pair}) == 2 for pair in drawn)
    counts = np.bincount(np.ravel(drawn), minlength=5)
    assert len(counts) == 5
    assert counts.min() > 50
    Options.n_target_critics, at = 5, rng.position
    assert draw_critics(Options, rng, "cpu") is None
    assert rng.position == at


def test_units_of_an_ensemble_have_the_norm_one():
    made = ensemble("batch")
    made.scale_units_()
    np.testing.assert_allclose(made.weights[1].detach().norm(dim=1), np.ones((3, 5)), rtol=1e-9)
    last = torch.cat([made.weights[-1], made.biases[-1]], 1).detach()
    np.testing.assert_allclose(last.norm(dim=1), np.ones((3, 1)), rtol=1e-9)


# ---- whole updates

SMALL = {"hidden_sizes": [8, 8], "learning_starts": 20, "batch_size": 16, "buffer_size": 500, "seed": 1}
CROSSQ = {**preset("crossq"), "critic_hidden_sizes": [12, 12]}
RECIPES = {
    "crossq": (SAC, CROSSQ),
    "renormalised": (SAC, {**CROSSQ, "renorm_warmup": 5}),
    "ensemble": (SAC, {"n_critics": 4, "n_target_critics": 2, "policy_value": "mean", "critic_norm": "layer"}),
    "td3": (TD3, {"critic_norm": "batch", "actor_norm": "batch", "target_network": False, "unit_norm": True}),
    "targets": (SAC, {"critic_norm": "batch", "actor_norm": "layer", "unit_norm": True, "weight_decay": 0.01,
                      "learning_rate_schedule": "cosine", "learning_rate_end": 0.1, "normalize_rewards": True,
                      "actor_learning_rate": 1e-3, "gradient_steps": 2}),
}  # fmt: skip


def state(agent):
    checkpoint = agent._checkpoint()
    return {f"{name}/{key}": x for name, arrays in checkpoint.tensors.items() for key, x in arrays.items()}


@pytest.mark.parametrize("name", RECIPES)
def test_a_resumed_training_has_the_bits_of_one_that_never_stopped(name, tmp_path):
    cls, options = RECIPES[name]
    whole = cls("Pendulum-v1", **SMALL, **options)
    whole.train(60, schedule_timesteps=90)
    whole.save(tmp_path / "a.safetensors", memory=True)
    resumed = cls.from_checkpoint(tmp_path / "a.safetensors")
    for agent in (whole, resumed):
        agent.train(30, schedule_timesteps=30)
    ours, theirs = state(whole), state(resumed)
    assert ours.keys() == theirs.keys()
    assert ("critics/norms.0.mean" in ours) == (options.get("critic_norm", "none") != "none") or name == "ensemble"
    for key in ours:
        np.testing.assert_array_equal(ours[key], theirs[key], err_msg=key)
    assert whole.evaluate(2).returns.tolist() == resumed.evaluate(2).returns.tolist()


def test_the_policy_is_updated_in_every_third_update_and_by_running_statistics_of_the_critics():
    agent = SAC("Pendulum-v1", **SMALL, **CROSSQ)
    agent.train(22)
    seen = []
    for _ in range(7):
        policy, alpha = agent.optimizer.flat.clone(), agent.log_alpha.detach().clone()
        critics = {name: x.clone() for name, x in agent.critics.state_dict().items()}
        metrics = agent.update(agent.sample())
        agent.counters.updates += 1
        moved = not torch.equal(policy, agent.optimizer.flat)
        assert moved == (agent.counters.updates % 3 == 0) == ("policy_loss" in metrics)
        assert moved == (not torch.equal(alpha, agent.log_alpha))
        assert all(not torch.equal(x, critics[name]) for name, x in agent.critics.state_dict().items())
        seen.append(moved)
    assert any(seen)
    assert not all(seen)


def test_separate_learning_rates_and_betas_reach_their_optimisers():
    agent = SAC(
        "Pendulum-v1", **SMALL, learning_rate=1e-3, actor_learning_rate=2e-3, critic_learning_rate=4e-3, adam_beta1=0.5,
        adam_beta2=0.9, weight_decay=0.1, learning_rate_schedule="linear", learning_rate_end=0.5,
    )  # fmt: skip
    metrics = agent.train(60)
    policy, critics, alpha = agent.optimizer, agent.critic_optimizer, agent._alpha_optimizer
    left = 1.0 - 0.5 * 59 / 60
    for optimizer, rate in ((policy, 2e-3), (critics, 4e-3), (alpha, 1e-3)):
        assert optimizer.learning_rate == pytest.approx(rate * left)
    assert metrics["actor_learning_rate"] == policy.learning_rate
    assert metrics["critic_learning_rate"] == critics.learning_rate
    assert (policy.betas, policy.weight_decay) == (critics.betas, critics.weight_decay) == ((0.5, 0.9), 0.1)
    assert (alpha.betas, alpha.weight_decay) == ((0.9, 0.999), 0.0)


@pytest.mark.parametrize(
    "option", [{"critic_norm": "batch"}, {"n_critics": 3}, {"adam_beta1": 0.5}, {"policy_delay": 2}]
)
def test_options_that_the_kernel_cannot_compute_choose_pytorch_and_say_so(option):
    agent = SAC("Pendulum-v1", **SMALL, **option)
    ((name, value),) = option.items()
    assert agent.backend == "torch"
    assert agent.backend_reason == f"only PyTorch computes {name}={value}"
    with pytest.raises(ValueError, match=f"backend must be auto or torch here, got 'native': .*{name}={value}"):
        SAC("Pendulum-v1", **SMALL, **option, backend="native")


@pytest.mark.filterwarnings("ignore:.* has no effect without")
@pytest.mark.parametrize("cls", [SAC, TD3])
def test_options_of_parts_that_are_not_there_leave_the_kernel(cls):
    idle = {"norm_after": True, "renorm_warmup": 9, "n_bins": 51, "v_min": -1.0, "n_quantiles": 9, "drop_quantiles": 1}
    agent, plain = cls("Pendulum-v1", **SMALL, **idle, v_max=20.0, learning_rate_end=0.5), cls("Pendulum-v1", **SMALL)
    assert agent.backend == "native"
    metrics, expected = agent.train(30), plain.train(30)
    assert all(metrics[name] == expected[name] for name in ("q_loss", "q_value", "grad_norm"))
    falling = {"learning_rate_schedule": "linear", "learning_rate_end": 0.5}
    for part in ({"critic_norm": "layer"}, {"critic_head": "quantile"}, {"critic_head": "categorical"}, falling):
        assert cls("Pendulum-v1", **SMALL, **idle, **part).backend == "torch"


@pytest.mark.parametrize(("option", "rule"), [
    ({"critic_norm": "bathc"}, "critic_norm must be one of none, layer, batch, batch_renorm"),
    ({"n_target_critics": 3}, r"n_target_critics must be in \[1, n_critics \(2\)\], or null"),
    ({"v_min": 6.0}, r"v_max must be above v_min \(6\)"),
    ({"drop_quantiles": 25}, r"drop_quantiles must be in \[0, n_quantiles \(25\)\)"),
    ({"adam_beta1": 1.0}, r"adam_beta1 must be in \[0, 1\)"),
    ({"learning_rate_schedule": "cosin"}, "learning_rate_schedule must be one of constant, linear, cosine"),
    ({"critic_hidden_sizes": [0]}, "critic_hidden_sizes must contain widths >= 1"),
])  # fmt: skip
def test_wrong_values_are_refused_with_their_rule(option, rule):
    with pytest.raises(ValueError, match=rule):
        SAC("Pendulum-v1", **SMALL, **option)


def test_rewards_are_scaled_by_the_running_deviation_of_returns():
    agent = SAC("Pendulum-v1", **SMALL, normalize_rewards=True, backend="torch", gamma=0.9)
    agent.train(40)
    state = agent.buffer.get_state()
    count = int(state["count"])
    rewards = agent.buffer.get_state()["rows"].view(np.float32)[:count, 7].astype(np.float64)
    returns = np.zeros(1)
    sums = []
    for reward in rewards:  # no episode of Pendulum ends within 40 steps
        returns = returns * 0.9 + reward
        sums.append(returns[0])
    n, prior = len(sums), 1e-4
    mean = np.mean(sums) * n / (n + prior)
    var = (np.var(sums) * n + prior + np.mean(sums) ** 2 * n * prior / (n + prior)) / (n + prior)
    assert agent.normalizer.return_moments.mean == pytest.approx(mean)
    assert agent.normalizer.return_moments.var == pytest.approx(var)
    scaled = agent._host_rows()["rewards"] * np.sqrt(var)
    assert all(np.isclose(rewards, value, rtol=1e-4).any() for value in scaled)
    assert agent.counters.mean_reward != agent.counters.mean_reward  # no episode has ended


def test_the_policy_climbs_the_minimum_or_the_mean_and_learns_its_own_statistics():
    agent = SAC("Pendulum-v1", **SMALL, n_critics=3, actor_norm="batch", critic_norm="batch")
    agent.train(24)
    batch = agent.sample()
    obs, noise, alpha = batch.obs, torch.ones(16, 1), torch.tensor(0.5)
    for mean in (False, True):
        actions, log_probs = agent.policy.unit_sample(obs, noise)
        values = agent.critics(obs, actions)
        expected = (0.5 * log_probs - (values.sum(0) / 3 if mean else values.min(0).values)).mean()
        assert torch.allclose(soft_policy_loss(agent.policy, agent.critics, obs, noise, alpha, mean)[0], expected)
    first, running = agent.policy.net[0], agent.policy.net[0].mean.clone()
    agent.update(batch)
    assert torch.allclose(first.mean, 0.99 * running + 0.01 * obs.mean(0))


def test_steps_are_those_of_adamw():
    ours = [torch.nn.Parameter(torch.linspace(-1.0, 1.0, 6, dtype=torch.float64)) for _ in range(2)]
    optimizer = FlatOptimizer([ours[0]], 1e-2, eps=1e-8, weight_decay=0.1, betas=(0.5, 0.9))
    theirs = torch.optim.AdamW([ours[1]], 1e-2, betas=(0.5, 0.9), eps=1e-8, weight_decay=0.1)
    for step in range(4):
        grad = torch.cos(torch.arange(6, dtype=torch.float64) + step)
        optimizer.descend([grad])
        ours[1].grad = grad.clone()
        theirs.step()
    np.testing.assert_allclose(ours[0].detach(), ours[1].detach(), rtol=1e-9)


def test_schedules_end_where_they_should():
    for schedule, middle in (("linear", 0.55), ("cosine", 0.1 + 0.9 * 0.5)):
        values = [scheduled(2.0, schedule, at, 0.1) for at in (0.0, 0.5, 1.0)]
        np.testing.assert_allclose(values, [2.0, 2.0 * middle, 0.2], rtol=1e-12)
    quarter = 0.1 + 0.9 * (1.0 + np.cos(np.pi / 4)) / 2
    assert scheduled(2.0, "cosine", 0.25, 0.1) == pytest.approx(2.0 * quarter)
    assert scheduled(2.0, "cosine", torch.tensor(0.25), 0.1).item() == pytest.approx(2.0 * quarter)
    assert scheduled(2.0, "constant", 0.25, 0.1) == 2.0


@pytest.mark.parametrize(
    "option", [{"actor_norm": "layer"}, {"residual_blocks": 1, "hidden_sizes": [8]}, {"unit_norm": True}]
)
def test_a_policy_of_ones_own_refuses_options_of_the_policy_that_it_replaces(option):
    module = torch.nn.Sequential(torch.nn.Linear(3, 2))
    before = module[0].weight.detach().clone()
    name, value = next(iter(option.items()))
    with pytest.raises(ValueError, match=f"SAC: policy must be left out with {name}={value}"):
        SAC("Pendulum-v1", policy=module, **{**SMALL, **option})
    assert torch.equal(module[0].weight, before)
    SAC("Pendulum-v1", policy=module, critic_norm="layer", **SMALL)


WEIGHTS = {
    "normalize_obs": (SAC, {"normalize_obs": True}, {}),
    "normalize_rewards": (SAC, {}, {"normalize_rewards": True}),
    "fit_rewards": (SAC, {"normalize_rewards": True, "fit_rewards": True}, {"normalize_rewards": True}),
    "critic_head": (SAC, {"critic_head": "categorical", "n_bins": 5}, {"critic_head": "quantile", "n_quantiles": 5}),
    "v_max": (SAC, {"critic_head": "categorical"}, {"critic_head": "categorical", "v_max": 50.0}),
    "unit_norm": (TD3, {}, {"unit_norm": True}),
    "activation": (TD3, {"activation": "tanh"}, {}),
    "distribution": (DQN, {"distribution": "categorical"}, {"distribution": "quantile"}),
    "v_min": (DQN, {"distribution": "categorical"}, {"distribution": "categorical", "v_min": -1.0}),
}


def test_settings_that_define_weights_exist():
    known = {item.name for entry in ALGORITHMS.values() for item in fields(resolve(entry.config))}
    assert {*DEFINES_WEIGHTS, *DEFINES_MEANING} <= known
    assert not {*DEFINES_WEIGHTS} & {*DEFINES_MEANING}
    assert {*WEIGHTS} <= {*DEFINES_WEIGHTS, *DEFINES_MEANING}


@pytest.mark.filterwarnings("ignore:SAC. n_bins has no effect without")
@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_that_would_mean_something_else_are_not_taken_over(name, tmp_path):
    cls, theirs, ours = WEIGHTS[name]
    env_id = "CartPole-v1" if cls is DQN else "Pendulum-v1"
    taught, start = (cls(env_id, **{**SMALL, **settings}) for settings in (theirs, ours))
    taught.save(tmp_path / "a.safetensors")
    before = start._weights()
    with pytest.raises(ValueError, match=f"init_from .*: {name} must be the checkpoint's, "):
        start.init_from(tmp_path / "a.safetensors")
    for key, array in start._weights().items():
        np.testing.assert_array_equal(array, before[key])
    with pytest.raises(ValueError, match=f"^{cls.__name__}.from_checkpoint: {name} must be the checkpoint's, "):
        cls.from_checkpoint(tmp_path / "a.safetensors", **{name: getattr(start.config, name)})
    other = cls(env_id, **{**SMALL, **theirs, "seed": 2})
    other.init_from(tmp_path / "a.safetensors")
    for key, array in other._weights().items():
        np.testing.assert_array_equal(array, taught._weights()[key])


def test_fitted_rewards_may_start_from_a_training_that_did_not_fit_them(tmp_path):
    bins = {"critic_head": "categorical", "normalize_rewards": True, "learning_rate": 1e-3}
    taught = SAC("Pendulum-v1", **SMALL, **bins)
    taught.train(40)
    taught.save(tmp_path / "a.safetensors")
    start = SAC("Pendulum-v1", **SMALL, **bins, fit_rewards=True)
    start.init_from(tmp_path / "a.safetensors")
    assert start.normalizer.return_moments.var == taught.normalizer.return_moments.var
    start.train(40)
    start.save(tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match=r"v_max must be the checkpoint's, 5.0, got 6.0"):
        SAC.from_checkpoint(tmp_path / "b.safetensors", v_max=6.0)
