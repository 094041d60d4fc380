"""Does `rlox bench learn` report FAIL if there is a bug? Six bugs are planted into running code and judged by it.

usage: verdicts.py nominal [--runs DIR]            60 runs of each cell, into rlox_cli/bench/nominal
       verdicts.py pilot [--runs DIR] [BUG ...]    power by the number of seeds, on separate seeds
       verdicts.py judge [--runs DIR] [BUG ...]    false alarms, then each bug with the seeds named below: verdicts.json

This script plants a bug into the imported classes, in a separate process which then runs the command; the library
contains none of it. The cells and numbers of seeds in `BUGS` were chosen after the pilot and before the judging.
Nominal runs use the seeds 1000-1059, the pilot seeds from 2000 on, judged runs seeds from 3000 on, and runs without a
bug seeds from 4000 on.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rlox.checkpoint import versions
from rlox_cli.bench import fingerprint, learn, seeds
from rlox_cli.bench.judge import FAIL
from rlox_cli.bench.machine import provenance

N_NOMINAL, NOMINAL_SEED, PILOT_SEED, JUDGED_SEED, SOUND_SEED = 60, 1000, 2000, 3000, 4000
N_PILOT = 8
SETS = 5  # sets judged by the command, each with its own seeds
N_SOUND, SOUND_SETS = 5, 2  # seeds and sets of runs without a bug
RESAMPLED = 100  # sets drawn from existing runs
SIZES = (2, 3, 4, 5, 6)
# Settings in addition to the tuned ones. For DQN, a tenth of the steps is enough, but cannot reach the reference.
CELLS = {"ppo-CartPole-v1": [], "ppo-Pendulum-v1": [], "dqn-CartPole-v1": ["total_timesteps=5_000", "~reference"]}


def change_config(cls: type, methods: tuple[str, ...], change: Callable[[object], dict]) -> None:
    """Let `methods` of `cls` see another configuration than the requested one."""

    def plant(original: Callable) -> Callable:
        def planted(self, *args, **kwargs):
            asked = self.config
            self.config = replace(asked, **change(asked))
            try:
                return original(self, *args, **kwargs)
            finally:
                self.config = asked

        return planted

    for name in methods:
        setattr(cls, name, plant(getattr(cls, name)))


def change_gae(change: Callable[[dict], None]) -> None:
    """Let the collector call its kernel with other arguments."""
    import rlox.collectors

    original = rlox.collectors.compute_gae_batched_f32
    names = ("rewards", "values", "dones", "last_values", "n_steps", "gamma", "gae_lambda")

    def planted(*args, **kwargs):
        arguments = {**dict(zip(names, args, strict=True)), **kwargs}
        change(arguments)
        positional = [arguments.pop(name) for name in names]
        return original(*positional, **arguments)

    rlox.collectors.compute_gae_batched_f32 = planted


def limits_as_terminations() -> None:
    def change(arguments):
        arguments["dones"] = arguments["dones"] | arguments.pop("truncated")
        del arguments["next_values"]

    change_gae(change)


def gamma_off() -> None:
    change_gae(lambda arguments: arguments.update(gamma=arguments["gamma"] - 0.01))


def value_loss_halved() -> None:
    from rlox.algorithms.ppo import PPO

    change_config(PPO, ("update", "update_native"), lambda asked: {"vf_coef": asked.vf_coef / 2})


def advantages_raw() -> None:
    from rlox.algorithms.ppo import PPO

    change_config(PPO, ("update", "update_native"), lambda asked: {"normalize_advantages": False})


def target_still() -> None:
    from rlox.algorithms.dqn import DQN

    change_config(DQN, ("rounds", "_prepare"), lambda asked: {"target_update_freq": 2**61})


def last_episode_dropped() -> None:
    from rlox.checkpoint.counters import Counters

    original = Counters.ended
    Counters.ended = lambda self, returns, lengths: original(self, returns[:-1], lengths[:-1])


@dataclass(frozen=True)
class Bug:
    """A planted bug, the cell to look for it, and the number of seeds that finds it at least four times out of five."""

    title: str
    cell: str
    n_seeds: int
    plant: Callable[[], None]


BUGS = {
    "limits": Bug("time limits treated as terminations", "ppo-Pendulum-v1", 4, limits_as_terminations),
    "value": Bug("value loss halved", "ppo-CartPole-v1", 4, value_loss_halved),
    "gamma": Bug("gamma off by 0.01", "ppo-Pendulum-v1", 5, gamma_off),
    "raw": Bug("advantages not normalised", "ppo-CartPole-v1", 4, advantages_raw),
    "target": Bug("target network never updated", "dqn-CartPole-v1", 3, target_still),
    "dropped": Bug("last episode of each rollout dropped from statistics", "ppo-Pendulum-v1", 3, last_episode_dropped),
}
# Runs without a bug, for the cells above.
SOUND = {f"nothing-{cell}": Bug("nothing", cell, N_SOUND, lambda: None) for cell in CELLS}


def command(cell: str, n_seeds: int, first_seed: int, runs: Path, *more: str) -> list[str]:
    """Return the arguments of `rlox bench learn`."""
    algo, env = cell.split("-", 1)
    words = ["bench", "learn", f"algo={algo}", f"env={env}", *CELLS[cell], "--seeds", str(n_seeds)]
    return [*words, "--first-seed", str(first_seed), "--runs", str(runs), "--json", *more]


def run_command(words: list[str]) -> tuple[int, dict]:
    """Run the command in this process, and return its exit code and result."""
    from rlox_cli.main import app

    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        code = app(words, standalone_mode=False)
    if not out.getvalue():
        raise RuntimeError(error.getvalue())
    return code, json.loads(out.getvalue())


def planted(name: str, first_seed: int, n_seeds: int, sets: int, runs: Path, *more: str) -> list[tuple[int, dict]]:
    """Return exit code and cell of each set, from a process in which the bug is planted."""
    words = [sys.executable, __file__, "child", name, str(first_seed), str(n_seeds), str(sets), str(runs), *more]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def child(name: str, first_seed: str, n_seeds: str, sets: str, runs: str, *more: str) -> None:
    bug = {**BUGS, **SOUND}[name]
    bug.plant()
    for k in range(int(sets)):
        first = int(first_seed) + k * int(n_seeds)
        code, found = run_command(command(bug.cell, int(n_seeds), first, Path(runs), *more))
        print(json.dumps([code, found["cells"][bug.cell]]), flush=True)


def make_nominal(runs: Path) -> None:
    for cell in CELLS:
        words = command(cell, N_NOMINAL, NOMINAL_SEED, runs / "nominal", "--score-only")
        _, found = run_command(words)
        of = found["cells"][cell]
        path = fingerprint.nominal_path(*cell.split("-", 1))
        path.parent.mkdir(exist_ok=True)
        kept = {
            **provenance("python benchmarks/verdicts.py nominal"),
            "versions": versions(),
            "overrides": CELLS[cell],
            "settings": of["settings"],
            "quantities": of["quantities"],
        }
        path.write_text(json.dumps(kept) + "\n")
        print(f"{cell}: IQM {of['iqm']:.2f} over {len(of['final'])} seeds")


def nominal_runs(cell: str) -> list[dict[str, float]]:
    shipped = fingerprint.load_nominal(*cell.split("-", 1))
    return list(fingerprint.from_table(shipped["quantities"]).values())


def power(ours: list[dict[str, float]], nominal: list[dict[str, float]], size: int) -> float:
    """Return the share of sets of `size` runs drawn from `ours` whose fingerprint differs."""
    rng = np.random.default_rng(0)
    drawn = [rng.choice(len(ours), size, replace=False) for _ in range(RESAMPLED)]
    return float(np.mean([fingerprint.compare([ours[k] for k in rows], nominal).differs for rows in drawn]))


def pilot(name: str, runs: Path) -> dict[int, float]:
    """Return the power by the number of seeds."""
    bug = BUGS[name]
    ((_, cell),) = planted(name, PILOT_SEED, N_PILOT, 1, runs / name, "--score-only")
    ours, found = list(fingerprint.from_table(cell["quantities"]).values()), {}
    for size in SIZES:
        found[size] = power(ours, nominal_runs(bug.cell), size)
        print(f"{name}, {size} seeds: power {found[size]:.2f}", flush=True)
        if found[size] == 1.0:
            break
    return found


def false_alarms(cell: str, size: int) -> int:
    """Return how many of `RESAMPLED` sets drawn from the nominal runs differ from the remaining nominal runs."""
    runs, rng = nominal_runs(cell), np.random.default_rng(1)
    wrong = 0
    for _ in range(RESAMPLED):
        chosen = set(rng.choice(len(runs), size, replace=False).tolist())
        ours = [runs[k] for k in chosen]
        wrong += fingerprint.compare(ours, [run for k, run in enumerate(runs) if k not in chosen]).differs
    return wrong


def judge(name: str, bug: Bug, first_seed: int, n_sets: int, runs: Path) -> dict:
    """Return the verdicts of the command on the sets of a bug."""
    sets = planted(name, first_seed, bug.n_seeds, n_sets, runs / name)
    verdicts = [{one["by"]: one["verdict"] for one in cell["verdicts"]} for _, cell in sets]
    first = sets[0][1]["fingerprint"]["differing"]
    ours = [run for _, cell in sets for run in fingerprint.from_table(cell["quantities"]).values()]
    found = {
        "bug": bug.title,
        "cell": bug.cell,
        "n_seeds": bug.n_seeds,
        "sets": len(sets),
        "fails": sum(code == learn.EXIT_CODES[FAIL] for code, _ in sets),
        "fails_by": {by: sum(of.get(by) == FAIL for of in verdicts) for by in ("reference", "fingerprint")},
        "fails_resampled": power(ours, nominal_runs(bug.cell), bug.n_seeds),
        "iqm": [cell["iqm"] for _, cell in sets],
        "first_set_differs": [str(fingerprint.Quantity(**one)) for one in first[:5]],
    }
    print(
        f"{bug.title}, {bug.cell}, {bug.n_seeds} seeds: {found['fails']} of {len(sets)} sets FAIL {found['fails_by']}"
    )
    for one in found["first_set_differs"]:
        print(f"  {one}", flush=True)
    return found


def main() -> None:
    if sys.argv[1:2] == ["child"]:
        child(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("nominal", "pilot", "judge"))
    parser.add_argument("bugs", nargs="*", metavar="BUG", help=f"of {', '.join(BUGS)}; all by default")
    parser.add_argument(
        "--runs", type=Path, default=Path("outputs/verdicts"), help="run folders; finished ones are kept"
    )
    args = parser.parse_args()
    names = args.bugs or list(BUGS)
    path = Path(__file__).with_suffix(".json")
    saved = json.loads(path.read_text()) if path.is_file() else {}
    if args.what == "nominal":
        make_nominal(args.runs)
        return
    if args.what == "pilot":
        found = {name: pilot(name, args.runs / "pilot") for name in names}
        saved = {**saved, "pilot": {**saved.get("pilot", {}), **found}}
    else:
        for cell in dict.fromkeys(BUGS[name].cell for name in names):
            alarms = {}
            for size in sorted({N_SOUND, *(bug.n_seeds for bug in BUGS.values() if bug.cell == cell)}):
                alarms[size] = false_alarms(cell, size)
                print(f"{cell}, {size} seeds: {alarms[size]} of {RESAMPLED} resampled sets FAIL", flush=True)
            name = f"nothing-{cell}"
            fresh = judge(name, SOUND[name], SOUND_SEED, SOUND_SETS, args.runs)
            saved.setdefault("nothing", {})[cell] = {"sets": RESAMPLED, "fails": alarms, "fresh": fresh}
        for name in names:
            saved.setdefault("bugs", {})[name] = judge(name, BUGS[name], JUDGED_SEED, SETS, args.runs / "judged")
    head = {**provenance("python benchmarks/verdicts.py pilot; … judge"), "versions": versions()}
    path.write_text(json.dumps({**saved, **head, "level": fingerprint.LEVEL, "windows": seeds.WINDOWS}) + "\n")


if __name__ == "__main__":
    main()
