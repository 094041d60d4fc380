"""The environments of an acting algorithm: created in its construction, stored in its checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rlox.callbacks import Callback
from rlox.callbacks.loggers import LoggerCallback
from rlox.collectors import RewardFn, reward_name
from rlox.collectors.vec_normalize import VecNormalize
from rlox.config import ENV_BACKENDS, MOST_AT_ONCE, RemoteConfig, choice, integer, shown, usual_settings
from rlox.config.sb3 import refuse_policy_name
from rlox.envs.envpool_env import evaluation_kwargs
from rlox.multi_agent import is_multi_agent
from rlox.training import restoring
from rlox.training.algorithm import Algorithm
from rlox.training.table import ALGORITHMS, resolve

if TYPE_CHECKING:
    import numpy as np
    from torch import nn


def construct(
    algorithm: Algorithm,
    env_id: str | Callable[[], Any],
    n_envs: int,
    seed: int,
    policy: nn.Module | None,
    logger: LoggerCallback | None,
    callbacks: Iterable[Callback] | None,
    *,
    collector: Callable[..., Any],
    device: str = "auto",
    backend: str = "auto",
    threads: int = 1,
    compile: bool = False,
    env_kwargs: dict[str, Any] | None = None,
    reward_fn: RewardFn | None = "auto",
    env_wrappers: Sequence[Any] = (),
    env_workers: int = 0,
    env_backend: str = "auto",
    remote: RemoteConfig | None = None,
    **config: Any,
) -> None:
    """Construct an acting algorithm; arguments as for `rlox.training.on_policy.OnPolicyAlgorithm`.

    `collector` creates the object that collects experience, from the arguments common to all collectors.
    """
    where = type(algorithm).__name__
    refuse_policy_name(where, "env_id", env_id)
    refuse_policy_name(where, "policy", policy)
    if is_multi_agent(env_id) and not algorithm.Config.several_agents:
        raise ValueError(f"{where}: env_id must have one agent, got {env_id}, which has several; use MAPPO for it")
    usual = usual_settings(env_id)
    usual_reward = usual.pop("reward_fn", None)
    if isinstance(reward_fn, str) and reward_fn == "auto":
        reward_fn = usual_reward
    if config.get("config") is None:
        fields = algorithm.Config.__dataclass_fields__
        config = {**{name: value for name, value in usual.items() if name in fields}, **config}
    Algorithm.__init__(
        algorithm,
        env_id,
        seed,
        logger,
        callbacks,
        config,
        device=device,
        backend=backend,
        threads=threads,
        env_kwargs=env_kwargs,
        env_wrappers=env_wrappers,
        compile=compile,
    )
    if remote is not None and not isinstance(remote, RemoteConfig):
        raise TypeError(f"{where}: remote must be a RemoteConfig, got {shown(remote)}")
    algorithm.n_envs = integer(where, "n_envs", n_envs, 1, MOST_AT_ONCE)
    algorithm.env_workers = integer(where, "env_workers", env_workers, 0, algorithm.n_envs)
    algorithm.env_backend = choice(where, "env_backend", env_backend, ENV_BACKENDS)
    ranks = algorithm.ranks
    if ranks.joined and env_backend == "envpool":
        raise ValueError(f"{where}: env_backend must be auto or gymnasium with distributed=ddp, got 'envpool'")
    n_own = ranks.share(where, "n_envs", algorithm.n_envs)
    algorithm.collector = collector(
        env_id,
        n_own,
        algorithm.seed,
        reward_fn=reward_fn,
        env_kwargs=algorithm.env_kwargs,
        env_wrappers=algorithm.env_wrappers,
        env_workers=-(-algorithm.env_workers // ranks.size),
        env_backend=env_backend,
        **({} if remote is None else {"remote": remote}),
    )
    ranks.share_envs(algorithm.collector)
    spec = algorithm.spec = algorithm.collector.spec
    if spec.action_kind not in algorithm.actions:
        classes = {name: resolve(entry.cls) for name, entry in ALGORITHMS.items()}
        kinds = {name: cls.actions for name, cls in classes.items() if cls.Config.uses_dataset != "must"}
        able = [name.upper() for name, takes in kinds.items() if spec.action_kind in takes]
        raise ValueError(
            f"{where}: the environment's actions must be {' or '.join(algorithm.actions)}, got "
            f"{spec.describe_actions()}; {spec.action_kind} actions are for {', '.join(able)}"
        )
    if not algorithm.mixed_images:
        spec.refuse_mixed_images(where)
    if env_backend == "envpool":
        algorithm.eval_kwargs = evaluation_kwargs(algorithm.collector.env)
    algorithm._lost_reward_fn = None
    if algorithm._saved_shapes is not None and algorithm.config.replays == "sequences":
        restoring.require_model_widths(where, algorithm._saved_shapes, *algorithm.config.shape)
    elif algorithm._saved_shapes is not None:
        # Networks for images take features as input, and critics take actions in addition to the observation.
        n_in = None if spec.image else {spec.obs_dim, spec.obs_dim + (spec.act_dim or 0)}
        restoring.require_widths(where, algorithm._saved_shapes, algorithm.config.hidden_sizes, n_in)
    _normalize(algorithm)
    algorithm._assemble(policy, backend, device)


def _normalize(algorithm: Algorithm) -> None:
    """Set the normaliser of the algorithm and its collector, if there is anything to normalise."""
    c, spec = algorithm.config, algorithm.spec
    rewards = getattr(c, "normalize_rewards", False)
    if not (getattr(c, "normalize_obs", False) or rewards):
        return
    if c.normalize_obs and spec.image:
        raise ValueError(
            f"{type(algorithm).__name__}: normalize_obs must be false for images, which are scaled to [0, 1] already"
        )
    clip_rewards = getattr(c, "clip_rewards", math.inf)
    n_own = algorithm.n_envs // algorithm.ranks.size
    algorithm.normalizer = algorithm.collector.normalizer = VecNormalize(
        n_own, spec.obs_shape, c.gamma, c.normalize_obs, rewards, c.clip_obs, clip_rewards,
        spec.part if spec.rounded else None,
    )  # fmt: skip


def state(algorithm: Algorithm) -> tuple[dict[str, Any], dict[str, dict[str, np.ndarray]]]:
    """Return a checkpoint's data on environments and rewards: header values, and tensors by section."""
    reward_fn = algorithm.collector.reward_fn
    name = algorithm._lost_reward_fn if reward_fn is None else reward_name(reward_fn)
    return {"reward_fn": name}, {"environment": algorithm.collector.state() or {}}


def require_reward_fn(algorithm: Algorithm) -> None:
    """Raise ValueError if a checkpoint was trained with a `reward_fn` that was not passed again."""
    if algorithm._lost_reward_fn is not None:
        raise ValueError(
            f"{type(algorithm).__name__}.train: the checkpoint was trained with reward_fn {algorithm._lost_reward_fn}, "
            "which a file cannot store; pass it to from_checkpoint(reward_fn=...)"
        )
