"""Train with two ranks, then alone on the joint batches, and print the difference of the weights."""

import math

import numpy as np
import pytest
import torch

import rlox
from rlox.algorithms import DiscreteSAC
from rlox.collectors.rollout import RolloutBatch
from rlox.distributed.ranks import current, join
from rlox.kernels.rng import Rng
from rlox.llm import toy
from rlox.nn.batch import TransitionBatch

SMALL = {"hidden_sizes": [16], "seed": 3, "threads": 1}


class JointRng:
    """The random numbers of the generators of all ranks, concatenated in the order of the ranks."""

    def __init__(self, states):
        self.each = [Rng(0) for _ in states]
        for rng, state in zip(self.each, states, strict=True):
            rng.set_state(state)

    def normal(self, shape):
        share = (*shape[:-2], shape[-2] // len(self.each), shape[-1])
        return np.concatenate([rng.normal(share) for rng in self.each], -2)


class JointRollout(RolloutBatch):
    """The minibatches of all ranks, joined."""

    def sample_minibatches(self, batch_size, shuffle=True, rng=None):
        share = batch_size // len(self.parts)
        each = [part.sample_minibatches(share, rng=own) for part, own in zip(self.parts, rng.each, strict=True)]
        for found in zip(*each, strict=True):
            yield joined(RolloutBatch, found)


class StopAt(rlox.Callback):
    def __init__(self, step):
        self.step = step

    def on_step(self, *, step, **info):
        return step < self.step


def joined(kind, parts):
    names = [name for name in kind.__dataclass_fields__ if isinstance(getattr(parts[0], name), torch.Tensor)]
    return kind(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


def recording(cls):
    """A subclass of `cls` that records the batch of each update and the state of its generator before it."""

    class Recording(cls):
        def __init__(self, *args, **kwargs):
            self.seen = []
            super().__init__(*args, **kwargs)

        def update(self, batch):
            self.seen.append((batch, self.rng.get_state()))
            found = super().update(batch)
            self.grad_norm = float(found["grad_norm"])
            return found

    return Recording


class Coin(torch.nn.Module):
    """A policy of a user that acts at random, whatever it sees."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4))

    def get_action_and_logprob(self, obs):
        chances = torch.distributions.Categorical(logits=torch.zeros(len(obs), 2))
        action = chances.sample()
        return action, chances.log_prob(action)

    def get_logprob_and_entropy(self, obs, action):
        zero = 0.0 * (obs @ self.weight)
        return zero + math.log(0.5), zero + math.log(2)

    def get_value(self, obs):
        return obs @ self.weight


def require_different_actions(group):
    """Train a policy of a user, also after a resume by another number of ranks."""
    torch.manual_seed(0)
    coin = recording(rlox.PPO)("CartPole-v1", 4, n_steps=32, batch_size=128, policy=Coin(), seed=3, threads=1)
    coin.train(128)
    if group.rank == 0:
        coin.save("coin.safetensors")  # as a single process does
    group.from_first(lambda: None)
    again = recording(rlox.PPO).from_checkpoint("coin.safetensors", policy=Coin())
    again.train(128)
    rows = [row for agent in (coin, again) for row in group.all_objects(agent.seen[0][0].actions.tolist())]
    assert len({tuple(row) for row in rows}) == 4


def difference(one, other):
    modules = [(one.policy, other.policy), *([(one.critics, other.critics)] if hasattr(one, "critics") else ())]
    # Adam's steps do not depend on the scale of gradients.
    assert math.isclose(one.grad_norm, other.grad_norm, rel_tol=1e-3), (one.grad_norm, other.grad_norm)
    pairs = [pair for ours, theirs in modules for pair in zip(ours.parameters(), theirs.parameters(), strict=True)]
    return max(float((ours - theirs).detach().abs().max()) for ours, theirs in pairs)


def alone(cls, make, seen):
    """Train `cls` in this process with updates on the joint batches of the ranks."""
    one = make(cls)
    for parts in zip(*seen, strict=True):
        batches, states = zip(*parts, strict=True)
        one.rng = JointRng(states)
        batch = joined(type(batches[0]), batches)
        if isinstance(batch, RolloutBatch):
            batch = JointRollout(**{name: getattr(batch, name) for name in batch.__dataclass_fields__})
            batch.parts = batches
        one.grad_norm = float(one.update(batch)["grad_norm"])
        one.counters.updates += 1
    return one


def short(prompts, completions, **columns):
    return [float(len(text) == 1) for text in completions]


def main():
    group = join()
    torch.set_num_threads(1)
    rows = [{"prompt": f"{i}=", "chosen": str(i) * (1 + i % 3), "rejected": str(9 - i)} for i in range(10)]
    replay = {
        "batch_size": 32,
        "learning_starts": 32,
        "train_freq": 8,
        "gradient_steps": 1,
        "backend": "torch",
        **SMALL,
    }
    makes = {
        rlox.PPO: lambda cls: cls("CartPole-v1", 4, n_steps=32, batch_size=32, n_epochs=2, backend="torch", **SMALL),
        rlox.SAC: lambda cls: cls("Pendulum-v1", 2, **replay),
        DiscreteSAC: lambda cls: cls("CartPole-v1", 2, **replay),
        rlox.TD3: lambda cls: cls("Pendulum-v1", 2, noise_correlation=0.5, **replay),
        rlox.DQN: lambda cls: cls("CartPole-v1", 2, **replay),
    }
    normalised = rlox.PPO("CartPole-v1", 4, n_steps=32, normalize_obs=True, **SMALL)
    normalised.train(3 * 128)
    statistics = group.all_objects(normalised.normalizer.state())
    require_different_actions(group)
    trained = {}
    for cls, make in makes.items():
        agent = make(recording(cls))
        agent.train(10 * 128 if cls is rlox.PPO else 24 + 10 * 8)
        trained[cls] = agent, group.all_objects(agent.seen)

    def language(cls, **arguments):
        model, tokenizer = toy.make_model(hidden=16, layers=1)
        agent = cls(model, tokenizer=tokenizer, batch_size=4, learning_rate=1e-3, seed=3, **arguments)
        agent.grad_norm = agent.train(n_updates=10)["grad_norm"]
        return agent

    kinds = {
        "dpo": lambda: language(rlox.DPO, dataset=rows),
        "sft": lambda: language(rlox.SFT, dataset=[{"prompt": r["prompt"], "completion": r["chosen"]} for r in rows]),
        "grpo": lambda: language(
            rlox.GRPO, dataset=rows, group_size=4, max_new_tokens=3, loss_type="dapo", scale_rewards="batch",
            reward_fn=short,
        ),
        # Each prompt is drawn twice, once on each rank.
        "repeated": lambda: language(
            rlox.GRPO, dataset=rows[:2], group_size=4, max_new_tokens=3, reward_fn=short, temperature=1.5
        ),
        # Without `center` the gradient of the head's bias is only rounding.
        "reward_model": lambda: language(rlox.RewardModel, dataset=rows, center=0.1),
        "online_dpo": lambda: language(rlox.OnlineDPO, dataset=rows, max_new_tokens=3, reward_fn=short),
    }  # fmt: skip
    together = {name: make() for name, make in kinds.items()}
    # Rank 0 stops and saves the training; both ranks resume it.
    stopped = language(rlox.DPO, dataset=rows, callbacks=[StopAt(6), rlox.CheckpointCallback("dpo")])
    assert stopped.counters.updates == 6
    again = rlox.DPO.from_checkpoint("dpo/last.safetensors", dataset=rows)
    again.grad_norm = again.train()["grad_norm"]
    assert again.counters.updates == 10
    assert difference(again, together["dpo"]) == 0.0
    rank = group.rank
    group.leave()
    assert not current().joined
    if rank:
        return
    assert all(np.array_equal(statistics[0][name], x) for name, x in statistics[1].items() if name != "returns")
    assert statistics[0]["obs_count"] == pytest.approx(4 * (3 * 32 + 1), abs=1e-3)  # every observation counted once
    for cls, make in makes.items():
        agent, seen = trained[cls]
        assert agent.counters.updates == 10, agent.counters
        assert isinstance(seen[0][0][0], (RolloutBatch, TransitionBatch))
        print("ddp", cls.__name__.lower(), difference(agent, alone(cls, make, seen)))
    for name, make in kinds.items():
        print("ddp", name, difference(together[name], make()))
