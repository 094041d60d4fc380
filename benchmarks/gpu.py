"""Measure rlox on a GPU: environments and networks on one device, next to the kernels of the CPU.

usage: gpu.py steps        [--n-envs 4096 16384 65536] [--compile]   PPO on CartPole-v1, 4 epochs and 1
       gpu.py time-to-475  [--n-envs 4096] [--seeds 0 … 9]           seconds until N episodes have a mean of 475
       gpu.py crossover    [--n-envs 8 … 2048] [--units 64 256]      PPO by kernels on the CPU, and on the GPU
       gpu.py mappo        [--n-envs 1024 4096] [--compile]          MAPPO on GridPursuit-v0, three agents
       gpu.py sac          [--units 256 1024] [--systems rlox sb3]   SAC on HalfCheetah-v5, one update per step
       gpu.py update-error                                           weights after one update, against the CPU's
       gpu.py resume                                                 2N steps against N, a checkpoint, and N more
       options of all: [--device cuda] [--seconds 5] [--out FILE]

Every result is printed as a line of JSON, with the card and the versions. Speeds are those of a training in progress:
the first updates, in which PyTorch compiles and captures graphs, do not count, and are reported as ``warm_up_s``.
`time-to-475` looks at the last N episodes of N environments, because the last hundred of thousands that end together
are those of a time limit, and evaluates the policy afterwards. It counts everything from the call of ``train``, except
that a short training before the first seed pays what a process pays once. FILE keeps the results of the other
measurements. ``--device cpu`` runs the same tensor programs on the CPU, to test this script.
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rlox
from rlox.algorithms import MAPPO, PPO, SAC
from rlox.callbacks import Callback
from rlox.checkpoint import load_checkpoint, versions
from rlox_cli.bench.machine import provenance

Row = dict[str, Any]

# Found by a search with 1,024 environments: the fewest updates with which three seeds of three reach 475 in the first
# 640 steps of each environment, of which 500 are the shortest time for 100 whole episodes.
LEARNING: dict[str, Any] = {
    "n_steps": 32,
    "n_epochs": 4,
    "learning_rate": 3e-3,
    "gamma": 0.98,
    "gae_lambda": 0.95,
    "ent_coef": 0.0,
    "max_grad_norm": 0.5,
}
MINIBATCHES = 8
THRESHOLD = 475.0  # of CartPole-v1
N_EVALUATED = 20  # episodes
SAC_STEPS = 50_000  # at most; SAC reports every hundredth of them
WARM_UP = 6  # updates: the first ones run eagerly, then graphs are captured
NOT_LEARNED = ("environment", "statistics", "generators")  # sections of a checkpoint


def settings(n_envs: int, **changes: Any) -> dict[str, Any]:
    """Return PPO's settings for N environments: always the same number of minibatches."""
    chosen = {**LEARNING, **changes}
    return {**chosen, "batch_size": max(2, n_envs * chosen["n_steps"] // MINIBATCHES)}


def where(device: str) -> dict[str, Any]:
    """Return the arguments that place environments and networks on a device, the environments as tensors."""
    return {"device": device, "backend": "torch", "env_backend": "tensor"}


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


class Speed(Callback):
    """Measures the speed of a training from its update number `warm_up` on, and stops it after `seconds`.

    Attributes
    ----------
    warm_up_s : float
        Seconds from the start to the first update that counts.
    steps, s : int, float
        Environment steps and seconds that count.
    """

    def __init__(self, device: str, seconds: float, warm_up: int = WARM_UP, start: int = 0):
        self._device, self._seconds, self._warm_up, self._start = device, seconds, warm_up, start
        self.warm_up_s = self.s = 0.0
        self.steps = 0
        self._calls = 0
        self._began = self._from = time.perf_counter()
        self._first = 0

    def on_training_start(self, **info: Any) -> None:
        self._began = time.perf_counter()

    def on_step(self, step: int, **info: Any) -> bool:
        if step < self._start:
            return True
        self._calls += 1
        if self._calls < self._warm_up:
            return True
        synchronize(self._device)
        now = time.perf_counter()
        if self._calls == self._warm_up:
            self.warm_up_s, self._from, self._first = now - self._began, now, step
            return True
        self.steps, self.s = step - self._first, now - self._from
        return self.s < self._seconds

    def row(self) -> Row:
        if not self.steps:
            raise SystemExit("gpu.py: the training ended before its warm-up did; it needs more steps")
        return {
            "steps_per_second": round(self.steps / self.s),
            "steps": self.steps,
            "seconds": round(self.s, 3),
            "warm_up_s": round(self.warm_up_s, 2),
        }


class Reached(Callback):
    """Stops a training when the mean return of the last `n` episodes is at least `THRESHOLD`."""

    def __init__(self, n: int) -> None:
        self.steps: int | None = None  # environment steps until then
        self.s = 0.0  # seconds until then
        self._began = 0.0
        self._returns: collections.deque[float] = collections.deque(maxlen=n)

    def on_training_start(self, **info: Any) -> None:
        self._began = time.perf_counter()

    def on_rollout_end(self, batch: Any, **info: Any) -> None:
        self._returns.extend(batch.episode_returns.tolist())

    def on_step(self, step: int, **info: Any) -> bool:
        if len(self._returns) < self._returns.maxlen or statistics.fmean(self._returns) < THRESHOLD:
            return True
        self.steps, self.s = step, time.perf_counter() - self._began
        return False


def measure_ppo(n_envs: int, placed: dict[str, Any], seconds: float, warm_up: int = WARM_UP, **changes: Any) -> Row:
    """Return the speed of PPO on CartPole-v1, with N environments and networks placed by the arguments `placed`."""
    speed = Speed(placed["device"], seconds, warm_up)
    chosen = settings(n_envs, **changes)
    algorithm = PPO("CartPole-v1", n_envs, seed=0, callbacks=[speed], **placed, **chosen)
    last = algorithm.train(10**12)
    algorithm.close()
    torch.compiler.reset()  # or the next size would be compiled for all sizes
    # What the last round took: the device may still work on it when the loop reads the clock, but not in the next one.
    shares = {name: round(last[f"time/{name}"] * 1e3, 2) for name in ("collect_s", "update_s")}
    row = {"n_envs": n_envs, "units": chosen.get("hidden_sizes", [64, 64])[0], **speed.row()}
    return {**row, "collect_ms": shares["collect_s"], "update_ms": shares["update_s"]}


def steps(args: argparse.Namespace) -> Iterator[Row]:
    """Yield the speed of PPO for each number of environments and epochs; ``--compile`` adds compiled losses."""
    for n_envs in args.n_envs or (4096, 16384, 65536):
        for n_epochs in args.n_epochs or (LEARNING["n_epochs"], 1):
            for compiled in (False, True) if args.compile else (False,):
                row = measure_ppo(n_envs, {**where(args.device), "compile": compiled}, args.seconds, n_epochs=n_epochs)
                yield {"n_epochs": n_epochs, "compile": compiled, **row}


def time_to_475(args: argparse.Namespace) -> Iterator[Row]:
    """Yield seconds, steps and the later evaluation of every seed, then their medians and extremes."""
    for n_envs in args.n_envs or (4096,):
        chosen = {**where(args.device), "compile": args.compile, **settings(n_envs)}
        PPO("CartPole-v1", n_envs, seed=10**6, **chosen).train(WARM_UP * n_envs * LEARNING["n_steps"])
        rows = []
        for seed in args.seeds:
            reached = Reached(n_envs)
            algorithm = PPO("CartPole-v1", n_envs, seed=seed, callbacks=[reached], **chosen)
            synchronize(args.device)
            algorithm.train(args.most)
            score = float(algorithm.evaluate(N_EVALUATED, seed=10_000 + seed).returns.mean())
            algorithm.close()
            rows.append({"n_envs": n_envs, "seed": seed, "steps": reached.steps, "seconds": round(reached.s, 3)})
            rows[-1]["evaluation"] = score
            yield rows[-1]
        seconds = sorted(row["seconds"] for row in rows if row["steps"])
        yield {
            "n_envs": n_envs,
            "n_seeds": len(rows),
            "n_reached": len(seconds),
            "n_confirmed": sum(row["steps"] is not None and row["evaluation"] >= THRESHOLD for row in rows),
            "median_s": statistics.median(seconds) if seconds else None,
            "least_s": seconds[0] if seconds else None,
            "most_s": seconds[-1] if seconds else None,
        }


def crossover(args: argparse.Namespace) -> Iterator[Row]:
    """Yield the speeds of the CPU's kernels and of the GPU, and what ``device=auto`` chooses."""
    for units in args.units or (64, 256):
        for n_envs in args.n_envs or (8, 32, 128, 512, 2048):
            hidden = {"hidden_sizes": [units, units]}
            row: Row = {"n_envs": n_envs, "units": units}
            native = {"device": "cpu", "backend": "native"}
            row["cpu"] = measure_ppo(n_envs, native, args.seconds, warm_up=1, **hidden)["steps_per_second"]
            row["gpu"] = measure_ppo(n_envs, where(args.device), args.seconds, **hidden)["steps_per_second"]
            auto = PPO("CartPole-v1", n_envs, seed=0, **settings(n_envs, **hidden))
            yield {**row, "gpu_over_cpu": round(row["gpu"] / row["cpu"], 3), "auto": str(auto.device)}
            auto.close()


def mappo(args: argparse.Namespace) -> Iterator[Row]:
    """Yield environment steps per second of MAPPO on GridPursuit-v0, on the device and by the CPU's kernels."""
    for n_envs in args.n_envs or (1024, 4096):
        for compiled in (False, True) if args.compile else (False,):
            placed = {**where(args.device), "compile": compiled}
            yield {"n_envs": n_envs, "compile": compiled, **_measure_mappo(n_envs, placed, args.seconds, WARM_UP)}
        native = {"device": "cpu", "backend": "native"}
        yield {"n_envs": n_envs, "kernels": True, **_measure_mappo(n_envs, native, args.seconds, warm_up=1)}


def _measure_mappo(n_envs: int, placed: dict[str, Any], seconds: float, warm_up: int) -> Row:
    speed = Speed(placed["device"], seconds, warm_up)
    n_steps, n_agents = 32, 3
    batch_size = max(2, n_envs * n_steps * n_agents // MINIBATCHES)
    algorithm = MAPPO(
        "GridPursuit-v0", n_envs=n_envs, seed=0, n_steps=n_steps, batch_size=batch_size, callbacks=[speed], **placed
    )
    algorithm.train(10**12)
    algorithm.close()
    torch.compiler.reset()
    return {"units": algorithm.config.hidden_sizes[0], "n_epochs": algorithm.config.n_epochs, **speed.row()}


def sac(args: argparse.Namespace) -> Iterator[Row]:
    """Yield environment steps per second of SAC on HalfCheetah-v5, with one environment and an update per step."""
    for units in args.units or (256, 1024):
        if "rlox" in args.systems:
            for compiled in (False, True) if args.compile else (False,):
                yield {"system": "rlox", "units": units, "compile": compiled, **_sac_of_rlox(args, units, compiled)}
        if "sb3" in args.systems:
            yield {"system": "sb3", "units": units, **_sac_of_sb3(args, units)}


def _sac_of_rlox(args: argparse.Namespace, units: int, compiled: bool) -> Row:
    speed = Speed(args.device, args.seconds, warm_up=2, start=args.learning_starts + 1)
    algorithm = SAC(
        "HalfCheetah-v5",
        1,
        seed=0,
        callbacks=[speed],
        device=args.device,
        backend="torch",
        compile=compiled,
        batch_size=256,
        learning_starts=args.learning_starts,
        hidden_sizes=[units, units],
    )
    algorithm.train(SAC_STEPS)
    algorithm.close()
    torch.compiler.reset()
    return {**speed.row(), "backend": algorithm.backend_reason}


def _sac_of_sb3(args: argparse.Namespace, units: int) -> Row:
    import stable_baselines3
    from stable_baselines3.common.callbacks import BaseCallback

    class Until(BaseCallback):
        def __init__(self, speed: Speed):
            super().__init__()
            self.speed = speed

        def _on_step(self) -> bool:
            return self.num_timesteps % (SAC_STEPS // 100) != 0 or self.speed.on_step(step=self.num_timesteps)

    speed = Speed(args.device, args.seconds, warm_up=2, start=args.learning_starts + 1)
    model = stable_baselines3.SAC(
        "MlpPolicy",
        "HalfCheetah-v5",
        batch_size=256,
        learning_starts=args.learning_starts,
        policy_kwargs={"net_arch": [units, units]},
        device=args.device,
        seed=0,
    )
    model.learn(SAC_STEPS, callback=Until(speed))
    return {"stable_baselines3": stable_baselines3.__version__, **speed.row()}


def learned(algorithm: Any) -> dict[str, np.ndarray]:
    """Return copies of the weights and the optimiser's state, as a checkpoint has them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "agent.safetensors")
        algorithm.save(path)
        sections = load_checkpoint(path).tensors
        return {
            f"{section}.{name}": np.array(array)
            for section, arrays in sections.items()
            if section not in NOT_LEARNED
            for name, array in arrays.items()
        }


def largest_difference(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> float:
    """Return the largest absolute difference of two sets of arrays. Raises SystemExit if their names differ."""
    if ours.keys() != theirs.keys():
        raise SystemExit(f"gpu.py: the checkpoints differ in {sorted(ours.keys() ^ theirs.keys())}")
    return max(float(np.abs(array.astype(np.float64) - theirs[name]).max(initial=0.0)) for name, array in ours.items())


def update_error(args: argparse.Namespace) -> Iterator[Row]:
    """Yield the largest difference of a weight after one update on the device, from the same update on the CPU."""
    n_envs, n_steps = 64, 16
    cases: dict[str, tuple[int, Callable[[str], Any]]] = {
        "PPO, one minibatch": (n_envs * n_steps, lambda device: _ppo(device, n_envs, n_steps, 1, 1)),
        "PPO, 4 epochs of 4 minibatches": (n_envs * n_steps, lambda device: _ppo(device, n_envs, n_steps, 4, 4)),
        "SAC": (100, lambda device: SAC("Pendulum-v1", 1, seed=0, device=device, backend="torch", learning_starts=100)),
    }
    for name, (n, make) in cases.items():
        results = []
        for device in ("cpu", args.device):
            algorithm = make(device)
            algorithm.train(n)
            # Adam's moments are squares and means of gradients: only the weights are in the unit of the bound.
            results.append({k: v for k, v in learned(algorithm).items() if "optimizer." not in k})
            updates = algorithm.counters.updates
            algorithm.close()
        yield {"case": name, "updates": updates, "largest_difference": largest_difference(*results)}


def _ppo(device: str, n_envs: int, n_steps: int, n_epochs: int, n_minibatches: int) -> PPO:
    batch = n_envs * n_steps // n_minibatches
    return PPO("CartPole-v1", n_envs, seed=0, n_steps=n_steps, n_epochs=n_epochs, batch_size=batch, **where(device))


def resume(args: argparse.Namespace) -> Iterator[Row]:
    """Yield whether a training with a pause has the weights of one without."""
    n_envs, n_steps, rounds = 64, 16, 8  # the graphs are captured before the pause
    cases: dict[str, tuple[int, Callable[[], Any]]] = {
        "PPO": (rounds * n_envs * n_steps, lambda: _ppo(args.device, n_envs, n_steps, 2, 4)),
        "SAC": (200, lambda: SAC("Pendulum-v1", 1, seed=0, device=args.device, backend="torch", learning_starts=100)),
    }
    for name, (n, make) in cases.items():
        whole, paused = make(), make()
        whole.train(2 * n)
        paused.train(n, schedule_timesteps=2 * n)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "agent.safetensors")
            paused.save(path, memory=name == "SAC")
            restored = type(paused).from_checkpoint(path, device=args.device)
            restored.train(until=2 * n)
        ours, theirs = learned(restored), learned(whole)
        yield {
            "case": name,
            "updates": restored.counters.updates,
            "largest_difference": largest_difference(ours, theirs),
            "equal": all(np.array_equal(array, theirs[key]) for key, array in ours.items()),
        }
        for one in (whole, paused, restored):
            one.close()


MEASUREMENTS: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "steps": steps,
    "time-to-475": time_to_475,
    "crossover": crossover,
    "mappo": mappo,
    "sac": sac,
    "update-error": update_error,
    "resume": resume,
}


def card(device: str) -> str:
    """Return the name of the device, with the driver's and PyTorch's CUDA version."""
    if device == "cpu":
        return "cpu"
    return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurement", choices=MEASUREMENTS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--n-envs", type=int, nargs="+")
    parser.add_argument("--n-epochs", type=int, nargs="+")
    parser.add_argument("--units", type=int, nargs="+")
    parser.add_argument("--systems", nargs="+", default=["rlox", "sb3"], choices=["rlox", "sb3"])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--learning-starts", type=int, default=1000)
    parser.add_argument("--most", type=int, default=10_000_000, help="environment steps after which a training ends")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measured speed")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    made_with = {"card": card(args.device), "torch": torch.__version__, "rlox": rlox.__version__}
    rows = []
    for row in MEASUREMENTS[args.measurement](args):
        rows.append(row)
        print(json.dumps({"measurement": args.measurement, **row, **made_with}), flush=True)
    if args.out:
        content = json.loads(args.out.read_text()) if args.out.exists() else {}
        command = f"python benchmarks/gpu.py {args.measurement}"
        content[args.measurement] = {**provenance(command), **made_with, "versions": versions(), "rows": rows}
        args.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
