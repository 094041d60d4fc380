"""Datasets of several agents: each agent's rows are what it experienced, and offline algorithms learn from them."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from typing import ClassVar

import forked
import numpy as np
import pytest
from gymnasium import spaces
from pettingzoo import AECEnv, ParallelEnv

import rlox
from rlox.algorithms import BC, MAPPO, PPO
from rlox.checkpoint.streams import Stream
from rlox.envs.state import first_seeds
from rlox.evaluation.evaluator import make_job, play
from rlox.kernels.rng import Rng
from rlox.multi_agent import parallel_env
from rlox.offline.arrow import ArrowWriter
from rlox.offline.collect import Behaviour, collect

SPREAD = "pettingzoo:mpe2.simple_spread_v3"
TAG = "pettingzoo:mpe2.simple_tag_v3"
PURSUIT = "GridPursuit-v0"
QUICK = ["total_timesteps=20", "logger=none", "eval.n_points=1", "eval.n_episodes=2", "algo.hidden_sizes=[16]"]


class ComesBack(ParallelEnv):
    """`one` acts in all six steps. `two` acts in the first two and the fifth, and leaves without a flag each time.
    `none` never acts."""

    metadata: ClassVar = {"name": "comes_back_v0"}
    days: ClassVar = ("one two", "one two", "one", "one", "one two", "one", "")

    def __init__(self):
        self.possible_agents = ["one", "two", "none"]

    def observation_space(self, agent):
        return spaces.Box(0, 10, (2,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(3)

    def look(self, agent):
        return np.array([self.possible_agents.index(agent), self.t], np.float32)

    def reset(self, seed=None, options=None):
        self.t, self.agents = 0, self.days[0].split()
        return {agent: self.look(agent) for agent in self.agents}, {agent: {} for agent in self.agents}

    def step(self, actions):
        self.t += 1
        acted, self.agents = self.agents, self.days[self.t].split()
        over = not self.agents
        seen = acted if over else self.agents
        flags = {agent: over for agent in seen}
        return (
            {agent: self.look(agent) for agent in seen},
            {agent: float(actions[agent]) for agent in seen if agent in acted},
            dict.fromkeys(seen, False),
            flags,
            {agent: {} for agent in seen},
        )


class Duel(AECEnv):
    """`one` and `two` move in turn, twice each. A move costs the other 0.25; the last one earns 1 and costs 1."""

    metadata: ClassVar = {"name": "duel_v0", "is_parallelizable": False}
    render_mode = None

    def __init__(self):
        self.possible_agents = ["one", "two"]

    def observation_space(self, agent):
        return spaces.Box(0, 10, (2,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(2)

    def observe(self, agent):
        return np.array([self.t, self.possible_agents.index(agent)], np.float32)

    def reset(self, seed=None, options=None):
        self.t, self.agents, self.agent_selection = 0, self.possible_agents[:], "one"
        self.rewards, self._cumulative_rewards = dict.fromkeys(self.agents, 0.0), dict.fromkeys(self.agents, 0.0)
        self.terminations, self.truncations = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, False)
        self.infos = {agent: {} for agent in self.agents}

    def step(self, action):
        if self.terminations[self.agent_selection]:
            return self._was_dead_step(action)
        mover, other = self.agent_selection, self.agents[self.agents[0] == self.agent_selection]
        self._cumulative_rewards[mover] = 0.0
        self.t += 1
        self.rewards = {mover: 0.0, other: -0.25}
        if self.t == 4:
            self.rewards = {mover: 1.0, other: -1.0}
            self.terminations = dict.fromkeys(self.agents, True)
        self.agent_selection = other
        return self._accumulate_rewards()


def env_of(env_id, **kwargs):
    return {"id": env_id, "kwargs": kwargs, "wrappers": []}


def gathered(path, env_id, n_steps, *, seed=0, n_envs=1, agents=None, algorithm=None, deterministic=False, **kwargs):
    behaviour = Behaviour("policy" if algorithm else "random", 1.0, algorithm)
    collect(
        [behaviour],
        env_of(env_id, **kwargs),
        n_steps,
        path,
        seed=seed,
        n_envs=n_envs,
        agents=agents,
        deterministic=deterministic,
    )
    return rlox.open_dataset(path)


def episodes_of(data):
    """The agent and the rows of each episode."""
    state = data.get_state()
    ends = np.flatnonzero(state["terminated"] | state["truncated"]) + 1
    assert ends[-1] == len(data)
    bounds = [0, *ends.tolist()]
    assert len(data.metadata["episode_agents"]) == len(ends)
    columns = ("obs", "next_obs", "actions", "rewards", "terminated", "truncated")
    return [
        (agent, {name: state[name][start:stop] for name in columns})
        for agent, (start, stop) in zip(data.metadata["episode_agents"], pairwise(bounds), strict=True)
    ]


def rows_of(data, agent):
    """All rows of one agent in the order of time."""
    parts = [rows for name, rows in episodes_of(data) if name == agent]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def raw(env_id, seed, **kwargs):
    """The PettingZoo environment that a collection with one copy plays, and its seed."""
    own = int(Rng(seed, Stream.FOREIGN_ENVS).integers(2**62, 1)[0])
    if env_id == PURSUIT:
        return parallel_env(PURSUIT, **kwargs), own
    module = __import__(env_id.removeprefix("pettingzoo:"), fromlist=["x"])
    return module.parallel_env(**kwargs), first_seeds(own, 1)[0]


@pytest.mark.parametrize(
    ("env_id", "kwargs", "agents"),
    [
        (SPREAD, {"max_cycles": 7}, None),
        (SPREAD, {"max_cycles": 7, "continuous_actions": True}, None),
        (TAG, {"max_cycles": 7}, ["adversary"]),
        (PURSUIT, {"max_cycles": 9}, None),
    ],
)
def test_rows_equal_the_steps_of_the_environment(tmp_path, env_id, kwargs, agents):
    data = gathered(tmp_path / "a.arrow", env_id, 60, seed=3, agents=agents, **kwargs)
    assert len(data) == 60
    names = data.metadata["agents"]
    env, seed = raw(env_id, 3, **kwargs)
    others = [agent for agent in env.possible_agents if agent not in names]
    if others:
        # Agents that were not recorded also acted at random; collect the same actions again.
        pytest.importorskip("mpe2")
        whole = gathered(tmp_path / "b.arrow", env_id, 20, seed=3, agents=others, **kwargs)
        rows = {agent: rows_of(whole, agent) for agent in others}
    else:
        rows = {}
    rows |= {agent: rows_of(data, agent) for agent in names}
    obs, _ = env.reset(seed=seed)
    for t in range(60 // len(names)):
        taken = {agent: of["actions"][t] for agent, of in rows.items()}
        if data.n_actions is not None:
            taken = {agent: int(action[0]) for agent, action in taken.items()}
        after, rewards, terminated, truncated, _ = env.step(taken)
        for agent in names:
            row = {name: column[t] for name, column in rows[agent].items()}
            np.testing.assert_array_equal(row["obs"], np.float32(obs[agent]))
            np.testing.assert_array_equal(row["next_obs"], np.float32(after[agent]))
            assert row["rewards"] == np.float32(rewards[agent])
            last = t == 60 // len(names) - 1
            assert bool(row["terminated"]) == terminated[agent]
            assert bool(row["truncated"]) == (truncated[agent] or (last and not terminated[agent]))
        obs = after if env.agents else env.reset()[0]


def test_a_seed_reproduces_the_data_and_copies_differ(tmp_path):
    same = [gathered(tmp_path / f"{i}.arrow", PURSUIT, 500, seed=2, n_envs=4).get_state() for i in range(2)]
    other = gathered(tmp_path / "c.arrow", PURSUIT, 500, seed=5, n_envs=4).get_state()
    for name, column in same[0].items():
        np.testing.assert_array_equal(column, same[1][name])
    assert not np.array_equal(same[0]["obs"], other["obs"])
    starts = {tuple(rows["obs"][0]) for _, rows in episodes_of(rlox.open_dataset(tmp_path / "0.arrow"))}
    assert len(starts) > 4


@pytest.mark.parametrize("n_envs", [1, 2])
def test_an_agent_that_dies_has_an_episode_of_its_own(tmp_path, n_envs):
    data = gathered(tmp_path / "a.arrow", "pettingzoo:zoo_probes:DiesHalfway", 24, n_envs=n_envs)
    found = [(agent, len(rows["rewards"]), rows["rewards"].sum()) for agent, rows in episodes_of(data)]
    assert sorted(found) == [("long", 8, 8.0), ("long", 8, 8.0), ("short", 4, 4.0), ("short", 4, 4.0)]
    state = data.get_state()
    assert state["terminated"].sum() == 4
    assert not state["truncated"].any()
    assert data.metadata["n_cut_episodes"] == 0
    (random,) = data.metadata["policies"]
    assert (random["n_steps"], random["n_episodes"], random["mean_return"]) == (24, 4, 6.0)


def test_a_time_limit_of_one_agent_is_no_termination(tmp_path):
    data = gathered(tmp_path / "a.arrow", "pettingzoo:zoo_probes:LimitForOne", 12)
    for agent, rows in episodes_of(data):
        cut = agent == "cut"
        assert (rows["terminated"][-1], rows["truncated"][-1]) == (not cut, cut)
        # The last next_obs is of the episode itself, not the start of the next one.
        assert rows["next_obs"][-1].argmax() == (0 if cut else 8)


def test_an_agent_that_comes_back_begins_another_episode(tmp_path):
    data = gathered(tmp_path / "a.arrow", f"pettingzoo:{__name__}:ComesBack", 18)
    found = [(agent, rows["obs"][:, 1].tolist(), bool(rows["terminated"][-1])) for agent, rows in episodes_of(data)]
    one, two = ("one", [0, 1, 2, 3, 4, 5], False), [("two", [0, 1], True), ("two", [4], True)]
    assert sorted(found) == sorted([one, *two] * 2)
    for agent, rows in episodes_of(data):
        assert (rows["obs"][:, 0] == data.metadata["agents"].index(agent)).all()
        known = rows["next_obs"][~rows["terminated"].astype(bool)]
        np.testing.assert_array_equal(known[:, 1], rows["obs"][: len(known), 1] + 1)


def test_agents_that_never_act_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("rlox.offline.agents._PATIENCE", 200)
    with pytest.raises(ValueError, match="agents must act in the environment, got none, of which none did in 200 st"):
        gathered(tmp_path / "a.arrow", f"pettingzoo:{__name__}:ComesBack", 18, agents=["none"])
    assert not list(tmp_path.iterdir())


def test_the_number_of_rows_is_exact_and_running_episodes_are_truncated(tmp_path):
    data = gathered(tmp_path / "a.arrow", "pettingzoo:zoo_probes:DiesHalfway", 5)
    found = {agent: rows for agent, rows in episodes_of(data)}
    assert {agent: len(rows["rewards"]) for agent, rows in found.items()} == {"short": 3, "long": 2}
    assert all(rows["truncated"][-1] and not rows["terminated"][-1] for rows in found.values())
    assert [rows["next_obs"][-1].argmax() for rows in found.values()] == [3, 2]
    assert data.metadata["n_cut_episodes"] == 2
    assert data.metadata["policies"][0]["n_episodes"] == 0


def test_agents_can_be_selected(tmp_path):
    zoo = "pettingzoo:zoo_probes:Zoo"
    flyer = gathered(tmp_path / "a.arrow", zoo, 12, agents=["flyer"])
    assert (flyer.obs_dim, flyer.act_dim, flyer.n_actions) == (5, 2, None)
    assert flyer.metadata["act_low"] == [-1.0, -1.0]
    walkers = gathered(tmp_path / "b.arrow", zoo, 14, agents=["walker"])
    assert walkers.metadata["agents"] == ["walker_0", "walker_1", "walker_2"]
    assert (walkers.obs_dim, walkers.n_actions) == (3, 3)
    assert sorted(len(rows["rewards"]) for _, rows in episodes_of(walkers)) == [2, 5, 7]
    two = gathered(tmp_path / "c.arrow", zoo, 9, agents=["walker_2", "walker_0"])
    assert two.metadata["agents"] == ["walker_0", "walker_2"]
    assert set(two.metadata["episode_agents"]) == {"walker_0", "walker_2"}


@pytest.mark.parametrize(
    ("agents", "message"),
    [
        (None, r"the groups are walker \(walker_0, walker_1, walker_2\), flyer \(flyer\); try walker"),
        (["walker", "flyer"], "agents must be of one group, whose spaces are equal, got walker, flyer"),
        (["walkers"], "got 'walkers'; did you mean 'walker'"),
    ],
)
def test_agents_of_several_groups_are_an_error(tmp_path, agents, message):
    with pytest.raises(ValueError, match=message):
        gathered(tmp_path / "a.arrow", "pettingzoo:zoo_probes:Zoo", 12, agents=agents)
    assert not list(tmp_path.iterdir())


def test_random_actions_are_legal(tmp_path):
    data = gathered(tmp_path / "a.arrow", "pettingzoo:zoo_probes:Masked", 18, n_envs=2)  # Masked asserts this
    for agent, rows in episodes_of(data):
        first = ("one", "two").index(agent)
        assert rows["actions"][:, 0].tolist() == [(t + first) % 3 for t in range(len(rows["actions"]))]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Untrained policies on GridPursuit and simple_spread; the weights of the second are PyTorch's."""
    folder = tmp_path_factory.mktemp("trained")
    MAPPO(PURSUIT, n_envs=2, seed=1, hidden_sizes=[16]).save(folder / "pursuit.safetensors")
    MAPPO(SPREAD, n_envs=1, seed=1, hidden_sizes=[16], backend="torch", share_parameters=False).save(
        folder / "spread.safetensors"
    )
    PPO("CartPole-v1", n_envs=1, seed=1).save(folder / "ppo.safetensors")
    return folder


@pytest.mark.parametrize("name", ["pursuit", "spread"])
def test_a_policy_acts_as_it_was_trained(tmp_path, trained, name):
    algorithm = MAPPO.from_checkpoint(trained / f"{name}.safetensors")
    env_id = PURSUIT if name == "pursuit" else SPREAD
    for deterministic in (True, False):
        data = gathered(tmp_path / "a.arrow", env_id, 90, n_envs=2, algorithm=algorithm, deterministic=deterministic)
        agreed = [
            algorithm.predict(rows["obs"].copy(), agent_idx=algorithm.agents.index(agent)) == rows["actions"][:, 0]
            for agent, rows in episodes_of(data)
        ]
        assert np.concatenate(agreed).all() == deterministic
        assert data.metadata["policies"][0]["deterministic"] == deterministic
    algorithm.close()


@pytest.mark.slow
def test_each_format_keeps_the_agent_of_an_episode(tmp_path, monkeypatch):
    pytest.importorskip("h5py")
    from rlox.offline.export import export

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = gathered(tmp_path / "a.arrow", "pettingzoo:zoo_probes:Zoo", 33, n_envs=2, agents=["walker"])
    for ending in ("npz", "h5", "parquet"):
        export(data, str(tmp_path / f"b.{ending}"))
        read = rlox.open_dataset(tmp_path / f"b.{ending}")
        assert read.metadata["agents"] == data.metadata["agents"]
        assert read.metadata["episode_agents"] == data.metadata["episode_agents"]
        for name, column in data.get_state().items():
            np.testing.assert_array_equal(read.get_state()[name], column)
    few = rlox.open_dataset(tmp_path / "a.arrow", max_transitions=3)
    assert few.metadata["episode_agents"] == data.metadata["episode_agents"][: few.n_episodes()]


def test_a_file_with_an_unnamed_agent_is_an_error(tmp_path):
    rows, column = np.zeros((4, 2), np.float32), np.zeros(4, np.float32)
    flags = np.array([0, 1, 0, 1], np.uint8)
    with ArrowWriter(tmp_path / "a.arrow") as writer:
        block = {"obs": rows, "next_obs": rows, "actions": rows, "rewards": column, "terminated": flags}
        writer.write({**block, "truncated": 0 * flags, "agent": np.array([0, 0, 7, 7], np.int32)})
        writer.finish({"agents": ["one", "two"], "obs_shape": [2], "n_dropped": 0})
    with pytest.raises(ValueError, match="column agent must hold indices in the list of 2 agents, got 7 in row 2"):
        rlox.open_dataset(tmp_path / "a.arrow")


def test_a_clone_plays_all_agents(tmp_path):
    kwargs = {"max_cycles": 6}
    data = gathered(tmp_path / "a.arrow", SPREAD, 90, **kwargs)
    agent = BC(data, 18, 5, continuous=False, hidden=16, env_id=SPREAD, env_kwargs=kwargs, normalize_obs=True)
    agent.train(5)
    found = agent.evaluate(2, seed=4)
    env = __import__("mpe2.simple_spread_v3", fromlist=["x"]).parallel_env(**kwargs)
    for episode in range(2):
        if episode:
            env.reset()  # the unused restart at the end of the first episode
        obs, _ = env.reset() if episode else env.reset(seed=first_seeds(4, 1)[0])
        returns = dict.fromkeys(env.possible_agents, 0.0)
        while env.agents:
            actions = {name: agent.predict(np.float32(seen)) for name, seen in obs.items()}
            obs, rewards, *_ = env.step(actions)
            returns = {name: total + rewards[name] for name, total in returns.items()}
        np.testing.assert_allclose(found.agent_returns[episode], list(returns.values()))
        assert found.returns[episode] == pytest.approx(sum(returns.values()))
    # In another process the numbers are the same.
    apart = play(make_job(agent._evaluation_arguments(2, 4), 1))
    np.testing.assert_array_equal(apart.agent_returns, found.agent_returns)
    # Its episodes can be recorded again.
    again = gathered(tmp_path / "b.arrow", SPREAD, 18, algorithm=agent, deterministic=True, **kwargs)
    assert (agent.predict(again.get_state()["obs"]) == again.get_state()["actions"][:, 0]).all()


def test_a_clone_takes_legal_actions(tmp_path):
    masked = "pettingzoo:zoo_probes:Masked"
    data = gathered(tmp_path / "a.arrow", masked, 18)
    agent = BC(data, 1, 3, continuous=False, hidden=16, env_id=masked)
    for deterministic in (True, False):  # the environment asserts that they are legal
        assert agent.evaluate(2, deterministic=deterministic).returns.tolist() == [9.0, 9.0]


def test_agents_of_another_kind_act_at_random_beside_a_clone(tmp_path):
    zoo = "pettingzoo:zoo_probes:Zoo"
    data = gathered(tmp_path / "a.arrow", zoo, 30, agents=["walker"])
    agent = BC(data, 3, 3, continuous=False, hidden=16, env_id=zoo)
    found = agent.evaluate(3)
    np.testing.assert_allclose(found.returns, found.agent_returns[:, :3].sum(1))
    assert {"walker", "flyer"} <= set(found.by_name)
    other = BC(data, 3, 3, continuous=False, hidden=16, env_id=SPREAD)
    with pytest.raises(ValueError, match=r"agents that observe 3 numbers .* got agents \(18 numbers"):
        other.evaluate(1)


@pytest.mark.slow
def test_the_command_records_a_run_and_others_learn_from_it(command, tmp_path, trained):
    code, out, err = command(
        "collect", str(trained / "pursuit.safetensors"), "--steps", "900", "--out", "a.arrow", "--seed", "3"
    )
    assert not code, err
    assert "per agent and episode" in out
    assert "pursuer_2: " in out
    assert "train        rlox train algo=bc dataset=a.arrow" in out
    code, out, err = command("train", "algo=bc", "dataset=a.arrow", *QUICK, "output_dir=run")
    assert not code, err
    assert "trained bc GridPursuit-v0" in out
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    score = next(row for row in rows if "eval/mean_return" in row)
    assert score["eval/mean_return"] == pytest.approx(sum(score[f"eval/return/pursuer_{i}"] for i in range(3)))
    code, out, err = command("eval", "run")
    assert not code, err
    assert "reproduced exactly" in out
    assert "pursuer_1" in out
    assert not command("eval", "run", "--stochastic")[0]
    names = ["--mix", "clone:3,random:1", "clone=run", "--steps", "400", "--out", "mixed.arrow"]
    code, out, err = command("collect", *names)
    assert not code, err
    clone, random = rlox.open_dataset(tmp_path / "mixed.arrow").metadata["policies"]
    assert (clone["n_steps"], random["n_steps"], clone["algorithm"]) == (300, 100, "bc")
    code, out, err = command("collect", "run", "--steps", "60", "--out", "b.npz", "--deterministic")
    assert not code, err
    code, out, err = command("train", "algo=bc", "dataset=b.npz", *QUICK, "--check")
    assert not code, err
    assert "nothing was trained" in out


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["td3_bc", "iql", "cql"])
def test_continuous_actions_are_learned_from(command, tmp_path, algo):
    kwargs = {"max_cycles": 5, "continuous_actions": True}
    gathered(tmp_path / "a.arrow", SPREAD, 300, **kwargs)
    typed = [f"env={SPREAD}", "env.kwargs={max_cycles: 5, continuous_actions: true}"]
    code, _, err = command("train", f"algo={algo}", "dataset=a.arrow", *QUICK, "output_dir=run", *typed)
    assert not code, err
    code, out, err = command("eval", "run")
    assert not code, err
    assert "reproduced exactly" in out
    code, out, _ = command("show", "dataset=a.arrow")
    assert "agent_1: 20 episodes" in out
    assert "per agent and episode" in out


@pytest.mark.slow
def test_environments_with_several_groups_are_recorded_group_by_group(command):
    words = ["collect", "--env", TAG, "--steps", "600", "--out", "a.arrow"]
    code, _, err = command(*words)
    assert code
    assert "the groups are adversary (adversary_0, adversary_1, adversary_2), agent_0 (agent_0)" in err
    assert not command(*words, "--agents", "adversary_0, adversary_1")[0]
    code, out, err = command("train", "algo=bc", "dataset=a.arrow", *QUICK, "output_dir=run")
    assert not code, err
    output = "the learned policy acts for adversary_0, adversary_1, adversary_2; the actions of agent_0 are"
    assert output in out + err
    code, out, _ = command("eval", "run", "--json")
    found = json.loads(out)
    assert found["mean_return"] == pytest.approx(sum(found[f"return/adversary_{i}"] for i in range(3)))


@pytest.mark.slow
def test_a_dataset_may_not_choose_a_module(command, tmp_path, monkeypatch):
    (tmp_path / "own_chase.py").write_text("from mpe2.simple_spread_v3 import parallel_env\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    code, out, err = command("collect", "--env", "pettingzoo:own_chase", "--steps", "60", "--out", "a.arrow")
    assert not code, err
    assert "train        rlox train algo=bc dataset=a.arrow env=pettingzoo:own_chase" in out
    monkeypatch.delitem(sys.modules, "own_chase")
    code, _, err = command("train", "algo=bc", "dataset=a.arrow", *QUICK)
    assert code
    assert "a file may not choose the module own_chase to import" in err
    assert "own_chase" not in sys.modules
    with pytest.raises(ValueError, match="if you trust it, pass env='pettingzoo:own_chase'"):
        rlox.Trainer("bc", dataset="a.arrow")
    trainer = rlox.Trainer("bc", "pettingzoo:own_chase", dataset="a.arrow", hidden=16)
    trainer.train(2)
    assert trainer.evaluate(1).agent_returns.shape == (1, 3)


@pytest.mark.slow
def test_real_processes_record_and_learn(tmp_path):
    collected = forked.run("collect", "--env", SPREAD, "--steps", "300", "--out", "a.arrow", cwd=tmp_path)
    assert collected.returncode == 0, collected.stdout + collected.stderr
    trained = forked.run("train", "algo=bc", "dataset=a.arrow", *QUICK, cwd=tmp_path)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert f"trained bc {SPREAD}" in trained.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--env", "CartPole-v1", "--agents", "agent_0"], "agents must be left out for CartPole-v1, which has one"),
        (["ppo.safetensors", "--env", PURSUIT], "a policy must act for several agents in GridPursuit-v0, but ppo acts"),
        (["pursuit.safetensors", "--env", "CartPole-v1"], "env must have several agents for mappo"),
        (["pursuit.safetensors", "--env", SPREAD], "env must have the agents that mappo was trained for, agents (pur"),
    ],
)
def test_errors_of_collect(command, trained, words, message):
    words = [str(trained / word) if word.endswith("tensors") else word for word in words]
    code, _, err = command("collect", *words, "--steps", "10", "--out", "a.arrow")
    assert code
    assert message in err
    assert "Traceback" not in err


def test_agents_cannot_be_given_with_a_replay_memory(command):
    code, _, err = command("collect", "--replay", "run", "--agents", "agent_0", "--out", "a.arrow")
    assert code
    assert "--replay must be used alone" in err


def test_where_agents_take_turns_a_row_reaches_to_the_agents_next_turn(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "duels", sys.modules[__name__])
    env = {"id": "pettingzoo:duels:Duel", "kwargs": {}, "wrappers": []}
    found = collect([Behaviour("random", 1.0)], env, 12, tmp_path / "duel.arrow", n_envs=1)
    assert found["policies"][0]["n_episodes"] == 6
    assert found["policies"][0]["mean_return"] == pytest.approx(-0.375)  # the mean of -0.25 - 1 and -0.5 + 1
    assert found["n_cut_episodes"] == 0
    rows = rlox.open_dataset(tmp_path / "duel.arrow").get_state()
    for first, agent, moves, rewards in ((0, 0, [0, 2], [-0.25, -1.0]), (6, 1, [1, 3], [-0.25, 1.0])):
        for start in range(first, first + 6, 2):
            some = slice(start, start + 2)
            assert rows["obs"][some].tolist() == [[t, agent] for t in moves]
            assert rows["next_obs"][some].tolist() == [[moves[1], agent], [4, agent]]
            assert rows["rewards"][some].tolist() == rewards
            assert rows["terminated"][some].tolist() == [0, 1]
    assert not rows["truncated"].any()
