"""Time one action of an exported policy: C, ONNX Runtime, TorchScript and `predict`, on one thread.

It builds PPO's default policy of CartPole with 64 and with 256 units, and prints a table of microseconds: the best of
many short rounds, since other programs only make a round longer.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np

import rlox

ROUNDS, CALLS = 300, 20
TIMER = r"""
#include <stdio.h>
#include <time.h>
#include "policy.h"
int main(void)
{
    double best = 1e9;
    long taken = 0;
    for (int round = 0; round < 2000; round++) {
        struct timespec before, after;
        float obs[POLICY_OBS_SIZE] = {0};
        int action;
        clock_gettime(CLOCK_MONOTONIC, &before);
        for (int i = 0; i < 100; i++) {
            obs[0] = (float)i * 1e-3f;
            policy_act(obs, &action, NULL);
            taken += action;
        }
        clock_gettime(CLOCK_MONOTONIC, &after);
        double us = ((double)(after.tv_sec - before.tv_sec) * 1e9 + (double)(after.tv_nsec - before.tv_nsec)) / 1e5;
        if (us < best) best = us;
    }
    printf("%.3f %ld\n", best, taken);
    return 0;
}
"""


def measure(call) -> float:
    """Return microseconds of one call."""
    best = np.inf
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        best = min(best, time.perf_counter() - start)
    return 1e6 * best / CALLS


def measure_c(folder: Path, *flags: str) -> float:
    """Return microseconds of one call of the C file, compiled with `flags`."""
    (folder / "timer.c").write_text(TIMER)
    program = folder / "timer"
    subprocess.run(["cc", "-std=gnu99", *flags, "timer.c", "policy.c", "-o", program], cwd=folder, check=True)
    return float(subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()[0])


def measure_all(units: int) -> dict[str, float]:
    """Return microseconds of one action by what computes it."""
    import onnxruntime
    import torch

    torch.set_num_threads(1)
    agent, obs = rlox.PPO("CartPole-v1", n_envs=1, hidden_sizes=[units, units]), np.zeros((1, 4), np.float32)
    # Before PyTorch's module exists, for whose changes `predict` would look.
    predict_us = measure(lambda: agent.predict(obs[0]))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for suffix in (".c", ".onnx", ".pt"):
            rlox.export(agent, folder / f"policy{suffix}", observations=100)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(folder / "policy.onnx", options, providers=["CPUExecutionProvider"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            module = torch.jit.load(folder / "policy.pt")
        rows = torch.from_numpy(obs)
        with torch.inference_mode():
            module_us = measure(lambda: module(rows))
        return {
            "C, -O3 -march=native": measure_c(folder, "-O3", "-march=native"),
            "C, -O2": measure_c(folder, "-O2"),
            "ONNX Runtime": measure(lambda: session.run(["action"], {"obs": obs})),
            "TorchScript": module_us,
            "`predict`, kernel": predict_us,
        }


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    columns = {units: measure_all(units) for units in (64, 256)}
    print("| | 64-64 units | 256-256 units |\n|---|---:|---:|")
    for row in columns[64]:
        print(f"| {row} | {columns[64][row]:.2f} | {columns[256][row]:.2f} |")
