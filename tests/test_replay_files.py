"""The replay memory next to the checkpoint: complete after any series of saves, each of which writes little."""

import json
import warnings
from itertools import pairwise

import forked
import numpy as np
import pytest
from outside_buffer import NewestBuffer

from rlox import DQN, TD3, MmapReplayBuffer, PrioritizedReplayBuffer, ReplayBuffer, SequenceReplayBuffer
from rlox.buffers.files import ReplayFiles, load
from rlox.checkpoint import load_checkpoint, save_checkpoint

CAPACITY = 40
MAKERS = {
    "uniform": lambda folder: ReplayBuffer(CAPACITY, 3, 1),
    "n-step": lambda folder: ReplayBuffer(CAPACITY, 3, 1, n_step=3, gamma=0.9, n_envs=1),
    "prioritized": lambda folder: PrioritizedReplayBuffer(CAPACITY, 3, 1),
    "stacks": lambda folder: ReplayBuffer(
        CAPACITY, 4 * 6, 1, obs_shape=(4, 2, 3), obs_dtype=np.uint8, n_stacked=4, n_envs=1
    ),
    "mmap": lambda folder: MmapReplayBuffer(10, CAPACITY, 3, 1, folder),
}


def push(buffer, n, rng, start):
    """n transitions, one at a time, in episodes of seven steps."""
    for i in range(start, start + n):
        end = i % 7 == 6
        if getattr(buffer, "frame_slots", 0):
            frames = np.arange(i - 3, i + 2).clip(i - i % 7) % 251
            stack = np.repeat(frames, 6).astype(np.uint8).reshape(1, 5, 2, 3)
            obs, after = stack[:, :4], stack[:, 1:]
        else:
            obs, after = np.full((1, 3), i, np.float32), np.full((1, 3), i + 1, np.float32)
        buffer.push_batch(obs, after, rng.normal(size=(1, 1)).astype(np.float32), [float(i)], [end], [False])
    if isinstance(buffer, PrioritizedReplayBuffer) and len(buffer):
        batch = buffer.sample(8, start)
        buffer.update_priorities(batch["indices"], rng.random(8) + 0.1)


def equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        if not name.startswith("cold"):
            np.testing.assert_array_equal(a[name], b[name], err_msg=name)


@pytest.mark.parametrize("kind", MAKERS)
def test_a_series_of_saves_restores_the_memory(kind, tmp_path):
    rng = np.random.default_rng(0)
    buffer, files, start = MAKERS[kind](tmp_path / "here"), ReplayFiles(tmp_path / "memory"), 0
    # No new rows, a few, more than fit, an empty memory again, and more saves than the limit of files.
    for n in [0, 5, 0, 20, 30, 100, "clear", 0, 3, *[1] * 40]:
        if n == "clear":
            if kind == "mmap":
                continue
            buffer.clear()
        else:
            push(buffer, n, rng, start)
            start += n
        taken = files.take(buffer)
        entry, arrays = taken.write()
        taken.remove_unneeded()
        entry = json.loads(json.dumps(entry))
        expected, sample = buffer.get_state(), buffer.sample(16, 1) if len(buffer) else {}
        if kind == "mmap":
            buffer.close()  # its file may have only one owner
        found = MAKERS[kind](tmp_path / f"there-{start}-{n}")
        load(found, tmp_path / "memory", entry, arrays)
        equal(found.get_state(), expected)
        equal(found.sample(16, 1) if len(found) else {}, sample)
        if kind == "mmap":
            buffer = found
    assert len(list((tmp_path / "memory").glob("*"))) <= 32


def test_a_save_writes_new_rows_and_keeps_files_of_the_last_checkpoint(tmp_path):
    buffer, files, rng = ReplayBuffer(1000, 3, 1), ReplayFiles(tmp_path), np.random.default_rng(0)
    push(buffer, 500, rng, 0)
    taken = files.take(buffer)
    before, arrays = taken.write()
    taken.remove_unneeded()
    sizes = {path.name: path.stat().st_size for path in tmp_path.glob("*")}
    push(buffer, 10, rng, 500)
    after, _ = files.take(buffer).write()
    (new,) = {path.name: path.stat().st_size for path in tmp_path.glob("*")}.keys() - sizes.keys()
    assert (tmp_path / new).stat().st_size < 0.2 * max(sizes.values())
    assert len(after["files"]) == 2
    # After a kill at this point, the previous checkpoint is on disk and finds its files.
    found = ReplayBuffer(1000, 3, 1)
    load(found, tmp_path, before, arrays)
    assert len(found) == 500


def test_no_files_of_other_folders_are_loaded(tmp_path):
    buffer, files = ReplayBuffer(1000, 3, 1), ReplayFiles(tmp_path / "elsewhere")
    push(buffer, 5, np.random.default_rng(0), 0)
    entry, arrays = files.take(buffer).write()
    entry["files"][0]["name"] = str(tmp_path / "elsewhere" / entry["files"][0]["name"])
    with pytest.raises(FileNotFoundError, match="memory"):
        load(ReplayBuffer(1000, 3, 1), tmp_path / "memory", entry, arrays)


def made(kind, folder):
    folder.mkdir(exist_ok=True)
    buffer = {"name": kind, "size": 200, **({"hot_size": 50, "folder": str(folder)} if kind == "mmap" else {})}
    sizes = {"hidden_sizes": [8], "batch_size": 8, "learning_starts": 20, "target_update_freq": 50}
    return DQN("CartPole-v1", 2, 0, buffer=buffer, **sizes)


@pytest.mark.parametrize("kind", ["uniform", "prioritized", "mmap"])
def test_training_continues_with_the_memory_it_had(kind, tmp_path):
    path = tmp_path / "run/checkpoints/last.safetensors"
    whole, first = made(kind, tmp_path / "whole"), made(kind, tmp_path / "run")
    for one in (whole, first):
        one.train(300)
    first.save(path, memory=True)
    first.close()
    again = DQN.from_checkpoint(path)
    assert len(again.buffer) == 200
    for one in (whole, again):
        one.train(100)
    equal(again.buffer.get_state(), whole.buffer.get_state())
    for a, b in zip(again.policy.parameters(), whole.policy.parameters(), strict=True):
        np.testing.assert_array_equal(a.detach().numpy(), b.detach().numpy())
    for one in (whole, again):
        one.close()


def test_missing_or_damaged_files_are_named(tmp_path):
    path = tmp_path / "last.safetensors"
    one = made("uniform", tmp_path)
    one.train(100)
    one.save(path, memory=True)
    (file,) = (tmp_path / "memory").glob("*")
    whole = file.read_bytes()
    file.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    with pytest.raises(ValueError, match=f"{file.name} is damaged"):
        DQN.from_checkpoint(path).train(50)
    file.unlink()
    with pytest.warns(RuntimeWarning, match=f"starts empty, because there is no .*{file.name}"):
        again = DQN.from_checkpoint(path)
    assert len(again.buffer) == 0
    assert again._memory.start == 100


@pytest.mark.slow
@pytest.mark.parametrize("kept", [True, False])
def test_the_command_line_saves_it_next_to_the_checkpoint(kept, tmp_path):
    small = ["total_timesteps=200", "eval.n_points=1", "eval.n_episodes=1", "logger=none", "tuned=off"]
    choice = [f"checkpoint.memory={str(kept).lower()}", "hydra.run.dir=run"]
    done = forked.run("train", "algo=dqn", "algo.learning_starts=50", *small, *choice, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(DQN.from_checkpoint(tmp_path / "run/checkpoints/last.safetensors").buffer) == (200 if kept else 0)
    assert (tmp_path / "run/checkpoints/memory").is_dir() is kept


def test_a_memory_of_another_kind_starts_empty_with_a_warning(tmp_path):
    options = {"learning_starts": 8, "batch_size": 8, "hidden_sizes": [8]}
    dqn = DQN("CartPole-v1", **options)
    dqn.train(64)
    dqn.save(tmp_path / "last.safetensors", memory=True)
    for other, named in (
        ({"buffer": "prioritized"}, "name=prioritized not uniform"),
        ({"n_step": 3}, "n_step=3 not 1"),
        ({"buffer_size": 60}, "size=60 not 1000000"),
    ):
        with pytest.warns(RuntimeWarning, match=f"the replay memory starts empty, .*{named}"):
            assert len(DQN.from_checkpoint(tmp_path / "last.safetensors", **other).buffer) == 0


def test_a_memory_of_another_environment_is_loaded_with_a_warning(tmp_path):
    options = {"learning_starts": 8, "batch_size": 8, "hidden_sizes": [8]}
    dqn = DQN("MountainCar-v0", **options)
    dqn.train(64)
    dqn.save_buffer(tmp_path / "memory.safetensors")
    with pytest.warns(
        RuntimeWarning, match="contains transitions of MountainCar-v0, but these environments are MountainCarC"
    ):
        TD3("MountainCarContinuous-v0", **options).load_buffer(tmp_path / "memory.safetensors")


@pytest.mark.parametrize("name", ["n_envs", "seed"])
def test_arguments_fixed_by_the_checkpoint_are_errors(name, tmp_path):
    DQN("CartPole-v1", hidden_sizes=[8]).save(tmp_path / "dqn.safetensors")
    with pytest.raises(TypeError, match=f"DQN.from_checkpoint: {name} must be the checkpoint's, got 5; leave it out"):
        DQN.from_checkpoint(tmp_path / "dqn.safetensors", **{name: 5})


TINY = {"hidden_sizes": [8], "learning_starts": 8, "batch_size": 8}


def test_a_memory_of_0_6_0_is_loaded(tmp_path):
    dqn = DQN("CartPole-v1", buffer="prioritized", buffer_size=100, **TINY)
    dqn.train(64)
    path = tmp_path / "last.safetensors"
    dqn.save(path, memory=True)
    saved = load_checkpoint(path)
    for name in ("eps", "weight_norm"):
        del saved.header["buffer"][name]
    save_checkpoint(path, saved)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = DQN.from_checkpoint(path)
    assert len(again.buffer) == 64
    assert again._memory.config == dqn._memory.config


def test_a_memory_that_is_not_registered_is_named(tmp_path):
    dqn = DQN("CartPole-v1", **TINY)
    path = tmp_path / "last.safetensors"
    dqn.save(path)
    saved = load_checkpoint(path)
    saved.header["buffer"] = {"name": "gone"}
    save_checkpoint(path, saved)
    again = DQN.from_checkpoint(path)  # evaluation does not need the memory
    with pytest.raises(ValueError, match="trained with the buffer gone, which is not registered here"):
        again.train(100)
    own = DQN("CartPole-v1", buffer=ReplayBuffer(100, 4, 1), **TINY)
    own.save(path)
    assert load_checkpoint(path).header["buffer"] == {"name": "ReplayBuffer"}


@pytest.mark.parametrize("kind", ["uniform", "prioritized"])
def test_a_restored_run_saves_its_memory_again(kind, tmp_path):
    path = tmp_path / "last.safetensors"
    first = DQN("CartPole-v1", 1, 0, buffer=kind, buffer_size=60, **TINY)
    first.train(40)
    first.save(path, memory=True)
    again = DQN.from_checkpoint(path)
    again.train(40)
    again.save(path, memory=True)
    equal(DQN.from_checkpoint(path).buffer.get_state(), again.buffer.get_state())
    assert len(list((tmp_path / "memory").glob("*"))) == 2  # the rows of the first save, and the new ones


def test_a_custom_memory_is_saved_completely(tmp_path):
    buffer, files = NewestBuffer(20, 3, 1), ReplayFiles(tmp_path)
    for start in (0.0, 15.0):
        obs = np.arange(start, start + 15, dtype=np.float32)[:, None].repeat(3, 1)
        buffer.push_batch(obs, obs + 1, obs[:, :1], obs[:, 0], np.zeros(15, bool), np.ones(15, bool))
        taken = files.take(buffer)
        entry, arrays = taken.write()
        taken.remove_unneeded()
        found = NewestBuffer(20, 3, 1)
        load(found, tmp_path, json.loads(json.dumps(entry)), arrays)
        equal(found.get_state(), buffer.get_state())
        assert len(list(tmp_path.glob("*"))) == 1


@pytest.mark.parametrize(
    "changes",
    [{"values": []}, {"files": {}}, {"files": [{}]}, {"files": [3]}, {"files": [{"name": "a", "next_frame": "1"}]},
     {"files": [{"name": "a"}, {"name": "b/a"}]}, {"files": [{"name": "a\0"}]}, {"start": -1},
     {"values": {"next_frame": 0.5}}, {"values": {"cold_path": 3}}, {"values": {"cold_path": "x" * 65_536}}],
)  # fmt: skip
def test_a_changed_entry_is_an_error(changes, tmp_path):
    with pytest.raises(ValueError, match="its entry in the header must be unchanged since the save, got"):
        load(ReplayBuffer(10, 3, 1), tmp_path, {"values": {}, "files": [], "start": 0, **changes}, {})


@pytest.mark.parametrize(
    ("name", "change", "got"),
    [
        ("rows", lambda x: x.astype(np.float32), r"float32 \(5, \d+\)"),
        ("rows", lambda x: x[:, :-1], r"uint8 \(5, \d+\)"),
        ("frames", lambda x: x.astype(np.int64), r"int64 \(\d+, \d+\)"),
        ("frames", None, "nothing"),
    ],
    ids=["dtype", "width", "frames' dtype", "no frames"],
)
def test_a_file_of_other_arrays_is_named(name, change, got, tmp_path):
    buffer, files = MAKERS["stacks"](tmp_path), ReplayFiles(tmp_path)
    push(buffer, 5, np.random.default_rng(0), 0)
    entry, arrays = files.take(buffer).write()
    (path,) = tmp_path.glob("*")
    kept = load_checkpoint(path, ("file",))
    del kept.header["sections"]
    changed = kept.tensors["memory"].pop(name)
    if change is not None:
        kept.tensors["memory"][name] = np.ascontiguousarray(change(changed))
    save_checkpoint(path, kept)
    with pytest.raises(ValueError, match=rf"{name} of {path.name} must be uint8 \(N, \d+\), got {got}"):
        load(buffer, tmp_path, entry, arrays)


@pytest.mark.parametrize("kind", ["uniform", "prioritized", "stacks"])
def test_a_memory_that_replaces_another_is_written_completely(kind, tmp_path):
    files, rng = ReplayFiles(tmp_path), np.random.default_rng(0)
    first, second = MAKERS[kind](tmp_path), MAKERS[kind](tmp_path)
    push(first, 5, rng, 0)
    files.take(first).write()
    push(second, 100, rng, 50)  # more than its capacity
    entry, arrays = files.take(second).write()
    found = MAKERS[kind](tmp_path)
    load(found, tmp_path, entry, arrays)
    equal(found.get_state(), second.get_state())


def test_a_lost_file_is_named_and_the_next_save_is_complete(tmp_path):
    buffer, files, rng = ReplayBuffer(100, 3, 1), ReplayFiles(tmp_path), np.random.default_rng(0)
    push(buffer, 5, rng, 0)
    files.take(buffer).write()
    (lost,) = tmp_path.glob("*")
    lost.unlink()
    push(buffer, 5, rng, 5)
    with pytest.raises(FileNotFoundError, match=f"{lost.name} must exist; the next save writes all files again"):
        files.take(buffer).write()
    entry, arrays = files.take(buffer).write()
    found = ReplayBuffer(100, 3, 1)
    load(found, tmp_path, entry, arrays)
    assert len(found) == 10


def grown(buffer, n, rng, start):
    """Push n steps of two environments in episodes of seven, then update some of the states."""
    for i in range(start, start + n):
        rows = np.full((2, 3), i, np.float32)
        flags = [i % 7 == 6, False]
        state = rng.normal(size=(2, 2)).astype(np.float32)
        buffer.push_batch(rows, None, rows[:, :1], rows[:, 0], flags, [False] * 2, state=state)
        if i % 5 == 0:
            buffer.push(rows[0], [0], 0, False, False, env=0, state=[0, 0])  # unequal numbers of steps
    if len(buffer) > 8:
        batch = buffer.sample(3, 4, start, online=True, with_indices=True)
        buffer.update_states(batch["indices"], rng.normal(size=(3, 4, 2)).astype(np.float32))


def sequences(capacity=40):
    return SequenceReplayBuffer(capacity, 3, 1, n_envs=2, state_dim=2)


def test_sequences_after_any_series_of_saves(tmp_path):
    rng = np.random.default_rng(0)
    buffer, files, start = sequences(), ReplayFiles(tmp_path), 0
    entry, found = {}, sequences()
    for n in [0, 5, 0, 9, 30, 100, "clear", 0, 3, "cut", *[1] * 40, "restored", 3, 1, "exchanged", 4]:
        if n == "clear":
            buffer.clear()
        elif n == "cut":
            buffer.cut(truncated=True)
        elif n == "exchanged":
            other = sequences()
            other.set_state(buffer.get_state())
            buffer = other
        elif n == "restored":
            files = ReplayFiles(tmp_path, entry, found)
            buffer = found
        else:
            grown(buffer, n, rng, start)
            start += n
        taken = files.take(buffer)
        # Rows pushed before it is written are not part of it.
        expected = buffer.get_state()
        if n == 1:
            grown(buffer, 1, rng, start)
            start += 1
        entry, arrays = taken.write()
        taken.remove_unneeded()
        entry = json.loads(json.dumps(entry))
        found = sequences()
        load(found, tmp_path, entry, arrays)
        equal(found.get_state(), expected)
    assert len(list(tmp_path.glob("*"))) <= 32


def test_a_save_of_sequences_writes_only_new_rows(tmp_path):
    rng = np.random.default_rng(0)
    buffer, files = sequences(20_000), ReplayFiles(tmp_path)
    grown(buffer, 4000, rng, 0)
    sizes, held = [], []
    for i in range(40):
        taken = files.take(buffer)
        entry, arrays = taken.write()
        taken.remove_unneeded()
        sizes.append(sum((tmp_path / file["name"]).stat().st_size for file in entry["files"]))
        held.append({file["name"] for file in entry["files"]})
        batch = buffer.sample(100, 10, i, with_indices=True)
        buffer.update_states(batch["indices"], rng.normal(size=(100, 10, 2)).astype(np.float32))
        grown(buffer, 5, rng, 4000 + 5 * i)
    one = sum(x.nbytes for x in buffer.get_state().values() if isinstance(x, np.ndarray))
    assert max(sizes) < 2.5 * one  # states are rewritten before the files of their updates become larger
    assert any(len(a - b) for a, b in pairwise(held))
    assert len({name for names in held for name in names if not name.startswith("states")}) > 30
    found = sequences(20_000)
    load(found, tmp_path, entry, arrays)
    # A missing file, or a file of another memory, is an error.
    lost = {**entry, "files": entry["files"][1:]}
    with pytest.raises(ValueError, match="its files must contain every step, but some are missing"):
        load(sequences(20_000), tmp_path, lost, arrays)
    with pytest.raises(ValueError, match="replay memory: sizes and pushed must fit 2 environments of 50 steps"):
        load(sequences(100), tmp_path, entry, arrays)
    with pytest.raises(ValueError, match=r"files must contain rows of this memory, got state of shape \(\d+, 2\) for"):
        load(SequenceReplayBuffer(20_000, 3, 1, n_envs=2, state_dim=5), tmp_path, entry, arrays)


@pytest.mark.parametrize("name", ["uniform", "prioritized"])
def test_transitions_that_frames_had_no_room_for_stay_out(name, tmp_path):
    """Short episodes of stacked frames need more frames than there are; files still have the dropped transitions."""
    agent = DQN(
        "rlox/DrawnCatch-v0",
        env_wrappers=[{"FrameStackObservation": {"stack_size": 4}}],
        buffer={"name": name, "size": 5000},
        learning_starts=10**6,
        hidden_sizes=[],
        backend="torch",
    )
    path = tmp_path / "checkpoints/last.safetensors"
    for _ in range(3):
        agent.train(3000)
        agent.save(path, memory=True)
    assert len(agent.buffer) < 5000 < agent.buffer.n_pushed
    restored = DQN.from_checkpoint(path).buffer
    assert len(restored) == len(agent.buffer)
    equal(restored.sample(200, 0), agent.buffer.sample(200, 0))
