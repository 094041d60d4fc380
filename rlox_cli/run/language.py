"""A run of a language model: its model, rows and rewards, made of what the configuration names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rlox.checkpoint import load_checkpoint
from rlox.config import RunConfig
from rlox.distributed.ranks import apart
from rlox_cli.config.language import function, is_function, is_url
from rlox_cli.records.checkpoints import best_of

# What servers of rewards and completions ask for; a command line would show it to everyone.
_TOKEN, _SAMPLER_TOKEN = "RLOX_REWARD_TOKEN", "RLOX_SAMPLER_TOKEN"


def build_language(cls: Any, config: RunConfig) -> Any:
    """A new algorithm of `cls`."""
    found = _model(config)
    return cls(
        found[0], tokenizer=_tokenizer(config, found[1]), source=found[2], seed=config.seed, **_arguments(config)
    )


def restore_language(cls: Any, config: RunConfig, checkpoint: Path, acts: bool = False) -> Any:
    """The algorithm that `checkpoint` holds; without its rows and rewards where it only `acts`."""
    arguments = {"device": config.device, "threads": config.threads} if acts else _arguments(config)
    saved = load_checkpoint(checkpoint, mapped=True).header.get("model")
    if isinstance(saved, dict) and (saved.get("adapters") or saved.get("config") is None):
        # It holds only what was trained: the rest is where it was.
        arguments["model"], _, _ = _model(config)
    return cls.from_checkpoint(checkpoint, tokenizer=_tokenizer(config, None), **arguments)


def _arguments(config: RunConfig) -> dict[str, Any]:
    """What an algorithm's constructor and its `from_checkpoint` are both given."""
    assert config.dataset is not None
    own = None if config.eval.dataset is None else rows(config.eval.dataset, config.imports)
    return {
        "dataset": rows(config.dataset.source, config.imports),
        "eval_dataset": own,
        "device": config.device,
        "threads": config.threads,
        "config": config.algo,
        **rewards(config),
        **_sampler(config),
    }


def _sampler(config: RunConfig) -> dict[str, Any]:
    """The argument for an algorithm whose completions are sampled elsewhere."""
    if config.sampler is None:
        return {}
    from rlox.llm.backends import create_backend

    server = {} if config.sampler_url is None else {"url": config.sampler_url, "token": os.environ.get(_SAMPLER_TOKEN)}
    made = create_backend(
        config.sampler,
        folder=config.sampler_folder,
        tolerance=config.sampler_tolerance,
        on_failure=config.sampler_on_failure,
        **server,
    )
    return {"sampler": made}


def rewards(config: RunConfig) -> dict[str, Any]:
    """The arguments that a configuration's rewards are; none where it names none."""
    environment = {} if config.conversation is None else {"environment": function(config.conversation, config.imports)}
    if config.reward is None:
        return environment
    made = [_reward(name, config) for name in config.rewards]
    return {"reward_fn": made, "reward_weights": config.reward_weights, **environment}


def _reward(name: str, config: RunConfig) -> Any:
    if is_url(name):
        from rlox.llm import RemoteReward

        return RemoteReward(name, token=os.environ.get(_TOKEN))
    if is_function(name):
        return function(name, config.imports)
    from rlox.algorithms.reward_model import RewardModel

    path = Path(name)
    file = best_of(path) if path.is_dir() else path
    with apart():  # each rank has one of its own, which scores what that rank's model has written
        return RewardModel.from_checkpoint(file, device=config.device, threads=config.threads)


def rows(name: str, imports: list[str]) -> Any:
    """What ``dataset=`` names: a path, or what a function returns."""
    return function(name, imports)() if is_function(name) else name


def _model(config: RunConfig) -> tuple[Any, Any, str | None]:
    """Model, tokenizer and where they come from."""
    assert config.model is not None
    if is_function(config.model):
        made = function(config.model, config.imports)()
        model, tokenizer = made if isinstance(made, tuple) else (made, None)
        return model, tokenizer, None
    from rlox.llm import load_model

    found = load_model(config.model, "train")
    return found.module, found.tokenizer, found.source


def _tokenizer(config: RunConfig, own: Any) -> Any:
    if config.tokenizer is None:
        return own
    from rlox.llm import load_tokenizer

    return load_tokenizer(config.tokenizer, "train")
