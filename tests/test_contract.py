"""What every online algorithm must do, whichever it is."""

from __future__ import annotations

import hashlib

import numpy as np
import probes
import pytest
import torch

from rlox.algorithms import ALGORITHMS, resolve
from rlox.callbacks import EvalCallback
from rlox.config import OffPolicyConfig

# Those that have a native path run by PyTorch once more.
BY_TORCH = [f"{name}-torch" for name, entry in ALGORITHMS.items() if hasattr(resolve(entry.cls), "update_native")]
NAMES = [*ALGORITHMS, *BY_TORCH]


def entry(name):
    return ALGORITHMS[name.removesuffix("-torch")]


KINDS = {
    "CartPole-v1": "discrete",
    "Acrobot-v1": "discrete",
    "Pendulum-v1": "continuous",
    "MountainCarContinuous-v0": "continuous",
}
# Settings that let any of them finish a test in a second.
ON_POLICY = {"n_steps": 16, "hidden_sizes": [16, 16]}
OFF_POLICY = {
    "learning_starts": 40,
    "train_freq": 8,
    "gradient_steps": 2,
    "batch_size": 16,
    "buffer_size": 10_000,
    "hidden_sizes": [16, 16],
}

# What makes values settle within a few seconds, and be sums of rewards alone.
BOOTSTRAP = {
    "dqn": {"target_update_freq": 50},
    "sac": {"tau": 0.05, "auto_entropy": False, "ent_coef": 0.0},
    "td3": {"tau": 0.05},
}


def off_policy(name) -> bool:
    return issubclass(resolve(entry(name).config), OffPolicyConfig)


def takes(kind) -> list[str]:
    """The algorithms whose actions may be of this kind."""
    return [name for name in NAMES if kind in resolve(entry(name).cls).actions]


def pairs(*envs) -> list[tuple[str, str]]:
    return [(name, env) for env in envs for name in takes(KINDS[env])]


def make(name, env="CartPole-v1", on=None, off=None, **kwargs):
    """The algorithm, small; `on` and `off` are settings of one family alone."""
    if env == "CartPole-v1" and name not in takes("discrete"):
        env = "Pendulum-v1"
    family = {**OFF_POLICY, **(off or {})} if off_policy(name) else {**ON_POLICY, **(on or {})}
    if name in BY_TORCH:
        kwargs["backend"] = "torch"
    return resolve(entry(name).cls)(env, **{"n_envs": 4, "seed": 1, **family, **kwargs})


def fingerprint(algorithm) -> str:
    digest = hashlib.sha256()
    parts = [algorithm.policy.state_dict(), algorithm.optimizer.state(), *algorithm._own_state()[1].values()]
    for array in (array for part in parts for array in part.values()):
        digest.update(np.ascontiguousarray(array))
    return digest.hexdigest()


def bring_memory(saved, loaded, folder):
    """The replay memory, if there is one, as a run keeps it beside the checkpoint."""
    if off_policy(saved.name):
        saved.save_buffer(folder / "a.memory")
        loaded.load_buffer(folder / "a.memory")


@pytest.mark.parametrize(("name", "env"), pairs(*KINDS))
def test_builds_and_predicts(name, env):
    algorithm = make(name, env)
    spec = algorithm.spec
    for deterministic in (True, False):
        one = algorithm.predict(np.zeros(spec.obs_dim), deterministic)
        many = algorithm.predict(np.zeros((5, spec.obs_dim), np.float32), deterministic)
        if spec.discrete:
            assert isinstance(one, int)
            assert 0 <= one < spec.n_actions
            assert many.shape == (5,)
            assert many.dtype == np.int64
        else:
            assert one.shape == (spec.act_dim,)
            assert many.shape == (5, spec.act_dim)
            assert one.dtype == np.float32
            assert (many >= spec.act_low).all()
            assert (many <= spec.act_high).all()
    with pytest.raises(ValueError, match="obs must have shape"):
        algorithm.predict(np.zeros(spec.obs_dim + 1))


@pytest.mark.parametrize(("name", "env"), pairs("CartPole-v1", "Pendulum-v1"))
def test_one_update_moves_every_trainable_parameter_and_no_frozen_one(name, env):
    algorithm = make(name, env)
    policy = algorithm.policy
    frozen, parameter = next((key, p) for key, p in policy.named_parameters() if key.endswith("bias"))
    parameter.requires_grad_(False)
    every = {"policy_delay": 1} if name.startswith("td3") else {}
    off = {"learning_starts": 0, "train_freq": 1, "gradient_steps": 1, **every}
    algorithm = make(name, env, policy=policy, off=off)
    before = {key: value.clone() for key, value in policy.state_dict().items()}
    metrics = algorithm.train(1)
    assert algorithm.counters.updates == 1
    for key, value in policy.state_dict().items():
        assert torch.equal(value, before[key]) is (key == frozen), key
    losses = {key: value for key, value in metrics.items() if key.endswith("loss")}
    assert losses
    assert np.isfinite(list(losses.values())).all()


@pytest.mark.parametrize(("name", "env"), pairs("CartPole-v1", "Pendulum-v1", "Acrobot-v1"))
def test_same_seed_same_training_bit_for_bit(name, env):
    first, second, other = (make(name, env, seed=s) for s in (3, 3, 4))
    for algorithm in (first, second, other):
        algorithm.train(200)
    assert fingerprint(first) == fingerprint(second) != fingerprint(other)


@pytest.mark.parametrize("name", NAMES)
def test_torch_generator_and_thread_count_are_the_users(name):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.manual_seed(11)
        before = torch.get_rng_state()
        make(name).train(100)
        assert torch.get_num_threads() == 2
        assert torch.equal(torch.get_rng_state(), before)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(("name", "env"), pairs("CartPole-v1", "Pendulum-v1"))
def test_save_load_continues_exactly(name, env, tmp_path):
    """N + N steps through a checkpoint end in the same bits as N + N steps without one."""
    straight, saved = make(name, env), make(name, env)
    straight.train(320)
    saved.train(320)
    saved.save(tmp_path / "a.safetensors")
    loaded = type(saved).from_checkpoint(tmp_path / "a.safetensors")
    bring_memory(saved, loaded, tmp_path)
    assert loaded.backend == straight.backend
    assert fingerprint(loaded) == fingerprint(straight)
    assert loaded.counters == straight.counters
    expected, metrics = straight.train(320), loaded.train(320)
    assert fingerprint(loaded) == fingerprint(straight)
    same = {key for key in expected if not key.startswith("time/")}
    assert {k: expected[k] for k in same} == pytest.approx({k: metrics[k] for k in same}, abs=0, nan_ok=True)


@pytest.mark.parametrize("name", NAMES)
def test_evaluation_does_not_disturb_training(name):
    plain, watched = make(name), make(name, callbacks=[EvalCallback(n_points=7, n_episodes=3)])
    plain.train(1000)
    watched.train(1000)
    assert fingerprint(plain) == fingerprint(watched)
    assert len(watched.callbacks.callbacks[0].evaluations) == 7


@pytest.mark.parametrize("name", takes("discrete"))
def test_solves_the_discrete_probe(name):
    algorithm = make(name, probes.MatchTheSign, on={"n_steps": 32}, n_envs=8, learning_rate=1e-2, gamma=0.9)
    algorithm.train(8_000 if not off_policy(name) else 3_000)
    assert algorithm.evaluate(50).returns.mean() == 1.0
    assert algorithm.predict([1.0]) == 1
    assert algorithm.predict([-1.0]) == 0


@pytest.mark.parametrize("name", takes("continuous"))
def test_solves_the_continuous_probe(name):
    algorithm = make(name, probes.ReachTheTarget, on={"ent_coef": 0.0}, n_envs=8, learning_rate=3e-3, gamma=0.9)
    algorithm.train(60_000 if not off_policy(name) else 8_000)
    assert algorithm.evaluate(50).returns.mean() > -0.02  # acting 0 gives -0.21


@pytest.mark.parametrize("name", takes("multi-discrete"))
def test_solves_the_multi_discrete_probe(name):
    algorithm = make(name, probes.TwoSwitches, n_envs=8, learning_rate=3e-3, gamma=0.9)
    algorithm.train(20_000)
    assert algorithm.evaluate(50).returns.mean() == 1.0
    assert algorithm.predict([1.0]).tolist() == [1, 2]
    assert algorithm.predict([[1.0], [-1.0]]).tolist() == [[1, 2], [0, 2]]


@pytest.mark.parametrize("name", takes("discrete"))
def test_solves_the_image_probe(name):
    settings = {"n_envs": 8, "learning_rate": 1e-3, "gamma": 0.9, "hidden_sizes": []}
    off = {"batch_size": 64, "gradient_steps": 1, "buffer_size": 1_000}
    algorithm = make(name, probes.BrightSide, on={"n_steps": 8}, off=off, **settings)
    algorithm.train(3_000 if not off_policy(name) else 1_500)
    assert algorithm.evaluate(30).returns.mean() > 0.95


@pytest.mark.parametrize("name", takes("discrete"))
def test_images_are_not_normalised_twice(name):
    with pytest.raises(ValueError, match="normalize_obs must be false for images"):
        make(name, probes.BrightSide, normalize_obs=True)


@pytest.mark.parametrize("name", NAMES)
def test_value_learns_one_over_one_minus_gamma_under_a_time_limit(name):
    gamma, continuous = 0.8, name not in takes("discrete")
    algorithm = make(
        name,
        lambda: probes.ConstantReward(5, continuous),
        on={"ent_coef": 0.0},
        n_envs=8,
        gamma=gamma,
        learning_rate=1e-2 if not off_policy(name) else 3e-3,
        **BOOTSTRAP.get(name.removesuffix("-torch"), {}),
    )
    algorithm.train(20_000 if not off_policy(name) else 6_000)
    obs = torch.zeros(1, 1)
    with torch.no_grad():
        if hasattr(algorithm, "critics"):
            values = algorithm.critics(obs, algorithm.policy.unit_mode(obs))
        else:
            values = (algorithm.policy if off_policy(name) else algorithm.policy.get_value)(obs)
    # Q of all actions, of both critics, or V; with a time limit for a termination it would be 1 + ... + 0.8^4 = 3.4.
    np.testing.assert_allclose(values.numpy(), 1 / (1 - gamma), rtol=0.03)


@pytest.mark.parametrize("name", NAMES)
def test_nan_reward_stops_training_with_the_step(name):
    algorithm = make(name, lambda: probes.ExplodingReward(100, name not in takes("discrete")))
    with pytest.raises(FloatingPointError, match=r"became nan at step \d+"):
        algorithm.train(5000)
    assert algorithm.counters.env_steps < 1000


@pytest.mark.parametrize("name", NAMES)
def test_unknown_and_bad_hyper_parameters_are_refused(name):
    with pytest.raises(TypeError, match=r"unknown hyper-parameter 'gama'; did you mean 'gamma'"):
        make(name, gama=0.9)
    with pytest.raises(ValueError, match=r"gamma must be in \[0, 1\], got 1.5"):
        make(name, gamma=1.5)
    with pytest.raises(TypeError, match="gamma must be of type float, got 'high'"):
        make(name, gamma="high")
    with pytest.raises(ValueError, match="device must be one of auto, cpu, cuda"):
        make(name, device="gpu")
    with pytest.raises(TypeError, match=r"policy must be a torch\.nn\.Module"):
        make(name, policy="mlp")
    if len(resolve(entry(name).cls).actions) < 3:
        kinds = {"discrete": probes.MatchTheSign, "continuous": "Pendulum-v1", "multi-discrete": probes.TwoSwitches}
        for kind in set(kinds) - set(resolve(entry(name).cls).actions):
            with pytest.raises(ValueError, match=r"the environment's actions must be .*; .* ones are for A2C"):
                make(name, kinds[kind])
    with pytest.raises(ValueError, match="total_timesteps must be >= 1"):
        make(name).train(0)


@pytest.mark.parametrize(("name", "env"), [(n, e) for n, e in pairs("CartPole-v1", "Pendulum-v1") if n in BY_TORCH])
def test_both_backends_are_the_same_training(name, env):
    """The same numbers are drawn, and what is learned from them agrees to a float's rounding."""
    native, by_torch = make(name.removesuffix("-torch"), env), make(name, env)
    assert (native.backend, by_torch.backend) == ("native", "torch")
    a, b = native.train(320), by_torch.train(320)
    for (key, ours), theirs in zip(
        native.policy.state_dict().items(), by_torch.policy.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4, msg=key)
    assert native.counters == by_torch.counters
    assert native.rng.get_state() == by_torch.rng.get_state()
    assert native.collector.rng.get_state() == by_torch.collector.rng.get_state()
    assert set(a) == set(b)
    losses = [key for key in a if not key.startswith("time/")]
    assert {k: a[k] for k in losses} == pytest.approx({k: b[k] for k in losses}, rel=2e-2, abs=1e-3, nan_ok=True)


@pytest.mark.parametrize(("name", "env"), [(n, e) for n, e in pairs("CartPole-v1", "Pendulum-v1") if n in BY_TORCH])
@pytest.mark.parametrize("start", ["native", "torch"])
def test_a_checkpoint_moves_between_the_backends(name, env, start, tmp_path):
    """Moments, counters and generators go along, so that both continue alike."""
    straight = make(name.removesuffix("-torch"), env, backend=start)
    straight.train(192)
    straight.save(tmp_path / "a.safetensors")
    other = {"native": "torch", "torch": "native"}[start]
    moved = type(straight).from_checkpoint(tmp_path / "a.safetensors", backend=other)
    bring_memory(straight, moved, tmp_path)
    assert moved.backend == other
    assert fingerprint(moved) == fingerprint(straight)
    straight.train(128)
    moved.train(128)
    for ours, theirs in zip(moved.policy.parameters(), straight.policy.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", NAMES)
def test_trains_on_cuda(name):
    algorithm = make(name, device="cuda")
    algorithm.train(500)
    assert next(algorithm.policy.parameters()).is_cuda
    assert np.isfinite(algorithm.predict(np.zeros(algorithm.spec.obs_dim))).all()
