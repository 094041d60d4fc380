"""The replay memories: built-in ones, registered ones, and how `buffer=` and the command line select them."""

import json
import sys
from pathlib import Path

import forked
import numpy as np
import outside_buffer
import pytest
from outside_buffer import NewestBuffer, NewestConfig

from rlox.algorithms import DQN
from rlox.buffers import (
    BUFFERS,
    Buffer,
    buffer_class,
    buffer_config,
    buffer_config_class,
    buffer_names,
    register_buffer,
)
from rlox.config import BufferConfig, MmapBufferConfig, OutsideBufferConfig, PrioritizedBufferConfig
from rlox.config.offers import offers
from rlox_cli.config.compose import compose_jobs
from rlox_cli.terminal.errors import UsageError

SMALL = {"hidden_sizes": [8], "batch_size": 16, "learning_starts": 20, "train_freq": 4}


@pytest.fixture
def registered(monkeypatch):
    """`register_buffer` with a copy of the table, restored after the test."""
    monkeypatch.setattr("rlox.buffers.table.BUFFERS", dict(BUFFERS))
    return register_buffer


@pytest.mark.parametrize("name", [name for name in BUFFERS if buffer_config_class(name).holds == "transitions"])
def test_each_built_in_buffer_exists_and_trains(name, tmp_path):
    assert buffer_config_class(name)().name == name
    dqn = DQN("CartPole-v1", buffer={"name": name, "size": 10_000}, **SMALL)
    assert isinstance(dqn.buffer, Buffer)
    assert isinstance(dqn.buffer, buffer_class(name))
    dqn.train(100)
    assert len(dqn.buffer) == 100
    assert dqn.counters.updates == 21
    dqn.save(tmp_path / "a.safetensors")
    dqn.save_buffer(tmp_path / "a.memory")
    again = DQN.from_checkpoint(tmp_path / "a.safetensors")
    assert again._memory.config == dqn._memory.config
    again.load_buffer(tmp_path / "a.memory")
    ours, theirs = dqn.sample(), again.sample()
    assert np.array_equal(ours.obs, theirs.obs)
    assert dqn.train(100)["q_loss"] == again.train(100)["q_loss"]
    dqn.close()
    again.close()


def test_the_file_of_a_mapped_memory_is_removed_with_it(tmp_path):
    settings = {"name": "mmap", "size": 20_000, "hot_size": 200}
    for folder in (tmp_path, None):
        dqn = DQN("CartPole-v1", buffer={**settings, "folder": folder and str(folder)}, **SMALL)
        dqn.train(400)
        where = tmp_path if folder else Path(dqn._memory._folder.name)
        assert len(list(where.glob("replay-*.cold"))) == 1
        dqn.save(tmp_path / "a.safetensors")
        dqn.close()
        assert not list(where.glob("replay-*.cold"))
        assert DQN.from_checkpoint(tmp_path / "a.safetensors")._memory.config.folder is None
    assert not where.exists()


def test_a_configuration_has_many_forms():
    big = BufferConfig(size=7)
    assert buffer_config() == BufferConfig()
    assert buffer_config({"size": 7}) == buffer_config(size=7) == buffer_config(big) == big
    assert buffer_config(big, size=8).size == 8
    prioritized = PrioritizedBufferConfig(size=7, n_step=2, alpha=0.5)
    assert buffer_config({"name": "prioritized", "alpha": 0.5}, size=7, n_step=2) == prioritized
    assert buffer_config(prioritized.to_dict()) == buffer_config(prioritized) == prioritized
    assert buffer_config(None, True) == buffer_config("prioritized") == buffer_config("prioritized", True)
    assert buffer_config(None, False) == BufferConfig()
    for buffer, prioritized in (("uniform", True), ("mmap", True), (PrioritizedBufferConfig(), False)):
        with pytest.raises(ValueError, match="prioritized must fit the name"):
            buffer_config(buffer, prioritized)
    with pytest.raises(ValueError, match="name must be known, got 'prioritised'; did you mean 'prioritized'"):
        buffer_config("prioritised")
    with pytest.raises(TypeError, match="unknown hyper-parameter 'alpha'"):
        buffer_config("uniform", alpha=0.5)
    with pytest.raises(
        TypeError, match=r"must be a name, a BufferConfig, a mapping or a rlox\.buffers\.Buffer, got list"
    ):
        DQN("CartPole-v1", buffer=[1])


@pytest.mark.parametrize(
    ("cls", "wrong"),
    [
        (BufferConfig, {"size": 0}),
        (BufferConfig, {"n_step": 0}),
        (BufferConfig, {"n_step": 5, "size": 4}),
        (BufferConfig, {"name": ""}),
        (PrioritizedBufferConfig, {"alpha": -0.1}),
        (PrioritizedBufferConfig, {"beta": 1.5}),
        (MmapBufferConfig, {"hot_size": 0}),
        (MmapBufferConfig, {"hot_size": 20, "size": 10}),
        (PrioritizedBufferConfig, {"eps": -1e-9}),
        (PrioritizedBufferConfig, {"eps": float("nan")}),
        (PrioritizedBufferConfig, {"eps": float("inf")}),
        (PrioritizedBufferConfig, {"weight_norm": "max"}),
    ],
)
def test_rules(cls, wrong):
    with pytest.raises(ValueError, match="must "):
        cls(**wrong)


def test_the_default_hot_size_is_limited_by_size(tmp_path):
    assert MmapBufferConfig().n_hot == MmapBufferConfig(size=20_000).n_hot == 10_000
    assert MmapBufferConfig(size=4000).n_hot == 4000
    (job,) = compose_jobs([], ["algo=dqn", "buffer=mmap", "buffer.size=4000"])
    assert job.config.buffer.n_hot == 4000
    dqn = DQN("CartPole-v1", buffer={"name": "mmap", "size": 4000, "folder": str(tmp_path)}, **SMALL)
    dqn.train(60)
    assert (dqn.buffer.hot_capacity, dqn.buffer.total_capacity) == (4000, 4000)
    dqn.save(tmp_path / "a.safetensors")
    dqn.close()
    again = DQN.from_checkpoint(tmp_path / "a.safetensors")
    assert (again._memory.config.size, again._memory.config.hot_size) == (4000, None)
    # Checkpoints of rlox 0.6.0 contain the number instead of None.
    saved = {**again._own_state()[0]["buffer"], "hot_size": 4000}
    assert again._memory._is_same(saved)
    assert not again._memory._is_same({**saved, "hot_size": 3000})


def test_the_short_forms_of_the_library():
    dqn = DQN("CartPole-v1", buffer_size=500, n_step=3, prioritized=True)
    assert dqn._memory.config == PrioritizedBufferConfig(size=500, n_step=3)
    with pytest.raises(ValueError, match="must not be given together with a buffer object"):
        DQN("CartPole-v1", buffer=NewestBuffer(500, 4, 1), n_step=3)


class NStepBuffer(NewestBuffer):
    """Says that it computes n-step returns."""

    def cut(self):
        raise AssertionError("no environment starts anew here")


def test_a_registered_class_receives_the_fields_of_its_configuration(registered):
    registered("newest", NStepBuffer, NewestConfig)
    dqn = DQN("CartPole-v1", n_envs=2, buffer={"name": "newest", "size": 600, "window": 50, "n_step": 2}, **SMALL)
    assert dqn.buffer.window == 50
    assert dqn.buffer.given == {"obs_dim": 4, "act_dim": 1, "n_step": 2, "gamma": 0.99, "n_envs": 2}
    registered("free", "outside_buffer:NewestBuffer")
    free = DQN("CartPole-v1", buffer={"name": "free", "kwargs": {"window": 7, "mood": "good"}}, **SMALL)
    assert isinstance(free._memory.config, OutsideBufferConfig)
    assert (free.buffer.window, free.buffer.capacity) == (7, 1_000_000)
    assert free.buffer.given == {"obs_dim": 4, "act_dim": 1, "mood": "good"}
    metrics = free.train(60)
    assert np.isfinite(metrics["q_loss"])


def test_n_step_returns_need_a_memory_that_computes_them(registered):
    registered("plain", NewestBuffer)
    settings = {"name": "plain", "kwargs": {"window": 7}}
    assert np.isfinite(DQN("CartPole-v1", buffer=settings, **SMALL).train(60)["q_loss"])
    with pytest.raises(ValueError, match="buffer: n_step must be 1 with plain, got 3: it computes no n-step returns"):
        DQN("CartPole-v1", buffer={**settings, "n_step": 3}, **SMALL).train(60)


def test_an_object_is_a_memory_too(tmp_path):
    dqn = DQN("CartPole-v1", buffer=NewestBuffer(500, 4, 1), **SMALL)
    dqn.train(60)
    dqn.save(tmp_path / "a.safetensors")
    again = DQN.from_checkpoint(tmp_path / "a.safetensors")
    assert again.evaluate(2).returns.min() > 0
    with pytest.raises(ValueError, match=r"trained with the buffer NewestBuffer.*pass from_checkpoint\(buffer="):
        again.train(1)
    DQN.from_checkpoint(tmp_path / "a.safetensors", buffer=NewestBuffer(500, 4, 1)).train(1)


def test_errors_of_registration(registered):
    with pytest.raises(ValueError, match="name must consist of letters"):
        registered("a/b", NewestBuffer)
    with pytest.raises(ValueError, match="name must be new, but 'uniform' is"):
        registered("uniform", NewestBuffer)
    registered("newest", NewestBuffer)
    registered("newest", NewestBuffer)  # as when a module is imported twice
    with pytest.raises(TypeError, match="cls must be a class or 'module:Class', got 'newest'"):
        registered("other", "newest")
    registered("odd", NewestBuffer, dict)
    with pytest.raises(TypeError, match=r"must be .*derived from rlox\.config\.BufferConfig"):
        buffer_config("odd")

    class Half:
        def __init__(self, **given):
            pass

        def push_batch(self, *columns):
            pass

    registered("half", Half)
    with pytest.raises(TypeError, match="must define sample, __len__, get_state, set_state"):
        _ = DQN("CartPole-v1", buffer="half").buffer


def test_an_installed_package_is_imported_when_its_buffer_is_used(tmp_path, monkeypatch, request):
    (tmp_path / "their_buffers.py").write_text("from outside_buffer import NewestBuffer as Theirs\n")
    info = tmp_path / "their_buffers-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-buffers\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rlox.buffers]\ntheirs = their_buffers:Theirs\nbroken = their_buffers:No\n")
    monkeypatch.syspath_prepend(tmp_path)
    offers.cache_clear()
    request.addfinalizer(offers.cache_clear)
    assert buffer_names() == [*BUFFERS, "broken", "theirs"]
    assert "their_buffers" not in sys.modules
    (job,) = compose_jobs([], ["algo=dqn", "buffer=theirs", "buffer.size=200", "++buffer.kwargs.window=9"])
    dqn = DQN("CartPole-v1", buffer=job.config.buffer, **SMALL)
    assert (dqn.buffer.window, dqn.buffer.capacity) == (9, 200)
    assert type(dqn.buffer) is outside_buffer.NewestBuffer
    with pytest.raises(ImportError, match=r"rlox.buffers: broken \(their_buffers:No\) failed with AttributeError"):
        DQN("CartPole-v1", buffer="broken")


# The command line


@pytest.mark.parametrize("name", [name for name in BUFFERS if buffer_config_class(name).holds == "transitions"])
def test_every_buffer_composes(name):
    (job,) = compose_jobs([], ["algo=dqn", f"buffer={name}", "buffer.size=20_000"])
    assert job.config.buffer == buffer_config_class(name)(size=20_000)
    assert job.config.env.n_envs == 1


@pytest.mark.slow
def test_a_registered_buffer_composes_with_its_own_keys(registered):
    registered("newest", NewestBuffer, NewestConfig)
    jobs = compose_jobs(["-m"], ["algo=dqn", "buffer=newest,uniform", "buffer.size=300"])
    assert [job.config.buffer for job in jobs] == [NewestConfig("newest", 300), BufferConfig(size=300)]
    (job,) = compose_jobs([], ["algo=dqn", "buffer=newest", "buffer.window=5"])
    assert job.config.buffer.window == 5
    with pytest.raises(UsageError, match=r"buffer\.window must be >= 1, got 0"):
        compose_jobs([], ["algo=dqn", "buffer=newest", "buffer.window=0"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["buffer=uniform"], "buffer must be left out with algo=ppo, got uniform; on-policy algorithms have none"),
        (["algo=a2c", "buffer.size=5"], r"buffer\.size needs a replay memory; on-policy algorithms have none"),
        (["algo=a2c", "++buffer.kwargs.a=5"], "buffer must be left out with algo=a2c, got its keys"),
        (["algo=dqn", "~buffer"], "~buffer must not delete a key"),
        (["algo=dqn", "buffer=prioritised"], "buffer=prioritised does not exist; did you mean 'prioritized'"),
        (["algo=dqn", "buffer=prioritized", "buffer.alpha=2"], r"buffer\.alpha must be in \[0, 1\], got 2"),
        (["algo=dqn", "buffer=prioritized", "buffer.eps=-1"], r"buffer\.eps must be >= 0 and finite, got -1"),
        (["algo=dqn", "buffer=prioritized", "buffer.weight_norm=max"], r"buffer\.weight_norm must be one of batch"),
        (["algo=dqn", "buffer=prioritized", "buffer.alfa=1"], "buffer.alfa is no key of .*; did you mean 'alpha'"),
        (["algo=dqn", "buffer.name=mmap"], r"buffer\.name must be uniform, as buffer= chose, got 'mmap'"),
        (["algo=dqn", "buffer.size=30"], r"buffer\.size must be at least .* \(64\), got 30"),
        (
            ["algo=dqn", "total_timesteps=900"],
            r"algo\.learning_starts must be below total_timesteps \(900\), .* got 1000",
        ),
        (["algo=dqn", "++buffer.kwargs.a=5"], r"buffer\.kwargs is no key of BufferConfig"),
        (["algo=dqn", "algo.n_step=3"], r"algo\.n_step is no key of DQNConfig; did you mean buffer\.n_step"),
        (["algo=dqn", "n_step=3"], r"n_step is no key of RunConfig; did you mean buffer\.n_step"),
    ],
)
def test_errors_of_typed_buffer_settings(typed, message):
    with pytest.raises(UsageError, match=message):
        compose_jobs([], typed)


def test_an_experiment_may_choose_the_memory(tmp_path):
    (tmp_path / "experiment").mkdir()
    lines = [
        "# @package _global_",
        "# Mine.",
        "defaults:",
        "  - override /algo: dqn",
        "  - override /buffer: prioritized",
    ]
    (tmp_path / "experiment" / "mine.yaml").write_text("\n".join([*lines, "  - _self_", "buffer: {alpha: 0.7}\n"]))
    (job,) = compose_jobs(["-cd", str(tmp_path)], ["experiment=mine", "tuned=off"])
    assert job.config.buffer == PrioritizedBufferConfig(alpha=0.7)


@pytest.mark.slow
def test_settings_that_dqn_cannot_use_are_rejected_before_anything_is_written(tmp_path):
    for typed, message in (
        (
            ["env=Pendulum-v1"],
            "actions must be discrete, got 1 action component; continuous actions are for A2C, APPO, DREAMER, IMPALA, "
            "MAPPO, PPO",
        ),
        (["buffer.size=63"], "buffer.size must be at least algo.batch_size and env.n_envs (64), got 63"),
    ):
        done = forked.run("train", "algo=dqn", *typed, "logger=none", cwd=tmp_path)
        assert done.returncode != 0
        assert message in " ".join(done.stderr.split())
        assert not list(tmp_path.rglob("*.jsonl"))


@pytest.mark.slow
@pytest.mark.parametrize("kept", [True, False])
def test_dqn_from_the_command_line(kept, tmp_path):
    small = ["total_timesteps=1500", "eval.n_points=1", "eval.n_episodes=3", "logger=none", "algo.train_freq=100"]
    memory = ["buffer=mmap", "buffer.size=20_000", "buffer.hot_size=500", f"checkpoint.memory={str(kept).lower()}"]
    done = forked.run("train", "algo=dqn", *memory, *small, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "tuned settings: dqn/CartPole-v1" in done.stdout
    (run,) = (path.parent for path in tmp_path.rglob("metrics.jsonl"))
    assert len(list(run.glob("*.cold"))) == kept  # which the checkpoint relies on
    if kept:
        again = DQN.from_checkpoint(run / "checkpoints/last.safetensors")
        assert len(again.buffer) == 1500
        again.close()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if "exploration/epsilon" in row]
    assert steps == list(range(100, 1501, 100))
    assert all(("loss/q" in row) is (row["step"] >= 1000) for row in rows if "exploration/epsilon" in row)
    done = forked.run("eval", run, cwd=tmp_path)
    assert "reproduced exactly" in done.stdout
