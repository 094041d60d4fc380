"""Checkpoints: what they hold, that NumPy alone reads them, and what damage says."""

import json
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

from rlox.algorithms import PPO
from rlox.checkpoint import load_checkpoint


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint") / "ppo.safetensors"
    ppo = PPO("CartPole-v1", n_envs=4, seed=0, n_steps=32)
    ppo.train(512)
    ppo.save(path, note="kept")
    return path, ppo


def test_holds_every_section(saved):
    path, ppo = saved
    checkpoint = load_checkpoint(path)
    header, tensors = checkpoint.header, checkpoint.tensors
    assert set(tensors) == {
        "policy",
        "target",
        "optimizer",
        "normalization",
        "environment",
        "statistics",
        "generators",
    }
    assert tensors["normalization"] == {}
    assert header["counters"] == ppo.counters.scalars()
    assert header["generators"]["action"]["position"] > 0
    assert header["algorithm"] == "ppo"
    assert header["config"] == ppo.config.to_dict()
    assert header["note"] == "kept"
    assert {"rlox", "python", "torch", "numpy", "gymnasium", "platform", "cpu_level"} == set(header["versions"])
    np.testing.assert_array_equal(tensors["policy"]["actor.0.weight"], ppo.policy.actor[0].weight.detach())


def test_numpy_alone_reads_it(saved):
    """Eight bytes of length, a JSON header, raw little-endian arrays: no torch and no safetensors needed."""
    path, ppo = saved
    program = f"""
import json, sys, numpy as np
data = open({str(path)!r}, "rb").read()
n = int.from_bytes(data[:8], "little")
header = json.loads(data[8:8 + n])
entry = header["policy/actor.0.weight"]
a, b = entry["data_offsets"]
array = np.frombuffer(data[8 + n + a:8 + n + b], "<f4").reshape(entry["shape"])
assert "torch" not in sys.modules
print(json.dumps([array.tolist(), json.loads(header["__metadata__"]["rlox"])["algorithm"]]))
"""
    out = json.loads(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout)
    assert out[1] == "ppo"
    np.testing.assert_array_equal(np.float32(out[0]), ppo.policy.actor[0].weight.detach())


def test_damage_anywhere_is_noticed(saved, tmp_path):
    data = saved[0].read_bytes()
    path = tmp_path / "damaged.safetensors"
    rng = np.random.default_rng(0)
    for at in [0, 7, 8, 20, *rng.integers(0, len(data), 60), len(data) - 1]:
        flipped = bytearray(data)
        flipped[at] ^= 0x10
        path.write_bytes(flipped)
        with pytest.raises(ValueError, match="load_checkpoint: "):
            load_checkpoint(path)
    for size in [0, 1, 7, 9, 500, len(data) // 2, len(data) - 1]:
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match="load_checkpoint: "):
            load_checkpoint(path)


def test_foreign_files_are_refused_and_nothing_runs(saved, tmp_path):
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {marker}",)

    (tmp_path / "evil.safetensors").write_bytes(pickle.dumps(Evil()))
    torch.save({"w": torch.zeros(3)}, tmp_path / "torch.safetensors")
    from safetensors.numpy import save_file

    save_file({"w": np.zeros(3)}, tmp_path / "other.safetensors")
    for name in ("evil", "torch", "other"):
        with pytest.raises(ValueError, match="load_checkpoint: "):
            load_checkpoint(tmp_path / f"{name}.safetensors")
    assert not marker.exists()
    with pytest.raises(FileNotFoundError, match="no file"):
        load_checkpoint(tmp_path / "absent.safetensors")
    with pytest.raises(ValueError, match="is a folder"):
        load_checkpoint(tmp_path)


def test_newer_format_is_refused(saved, tmp_path, monkeypatch):
    monkeypatch.setattr("rlox.checkpoint.file.FORMAT_VERSION", 99)
    saved[1].save(tmp_path / "new.safetensors")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="format version 99"):
        load_checkpoint(tmp_path / "new.safetensors")


def test_a_file_does_not_decide_what_is_imported(saved, tmp_path, monkeypatch):
    _, ppo = saved
    monkeypatch.setattr(ppo, "env_id", "antigravity:CartPole-v1")
    ppo.save(tmp_path / "module.safetensors")
    with pytest.raises(ValueError, match="names a module to import; if you trust it, pass env_id="):
        PPO.from_checkpoint(tmp_path / "module.safetensors")
    assert "antigravity" not in sys.modules


def test_failed_write_leaves_the_old_one(saved, tmp_path, monkeypatch):
    path = tmp_path / "c.safetensors"
    saved[1].save(path)
    before = path.read_bytes()

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="earlier checkpoint there is untouched"):
        saved[1].save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["c.safetensors"]


def test_other_environment_and_other_algorithm(saved):
    path, ppo = saved
    moved = PPO.from_checkpoint(path, env_id="CartPole-v1")
    assert torch.equal(moved.policy.actor[0].weight, ppo.policy.actor[0].weight)
    with pytest.raises(ValueError, match="does not fit"):
        PPO.from_checkpoint(path, env_id="Acrobot-v1")


def test_a_path_that_is_no_files_is_refused_by_name(tmp_path):
    ppo = PPO("CartPole-v1", hidden_sizes=[8])
    os.mkfifo(tmp_path / "pipe")
    for path in ("", ".", "/", f"{tmp_path}/x\0y", tmp_path / "pipe"):
        with pytest.raises(ValueError, match="save_checkpoint: path must name a file, got"):
            ppo.save(path)
    assert (tmp_path / "pipe").is_fifo()  # and a device stays one
    for path in (None, 3, b"abc"):
        for does in (ppo.save, load_checkpoint):
            with pytest.raises(TypeError, match="path must be a file's path, got"):
                does(path)
