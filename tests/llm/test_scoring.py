"""Log-probabilities and entropies of tokens in every layout of rows, against each sequence by itself."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import toy
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from rlox.algorithms import SFT
from rlox.llm.models import token_scores
from rlox.llm.models.language import LanguageModel
from rlox.llm.tokens import Sequences

FAMILIES = ["qwen2-sdpa", "qwen2-eager", "llama-sdpa", "llama-eager", "gpt2-sdpa", "gpt2-eager"]
PROMPTS = [[5, 6], [3], [7, 8, 9, 4, 2], [2, 2], [23]]
COMPLETIONS = [[4, 5, 1], [], [6, 1, 7, 8, 0, 0, 3], [9], [1, 1]]


def random_sequences(seed, n=12):
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 24, rng.integers(1, 9)) for _ in range(n)]
    completions = [rng.integers(0, 24, rng.integers(0, 9)) for _ in range(n)]
    return prompts, completions


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("longest", [None, 1, 12, 40], ids=lambda n: "padded" if n is None else f"packed-{n}")
@pytest.mark.parametrize("kind", FAMILIES)
def test_each_layout_gives_the_scores_of_single_sequences(kind, longest, temperature):
    module = toy.model(kind)
    model, double = LanguageModel(module), toy.copied(module)
    layout = model.layout(Sequences(PROMPTS, COMPLETIONS), longest)
    with torch.no_grad():
        scores = model.score(layout, temperature, entropy=True)
    alone = [toy.token_log_probs(double, p, c, temperature) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    assert (scores.log_probs - torch.cat([a for a, _ in alone])).abs().max() < 1e-5
    assert (scores.entropies - torch.cat([b for _, b in alone])).abs().max() < 1e-5
    if longest == 40:
        assert len(layout.ids) == 1


@pytest.mark.parametrize("kind", FAMILIES)
def test_packed_and_padded_differ_only_by_rounding(kind):
    model = LanguageModel(toy.model(kind, scale=2.0))
    for seed in range(3):
        sequences = Sequences(*random_sequences(seed))
        with torch.no_grad():
            padded, packed = (model.score(model.layout(sequences, n), 1.0, True) for n in (None, 20))
        assert (padded.log_probs - packed.log_probs).abs().max() < 2e-6
        assert (padded.entropies - packed.entropies).abs().max() < 2e-6


@pytest.mark.parametrize("kind", ["bare", "qwen2"])
def test_scores_of_a_subset_equal_those_among_all_sequences(kind):
    model, whole = LanguageModel(toy.model(kind)), Sequences(*random_sequences(4))
    with torch.no_grad():
        expected = model.score(model.layout(whole)).log_probs
        for rows in (np.array([3]), np.array([11, 0, 5]), np.arange(12)[::-1], np.arange(12)):
            part, tokens = whole.take(rows)
            assert (model.score(model.layout(part)).log_probs - expected[tokens]).abs().max() < 2e-6
            assert part.n_scored.tolist() == whole.n_scored[rows].tolist()


@pytest.mark.parametrize("longest", [None, 1, 8])
def test_sequences_of_a_single_token_have_nothing_to_score(longest):
    model = LanguageModel(toy.model())
    scores = model.score(model.layout(Sequences([[3]], [[]]), longest), entropy=True)
    assert scores.log_probs.shape == scores.entropies.shape == (0,)
    scores.log_probs.sum().backward()
    several = Sequences([[3], [4], [5]], [[], [6, 7], []])
    alone = toy.token_log_probs(toy.copied(model.module), [4], [6, 7])[0]
    assert torch.allclose(model.score(model.layout(several, longest)).log_probs.double(), alone, atol=1e-5)


@pytest.mark.parametrize("longest", [None, 40])
def test_only_marked_tokens_are_scored(longest):
    model = LanguageModel(toy.model())
    marks = [[True, False, True], [], [False, False, True, True, False, False, True], [False], [True, True]]
    with torch.no_grad():
        every = model.score(model.layout(Sequences(PROMPTS, COMPLETIONS), longest)).log_probs
        some = model.score(model.layout(Sequences(PROMPTS, COMPLETIONS, marks), longest)).log_probs
    assert torch.allclose(some, every[torch.tensor([m for row in marks for m in row])], atol=2e-6)


@pytest.mark.parametrize("accumulation", [1, 3, 5])
def test_constant_log_probs_come_in_the_order_of_the_sequences(accumulation):
    algorithm = SFT(toy.model(), accumulation=accumulation, batch_size=5)
    found = algorithm.log_probs(Sequences(PROMPTS, COMPLETIONS))
    pairs = zip(PROMPTS, COMPLETIONS, strict=True)
    alone = torch.cat([toy.token_log_probs(toy.copied(algorithm.policy), p, c)[0] for p, c in pairs])
    assert (found - alone).abs().max() < 1e-5
    assert not found.requires_grad


@pytest.mark.parametrize("lora", [None, 2])
@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_gradient_checkpointing_gives_the_same_gradient(kind, lora):
    gradients = []
    for twice in (False, True):
        module = toy.model(kind, scale=2.0)
        algorithm = SFT(module, gradient_checkpointing=twice, lora_rank=lora, max_grad_norm=None, batch_size=5)
        calls = []
        part = module.transformer.h[0].attn if kind == "gpt2" else module.model.layers[0].self_attn
        part.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        steps = toy.Steps(algorithm)
        algorithm.update(Sequences(PROMPTS, COMPLETIONS))
        assert len(calls) == 1 + twice
        assert not module.training
        gradients.append(steps.gradients[0])
    assert gradients[0].norm() > 1e-3
    assert toy.relative_error(*gradients) < 2e-6


OLDER = {
    "falcon": ("FalconConfig", {"hidden_dropout": 0.5, "attention_dropout": 0.5}),
    "biogpt": ("BioGptConfig", {"hidden_dropout_prob": 0.5, "activation_dropout": 0.5, "layerdrop": 0.5}),
    "xglm": (
        "XGLMConfig",
        {"d_model": 16, "num_layers": 2, "attention_heads": 2, "ffn_dim": 32, "activation_dropout": 0.5},
    ),
}


@pytest.mark.parametrize("kind", OLDER)
def test_dropout_of_functions_is_off_too(kind):
    """These models read its probability from their configuration, in their own and their layers' forward."""
    name, options = OLDER[kind]
    shape = {"vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = getattr(transformers, name)(
        **{**shape, **options, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = transformers.AutoModelForCausalLM.from_config(config)
    sequences, gradients = Sequences(PROMPTS, COMPLETIONS), []
    for twice in (False, True):
        algorithm = SFT(copy.deepcopy(module), gradient_checkpointing=twice, max_grad_norm=None, batch_size=5)
        algorithm.policy.train()  # as in a hand-written loop
        steps = toy.Steps(algorithm)
        algorithm.update(sequences)
        gradients.append(steps.gradients[0])
    assert gradients[0].norm() > 1e-3
    assert toy.relative_error(*gradients) < 2e-6


def test_dropout_is_off_in_all_passes():
    module = toy.model("gpt2")
    for part in module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.5
    module.train()
    algorithm = SFT(module, gradient_checkpointing=True, batch_size=5)
    sequences = Sequences(PROMPTS, COMPLETIONS)
    first, again = (algorithm.score(sequences).log_probs.detach() for _ in range(2))
    assert torch.equal(first, again)
    assert (first - algorithm.log_probs(sequences)).abs().max() < 2e-6


def test_half_precision_is_close_and_keeps_weights_in_float32():
    algorithm = SFT(toy.model(scale=1.0), precision="bfloat16", batch_size=5)
    plain = SFT(toy.model(scale=1.0), batch_size=5)
    sequences = Sequences(PROMPTS, COMPLETIONS)
    near, exact = algorithm.log_probs(sequences), plain.log_probs(sequences)
    assert near.dtype == torch.float32
    assert 0 < (near - exact).abs().max() < 0.05
    algorithm.update(sequences)
    assert {p.dtype for p in algorithm.policy.parameters()} == {torch.float32}


def test_a_model_in_half_precision_is_trained_in_float32():
    algorithm = SFT(toy.model().to(torch.bfloat16), batch_size=5)
    assert {p.dtype for p in algorithm.policy.parameters()} == {torch.float32}
    before = algorithm.optimizer.flat.clone()
    algorithm.update(Sequences(PROMPTS, COMPLETIONS))
    assert not torch.equal(before, algorithm.optimizer.flat)


def test_adapters_on_a_model_in_half_precision_are_trained_in_float32():
    module = toy.model().to(torch.bfloat16)
    algorithm = SFT(module, batch_size=5, lora_rank=2)
    assert {p.dtype for p in algorithm.policy.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in algorithm.policy.parameters() if not p.requires_grad} == {torch.bfloat16}
    algorithm.update(Sequences(PROMPTS, COMPLETIONS))
    assert algorithm.generate([[2, 3]], max_new_tokens=2)


def test_a_token_of_probability_0_has_log_probability_minus_infinity_and_finite_entropy():
    logits = np.zeros(24)
    logits[5] = -np.inf
    model = LanguageModel(toy.Always(logits))
    scores = model.score(model.layout(Sequences([[1]], [[2, 5]])), 1.0, entropy=True)
    assert scores.log_probs.tolist() == pytest.approx([-np.log(23), -np.inf])
    assert scores.entropies.tolist() == pytest.approx([np.log(23)] * 2)


def test_adapters_are_disabled_only_for_the_reference():
    from rlox.algorithms import DPO

    plain = toy.model(scale=1.0)
    algorithm = DPO(copy.deepcopy(plain), tokenizer=toy.tokenizer(), dataset=toy.PAIRS, lora_rank=2, learning_rate=1e-2)
    sequences = Sequences(PROMPTS, COMPLETIONS)
    before = SFT(plain, batch_size=5).log_probs(sequences)
    assert torch.equal(algorithm.log_probs(sequences), before)
    algorithm.train(3)
    assert torch.equal(algorithm.log_probs(sequences, reference=True), before)
    assert (algorithm.log_probs(sequences) - before).abs().max() > 1e-3


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("longest", [None, 12])
def test_the_kernels_scores_and_gradients_equal_pytorchs(longest, temperature):
    """The kernel scores in float32; PyTorch scores in float64 and when the entropy is differentiated. Some tokens are
    read and not scored."""
    marks = [[True, False, True], [], [False, False, True, True, False, False, True], [False], [True, True]]
    module = toy.model("qwen2")
    double = toy.differentiable(module)
    sequences = Sequences(PROMPTS, COMPLETIONS, marks)
    weights = torch.from_numpy(toy.randoms(0, int(sequences.n_scored.sum())))
    found, gradients = [], []
    for each in (module, double):
        model = LanguageModel(each)
        scores = model.score(model.layout(sequences, longest), temperature, entropy=True)
        assert not scores.entropies.requires_grad
        (scores.log_probs * weights).sum().backward()
        found.append(scores)
        gradients.append(toy.gradient(each))
    for got, expected in zip(*found, strict=True):
        assert (got - expected).abs().max() < 1e-5
    assert toy.relative_error(*gradients) < 1e-5
    model = LanguageModel(module)
    derived = model.score(model.layout(sequences, longest), temperature, entropy=True, entropy_gradient=True)
    assert derived.entropies.requires_grad
    for got, expected in zip(found[0], derived, strict=True):
        assert (got - expected).abs().max() < 5e-6


class Storages(TorchDispatchMode):
    """Keeps what operations return in new storages of more than `most` numbers, and the names of these operations."""

    def __init__(self, most):
        super().__init__()
        self.most, self.kept = most, {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.numel() > self.most:
            self.kept.setdefault(result.untyped_storage().data_ptr(), (result, function.__name__))
        return result


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_scores_by_pytorch_equal_autograd_and_keep_no_copy_of_the_logits(
    temperature, dtype, entropy_gradient, monkeypatch
):
    monkeypatch.setattr(token_scores, "_AT_ONCE", 3 * 24)  # three tokens at once, and the last one alone
    logits = 3.0 * torch.from_numpy(toy.randoms(1, 4, 6, 24)).to(dtype)
    logits[0, 2, 5:] = -torch.inf
    row = torch.tensor([0, 0, 1, 2, 2, 2, 3, 3, 3, 3])
    column = torch.tensor([1, 2, 5, 0, 1, 2, 0, 2, 3, 5])
    targets = torch.tensor([3, 4, 23, 0, 7, 7, 1, 2, 3, 4])
    weights, entropy_weights = torch.from_numpy(toy.randoms(2, 2, 10)).float()
    entropy_weights *= 10.0 if entropy_gradient else 0.0
    whole = logits.clone().requires_grad_()
    with Storages(3 * 24) as large:
        log_probs, entropies = token_scores.token_scores(
            whole, row, column, targets, temperature, entropy_gradient=entropy_gradient
        )
        (log_probs * weights + entropies * entropy_weights).sum().backward()
    alone, none = token_scores.token_scores(whole, row, column, targets, temperature, entropy=False)
    assert torch.equal(alone, log_probs)
    assert none is None
    assert entropies.requires_grad == entropy_gradient
    assert log_probs.dtype == entropies.dtype == torch.float32

    exact = logits.double().requires_grad_()
    expected = (exact[row, column] / temperature).log_softmax(-1)
    entropy = -(expected.exp() * expected.clamp(min=-1e9)).sum(-1)
    (expected.gather(-1, targets[:, None])[:, 0] * weights + entropy * entropy_weights).sum().backward()
    assert (log_probs - expected.gather(-1, targets[:, None])[:, 0]).abs().max() < 5e-6
    assert (entropies - entropy).abs().max() < 2e-6
    rounding = 1e-6 if dtype == torch.float64 else 2.0**-8  # half a unit in the last place of the gradient's type
    least = 1e-5 if entropy_gradient else 1e-7  # weights up to 30, of differences of float32
    gap = (whole.grad.double() - exact.grad).abs()
    assert (gap <= rounding * exact.grad.abs() + least).all()
    assert [name for _, name in large.kept.values()] == ["zeros_like.default"]  # the gradient
