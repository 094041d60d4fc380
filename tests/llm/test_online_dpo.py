"""Online DPO: the judging of pairs, and that its step equals that of DPO on the same pairs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import toy

from rlox.algorithms import DPO, OnlineDPO
from rlox.algorithms.online_dpo import JudgedPairs
from rlox.llm.encoded import Pairs
from rlox.llm.tokens import Sequences

PROMPTS = [[5, 6], [3], [7, 8, 9, 4, 2], [2, 4], [4]]
BETTER = [[4, 5, 1], [6, 1, 7, 8], [1], [9, 9, 1], [2, 1]]
WORSE = [[4, 1], [], [10, 11, 12, 1], [9, 8, 1], [3, 3, 3]]
LOSSES = [{}, {"label_smoothing": 0.1}, {"loss_type": "hinge"}, {"loss_type": "ipo"}]


class Tempered(torch.nn.Module):
    """A model whose logits are divided by 0.5."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, ids):
        return self.module(ids) / 0.5


def made(**more):
    return OnlineDPO(
        toy.model(), tokenizer=toy.tokenizer(), dataset=toy.PROMPTS, max_new_tokens=5, **{"batch_size": 6, **more}
    )


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("settings", LOSSES, ids=str)
@pytest.mark.parametrize("packing", [False, True])
def test_its_step_equals_that_of_dpo_on_the_same_pairs(settings, packing, accumulation):
    """The step of DPO is compared with the formulas in `test_dpo`."""
    common = {"max_grad_norm": None, "batch_size": 5, "accumulation": accumulation, "packing": packing, **settings}
    sequences = Sequences(PROMPTS * 2, BETTER + WORSE)
    online = OnlineDPO(toy.model(scale=2.0), toy.model(seed=2, scale=2.0), max_new_tokens=4, **common)
    plain = DPO(toy.model(scale=2.0), toy.model(seed=2, scale=2.0), **common)
    steps, others = toy.Steps(online), toy.Steps(plain)
    ones = np.ones(10, np.int64)
    found = online.update(JudgedPairs(sequences, 0, ones == 1, ones, None))
    expected = plain.update(Pairs(sequences, np.arange(5)))
    for name in ("loss", "accuracy", "margin", "chosen_reward", "rejected_reward", "grad_norm"):
        assert float(found[name]) == pytest.approx(float(expected[name]), rel=1e-5, abs=2e-6)
    assert others.gradients[0].norm() > 1e-2
    assert toy.relative_error(steps.gradients[0], others.gradients[0]) < 2e-6


def test_its_step_is_that_of_the_distribution_at_the_temperature():
    common = {"max_grad_norm": None, "batch_size": 5}
    sequences, ones = Sequences(PROMPTS * 2, BETTER + WORSE), np.ones(10, np.int64)
    policy, reference = toy.model("bare"), toy.model("bare", seed=2)
    online = OnlineDPO(policy, reference, temperature=0.5, max_new_tokens=4, **common)
    other = OnlineDPO(Tempered(toy.model("bare")), Tempered(toy.model("bare", seed=2)), max_new_tokens=4, **common)
    steps, others = toy.Steps(online), toy.Steps(other)
    found = [x.update(JudgedPairs(sequences, 0, ones == 1, ones, None)) for x in (online, other)]
    for name in ("loss", "margin", "chosen_reward"):
        assert float(found[0][name]) == pytest.approx(float(found[1][name]), rel=1e-5, abs=2e-6)
    assert abs(float(found[0]["margin"])) > 1e-3
    assert toy.relative_error(steps.gradients[0], others.gradients[0]) < 2e-6


def test_a_function_judges_texts_and_the_preferred_come_first():
    seen = {}

    def judge(prompts, completions):
        seen.update(prompts=prompts, completions=completions)
        return [0, 1, None, 1, np.int64(0), torch.tensor(1)]

    algorithm = made(preference_fn=judge)
    batch, numbers = algorithm.sample(), algorithm.numbers(0)
    assert seen["prompts"] == [toy.PROMPTS[i] for i in numbers]
    prompts = [algorithm.rows.prompts[i] for i in numbers]
    drawn = algorithm.complete(prompts, numbers, 2, 0, algorithm.settings(), algorithm.seed)
    texts = [algorithm.model.decode(ids) for ids in drawn.ids]
    assert seen["completions"] == [(texts[2 * i], texts[2 * i + 1]) for i in range(6)]
    better, worse = [0, 3, 7, 8, 11], [1, 2, 6, 9, 10]
    whole, lengths = batch.sequences.padded_rows()
    for row, k in enumerate(better + worse):
        assert whole[row, : lengths[row]].tolist() == [*prompts[k // 2], *drawn.ids[k]]
    assert len(batch) == 5
    assert batch.n_undecided == 1
    assert batch.lengths.tolist() == [len(ids) for ids in drawn.ids]


def test_the_larger_reward_is_preferred_and_equal_ones_are_not_learned():
    algorithm = made(reward_fn=lambda prompts, completions: [float(len(c)) for c in completions], batch_size=20)
    batch = algorithm.sample()
    texts = batch.rewards.reshape(-1, 2)
    assert batch.n_undecided == (texts[:, 0] == texts[:, 1]).sum() > 0
    whole, lengths = batch.sequences.padded_rows()
    output = [
        len(algorithm.model.decode(whole[i, n:end]))
        for i, (n, end) in enumerate(zip(batch.sequences.prompt_lengths, lengths, strict=True))
    ]
    assert len(batch) > 3
    assert all(output[i] > output[len(batch) + i] for i in range(len(batch)))
    metrics = algorithm.update(batch)
    assert float(metrics["undecided"]) == pytest.approx(batch.n_undecided / 20)
    assert float(metrics["mean_reward"]) == pytest.approx(batch.rewards.mean())


def test_without_a_tokenizer_a_function_judges_token_ids():
    seen = []

    def judge(prompts, completions):
        seen.append((prompts, completions))
        return [int(len(b) > len(a)) for a, b in completions]

    algorithm = OnlineDPO(toy.model(), preference_fn=judge, eos_token_id=1, batch_size=3, max_new_tokens=4)
    prompts = torch.tensor([[5, 6, 7], [3, 4, 5], [8, 9, 2]])
    assert np.isfinite(algorithm.train(prompts=prompts, n_epochs=2)["loss"])
    assert algorithm.train_step(prompts)["undecided"] == 0.0
    (first, pairs), *_ = seen
    assert sorted(first.tolist()) == sorted(prompts.tolist())
    assert all(ids.dtype == torch.int64 and 1 <= len(ids) <= 4 for pair in pairs for ids in pair)
    assert set(algorithm.scored(3).returns) <= {0.0, 0.5, 1.0}
    with pytest.raises(ValueError, match="must return 0, 1 or None for each pair, got 2"):
        OnlineDPO(toy.model(), preference_fn=lambda p, c: [2] * len(c), max_new_tokens=4).train_step(prompts)


def test_without_a_decision_nothing_is_learned():
    algorithm = made(preference_fn=lambda prompts, completions: [None] * len(prompts))
    before = algorithm.optimizer.flat.clone()
    metrics = algorithm.train(2)
    assert metrics["undecided"] == 1.0
    assert torch.equal(before, algorithm.optimizer.flat)


def test_the_score_of_a_row_is_whether_it_is_preferred_to_the_reference():
    algorithm = made(preference_fn=lambda prompts, completions: [None if a == b else 0 for a, b in completions])
    assert algorithm.scored(20).returns.tolist() == [0.5] * 20
    own = algorithm.model
    # A judge that always prefers the same place knows nothing.
    for place in (0, 1):
        algorithm.preferences._function = lambda prompts, completions, place=place: [place] * len(prompts)
        assert algorithm.scored(20).returns.tolist() == [0.5] * 20
    assert algorithm.model is own


def test_the_judge_of_an_evaluation_sees_both_orders():
    def judge(prompts, completions):
        return [None if a == b else int(b > a) for a, b in completions]

    algorithm = made(preference_fn=judge, learning_rate=1e-1)
    reference = algorithm.generate(toy.PROMPTS, temperature=0.0)
    algorithm.train(3)
    policy = algorithm.generate(toy.PROMPTS, temperature=0.0)
    pairs = [(ours, theirs) for (ours,), (theirs,) in zip(policy, reference, strict=True)]
    expected = [0.5 if ours == theirs else float(ours > theirs) for ours, theirs in pairs]
    assert {0.0, 1.0} <= {*expected}
    assert algorithm.scored(20).returns.tolist() == expected


def test_with_adapters_the_reference_completes_without_them():
    pairs = []

    def judge(prompts, completions):
        pairs.append(completions)
        return [0] * len(prompts)

    algorithm = made(preference_fn=judge, lora_rank=2, learning_rate=1e-1)
    before = algorithm.generate(toy.PROMPTS, temperature=0.0, max_new_tokens=5)
    algorithm.train(3)
    algorithm.scored(20)
    after = algorithm.generate(toy.PROMPTS, temperature=0.0, max_new_tokens=5)
    expected = [(ours, theirs) for (ours,), (theirs,) in zip(after, before, strict=True)]
    assert pairs[-1] == expected + [(theirs, ours) for ours, theirs in expected]
    assert after != before


@pytest.mark.slow
def test_it_learns_what_is_preferred():
    algorithm = OnlineDPO(
        toy.model(scale=1.0), tokenizer=toy.tokenizer(), dataset=toy.PROMPTS, max_new_tokens=4, batch_size=20,
        learning_rate=1e-2, reward_fn=lambda prompts, completions: [float(c.count("7")) for c in completions],
    )  # fmt: skip
    output = algorithm.generate(toy.PROMPTS, n=8)
    algorithm.train(40)
    again = algorithm.generate(toy.PROMPTS, n=8)
    before, after = (np.mean([text.count("7") for row in rows for text in row]) for rows in (output, again))
    assert before < 0.4
    assert after > 1.0
