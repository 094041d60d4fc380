"""``rlox bench data``: compare every operation of the data plane with the peers that are installed."""

from __future__ import annotations

import json
import math
import re
import shlex
import statistics
import subprocess
import tempfile
import textwrap
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from rich.text import Text

from rlox_cli.bench.machine import provenance
from rlox_cli.bench.parts import Parts
from rlox_cli.bench.peers import SYSTEMS, environment, find_systems, program
from rlox_cli.terminal.console import TextConsole, make_table, print_table
from rlox_cli.terminal.errors import UsageError
from rlox_cli.terminal.paths import output_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Size = int | tuple[int, int]

_SIZES = (1, 8, 64, 512, 4096, 32768, 262_144, 1_000_000)
_BATCHES = (1, 8, 64, 256, 512, 1024, 4096, 32768)  # the original samples at most as many as it holds
_GRIDS = ((1, 128), (8, 128), (64, 512), (256, 2048))
# Time for one system, size and round. Slower operations get fewer samples; the result has their number.
_SECONDS = 1.5
# A sample is the mean of as many calls as fit into this time; timing a single short call would mostly time the clock.
_SAMPLE_NS = 10_000

# The original's Schulman estimate uses the inverse ratio: exp(r) - r - 1 with r = log p - log q.
_K3_DIFFERS = ("original",)


@dataclass(frozen=True)
class Operation:
    """One row of the benchmark: the operation, its sizes, and whether systems must agree on the result."""

    name: str  # method of the classes in benchmarks/peers/systems.py
    title: str
    group: str
    sizes: tuple[Size, ...]
    unit: str  # what a size counts
    determined: bool = False
    must: dict[Size, float] = field(default_factory=dict)  # size -> required speed-up over the original, at x86-64-v4
    differs: tuple[str, ...] = ()  # systems that define the result differently


OPERATIONS = (
    Operation("gae", "compute_gae f64", "advantages", (*_SIZES, 128, 2048), "steps", True,
              {128: 2.2, 2048: 3.0, 32768: 3.5}),
    Operation("gae_batched", "compute_gae_batched f64", "advantages", _GRIDS, "envs x steps", True,
              {(8, 128): 6.0, (256, 2048): 3.0}),
    Operation("gae_batched_f32", "compute_gae_batched_f32", "advantages", _GRIDS, "envs x steps", True,
              {(8, 128): 6.0, (256, 2048): 3.0}),
    Operation("gae_out", "compute_gae_batched f64, out=", "advantages", _GRIDS, "envs x steps", True),
    Operation("vtrace_f32", "compute_vtrace f32", "advantages", _SIZES, "steps", True),
    Operation("group_advantages", "compute_batch_group_advantages", "tokens", _SIZES[1:], "rewards", True),
    Operation("token_kl", "compute_token_kl f64", "tokens", (*_SIZES, 2048), "tokens", True, {2048: 6.0}),
    Operation("token_kl_f32", "compute_token_kl_f32", "tokens", (*_SIZES, 2048), "tokens", True, {2048: 10.0}),
    Operation("token_kl_schulman", "compute_token_kl_schulman f64", "tokens", (*_SIZES, 2048), "tokens", True,
              {2048: 6.0}, _K3_DIFFERS),
    Operation("token_kl_schulman_f32", "compute_token_kl_schulman_f32", "tokens", (*_SIZES, 2048), "tokens", True,
              {2048: 10.0}, _K3_DIFFERS),
    Operation("batch_token_kl", "compute_batch_token_kl f64", "tokens", _GRIDS, "sequences x tokens", True),
    Operation("batch_token_kl_f32", "compute_batch_token_kl_f32", "tokens", _GRIDS, "sequences x tokens", True),
    Operation("batch_token_kl_schulman", "compute_batch_token_kl_schulman f64", "tokens", _GRIDS,
              "sequences x tokens", True, {}, _K3_DIFFERS),
    Operation("batch_token_kl_schulman_f32", "compute_batch_token_kl_schulman_f32", "tokens", _GRIDS,
              "sequences x tokens", True, {}, _K3_DIFFERS),
    Operation("group_single", "compute_group_advantages", "tokens", _SIZES[1:], "rewards", True),
    Operation("dpo_pair", "DPOPair", "tokens", (8, 512, 4096), "tokens"),
    Operation("pack_sequences", "pack_sequences into 2048", "tokens", (1, 8, 64, 512, 4096, 32768), "sequences"),
    Operation("running_stats", "RunningStatsVec.batch_update", "statistics", _SIZES, "rows"),
    Operation("running_stats_update", "RunningStatsVec.update", "statistics", _SIZES, "dimensions"),
    Operation("running_stats_normalize", "RunningStatsVec.normalize_batch", "statistics", _SIZES, "rows", True),
    Operation("running_stat", "RunningStats.update", "statistics", (1,), "numbers"),
    Operation("push", "ReplayBuffer.push", "buffers", (1,), "transitions"),
    Operation("push_batch", "ReplayBuffer.push_batch", "buffers", (*_SIZES, 256), "transitions"),
    Operation("replay_100k", "ReplayBuffer.sample of 100k", "buffers", _BATCHES, "transitions", must={1024: 3.0}),
    Operation("replay_packed_100k", "ReplayBuffer.sample_packed of 100k", "buffers", _BATCHES, "transitions",
              must={1024: 4.5}),
    Operation("replay_1m", "ReplayBuffer.sample of 1M", "buffers", (*_SIZES, 256, 1024), "transitions",
              must={1024: 3.0}),
    Operation("per_sample", "PrioritizedReplayBuffer.sample of 100k", "buffers", _BATCHES, "transitions",
              must={256: 5.0}),
    Operation("per_update", "PrioritizedReplayBuffer.update_priorities", "buffers", _BATCHES, "priorities",
              must={256: 3.0}),
    Operation("per_both", "prioritised sample and update", "buffers", _BATCHES, "transitions",
              must={256: 5.0}),
    Operation("per_push", "PrioritizedReplayBuffer.push", "buffers", (1,), "transitions"),
    Operation("mmap_push", "MmapReplayBuffer.push", "buffers", (1,), "transitions"),
    Operation("mmap_sample", "MmapReplayBuffer.sample, 10k of 100k hot", "buffers", _BATCHES, "transitions"),
    Operation("offline_sample", "OfflineDatasetBuffer.sample of 100k", "buffers", _BATCHES, "transitions"),
    Operation("offline_trajectories", "OfflineDatasetBuffer.sample_trajectories of 20", "buffers",
              (1, 8, 64, 256, 1024), "trajectories"),
    Operation("sequence_push", "SequenceReplayBuffer.push", "buffers", (1,), "steps"),
    Operation("sequence_sample", "SequenceReplayBuffer.sample of 20", "buffers", (1, 8, 64, 256, 1024), "sequences"),
    Operation("table_observations", "ExperienceTable.observations", "buffers", (1, 64, 4096, 32768), "transitions"),
    Operation("varlen_push", "VarLenStore.push", "buffers", (1, 64, 4096, 262_144), "tokens"),
    Operation("table_push", "ExperienceTable.push", "buffers", (1,), "transitions"),
    Operation("varlen_get", "VarLenStore.get", "buffers", (1, 64, 4096, 262_144), "tokens"),
    Operation("cartpole", "CartPole-v1 step_all", "environments", (*_SIZES, 256, 1024), "environments",
              must={8: 7.0, 256: 10.0, 4096: 15.0}),
    Operation("cartpole_views", "CartPole-v1 step_all, reused arrays", "environments", (*_SIZES, 256, 1024),
              "environments", must={8: 30.0, 256: 30.0, 4096: 30.0}),
    Operation("cartpole_list", "CartPole-v1 step_all, actions as a list", "environments", _SIZES[:5], "environments"),
    Operation("pendulum", "Pendulum-v1 step_all", "environments", (*_SIZES, 1024), "environments"),
    Operation("mountain_car", "MountainCar-v0 step_all", "environments", (*_SIZES, 1024), "environments"),
    Operation("mountain_car_continuous", "MountainCarContinuous-v0 step_all", "environments", (*_SIZES, 1024),
              "environments"),
    Operation("acrobot", "Acrobot-v1 step_all", "environments", (*_SIZES, 1024), "environments"),
    Operation("grid_world", "GridWorld-v0 step_all", "environments", _SIZES, "environments"),
)  # fmt: skip

_COLOURS = {
    "rlox": "black",
    "original": "tab:red",
    "numpy": "tab:blue",
    "gymnasium": "tab:green",
    "sb3": "tab:orange",
    "torchrl": "tab:purple",
}


class Worker:
    """One system in its own process."""

    def __init__(self, system: str, python: str):
        self.system = system
        self.python = python
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the process)
        self._process = subprocess.Popen(
            [python, program("systems.py"), system],
            cwd="/",
            env=environment(1),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._to, self._from = cast(tuple[IO[str], IO[str]], (self._process.stdin, self._process.stdout))
        self.versions: dict[str, Any] = self._read()["versions"]

    def _read(self) -> dict[str, Any]:
        line = self._from.readline()
        if not line:
            status = self._process.wait()
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
            raise UsageError(
                f"{self.system} in {self.python} ended with status {status}" + (f": {lines[-1]}" if lines else "")
            )
        return json.loads(line)

    def ask(self, operation: Operation, size: Size, samples: int) -> dict[str, Any]:
        request = {
            "op": operation.name,
            "size": size,
            "samples": samples,
            "determined": operation.determined,
            "sample_ns": _SAMPLE_NS,
        }
        self._to.write(json.dumps(request) + "\n")
        self._to.flush()
        return self._read()

    def close(self) -> None:
        self._to.close()
        self._process.terminate()
        self._process.wait()
        self._errors.close()


def measure(workers: list[Worker], operation: Operation, size: Size, samples: int, rounds: int) -> dict[str, Any]:
    """Time every system that offers the operation; the systems take turns in each round.

    ``faults`` of the result lists the systems left out because they failed or computed another result than rlox.

    Raises
    ------
    UsageError
        If rlox itself fails.
    """
    times: dict[str, list[float]] = {}
    checks: dict[str, float] = {}
    present = list(workers)
    counts: dict[str, int] = {}
    faults: dict[str, str] = {}
    for worker in workers:
        answer = worker.ask(operation, size, 3)
        if "absent" in answer:
            present.remove(worker)
            continue
        if "error" in answer:
            if worker.system == "rlox":
                raise UsageError(f"{operation.title} of rlox at {_label(size)} failed: {answer['error']}")
            present.remove(worker)
            faults[worker.system] = f"failed: {answer['error']}"
            continue
        per_sample = max(_SAMPLE_NS, statistics.median(answer["ns"])) / 1e9
        counts[worker.system] = max(3, min(math.ceil(samples / rounds), int(_SECONDS / per_sample)))
        if answer["check"] is not None:
            checks[worker.system] = answer["check"]
    ours = checks.get("rlox", math.nan)
    for system, theirs in checks.items():
        if system in operation.differs:
            continue
        if not math.isclose(theirs, ours, rel_tol=1e-3, abs_tol=1e-5 * _count_elements(size)):
            faults[system] = f"{system} and rlox must agree, got {theirs} and {ours}"
            present = [worker for worker in present if worker.system != system]
    for k in range(rounds):
        # The order changes, so that it is not always the same system that runs first on a cold machine.
        turn = present[k % len(present) :] + present[: k % len(present)]
        for worker in turn:
            times.setdefault(worker.system, []).extend(worker.ask(operation, size, counts[worker.system])["ns"])
    row = {
        worker.system: {
            "median_us": round(statistics.median(times[worker.system]) / 1e3, 4),
            "p99_us": round(_p99(times[worker.system]) / 1e3, 4),
            "samples": len(times[worker.system]),
        }
        for worker in present
    }
    mine = row["rlox"]
    return {
        "operation": operation.name,
        "title": operation.title,
        "group": operation.group,
        "size": size,
        "unit": operation.unit,
        "systems": row,
        "ratio": {s: round(r["median_us"] / mine["median_us"], 2) for s, r in row.items() if s != "rlox"},
        "ratio_p99": {s: round(r["p99_us"] / mine["p99_us"], 2) for s, r in row.items() if s != "rlox"},
        "must": operation.must.get(size),
        "faults": faults,
    }


def _p99(times: list[float]) -> float:
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, math.ceil(0.99 * len(ordered)) - 1)]


def _label(size: Size | list[int]) -> str:
    return " x ".join(f"{part:,}" for part in size) if isinstance(size, (tuple, list)) else f"{size:,}"


def _ratio(ratio: float) -> Text:
    if ratio < 0.95:
        return Text(f"{ratio:.2f}", "red")
    return Text(f"{ratio:.3g}" if ratio < 100 else f"{ratio:,.0f}")


def _time(us: float) -> str:
    if us < 1000:
        return f"{us:.3g} µs" if us < 100 else f"{us:.0f} µs"
    return f"{us / 1e3:.3g} ms" if us < 1e6 else f"{us / 1e6:.3g} s"


def print_results(console, rows: list[dict[str, Any]], peers: list[str]) -> None:
    """Print one line per operation and size: our time, and how many times longer each peer takes."""
    table = make_table("operation", "size", "rlox", "p99", *(f"{peer} /rlox" for peer in peers), "must")
    last = None
    for row in rows:
        mine = row["systems"]["rlox"]
        cells = []
        for peer in peers:
            ratio = row["ratio"].get(peer)
            cells.append("" if ratio is None else _ratio(ratio))
        must, against = row["must"], row["ratio"].get("original")
        mark = Text()
        if must is not None and against is not None:
            met = against >= must
            mark = Text(f"{must:g} ").append("met" if met else "missed", None if met else "red")
        title = row["title"] if row["title"] != last else ""
        last = row["title"]
        table.add_row(title, _label(row["size"]), _time(mine["median_us"]), _time(mine["p99_us"]), *cells, mark)
    print_table(console, table)


def draw(rows: list[dict[str, Any]], caption: str) -> Figure:
    """Draw small multiples: time per call over size, one line per system."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    sizes = Counter(row["title"] for row in rows)
    most = max(sizes.values())
    names = [name for name in sizes if sizes[name] > 1 or most == 1]  # one point is not a curve
    columns = 4
    lines = math.ceil(len(names) / columns)
    figure = Figure(figsize=(4.2 * columns, 2.9 * lines + 0.5))
    axes = figure.subplots(lines, columns, squeeze=False)
    for axis, name in zip(axes.flat, names, strict=False):
        of = sorted((row for row in rows if row["title"] == name), key=lambda row: _count_elements(row["size"]))
        for system, colour in _COLOURS.items():
            xs = [_count_elements(r["size"]) for r in of if system in r["systems"]]
            ys = [r["systems"][system]["median_us"] for r in of if system in r["systems"]]
            if xs:
                axis.plot(xs, ys, "o-", color=colour, markersize=3, linewidth=1.8 if system == "rlox" else 1.0,
                          label=system)  # fmt: skip
        axis.set(xscale="log", yscale="log", xlabel=of[0]["unit"])
        for side in (axis.xaxis, axis.yaxis):
            side.set_major_locator(LogLocator(numticks=6))
            side.set_minor_formatter(NullFormatter())
        _whole_decades(axis)
        axis.set_title(textwrap.fill(name, 44), fontsize=9)
        axis.grid(True, alpha=0.3)
    for row in axes:
        row[0].set_ylabel("µs per call")
    for axis in list(axes.flat)[len(names) :]:
        axis.axis("off")
    handles: dict[str, Any] = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    labels = [system for system in SYSTEMS if system in handles]
    inch = 1 / figure.get_figheight()
    figure.legend([handles[s] for s in labels], labels, loc="upper center", ncols=len(labels), frameon=False)
    figure.text(0.5, 0.06 * inch, textwrap.fill(caption, 40 * columns), ha="center", fontsize=8)
    figure.tight_layout(rect=(0, 0.35 * inch, 1, 1 - 0.3 * inch))
    return figure


def _whole_decades(axis: Axes) -> None:
    """Extend axes whose numbers are within one decade, so that at least two labels show the scale."""
    for low, high, limit in ((*axis.get_xlim(), axis.set_xlim), (*axis.get_ylim(), axis.set_ylim)):
        if math.floor(math.log10(high)) - math.ceil(math.log10(low)) < 1:
            limit(10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high)))


def _count_elements(size: Size | list[int]) -> int:
    return math.prod(size) if isinstance(size, (tuple, list)) else size


def main(peer_pythons: list[Path], only: str | None, samples: int, rounds: int, out: Path | None) -> None:
    """Measure, print the table and, with `out`, write ``data.json`` and ``data.png`` into that folder."""
    console = TextConsole()
    try:
        pattern = re.compile(only or "")
    except re.error as e:
        raise UsageError(f"--only must be a regular expression, got {only!r}: {e}") from e
    operations = [o for o in OPERATIONS if pattern.search(o.name) or pattern.search(o.group)]
    if not operations:
        known = ", ".join(o.name for o in OPERATIONS)
        raise UsageError(f"--only must match an operation or a group, got {only!r}; operations: {known}")
    out = None if out is None else output_path("--out", out, folder=True)
    program("systems.py")  # without a checkout, nothing is created
    systems = find_systems(peer_pythons)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    workers: list[Worker] = []
    rows: list[dict[str, Any]] = []
    try:
        for system, python in systems.items():
            workers.append(Worker(system, python))
        versions = {k: v for worker in workers for k, v in worker.versions.items()}
        console.print("  ".join(f"{name} {version}" for name, version in versions.items()))
        cases = [(o, size) for o in operations for size in sorted(o.sizes, key=_count_elements)]
        with Parts(len(cases)) as parts:
            for operation, size in cases:
                parts.begin(f"{operation.title}, {_label(size)}")
                rows.append(measure(workers, operation, size, samples, rounds))
    finally:
        for worker in workers:
            worker.close()
    print_results(console, rows, [worker.system for worker in workers if worker.system != "rlox"])
    short = [row for row in rows if row["ratio"].get("original", 1.0) < 0.95]
    if "original" in systems:
        musts = [row for row in rows if row["must"] is not None]
        met = sum(row["ratio"].get("original", 0.0) >= row["must"] for row in musts)
        console.print(
            f"must (x86-64-v4; half at v3): {met} of {len(musts)} met;  below 0.95 of the original: {len(short)}"
        )
    faults = [
        f"{row['title']} at {_label(row['size'])}, {system}: {fault}"
        for row in rows
        for system, fault in row["faults"].items()
    ]
    if out is not None:
        _write(out, rows, rounds, samples, versions, only, peer_pythons, console)
    if faults:
        raise UsageError("left out of the comparison:\n  " + "\n  ".join(faults))


def _write(out, rows, rounds, samples, versions, only, peer_pythons, console) -> None:
    words = ["rlox bench data", *(["--only", shlex.quote(only)] if only else []), f"--samples {samples}",
             f"--rounds {rounds}", *("--peer-python PYTHON" for _ in peer_pythons)]  # fmt: skip
    result = {**provenance(" ".join(words)), "versions": versions, "rounds": rounds, "results": rows}
    (out / "data.json").write_text(json.dumps(result, indent=1) + "\n")
    caption = f"{result['machine']}; median of {samples} samples in {rounds} rounds, one thread; " + ", ".join(
        f"{name} {version}" for name, version in versions.items()
    )
    draw(rows, caption).savefig(out / "data.png", dpi=80)
    console.print(f"written: {out / 'data.json'}, {out / 'data.png'}")
