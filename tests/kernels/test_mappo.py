"""The actor-critic kernel with what only MAPPO uses: masks, a critic with its own inputs, running moments."""

from __future__ import annotations

import numpy as np
import pytest

from rlox.kernels.nn.policy_gradient import NativeActorCritic, n_parameters
from rlox.kernels.rng import Rng

D, S, A, B = 5, 7, 3, 40
UPDATE = {"n_epochs": 2, "batch_size": 16, "learning_rate": 1e-3, "clip_eps": 0.2, "vf_coef": 0.5, "ent_coef": 0.01}


def player(state_dim=None, gaussian=False, seed=0):
    size = n_parameters(D, A, [8, 8], gaussian, state_dim)
    block = np.random.default_rng(seed).normal(0.0, 0.3, size).astype(np.float32)
    return NativeActorCritic(block, D, A, [8, 8], gaussian=gaussian, state_dim=state_dim)


def rows(n=B, gaussian=False, seed=1):
    rng = np.random.default_rng(seed)
    actions = rng.normal(size=(n, A)).astype(np.float32) if gaussian else rng.integers(0, A, n)
    columns = rng.normal(size=(4, n)).astype(np.float32)
    columns[0] = -np.abs(columns[0])
    return [rng.normal(size=(n, D)).astype(np.float32), actions, *columns]


def test_masked_actions_are_neither_taken_nor_likely():
    net, rng = player(), np.random.default_rng(0)
    obs, noise = rng.normal(size=(B, D)).astype(np.float32), rng.gumbel(size=(B, A)).astype(np.float32)
    masks = np.zeros((B, A), bool)
    masks[np.arange(B), rng.integers(0, A, B)] = True
    assert (masks[np.arange(B), net.act(obs, noise, masks)]).all()
    assert (masks[np.arange(B), net.mode(obs, masks)]).all()
    np.testing.assert_allclose(net.log_probs(obs, net.mode(obs, masks), masks=masks)[0], 0.0, atol=1e-6)


def test_a_seed_reproduces_an_update():
    nets = [player(S), player(S)]
    states = np.random.default_rng(2).normal(size=(B, S)).astype(np.float32)
    moments = [np.zeros(3), np.zeros(3)]
    for net, held in zip(nets, moments, strict=True):
        net.ppo(*rows(), Rng(3), **UPDATE, states=states, moments=held, huber_delta=1.0)
    assert np.array_equal(nets[0].parameters, nets[1].parameters)
    assert np.array_equal(*moments)
    assert moments[0][2] == pytest.approx(1 - 0.99999**6)


@pytest.mark.parametrize(("options", "kind", "message"), [
    ({}, TypeError, "states must be a NumPy array, got NoneType"),
    ({"states": np.zeros((B, S + 1), np.float32)}, ValueError, "states must have shape"),
    ({"states": np.zeros((B, S))}, TypeError, "states must have dtype float32"),
    ({"states": np.zeros((B, S), np.float32), "masks": np.ones((B, A))}, TypeError, "masks must have dtype bool"),
    ({"states": np.zeros((B, S), np.float32), "moments": np.zeros(2)}, ValueError, "moments must have shape"),
    ({"states": np.zeros((B, S), np.float32), "moments": np.zeros(6)[::2]}, ValueError, "moments must be C-contiguous"),
    ({"states": np.zeros((B, S), np.float32), "huber_delta": -1.0}, ValueError, "huber_delta must be finite and >= 0"),
    ({"states": np.zeros((B, S), np.float32), "n_epochs": 0}, ValueError, "n_epochs and batch_size must be >= 1"),
])  # fmt: skip
def test_arguments_that_do_not_fit_are_errors(options, kind, message):
    with pytest.raises(kind, match=message):
        player(S).ppo(*rows(), Rng(3), **{**UPDATE, **options})


def test_unsupported_combinations_are_errors():
    with pytest.raises(ValueError, match="states must be None if the critic reads the observations"):
        player().ppo(*rows(), Rng(3), **UPDATE, states=np.zeros((B, S), np.float32))
    with pytest.raises(ValueError, match="masks must be None if actions are continuous"):
        player(gaussian=True).ppo(*rows(gaussian=True), Rng(3), **UPDATE, masks=np.ones((B, A), bool))
    with pytest.raises(ValueError, match="actions must be in"):
        player().log_probs(np.zeros((1, D), np.float32), np.array([A]))
    with pytest.raises(ValueError, match="state_dim must be >= 1"):
        NativeActorCritic(np.zeros(1, np.float32), D, A, [8, 8], state_dim=0)
