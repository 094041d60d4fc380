"""SAC and TD3 that start from an offline policy, with the dataset mixed into their batches."""

import functools
import json
import warnings

import forked
import numpy as np
import probes
import pytest
import torch
from run_results import kill_when_there, weights

import rlox
from rlox.algorithms import BC, CQL, DQN, IQL, PPO, SAC, TD3, TD3BC
from rlox.checkpoint import load_checkpoint
from rlox.nn.batch import TransitionBatch
from rlox_cli.records.runs import unit_of

pytestmark = pytest.mark.slow

BOTH = pytest.mark.parametrize("kind", [SAC, TD3])
SMALL = {"hidden_sizes": [16, 16], "batch_size": 32, "learning_starts": 0, "buffer_size": 2_000, "seed": 3}
MARK = 100.0  # a reward that Pendulum never returns


def recorded(n=50, reward=MARK, obs_dim=3, act_dim=1, **options):
    """`n` transitions numbered by their first observation; every tenth ends an episode."""
    rng = np.random.default_rng(0)
    obs = np.stack([np.arange(n), *np.zeros((obs_dim - 1, n))], 1).astype(np.float32)
    ends = np.arange(n) % 10 == 9
    return rlox.OfflineDatasetBuffer(
        obs, obs + 1, rng.uniform(-1, 1, (n, act_dim)), np.full(n, reward), ends, np.zeros(n, bool), **options
    )


def spied(algorithm):
    """A list that collects the batches of all updates and the size of the memory at each."""
    name = "update_native" if algorithm.backend == "native" else "update"
    update, seen = getattr(algorithm, name), []

    def spy(batch):
        seen.append((batch, len(algorithm.buffer)))
        return update(batch)

    setattr(algorithm, name, spy)
    return seen


@BOTH
@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize(("share", "n"), [(0.5, 16), (0.1, 3), (0.9, 29)])
def test_every_batch_has_its_share_of_both(kind, backend, share, n):
    algorithm = kind("Pendulum-v1", 2, dataset=recorded(), dataset_share=share, backend=backend, **SMALL)
    assert (backend == "torch") or algorithm.backend_reason.endswith(
        "; step by step, since a dataset is mixed into the batches"
    )
    seen = spied(algorithm)
    algorithm.train(400)
    # Two transitions are added at a time, until there are enough for the first update.
    assert seen[0][1] == 32 - n + (32 - n) % 2
    found = set()
    for batch, _ in seen:
        rewards, obs, discounts = (batch.array(name) for name in ("rewards", "obs", "discounts"))
        theirs = rewards == MARK
        assert (len(rewards), theirs.sum()) == (32, n)
        rows = obs[theirs][:, 0].astype(int)
        found |= set(rows)
        assert np.array_equal(batch.array("next_obs")[theirs], obs[theirs] + 1)
        np.testing.assert_allclose(discounts[theirs], np.where(rows % 10 == 9, 0, 0.99), rtol=1e-6)
        np.testing.assert_allclose(discounts[~theirs], 0.99, rtol=1e-6)
        assert (np.abs(obs[~theirs][:, :2]) <= 1).all()
    assert found == set(range(50))


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_n_step_returns_and_priorities_are_only_for_the_memory(backend):
    settings = {**SMALL, "buffer": "prioritized", "n_step": 3, "gamma": 0.9, "target_noise": 0.0, "backend": backend}
    algorithm, alone = (TD3("Pendulum-v1", dataset=recorded(), **settings) for _ in range(2))
    seen = spied(algorithm)
    algorithm.train(60)
    for batch, _ in seen:
        theirs = batch.array("rewards") == MARK
        assert theirs.sum() == 16
        rows = batch.array("obs")[theirs][:, 0].astype(int)
        np.testing.assert_allclose(batch.array("discounts")[theirs], np.where(rows % 10 == 9, 0, 0.9), rtol=1e-6)
        steps = np.log(batch.array("discounts")[~theirs]) / np.log(0.9)  # fewer than three for the newest
        np.testing.assert_allclose(steps, steps.round(), atol=1e-5)
        assert (steps.min() > 0.9, steps.round().max()) == (True, 3)
        assert (batch.array("weights")[theirs] == 1).all()
        assert len(batch.indices) == 16

    # Repeat the first batch with a new copy: the reported errors are only of the rows from the memory.
    reported = {}

    class Listener:
        def update_priorities(self, indices, priorities):
            reported[len(reported)] = (indices, priorities)

    alone._memory._buffer = Listener()
    update = alone.update_native if backend == "native" else alone.update
    batch = seen[0][0]
    ours = batch.array("rewards") != MARK
    names = ("obs", "actions", "rewards", "next_obs", "discounts", "weights")
    part = TransitionBatch(**{name: batch.array(name)[ours] for name in names}, indices=batch.indices)
    before = [p.clone() for p in alone.critics.parameters()]
    update(batch)
    for p, q in zip(alone.critics.parameters(), before, strict=True):
        p.data.copy_(q)
    update(part)
    assert np.array_equal(reported[0][0], reported[1][0])
    np.testing.assert_allclose(reported[0][1], reported[1][1], rtol=1e-4)


def test_running_statistics_are_for_both_parts():
    algorithm = TD3("Pendulum-v1", dataset=recorded(), normalize_obs=True, **SMALL)
    seen = spied(algorithm)
    algorithm.train(40)
    batch, _ = seen[-1]
    theirs = batch.array("rewards") == MARK
    every = algorithm.normalizer.normalize(recorded().get_state()["obs"])
    assert all((np.abs(every - row).max(1) < 1e-6).any() for row in batch.array("obs")[theirs])


@BOTH
@pytest.mark.parametrize("memory", ["uniform", "prioritized"])
def test_resume_is_exact(kind, memory, tmp_path):
    def make():
        return kind("Pendulum-v1", 2, dataset=recorded(), buffer={"name": memory}, **SMALL)

    straight, cut = make(), make()
    straight.train(300)
    cut.train(160, schedule_timesteps=300)
    cut.save(tmp_path / "a.safetensors", memory=True)
    loaded = kind.from_checkpoint(tmp_path / "a.safetensors", dataset=recorded())
    loaded.train(until=300)
    assert loaded.counters.updates == straight.counters.updates == 143
    one, other = (x._checkpoint().tensors for x in (straight, loaded))
    np.testing.assert_equal(one, other)


@BOTH
def test_a_checkpoint_knows_its_dataset(kind, tmp_path):
    with_one, without = (kind("Pendulum-v1", dataset=dataset, **SMALL) for dataset in (recorded(), None))
    for algorithm, name in ((with_one, "a"), (without, "b")):
        algorithm.train(40)
        algorithm.save(tmp_path / name)
    for other in (recorded(51), recorded(reward=MARK + 1)):
        with pytest.raises(ValueError, match=r"the dataset must be that of the saved training, .*'rows': 50"):
            kind.from_checkpoint(tmp_path / "a", dataset=other)
    with pytest.raises(ValueError, match=r"must be that of the saved training, none, got .*init_from"):
        kind.from_checkpoint(tmp_path / "b", dataset=recorded())
    acting = kind.from_checkpoint(tmp_path / "a")
    x = np.zeros((1, 3), np.float32)
    assert np.array_equal(acting.predict(x), with_one.predict(x))
    with pytest.raises(ValueError, match=r"trained with a dataset .*; pass it to from_checkpoint\(dataset=\.\.\.\)"):
        acting.train(10)
    acting.save(tmp_path / "c")  # saving must not lose anything
    assert kind.from_checkpoint(tmp_path / "c", dataset=recorded())._dataset is not None


@functools.cache
def random_play():
    """A thousand random steps of Levers, and the spec of the environment."""
    algorithm = SAC(probes.Levers, n_envs=4, learning_starts=10_000, batch_size=32, seed=0)
    algorithm.train(1_000)
    rows = algorithm.buffer.gather(np.arange(1_000))
    names = ("obs", "next_obs", "actions", "rewards", "terminated", "truncated")
    return rlox.OfflineDatasetBuffer(*(rows[name] for name in names)), algorithm.spec


def taught(cls, **settings):
    """An offline algorithm after a few updates on random steps of Levers, and the dataset."""
    data, spec = random_play()
    learner = cls(
        data, 3, 2, act_low=spec.act_low, act_high=spec.act_high, env_id=probes.Levers, hidden_sizes=[32, 32],
        normalize_obs=False, seed=1, **settings,
    )  # fmt: skip
    learner.train(60)
    return learner, data


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("online", [SAC, TD3])
@pytest.mark.parametrize("offline", [TD3BC, IQL, CQL])
def test_the_initial_policy_equals_the_offline_one(offline, online, backend, tmp_path):
    learner, data = taught(offline)
    learner.save(tmp_path / "a.safetensors")
    start = online(probes.Levers, dataset=data, backend=backend, **{**SMALL, "hidden_sizes": [32, 32]})
    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        start.init_from(tmp_path / "a.safetensors")
    why = {
        (TD3BC, SAC): "it has none: they start at 1, before the tanh",
        (IQL, TD3): "exploration_noise replaces them",
        (CQL, TD3): "exploration_noise replaces them",
    }.get((offline, online))
    assert [str(warning.message).partition(", because ")[2] for warning in reported] == ([why] if why else [])
    ours, theirs = (algorithm.evaluate(5, seed=7).returns for algorithm in (start, learner))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    for p, q in zip(start.critics.parameters(), learner.critics.parameters(), strict=True):
        assert torch.equal(p, q)
    assert torch.equal(start._target_block, start.critic_optimizer.flat)
    if online is TD3:
        for p, q in zip(start.target_policy.parameters(), start.policy.parameters(), strict=True):
            assert torch.equal(p, q)
    elif offline is not CQL:
        with torch.no_grad():
            log_std = start.policy(torch.randn(5, 3))[:, 2:]
        torch.testing.assert_close(log_std, (learner.policy.log_std if offline is IQL else torch.zeros(2)).expand(5, 2))
    # Online updates also train the remaining outputs.
    before = start.policy.net[-1].weight.detach().clone()
    start.train(100)
    assert (start.policy.net[-1].weight.detach() != before).any(1).all()


def test_it_continues_to_learn(tmp_path):
    learner, data = taught(TD3BC)
    learner.save(tmp_path / "a.safetensors")
    online = TD3(
        probes.Levers, dataset=data, n_envs=4, train_freq=4, learning_rate=3e-3, gamma=0.5,
        **{**SMALL, "hidden_sizes": [32, 32]},
    )  # fmt: skip
    online.init_from(tmp_path / "a.safetensors")
    before = online.evaluate(10).returns.mean() / 5
    online.train(3_000)
    # The threshold of TD3 alone, which has 4,000 steps for it.
    assert online.evaluate(10).returns.mean() / 5 > max(-0.25, before)


class Odd:
    """A dataset without metadata, with observations of 5 numbers."""

    def sample(self, batch_size, seed):
        rows = {name: np.zeros((batch_size, 5), np.float32) for name in ("obs", "next_obs")}
        rest = {name: np.zeros(batch_size, bool) for name in ("terminated", "truncated")}
        return {**rows, **rest, "actions": np.zeros((batch_size, 1)), "rewards": np.zeros(batch_size)}


@BOTH
def test_what_cannot_be_mixed_is_refused(kind, tmp_path):
    def refused(message, error=ValueError, **settings):
        with pytest.raises(error, match=message):
            kind("Pendulum-v1", **{**SMALL, "dataset": recorded(), **settings})

    refused(r"must have observations of shape \(3,\), like the environment, got \(4,\)",
            dataset=recorded(obs_dim=4))  # fmt: skip
    refused("must have 1 action component.* got 2 floats", dataset=recorded(act_dim=2))
    refused(r"the dataset must give obs of shape \(B, 3,\), like the environment, got \(1, 5\)", dataset=Odd())
    refused("must give unchanged observations, .*normalize=false", dataset=recorded(normalize=True))
    refused("dataset must be a dataset such as .*, got str", TypeError, dataset="data.arrow")
    refused("reward_fn must be None with a dataset", reward_fn="sign")
    refused(r"dataset_share must be in \(0, 1\), got 1.0", dataset_share=1.0)
    refused("dataset_share must leave at least one row of a batch of 32 .*, got 0.01", dataset_share=0.01)
    refused("dataset_share must leave at least one row of a batch of 32 .*, got 0.99", dataset_share=0.99)
    for share, rows in ((1 / 32, 31), (31 / 32, 1)):
        assert kind("Pendulum-v1", dataset=recorded(), dataset_share=share, **SMALL)._min_rows == rows
    for other, says in ((DQN, "dataset must be None, because dqn learns"), (PPO, "unknown hyper-parameter 'dataset'")):
        with pytest.raises(TypeError, match=f"{other.__name__}: {says}"):
            other("CartPole-v1", dataset=recorded())

    clone, _ = taught(BC)
    clone.save(tmp_path / "bc")
    start = kind(probes.Levers, **{**SMALL, "hidden_sizes": [32, 32]})
    with pytest.raises(ValueError, match=r"must contain critics, .* got a checkpoint of bc"):
        start.init_from(tmp_path / "bc")
    tanh, _ = taught(TD3BC, activation="tanh")
    tanh.save(tmp_path / "tanh")
    for other in (start, taught(TD3BC)[0]):
        with pytest.raises(ValueError, match="activation must be the checkpoint's, tanh"):
            other.init_from(tmp_path / "tanh")
    for name in ("normalize_rewards", "unit_norm"):  # which the critics of a dataset have not learned with
        start = kind(probes.Levers, **{**SMALL, "hidden_sizes": [32, 32], "activation": "tanh", name: True})
        with pytest.raises(ValueError, match=f"{name} must be the checkpoint's, False, got True"):
            start.init_from(tmp_path / "tanh")
    with pytest.raises(ValueError, match=r"^TD3BC.from_checkpoint: activation must be the checkpoint's, tanh"):
        TD3BC.from_checkpoint(tmp_path / "tanh", env_id=probes.Levers, activation="relu")


def command(*args, cwd, fails=False):
    done = forked.run(*args, cwd=cwd)
    assert (done.returncode != 0) is fails, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr if fails else done.stdout


@pytest.fixture(scope="module")
def play(tmp_path_factory):
    """600 random steps of Pendulum, and a few updates of IQL on them."""
    folder = tmp_path_factory.mktemp("play")
    command("collect", "--env", "Pendulum-v1", "--steps", "600", "--out", "random.arrow", cwd=folder)
    learner = IQL(rlox.open_dataset(folder / "random.arrow"), 3, 1, act_high=2.0, hidden_sizes=[16, 16])
    learner.train(50)
    learner.save(folder / "iql.safetensors")
    return folder


def arguments(play):
    small = ("algo.hidden_sizes=[16,16]", "algo.batch_size=32", "logger=none", "eval.n_points=2", "eval.n_episodes=2")
    start = (f"init_from={play / 'iql.safetensors'}", "algo.learning_starts=0", "tuned=off")
    return ["train", "algo=td3", f"dataset={play / 'random.arrow'}", *start, *small]


def test_a_killed_run_resumes_bit_for_bit(play, tmp_path):
    typed = [*arguments(play), "checkpoint.every_steps=200", "env.n_envs=1"]
    last = tmp_path / "killed/checkpoints/last.safetensors"
    kill_when_there(last, [*typed, "total_timesteps=40_000", "hydra.run.dir=killed"], tmp_path)
    done = load_checkpoint(last).header["counters"]["env_steps"]
    assert 0 < done < 40_000
    end = f"total_timesteps={done + 400}"
    command("train", "resume=killed", end, cwd=tmp_path)
    printed = command(*typed, end, "schedule_timesteps=40_000", "hydra.run.dir=straight", cwd=tmp_path)
    assert "a dataset is mixed into the batches" in printed
    assert "standard deviations are not those of the checkpoint's policy, because exploration_noise" in printed
    one, other = weights(last), weights(tmp_path / "straight/checkpoints/last.safetensors")
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[key], other[key]) for key in one)
    header = load_checkpoint(last).header
    assert header["dataset"]["rows"] == 600
    assert header["run"]["dataset"]["source"] == str(play / "random.arrow")
    assert unit_of(header["run"]) == "steps"
    rows = [json.loads(line) for line in (tmp_path / "straight/metrics.jsonl").read_text().splitlines()]
    assert any("loss/q" in row for row in rows)

    # Another file with the same name.
    moved = tmp_path / "moved.arrow"
    (play / "random.arrow").rename(moved)
    try:
        command("collect", "--env", "Pendulum-v1", "--steps", "600", "--seed", "1", "--out", "random.arrow", cwd=play)
        printed = command("train", "resume=killed", f"total_timesteps={done + 600}", cwd=tmp_path, fails=True)
        assert "the dataset must be that of the saved training" in printed
        printed = command("train", "resume=killed", f"dataset={moved}", cwd=tmp_path, fails=True)
        assert "must stay dataset=" in printed
    finally:
        moved.replace(play / "random.arrow")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["dataset.normalize=true"], "must give unchanged observations"),
        (["dataset.normalize_returns=true"], "dataset.normalize_returns must be false if the replay memory"),
    ],
)
def test_errors_are_one_paragraph(play, tmp_path, extra, message):
    assert message in command(*arguments(play), "total_timesteps=200", *extra, cwd=tmp_path, fails=True)


def test_on_policy_algorithms_take_no_dataset(play, tmp_path):
    printed = command("train", "algo=ppo", f"dataset={play / 'random.arrow'}", cwd=tmp_path, fails=True)
    assert "dataset must be left out with algo=ppo" in printed
    assert "algorithms that learn from a dataset: bc, cql, dreamer, iql, sac, td3, td3_bc" in printed
