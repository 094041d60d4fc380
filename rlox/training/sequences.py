"""Shared code of algorithms that learn from replayed sequences, such as DreamerV3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlox.checkpoint import Checkpoint
from rlox.collectors import RewardFn
from rlox.collectors.sequences import SequenceCollector
from rlox.gpu.sampled import SampledUpdates
from rlox.nn.batch import SequenceBatch
from rlox.training.replay import ReplayAgent
from rlox.world_models.pretraining import fill
from rlox.world_models.pretraining import n_rows as dataset_rows


class SequenceAlgorithm(SampledUpdates, ReplayAgent):
    """Base class of algorithms whose agent has a memory of its own and learns from sequences of steps.

    ``update(batch)`` receives a `rlox.nn.batch.SequenceBatch`. The replay memory contains every step, with the agent's
    state before it. Arguments as for `rlox.training.off_policy.OffPolicyAlgorithm`; a `dataset` fills the memory before
    the first step.
    """

    _usual_memory = "sequence"
    _owed = 0.0  # replayed steps that are due by the replay ratio, less than one update's

    collector: SequenceCollector

    def _make_collector(self, n: int, reward_fn: RewardFn | None) -> SequenceCollector:
        envs = self.env_options.make(self.env_id, n, self.seed, self.ranks.size)
        return SequenceCollector(envs, n, self.seed, reward_fn=reward_fn)

    def sample(self) -> SequenceBatch:
        """Return ``batch_size`` sequences of ``seq_len`` steps for the next update.

        Raises
        ------
        ValueError
            If the memory is empty, or no environment has ``seq_len`` steps in it.
        """
        return SequenceBatch.from_rows(self._host_rows(), self.spec, self.device)

    def _host_rows(self) -> Mapping[str, np.ndarray]:
        c, memory = self.config, self._memory.config
        return self.buffer.sample(
            c.batch_size,
            c.seq_len,
            self.rng.integers(2**63),
            online=memory is None or memory.online,
            with_indices=True,
        )

    def _make_source(self) -> Any:
        from rlox.gpu.sources import SequenceSource

        return SequenceSource(self)

    @property
    def _state_dim(self) -> int:  # type: ignore[override]  # a number that its networks determine
        return self.actor.initial(1).shape[1]

    def _require_room(self, where: str) -> None:
        length = self.config.seq_len
        self._min_rows = length * self.collector.n_envs
        require_room(self, where, self.spec.model_width, length, f"seq_len ({length})")

    def _take_dataset(self, where: str) -> None:
        """Raise an error unless the dataset's episodes fit into the memory, before the environments' episodes."""
        self._require_mixable(where)
        dataset: Any = self._dataset
        if not (hasattr(dataset, "get_state") and hasattr(dataset, "n_episodes")):
            raise TypeError(
                f"{where}: dataset must have get_state() and n_episodes, like rlox.OfflineDatasetBuffer, got "
                f"{type(dataset).__name__}"
            )
        if getattr(dataset, "masked", False):
            raise ValueError(
                f"{where}: the dataset must have no masks of legal actions, which {self.name} cannot follow"
            )
        n = dataset_rows(dataset)
        # Episodes are stored whole, so the part of one environment can be full before the others are.
        needed = n + self.collector.n_envs * (int(dataset.stats()["max_episode_length"]) + 1)
        if self._memory.size < needed:
            raise ValueError(
                f"{where}: the buffer's size must be at least {needed:,} for the dataset's {n:,} observations, "
                f"got {self._memory.size:,}"
            )

    def _pretraining_due(self) -> int:
        """Fill the memory with the dataset's sequences; return how many updates on them precede the first step."""
        if self._dataset is None or self.counters.env_steps:
            return 0
        if not len(self.buffer):
            fill(self.buffer, self._dataset, self.spec)
        return max(0, self.config.pretrain_updates - self.counters.updates)

    def _updates_due(self, n_steps: int) -> int:
        """Return as many updates as the due replayed steps allow; the rest counts in later rounds."""
        c = self.config
        self._owed += c.replay_ratio * n_steps
        n_updates = int(self._owed // c.update_rows)
        self._owed -= n_updates * c.update_rows
        return n_updates

    def _own_state(self) -> tuple[dict[str, Any], dict[str, dict[str, np.ndarray]]]:
        info, tensors = super()._own_state()
        return {**info, "replay_owed": self._owed}, tensors

    def _restore(self, checkpoint: Checkpoint, same_env: bool = False) -> bool:
        exact = super()._restore(checkpoint, same_env)
        self._owed = float(checkpoint.header.get("replay_owed", 0.0))
        return exact


def require_room(algorithm: ReplayAgent, where: str, act_dim: int, length: int, needed: str) -> None:
    """Raise ValueError unless an agent's memory can hold a sequence of `length` steps of each environment.

    A memory that was passed must be one of sequences with `act_dim` numbers for an action. `needed` is the name of
    `length` in messages.
    """
    memory, n, spec = algorithm._memory, algorithm.collector.n_envs, algorithm.spec
    given = memory.given
    if given is not None:
        expected = (spec.obs_dim, act_dim, n, algorithm._state_dim)
        sizes = tuple(getattr(given, name, None) for name in ("obs_dim", "act_dim", "n_envs", "state_dim"))
        if sizes != expected:
            raise ValueError(
                f"{where}: buffer must be a SequenceReplayBuffer of obs_dim, act_dim, n_envs and state_dim "
                f"{', '.join(map(str, expected))}, got {type(given).__name__} of {', '.join(map(str, sizes))}"
            )
    if memory.size // n < length:
        raise ValueError(
            f"{where}: the buffer's size must be at least {needed} for each of the {n} environments, "
            f"{length * n:,}, got {memory.size:,}"
        )
