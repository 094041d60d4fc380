"""Commands that people expect from other tools: ``rlox env``, ``rlox enjoy``, ``rlox tune``."""

import json
import re
from importlib.util import find_spec

import forked
import pytest

import rlox
from rlox_cli.report import machine

SMALL = ["total_timesteps=512", "eval.n_points=1", "eval.n_episodes=2", "logger=none", "tuned=off"]


def test_env_names_what_a_report_needs(command, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("RLOX_API_TOKEN", "hidden-value")
    monkeypatch.setenv("MY_OWN_SETTING", "unrelated")
    code, out, _ = command("env", "--json")
    about = json.loads(out)
    assert not code
    assert about["rlox"]["version"] == rlox.__version__
    assert about["cpu"]["usable_cores"] >= 1
    assert about["packages"]["numpy"] == __import__("numpy").__version__
    assert about["torch"]["version"] == __import__("torch").__version__
    assert about["variables"]["OMP_NUM_THREADS"] == "3"
    assert "hidden-value" not in out
    assert "unrelated" not in out
    text = command("env")[1]
    assert f"rlox        {rlox.__version__}" in text
    assert re.search(r"^gpu  ", text, re.MULTILINE)
    assert "hidden-value" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_env_tells_nothing_about_the_user(command, monkeypatch, tmp_path):
    monkeypatch.setenv("RLOX_PULLED", str(tmp_path / "pulled"))
    out = command("env", "--json")[1] + command("env")[1]
    assert machine.platform.node() not in out or machine.platform.node() in machine.platform.platform()
    assert str(tmp_path) not in out
    assert machine.sys.prefix not in out


def test_env_works_without_what_it_looks_for(command, monkeypatch):
    """The command is for broken installations, too."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setitem(machine.sys.modules, "torch", None)  # cannot be imported
    code, out, err = command("env")
    assert not code, err
    assert re.search(r"^torch +cannot be imported: ", out, re.MULTILINE)
    assert re.search(r"^compiler +none$", out, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("pygame") is None, reason='pip install "rlox-cli[video]"')
def test_enjoy_shows_episodes(command, monkeypatch):
    command("train", "env=CartPole-v1", *SMALL, "output_dir=run")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    code, out, err = command("enjoy", "run", "--episodes", "2", "--max-steps", "30")
    assert not code, err
    assert re.findall(r"episode (\d): return [\d.]+, \d+ steps", out) == ["1", "2"]
    # The episodes are those of an evaluation with the same seed.
    score = json.loads(command("eval", "run", "--episodes", "2", "--max-steps", "30", "--json")[1])
    returns = [float(text) for text in re.findall(r"return ([\d.]+)", out)]
    assert sum(returns) / 2 == pytest.approx(score["mean_return"], abs=0.01)


def test_enjoy_needs_a_display_and_names_the_alternative(tmp_path):
    env = {name: value for name, value in forked.os.environ.items() if name not in ("DISPLAY", "SDL_VIDEODRIVER")}
    done = forked.run("enjoy", "somewhere", cwd=tmp_path, env=env)
    assert done.returncode == 2
    assert "rlox eval somewhere --video episode.mp4" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(find_spec("optuna") is None, reason='pip install "rlox-cli[optuna]"')
def test_tune_is_the_search(command):
    words = ["algo=a2c", "env=CartPole-v1", "--trials", "2", "--search", "learning_rate,gamma", "--seeds", "1"]
    code, out, err = command("tune", *words, "hydra.sweep.dir=found", *SMALL)
    assert not code, err
    assert "found" in out
    study = json.loads(command("sweep", "status", "found", "--json")[1])
    assert len(study) == 2
    assert all("learning_rate" in str(trial) and "gamma" in str(trial) for trial in study)
