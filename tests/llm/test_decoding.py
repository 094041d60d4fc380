"""The native decoder: the logits of each supported model, and models that decode with their own module."""

from __future__ import annotations

import contextlib
import warnings

import numpy as np
import pytest
import torch
import toy
from families import KINDS, made
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM, Qwen2MLP

from rlox.llm.models.adapters import with_adapters
from rlox.llm.models.decoding import Native, decodes
from rlox.llm.models.language import LanguageModel
from rlox.llm.sampling import Settings, sample
from rlox.llm.tokens import pad_left

PROMPTS = [[5, 6, 7, 2], [3], [9, 8], [4, 4, 4, 4, 4, 4], [11, 3]]


def drawn(model, **settings):
    return sample(model, PROMPTS, Settings(8, **settings), n=3, seed=5)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_logits_equal_those_of_the_module(kind):
    """After prompts of unequal lengths, while rows are removed."""
    model = LanguageModel(made(kind), None, toy.EOS)
    n, room = 2, 20
    assert decodes(model, 6 + room)
    ids, mask = pad_left(PROMPTS, model.pad)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    read = model.module(input_ids=ids, attention_mask=mask, position_ids=places, use_cache=True, logits_to_keep=1)
    native = Native(model, ids, mask, getattr(read, model.cache_name), n, room)
    assert (native.again() - read.logits[:, -1]).abs().max() < 1e-5 * read.logits.abs().max()
    rows, written = torch.arange(10), [list(PROMPTS[i // n]) for i in range(10)]
    for t in range(room):
        tokens = torch.from_numpy(np.random.default_rng(t).integers(0, 24, len(rows)))
        got = native.next(tokens)
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            written[row].append(token)
        if t % 6 == 5:
            for k, row in enumerate(rows.tolist()):
                expected = model.module(torch.tensor([written[row]])).logits[0, -1]
                assert (got[k] - expected).abs().max() < 2e-5 * expected.abs().max()
            kept = torch.tensor([k for k in range(len(rows)) if k % 4 != 1])
            native.keep(kept)
            rows = rows[kept]


@pytest.mark.parametrize("kind", KINDS)
def test_completions_equal_those_of_the_module(kind):
    model = LanguageModel(made(kind), None, toy.EOS)
    natively = drawn(model)
    model.native = False
    assert not decodes(model, 8)
    by_module = drawn(model)
    for one, other in zip(natively.ids, by_module.ids, strict=True):
        assert one.tolist() == other.tolist()
    gaps = np.concatenate(natively.log_probs) - np.concatenate(by_module.log_probs)
    assert 0 < np.abs(gaps).max() < 2e-5
    assert len({len(ids) for ids in natively.ids}) > 1


def hooked(module):
    module.model.layers[1].mlp.register_forward_hook(lambda part, given, found: 2 * found)


def hooked_before(module):
    module.model.norm.register_forward_pre_hook(lambda part, given: (2 * given[0],))


def replaced(module):
    mlp = module.model.layers[0].mlp
    mlp.forward = lambda x: 2 * Qwen2MLP.forward(mlp, x)


def rescaled(module):
    module.model.layers[0].self_attn.scaling = 1.0


def other_eps(module):
    module.model.norm.variance_epsilon = 0.1


def other_part(module):
    module.model.layers[0].mlp.act_fn = torch.nn.GELU()


def doubled(module):
    module.double()


def transposed(module):
    weight = module.lm_head.weight
    weight.data = weight.data.T.contiguous().T


CHANGES = [hooked, hooked_before, replaced, rescaled, other_eps, other_part, doubled, transposed]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_model_decodes_with_its_module(change):
    """Without a warning, and with the change."""
    module = made()
    change(module)
    model = LanguageModel(module, None, toy.EOS)
    assert not decodes(model, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = drawn(model, temperature=0.0)
    for i, prompt in enumerate(PROMPTS):
        row = list(prompt)
        for token in found.ids[3 * i]:
            with torch.no_grad():
                assert int(module(torch.tensor([row])).logits[0, -1].argmax()) == token
            row.append(int(token))


class Inherited(Qwen2ForCausalLM):
    """A custom class."""


@pytest.mark.parametrize(
    "module",
    [
        lambda: made(sliding_window=8, use_sliding_window=True, max_window_layers=0),
        lambda: made("mistral", sliding_window=8),
        lambda: made("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        lambda: made(hidden_size=1040, num_hidden_layers=1),
        lambda: made(hidden_act="gelu"),
        lambda: Inherited(made().config),
        lambda: toy.model("gpt2"),
        lambda: toy.model("bare"),
    ],
    ids=["window", "window of mistral", "angles of the length", "wide", "gelu", "class", "gpt2", "bare"],
)
def test_an_unsupported_model_decodes_with_its_module(module):
    assert not decodes(LanguageModel(module(), None, toy.EOS), 9)


def test_a_window_that_no_row_reaches_has_no_effect():
    model = LanguageModel(made("mistral", sliding_window=14), None, toy.EOS)
    assert decodes(model, 14)
    assert not decodes(model, 15)
    natively = drawn(model)
    model.native = False
    assert [ids.tolist() for ids in natively.ids] == [ids.tolist() for ids in drawn(model).ids]


@pytest.mark.slow
def test_models_with_adapters_decode_with_their_module():
    assert not decodes(with_adapters(LanguageModel(made()), 2, 4.0, None, 0), 9)


def test_with_threads_autocast_or_global_hooks_the_module_decodes():
    model = LanguageModel(made(), None, toy.EOS)
    assert decodes(model, 9)
    torch.set_num_threads(2)
    assert not decodes(model, 9)
    torch.set_num_threads(1)
    with torch.autocast("cpu", torch.bfloat16):
        assert not decodes(model, 9)
    with contextlib.closing(torch.nn.modules.module.register_module_forward_hook(lambda *_: None)) as hook:
        hook.close = hook.remove
        assert not decodes(model, 9)
    assert decodes(model, 9)


def test_a_class_that_was_changed_is_noticed_once(monkeypatch):
    """Only the comparison of logits finds the change; the instance itself looks unchanged."""
    model = LanguageModel(made(), None, toy.EOS, "GRPO")
    forward = Qwen2MLP.forward
    monkeypatch.setattr(Qwen2MLP, "forward", lambda part, x: 1.01 * forward(part, x))
    with pytest.warns(UserWarning, match="GRPO: the native decoder disagrees with Qwen2ForCausalLM"):
        found = drawn(model)
    assert not model.native
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = drawn(model)
    assert [ids.tolist() for ids in found.ids] == [ids.tolist() for ids in again.ids]


def test_changed_weights_are_read_again():
    model = LanguageModel(made(), None, toy.EOS)
    drawn(model)
    with torch.no_grad():
        model.module.lm_head.weight.neg_()
    natively = drawn(model)
    assert model.native
    model.native = False
    assert [ids.tolist() for ids in natively.ids] == [ids.tolist() for ids in drawn(model).ids]
