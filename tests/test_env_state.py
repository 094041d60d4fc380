"""Saving gymnasium environments in checkpoints: exact if possible, otherwise reported, and safe with bad files."""

from __future__ import annotations

import json
import sys
from typing import ClassVar

import cloudpickle
import gymnasium
import numpy as np
import probes
import pytest
from gymnasium import spaces
from gymnasium.envs.mujoco.hopper_v5 import HopperEnv
from gymnasium.wrappers import TransformObservation
from hypothesis import given, settings
from hypothesis import strategies as st

from rlox.algorithms import PPO, SAC
from rlox.envs import make_vec_env

# Workers cannot import a test module by its name; a user's main module is sent by value without this.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

MUJOCO = [
    f"{name}-v5"
    for name in (
        *("Ant", "HalfCheetah", "Hopper", "Humanoid", "HumanoidStandup", "InvertedDoublePendulum"),
        *("InvertedPendulum", "Pusher", "Reacher", "Swimmer", "Walker2d"),
    )
]
CLASSIC = ["CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0"]


class Wanderer(gymnasium.Env):
    """A random walk whose state has values of every type that `get_state` may return."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(3)
    ballast = 3

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.np_random.normal(size=2)
        self.speed = np.float32(0.0)
        self.memory = {"map": np.zeros((self.ballast, 2), np.int16), "seen": [], "name": "Zoë", "open": True}
        return self.place.astype(np.float32), {}

    def step(self, action):
        self.speed = np.float32(self.speed * 0.9 + action - 1)
        self.place = np.add(self.place, [self.speed, self.np_random.normal() / 3])
        self.memory["seen"] = [*self.memory["seen"][-2:], float(self.place[0])]
        self.memory["map"][0] += 1
        reward = -abs(self.place[0]) - sum(self.memory["seen"]) * int(self.memory["open"])
        end = self.np_random.random() < 0.05
        return self.place.astype(np.float32), reward, end, bool(self.memory["map"][0, 0] > 40), {}

    def get_state(self):
        return {"place": self.place, "speed": self.speed, "memory": self.memory}

    def set_state(self, state):
        self.place, self.speed, self.memory = state["place"], state["speed"], state["memory"]


class Delay(gymnasium.ActionWrapper):
    """A wrapper that applies the previous action, with its own `get_state` and `set_state`."""

    received = 0

    def action(self, action):
        self.received, before = action, self.received
        return before

    def get_state(self):
        return int(self.received)

    def set_state(self, state):
        self.received = state


class Unsaid(Delay):
    """The same without a valid pair: `set_state` takes two arguments, as in gymnasium's MujocoEnv."""

    def set_state(self, received, other):
        pass


class Shy(Wanderer):
    def get_state(self):
        return {"places": {1, 2}}


def delayed_wanderer():
    return Delay(Wanderer())


def acting(vec, seed=0):
    """An endless sequence of actions for `vec`."""
    spec, rng = vec.spec, np.random.default_rng(seed)
    while True:
        if spec.continuous:
            yield spec.clip(rng.normal(size=(len(vec), spec.act_dim)).astype(np.float32))
        else:
            yield rng.integers(spec.n_actions, size=len(vec))


def require_same_future(one, other, n_steps):
    """Check that both return the same bits, and return the number of episodes that ended."""
    actions, ended = acting(one, 1), 0
    for _ in range(n_steps):
        action = next(actions)
        a, b = one.step_all(action), other.step_all(action)
        ended += (a["terminated"] | a["truncated"]).sum()
        for name in a:
            np.testing.assert_array_equal(a[name], b[name], err_msg=name)
    return ended


def played(env, n_steps=77, n=2, **options):
    vec = make_vec_env(env, n, 3, backend="gymnasium", **options)
    vec.reset_all()
    for _, action in zip(range(n_steps), acting(vec), strict=False):
        vec.step_all(action)
    return vec


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "used"),
    [
        *((env, False) for env in (*MUJOCO, *CLASSIC, "rlox/CartPole-v1", Wanderer, delayed_wanderer)),
        *((env, True) for env in ("Hopper-v5", "Ant-v5", "CartPole-v1", "rlox/CartPole-v1", delayed_wanderer)),
    ],
)
def test_restored_environments_continue_bit_for_bit(env, used):
    n_steps = 200 if env in MUJOCO else 600
    options = {"kwargs": {"max_episode_steps": 180}} if isinstance(env, str) and not env.startswith("rlox/") else {}
    one = played(env, **options)
    other = played(env, 5, **options) if used else make_vec_env(env, 2, 9, backend="gymnasium", **options)
    other.set_state(one.get_state())
    assert require_same_future(one, other, n_steps) >= 2


def test_body_positions_of_mujoco_are_restored():
    """Ant's reward depends on torso positions of MuJoCo's last integration, which are not part of its state."""
    one, other = played("Ant-v5"), make_vec_env("Ant-v5", 2, 9)
    other.set_state(one.get_state())
    for env in other.envs:
        import mujoco

        mujoco.mj_forward(env.unwrapped.model, env.unwrapped.data)
    with pytest.raises(AssertionError, match="rewards"):
        require_same_future(one, other, 1)


@pytest.mark.slow
@pytest.mark.parametrize("env", ["Hopper-v5", delayed_wanderer])
def test_a_state_is_the_same_with_and_without_workers(env):
    wrappers = ["ClipAction"] if env == "Hopper-v5" else []
    alone = played(env, n=3, wrappers=wrappers)
    with played(env, n=3, workers=2, wrappers=wrappers) as shared, make_vec_env(env, 3, 9, None, wrappers, 3) as other:
        state, same = alone.get_state(), shared.get_state()
        assert {name: array.tobytes() for name, array in state.items()} == {n: a.tobytes() for n, a in same.items()}
        other.set_state(state)
        assert require_same_future(alone, other, 200) >= 2


@pytest.mark.slow
def test_workers_pass_on_states_larger_than_a_sockets_buffer():
    class Laden(Wanderer):
        ballast = 1_000_000

    with played(Laden, workers=2) as one, make_vec_env(Laden, 2, 9, workers=1) as other:
        other.set_state(one.get_state())
        assert require_same_future(one, other, 30) >= 1


def require_exact_continuation(make, load, n_steps, tmp_path, **saving):
    """Check that training at once and in two parts gives the same checkpoint."""
    path = tmp_path / "a.safetensors"
    whole, first = make(), make()
    for _ in range(2):
        whole.train(n_steps)
    first.train(n_steps)
    first.save(path, **saving)
    second = load(path)
    second.train(n_steps)
    assert second.collector.restore_note() is None
    assert whole.counters == second.counters
    assert whole.counters.episodes > 5
    mine, theirs = whole._checkpoint(), second._checkpoint()
    assert mine.tensors.keys() == theirs.tensors.keys()
    for section, arrays in mine.tensors.items():
        assert arrays.keys() == theirs.tensors[section].keys()
        for name, array in arrays.items():
            np.testing.assert_array_equal(array, theirs.tensors[section][name], err_msg=f"{section}/{name}")
    assert len(mine.tensors["environment"]) == 3
    for algorithm in (whole, first, second):
        algorithm.close()
        algorithm.save(path)
        assert algorithm.collector.state() is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "workers", "options"),
    [
        ("CartPole-v1", 0, {}),
        ("Pendulum-v1", 0, {"normalize_obs": True, "normalize_rewards": True, "env_kwargs": {"max_episode_steps": 50}}),
        ("HalfCheetah-v5", 0, {"env_kwargs": {"max_episode_steps": 90}, "normalize_rewards": True}),
        ("HalfCheetah-v5", 2, {"env_kwargs": {"max_episode_steps": 90}}),
        ("Hopper-v5", 0, {"backend": "torch"}),
        (delayed_wanderer, 0, {}),
        (delayed_wanderer, 2, {"normalize_obs": True}),
    ],
)
def test_ppo_continues_exactly(env, workers, options, tmp_path):
    def make():
        settings = {"n_steps": 67, "batch_size": 67, "n_epochs": 2, "learning_rate_schedule": "constant"}
        return PPO(env, 3, 5, env_workers=workers, env_backend="gymnasium", hidden_sizes=[8], **settings, **options)

    def load(path):
        return PPO.from_checkpoint(path, env_id=None if isinstance(env, str) else env)

    require_exact_continuation(make, load, 402, tmp_path)


def test_sac_continues_exactly(tmp_path):
    def make():
        return SAC("Hopper-v5", 2, 5, hidden_sizes=[8], batch_size=8, buffer_size=500, learning_starts=30)

    require_exact_continuation(make, SAC.from_checkpoint, 300, tmp_path, memory=True)


class Deep(Wanderer):
    def get_state(self):
        state = []
        for _ in range(600):
            state = [state]
        return state


def lost(make, path, **options):
    algorithm = make()
    algorithm.train(64)
    algorithm.save(path)
    again = PPO.from_checkpoint(path, **options)
    again.train(64)
    return algorithm.collector, again.collector.restore_note()


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ("LunarLander-v3", "LunarLander has no get_state"),
        (lambda: TransformObservation(Wanderer(), lambda obs: obs, None), "TransformObservation has no get_state"),
        (lambda: Unsaid(Wanderer()), "Unsaid has no get_state"),
        (type("MyHopper", (HopperEnv,), {"get_state": lambda self: 0}), "MyHopper has no get_state"),
        (Shy, "its state contains a set"),
        (Deep, "its state is nested in more than 100 levels"),
    ],
)
def test_environments_that_cannot_be_restored_start_new_episodes_with_a_note(env, reason, tmp_path):
    make = lambda: PPO(env, 2, 5, n_steps=32, hidden_sizes=[8])  # noqa: E731
    collector, note = lost(make, tmp_path / "a.safetensors", env_id=None if isinstance(env, str) else env)
    assert collector.state() is None
    assert not collector.restorable
    assert reason in collector.restore_note()
    assert "fresh episodes, everything else is exact" in note
    assert note.startswith(getattr(env, "__name__", env))


class Seeded(Wanderer):
    """An environment that cannot be restored, and remembers the numbers that seed it."""

    set_state = None
    seeds: ClassVar[list[int]] = []

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.seeds.append(seed)
        return super().reset(seed=seed)


def test_new_episodes_of_a_resumed_run_are_not_its_first_ones_again(tmp_path):
    path, found = tmp_path / "a.safetensors", []
    ppo = PPO(Seeded, 2, 5, n_steps=32, hidden_sizes=[8])
    for resumes in (True, True, False):
        ppo.train(64)
        found.append(Seeded.seeds[-2:])
        if resumes:
            ppo.save(path)
            ppo = PPO.from_checkpoint(path, env_id=Seeded)
    PPO.from_checkpoint(path, env_id=Seeded).train(64)
    assert len({*found[0], *found[1], *found[2]}) == 6
    assert Seeded.seeds[-2:] == found[2]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"env_backend": "gymnasium"}, {"env_backend": "auto"}),
        ({}, {"env_backend": "gymnasium"}),
        ({"env_backend": "gymnasium"}, {"env_wrappers": ["FlattenObservation"]}),
    ],
)
def test_changed_settings_start_new_episodes_with_a_note(before, after, tmp_path):
    make = lambda: PPO("CartPole-v1", 2, 5, n_steps=32, hidden_sizes=[8], **before)  # noqa: E731
    collector, note = lost(make, tmp_path / "a.safetensors", **after)
    assert collector.restorable
    assert collector.restore_note() is None
    assert "made of other parts): it starts with fresh episodes" in note


STATE = played("Hopper-v5").get_state()
HOPPERS = make_vec_env("Hopper-v5", 2, 3)
DEEP = np.frombuffer(b"[" * 100_000, np.uint8)


def changed(state, change):
    """A copy of `state` whose JSON was modified by `change`."""
    content = json.loads(bytes(state["env_json"]))
    change(content["envs"][0]["dict"])
    return {**state, "env_json": np.frombuffer(json.dumps(content).encode(), np.uint8)}


def layers(env):
    return env["env"]["dict"]["layers"]


def physics(env):
    return layers(env)[3]["dict"]


def generator(env):
    return env["env"]["dict"]["np_random"]["dict"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda env: env.update({"return": "0"}), "the return so far"),
        (lambda env: env.update(length=-1), "the length so far must be an integer >= 0, got -1"),
        (lambda env: env.update(length=True), "the length so far"),
        (lambda env: layers(env).append(None), "must have 4 layers"),
        (lambda env: layers(env).__setitem__(0, 1.5), "the steps of TimeLimit"),
        (lambda env: physics(env).update(a=0), "the state of HopperEnv must contain integration, xpos, xipos"),
        (
            lambda env: physics(env)["xpos"]["array"].__setitem__(1, [15]),
            r"HopperEnv.*xpos must be .* \(5, 3\), got .*15",
        ),
        (lambda env: generator(env).update(bit_generator="MT19937"), "PCG64"),
        (lambda env: generator(env)["state"]["dict"].update(inc=2), "PCG64"),
        (lambda env: generator(env)["state"]["dict"].update(state=2**128), "PCG64"),
        (lambda env: env.update(more={"array": ["float64", [2**40]]}), "must have a known dtype and a shape"),
        (lambda env: env.update(more={"array": ["float64", [2**30] * 9]}), "an array of float64"),
        (lambda env: env.update(more={"array": ["object", [1]]}), "known dtype"),
        (lambda env: env.update(more={"array": ["float64", [-1]]}), "known dtype"),
        (lambda env: env.update(more={"run": "this"}), "must be a dict or an array"),
        (lambda env: env.update(env=[env["env"]]), "must have 4 layers"),
    ],
)
def test_a_damaged_state_is_an_error(change, message):
    with pytest.raises(ValueError, match=message):
        HOPPERS.set_state(changed(STATE, change))


@pytest.mark.slow
def test_workers_stay_usable_after_a_bad_state():
    with make_vec_env("Hopper-v5", 2, 9, workers=2) as vec:
        with pytest.raises(ValueError, match="length so far"):
            vec.set_state(changed(STATE, lambda env: env.update(length=-1)))
        vec.set_state(STATE)
        assert require_same_future(played("Hopper-v5"), vec, 100) >= 2


@pytest.mark.parametrize("name", STATE)
@pytest.mark.parametrize("value", [DEEP, DEEP[:0], np.zeros(3), np.zeros((2, 2), np.uint8), None], ids=str)
def test_invalid_bytes_are_errors(name, value):
    with pytest.raises(ValueError, match=name):
        HOPPERS.set_state({**STATE, name: value})


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_change_of_bytes_is_an_error_or_harmless(data):
    name = data.draw(st.sampled_from(sorted(STATE)))
    content = bytearray(STATE[name].tobytes())
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[at] = data.draw(st.integers(0, 255))
    else:
        del content[at:]
    try:
        HOPPERS.set_state({**STATE, name: np.frombuffer(content, np.uint8)})
    except ValueError:
        return
    HOPPERS.step_all(np.zeros((2, 3)))


def test_the_collector_refuses_other_observations():
    ppo = PPO("Pendulum-v1", 2, 5, n_steps=32, hidden_sizes=[8], env_backend="gymnasium")
    ppo.train(64)
    state = ppo.collector.state()
    for wrong in (state["env_obs"][:1], state["env_obs"].astype(np.float64), None):
        with pytest.raises(ValueError, match="env_obs must be an array"):
            ppo.collector.set_state({**state, "env_obs": wrong})


def test_acrobot_with_infinite_angles_is_an_error():
    vec = played("Acrobot-v1", n=1)
    vec.envs[0].unwrapped.state[0] = 1e300
    with pytest.raises(ValueError, match="within 100"):
        vec.set_state(vec.get_state())


def test_probes_have_no_get_state():
    assert (
        make_vec_env(probes.ConstantReward, 1, 0).unrestorable_reason
        == "ConstantReward has no get_state() and set_state(state)"
    )


@pytest.mark.parametrize("cls", [PPO, SAC])
def test_a_state_never_mixes_two_steps(cls):
    """If code after a step fails, observations and state are both from after the step; a replay memory lacks it."""
    options = {"n_steps": 32} if cls is PPO else {"learning_starts": 10_000}
    reward_fn = probes.FailsOnce(20, OSError("gone"))
    algorithm = cls("Hopper-v5", 2, 5, reward_fn=reward_fn, normalize_obs=True, **options)
    with pytest.raises(OSError, match="gone"):
        algorithm.train(128)
    state, vec = algorithm.collector.state(), algorithm.collector.env
    if cls is SAC:
        assert state is None
        return
    seen = [env.unwrapped._get_obs() for env in vec.envs]
    np.testing.assert_array_equal(state["env_obs"], np.asarray(seen, np.float32))


class Fragile(Wanderer):
    def step(self, action):
        if self.np_random.random() < 0.05:
            raise OSError("gone")
        return super().step(action)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_after_a_step_that_failed_there_is_no_state(workers, tmp_path):
    """Some environments may have stepped and others not; the weights can still be saved."""
    ppo = PPO(Fragile, 2, 5, n_steps=8, hidden_sizes=[8], env_workers=workers)
    ppo.collector.collect(ppo.actor, 1)
    assert ppo.collector.state() is not None
    with pytest.raises((OSError, RuntimeError), match="gone"):
        ppo.train(4_000)
    assert ppo.collector.state() is None
    ppo.save(tmp_path / "a.safetensors")
