"""Small tasks that a new model learns within a minute: for tests, benchmarks, and a first look.

Each character is a token. Nothing is downloaded.
"""

from __future__ import annotations

from typing import Any

import torch

from rlox.kernels.envs.env import GridWorld

_CHARACTERS = "0123456789+="
_EOS = 1


def make_tokenizer() -> Any:
    """Return a tokenizer with one token for each digit, ``+`` and ``=``, for padding (0) and for the end (1)."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {"<pad>": 0, "<eos>": 1, **{character: i + 2 for i, character in enumerate(_CHARACTERS)}}
    words = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    words.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def make_model(seed: int = 0, hidden: int = 64, layers: int = 2) -> tuple[Any, Any]:
    """Return a Qwen2 model with new weights, which depend on `seed`, and its tokenizer."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = make_tokenizer()
    config = Qwen2Config(
        vocab_size=24,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=hidden // 2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config), tokenizer


def copy_rows() -> list[dict[str, str]]:
    """Return prompts ``7=`` for each digit; the answer is the digit."""
    return [{"prompt": f"{digit}=", "answer": str(digit)} for digit in range(10)]


def sum_rows() -> list[dict[str, str]]:
    """Return prompts ``3+4=`` for all pairs of digits; the answer, also as ``completion``, is the sum in two digits."""
    pairs = [(a, b) for a in range(10) for b in range(10)]
    return [{"prompt": f"{a}+{b}=", "answer": f"{a + b:02}", "completion": f"{a + b:02}"} for a, b in pairs]


def grid_rows() -> list[dict[str, str]]:
    """Return prompts ``12=`` for each row and column of a 3 x 3 grid except the goal, its last corner."""
    return [{"prompt": f"{row}{column}="} for row in range(3) for column in range(3) if (row, column) != (2, 2)]


class TextGridWorld:
    """A 3 x 3 `rlox.GridWorld` as text: the model writes a digit for its move, and reads its new position.

    0 is up, 1 right, 2 down, 3 left; anything else is a step without a move. The answer is row and column, ``12=``.
    Rewards are those of the grid: 1 at the goal, -0.01 for every other step.
    """

    def __init__(self) -> None:
        self._grid = GridWorld(rows=3, cols=3, seed=0)

    def reset(self, prompt: str) -> str:
        """Start at the row and column of the prompt; the answer is empty, since the model has read them there."""
        self._grid.reset(seed=0)
        self._grid.set_state({**self._grid.get_state(), "state": [float(prompt[0]), float(prompt[1])]})
        return ""

    def step(self, text: str) -> tuple[str, float, bool]:
        """Move in the direction of the first character."""
        if text[:1] not in ("0", "1", "2", "3"):
            return f"{self._grid.pos[0]}{self._grid.pos[1]}=", -0.01, False
        step = self._grid.step(int(text[0]))
        row, column = self._grid.pos
        return f"{row}{column}=", float(step["reward"]), bool(step["terminated"])


def copy_reward(completions: list[torch.Tensor], prompts: torch.Tensor) -> list[float]:
    """Reward 0.5 for beginning with the prompt's digit, plus up to 0.5 for ending right after it.

    Each token before the end reduces the second part by a third.
    """
    rewards = []
    for completion, prompt in zip(completions, prompts, strict=True):
        ids = completion.tolist()
        if not ids or ids[0] != int(prompt[-2]):
            rewards.append(0.0)
            continue
        between = ids.index(_EOS) - 1 if _EOS in ids else 3
        rewards.append(0.5 + 0.5 * max(0.0, 1 - between / 3))
    return rewards


def sum_reward(prompts: list[str], completions: list[str], answer: list[str]) -> list[float]:
    """Reward 0.5 times the share of the answer that the completion begins with.

    If that is the whole answer, add up to 0.5 for ending there: each further character reduces this part by a third.
    """
    rewards = []
    for completion, right in zip(completions, answer, strict=True):
        same = [a == b for a, b in zip(completion, right, strict=False)]
        n = same.index(False) if False in same else len(same)
        more = 0.5 * max(0.0, 1 - (len(completion) - n) / 3) if n == len(right) else 0.0
        rewards.append(0.5 * n / len(right) + more)
    return rewards
