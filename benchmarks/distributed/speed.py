"""Measure IMPALA, learning included: frames per second for each kind of actor, and costs of actors, messages, updates.

usage: speed.py [--kinds threads processes] [--actors 1 2] [--rounds 3] [--out FILE]

Each training runs in its own process, and the kinds alternate; results are medians over the rounds. Frames per CPU
second count the time of all processes of a training. A learner's idle share is the time in which it waits for rollouts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
from cases import alone
from workers import workers

import rlox
from rlox.checkpoint import versions
from rlox.distributed import Actor, ActorPlan, Weights
from rlox.envs.remote import codec
from rlox_cli.bench.machine import provenance

ENV, N_ENVS, N_STEPS = "CartPole-v1", 16, 32
FRAMES = {"native": 400_000, "gymnasium": 60_000}


def train(kind: str, n_actors: int, backend: str) -> dict[str, Any]:
    """Run one training; the CPU time of workers is not counted, since the training does not start them."""
    case: dict[str, Any] = {"env": ENV, "frames": FRAMES[backend], "n_actors": n_actors, "n_envs": N_ENVS,
                            "n_steps": N_STEPS, "actors": kind, "learning_rate": 1e-3}  # fmt: skip
    if backend == "gymnasium":
        case["env_backend"] = "gymnasium"
    if kind != "grpc":
        return alone(**case)
    with workers(ENV, n_actors) as addresses:
        return alone(**case, worker_addresses=addresses)


def median_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def per_call(function: Callable[[], Any], seconds: float = 1.0) -> float:
    """Return the CPU seconds of a call: the least of five batches, which other work on the machine disturbs least."""
    function()
    began, calls = time.process_time(), 0
    while time.process_time() - began < seconds / 10:
        function()
        calls += 1
    found = []
    for _ in range(5):
        began = time.process_time()
        for _ in range(2 * calls):
            function()
        found.append((time.process_time() - began) / (2 * calls))
    return min(found)


def one_actor(backend: str, env: str = ENV) -> tuple[Actor, Weights]:
    agent = rlox.IMPALA(env, n_actors=1, n_envs=N_ENVS, n_steps=N_STEPS)
    config, policy = agent.config, agent.native
    plan = ActorPlan(env, N_ENVS, N_STEPS, 0, policy, config, env_backend=backend)
    return Actor(plan, 0), Weights(0, policy.weights())


def bare_step_s(env_id: str) -> float:
    """Return the CPU seconds of a step of the gymnasium environment alone, resets included."""
    env = gymnasium.make(env_id)
    env.action_space.seed(0)
    env.reset(seed=0)
    actions = [env.action_space.sample() for _ in range(256)]

    def steps() -> None:
        for action in actions:
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()

    return per_call(steps) / len(actions)


def environment_share(env_id: str) -> dict[str, float]:
    """Return the CPU seconds of a frame: by an actor, and by the environment alone."""
    actor, weights = one_actor("gymnasium", env_id)
    alone_s = bare_step_s(env_id)
    actor_s = per_call(lambda: actor.rollout(weights), 2.0) / (N_ENVS * N_STEPS)
    actor.close()
    return {"environment_s": alone_s, "actor_s": actor_s, "share": alone_s / actor_s}


def costs() -> dict[str, float]:
    """Return the inputs of the model in simulate.py: CPU seconds of one processor."""
    native, weights = one_actor("auto")
    trajectory = native.rollout(weights)
    answer = codec.encode("trajectory", {}, trajectory.arrays())
    request = codec.encode("rollout", {"version": 0}, weights.policy)
    learner = {}
    for n_envs, share in ((N_ENVS, 1), (N_ENVS, 4), (4 * N_ENVS, 1)):
        frames = 400 * n_envs * N_STEPS * share
        seen = [
            alone(env=ENV, frames=frames, n_actors=4, n_envs=n_envs, n_steps=N_STEPS, rollouts_per_update=share)
            for _ in range(3)
        ]
        learner[n_envs, share] = min(row["learner_cpu_per_update_s"] for row in seen)
    # Three equations: update + share * (message + frames * frame).
    one, four, big = learner[N_ENVS, 1], learner[N_ENVS, 4], learner[4 * N_ENVS, 1]
    frames = N_ENVS * N_STEPS
    frame = max(0.0, (big - one) / (3 * frames))
    message = max(0.0, (four - one) / 3 - frames * frame)
    shares = {env_id: environment_share(env_id) for env_id in (ENV, "LunarLander-v3")}
    found = {
        "n_steps": N_STEPS,
        "frames_per_rollout": frames,
        "collect_native_s": per_call(lambda: native.rollout(weights)),
        "collect_gymnasium_s": shares[ENV]["actor_s"] * frames,
        "environment": shares,
        "learner_s": {f"{n_envs} environments, {share} rollouts": cost for (n_envs, share), cost in learner.items()},
        "update_s": max(0.0, one - message - frames * frame),
        "message_s": message,
        "frame_s": frame,
        "codec_s": per_call(lambda: codec.encode("rollout", {"version": 0}, weights.policy))
        + per_call(lambda: codec.decode(answer)),
        "rollout_bytes": len(answer),
        "weights_bytes": len(request),
    }
    native.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="*", default=["threads", "processes"])
    parser.add_argument("--actors", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--backends", nargs="+", default=["native", "gymnasium"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--skip-costs", action="store_true", help="keep the costs of --out")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    before = json.loads(args.out.read_text()) if args.out and args.out.is_file() else {}
    cells = [
        (kind, n, backend)
        for backend in args.backends
        for kind in args.kinds
        for n in args.actors
        if (kind, backend) != ("grpc", "gymnasium")  # a worker is just another process
    ]
    rows: dict[tuple[str, int, str], list[dict[str, Any]]] = {cell: [] for cell in cells}
    for _ in range(args.rounds):
        for cell in cells:
            rows[cell].append(train(*cell))
    speeds = dict(before.get("speeds", {}))
    for (kind, n, backend), seen in rows.items():
        speeds[f"{kind}, {n}, {backend}"] = found = median_of(seen)
        print(
            f"{kind:9} {n} actors, {backend:9}: {found['frames_per_s']:9,.0f} frames/s, "
            f"{found['frames_per_cpu_s']:9,.0f} per CPU second, learner idle {found['learner_idle']:.0%}, lag "
            f"{found['lag_mean']:.2f} (most {found['lag_max']:.0f}); load {found['load_before']:.1f}",
            flush=True,
        )
    loads = [speed["load_after"] for speed in speeds.values()]
    measured = before["costs"] if args.skip_costs else costs()
    print(json.dumps(measured, indent=1))
    if args.out:
        command = f"--kinds {' '.join(args.kinds)} --actors {' '.join(map(str, args.actors))} --rounds {args.rounds}"
        result = {
            **provenance(f"python benchmarks/distributed/speed.py {command}"),
            "versions": versions(),
            "note": f"the machine did other work too: load averages of {min(loads):.0f} to {max(loads):.0f} on two "
            "hyperthreads of one core; with `grpc`, the CPU time of the workers is not counted",
            "speeds": speeds,
            "costs": measured,
        }
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
