"""Actors in threads, in processes and on workers: the same protocol and the same learning."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
import torch
from actor_runs import Answer, Ends, flatten, train
from custom_policy import CustomPolicy

import rlox
from rlox.compiled import NativePolicy
from rlox.config import IMPALAConfig
from rlox.distributed import Actor, ActorCollector, ActorLost, ActorPlan, Weights, threads
from rlox.distributed.collector import make_pool
from rlox.distributed.grpc_actors import ActorSessions
from rlox.envs.remote.codec import Message
from rlox.envs.remote.server import Server
from rlox.envs.remote.session import EnvSessions
from rlox.kernels.rng import Rng
from rlox.nn.acting import acting_policy

# Processes cannot import a test module by its name; a user's main module is sent by value anyway.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules[CustomPolicy.__module__])

SMALL = {"n_actors": 2, "n_envs": 4, "n_steps": 8, "hidden_sizes": [16], "seed": 3}


class Hangs(Ends):
    """Creates the file `flag` and hangs in its 30th step, unless the file already exists."""

    def __init__(self, flag):
        self.flag, self.t = Path(flag), 0

    def step(self, action):
        self.t += 1
        if self.t == 30:
            with contextlib.suppress(FileExistsError):
                self.flag.touch(exist_ok=False)  # only one actor, even if several get here at once
                time.sleep(3600)
        return super().step(action)


class Breaks(Ends):
    def step(self, action):
        raise KeyError("the environment's own words")


class Dies(Ends):
    """Writes a line to the file `flag` and ends its process when it is created, if that file exists."""

    def __init__(self, flag):
        if Path(flag).exists():
            with open(flag, "a") as file:
                file.write("start\n")
            os._exit(3)


class Waits(Ends):
    """Every step waits for `go`."""

    go, closed = threading.Event(), threading.Event()

    def step(self, action):
        self.go.wait(60)
        return super().step(action)

    def close(self):
        self.closed.set()


def impala(kind="threads", **settings):
    return rlox.IMPALA("CartPole-v1", **{**SMALL, "actors": kind, **settings})


def trained(steps=400, **settings):
    return train(impala(**settings), steps)


def oracle(policy, rollouts, c, weighted=True):
    """Value targets and advantages of each rollout in float64, step by step for each environment."""
    exact = rlox.DiscretePolicy(3, 2, [16]).double()
    exact.load_state_dict({k: torch.from_numpy(v).double() for k, v in policy.weights().items()})
    targets, advantages = [], []
    with torch.no_grad():
        for one in rollouts:
            n_steps, n = one.rewards.shape
            obs = torch.from_numpy(one.obs).double()
            value = exact.get_value(obs.reshape(-1, 3)).reshape(n_steps + 1, n).numpy()
            log_prob = exact.get_logprob_and_entropy(obs[:-1].reshape(-1, 3), torch.from_numpy(one.actions).reshape(-1))
            ratio = np.exp(log_prob[0].reshape(n_steps, n).numpy() - one.log_probs)
            at_limit = {(t, i): k for k, (t, i) in enumerate(one.limits.tolist())}
            vs, pg = np.zeros((n_steps, n)), np.zeros((n_steps, n))
            for i in range(n):
                ahead, v_next, vs_next = 0.0, value[-1, i], value[-1, i]
                for t in reversed(range(n_steps)):
                    if one.terminated[t, i]:
                        ahead = v_next = vs_next = 0.0
                    elif one.truncated[t, i]:
                        final = torch.from_numpy(one.reached[at_limit[t, i]]).double()
                        ahead, v_next = 0.0, float(exact.get_value(final[None]))
                        vs_next = v_next
                    rho, trace = min(ratio[t, i], c.rho_bar), c.gae_lambda * min(ratio[t, i], c.c_bar)
                    pg[t, i] = (rho if weighted else 1.0) * (one.rewards[t, i] + c.gamma * vs_next - value[t, i])
                    ahead = rho * (one.rewards[t, i] + c.gamma * v_next - value[t, i]) + c.gamma * trace * ahead
                    vs[t, i] = value[t, i] + ahead
                    v_next, vs_next = value[t, i], vs[t, i]
            targets.append(vs)
            advantages.append(pg)
    return np.concatenate(targets, 1).ravel(), np.concatenate(advantages, 1).ravel()


def rollouts_of(learner, config):
    """Rollouts of two policies that differ a little from `learner`, which gets random weights."""
    learner.net.parameters[:] = Rng(0).normal(len(learner.net.parameters)) * 0.4
    rollouts = []
    for i in range(2):
        behaviour = NativePolicy(3, 2, [16], False)
        behaviour.net.parameters[:] = learner.net.parameters + 0.1 * Rng(i + 1).normal(len(learner.net.parameters))
        actor = Actor(ActorPlan(Ends, 5, 40, i, NativePolicy(3, 2, [16], False), config), 0)
        rollouts.append(actor.rollout(Weights(0, acting_policy(behaviour).weights())))
    return rollouts


@pytest.mark.parametrize("settings", [{}, {"rho_bar": 1.3, "c_bar": 0.7, "gae_lambda": 0.9, "gamma": 0.8}])
@pytest.mark.parametrize("by", ["kernel", "module"])
def test_a_batch_is_vtrace_with_the_learners_values_and_bootstraps_at_time_limits(by, settings):
    config = IMPALAConfig(hidden_sizes=[16], **settings)
    learner = NativePolicy(3, 2, [16], False)
    rollouts = rollouts_of(learner, config)
    both = np.concatenate([r.terminated & r.truncated for r in rollouts])
    assert all(r.truncated.any() and r.terminated.any() for r in rollouts)
    assert both.any()  # counts as a termination
    collector = ActorCollector(Ends, 5, 0, config=config)
    policy = learner if by == "kernel" else learner.module()
    batch = collector.estimate(policy, rollouts[:1], rollouts[1:])
    targets, advantages = oracle(learner, rollouts, config)
    np.testing.assert_allclose(batch.returns.numpy().reshape(-1), targets, rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(batch.advantages.numpy().reshape(-1), advantages, rtol=1e-4, atol=2e-5)
    assert (len(batch), batch.n_taken) == (400, 200)
    assert len(batch.episode_returns) == len(rollouts[0].episode_returns)
    assert 0 < collector.metrics()["actors/ratio_clipped"] < 1


@pytest.mark.parametrize("settings", [{}, {"rho_bar": 1.3, "c_bar": 0.7, "gae_lambda": 0.9, "gamma": 0.8}])
def test_appo_counts_the_importance_weight_once(settings):
    """The gradient of a step on old rollouts is PPO's of V-trace's advantages without their weight."""
    arguments = {"batch_size": 400, "n_epochs": 1, "clip_eps": 0.4, "vf_coef": 0.0, "ent_coef": 0.0}
    appo = rlox.APPO(
        Ends, 1, 5, backend="torch", hidden_sizes=[16], normalize_advantages=False, max_grad_norm=None,
        learning_rate=1e-9, **arguments, **settings,
    )  # fmt: skip
    learner = NativePolicy(3, 2, [16], False)
    rollouts = rollouts_of(learner, appo.config)
    appo.policy.load_state_dict({k: torch.from_numpy(v) for k, v in learner.weights().items()})
    batch = appo.collector.estimate(appo.policy, rollouts)
    targets, advantages = oracle(learner, rollouts, appo.config, weighted=False)
    np.testing.assert_allclose(batch.returns.numpy().reshape(-1), targets, rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(batch.advantages.numpy().reshape(-1), advantages, rtol=1e-4, atol=2e-5)
    norm = float(appo.update(batch)["grad_norm"])
    appo.close()
    exact = rlox.DiscretePolicy(3, 2, [16]).double()
    exact.load_state_dict({k: torch.from_numpy(v).double() for k, v in learner.weights().items()})
    columns = [np.concatenate([getattr(one, name) for one in rollouts], 1) for name in ("actions", "log_probs")]
    seen = torch.from_numpy(np.concatenate([one.obs[:-1] for one in rollouts], 1).reshape(-1, 3)).double()
    acted, behaviour = (torch.from_numpy(column.reshape(-1)) for column in columns)
    ratio = (exact.get_logprob_and_entropy(seen, acted)[0] - behaviour.double()).exp()
    assert (ratio > 1.1).any()
    advantages = torch.from_numpy(advantages)
    torch.minimum(ratio * advantages, ratio.clamp(0.6, 1.4) * advantages).mean().backward()
    gradient = torch.cat([p.grad.flatten() for p in exact.parameters() if p.grad is not None])
    assert norm == pytest.approx(float(gradient.norm()), rel=1e-4)


def test_without_lag_and_clipping_an_update_equals_a2cs():
    common = {"n_envs": 4, "n_steps": 8, "hidden_sizes": [16], "seed": 5, "learning_rate": 7e-4, "ent_coef": 0.01}
    ours = rlox.IMPALA("CartPole-v1", 1, max_grad_norm=0.5, rho_bar=float("inf"), c_bar=float("inf"), **common)
    theirs = rlox.A2C("CartPole-v1", **common)
    for algorithm in (ours, theirs):
        algorithm.train(320)
    np.testing.assert_allclose(flatten(ours.policy), flatten(theirs.policy), rtol=0, atol=5e-6)


@pytest.mark.slow
def test_a_seed_determines_the_run_whatever_the_actors_run_in():
    same = {"n_actors": 3, "normalize_obs": True, "normalize_rewards": True}
    first, metrics = trained(**same)
    assert metrics["actors/lag_max"] == 2.0
    np.testing.assert_array_equal(first, trained(kind="processes", **same)[0])
    assert (first != trained(**same, seed=4)[0]).any()


@pytest.mark.parametrize(
    ("settings", "lags"),
    [
        ({"n_actors": 1}, [0, 0, 0, 0]),
        ({"n_actors": 3}, [0, 1, 2, 2, 2, 2]),
        ({"n_actors": 2, "rollouts_per_update": 2}, [0, 0, 0]),
        ({"n_actors": 2, "rollouts_ahead": 2}, [0, 1, 2, 3, 3]),
    ],
)
def test_lag_counts_the_updates_that_weights_are_behind(settings, lags):
    seen = []

    class Look(rlox.Callback):
        def on_step(self, *, metrics, **info):
            seen.append(metrics["actors/lag_max"])
            return True

    algorithm = impala(**settings, callbacks=[Look()])
    per_update = 32 * settings.get("rollouts_per_update", 1)
    algorithm.train(per_update * len(lags))
    algorithm.close()
    assert seen == lags


def test_replayed_rollouts_are_not_counted_as_steps():
    algorithm = impala(replay_rollouts=2, replay_size=3)
    sizes = []
    algorithm.callbacks.extend([_OnRollout(lambda batch: sizes.append((len(batch), batch.n_taken)))])
    algorithm.train(160)
    algorithm.close()
    assert sizes == [(32, 32), *[(96, 32)] * 4]
    assert algorithm.counters.env_steps == 160


class _OnRollout(rlox.Callback):
    def __init__(self, call):
        self.call = call

    def on_rollout_end(self, *, batch, **info):
        self.call(batch)


class _Kill(rlox.Callback):
    """Kills a process actor after the given numbers of updates."""

    def __init__(self, *after):
        self.n, self.after = 0, after

    def on_step(self, *, algorithm, **info):
        self.n += 1
        if self.n in self.after:
            child = algorithm.collector._pool._children[self.n % 2]
            os.kill(child.process.pid, signal.SIGKILL)
            child.process.wait()
        return True


@pytest.mark.slow
def test_a_killed_process_is_replaced_with_current_weights():
    algorithm = impala("processes", callbacks=[_Kill(3, 6)])
    notes = []
    algorithm.collector.notify = notes.append
    lags = []
    algorithm.callbacks.extend([_OnRollout(lambda batch: lags.append(algorithm.collector.metrics()["actors/lag_max"]))])
    metrics = algorithm.train(640)
    lines = algorithm.collector.lines()
    algorithm.close()
    assert metrics["actors/restarts"] == 2
    assert max(lags) <= 1.0
    assert len(notes) == 2
    assert "died (signal 9)" in notes[0]
    assert "fresh episodes" in notes[0]
    assert "1 restart" in lines[0]
    assert algorithm.counters.env_steps == 640


@pytest.mark.slow
def test_a_run_ends_with_an_error_if_actors_die_too_often():
    algorithm = impala("processes", max_restarts=1, callbacks=[_Kill(2, 8)])
    algorithm.collector.notify = lambda text: None
    with pytest.raises(RuntimeError, match=r"actor 0 \(a process, pid \d+\) was lost .*the limit of algo.max_restarts"):
        algorithm.train(10_000)
    pids = [child.process.pid for child in algorithm.collector._pool._children]
    algorithm.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert algorithm.collector.lines()[0].endswith(", 1 restart, lost")


@pytest.mark.slow
def test_a_process_that_dies_at_its_start_counts_once_and_is_tried_again_later(tmp_path):
    flag, settings = tmp_path / "flag", {"actor_timeout": 4.0, "max_restarts": 1}
    algorithm = rlox.IMPALA(
        Dies, actors="processes", env_kwargs={"flag": str(flag)}, **{**SMALL, "n_actors": 1, **settings}
    )
    notes = []
    algorithm.collector.notify = notes.append
    algorithm.train(32)
    flag.touch()
    algorithm.collector._pool._children[0].process.kill()
    with pytest.raises(TimeoutError, match="could not be reached for 4 s"):
        algorithm.train(3200)
    algorithm.close()
    assert len(notes) == 1
    assert 1 <= len(flag.read_text().splitlines()) <= 4  # at once, and after 0.5, 1 and 2 s


@pytest.mark.slow
def test_a_process_that_hangs_is_replaced_and_a_thread_is_named(tmp_path):
    settings = {**SMALL, "env_kwargs": {"flag": str(tmp_path / "a")}, "actor_timeout": 3.0}
    algorithm = rlox.IMPALA(Hangs, actors="processes", **settings)
    notes = []
    algorithm.collector.notify = notes.append
    assert algorithm.train(800)["actors/restarts"] == 1
    algorithm.close()
    assert "has not answered for 3 s" in notes[0]
    algorithm = rlox.IMPALA(Hangs, **{**settings, "env_kwargs": {"flag": str(tmp_path / "b")}})
    algorithm.collector.notify = notes.append
    with pytest.raises(TimeoutError, match=r"actor \d \(a thread\) does not answer, .*algo.actors=processes"):
        algorithm.train(800)


class Clock:
    """A monotonic clock that can jump ahead, as after a pause of the learner or of the whole process."""

    def __init__(self, monkeypatch):
        self.reads, self.ahead, self.real = 0, 0.0, time.monotonic
        monkeypatch.setattr(time, "monotonic", self)

    def __call__(self):
        self.reads += 1
        return self.real() + self.ahead

    def jump(self):
        self.ahead += 3600.0


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "ahead"), [("threads", 1), ("threads", 2), ("processes", 2)])
def test_a_pause_after_saving_or_loading_loses_no_actor(kind, ahead, monkeypatch, tmp_path):
    settings = {"rollouts_ahead": ahead}
    whole, _ = trained(192, **settings)
    saved = impala(kind, **settings)
    saved.train(96)  # three updates of two actors, which owe different numbers of rollouts
    saved.save(str(tmp_path / "a.safetensors"))
    loaded = rlox.IMPALA.from_checkpoint(str(tmp_path / "a.safetensors"))
    clock = Clock(monkeypatch)
    for algorithm in (saved, loaded):
        clock.jump()
        metrics = algorithm.train(96)
        algorithm.close()
        assert metrics["actors/restarts"] == 0
        np.testing.assert_array_equal(flatten(algorithm.policy), whole)


def test_actors_have_time_to_answer_after_their_process_was_suspended(monkeypatch):
    clock = Clock(monkeypatch)

    class Suspended(Ends):
        def step(self, action):
            if clock.ahead == 0.0:
                clock.jump()
                before = clock.reads
                while clock.reads < before + 6:  # the learner has noticed that the answer is late
                    time.sleep(0.001)
            return super().step(action)

    algorithm = rlox.IMPALA(Suspended, **{**SMALL, "n_actors": 1, "n_envs": 1})
    assert algorithm.train(16)["actors/restarts"] == 0
    algorithm.close()


@pytest.mark.slow
def test_a_process_that_dies_while_a_checkpoint_is_created_is_replaced(tmp_path):
    algorithm = impala("processes")
    notes = []
    algorithm.collector.notify = notes.append
    algorithm.train(64)
    algorithm.collector.state()  # both actors have answered
    for child in algorithm.collector._pool._children:
        child.process.kill()
        child.process.wait()
    algorithm.save(str(tmp_path / "a.safetensors"))
    assert ["died (signal 9)" in note for note in notes] == [True, True]
    algorithm.train(64)
    algorithm.close()
    loaded = rlox.IMPALA.from_checkpoint(str(tmp_path / "a.safetensors"))
    assert "CartPole-v1 cannot be restored in 2 of 2 actors" in loaded.collector.restore_note()
    assert loaded.train(64)["actors/restarts"] == 0
    loaded.close()


@pytest.mark.parametrize("kind", ["threads", pytest.param("processes", marks=pytest.mark.slow)])
def test_an_exception_is_raised_at_once_and_the_checkpoint_continues_all_actors(kind, tmp_path):
    n_calls, flag = 0, tmp_path / "flag"

    def reward(obs, actions, rewards):
        nonlocal n_calls
        n_calls += 1
        if n_calls > 90:
            with contextlib.suppress(FileExistsError):
                flag.touch(exist_ok=False)  # only one actor fails
                raise KeyError("the function's own words")
        return rewards

    algorithm = impala(kind, reward_fn=reward, actor_timeout=30.0, logger=str(tmp_path / "run"))
    began = time.monotonic()
    with pytest.raises(KeyError, match="the function's own words"):
        algorithm.train(10_000)
    assert time.monotonic() - began < 25.0
    algorithm.close()
    loaded = rlox.IMPALA.from_checkpoint(tmp_path / "run" / "checkpoints" / "last.safetensors", reward_fn=reward)
    assert loaded.collector.restore_note() is None
    loaded.close()


@pytest.mark.parametrize("algo", [rlox.IMPALA, rlox.APPO])
def test_a_run_continues_with_rollouts_of_another_length(algo, tmp_path):
    saved = algo("CartPole-v1", replay_rollouts=1, **{**SMALL, "n_actors": 3, "rollouts_per_update": 2})
    saved.train(128)
    saved.save(tmp_path / "a.safetensors")
    saved.close()
    sizes = []
    look = _OnRollout(lambda batch: sizes.append((len(batch), batch.n_taken)))
    loaded = algo.from_checkpoint(tmp_path / "a.safetensors", n_steps=16, callbacks=[look])
    loaded.train(256)
    loaded.close()
    assert sizes == [(128, 128), (192, 128)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_actors_are_ready_in_the_order_of_their_answers(kind):
    policy, config = NativePolicy(4, 2, [8], False), IMPALAConfig(actors=kind, n_actors=3)
    spec = ActorCollector("CartPole-v1", 1, 0, config=config).spec
    pool = make_pool(ActorPlan("CartPole-v1", 2, 5, 0, policy, config), config, spec)
    try:
        for actor in (2, 0, 1):
            pool.request(actor, Weights(0, acting_policy(policy).weights()))
            assert pool.ready([actor], 60.0) == [actor]
        assert pool.ready(range(3), 0.0) == [2, 0, 1]
        pool.result(0)
        assert pool.ready(range(3), 0.0) == [2, 1]
    finally:
        pool.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_exceptions_of_an_environment_are_raised_by_train(kind):
    algorithm = rlox.IMPALA(Breaks, actors=kind, **SMALL)
    with pytest.raises(KeyError, match="the environment's own words"):
        algorithm.train(100)
    algorithm.close()


def test_actors_must_not_share_an_environment():
    env = Ends()
    with pytest.raises(TypeError, match="env_id must be an id or a function that creates an environment"):
        rlox.IMPALA(env, 1, 1)
    algorithm = rlox.IMPALA(lambda: env, 2, 1)
    with pytest.raises(ValueError, match="ThreadActors: each call must create an environment of its own"):
        algorithm.train(64)
    algorithm.close()


def test_actors_in_threads_start_together_in_forked_processes():
    script = """
import os, threading
import torch
from rlox.distributed.threads import ThreadActors

class Together:
    barrier = threading.Barrier(4)

    def rollout(self, weights):
        self.barrier.wait(20)
        return float(torch.log_softmax(weights, -1).exp().sum())

    def close(self):
        pass

class Pool(ThreadActors):
    def __init__(self):
        self._begin([Together] * 4)

torch.set_num_threads(1)
logits = torch.ones(8, 2)
torch.log_softmax(logits, -1)
for _ in range(40):
    if not os.fork():
        pool = Pool()
        for actor in range(4):
            pool.request(actor, logits)
        seen = set()
        while len(seen) < 4:
            new = pool.ready({*range(4)} - seen, 20)
            assert new and all(abs(pool.result(actor) - 8) < 1e-4 for actor in new)
            seen.update(new)
        os._exit(0)
    assert os.wait()[1] == 0
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def test_a_thread_that_is_busy_when_the_pool_is_closed_closes_its_environments_later(monkeypatch):
    monkeypatch.setattr(threads, "_JOIN_WITHIN", 0.1)
    policy, config = NativePolicy(3, 2, [8], False), IMPALAConfig(n_actors=1)
    spec = ActorCollector(Ends, 1, 0, config=config).spec
    pool = make_pool(ActorPlan(Waits, 1, 5, 0, policy, config), config, spec)
    pool.request(0, Weights(0, acting_policy(policy).weights()))
    time.sleep(0.1)
    pool.close()
    assert not Waits.closed.is_set()
    Waits.go.set()
    assert Waits.closed.wait(20)


@pytest.mark.slow
def test_a_custom_policy_in_processes_is_reproducible_and_resumes_exactly(tmp_path):
    def made(kind, n):
        torch.manual_seed(n)
        return impala(kind, policy=CustomPolicy())

    first = made("processes", 0)
    whole = [train(first, 384)[0], train(made("processes", 0), 384)[0]]
    np.testing.assert_array_equal(*whole)
    half = made("processes", 0)
    half.train(192)
    half.save(tmp_path / "a.safetensors")
    half.close()
    rest = rlox.IMPALA.from_checkpoint(tmp_path / "a.safetensors", policy=CustomPolicy())
    assert rest.collector.restore_note() is None
    np.testing.assert_array_equal(train(rest, 192)[0], whole[0])


def test_threads_share_the_generator_of_a_custom_policy_and_do_not_claim_to_resume_exactly(tmp_path):
    algorithm = impala(policy=CustomPolicy())
    algorithm.train(64)
    algorithm.save(tmp_path / "a.safetensors")
    algorithm.close()
    rest = rlox.IMPALA.from_checkpoint(tmp_path / "a.safetensors", policy=CustomPolicy())
    assert "with a custom policy, threads cannot save one" in rest.collector.restore_note()
    rest.close()


@pytest.mark.slow
def test_threads_that_continue_processes_with_a_custom_policy_do_not_claim_to_be_exact(tmp_path):
    for policy, custom in ((CustomPolicy, True), (lambda: None, False)):
        saved = impala("processes", policy=policy())
        saved.train(64)
        saved.save(tmp_path / "a.safetensors")
        saved.close()
        rest = rlox.IMPALA.from_checkpoint(tmp_path / "a.safetensors", policy=policy(), actors="threads")
        note = rest.collector.restore_note()
        assert ("threads cannot restore the random numbers of a custom policy" in note) if custom else note is None
        rest.train(64)
        rest.close()


@pytest.mark.slow
def test_starts_and_stops_leave_nothing():
    def held():
        gc.collect()  # objects of other tests too
        for thread in threading.enumerate():
            if thread.name.startswith("rlox actor"):
                thread.join(0.5)  # it may be ending
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    trained(64, kind="processes")
    trained(64)
    before = held()
    for _ in range(3):
        trained(64, kind="processes")
        trained(64)
    assert held() == before


@pytest.mark.parametrize("kind", ["threads", "processes", "grpc"])
def test_actors_end_with_an_algorithm_that_is_dropped_without_close(kind, request, eventually):
    more = {"worker_addresses": request.getfixturevalue("workers")} if kind == "grpc" else {"actors": kind}
    gc.collect()  # objects of other tests too
    before = {*threading.enumerate()}
    algorithm = rlox.IMPALA("CartPole-v1", **SMALL, **more)
    algorithm.train(64)
    pids = [child.process.pid for child in getattr(algorithm.collector._pool, "_children", [])]
    assert len(pids) == (2 if kind == "processes" else 0)
    started = [t for t in {*threading.enumerate()} - before if t.name.startswith("rlox actor")]
    assert len(started) == (0 if kind == "processes" else 2)

    del algorithm
    gc.collect()
    for thread in started:
        thread.join(10)
    assert not any(thread.is_alive() for thread in started)
    assert not any(Path("/proc", str(pid)).exists() for pid in pids)
    if kind == "grpc":
        for server in request.getfixturevalue("servers"):
            eventually(lambda server=server: not server._streams)


# ---- on workers


def test_a_reconnection_ends_with_a_pool_that_is_dropped_without_close(servers, workers, eventually):
    algorithm = rlox.IMPALA("CartPole-v1", worker_addresses=workers, **SMALL)
    algorithm.train(64)
    pool, go = algorithm.collector._pool, threading.Event()
    connect = pool._make

    def late(actor, start):
        go.wait(10)
        return connect(actor, start)

    pool._make = late
    with pytest.raises(ActorLost, match="has not answered yet"):
        pool.restart(0)
    attempt = pool._attempts[0]
    del algorithm, pool
    gc.collect()
    go.set()
    attempt.join(10)
    assert attempt.actor is not None
    del attempt
    gc.collect()
    for server in servers:
        eventually(lambda server=server: not server._streams)


def test_rollouts_come_from_workers(workers):
    algorithm = rlox.IMPALA("CartPole-v1", worker_addresses=workers, **SMALL)
    assert algorithm.config.actors == "grpc"
    metrics = algorithm.train(320)
    assert metrics["actors/restarts"] == 0
    assert algorithm.counters.env_steps == 320
    assert workers[1] in algorithm.collector.lines()[1]
    assert algorithm.collector.state() is None
    assert "fresh episodes" in algorithm.collector.restore_note()
    algorithm.close()


def test_in_a_fixed_order_workers_give_the_same_run_as_threads(workers):
    first = trained()[0]
    algorithm = rlox.IMPALA("CartPole-v1", worker_addresses=workers, actor_order="fixed", **SMALL)
    algorithm.train(400)
    algorithm.close()
    np.testing.assert_array_equal(flatten(algorithm.policy), first)


def test_a_lost_worker_is_replaced_by_another(workers):
    envs = EnvSessions("CartPole-v1")
    third = Server({"env": envs, "actor": ActorSessions(envs)}).start()
    addresses = [f"127.0.0.1:{third.port}", workers[0]]
    algorithm = rlox.IMPALA("CartPole-v1", worker_addresses=addresses, **SMALL)
    notes = []
    algorithm.collector.notify = notes.append
    algorithm.train(64)
    third.stop(0.0)
    metrics = algorithm.train(320)
    lines = algorithm.collector.lines()
    algorithm.close()
    assert metrics["actors/restarts"] == 1
    assert addresses[0] in notes[0]
    assert all(workers[0] in line for line in lines)


def test_a_lost_worker_counts_once_however_many_rollouts_it_owes():
    envs = EnvSessions("CartPole-v1")
    kinds = {"env": envs, "actor": ActorSessions(envs)}
    server = Server(kinds).start()
    address = f"127.0.0.1:{server.port}"
    algorithm = rlox.IMPALA(
        "CartPole-v1", worker_addresses=[address], rollouts_ahead=16, max_restarts=2, **{**SMALL, "n_actors": 1}
    )
    notes, again = [], []
    algorithm.collector.notify = notes.append
    algorithm.train(64)
    server.stop(0.0)
    timer = threading.Timer(1.0, lambda: again.append(Server(kinds, port=server.port).start()))
    timer.start()
    metrics = algorithm.train(3200)
    algorithm.close()
    timer.join()
    again[0].stop()
    assert metrics["actors/restarts"] == len(notes) == 1


def test_weights_that_do_not_fit_in_a_message_are_an_error_and_no_loss(workers):
    algorithm = rlox.IMPALA("CartPole-v1", worker_addresses=workers, **SMALL)
    algorithm.train(64)
    for seat in algorithm.collector._pool._seats:
        seat.actor._line._limit = 500
    with pytest.raises(ValueError, match=r"hidden_sizes must be such that the weights fit .* at most 500 bytes"):
        algorithm.train(64)
    algorithm.close()


def test_settings_that_would_need_code_on_workers_are_errors(workers):
    settings = {"worker_addresses": workers, **SMALL}
    algorithm = rlox.IMPALA("CartPole-v1", reward_fn=lambda obs, actions, rewards: rewards, **settings)
    with pytest.raises(TypeError, match="reward_fn must be sign or null, got a function"):
        algorithm.train(32)

    class Own(rlox.DiscretePolicy):
        pass

    algorithm = rlox.IMPALA("CartPole-v1", policy=Own(4, 2, [16]), **settings)
    with pytest.raises(TypeError, match="policy must be one of rlox's own, got Own"):
        algorithm.train(32)
    with pytest.raises(ValueError, match="the worker's environment is CartPole-v1, but the learner expects Acrobot-v1"):
        rlox.IMPALA("Acrobot-v1", **settings)
    with pytest.raises(ValueError, match="a rollout fits in a message"):
        rlox.IMPALA("CartPole-v1", **{**settings, "n_steps": 2**19}).train(32)


def test_a_worker_limits_the_size_of_networks():
    sessions = ActorSessions(EnvSessions("CartPole-v1"))
    fields = {"n_envs": 1, "n_steps": 1, "seed": 0, "config": {"hidden_sizes": [8192, 8192]}}
    with pytest.raises(ValueError, match="hidden_sizes must need at most"):
        sessions(Message("hello", fields))
    with pytest.raises(TypeError, match="unknown hyper-parameter 'code'"):
        sessions(Message("hello", {**fields, "config": {"code": "print(1)"}}))
    small = ActorSessions(EnvSessions("CartPole-v1"), limit=2**20)
    with pytest.raises(ValueError, match="at most 262,144 weights, which fit in a message of 1,048,576 bytes"):
        small(Message("hello", {**fields, "config": {"hidden_sizes": [512, 512]}}))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("obs", lambda x: x[:, :1], "obs must be"),
        ("rewards", lambda x: x.astype(np.float64), "rewards must be"),
        ("obs", lambda x: x * np.nan, "finite"),
        ("log_probs", lambda x: x - np.inf, "finite"),
        ("actions", lambda x: x + 2, "actions must be"),
        ("version", lambda x: x + 1, "version must be 7"),
        ("limits", lambda x: np.array([[5, 0]]), "reached must be"),
        ("seconds", lambda x: None, "must be a trajectory"),
        ("moments/obs_mean", lambda x: np.zeros(3), "must be one of"),
        ("moments/other", lambda x: np.zeros(3), "must be one of"),
    ],
)
def test_answers_of_a_worker_are_validated(name, change, message):
    plan = ActorPlan("CartPole-v1", 2, 5, 0, NativePolicy(4, 2, [8], False), IMPALAConfig(hidden_sizes=[8]))
    Answer(plan).require_refused(name, change, message)


def test_settings_are_checked():
    for settings, message in (
        ({"actors": "boats"}, "actors must be one of threads, processes, ray, grpc"),
        ({"rollouts_per_update": 3}, r"at most n_actors \* rollouts_ahead, 2"),
        ({"actors": "grpc"}, "worker_addresses must name the workers"),
        ({"actors": "threads", "worker_addresses": ["a:1"]}, "be empty unless actors=grpc"),
        ({"actor_timeout": 0.0}, "actor_timeout must be > 0"),
    ):
        with pytest.raises(ValueError, match=message):
            impala(**settings)


def test_damaged_states_are_errors(tmp_path):
    algorithm = impala()
    algorithm.train(64)
    state = algorithm.collector.state()
    algorithm.close()
    for key in ("turn", "answer0.0/rewards", "actor1/keys"):
        other = impala()
        cut = {name: array for name, array in state.items() if name != key}
        with pytest.raises((ValueError, KeyError), match=key.rpartition("/")[2]):
            _ = other.collector.restore(cut) and other.train(64)
        other.close()
    assert not impala(n_actors=1).collector.restore(state)
