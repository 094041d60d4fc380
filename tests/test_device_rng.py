"""The generator on a device against `rlox.kernels.rng.Rng`: same key, same position, same numbers."""

import numpy as np
import pytest
import torch

from rlox.envs.tensor.philox import make_multipliers, make_round_keys, philox
from rlox.kernels.rng import Rng
from rlox.nn.policies import ContinuousPolicy, DiscretePolicy
from rlox.nn.random import DeviceRng

SEEDS = [(0, 0), (7, 3), (2**64 - 1, 2**63)]
SIZES = [0, 1, 2, 3, 4, 5, 7, 64, 1001, (3, 5)]


@pytest.fixture(params=SEEDS, ids=str)
def rngs(request):
    """Both generators, at a position whose counter needs its upper word too."""
    host, device = Rng(*request.param), DeviceRng(*request.param)
    host.skip(2**32 - 20)
    device.skip(2**32 - 20)
    return host, device


def check_positions(host, device):
    assert device.get_state() == host.get_state()


def test_published_block():
    # Random123's known answer: all words of counter and key are the digits of pi.
    key, counter, domain = 0x299F31D0_A4093822, 0x85A308D3_243F6A88, (0x13198A2E, 0x03707344)
    signed = [x - 2**64 if x >> 63 else x for x in (key, counter)]
    even, odd = philox(
        make_round_keys(torch.tensor(signed[:1])),
        make_multipliers("cpu"),
        torch.tensor(signed[1:]),
        domain[0],
        domain[1],
    )
    words = [int(x) for x in (even[0, 0], odd[0, 0], even[1, 0], odd[1, 0])]
    assert words == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_uniform(rngs, size, dtype):
    host, device = rngs
    for _ in range(2):
        np.testing.assert_array_equal(
            device.uniform(size, dtype=getattr(torch, dtype)).numpy(), host.uniform(size, dtype=np.dtype(dtype))
        )
        check_positions(host, device)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_normal(rngs, size, dtype):
    host, device = rngs
    for _ in range(2):
        a, b = device.normal(size, dtype=getattr(torch, dtype)).numpy(), host.normal(size, dtype=np.dtype(dtype))
        np.testing.assert_allclose(a, b, rtol=1e-6 if dtype == "float32" else 1e-14, atol=1e-14)
        check_positions(host, device)


@pytest.mark.parametrize("size", SIZES)
def test_gumbel(rngs, size):
    host, device = rngs
    np.testing.assert_allclose(device.gumbel(size).numpy(), host.gumbel(size), rtol=1e-6, atol=1e-9)
    check_positions(host, device)


@pytest.mark.parametrize("high", [1, 5, 2**31 + 11, 2**32 + 1, 2**62 + 12345, 2**63])
@pytest.mark.parametrize("size", SIZES)
def test_integers(rngs, high, size):
    host, device = rngs
    start = device.get_state()
    expected = host.integers(high, size)
    np.testing.assert_array_equal(device.integers(high, size).numpy(), expected)
    check_positions(host, device)
    if high < 2**63:
        device.set_state(start)
        np.testing.assert_array_equal(device.integers(torch.tensor(high), size).numpy(), expected)


@pytest.mark.parametrize("n", [0, 1, 2, 5, 1000])
def test_permutation(rngs, n):
    host, device = rngs
    first, second = device.permutation(n), device.permutation(n)
    assert sorted(first.tolist()) == list(range(n)) == sorted(second.tolist())
    assert n < 1000 or not torch.equal(first, second)
    host.permutation(n)
    host.permutation(n)
    check_positions(host, device)


def test_permutations_are_uniform():
    rng, counts = DeviceRng(1), np.zeros((4, 4))
    for _ in range(2000):
        counts[np.arange(4), rng.permutation(4).numpy()] += 1
    assert abs(counts - 500).max() < 100  # five standard deviations


def test_out_is_written_and_returned():
    host, device = Rng(3), DeviceRng(3)
    for draw, dtype in (("uniform", torch.float32), ("gumbel", torch.float32), ("normal", torch.float64)):
        out = torch.empty((4, 3), dtype=dtype)
        result = getattr(device, draw)(out=out)
        assert result is out
        arguments = {} if draw == "gumbel" else {"dtype": out.numpy().dtype}
        np.testing.assert_allclose(out.numpy(), getattr(host, draw)((4, 3), **arguments), rtol=1e-6)
    strided = torch.empty((3, 4), dtype=torch.int64).t()
    np.testing.assert_array_equal(device.integers(9, out=strided).numpy(), host.integers(9, (4, 3)))
    check_positions(host, device)


def test_one_number_is_a_tensor_without_dimensions():
    host, device = Rng(3), DeviceRng(3)
    assert device.uniform().shape == ()
    assert device.integers(7).shape == ()
    host.uniform()
    host.integers(7)
    check_positions(host, device)


def test_state_goes_to_and_from_the_generator_of_the_host():
    host, device = Rng(11, 4), DeviceRng(0)
    host.uniform(10)
    tensors = device.position, device._round_keys
    device.set_state(host.get_state())
    assert tensors == (device.position, device._round_keys)
    np.testing.assert_array_equal(device.uniform(5).numpy(), host.uniform(5))
    host.set_state(device.get_state())
    np.testing.assert_array_equal(device.uniform(5).numpy(), host.uniform(5))
    host.set_state({"key": 1, "position": 2**64 - 1})
    device.set_state(host.get_state())
    check_positions(host, device)
    np.testing.assert_array_equal(device.uniform(9).numpy(), host.uniform(9))
    check_positions(host, device)
    with pytest.raises(ValueError, match="position"):
        device.set_state({"key": 1})


@pytest.mark.parametrize("policy", [DiscretePolicy(4, 2), ContinuousPolicy(4, 2)], ids=lambda p: type(p).__name__)
def test_policies_fill_tensors_with_their_noise(policy):
    shape = policy.noise_shape(33)
    on_host, on_device = np.empty(shape, np.float32), torch.empty(shape)
    policy.fill_noise(Rng(5), on_host)
    policy.fill_noise(DeviceRng(5), on_device)
    np.testing.assert_allclose(on_device.numpy(), on_host, rtol=1e-6, atol=1e-9)


def test_refusals():
    rng = DeviceRng(0)
    with pytest.raises(ValueError, match="out must be"):
        rng.uniform(3, out=torch.empty(4))
    with pytest.raises(ValueError, match="out must be"):
        rng.gumbel(out=torch.empty(4, dtype=torch.float64))
    with pytest.raises(ValueError, match="dtype must be"):
        rng.normal(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="high must be"):
        rng.integers(0)
    with pytest.raises(ValueError, match="negative"):
        rng.permutation(-1)
    with pytest.raises(ValueError, match="seed"):
        DeviceRng(-1)
