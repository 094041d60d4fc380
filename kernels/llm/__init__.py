"""Mathematics of language-model post-training: group advantages, token KL, packing, preference pairs."""

from rlox.kernels import prefer_level

prefer_level(__path__, "llm")
