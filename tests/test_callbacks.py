"""Callbacks: every hook is called, stopping stops, evaluation and checkpoints happen when they should."""

import io
import math
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from faulty_envs import Bytes
from torch import nn

import rlox
from rlox.algorithms import PPO
from rlox.callbacks import (
    AdviceCallback,
    Callback,
    CallbackList,
    CheckpointCallback,
    EarlyStoppingCallback,
    EvalCallback,
    ProgressCallback,
    TimeLimitCallback,
    TimingCallback,
    VideoCallback,
)
from rlox.callbacks.loggers import LoggerCallback, tracker_name
from rlox.checkpoint import load_checkpoint
from rlox.evaluation.episodes import evaluate
from rlox.evaluation.video import VideoWriter


class Spy(Callback):
    def __init__(self):
        self.calls = []

    def __getattribute__(self, name):
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def hook(**info):
            self.calls.append((name, info))
            return True

        return hook


class Clock:
    """Replaces the clocks of durations: time passes only where a test says so, besides a tick at each reading."""

    TICK = 2.0**-20

    def __init__(self, monkeypatch):
        self.now = 1000.0
        for name in ("monotonic", "perf_counter"):
            monkeypatch.setattr(time, name, self)

    def __call__(self):
        self.now += self.TICK
        return self.now

    def advance(self, seconds):
        self.now += seconds


class Slow(Callback):
    """Takes some seconds at each update, by the clock given."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds = clock, seconds

    def on_step(self, **info):
        self.clock.advance(self.seconds)
        return True


def small(**kwargs):
    return PPO("CartPole-v1", **{"n_envs": 4, "n_steps": 32, "seed": 0, **kwargs})


def test_every_hook_is_called_in_order(tmp_path):
    spy = Spy()
    small(callbacks=[EvalCallback(2, 3), CheckpointCallback(tmp_path), spy]).train(256)
    names = [name for name, _ in spy.calls if name != "on_checkpoint"]
    one = ["on_rollout_end", "on_evaluation", "on_step"]
    assert names == ["on_training_start", *one, *one, "on_training_end"]
    saved = [(info["kind"], info["step"]) for name, info in spy.calls if name == "on_checkpoint"]
    assert saved[0] == ("best", 128)
    assert saved[-1] == ("last", 256)
    step = dict(spy.calls)["on_step"]
    assert step["step"] == 256
    assert step["reward"] == step["metrics"]["mean_reward"]
    assert {"policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "mean_length"} <= set(step["metrics"])


def test_callbacks_that_save_run_last_and_all_states_are_saved(tmp_path):
    class Counting(Callback):
        n = 0

        def on_step(self, **info):
            self.n += 1

        def state(self):
            return {"n": self.n}

        def set_state(self, state):
            self.n = state["n"]

    def callbacks():
        return [CheckpointCallback(tmp_path, every_steps=128), Counting(), Counting()]

    small(callbacks=callbacks()).train(384)
    states = load_checkpoint(tmp_path / "last.safetensors").header["callbacks"]
    assert states == {"Counting": {"n": 3}, "Counting#2": {"n": 3}, "CheckpointCallback": {"best": None}}
    found = callbacks()
    again = PPO.from_checkpoint(tmp_path / "last.safetensors", callbacks=found[:2])
    assert [one.n for one in found[1:]] == [3, 0]
    again.callbacks.extend(found[2:])
    assert [one.n for one in found[1:]] == [3, 3]
    with pytest.raises(ValueError, match="Counting: its state in the checkpoint does not fit: KeyError"):
        again.callbacks.set_state({"Counting": {}})


_ADVICE = {"told": [], "streaks": {}, "entropy_start": None, "grad_norms": []}


@pytest.mark.parametrize(
    ("callback", "state"),
    [
        (CheckpointCallback("none"), {"best": "x"}),
        (CheckpointCallback("none"), {"best": True}),
        (CheckpointCallback("none"), {"best": 10**400}),
        (EvalCallback(), {"best": [], "waited": 0, "evaluations": []}),
        (
            EvalCallback(),
            {"best": 0.0, "waited": 0, "evaluations": [{"step": 1, "returns": [10**400], "lengths": [1]}]},
        ),
        (EarlyStoppingCallback(), {"best": {}, "waited": 0}),
        (EarlyStoppingCallback(), {"best": 0.0, "waited": "x"}),
        (AdviceCallback(), {**_ADVICE, "streaks": {"approx_kl": "x"}}),
        (AdviceCallback(), {**_ADVICE, "entropy_start": "x"}),
        (AdviceCallback(), {**_ADVICE, "grad_norms": ["x"]}),
    ],
)
def test_states_that_hold_no_numbers_are_refused(callback, state):
    name = type(callback).__name__
    with pytest.raises(ValueError, match=f"{name}: its state in the checkpoint does not fit"):
        CallbackList([callback]).set_state({name: state})


def test_states_may_hold_numbers_of_numpy():
    callback = CheckpointCallback("none")
    callback.set_state({"best": np.float32(2.0)})
    assert callback.best == 2.0


def test_a_snapshot_keeps_the_states_at_its_creation(tmp_path):
    class Growing(Callback):
        def __init__(self):
            self.seen = {"steps": []}

        def state(self):
            return self.seen

    callback = Growing()
    write = small(callbacks=[callback]).snapshot(tmp_path / "a.safetensors")
    callback.seen["steps"].append(1)
    callback.seen["more"] = 2
    write()
    assert load_checkpoint(tmp_path / "a.safetensors").header["callbacks"] == {"Growing": {"steps": []}}


def test_a_training_that_went_back_to_another_checkpoint_saves_last_at_once(tmp_path):
    """If it is killed soon, the next one must not go on from the checkpoint that it left."""

    class Ends(Callback):
        def on_rollout_end(self, **info):
            signal.raise_signal(signal.SIGINT)

    def go_on(name):
        agent = PPO.from_checkpoint(tmp_path / name, callbacks=[CheckpointCallback(tmp_path), Ends()])
        with suppress(KeyboardInterrupt):
            agent.train(until=1024)
        for writing in [each for each in threading.enumerate() if each.name == "rlox-checkpoint"]:
            writing.join()
        return load_checkpoint(tmp_path / "last.safetensors").header["counters"]["env_steps"]

    agent = small(callbacks=[CheckpointCallback(tmp_path)])
    agent.train(128)
    agent.save(tmp_path / "best.safetensors")
    agent.train(128)
    before = (tmp_path / "last.safetensors").stat().st_mtime_ns
    assert go_on("last.safetensors") == 256
    assert (tmp_path / "last.safetensors").stat().st_mtime_ns == before
    assert go_on("best.safetensors") == 128
    (tmp_path / "last.safetensors").write_bytes(b"damaged")
    assert go_on("best.safetensors") == 128


def test_a_resumed_training_reads_its_checkpoint_once(tmp_path, monkeypatch):
    small(callbacks=[CheckpointCallback(tmp_path)]).train(128)
    agent = PPO.from_checkpoint(tmp_path / "last.safetensors", callbacks=[CheckpointCallback(tmp_path)])
    monkeypatch.setattr("hashlib.sha256", lambda *_: pytest.fail("the contents are read again"))
    agent.callbacks.on_training_start(algorithm=agent)


def test_a_checkpoint_that_cannot_be_written_ends_the_training(tmp_path):
    (tmp_path / "file").touch()
    ppo = small(callbacks=[CheckpointCallback(tmp_path / "file" / "checkpoints", every_steps=128)])
    with pytest.raises(OSError, match="cannot write"):
        ppo.train(10_000)
    assert ppo.counters.env_steps < 10_000


def test_returning_false_stops():
    class StopAt(Callback):
        def on_step(self, *, step, **info):
            return step < 300

    ppo = small(callbacks=[StopAt()])
    ppo.train(10_000)
    assert ppo.counters.env_steps == 384


@pytest.mark.parametrize("answer", [0, 1, "stop", [], math.nan])
@pytest.mark.parametrize("hook", ["on_step", "on_training_start"])
def test_a_hook_that_returns_no_bool_or_none_is_an_error(hook, answer):
    odd = type("Odd", (Callback,), {hook: lambda self, **info: answer})
    with pytest.raises(TypeError, match=rf"Odd\.{hook} must return False to stop, or True or nothing to continue, got"):
        small(callbacks=[odd()]).train(256)


def test_numpys_false_stops_too():
    class StopAt(Callback):
        def on_step(self, *, step, **info):
            return np.float64(step) < 300

    ppo = small(callbacks=[StopAt()])
    ppo.train(10_000)
    assert ppo.counters.env_steps == 384


@pytest.mark.parametrize("kind", ["ppo", "dqn", "bc"])
def test_a_callback_does_not_train_within_a_training(kind):
    class Trains(Callback):
        def on_step(self, *, algorithm, **info):
            algorithm.train(64)

    if kind == "bc":
        rows = np.zeros((32, 2), np.float32)
        data = rlox.OfflineDatasetBuffer(
            rows, rows, rows[:, :1], rows[:, 0], np.arange(32) % 8 == 7, np.zeros(32, bool)
        )
        algorithm = rlox.BC(data, 2, 1, batch_size=8, hidden_sizes=[8], callbacks=[Trains()])
    elif kind == "dqn":
        algorithm = rlox.DQN("CartPole-v1", learning_starts=32, batch_size=8, callbacks=[Trains()])
    else:
        algorithm = small(callbacks=[Trains()])
    with pytest.raises(ValueError, match="train must not be called by a callback or another thread while"):
        algorithm.train(256)
    algorithm.callbacks.callbacks.clear()
    algorithm.train(64)


def test_early_stopping_counts_calls_without_improvement():
    callback = EarlyStoppingCallback(patience=3)
    goes_on = [callback.on_step(reward=r, step=i) for i, r in enumerate([math.nan, 1, 2, 2, 1.5, 3, 3, 3, 3])]
    assert goes_on == [True] * 8 + [False]
    both = CallbackList([EarlyStoppingCallback(patience=1), EarlyStoppingCallback(patience=5)])
    both.on_training_start()
    assert both.on_step(reward=1.0, step=1) is True
    assert both.on_step(reward=1.0, step=2) is False
    both.on_training_end()
    with pytest.raises(ValueError, match="patience must be >= 1"):
        EarlyStoppingCallback(patience=0)
    with pytest.raises(TypeError, match=r"must be rlox\.callbacks\.Callback, got function"):
        CallbackList([lambda **info: True])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EarlyStoppingCallback(min_delta=math.nan), "EarlyStoppingCallback: min_delta must be finite, got nan"),
        (lambda: EarlyStoppingCallback(threshold=math.nan), "EarlyStoppingCallback: threshold must be a number"),
        (lambda: EvalCallback(n_episodes=0), "EvalCallback: n_episodes must be >= 1, got 0"),
        (lambda: EvalCallback(10**12), "EvalCallback: n_points must be at most 1000000, got 1000000000000"),
        (lambda: CheckpointCallback("a", every_s=-1), "CheckpointCallback: every_s must be >= 0, got -1"),
        (lambda: CheckpointCallback("a", every_s=math.nan), "CheckpointCallback: every_s must be >= 0, got nan"),
        (
            lambda: CheckpointCallback("a", every_steps=0),
            "CheckpointCallback: every_steps must be >= 1, or None, got 0",
        ),
    ],
)
def test_wrong_numbers_are_refused_at_once(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_early_stopping_waits_anew_in_the_next_training():
    class Rewards(Callback):
        def on_step(self, **info):
            return stops.on_step(reward=1.0)

        def on_training_start(self, **info):
            stops.on_training_start(**info)

    stops = EarlyStoppingCallback(patience=3)
    ppo = small(callbacks=[Rewards()])
    steps = []
    for total in (10_000, 10_000):
        before = ppo.counters.updates
        ppo.train(total)
        steps.append(ppo.counters.updates - before)
    assert steps == [4, 3]
    stops.waited = 2
    kept = EarlyStoppingCallback(patience=3)
    kept.set_state(stops.state())
    kept.on_training_start()  # of a hand-written loop that goes on
    assert kept.waited == 2


def test_early_stopping_at_a_threshold():
    callback = EarlyStoppingCallback(patience=5, threshold=100.0)
    assert [callback.on_step(reward=r, step=i) for i, r in enumerate([50.0, math.nan, 99.9, 100.0])] == [
        *(True, True, True, False)
    ]


def test_evaluation_stops_training_at_a_score():
    callback = EvalCallback(n_points=20, n_episodes=3, stop_at=20.0)
    ppo = small(callbacks=[callback], learning_rate=3e-3)
    ppo.train(40_000)
    step, last = callback.evaluations[-1]
    assert ppo.counters.env_steps == step < 40_000
    means = [evaluation.returns.mean() for _, evaluation in callback.evaluations]
    assert last.returns.mean() >= 20.0 > max(means[:-1], default=0.0)
    assert callback.best == max(means)
    assert "reached stop_at=20" in callback.stopped
    ppo.train(128)  # the reason of the previous training does not stop the next one
    assert ppo.counters.env_steps == step + 128


def test_evaluation_stops_training_that_no_longer_improves():
    # A constant score: MountainCar with an untrained policy never reaches the hill.
    callback = EvalCallback(n_points=10, n_episodes=1, patience=2)
    ppo = PPO("MountainCar-v0", n_envs=2, n_steps=32, n_epochs=1, callbacks=[callback])
    ppo.train(1280)
    assert [step for step, _ in callback.evaluations] == [128, 256, 384]
    assert callback.best == -200.0
    assert callback.stopped == "2 evaluations in a row were no better than -200.0 (patience=2)"
    with pytest.raises(ValueError, match="patience must be >= 1"):
        EvalCallback(patience=0)


def test_time_limit_stops_training_and_evaluates_the_end(monkeypatch):
    slow = Slow(Clock(monkeypatch), 25.0)
    evaluations = EvalCallback(n_points=0, n_episodes=2)
    limit = TimeLimitCallback(60, evaluations)
    ppo = small(callbacks=[evaluations, slow, limit])
    for n_updates in (3, 6):  # the limit is that of each training
        ppo.train(100_000_000)
        assert (ppo.counters.updates, limit.reached) == (n_updates, True)
        assert limit.stopped == "the time limit of 60 s was reached"
    assert [step for step, _ in evaluations.evaluations] == [3 * 128, 6 * 128]
    unreached = TimeLimitCallback(60)
    small(callbacks=[slow, unreached]).train(256)
    assert not unreached.reached
    with pytest.raises(ValueError, match="seconds must be > 0, got 0"):
        TimeLimitCallback(0)


def test_timing_shares_add_up_and_name_the_slow_part(monkeypatch):
    clock = Clock(monkeypatch)

    class Rows(LoggerCallback):
        rows = ()

        def log(self, step, metrics):
            self.rows = [*self.rows, metrics]
            clock.advance(1.0)

    class Updates(PPO):
        def update(self, batch):
            clock.advance(3.0)
            return super().update(batch)

    timing, logger = TimingCallback(), Rows()
    assert timing.summary() == {}
    ppo = Updates("CartPole-v1", n_envs=4, n_steps=32, callbacks=[timing, Slow(clock, 10.0)], logger=logger)
    collect = ppo.collector.collect

    def slowly(*arguments):
        clock.advance(2.0)
        return collect(*arguments)

    monkeypatch.setattr(ppo.collector, "collect", slowly)
    ppo.train(512)
    summary = timing.summary()
    assert summary.pop("total_s") == pytest.approx(4 * (2 + 3 + 10 + 1), abs=0.01)
    shares = {"collect": 2 / 16, "update": 3 / 16, "log": 1 / 16, "other": 10 / 16, "evaluate": 0.0, "checkpoint": 0.0}
    assert summary == pytest.approx(shares, abs=1e-3)
    assert sum(summary.values()) == pytest.approx(1.0)
    # The share of what came after the previous update: nothing before the first.
    expected = [(2 / 5, 3 / 5, 0.0), *3 * [(2 / 16, 3 / 16, 11 / 16)]]
    for row, of_update in zip(logger.rows, expected, strict=True):
        found = [row[f"time/{name}_share"] for name in ("collect", "update", "other")]
        assert found == pytest.approx(of_update, abs=1e-3)


def test_time_of_nested_callbacks_counts_for_the_inner_one(tmp_path, monkeypatch):
    clock, logged, called = Clock(monkeypatch), [], []

    class SlowLogger(LoggerCallback):
        def log(self, step, metrics):
            logged.append("eval/mean_return" in metrics)
            clock.advance(1.0)

    class SlowEvaluations(EvalCallback):
        def evaluate(self, algorithm):
            called.append(True)
            clock.advance(100.0)
            super().evaluate(algorithm)

    timing = TimingCallback()
    callbacks = [timing, SlowEvaluations(n_points=2, n_episodes=1), CheckpointCallback(tmp_path)]
    small(callbacks=callbacks, logger=SlowLogger()).train(256)
    assert sorted(logged) == [False, False, True, True]  # updates, and evaluations from inside EvalCallback
    summary = timing.summary()
    total = summary.pop("total_s")
    spent = {name: share * total for name, share in summary.items()}
    assert called
    none = dict.fromkeys(("collect", "update", "checkpoint", "other"), 0.0)
    assert spent == pytest.approx({"log": 4.0, "evaluate": 100.0 * len(called), **none}, abs=0.01)
    assert spent["checkpoint"] > 0


def test_progress_prints_plain_lines(capsys):
    out = io.StringIO()
    small(callbacks=[ProgressCallback(every_s=0.0, file=out), EvalCallback(1, 2)]).train(256)
    lines = out.getvalue().splitlines()
    assert [line.split(" steps: ")[0] for line in lines] == ["128/256", "256/256", "256/256", "256/256"]
    assert "steps/s, return" in lines[0]
    assert "evaluation" in lines[2]
    assert lines[3].split(": ")[1].startswith("done, ")
    small(callbacks=[ProgressCallback(every_s=1e9)]).train(128)
    captured = capsys.readouterr()
    assert captured.err.startswith("128/128 steps: done")
    assert captured.out == ""


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_a_live_line_is_redrawn_within_the_width_and_left_at_the_end(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    small(callbacks=[ProgressCallback(file=out, live=None), EvalCallback(3, 2)]).train(512)
    text = out.getvalue()
    assert text.endswith("\n")
    assert text.count("\n") == 1
    lines = text.rstrip("\n").split("\r")[1:]
    assert len(lines) >= 3
    assert max(map(len, lines)) < columns
    assert lines[0] == "  0% [....................] 0/512 steps"
    start = {40: "100% 512/512 steps, return", 80: "100% [######", 120: f"100% [{'#' * 20}] 512/512 steps, "}
    assert lines[-1].startswith(start[columns])
    assert columns == 40 or re.search(r" 512/512 steps, .*evaluation \d+\.\d ± \d+\.\d$", lines[-1])
    assert columns == 80 or ("steps/s" in lines[-1]) == (columns == 120)


@pytest.mark.slow
def test_train_shows_the_progress_in_a_pipe_and_a_terminal(tmp_path):
    def printed(program, stderr):
        return subprocess.run([sys.executable, "-c", program], stderr=stderr, check=True, timeout=120)

    train = "import rlox; agent = rlox.PPO('CartPole-v1', n_steps=32, seed=0); agent.train(1024, progress=True)"
    piped = printed(train, subprocess.PIPE).stderr.decode()
    assert piped.splitlines()[-1].startswith("1,024/1,024 steps: done, ")
    main, terminal = pty.openpty()
    # An error starts a new line, and the bar does not stay for the next training.
    failing = train.replace("True)", "True); agent.train(64); agent.collector = None; agent.train(64, progress=True)")
    with suppress(subprocess.CalledProcessError):
        printed(f"import os; os.environ['TERM'] = 'xterm'; {failing}", terminal)
    os.close(terminal)
    lines = os.read(main, 1 << 16).decode().replace("\r\n", "\n").split("\n")
    os.close(main)
    assert lines[0].startswith("\r  0% [....")
    assert "100% [####################] 1,024/1,024 steps" in lines[0]
    assert lines[1].startswith("Traceback")


def test_progress_must_be_a_bool():
    with pytest.raises(TypeError, match=r"PPO\.train: progress must be of type bool, got 1"):
        small().train(64, progress=1)


needs_video = pytest.mark.skipif(
    find_spec("imageio_ffmpeg") is None or find_spec("pygame") is None, reason='pip install "rlox-cli[video]"'
)


@pytest.mark.slow
@needs_video
@pytest.mark.parametrize("kind", ["mp4", "gif"])
def test_video_of_evaluations(tmp_path, kind):
    import imageio.v2 as imageio
    from PIL import Image, ImageSequence

    callback = VideoCallback(tmp_path / "films", every_evaluations=2, kind=kind)
    evaluations = EvalCallback(3, 2)
    ppo = small(callbacks=[evaluations, callback])
    ppo.train(384)
    assert callback.paths == [tmp_path / "films" / f"step-{step:09d}.{kind}" for step in (128, 384)]
    assert sorted((tmp_path / "films").iterdir()) == callback.paths
    frames = []
    filmed = ppo.evaluate(1, evaluations.evaluations[-1][1].seed, frames=frames.append)
    assert len(frames) == filmed.lengths[0] + 1
    if kind == "mp4":
        with imageio.get_reader(callback.paths[-1]) as film:
            assert film.get_data(0).shape == (400, 600, 3)
            assert film.count_frames() == len(frames)
            assert film.get_meta_data()["fps"] == 50  # CartPole's frame rate
    else:
        with Image.open(callback.paths[-1]) as film:
            assert film.size == (600, 400)
            # Consecutive equal pictures are stored once, with a longer duration.
            assert sum(frame.info["duration"] for frame in ImageSequence.Iterator(film)) == 20 * len(frames)
    # Recording does not change the training.
    plain = small(callbacks=[EvalCallback(3, 2)])
    plain.train(384)
    for a, b in zip(ppo.policy.parameters(), plain.policy.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
@needs_video
def test_videos_are_cut_as_the_evaluations(tmp_path):
    import imageio.v2 as imageio

    callback = VideoCallback(tmp_path)
    with pytest.warns(RuntimeWarning, match="did not end within 5 steps"):
        small(callbacks=[EvalCallback(1, 2, max_steps=5), callback]).train(128)
    with imageio.get_reader(callback.paths[0]) as film:
        assert film.count_frames() == 6


@needs_video
def test_videos_without_evaluations_are_warned_of(tmp_path):
    with pytest.warns(RuntimeWarning, match="VideoCallback acts at evaluations, and there are none; add an Eval"):
        small(callbacks=[VideoCallback(tmp_path)]).train(128)


@pytest.mark.slow
@needs_video
def test_a_training_that_goes_on_films_every_second_evaluation(tmp_path):
    def train(total, **source):
        films = VideoCallback(tmp_path, every_evaluations=2)
        callbacks = [EvalCallback(n_points=1, n_episodes=1), films]
        ppo = PPO.from_checkpoint(tmp_path / "a", callbacks=callbacks) if source else small(callbacks=callbacks)
        ppo.train(total)
        ppo.save(tmp_path / "a")
        return [path.name for path in films.paths]

    assert train(128) == ["step-000000128.mp4"]
    assert train(128, again=True) == []
    assert train(128, again=True) == ["step-000000384.mp4"]


@needs_video
def test_errors_of_videos(tmp_path):
    with pytest.raises(ValueError, match=r"path must end in \.mp4 or \.gif"):
        VideoCallback(tmp_path, kind="avi")
    with pytest.raises(ValueError, match="every_evaluations must be >= 1"):
        VideoCallback(tmp_path, every_evaluations=0)
    with suppress(RuntimeError), VideoWriter(tmp_path / "a.mp4") as film:
        film.add(np.zeros((31, 33, 3), np.uint8))
        raise RuntimeError("broken")
    assert film.n_frames == 1
    assert list(tmp_path.iterdir()) == []


def planned(env, **options):
    lines = []
    PPO(env, callbacks=[AdviceCallback(lines.append)], hidden_sizes=[8], n_epochs=1, **options).train(1)
    return lines


def test_advice_on_single_transitions_and_bytes_is_given_at_the_start():
    (line,) = planned("CartPole-v1", n_envs=1, n_steps=1)
    assert line.startswith("a rollout is a single transition, whose advantage has no variance and is not normalised")
    assert planned("CartPole-v1", n_envs=1, n_steps=1, normalize_advantages=False) == []
    assert planned("CartPole-v1", n_envs=1, n_steps=3, batch_size=2) == []
    small = {"n_envs": 1, "n_steps": 4}
    (line,) = planned(Bytes, **small)
    assert line == (
        "observations are bytes of shape (40, 36), 1,440 numbers from 0 to 255 that the network sees unscaled; for an "
        "image use the wrapper {ReshapeObservation: {shape: [40, 36, 1]}}, else set normalize_obs=true"
    )
    assert planned(Bytes, **small, normalize_obs=True) == []
    assert planned(Bytes, **small, env_wrappers=[{"ReshapeObservation": {"shape": [40, 36, 1]}}]) == []
    for workers in (0, 1):
        (line,) = planned("Bytes-v0", **small, env_workers=workers)
        assert "unscaled" in line


def advised(rows, discrete=True):
    """The advice on fabricated metrics, as (update, line)."""
    lines = []
    callback = AdviceCallback(lambda line: lines.append((i, line)))
    algorithm = SimpleNamespace(spec=SimpleNamespace(discrete=discrete))
    normal = {"explained_variance": 0.5, "approx_kl": 0.01, "clip_fraction": 0.1, "entropy": 0.6, "grad_norm": 1.0}
    for i, row in enumerate(rows, 1):
        assert callback.on_step(step=i, reward=0.0, metrics={**normal, **row}, algorithm=algorithm) is True
    return lines


ADVICE = [
    ("explained_variance", -0.1, 20, "the critic"),
    ("approx_kl", 0.2, 10, "target_kl=0.02"),
    ("clip_fraction", 0.6, 10, "contribute a gradient"),
    ("entropy", 0.001, 3, "stopped exploring"),
    ("grad_norm", 200.0, 3, "exploding"),
]


@pytest.mark.parametrize(("metric", "value", "updates", "words"), ADVICE)
def test_advice_is_given_once_and_only_when_it_lasts(metric, value, updates, words):
    bad = {metric: value}
    ((when, line),) = advised([*[{}] * 10, *[bad] * 100])
    assert when == 10 + updates
    assert words in line
    assert line.startswith(("explained variance", metric, "the policy's entropy"))
    assert any(word in line for word in ("lower", "raise"))
    assert advised([*[{}] * 10, *([bad] * (updates - 1) + [{}]) * 5]) == []


def test_advice_is_not_given_for_normal_values():
    assert advised([{}] * 200) == []
    # Differential entropy (continuous actions) may have any value; equal returns have no explained variance.
    assert advised([{"entropy": 3.0}, *[{"entropy": -9.0}] * 50], discrete=False) == []
    assert advised([{"explained_variance": math.nan}] * 100) == []
    assert advised([{"explained_variance": -0.01}] * 100) == []
    assert len(advised([{"explained_variance": v} for v in [-1.0, math.nan] * 20])) == 1
    assert advised([{"grad_norm": 1e-3 * 1.2**i} for i in range(30)]) == []


def test_advice_is_given_for_a_bad_run_only(capsys):
    tuned = rlox.tuned("ppo", "CartPole-v1")
    PPO("CartPole-v1", tuned["env"]["n_envs"], 0, callbacks=[AdviceCallback()], **tuned["algo"]).train(15_000)
    assert capsys.readouterr().err == ""
    sick = AdviceCallback()
    small(callbacks=[sick], learning_rate=0.1, n_epochs=20).train(4_000)
    assert sick.given
    assert capsys.readouterr().err.count("advice: ") == len(sick.given)


def test_evaluations_are_evenly_spaced_up_to_the_end():
    callback = EvalCallback(n_points=4, n_episodes=2)
    small(callbacks=[callback]).train(2_000)
    assert [step for step, _ in callback.evaluations] == [512, 1024, 1536, 2048]
    only_end = EvalCallback(n_points=0, n_episodes=2)
    small(callbacks=[only_end]).train(300)
    assert [step for step, _ in only_end.evaluations] == [384]


def test_best_checkpoint_holds_the_best_evaluation_and_reproduces_it(tmp_path):
    callback = EvalCallback(n_points=8, n_episodes=5)
    small(learning_rate=3e-3, callbacks=[callback, CheckpointCallback(tmp_path)]).train(8_000)
    means = [evaluation.returns.mean() for _, evaluation in callback.evaluations]
    header = load_checkpoint(tmp_path / "best.safetensors").header
    assert header["evaluation"]["mean_return"] == max(means)
    assert header["counters"]["env_steps"] == callback.evaluations[means.index(max(means))][0]
    again = PPO.from_checkpoint(tmp_path / "best.safetensors")
    assert again.evaluate(5).returns.mean() == max(means)
    assert load_checkpoint(tmp_path / "last.safetensors").header["counters"]["env_steps"] == 8_064


def test_loggers_get_tracker_names():
    class Rows(LoggerCallback):
        def __init__(self):
            self.rows = []

        def log(self, step, metrics):
            self.rows.append((step, metrics))

    logger = Rows()
    small(logger=logger, callbacks=[EvalCallback(1, 2)]).train(128)
    evaluation, training = sorted((set(metrics) for _, metrics in logger.rows), key=len)
    assert "eval/mean_return" in evaluation
    assert {"episode/return", "episode/length", "loss/policy", "loss/value", "time/steps_per_second"} <= training
    assert tracker_name("approx_kl") == "loss/approx_kl"


def test_native_evaluation_equals_episodes_of_a_single_environment():
    """In parallel or one after the other, the starts are the same, so a fixed rule plays the same episodes."""

    class Heuristic(nn.Module):
        def mode(self, obs):
            return (obs[:, 2] > 0).long()

    together = evaluate(Heuristic(), "CartPole-v1", n_episodes=6, seed=77)
    env, returns, total = rlox.VecEnv(1, 77, "CartPole-v1"), [], 0.0
    obs = env.reset_all()
    while len(returns) < 6:
        step = env.step_all(Heuristic().mode(torch.from_numpy(obs)).numpy())
        obs, total = step["obs"], total + step["rewards"][0]
        if step["terminated"][0] or step["truncated"][0]:
            returns.append(total)
            total = 0.0
    np.testing.assert_array_equal(together.returns, returns)
    assert len(set(returns)) > 1
    with pytest.raises(ValueError, match="n_episodes"):
        evaluate(Heuristic(), "CartPole-v1", n_episodes=0)


def test_stochastic_evaluation_is_seeded():
    ppo = small()
    first, again, other = (ppo.evaluate(10, seed, deterministic=False).returns for seed in (1, 1, 2))
    assert (first == again).all()
    assert (first != other).any()


def test_gymnasium_evaluation_plays_whole_episodes():
    # The argument selects gymnasium's environment; the native one takes no arguments.
    ppo = PPO("MountainCarContinuous-v0", n_envs=2, n_steps=8, env_kwargs={"goal_velocity": 0.0})
    evaluation = ppo.evaluate(2)
    assert (evaluation.lengths == 999).all()
    assert set(evaluation.summary()) == {
        *("mean_return", "std_return", "min_return", "max_return", "mean_length", "n_episodes")
    }


def test_evaluations_every_so_many_steps_keep_their_distance_over_a_resume(tmp_path):
    def steps_of(agent):
        (callback,) = (c for c in agent.callbacks.callbacks if isinstance(c, EvalCallback))
        return [step for step, _ in callback.evaluations]

    whole = small(callbacks=[EvalCallback(n_episodes=1, every_steps=320)])
    whole.train(1024)

    class Stop(Callback):
        def on_step(self, *, step, **info):
            return step < 512

    first = small(callbacks=[EvalCallback(n_episodes=1, every_steps=320), Stop()])
    first.train(1024)
    first.save(tmp_path / "a.safetensors")
    second = PPO.from_checkpoint(tmp_path / "a.safetensors", callbacks=[EvalCallback(n_episodes=1, every_steps=320)])
    second.train()
    assert steps_of(second) == steps_of(whole)


def test_callbacks_work_in_a_loop_that_calls_on_step_alone(tmp_path, monkeypatch):
    policy = rlox.DiscretePolicy(4, 2)
    evaluations = EvalCallback(every_steps=100, policy=policy, env_id="CartPole-v1", n_episodes=1)
    checkpoints = CheckpointCallback(tmp_path, policy=policy, every_steps=100)
    for step in range(50, 350, 50):
        evaluations.on_step(step=step)
        checkpoints.on_step(step=step)
    assert [step for step, _ in evaluations.evaluations] == [100, 200, 300]
    deadline = time.monotonic() + 20
    while not (tmp_path / "last.safetensors").is_file():  # another thread writes it
        assert time.monotonic() < deadline
        time.sleep(0.01)
    clock, limit = Clock(monkeypatch), TimeLimitCallback(60)
    assert limit.on_step(step=1)
    clock.advance(59.0)
    assert limit.on_step(step=2)
    clock.advance(1.0)
    assert not limit.on_step(step=3)
    assert limit.stopped == "the time limit of 60 s was reached"


def test_time_is_measured_in_a_loop_that_calls_on_step_alone(monkeypatch):
    clock = Clock(monkeypatch)
    out, timing = io.StringIO(), TimingCallback()
    both = CallbackList([timing, ProgressCallback(every_s=0.0, file=out)])
    for step in (100, 200, 300):
        clock.advance(4.0)
        both.on_step(step=step, reward=1.0, metrics=(metrics := {"time/update_s": 1.0}))
    assert [line.partition(": ")[2] for line in out.getvalue().splitlines()[1:]] == 2 * ["25 steps/s, return 1.0"]
    assert metrics["time/update_share"] == pytest.approx(1 / 4, abs=1e-3)
    summary = timing.summary()
    assert (summary["total_s"], summary["update"]) == pytest.approx((8.0, 2 / 8), abs=1e-3)  # from the first call on
