"""Simulate actors and one learner with measured costs: what do 10, 100 and 1,000 workers bring?

usage: simulate.py [--costs benchmarks/distributed_speed.json] [--workers 1 2 10 100 1000] [--check 32] [--out FILE]

The discrete-event model works like `rlox.distributed.ActorCollector`: the learner requests one more rollout from every
actor that owes fewer than ``rollouts_ahead``, waits for ``rollouts_per_update`` rollouts, and updates. An actor serves
its requests one after the other. Each message takes the time of its bytes on the learner's network, which carries one
message at a time each way, plus the latency. `--check` trains with real actors whose environments wait (`cases.Slow`)
and compares.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import statistics
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cases import alone

from rlox.checkpoint import versions
from rlox_cli.bench.machine import provenance

_WARM = 0.2  # share of the updates that is left out at the start
_LATENCY_S = 100e-6  # one way, in one machine room
_BYTES_PER_S = 1.25e9  # 10 Gbit/s
_CHECKED = (1, 2, 4, 8, 16, 32)  # real actors
_WAYS = ((1, 1), (2, 1), (1, 4))  # rollouts ahead, and per update
_JITTER = 0.2  # deviation over mean of the actors' times


@dataclass(frozen=True)
class Plant:
    """Actors, their network, and the learner. Times are in seconds."""

    n_actors: int
    frames_per_rollout: int
    collect_s: float  # time of an actor for a rollout
    collect_cv: float  # standard deviation of this time over its mean
    update_s: float  # time of the learner for each update, whatever is in it
    message_s: float  # time of the learner for each rollout, whatever is in it: request, receive
    frame_s: float  # time of the learner for each frame: copy, weigh, learn
    rollout_bytes: int = 0
    weights_bytes: int = 0
    latency_s: float = 0.0  # one way
    bytes_per_s: float = math.inf  # each way, of the learner's network
    answer_s: float = 0.0  # from an actor's last step until the learner notices, without the network
    rollouts_per_update: int = 1
    rollouts_ahead: int = 1
    in_turn: bool = False  # rollouts are taken from the actors in turn, not as they come

    @property
    def rollout_s(self) -> float:
        """Time of the learner for each rollout."""
        return self.message_s + self.frame_s * self.frames_per_rollout


class _Link:
    """Carries one message at a time."""

    def __init__(self, plant: Plant):
        self._plant = plant
        self._free = 0.0

    def arrival(self, now: float, size: int) -> float:
        self._free = max(now, self._free) + size / self._plant.bytes_per_s
        return self._free + self._plant.latency_s


def simulate(plant: Plant, updates: int, seed: int = 0) -> dict[str, float]:
    """Return frames per second, the share of time in which the learner waits, and the age of rollouts in updates."""
    rng = random.Random(seed)
    events: list[tuple[float, int, str, int, int]] = []  # when, number, what, which actor, version of its weights
    numbers = iter(range(1 << 62))
    out, back = _Link(plant), _Link(plant)
    waiting: list[deque[int]] = [deque() for _ in range(plant.n_actors)]  # versions requested from each actor
    busy = [False] * plant.n_actors
    owed = [0] * plant.n_actors
    due = deque(range(plant.n_actors))  # actors that owe less than they may
    arrived: deque[tuple[int, int]] = deque()
    by_actor: list[deque[int]] = [deque() for _ in range(plant.n_actors)]
    shape = 1 / plant.collect_cv**2 if plant.collect_cv > 0 else 0.0

    def push(when: float, what: str, actor: int, version: int) -> None:
        heapq.heappush(events, (when, next(numbers), what, actor, version))

    def begin(now: float, actor: int) -> None:
        took = rng.gammavariate(shape, plant.collect_s / shape) if shape else plant.collect_s
        busy[actor] = True
        push(now + took, "done", actor, waiting[actor].popleft())

    def happen(until: float) -> float:
        """Process everything up to a time, or only the next event if it is infinite; return the time reached."""
        now = until
        while events and events[0][0] <= until:
            now, _, what, actor, version = heapq.heappop(events)
            if what == "asked":
                waiting[actor].append(version)
                if not busy[actor]:
                    begin(now, actor)
            elif what == "done":
                busy[actor] = False
                push(back.arrival(now, plant.rollout_bytes) + plant.answer_s, "answer", actor, version)
                if waiting[actor]:
                    begin(now, actor)
            else:
                arrived.append((actor, version))
                by_actor[actor].append(version)
            if until == math.inf:
                return now
        return now if until == math.inf else until

    def take() -> tuple[int, int] | None:
        nonlocal turn
        if plant.in_turn:
            if not by_actor[turn]:
                return None
            actor, version = turn, by_actor[turn].popleft()
            arrived.remove((actor, version))
            turn = (turn + 1) % plant.n_actors
            return actor, version
        if not arrived:
            return None
        actor, version = arrived.popleft()
        by_actor[actor].popleft()
        return actor, version

    now = idle = begun = 0.0
    turn = version = counted = 0
    lags: list[int] = []
    warm = int(_WARM * updates)
    while version < updates:
        for actor in due:
            while owed[actor] < plant.rollouts_ahead:
                owed[actor] += 1
                push(out.arrival(now, plant.weights_bytes), "asked", actor, version)
        due.clear()
        for _ in range(plant.rollouts_per_update):
            happen(now)
            while (taken := take()) is None:
                after = happen(math.inf)
                idle += after - now
                now = after
            actor, of = taken
            owed[actor] -= 1
            due.append(actor)
            lags.append(version - of)
            counted += 1
            now += plant.rollout_s
        now += plant.update_s
        version += 1
        if version == warm:
            begun, idle, counted = now, 0.0, 0
            lags.clear()
    lags.sort()
    return {
        "frames_per_s": counted * plant.frames_per_rollout / (now - begun),
        "learner_idle": idle / (now - begun),
        "lag_mean": statistics.fmean(lags),
        "lag_p50": lags[len(lags) // 2],
        "lag_p95": lags[int(0.95 * len(lags))],
        "lag_max": lags[-1],
    }


def ceiling(plant: Plant) -> dict[str, float]:
    """Return the frames per second that each part alone would allow."""
    n, frames = plant.n_actors, plant.frames_per_rollout
    trip = plant.collect_s / plant.rollouts_ahead
    if plant.rollouts_ahead == 1:
        trip += 2 * plant.latency_s + plant.answer_s
    return {
        "actors": n * frames / max(trip, plant.collect_s),
        "learner": frames / (plant.rollout_s + plant.update_s / plant.rollouts_per_update),
        "network in": frames * plant.bytes_per_s / max(plant.rollout_bytes, 1),
        "network out": frames * plant.bytes_per_s / max(plant.weights_bytes, 1),
    }


def variants(plant: Plant) -> Iterator[tuple[str, Plant]]:
    """Yield the settings that may help where it saturates."""
    share = max(1, plant.n_actors // 4)
    grown = replace(
        plant,
        frames_per_rollout=4 * plant.frames_per_rollout,
        collect_s=4 * plant.collect_s,
        rollout_bytes=4 * plant.rollout_bytes,
    )
    yield "as it is", plant
    yield "rollouts_ahead=2", replace(plant, rollouts_ahead=2)
    yield "rollouts_per_update=n/4", replace(plant, rollouts_per_update=share)
    yield "rollouts 4 times as big", grown
    yield "both of the last", replace(grown, rollouts_per_update=share)


def plants(costs: dict[str, Any]) -> dict[str, Plant]:
    """Return actors of each speed, each on a machine of its own, over the network of one machine room."""
    learner = {key: costs[key] for key in ("update_s", "frame_s", "rollout_bytes", "weights_bytes")}
    shared: dict[str, Any] = {
        **learner,
        "n_actors": 1,
        "frames_per_rollout": costs["frames_per_rollout"],
        "message_s": costs["message_s"] + costs["codec_s"],
        "latency_s": _LATENCY_S,
        "bytes_per_s": _BYTES_PER_S,
        "collect_cv": _JITTER,
    }
    return {
        "native environments": Plant(collect_s=costs["collect_native_s"], **shared),
        "gymnasium environments": Plant(collect_s=costs["collect_gymnasium_s"], **shared),
        "a simulator of 10 ms a step": Plant(collect_s=costs["n_steps"] * 10e-3, **shared),
    }


def study(costs: dict[str, Any], workers: list[int]) -> dict[str, Any]:
    """Simulate every plant with each number of workers, and the settings that may help."""
    found: dict[str, Any] = {}
    for name, plant in plants(costs).items():
        rows = []
        for n in workers:
            for label, variant in variants(replace(plant, n_actors=n)):
                updates = max(500, 12 * n * variant.rollouts_ahead // variant.rollouts_per_update)
                limits = ceiling(variant)
                least = min(limits, key=limits.__getitem__)
                rows.append({"workers": n, "variant": label, **simulate(variant, updates), "limit": least})
        found[name] = {"plant": asdict(plant), "rows": rows}
    return found


def check(most: int) -> list[dict[str, Any]]:
    """Compare real trainings with the model, which gets the costs of each training and not its speed.

    The actors are threads whose environments sleep, so that dozens of them do not need a processor each.
    """
    rows = []
    n_steps, slow_s = 16, 0.02
    cases = dict.fromkeys((n, ahead, min(n, share)) for n in _CHECKED if n <= most for ahead, share in _WAYS)
    for n, ahead, share in cases:
        seen = alone(
            env="",
            slow_s=slow_s,
            frames=max(20, 12 * n) * n_steps,
            n_actors=n,
            n_envs=1,
            n_steps=n_steps,
            rollouts_ahead=ahead,
            rollouts_per_update=share,
        )
        plant = Plant(
            n_actors=n,
            frames_per_rollout=n_steps,
            collect_s=seen["collect_s"],
            collect_cv=seen["collect_cv"],
            update_s=seen["learner_busy_per_update_s"],
            message_s=0.0,
            frame_s=0.0,
            rollouts_per_update=share,
            rollouts_ahead=ahead,
            in_turn=True,
        )
        model = simulate(plant, 4000)
        error = model["frames_per_s"] / seen["frames_per_s"] - 1
        rows.append(
            {"n_actors": n, "rollouts_ahead": ahead, "rollouts_per_update": share, "measured": seen, "model": model,
             "error": error}
        )  # fmt: skip
        print(
            f"{n} actors, ahead {ahead}, per update {share}: measured {seen['frames_per_s']:.0f}, model "
            f"{model['frames_per_s']:.0f} ({error:+.1%}); learner idle {seen['learner_idle']:.0%}, "
            f"{model['learner_idle']:.0%}; lag {seen['lag_mean']:.2f}, {model['lag_mean']:.2f}"
        )
    return rows


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw frames per second and lag over workers, a line for each variant."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(found), figsize=(4.2 * len(found), 6.5), sharex=True, squeeze=False)
    for column, (name, case) in enumerate(found.items()):
        for variant in dict.fromkeys(row["variant"] for row in case["rows"]):
            rows = [row for row in case["rows"] if row["variant"] == variant]
            workers = [row["workers"] for row in rows]
            for axis, key in zip(axes[:, column], ("frames_per_s", "lag_p95"), strict=True):
                axis.plot(workers, [row[key] for row in rows], marker="o", label=variant)
        axes[0, column].set(title=name, xscale="log", yscale="log")
        axes[1, column].set(xlabel="workers", yscale="symlog", ylim=(0, None))
    axes[0, 0].set_ylabel("frames per second")
    axes[1, 0].set_ylabel("lag, 95th percentile, updates")
    axes[0, -1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--costs", type=Path, default=Path("benchmarks/distributed_speed.json"))
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2, 10, 100, 1000])
    parser.add_argument(
        "--check", type=int, default=0, metavar="N", help="train with up to N real actors and compare; 0: keep --out's"
    )
    parser.add_argument("--out", type=Path, help="JSON file; the curves go next to it as a PNG")
    args = parser.parse_args()
    costs = json.loads(args.costs.read_text())["costs"]
    before = json.loads(args.out.read_text()) if args.out and args.out.is_file() else {}
    if args.check:
        rows = check(args.check)
        loads = [row["measured"]["load_after"] for row in rows]
        note = f"the machine did other work too: load averages of {min(loads):.0f} to {max(loads):.0f}"
        before = {"check": rows, "check_note": note}
    found = {
        **provenance("python benchmarks/distributed/simulate.py --check 32"),
        "versions": versions(),
        "costs": costs,
        "cases": study(costs, args.workers),
        "check": before.get("check", []),
        "check_note": before.get("check_note", "not made"),
    }
    for name, case in found["cases"].items():
        print(name)
        for row in case["rows"]:
            print(
                f"  {row['workers']:5} {row['variant']:28} {row['frames_per_s']:12,.0f} frames/s, learner idle "
                f"{row['learner_idle']:4.0%}, lag {row['lag_p50']}/{row['lag_p95']}/{row['lag_max']}, {row['limit']}"
            )
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
        draw(found["cases"], args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
