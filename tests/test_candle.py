"""The collector in a thread: the weights of each rollout, its documented use, and HybridPPO."""

import gc
import threading

import numpy as np
import pytest
import torch

import rlox
from rlox.algorithms import PPO
from rlox.callbacks import Callback
from rlox.kernels.nn.policy_gradient import NativeActorCritic
from rlox.nn.policies import DiscretePolicy


def collector(**kwargs):
    return rlox.CandleCollector(
        **{"env_id": "CartPole-v1", "n_envs": 4, "n_steps": 16, "hidden": 8, "seed": 1, **kwargs}
    )


def log_probs_by(weights, batch):
    policy = DiscretePolicy(4, 2, 8)
    torch.nn.utils.vector_to_parameters(torch.from_numpy(weights), policy.parameters())
    obs, actions = torch.from_numpy(batch["observations"]), torch.from_numpy(batch["actions"])
    with torch.no_grad():
        return policy.get_logprob_and_entropy(obs, actions)[0].numpy(), policy.get_value(obs).numpy()


def test_each_rollout_uses_the_weights_synced_before_the_previous_recv():
    """Weights that are outdated, too new or in the wrong order give other log-probabilities."""
    rng = np.random.default_rng(0)
    with collector() as c:
        synced = [c.get_weights()]
        for k in range(6):
            batch = c.recv()
            by = synced[max(0, k - 1)]
            log_probs, values = log_probs_by(by, batch)
            np.testing.assert_allclose(batch["log_probs"], log_probs, atol=1e-5, err_msg=f"rollout {k}")
            np.testing.assert_allclose(batch["values"], values, atol=1e-4, err_msg=f"rollout {k}")
            for other in synced[: max(0, k - 1)] + synced[max(0, k - 1) + 1 :]:
                assert abs(log_probs_by(other, batch)[0] - batch["log_probs"]).max() > 1e-3
            new = (synced[-1] + 0.3 * rng.standard_normal(len(synced[0]))).astype(np.float32)
            c.sync_weights(new)
            np.testing.assert_array_equal(c.get_weights(), new)
            synced.append(new)


def test_weights_synced_before_the_first_recv_are_used_for_the_first_rollouts():
    with collector() as c:
        weights = c.get_weights() + np.float32(0.1)
        c.sync_weights(weights.tolist())
        for _ in range(2):
            batch = c.recv()
            np.testing.assert_allclose(batch["log_probs"], log_probs_by(weights, batch)[0], atol=1e-5)


def test_permuted_layers_are_another_policy():
    """A bug of an earlier implementation: the same numbers in another order are another policy."""
    with collector() as c:
        weights = c.get_weights()
        half = len(weights) // 2
        batch = c.recv()
        assert abs(log_probs_by(np.roll(weights, half), batch)[0] - batch["log_probs"]).max() > 1e-3


def test_contents_of_a_rollout():
    with collector(n_steps=64) as c:
        first, second = c.recv(), c.recv()
    for batch in (first, second):
        assert {"observations", "actions", "rewards", "dones", "log_probs", "values", "advantages", "returns"} <= set(
            batch
        )
        assert batch["observations"].shape == (256, 4)
        assert batch["actions"].dtype == np.int64
        assert batch["dones"].sum() == len(batch["episode_returns"]) > 0
        np.testing.assert_allclose(batch["returns"], batch["advantages"] + batch["values"], atol=1e-4)
    # Episodes continue from one rollout to the next.
    going_on = ~first["dones"][-4:]
    assert abs(first["observations"][-4:] - second["observations"][:4])[going_on].max() < 0.5


def test_the_same_calls_give_the_same_rollouts():
    def three():
        with collector() as c:
            out = []
            for k in range(3):
                out.append(c.recv()["observations"])
                c.sync_weights(c.get_weights() * np.float32(1 + k))
            return np.stack(out)

    np.testing.assert_array_equal(three(), three())


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="obs_dim must be 4 for CartPole-v1, got 5"):
        collector(obs_dim=5)
    with pytest.raises(ValueError, match="n_actions must be 2"):
        collector(n_actions=3)
    with pytest.raises(ValueError, match="native with discrete actions"):
        collector(env_id="Pendulum-v1")
    with pytest.raises(ValueError, match="n_steps must be >= 1"):
        collector(n_steps=0)
    c = collector(obs_dim=4, n_actions=2)
    with pytest.raises(ValueError, match=r"params must have shape \(\d+,\), got \(3,\)"):
        c.sync_weights([1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="must be finite"):
        c.sync_weights(c.get_weights() * np.float32("nan"))


@pytest.mark.slow
def test_no_thread_outlives_its_collector():
    def running():
        return sum(thread.name == "rlox-collector" for thread in threading.enumerate())

    before = running()
    c = collector()
    c.recv()
    assert running() == before + 1
    c.stop()
    c.stop()
    assert running() == before
    with pytest.raises(RuntimeError, match="must not be stopped"):
        c.recv()
    forgotten = collector()
    forgotten.recv()
    thread = forgotten._thread
    del forgotten
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


def test_a_failure_in_the_thread_is_raised_by_recv(monkeypatch):
    c = collector()

    def broken(*args):
        raise FloatingPointError("it broke")

    monkeypatch.setattr(c._collector, "collect", broken)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the collection failed: it broke"):
            c.recv()
    c.stop()


def test_the_layout_of_weights_equals_the_learners():
    with collector() as c:
        weights = c.get_weights()
    net = NativeActorCritic(weights, 4, 2, [8, 8])
    policy = DiscretePolicy(4, 2, 8)
    torch.nn.utils.vector_to_parameters(torch.from_numpy(weights), policy.parameters())
    obs = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
    np.testing.assert_allclose(net.values(obs), policy.get_value(torch.from_numpy(obs)).detach(), atol=1e-5)


@pytest.mark.slow
def test_hybrid_ppo_learns_as_ppo_does(tmp_path):
    """An earlier implementation stayed at 22, the return of a random policy."""
    options = {"n_steps": 128, "learning_rate": 1e-3}
    scores = []
    for seed in range(3):
        hybrid = rlox.HybridPPO("CartPole-v1", n_envs=8, seed=seed, hidden=64, **options)
        metrics = hybrid.train(60_000)
        plain = PPO("CartPole-v1", 8, seed, **options).train(60_000)
        scores.append((metrics["mean_reward"], plain["mean_reward"]))
        assert hybrid.predict(np.zeros(4)) in (0, 1)
        hybrid.close()
    hybrids, plains = np.transpose(scores)
    assert hybrids.min() > 120, scores
    assert hybrids.mean() > 0.7 * plains.mean(), scores
    spent = hybrid.timing_summary()
    assert sum(share for name, share in spent.items() if name != "total_s") == pytest.approx(1)
    assert hybrid.evaluate(5).returns.mean() > 100
    hybrid.save(tmp_path / "h.safetensors")
    again = PPO.from_checkpoint(tmp_path / "h.safetensors")
    assert again.evaluate(5).returns.tolist() == hybrid.evaluate(5).returns.tolist()
    again.train(1024)


class Rollouts(Callback):
    def __init__(self):
        self.batches = []

    def on_rollout_end(self, *, batch, **info):
        self.batches.append(batch)


def test_a_saved_hybrid_ppo_continues_with_unused_random_numbers(tmp_path):
    seen, options = Rollouts(), {"n_envs": 3, "seed": 5, "n_steps": 16}
    hybrid = rlox.HybridPPO("CartPole-v1", hidden=8, callbacks=[seen], **options)
    plain = PPO("CartPole-v1", hidden_sizes=[8, 8], backend="native", **options)
    states = []
    for _ in range(5):
        states.append(plain.collector.rng.get_state())
        plain.collector.collect(plain.actor, 16)
    path = tmp_path / "h.safetensors"
    hybrid.train(4 * 48)
    hybrid.save(path)
    again = PPO.from_checkpoint(path)
    assert again.collector.rng.get_state() == states[4]
    # The resumed training starts with the fifth rollout and its observations.
    hybrid.train(48)
    hybrid.close()
    batch = again.collector.collect(again.actor, 16)
    np.testing.assert_array_equal(batch.array("obs")[:3], seen.batches[4].array("obs")[:3])
    assert not any(np.array_equal(batch.array("obs")[:3], earlier.array("obs")[:3]) for earlier in seen.batches[:4])
    again.train(48)
    unused = rlox.HybridPPO("CartPole-v1", hidden=8, **options)
    unused.save(path)
    unused.close()
    assert PPO.from_checkpoint(path).collector.rng.get_state() == states[0]


def test_defaults_equal_the_documented_ones():
    hybrid = rlox.HybridPPO()
    try:
        ppo = hybrid.algorithm
        assert (ppo.env_id, ppo.n_envs, ppo.seed, ppo.config.hidden_sizes) == ("CartPole-v1", 16, 42, [64, 64])
        assert ppo.backend == "native"
        obs = np.zeros(4, np.float32)
        assert len({hybrid.predict(obs) for _ in range(20)}) == 1
        assert len({hybrid.predict(obs, deterministic=False) for _ in range(40)}) == 2
    finally:
        hybrid.close()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reward_fn", "sign"),
        ("env_kwargs", {"max_episode_steps": 9}),
        ("env_wrappers", ["gymnasium.wrappers.ClipReward"]),
        ("env_workers", 2),
        ("env_backend", "gym"),
        ("remote", None),
    ],
)
def test_arguments_that_the_thread_would_ignore_are_errors(name, value):
    with pytest.raises(TypeError, match=f"HybridPPO: {name} must be left out, .* use PPO"):
        rlox.HybridPPO("CartPole-v1", 2, **{name: value})


def test_hybrid_ppo_collects_with_its_configuration():
    """The first rollout uses the initial weights, so PPO's own collector has the same rollout."""
    options = {"n_steps": 32, "gamma": 0.5, "gae_lambda": 0.3, "activation": "relu"}
    seen = []

    class Watch(Callback):
        def on_rollout_end(self, *, batch, **info):
            seen.append({name: batch.array(name).copy() for name in ("obs", "rewards", "advantages", "returns")})
            return True

        def on_step(self, **info):
            return False

    hybrid = rlox.HybridPPO("CartPole-v1", 4, 7, 8, callbacks=[Watch()], **options)
    hybrid.train(128)
    hybrid.close()
    PPO("CartPole-v1", 4, 7, callbacks=[Watch()], hidden_sizes=[8, 8], **options).train(128)
    for name, theirs in seen[1].items():
        np.testing.assert_allclose(seen[0][name], theirs, rtol=1e-5, atol=1e-6, err_msg=name)
