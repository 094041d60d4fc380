"""Environments that end, kill or disturb the process: never a silent success, and the environment is named."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import cloudpickle
import forked
import numpy as np
import pytest
from faulty_envs import Good

import rlox
from rlox.envs import make_vec_env
from rlox_cli.terminal.account import account

# Workers cannot import a test module by its name; a user's main module is sent by value without this.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SLOW = pytest.mark.slow
EXHAUSTIVE = pytest.mark.exhaustive


class Calls(Good):
    """Calls `do(env)` in one of its methods: at the third step, or at the first call of another one."""

    def __init__(self, do, hook):
        self.do, self.hook, self.n = do, hook, 0
        self.call("make")

    def call(self, hook):
        self.n += hook == self.hook
        if hook == self.hook and self.n == (3 if hook == "step" else 1):
            self.do(self)

    def reset(self, *, seed=None, options=None):
        self.call("reset")
        return super().reset(seed=seed)

    def step(self, action):
        self.call("step")
        return super().step(action)

    def close(self):
        self.call("close")


def raising(error):
    def do(env):
        raise error

    return do


EXITS = [SystemExit(0), KeyboardInterrupt(), GeneratorExit(), BaseException("mine")]
SMALL = {"n_steps": 8, "hidden_sizes": [8]}


@pytest.mark.parametrize("error", EXITS, ids=repr)
@pytest.mark.parametrize(
    ("hook", "workers"),
    [
        ("make", 0),
        ("reset", 0),
        ("step", 0),
        ("close", 0),
        pytest.param("step", 1, marks=SLOW),
        pytest.param("make", 1, marks=EXHAUSTIVE),
        pytest.param("reset", 1, marks=EXHAUSTIVE),
    ],
)
def test_an_environment_must_not_end_the_process(error, hook, workers):
    def live():
        env = make_vec_env(Calls, 2, 0, {"do": raising(error), "hook": hook}, [], workers)
        env.reset_all()
        for _ in range(3):
            env.step_all(np.zeros(2, np.int64))
        env.close()

    with pytest.raises(RuntimeError, match="must not end the process, got ") as caught:
        live()
    assert repr(error) in str(caught.value)
    assert hook.removesuffix("e") in caught.value.__notes__[0]


@pytest.mark.slow
@pytest.mark.parametrize("actors", ["threads", "processes"])
@pytest.mark.parametrize("error", [EXITS[0], *(pytest.param(e, marks=EXHAUSTIVE) for e in EXITS[1:])], ids=repr)
def test_an_environment_of_an_actor_must_not_end_its_process(error, actors):
    def make():
        return Calls(raising(error), "step")

    agent = rlox.IMPALA(make, n_envs=1, n_actors=1, actors=actors, **SMALL)
    with pytest.raises(RuntimeError, match="must not end the process, got ") as caught:
        agent.train(64)
    agent.close()
    assert repr(error) in str(caught.value)
    assert "step 3 of its episode" in caught.value.__notes__[0]


def test_ctrl_c_in_an_environment_is_none_of_its_exceptions():
    kwargs = {"do": lambda env: signal.raise_signal(signal.SIGINT), "hook": "reset"}
    with pytest.raises(KeyboardInterrupt):
        make_vec_env(Calls, 1, 0, kwargs).reset_all()


def test_rewards_and_callbacks_must_not_end_the_process():
    def leave(*_):
        raise SystemExit(0)

    class Leaves(rlox.callbacks.Callback):
        def on_step(self, **info):
            leave()

    for given, who in (({"reward_fn": leave}, "reward_fn"), ({"callbacks": [Leaves()]}, "callback Leaves.on_step")):
        with pytest.raises(RuntimeError, match=rf"{who} must not end the process, got SystemExit\(0\)"):
            rlox.PPO("CartPole-v1", 1, **given, **SMALL).train(16)


def test_an_environment_that_fails_to_close_is_named_and_the_others_are_closed():
    closed = []

    def do(env):
        closed.append(env)
        if len(closed) == 1:
            raise LookupError("the window is gone")

    env = make_vec_env(Calls, 2, 0, {"do": do, "hook": "close"})
    with pytest.raises(LookupError, match="the window is gone") as caught:
        env.close()
    assert caught.value.__notes__ == ["rlox: environment 0 (Calls): close failed"]
    assert len(closed) == 2


USERS = """
import ctypes, os, subprocess, sys, time
import gymnasium
from faulty_envs import Good

class Does(Good):
    def __init__(self, what="", hook="step"):
        self.what, self.hook = what, hook

    def step(self, action):
        if self.hook == "step" and self.t == 3:
            exec(self.what)
        return super().step(action)

    def close(self):
        if self.hook == "close":
            exec(self.what)

gymnasium.register("Does-v0", Does, disable_env_checker=True)
"""
WORDS = ["train", "--import", "does", "env=Does-v0", "env.n_envs=2", "tuned=off", "logger=none", "hydra.run.dir=run"]
WORDS += ["algo.hidden_sizes=[8]", "total_timesteps=64", "eval.n_points=0", "eval.n_episodes=1"]


@pytest.fixture
def users(tmp_path):
    (tmp_path / "does.py").write_text(USERS)
    return tmp_path


def kwargs(what, hook="step"):
    return f"env.kwargs={{what: {json.dumps(what)}, hook: {hook}}}"


def run_of(folder, *words):
    path = os.pathsep.join([str(Path(__file__).parent / "helpers"), os.environ.get("PYTHONPATH", "")])
    steps = [] if "algo=dqn" in words else ["algo.n_steps=16"]
    return forked.run(*WORDS, *steps, *words, cwd=folder, env={**os.environ, "PYTHONPATH": path})


def end_of(folder):
    row = json.loads((folder / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert row["event"] == "end"
    return row


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ["algo=ppo"],
        ["algo=impala", "algo.actors=processes"],
        pytest.param(["algo=ppo", "env.workers=2"], marks=EXHAUSTIVE),
        pytest.param(["algo=impala", "algo.actors=threads"], marks=EXHAUSTIVE),
        pytest.param(["algo=dqn", "algo.learning_starts=10"], marks=EXHAUSTIVE),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize(
    "what", ["raise KeyboardInterrupt", *(pytest.param(f"raise {e!r}", marks=EXHAUSTIVE) for e in EXITS if e.args)]
)
def test_the_command_fails_in_a_few_lines_and_the_record_has_an_end(what, more, users):
    done = run_of(users, *more, kwargs(what))
    assert done.returncode == 1
    assert "the environment must not end the process, got " in done.stderr
    assert 'does.py", line 12, in step' in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr) < 2_000
    assert end_of(users)["status"] == "failed"


@pytest.mark.slow
def test_an_environment_that_ends_the_process_in_close_fails_the_run(users):
    done = run_of(users, "algo=ppo", kwargs("sys.exit(0)", "close"))
    assert done.returncode == 1
    assert "must not end the process, got SystemExit(0)" in done.stderr
    assert end_of(users)["status"] == "failed"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "who"),
    [
        (["algo=ppo"], ""),
        (["algo=ppo", "env.workers=1"], "worker 0 (pid {}) died (signal 11) with environments 0 to 1 of Does-v0"),
        pytest.param(
            ["algo=impala", "algo.actors=processes", "algo.max_restarts=0"],
            "(a process, pid {}) was lost (it died (signal 11))",
            marks=EXHAUSTIVE,
        ),
    ],
    ids=["process", "worker", "actor"],
)
def test_an_interpreter_that_dies_prints_which_environment_ran(more, who, users):
    done = run_of(users, *more, kwargs("ctypes.string_at(0)"))
    assert "Fatal Python error: Segmentation fault" in done.stderr
    assert 'does.py", line 12 in step' in done.stderr
    # If pygame is imported, its handler of the signal aborts.
    assert done.returncode in ((1,) if who else (-signal.SIGSEGV, -signal.SIGABRT))
    for part in filter(None, who.split("{}")):
        assert part in done.stderr
    if who:
        assert end_of(users)["status"] == "failed"


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_no_process_that_an_environment_forked_outlives_the_command(workers, users):
    what = f"os.fork() or (open({str(users / 'pid')!r}, 'w').write(str(os.getpid())), time.sleep(1000))"
    done = run_of(users, "algo=ppo", "env.n_envs=1", f"env.workers={workers}", kwargs(what))
    assert done.returncode == 0, done.stderr
    pid = int((users / "pid").read_text())
    deadline = time.monotonic() + 30
    while runs(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_message_of_a_million_characters_is_cut():
    for error in (RuntimeError("x" * 10**6), ValueError("word " * 10**6)):
        env = make_vec_env(Calls, 1, 0, {"do": raising(error), "hook": "reset"})
        with pytest.raises(type(error)) as caught:
            env.reset_all()
        assert len(account(caught.value)) < 4_000
        assert f"… ({len(' '.join(str(error).split())):,} characters)" in account(caught.value)
    assert len(account(error)) < 10_000


def test_an_exception_without_a_text_is_named():
    class Mute(Exception):
        def __str__(self):
            raise ValueError("no text")

    env = make_vec_env(Calls, 1, 0, {"do": raising(Mute()), "hook": "reset"})
    with pytest.raises(Mute) as caught:
        env.reset_all()
    assert account(caught.value).startswith("environment 0 (Calls): reset failed with Mute\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("time.perf_counter = None", "code outside rlox has replaced time.perf_counter by None, which rlox needs"),
        ("sys.excepthook = None", "code outside rlox has replaced sys.excepthook by None, which rlox needs"),
    ],
)
def test_a_function_of_python_that_an_environment_replaced_is_named(what, says, users):
    done = run_of(users, "algo=ppo", kwargs(what))
    assert done.returncode == 1
    assert says in done.stderr
    assert "This is a bug in rlox" not in done.stderr
    assert end_of(users)["status"] == "failed"
