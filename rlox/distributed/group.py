"""The ranks of a data-parallel training, and what they exchange. Sharding is in `rlox.distributed.sharded`."""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from rlox.checkpoint import Checkpoint
from rlox.checkpoint.streams import Stream
from rlox.distributed.ranks import (
    ALONE,
    OWN,
    SHARED,
    RankLost,
    Ranks,
    become,
    env_axis,
    list_named_files,
    memory_folder,
)
from rlox.kernels.rng import Rng
from rlox.nn.modules import own_gpu

if TYPE_CHECKING:
    import torch

    from rlox.collectors.vec_normalize import VecNormalize

_T = TypeVar("_T")

# Evaluating and saving may take rank 0 a long time; if it dies, the others notice the closed connection.
_PATIENT = timedelta(days=30)
_groups = itertools.count()  # numbers of the groups that this process joins


class Group(Ranks):
    """One of several ranks, created by `rlox.distributed.ranks.join`."""

    joined = True

    def __init__(self, timeout_s: float):
        import torch
        import torch.distributed as dist

        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))  # restarts by torchrun
        timeout = timedelta(seconds=timeout_s)
        # The agent's store outlives an attempt, and so do the addresses of its ranks. Each group of each attempt
        # therefore uses its own part of the store (https://github.com/pytorch/pytorch/issues/135712).
        kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        try:
            self._store = dist.TCPStore(host, port, self.size, self.rank == 0 and not kept, timeout)
            mine = dist.PrefixStore(f"rlox{self.attempt}.{next(_groups)}", self._store)
            gpu = own_gpu(mine, self.rank, self.size, int(os.environ["LOCAL_RANK"]))
            backend = "gloo"
            if gpu is not None and dist.is_nccl_available():
                torch.cuda.set_device(gpu)
                backend = "cpu:gloo,cuda:nccl"
            # Gloo, unlike NCCL, also works with a GPU that ranks share.
            self._has_gpu = gpu is not None or (torch.cuda.is_available() and not dist.is_nccl_available())
            dist.init_process_group(backend, store=mine, rank=self.rank, world_size=self.size, timeout=timeout)
            self._patient = dist.new_group(backend="gloo", timeout=_PATIENT)
        except RuntimeError as e:
            raise RuntimeError(
                f"ranks.join: all {self.size} ranks must meet at {host}:{port} within {timeout_s:g} s, but rank "
                f"{self.rank} could not: {e}"
            ) from e
        self._failures = dist.PrefixStore("failures", mine)
        self._dist, self._torch = dist, torch
        self._leads = False  # whether the others wait for orders of this rank
        self._merged: dict[str, np.ndarray] = {}  # statistics after the last merge
        self._gathering = threading.Lock()
        self._named = set()
        self.total = self._sum

    # ---- shares

    def has_gpu(self) -> bool:
        return self._has_gpu

    def rng(self, seed: int, stream: int) -> Rng:
        return Rng(Rng(seed, stream).key, SHARED + self.rank) if self.rank else Rng(seed, stream)

    def seed_torch(self, seed: int) -> None:
        """Seed PyTorch's generators, from which modules draw, with a number of this rank's own."""
        self._torch.manual_seed(self.rng(seed, Stream.ACTION).key)

    def _share_envs(self, collector: Any) -> None:
        n, first = collector.n_envs, self.rank * collector.n_envs
        state = collector.env.get_state()
        if state is not None and "keys" in state:  # native environments, or a user's tensor environment
            state["keys"][:] = [Rng(collector.env.seed, first + i).key for i in range(n)]
            collector.env.set_state(state)
        else:
            collector.env.first, collector.env.n_joint = first, n * self.size
        collector.rng = SharedRng(collector.rng, first, n * self.size, collector.noise_axis)

    # ---- agreement

    @contextmanager
    def _collective(self) -> Iterator[None]:
        """Context of collective operations: raises a `RankLost` with the reason if a rank is gone."""
        try:
            yield
        except RuntimeError as e:
            reason = self._failure()
            lost = reason or (
                "another rank ended without an error message (it was killed, or its machine is gone), or did not "
                "answer in time"
            )
            error = RankLost(f"rank {self.rank} cannot continue: {lost}")
            error.unreported = reason is None and self.rank > 0 and self.first_to_notice()
            raise error from (None if reason else e)

    def _failure(self) -> str | None:
        """Return the report of the rank that failed first, if any."""
        with suppress(RuntimeError):
            if self._failures.check(["first"]):
                return self._failures.get("first").decode()
        return None

    def first_to_notice(self) -> bool:
        """Return whether this rank is the first to ask, among those that may have lost another rank."""
        with suppress(RuntimeError):  # the store may have ended with rank 0
            return self._failures.compare_set("noticed", "", str(self.rank)) == str(self.rank).encode()
        return True

    def report(self, error: BaseException) -> None:
        """Report to the other ranks why this rank ends."""
        if isinstance(error, RankLost):
            return
        text = " ".join(str(error).split()) or type(error).__name__
        with suppress(RuntimeError):
            self._failures.compare_set("first", "", f"rank {self.rank} failed with {type(error).__name__}: {text}")

    def _sum(self, value: torch.Tensor) -> torch.Tensor:
        total = value.detach().clone()
        with self._collective():
            self._dist.all_reduce(total)
        return total

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        return self._sum(value) / self.size

    def reduce(self, grad: torch.Tensor) -> None:
        """Replace a gradient with its mean over the ranks."""
        with self._collective():
            self._dist.all_reduce(grad)
        grad /= self.size

    def any(self, value: bool) -> bool:
        return bool(self._sum(self._torch.tensor(int(value), device="cpu")) > 0)

    def _gather(self, values: np.ndarray) -> list[np.ndarray]:
        """Return `values` of every rank; they must have the same shape on each."""
        mine = self._torch.from_numpy(np.ascontiguousarray(values))
        gathered = [self._torch.empty_like(mine) for _ in range(self.size)]
        with self._collective():
            self._dist.all_gather(gathered, mine)
        return [values.numpy() for values in gathered]

    def all_objects(self, thing: _T) -> list[_T]:
        """Return `thing` of every rank."""
        things: list[Any] = [None] * self.size
        with self._collective():
            self._dist.all_gather_object(things, thing)
        return things

    def metrics(self, values: dict[str, float]) -> dict[str, float]:
        all_values = self.all_objects(values)
        names = dict.fromkeys(name for own in all_values for name in own)
        columns = {name: [own[name] for own in all_values if name in own] for name in names}
        return {name: sum(column) / len(column) for name, column in columns.items()}

    def episodes(self, returns: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        counts = [int(n[0]) for n in self._gather(np.array([len(returns)], np.int64))]
        most = max(counts)
        if not most:
            return returns, lengths
        mine = np.zeros((2, most))
        mine[0, : len(returns)], mine[1, : len(lengths)] = returns, lengths
        parts = [rows[:, :n] for rows, n in zip(self._gather(mine), counts, strict=True)]
        joint = np.concatenate(parts, axis=1)
        return joint[0], joint[1].astype(np.int64)

    def all_rows(self, values: np.ndarray) -> np.ndarray:
        return np.concatenate(self._gather(values))

    def merge(self, normalizer: VecNormalize | Any) -> None:
        news = normalizer.since(self._merged)
        rows = self._gather(np.concatenate([np.ravel(part) for part in news.values()]))
        ends = np.cumsum([np.size(part) for part in news.values()])[:-1]
        # Start from the common statistics, and merge in the same order on each rank, so that results are bit-identical.
        normalizer.set_state(self._merged, returns=False)
        for row in rows:
            parts = zip(news.items(), np.split(row, ends), strict=True)
            normalizer.merge({name: part.reshape(np.shape(like)) for (name, like), part in parts})
        self._merged = normalizer.state()

    # ---- orders

    def call_hook(self, hook: str, *, algorithm: Any, **info: Any) -> Any:
        """Call a hook of the callbacks on rank 0, and return its answer on every rank.

        The others call their own callbacks' hook, and then follow orders of rank 0.
        """
        if self.rank:
            algorithm.callbacks.call_hook(hook, algorithm=algorithm, **info)
            while True:
                order, content = self.from_first(lambda: None)
                if order == "end":
                    return content
                self._send(self._part(algorithm, content))
        self._leads = True
        try:
            answer = algorithm.callbacks.call_hook(hook, algorithm=algorithm, **info)
        finally:
            self._leads = False
        self.from_first(lambda: ("end", answer))
        return answer

    def from_first(self, make: Callable[[], Any]) -> Any:
        """Return the result of `make` on rank 0; the others wait for it."""
        box = [make() if self.rank == 0 else None]
        with self._collective():
            self._dist.broadcast_object_list(box, src=0, group=self._patient)
        return box[0]

    def _send(self, part: Any) -> list[Any]:
        """Return the parts of all ranks on rank 0, and a list of None on the others."""
        parts: list[Any] = [None] * self.size
        with self._collective():
            self._dist.gather_object(part, parts if self.rank == 0 else None, dst=0, group=self._patient)
        return parts

    # ---- checkpoints

    @staticmethod
    def _part(algorithm: Any, folder: Path | None) -> Checkpoint:
        """Return this rank's own part of a checkpoint."""
        header: dict[str, Any] = {"generators": algorithm._generators()}
        tensors = algorithm._state_of_rank()
        if folder is not None:
            header["memory"], tensors["memory"] = algorithm._write_memory(folder)
        return Checkpoint(header, tensors)

    def with_all_ranks(self, checkpoint: Checkpoint, folder: Path | None = None) -> Checkpoint:
        header, tensors = {**checkpoint.header}, {**checkpoint.tensors}
        if not self._leads:
            # The other ranks do not take part, so training from this file starts fresh episodes.
            return Checkpoint(header, {**tensors, "environment": {}})
        with self._gathering:
            self.from_first(lambda: ("state", folder))
            parts: list[Checkpoint] = self._send(None)[1:]
            header["ranks"] = [part.header for part in parts]
            if folder is not None:
                self._named = list_named_files(header, memory_folder(folder))
        for number, part in enumerate(parts, 1):
            tensors[f"rank{number}"] = {
                f"{section}/{name}": array
                for section in OWN
                for name, array in part.tensors.get(section, {}).items()
                if not (section == "environment" and "keys" in part.tensors[section])
            }

        def join(section: str, name: str, axis: int) -> np.ndarray:
            return np.concatenate([part.tensors[section][name] for part in (checkpoint, *parts)], axis)

        environment = checkpoint.tensors.get("environment", {})
        if "keys" in environment:
            tensors["environment"] = {name: join("environment", name, env_axis(name)) for name in environment}
        if noise := checkpoint.tensors.get("action_noise"):
            tensors["action_noise"] = {name: join("action_noise", name, 0) for name in noise}
        normalization = checkpoint.tensors["normalization"]
        if "returns" in normalization:
            tensors["normalization"] = {**normalization, "returns": join("normalization", "returns", 0)}
        return Checkpoint(header, tensors)

    # ---- a training

    def admit(self, algorithm: Any) -> None:
        """Raise a ValueError unless all ranks together can train the new `algorithm`, each with its part of a batch."""
        where, config = type(algorithm).__name__, algorithm.config
        if not algorithm._data_parallel:
            raise ValueError(
                f"{where}: an algorithm that is created after ranks.join must be one that ranks can train together, "
                f"which {algorithm.name} is not; create it within rlox.distributed.ranks.in_one_process() if each rank "
                "shall have its own, or do not call join"
            )
        if hasattr(config, "batch_size"):
            self.share(where, "batch_size", config.batch_size)

    def prepare(self, algorithm: Any) -> None:
        """Let the new `algorithm` collect in this rank's share of the environments, with that share's actions, and its
        optimisers average gradients over all ranks before each step."""
        from rlox.nn.optimizers import FlatOptimizer

        if (collector := getattr(algorithm, "collector", None)) is not None:
            self._share_envs(collector)
        for optimizer in vars(algorithm).values():
            if isinstance(optimizer, FlatOptimizer):
                optimizer.reduce = self.reduce

    @contextmanager
    def training(self, algorithm: Any) -> Iterator[None]:
        """Context of a training: it reports errors, and all ranks start and end with the same weights."""
        if getattr(algorithm, "normalizer", None) is not None:
            self._merged = algorithm.normalizer.state()
        with self.reporting_errors():
            self._require_alike(algorithm, "start")
            acts = getattr(algorithm, "collector", None) is not None
            if self.rank and algorithm.counters.steps == 0 and acts and algorithm._torch_generators():
                # The ranks' policies must draw different actions. Their weights, drawn before, are those of rank 0.
                self.seed_torch(algorithm.seed)
            yield
            self._require_alike(algorithm, "end")

    def _require_alike(self, algorithm: Any, when: str) -> None:
        """Raise a RuntimeError unless all ranks have the same weights."""
        digest = hashlib.sha256()
        for name, array in sorted(algorithm._weights().items()):
            digest.update(name.encode() + np.ascontiguousarray(array).tobytes())
        box: list[Any] = [None] * self.size
        with self._collective():
            self._dist.all_gather_object(box, digest.hexdigest(), group=self._patient)
        if len(set(box)) > 1:
            raise RuntimeError(
                f"{type(algorithm).__name__}.train: all ranks must {when} with the same weights, got "
                f"{len(set(box))} different ones; give all ranks the same seed, and use a model that does not draw its "
                "weights from an unseeded generator"
            )

    def shared_text(self, name: str, make: Callable[[], str]) -> tuple[str, bool]:
        """Return a text that rank 0 creates once for all attempts, and whether an earlier attempt created it."""

        def first() -> tuple[str, bool]:
            key = f"rlox/{name}"
            if self.attempt and self._store.check([key]):
                return self._store.get(key).decode(), True
            text = make()
            self._store.set(key, text)
            return text, False

        return self.from_first(first)

    @contextmanager
    def reporting_errors(self) -> Iterator[None]:
        """Context that reports exceptions of this rank to the others."""
        try:
            yield
        except Exception as e:
            self.report(e)
            raise

    def leave(self) -> None:
        """Leave the group when all ranks are done."""
        become(ALONE)
        with self._collective():
            self._dist.barrier(group=self._patient)
        self._dist.destroy_process_group()


class SharedRng:
    """A generator that all ranks share: each rank draws all numbers, and uses those of its environments.

    The random numbers of an environment's actions therefore do not depend on the number of ranks. `rng` is in the same
    state on all ranks; this rank has the environments from `first` of the `n_joint`, along `axis` of drawn arrays.
    """

    def __init__(self, rng: Rng, first: int, n_joint: int, axis: int):
        self._rng, self._first, self._n, self._axis = rng, first, n_joint, axis

    @property
    def key(self) -> int:
        return self._rng.key

    def get_state(self) -> dict[str, int]:
        return self._rng.get_state()

    def set_state(self, state: dict[str, int]) -> None:
        self._rng.set_state(state)

    def _share(self, draw: Callable[..., np.ndarray], size: Any, out: np.ndarray | None) -> np.ndarray:
        shape = [*(out.shape if out is not None else (size,) if isinstance(size, int) else size)]
        n, shape[self._axis] = shape[self._axis], self._n
        joint = draw(tuple(shape))
        mine = joint.take(range(self._first, self._first + n), self._axis)
        if out is None:
            return mine
        out[...] = mine
        return out

    def uniform(self, size: Any = None, out: np.ndarray | None = None, dtype: Any = np.float32) -> np.ndarray:
        return self._share(lambda shape: self._rng.uniform(shape, dtype=dtype), size, out)

    def normal(self, size: Any = None, out: np.ndarray | None = None, dtype: Any = np.float32) -> np.ndarray:
        return self._share(lambda shape: self._rng.normal(shape, dtype=dtype), size, out)

    def gumbel(self, size: Any = None, out: np.ndarray | None = None) -> np.ndarray:
        return self._share(lambda shape: self._rng.gumbel(shape), size, out)

    def integers(self, high: int, size: Any = None, out: np.ndarray | None = None) -> np.ndarray:
        return self._share(lambda shape: self._rng.integers(high, shape), size, out)
