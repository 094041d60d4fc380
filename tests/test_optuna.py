"""`rlox train -m hydra/sweeper=optuna`: ranges from the metadata of fields, and studies that survive kills."""

import contextlib
import json
import os
import random
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
import time
from dataclasses import fields

import forked
import optuna
import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.trial import TrialState
from test_sweep import ends, jobs, kill, outcomes, rlox

from rlox import config as configs
from rlox.algorithms import ALGORITHMS, resolve
from rlox.config import Config
from rlox.config.run import to_plain
from rlox_cli.config.compose import compose_jobs, compose_typed
from rlox_cli.config.ranges import read_search
from rlox_cli.records.ledger import Sweep
from rlox_cli.sweep.study_report import experiment_text
from rlox_cli.terminal.errors import UsageError

# Number of searches that are killed and resumed; long test runs set it.
ROUNDS = int(os.environ.get("RLOX_SEARCH_ROUNDS", "1"))
OPTUNA = ["-m", "hydra/sweeper=optuna"]
# Runs of about half a second with several checkpoints and four evaluations.
RUNS = ["algo=ppo", "env=CartPole-v1", "tuned=off", "logger=none", "env.n_envs=4", "algo.hidden_sizes=[16]"]
RUNS += ["eval.n_points=4", "eval.n_episodes=2", "total_timesteps=8192", "checkpoint.every_steps=1024"]
RATE = "algo.learning_rate=tag(log,interval(1e-4,1e-2))"
EIGHT = [*OPTUNA, *RUNS, RATE, "algo.gamma=0.9,0.99,0.999", "hydra.sweeper.n_trials=8", "hydra.sweep.dir=sweep"]
EIGHT += ["hydra.sweeper.n_startup_trials=3"]

JOBLIB = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "hydra.sweeper.n_jobs=2"]


def study(folder, path="sweep/study.db"):
    return optuna.load_study(study_name="rlox", storage=f"sqlite:///{folder / path}").trials


def ledger(folder):
    return list(Sweep.read(folder / "sweep").jobs.values())


def results(trials):
    """The contents of a study: parameters, states, results and evaluations of its trials, in order."""
    return [(t.number, t.params, t.state, t.value, t.intermediate_values) for t in trials]


CONFIGS = [
    *(resolve(entry.config) for entry in ALGORITHMS.values()),
    *(getattr(configs, name) for name in sorted(configs._EXPORTS) if name.endswith("BufferConfig")),
]
FIXED = {("SequenceBufferConfig", "n_step")}  # the rules allow only one value, so there is nothing to search


@pytest.fixture(scope="module")
def master():
    return compose_typed(["-m"], [*OPTUNA[1:], *RUNS, RATE])[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS, ids=lambda kind: kind.__name__)
def test_every_value_of_a_range_obeys_the_rules_of_its_field(kind, master):
    ranges = {item.name: item.metadata["search"] for item in fields(kind) if "search" in item.metadata}
    if not ranges:
        assert kind is configs.SequenceBufferConfig
        return
    spaces = read_search([f"algo.{name}={text}" for name, text in ranges.items()], master).spaces
    assert [space.key for space in spaces] == [f"algo.{name}" for name in ranges]
    values = [st.sampled_from(space.choices) if space.choices else st.floats(space.low, space.high) for space in spaces]
    parser = OverridesParser.create()

    def read(value):
        return parser.parse_override(f"x={value}").value() if isinstance(value, str) else value

    @settings(max_examples=30, deadline=None)
    @given(st.tuples(*values))
    def obeys(drawn):
        kind(**{name: read(value) for name, value in zip(ranges, drawn, strict=True)})

    obeys()


@pytest.mark.parametrize("kind", CONFIGS, ids=lambda kind: kind.__name__)
def test_a_redefined_default_keeps_its_range(kind):
    mine = {item.name for item in fields(kind) if "search" in item.metadata}
    for base in kind.__mro__[1:]:
        if base is not Config and hasattr(base, "__dataclass_fields__"):
            for item in fields(base):
                kept = "search" not in item.metadata or item.name in mine
                assert kept or (kind.__name__, item.name) in FIXED, (kind, item.name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "searched"),
    [
        (["hydra.sweeper.search=[gamma,algo.ent_coef]"], ["algo.gamma", "algo.ent_coef"]),
        (["hydra.sweeper.search=[gamma]", RATE], ["algo.learning_rate", "algo.gamma"]),
        (["experiment=mine", "algo.gamma=0.9,0.99"], ["env.n_envs", "algo.gamma"]),
        (["algo=td3", "env=Pendulum-v1", "buffer.n_step=1"], None),
    ],
)
def test_spaces_of_a_search(arguments, searched, tmp_path):
    text = "# @package _global_\nhydra: {sweeper: {params: {env.n_envs: 'range(2,9)', algo.gamma: '0.5,0.6'}}}\n"
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text(text)
    cfg, corners = compose_typed(["-m", "-cd", str(tmp_path)], [*OPTUNA[1:], "tuned=off", *arguments])
    found = read_search(arguments, cfg)
    everything = [f"algo.{item.name}" for item in fields(configs.TD3Config) if "search" in item.metadata]
    assert [space.key for space in found.spaces] == (searched or everything)
    assert all(set(found.fixed) < set(job.overrides) for job in corners if found.fixed)


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (["hydra.sweeper.search=[lerning_rate]"], r"got lerning_rate; did you mean 'learning_rate'"),
        (["hydra.sweeper.search=[ortho_init]"], r"got ortho_init; .*algo.ortho_init='interval\(LOW,HIGH\)'"),
        (["hydra.sweeper.search=[gamma]", "algo.gamma=0.9"], r"algo.gamma=0.9 must not be combined with"),
        (["seed=0,1,2"], r"seed must have one value in a search.*hydra.sweeper.n_seeds"),
        (["env=CartPole-v1,Acrobot-v1"], r"env must have one value"),
        (["algo.gamma=interval(0.9,0.8)"], r"algo.gamma must be a range from a lower number to a higher"),
        (["algo.ent_coef=tag(log,interval(0,1))"], r"algo.ent_coef must be .* above 0 for tag\(log"),
        (["algo.n_steps=tag(log,range(8,64))"], r"algo.n_steps must be tag\(log,interval\(LOW,HIGH\)\)"),
        (["algo.gamma=interval(0.9,1.5)"], r"algo.gamma must be in \[0, 1\], got 1.5"),
        (["hydra.sweeper.n_trials=0"], r"hydra.sweeper.n_trials must be >= 1, got 0"),
        (["hydra.sweeper.pruner=medain"], r"hydra.sweeper.pruner must be one of median, hyperband, none"),
        (["hydra.sweeper.n_trails=9"], r"n_trails.*n_trials"),
        (["algo=dqn", "algo.learning_starts=0,900000"], r"learning_starts must be below total_timesteps"),
        (
            ["algo.n_steps=32,64", "total_timesteps=${algo.n_steps}000"],
            r"total_timesteps must not depend on a searched key in a search, got \$\{algo.n_steps\}000; type its value",
        ),
        (
            ["algo.n_steps=32,64", "algo.batch_size=${.n_epochs}", "algo.n_epochs=${.n_steps}"],
            r"algo.batch_size must not depend on a searched key in a search, got \$\{.n_epochs\}; type its value",
        ),
        (
            ["algo.gamma=0.9,0.99", "hydra.sweeper.n_seeds=2", "total_timesteps=1${seed}000"],
            r"total_timesteps must not depend on the seed in a search, got 1\$\{seed\}000; type its value",
        ),
    ],
)
def test_invalid_searches_are_errors_before_anything_runs(arguments, reported):
    with pytest.raises(UsageError, match=reported):
        compose_jobs(["-m"], [*OPTUNA[1:], *arguments])


def test_a_reference_that_is_the_same_in_all_runs_is_allowed():
    words = ["algo.gamma=0.9,0.99", "algo.batch_size=${algo.n_steps}", "total_timesteps=1${seed}000"]
    assert len(compose_jobs(["-m"], [*OPTUNA[1:], *words])) == 2


@pytest.mark.slow
def test_values_may_refer_to_searched_ones(tmp_path):
    words = ["algo.n_steps=32,64", "algo.batch_size=${.n_steps}", "algo.gamma=interval(0.9,0.99)"]
    words += ["algo.gae_lambda=${algo.gamma}", "total_timesteps=1024", "eval.n_points=1", "hydra.sweep.dir=sweep"]
    rlox(tmp_path, "train", *OPTUNA, *RUNS, *words, "hydra.sweeper.n_trials=2")
    rlox(tmp_path, "sweep", "resume", "sweep", "hydra.sweeper.n_trials=4")
    algos = [job.config["algo"] for job in ledger(tmp_path)]
    assert len({algo["gamma"] for algo in algos}) == 4
    assert all(algo["batch_size"] == algo["n_steps"] and algo["gae_lambda"] == algo["gamma"] for algo in algos)
    best = compose_jobs(["-cd", str(tmp_path / "sweep")], ["experiment=best"])[0].config.algo
    assert (best.batch_size, best.gae_lambda) == (best.n_steps, best.gamma)


def test_a_range_of_decimal_fractions_ends_where_it_says():
    """A search and a sweep have the same numbers, as they are typed."""
    line = "algo.learning_rate=range(0.1,0.4,0.1)"
    (space,) = read_search([line], compose_typed(["-m"], OPTUNA[1:])[0]).spaces
    assert (space.low, space.high, space.step) == (0.1, 0.3, 0.1)
    assert [job.config.algo.learning_rate for job in compose_jobs(["-m"], [line])] == [0.1, 0.2, 0.3]
    assert [job.config.seed for job in compose_jobs(["-m"], ["seed=range(9,2,-3)"])] == [9, 6, 3]


def test_a_range_without_a_search_is_an_error():
    with pytest.raises(UsageError, match=r"algo.gamma=interval\(0.9,1.0\) must list its values, as algo.gamma=1,2"):
        compose_jobs(["-m"], ["algo=ppo", "algo.gamma=interval(0.9,1.0)"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A search of eight trials that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    rlox(folder, "train", *EIGHT)
    return folder


def killed(cwd, n, victim, *args):
    """Kill parts of the command soon after `n` runs have started; return whether it finished anyway.

    It counts runs instead of seconds, since most of the time passes before the first run, above all on a busy machine.
    """
    with open(cwd / "printed.txt", "a") as out:
        process = forked.Rlox(*args, cwd=cwd, stdout=out)
    while process.poll() is None and len(list(cwd.glob("sweep/*/metrics.jsonl"))) < n:
        time.sleep(0.005)
    time.sleep(random.expovariate(3))
    if process.poll() is None:
        kill(process, victim)
    return process.wait(120) == 0


@pytest.mark.slow
@pytest.mark.parametrize("round_", range(ROUNDS))
@pytest.mark.parametrize("launcher", [[], pytest.param(JOBLIB, marks=pytest.mark.exhaustive)], ids=["basic", "joblib"])
def test_a_search_killed_at_any_moment_runs_each_trial_once(launcher, round_, whole, tmp_path):
    if launcher:
        pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    kills, command = 0, ["train", *EIGHT, *launcher]
    for n in sorted(random.choices(range(9), k=random.choice([1, 2]))):
        done = killed(tmp_path, n, random.choice(["parent", "child", "both"]), *command)
        kills += 1
        if done:
            break
        if (tmp_path / "sweep/sweep.jsonl").exists():
            command = ["sweep", "resume", "sweep"]
    if not done:
        rlox(tmp_path, *command)
    trials, found = study(tmp_path), jobs(tmp_path)
    assert len(trials) == len(found) == 8
    assert [ends(run.folder)["finished"] for run in found] == [1] * 8
    assert max(run.attempts for run in found) <= 1 + kills
    for trial, run, job in zip(trials, found, ledger(tmp_path), strict=True):
        assert trial.value == run.last
        assert {f"{key}={value}" for key, value in trial.params.items()} < set(job.overrides)
        assert (trial.state is TrialState.PRUNED) == (run.step < 8192)
    if not launcher:  # trials run one after another, so each has the same information about earlier trials
        assert results(trials) == results(study(whole))
        assert outcomes(tmp_path) == outcomes(whole)


@pytest.mark.slow
def test_a_trial_killed_after_it_was_pruned_and_before_its_checkpoint_ends_at_the_same_step(whole, tmp_path):
    shutil.copytree(whole / "sweep", tmp_path / "sweep")
    number = max(trial.number for trial in study(whole) if trial.state is TrialState.PRUNED)
    run = jobs(tmp_path)[number].folder
    shutil.rmtree(run / "checkpoints")
    rows = [row for row in (run / "metrics.jsonl").read_text().splitlines() if '"event"' not in row or "start" in row]
    (run / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    with contextlib.closing(sqlite3.connect(tmp_path / "sweep/study.db")) as database, database:
        database.execute("UPDATE trials SET state = 'RUNNING', datetime_complete = NULL WHERE number = ?", (number,))
    assert ends(run)["finished"] == 0
    rlox(tmp_path, "sweep", "resume", "sweep")
    assert results(study(tmp_path)) == results(study(whole))
    assert outcomes(tmp_path) == outcomes(whole)


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 6])
def test_a_trial_killed_between_two_of_its_values_draws_the_others_as_before(number, whole, tmp_path):
    """The first trials draw their values one by one, the later ones together."""
    shutil.copytree(whole / "sweep", tmp_path / "sweep")
    for run in jobs(tmp_path)[number:]:
        shutil.rmtree(run.folder)
    records = (tmp_path / "sweep/sweep.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in records if json.loads(line).get("extra", {}).get("trial", -1) < number]
    (tmp_path / "sweep/sweep.jsonl").write_text("".join(kept))
    with contextlib.closing(sqlite3.connect(tmp_path / "sweep/study.db")) as database, database:
        trials = "(SELECT trial_id FROM trials WHERE number {})"
        for table in ("trial_params", "trial_values", "trial_intermediate_values", "trial_user_attributes"):
            database.execute(f"DELETE FROM {table} WHERE trial_id IN {trials.format('> ?')}", (number,))
        database.execute("DELETE FROM trials WHERE number > ?", (number,))
        database.execute("UPDATE trials SET state = 'RUNNING', datetime_complete = NULL WHERE number = ?", (number,))
        of_this = trials.format("= ?")
        for table in ("trial_values", "trial_intermediate_values"):
            database.execute(f"DELETE FROM {table} WHERE trial_id IN {of_this}", (number,))
        database.execute(f"DELETE FROM trial_user_attributes WHERE key = 'pruned' AND trial_id IN {of_this}", (number,))
        database.execute(
            f"DELETE FROM trial_params WHERE param_name = 'algo.gamma' AND trial_id IN {of_this}", (number,)
        )
    assert set(study(tmp_path)[number].params) == {"algo.learning_rate"}
    rlox(tmp_path, "sweep", "resume", "sweep")
    assert results(study(tmp_path)) == results(study(whole))


@pytest.mark.parametrize(
    "words",
    [
        ["algo=iql", "dataset=minari:D4RL/pen/human-v2", "env=Pendulum-v1", "algo.gamma=0.9"],
        [
            "algo=grpo",
            "dataset=rlox.llm.toy:copy_rows",
            "model=rlox.llm.toy:make_model",
            "reward=rlox.llm.toy:copy_reward",
        ],
        ["algo=td3", "env=Pendulum-v1", "buffer=prioritized", "algo.learning_starts=100", "tuned=off"],
    ],
)
def test_the_experiment_of_the_best_trial_is_its_job(words, tmp_path):
    (tmp_path / "experiment").mkdir()
    best = optuna.trial.create_trial(value=1.0)
    (tmp_path / "experiment/best.yaml").write_text(experiment_text([*words, "logger=none"], best))
    (filed,) = compose_jobs(["-cd", str(tmp_path)], ["experiment=best", "logger=none"])
    (typed,) = compose_jobs([], [*words, "logger=none"])
    assert (filed.config, filed.algo) == (typed.config, typed.algo)


@pytest.mark.slow
def test_a_search_prunes_bad_trials_prints_the_best_and_can_be_extended(tmp_path):
    """Trials with a useless learning rate are pruned; the experiment and the command are the best trial's job."""
    spaces = ["algo.learning_rate=1e-8,0.001", "algo.clip_eps=interval(0.1,0.4)"]
    pruning = ["hydra.sweeper.n_trials=9", "hydra.sweeper.n_startup_trials=9", "hydra.sweeper.seed=5"]
    printed = rlox(tmp_path, "train", *OPTUNA, *RUNS, *spaces, *pruning, "hydra.sweep.dir=sweep")
    trials, runs = study(tmp_path), jobs(tmp_path)
    assert len(trials) == 9
    assert all(0.1 <= trial.params["algo.clip_eps"] <= 0.4 for trial in trials)
    cut = [trial for trial in trials if trial.state is TrialState.PRUNED]
    # With this seed three of the first five trials learn; these five are never pruned.
    bad = [trial.number for trial in trials[5:] if trial.params["algo.learning_rate"] == "1e-08"]
    assert [trial.number for trial in cut] == bad != []
    for trial in cut:
        assert runs[trial.number].message.startswith("stopped early: pruned at evaluation")
        assert runs[trial.number].step < 8192
    best = max((t for t in trials if t.state is TrialState.COMPLETE), key=lambda t: t.value)
    (command,) = re.findall(r"train it +rlox train (.*)", printed)
    for flags, overrides in (
        (["-cd", str(tmp_path / "sweep")], ["experiment=best", "logger=none"]),
        ([], shlex.split(command)),
    ):
        (job,) = compose_jobs(flags, overrides)
        assert to_plain(job.config, job.algo) == ledger(tmp_path)[best.number].config
    assert (tmp_path / "sweep/study.png").read_bytes().startswith(b"\x89PNG")
    # As after a process that was killed right after it asked for a trial.
    optuna.load_study(study_name="rlox", storage=f"sqlite:///{tmp_path}/sweep/study.db").ask()
    printed = rlox(tmp_path, "sweep", "resume", "sweep", "hydra.sweeper.n_trials=11")
    assert [trial.state.is_finished() for trial in study(tmp_path)] == [True] * 11
    assert results(study(tmp_path)[:9]) == results(trials)
    assert {"trial 9 of 11", "trial 10 of 11"} == set(re.findall(r"trial \d+ of 11", printed))
    assert "11 of 11 trials have ended" in rlox(tmp_path, "sweep", "status", "sweep")


@pytest.mark.slow
def test_the_printed_command_has_the_folder_and_the_modules_that_were_typed(tmp_path):
    (tmp_path / "conf/experiment").mkdir(parents=True)
    (tmp_path / "conf/experiment/mine.yaml").write_text("# @package _global_\nalgo:\n  gamma: 0.97\n")
    (tmp_path / "nothing.py").touch()
    typed = ["-cd", "conf", "--import", "nothing", *OPTUNA, "experiment=mine", *RUNS, RATE, "hydra.sweeper.n_trials=1"]
    printed = rlox(tmp_path, "train", *typed, "hydra.sweep.dir=sweep")
    (command,) = re.findall(r"train it +(rlox train .*)", printed)
    assert command.startswith("rlox train -cd conf --import nothing ")
    assert "imports=" not in command
    assert "as a file" not in printed
    rlox(tmp_path, *shlex.split(command)[1:], "output_dir=again")
    assert yaml.safe_load((tmp_path / "again/config.yaml").read_text())["algo"]["gamma"] == 0.97


@pytest.mark.slow
def test_the_value_of_two_seeds_is_their_mean_and_another_sweep_extends_the_study(tmp_path):
    common = [*OPTUNA, *RUNS, RATE, "hydra.sweeper.n_seeds=2", "hydra.sweeper.storage=sqlite:///s.db", "seed=3"]
    rlox(tmp_path, "train", *common, "hydra.sweeper.n_trials=1", "hydra.sweep.dir=sweep")
    (trial,) = study(tmp_path, "s.db")
    runs = jobs(tmp_path)
    assert [job.overrides[-1] for job in ledger(tmp_path)] == ["seed=3", "seed=4"]
    assert trial.value == sum(run.last for run in runs) / 2
    rlox(tmp_path, "train", *common, "hydra.sweeper.n_trials=2", "hydra.sweep.dir=more")
    assert results(study(tmp_path, "s.db")[:1]) == results([trial])
    assert len(study(tmp_path, "s.db")) == 2
    assert len(list(tmp_path.glob("more/*/metrics.jsonl"))) == 2
    other = [*common, "hydra.sweeper.n_trials=3", "hydra.sweep.dir=other", "algo.gamma=0.5"]
    assert "for another study, add hydra.sweeper.study=NAME" in rlox(tmp_path, "train", *other, code=2)


@pytest.mark.slow
def test_diverged_trials_count_and_a_search_with_only_those_says_so(tmp_path):
    diverging = ["algo.learning_rate=1e37,1e38", "hydra.sweeper.n_trials=2", "hydra.sweep.dir=sweep"]
    printed = rlox(tmp_path, "train", *OPTUNA, *RUNS, *diverging, code=1)
    assert [trial.state for trial in study(tmp_path)] == [TrialState.FAIL] * 2
    assert "no trial has a value" in printed
    assert "became nan" in printed


@pytest.mark.slow
def test_a_trial_whose_environment_raises_fails_and_the_search_continues(tmp_path):
    lines = [
        "import gymnasium",
        "from gymnasium.envs.classic_control import CartPoleEnv",
        "class Fragile(CartPoleEnv):",
    ]
    lines += ["    def __init__(self, value):", "        super().__init__()", "        self.value = value"]
    lines += ["    def step(self, action):", "        if self.value == 2:", "            raise RuntimeError('no 2')"]
    lines += ["        return super().step(action)", "gymnasium.register('Fragile-v0', Fragile, max_episode_steps=50)"]
    (tmp_path / "fragile.py").write_text("\n".join(lines))
    words = [*OPTUNA, "--import", "fragile", *RUNS, "env=Fragile-v0", "total_timesteps=1024", "eval.n_points=1"]
    words += ["hydra.sweeper.seed=1", "hydra.sweeper.retries=1", "hydra.sweep.dir=sweep"]
    printed = rlox(tmp_path, "train", *words, "env.kwargs.value=choice(1,2)", "hydra.sweeper.n_trials=3")
    trials = study(tmp_path)
    assert {t.params["env.kwargs.value"]: t.state for t in trials} == {"1": TrialState.COMPLETE, "2": TrialState.FAIL}
    assert "no 2" in printed
    assert {run.attempts for run in jobs(tmp_path) if run.state == "failed"} == {2}  # the first try and one retry
    # An error of all trials is not the fault of their values: the search stops, and does not use up its trials.
    words[-1] = "hydra.sweep.dir=other"
    more = ["env.kwargs.value=2", RATE, "hydra.sweeper.n_trials=9"]
    printed = rlox(tmp_path, "train", *words, *more, code=1)
    assert "the last 3 trials failed with the same error: environment 0" in printed
    assert len(study(tmp_path, "other/study.db")) == 3


@pytest.mark.slow
def test_without_optuna_the_error_names_the_remedy(tmp_path):
    program = "import sys; sys.modules['optuna'] = None; from rlox_cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "train", *OPTUNA, *RUNS, RATE], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, not any(tmp_path.iterdir())) == (2, True)
    assert 'pip install "rlox-cli[optuna]"' in done.stderr
