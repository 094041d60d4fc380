"""Shared code of DQN, SAC and TD3: replayed transitions, policies of bounded actions, whole rounds in a kernel."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rlox.buffers import buffer_class
from rlox.checkpoint import Checkpoint, one_line
from rlox.checkpoint.counters import interpolate
from rlox.collectors import ReplayCollector, RewardFn
from rlox.collectors.exploration import ActionNoise
from rlox.compiled import NativeActor, NativeBoundedPolicy
from rlox.compiled.guard import find_difference, find_update_difference
from rlox.config.base import SCHEDULES
from rlox.envs.spec import require_bounds
from rlox.gpu.acting import Follower, choose_actor
from rlox.gpu.devices import CUDA_PAYS_FROM, UPDATE_PAYS_FROM
from rlox.gpu.memories import place_memory
from rlox.gpu.sampled import SampledUpdates
from rlox.kernels.buffers.replay import ReplayBuffer
from rlox.kernels.nn.core import MAX_HIDDEN
from rlox.kernels.nn.twin_critics import n_parameters
from rlox.kernels.rng import Rng
from rlox.nn.batch import TransitionBatch
from rlox.nn.modes import evaluating
from rlox.nn.modules import load_weights_
from rlox.offline.mixing import identity, join_batches
from rlox.training.backend import SeparateNetworks
from rlox.training.replay import ReplayAgent, Rounds

if TYPE_CHECKING:
    from torch import nn

    from rlox.nn.actors import BoundedPolicy
    from rlox.nn.graphed_acting import GraphedPolicy


# Methods that the kernel's `rounds` replaces; if a subclass overrides one of them, it must be called.
_AT_ONCE = ("_explore", "sample", "update", "update_native")


class OffPolicyAlgorithm(SampledUpdates, ReplayAgent, SeparateNetworks):
    """Base class of algorithms that learn from a replay memory of transitions of any policy.

    ``update(batch)`` receives a `rlox.nn.batch.TransitionBatch`, with normalised observations if the configuration asks
    for it; rewards only with `normalize_rewards`. ``update_native``, if defined, runs the same as a kernel.

    The default policy is a `Policy` of bounded actions; algorithms with other policies override `make_policy`. The
    memory stores actions in the environment's units, as they were taken; a bounded policy and its critics see them in
    [-1, 1].

    With a dataset, round(`dataset_share` * B) of every batch's B rows are drawn from it and the rest from the memory,
    with the run's own generator: the symmetric sampling of RLPD (Ball et al. 2023, arXiv:2302.02948, section 4.1).
    Updates begin after `learning_starts`, once the memory has as many transitions as a batch takes from it. The
    dataset's rows are single steps and are drawn uniformly, independently of the memory's n-step returns and
    priorities, and its rewards must be on the environment's scale. For a policy from `init_from`, set
    ``learning_starts=0``, so that it acts from the first step.

    Parameters
    ----------
    env_id, n_envs, seed, policy, logger, callbacks, **arguments
        As for `rlox.training.on_policy.OnPolicyAlgorithm`, including ``config``.
    buffer : str, BufferConfig, mapping or Buffer, optional
        The replay memory: a name (``uniform``, ``prioritized``, ``mmap``, or a registered one), its configuration, the
        configuration as a mapping, or the memory itself. Uniform by default.
    buffer_size, n_step : int, optional
        Short for the configuration's ``size`` and ``n_step``.
    prioritized : bool, optional
        True is short for ``buffer="prioritized"``.
    dataset : OfflineDataset, optional
        A dataset, for example from `rlox.open_dataset`, without normalised observations (``normalize=False``), for an
        algorithm whose configuration has a `dataset_share`. Checkpoints do not contain it: pass the same dataset to
        `from_checkpoint` to continue training.

    Raises
    ------
    TypeError, ValueError
        As `OnPolicyAlgorithm`; also for an unknown buffer, or a buffer that is smaller than a batch.
    """

    _follower: Follower | None = None  # acts on the CPU for a policy on a GPU
    _graphed_policy: GraphedPolicy | None = None  # acts on a GPU
    Policy: ClassVar[type[BoundedPolicy] | None] = None  # the class of policy that `make_policy` creates
    _outputs: ClassVar[str] = ""  # description of the outputs of this policy's network, for messages
    _usual_memory = "uniform"

    def _make_collector(self, n: int, reward_fn: RewardFn | None) -> ReplayCollector:
        envs = self.env_options.make(self.env_id, n, self.seed, self.ranks.size)
        return ReplayCollector(envs, n, self.seed, reward_fn=reward_fn)

    # ---- networks

    def make_policy(self, rng: Rng, policy: nn.Module | None) -> None:
        """Set `policy` to the class's `Policy` with the environment's bounds, and `native` if a kernel acts."""
        from torch import nn

        c, spec, where, kind = self.config, self.spec, type(self).__name__, self.Policy
        assert kind is not None
        require_bounds(spec, where)
        if spec.image:
            raise ValueError(
                f"{where}: the environment's observations must be vectors, got images of shape {spec.obs_shape}; take "
                "PPO, which learns from images, or flatten small ones (env_wrappers=['FlattenObservation'])"
            )
        if policy is None:
            policy = kind(spec.obs_dim, spec.act_dim, c.hidden_sizes, c.activation, rng=rng, net=self._make_net(rng))
        elif not isinstance(policy, nn.Module):
            raise TypeError(f"{where}: policy must be a torch.nn.Module, got {type(policy).__name__}")
        elif not isinstance(policy, kind):
            policy = kind(spec.obs_dim, spec.act_dim, net=policy)
        policy.bound_(spec.act_low, spec.act_high)
        if self._own_policy:
            self._require_outputs(policy, kind.outputs_per_action * spec.act_dim, self._outputs)
        self._policy = policy
        self.native = NativeBoundedPolicy(policy) if self.backend == "native" else None

    def _make_net(self, rng: Rng) -> nn.Module | None:
        """Return a network for the default policy; None for a plain perceptron."""
        return None

    def _find_policy_option(self) -> str | None:
        """Return the first option that only the default policy has, as ``name=value``; None if there is none."""
        return None

    def _require_outputs(self, policy: nn.Module, size: int, what: str) -> None:
        """Raise ValueError unless `policy` takes the environment's observations and returns `size` numbers for each."""
        import torch

        spec, where = self.spec, type(self).__name__
        probe = torch.zeros((2, *spec.obs_shape), dtype=torch.uint8 if spec.image else torch.float32, device="cpu")
        try:
            with torch.no_grad(), evaluating(policy):
                shape = tuple(policy(probe.to(next(policy.parameters()).device)).shape)
        except RuntimeError as e:
            raise ValueError(
                f"{where}: policy must take observations of shape (B, {str(spec.obs_shape)[1:]}: {e}"
            ) from e
        if shape != (2, size):
            raise ValueError(f"{where}: policy must return {what}, (B, {size}), got {shape} for B = 2")

    def _create_networks(self, policy: nn.Module | None, backend: str, device: str, compile: bool = False) -> None:
        if policy is not None and (option := self._find_policy_option()) is not None:
            name = f"{type(self).__name__}: policy"
            raise ValueError(f"{name} must be left out with {option}, which is of the policy that it replaces")
        if not self.config.recurrent:  # whose updates are not captured
            self._pays_from = min(CUDA_PAYS_FROM, UPDATE_PAYS_FROM / self.config.batch_size)
        super()._create_networks(policy, backend, device, compile)
        if self.native is not None:
            why = self._find_python_step()
            self.backend.reason += "; whole rounds in one call" if why is None else f"; step by step, since {why}"
        if self.device != "cpu":
            self._follower, self._graphed_policy = choose_actor(self)
            self._explore()

    # ---- acting for a policy on a GPU

    def _make_follower(self, block: np.ndarray) -> NativeActor:
        """Return a kernel's policy that acts as `policy` with the parameters in `block`."""
        raise NotImplementedError

    @property
    def actor(self) -> Any:
        """The actor of collection and evaluation: a module or an `rlox.nn.acting.ActingPolicy`.

        A kernel that acts for a policy on a GPU gets its parameters in one transfer, once after each round of updates.
        """
        if self._follower is None:
            return self._graphed_policy or super().actor
        return self._follower.after(self.counters.updates if self._trains else None)

    def _prepare_training(self) -> None:
        super()._prepare_training()
        if self._follower is not None:
            self._follower.after(None)
            if find_update_difference(self, self.collector, self.counters, files=False) is not None:
                self._follower = None

    def _kernel_obstacle(self, policy: nn.Module | None) -> str | None:
        """Return why the kernel cannot compute SAC's or TD3's networks exactly; None if it can."""
        if policy is not None:
            return f"the policy is a custom module ({type(policy).__name__})"
        n = len(self.config.hidden_sizes)
        return f"the kernel supports at most {MAX_HIDDEN} hidden layers, but there are {n}" if n > MAX_HIDDEN else None

    def _network_sizes(self) -> tuple[int, int]:
        assert self.Policy is not None
        spec, gaussian = self.spec, self.Policy.outputs_per_action == 2
        return n_parameters(spec.obs_dim, spec.act_dim, self.config.hidden_sizes, gaussian)

    # ---- batches

    @property
    def _n_rows(self) -> int:
        """Rows of a batch; with several ranks, of this rank's part."""
        return self.config.batch_size // self.ranks.size

    @property
    def _n_mixed(self) -> int:
        """The number of a batch's rows (`_n_rows`) that are drawn from the dataset."""
        return round(self.config.dataset_share * self._n_rows)

    def _require_room(self, where: str) -> None:
        memory, batch_size, n_envs = self._memory.config, self.config.batch_size, self.n_envs
        if memory is not None and memory.size < max(batch_size, n_envs):
            raise ValueError(
                f"{where}: the buffer's size must be at least batch_size ({batch_size}) and n_envs ({n_envs}), got "
                f"buffer_size={memory.size}"
            )
        if memory is not None and (self.device != "cpu" or memory.device == "cuda"):
            place_memory(self, where)

    def _take_dataset(self, where: str) -> None:
        """Mix the dataset's rows into the batches."""
        self._require_mixable(where)
        n_rows, n_mixed = self._n_rows, self._n_mixed
        if not 0 < n_mixed < n_rows:
            raise ValueError(
                f"{where}: dataset_share must leave at least one row of a batch of {self.config.batch_size} to the "
                f"dataset and one to the replay memory, got {self.config.dataset_share}"
            )
        self._min_rows = n_rows - n_mixed
        self._dataset_id = identity(self._dataset)

    def sample(self) -> TransitionBatch:
        """Return the transitions of the next update."""
        return TransitionBatch.from_rows(self._host_rows(), self.config.gamma, self.spec, self.device)

    def _host_rows(self) -> Mapping[str, Any]:
        """Return the rows of the next update, with normalised observations and rewards if there is a normaliser."""
        rows = self._rows(self._n_rows)
        if self.normalizer is None:
            return rows
        # The memory stores what the environments returned, so old transitions are normalised with current statistics.
        changed = {name: self.normalizer.normalize(rows[name]) for name in ("obs", "next_obs")}
        return {**rows, **changed, "rewards": self.normalizer.scale_rewards(rows["rewards"])}

    def _rows(self, n: int) -> Mapping[str, np.ndarray]:
        """Return `n` transitions, in the format of `rlox.buffers.Buffer.sample`."""
        beta = self._beta(self.counters.progress)
        if beta is not None:
            self.buffer.set_beta(beta)
        if self._dataset is None:
            return self.buffer.sample(n, self.rng.integers(2**63))
        online = self.buffer.sample(n - self._n_mixed, self.rng.integers(2**63))
        return join_batches(online, self._dataset.sample(self._n_mixed, self.rng.integers(2**63)), self.config.gamma)

    def schedule_values(self, progress: float) -> dict[str, float]:
        values = super().schedule_values(progress)
        if (beta := getattr(self._memory.config, "beta", None)) is not None:
            values["beta"] = interpolate(beta, 1.0, progress, 1.0)
        return values

    def _beta(self, progress: float) -> float | None:
        """Return the exponent of the importance weights; None if the memory has no importance weights."""
        beta = getattr(self._memory.config, "beta", None)
        return None if beta is None else interpolate(beta, 1.0, progress, 1.0)

    def _updates_due(self, n_steps: int) -> int:
        c = self.config
        return n_steps if c.gradient_steps == -1 else c.gradient_steps

    def _make_source(self) -> Any:
        from rlox.gpu.sources import source_of_memory

        return source_of_memory(self)

    # ---- whole rounds in a kernel

    def _find_python_step(self) -> str | None:
        """Return why Python must see each step, regardless of callbacks; None if `_rounds` can run without Python."""
        place = {name: i for i, cls in reversed([*enumerate(type(self).__mro__)]) for name in vars(cls)}
        changed = [name for name in _AT_ONCE if place.get(name, math.inf) < place["_rounds"]]
        if changed:
            return f"{type(self).__name__} changes {changed[0]}"
        if type(self.collector) is not ReplayCollector or not self.collector.env.native:
            return "the environment is not native"
        if self.collector.reward_fn is not None:
            return "there is a reward_fn"
        if (schedule := self.config.learning_rate_schedule) not in SCHEDULES:
            return f"learning_rate_schedule is {schedule}"
        if self.spec.masked:
            return "the environment masks actions"
        if self._dataset is not None:
            return "a dataset is mixed into the batches"
        if self.normalizer is not None:
            return "observations are normalised" if self.config.normalize_obs else "rewards are normalised"
        if self.collector.exploration is not None:
            return f"Python {self.collector.exploration.verb} the exploration noise"
        config = self._memory.config
        if (type(self._memory.given) if config is None else buffer_class(config.name)) is not ReplayBuffer:
            return "the replay memory is not uniform"
        definer = next(cls for cls in type(self).__mro__ if "_rounds" in vars(cls))
        return find_difference("rounds", self, self.collector) if definer.__module__.startswith("rlox.") else None

    def _can_run_rounds(self) -> bool:
        return (
            self.native is not None
            and self._find_python_step() is None
            and self._memory.buffer.access() is not None
            and not self.callbacks.listens("on_rollout_end")
        )

    def _rounds(self, n_steps: int) -> Rounds:
        """Run rounds for at least `n_steps` environment steps in the kernel alone, and advance the counters.

        Fewer rounds are run if `n_steps` would be too many for one call. Only called if `_can_run_rounds` returns true.
        """
        raise NotImplementedError

    def _kernel_rounds(self, n_steps: int, names: Iterable[str], **arguments: Any) -> tuple:
        """Return the result of the kernel's ``rounds``, given `arguments` and the hyper-parameters `names`."""
        c, counters, collector = self.config, self.counters, self.collector
        per_round = self._round_steps()
        per_update = per_round if c.gradient_steps == -1 else c.gradient_steps
        # The kernel has room for the metrics of all updates before it begins.
        n_rounds = min(-(-n_steps // per_round), max(1, 100_000 // per_update))
        obs = collector.observe()  # the first call starts the environments
        buffer = self._memory.buffer
        collector.continue_in(buffer)
        names = ("train_freq", "gradient_steps", "batch_size", "learning_starts", "learning_rate", "gamma", *names)
        result = self.native.net.rounds(
            collector.env.stepper(),
            buffer.access(),
            collector.rng,
            self.rng,
            obs,
            n_rounds,
            env_steps=counters.env_steps,
            horizon_start=counters.horizon_start,
            horizon_steps=counters.schedule_steps,
            update_from=self._memory.start + c.learning_starts,
            annealed=c.learning_rate_schedule == "linear",
            **{name: getattr(c, name) for name in names},
            **arguments,
        )
        collector.remember_buffer(buffer)
        return result

    # ---- exploration

    def _make_action_noise(self, n_envs: int) -> ActionNoise:
        c = self.config
        return ActionNoise(self.spec, n_envs, c.exploration_noise, c.noise_correlation)

    def _make_noise(self, n_envs: int) -> ActionNoise | None:
        """Return new action noise, as training adds it in `n_envs` environments; None if there is only the policy's."""
        return self._make_action_noise(n_envs) if isinstance(self.collector.exploration, ActionNoise) else None

    # ---- weights of another algorithm

    def _start_from(self, checkpoint: Checkpoint, where: str) -> None:
        """Load weights as `Agent._start_from`, including critics, because new critics would ruin the policy.

        For SAC and TD3 the checkpoint may be one of SAC, TD3, TD3BC, CQL or IQL. The policy's actions without noise are
        always taken over; see `_fitted` for standard deviations. IQL's V is not used.
        """
        if "critics" not in self._parts:
            super()._start_from(checkpoint, where)
            return
        critics = checkpoint.tensors.get("critics")
        if not critics:
            raise ValueError(
                f"{where}: it must contain critics, because new ones would soon ruin its policy, got a checkpoint of "
                f"{one_line(checkpoint.header['algorithm'])}; TD3, SAC, TD3BC, CQL and IQL have critics"
            )
        super()._start_from(checkpoint, where)
        for name in {"critics", "target"} & self._parts.keys():
            load_weights_(self._parts[name], critics, f"{where}: {name}")

    def _fitted(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return a checkpoint's policy weights with as many outputs per action as this algorithm's policy has.

        The means are kept. Standard deviations are dropped if this policy has none. If only this policy has them, they
        start at 1, before the tanh. IQL's standard deviations, which apply after the tanh, are taken over: near a mean
        of 0, where tanh is the identity, that is the same.
        """
        if self.Policy is None:
            return arrays
        layers = [int(match[1]) for name in arrays if (match := re.fullmatch(r"net\.(\d+)\.weight", name))]
        weight, bias = (f"net.{max(layers, default=0)}.{kind}" for kind in ("weight", "bias"))
        if self._own_policy or not {weight, bias} <= arrays.keys():
            return arrays
        n, wide = self.spec.act_dim, self.Policy.outputs_per_action == 2
        fitted, log_std = dict(arrays), arrays.get("log_std")
        fitted.pop("log_std", None)
        was_wide = len(arrays[weight]) == 2 * n
        if was_wide and not wide:
            fitted |= {name: arrays[name][:n] for name in (weight, bias)}
        elif wide and len(arrays[weight]) == n:
            new = np.zeros(n, np.float32) if log_std is None else log_std
            fitted[weight] = np.concatenate([arrays[weight], np.zeros_like(arrays[weight])])
            fitted[bias] = np.concatenate([arrays[bias], new])
        had = was_wide or log_std is not None
        if had is not wide:
            why = "exploration_noise replaces them" if had else "it has none: they start at 1, before the tanh"
            warnings.warn(
                f"init_from: the standard deviations are not those of the checkpoint's policy, because {why}",
                RuntimeWarning,
                stacklevel=5,
            )
        return fitted
