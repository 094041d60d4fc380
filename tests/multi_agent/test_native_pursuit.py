"""GridPursuit-v0 against a game in plain Python, and the C interface for environments with several agents."""

from __future__ import annotations

import ctypes as c
import gc
import warnings

import numpy as np
import pytest
from outside_envs import OBSERVE, RESET, STEP, AgentSpec, P, bounds, capsule_of
from pettingzoo.test import parallel_api_test, parallel_seed_test
from philox import derive_key, philox

import rlox
from rlox.envs import is_native, make_vec_env
from rlox.envs.registry import is_native_multi_agent
from rlox.kernels.envs import AgentVecEnv, Env, VecEnv, native_ids, native_multi_agent_ids, register_native
from rlox.kernels.envs.native_env import REGISTERED
from rlox.kernels.nn.policy_gradient import NativeActorCritic, n_parameters
from rlox.kernels.rng import Rng
from rlox.multi_agent import MultiAgentStep, is_multi_agent, make_multi_agent_env, parallel_env

ID = "GridPursuit-v0"
MOVES = [(0, 0), (-1, 0), (0, 1), (1, 0), (0, -1)]


@pytest.fixture(autouse=True)
def forget_what_a_test_registers():
    yield
    REGISTERED.clear()


# ---- the game in plain Python


class Game:
    """One environment, as described in kernels/envs/pursuit.pxd."""

    def __init__(self, key, size=8, n_pursuers=3, n_catchers=2, max_cycles=50, randomness=0.2):
        self.key, self.size, self.n, self.need = key, size, n_pursuers, n_catchers
        self.limit, self.chance = max_cycles, randomness
        self.episode = -1
        self.by_chance = 0

    def reset(self):
        self.episode += 1
        self.t, self.total = 0, 0.0
        drawn = [word for block in range(5) for word in philox(self.key, self.episode, 1 | block << 32)]
        cells = [divmod(word * self.size**2 >> 32, self.size) for word in drawn[: self.n + 1]]
        self.hunters, self.prey = cells[:-1], cells[-1]

    def moved(self, cell, move):
        return tuple(min(max(x + d, 0), self.size - 1) for x, d in zip(cell, MOVES[move], strict=True))

    def steps_to(self, cell):
        return sorted(abs(cell[0] - row) + abs(cell[1] - column) for row, column in self.hunters)

    def step(self, moves):
        self.hunters = [self.moved(cell, move) for cell, move in zip(self.hunters, moves, strict=True)]
        caught = sum(d < 2 for d in self.steps_to(self.prey)) >= self.need
        if not caught:
            chance, first, _, _ = philox(self.key, self.episode, 2 | self.t << 32)
            order = [(first * 5 // 2**32 + k) % 5 for k in range(5)]
            if chance < self.chance * 2**32:
                self.by_chance += 1
                order = order[:1]
            cells = [self.moved(self.prey, move) for move in order]
            self.prey = max(cells, key=lambda cell: (min(self.steps_to(cell)), sum(self.steps_to(cell))))
        self.t += 1
        reward = 0.99 if caught else -0.01
        self.total += reward
        return reward, caught, self.t >= self.limit

    def observe(self):
        rows = []
        for a, (row, column) in enumerate(self.hunters):
            others = [self.hunters[(a + k) % self.n] for k in range(1, self.n)]
            near = [(r - row, col - column) for r, col in [self.prey, *others]]
            rows.append(np.ravel([(row, column), *near]))
        return np.array(rows) / (self.size - 1)

    def central(self):
        return np.ravel([*self.hunters, self.prey]) / (self.size - 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "kwargs", "steps"),
    [
        (5, {}, 300),
        (300, {"max_cycles": 9}, 30),
        (3, {"size": 4, "n_pursuers": 2, "max_cycles": 20, "randomness": 0.5}, 200),
        (3, {"size": 5, "n_pursuers": 16, "n_catchers": 9, "randomness": 0}, 60),
        (4, {"size": 2, "n_pursuers": 1, "n_catchers": 1, "max_cycles": 6, "randomness": 1}, 60),
    ],
)
def test_the_dynamics_equal_those_of_a_python_game(n, kwargs, steps):
    env = make_multi_agent_env(ID, n, 11, kwargs)
    games = [Game(derive_key(11, i), **kwargs) for i in range(n)]
    for game in games:
        game.reset()
    agents = games[0].n
    assert env.spec.agents == tuple(f"pursuer_{a}" for a in range(agents))
    assert env.spec.groups[0].spec.obs_dim == 2 + 2 * agents
    assert (env.spec.state_dim, env.spec.state_source) == (2 + 2 * agents, "environment")
    rng = np.random.default_rng(3)
    step = env.reset_all()
    caught = cut = 0
    for _ in range(steps):
        np.testing.assert_allclose(step.obs[0], [game.observe() for game in games], atol=1e-6)
        np.testing.assert_allclose(step.state, [game.central() for game in games], atol=1e-6)
        # Some of the actions chase the prey, so that it is caught sometimes.
        down, right = np.moveaxis(step.obs[0][..., 2:4], -1, 0)
        chase = np.where(np.abs(down) > np.abs(right), np.where(down > 0, 3, 1), np.where(right > 0, 2, 4))
        actions = np.where(rng.random((n, agents)) < 0.3, chase, rng.integers(5, size=(n, agents)))
        step = env.step_all([actions])
        for i, game in enumerate(games):
            reward, terminated, truncated = game.step(actions[i])
            np.testing.assert_array_equal(step.rewards[0][i], reward)
            assert (step.terminated[0][i] == terminated).all()
            assert (step.truncated[0][i] == truncated).all()
            np.testing.assert_allclose(step.final_obs[0][i], game.observe(), atol=1e-6)
            np.testing.assert_allclose(step.final_state[i], game.central(), atol=1e-6)
            assert step.ended[i] == (terminated or truncated)
            caught, cut = caught + terminated, cut + truncated
            if step.ended[i]:
                np.testing.assert_allclose(step.episode_returns[i], game.total)
                assert step.episode_lengths[i] == game.t
                game.reset()
            else:
                assert np.isnan(step.episode_returns[i]).all()
                assert step.episode_lengths[i] == 0
        assert all(alive.all() for alive in step.alive)
    assert caught > 3
    assert cut > 3 or kwargs.get("size") in (2, 5)  # on these boards the prey is caught soon
    by_chance = sum(game.by_chance for game in games) / (n * steps - caught)
    assert by_chance == pytest.approx(kwargs.get("randomness", 0.2), abs=0.1)


def test_a_single_pursuer_rarely_catches_the_prey():
    env = make_multi_agent_env(ID, 64, 0, {"n_pursuers": 2, "size": 4})
    step = env.reset_all()
    caught = {True: 0, False: 0}
    for together in (True, False):
        for _ in range(300):
            down, right = np.moveaxis(step.obs[0][..., 2:4], -1, 0)
            chase = np.where(np.abs(down) > np.abs(right), np.where(down > 0, 3, 1), np.where(right > 0, 2, 4))
            if not together:  # the second walks into the corner that is farthest from the prey
                row, column = np.moveaxis(step.obs[0][:, 1, :2] + step.obs[0][:, 1, 2:4], -1, 0)
                chase[:, 1] = np.where(np.arange(64) % 2, np.where(row < 0.5, 3, 1), np.where(column < 0.5, 2, 4))
            step = env.step_all([chase])
            caught[together] += step.terminated[0][:, 0].sum()
    assert caught[True] > 5 * caught[False]


def step_of(env, seed, steps=40):
    rng = np.random.default_rng(seed)
    return [env.step_all([rng.integers(5, size=(env.n_envs, env.spec.n_agents))]) for _ in range(steps)]


def same(x: MultiAgentStep, y: MultiAgentStep, n: int | None = None):
    for key, mine in vars(x).items():
        theirs = getattr(y, key)
        for a, b in zip(mine, theirs, strict=True) if isinstance(mine, list) else [(mine, theirs)]:
            np.testing.assert_array_equal(a, b if b is None else b[:n], err_msg=key)


def test_a_seed_reproduces_episodes_whatever_the_number_of_copies():
    few, many = (make_multi_agent_env(ID, n, 5, {"max_cycles": 7}) for n in (2, 290))
    few.reset_all(), many.reset_all()
    rng = np.random.default_rng(0)
    for _ in range(30):
        actions = rng.integers(5, size=(290, 3))
        same(few.step_all([actions[:2]]), many.step_all([actions]), 2)
    first = few.reset_all(5).obs[0]
    np.testing.assert_array_equal(first, make_multi_agent_env(ID, 2, 5, {"max_cycles": 7}).reset_all().obs[0])
    assert (first != few.reset_all().obs[0]).any()
    assert few.seed == 5
    assert few.reset_all(6).obs[0].tolist() != first.tolist()


def test_a_restored_state_continues_exactly():
    one, other = (make_multi_agent_env(ID, 270, seed, {"max_cycles": 11}) for seed in (1, 2))
    assert one.unrestorable_reason is None
    assert one.get_state() is None  # before there is an episode
    one.reset_all()
    step_of(one, 0, 17)
    state, seen = one.get_state(), one.kernel.observe()
    assert other.fits(state)
    expected = step_of(one, 1)
    other.set_state(state)
    np.testing.assert_array_equal(other.kernel.observe(), seen)
    for x, y in zip(expected, step_of(other, 1), strict=True):
        same(x, y)
    assert not make_multi_agent_env(ID, 3, 0).fits(state)
    with pytest.raises(ValueError, match=r"AgentVecEnv.set_state: keys must have shape \(3,\), got \(270,\)"):
        make_multi_agent_env(ID, 3, 0).set_state({**state, "state": np.zeros((8, 3))})
    with pytest.raises(ValueError, match=r"AgentVecEnv.set_state: steps must lie in \[0, 11\), got 11"):
        other.set_state({**state, "steps": np.full(270, 11)})


def test_arrays_are_new_unless_given():
    env, again = (make_multi_agent_env(ID, 4, 0) for _ in range(2))
    env.reset_all(), again.reset_all()
    steps = step_of(env, 0, 60)
    rng = np.random.default_rng(0)
    out = MultiAgentStep.empty(env.spec, 4)
    for step in steps:
        assert again.step_all([rng.integers(5, size=(4, 3))], out) is out
        same(out, step)
    assert any(step.ended.any() for step in steps)


def test_the_state_may_be_the_observations():
    env = make_multi_agent_env(ID, 3, 0, {"max_cycles": 5}, state="observations")
    assert (env.spec.state_dim, env.spec.state_source) == (24, "observations")
    np.testing.assert_array_equal(env.reset_all().state, env.kernel.observe().reshape(3, -1))
    for step in step_of(env, 0, 6):
        np.testing.assert_array_equal(step.state, step.obs[0].reshape(3, -1))
        np.testing.assert_array_equal(step.final_state, step.final_obs[0].reshape(3, -1))
    with pytest.raises(ValueError, match="state must be one of auto, environment, observations, got 'all'"):
        make_multi_agent_env(ID, 3, 0, state="all")


@pytest.mark.parametrize("n", [3, 300])
def test_a_kernel_collects_with_agents_as_rows(n):
    """A rollout of NativeActorCritic equals what `step_all` returns for the same actions."""
    env, again = (make_multi_agent_env(ID, n, 4, {"max_cycles": 8, "size": 4}) for _ in range(2))
    first, _ = env.reset_all(), again.reset_all()
    rows, steps, d = 3 * n, 40, 8
    rng = Rng(0)
    weights = rng.normal(n_parameters(d, 5, [16], False)).astype(np.float32)
    learner = NativeActorCritic(weights, d, 5, [16])
    noise = -np.log(-np.log(rng.uniform((steps, rows, 5)).clip(1e-6, 1 - 1e-6)))
    obs = np.empty((steps + 1, rows, d), np.float32)
    obs[0] = first.obs[0].reshape(rows, d)
    actions, lengths = np.empty((steps, rows), np.int64), np.empty((steps, rows), np.int64)
    rewards, returns = np.empty((steps, rows)), np.empty((steps, rows))
    terminated, truncated = np.empty((steps, rows), np.bool_), np.empty((steps, rows), np.bool_)
    limits, reached = learner.rollout(
        env.kernel.stepper(), steps, noise.astype(np.float32), obs, actions, rewards, terminated, truncated, returns,
        lengths,
    )  # fmt: skip
    cut = 0
    for t in range(steps):
        step = again.step_all([actions[t].reshape(n, 3)])
        np.testing.assert_array_equal(obs[t + 1], step.obs[0].reshape(rows, d))
        np.testing.assert_array_equal(rewards[t], step.rewards[0].ravel())
        np.testing.assert_array_equal(terminated[t], step.terminated[0].ravel())
        np.testing.assert_array_equal(truncated[t], step.truncated[0].ravel())
        ended = np.repeat(step.ended, 3)
        np.testing.assert_array_equal(returns[t][ended], step.episode_returns[step.ended].ravel())
        np.testing.assert_array_equal(lengths[t][ended], np.repeat(step.episode_lengths[step.ended], 3))
        for (_, row), seen in zip(limits[limits[:, 0] == t], reached[limits[:, 0] == t], strict=True):
            np.testing.assert_array_equal(seen, step.final_obs[0].reshape(rows, d)[row])
            cut += 1
    assert cut == truncated.sum() > 0
    assert len(np.unique(actions)) == 5


# ---- as a PettingZoo environment


@pytest.mark.parametrize("kwargs", [{}, {"n_pursuers": 5, "size": 4, "n_catchers": 3}])
def test_pettingzoos_own_tests_pass(kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel_api_test(parallel_env(ID, **kwargs), 500)
        parallel_seed_test(lambda: parallel_env(ID, **kwargs))


def test_the_parallel_environment_plays_the_native_one():
    env = parallel_env(ID, max_cycles=6)
    native = make_multi_agent_env(ID, 2, 31, {"max_cycles": 6})
    obs, infos = env.reset(seed=31)
    step = native.reset_all()
    rng = np.random.default_rng(0)
    for _ in range(20):
        for a, agent in enumerate(env.possible_agents):
            np.testing.assert_array_equal(obs[agent], step.obs[0][0, a])
            assert env.observation_space(agent).contains(obs[agent])
        np.testing.assert_array_equal(env.state(), step.state[0])
        assert infos == {agent: {} for agent in env.agents}
        actions = rng.integers(5, size=(2, 3))
        step = native.step_all([actions])
        obs, rewards, terminated, truncated, infos = env.step(dict(zip(env.agents, actions[0], strict=True)))
        for a, agent in enumerate(env.possible_agents):
            assert rewards[agent] == step.rewards[0][0, a]
            assert terminated[agent] == step.terminated[0][0, a]
            assert truncated[agent] == step.truncated[0][0, a]
            np.testing.assert_array_equal(obs[agent], step.final_obs[0][0, a])
        np.testing.assert_array_equal(env.state(), step.final_state[0])
        if step.ended[0]:
            assert env.agents == []
            obs, infos = env.reset()
    with pytest.raises(
        ValueError, match=r"NativeParallelEnv.step: actions must have every agent, got none for 'pursuer_1'"
    ):
        env.step({"pursuer_0": 0})
    with pytest.raises(ValueError, match=r"actions must be in \[0, 5\), got 9 of agent 1 in environment 0"):
        env.step(dict.fromkeys(env.agents, 0) | {"pursuer_1": 9})
    with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
        env.step(dict.fromkeys(env.agents, 1.5))
    with pytest.raises(ValueError, match=r"an episode must be running; call reset\(\) first"):
        parallel_env(ID).step({})


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_it_can_be_run_through_pettingzoo(workers):
    with (
        make_multi_agent_env(ID, 2, 3, {"max_cycles": 6}, workers, backend="pettingzoo") as env,
        make_multi_agent_env(ID, 2, 4, {"max_cycles": 6}, backend="pettingzoo") as other,
    ):
        assert env.spec.agents == make_multi_agent_env(ID, 2, 3).spec.agents
        assert (env.spec.state_source, env.unrestorable_reason) == ("environment", None)
        env.reset_all()
        step_of(env, 0, 9)
        state = env.get_state()
        expected = step_of(env, 1)
        other.set_state(state)
        for x, y in zip(expected, step_of(other, 1), strict=True):
            same(x, y)
        assert any(step.ended.any() for step in expected)


def test_the_picture_shows_the_positions():
    env = make_multi_agent_env(ID, 2, 0, {"render_mode": "rgb_array", "size": 6, "n_pursuers": 4})
    env.reset_all()
    seen = set()
    for _ in range(5):
        step_of(env, 0, 1)
        frame = env.render()
        assert frame.shape == (241, 241, 3)
        assert frame.dtype == np.uint8
        places = np.rint(env.kernel.central()[0].reshape(-1, 2) * 5).astype(int)
        red = np.argwhere((frame == (214, 69, 65)).all(-1)).mean(0)
        if not (places[:-1] == places[-1]).all(1).any():
            assert (np.floor(red / 40) == places[-1]).all()
        seen.add(frame.tobytes())
    assert len(seen) > 1
    assert make_multi_agent_env(ID, 1, 0).render() is None
    drawn = parallel_env(ID, render_mode="rgb_array")
    drawn.reset(seed=0)
    assert drawn.render().shape == (321, 321, 3)
    assert parallel_env(ID).render() is None
    with pytest.raises(ValueError, match="render_mode must be None or rgb_array for GridPursuit-v0, got 'human'"):
        parallel_env(ID, render_mode="human")
    with pytest.raises(ValueError, match="render_mode must be None or 'rgb_array', got 'human'"):
        make_multi_agent_env(ID, 1, 0, {"render_mode": "human"})


# ---- bad input


@pytest.mark.parametrize(
    ("kwargs", "kind", "says"),
    [
        ({"colour": 3}, ValueError, "params must have keys among size, n_pursuers, n_catchers, .*, got 'colour'"),
        ({"size": 1}, ValueError, "GridPursuit-v0: size must be at least 2 and at most 1024, got 1"),
        ({"n_pursuers": 17}, ValueError, "n_pursuers must be at least 1 and at most 16, got 17"),
        ({"n_catchers": 4}, ValueError, r"n_catchers must be at most n_pursuers \(3\), got 4"),
        ({"max_cycles": 0}, ValueError, "max_cycles must be at least 1 and at most 2147483648, got 0"),
        ({"randomness": 1.5}, ValueError, r"randomness must lie in \[0, 1\], got 1.5"),
        ({"size": "8"}, TypeError, "size must be an integer, got str"),
    ],
)
def test_arguments_are_checked(kwargs, kind, says):
    with pytest.raises(kind, match=says):
        make_multi_agent_env(ID, 2, 0, kwargs)
    with pytest.raises(kind, match=says):
        parallel_env(ID, **kwargs)


def test_single_agent_classes_reject_it():
    assert ID not in native_ids()
    assert native_multi_agent_ids() == (ID,)
    assert is_multi_agent(ID)
    assert not is_native(ID)
    says = r"env_id must be an environment with one agent, got 'GridPursuit-v0'; use .*make_multi_agent_env"
    with pytest.raises(ValueError, match=f"VecEnv: {says}"):
        VecEnv(2, 0, ID)
    with pytest.raises(ValueError, match=f"Env: {says}"):
        Env(ID)
    with pytest.raises(
        ValueError, match="AgentVecEnv: env_id must be an environment with several agents, got 'CartPole"
    ):
        AgentVecEnv(2, 0, "CartPole-v1")
    with pytest.raises(
        ValueError, match=r"parallel_env: env_id must be a native environment with several .*'CartPole-v1'"
    ):
        parallel_env("CartPole-v1")
    with pytest.raises(
        ValueError, match="workers must be 0 for GridPursuit-v0, whose copies are stepped by compiled code"
    ):
        make_multi_agent_env(ID, 2, 0, workers=2)
    with pytest.raises(ValueError, match="make_vec_env: env must be an environment with one agent, got GridPursuit-v0"):
        make_vec_env(ID, 2, 0)


def test_actions_are_checked():
    env = make_multi_agent_env(ID, 2, 0)
    env.reset_all()
    before = env.kernel.observe()
    with pytest.raises(ValueError, match=r"actions must be in \[0, 5\), got -1 of agent 2 in environment 1"):
        env.step_all([np.array([[0, 0, 0], [0, 0, -1]])])
    with pytest.raises(ValueError, match=r"actions of agents must have shape \(2, 3\), got \(2, 2\)"):
        env.step_all([np.zeros((2, 2), int)])
    with pytest.raises(TypeError, match="agents: discrete actions must be integers, got dtype float64"):
        env.step_all([np.zeros((2, 3))])
    with pytest.raises(ValueError, match="actions must be 1 arrays, one for each of agents, got 2"):
        env.step_all([np.zeros((2, 3), int)] * 2)
    np.testing.assert_array_equal(env.kernel.observe(), before)  # nothing has moved
    env.step_all([[[0, 1, 2], [3, 4, 0]]])  # a list serves too
    fresh = AgentVecEnv(1, 0)
    for method in ("observe", "central", "stepper"):
        with pytest.raises(ValueError, match=f"AgentVecEnv.{method}: the environments must be reset first"):
            getattr(fresh, method)()


# ---- environments from outside

AGENTS = 4


def tug(central=False, **change):
    """Four agents each add their two actions to x; the reward of agent a is x + a; episodes end when |x| exceeds 3.

    Agent a sees [x, a, the number of its episode].
    """

    def write(batch, obs, index=None):
        n = batch.contents.n
        state = np.ctypeslib.as_array(batch.contents.state, (1, n))[0]
        episodes = np.ctypeslib.as_array(batch.contents.episodes, (n,))
        rows = np.ctypeslib.as_array(obs, (n, AGENTS, 3))
        for i in range(n) if index is None else index:
            rows[i, :, 0], rows[i, :, 1], rows[i, :, 2] = state[i], range(AGENTS), episodes[i]

    def reset(params, batch, m, index, obs):
        for i in index[:m]:
            batch.contents.state[i] = batch.contents.episodes[i] / 8
        write(batch, obs, index[:m])

    def step(params, batch, actions, obs, rewards, terminated):
        n = batch.contents.n
        state = np.ctypeslib.as_array(batch.contents.state, (1, n))[0]
        state += np.ctypeslib.as_array(c.cast(actions, P(c.c_float)), (n, AGENTS, 2)).clip(-1, 1).sum((1, 2))
        write(batch, obs)
        np.ctypeslib.as_array(rewards, (n, AGENTS))[:] = state[:, None] + np.arange(AGENTS)
        np.ctypeslib.as_array(terminated, (n,))[:] = 2 * (np.abs(state) > 3)

    def see(params, batch, out):
        n = batch.contents.n
        rows = np.ctypeslib.as_array(out, (n, 2))
        rows[:, 0] = np.ctypeslib.as_array(batch.contents.state, (1, n))[0]
        rows[:, 1] = np.ctypeslib.as_array(batch.contents.steps, (n,))

    fields = {
        "struct_size": c.sizeof(AgentSpec),
        "flags": 1,
        "env_id": b"Tug-v0",
        "state_size": 1,
        "obs_dim": 3,
        "n_actions": 0,
        "act_dim": 2,
        "act_low": bounds(-1, -1),
        "act_high": bounds(1, 1),
        "max_episode_steps": 6,
        "reset_n": RESET(reset),
        "step_n": STEP(step),
        "observe_n": OBSERVE(lambda params, batch, obs: write(batch, obs)),
        "n_agents": AGENTS,
        "central_dim": 2 if central else 0,
        "central_n": OBSERVE(see) if central else OBSERVE(),
    } | change
    return capsule_of(AgentSpec(**fields))


@pytest.mark.slow
@pytest.mark.parametrize("central", [False, True])
@pytest.mark.parametrize("n", [2, 300])
def test_another_package_can_add_an_environment(n, central):
    assert rlox.register_env(tug(central)) == "Tug-v0"
    assert is_native_multi_agent("Tug-v0")
    assert is_multi_agent("Tug-v0")
    assert not is_native("Tug-v0")
    assert native_multi_agent_ids() == (ID, "Tug-v0")
    env = make_multi_agent_env("Tug-v0", n, 0)
    assert env.spec.agents == ("agent_0", "agent_1", "agent_2", "agent_3")
    one = env.spec.groups[0].spec
    assert (one.obs_dim, one.act_dim, one.act_low.tolist()) == (3, 2, [-1, -1])
    assert (env.spec.state_dim, env.spec.state_source) == ((2, "environment") if central else (12, "observations"))
    step = env.reset_all()
    rng = np.random.default_rng(0)
    x, steps, episodes, totals = np.zeros(n), np.zeros(n), np.zeros(n), np.zeros((n, AGENTS))
    ends = [0, 0]

    def seen():
        if central:
            return np.stack([x, steps], 1)
        return np.stack(np.broadcast_arrays(x[:, None], np.arange(AGENTS), episodes[:, None]), -1).reshape(n, -1)

    for _ in range(25):
        np.testing.assert_allclose(step.state, seen(), atol=1e-5)
        actions = (0.6 * rng.standard_normal((n, AGENTS, 2))).astype(np.float32)
        step = env.step_all([actions])
        x, steps = x + actions.clip(-1, 1).sum((1, 2)), steps + 1
        np.testing.assert_allclose(step.rewards[0], x[:, None] + np.arange(AGENTS), atol=1e-5)
        totals += step.rewards[0]
        np.testing.assert_array_equal(step.terminated[0], np.repeat(np.abs(x)[:, None] > 3, AGENTS, 1))
        np.testing.assert_array_equal(step.truncated[0], np.repeat(steps[:, None] >= 6, AGENTS, 1))
        np.testing.assert_allclose(step.final_state, seen(), atol=1e-5)
        over = (np.abs(x) > 3) | (steps >= 6)
        np.testing.assert_array_equal(step.ended, over)
        np.testing.assert_allclose(step.episode_returns[over], totals[over])
        np.testing.assert_array_equal(step.episode_lengths[over], steps[over])
        ends = [ends[0] + step.terminated[0].sum(), ends[1] + step.truncated[0].sum()]
        episodes, steps, totals[over] = episodes + over, np.where(over, 0, steps), 0
        x = np.where(over, episodes / 8, x)
    assert min(ends) > 0
    with pytest.raises(ValueError, match="actions must be numbers, not NaN, got nan of agent 3 in environment 0"):
        env.step_all([np.where(np.arange(AGENTS)[:, None] == 3, np.nan, np.zeros((n, AGENTS, 2))).astype(np.float32)])
    gc.collect()


def test_it_is_not_a_single_agent_environment():
    rlox.register_env(tug())
    with pytest.raises(
        ValueError, match="VecEnv: env_id must be an environment with one agent, got 'Tug-v0', which has 4"
    ):
        VecEnv(1, 0, "Tug-v0")
    with pytest.raises(
        ValueError, match="NativeMultiAgentVecEnv: state must be observations if the environment has no"
    ):
        make_multi_agent_env("Tug-v0", 1, 0, state="environment")
    with pytest.raises(ValueError, match=r"params must be empty for Tug-v0, got {'size': 3}"):
        make_multi_agent_env("Tug-v0", 1, 0, {"size": 3})
    env = parallel_env("Tug-v0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PettingZoo warns about boxes without bounds
        parallel_api_test(env, 50)
    with pytest.raises(ValueError, match="render_mode must be None for Tug-v0, got 'rgb_array'"):
        parallel_env("Tug-v0", render_mode="rgb_array")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"n_agents": 0}, r"Tug-v0: n_agents must be at least 1 and at most 2\*\*20, got 0"),
        ({"central_dim": -1}, "central_dim must be at least 0"),
        ({"central_dim": 2}, "central_n must be a function if central_dim is not 0, got NULL"),
        ({"central_n": OBSERVE(lambda *_: None)}, "central_n must be NULL if central_dim is 0, got a function"),
        ({"struct_size": 104}, r"struct_size must be at least 128, got 104; set it to sizeof\(rlox_env_v1\)"),
        ({"flags": 5}, r"flags must be 0, RLOX_ENV_AGENTS \(1\) or RLOX_ENV_MASKS \(2\), got 5"),
        ({"env_id": ID.encode()}, "env_id must not be the id of a built-in environment"),
    ],
)
def test_the_fields_are_checked(change, says):
    for call in (lambda capsule: AgentVecEnv(1, 0, capsule), register_native):
        with pytest.raises(ValueError, match=says):
            call(tug(**change))


def test_a_struct_of_an_earlier_version_has_one_agent():
    """The new fields of a struct of an earlier version, or of one without the flag, are not read."""
    with pytest.raises(ValueError, match="must be an environment with several agents, got 'Tug-v0'"):
        AgentVecEnv(1, 0, tug(flags=0, n_agents=-7, central_dim=9))
    assert VecEnv(1, 0, tug(flags=0, n_agents=-7, struct_size=104)).obs_dim == 3
