"""Data parallelism: what a rank of a training does, by itself or beside others (`rlox.distributed.group`).

Each process that ``torchrun`` starts is a rank. It steps its own share of the environments, or reads its own share of a
batch's rows, and differentiates a loss that is a mean over them; gradients are averaged, so that all ranks take the
same step. Only rank 0 evaluates, records and saves. The others wait for it meanwhile, and send their own state when it
writes a checkpoint.

PyTorch is imported only when ranks join, since a single process may not need it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from rlox.checkpoint import Checkpoint, run_files
from rlox.checkpoint.streams import Stream
from rlox.config import choice
from rlox.kernels.rng import Rng

if TYPE_CHECKING:
    import torch
    from torch import nn

    from rlox.collectors.vec_normalize import VecNormalize
    from rlox.nn.optimizers import FlatOptimizer
    from rlox.nn.sharding import ShardedAdam

_T = TypeVar("_T")

# Environment variables that torchrun sets for each process.
_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# The class of a rank, by the value of `distributed`.
_KINDS = {"ddp": "rlox.distributed.group:Group", "fsdp": "rlox.distributed.sharded:ShardedGroup"}
# The saved state of environments that has them along the first axis; kernels have them along the last one.
_BY_ENV = ("policy_memory", "policy_is_first", "agent_carry", "agent_rewards", "agent_first")
SHARED = 1 << 32  # first stream of the ranks' own generators
# Sections of a checkpoint that each rank has separately.
OWN = ("environment", "generators", "reference_log_probs", "memory", "dropout")


class RankLost(RuntimeError):
    """Raised when another rank has failed, or was killed.

    `unreported`: the lost rank has not reported why, and this is the first rank after rank 0 that notices. If rank 0 is
    the lost one, no other rank prints anything.
    """

    unreported = False


def env_axis(name: str) -> int:
    """Return the axis of the environments in the array `name` of their saved state."""
    return 0 if name in _BY_ENV else -1


class Ranks:
    """A single process, and the base class of the ranks of a data-parallel training."""

    current: ClassVar[Ranks]  # the rank that `join` created in this process, or `ALONE`
    rank, size = 0, 1
    joined = False  # whether this is a rank of a data-parallel training
    sharded = False  # whether language models are sharded across the ranks
    total: Callable[[torch.Tensor], torch.Tensor] | None = None  # sums over all ranks; None in a single process
    admit: Callable[[Any], None]  # if joined: see `rlox.distributed.group.Group`
    prepare: Callable[[Any], None]  # if joined, too
    seed_torch: Callable[[int], None]  # if joined, too
    call_hook: Callable[..., Any]  # if joined, too
    training: Callable[[Any], AbstractContextManager[None]]  # if joined, too
    _named: set[Path] = frozenset()  # type: ignore[assignment]  # files of the last gathered checkpoint
    _gathering: Any = nullcontext()  # held while files may exist that no checkpoint names yet

    # ---- shares

    def share(self, where: str, name: str, n: int) -> int:
        """Return this rank's share of `n`; raise a ValueError if it cannot be divided evenly."""
        if n % self.size:
            raise ValueError(
                f"{where}: {name} must be a multiple of the {self.size} ranks, got {n}; try "
                f"{-(-n // self.size) * self.size}"
            )
        return n // self.size

    def own_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return this rank's part of `rows` (B, …), which are the same on all ranks."""
        n = len(rows) // self.size
        return rows[self.rank * n : (self.rank + 1) * n]

    def rng(self, seed: int, stream: int) -> Rng:
        """Return the rank's own generator; for rank 0, the same as in a single process."""
        return Rng(seed, stream)

    def has_gpu(self) -> bool:
        """Return whether PyTorch can use a GPU, and if there are several ranks, one for each."""
        import torch

        return torch.cuda.is_available()

    # ---- agreement

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """Return the mean of a tensor over the ranks."""
        return value

    def any(self, value: bool) -> bool:
        """Return whether `value` is true on any rank."""
        return value

    def metrics(self, values: dict[str, float]) -> dict[str, float]:
        """Return the mean of each metric over the ranks that have it."""
        return values

    def episodes(self, returns: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the returns (E,) and lengths (E,) of the episodes that ended on all ranks, rank after rank."""
        return returns, lengths

    def all_rows(self, values: np.ndarray) -> np.ndarray:
        """Return `values` (B, …) of all ranks, rank after rank; B must be the same on each."""
        return values

    def merge(self, normalizer: VecNormalize | Any) -> None:
        """Merge the statistics of all ranks, so that all have the same."""

    # ---- checkpoints

    def with_all_ranks(self, checkpoint: Checkpoint, folder: Path | None = None) -> Checkpoint:
        """Return `checkpoint` with the other ranks' own state; their replay memories are written below `folder`."""
        return checkpoint

    def remove_unneeded(self, header: dict[str, Any], folder: Path) -> None:
        """Remove memory files of the other ranks below `folder` that no checkpoint needs.

        Needed are the files that `header`, of a checkpoint on disk, or the last gathered checkpoint names.
        """
        with self._gathering:
            named = list_named_files(header, folder) | self._named
            run_files.check(*run_files.locate(folder / "x"))  # nothing is removed through a link
            for path in set(folder.glob("rank*/*.safetensors")) - named:
                run_files.check(folder, str(path.relative_to(folder)))
                path.unlink(missing_ok=True)

    def own(self, checkpoint: Checkpoint, seed: int) -> Checkpoint:
        """Return the part of `checkpoint` that this rank restores."""
        saved = _saved_ranks(checkpoint)
        if len(saved) + 1 == self.size:
            return checkpoint if self.size == 1 else self._same(checkpoint, saved[self.rank - 1] if self.rank else {})
        return self._other(checkpoint, seed)

    def _same(self, checkpoint: Checkpoint, saved: dict[str, Any]) -> Checkpoint:
        """Return this rank's part of a checkpoint with the same number of ranks."""
        header, tensors = {**checkpoint.header}, {**checkpoint.tensors}
        if self.rank:
            own = tensors[f"rank{self.rank}"]
            for section in OWN:
                start = f"{section}/"
                tensors[section] = {
                    name.removeprefix(start): array for name, array in own.items() if name.startswith(start)
                }
            header["generators"] = {**header["generators"], **saved["generators"]}
            header.pop("memory", None)
            if "memory" in saved:
                header["memory"] = saved["memory"]
        return self._rows(Checkpoint(header, tensors, checkpoint.folder), checkpoint)

    def _other(self, checkpoint: Checkpoint, seed: int) -> Checkpoint:
        """Return the common part of a checkpoint with a different number of ranks, and new generators."""
        header, tensors = {**checkpoint.header}, {**checkpoint.tensors}
        header.pop("memory", None)
        # Each segment of the run must draw different random numbers.
        mixed = Rng(Rng(seed, SHARED - 1).key, header["counters"]["updates"]).key
        header["generators"] = {
            name: state if name in ("action", "prompts") else self.rng(mixed, number).get_state()
            for number, (name, state) in enumerate(sorted(header["generators"].items()))
        }
        if self.rank and tensors["generators"]:
            tensors["generators"] = {}  # those of PyTorch are the first rank's
            self.seed_torch(mixed)
        if "dropout" in tensors:
            state = self.rng(mixed, Stream.DROPOUT).get_state()
            tensors["dropout"] = {name: np.array(value, np.uint64) for name, value in state.items()}
        return self._rows(Checkpoint(header, tensors, checkpoint.folder), checkpoint)

    def _rows(self, mine: Checkpoint, whole: Checkpoint) -> Checkpoint:
        """Return `mine` with this rank's part of the state of all environments."""
        environment, tensors = whole.tensors["environment"], mine.tensors
        if "keys" in environment:  # native environments, or a user's tensor environment, one column each
            n = environment["keys"].shape[-1] // self.size
            rows = slice(self.rank * n, (self.rank + 1) * n)
            tensors["environment"] = {
                name: np.ascontiguousarray(x[rows] if env_axis(name) == 0 else x[..., rows])
                for name, x in environment.items()
            }
        elif len(_saved_ranks(whole)) + 1 != self.size:
            tensors["environment"] = {}
        if "action_noise" in whole.tensors:
            tensors["action_noise"] = {name: self.own_rows(x) for name, x in whole.tensors["action_noise"].items()}
        if "returns" in (normalization := whole.tensors.get("normalization", {})):
            tensors["normalization"] = {**normalization, "returns": self.own_rows(normalization["returns"])}
        return mine

    # ---- a language model

    def place(self, module: nn.Module, device: str) -> None:
        """Move a model to the device, unless sharding will do so."""
        module.to(device)

    def shard(self, module: nn.Module, blank: Callable[[bool], None], device: str, bfloat16: bool) -> None:
        """Shard the parameters of `module`, if the ranks shard models.

        Gathered blocks are in bfloat16 if `bfloat16`, otherwise in the stored data type. `blank` passes a token through
        `module`, and if its argument is true, a gradient of zeros back.
        """

    def full(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a whole tensor of the model, gathered if it is sharded."""
        return tensor

    def part(self, module: nn.Module) -> Any:
        """Return the object for `rlox.training.Algorithm.keep` with which checkpoints store a model."""
        return module

    def adam(
        self, parameters: Iterable[nn.Parameter], learning_rate: float, eps: float, weight_decay: float
    ) -> FlatOptimizer | ShardedAdam:
        """Create the Adam optimiser for the parameters of a model."""
        from rlox.nn.optimizers import FlatOptimizer

        return FlatOptimizer(parameters, learning_rate, eps=eps, weight_decay=weight_decay)


def _saved_ranks(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Return a header's entries of ranks 1, 2, …"""
    saved = checkpoint.header.get("ranks", [])
    if not isinstance(saved, list) or not all(isinstance(rank, dict) and "generators" in rank for rank in saved):
        raise ValueError("ranks must be a list with the generators of each rank except the first")
    return saved


def count_saved_ranks(header: dict[str, Any]) -> int:
    """Return the number of ranks of a checkpoint, from its header."""
    saved = header.get("ranks")
    return 1 + len(saved) if isinstance(saved, list) else 1


def memory_folder(folder: Path, rank: int = 0) -> Path:
    """Return the folder of a rank's replay memory, next to a checkpoint in `folder`."""
    memory = folder / "memory"
    return memory / f"rank{rank}" if rank else memory


def list_named_files(header: dict[str, Any], folder: Path) -> set[Path]:
    """Return the files of the other ranks' memories below `folder` that a header names."""
    return {
        folder / f"rank{number}" / file["name"]
        for number, rank in enumerate(header.get("ranks", []), 1)
        for file in rank.get("memory", {"files": ()})["files"]
    }


ALONE = Ranks.current = Ranks()


def current() -> Ranks:
    """Return the rank that `join` created in this process, or `ALONE`."""
    return Ranks.current


def become(ranks: Ranks) -> None:
    """Let `current` return `ranks`."""
    Ranks.current = ranks


def is_started_by_torchrun() -> bool:
    """Return whether ``torchrun``, or a program that sets the same variables, started this process."""
    return all(name in os.environ for name in _VARIABLES)


@contextmanager
def in_one_process() -> Iterator[None]:
    """Context in which new algorithms belong only to this process: a reward model that only scores, or an algorithm
    without data parallelism, which each rank trains or uses by itself."""
    before = Ranks.current
    become(ALONE)
    try:
        yield
    finally:
        become(before)


def join(timeout_s: float = 300.0, distributed: str = "ddp") -> Any:
    """Make this process a rank; algorithms that are created afterwards are trained by all ranks together.

    Those without data parallelism are then refused, except in `in_one_process`.

    A rank waits at most `timeout_s` seconds for the others in a collective operation. With `distributed` ``ddp`` each
    rank has all parameters; with ``fsdp`` language models are sharded (`rlox.distributed.sharded`).

    Returns the `rlox.distributed.group.Group`. Raises RuntimeError if ``torchrun`` has not started this process, or the
    ranks cannot connect, and ValueError for any other value of `distributed`.
    """
    choice("ranks.join", "distributed", distributed, _KINDS)
    if not is_started_by_torchrun():
        raise RuntimeError(
            "ranks.join: torchrun must start the processes, but variables that it sets are missing "
            f"({', '.join(name for name in _VARIABLES if name not in os.environ)}); "
            "try: torchrun --standalone --nproc-per-node=2 …"
        )
    module, _, name = _KINDS[distributed].partition(":")
    group = getattr(import_module(module), name)(timeout_s)
    become(group)
    return group
