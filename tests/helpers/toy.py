"""Language models of a few thousand weights, a tokenizer of single characters, and rows to learn from."""

from __future__ import annotations

import copy
import warnings
from functools import cache

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

CHARACTERS = "0123456789+=abcdefghij"
PAD, EOS, VOCABULARY = 0, 1, 24
ROWS = [{"prompt": f"{a}+{b}=", "completion": f"{a + b:02d}"} for a in range(5) for b in range(4)]
PAIRS = [
    {"prompt": f"{a}+{b}="[: 3 + a % 2], "chosen": f"{a + b:02d}", "rejected": f"{a + b + 1}"[: 1 + b % 2]}
    for a in range(5)
    for b in range(4)
]
PROMPTS = [row["prompt"][: 2 + i % 3] for i, row in enumerate(ROWS)]


@cache
def tokenizer():
    vocabulary = {"<pad>": PAD, "<eos>": EOS, **{c: i + 2 for i, c in enumerate(CHARACTERS)}}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", padding_side="left")


class Recurrent(nn.Module):
    """A custom module: ids (B, T) -> logits (B, T, V), causal and recurrent."""

    def __init__(self, vocabulary=VOCABULARY, width=12):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.memory = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids):
        return self.head(self.memory(self.embed(ids))[0])


class Always(nn.Module):
    """Returns the same logits (V,) after any token."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(torch.as_tensor(logits, dtype=torch.float32))

    def forward(self, ids):
        return self.logits.expand(*ids.shape, -1)


def _config(family, hidden, layers, vocabulary, tied):
    ends = {"bos_token_id": None, "eos_token_id": EOS, "pad_token_id": PAD, "tie_word_embeddings": tied}
    if family == "gpt2":
        return GPT2Config(vocab_size=vocabulary, n_embd=hidden, n_layer=layers, n_head=2, n_positions=64, **ends)
    kind = {"qwen2": Qwen2Config, "llama": LlamaConfig}[family]
    return kind(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=1, head_dim=hidden // 2, max_position_embeddings=64, **ends,
    )  # fmt: skip


@cache
def _model(kind, seed, hidden, layers, vocabulary, scale, tied):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if kind == "bare":
            made = Recurrent(vocabulary)
        else:
            family, _, attention = kind.partition("-")
            config = _config(family, hidden, layers, vocabulary, tied)
            made = AutoModelForCausalLM.from_config(config, attn_implementation=attention or "sdpa")
        with torch.no_grad():
            for p in made.parameters():
                if p.ndim > 1:
                    p *= scale
    return made


def model(kind="qwen2", seed=0, hidden=16, layers=2, vocabulary=VOCABULARY, scale=4.0, tied=False):
    """A new model: ``bare``, or a family and an attention such as ``qwen2-eager``.

    Initial weights are `scale` times as large as usual, so that logits depend on all earlier tokens.
    """
    return copy.deepcopy(_model(kind, seed, hidden, layers, vocabulary, scale, tied))


def trained_peft(trained=True, **settings):
    """A peft model whose adapters are trained, or new."""
    module = model()
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft uses a deprecated name of transformers
        torch.manual_seed(7)
        module = get_peft_model(module, LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.3, **settings))
        for p in module.parameters():
            if p.requires_grad and trained:
                p.data += 0.3 * torch.randn_like(p)
    return module


def copied(module):
    """A frozen copy in double precision."""
    return copy.deepcopy(module).double().requires_grad_(False)


def differentiable(module):
    """A copy in double precision in which the same parameters are trainable as in `module`."""
    trained = [p.requires_grad for p in module.parameters()]
    double = copy.deepcopy(module).double()
    for p, wanted in zip(double.parameters(), trained, strict=True):
        p.grad = None
        p.requires_grad_(wanted)
    return double


def gradient(module):
    """The accumulated gradient of `module` as one vector."""
    wanted = [p for p in module.parameters() if p.requires_grad]
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in wanted])


def set_weights(module, flat):
    """Copy the vector `flat` into the trained parameters of `module`."""
    offset = 0
    for p in module.parameters():
        if p.requires_grad:
            p.data = flat[offset : offset + p.numel()].view_as(p).to(p.dtype).clone()
            offset += p.numel()
    assert offset == len(flat)


def token_log_probs(module, prompt, completion, temperature=1.0):
    """Log-probabilities and entropies (C,) f64 of the tokens of `completion`: one row, no padding, nothing shared."""
    ids = torch.as_tensor([[*map(int, prompt), *map(int, completion)]])
    found = module(ids)
    logits = (found if isinstance(found, torch.Tensor) else found.logits)[0].double() / temperature
    log_probs = torch.log_softmax(logits, -1)
    entropies = -(log_probs.exp() * log_probs).sum(-1)
    places = range(len(prompt) - 1, len(prompt) + len(completion) - 1)
    own = [log_probs[place, int(token)] for place, token in zip(places, completion, strict=True)]
    return torch.stack(own) if own else torch.zeros(0).double(), entropies[len(prompt) - 1 : len(ids[0]) - 1]


class Steps:
    """Records weights and gradients (before clipping) of each step of the optimiser of `algorithm`."""

    def __init__(self, algorithm):
        self.weights, self.gradients = [], []
        optimizer, step = algorithm.optimizer, algorithm.optimizer.step_accumulated

        def watched(max_grad_norm=None):
            self.weights.append(optimizer.flat.detach().clone())
            self.gradients.append(optimizer.grad.detach().clone())
            return step(max_grad_norm)

        optimizer.step_accumulated = watched


def relative_error(found, expected):
    """The distance of two vectors, relative to the length of the second."""
    found, expected = torch.as_tensor(found).double(), torch.as_tensor(expected).double()
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))


def randoms(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)
