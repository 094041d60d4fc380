"""`rlox train -m hydra/sweeper=optuna`: ranges from the fields' metadata, and studies that survive what kills them."""

import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import optuna
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.trial import TrialState

from rlox import config as configs
from rlox.algorithms import ALGORITHMS, resolve
from rlox.config import Config
from rlox_cli.compose import compose_jobs, compose_sweep
from rlox_cli.errors import UsageError
from rlox_cli.sweep.search import read_search

# How many searches are killed and go on, of each kind; a soak sets it.
ROUNDS = int(os.environ.get("RLOX_SEARCH_ROUNDS", "1"))
OPTUNA = ["-m", "hydra/sweeper=optuna"]
# Runs of about a second.
SHORT = [
    *("algo=ppo", "env=CartPole-v1", "tuned=off", "logger=none", "env.n_envs=4", "algo.hidden_sizes=[16]"),
    *("eval.n_points=4", "eval.n_episodes=2", "total_timesteps=2048", "algo.batch_size=64"),
]
RATE = "algo.learning_rate=tag(log,interval(1e-4,1e-2))"


def rlox(folder, *arguments, ok=True):
    """What the command prints on both streams."""
    command = [sys.executable, "-m", "rlox_cli.main", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert (done.returncode == 0) is ok, done.stdout + done.stderr
    return done.stdout + done.stderr


def search(folder, *arguments, ok=True):
    return rlox(folder, "train", *OPTUNA, "hydra.sweep.dir=s", *SHORT, *arguments, ok=ok)


def trials(folder, path="s/study.db"):
    return optuna.load_study(study_name="rlox", storage=f"sqlite:///{folder / path}").trials


def record(folder, trial):
    (run,) = folder.glob(f"s/{trial}-*")
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


CONFIGS = [
    *(resolve(entry.config) for entry in ALGORITHMS.values()),
    *(kind for kind in vars(configs).values() if isinstance(kind, type) and issubclass(kind, configs.BufferConfig)),
]


def spaces(kind):
    """The ranges of a configuration class, by field, as the sweeper reads them."""
    cfg = compose_sweep(OPTUNA, ["hydra/sweeper=optuna", RATE, *SHORT])[0]
    ranges = {item.name: item.metadata["search"] for item in fields(kind) if "search" in item.metadata}
    read = read_search([f"algo.{name}={text}" for name, text in ranges.items()], cfg) if ranges else None
    return {space.key.removeprefix("algo."): space for space in read.spaces} if ranges else {}


@pytest.mark.parametrize("kind", CONFIGS, ids=lambda kind: kind.__name__)
def test_every_value_of_a_range_obeys_the_rules_of_its_field(kind):
    ranges = spaces(kind)
    numbers = {
        name: st.sampled_from(space.choices)
        if space.choices
        else st.integers(space.low, space.high)
        if isinstance(space.low, int)
        else st.floats(space.low, space.high)
        for name, space in ranges.items()
    }
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create()

    @settings(max_examples=30, deadline=None)
    @given(st.fixed_dictionaries(numbers))
    def obeys(values):
        kind(**{name: parser.parse_override(f"x={value}").value() for name, value in values.items()})

    obeys()


@pytest.mark.parametrize("kind", CONFIGS, ids=lambda kind: kind.__name__)
def test_a_default_that_is_restated_does_not_lose_its_range(kind):
    mine = {item.name for item in fields(kind) if "search" in item.metadata}
    for base in kind.__mro__[1:]:
        if base is not Config and hasattr(base, "__dataclass_fields__"):
            for item in fields(base):
                assert "search" not in item.metadata or item.name in mine, (kind, item.name)
