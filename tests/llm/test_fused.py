"""Norms and gates computed by kernels: scores and gradients equal PyTorch's, and the model is left unchanged."""

from __future__ import annotations

import pytest
import torch
import toy
from families import KINDS, made
from torch import nn
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from rlox.llm.models.adapters import with_adapters
from rlox.llm.models.fused import fuse_parts
from rlox.llm.models.language import LanguageModel
from rlox.llm.tokens import Sequences

SEQUENCES = Sequences([[5, 6], [3], [7, 8, 9, 4, 2], [2, 2]], [[4, 5, 1], [6, 1, 7, 8, 0, 0, 3], [9], [1, 1]])


def replaced(module):
    """The classes of the parts of `module` that are replaced during a pass."""
    with fuse_parts(module, module.config):
        return sorted(type(part).__name__ for part in module.modules() if "forward" in part.__dict__)


def scored(module, weights):
    """Scores of a model, and the gradient of their weighted sum."""
    model = LanguageModel(module)
    scores = model.score(model.layout(SEQUENCES))
    (scores.log_probs * weights).sum().backward()
    return scores.log_probs.detach(), toy.gradient(module)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_and_gradients_equal_pytorchs_in_float64(kind):
    module = made(kind)
    double = toy.differentiable(module)
    weights = torch.from_numpy(toy.randoms(0, int(SEQUENCES.n_scored.sum())))
    (scores, gradient), (expected, right) = scored(module, weights), scored(double, weights)
    assert (scores - expected).abs().max() < 2e-5
    assert toy.relative_error(gradient, right) < 2e-5
    names, prefix = replaced(module), type(module).__name__.removesuffix("ForCausalLM")
    assert set(names) == {f"{prefix}RMSNorm", f"{prefix}MLP"}
    assert len(names) == (11 if prefix == "Qwen3" else 7)
    assert replaced(double) == [f"{prefix}MLP"] * 2  # whether the kernel runs depends on the input


def test_a_model_is_restored_also_after_an_error():
    module = made()
    with pytest.raises(RuntimeError, match="stop"), fuse_parts(module, module.config):
        raise RuntimeError("stop")
    assert not any("forward" in part.__dict__ for part in module.modules())


@pytest.mark.parametrize("where", ["hook", "forward", "class", "activation"])
def test_changed_parts_are_not_replaced(where, monkeypatch):
    module = made()
    norm, mlp = module.model.norm, module.model.layers[0].mlp
    if where == "hook":
        norm.register_forward_hook(lambda part, given, found: 2 * found)
    elif where == "forward":
        norm.forward = lambda x: 2 * Qwen2RMSNorm.forward(norm, x)
    elif where == "class":
        forward = Qwen2RMSNorm.forward
        monkeypatch.setattr(Qwen2RMSNorm, "forward", lambda part, x: 2 * forward(part, x))
    else:
        mlp.act_fn = nn.GELU()
    own = dict(norm.__dict__)
    names = replaced(module)
    assert names.count("Qwen2RMSNorm") == {"hook": 4, "forward": 5, "class": 0, "activation": 5}[where]
    assert names.count("Qwen2MLP") == (1 if where == "activation" else 2)
    assert own == norm.__dict__
    model = LanguageModel(module)
    with torch.no_grad():
        found = model.score(model.layout(SEQUENCES)).log_probs
        model.native = False
        model.checkpointed = True  # no part is replaced
        assert (found - model.score(model.layout(SEQUENCES)).log_probs).abs().max() < 2e-5


def test_nothing_is_replaced_in_a_second_thread_or_with_autocast():
    module = made()
    torch.set_num_threads(2)
    assert replaced(module) == []
    torch.set_num_threads(1)
    with torch.autocast("cpu", torch.bfloat16):
        assert replaced(module) == []
    assert len(replaced(module)) == 7
    assert replaced(toy.model("gpt2")) == []


@pytest.mark.slow
def test_adapters_get_the_same_gradient():
    model = with_adapters(LanguageModel(made()), 2, 4.0, None, 0)
    with torch.no_grad():
        for p in model.module.parameters():
            if p.requires_grad:
                p.normal_(0.0, 0.3)
    double = toy.differentiable(model.module)
    weights = torch.from_numpy(toy.randoms(0, int(SEQUENCES.n_scored.sum())))
    (scores, gradient), (expected, right) = scored(model.module, weights), scored(double, weights)
    assert (scores - expected).abs().max() < 2e-5
    assert toy.relative_error(gradient, right) < 2e-5
