"""The life cycle of algorithms that learn from sequences: memory, updates, saving, resuming, acting."""

import numpy as np
import probes
import pytest
import torch
from tiny_world import Tiny

from rlox import DreamerV3, SequenceReplayBuffer
from rlox.algorithms import DQN


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def test_updates_follow_the_replay_ratio():
    tiny = Tiny("CartPole-v1", n_envs=1, seed=0, buffer_size=1000)
    tiny.train(100)
    # 3 replayed steps per step, 8 per update: updates after steps 3, 6, 8, counted from learning_starts.
    assert tiny.updated[:6] == [20 + 3 - 1, 20 + 6 - 1, 20 + 8 - 1, 20 + 11 - 1, 20 + 14 - 1, 20 + 16 - 1]
    assert tiny.counters.updates == 81 * 3 // 8
    assert tiny.actor.state_dim > 0
    tiny = Tiny("CartPole-v1", n_envs=4, seed=0, replay_ratio=8.0, learning_starts=0)
    tiny.train(40)
    # Rounds of four steps and four updates, as soon as an environment has four steps.
    assert tiny.updated[:5] == [16] * 4 + [20]


def test_a_batch_contains_sequences_of_the_memory():
    tiny = Tiny("CartPole-v1", n_envs=2, seed=0, learning_starts=30)
    tiny.train(60)
    first = tiny.batches[0]
    assert first.obs.shape == (2, 4, 4)
    assert first.actions.shape == (2, 4, 2)
    assert first.state.shape == (2, 4)
    assert first.is_first.dtype == torch.bool
    assert len(first) == 2
    # The newest steps come first: no step is replayed first twice before all were.
    places = np.concatenate([batch.indices for batch in tiny.batches[:3]])
    assert len(set(places.tolist())) == 6
    image = Tiny("CartPole-v1", n_envs=1, learning_starts=1)
    image.train(8)
    state = image.buffer.get_state()["state"][0, :, 0]
    assert (state != np.arange(len(state))).any()  # the updates have refreshed states


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize("online", [True, False])
def test_a_resumed_run_is_the_same_bit_for_bit(tmp_path, env, online):
    def made():
        return Tiny(env, n_envs=2, seed=5, buffer={"name": "sequence", "size": 120, "online": online})

    straight = made()
    straight.train(150, schedule_timesteps=300)
    path = tmp_path / "checkpoints" / "a.safetensors"
    path.parent.mkdir()
    straight.save(path, memory=True)
    straight.train(150)
    resumed = Tiny.from_checkpoint(path)
    assert resumed._memory.config.online is online
    resumed.train(150)
    same(straight.buffer.get_state(), resumed.buffer.get_state())
    same(straight.collector.state(), resumed.collector.state())
    assert torch.equal(straight.policy.weight, resumed.policy.weight)
    assert straight.counters.updates == resumed.counters.updates
    assert straight.updated[-len(resumed.updated) :] == resumed.updated
    assert straight._owed == resumed._owed


def test_without_the_memory_a_resumed_run_starts_new_episodes(tmp_path):
    tiny = Tiny("CartPole-v1", n_envs=2, seed=5)
    tiny.train(61)
    tiny.save(tmp_path / "a.safetensors")
    again = Tiny.from_checkpoint(tmp_path / "a.safetensors")
    again.train(30)
    state = again.buffer.get_state()
    assert state["is_first"][:, 0].all()
    assert not state["rewards"][:, 0].any()
    assert again.updated[0] > 62 + 20 - 2  # the memory is filled again first


def test_the_episode_of_an_environment_that_cannot_be_restored_is_truncated(tmp_path):
    def env():
        return probes.Countdown(7, True)  # it has no get_state

    tiny = Tiny(env, n_envs=1, seed=5)
    tiny.train(60)
    (tmp_path / "c").mkdir()
    tiny.save(tmp_path / "c" / "a.safetensors", memory=True)
    again = Tiny.from_checkpoint(tmp_path / "c" / "a.safetensors", env_id=env)
    n = len(tiny.buffer)
    again.train(1)
    state = again.buffer.get_state()
    assert again.collector.restore_note() is not None
    assert state["is_first"][0, n]
    assert state["truncated"][0, n - 1] or state["terminated"][0, n - 1]
    assert not state["state"][0, n].any()


def test_acting_outside_training(tmp_path):
    tiny = Tiny("CartPole-v1", n_envs=1)
    assert tiny.predict(np.zeros(4, np.float32)) == 0
    assert tiny.predict(np.zeros((3, 4), np.float32), deterministic=False).shape == (3,)
    assert len(tiny.evaluate(3).returns) == 3
    assert tiny.evaluate(3, deterministic=False).returns.mean() > tiny.evaluate(3).returns.mean()


def test_errors_are_one_paragraph():
    with pytest.raises(ValueError, match="Tiny: buffer must hold sequences, got 'uniform'; try sequence"):
        Tiny("CartPole-v1", buffer="uniform")
    with pytest.raises(ValueError, match="DQN: buffer must hold transitions, got 'sequence'; try uniform"):
        DQN("CartPole-v1", buffer="sequence")
    with pytest.raises(ValueError, match=r"size must be at least seq_len \(50\) for each of the 3 environments, 150"):
        Tiny("CartPole-v1", n_envs=3, seq_len=50, buffer_size=149)
    with pytest.raises(ValueError, match="n_step must be 1, since sequences contain single steps, got 3"):
        Tiny("CartPole-v1", n_step=3)
    with pytest.raises(ValueError, match=r"buffer must be a SequenceReplayBuffer of obs_dim.* 4, 2, 1, 4, got Seq"):
        Tiny("CartPole-v1", buffer=SequenceReplayBuffer(100, 4, 2, state_dim=5))
    with pytest.raises(ValueError, match="buffer_size must fit in memory, got 1,099,511,627,776"):
        Tiny("CartPole-v1", buffer_size=2**40).train(1)
    with pytest.raises(ValueError, match="the buffer must hold steps to sample, got none; push some first"):
        Tiny("CartPole-v1").sample()
    given = SequenceReplayBuffer(100, 4, 2, state_dim=4)
    tiny = Tiny("CartPole-v1", n_envs=1, buffer=given)
    tiny.train(40)
    assert len(given) > 40


def test_a_sequence_may_be_longer_than_every_episode():
    tiny = Tiny("CartPole-v1", n_envs=1, seq_len=4, batch_size=2, learning_starts=64)
    tiny.train(64)
    batch = tiny.buffer.sample(3, 40, 0)  # across the ends of episodes of random actions
    assert batch["is_first"][:, 1:].any(1).all()


@pytest.mark.slow
def test_half_precision_is_close_and_keeps_weights_and_states_in_float32():
    sizes = {"deter_dim": 32, "hidden_dim": 16, "stoch_dim": 4, "stoch_classes": 4, "batch_size": 4, "seq_len": 8}

    def made(precision):
        one = DreamerV3("CartPole-v1", seed=0, learning_starts=40, replay_ratio=1, precision=precision, **sizes)
        one.train(40)
        return one

    grads, losses = [], []
    for precision in ("float32", "bfloat16", "auto"):
        one = made(precision)
        losses.append({name: float(value) for name, value in one.update(one.sample()).items()})
        grads.append(one.optimizer.grad.clone())
        assert {p.dtype for p in (*one.policy.parameters(), *one.heads.parameters())} == {torch.float32}
        assert np.isfinite(one.buffer.get_state()["state"]).all()
    assert torch.equal(grads[2], grads[0])  # auto is float32 on a CPU
    assert not torch.equal(grads[1], grads[0])
    assert torch.cosine_similarity(grads[1], grads[0], 0) > 0.98
    for name in ("reconstruction_loss", "reward_loss", "continue_loss", "dynamics_loss", "entropy"):
        assert losses[1][name] == pytest.approx(losses[0][name], rel=0.02), name
    half = made("bfloat16")
    half.train(100)
    assert half.counters.updates > 1
    assert all(torch.isfinite(p).all() for p in half.policy.parameters())
    with pytest.raises(ValueError, match="precision must be one of auto, float32, bfloat16, got 'half'"):
        made("half")
