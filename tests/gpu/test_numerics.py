"""How the GPU computes: TF32, bfloat16 and deterministic algorithms; what is recorded of it, and its memory."""

import json

import numpy as np
import pytest
import torch
import yaml
from device_comparison import require_close, weights
from small_algorithms import make
from small_language_models import make as make_language_model

from rlox.checkpoint import load_checkpoint
from rlox.config import PrioritizedBufferConfig
from rlox.envs.tensor.sums import cumulative_sums
from rlox.gpu import numerics
from rlox.gpu.numerics import set_numerics

TRAIN = (
    *("train", "algo=ppo", "env=CartPole-v1", "device=cuda", "logger=none", "tuned=off", "hydra.run.dir=run"),
    *("algo.n_steps=16", "algo.hidden_sizes=[8]", "eval.n_episodes=1", "eval.n_points=0", "total_timesteps=256"),
)


@pytest.fixture(autouse=True)
def _settings_are_restored(monkeypatch):
    monkeypatch.setenv(numerics.WORKSPACE, ":4096:8")
    yield
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_run_records_how_its_gpu_computed(command, tmp_path):
    code, out, err = command(*TRAIN, "matmul_precision=high", "deterministic=true", "algo.precision=bfloat16")
    assert not code, err
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    assert f"device: {torch.cuda.get_device_name()}, compute capability {capability}" in out
    assert "precision: matrix products in TF32; losses in bfloat16; deterministic algorithms" in out
    computed = {"precision": "bfloat16", "matmul_precision": "high", "deterministic": "true"}
    header = load_checkpoint(tmp_path / "run" / "checkpoints" / "last.safetensors").header
    assert header["numerics"] == computed
    assert header["versions"]["compute_capability"] == capability
    start = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert start["versions"].items() >= {**computed, "gpu": torch.cuda.get_device_name()}.items()
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (config["matmul_precision"], config["deterministic"]) == ("high", True)
    assert config["algo"]["precision"] == "bfloat16"
    code, out, err = command("train", "resume=run", "total_timesteps=512")
    assert not code, err
    assert "deterministic algorithms" in out
    assert load_checkpoint(tmp_path / "run" / "checkpoints" / "last.safetensors").header["numerics"] == computed


@pytest.mark.parametrize("name", ["ppo", "sac", "dqn"])
def test_losses_in_bfloat16_train_float32_weights(name):
    half, whole = (make(name, device="cuda", precision=one) for one in ("bfloat16", "float32"))
    n = 64 * 2 if name in ("ppo", "a2c") else 40 + 16
    metrics = half.train(n), whole.train(n)
    assert "losses in bfloat16" in half.backend_reason
    assert all(np.isfinite(value) for key, value in metrics[0].items() if key.endswith("loss"))
    assert {x.dtype for x in weights(half).values()} == {x.dtype for x in weights(whole).values()}
    moved = np.concatenate([(weights(half)[key] - x).reshape(-1) for key, x in weights(whole).items()])
    assert 0 < np.abs(moved).max() < 0.05  # other bits, but the same direction


def test_auto_is_bfloat16_on_the_gpu_and_float32_on_the_cpu():
    assert make("ppo", device="cuda", precision="auto").backend.casts
    assert not make("ppo", device="cpu", precision="auto").backend.casts
    with pytest.raises(ValueError, match=r"PPO: precision must be float32 or auto on the CPU, got bfloat16"):
        make("ppo", device="cpu", precision="bfloat16")


@pytest.mark.parametrize("name", ["ppo", "dqn", "dreamer", "grpo"])
def test_deterministic_trainings_need_no_operation_that_adds_in_any_order(name):
    build = make_language_model if name == "grpo" else make
    kind = {"precision": "float32"} if name in ("dreamer", "grpo") else {}
    kind |= {"off": {"buffer": PrioritizedBufferConfig(size=1000), "buffer_size": None}} if name == "dqn" else {}
    results = []
    for deterministic in (True, False):
        with set_numerics("highest", deterministic):
            one = build(name, device="cuda", **kind)
            results.append(one.train({"grpo": 1, "dreamer": 40, "dqn": 64}.get(name, 2 * 64)))
            one.close()
    require_close(*results)


def test_an_operation_without_a_deterministic_version_is_named():
    x = torch.rand(50, device="cuda")
    expected = x.double().cpu().numpy().cumsum()
    with set_numerics("highest", True):
        np.testing.assert_allclose(cumulative_sums(x.double()).cpu().numpy(), expected, rtol=1e-14)
    named = r"deterministic=true: kthvalue CUDA has no deterministic version"
    with pytest.raises(RuntimeError, match=named), set_numerics("highest", True):
        x.kthvalue(3)
    with pytest.raises(RuntimeError, match="of another kind"), set_numerics("highest", True):
        raise RuntimeError("of another kind")


def test_deterministic_products_need_their_memory_from_the_start(monkeypatch):
    torch.zeros(1, device="cuda")
    numerics.prepare_deterministic()
    monkeypatch.setenv(numerics.WORKSPACE, ":0:0")
    with pytest.raises(ValueError, match=r"CUBLAS_WORKSPACE_CONFIG must be :4096:8 or :16:8"):
        numerics.prepare_deterministic()
    monkeypatch.delenv(numerics.WORKSPACE)
    with pytest.raises(ValueError, match="this one has used it already"):
        numerics.prepare_deterministic()


def test_check_knows_the_memory_of_the_gpu(command, monkeypatch):
    code, out, err = command(*TRAIN, "env.n_envs=4096", "env.backend=tensor", "--check")
    assert not code, err
    (line,) = [line for line in out.splitlines() if line.startswith("  GPU memory")]
    assert "rollout" in line
    assert "networks" in line
    assert f"  device       {torch.cuda.get_device_name()}" in out
    assert "the GPU's memory" not in out

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (4 << 20, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    code, out, err = command(*TRAIN, "env.n_envs=4096", "env.backend=tensor", "--check")
    assert not code, err
    text = " ".join(out.split())
    assert "the GPU's memory will run out: the training takes at least" in text
    assert "4.0 MiB are free; lower env.n_envs or algo.n_steps" in text


def test_the_parts_of_the_memory_are_counted():
    from rlox_cli.families.gpu_memory import count_parts

    class Run:
        def __init__(self, agent, n_envs):
            self.algo, self.env = agent.config, type("Env", (), {"n_envs": n_envs})

    sac = make("sac", device="cuda")
    sac.train(48)
    parts = count_parts(sac, Run(sac, 8))
    assert parts["replay memory"] == sac.buffer.nbytes
    policy, critics = (sum(p.numel() for p in module.parameters()) for module in (sac.policy, sac.critics))
    needed = 4 * (4 * (policy + critics) + critics)  # weights, gradients, two moments; the targets' weights
    assert needed <= parts["networks"] < 1.1 * needed
