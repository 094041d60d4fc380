"""DreamerV3 from the command line: resources, training, resuming, predictions, sweeps, errors."""

import json
import shutil

import camera_world
import forked
import numpy as np
import pytest
from PIL import Image

from rlox.checkpoint import load_checkpoint
from rlox_cli.config.compose import compose_jobs
from rlox_cli.terminal.errors import UsageError

SMALL = (
    *("algo=dreamer", "algo.deter_dim=16", "algo.hidden_dim=8", "algo.stoch_dim=2", "algo.stoch_classes=4"),
    *("algo.batch_size=2", "algo.seq_len=4", "algo.replay_ratio=1", "algo.learning_starts=40", "buffer.size=2000"),
    *("algo.imagination_horizon=3", "eval.n_episodes=2", "eval.n_points=2", "logger=none", "tuned=off"),
)


def typed(*words, cwd):
    done = forked.run(*words, cwd=cwd)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


@pytest.mark.slow
def test_it_trains_resumes_and_plots_predictions(tmp_path):
    def train(name, *more):
        code, output = typed("train", *SMALL, "env=CartPole-v1", f"output_dir={name}", *more, cwd=tmp_path)
        assert code == 0, output

    train("whole", "total_timesteps=200")
    # The schedules of both runs end at the same step.
    train("part", "total_timesteps=120", "schedule_timesteps=200")
    code, output = typed("train", "resume=part", "total_timesteps=200", cwd=tmp_path)
    assert code == 0, output
    ends = [load_checkpoint(tmp_path / name / "checkpoints" / "last.safetensors") for name in ("whole", "part")]
    for section in ("policy", "heads", "optimizer", "environment"):
        for key, array in ends[0].tensors[section].items():
            np.testing.assert_array_equal(ends[1].tensors[section][key], array, err_msg=f"{section} {key}")
    assert ends[0].header["replay_owed"] == ends[1].header["replay_owed"]
    rows = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    shown = [row for row in rows if row.get("kind") == "predictions"]
    assert [row["file"] for row in shown] == ["predictions.png"] * 2
    assert sum("model/open_loop_mse" in row for row in rows) == 2
    with Image.open(tmp_path / "whole" / "predictions.png") as picture:
        assert picture.size[0] > 500
    code, output = typed("eval", "whole", "--predictions", "a.svg", "--json", cwd=tmp_path)
    assert code == 0, output
    assert {"open_loop_mse", "open_loop_share", "open_loop_last_share", "mean_return"} <= set(
        json.loads(output[output.index("{") : output.rindex("}") + 1])
    )
    assert (tmp_path / "a.svg").is_file()
    code, output = typed("eval", "whole", "--predictions", "a.gif", cwd=tmp_path)
    assert code != 0
    assert "predictions: the file must end in .png or .svg or .pdf for vectors, got a.gif" in output


@pytest.mark.slow
def test_it_learns_from_recorded_episodes_before_its_first_step(tmp_path):
    code, output = typed("collect", "--env", "CartPole-v1", "--steps", "300", "--out", "random.arrow", cwd=tmp_path)
    assert code == 0, output
    words = ("env=CartPole-v1", "dataset=random.arrow", "algo.pretrain_updates=130", "algo.learning_starts=0")
    code, output = typed("train", *SMALL, *words, "total_timesteps=40", "output_dir=a", cwd=tmp_path)
    assert code == 0, output
    rows = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss/reconstruction_loss" in row][:3] == [0, 0, 8]  # eight environments
    assert load_checkpoint(tmp_path / "a" / "checkpoints" / "last.safetensors").header["counters"]["updates"] > 130


@pytest.mark.slow
def test_its_seeds_are_judged(tmp_path):
    words = ("env=CartPole-v1", "total_timesteps=60", "--seeds", "1", "--json", "--out", "out")
    code, output = typed("bench", "learn", *SMALL, *words, cwd=tmp_path)
    assert code == 0, output
    (cell,) = json.loads((tmp_path / "out" / "learn.json").read_text())["cells"].values()
    assert [point["step"] for point in cell["curves"]["100"]] == [30, 60]
    assert any(name.startswith("model/open_loop_mse") for name in cell["quantities"]["names"])


@pytest.mark.slow
def test_check_estimates_the_resources(tmp_path):
    code, output = typed("train", *SMALL, "env=CartPole-v1", "total_timesteps=3000", "--check", cwd=tmp_path)
    assert code == 0, output
    assert "an update of 2 sequences of 4 steps for every 8; 2 evaluations of 2 episodes" in output
    assert "s of CPU per update" in output
    # (4 + 2 + 16 + 2 + 2) numbers and three flags per row
    assert "the replay memory takes 0.2 MiB" in output or "the replay memory takes 0.3 MiB" in output
    code, output = typed("train", *SMALL, "env=CartPole-v1", "buffer.size=100_000_000_000", "--check", cwd=tmp_path)
    assert code != 0
    assert "buffer.size must fit in memory, got 100,000,000,000 steps of" in output
    assert "mmap" not in output
    assert not list(tmp_path.rglob("*.jsonl"))


@pytest.mark.slow
def test_the_model_scales_large_numbers(tmp_path):
    shutil.copy(camera_world.__file__, tmp_path)
    words = ("--check", "env=Heights-v0", "imports=[camera_world]", "total_timesteps=60", "output_dir=a")
    code, output = typed("train", *SMALL, *words, cwd=tmp_path)
    assert code == 0, output
    assert "normalize_obs" not in output


@pytest.mark.slow
def test_images_are_filmed(tmp_path):
    words = ("env=rlox/DrawnCatch-v0", "total_timesteps=60", "output_dir=a", "eval.n_points=3", "eval.workers=2")
    code, output = typed("train", *SMALL, *words, cwd=tmp_path)
    assert code == 0, output
    with Image.open(tmp_path / "a" / "predictions.gif") as film:
        assert film.n_frames > 1
    code, output = typed("eval", "a", "--predictions", "b.gif", cwd=tmp_path)
    assert code == 0, output
    assert "4 predicted steps after 5, drawn in b.gif" in output  # an episode has nine steps
    assert "open loop mean squared error" in output


@pytest.mark.slow
def test_other_algorithms_have_no_model(tmp_path):
    words = ("algo=dqn", "env=CartPole-v1", "total_timesteps=200", "algo.learning_starts=64", "logger=none")
    code, output = typed("train", *words, "output_dir=a", "eval.n_points=1", "eval.n_episodes=1", cwd=tmp_path)
    assert code == 0, output
    assert not (tmp_path / "a" / "predictions.png").exists()
    code, output = typed("eval", "a", "--predictions", "b.png", cwd=tmp_path)
    assert code != 0
    assert "open_loop: the algorithm must have a model of the world, got dqn; DreamerV3 has one" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["algo=dreamer", "buffer=uniform"], "buffer must hold sequences for algo=dreamer, got uniform; try buffer=s"),
        (["algo=sac", "buffer=sequence"], "buffer must hold transitions for algo=sac, got sequence; try buffer=u"),
        (["algo=dreamer", "buffer.size=20", "algo.seq_len=21"],
         r"buffer.size must be at least algo.seq_len times env.n_envs \(21\), got 20"),
        (["algo=dreamer", "buffer.n_step=3"], "n_step must be 1, since sequences contain single steps, got 3"),
    ],
)  # fmt: skip
def test_invalid_combinations_are_errors_at_once(words, message):
    with pytest.raises((UsageError, ValueError), match=message):
        compose_jobs([], [*words, "env=Pendulum-v1", "tuned=off"])


def test_a_sweep_composes():
    jobs = compose_jobs(["-m"], ["algo=dreamer", "env=CartPole-v1", "algo.replay_ratio=16,32", "seed=0,1", "tuned=off"])
    assert [job.config.algo.replay_ratio for job in jobs] == [16, 16, 32, 32]
    assert {job.config.buffer.name for job in jobs} == {"sequence"}
