"""Run by test_ray.py in its own network namespace: a cluster of two nodes, and training on it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import rlox
from rlox.config import IMPALAConfig, RayConfig
from rlox.distributed import ActorPlan, RayActors, Weights
from rlox.nn.acting import acting_policy
from rlox.policies import DiscretePolicy

SMALL = {"n_actors": 2, "n_envs": 4, "seed": 1, "hidden_sizes": [8]}


class Failing:
    """An environment that passes the initial checks and fails in an actor."""

    def __new__(cls):
        import gymnasium
        from gymnasium.envs.classic_control import CartPoleEnv

        class Env(CartPoleEnv):
            def step(self, action):
                raise LookupError("the licence server is away")

        return gymnasium.wrappers.TimeLimit(Env(), 100)


def pids(algorithm):
    return [int(line.partition("pid ")[2].partition(")")[0]) for line in algorithm.collector.lines()]


def rollout(pool, weights):
    pool.request(0, weights)
    while not pool.ready([0], 1.0):
        pass
    return pool.result(0)


class EndsWhen(rlox.Callback):
    """Ends a training as soon as a condition holds, and fails if it does not hold in time."""

    def __init__(self, condition):
        self.condition, self.deadline = condition, time.monotonic() + 90

    def on_step(self, **_):
        assert time.monotonic() < self.deadline
        return not self.condition()


def main():
    quick = {"health_check_period_ms": 1000, "health_check_timeout_ms": 3000, "health_check_failure_threshold": 3}
    os.environ.update(
        {"RAY_USAGE_STATS_ENABLED": "0", **{f"RAY_{name}": str(number) for name, number in quick.items()}}
    )
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    far = cluster.add_node(num_cpus=2)
    ray_config = RayConfig(address=cluster.address, placement="pack", learner_apart=True, start_timeout=60)

    # In a fixed order the same seed gives the same run as with threads.
    runs = []
    for kind, more in (("threads", {}), ("ray", {"ray": ray_config})):
        algorithm = rlox.IMPALA("CartPole-v1", actors=kind, actor_order="fixed", normalize_obs=True, **SMALL, **more)
        algorithm.train(4 * 32 * 5)
        if kind == "ray":
            assert all(far.node_id[:8] in line for line in algorithm.collector.lines()), algorithm.collector.lines()
        runs.append(algorithm.native.weights())
        algorithm.close()
    assert all(np.array_equal(runs[0][name], runs[1][name]) for name in runs[0])

    # An actor continues from its state, also with a PyTorch policy.
    policy = DiscretePolicy(4, 2)
    pool = RayActors(ActorPlan("CartPole-v1", 4, 16, 1, policy, IMPALAConfig()), 1, ray_config)
    weights = Weights(0, acting_policy(policy).weights())
    first, saved = rollout(pool, weights), pool.state(0)
    second = rollout(pool, weights)
    pool.set_state(0, saved)
    again = rollout(pool, weights)
    assert np.array_equal(second.obs, again.obs)
    assert not np.array_equal(first.obs, second.obs)
    assert again.obs.flags.writeable
    pool.close()

    # An exception of an environment is raised in this process, with its type and traceback.
    algorithm = rlox.IMPALA(Failing, actors="ray", ray=ray_config, **SMALL)
    with pytest.raises(LookupError, match="licence server") as failed:
        algorithm.train(1_000)
    assert "in step" in str(failed.value.__cause__)
    algorithm.close()

    # Kill an actor and then its node: the training continues with new actors and loses at most one rollout.
    algorithm = rlox.IMPALA("CartPole-v1", actors="ray", ray=ray_config, **SMALL)
    restarts = lambda: sum(int(line.split(" restart")[0].split()[-1]) for line in algorithm.collector.lines())  # noqa: E731
    algorithm.train(4 * 32 * 5)
    killed = pids(algorithm)[0]
    os.kill(killed, signal.SIGKILL)
    algorithm.callbacks.callbacks.append(EndsWhen(lambda: restarts() == 1 and pids_known(algorithm)))
    algorithm.train(10**9)
    assert killed not in pids(algorithm)
    cluster.remove_node(far, allow_graceful=False)
    near = cluster.add_node(num_cpus=2)
    algorithm.callbacks.callbacks[-1] = EndsWhen(lambda: restarts() >= 3 and pids_known(algorithm))
    algorithm.train(10**9)
    assert all(near.node_id[:8] in line for line in algorithm.collector.lines()), algorithm.collector.lines()
    algorithm.close()

    # The command, and an address without a cluster.
    words = ["train", "algo=impala", "env=CartPole-v1", "algo.actors=ray", "algo.n_actors=2", "env.n_envs=4"]
    words += [f"ray.address={cluster.address}", "total_timesteps=1024", "eval.n_points=1", "eval.n_episodes=1"]
    words += ["logger=none", "tuned=off", "output_dir=run"]
    done = subprocess.run([sys.executable, "-m", "rlox_cli.main", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert max(row["step"] for row in rows) >= 1024
    with pytest.raises(ConnectionError, match=r"ray\.address=127\.0\.0\.1:9: no Ray listens there"):
        rlox.IMPALA("CartPole-v1", actors="ray", ray=RayConfig(address="127.0.0.1:9"), **SMALL).train(128)
    cluster.shutdown()


def pids_known(algorithm):
    return all("pid" in line for line in algorithm.collector.lines())


if __name__ == "__main__":
    main()
    print("all is well", flush=True)
