"""The native updates of SAC and TD3 against autograd and torch.optim.Adam, at every CPU level."""

import copy
import math
import os
import pickle
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from learner_comparison import BATCHES, PERCEPTRONS, NearestKink, assert_equal_gradients
from torch import nn

from rlox.kernels.buffers.replay import ReplayBuffer
from rlox.kernels.envs.vec_env import VecEnv
from rlox.kernels.nn.sac import NativeSAC
from rlox.kernels.nn.td3 import NativeTD3
from rlox.kernels.nn.twin_critics import METRICS, n_parameters
from rlox.kernels.rng import Rng

SAC = {"learning_rate": 3e-4, "tau": 0.005, "target_entropy": -2.0}
TD3 = {"learning_rate": 3e-4, "tau": 0.005, "target_noise": 0.2, "noise_clip": 0.3, "move_policy": True}


class Twins(nn.Module):
    """Two critics: first the weights (2, n_in, n_out) of all layers, then the biases (2, 1, n_out)."""

    def __init__(self, widths, activation):
        super().__init__()
        pairs = list(pairwise(widths))
        self.weights = nn.ParameterList(torch.randn(2, a, b) / math.sqrt(a) for a, b in pairs)
        self.biases = nn.ParameterList(0.3 * torch.randn(2, 1, b) for _, b in pairs)
        self.activation = activation

    def forward(self, obs, actions):
        x = torch.cat([obs, actions], -1).expand(2, -1, -1)
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = torch.baddbmm(bias, self.activation(x) if i else x, weight)
        return x.squeeze(-1)


class Reference:
    """Both algorithms as their papers define them, in PyTorch."""

    def __init__(self, sac, obs_dim, act_dim, hidden, activation, seed):
        torch.manual_seed(seed)
        self.sac, self.act_dim = sac, act_dim
        layers = []
        for a, b in zip([obs_dim, *hidden], [*hidden, act_dim * (1 + sac)], strict=True):
            layers += [nn.Linear(a, b), nn.ReLU() if activation == "relu" else nn.Tanh()]
        self.policy = nn.Sequential(*layers[:-1])
        activate = getattr(torch, activation)
        self.critics = Twins([obs_dim + act_dim, *hidden, 1], activate)
        self.target, self.target_policy = Twins([obs_dim + act_dim, *hidden, 1], activate), None
        self.target_policy = copy.deepcopy(self.policy)
        with torch.no_grad():
            for p in self.target_policy.parameters():
                p.add_(0.1 * torch.randn_like(p))
        self.log_alpha = nn.Parameter(torch.tensor([-0.7]))
        self.parts = {"policy": self.policy, "critics": self.critics}
        blocks = {name: flat(part.parameters()) for name, part in self.parts.items()}
        targets = {"target": flat(self.target.parameters())}
        if sac:
            self.parts["log_alpha"] = nn.ParameterList([self.log_alpha])
            blocks["log_alpha"] = flat([self.log_alpha])
        else:
            targets["target_policy"] = flat(self.target_policy.parameters())
        kind = NativeSAC if sac else NativeTD3
        self.native = kind(**blocks, **targets, obs_dim=obs_dim, act_dim=act_dim, hidden_sizes=hidden,
                           activation=activation)  # fmt: skip
        self.blocks = {**blocks, **targets}
        self.optimizers = {}

    def exact(self):
        """Convert to double precision: float32 rounds PyTorch's gradients as much as the kernel's."""
        for module in (self.policy, self.critics, self.target, self.target_policy):
            module.double()
        self.log_alpha.data = self.log_alpha.data.double()
        return self

    def sample(self, obs, noise):
        mean, log_std = self.policy(obs).chunk(2, -1)
        std = log_std.clamp(-20, 2).exp()
        u = mean + std * noise
        log_prob = torch.distributions.Normal(mean, std).log_prob(u) - 2 * (math.log(2) - u - F.softplus(-2 * u))
        return u.tanh(), log_prob.sum(-1)

    def step(self, name, loss, rate, limit=None):
        parameters = list(self.parts[name].parameters())
        if name not in self.optimizers:
            self.optimizers[name] = torch.optim.Adam(parameters, eps=1e-8)
        for p, grad in zip(parameters, torch.autograd.grad(loss, parameters, materialize_grads=True), strict=True):
            p.grad = grad
        norm = torch.linalg.vector_norm(flat_grad(parameters))
        self.gradients[name] = [p.grad.numpy().copy() for p in parameters]
        if limit is not None:
            torch.nn.utils.clip_grad_norm_(parameters, limit)
        self.optimizers[name].param_groups[0]["lr"] = rate
        self.optimizers[name].step()
        return norm

    def update(self, batch, learning_rate, tau, target_entropy=None, target_noise=0.0, noise_clip=0.0,
               move_policy=True, max_grad_norm=None):  # fmt: skip
        self.gradients = {}
        obs, actions, rewards, next_obs, discounts, noise, *weights = [torch.from_numpy(x) for x in batch]
        weights = weights[0] if weights else torch.ones_like(rewards)
        alpha = self.log_alpha.detach().exp()
        with torch.no_grad():
            if self.sac:
                next_actions, log_probs = self.sample(next_obs, noise[1])
                ahead = self.target(next_obs, next_actions).amin(0) - alpha * log_probs
            else:
                shift = (target_noise * noise).clamp(-noise_clip, noise_clip)
                ahead = self.target(next_obs, (self.target_policy(next_obs).tanh() + shift).clamp(-1, 1)).amin(0)
        values = self.critics(obs, actions)
        errors = values - (rewards + discounts * ahead)
        loss = 0.5 * ((weights * errors[0] ** 2).mean() + (weights * errors[1] ** 2).mean())
        metrics = {"q_loss": loss, "q_value": values.mean(), "td_error": errors.abs().mean()}
        metrics["grad_norm"] = self.step("critics", loss, learning_rate, max_grad_norm)
        if move_policy:
            if self.sac:
                unit, log_probs = self.sample(obs, noise[0])
                loss = (alpha * log_probs - torch.minimum(*self.critics(obs, unit))).mean()
                metrics.update(entropy=-log_probs.mean(), alpha=alpha)
                if target_entropy is not None:
                    pull = -(self.log_alpha * (log_probs.detach().mean() + target_entropy)).sum()
            else:
                loss = -self.critics(obs, self.policy(obs).tanh())[0].mean()
            metrics["policy_loss"] = loss
            metrics["policy_grad_norm"] = self.step("policy", loss, learning_rate, max_grad_norm)
            if self.sac and target_entropy is not None:
                self.step("log_alpha", pull, learning_rate)
            with torch.no_grad():
                pairs = [(self.critics, self.target), (self.policy, self.target_policy)]
                for source, target in pairs:
                    for p, t in zip(source.parameters(), target.parameters(), strict=True):
                        t.lerp_(p, tau)
        return {name: value.item() for name, value in metrics.items()}, errors.abs().mean(0).detach().numpy()

    def state(self):
        """The expected values of all blocks."""
        parts = {**self.parts, "target": self.target, "target_policy": self.target_policy}
        return {name: flat(parts[name].parameters()) for name in self.blocks}


def flat(parameters):
    return torch.cat([p.detach().reshape(-1) for p in parameters]).numpy().copy()


def flat_grad(parameters):
    return torch.cat([p.grad.reshape(-1) for p in parameters])


def transitions(sac, n, obs_dim, act_dim, seed, weighted=False):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    discounts = np.where(rng.random(n) < 0.2, 0, 0.97).astype(np.float32)
    noise = normal(2, n, act_dim) if sac else normal(n, act_dim)
    rows = [normal(n, obs_dim), np.tanh(normal(n, act_dim)), normal(n), normal(n, obs_dim), discounts, noise]
    return [*rows, rng.random(n).astype(np.float32)] if weighted else rows


def assert_gradients_equal(reference, errors):
    for name, expected in reference.gradients.items():
        # The temperature's gradient is a sum of terms of both signs over the components of an action.
        apart = 1e-7 * (1 + reference.native.act_dim if name == "log_alpha" else 1)
        assert_equal_gradients(
            reference.native.gradients[name], expected, name, apart, errors=errors if name == "critics" else None
        )


shapes = st.fixed_dictionaries({**PERCEPTRONS, "act_dim": st.integers(1, 20)})


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(shapes, BATCHES, st.booleans(), st.sampled_from([None, -3.0]))
def test_gradients_of_sac_equal_pytorchs(shape, n, weighted, target_entropy):
    reference = Reference(True, **shape).exact()
    batch = transitions(True, n, shape["obs_dim"], shape["act_dim"], shape["seed"], weighted)
    # A learning rate of 0, since Adam makes full steps of gradients that are 0 up to rounding.
    options = {"learning_rate": 0.0, "tau": 0.3, "target_entropy": target_entropy}
    with NearestKink() as kink:
        expected, errors = reference.update([x.astype(np.float64) for x in batch], **options)
    assume(kink.distance > 1e-6)
    got, td_errors = reference.native.update(*batch, **options)
    assert got == pytest.approx(expected, rel=1e-4, abs=1e-5)
    np.testing.assert_allclose(td_errors, errors, rtol=1e-4, atol=1e-5)
    assert_gradients_equal(reference, errors)


@settings(max_examples=30, deadline=None)
@given(shapes, BATCHES, st.booleans(), st.booleans())
def test_gradients_of_td3_equal_pytorchs(shape, n, weighted, move_policy):
    reference = Reference(False, **shape).exact()
    batch = transitions(False, n, shape["obs_dim"], shape["act_dim"], shape["seed"], weighted)
    options = {**TD3, "learning_rate": 0.0, "move_policy": move_policy}
    with NearestKink() as kink:
        expected, errors = reference.update([x.astype(np.float64) for x in batch], **options)
    assume(kink.distance > 1e-6)
    got, td_errors = reference.native.update(*batch, **options)
    assert got == pytest.approx(expected, rel=1e-4, abs=1e-5)
    np.testing.assert_allclose(td_errors, errors, rtol=1e-4, atol=1e-5)
    assert_gradients_equal(reference, errors)


@pytest.mark.parametrize("sac", [True, False])
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
@pytest.mark.parametrize(("hidden", "activation"), [([64, 64], "relu"), ([48], "tanh"), ([], "relu")])
@pytest.mark.parametrize("n", [64, 300])
def test_twenty_updates_stay_together(sac, max_grad_norm, hidden, activation, n):
    reference = Reference(sac, 5, 3, hidden, activation, 0)
    for i in range(20):
        batch = transitions(sac, n, 5, 3, i)
        options = SAC if sac else {**TD3, "move_policy": i % 2 == 1}
        expected, _ = reference.update(batch, **options, max_grad_norm=max_grad_norm)
        got, _ = reference.native.update(*batch, **options, max_grad_norm=max_grad_norm)
    assert got == pytest.approx(expected, rel=1e-4, abs=1e-5)
    for name, expected in reference.state().items():
        np.testing.assert_allclose(reference.blocks[name], expected, rtol=0, atol=1e-5, err_msg=name)
    state = reference.native.get_state()
    assert {name: int(part["step"]) for name, part in state.items()} == (
        {"policy": 20, "critics": 20, "log_alpha": 20} if sac else {"policy": 10, "critics": 20}
    )


def test_the_gradient_of_equal_values_is_shared():
    reference = Reference(True, 3, 2, [8], "relu", 0)
    with torch.no_grad():
        for p in reference.critics.parameters():
            p[1] = p[0]
    reference.blocks["critics"][:] = flat(reference.critics.parameters())
    batch = transitions(True, 20, 3, 2, 0)
    _, errors = reference.update(batch, 0.0, 0.1)
    reference.native.update(*batch, learning_rate=0.0, tau=0.1)
    assert_gradients_equal(reference, errors)


@pytest.mark.parametrize("log_std", [-30.0, -20.0, 0.5, 2.0, 3.0])
@pytest.mark.parametrize("mean", [0.0, 1e-4, 4.0, -40.0, 1e4])
def test_densities_are_exact_where_tanh_saturates(mean, log_std):
    native = sac_of([])
    native.parameters["policy"][:] = [0, 0, mean, log_std]  # weights of 0; the biases are the outputs
    noise = np.float32([-1.7, -0.2, 0.0, 0.9, 2.5])
    obs, column = np.zeros((5, 1), np.float32), np.zeros(5, np.float32)
    std = np.exp(np.float64(np.clip(log_std, -20, 2)))
    u = np.float32(mean) + std * np.float64(noise)
    np.testing.assert_allclose(native.act(obs, noise[:, None])[:, 0], np.tanh(u), rtol=1e-6, atol=0)
    stacked = np.repeat(noise[None, :, None], 2, 0)
    metrics, _ = native.update(obs, obs, column, obs, column, stacked, learning_rate=0.0, tau=0.1)
    log_density = -0.5 * np.float64(noise) ** 2 - np.log(std) - 0.5 * math.log(2 * math.pi)
    log_density -= 2 * (math.log(2) - u - np.logaddexp(0, -2 * u))
    assert metrics["entropy"] == pytest.approx(-log_density.mean(), rel=1e-6, abs=1e-6)


def sac_of(hidden, obs_dim=1, act_dim=1):
    rng = np.random.default_rng(0)
    sizes = n_parameters(obs_dim, act_dim, hidden, True)
    policy, critics = (rng.standard_normal(n).astype(np.float32) / 4 for n in sizes)
    return NativeSAC(policy, critics, critics.copy(), np.zeros(1, np.float32), obs_dim, act_dim, hidden)


@pytest.mark.parametrize("sac", [True, False])
def test_actions_equal_pytorchs(sac):
    reference = Reference(sac, 3, 2, [32, 16], "relu", 0)
    obs, noise = np.random.default_rng(0).standard_normal((2, 600, 3)).astype(np.float32)
    noise = np.ascontiguousarray(noise[:, :2])
    with torch.no_grad():
        if sac:
            expected = reference.sample(torch.from_numpy(obs), torch.from_numpy(noise))[0]
            mode = reference.policy(torch.from_numpy(obs))[:, :2].tanh()
            got = reference.native.act(obs, noise)
        else:
            mode = reference.policy(torch.from_numpy(obs)).tanh()
            expected = (mode + 0.5 * torch.from_numpy(noise)).clamp(-1, 1)
            got = reference.native.act(obs, noise, 0.5)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(reference.native.mode(obs), mode, rtol=0, atol=1e-6)
    strided = np.asfortranarray(obs)
    np.testing.assert_array_equal(reference.native.mode(strided), reference.native.mode(obs))


LEVEL = """
import pickle, sys
import numpy as np
from rlox.kernels.nn.cql import NativeCQL
from rlox.kernels.nn.iql import NativeIQL
from rlox.kernels.nn.sac import NativeSAC
from rlox.kernels.nn.td3 import NativeTD3
from rlox.kernels.nn.twin_critics import n_parameters
out = []
for obs_dim, act_dim, hidden, n in ((3, 1, [256, 256], 64), (17, 6, [40, 7], 300), (20, 12, [100], 5), (4, 4, [], 17)):
    for sac in (True, False):
        rng = np.random.default_rng(n)
        normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
        p, q = n_parameters(obs_dim, act_dim, hidden, sac)
        blocks = [normal(p) / 8, normal(q) / 8, *([] if sac else [normal(p) / 8]), normal(q) / 8]
        sizes = (obs_dim, act_dim, hidden)
        net = NativeSAC(*blocks, np.zeros(1, np.float32), *sizes) if sac else NativeTD3(*blocks, *sizes)
        rows = normal(n, obs_dim), np.tanh(normal(n, act_dim)), normal(n), normal(n, obs_dim), normal(n)
        noise = normal(2, n, act_dim) if sac else normal(n, act_dim)
        more = {"target_entropy": -1.0} if sac else {"move_policy": True, "target_noise": 0.2, "noise_clip": 0.5}
        metrics, errors = net.update(*rows, noise, learning_rate=0.0, tau=0.5, **more)
        out += [*net.gradients.values(), errors, np.float32(list(metrics.values())), blocks[-1]]
    more, values = act_dim + p, n_parameters(obs_dim, 1, hidden, False)[0]
    iql = NativeIQL(normal(more) / 8, normal(q + values) / 8, normal(q) / 8, *sizes)
    options = {"policy_learning_rate": 0.0, "expectile": 0.7, "temperature": 1.0, "max_weight": 2.0}
    p = n_parameters(obs_dim, act_dim, hidden, True)[0]
    cql = NativeCQL(normal(p) / 8, normal(q) / 8, normal(q) / 8, *np.zeros((2, 1), np.float32), *sizes, "relu", 3)
    drawn = normal(5, n, act_dim), np.tanh(normal(3, n, act_dim))
    for net, draws, more in ((iql, (), options), (cql, drawn, {"target_entropy": -1.0, "cql_target_value": 0.5})):
        metrics, errors = net.update(*rows, *draws, learning_rate=0.0, tau=0.5, **more)
        out += [*net.gradients.values(), errors, np.float32(list(metrics.values()))]
"""


@pytest.mark.slow
def test_every_cpu_level_gives_the_same():
    """The width of panels and of padding depends on the vectors of the level."""
    here = {}
    exec(LEVEL, here)
    for level in "234":
        done = subprocess.run(
            [sys.executable, "-c", LEVEL + "\nsys.stdout.buffer.write(pickle.dumps(out))"],
            env={**os.environ, "RLOX_CPU_LEVEL": level}, capture_output=True, check=False,
        )  # fmt: skip
        if done.returncode and b"RLOX_CPU_LEVEL must be" in done.stderr:
            continue  # this machine or this build has no such level
        assert done.returncode == 0, done.stderr.decode()
        for i, (expected, got) in enumerate(zip(here["out"], pickle.loads(done.stdout), strict=True)):
            atol = 1e-5 * np.abs(expected).max()
            np.testing.assert_allclose(got, expected, rtol=0, atol=atol, err_msg=f"{level} {i}")


ROWS = ("obs", "actions", "rewards", "next_obs", "discounts", "noise", "weights")


@pytest.mark.parametrize("sac", [True, False])
@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (TypeError, {"obs": np.zeros((8, 4))}, "obs must have dtype float32"),
        (ValueError, {"obs": np.zeros((8, 3), np.float32)}, r"obs must have shape \(8, 4\), got \(8, 3\)"),
        (ValueError, {"obs": np.zeros((0, 4), np.float32)}, "at least one row"),
        (ValueError, {"next_obs": np.zeros((7, 4), np.float32)}, r"next_obs must have shape \(8, 4\)"),
        (ValueError, {"actions": np.zeros(8, np.float32)}, r"actions must have shape \(8, 2\)"),
        (TypeError, {"actions": np.zeros((8, 2), np.int64)}, "actions must have dtype float32"),
        (ValueError, {"noise": np.zeros((8, 3), np.float32)}, r"noise must have shape \((2, )?8, 2\)"),
        (ValueError, {"discounts": np.zeros((8, 1), np.float32)}, r"discounts must have shape \(8,\)"),
        (TypeError, {"rewards": [0.0] * 8}, "rewards must be a NumPy array, got list"),
        (ValueError, {"weights": np.zeros(9, np.float32)}, r"weights must have shape \(8,\)"),
        (ValueError, {"learning_rate": float("nan")}, "learning_rate must be finite and >= 0"),
        (ValueError, {"tau": 1.5}, r"tau must be in \(0, 1\], got 1.5"),
        (TypeError, {"max_grad_norm": "1"}, "max_grad_norm must be a number"),
    ],
)
def test_wrong_arguments_are_named(sac, kind, change, message):
    reference = Reference(sac, 4, 2, [8], "relu", 0)
    right = dict(zip(ROWS, transitions(sac, 8, 4, 2, 0, True), strict=True)) | (SAC if sac else TD3)
    reference.native.update(**right)
    before = {name: block.copy() for name, block in reference.blocks.items()}
    with pytest.raises(kind, match=message):
        reference.native.update(**{**right, **change})
    for name, block in reference.blocks.items():
        np.testing.assert_array_equal(block, before[name])


def test_wrong_options_are_named():
    batch = transitions(True, 8, 4, 2, 0)
    with pytest.raises(ValueError, match="target_entropy must be finite"):
        Reference(True, 4, 2, [8], "relu", 0).native.update(*batch, **{**SAC, "target_entropy": float("inf")})
    td3 = Reference(False, 4, 2, [8], "relu", 0).native
    batch = transitions(False, 8, 4, 2, 0)
    with pytest.raises(ValueError, match="noise_clip must be finite and >= 0"):
        td3.update(*batch, **{**TD3, "noise_clip": -1})
    with pytest.raises(TypeError, match="move_policy must be True or False"):
        td3.update(*batch, **{**TD3, "move_policy": None})
    with pytest.raises(ValueError, match="noise_std must be finite and >= 0"):
        td3.act(batch[0], batch[5], -0.1)
    with pytest.raises(ValueError, match=r"noise must have shape \(8, 2\)"):
        td3.act(batch[0], batch[0], 0.1)


def test_errors_of_construction():
    policy, critics = (np.zeros(n, np.float32) for n in n_parameters(4, 2, [8], True))
    target, log_alpha = critics.copy(), np.zeros(1, np.float32)
    NativeSAC(policy, critics, target, log_alpha, 4, 2, [8])
    with pytest.raises(ValueError, match="target must share no memory with critics"):
        NativeSAC(policy, critics, critics, log_alpha, 4, 2, [8])
    with pytest.raises(ValueError, match=r"log_alpha must have shape \(1,\)"):
        NativeSAC(policy, critics, target, np.zeros(2, np.float32), 4, 2, [8])
    with pytest.raises(TypeError, match="target must have dtype float32"):
        NativeSAC(policy, critics, target.astype(np.float64), log_alpha, 4, 2, [8])
    with pytest.raises(ValueError, match="C-contiguous"):
        NativeSAC(np.repeat(policy, 2)[::2], critics, target, log_alpha, 4, 2, [8])
    with pytest.raises(ValueError, match="at most 8 widths, got 9"):
        NativeSAC(policy, critics, target, log_alpha, 4, 2, [8] * 9)
    with pytest.raises(ValueError, match="obs_dim and act_dim must be >= 1"):
        NativeSAC(policy, critics, target, log_alpha, 4, 0, [8])
    with pytest.raises(ValueError, match="activation must be tanh or relu"):
        NativeSAC(policy, critics, target, log_alpha, 4, 2, [8], "gelu")
    with pytest.raises(ValueError, match=r"target_policy must have shape"):
        NativeTD3(*(np.zeros(n, np.float32) for n in n_parameters(4, 2, [8], False)), policy, target, 4, 2, [8])


@pytest.mark.parametrize("sac", [True, False])
@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("which", range(7))
def test_nan_appears_in_the_metrics(sac, activation, which):
    reference = Reference(sac, 4, 2, [8, 8], activation, 0)
    batch = transitions(sac, 8, 4, 2, 0, True)
    batch[4][:] = 0.9
    batch[which].reshape(-1)[-1] = np.nan
    metrics, td_errors = reference.native.update(*batch, **(SAC if sac else TD3))
    assert np.isnan(metrics["q_loss"])
    assert np.isnan(metrics["policy_loss"])  # computed with the updated critics
    assert np.isnan(td_errors).sum() == (0 if ROWS[which] == "weights" else 1)


@pytest.mark.parametrize("sac", [True, False])
def test_moments_can_be_saved_and_restored(sac):
    first, second = (Reference(sac, 4, 2, [8], "relu", 0) for _ in range(2))
    options = SAC if sac else TD3
    first.native.update(*transitions(sac, 8, 4, 2, 0), **options)
    state = first.native.get_state()
    for name, block in first.blocks.items():
        second.blocks[name][:] = block
    second.native.set_state(state)
    for one in (first, second):
        one.native.update(*transitions(sac, 8, 4, 2, 1), **options)
    for name, block in first.blocks.items():
        np.testing.assert_array_equal(second.blocks[name], block)
    with pytest.raises(ValueError, match="must hold policy, critics"):
        first.native.set_state({"policy": state["policy"]})
    before = first.native.get_state()
    bad = {**state["critics"], "exp_avg": np.zeros(3, np.float32)}
    with pytest.raises(ValueError, match="differs from the one that was saved"):
        first.native.set_state({**state, "critics": bad})
    np.testing.assert_array_equal(first.native.get_state()["policy"]["exp_avg"], before["policy"]["exp_avg"])


COUNTS = {"train_freq": 5, "gradient_steps": 2, "batch_size": 20, "env_steps": 0, "horizon_start": 0,
          "horizon_steps": 400, "learning_starts": 60, "update_from": 60, "gamma": 0.98}  # fmt: skip


@pytest.mark.parametrize("sac", [True, False])
@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("n_step", [1, 3])
def test_rounds_equal_the_loop_in_python(sac, n_envs, n_step):
    def parts():
        env = VecEnv(n_envs, 1, "Pendulum-v1")
        obs = env.reset_all().copy()
        return env, obs, ReplayBuffer(500, 3, 1, n_envs=n_envs, n_step=n_step, gamma=0.98), Rng(0, 2), Rng(0, 6)

    options = {"learning_rate": 1e-3, "tau": 0.01, "max_grad_norm": None}
    options |= {"target_entropy": -1.0} if sac else {"target_noise": 0.2, "noise_clip": 0.5}
    more = {} if sac else {"updates": 0, "policy_delay": 2, "exploration_noise": 0.1}
    fast, slow = (Reference(sac, 3, 1, [16, 16], "relu", 0) for _ in range(2))
    env, obs, memory, acting, drawing = parts()
    n_steps, done, left = 0, [], 130 // n_envs
    while left:  # the division into calls must not matter
        n_rounds = min(left, 11)
        counts = {**COUNTS, "env_steps": n_steps} | (more and {"updates": sum(len(part[0]) for part in done)})
        n, table, _, *episodes = fast.native.rounds(
            env.stepper(), memory.access(), acting, drawing, obs, n_rounds, annealed=True, seconds=60,
            **{**more, **options, **counts},
        )  # fmt: skip
        n_steps, left = n_steps + n, left - n_rounds
        done.append((table, *episodes))
    got, returns, lengths = (np.concatenate(parts) for parts in zip(*done, strict=True))
    states = [acting.get_state(), drawing.get_state(), obs]

    env, obs, memory, acting, drawing = parts()
    steps = updates = 0
    ended, history = [], []
    for _ in range(130 // n_envs):
        taken = 0
        while taken < COUNTS["train_freq"]:
            if steps < COUNTS["learning_starts"]:
                actions = np.float32(-2) + np.float32(4) * acting.uniform((n_envs, 1))
            else:
                noise = acting.normal((n_envs, 1))
                actions = 2 * (slow.native.act(obs, noise) if sac else slow.native.act(obs, noise, 0.1))
            step = env.step_all(actions)
            memory.push_batch(obs, step["final_obs"], actions, step["rewards"].astype(np.float32), step["terminated"],
                              step["truncated"])  # fmt: skip
            done = step["terminated"] | step["truncated"]
            ended += list(zip(step["episode_return"][done], step["episode_length"][done], strict=True))
            obs = step["obs"].copy()
            steps += n_envs
            taken += n_envs
        if steps < COUNTS["update_from"]:
            continue
        for _ in range(COUNTS["gradient_steps"]):
            rows = memory.sample(20, drawing.integers(2**63))
            noise = drawing.normal((2, 20, 1) if sac else (20, 1))
            discounts = np.float32(0.98) if n_step == 1 else rows["discounts"]
            updates += 1
            metrics, _ = slow.native.update(
                rows["obs"], rows["actions"] / np.float32(2), rows["rewards"], rows["next_obs"],
                (~rows["terminated"].astype(bool) * discounts).astype(np.float32), noise,
                **{**options, "learning_rate": 1e-3 * (1 - min((steps - taken) / 400, 1))},
                **({} if sac else {"move_policy": updates % 2 == 0}),
            )  # fmt: skip
            history.append(metrics)
    assert n_steps == steps
    assert len(got) == updates > 10
    assert states[:2] == [acting.get_state(), drawing.get_state()]
    np.testing.assert_allclose(states[2], obs, rtol=0, atol=1e-4)
    np.testing.assert_allclose(returns, [x for x, _ in ended], rtol=1e-4)
    assert lengths.tolist() == [x for _, x in ended]
    for name, block in fast.blocks.items():
        np.testing.assert_allclose(block, slow.blocks[name], rtol=0, atol=1e-4, err_msg=name)
    for name, column in zip(METRICS, got.T, strict=False):
        expected = [metrics.get(name, np.nan) for metrics in history]
        np.testing.assert_allclose(column, expected, rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("sac", [True, False])
def test_rounds_end_where_weights_become_nan(sac):
    """Weights of NaN must not act, and their actions must not be stored."""
    reference = Reference(sac, 3, 1, [8], "relu", 0)
    env, memory = VecEnv(1, 1, "Pendulum-v1"), ReplayBuffer(500, 3, 1)
    obs = env.reset_all().copy()
    reference.blocks["target"][0] = np.nan
    options = {**(SAC if sac else TD3), "max_grad_norm": None}
    options |= {} if sac else {"updates": 0, "policy_delay": 1, "exploration_noise": 0.1}
    options.pop("move_policy", None)
    n_steps, metrics, *_ = reference.native.rounds(
        env.stepper(), memory.access(), Rng(0), Rng(1), obs, 100, annealed=False, seconds=60, **COUNTS, **options
    )
    assert n_steps == len(memory) == 60
    assert len(metrics) == 1
    assert np.isnan(metrics[0, :2]).any()
    assert np.isfinite(memory.sample(60, 0)["actions"]).all()


def test_rounds_reject_arguments_that_do_not_fit():
    native = sac_of([8], 3, 1)
    env = VecEnv(2, 1, "Pendulum-v1")
    obs = env.reset_all().copy()
    options = {**COUNTS, **SAC, "annealed": False, "max_grad_norm": None}
    memory, wide = ReplayBuffer(500, 3, 1), ReplayBuffer(500, 3, 2)
    right = [env.stepper(), memory.access(), Rng(0), Rng(1), obs, 1]
    cart = VecEnv(2, 1, "CartPole-v1")
    cart.reset_all()
    for change, kind, message in [
        ({0: None}, TypeError, "stepper must be what VecEnv.stepper"),
        ({1: env.stepper()}, TypeError, "memory must be what ReplayBuffer.access"),
        ({0: cart.stepper()}, ValueError, "obs_dim, n_actions and act_dim of stepper"),
        ({1: wide.access()}, ValueError, "obs_dim and act_dim of memory"),
        ({3: np.random.default_rng(0)}, TypeError, "replay_rng must be a rlox.kernels.rng.Rng"),
        ({4: obs[:1]}, ValueError, "obs must have shape"),
        ({5: 0}, ValueError, "n_rounds must be >= 1"),
    ]:
        with pytest.raises(kind, match=message):
            native.rounds(*[change.get(i, x) for i, x in enumerate(right)], **options)
    native.rounds(*right, **options)
