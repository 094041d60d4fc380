"""Requirements for all algorithms: first the online algorithms, then those that learn from a dataset."""

from __future__ import annotations

import math
import time

import numpy as np
import probes
import pytest
import torch
from small_algorithms import (
    BY_TORCH,
    NAMES,
    OFF_POLICY,
    OFFLINE,
    bring_memory,
    entry,
    fingerprint,
    learner,
    make,
    of_sequences,
    off_policy,
    recorded,
    steps,
    takes,
)

import rlox
from rlox.algorithms import ALGORITHMS, resolve
from rlox.callbacks import Callback, EvalCallback
from rlox.callbacks.loggers import LoggerCallback
from rlox.nn.actors import LOG_STD_RANGE

KINDS = {
    "CartPole-v1": "discrete",
    "Acrobot-v1": "discrete",
    "Pendulum-v1": "continuous",
    "MountainCarContinuous-v0": "continuous",
}
# With these settings values converge within a few seconds, and are sums of rewards alone.
BOOTSTRAP = {
    "dqn": {"target_update_freq": 50},
    **{name: {"tau": 0.05, "auto_entropy": False, "ent_coef": 0.0} for name in ("sac", "sac-discrete")},
    "td3": {"tau": 0.05},
}


def of_steps(names) -> list[str]:
    """The names without world models, whose probes are in tests/algorithms/test_dreamer.py."""
    return [name for name in names if not of_sequences(name)]


def without_native(kind, often) -> list:
    """Each algorithm once, for environments without a native path: with PyTorch the training would be the same.

    The algorithms in `often` run by default. Each algorithm is in it for at least one kind.
    """
    names = [name for name in of_steps(takes(kind)) if name not in BY_TORCH]
    return [pytest.param(name, marks=() if name in often else pytest.mark.exhaustive) for name in names]


def natively(names) -> list:
    """Of the PyTorch variants, only one of each family runs by default: other tests compare the two backends."""
    often = [name for name in names if name not in BY_TORCH or name in ("ppo-torch", "dqn-torch")]
    return [pytest.param(name, marks=() if name in often else pytest.mark.exhaustive) for name in names]


def pairs(*envs) -> list[tuple[str, str]]:
    return [(name, env) for env in envs for name in takes(KINDS[env])]


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
    off = {"learning_starts": 0, "train_freq": 1, "gradient_steps": 1, "replay_ratio": 4.0, **every}
    known = resolve(entry(name).config).__dataclass_fields__
    algorithm = make(name, env, policy=policy, off={key: value for key, value in off.items() if key in known})
    before = {key: value.clone() for key, value in policy.state_dict().items()}
    # A world model updates only when each of the four environments has a complete sequence.
    metrics = algorithm.train(16 if of_sequences(name) else 1)
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
        algorithm.train(steps(name, 200))
        assert algorithm.counters.updates > 0
    assert fingerprint(first) == fingerprint(second) != fingerprint(other)


@pytest.mark.parametrize("name", NAMES)
def test_training_keeps_torchs_generator_and_thread_count(name):
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
    n = steps(name, 320)
    straight.train(n)
    saved.train(n)
    saved.save(tmp_path / "a.safetensors")
    loaded = type(saved).from_checkpoint(tmp_path / "a.safetensors")
    bring_memory(saved, loaded, tmp_path)
    assert loaded.backend == straight.backend
    assert fingerprint(loaded) == fingerprint(straight)
    assert loaded.counters == straight.counters
    expected, metrics = straight.train(n), loaded.train(n)
    assert fingerprint(loaded) == fingerprint(straight)
    same = {key for key in expected if not key.startswith("time/")}
    assert {k: expected[k] for k in same} == pytest.approx({k: metrics[k] for k in same}, abs=0, nan_ok=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_evaluation_does_not_disturb_training(name):
    plain, watched = make(name), make(name, callbacks=[EvalCallback(n_points=7, n_episodes=3)])
    plain.train(steps(name, 1000))
    watched.train(steps(name, 1000))
    assert fingerprint(plain) == fingerprint(watched)
    assert len(watched.callbacks.callbacks[0].evaluations) == 7


@pytest.mark.parametrize("name", of_steps(takes("discrete")))
def test_solves_the_discrete_probe(name):
    algorithm = make(name, probes.MatchTheSign, on={"n_steps": 32}, n_envs=8, learning_rate=1e-2, gamma=0.9)
    algorithm.train(8_000 if not off_policy(name) else 3_000)
    assert algorithm.evaluate(50).returns.mean() == 1.0
    assert algorithm.predict([1.0]) == 1
    assert algorithm.predict([-1.0]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", natively(of_steps(takes("continuous"))))
def test_solves_the_continuous_probe(name):
    algorithm = make(name, probes.ReachTheTarget, on={"ent_coef": 0.0}, n_envs=8, learning_rate=3e-3, gamma=0.9)
    algorithm.train(8_000 if off_policy(name) else 60_000 if name.startswith(("a2c", "impala")) else 20_000)
    assert algorithm.evaluate(50).returns.mean() > -0.02  # acting 0 gives -0.21


@pytest.mark.slow
@pytest.mark.parametrize("name", without_native("multi-discrete", often=("a2c", "appo")))
def test_solves_the_multi_discrete_probe(name):
    algorithm = make(name, probes.TwoSwitches, n_envs=8, learning_rate=3e-3, gamma=0.9)
    assert algorithm.backend == "torch"
    algorithm.train(20_000)
    assert algorithm.evaluate(50).returns.mean() == 1.0
    assert algorithm.predict([1.0]).tolist() == [1, 2]
    assert algorithm.predict([[1.0], [-1.0]]).tolist() == [[1, 2], [0, 2]]


@pytest.mark.slow
@pytest.mark.parametrize("name", without_native("discrete", often=("ppo", "dqn", "impala")))
def test_solves_the_image_probe(name):
    settings = {"n_envs": 8, "learning_rate": 1e-3, "gamma": 0.9, "hidden_sizes": []}
    off = {"batch_size": 64, "gradient_steps": 1, "buffer_size": 1_000}
    algorithm = make(name, probes.BrightSide, on={"n_steps": 8}, off=off, **settings)
    assert algorithm.backend == "torch"
    algorithm.train(3_000 if not off_policy(name) else 1_500)
    assert algorithm.evaluate(30).returns.mean() > 0.95


@pytest.mark.parametrize("name", of_steps(takes("discrete")))
def test_images_are_not_normalised_twice(name):
    with pytest.raises(ValueError, match="normalize_obs must be false for images"):
        make(name, probes.BrightSide, normalize_obs=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", natively(of_steps(NAMES)))
def test_value_learns_one_over_one_minus_gamma_under_a_time_limit(name):
    gamma, continuous = 0.8, name not in takes("discrete")
    algorithm = make(
        name,
        lambda: probes.ConstantReward(5, continuous),
        # With steps of constant size, Adam turns rounding errors into steps once the value is exact, and it drifts.
        on={"ent_coef": 0.0, "learning_rate_schedule": "linear"},
        n_envs=8,
        gamma=gamma,
        learning_rate=1e-2 if not off_policy(name) else 3e-3,
        **BOOTSTRAP.get(name.removesuffix("-torch"), {}),
    )
    algorithm.train(20_000 if not off_policy(name) else 6_000)
    obs = torch.zeros(1, 1)
    with torch.no_grad():
        if name == "sac-discrete":
            values = algorithm.critics.action_values(obs)
        elif hasattr(algorithm, "critics"):
            values = algorithm.critics(obs, algorithm.policy.unit_mode(obs))
        else:
            values = (algorithm.policy if off_policy(name) else algorithm.policy.get_value)(obs)
    # Q of all actions, of both critics, or V; if time limits were terminations it would be 1 + ... + 0.8^4 = 3.4.
    np.testing.assert_allclose(values.numpy(), 1 / (1 - gamma), rtol=0.03)


@pytest.mark.parametrize("name", NAMES)
def test_nan_reward_stops_training_with_the_step(name):
    algorithm = make(name, lambda: probes.ExplodingReward(100, name not in takes("discrete")))
    with pytest.raises(FloatingPointError, match=r"rewards must be finite, got nan from environment 0 at step \d+"):
        algorithm.train(5000)
    assert algorithm.counters.env_steps < 1000


@pytest.mark.parametrize("name", NAMES)
def test_unknown_and_bad_hyper_parameters_are_errors(name):
    with pytest.raises(TypeError, match=r"unknown hyper-parameter 'gama'; did you mean 'gamma'"):
        make(name, gama=0.9)
    with pytest.raises(ValueError, match=r"gamma must be in \[0, 1\], got 1.5"):
        make(name, gamma=1.5)
    with pytest.raises(TypeError, match="gamma must be of type float, got 'high'"):
        make(name, gamma="high")
    with pytest.raises(ValueError, match="device must be one of auto, cpu, cuda"):
        make(name, device="gpu")
    with pytest.raises(TypeError, match=r"policy must be a (torch\.nn\.Module|DreamerPolicy)"):
        make(name, policy="mlp")
    learned = {*resolve(entry(name).cls).actions, *(["discrete"] if entry(name).discrete else [])}
    if len(learned) < 3:
        kinds = {"discrete": probes.MatchTheSign, "continuous": "Pendulum-v1", "multi-discrete": probes.TwoSwitches}
        for kind in set(kinds) - learned:
            with pytest.raises(ValueError, match=r"the environment's actions must be .*; .* actions are for A2C"):
                make(name, kinds[kind])
    with pytest.raises(ValueError, match="total_timesteps must be >= 1"):
        make(name).train(0)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "env"), [(n, e) for n, e in pairs("CartPole-v1", "Pendulum-v1") if n in BY_TORCH])
def test_both_backends_are_the_same_training(name, env):
    """Both draw the same random numbers, and the results agree up to float rounding."""
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
    """Moments, counters and generators are included, so that both continue in the same way."""
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


# Algorithms that learn from a dataset

# The offline algorithms with each kind of actions that they support.
DATASETS = [(name, kind) for name in OFFLINE for kind in resolve(ALGORITHMS[name].cls).actions]


@pytest.mark.parametrize(("name", "kind"), DATASETS)
def test_offline_builds_and_predicts_within_bounds(name, kind):
    bounds = {"act_low": -3.0, "act_high": 2.0} if kind == "continuous" else {}
    algorithm = learner(name, kind, **bounds)
    many = np.random.default_rng(0).normal(size=(200, 1)) * 100
    for deterministic in (True, False):
        one, rows = algorithm.predict([0.5], deterministic), algorithm.predict(many, deterministic)
        if kind == "discrete":
            assert one in (0, 1)
            assert rows.shape == (200,)
            assert rows.dtype == np.int64
        else:
            assert one.shape == (1,)
            assert rows.shape == (200, 1)
            assert one.dtype == np.float32
            assert rows.min() >= -3
            assert 1 < rows.max() <= 2
    with pytest.raises(ValueError, match="obs must have shape"):
        algorithm.predict(np.zeros(2))


@pytest.mark.parametrize(("name", "kind"), DATASETS)
def test_an_offline_update_moves_every_trainable_parameter_and_no_frozen_one(name, kind):
    algorithm = learner(name, kind, **({"policy_delay": 1} if name == "td3_bc" else {}))
    modules = {
        "policy": algorithm.policy,
        **{k: x for k, x in algorithm._parts.items() if isinstance(x, torch.nn.Module)},
    }
    targets = {id(p) for key, x in modules.items() if key.startswith("target") for p in x.parameters()}
    before = {key: {n: p.clone() for n, p in x.named_parameters()} for key, x in modules.items()}
    metrics = algorithm.train(1)
    assert (algorithm.counters.updates, algorithm.counters.env_steps) == (1, 0)
    for key, module in modules.items():
        for n, p in module.named_parameters():
            assert p.requires_grad is (id(p) not in targets)
            assert not torch.equal(p, before[key][n]), f"{key}.{n}"
            if key == "target":  # moves by the fraction tau
                way = 0.005 * (dict(modules["critics"].named_parameters())[n] - before[key][n])
                torch.testing.assert_close(p - before[key][n], way, rtol=1e-2, atol=1e-7)
    assert np.isfinite([value for value in metrics.values()]).all()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), DATASETS)
def test_offline_save_load_continues_exactly(name, kind, tmp_path):
    """N + N updates through a checkpoint end in the same bits as N + N updates without one; another seed does not."""
    data = recorded(kind, normalize=True)
    straight, saved, other = (learner(name, kind, data, seed=s) for s in (3, 3, 4))
    for algorithm in (straight, saved, other):
        algorithm.train(150)
    saved.save(tmp_path / "a.safetensors")
    loaded = type(saved).from_checkpoint(tmp_path / "a.safetensors", data)
    assert fingerprint(loaded) == fingerprint(straight) != fingerprint(other)
    assert loaded.counters == straight.counters
    expected, metrics = straight.train(150), loaded.train(150)
    assert fingerprint(loaded) == fingerprint(straight)
    same = {key for key in expected if not key.startswith("time/")}
    assert {k: expected[k] for k in same} == {k: metrics[k] for k in same}


@pytest.mark.parametrize("name", OFFLINE)
def test_an_interrupted_offline_training_resumes_bit_for_bit(name, tmp_path):
    data = recorded()
    straight, cut = learner(name, dataset=data), learner(name, dataset=data)
    straight.train(100)

    class Stop(Callback):
        def on_step(self, *, step, algorithm, **info):
            if step == 40:
                algorithm.save(tmp_path / "a.safetensors")
            return step < 60

    cut.callbacks.extend([Stop()])
    cut.train(100)
    assert cut.counters.updates == 60
    loaded = type(cut).from_checkpoint(tmp_path / "a.safetensors", data)
    loaded.train()
    assert loaded.counters.updates == 100
    assert fingerprint(loaded) == fingerprint(straight)


# Values converge within a few seconds; the penalty is small enough to learn from a thousand rows.
SOLVES = {"td3_bc": {"alpha": 10.0}, "iql": {"expectile": 0.9, "temperature": 30.0}, "cql": {"cql_alpha": 0.05}}


@pytest.mark.slow
@pytest.mark.parametrize("name", OFFLINE)
def test_solves_the_continuous_probe_from_a_dataset(name):
    data = recorded(n=4000, expert=name == "bc", normalize=True)
    settings = {"learning_rate": 3e-3, "batch_size": 64, **SOLVES.get(name, {})}
    algorithm = learner(name, dataset=data, env_id=probes.ReachTheTarget, hidden_sizes=[32, 32], **settings)
    algorithm.train(1500)
    assert algorithm.evaluate(50).returns.mean() > -0.02  # acting 0 gives -0.21, uniform actions -0.55


def test_cloning_solves_the_discrete_probe():
    algorithm = learner("bc", "discrete", recorded("discrete", expert=True), env_id=probes.MatchTheSign)
    assert algorithm.train(500)["accuracy"] == 1.0
    assert algorithm.evaluate(50).returns.mean() == 1.0
    assert algorithm.predict([1.0]) == 1


@pytest.mark.parametrize("name", [name for name in OFFLINE if name != "bc"])
@pytest.mark.parametrize("limit", ["truncated", "terminated"])
def test_values_of_a_dataset_bootstrap_at_a_time_limit_and_end_at_a_termination(name, limit):
    """Reward 1 for five steps, one observation: 1 / (1 - gamma), or between 1 and 1 + … + gamma^4."""
    gamma, n = 0.8, 1000
    ends = np.arange(n) % 5 == 4
    flags = {"truncated": ~ends & ends, "terminated": ~ends & ends, limit: ends}
    zeros = np.zeros((n, 1), np.float32)
    actions = np.random.default_rng(0).uniform(-1, 1, (n, 1)).astype(np.float32)
    data = rlox.OfflineDatasetBuffer(
        zeros, zeros, actions, np.ones(n, np.float32), flags["terminated"], flags["truncated"]
    )
    quiet = {"cql_alpha": 0.0, "n_random_actions": 1, "ent_coef": 0.0, "auto_entropy": False} if name == "cql" else {}
    quiet |= {"expectile": 0.5} if name == "iql" else {}
    settings = {"gamma": gamma, "tau": 0.05, "learning_rate": 3e-3, "normalize_obs": False, "batch_size": 64}
    algorithm = learner(name, dataset=data, **settings, **quiet)
    metrics = algorithm.train(2000 if name != "cql" else 1200)
    # A fifth of the rows ends an episode: V = 1 + 0.8 * 4/5 * V.
    value = 1 / (1 - gamma) if limit == "truncated" else 1 / (1 - gamma * 4 / 5)
    assert metrics["dataset/q"] == pytest.approx(value, rel=0.1)
    known = np.mean([1 + gamma * (1 - gamma**k) / (1 - gamma) for k in range(5)])
    assert metrics["dataset/return"] == pytest.approx(value if limit == "truncated" else known, rel=0.1)


@pytest.mark.parametrize("name", OFFLINE)
def test_offline_normalisation_uses_statistics_of_the_dataset_also_after_loading(name, tmp_path):
    """A dataset and a shifted and scaled copy of it are the same to an algorithm that normalises."""
    state = recorded().get_state()
    state.pop("normalize")
    moved = {**state, **{key: 50.0 + 8.0 * state[key] for key in ("obs", "next_obs")}}
    plain, far, asked = (
        learner(name, dataset=rlox.OfflineDatasetBuffer(**columns, normalize=buffer), normalize_obs=config)
        for columns, buffer, config in ((state, True, False), (moved, True, False), (moved, False, True))
    )
    for algorithm in (plain, far, asked):
        algorithm.train(50)
    x = np.linspace(-0.8, 0.8, 9)[:, None]
    np.testing.assert_allclose(plain.predict(x), far.predict(50 + 8 * x), atol=0.02)
    np.testing.assert_allclose(far.predict(50 + 8 * x), asked.predict(50 + 8 * x), atol=1e-3)
    far.save(tmp_path / "a.safetensors")
    alone = type(far).from_checkpoint(tmp_path / "a.safetensors")
    assert np.array_equal(alone.predict(50 + 8 * x), far.predict(50 + 8 * x))
    with pytest.raises(ValueError, match=r"there must be a dataset to learn from; pass from_checkpoint\(dataset=...\)"):
        alone.train(1)
    with pytest.raises(ValueError, match="the dataset's normalisation must be that of the saved training"):
        type(far).from_checkpoint(tmp_path / "a.safetensors", rlox.OfflineDatasetBuffer(**state, normalize=True))


@pytest.mark.parametrize("name", OFFLINE)
def test_bad_offline_arguments_are_errors(name):
    cls, data = resolve(ALGORITHMS[name].cls), recorded()
    with pytest.raises(TypeError, match=r"unknown hyper-parameter 'batchsize'; did you mean 'batch_size'"):
        learner(name, batchsize=3)
    with pytest.raises(ValueError, match="must have observations of shape"):
        cls(data, 2, 1)
    with pytest.raises(ValueError, match="must have 2 action components"):
        cls(data, 1, 2)
    with pytest.raises(
        ValueError, match=r"actions must lie between \[-0.5\] and \[0.5\], got .* in row \d+; .*act_high"
    ):
        cls(data, 1, 1, act_high=0.5)
    for bounds in ({"act_low": -1.0, "act_high": np.inf}, {"act_low": -np.inf}, {"act_low": 1.0}):
        with pytest.raises(ValueError, match="act_low must be below act_high, both finite"):
            cls(data, 1, 1, **bounds)
    with pytest.raises(TypeError, match=r"dataset must be a dataset such as .*OfflineDatasetBuffer, got list"):
        cls([], 1, 1)
    with pytest.raises(ValueError, match="n_updates must be >= 1, got 0"):
        learner(name).train(0)
    with pytest.raises(ValueError, match="backend must be"):
        learner(name, backend="cuda")
    with pytest.raises(ValueError, match="there must be an environment; pass env_id"):
        learner(name).evaluate(1)
    if name != "bc":
        with pytest.raises(ValueError, match="actions must be continuous, got discrete actions; BC can learn"):
            learner(name, "discrete")


@pytest.mark.parametrize("name", OFFLINE)
def test_an_offline_loss_that_is_not_finite_stops_the_training(name):
    class Sick:
        def sample(self, batch_size, seed):
            rows = {k: np.ones((batch_size, 1), np.float32) for k in ("obs", "next_obs", "actions")}
            rest = {k: np.zeros(batch_size, bool) for k in ("terminated", "truncated")}
            rows["obs"][0] = math.nan
            return {**rows, **rest, "rewards": np.zeros(batch_size, np.float32)}

    with pytest.raises(FloatingPointError, match=r"became nan at update \d+; training cannot continue"):
        learner(name, dataset=Sick(), normalize_obs=False).train(300)


@pytest.mark.parametrize(("name", "online"), [("td3_bc", "td3"), ("cql", "sac")])
def test_online_training_starts_from_an_offline_policy(name, online, tmp_path):
    taught, normalised = (learner(name, normalize_obs=flag, act_high=2.0) for flag in (False, True))
    start = make(online, probes.ReachTheTarget)
    for algorithm in (taught, normalised):
        algorithm.train(20)
        algorithm.save(tmp_path / "a.safetensors")
        if algorithm is taught:
            start.init_from(tmp_path / "a.safetensors")
    x = np.linspace(-1, 1, 7, dtype=np.float32)[:, None]
    np.testing.assert_allclose(2 * start.predict(x), taught.predict(x), atol=1e-5)  # actions up to 1, and up to 2
    for ours, theirs in zip(start.critics.parameters(), taught.critics.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(ValueError, match="normalised by its dataset's statistics; train it with normalize_obs=false"):
        start.init_from(tmp_path / "a.safetensors")


@pytest.mark.parametrize("name", OFFLINE)
def test_an_offline_algorithm_starts_from_a_checkpoint(name, tmp_path):
    taught, start, other = learner(name, seed=1), learner(name, seed=2), learner(name, seed=2, hidden_sizes=[7])
    taught.train(20)
    taught.save(tmp_path / "a.safetensors")
    x = np.linspace(-1, 1, 7, dtype=np.float32)[:, None]
    assert not np.array_equal(start.predict(x), taught.predict(x))
    start.init_from(tmp_path / "a.safetensors")
    np.testing.assert_array_equal(start.predict(x), taught.predict(x))
    assert start.counters.updates == 0
    if getattr(taught, "critics", None) is not None:
        for ours, theirs in zip(start.critics.parameters(), taught.critics.parameters(), strict=True):
            assert torch.equal(ours, theirs)
    with pytest.raises(ValueError, match=r"init_from .*a\.safetensors"):
        other.init_from(tmp_path / "a.safetensors")
    start.train(5)


ALIKE = {
    "ppo": [{"learning_rate_schedule": "linear", "clip_eps_schedule": "linear", "clip_vf": 0.02, "batch_size": 24,
             "n_epochs": 6, "clip_eps": 0.05},
            {"normalize_advantages": False, "max_grad_norm": None, "ent_coef": 0.1, "vf_coef": 0.2}],
    "a2c": [{"learning_rate_schedule": "linear", "normalize_advantages": True},
            {"max_grad_norm": None, "ent_coef": 0.1, "vf_coef": 0.2, "gae_lambda": 0.8}],
    "dqn": [{"learning_rate_schedule": "linear", "double_dqn": False, "target_update_freq": 24, "tau": 0.5},
            {"loss": "mse", "prioritized": True, "n_step": 3, "dueling": True, "max_grad_norm": 1.0, "gamma": 0.9}],
    "sac": [{"learning_rate_schedule": "linear", "max_grad_norm": 1.0, "target_entropy": -2.0, "tau": 0.1},
            {"learning_rate_schedule": "cosine"},
            {"auto_entropy": False, "ent_coef": 0.3, "prioritized": True, "gamma": 0.9, "exploration_noise": 0.1}],
    "td3": [{"learning_rate_schedule": "linear", "policy_delay": 3, "noise_clip": 0.1, "max_grad_norm": 1.0},
            {"learning_rate_schedule": "cosine"},
            {"target_noise": 0.5, "tau": 0.1, "prioritized": True, "gamma": 0.9, "noise_correlation": 0.5}],
    "bc": [{"learning_rate_schedule": "linear", "max_grad_norm": 1.0, "normalize_obs": True}, {"continuous": False}],
    "td3_bc": [{"learning_rate_schedule": "linear", "alpha": 1.0, "policy_delay": 3, "tau": 0.1},
               {"normalize_obs": False, "max_grad_norm": 1.0, "gamma": 0.9, "target_noise": 0.5, "noise_clip": 0.1}],
    "iql": [{"learning_rate_schedule": "linear", "policy_schedule": "cosine", "expectile": 0.8, "tau": 0.1},
            {"max_grad_norm": 1.0, "gamma": 0.9, "temperature": 10.0, "max_weight": 2.0}],
    "impala": [{"learning_rate_schedule": "linear", "max_grad_norm": 0.5, "gae_lambda": 0.9, "ent_coef": 0.1},
               {"n_actors": 3, "rho_bar": 1.5, "c_bar": 0.5, "replay_rollouts": 1, "normalize_advantages": True}],
    "appo": [{"learning_rate_schedule": "linear", "clip_eps_schedule": "linear", "batch_size": 16, "clip_vf": 0.2}],
    "cql": [{"learning_rate_schedule": "linear", "auto_alpha": True, "cql_target_value": 0.5, "tau": 0.1},
            {"auto_entropy": False, "ent_coef": 0.2, "max_grad_norm": 1.0, "gamma": 0.9, "n_random_actions": 4}],
}  # fmt: skip
NATIVE = [name for name, entry in ALGORITHMS.items() if hasattr(resolve(entry.cls), "update_native")]


def small_dataset(continuous=True):
    rng, n = np.random.default_rng(0), 200
    obs, next_obs = rng.normal(size=(2, n, 3)).astype(np.float32)
    actions, rewards = rng.uniform(-0.9, 0.9, (n, 1)).astype(np.float32), rng.normal(size=n).astype(np.float32)
    if not continuous:
        actions = rng.integers(3, size=(n, 1))
    ends = np.arange(n) % 20 == 19
    return rlox.OfflineDatasetBuffer(obs, next_obs, actions, rewards, ends & (rng.random(n) < 0.5), ends)


@pytest.mark.parametrize(("name", "case"), [(name, i) for name in NATIVE for i in range(len(ALIKE.get(name, [{}])))])
def test_both_backends_train_alike_and_report_the_same(name, case):
    """Short trainings from one seed, by the kernel and with PyTorch, with settings that differ from the defaults: the
    metrics have the same names and values, and the weights are the same, halfway through a schedule."""
    # The steps are so large that ignoring a setting has a much larger effect than rounding.
    cls, settings = resolve(ALGORITHMS[name].cls), {"learning_rate": 3e-3, **ALIKE.get(name, [{}])[case]}
    found = {}
    for backend in ("native", "torch"):
        if name in OFFLINE:
            continuous = settings.get("continuous", True)
            sizes = {"act_dim": 1 if continuous else 3, "hidden_sizes": [16], "batch_size": 32}
            algorithm = cls(small_dataset(continuous), 3, backend=backend, seed=3, **sizes, **settings)
            metrics = algorithm.train(9, schedule_timesteps=18)
        else:
            on, off = {"n_steps": 12, "hidden_sizes": [16]}, {**OFF_POLICY, "learning_starts": 16}
            family = off if off_policy(name) else on
            env_id = "CartPole-v1" if "discrete" in cls.actions else "Pendulum-v1"
            algorithm = cls(env_id, **{"n_envs": 4, **family, **settings}, backend=backend, seed=3)
            metrics = algorithm.train(96, schedule_timesteps=192)
        assert algorithm.backend == backend
        weights = algorithm._checkpoint().tensors
        found[backend] = {k: v for k, v in metrics.items() if not k.startswith("time/")}, weights
    (ours, kernel), (theirs, torchs) = found["native"], found["torch"]
    assert ours == pytest.approx(theirs, rel=2e-3, abs=2e-4, nan_ok=True)
    for section in set(torchs) & set(kernel) - {"optimizer", "critic_optimizer", "alpha_optimizer", "environment"}:
        for key in set(torchs[section]) & set(kernel[section]) - {"torch"}:
            if kernel[section][key].dtype == np.float32:
                np.testing.assert_allclose(kernel[section][key], torchs[section][key], rtol=0, atol=2e-4, err_msg=key)


@pytest.mark.parametrize("name", [name for name in NAMES if off_policy(name) and not of_sequences(name)])
@pytest.mark.parametrize(
    ("settings", "updates"),
    [
        # Rounds end at steps 1, 2, …, 20; the first update is at step 10.
        ({"n_envs": 1, "learning_starts": 10, "train_freq": 1, "gradient_steps": 1}, 11),
        # Rounds end at 4, 8, …, 20, with updates from 8 on: four rounds.
        ({"n_envs": 1, "learning_starts": 8, "train_freq": 4, "gradient_steps": 3}, 4 * 3),
        ({"n_envs": 1, "learning_starts": 9, "train_freq": 4, "gradient_steps": -1}, 3 * 4),
        # Complete steps of three environments: rounds end at 6, 12, 18, 24.
        ({"n_envs": 3, "learning_starts": 12, "train_freq": 4, "gradient_steps": -1}, 3 * 6),
    ],
)
def test_updates_begin_at_learning_starts_and_follow_train_freq(name, settings, updates):
    algorithm = make(name, off={**settings, "batch_size": 4})
    algorithm.train(20)
    assert algorithm.counters.updates == updates
    assert algorithm.counters.env_steps == 20 if settings["n_envs"] == 1 else 24


@pytest.mark.parametrize("name", [name for name in NAMES if off_policy(name) and not of_sequences(name)])
def test_exactly_the_first_steps_are_random(name):
    """For a policy that neither learns nor explores, all actions in the memory after `learning_starts` are its own."""
    still = {"exploration_initial_eps": 0.0, "exploration_final_eps": 0.0} if "dqn" in name else {}
    still |= {"exploration_noise": 0.0} if "td3" in name else {}
    starts, total = 24, 60
    algorithm = make(name, off={"learning_starts": starts, "train_freq": 1, "learning_rate": 1e-30, **still})
    if name.startswith("sac"):  # which samples its actions: let each be the most likely one
        last, n = algorithm.policy.net[-1], algorithm.spec.act_dim
        with torch.no_grad():
            if algorithm.spec.discrete:
                last.weight *= 1e6
            else:
                last.weight[n:], last.bias[n:] = 0.0, LOG_STD_RANGE[0]
    algorithm.train(total)
    rows = algorithm.buffer.gather(np.arange(total))
    own = np.asarray(algorithm.predict(rows["obs"])).reshape(total, -1)
    same = np.isclose(np.asarray(rows["actions"]).reshape(total, -1), own, atol=1e-5).all(1)
    assert same[starts:].all()
    if name not in takes("discrete"):  # a random one of two actions may equal the policy's
        assert not same[:starts].any()
    assert not same[:starts].all()
    assert not same[starts - 4 : starts].all() or name.startswith("dqn")


# Schedules

LINEAR = {"learning_rate": 1e-3, "learning_rate_schedule": "linear"}


def of_any_family(name, **kwargs):
    """A small algorithm, and the number of steps (offline: updates) between rounds of updates."""
    if name in OFFLINE:
        return learner(name, **kwargs), 1
    algorithm = make(name, off={"learning_starts": 0}, **kwargs)
    return algorithm, 4 if of_sequences(name) else 8 if off_policy(name) else 64


class Rows(LoggerCallback):
    def __init__(self):
        self.rows = []

    def log(self, step, metrics):
        self.rows.append((step, metrics))


@pytest.mark.parametrize("name", [*natively(NAMES), *OFFLINE])
def test_each_update_uses_and_reports_the_learning_rate_at_the_start_of_its_round(name):
    rows = Rows()
    algorithm, each = of_any_family(name, logger=rows, **LINEAR)
    metrics = algorithm.train(192)
    rates = [metrics["schedule/learning_rate"] for _, metrics in rows.rows]
    assert rates == pytest.approx([1e-3 * (1 - (step - each) / 192) for step, _ in rows.rows])
    assert metrics["learning_rate"] == rates[-1] == pytest.approx(1e-3 * each / 192)


@pytest.mark.parametrize("name", [*natively(NAMES), *OFFLINE])
def test_a_training_of_one_round_learns(name):
    algorithm, each = of_any_family(name, **LINEAR, **({"policy_delay": 1} if name.startswith("td3") else {}))
    before = {key: value.clone() for key, value in algorithm.policy.state_dict().items()}
    # A world model updates only when each of the four environments has a complete sequence.
    algorithm.train(16 if name not in OFFLINE and of_sequences(name) else each)
    assert all(not torch.equal(value, before[key]) for key, value in algorithm.policy.state_dict().items())


@pytest.mark.parametrize("name", [*natively(NAMES), *OFFLINE])
def test_a_later_end_stretches_the_schedules(name):
    algorithm, each = of_any_family(name, **LINEAR)
    algorithm.train(192)
    before = fingerprint(algorithm)
    with pytest.warns(RuntimeWarning, match="train: schedules now end at .* 384, not 192: learning_rate 0 -> 0.0005"):
        metrics = algorithm.train(until=384)
    assert fingerprint(algorithm) != before
    assert metrics["learning_rate"] == pytest.approx(1e-3 * each / 384)
    counters = algorithm.counters.scalars()
    with pytest.raises(ValueError, match=r"schedule_timesteps must be more than the 384 .* that are done, got 384: "):
        algorithm.train(until=500, schedule_timesteps=384)
    with pytest.raises(ValueError, match=r"until must be >= the 384 .* that are done, got 300"):
        algorithm.train(until=300)
    assert algorithm.counters.scalars() == counters
    # A run that 0.6.0 extended continues with the original schedules, and warns about the effect.
    algorithm.counters.horizon_steps = 500
    with pytest.warns(
        RuntimeWarning, match="learning_rate is 0 for the rest of the training, since schedules ended at"
    ):
        algorithm.train()
    assert algorithm.counters.steps >= 500


@pytest.mark.parametrize(
    ("name", "settings", "reported", "start", "end"),
    [
        ("ppo", {"clip_eps_schedule": "linear"}, "clip_eps", 0.2, 0.0),
        ("ppo-torch", {"clip_eps_schedule": "linear"}, "clip_eps", 0.2, 0.0),
        ("dqn", {"exploration_fraction": 1.0}, "exploration/epsilon", 1.0, 0.05),
        ("dqn", {"buffer": "prioritized"}, "beta", 0.4, 1.0),
        ("sac-torch", {"buffer": "prioritized"}, "beta", 0.4, 1.0),
    ],
)
def test_all_schedules_are_reported_and_stretched(name, settings, reported, start, end):
    algorithm, each = of_any_family(name, **settings)
    metrics = algorithm.train(192)
    assert metrics[reported] == pytest.approx(start + (end - start) * (192 - each) / 192)
    with pytest.warns(RuntimeWarning, match=f"{reported} {end:g} -> {start + (end - start) / 2:.3g}"):
        metrics = algorithm.train(until=384)
    assert metrics[reported] == pytest.approx(start + (end - start) * (384 - each) / 384)


def test_the_cosine_schedule_of_a_policy_is_reported_and_stretched_and_does_not_stay_at_0():
    iql = learner("iql", policy_schedule="cosine", learning_rate=1e-3)
    assert iql.train(100)["policy_learning_rate"] == pytest.approx(5e-4 * (1 + math.cos(math.pi * 0.99)))
    with pytest.raises(ValueError, match="policy_learning_rate would be 0 for the rest of the training"):
        iql.train(until=200, schedule_timesteps=100)
    with pytest.warns(RuntimeWarning, match="policy_learning_rate 0 -> 0.0005"):
        iql.train(until=200)


def trainable(name, callbacks=()):
    """A small algorithm, and the name of the argument of `train`."""
    if name in OFFLINE:
        sizes = {"hidden_sizes": [8], "batch_size": 16}
        return resolve(ALGORITHMS[name].cls)(small_dataset(), 3, 1, callbacks=list(callbacks), **sizes), "n_updates"
    return make(name, callbacks=list(callbacks)), "total_timesteps"


@pytest.mark.parametrize("name", [*natively(NAMES), *OFFLINE])
def test_callbacks_receive_algorithm_step_and_reward(name):
    seen = []

    class Watch(Callback):
        def on_training_start(self, *, algorithm, **info):
            seen.append(("start", algorithm))
            return True

        def on_step(self, *, step, reward, metrics, algorithm, **info):
            assert step == algorithm.counters.steps
            assert reward == pytest.approx(algorithm.counters.mean_reward, nan_ok=True)
            assert metrics
            seen.append((step, algorithm))
            return step < 128

        def on_training_end(self, *, algorithm, **info):
            seen.append(("end", algorithm))

    algorithm, length = trainable(name, [Watch()])
    algorithm.train(**{length: 512})
    assert all(one is algorithm for _, one in seen)
    steps = [step for step, _ in seen[1:-1]]
    assert [seen[0][0], seen[-1][0]] == ["start", "end"]
    assert steps == sorted(set(steps))
    # The callback returns False at 128, which ends the training.
    assert 128 <= steps[-1] == algorithm.counters.steps < 512
    assert all(step < 128 for step in steps[:-1])


@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_episodes_are_counted_and_told(name):
    reported = []

    class Count(Callback):
        def on_rollout_end(self, *, batch, **info):
            reported.append(len(batch.episode_returns))

    algorithm = make(name, "CartPole-v1", callbacks=[Count()])
    algorithm.train(600)
    assert sum(n > 0 for n in reported) > 1
    assert algorithm.counters.episodes == sum(reported)


@pytest.mark.parametrize("name", ["ppo", "dqn", "sac", "bc"])
def test_a_training_may_end_where_it_was_stopped(name):
    class Stop(Callback):
        def on_step(self, **info):
            return False

    algorithm, length = trainable(name, [Stop()])
    algorithm.train(**{length: 512})
    counters = algorithm.counters
    assert 0 < counters.steps < 512
    with pytest.warns(RuntimeWarning, match="nothing is left to train"):
        metrics = algorithm.train(until=counters.steps)
    assert counters.end == counters.steps
    assert metrics == ({} if name in OFFLINE else {"mean_reward": pytest.approx(counters.mean_reward, nan_ok=True)})


@pytest.mark.parametrize("name", [*natively(NAMES), *OFFLINE])
def test_times_are_measured_for_each_training(name):
    algorithm, length = trainable(name)
    for n in (steps(name, 256), steps(name, 512)):  # the speed of the second training does not include the first
        before, started = algorithm.counters.steps, time.perf_counter()
        metrics = algorithm.train(**{length: n})
        wall, done = time.perf_counter() - started, algorithm.counters.steps - before
        speed = metrics["time/updates_per_second" if name in OFFLINE else "time/steps_per_second"]
        parts = metrics["time/collect_s"], metrics["time/update_s"]
        assert min(parts) >= 0
        assert 0 < sum(parts) <= wall
        # The time of callbacks is not counted, so the counted time is at most the wall time.
        assert 0 < done / speed <= wall
        assert done / speed >= sum(parts) * 0.999


@pytest.mark.parametrize("name", [*natively(NAMES), *OFFLINE])
def test_evaluation_is_deterministic_by_default_and_uses_the_wrappers(name):
    if name in OFFLINE:
        limit = [{"TimeLimit": {"max_episode_steps": 7}}]
        sizes = {"hidden_sizes": [8], "env_id": "Pendulum-v1", "env_wrappers": limit}
        algorithm = resolve(ALGORITHMS[name].cls)(small_dataset(), 3, 1, **sizes)
    else:
        algorithm = make(name, env_wrappers=[{"TimeLimit": {"max_episode_steps": 7}}], n_envs=1)
    by_default, asked = algorithm.evaluate(4), algorithm.evaluate(4, deterministic=True)
    np.testing.assert_array_equal(by_default.returns, asked.returns)
    assert by_default.deterministic
    assert (by_default.lengths <= 7).all()
    # The seed determines the whole sequence of episodes of an evaluation.
    np.testing.assert_array_equal(by_default.returns[:2], algorithm.evaluate(2).returns)
    np.testing.assert_array_equal(by_default.returns, algorithm.evaluate(4, seed=10_000 + algorithm.seed).returns)
    if not algorithm.spec.discrete:
        assert not np.array_equal(by_default.returns, algorithm.evaluate(4, seed=1).returns)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_the_last_metrics_are_those_of_the_end(backend):
    """Also if the end is between two reports."""
    reported = []

    class Watch(Callback):
        def on_step(self, *, step, metrics, **info):
            reported.append((step, metrics))
            return True

    dqn = rlox.DQN("CartPole-v1", 1, 0, backend=backend, callbacks=[Watch()], learning_starts=8, batch_size=8)
    metrics = dqn.train(350)  # reported every three steps
    assert [step for step, _ in reported[-3:]] == [345, 348, 350]
    assert metrics == reported[-1][1]


def test_an_offline_checkpoint_accepts_another_env_id(tmp_path):
    bc = rlox.BC(None, 3, 1, env_id="Pendulum-v1", hidden=1)
    assert bc.config.hidden_sizes == [1, 1]
    bc.save(tmp_path / "a.safetensors")
    assert rlox.BC.from_checkpoint(tmp_path / "a.safetensors").env_id == "Pendulum-v1"
    other = rlox.BC.from_checkpoint(tmp_path / "a.safetensors", env_id="MountainCarContinuous-v0")
    assert other.env_id == "MountainCarContinuous-v0"
