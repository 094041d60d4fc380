"""Replay memories and updates of the off-policy algorithms on a device, run on tensors of the CPU."""

import numpy as np
import pytest
import torch
from board_games import Corridor

import rlox
from rlox.buffers.device import DeviceReplayBuffer, PrioritizedDeviceReplayBuffer
from rlox.buffers.device_dataset import DeviceDataset
from rlox.gpu import acting
from rlox.gpu.ahead import NumbersAhead
from rlox.kernels.buffers.offline import OfflineDatasetBuffer
from rlox.kernels.buffers.prioritized import PrioritizedReplayBuffer
from rlox.kernels.buffers.replay import ReplayBuffer
from rlox.kernels.rng import Rng
from rlox.nn.graphed_acting import GraphedPolicy
from rlox.nn.transfers import Packing, upload
from rlox.training import off_policy

KINDS = {
    "uniform": (ReplayBuffer, DeviceReplayBuffer),
    "prioritized": (PrioritizedReplayBuffer, PrioritizedDeviceReplayBuffer),
}
ALGORITHMS = {
    "sac": (rlox.SAC, "Pendulum-v1"),
    "td3": (rlox.TD3, "Pendulum-v1"),
    "dqn": (rlox.DQN, "CartPole-v1"),
    "masked": (rlox.DQN, Corridor),
    "discrete": (rlox.SAC, "CartPole-v1"),
    "legal": (rlox.SAC, Corridor),
}


def pair(kind, capacity, n_envs, n_step, **weighting):
    """A memory on the host and one on a device."""
    host, device = KINDS[kind]
    arguments = {"n_envs": n_envs, "n_step": n_step, "gamma": 0.9, **weighting}
    return host(capacity, 3, 2, **arguments), device(capacity, 3, 2, device="cpu", **arguments)


def step(rng, n):
    return (
        *(rng.normal(size=(n, d)).astype(np.float32) for d in (3, 3, 2)),
        rng.normal(size=n).astype(np.float32),
        rng.random(n) < 0.1,
        rng.random(n) < 0.1,
    )


def require_same_state(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert type(value) is type(other[name])
        assert np.array_equal(value, other[name]), name


@pytest.mark.parametrize("weight_norm", [None, "none", "batch", "memory"])
@pytest.mark.parametrize(("n_envs", "n_step", "capacity"), [(1, 1, 50), (3, 3, 300), (2, 5, 40)])
def test_device_memory_draws_what_the_host_draws(n_envs, n_step, capacity, weight_norm):
    kind = "prioritized" if weight_norm else "uniform"
    weighting = {"alpha": 0.7, "beta": 0.5, "eps": 1e-2, "weight_norm": weight_norm} if weight_norm else {}
    host, device = pair(kind, capacity, n_envs, n_step, **weighting)
    rng = np.random.default_rng(0)
    for t in range(150):
        rows = step(rng, n_envs)
        host.push_batch(*rows)
        device.push_batch(*rows)
        if t % 37 == 5:
            host.cut()
            device.cut()
        if t == 77:
            one, other = host.get_state(), device.get_state()
            require_same_state(one, other)
            host.set_state(other)
            device.set_state(one)
        if t % 3 == 0:
            theirs, ours = host.sample(64, t), device.sample(64, t)
            assert set(theirs) == set(ours)
            for name, column in ours.items():
                expected = theirs[name].astype(np.float64)
                np.testing.assert_allclose(column.double(), expected, rtol=1e-6 if name == "weights" else 0)
            if kind == "prioritized":
                errors = np.abs(rng.normal(size=64))
                host.update_priorities(theirs["indices"], errors)
                device.update_priorities(ours["indices"], torch.from_numpy(errors))


def test_leaves_out_old_rows_of_a_state():
    host, device = pair("uniform", 20, 1, 1)
    rng = np.random.default_rng(0)
    for _ in range(30):
        rows = step(rng, 1)
        host.push_batch(*rows)
        device.push_batch(*rows)
    require_same_state(host.get_state(since=25), device.get_state(since=25))


def test_empty_memory_has_a_state_and_no_sample():
    host, device = pair("prioritized", 20, 1, 1)
    require_same_state(host.get_state(), device.get_state())
    device.set_state(host.get_state())
    with pytest.raises(ValueError, match="push first"):
        device.sample(1, 0)


def test_priorities_that_are_not_finite_change_nothing():
    _, device = pair("prioritized", 20, 1, 1)
    device.push_batch(*step(np.random.default_rng(0), 5))
    before = device.get_state()
    device.update_priorities(torch.arange(2), torch.tensor([3.0, torch.nan]))
    require_same_state(before, device.get_state())
    device.update_priorities(torch.arange(2), torch.tensor([3.0, 0.5]))
    assert device.get_state()["highest_priority"] == 3.0


def test_row_without_priority_is_never_drawn():
    _, device = pair("prioritized", 1000, 1, 1, eps=0.0)
    device.push_batch(*step(np.random.default_rng(0), 1000))
    drawn = torch.tensor([3, 500, 999])
    priorities = torch.zeros(1000)
    priorities[drawn] = torch.tensor([1.0, 2.0, 5.0])
    device.update_priorities(torch.arange(1000), priorities)
    assert set(device.sample(500, 0)["indices"].tolist()) == set(drawn.tolist())


@pytest.mark.parametrize(("n_words", "others"), [(70, 0), (0, 1)])
def test_numbers_ahead_are_those_of_the_host(n_words, others):
    ours, host, shape = Rng(3, 6), Rng(3, 6), (2, 7, 3)
    numbers = NumbersAhead(ours, "cpu", n_words, 0x5245504C, shape, (5, 3), others)
    memory = ReplayBuffer(100, 1, 1)
    column = np.arange(100, dtype=np.float32)
    memory.push_batch(column, column, column, column, column < 0, column < 0)
    for i in range(2 * numbers.n_ahead + 3):
        seed = host.integers(2**63)
        if others:
            ours.integers(2**63)
        if i == 5:  # somebody else draws, too
            host.skip(2)
            ours.skip(2)
        expected, uniform = host.normal(shape), host.uniform((5, 3))
        k = numbers.advance()
        assert ours.position == host.position
        if i != 5 or others:
            np.testing.assert_allclose(numbers.normals[k], expected, atol=1e-6)
            np.testing.assert_array_equal(numbers.uniforms[k], uniform)
        if n_words and i != 5:
            rows = (numbers.words[k] * 100 >> 32).float()
            assert np.array_equal(memory.sample(70, seed)["rewards"], rows)


@pytest.mark.parametrize("normalize", [False, True])
def test_a_dataset_on_a_device_gives_the_rows_of_the_host(normalize):
    rng = np.random.default_rng(0)
    obs, next_obs, actions = (rng.normal(3.0, 2.0, (100, d)).astype(np.float32) for d in (3, 3, 2))
    flags = rng.random((2, 100)) < 0.2
    host = OfflineDatasetBuffer(obs, next_obs, actions, obs[:, 0], *flags, normalize=normalize)
    device = DeviceDataset(host, host.normalize if normalize else lambda x: x, "cpu")
    n = 70
    numbers = NumbersAhead(Rng(3), "cpu", n * device.words_per_row, device.domain)
    expected, rows = host.sample(n, Rng(3).integers(2**63)), device.draw(numbers.words[numbers.advance()])
    for name, column in expected.items():
        np.testing.assert_allclose(rows[name], column, rtol=1e-6, atol=1e-6)


def test_packing_keeps_types_shapes_and_values():
    arrays = {"a": np.arange(3, dtype=np.uint8), "b": np.array([[1.5, 2.5]]), "c": np.array([7])}
    for name, tensor in upload(arrays, "cpu").items():
        assert np.array_equal(tensor.numpy(), arrays[name])
        assert tensor.numpy().dtype == arrays[name].dtype
    packing = Packing(arrays)
    assert packing.fits(arrays)
    assert not packing.fits({**arrays, "c": np.array([7.0])})


def make(name, on_device, **arguments):
    """An algorithm whose memory is on a device if `on_device`, and whose updates are then captured."""
    cls, env_id = ALGORITHMS[name]
    settings = {"hidden_sizes": [16, 16], "batch_size": 16, "learning_starts": 40, "seed": 3, **arguments}
    algorithm = cls(env_id, backend="torch", **settings)
    if on_device:
        config, spec = algorithm._memory.config, algorithm.spec
        sizes = {"obs_dim": spec.obs_dim, "act_dim": spec.act_dim or 1, **config.arguments()}
        if spec.masked:
            sizes["mask_dim"] = spec.n_actions
        if algorithm.collector.stores_masks:
            sizes["act_dim"] += spec.n_actions
        if config.n_step > 1:
            sizes |= {"n_step": config.n_step, "gamma": algorithm.config.gamma, "n_envs": algorithm.n_envs}
        memory = KINDS[config.name][1](device="cpu", **sizes)
        algorithm._memory._create = lambda: memory
    algorithm.backend.captures = on_device
    return algorithm


SETTINGS = [
    ("sac", {}),
    ("sac", {"buffer": "prioritized", "n_envs": 2, "n_step": 2, "learning_rate_schedule": "linear"}),
    ("td3", {"gradient_steps": 2}),
    ("td3", {"buffer": "prioritized", "policy_delay": 3}),
    ("dqn", {"target_update_freq": 20, "train_freq": 4}),
    ("dqn", {"target_update_freq": 20, "buffer": "prioritized", "n_step": 3}),
    ("masked", {"target_update_freq": 20, "train_freq": 4}),
    ("masked", {"target_update_freq": 20, "buffer": "prioritized", "n_step": 3, "n_envs": 2}),
    ("discrete", {"policy_delay": 2, "learning_rate_schedule": "linear"}),
    ("legal", {"buffer": "prioritized", "n_step": 3, "n_envs": 2}),
]


@pytest.mark.parametrize(("name", "settings"), SETTINGS)
def test_captured_updates_are_those_of_the_host(name, settings):
    plain, captured = make(name, False, **settings), make(name, True, **settings)
    metrics, ours = plain.train(120), captured.train(120)
    torch.testing.assert_close(captured.optimizer.flat, plain.optimizer.flat, rtol=0, atol=1e-6)
    assert captured.rng.get_state() == plain.rng.get_state()
    assert set(metrics) == set(ours)
    for key, value in metrics.items():
        if not key.startswith("time/"):
            assert ours[key] == pytest.approx(value, rel=1e-4, nan_ok=True), key


@pytest.mark.parametrize(("name", "settings"), SETTINGS)
def test_resumes_bit_for_bit_with_a_memory_on_the_device(name, settings, tmp_path):
    whole = make(name, True, **settings)
    whole.train(120)
    whole.save(tmp_path / "a.safetensors", memory=True)
    whole.train(80)
    cls, env_id = ALGORITHMS[name]
    resumed = cls.from_checkpoint(tmp_path / "a.safetensors", env_id=env_id, backend="torch")
    on_device = make(name, True, **settings)
    resumed._memory._create = on_device._memory._create
    resumed.backend.captures = True
    resumed.train(80)
    assert isinstance(resumed.buffer, DeviceReplayBuffer)
    assert torch.equal(resumed.optimizer.flat, whole.optimizer.flat)
    require_same_state(resumed.buffer.get_state(), whole.buffer.get_state())


def test_memory_of_the_device_continues_on_the_host(tmp_path):
    ours = make("sac", True)
    ours.train(120)
    ours.save(tmp_path / "a.safetensors", memory=True)
    host = rlox.SAC.from_checkpoint(tmp_path / "a.safetensors", backend="torch")
    ours.train(80)
    host.train(80)
    assert type(host.buffer) is ReplayBuffer
    torch.testing.assert_close(ours.optimizer.flat, host.optimizer.flat, rtol=0, atol=1e-6)


@pytest.mark.parametrize("most", [500_000, 0])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_kernel_or_graph_acts_as_the_policy(name, most, monkeypatch):
    monkeypatch.setattr(acting, "MOST_WORK", most)
    monkeypatch.setattr(off_policy, "find_update_difference", lambda *objects, files=True: None)
    monkeypatch.setattr(acting, "find_update_difference", lambda *objects, files=True: None)
    plain, ours = make(name, False), make(name, False)
    ours._follower, ours._graphed_policy = acting.choose_actor(ours)
    ours._explore()
    by_kernel = most > 0 and name not in ("discrete", "legal")  # whose policy no kernel computes
    assert isinstance(ours.actor, GraphedPolicy) == (not by_kernel)
    assert ("a kernel on the CPU acts" in ours.backend_reason) == by_kernel
    plain.train(100)
    ours.train(100)
    torch.testing.assert_close(ours.optimizer.flat, plain.optimizer.flat, rtol=0, atol=1e-6)
    np.testing.assert_allclose(
        ours.evaluate(2, deterministic=False).returns, plain.evaluate(2, deterministic=False).returns, rtol=1e-4
    )
    with torch.no_grad():
        ours.optimizer.flat.zero_()
    obs = np.ones((2, ours.spec.obs_dim), np.float32)
    np.testing.assert_array_equal(ours.predict(obs), make_zero(plain).predict(obs))


def make_zero(algorithm):
    with torch.no_grad():
        algorithm.optimizer.flat.zero_()
    return algorithm


def test_memory_on_a_gpu_needs_a_learner_there():
    with pytest.raises(ValueError, match=r"buffer.device must be auto or cpu here, got cuda: the learner runs"):
        rlox.SAC("Pendulum-v1", buffer={"device": "cuda"})
    with pytest.raises(ValueError, match="device must be one of auto, cpu, cuda"):
        rlox.SAC("Pendulum-v1", buffer={"device": "tpu"})
