"""Measure frames per second of IMPALA with workers on another host, over mTLS and with a token.

usage: hosts.py [--actors 1 2] [--frames 200000] [--rounds 3] [--ahead 1] [--out FILE]

The hosts are two network namespaces of this machine, joined by one virtual cable. The script needs root, `ip` and
`openssl`. It creates the namespaces and removes them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cases import alone

from rlox.checkpoint import versions
from rlox_cli.bench.machine import provenance

LEARNER, WORKER = "10.77.0.1", "10.77.0.2"


def say(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@contextlib.contextmanager
def hosts() -> Iterator[tuple[list[str], list[str]]]:
    """Yield what to put before a command to run it on the learner's host, and on the workers' host."""
    names = [f"rlox{os.getpid()}{side}" for side in "ab"]
    made = []
    try:
        for name in names:
            say("ip", "netns", "add", name)
            made.append(name)
        say("ip", "link", "add", "near", "netns", names[0], "type", "veth", "peer", "name", "far", "netns", names[1])
        for name, cable, address in zip(names, ("near", "far"), (LEARNER, WORKER), strict=True):
            say("ip", "-n", name, "addr", "add", f"{address}/24", "dev", cable)
            for link in ("lo", cable):
                say("ip", "-n", name, "link", "set", link, "up")
        yield ["ip", "netns", "exec", names[0]], ["ip", "netns", "exec", names[1]]
    finally:
        for name in made:
            say("ip", "netns", "del", name)


def certificates(folder: Path) -> None:
    """Write ca.pem, worker.pem, worker.key, learner.pem, learner.key and token to `folder`."""
    days = ("-days", "2")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    own = ("-keyout", f"{folder}/ca.key", "-out", f"{folder}/ca.pem")
    say("openssl", "req", "-x509", *key, *days, "-subj", "/CN=ca", *own)
    for name, address in (("worker", WORKER), ("learner", LEARNER)):
        request = ("-keyout", f"{folder}/{name}.key", "-out", f"{folder}/{name}.csr")
        say("openssl", "req", *key, "-subj", f"/CN={name}", "-addext", f"subjectAltName=IP:{address}", *request)
        signed = ("-CA", f"{folder}/ca.pem", "-CAkey", f"{folder}/ca.key", "-CAcreateserial")
        files = ("-in", f"{folder}/{name}.csr", "-out", f"{folder}/{name}.pem")
        say("openssl", "x509", "-req", *files, *signed, "-copy_extensions", "copy", *days)
    token = folder / "token"
    token.write_text("a token that only this measurement has\n")
    token.chmod(0o600)


@contextlib.contextmanager
def workers(before: list[str], folder: Path, n: int) -> Iterator[list[str]]:
    """Start `n` workers on their host, and yield their addresses."""
    started: list[subprocess.Popen[str]] = []
    files = ["--tls-cert", "worker.pem", "--tls-key", "worker.key", "--tls-ca", "ca.pem", "--token-file", "token"]
    secured = [str(folder / word) if "." in word or word == "token" else word for word in files]
    try:
        for i in range(n):
            words = ["worker", "--env", "CartPole-v1", "--host", WORKER, "--port", str(7711 + i), *secured]
            command = [*before, sys.executable, "-m", "rlox", *words]
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True))
        for process in started:
            if process.stdout is None or WORKER not in (line := process.stdout.readline()):
                raise RuntimeError(f"hosts.py: a worker must print its address, got {line!r}")
        yield [f"{WORKER}:{7711 + i}" for i in range(n)]
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.communicate(timeout=60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actors", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--frames", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ahead", type=int, default=1, help="rollouts_ahead")
    parser.add_argument("--out", type=Path, help="JSON file; its results of other settings are kept")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name, hosts() as (learner, worker):
        folder = Path(name)
        certificates(folder)
        files = {"ca": "ca.pem", "cert": "learner.pem", "key": "learner.key", "token_file": "token"}
        security = {key: str(folder / file) for key, file in files.items()}
        for n in args.actors:
            with workers(worker, folder, n) as addresses:
                rows = [
                    alone(
                        learner,
                        env="CartPole-v1",
                        frames=args.frames,
                        n_actors=n,
                        n_envs=16,
                        n_steps=32,
                        actors="grpc",
                        worker_addresses=addresses,
                        rollouts_ahead=args.ahead,
                        remote=security,
                    )
                    for _ in range(args.rounds)
                ]
            label = f"{n}, {args.ahead}"
            found[label] = seen = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
            print(
                f"{n} workers, ahead {args.ahead}: {seen['frames_per_s']:,.0f} frames/s, learner idle "
                f"{seen['learner_idle']:.0%}, lag {seen['lag_mean']:.2f}; load {seen['load_before']:.1f}",
                flush=True,
            )
    if args.out:
        before = json.loads(args.out.read_text())["speeds"] if args.out.is_file() else {}
        speeds = {**before, **found}
        loads = [speed["load_after"] for speed in speeds.values()]
        note = (
            f"the machine did other work too: load averages of {min(loads):.0f} to {max(loads):.0f} on two hyperthreads"
        )
        head = {**provenance("python benchmarks/distributed/hosts.py"), "versions": versions(), "note": note}
        args.out.write_text(json.dumps({**head, "speeds": speeds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
