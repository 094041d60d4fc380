"""Worker processes: the same bits as in one process, and a clean shutdown whatever happens."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import cloudpickle
import forked
import gymnasium
import numpy as np
import probes
import pytest
from gymnasium import spaces

from rlox.envs import make_vec_env
from rlox.envs import workers as env_workers
from rlox.envs.gym_vec_env import GymVecEnv
from rlox.envs.parallel_env import ParallelGymVecEnv
from rlox.processes import parent

# Workers cannot import a test module by its name; a user's main module is sent by value anyway.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Parts(gymnasium.Env):
    """A Dict observation, actions of two choices and episodes of random length, all determined by the seed."""

    observation_space = spaces.Dict({"a": spaces.Box(-5, 5, (2,), np.float64), "b": spaces.Discrete(3)})
    action_space = spaces.MultiDiscrete([2, 3])

    def observe(self):
        return {"a": self.np_random.uniform(-5, 5, 2), "b": self.np_random.integers(3)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observe(), {}

    def step(self, action):
        reward = self.np_random.normal() * (1 + action[1])
        return self.observe(), reward, self.np_random.random() < 0.1, self.np_random.random() < 0.1, {}


class Picture(Parts):
    observation_space = spaces.Box(0, 255, (24, 20, 3), np.uint8)

    def observe(self):
        return self.np_random.integers(0, 256, (24, 20, 3), np.uint8)


class Odd(probes.ConstantReward):
    """The action selects the behaviour: 0 normal, 1 raises, 2 is busy for 10 minutes, 3 exits, 4 takes 0.5 s."""

    action_space = spaces.Discrete(5)

    def step(self, action):
        if action == 1:
            raise KeyError("the environment's own words")
        if action == 3:
            os._exit(7)
        time.sleep({2: 600, 4: 0.5}.get(action, 0))
        return super().step(action)


def gone(pids):
    """Whether all of these processes end."""
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        if not any(running(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def pids(vec):
    return [child.process.pid for child in vec._group.children]


def trajectory(vec, n_steps):
    spec, rng, rows = vec.spec, np.random.default_rng(0), [vec.reset_all()]
    for t in range(n_steps):
        if spec.continuous:
            actions = rng.uniform(-1, 1, (len(vec), *spec.action_shape)).astype(np.float32)
        else:
            actions = rng.integers(0, spec.n_actions or spec.n_choices, (len(vec), *spec.action_shape))
        rows += vec.step_all(actions).values()
        if t == n_steps // 2:
            rows += [vec.reset_all(), vec.reset_all(seed=8)]
    return rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "n_envs", "workers", "kwargs", "wrappers"),
    [
        ("Acrobot-v1", 3, 1, None, ()),
        ("MountainCarContinuous-v0", 3, 3, {"max_episode_steps": 50}, ["TimeAwareObservation"]),
        ("Pendulum-v1", 5, 2, {"g": 9.0}, [{"FrameStackObservation": {"stack_size": 2}}]),
        (Parts, 5, 3, None, ()),
        (lambda: Picture(), 3, 2, None, ()),
    ],
)
def test_same_bits_as_in_one_process(env, n_envs, workers, kwargs, wrappers):
    with make_vec_env(env, n_envs, 3, kwargs, wrappers, workers) as vec:
        assert isinstance(vec, ParallelGymVecEnv)
        alone = GymVecEnv(env, n_envs, 3, kwargs, wrappers)
        assert vec.spec == alone.spec
        expected, got = trajectory(alone, 200), trajectory(vec, 200)
        assert len(expected) == len(got)
        for a, b in zip(expected, got, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
        other = trajectory(GymVecEnv(env, n_envs, 4, kwargs, wrappers), 1)
        assert (other[0] != got[0]).any()


def test_fills_the_given_arrays_only_and_keeps_what_it_returned():
    with ParallelGymVecEnv(lambda: probes.Countdown(3), 4, workers=2) as vec:
        assert len(vec) == 4
        first = vec.step_all([0] * 4)
        out = {"final_obs": np.zeros((4, 1), np.float32)}
        assert vec.step_all([0] * 4, out) is out
        assert out["final_obs"].ravel().tolist() == [2] * 4
        assert first["final_obs"].ravel().tolist() == [1] * 4
        assert [vec.n_actions, vec.discrete, vec.obs_dim, vec.act_dim] == [2, True, 1, None]
        for actions, match in (([0] * 3, "shape"), ([0, 0, 0, 2], r"in \[0, 2\)")):
            with pytest.raises(ValueError, match=f"ParallelGymVecEnv.step_all: .*{match}"):
                vec.step_all(actions)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "kwargs", "wrappers", "error"),
    [
        ("Acrobat-v1", None, (), ValueError),
        ("Acrobot-v1", {"colour": 3}, (), ValueError),
        ("Acrobot-v1", None, ["FlatenObservation"], ValueError),
        (lambda: probes, None, (), TypeError),
        ("Acrobot-v1", None, ["no_such_package:Mine"], ImportError),
    ],
)
def test_wrong_arguments_give_the_same_messages(env, kwargs, wrappers, error):
    with pytest.raises(error) as alone:
        GymVecEnv(env, 2, 0, kwargs, wrappers)
    with pytest.raises(error) as workers:
        ParallelGymVecEnv(env, 2, 0, kwargs, wrappers, 2)
    assert type(workers.value) is type(alone.value)
    assert str(workers.value) == str(alone.value)


@pytest.mark.slow
def test_environments_that_cannot_be_sent_are_errors(tmp_path):
    lock = __import__("threading").Lock()
    with pytest.raises(TypeError, match=r"picklable by cloudpickle.*pass an id, or a function"):
        ParallelGymVecEnv(lambda: lock and Parts(), 1)
    with pytest.raises(TypeError, match="must be an id or a callable"):
        ParallelGymVecEnv(Parts(), 1)
    with pytest.raises(ValueError, match="workers must be between 1 and n_envs"):
        ParallelGymVecEnv(Parts, 1, workers=2)

    def differs():
        try:
            os.mkdir(tmp_path / "the first one")
        except FileExistsError:
            return Parts()
        return gymnasium.make("CartPole-v1")

    with pytest.raises(ValueError, match="the same spaces"):
        ParallelGymVecEnv(differs, 2, workers=2)


@pytest.mark.slow
def test_an_id_registered_here_is_known_to_the_workers():
    gymnasium.register("MyOwnParts-v0", entry_point=Parts, max_episode_steps=3)
    try:
        with ParallelGymVecEnv("MyOwnParts-v0", 2, workers=2) as vec:
            assert vec.reset_all().shape == (2, 5)
    finally:
        del gymnasium.registry["MyOwnParts-v0"]


@pytest.mark.slow
def test_an_exception_comes_back_with_its_type_and_traceback_and_ends_the_workers():
    vec = ParallelGymVecEnv(Odd, 5, workers=2)
    processes = pids(vec)
    vec.step_all([0] * 5)
    with pytest.raises(KeyError, match="the environment's own words") as failed:
        vec.step_all([0, 0, 0, 1, 0])
    (note,) = failed.value.__notes__
    assert re.fullmatch(r"rlox: environment 3 \(Odd, worker 1, pid \d+\): step 2 of its episode failed", note)
    trace = str(failed.value.__cause__)
    assert trace.count("\n") > 5
    assert '    raise KeyError("the environment\'s own words")\n' in trace
    assert gone(processes)
    with pytest.raises(RuntimeError, match="Odd is closed"):
        vec.step_all([0] * 5)


class SimulatorError(Exception):
    """Like many exceptions, pickle cannot rebuild it, since its constructor needs more than the message."""

    def __init__(self, joint, force):
        super().__init__(f"{joint} broke at {force} N")


class Breaks(probes.ConstantReward):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def step(self, action):
        raise self.error("knee") if self.error is not SimulatorError else SimulatorError("knee", 3)


def test_an_exception_that_cannot_be_pickled_is_still_reported():
    vec = ParallelGymVecEnv(Breaks, 1, kwargs={"error": SimulatorError}, workers=1)
    with pytest.raises(RuntimeError, match="SimulatorError: knee broke at 3 N") as failed:
        vec.step_all([0])
    assert "environment 0 (Breaks, worker 0" in failed.value.__notes__[0]
    assert "in step\n" in str(failed.value.__cause__)


@pytest.mark.slow
def test_a_class_of_the_main_script_keeps_its_identity(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import gymnasium, numpy as np\n"
        "from rlox.envs.parallel_env import ParallelGymVecEnv\n"
        "class SimError(Exception):\n"
        "    pass\n"
        "class Env(gymnasium.Env):\n"
        "    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)\n"
        "    action_space = gymnasium.spaces.Discrete(2)\n"
        "    def reset(self, seed=None, options=None):\n"
        "        raise SimError('gone')\n"
        "if __name__ == '__main__':\n"
        "    try:\n"
        "        ParallelGymVecEnv(Env, 2, workers=2).reset_all()\n"
        "    except SimError as e:\n"
        "        print('caught', e)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.stdout == "caught gone\n", done.stderr


@pytest.mark.slow
def test_a_killed_worker_is_noticed_though_another_is_busy(tmp_path):
    class Busy(Odd):
        def step(self, action):
            (tmp_path / f"{os.getpid()} began {action}").touch()
            answer = super().step(action)
            (tmp_path / f"{os.getpid()} ended {action}").touch()
            return answer

    vec = ParallelGymVecEnv(Busy, 6, workers=3)
    vec.reset_all()
    processes = pids(vec)

    def kill():
        while not all((tmp_path / f"{processes[worker]} began 2").exists() for worker in (0, 2)):
            time.sleep(0.02)
        os.kill(processes[2], signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    with pytest.raises(
        RuntimeError,
        match=rf"worker 2 \(pid {processes[2]}\) died \(signal 9\) with environments 4 to 5 of Busy; .*memory",
    ):
        vec.step_all([2, 0, 0, 0, 0, 2])
    killer.join()
    assert gone(processes)
    assert not list(tmp_path.glob("* ended 2"))  # the busy worker was not waited for


def test_a_worker_that_takes_long_is_named_once_and_waited_for(monkeypatch):
    vec = ParallelGymVecEnv(lambda: Odd(limit=100), 4, workers=2)
    vec.reset_all()
    monkeypatch.setattr(env_workers, "LATE_AFTER", 0.3)
    monkeypatch.setattr(parent, "LATE_AFTER", 0.3)
    with pytest.warns(RuntimeWarning) as warned:
        step = vec.step_all([0, 0, 4, 4])  # takes 1 s
    assert step["episode_length"].tolist() == [1] * 4
    # On a busy machine, the other worker may be late, too.
    assert [text for w in warned if "worker 1" in (text := str(w.message))] == [
        f"ParallelGymVecEnv: worker 1 (pid {pids(vec)[1]}) has not answered for 0.3 s and is waited for: environments "
        "2 to 3 of <lambda> are slow, or one of them hangs; Ctrl-C ends the wait"
    ]
    vec.step_all([0] * 4)
    vec.close()


@pytest.mark.slow
def test_a_worker_that_died_between_steps_is_noticed_at_the_next():
    vec = ParallelGymVecEnv(Odd, 2, workers=2)
    vec.reset_all()
    os.kill(pids(vec)[1], signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"worker 1 .*died \(signal 9\)"):
        vec.step_all([0, 0])
    vec = ParallelGymVecEnv(Odd, 2, workers=2)
    with pytest.raises(RuntimeError, match=r"worker 0 .*died \(exit code 7\)"):
        vec.step_all([3, 0])


@pytest.mark.slow
def test_workers_end_silently_with_close_or_with_the_object():
    vec = ParallelGymVecEnv(Odd, 2, workers=2)
    first = [child.process for child in vec._group.children]
    vec.close()
    vec.close()
    assert all(process.returncode is not None for process in first)  # close() has waited for them
    vec = ParallelGymVecEnv(Odd, 2, workers=2)
    second = [child.process for child in vec._group.children]
    del vec
    gc.collect()
    assert all(process.returncode is not None for process in second)


@pytest.mark.slow
def test_a_forked_child_does_not_stop_its_parents_workers():
    vec = ParallelGymVecEnv(Odd, 1)
    vec.reset_all()
    child = os.fork()
    if child == 0:
        del vec
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert vec.step_all([0])["rewards"] == [1.0]
    vec.close()


SCRIPT = """
import os, sys, time
import gymnasium
from gymnasium import spaces
import numpy as np
from rlox.envs import make_vec_env

print("main", flush=True)  # no guard: workers must not run this again

class Slow(gymnasium.Env):
    observation_space, action_space = spaces.Box(-1, 1, (1,)), spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}
    def step(self, action):
        if action:
            print("stepping", flush=True)
            time.sleep(600)
        return np.zeros(1, np.float32), float(os.environ["OMP_NUM_THREADS"]), False, False, {}

vec = make_vec_env(Slow, 2, 0, workers=2)
assert (vec.step_all([0, 0])["rewards"] == 1).all()
print(*(child.process.pid for child in vec._group.children), flush=True)
"""


def start(rest, **kwargs):
    env = {**os.environ, "OMP_NUM_THREADS": "7"}
    command = [sys.executable, "-c", SCRIPT + rest]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, **kwargs)
    assert parent.stdout.readline() == "main\n"
    return parent, [int(word) for word in parent.stdout.readline().split()]


@pytest.mark.slow
@pytest.mark.parametrize("rest", ["time.sleep(600)", "vec.step_all([1, 0])"], ids=["idle", "busy"])
def test_no_worker_outlives_a_killed_parent(rest):
    parent, workers = start(rest)
    assert len(workers) == 2
    assert rest.startswith("time") or parent.stdout.readline() == "stepping\n"
    assert all(running(pid) for pid in workers)
    parent.kill()
    parent.wait()
    assert gone(workers)


@pytest.mark.slow
def test_a_script_without_main_guard_and_without_close_ends_by_itself():
    parent, workers = start("")
    assert parent.stdout.read() == ""
    assert parent.wait(120) == 0
    assert gone(workers)


@pytest.mark.slow
def test_only_the_parent_handles_ctrl_c():
    """The terminal sends it to the whole group: workers ignore it, and the parent may catch it and step again."""
    parent, workers = start(
        """
try:
    print("waiting", flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    assert vec.step_all([0, 0])["rewards"].sum() == 2
    print("stepped", flush=True)
""",
        start_new_session=True,
        stderr=subprocess.PIPE,
    )
    assert parent.stdout.readline() == "waiting\n"
    os.killpg(parent.pid, signal.SIGINT)
    out, err = parent.communicate(timeout=120)
    assert out == "stepped\n"
    assert err == ""
    assert gone(workers)


@pytest.mark.slow
def test_an_interrupted_step_does_not_mix_up_the_next_ones():
    class Interrupt(Exception):
        pass

    def interrupt(*_):
        raise Interrupt

    vec = ParallelGymVecEnv(lambda: Odd(limit=100), 4, workers=2)
    vec.reset_all()
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Interrupt):
            vec.step_all([4, 4, 4, 4])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    # The workers finish the interrupted step, whose results are discarded; the next step is the second for all of them.
    assert vec.step_all([0] * 4)["episode_length"].tolist() == [2] * 4
    assert vec.step_all([0] * 4)["episode_length"].tolist() == [3] * 4
    vec.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["env.workers=2", "eval.workers=1", "logger=csv"],
        pytest.param(["algo=impala", "algo.actors=processes"], marks=pytest.mark.exhaustive),
        pytest.param(["-m", "hydra/launcher=joblib", "seed=0,1"], marks=pytest.mark.exhaustive),
    ],
)
def test_a_users_module_with_a_name_of_the_standard_library_does_not_replace_it(words, tmp_path):
    lines = ["import gymnasium", "from gymnasium.envs.classic_control import CartPoleEnv"]
    lines += ["gymnasium.register('Mine-v0', CartPoleEnv, max_episode_steps=50)"]
    (tmp_path / "mine.py").write_text("\n".join(lines))
    for name in ("random", "secrets", "types", "numpy"):
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('the {name} of the user was imported')")
    small = ["env=Mine-v0", "total_timesteps=512", "env.n_envs=2", "eval.n_points=1", "eval.n_episodes=2"]
    done = forked.run("train", "--import", "mine", *small, "logger=none", *words, "output_dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "was imported" not in done.stdout + done.stderr
    if "logger=csv" in words:
        assert len(list((tmp_path / "run").glob("**/*.csv"))) == 1
