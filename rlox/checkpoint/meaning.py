"""What the weights of a checkpoint mean: settings that must be equal, although all shapes may be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlox.checkpoint import one_line

# Hyper-parameters that decide which weights and statistics an algorithm has, and those that decide what they mean.
DEFINES_WEIGHTS = (
    *("hidden_sizes", "critic_hidden_sizes", "residual_blocks", "n_critics", "target_network", "dueling", "noisy"),
    *("critic_head", "n_bins", "n_quantiles", "distribution", "n_atoms", "layer_norm", "critic_norm", "actor_norm"),
    *("memory", "memory_size", "memory_layers", "optimizer", "share_parameters", "agent_id", "critic", "value_norm"),
    *("size", "deter_dim", "stoch_dim", "stoch_classes", "hidden_dim", "lora_rank", "lora_targets"),
)
DEFINES_MEANING = (
    *("activation", "normalize_obs", "normalize_rewards", "fit_rewards", "norm_after", "unit_norm"),
    *("v_min", "v_max", "lora_alpha"),
)
# What an algorithm without these settings does.
_WITHOUT = {"normalize_rewards": False, "fit_rewards": False, "unit_norm": False}


def require_same_meaning(algorithm: Any, header: Mapping[str, Any], where: str) -> None:
    """Raise ValueError unless the weights of a checkpoint with `header` mean the same in `algorithm`.

    A setting that one of the two algorithms does not have is not compared, except for those of `_WITHOUT`.
    """
    config, has_critics = algorithm.config, "critics" in algorithm._parts
    names = ["normalize_obs", "critic_norm", "actor_norm", "critic_head", "distribution"]
    # The networks of other algorithms without critics rarely fit, which another message says.
    if has_critics or (header["algorithm"] == algorithm.name and not algorithm._own_policy):
        names.append("activation")
    if has_critics:
        names.append("normalize_rewards")
        if header["config"].get("fit_rewards"):  # a training may begin to fit rewards, but not stop
            names += ["fit_rewards", "v_max"]
    values = {getattr(config, name, "none") for name in ("critic_norm", "actor_norm", "critic_head", "distribution")}
    if values & {"layer", "batch", "batch_renorm"}:
        names.append("norm_after")
    if "categorical" in values:
        names += ["v_min", "v_max"]
    if getattr(config, "lora_rank", 0) and header["config"].get("lora_rank"):
        names.append("lora_alpha")
    if getattr(config, "unit_norm", False):  # otherwise the first update scales all weights
        names.append("unit_norm")
    for name in names:
        was, now = (own(name, _WITHOUT.get(name)) for own in (header["config"].get, vars(config).get))
        if was is not None and now is not None and was != now:
            raise ValueError(f"{where}: {name} must be the checkpoint's, {one_line(was)}, got {now}")
