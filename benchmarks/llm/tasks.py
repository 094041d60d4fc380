"""Small tasks whose answers can be checked, the same for every system: model, tokenizer, rows, reward, settings.

This module imports only PyTorch and transformers, so any interpreter that has a peer can load it.
``python tasks.py PATH`` writes the model that the tasks with sums start from.
"""

import random
import sys
import time
from dataclasses import dataclass
from itertools import pairwise

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

LETTERS = "0123456789+=abcdefghijklmnopqrs"  # 32 tokens with <eos>, which also pads; all others are visible in a text
MORE = "".join(chr(0x4E00 + i) for i in range(512 - 32))
EOS = 0


@dataclass(frozen=True)
class Task:
    """Settings with the same meaning in every system; `group` is 0 for pairs."""

    title: str
    steps: int
    learning_rate: float
    batch: int  # prompts or pairs per update
    group: int = 8  # completions of each prompt
    new_tokens: int = 4
    hidden: int = 64
    layers: int = 2
    letters: str = LETTERS


TASKS = {
    "copy": Task("GRPO copy, 10 prompts x 8 completions of 4 tokens", 300, 1e-3, 10),
    "sum": Task("GRPO sum, 16 prompts x 8 completions of 4 tokens", 300, 3e-4, 16),
    "dpo": Task("DPO sum, 32 pairs", 200, 1e-4, 32, group=0),
    "large": Task("GRPO, 2.4 M parameters, 8 prompts x 8 completions of 64 tokens", 8, 1e-4, 8,
                  new_tokens=64, hidden=256, layers=4, letters=LETTERS + MORE),
}  # fmt: skip


def tokenizer(task):
    """Return a tokenizer with one token for each character."""
    vocabulary = {letter: i for i, letter in enumerate(["<eos>", *TASKS[task].letters])}
    built = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    built.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    built.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=built, pad_token="<eos>", eos_token="<eos>", padding_side="left", model_max_length=128
    )


def random_model(task, seed):
    """Return a Qwen2 with random weights: 78,400 parameters, or 2.4 million."""
    t = TASKS[task]
    heads, shared, inner = (2, 1, 128) if t.hidden == 64 else (4, 4, 352)
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(t.letters) + 1, hidden_size=t.hidden, intermediate_size=inner,
        num_hidden_layers=t.layers, num_attention_heads=heads, num_key_value_heads=shared, head_dim=t.hidden // heads,
        max_position_embeddings=128, tie_word_embeddings=False, bos_token_id=None, eos_token_id=EOS, pad_token_id=EOS,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


def model(task, seed, start=None):
    """Return the model that training starts from: for the sums `start`, a file of `save_start`; else random weights."""
    made = random_model(task, seed)
    if start is not None:
        made.load_state_dict(torch.load(start))
    return made


def save_start(path):
    """Save a model that learned the sums by heart and was made unsure: right when greedy, and in three samples of
    ten."""
    torch.set_num_threads(1)
    made, build = random_model("sum", 0), tokenizer("sum")
    rows = prompts("sum")
    ids = torch.tensor([build(row["prompt"] + row["answer"])["input_ids"] + [EOS] for row in rows])
    optimizer = torch.optim.Adam(made.parameters(), 2e-3)
    for _ in range(400):
        logits = made(input_ids=ids[:, :-1], logits_to_keep=3).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, -3:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    low, high = 0.01, 1.0
    weight = made.lm_head.weight.data.clone()
    for _ in range(12):
        scale = (low + high) / 2
        made.lm_head.weight.data = weight * scale
        low, high = (scale, high) if exact(made, "sum", 4) < 0.31 else (low, scale)
    torch.save(made.state_dict(), path)


def prompts(task):
    """Return rows with prompt and answer."""
    if task == "copy":
        return [{"prompt": f"{d}=", "answer": str(d)} for d in range(10)]
    if task == "large":
        draw = random.Random(0)
        return [{"prompt": "".join(draw.choices(LETTERS, k=16)), "answer": ""} for _ in range(64)]
    return [{"prompt": f"{a}+{b}=", "answer": f"{a + b:02d}"} for a in range(10) for b in range(10)]


def pairs():
    """Return rows with prompt, the right sum as chosen, and a wrong one as rejected."""
    return [
        {"prompt": f"{a}+{b}=", "chosen": f"{a + b:02d}", "rejected": f"{(a + b + wrong) % 20:02d}"}
        for a in range(10) for b in range(10) for wrong in (1, 3, 10)
    ]  # fmt: skip


def reward(answer, completion):
    """Return half for the right beginning and half for ending there; without an answer, the share of digits."""
    if not answer:
        return sum(letter.isdigit() for letter in completion) / 64
    share = next((i for i, letter in enumerate(answer) if completion[i : i + 1] != letter), len(answer)) / len(answer)
    extra = max(0, len(completion) - len(answer)) / 3
    return 0.5 * share + (0.5 * (1.0 - extra) if share == 1.0 else 0.0)


@torch.no_grad()
def exact(module, task, samples):
    """Return the share of right completions, of `samples` per prompt at temperature 1; 0: of the most likely ones."""
    build, rows = tokenizer(task), prompts(task)
    draw = torch.Generator().manual_seed(1234)
    right = total = 0
    for width in {len(row["prompt"]) for row in rows}:
        mine = [row for row in rows if len(row["prompt"]) == width for _ in range(max(samples, 1))]
        ids = torch.tensor([build(row["prompt"])["input_ids"] for row in mine])
        for _ in range(TASKS[task].new_tokens):
            logits = module(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1]
            token = torch.multinomial(logits.softmax(-1), 1, generator=draw) if samples else logits.argmax(-1, True)
            ids = torch.cat([ids, token], 1)
        for row, found in zip(mine, ids[:, width:].tolist(), strict=True):
            wanted = [*build(row["answer"])["input_ids"], EOS]
            right += found[: len(wanted)] == wanted
            total += 1
    return right / total


class Clock:
    """CPU and wall seconds at the end of each update, and the mean reward of each update's completions."""

    def __init__(self):
        self.at, self.rewards = [(time.process_time(), time.perf_counter())], []

    def tick(self):
        self.at.append((time.process_time(), time.perf_counter()))

    def reward(self, prompts, completions, answer, **_):
        """The reward function of both systems."""
        found = [reward(*row) for row in zip(answer, completions, strict=True)]
        self.rewards.append(sum(found) / len(found))
        return found

    def answer(self, module, task, **more):
        """Return what a program prints; milliseconds are those of single updates, without the first."""
        cpu, wall = ([1e3 * (b - a) for a, b in pairwise(times[1:])] for times in zip(*self.at, strict=True))
        (cpu_0, wall_0), (cpu_1, wall_1) = self.at[0], self.at[-1]
        found = {"steps": len(self.at) - 1, "cpu_s": cpu_1 - cpu_0, "wall_s": wall_1 - wall_0, "cpu_ms": cpu,
                 "wall_ms": wall, "curve": self.rewards}  # fmt: skip
        if task != "large":
            found |= {"sampled": exact(module, task, 20), "greedy": exact(module, task, 0)}
        return {**found, **more}


if __name__ == "__main__":
    save_start(sys.argv[1])
