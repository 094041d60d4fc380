"""Which path runs: the native one exactly where it is exact, and why not elsewhere."""

import numpy as np
import probes
import pytest
import torch
from torch import nn

from rlox.algorithms import A2C, DQN, PPO, SAC, TD3
from rlox.batch import RolloutBatch
from rlox.callbacks import Callback, EvalCallback
from rlox.collectors import RolloutCollector
from rlox.kernels.rng import Rng
from rlox.native import NativePolicy
from rlox.policies import ContinuousPolicy, DiscretePolicy

SMALL = {"n_envs": 4, "n_steps": 16, "hidden_sizes": [16]}


def frozen():
    policy = DiscretePolicy(4, 2, 16)
    policy.actor[0].bias.requires_grad_(False)
    return policy


def hooked():
    policy = DiscretePolicy(4, 2, 16)
    policy.actor.register_forward_hook(lambda *a: None)
    return policy


def changed():
    policy = DiscretePolicy(4, 2, 16)
    policy.actor.insert(1, nn.LayerNorm(16))
    return policy


class Other(DiscretePolicy):
    pass


class OwnUpdate(PPO):
    def update(self, batch):
        return super().update(batch)


CASES = {
    "frozen": (PPO, "CartPole-v1", {"policy": frozen}, "frozen"),
    "hooks": (PPO, "CartPole-v1", {"policy": hooked}, "hooks"),
    "other layers": (A2C, "CartPole-v1", {"policy": changed}, "not those it was made with"),
    "another class": (PPO, "CartPole-v1", {"policy": lambda: Other(4, 2)}, r"module of your own \(Other\)"),
    "float64": (PPO, "CartPole-v1", {"policy": lambda: DiscretePolicy(4, 2).double()}, "float32"),
    "images": (PPO, probes.BrightSide, {"hidden_sizes": []}, "convolutional"),
    "multi-discrete": (PPO, probes.TwoSwitches, {}, "multi-discrete"),
    "depth": (PPO, "CartPole-v1", {"hidden_sizes": [4] * 9}, "at most 8 hidden layers"),
    "an update of one's own": (OwnUpdate, "CartPole-v1", {}, "OwnUpdate has an update of its own"),
    "dqn": (DQN, "CartPole-v1", {}, "no native update yet"),
    "sac": (SAC, "Pendulum-v1", {}, "no native update yet"),
    "td3": (TD3, "Pendulum-v1", {}, "no native update yet"),
}


@pytest.mark.parametrize("case", CASES)
def test_auto_takes_torch_and_native_says_why_not(case):
    kind, env, options, reason = CASES[case]
    options = {**({"n_envs": 1} if kind in (DQN, SAC, TD3) else SMALL), **options}
    made = {**options, "policy": options["policy"]()} if "policy" in options else options
    algorithm = kind(env, **made)
    assert algorithm.backend == "torch"
    assert algorithm.native is None
    with pytest.raises(ValueError, match=f"backend must be auto or torch here, got 'native': .*{reason}"):
        kind(env, backend="native", **made)


def test_unknown_backend():
    with pytest.raises(ValueError, match="backend must be known, got 'nativ'; did you mean 'native'"):
        PPO("CartPole-v1", backend="nativ")
    with pytest.raises(ValueError, match="device is cuda"):
        PPO("CartPole-v1", backend="native", device="cuda")


@pytest.mark.parametrize("kind", [PPO, A2C])
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1", probes.MatchTheSign])
def test_auto_takes_native_whatever_watches(kind, env):
    watched = kind(env, callbacks=[Callback(), EvalCallback(2, 2)], reward_fn=lambda o, a, r: 2 * r, **SMALL)
    assert watched.backend == "native"
    assert "perceptron" in watched.backend_reason


def test_a_policy_of_ours_is_adopted_as_it_is():
    torch.manual_seed(0)
    policy = ContinuousPolicy(3, 1, (16, 8), "relu", log_std_init=-0.5)
    before = {key: value.clone() for key, value in policy.state_dict().items()}
    ppo = PPO("Pendulum-v1", n_envs=4, n_steps=16, policy=policy)
    assert ppo.backend == "native"
    assert ppo.policy is policy
    assert all(torch.equal(value, before[key]) for key, value in policy.state_dict().items())
    ppo.train(64)
    assert all(not torch.equal(value, before[key]) for key, value in policy.state_dict().items())


def test_the_module_and_the_kernel_see_one_truth():
    ppo = PPO("CartPole-v1", **SMALL)
    obs = np.random.default_rng(0).standard_normal((9, 4)).astype(np.float32)
    with torch.no_grad():
        ppo.policy.critic[-1].bias.fill_(7.0)
    np.testing.assert_allclose(
        ppo.native.net.values(obs), ppo.policy.get_value(torch.from_numpy(obs)).detach(), atol=1e-5
    )
    assert abs(ppo.native.net.values(obs) - 7.0).max() < 3


@pytest.mark.parametrize("kind", [PPO, A2C])
def test_both_updates_from_one_state(kind):
    """The PyTorch update stays callable on the native path, with the kernel's moments; both do the same."""
    one, other = (kind("CartPole-v1", seed=5, **SMALL) for _ in range(2))
    for _ in range(3):
        batch = one.collector.collect(one.native, 16)
        same = RolloutBatch(*(batch.array(name).copy() for name in list(batch.__dict__)[:7]))
        expected = {key: float(value) for key, value in one.update(batch).items()}
        assert other.update_native(same) == pytest.approx(expected, rel=1e-3, abs=1e-4)
        np.testing.assert_allclose(one.native.net.parameters, other.native.net.parameters, rtol=0, atol=1e-5)
    assert one.native.net.step == other.native.net.step


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1", "MountainCarContinuous-v0", "Acrobot-v1"])
def test_a_fused_rollout_is_the_step_by_step_one(env):
    """A reward function that changes nothing makes the collector go through Python."""
    fused = PPO(env, seed=3, n_envs=5, n_steps=230)
    stepped = PPO(env, seed=3, n_envs=5, n_steps=230, reward_fn=lambda obs, actions, rewards: rewards)
    for _ in range(2):
        a, b = (p.collector.collect(p.native, 230) for p in (fused, stepped))
        for name in ("obs", "actions", "log_probs", "values", "advantages", "returns", "rewards"):
            np.testing.assert_array_equal(a.array(name), b.array(name), err_msg=name)
        np.testing.assert_array_equal(a.episode_returns, b.episode_returns)
        np.testing.assert_array_equal(a.episode_lengths, b.episode_lengths)
    if env == "Pendulum-v1":
        assert len(a.episode_lengths) > 0


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_collection_equals_pytorchs(env):
    ppo = PPO(env, seed=3, n_envs=4)
    ours = ppo.collector.collect(ppo.native, 250)
    collector = RolloutCollector(env, 4, 3, ppo.config.gamma, ppo.config.gae_lambda)
    theirs = collector.collect(ppo.policy, 250)
    torch.testing.assert_close(ours.actions, theirs.actions, rtol=1e-4, atol=1e-5)
    for name in ("obs", "log_probs", "values", "advantages", "returns"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=1e-3, atol=1e-3)
    assert ppo.collector.rng.get_state() == collector.rng.get_state()


def test_a_stochastic_prediction_and_evaluation_draw_the_same_numbers():
    native, by_torch = (PPO("CartPole-v1", seed=2, backend=b, **SMALL) for b in ("native", "torch"))
    obs = np.random.default_rng(1).standard_normal((40, 4)).astype(np.float32)
    actions = []
    for ppo in (native, by_torch):
        torch.manual_seed(3)
        actions.append(ppo.predict(obs, deterministic=False))
    np.testing.assert_array_equal(*actions)
    returns = [ppo.evaluate(5, deterministic=False).returns for ppo in (native, by_torch)]
    np.testing.assert_array_equal(*returns)


def test_initial_weights_are_the_modules():
    from rlox.policies import make_policy

    for ortho in (True, False):
        for env in ("CartPole-v1", "Pendulum-v1"):
            ppo = PPO(env, ortho_init=ortho, log_std_init=-1.0)
            module = make_policy(ppo.spec, ppo.config, Rng(9))
            for name, array in NativePolicy.make(ppo.spec, ppo.config, Rng(9)).weights().items():
                np.testing.assert_array_equal(array, module.state_dict()[name].numpy(), err_msg=name)


def test_pytorchs_update_learns_from_the_kernels_rollouts():
    ppo, by_module = (PPO("CartPole-v1", seed=4, backend="torch", **SMALL) for _ in range(2))
    by_module._beside = None
    assert ppo.backend == "torch"
    assert ppo.backend_reason == "as asked; a kernel collects"
    assert isinstance(ppo.actor, NativePolicy)
    assert by_module.actor is by_module.policy
    for p in (ppo, by_module):
        p.train(640)
    assert ppo.counters.recent_returns == by_module.counters.recent_returns
    for name, value in ppo.policy.state_dict().items():
        torch.testing.assert_close(value, by_module.policy.state_dict()[name], rtol=0, atol=1e-4)


def test_a_subclass_with_its_own_update_collects_by_the_kernel():
    ppo = OwnUpdate("Pendulum-v1", **SMALL)
    assert (ppo.backend, isinstance(ppo.actor, NativePolicy)) == ("torch", True)


def test_the_kernel_steps_back_where_the_module_is_no_longer_what_it_was():
    ppo = PPO("CartPole-v1", backend="torch", **SMALL)
    calls = []
    handle = ppo.policy.critic.register_forward_hook(lambda *a: calls.append(1))
    assert ppo.actor is ppo.policy
    ppo.train(64)
    assert calls
    handle.remove()
    assert isinstance(ppo.actor, NativePolicy)
    bias = ppo.policy.actor[0].bias
    bias.data = bias.data.clone()  # elsewhere now: the kernel would not see it change
    assert ppo.actor is ppo.policy
    for custom in (frozen(), hooked(), Other(4, 2)):
        ppo = PPO("CartPole-v1", policy=custom, **SMALL)
        assert ppo.actor is custom
