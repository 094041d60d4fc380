"""Post-training in four stages: SFT, a reward model, GRPO against it, and DPO on pairs of the model's own completions.

usage: python post_training_pipeline.py [--seed 0] [--out outputs/pipeline] [--prompts 1000] [--updates N]

A new model of 86,000 parameters learns to add three digits: the right completion of ``3+4+5=`` is ``12``. A fifth of
the thousand prompts is held out: no stage sees these prompts. After each stage the script prints the share of right
answers on them, for the most likely completions (greedy) and for ten sampled completions of each prompt; after the
reward model, it prints how often the right answer earns more than any other sum. It takes about a minute on one core
and downloads nothing.

The folder `--out` then contains the rows and pairs of each stage, its checkpoint, and ``scores.json``.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import time
from itertools import product
from pathlib import Path
from typing import Any

import rlox
from rlox.callbacks import ProgressCallback
from rlox.llm.toy import make_model

Rows = list[dict[str, str]]

HELD_OUT, SHOWN = 0.2, 0.3  # shares of the prompts: held out from all stages, and shown to SFT with answers
NEW_TOKENS = 3  # two digits and the EOS
SFT = {"learning_rate": 1e-3, "batch_size": 32}
REWARD_MODEL = {"learning_rate": 1e-3, "learning_rate_schedule": "linear", "warmup": 0.1, "batch_size": 128}
GRPO = {"learning_rate": 5e-4, "batch_size": 16, "group_size": 8, "max_new_tokens": NEW_TOKENS}
DPO = {"learning_rate": 5e-5, "batch_size": 32, "beta": 0.3}
UPDATES = {"sft": 200, "reward_model": 500, "grpo": 400, "dpo": 200}


def sums(seed: int, n: int = 1000) -> tuple[Rows, Rows]:
    """Return `n` of the thousand sums of three digits, shuffled with `seed`: the held-out rows, and the others."""
    rows = [{"prompt": f"{a}+{b}+{c}=", "completion": f"{a + b + c:02}"} for a, b, c in product(range(10), repeat=3)]
    random.Random(seed).shuffle(rows)
    cut = int(HELD_OUT * n)
    return rows[:cut], rows[cut:n]


def complete(policy: Any, rows: Rows, n: int, temperature: float, seed: int) -> list[list[str]]:
    """Return `n` completions of each prompt."""
    prompts = [row["prompt"] for row in rows]
    return policy.generate(prompts, n, max_new_tokens=NEW_TOKENS, temperature=temperature, seed=seed)


def score(policy: Any, rows: Rows) -> dict[str, float]:
    """Return the shares of right answers, for the most likely completions and for ten samples of each prompt."""
    found = {}
    for name, n, temperature in (("greedy", 1, 0.0), ("sampled", 10, 1.0)):
        drawn = complete(policy, rows, n, temperature, seed=1)
        right = sum(text == row["completion"] for row, texts in zip(rows, drawn, strict=True) for text in texts)
        found[name] = right / (n * len(rows))
    return found


def judged_right(judge: rlox.RewardModel, rows: Rows) -> dict[str, float]:
    """Return how often `judge` gives the right answer a higher reward than any other sum from 00 to 27."""
    answers = [f"{number:02}" for number in range(28)]
    rewards = judge.score_batch([row["prompt"] for row in rows for _ in answers], answers * len(rows))
    best = rewards.reshape(len(rows), len(answers)).argmax(1)
    return {"best": sum(answers[i] == row["completion"] for i, row in zip(best, rows, strict=True)) / len(rows)}


def labelled_pairs(policy: Any, rows: Rows, seed: int) -> Rows:
    """Return pairs for the reward model, as people would label them: the right answer and a wrong one of `policy`."""
    drawn = complete(policy, rows, 8, 1.5, seed)
    return [
        {"prompt": row["prompt"], "chosen": row["completion"], "rejected": wrong}
        for row, texts in zip(rows, drawn, strict=True)
        for wrong in sorted({*texts} - {row["completion"], ""})
    ]


def own_pairs(policy: Any, judge: rlox.RewardModel, rows: Rows, seed: int) -> Rows:
    """Return pairs for DPO without labels: of `policy`'s samples, the one that `judge` likes best, and each other."""
    drawn = [sorted({*texts} - {""}) for texts in complete(policy, rows, 8, 1.0, seed)]
    prompts = [row["prompt"] for row, texts in zip(rows, drawn, strict=True) for _ in texts]
    rewards = iter(judge.score_batch(prompts, [text for texts in drawn for text in texts]))
    pairs = []
    for row, texts in zip(rows, drawn, strict=True):
        earned = {text: next(rewards) for text in texts}
        best = max(earned, key=earned.__getitem__, default="")
        pairs += [{"prompt": row["prompt"], "chosen": best, "rejected": text} for text in texts if text != best]
    return pairs


def run(seed: int, out: Path, n_prompts: int = 1000, limit: int | None = None) -> None:
    """Train all stages, each for at most `limit` updates, and write everything to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    held_out, seen = sums(seed, n_prompts)
    scores, began = {}, time.perf_counter()
    model, tokenizer = make_model(seed)
    common = {"tokenizer": tokenizer, "seed": seed, "device": "cpu", "callbacks": [ProgressCallback()]}

    def train(algorithm: Any, data: Rows, measure: Any) -> Any:
        """Train one stage, save its rows and its checkpoint, and print its score."""
        name = algorithm.name
        (out / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in data))
        algorithm.use(data)
        algorithm.train(n_updates=min(UPDATES[name], limit or UPDATES[name]))
        algorithm.save(out / f"{name}.safetensors")
        scores[name] = {"rows": len(data), **measure(algorithm, held_out)}
        said = ", ".join(f"{key} {value:.3f}" for key, value in scores[name].items() if key != "rows")
        print(f"{name:<12} {len(data):>5} rows, held out: {said}  ({time.perf_counter() - began:.0f} s)", flush=True)
        return algorithm

    sft = train(rlox.SFT(model, **SFT, **common), seen[: int(SHOWN * n_prompts)], score)
    judge = rlox.RewardModel(copy.deepcopy(model), **REWARD_MODEL, **common)
    train(judge, labelled_pairs(sft, seen, seed), judged_right)
    prompts = [{"prompt": row["prompt"]} for row in seen]
    grpo = train(rlox.GRPO(model, reward_fn=judge, **GRPO, **common), prompts, score)
    train(rlox.DPO(model, **DPO, **common), own_pairs(grpo, judge, seen, seed), score)
    (out / "scores.json").write_text(json.dumps({"seed": seed, "scores": scores}, indent=1) + "\n")


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, split, rows and completions")
    parser.add_argument("--out", type=Path, default=Path("outputs/pipeline"), help="output folder")
    parser.add_argument("--prompts", type=int, default=1000, help="number of sums to use, for a first look")
    parser.add_argument("--updates", type=int, help="maximum updates of each stage, for a first look")
    args = parser.parse_args()
    if not 10 <= args.prompts <= 1000:
        parser.error(f"--prompts must be between 10 and 1000, got {args.prompts}")
    if args.updates is not None and args.updates < 1:
        parser.error(f"--updates must be at least 1, got {args.updates}")
    run(args.seed, args.out, args.prompts, args.updates)


if __name__ == "__main__":
    main()
