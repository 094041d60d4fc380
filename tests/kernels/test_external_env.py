"""Environments of other packages: a PyCapsule with `rlox_env_v1` runs in the loop of the built-in ones.

The environments are ctypes callbacks, so that no compiler is needed; examples/ contains one in C.
"""

import copy
import ctypes as c
import pickle
import sys

import numpy as np
import pytest
from outside_envs import MASKS, OBSERVE, RESET, STEP, MaskedSpec, P, Spec, bounds, capsule_of, new_capsule

import rlox
from rlox.kernels.envs import NATIVE_ENVS, Env, VecEnv, native_ids, register_native
from rlox.kernels.envs.native_env import REGISTERED

NEVER = 2**63 - 1


def walk(discrete, **change):
    """A walk in the plane: the action moves (x, y); it ends where |x| or |y| exceeds 3; the reward is x + y.

    Episodes begin at (0, number of the episode / 4). `terminated` is written as 2, which must be read as true.
    """

    def arrays(batch, *pointers):
        n = batch.contents.n
        state = np.ctypeslib.as_array(batch.contents.state, (2, n))
        return n, state, *[np.ctypeslib.as_array(p, (n, 2)) for p in pointers]

    def reset(params, batch, m, index, obs):
        _, state, rows = arrays(batch, obs)
        for i in index[:m]:
            assert batch.contents.steps[i] == 0
            state[:, i] = 0, batch.contents.episodes[i] / 4
            rows[i] = state[:, i]

    def step(params, batch, actions, obs, rewards, terminated):
        n, state, rows = arrays(batch, obs)
        if discrete:
            taken = np.ctypeslib.as_array(c.cast(actions, P(c.c_int64)), (n,))
            moves = np.array([[1, 0], [0, 1], [-1, 0]])[taken]
        else:
            moves = np.ctypeslib.as_array(c.cast(actions, P(c.c_float)), (n, 2)).clip(-1, 1)
        state += moves.T
        rows[:] = state.T
        np.ctypeslib.as_array(rewards, (n,))[:] = state.sum(0)
        np.ctypeslib.as_array(terminated, (n,))[:] = 2 * (np.abs(state) > 3).any(0)

    def observe(params, batch, obs):
        _, state, rows = arrays(batch, obs)
        rows[:] = state.T

    spec = {
        "struct_size": c.sizeof(Spec),
        "env_id": b"Walk-v0" if discrete else b"Drift-v0",
        "state_size": 2,
        "obs_dim": 2,
        "n_actions": 3 if discrete else 0,
        "act_dim": 1 if discrete else 2,
        "act_low": None if discrete else bounds(-1, -1),
        "act_high": None if discrete else bounds(1, 1),
        "max_episode_steps": 7,
        "reset_n": RESET(reset),
        "step_n": STEP(step),
        "observe_n": OBSERVE(observe),
    } | change
    return capsule_of((MaskedSpec if "mask_n" in spec else Spec)(**spec))


def allowed(obs):
    """The legal actions (N, 3) of `masked_walk` in observations (N, 2): not twice to the same side."""
    x, y = np.asarray(obs).T
    return np.stack([x < 1, y < 1, x > -1], 1)


def masked_walk(rule=allowed, **change):
    """`walk` with masks of legal actions, written as 2, which must be read as true."""

    def mask(params, batch, flags):
        n = batch.contents.n
        state = np.ctypeslib.as_array(batch.contents.state, (2, n))
        np.ctypeslib.as_array(flags, (n, 3))[:] = 2 * rule(state.T)

    struct = {"struct_size": c.sizeof(MaskedSpec), "flags": 2, "mask_n": MASKS(mask)}
    return walk(True, **(struct | change))


@pytest.fixture(autouse=True)
def forget_what_a_test_registers():
    yield
    REGISTERED.clear()


@pytest.mark.parametrize("n", [1, 3, 600])
def test_the_loop_runs_an_external_environment(n):
    env = VecEnv(n, 5, walk(discrete=True))
    assert (env.env_id, env.obs_dim, env.n_actions, env.act_dim) == ("Walk-v0", 2, 3, 1)
    assert (env.discrete, env.act_low, env.act_high, env.max_episode_steps) == (True, None, None, 7)
    np.testing.assert_array_equal(env.reset_all(), np.zeros((n, 2)))
    rng = np.random.default_rng(0)
    where, t, episode, total = np.zeros((n, 2)), np.zeros(n), np.zeros(n), np.zeros(n)
    for _ in range(40):
        actions = rng.integers(0, 3, n)
        step = env.step_all(actions)
        where += np.array([[1, 0], [0, 1], [-1, 0]])[actions]
        t, total = t + 1, total + where.sum(1)
        terminated, truncated = (np.abs(where) > 3).any(1), t >= 7
        done = terminated | truncated
        np.testing.assert_array_equal(step["final_obs"], where.astype(np.float32))
        np.testing.assert_array_equal(step["rewards"], where.sum(1))
        assert set(step["terminated"].view(np.uint8)) <= {0, 1}
        np.testing.assert_array_equal(step["terminated"], terminated)
        np.testing.assert_array_equal(step["truncated"], truncated)
        np.testing.assert_array_equal(step["episode_length"], t)
        np.testing.assert_array_equal(step["episode_return"], total)
        episode += done
        where[done] = np.stack([np.zeros(n), episode / 4], 1)[done]
        t[done] = total[done] = 0
        np.testing.assert_array_equal(step["obs"], where.astype(np.float32))
        np.testing.assert_array_equal(env.observe(), step["obs"])
        np.testing.assert_array_equal(env.get_state()["state"], where.T)


def test_actions_of_several_components():
    env = VecEnv(3, 0, walk(discrete=False))
    assert (env.n_actions, env.act_dim) == (None, 2)
    np.testing.assert_array_equal(env.act_low, np.float32([-1, -1]))
    np.testing.assert_array_equal(env.act_high, np.float32([1, 1]))
    moves = [[0.5, 0.25], [-5, 0.5], [0, 5]]
    for given in (moves, np.array(moves), np.asfortranarray(moves, np.float32)):
        env.reset_all(0)
        np.testing.assert_array_equal(env.step_all(given)["obs"], [[0.5, 0.25], [-1, 0.5], [0, 1]])
    for wrong in (np.zeros(3), np.zeros(6), np.zeros((3, 1)), np.zeros((2, 3))):
        with pytest.raises(ValueError, match=r"actions must have shape \(3, 2\), one per environment"):
            env.step_all(wrong)
    with pytest.raises(ValueError, match=r"not NaN, got .* at index 1"):
        env.step_all([[0, 0], [0, np.nan], [0, 0]])


def test_a_single_external_environment():
    env = Env(walk(discrete=False), seed=0)
    np.testing.assert_array_equal(env.reset(), [0, 0])
    for t in range(7):
        result = env.step([0.25, -0.25])
        np.testing.assert_array_equal(result["obs"], np.array([0.25, -0.25]) * (t + 1))
        assert result["truncated"] == (t == 6)
    with pytest.raises(ValueError, match=r"Env.step: .* call reset\(\) first"):
        env.step([0, 0])
    env.reset()
    for action, error, message in (
        (0.5, ValueError, r"shape \(2,\), got \(\)"),
        ([0.0], ValueError, r"shape \(2,\), got \(1,\)"),
        ([0, np.nan], ValueError, "not NaN"),
        (["a", "b"], TypeError, "real numbers"),
    ):
        with pytest.raises(error, match="Env.step: action must .*" + message):
            env.step(action)


def test_no_time_limit():
    capsule = walk(discrete=True, max_episode_steps=0)
    env = VecEnv(2, 0, capsule)
    assert env.max_episode_steps is None
    env.reset_all()
    state = env.get_state() | {"steps": np.array([NEVER - 5, 0])}
    env.set_state(state)
    for actions in ([0, 0], [2, 2], [0, 0]):
        assert not env.step_all(actions)["truncated"].any()


def test_registration_makes_the_id_known():
    capsule = walk(discrete=True)
    with pytest.raises(ValueError, match=r"env_id must be a native .* got 'Walk-v0'; .* with register_native first"):
        VecEnv(2, 0, "Walk-v0")
    assert native_ids() == NATIVE_ENVS
    assert register_native(capsule) == "Walk-v0"
    assert register_native(capsule) == "Walk-v0"
    assert native_ids() == (*NATIVE_ENVS, "Walk-v0")
    env = VecEnv(2, 0, "Walk-v0")
    assert env.reset_all().shape == (2, 2)
    with pytest.raises(ValueError, match="register_native: Walk-v0: env_id must be new, got one that is registered"):
        register_native(walk(discrete=True))
    with pytest.raises(ValueError, match="VecEnv: Walk-v0: env_id must be new"):
        VecEnv(2, 0, walk(discrete=True))
    with pytest.raises(ValueError, match="CartPole-v1: env_id must not be the id of a built-in"):
        register_native(walk(discrete=True, env_id=b"CartPole-v1"))


def test_pickles_and_snapshots_refer_to_the_id():
    capsule = walk(discrete=True)
    env, other = VecEnv(3, 1, capsule), VecEnv(3, 2, capsule)
    env.reset_all()
    env.step_all([0, 1, 2])
    other.set_state(env.get_state())
    np.testing.assert_array_equal(other.observe(), env.observe())
    data, single = pickle.dumps(env), pickle.dumps(Env(capsule, 0))
    for text in (data, single):
        with pytest.raises(ValueError, match="with register_native first"):
            pickle.loads(text)
    register_native(capsule)
    copy = pickle.loads(data)
    np.testing.assert_array_equal(copy.step_all([1, 1, 1])["obs"], env.step_all([1, 1, 1])["obs"])
    assert pickle.loads(single).env_id == "Walk-v0"


def test_copies_and_pickles_say_that_a_capsule_must_be_registered():
    capsule = walk(discrete=True)
    env = rlox.VecEnv(3, 1, capsule)
    env.reset_all()
    data = pickle.dumps(env)
    message = r"^VecEnv: the environment of a copy or pickle must be registered in this process, got 'Walk-v0'; call"
    for again in (lambda: copy.copy(env), lambda: copy.deepcopy(env), lambda: pickle.loads(data)):
        with pytest.raises(ValueError, match=message):
            again()
    rlox.register_env(capsule)
    for other in (copy.deepcopy(env), pickle.loads(data)):
        np.testing.assert_array_equal(other.observe(), env.observe())


def test_a_vec_env_keeps_its_capsule_alive():
    capsule = walk(discrete=True)
    before = sys.getrefcount(capsule)
    env = VecEnv(1, 0, capsule)
    assert sys.getrefcount(capsule) == before + 1
    del env
    assert sys.getrefcount(capsule) == before


@pytest.mark.parametrize(
    ("discrete", "change", "message"),
    [
        (True, {"struct_size": 8}, rf"struct_size must be at least {c.sizeof(Spec)}, got 8"),
        (True, {"flags": 4}, r"flags must be 0, RLOX_ENV_AGENTS \(1\) or RLOX_ENV_MASKS \(2\), got 4"),
        (True, {"env_id": None}, "env_id must be a name, got NULL"),
        (True, {"env_id": b""}, "env_id must be a name, got an empty one"),
        (True, {"env_id": b"\xff\xfe"}, "env_id must be UTF-8"),
        (True, {"state_size": 0}, "Walk-v0: state_size must be at least 1 .*, got 0"),
        (True, {"state_size": 2**62}, "state_size must be .*at most 2"),
        (True, {"obs_dim": -3}, "obs_dim must be at least 1 .*, got -3"),
        (True, {"n_actions": -1}, "n_actions must be at least 0 .*, got -1"),
        (True, {"act_dim": 0}, "act_dim must be at least 1 .*, got 0"),
        (True, {"act_dim": 2}, "act_dim must be 1 if n_actions is not 0, got 2"),
        (True, {"act_low": bounds(0)}, "act_low and act_high must be NULL if n_actions"),
        (True, {"max_episode_steps": -1}, "max_episode_steps must be at least 0 .*, got -1"),
        (True, {"reset_n": RESET()}, "reset_n must be a function, got NULL"),
        (True, {"step_n": STEP()}, "step_n must be a function, got NULL"),
        (True, {"observe_n": OBSERVE()}, "observe_n must be a function, got NULL"),
        (False, {"act_low": None}, "act_low and act_high must point to bounds if n_actions is 0, got NULL"),
        (False, {"act_high": bounds(1, -1)}, "act_low must be below act_high, got -1.0 and -1.0 at 1"),
        (False, {"act_high": bounds(1, np.nan)}, "act_low must be below act_high"),
    ],
)
def test_fields_are_checked(discrete, change, message):
    capsule = walk(discrete, **change)
    for where, call in (
        ("VecEnv", lambda: VecEnv(1, 0, capsule)),
        ("Env", lambda: Env(capsule)),
        ("register_native", lambda: register_native(capsule)),
    ):
        with pytest.raises(ValueError, match=f"{where}: (.*: )?{message}"):
            call()
    assert native_ids() == NATIVE_ENVS


def test_capsules_are_checked():
    with pytest.raises(ValueError, match=r"capsule must be named 'rlox.env.v1', got 'other'"):
        register_native(new_capsule(1, b"other", None))
    with pytest.raises(ValueError, match=r"capsule must be named 'rlox.env.v1', got one without a name"):
        VecEnv(1, 0, new_capsule(1, None, None))
    with pytest.raises(TypeError, match=r"capsule must be a PyCapsule named 'rlox.env.v1', got str"):
        register_native("Walk-v0")
    for wrong in (None, 3, b"CartPole-v1"):
        with pytest.raises(TypeError, match="env_id must be an id or a PyCapsule"):
            VecEnv(1, 0, wrong)


def test_a_larger_struct_is_accepted():
    assert VecEnv(1, 0, walk(discrete=True, struct_size=c.sizeof(Spec) + 64)).env_id == "Walk-v0"


@pytest.mark.parametrize("what", ["rewards", "observations"])
@pytest.mark.parametrize("algo", [rlox.PPO, rlox.DQN])
def test_what_is_not_finite_is_named_where_the_kernel_steps(algo, what):
    calls = 0

    def step(params, batch, actions, obs, rewards, terminated):
        nonlocal calls
        calls += 1
        n = batch.contents.n
        np.ctypeslib.as_array(obs, (n, 2))[:] = np.nan if what == "observations" and calls == 30 else 0.5
        np.ctypeslib.as_array(rewards, (n,))[:] = 1
        if what == "rewards" and calls == 30:
            rewards[2] = np.nan
        np.ctypeslib.as_array(terminated, (n,))[:] = 0

    register_native(walk(discrete=True, env_id=b"Broken-v0", step_n=STEP(step)))
    more = {"n_steps": 32} if algo is rlox.PPO else {"learning_starts": 400, "buffer_size": 1000}
    algorithm = algo("Broken-v0", 4, 0, hidden_sizes=[8], **more)
    assert algorithm.backend == "native"
    at = "in number 0 from environment 0" if what == "observations" else "from environment 2"
    with pytest.raises(FloatingPointError, match=f"Broken-v0: {what} must be finite, got nan {at} at step 120;"):
        algorithm.train(4000)


def test_masks_of_legal_actions():
    """They belong to their observations in every step, with more environments than one block, and after a restore."""
    n, rng = 300, np.random.default_rng(0)
    env = rlox.VecEnv(n, 1, register_native(masked_walk()))
    assert env.spec.masked
    assert env.spec.mask_source
    with pytest.raises(ValueError, match="the environments must be reset first"):
        env.action_masks()
    np.testing.assert_array_equal(allowed(env.reset_all()), env.action_masks())
    ends, seen = np.zeros(2, int), set()
    for t in range(20):
        kept = env.action_masks()
        actions = np.where(kept, rng.random((n, 3)), -1).argmax(1)
        out = env.step_all(actions, copy=t % 2 == 0)
        ends += out["terminated"].sum(), out["truncated"].sum()
        np.testing.assert_array_equal(out["action_mask"], allowed(out["obs"]))
        np.testing.assert_array_equal(env.action_masks(), out["action_mask"])
        final = allowed(out["final_obs"]) | out["terminated"][:, None]
        np.testing.assert_array_equal(out["final_action_mask"], final)
        assert out["action_mask"].dtype == np.bool_
        seen |= set(out["action_mask"].view(np.uint8).flat)
    assert ends[1] > 0
    assert seen == {0, 1}
    again = rlox.VecEnv(n, 5, "Walk-v0")
    again.set_state(env.get_state())
    np.testing.assert_array_equal(again.action_masks(), allowed(env.observe()))
    chosen = {"final_action_mask": np.zeros((n, 3), np.bool_)}
    assert again.step_all(actions, chosen) is chosen
    assert chosen["final_action_mask"].any()
    with pytest.raises(TypeError, match="bool"):
        again.step_all(actions, {"action_mask": np.zeros((n, 3), np.uint8)})


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("algo", [rlox.PPO, rlox.DQN])
def test_agents_take_only_legal_actions(algo, backend, tmp_path):
    """Both while training and after a restore, which is exact."""
    register_native(masked_walk())
    ppo = algo is rlox.PPO
    more = {"n_steps": 16, "batch_size": 32} if ppo else {"learning_starts": 40, "batch_size": 16}
    first, whole = (algo("Walk-v0", 4, 0, hidden_sizes=[8], backend=backend, **more) for _ in range(2))
    first.train(128)
    first.save(tmp_path / "a.safetensors", **({} if ppo else {"memory": True}))
    again = algo.from_checkpoint(tmp_path / "a.safetensors", backend=backend)
    for agent in (again, whole, whole):
        agent.train(128)
    assert again.collector.restore_note() is None
    for name, value in again.policy.state_dict().items():
        np.testing.assert_array_equal(value, whole.policy.state_dict()[name])
    rows = whole.collector.collect(whole.policy, 16) if ppo else whole.buffer.sample(200, 0)
    obs, actions = (rows.obs, rows.actions) if ppo else (rows["obs"], rows["actions"])
    assert allowed(np.asarray(obs))[np.arange(len(obs)), np.asarray(actions).reshape(-1).astype(int)].all()


def test_masks_in_gymnasium():
    from rlox.envs.gymnasium_envs import NativeEnv, NativeVectorEnv

    register_native(masked_walk())
    single = NativeEnv("Walk-v0")
    obs, info = single.reset(seed=0)
    np.testing.assert_array_equal(info["action_mask"], allowed(obs[None])[0])
    obs, *_, info = single.step(0)
    np.testing.assert_array_equal(info["action_mask"], allowed(obs[None])[0])
    assert info["action_mask"].tolist() == [False, True, True]
    several = NativeVectorEnv(3, "Walk-v0")
    obs, info = several.reset(seed=0)
    for _ in range(9):
        np.testing.assert_array_equal(info["action_mask"], allowed(obs))
        obs, *_, info = several.step(info["action_mask"].argmax(1))


def test_environments_without_masks_have_none():
    env = rlox.VecEnv(2)
    env.reset_all()
    assert env.action_masks() is None
    assert not env.spec.masked
    with pytest.raises(ValueError, match="out must have keys among"):
        env.step_all([0, 0], {"action_mask": np.zeros((2, 2), np.bool_)})


def test_a_mask_that_allows_nothing_is_an_error():
    env = rlox.VecEnv(2, 0, masked_walk(lambda rows: np.repeat(rows[:, :1] < 0.5, 3, 1)))
    env.reset_all()
    with pytest.raises(
        ValueError, match=r"mask_n must allow at least one action, got none in the current state \(environ"
    ):
        env.step_all([1, 0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask_n": MASKS()}, "mask_n must be a function with RLOX_ENV_MASKS, got NULL"),
        ({"flags": 3}, r"flags must be 0, RLOX_ENV_AGENTS \(1\) or RLOX_ENV_MASKS \(2\), got 3"),
        ({"struct_size": c.sizeof(Spec)}, "struct_size must be at least"),
        ({"n_actions": 0, "act_low": bounds(-1), "act_high": bounds(1)}, "n_actions must not be 0 with RLOX_ENV_MASKS"),
    ],
)
def test_structs_with_wrong_masks_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        register_native(masked_walk(**change))
