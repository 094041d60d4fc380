"""Supervised fine-tuning against the mean over a batch's tokens, each row by itself, in double precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import toy

from rlox.algorithms import SFT
from rlox.llm.tokens import Sequences

PROMPTS = [[5, 6], [3], [7, 8, 9, 4, 2], [2, 4], [4]]
COMPLETIONS = [[4, 5, 1], [], [6, 1, 7, 8, 10], [9, 1], [2]]


def compare(kind="qwen2", **settings):
    module = toy.model(kind)
    algorithm = SFT(module, max_grad_norm=None, batch_size=5, **settings)
    policy, steps = toy.differentiable(module), toy.Steps(algorithm)
    metrics = {name: float(x) for name, x in algorithm.update(Sequences(PROMPTS, COMPLETIONS)).items()}
    found = [toy.token_log_probs(policy, p, c) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    log_probs, entropies = (torch.cat([row[i] for row in found]) for i in range(2))
    loss = -log_probs.mean()
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=2e-6)
    assert metrics["entropy"] == pytest.approx(entropies.mean().item(), rel=2e-6)
    assert metrics["likely_tokens"] == pytest.approx((log_probs.exp() > 0.5).double().mean().item())
    assert metrics["grad_norm"] == pytest.approx(float(steps.gradients[0].norm()), rel=1e-6)
    assert toy.relative_error(steps.gradients[0], toy.gradient(policy)) < 2e-6
    return metrics, steps.gradients[0]


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("kind", ["bare", "qwen2-eager", "qwen2-sdpa", "llama", "gpt2"])
def test_each_kind_of_model_in_one_part_and_in_four(kind, accumulation):
    compare(kind, accumulation=accumulation)


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("kind", ["qwen2-eager", "qwen2-sdpa", "llama", "gpt2"])
def test_packed_as_padded(kind, accumulation):
    packed, gradient = compare(kind, packing=True, accumulation=accumulation)
    padded, other = compare(kind, accumulation=accumulation)
    assert packed["loss"] == pytest.approx(padded["loss"], abs=2e-6)
    assert toy.relative_error(gradient, other) < 2e-6


def test_a_step_is_adamws():
    module = toy.model("bare")
    algorithm = SFT(module, batch_size=5, learning_rate=1e-2, weight_decay=0.1, max_grad_norm=None)
    theirs = toy.copy.deepcopy(module)
    adam = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.1)
    for _ in range(3):
        algorithm.update(Sequences(PROMPTS, COMPLETIONS))
        adam.zero_grad()
        found = [toy.token_log_probs(theirs, p, c)[0] for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
        (-torch.cat(found).mean()).float().backward()
        adam.step()
    for ours, other in zip(module.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(ours, other, atol=2e-5)


def test_the_learning_rate_rises_and_falls():
    algorithm = SFT(
        toy.model(), tokenizer=toy.tokenizer(), dataset=toy.ROWS, warmup=0.4, learning_rate_schedule="linear",
        learning_rate=1.0,
    )  # fmt: skip
    rates, update = [], algorithm.update

    def watched(batch):
        algorithm.follow_schedule()
        rates.append(algorithm.optimizer.learning_rate)
        return {"loss": torch.zeros(())}

    algorithm.update = watched
    algorithm.train(10)
    assert rates == pytest.approx([(k + 1) / 4 if k < 4 else (10 - k) / 6 for k in range(10)])
    assert update is not watched


def test_rows_without_a_token_to_learn_are_accepted():
    algorithm = SFT(toy.model(), batch_size=2)
    before = algorithm.optimizer.flat.clone()
    assert algorithm.train_step([[2, 3], [4]], [[], []])["loss"] == 0.0
    assert torch.equal(before, algorithm.optimizer.flat)


def test_a_row_of_text_ends_with_the_end_of_sequence_and_its_prompt_is_only_read():
    algorithm = SFT(toy.model(), tokenizer=toy.tokenizer(), dataset=toy.ROWS, batch_size=20)
    batch = algorithm.batch(algorithm.rows, np.array([7]))
    assert toy.ROWS[7] == {"prompt": "1+3=", "completion": "04"}
    assert batch.padded_rows()[0].tolist() == [[3, 12, 5, 13, 2, 6, toy.EOS]]
    assert batch.n_scored.tolist() == [3]


def test_the_score_of_a_row_is_the_mean_log_probability_of_its_completion():
    algorithm = SFT(toy.model(), tokenizer=toy.tokenizer(), dataset=toy.ROWS, batch_size=6, eval_dataset=toy.ROWS[3:])
    double, rows, found = toy.copied(algorithm.policy), algorithm.eval_rows, algorithm.scored(5)
    alone = [toy.token_log_probs(double, p, c)[0].mean() for p, c in zip(rows.prompts, rows.completions, strict=True)]
    assert found.returns == pytest.approx(np.array(alone[:5]), rel=1e-5)
    assert found.lengths.tolist() == [3] * 5


def test_examples_continue_the_first_token_of_a_text_without_a_prompt():
    rows = [{"text": row["prompt"] + row["completion"]} for row in toy.ROWS]
    algorithm = SFT(toy.model(), tokenizer=toy.tokenizer(), dataset=rows)
    found = algorithm.examples(2)
    assert [(prompt, reward) for prompt, _, reward in found] == [("0", None)] * 2
    assert found[0][1] == algorithm.generate("0", temperature=0.0)[0][0]


@pytest.mark.slow
def test_it_memorises():
    algorithm = SFT(
        toy.model(hidden=32, scale=1.0), tokenizer=toy.tokenizer(), dataset=toy.ROWS, batch_size=20, learning_rate=1e-2
    )
    assert algorithm.train(100)["loss"] < 0.1
    output = algorithm.generate([row["prompt"] for row in toy.ROWS], temperature=0.0)
    assert output == [[row["completion"]] for row in toy.ROWS]
