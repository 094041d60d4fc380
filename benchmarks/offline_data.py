"""Measure a dataset of ten million transitions: the time to open it, and the memory and speed of sampling.

    python benchmarks/offline_data.py --original ~/venvs/original/bin/python --out benchmarks/offline_data.json

The dataset has Hopper's sizes (11 observations, 3 actions) and rows of random numbers, 1.06 GB; the file is removed
afterwards. The systems take turns, each in its own process with one thread: rlox on the mapped file; NumPy indexing of
arrays in memory, as Stable-Baselines3's ReplayBuffer samples; and the original's OfflineDatasetBuffer, if an
interpreter with the original is given. Memory is "Anonymous" of /proc/self/smaps_rollup, which no file backs, minus its
value after the imports. The first batches of a mapped file touch most pages for the first time; speeds are those of ten
thousand batches after them.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

OBS, ACTIONS, BATCH, BATCHES = 11, 3, 256, 10_000


def anonymous_mb() -> float:
    return int(re.search(r"Anonymous: +(\d+)", Path("/proc/self/smaps_rollup").read_text())[1]) / 1024


def write(path: Path, n: int) -> float:
    """Write the file, and return the seconds it took."""
    from rlox.offline.dataset import convert
    from rlox.offline.sources import Source

    def blocks():
        rng, size = np.random.default_rng(0), 100_000
        for start in range(0, n, size):
            obs = rng.standard_normal((size + 1, OBS), np.float32)
            ends = np.arange(start, start + size) % 1000 == 999
            yield {
                "obs": obs[:-1],
                "next_obs": obs[1:],
                "actions": rng.uniform(-1, 1, (size, ACTIONS)).astype(np.float32),
                "rewards": rng.standard_normal(size, np.float32),
                "terminated": ends & (rng.random(size) < 0.5),
                "truncated": ends,
            }

    started = time.perf_counter()
    convert(Source("benchmark", blocks(), {"act_low": [-1] * ACTIONS, "act_high": [1] * ACTIONS}), path)
    return time.perf_counter() - started


def columns(path: Path, where: dict) -> dict:
    """Read the columns from their places in the file into memory, for interpreters without pyarrow."""
    return {
        name: np.array(np.memmap(path, dtype, "r", offset, tuple(shape)))
        for name, (dtype, offset, shape) in where.items()
    }


def ours(path: Path, where: dict):
    import rlox

    return lambda: rlox.open_dataset(path, normalize=True)


def original(path: Path, where: dict):
    import rlox

    def load():
        data = columns(path, where)
        names = ("obs", "next_obs", "actions", "rewards", "terminated", "truncated")
        return rlox.OfflineDatasetBuffer(*(data[name].ravel() for name in names), normalize=True)

    return load


class Indexed:
    """Sampling as in Stable-Baselines3's ReplayBuffer, including normalisation."""

    def __init__(self, data: dict):
        self.data = data
        self.mean, self.std = data["obs"].mean(0), data["obs"].std(0) + 1e-3

    def sample(self, batch_size: int, seed: int) -> dict:
        at = np.random.default_rng(seed).integers(0, len(self.data["rewards"]), batch_size)
        found = {name: column[at] for name, column in self.data.items()}
        for name in ("obs", "next_obs"):
            found[name] = (found[name] - self.mean) / self.std
        return found


def numpy_indexing(path: Path, where: dict):
    return lambda: Indexed(columns(path, where))


def measure(system: str, path: Path, where: dict) -> dict[str, float]:
    """Measure one system in this process."""
    load = {"rlox": ours, "original": original, "numpy": numpy_indexing}[system](path, where)
    if system == "rlox":
        from rlox.offline.dataset import dataset_metadata

        dataset_metadata(path)  # imports what opening needs
    before = anonymous_mb()
    started, cpu = time.perf_counter(), time.process_time()
    data = load()
    cpu, opened = time.process_time() - cpu, time.perf_counter() - started
    first = sampled(data, 0)
    after = anonymous_mb() - before
    then = sampled(data, BATCHES)
    return {
        "open_s": opened,
        "open_cpu_s": cpu,
        "anonymous_mb": after,
        "first_batches_per_cpu_s": BATCHES / first[0],
        "batches_per_cpu_s": BATCHES / then[0],
        "batches_per_wall_s": BATCHES / then[1],
    }


def sampled(data, first: int) -> tuple[float, float]:
    """Return the CPU and wall seconds of drawing `BATCHES` batches."""
    wall, cpu = time.perf_counter(), time.process_time()
    for seed in range(first, first + BATCHES):
        data.sample(batch_size=BATCH, seed=seed)
    return time.process_time() - cpu, time.perf_counter() - wall


def places(path: Path) -> dict:
    """Return where the columns are in the file."""
    import pyarrow as pa

    from rlox.offline.arrow import NUMPY_NAMES

    source = pa.memory_map(str(path))
    start = source.read_buffer().address
    batch = pa.ipc.open_file(source).get_batch(0)
    found = {}
    for name in batch.schema.names:
        array = batch.column(name)
        values = array.flatten() if pa.types.is_fixed_size_list(array.type) else array
        shape = (len(array),) if values is array else (len(array), len(values) // len(array))
        found[name] = (
            str(np.dtype(NUMPY_NAMES.get(str(values.type), str(values.type)))),
            values.buffers()[1].address - start,
            shape,
        )
    return found


def forget(path: Path) -> None:
    """Drop the file from the page cache, as after a restart of the machine."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)


def child(python: str, system: str, path: Path, where: dict) -> dict[str, float]:
    # The original has the same import name: its process must not find this rlox next to this file's folder.
    words = [python, "-P" if system == "original" else "-u", str(Path(__file__).resolve()), "--child", system]
    done = subprocess.run(
        [*words, "--path", str(path), "--where", json.dumps(where)],
        capture_output=True, text=True, check=False, cwd=path.parent, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{system}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--original", help="an interpreter that has the original rlox")
    parser.add_argument("--folder", help="folder of the temporary file")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--where", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.child, args.path, args.where)))
        return
    from rlox.checkpoint import versions
    from rlox_cli.bench.machine import provenance

    systems = {"rlox": sys.executable, "numpy": sys.executable}
    if args.original:
        systems["original"] = args.original
    with tempfile.TemporaryDirectory(prefix="rlox-data-", dir=args.folder) as folder:
        path = Path(folder) / "hopper.arrow"
        seconds = write(path, args.rows)
        where = places(path)
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in systems}
        forget(path)
        cold = child(sys.executable, "rlox", path, where)
        for _ in range(args.rounds):
            for name, python in systems.items():
                runs[name].append(child(python, name, path, where))
                print(name, runs[name][-1], flush=True)
        size = path.stat().st_size / 2**20
    medians = {
        name: {key: statistics.median(run[key] for run in found) for key in found[0]} for name, found in runs.items()
    }
    speed = {name: found["batches_per_cpu_s"] for name, found in medians.items()}
    result = {
        **provenance("python benchmarks/offline_data.py --original ORIGINAL"),
        "versions": versions(),
        "rows": args.rows,
        "file_mb": size,
        "write_s": seconds,
        "batch_size": BATCH,
        "batches": BATCHES,
        "cold_open_s": cold["open_s"],
        "cold_open_cpu_s": cold["open_cpu_s"],
        "medians": medians,
        "ratio_of_cpu_speed": {name: speed["rlox"] / other for name, other in speed.items() if name != "rlox"},
        "runs": runs,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
