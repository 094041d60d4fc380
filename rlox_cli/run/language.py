"""Build a run of a language model: its model, rows and rewards, as the configuration names them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rlox.checkpoint import load_checkpoint
from rlox.config import RunConfig
from rlox.distributed.ranks import in_one_process
from rlox_cli.config.language import function, is_function, is_url
from rlox_cli.records.checkpoints import best_of

# Environment variables with the tokens for reward and completion servers; a command line would show them to everyone.
_TOKEN, _SAMPLER_TOKEN = "RLOX_REWARD_TOKEN", "RLOX_SAMPLER_TOKEN"


def build_language(cls: Any, config: RunConfig) -> Any:
    """Return a new algorithm of the class `cls`."""
    found = _model(config)
    return cls(
        found[0], tokenizer=_tokenizer(config, found[1]), source=found[2], seed=config.seed, **_arguments(config)
    )


def restore_language(cls: Any, config: RunConfig, checkpoint: Path, acts: bool = False) -> Any:
    """Return the algorithm in `checkpoint`; without its rows and rewards if it only `acts`."""
    arguments = {"device": config.device, "threads": config.threads} if acts else _arguments(config)
    saved = load_checkpoint(checkpoint, mapped=True).header.get("model")
    if isinstance(saved, dict) and (saved.get("adapters") or saved.get("config") is None):
        # It holds only the trained weights; the others are loaded from the original model.
        arguments["model"], _, _ = _model(config)
    return cls.from_checkpoint(checkpoint, tokenizer=_tokenizer(config, None), **arguments)


def _arguments(config: RunConfig) -> dict[str, Any]:
    """Return the arguments that an algorithm's constructor and its `from_checkpoint` share."""
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
    """Return the argument for an algorithm whose completions are sampled elsewhere."""
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
    """Return the arguments for the configured rewards, if any."""
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
    with in_one_process():  # each rank has its own copy, which scores the completions of that rank's model
        return RewardModel.from_checkpoint(file, device=config.device, threads=config.threads)


def rows(name: str, imports: list[str]) -> Any:
    """Return the rows that ``dataset=`` names: a path, or the result of a function."""
    return function(name, imports)() if is_function(name) else name


def _model(config: RunConfig) -> tuple[Any, Any, str | None]:
    """Return the model, its tokenizer and where they come from."""
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
