"""DPO against its formulas: each completion by itself, in double precision, without padding, packing or parts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import toy
from torch import nn

from rlox.algorithms import DPO
from rlox.llm.encoded import Pairs
from rlox.llm.tokens import Sequences

PROMPTS = [[5, 6], [3], [7, 8, 9, 4, 2], [2, 4], [4]]
CHOSEN = [[4, 5, 1], [6, 1, 7, 8], [1], [9, 9, 1], [2, 1]]
REJECTED = [[4, 1], [], [10, 11, 12, 1], [9, 8, 1], [3, 3, 3]]
LOSSES = [
    {},
    {"label_smoothing": 0.2},
    {"loss_type": "robust", "label_smoothing": 0.2},
    {"loss_type": "hinge", "beta": 0.8},
    {"loss_type": "ipo", "beta": 0.3},
]


def pairs():
    return Pairs(Sequences(PROMPTS * 2, CHOSEN + REJECTED), np.arange(5))


def _sigmoid(x):
    return 1 / (1 + torch.exp(-x))


def expected(policy, reference, c):
    """The mean loss, differentiable in `policy`, and metrics."""
    losses, metrics = [], {name: [] for name in ("accuracy", "margin", "chosen_reward", "rejected_reward")}
    for prompt, *sides in zip(PROMPTS, CHOSEN, REJECTED, strict=True):
        gains, means = [], []
        for side in sides:
            ours = toy.token_log_probs(policy, prompt, side)[0]
            theirs = toy.token_log_probs(reference, prompt, side)[0]
            gains.append((ours - theirs).sum())
            means.append((ours - theirs).sum() / max(len(side), 1))
        apart, smooth = gains[0] - gains[1], c.label_smoothing
        right, wrong = torch.log(_sigmoid(c.beta * apart)), torch.log(_sigmoid(-c.beta * apart))
        losses.append(
            {
                "sigmoid": -(1 - smooth) * right - smooth * wrong,
                "robust": (-(1 - smooth) * right + smooth * wrong) / (1 - 2 * smooth),
                "hinge": max(torch.zeros(()).double(), 1 - c.beta * apart),
                "ipo": (means[0] - means[1] - 1 / (2 * c.beta)) ** 2,
            }[c.loss_type]
        )
        chosen, rejected = (c.beta * gain.item() for gain in gains)
        for name, value in zip(metrics, (chosen > rejected, chosen - rejected, chosen, rejected), strict=True):
            metrics[name].append(value)
    return torch.stack(losses).mean(), {name: np.mean(values) for name, values in metrics.items()}


def near(module, seed=1):
    """A copy of the model with slightly different weights."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        for p in module.parameters():
            p += 0.1 * p.std() * torch.randn_like(p)
    return module


def compare(kind="qwen2", **settings):
    module, other = toy.model(kind, scale=2.0), near(toy.model(kind, scale=2.0))
    algorithm = DPO(module, other, max_grad_norm=None, batch_size=5, **settings)
    policy, reference, steps = toy.differentiable(module), toy.copied(other), toy.Steps(algorithm)
    metrics = {name: float(x) for name, x in algorithm.update(pairs()).items()}
    loss, means = expected(policy, reference, algorithm.config)
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=2e-6, abs=1e-6)
    assert toy.relative_error(steps.gradients[0], toy.gradient(policy)) < 5e-6
    for name, value in means.items():
        assert metrics[name] == pytest.approx(value, rel=2e-5, abs=2e-6)
    return metrics, steps.gradients[0]


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("settings", LOSSES, ids=str)
@pytest.mark.parametrize("kind", ["bare", "qwen2"])
def test_each_loss_in_one_part_and_in_four(kind, settings, accumulation):
    compare(kind, accumulation=accumulation, **settings)


@pytest.mark.parametrize("settings", LOSSES, ids=str)
@pytest.mark.parametrize("kind", ["qwen2-eager", "qwen2-sdpa", "llama"])
def test_packed_as_padded(kind, settings):
    packed, gradient = compare(kind, packing=True, accumulation=2, **settings)
    padded, other = compare(kind, accumulation=2, **settings)
    assert packed["loss"] == pytest.approx(padded["loss"], abs=2e-6)
    assert toy.relative_error(gradient, other) < 2e-6


@pytest.mark.parametrize("settings", LOSSES[:1] + LOSSES[3:], ids=str)
def test_a_policy_equal_to_its_reference_has_the_loss_of_random_choice(settings):
    algorithm = DPO(toy.model(), batch_size=5, **settings)
    metrics = algorithm.update(pairs())
    c = algorithm.config
    level = {"sigmoid": math.log(2), "hinge": 1.0, "ipo": 1 / (2 * c.beta) ** 2}[c.loss_type]
    assert float(metrics["loss"]) == pytest.approx(level, rel=1e-6)
    assert float(metrics["margin"]) == 0.0


def test_the_default_reference_is_the_initial_model():
    module = toy.model()
    start = toy.copied(module)
    algorithm = DPO(module, tokenizer=toy.tokenizer(), dataset=toy.PAIRS, batch_size=5, learning_rate=1e-2)
    algorithm.train(4)
    policy, found = toy.copied(module), algorithm.update(pairs())
    loss, _ = expected(policy, start, algorithm.config)
    assert float(found["loss"]) == pytest.approx(loss.item(), rel=1e-5)
    assert abs(float(found["margin"])) > 1e-3


def test_compute_loss_equals_the_loss_of_an_update():
    module, other = toy.model("bare"), near(toy.model("bare"))
    algorithm = DPO(module, other)
    policy = toy.differentiable(module)
    loss, metrics = algorithm.compute_loss(
        *([torch.tensor(row) for row in rows] for rows in (PROMPTS, CHOSEN, REJECTED))
    )
    theirs, means = expected(policy, toy.copied(other), algorithm.config)
    theirs.backward()
    loss.backward()
    assert loss.item() == pytest.approx(theirs.item(), rel=2e-6)
    assert toy.relative_error(algorithm.optimizer.grad, toy.gradient(policy)) < 5e-6
    assert metrics["chosen_reward"] == pytest.approx(means["chosen_reward"], rel=2e-5, abs=2e-6)


def test_padding_is_ignored():
    """In tensors of pairs, padding precedes prompts and follows completions."""
    width = 6
    padded = [
        torch.tensor([[0] * (width - len(row)) + row for row in PROMPTS]),
        torch.tensor([row + [0] * (width - len(row)) for row in CHOSEN]),
        torch.tensor([row + [0] * (width - len(row)) for row in REJECTED]),
    ]
    algorithm = DPO(toy.model(), near(toy.model()), tokenizer=toy.tokenizer())
    loss, _ = algorithm.compute_loss(*padded)
    assert loss.item() == algorithm.compute_loss(PROMPTS, CHOSEN, REJECTED)[0].item()


def test_one_end_is_kept_if_it_is_also_the_padding():
    tokenizer = toy.copy.deepcopy(toy.tokenizer())
    tokenizer.pad_token = "<eos>"
    algorithm = DPO(toy.model(), near(toy.model()), tokenizer=tokenizer)
    padded = algorithm.compute_loss(*(torch.tensor([row]) for row in ([1, 1, 5], [3, 1, 1, 1], [4, 6, 7, 1])))
    assert padded[0].item() == algorithm.compute_loss([[5]], [[3, 1]], [[4, 6, 7, 1]])[0].item()


def test_margins_are_not_read():
    rows = [{**row, "margin": "large"} for row in toy.PAIRS]
    algorithm = DPO(toy.model(), tokenizer=toy.tokenizer(), dataset=rows, batch_size=20)
    assert algorithm.train(1)["loss"] == pytest.approx(math.log(2), rel=1e-6)


def test_the_reference_reads_each_pair_once():
    algorithm = DPO(toy.model(), tokenizer=toy.tokenizer(), dataset=toy.PAIRS, batch_size=5)
    asked, score = [], algorithm.reference.score
    algorithm.reference.score = lambda layout, *more: asked.append(1) or score(layout, *more)
    algorithm.train(4)
    assert len(asked) == 4
    algorithm.train(8)
    assert len(asked) == 4


def test_a_reference_that_moves_is_read_again():
    algorithm = DPO(
        toy.model(), tokenizer=toy.tokenizer(), dataset=toy.PAIRS, batch_size=20, ref_sync_every=2,
        ref_sync_share=1.0, learning_rate=1e-2,
    )  # fmt: skip
    algorithm.train(2)
    ours, theirs = dict(algorithm.policy.named_parameters()), algorithm.reference.own_module
    assert all(torch.equal(p, ours[name]) for name, p in theirs.named_parameters())
    assert algorithm.train(1)["loss"] == pytest.approx(math.log(2), rel=1e-6)


def test_a_reference_moves_by_ref_sync_share():
    module, other = toy.model(), near(toy.model())
    algorithm = DPO(module, other, batch_size=5, ref_sync_every=3, ref_sync_share=0.25, learning_rate=1e-2)
    before = {name: p.clone() for name, p in other.named_parameters()}
    for _ in range(2):
        algorithm.train_step(PROMPTS, CHOSEN, REJECTED)
    assert all(torch.equal(p, before[name]) for name, p in other.named_parameters())
    algorithm.train_step(PROMPTS, CHOSEN, REJECTED)
    ours = dict(module.named_parameters())
    for name, p in other.named_parameters():
        assert torch.allclose(p, 0.75 * before[name] + 0.25 * ours[name], atol=1e-6)


def test_evaluation_does_not_change_training():
    """Not even in the last bits, which depend on the batch size."""
    found = []
    for looks in (False, True):
        algorithm = DPO(toy.model(), tokenizer=toy.tokenizer(), dataset=toy.PAIRS, batch_size=3, learning_rate=1e-2)
        for _ in range(4):
            algorithm.train(2)
            if looks:
                known = algorithm._known.values.copy()
                algorithm.scored(7)
                assert np.array_equal(algorithm._known.values, known, equal_nan=True)
                algorithm.generate(["1+"], n=2, max_new_tokens=3)
        found.append(algorithm.optimizer.flat.clone())
    assert torch.equal(*found)


def test_the_score_of_a_row_is_whether_the_policy_prefers_the_chosen_one():
    module = toy.model()
    start = toy.copied(module)
    algorithm = DPO(module, tokenizer=toy.tokenizer(), dataset=toy.PAIRS, batch_size=6, learning_rate=1e-2)
    algorithm.train(1)
    rows, policy, right = algorithm.rows, toy.copied(module), []
    for prompt, *sides in zip(rows.prompts, rows.chosen, rows.rejected, strict=True):
        ours, theirs = ([toy.token_log_probs(m, prompt, side)[0].sum() for side in sides] for m in (policy, start))
        right.append(float(ours[0] - theirs[0] > ours[1] - theirs[1]))
    found = algorithm.scored(20)
    assert 0 < np.mean(right) < 1
    assert found.returns.tolist() == right
    assert found.lengths.tolist() == [len(row) for row in rows.chosen]


def test_the_snippet_of_the_introduction_runs_as_printed():
    model, ref_model = toy.model("bare"), near(toy.model("bare"))
    ids = torch.randint(2, 24, (4, 12), generator=torch.Generator().manual_seed(0))
    prompt_ids, chosen_ids, rejected_ids = ids[:, :3], ids[:, 3:8], ids[:, 8:]
    dpo = DPO(model=model, ref_model=ref_model, beta=0.1)
    metrics = dpo.train_step(prompt=prompt_ids, chosen=chosen_ids, rejected=rejected_ids)
    assert metrics["loss"] > 0
    assert dpo.train_step(prompt_ids, chosen_ids, rejected_ids)["loss"] < metrics["loss"]


class Generates(toy.Recurrent):
    """A module whose `generate` returns prompts and completions together."""

    def generate(self, prompts, max_new_tokens):
        tokens = prompts
        for _ in range(max_new_tokens):
            probs = self(tokens)[:, -1].softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(probs, 1)], 1)
        return tokens


def test_the_online_loop_of_the_tutorial_runs_as_printed(capsys):
    def online_dpo_loop(model, ref_model, reward_fn, prompt_dataset, n_epochs=3, group_size=4, beta=0.1,
                        learning_rate=1e-5):  # fmt: skip
        dpo = DPO(model=model, ref_model=ref_model, beta=beta, learning_rate=learning_rate)
        for epoch in range(n_epochs):
            for prompts in prompt_dataset:
                expanded = prompts.repeat_interleave(group_size, dim=0)
                with torch.no_grad():
                    completions = model.generate(expanded, max_new_tokens=8)
                rewards = reward_fn([completions[i] for i in range(completions.shape[0])], expanded)
                for i in range(prompts.shape[0]):
                    group = rewards[i * group_size : (i + 1) * group_size]
                    best = i * group_size + int(max(range(group_size), key=lambda j: group[j]))
                    worst = i * group_size + int(min(range(group_size), key=lambda j: group[j]))
                    chosen, rejected = completions[best].unsqueeze(0), completions[worst].unsqueeze(0)
                    metrics = dpo.train_step(prompts[i].unsqueeze(0), chosen, rejected)
            print(
                f"Epoch {epoch}: loss={metrics['loss']:.4f}  chosen_reward={metrics['chosen_reward']:.3f}  "
                f"rejected_reward={metrics['rejected_reward']:.3f}"
            )

    torch.manual_seed(0)
    model, ref_model = Generates(), Generates()
    ref_model.load_state_dict(model.state_dict())
    data = [torch.randint(2, 24, (2, 3)) for _ in range(2)]
    online_dpo_loop(model, ref_model, lambda completions, prompts: [float(c.sum()) for c in completions], data)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 3
    assert printed[2].startswith("Epoch 2: loss=0.")
    moved = [not torch.equal(p, q) for p, q in zip(model.parameters(), ref_model.parameters(), strict=True)]
    assert all(moved)
    assert isinstance(model, nn.Module)


def test_accuracy_rises():
    algorithm = DPO(
        toy.model(scale=1.0), tokenizer=toy.tokenizer(), dataset=toy.PAIRS, batch_size=20, learning_rate=1e-2
    )
    assert algorithm.scored(20).returns.mean() == 0.0  # the policy is its reference
    metrics = algorithm.train(25)
    assert metrics["accuracy"] == 1.0
    assert algorithm.scored(20).returns.mean() == 1.0
    assert metrics["loss"] < 0.4
