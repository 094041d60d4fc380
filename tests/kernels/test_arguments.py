"""Every public kernel with every kind of wrong argument: each raises an exception that names the argument.

Each row of `CASES` is a valid call with the kind of each argument, from which the wrong values follow.
"""

import re
import tempfile
from functools import cache

import numpy as np
import pytest

import rlox

T, N, B, D, A = 12, 3, 4, 2, 1
RNG = np.random.default_rng(0)


def f64(*shape):
    return RNG.standard_normal(shape)


def f32(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def log_p(*shape, dtype=np.float64):
    return -RNG.random(shape).astype(dtype)


def flags(*shape):
    return RNG.random(shape) < 0.3


TRANSITIONS = (f32(T, D), f32(T, D), f32(T, A), f32(T), flags(T), np.zeros(T, bool))


def filled(buffer):
    buffer.push_batch(*TRANSITIONS)
    return buffer


def replay():
    return filled(rlox.ReplayBuffer(16, D, A))


def prioritized():
    return filled(rlox.PrioritizedReplayBuffer(16, D, A))


def offline():
    return rlox.OfflineDatasetBuffer(*TRANSITIONS)


def sequences():
    return filled(rlox.SequenceReplayBuffer(64, D, A))


def table():
    return rlox.ExperienceTable(D, A)


def varlen():
    store = rlox.VarLenStore()
    store.push(np.arange(5, dtype=np.uint32))
    return store


def stats_vec():
    return rlox.RunningStatsVec(D)


@cache
def folder():
    return tempfile.TemporaryDirectory()  # removed when the interpreter exits


def mapped(**sizes):
    return rlox.MmapReplayBuffer(**sizes, cold_path=folder().name)


def single(env_id):
    return getattr(rlox, env_id)(seed=1)


# Kinds of arguments: name -> values that are invalid for this kind.
OBJECTS = np.array([None, 1.0], object)
WRONG = {
    # A real array with the shape of the valid value.
    "array": lambda good: [
        None, "abc", object(), {}, np.array(["a"] * len(good)), good * 1j, good[:-1], np.stack([good] * 2)[None],
        np.concatenate([good, good[:1]]), good.astype(object).reshape(-1)[:1].repeat(3) * 1j,
    ],
    "flags": lambda good: [None, "abc", good[:-1], np.full(good.shape, 2.0), np.full(good.shape, np.nan),
                           np.array(["x"] * len(good)), np.full(good.shape, 7, np.uint8)],
    "fraction": lambda good: [None, "x", np.nan, np.inf, -0.1, 1.1, np.zeros(3), 1j],
    "number": lambda good: [None, "x", np.zeros(3), 1j, object()],
    "positive": lambda good: [None, "x", np.nan, -1.0, np.zeros(3), 1j],
    "count": lambda good: [None, "x", 1.5, True, 0, -1, 2**70, np.zeros(2), -(2**63)],
    "seed": lambda good: ["x", 1.5, True, -1, 2**64, np.zeros(2)],
    "index": lambda good: [None, "x", 1.5, True, 10**6, -(10**6), 2**70],
    "indices": lambda good: [None, "x", good.astype(np.float64), np.full(good.shape, 10**6), np.full(good.shape, -1),
                             good[:-1], np.stack([good] * 2)],
    "priorities": lambda good: [None, "x", good * 1j, good[:-1], np.full(good.shape, np.nan), -good,
                                np.full(good.shape, np.inf)],
    # Rewards of a group of any size.
    "vector": lambda good: [None, "abc", object(), {}, np.array(["a"] * len(good)), good * 1j, 0.5,
                            np.stack([good] * 2)],
    "tokens": lambda good: [None, "abc", object(), 3, 1.5, [[0.5]], [None], ["a"], [[-1]], [[2**32]], [[1, 2**70]],
                            [np.zeros((2, 2), np.int64)], np.array([1.5]), np.array([-1])],
    "slots": lambda good: [None, "abc", object(), 3, good[0], good[None], good.astype(np.float64), good * 1j],
    "choice": lambda good: [None, "x", 0.5, -1, 10**6, 2**70, np.zeros(2)],
    "force": lambda good: [None, "x", np.nan, 1j, np.zeros(2), object()],
}  # fmt: skip

SINGLE = ("CartPole", "Acrobot", "MountainCar", "MountainCarContinuous", "Pendulum")
TIERS = {"hot_capacity": 4, "total_capacity": 16, "obs_dim": D, "act_dim": A}

# (name, factory of the callable, {argument: (kind, valid value)})
CASES = [
    ("compute_gae", lambda: rlox.compute_gae, {
        "rewards": ("array", f64(T)), "values": ("array", f64(T)), "dones": ("flags", flags(T)),
        "last_value": ("number", 0.5), "gamma": ("fraction", 0.9), "lam": ("fraction", 0.9)}),
    ("compute_gae_batched", lambda: rlox.compute_gae_batched, {
        "rewards": ("array", f64(N * T)), "values": ("array", f64(N * T)), "dones": ("flags", flags(N * T)),
        "last_values": ("array", f64(N)), "n_steps": ("count", T), "gamma": ("fraction", 0.9),
        "lam": ("fraction", 0.9)}),
    ("compute_gae_batched_f32", lambda: rlox.compute_gae_batched_f32, {
        "rewards": ("array", f32(N * T)), "values": ("array", f32(N * T)), "dones": ("flags", flags(N * T)),
        "last_values": ("array", f32(N)), "n_steps": ("count", T), "gamma": ("fraction", 0.9),
        "lam": ("fraction", 0.9)}),
    ("compute_vtrace", lambda: rlox.compute_vtrace, {
        "log_rhos": ("array", f32(T)), "rewards": ("array", f32(T)), "values": ("array", f32(T)),
        "dones": ("flags", flags(T)), "bootstrap_value": ("number", 0.5), "gamma": ("fraction", 0.9),
        "rho_bar": ("positive", 1.0), "c_bar": ("positive", 1.0)}),
    ("compute_group_advantages", lambda: rlox.compute_group_advantages, {"rewards": ("vector", f64(B))}),
    ("compute_batch_group_advantages", lambda: rlox.compute_batch_group_advantages, {
        "rewards": ("array", f64(N * B)), "group_size": ("count", B)}),
    *((name, lambda name=name: getattr(rlox, name), {
        "log_p": ("array", log_p(T, dtype=dtype)), "log_q": ("array", log_p(T, dtype=dtype))})
      for name, dtype in (("compute_token_kl", np.float64), ("compute_token_kl_schulman", np.float64),
                          ("compute_token_kl_f32", np.float32), ("compute_token_kl_schulman_f32", np.float32))),
    *((name, lambda name=name: getattr(rlox, name), {
        "log_p": ("array", log_p(T * N, dtype=dtype)), "log_q": ("array", log_p(T * N, dtype=dtype)),
        "seq_len": ("count", T)})
      for name, dtype in (("compute_batch_token_kl", np.float64), ("compute_batch_token_kl_schulman", np.float64),
                          ("compute_batch_token_kl_f32", np.float32),
                          ("compute_batch_token_kl_schulman_f32", np.float32))),
    ("pack_sequences", lambda: rlox.pack_sequences, {
        "sequences": ("tokens", [np.arange(3), np.arange(5)]), "max_length": ("count", 8)}),
    ("packed_attention_mask", lambda: rlox.packed_attention_mask, {
        "packed": ("slots", np.array([[0, 0, 1, -1]])), "causal": ("truth", True)}),
    ("RunningStatsVec", lambda: rlox.RunningStatsVec, {"dim": ("count", D)}),
    ("RunningStatsVec.update", lambda: stats_vec().update, {"values": ("array", f64(D))}),
    ("RunningStatsVec.batch_update", lambda: stats_vec().batch_update, {
        "data": ("array", f64(B * D)), "batch_size": ("count", B)}),
    ("RunningStats.update", lambda: rlox.RunningStats().update, {"value": ("number", 0.5)}),
    ("VecEnv", lambda: rlox.VecEnv, {"n": ("count", N), "seed": ("seed", 1)}),
    ("VecEnv.reset_all", lambda: rlox.VecEnv(N).reset_all, {"seed": ("seed", 1)}),
    ("VecEnv.step_all", lambda: rlox.VecEnv(N).step_all, {"actions": ("indices", np.array([0, 1, 0]))}),
    ("GridWorld", lambda: rlox.GridWorld, {"rows": ("count", 3), "cols": ("count", 4), "seed": ("seed", 1)}),
    *((env_id, lambda env_id=env_id: getattr(rlox, env_id), {"seed": ("seed", 1)}) for env_id in SINGLE),
    *((f"{env_id}.reset", lambda env_id=env_id: single(env_id).reset, {"seed": ("seed", 1)})
      for env_id in ("GridWorld", *SINGLE)),
    *((f"{env_id}.step", lambda env_id=env_id: single(env_id).step, {
        "action": ("force", 0.5) if env_id in ("Pendulum", "MountainCarContinuous") else ("choice", 1)})
      for env_id in ("GridWorld", *SINGLE)),
    ("ReplayBuffer", lambda: rlox.ReplayBuffer, {
        "capacity": ("count", 10), "obs_dim": ("count", D), "act_dim": ("count", A)}),
    ("ReplayBuffer.sample", lambda: replay().sample, {"batch_size": ("count", 4), "seed": ("seed", 1)}),
    ("ReplayBuffer.push", lambda: replay().push, {
        "obs": ("array", f32(D)), "action": ("number", 0.5), "reward": ("number", 1.0),
        "terminated": ("truth", False), "truncated": ("truth", False), "next_obs": ("array", f32(D))}),
    ("ReplayBuffer.push_batch", lambda: replay().push_batch, {
        "obs": ("array", f32(B, D)), "next_obs": ("array", f32(B, D)), "actions": ("array", f32(B, A)),
        "rewards": ("array", f32(B)), "terminated": ("flags", flags(B)), "truncated": ("flags", flags(B))}),
    ("PrioritizedReplayBuffer", lambda: rlox.PrioritizedReplayBuffer, {
        "capacity": ("count", 10), "obs_dim": ("count", D), "act_dim": ("count", A), "alpha": ("positive", 0.5),
        "beta": ("positive", 0.5)}),
    ("PrioritizedReplayBuffer.sample", lambda: prioritized().sample, {
        "batch_size": ("count", 4), "seed": ("seed", 1)}),
    ("PrioritizedReplayBuffer.set_beta", lambda: prioritized().set_beta, {"beta": ("positive", 0.5)}),
    ("PrioritizedReplayBuffer.update_priorities", lambda: prioritized().update_priorities, {
        "indices": ("indices", np.array([0, 2], np.uint64).astype(np.int64)),
        "priorities": ("priorities", np.array([0.5, 2.0]))}),
    ("MmapReplayBuffer", lambda: mapped, {
        "hot_capacity": ("count", 8), "total_capacity": ("count", 16), "obs_dim": ("count", D),
        "act_dim": ("count", A)}),
    ("MmapReplayBuffer.sample", lambda: filled(mapped(**TIERS)).sample, {
        "batch_size": ("count", 4), "seed": ("seed", 1)}),
    ("MmapReplayBuffer.push_batch", lambda: filled(mapped(**TIERS)).push_batch, {
        "obs": ("array", f32(B, D)), "next_obs": ("array", f32(B, D)), "actions": ("array", f32(B, A)),
        "rewards": ("array", f32(B)), "terminated": ("flags", flags(B)), "truncated": ("flags", flags(B))}),
    ("OfflineDatasetBuffer", lambda: rlox.OfflineDatasetBuffer, {
        "obs": ("array", f32(T, D)), "next_obs": ("array", f32(T, D)), "actions": ("array", f32(T, A)),
        "rewards": ("array", f32(T)), "terminated": ("flags", flags(T)), "truncated": ("flags", flags(T))}),
    ("OfflineDatasetBuffer.sample", lambda: offline().sample, {"batch_size": ("count", 4), "seed": ("seed", 1)}),
    ("OfflineDatasetBuffer.sample_trajectories", lambda: offline().sample_trajectories, {
        "batch_size": ("count", 4), "seq_len": ("count", 2), "seed": ("seed", 1)}),
    ("SequenceReplayBuffer", lambda: rlox.SequenceReplayBuffer, {
        "capacity": ("count", 64), "obs_dim": ("count", D), "act_dim": ("count", A)}),
    ("SequenceReplayBuffer.sample", lambda: sequences().sample, {
        "batch_size": ("count", 4), "seq_len": ("count", 3), "seed": ("seed", 1)}),
    ("ExperienceTable", lambda: rlox.ExperienceTable, {"obs_dim": ("count", D), "act_dim": ("count", A)}),
    ("ExperienceTable.push", lambda: table().push, {
        "obs": ("array", f32(D)), "action": ("number", 0.5), "reward": ("number", 1.0),
        "terminated": ("truth", False), "truncated": ("truth", False)}),
    ("VarLenStore.get", lambda: varlen().get, {"index": ("index", 0)}),
]  # fmt: skip
WRONG["truth"] = lambda good: ["x", 2.5, np.nan, 7, np.zeros(3)]


class Broken:
    """Every conversion of it fails, as that of a tensor or table of another library may."""

    def fail(self, *_, **__):
        raise RuntimeError("lost the connection")

    __array__ = __float__ = __index__ = __int__ = __bool__ = __len__ = __iter__ = __getitem__ = __repr__ = fail


# Values that no kind of argument accepts; conversions to C types fail on the integers.
HOSTILE = [Broken(), 10**400, -(10**400), [10**400], [Broken()], 10**60 * np.ones(2, object)]


# Where a message may name another argument: of two whose lengths differ, or the one that means the same.
OTHERS = {
    ("ReplayBuffer", "obs_dim"): "obs_shape",
    ("PrioritizedReplayBuffer", "obs_dim"): "obs_shape",
    ("ReplayBuffer.push_batch", "rewards"): "obs",
    ("OfflineDatasetBuffer", "rewards"): "obs",
    ("MmapReplayBuffer.push_batch", "rewards"): "obs",
    ("PrioritizedReplayBuffer.update_priorities", "indices"): "priorities",
}
# Kernels without arguments that can be wrong in these ways, and those whose errors other files test.
WITHOUT = {"Batch", "DPOPair", "NativeReward", "clean_cold_files"}


def test_every_public_kernel_has_a_case():
    modules = {name: getattr(getattr(rlox, name), "__module__", "") for name in rlox.__all__}
    public = {name for name, module in modules.items() if module.startswith("rlox.kernels")}
    assert {name.partition(".")[0] for name, _, _ in CASES} - {"VecEnv"} == public - WITHOUT


def wrong_cases():
    for name, make, arguments in CASES:
        for argument, (kind, good) in arguments.items():
            hostile = HOSTILE[1:] if kind == "tokens" else HOSTILE  # what cannot be iterated over says why itself
            for number, bad in enumerate([*WRONG[kind](good), *hostile]):
                yield pytest.param(name, make, arguments, argument, bad, id=f"{name}-{argument}-{number}")


@pytest.mark.parametrize(("name", "make", "arguments", "argument", "bad"), list(wrong_cases()))
def test_wrong_argument_is_named(name, make, arguments, argument, bad):
    call = {name: good for name, (_, good) in arguments.items()}
    # MemoryError: impossible sizes such as 2**70 transitions.
    with pytest.raises((ValueError, TypeError, IndexError, MemoryError)) as caught:
        make()(**{**call, argument: bad})
    named = re.search(rf"\b({argument}|{OTHERS.get((name, argument), argument)})\b", str(caught.value))
    assert named, caught.value
    assert len(str(caught.value)) < 1_000


@pytest.mark.parametrize(("name", "make", "arguments"), CASES, ids=[name for name, *_ in CASES])
def test_right_arguments_in_any_memory_layout(name, make, arguments):
    """Strided views, other byte orders and read-only arrays give the same results as contiguous copies."""
    call = {name: good for name, (_, good) in arguments.items()}
    expected = make()(**call)
    strided, readonly, swapped = dict(call), dict(call), dict(call)
    for argument, value in call.items():
        if isinstance(value, np.ndarray):
            doubled = np.repeat(value, 2, axis=0)
            strided[argument] = doubled[::2]
            assert not strided[argument].flags.c_contiguous or len(value) == 1
            readonly[argument] = value.copy()
            readonly[argument].flags.writeable = False
            swapped[argument] = value.astype(value.dtype.newbyteorder(">"))
    for form in (strided, readonly, swapped):
        same(make()(**form), expected)


def same(a, b):
    if isinstance(b, dict):
        assert set(a) == set(b)
        for key in b:
            same(a[key], b[key])
    elif isinstance(b, tuple):
        for x, y in zip(a, b, strict=True):
            same(x, y)
    elif isinstance(b, np.ndarray):
        np.testing.assert_array_equal(a, b)
    elif isinstance(b, float):
        assert a == b
