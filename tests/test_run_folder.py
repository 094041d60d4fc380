"""A training in the library writes the run folder of the command line, which all commands read, and keeps a history."""

import json
import math
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
import yaml
from small_algorithms import learner

import rlox
from rlox.callbacks import (
    Callback,
    CheckpointCallback,
    EarlyStoppingCallback,
    EvalCallback,
    RecordLogger,
    TimeLimitCallback,
)
from rlox.callbacks.base import MOST_ROWS, History
from rlox.checkpoint import decode_value
from rlox.tracking.record import Record, is_alive, read_rows
from rlox_cli.notebook import compare_runs


def ppo(**arguments):
    return rlox.PPO("CartPole-v1", **{"n_envs": 2, "n_steps": 16, "hidden_sizes": [8], **arguments})


def rows(folder):
    return [row for row, _ in read_rows(folder / "metrics.jsonl")]


def events(folder):
    return [(row["event"], row["step"]) for row in rows(folder) if row.get("event") in ("start", "end")]


def config(folder):
    return yaml.safe_load((folder / "config.yaml").read_text())


def answer(command, *words):
    """What the command prints, which must succeed."""
    code, out, err = command(*words)
    assert not code, err
    return out


def test_every_command_reads_the_run_folder(command, tmp_path):
    for seed in (0, 1):
        agent = ppo(logger=f"runs/{seed}", seed=seed, callbacks=[EvalCallback(2, 2)])
        agent.train(128)
        assert str(agent.run_folder) == f"runs/{seed}"
    assert "2 finished" in answer(command, "plot", "runs", "--out", "a.png")
    assert answer(command, "ls", "runs", "--folder", "runs").count("finished") == 2
    assert json.loads(answer(command, "compare", "runs/0", "runs/1", "--json"))["metric"] == "eval/mean_return"
    assert "reproduced exactly" in answer(command, "eval", "runs/0")
    answer(command, "train", "resume=runs/0", "total_timesteps=192", "eval.n_episodes=2")
    assert events(tmp_path / "runs/0") == [("start", 0), ("end", 128), ("start", 128), ("end", 192)]


def test_a_run_without_evaluations_is_plotted_and_compared_by_its_training(command):
    for seed in (0, 1):
        ppo(logger=f"runs/{seed}", seed=seed).train(2048)
    assert "final training return" in answer(command, "plot", "runs", "--out", "a.html")
    assert json.loads(answer(command, "compare", "runs/0", "runs/1", "--json"))["metric"] == "episode/return"


def test_a_comparison_says_which_runs_are_not_finished(command, tmp_path):
    for name, more in (("a/0", {}), ("a/1", {"seed": 1, "gamma": 0.9}), ("b/0", {}), ("b/1", {"seed": 1})):
        ppo(logger=f"runs/{name}", callbacks=[EvalCallback(2, 2)], **{"seed": 0, **more}).train(128)

    def kill(name):
        path = tmp_path / "runs" / name / "metrics.jsonl"
        path.write_text("".join(line for line in path.open() if '"event":"end"' not in line))

    def compared():
        text, found = answer(command, "compare", "runs/a", "runs/b"), compare_runs("runs/a", "runs/b")
        page = found._repr_html_()
        assert "runs/a pools runs that differ in algo.gamma" in page
        notes = found["environments"]["CartPole-v1"]["notes"]
        assert all(note in text and note in page for note in notes)
        return notes, found["environments"]["CartPole-v1"]["verdict"], text

    notes, verdict, _ = compared()
    assert notes == []
    assert "2 runs per side do not distinguish" in verdict["sentence"]
    kill("b/1")
    assert compared()[0] == ["1 of 2 runs of B are left out: killed"]
    kill("b/0")
    notes, verdict, text = compared()
    assert notes == ["no run of B is finished: killed"]
    assert (verdict["winner"], verdict["runs_needed"]) == (None, None)
    assert "verdict: no verdict, because no run of B is finished and runs of A are; finish those of B" in text
    kill("a/0")
    kill("a/1")
    notes, verdict, _ = compared()
    assert notes == ["no run of A is finished: killed", "no run of B is finished: killed"]
    assert "2 runs per side do not distinguish" in verdict["sentence"]


def test_the_record_is_that_of_the_command_line(command, tmp_path):
    typed = ["algo.n_steps=16", "algo.hidden_sizes=[8]", "env.n_envs=2", "seed=3", "total_timesteps=96", "tuned=off"]
    words = ["train", "algo=ppo", "env=CartPole-v1", "logger=csv", "eval.n_points=1", "eval.n_episodes=2"]
    answer(command, *words, "eval.workers=0", "output_dir=theirs", *typed)
    ppo(seed=3, logger=["ours", "csv"], callbacks=[EvalCallback(1, 2)]).train(96)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    assert config(ours) == config(theirs)

    def values(folder):
        found = {}
        for row in rows(folder):
            if "event" not in row:
                measured = {name: value for name, value in row.items() if not name.startswith("time")}
                found.setdefault(row["step"], {}).update(measured)
        return found

    assert values(ours) == values(theirs)
    for kind in ("best", "last"):
        saved = [rlox.load_checkpoint(folder / f"checkpoints/{kind}.safetensors") for folder in (ours, theirs)]
        for name, array in saved[0].tensors["policy"].items():
            np.testing.assert_array_equal(array, saved[1].tensors["policy"][name])
        assert saved[0].header["run"] == saved[1].header["run"]


FAMILIES = {
    "dqn": lambda folder: rlox.DQN("CartPole-v1", buffer_size=200, learning_starts=20, logger=folder),
    "td3 on gymnasium": lambda folder: rlox.TD3(
        "Pendulum-v1", learning_starts=20, env_backend="gymnasium", logger=folder
    ),
    "impala": lambda folder: rlox.IMPALA("CartPole-v1", n_steps=8, logger=folder),
    "iql": lambda folder: learner("iql", logger=folder),
    "mappo": lambda folder: rlox.MAPPO("GridPursuit-v0", n_steps=8, n_envs=2, logger=folder),
    "hybrid": lambda folder: rlox.HybridPPO("CartPole-v1", n_envs=2, n_steps=16, logger=folder),
    "trainer": lambda folder: rlox.Trainer("a2c", "CartPole-v1", logger=folder),
    "factory": lambda folder: rlox.PPO(lambda: _gym("CartPole-v1"), n_envs=2, n_steps=16, logger=folder),
    "dreamer": lambda folder: rlox.DreamerV3("CartPole-v1", learning_starts=80, size="200k", logger=folder),
}


def _gym(name):
    import gymnasium

    return gymnasium.make(name)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_writes_one(family, command, tmp_path):
    agent = FAMILIES[family]("run")
    agent.train(64)
    if hasattr(agent, "close"):
        agent.close()
    _require_run(command, tmp_path / "run", agent.history)


@pytest.mark.slow
def test_a_run_without_an_environment_cannot_be_evaluated(command):
    learner("iql", logger="run").train(3)
    code, _, err = command("eval", "run")
    assert code
    assert "must name the environment of its evaluation" in err


@pytest.mark.slow
def test_language_models_write_one(command, tmp_path):
    sys.path.append(os.path.join(os.path.dirname(__file__), "llm"))
    import toy

    agent = rlox.SFT(toy.model("bare"), tokenizer=toy.tokenizer(), dataset=toy.ROWS, batch_size=2, logger="run")
    agent.train(3)
    _require_run(command, tmp_path / "run", agent.history)


def _require_run(command, folder, history):
    assert [event for event, _ in events(folder)] == ["start", "end"]
    assert (folder / "checkpoints" / "last.safetensors").is_file()
    assert len(history["step"]) >= 1
    assert "finished" in answer(command, "ls", "runs", "--folder", str(folder))
    named = next(name for name in rows(folder)[1] if name.startswith(("loss/", "time/")))
    answer(command, "plot", str(folder), "--metric", named, "--out", "a.png")


def test_a_folder_is_continued_or_refused_and_never_overwritten(tmp_path):
    folder = tmp_path / "run"
    agent = ppo(logger=folder)
    agent.train(64)
    before = (folder / "metrics.jsonl").read_bytes()
    message = r"logger must be a new folder, got .*run, which contains a run; .* PPO.from_checkpoint\('.*last.saf"
    with pytest.raises(ValueError, match=message):
        ppo(logger=folder).train(64)
    other = ppo(seed=9)
    other.train(64)
    other.save(tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="which contains a run"):
        rlox.PPO.from_checkpoint(tmp_path / "other.safetensors", logger=folder).train(64)
    same = ppo(logger=tmp_path / "same")
    same.train(96)
    with pytest.raises(ValueError, match="which contains a run"):
        rlox.PPO.from_checkpoint(tmp_path / "same/checkpoints/last.safetensors", logger=folder).train(32)
    assert (folder / "metrics.jsonl").read_bytes() == before
    agent.train(32)
    again = rlox.PPO.from_checkpoint(folder / "checkpoints" / "last.safetensors", logger=folder, learning_rate=1e-5)
    again.train(32)
    assert [step for _, step in events(folder)] == [0, 64, 64, 96, 96, 128]
    changed = [row.get("changed") for row in rows(folder) if row.get("event") == "start"]
    assert changed[0] is None
    assert changed[2] == {"algo.learning_rate": [0.00025, 1e-5], "total_timesteps": [96, 128]}


def test_settings_may_be_infinite(command, tmp_path):
    folder = tmp_path / "run"
    ppo(logger=folder, normalize_obs=True, clip_obs=math.inf).train(64)
    assert config(folder)["algo"]["clip_obs"] == math.inf
    last = folder / "checkpoints" / "last.safetensors"
    assert rlox.load_checkpoint(last).header["run"] == config(folder)
    assert rlox.PPO.from_checkpoint(last).config.clip_obs == math.inf
    rlox.PPO.from_checkpoint(last, logger=folder, clip_obs=5.0).train(32)
    answer(command, "train", f"resume={folder}", "algo.clip_obs=inf", "total_timesteps=128")
    changed = [row["changed"]["algo.clip_obs"] for row in rows(folder) if "changed" in row]
    assert [decode_value(both) for both in changed] == [[math.inf, 5.0], [5.0, math.inf]]
    assert "ppo on CartPole-v1" in answer(command, "eval", str(folder), "--episodes", "2")


def test_a_memory_mapped_buffer_is_kept_with_the_run(tmp_path):
    options = {"learning_starts": 20, "buffer": {"name": "mmap", "size": 2000, "hot_size": 10}}
    agent = rlox.DQN("CartPole-v1", logger=tmp_path / "run", **options)
    agent.train(100)
    agent.close()
    again = rlox.DQN.from_checkpoint(tmp_path / "run/checkpoints/last.safetensors", logger=tmp_path / "run")
    assert len(again.buffer) == 100
    again.train(50)
    assert events(tmp_path / "run") == [("start", 0), ("end", 100), ("start", 100), ("end", 150)]
    again.close()


def test_failures_and_interrupts_are_recorded(tmp_path):
    class Stop(Callback):
        def __init__(self, error):
            self.error = error

        def on_step(self, **info):
            if self.error is signal.SIGINT:
                signal.raise_signal(signal.SIGINT)
            elif self.error is not None:
                raise self.error
            return True

    failing = ppo(logger=tmp_path / "failed", callbacks=[Stop(RuntimeError("no more"))])
    with pytest.raises(RuntimeError):
        failing.train(64)
    end = rows(tmp_path / "failed")[-1]
    assert (end["status"], end["message"]) == ("failed", "RuntimeError: no more")
    stop = Stop(signal.SIGINT)  # as Ctrl-C sends it
    stopped = ppo(logger=tmp_path / "stopped", callbacks=[stop])
    with pytest.raises(KeyboardInterrupt):
        stopped.train(64)
    assert not is_alive(tmp_path / "stopped")
    assert rows(tmp_path / "stopped")[-1].get("event") != "end"
    stop.error = None
    stopped.train()  # as in a notebook
    assert events(tmp_path / "stopped") == [("start", 0), ("start", 32), ("end", 64)]


class Ends(Callback):
    def on_step(self, *, step, **info):
        return step < 64


@pytest.mark.parametrize(
    ("callback", "why"),
    [
        (lambda: EarlyStoppingCallback(threshold=1.0), "the return .* reached 1"),
        (Ends, "a callback ended the training"),
        (lambda: TimeLimitCallback(1e-9), "the time limit of 1e-09 s was reached"),
    ],
)
def test_a_training_that_a_callback_stops_says_why(callback, why, command, tmp_path):
    ppo(logger="run", callbacks=[callback()]).train(2048)
    end = rows(tmp_path / "run")[-1]
    assert end["status"] == "finished"
    assert re.fullmatch(f"stopped early: {why}", end["message"])
    assert end["step"] < 2048
    told = answer(command, "train", "resume=run", "eval.n_points=1", "eval.n_episodes=1")
    if "time limit" not in why:
        assert re.search(rf"run is finished: {end['step']} steps, stopped early: {why}. To train on", told)
        further = re.search(r"To train on: rlox (train resume=run total_timesteps=2048)", told)[1]
        told = answer(command, *further.split(), "eval.n_points=1", "eval.n_episodes=1")
    assert "2,048 steps" in told
    assert rows(tmp_path / "run")[-1]["message"] == ""


def test_schedules_of_a_second_training_keep_their_end_on_the_command_line(command, tmp_path):
    agent = ppo(logger="run", learning_rate_schedule="linear", callbacks=[Ends()])
    agent.train(64)
    agent.callbacks.callbacks[0] = Callback()
    agent.train(64, schedule_timesteps=256)
    assert config(tmp_path / "run")["schedule_timesteps"] == 320
    words = ["train", "resume=run", "total_timesteps=192", "eval.n_points=1", "eval.n_episodes=1"]
    assert "schedules" not in answer(command, *words)
    counters = rlox.load_checkpoint("run/checkpoints/last.safetensors").header["counters"]
    assert [counters[name] for name in ("horizon_start", "horizon_steps", "schedule_steps")] == [64, 128, 256]


def test_unfinished_files_of_a_killed_training_are_removed(tmp_path):
    ppo(logger=tmp_path / "run").train(32)
    last = tmp_path / "run/checkpoints/last.safetensors"
    left = last.with_name(".last.safetensors.123.partial")
    left.touch()
    rlox.PPO.from_checkpoint(last, logger=tmp_path / "run").train(32)
    assert not left.exists()


def test_a_training_that_cannot_begin_leaves_a_folder_that_can_be_used(tmp_path):
    left = tmp_path / "run/checkpoints/.last.safetensors.123.partial"
    left.mkdir(parents=True)  # which should be a file
    agent = ppo(logger=tmp_path / "run")
    with pytest.raises(OSError, match="partial"):
        agent.train(32)
    assert not (tmp_path / "run/metrics.jsonl").exists()
    left.rmdir()
    ppo(logger=tmp_path / "run").train(32)
    left.mkdir()
    with pytest.raises(OSError, match="partial"):
        rlox.PPO.from_checkpoint(left.with_name("last.safetensors"), logger=tmp_path / "run").train(32)
    assert rows(tmp_path / "run")[-1]["status"] == "failed"


def test_a_store_that_cannot_be_written_does_not_stop_the_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs/mlflow.db.rlox").write_text("where a folder should be")
    with pytest.warns(RuntimeWarning, match="mlflow is not filled: "):
        ppo(logger=["run", "mlflow"]).train(32)
    assert events(tmp_path / "run") == [("start", 0), ("end", 32)]
    assert "mlflow.db.rlox" in rlox.tracking.status(tmp_path / "run")["mlflow"].error


def test_names_of_trackers_choose_a_new_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    agent = ppo(logger="csv")
    assert agent.run_folder is None
    agent.train(32)
    assert agent.run_folder.parts[0] == "outputs"
    assert agent.run_folder.name.startswith("ppo-CartPole-v1-s42-")
    assert config(agent.run_folder)["logger"]["csv"] == {"file": "metrics.csv"}
    assert set(rlox.tracking.sync(agent.run_folder)) == {"csv"}
    assert (agent.run_folder / "metrics.csv").read_text().startswith("step,")
    (tmp_path / "file").touch()
    for logger, message in (
        ("tensorbord", "did you mean 'tensorboard'. Write './tensorbord' for a folder of that name"),
        (["a", "b"], "at most one folder"),
        ("file", "logger must be a folder, got the file file"),
    ):
        with pytest.raises(ValueError, match=message):
            ppo(logger=logger)
    for logger in (7, [], "", ["csv", 7]):
        with pytest.raises(TypeError, match="logger must be a LoggerCallback or another Callback, a folder, or one"):
            ppo(logger=logger)


def test_a_record_logger_takes_a_record(tmp_path):
    with pytest.raises(TypeError, match=r"record must be a rlox.tracking.Record, got 'dir'; write logger="):
        RecordLogger("dir")
    # Checkpoints of another folder are left out of the record.
    with Record(tmp_path / "run") as record:
        ppo(logger=RecordLogger(record), callbacks=[CheckpointCallback(tmp_path / "elsewhere")]).train(32)
    assert [row["event"] for row in rows(tmp_path / "run") if "event" in row] == ["start"]


def test_history_has_a_number_for_each_step_and_metric():
    agent = ppo(callbacks=[EvalCallback(2, 2)])
    assert dict(agent.history) == {}
    last = agent.train(128)
    history = agent.history
    assert history["step"].tolist() == [32, 64, 96, 128]
    assert {len(column) for column in history.values()} == {4}
    assert {name: history[name][-1] for name in last} == pytest.approx(last, nan_ok=True)
    evaluated = ~np.isnan(history["eval/mean_return"])
    assert evaluated.tolist() == [False, True, False, True]
    assert repr(history).startswith("History(4 rows, steps 32 to 128: step, mean_reward")
    agent.train(32)
    assert agent.history["step"].tolist() == [32, 64, 96, 128, 160]
    with pytest.raises(KeyError):
        history["nothing"]


def test_a_long_history_is_thinned_out_but_keeps_evaluations():
    history = History()
    history.add(3, {"eval/mean_return": 1.0})
    history.add(2, {"loss": 0.0})  # an evaluation may come later than the metrics of its step
    for step in range(4, 5 * MOST_ROWS):
        history.add(step, {"loss": float(step)})
    history.add(10, {"eval/mean_return": 2.0})
    steps, scores = history["step"], history["eval/mean_return"]
    assert len(steps) < MOST_ROWS
    assert (np.diff(steps) > 0).all()
    assert {2, 3, 10, 5 * MOST_ROWS - 1} <= set(steps.tolist())
    assert scores[~np.isnan(scores)].tolist() == [1.0, 2.0]
    known = (steps > 3) & (steps != 10)
    np.testing.assert_array_equal(history["loss"][known], steps[known])


def test_a_run_folder_imports_no_tracker_and_no_command_line(tmp_path):
    program = (
        "import sys, rlox; rlox.PPO('CartPole-v1', n_steps=8, logger='run').train(64);"
        "print(*[m for m in ('torch', 'hydra', 'typer', 'omegaconf', 'rich', 'mlflow', 'wandb') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_a_best_checkpoint_newer_than_the_last_one_is_kept(tmp_path):
    agent = ppo(logger=tmp_path / "run", callbacks=[EvalCallback(2, 2)])
    agent.train(64)
    best = tmp_path / "run/checkpoints/best.safetensors"
    # As if a better one had been evaluated before the run was killed.
    rlox.PPO.from_checkpoint(best).save(best, evaluation={"mean_return": 1e6})
    before = best.read_bytes()
    again = rlox.PPO.from_checkpoint(
        tmp_path / "run/checkpoints/last.safetensors", logger=tmp_path / "run", callbacks=[EvalCallback(2, 2)]
    )
    again.train(64)
    assert best.read_bytes() == before
