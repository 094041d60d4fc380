"""`--check` for a run of a language model: its model, its rows, its rewards, and its costs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlox.collectors.evaluation import torch_threads
from rlox.config import RunConfig
from rlox_cli.preflight.estimate import Estimate, Start, evaluations
from rlox_cli.run import machine

_UPDATES = 2  # number of timed updates, after a first one


@dataclass(frozen=True)
class LanguageReport:
    """The findings, and the estimate for the whole run."""

    lines: list[tuple[str, str]]
    warnings: list[str]
    estimate: Estimate


def measure(algorithm: Any, config: RunConfig, start: Start, scratch: Path) -> LanguageReport:
    """Train `algorithm` for a few updates, and extrapolate to the whole run."""
    warnings = [*_warnings(algorithm)]
    with torch_threads(config.threads):
        samples = _samples(algorithm, config)
        training, cpu = _updates(algorithm)
        began = time.perf_counter()
        algorithm.scored(config.eval.n_episodes, config.eval_seed)
        evaluating = time.perf_counter() - began
    began = time.perf_counter()
    algorithm.save(file := scratch / "checkpoint.safetensors")
    saving = time.perf_counter() - began
    n, n_evaluations = config.total_timesteps, evaluations(config)
    parts = {
        "start": start.total,
        "training": n * cpu,
        "evaluation": n_evaluations * evaluating,
        "saving": (n_evaluations / 2 + 1) * saving,
    }
    wall = start.total + n * training + parts["evaluation"] + parts["saving"]
    memory, peak = _memory(algorithm, config)
    found = Estimate(parts, wall, 0.0, peak, 2 * file.stat().st_size, 0)
    warnings += samples[1]
    given = machine.memory()
    # With fsdp, the number of ranks that share the memory is not known here.
    alone = config.distributed != "fsdp"
    if given is not None and algorithm.device == "cpu" and alone and peak > given[0]:
        warnings.append(
            f"it takes {machine.size(peak)} of memory, but only {machine.size(given[0])} are free: raise "
            "algo.accumulation, lower algo.batch_size, or train adapters with algo.lora_rank=16"
        )
    return LanguageReport([*_lines(algorithm), *samples[0], ("memory", memory)], warnings, found)


def _lines(algorithm: Any) -> Iterator[tuple[str, str]]:
    model, rows = algorithm.model, algorithm.rows
    trained = sum(p.numel() for p in algorithm.policy.parameters() if p.requires_grad)
    total = sum(p.numel() for p in algorithm.policy.parameters())
    context = "" if model.context is None else f", context of {model.context:,} tokens"
    vocabulary = "" if model.vocabulary is None else f", {model.vocabulary:,} tokens"
    yield (
        "model",
        f"{model.kind}: {total:,} parameters, {trained:,} of them trained{vocabulary}{context}",
    )
    lengths = np.array([len(ids) for ids in rows.prompts])
    behind = [len(ids) for group in (rows.completions, rows.chosen, rows.rejected) for ids in group]
    rest = f"; completions of {min(behind)} to {max(behind)}" if behind else ""
    yield (
        "rows",
        f"{len(rows):,}; prompts of {lengths.min()} to {lengths.max()} tokens, {lengths.mean():.0f} on average{rest}",
    )


def _warnings(algorithm: Any) -> Iterator[str]:
    """Yield warnings about a tokenizer and rows that are read differently than one might expect."""
    tokenizer, rows = algorithm.model.tokenizer, algorithm.rows
    if tokenizer is not None and getattr(tokenizer, "eos_token_id", None) is None:
        yield "the tokenizer has no end of sequence (eos_token): nothing teaches the model to stop"
    for name, group in (("completion", rows.completions), ("chosen", rows.chosen), ("rejected", rows.rejected)):
        # A single token is only the end of the sequence.
        if empty := sum(len(ids) <= 1 for ids in group):
            yield f"column {name} is empty in {empty:,} of {len(rows):,} rows"
    if rows.chosen:
        same = sum(np.array_equal(a, b) for a, b in zip(rows.chosen, rows.rejected, strict=True))
        if same:
            yield f"chosen and rejected are the same in {same:,} of {len(rows):,} rows, from which nothing is learned"


def _samples(algorithm: Any, config: RunConfig) -> tuple[list[tuple[str, str]], list[str]]:
    """Return a line and warnings about the rewards of the first completions, before training."""
    if not algorithm.rewarded:
        return [], []
    from rlox.llm.losses import equal_rewards

    n = getattr(config.algo, "group_size", 2)
    found = algorithm.sampled(config.algo.batch_size, n, config.seed)
    groups = found.rewards.reshape(-1, n)
    lengths = np.array([len(ids) for ids in found.ids])
    line = (
        f"{groups.mean():.3f} ± {groups.std():.3f} ({groups.min():.3f} to {groups.max():.3f}) before training, of "
        f"{groups.size} completions of {lengths.mean():.0f} tokens on average"
    )
    warnings = []
    if equal_rewards(groups.reshape(1, -1))[0]:
        warnings.append(
            f"all {groups.size} completions earn {groups[0, 0]:g}: without differences nothing is learned; check "
            "whether the reward understands the model's output"
        )
    elif (equal := equal_rewards(groups).mean()) > 0.8:
        warnings.append(f"in {equal:.0%} of the groups all completions earn the same: nothing is learned from those")
    if (lengths >= config.algo.max_new_tokens).all():
        warnings.append(f"every completion is cut off at max_new_tokens={config.algo.max_new_tokens}; none has ended")
    return [("reward", line)], warnings


def _updates(algorithm: Any) -> tuple[float, float]:
    """Return the wall seconds and the CPU seconds of an update."""
    wall = cpu = 0.0
    for i in range(1 + _UPDATES):
        began, used = time.perf_counter(), time.process_time()
        algorithm.update(algorithm.sample())
        algorithm.counters.updates += 1
        if i:  # the first one allocates and compiles
            wall += time.perf_counter() - began
            cpu += time.process_time() - used
    return wall / _UPDATES, cpu / _UPDATES


def _memory(algorithm: Any, config: RunConfig) -> tuple[str, int]:
    """Return the memory of the training at its peak: a text with its parts, and the total in bytes."""
    from rlox.llm.models.decoding import decodes  # imports PyTorch

    c, model, rows = config.algo, algorithm.model, algorithm.rows
    weights = sum(p.numel() * p.element_size() for p in algorithm.policy.parameters())
    trained = sum(p.numel() for p in algorithm.policy.parameters() if p.requires_grad)
    reference = algorithm.reference
    copied = 0 if reference is None or reference.own_module is None else weights
    longest = max(len(ids) for ids in rows.prompts) + max(
        (len(ids) for group in (rows.completions, rows.chosen, rows.rejected) for ids in group),
        default=getattr(c, "max_new_tokens", 0),
    )
    sequences = c.batch_size * getattr(c, "group_size", 1 if algorithm.task == "texts" else 2)
    parts = {"model": weights, "gradients and optimiser": 12 * trained, "reference": copied}
    if model.config is not None:
        text = model.config.get_text_config()
        at_once = -(-sequences // (c.accumulation * getattr(c, "n_minibatches", 1)))
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        if hasattr(c, "max_new_tokens"):
            parts["cache"] = 2 * 4 * text.num_hidden_layers * heads * width * sequences * longest
            with torch_threads(algorithm._threads):
                parts["decoder"] = weights if decodes(model, longest) else 0
        # Logits, their exponentials and their gradient, in f32.
        parts["logits"] = 3 * 4 * at_once * longest * text.vocab_size
        # What each layer keeps for the gradient: about twenty times the width of a token.
        kept = 2 if c.gradient_checkpointing else 20
        parts["activations"] = 4 * kept * at_once * longest * text.hidden_size * text.num_hidden_layers
    total = sum(parts.values())
    listed = ", ".join(f"{name} {machine.size(value)}" for name, value in parts.items() if value)
    shared = ""
    if config.distributed == "fsdp":
        among = sum(parts[name] for name in ("model", "gradients and optimiser", "reference"))
        shared = f"; the ranks share {machine.size(among)} of it, and the rest depends on the rows of a rank"
    return f"{machine.size(total)} in addition to Python and PyTorch: {listed}{shared}", total
