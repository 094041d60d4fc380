"""GRPO against its formulas: each completion by itself, in double precision, without padding, packing or parts."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
import toy
from torch import nn

from rlox.algorithms import GRPO, SFT, BestOfN, OnlineDPO
from rlox.algorithms.grpo import Groups
from rlox.llm.losses import equal_rewards, group_advantages, sampler_weights
from rlox.llm.models.language import LanguageModel
from rlox.llm.sampling import Settings, sample
from rlox.llm.tokens import Sequences

pytestmark = pytest.mark.filterwarnings("ignore:GRPO. importance_sampling_level=sequence")

# Three completions for each of three prompts: ended, end in the middle, truncated, empty, only the end token.
PROMPTS = [[5, 6], [3], [7, 8, 9, 4, 2]]
COMPLETIONS = [
    [[4, 5, 1], [6, 1, 7, 8], [2, 3, 4, 5]],
    [[], [9, 1], [3, 3, 3, 3]],
    [[1], [10, 11, 12, 1], [13, 2, 1]],
]
ENDED = [[True, False, False], [True, True, False], [True, True, True]]
REWARDS = [[1.0, 0.0, 0.5], [0.3, 0.3, 0.3], [0.0, 2.0, 0.7]]
LONGEST = 4


def groups(temperature=1.0, policy=None, size=3):
    """The first `size` completions of each prompt; the sampler's log-probabilities are close to those of `policy`."""
    columns = zip(PROMPTS, COMPLETIONS, ENDED, REWARDS, strict=True)
    rows = [(p, c[k], e[k], r[k]) for p, c, e, r in columns for k in range(size)]
    output = [toy.token_log_probs(policy, p, c, temperature)[0].detach().numpy() for p, c, _, _ in rows]
    sampler = np.concatenate(output)
    sampler = (sampler + 0.4 * toy.randoms(3, len(sampler))).astype(np.float32)
    rewards = np.array([r for _, _, _, r in rows])
    ended = np.array([e for _, _, e, _ in rows])
    sequences = Sequences([r[0] for r in rows], [r[1] for r in rows])
    return Groups(
        sequences=sequences, ids=[np.array(r[1], np.int64) for r in rows], rewards=rewards, scores={"own": rewards},
        sampler_log_probs=sampler, ended=ended,
    )  # fmt: skip


def advantages(rewards, size, scale, baseline):
    found = []
    for group in np.asarray(rewards).reshape(-1, size):
        for i, reward in enumerate(group):
            others = np.delete(group, i) if baseline == "leave_one_out" else group
            over = {"group": group.std() + 1e-4, "batch": np.std(rewards) + 1e-4, "none": 1.0}[scale]
            found.append(0.0 if np.ptp(group) == 0 else (reward - others.mean()) / over)
    return found


def expected(batch, rows, parts, policy, before, reference, c):
    """The loss of the completions `rows`, differentiable in `policy`, and the means of its metrics."""
    gains = advantages(batch.rewards, c.group_size, c.scale_rewards, c.baseline)
    ids, ends = batch.sequences.ids, np.cumsum(batch.sequences.lengths)
    starts = ends - batch.sequences.lengths
    sampled = np.split(batch.sampler_log_probs.astype(float), np.cumsum(batch.sequences.n_scored)[:-1])
    high = c.clip_eps if c.clip_eps_high is None else c.clip_eps_high
    totals, kls, entropies = {}, [], []
    learned = [i for i in rows if batch.ended[i] or not c.mask_truncated]
    for i in learned:
        whole, n = ids[starts[i] : ends[i]], batch.sequences.prompt_lengths[i]
        prompt, completion = whole[:n], whole[n:]
        if len(completion) == 0:
            totals[i] = torch.zeros(0).double()
            continue
        now, entropy = toy.token_log_probs(policy, prompt, completion, c.temperature)
        old = toy.token_log_probs(before, prompt, completion, c.temperature)[0].detach()
        if c.kl_coef:
            theirs = toy.token_log_probs(reference, prompt, completion, c.temperature)[0]
        gap = old - torch.from_numpy(sampled[i])
        ratio = torch.exp(now - old)
        if c.importance_sampling_level == "sequence":
            ratio = torch.exp((now - old).sum() / len(completion)).expand(len(completion))
        bounded = ratio if c.delta is None else torch.where(ratio < c.delta, ratio, c.delta)
        clipped = torch.where(ratio < 1 - c.clip_eps, 1 - c.clip_eps, torch.where(ratio > 1 + high, 1 + high, ratio))
        worse = bounded * gains[i] < clipped * gains[i]
        losses = -torch.where(worse, bounded, clipped) * gains[i]
        if c.sampler_correction != "none":
            weight = torch.exp(gap.sum().expand_as(gap) if c.sampler_correction.startswith("sequence") else gap)
            over = c.sampler_cap if c.sampler_correction.endswith("truncate") else 0.0
            losses = losses * torch.where(weight <= c.sampler_cap, weight, over)
        if c.kl_coef:
            kl = torch.exp(theirs - now) - (theirs - now) - 1
            kls += kl.tolist()
            losses = losses + c.kl_coef * kl
        entropies += entropy.tolist()
        totals[i] = losses - c.ent_coef * entropy
    none = torch.zeros(()).double()
    sums = {i: losses.sum() for i, losses in totals.items()}
    n_tokens = {i: len(losses) for i, losses in totals.items()}
    if c.loss_type == "grpo":
        loss = sum((sums[i] / max(n_tokens[i], 1) for i in learned), none) / len(rows)
    elif c.loss_type == "dapo":
        loss = sum(sums.values(), none) / sum(n_tokens.values())
    elif c.loss_type == "dr_grpo":
        loss = sum(sums.values(), none) / (len(rows) * c.max_new_tokens)
    else:
        found = [sum((sums[i] for i in part), none) / max(sum(n_tokens[i] for i in part), 1) for part in parts]
        loss = sum(found, none) / len(parts)
    return loss, {"kl": np.mean(kls or [0.0]), "entropy": np.mean(entropies)}


def compare(kind="qwen2", size=3, tolerance=2e-6, **settings):
    """Run one update and compare each step with `expected`; return the metrics and the gradients of the steps."""
    module, other = toy.model(kind), toy.model(kind, seed=1)
    with torch.no_grad():
        for p, q in zip(other.parameters(), module.parameters(), strict=True):
            p.copy_(q + 0.1 * (p - q))
    settings = {"learning_rate": 1e-3, "batch_size": 3, "kl_coef": 0.04, **settings}
    algorithm = GRPO(module, other, group_size=size, max_new_tokens=LONGEST, max_grad_norm=None, **settings)
    c = algorithm.config
    start = toy.copied(module)
    batch = groups(c.temperature, start, size)
    reference = toy.copied(other)
    drawn, minibatches = [], algorithm._minibatches
    algorithm._minibatches = lambda n: (drawn.append(rows) or rows for rows in minibatches(n))
    steps = toy.Steps(algorithm)
    metrics = {name: float(x) for name, x in algorithm.update(batch).items()}
    losses, found = [], {"kl": [], "entropy": []}
    assert len(steps.gradients) == len(drawn) == c.n_epochs * c.n_minibatches
    assert sorted(np.concatenate(drawn[: c.n_minibatches])) == list(range(len(batch)))
    for rows, weights, gradient in zip(drawn, steps.weights, steps.gradients, strict=True):
        policy = toy.differentiable(module)
        toy.set_weights(policy, weights)
        learned = rows[batch.ended[rows]] if c.mask_truncated else rows
        parts = [part for part in np.array_split(learned, c.accumulation) if len(part)]
        loss, means = expected(batch, rows, parts, policy, start, reference, c)
        loss.backward()
        assert toy.relative_error(gradient, toy.gradient(policy)) < tolerance
        losses.append(loss.item())
        for name, value in means.items():
            found[name].append(value)
    assert metrics["loss"] == pytest.approx(np.mean(losses), rel=2e-6, abs=1e-6)
    assert metrics["entropy"] == pytest.approx(np.mean(found["entropy"]), rel=2e-6)
    if c.kl_coef:
        assert metrics["kl"] == pytest.approx(np.mean(found["kl"]), rel=1e-5, abs=1e-6)
    return metrics, steps.gradients


def test_the_default_update():
    metrics, _ = compare()
    assert metrics["kl"] > 1e-4
    assert metrics["ratio"] == 1.0
    assert metrics["clip_fraction"] == 0.0
    assert metrics["equal_groups"] == pytest.approx(1 / 3)
    assert metrics["truncated"] == pytest.approx(3 / 9)
    assert metrics["completion_length"] == pytest.approx(25 / 9)


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_rewards_that_differ_by_rounding_have_no_advantage(scale, baseline):
    """A reward model in float32 scores the same completion differently, by a few units in the last place."""
    random = np.random.default_rng(0)
    rewards = random.uniform(0.5, 2.0, (500, 1)) * 10.0 ** random.integers(-2, 5, (500, 1))
    apart = (1 + random.integers(-3, 4, (500, 6)) * 2.0**-23).astype(np.float32)
    rounded = (rewards.astype(np.float32) * apart).astype(np.float64)
    assert np.ptp(rounded, 1).all()
    assert not group_advantages(rounded.ravel(), 6, scale, baseline).any()
    assert equal_rewards(rounded).all()
    different = rounded + 1e-5 * np.abs(rounded) * np.arange(6)
    assert not equal_rewards(different).any()
    gains = group_advantages(different.ravel(), 6, scale, baseline)
    np.testing.assert_allclose(gains, advantages(different, 6, scale, baseline), rtol=1e-6, atol=1e-12)


def test_saturated_rewards_have_small_advantages():
    rewards = 1.0 - 1e-7 * np.array([0, 0, 0, 0, 1, 9])
    assert not equal_rewards(rewards[None]).any() or not group_advantages(rewards, 6, "group", "mean").any()
    assert np.abs(group_advantages(rewards, 6, "group", "mean")).max() < 0.01


def test_prompts_may_be_passed_by_name():
    algorithm = GRPO(toy.model(), reward_fn=lambda c, p: [float(len(ids)) for ids in c], batch_size=2, max_new_tokens=3)
    prompts = torch.tensor([[5, 6, 7], [3, 4, 5]])
    assert np.isfinite(algorithm.train(prompts=prompts, n_epochs=2)["loss"])
    assert algorithm.counters.updates == 2
    with pytest.raises(TypeError, match=r"GRPO\.train: prompts must be passed as data, which is given"):
        algorithm.train(prompts, prompts=prompts)
    with pytest.raises(TypeError, match=r"SFT\.train: prompts must be passed as data: sft learns from texts"):
        SFT(toy.model()).train(prompts=prompts)


def test_a_generate_of_a_custom_module_is_not_called_and_a_warning_says_so():
    class Greedy(type(toy.model("bare"))):
        def generate(self, prompts, max_new_tokens=8):
            raise AssertionError("called")

    def reward(c, p):
        return [float(len(ids)) for ids in c]

    for make in (GRPO, OnlineDPO, BestOfN):
        with pytest.warns(
            UserWarning, match=f"{make.__name__}: Greedy.generate is not called: completions are sampled"
        ):
            algorithm = make(Greedy(), reward_fn=reward, max_new_tokens=3)
        algorithm.generate(torch.tensor([[5, 6, 7]]))


def test_ratios_of_sequences_need_the_mean_over_sequences():
    with pytest.warns(UserWarning, match="needs loss_type=grpo.*got loss_type=dapo"):
        GRPO(toy.model(), kl_coef=0.0, importance_sampling_level="sequence")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GRPO(toy.model(), kl_coef=0.0, importance_sampling_level="sequence", loss_type="grpo")


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
def test_each_mean_in_one_part_and_in_four(loss_type, accumulation):
    compare("bare", loss_type=loss_type, accumulation=accumulation)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_several_steps_have_ratios_and_clips(level, loss_type):
    metrics, _ = compare(
        "bare", importance_sampling_level=level, loss_type=loss_type, n_epochs=3, n_minibatches=2, learning_rate=3e-2
    )
    assert metrics["clip_fraction"] > 0.1


@pytest.mark.parametrize(
    "settings",
    [
        {"clip_eps_high": 0.5},
        {"delta": 1.3},
        {"delta": 1.3, "importance_sampling_level": "sequence"},
        {"ent_coef": 0.05},
        {"kl_coef": 0.0},
        {"kl_coef": 0.5, "temperature": 0.7},
        {"baseline": "leave_one_out"},
        {"baseline": "leave_one_out", "scale_rewards": "batch"},
        {"scale_rewards": "batch"},
        {"scale_rewards": "none"},
        {"mask_truncated": True},
        {"mask_truncated": True, "loss_type": "grpo"},
        {"mask_truncated": True, "loss_type": "bnpo", "accumulation": 2},
        {"mask_truncated": True, "loss_type": "dr_grpo"},
        {"sampler_correction": "token_truncate", "sampler_cap": 1.1},
        {"sampler_correction": "token_mask", "sampler_cap": 1.1},
        {"sampler_correction": "sequence_truncate", "sampler_cap": 1.1},
        {"sampler_correction": "sequence_mask", "sampler_cap": 1.1},
    ],
    ids=lambda settings: ",".join(f"{k}={v}" for k, v in settings.items()),
)
def test_each_setting_over_several_steps(settings):
    plain = {"n_epochs": 2, "n_minibatches": 2, "learning_rate": 3e-2}
    metrics, gradients = compare("bare", **plain, **settings)
    _, others = compare("bare", **plain)
    assert toy.relative_error(gradients[0], others[0]) > 1e-3 or toy.relative_error(gradients[-1], others[-1]) > 1e-3
    assert metrics["sampler_gap"] > 0.1


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["bare", "qwen2-eager", "qwen2-sdpa", "llama"])
def test_each_kind_of_model(kind, size, accumulation):
    compare(kind, size, accumulation=accumulation)


@pytest.mark.parametrize("kind", ["qwen2-eager", "qwen2-sdpa", "llama"])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_packed_as_padded(kind, accumulation):
    """Compared with the formula and with the padded update."""
    several = {"n_epochs": 2, "learning_rate": 1e-3, "accumulation": accumulation}
    packed, gradients = compare(kind, packing=True, **several)
    padded, others = compare(kind, **several)
    assert packed["loss"] == pytest.approx(padded["loss"], abs=2e-6)
    for one, other in zip(gradients, others, strict=True):
        assert toy.relative_error(one, other) < 2e-6


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["qwen2-eager", "qwen2-sdpa", "llama"])
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_all_of_them_together(kind, packing, loss_type, level, accumulation):
    compare(
        kind, packing=packing, loss_type=loss_type, importance_sampling_level=level, accumulation=accumulation,
        n_epochs=2, n_minibatches=2, ent_coef=0.01, clip_eps_high=0.28, sampler_correction="token_truncate",
    )  # fmt: skip


def test_tied_embeddings_have_one_gradient():
    module = toy.model(tied=True)
    algorithm = GRPO(module, group_size=3, max_new_tokens=LONGEST, kl_coef=0.0, max_grad_norm=None, batch_size=3)
    start, steps = toy.copied(module), toy.Steps(algorithm)
    policy = toy.differentiable(module)
    batch = groups(1.0, start)
    algorithm.update(batch)
    loss, _ = expected(batch, np.arange(9), None, policy, start, None, algorithm.config)
    loss.backward()
    assert toy.relative_error(steps.gradients[0], toy.gradient(policy)) < 2e-6


def test_equal_rewards_change_no_weights_without_kl():
    algorithm = GRPO(toy.model(), kl_coef=0.0, group_size=3, batch_size=3, max_new_tokens=LONGEST)
    batch = groups(1.0, toy.copied(algorithm.policy))
    equal = replace(batch, rewards=np.full(9, 0.1))
    before = algorithm.optimizer.flat.clone()
    metrics = algorithm.update(equal)
    assert float(metrics["grad_norm"]) == 0.0
    assert float(metrics["equal_groups"]) == 1.0
    assert torch.equal(before, algorithm.optimizer.flat)


def test_a_batch_of_masked_truncated_completions_changes_nothing():
    algorithm = GRPO(toy.model(), kl_coef=0.1, group_size=3, batch_size=3, mask_truncated=True, max_new_tokens=LONGEST)
    batch = groups(1.0, toy.copied(algorithm.policy))
    cut = replace(batch, ended=np.zeros(9, bool))
    before = algorithm.optimizer.flat.clone()
    metrics = algorithm.update(cut)
    assert float(metrics["truncated"]) == 1.0
    assert torch.equal(before, algorithm.optimizer.flat)


def test_a_batch_of_empty_completions_causes_no_error():
    algorithm = GRPO(toy.model(), group_size=2, batch_size=1, max_new_tokens=LONGEST)
    empty = np.empty(0, np.int64)
    batch = Groups(
        sequences=Sequences([[2, 3]] * 2, [empty, empty]), ids=[empty, empty], rewards=np.array([0.0, 1.0]), scores={},
        sampler_log_probs=np.empty(0, np.float32), ended=np.ones(2, bool),
    )  # fmt: skip
    before = algorithm.optimizer.flat.clone()
    assert float(algorithm.update(batch)["loss"]) == 0.0
    assert torch.equal(before, algorithm.optimizer.flat)


def test_the_gradient_is_clipped_to_its_norm():
    found = {}
    for most in (None, 1e-2):
        algorithm = GRPO(toy.model(), group_size=3, batch_size=3, max_grad_norm=most, max_new_tokens=LONGEST)
        metrics = algorithm.update(groups(1.0, toy.copied(algorithm.policy)))
        # Adam's first moment is a tenth of the gradient.
        moment = torch.from_numpy(algorithm.optimizer.state()["exp_avg"]).norm() * 10
        found[most] = float(metrics["grad_norm"]), float(moment)
    assert found[None][0] == found[1e-2][0] == pytest.approx(found[None][1], rel=1e-5)
    assert found[1e-2][1] == pytest.approx(1e-2, rel=1e-3)


def test_a_batch_contains_the_completions_and_rewards_of_its_prompts():
    seen = {}

    def reward(prompts, completions, extra):
        seen.update(prompts=prompts, completions=completions, extra=extra)
        return [float(len(c)) for c in completions]

    rows = [{"prompt": p, "extra": i} for i, p in enumerate(toy.PROMPTS)]
    algorithm = GRPO(
        toy.model(), reward_fn=reward, tokenizer=toy.tokenizer(), dataset=rows, group_size=2, batch_size=4,
        max_new_tokens=5,
    )  # fmt: skip
    batch, numbers = algorithm.sample(), algorithm.numbers(0)
    assert seen["prompts"] == [toy.PROMPTS[i] for i in numbers for _ in range(2)]
    assert seen["extra"] == [i for i in numbers for _ in range(2)]
    prompts = [algorithm.rows.prompts[i] for i in numbers]
    drawn = sample(algorithm.model, prompts, Settings(5), n=2, seed=algorithm.seed, step=0, numbers=numbers)
    whole, lengths = batch.sequences.padded_rows()
    for i, ids in enumerate(drawn.ids):
        assert whole[i, : lengths[i]].tolist() == [*prompts[i // 2], *ids]
        assert seen["completions"][i] == algorithm.model.decode(ids)
    assert batch.rewards.tolist() == [float(len(c)) for c in seen["completions"]]
    assert (batch.ended == drawn.ended).all()
    assert np.array_equal(batch.sampler_log_probs, np.concatenate(drawn.log_probs))


def test_every_row_comes_once_in_a_pass_and_passes_differ():
    algorithm = GRPO(toy.model(), tokenizer=toy.tokenizer(), dataset=toy.PROMPTS, batch_size=5, max_new_tokens=4)
    passes = [np.concatenate([algorithm.numbers(u) for u in range(4 * k, 4 * k + 4)]) for k in range(3)]
    for order in passes:
        assert sorted(order) == list(range(20))
    assert not np.array_equal(passes[0], passes[1])
    assert not np.array_equal(passes[1], passes[2])
    again = GRPO(toy.model(), tokenizer=toy.tokenizer(), dataset=toy.PROMPTS, batch_size=5, seed=7, max_new_tokens=4)
    assert not np.array_equal(np.concatenate([again.numbers(u) for u in range(4)]), passes[0])


def test_a_second_call_of_train_starts_a_new_pass_over_its_rows():
    """Three rows in batches of two: a pass takes two updates, whatever was trained before."""
    seen = []

    def reward(completions, prompts):
        seen.append({int(row[0]) for row in prompts})
        return [0.0] * len(completions)

    algorithm = GRPO(toy.model(), reward_fn=reward, batch_size=2, group_size=2, max_new_tokens=1)
    for _ in range(6):
        seen.clear()
        algorithm.train(torch.arange(2, 5)[:, None])
        assert len(seen) == 2
        assert set.union(*seen) == {2, 3, 4}


def test_passes_over_the_rows_of_the_constructor():
    settings = {"dataset": torch.arange(2, 5)[:, None], "batch_size": 2, "group_size": 2, "max_new_tokens": 1}
    algorithm = GRPO(toy.model(), reward_fn=lambda completions, prompts: [0.0] * len(completions), **settings)
    for done, first in ((3, 0), (5, 3)):
        algorithm.train(n_epochs=2 if done == 3 else 1)
        assert algorithm.counters.updates == done
        assert algorithm._order.first_update == first


def test_evaluation_scores_the_most_likely_completions():
    algorithm = GRPO(
        toy.model(), reward_fn=lambda prompts, completions: [float(len(c)) for c in completions],
        tokenizer=toy.tokenizer(), dataset=toy.PROMPTS, max_new_tokens=5,
    )  # fmt: skip
    greedy = [texts[0] for texts in algorithm.generate(toy.PROMPTS, temperature=0.0, max_new_tokens=5)]
    found = algorithm.scored()
    assert found.returns.tolist() == [float(len(text)) for text in greedy]
    assert algorithm.evaluate(temperature=0.0) == pytest.approx(np.mean(found.returns))
    drawn = algorithm.generate(toy.PROMPTS, n=3, max_new_tokens=5)
    assert algorithm.evaluate(n_samples=3) == pytest.approx(np.mean([len(text) for row in drawn for text in row]))


class TinyLM(nn.Module):
    """The module of the introduction's example: it has its own `generate`, which is not used."""

    def __init__(self, vocab_size=100, dim=32):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, dim)
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, x):
        return self.head(self.embed(x))

    def generate(self, prompts, max_new_tokens=8):
        tokens = prompts.clone()
        for _ in range(max_new_tokens):
            tokens = torch.cat([tokens, self.forward(tokens)[:, -1].argmax(-1, keepdim=True)], 1)
        return tokens


def test_the_introductions_example_runs_as_printed():
    def reward_fn(completions, prompts):
        return [1.0 if 42 in c.tolist() else 0.0 for c in completions]

    torch.manual_seed(0)
    model = TinyLM()
    ref_model = TinyLM()
    ref_model.load_state_dict(model.state_dict())
    for p in ref_model.parameters():
        p.requires_grad = False

    grpo = GRPO(model=model, ref_model=ref_model, reward_fn=reward_fn, group_size=4, kl_coef=0.1, max_new_tokens=8)
    prompts = torch.randint(0, 100, (4, 5))
    metrics = grpo.train(prompts, n_epochs=3)
    printed = f"Loss: {metrics['loss']:.4f}, Reward: {metrics['mean_reward']:.2f}, KL: {metrics['kl']:.4f}"
    assert printed.startswith("Loss: ")
    assert 0.0 <= metrics["mean_reward"] <= 1.0
    assert any(not torch.equal(p, ref_model.state_dict()[name]) for name, p in model.state_dict().items())


def test_the_custom_rewards_example_decodes_and_steps():
    tokenizer, expected_answer = toy.tokenizer(), "7"

    def correctness(completions: list[torch.Tensor], prompts: torch.Tensor) -> list[float]:
        texts = [tokenizer.decode(c.tolist(), skip_special_tokens=True) for c in completions]
        return [1.0 if expected_answer in text else 0.0 for text in texts]

    policy_model, ref_model = toy.model(), toy.model()
    grpo = GRPO(
        model=policy_model, ref_model=ref_model, reward_fn=correctness, group_size=4, kl_coef=0.1, max_new_tokens=32
    )
    prompt_batch = torch.randint(2, 24, (3, 4), generator=torch.Generator().manual_seed(0))
    metrics = grpo.train_step(prompt_batch)
    assert 0.0 < metrics["mean_reward"] < 1.0
    assert metrics["grad_norm"] > 0.0


def copied(prompts, completions):
    """Half the reward for the digit, half for stopping after it."""
    return [
        0.5 * (c[:1] == p[0]) + 0.5 * (1 - min(3, len(c) - 1) / 3) * (len(c) > 0)
        for p, c in zip(prompts, completions, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_it_learns_to_copy(seed):
    prompts = [f"{d}=" for d in range(3)]
    algorithm = GRPO(
        toy.model(seed=seed, hidden=64, scale=1.0), reward_fn=copied, tokenizer=toy.tokenizer(), dataset=prompts,
        group_size=16, batch_size=3, kl_coef=0.0, learning_rate=5e-3, max_new_tokens=4, seed=seed,
    )  # fmt: skip
    before = algorithm.evaluate(n_samples=16)
    algorithm.train(60)
    after = algorithm.evaluate(n_samples=16)
    assert before < 0.2
    assert after > 0.45


def test_a_prompt_that_comes_twice_in_an_update_is_completed_twice():
    algorithm = GRPO(toy.model(), reward_fn=lambda completions, prompts: [float(len(c)) for c in completions],
                     group_size=2, batch_size=4, max_new_tokens=6, kl_coef=0.0, seed=1)  # fmt: skip
    algorithm.use(torch.tensor([[3, 4], [5, 6]]))
    ids = [tuple(row.tolist()) for row in algorithm.sample().ids]
    assert len(ids) == 8
    assert len(set(ids)) > 6


def test_a_mask_drops_a_completion_whose_ratio_is_infinite():
    old, sampler = torch.tensor([100.0, 0.0, -1.0]), torch.zeros(3)
    owner = torch.tensor([0, 0, 1])
    for correction, expected in (("sequence_mask", [0.0, 0.0]), ("token_mask", [0.0, 1.0])):
        weights = sampler_weights(old, sampler, owner, 2, correction, 2.0)
        assert weights[:2].tolist() == expected
        assert float(weights[2]) == pytest.approx(math.exp(-1.0))


def test_passes_without_a_gradient_are_as_large_as_those_with_one():
    algorithm = GRPO(
        toy.model(), tokenizer=toy.tokenizer(), dataset=toy.PROMPTS, max_new_tokens=4, batch_size=4, group_size=4,
        n_minibatches=4, accumulation=2, reward_fn=lambda prompts, completions: [float(len(c)) for c in completions],
    )  # fmt: skip
    rows, score = [], LanguageModel.score

    def counted(model, layout, *more, **named):
        rows.append(len(layout.ids))
        return score(model, layout, *more, **named)

    batch = algorithm.sample()
    with mock.patch.object(LanguageModel, "score", counted):
        algorithm.update(batch)
    assert rows == [2] * 24  # of the policy before, of the reference, and with a gradient


def test_restricted_sampling_warns_that_ratios_are_those_of_the_whole_distribution():
    with pytest.warns(UserWarning, match="restrict what is sampled, not what is learned"):
        GRPO(toy.model(), top_p=0.9)
