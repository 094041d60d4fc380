"""Stepping environments into a memory of sequences."""

import numpy as np
import probes
import pytest
from counting_agent import Counting

from rlox import SequenceReplayBuffer
from rlox.collectors.sequences import SequenceCollector
from rlox.evaluation.episodes import evaluate


def memory_for(collector, size=10_000):
    spec = collector.spec
    shape = {"obs_shape": spec.obs_shape, "obs_dtype": spec.obs_dtype} if spec.image else {"obs_dim": spec.obs_dim}
    width = spec.model_width
    return SequenceReplayBuffer(size, act_dim=width, n_envs=collector.n_envs, state_dim=2 + width, **shape)


def collected(collector, n, random=False):
    agent, memory = Counting(collector.spec), memory_for(collector)
    ended = [collector.step(agent, memory, random) for _ in range(n)]
    return memory.get_state(), ended, agent


def rows_of(state, env):
    """The rows of one environment, by column."""
    size = state["sizes"][env]
    columns = ("obs", "actions", "rewards", "terminated", "truncated", "is_first", "state")
    return {name: state[name][env, :size] for name in columns}


@pytest.mark.parametrize("limit", [True, False])
def test_rows_equal_the_steps_of_the_environment(limit):
    state, ended, _ = collected(SequenceCollector(lambda: probes.Countdown(3, limit), n_envs=2, seed=0), 7)
    rows = rows_of(state, 1)
    # Observations count the steps; the last observation of each episode, 3, has its own row.
    assert rows["obs"][:, 0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert rows["rewards"].tolist() == [0, 1, 1, 1, 0, 1, 1, 1, 0]
    assert rows["is_first"].tolist() == [True, False, False, False] * 2 + [True]
    over = [False, False, False, True] * 2 + [False]
    assert rows["truncated"].tolist() == (over if limit else [False] * 9)
    assert rows["terminated"].tolist() == ([False] * 9 if limit else over)
    assert not rows["actions"][over].any()
    assert rows["actions"][~np.array(over)].any(1).all()
    # The state before a row: steps, previous observation, previous action; zeros at the start of an episode.
    assert rows["state"][:, 0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert rows["state"][:, 1].tolist() == [0, 0, 1, 2, 0, 0, 1, 2, 0]
    first = rows["is_first"][1:]
    assert np.array_equal(rows["state"][1:, 2:][~first], rows["actions"][:-1][~first])
    assert not rows["state"][rows["is_first"]].any()
    assert [returns.tolist() for returns, _ in ended] == [[], [], [3.0, 3.0], [], [], [3.0, 3.0], []]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "options"),
    [("CartPole-v1", {}), ("CartPole-v1", {"env_backend": "gymnasium"}), ("Pendulum-v1", {}),
     ("CartPole-v1", {"env_backend": "gymnasium", "env_workers": 2}), (probes.TwoSwitches, {})],
)  # fmt: skip
@pytest.mark.parametrize("random", [False, True])
def test_every_kind_of_environment(env, options, random):
    collector = SequenceCollector(env, n_envs=3, seed=1, **options)
    state, ended, agent = collected(collector, 60, random)
    collector.close()
    n_ended = sum(len(returns) for returns, _ in ended)
    assert state["sizes"].sum() == 180 + n_ended
    spec = collector.spec
    for env_number in range(3):
        rows = rows_of(state, env_number)
        over = rows["terminated"] | rows["truncated"]
        assert np.array_equal(rows["is_first"][1:], over[:-1])
        assert (rows["rewards"][rows["is_first"]] == 0).all()
        actions = rows["actions"][~over]
        if spec.continuous:
            assert (np.abs(actions) <= 1).all()
            assert actions.std() > 0.3
        else:
            assert (actions.sum(1) == (len(spec.n_choices or [0]))).all()
        on = ~rows["is_first"][1:]
        assert np.array_equal(rows["state"][1:, 2:][on], rows["actions"][:-1][on])
        if random:
            assert not rows["state"][:, :2].any()
        else:
            sums = rows["obs"].sum(1, dtype=np.float32)
            np.testing.assert_allclose(rows["state"][1:, 1][on], sums[:-1][on], rtol=1e-6)
    assert bool(agent.seen) is not random


def test_images_stay_bytes():
    state, _, _ = collected(SequenceCollector(probes.BrightSide, n_envs=2, seed=0), 9)
    assert state["obs"].dtype == np.uint8
    assert state["obs"].ndim == 5
    assert state["obs"].any()


@pytest.mark.parametrize("options", [{}, {"env_backend": "gymnasium"}])
def test_a_restored_collector_continues_exactly(options):
    def made():
        return SequenceCollector("CartPole-v1", n_envs=2, seed=3, **options)

    straight, agent = made(), Counting(made().spec)
    memory = memory_for(straight)
    for _ in range(50):
        straight.step(agent, memory)
    saved, rng, kept = straight.state(), straight.rng.get_state(), memory.get_state()
    for _ in range(50):
        straight.step(agent, memory)
    other, again = made(), memory_for(straight)
    again.set_state(kept)
    other.rng.set_state(rng)
    assert other.restore(saved)
    other.remember_buffer(again)
    for _ in range(50):
        other.step(agent, again)
    expected, found = memory.get_state(), again.get_state()
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name])


def test_an_interrupted_episode_is_truncated():
    first, agent = SequenceCollector(lambda: probes.Countdown(9, True), n_envs=1, seed=0), None
    agent, memory = Counting(first.spec), memory_for(first)
    for _ in range(3):
        first.step(agent, memory)
    second = SequenceCollector(lambda: probes.Countdown(9, True), n_envs=1, seed=1)
    for _ in range(2):
        second.step(agent, memory)
    rows = rows_of(memory.get_state(), 0)
    assert rows["obs"][:, 0].tolist() == [0, 1, 2, 0, 1]
    assert rows["truncated"].tolist() == [False, False, True, False, False]
    assert rows["is_first"].tolist() == [True, False, False, True, False]
    assert not rows["terminated"].any()
    assert rows["rewards"].tolist() == [0, 1, 1, 0, 1]
    assert not rows["state"][3].any()
    # If the memory is lost and the environments continue, the next row starts an episode.
    other = memory_for(second)
    second.step(agent, other)
    rows = rows_of(other.get_state(), 0)
    assert rows["is_first"].tolist() == [True]
    assert rows["rewards"].tolist() == [0]
    assert not rows["state"].any()


def test_a_step_that_is_lost_truncates_its_episode():
    """The third step, which ends an episode, does not reach the memory."""
    reward_fn = probes.FailsOnce(3, RuntimeError("once"))
    collector = SequenceCollector(lambda: probes.Countdown(3, True), n_envs=1, seed=0, reward_fn=reward_fn)
    agent, memory = Counting(collector.spec), memory_for(collector)
    for _ in range(2):
        collector.step(agent, memory)
    with pytest.raises(RuntimeError, match="once"):
        collector.step(agent, memory)
    assert collector.state() is None
    for _ in range(2):
        collector.step(agent, memory)
    rows = rows_of(memory.get_state(), 0)
    assert rows["obs"][:, 0].tolist() == [0, 1, 0, 1]
    assert rows["truncated"].tolist() == [False, True, False, False]
    assert rows["is_first"].tolist() == [True, False, True, False]
    assert rows["rewards"].tolist() == [0, 1, 0, 1]
    assert not rows["state"][2].any()


def test_a_damaged_state_is_an_error():
    collector = SequenceCollector("CartPole-v1", n_envs=2, seed=0)
    agent, memory = Counting(collector.spec), memory_for(collector)
    collector.step(agent, memory)
    saved = collector.state()
    for bad in (saved["agent_carry"][:1], saved["agent_carry"].astype(np.float64), np.full((2, 4), np.nan, np.float32)):
        with pytest.raises(ValueError, match="agent_carry must be"):
            collector.set_state({**saved, "agent_carry": bad})
    with pytest.raises(ValueError, match="agent_first must be an array of bool"):
        collector.set_state({name: x for name, x in saved.items() if name != "agent_first"})
    collector.set_state({**saved, "agent_carry": np.zeros((2, 7), np.float32)})
    collector.remember_buffer(memory)
    with pytest.raises(ValueError, match=r"the agent's state must have shape \(2, 4\), got \(2, 7\)"):
        collector.step(agent, memory)


@pytest.mark.parametrize("options", [{}, {"wrappers": ["RecordEpisodeStatistics"]}])
def test_evaluation_carries_the_state_and_resets_it_per_episode(options):
    agent = Counting(SequenceCollector("CartPole-v1").spec)
    played = evaluate(agent, "CartPole-v1", 4, seed=0, deterministic=False, **options)
    n = len(agent.seen[0][0])
    assert n == (1 if options else 4)
    steps = np.zeros(n)
    for carry, _, first in agent.seen:
        steps[first] = 0
        assert np.array_equal(carry[:, 0], steps)
        steps += 1
    assert (played.lengths > 1).all()
    if options:
        assert sum(first[0] for *_, first in agent.seen) == 4
