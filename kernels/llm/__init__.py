"""Mathematics of language-model post-training: group advantages, token KL, packing, preference pairs.

Parts of language models are in modules of their own: `decoder`, `parts`, `vocabulary`.
"""

from rlox.kernels import prefer_level

prefer_level(__path__, "llm")

from rlox.kernels.llm.group import (  # noqa: E402 - found only once the level is on the path
    compute_batch_group_advantages,
    compute_group_advantages,
)
from rlox.kernels.llm.packing import DPOPair, pack_sequences, packed_attention_mask  # noqa: E402
from rlox.kernels.llm.token_kl import (  # noqa: E402
    compute_batch_token_kl,
    compute_batch_token_kl_f32,
    compute_batch_token_kl_schulman,
    compute_batch_token_kl_schulman_f32,
    compute_token_kl,
    compute_token_kl_f32,
    compute_token_kl_schulman,
    compute_token_kl_schulman_f32,
)

__all__ = [
    "DPOPair",
    "compute_batch_group_advantages",
    "compute_batch_token_kl",
    "compute_batch_token_kl_f32",
    "compute_batch_token_kl_schulman",
    "compute_batch_token_kl_schulman_f32",
    "compute_group_advantages",
    "compute_token_kl",
    "compute_token_kl_f32",
    "compute_token_kl_schulman",
    "compute_token_kl_schulman_f32",
    "pack_sequences",
    "packed_attention_mask",
]
