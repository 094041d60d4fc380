"""Masks of legal actions: where environments offer them, and how they reach the arrays of a step."""

from __future__ import annotations

import functools
import re
import sys

import cloudpickle
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation, TimeLimit, TransformObservation
from masked_envs import SOURCES, Legal, legal

from rlox.algorithms import DQN, PPO
from rlox.envs import make_vec_env
from rlox.envs.gym_vec_env import EnvGroup, GymVecEnv
from rlox.envs.parallel_env import ParallelGymVecEnv
from rlox.envs.protocols import step_layout
from rlox.evaluation.episodes import evaluate
from rlox.kernels.rng import Rng
from rlox.nn.acting import ActingPolicy

cloudpickle.register_pickle_by_value(sys.modules[__name__])
CHOICES = [(4,), (3, 2, 2)]


def require_masks(vec, out=None, obs=None):
    """Masks in the results of a step, and of the environments themselves, must be those of the observations."""
    choices = vec.spec.choices
    if out is None:
        np.testing.assert_array_equal(vec.action_masks(), legal(obs, choices))
        return
    np.testing.assert_array_equal(out["action_mask"], legal(out["obs"], choices))
    np.testing.assert_array_equal(vec.action_masks(), out["action_mask"])
    final = legal(out["final_obs"], choices) | out["terminated"][:, None]
    np.testing.assert_array_equal(out["final_action_mask"], final)


def play(vec, n_steps, seed=0):
    """Legal random actions; returns the results of all steps."""
    rng, results = Rng(seed), []
    for _ in range(n_steps):
        actions = vec.spec.random_actions(rng, vec.n_envs, vec.action_masks())
        results.append(vec.step_all(actions))
    return results


@pytest.mark.parametrize("choices", CHOICES)
@pytest.mark.parametrize("source", SOURCES)
def test_masks_are_detected_and_belong_to_their_observations(source, choices):
    vec = GymVecEnv(lambda: Legal(source, choices), 3, seed=1)
    assert vec.spec.masked
    assert vec.spec.mask_source == SOURCES[source]
    assert vec.spec.obs_shape == (2,)
    with pytest.raises(ValueError, match=r"GymVecEnv.action_masks: the environments must be reset first"):
        vec.action_masks()
    obs = vec.reset_all()
    require_masks(vec, obs=obs)
    kept = vec.action_masks()
    before = kept.copy()
    ends = np.zeros(2, int)
    for out in play(vec, 24):
        ends += out["terminated"].sum(), out["truncated"].sum()
        assert {name: (array.shape, array.dtype.type) for name, array in out.items()} == {
            name: (shape, np.dtype(dtype).type) for name, (shape, dtype) in step_layout(vec.spec, 3).items()
        }
    assert (ends > 0).all()
    np.testing.assert_array_equal(kept, before)  # the caller may keep it
    assert not any(env.n_illegal for env in vec.envs)
    assert all(env.n_resets == 5 for env in vec.envs)  # the reset that found the masks is the first of the run


@pytest.mark.parametrize("choices", CHOICES)
@pytest.mark.parametrize("source", SOURCES)
def test_every_step_has_its_masks_with_and_without_workers(source, choices):
    alone = GymVecEnv(lambda: Legal(source, choices), 5, seed=2)
    with ParallelGymVecEnv(lambda: Legal(source, choices), 5, 2, workers=2) as vec:
        assert vec.spec == alone.spec
        assert vec.spec.mask_source == alone.spec.mask_source
        first = vec.reset_all()
        np.testing.assert_array_equal(first, alone.reset_all())
        require_masks(vec, obs=first)
        rng = Rng(0)
        for _ in range(12):
            actions = vec.spec.random_actions(rng, 5, vec.action_masks())
            out, other = vec.step_all(actions), alone.step_all(actions)
            require_masks(vec, out)
            require_masks(alone, other)
            for name, array in other.items():
                np.testing.assert_array_equal(out[name], array, err_msg=name)
        saved = vec.get_state()
        later = play(vec, 8)
    for again in (
        GymVecEnv(lambda: Legal(source, choices), 5),
        ParallelGymVecEnv(lambda: Legal(source, choices), 5, workers=3),
    ):
        with again:
            again.set_state(saved)
            require_masks(again, obs=other["obs"])
            for out, expected in zip(play(again, 8), later, strict=True):
                for name, array in expected.items():
                    np.testing.assert_array_equal(out[name], array, err_msg=name)


def test_only_wanted_arrays_are_filled():
    vec = GymVecEnv(Legal, 2)
    vec.reset_all()
    out = {"action_mask": np.zeros((2, 4), np.bool_), "obs": np.empty((2, 2), np.float32)}
    assert vec.step_all([0, 1], out) is out
    np.testing.assert_array_equal(out["action_mask"], legal(out["obs"], (4,)))


@pytest.mark.parametrize(
    ("form", "choices"),
    [
        (lambda mask: mask.astype(np.int8), (4,)),
        (lambda mask: mask.astype(np.float32), (4,)),
        (lambda mask: mask.tolist(), (4,)),
        (lambda mask: mask[None], (4,)),
        (lambda mask: (mask[:3].astype(np.int8), mask[3:5], mask[5:]), (3, 2, 2)),
        (lambda mask: mask.reshape(2, 3), (3, 3)),
    ],
)
@pytest.mark.parametrize("source", SOURCES)
def test_other_forms_of_a_mask(source, form, choices):
    vec = GymVecEnv(lambda: Legal(source, choices, form), 2)
    require_masks(vec, obs=vec.reset_all())


def test_an_action_space_that_starts_elsewhere():
    vec = GymVecEnv(lambda: Legal(start=7), 2)
    vec.reset_all()
    play(vec, 20)
    assert not any(env.n_illegal for env in vec.envs)


class Masker(gymnasium.Wrapper):
    """A wrapper with the method, as sb3-contrib's ActionMasker."""

    def action_masks(self):
        return self.unwrapped.mask()


@pytest.mark.parametrize("source", ["method", "wrapper"])
def test_the_method_is_seen_through_wrappers(source):
    def make():
        env = Legal("method") if source == "method" else Masker(Legal(""))
        return TimeLimit(TransformObservation(env, lambda obs: obs, env.observation_space), 3)

    vec = GymVecEnv(make, 2)
    assert vec.spec.mask_source == SOURCES["method"]
    vec.reset_all()
    for out in play(vec, 7):
        assert (out["action_mask"].sum(1) == 3).all()
        assert (out["final_action_mask"].sum(1) == 3).all()
    require_masks(vec, obs=out["obs"])


def test_stacked_observations_have_the_newest_mask():
    vec = GymVecEnv(lambda: FrameStackObservation(Legal("observation"), 3), 2)
    assert vec.spec.obs_shape == (6,)
    obs = vec.reset_all()
    require_masks(vec, obs=obs[:, 4:])
    for out in play(vec, 7):
        np.testing.assert_array_equal(out["action_mask"], legal(out["obs"][:, 4:], (4,)))


def test_the_order_of_sources():
    class Both(Legal):
        def action_masks(self):
            raise AssertionError("info comes first")

    assert GymVecEnv(Both).spec.mask_source == SOURCES["info"]
    assert GymVecEnv("Taxi-v4").spec.masked


def test_continuous_actions_have_no_masks():
    class Pushed(Legal):
        def __init__(self):
            super().__init__("observation")
            self.action_space = spaces.Box(-1, 1, (1,), np.float32)

    vec = GymVecEnv(Pushed)
    assert not vec.spec.masked
    assert vec.spec.obs_shape == (6,)
    assert vec.action_masks() is None


def test_environments_without_masks_are_reset_as_often_as_before():
    vec = GymVecEnv(lambda: Legal(""), 2, seed=3)
    assert not vec.spec.masked
    assert vec.spec.describe_masks() == ""
    obs = vec.reset_all()
    assert [env.n_resets for env in vec.envs] == [1, 1]
    assert vec.action_masks() is None
    assert "action_mask" not in vec.step_all([0, 0])
    other = GymVecEnv(lambda: Legal(""), 2, seed=4)
    np.testing.assert_array_equal(other.reset_all(seed=3), obs)  # another seed than that of the early reset


def test_an_error_of_the_first_reset_appears_in_the_first_reset():
    class Fails(Legal):
        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            raise OSError(f"no device in reset {self.n_resets}")

    vec = GymVecEnv(Fails, 2)
    with pytest.raises(OSError, match="no device in reset 1"):
        vec.reset_all()
    with pytest.raises(OSError, match="no device in reset 2"):
        vec.reset_all()


class Changing(Legal):
    """Its mask is replaced at one step of the second environment's episode."""

    def __init__(self, value, source="info", choices=(4,), at=2):
        super().__init__(source, choices, self._replaced)
        self.value, self.at = value, at

    def _replaced(self, mask):
        return self.value if self.t == self.at else mask


ODD = [
    (np.zeros(4, np.bool_), (4,), r"must allow at least one action, got none"),
    (np.array([1, 0, 1, 0, 0, 1, 1]), (3, 2, 2), r"must allow at least one choice of component 1, got none"),
    (np.ones(3), (4,), r"must be 4 flags, one for each action, got ndarray of shape \(3,\) of dtype float64"),
    (~np.array([0, 1, 1, 1]), (4,), r"must be 4 flags.* with numbers other than 0 and 1"),
    (None, (4,), r"must be 4 flags, one for each action, got NoneType"),
    ("abcd", (4,), r"must be 4 flags"),
    ([[1, 0, 1], [1]], (3, 2, 2), r"must be 7 flags, for \(3, 2, 2\) choices, one after another, got list"),
]


@pytest.mark.parametrize(("value", "choices", "message"), ODD)
@pytest.mark.parametrize("source", SOURCES)
def test_a_wrong_mask_is_an_error_with_its_place(source, value, choices, message):
    def make():
        return Changing(value, source, choices)

    text = f"{re.escape(SOURCES[source])} {message}"
    kinds = [GymVecEnv, functools.partial(ParallelGymVecEnv, workers=2)]
    for kind in kinds if source == "method" else kinds[:1]:
        with kind(make, 2) as vec:
            vec.reset_all()
            vec.step_all(np.zeros((2, *vec.spec.action_shape), np.int64))
            with pytest.raises(ValueError, match=text) as e:
                vec.step_all(np.zeros((2, *vec.spec.action_shape), np.int64))
            assert "(environment 0 (make" in str(e.value)
            assert "at step 2 of its episode)" in str(e.value)
            assert str(e.value).startswith(f"{type(vec).__name__}: make: ")


def test_a_wrong_mask_at_the_start_of_an_episode():
    vec = GymVecEnv(lambda: Changing(np.zeros(4), at=0))
    assert vec.spec.masked
    with pytest.raises(ValueError, match=r"got none \(environment 0 \(<lambda>\) at the start of its episode\)"):
        vec.reset_all()


def test_masks_must_not_come_and_go():
    class Sometimes(Legal):
        def _answer(self):
            obs, info = super()._answer()
            return obs, info if (self.t == self.masked_at) == self.appears else {}

    rule = r'info\["action_mask"\] must come with every step, from the first reset on, or with none'
    for appears, at in ((True, 2), (False, 2)):
        kind = type("Sometimes", (Sometimes,), {"masked_at": at, "appears": appears})
        vec = GymVecEnv(kind, 2)
        assert vec.spec.masked != appears
        vec.reset_all()
        vec.step_all([0, 0])
        with pytest.raises(ValueError, match=rf"{rule} \(environment 0 \(Sometimes\) at step 2 of its episode\)"):
            vec.step_all([0, 0])
    sources = iter(["method", ""])
    with pytest.raises(ValueError, match=r"masks must come from action_masks.* as in the first environment, got none"):
        GymVecEnv(lambda: Changing(None, next(sources)), 2).reset_all()


def test_an_error_in_the_method_names_the_environment():
    class Broken(Legal):
        def __init__(self):
            super().__init__("method", form=self.fail)

        def fail(self, mask):
            raise KeyError("board")

    from rlox.processes.failures import failure_of

    with pytest.raises(KeyError, match="board") as e:
        GymVecEnv(Broken, 2).reset_all()
    assert failure_of(e.value).what == "environment 0 (Broken): action_masks() at the start of its episode"


def test_a_dict_with_only_a_mask_is_refused():
    class OnlyMask(Legal):
        def __init__(self):
            super().__init__("observation")
            self.observation_space = spaces.Dict({"action_mask": spaces.MultiBinary(4)})

    with pytest.raises(ValueError, match=r"OnlyMask: the observation space must have more parts than action_mask"):
        GymVecEnv(OnlyMask)


def test_a_state_without_its_mask_is_refused():
    vec, plain = GymVecEnv(Legal), GymVecEnv(lambda: Legal(""))
    plain.reset_all()
    with pytest.raises(ValueError, match="a state must contain 4 legal actions, got None"):
        vec.set_state(plain.get_state())


@pytest.mark.parametrize("workers", [0, 2])
def test_a_checkpoint_without_masks_continues_with_fresh_episodes(workers, tmp_path, monkeypatch):
    """rlox 0.12 trained in environments with masks, and saved them, without their masks."""
    save_episode = EnvGroup._get_episode
    old = PPO(Legal, n_envs=2, n_steps=8, batch_size=16, hidden_sizes=(8,))
    old.train(16)
    with monkeypatch.context() as patch:
        patch.setattr(EnvGroup, "_get_episode", lambda *at: {k: v for k, v in save_episode(*at).items() if k != "mask"})
        old.save(tmp_path / "old.safetensors")
    new = PPO.from_checkpoint(tmp_path / "old.safetensors", env_id=Legal, env_workers=workers)
    assert "fresh episodes" in new.collector.restore_note()
    new.train(16)
    new.save(tmp_path / "new.safetensors")
    new.close()
    again = PPO.from_checkpoint(tmp_path / "new.safetensors", env_id=Legal, env_workers=workers)
    assert again.collector.restore_note() is None
    again.close()


@pytest.mark.parametrize("name", ["uniform", "prioritized", "mmap"])
def test_a_saved_memory_without_masks_is_not_used(name, tmp_path):
    buffer = {"name": name, "size": 100, **({"hot_size": 40, "folder": str(tmp_path)} if name == "mmap" else {})}
    old = DQN(functools.partial(Legal, ""), buffer=buffer, learning_starts=8, batch_size=8, hidden_sizes=(8,))
    old.train(64)
    old.save(tmp_path / "old.safetensors", memory=True)
    old.close()
    with pytest.warns(RuntimeWarning, match="the replay memory starts empty, because it was saved without the masks"):
        new = DQN.from_checkpoint(tmp_path / "old.safetensors", env_id=Legal, buffer=buffer)
    new.train(64)
    new.save(tmp_path / "new.safetensors", memory=True)
    new.close()
    again = DQN.from_checkpoint(tmp_path / "new.safetensors", env_id=Legal, buffer=buffer)
    assert len(again.buffer) == 64


def test_random_actions_are_uniform_over_the_legal_ones():
    for choices in CHOICES:
        spec = GymVecEnv(lambda choices=choices: Legal("info", choices)).spec
        np.testing.assert_array_equal(spec.random_actions(Rng(1), 9), spec.random_actions(Rng(1), 9, None))
        n = 6000
        mask = np.zeros((n, sum(choices)), np.bool_)
        edges = np.cumsum([0, *choices])
        legal_ones = [[0, 2]] + [[1]] * (len(choices) - 1)
        for edge, own in zip(edges, legal_ones, strict=False):
            mask[:, edge + np.array(own)] = True
        drawn = spec.random_actions(Rng(2), n, mask).reshape(n, -1)
        assert drawn.dtype == np.int64
        assert set(drawn[:, 0]) == {0, 2}
        assert abs((drawn[:, 0] == 2).mean() - 0.5) < 0.03
        assert (drawn[:, 1:] == 1).all()
        single = np.zeros((n, sum(choices)), np.bool_)
        single[:, edges[1:] - 1] = True  # the last choice of each component
        last = spec.random_actions(Rng(3), n, single).reshape(n, -1)
        np.testing.assert_array_equal(last, np.broadcast_to(np.array(choices) - 1, last.shape))


class FirstLegal(ActingPolicy):
    """Takes the first legal action, and notes what it saw."""

    def __init__(self):
        self.seen = []

    def noise_shape(self, n):
        return (n, 0)

    def mode(self, inputs, noise=None):
        self.seen.append((inputs.obs.copy(), None if inputs.mask is None else inputs.mask.copy()))
        return inputs.mask.argmax(1) if inputs.mask is not None else np.zeros(len(inputs.obs), np.int64), None


@pytest.mark.parametrize("source", SOURCES)
def test_an_evaluation_passes_masks_to_the_policy(source):
    policy = FirstLegal()
    result = evaluate(policy, lambda: Legal(source), 3, seed=5)
    np.testing.assert_array_equal(result.returns, [5, 5, 5])  # no action was illegal
    for obs, mask in policy.seen:
        np.testing.assert_array_equal(mask, legal(obs, (4,)))
    assert len(policy.seen) == 15
    bare = FirstLegal()
    evaluate(bare, lambda: Legal(""), 1, seed=5)
    assert all(mask is None for _, mask in bare.seen)
    with pytest.raises(ValueError, match=r"evaluate: <lambda>: .* got none \(after 2 steps of episode 0\)"):
        evaluate(FirstLegal(), lambda: Changing(np.zeros(4), source), 1)


def test_other_environments_have_no_masks():
    for vec in (make_vec_env("CartPole-v1", 2, 0), make_vec_env("CartPole-v1", 2, 0, device="cpu")):
        vec.reset_all()
        assert not vec.spec.masked
        assert vec.action_masks() is None
