"""Settings that have no effect beside the others: they are named, and they change nothing."""

import warnings

import numpy as np
import pytest

import rlox
from rlox.config import settings
from rlox.config.base import Config
from rlox_cli.config.compose import compose_jobs
from rlox_cli.config.presets import read_presets

SMALL = {"hidden_sizes": [8], "seed": 3}
ON_POLICY = {**SMALL, "n_steps": 16}
OFF_POLICY = {**SMALL, "learning_starts": 20, "batch_size": 8}
CASES = {
    "ppo": (rlox.PPO, "CartPole-v1", {**ON_POLICY, "batch_size": 16}),
    "a2c": (rlox.A2C, "Pendulum-v1", ON_POLICY),
    "mappo": (rlox.MAPPO, "CartPole-v1", {**ON_POLICY, "batch_size": 16}),
    "impala": (rlox.IMPALA, "CartPole-v1", ON_POLICY),
    "dqn": (rlox.DQN, "CartPole-v1", OFF_POLICY),
    "qr_dqn": (rlox.DQN, "CartPole-v1", {**OFF_POLICY, "distribution": "quantile", "n_atoms": 5}),
    "c51": (rlox.DQN, "CartPole-v1", {**OFF_POLICY, "distribution": "categorical", "n_atoms": 5}),
    "sac": (rlox.SAC, "Pendulum-v1", OFF_POLICY),
    "fixed temperature": (rlox.SAC, "Pendulum-v1", {**OFF_POLICY, "auto_entropy": False, "ent_coef": 0.1}),
    "given entropy": (rlox.SAC, "CartPole-v1", {**OFF_POLICY, "target_entropy": 0.3}),
    "no targets": (rlox.SAC, "Pendulum-v1", {**OFF_POLICY, "target_network": False, "critic_norm": "batch"}),
    "quantiles": (rlox.SAC, "Pendulum-v1", {**OFF_POLICY, "critic_head": "quantile", "n_quantiles": 5}),
    "bins": (rlox.SAC, "Pendulum-v1", {**OFF_POLICY, "critic_head": "categorical", "n_bins": 5}),
    "fitted rewards": (rlox.SAC, "Pendulum-v1", {**OFF_POLICY, "normalize_rewards": True, "fit_rewards": True}),
    "td3": (rlox.TD3, "Pendulum-v1", {**OFF_POLICY, "target_noise": 0.0}),
}  # fmt: skip
# A valid value of each setting that may be idle, far from its default.
OTHERS = {
    "clip_obs": 0.01, "clip_rewards": 0.01, "memory_size": 3, "memory_layers": 2, "memory_horizon": 9,
    "sequence_length": 5, "burn_in": 2, "huber_delta": 0.1, "self_play_pool": 1, "self_play_every": 1,
    "replay_size": 1, "n_atoms": 3, "v_min": -0.1, "v_max": 0.1, "huber_kappa": 0.01, "noisy_sigma": 3.0,
    "learning_rate_end": 0.5, "tau": 0.9, "target_entropy": 0.7, "entropy_per_action": 0.7, "entropy_fraction": 0.1,
    "noise_clip": 0.01, "norm_after": True, "renorm_warmup": 2, "n_bins": 3, "n_quantiles": 3, "drop_quantiles": 1,
    "cql_target_value": 3.0,
}  # fmt: skip
REFUSED = {True: "entropy_fraction", False: "entropy_per_action"}  # with continuous and with discrete actions


def trained(make, changes):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        agent = make(changes)
    metrics = agent.train(64)
    return agent, {name: value for name, value in metrics.items() if not name.startswith(("time/", "sps"))}


def require_same(make):
    agent, expected = trained(make, {})
    idle = agent.config.idle()
    assert idle
    changes = {name: OTHERS[name] for name in idle if name != REFUSED[agent.spec.n_actions is None]}
    assert all(value != getattr(agent.config, name) for name, value in changes.items())
    other, metrics = trained(make, changes)
    assert other.backend == agent.backend
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_equal(metrics[name], value, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_idle_settings_change_nothing(case):
    cls, env, given = CASES[case]
    require_same(lambda changes: cls(env, **{**given, **changes}))


@pytest.mark.slow
def test_idle_settings_of_cql_change_nothing():
    rng = np.random.default_rng(0)
    rows = [rng.standard_normal(shape).astype(np.float32) for shape in ((64, 3), (64, 3), (64, 1), (64,))]
    obs, next_obs, actions, rewards = rows
    ends = np.zeros(64, bool)
    dataset = rlox.OfflineDatasetBuffer(obs, next_obs, np.tanh(actions), rewards, ends, ends)
    require_same(lambda changes: rlox.CQL(dataset, 3, act_dim=1, seed=1, hidden_sizes=[8], batch_size=8, **changes))


def given_ones(config: Config, given):
    """The idle settings among those `given` to which another value than the default is given."""
    return [name for name in config.idle() if name in given and given[name] != getattr(type(config), name)]


@pytest.mark.parametrize("name", sorted(read_presets()))
def test_presets_have_no_idle_settings(name):
    (job,) = compose_jobs([], [f"algo={name}", "tuned=off"])
    assert given_ones(job.config.algo, settings.preset(name)) == []


def test_tuned_settings_are_not_idle():
    pairs = settings.tuned_pairs()
    assert len(pairs) > 20
    for choice, env in pairs:
        given, base = settings.tuned(choice, env).get("algo", {}), {}
        algo = read_presets().get(choice, choice)
        if algo != choice:
            base = {name: value for name, value in settings.preset(choice).items() if name != "buffer"}
        config = rlox.algorithms.class_of(algo, "test").Config(**{**base, **given})
        assert given_ones(config, given) == [], (choice, env)


def test_an_idle_argument_is_a_warning_at_the_line_that_gives_it():
    with pytest.warns(UserWarning, match="^DQN: noisy_sigma has no effect without noisy=true$") as caught:
        rlox.DQN("CartPole-v1", noisy_sigma=0.3)
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rlox.DQN("CartPole-v1", noisy=True, noisy_sigma=0.3, v_max=10.0)
        rlox.SAC("Pendulum-v1", **rlox.preset("xqc"))


BRIEF = ["total_timesteps=2000", "tuned=off", "logger=none", "--check"]


@pytest.mark.parametrize(("words", "lines"), [
    (["algo=dqn", "algo.noisy_sigma=0.3"], ["algo.noisy_sigma has no effect without algo.noisy=true"]),
    (["algo=ppo", "algo.clip_obs=10"], ["algo.clip_obs has no effect without algo.normalize_obs=true"]),
    (["algo=dqn", "algo.noisy=true", "algo.noisy_sigma=0.3"], []),
    (["algo=xqc", "env=Pendulum-v1", "algo.critic_head=mean", "algo.critic_norm=layer"], []),
    (["algo=sac", "env=Pendulum-v1", "algo.dataset_share=0.3"],
     ["algo.dataset_share has no effect without dataset=SOURCE"]),
    (["-cd", "mine", "experiment=own"], ["algo.v_min has no effect without algo.distribution=categorical"]),
    (["-m", "algo=dqn", "algo.noisy=true,false", "algo.noisy_sigma=0.3,0.4"],
     ["algo.noisy_sigma has no effect without algo.noisy=true (in 2 of 4 jobs)"]),
])  # fmt: skip
def test_the_command_names_idle_settings_of_the_user(words, lines, command, tmp_path):
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    text = "# @package _global_\ndefaults: [{override /algo: dqn}, _self_]\nalgo: {v_min: -3.0}\n"
    (tmp_path / "mine" / "experiment" / "own.yaml").write_text(text)
    code, out, err = command("train", *words, *BRIEF)
    assert not code, err
    found = [" ".join(part.split()) for part in out.split("warning: ")[1:]]
    assert len(found) == len(lines)
    assert all(text.startswith(line) for text, line in zip(found, lines, strict=True))
