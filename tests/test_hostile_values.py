"""Bad values for every field of every configuration and every argument of every algorithm: each one either trains or
raises an error with name, rule and value. New algorithms, fields and arguments are covered automatically."""

import copy
import inspect
import math
import os
import pickle
import random
import typing
import warnings
from dataclasses import MISSING, fields

import numpy as np
import pytest
import torch

import rlox
from rlox import config as configs
from rlox.algorithms import ALGORITHMS, resolve
from rlox.config import Config, OfflineConfig, OffPolicyConfig
from rlox.training import OnPolicyAlgorithm

NAN, INF = math.nan, math.inf
HUGE = 10**5000  # more digits than Python prints
HOSTILE = [
    *(-1, 0, 10**18, 10**400, -(10**18), HUGE),
    *(NAN, INF, -INF, -1.0, 0.5, 1.5, 1e308, -1e308, 5e-324, 1j),
    *(True, False, None, "abc", "", "1", "nan", "a" * 10_000, b"x"),
    *([], [0], [-1], [1.5], [True], ["8"], [None], [10**18], [[8]], [NAN], {}, {1: 2}, (), set()),
    *(np.float32(0.5), np.float64("nan"), np.bool_(True), np.array(0.5), np.array(1), np.array([8, 8])),
    *(object(), object, lambda: 1),
]
_PUBLIC = [getattr(configs, name) for name in configs.__all__]  # looked up by name, since they are imported lazily
CONFIGS = [c for c in _PUBLIC if isinstance(c, type) and issubclass(c, Config)]
LEARNERS = [c for c in CONFIGS if any(c is resolve(entry.config) for entry in ALGORITHMS.values())]
REQUIRED = {"DatasetConfig": {"source": "x.npz"}}
# Infinity turns these off.
MAY_BE_INFINITE = {"c_bar", "clip_obs", "clip_rewards", "every_s", "rho_bar"}


def same(a, b) -> bool:
    return a is b or (type(a) is type(b) and a is not HUGE and b is not HUGE and repr(a) == repr(b))


def check_refusal(e: Exception, key: str, value) -> None:
    """Check that the message is short and contains the key and the value."""
    text = str(e)
    assert key in text, f"{key} is not named: {text}"
    assert len(text) < 1_500, text[:200]
    if isinstance(value, str):
        assert value[:50] in text, text
    elif isinstance(value, float) or (isinstance(value, int) and abs(value) < 10**20):
        assert str(value) in text or f"{value:,}" in text, text


@pytest.mark.slow
@pytest.mark.parametrize("cls", CONFIGS, ids=lambda cls: cls.__name__)
def test_a_field_rejects_bad_values_by_name(cls):
    hints = typing.get_type_hints(cls)
    most = 1e39 if cls in LEARNERS else 2**63
    for item in fields(cls):
        kinds = {hints[item.name], *typing.get_args(hints[item.name])}
        for value in HOSTILE:
            try:
                made = cls(**{**REQUIRED.get(cls.__name__, {}), item.name: value})
            except (TypeError, ValueError) as e:
                if item.name == "noise_correlation" and "if noise_correlation is" in str(e):
                    continue  # the rule is about the other of the two fields
                check_refusal(e, f"{cls.__name__}: {item.name} must ", value)
                continue
            if typing.Any in kinds:
                continue
            # An accepted value has the type of the field and is meaningful.
            if float in kinds and type(value) is int:
                value = float(value)
            assert same(getattr(made, item.name), list(value) if isinstance(value, tuple) else value)
            if isinstance(value, (bool, np.bool_)):
                assert bool in kinds, (item.name, value)
            elif isinstance(value, (int, float)):
                assert {int, float} & kinds, (item.name, value)
                assert abs(value) < most or (value == INF and item.name in MAY_BE_INFINITE), (item.name, value)
                if 0 < abs(value) < 1e-40:
                    # This is 0 in float32, so it is accepted only where 0 is.
                    cls(**{**REQUIRED.get(cls.__name__, {}), item.name: 0.0})
            elif list[int] in kinds and value is not None:
                assert value in ([], ()), (item.name, value)


def dataset():
    rng, n = np.random.default_rng(0), 64
    obs, next_obs = rng.normal(size=(2, n, 3)).astype(np.float32)
    actions = rng.uniform(-1, 1, (n, 1)).astype(np.float32)
    rewards = rng.normal(size=n).astype(np.float32)
    return rlox.OfflineDatasetBuffer(obs, next_obs, actions, rewards, np.arange(n) % 16 == 15, np.zeros(n, bool))


# The algorithms for language models are tested in tests/llm.
NAMES = [name for name, entry in ALGORITHMS.items() if resolve(entry.config).uses_dataset != "text"]
ON_POLICY = {"n_steps": 8, "n_envs": 2, "hidden_sizes": [8]}
SEQUENCES = {
    **{"deter_dim": 8, "hidden_dim": 4, "stoch_dim": 2, "stoch_classes": 2, "imagination_horizon": 2, "seq_len": 2},
    **{"learning_starts": 8, "batch_size": 2, "n_envs": 2, "buffer_size": 200, "replay_ratio": 1.0},
}
OFF_POLICY = {"learning_starts": 8, "train_freq": 4, "batch_size": 8, "n_envs": 2, "buffer_size": 200}


def build(name, **given):
    """A small algorithm of that name; the arguments `given` replace its defaults."""
    entry = ALGORITHMS[name]
    cls, config = resolve(entry.cls), resolve(entry.config)
    if issubclass(config, OfflineConfig):
        sizes = {} if given.get("hidden") is not None else {"hidden_sizes": [8]}
        return cls(**{"dataset": dataset(), "obs_dim": 3, "act_dim": 1, "batch_size": 8, **sizes, **given})
    env_id = "CartPole-v1" if "discrete" in cls.actions else "Pendulum-v1"
    if config.replays == "sequences":
        return cls(env_id, **{**SEQUENCES, **given})
    small = OFF_POLICY if issubclass(config, OffPolicyConfig) else ON_POLICY
    return cls(env_id, **{"hidden_sizes": [8], **small, **given})


def offline(name) -> bool:
    return issubclass(resolve(ALGORITHMS[name].config), OfflineConfig)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_values_that_a_field_accepts_train(name):
    config = resolve(ALGORITHMS[name].config)
    hints, trained = typing.get_type_hints(config), set()
    for item in fields(config):
        for value in (0, 1, 2, -1, 1e-30, 0.5, 1e30, True, None, [], [1]):
            try:
                config(**{item.name: value})
            except (TypeError, ValueError):
                continue
            try:
                algorithm = build(name, **{item.name: value})
                metrics = algorithm.train(16)
            except ValueError as e:
                check_refusal(e, item.name, value)  # the value does not fit the other settings
                continue
            except FloatingPointError:
                assert value == 1e30, item.name
                continue  # training diverged, and the error says so
            assert metrics, item.name
            assert np.isfinite(algorithm.predict(np.zeros(algorithm.spec.obs_dim, np.float32))).all(), (item, value)
            trained.add(item.name)
    others = {"agent_id", "self_play", "clip_vf_max", "fit_rewards", "n_quantiles"}  # which need other settings
    for item in fields(config):
        if {int, float, bool, list[int]} & {hints[item.name], *typing.get_args(hints[item.name])}:
            assert item.name in trained | others, item.name


# Values of fields, of which most are accepted by some.
ODD = {
    float: [0, 1, -1, 0.5, 1.5, 1e-30, 1e8, 1e30, 3e38, NAN, INF, 10**18, 10**30, True, None, "x"],
    int: [0, 1, 2, 7, -1, 0.5, 1e3, NAN, INF, 10**30, True, None, "x"],
    str: ["", "x", "linear", "cosine", "rmsprop", "mse", "batch", "memory", "cpu", "a\nb", None, 1],
    list: [[], [1], [8] * 40, [1e2], [0], [-1], ["8"], [10**6], 8, "88", None],
    bool: [True, False, None, 1],
}


def odd_values(draw, config) -> dict:
    """One to three fields with odd values, mostly such as the field alone accepts."""
    hints, given = typing.get_type_hints(config), {}
    for item in draw.sample(fields(config), draw.randint(1, 3)):
        kinds = {typing.get_origin(kind) or kind for kind in (hints[item.name], *typing.get_args(hints[item.name]))}
        pool = [value for kind, values in ODD.items() if kind in kinds for value in values]
        # Networks, rollouts and passes that take minutes are only slow.
        for _ in range(20 if draw.random() < 0.85 else 1):
            given[item.name] = draw.choice(pool)
            try:
                config(**{item.name: given[item.name]})
                break
            except (TypeError, ValueError):
                continue
    return {key: value for key, value in given.items() if value != [10**6] or key != "hidden_sizes"}


def check_odd_values(name, seed) -> str:
    """Train with odd values; the result is that they train, or an error of theirs."""
    draw = random.Random(f"{name} {seed}")
    given = {**odd_values(draw, resolve(ALGORITHMS[name].config)), "backend": draw.choice(["auto", "auto", "torch"])}
    try:
        algorithm = build(name, **given)
        algorithm.train(16)
    except FloatingPointError:
        return "diverged"
    except (TypeError, ValueError) as e:
        message = str(e)
    except Exception as e:
        raise AssertionError(f"{name} {given}") from e
    else:
        assert np.isfinite(algorithm.predict(np.zeros(algorithm.spec.obs_dim, np.float32))).all(), (name, given)
        algorithm.close()
        return "trained"
    assert " must " in message, (name, given, message)
    assert any(key in message for key in given), (name, given, message)
    assert len(message) < 1_500, (name, given)
    return "refused"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_several_odd_values_train_or_are_refused(name):
    ends = [check_odd_values(name, seed) for seed in range(8)]
    assert "trained" in ends


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_more_odd_values(name):
    for seed in range(8, int(os.environ.get("RLOX_FUZZ_ROUNDS", "8")) * 20):
        check_odd_values(name, seed)


def arguments(name) -> dict[str, inspect.Parameter]:
    """All arguments of the class except hyper-parameters; off-policy classes pass on those of on-policy ones."""
    found = {}
    for cls in (resolve(ALGORITHMS[name].cls), *(() if offline(name) else (OnPolicyAlgorithm,))):
        for key, parameter in inspect.signature(cls).parameters.items():
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) and key != "self":
                found.setdefault(key, parameter)
    return found


# Arguments whose messages name the type of the object, or use the name that the rejecting component uses.
CALLED = {
    **{key: key for key in ("policy", "dataset", "buffer", "reward_fn", "act_low", "act_high")},
    **{"env_id": "env", "env_fn": "env", "env_wrappers": "wrappers", "continuous": ""},
}
# Values that take seconds to try.
UNTRIED = {"compile": [True], "env_workers": [1]}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_argument_is_rejected_by_name_or_trains(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a text as `logger` is a folder
    for key, parameter in arguments(name).items():
        for value in HOSTILE:
            if any(same(value, other) for other in UNTRIED.get(key, ())) or (callable(value) and key in CALLED):
                continue
            try:
                algorithm = build(name, **{key: value})
            except (TypeError, ValueError) as e:
                check_refusal(e, "actions" if key == "continuous" and value is False else CALLED.get(key, key), None)
                if key not in CALLED:
                    check_refusal(e, key, value)
                continue
            default = parameter.default
            empty = value is None or (isinstance(value, (str, list, dict, tuple, set)) and not value)
            alike = default is not MISSING and type(value) is type(default)
            bound = key in ("act_low", "act_high") and np.isfinite(np.asarray(value, float)).all()
            number = default is None and type(value) in (int, bool)
            looked_up_later = offline(name) and (key, type(value)) in (("env_id", str), ("env_wrappers", list))
            folder = key == "logger" and isinstance(value, (str, list))
            assert empty or alike or bound or number or looked_up_later or folder, f"{name} takes {key}={value!r}"
            algorithm.close()


@pytest.mark.parametrize("name", NAMES)
def test_train_evaluate_and_predict_reject_bad_arguments_by_name(name):
    length = "n_updates" if offline(name) else "total_timesteps"
    algorithm = build(name, env_id="Pendulum-v1") if offline(name) else build(name)
    algorithm.train(8)
    before = algorithm.counters.scalars()
    obs = np.zeros(algorithm.spec.obs_dim, np.float32)
    ways = {
        length: lambda value: algorithm.train(**{length: value}),
        "until": lambda value: algorithm.train(until=value),
        "schedule_timesteps": lambda value: algorithm.train(8, schedule_timesteps=value),
        "n_episodes": lambda value: algorithm.evaluate(n_episodes=value),
        "max_steps": lambda value: algorithm.evaluate(1, max_steps=value),
        "seed": lambda value: algorithm.evaluate(1, seed=value),
        "deterministic": lambda value: algorithm.evaluate(1, deterministic=value),
        "obs": algorithm.predict,
    }
    for key, way in ways.items():
        for value in HOSTILE:
            takes_huge = key in ("until", "schedule_timesteps", length, "seed", "max_steps")
            if value is None or (takes_huge and same(value, 10**18)) or (key == "deterministic" and value is False):
                continue  # valid: the default, or a very large number
            if (key == "seed" and same(value, 0)) or (key == "deterministic" and value is True):
                continue
            with pytest.raises((TypeError, ValueError)) as caught:
                way(value)
            if key == "obs":
                assert "obs must" in str(caught.value)
            else:
                check_refusal(caught.value, key, value)
    for bad in (NAN, INF, 1e300):
        with pytest.raises(ValueError, match="predict: obs must contain numbers that are finite"):
            algorithm.predict(np.where(np.arange(len(obs)) == 1, bad, 0.0))
    with pytest.raises(TypeError, match="deterministic must be"):
        algorithm.predict(obs, 1)
    assert algorithm.counters.scalars() == before  # nothing was trained meanwhile


@pytest.mark.parametrize("name", ["ppo", "dqn", "bc"])
def test_whole_numbers_of_numpy_are_accepted(name, tmp_path):
    """They come from `np.arange` and the like, and must be stored in the JSON of a checkpoint."""
    sizes = {} if offline(name) else {"n_envs": np.int64(2), "threads": np.int32(1)}
    sizes |= {"buffer_size": np.int64(300)} if name == "dqn" else {}
    algorithm = build(name, seed=np.int64(3), **sizes)
    algorithm.train(np.int64(16))
    algorithm.save(tmp_path / "a.safetensors")
    again = type(algorithm).from_checkpoint(tmp_path / "a.safetensors")
    assert again.seed == 3
    assert again.counters.scalars() == algorithm.counters.scalars()
    assert again.counters.scalars()["horizon_steps"] == 16


@pytest.mark.parametrize(
    ("name", "backend"),
    [(name, backend) for name in NAMES for backend in ("native", "torch") if (name, backend) != ("dreamer", "native")],
)
def test_algorithms_cannot_be_copied_or_pickled(name, backend):
    algorithm = build(name, backend=backend)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=rf"{type(algorithm).__name__}: an algorithm must not be copied or pickled"):
            copied(algorithm)
    alike = copy.deepcopy(algorithm.policy)
    algorithm.train(64)
    assert any(not torch.equal(a, b) for a, b in zip(alike.parameters(), algorithm.policy.parameters(), strict=True))


@pytest.mark.parametrize("name", [name for name in NAMES if not offline(name)])
def test_an_environment_may_switch_gradients_off(name):
    def reward(obs, actions, rewards):
        torch.set_grad_enabled(False)
        return rewards

    with torch.enable_grad():  # and back on afterwards
        algorithm = build(name, backend="torch", **({} if name == "mappo" else {"reward_fn": reward}))
        torch.set_grad_enabled(False)
        assert algorithm.train(32)


@pytest.mark.parametrize("name", NAMES)
def test_replaced_parameters_are_an_error(name):
    algorithm = build(name, backend="torch")
    algorithm.policy.load_state_dict(copy.deepcopy(algorithm.policy.state_dict()))
    algorithm.train(8)
    algorithm.policy.double().float()
    with pytest.raises(ValueError, match="the networks' parameters must stay in the optimiser's memory"):
        algorithm.train(8)


@pytest.mark.parametrize("name", NAMES)
def test_a_training_with_nothing_left_warns(name):
    algorithm = build(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        algorithm.train(16)
    for again in ({}, {"until": algorithm.counters.end}):
        with pytest.warns(RuntimeWarning, match="train: nothing is left to train, all 16 .* are done"):
            algorithm.train(**again)


def test_the_warning_of_a_finished_training_names_an_end_that_continues_it():
    algorithm = rlox.PPO("CartPole-v1", n_envs=4, n_steps=32)
    algorithm.train(100)  # which ends after a whole rollout
    with pytest.warns(RuntimeWarning, match=r"train\(until=\.\.\.\) with more than 128 continues"):
        algorithm.train()
    algorithm.train(until=129)
    assert algorithm.counters.steps > 128
