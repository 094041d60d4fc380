"""``rlox eval`` and ``rlox generate`` for a trained language model."""

from __future__ import annotations

import json as jsonlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rlox.algorithms import entry_of, resolve
from rlox.checkpoint import one_line, trained_for
from rlox.config import RunConfig, shown
from rlox.llm.templates import COLUMNS
from rlox_cli.config.imports import import_modules, require_typed
from rlox_cli.config.language import NO_SAMPLER
from rlox_cli.config.saved import configuration
from rlox_cli.records.checkpoints import best_of, known_header
from rlox_cli.run.language import restore_language
from rlox_cli.terminal.console import PlainTable, make_console, make_table, print_table, print_text
from rlox_cli.terminal.errors import UsageError

_SHOWN, _LONGEST = 5, 200  # completions in the table, and characters of each text
_SAMPLES = 4  # completions of each prompt


# What the evaluation of each algorithm measures for a row.
_MEASURES = {
    "sft": "log-prob",
    "reward_model": "accuracy",
    "dpo": "accuracy",
    "grpo": "reward",
    "online_dpo": "reward",
}


def is_language(header: dict[str, Any]) -> bool:
    """Return whether a checkpoint holds a language model."""
    entry = entry_of(header["algorithm"])
    return entry is not None and resolve(entry.config).uses_dataset == "text"


def evaluate(
    path: Path,
    header: dict[str, Any],
    n_rows: int | None,
    seed: int | None,
    n_samples: int | None,
    pass_at: float,
    as_json: bool,
    imports: list[str],
) -> None:
    """Score the rows of the run's evaluation and print the result.

    If the run has a reward, also score `n_samples` sampled completions of each prompt.
    """
    config = _run(path, header, imports)
    algorithm = restore_language(resolve(entry_of(header["algorithm"]).cls), config, path)
    found = header.get("evaluation")
    recorded: dict[str, Any] = found if isinstance(found, dict) else {}
    n_rows = n_rows or recorded.get("n_episodes") or config.eval.n_episodes
    evaluation = algorithm.scored(n_rows, seed)
    summary = {**evaluation.summary(), "seed": evaluation.seed}
    table = None
    n_samples = n_samples or (_SAMPLES if algorithm.rewarded else 0)
    if n_samples:
        found, table = _sampled(algorithm, min(n_rows, len(evaluation.returns)), n_samples, pass_at, evaluation.seed)
        summary |= found
    if as_json:
        print(jsonlib.dumps(summary))
        return
    step, unit = trained_for(header)
    what = _MEASURES.get(header["algorithm"], "score")
    print_text(
        f"{header['algorithm']} on {config.env.id}, {unit[:-1]} {step:,}: {summary['n_episodes']} rows, "
        f"seed {evaluation.seed}"
    )
    print_text(f"  {what:<12} {summary['mean_return']:.4f} ± {summary['std_return']:.4f}")
    print_text(f"  {'length':<12} {summary['mean_length']:.1f} tokens")
    same = evaluation.seed == recorded.get("seed") and summary["n_episodes"] == recorded.get("n_episodes")
    if same and isinstance(recorded.get("mean_return"), (int, float)):
        exact = "reproduced exactly" if summary["mean_return"] == recorded["mean_return"] else "NOT reproduced"
        print_text(
            f"  in training {recorded['mean_return']:.4f}: {'reproduced exactly' if exact else 'NOT reproduced'}"
        )
    if table is not None:
        print_text(f"  {'sampled':<12} reward {summary['sampled_reward']:.4f}, {n_samples} completions of each prompt")
        print_text(f"  {'pass@1':<12} {summary['pass@1']:.4f}  (a reward of at least {pass_at:g})")
        if n_samples > 1:
            print_text(f"  {f'pass@{n_samples}':<12} {summary[f'pass@{n_samples}']:.4f}")
        if summary["most_reward"] < pass_at:
            most = summary["most_reward"]
            print_text(f"  no completion earned {pass_at:g}, the highest reward was {most:.4f}; see --pass-at")
        print_table(make_console(), table)


def _sampled(algorithm: Any, n_rows: int, n: int, pass_at: float, seed: int) -> tuple[dict[str, float], PlainTable]:
    """Sample `n` completions of each prompt; return their rewards and pass rates, and a table with a few of them."""
    scored = algorithm.sampled(n_rows, n, seed)
    groups = scored.rewards.reshape(-1, n)
    right = (groups >= pass_at).sum(1)
    found = {
        "sampled_reward": float(groups.mean()),
        "most_reward": float(groups.max()),
        "sampled_length": float(np.mean([len(ids) for ids in scored.ids])),
        "pass@1": pass_rate(right, n, 1),
        f"pass@{n}": pass_rate(right, n, n),
    }
    table = make_table("reward", "prompt", "completion")
    for i in range(min(_SHOWN, len(groups))):
        j = i * n
        texts = (one_line(text, _LONGEST) for text in (scored.prompts[i], scored.texts[j]))
        table.add_row(f"{scored.rewards[j]:.3f}", *texts)
    return found, table


def pass_rate(right: np.ndarray, n: int, k: int) -> float:
    """Return pass@k, where `right` of each prompt's `n` completions are correct.

    Chen et al. 2021, arXiv:2107.03374, eq. 1.
    """
    misses = np.ones(len(right))
    for i in range(k):
        misses *= np.maximum(n - right - i, 0) / (n - i)
    return float((1.0 - misses).mean())


def generate(
    path: Path,
    prompts: list[str],
    n: int,
    seed: int | None,
    settings: dict[str, Any],
    as_json: bool,
    chat: bool,
    imports: list[str],
) -> None:
    """Complete `prompts`, or the lines of standard input, and print the completions. With `chat`, prompts are JSON."""
    import_modules(imports)
    path = best_of(path) if path.is_dir() else path
    header = known_header(path)
    if not is_language(header):
        raise UsageError(
            f"{path} must hold a language model, got {header['algorithm']}; use `rlox eval` for its policy"
        )
    prompts = prompts or [line for line in sys.stdin.read().splitlines() if line]
    if not prompts:
        raise UsageError("PROMPT must be given, or lines on standard input")
    rows: list[Any] = [_chat(prompt, i) for i, prompt in enumerate(prompts)] if chat else prompts
    config = _run(path, header, imports)
    algorithm = restore_language(resolve(entry_of(header["algorithm"]).cls), config, path, acts=True)
    completed = algorithm.generate(rows, n, seed=seed, **settings)
    for row, texts in zip(rows, completed, strict=True):
        prompt = row["prompt"] if chat else row
        if as_json:
            print(jsonlib.dumps({"prompt": prompt, "completions": texts}))
            continue
        for text in texts:
            print(text if chat else f"{prompt}{text}")


def _chat(text: str, row: int) -> dict[str, Any]:
    """Return a chat that is given as JSON, as a row of a dataset."""
    names = ("prompt", *COLUMNS)
    try:
        found = jsonlib.loads(text)
    except (ValueError, RecursionError) as e:
        raise UsageError(f"PROMPT {row} must be JSON with --chat, got {shown(text)} ({one_line(e)})") from e
    given = found if isinstance(found, dict) else {"prompt": found}
    if not isinstance(given.get("prompt"), list) or not given.keys() <= {*names}:
        raise UsageError(
            f"PROMPT {row} must be a list of messages with --chat, or an object with {', '.join(names)}, got "
            f"{shown(found)}"
        )
    return {name: given.get(name) for name in names}


def _run(path: Path, header: dict[str, Any], imports: list[str]) -> RunConfig:
    """Return the configuration of the run that wrote a checkpoint."""
    run = header.get("run")
    if not isinstance(run, dict):
        raise UsageError(f"{path} must be a checkpoint of `rlox train`, which holds its run's configuration")
    require_typed(map(str, run.get("imports") or ()), imports, path)
    import_modules(imports)
    config, _ = configuration(run, imports, path)
    # Here the model samples by itself: a server may be gone, or used by another training by now.
    return replace(config, **NO_SAMPLER)
