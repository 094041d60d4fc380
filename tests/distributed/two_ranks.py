"""Commands that ``torchrun`` starts as two ranks on this machine."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
TWO = ("--standalone", "--nproc-per-node=2")


def torchrun(*words, cwd, dies=None):
    """Return the exit code and the output."""
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    if dies is not None:
        env["RLOX_TEST_DIES"] = str(dies)
    run = Path(sys.executable).with_name("torchrun")
    done = subprocess.run(
        [run, *words], cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240
    )
    return done.returncode, done.stdout


def train(*words, cwd, options=(), dies=None):
    return torchrun(*TWO, *options, "-m", "rlox", "train", *words, cwd=cwd, dies=dies)
