"""The choice of the backend: native exactly where it is equivalent, otherwise PyTorch with a reason."""

import multiprocessing
import sys

import child_tasks
import numpy as np
import probes
import pytest
import torch
from torch import nn

from rlox.algorithms import A2C, DQN, PPO, SAC, TD3
from rlox.callbacks import Callback, EvalCallback
from rlox.collectors import RolloutCollector
from rlox.collectors.rollout import RolloutBatch
from rlox.compiled import NativePolicy, NativeQPolicy
from rlox.kernels.rng import Rng
from rlox.nn.actors import DiscreteQNetwork, QPolicy
from rlox.nn.batch import TransitionBatch
from rlox.nn.policies import ContinuousPolicy, DiscretePolicy
from rlox.training.off_policy import OffPolicyAlgorithm

SMALL = {"n_envs": 4, "n_steps": 16, "hidden_sizes": [16]}
Q_SMALL = {"hidden_sizes": [16], "buffer_size": 500, "batch_size": 16, "learning_starts": 30}


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


def frozen_q():
    q = DiscreteQNetwork(4, 2, (16,))
    q.head[0].bias.requires_grad_(False)
    return q


def changed_q():
    q = DiscreteQNetwork(4, 2, (16,))
    q.head.insert(1, nn.LayerNorm(16))
    return q


class OwnQ(DiscreteQNetwork):
    def __init__(self):
        super().__init__(4, 2)


class OwnDQN(DQN):
    def update(self, batch):
        return super().update(batch)


CASES = {
    "frozen": (PPO, "CartPole-v1", {"policy": frozen}, "frozen"),
    "hooks": (PPO, "CartPole-v1", {"policy": hooked}, "hooks"),
    "other layers": (A2C, "CartPole-v1", {"policy": changed}, "not those it was created with"),
    "another class": (PPO, "CartPole-v1", {"policy": lambda: Other(4, 2)}, r"custom module \(Other\)"),
    "images": (PPO, probes.BrightSide, {"hidden_sizes": []}, "convolutional"),
    "multi-discrete": (PPO, probes.TwoSwitches, {}, "multi-discrete"),
    "depth": (PPO, "CartPole-v1", {"hidden_sizes": [4] * 9}, "at most 8 hidden layers"),
    "a custom update": (OwnUpdate, "CartPole-v1", {}, "OwnUpdate has an update of its own"),
    "a frozen Q-network": (DQN, "CartPole-v1", {"policy": frozen_q}, "frozen"),
    "a Q-network of other layers": (DQN, "CartPole-v1", {"policy": changed_q}, "not those it was created with"),
    "a custom Q-network": (DQN, "CartPole-v1", {"policy": OwnQ}, r"custom module \(OwnQ\)"),
    "images for a Q-network": (DQN, probes.BrightSide, {"hidden_sizes": []}, "convolutional"),
    "depth of a Q-network": (DQN, "CartPole-v1", {"hidden_sizes": [4] * 9}, "at most 8 hidden layers"),
    "a DQN with a custom update": (OwnDQN, "CartPole-v1", {}, "OwnDQN has an update of its own"),
    "a custom policy for SAC": (SAC, "Pendulum-v1", {"policy": lambda: nn.Linear(3, 2)}, r"custom module \(Linear\)"),
    "depth for TD3": (TD3, "Pendulum-v1", {"hidden_sizes": [4] * 9}, "at most 8 hidden layers"),
}


@pytest.mark.parametrize("case", CASES)
def test_auto_takes_torch_and_native_is_an_error_with_the_reason(case):
    kind, env, options, reason = CASES[case]
    options = {**(Q_SMALL if issubclass(kind, OffPolicyAlgorithm) else SMALL), **options}
    made = {**options, "policy": options["policy"]()} if "policy" in options else options
    algorithm = kind(env, **made)
    assert algorithm.backend == "torch"
    assert algorithm.native is None
    with pytest.raises(ValueError, match=f"backend must be auto or torch here, got 'native': .*{reason}"):
        kind(env, backend="native", **made)


def test_unknown_backend():
    with pytest.raises(ValueError, match=r"backend must be one of .*, got 'nativ'; did you mean 'native'"):
        PPO("CartPole-v1", backend="nativ")
    with pytest.raises(ValueError, match="device is cuda"):
        PPO("CartPole-v1", backend="native", device="cuda")


@pytest.mark.parametrize("kind", [PPO, A2C])
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1", probes.MatchTheSign])
def test_auto_takes_native_with_callbacks_and_rewards(kind, env):
    watched = kind(env, callbacks=[Callback(), EvalCallback(2, 2)], reward_fn=lambda o, a, r: 2 * r, **SMALL)
    assert watched.backend == "native"
    assert "perceptron" in watched.backend_reason


def test_a_built_in_policy_is_adopted_unchanged():
    torch.manual_seed(0)
    policy = ContinuousPolicy(3, 1, (16, 8), "relu", log_std_init=-0.5)
    before = {key: value.clone() for key, value in policy.state_dict().items()}
    ppo = PPO("Pendulum-v1", n_envs=4, n_steps=16, policy=policy)
    assert ppo.backend == "native"
    assert ppo.policy is policy
    assert all(torch.equal(value, before[key]) for key, value in policy.state_dict().items())
    ppo.train(64)
    assert all(not torch.equal(value, before[key]) for key, value in policy.state_dict().items())


def test_the_module_and_the_kernel_share_weights():
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
def test_a_fused_rollout_equals_a_stepwise_one(env):
    """A reward function that changes nothing makes the collector step in Python."""
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


def test_initial_weights_equal_the_modules():
    from rlox.nn.policies import make_policy

    for ortho in (True, False):
        for env in ("CartPole-v1", "Pendulum-v1"):
            ppo = PPO(env, ortho_init=ortho, log_std_init=-1.0)
            module = make_policy(ppo.spec, ppo.config, Rng(9))
            for name, array in NativePolicy.make(ppo.spec, ppo.config, Rng(9)).weights().items():
                np.testing.assert_array_equal(array, module.state_dict()[name].numpy(), err_msg=name)


def test_pytorchs_update_learns_from_the_kernels_rollouts():
    ppo, by_module = (PPO("CartPole-v1", seed=4, backend="torch", **SMALL) for _ in range(2))
    by_module._acting = None
    assert ppo.backend == "torch"
    assert ppo.backend_reason == "as requested; a kernel collects"
    assert isinstance(ppo.actor, NativePolicy)
    assert by_module.actor is by_module.policy
    for p in (ppo, by_module):
        p.train(640)
    assert ppo.counters.recent_returns == by_module.counters.recent_returns
    for name, value in ppo.policy.state_dict().items():
        torch.testing.assert_close(value, by_module.policy.state_dict()[name], rtol=0, atol=1e-4)


def test_a_subclass_with_a_custom_update_collects_with_the_kernel():
    ppo = OwnUpdate("Pendulum-v1", **SMALL)
    assert (ppo.backend, isinstance(ppo.actor, NativePolicy)) == ("torch", True)


def test_the_kernel_is_not_used_if_the_module_was_changed():
    ppo = PPO("CartPole-v1", backend="torch", **SMALL)
    calls = []
    handle = ppo.policy.critic.register_forward_hook(lambda *a: calls.append(1))
    assert ppo.actor is ppo.policy
    ppo.train(64)
    assert calls
    handle.remove()
    assert isinstance(ppo.actor, NativePolicy)
    bias = ppo.policy.actor[0].bias
    bias.data = bias.data.clone()  # at another address, where the kernel would not see changes
    assert ppo.actor is ppo.policy
    for custom in (frozen(), hooked(), Other(4, 2)):
        ppo = PPO("CartPole-v1", policy=custom, **SMALL)
        assert ppo.actor is custom


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_native_training_starts_no_threads_and_is_the_same_in_a_child(method):
    here, more = child_tasks.trained_and_threads()
    assert more == 0
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.apply_async(child_tasks.trained_and_threads).get(timeout=60) == (here, 0)


@pytest.mark.parametrize("kind", [DiscreteQNetwork, lambda *a: QPolicy(DiscreteQNetwork(*a), 2)])
def test_a_built_in_q_network_is_adopted_unchanged(kind):
    torch.manual_seed(0)
    policy = kind(4, 2, (16, 8), "tanh", True)
    before = {key: value.clone() for key, value in policy.state_dict().items()}
    dqn = DQN("CartPole-v1", policy=policy, **Q_SMALL)
    assert dqn.backend == "native"
    assert policy in (dqn.policy, dqn.policy.q)
    assert all(torch.equal(value, before[key]) for key, value in policy.state_dict().items())
    assert all(torch.equal(a, b) for a, b in zip(dqn.policy.parameters(), dqn.target.parameters(), strict=True))
    dqn.train(64)
    assert all(not torch.equal(value, before[key]) for key, value in policy.state_dict().items())


def test_q_modules_and_the_kernel_share_weights():
    dqn = DQN("CartPole-v1", dueling=True, **Q_SMALL)
    obs = np.random.default_rng(0).standard_normal((9, 4)).astype(np.float32)
    with torch.no_grad():
        dqn.policy.q.value[-1].bias.fill_(7.0)
        dqn.target.q.head[-1].weight.fill_(3.0)
        np.testing.assert_allclose(dqn.native.net.values(obs), dqn.policy(torch.from_numpy(obs)), atol=1e-5)
    assert (dqn.native.target_parameters["q.head.2.weight"] == 3.0).all()
    dqn.native.epsilon = 0.25
    assert dqn.policy.epsilon == 0.25
    with pytest.raises(AttributeError, match="policy must be given to the constructor"):
        dqn.policy = nn.Linear(4, 2)


@pytest.mark.parametrize("hidden", [[], [16], [16, 8], [16, 8, 8]])
@pytest.mark.parametrize("dueling", [False, True])
def test_initial_q_weights_equal_the_modules(hidden, dueling):
    dqn = DQN("Acrobot-v1", dueling=dueling, **{**Q_SMALL, "hidden_sizes": hidden})
    module = QPolicy(DiscreteQNetwork(6, 3, hidden, "relu", dueling, Rng(9)), 3)
    weights = NativeQPolicy.make(dqn.spec, dqn.config, Rng(9)).weights()
    assert list(weights) == list(module.state_dict())
    for name, array in weights.items():
        np.testing.assert_array_equal(array, module.state_dict()[name].numpy(), err_msg=name)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dueling": True, "n_step": 3, "prioritized": True, "loss": "mse"},
        {"buffer": {"name": "prioritized", "eps": 0.7, "weight_norm": "none"}},
    ],
)
def test_both_q_updates_from_one_state(options):
    """The PyTorch update stays callable on the native path, with the kernel's moments; both do the same."""
    one, other = (DQN("CartPole-v1", seed=5, target_update_freq=7, **options, **Q_SMALL) for _ in range(2))
    for dqn in (one, other):
        dqn.train(60)
    for _ in range(3):
        for dqn in (one, other):
            dqn.counters.env_steps += 5
        expected = {key: float(value) for key, value in one.update(one.sample()).items()}
        assert other.update_native(other.sample()) == pytest.approx(expected, rel=1e-3, abs=1e-4)
        np.testing.assert_allclose(one.native.net.parameters, other.native.net.parameters, rtol=0, atol=1e-5)
        np.testing.assert_allclose(one.native.net.target, other.native.net.target, rtol=0, atol=1e-5)
    assert one.native.net.step == other.native.net.step
    if "buffer" in options:
        leaves = one.buffer.get_state()["leaves"]
        assert leaves.min() == np.float32(0.7**0.6)
        np.testing.assert_allclose(leaves, other.buffer.get_state()["leaves"], rtol=1e-4)


class Listener(Callback):
    """A callback that must see each round."""

    def __init__(self):
        self.steps = []

    def on_rollout_end(self, *, batch, **info):
        self.steps.append(len(batch))


class Rows(Callback):
    def __init__(self):
        self.rows = []

    def on_step(self, *, step, metrics, **info):
        self.rows.append((step, {key: value for key, value in metrics.items() if not key.startswith("time/")}))


def everything(dqn):
    """Everything that training changes, by name."""
    buffer, environment = dqn.buffer.get_state(), dqn.collector.state()
    return {
        "parameters": dqn.native.net.parameters, "target": dqn.native.net.target, **dqn.optimizer.state(),
        **{f"memory {key}": value for key, value in buffer.items()},
        **{f"environment {key}": value for key, value in environment.items()}, "obs": dqn.collector.observe(),
        "action_rng": dqn.collector.rng.get_state(), "rng": dqn.rng.get_state(), "counters": dqn.counters,
        "epsilon": dqn.actor.epsilon, "period": dqn._target_period,
    }  # fmt: skip


def assert_equal(one, other):
    ours, theirs = everything(one), everything(other)
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(value, theirs[key], err_msg=key)
        else:
            assert value == theirs[key], key


ROUNDS = {
    "as it is": {},
    "several environments": {"n_envs": 3, "train_freq": 8, "gradient_steps": -1, "target_update_freq": 50},
    "many environments": {"n_envs": 5, "gradient_steps": 3, "learning_rate_schedule": "linear", "seed": 3},
    "soft targets": {"tau": 0.1, "target_update_freq": 1, "double_dqn": False, "loss": "mse", "max_grad_norm": None},
    "rainbow": {"dueling": True, "n_step": 3, "n_envs": 2, "gradient_steps": 2, "hidden_sizes": [24, 8]},
    "from the first step": {"learning_starts": 0, "batch_size": 300, "train_freq": 5},
    "explored to the end": {"exploration_fraction": 1.0, "exploration_final_eps": 0.3, "activation": "tanh"},
}


@pytest.mark.parametrize("env", ["CartPole-v1", "Acrobot-v1"])
@pytest.mark.parametrize("case", ROUNDS)
def test_fused_rounds_equal_single_steps(env, case):
    settings = {"seed": 1, **Q_SMALL, **ROUNDS[case]}
    rows, listener = (Rows(), Rows()), Listener()
    fused = DQN(env, callbacks=[rows[0]], **settings)
    stepped = DQN(env, callbacks=[rows[1], listener], **settings)
    assert (fused._can_run_rounds(), stepped._can_run_rounds()) == (True, False)
    for total in (1_203, 150):
        a, b = fused.train(total), stepped.train(total)
        assert_equal(fused, stepped)
        assert a.keys() == b.keys()
    assert rows[0].rows == rows[1].rows
    assert len(rows[0].rows) > 100
    assert sum(listener.steps) == fused.counters.env_steps
    assert fused.counters.updates > 100


BOUNDED = {
    "as it is": {},
    "several environments": {"n_envs": 3, "train_freq": 8, "gradient_steps": -1, "n_step": 3},
    "clipped and annealed": {"max_grad_norm": 0.5, "learning_rate_schedule": "linear", "activation": "tanh"},
    "from the first step": {"learning_starts": 0, "batch_size": 300, "gradient_steps": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [SAC, TD3])
@pytest.mark.parametrize("case", BOUNDED)
@pytest.mark.parametrize("env", ["Pendulum-v1", "MountainCarContinuous-v0"])
def test_fused_rounds_of_bounded_policies_equal_single_steps(kind, case, env):
    settings = {"seed": 1, "n_envs": 1, **Q_SMALL, "hidden_sizes": [16, 8], **BOUNDED[case]}
    rows, listener = (Rows(), Rows()), Listener()
    fused = kind(env, callbacks=[rows[0]], **settings)
    stepped = kind(env, callbacks=[rows[1], listener], **settings)
    assert (fused._can_run_rounds(), stepped._can_run_rounds()) == (True, False)
    for total in (303, 150):
        fused.train(total), stepped.train(total)
    assert rows[0].rows == rows[1].rows
    assert len(rows[0].rows) > 50
    parts = [{**one.buffer.get_state(), **one.collector.state()} for one in (fused, stepped)]
    for one, part in zip((fused, stepped), parts, strict=True):
        sections = {"optimizer": one.optimizer.state(), "policy": one.native.weights(), **one._own_state()[1]}
        part.update({f"{name} {key}": value for name, held in sections.items() for key, value in held.items()})
        part.update(counters=one.counters, rng=one.rng.get_state(), actions=one.collector.rng.get_state())
    assert parts[0].keys() == parts[1].keys()
    for key, value in parts[0].items():
        np.testing.assert_equal(value, parts[1][key], err_msg=key)
    assert fused.counters.updates > 50


@pytest.mark.parametrize("kind", [SAC, TD3])
def test_pytorchs_update_is_an_error_with_the_native_backend(kind):
    one = kind("Pendulum-v1", **Q_SMALL)
    one.train(40)
    with pytest.raises(RuntimeError, match="must be called with backend torch, got native"):
        one.update(one.sample())


def test_rounds_may_be_split_anywhere():
    one, other = (DQN("CartPole-v1", seed=2, n_envs=2, train_freq=4, **Q_SMALL) for _ in range(2))
    for dqn in (one, other):
        dqn.counters.horizon_steps = dqn.counters.schedule_steps = 1_000
    assert len(one._rounds(400)) == 400
    for _ in range(100):
        other._rounds(1)
    assert_equal(one, other)


class Calm(DQN):
    def _explore(self):
        self.actor.epsilon = 0.5


STEP_BY_STEP = {
    "a foreign environment": (DQN, probes.MatchTheSign, {}, "the environment is not native"),
    "a reward": (DQN, "CartPole-v1", {"reward_fn": "sign"}, "there is a reward_fn"),
    "normalisation": (DQN, "CartPole-v1", {"normalize_obs": True}, "observations are normalised"),
    "priorities": (DQN, "CartPole-v1", {"prioritized": True}, "the replay memory is not uniform"),
    "files": (DQN, "CartPole-v1", {"buffer": {"name": "mmap", "hot_size": 200}}, "the replay memory is not uniform"),
    "noise for SAC": (SAC, "Pendulum-v1", {"exploration_noise": 0.3}, "Python adds the exploration noise"),
    "correlated noise": (TD3, "Pendulum-v1", {"noise_correlation": 0.9}, "Python adds the exploration noise"),
    "a custom method": (Calm, "CartPole-v1", {}, "Calm changes _explore"),
}


@pytest.mark.parametrize("case", STEP_BY_STEP)
def test_features_in_python_go_step_by_step(case):
    kind, env, options, reason = STEP_BY_STEP[case]
    dqn = kind(env, **options, **Q_SMALL)
    assert (dqn.backend, dqn._can_run_rounds()) == ("native", False)
    assert dqn.backend_reason.endswith(f"; step by step, since {reason}")
    dqn.train(100)
    assert dqn.counters.updates == 71
    assert DQN("CartPole-v1", **Q_SMALL).backend_reason.endswith("; whole rounds in one call")


def test_callbacks_do_not_prevent_fused_rounds():
    watched = DQN("CartPole-v1", callbacks=[Callback(), EvalCallback(2, 2)], **Q_SMALL)
    assert watched._can_run_rounds()
    watched.callbacks.extend([Listener()])
    assert not watched._can_run_rounds()


def test_transitions_become_tensors_on_demand():
    dqn = DQN("CartPole-v1", **Q_SMALL)
    dqn.train(40)
    batch = dqn.sample()
    assert isinstance(batch.array("obs"), np.ndarray)
    assert batch.array("weights") is batch.weights is None
    assert batch.obs.data_ptr() == batch.array("obs").ctypes.data
    assert len(batch) == 16
    with pytest.raises(TypeError, match="missing"):
        TransitionBatch()
    assert batch.array("indices") is batch.indices is None
    prioritized = DQN("CartPole-v1", prioritized=True, **Q_SMALL)
    prioritized.train(40)
    batch = prioritized.sample()
    assert isinstance(batch.array("indices"), np.ndarray)
    columns = (batch.obs, batch.actions, batch.rewards, batch.next_obs, batch.discounts, batch.weights, batch.indices)
    assert [type(column) for column in columns] == [torch.Tensor] * 7
    assert (batch.indices.dtype, len(batch.indices)) == (torch.int64, 16)


@pytest.mark.parametrize("kind", [PPO, A2C, DQN])
@pytest.mark.parametrize("forgets", ["zero_grad", "gradients of its own"])
def test_pytorchs_update_restores_replaced_gradients(kind, forgets):
    def norm(forget):
        options = {"learning_starts": 8, "batch_size": 8} if kind is DQN else {"n_steps": 8}
        algorithm = kind("CartPole-v1", seed=3, backend="native", hidden_sizes=[8], **options)
        algorithm.train(64)
        forget(algorithm.policy)
        batch = algorithm.sample() if kind is DQN else algorithm.collector.collect(algorithm.actor, 8)
        return float(algorithm.update(batch)["grad_norm"])

    def own(module):
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)

    forget = own if forgets != "zero_grad" else lambda module: module.zero_grad(set_to_none=True)
    assert norm(forget) == norm(lambda module: None) > 0
