"""Ranks that shard a language model: no process holds all of its parameters, gradients and optimiser moments.

A pass over a sharded model gathers it block by block, so that all ranks must run the pass at the same time. But their
batches and completions have different lengths, and only rank 0 evaluates. Therefore, every pass is requested: all ranks
announce their next operation, all of them run the first of these, and a rank that did not request it takes part with a
token whose result is ignored. A rank that waits for the others in a collective operation takes part in their requests
meanwhile. Gathering a tensor for a checkpoint is requested in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from rlox.distributed.group import Group
from rlox.distributed.ranks import RankLost

if TYPE_CHECKING:
    import torch
    from torch import nn

    from rlox.nn.sharding import ShardedAdam, ShardedPart

# Operations that a rank can request; if requests differ, the smallest number runs first.
_NOTHING, _READ, _LEARN, _GATHER = range(4)


class _Model:
    """A sharded model; `blank` passes a token through it, and if its argument is true, a gradient of zeros back."""

    def __init__(self, number: int, blank: Callable[[bool], None], learns: bool):
        self.number, self.blank, self.learns = number, blank, learns


class ShardedGroup(Group):
    """One of several ranks that shard what they train, as created by `rlox.distributed.ranks.join`."""

    sharded = True

    def __init__(self, timeout_s: float):
        from torch.utils.weak import WeakTensorKeyDictionary

        super().__init__(timeout_s)
        self._led = False  # whether rank 0 may take a long time
        self._serving = False  # whether another rank requested the current pass
        self._meshes: dict[str, Any] = {}  # by type of device
        # Models and tensors that can be requested, by a number that is the same on all ranks; and the tensors' numbers.
        self._things: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._numbers = WeakTensorKeyDictionary()
        self._n_things = 0

    # ---- collective operations

    def _agree(self, what: int, number: int) -> tuple[int, int] | None:
        """Announce the operation `what` on the object `number`, and return the operation that all ranks run next.

        Returns None if no rank requests an operation.
        """
        mine = self._torch.tensor([what, number], device="cpu")
        rows = [self._torch.empty_like(mine) for _ in range(self.size)]
        with super()._collective():
            self._dist.all_gather(rows, mine, group=self._patient if self._led else None)
        return min(((int(row[0]), int(row[1])) for row in rows if row[0] != _NOTHING), default=None)

    def _ask(self, what: int, number: int) -> None:
        """Request `what` on an object, and return when all ranks do it; until then take part in others' requests."""
        while (due := self._agree(what, number)) not in ((what, number), None):
            self._serve(*due)

    def _serve(self, what: int, number: int) -> None:
        thing = self._things.get(number)
        if thing is None:
            raise RuntimeError(
                f"rank {self.rank}: all ranks must create the same algorithms and keep them, but another rank still "
                "uses an algorithm that this rank has deleted"
            )
        self._serving = True
        try:
            with self._lost():
                if what == _GATHER:
                    thing.full_tensor()
                else:
                    thing.blank(what == _LEARN)
        finally:
            self._serving = False

    @contextmanager
    def _collective(self) -> Iterator[None]:
        self._ask(_NOTHING, 0)
        with super()._collective():
            yield

    @contextmanager
    def _lost(self) -> Iterator[None]:
        """Context of passes over a model: raises a `RankLost` if a rank is gone."""
        try:
            yield
        except RuntimeError as e:
            if isinstance(e, RankLost) or not (isinstance(e, self._dist.DistError) or "gloo" in str(e)):
                raise
            with super()._collective():
                raise

    @contextmanager
    def _long_wait(self) -> Iterator[None]:
        """Context in which rank 0 may take a long time; all ranks enter it together."""
        before = self._led
        if not before:
            self._ask(_NOTHING, 0)
            self._led = True
        try:
            yield
        finally:
            self._led = before

    def call_hook(self, hook: str, *, algorithm: Any, **info: Any) -> Any:
        with self._long_wait():
            return super().call_hook(hook, algorithm=algorithm, **info)

    def from_first(self, make: Callable[[], Any]) -> Any:
        with self._long_wait():
            return super().from_first(make)

    # ---- sharded models and tensors

    def _register(self, thing: Any) -> int:
        self._n_things += 1
        self._things[self._n_things] = thing
        return self._n_things

    def _register_tensor(self, tensor: torch.Tensor) -> None:
        self._numbers[tensor] = self._register(tensor)

    def place(self, module: nn.Module, device: str) -> None:
        """Do nothing: `shard` moves the module to the device block by block."""

    def shard(self, module: nn.Module, blank: Callable[[bool], None], device: str, bfloat16: bool) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        from rlox.nn.sharding import shard_

        self._spread(module)
        if device not in self._meshes:
            self._meshes[device] = init_device_mesh(device, (self.size,))
        learns = any(p.requires_grad for p in module.parameters())
        shard_(module, self._meshes[device], bfloat16)
        for p in module.parameters():
            self._register_tensor(p)
        model = _Model(0, blank, learns)
        model.number = self._register(model)
        # Before the hook that gathers.
        module.register_forward_pre_hook(partial(self._before_pass, model), prepend=True)
        self._serve(_READ, model.number)  # a first pass, so that a model that cannot be sharded fails now

    def _spread(self, module: nn.Module) -> None:
        """Copy the weights of rank 0 to all ranks, tensor by tensor; each rank will keep a part of its copy."""
        tensors = (*module.parameters(), *module.buffers())
        with self._collective(), self._torch.no_grad():
            for tensor in tensors:
                flat = tensor.detach().reshape(-1).cpu()
                self._dist.broadcast(flat.view(self._torch.uint8), src=0)
                tensor.copy_(flat.view_as(tensor))

    def _before_pass(self, model: _Model, module: nn.Module, args: Any) -> None:
        if not self._serving:
            self._ask(_LEARN if model.learns and self._torch.is_grad_enabled() else _READ, model.number)

    def full(self, tensor: torch.Tensor) -> torch.Tensor:
        from rlox.nn.sharding import is_sharded

        if not is_sharded(tensor):
            return tensor
        self._ask(_GATHER, self._numbers[tensor])
        shared: Any = tensor
        with self._torch.no_grad(), super()._collective():
            return shared.full_tensor()

    def part(self, module: nn.Module) -> ShardedPart:
        from rlox.nn.sharding import ShardedPart

        return ShardedPart(module, self.full)

    def adam(
        self, parameters: Iterable[nn.Parameter], learning_rate: float, eps: float, weight_decay: float
    ) -> ShardedAdam:
        from rlox.nn.sharding import ShardedAdam

        return ShardedAdam(
            parameters, learning_rate, eps, weight_decay,
            arrive=partial(self._ask, _NOTHING, 0), total=self._sum, full=self.full, register=self._register_tensor,
        )  # fmt: skip

    # ---- a training

    def prepare(self, algorithm: Any) -> None:
        """Do nothing, since sharding already averages gradients; raise a ValueError if the model is not sharded."""
        from rlox.nn.optimizers import FlatOptimizer

        if any(isinstance(optimizer, FlatOptimizer) for optimizer in vars(algorithm).values()):
            raise ValueError(
                f"{type(algorithm).__name__}: distributed must be ddp, got fsdp, which shards only language models"
            )

    def _require_alike(self, algorithm: Any, when: str) -> None:
        """Do nothing: there is only one model, whose parts all come from rank 0."""

    @contextmanager
    def training(self, algorithm: Any) -> Iterator[None]:
        with super().training(algorithm), self._lost():
            yield
