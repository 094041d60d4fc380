"""Devices and data types. No GPU is needed: what the choice depends on is replaced through PyTorch's own functions."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import rlox
from rlox.algorithms import A2C, BC, CQL, DQN, IMPALA, IQL, MAPPO, PPO, SAC, TD3, TD3BC, DreamerV3
from rlox.checkpoint import load_checkpoint
from rlox.distributed.ranks import ALONE, Ranks
from rlox.gpu.devices import choose_device, device_for
from rlox.nn.compiling import CompiledLoss
from rlox.nn.modules import (
    computes_bfloat16,
    generator_states,
    load_weights_,
    own_gpu,
    set_generator_states,
)
from rlox.nn.optimizers import FlatOptimizer

ON = {"n_envs": 2, "n_steps": 16, "seed": 1, "hidden_sizes": [8]}
OFF = {"n_envs": 2, "learning_starts": 24, "batch_size": 8, "seed": 1, "hidden_sizes": [8]}
CASES = {
    "ppo": (PPO, "CartPole-v1", {**ON, "batch_size": 16}),
    "a2c": (A2C, "CartPole-v1", ON),
    "dqn": (DQN, "CartPole-v1", OFF),
    "sac": (SAC, "Pendulum-v1", OFF),
    "td3": (TD3, "Pendulum-v1", OFF),
}


class Own(nn.Module):
    """A custom policy in `dtype`, whose methods compute in bfloat16 if `casts`."""

    def __init__(self, dtype=torch.float32, casts=False):
        super().__init__()
        self.trunk, self.pi, self.v = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 2), nn.Linear(8, 1)
        self.dtype, self.casts = dtype, casts
        self.to(dtype)

    def outputs(self, obs):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.casts):
            features = self.trunk(obs.to(self.dtype))
            return torch.distributions.Categorical(logits=self.pi(features)), self.v(features).squeeze(-1)

    def get_action_and_logprob(self, obs):
        distribution = self.outputs(obs)[0]
        actions = distribution.sample()
        return actions, distribution.log_prob(actions)

    def get_value(self, obs):
        return self.outputs(obs)[1]

    def get_logprob_and_entropy(self, obs, actions):
        distribution = self.outputs(obs)[0]
        return distribution.log_prob(actions), distribution.entropy()

    def mode(self, obs):
        return self.outputs(obs)[0].logits.argmax(-1)


class Net(nn.Module):
    """A custom network with `n_out` outputs."""

    def __init__(self, n_in, n_out, dtype=torch.float32, casts=False, dropout=0.0):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(n_in, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, n_out)).to(dtype)
        self.dtype, self.casts = dtype, casts

    def forward(self, obs):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.casts):
            return self.layers(obs.to(self.dtype))


def own_policy(case, **kind):
    if case in ("ppo", "a2c"):
        return Own(**kind)
    return Net(*{"dqn": (4, 2), "sac": (3, 2), "td3": (3, 1)}[case], **kind)


def trained(case, steps=96, **options):
    cls, env, settings = CASES[case]
    algorithm = cls(env, **{**settings, **options})
    algorithm.train(steps)
    return algorithm


@pytest.fixture
def gpus(monkeypatch):
    """Let PyTorch report that many GPUs, with the ids that it is given."""

    def set_to(*ids):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(ids))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(ids))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        properties = [SimpleNamespace(uuid=id, major=7) for id in ids]
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: properties[i or 0])

    return set_to


# ---- the choice of the device


@pytest.mark.parametrize("size", [8, 640])
@pytest.mark.parametrize("case", ["dqn", "td3"])
def test_the_same_size_decides_on_backend_and_device(case, size, gpus, monkeypatch):
    gpus("a")
    monkeypatch.setattr(nn.Module, "to", lambda module, device: module)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 35, 1 << 35))
    cls, env, settings = CASES[case]
    size *= 2 if case != "td3" and size > 8 else 1  # TD3 has two critics of a policy's size
    made = cls(env, **{**settings, "hidden_sizes": [size, size]})
    on_gpu = made.backend_reason.startswith("networks this large are faster on the GPU")
    assert (made.device == "cuda") == on_gpu == (size > 8)
    explicit = cls(env, backend="torch", **{**settings, "hidden_sizes": [size, size]})
    assert explicit.device == made.device


def placed(*devices):
    """A module that reports that its parameters are on `devices`."""
    module = nn.Linear(1, len(devices))
    module.parameters = lambda: iter([SimpleNamespace(device=torch.device(one), numel=lambda: 1) for one in devices])
    return module


def test_auto_leaves_a_policy_on_the_gpu_where_its_creator_put_it(gpus):
    gpus("a", "b")
    assert device_for("auto", placed("cuda:0", "cuda:0"), "PPO") == "cuda"
    assert device_for("auto", placed("cpu"), "PPO") == "auto"
    assert device_for("cuda", placed("cpu"), "PPO") == "cuda"
    assert device_for("auto", None, "PPO") == "auto"
    with pytest.raises(ValueError, match=r"current GPU, cuda:0, got cuda:1; call torch.cuda.set_device\(1\)"):
        device_for("auto", placed("cuda:1"), "PPO")
    with pytest.raises(ValueError, match="be on one device, got cpu, cuda:0"):
        device_for("auto", placed("cuda:0", "cpu"), "PPO")


def test_a_policy_without_values_is_an_error():
    with pytest.raises(ValueError, match="the parameters of policy must have values and be on one device, got meta"):
        PPO("CartPole-v1", policy=Own().to("meta"))


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (["ab", "ab"], [0, 1]),
        (["a", "b"], [0, 0]),  # a launcher shows each rank another GPU
        (["a", "a"], [None, None]),
        (["", ""], [None, None]),
        (["ab", ""], [None, None]),  # one machine has no GPU
        (["ab", "ab", "ab"], [None, None, None]),
    ],
)
def test_ranks_use_gpus_only_if_each_has_its_own(visible, expected, gpus):
    store, answers = torch.distributed.HashStore(), {}
    for rank, ids in reversed([*enumerate(visible)]):
        gpus(*ids)
        n = torch.cuda.device_count()
        store.set(f"gpu{rank}", torch.cuda.get_device_properties(rank % n).uuid if n else "")
    for rank, ids in enumerate(visible):
        gpus(*ids)
        answers[rank] = own_gpu(store, rank, len(visible), rank)
    assert [answers[rank] for rank in range(len(visible))] == expected


def test_ranks_wait_for_each_others_gpus():
    store, answers = torch.distributed.HashStore(), {}

    def join(rank):
        answers[rank] = own_gpu(store, rank, 3, rank)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(answers) == 3


def test_more_ranks_than_gpus_train_on_the_cpu_or_are_refused(gpus):
    class Two(Ranks):
        rank, size = 1, 2

        def has_gpu(self):
            return False

    gpus("a")
    small, large = nn.Linear(2, 2), nn.Linear(1000, 1000)
    assert choose_device("cpu", large, "PPO", Two()) == choose_device("auto", small, "PPO", Two()) == "cpu"
    for device, policy in (("cuda", small), ("auto", large)):
        with pytest.raises(ValueError, match=rf"device={device} needs a GPU for each of the 2 ranks; .*GPUs \(1;"):
            choose_device(device, policy, "PPO", Two())
        assert choose_device(device, policy, "PPO", ALONE) == "cuda"


@pytest.mark.parametrize("major", [7, 8])
def test_emulated_bfloat16_does_not_count(major, gpus, monkeypatch):
    gpus("a")
    torch.cuda.get_device_properties(0).major = major
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "_check_bf16_tensor_supported", lambda device: True)
    assert computes_bfloat16() == (major == 8)


# ---- the process's own settings


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_default_device_of_the_process_does_not_matter(case):
    plain = trained(case, backend="torch", device="cpu")
    torch.set_default_device("meta")
    try:
        other = trained(case, backend="torch", device="cpu")
    finally:
        torch.set_default_device(None)
    for p, q in zip(plain.policy.parameters(), other.policy.parameters(), strict=True):
        assert torch.equal(p, q)


@contextmanager
def computing_only(inference):
    """A calling program that computes in double precision and never learns."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode() if inference else torch.no_grad():
            yield
    finally:
        torch.set_default_dtype(before)


def offline(cls):
    rng = np.random.default_rng(0)
    obs, actions, over = rng.normal(size=(64, 3)), rng.uniform(-2, 2, size=(64, 1)), np.arange(64) % 8 == 7
    data = rlox.OfflineDatasetBuffer(obs, obs, actions, obs[:, 0], over, np.zeros(64, bool))
    settings = {"env_id": "Pendulum-v1", "act_low": -2.0, "act_high": 2.0, "hidden_sizes": [8], "batch_size": 8}
    return cls(data, 3, act_dim=1, seed=1, backend="torch", **settings)


DREAMER = {
    "n_envs": 4,
    "learning_starts": 40,
    "replay_ratio": 4.0,
    "batch_size": 4,
    "seq_len": 4,
    "deter_dim": 16,
    "hidden_dim": 8,
    "stoch_dim": 2,
    "stoch_classes": 4,
    "imagination_horizon": 3,
    "warmup_updates": 0,
    "seed": 1,
}
LEARNERS = {
    **{case: lambda case=case: CASES[case][0](CASES[case][1], **CASES[case][2], backend="torch") for case in CASES},
    "kernel": lambda: PPO("CartPole-v1", **ON),
    "impala": lambda: IMPALA("Pendulum-v1", **ON),
    "mappo": lambda: MAPPO("CartPole-v1", **ON, backend="torch", value_norm=True),
    "dreamer": lambda: DreamerV3("CartPole-v1", **DREAMER),
    **{cls.name: lambda cls=cls: offline(cls) for cls in (BC, CQL, IQL, TD3BC)},
}


@pytest.mark.slow
@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("case", LEARNERS)
def test_gradients_and_data_type_of_the_process_do_not_matter(case, inference):
    def learned():
        algorithm = LEARNERS[case]()
        algorithm.train(16 if algorithm.collector is None else 64)
        obs = np.full(algorithm.spec.obs_dim, 0.1)
        actions = [algorithm.predict(obs), algorithm.predict([obs, obs], deterministic=False)]
        found = [p.numpy(force=True) for p in algorithm.policy.parameters()]
        return [*found, actions[0], algorithm.evaluate(1, seed=3).returns]

    expected = learned()
    with computing_only(inference):
        found = learned()
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == (False, inference)
        assert torch.get_default_dtype() == torch.float64
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one, other)


# ---- random numbers


@pytest.mark.slow
@pytest.mark.parametrize("case", ["ppo", "dqn", "sac"])
def test_a_custom_module_that_draws_random_numbers_is_resumed_exactly(case, tmp_path):
    path = tmp_path / "a.safetensors"

    def policy():
        return Own() if case == "ppo" else own_policy(case, dropout=0.5)

    torch.manual_seed(0)
    whole = trained(case, policy=policy())
    whole.save(path, memory=True)
    whole.train(48)
    loaded = type(whole).from_checkpoint(path, policy=policy())
    loaded.train(48)
    for p, q in zip(whole.policy.parameters(), loaded.policy.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_checkpoint_holds_the_gpus_generator_too(monkeypatch):
    states = [torch.arange(16, dtype=torch.uint8)]
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: states[-1])
    monkeypatch.setattr(torch.cuda, "set_rng_state", states.append)
    assert set(generator_states("cpu")) == {"torch"}
    saved = generator_states("cuda")
    drawn = torch.rand(3)
    set_generator_states(saved, "cuda")
    assert torch.equal(torch.rand(3), drawn)
    assert torch.equal(states[1], states[0])
    set_generator_states(saved, "cpu")
    assert len(states) == 2


# ---- data types


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_float64_parameters_are_clipped_and_stepped_as_by_pytorch(weight_decay):
    torch.manual_seed(0)
    ours, theirs = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()
    theirs.load_state_dict(ours.state_dict())
    made = FlatOptimizer(ours.parameters(), 0.01, eps=1e-8, weight_decay=weight_decay)
    adam = torch.optim.AdamW(theirs.parameters(), 0.01, eps=1e-8, weight_decay=weight_decay)
    for _ in range(5):
        x = torch.randn(4, 3, dtype=torch.float64)
        norm = made.step(ours(x).square().sum(), 0.5)
        adam.zero_grad()
        theirs(x).square().sum().backward()
        assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)), rel=1e-12)
        adam.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [{"dtype": torch.float64}, {"casts": True}])
@pytest.mark.parametrize("case", CASES)
def test_custom_policies_may_compute_in_other_data_types(case, kind, tmp_path):
    algorithm = trained(case, policy=own_policy(case, **kind), max_grad_norm=0.5)
    before = [p.detach().clone() for p in algorithm.policy.parameters()]
    algorithm.train(96)
    assert all(torch.isfinite(p).all() for p in algorithm.policy.parameters())
    assert any((p != q).any() for p, q in zip(algorithm.policy.parameters(), before, strict=True))
    obs = np.zeros((3, *algorithm.spec.obs_shape), np.float32)
    algorithm.save(tmp_path / "a.safetensors")
    loaded = type(algorithm).from_checkpoint(tmp_path / "a.safetensors", policy=own_policy(case, **kind))
    np.testing.assert_array_equal(loaded.predict(obs), algorithm.predict(obs))


def test_parameters_in_half_precision_are_errors():
    for case in ("ppo", "dqn"):
        with pytest.raises(ValueError, match=r"must be float32 or float64, got torch.bfloat16.*with torch.autocast"):
            trained(case, policy=own_policy(case, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"policy must be in float32, as observations are, got torch.float64"):
        trained("ppo", policy=rlox.DiscretePolicy(4, 2, 8).double())


def test_frozen_weights_in_bfloat16_are_saved(tmp_path):
    class Frozen(Own):
        def __init__(self):
            super().__init__(casts=True)
            self.trunk.requires_grad_(False).to(torch.bfloat16)

        def outputs(self, obs):
            features = self.trunk(obs.bfloat16()).float()
            return torch.distributions.Categorical(logits=self.pi(features)), self.v(features).squeeze(-1)

    algorithm = trained("ppo", policy=Frozen())
    algorithm.save(tmp_path / "a.safetensors")
    loaded = PPO.from_checkpoint(tmp_path / "a.safetensors", policy=Frozen())
    for p, q in zip(algorithm.policy.parameters(), loaded.policy.parameters(), strict=True):
        assert torch.equal(p, q)
        assert p.dtype == q.dtype


# ---- memory


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_compiled_loss_reports_that_memory_is_full(wrapped, monkeypatch):
    calls = []

    def fail(*arguments):
        full = torch.OutOfMemoryError("CUDA out of memory")
        if wrapped:
            raise RuntimeError("backend='inductor' raised") from full
        raise full

    monkeypatch.setattr(torch, "compile", lambda loss, **options: fail)
    with pytest.raises(RuntimeError, match=r"out of memory|inductor"):
        CompiledLoss(lambda x: calls.append(x) or (x.sum(), {}), False)(torch.zeros(3))
    assert not calls


def test_full_memory_is_no_damaged_checkpoint(tmp_path):
    class Full(Own):
        def load_state_dict(self, *args, **kwargs):
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        load_weights_(Full(), {}, "the policy")
    path = tmp_path / "a.safetensors"
    PPO("CartPole-v1", policy=Own(), **ON).save(path)
    with pytest.raises(torch.OutOfMemoryError):
        PPO.from_checkpoint(path, policy=Full())


def test_settings_of_a_gpu_change_nothing_on_the_cpu_and_say_so(command, tmp_path):
    words = ("train", "algo=ppo", "env=CartPole-v1", "logger=none", "tuned=off", "total_timesteps=256", "device=cpu")
    code, out, _ = command(*words, "hydra.run.dir=a", "deterministic=true", "matmul_precision=high")
    assert not code
    assert "deterministic: nothing to do on the CPU, where the same seed always gives the same bits" in out
    assert "matmul_precision: high is for a GPU; the CPU computes in float32" in out
    code, out, _ = command(*words, "hydra.run.dir=b")
    assert "deterministic" not in out
    one, other = (load_checkpoint(tmp_path / name / "checkpoints" / "last.safetensors") for name in "ab")
    assert "numerics" not in one.header
    for name, array in one.tensors["policy"].items():
        np.testing.assert_array_equal(array, other.tensors["policy"][name])
    code, _, err = command(*words, "hydra.run.dir=c", "matmul_precision=hihg")
    assert code == 2
    assert "matmul_precision must be one of highest, high, medium, got 'hihg'" in err
