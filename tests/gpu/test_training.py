"""Every algorithm trains on the GPU as on the CPU, and continues from a checkpoint on either of them."""

import time

import numpy as np
import probes
import pytest
import textbook
import torch
from device_comparison import differing, require_close, weights
from small_algorithms import DISCRETE, OFFLINE, ONLINE, bring_memory, learner, make, of_sequences, off_policy, recorded

import rlox
from rlox.algorithms import ALGORITHMS, resolve
from rlox.checkpoint import load_checkpoint
from rlox.gpu.clock import UpdateClock
from rlox.multi_agent.scene import parallel_env

DATASETS = [(name, kind) for name in OFFLINE for kind in resolve(ALGORITHMS[name].cls).actions]


def small(name, device="cuda", **settings):
    if of_sequences(name):
        settings = {"precision": "float32", **settings}
    backend = {"backend": "torch"} if device == "cpu" else {}
    return make(name, device=device, **backend, **settings)


def n_steps(name, updates=2):
    """Environment steps with about as many rounds of updates; one for a world model.

    Its second update imagines rewards near 0 as differences of large numbers, of which rounding decides.
    """
    return 40 if of_sequences(name) else 40 + 8 * updates if off_policy(name) else 64 * updates


@pytest.mark.parametrize("name", [*ONLINE, *DISCRETE])
def test_training_equals_that_on_the_cpu(name):
    ours, theirs = small(name), small(name, "cpu")
    found, expected = ours.train(n_steps(name)), theirs.train(n_steps(name))
    assert ours.device == "cuda"
    assert all(p.is_cuda for p in ours.policy.parameters())
    assert ours.counters.updates == theirs.counters.updates > 0
    require_close(found, expected)
    obs = np.full((3, *ours.spec.obs_shape), 0.1, np.float32)
    np.testing.assert_allclose(ours.predict(obs), theirs.predict(obs), rtol=1e-3, atol=1e-4)
    assert np.shape(ours.predict(obs[0], deterministic=False)) == ours.spec.action_shape
    for deterministic in (True, False):
        assert np.isfinite(ours.evaluate(1, deterministic=deterministic).returns).all()


@pytest.mark.parametrize("name", [*ONLINE, *DISCRETE])
def test_resumes_exactly_on_the_gpu_and_closely_on_the_cpu(name, tmp_path):
    straight = small(name)
    straight.train(n_steps(name))
    straight.save(tmp_path / "a.safetensors")
    loaded = {
        device: type(straight).from_checkpoint(tmp_path / "a.safetensors", device=device) for device in ("cuda", "cpu")
    }
    for other in loaded.values():
        bring_memory(straight, other, tmp_path)
        assert not differing(weights(other), weights(straight))
    expected = straight.train(n_steps(name))
    found = {device: other.train(n_steps(name)) for device, other in loaded.items()}
    assert differing(weights(loaded["cuda"]), weights(straight)) == []
    require_close(found["cuda"], expected, rel=0, abs=0)
    if not of_sequences(name):
        require_close(found["cpu"], expected, rel=1e-2, abs=1e-3)


def test_auto_takes_the_gpu_for_large_networks_of_offline_algorithms():
    made = textbook.on_levers(rlox.TD3BC, hidden=1000)
    reason = "networks this large are faster on the GPU; the dataset is on the GPU"
    assert (made.device, made.backend, made.backend_reason) == ("cuda", "torch", reason)
    for options in ({"hidden": 1000, "backend": "native"}, {"hidden": 1000, "device": "cpu"}, {}):
        made = textbook.on_levers(rlox.TD3BC, **options)
        assert (made.device, made.backend) == ("cpu", "native")


def test_a_checkpoint_names_the_gpu(tmp_path):
    for device in ("cuda", "cpu"):
        ppo = small("ppo", device)
        ppo.save(tmp_path / "a.safetensors")
        versions = load_checkpoint(tmp_path / "a.safetensors").header["versions"]
        named = {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
        assert versions.items() >= named.items() if device == "cuda" else "gpu" not in versions
        assert ("cudnn" in versions) == (device == "cuda")


@pytest.mark.parametrize("name", ["ppo", "dqn", "sac"])
def test_a_run_of_the_kernels_continues_on_the_gpu(name, tmp_path):
    native = make(name)
    assert native.backend == "native"
    native.train(n_steps(name))
    native.save(tmp_path / "a.safetensors")
    moved = type(native).from_checkpoint(tmp_path / "a.safetensors", device="cuda")
    bring_memory(native, moved, tmp_path)
    assert (moved.backend, moved.device) == ("torch", "cuda")
    assert not differing(weights(native), {k: v for k, v in weights(moved).items() if k in weights(native)})
    require_close(moved.train(n_steps(name)), native.train(n_steps(name)), rel=1e-2, abs=1e-3)


@pytest.mark.parametrize(("name", "kind"), DATASETS)
def test_learns_from_a_dataset_as_on_the_cpu_and_resumes_exactly(name, kind, tmp_path):
    ours, theirs = learner(name, kind, device="cuda"), learner(name, kind, device="cpu", backend="torch")
    require_close(ours.train(10), theirs.train(10))
    assert all(p.is_cuda for p in ours.policy.parameters())
    ours.save(tmp_path / "a.safetensors")
    loaded = type(ours).from_checkpoint(tmp_path / "a.safetensors", recorded(kind), device="cuda")
    require_close(loaded.train(10), ours.train(10), rel=0, abs=0)
    assert differing(weights(loaded), weights(ours)) == []
    assert np.isfinite(ours.predict(np.zeros(1))).all()


@pytest.mark.parametrize(("name", "online"), [("td3_bc", "td3"), ("cql", "sac")])
def test_online_training_starts_from_an_offline_policy(name, online, tmp_path):
    offline = learner(name, device="cuda", act_high=2.0, normalize_obs=False)
    offline.train(5)
    offline.save(tmp_path / "a.safetensors")
    started = make(online, probes.ReachTheTarget, device="cuda")
    started.init_from(tmp_path / "a.safetensors")
    for ours, theirs in zip(started.policy.parameters(), offline.policy.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    started.train(56)


def test_learns_from_its_memory_and_a_dataset_together():
    sac = make("sac", probes.ReachTheTarget, device="cuda", dataset=recorded(), dataset_share=0.5)
    assert np.isfinite(sac.train(56)["q_loss"])


def narrow(name):
    """The settings of a preset of SAC, with small layers and without its number of updates."""
    chosen = rlox.preset(name)
    n_layers = 1 if chosen.get("residual_blocks") else 2
    return {**chosen, "gradient_steps": 1, "hidden_sizes": [16] * n_layers, "critic_hidden_sizes": [24] * n_layers}


SETTINGS = [
    ("ppo", {"normalize_obs": True, "normalize_rewards": True, "target_kl": 0.05}),
    ("ppo", {"clip_eps_schedule": "linear", "learning_rate_schedule": "linear", "clip_vf": 0.2}),
    ("a2c", {"learning_rate_schedule": "linear", "normalize_advantages": True}),
    ("dqn", {"prioritized": True, "n_step": 3, "dueling": True}),
    ("td3", {"normalize_obs": True, "exploration_noise": 0.1, "learning_rate_schedule": "linear"}),
    ("sac", {"prioritized": True, "learning_rate_schedule": "linear"}),
    *(("sac", narrow(name)) for name in ("crossq", "xqc", "flashsac", "redq", "tqc")),
]


@pytest.mark.parametrize(("name", "settings"), SETTINGS, ids=lambda x: x if isinstance(x, str) else "-".join([*x][:4]))
def test_options_work_as_on_the_cpu(name, settings):
    known = resolve(ALGORITHMS[name].config).__dataclass_fields__
    settings = {key: value for key, value in settings.items() if key in known or key in ("prioritized", "n_step")}
    n = n_steps(name, 3)
    require_close(small(name, **settings).train(n), small(name, "cpu", **settings).train(n), rel=5e-3, abs=5e-4)


def test_some_of_the_critics_of_images_make_the_target_as_on_the_cpu():
    settings = {"n_critics": 3, "n_target_critics": 2, "hidden_sizes": [8], "learning_starts": 8, "batch_size": 8}
    settings |= {"buffer_size": 32, "seed": 1}
    ours = rlox.SAC(probes.BrightSide, device="cuda", **settings)
    theirs = rlox.SAC(probes.BrightSide, device="cpu", **settings)
    require_close(ours.train(12), theirs.train(12), rel=5e-3, abs=5e-4)


def pursuit():
    return parallel_env("GridPursuit-v0")


@pytest.mark.parametrize("settings", [{"value_norm": True}, {"share_parameters": False, "self_play": True}])
def test_several_agents_on_the_host_train_and_resume(settings, tmp_path):
    """A minibatch is a whole rollout, whose order does not matter."""
    settings = {"n_envs": 2, "seed": 1, "n_steps": 16, "hidden_sizes": [8], "batch_size": 4096, **settings}
    env = "GridPursuit-v0" if "self_play" in settings else pursuit
    ours = rlox.MAPPO(env, n_agents=3, device="cuda", **settings)
    theirs = rlox.MAPPO(env, n_agents=3, device="cpu", backend="torch", **settings)
    assert "a kernel on the CPU collects" in ours.backend.reason
    require_close(ours.train(160), theirs.train(160), rel=1e-2, abs=1e-3)
    ours.save(tmp_path / "a.safetensors")
    loaded = rlox.MAPPO.from_checkpoint(tmp_path / "a.safetensors", env, n_agents=3, device="cuda")
    assert differing(weights(loaded), weights(ours)) == []
    ours.train(160)
    loaded.train(160)
    assert differing(weights(loaded), weights(ours)) == []


def test_updates_that_the_host_does_not_wait_for_count_as_updates():
    """Not as the collection that waits for them next."""
    clock = UpdateClock()
    x = torch.rand(1500, 1500, device="cuda")
    (x @ x).sum().item()
    started = time.perf_counter()
    with clock:
        for _ in range(20):
            x = x @ x / 1500
    handed_over = time.perf_counter() - started
    x.sum().item()
    total = time.perf_counter() - started
    collect_s, update_s = clock.divide(total - handed_over, handed_over)
    assert collect_s + update_s == pytest.approx(total)
    assert update_s > 0.5 * total
    assert clock.divide(1.0, 2.0) == (1.0, 2.0)


@pytest.mark.parametrize(
    ("name", "settings", "device"),
    [
        ("sac", {"hidden_sizes": [256, 256], "batch_size": 256}, "cuda"),
        ("sac", {"hidden_sizes": [64, 64], "batch_size": 256}, "cpu"),
        ("td3", {"hidden_sizes": [256, 256], "batch_size": 64}, "cpu"),
        ("dqn", {"hidden_sizes": [256, 256], "batch_size": 1024}, "cuda"),
        ("dqn", {"hidden_sizes": [256, 256], "batch_size": 1024, "backend": "native"}, "cpu"),
        ("dqn", {"hidden_sizes": [256, 256], "batch_size": 1024, "memory": "gru"}, "cpu"),
    ],
)
def test_off_policy_algorithms_are_on_the_gpu_where_an_update_is_large(name, settings, device):
    assert make(name, **settings).device == device
