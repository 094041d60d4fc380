"""Every path that a command will write to is checked in one place, before anything runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlox_cli.terminal.errors import UsageError
from rlox_cli.terminal.paths import output_path

SMALL = ["logger=none", "total_timesteps=64", "algo.n_steps=8", "eval.n_episodes=1", "eval.n_points=1"]
# Each command with a path option: a function of the path, and the ending that a file must have (None: a folder).
WRITERS = {
    "eval --video": (lambda path: ["eval", "absent", "--video", path], ".gif"),
    "eval --predictions": (lambda path: ["eval", "absent", "--predictions", path], ".png"),
    "collect --out": (lambda path: ["collect", "--env", "CartPole-v1", "--steps", "9", "--out", path], ".arrow"),
    "plot --out": (lambda path: ["plot", "absent", "--out", path], ".png"),
    "cp": (lambda path: ["cp", "algo/ppo", path], None),
    "bench data --out": (lambda path: ["bench", "data", "--only", "gae", "--out", path], None),
    "bench train --out": (lambda path: ["bench", "train", "ppo", "--out", path], None),
    "bench learn --out": (lambda path: ["bench", "learn", "--out", path], None),
    "bench learn --runs": (lambda path: ["bench", "learn", "--runs", path], None),
    "train output_dir=": (lambda path: ["train", *SMALL, f"output_dir={path}"], None),
    "train output_dir=''": (lambda path: ["train", *SMALL, f"output_dir='{path}'"], None),
    "train hydra.run.dir=": (lambda path: ["train", *SMALL, f"hydra.run.dir={path}"], None),
    "train --check": (lambda path: ["train", "--check", *SMALL, f"output_dir={path}"], None),
    "train -m": (lambda path: ["train", "-m", "seed=0,1", *SMALL, f"output_dir={path}"], None),
    "train -m hydra.sweep.dir=": (lambda path: ["train", "-m", "seed=0,1", *SMALL, f"hydra.sweep.dir={path}"], None),
}
# What no command may write: the beginning of the path, the exit code and the message.
BAD = {
    "root": (f"{os.sep}no-such-folder-of-rlox/a", 2, "must be in a folder that exists"),
    "user": ("~no-such-user-of-rlox/a", 2, "must begin with a user who exists"),
    "line": ("a\nb", 2, "must contain no line break or other control character"),
    "bell": ("a\ab", 2, "must contain no line break or other control character"),
    "file": ("file/a", 2, "must be in a folder, got "),
    "long": (256 * "x", 2, "of at most 255 bytes, got xxx"),
    "system": ("/proc/a", 1, "cannot be written: /proc takes no files"),
}


def refuse(writer, bad, command, tmp_path):
    (build, ending), (begin, code, says) = WRITERS[writer], BAD[bad]
    (tmp_path / "file").touch()
    before, root = sorted(tmp_path.rglob("*")), sorted(os.listdir("/"))
    got, _, err = command(*build(begin + (ending or "")))
    assert (got, says in err) == (code, True), err
    assert err.startswith("rlox ")
    assert err.count("\n") <= 2
    assert sorted(tmp_path.rglob("*")) == before
    assert sorted(os.listdir("/")) == root


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize(("writer", "bad"), [(w, list(BAD)[i % len(BAD)]) for i, w in enumerate(WRITERS)])
def test_a_path_that_no_command_may_write_is_an_error(writer, bad, command, tmp_path):
    refuse(writer, bad, command, tmp_path)


# Keys of the configuration that name files outside of the run's folder.
KEYS = {
    "buffer.folder": ["algo=dqn", "buffer=mmap", "logger=none", "buffer.folder='{}'"],
    "logger.mlflow.tracking_uri": ["logger.mlflow.tracking_uri='sqlite:///{}'"],
    "hydra.sweeper.storage": ["-m", "hydra/sweeper=optuna", "hydra.sweeper.storage='sqlite:///{}'"],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "bad", ["root", "user", *(pytest.param(b, marks=pytest.mark.exhaustive) for b in ("line", "file"))]
)
@pytest.mark.parametrize("key", KEYS)
def test_a_path_in_a_key_is_checked_before_training(key, bad, command, tmp_path):
    WRITERS[key] = (lambda path: ["train", *(word.format(path) for word in KEYS[key])], "")
    refuse(key, bad, command, tmp_path)


@pytest.mark.slow
def test_home_is_expanded_in_keys(command, tmp_path, monkeypatch):
    """A shell expands no ``~`` after a key with dots or in quotes, and some shells after no ``=``."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    mmap = ["buffer=mmap", "buffer.size=99", "algo.learning_starts=8", "buffer.folder='~/memory'"]
    for words in (
        ["train", *SMALL, "output_dir=~/run", "logger=mlflow", "logger.mlflow.tracking_uri='sqlite:///~/a.db'"],
        ["train", "resume=~/run", "total_timesteps=128", "--check"],
        ["collect", "a=~/run", "--steps", "64", "--out", "~/data.arrow"],
        ["train", *SMALL, "init_from='~/run/checkpoints/last.safetensors'", "--check"],
        ["train", "algo=bc", "dataset='~/data.arrow'", "logger=none", "total_timesteps=8", "--check"],
        ["train", "algo=dqn", *mmap, "total_timesteps=64", "logger=none", "eval.n_points=1", "eval.n_episodes=1"],
    ):
        code, _, err = command(*words)
        assert not code, err
    assert (home / "a.db").is_file()
    assert any((home / "memory").iterdir())
    assert not (tmp_path / "~").exists()
    for key in ("logger.tensorboard.folder='~/x'", "init_from=~/x", "resume=~no-such-user-of-rlox/x"):
        code, _, err = command("train", *SMALL[1:], *(["logger=tensorboard"] if "tensorboard" in key else []), key)
        assert (code, key.split("=")[0] in err) == (2, True), err


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("writer", WRITERS)
def test_every_writer_refuses_every_such_path(writer, bad, command, tmp_path):
    refuse(writer, bad, command, tmp_path)


def test_paths_that_may_be_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("a", "a/b/c", "./~odd", "a b,[c]", "it's", "папка/x", 255 * "x"):
        assert output_path("--out", name) == Path(name)
        assert output_path("--out", name, folder=True) == Path(name)
    assert output_path("--out", "~/x.png") == tmp_path / "x.png"
    assert not list(tmp_path.iterdir())


def test_something_of_another_kind_is_not_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("file").touch()
    os.mkfifo("pipe")  # opening it would wait for a reader
    Path("link").symlink_to("absent")
    for name, folder, says in (
        ("folder", False, "--out must be a file, but there is a folder of this name, got folder"),
        ("file", True, "--out must be a folder, got the file file"),
        ("pipe", False, "--out must be a regular file, got pipe"),
        ("link", True, "--out must not be a link to something that does not exist, got link"),
    ):
        with pytest.raises(UsageError, match=says):
            output_path("--out", name, folder)


@pytest.mark.slow
def test_the_destination_of_a_dataset_hides_no_other_mistake(command, tmp_path):
    (tmp_path / "data.arrow").touch()  # the default destination
    for words, says in (
        (["--env", "CartPole-v9", "--steps", "9"], "env=CartPole-v9 is no environment"),
        (["absent", "--steps", "9"], "no file absent"),
        (["--env", "CartPole-v1"], "--steps must be given"),
        (["--env", "CartPole-v1", "--steps", "9", "--mix", "x"], "--mix must be NAME:SHARE"),
        (["--env", "CartPole-v1", "--steps", "9"], "--out data.arrow: this file already exists"),
    ):
        code, _, err = command("collect", *words)
        assert (code, says in err) == (2, True), err


@pytest.mark.slow
def test_a_folder_in_another_script_and_a_locale_without_it(tmp_path):
    here = tmp_path / "папка"
    here.mkdir()
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0"}  # Python reads the names of files as ASCII
    words = [sys.executable, "-m", "rlox_cli.main", "collect", "--env", "CartPole-v1", "--steps", "9", "--out"]
    done = subprocess.run([*words, here / "é.npz"], cwd=here, env=environment, capture_output=True, timeout=300)
    assert not done.returncode, done.stderr
    assert done.stdout.isascii()
    assert [path.name for path in here.iterdir()] == ["é.npz"]
