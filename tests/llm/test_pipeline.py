"""examples/post_training_pipeline.py, and the same stages as commands."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rlox.checkpoint import load_checkpoint

EXAMPLE = Path(__file__).parents[2] / "examples" / "post_training_pipeline.py"
STAGES = ("sft", "reward_model", "grpo", "dpo")


@pytest.mark.slow
def test_four_commands_train_the_models_of_the_script(command, tmp_path, monkeypatch):
    words = [sys.executable, EXAMPLE, "--prompts", "50", "--updates", "2", "--out", "lib"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [*STAGES]
    scores = json.loads(Path("lib/scores.json").read_text())["scores"]
    for stage, line in zip(STAGES, lines, strict=True):
        for name, value in scores[stage].items():
            assert 0 <= value <= (40 * 8 if name == "rows" else 1)
            assert (f"{value} rows" if name == "rows" else f"{name} {value:.3f}") in line

    # The commands use the settings of the script, so that they cannot diverge from it.
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    import post_training_pipeline as pipeline

    settings = {"sft": pipeline.SFT, "reward_model": pipeline.REWARD_MODEL, "grpo": pipeline.GRPO, "dpo": pipeline.DPO}
    before = {"sft": None, "reward_model": "sft", "grpo": "sft", "dpo": "grpo"}
    for stage in STAGES:
        model = f"{before[stage]}/checkpoints/last.safetensors" if before[stage] else "rlox.llm.toy:make_model"
        words = [f"algo={stage}", f"model={model}", f"dataset=lib/{stage}.jsonl", "total_timesteps=2", "seed=0"]
        words += [f"algo.{key}={value}" for key, value in settings[stage].items()]
        words += ["reward=reward_model/checkpoints/last.safetensors"] if stage == "grpo" else []
        code, _, error = command("train", *words, "logger=none", "eval.n_points=0", "device=cpu", f"output_dir={stage}")
        assert not code, error
        files = (f"{stage}/checkpoints/last.safetensors", f"lib/{stage}.safetensors")
        ours, theirs = (load_checkpoint(file).tensors["policy"] for file in files)
        assert ours.keys() == theirs.keys()
        assert [name for name in ours if not np.array_equal(ours[name], theirs[name])] == [], stage
