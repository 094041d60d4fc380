"""When environments restart and the memory is kept, no n-step return and no exported episode crosses that point."""

import numpy as np
import probes
import pytest
from outside_buffer import NewestBuffer

import rlox
from rlox.algorithms import DQN, SAC
from rlox.buffers.table import Entry
from rlox.kernels.buffers.replay import ReplayBuffer
from rlox.offline.collect import write_replay

ENV = lambda: probes.Countdown(1000)  # noqa: E731  (the observation is the number of steps)
SMALL = {"n_envs": 2, "seed": 0, "hidden_sizes": [8], "batch_size": 8, "learning_starts": 4, "gamma": 0.5}
MEMORIES = {
    "uniform": {"name": "uniform", "size": 300, "n_step": 3},
    "prioritized": {"name": "prioritized", "size": 300, "n_step": 3},
    "mmap": {"name": "mmap", "size": 300, "hot_size": 20, "n_step": 3},
}
BOTH = pytest.mark.parametrize("backend", ["torch", "native"])


def made(memory, backend="native", **more):
    return DQN(ENV, buffer=MEMORIES[memory], backend=backend, **SMALL, **more)


def restored(path, dqn, **more):
    return DQN.from_checkpoint(path, env_id=ENV, backend=dqn.backend, **more)


def require_uncrossed(algorithm, seams=1):
    """Check 2,000 draws: the last observation is as many steps ahead as the discount says."""
    batch = algorithm.buffer.sample(2000, 3)
    steps = -np.log2(batch["discounts"])  # gamma is 1/2
    assert (steps == 3).mean() > 0.8
    np.testing.assert_array_equal(batch["next_obs"][:, 0] - batch["obs"][:, 0], steps)
    assert len(algorithm.buffer.seams) == seams


@BOTH
@pytest.mark.parametrize("memory", MEMORIES)
def test_after_a_resume(memory, backend, tmp_path):
    """After the second resume, the saved memory contains the seam of the first."""
    path = tmp_path / "run" / "checkpoints" / "a.safetensors"
    folder = {"folder": str(tmp_path)} if memory == "mmap" else {}
    dqn = DQN(ENV, buffer={**MEMORIES[memory], **folder}, backend=backend, **SMALL)
    for n in (1, 2):
        dqn.train(60)
        dqn.save(path, memory=True)
        dqn.close()
        more = {"buffer": rlox.buffers.buffer_config({**MEMORIES[memory], **folder})} if folder else {}
        dqn = restored(path, dqn, **more)
        assert len(dqn.buffer) == 60 * n
        dqn.train(40)
        require_uncrossed(dqn, n)
        dqn.close()
        dqn = restored(path, dqn, **more)


@pytest.mark.parametrize("memory", MEMORIES)
def test_after_load_buffer(memory, tmp_path):
    dqn = made(memory)
    dqn.train(60)
    dqn.save(tmp_path / "a.safetensors")
    dqn.save_buffer(tmp_path / "a.memory")
    dqn.train(20)
    dqn.load_buffer(tmp_path / "a.memory")  # the environments are 20 steps ahead
    dqn.train(40)
    require_uncrossed(dqn)
    fresh = restored(tmp_path / "a.safetensors", dqn)
    fresh.load_buffer(tmp_path / "a.memory")
    fresh.train(40)
    require_uncrossed(fresh)
    for algorithm in (dqn, fresh):
        algorithm.close()


def test_no_seam_if_the_environments_continue(tmp_path):
    dqn = DQN("CartPole-v1", buffer=MEMORIES["uniform"], **SMALL)
    dqn.train(60)
    dqn.save(tmp_path / "a.safetensors", memory=True)
    dqn.save_buffer(tmp_path / "a.memory")
    dqn.load_buffer(tmp_path / "a.memory")
    one, other = (DQN.from_checkpoint(tmp_path / "a.safetensors") for _ in range(2))
    other.load_buffer(tmp_path / "a.memory")
    for algorithm in (dqn, one, other):
        algorithm.train(60)
        assert algorithm.buffer.seams.tolist() == []
        np.testing.assert_equal(algorithm.buffer.get_state(), dqn.buffer.get_state())
    elsewhere = DQN.from_checkpoint(tmp_path / "a.safetensors", env_id="CartPole-v1", env_backend="gymnasium")
    elsewhere.train(10)
    assert elsewhere.buffer.seams.tolist() == [60]


@BOTH
def test_a_custom_memory_that_two_collectors_fill(backend):
    memory = ReplayBuffer(300, 1, 1, n_step=3, gamma=0.5, n_envs=2)
    one, other = (DQN(ENV, buffer=memory, backend=backend, **SMALL) for _ in range(2))
    one.train(40)
    other.train(60)
    assert memory.seams.tolist() == [40]
    one.train(40)
    assert memory.seams.tolist() == [40, 100]
    require_uncrossed(one, 2)
    memory.set_state(memory.get_state())
    one.train(10)
    assert memory.seams.tolist() == [40, 100]  # no seam was added


def test_native_environments_in_fused_rounds():
    """In fused rounds the kernel pushes: restoring a state of the environments adds a seam there too."""
    dqn = DQN("CartPole-v1", buffer=MEMORIES["uniform"], **SMALL)
    dqn.train(40)
    assert dqn._can_run_rounds()
    before = dqn.collector.state()
    dqn.train(20)
    dqn.collector.set_state(before)
    dqn.train(20)
    assert dqn.buffer.seams.tolist() == [60]
    batch = dqn.buffer.gather(np.arange(54, 60))
    assert (np.asarray(batch["discounts"]) > 0.5**3).sum() >= 4


class NStep(NewestBuffer):
    """A memory of n-step returns that records its length at each cut."""

    def cut(self):
        self.cuts = [*getattr(self, "cuts", ()), len(self)]


def test_an_external_memory_with_n_step_returns_must_implement_cut():
    buffer = {"name": "outside-n-step", "size": 300, "n_step": 3}
    rlox.buffers.BUFFERS["outside-n-step"] = Entry(NewestBuffer, None)
    try:
        with pytest.raises(ValueError, match=r"n_step must be 1 with outside-n-step, got 3.* or it would define cut"):
            DQN(ENV, buffer=buffer, **SMALL).train(40)
        rlox.buffers.BUFFERS["outside-n-step"] = Entry(NStep, None)
        dqn = DQN(ENV, buffer=buffer, **SMALL)
        dqn.train(40)
    finally:
        del rlox.buffers.BUFFERS["outside-n-step"]
    dqn.collector.forget_buffer()
    dqn.train(10)
    dqn.train(10)
    assert dqn.buffer.cuts == [0, 40]
    other = NewestBuffer(300, dqn.spec.obs_dim, 1)
    dqn.collector.step(None, other, random=True)
    dqn.collector.forget_buffer()
    with pytest.raises(TypeError, match=r"must define cut\(\) in case environments restart, NewestBuffer does not"):
        dqn.collector.step(None, other, random=True)


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("at_once", [1000, 1])
def test_an_exported_episode_ends_at_a_seam(at_once, marked, tmp_path, monkeypatch):
    """Unmarked: as in a memory that rlox 0.6.0 wrote and a resumed run continued to fill. Each block of rows may have
    just one of each environment, as for images."""
    monkeypatch.setattr("rlox.offline.collect.block_rows", lambda row_bytes: at_once)
    dqn = DQN(ENV, buffer={"name": "uniform", "size": 300}, **SMALL)
    dqn.train(60)
    dqn.save(tmp_path / "a.safetensors", memory=True)
    dqn = restored(tmp_path / "a.safetensors", dqn)
    dqn.train(40)
    if not marked:
        state = dqn.buffer.get_state()
        del state["seams"]
        dqn.buffer.set_state(state)
    dqn.env_id = "Countdown"
    metadata = write_replay(dqn, tmp_path / "a.arrow", {})
    data = rlox.open_dataset(tmp_path / "a.arrow")
    state = data.get_state()
    assert metadata["n_cut_episodes"] == 4
    assert np.flatnonzero(state["truncated"]).tolist() == [29, 59, 79, 99]
    on = ~state["truncated"].astype(bool)[:-1]
    np.testing.assert_array_equal(state["next_obs"][:-1][on], state["obs"][1:][on])
    assert sorted(state["obs"][:, 0].tolist()) == sorted([*range(30), *range(20)] * 2)


def test_sac_after_a_resume(tmp_path):
    """A gymnasium environment whose state cannot be restored."""
    small = {key: value for key, value in SMALL.items() if key != "gamma"}
    make = lambda: probes.Levers()  # noqa: E731
    sac = SAC(make, buffer={**MEMORIES["uniform"]}, **small)
    sac.train(40)
    sac.save(tmp_path / "a.safetensors", memory=True)
    again = SAC.from_checkpoint(tmp_path / "a.safetensors", env_id=make)
    again.train(20)
    assert again.buffer.seams.tolist() == [40]
