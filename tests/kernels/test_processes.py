"""Threads, fork and spawn. The guarantees: objects shared by several threads are always memory-safe, and results are
defined as long as threads do not write at the same time. A forked or spawned copy continues independently in the same
way as the original."""

import concurrent.futures
import multiprocessing
import pickle
import re
import threading

import numpy as np
import pytest
from child_tasks import child, digest

import rlox
from rlox.kernels.rng import Rng

D, A = 4, 1


def observations(n, seed):
    return np.random.default_rng(seed).standard_normal((n, D)).astype(np.float32)


def fill(buffer, n=2000, seed=0):
    rng = np.random.default_rng(seed)
    obs = rng.standard_normal((n, D)).astype(np.float32)
    done = rng.random(n) < 0.02
    buffer.push_batch(obs, obs + 1, obs[:, :A], obs[:, 0], done, np.zeros(n, bool))
    return buffer


def offline():
    rng = np.random.default_rng(0)
    obs = rng.standard_normal((500, D)).astype(np.float32)
    return rlox.OfflineDatasetBuffer(
        obs, obs + 1, obs[:, :A].copy(), obs[:, 0].copy(), rng.random(500) < 0.05, np.zeros(500, bool)
    )


MAKERS = {
    "ReplayBuffer": lambda: fill(rlox.ReplayBuffer(1000, D, A)),
    "PrioritizedReplayBuffer": lambda: fill(rlox.PrioritizedReplayBuffer(1000, D, A)),
    "OfflineDatasetBuffer": offline,
}


def make(name):
    if name == "VecEnv":
        env = rlox.VecEnv(8, seed=3)
        env.reset_all()
        return env
    return Rng(7) if name == "Rng" else MAKERS[name]()


ALL = ["VecEnv", "Rng", *MAKERS]


@pytest.mark.parametrize("name", ALL)
def test_a_pickled_copy_continues_as_the_original(name):
    thing = make(name)
    digest(thing)
    copy = pickle.loads(pickle.dumps(thing))
    assert digest(copy) == digest(thing)


# Sending an object does not depend on what starts the receiving process: each object is sent to a forked process (by
# memory) and to a spawned one (by pickle), and one of them to a process of a fork server.
WAYS = [*((name, method) for name in ALL for method in ("fork", "spawn")), ("VecEnv", "forkserver")]
WAYS += [pytest.param(name, "forkserver", marks=pytest.mark.exhaustive) for name in ALL if name != "VecEnv"]


@pytest.mark.parametrize(("name", "method"), WAYS)
def test_another_process_continues_as_the_original(name, method):
    context = multiprocessing.get_context(method)
    thing, queue = make(name), context.Queue()
    process = context.Process(target=child, args=(queue, thing))
    process.start()
    theirs = queue.get(timeout=60)
    process.join(60)
    assert process.exitcode == 0
    assert theirs == digest(thing)


@pytest.mark.parametrize("name", [n for n in ALL if n != "Rng"])
def test_threads_with_separate_objects(name):
    expected = digest(make(name))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for result in pool.map(lambda _: digest(make(name)), range(8)):
            assert result == expected


@pytest.mark.parametrize("name", list(MAKERS))
def test_threads_that_sample_from_one_buffer(name):
    buffer = make(name)
    expected = [buffer.sample(20_000, seed)["obs"] for seed in range(4)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for seed, batch in enumerate(pool.map(lambda seed: buffer.sample(20_000, seed)["obs"], range(4))):
            np.testing.assert_array_equal(batch, expected[seed])


def hammer(*jobs, seconds=1.0):
    """Run every job repeatedly in its own thread, and return the errors by type."""
    stop, errors = threading.Event(), []

    def run(job):
        while not stop.is_set():
            try:
                job()
            except (ValueError, RuntimeError) as e:
                errors.append(e)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    stop.wait(seconds)
    stop.set()
    for thread in threads:
        thread.join()
    return errors


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ReplayBuffer", "PrioritizedReplayBuffer"])
def test_pushing_sampling_clearing_and_restoring_at_once_is_safe(name):
    buffer = make(name)
    state, sampled = buffer.get_state(), []

    def check(batch):
        """Every row is one of those that were pushed, whole."""
        obs = batch["obs"]
        assert {row.tobytes() for row in obs} <= pushed
        np.testing.assert_array_equal(batch["next_obs"], obs + 1)
        np.testing.assert_array_equal(batch["actions"], obs[:, :A])
        np.testing.assert_array_equal(batch["rewards"], obs[:, 0])

    def sample():
        """A batch that is copied while others push may mix two rows, but has no other numbers than theirs."""
        assert np.isin(buffer.sample(50_000, len(sampled))["obs"], numbers).all()
        sampled.append(True)

    numbers = np.concatenate([observations(2000, 0), observations(200, 1)])
    pushed = {row.tobytes() for row in numbers}
    while len(sampled) < 20:
        errors = hammer(
            sample, lambda: fill(buffer, 200, 1), lambda: buffer.set_state(state), buffer.clear, seconds=0.2
        )
        for e in errors:  # `sample` in the middle of `clear`, or after it
            assert re.search(r"sample: (the buffer must hold a transition|priorities must not all be 0), got", str(e))
        n_kept = len(buffer)
        assert n_kept in (0, 200, 400, 600, 800, 1000)
        fill(buffer, 200, 1)
        assert len(buffer) == min(n_kept + 200, 1000)
        check(batch := buffer.sample(20_000, 2))
        if name == "PrioritizedReplayBuffer":  # this refuses places without a transition
            buffer.update_priorities(batch["indices"], np.ones(20_000))
    buffer.set_state(state)
    assert digest(buffer) == digest(make(name))


@pytest.mark.slow
def test_closing_a_mapped_buffer_while_others_sample(tmp_path):
    for k in range(5):
        buffer = fill(rlox.MmapReplayBuffer(100, 1000, D, A, str(tmp_path / f"cold-{k}")))
        closing = threading.Timer(0.05, buffer.close)
        closing.start()
        errors = hammer(lambda b=buffer: b.sample(50_000, 1), lambda b=buffer: fill(b, 200, 1), seconds=0.2)
        closing.join()
        assert errors  # each says that the buffer is closed
        assert all("closed" in str(e) for e in errors)


@pytest.mark.slow
def test_two_threads_on_one_environment_raise_or_take_turns():
    env, alone = rlox.VecEnv(4096), rlox.VecEnv(4096)
    actions, n_steps = np.zeros(4096, np.int64), []

    def step():
        env.step_all(actions)
        n_steps.append(1)

    env.reset_all()
    errors = hammer(step, step, env.get_state, seconds=0.5)
    assert all("thread" in str(e) for e in errors)
    alone.reset_all()
    for _ in n_steps:
        alone.step_all(actions)
    assert n_steps
    np.testing.assert_array_equal(env.observe(), alone.observe())
