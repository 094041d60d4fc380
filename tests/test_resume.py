"""`rlox train resume=`: a run that is killed and resumed ends with the same result as one that never stopped."""

import contextlib
import json
import os
import pathlib
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import time

import forked
import numpy as np
import pytest
import yaml
from run_results import outcome
from tracker_files import wandb_history

from rlox import PPO, OfflineDatasetBuffer, tracking
from rlox.callbacks import Callback, EvalCallback
from rlox.checkpoint import load_checkpoint
from rlox.offline.export import export
from rlox.tracking import durable_rows
from rlox_cli.commands.train import main
from rlox_cli.run.resume import main as resume
from rlox_cli.run.resume import prepare
from rlox_cli.terminal.console import TextConsole
from rlox_cli.terminal.errors import UsageError

pytestmark = pytest.mark.slow
EXHAUSTIVE = pytest.mark.exhaustive
# Number of repetitions of each pair of runs; long test runs set it: 5 rounds are 110 killed runs.
ROUNDS = int(os.environ.get("RLOX_RESUME_ROUNDS", "1"))

COMMON = ["tuned=off", "logger=none", "eval.n_points=3", "eval.n_episodes=1", "seed=3", "algo.hidden_sizes=[16]"]
OFF_POLICY = ["env.n_envs=2", "algo.batch_size=16", "algo.learning_starts=100"]
RUNS = {
    "ppo": ["env=CartPole-v1", "algo.n_steps=64"],
    "a2c": ["env=Pendulum-v1", "algo.gamma=0.9"],
    "dqn": ["env=CartPole-v1", *OFF_POLICY, "algo.target_update_freq=50"],
    "sac": ["env=Pendulum-v1", *OFF_POLICY],
    "td3": ["env=Pendulum-v1", *OFF_POLICY, "algo.learning_rate_schedule=linear"],
}
# Environment steps: long enough to be killed in the middle.
TOTAL = {(algo, "torch"): 10_000 if algo in ("ppo", "a2c") else 1_000 for algo in RUNS}
TOTAL |= {("ppo", "native"): 60_000, ("a2c", "native"): 100_000}
TOTAL |= {(algo, "native"): 10_000 for algo in ("dqn", "sac", "td3")}
# Additional features of each algorithm, whose state must be restored.
MORE = {
    "ppo": ["algo.learning_rate_schedule=linear", "algo.normalize_obs=true", "algo.normalize_rewards=true"],
    "dqn": ["buffer.n_step=3", "algo.dueling=true"],
}
BUFFERS = {
    "uniform": ["buffer.size=1000"],
    "prioritized": ["buffer.size=1000"],
    "mmap": ["buffer.size=1000", "buffer.hot_size=128"],
}
# Each algorithm, each memory and both backends of each family; all other combinations are marked exhaustive.
# tests/test_contract.py saves and loads each algorithm with both backends.
OFTEN = {
    ("ppo", None, "native"),
    ("a2c", None, "torch"),
    ("dqn", "uniform", "native"),
    ("dqn", "prioritized", "torch"),
    ("sac", "mmap", "native"),
    ("td3", "mmap", "torch"),
}
CASES = [
    pytest.param(algo, buffer, backend, marks=() if (algo, buffer, backend) in OFTEN else EXHAUSTIVE)
    for algo in RUNS
    for buffer in (BUFFERS if algo in ("dqn", "sac", "td3") else [None])
    for backend in ("native", "torch")
]


def start(folder, *arguments):
    folder.mkdir(exist_ok=True)
    with open(folder / "out.txt", "a") as out:
        return forked.Rlox("train", *arguments, cwd=folder, stdout=out)


def train(folder, *arguments):
    process = start(folder, *arguments)
    assert process.wait(120) == 0, (folder / "out.txt").read_text()
    return (folder / "out.txt").read_text()


def newest(folder):
    """The segment and step of the newest row; (-1, 0) before the first."""
    try:
        with open(folder / "run/metrics.jsonl", "rb") as file:
            file.seek(-min(4096, file.seek(0, os.SEEK_END)), os.SEEK_END)
            row = json.loads(file.read().split(b"\n")[-2])
            return row["segment"], row["step"]
    except (OSError, IndexError, ValueError):
        return -1, 0


def killed(folder, *arguments, at):
    """Kill the run when it has a checkpoint and is past the step `at`; return whether it had not ended."""
    last, before = folder / "run/checkpoints/last.safetensors", newest(folder)[0]
    process = start(folder, *arguments)
    deadline = time.monotonic() + 60
    while not (last.exists() and newest(folder) >= (before + 1, at)):
        if process.poll() is not None or time.monotonic() > deadline:
            break
        time.sleep(0.001)  # leave the core to the run
    time.sleep(random.uniform(0, 0.01))
    process.kill()
    assert process.wait(120) in (0, -9), (folder / "out.txt").read_text()
    return process.returncode == -9


ENDLESS = "total_timesteps=100_000_000"  # so that it cannot end before it is killed


def saved_steps(folder):
    return load_checkpoint(folder / "run/checkpoints/last.safetensors").header["counters"]["env_steps"]


def events(folder, kind):
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row.get("event") == kind]


@pytest.mark.parametrize("round_", range(ROUNDS))
@pytest.mark.parametrize(("algo", "buffer", "backend"), CASES, ids=lambda value: str(value))
def test_a_killed_and_resumed_run_equals_an_undisturbed_one(algo, buffer, backend, round_, tmp_path):
    more = [*MORE.get(algo, []), *([f"buffer={buffer}", *BUFFERS[buffer]] if buffer else [])]
    total = TOTAL[algo, backend]
    same_when_killed(tmp_path, total, f"algo={algo}", *RUNS[algo], *COMMON, *more, f"backend={backend}")


def same_when_killed(folder, total, *command, trusted=()):
    """Check that a run of `command` that is killed once or twice gives the same bits as an undisturbed run.

    `trusted` are the words with which a run in environments of one's own is resumed.
    """
    command = [*command, f"total_timesteps={total}", f"checkpoint.every_steps={total // 16}", "hydra.run.dir=run"]
    whole, again = folder / "whole", folder / "again"
    train(whole, *command)
    first, second = sorted(random.uniform(0.1, 0.8) * total for _ in range(2))
    for _ in range(5):
        if killed(again, *command, at=first):
            break
        shutil.rmtree(again / "run")
    killed(again, "resume=run", *trusted, at=second)
    train(again, "resume=run", *trusted)
    starts = [row["step"] for row in events(again, "start")]
    assert 0 < starts[1] < total, "it was not stopped in the middle"
    assert outcome(again / "run") == outcome(whole / "run")
    assert events(again, "end")[-1]["status"] == "finished"


@pytest.mark.parametrize(
    ("algo", "kind"),
    [
        ("impala", "threads"),
        ("appo", "threads"),
        pytest.param("impala", "processes", marks=EXHAUSTIVE),
        ("appo", "processes"),
    ],
)
def test_actors_keep_their_memory(algo, kind, tmp_path):
    actors = [f"algo.actors={kind}", "env=rlox/CartPoleHidden-v1", "env.n_envs=2", "algo.n_steps=16", "backend=torch"]
    memory = ["algo.memory=lstm", "algo.memory_size=8", *(["algo.sequence_length=8"] if algo == "appo" else [])]
    same_when_killed(tmp_path, 6_000, f"algo={algo}", *COMMON, *actors, *memory)


REMEMBERS = ["algo.memory=lstm", "algo.memory_size=8", "algo.hidden_sizes=[8]"]
PLAYED, NORMALIZED = ["env.n_envs=4", "algo.n_steps=32"], "algo.normalize_obs=true"
ZOO, MASKED_ZOO = "env=pettingzoo:zoo_probes:Zoo", "env=pettingzoo:zoo_probes:MaskedZoo"
WITH_MEMORY_OR_MASKS = {
    "ppo-memory": ["algo=ppo", "env=rlox/CartPoleHidden-v1", *PLAYED, *REMEMBERS, "algo.sequence_length=16"],
    "ppo-both": [
        "algo=ppo",
        "env=rlox/MaskedTMaze-v0",
        *PLAYED,
        *REMEMBERS,
        "algo.normalize_obs=true",
        "env.workers=2",
    ],
    "ppo-masks": ["algo=ppo", "env=rlox/InvalidActions-v0", *PLAYED, "algo.normalize_rewards=true"],
    "ppo-native-masks": ["algo=ppo", "env=rlox/MaskedBandit-v0", *PLAYED, "backend=native"],
    "a2c-both": ["algo=a2c", "env=rlox/MaskedTMaze-v0", "env.n_envs=4", *REMEMBERS, "algo.memory_layers=2"],
    "mappo-both": ["algo=mappo", "env=rlox/MaskedTMaze-v0", *PLAYED, *REMEMBERS, "algo.value_norm=true"],
    "dqn-masks": ["algo=dqn", "env=rlox/InvalidActions-v0", "env.n_envs=2", "algo.learning_starts=200"],
    "dqn-both": ["algo=dqn", "env=rlox/MaskedTMaze-v0", "env.n_envs=2", "algo.learning_starts=200", *REMEMBERS],
    "impala-both": ["algo=impala", "env=rlox/MaskedTMaze-v0", "env.n_envs=2", *REMEMBERS],
    # Agents of two groups that die one after the other; some have masks.
    "agents-memory": ["algo=mappo", ZOO, *PLAYED, *REMEMBERS, "algo.sequence_length=16", "algo.agent_id=true"],
    "agents-masks": ["algo=mappo", MASKED_ZOO, *PLAYED, "algo.share_parameters=false", "algo.value_norm=true"],
    "agents-both": ["algo=mappo", MASKED_ZOO, *PLAYED, *REMEMBERS, "algo.critic=local", "env.workers=2"],
}


@pytest.mark.parametrize("case", WITH_MEMORY_OR_MASKS)
def test_memory_and_masks_are_restored(case, tmp_path):
    total = 2_000 if case.startswith("dqn") else 6_000
    if case.startswith("agents"):
        pytest.importorskip("pettingzoo")
        for folder in ("whole", "again"):  # from which a command may import the environments
            (tmp_path / folder).mkdir()
            shutil.copy(pathlib.Path(forked.__file__).with_name("zoo_probes.py"), tmp_path / folder)
    trusted = ["--import", "zoo_probes"] if case.startswith("agents") else []
    same_when_killed(tmp_path, total, *WITH_MEMORY_OR_MASKS[case], *COMMON, trusted=trusted)


@pytest.mark.parametrize("masked", [False, True])
def test_cloning_with_a_memory_is_restored(masked, tmp_path):
    n = 600
    rng, ends = np.random.default_rng(0), np.arange(n) % 12 == 11
    obs, actions = rng.normal(size=(n, 4)).astype(np.float32), rng.integers(2, size=n)  # as in CartPole-v1
    masks = {name: np.ones((n, 2), bool) for name in ("action_masks", "next_action_masks")} if masked else {}
    if masked:
        masks["action_masks"][np.arange(n), 1 - actions] = rng.random(n) < 0.5
    data = OfflineDatasetBuffer(obs, obs, actions, np.zeros(n), ends, np.zeros(n, bool), **masks)
    export(data, str(tmp_path / "data.npz"))
    sequences = ["algo.batch_size=32", "algo.sequence_length=8", "algo.burn_in=4", *REMEMBERS, NORMALIZED]
    command = [
        "algo=bc",
        f"dataset={tmp_path}/data.npz",
        "env=CartPole-v1",
        "algo.learning_rate_schedule=linear",
        *sequences,
        *COMMON,
    ]
    same_when_killed(tmp_path, 2_000, *command)


def test_the_memory_of_a_recurrent_network_is_restored(tmp_path):
    recurrent = ["algo.memory=lstm", "algo.memory_size=8", "algo.sequence_length=8", "algo.burn_in=2"]
    same_when_killed(tmp_path, 1_000, "algo=dqn", *RUNS["dqn"], *COMMON, *MORE["dqn"], *BUFFERS["uniform"], *recurrent)


def test_correlated_noise_is_restored(tmp_path):
    noisy = ["algo.exploration_noise=0.5", "algo.noise_correlation=0.95", "backend=native"]
    same_when_killed(tmp_path, 5_000, "algo=sac", *RUNS["sac"], *COMMON, *noisy)


def test_foreign_environments_that_can_be_restored(tmp_path):
    pytest.importorskip("mujoco")
    foreign = ["env=InvertedPendulum-v5", "env.n_envs=2", "algo.n_steps=64"]
    same_when_killed(tmp_path, 5_000, "algo=ppo", *foreign, *COMMON, "backend=native")


@pytest.mark.parametrize("round_", range(ROUNDS))
@pytest.mark.parametrize("algo", ["ppo", pytest.param("dqn", marks=EXHAUSTIVE)])
def test_evaluations_in_parallel_to_training(algo, round_, tmp_path):
    """No evaluation is lost that was pending when the run was killed, and no process of it is left."""
    # Restorable gymnasium environments, and evaluations that take as long as the training between them.
    foreign = ["env.wrappers=[{TimeLimit: {max_episode_steps: 200}}]", "eval.workers=1", "eval.n_points=12"]
    long = ["eval.n_episodes=20", "backend=native", *(["buffer=uniform", *BUFFERS["uniform"]] if algo == "dqn" else [])]
    common = [word for word in COMMON if not word.startswith("eval.")]
    same_when_killed(tmp_path, 6_000, f"algo={algo}", *RUNS[algo], *common, *foreign, *long)
    assert len(evaluated(tmp_path / "again/run")) == 12
    assert evaluators_of(tmp_path) == []


def evaluated(run):
    return [row["step"] for row in durable_rows(run) if "eval/mean_return" in row]


def evaluators_of(folder):
    """Evaluation processes of runs below `folder` that still exist after a minute."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = []
        for path in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                named = b"rlox.evaluation.evaluator" in (path / "cmdline").read_bytes()
                if named and str(folder) in os.readlink(path / "cwd"):
                    found.append(int(path.name))
        if not found:
            return []
        time.sleep(0.1)
    return found


def test_foreign_environments_that_cannot(tmp_path):
    wrapped = ["env=CartPole-v1", "env.backend=gymnasium", "env.wrappers=[RecordEpisodeStatistics]", "env.n_envs=2"]
    command = ["algo=ppo", *wrapped, *COMMON, ENDLESS, "checkpoint.every_steps=300"]
    assert killed(tmp_path, *command, "hydra.run.dir=run", at=1_000)
    output = train(tmp_path, "resume=run", f"total_timesteps={saved_steps(tmp_path) + 1_000}")
    assert "CartPole-v1 cannot be restored (" in output
    assert "it starts with fresh episodes, everything else is exact" in output


SMALL = ["algo=ppo", "env=CartPole-v1", *RUNS["ppo"], *COMMON, "backend=native", "total_timesteps=10_000"]
SMALL += ["checkpoint.every_steps=1_000", "hydra.run.dir=run"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder with a finished run, which tests may read and copy."""
    folder = tmp_path_factory.mktemp("finished")
    train(folder, *SMALL, "algo.learning_rate_schedule=linear")
    return folder


@pytest.fixture
def mine(finished, tmp_path):
    shutil.copytree(finished / "run", tmp_path / "run")
    return tmp_path


def test_resuming_a_finished_run_prints_a_message_and_changes_nothing(mine):
    before = {path: path.read_bytes() for path in (mine / "run").rglob("*") if path.is_file()}
    output = train(mine, "resume=run")
    assert "run is finished: 10,240 steps. To train on: rlox train resume=run total_timesteps=20480" in output
    assert {path: path.read_bytes() for path in (mine / "run").rglob("*") if path.is_file()} == before


def test_more_steps_extend_it_and_stretch_its_schedules(mine):
    before = load_checkpoint(mine / "run/checkpoints/last.safetensors")
    output = train(mine, "resume=run/checkpoints/last.safetensors", "total_timesteps=12_000", "algo.clip_eps=0.1")
    assert "resuming run at step 10,240 of 12,000" in output
    assert "changed: total_timesteps 10000 -> 12000" in output
    assert "schedules now end at step 12,000, not 10,000: learning_rate 0 -> 3.67e-05" in output
    assert events(mine, "start")[1]["changed"] == {"total_timesteps": [10_000, 12_000], "algo.clip_eps": [0.2, 0.1]}
    assert yaml.safe_load((mine / "run/config.yaml").read_text())["total_timesteps"] == 12_000
    more = load_checkpoint(mine / "run/checkpoints/last.safetensors")
    assert more.header["counters"]["env_steps"] == 12_288
    assert not np.array_equal(more.tensors["policy"]["actor.0.weight"], before.tensors["policy"]["actor.0.weight"])
    rates = [row["schedule/learning_rate"] for row in durable_rows(mine / "run") if "schedule/learning_rate" in row]
    assert min(rates) > 0
    assert rates[-1] == pytest.approx(2.5e-4 * (1 - 11_776 / 12_000))


def test_an_end_of_schedules_before_the_current_step_is_an_error(mine):
    before = {path: path.read_bytes() for path in (mine / "run").rglob("*") if path.is_file()}
    command = ["train", "resume=run", "total_timesteps=14_000"]
    for check in ([], ["--check"]):
        typed = [*command, "schedule_timesteps=10_240", *check]
        done = forked.run(*typed, cwd=mine)
        assert done.returncode == 2
        assert (
            "schedule_timesteps must be more than the 10,240 steps that are done, got 10,240: learning" in done.stderr
        )
        assert "leave it out (null on the command line) to stretch the schedules" in done.stderr
        assert done.stderr.count("\n") == 1
    assert {path: path.read_bytes() for path in (mine / "run").rglob("*") if path.is_file()} == before
    done = forked.run(*command, "--check", cwd=mine)
    assert "schedules now end at step 14,000, not 10,000" in done.stdout
    # A typed setting stays in effect until it is reset.
    assert "learning_rate 0 -> " in train(mine, "resume=run", "total_timesteps=11_000", "schedule_timesteps=20_000")
    (mine / "out.txt").unlink()
    assert "schedules" not in train(mine, "resume=run", "total_timesteps=12_000")
    output = train(mine, "resume=run", "total_timesteps=13_000", "schedule_timesteps=null")
    assert "schedules now end at step 13,000, not 20,000" in output


def test_the_same_in_the_library(tmp_path):
    sizes = {"n_steps": 32, "hidden_sizes": [8], "learning_rate_schedule": "linear"}
    whole = PPO("CartPole-v1", 2, 0, callbacks=[EvalCallback(4, 1)], **sizes)
    whole.train(1_024)

    class Stop(Callback):
        def on_step(self, *, step, **info):
            return step < 400

    half = PPO("CartPole-v1", 2, 0, callbacks=[EvalCallback(4, 1), Stop()], **sizes)
    half.train(1_024)
    half.save(tmp_path / "half.safetensors")
    again = EvalCallback(4, 1)
    rest = PPO.from_checkpoint(tmp_path / "half.safetensors", callbacks=[again])
    rest.train()
    assert rest.counters == whole.counters
    np.testing.assert_array_equal(rest.native.net.parameters, whole.native.net.parameters)
    played = whole.callbacks.callbacks[0].evaluations
    assert [(step, e.returns.tolist()) for step, e in again.evaluations] == [(s, e.returns.tolist()) for s, e in played]
    with pytest.raises(ValueError, match="total_timesteps must not be given together with until"):
        rest.train(10, until=20)
    with pytest.raises(ValueError, match="no training to continue"):
        PPO("CartPole-v1").train()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["resume=nowhere"], "resume=nowhere does not exist; name a run folder"),
        (["resume=."], "must be a run folder, or a checkpoint in the checkpoints/ of one"),
        (["resume=run", "seed=1"], "seed must stay 3 in a run that is resumed, got 1; a new run can"),
        (["resume=run", "env.n_envs=3"], "env.n_envs must stay 8"),
        (["resume=run", "algo=a2c"], "algo=a2c must stay algo=ppo in a run that is resumed"),
        (["resume=run", "env=Acrobot-v1"], "env=Acrobot-v1 must stay env=CartPole-v1"),
        (["resume=run", "algo.gama=0.9"], "algo.gama is no key of PPOConfig; did you mean 'gamma'"),
        (["resume=run", "algo.gamma=much"], "algo.gamma must be a number, got 'much'"),
        (["resume=run", "algo.gamma=2"], r"algo.gamma must be in \[0, 1\], got 2"),
        (
            ["resume=run", "algo.optimizer=rmsprop"],
            "algo.optimizer must stay adam .*; start a new run, since its weights",
        ),
        (["resume=run", "algo.memory=gru"], "algo.memory must stay none in a run that is resumed, got gru"),
        (["resume=run", "algo.normalize_rewards=true"], "must stay false .*, got true; start a new run, since its"),
        (["resume=run", "env.reward_fn=sign"], "env.reward_fn must stay null in a run that is resumed, got sign"),
        (["resume=run", "preset=mine"], "preset=mine must not be combined with resume="),
        (["preset=crossq"], "preset=crossq must be left out: a preset is chosen by algo=NAME"),
        (["-m", "preset=crossq,xqc"], "preset=crossq must be left out"),
        (["resume=run", "tuned=off"], "tuned=off must not be combined with resume="),
        (["resume=run", "seed=1,2"], "seed=1,2 must be KEY=VALUE with one value"),
        (["-m", "resume=run"], "-m must not be combined with resume="),
        (
            ["resume=run", "total_timesteps=5000"],
            "total_timesteps must be at least that of .*, 10,240, got 5,000",
        ),
        (
            ["resume=run", "logger.csv.file=x.csv"],
            "logger.csv.file=x.csv: the logger csv is not chosen; add logger=csv",
        ),
        (["resume=run", "logger.csv={file: x.csv}"], "the logger csv is not chosen; add logger=csv"),
        (["resume=run", "logger.wandb.tags.x=1"], "the logger wandb is not chosen; add logger=wandb"),
        (["resume=run", "buffer.size=100"], "buffer.size needs a replay memory; on-policy algorithms have none"),
        (["resume=run", "dataset.source=x.arrow"], "dataset.source must be left out: dataset is null"),
        (["resume=run", "reward_weights.x=1"], "reward_weights.x must be left out: reward_weights is null"),
    ],
)
def test_settings_that_cannot_change_on_resume(finished, monkeypatch, arguments, says):
    monkeypatch.chdir(finished)
    with pytest.raises(UsageError, match=says):
        main(arguments)


def test_keys_of_a_section_may_be_typed_before_the_section(finished, monkeypatch, capsys):
    monkeypatch.chdir(finished)
    for words in (["logger.csv.file=x.csv", "logger=csv"], ["logger=csv", "logger.csv.file=x.csv"]):
        main(["resume=run", *words, "+reference.mean_return=475", "--cfg", "job"])
        config = yaml.safe_load(capsys.readouterr().out)
        assert (config["logger"]["csv"], config["reference"]) == ({"file": "x.csv"}, {"mean_return": 475})
    main(["resume=run", "--cfg", "job"])
    assert yaml.safe_load(capsys.readouterr().out)["reference"] is None


def test_an_error_is_one_paragraph(finished):
    done = forked.run("train", "resume=run", "seed=1", cwd=finished)
    assert done.returncode == 2
    assert re.fullmatch(r"rlox train: seed must stay 3 .*\n", done.stderr)


def test_a_record_that_ends_before_the_checkpoint_is_named(mine):
    record = mine / "run/metrics.jsonl"
    rows = record.read_text().splitlines(keepends=True)
    early = [row for row in rows if json.loads(row)["step"] <= 5_000]
    record.write_text("".join(early))
    last = max(json.loads(row)["step"] for row in early)
    printed = train(mine, "resume=run", "total_timesteps=12_000")
    assert f"warning: metrics.jsonl has rows up to step {last:,} only, so curves of this run have a gap" in printed
    assert "warning" not in train(mine, "resume=run", "total_timesteps=14_000").replace(printed, "")


def test_other_hyper_parameters_choose_the_backend_anew(mine, monkeypatch):
    monkeypatch.chdir(mine)

    def backend(*overrides):
        return prepare("run", [], ["total_timesteps=20_000", *overrides], [], TextConsole()).config.backend

    assert backend() == "native"
    assert backend("algo.clip_eps=0.1") == "auto"
    assert backend("algo.clip_eps=0.1", "backend=torch") == "torch"
    assert backend("algo.clip_eps=0.1", "backend=native") == "native"


def test_runs_with_damaged_or_missing_files(mine):
    def call(*arguments):
        with pytest.raises(UsageError) as caught:
            resume(str(mine / "run"), [], list(arguments), [], TextConsole())
        return str(caught.value)

    config = mine / "run/config.yaml"
    text = config.read_text()
    config.write_text(text.replace("name: ppo", "name: pppo"))
    assert "algo.name one of" in call()
    for wrong in ("imports: 3", "algo: [ppo]", "env: {id: CartPole-v1}", "buffer: 7", "seed: {_target_: os.system}"):
        config.write_text(yaml.safe_dump({**yaml.safe_load(text), **yaml.safe_load(wrong)}))
        with pytest.raises(ValueError, match=r"config\.yaml|must be known|does not exist|seed"):
            resume(str(mine / "run"), [], [], [], TextConsole())
    config.write_text(text.replace("imports: []", "imports: [their_code]"))
    assert "if you trust it, add --import their_code" in call()
    config.write_text(text)
    last, best = (mine / f"run/checkpoints/{kind}.safetensors" for kind in ("last", "best"))
    last.write_bytes(last.read_bytes()[:-9])
    with pytest.raises(
        ValueError, match=f"truncated or damaged .*; the best checkpoint is there: rlox train resume={best}"
    ):
        resume(str(mine / "run"), [], ["total_timesteps=20_000"], [], TextConsole())
    last.unlink()
    assert "has no last.safetensors, so there is nothing to resume; the best checkpoint is there" in call()
    best.unlink()
    assert "nothing to resume; start a new run" in call()


def test_what_a_command_has_typed_itself_need_not_be_typed_again(mine):
    config = mine / "run/config.yaml"
    plain = yaml.safe_load(config.read_text())
    plain["sampler_folder"] = str(mine)
    config.write_text(yaml.safe_dump(plain))
    words = (str(mine / "run"), [], ["total_timesteps=20_000"], [], TextConsole())
    with pytest.raises(UsageError, match=f"to a folder that is not the run's, .* add sampler_folder={mine}"):
        prepare(*words)
    with pytest.raises(UsageError, match="writes weights to a folder that is not the run's"):
        prepare(*words, again=[("sampler_folder", "/other")])
    for more in ({"trusted": True}, {"again": [("sampler_folder", str(mine))]}):
        with pytest.raises(UsageError, match="sampler_folder must be null with algo=ppo"):  # the next check
            prepare(*words, **more)


def test_one_process_at_a_time(tmp_path):
    long = [*SMALL, "total_timesteps=10_000_000"]
    process, last = start(tmp_path, *long), tmp_path / "run/checkpoints/last.safetensors"
    try:
        while not last.exists():
            time.sleep(0.01)
        other = tmp_path / "other"
        other.mkdir()
        os.symlink(tmp_path / "run", other / "run")
        with pytest.raises(UsageError, match="is being trained by another process"):
            resume(str(other / "run"), [], [], [], TextConsole())
    finally:
        process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM
    assert "Resume with: rlox train resume=run" in (tmp_path / "out.txt").read_text()
    assert [row["status"] for row in events(tmp_path, "end")] == ["interrupted"]
    steps = load_checkpoint(last).header["counters"]["env_steps"]
    (tmp_path / "out.txt").unlink()
    assert f"resuming run at step {steps:,} of {steps + 1_000:,}" in train(
        tmp_path, "resume=run", f"total_timesteps={steps + 1_000}"
    )


def test_of_two_concurrent_resumes_one_is_an_error(mine):
    folders = [mine, mine / "other"]
    folders[1].mkdir()
    os.symlink(mine / "run", folders[1] / "run")
    both = [start(folder, "resume=run", "total_timesteps=10_000_000") for folder in folders]
    deadline = time.monotonic() + 60
    while all(one.poll() is None for one in both) and time.monotonic() < deadline:
        time.sleep(0.01)
    (loser,) = [i for i, one in enumerate(both) if one.poll() is not None]
    output = (folders[loser] / "out.txt").read_text()
    # If the lock is seen at once it is a usage error; losing the race for the lock later is not.
    assert both[loser].returncode in (1, 2), output
    assert re.search(r"is training|by another process|held by process", output), output
    both[1 - loser].terminate()
    assert both[1 - loser].wait(60) == 128 + signal.SIGTERM, (folders[1 - loser] / "out.txt").read_text()
    assert len(events(mine, "start")) == 2, output
    load_checkpoint(mine / "run/checkpoints/last.safetensors")


def test_a_run_stopped_by_score_resumes_only_without_the_rule(tmp_path):
    train(tmp_path, *SMALL, "eval.n_points=10", "eval.stop_at=9")
    output = train(tmp_path, "resume=run")
    assert "run is finished: 1,024 steps, stopped early: the evaluation's mean" in output
    assert "To train on: rlox train resume=run eval.stop_at=null" in output
    (tmp_path / "out.txt").unlink()
    output = train(tmp_path, "resume=run", "eval.stop_at=null")
    assert "changed: eval.stop_at 9.0 -> null" in output
    assert "trained ppo CartPole-v1 seed 3: 10,240 steps" in output


def test_a_run_stopped_for_lack_of_progress_resumes_only_without_the_rule(tmp_path):
    train(tmp_path, *SMALL, "eval.n_points=10", "eval.patience=1", "algo.learning_rate=1e-30")
    for typed in ([], ["total_timesteps=30_000"]):
        assert "To train on: rlox train resume=run eval.patience=null" in train(tmp_path, "resume=run", *typed)
        (tmp_path / "out.txt").unlink()
    assert len(events(tmp_path, "start")) == 1
    assert "trained ppo CartPole-v1 seed 3: 10,240 steps" in train(tmp_path, "resume=run", "eval.patience=null")


def test_a_run_can_be_resumed_from_best(tmp_path):
    train(tmp_path, *SMALL, "algo.learning_rate=0.001", "algo.learning_rate_schedule=constant", "eval.n_points=10")
    best = load_checkpoint(tmp_path / "run/checkpoints/best.safetensors").header["counters"]["env_steps"]
    output = train(tmp_path, "resume=run/checkpoints/best.safetensors", "algo.learning_rate=0.0001")
    assert f"resuming run at step {best:,}" in output
    steps = [row["step"] for row in durable_rows(tmp_path / "run")]
    assert steps == sorted(steps)
    assert [row["step"] for row in events(tmp_path, "start")] == [0, best]


def test_a_full_disk_ends_the_run_but_keeps_checkpoints(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", tmp_path], capture_output=True).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        process = start(tmp_path, *SMALL, "total_timesteps=10_000_000")
        assert process.wait(120) == 1
        good = load_checkpoint(tmp_path / "run/checkpoints/last.safetensors").header["counters"]["env_steps"]
        assert good >= 1_000
        assert not list((tmp_path / "run").rglob("*.partial"))
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


@pytest.mark.parametrize("logger", ["mlflow", "wandb"])
def test_trackers_after_three_kills(logger, tmp_path):
    pytest.importorskip(logger)
    command = [*SMALL, ENDLESS, f"logger={logger}"]
    command += [f"logger.mlflow.tracking_uri=sqlite:///{tmp_path}/mlflow.db"] if logger == "mlflow" else []
    command += ["logger.wandb.mode=offline"] if logger == "wandb" else []
    command = [argument for argument in command if argument != "logger=none"]
    for again, at in enumerate((5_000, 15_000, 25_000)):
        assert killed(tmp_path, *(["resume=run"] if again else command), at=at)
    total = saved_steps(tmp_path) + 10_240
    train(tmp_path, "resume=run", f"total_timesteps={total}")
    rows = durable_rows(tmp_path / "run")
    assert [row["segment"] for row in events(tmp_path, "start")] == [0, 1, 2, 3]
    assert {0, 3} <= {row["segment"] for row in rows}  # a segment that was killed early may have left no rows
    steps = [row["step"] for row in rows if "loss/policy" in row]
    assert steps == sorted(set(steps))
    assert len(steps) == -(-total // 512)
    (report,) = tracking.status(tmp_path / "run").values()
    assert report.complete
    if logger == "mlflow":
        with sqlite3.connect(tmp_path / "mlflow.db") as connection:
            query = "select step, value from metrics where key = 'loss/policy' and run_uuid = ? order by step"
            found = connection.execute(query, (report.remote_id,)).fetchall()
            runs = connection.execute("select count(*) from runs").fetchone()
        assert runs == (1,)
        assert found == [(row["step"], row["loss/policy"]) for row in rows if "loss/policy" in row]
    else:
        history, _ = wandb_history(tmp_path / "run")
        assert [entry["_step"] for entry in history if "loss/policy" in entry] == steps
