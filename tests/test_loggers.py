"""Loggers of other packages: found by their entry point, configured, filled, resumed and explained."""

import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path

import forked
import pytest

from rlox.envs import registry
from rlox.tracking.loggers import logger_class, logger_config, logger_settings

ROOT = Path(__file__).parents[1]
SMALL = ["env=CartPole-v1", "total_timesteps=1024", "eval.n_points=1", "eval.n_episodes=2", "tuned=off"]
# A logger that writes a file of lines, as small as the interface allows.
TALLY = '''
from dataclasses import dataclass
from pathlib import Path

from rlox.config import Config


@dataclass
class TallyConfig(Config):
    """Lines of text."""

    file: str = "tally.txt"  # name of the file in the run folder
    every: int = 1  # rows per line

    def rules(self):
        yield "every", self.every >= 1, "be >= 1"


class Tally:
    Config = TallyConfig

    @staticmethod
    def store(settings, run):
        return run / "mirrors" / "tally.store"

    def __init__(self, settings):
        self.settings = settings

    def open(self, job):
        job.state.url = str(job.run / job.settings["file"])
        return Lines(Path(job.state.url), job.config)


class Lines:
    uploads_while_alive = False

    def __init__(self, path, config):
        self.path = path
        path.write_text(f"algorithm {config['algo']['name']}\\n")

    def write(self, line):
        with open(self.path, "a") as file:
            file.write(f"{line}\\n")

    def send(self, rows):
        for row in rows:
            self.write(f"step {row['step']}")

    def upload(self, kind, path):
        self.write(f"checkpoint {kind}")

    def finish(self, status, message, ended):
        self.write(status)
'''


def install(folder, module, text, entry):
    """Write a package as pip leaves it: a module, and metadata with its entry point."""
    folder.mkdir(exist_ok=True)
    (folder / f"{module}.py").write_text(text)
    about = folder / f"{module}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[rlox.loggers]\n{entry}\n")
    return {**os.environ, "PYTHONPATH": str(folder)}


@pytest.fixture
def tally(tmp_path):
    return install(tmp_path / "site", "tally_logger", TALLY, "tally = tally_logger:Tally")


@pytest.mark.slow
def test_a_logger_of_another_package_is_filled(tmp_path, tally):
    words = ["train", *SMALL, "logger=tally", "logger.tally.file=mine.txt", "output_dir=run"]
    done = forked.run(*words, cwd=tmp_path, env=tally)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "run" / "mine.txt").read_text().splitlines()
    assert lines[0] == "algorithm ppo"
    assert "step 1024" in lines
    assert "checkpoint best" in lines
    assert lines[-1] == "finished"
    assert "mine.txt" in done.stdout  # where it is
    assert "tally complete" in forked.run("sync", "run", cwd=tmp_path, env=tally).stdout
    # The run knows its logger, also when it goes on.
    more = forked.run("train", "resume=run", "total_timesteps=2048", cwd=tmp_path, env=tally)
    assert more.returncode == 0, more.stderr
    assert "step 2048" in (tmp_path / "run" / "mine.txt").read_text()


@pytest.mark.slow
def test_a_logger_without_settings_is_filled(tmp_path):
    text = TALLY.replace("    Config = TallyConfig\n", "").replace('job.settings["file"]', '"plain.txt"')
    env = install(tmp_path / "site", "plain_logger", text, "plain = plain_logger:Tally")
    done = forked.run("train", *SMALL, "logger=plain", "output_dir=run", cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "plain.txt").read_text().endswith("finished\n")


@pytest.mark.slow
def test_several_loggers_at_once_and_in_the_library(tmp_path, tally):
    done = forked.run("train", *SMALL, "logger=[csv,tally]", "output_dir=run", cwd=tmp_path, env=tally)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "metrics.csv").is_file()
    assert (tmp_path / "run" / "tally.txt").is_file()
    program = (
        "from rlox import PPO, tracking; PPO('CartPole-v1', n_steps=32, logger=['own', 'tally']).train(512);"
        "from pathlib import Path; tracking.wait(['own'], 60); print(Path('own/tally.txt').read_text())"
    ).replace("from rlox import PPO, tracking", "from rlox import PPO; from rlox import tracking")
    import subprocess

    out = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=tally, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    assert "finished" in out.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["logger=tally", "logger.tally.evry=2"], "logger.tally.evry is no key"),
        (["logger=tally", "logger.tally.every=0"], "logger.tally.every must be >= 1, got 0"),
        (["logger=tallly"], "did you mean 'tally'?"),
    ],
)
def test_its_settings_are_checked(tmp_path, tally, words, message):
    done = forked.run("train", *SMALL, *words, cwd=tmp_path, env=tally)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "outputs").exists()


def test_its_settings_are_explained(tmp_path, tally):
    done = forked.run("show", "logger.tally", cwd=tmp_path, env=tally)
    assert done.returncode == 0, done.stderr
    assert "logger.tally: Lines of text." in done.stdout
    assert "name of the file in the run folder" in done.stdout
    assert '"tally"' in forked.run("schema", "logger", cwd=tmp_path, env=tally).stdout


def test_without_its_package_a_run_says_what_is_missing(tmp_path, tally):
    done = forked.run("train", *SMALL, "logger=tally", "output_dir=run", cwd=tmp_path, env=tally)
    assert done.returncode == 0, done.stderr
    (tmp_path / "run" / "mirrors" / "tally.json").unlink()
    alone = forked.run("sync", "run", cwd=tmp_path)
    assert alone.returncode
    assert "got 'tally'" in alone.stdout
    assert "install the package that provides it" in alone.stdout


def test_a_logger_with_unsuitable_settings_is_refused(tmp_path, monkeypatch):
    text = TALLY.replace("Config = TallyConfig", "Config = dict")
    env = install(tmp_path / "site", "wrong_logger", text, "wrong = wrong_logger:Tally")
    monkeypatch.syspath_prepend(env["PYTHONPATH"])
    registry.offers.cache_clear()
    try:
        with pytest.raises(TypeError, match=r"the Config of wrong must derive from rlox.config.Config"):
            logger_settings("wrong")
        with pytest.raises(ValueError, match=r"logger must be one of csv, .*, wrong, got 'wrng'; did you mean"):
            logger_class("wrng")
    finally:
        monkeypatch.undo()
        registry.offers.cache_clear()
    assert logger_config().__module__ == "rlox.config.run"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="pip install trackio")
def test_the_example_fills_trackio(tmp_path):
    example = ROOT / "examples" / "trackio_logger"
    text = (example / "rlox_trackio.py").read_text()
    assert 'trackio = "rlox_trackio:TrackioMirror"' in (example / "pyproject.toml").read_text()
    env = install(tmp_path / "site", "rlox_trackio", text, "trackio = rlox_trackio:TrackioMirror")
    env["PYTHONPATH"] += os.pathsep + os.environ.get("PYTHONPATH", "")
    env["TRACKIO_DIR"] = str(tmp_path / "trackio")
    words = ["train", *SMALL, "logger=trackio", "logger.trackio.project=mine", "output_dir=run"]
    done = forked.run(*words, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr

    def rows():
        program = (
            "import json; from trackio.sqlite_storage import SQLiteStorage as s;"
            "print(json.dumps(s.get_logs('mine', 'run'), default=str))"
        )
        import subprocess

        out = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
        return json.loads(out.stdout.splitlines()[-1])

    first = rows()
    recorded = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    scores = [row["eval/mean_return"] for row in recorded if "eval/mean_return" in row]
    assert [row["eval/mean_return"] for row in first if "eval/mean_return" in row] == scores
    assert first[-1]["status"] == "finished"
    # A second writer, after the first was killed before it noted its progress, changes nothing.
    shutil.rmtree(tmp_path / "run" / "mirrors")
    assert forked.run("sync", "run", cwd=tmp_path, env=env).returncode == 0
    assert len(rows()) == len(first)
