"""Check what a run of a language model names: its model, its rows, its rewards."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from rlox.config import RunConfig, nearest
from rlox.llm.data import SUFFIXES
from rlox_cli.config.imports import import_modules

# The keys for a sampler, with the values that they have without one.
NO_SAMPLER = {item.name: item.default for item in fields(RunConfig) if item.name.partition("_")[0] == "sampler"}
_OWN = "rlox.llm.toy"  # its functions need no --import


def check_language(run: RunConfig, algo: str) -> None:
    """Check the keys that a run of a language model must set, and those that it must leave out.

    Raises
    ------
    ValueError
        If a rule is broken; the message has the key, the rule and the value.
    """
    samples = algo in ("grpo", "online_dpo")
    if run.model is None:
        raise ValueError(
            f"model must be chosen for algo={algo}, got null; try model=FOLDER, model=outputs/RUN or a name on the hub"
        )
    _require_model(run.model)
    if run.dataset is None:
        raise ValueError(f"dataset must be chosen for algo={algo}, got null; try dataset=data/rows.jsonl")
    if run.conversation is not None and algo != "grpo":
        raise ValueError(
            f"conversation must be null with algo={algo}, got {run.conversation}; only algo=grpo trains on them"
        )
    if samples and run.reward is None and run.conversation is None:
        raise ValueError(
            f"reward must be given for algo={algo}, got null; try reward=my_package:score with --import my_package, or "
            "reward=outputs/RUN of algo=reward_model"
        )
    for key, value, meant in (
        ("reward", None if samples else run.reward, "null"),
        ("buffer", run.buffer, "left out"),
        ("compile", run.compile, "false"),
        ("env.reward_fn", run.env.reward_fn, "null"),
        ("env.kwargs", run.env.kwargs, "left out"),
        ("env.wrappers", run.env.wrappers, "left out"),
        ("env.workers", run.env.workers, "0"),
        ("remote.addresses", run.remote.addresses, "[]"),
    ):
        if value:
            raise ValueError(f"{key} must be {meant} with algo={algo}, which trains a language model, got {value}")
    if run.conversation is not None and not is_function(run.conversation):
        raise ValueError(f"conversation={run.conversation} must be module:FUNCTION")
    for name in (run.model, run.dataset.source, run.eval.dataset, run.conversation, *run.rewards):
        if name is not None and is_function(name):
            function(name, run.imports)
    _check_sampler(run, algo, samples)
    for name in run.rewards:
        if not (is_function(name) or is_url(name) or Path(name).exists()):
            raise ValueError(f"reward={name} must be module:FUNCTION, a URL, or an existing run of a reward model")
    for key, name in (("dataset", run.dataset.source), ("eval.dataset", run.eval.dataset)):
        if name is not None and not is_function(name):
            _require_file(key, name)


def _check_sampler(run: RunConfig, algo: str, samples: bool) -> None:
    if run.sampler is None:
        _require_defaults(run, NO_SAMPLER, "without a sampler", "; try sampler=vllm")
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


def _require_defaults(run: RunConfig, keys: Mapping[str, Any], why: str, remedy: str = "") -> None:
    """Raise a ValueError unless each of `keys` has its default."""
    for key, default in keys.items():
        if (value := getattr(run, key)) != default:
            raise ValueError(f"{key} must be {'null' if default is None else default} {why}, got {value}{remedy}")


def refuse_language(run: RunConfig, algo: str) -> None:
    """Raise a ValueError if keys for language models are set with an algorithm that does not train one."""
    keys = dict.fromkeys(("model", "tokenizer", "reward", "reward_weights", "conversation")) | NO_SAMPLER
    _require_defaults(run, keys, f"with algo={algo}, which trains no language model")
    if run.eval.dataset is not None:
        raise ValueError(
            f"eval.dataset must be null with algo={algo}, which is evaluated on env, got {run.eval.dataset}"
        )


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


def is_url(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def is_function(name: str) -> bool:
    """Return whether `name` has the form ``module:FUNCTION``."""
    module, colon, attribute = name.partition(":")
    return bool(colon) and attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))


def function(name: str, imports: Iterable[str]) -> Any:
    """Return the function that ``module:FUNCTION`` names, from a module that was typed.

    Raises
    ------
    ValueError
        If the module was not typed, or the name does not exist or cannot be called.
    """
    module, _, attribute = name.partition(":")
    if module != _OWN and not any(f"{module}.".startswith(f"{typed}.") for typed in imports):
        raise ValueError(f"{name} names a module to import; if you trust it, add --import {module}")
    import_modules([module])
    home = sys.modules[module]
    if not callable(found := getattr(home, attribute, None)):
        public = [n for n in vars(home) if not n.startswith("_")]
        raise ValueError(f"{name} must be a function, but {module} has none of that name; {nearest(attribute, public)}")
    return found
