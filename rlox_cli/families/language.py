"""Language models: trained on rows of text, without an environment."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from rlox.algorithms import load
from rlox.callbacks import Callback, CompletionsCallback
from rlox.callbacks.loggers import RecordLogger
from rlox.checkpoint import one_line, read_header, trained_for
from rlox.config import EvalConfig, RunConfig, nearest
from rlox.distributed.ranks import in_one_process
from rlox.llm.data import SUFFIXES
from rlox.nn.modes import torch_threads
from rlox_cli.families import limits
from rlox_cli.families.environment import few_evaluations, spell
from rlox_cli.families.evaluation import print_reproduction
from rlox_cli.families.family import NO_SAMPLER, Estimate, Evaluation, Examination, Family, Start
from rlox_cli.families.imports import import_modules, is_function, load_function
from rlox_cli.families.received import is_url, require_rewards
from rlox_cli.records.checkpoints import best_of
from rlox_cli.records.runs import plain
from rlox_cli.terminal.console import PlainTable, TextConsole, make_table, print_table, print_text
from rlox_cli.terminal.errors import UsageError

# Environment variables with the tokens for reward and completion servers; a command line would show them to everyone.
_TOKEN, _SAMPLER_TOKEN = "RLOX_REWARD_TOKEN", "RLOX_SAMPLER_TOKEN"
_UPDATES = 2  # number of timed updates, after a first one
_SHOWN, _LONGEST = 5, 200  # completions in the table, and characters of each text
_SAMPLES = 4  # completions of each prompt
# What the evaluation of each algorithm measures for a row.
_MEASURES = {"sft": "log-prob", "reward_model": "accuracy", "dpo": "accuracy", "grpo": "reward", "online_dpo": "reward"}


class Language(Family):
    """Algorithms that train a language model."""

    counted, digits = "rows", 3  # rewards and accuracies are usually between 0 and 1
    completes_prompts = shards = True
    taken_over, starts_fresh = "the weights", "the reference start fresh, the reference as a copy of these weights"

    def check(self, run: RunConfig, algo: str, buffer: str | None) -> None:
        import_modules(run.imports)
        samples = algo in ("grpo", "online_dpo")
        if run.model is None:
            raise ValueError(
                f"model must be chosen for algo={algo}, got null; try model=FOLDER, model=outputs/RUN or a name on the "
                "hub"
            )
        _require_model(run.model)
        if run.model_dtype is not None and (run.algo.lora_rank is None or is_function(run.model)):
            why = "unless adapters learn (algo.lora_rank)" if run.algo.lora_rank is None else f"with model={run.model}"
            raise ValueError(f"model_dtype must be null {why}, got {run.model_dtype}")
        if run.dataset is None:
            raise ValueError(f"dataset must be chosen for algo={algo}, got null; try dataset=data/rows.jsonl")
        if run.conversation is not None and algo != "grpo":
            raise ValueError(
                f"conversation must be null with algo={algo}, got {run.conversation}; only algo=grpo trains on them"
            )
        if samples and run.reward is None and run.conversation is None:
            raise ValueError(
                f"reward must be given for algo={algo}, got null; try reward=my_package:score with --import "
                "my_package, or reward=outputs/RUN of algo=reward_model"
            )
        for key, value, meant in (
            ("reward", None if samples else run.reward, "null"),
            ("buffer", run.buffer, "left out"),
            ("compile", run.compile, "false"),
            ("env.reward_fn", run.env.reward_fn, "null"),
            ("env.kwargs", run.env.kwargs, "left out"),
            ("env.wrappers", run.env.wrappers, "left out"),
            ("env.workers", run.env.workers, "0"),
            ("env.backend", run.env.backend != "auto" and run.env.backend, "auto"),
            ("eval.max_steps", run.eval.max_steps, "null"),
            ("backend", run.backend == "native" and run.backend, "auto or torch"),
            ("remote.addresses", run.remote.addresses, "[]"),
        ):
            if value:
                raise ValueError(f"{key} must be {meant} with algo={algo}, which trains a language model, got {value}")
        of_transitions = {item.name: item.default for item in fields(run.dataset) if item.name != "source"}
        _require_defaults(run.dataset, of_transitions, f"with algo={algo}, which trains a language model", "dataset.")
        if run.conversation is not None and not is_function(run.conversation):
            raise ValueError(f"conversation={run.conversation} must be module:FUNCTION")
        for name in (run.model, run.dataset.source, run.eval.dataset, run.conversation, *run.rewards):
            if name is not None and is_function(name):
                load_function(name, run.imports)
        _check_sampler(run, algo, samples)
        for name in run.rewards:
            if not (is_function(name) or is_url(name) or Path(name).exists()):
                raise ValueError(f"reward={name} must be module:FUNCTION, a URL, or an existing run of a reward model")
        for key, name in (("dataset", run.dataset.source), ("eval.dataset", run.eval.dataset)):
            if name is not None and not is_function(name):
                _require_file(key, name)

    def build(self, cls: Any, config: RunConfig, folder: Path) -> Any:
        model, tokenizer, source = _model(config)
        tokenizer = _tokenizer(config, tokenizer)
        return cls(model, tokenizer=tokenizer, source=source, seed=config.seed, **_arguments(config))

    def restore(self, config: RunConfig, checkpoint: Path, trusted: bool, acts: bool = False) -> Any:
        """As `Family.restore`; without its rows and rewards if the model only `acts`."""
        arguments = {"device": config.device, "threads": config.threads} if acts else _arguments(config)
        return self._load(config, checkpoint, arguments)

    def _load(self, config: RunConfig, checkpoint: Path, arguments: dict[str, Any]) -> Any:
        saved = read_header(checkpoint).get("model")
        if isinstance(saved, dict) and (saved.get("adapters") or saved.get("config") is None):
            # It holds only the trained weights; the others are loaded from the original model.
            arguments["model"], _, _ = _model(config)
        return load(checkpoint, tokenizer=_tokenizer(config, None), **arguments)

    def recorded_task(self, header: dict[str, Any]) -> str | None:
        """Return the name of the rows."""
        env = run.get("env") if isinstance(run := header.get("run"), dict) else None
        return env.get("id") if isinstance(env, dict) else None

    def measure(self, algorithm: str) -> str:
        return _MEASURES.get(algorithm, "score")

    def warnings(self, algorithm: Any, config: RunConfig, folder: Path) -> Iterator[str]:
        # The default number is meant for longer runs, and the user has not chosen it.
        if (n := config.eval.n_points) != EvalConfig.n_points and (calls := self.callback_calls(config)) < n:
            yield few_evaluations(config, calls)
        c, rows, model = config.algo, algorithm.rows, algorithm.model
        if c.batch_size > len(rows):
            yield f"algo.batch_size={c.batch_size:,} is more than the dataset has, {len(rows):,} rows: some repeat"
        if hasattr(c, "max_new_tokens") and not (model.eos or c.stop):
            yield (
                f"nothing ends a completion: the model and its tokenizer have no end of sequence, so every completion "
                f"has {c.max_new_tokens} tokens"
            )
        if config.sampler is not None and getattr(c, "sampler_correction", None) == "none":
            yield (
                f"algo.sampler_correction=none with sampler={config.sampler}: differences between its probabilities "
                "and the model's are not corrected; algo.sampler_correction=token_truncate corrects them"
            )
        if config.eval.dataset is None:
            yield "the model is evaluated on its training rows; eval.dataset=FILE names others"

    def make_callbacks(self, algorithm: Any, folder: Path, recorder: RecordLogger) -> list[Callback]:
        record = recorder.record
        return [CompletionsCallback(folder, lambda step, file: record.checkpoint(step, "completions", file))]

    def round_steps(self, config: RunConfig) -> int:
        return 1

    def examine(self, algorithm: Any, config: RunConfig, start: Start, scratch: Path) -> Examination:
        with torch_threads(config.threads):
            rewards, doubts = _samples(algorithm, config)
            training, cpu = _updates(algorithm)
            began = time.perf_counter()
            algorithm.scored(config.eval.n_episodes, config.eval_seed)
            evaluating = time.perf_counter() - began
        began = time.perf_counter()
        algorithm.save(file := scratch / "checkpoint.safetensors")
        saving = time.perf_counter() - began
        n, n_evaluations = config.total_timesteps, self.evaluations(config)
        parts = {
            "start": start.total,
            "training": n * cpu,
            "evaluation": n_evaluations * evaluating,
            "saving": (n_evaluations / 2 + 1) * saving,
        }
        wall = start.total + n * training + parts["evaluation"] + parts["saving"]
        memory, peak = _memory(algorithm, config)
        estimate = Estimate(parts, wall, 0.0, peak, 2 * file.stat().st_size, 0)
        warnings = [*_data_warnings(algorithm), *doubts]
        free, whose = limits.memory()[0], ""
        if algorithm.device != "cpu":
            from rlox_cli.families.gpu_memory import free_bytes

            free, whose = free_bytes(), " on the GPU"
        # With fsdp, the number of ranks that share the memory is not known here.
        alone = config.distributed != "fsdp"
        if alone and peak > free:
            warnings.append(
                f"it takes {limits.size(peak)} of memory, but only {limits.size(free)} are free{whose}: raise "
                "algo.accumulation, lower algo.batch_size, or train adapters with algo.lora_rank=16"
            )
        c = config.algo
        samples = f", {c.group_size} completions each" if hasattr(c, "group_size") else ""
        plan = (
            f"{spell(n, 'update')} of {spell(c.batch_size, 'row')}{samples}, "
            f"{n * c.batch_size / len(algorithm.rows):.1f} passes; "
            f"{spell(n_evaluations, 'evaluation')} of {spell(config.eval.n_episodes, 'row')}"
        )
        lines = [
            *_lines(algorithm),
            *rewards,
            ("memory", memory),
            ("backend", f"{algorithm.backend} on {algorithm.device}"),
            ("plan", plan),
        ]
        return Examination(lines, warnings, estimate)

    def show(self, path: Path, header: dict[str, Any], typed: Evaluation) -> None:
        raise UsageError(
            f"{path} must hold a policy, got {header['algorithm']}, a language model; `rlox generate` shows what it "
            "writes"
        )

    def evaluate(
        self, path: Path, header: dict[str, Any], typed: Evaluation, read_config: Callable[[], RunConfig]
    ) -> None:
        """Score the rows of the run's evaluation and print the result.

        If the run has a reward, also score sampled completions of each prompt.
        """
        for flag, value in (
            ("--stochastic", typed.stochastic),
            ("--video", typed.video),
            ("--render", typed.render),
            ("--max-steps", typed.max_steps),
            ("--predictions", typed.predictions),
        ):
            if value:
                raise ValueError(f"{flag} must be left out for a language model, which has no episodes")
        config, pass_at = read_config(), 1.0 if typed.pass_at is None else typed.pass_at
        require_rewards(config.rewards, typed.rewards, path)
        algorithm = self._load(config, path, _arguments(config, trains=False))
        for flag, given in (("--samples", typed.samples), ("--pass-at", typed.pass_at)):
            if given is not None and not algorithm.rewarded:
                raise UsageError(f"{flag} must be left out for {header['algorithm']}, which has no reward")
        earlier = header.get("evaluation")
        recorded: dict[str, Any] = earlier if isinstance(earlier, dict) else {}
        n_rows = typed.episodes or recorded.get("n_episodes") or config.eval.n_episodes
        evaluation = algorithm.scored(n_rows, typed.seed)
        summary = {**evaluation.summary(), "seed": evaluation.seed}
        table = None
        n_samples = typed.samples or (_SAMPLES if algorithm.rewarded else 0)
        if n_samples:
            n_prompts = min(n_rows, len(evaluation.returns))
            sampled, table = _sample(algorithm, n_prompts, n_samples, pass_at, evaluation.seed)
            summary |= sampled
        if typed.json:
            print(json.dumps(summary))
            return
        step, unit = trained_for(header)
        what = self.measure(header["algorithm"])
        print_text(
            f"{header['algorithm']} on {config.env.id}, {unit[:-1]} {step:,}: {summary['n_episodes']} rows, "
            f"seed {evaluation.seed}"
        )
        print_text(f"  {what:<12} {summary['mean_return']:.4f} ± {summary['std_return']:.4f}")
        print_text(f"  {'length':<12} {summary['mean_length']:.1f} tokens")
        if evaluation.seed == recorded.get("seed") and summary["n_episodes"] == recorded.get("n_episodes"):
            print_reproduction(summary["mean_return"], recorded, 4)
        if table is not None:
            print_text(
                f"  {'sampled':<12} reward {summary['sampled_reward']:.4f}, {n_samples} completions of each prompt"
            )
            print_text(f"  {'pass@1':<12} {summary['pass@1']:.4f}  (a reward of at least {pass_at:g})")
            if n_samples > 1:
                print_text(f"  {f'pass@{n_samples}':<12} {summary[f'pass@{n_samples}']:.4f}")
            if summary["most_reward"] < pass_at:
                most = summary["most_reward"]
                print_text(f"  no completion earned {pass_at:g}, the highest reward was {most:.4f}; see --pass-at")
            print_table(TextConsole(), table)


def _check_sampler(run: RunConfig, algo: str, samples: bool) -> None:
    if run.sampler is None:
        _require_defaults(run, NO_SAMPLER, "without a sampler", remedy="; try sampler=vllm")
        return
    if not samples:
        raise ValueError(f"sampler must be null with algo={algo}, which learns only from its rows, got {run.sampler}")
    if run.sampler == "tgi":
        raise ValueError(
            "sampler must be able to train, got tgi, which takes no new weights; use vllm or sglang, or use tgi from "
            "Python with rlox.BestOfN"
        )
    if run.sampler == "vllm-local":
        of_servers = {key: NO_SAMPLER[key] for key in ("sampler_url", "sampler_on_failure")}
        _require_defaults(run, of_servers, "with sampler=vllm-local, which is not a server")
    elif run.sampler_url is None:
        raise ValueError(
            f"sampler_url must be given for sampler={run.sampler}, got null; try sampler_url=http://127.0.0.1:8000"
        )


def _require_defaults(section: Any, keys: Mapping[str, Any], why: str, within: str = "", remedy: str = "") -> None:
    """Raise a ValueError unless each of `keys` has its default in the `section` that is named `within`."""
    for key, default in keys.items():
        if (value := getattr(section, key)) != default:
            raise ValueError(f"{within}{key} must be {plain(default)} {why}, got {plain(value)}{remedy}")


def _require_model(name: str) -> None:
    """Raise a ValueError for a path in an existing folder that leads to nothing; other names may be on the hub."""
    path = Path(name)
    if not (is_function(name) or path.exists()) and "/" in name and path.parent.is_dir():
        folders = [item.name for item in path.parent.iterdir() if item.is_dir()]
        hint = f"; {nearest(path.name, folders)}" if folders else ""
        raise ValueError(f"model={name} must be a folder, a run or a name on the hub, but {path.parent} has none{hint}")


def _require_file(key: str, name: str) -> None:
    path = Path(name)
    if not path.is_file():
        there = [item.name for item in path.parent.glob("*") if item.suffix.lower() in SUFFIXES]
        hint = f"; {nearest(path.name, there)}" if there else ""
        raise ValueError(f"{key}={name} must be an existing file of rows ({', '.join(SUFFIXES)}){hint}")


def _arguments(config: RunConfig, trains: bool = True) -> dict[str, Any]:
    """Return the arguments that an algorithm's constructor and its `from_checkpoint` share.

    The training rows are left out if it only evaluates, on rows of its own.
    """
    assert config.dataset is not None
    own = None if config.eval.dataset is None else rows(config.eval.dataset, config.imports)
    return {
        "dataset": rows(config.dataset.source, config.imports) if trains or own is None else None,
        "eval_dataset": own,
        "device": config.device,
        "threads": config.threads,
        "config": config.algo,
        **rewards(config),
        **_sampler(config),
    }


def _sampler(config: RunConfig) -> dict[str, Any]:
    """Return the argument for an algorithm whose completions are sampled elsewhere."""
    if config.sampler is None:
        return {}
    from rlox.llm.backends import create_backend

    server = {} if config.sampler_url is None else {"url": config.sampler_url, "token": os.environ.get(_SAMPLER_TOKEN)}
    backend = create_backend(
        config.sampler,
        folder=config.sampler_folder,
        tolerance=config.sampler_tolerance,
        on_failure=config.sampler_on_failure,
        **server,
    )
    return {"sampler": backend}


def rewards(config: RunConfig) -> dict[str, Any]:
    """Return the arguments for the configured rewards, if any."""
    environment = (
        {} if config.conversation is None else {"environment": load_function(config.conversation, config.imports)}
    )
    if config.reward is None:
        return environment
    functions = [_reward(name, config) for name in config.rewards]
    return {"reward_fn": functions, "reward_weights": config.reward_weights, **environment}


def _reward(name: str, config: RunConfig) -> Any:
    if is_url(name):
        from rlox.llm import RemoteReward

        return RemoteReward(name, token=os.environ.get(_TOKEN))
    if is_function(name):
        return load_function(name, config.imports)
    from rlox.algorithms.reward_model import RewardModel

    path = Path(name)
    file = best_of(path) if path.is_dir() else path
    with in_one_process():  # each rank has its own copy, which scores the completions of that rank's model
        return RewardModel.from_checkpoint(file, device=config.device, threads=config.threads)


def rows(name: str, imports: list[str]) -> Any:
    """Return the rows that ``dataset=`` names: a path, or the result of a function."""
    if not is_function(name):
        return name
    found = load_function(name, imports)()
    if found is None:
        raise ValueError(f"{name} must return rows of text or the path of a file, got None")
    return found


def _model(config: RunConfig) -> tuple[Any, Any, str | None]:
    """Return the model, its tokenizer and where they come from."""
    assert config.model is not None
    if is_function(config.model):
        result = load_function(config.model, config.imports)()
        model, tokenizer = result if isinstance(result, tuple) else (result, None)
        return model, tokenizer, None
    import torch

    from rlox.llm import load_model

    loaded = load_model(config.model, "train", getattr(torch, config.model_dtype or "float32"))
    return loaded.module, loaded.tokenizer, loaded.source


def _tokenizer(config: RunConfig, own: Any) -> Any:
    if config.tokenizer is None:
        return own
    from rlox.llm import load_tokenizer

    return load_tokenizer(config.tokenizer, "train")


def _lines(algorithm: Any) -> Iterator[tuple[str, str]]:
    model, rows = algorithm.model, algorithm.rows
    trained = sum(p.numel() for p in algorithm.policy.parameters() if p.requires_grad)
    total = sum(p.numel() for p in algorithm.policy.parameters())
    context = "" if model.context is None else f", context of {model.context:,} tokens"
    vocabulary = "" if model.vocabulary is None else f", {model.vocabulary:,} tokens"
    yield ("model", f"{model.kind}: {total:,} parameters, {trained:,} of them trained{vocabulary}{context}")
    lengths = np.array([len(ids) for ids in rows.prompts])
    behind = [len(ids) for group in (rows.completions, rows.chosen, rows.rejected) for ids in group]
    rest = f"; completions of {min(behind)} to {max(behind)}" if behind else ""
    yield (
        "rows",
        f"{len(rows):,}; prompts of {lengths.min()} to {lengths.max()} tokens, {lengths.mean():.0f} on average{rest}",
    )


def _data_warnings(algorithm: Any) -> Iterator[str]:
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
    if not found.ended.any():
        what = f"completion is cut off at max_new_tokens={config.algo.max_new_tokens}"
        if getattr(algorithm, "environment", None) is not None:
            what = f"conversation is cut off, at max_turns={config.algo.max_turns} or where its context is full"
        warnings.append(f"every {what}; none has ended")
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
    listed = ", ".join(f"{name} {limits.size(value)}" for name, value in parts.items() if value)
    shared = ""
    if config.distributed == "fsdp":
        among = sum(parts[name] for name in ("model", "gradients and optimiser", "reference"))
        shared = f"; the ranks share {limits.size(among)} of it, and the rest depends on the rows of a rank"
    return f"{limits.size(total)} in addition to Python and PyTorch: {listed}{shared}", total


def _sample(algorithm: Any, n_rows: int, n: int, pass_at: float, seed: int) -> tuple[dict[str, float], PlainTable]:
    """Sample `n` completions of each prompt; return their rewards and pass rates, and a table with a few of them."""
    scored = algorithm.sampled(n_rows, n, seed)
    groups = scored.rewards.reshape(-1, n)
    right = (groups >= pass_at).sum(1)
    results = {
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
    return results, table


def pass_rate(right: np.ndarray, n: int, k: int) -> float:
    """Return pass@k, where `right` of each prompt's `n` completions are correct.

    Chen et al. 2021, arXiv:2107.03374, eq. 1.
    """
    misses = np.ones(len(right))
    for i in range(k):
        misses *= np.maximum(n - right - i, 0) / (n - i)
    return float((1.0 - misses).mean())
