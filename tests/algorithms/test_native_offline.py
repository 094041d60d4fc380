"""The native updates of IQL against the PyTorch one that defines it, and what holds of all offline ones."""

import math

import numpy as np
import pytest
import textbook
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

import rlox
from rlox.algorithms import BC, IQL, TD3BC
from rlox.batch import TransitionBatch


class Kinks(TorchFunctionMode):
    """Notes how near to one of its kinks a gradient was taken.

    Nearer than rounding, a unit is on for one and off for the other, and both are right.
    """

    nearest = math.inf

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.relu_, F.relu):
            self.nearest = min(self.nearest, args[0].detach().abs().min().item())
        if func is torch.minimum:
            self.nearest = min(self.nearest, (args[0] - args[1]).detach().abs().min().item())
        return func(*args, **(kwargs or {}))


def both(cls, obs_dim, act_dim, seed, **config):
    """The same algorithm by both backends, all its parameters at random; by PyTorch first."""
    made = [cls(None, obs_dim, act_dim, act_high=2.0, seed=0, backend=name, **config) for name in ("torch", "native")]
    for algorithm in made:
        generator = torch.Generator().manual_seed(seed)
        blocks = [optimizer.flat for optimizer in algorithm._optimizers]
        for block in (*blocks, algorithm._target_block):
            block.add_(0.1 * torch.randn(block.shape, generator=generator))
    return made


def batch_of(n, obs_dim, act_dim, seed):
    rng = np.random.default_rng(seed)
    columns = {
        "obs": rng.normal(size=(n, obs_dim)),
        "actions": rng.uniform(-2, 2, size=(n, act_dim)),
        "rewards": rng.normal(size=n),
        "next_obs": rng.normal(size=(n, obs_dim)),
        "discounts": np.where(rng.random(n) < 0.2, 0, 0.97),
    }
    return TransitionBatch(**{name: torch.from_numpy(x.astype(np.float32)) for name, x in columns.items()})


def assert_metrics_equal(got, expected):
    expected = {name: float(x) for name, x in expected.items()}
    assert got == pytest.approx(expected, rel=1e-4, abs=1e-5)


def assert_gradients_equal(native, by_torch):
    for ours, theirs in zip(native._optimizers, by_torch._optimizers, strict=True):
        got, at = native.net.gradients[ours.block], 0
        for p in theirs.parameters:
            grad = p.grad.numpy()
            # Sums that cancel: relative to the largest of the tensor.
            np.testing.assert_allclose(got[at : at + grad.size], grad.ravel(), rtol=0,
                                       atol=1e-5 * np.abs(grad).max() + 1e-7, err_msg=ours.block)  # fmt: skip
            at += grad.size
        assert at == len(got)


shapes = {
    "obs_dim": st.integers(1, 40),
    "act_dim": st.integers(1, 20),
    "hidden_sizes": st.lists(st.integers(1, 130), max_size=3),
    "activation": st.sampled_from(["relu", "tanh"]),
    "seed": st.integers(0, 1000),
}
sizes = st.one_of(st.integers(1, 40), st.integers(200, 600))
OPTIONS = {
    IQL: {
        "expectile": st.sampled_from([0.1, 0.5, 0.7, 0.95]),
        "temperature": st.sampled_from([0.0, 1.0, 3.0]),
        "max_weight": st.sampled_from([0.5, 2.0, 100.0]),
    },
}


@pytest.mark.parametrize("cls", OPTIONS)
@settings(max_examples=40, deadline=None)
@given(st.data(), sizes)
def test_gradients_equal_pytorchs(cls, data, n):
    chosen = data.draw(st.fixed_dictionaries({**shapes, **OPTIONS[cls]}))
    by_torch, native = both(cls, **chosen)
    batch = batch_of(n, chosen["obs_dim"], chosen["act_dim"], chosen["seed"])
    with Kinks() as kinks:
        expected = by_torch.update(batch)
    assume(kinks.nearest > 1e-6)
    assert_metrics_equal(native.update_native(batch), expected)
    assert_gradients_equal(native, by_torch)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (IQL, {}),
        (IQL, {"policy_schedule": "cosine", "learning_rate_schedule": "linear", "max_grad_norm": 0.5}),
        (IQL, {"expectile": 0.9, "temperature": 10.0, "max_weight": 3.0, "tau": 0.6, "max_grad_norm": 3.0}),
    ],
)
@pytest.mark.parametrize(("hidden_sizes", "activation"), [([64, 64], "relu"), ([48], "tanh"), ([], "relu")])
@pytest.mark.parametrize("n", [64, 300])
def test_twenty_updates_stay_together(cls, options, hidden_sizes, activation, n):
    by_torch, native = both(cls, 5, 3, 0, hidden_sizes=hidden_sizes, activation=activation, **options)
    for algorithm in (by_torch, native):
        algorithm.counters.plan("", "n_updates", 20, None, None)
    for i in range(20):
        batch = batch_of(n, 5, 3, i)
        expected, got = by_torch.update(batch), native.update_native(batch)
        for algorithm in (by_torch, native):
            algorithm.counters.updates += 1  # as the loop counts
    assert_metrics_equal(got, expected)
    blocks = zip(by_torch._optimizers, native._optimizers, strict=True)
    pairs = [(by_torch._target_block, native._target_block), *((theirs.flat, ours.flat) for theirs, ours in blocks)]
    for expected, got in pairs:
        # Where a gradient is 0 but for rounding, Adam makes a step of it.
        apart = np.abs(got.detach().numpy() - expected.detach().numpy())
        assert apart.max() < 1e-4
        assert np.quantile(apart, 0.999) < 1e-5


@pytest.mark.parametrize("cls", [BC, TD3BC, IQL])
@pytest.mark.parametrize("start", ["native", "torch"])
def test_a_training_goes_on_by_the_other_backend(cls, start, tmp_path):
    """To what it would have come to, but for rounding; and by its own to the same bits."""
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
    assert textbook.on_levers(IQL).backend == "native"

    class Other(IQL):
        def update(self, batch):
            return super().update(batch)

    deep = {"hidden": None, "hidden_sizes": [8] * 9}
    for cls, options, reason in [
        (Other, {}, "Other has an update of its own"),
        (IQL, deep, "the kernel takes at most 8 hidden layers"),
    ]:
        made = textbook.on_levers(cls, **options)
        assert (made.backend, made.backend_reason) == ("torch", reason)
        with pytest.raises(ValueError, match=f"must be auto or torch here, got 'native': {reason}"):
            textbook.on_levers(cls, backend="native", **options)


@pytest.mark.parametrize("column", ["obs", "actions", "rewards", "next_obs", "discounts"])
def test_nan_is_seen_in_the_metrics(column):
    native = textbook.on_levers(IQL, backend="native")
    batch = textbook.transitions()
    getattr(batch, column).view(-1)[-1] = np.nan
    batch.discounts[-1] = batch.discounts[-1] if column == "discounts" else 0.9
    assert math.isnan(native.update_native(batch)["q_loss"])


def test_the_kernel_names_wrong_arguments():
    net = textbook.on_levers(IQL, backend="native").net
    obs, actions, column = np.zeros((8, 3), np.float32), np.zeros((8, 2), np.float32), np.zeros(8, np.float32)
    rows = {"obs": obs, "actions": actions, "rewards": column, "next_obs": obs, "discounts": column}
    told = {"learning_rate": 1e-3, "policy_learning_rate": 1e-3, "tau": 0.01}
    told |= {"expectile": 0.7, "temperature": 3.0, "max_weight": 100.0}
    for change, kind, message in [
        ({"next_obs": obs[:7]}, ValueError, r"next_obs must have shape \(8, 3\)"),
        ({"actions": actions.astype(np.float64)}, TypeError, "actions must have dtype float32"),
        ({"expectile": 1.0}, ValueError, r"expectile must be in \(0, 1\), got 1.0"),
        ({"temperature": -1.0}, ValueError, "temperature must be finite and >= 0"),
        ({"max_weight": math.inf}, ValueError, "max_weight must be finite"),
        ({"policy_learning_rate": None}, TypeError, "policy_learning_rate must be a number"),
    ]:
        before = {name: block.copy() for name, block in net.parameters.items()}
        with pytest.raises(kind, match=message):
            net.update(**{**rows, **told, **change})
        for name, block in net.parameters.items():
            np.testing.assert_array_equal(block, before[name])
    net.update(**rows, **told)
    blocks = [*net.parameters.values(), np.zeros(net.parameters["critics"].size, np.float32)]
    with pytest.raises(ValueError, match="target must have shape"):
        type(net)(*blocks, 3, 2, [32, 32])
