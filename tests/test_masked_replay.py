"""Replay memories store masks of legal actions, of the observation to which a transition, or an n-step return, led."""

import pickle

import numpy as np
import pytest
import torch

from rlox.buffers.device import DeviceReplayBuffer, PrioritizedDeviceReplayBuffer
from rlox.kernels.buffers.mmap import MmapReplayBuffer
from rlox.kernels.buffers.prioritized import PrioritizedReplayBuffer
from rlox.kernels.buffers.replay import ReplayBuffer

KINDS = ["uniform", "prioritized", "mmap", "device", "prioritized device"]
CLASSES = {
    "uniform": ReplayBuffer,
    "prioritized": PrioritizedReplayBuffer,
    "device": DeviceReplayBuffer,
    "prioritized device": PrioritizedDeviceReplayBuffer,
}


def make(kind, tmp_path, capacity=60, mask_dim=5, n_step=1, n_envs=2, **arguments):
    arguments |= {"n_step": n_step, "n_envs": n_envs, "gamma": 0.9, "mask_dim": mask_dim}
    if kind == "mmap":
        return MmapReplayBuffer(20, capacity, 3, 1, tmp_path, **arguments)
    if "device" in kind:
        arguments["device"] = "cpu"
    return CLASSES[kind](capacity, 3, 1, **arguments)


def masks_of(numbers, mask_dim):
    """Masks (n, mask_dim) that show the numbers (n,) of the observations to which they belong."""
    bits = (np.asarray(numbers).astype(np.int64)[:, None] * 2654435761 % 2**32) >> np.arange(mask_dim)
    return (bits & 1).astype(bool)


def push(buffer, steps, n_envs=2, obs_shape=(3,), mask_dim=5):
    """Push steps whose observations are their numbers: of environment e at time t, 100 t + e; the next one is + 100.

    Every seventh step of an environment is terminated, and every eleventh truncated: the next one is then + 50.
    """
    for t in steps:
        env = np.arange(n_envs)
        terminated, truncated = (t + env) % 7 == 6, (t + 2 * env) % 11 == 10
        number = 100 * t + env
        after = np.where(terminated | truncated, number + 50, number + 100)
        rows = [np.broadcast_to(x.reshape(-1, *[1] * len(obs_shape)), (n_envs, *obs_shape)) for x in (number, after)]
        buffer.push_batch(
            *(np.ascontiguousarray(x, np.float32) for x in rows),
            np.zeros((n_envs, 1), np.float32),
            np.ones(n_envs, np.float32),
            terminated,
            truncated,
            next_masks=masks_of(after, mask_dim),
        )


def sample(buffer, n=200, seed=0):
    batch = buffer.sample(n, seed)
    return {name: np.asarray(column) for name, column in batch.items()}


def assert_masks_follow_next_obs(buffer, mask_dim=5):
    batch = sample(buffer)
    assert batch["next_masks"].dtype == np.bool_
    np.testing.assert_array_equal(batch["next_masks"], masks_of(batch["next_obs"][:, 0], mask_dim))
    assert len(np.unique(batch["next_obs"][:, 0])) > 10
    return batch


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("mask_dim", [1, 4, 5, 30])
@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_is_that_of_the_observation_reached(kind, mask_dim, n_step, tmp_path):
    buffer = make(kind, tmp_path, mask_dim=mask_dim, n_step=n_step)
    for start in range(0, 60, 12):
        push(buffer, range(start, start + 12), mask_dim=mask_dim)
        batch = assert_masks_follow_next_obs(buffer, mask_dim)
        buffer.cut()
    steps = (batch["next_obs"][:, 0] - batch["obs"][:, 0]) // 50
    # Of one step: 1 if it ended the episode, else 2; of three, also up to 6.
    assert set(steps) == ({1, 2} if n_step == 1 else {1, 2, 3, 4, 5, 6})


@pytest.mark.parametrize("kind", KINDS)
def test_saved_masks_return(kind, tmp_path):
    buffer, other, plain = (make(kind, tmp_path, mask_dim=m) for m in (5, 5, 0))
    push(buffer, range(50))
    state = buffer.get_state()
    other.set_state(state)
    for seed in range(3):
        for name, column in sample(buffer, seed=seed).items():
            np.testing.assert_array_equal(column, sample(other, seed=seed)[name])
    assert_masks_follow_next_obs(other)
    with pytest.raises(ValueError, match="mask_dim"):
        plain.set_state(state)
    with pytest.raises(ValueError, match="mask_dim"):
        buffer.set_state(plain.get_state())


def test_a_memory_on_a_device_has_the_hosts_state_and_draws(tmp_path):
    for n_step in (1, 3):
        host, device = (make(kind, tmp_path, n_step=n_step) for kind in ("uniform", "device"))
        push(host, range(50))
        push(device, range(50))
        one, other = host.get_state(), device.get_state()
        assert all(np.array_equal(one[name], other[name]) for name in one)
        ours, theirs = device.sample(100, 3), host.sample(100, 3)
        assert ours["next_masks"].dtype == torch.bool
        for name, column in ours.items():
            np.testing.assert_array_equal(column, theirs[name])


@pytest.mark.parametrize("cls", [ReplayBuffer, PrioritizedReplayBuffer])
def test_masks_beside_all_that_a_memory_on_the_host_can_store(cls):
    buffer = cls(60, 3, 1, mask_dim=5)
    buffer.register_column("mine", 2)
    push(buffer, range(40), n_envs=1)
    buffer.push_extra(0, [1.0, 2.0])
    batch = buffer.sample(50, 1)
    assert buffer.sample(50, 1, out=batch) is batch
    assert_masks_follow_next_obs(buffer)
    assert batch.mine.shape == (50, 2)
    np.testing.assert_array_equal(buffer.gather([39]).mine, [[1.0, 2.0]])
    assert_masks_follow_next_obs(pickle.loads(pickle.dumps(buffer)))
    assert buffer.access() is None  # a kernel cannot push masks


@pytest.mark.parametrize("n_step", [1, 2])
def test_masks_beside_frames_that_are_stored_once(n_step):
    shape, rng = (4, 2, 3), np.random.default_rng(0)
    frames = rng.integers(0, 256, (80, 1, 2, 3), dtype=np.uint8)
    buffer = ReplayBuffer(40, shape, 1, obs_dtype=np.uint8, n_stacked=4, n_step=n_step, mask_dim=6)
    other = ReplayBuffer(40, shape, 1, obs_dtype=np.uint8, n_stacked=4, n_step=n_step, mask_dim=6)
    masks = rng.random((80, 6)) < 0.5
    for t in range(70):
        obs, after = (np.concatenate(frames[i : i + 4])[None] for i in (t, t + 1))
        flags = np.array([False])
        buffer.push_batch(obs, after, [[0.0]], [1.0], flags, flags, next_masks=masks[t + 1 : t + 2])
    other.set_state(buffer.get_state())
    for memory in (buffer, other):
        batch = memory.sample(100, 0)
        places = [int(np.flatnonzero((frames[:, 0] == row[0]).all((1, 2)))[0]) for row in batch.next_obs]
        np.testing.assert_array_equal(batch.next_masks, masks[places])


@pytest.mark.parametrize("kind", KINDS[:3])
def test_wrong_masks_are_named(kind, tmp_path):
    buffer, plain = make(kind, tmp_path), make(kind, tmp_path, mask_dim=0)
    right = [np.zeros((2, 3), np.float32)] * 2 + [np.zeros((2, 1), np.float32), np.zeros(2, np.float32), *[[0, 0]] * 2]
    for masks, error, message in (
        (None, ValueError, "next_masks must be given with mask_dim 5, got None"),
        (np.ones((2, 5)), TypeError, "next_masks must be bool, got float64"),
        (np.ones((2, 4), bool), ValueError, r"next_masks must have shape \(2, 5\), got \(2, 4\)"),
        (np.ones(10, bool), ValueError, "next_masks must have shape"),
    ):
        with pytest.raises(error, match=message):
            buffer.push_batch(*right, next_masks=masks)
    with pytest.raises(ValueError, match="next_masks must be None with mask_dim 0"):
        plain.push_batch(*right, next_masks=np.ones((2, 5), bool))
    with pytest.raises(ValueError, match="push_batch takes next_masks"):
        buffer.push(np.zeros(3), 0.0, 0.0, False, False, np.zeros(3))
    assert len(buffer) == len(plain) == 0
    buffer.push_batch(*right, next_masks=np.ones((2, 5), bool))
    with pytest.raises((TypeError, ValueError), match="mask_dim"):
        buffer.sample_packed(3, 0)
    with pytest.raises((TypeError, ValueError), match="mask_dim"):
        make(kind, tmp_path, mask_dim=-1)
