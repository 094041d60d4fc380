"""Filling the memory with the episodes of a dataset before the first step."""

import numpy as np
import pytest
from counting_agent import Counting
from tiny_world import Tiny

import rlox
from rlox import SequenceReplayBuffer
from rlox.callbacks import Callback
from rlox.collectors.sequences import SequenceCollector
from rlox.envs import make_vec_env
from rlox.world_models import pretraining


def played(env, n_steps, seed=0):
    """Transitions of one environment with random actions, and the rows that a collector stores for the same steps."""
    collector = SequenceCollector(env, n_envs=1, seed=seed)
    spec = collector.spec
    memory = SequenceReplayBuffer(10_000, spec.obs_dim, spec.model_width, state_dim=2 + spec.model_width)
    vec = make_vec_env(env, 1, seed)
    obs, rng, rows = vec.reset_all().copy(), rlox.kernels.rng.Rng(seed, 2), []
    agent = Counting(spec)
    for _ in range(n_steps):
        actions = spec.clip(spec.random_actions(rng, 1))
        step = vec.step_all(actions)
        rows.append([obs[0], actions.reshape(-1), float(step["rewards"][0]), step["final_obs"][0].copy(),
                     bool(step["terminated"][0]), bool(step["truncated"][0])])  # fmt: skip
        obs = step["obs"].copy()
        collector.step(agent, memory, random=True)
    obs, actions, rewards, after, terminated, truncated = (np.array(column) for column in zip(*rows, strict=True))
    actions = actions.astype(np.float32) if spec.continuous else actions[:, 0]
    dataset = rlox.OfflineDatasetBuffer(obs, after, actions, rewards.astype(np.float32), terminated, truncated)
    return spec, dataset, memory


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_rows_equal_those_of_a_collector(env, monkeypatch):
    monkeypatch.setattr(pretraining, "_AT_ONCE", 16)  # copy episodes in several pieces
    spec, dataset, memory = played(env, 450)
    filled = SequenceReplayBuffer(10_000, spec.obs_dim, spec.model_width, state_dim=2 + spec.model_width)
    pretraining.fill(filled, dataset, spec)
    found, expected = filled.get_state(), memory.get_state()
    n = expected["sizes"][0]
    last = found["sizes"][0]
    assert last == pretraining.n_rows(dataset)
    for name in ("obs", "actions", "rewards", "is_first", "state", "terminated"):
        np.testing.assert_allclose(found[name][0, :n], expected[name][0, :n], rtol=1e-6, err_msg=name)
    # An episode without an end in the data is truncated.
    assert found["truncated"][0, last - 1] or found["terminated"][0, last - 1]
    batch, plain = filled.sample(4, 8, 1, online=True), filled.sample(4, 8, 1)
    np.testing.assert_array_equal(batch["obs"], plain["obs"])  # none of the rows is new


def test_episodes_are_spread_over_environments():
    spec, dataset, _ = played("CartPole-v1", 300)
    buffer = SequenceReplayBuffer(3000, 4, 2, n_envs=3, state_dim=4)
    pretraining.fill(buffer, dataset, spec)
    state = buffer.get_state()
    assert state["sizes"].sum() == pretraining.n_rows(dataset)
    assert state["sizes"].max() - state["sizes"].min() <= dataset.stats()["max_episode_length"] + 1
    assert state["is_first"].sum() == dataset.n_episodes()


def test_pretraining_comes_first_and_a_resume_continues_it(tmp_path):
    _, dataset, _ = played("CartPole-v1", 300)
    arguments = {"env_id": "CartPole-v1", "n_envs": 1, "seed": 1, "pretrain_updates": 250, "learning_starts": 0}

    class Stopping(Callback):
        def on_step(self, *, step, algorithm, **info):
            if step == 0 and algorithm.counters.updates == 100:
                algorithm.save(tmp_path / "a.safetensors", memory=True)
            return True

    tiny = Tiny(**arguments, dataset=dataset, callbacks=[Stopping()])
    tiny.train(40)
    assert tiny.updated[:250] == [0] * 250
    assert tiny.counters.updates == 250 + 40 * 3 // 8
    state = tiny.buffer.get_state()
    n = pretraining.n_rows(dataset)
    assert state["is_first"][0, n]
    assert state["terminated"][0, n - 1] or state["truncated"][0, n - 1]
    again = Tiny.from_checkpoint(tmp_path / "a.safetensors", dataset=dataset)
    again.train()
    assert again.updated == tiny.updated[100:]
    expected, found = tiny.buffer.get_state(), again.buffer.get_state()
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
    # After the first step, the memory is enough to resume, without the dataset.
    tiny.save(tmp_path / "b.safetensors", memory=True)
    Tiny.from_checkpoint(tmp_path / "b.safetensors").train(10)


def test_a_dataset_that_does_not_fit_is_an_error():
    _, dataset, _ = played("CartPole-v1", 300)
    with pytest.raises(
        ValueError, match=r"Tiny: the buffer's size must be at least \d+ for the dataset's 3\d\d obs.* 200"
    ):
        Tiny("CartPole-v1", buffer_size=200, dataset=dataset)
    with pytest.raises(ValueError, match="dataset"):
        Tiny("Pendulum-v1", dataset=dataset)

    class Samples:
        def sample(self, batch_size, seed):
            return dataset.sample(batch_size, seed)

    with pytest.raises(
        TypeError, match=r"Tiny: dataset must have get_state\(\) and n_episodes, like rlox\.Off.* Samples"
    ):
        Tiny("CartPole-v1", dataset=Samples())
