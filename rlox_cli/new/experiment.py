"""``rlox new experiment``: an experiment in a folder for ``-cd``, with a test that it trains as it is written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

import yaml

from rlox.algorithms import entry_of, resolve
from rlox.config import tuned, tuned_pairs
from rlox_cli.config.compose import compose_jobs
from rlox_cli.config.presets import choice_names, config_of, nearest_choice, read_presets
from rlox_cli.config.shipped import SCHEMA_FOLDER, read_schema
from rlox_cli.families.family import family_of
from rlox_cli.new.files import check_name, write_package
from rlox_cli.terminal.errors import UsageError

_EXPERIMENT = """# @package _global_
# {title}: what is compared, and which result would change your mind.
# yaml-language-server: $schema=../schema/run.json
defaults:
  - override /algo: {algo}
  - override /env: {env}
  - _self_
{settings}"""

_TEST = '''"""The experiment trains as it is written. Run this with `pytest`."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SMALL = ["total_timesteps={steps}", "eval.n_points=1", "eval.n_episodes=1", "logger=none"{small}]


def rlox(*words, cwd):
    return subprocess.run([sys.executable, "-m", "rlox", *map(str, words)], cwd=cwd, capture_output=True, text=True)


def test_the_experiment_trains(tmp_path):
    done = rlox("train", "-cd", HERE / "conf", "experiment={name}", "output_dir=run", *SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "checkpoints" / "last.safetensors").is_file()


def test_its_settings_reach_the_run(tmp_path):
    done = rlox("train", "-cd", HERE / "conf", "experiment={name}", "--cfg", "job", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "total_timesteps: {total}" in done.stdout
'''

_README = """# {title}

The experiment is `conf/experiment/{name}.yaml`. Editors with a YAML language server complete and check its keys.

    pytest                                                        # it trains as it is written
    rlox train -cd conf experiment={name} --check                 # problems, time, memory, disk
    rlox train -cd conf -m experiment={name} 'seed=range(5)' hydra.sweep.dir=runs/{name}
    rlox plot runs/{name}

One change at a time, on the same seeds, and a verdict over both:

    rlox train -cd conf -m experiment={name} 'seed=range(5)' algo.gamma=0.98 hydra.sweep.dir=runs/changed
    rlox compare runs/{name} runs/changed

Put what must stay fixed into the YAML, and what varies on the command line. Results are in the runs' own folders; keep
`conf/` and the commands in version control.
"""


def make_experiment(name: str, algo: str, env: str | None, folder: Path | None) -> None:
    """Write a folder with the experiment `name` for an algorithm and an environment.

    By default this is CartPole-v1, or Pendulum-v1 if the algorithm needs continuous actions.

    Raises
    ------
    UsageError
        If there is no such algorithm or preset, it needs a dataset or a language model, or the two do not fit.
    """
    check_name(name)
    config = config_of(algo)
    if config is None:
        raise UsageError(f"--algo={algo} does not exist; {nearest_choice(algo, choice_names())}")
    if config.uses_dataset in ("must", "text"):
        raise UsageError(
            f"--algo must learn in an environment, got {algo}, which learns from a dataset; `rlox cp "
            "experiment/grpo-copy` copies an experiment with one"
        )
    if env is None:
        kinds = resolve((entry_of(algo) or entry_of(read_presets()[algo])).cls).actions
        env = "CartPole-v1" if "discrete" in kinds else "Pendulum-v1"
    (job,) = compose_jobs([], [f"algo={algo}", f"env={env}"])
    run = replace(job.config, env=replace(job.config.env, n_envs=1, workers=0))
    family_of(run.algo, env).build(resolve(entry_of(job.algo).cls), run, Path()).close()
    folder = Path(name) if folder is None else folder
    commands = [
        ("change", f"{folder}/conf/experiment/{name}.yaml"),
        ("test", f"cd {quote(str(folder))} && pytest"),
        ("train", f"cd {quote(str(folder))} && rlox train -cd conf experiment={name}"),
    ]
    write_package(folder, texts_of(name, algo, env), commands)


def texts_of(name: str, algo: str, env: str) -> dict[str, str]:
    """Return the files of the folder. Its settings are the tuned ones, if there are any, as a starting point."""
    title = name.replace("_", " ").capitalize()
    known = (algo, env) in tuned_pairs()
    settings: dict[str, Any] = tuned(algo, env) if known else {"total_timesteps": 100_000}
    settings.pop("reference", None)
    learning = hasattr(config_of(algo), "learning_starts")
    small = ', "algo.learning_starts=100"' if learning else ""
    text = yaml.safe_dump(settings, sort_keys=False, default_flow_style=False)
    values = {
        **{"name": name, "title": title, "algo": algo, "env": env, "settings": text, "steps": 300},
        **{"small": small, "total": settings["total_timesteps"]},
    }
    return {
        f"conf/experiment/{name}.yaml": _EXPERIMENT.format(**values),
        f"conf/{SCHEMA_FOLDER}/run.json": read_schema(f"{SCHEMA_FOLDER}/run.json"),
        f"test_{name}.py": _TEST.format(**values),
        "README.md": _README.format(**values),
    }
