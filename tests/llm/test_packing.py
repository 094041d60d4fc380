"""Packed sequences are scored as if each were alone, or `packing` is refused, for many families of transformers."""

from __future__ import annotations

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
import toy
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers import modeling_flash_attention_utils as flash_utils
from transformers.integrations import flash_attention
from transformers.models.falcon import modeling_falcon
from transformers.models.gpt_neo import modeling_gpt_neo
from transformers.models.gpt_oss import modeling_gpt_oss

from rlox import DPO, GRPO, SFT
from rlox.llm.models.language import LanguageModel
from rlox.llm.tokens import Sequences

# Small sizes, by the names that any of the configurations has for them.
SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "word_embed_proj_dim", "lru_width"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "intermediate_size_mlp"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "attention_heads", "num_heads"), 4),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "linear_num_value_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "mamba_expand", "linear_num_key_heads"), 2),
    **dict.fromkeys(("head_dim", "linear_key_head_dim", "linear_value_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("mamba_d_state", "state_size", "mamba_n_heads", "mamba_d_head", "ssm_state_size"), 8),
    **dict.fromkeys(("mamba_num_heads", "mamba_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size", "attention_window_size"), 16),
    **dict.fromkeys(("n_group", "topk_group", "mamba_n_groups", "n_groups"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "context_length"), 64),
    "vocab_size": 40, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
_WITHOUT_MORE = [
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "starcoder2", "stablelm",
    "cohere", "cohere2", "olmo", "olmo2", "olmo3", "granite", "glm", "glm4", "helium", "smollm3", "nemotron",
    "persimmon", "exaone4", "diffllama", "arcee", "seed_oss", "gpt2", "gpt_neox", "gptj", "codegen", "gpt_bigcode",
    "opt", "bloom", "mpt", "biogpt", "xglm", "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "olmoe", "granitemoe",
    "bamba", "nemotron_h", "minimax",
]  # fmt: skip
_STATES = {"time_step_rank": 4, "intermediate_size": 64}

FAMILIES = {
    **{name: {} for name in _WITHOUT_MORE},
    "falcon": {},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 16},
    "deepseek_v2": {"num_key_value_heads": 4},
    "deepseek_v3": {"num_key_value_heads": 4},
    "llama4_text": {"attention_chunk_size": 32, "interleave_moe_layer_step": 1},
    "qwen3_next": {"num_hidden_layers": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "jamba": {
        "num_hidden_layers": 4, "attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1,
        "mamba_dt_rank": 4, "use_mamba_kernels": False,
    },
    "mamba": _STATES,
    "falcon_mamba": _STATES,
    "mamba2": {"num_heads": 8, "expand": 2},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "rwkv": {"attention_hidden_size": 32},
}  # fmt: skip
# Sizes that these configurations compute from others.
DERIVED = {"falcon": "head_dim", "deepseek_v2": "head_dim", "deepseek_v3": "head_dim", "rwkv": "num_attention_heads"}
# Families with a state, or with positions or masks of their own; Llama stands for the others.
SOME = ("llama", "gpt_oss", "qwen3_next", "mamba", "opt", "bloom")


def _attend(q, k, v, softmax_scale, causal, window_size, softcap, s_aux):
    """Attention of one sequence, (L, heads, D), as the functions of the package flash_attn compute it."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    ahead = torch.arange(len(k)) - (torch.arange(len(q))[:, None] + len(k) - len(q))
    masked = (ahead > 0) & causal | (ahead < -window_size[0]) & (window_size[0] >= 0)
    logits = logits.masked_fill(masked, -torch.inf)
    if s_aux is not None:
        logits = torch.cat([logits, s_aux[:, None, None].expand(-1, len(q), 1)], -1)
    return torch.einsum("hqk,khd->qhd", logits.softmax(-1)[..., : len(k)], v)


def _flash(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, s_aux=None):
    return torch.stack(
        [_attend(*x, softmax_scale, causal, window_size, softcap, s_aux) for x in zip(q, k, v, strict=True)]
    )


def _flash_varlen(
    q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, s_aux=None,
):  # fmt: skip
    ends = cu_seqlens_q.tolist()
    parts = [(q[a:b], k[a:b], v[a:b]) for a, b in pairwise(ends)]
    return torch.cat([_attend(*x, softmax_scale, causal, window_size, softcap, s_aux) for x in parts])


@pytest.fixture
def emulated_flash(monkeypatch):
    """Everything of transformers around FlashAttention, with the package's functions in PyTorch."""
    functions = _flash, _flash_varlen, None, flash_utils._pad_input, flash_utils._unpad_input
    monkeypatch.setattr(flash_utils, "_lazy_imports", lambda *a, **k: functions)
    monkeypatch.setattr(flash_utils, "_loaded_implementation", None)
    # The functions above compute in float32, so that rounding hides nothing.
    monkeypatch.setattr(flash_attention, "get_target_dtype", lambda *a: None)
    monkeypatch.setattr(PreTrainedModel, "_flash_attn_import_error", lambda self, *a, **k: None)
    monkeypatch.setattr(modeling_gpt_oss.GptOssPreTrainedModel, "_compatible_flash_implementations", None)
    for module in (modeling_falcon, modeling_gpt_neo):  # they import it only if the package is installed
        monkeypatch.setattr(module, "_flash_attention_forward", flash_utils._flash_attention_forward, raising=False)


def made(family, attention="sdpa", scale=4.0):
    """A new model of a family, whose initial weights are `scale` times as large as usual, or None if the family has no
    such attention."""
    blank, sizes = AutoConfig.for_model(family), {**SIZES, **FAMILIES[family]}
    derived = DERIVED.get(family)
    sizes = {name: value for name, value in sizes.items() if hasattr(blank, name) and name != derived}
    config = AutoConfig.for_model(family, **sizes)
    name = "flash_attention_2" if attention == "flash" else attention
    with torch.random.fork_rng():
        torch.manual_seed(0)
        try:
            module = AutoModelForCausalLM.from_config(config, attn_implementation=name)
        except ValueError as e:
            if "does not support" in str(e):
                return None
            raise
    with torch.no_grad():
        for p in module.parameters():
            if p.ndim > 1:
                p *= scale
    return module


def sequences():
    ids = [np.random.default_rng(n).integers(2, 40, n) for n in (9, 7, 8, 6, 5)]
    return Sequences([x[:1] for x in ids], [x[1:] for x in ids])


@torch.no_grad()
def differences(module):
    """The largest difference of log-probabilities from those of each sequence alone: padded, packed in several rows,
    and packed in one."""
    model, whole = LanguageModel(module), sequences()
    alone = [model.score(whole.take(np.array([i]))[0].padded()).log_probs for i in range(len(whole))]
    layouts = whole.padded(), whole.packed(20), whole.packed(1_000)
    return [float((model.score(layout).log_probs - torch.cat(alone)).abs().max()) for layout in layouts]


def outcome(family, attention, scale=4.0):
    """``right`` or ``refused``; None if the family has no such attention."""
    module = made(family, attention, scale)
    if module is None:
        return None
    padded, rows, row = differences(module)
    rounding = 5e-6
    assert padded < rounding
    try:
        algorithm = SFT(copy.deepcopy(module), packing=True)
    except ValueError as e:
        if not str(e).startswith(f"SFT: packing must be false for {type(module).__name__} with attention "):
            raise
        assert (row if attention == "flash" else rows) > rounding
        return "refused"
    assert (algorithm.log_probs(sequences()) - SFT(module).log_probs(sequences())).abs().max() < rounding
    return "right"


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in SOME else pytest.mark.exhaustive) for name in FAMILIES]
)
@pytest.mark.usefixtures("emulated_flash")
def test_each_family_is_right_or_refused(family):
    """With the weights of a new model, whose logits hardly depend on earlier tokens, and with larger ones."""
    scales = (4.0,) if family in SOME else (1.0, 4.0)
    found = {outcome(family, attention, scale) for attention in ("sdpa", "eager", "flash") for scale in scales}
    assert found & {"right", "refused"}


@pytest.mark.usefixtures("emulated_flash")
def test_flash_attention_reads_packed_sequences_in_one_row():
    module = made("llama", "flash")
    _, rows, row = differences(module)
    assert rows > 0.1
    assert row < 5e-6
    layout = SFT(module, packing=True).model.layout(sequences(), 20)
    assert layout.ids.shape == (1, 34)
    other = toy.model(vocabulary=40)  # with scaled-dot-product attention, which reads two rows
    for policy, reference in ((module, other), (other, module)):
        algorithm = DPO(copy.deepcopy(policy), copy.deepcopy(reference), packing=True)
        alone = SFT(copy.deepcopy(reference)).log_probs(sequences())
        assert (algorithm.log_probs(sequences(), reference=True) - alone).abs().max() < 5e-6


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_small_effect_over_a_boundary_is_noticed_in_any_precision(precision):
    """LFM2's convolutions read two tokens of the sequence before."""
    module = made("lfm2", scale=1.0)
    assert differences(module)[1] < 1e-4
    lora = {}
    if precision == "bfloat16":
        module, lora = module.bfloat16(), {"lora_rank": 2}
    refused = r"^SFT: packing must be false for Lfm2ForCausalLM with attention sdpa, .*; set packing=false$"
    with pytest.raises(ValueError, match=refused):
        SFT(module, packing=True, precision=precision, **lora)


def test_the_check_draws_no_random_numbers_and_covers_the_reference():
    state = torch.get_rng_state()
    plain, packed = (SFT(toy.model(), tokenizer=toy.tokenizer(), packing=packing) for packing in (False, True))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(plain.optimizer.flat, packed.optimizer.flat)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in packed.model.module.modules())
    assert all(p.grad is None or not p.grad.any() for p in packed.model.module.parameters())
    with pytest.raises(ValueError, match=r"^GRPO: ref_model: packing must be false for OPTForCausalLM"):
        GRPO(toy.model(vocabulary=40), made("opt"), kl_coef=0.1, packing=True)
