"""Models of Llama's shape, with the options of their configurations."""

from __future__ import annotations

import torch
import toy
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

SHAPE = {
    "vocab_size": 24, "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": toy.EOS,
    "pad_token_id": 0,
}  # fmt: skip
KINDS = {
    "llama": (LlamaConfig, {}),
    "llama, each head its keys, biases": (
        LlamaConfig, {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True},
    ),
    "llama, tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "llama, scaled angles": (LlamaConfig, {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }}),
    "mistral": (MistralConfig, {"head_dim": 8}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 10}),
    "qwen3, biases": (Qwen3Config, {"head_dim": 16, "attention_bias": True}),
}  # fmt: skip


def made(kind="qwen2", **changed):
    """A model with weights so large that the logits of a token depend on the tokens before it."""
    config, own = KINDS[kind]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = AutoModelForCausalLM.from_config(config(**{**SHAPE, **own, **changed}), attn_implementation="sdpa")
        with torch.no_grad():
            for name, p in module.named_parameters():
                # Norms and biases, which start as ones and zeros, must have an effect too.
                p.copy_(torch.rand_like(p) + 0.5 if "norm" in name else 0.3 * torch.randn_like(p))
    return module
