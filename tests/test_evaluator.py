"""Evaluation in parallel to training: the same numbers and checkpoints, and no process or result is lost."""

import os
import pickle
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import waiting_envs
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.wrappers import TimeLimit
from run_results import weights

from rlox import A2C, DQN, PPO, SAC, TD3, TD3BC, DiscretePolicy, OfflineDatasetBuffer, open_dataset
from rlox.callbacks import Callback, CheckpointCallback, EvalCallback, VideoCallback
from rlox.callbacks.loggers import LoggerCallback
from rlox.checkpoint import load_checkpoint
from rlox.config import RunConfig
from rlox.evaluation.episodes import Episodes, evaluate
from rlox.evaluation.evaluator import cores
from rlox.nn.modules import copy_module, flatten_
from rlox.tracking import durable_rows

# An environment of gymnasium, so that evaluations are not native.
FOREIGN = {"env_wrappers": [{"TimeLimit": {"max_episode_steps": 60}}], "hidden_sizes": [16]}
LATER = {"learning_starts": 100, "batch_size": 16}
SLOW = {"n_steps": 32, "hidden_sizes": [8]}


class Log(LoggerCallback):
    def __init__(self):
        self.rows = []

    def log(self, step, metrics):
        self.rows.append((step, {k: v for k, v in metrics.items() if not k.startswith("time/")}))


def children(pid):
    """The processes that `pid` has started."""
    return [int(x) for path in Path(f"/proc/{pid}/task").glob("*/children") for x in path.read_text().split()]


def gone(pids):
    """Whether all of these processes end within a minute."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.02)
    return False


def played(found):
    return [(step, e.returns.tolist(), e.lengths.tolist()) for step, e in found.evaluations]


def trained(make, folder, workers, n_points=4, n_episodes=3, steps=1500, more=(), **options):
    log = Log()
    evaluations = EvalCallback(n_points, n_episodes, 11, workers=workers, **options)
    algorithm = make(callbacks=[log, evaluations, *more, CheckpointCallback(folder)])
    algorithm.train(steps)
    algorithm.close()
    return evaluations, log.rows


def header(path):
    kept = load_checkpoint(path).header
    return {name: kept[name] for name in ("counters", "generators", "callbacks", "evaluation") if name in kept}


KINDS = {
    "ppo": lambda **k: PPO("CartPole-v1", 2, 3, n_steps=32, normalize_obs=True, **FOREIGN, **k),
    "ppo by torch": lambda **k: PPO("CartPole-v1", 2, 3, n_steps=32, backend="torch", **FOREIGN, **k),
    "a2c": lambda **k: A2C("Pendulum-v1", 2, 3, **FOREIGN, **k),
    "dqn": lambda **k: DQN("CartPole-v1", 2, 3, dueling=True, **LATER, **FOREIGN, **k),
    "sac": lambda **k: SAC("Pendulum-v1", 2, 3, **LATER, **FOREIGN, **k),
    "td3": lambda **k: TD3("Pendulum-v1", 2, 3, **LATER, **FOREIGN, **k),
    "native environment": lambda **k: PPO("CartPole-v1", 2, 3, n_steps=32, hidden_sizes=[16], **k),
    "images": lambda **k: PPO("Pictures-v0", 2, 3, n_steps=16, batch_size=32, n_epochs=1, **k),
}
OFTEN = ("ppo", "sac", "native environment", "images")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in OFTEN else pytest.mark.exhaustive) for kind in KINDS]
)
def test_the_same_numbers_and_checkpoints(kind, tmp_path):
    steps = 200 if kind == "images" else 1500
    here, there = (trained(KINDS[kind], tmp_path / str(n), n, steps=steps) for n in (0, 2))
    assert here[0].beside_s == 0.0 < there[0].beside_s
    assert played(here[0]) == played(there[0])
    np.testing.assert_equal(here[1], there[1])  # rows in the same order
    for name in ("best.safetensors", "last.safetensors"):
        first, second = tmp_path / "0" / name, tmp_path / "2" / name
        assert header(first) == header(second)
        a, b = weights(first), weights(second)
        assert a.keys() == b.keys()
        assert all(a[key].tobytes() == b[key].tobytes() for key in a)


@pytest.mark.slow
def test_an_offline_policy_with_its_statistics(tmp_path):
    rng = np.random.default_rng(0)
    obs, n = rng.normal(size=(200, 3)).astype(np.float32), 200
    actions, ends = rng.uniform(-1, 1, (n, 1)).astype(np.float32), np.arange(n) % 50 == 49
    data = OfflineDatasetBuffer(obs, np.roll(obs, -1, 0), actions, np.ones(n, np.float32), ~ends & ends, ends)

    def make(**k):
        wrappers = [{"TimeLimit": {"max_episode_steps": 60}}]
        sizes = {"hidden_sizes": [8], "normalize_obs": True}
        return TD3BC(data, 3, 1, seed=0, env_id="Pendulum-v1", env_wrappers=wrappers, act_high=2.0, **sizes, **k)

    found = []
    for n in (0, 1):
        evaluations = EvalCallback(3, 2, 11, workers=n)
        make(callbacks=[evaluations]).train(60)
        found.append(played(evaluations))
    assert found[0] == found[1]


@pytest.mark.slow
def test_training_continues_meanwhile_and_best_is_of_the_evaluated_step(tmp_path, monkeypatch):
    """The evaluation cannot end before training has done two more updates."""
    flag = tmp_path / "go"
    monkeypatch.setenv("RLOX_TEST_WAITS_FOR", str(flag))

    class Go(Callback):
        steps = ()

        def on_step(self, *, step, **info):
            self.steps += (step,)
            if step == 64 * 6:
                # At this point the evaluation of step 256 is pending.
                self.saved = (tmp_path / "last.safetensors").exists()
                flag.touch()

    class Heard(Callback):
        acts_on_evaluation = False
        at = ()

        def on_evaluation(self, *, step, algorithm, **info):
            self.at += ((step, algorithm.counters.steps),)

    heard, go, log = Heard(), Go(), Log()
    evaluations = EvalCallback(2, 2, 11, workers=1)
    saves = CheckpointCallback(tmp_path, every_steps=64)
    ppo = PPO("Waits-v0", 2, 3, callbacks=[log, evaluations, heard, go, saves], env_kwargs={"pid": os.getpid()}, **SLOW)
    ppo.train(512)
    assert heard.at[0][0] == 256
    assert heard.at[0][1] > 256
    assert heard.at[1] == (512, 512)
    steps = [step for step, _ in log.rows]
    assert steps == sorted(steps), "a logger was given an earlier step"
    best = load_checkpoint(tmp_path / "best.safetensors").header
    assert best["counters"]["env_steps"] == (256 if evaluations.best == heard_mean(evaluations, 0) else 512)
    again = PPO.from_checkpoint(tmp_path / "best.safetensors").evaluate(2, 11)
    assert again.summary()["mean_return"] == best["evaluation"]["mean_return"]


def heard_mean(evaluations, i):
    return evaluations.evaluations[i][1].summary()["mean_return"]


@pytest.mark.slow
def test_no_last_checkpoint_is_saved_while_an_evaluation_is_pending(tmp_path, monkeypatch):
    """No checkpoint is saved while an evaluation is pending: a resumed run would lack that evaluation."""
    flag = tmp_path / "go"
    monkeypatch.setenv("RLOX_TEST_WAITS_FOR", str(flag))
    seen = []

    class Look(Callback):
        def on_checkpoint(self, *, step, kind, **info):
            if kind == "last":
                seen.append(step)

        def on_step(self, *, step, **info):
            if step == 64 * 6:
                flag.touch()

    evaluations = EvalCallback(2, 2, 11, workers=1)
    saves = CheckpointCallback(tmp_path, every_steps=64)
    PPO(
        "Waits-v0", 2, 3, callbacks=[evaluations, Look(), saves], env_kwargs={"pid": os.getpid()}, **SLOW
    ).train(512)  # fmt: skip
    assert not {256, 320} & set(seen)
    assert {64, 512} <= set(seen)


class Kills(Callback):
    """At a given step, kills the child processes that were started after this callback was created."""

    def __init__(self, at):
        self.at, self.killed, self.before = at, [], children(os.getpid())

    def on_step(self, *, step, **info):
        if step == self.at:
            self.killed = [pid for pid in children(os.getpid()) if pid not in self.before]
            for pid in self.killed:
                os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("at", [128, 192])
def test_a_worker_that_is_killed_loses_nothing(at, tmp_path):
    def make(**k):
        return PPO("Slow-v0", 2, 3, **SLOW, **k)

    here = trained(make, tmp_path / "0", 0, steps=512)
    kills = Kills(at)  # either idle or in the middle of an evaluation
    with pytest.warns(RuntimeWarning, match=r"died \(signal 9; .*evaluations continue in this process"):
        there = trained(make, tmp_path / "1", 1, steps=512, more=[kills])
    assert kills.killed
    assert played(here[0]) == played(there[0])
    np.testing.assert_equal(here[1], there[1])
    assert header(tmp_path / "0/best.safetensors") == header(tmp_path / "1/best.safetensors")


@pytest.mark.slow
def test_an_exception_of_the_environment_shows_its_location(command, tmp_path):
    arguments = ["train", "--import", "waiting_envs", "env=FailsInEvaluation-v0", "eval.seed=11", "eval.workers=1"]
    small = ["logger=none", "total_timesteps=512", "algo.n_steps=32", "env.n_envs=2", "hydra.run.dir=run"]
    before = set(children(os.getpid()))  # from other tests, including multiprocessing's resource tracker
    code, _, err = command(*arguments, *small)
    assert code == 1
    assert "evaluation on FailsInEvaluation-v0: step" in err
    assert "failed with KeyError: 'the elbow'" in err
    assert 'raise KeyError("the elbow")' in err
    assert "the elbow" in (tmp_path / "run/traceback.txt").read_text()
    assert gone(set(children(os.getpid())) - before)


@pytest.mark.slow
@pytest.mark.skipif(cores() < 2, reason="auto needs a second core")
def test_auto_uses_a_process_if_evaluations_are_slow_and_nothing_waits_for_them(tmp_path):
    def beside(env="Slow-v0", more=(), **options):
        evaluations = EvalCallback(6, 2, 11, workers=-1, **options)
        PPO(env, 2, 3, callbacks=[evaluations, *more], **SLOW).train(384)
        return evaluations.beside_s

    class Acts(Callback):
        def on_evaluation(self, **info):
            pass

    assert beside() > 0.0
    assert beside("CartPole-v1") == 0.0  # native
    assert beside(stop_at=1e9) == 0.0
    assert beside(patience=100) == 0.0
    assert beside(more=[Acts()]) == 0.0


@pytest.mark.slow
def test_stopping_rules_stop_at_the_same_point(tmp_path):
    def make(**k):
        return PPO("Slow-v0", 2, 3, **SLOW, **k)

    for option in ({"stop_at": 5.0}, {"patience": 1}):
        runs = [trained(make, tmp_path / f"{n}{option}", n, steps=512, n_points=8, **option) for n in (0, -1)]
        assert played(runs[0][0]) == played(runs[1][0])
        assert runs[0][0].stopped == runs[1][0].stopped is not None
        with pytest.raises(ValueError, match="workers must be 0 or -1 here, got 1: training must wait"):
            trained(make, tmp_path / "x", 1, **option)


def test_invalid_workers_are_errors(tmp_path):
    class Mine(PPO):
        def evaluate(self, *args, **options):
            return super().evaluate(*args, **options)

    class Acts(Callback):
        def on_evaluation(self, **info):
            pass

    lock = __import__("threading").Lock()

    def refused(match, algorithm=PPO, env="CartPole-v1", more=()):
        agent = algorithm(env, 2, 3, callbacks=[EvalCallback(2, 2, workers=1), *more], **SLOW)
        with pytest.raises(ValueError, match=match):
            agent.train(128)

    refused("Mine has an evaluate of its own", Mine)
    refused("Acts acts on each evaluation", more=[Acts()])
    refused("there is another EvalCallback", more=[EvalCallback(3, 1)])
    refused("cloudpickle must be able to send", env=lambda: waiting_envs.Slow() if lock else None)
    if __import__("importlib.util").util.find_spec("imageio") is not None:
        refused("VideoCallback acts on each evaluation", more=[VideoCallback(tmp_path)])
    with pytest.raises(ValueError, match="workers must be >= 0, or -1"):
        EvalCallback(workers=-2)


def started(folder, *more):
    """Start `rlox train` with evaluations that do not end, and wait until one is pending."""
    words = ["train", "--import", "waiting_envs", "env=Waits-v0", "eval.workers=1", "eval.n_points=3"]
    small = ["logger=none", "total_timesteps=100000", "algo.n_steps=32", "env.n_envs=2", "hydra.run.dir=run"]
    tests = str(Path(__file__).parent / "helpers")
    env = {**os.environ, "RLOX_TEST_WAITS_FOR": str(folder / "go"), "PYTHONPATH": tests, "OMP_NUM_THREADS": "1"}
    program = (
        "import os, sys; from rlox_cli.main import app; "
        "sys.argv[1:] += [f'env.kwargs.pid={os.getpid()}']; app()"
    )  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-c", program, *words, *small, *more], cwd=folder, env=env,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not (found := children(process.pid)) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert found, process.stdout.read()
    return process, found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_process_is_left_however_training_ends(number, tmp_path):
    process, found = started(tmp_path, "total_timesteps=2000")
    # Training ends, and then waits for an evaluation that never ends.
    time.sleep(0.5)
    os.killpg(process.pid, number) if number == signal.SIGINT else os.kill(process.pid, number)
    if number == signal.SIGINT:
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
            os.killpg(process.pid, number)  # the second signal stops at once
    process.communicate(timeout=60)
    assert gone(found)


def test_an_episode_that_does_not_end_is_truncated(monkeypatch):
    module = PPO("CartPole-v1", 2, 3, **SLOW)
    with pytest.warns(
        RuntimeWarning, match=r"an episode of EndlessEvaluation-v0 did not end within 40 steps.*TimeLimit"
    ):
        found = evaluate(module.actor, "EndlessEvaluation-v0", 3, 11, max_steps=40)
    assert found.lengths.tolist() == [40] * 3
    assert found.returns.tolist() == [40.0] * 3
    assert found.n_cut == 3
    with pytest.warns(RuntimeWarning, match="an episode of CartPole-v1 did not end within 5 steps"):
        found = evaluate(module.actor, "CartPole-v1", 3, 11, max_steps=5)  # native
    assert found.lengths.tolist() == found.returns.tolist() == [5] * 3
    assert found.lengths.dtype == np.int64
    with pytest.warns(RuntimeWarning, match="did not end within 5 steps"):
        # More episodes than run in parallel.
        assert evaluate(module.actor, "CartPole-v1", 103, 11, max_steps=5).n_cut == 103
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert evaluate(module.actor, "CartPole-v1", 3, 11).n_cut == 0
        # The limit of an environment may be longer than the default limit.
        monkeypatch.setattr(sys.modules[evaluate.__module__], "MAX_STEPS", 5)
        for wrappers in ([], ["RecordEpisodeStatistics"]):
            found = evaluate(module.actor, "CartPole-v1", 3, 11, wrappers=wrappers)
            assert (found.n_cut, found.deterministic) == (0, True)
            assert found.lengths.dtype == np.int64
            assert found.lengths.min() > 5
    with pytest.raises(ValueError, match="max_steps must be >= 1, got 0"):
        evaluate(module.actor, "CartPole-v1", 3, 11, max_steps=0)


def test_without_a_time_limit_training_bounds_evaluation(tmp_path):
    """Otherwise, a policy that walks in circles would be evaluated for 108,000 steps in each episode."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")
        evaluations = EvalCallback(n_points=2, n_episodes=2, seed=11)
        agent = PPO(waiting_envs.Endless, n_envs=2, n_steps=32, batch_size=32, callbacks=[evaluations])
        agent.train(128)
        assert 10 < max(agent.counters.recent_lengths) < 100
        assert [one.lengths.tolist() for _, one in evaluations.evaluations] == [[1000, 1000]] * 2
        agent.counters.remember(np.array([1.0]), np.array([150]))
        assert agent.evaluate(1, 11).lengths.tolist() == [1500]
        agent.save(tmp_path / "a.safetensors")
        loaded = PPO.from_checkpoint(tmp_path / "a.safetensors", env_id=waiting_envs.Endless)
        assert loaded.evaluate(1, 11).lengths.tolist() == [1500]
        assert loaded.evaluate(1, 11, max_steps=7).lengths.tolist() == [7]
    texts = [str(one.message) for one in warned if "did not end" in str(one.message)]
    assert len(texts) == 2  # the same text once, and the other limit
    assert "within 10 times the length of the longest one in training and was cut there" in texts[0]


def test_a_time_limit_within_a_callable_ends_the_episodes():
    def limited():
        return TimeLimit(waiting_envs.Endless(), 1200)

    agent = PPO("CartPole-v1", 2, 3, **SLOW)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = evaluate(agent.actor, limited, 1, 11, longest=20)
    assert (found.lengths.tolist(), found.n_cut) == ([1200], 0)


@pytest.mark.parametrize(
    ("own", "max_steps", "longest", "limit"),
    [
        (None, None, None, 108_000),
        (None, None, 3, 1_000),
        (None, None, 500, 5_000),
        (None, None, 50_000, 108_000),
        (200, None, 500, 108_000),  # it ends by itself
        (200_000, None, 3, 200_000),
        (200_000, 5, 3, 5),
    ],
)
def test_where_episodes_of_an_evaluation_are_cut(own, max_steps, longest, limit):
    episodes = Episodes("CartPole-v1", 1, 0, True, None, False, max_steps, longest)
    assert episodes.step_limit(own) == limit


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_on_an_environment_that_never_ends_an_episode(workers, command, tmp_path, recwarn):
    arguments = ["train", "--import", "waiting_envs", "env=EndlessEvaluation-v0", "eval.max_steps=50", "eval.seed=11"]
    small = ["logger=none", "total_timesteps=128", "algo.n_steps=32", "env.n_envs=2", "hydra.run.dir=run"]
    code, out, err = command(*arguments, *small, f"eval.workers={workers}", "eval.n_points=2")
    assert code in (0, None), err
    rows = [row for row in durable_rows(tmp_path / "run") if "eval/mean_length" in row]
    assert [row["eval/mean_length"] for row in rows] == [50.0, 50.0]
    assert any("did not end within 50 steps" in str(one.message) for one in recwarn)
    code, out, err = command("eval", "run", "--import", "waiting_envs")
    assert "reproduced exactly" in out, err


def test_collecting_a_dataset_with_endless_episodes_ends(command, tmp_path, monkeypatch):
    """Collection counts steps, not episodes, as it did in 0.6.0."""

    def reset(env, *, seed=None, options=None):
        env.evaluates = True  # whatever the seed
        return CartPoleEnv.reset(env, seed=seed, options=options)

    monkeypatch.setattr(waiting_envs.Endless, "reset", reset)
    environment = ["--import", "waiting_envs", "--env", "EndlessEvaluation-v0", "--n-envs", "1"]
    code, _, err = command("collect", *environment, "--steps", "100", "--out", "d.arrow")
    assert code in (0, None), err
    rows = open_dataset("d.arrow").get_state()
    assert (rows["obs"].shape, rows["actions"].shape, rows["rewards"].tolist()) == ((100, 4), (100, 1), [1.0] * 100)
    assert not rows["terminated"].any()  # a random policy's pole falls within 100 steps, but the episode goes on
    assert rows["truncated"].tolist() == 99 * [False] + [True]
    np.testing.assert_array_equal(rows["obs"][1:], rows["next_obs"][:-1])


def test_a_seed_is_taken_modulo_2_31_where_the_environment_is_gymnasiums():
    """Some environments (ALE) accept no larger seeds."""
    actor = PPO("CartPole-v1", hidden_sizes=[8]).actor
    small, large, other = (
        evaluate(actor, "CartPole-v1", 3, seed, wrappers=["RecordEpisodeStatistics"]) for seed in (5, 2**31 + 5, 6)
    )
    np.testing.assert_array_equal(small.returns, large.returns)
    assert small.returns.tolist() != other.returns.tolist()


@pytest.mark.parametrize("wrappers", [[], ["RecordEpisodeStatistics"]], ids=["native", "gymnasium"])
def test_noise_is_evaluated_with_where_asked_for(wrappers):
    td3 = TD3("Pendulum-v1", hidden_sizes=[8], exploration_noise=0.5, noise_correlation=0.5, env_wrappers=wrappers)
    noisy, again, without = (td3.evaluate(2, 11, deterministic=kind) for kind in (False, False, True))
    np.testing.assert_array_equal(noisy.returns, again.returns)
    assert not noisy.deterministic
    assert (noisy.returns != without.returns).all()


def test_seed_10_000_by_default():
    actor = PPO("CartPole-v1", hidden_sizes=[8]).actor
    found = evaluate(actor, "CartPole-v1", 2)
    assert found.seed == 10_000
    np.testing.assert_array_equal(found.returns, evaluate(actor, "CartPole-v1", 2, 10_000).returns)


def test_a_copied_policy_has_the_alignment_of_the_original():
    """The last bits of a matrix product may depend on it: MKL on an AMD EPYC."""
    policy = DiscretePolicy(obs_dim=5, n_actions=3, hidden=(7,))
    flatten_(list(policy.parameters()))
    original = [p.data_ptr() % 64 for p in policy.parameters()]
    assert len(set(original)) > 2
    made = copy_module(policy)
    for one in (made, pickle.loads(pickle.dumps(made))):
        assert [p.data_ptr() % 64 for p in one.parameters()] == original
        assert all(torch.equal(p, q) for p, q in zip(one.parameters(), policy.parameters(), strict=True))
        assert max(p.untyped_storage().nbytes() - p.nbytes for p in one.parameters()) < 64


def test_a_seed_is_checked_for_all_of_its_uses_at_the_start():
    largest = 2**63 - 1 - 10_000  # evaluations use 10_000 + seed
    agent = PPO("CartPole-v1", n_envs=1, n_steps=8, hidden_sizes=[4], seed=largest)
    agent.train(8)
    assert agent.evaluate(1).seed == 2**63 - 1
    with pytest.raises(ValueError, match="PPO: seed must be"):
        PPO("CartPole-v1", seed=largest + 1)
    with pytest.raises(ValueError, match=r"seed must be in \[0, 2\*\*63 - 10_000\)"):
        RunConfig(seed=largest + 1)
    for seed in (-1, 2**63):
        with pytest.raises(ValueError, match="EvalCallback: seed must be"):
            EvalCallback(seed=seed)
