"""Measure a step through a worker: 64 environments of 4 float32 numbers, and the same ones in this process.

    python benchmarks/distributed/latency.py [--tls FOLDER] [--n-envs 64] [--steps 3000]

The worker is a separate process on this machine. With --tls FOLDER it requires certificates and a token; FOLDER
contains ca.pem, worker.pem, worker.key, learner.pem, learner.key and token.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from rlox import VecEnv
from rlox.config import RemoteConfig
from rlox.envs.remote import RemoteEnvPool


def measured(env: Any, n: int, steps: int) -> dict[str, float]:
    """Return the microseconds of a step: median and 95th percentile."""
    actions, times = np.zeros(n, np.int64), np.empty(steps)
    env.reset_all()
    for _ in range(200):
        env.step_all(actions)
    for i in range(steps):
        started = time.perf_counter()
        env.step_all(actions)
        times[i] = time.perf_counter() - started
    return {
        "p50_us": round(float(np.median(times)) * 1e6, 1),
        "p95_us": round(float(np.quantile(times, 0.95)) * 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tls", type=Path)
    parser.add_argument("--n-envs", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3000)
    options = parser.parse_args()
    words, security = ["--env", "CartPole-v1", "--port", "0", "--once"], {}
    if (folder := options.tls) is not None:
        for name, file in (("tls-cert", "worker.pem"), ("tls-key", "worker.key"), ("tls-ca", "ca.pem")):
            words += [f"--{name}", str(folder / file)]
        words += ["--token-file", str(folder / "token")]
        files = {"ca": "ca.pem", "cert": "learner.pem", "key": "learner.key", "token_file": "token"}
        security = {name: str(folder / file) for name, file in files.items()}
    command = [sys.executable, "-m", "rlox", "worker", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        port = worker.stdout.readline().partition(" at 127.0.0.1:")[2].split()[0]
        remote = RemoteConfig([f"127.0.0.1:{port}"], **security)
        pool = RemoteEnvPool(None, "CartPole-v1", options.n_envs, 0, remote)
        there = measured(pool, options.n_envs, options.steps)
        pool.close()
    here = measured(VecEnv(options.n_envs, 0), options.n_envs, options.steps)
    print(json.dumps({"n_envs": options.n_envs, "tls": options.tls is not None, "worker": there, "here": here}))


if __name__ == "__main__":
    main()
