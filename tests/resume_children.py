"""Runs of `rlox train` in processes that are forked with everything imported, so that many of them cost little."""

import contextlib
import os
import sys

import torch

import rlox_cli.run.resume  # noqa: F401 (what a run imports)
from rlox.algorithms import ALGORITHMS, resolve
from rlox_cli.terminal.errors import Stopped
from rlox_cli.train import main

torch.set_num_threads(1)
for entry in ALGORITHMS.values():
    resolve(entry.cls)


def train(folder, arguments):
    """`rlox train *arguments` with `folder` as working directory, all it prints in ``out.txt``."""
    os.chdir(folder)
    with open("out.txt", "a") as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            main(arguments)
        except Stopped as e:
            sys.exit(e.exit_code)
