"""The native update against the PyTorch one that defines it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlox.batch import RolloutBatch
from rlox.kernels.nn.learner import NativeActorCritic
from rlox.kernels.rng import Rng
from rlox.losses import PPOLoss, normalized, policy_gradient, value_loss
from rlox.optimizers import FlatOptimizer
from rlox.policies import ContinuousPolicy, DiscretePolicy, policy_outputs


def make(gaussian, obs_dim, n_outputs, hidden, activation, seed, optimizer="adam"):
    """The same random policy twice: PyTorch's with its optimiser, and the native one."""
    torch.manual_seed(seed)
    kind = ContinuousPolicy if gaussian else DiscretePolicy
    policy = kind(obs_dim, n_outputs, hidden, activation)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.1 * torch.randn_like(p))
    flat = FlatOptimizer(policy.parameters(), 3e-4, kind=optimizer)
    block = flat.flat.detach().numpy().copy()
    return policy, flat, NativeActorCritic(block, obs_dim, n_outputs, list(hidden), activation, gaussian, optimizer)


def rollout(policy, gaussian, n, obs_dim, n_outputs, seed):
    rng = np.random.default_rng(seed)
    obs = torch.from_numpy(rng.standard_normal((n, obs_dim)).astype(np.float32))
    if gaussian:
        actions = torch.from_numpy(rng.standard_normal((n, n_outputs)).astype(np.float32))
    else:
        actions = torch.from_numpy(rng.integers(0, n_outputs, n))
    with torch.no_grad():
        log_probs, _, values = policy_outputs(policy, obs, actions)
    noise = [torch.from_numpy(rng.standard_normal(n).astype(np.float32)) for _ in range(4)]
    returns = values + noise[3]
    return RolloutBatch(obs, actions, log_probs + 0.2 * noise[0], values + 0.3 * noise[1], noise[2], returns, returns)


def arrays(batch):
    names = ("obs", "actions", "log_probs", "advantages", "returns", "values")
    return [np.ascontiguousarray(getattr(batch, name).numpy()) for name in names]


def torch_ppo(policy, optimizer, batch, rng, n_epochs, batch_size, clip_vf, normalize, max_grad_norm):
    loss_fn, history = PPOLoss(0.2, 0.5, 0.01, clip_vf), []
    for _ in range(n_epochs):
        for mb in batch.sample_minibatches(batch_size, rng=rng):
            advantages = normalized(mb.advantages) if normalize else mb.advantages
            loss, metrics = loss_fn(policy, mb.obs, mb.actions, mb.log_probs, advantages, mb.returns, mb.values)
            metrics["grad_norm"] = optimizer.step(loss, max_grad_norm)
            history.append(metrics)
    return {name: float(torch.stack([m[name] for m in history]).mean()) for name in history[0]}


OPTIONS = {"learning_rate": 3e-4, "clip_eps": 0.2, "vf_coef": 0.5, "ent_coef": 0.01, "target_kl": None}

shapes = st.fixed_dictionaries(
    {
        "gaussian": st.booleans(),
        "obs_dim": st.integers(1, 40),
        "n_outputs": st.integers(1, 20),
        "hidden": st.lists(st.integers(1, 130), max_size=3).map(tuple),
        "activation": st.sampled_from(["tanh", "relu"]),
        "seed": st.integers(0, 1000),
    }
)


@settings(max_examples=40, deadline=None)
@given(
    shapes,
    st.integers(2, 600),
    st.sampled_from([None, 0.1]),
    st.booleans(),
    st.sampled_from([None, 0.5]),
)
def test_gradients_equal_pytorchs(shape, n, clip_vf, normalize, max_grad_norm):
    policy, optimizer, native = make(**shape)
    batch = rollout(policy, shape["gaussian"], n, shape["obs_dim"], shape["n_outputs"], shape["seed"])
    expected = torch_ppo(policy, optimizer, batch, Rng(3), 1, n, clip_vf, normalize, None)
    got = native.ppo(
        *arrays(batch), Rng(3), n_epochs=1, batch_size=n, clip_vf=clip_vf, normalize_advantages=normalize,
        max_grad_norm=None, **OPTIONS,
    )  # fmt: skip
    explained = got.pop("explained_variance")
    assert explained == pytest.approx(float(batch.explained_variance()), rel=1e-4, abs=1e-4)
    assert got == pytest.approx(expected, rel=1e-4, abs=1e-5)
    offset = 0
    for p in policy.parameters():
        grad = p.grad.numpy().ravel()
        ours = native.gradient[offset : offset + p.numel()]
        np.testing.assert_allclose(ours, grad, rtol=0, atol=1e-5 * np.abs(grad).max() + 1e-8)
        offset += p.numel()


@pytest.mark.parametrize("gaussian", [False, True])
@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
@pytest.mark.parametrize(("hidden", "activation"), [((64, 64), "tanh"), ((48,), "relu"), ((), "tanh")])
def test_twenty_updates_stay_together(gaussian, optimizer, hidden, activation):
    policy, flat, native = make(gaussian, 5, 3, hidden, activation, 0, optimizer)
    batch = rollout(policy, gaussian, 320, 5, 3, 1)
    a, b = Rng(9), Rng(9)
    expected = torch_ppo(policy, flat, batch, a, 4, 64, 0.2, True, 0.5)
    got = native.ppo(
        *arrays(batch), b, n_epochs=4, batch_size=64, clip_vf=0.2, normalize_advantages=True, max_grad_norm=0.5,
        **OPTIONS,
    )  # fmt: skip
    np.testing.assert_allclose(native.parameters, flat.flat.detach().numpy(), rtol=0, atol=1e-5)
    del got["explained_variance"]
    assert got == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert native.step == 20
    assert a.get_state() == b.get_state()


@pytest.mark.parametrize("gaussian", [False, True])
def test_a2c_is_the_same_update_without_a_ratio(gaussian):
    policy, flat, native = make(gaussian, 4, 2, (64, 64), "tanh", 0, "rmsprop")
    batch = rollout(policy, gaussian, 40, 4, 2, 1)
    log_probs, entropy, values = policy_outputs(policy, batch.obs, batch.actions)
    loss = policy_gradient(log_probs, batch.advantages) + 0.5 * value_loss(values, batch.returns, batch.values)
    flat.step(loss - 0.01 * entropy.mean(), 0.5)
    obs, actions, _, advantages, returns, values = arrays(batch)
    native.a2c(
        obs, actions, advantages, returns, values, learning_rate=3e-4, vf_coef=0.5, ent_coef=0.01, max_grad_norm=0.5
    )
    np.testing.assert_allclose(native.parameters, flat.flat.detach().numpy(), rtol=0, atol=1e-6)
