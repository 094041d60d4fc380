"""Time GRPO on a GPU: rlox with both caches of keys and values, and TRL with ``model.generate``.

usage: gpu.py rlox [--caches static dynamic]      under an interpreter that has rlox
       gpu.py trl                                 under one that has TRL
       options of both: [--device cuda] [--updates 5] [--warm-up 2] [--prompts 8] [--group 8] [--prompt-tokens 64]
                        [--new-tokens 128] [--hidden 896] [--layers 24] [--vocabulary 151936] [--out FILE]

Both train the same model, by default of the size of Qwen2-0.5B: new weights in float32, passes in bfloat16, and
attention by PyTorch. The settings are the same, too: one epoch of one minibatch, no reference model, no recomputed
activations, and AdamW. The tokenizer has one word for each token. The end of a completion is one of them, which a new
model writes about once in 150,000 tokens: practically all completions have all their tokens, and those that are
written are counted.

The first updates do not count. Every other one counts as a whole: sampling, rewards, loss and optimiser. Each number is
the median over these updates. ``tokens_per_s`` are sampled tokens over the seconds of an update, ``sample_s`` is the
time until the sampled tokens are on the host, and ``update_s`` is the rest of an update. ``peak_gib`` is the most
memory that PyTorch's tensors took on the GPU. ``--device cpu`` is there to test this script.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence, Sized
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

Row = dict[str, Any]
LEARNING_RATE = 1e-6


class Clock:
    """Seconds of sampling and of whole updates, and the tokens of each.

    Parameters
    ----------
    device : str
        The clock is read when the work of this device has ended.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self.ends: list[float] = []  # the start of the training, then the end of each update
        self.sampling: list[float] = []  # seconds of each update
        self.tokens: list[int] = []  # of each update
        self._sampled = (0.0, 0)  # seconds and tokens of the update in progress

    def now(self) -> float:
        if self._device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter()

    def sampled(self, start: float, completions: Sequence[Sized]) -> None:
        """Note that these completions of the update in progress have been sampled since `start`."""
        self._sampled = (self.now() - start, sum(map(len, completions)))

    def tick(self) -> None:
        """Note the start of the training, or the end of an update."""
        if self.ends:
            self.sampling.append(self._sampled[0])
            self.tokens.append(self._sampled[1])
        self.ends.append(self.now())

    def row(self, warm_up: int) -> Row:
        """Return the medians over all updates after the first `warm_up`."""
        whole = [end - start for start, end in zip(self.ends, self.ends[1:], strict=False)][warm_up:]
        sampling = self.sampling[warm_up:]
        rest = [seconds - sampled for seconds, sampled in zip(whole, sampling, strict=True)]
        speeds = [n / seconds for n, seconds in zip(self.tokens[warm_up:], whole, strict=True)]
        row: Row = {
            "tokens_per_s": round(statistics.median(speeds)),
            "sample_s": round(statistics.median(sampling), 4),
            "update_s": round(statistics.median(rest), 4),
            "whole_s": [round(seconds, 4) for seconds in whole],
            "warm_up_s": round(self.ends[warm_up] - self.ends[0], 2),
        }
        if self._device != "cpu":
            row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        return row


def new_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose words are numbers; the last word ends a text, and pads."""
    words = {str(number): number for number in range(size - 1)} | {"<eos>": size - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>", padding_side="left"
    )


def new_model(words: argparse.Namespace) -> Qwen2ForCausalLM:
    """Return a model with the same new weights for each system."""
    torch.manual_seed(0)
    heads = max(2, words.hidden // 64)
    config = Qwen2Config(
        vocab_size=words.vocabulary, hidden_size=words.hidden, intermediate_size=words.hidden * 38 // 7,
        num_hidden_layers=words.layers, num_attention_heads=heads, num_key_value_heads=2, tie_word_embeddings=True,
        max_position_embeddings=32768, bos_token_id=None, eos_token_id=words.vocabulary - 1,
    )  # fmt: skip
    with torch.device(words.device):
        return Qwen2ForCausalLM(config)


def prompts(words: argparse.Namespace) -> list[dict[str, str]]:
    """Return rows for all updates, with prompts of the same length."""
    draw = torch.Generator().manual_seed(0)
    n = words.prompts * (words.warm_up + words.updates)
    ids = torch.randint(words.vocabulary - 1, (n, words.prompt_tokens), generator=draw).tolist()
    return [{"prompt": " ".join(map(str, row))} for row in ids]


def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Return the number of even numbers."""
    return [float(sum(word[-1] in "02468" for word in text.split())) for text in completions]


def time_rlox(words: argparse.Namespace, cache: str) -> Row:
    import rlox
    from rlox.algorithms import GRPO

    clock = Clock(words.device)

    class Timed(GRPO):
        def complete(self, *arguments: Any, **more: Any) -> Any:
            start = clock.now()
            completions = super().complete(*arguments, **more)
            clock.sampled(start, completions.ids)
            return completions

        def update(self, batch: Any) -> Any:
            metrics = super().update(batch)
            clock.tick()
            return metrics

    algorithm = Timed(
        new_model(words), tokenizer=new_tokenizer(words.vocabulary), dataset=prompts(words), reward_fn=reward,
        group_size=words.group, batch_size=words.prompts, max_new_tokens=words.new_tokens, kl_coef=0.0,
        learning_rate=LEARNING_RATE, precision="bfloat16", sample_cache=cache, seed=0, device=words.device,
    )  # fmt: skip
    clock.tick()
    algorithm.train(words.warm_up + words.updates)
    return {"system": "rlox", "sample_cache": cache, "rlox": rlox.__version__, **clock.row(words.warm_up)}


def time_trl(words: argparse.Namespace) -> Row:
    import trl
    from datasets import Dataset

    clock = Clock(words.device)

    class Timed(trl.GRPOTrainer):
        def _generate_single_turn(self, *arguments: Any, **more: Any) -> Any:
            start = clock.now()
            completions = super()._generate_single_turn(*arguments, **more)
            clock.sampled(start, completions[0])
            return completions

    class Watch(transformers.TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            clock.tick()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.tick()

    with tempfile.TemporaryDirectory() as folder:
        config = trl.GRPOConfig(
            output_dir=folder, max_steps=words.warm_up + words.updates, learning_rate=LEARNING_RATE, weight_decay=0.0,
            lr_scheduler_type="constant", max_grad_norm=1.0, gradient_checkpointing=False, bf16=True,
            use_cpu=words.device == "cpu", seed=0, report_to=[], save_strategy="no", disable_tqdm=True,
            logging_steps=words.warm_up + words.updates,
            per_device_train_batch_size=words.prompts * words.group, num_generations=words.group,
            max_completion_length=words.new_tokens, temperature=1.0, top_k=0, loss_type="dapo", beta=0.0, epsilon=0.2,
            num_iterations=1, scale_rewards="group",
        )  # fmt: skip
        trainer = Timed(
            new_model(words), reward, config, Dataset.from_list(prompts(words)),
            processing_class=new_tokenizer(words.vocabulary), callbacks=[Watch()],
        )  # fmt: skip
        trainer.train()
    return {"system": "trl", "trl": trl.__version__, **clock.row(words.warm_up)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("rlox", "trl"))
    parser.add_argument("--caches", nargs="+", default=["static", "dynamic"], choices=("static", "dynamic"))
    parser.add_argument("--device", default="cuda")
    for name, default in (
        ("updates", 5), ("warm-up", 2), ("prompts", 8), ("group", 8), ("prompt-tokens", 64), ("new-tokens", 128),
        ("hidden", 896), ("layers", 24), ("vocabulary", 151936),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, help="JSON file; keeps the other part's rows")
    words = parser.parse_args()
    made_with = {
        "card": "cpu" if words.device == "cpu" else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "settings": {name: value for name, value in vars(words).items() if isinstance(value, int)},
    }
    rows = []
    for cache in words.caches if words.part == "rlox" else (None,):
        if words.device != "cpu":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        row = time_trl(words) if cache is None else time_rlox(words, cache)
        rows.append({**row, **made_with})
        print(json.dumps(rows[-1]), flush=True)
    if words.out:
        content = json.loads(words.out.read_text()) if words.out.exists() else {}
        words.out.write_text(json.dumps({**content, words.part: rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
