"""Policies of the user, whose modules know nothing of devices."""

import numpy as np
import pytest
import torch
from custom_policy import CustomPolicy
from device_comparison import differing, require_close, weights
from small_algorithms import make
from torch import nn

N_STEPS = {"ppo": 128, "a2c": 128, "dqn": 64}


@pytest.mark.parametrize("name", ["ppo", "a2c"])
def test_a_policy_with_its_own_sampling_resumes_exactly(name, tmp_path):
    """It draws from the GPU's generator, which the checkpoint contains."""
    torch.manual_seed(0)
    straight = make(name, device="cuda", policy=CustomPolicy())
    straight.train(N_STEPS[name])
    straight.save(tmp_path / "a.safetensors")
    expected = straight.train(N_STEPS[name])
    torch.manual_seed(5)
    loaded = type(straight).from_checkpoint(tmp_path / "a.safetensors", policy=CustomPolicy(), device="cuda")
    require_close(loaded.train(N_STEPS[name]), expected, rel=0, abs=0)
    assert differing(weights(loaded), weights(straight)) == []


def test_training_keeps_the_generators_of_the_user():
    torch.manual_seed(3)
    before = torch.get_rng_state(), torch.cuda.get_rng_state()
    make("ppo", device="cuda").train(64)
    assert all(map(torch.equal, before, (torch.get_rng_state(), torch.cuda.get_rng_state())))


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_network_of_action_values_may_be_anywhere(on_gpu):
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to("cuda" if on_gpu else "cpu")
    dqn = make("dqn", device="cuda", policy=network)
    assert np.isfinite(dqn.train(64)["q_loss"])
    assert next(network.parameters()).is_cuda


def test_auto_trains_a_policy_where_it_is():
    policy = CustomPolicy().to("cuda")
    ppo = make("ppo", device="auto", policy=policy)
    assert ppo.device == "cuda"
    ppo.train(64)


@pytest.mark.parametrize("between", [lambda: nn.BatchNorm1d(16), lambda: nn.LayerNorm(16), lambda: nn.Dropout(0.1)])
def test_layers_with_a_state_or_randomness_train(between):
    ppo = make("ppo", device="cuda", policy=CustomPolicy(between))
    assert np.isfinite(ppo.train(128)["value_loss"])


def test_double_precision_trains_and_half_precision_is_refused():
    assert np.isfinite(make("ppo", device="cuda", policy=CustomPolicy().double()).train(64)["value_loss"])
    with pytest.raises(ValueError, match="must be float32 or float64"):
        make("ppo", device="cuda", policy=CustomPolicy().bfloat16())


@pytest.mark.parametrize("name", ["ppo", "dqn", "sac"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_default_device_of_the_user_changes_nothing(name, device):
    backend = {"backend": "torch"} if device == "cpu" else {}
    expected = make(name, device=device, **backend).train(64)
    torch.set_default_device("cuda")
    try:
        found = make(name, device=device, **backend).train(64)
    finally:
        torch.set_default_device(None)
    require_close(found, expected, rel=0, abs=0)
