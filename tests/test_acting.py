"""What every acting policy promises, whether compiled or by PyTorch, with a memory or without."""

import pickle

import numpy as np
import pytest
import torch
from torch import nn

import rlox
from rlox.compiled import NativePolicy, NativeQPolicy
from rlox.config.world_models import DreamerConfig
from rlox.envs import EnvSpec
from rlox.kernels.rng import Rng
from rlox.nn.acting import EpisodeActor, Inputs, ModulePolicy, acting_policy, draw_noise
from rlox.nn.actors import (
    CategoricalPolicy,
    DeterministicPolicy,
    QPolicy,
    SquashedGaussianPolicy,
    TanhMeanPolicy,
)
from rlox.nn.policies import ContinuousPolicy, DiscretePolicy, MultiDiscretePolicy
from rlox.world_models.acting import DreamerPolicy, WorldModelActor
from rlox.world_models.rssm import Decoder

D, N = 4, 6
SPEC = EnvSpec((D,), n_actions=3)


class Custom(nn.Module):
    """A user's module with the seeds' three methods; it samples with PyTorch's generator."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(D, 3)

    def get_action_and_logprob(self, obs):
        chosen = torch.distributions.Categorical(logits=self.net(obs))
        actions = chosen.sample()
        return actions, chosen.log_prob(actions)

    def get_value(self, obs):
        return obs.sum(-1)

    def get_logprob_and_entropy(self, obs, actions):
        chosen = torch.distributions.Categorical(logits=self.net(obs))
        return chosen.log_prob(actions), chosen.entropy()

    def mode(self, obs):
        return self.net(obs).argmax(-1)


def q_policy():
    policy = NativeQPolicy(D, 3, [8], "relu", False)
    policy.net.parameters[:] = Rng(3).normal((len(policy.net.parameters),))
    policy.epsilon = 0.5
    return policy


def native(gaussian):
    policy = NativePolicy(D, 3, [8], gaussian)
    policy.net.parameters[:] = Rng(3).normal((len(policy.net.parameters),)) / 2
    return policy


def bounded(algorithm):
    made = algorithm("Pendulum-v1", hidden_sizes=[8], learning_starts=1)
    assert made.backend == "native"
    if algorithm is rlox.TD3:
        made._explore()
    return made.actor


def world_model():
    config = DreamerConfig(deter_dim=16, stoch_dim=3, stoch_classes=4, hidden_dim=12)
    policy = DreamerPolicy(SPEC, config, Rng(0))
    return WorldModelActor(policy, Decoder(SPEC, policy.n_features, 12, Rng(0)))


POLICIES = {
    "native discrete": lambda: native(False),
    "native gaussian": lambda: native(True),
    "native q": q_policy,
    "native sac": lambda: bounded(rlox.SAC),
    "native td3": lambda: bounded(rlox.TD3),
    "discrete": lambda: DiscretePolicy(D, 3, 8, rng=Rng(0)),
    "multi-discrete": lambda: MultiDiscretePolicy(D, [2, 3], 8, rng=Rng(0)),
    "continuous": lambda: ContinuousPolicy(D, 3, 8, rng=Rng(0)),
    "squashed": lambda: SquashedGaussianPolicy(D, 3, 8, rng=Rng(0)),
    "deterministic": lambda: DeterministicPolicy(D, 3, 8, rng=Rng(0)),
    "tanh mean": lambda: TanhMeanPolicy(D, 3, 8, rng=Rng(0)),
    "categorical": lambda: CategoricalPolicy(D, 3, 8, rng=Rng(0)),
    "q": lambda: QPolicy(nn.Linear(D, 3), 3, 0.5),
    "custom": Custom,
    "world model": world_model,
    "lstm discrete": lambda: DiscretePolicy(D, 3, 8, rng=Rng(0), memory=("lstm", 5, 2, None)),
    "gru multi-discrete": lambda: MultiDiscretePolicy(D, [2, 3], 8, rng=Rng(0), memory=("gru", 5, 1, 10)),
    "lstm continuous": lambda: ContinuousPolicy(D, 3, 8, rng=Rng(0), memory=("lstm", 5, 1, None)),
}
BY_LOGITS = {
    "native discrete": [3], "discrete": [3], "categorical": [3], "multi-discrete": [2, 3], "lstm discrete": [3],
    "gru multi-discrete": [2, 3],
}  # fmt: skip
MASKED = {**BY_LOGITS, "native q": [3], "q": [3]}


def make(name):
    return acting_policy(POLICIES[name]())


def observe(policy, seed=0):
    module = getattr(policy, "_module", None)  # of a bounded policy, whose environment is Pendulum
    width = 3 if hasattr(module, "centre") else D
    return Rng(seed).normal((N, width))


@pytest.mark.parametrize("name", POLICIES)
def test_actions_and_states(name):
    policy = make(name)
    obs = observe(policy)
    state = policy.initial(N)
    assert (state is None) == (policy.state_dim == 0)
    noise = draw_noise(policy, N, Rng(1))
    assert noise.dtype == np.float32
    assert noise.shape == policy.noise_shape(N)
    assert policy.n_state_noise <= noise.shape[-1]
    for act in (lambda inputs: policy.act(inputs, noise), policy.mode):
        actions, after = act(Inputs(obs, state=state))
        assert isinstance(actions, np.ndarray)
        assert len(actions) == N
        assert (after is None) == (policy.state_dim == 0)
        if policy.state_dim:
            assert after.shape == state.shape == (N, policy.state_dim)
            assert after.dtype == np.float32


@pytest.mark.parametrize("name", POLICIES)
def test_actions_are_a_function_of_inputs_and_noise(name):
    policy = make(name)
    obs, noise, others = observe(policy), draw_noise(policy, N, Rng(1)), draw_noise(policy, N, Rng(2))
    torch.manual_seed(0)  # a custom module draws from PyTorch's generator
    first = policy.act(Inputs(obs), noise)[0]
    torch.manual_seed(0)
    np.testing.assert_array_equal(policy.act(Inputs(obs), noise)[0], first)
    np.testing.assert_array_equal(policy.mode(Inputs(obs))[0], policy.mode(Inputs(obs))[0])
    torch.manual_seed(1)
    differs = not np.array_equal(policy.act(Inputs(obs), others)[0], first)
    assert differs == (name != "deterministic")  # its noise_std is 0
    # Rows do not depend on each other. Matrix products of other shapes may round differently.
    rows = policy.mode(Inputs(obs[:2]))[0]
    np.testing.assert_allclose(rows, policy.mode(Inputs(obs))[0][:2], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", POLICIES)
def test_masks_are_respected_or_refused(name):
    policy = make(name)
    obs, noise = observe(policy), draw_noise(policy, N, Rng(1))
    assert policy.adds_noise_to_logits == (name in BY_LOGITS)
    if name not in MASKED:
        mask = np.ones((N, 3), bool)
        for act in (lambda inputs: policy.act(inputs, noise), policy.mode):
            with pytest.raises(ValueError, match=r"no action mask|masks must be None|must be a subclass"):
                act(Inputs(obs, mask))
        return
    rng = np.random.default_rng(0)
    sizes = MASKED[name]
    free = policy.act(Inputs(obs), noise)[0]
    np.testing.assert_array_equal(policy.act(Inputs(obs, np.ones((N, sum(sizes)), bool)), noise)[0], free)
    np.testing.assert_array_equal(
        policy.mode(Inputs(obs, np.ones((N, sum(sizes)), bool)))[0], policy.mode(Inputs(obs))[0]
    )
    for _ in range(20):
        mask = rng.random((N, sum(sizes))) < 0.5
        starts = np.cumsum([0, *sizes[:-1]])
        for start, size in zip(starts, sizes, strict=True):
            mask[np.arange(N), start + rng.integers(size, size=N)] = True  # at least one is legal
        for actions in (policy.act(Inputs(obs, mask), noise)[0], policy.mode(Inputs(obs, mask))[0]):
            chosen = actions.reshape(N, -1) + starts
            assert np.take_along_axis(mask, chosen, 1).all()


@pytest.mark.parametrize("name", POLICIES)
def test_pickles_and_contexts_compute_the_same(name):
    policy = make(name)
    obs, noise = observe(policy), draw_noise(policy, N, Rng(1))
    torch.manual_seed(0)
    expected = policy.act(Inputs(obs), noise)[0], policy.mode(Inputs(obs))[0]
    torch.manual_seed(0)
    with policy.context():
        found = policy.act(Inputs(obs), noise)[0], policy.mode(Inputs(obs))[0]
    copy = pickle.loads(pickle.dumps(policy))
    torch.manual_seed(0)
    again = copy.act(Inputs(obs), noise)[0], copy.mode(Inputs(obs))[0]
    # In a context, a memory's weights are packed, and its products are summed in another order.
    rounding = 1e-6 if "lstm" in name or "gru" in name else 0.0
    for one, other, third in zip(expected, found, again, strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=rounding)
        np.testing.assert_array_equal(third, one)
    assert not torch.is_inference_mode_enabled()


def test_a_new_episode_starts_from_the_initial_state():
    policy = make("world model")
    obs, noise = observe(policy), draw_noise(policy, N, Rng(1))
    before = policy.act(Inputs(obs, state=policy.initial(N)), noise)[1]
    first = np.arange(N) % 2 == 0
    _, after = policy.act(Inputs(obs, state=before, is_first=first), noise)
    fresh = policy.act(Inputs(obs), noise)[1]
    on = policy.act(Inputs(obs, state=before), noise)[1]
    np.testing.assert_allclose(after[first], fresh[first], atol=1e-6)
    np.testing.assert_allclose(after[~first], on[~first], atol=1e-6)
    assert np.abs(fresh - on).max() > 1e-3


def test_the_most_likely_action_may_have_a_drawn_state():
    policy = make("world model")
    obs, n = observe(policy), policy.n_state_noise
    states = [policy.mode(Inputs(obs), draw_noise(policy, N, Rng(seed))[:, :n])[1] for seed in (1, 1, 2)]
    np.testing.assert_array_equal(states[0], states[1])
    assert not np.array_equal(states[0], states[2])


def test_an_episode_actor_carries_states_and_exploration_noise():
    class Exploration:
        ended = None

        def add(self, actions, rng):
            return actions + np.float32(100)

        def end(self, ended):
            self.ended = ended

    policy, exploration = make("continuous"), Exploration()
    obs = observe(policy)
    actor = EpisodeActor(policy, N, Rng(1), explore=lambda n: exploration, transform=lambda rows: 2 * rows)
    expected = policy.act(Inputs(2 * obs), draw_noise(policy, N, Rng(1)))[0] + 100
    np.testing.assert_array_equal(actor.act(obs), expected)
    actor.end(np.ones(N, bool))
    assert exploration.ended.all()
    actor = EpisodeActor(policy, N, Rng(1), True, explore=lambda n: exploration)
    np.testing.assert_array_equal(actor.act(obs), policy.mode(Inputs(obs))[0])  # no noise

    memory, rng = make("world model"), Rng(4)
    actor, state = EpisodeActor(memory, N, Rng(4)), memory.initial(N)
    for t in range(3):
        seen = observe(memory, t)
        expected, state = memory.act(Inputs(seen, state=state), draw_noise(memory, N, rng))
        np.testing.assert_array_equal(actor.act(seen), expected)
        actor.end(np.zeros(N, bool))


def test_a_module_without_a_mode_is_named():
    class Sampling(Custom):
        mode = None

    with pytest.raises(TypeError, match=r"evaluate: Sampling must define mode\(obs\) -> actions"):
        ModulePolicy(Sampling()).require_mode("evaluate")
