"""Shared code of on-policy algorithms such as PPO and A2C: their loop, rollouts, one optimiser, normalisation."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, ClassVar

from rlox.checkpoint.streams import Stream
from rlox.collectors import RewardFn, RolloutCollector
from rlox.collectors.vec_normalize import VecNormalize
from rlox.compiled import NativeOptimizer, NativePolicy, obstacle
from rlox.compiled.guard import find_difference
from rlox.gpu.collection import GpuPolicy, HostCollection
from rlox.kernels.nn.policy_gradient import n_parameters
from rlox.kernels.rng import Rng
from rlox.nn.modules import may_have_gpu
from rlox.processes.failures import Diverged
from rlox.training.agent import Agent
from rlox.training.algorithm import choose_update, require_finite, to_floats

if TYPE_CHECKING:
    from torch import nn

    from rlox.collectors.rollout import RolloutBatch
    from rlox.envs import EnvSpec
    from rlox.nn.optimizers import FlatOptimizer


def on_policy(algorithm) -> dict[str, float]:
    """Collect and update until the horizon is reached or a callback stops the training. Returns the last metrics.

    Raises
    ------
    FloatingPointError
        When a metric of an update is not finite: the weights cannot be trusted then. Saved files are not touched.
    """
    c, callbacks, ranks = algorithm.counters, algorithm.callbacks, algorithm.ranks
    hooks = ranks if ranks.joined else callbacks  # ranks call hooks, and learn their answers, together
    metrics: dict[str, float] = {"mean_reward": c.mean_reward}
    update = choose_update(algorithm)
    algorithm.collector.env_steps = c.env_steps
    go_on = hooks.call_hook("on_training_start", algorithm=algorithm)
    algorithm.backend.require_unchanged("train")
    since, since_steps = time.perf_counter(), c.env_steps
    while go_on and c.env_steps < c.end:
        started, cpu, c.in_round = time.perf_counter(), time.process_time(), 0
        try:
            batch = algorithm.collector.collect(algorithm.actor, algorithm.config.n_steps)
            if algorithm._host is not None:
                batch = algorithm._host.place(batch)
        except Diverged:
            raise
        except Exception as e:
            # An environment failed, not the learner, so the weights of the last update are worth keeping.
            if not ranks.joined:
                callbacks.on_collection_error(algorithm=algorithm, error=e)
            raise
        returns, lengths = batch.episode_returns, batch.episode_lengths
        if ranks.joined:
            returns, lengths = ranks.episodes(returns, lengths)
            if algorithm.normalizer is not None:
                ranks.merge(algorithm.normalizer)
        collected = time.perf_counter()
        c.in_round = batch.n_taken * ranks.size
        c.env_steps += c.in_round
        c.ended(returns, lengths)
        callbacks.call_hook("on_rollout_end", algorithm=algorithm, batch=batch)
        updating = time.perf_counter()
        losses = to_floats(update(batch))
        if ranks.joined:
            losses = ranks.metrics(losses)
        c.updates += 1
        now = time.perf_counter()
        require_finite(losses, algorithm)
        metrics = {
            "mean_reward": c.mean_reward,
            "mean_length": c.mean_length,
            **losses,
            **algorithm.schedule_values(c.progress),
            **algorithm.collector.metrics(),
            "time/steps_per_second": (c.env_steps - since_steps) / (now - since),
            "time/collect_s": collected - started,
            "time/update_s": now - updating,
            "time/cpu_s": time.process_time() - cpu,
        }
        go_on = hooks.call_hook(
            "on_step", algorithm=algorithm, step=c.env_steps, reward=metrics["mean_reward"], metrics=metrics
        )
        # Evaluation and saving do not count towards the training's speed.
        since += time.perf_counter() - now
    algorithm.backend.require_unchanged("train")
    hooks.call_hook("on_training_end", algorithm=algorithm)
    return metrics


class OnPolicyAlgorithm(Agent):
    """Base class of algorithms that learn from the newest experience of the current policy.

    A custom `policy` defines ``get_action_and_logprob``, ``get_value`` and ``get_logprob_and_entropy`` (see
    `rlox.nn.policies`). ``update(batch)`` receives a `rlox.RolloutBatch`; so does ``update_native``, which
    runs the same as a kernel. A subclass that overrides only ``update`` learns with PyTorch. Its rollouts, and those
    with ``backend="torch"``, are still collected by the kernel if the kernel can compute the policy.

    Parameters
    ----------
    env_id : str or callable
        A native id, any gymnasium id, or a callable that returns a ``gymnasium.Env``.
    n_envs : int
        Number of parallel environments.
    seed : int
        Determines initial weights, environments, actions, and what each update sees.
    policy : nn.Module, optional
        A custom module instead of the one that fits the environment; the family documents what it must define. It is
        moved to the device and trained in place.
    logger : LoggerCallback, path, str or list, optional
        A `LoggerCallback` receives every metric. A folder becomes a run folder as `rlox train` writes it, with
        ``config.yaml``, ``metrics.jsonl`` and ``checkpoints``. ``"mlflow"``, ``"wandb"``, ``"tensorboard"`` and
        ``"csv"`` mirror its record; without a folder, a new one below ``outputs`` is created. A list may contain a
        folder and several of these.
    callbacks : list of Callback, optional
        Called in order, the logger last.
    device : str
        ``cpu``, ``cuda``, or ``auto``: CUDA if it is available, and the policy has a million parameters or more, or PPO
        or A2C has 1,024 environments or more that can be there (see `env_backend`).
    backend : str
        ``torch``; ``native``: a kernel collects and runs the updates that the PyTorch `update` defines; ``auto``:
        native if it is exact for the given arguments, regardless of callbacks and loggers. If a function of `update`
        was edited, replaced or overridden, PyTorch is used (see `rlox.compiled.guard`). Replacing a function after a
        native algorithm was created is an error, and so is converting its `policy`, freezing it or adding hooks to it.
        The attributes `backend` and `backend_reason` contain the chosen backend and the reason.
    threads : int
        PyTorch's CPU threads while training, restored afterwards; 0 leaves them unchanged.
    compile : bool
        Whether PyTorch compiles the losses (`rlox.nn.compiling`), which takes about ten seconds at the first update.
    env_kwargs : dict, optional
        Keyword arguments of ``gymnasium.make``.
    reward_fn : callable or str, optional
        Replaces the rewards for learning (see `rlox.collectors.RolloutCollector`). ``auto`` takes the signs of rewards
        in ``ALE/…`` games, where ``hidden_sizes`` is also empty by default, and the rewards themselves elsewhere. None
        always takes the rewards themselves.
    env_wrappers : sequence, optional
        Wrappers, in order: classes, ``"Name"`` of gymnasium, ``"module:Name"`` or ``{"Name": {"argument": value}}``.
    env_workers : int
        Processes that step foreign environments; 0 steps them in this process.
    env_backend : str
        ``gymnasium``, ``envpool``, ``tensor``, or ``auto``: native if the environment has a native version, else
        gymnasium; with ``device="cuda"`` tensor where that is possible. With ``tensor``, environments and rollouts stay
        on the device (PPO, A2C and MAPPO). Evaluation uses one environment of ``auto``, if it exists.
    remote : RemoteConfig, optional
        Addresses of workers on other machines that run the environments (``rlox worker``). Evaluation runs here.
    config : Config, optional
        All hyper-parameters, as the algorithm's ``Config``.
    **hyper_parameters
        Instead of `config`: any of its fields; the others have their defaults.

    Raises
    ------
    TypeError, ValueError
        For an unknown hyper-parameter, a value of the wrong type or out of range, an unknown environment, or a policy
        that does not fit the environment.
    """

    _loop = staticmethod(on_policy)
    _stream = Stream.PERMUTATION
    _masks = True
    _resident: ClassVar[bool] = False  # whether it collects in environments on a device (`rlox.envs.tensor`)
    _acting: NativePolicy | None = None  # acts for the policy that PyTorch trains, if a kernel can
    _host: HostCollection | None = None  # collects on the host for a GPU

    collector: RolloutCollector
    normalizer: VecNormalize | None = None

    def _choose_env_device(self, where: str, device: str, reward_fn: RewardFn | None) -> str | None:
        options = self.env_options
        if not self._resident or options.backend not in ("auto", "tensor"):
            return super()._choose_env_device(where, device, reward_fn)
        if device == "auto" and options.backend == "auto" and not may_have_gpu():
            return None
        import torch

        from rlox.collectors.tensor_rollout import find_resident_obstacle

        obstacle = find_resident_obstacle(self, reward_fn)
        if options.backend == "auto":  # without a GPU, the device is refused later
            return "cuda" if obstacle is None and torch.cuda.is_available() else None
        if obstacle is not None:
            raise ValueError(f"{where}: env_backend must be auto or gymnasium, got 'tensor': {obstacle}")
        if device != "auto":
            return device
        return "cuda" if torch.cuda.is_available() else "cpu"

    def _make_collector(self, n: int, reward_fn: RewardFn | None) -> RolloutCollector:
        c = self.config
        envs: Any = self.env_options.make(self.env_id, n, self.seed, self.ranks.size)
        if self.env_options.device is not None:
            from rlox.collectors.tensor_rollout import TensorRolloutCollector

            return TensorRolloutCollector(envs, self.seed, c.gamma, c.gae_lambda, reward_fn, self.env_options.compiled)
        collector = RolloutCollector(envs, n, self.seed, c.gamma, c.gae_lambda, reward_fn)
        collector.sequence_length = getattr(c, "sequence_length", None)
        return collector

    @property
    def actor(self) -> nn.Module | NativePolicy:
        """The actor of collection and evaluation."""
        acting = self._acting if self._host is None else self._host.find_kernel()
        return acting if acting is not None and acting.altered() is None else super().actor

    def _prepare_training(self) -> None:
        super()._prepare_training()
        if self._host is not None:
            self._host.refresh(always=True)
        if self._acting is not None and find_difference("acting", self.collector, files=False) is not None:
            self._acting = None

    def update_native(self, batch: RolloutBatch) -> dict[str, float]:
        """Run ``update`` as a kernel."""
        raise NotImplementedError

    def _kernel_obstacle(self, policy: nn.Module | None) -> str | None:
        return obstacle(self.spec, self.config, policy)

    def _network_sizes(self) -> tuple[int, int]:
        spec = self.spec
        return n_parameters(spec.obs_dim, spec.model_width, self.config.hidden_sizes, spec.continuous), 0

    def make_policy(self, rng: Rng, policy: nn.Module | None) -> None:
        made = self._make_one(self.spec, rng, policy)
        if self.backend == "native":
            self.native = made
        else:
            self._policy = made

    def _make_one(self, spec: EnvSpec, rng: Rng, policy: nn.Module | None, state_dim: int | None = None) -> Any:
        """Return a policy for the backend: a given module, or the default one for `spec`, with weights from `rng`.

        With `state_dim`, its critic reads as many numbers of its own.
        """
        c = self.config
        if policy is not None and (getattr(policy, "state_dim", 0) > 0) != c.recurrent:
            raise ValueError(
                f"{type(self).__name__}: policy must have a memory (state_dim > 0) if memory is lstm or gru, and none "
                f"otherwise, got {type(policy).__name__} and memory={c.memory}"
            )
        if self.backend == "native":
            return NativePolicy.make(spec, c, rng, state_dim) if policy is None else NativePolicy.adopt(policy, spec, c)
        from rlox.nn.policies import check_policy, make_policy

        if policy is None:
            return make_policy(spec, c, rng, state_dim)
        check_policy(policy, type(self).__name__)
        if spec.masked and not getattr(policy, "adds_noise_to_logits", False):
            raise ValueError(
                f"{type(self).__name__}: policy must be a subclass of rlox.nn.policies.DiscretePolicy or "
                f"MultiDiscretePolicy in an environment with action masks, got {type(policy).__name__}"
            )
        return policy

    def _make_optimizer(self, policy: Any) -> NativeOptimizer | FlatOptimizer:
        """Return an optimiser for the result of `_make_one`."""
        c = self.config
        if self.backend == "native":
            optimizer = NativeOptimizer(policy.net, c.learning_rate)
            optimizer.actor = policy
            return optimizer
        from rlox.nn.optimizers import FlatOptimizer

        return FlatOptimizer(policy.parameters(), c.learning_rate, kind=c.optimizer)

    def setup(self, rng: Rng) -> None:
        c = self.config
        self.optimizer = self._make_optimizer(self.native or self.policy)
        if self.native is not None:
            return
        if self.device != "cpu" and self.env_options.device is None:
            self._host = HostCollection(self, [GpuPolicy(self._policy, self.optimizer.flat, self.spec)])
        exact = (
            self.device == "cpu" and self.env_options.device is None and obstacle(self.spec, c, self._policy) is None
        )
        if exact and find_difference("acting", self.collector) is None:
            self._acting = NativePolicy.adopt(self._policy, self.spec, c, self.optimizer.flat.detach().numpy())
            self.backend.reason += "; a kernel collects"
