"""The native update of DQN against the PyTorch formulas that define it, and the checks of its arguments."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from learner_comparison import PERCEPTRONS, NearestKink, assert_equal_gradients

from rlox.kernels.buffers.replay import ReplayBuffer
from rlox.kernels.envs.vec_env import VecEnv
from rlox.kernels.nn.dqn import METRICS, NativeQ, n_parameters
from rlox.kernels.rng import Rng
from rlox.nn.actors import DiscreteQNetwork, QPolicy, polyak_update
from rlox.nn.optimizers import FlatOptimizer


def make(obs_dim, n_actions, hidden, activation, dueling, seed, learning_rate=1e-4):
    """The same random networks twice: in PyTorch (online, target and optimiser), and native."""
    torch.manual_seed(seed)
    q, target = (DiscreteQNetwork(obs_dim, n_actions, hidden, activation, dueling) for _ in range(2))
    target_block = torch.cat([p.detach().reshape(-1) for p in target.parameters()]).numpy()
    flat = FlatOptimizer(q.parameters(), learning_rate, eps=1e-8)
    native = NativeQ(
        flat.flat.detach().numpy().copy(), target_block.copy(), obs_dim, n_actions, list(hidden), activation, dueling
    )
    return q, target.requires_grad_(False), flat, native


def transitions(q, target, n, weighted, seed, masked=False):
    """Random transitions of one to three steps, of which a third terminate, and masks of their next actions.

    Transitions with two almost equally good actions terminate too, since rounding would decide between the actions. Of
    the masks, a fifth allow one action, and a fifth all; after a termination some allow none.
    """
    rng = np.random.default_rng(seed)
    obs_dim = next(q.parameters()).shape[1]
    obs, next_obs = (rng.standard_normal((n, obs_dim)).astype(np.float32) for _ in range(2))
    discounts = np.float32(0.9) ** rng.integers(1, 4, n)
    discounts[rng.random(n) < 1 / 3] = 0.0
    n_actions = q.head[-1].out_features
    masks = rng.random((n, n_actions)) < 0.5
    masks[np.arange(n), rng.integers(0, n_actions, n)] = True
    masks[: n // 5] = np.eye(n_actions, dtype=bool)[rng.integers(0, n_actions, n // 5)]
    masks[n // 5 : 2 * (n // 5)] = True
    for net in (q, target):
        with torch.no_grad():
            values = net(torch.from_numpy(next_obs))
        if masked:
            values[~torch.from_numpy(masks)] = -torch.inf
        best = values.topk(min(2, n_actions)).values.numpy()
        discounts[best[:, 0] - best[:, -1] < 1e-4] = 0.0
    masks[(discounts == 0) & (rng.random(n) < 0.5)] = False
    actions = rng.integers(0, n_actions, n)
    weights = rng.uniform(0.1, 1.0, n).astype(np.float32) if weighted else None
    return (
        obs,
        actions,
        (2 * rng.standard_normal(n)).astype(np.float32),
        next_obs,
        discounts.astype(np.float32),
        weights,
        masks if masked else None,
    )


def torch_update(q, target, optimizer, batch, double_dqn, loss, max_grad_norm):
    obs, actions, rewards, next_obs, discounts, weights, masks = (
        None if x is None else torch.from_numpy(x) for x in batch
    )
    with torch.no_grad():
        ahead = target(next_obs)
        chooser = q(next_obs) if double_dqn else ahead
        if masks is not None:
            chooser = torch.where(masks, chooser, -torch.inf)
        best = chooser.argmax(-1, keepdim=True)
        targets = rewards + discounts * ahead.gather(-1, best).squeeze(-1)
    values = q(obs).gather(-1, actions[:, None]).squeeze(-1)
    each = (F.smooth_l1_loss if loss == "huber" else F.mse_loss)(values, targets, reduction="none")
    total = (each if weights is None else weights * each).mean()
    norm = optimizer.step(total, max_grad_norm)
    errors = (values - targets).detach().abs()
    found = (total.detach(), values.detach().mean(), errors.mean(), norm)
    return dict(zip(METRICS, map(float, found), strict=True)), errors.numpy()


shapes = st.fixed_dictionaries({**PERCEPTRONS, "n_actions": st.integers(1, 20), "dueling": st.booleans()})
options = st.fixed_dictionaries({"double_dqn": st.booleans(), "loss": st.sampled_from(["huber", "mse"])})


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(1, 300), options, st.booleans(), st.booleans())
def test_gradients_equal_pytorchs(shape, n, option, weighted, masked):
    q, target, _, native = make(**shape)
    batch = transitions(q, target, n, weighted, shape["seed"], masked)
    # In double precision, since float32 rounds PyTorch's gradients as much as the kernel's.
    q, target = copy.deepcopy(q).double(), copy.deepcopy(target).double()
    exact = [x if x is None or x.dtype.kind in "ib" else x.astype(np.float64) for x in batch]
    with NearestKink() as kink:
        optimizer = FlatOptimizer(q.parameters(), 1e-4, eps=1e-8)
        expected, errors = torch_update(q, target, optimizer, exact, max_grad_norm=None, **option)
    assume(kink.distance > 1e-6)
    got, td_errors = native.update(*batch, learning_rate=1e-4, **option)
    assert got == pytest.approx(expected, rel=1e-4, abs=1e-5)
    np.testing.assert_allclose(td_errors, errors, rtol=1e-4, atol=1e-5)
    assert_equal_gradients(native.gradient, [p.grad for p in q.parameters()], errors=errors)


@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize(
    ("double_dqn", "loss", "weighted", "masked"),
    [
        (True, "huber", False, False),
        (False, "mse", True, False),
        (True, "huber", True, True),
        (False, "mse", False, True),
    ],
)
@pytest.mark.parametrize(("hidden", "activation"), [((64, 64), "relu"), ((48,), "tanh"), ((), "relu")])
def test_twenty_updates_stay_together(dueling, double_dqn, loss, weighted, masked, hidden, activation):
    q, target, flat, native = make(5, 3, hidden, activation, dueling, 0)
    for i in range(20):
        batch = transitions(q, target, 64, weighted, i, masked)
        expected, _ = torch_update(q, target, flat, batch, double_dqn, loss, 0.5)
        got, _ = native.update(*batch, learning_rate=1e-4, double_dqn=double_dqn, loss=loss, max_grad_norm=0.5)
        assert got == pytest.approx(expected, rel=1e-4, abs=1e-5)
        if i % 5 == 4:
            for tau in (1.0, 0.3)[i == 9 :]:
                polyak_update(q, target, tau)
                native.move_target(tau)
    np.testing.assert_allclose(native.parameters, flat.flat.detach().numpy(), rtol=0, atol=1e-5)
    target_block = torch.cat([p.reshape(-1) for p in target.parameters()]).numpy()
    np.testing.assert_allclose(native.target, target_block, rtol=0, atol=1e-5)
    assert native.step == 20


@pytest.mark.parametrize("dueling", [False, True])
def test_values_and_actions_equal_pytorchs(dueling):
    q, _, _, native = make(6, 4, (70, 30), "relu", dueling, 3)
    obs = np.random.default_rng(0).standard_normal((300, 6)).astype(np.float32)
    with torch.no_grad():
        expected = q(torch.from_numpy(obs)).numpy()
    np.testing.assert_allclose(native.values(obs), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(native.mode(obs), native.values(obs).argmax(-1))
    noise = Rng(1).uniform((300, 2))
    actions = native.act(obs, noise, 0.3)
    random = noise[:, 0] < 0.3
    assert 60 < random.sum() < 120
    np.testing.assert_array_equal(actions, np.where(random, (noise[:, 1] * 4).astype(np.int64), native.mode(obs)))
    np.testing.assert_array_equal(native.values(np.repeat(obs, 2, 1)[::2, ::2]), native.values(obs[::2]))


def test_actions_are_legal_and_equal_pytorchs():
    rng = np.random.default_rng(0)
    q, _, _, native = make(6, 5, (40,), "relu", False, 3)
    policy = QPolicy(q, 5, epsilon=0.4)
    obs = rng.standard_normal((4000, 6)).astype(np.float32)
    masks = rng.random((4000, 5)) < 0.4
    masks[np.arange(4000), rng.integers(0, 5, 4000)] = True
    noise = Rng(1).uniform((4000, 2))
    actions, best = native.act(obs, noise, 0.4, masks), native.mode(obs, masks)
    assert masks[np.arange(4000), actions].all()
    assert masks[np.arange(4000), best].all()
    tensors = [torch.from_numpy(x) for x in (obs, noise, masks)]
    with torch.no_grad():
        np.testing.assert_array_equal(actions, policy.act(*tensors))
        np.testing.assert_array_equal(best, policy.mode(tensors[0], tensors[2]))
    np.testing.assert_array_equal(best, np.where(masks, native.values(obs), -np.inf).argmax(1))
    # Of two legal actions, a random one is either in half of the cases.
    two = (masks.sum(1) == 2) & (noise[:, 0] < 0.4)
    lower = actions[two] == masks[two].argmax(1)
    assert two.sum() > 400
    assert abs(lower.mean() - 0.5) < 4 * 0.5 / np.sqrt(two.sum())
    # Without illegal actions, they are those without a mask; the largest noise gives the last legal action.
    everything = np.ones_like(masks)
    np.testing.assert_array_equal(native.act(obs, noise, 0.4, everything), native.act(obs, noise, 0.4))
    noise[:] = 0.0, np.nextafter(np.float32(1), np.float32(0))
    last = 4 - masks[:, ::-1].argmax(1)
    np.testing.assert_array_equal(native.act(obs, noise, 0.4, masks), last)
    np.testing.assert_array_equal(policy.act(*map(torch.from_numpy, (obs, noise, masks))), last)


def test_nan_appears_in_the_metrics():
    q, target, _, native = make(4, 2, (8,), "relu", False, 0)
    batch = list(transitions(q, target, 8, False, 0))
    batch[2] = np.full(8, np.nan, np.float32)
    metrics, td_errors = native.update(*batch, learning_rate=1e-3)
    assert np.isnan(metrics["q_loss"])
    assert np.isnan(td_errors).all()


def right(native):
    batch = transitions(*make(4, 2, (8,), "relu", False, 0)[:2], 8, True, 0)
    names = ("obs", "actions", "rewards", "next_obs", "discounts", "weights", "next_masks")
    env, memory = VecEnv(3, 0, "CartPole-v1"), ReplayBuffer(50, 4, 1)
    obs = env.reset_all()
    rounds = {
        "stepper": env.stepper(), "memory": memory.access(), "action_rng": Rng(0), "replay_rng": Rng(1),
        "obs": obs, "n_rounds": 2, "train_freq": 4, "gradient_steps": 2, "batch_size": 8, "env_steps": 0,
        "horizon_start": 0, "horizon_steps": 100, "learning_starts": 0, "update_from": 0, "epsilon": (1.0, 0.1, 0.5),
        "learning_rate": 1e-3, "annealed": False, "gamma": 0.9, "double_dqn": True, "loss": "huber",
        "max_grad_norm": 1.0, "tau": 1.0, "target_update_freq": 10, "target_period": 0,
    }  # fmt: skip
    return {
        "update": (native.update, {**dict(zip(names, batch, strict=True)), "learning_rate": 1e-3}),
        "act": (native.act, {"obs": batch[0], "noise": np.zeros((8, 2), np.float32), "epsilon": 0.1}),
        "move_target": (native.move_target, {"tau": 1.0}),
        "rounds": (native.rounds, rounds), "owners": (env, memory),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("method", "kind", "change", "message"),
    [
        ("update", TypeError, {"obs": np.zeros((8, 4))}, "obs must have dtype float32"),
        ("update", ValueError, {"obs": np.zeros((8, 3), np.float32)}, r"obs must have shape \(8, 4\), got \(8, 3\)"),
        ("update", ValueError, {"obs": np.zeros((0, 4), np.float32)}, "at least one row"),
        ("update", ValueError, {"next_obs": np.zeros((7, 4), np.float32)}, r"next_obs must have shape \(8, 4\)"),
        ("update", ValueError, {"actions": np.full(8, 2)}, r"actions must be in \[0, 2\), got 2"),
        ("update", ValueError, {"actions": np.full(8, -1)}, r"actions must be in \[0, 2\), got -1"),
        ("update", TypeError, {"actions": np.zeros(8, np.int32)}, "actions must have dtype int64"),
        ("update", TypeError, {"rewards": None}, "rewards must be a NumPy array, got NoneType"),
        ("update", ValueError, {"discounts": np.zeros(7, np.float32)}, r"discounts must have shape \(8,\)"),
        ("update", TypeError, {"weights": [1.0] * 8}, "weights must be a NumPy array, got list"),
        ("update", TypeError, {"next_masks": np.ones((8, 2))}, "next_masks must have dtype bool"),
        ("update", ValueError, {"next_masks": np.ones((8, 3), bool)}, r"next_masks must have shape \(8, 2\)"),
        ("update", ValueError, {"learning_rate": float("nan")}, "learning_rate must be finite and >= 0"),
        ("update", ValueError, {"loss": "l1"}, "loss must be huber or mse, got 'l1'"),
        ("update", TypeError, {"max_grad_norm": "1"}, "max_grad_norm must be a number, got str"),
        ("act", TypeError, {"obs": np.zeros((8, 4))}, "obs must have dtype float32"),
        ("act", ValueError, {"noise": np.zeros((8, 1), np.float32)}, r"noise must have shape \(8, 2\)"),
        ("act", ValueError, {"masks": np.ones((7, 2), bool)}, r"masks must have shape \(8, 2\)"),
        ("act", ValueError, {"epsilon": -0.1}, "epsilon must be finite and >= 0"),
        ("move_target", ValueError, {"tau": 0}, r"tau must be in \(0, 1\], got 0"),
        ("move_target", ValueError, {"tau": 1.5}, r"tau must be in \(0, 1\], got 1.5"),
        ("rounds", TypeError, {"stepper": 1}, r"stepper must be what VecEnv.stepper\(\) returns, got int"),
        ("rounds", TypeError, {"memory": None}, r"memory must be what ReplayBuffer.access\(\) returns, got NoneType"),
        ("rounds", TypeError, {"action_rng": np.random.default_rng()}, "action_rng must be a rlox.kernels.rng.Rng"),
        ("rounds", TypeError, {"replay_rng": 3}, "replay_rng must be a rlox.kernels.rng.Rng, got int"),
        ("rounds", ValueError, {"obs": np.zeros((2, 4), np.float32)}, r"obs must have shape \(3, 4\)"),
        ("rounds", ValueError, {"obs": np.zeros((6, 4), np.float32)[::2]}, "C-contiguous"),
        ("rounds", ValueError, {"n_rounds": 0}, "n_rounds must be >= 1 and below"),
        ("rounds", TypeError, {"train_freq": 4.0}, "train_freq must be an integer"),
        ("rounds", ValueError, {"gradient_steps": 0}, "gradient_steps must be >= 1, or -1, got 0"),
        ("rounds", ValueError, {"batch_size": 0}, "batch_size must be >= 1"),
        ("rounds", ValueError, {"target_update_freq": 0}, "target_update_freq must be >= 1"),
        ("rounds", ValueError, {"env_steps": -1}, "env_steps must be >= 0"),
        ("rounds", ValueError, {"epsilon": 0.1}, "epsilon must be its start, its end and a fraction, got 0.1"),
        ("rounds", ValueError, {"gamma": float("inf")}, "gamma must be finite and >= 0"),
        ("rounds", ValueError, {"tau": 2}, r"tau must be in \(0, 1\], got 2"),
        ("rounds", ValueError, {"loss": None}, "loss must be huber or mse, got None"),
        ("rounds", ValueError, {"seconds": -1}, "seconds must be finite and >= 0"),
    ],
)
def test_wrong_arguments_are_named(method, kind, change, message):
    native = make(4, 2, (8,), "relu", False, 0)[3]
    calls = right(native)
    call, arguments = calls[method]
    call(**arguments)
    env, memory = calls["owners"]
    before, state, stored = native.parameters.copy(), env.get_state(), len(memory)
    with pytest.raises(kind, match=message):
        call(**{**arguments, **change})
    np.testing.assert_array_equal(native.parameters, before)
    assert all(np.array_equal(value, state[name]) for name, value in env.get_state().items())
    assert len(memory) == stored


def test_rounds_reject_arguments_that_do_not_fit():
    native = make(4, 2, (8,), "relu", False, 0)[3]
    calls = right(native)  # keeps the owners of the passed memory alive
    call, arguments = calls["rounds"]
    other, narrow = VecEnv(3, 0, "Acrobot-v1"), ReplayBuffer(50, 3, 1)
    other.reset_all()
    for change in ({"stepper": other.stepper()}, {"memory": narrow.access()}):
        with pytest.raises(ValueError, match=r"must be \(4, 2, 1, 4, 1\)"):
            call(**{**arguments, **change})


def test_a_call_respects_its_time_limit():
    native = make(4, 2, (8,), "relu", False, 0)[3]
    calls = right(native)  # keeps the owners of the passed memory alive
    call, arguments = calls["rounds"]
    steps, metrics, *_ = call(**{**arguments, "n_rounds": 1000, "seconds": 0.0})
    assert steps == 6  # a round of four steps, rounded up to steps of three environments
    assert metrics.shape == (2, 4)


def test_memories_with_more_than_transitions_have_no_access():
    assert ReplayBuffer(10, 4, 1, n_step=3, gamma=0.9, n_envs=2).access() is not None

    class Own(ReplayBuffer):
        pass

    assert Own(10, 4, 1).access() is None
    with_column = ReplayBuffer(10, 4, 1)
    with_column.register_column("extra", 2)
    assert with_column.access() is None
    assert ReplayBuffer(10, 16, 1, obs_shape=(1, 4, 4), obs_dtype=np.uint8).access() is None


def test_errors_of_construction():
    block = np.zeros(n_parameters(4, 2, [8]), np.float32)
    NativeQ(block, block.copy(), 4, 2, [8])
    with pytest.raises(ValueError, match="at most 8 widths, got 9"):
        NativeQ(block, block.copy(), 4, 2, [8] * 9)
    with pytest.raises(ValueError, match=r"parameters must have shape \(\d+,\)"):
        NativeQ(block[1:], block.copy(), 4, 2, [8])
    with pytest.raises(ValueError, match=r"target must have shape \(\d+,\)"):
        NativeQ(block, block[1:], 4, 2, [8])
    with pytest.raises(TypeError, match="target must be a NumPy array, got NoneType"):
        NativeQ(block, None, 4, 2, [8])
    with pytest.raises(ValueError, match="share no memory"):
        NativeQ(block, block, 4, 2, [8])
    with pytest.raises(ValueError, match="activation must be tanh or relu"):
        NativeQ(block, block.copy(), 4, 2, [8], "gelu")
    with pytest.raises(ValueError, match="must be >= 1"):
        NativeQ(block, block.copy(), 4, 0, [8])
    with pytest.raises(ValueError, match="state must hold exp_avg, exp_avg_sq and step"):
        NativeQ(block, block.copy(), 4, 2, [8]).set_state({"step": 1})
