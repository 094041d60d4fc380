"""What critics predict of the return: values, targets and losses, compared with NumPy, and gradients with PyTorch's."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rlox import SAC, preset
from rlox.kernels.rng import Rng
from rlox.nn.critics.ensemble import CriticEnsemble, Dropout
from rlox.nn.critics.heads import CategoricalHead, QuantileHead

N, B = 3, 6


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def inputs(k, seed=0):
    rng = np.random.default_rng(seed)
    outputs = torch.from_numpy(2.0 * rng.normal(size=(N, B, k)))
    rewards, penalties = (torch.from_numpy(rng.normal(size=B)) for _ in range(2))
    discounts = torch.from_numpy(np.array([0.0, 0.9, 0.9, 0.5, 0.99, 0.9]))
    return outputs, rewards, discounts, penalties


# ---- categorical


@pytest.mark.parametrize("penalised", [True, False])
def test_a_categorical_target_is_the_projection_of_the_least_critics_distribution(penalised):
    head = CategoricalHead(7, -2.0, 1.0).double()
    outputs, rewards, discounts, penalties = inputs(7)
    rewards[5] = 30.0  # beyond the last bin
    bins, probs = np.linspace(-2.0, 1.0, 7), softmax(outputs.numpy())
    np.testing.assert_allclose(head.values(outputs), probs @ bins, rtol=1e-6)
    expected = np.zeros((B, 7))
    for row in range(B):
        critic = (probs[:, row] @ bins).argmin()
        for p, value in zip(probs[critic, row], bins, strict=True):
            value = rewards[row] + discounts[row] * (value - penalties[row] * penalised)
            value = min(max(float(value), -2.0), 1.0)
            for i, centre in enumerate(bins):  # the two-hot weights of a value: a triangle around each bin
                expected[row, i] += p * max(0.0, 1.0 - abs(value - centre) / 0.5)
    targets = head.targets(outputs, rewards, discounts, penalties if penalised else None)
    np.testing.assert_allclose(targets, expected, rtol=1e-6, atol=1e-7)
    assert len({(probs[:, row] @ bins).argmin() for row in range(B)}) > 1
    np.testing.assert_allclose(targets.sum(-1), np.ones(B), rtol=1e-9)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_categorical_loss_is_the_cross_entropy(weighted):
    head = CategoricalHead(5, -1.0, 1.0).double()
    outputs = inputs(5)[0].requires_grad_()
    targets = torch.from_numpy(softmax(np.random.default_rng(3).normal(size=(B, 5))))
    weights = torch.linspace(0.2, 1.0, B, dtype=torch.float64) if weighted else None
    loss, metrics = head.loss(outputs, targets, weights)
    logs = np.log(softmax(outputs.detach().numpy()))
    share = np.ones(B) if weights is None else weights.numpy()
    np.testing.assert_allclose(loss.detach(), (share * -(logs * targets.numpy()).sum(-1)).mean(), rtol=1e-9)
    bins = np.linspace(-1, 1, 5)
    distance = np.abs(np.exp(logs) @ bins - targets.numpy() @ bins).mean(0)
    np.testing.assert_allclose(metrics["td_errors"], distance, rtol=1e-6)
    np.testing.assert_allclose(metrics["q_value"], (np.exp(logs) @ bins).mean(), rtol=1e-6)
    (slopes,) = torch.autograd.grad(loss, outputs)
    expected = share[:, None] * (np.exp(logs) - targets.numpy()) / (N * B)
    np.testing.assert_allclose(slopes, expected, rtol=1e-9, atol=1e-12)


# ---- quantiles


@pytest.mark.parametrize("dropped", [0, 2])
def test_quantile_targets_leave_out_the_largest_of_all_critics(dropped):
    head = QuantileHead(5, dropped).double()
    outputs, rewards, discounts, penalties = inputs(5)
    pool = np.sort(outputs.numpy().transpose(1, 0, 2).reshape(B, -1), -1)[:, : 15 - 3 * dropped]
    expected = rewards.numpy()[:, None] + discounts.numpy()[:, None] * (pool - penalties.numpy()[:, None])
    np.testing.assert_allclose(head.targets(outputs, rewards, discounts, penalties), expected, rtol=1e-12)
    np.testing.assert_allclose(head.values(outputs), outputs.numpy().mean(-1), rtol=1e-12)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_quantile_loss_is_that_of_all_pairs(weighted):
    head = QuantileHead(5, 1).double()
    outputs, rewards, discounts, penalties = inputs(5)
    outputs.requires_grad_()
    targets = head.targets(inputs(5, 1)[0], 3.0 * rewards, discounts, penalties)
    assert targets[0].min() == targets[0].max()  # equal targets, after the end of an episode
    weights = torch.linspace(0.2, 1.0, B, dtype=torch.float64) if weighted else None
    levels = (torch.arange(5, dtype=torch.float64)[:, None] + 0.5) / 5
    u = targets[:, None] - outputs[..., None]
    huber = F.smooth_l1_loss(u, torch.zeros_like(u), reduction="none")
    rows = ((levels - (u.detach() < 0).double()).abs() * huber).mean((-2, -1))
    expected = (rows if weights is None else weights * rows).mean()
    loss, metrics = head.loss(outputs, targets, weights)
    np.testing.assert_allclose(loss.detach(), expected.detach(), rtol=1e-10)
    np.testing.assert_allclose(
        torch.autograd.grad(loss, outputs)[0], torch.autograd.grad(expected, outputs)[0], rtol=1e-8, atol=1e-12
    )
    distance = (outputs.detach().mean(-1) - targets.mean(-1)).abs().mean(0)
    np.testing.assert_allclose(metrics["td_errors"], distance, rtol=1e-10)


# ---- dropout


def test_dropout_zeroes_its_share_in_training_mode_alone_and_continues_from_its_state():
    dropout = Dropout(0.25, Rng(1, 12))
    x = torch.ones(4, 1000)
    y = dropout(x)
    assert y.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert abs((y == 0).float().mean() - 0.25) < 0.03
    state = {name: value.copy() for name, value in dropout.state().items()}
    following = dropout(x)
    again = Dropout(0.25, Rng(2))
    again.set_state(state)
    assert torch.equal(again(x), following)
    assert not torch.equal(following, y)
    critics = CriticEnsemble(3, 1, [8, 8], "relu", Rng(1), norm="layer", dropout=Dropout(0.5, Rng(1)))
    obs, actions = torch.ones(5, 3), torch.ones(5, 1)
    assert not torch.equal(critics(obs, actions), critics(obs, actions))
    critics.eval()
    assert torch.equal(critics(obs, actions), critics(obs, actions))


# ---- presets

SMALL = {"learning_starts": 20, "batch_size": 16, "buffer_size": 200, "seed": 1}
NARROW = {"hidden_sizes": [8, 8]}


@pytest.mark.parametrize("name", ["crossq", "droq", "flashsac", "redq", "tqc", "xqc"])
def test_a_preset_learns_resumes_bit_for_bit_and_scores_the_same(name, tmp_path):
    options = {**preset(name), **SMALL, **NARROW}
    if "critic_hidden_sizes" in options:
        options["critic_hidden_sizes"] = [12, 8]
    if "residual_blocks" in options:
        options |= {"hidden_sizes": [8], "critic_hidden_sizes": [12], "policy_delay": 3}
    if options.get("gradient_steps", 1) > 1:
        options |= {"gradient_steps": 4, "policy_delay": 4}
    whole = SAC("Pendulum-v1", **options)
    metrics = whole.train(40, schedule_timesteps=60)
    assert whole.backend == "torch"
    assert {"q_loss", "policy_loss", "entropy", "td_error"} <= metrics.keys()
    whole.save(tmp_path / "a.safetensors", memory=True)
    resumed = SAC.from_checkpoint(tmp_path / "a.safetensors")
    for agent in (whole, resumed):
        agent.train(15, schedule_timesteps=20)
    ours, theirs = whole._checkpoint().tensors, resumed._checkpoint().tensors
    for section in ours:
        for key, value in ours[section].items():
            np.testing.assert_array_equal(value, theirs[section][key], err_msg=f"{section} {key}")
    assert whole.evaluate(2).returns.tolist() == resumed.evaluate(2).returns.tolist()


def test_unit_norm_holds_after_each_update_for_policy_and_critics():
    agent = SAC("Pendulum-v1", **{**preset("xqc"), **SMALL, **NARROW, "policy_delay": 1})
    agent.train(30)
    for weight in agent.critics.weights[:-1]:
        np.testing.assert_allclose(weight.detach().norm(dim=1), np.ones((2, weight.shape[2])), rtol=1e-5)
    last = agent.policy.net[-1]
    whole = torch.cat([last.weight, last.bias[:, None]], 1).detach()
    np.testing.assert_allclose(whole.norm(dim=1), np.ones(len(whole)), rtol=1e-5)


def test_an_unknown_preset_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match=r"name must be one of .*, got 'xcq'; did you mean 'xqc'"):
        preset("xcq")
    with pytest.raises(ValueError, match=r"name must be one of c51, .*, got 'ppo'"):
        preset("ppo")  # an algorithm, which has its own settings


def test_dropout_is_switched_on_at_resume(tmp_path):
    small = {"hidden_sizes": [8], "learning_starts": 20, "batch_size": 8, "seed": 1}
    path = tmp_path / "sac.safetensors"
    plain = SAC("Pendulum-v1", **small)
    plain.train(40)
    plain.save(path)
    assert SAC.from_checkpoint(path, dropout=0.1).train(40)
