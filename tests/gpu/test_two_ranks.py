"""Two ranks with a GPU each."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("on_two_ranks.py")


def test_two_ranks_train_the_same_weights(tmp_path):
    if not os.environ.get("RLOX_PRETEND_CUDA") and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs, or the pretended one")
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SCRIPT)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    ours, theirs = ((tmp_path / f"rank{i}").read_text() for i in range(2))
    assert ours == theirs
    lines = [line.split() for line in ours.splitlines()]
    assert [line[:3] for line in lines] == [[name, "cuda", "True"] for name in ("PPO", "SAC", "DQN")]
