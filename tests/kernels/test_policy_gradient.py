"""The native update against the PyTorch one that defines it."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from learner_comparison import PERCEPTRONS, NearestKink, assert_equal_gradients

from rlox.collectors.rollout import RolloutBatch
from rlox.kernels.nn.policy_gradient import NativeActorCritic, n_parameters
from rlox.kernels.rng import Rng
from rlox.nn.losses import PPOLoss, normalized, policy_gradient, value_loss
from rlox.nn.optimizers import FlatOptimizer
from rlox.nn.policies import ContinuousPolicy, DiscretePolicy, policy_outputs


def make(gaussian, obs_dim, n_outputs, hidden, activation, seed, optimizer="adam"):
    """The same random policy twice: in PyTorch with its optimiser, and native."""
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


def doubled(batch):
    columns = [batch.obs, batch.actions, batch.log_probs, batch.values, batch.advantages, batch.returns, batch.rewards]
    return RolloutBatch(*(x.double() if x.is_floating_point() else x for x in columns))


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

shapes = st.fixed_dictionaries({**PERCEPTRONS, "gaussian": st.booleans(), "n_outputs": st.integers(1, 20)})


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
    exact = copy.deepcopy(policy).double()
    with NearestKink() as kink:
        expected = torch_ppo(policy, optimizer, batch, Rng(3), 1, n, clip_vf, normalize, None)
    assume(kink.distance > 1e-6)
    got = native.ppo(
        *arrays(batch), Rng(3), n_epochs=1, batch_size=n, clip_vf=clip_vf, normalize_advantages=normalize,
        max_grad_norm=None, **OPTIONS,
    )  # fmt: skip
    explained = got.pop("explained_variance")
    assert explained == pytest.approx(float(batch.explained_variance()), rel=1e-4, abs=1e-4)
    assert got == pytest.approx(expected, rel=1e-4, abs=1e-5)
    rounded = [p.grad.clone() for p in policy.parameters()]
    # In double precision: where terms of about 1 cancel, float32 errors of PyTorch are as large as those of the kernel.
    torch_ppo(exact, FlatOptimizer(exact.parameters(), 3e-4), doubled(batch), Rng(3), 1, n, clip_vf, normalize, None)
    assert_equal_gradients(native.gradient, [p.grad for p in exact.parameters()], rounded=rounded)


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


@pytest.mark.parametrize(("n", "batch_size"), [(129, 64), (65, 64), (128, 127), (3, 2), (7, 1)])
def test_a_single_remaining_row_joins_another_minibatch(n, batch_size):
    policy, flat, native = make(False, 5, 3, (16, 16), "tanh", 0, "adam")
    batch = rollout(policy, False, n, 5, 3, 1)
    expected = torch_ppo(policy, flat, batch, Rng(9), 2, batch_size, None, True, 0.5)
    got = native.ppo(
        *arrays(batch), Rng(9), n_epochs=2, batch_size=batch_size, clip_vf=None, normalize_advantages=True,
        max_grad_norm=0.5, **OPTIONS,
    )  # fmt: skip
    assert native.step == 2 * len(list(batch.sample_minibatches(batch_size)))
    np.testing.assert_allclose(native.parameters, flat.flat.detach().numpy(), rtol=0, atol=1e-5)
    del got["explained_variance"]
    assert got == pytest.approx(expected, rel=1e-4, abs=1e-5)


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


def test_saturated_units_are_exactly_one():
    """Otherwise Adam would make full steps of rounding errors in the derivative."""
    native = NativeActorCritic(np.float32([0, 1, 0, 1, 0, 1, 0, 1, 0]), 1, 1, [1], "tanh", True)
    x = np.linspace(-20, 20, 100_001, dtype=np.float32)[:, None]
    # The bound in gemm.h; without FMA, at the baseline level, errors reach 3.6e-7.
    np.testing.assert_allclose(native.values(x), np.tanh(x[:, 0]), rtol=0, atol=5e-7)
    assert (np.abs(native.values(x[np.abs(x[:, 0]) > 8.4])) == 1).all()


def test_moments_can_be_saved_and_restored():
    make_one = lambda: make(False, 4, 2, (8,), "tanh", 0)[2]  # noqa: E731
    first, second = make_one(), make_one()
    first.gradient[:] = np.linspace(-1, 1, len(first.gradient))
    assert first.apply(1e-3, 0.5) == pytest.approx(np.linalg.norm(first.gradient))
    state = first.get_state()
    assert set(state) == {"exp_avg", "exp_avg_sq", "step"}
    second.parameters[:] = first.parameters
    second.set_state(state)
    for one in (first, second):
        one.gradient[:] = 0.25
        one.apply(1e-3)
    np.testing.assert_array_equal(first.parameters, second.parameters)
    assert second.step == 2
    with pytest.raises(ValueError, match="must hold exp_avg, exp_avg_sq and step"):
        first.set_state({"step": 1})
    with pytest.raises(ValueError, match="differs from the one that was saved"):
        first.set_state({**state, "exp_avg": np.zeros(3, np.float32)})


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (TypeError, {"obs": np.zeros((8, 4))}, "obs must have dtype float32"),
        (ValueError, {"obs": np.zeros((8, 3), np.float32)}, r"obs must have shape \(8, 4\), got \(8, 3\)"),
        (ValueError, {"obs": np.zeros((0, 4), np.float32)}, "at least one row"),
        (ValueError, {"actions": np.full(8, 2)}, r"actions must be in \[0, 2\), got 2"),
        (TypeError, {"actions": np.zeros(8, np.int32)}, "actions must have dtype int64"),
        (ValueError, {"returns": np.zeros(7, np.float32)}, r"returns must have shape \(8,\)"),
        (TypeError, {"values": [0.0] * 8}, "values must be a NumPy array, got list"),
        (ValueError, {"learning_rate": float("nan")}, "learning_rate must be finite and >= 0"),
        (TypeError, {"clip_eps": "0.2"}, "clip_eps must be a number"),
        (ValueError, {"batch_size": 0}, "batch_size must be >= 1"),
        (TypeError, {"n_epochs": 1.0}, "n_epochs must be an integer"),
    ],
)
def test_wrong_arguments_are_named(kind, change, message):
    native = make(False, 4, 2, (8,), "tanh", 0)[2]
    column = np.zeros(8, np.float32)
    right = {
        "obs": np.zeros((8, 4), np.float32), "actions": np.zeros(8, np.int64), "log_probs": column,
        "advantages": column, "returns": column, "values": column, "rng": Rng(0), "n_epochs": 1, "batch_size": 4,
        **OPTIONS,
    }  # fmt: skip
    native.ppo(**right)
    before = native.parameters.copy()
    with pytest.raises(kind, match=message):
        native.ppo(**{**right, **change})
    np.testing.assert_array_equal(native.parameters, before)


def test_errors_of_construction():
    block = np.zeros(n_parameters(4, 2, [8]), np.float32)
    NativeActorCritic(block, 4, 2, [8])
    with pytest.raises(ValueError, match="at most 8 widths, got 9"):
        NativeActorCritic(block, 4, 2, [8] * 9)
    with pytest.raises(ValueError, match=r"parameters must have shape \(\d+,\)"):
        NativeActorCritic(block[1:], 4, 2, [8])
    with pytest.raises(ValueError, match="C-contiguous"):
        NativeActorCritic(np.repeat(block, 2)[::2], 4, 2, [8])
    with pytest.raises(ValueError, match="activation must be tanh or relu"):
        NativeActorCritic(block, 4, 2, [8], "gelu")
    with pytest.raises(ValueError, match="must be >= 1"):
        NativeActorCritic(block, 0, 2, [8])


def test_strided_arrays_are_copied():
    native = make(False, 4, 2, (8,), "tanh", 0)[2]
    obs = np.random.default_rng(0).standard_normal((20, 8)).astype(np.float32)
    np.testing.assert_array_equal(native.values(obs[::2, ::2]), native.values(obs[::2, ::2].copy()))


@pytest.mark.parametrize("gaussian", [False, True])
@pytest.mark.parametrize(("rows", "further"), [(1, 1), (40, 8), (700, 300), (5, 0)])
def test_values_of_further_observations_come_with_log_probs(gaussian, rows, further):
    native = make(gaussian, 4, 2, (16, 16), "tanh", 0)[2]
    obs = np.random.default_rng(0).standard_normal((rows + further, 4)).astype(np.float32)
    actions = native.mode(obs[:rows])
    log_probs, values, later = native.log_probs(obs[:rows], actions, obs[rows:])
    alone = native.log_probs(obs[:rows], actions)
    np.testing.assert_array_equal(log_probs, alone[0])
    np.testing.assert_array_equal(values, alone[1])
    np.testing.assert_array_equal(np.concatenate([values, later]), native.values(obs))


def test_nan_appears_in_the_metrics():
    native = make(False, 4, 2, (8,), "tanh", 0)[2]
    column = np.zeros(8, np.float32)
    bad = np.full(8, np.nan, np.float32)
    args = (np.zeros((8, 4), np.float32), np.zeros(8, np.int64), column, bad, column, column, Rng(0))
    assert np.isnan(native.ppo(*args, n_epochs=1, batch_size=4, **OPTIONS)["policy_loss"])


def test_more_than_sixty_four_action_components():
    policy, _, native = make(True, 3, 80, (8,), "tanh", 0)
    batch = rollout(policy, True, 30, 3, 80, 0)
    log_probs, values = native.log_probs(batch.obs.numpy(), batch.actions.numpy())
    expected, _, expected_values = policy_outputs(policy, batch.obs, batch.actions)
    np.testing.assert_allclose(log_probs, expected.detach(), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(values, expected_values.detach(), rtol=1e-4, atol=1e-5)
    native.ppo(*arrays(batch), Rng(0), n_epochs=1, batch_size=30, **OPTIONS)
    assert np.isfinite(native.parameters).all()
