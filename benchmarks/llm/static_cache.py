"""Time sampling with the two caches of keys and values, `algo.sample_cache=static` and `dynamic`.

usage: static_cache.py [--device cpu] [--hidden 256] [--layers 4] [--rows 16] [--tokens 128] [--repeats 5]

A model of the family Qwen2 with new weights samples completions of a fixed length; the native decoder is off. The
script prints the least time of the repeats, which take turns. On the CPU it is the CPU time of one thread, so that
other programs do not count.
"""

import argparse
import time

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from rlox.llm.models.language import LanguageModel
from rlox.llm.sampling import Settings, sample


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    for name, default in (("hidden", 256), ("layers", 4), ("rows", 16), ("tokens", 128), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    words = parser.parse_args()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=1000, hidden_size=words.hidden, intermediate_size=4 * words.hidden, num_hidden_layers=words.layers,
        num_attention_heads=4, num_key_value_heads=2, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    model = LanguageModel(AutoModelForCausalLM.from_config(config).to(words.device))
    model.native = False
    prompts = [list(range(1, 9 + i % 8)) for i in range(words.rows)]
    if words.device == "cpu":
        torch.set_num_threads(1)
    clock = time.process_time if words.device == "cpu" else time.perf_counter
    seconds: dict[str, list[float]] = {"static": [], "dynamic": []}
    sample(model, prompts, Settings(16))
    for _ in range(words.repeats):
        for cache, times in seconds.items():
            model.sample_cache = cache
            start = clock()
            sample(model, prompts, Settings(words.tokens))  # the completions are on the host when it returns
            times.append(clock() - start)
    for cache, times in seconds.items():
        print(f"{cache:8s} {min(times):.2f} s, {words.rows * words.tokens / min(times):,.0f} tokens per second")


if __name__ == "__main__":
    main()
