"""DQN with distributions of returns, noisy layers and layer norm: losses, networks, acting, checkpoints, refusals."""

import numpy as np
import pytest
import torch

import rlox
from rlox import DQN, DQNConfig
from rlox.envs.tensor.sums import expectations
from rlox.kernels.nn.quantiles import quantile_losses as kernel_losses
from rlox.kernels.rng import Rng
from rlox.nn.actors import DiscreteQNetwork
from rlox.nn.value_distributions import (
    distributional_q_loss,
    pairwise_quantile_losses,
    project_atoms,
    quantile_losses,
    share_by_pairs,
    share_by_scatter,
)
from rlox.nn.value_losses import q_loss
from rlox.nn.value_networks import VALUE, Head, NoisyLinear, ValueNetwork

QUANTILES, CATEGORIES = Head("quantile", 5), Head("categorical", 7, -2.0, 4.0)
SMALL = {"hidden_sizes": [8], "learning_starts": 40, "batch_size": 16, "target_update_freq": 30, "buffer_size": 500}
RAINBOW = {
    "distribution": "categorical", "v_min": 0.0, "v_max": 20.0, "dueling": True, "noisy": True, "n_step": 3,
    "prioritized": True, "exploration_initial_eps": 0.0, "exploration_final_eps": 0.0,
}  # fmt: skip
VARIANTS = {
    "quantile": {"distribution": "quantile", "n_atoms": 5},
    "categorical": {"distribution": "categorical", "n_atoms": 11},
    "noisy": {"noisy": True},
    "norm": {"layer_norm": True, "loss": "mse"},
    "rainbow": RAINBOW,
}


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def one_by_one(quantiles, samples, kappa):
    """Return the losses of Dabney et al. 2018, in float64 and without arrays of pairs."""
    losses = []
    for row, goals in zip(quantiles.astype(float), samples.astype(float), strict=True):
        total = 0.0
        for i, quantile in enumerate(row):
            for goal in goals:
                u, fraction = goal - quantile, (2 * i + 1) / (2 * len(row))
                huber = u * u / 2 if abs(u) <= kappa else kappa * (abs(u) - kappa / 2)
                total += (1 - fraction if u < 0 else fraction) * huber / kappa / len(goals)
        losses.append(total)
    return np.array(losses)


@pytest.mark.parametrize(("n", "m", "kappa"), [(4, 4, 1.0), (5, 19, 0.3), (17, 16, 2.0), (1, 1, 1.0)])
def test_quantile_losses_equal_a_float64_computation(n, m, kappa):
    quantiles, samples = 2 * numbers(6, n), 2 * numbers(6, m, seed=1)
    expected = one_by_one(quantiles, samples, kappa)
    by_torch = pairwise_quantile_losses(torch.from_numpy(quantiles), torch.from_numpy(samples), kappa)
    assert np.allclose(by_torch, expected, rtol=1e-5)
    losses, gradients = kernel_losses(quantiles, samples, kappa)
    assert np.allclose(losses, expected, rtol=1e-5)
    step = 1e-5  # central differences, of which none is exact at a kink
    for i in range(n):
        up, down = quantiles.astype(float), quantiles.astype(float)
        up[:, i] += step
        down[:, i] -= step
        slope = (one_by_one(up, samples, kappa) - one_by_one(down, samples, kappa)) / (2 * step)
        assert np.allclose(gradients[:, i], slope, atol=1e-4)


def test_bfloat16_does_not_round_the_fractions_of_quantiles():
    quantiles, samples = torch.from_numpy(numbers(6, 300)).bfloat16(), torch.from_numpy(numbers(6, 7, seed=1))
    found = pairwise_quantile_losses(quantiles, samples, 1.0)
    assert found.dtype == torch.float32
    assert torch.allclose(found, pairwise_quantile_losses(quantiles.float(), samples, 1.0), rtol=1e-5)


def test_the_kernel_of_quantile_losses_is_used_with_its_gradient():
    quantiles = torch.from_numpy(numbers(6, 9)).requires_grad_()
    samples, weights = torch.from_numpy(numbers(6, 9, seed=1)), torch.arange(6.0)
    (weights * quantile_losses(quantiles, samples, 1.0)).sum().backward()
    found, quantiles.grad = quantiles.grad.clone(), None
    (weights * pairwise_quantile_losses(quantiles, samples, 1.0)).sum().backward()
    assert torch.allclose(found, quantiles.grad, atol=1e-6)
    assert "Quantile" in type(quantile_losses(quantiles, samples, 1.0).grad_fn).__name__
    wide = quantile_losses(quantiles.double(), samples.double(), 1.0)
    assert wide.dtype == torch.float64


def test_the_kernel_of_quantile_losses_notices_nan_and_refuses_wrong_arguments():
    quantiles, samples = numbers(2, 3), numbers(2, 4)
    samples[1, 2] = np.nan
    losses, gradients = kernel_losses(quantiles, samples, 1.0)
    assert np.isfinite(losses).tolist() == [True, False]
    assert np.isfinite(gradients).all(1).tolist() == [True, False]
    for wrong in ((quantiles, samples[:1], 1.0), (quantiles, samples, 0.0), (quantiles[0], samples, 1.0)):
        with pytest.raises(ValueError, match="quantile_losses: "):
            kernel_losses(*wrong)
    with pytest.raises(TypeError, match="quantiles"):
        kernel_losses(quantiles.astype(float), samples, 1.0)


def projected(probabilities, rewards, discounts, atoms):
    """Return algorithm 1 of Bellemare et al. 2017, in float64."""
    width, out = atoms[1] - atoms[0], np.zeros_like(probabilities, dtype=float)
    for b, (reward, discount) in enumerate(zip(rewards, discounts, strict=True)):
        for j, atom in enumerate(atoms):
            place = (min(max(reward + discount * atom, atoms[0]), atoms[-1]) - atoms[0]) / width
            lower = min(int(np.floor(place)), len(atoms) - 2)
            out[b, lower] += probabilities[b, j] * (lower + 1 - place)
            out[b, lower + 1] += probabilities[b, j] * (place - lower)
    return out


def test_projections_equal_a_float64_computation():
    atoms = np.linspace(-2, 4, 7)
    probabilities = np.random.default_rng(0).dirichlet(np.ones(7), 50)
    rewards, discounts = 3 * numbers(50), np.abs(numbers(50, seed=1))
    discounts[:10] = 0.0  # the episode terminated
    rewards[:5] = [-2, 4, 1, -9, 9]  # on atoms, and beyond the ends
    given = [torch.tensor(x, dtype=torch.float32) for x in (probabilities, rewards, discounts, atoms)]
    found = project_atoms(*given).numpy()
    assert np.allclose(found, projected(probabilities, rewards, discounts, atoms), atol=2e-6)
    assert np.allclose(found.sum(1), 1.0, atol=1e-5)
    assert np.allclose(found[:3], np.eye(7)[[0, 6, 3]], atol=1e-6)


@pytest.mark.parametrize("high", [3.0, 6.0, 7.0, 9.0, 30.0, 60.0])
def test_rounding_makes_no_probability_negative(high):
    """With 51 atoms on these ranges, the place of the last atom is rounded to more than 50."""
    probabilities = torch.full((1, 51), 1 / 51)
    found = project_atoms(probabilities, torch.tensor([2 * high]), torch.ones(1), torch.linspace(0, high, 51))
    assert (found >= 0).all()
    assert found[0, -1] == pytest.approx(1.0)


def test_priorities_are_finite_where_all_returns_are_the_largest():
    agent = DQN(
        "CartPole-v1", 4, distribution="categorical", v_min=0.0, v_max=3.0, gamma=1.0, prioritized=True,
        learning_starts=64, batch_size=32, hidden_sizes=[8], seed=0,
    )  # fmt: skip
    agent.train(64)
    with torch.no_grad():
        agent.policy.q.advantage.linear[-1].bias.view(2, 51)[:, -1] = 20.0  # all returns are 3, and stay there
    batch = agent.sample()
    seen = []
    batch.update_priorities = lambda buffer, errors: seen.append(errors.clone())
    agent.update(batch)
    assert seen[0].isfinite().all()


def test_expectations_are_float32_under_autocast():
    generator = torch.Generator().manual_seed(0)
    logits, atoms = torch.randn(5, 51, generator=generator), torch.linspace(0, 100, 51)
    pairs = torch.rand(5, 51, 51, generator=generator)
    exact = logits.double().softmax(-1) @ atoms.double(), (pairs.double() @ logits.double().unsqueeze(-1)).squeeze(-1)
    with torch.autocast("cpu", torch.bfloat16):
        found = expectations(logits.softmax(-1), atoms), expectations(pairs, logits)
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == torch.float32
        assert torch.allclose(one.double(), other, rtol=1e-5, atol=1e-4)


def test_shares_by_pairs_are_those_by_scatter():
    """The first is for GPUs."""
    generator = torch.Generator().manual_seed(0)
    places, probabilities = 6 * torch.rand(9, 7, generator=generator), torch.rand(9, 7, generator=generator)
    places[0] = torch.arange(7.0)
    assert torch.allclose(share_by_pairs(places, probabilities), share_by_scatter(places, probabilities), atol=1e-6)
    assert torch.allclose(share_by_scatter(places, probabilities)[0], probabilities[0])
    places[1, 3] = torch.nan
    assert share_by_scatter(places, probabilities).isfinite().all(1).tolist() == [True, False] + [True] * 7


def batch_of(n=32, n_actions=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randn(n, 4, generator=generator) for _ in range(2)]
    actions = torch.randint(n_actions, (n,), generator=generator)
    rewards, discounts = torch.randn(n, generator=generator), torch.rand(n, generator=generator)
    return draw[0], actions, rewards, draw[1], discounts, torch.rand(n, generator=generator)


def loss_of(network, target, batch, double=True, masks=None, noise=None, kind="huber"):
    return distributional_q_loss(network, target, *batch, noise, double, kind, 1.0, masks)


@pytest.mark.parametrize("kind", ["huber", "mse"])
@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("dueling", [True, False])
def test_without_a_distribution_the_loss_is_that_of_dqn(kind, double, dueling):
    nets = [ValueNetwork(4, 3, [8, 8], "relu", dueling, rng=Rng(i)) for i in range(2)]
    plain = [DiscreteQNetwork(4, 3, [8, 8], "relu", dueling, Rng(i)) for i in range(2)]
    for ours, theirs in zip(nets, plain, strict=True):
        copied = list(ours.trunk.parameters()) + list(ours.advantage.parameters())
        copied += [] if ours.value is None else list(ours.value.parameters())
        for p, other in zip(copied, theirs.parameters(), strict=True):
            assert torch.equal(p, other)  # the same weights are drawn
    masks = torch.rand(32, 3, generator=torch.Generator().manual_seed(3)) < 0.6
    loss, metrics = loss_of(*nets, batch_of(), double, masks, kind=kind)
    expected, theirs = q_loss(*plain, *batch_of(), double, kind, masks)
    assert torch.allclose(loss, expected)
    for name, value in theirs.items():
        assert torch.allclose(metrics[name], value, atol=1e-6), name
    assert torch.equal(metrics["priorities"], metrics["td_errors"])


def expected_losses(network, target, batch, double, masks):
    """Return the losses and priorities of a batch, row by row in float64."""
    obs, actions, rewards, next_obs, discounts, _ = batch
    with torch.no_grad():
        now, later = network.outputs(obs).double().numpy(), target.outputs(next_obs).double().numpy()
        chooser = network(next_obs).numpy() if double else target(next_obs).numpy()
    losses, priorities, head = [], [], network.head
    for b in range(len(actions)):
        best = max((a for a in range(3) if masks[b, a]), key=lambda a: chooser[b, a])
        mine, ahead = now[b, actions[b]], later[b, best]
        reward, discount = float(rewards[b]), float(discounts[b])
        if head.kind == "quantile":
            losses.append(one_by_one(mine[None], (reward + discount * ahead)[None], 1.0)[0])
            priorities.append(losses[-1])
        else:
            p, logs = np.exp(ahead) / np.exp(ahead).sum(), mine - np.log(np.exp(mine).sum())
            goal = projected(p[None], [reward], [discount], np.linspace(head.low, head.high, head.n_atoms))[0]
            losses.append(-(goal * logs).sum())
            priorities.append((goal[goal > 0] * (np.log(goal[goal > 0]) - logs[goal > 0])).sum())
    return np.array(losses), np.array(priorities)


@pytest.mark.parametrize("head", [QUANTILES, CATEGORIES], ids=lambda head: head.kind)
@pytest.mark.parametrize("double", [True, False])
def test_losses_of_a_batch_with_masks_equal_a_float64_computation(head, double):
    network, target = (ValueNetwork(4, 3, [8], "tanh", True, head, rng=Rng(i)) for i in range(2))
    batch, masks = batch_of(), torch.rand(32, 3, generator=torch.Generator().manual_seed(3)) < 0.5
    masks[:, 2] |= ~masks.any(1)
    losses, priorities = expected_losses(network, target, batch, double, masks.numpy())
    loss, metrics = loss_of(network, target, batch, double, masks)
    assert np.isclose(loss.item(), (batch[-1].numpy() * losses).mean(), rtol=1e-4)
    assert np.allclose(metrics["priorities"], priorities, atol=1e-4)
    unmasked = loss_of(network, target, batch, double)[0]
    assert not torch.isclose(loss, unmasked)
    terminal = (*batch[:4], torch.zeros(32), None)
    nowhere = torch.zeros(32, 3, dtype=torch.bool)  # no action is legal at the end of a game
    assert torch.isclose(loss_of(network, target, terminal, double, nowhere)[0], loss_of(network, target, terminal)[0])


@pytest.mark.parametrize("head", [Head("quantile", 4), Head("categorical", 11, 0.0, 10.0)], ids=lambda head: head.kind)
def test_a_distribution_is_learned(head):
    network = ValueNetwork(1, 2, [], "relu", False, head, rng=Rng(0))
    optimizer = torch.optim.Adam(network.parameters(), 0.05)
    obs = torch.zeros(64, 1)
    rewards = torch.tensor([0.0, 10.0, 10.0, 10.0]).repeat(16)
    for _ in range(600):
        loss, _ = loss_of(network, network, (obs, torch.ones(64, dtype=torch.int64), rewards, obs, 0 * rewards, None))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    learned = network.outputs(obs[:1])[0, 1].detach()
    if head.kind == "quantile":
        assert torch.allclose(learned, torch.tensor([0.0, 10.0, 10.0, 10.0]), atol=1.2)
    else:
        assert torch.allclose(learned.softmax(-1)[[0, 10]], torch.tensor([0.25, 0.75]), atol=0.03)
    assert network(obs[:1])[0, 1].item() == pytest.approx(7.5, abs=0.8)


# ---- noisy layers


def test_noisy_layers_equal_a_float64_computation():
    layer = NoisyLinear(3, 2, 0.5, Rng(0))
    assert torch.allclose(layer.weight_sigma, torch.tensor(0.5 / 3**0.5))
    assert torch.allclose(layer.bias_sigma, torch.tensor(0.5 / 3**0.5))
    assert layer.weight.abs().max() <= 3**-0.5
    with torch.no_grad():
        layer.weight_sigma.copy_(torch.from_numpy(np.abs(numbers(2, 3))))
    x, noise = numbers(4, 3, seed=1), numbers(5, seed=2)
    w, b, s_w, s_b = (p.detach().double().numpy() for p in layer.parameters())
    factor = np.sign(noise) * np.sqrt(np.abs(noise.astype(float)))
    expected = x @ (w + s_w * np.outer(factor[3:], factor[:3])).T + b + s_b * factor[3:]
    found = layer(torch.from_numpy(x), torch.from_numpy(noise))
    assert np.allclose(found.detach(), expected, atol=1e-6)
    rows = layer(torch.from_numpy(x), torch.from_numpy(noise).expand(4, -1))
    assert torch.allclose(rows, found, atol=1e-6)
    assert np.allclose(layer(torch.from_numpy(x)).detach(), x @ w.T + b, atol=1e-6)


def test_each_noisy_layer_has_numbers_of_its_own():
    network = ValueNetwork(4, 3, [8, 8], "tanh", True, QUANTILES, noisy_sigma=0.5, rng=Rng(0))
    assert network.n_noise == (4 + 8) + (8 + 8) + (8 + 15) + (8 + 8) + (8 + 5)
    obs, base = torch.from_numpy(numbers(2, 4)), torch.from_numpy(numbers(network.n_noise, seed=1))
    before = network.outputs(obs, base)
    changes = []
    for start in np.cumsum([0, 12, 16, 23, 16]):
        noise = base.clone()
        noise[start] += 1.0
        changes.append((network.outputs(obs, noise) - before).detach())
    assert all(change.abs().max() > 0 for change in changes)
    assert not any(torch.equal(one, other) for one in changes for other in changes if one is not other)


def test_noisy_acting_differs_from_step_to_step_and_is_off_in_evaluation():
    agent = DQN("CartPole-v1", n_envs=2, seed=3, noisy=True, exploration_initial_eps=0.0, exploration_final_eps=0.0,
                **SMALL)  # fmt: skip
    policy, rng = agent.policy, Rng(0)
    obs = torch.from_numpy(numbers(1, 4)).expand(64, -1)
    policy.epsilon = 0.0

    def drawn():
        noise = np.empty(policy.noise_shape(64), np.float32)
        policy.fill_noise(rng, noise)
        return policy.act(obs, torch.from_numpy(noise)), noise

    (first, noise), (second, _) = drawn(), drawn()
    assert 0 < int(first.sum()) < 64  # each environment explores by itself
    assert not torch.equal(first, second)
    assert ((noise[:, :2] >= 0.0) & (noise[:, :2] < 1.0)).all()
    assert abs(noise[:, 2:].mean()) < 0.1
    assert abs(noise[:, 2:].std() - 1.0) < 0.1
    assert len(set(policy.mode(obs).tolist())) == 1
    masks = torch.zeros(64, 2, dtype=torch.bool)
    masks[:, 1] = True
    assert policy.act(obs, torch.from_numpy(noise), masks).tolist() == [1] * 64
    agent.train(200)
    assert np.array_equal(agent.evaluate(3, seed=5).returns, agent.evaluate(3, seed=5).returns)
    state = agent.rng.get_state()
    agent.predict(numbers(4))
    assert agent.rng.get_state() == state


def test_an_update_draws_new_noise_from_the_runs_own_generator():
    agent = DQN("CartPole-v1", seed=3, noisy=True, **SMALL)
    agent.train(60)
    drawn = []
    original = agent._draw_noise
    agent._draw_noise = lambda n: drawn.append(original(n)) or drawn[-1]
    batch = agent.sample()
    agent.update(batch)
    agent.update(batch)
    assert [tuple(noise.shape) for noise in drawn] == [(3, agent.policy.n_noise)] * 2
    assert not torch.equal(*drawn)
    assert not torch.equal(drawn[0][0], drawn[0][1])
    assert DQN("CartPole-v1", noisy=True, double_dqn=False, **SMALL)._noise_shape(16)[0] == 2
    assert DQN("CartPole-v1", **SMALL)._noise_shape(16) == ()


# ---- whole agents


@pytest.mark.parametrize("name", ["quantile", "categorical"])
def test_priorities_are_the_losses(name):
    agent = DQN("CartPole-v1", seed=3, prioritized=True, n_step=2, **{**SMALL, **VARIANTS[name]})
    agent.train(39)  # no update yet
    batch, given = agent.sample(), []
    columns = (batch.obs, batch.actions, batch.rewards, batch.next_obs, batch.discounts, batch.weights)
    _, expected = loss_of(agent.policy.q, agent.target.q, columns)
    batch.update_priorities = lambda buffer, priorities: given.append(priorities)
    metrics = agent.update(batch)
    assert torch.equal(given[0], expected["priorities"])
    assert not torch.allclose(expected["priorities"], expected["td_errors"])
    assert metrics["td_error"].item() == pytest.approx(expected["td_errors"].mean().item())


def weights(agent):
    return {name: value.clone() for name, value in agent.policy.state_dict().items()}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_resumed_training_has_the_same_bits(name, tmp_path):
    settings = {**SMALL, **VARIANTS[name]}
    straight = DQN("CartPole-v1", n_envs=2, seed=4, **settings)
    straight.train(240)
    half = DQN("CartPole-v1", n_envs=2, seed=4, **settings)
    half.train(120, schedule_timesteps=240)
    half.save(tmp_path / "half.safetensors", memory=True)
    again = rlox.load(tmp_path / "half.safetensors")
    obs = numbers(20, 4)
    assert np.array_equal(again.predict(obs), half.predict(obs))
    again.train(until=240)
    assert again.counters.env_steps == 240
    for key, value in weights(straight).items():
        assert torch.equal(weights(again)[key], value), key
    assert torch.isfinite(torch.cat([value.flatten() for value in weights(straight).values()])).all()


@pytest.mark.parametrize("name", VARIANTS)
def test_targets_and_actions_respect_masks(name):
    agent = DQN("rlox/MaskedBandit-v0", seed=1, **{**SMALL, **VARIANTS[name]})
    result = agent.train(300)
    assert np.isfinite(result["q_loss"])
    assert agent.evaluate(3).returns.shape == (3,)


def test_images_go_through_the_convolutional_network():
    network = ValueNetwork((1, 12, 12), 3, [], "relu", True, CATEGORIES, 0.5, rng=Rng(0))
    obs = torch.zeros(2, 1, 12, 12, dtype=torch.uint8)
    assert network.outputs(obs, torch.zeros(network.n_noise)).shape == (2, 3, 7)
    assert network(obs).shape == (2, 3)


def test_layer_norm_normalises_hidden_layers():
    network = ValueNetwork(4, 3, [16], "relu", layer_norm=True, rng=Rng(0))
    obs = torch.from_numpy(numbers(5, 4))
    (layer,), (norm,) = network.advantage.linear[:1], network.advantage.norm
    hidden = layer(obs).detach().double().numpy()
    expected = (hidden - hidden.mean(1, keepdims=True)) / np.sqrt(hidden.var(1, keepdims=True) + norm.eps)
    last = network.advantage.linear[1]
    values = np.maximum(expected, 0) @ last.weight.detach().double().numpy().T + last.bias.detach().numpy()
    assert np.allclose(network(obs).detach(), values, atol=1e-5)
    assert network.head == VALUE


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_adam_eps_is_the_one_of_the_settings(backend):
    agent = DQN("CartPole-v1", seed=1, backend=backend, adam_eps=100.0, learning_rate=1.0, max_grad_norm=None, **SMALL)
    agent.train(39)  # no update yet
    before = weights(agent)
    batch = agent.sample()
    metrics = agent.update_native(batch) if backend == "native" else agent.update(batch)
    change = torch.cat([(weights(agent)[key] - value).flatten() for key, value in before.items()])
    # A first step is rate * g / (|g| + eps), which is nearly g / eps here.
    assert float(change.norm()) == pytest.approx(float(metrics["grad_norm"]) / 100.0, rel=0.03)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"distribution": "quantiles"}, "distribution must be one of none, quantile, categorical"),
        ({"distribution": "quantile", "memory": "gru"}, "distribution must be none with memory=gru"),
        ({"noisy": True, "memory": "lstm"}, "noisy must be false with memory=lstm"),
        ({"layer_norm": True, "memory": "lstm"}, "layer_norm must be false with memory=lstm"),
        ({"distribution": "categorical", "loss": "mse"}, "loss must be huber with distribution=categorical"),
        ({"v_min": 3.0, "v_max": 3.0}, r"v_max must be above v_min \(3\)"),
        ({"n_atoms": 1}, "n_atoms must be in"),
        ({"huber_kappa": 0.0}, "huber_kappa must be > 0"),
        ({"adam_eps": 0.0}, "adam_eps must be > 0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        DQNConfig(**settings)


def test_a_policy_of_ones_own_has_no_distribution():
    with pytest.raises(ValueError, match="policy must be left out with distribution=quantile, got a Linear"):
        DQN("CartPole-v1", policy=torch.nn.Linear(4, 2), distribution="quantile")
    with pytest.raises(ValueError, match=r"backend must be auto or torch here, got 'native': .*noisy layers"):
        DQN("CartPole-v1", backend="native", noisy=True)


def test_checkpoints_of_former_versions_have_the_former_network(tmp_path):
    agent = DQN("CartPole-v1", **SMALL)
    assert agent.config.value_option is None
    former = {key: value for key, value in agent.config.to_dict().items() if key not in NEW}
    assert DQNConfig.from_dict(former) == agent.config


NEW = ("distribution", "n_atoms", "v_min", "v_max", "huber_kappa", "noisy", "noisy_sigma", "layer_norm", "adam_eps")
