"""Agents with a memory at the boundary of the library: acting, learning, saving."""

import numpy as np
import probes
import pytest

import rlox

SMALL = {"memory_size": 8, "hidden_sizes": [8], "n_steps": 16}
HIDDEN = "rlox/CartPoleHidden-v1"


def agent(cls=rlox.PPO, memory="lstm", env=HIDDEN, **more):
    return cls(env, n_envs=2, seed=3, memory=memory, **{**SMALL, **more})


@pytest.mark.parametrize("memory", ["lstm", "gru"])
def test_predict_returns_the_state_that_a_session_keeps(memory):
    ppo = agent(memory=memory)
    ppo.train(64)
    obs = np.random.default_rng(0).normal(size=(5, 2)).astype(np.float32) * 3
    session, state, actions = ppo.session(), None, []
    for row in obs:
        action, state = ppo.predict(row, state=state)
        assert state.shape == (ppo.policy.state_dim,)
        actions.append(action)
        assert session.predict(row) == action
    session.reset()
    assert [session.predict(row) for row in obs] == actions
    two = ppo.session(2)
    two.predict(obs[:2])
    two.reset(np.array([True, False]))
    _, first = ppo.predict(obs[:2])
    _, second = ppo.predict(obs[[3, 4]], state=np.stack([np.zeros_like(first[0]), first[1]]))
    two.predict(obs[[3, 4]])
    np.testing.assert_array_equal(two._actor._state, second)


def test_wrong_states_are_errors():
    ppo = agent()
    with pytest.raises(ValueError, match=r"state must be 1 row of 32 finite numbers"):
        ppo.predict(np.zeros(2, np.float32), state=np.zeros(3, np.float32))
    with pytest.raises(ValueError, match=r"mask must be None, since the environment has no action masks"):
        ppo.predict(np.zeros(2, np.float32), mask=[True, True])
    with pytest.raises(ValueError, match=r"state must be None, since the agent has no memory"):
        rlox.PPO(HIDDEN, n_envs=1).predict(np.zeros(2, np.float32), state=np.zeros(3, np.float32))
    with pytest.raises(ValueError, match=r"obs must be of 2 environments, got 1"):
        ppo.session(2).predict(np.zeros(2, np.float32))
    with pytest.raises(ValueError, match=r"agent must be the only one .* predict_all acts for several agents"):
        rlox.MAPPO("GridPursuit-v0", n_envs=1).session()


@pytest.mark.parametrize("cls", [rlox.PPO, rlox.A2C])
@pytest.mark.parametrize("more", [{}, {"memory_layers": 2, "memory": "gru", "normalize_obs": True}])
def test_a_resumed_training_equals_one_that_was_not_stopped(cls, more, tmp_path):
    options = {"sequence_length": 8, **more} if cls is rlox.PPO else more
    whole, part = agent(cls, **options), agent(cls, **options)
    whole.train(320)
    part.train(160)
    part.evaluate(2)  # leaves no trace in the memory
    part.save(tmp_path / "c.safetensors")
    resumed = cls.from_checkpoint(tmp_path / "c.safetensors")
    resumed.train(160)
    for name, value in whole.policy.state_dict().items():
        assert value.equal(resumed.policy.state_dict()[name]), name
    assert whole.collector.state().keys() == resumed.collector.state().keys()
    np.testing.assert_array_equal(whole.collector.state()["policy_memory"], resumed.collector.state()["policy_memory"])


def test_what_a_rollout_stores_is_what_the_policy_computes_step_by_step():
    """Values and log-probabilities of whole sequences equal those of single steps."""
    import torch

    from rlox.nn.memory import Sequences

    ppo = agent(env="rlox/PendulumHidden-v1", n_steps=256, sequence_length=64)
    policy, collector = ppo.policy, ppo.collector
    for _ in range(2):  # the second rollout starts in the middle of an episode, and an episode ends in each
        before = None if collector._memory is None else collector._memory.copy()
        batch = collector.collect(policy, 256)
        state = torch.zeros(2, policy.state_dim) if before is None else torch.from_numpy(before)
        for t in range(256):
            rows = slice(2 * t, 2 * t + 2)
            first = batch.is_first[rows]
            if t % 64 == 0:
                expected = state.masked_fill(first[:, None], 0.0)
                torch.testing.assert_close(torch.as_tensor(batch.memories[t // 64]), expected, rtol=1e-4, atol=1e-5)
            with torch.no_grad():
                outputs, values, state = policy.follow(batch.obs[rows], Sequences(state, first))
                log_probs, _ = policy.distribution(outputs, batch.actions[rows])
            torch.testing.assert_close(values, batch.values[rows], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(log_probs, batch.log_probs[rows], rtol=1e-4, atol=1e-4)
    assert int(batch.is_first.sum()) == 2


def test_after_a_rollout_that_is_lost_new_episodes_start():
    """The memory's state is that before the rollout, but the environments have moved."""
    agent = rlox.PPO(
        lambda: probes.Countdown(50), n_envs=2, n_steps=4, batch_size=8, memory="gru", hidden_sizes=[8],
        reward_fn=probes.FailsOnce(7, RuntimeError("once")),
    )  # fmt: skip
    agent.collector.collect(agent.actor, 4)
    with pytest.raises(RuntimeError, match="once"):
        agent.collector.collect(agent.actor, 4)
    assert agent.collector.state() is None
    batch = agent.collector.collect(agent.actor, 4)
    assert batch.obs[::2, 0].tolist() == [0, 1, 2, 3]
    assert batch.is_first[:4].tolist() == [True, True, False, False]
    assert not batch.memories[0].any()


def test_minibatches_are_whole_sequences():
    ppo = agent(sequence_length=4, n_steps=16)
    batch = ppo.collector.collect(ppo.policy, 16)
    seen = []
    for mb in batch.sample_minibatches(12):
        assert mb.n_envs in (1, 2, 3)
        assert mb.memories.shape == (1, mb.n_envs, ppo.policy.state_dim)
        for i in range(mb.n_envs):
            rows = mb.steps("obs")[:, i]
            assert len(rows) == 4
            (at,) = {
                (part, n)
                for part in range(4)
                for n in range(2)
                if rows.equal(batch.steps("obs")[4 * part : 4 * part + 4, n])
            }
            np.testing.assert_array_equal(mb.memories[0, i], batch.memories[at[0], at[1]])
            seen.append(at)
    assert sorted(seen) == [(part, n) for part in range(4) for n in range(2)]


REFUSED = [
    ({"compile": True}, r"PPO: compile must be false with memory=lstm"),
    ({"backend": "native"}, r"backend must be auto or torch here, got 'native': PyTorch computes a memory"),
    (
        {"env": "CartPole-v1", "env_backend": "tensor"},
        r"env_backend must be auto or gymnasium, got 'tensor': the state",
    ),
    ({"sequence_length": 7}, r"sequence_length must divide n_steps=16, got 7"),
    ({"memory": "none", "sequence_length": 8}, r"sequence_length must be null without a memory, got 8"),
    ({"memory": "rnn"}, r"memory must be one of none, lstm, gru, got 'rnn'"),
    ({"memory_size": 0}, r"memory_size must be in \[1, 8192\], got 0"),
]


@pytest.mark.parametrize(("more", "reported"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_a_memory_cannot_be_combined_with_is_refused(more, reported):
    with pytest.raises(ValueError, match=reported):
        agent(**more)


def test_a_policy_of_ones_own_needs_a_memory_of_its_own():
    from rlox.nn.policies import DiscretePolicy

    with pytest.raises(ValueError, match=r"policy must have a memory .* got DiscretePolicy and memory=lstm"):
        agent(policy=DiscretePolicy(2, 2, 8))
    with pytest.raises(ValueError, match=r"policy must have a memory .* and memory=none"):
        agent(policy=DiscretePolicy(2, 2, 8, memory=("gru", 8, 1, None)), memory="none")
    ppo = agent(policy=DiscretePolicy(2, 2, 8, memory=("gru", 8, 1, None)))
    ppo.train(64)
    assert ppo.predict(np.zeros(2, np.float32))[1].shape == (16,)


def test_algorithms_with_a_memory_have_its_keys_and_others_name_them(tmp_path):
    from rlox.algorithms import ALGORITHMS, resolve
    from rlox_cli.config.compose import compose_jobs
    from rlox_cli.terminal.errors import UsageError

    able = {name for name, entry in ALGORITHMS.items() if "memory" in resolve(entry.config).__dataclass_fields__}
    assert {"ppo", "a2c", "mappo", "impala", "appo"} <= able
    reasons = {"sac": "an update learns from single transitions", "dreamer": "the world model is a memory"}
    for name, reason in reasons.items():
        with pytest.raises(UsageError, match=rf"algo.memory is no key of .*Config: {reason}.*; it is for a2c, appo, "):
            compose_jobs([], [f"algo={name}", "env=CartPole-v1", "algo.memory=lstm"])
    with pytest.raises(UsageError, match=r"algo.memory_sise is no key of SACConfig; "):
        compose_jobs([], ["algo=sac", "env=CartPole-v1", "algo.memory_sise=3"])
