"""Every algorithm with a memory, with masks of legal actions, and with both, together with every other choice: it
trains, or is refused before the run with the reason. So do several agents, and what learns from a dataset."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import cloudpickle
import masked_envs
import numpy as np
import pytest
import torch
import zoo_probes
from gymnasium import spaces
from masked_envs import Legal, record
from small_algorithms import LANGUAGE, OFF_POLICY, OFFLINE, ONLINE, SEQUENCES, of_sequences, off_policy
from torch import nn

import rlox
from rlox.algorithms import ALGORITHMS, resolve
from rlox.config import BufferConfig
from rlox.nn.actors import CategoricalPolicy, DiscreteQNetwork, RecurrentQNetwork
from rlox.nn.policies import DiscretePolicy

for module in (masked_envs, zoo_probes, sys.modules[__name__]):
    cloudpickle.register_pickle_by_value(module)

# What each algorithm of the table can do. A new one has to be put here.
REMEMBER = {"a2c", "appo", "bc", "dqn", "impala", "mappo", "ppo"}
FOLLOW_MASKS = {"a2c", "appo", "bc", "dqn", "impala", "mappo", "ppo", "sac"}
CONTINUOUS = {"cql", "iql", "td3", "td3_bc"}  # only these actions, which have no masks
NEITHER = {"dreamer", *LANGUAGE}


def test_the_table_is_covered():
    assert set(ALGORITHMS) == REMEMBER | FOLLOW_MASKS | CONTINUOUS | NEITHER


class Strict(Legal):
    """With masks, illegal actions are errors."""

    def step(self, action):
        answer = super().step(action)
        assert not (self.source and self.n_illegal), f"{action} is illegal"
        return answer


class Pictures(Strict):
    """The same as an image."""

    def __init__(self, source):
        super().__init__(source)
        self.observation_space = spaces.Box(0, 255, (8, 8, 1), np.uint8)

    def _answer(self):
        (start, t), info = super()._answer()
        picture = np.zeros((8, 8, 1), np.uint8)
        picture[0, 0], picture[1, 1] = start, 40 * t
        return picture, info


class Foreign(nn.Module):
    """A policy of a user, with neither memory nor masks; also values for DQN, and logits for SAC."""

    def __init__(self):
        super().__init__()
        self.pi, self.v = nn.Linear(2, 4), nn.Linear(2, 1)

    def forward(self, obs):
        return self.pi(obs)

    def get_action_and_logprob(self, obs):
        actions = torch.distributions.Categorical(logits=self.pi(obs)).sample()
        return actions, self.get_logprob_and_entropy(obs, actions)[0]

    def get_value(self, obs):
        return self.v(obs).squeeze(-1)

    def get_logprob_and_entropy(self, obs, actions):
        choices = torch.distributions.Categorical(logits=self.pi(obs))
        return choices.log_prob(actions), choices.entropy()

    def mode(self, obs):
        return self.pi(obs).argmax(-1)


def extend(name, memory):
    """A policy of rlox's own class, with the memory that is asked for."""
    shape = (memory, 4, 1, None) if memory else None
    if name == "sac":
        return CategoricalPolicy(2, 4, 8)
    if name != "dqn":
        return DiscretePolicy(2, 4, 8, memory=shape)
    return RecurrentQNetwork(2, 4, [8], "relu", False, shape) if shape else DiscreteQNetwork(2, 4, [8], "relu", False)


def with_update(base, *reads):
    """A class with an update of its own, which declares that it reads these."""

    class Own(base):
        def update(self, batch):
            return super().update(batch)

    if reads:
        Own.reads = reads
    return Own


class Choice(NamedTuple):
    """Another choice, and for which algorithms it exists."""

    arguments: dict[str, Any]
    names: tuple[str, ...] = tuple(ONLINE)
    with_memory: str | None = None  # why it is refused with a memory
    without_memory: str | None = None  # why it is refused without one
    with_masks: str | None = None  # why it is refused with masks
    alone: str | None = None  # why it is always refused


ON_POLICY = ("a2c", "appo", "impala", "mappo", "ppo")
OFF = ("dqn", "sac")  # of transitions, with discrete actions
ACTORS = ("appo", "impala")
UNKNOWN = "unknown hyper-parameter 'memory'; (an update learns from single transitions|the world model is a memory)"
ALONE = "sequence_length must be null without a memory"
NOT_NATIVE = "backend must be auto or torch"
NOT_COMPILED = "compile must be false with memory"
ON_HOST = "env_backend must be auto.* got 'tensor'"

CHOICES = {
    "nothing": Choice({}),
    "torch": Choice({"backend": "torch"}, tuple(sorted({*FOLLOW_MASKS, *CONTINUOUS} & {*ONLINE}))),
    "native": Choice({"backend": "native"}, (*ON_POLICY, "dqn"), with_memory=NOT_NATIVE),
    "frame stack": Choice({"env_wrappers": [{"FrameStackObservation": {"stack_size": 3}}]}, (*ON_POLICY, *OFF)),
    "pictures": Choice({"env_wrappers": [{"FrameStackObservation": {"stack_size": 4}}]}, (*ON_POLICY, *OFF)),
    "normalisation": Choice({"normalize_obs": True, "normalize_rewards": True}, ON_POLICY),
    "normalised observations": Choice({"normalize_obs": True}, OFF),
    "compile": Choice({"compile": True}, (*ON_POLICY, *OFF), with_memory=NOT_COMPILED),
    "policy": Choice({"policy": extend}, (*ON_POLICY, *OFF)),
    "foreign policy": Choice(
        {"policy": Foreign},
        (*ON_POLICY, *OFF),
        with_memory="policy must have a memory|memory must be none for a policy without one",
        with_masks="policy must be a subclass of rlox.nn.policies.DiscretePolicy",
    ),
    "update": Choice(
        {"class": with_update},
        (*ON_POLICY, *OFF),
        with_memory="the update of Own does not declare that it reads batch.sequences",
        with_masks="the update of Own does not declare that it reads batch.masks",
    ),
    "update that reads": Choice({"class": lambda base: with_update(base, "masks", "sequences")}, (*ON_POLICY, *OFF)),
    "tensors": Choice(
        {"env_backend": "tensor"}, tuple(ONLINE), with_memory=ON_HOST, with_masks="no tensor version",
    ),
    "workers": Choice({"env_workers": 2}),
    "reward_fn": Choice({"reward_fn": lambda obs, actions, rewards: rewards}),
    "sequence length": Choice({"sequence_length": 8}, ("appo", "mappo", "ppo"), without_memory=ALONE),
    "processes": Choice({"actors": "processes"}, ACTORS),
    "replay": Choice({"replay_rollouts": 1}, ACTORS),
    "prioritised replay": Choice({"buffer": "prioritized"}, OFF, with_memory="buffer must be uniform"),
    "replay on disk": Choice({"buffer": "mmap"}, OFF, with_memory="buffer must be uniform"),
    "replay on a GPU": Choice({"buffer": BufferConfig(device="cuda")}, OFF, alone="buffer.device"),
    "n-step returns": Choice({"n_step": 3}, OFF),
    "dueling": Choice({"dueling": True}, ("dqn",)),
}  # fmt: skip
KINDS = {"lstm": ("lstm", False), "gru": ("gru", False), "masks": (None, True), "both": ("lstm", True)}
# By default each algorithm and each choice runs with both at once, or with what it supports.
EXHAUSTIVE = pytest.mark.exhaustive
OFTEN = {("both", "nothing"), ("gru", "nothing"), ("masks", "nothing")}
CELLS = [
    pytest.param(name, kind, choice, marks=() if often else EXHAUSTIVE)
    for choice, (_, names, *_) in CHOICES.items()
    for name in names
    for kind in KINDS
    for often in [(kind, choice) in OFTEN or (name in ("ppo", "dqn") and kind == "both")]
]


def find_reasons(name, choice, memory, masked):
    """The reasons for which the combination is refused; none if it is not."""
    device = choice.arguments.get("env_backend") == "tensor"
    if memory and name not in REMEMBER:
        yield UNKNOWN
    if masked and name in CONTINUOUS:
        yield "the environment's actions must be continuous, got 4 discrete actions"
    elif masked and name not in FOLLOW_MASKS:
        yield f"the environment has action masks, which {name} does not use"
    if device and name not in ("a2c", "mappo", "ppo"):
        yield "environments on a device are for PPO, A2C and MAPPO"
    if memory and choice.with_memory:
        yield choice.with_memory
    if not memory and choice.without_memory:
        yield choice.without_memory
    if masked and choice.with_masks and (choice.arguments.get("policy") is not Foreign or name not in OFF):
        yield choice.with_masks
    if choice.alone:
        yield choice.alone


def build(name, choice, memory, masked):
    arguments, entry = {"n_envs": 2, "seed": 1, **choice.arguments}, ALGORITHMS[name]
    cls = resolve(entry.discrete or entry.cls)
    settings = OFF_POLICY if off_policy(name) else {"n_steps": 16, "hidden_sizes": [8]}
    settings = SEQUENCES if of_sequences(name) else settings
    if memory:
        settings = {**settings, "memory": memory, "memory_size": 4}
        settings |= {"sequence_length": 8, "burn_in": 2} if name == "dqn" else {}
    if isinstance(arguments.get("policy"), type):
        arguments["policy"] = arguments["policy"]()
    elif "policy" in arguments:
        arguments["policy"] = arguments["policy"](name, memory)
    cls = arguments.pop("class", lambda base: base)(cls)
    kind = Pictures if choice is CHOICES["pictures"] else Strict
    env = "Pendulum-v1" if name in CONTINUOUS and not masked else lambda: kind("info" if masked else "")
    if arguments.get("env_backend") == "tensor" and not masked:
        env = "CartPole-v1"
    return cls(env, **{**settings, **arguments})


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind", "choice"), CELLS)
def test_it_trains_or_is_refused_before_the_run(name, kind, choice, monkeypatch):
    memory, masked = KINDS[kind]
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)  # which takes a minute
    reasons = list(find_reasons(name, CHOICES[choice], memory, masked))
    if reasons:
        with pytest.raises((TypeError, ValueError), match="|".join(reasons)):
            build(name, CHOICES[choice], memory, masked)
        return
    algorithm = build(name, CHOICES[choice], memory, masked)
    require_trained(algorithm, 160)
    assert algorithm.spec.masked is masked
    assert remembers(algorithm.policy, memory)


def require_trained(algorithm, n):
    """Train for `n` steps or updates, and evaluate."""
    try:
        metrics = algorithm.train(n)
        assert algorithm.counters.updates > 1
        assert np.isfinite([value for key, value in metrics.items() if "loss" in key]).all()
        assert len(algorithm.evaluate(2).returns) == 2
    finally:
        algorithm.close()


def remembers(policy, memory):
    return (getattr(policy, "state_dim", 0) > 0) is (memory is not None)


# ---- several agents, of which some have masks, die early, or take turns

TURNS, PURSUIT = "pettingzoo:pettingzoo.classic.tictactoe_v3", "GridPursuit-v0"
SEVERAL = {
    "nothing": Choice({}),
    "torch": Choice({"backend": "torch"}),
    "native": Choice({"backend": "native"}, with_memory=NOT_NATIVE),
    "local critic": Choice({"critic": "local"}),
    "indices": Choice({"agent_id": True}),
    "own parameters": Choice({"share_parameters": False}),
    "self-play": Choice({"share_parameters": False, "self_play": True, "self_play_every": 1}),
    "value norm": Choice({"value_norm": True, "value_loss": "huber"}),
    "sequence length": Choice({"sequence_length": 8}, without_memory=ALONE),
    "workers": Choice({"env_workers": 2}),
    "by id": Choice({"env_fn": None}),
    "compile": Choice({"compile": True}, with_memory=NOT_COMPILED),
    "update": Choice(
        {"class": with_update},
        with_memory="the update of Own does not declare that it reads batch.sequences",
        with_masks="the update of Own does not declare that it reads batch.masks",
    ),
    "update that reads": Choice({"class": lambda base: with_update(base, "masks", "sequences")}),
    "policy": Choice({"policy": Foreign}, alone="policy must be None with several agents"),
    "reward_fn": CHOICES["reward_fn"]._replace(alone="reward_fn must be None with several agents"),
    "normalisation": CHOICES["normalisation"]._replace(alone="normalize_obs must be false with several agents"),
    "frame stack": CHOICES["frame stack"]._replace(alone="env_wrappers must be empty with several agents"),
    "tensors": Choice({"env_backend": "tensor"}, alone="no tensor version with several agents"),
}


def cells(choices, *names):
    """The cells of a table of choices for some algorithms, of which most are left out by default."""
    return [
        pytest.param(name, kind, choice, marks=() if (kind, choice) in OFTEN or kind == "both" else EXHAUSTIVE)
        for choice in choices
        for name in names
        for kind in KINDS
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind", "choice"), cells(SEVERAL, "mappo"))
def test_several_agents_train_or_are_refused_before_the_run(name, kind, choice, monkeypatch):
    memory, masked = KINDS[kind]
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    arguments, make = dict(SEVERAL[choice].arguments), resolve(ALGORITHMS[name].cls)
    if "class" in arguments:
        make = arguments.pop("class")(make)
    if isinstance(arguments.get("policy"), type):
        arguments["policy"] = arguments["policy"]()
    arguments |= {"memory": memory, "memory_size": 4} if memory else {}
    env, by_id = (zoo_probes.MaskedZoo, TURNS) if masked else (zoo_probes.Zoo, PURSUIT)
    arguments = {"env_fn": env, "n_envs": 2, "n_steps": 16, "hidden_sizes": [8], "seed": 1, **arguments}
    reasons = list(find_reasons(name, SEVERAL[choice], memory, masked))
    if reasons:
        with pytest.raises((TypeError, ValueError), match="|".join(reasons)):
            make(by_id, **arguments)
        return
    algorithm = make(by_id, **arguments)
    require_trained(algorithm, 160)
    assert any(player.spec.masked for player in algorithm.players) is masked
    assert all(remembers(learner.policy, memory) for learner in algorithm.learners)


# ---- datasets


class OnlySamples:
    """A dataset of a user, which has no order."""

    def __init__(self, dataset):
        self.dataset, self.masked = dataset, getattr(dataset, "masked", False)

    def sample(self, n, seed):
        return self.dataset.sample(n, seed)


DATA = {
    "nothing": Choice({}),
    "torch": Choice({"backend": "torch"}),
    "native": Choice({"backend": "native"}, with_memory=NOT_NATIVE, with_masks=NOT_NATIVE),
    "normalisation": Choice({"normalize_obs": True}),
    "normalised data": Choice({"normalize": True}),
    "schedule": Choice({"learning_rate_schedule": "linear"}),
    "sequence length": Choice({"sequence_length": 8, "burn_in": 2}, without_memory=ALONE),
    "masks of observations": Choice({"without": ("next_action_masks",)}),
    "samples": Choice({"data": OnlySamples}, with_memory="memory must be none for a dataset without get_state"),
    "update": SEVERAL["update"],
    "update that reads": SEVERAL["update that reads"],
}
# Only cloning learns discrete actions, and with a memory.
DATA_CELLS = [*cells(DATA, "bc"), *cells(["nothing"], *(name for name in OFFLINE if name != "bc"))]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind", "choice"), DATA_CELLS)
def test_what_learns_from_data_trains_or_is_refused_before_the_run(name, kind, choice):
    memory, masked = KINDS[kind]
    arguments, make = dict(DATA[choice].arguments), resolve(ALGORITHMS[name].cls)
    if "class" in arguments:
        make = arguments.pop("class")(make)
    columns = record(40, masked, 4)
    for column in arguments.pop("without", ()):
        columns.pop(column, None)
    data = rlox.OfflineDatasetBuffer(**columns, normalize=arguments.pop("normalize", False))
    data = arguments.pop("data", lambda data: data)(data)
    arguments |= {"memory": memory, "memory_size": 4} if memory else {}
    arguments |= {"hidden_sizes": [8], "batch_size": 16, "seed": 1, "continuous": False}
    arguments["env_id"] = lambda: Strict("info" if masked else "")
    reasons = list(find_reasons(name, DATA[choice], memory, masked))
    if name in CONTINUOUS:
        reasons.append("actions must be continuous, got discrete actions; BC can learn them")
    if reasons:
        with pytest.raises((TypeError, ValueError), match="|".join(reasons)):
            make(data, 2, 4, **arguments)
        return
    algorithm = make(data, 2, 4, **arguments)
    require_trained(algorithm, 6)
    assert algorithm.spec.masked is masked
    assert remembers(algorithm.policy, memory)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, "nothing"])
def test_data_of_several_agents_are_cloned(kind):
    memory, masked = KINDS.get(kind, (None, False))
    make = zoo_probes.MaskedRecall if masked else zoo_probes.Recall
    arguments = {"memory": memory, "memory_size": 16, "sequence_length": 8} if memory else {}
    data = rlox.OfflineDatasetBuffer(**zoo_probes.record_recall(make(), 40))
    env = f"pettingzoo:zoo_probes:{make.__name__}"
    bc = rlox.BC(data, 2, 2, continuous=False, seed=1, learning_rate=1e-2, hidden=16, env_id=env, **arguments)
    bc.train(200)
    assert bc.spec.masked is masked
    returns = bc.evaluate(40).returns
    assert returns.mean() == 2.0 if memory else returns.mean() < 1.5
