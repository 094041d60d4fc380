"""Damaged and malicious files: each is a clear error, runs no code and uses few resources."""

import io
import json
import os
import pickle
import string
import struct
import subprocess
import sys
import time
import zipfile
import zlib
from itertools import pairwise
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from rich.text import Text
from safetensors.numpy import save

from rlox import MmapReplayBuffer, ReplayBuffer
from rlox.algorithms import PPO, SAC
from rlox.buffers import files as replay_files
from rlox.checkpoint import FORMAT_VERSION, HEADER_KEYS, load_checkpoint
from rlox.checkpoint.file import _digest
from rlox.tracking import read_rows
from rlox.tracking.record import Record
from rlox.tracking.store import inside, read_config
from rlox.tracking.writer import Job
from rlox_cli.families import received
from rlox_cli.report.lists import list_things
from rlox_cli.terminal.console import TextConsole, make_table, print_table
from rlox_cli.terminal.errors import UsageError


def flat_of(checkpoint):
    return {f"{section}/{name}": x for section, arrays in checkpoint.tensors.items() for name, x in arrays.items()}


def forge(path, text, flat):
    """Write a file with valid checksums, as if rlox had written it."""
    flat = {name: np.asarray(x, order="C") for name, x in flat.items()}
    path.write_bytes(save(flat, {"rlox": text, "sha256": _digest(text, flat)}))
    return path


def forge_raw(path, entries, data=b""):
    """Write a safetensors file by hand: 8 bytes of length, a JSON header, data."""
    text = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of PPO (native) and of SAC with its memory, each in its own run folder."""
    folder = tmp_path_factory.mktemp("saved")
    ppo = PPO("CartPole-v1", n_envs=2, seed=0, n_steps=16, hidden_sizes=[8, 8])
    ppo.train(64)
    ppo.save(folder / "ppo/checkpoints/last.safetensors")
    small = {"hidden_sizes": [8], "batch_size": 8, "learning_starts": 20, "buffer_size": 200}
    sac = SAC("Pendulum-v1", n_envs=2, seed=0, **small)
    sac.train(60)
    sac.save(folder / "sac/checkpoints/last.safetensors", memory=True)
    return folder


def refused(path, load=load_checkpoint, kinds=(ValueError, FileNotFoundError)):
    with pytest.raises(kinds) as caught:
        load(path)
    text = str(caught.value)
    assert str(path) in text
    assert "\n" not in text
    assert text.isprintable()
    return text


@pytest.mark.slow
@pytest.mark.parametrize("run", ["ppo", "sac", "memory"])
def test_any_byte_flipped_or_missing_is_an_error_that_names_the_file(run, saved, tmp_path):
    """No damaged file loads: the SHA-256 covers names, shapes and contents; the format's own header covers the rest."""
    if run == "memory":
        (source,) = (saved / "sac/checkpoints/memory").glob("*")
    else:
        source = saved / run / "checkpoints/last.safetensors"
    data, path, rng = source.read_bytes(), tmp_path / "damaged.safetensors", np.random.default_rng(0)
    keys = ("file",) if run == "memory" else HEADER_KEYS
    few = 1 if run == "ppo" else 7  # testing every byte of one file's header is enough
    middle = rng.integers(2048, len(data) - 200, 150).tolist() if len(data) > 2400 else []
    places = {*range(0, min(2048, len(data)), few), *middle, *range(max(0, len(data) - 200), len(data), few)}
    path.write_bytes(data)
    load_checkpoint(path, keys)
    # Modify the file in place and from the end, to write little to disk.
    with open(path, "r+b", buffering=0) as file:
        for at in sorted(places, reverse=True):
            os.pwrite(file.fileno(), bytes([data[at] ^ 1 << int(rng.integers(8))]), at)
            refused(path, lambda p: load_checkpoint(p, keys))
            os.pwrite(file.fileno(), data[at : at + 1], at)
        load_checkpoint(path, keys)
        for at in sorted(places, reverse=True):
            file.truncate(at)
            refused(path, lambda p: load_checkpoint(p, keys))


class Payload:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def foreign_files(folder, marker):
    """Write files of other formats with a checkpoint's name; those that can contain code do."""
    payload = Payload(marker)
    torch.save({"w": payload}, folder / "torch.safetensors")
    (folder / "pickle.safetensors").write_bytes(pickle.dumps(payload))
    (folder / "text.safetensors").write_text("import os; os.system('true')\n" * 40)
    with zipfile.ZipFile(folder / "zip.safetensors", "w") as file:
        file.writestr("../../escaped", "x")
    return sorted(folder.glob("*.safetensors"))


def test_foreign_files_are_errors_and_no_code_runs(saved, tmp_path):
    marker = tmp_path / "ran"
    for path in foreign_files(tmp_path, marker):
        assert "safetensors" in refused(path, PPO.from_checkpoint)
    assert not marker.exists()
    assert not (tmp_path.parent.parent / "escaped").exists()
    refused(tmp_path / "absent.safetensors")
    os.mkfifo(tmp_path / "fifo.safetensors")
    refused(tmp_path / "fifo.safetensors")


def raw_files(folder):
    """Write files with a wrong format header or with excessive JSON."""
    f32 = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    for name, length in {"exbi": 2**60, "negative": 2**64 - 1, "gibi": 2**30}.items():
        (folder / f"{name}.safetensors").write_bytes(struct.pack("<Q", length) + b"{}      ")
    meta = {"__metadata__": {"rlox": "{}", "sha256": "0"}}
    forge_raw(folder / "offsets.safetensors", {**meta, "a": {**f32, "data_offsets": [0, 2**60]}}, bytes(16))
    forge_raw(folder / "shape.safetensors", {**meta, "a": {**f32, "shape": [2**40, 2**40]}}, bytes(16))
    forge_raw(folder / "wraps.safetensors", {**meta, "a": {**f32, "shape": [2**62, 4, 2**62]}}, bytes(16))
    forge_raw(folder / "overlap.safetensors", {**meta, "a": f32, "b": {**f32, "data_offsets": [8, 24]}}, bytes(24))
    forge_raw(folder / "dtype.safetensors", {**meta, "a": {**f32, "dtype": "F99"}}, bytes(16))
    forge_raw(folder / "reverse.safetensors", {**meta, "a": {**f32, "data_offsets": [16, 0]}}, bytes(16))
    for name, text in {
        "deep": "[" * 1_000_000,
        "deep-within-parts": "[" * 100_000,
        "many": f"[{'{},' * 1_000_000}0]",
        "digits": f'{{"format_version": {"1" * 1_000_000}}}',
        "nan": '{"format_version": NaN}',
        "infinite": '{"format_version": 1e999}',
        "list": "[]",
        "text": '"x"',
        "null": "null",
    }.items():
        forge(folder / f"{name}.safetensors", text, {"policy/w": np.zeros(3)})


# Changes to the header of a valid checkpoint; each must raise an error with the name of the file.
HEADERS = {
    "version": {"format_version": FORMAT_VERSION + 1},
    "version-text": {"format_version": "1"},
    "version-true": {"format_version": True},
    "algorithm": {"algorithm": ["ppo"]},
    "escape-sequence": {"algorithm": "\x1b[2Jppo"},
    "policy": {"policy": {"_target_": "os.system"}},
    "sections": {"sections": []},
    "sections-others": {"sections": {"policy": ["w"]}},
    "counters": {"counters": [1]},
    "counters-attribute": {"counters.recent_returns": 3},
    "counters-more": {"counters.surprise": 3},
    "counters-class": {"counters.__class__": 3},
    "counters-text": {"counters.env_steps": "3"},
    "counters-negative": {"counters.env_steps": -1},
    "counters-huge": {"counters.updates": 2**60},
    "env": {"env": []},
    "env-id": {"env.id": 3},
    "env-escape": {"env.id": "CartPole-v1\x1b]0;x\x07"},
    "env-n-text": {"env.n_envs": "2"},
    "env-n-none": {"env.n_envs": 0},
    "env-n-more": {"env.n_envs": 3},
    "env-n-huge": {"env.n_envs": 10**12},
    "env-n-foreign": {"env.id": "FrozenLake-v1", "env.n_envs": 10**6},
    "env-workers": {"env.workers": 10**9},
    "env-kwargs": {"env.kwargs": "x"},
    "env-module-inside": {"env.id": "GymV26Environment-v0", "env.kwargs": {"env_id": "antigravity:X-v0"}},
    "env-wrappers": {"env.wrappers": "TimeLimit"},
    "env-wrapper-list": {"env.wrappers": [["TimeLimit"]]},
    "env-wrapper-module": {"env.wrappers": ["antigravity:Wrapper"]},
    "env-wrapper-writes": {"env.wrappers": [{"RecordVideo": {"video_folder": "../../elsewhere"}}]},
    "config": {"config": None},
    "config-target": {"config._target_": "os.system"},
    "config-argument": {"config.callbacks": [{"_target_": "os.system"}]},
    "config-text": {"config.hidden_sizes": "x"},
    "config-wide": {"config.hidden_sizes": [10**9]},
    "config-wider": {"config.hidden_sizes": [8, 10**9]},
    "config-many": {"config.hidden_sizes": [8] * 100_000 + [10**6]},
    "config-digits": {"config.n_steps": 2**64},
    "config-surrogate": {"config.activation": "\ud800"},
    "generators": {"generators": 3},
    "generators-none": {"generators": {}},
    "generators-negative": {"generators.action": {"key": -1, "position": 0}},
    "generators-huge": {"generators.action": {"key": 2**64, "position": 0}},
    "generators-more": {"generators.action": {"key": 1, "position": 0, "x": 1}},
    "seed": {"seed": -1},
    "threads": {"threads": 10**6},
}

OFF_POLICY_HEADERS = {
    "wide": {"config.hidden_sizes": [10**9]},
    "wider": {"config.hidden_sizes": [8, 10**9]},
    "buffer": {"buffer": ["uniform"]},
    "buffer-name": {"buffer.name": 3},
    "buffer-target": {"buffer._target_": "os.system"},
    "buffer-size": {"buffer.size": "x"},
    "memory": {"memory": []},
    "memory-files": {"memory": {"values": {}, "files": [{"name": 3}], "start": 0}},
}
# Changes that take resources only in training, where they must raise an error.
TRAINING = {
    "n_steps": (PPO, {"config.n_steps": 2**31 - 1}),
    "buffer-size": (SAC, {"buffer.size": 2**50}),
    "mmap-size": (SAC, {"buffer": {"name": "mmap", "size": 2**50, "hot_size": 10, "n_step": 1}}),
}


def changed(header, changes):
    header = json.loads(json.dumps(header))
    for key, value in changes.items():
        *section, name = key.split(".", 1)
        (header[section[0]] if section else header)[name] = value
    return header


@pytest.fixture(scope="module")
def hostile(saved, tmp_path_factory):
    """All files that PPO, or SAC if the name says so, must reject."""
    folder = tmp_path_factory.mktemp("hostile")
    good = load_checkpoint(saved / "ppo/checkpoints/last.safetensors")
    for name, changes in HEADERS.items():
        forge(folder / f"{name}.safetensors", json.dumps(changed(good.header, changes)), flat_of(good))
    # Without the state of the environments, which would give their number.
    flat = {name: x for name, x in flat_of(good).items() if not name.startswith("environment/")}
    sections = {**good.header["sections"], "environment": []}
    header = changed(good.header, {"env.n_envs": 10**12, "sections": sections})
    forge(folder / "env-n-alone.safetensors", json.dumps(header), flat)
    # A tensor as long as the header says but with one input: four megabytes that claim to need much more.
    flat = {**flat_of(good), "policy/wide": np.zeros((1_000_000, 1), np.float32)}
    sections = {**good.header["sections"], "policy": sorted([*good.header["sections"]["policy"], "wide"])}
    header = changed(good.header, {"config.hidden_sizes": [10**6], "sections": sections})
    forge(folder / "config-amplifies.safetensors", json.dumps(header), flat)
    raw_files(folder)
    good = load_checkpoint(saved / "sac/checkpoints/last.safetensors")
    for name, changes in OFF_POLICY_HEADERS.items():
        forge(folder / f"sac-{name}.safetensors", json.dumps(changed(good.header, changes)), flat_of(good))
    return folder


# Loads each file in its own process, forked from a process that has already imported everything.
MEASURE = """
import json, os, resource, sys, time
from rlox.algorithms import PPO, SAC
for cls, good in zip((PPO, SAC), sys.argv[1:3]):
    cls.from_checkpoint(good).close()
for path in sys.argv[3:]:
    sys.stdout.flush()
    if os.fork():
        os.wait()
        continue
    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    before, started, kind, text = peak(), time.process_time(), "none", ""
    try:
        (SAC if "/sac-" in path else PPO).from_checkpoint(path)
    except BaseException as e:
        kind, text = type(e).__name__, str(e)
    print(json.dumps([path, kind, text, time.process_time() - started, peak() - before]), flush=True)
    os._exit(0)
"""


@pytest.mark.slow
def test_hostile_headers_are_errors_at_once_and_take_no_memory(hostile, saved):
    paths = sorted(hostile.glob("*.safetensors"))
    assert len(paths) > 50
    good = [saved / run / "checkpoints/last.safetensors" for run in ("ppo", "sac")]
    command = [sys.executable, "-c", MEASURE, *good, *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row[0] for row in rows] == [str(path) for path in paths]
    for path, kind, text, seconds, megabytes in rows:
        assert kind == "ValueError", (path, kind, text)
        assert path in text
        assert text.isprintable(), text
        assert len(text) < 1000
        assert seconds < 1, (path, seconds)
        assert megabytes < 50, (path, megabytes)
    assert "antigravity" not in sys.modules
    assert not (hostile.parent / "elsewhere").exists()


@pytest.mark.filterwarnings("ignore:from_checkpoint. the replay memory starts empty")
@pytest.mark.parametrize("case", TRAINING)
def test_sizes_that_only_training_allocates_are_errors_in_training(case, saved, tmp_path):
    cls, changes = TRAINING[case]
    good = load_checkpoint(saved / cls.name / "checkpoints/last.safetensors")
    path = forge(tmp_path / "a.safetensors", json.dumps(changed(good.header, changes)), flat_of(good))
    algorithm = cls.from_checkpoint(path)
    with pytest.raises((ValueError, MemoryError), match=r"must fit in memory|Unable to allocate"):
        algorithm.train(100)
    algorithm.close()


def test_only_the_user_chooses_the_folder_of_a_memory(saved, tmp_path):
    own, others = tmp_path / "own", tmp_path / "others"
    own.mkdir()
    others.mkdir()
    good = load_checkpoint(saved / "sac/checkpoints/last.safetensors")
    mmap = {"name": "mmap", "size": 100, "hot_size": 10, "n_step": 1}
    header = {key: value for key, value in good.header.items() if key != "memory"}
    for given, folder in (({}, None), ({"buffer": {**mmap, "folder": str(own)}}, own)):
        text = json.dumps({**header, "buffer": {**mmap, "folder": str(others)}})
        sac = SAC.from_checkpoint(forge(tmp_path / "a.safetensors", text, flat_of(good)), **given)
        assert folder in (None, Path(sac.buffer.cold_path).parent)
        sac.train(50)
        assert list(others.iterdir()) == []
        sac.close()


def test_unknown_entries_of_a_header_are_ignored(saved, tmp_path):
    good = load_checkpoint(saved / "ppo/checkpoints/last.safetensors")
    marker = tmp_path / "ran"
    calls = {"_target_": "os.system", "_args_": [f"touch {marker}"], "command": f"touch {marker}"}
    path = forge(tmp_path / "a.safetensors", json.dumps({**good.header, **calls, "note": calls}), flat_of(good))
    PPO.from_checkpoint(path).train(32)
    assert not marker.exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:from_checkpoint. the replay memory starts empty")
@pytest.mark.parametrize("cls", [PPO, SAC])
def test_wrong_and_missing_tensors_are_errors(cls, saved, tmp_path):
    good = load_checkpoint(saved / cls.name / "checkpoints/last.safetensors")
    flat, text = flat_of(good), json.dumps(good.header)
    for name, array in flat.items():
        odd = np.zeros((3, 7, 2), array.dtype)
        path = forge(tmp_path / "odd.safetensors", text, {**flat, name: odd})
        assert "odd.safetensors" in refused(path, cls.from_checkpoint, ValueError), name
        section, _, rest = name.partition("/")
        rests = [x for x in good.header["sections"][section] if x != rest]
        header = changed(good.header, {"sections": {**good.header["sections"], section: rests}})
        fewer = {key: x for key, x in flat.items() if key != name}
        refused(forge(tmp_path / "fewer.safetensors", json.dumps(header), fewer), cls.from_checkpoint, ValueError)


MEMORY = {
    "list": [],
    "values": {"values": []},
    "count-text": {"values.count": "x"},
    "count-huge": {"values.count": 2**62},
    "columns-huge": {"values.columns": "{'x': 4294967295}"},
    "columns-code": {"values.columns": "__import__('os').system('true')"},
    "config": {"values.config": "x" * 100_000},
    "files": {"files": 3},
    "files-none": {"files": []},
    "files-names": {"files": [3]},
    "files-nul": {"files": [{"name": "a\0b"}]},
    "cold-path": {"values.cold_path": 3},
    "start": {"start": -1},
}


@pytest.mark.parametrize("case", [*MEMORY, "repeated"])
def test_a_wrong_description_of_a_memory_is_an_error_and_changes_nothing(case, saved, tmp_path):
    good = load_checkpoint(saved / "sac/checkpoints/last.safetensors")
    entry = json.loads(json.dumps(good.header["memory"]))
    if case == "repeated":
        entry["files"] *= 1000
    else:
        entry = changed(entry, MEMORY[case]) if isinstance(MEMORY[case], dict) else MEMORY[case]
    buffer = SAC.from_checkpoint(saved / "sac/checkpoints/last.safetensors").buffer
    before = buffer.get_state()
    with pytest.raises(ValueError, match=r"replay memory|ReplayBuffer") as caught:
        replay_files.load(buffer, saved / "sac/checkpoints/memory", entry, good.tensors["memory"])
    assert len(str(caught.value)) < 1000
    assert case != "repeated" or "its entry in the header" in str(caught.value)  # before any of the files is read
    after = buffer.get_state()
    assert all(np.array_equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("rows", [np.zeros((60, 3), np.uint8), np.zeros((60, 8)), np.zeros(3, np.uint8), None])
def test_files_of_another_kind_are_errors(rows, saved, tmp_path):
    (source,) = (saved / "sac/checkpoints/memory").glob("*")
    good, piece = load_checkpoint(saved / "sac/checkpoints/last.safetensors"), load_checkpoint(source, ("file",))
    sections = {**piece.header["sections"], "memory": [] if rows is None else ["rows"]}
    flat = {} if rows is None else {"memory/rows": rows}
    forge(tmp_path / source.name, json.dumps({**piece.header, "sections": sections}), flat)
    buffer = ReplayBuffer(200, 3, 1)
    with pytest.raises(ValueError, match=r"replay memory|ReplayBuffer"):
        replay_files.load(buffer, tmp_path, good.header["memory"], {})
    assert len(buffer) == 0


def test_a_cold_file_is_searched_only_in_the_run_and_the_users_folder(tmp_path):
    run, own, elsewhere = tmp_path / "run", tmp_path / "own", tmp_path / "elsewhere"
    for folder in (run / "checkpoints", own, elsewhere):
        folder.mkdir(parents=True)
    memory = run / "checkpoints/memory"
    one = MmapReplayBuffer(10, 40, 3, 1, elsewhere)
    rows = np.arange(90, dtype=np.float32).reshape(30, 3)
    flags = np.zeros(30, bool)
    one.push_batch(rows, rows, rows[:, :1], rows[:, 0], flags, flags)
    entry, arrays = replay_files.ReplayFiles(memory).take(one).write()
    saved_path, name = one.cold_path, os.path.basename(one.cold_path)
    one.close()
    # The file exists there, but the header must not direct the search to that folder.
    assert replay_files.list_missing_files(memory, entry) == [str(run / name)]
    assert replay_files.list_missing_files(memory, entry, own) == [str(own / name)]
    assert replay_files.list_missing_files(memory, entry, elsewhere) == []
    buffer = MmapReplayBuffer(10, 40, 3, 1, own)
    with pytest.raises(ValueError, match="cold file"):
        replay_files.load(buffer, memory, entry, arrays)
    # The user's own files with the name in the header must stay unchanged.
    whole = Path(saved_path).read_bytes()
    deep = b"[" * 4000
    header = struct.pack("<8sIII", b"RLOXCOLD", 1, len(deep), zlib.crc32(deep)) + deep
    damaged = {
        "deep": header.ljust(9000),
        "text": b"dear diary\n" * 500,
        "magic": b"RLOXCOLD" + bytes(9000),
        "cut": whole[:5000],
        "none": b"",
    }
    for content in damaged.values():
        for folder in (run, own):
            (folder / "diary.txt").write_bytes(content)
        (elsewhere / "diary.txt").write_bytes(content)
        bad = {**entry, "values": {**entry["values"], "cold_path": str(elsewhere / "diary.txt")}}
        with pytest.raises(ValueError, match=r"cold_path|cold file"):
            replay_files.load(buffer, memory, bad, arrays)
        for folder in (run, own, elsewhere):
            assert (folder / "diary.txt").read_bytes() == content
    (run / name).symlink_to(saved_path)
    with pytest.raises(ValueError, match="symbolic link"):
        replay_files.load(buffer, memory, entry, arrays)
    assert Path(saved_path).read_bytes() == whole
    assert len(buffer) == 0
    buffer.close()
    assert (own / "diary.txt").exists()
    (run / name).unlink()
    os.rename(saved_path, run / name)
    again = MmapReplayBuffer(10, 40, 3, 1, own)
    replay_files.load(again, memory, entry, arrays)
    assert len(again) == 30
    again.close()


YAML = {
    "laughs": "a: &a [x, x]\n" + "".join(f"{c}: &{c} [*{b}, *{b}]\n" for b, c in pairwise("abcdefghijk")),
    "anchor": "a: &x 1\n",
    "merge": "a: &x {b: 1}\nc:\n  <<: *x\n",
    "python": "a: !!python/object/apply:os.system ['touch ran']\n",
    "python-name": "a: !!python/name:os.system\n",
    "tag": "a: !!binary aGVsbG8=\n",
    "local-tag": "a: !Thing {}\n",
    "deep-flow": "a: " + "[" * 100_000,
    "deep-block": "".join(" " * i + "a:\n" for i in range(60)),
    "large": "a: " + "x" * 300_000,
    "digits": "a: " + "1" * 10_000,
    "date": "a: 2020-01-01\n",
    "key": "? [a]\n: b\n",
    "logger-key": "logger: {1: {}}\n",
    "interpolation": "a: ${oc.env:HOME}\n",
    "interpolated-key": "${oc.env:HOME}: a\n",
    "control": "a: \x07\n",
    "two": "a: 1\n---\nb: 2\n",
    "list": "- a\n",
    "loggers": "logger: [csv]\n",
    "logger-name": "logger: {../../x: {}}\n",
    "logger-target": "logger: {csv: {_target_: os.system}}\n",
    "csv-above": "logger: {csv: {file: ../../x.csv}}\n",
    "csv-absolute": "logger: {csv: {file: /tmp/x.csv}}\n",
    "tensorboard-above": "logger: {tensorboard: {folder: a/../../x}}\n",
    "tensorboard-type": "logger: {tensorboard: {folder: [x]}}\n",
}


@pytest.mark.parametrize("case", [*YAML, "latin-1", "fifo", "device"])
def test_a_config_of_a_run_must_be_plain_data(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "config.yaml"
    if case == "fifo":
        os.mkfifo(path)
    elif case == "device":
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes(YAML[case].encode() if case in YAML else b"a: \xff\xfe\n")
    started = time.process_time()
    with pytest.raises(ValueError, match=r"config\.yaml") as caught:
        read_config(tmp_path)
    assert time.process_time() - started < 1
    assert len(str(caught.value)) < 1000
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


def test_a_config_of_a_run_is_read_unchanged(tmp_path):
    config = {"algo": {"_target_": "os.system", "lr": 3e-4}, "x": [1, None, True, "é $x {y}"], "logger": {"csv": None}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    assert read_config(tmp_path) == config


@pytest.mark.parametrize(
    ("url", "remote"),
    [
        *(
            (f"http://{host}/x", False)
            for host in ("127.0.0.1", "127.9.9.9:80", "localhost:8000", "[::1]:9", "LOCALHOST")
        ),
        *((f"https://{host}/x", True) for host in ("evil", "10.0.0.1", "localhost.evil", "127.0.0.1.evil", "[::2]")),
        *(
            (url, True)
            for url in ("http://", "http://127.0.0.1@evil/", "http://[", "http://evil#@127.0.0.1", "http://1")
        ),
        *((name, False) for name in ("my_rewards:short", "outputs/run", "", None, 3, ["http://evil"])),
    ],
)
def test_only_loopback_addresses_are_this_machine(url, remote):
    assert received.is_remote(url) == remote


RECEIVED = {
    "reward": {"reward": "https://evil/x"},
    "reward-list": {"reward": ["a:b", "https://evil/x?a=1&b='"]},
    "sampler": {"sampler": "vllm", "sampler_url": "http://evil:8000"},
    "sampler-folder": {"sampler_folder": "/elsewhere/a b"},
    "buffer": {"buffer": {"name": "mmap", "folder": "/elsewhere"}},
    "above": {"buffer": {"folder": "run/../elsewhere"}},
    "nul": {"buffer": {"folder": "run/\0"}},
    "film": {
        "env": {"wrappers": ["TimeLimit", {"RecordVideo": {"video_folder": "../it's", "fps": 3, "x": [None, True]}}]}
    },
    "film-path": {"env": {"wrappers": ["gymnasium.wrappers:RecordVideo"]}},
    "ray": {"algo": {"actors": "ray"}, "ray": {"address": "evil:6379", "runtime_env": {}}},
    "ray-env": {"algo": {"actors": "ray"}, "ray": {"runtime_env": {"pip": ["evil"]}}},
}


@pytest.mark.parametrize("case", RECEIVED)
def test_what_a_received_run_sends_and_writes_elsewhere_must_be_typed_again(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ((key, value, _),) = received.find_doubtful(RECEIVED[case], tmp_path / "run")
    with pytest.raises(
        UsageError, match=r"^run/config\.yaml .* which happens only if you type it again; if you trust it"
    ):
        received.require_again(RECEIVED[case], tmp_path / "run", tmp_path / "run/config.yaml")
    received.require_again(RECEIVED[case], tmp_path, tmp_path, lambda *setting: setting == (key, value))
    if case != "nul":  # which nobody can type
        again = OverridesParser.create().parse_override(received.to_word(key, value))
        assert (again.key_or_group, again.value()) == (key, value)


@pytest.mark.parametrize(
    "saved",
    [
        *({}, {"reward": None, "buffer": None, "env": {"wrappers": []}, "ray": {}}, {"reward": "http://[::1]:80"}),
        {"sampler": None, "sampler_url": "http://evil"},  # is an error anyway
        {"buffer": {"folder": "run/memory"}, "sampler_folder": "run"},
        {"algo": {"actors": "threads"}, "ray": {"address": "evil:6379"}},
        {"algo": {"actors": "ray"}, "ray": {"address": "auto", "runtime_env": {}}},
        {"algo": [], "reward": {"x": 1}, "buffer": {"folder": 3}, "env": {"wrappers": [3, None, {}, ["RecordVideo"]]}},
    ],
)
def test_other_settings_of_a_received_run_count_as_they_are(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert list(received.find_doubtful(saved, tmp_path / "run")) == []


class Session:
    """A tracker that keeps everything it receives."""

    uploads_while_alive = True

    def __init__(self):
        self.uploaded = []

    def mirror(self, settings):
        return self

    def open(self, job):
        return self

    def send(self, rows):
        pass

    def upload(self, kind, path):
        self.uploaded.append(path.read_bytes())

    def finish(self, *how):
        pass


@pytest.mark.parametrize("way", ["above", "absolute", "link", "linked-folder"])
def test_nothing_outside_a_run_is_uploaded(way, tmp_path):
    (tmp_path / "secret").write_bytes(b"secret")
    run = tmp_path / "run"
    (run / "mirrors").mkdir(parents=True)
    (run / "config.yaml").write_text("logger: {probe: {}}\n")
    file = {"above": "../secret", "absolute": str(tmp_path / "secret")}.get(way, f"{way}/secret")
    if way == "link":
        (run / way).mkdir()
        (run / file).symlink_to(tmp_path / "secret")
    elif way == "linked-folder":
        (run / way).symlink_to(tmp_path)
    (run / "good").write_bytes(b"good")
    with Record(run) as record:
        record.checkpoint(1, "best", "good")
        record.checkpoint(1, "last", file)
        record.end(1, "finished")
    session, job = Session(), Job(run, "probe")
    assert job.round(session) == "done"
    assert b"secret" not in session.uploaded
    assert f"{run}" in job.state.error
    with pytest.raises(ValueError, match=r"leads out of it|symbolic link"):
        inside(run, file)


def test_a_run_that_is_damaged_hides_no_other(tmp_path, capsys):
    configs = {"good": "algo: {name: ppo}\nenv: {id: X-v0}\nseed: 0\n", "bad": YAML["laughs"], "other": "a: 1\n"}
    for name, text in configs.items():
        Record(tmp_path / name).close()
        (tmp_path / name / "config.yaml").write_text(text)
    list_things("runs", tmp_path)
    output = capsys.readouterr()
    assert "good" in output.out
    assert "bad" not in output.out
    assert "bad is left out: " in output.err
    assert "other is left out: " in output.err


ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e"


def test_control_characters_of_files_are_shown_and_not_obeyed(command, tmp_path):
    plain = {"algo": {"name": "ppo"}, "env": {"id": "X-v0"}, "seed": 0, "total_timesteps": 1}
    for name in (f"evil{ESCAPE}", f"worse{ESCAPE}"):
        Record(tmp_path / "runs" / name).close()
        (tmp_path / "runs" / name / "config.yaml").write_text(json.dumps(plain))
    (tmp_path / "runs" / f"worse{ESCAPE}" / "config.yaml").write_text("a: 1\n")
    _, out, err = command("ls", "runs", "--folder", "runs")
    assert "evil\\x1b]0;owned\\x07\\x1b[2J\\x9b31m\\u202e  ppo" in out
    assert "worse\\x1b]0;owned" in err
    job = {"id": "0" * 8, "folder": f"a{ESCAPE}", "overrides": [f"a={ESCAPE}"], "config": {"total_timesteps": 1}}
    head = {"sweep": 1, "version": "1", "flags": [], "overrides": [f"a={ESCAPE}"], "imports": [], "launcher": []}
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "sweep.jsonl").write_text(f"{json.dumps(head)}\n{json.dumps(job)}\n")
    printed = [out, err]
    for words in (("sweep", "status", "sweep"), ("ls", "sweeps"), ("eval", f"no{ESCAPE}"), ("show", f"x{ESCAPE}")):
        printed += command(*words)[1:]
    assert sum(map(len, printed)) > 200
    assert not set("".join(printed)) & set(ESCAPE) - set(string.printable)


def test_colours_of_the_command_line_are_no_control_characters_of_files():
    file = io.StringIO()
    console = TextConsole(file=file, force_terminal=True, width=80, color_system="truecolor", legacy_windows=False)
    table = make_table("name", "value")
    table.add_row(f"a{ESCAPE}", Text("good", "red"))
    print_table(console, table)
    console.print(f"line{ESCAPE}\nnext", style="bold")
    text = file.getvalue()
    assert "\x1b[31mgood" in text
    assert "\x1b[1mline\\x1b]0;owned" in text
    assert "\x1b]0" not in text


ROWS = {
    "run_id": {"event": "start", "run_id": "x/../../victim"},
    "query": {"event": "start", "run_id": "x' or 1 = 1"},
    "file": {"event": "checkpoint", "kind": "last", "file": "../../victim"},
    "file-type": {"event": "checkpoint", "kind": "last", "file": ["x"]},
    "kind": {"event": "checkpoint", "kind": "../x", "file": "x"},
    "status": {"event": "end", "status": "exploded", "message": ""},
    "event": {"event": ["start"]},
    "metric": {"loss": {"_target_": "os.system"}},
}


@pytest.mark.parametrize("case", [*ROWS, "deep", "long"])
def test_a_record_that_rlox_did_not_write_is_an_error(case, tmp_path):
    path = tmp_path / "metrics.jsonl"
    text = {"deep": "[" * 200_000 + "\n", "long": "x" * (5 << 20)}.get(case)
    path.write_text(text or json.dumps({"segment": 0, "step": 0, "time": 0.0, **ROWS[case]}) + "\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl: line 1 must") as caught:
        list(read_rows(path))
    assert len(str(caught.value)) < 1000


@pytest.mark.slow
def test_the_command_line_prints_errors_in_one_paragraph(hostile, saved, tmp_path):
    marker = tmp_path / "ran"
    foreign_files(tmp_path, marker)
    wrong = [tmp_path / "torch.safetensors", *(hostile / f"{x}.safetensors" for x in ("config-target", "deep"))]
    wrong += [hostile / "env-n-alone.safetensors", tmp_path / "episodes.safetensors"]
    good = load_checkpoint(saved / "ppo/checkpoints/last.safetensors")
    forge(wrong[-1], json.dumps({**good.header, "evaluation": {"n_episodes": 10**12}}), flat_of(good))
    for path in wrong:
        done = forked.run("eval", path, cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr
        (line,) = done.stderr.splitlines()
        assert line.startswith("rlox eval: ")
        assert str(path) in line
        assert done.stdout == ""
    assert not marker.exists()
