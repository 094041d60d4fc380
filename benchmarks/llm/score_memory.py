"""Peak memory and CPU seconds of scoring tokens of a large vocabulary in bfloat16, with the gradient.

usage: score_memory.py [TOKENS [VOCABULARY]]     1,024 and 151,936 by default

The model has one layer of 64 units, so that almost all of it is for the logits. One thread; Linux and macOS.
"""

import resource
import sys
import time

import numpy as np
import torch
import transformers

from rlox.llm.models.language import LanguageModel
from rlox.llm.tokens import Sequences

LENGTH = 128  # tokens of a completion
UNIT = 2**30 if sys.platform == "darwin" else 2**20  # of `ru_maxrss` in a GiB


def peak():
    """Return the most memory that this process has had, GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / UNIT


def main(tokens=1024, vocabulary=151_936):
    tokens, vocabulary = int(tokens), int(vocabulary)
    torch.set_num_threads(1)
    config = transformers.Qwen2Config(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    model = LanguageModel(transformers.Qwen2ForCausalLM(config))
    rng, n = np.random.default_rng(0), tokens // LENGTH
    prompts, completions = (list(rng.integers(0, vocabulary, (n, length))) for length in (8, LENGTH))
    layout = model.layout(Sequences(prompts, completions))
    before, began = peak(), time.process_time()
    with torch.autocast("cpu", torch.bfloat16), model.learning():
        scores = model.score(layout, 1.0, entropy=True)
    scores.log_probs.sum().backward()
    seconds, logits = time.process_time() - began, n * LENGTH * vocabulary * 4 / 2**30
    print(f"{peak() - before:.2f} GiB, {seconds:.1f} s CPU; the logits alone have {logits:.2f} GiB in float32")


if __name__ == "__main__":
    if sys.argv[1:] == ["--help"]:
        print(__doc__[__doc__.index("usage:") :])
    else:
        main(*sys.argv[1:])
