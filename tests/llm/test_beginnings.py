"""Rows with a common prefix and caches with spare room affect only speed, not results."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import toy

from rlox.llm import sampling
from rlox.llm.models import language as models
from rlox.llm.models import rows
from rlox.llm.models.language import LanguageModel
from rlox.llm.tokens import Sequences

FAMILIES = ["qwen2-sdpa", "qwen2-eager", "llama-sdpa", "gpt2-sdpa", "gpt2-eager"]
PROMPTS = [[5, 6, 7, 8], [5, 6, 7], [5, 6, 9, 2, 3]]


def completions():
    rng = np.random.default_rng(0)
    return [rng.integers(0, 24, n) for n in (4, 1, 3, 2, 5, 0, 4, 4, 2)]


@pytest.mark.parametrize("kind", FAMILIES)
def test_sharing_a_prefix_gives_the_same_scores_and_gradient(kind, monkeypatch):
    model = LanguageModel(toy.model(kind))
    sequences = Sequences([p for p in PROMPTS for _ in range(3)], completions())
    found, read = [], []
    model.base.get_input_embeddings().register_forward_hook(lambda _, ids, __: read.append(tuple(ids[0].shape)))
    for worth in (np.inf, 1):
        monkeypatch.setattr(models, "_WORTH", worth)
        scores = model.score(model.layout(sequences))
        model.module.zero_grad()
        scores.log_probs.square().sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in model.module.parameters()])
        found.append((scores.log_probs.detach(), gradient))
    assert read == [(9, 8), (1, 2), (9, 6)]
    (log_probs, gradient), (same, alike) = found
    assert (log_probs - same).abs().max() < 2e-6
    assert (gradient - alike).abs().max() < 1e-5 * gradient.abs().max()


def test_rows_without_a_common_prefix_are_read_separately(monkeypatch):
    monkeypatch.setattr(models, "_WORTH", 1)
    model = LanguageModel(toy.model("qwen2"))
    layout = model.layout(Sequences([[2, 3], [3, 3], [4, 3]], [[5], [6], [7]]))
    assert model._beginnings(layout) is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_cache_with_room_draws_the_same_completions(kind, monkeypatch):
    model = LanguageModel(toy.model(kind))
    drawn = []
    for long in (1, 100):
        monkeypatch.setattr(rows, "LONG", long)
        drawn.append(sampling.sample(model, PROMPTS, sampling.Settings(max_new_tokens=20), n=6, seed=3))
    with_room, copied = drawn
    assert min(map(len, with_room.ids)) < 15  # some rows ended early
    for a, b, p, q in zip(with_room.ids, copied.ids, with_room.log_probs, copied.log_probs, strict=True):
        assert a.tolist() == b.tolist()
        assert np.abs(p - q).max() < 1e-5
