"""Residual blocks of policies and critics, and exploration noise that is held: the parts of FlashSAC."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rlox import DQN, SAC, TD3, preset
from rlox.collectors.exploration import HeldNoise
from rlox.collectors.vec_normalize import VecNormalize
from rlox.kernels.rng import Rng
from rlox.nn.critics.blocks import residual_mlp
from rlox.nn.critics.ensemble import CriticEnsemble
from rlox.nn.critics.heads import CategoricalHead
from rlox.nn.critics.norms import EPSILON, BatchNorm, LayerNorm, batch_statistics, scale_units_

WIDTH, N_BLOCKS, N_CRITICS = 6, 2, 3
SMALL = {"learning_starts": 20, "batch_size": 16, "buffer_size": 500, "seed": 1}
FLASH = {**preset("flashsac"), "hidden_sizes": [4], "critic_hidden_sizes": [8]}


def stir(module):
    """Give all parameters and running statistics values that matter, in float64."""
    module.double()
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.3 * torch.randn_like(p))
        for part in module.modules():
            if isinstance(part, BatchNorm):
                part.mean.normal_()
                part.var.uniform_(0.5, 2.0)
    return module


def normalize(norm, x, i, by_batch):
    """Return what a normalisation makes of (B, F), for network `i` of an ensemble, or the only one (None)."""
    scale, shift = (p.squeeze(-2) if i is None else p[i, 0] for p in (norm.scale, norm.shift))
    if isinstance(norm, LayerNorm):
        return F.layer_norm(x, x.shape[1:], eps=1e-5) * scale.view(-1) + shift.view(-1)
    if by_batch:
        return F.batch_norm(x, None, None, scale.view(-1), shift.view(-1), training=True, eps=EPSILON)
    mean, var = (p.view(-1) if i is None else p[i, 0] for p in (norm.mean, norm.var))
    return F.batch_norm(x, mean, var, scale.view(-1), shift.view(-1), training=False, eps=EPSILON)


def expected(x, layers, norms, last_scale, by_batch, norm_after, i=None):
    """Return the outputs of one network of `N_BLOCKS` blocks, from (weight (O, I), bias) of its layers."""
    norms = list(norms)
    if norms and isinstance(norms[0], BatchNorm):
        x = normalize(norms.pop(0), x, i, by_batch)
    x = F.linear(x, *layers[0])
    for block in range(N_BLOCKS):
        y = x
        for weight, bias in layers[1 + 2 * block : 3 + 2 * block]:
            y = F.linear(y, weight, bias)
            y = y.relu() if norm_after else y
            y = normalize(norms.pop(0), y, i, by_batch) if norms else y
            y = y.relu() if not norm_after else y
        x = x + y
    assert not norms
    return F.linear(F.rms_norm(x, (WIDTH,), last_scale, 1e-6), *layers[-1])


def require_equal_with_gradients(ours, theirs, parameters):
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    weights = torch.randn_like(ours)
    gradients = [torch.autograd.grad((x * weights).sum(), parameters) for x in (ours, theirs)]
    for ours, theirs in zip(*gradients, strict=True):
        assert theirs.abs().max() > 0 or theirs.numel() == 0
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("norm_after", [False, True])
@pytest.mark.parametrize("norm", ["none", "layer", "batch", "running"])
def test_critics_and_their_gradients_against_a_computation_in_float64(norm, norm_after):
    kind = "batch" if norm == "running" else norm
    critics = stir(CriticEnsemble(3, 2, [WIDTH], "relu", Rng(0), N_CRITICS, CategoricalHead(5, -1, 1), kind, norm_after,
                                  n_blocks=N_BLOCKS))  # fmt: skip
    obs, actions = torch.randn(20, 3, dtype=torch.float64), torch.randn(20, 2, dtype=torch.float64)
    biases = [None] * (len(critics.weights) - len(critics.biases)) + list(critics.biases)
    assert len(critics.biases) == (1 if kind == "batch" and not norm_after else 2 + 2 * N_BLOCKS)
    theirs = []
    for i in range(N_CRITICS):
        layers = [(w[i].T, None if b is None else b[i, 0]) for w, b in zip(critics.weights, biases, strict=True)]
        x = torch.cat([obs, actions], -1)
        theirs.append(expected(x, layers, critics.norms, critics.last_norm.scale[i, 0], norm == "batch", norm_after, i))
    with batch_statistics(critics) if norm == "batch" else torch.enable_grad():
        ours = critics(obs, actions)
    require_equal_with_gradients(ours, torch.stack(theirs), list(critics.parameters()))
    if norm == "running":
        some = torch.tensor([2, 0])
        torch.testing.assert_close(critics(obs, actions, some), ours[some])


@pytest.mark.parametrize("norm_after", [False, True])
@pytest.mark.parametrize("norm", ["none", "layer", "batch", "running"])
def test_a_policy_and_its_gradients_against_a_computation_in_float64(norm, norm_after):
    kind = "batch" if norm == "running" else norm
    net = stir(residual_mlp(3, WIDTH, N_BLOCKS, 4, "relu", kind, norm_after, Rng(0)))
    x = torch.randn(20, 3, dtype=torch.float64)
    layers = [(part.weight, part.bias) for part in net.modules() if isinstance(part, torch.nn.Linear)]
    norms = [part for part in net.modules() if isinstance(part, (BatchNorm, LayerNorm))]
    theirs = expected(x, layers, norms, net[-2].scale.view(-1), norm == "batch", norm_after)
    with batch_statistics(net) if norm == "batch" else torch.enable_grad():
        ours = net(x)
    require_equal_with_gradients(ours, theirs, list(net.parameters()))


def test_weights_start_orthogonal_and_biases_at_zero():
    critics = CriticEnsemble(3, 2, [WIDTH], "relu", Rng(0), 2, norm="layer", n_blocks=1)
    wide = critics.weights[1].detach()[1]  # 6 inputs, 24 outputs
    torch.testing.assert_close(wide @ wide.T, torch.eye(WIDTH), atol=1e-5, rtol=0)
    assert all(not bias.any() for bias in critics.biases)
    assert not torch.equal(critics.weights[1][0], critics.weights[1][1])


def test_units_and_norms_are_scaled_to_their_spheres():
    critics = stir(CriticEnsemble(3, 2, [WIDTH], "relu", Rng(0), 2, norm="batch", n_blocks=N_BLOCKS))
    net = stir(residual_mlp(3, WIDTH, N_BLOCKS, 4, "relu", "batch", False, Rng(0)))
    biases = critics.biases[0].clone(), net[-1].bias.clone()
    ratio = critics.norms[1].scale / critics.norms[1].shift
    critics.scale_units_()
    scale_units_(net)
    assert torch.equal(critics.biases[0], biases[0])
    assert torch.equal(net[-1].bias, biases[1])
    torch.testing.assert_close(critics.norms[1].scale / critics.norms[1].shift, ratio)
    norms = [*critics.norms, critics.last_norm, *(part for part in net.modules() if hasattr(part, "scale"))]
    for norm in norms:
        length = sum(p.detach().square().sum(-1) for p in norm.parameters()).sqrt()
        torch.testing.assert_close(length, torch.full_like(length, norm.scale.shape[-1] ** 0.5))
    weights = [w.detach().norm(dim=1) for w in critics.weights]
    weights += [part.weight.detach().norm(dim=1) for part in net.modules() if isinstance(part, torch.nn.Linear)]
    for length in weights:
        torch.testing.assert_close(length, torch.ones_like(length))


# ---- noise that is held


def test_noise_is_held_for_n_steps_in_proportion_to_one_over_the_square():
    most, n_steps = 4, 6000
    held, rng = HeldNoise(2, 1, most), Rng(0)
    noise = np.stack([held.hold(rng.normal((2, 1)), rng) for _ in range(n_steps)])[..., 0]
    expected_shares = 1.0 / np.arange(1, most + 1) ** 2
    expected_shares /= expected_shares.sum()
    for column in noise.T:
        starts = np.flatnonzero(np.diff(column, prepend=np.nan) != 0)
        counts = np.bincount(np.diff(starts), minlength=most + 1)
        assert len(counts) == most + 1
        n = counts.sum()
        deviation = np.sqrt(n * expected_shares * (1 - expected_shares))
        assert (np.abs(counts[1:] - n * expected_shares) < 4 * deviation).all()
        assert abs(column[starts].mean()) < 0.1
        assert column[starts].std() == pytest.approx(1.0, abs=0.1)
    assert not np.array_equal(noise[:, 0], noise[:, 1])


def test_a_policy_acts_with_the_held_noise():
    agent = SAC("Pendulum-v1", **SMALL, n_envs=2, hidden_sizes=[8], hold_noise=16)
    with torch.no_grad():
        for p in agent.policy.parameters():
            p.zero_()  # so that an action depends on its noise alone
    assert agent.backend == "native"
    assert "step by step, since Python holds the exploration noise" in agent.backend_reason
    actions = np.stack([agent.collector._explore(agent.actor, agent.collector.observe()) for _ in range(400)])[..., 0]
    lengths = [np.diff(np.flatnonzero(np.diff(column, prepend=np.nan) != 0)) for column in actions.T]
    assert all(3 < one.max() <= 16 for one in lengths)
    assert all(np.mean(one == 1) > 0.5 for one in lengths)


def test_held_noise_continues_where_the_episodes_cannot(tmp_path):
    given = {**SMALL, "n_envs": 2, "hidden_sizes": [8], "hold_noise": 16}
    agent = SAC("Pendulum-v1", **given, env_wrappers=["TimeAwareObservation"])
    agent.train(40)
    while not agent.collector.exploration.state()["left"].any():
        agent.train(2)
    agent.save(tmp_path / "a.safetensors")
    saved = agent.collector.exploration.state()
    again = SAC.from_checkpoint(tmp_path / "a.safetensors")
    assert "fresh" in again.collector.restore_note()
    for name, array in again.collector.exploration.state().items():
        np.testing.assert_array_equal(array, saved[name])


def test_another_kind_of_exploration_starts_afresh(tmp_path):
    kinds = {"exploration_noise": 0.1, "hold_noise": 0}, {"exploration_noise": 0.0, "hold_noise": 16}
    for before, after in (kinds, kinds[::-1]):
        agent = SAC("Pendulum-v1", **SMALL, hidden_sizes=[8], **before)
        agent.train(40)
        agent.save(tmp_path / "a.safetensors")
        again = SAC.from_checkpoint(tmp_path / "a.safetensors", **after)
        assert not any(array.any() for array in again.collector.exploration.state().values() if array.dtype != bool)
        again.train(10)


def test_a_state_that_does_not_fit_is_refused():
    held = HeldNoise(2, 1, 4)
    with pytest.raises(ValueError, match=r"HeldNoise.set_state: left must be a finite array \(2,\) of int64, got none"):
        held.set_state({"noise": np.zeros((2, 1), np.float32)})


# ---- rewards that fit between the bins


def test_rewards_are_divided_by_more_if_their_sums_would_leave_the_bins():
    agent = SAC("Pendulum-v1", **SMALL, normalize_rewards=True, fit_rewards=True, v_max=0.5, v_min=-0.5, gamma=0.9)
    agent.train(40)
    rewards = agent.buffer.get_state()["rows"].view(np.float32)[:40, 7].astype(np.float64)
    sums = np.zeros(40)
    for i, reward in enumerate(rewards):  # no episode of Pendulum ends within 40 steps
        sums[i] = 0.9 * sums[i - 1] + reward
    largest = np.abs(sums).max()
    assert agent.normalizer.largest == pytest.approx(largest)
    divisor = largest / 0.5
    assert divisor > 1.2 * np.sqrt(agent.normalizer.return_moments.var)
    scaled = agent._host_rows()["rewards"] * divisor
    assert all(np.isclose(rewards, value, rtol=1e-4).any() for value in scaled)
    agent.normalizer.most_return = 1e9  # where the deviation is the larger one
    deviation = np.sqrt(agent.normalizer.return_moments.var + agent.normalizer.EPSILON)
    np.testing.assert_allclose(agent.normalizer.scale_rewards(rewards), rewards / deviation, rtol=1e-6)


def test_the_largest_sum_is_merged_and_restored():
    ours, theirs = (VecNormalize(1, (1,), most_return=5.0) for _ in range(2))
    before = ours.state()
    for normalizer, reward in ((ours, -7.0), (theirs, 3.0)):
        normalizer.normalize_rewards(np.array([reward]), np.array([True]))
    theirs.merge(ours.since(before))
    assert theirs.largest == 7.0
    before_set = VecNormalize(1, (1,), most_return=5.0)
    before_set.set_state(theirs.state())
    assert before_set.largest == 7.0
    assert "return_largest" not in VecNormalize(1, (1,)).state()


# ---- whole trainings


def state(agent):
    checkpoint = agent._checkpoint()
    return {f"{name}/{key}": x for name, arrays in checkpoint.tensors.items() for key, x in arrays.items()}


@pytest.mark.parametrize("name", ["flashsac", "held", "td3", "discrete"])
def test_a_resumed_training_has_the_bits_of_one_that_never_stopped(name, tmp_path):
    blocks = {"hidden_sizes": [4], "residual_blocks": 1}
    cls, env_id, options = {
        "flashsac": (SAC, "Pendulum-v1", {**FLASH, "n_envs": 2}),
        "held": (SAC, "Pendulum-v1", {"hidden_sizes": [8], "hold_noise": 8, "n_envs": 3}),
        "td3": (TD3, "Pendulum-v1", {**blocks, "unit_norm": True, "critic_norm": "layer"}),
        "discrete": (SAC, "CartPole-v1", {**blocks, "critic_norm": "batch", "actor_norm": "batch", "unit_norm": True}),
    }[name]
    whole = cls(env_id, **SMALL, **options)
    whole.train(61, schedule_timesteps=91)
    whole.save(tmp_path / "a.safetensors", memory=True)
    if whole.collector.exploration is not None:
        assert state(whole)["action_noise/left"].any()
    resumed = cls.from_checkpoint(tmp_path / "a.safetensors")
    for agent in (whole, resumed):
        agent.train(30, schedule_timesteps=30)
    ours, theirs = state(whole), state(resumed)
    assert ours.keys() == theirs.keys()
    assert ("action_noise/left" in ours) == (name in ("flashsac", "held"))
    for key in ours:
        np.testing.assert_array_equal(ours[key], theirs[key], err_msg=key)
    assert whole.evaluate(2).returns.tolist() == resumed.evaluate(2).returns.tolist()


def test_the_number_of_parameters_is_known_before_the_networks_are_made():
    for agent in (
        SAC("Pendulum-v1", **SMALL, **FLASH),
        TD3("Pendulum-v1", **SMALL, hidden_sizes=[4], residual_blocks=3),
    ):
        weights = [sum(p.numel() for p in part.parameters()) for part in (agent.policy, agent.critics)]
        np.testing.assert_allclose(agent._network_sizes(), weights, rtol=0.2)


@pytest.mark.parametrize(("env_id", "option", "rule"), [
    ("Pendulum-v1", {"residual_blocks": 2}, "hidden_sizes must be one width with residual_blocks=2"),
    ("Pendulum-v1", {**FLASH, "critic_hidden_sizes": [8, 8]}, "critic_hidden_sizes must be one width"),
    ("Pendulum-v1", {"residual_blocks": -1}, r"residual_blocks must be in \[0, 100\]"),
    ("Pendulum-v1", {"hold_noise": 4, "exploration_noise": 0.1}, "hold_noise must be 0 if exploration_noise"),
    ("Pendulum-v1", {"fit_rewards": True}, "fit_rewards must be false unless normalize_rewards is true"),
    ("Pendulum-v1", {"actor_norm": "batch", "batch_size": 1}, "batch_size must be >= 2 with actor_norm=batch"),
    ("CartPole-v1", {"hold_noise": 4}, "hold_noise must be 0 with discrete actions"),
    ("Pendulum-v1", {"residual_blocks": 1, "hidden_sizes": [8], "backend": "native"}, "PyTorch .*residual_blocks=1"),
])  # fmt: skip
def test_what_does_not_compose_is_refused_with_the_reason(env_id, option, rule):
    with pytest.raises(ValueError, match=rule):
        SAC(env_id, **{**SMALL, **option})


def test_other_algorithms_have_no_blocks():
    with pytest.raises(TypeError, match="residual_blocks"):
        DQN("CartPole-v1", residual_blocks=1)
