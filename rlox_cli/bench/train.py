"""``rlox bench train``: compare whole trainings with the peers that are installed, and what each system learned.

Agents are trained by benchmarks/peers/trainings.py, language models by the programs in benchmarks/llm.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from rlox_cli.bench.machine import provenance
from rlox_cli.bench.parts import Parts
from rlox_cli.bench.peers import ask_worker, environment, find_systems, program
from rlox_cli.terminal.console import TextConsole, make_table, print_table
from rlox_cli.terminal.errors import UsageError
from rlox_cli.terminal.paths import output_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SYSTEMS = ("rlox", "sb3", "original", "trl")
_STARTED = ("sum", "dpo")  # tasks that begin with a pretrained model
_WATCHED = ("process", "busy")  # cases that count the CPU time of all that a process starts
_ALL = ("rlox", "rlox hybrid", "rlox torch", "sb3", "original", "original hybrid")
_FIGURE_SIZE = 8  # font size in points of the numbers in the picture
_PANEL_POINTS = 360  # approximate width of a panel
_SPIN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"  # it ends when its parent does
# A program with one thread, to see how much a busy machine slows it down.
_CONTROL = """
x = 0
for i in range(20_000_000):
    x += i & 3
"""


@dataclass(frozen=True)
class Case:
    """One row of the benchmark."""

    title: str
    systems: tuple[str, ...]
    steps: int | None = None  # fixed number of steps, which --steps does not change
    task: str | None = None  # of benchmarks/llm/tasks.py, where steps are updates
    updates: int = 0  # default number of updates of a task

    @property
    def unit(self) -> str:
        return "steps" if self.task is None else "updates"


CASES = {
    "ppo": Case("PPO CartPole-v1, 8 envs x 128, 4 epochs, minibatches of 256, 64-64 tanh", _ALL),
    "a2c": Case("A2C CartPole-v1, 8 envs x 5, 64-64 tanh", ("rlox", "rlox torch", "sb3", "original")),
    "dqn": Case("DQN CartPole-v1, 256-256, minibatches of 64, an update each step",
                ("rlox", "rlox torch", "sb3", "original"), 10_000),
    "sac": Case("SAC Pendulum-v1, 256-256, minibatches of 64, an update each step",
                ("rlox", "rlox torch", "sb3", "original"), 10_000),
    "custom": Case("PPO with a custom policy in PyTorch", ("rlox torch", "sb3", "original")),
    "solve": Case("tuned PPO until the last 100 episodes average 475", ("rlox", "sb3"), 100_000),
    "process": Case("a whole process: imports, training, 10 x 20 evaluation episodes, log, saved model",
                    ("rlox", "sb3", "original"), 50_000),
    "busy": Case("the same process while every other core is busy", ("control", "rlox"), 50_000),
    "grpo": Case("GRPO copies a digit, 10 prompts x 8 completions of 4 tokens, 78,400 parameters", ("rlox", "trl"),
                 task="copy", updates=300),
    "grpo-sum": Case("GRPO adds two digits, 16 prompts x 8 completions of 4 tokens, 78,400 parameters", ("rlox", "trl"),
                     task="sum", updates=300),
    "grpo-large": Case("GRPO, 8 prompts x 8 completions of 64 tokens, 2.4 million parameters", ("rlox", "trl"),
                       task="large", updates=8),
    "dpo": Case("DPO adds two digits, 32 pairs, 78,400 parameters", ("rlox", "trl", "trl precomputed"),
                task="dpo", updates=200),
}  # fmt: skip


def train_once(python: str, system: str, case: str, steps: int, seed: int, threads: int) -> dict[str, Any]:
    """Run one training in its own process; as `ask_worker`."""
    request = {"system": system, "case": case, "steps": steps, "seed": seed, "threads": threads}
    return ask_worker(python, request, threads)


def post_train_once(python: str, system: str, request: dict[str, Any]) -> dict[str, Any]:
    """Run one training of a language model in its own process, as described in benchmarks/llm/peer.py.

    The lists ``cpu_ms`` and ``wall_ms`` that the programs print are replaced by medians over the updates, and ``curve``
    by its means over each tenth of the training.

    Raises
    ------
    RuntimeError
        As `ask_worker`.
    """
    worker = program("ours.py" if system == "rlox" else "peer.py", "llm")
    answer = ask_worker(python, {**request, "precompute": system.endswith("precomputed")}, 1, worker)
    curve, n = answer["curve"], len(answer["curve"])
    tenths = [curve[n * i // 10 : n * (i + 1) // 10] for i in range(10)] if n >= 10 else [[x] for x in curve]
    # The first update, which includes imports and filling caches, is left out if there are others.
    units = {"cpu_ms": "cpu_s", "wall_ms": "wall_s"}
    medians = {ms: round(statistics.median(answer[ms] or [1e3 * answer[s]]), 2) for ms, s in units.items()}
    return {**answer, **medians, "curve": [round(statistics.mean(part), 3) for part in tenths]}


def save_start(path: Path) -> None:
    """Write the model that the sums begin with: see `save_start` of benchmarks/llm/tasks.py.

    Raises
    ------
    UsageError
        If that program fails.
    """
    done = subprocess.run(
        [sys.executable, program("tasks.py", "llm"), path], env=environment(1), cwd="/", capture_output=True, text=True
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise UsageError(f"rlox failed to create the model that the sums begin with: {reason}")


# Starts a command and waits for it and for all processes that it leaves running: rlox mirrors its record from one.
_WATCH = """
import ctypes, json, os, subprocess, sys, tempfile, time
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans become our children
# Files and no pipes, which would stay open as long as anything that was left behind.
with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as error:
    started = time.perf_counter()
    status = subprocess.run(sys.argv[1:], stdout=out, stderr=error).returncode
    wall = time.perf_counter() - started
    try:
        while True:
            os.waitpid(-1, 0)
    except ChildProcessError:
        pass
    texts = []
    for file in (out, error):
        file.seek(0)
        texts.append(file.read().decode(errors="replace"))
used = os.times()
print(json.dumps({"status": status, "output": texts[0][-500:], "error": texts[1][-500:],
                  "wall_s": wall, "cpu_s": used.children_user + used.children_system}))
"""


def process_once(command: list[str], folder: str) -> dict[str, Any]:
    """Return the wall time of a command, the CPU time of it and all processes it starts, and its ``output``.

    Raises
    ------
    RuntimeError
        If it fails.
    """
    watch = [sys.executable, "-c", _WATCH, *command]
    done = subprocess.run(watch, env=environment(1), cwd=folder, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    if result["status"]:
        raise RuntimeError((result["error"].strip().splitlines() or [f"status {result['status']}"])[-1])
    return result


def _whole(python: str, system: str, steps: int, seed: int, folder: str) -> list[str]:
    if system == "control":
        return [sys.executable, "-c", _CONTROL]
    if system == "rlox":
        words = ["algo=ppo", "env=CartPole-v1", f"total_timesteps={steps}", f"seed={seed}"]
        return [sys.executable, "-m", "rlox_cli.main", "train", *words, f"hydra.run.dir={folder}/run"]
    request = {"system": system, "case": "process", "steps": steps, "seed": seed, "whole": True}
    return [python, str(program("trainings.py")), json.dumps(request)]


def _read_return(system: str, output: str, folder: str) -> float:
    """Return the mean return of the last evaluation, from our record or from the last line of a peer's output."""
    if system != "rlox":
        return json.loads(output.splitlines()[-1])["eval_return"]
    rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text("utf-8").splitlines()]
    return [row["eval/mean_return"] for row in rows if "eval/mean_return" in row][-1]


@contextmanager
def _busy_cores():
    """Keep all cores but one busy."""
    spinners = [subprocess.Popen([sys.executable, "-c", _SPIN]) for _ in range(max(1, (os.cpu_count() or 2) - 1))]
    try:
        time.sleep(0.2)
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


def _process(python: str, system: str, steps: int, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = process_once(_whole(python, system, steps, seed, folder), folder)
        measured = {"wall_s": result["wall_s"], "cpu_s": result["cpu_s"]}
        if system == "control":
            return measured
        return {**measured, "eval_return": _read_return(system, result["output"], folder)}


def _busy(python: str, system: str, steps: int, seed: int) -> dict[str, Any]:
    quiet = _process(python, system, steps, seed)
    with _busy_cores():
        loaded = _process(python, system, steps, seed)
    return {**loaded, "quiet_wall_s": quiet["wall_s"], "slowdown": loaded["wall_s"] / quiet["wall_s"]}


def measure(
    case: str,
    steps: int,
    rounds: int,
    pythons: dict[str, str],
    report: Callable[[str], None],
    start: Path | None = None,
) -> dict[str, Any]:
    """Run every system of a case; they take turns in each round, and round k has seed k.

    `start` is a file written by `save_start`.

    Returns
    -------
    dict
        ``runs`` by system, ``faults`` of the systems left out, ``median`` of their CPU and wall seconds, ``ratio`` of
        the CPU seconds to ours, and ``wall`` at each system's better number of threads.

    Raises
    ------
    UsageError
        If rlox itself fails.
    """
    family = {system: system.split()[0] for system in CASES[case].systems}
    present = [system for system in family if family[system] in pythons or system == "control"]
    runs: dict[str, list[dict[str, Any]]] = {system: [] for system in present}
    walls: dict[str, list[float]] = {system: [] for system in present}
    faults: dict[str, str] = {}
    cores = os.cpu_count() or 1
    for seed in range(rounds):
        for system in [*present[seed % len(present) :], *present[: seed % len(present)]]:
            if system in faults:
                continue
            report(f"{case}, {steps:,} {CASES[case].unit}, seed {seed}: {system}")
            python = pythons.get(family[system], sys.executable)
            try:
                if (task := CASES[case].task) is not None:
                    begun = str(start) if task in _STARTED else None
                    one = post_train_once(python, system, {"task": task, "seed": seed, "steps": steps, "start": begun})
                elif case in ("process", "busy"):
                    one = {"process": _process, "busy": _busy}[case](python, system, steps, seed)
                else:
                    one = train_once(python, system, case, steps, seed, 1)
                    if case == "ppo" and cores > 1:
                        walls[system].append(train_once(python, system, case, steps, seed, cores)["wall_s"])
            except RuntimeError as e:
                if system.startswith("rlox"):
                    raise UsageError(f"{system} failed at {case}: {e}") from e
                faults[system] = str(e)
                continue
            runs[system].append(one)
    runs = {system: of for system, of in runs.items() if of and system not in faults}
    median = {
        system: {name: statistics.median(one[name] for one in of) for name in ("cpu_s", "wall_s")}
        for system, of in runs.items()
    }
    better = {}
    for system, of in median.items():
        other = statistics.median(walls[system]) if walls.get(system) else of["wall_s"]
        better[system] = {"wall_s": min(of["wall_s"], other), "threads": 1 if of["wall_s"] <= other else cores}
    mine = median[next(system for system in runs if system.startswith("rlox"))]
    result = {"case": case, "title": CASES[case].title, "steps": steps, "runs": runs, "faults": faults}
    result["median"] = median
    if case == "busy":
        slowdown = {system: statistics.median(one["slowdown"] for one in of) for system, of in runs.items()}
        return {**result, "slowdown": slowdown, "suffers": slowdown["rlox"] / slowdown["control"]}
    result["wall"] = better
    result["ratio"] = {system: round(of["cpu_s"] / mine["cpu_s"], 2) for system, of in median.items()}
    return result


def _choose_measure(of: list[dict[str, Any]]) -> str:
    """Return the one measure that all systems have, over the rounds.

    It is the mean return of 20 deterministic episodes after training, or the share of correct answers among sampled
    ones. Not every system reports the episodes of the training itself.
    """
    name, digits = ("sampled", 2) if "sampled" in of[0] else ("eval_return", 0)
    values = [run[name] for run in of if name in run]
    if not values:
        return ""
    return " to ".join(f"{value:.{digits}f}" for value in dict.fromkeys((min(values), max(values))))


def _notes(row: dict[str, Any], system: str) -> str:
    of = row["runs"][system]
    if row["case"] == "solve":
        solved = [run["steps"] for run in of if run["solved"]]
        reached = f", at {min(solved) // 1000}k to {max(solved) // 1000}k steps" if solved else ""
        return f"{len(solved)} of {len(of)} solved{reached}"
    if row["case"] == "busy":
        return f"{row['slowdown'][system]:.2f} times its wall time without load"
    if "cpu_ms" in of[0]:
        text = f"{statistics.median(run['cpu_ms'] for run in of):.3g} ms per update"
        greedy = [run["greedy"] for run in of if "greedy" in run]
        return text + (f", most likely answers correct: {min(greedy):.2f} to {max(greedy):.2f}" if greedy else "")
    if "shares" not in of[0]:
        return ""
    shares = {name: statistics.mean(run["shares"][name] for run in of) for name in of[0]["shares"]}
    return ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005)


def print_results(console, rows: list[dict[str, Any]]) -> None:
    """Print one line per case and system."""
    columns = ("system", "CPU s", "ratio", "wall s", "evaluation", "")
    for row in rows:
        console.print(Text.assemble((row["title"], "bold"), f", {_length(row)}, rounds: {_rounds(row)}"))
        table = make_table(*columns)
        for system, median in row["median"].items():
            wall = row["wall"][system] if "wall" in row else {"wall_s": median["wall_s"], "threads": 1}
            table.add_row(
                system,
                f"{median['cpu_s']:.3g}",
                f"{row['ratio'][system]:.3g}" if "ratio" in row else "",
                f"{wall['wall_s']:.3g}" + (f" ({wall['threads']} threads)" if wall["threads"] > 1 else ""),
                _choose_measure(row["runs"][system]),
                _notes(row, system),
            )
        print_table(console, table)
        if "suffers" in row:
            console.print(f"rlox slows down {row['suffers']:.2f} times as much as a loop of one thread")
        console.print()


def _length(row: dict[str, Any]) -> str:
    return f"{row['steps']:,} {CASES[row['case']].unit}"


def _rounds(row: dict[str, Any]) -> int:
    return max(len(of) for of in row["runs"].values())


def draw(rows: list[dict[str, Any]], caption: str) -> Figure:
    """Draw CPU seconds, one panel per case, with the ratio and what was learned."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    rows = [row for row in rows if "ratio" in row]
    columns = min(2, len(rows))
    lines = -(-len(rows) // columns)
    figure = Figure(figsize=(7.5 * columns, 2.8 * lines + 0.8))
    axes = figure.subplots(lines, columns, squeeze=False)
    for axis, row in zip(axes.flat, rows, strict=False):
        systems = list(row["median"])[::-1]
        seconds = [row["median"][system]["cpu_s"] for system in systems]
        longest = 0
        for k, system in enumerate(systems):
            axis.plot(seconds[k], k, "o", color="black" if system.startswith("rlox") else "tab:orange")
            learned = _choose_measure(row["runs"][system])
            label = f"{seconds[k]:.2g} s, {row['ratio'][system]:.2g}x" + (f", evaluation {learned}" if learned else "")
            style = {"xytext": (8, 0), "textcoords": "offset points", "va": "center", "fontsize": _FIGURE_SIZE}
            axis.annotate(label, (seconds[k], k), **style)
            longest = max(longest, len(label))
        axis.set_yticks(range(len(systems)), systems)
        axis.set(xscale="log", xlabel="CPU seconds (median)", ylim=(-0.6, len(systems) - 0.4))
        # Leave as much of the axis free next to the slowest system as the longest text takes.
        decades, share = math.log10(max(seconds) / min(seconds)) + 0.3, longest * _FIGURE_SIZE * 0.6 / _PANEL_POINTS
        axis.set_xlim(min(seconds) / 1.5, max(seconds) * 10 ** (0.1 + decades * share / (1 - share)))
        low, high = axis.get_xlim()
        one_decade = math.log10(high / low) < 1.6
        axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if one_decade else (1.0,), numticks=6))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axis.grid(True, axis="x", alpha=0.3)
        axis.set_title(textwrap.fill(f"{row['title']}, {_length(row)}", 66), fontsize=9)
    for axis in list(axes.flat)[len(rows) :]:
        axis.axis("off")
    inch = 1 / figure.get_figheight()
    figure.text(0.5, 0.06 * inch, textwrap.fill(caption, 80 * columns), ha="center", fontsize=8)
    figure.tight_layout(rect=(0, 0.4 * inch, 1, 1))
    return figure


def caption(result: dict[str, Any]) -> str:
    """Return the caption of the figure; `result` is as in ``train.json``."""
    known = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return (
        f"{result['machine']}; medians of {result['rounds']} rounds, one thread; evaluation: mean return of 20 "
        f"deterministic episodes after training, for language models the share of correct sampled answers, lowest to "
        f"highest round; {known}"
    )


def main(cases: list[str], steps: list[int], rounds: int, peer_pythons: list[Path], out: Path | None) -> None:
    """Measure, print and, with `out`, write ``train.json`` and ``train.png`` into that folder."""
    console = TextConsole()
    for case in cases:
        if case not in CASES:
            raise UsageError(f"case must be one of {', '.join(CASES)}, got {case!r}")
    lacking = _WATCHED if sys.platform == "win32" else ()  # Windows does not report the CPU time of children
    for case in {*cases} & {*lacking}:
        raise UsageError(f"rlox bench train {case}: this case needs Linux or macOS, got Windows; leave it out")
    cases = cases or [case for case in CASES if CASES[case].task is None and case not in lacking]
    out = None if out is None else output_path("--out", out, folder=True)
    program("trainings.py")  # without a checkout, nothing is created or printed
    pythons = find_systems(peer_pythons, _SYSTEMS)
    written = [case for case in cases if CASES[case].task is not None]
    if written and find_spec("transformers") is None:
        raise UsageError(
            f"rlox bench train {written[0]}: transformers must be installed, but is not; "
            'pip install "rlox-cli[llm]", or in a checkout: pip install -e ".[llm]"'
        )
    if written and peer_pythons and "trl" not in pythons:
        named = ", ".join(map(str, peer_pythons))
        raise UsageError(
            f"rlox bench train {written[0]}: --peer-python must name an interpreter that has TRL, got {named}; "
            "install it there with pip install 'trl==1.16.*', or leave --peer-python out"
        )
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    plan = []
    for case in cases:
        own, updates = CASES[case].steps, CASES[case].updates
        plan += [(case, n) for n in ([own] if own else steps or [updates or 100_000])]
    rows: list[dict[str, Any]] = []
    stopped: KeyboardInterrupt | None = None
    with Parts(len(plan)) as parts, tempfile.TemporaryDirectory() as folder:
        start = None
        try:
            if any(CASES[case].task in _STARTED for case in cases):
                save_start(start := Path(folder, "start.pt"))
            for case, n in plan:
                parts.begin(f"{case}, {n:,} {CASES[case].unit}")
                rows.append(measure(case, n, rounds, pythons, parts.describe, start))
        except KeyboardInterrupt as e:
            stopped = e  # what has been measured is still printed
    print_results(console, rows)
    versions = {k: v for row in rows for of in row["runs"].values() for k, v in of[0].get("versions", {}).items()}
    console.print("  ".join(f"{name} {version}" for name, version in versions.items()))
    if stopped is not None:
        raise stopped
    if out is not None:
        words = ["rlox bench train", *cases, *(f"--steps {n}" for n in steps), f"--rounds {rounds}"]
        words += ["--peer-python PYTHON" for _ in peer_pythons]
        result = {**provenance(" ".join(words)), "versions": versions, "rounds": rounds, "results": rows}
        (out / "train.json").write_text(json.dumps(result, indent=1) + "\n")
        if any("ratio" in row for row in rows):
            draw(rows, caption(result)).savefig(out / "train.png", dpi=90)
            console.print(f"written: {out / 'train.json'}, {out / 'train.png'}")
        else:
            console.print(f"written: {out / 'train.json'}; there is no picture of busy alone")
    faults = [f"{row['case']}, {system}: {fault}" for row in rows for system, fault in row["faults"].items()]
    if faults:
        raise UsageError("left out of the comparison:\n  " + "\n  ".join(faults))
