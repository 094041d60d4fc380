"""Completions follow the requested distribution, each with its own random numbers, whatever else is in the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import toy
import transformers
from scipy import stats
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rlox.algorithms import GRPO
from rlox.llm import sampling
from rlox.llm.models.language import LanguageModel
from rlox.llm.sampling import Settings, completion_noise, restrict_logits, sample, unique_numbers
from rlox.llm.tokens import Sequences

RESTRICTIONS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.15},
    {"temperature": 1.3, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
]
PROMPTS = [[5, 6, 7, 2], [3], [9, 8], [4, 4, 4, 4, 4, 4], [11, 3]]
KINDS = ["bare", "qwen2-sdpa", "qwen2-eager", "llama", "gpt2"]


def processed(logits, settings):
    """Process logits as transformers does."""
    steps = [TemperatureLogitsWarper(float(settings.get("temperature", 1.0)))]
    for name, kind in (("top_k", TopKLogitsWarper), ("top_p", TopPLogitsWarper), ("min_p", MinPLogitsWarper)):
        if name in settings:
            steps.append(kind(settings[name]))
    return LogitsProcessorList(steps)(torch.zeros(len(logits), 1, dtype=torch.int64), logits)


@pytest.mark.parametrize("settings", RESTRICTIONS, ids=str)
def test_restrictions_equal_those_of_transformers(settings):
    logits = torch.from_numpy(3 * toy.randoms(0, 300, 24)).float()
    ours, theirs = restrict_logits(logits, Settings(**settings)), processed(logits, settings)
    assert torch.equal(ours.isinf(), theirs.isinf())
    assert torch.allclose(ours.softmax(-1), theirs.softmax(-1), atol=1e-7)


@pytest.mark.parametrize("settings", RESTRICTIONS, ids=str)
def test_tokens_have_the_distribution(settings):
    logits = torch.from_numpy(1.5 * toy.randoms(1, 1, 24)).float()
    n = 6000
    drawn = sample(LanguageModel(toy.Always(logits[0])), [[1]], Settings(1, **settings), n=n, seed=3)
    counts = np.bincount(np.concatenate(drawn.ids), minlength=24)
    probs = processed(logits, settings)[0].double().softmax(-1).numpy()
    assert counts[probs == 0].sum() == 0
    likely = probs > 0
    if likely.sum() > 1:
        assert stats.chisquare(counts[likely], n * probs[likely] / probs[likely].sum()).pvalue > 1e-3
    output = np.concatenate(drawn.log_probs)
    assert np.allclose(output, np.log(probs[np.concatenate(drawn.ids)]), atol=2e-6)


def test_tokens_are_independent_of_the_next_token_and_sample():
    model = LanguageModel(toy.Always(np.zeros(4)))
    ids = np.stack(sample(model, [[1]], Settings(2), n=4000, seed=1).ids)
    for one, other in ((ids[:, 0], ids[:, 1]), (ids[:-1, 0], ids[1:, 0])):
        table = np.zeros((4, 4))
        np.add.at(table, (one, other), 1)
        assert stats.chi2_contingency(table).pvalue > 1e-3


def test_numbers_are_above_0_and_differ_with_seed_step_prompt_and_sample():
    noise = completion_noise(1, 2, [3, 4], 2, 50)
    assert noise.min() > 0
    assert noise.max() <= 1
    others = [
        completion_noise(2, 2, [3, 4], 2, 50),
        completion_noise(1, 3, [3, 4], 2, 50),
        completion_noise(1, 2, [5, 6], 2, 50),
    ]
    often = unique_numbers([3] * 1000)
    others += [completion_noise(1, 2, often[1:], 1, 50), completion_noise(1, 2, [*often[1:] << 12], 1, 50)]
    rows = np.concatenate([noise, *others])
    assert len({row.tobytes() for row in rows}) == len(rows)
    # The numbers do not depend on how many are drawn, or on the other prompts.
    assert np.array_equal(completion_noise(1, 2, [4, 9], 3, 20)[:2], noise[2:, :20])


def test_at_most_as_many_completions_as_an_update_has_are_sampled_at_once(monkeypatch):
    sizes = []

    def counted(model, prompts, settings, *, n, **more):
        sizes.append((len(prompts), n))
        return sample(model, prompts, settings, n=n, **more)

    monkeypatch.setattr(sampling, "sample", counted)
    more = {"tokenizer": toy.tokenizer(), "max_new_tokens": 4, "kl_coef": 0.0}
    algorithm = GRPO(toy.model(), reward_fn=lambda completions, prompts: [float(len(c)) for c in completions], **more)
    rows = [f"{i % 10}{i // 10}+" for i in range(100)]
    whole = algorithm.generate(rows, n=3, seed=1)
    assert sizes == [(21, 3)] * 4 + [(16, 3)]
    alone = algorithm.generate(rows[40:], n=3, seed=1)
    assert [len(texts) for texts in whole] == [3] * 100
    numbered = algorithm.complete(algorithm._encode(rows[40:]).prompts, range(40, 100), 3, 0, algorithm.settings(), 1)
    texts = [algorithm.model.decode(ids) for ids in numbered.ids]
    assert [texts[3 * i : 3 * i + 3] for i in range(60)] == whole[40:]
    assert alone != whole[40:]  # the numbers of the rows choose the random numbers
    sizes.clear()
    algorithm.evaluate(rows)
    assert sizes == [(64, 1), (36, 1)]
    sizes.clear()
    GRPO(toy.model(), batch_size=20, group_size=4, **more).generate(rows)
    assert sizes == [(80, 1), (20, 1)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_completion_does_not_depend_on_the_batch(kind):
    model, settings = LanguageModel(toy.model(kind), None, toy.EOS), Settings(8, temperature=1.3)
    whole = sample(model, PROMPTS, settings, n=3, seed=5, step=2)
    lengths = {len(ids) for ids in whole.ids}
    assert min(lengths) < max(lengths) == 8
    for i, prompt in enumerate(PROMPTS):
        alone = sample(model, [prompt], settings, n=3, seed=5, step=2, numbers=[i])
        single = sample(model, [prompt], settings, n=1, seed=5, step=2, numbers=[i])
        for j in range(3):
            assert whole.ids[3 * i + j].tolist() == alone.ids[j].tolist()
            assert np.allclose(whole.log_probs[3 * i + j], alone.log_probs[j], atol=2e-6)
        assert single.ids[0].tolist() == alone.ids[0].tolist()
    backwards = sample(model, PROMPTS[::-1], settings, n=3, seed=5, step=2, numbers=range(4, -1, -1))
    for i in range(5):
        for j in range(3):
            assert backwards.ids[3 * (4 - i) + j].tolist() == whole.ids[3 * i + j].tolist()
    assert backwards.ended.reshape(5, 3)[::-1].tolist() == whole.ended.reshape(5, 3).tolist()


@pytest.mark.parametrize("changed", [{"seed": 6}, {"step": 3}, {"numbers": [7, 8, 9, 10, 11]}], ids=str)
def test_seed_step_and_number_determine_a_completion(changed):
    model = LanguageModel(toy.model("bare"))
    one, other = (sample(model, PROMPTS, Settings(8), **{"seed": 5, "step": 2, **more}) for more in ({}, changed))
    assert all(not np.array_equal(a, b) for a, b in zip(one.ids, other.ids, strict=True))


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.4])
@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_equal_those_of_a_scoring_pass(kind, temperature):
    model = LanguageModel(toy.model(kind), None, toy.EOS)
    drawn = sample(model, PROMPTS, Settings(8, temperature=temperature), n=3, seed=5)
    sequences = Sequences([p for p in PROMPTS for _ in range(3)], drawn.ids)
    with torch.no_grad():
        scored = model.score(model.layout(sequences), temperature).log_probs
    assert np.abs(scored.numpy() - np.concatenate(drawn.log_probs)).max() < 2e-6


@pytest.mark.parametrize("kind", ["bare", "qwen2"])
def test_a_completion_ends_with_the_first_token_that_ends_it(kind):
    model = LanguageModel(toy.model(kind, scale=1.0), None, [1, 7])
    drawn = sample(model, PROMPTS, Settings(12, stop=(3,)), n=20, seed=0)
    ends = {1, 3, 7}
    assert {int(ids[-1]) for ids, ended in zip(drawn.ids, drawn.ended, strict=True) if ended} == ends
    for ids, log_probs, ended in zip(drawn.ids, drawn.log_probs, drawn.ended, strict=True):
        assert not ends & {*ids[:-1].tolist()}
        assert ended == (int(ids[-1]) in ends)
        assert ended or len(ids) == 12
        assert len(log_probs) == len(ids)
    assert 0 < drawn.ended.mean() < 1


def test_without_an_end_completions_have_the_maximum_length():
    drawn = sample(LanguageModel(toy.model("bare")), PROMPTS, Settings(6))
    assert [len(ids) for ids in drawn.ids] == [6] * 5
    assert not drawn.ended.any()


@pytest.mark.parametrize("kind", ["bare", "qwen2"])
def test_ended_completions_leave_the_batch(kind):
    module, rows = toy.model(kind, scale=1.0), []
    forward = module.forward

    def watched(ids=None, *args, input_ids=None, **named):
        given = ids if input_ids is None else input_ids
        rows.append(len(given))
        return forward(given, *args, **named)

    model = LanguageModel(module, None, [1, 2, 3, 4, 5])
    sample(model, PROMPTS, Settings(1))  # the first sample also tries the cache
    module.forward = watched
    drawn = sample(model, PROMPTS, Settings(12), n=8, seed=0)
    longest = max(map(len, drawn.ids))
    # The first pass reads the prompts; with a cache, each of them once.
    going = [sum(len(ids) > t for ids in drawn.ids) for t in range(longest)]
    assert len(rows) == longest
    assert rows[-1] < 20
    assert all(needed <= there <= 4 * needed / 3 + 1 for there, needed in zip(rows[1:], going[1:], strict=True))


@pytest.mark.parametrize("kind", ["qwen2-sdpa", "qwen2-eager", "llama", "gpt2"])
def test_temperature_0_equals_generate_of_transformers(kind):
    module = toy.model(kind)
    model = LanguageModel(module, toy.tokenizer())
    drawn = sample(model, PROMPTS, Settings(8, temperature=0.0), n=2)
    for i, prompt in enumerate(PROMPTS):
        theirs = module.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, pad_token_id=0)
        assert drawn.ids[2 * i].tolist() == theirs[0, len(prompt) :].tolist()
        assert drawn.ids[2 * i + 1].tolist() == drawn.ids[2 * i].tolist()


def test_a_custom_module_takes_the_most_likely_token_at_temperature_0():
    module = toy.model("bare")
    drawn = sample(LanguageModel(module), PROMPTS, Settings(6, temperature=0.0))
    for prompt, ids in zip(PROMPTS, drawn.ids, strict=True):
        row = list(prompt)
        for token in ids:
            assert int(module(torch.tensor([row]))[0, -1].argmax()) == token
            row.append(int(token))


def test_rounding_of_sums_never_selects_a_token_of_probability_0():
    """With random numbers of exactly 1, the largest possible."""
    from rlox.llm.sampling import pick

    logits = torch.full((5, 7), -torch.inf)
    logits[:, 2:4] = torch.tensor([0.3, 1.0])
    for number in (1e-300, 1.0):
        tokens, _ = pick(logits, torch.full((5,), number, dtype=torch.float64), Settings())
        assert set(tokens.tolist()) == {2 if number < 0.5 else 3}


def test_sampling_does_not_change_the_state_of_a_model():
    module = toy.model("qwen2")
    before = {name: x.clone() for name, x in module.state_dict().items()}
    state = torch.get_rng_state()
    sample(LanguageModel(module, toy.tokenizer()), PROMPTS, Settings(4), n=2)
    assert all(torch.equal(x, before[name]) for name, x in module.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in module.parameters())


UNUSUAL = {
    "mamba": ("MambaConfig", {"state_size": 4}),
    "lfm2": ("Lfm2Config", {"num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]}),
    "rwkv": ("RwkvConfig", {"attention_hidden_size": 16, "context_length": 64}),
    "roberta": ("RobertaConfig", {"is_decoder": True, "max_position_embeddings": 64}),
}


@pytest.mark.parametrize("kind", UNUSUAL)
def test_models_whose_cache_cannot_be_repeated_are_sampled_from_whole_rows(kind):
    """Recurrent states cannot be repeated; RWKV returns no cache, and RoBERTa counts positions from 2."""
    name, options = UNUSUAL[kind]
    shape = {"vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "pad_token_id": 0}
    config = getattr(transformers, name)(**shape, intermediate_size=32, bos_token_id=1, eos_token_id=1, **options)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(4 if p.ndim > 1 else 1)
    prompts = [[5, 6, 7, 3], [3], [7, 8, 9, 4, 2, 11]]
    model = LanguageModel(module)
    with pytest.warns(UserWarning, match="completions are sampled without it"):
        drawn = sample(model, prompts, Settings(max_new_tokens=9), n=2)
    assert max(map(len, drawn.ids)) == 9
    with torch.no_grad():
        for i, (ids, log_probs) in enumerate(zip(drawn.ids, drawn.log_probs, strict=True)):
            prompt = prompts[i // 2]
            logits = module(input_ids=torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1)[torch.arange(len(ids)), torch.from_numpy(ids)]
            np.testing.assert_allclose(log_probs, expected, atol=1e-4)
