"""Ray: sweeps as tasks and actors as Ray actors. Whatever dies, the work completes and no process is left.

Ray listens on all network interfaces, so each command runs in its own network namespace.
"""

import functools
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import forked
import pytest
from run_results import outcome

from rlox_cli.records.ledger import Sweep

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray")

SLOW = """
import time

def reward(obs, actions, rewards):
    time.sleep(2e-4)
    return rewards
"""
WORDS = ["-m", "env=CartPole-v1", "env.n_envs=1", "algo.n_steps=64", "algo.hidden_sizes=[8]", "tuned=off"]
WORDS += ["logger=none", "total_timesteps=8_000", "eval.n_points=2", "eval.n_episodes=1", "checkpoint.every_steps=500"]
WORDS += ["hydra.sweep.dir=sweep", "hydra.sweeper.plot=false"]
OWN = ["--import", "slow", "env.reward_fn=slow:reward"]  # custom code that makes a job take longer


@functools.cache
def namespace():
    """The prefix of a command that runs it with a loopback interface only."""
    for flags in ("-n", "-rn"):
        prefix = ["unshare", flags, "bash", "-c", 'ip link set lo up && exec "$0" "$@"']
        try:
            if subprocess.run([*prefix, "true"], capture_output=True).returncode == 0:
                return prefix
        except OSError:
            break
    pytest.skip("needs a network namespace (unshare -n or unshare -rn), since Ray listens on all interfaces")


class Python:
    """`python *words` in its own network namespace; the output is in the file `printed.txt` of `cwd`."""

    def __init__(self, cwd, *words):
        self.printed = cwd / "printed.txt"
        with open(self.printed, "a") as out:
            argv = [*namespace(), sys.executable, *words]
            self.process = subprocess.Popen(argv, cwd=cwd, stdout=out, stderr=out, start_new_session=True)
        self.network = ""
        self.wait_for(self._is_apart, 20)

    def _is_apart(self):
        found = os.readlink(f"/proc/{self.process.pid}/ns/net")
        if found != os.readlink("/proc/self/ns/net"):
            self.network = found
        return bool(self.network)

    def wait_for(self, condition, seconds=120):
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.printed.read_text()
            assert time.monotonic() < deadline, self.printed.read_text()
            time.sleep(0.05)

    def others(self):
        """Command lines of the other processes in its namespace by process id."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if int(folder.name) != self.process.pid and os.readlink(folder / "ns/net") == self.network:
                    found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
            except OSError:
                pass
        return found

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """Check that all processes it started end within a few seconds."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)
        deadline = time.monotonic() + 30
        while (left := self.others()) and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left


@pytest.mark.slow
def test_a_sweep_survives_killed_workers_and_stops_with_everything_saved(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    words = ["-m", "rlox_cli.main", "train", *WORDS, *OWN, "seed=0,1", "hydra/launcher=ray", "hydra.launcher.n_jobs=2"]
    folders = [tmp_path / f"sweep/{seed}-ppo-CartPole-v1-s{seed}" for seed in (0, 1)]
    saved = [folder / "checkpoints/last.safetensors" for folder in folders]

    def progress():
        return [job.scan() for job in Sweep.read(tmp_path / "sweep").progress.values()]

    with Python(tmp_path, *words) as sweep:
        sweep.wait_for(lambda: all(path.exists() for path in saved))
        workers = {int((folder / "run.lock").read_text()) for folder in folders}
        assert len(workers & sweep.others().keys()) == 2
        os.kill(int((folders[0] / "run.lock").read_text()), signal.SIGKILL)
        # The other job continues; the killed job is retried from its checkpoint.
        sweep.wait_for(lambda: [(job.state, job.attempts) for job in progress()] == [("running", 2), ("finished", 1)])
        os.killpg(sweep.process.pid, signal.SIGINT)
        assert sweep.process.wait(60) == 130
    printed = sweep.printed.read_text()
    assert "Ray lost the job: The worker died unexpectedly" in printed
    assert "Resume with: rlox sweep resume sweep" in printed
    assert Counter(job.state for job in progress()) == {"interrupted": 1, "finished": 1}
    assert "resuming" in (folders[0] / "out.txt").read_text()
    done = forked.run("sweep", "resume", "sweep", "--import", "slow", "hydra/launcher=basic", cwd=tmp_path)
    assert "2 of 2 jobs are finished" in done.stdout, done.stderr
    words = [*WORDS[1:], *OWN, "seed=0", "output_dir=alone"]
    done = forked.run("train", *[word for word in words if not word.startswith("hydra.")], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert outcome(folders[0]) == outcome(tmp_path / "alone")


@pytest.mark.slow
def test_errors_of_the_launcher(command, tmp_path, monkeypatch):
    def refused(*words):
        code, _, error = command("train", *WORDS, "hydra/launcher=ray", *words)
        assert code == 2
        return " ".join(error.split())

    assert "hydra.launcher.num_cpus must be >= 0 and finite, got -1" in refused("hydra.launcher.num_cpus=-1")
    assert "hydra.launcher.n_jobs must be -1 or >= 1, got 0" in refused("hydra.launcher.n_jobs=0")
    monkeypatch.setitem(sys.modules, "ray", None)
    assert 'try: pip install "rlox-cli[ray]"' in refused()
    assert not (tmp_path / "sweep").exists()
    code, _, error = command("train", "algo=impala", "algo.actors=ray", "tuned=off")
    assert code == 2
    assert 'algo.actors=ray needs Ray, which is not installed; try: pip install "rlox-cli[ray]"' in " ".join(
        error.split()
    )
    code, _, error = command("train", "algo=ppo", "ray.num_cpus=2")
    assert code == 2
    assert "ray.num_cpus must be left out unless actors run on Ray, got 2.0" in " ".join(error.split())


@pytest.mark.slow
def test_actors_on_a_cluster_train_as_threads_and_survive_killed_processes_and_nodes(tmp_path):
    with Python(tmp_path, str(Path(__file__).with_name("on_ray.py"))) as program:
        code = program.process.wait(400)
    assert code == 0, program.printed.read_text()
