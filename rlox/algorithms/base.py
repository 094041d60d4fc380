"""What every online algorithm shares: construction, training, acting, saving. The update is each algorithm's own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from rlox import loops
from rlox.callbacks import Callback, CallbackList
from rlox.checkpoint import Checkpoint, load_checkpoint, save_checkpoint, versions
from rlox.collectors import RewardFn, RolloutCollector
from rlox.config import Config
from rlox.envs import env_name
from rlox.evaluation import Evaluation, evaluate, require_mode, torch_threads
from rlox.kernels.rng import Rng
from rlox.logging import LoggerCallback
from rlox.optimizers import FlatAdam
from rlox.policies import ActorCritic, ContinuousPolicy, DiscretePolicy, check_policy
from rlox.streams import Stream

# Below this many parameters a GPU's launch latency costs more than its arithmetic saves.
_CUDA_PAYS_FROM = 1_000_000


class OnlineAlgorithm:
    """Base of algorithms that learn while they act.

    Parameters
    ----------
    env_id : str or callable
        A native id, any gymnasium id, or a callable that returns a ``gymnasium.Env``.
    n_envs : int
        Environments stepped side by side.
    seed : int
        Decides initial weights, environments, actions and minibatches.
    policy : nn.Module, optional
        A module with ``get_action_and_logprob``, ``get_value`` and ``get_logprob_and_entropy`` (see `rlox.policies`);
        by
        default the one that fits the action space. It is moved to the device and trained in place.
    logger : LoggerCallback, optional
        Given every metric.
    callbacks : list of Callback, optional
        Called in order, the logger last.
    device : str
        ``cpu``, ``cuda``, or ``auto``: CUDA where there is one and the policy has a million parameters or more.
    threads : int
        PyTorch's CPU threads while training, restored afterwards; 0 leaves them as they are.
    env_kwargs : dict, optional
        Keyword arguments of ``gymnasium.make``.
    reward_fn : callable, optional
        Replaces the rewards that are learned from (see `RolloutCollector`).
    **config
        Any field of the algorithm's ``Config``.

    Raises
    ------
    TypeError, ValueError
        For an unknown or ill-typed hyper-parameter, a value out of range, an unknown environment, an unfit policy.
    """

    name: ClassVar[str]
    Config: ClassVar[type[Config]]

    def __init__(
        self,
        env_id: str | Callable[[], Any],
        n_envs: int = 8,
        seed: int = 42,
        policy: nn.Module | None = None,
        logger: LoggerCallback | None = None,
        callbacks: Iterable[Callback] | None = None,
        *,
        device: str = "auto",
        threads: int = 1,
        env_kwargs: dict[str, Any] | None = None,
        reward_fn: RewardFn | None = None,
        **config: Any,
    ):
        where = type(self).__name__
        self.config = self.Config.from_kwargs(where, **config)
        self.env_id = env_id
        self.n_envs = n_envs
        self.seed = seed
        self.threads = threads
        self.env_kwargs = dict(env_kwargs or {})
        self.callbacks = CallbackList([*(callbacks or ()), *([logger] if logger is not None else ())])
        self.counters = loops.Counters()
        self.collector = RolloutCollector(
            env_id,
            n_envs,
            seed,
            self.config.gamma,
            self.config.gae_lambda,
            reward_fn,
            self.env_kwargs,
        )
        self.spec = self.collector.spec
        self._own_policy = policy is not None  # a checkpoint then holds weights that only its user can place
        self._lost_reward_fn: str | None = None  # what a checkpoint was trained with and cannot hold
        if policy is None:
            policy = self._default_policy()
        check_policy(policy, where)
        self.device = _choose_device(device, policy, where)
        self.collector.device = self.device
        self.policy = policy.to(self.device)
        self.optimizer = FlatAdam(self.policy.parameters(), self.config.learning_rate)
        self.rng = Rng(seed, Stream.PERMUTATION)

    def _default_policy(self) -> ActorCritic:
        c, rng = self.config, Rng(self.seed, Stream.INIT)
        if self.spec.discrete:
            return DiscretePolicy(
                self.spec.obs_dim,
                self.spec.n_actions,
                c.hidden_sizes,
                c.activation,
                c.ortho_init,
                rng,
            )
        return ContinuousPolicy(
            self.spec.obs_dim,
            self.spec.act_dim,
            c.hidden_sizes,
            c.activation,
            c.log_std_init,
            c.ortho_init,
            rng,
        )

    def update(self, batch) -> dict[str, torch.Tensor]:
        """One update from a rollout; scalar metrics, still tensors."""
        raise NotImplementedError

    def train(self, total_timesteps: int) -> dict[str, float]:
        """Train for `total_timesteps` more environment steps, rounded up to whole rollouts.

        Returns
        -------
        dict
            The last update's metrics; ``mean_reward`` is the mean undiscounted return of the last 100 completed
            episodes, NaN if none has ended.

        Raises
        ------
        FloatingPointError
            If a loss or gradient is no longer finite.
        """
        if total_timesteps < 1:
            raise ValueError(f"{type(self).__name__}.train: total_timesteps must be >= 1, got {total_timesteps}")
        if self._lost_reward_fn is not None:
            raise ValueError(
                f"{type(self).__name__}.train: the checkpoint was trained with reward_fn {self._lost_reward_fn}, which "
                "a file cannot hold; pass it to from_checkpoint(reward_fn=...)"
            )
        self.counters.horizon_start = self.counters.env_steps
        self.counters.horizon_steps = total_timesteps
        with torch_threads(self.threads):
            return loops.on_policy(self)

    @torch.inference_mode()
    def predict(self, obs: Any, deterministic: bool = True) -> np.ndarray | int:
        """Action for one observation (D,), or actions for a batch (B, D).

        Returns
        -------
        int or array
            Discrete: an int, or (B,) int64. Continuous: (A,) or (B, A) f32, clipped to the action space.

        Raises
        ------
        ValueError
            If the observation has another size.
        TypeError
            If `deterministic` and the policy is a user's module without ``mode``.
        """
        rows = np.asarray(obs, np.float32)
        single = rows.ndim == 1
        rows = rows[None] if single else rows
        if rows.ndim != 2 or rows.shape[1] != self.spec.obs_dim:
            raise ValueError(
                f"{type(self).__name__}.predict: obs must have shape ({self.spec.obs_dim},) or "
                f"(B, {self.spec.obs_dim}), got {np.shape(obs)}"
            )
        tensor = torch.from_numpy(np.ascontiguousarray(rows)).to(self.device)
        if deterministic:
            actions = require_mode(self.policy, f"{type(self).__name__}.predict")(tensor)
        else:
            actions = self.policy.get_action_and_logprob(tensor)[0]
        actions = actions.cpu().numpy()
        if not self.spec.discrete:
            actions = np.clip(actions, self.spec.act_low, self.spec.act_high)
        if single:
            return int(actions[0]) if self.spec.discrete else actions[0]
        return actions

    def evaluate(self, n_episodes: int = 20, seed: int | None = None, deterministic: bool = True) -> Evaluation:
        """Play whole episodes on a fresh environment, without disturbing training.

        `seed` None stands for 10_000 + the algorithm's own.
        """
        seed = 10_000 + self.seed if seed is None else seed
        with torch_threads(self.threads):
            return evaluate(
                self.policy,
                self.env_id,
                n_episodes,
                seed,
                deterministic,
                self.env_kwargs,
                self.device,
            )

    def save(self, path: str | os.PathLike, **header: Any) -> None:
        """Write a checkpoint (see `rlox.checkpoint`); `header` adds JSON values to its header."""
        c = self.counters
        generators = {"action": self.collector.rng.get_state(), "permutation": self.rng.get_state()}
        reward_fn = self.collector.reward_fn
        info = {
            "algorithm": self.name,
            "env": {"id": env_name(self.env_id), "n_envs": self.n_envs, "kwargs": self.env_kwargs},
            "seed": self.seed,
            "threads": self.threads,
            "config": self.config.to_dict(),
            "policy": "custom" if self._own_policy else "default",
            "reward_fn": self._lost_reward_fn if reward_fn is None else env_name(reward_fn),
            "counters": c.scalars(),
            "generators": generators,
            "versions": versions(),
            **header,
        }
        tensors = {
            "policy": {name: value.detach().cpu().numpy() for name, value in self.policy.state_dict().items()},
            "optimizer": self.optimizer.state(),
            "environment": self.collector.state() or {},
            "statistics": {
                "episode_returns": np.asarray(c.recent_returns, np.float64),
                "episode_lengths": np.asarray(c.recent_lengths, np.int64),
            },
            # A user's policy samples from PyTorch's generator.
            "generators": {} if isinstance(self.policy, ActorCritic) else {"torch": torch.get_rng_state().numpy()},
        }
        save_checkpoint(path, Checkpoint(info, tensors))

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike,
        env_id: str | Callable[[], Any] | None = None,
        policy: nn.Module | None = None,
        logger: LoggerCallback | None = None,
        callbacks: Iterable[Callback] | None = None,
        device: str = "auto",
        reward_fn: RewardFn | None = None,
    ):
        """Restore an algorithm; on a native environment it continues as if it had never stopped.

        Parameters
        ----------
        path : path
            The checkpoint.
        env_id : str or callable, optional
            By default the one it was trained on. Another one, and any foreign environment, starts with fresh episodes.
        policy : nn.Module, optional
            Needed, with the same parameters, where the checkpoint holds a user's own policy.
        reward_fn : callable, optional
            Needed to train on, where the checkpoint was trained with one.

        Raises
        ------
        FileNotFoundError, ValueError
            See `rlox.checkpoint.load_checkpoint`; also for another algorithm's checkpoint or a policy that does not
            fit.
        """
        checkpoint = load_checkpoint(path)
        header = checkpoint.header
        if header["algorithm"] != cls.name:
            raise ValueError(f"{cls.__name__}.from_checkpoint: {path} must hold {cls.name}, got {header['algorithm']}")
        if header["policy"] == "custom" and policy is None:
            raise ValueError(
                f"{cls.__name__}.from_checkpoint: {path} holds a policy of your own; pass policy=YourPolicy(...)"
            )
        env = header["env"]
        if env_id is None and ":" in env["id"]:
            # gymnasium imports the part before the colon, and a file must not decide what code runs.
            raise ValueError(
                f"{cls.__name__}.from_checkpoint: the environment {env['id']} of {path} names a module to import; "
                f"if you trust it, pass env_id={env['id']!r}"
            )
        algorithm = cls(
            env["id"] if env_id is None else env_id,
            env["n_envs"],
            header["seed"],
            policy,
            logger,
            callbacks,
            device=device,
            threads=header["threads"],
            env_kwargs=env["kwargs"],
            reward_fn=reward_fn,
            **header["config"],
        )
        algorithm._lost_reward_fn = None if reward_fn is not None else header.get("reward_fn")
        algorithm._restore(checkpoint, same_env=env_id is None or env_name(env_id) == env["id"])
        return algorithm

    def _restore(self, checkpoint: Checkpoint, same_env: bool) -> None:
        header, tensors = checkpoint.header, checkpoint.tensors
        weights = {name: torch.from_numpy(array.copy()) for name, array in tensors["policy"].items()}
        try:
            self.policy.load_state_dict(weights)
        except RuntimeError as e:
            raise ValueError(
                f"{type(self).__name__}.from_checkpoint: the policy does not fit the checkpoint: {e}"
            ) from e
        self.optimizer.set_state(tensors["optimizer"])
        for name, value in header["counters"].items():
            setattr(self.counters, name, value)
        self.counters.recent_returns.extend(tensors["statistics"]["episode_returns"].tolist())
        self.counters.recent_lengths.extend(tensors["statistics"]["episode_lengths"].tolist())
        self.collector.rng.set_state(header["generators"]["action"])
        self.rng.set_state(header["generators"]["permutation"])
        if "torch" in tensors["generators"]:
            torch.set_rng_state(torch.from_numpy(tensors["generators"]["torch"].copy()))
        if same_env and tensors["environment"] and self.collector.exact:
            self.collector.set_state(tensors["environment"])


def _choose_device(device: str, policy: nn.Module, where: str) -> torch.device:
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"{where}: device must be one of auto, cpu, cuda, got {device!r}")
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ValueError(
            f"{where}: device=cuda needs a GPU that this PyTorch ({torch.__version__}) can use; try device=cpu"
        )
    large = sum(p.numel() for p in policy.parameters()) >= _CUDA_PAYS_FROM
    return torch.device("cuda" if device == "cuda" or (device == "auto" and available and large) else "cpu")
