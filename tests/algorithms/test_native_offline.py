"""The native updates of IQL and CQL against PyTorch, and properties of all native offline updates."""

import copy
import math

import numpy as np
import pytest
import textbook
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from learner_comparison import BATCHES, PERCEPTRONS, NearestKink, assert_equal_gradients

from rlox.algorithms import BC, CQL, IQL, TD3BC
from rlox.kernels.nn.cql import NativeCQL
from rlox.kernels.nn.iql import NativeIQL
from rlox.nn.batch import TransitionBatch
from rlox.nn.modules import flatten_


def both(cls, obs_dim, act_dim, hidden, activation, seed, **config):
    """The same algorithm with both backends and random parameters, PyTorch first."""
    config |= {"hidden_sizes": list(hidden), "activation": activation}
    made = [cls(None, obs_dim, act_dim, act_high=2.0, seed=0, backend=name, **config) for name in ("torch", "native")]
    for algorithm in made:
        generator = torch.Generator().manual_seed(seed)
        blocks = [optimizer.flat for optimizer in algorithm.optimizers]
        for block in (*blocks, algorithm._target_block):
            block.add_(0.1 * torch.randn(block.shape, generator=generator))
    return made


def doubled(algorithm):
    """A copy in double precision with PyTorch, which draws the same random numbers."""
    double = object.__new__(type(algorithm))
    vars(double).update(copy.deepcopy(vars(algorithm), {id(algorithm): double}))
    for module in (double.policy, *double._parts.values()):
        if isinstance(module, torch.nn.Module):
            module.double()
    double._target_block = flatten_(list(double.target.parameters()))
    for optimizer in double.optimizers:
        optimizer.__init__(optimizer.parameters, optimizer.learning_rate, eps=1e-8)
    return double


def batch_of(n, obs_dim, act_dim, seed):
    """A batch in single precision and the same in double precision."""
    rng = np.random.default_rng(seed)
    columns = {
        "obs": rng.normal(size=(n, obs_dim)),
        "actions": rng.uniform(-2, 2, size=(n, act_dim)),
        "rewards": rng.normal(size=n),
        "next_obs": rng.normal(size=(n, obs_dim)),
        "discounts": np.where(rng.random(n) < 0.2, 0, 0.97),
    }
    rounded = {name: torch.from_numpy(x.astype(np.float32)) for name, x in columns.items()}
    return TransitionBatch(**rounded), TransitionBatch(**{name: x.double() for name, x in rounded.items()})


def assert_metrics_equal(got, expected):
    expected = {name: float(x) for name, x in expected.items()}
    assert got == pytest.approx(expected, rel=1e-4, abs=1e-5)


def assert_gradients_equal(native, by_torch, metrics):
    # The two halves of CQL's penalty cancel.
    apart = 1e-7 + 2e-7 * getattr(native.config, "cql_alpha", 0.0)
    # If a value is close to its target, their difference, whose square is the loss, loses digits.
    share = 1e-5 * max(1.0, 0.05 / max(float(metrics.get("value_loss", 1.0)), 1e-12) ** 0.5)
    for ours, theirs in zip(native.optimizers, by_torch.optimizers, strict=True):
        gradients = [p.grad for p in theirs.parameters]
        # Gradients of learned weights are sums of terms of both signs over the components of an action.
        terms = 1 + native.spec.act_dim if ours.block.startswith("log_") else 1
        assert_equal_gradients(native._net.gradients[ours.block], gradients, ours.block, apart * terms, share)


MANY = 140  # random actions per state: more than the rows that the kernel processes at a time
OPTIONS = {
    IQL: {
        "expectile": st.sampled_from([0.1, 0.5, 0.7, 0.95]),
        "temperature": st.sampled_from([0.0, 1.0, 3.0]),
        "max_weight": st.sampled_from([0.5, 2.0, 100.0]),
    },
    CQL: {
        "n_random_actions": st.one_of(st.integers(1, 6), st.just(MANY)),
        "cql_alpha": st.sampled_from([0.1, 5.0]),
        "auto_alpha": st.booleans(),
        "auto_entropy": st.booleans(),
        "ent_coef": st.sampled_from([0.2, 1.0]),
        "cql_target_value": st.sampled_from([-1.0, 0.5]),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("cls", OPTIONS)
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_gradients_equal_pytorchs(cls, data):
    chosen = data.draw(st.fixed_dictionaries({**PERCEPTRONS, "act_dim": st.integers(1, 20), **OPTIONS[cls]}))
    n = data.draw(BATCHES if chosen.get("n_random_actions", 0) < MANY else st.integers(1, 40))
    # A tiny learning rate, since Adam makes full steps of gradients that are 0 up to rounding.
    by_torch, native = both(cls, **chosen, learning_rate=1e-30)
    single, double = batch_of(n, chosen["obs_dim"], chosen["act_dim"], chosen["seed"])
    exact = doubled(by_torch)
    with NearestKink() as kink:
        expected = by_torch.update(single)
    assume(kink.distance > 1e-6)
    assert_metrics_equal(native.update_native(single), expected)
    exact.update(double)
    assert_gradients_equal(native, exact, expected)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (IQL, {}),
        (IQL, {"policy_schedule": "cosine", "learning_rate_schedule": "linear", "max_grad_norm": 0.5}),
        (IQL, {"expectile": 0.9, "temperature": 10.0, "max_weight": 3.0, "tau": 0.6, "max_grad_norm": 3.0}),
        (CQL, {"n_random_actions": 2}),
        (CQL, {"auto_alpha": True, "cql_target_value": 0.5, "learning_rate_schedule": "linear", "max_grad_norm": 0.5}),
        (CQL, {"cql_alpha": 0.0, "auto_entropy": False, "ent_coef": 0.0, "tau": 0.6}),
    ],
)
@pytest.mark.parametrize(("hidden", "activation"), [([64, 64], "relu"), ([48], "tanh"), ([], "relu")])
@pytest.mark.parametrize("n", [64, 300])
def test_twenty_updates_stay_together(cls, options, hidden, activation, n):
    by_torch, native = both(cls, 5, 3, hidden, activation, 0, **options)
    for algorithm in (by_torch, native):
        algorithm.counters.plan("", "n_updates", 20, None, None)
    for i in range(20):
        batch, _ = batch_of(n, 5, 3, i)
        expected, got = by_torch.update(batch), native.update_native(batch)
        for algorithm in (by_torch, native):
            algorithm.counters.updates += 1  # as in the training loop
    assert_metrics_equal(got, expected)
    blocks = zip(by_torch.optimizers, native.optimizers, strict=True)
    pairs = [(by_torch._target_block, native._target_block), *((theirs.flat, ours.flat) for theirs, ours in blocks)]
    for expected, got in pairs:
        # Adam makes full steps of gradients that are 0 up to rounding.
        apart = np.abs(got.detach().numpy() - expected.detach().numpy())
        assert apart.max() < 1e-4
        assert np.quantile(apart, 0.999) < 1e-5


@pytest.mark.parametrize("cls", [BC, TD3BC, IQL, CQL])
@pytest.mark.parametrize("start", ["native", "torch"])
def test_a_training_continues_with_the_other_backend(cls, start, tmp_path):
    """The result is the same up to rounding, and bit for bit if the backend stays the same."""
    whole = textbook.on_levers(cls, backend=start)
    whole.train(30, schedule_timesteps=30)
    half = textbook.on_levers(cls, backend=start)
    half.train(15, schedule_timesteps=30)
    half.save(tmp_path / "half.safetensors")
    for backend, most in (("native", 1e-4), ("torch", 1e-4), (None, 0.0)):
        options = {} if backend is None else {"backend": backend}
        rest = cls.from_checkpoint(tmp_path / "half.safetensors", half.dataset, **options)
        assert rest.backend == (backend or start)
        rest.train(15, schedule_timesteps=30)
        textbook.agree(rest.policy, whole.policy, most)
        assert rest.rng.get_state() == whole.rng.get_state()


def test_auto_is_native_where_it_is_exact():
    assert textbook.on_levers(IQL).backend == textbook.on_levers(CQL).backend == "native"

    class Other(IQL):
        def update(self, batch):
            return super().update(batch)

    deep = {"hidden": None, "hidden_sizes": [8] * 9}
    for cls, options, reason in [
        (Other, {}, "Other has an update of its own"),
        (CQL, deep, "the kernel supports at most 8 hidden layers"),
    ]:
        made = textbook.on_levers(cls, **options)
        assert (made.backend, made.backend_reason) == ("torch", reason)
        with pytest.raises(ValueError, match=f"must be auto or torch here, got 'native': {reason}"):
            textbook.on_levers(cls, backend="native", **options)


@pytest.mark.parametrize("cls", OPTIONS)
@pytest.mark.parametrize("column", ["obs", "actions", "rewards", "next_obs", "discounts"])
def test_nan_appears_in_the_metrics(cls, column):
    native = textbook.on_levers(cls, backend="native")
    batch = textbook.transitions()
    getattr(batch, column).view(-1)[-1] = np.nan
    batch.discounts[-1] = batch.discounts[-1] if column == "discounts" else 0.9
    assert math.isnan(native.update_native(batch)["q_loss"])


COLUMN, SHAPED = np.zeros(8, np.float32), {k: np.zeros((8, k), np.float32) for k in (2, 3)}
ROWS = {"obs": SHAPED[3], "actions": SHAPED[2], "rewards": COLUMN, "next_obs": SHAPED[3], "discounts": COLUMN}
DRAWN = {"noise": np.zeros((4, 8, 2), np.float32), "uniform": np.zeros((2, 8, 2), np.float32)}
RIGHT = {
    IQL: {**ROWS, "policy_learning_rate": 1e-3, "expectile": 0.7, "temperature": 3.0, "max_weight": 100.0},
    CQL: {**ROWS, **DRAWN, "target_entropy": -2.0, "cql_target_value": 0.5},
}


@pytest.mark.parametrize(
    ("cls", "change", "kind", "message"),
    [
        (IQL, {"next_obs": SHAPED[3][:7]}, ValueError, r"next_obs must have shape \(8, 3\)"),
        (IQL, {"actions": SHAPED[2].astype(np.float64)}, TypeError, "actions must have dtype float32"),
        (IQL, {"expectile": 1.0}, ValueError, r"expectile must be in \(0, 1\), got 1.0"),
        (IQL, {"temperature": -1.0}, ValueError, "temperature must be finite and >= 0"),
        (IQL, {"max_weight": math.inf}, ValueError, "max_weight must be finite"),
        (IQL, {"policy_learning_rate": None}, TypeError, "policy_learning_rate must be a number"),
        (CQL, {"noise": DRAWN["noise"][:2]}, ValueError, r"noise must have shape \(4, 8, 2\)"),
        (CQL, {"uniform": None}, TypeError, "uniform must be a NumPy array, got NoneType"),
        (CQL, {"uniform": DRAWN["noise"]}, ValueError, r"uniform must have shape \(2, 8, 2\)"),
        (CQL, {"cql_target_value": math.nan}, ValueError, "cql_target_value must be finite"),
    ],
)
def test_wrong_arguments_are_named(cls, change, kind, message):
    options = {"n_random_actions": 2} if cls is CQL else {}
    net = textbook.on_levers(cls, backend="native", **options)._net
    arguments = {**RIGHT[cls], "learning_rate": 1e-3, "tau": 0.01}
    net.update(**arguments)
    before = {name: block.copy() for name, block in net.parameters.items()}
    with pytest.raises(kind, match=message):
        net.update(**{**arguments, **change})
    for name, block in net.parameters.items():
        np.testing.assert_array_equal(block, before[name])


def test_errors_of_construction():
    net = textbook.on_levers(IQL, backend="native")._net
    with pytest.raises(ValueError, match="target must have shape"):
        NativeIQL(*net.parameters.values(), net.parameters["critics"].copy(), 3, 2, [32, 32])
    net = textbook.on_levers(CQL, backend="native")._net
    policy, critics, *logs = net.parameters.values()
    with pytest.raises(ValueError, match="n_random_actions must be >= 1"):
        NativeCQL(policy, critics, critics.copy(), *logs, 3, 2, [32, 32], n_random_actions=0)
    with pytest.raises(ValueError, match="log_cql_alpha must share no memory with log_alpha"):
        NativeCQL(policy, critics, critics.copy(), logs[0], logs[0], 3, 2, [32, 32])


def test_moments_can_be_saved_and_restored():
    """A state must contain the moments of all blocks or of none."""
    for cls, names in ((IQL, ["policy", "critics"]), (CQL, ["policy", "critics", "log_alpha", "log_cql_alpha"])):
        first, second = (textbook.on_levers(cls, backend="native", batch_size=8) for _ in range(2))
        first.train(3)
        state = first._net.get_state()
        assert list(state) == names
        second._net.set_state(state)
        for name in names:
            for key, array in second._net.get_state()[name].items():
                np.testing.assert_array_equal(array, state[name][key])
        with pytest.raises(ValueError, match="must hold policy, critics"):
            first._net.set_state({"policy": state["policy"]})
