"""What ``rlox new`` writes passes its own test, is tidy, and trains by the commands of its README."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import forked
import pytest

from rlox_cli.new.algorithm import choices

SMALL = ["total_timesteps=512", "eval.n_points=1", "eval.n_episodes=2", "logger=none"]
CASES = {
    "env": (["env", "my_task"], ["--import", "my_task", "env=MyTask-v0"]),
    "experiment": (
        ["experiment", "my_study", "--algo", "dqn", "--env", "CartPole-v1"],
        ["-cd", "conf", "experiment=my_study", "algo.learning_starts=100"],
    ),
    "preset": (
        ["experiment", "my_study", "--algo", "tqc", "--env", "Pendulum-v1"],
        ["-cd", "conf", "experiment=my_study", "algo.learning_starts=400"],
    ),
    "ppo": (["algorithm", "my_ppo"], ["--import", "my_ppo", "algo=my_ppo", "env=CartPole-v1"]),
    "sac": (
        ["algorithm", "my_sac", "--like", "sac"],
        ["--import", "my_sac", "algo=my_sac", "env=Pendulum-v1", "algo.learning_starts=400"],
    ),
}
OTHERS = [name for name in choices() if name not in CASES]


def make(tmp_path, *words):
    done = forked.run("new", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return tmp_path / words[1]


def run_its_tests(folder):
    env = {**os.environ, "PYTHONPATH": str(folder)}
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", folder, folder]
    done = subprocess.run(words, capture_output=True, text=True, cwd=folder, env=env, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"[2-9] passed", done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
def test_a_new_package_passes_its_test_and_trains(tmp_path, kind):
    words, training = CASES[kind]
    folder = make(tmp_path, *words)
    run_its_tests(folder)
    done = forked.run("train", *training, *SMALL, "output_dir=run", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert (folder / "run" / "checkpoints" / "last.safetensors").is_file()
    if words[0] == "algorithm":  # in a process of its own, which knows it only by --import
        resumed = [sys.executable, "-m", "rlox", "train", *training[:2], "resume=run", "total_timesteps=2048"]
        done = subprocess.run(resumed, capture_output=True, text=True, cwd=folder, check=False)
        assert done.returncode == 0, done.stderr
        assert "resuming run at step " in done.stdout
        done = subprocess.run([*resumed[:4], "resume=run"], capture_output=True, text=True, cwd=folder, check=False)
        assert done.returncode == 2
        assert f"add --import {training[1]}" in " ".join(done.stderr.split())


@pytest.mark.slow
@pytest.mark.parametrize("like", OTHERS)
def test_every_algorithm_can_be_copied(tmp_path, like):
    """Its own test compares the copy with the original, bit for bit."""
    run_its_tests(make(tmp_path, "algorithm", f"my_{like}", "--like", like))


@pytest.mark.parametrize("words", [case for case, _ in CASES.values()], ids=CASES)
def test_new_code_is_tidy(tmp_path, words):
    folder = make(tmp_path, *words)
    texts = {path.name: path.read_text() for path in folder.rglob("*") if path.suffix in (".py", ".md", ".toml")}
    assert {"README.md", f"test_{words[1]}.py"} <= texts.keys()
    for name, text in texts.items():
        assert max(map(len, text.splitlines())) <= 120, name
        assert text.endswith("\n") and not text.endswith("\n\n"), name  # noqa: PT018
    if (ruff := shutil.which("ruff") or shutil.which("ruff", path=str(Path(sys.executable).parent))) is not None:
        check = [ruff, "check", "--isolated", "--line-length", "120", "--select", "B,E,F,I,UP,W", "."]
        done = subprocess.run(check, capture_output=True, text=True, cwd=folder, check=False)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("algo", "env"), [("dqn", "CartPole-v1"), ("td3", "Pendulum-v1"), ("xqc", "Pendulum-v1")])
def test_an_experiment_has_an_environment_with_actions_of_its_algorithm(tmp_path, algo, env):
    done = forked.run("new", "experiment", "mine", "--algo", algo, "--folder", "my study", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"override /env: {env}" in (tmp_path / "my study/conf/experiment/mine.yaml").read_text()
    assert "cd 'my study' && pytest" in done.stdout


def test_one_line_changes_a_loss(tmp_path):
    """The claim: to change PPO's loss, a researcher writes one command and edits one line."""
    folder = make(tmp_path, "algorithm", "bold_ppo")
    path = folder / "bold_ppo.py"
    text = path.read_text()
    line = "    loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()\n"
    assert text.count(line) == 1
    path.write_text(text.replace(line, "    loss = -(ratio * advantages).mean()\n"))
    results = []
    for algo, module in (("bold_ppo", ["--import", "bold_ppo"]), ("ppo", [])):
        words = [*module, f"algo={algo}", "env=CartPole-v1", "backend=torch", "tuned=off", *SMALL, f"output_dir={algo}"]
        words += ["algo.n_steps=32", "algo.learning_rate=0.01"]
        done = forked.run("train", *words, cwd=folder)
        assert done.returncode == 0, done.stderr
        results.append((folder / algo / "checkpoints" / "last.safetensors").read_bytes()[-4000:])
    assert results[0] != results[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["algorithm", "ppo"], "there is an algorithm ppo"),
        (["algorithm", "torch"], "Python can import 'torch' already"),
        (["algorithm", "My-PPO"], "must be a name for a Python module"),
        (["algorithm", "class"], "must be a name for a Python module"),
        (["algorithm", "mine", "--like", "sca"], "did you mean 'sac'?"),
        (["algorithm", "mine", "--like", "grpo"], "--like must be one of"),
        (["experiment", "mine", "--algo", "bc"], "which learns from a dataset"),
        (["experiment", "mine", "--algo", "croq"], "did you mean 'crossq'?"),
        (["algorithm", "entry"], "NAME must not give the class Entry, since the file needs another Entry"),
        (["algorithm", "s_a_c", "--like", "sac"], "NAME must not give the class SAC"),
        (["experiment", "mine", "--env", "NoSuchEnv"], "env=NoSuchEnv does not exist"),
        (["experiment", "mine", "--algo", "td3", "--env", "CartPole-v1"], "actions must be continuous"),
        (["env", "grid_world"], "NAME must give a new id, but there is an environment GridWorld-v0"),
        (["env", "grid_pursuit"], "there is an environment GridPursuit-v0"),
        (["env", "cart_pole"], "there is an environment CartPole-v0"),
        (["env", "there"], "must not exist yet"),
    ],
)
def test_a_wrong_name_writes_nothing(tmp_path, words, message):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    done = forked.run("new", *words, cwd=tmp_path)
    assert done.returncode == 2, done.stdout
    assert message in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"there"}
