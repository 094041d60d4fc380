"""Checkpoints: their contents, reading them with NumPy alone, and errors for damaged files."""

import itertools
import json
import os
import pickle
import stat
import subprocess
import sys
import threading
from contextlib import suppress
from math import inf as INF
from pathlib import Path
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv
from safetensors import safe_open
from safetensors.numpy import save_file
from torch import nn

import rlox
from rlox.algorithms import ALGORITHMS, PPO, resolve
from rlox.checkpoint import (
    Checkpoint,
    decode_value,
    encode_value,
    load_checkpoint,
    read_header,
    save_checkpoint,
    trained_for,
)
from rlox.checkpoint.file import _digest
from rlox.checkpoint.values import Lost


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
    assert (header["format"], header["format_version"]) == ("rlox-checkpoint", 1)
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


def test_any_damage_is_detected(saved, tmp_path):
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


def test_a_header_is_read_without_the_contents(saved, tmp_path):
    data, path = saved[0].read_bytes(), tmp_path / "damaged.safetensors"
    header = load_checkpoint(saved[0]).header
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert read_header(saved[0]) == read_header(path) == header
    for wrong in (b"", data[:7], data[:500], data[:-1], data + b"0", data.replace(b"n_envs", b"m_envs")):
        path.write_bytes(wrong)
        with pytest.raises(ValueError, match=f"load_checkpoint: {path}"):
            read_header(path)
    with pytest.raises(ValueError, match="its header lacks absent"):
        read_header(saved[0], ("absent",))
    with pytest.raises(FileNotFoundError, match="no file"):
        read_header(tmp_path / "absent.safetensors")


def test_foreign_files_are_errors_and_no_code_runs(saved, tmp_path):
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


def test_a_newer_format_is_an_error(saved, tmp_path, monkeypatch):
    monkeypatch.setattr("rlox.checkpoint.file.FORMAT_VERSION", 99)
    saved[1].save(tmp_path / "new.safetensors")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="format version 99"):
        load_checkpoint(tmp_path / "new.safetensors")


def test_a_file_cannot_import_a_module(saved, tmp_path, monkeypatch):
    _, ppo = saved
    monkeypatch.setattr(ppo, "env_id", "antigravity:CartPole-v1")
    ppo.save(tmp_path / "module.safetensors")
    with pytest.raises(ValueError, match="names a module to import; if you trust it, pass env_id="):
        PPO.from_checkpoint(tmp_path / "module.safetensors")
    assert "antigravity" not in sys.modules


def test_a_failed_write_keeps_the_old_file(saved, tmp_path, monkeypatch):
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


def test_a_file_system_that_cannot_flush_folders_is_written(saved, tmp_path, monkeypatch):
    """A shared folder of VirtualBox."""
    flush, refused = os.fsync, []

    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            refused.append(descriptor)
            raise OSError(22, "Invalid argument")
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    saved[1].save(tmp_path / "c.safetensors")
    assert refused
    assert load_checkpoint(tmp_path / "c.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("mapped", [False, True])
def test_a_checkpoint_is_read_consistently_while_a_training_replaces_it(tmp_path, monkeypatch, mapped):
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # more replacements a second
    path = tmp_path / "last.safetensors"
    rlox.PPO("CartPole-v1", n_envs=2, seed=0).save(path)
    first = load_checkpoint(path)
    weights = first.tensors["policy"]
    first.tensors["policy"] = {name: np.zeros_like(array) for name, array in weights.items()}
    save_checkpoint(path, first)
    stopped, read = threading.Event(), {}

    def replace():
        for number in itertools.takewhile(lambda _: not stopped.is_set(), itertools.count()):
            # Whole numbers, the same in all arrays of a file, so that arrays of two files cannot be mixed unnoticed.
            first.tensors["policy"] = {name: np.full_like(array, number) for name, array in weights.items()}
            save_checkpoint(path, first)

    def number_in(checkpoint):
        (number,) = {number for array in checkpoint.tensors["policy"].values() for number in np.unique(array).tolist()}
        return number

    writer = threading.Thread(target=replace)
    writer.start()
    try:
        while len(read) < 50 and writer.is_alive():
            found = load_checkpoint(path, mapped=mapped)
            assert found.tensors["policy"].keys() == weights.keys()
            read.setdefault(number_in(found), found)
    finally:
        stopped.set()
        writer.join()
    assert len(read) == 50
    for number, found in read.items():  # what was read stays, though the file is another by now
        assert number_in(found) == number


def test_a_missing_folder_is_created(saved, tmp_path):
    saved[1].save(tmp_path / "run" / "checkpoints" / "last.safetensors")
    assert load_checkpoint(tmp_path / "run/checkpoints/last.safetensors").header["algorithm"] == "ppo"


def test_an_array_without_numbers_is_kept(saved, tmp_path):
    arrays = {"none": np.zeros((0, 3), np.float32), "one": np.ones(1)}
    header = load_checkpoint(saved[0]).header
    del header["sections"]
    save_checkpoint(tmp_path / "x.safetensors", Checkpoint(header, {"policy": arrays}))
    found = load_checkpoint(tmp_path / "x.safetensors").tensors["policy"]
    assert {name: (x.dtype, x.shape) for name, x in found.items()} == {n: (x.dtype, x.shape) for n, x in arrays.items()}


def test_an_invalid_header_is_not_written(saved, tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        saved[1].save(tmp_path / "nan.safetensors", note=float("nan"))
    assert not any(tmp_path.iterdir())


def test_the_same_environment_continues_also_if_given_by_name(saved):
    by_file, by_name = PPO.from_checkpoint(saved[0]), PPO.from_checkpoint(saved[0], env_id="CartPole-v1")
    saved_state = load_checkpoint(saved[0]).tensors["environment"]
    for algorithm in (by_file, by_name):
        state = algorithm.collector.state()
        assert state.keys() == saved_state.keys()
        for name, array in state.items():
            np.testing.assert_array_equal(array, saved_state[name], err_msg=name)


GENERATOR = {"key": 2**64 - 1, "position": 0}
ENV = {"id": "E", "n_envs": 1, "kwargs": {}, "wrappers": ["W", {"W": {}}], "workers": 0}
SPACES = {"obs_dim": 1, "act_dim": 1, "continuous": False}
COUNTERS = dict.fromkeys(("env_steps", "updates", "episodes", "horizon_start", "horizon_steps"), 2**53 - 1)


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("file", ["a", "a" * 500], ["", "a" * 501, "a\n", 5, None]),
        ("seed", [0, 2**64 - 1], [-1, 2**64, 1.0, True]),
        ("threads", [0, 256, 1024], [1025, "1"]),
        ("memory_start", [0, 2**53 - 1], [2**53, -1, False]),
        ("policy", ["default", "custom"], ["other", None]),
        ("reward_fn", [None, "f"], ["", 1]),
        ("generators", [{}, {"action": GENERATOR}], [[], {"a": 1}, {"a": {"key": 1}}, {"a": {**GENERATOR, "x": 1}},
                                                      {"a": {**GENERATOR, "key": 2**64}}]),
        ("env", [ENV, {**ENV, "id": None}, {**ENV, "backend": "envpool"}],
         [{**ENV, "id": ""}, {**ENV, "n_envs": 0}, {**ENV, "n_envs": 1.0}, {**ENV, "kwargs": None},
          {**ENV, "wrappers": "W"}, {**ENV, "wrappers": [{}]}, {**ENV, "wrappers": [""]},
          {**ENV, "workers": -1}, {**ENV, "backend": ""}]),
        ("spaces", [SPACES], [{}, {**SPACES, "obs_dim": 0}, {**SPACES, "act_dim": 1.5}, {**SPACES, "continuous": 1},
                              {**SPACES, "more": 1}]),
        ("counters", [COUNTERS, {**COUNTERS, "schedule_steps": 1}], [{}, {**COUNTERS, "updates": 2**53}, [],
                                                                    {**COUNTERS, "more": 1}]),
        ("config", [{}, {"a": 2**63 - 1, "b": [1, 2]}], [[], {"a": 2**63}, {"a": [-(2**63)]}]),
        ("buffer", [{"name": "b"}], [{}, {"name": ""}, {"name": "b", "size": 2**63}]),
    ],
)  # fmt: skip
def test_the_rules_of_a_header_hold_at_their_limits(key, good, bad, tmp_path):
    path = tmp_path / "a.safetensors"
    for value in good:
        save_checkpoint(path, Checkpoint({key: value}, {}))
        assert load_checkpoint(path, (key,)).header[key] == value
    for value in bad:
        save_checkpoint(path, Checkpoint({key: value}, {}))
        with pytest.raises(ValueError, match=f"is damaged: {key} in its header must"):
            load_checkpoint(path, (key,))


# The sections of a file, with the names that other versions look for.
OFF_POLICY = {"hidden_sizes": [8], "learning_starts": 8, "batch_size": 8}
TWIN = {"policy", "optimizer", "critics", "target", "critic_optimizer"}
SECTIONS = {
    "dqn": {"policy", "target", "optimizer"},
    "sac": {*TWIN, "temperature", "alpha_optimizer"},
    "td3": {*TWIN, "target_policy"},
    "td3_bc": {*TWIN, "bounds", "target_policy"},
    "iql": {*TWIN, "bounds", "value"},
    "cql": {*TWIN, "bounds", "log_alpha", "alpha_optimizer", "log_cql_alpha", "cql_alpha_optimizer"},
}


@pytest.mark.parametrize("name", SECTIONS)
def test_every_section_has_its_name(name, tmp_path):
    cls = resolve(ALGORITHMS[name].cls)
    if name in ("td3_bc", "iql", "cql"):
        rng = np.random.default_rng(0)
        obs, actions, ends = rng.normal(size=(50, 3)), rng.uniform(-1, 1, (50, 1)), np.zeros(50, bool)
        dataset = rlox.OfflineDatasetBuffer(obs, obs, actions, np.ones(50), ends, ends)
        learned = {"auto_alpha": True} if name == "cql" else {}
        algorithm = cls(dataset, 3, act_dim=1, hidden_sizes=[8], batch_size=8, **learned)
        algorithm.train(2)
    else:
        algorithm = cls("CartPole-v1" if name == "dqn" else "Pendulum-v1", **OFF_POLICY)
        algorithm.train(16)
    algorithm.save(tmp_path / "a.safetensors")
    tensors = load_checkpoint(tmp_path / "a.safetensors").tensors
    own = {"environment", "statistics", "generators", "normalization"}
    assert {section for section, arrays in tensors.items() if arrays} - own == SECTIONS[name]


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_a_section_that_is_lost_is_refused(backend, tmp_path):
    rng, ends = np.random.default_rng(0), np.zeros(50, bool)
    obs, actions = rng.normal(size=(50, 3)), rng.uniform(-1, 1, (50, 1))
    dataset = rlox.OfflineDatasetBuffer(obs, obs, actions, np.ones(50), ends, ends)
    cql = rlox.CQL(dataset, 3, act_dim=1, hidden_sizes=[8], batch_size=8, auto_alpha=True, backend=backend)
    cql.save(tmp_path / "whole.safetensors")
    for section in sorted(SECTIONS["cql"]):
        kept = load_checkpoint(tmp_path / "whole.safetensors")
        del kept.tensors[section], kept.header["sections"]
        save_checkpoint(tmp_path / "cut.safetensors", kept)
        says = r"state must hold exp_avg|does not fit the checkpoint|must specify the actions"
        with pytest.raises(ValueError, match=says):
            rlox.CQL.from_checkpoint(tmp_path / "cut.safetensors", dataset, backend=backend)


def test_other_environment_and_other_algorithm(saved):
    path, ppo = saved
    moved = PPO.from_checkpoint(path, env_id="CartPole-v1")
    assert torch.equal(moved.policy.actor[0].weight, ppo.policy.actor[0].weight)
    with pytest.raises(ValueError, match="does not fit"):
        PPO.from_checkpoint(path, env_id="Acrobot-v1")


def test_a_path_that_is_not_a_file_is_an_error(tmp_path):
    ppo = PPO("CartPole-v1", hidden_sizes=[8])
    os.mkfifo(tmp_path / "pipe")
    for path in ("", ".", "/", f"{tmp_path}/x\0y", tmp_path / "pipe"):
        with pytest.raises(ValueError, match="save_checkpoint: path must name a file, got"):
            ppo.save(path)
    assert (tmp_path / "pipe").is_fifo()  # and a pipe is not replaced
    for path in (None, 3, b"abc"):
        for does in (ppo.save, load_checkpoint):
            with pytest.raises(TypeError, match="path must be a file's path, got"):
                does(path)


def test_env_kwargs_are_restored(tmp_path):
    kwargs = {"sutton_barto_reward": True}
    ppo = PPO("CartPole-v1", 1, 0, n_steps=16, hidden_sizes=[8], env_kwargs=kwargs)
    ppo.train(16)
    ppo.save(tmp_path / "a.safetensors")
    again = PPO.from_checkpoint(tmp_path / "a.safetensors")
    assert again.env_options.kwargs == kwargs
    played = again.evaluate(1)
    assert played.returns[0] == -1.0  # -1 when the pole falls, and 0 before


def test_tensors_begin_at_a_multiple_of_eight_bytes(tmp_path):
    for n in range(9):
        PPO("CartPole-v1", hidden_sizes=[8]).save(tmp_path / "a.safetensors", note="x" * n)
        assert int.from_bytes((tmp_path / "a.safetensors").read_bytes()[:8], "little") % 8 == 0


def test_wrappers_with_arguments_are_restored(tmp_path):
    wrappers = [{"TimeLimit": {"max_episode_steps": 7}}]
    ppo = PPO("CartPole-v1", 1, 0, n_steps=16, hidden_sizes=[8], env_wrappers=wrappers)
    ppo.train(16)
    ppo.save(tmp_path / "a.safetensors")
    again = PPO.from_checkpoint(tmp_path / "a.safetensors")
    assert again.env_options.wrappers == wrappers
    assert again.evaluate(1).lengths[0] == 7


class HalfRewards(gymnasium.RewardWrapper):
    def reward(self, reward):
        return reward / 2


def test_wrappers_are_given_as_classes(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(Path(__file__).parents[__name__.count(".")])  # workers import this module by its name
    wrappers = [HalfRewards, {gymnasium.wrappers.TimeLimit: {"max_episode_steps": 7}}]
    ppo = PPO("CartPole-v1", 2, 0, n_steps=16, hidden_sizes=[8], env_wrappers=wrappers, env_workers=2)
    ppo.train(32)
    names = [f"{__name__}:HalfRewards", {"TimeLimit": {"max_episode_steps": 7}}]
    assert ppo.env_options.wrappers == names
    assert ppo.evaluate(1).returns[0] == 3.5
    ppo.save(tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"name a module to import; if you trust it, pass env_wrappers="):
        PPO.from_checkpoint(tmp_path / "a.safetensors")
    assert PPO.from_checkpoint(tmp_path / "a.safetensors", env_wrappers=wrappers).evaluate(1).returns[0] == 3.5

    class Local(HalfRewards):
        pass

    with pytest.raises(ValueError, match=r"classes at the top of a module.*or wrap in env_id=lambda: Local\("):
        PPO("CartPole-v1", env_wrappers=[Local])
    with pytest.raises(TypeError, match=r"must contain classes, their names or .*; for a function, pass env_id=lambda"):
        PPO("CartPole-v1", env_wrappers=[HalfRewards.reward])
    with pytest.raises(ValueError, match=r"is not in the script of this process; define it in a module"):
        PPO("CartPole-v1", env_wrappers=["__main__:NotThere"])


def test_trained_for_has_a_unit():
    assert trained_for({"counters": {"env_steps": 0, "updates": 500}}) == (500, "updates")
    assert trained_for({"counters": {"env_steps": 700, "updates": 500}}) == (700, "steps")
    assert trained_for({"counters": {"env_steps": 0, "updates": 0}}) == (0, "steps")


def test_hidden_sizes_are_checked_with_a_custom_policy(tmp_path):
    path = tmp_path / "a.safetensors"
    rlox.SAC("Pendulum-v1", policy=nn.Linear(3, 2), **OFF_POLICY).save(path)
    assert rlox.SAC.from_checkpoint(path, policy=nn.Linear(3, 2)).config.hidden_sizes == [8]
    saved = load_checkpoint(path)
    saved.header["config"]["hidden_sizes"] = [9]
    save_checkpoint(path, saved)
    with pytest.raises(ValueError, match="hidden_sizes does not fit the checkpoint"):
        rlox.SAC.from_checkpoint(path, policy=nn.Linear(3, 2))


@pytest.mark.parametrize("own", [False, True])
def test_sizes_of_critics_are_checked_before_they_are_made(own, tmp_path):
    path, policy = tmp_path / "a.safetensors", {"policy": nn.Linear(3, 2)} if own else {}
    settings = {**OFF_POLICY, "critic_hidden_sizes": [6, 5], "n_critics": 3}
    rlox.SAC("Pendulum-v1", **policy, **settings).save(path)
    assert rlox.SAC.from_checkpoint(path, **policy).config.critic_hidden_sizes == [6, 5]
    for name, value in (("critic_hidden_sizes", [30_000, 30_000]), ("n_critics", 100)):
        saved = load_checkpoint(path)
        saved.header["config"][name] = value
        save_checkpoint(tmp_path / "b.safetensors", saved)
        with pytest.raises(ValueError, match=f"from_checkpoint: {name} (does not fit|must be) the checkpoint"):
            rlox.SAC.from_checkpoint(tmp_path / "b.safetensors", **policy)


def test_an_environment_of_other_observations_is_named(tmp_path):
    path = tmp_path / "a.safetensors"
    rlox.PPO("CartPole-v1", n_envs=2, n_steps=8, hidden_sizes=[8, 8]).save(path)
    with pytest.raises(ValueError, match=r"environment does not fit .* take no observations of 6 numbers$"):
        rlox.PPO.from_checkpoint(path, env_id="Acrobot-v1")
    rlox.SAC("Pendulum-v1", **OFF_POLICY).save(path)
    with pytest.raises(ValueError, match=r"environment does not fit .* take no observations of 24 numbers$"):
        rlox.SAC.from_checkpoint(path, env_id="BipedalWalker-v3")


class OwnPolicy(nn.Module):
    """A custom policy that samples from PyTorch's generator."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)

    def get_action_and_logprob(self, obs):
        distribution = torch.distributions.Categorical(logits=self.net(obs))
        actions = distribution.sample()
        return actions, distribution.log_prob(actions)

    def get_value(self, obs):
        return self.net(obs)[:, 0]

    def get_logprob_and_entropy(self, obs, actions):
        distribution = torch.distributions.Categorical(logits=self.net(obs))
        return distribution.log_prob(actions), distribution.entropy()


def test_torchs_generator_is_saved_if_a_policy_samples_from_it(tmp_path):
    path = tmp_path / "a.safetensors"
    for kwargs, kept in (({}, set()), ({"backend": "torch"}, set()), ({"policy": OwnPolicy()}, {"torch"})):
        ppo = PPO("CartPole-v1", n_envs=2, seed=0, n_steps=8, **kwargs)
        ppo.train(32)
        ppo.save(path)
        assert set(load_checkpoint(path).tensors["generators"]) == kept
    # The same actions again, whatever was drawn from the generator meanwhile.
    ppo.train(until=64)
    torch.manual_seed(321)
    again = PPO.from_checkpoint(path, policy=OwnPolicy())
    again.train(until=64)
    assert torch.equal(ppo.policy.net.weight, again.policy.net.weight)


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_a_fixed_temperature_may_be_learned_after_loading(backend, tmp_path):
    sac = rlox.SAC("Pendulum-v1", hidden_sizes=[8], auto_entropy=False, ent_coef=0.5, backend=backend)
    sac.save(tmp_path / "fixed.safetensors")
    again = rlox.SAC.from_checkpoint(tmp_path / "fixed.safetensors", auto_entropy=True)
    assert again.log_alpha.item() == pytest.approx(np.log(0.5))
    again.save(tmp_path / "learned.safetensors")
    kept = load_checkpoint(tmp_path / "learned.safetensors")
    del kept.tensors["temperature"], kept.header["sections"]
    save_checkpoint(tmp_path / "cut.safetensors", kept)
    with pytest.raises(ValueError, match="temperature does not fit the checkpoint"):
        rlox.SAC.from_checkpoint(tmp_path / "cut.safetensors")


class Adjustable(CartPoleEnv):
    """A class of the user, with arguments of any type."""

    received: ClassVar[list] = []

    def __init__(self, **arguments):
        super().__init__()
        self.received.append(arguments)


ANY_VALUES = {
    "scalar": np.float32(0.1),
    "count": np.int64(3),
    "flag": np.bool_(True),
    "pair": (1, (2.5, None)),
    "names": {1: "one", (2, 3): ["x"], None: True},
    "array": np.arange(3, dtype=np.float32),
    "texts": np.array(["", "a text"] * 300),
    "wide": np.zeros(5, "U40"),
    "tagged": {"rlox": "tuple", "value": 3},
    "nan": float("nan"),
    "inf": -float("inf"),
}


def test_arguments_of_environments_keep_their_types(tmp_path):
    ppo = PPO(Adjustable, n_envs=1, n_steps=8, batch_size=8, env_kwargs=ANY_VALUES)
    ppo.save(tmp_path / "ppo.safetensors")
    PPO.from_checkpoint(tmp_path / "ppo.safetensors", env_id=Adjustable)
    restored = Adjustable.received[-1]
    assert restored.keys() == ANY_VALUES.keys()
    for name, value in ANY_VALUES.items():
        assert type(restored[name]) is type(value), name
        assert repr(restored[name]) == repr(value)


def test_an_argument_that_no_file_can_contain_must_be_passed_again(tmp_path):
    path = tmp_path / "ppo.safetensors"
    PPO(Adjustable, n_envs=1, n_steps=8, batch_size=8, env_kwargs={"reward": len, "size": 3}).save(path)
    with pytest.raises(ValueError, match=r"cannot contain the value of env_kwargs\['reward'\], .*; pass env_kwargs="):
        PPO.from_checkpoint(path, env_id=Adjustable)
    with pytest.raises(TypeError, match="env_kwargs must be the checkpoint's, got size=4"):
        PPO.from_checkpoint(path, env_id=Adjustable, env_kwargs={"reward": len, "size": 4})
    ppo = PPO.from_checkpoint(path, env_id=Adjustable, env_kwargs={"reward": len})
    assert Adjustable.received[-1] == ppo.env_options.kwargs == {"reward": len, "size": 3}


@pytest.mark.parametrize(
    "value",
    [
        {"rlox": "array", "dtype": "<U99999", "value": "x"},
        {"rlox": "array", "dtype": "<U9999", "value": ["x"]},
        {"rlox": "dict", "value": [[[], 0]]},
        {"rlox": "?", "value": 0},
        {"rlox": "tuple"},
    ],
)
def test_values_that_rlox_has_not_encoded_are_errors(value):
    with pytest.raises(ValueError, match="must be a value that rlox has encoded"):
        decode_value({"a": [value]})


def test_an_array_much_larger_than_its_text_is_lost():
    assert isinstance(decode_value(encode_value(np.zeros(100, "U9999"))), Lost)


def test_settings_may_be_infinite(saved, tmp_path):
    path, run = tmp_path / "ppo.safetensors", {"env": {"wrappers": [{"gymnasium.wrappers.ClipReward": [-INF, INF]}]}}
    ppo = PPO("CartPole-v1", n_envs=1, n_steps=8, batch_size=8, normalize_obs=True, clip_obs=INF)
    ppo.save(path, run=run)
    assert load_checkpoint(path).header["run"] == run
    assert PPO.from_checkpoint(path).config == ppo.config
    # Without infinities the text is as it was.
    with safe_open(saved[0], framework="numpy") as file:
        assert json.loads(file.metadata()["rlox"])["config"] == saved[1].config.to_dict()


@pytest.mark.parametrize("key", ["config", "env", "note"])
@pytest.mark.parametrize("depth", [400, 600, 950])
def test_a_deeply_nested_header_is_an_error(key, depth, saved, tmp_path):
    path, checkpoint = tmp_path / "deep.safetensors", load_checkpoint(saved[0])
    save_checkpoint(path, checkpoint, **{key: "NESTED"})
    with safe_open(path, framework="numpy") as file:
        text = file.metadata()["rlox"].replace('"NESTED"', '{"a":' * depth + "1" + "}" * depth)
    flat = {f"{section}/{name}": x for section, each in checkpoint.tensors.items() for name, x in each.items()}
    save_file(flat, path, {"rlox": text, "sha256": _digest(text, flat)})
    with suppress(ValueError):
        load_checkpoint(path)


class CartPole(CartPoleEnv):
    """gymnasium takes this name for CartPole-v1; the rewards differ."""

    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, -reward, *rest


def test_a_class_is_not_replaced_by_an_environment_of_the_same_name(tmp_path):
    path = tmp_path / "ppo.safetensors"
    ppo = PPO(CartPole, n_envs=1, n_steps=8, batch_size=8)
    ppo.save(path)
    with pytest.raises(ValueError, match="was trained on CartPole, a class or function of yours; pass env_id=CartPole"):
        PPO.from_checkpoint(path)
    returns = PPO.from_checkpoint(path, env_id=CartPole).evaluate(n_episodes=2).returns
    assert (returns < 0).all()
    # Files of rlox before 0.13 do not say whether the name is an id.
    checkpoint = load_checkpoint(path)
    del checkpoint.header["env"]["callable"]
    save_checkpoint(path, checkpoint)
    with pytest.raises(ValueError, match="pass env_id=CartPole"):
        PPO.from_checkpoint(path)
