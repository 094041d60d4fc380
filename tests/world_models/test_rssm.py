"""The parts of the world model against independent computations in float64, and known bugs of other ports."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from rlox.algorithms.dreamer import Returns, lambda_returns
from rlox.config import DreamerConfig
from rlox.config.world_models import SIZES
from rlox.envs import EnvSpec
from rlox.kernels.rng import Rng
from rlox.nn.acting import Inputs, draw_noise
from rlox.world_models import cells
from rlox.world_models.acting import ActorHead, DreamerPolicy, WorldModelActor
from rlox.world_models.laprop import LaProp
from rlox.world_models.rssm import (
    BLOCKS,
    MLP,
    RSSM,
    Conv,
    Decoder,
    Encoder,
    Latents,
    Norm,
    TwoHot,
    draw_truncated_normal,
    symexp,
    symlog,
)

SMALL = DreamerConfig(deter_dim=16, hidden_dim=12, stoch_dim=3, stoch_classes=4)
DISCRETE = EnvSpec((5,), n_actions=3)


def vector(n):
    return EnvSpec((n,), n_actions=3)


def image(shape):
    return EnvSpec(shape, np.uint8, n_actions=3)


def rssm(seed=0, n_tokens=12, n_actions=3, unimix=0.01):
    made = RSSM(SMALL.shape, n_tokens, n_actions, unimix, Rng(seed))
    with torch.no_grad():
        for p in made.parameters():  # the initial biases of 0 and scales of 1 would hide mistakes
            p += 0.1 * torch.from_numpy(Rng(seed + 1).normal(tuple(p.shape)))
    return made


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu_norm(x, scale):
    y = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-4) * scale
    return y * sigmoid(y)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def f64(module):
    return {name: p.detach().numpy().astype(np.float64) for name, p in module.state_dict().items()}


# ---- the recurrent step


def numpy_step(w, h, z, a):
    """One step of the block GRU, every block with its own copy of the three inputs."""
    a = a / np.maximum(1, np.abs(a))
    parts = [
        silu_norm(x @ w[f"{name}.linear.weight"].T + w[f"{name}.linear.bias"], w[f"{name}.norm.scale"])
        for name, x in (("of_deter", h), ("of_stoch", z), ("of_action", a))
    ]
    shared, width = np.concatenate(parts, -1), h.shape[1] // BLOCKS
    hidden = np.empty_like(h)
    for g in range(BLOCKS):
        mine = slice(g * width, (g + 1) * width)
        weight = np.concatenate([w["own"][g], w["shared.weight"][mine].T])
        hidden[:, mine] = np.concatenate([h[:, mine], shared], -1) @ weight + w["shared.bias"][mine]
    hidden, out = silu_norm(hidden, w["norm.scale"]), np.empty_like(h)
    for g in range(BLOCKS):
        mine = slice(g * width, (g + 1) * width)
        reset, candidate, update = np.split(hidden[:, mine] @ w["gate_weight"][g] + w["gate_bias"][g], 3, -1)
        candidate, update = np.tanh(sigmoid(reset) * candidate), sigmoid(update - 1)
        out[:, mine] = update * candidate + (1 - update) * h[:, mine]
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_step_of_the_recurrent_cell(dtype):
    model, rng = rssm(), Rng(3)
    h, z, a = (rng.normal((6, n), dtype=np.float64) * 2 for n in (16, 12, 3))
    expected = numpy_step(f64(model), h, z, a)
    model = model.to(dtype)
    h, z, a = (torch.from_numpy(x).to(dtype) for x in (h, z, a))
    found = model.step(Latents(h, z), model.embed(a))
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=0, atol=3e-6 if dtype == torch.float32 else 1e-12)


def test_posterior_and_prior_logits():
    model, rng = rssm(), Rng(4)
    w = f64(model)
    h, tokens = rng.normal((5, 16), dtype=np.float64), rng.normal((5, 12), dtype=np.float64)
    x = h @ w["post_deter.weight"].T + tokens @ w["post_tokens"].T + w["post_deter.bias"]
    post = silu_norm(x, w["post_norm.scale"]) @ w["post_out.weight"].T + w["post_out.bias"]
    x = h
    for i in range(2):
        x = x @ w[f"prior.hidden.{i}.linear.weight"].T + w[f"prior.hidden.{i}.linear.bias"]
        x = silu_norm(x, w[f"prior.hidden.{i}.norm.scale"])
    prior = x @ w["prior.out.weight"].T + w["prior.out.bias"]
    model.double()
    deter, seen = torch.from_numpy(h), F.linear(torch.from_numpy(tokens), model.post_tokens)
    np.testing.assert_allclose(model.posterior(deter, seen).detach().numpy(), post, atol=1e-12)
    np.testing.assert_allclose(model.prior(deter).detach().numpy(), prior, atol=1e-12)


def test_the_latents_are_mixed_with_the_uniform_distribution():
    model = rssm(unimix=0.01)
    logits = torch.tensor([[50.0, 0, 0, 0] * 3])
    probs = model.mixed(logits)[0, 0]
    np.testing.assert_allclose(probs.numpy(), [0.9925, 0.0025, 0.0025, 0.0025], atol=1e-7)


# ---- observing a sequence


def sequence(t=6, b=3, seed=5):
    rng = Rng(seed)
    tokens, actions = (torch.from_numpy(rng.normal((t, b, n), dtype=np.float64)) for n in (12, 3))
    uniform = torch.from_numpy(rng.uniform((t, b, 3), dtype=np.float64))
    start = Latents(torch.from_numpy(rng.normal((b, 16), dtype=np.float64)), torch.zeros(b, 12, dtype=torch.float64))
    return tokens, actions, torch.zeros(t, b, dtype=torch.bool), start, uniform


def test_a_reset_in_the_middle_of_a_sequence_stops_state_and_gradient():
    model = rssm().double()
    tokens, actions, is_first, start, uniform = sequence()
    is_first[3, 1] = True
    for x in (tokens, actions, *start):
        x.requires_grad_()
    states, _ = model.observe(tokens, actions, is_first, start, uniform)
    alone, _ = model.observe(
        tokens[3:, 1:2], actions[3:, 1:2] * 0, is_first[3:, 1:2] * False, model.initial(1), uniform[3:, 1:2]
    )
    # The first step after the reset starts from the initial state, and the previous action has no effect.
    torch.testing.assert_close(states.deter[3, 1], alone.deter[0, 0], rtol=0, atol=1e-12)
    grads = torch.autograd.grad(states.deter[3:, 1].sum() + states.stoch[3:, 1].sum(), (tokens, actions, *start))
    assert grads[0][:3].abs().max() == 0 == grads[1][:4, 1].abs().max()
    assert grads[2].abs().max() == 0
    assert grads[0][3, 1].abs().max() > 0 < grads[1][4, 1].abs().max()
    # Sequences without a reset depend on their start.
    (grad,) = torch.autograd.grad(
        model.observe(tokens, actions, is_first, start, uniform)[0].deter[5, 0].sum(), start[0]
    )
    assert grad[0].abs().max() > 0 == grad[1:].abs().max()


def test_a_state_depends_on_the_previous_action_and_on_nothing_later():
    model = rssm().double()
    tokens, actions, is_first, start, uniform = sequence()
    for x in (tokens, actions):
        x.requires_grad_()
    states, _ = model.observe(tokens, actions, is_first, start, uniform)
    by_tokens, by_actions = torch.autograd.grad(states.deter[2].sum(), (tokens, actions), retain_graph=True)
    assert by_actions[2].abs().min() >= 0 < by_actions[2].abs().max()
    assert by_actions[3:].abs().max() == 0
    assert by_tokens[1].abs().max() > 0 == by_tokens[2:].abs().max()  # h_t sees x_{t-1}, z_t sees x_t
    (by_tokens,) = torch.autograd.grad(states.stoch[2].pow(2).sum(), tokens)
    assert by_tokens[2].abs().max() > 0 == by_tokens[3:].abs().max()


def test_observing_in_two_parts_equals_observing_at_once():
    model = rssm().double()
    tokens, actions, is_first, start, uniform = sequence()
    whole, logits = model.observe(tokens, actions, is_first, start, uniform)
    first, _ = model.observe(tokens[:4], actions[:4], is_first[:4], start, uniform[:4])
    rest, again = model.observe(
        tokens[4:], actions[4:], is_first[4:], Latents(first.deter[-1], first.stoch[-1]), uniform[4:]
    )
    torch.testing.assert_close(rest.deter, whole.deter[4:], rtol=0, atol=1e-12)
    torch.testing.assert_close(again, logits[4:], rtol=0, atol=1e-12)


def test_latents_are_one_hot_and_follow_their_probabilities():
    model = rssm().double()
    logits = torch.tensor([[0.0, 1, 2, 3, 5, 0, 0, 0, -1, 0, 1, 0]]).double().expand(40000, -1)
    uniform = torch.from_numpy(Rng(9).uniform((40000, 3), dtype=np.float64))
    drawn = model.draw(logits, uniform).unflatten(-1, (3, 4))
    assert set(drawn.unique().tolist()) == {0.0, 1.0}
    assert (drawn.sum(-1) == 1).all()
    np.testing.assert_allclose(drawn.mean(0).numpy(), model.mixed(logits[:1])[0].numpy(), atol=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gradient_of_a_sample_is_that_of_its_probabilities(dtype):
    rng = Rng(2)
    logits = torch.from_numpy(rng.normal((5, 12), dtype=np.float64)).to(dtype).requires_grad_()
    upstream = torch.from_numpy(rng.normal((5, 12), dtype=np.float64)).to(dtype)
    drawn = cells.pick(logits, torch.from_numpy(rng.uniform((5, 3), dtype=np.float64)).to(dtype), 0.01)
    (found,) = torch.autograd.grad((drawn * upstream).sum(), logits)
    p, g = softmax(logits.detach().double().numpy().reshape(5, 3, 4)), upstream.double().numpy().reshape(5, 3, 4)
    expected = 0.99 * p * (g - (p * g).sum(-1, keepdims=True))
    np.testing.assert_allclose(found.numpy().reshape(5, 3, 4), expected, rtol=0, atol=1e-6)


# ---- the loss of the latents


def test_the_balanced_kl_with_free_nats_and_stopped_gradients():
    model = rssm().double()
    rng = Rng(8)
    deter = torch.from_numpy(rng.normal((7, 16), dtype=np.float64)).requires_grad_()
    post_logits = torch.from_numpy(2 * rng.normal((7, 12), dtype=np.float64)).requires_grad_()
    prior_logits = model.prior(deter)
    q = 0.99 * softmax(prior_logits.detach().numpy().reshape(7, 3, 4)) + 0.01 / 4
    p = 0.99 * softmax(post_logits.detach().numpy().reshape(7, 3, 4)) + 0.01 / 4
    divergence = (p * np.log(p / q)).sum((-2, -1))
    free = float(np.median(divergence))  # half of the values are below
    dyn, rep, prior_entropy, post_entropy = model.kl(deter, post_logits, free)
    for found in (dyn, rep):  # summed over latents, then clipped below at the free nats
        np.testing.assert_allclose(found.detach().numpy(), np.maximum(divergence, free), atol=1e-12)
    np.testing.assert_allclose(prior_entropy.numpy(), -(q * np.log(q)).sum((-2, -1)), atol=1e-12)
    np.testing.assert_allclose(post_entropy.numpy(), -(p * np.log(p)).sum((-2, -1)), atol=1e-12)
    # dyn trains only the prior, rep only the posterior, and neither has a gradient below the free nats.
    by_deter, by_post = torch.autograd.grad(dyn.sum(), (deter, post_logits), retain_graph=True, allow_unused=True)
    assert by_post is None or by_post.abs().max() == 0
    above = divergence > free
    assert (by_deter[above].abs().sum(-1) > 0).all()
    assert by_deter[divergence < free].abs().max() == 0
    by_deter, by_post = torch.autograd.grad(rep.sum(), (deter, post_logits), allow_unused=True)
    assert by_deter is None or by_deter.abs().max() == 0
    assert (by_post[above].abs().sum(-1) > 0).all()
    assert by_post[divergence < free].abs().max() == 0


# ---- symlog, two-hot


def test_symlog_and_its_inverse():
    x = torch.tensor([-1000.0, -1.0, 0.0, 0.5, 30.0], dtype=torch.float64)
    expected = np.sign(x.numpy()) * np.log(1 + np.abs(x.numpy()))
    np.testing.assert_allclose(symlog(x).numpy(), expected, atol=1e-12)
    np.testing.assert_allclose(symexp(symlog(x)).numpy(), x.numpy(), atol=1e-9)


def head():
    return TwoHot(6, 5, 1, Rng(0))


def test_a_new_head_predicts_exactly_zero():
    made = head()
    logits = made(torch.from_numpy(Rng(1).normal((4, 6))))
    assert logits.abs().max() == 0
    assert made.mean(logits).tolist() == [0.0] * 4
    assert made.mean(logits.double()).tolist() == [0.0] * 4


def test_bins_are_symmetric_and_evenly_spaced_in_symlog():
    bins = head().bins
    assert len(bins) == 255
    assert bins[127] == 0
    assert torch.equal(bins, -bins.flip(0))
    assert (bins.diff() > 0).all()
    np.testing.assert_allclose(symlog(bins.double()).numpy(), np.linspace(-20, 20, 255), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_two_hot_targets_losses_and_means(dtype):
    made, rng = head(), Rng(2)
    logits = torch.from_numpy(rng.normal((9, 255), dtype=np.float64)).to(dtype).requires_grad_()
    values = [0.0, 1.0, -3.7, 250.0, 1e4, -1e-3, 1e12, -1e12, 0.05]  # two are beyond the last bins
    bins, encoded = made.bins.double().numpy(), np.zeros((9, 255))
    for row, value in zip(encoded, np.clip(values, bins[0], bins[-1]), strict=True):
        above = min(max(int(np.searchsorted(bins, value)), 1), 254)
        row[above] = (value - bins[above - 1]) / (bins[above] - bins[above - 1])
        row[above - 1] = 1 - row[above]
    np.testing.assert_allclose(encoded @ bins, np.clip(values, bins[0], bins[-1]), rtol=1e-6)  # decodes to the target
    x = logits.detach().double().numpy()
    log_probs = x - x.max(-1, keepdims=True) - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True))
    other = torch.full((9,), 2.0, dtype=dtype)
    losses = made.loss(logits, torch.tensor(values, dtype=dtype), other)
    np.testing.assert_allclose(losses[..., 0].detach().numpy(), -(encoded * log_probs).sum(-1), rtol=2e-5)
    (grad,) = torch.autograd.grad(losses[..., 0].sum(), logits)
    np.testing.assert_allclose(grad.numpy(), softmax(x) - encoded, rtol=0, atol=2e-5)
    np.testing.assert_allclose(made.mean(logits).numpy(), softmax(x) @ bins, rtol=1e-4)


# ---- returns


def test_lambda_returns_with_continues():
    rng, t, n, lam = Rng(6), 5, 4, 0.95
    r, c, v = (rng.uniform((t + 1, n), dtype=np.float64) for _ in range(3))
    expected = np.empty((t + 1, n))
    expected[t] = v[t]
    for i in reversed(range(t)):  # the reward and the continuation of arriving in i + 1
        expected[i] = r[i + 1] + c[i + 1] * ((1 - lam) * v[i + 1] + lam * expected[i + 1])
    tensors = [torch.from_numpy(x[1:]) for x in (r, c, v)]
    found = lambda_returns(*tensors, lam, torch.from_numpy(v[t]))
    np.testing.assert_allclose(found.numpy(), expected[:t], atol=1e-12)
    # With lambda = 0 only the next value counts; with lambda = 1 only the last.
    one = lambda_returns(*tensors, 0.0, torch.from_numpy(v[t]))
    np.testing.assert_allclose(one.numpy(), r[1:] + c[1:] * v[1:], atol=1e-12)


def test_the_scale_of_returns():
    made, rng = Returns().double(), Rng(7)
    low = high = 0.0
    for _ in range(3):
        returns = 50 * rng.normal((15, 40), dtype=np.float64)
        scale = made.scale(torch.from_numpy(returns), 0.01)
        low += 0.01 * (np.quantile(returns, 0.05) - low)
        high += 0.01 * (np.quantile(returns, 0.95) - high)
        assert float(scale) == pytest.approx(max(1.0, high - low), abs=1e-9)
    assert high - low > 1  # the lower bound of the scale was not reached
    assert float(Returns().scale(torch.ones(15, 40), 0.01)) == 1.0


# ---- layers


def test_initial_weights_are_truncated_at_two_deviations():
    weights = draw_truncated_normal((400, 300), 300, Rng(0)).detach().numpy()
    uncut = 1.1368472 / np.sqrt(300)
    assert np.abs(weights).max() <= 2 * uncut < 1.001 * np.abs(weights).max()
    assert weights.std() == pytest.approx(1 / np.sqrt(300), rel=0.01)
    assert abs(weights.mean()) < 1e-3


def test_initial_weights_of_blocks_use_the_fan_in_of_all_blocks():
    model = RSSM(SIZES["1m"], 64, 2, 0.01, Rng(0))
    whole = 8 * 3 * 64 + 512
    for weight, fan_in in ((model.shared.weight, whole), (model.own, whole), (model.gate_weight, 512)):
        assert float(weight.detach().std()) == pytest.approx(fan_in**-0.5, rel=0.03)


def test_the_norm_has_no_additive_term_and_its_own_epsilon():
    norm = Norm(8)
    assert [name for name, _ in norm.named_parameters()] == ["scale"]
    assert norm(torch.zeros(1, 8)).abs().max() == 0
    x = torch.full((1, 8), 0.01)  # as large as the square root of epsilon
    expected = silu_norm(x.double().numpy(), np.ones(8))
    np.testing.assert_allclose(norm(x).detach().numpy(), expected, rtol=1e-5)


def test_reward_and_value_start_at_zero_and_the_actor_near_it():
    policy = DreamerPolicy(DISCRETE, SMALL, Rng(0))
    assert float(policy.actor.mlp.out.weight.detach().std()) == pytest.approx(0.01 * 12**-0.5, rel=0.3)
    assert head().mlp.out.weight.abs().max() == 0 < MLP(4, 4, 1, 2, Rng(0)).out.weight.abs().max()


@pytest.mark.parametrize("shape", [(1, 16, 16), (3, 64, 64), (1, 10, 14), (2, 5, 5)])
def test_images_are_decoded_in_their_own_shape(shape):
    encoder = Encoder(image(shape), 32, Rng(0))
    decoder = Decoder(image(shape), 20, 32, Rng(1))
    obs = torch.randint(0, 256, (2, 3, *shape), dtype=torch.uint8)
    tokens = encoder(obs)
    assert tokens.shape == (2, 3, encoder.n_tokens)
    feat = torch.randn(2, 3, 20)
    found = decoder(feat)
    assert found.shape == (2, 3, *shape)
    assert 0 <= found.min() <= found.max() <= 1
    expected = (found - obs / 255).square().sum((-3, -2, -1))
    numbers, pixels = decoder.errors(feat, encoder.scaled(obs))
    torch.testing.assert_close(pixels, expected)
    assert numbers == 0
    torch.testing.assert_close(encoder.unscaled(encoder.scaled(obs)), obs.float())
    assert isinstance(encoder.convs[0].layers[0], Conv)


def test_observations_may_consist_of_two_images():
    spec = EnvSpec((25 + 36,), n_actions=3, images=((0, 1, 5, 5), (25, 1, 6, 6)))
    encoder, decoder = Encoder(spec, 32, Rng(0)), Decoder(spec, 20, 32, Rng(1))
    obs, feat = 255 * torch.rand(4, 3, 61), torch.randn(4, 3, 20)
    encoder.see(obs)
    assert encoder(obs).shape == (4, 3, encoder.n_tokens)
    torch.testing.assert_close(encoder.scaled(obs), obs / 255)
    numbers, pixels = decoder.errors(feat, encoder.scaled(obs))
    torch.testing.assert_close(pixels, (decoder(feat) - obs / 255).square().sum(-1))
    assert (numbers == 0).all()


def test_images_and_numbers_of_one_vector_are_separated():
    """Two images with numbers before, between and after them: equal to two separate images and a vector."""
    spec = EnvSpec((2 + 75 + 1 + 36 + 1,), n_actions=3, images=((2, 3, 5, 5), (78, 1, 6, 6)))
    encoder, decoder = Encoder(spec, 32, Rng(0)), Decoder(spec, 20, 32, Rng(1))
    g = np.random.default_rng(0)
    obs = torch.from_numpy(np.round(g.uniform(0, 255, (4, 3, 115))).astype(np.float32))
    places = [0, 1, 77, 114]
    obs[..., places] = torch.from_numpy(g.normal(3, 7, (4, 3, 4)).astype(np.float32))
    encoder.see(obs)
    scaled = encoder.scaled(obs)
    seen = obs[..., places].reshape(-1, 4)
    numbers = symlog((obs[..., places] - seen.mean(0)) / seen.std(0, correction=0))
    torch.testing.assert_close(scaled[..., places], numbers, rtol=1e-4, atol=1e-5)
    colour, grey = obs[..., 2:77] / 255, obs[..., 78:114] / 255
    torch.testing.assert_close(scaled[..., 2:77], colour)
    torch.testing.assert_close(scaled[..., 78:114], grey)
    torch.testing.assert_close(encoder.unscaled(scaled), obs, rtol=1e-4, atol=1e-3)

    parts = [
        encoder.convs[0](colour.reshape(4, 3, 3, 5, 5)),
        encoder.convs[1](grey.reshape(4, 3, 1, 6, 6)),
        encoder.mlp(scaled[..., places]),
    ]
    torch.testing.assert_close(encoder(obs), torch.cat(parts, -1))
    assert encoder(obs).shape[-1] == encoder.n_tokens
    feat = torch.randn(4, 3, 20)
    found = decoder(feat)
    torch.testing.assert_close(found[..., places], decoder.mlp(feat))
    torch.testing.assert_close(found[..., 2:77], decoder.convs[0](feat).flatten(-3))
    torch.testing.assert_close(found[..., 78:114], decoder.convs[1](feat).flatten(-3))
    squares = (found - scaled).square()
    of_numbers, of_pixels = decoder.errors(feat, scaled)
    torch.testing.assert_close(of_numbers, squares[..., places].sum(-1))
    torch.testing.assert_close(of_pixels, squares.sum(-1) - squares[..., places].sum(-1))


def test_vectors_are_compared_in_symlog_and_summed():
    encoder, decoder, g = Encoder(vector(5), 12, Rng(0)), Decoder(vector(5), 20, 12, Rng(1)), Rng(2)
    feat, obs = torch.from_numpy(g.normal((4, 20))), 100 * torch.from_numpy(g.normal((4, 5)))
    expected = (decoder(feat) - symlog(obs)).square().sum(-1)  # no statistics yet
    numbers, pixels = decoder.errors(feat, encoder.scaled(obs))
    torch.testing.assert_close(numbers, expected)
    assert pixels == 0


def test_vectors_are_scaled_by_running_statistics():
    encoder, g = Encoder(vector(4), 12, Rng(0)), Rng(3)
    scales, means = np.float32([0, 1e-2, 5, 1e-1]), np.float32([7, 0, -1, 1000])  # a temperature in Kelvin, say
    batches = [scales * g.normal((4, 6, 4), dtype=np.float32) + means for _ in range(30)]
    for batch in batches:
        encoder.see(torch.from_numpy(batch))
    rows = np.concatenate(batches).reshape(-1, 4).astype(np.float64)
    np.testing.assert_allclose(encoder.mean.numpy(), rows.mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(encoder.deviation.numpy(), [1.0, *rows.std(0)[1:]], rtol=1e-4)  # one is constant
    obs = torch.from_numpy(batches[0])
    expected = symlog((obs - encoder.mean) / encoder.deviation)
    torch.testing.assert_close(encoder.scaled(obs), expected)
    torch.testing.assert_close(encoder.unscaled(encoder.scaled(obs)), obs, rtol=1e-4, atol=1e-4)
    # Checkpoints of 0.12.0 contain the mean of squares.
    state = encoder.state_dict()
    state["square"] = state.pop("variance") + encoder.mean.square()
    other = Encoder(vector(4), 12, Rng(0))
    other.load_state_dict(state)
    torch.testing.assert_close(other.deviation[:3], encoder.deviation[:3], rtol=1e-4, atol=1e-6)
    assert other.deviation[3] == 1.0


# ---- kernels


@pytest.mark.parametrize("shape", [(3, 1), (5, 7), (2, 3, 64), (4, 512)])
def test_the_kernels_equal_the_formulas(shape):
    rng = Rng(11)
    x, scale, d = (torch.from_numpy(rng.normal(s, dtype=np.float64)) for s in (shape, shape[-1:], shape))
    found = []
    for dtype in (torch.float32, torch.float64):  # computed by the kernel and by the formula
        leaves = [t.to(dtype).requires_grad_() for t in (3 * x, scale)]
        out = cells.norm_silu(*leaves, 1e-4)
        found.append([out, *torch.autograd.grad(out, leaves, d.to(dtype))])
    for kernel, formula in zip(*found, strict=True):
        np.testing.assert_allclose(kernel.detach().numpy(), formula.detach().numpy(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("width", [1, 5, 16, 40])
def test_the_kernel_of_the_gates_equals_the_formula(width):
    rng, found = Rng(12), []
    x, h, d = (rng.normal(s, dtype=np.float64) for s in ((8, 6, 3 * width), (6, 8 * width), (6, 8 * width)))
    for dtype in (torch.float32, torch.float64):
        leaves = [torch.from_numpy(3 * t).to(dtype).requires_grad_() for t in (x, h)]
        out = cells.gates(*leaves)
        found.append([out, *torch.autograd.grad(out, leaves, torch.from_numpy(d).to(dtype))])
    for kernel, formula in zip(*found, strict=True):
        np.testing.assert_allclose(kernel.detach().numpy(), formula.detach().numpy(), rtol=2e-5, atol=2e-5)


def test_nan_stays_nan():
    x = torch.ones(2, 32)
    x[0, 3] = torch.nan
    assert cells.norm_silu(x, torch.ones(32), 1e-4)[0].isnan().all()
    logits = torch.zeros(2, 255)
    logits[1, 254] = torch.nan
    at, share = torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 1)
    assert cells.two_hot(logits, at, share).isnan().any(-1).tolist() == [False, True]


# ---- the optimiser


def test_the_optimiser_clips_each_tensor_and_divides_before_the_momentum():
    rng = Rng(13)
    start = [rng.normal((4, 3), dtype=np.float64).astype(np.float32), np.full(5, 1e-5, np.float32)]
    parameters = [torch.nn.Parameter(torch.from_numpy(x.copy())) for x in start]
    optimizer = LaProp(parameters, 0.01, 0.3, 10)
    weights = [x.astype(np.float64) for x in start]
    squares, momenta = [np.zeros_like(x) for x in weights], [np.zeros_like(x) for x in weights]
    for step in range(1, 6):
        grads = [rng.normal(x.shape, dtype=np.float64) * 10**-step for x in weights]
        optimizer.descend([torch.from_numpy(g.astype(np.float32)) for g in grads])
        for i, g in enumerate(grads):
            most = 0.3 * max(1e-3, np.linalg.norm(weights[i]))
            g = g * min(1.0, most / np.linalg.norm(g))
            squares[i] = 0.999 * squares[i] + 0.001 * g**2
            momenta[i] = 0.9 * momenta[i] + 0.1 * g / (np.sqrt(squares[i] / (1 - 0.999**step)) + 1e-20)
            weights[i] = weights[i] - 0.01 * min(1, step / 10) * momenta[i] / (1 - 0.9**step)
    for p, expected in zip(parameters, weights, strict=True):
        np.testing.assert_allclose(p.detach().numpy(), expected, rtol=2e-5, atol=1e-7)
    again = LaProp([torch.nn.Parameter(torch.zeros(4, 3)), torch.nn.Parameter(torch.zeros(5))], 0.01, 0.3, 10)
    again.set_state(optimizer.state())
    assert all(np.array_equal(again.state()[k], v) for k, v in optimizer.state().items())


# ---- actions


@pytest.mark.parametrize(
    ("spec", "actions", "seen"),
    [
        (DISCRETE, [2, 0], [[0, 0, 1], [1, 0, 0]]),
        (EnvSpec((5,), n_choices=(2, 3)), [[1, 0], [0, 2]], [[0, 1, 1, 0, 0], [1, 0, 0, 0, 1]]),
        (
            EnvSpec((5,), act_dim=1, act_low=np.float32([-2]), act_high=np.float32([6])),
            np.float32([[2], [6]]),
            [[0], [1]],
        ),
    ],
)
def test_encoding_of_actions_for_the_model(spec, actions, seen):
    found = spec.to_model(np.asarray(actions))
    assert found.dtype == np.float32
    assert found.tolist() == seen
    np.testing.assert_array_equal(spec.from_model(found), actions)
    assert spec.from_model(found).dtype == spec.action_dtype


@pytest.mark.parametrize("choices", [(3,), (2, 3)])
def test_log_probability_and_entropy_of_choices(choices):
    spec = EnvSpec((5,), n_actions=3) if len(choices) == 1 else EnvSpec((5,), n_choices=choices)
    actor = ActorHead(spec, 6, 5, 0.01, Rng(0)).double()
    feat, width = torch.from_numpy(Rng(1).normal((4, 6), dtype=np.float64)) * 30, sum(choices)
    taken = actor.sample(feat, actor.fill_noise(Rng(2), (4,)).double())
    log_prob, entropy = actor.distribution(feat, taken)
    blocks = np.split(actor.mlp(feat).detach().numpy(), np.cumsum(choices)[:-1], -1)
    probs = [0.99 * softmax(x) + 0.01 / x.shape[-1] for x in blocks]
    hit = [(p * t).sum(-1) for p, t in zip(probs, np.split(taken.numpy(), np.cumsum(choices)[:-1], -1), strict=True)]
    np.testing.assert_allclose(log_prob.detach().numpy(), np.log(hit).sum(0), atol=1e-12)
    np.testing.assert_allclose(entropy.detach().numpy(), sum(-(p * np.log(p)).sum(-1) for p in probs), atol=1e-12)
    assert taken.sum(-1).tolist() == [len(choices)] * 4
    assert taken.shape == (4, width)


def test_log_probability_and_entropy_of_continuous_actions():
    spec = EnvSpec((5,), act_dim=2, act_low=-np.ones(2, np.float32), act_high=np.ones(2, np.float32))
    actor = ActorHead(spec, 6, 5, 0.01, Rng(0)).double()
    feat = torch.from_numpy(Rng(1).normal((4, 6), dtype=np.float64)) * 100
    noise = actor.fill_noise(Rng(2), (4,)).double()
    mean, raw = np.split(actor.mlp(feat).detach().numpy(), 2, -1)
    mean, deviation = np.tanh(mean), 0.9 * sigmoid(raw + 2) + 0.1
    taken = actor.sample(feat, noise)
    np.testing.assert_allclose(taken.numpy(), mean + deviation * noise.numpy(), atol=1e-12)
    log_prob, entropy = actor.distribution(feat, taken)
    z = noise.numpy()
    expected = (-0.5 * z**2 - np.log(deviation) - 0.5 * np.log(2 * np.pi)).sum(-1)
    np.testing.assert_allclose(log_prob.detach().numpy(), expected, atol=1e-12)
    expected = (np.log(deviation) + 0.5 * np.log(2 * np.pi * np.e)).sum(-1)
    np.testing.assert_allclose(entropy.detach().numpy(), expected, atol=1e-12)


# ---- acting


def test_acting_equals_observing_in_training():
    """Acting step by step gives the states of `observe` with the same random numbers, also across episode starts."""
    policy = DreamerPolicy(DISCRETE, SMALL, Rng(0))
    actor, rng = WorldModelActor(policy, Decoder(vector(5), policy.n_features, 12, Rng(0))), Rng(1)
    obs, is_first = rng.normal((6, 2, 5)), np.zeros((6, 2), bool)
    is_first[0], is_first[3, 1] = True, True
    carry, carries, taken, draws = actor.initial(2), [], [], []
    for t in range(6):
        at = Rng(50 + t)
        _, carry = actor.act(Inputs(obs[t], None, carry, is_first[t]), draw_noise(actor, 2, Rng(50 + t)))
        draws.append(torch.from_numpy(at.uniform((2, 3))))
        carries.append(carry)
        taken.append(torch.from_numpy(carry[:, -3:]))
    before = torch.stack([torch.zeros(2, 3), *taken[:-1]])
    with torch.no_grad():
        states, _ = policy.rssm.observe(
            policy.encoder(torch.from_numpy(obs)),
            before,
            torch.from_numpy(is_first),
            policy.rssm.initial(2),
            torch.stack(draws),
        )
        packed = policy.packed(states, torch.stack(taken)).numpy()
    np.testing.assert_allclose(np.stack(carries), packed, rtol=0, atol=1e-5)
    back, actions = policy.unpack(torch.from_numpy(packed[2]))
    assert torch.equal(back.stoch, states.stoch[2])
    assert torch.equal(actions, taken[2])


def test_acting_uses_current_weights_and_the_current_observation():
    policy = DreamerPolicy(DISCRETE, SMALL, Rng(0))
    actor, first = WorldModelActor(policy, Decoder(vector(5), policy.n_features, 12, Rng(0))), np.zeros(1, bool)
    carry, obs = np.ones((1, 22), np.float32), np.ones((1, 5), np.float32)
    _, before = actor.mode(Inputs(obs, None, carry, first))
    assert before.dtype == np.float32
    with torch.no_grad():
        policy.rssm.shared.weight.neg_()
    _, after = actor.mode(Inputs(obs, None, carry, first))
    assert not np.array_equal(before, after)
    states = [actor.mode(Inputs(np.float32(50 * x) * obs, None, carry, first))[1] for x in np.linspace(-1, 1, 21)]
    outputs = {tuple(state[0, 16:19]) for state in states}
    assert len(outputs) > 1  # the latents depend on the observation of the same step
