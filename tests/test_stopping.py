"""Ctrl-C and SIGTERM: the first signal lets the update end and saves, the second stops at once."""

import contextlib
import json
import math
import os
import pty
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import forked
import numpy as np
import pytest

from rlox import PPO, TD3
from rlox.checkpoint import load_checkpoint
from rlox.kernels.nn.bc import NativeBC
from rlox.kernels.nn.policy_gradient import NativeActorCritic, n_parameters

pytestmark = pytest.mark.slow

DEADLINE = 60  # seconds; takes two or three if the machine is idle
SMALL = ["tuned=off", "logger=none", "eval.n_points=0", "eval.n_episodes=1", "algo.hidden_sizes=[16]"]
SMALL += ["total_timesteps=200", "hydra.run.dir=run"]
PPO_SMALL = ["algo=ppo", "env=CartPole-v1", "algo.n_steps=16", *SMALL]
# Settings with which one update would take days.
ENDLESS = {
    "ppo": (PPO_SMALL, "algo.n_epochs=100000000"),
    "dqn": (["algo=dqn", "env=CartPole-v1", "algo.learning_starts=50", *SMALL], "algo.gradient_steps=1000000"),
    "sac": (["algo=sac", "env=Pendulum-v1", "algo.learning_starts=50", *SMALL], "algo.gradient_steps=1000000"),
}


def cpu_of_session(session):
    """The CPU seconds of all processes of a session."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            ticks += (int(fields[11]) + int(fields[12])) * (int(fields[3]) == session)
    return ticks / os.sysconf("SC_CLK_TCK")


class Process:
    """A command whose output is read while it runs."""

    def __init__(self, cwd, *words):
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self.process = forked.Rlox(*words, cwd=cwd, env=environment, stdout=subprocess.PIPE)
        self.output = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.output += line

    def wait_for(self, holds):
        deadline = time.monotonic() + DEADLINE
        while not holds():
            assert time.monotonic() < deadline, self.output
            assert self.process.poll() is None, self.output
            time.sleep(0.05)

    def works(self, seconds):
        """Wait until the command and its children have used so many more seconds of CPU."""
        before = cpu_of_session(self.process.pid)
        self.wait_for(lambda: cpu_of_session(self.process.pid) >= before + seconds)

    def ended(self):
        """Wait for the end and return the exit code."""
        try:
            code = self.process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            pytest.fail(f"it did not stop: {self.output}")
        self._reader.join(DEADLINE)
        return code


def updating(cwd, *words):
    """A training that is in the middle of its first update."""
    process = Process(cwd, "train", *words)
    process.wait_for(lambda: list(cwd.rglob("metrics.jsonl")))
    process.works(0.3)
    return process


@pytest.mark.parametrize(
    ("algo", "backend"),
    [
        ("ppo", "native"),
        ("sac", "torch"),
        pytest.param("ppo", "torch", marks=pytest.mark.exhaustive),
        pytest.param("dqn", "native", marks=pytest.mark.exhaustive),
        pytest.param("sac", "native", marks=pytest.mark.exhaustive),
    ],
)
def test_the_second_ctrl_c_stops_an_update_and_keeps_what_was_saved(algo, backend, tmp_path):
    words, endless = ENDLESS[algo]
    done = forked.run("train", *words, f"backend={backend}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    last = tmp_path / "run/checkpoints/last.safetensors"
    before = last.read_bytes()
    process = Process(tmp_path, "train", "resume=run", "total_timesteps=400", endless)
    process.wait_for(lambda: (tmp_path / "run/metrics.jsonl").read_text().count('"start"') == 2)
    process.works(0.3)
    process.process.send_signal(signal.SIGINT)
    process.wait_for(lambda: "stopping after this update" in process.output)
    assert "press Ctrl-C again to stop at once" in process.output
    process.process.send_signal(signal.SIGINT)
    assert process.ended() == 130
    assert "stopped at once. Saved before that: run/checkpoints/last.safetensors" in process.output
    assert "Resume with: rlox train resume=run" in process.output
    assert "Traceback" not in process.output
    assert last.read_bytes() == before
    again = endless.partition("=")[0] + "=1"
    done = forked.run("train", "resume=run", again, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert load_checkpoint(last).header["counters"]["env_steps"] >= 400


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_sigterm_does_not_wait_for_an_endless_update(backend, tmp_path):
    process = updating(tmp_path, *PPO_SMALL, "algo.n_epochs=100000000", f"backend={backend}")
    process.process.send_signal(signal.SIGTERM)
    assert process.ended() == 143
    assert "stopping after this update" in process.output
    assert "stopped at once. No checkpoint had been saved yet" in process.output
    assert not list(tmp_path.rglob("*.safetensors"))


BUSY = """
import gymnasium
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv

class Busy(CartPoleEnv):
    def step(self, action):
        np.linalg.eigvals(np.random.rand(4_000, 4_000))  # a minute of C, in which no handler of a signal runs
        return super().step(action)

gymnasium.register("Busy-v0", Busy, max_episode_steps=10)
"""


@pytest.mark.parametrize("workers", [1, pytest.param(0, marks=pytest.mark.exhaustive)])
def test_an_environment_that_hangs_is_stopped(workers, tmp_path):
    (tmp_path / "busy.py").write_text(BUSY)
    words = [word for word in PPO_SMALL if not word.startswith("env=")]
    process = updating(tmp_path, "--import", "busy", *words, "env=Busy-v0", "env.n_envs=1", f"env.workers={workers}")
    process.process.send_signal(signal.SIGTERM)
    assert process.ended() == 143
    assert "stopped at once" in process.output


# Sends SIGNAL twice at the moment WHEN.
MOMENTS = """
import atexit, os, signal, sys, time
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

def stop(when):
    if os.environ["WHEN"] == when:
        for _ in range(2):
            os.kill(os.getpid(), signal.Signals[os.environ["SIGNAL"]])
            time.sleep(0.1)

class Env(CartPoleEnv):
    def __init__(self, render_mode=None):
        stop("building")
        super().__init__()

    def close(self):
        stop("closing")

gymnasium.register("Moments-v0", Env, max_episode_steps=10)
atexit.register(stop, "leaving")
stop("importing")
"""


@pytest.mark.parametrize(
    ("when", "number"),
    [
        ("importing", "SIGTERM"),
        ("building", "SIGTERM"),
        ("leaving", "SIGINT"),
        pytest.param("importing", "SIGINT", marks=pytest.mark.exhaustive),
        pytest.param("building", "SIGINT", marks=pytest.mark.exhaustive),
        pytest.param("closing", "SIGINT", marks=pytest.mark.exhaustive),
        pytest.param("closing", "SIGTERM", marks=pytest.mark.exhaustive),
        pytest.param("leaving", "SIGTERM", marks=pytest.mark.exhaustive),
    ],
)
def test_signals_before_and_after_a_training_end_the_command_with_their_code(when, number, tmp_path):
    (tmp_path / "moments.py").write_text(MOMENTS)
    environment = {**os.environ, "WHEN": when, "SIGNAL": number}
    words = [word for word in PPO_SMALL if not word.startswith("env=")]
    done = forked.run("train", "--import", "moments", *words, "env=Moments-v0", cwd=tmp_path, env=environment)
    assert done.returncode == 128 + signal.Signals[number], done.stderr
    assert "Traceback" not in done.stderr
    assert "ignored" not in done.stderr
    assert (tmp_path / "run/checkpoints/last.safetensors").exists() == (when == "leaving")


@pytest.mark.parametrize(
    ("launcher", "how"),
    [
        ("basic", "ctrl-c"),
        ("joblib", "sigterm"),
        pytest.param("basic", "sigterm", marks=pytest.mark.exhaustive),
        pytest.param("joblib", "ctrl-c", marks=pytest.mark.exhaustive),
    ],
)
def test_signals_stop_a_sweep(launcher, how, tmp_path):
    if launcher != "basic":
        pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    parallel = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"] if launcher == "joblib" else []
    words = ["-m", "seed=0,1", *PPO_SMALL[:-1], "algo.n_epochs=100000000", "hydra.sweep.dir=sweep", *parallel]
    process = updating(tmp_path, *words)
    if how == "ctrl-c":
        os.killpg(process.process.pid, signal.SIGINT)
        process.wait_for(lambda: "press Ctrl-C again to stop at once" in process.output)
        os.killpg(process.process.pid, signal.SIGINT)
    else:
        process.process.send_signal(signal.SIGTERM)
    assert process.ended() == (130 if how == "ctrl-c" else 143)
    assert "rlox sweep resume sweep" in process.output
    deadline = time.monotonic() + DEADLINE
    while any_of_session(process.process.pid):
        assert time.monotonic() < deadline, "a job outlives the sweep"
        time.sleep(0.2)


def any_of_session(session):
    """Whether a process of the session still runs (zombies do not count)."""
    table = subprocess.run(["ps", "-eo", "sess,stat"], capture_output=True, text=True, check=True).stdout
    return any(line.split()[0] == str(session) and "Z" not in line.split()[1] for line in table.splitlines()[1:])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("SIGUSR1", ["env.workers=2", "env=Acrobot-v1", "env.backend=gymnasium"]),
        *(pytest.param(name, [], marks=pytest.mark.exhaustive) for name in ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")),
    ],
)
def test_signals_of_clusters_let_a_run_save_and_end(name, words, tmp_path):
    number = getattr(signal, name)
    endless = [*PPO_SMALL, "total_timesteps=1000000000", "checkpoint.every_steps=1000", *words]
    process = Process(tmp_path, "train", *endless)
    process.wait_for((tmp_path / "run/checkpoints/last.safetensors").is_file)
    for _ in range(3):  # SIGXCPU comes once a second
        os.killpg(process.process.pid, number)
    assert process.ended() == 128 + number, process.output
    assert "everything up to it is saved. Resume with:" in process.output
    steps = load_checkpoint(tmp_path / "run/checkpoints/last.safetensors").header["counters"]["env_steps"]
    assert steps > 0


def test_the_printed_command_resumes_a_run_with_what_must_be_typed_again(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from gymnasium.wrappers import ClipReward\n\n\nclass Mine(ClipReward):\n    pass\n"
    )
    sac = ["algo=sac", "env=Pendulum-v1", "env.wrappers=[{mine.Mine: {min_reward: -1, max_reward: 1}}]", *SMALL]
    memory = ["buffer=mmap", "buffer.size=2000", "buffer.folder='else where'", "algo.learning_starts=100"]
    endless = [*sac, *memory, "total_timesteps=1000000000", "checkpoint.every_steps=300"]
    process = Process(tmp_path, "train", *endless)
    process.wait_for((tmp_path / "run/checkpoints/last.safetensors").is_file)
    process.process.send_signal(signal.SIGINT)
    assert process.ended() == 130, process.output
    (printed,) = (line for line in process.output.splitlines() if "Resume with: " in line)
    resume = shlex.split(printed.partition("Resume with: ")[2])
    folder = f"buffer.folder='{tmp_path / 'else where'}'"
    assert resume == ["rlox", "train", "resume=run", folder, "--import", "mine"]
    steps = load_checkpoint(tmp_path / "run/checkpoints/last.safetensors").header["counters"]["env_steps"]
    done = forked.run(*resume[1:], f"total_timesteps={steps + 200}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (printed,) = (line for line in done.stdout.splitlines() if line.startswith("  evaluate "))
    evaluate = shlex.split(printed)[1:]
    assert evaluate == ["rlox", "eval", "run", "--import", "mine"]
    done = forked.run(*evaluate[1:], "--episodes", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_closed_terminal_lets_a_run_save_and_end(tmp_path):
    ours, theirs = pty.openpty()
    words = ["train", *PPO_SMALL, "total_timesteps=1000000000", "checkpoint.every_steps=1000"]
    # A new session whose terminal this is: closing our end sends SIGHUP.
    # Under nohup the signal is ignored, for our children, too.
    program = "import fcntl, signal, termios; signal.signal(signal.SIGHUP, signal.SIG_DFL); "
    program += "fcntl.ioctl(0, termios.TIOCSCTTY, 0); from rlox_cli.main import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, *words],
        cwd=tmp_path,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    record = tmp_path / "run/metrics.jsonl"
    deadline = time.monotonic() + DEADLINE
    while not (record.is_file() and "checkpoint" in record.read_text()):
        assert time.monotonic() < deadline
        assert process.poll() is None
        os.read(ours, 1 << 16)
    os.close(ours)
    assert process.wait(DEADLINE) == 128 + signal.SIGHUP
    assert json.loads(record.read_text().splitlines()[-1])["status"] == "interrupted"


@pytest.mark.parametrize("when", ["step", pytest.param("close", marks=pytest.mark.exhaustive)])
def test_a_training_whose_last_evaluation_fails_is_not_lost(when, tmp_path):
    lines = ["import os, gymnasium", "from gymnasium.envs.classic_control import CartPoleEnv", "made = []"]
    lines += ["class Last(CartPoleEnv):", "    def __init__(self):", "        super().__init__()"]
    lines += ["        made.append(self)", "        self.fails = len(made) > 2 and 'FAIL' in os.environ"]
    lines += [f"    def {when}(self, *args):", "        if self.fails:", "            raise RuntimeError('no')"]
    lines += [f"        return super().{when}(*args)"]
    lines += ["gymnasium.register('Last-v0', Last, max_episode_steps=50)"]
    (tmp_path / "last.py").write_text("\n".join(lines))
    words = ["--import", "last", *PPO_SMALL, "env=Last-v0", "env.n_envs=2", "eval.n_points=1", "eval.workers=0"]
    done = forked.run("train", *words, cwd=tmp_path, env={**os.environ, "FAIL": "1"})
    assert done.returncode == 1
    assert "Saved before that: run/checkpoints/last.safetensors" in done.stderr
    done = forked.run("train", "--import", "last", "resume=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["status"] == "finished"
    assert [row["step"] for row in rows if "eval/mean_return" in row] == [rows[-1]["step"]]
    assert [row["segment"] for row in rows if "loss/policy" in row and row["step"] == rows[-1]["step"]] == [0]


@pytest.mark.parametrize(
    ("verb", "number", "code"),
    [
        ("eval", signal.SIGTERM, 143),
        ("bench", signal.SIGINT, 130),
        pytest.param("eval", signal.SIGINT, 130, marks=pytest.mark.exhaustive),
        pytest.param("bench", signal.SIGTERM, 143, marks=pytest.mark.exhaustive),
    ],
)
def test_signals_stop_eval_and_bench(verb, number, code, tmp_path):
    if verb == "eval":
        agent = PPO("CartPole-v1", n_envs=2, n_steps=16, hidden_sizes=[8])
        agent.train(32)
        agent.save(tmp_path / "agent.safetensors")
        process = Process(tmp_path, "eval", "agent.safetensors", "--episodes", "1000000")
    else:
        words = [word for word in PPO_SMALL if not word.startswith(("hydra", "eval.n_points"))]
        endless = ["algo.n_epochs=100000000", "--seeds", "5", "--jobs", "2", "--runs", "runs", "--score-only"]
        process = Process(tmp_path, "bench", "learn", *words, *endless)
        process.wait_for(lambda: list(tmp_path.rglob("metrics.jsonl")))
    process.works(0.3)
    process.process.send_signal(number)
    if verb == "bench" and number == signal.SIGINT:
        process.wait_for(lambda: "again to stop at once" in process.output)
        process.process.send_signal(number)
    assert process.ended() == code


def interrupted(work):
    """Call `work` and send Ctrl-C after half a second; return whether it raised KeyboardInterrupt."""
    timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        timer.cancel()
    return False


LONG = {
    "epochs": lambda: PPO("CartPole-v1", 2, n_steps=32, hidden_sizes=[8], n_epochs=10**8),
    "rollout": lambda: PPO("CartPole-v1", 2, n_steps=5_000_000, hidden_sizes=[8]),
    "rounds": lambda: TD3(
        "Pendulum-v1", 1, buffer_size=500, learning_starts=20, gradient_steps=10**6, hidden_sizes=[8], batch_size=8
    ),
}


@pytest.mark.parametrize("what", LONG)
def test_an_interrupted_kernel_leaves_the_object_usable(what):
    """In a notebook Ctrl-C may come at any time, and training may continue afterwards."""
    agent = LONG[what]()
    assert agent.backend == "native"
    assert interrupted(lambda: agent.train(10**9))
    agent.config.n_epochs = agent.config.gradient_steps = 1
    agent.config.n_steps = 32
    metrics = agent.train(200)
    assert all(math.isfinite(value) for name, value in metrics.items() if name.endswith("loss"))
    weights = agent.native.weights()
    assert all(np.isfinite(array).all() for array in weights.values())
    if what != "rounds":
        # The stored observations match the current state of the environments.
        np.testing.assert_array_equal(agent.collector._raw, agent.collector.env.observe())


@pytest.mark.parametrize("kernel", ["a2c", "bc"])
def test_one_gradient_of_a_huge_batch_is_interrupted(kernel):
    n, hidden, rng = 300_000, [512, 512], np.random.default_rng(0)
    obs, column = rng.normal(size=(n, 64)).astype(np.float32), np.zeros(n, np.float32)
    if kernel == "bc":
        net = NativeBC(np.zeros(64 * 512 + 512 + 512 * 512 + 512 + 513, np.float32), 64, 1, hidden)
        assert interrupted(lambda: [net.update(obs, column[:, None], learning_rate=1e-3) for _ in range(1000)])
        weights = net.parameters["policy"]
    else:
        net = NativeActorCritic(np.zeros(n_parameters(64, 2, hidden), np.float32), 64, 2, hidden)
        settings = {"learning_rate": 1e-3, "vf_coef": 0.5, "ent_coef": 0.0}
        columns = (np.zeros(n, np.int64), column, column, column)
        assert interrupted(lambda: [net.a2c(obs, *columns, **settings) for _ in range(1000)])
        weights = net.parameters
    assert np.isfinite(weights).all()


def test_a_kernel_in_another_thread_is_not_interrupted():
    agent = PPO("CartPole-v1", 2, n_steps=32, hidden_sizes=[8], n_epochs=20_000)
    done = threading.Event()

    def work():
        agent.train(64)
        done.set()

    threading.Thread(target=work, daemon=True).start()
    assert interrupted(lambda: time.sleep(DEADLINE))
    assert done.wait(DEADLINE)
    assert agent.counters.updates == 1


@pytest.mark.parametrize("at", ["rlox_cli.terminal.signals", "rlox.processes.child", "typer"])
def test_ctrl_c_during_the_imports_ends_quietly(at):
    program = (
        "import signal, sys\n\n\nclass Interrupt:\n    def find_spec(self, name, path, target=None):\n"
        f"        if name == {at!r}:\n            signal.raise_signal(signal.SIGINT)\n\n\n"
        "sys.meta_path.insert(0, Interrupt())\nsys.argv[1:] = ['ls']\nfrom rlox_cli.start import main\nmain()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode in (-signal.SIGINT, 128 + signal.SIGINT)  # a shell reports both as the same
    assert ended.stdout == ended.stderr == ""
