"""Reward models against the formula: each completion by itself, in double precision."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import toy
from torch import nn
from transformers import OPTConfig, OPTForCausalLM

from rlox.algorithms import GRPO, RewardModel
from rlox.llm.encoded import Pairs
from rlox.llm.rewards import EnsembleRewardModel, MultiObjectiveReward, RemoteReward, RewardModelServer
from rlox.llm.tokens import Sequences

PROMPTS = [[5, 6], [3], [7, 8, 9, 4, 2], [2, 4], [4]]
CHOSEN = [[4, 5, 1], [6, 1, 7, 8], [1], [9, 9, 1], [2, 1]]
REJECTED = [[4, 1], [], [10, 11, 12, 1], [9, 8, 1], [3, 3, 3]]
MARGINS = np.array([0.5, 0.0, 1.0, -0.3, 2.0], np.float32)


class Judge(nn.Module):
    """A custom module: ids (B, T) -> rewards (B,)."""

    def __init__(self):
        super().__init__()
        self.embed, self.memory, self.head = nn.Embedding(24, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 1)

    def forward(self, ids):
        return self.head(self.memory(self.embed(ids))[0][:, -1])[:, 0]


def judge():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Judge()


def reward(policy, prompt, completion):
    """The reward of one row: the head's output for its last token, or the output of a custom module."""
    ids = torch.tensor([[*prompt, *completion]])
    if policy.head is None:
        return policy.model(ids)[0]
    inside = policy.model.transformer if hasattr(policy.model, "transformer") else policy.model.model
    return policy.head(inside(ids).last_hidden_state[0, -1])[0]


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("settings", [{}, {"center": 0.3}], ids=str)
@pytest.mark.parametrize("margins", [None, MARGINS], ids=["without margins", "with margins"])
@pytest.mark.parametrize("kind", ["bare", "qwen2-eager", "qwen2-sdpa", "gpt2"])
def test_each_loss(kind, margins, settings, accumulation):
    module = judge() if kind == "bare" else toy.model(kind)
    algorithm = RewardModel(module, max_grad_norm=None, batch_size=5, accumulation=accumulation, **settings)
    policy, steps = toy.differentiable(algorithm.policy), toy.Steps(algorithm)
    found = algorithm.update(Pairs(Sequences(PROMPTS * 2, CHOSEN + REJECTED), np.arange(5), margins))
    losses, apart, sides = [], [], []
    for i, prompt in enumerate(PROMPTS):
        chosen, rejected = reward(policy, prompt, CHOSEN[i]), reward(policy, prompt, REJECTED[i])
        margin = 0.0 if margins is None else float(margins[i])
        loss = torch.log(1 + torch.exp(-(chosen - rejected - margin)))
        losses.append(loss + settings.get("center", 0.0) * (chosen + rejected) ** 2)
        apart.append((chosen - rejected).item())
        sides.append((chosen.item(), rejected.item()))
    loss = torch.stack(losses).mean()
    loss.backward()
    assert float(found["loss"]) == pytest.approx(loss.item(), rel=2e-6)
    assert float(found["margin"]) == pytest.approx(np.mean(apart), rel=1e-5, abs=1e-6)
    assert float(found["accuracy"]) == pytest.approx(np.mean(np.array(apart) > 0))
    both = [float(found["chosen_reward"]), float(found["rejected_reward"])]
    assert both == pytest.approx(np.mean(sides, 0), rel=1e-5, abs=1e-6)
    assert toy.relative_error(steps.gradients[0], toy.gradient(policy)) < 3e-6


def test_margins_are_a_column_of_the_rows():
    rows = [{**row, "margin": i / 4} for i, row in enumerate(toy.PAIRS)]
    algorithm = RewardModel(toy.model(), tokenizer=toy.tokenizer(), dataset=rows, batch_size=4)
    batch, numbers = algorithm.sample(), algorithm.numbers(0)
    assert batch.margins.tolist() == [i / 4 for i in numbers]
    assert batch.numbers.tolist() == numbers.tolist()


def test_opt_may_project_its_hidden_states():
    settings = {"hidden_size": 32, "word_embed_proj_dim": 16, "do_layer_norm_before": False, "ffn_dim": 32}
    settings |= {"vocab_size": toy.VOCABULARY, "num_hidden_layers": 1, "num_attention_heads": 2}
    module = OPTForCausalLM(OPTConfig(max_position_embeddings=64, **settings))
    algorithm = RewardModel(module, tokenizer=toy.tokenizer(), dataset=toy.PAIRS, batch_size=4)
    assert np.isfinite(algorithm.train(1)["loss"])


def test_rewards_may_be_returned_as_a_column():
    class Column(Judge):
        def forward(self, ids):
            return super().forward(ids)[:, None]

    ours, theirs = judge(), Column()
    theirs.load_state_dict(ours.state_dict())
    sequences = Sequences(PROMPTS, CHOSEN)
    assert torch.equal(RewardModel(ours).rewards(sequences), RewardModel(theirs).rewards(sequences))


def test_a_reward_does_not_depend_on_the_batch():
    algorithm = RewardModel(toy.model(), tokenizer=toy.tokenizer(), batch_size=3)
    prompts, completions = [row["prompt"] for row in toy.PAIRS], [row["chosen"] for row in toy.PAIRS]
    together = algorithm.score_batch(prompts, completions)
    alone = [algorithm.score_batch([p], [c])[0] for p, c in zip(prompts, completions, strict=True)]
    assert together == pytest.approx(np.array(alone), rel=1e-5, abs=1e-6)
    assert together.dtype == np.float64
    assert len(np.unique(together)) > 10
    assert algorithm.score_batch([], []).shape == (0,)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_equal_completions_have_the_same_reward(precision):
    algorithm = RewardModel(toy.model(), tokenizer=toy.tokenizer(), batch_size=7, precision=precision)
    server = RewardModelServer(judge(), 7, toy.tokenizer())
    random = np.random.default_rng(0)
    completions = ["12"] * 20 + ["".join(map(str, random.integers(0, 10, n % 9 + 1))) for n in range(40)]
    order = random.permutation(60)
    for reward in (algorithm, server):
        rewards = np.empty(60)
        rewards[order] = reward.score_batch(["1+1="] * 60, [completions[i] for i in order])
        assert np.ptp(rewards[:20]) == 0
        assert len(np.unique(rewards)) > 35


def test_the_reward_is_a_float32_in_every_precision():
    algorithm = RewardModel(toy.model(scale=1.0), tokenizer=toy.tokenizer(), precision="bfloat16")
    rewards = torch.from_numpy(algorithm.score_batch(["1+1="] * 100, [str(n) for n in range(100)])).float()
    assert len(rewards.unique()) > 95
    assert (rewards.bfloat16().float() != rewards).float().mean() > 0.9


def test_completions_that_were_cut_off_get_no_end():
    algorithm = RewardModel(toy.model(), tokenizer=toy.tokenizer())
    server = RewardModelServer(judge(), 7, toy.tokenizer())
    ensemble, several = EnsembleRewardModel([server, algorithm]), MultiObjectiveReward({"a": server, "b": algorithm})
    rows = toy.tokenizer()(["1+1=23"] * 2)["input_ids"]
    whole = algorithm.rewards(Sequences([row[:4] for row in rows], [rows[0][4:], [*rows[0][4:], toy.EOS]])).tolist()
    alone = [judge()(torch.tensor([ids])).item() for ids in (rows[0], [*rows[0], toy.EOS])]
    for reward, expected in (
        (algorithm, whole),
        (server, alone),
        (ensemble, np.mean([whole, alone], 0)),
        (several, np.sum([whole, alone], 0)),
    ):
        found = reward.score_batch(["1+1="] * 2, ["23"] * 2, ended=[False, True])
        assert found == pytest.approx(np.array(expected), abs=1e-5)
        assert found[0] != pytest.approx(found[1], abs=1e-5)
    with server.serve() as served:
        remote = RemoteReward(served.url)
        assert remote.score_batch(["1+1="] * 2, ["23"] * 2, ended=[False, True]) == pytest.approx(np.array(alone))
        assert remote.score_batch(["1+1="] * 2, ["23"] * 2, ended=[True, True]) == pytest.approx(
            np.array(alone[1:] * 2)
        )


def test_a_completion_that_fills_the_context_is_scored():
    """The policy always writes a 7; prompt and completion fill the reward model's context of 64 tokens."""
    logits = torch.zeros(toy.VOCABULARY).index_fill(0, torch.tensor([9]), 50.0)
    algorithm = RewardModel(toy.model(), tokenizer=toy.tokenizer())
    learner = GRPO(
        toy.Always(logits), reward_fn=algorithm, tokenizer=toy.tokenizer(), dataset=["1+1="], max_new_tokens=60,
        batch_size=1, group_size=2, kl_coef=0.0,
    )  # fmt: skip
    batch = learner.sample()
    assert (batch.sequences.lengths == 64).all()
    assert not batch.ended.any()
    ids = batch.sequences.ids[:64]
    assert batch.rewards == pytest.approx(algorithm.rewards(Sequences([ids[:4]] * 2, [ids[4:]] * 2)).tolist(), abs=1e-5)
    with pytest.raises(ValueError, match="must fit in the model's context of 64 tokens, got 65"):
        algorithm.score_batch(["1+1="], ["7" * 60])


def test_a_trained_model_rewards_grpo():
    algorithm = RewardModel(
        toy.model(scale=1.0), tokenizer=toy.tokenizer(), dataset=toy.PAIRS, batch_size=20, learning_rate=1e-2
    )
    metrics = algorithm.train(40)
    assert metrics["accuracy"] == 1.0
    assert algorithm.scored(20).returns.mean() == 1.0
    chosen, rejected = (
        algorithm.score_batch([row["prompt"] for row in toy.PAIRS], [row[side] for row in toy.PAIRS])
        for side in ("chosen", "rejected")
    )
    assert (chosen > rejected).all()
    learner = GRPO(
        toy.model(), reward_fn=algorithm, tokenizer=toy.tokenizer(), dataset=toy.PROMPTS, max_new_tokens=3, batch_size=4
    )
    before = algorithm.optimizer.flat.clone()
    assert np.isfinite(learner.train(1)["mean_reward"])
    assert torch.equal(before, algorithm.optimizer.flat)


def test_adapters_are_trained_with_the_head_and_nothing_else():
    algorithm = RewardModel(
        toy.model(), tokenizer=toy.tokenizer(), dataset=toy.PAIRS, batch_size=5, lora_rank=2, learning_rate=1e-2
    )
    before = {name: p.detach().clone() for name, p in copy.deepcopy(algorithm.policy).named_parameters()}
    algorithm.train(2)
    moved = {name for name, p in algorithm.policy.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if "lora_" in name or name.startswith("head.")}
