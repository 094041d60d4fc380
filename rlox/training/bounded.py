"""Policies of bounded continuous actions, as in SAC and TD3: creation, weights from other algorithms, kernel rounds."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from rlox.collectors.exploration import ActionNoise
from rlox.compiled import NativeBoundedPolicy
from rlox.kernels.nn.twin_critics import METRICS, n_parameters
from rlox.kernels.rng import Rng
from rlox.training.loops import Rounds
from rlox.training.schedules import follow_schedule

if TYPE_CHECKING:
    import torch
    from torch import nn

    from rlox.envs import EnvSpec
    from rlox.nn.networks import TwinQNetwork


def require_bounds(spec: EnvSpec, where: str) -> None:
    """Raise ValueError unless the bounds of the environment's continuous actions are finite and apart."""
    low, high = spec.act_low, spec.act_high
    if low is None or high is None:
        return
    with np.errstate(over="ignore", invalid="ignore"):
        width = high - low
    if not (np.isfinite(width) & (width > 0)).all():
        raise ValueError(
            f"{where}: the bounds of the environment's actions must be finite and apart, got {low.tolist()} to "
            f"{high.tolist()}; wrap it so that its action_space is such a Box, or take PPO, which needs no bounds"
        )


def make_bounded_policy(algorithm: Any, rng: Rng, policy: nn.Module | None) -> None:
    """Set `policy` to the class's `Policy` with the environment's bounds, and `native` if a kernel acts."""
    from torch import nn

    c, spec, where, kind = algorithm.config, algorithm.spec, type(algorithm).__name__, algorithm.Policy
    require_bounds(spec, where)
    if spec.image:
        raise ValueError(
            f"{where}: the environment's observations must be vectors, got images of shape {spec.obs_shape}; take "
            "PPO, which learns from images, or flatten small ones (env_wrappers=['FlattenObservation'])"
        )
    if policy is None:
        policy = kind(spec.obs_dim, spec.act_dim, c.hidden_sizes, c.activation, rng=rng)
    elif not isinstance(policy, nn.Module):
        raise TypeError(f"{where}: policy must be a torch.nn.Module, got {type(policy).__name__}")
    elif not isinstance(policy, kind):
        policy = kind(spec.obs_dim, spec.act_dim, net=policy)
    policy.bound_(spec.act_low, spec.act_high)
    algorithm._require_outputs(policy, kind.outputs_per_action * spec.act_dim, algorithm.outputs)
    algorithm.policy = policy
    if algorithm.backend == "native":
        algorithm.native = NativeBoundedPolicy(policy)


def make_critics(algorithm: Any, rng: Rng) -> tuple[TwinQNetwork, nn.Module, torch.Tensor]:
    """Create twin critics, their target network, and the flat tensor of its parameters; checkpoints store both.

    The target is copied before the optimisers move the online networks' parameters into one block.
    """
    from rlox.nn.networks import TwinQNetwork
    from rlox.nn.optimizers import flat_copy

    c, spec = algorithm.config, algorithm.spec
    critics = TwinQNetwork(spec.obs_dim, spec.act_dim, c.hidden_sizes, c.activation, rng).to(algorithm.device)
    target, block = flat_copy(critics)
    return algorithm.keep("critics", critics), algorithm.keep("target", target), block


def bounded_size(algorithm: Any) -> int:
    """Return the number of parameters of the default policy."""
    spec, gaussian = algorithm.spec, algorithm.Policy.outputs_per_action == 2
    return n_parameters(spec.obs_dim, spec.act_dim, algorithm.config.hidden_sizes, gaussian)[0]


def twin_critics_size(algorithm: Any) -> int:
    """Return the number of parameters of the networks that `make_critics` creates, without the target."""
    spec = algorithm.spec
    return n_parameters(spec.obs_dim, spec.act_dim, algorithm.config.hidden_sizes, False)[1]


def make_action_noise(algorithm: Any, n_envs: int) -> ActionNoise:
    """Create the configured action noise for `n_envs` environments."""
    c = algorithm.config
    return ActionNoise(algorithm.spec, n_envs, c.exploration_noise, c.noise_correlation)


def native_rounds(algorithm: Any, n_steps: int, names: Iterable[str] = (), **arguments: Any) -> Rounds:
    """Run `OffPolicyAlgorithm.rounds` as a kernel call, with the algorithm's additional hyper-parameters `names` and
    `arguments`."""
    counters, delay = algorithm.counters, getattr(algorithm.config, "policy_delay", 1)
    first = counters.updates + 1
    taken, table, update_s, returns, lengths = algorithm._kernel_rounds(
        n_steps, ("tau", "max_grad_norm", *names), **arguments
    )
    counters.env_steps += taken
    counters.in_round = algorithm.round_steps
    counters.updates += len(table)
    follow_schedule(algorithm.optimizers, algorithm.config, counters.progress)
    # A delayed policy reports metrics only for the updates in which it is updated.
    own = (first + np.arange(len(table))) % delay == 0
    columns = {name: x[own] if name.startswith("policy") else x for name, x in zip(METRICS, table.T, strict=False)}
    return Rounds(taken, returns, lengths, {name: x for name, x in columns.items() if len(x)}, update_s)


def fitted_policy(algorithm: Any, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return a checkpoint's policy weights with as many outputs per action as this algorithm's policy has.

    The means are kept. Standard deviations are dropped if this policy has none. If only this policy has them, they
    start at 1, before the tanh. IQL's standard deviations, which apply after the tanh, are taken over: near a mean of
    0, where tanh is the identity, that is the same.
    """
    layers = [int(match[1]) for name in arrays if (match := re.fullmatch(r"net\.(\d+)\.weight", name))]
    weight, bias = (f"net.{max(layers, default=0)}.{kind}" for kind in ("weight", "bias"))
    if algorithm._own_policy or not {weight, bias} <= arrays.keys():
        return arrays
    n, wide = algorithm.spec.act_dim, algorithm.Policy.outputs_per_action == 2
    found, log_std = dict(arrays), arrays.get("log_std")
    found.pop("log_std", None)
    was_wide = len(arrays[weight]) == 2 * n
    if was_wide and not wide:
        found |= {name: arrays[name][:n] for name in (weight, bias)}
    elif wide and len(arrays[weight]) == n:
        new = np.zeros(n, np.float32) if log_std is None else log_std
        found[weight] = np.concatenate([arrays[weight], np.zeros_like(arrays[weight])])
        found[bias] = np.concatenate([arrays[bias], new])
    had = was_wide or log_std is not None
    if had is not wide:
        why = "exploration_noise replaces them" if had else "it has none: they start at 1, before the tanh"
        warnings.warn(
            f"init_from: the standard deviations are not those of the checkpoint's policy, because {why}",
            RuntimeWarning,
            stacklevel=6,
        )
    return found
