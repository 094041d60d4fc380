"""Ranks that share out a language model: no process holds all of its parameters, gradients and moments.

A pass over such a model gathers it block by block, so that all ranks must pass at the same time. What they learn from
and complete has other lengths on each, and rank 0 alone evaluates. So every pass is asked for: all ranks say what each
is about to do, the first of what was said is done by all, and who did not ask for it takes part with a token that
nobody looks at. A rank that waits for the others, in whatever they do together, takes part in what they ask for
meanwhile. Gathering a tensor for a checkpoint is asked for in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from rlox.distributed.ranks import Group, RankLost

if TYPE_CHECKING:
    import torch
    from torch import nn

    from rlox.nn.sharding import ShardedAdam, ShardedPart

# What a rank is about to do, in the order in which it is done where they differ.
_NOTHING, _READ, _LEARN, _GATHER = range(4)


class _Model:
    """A model that is shared out: `blank` passes a token through it, whose gradient, all zeros, the argument asks
    for."""

    def __init__(self, number: int, blank: Callable[[bool], None], learns: bool):
        self.number, self.blank, self.learns = number, blank, learns


class ShardedGroup(Group):
    """One of several ranks that share out what they train, as `rlox.distributed.ranks.join` makes it."""

    sharded = True

    def __init__(self, timeout_s: float):
        from torch.utils.weak import WeakTensorKeyDictionary

        super().__init__(timeout_s)
        self._led = False  # whether rank 0 takes its time
        self._serving = False  # whether this pass is one that another rank has asked for
        self._meshes: dict[str, Any] = {}  # by kind of device
        # What can be asked for, by a number that all ranks know it by, and tensors' numbers.
        self._things: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._numbers = WeakTensorKeyDictionary()
        self._n_things = 0

    # ---- what all do at once

    def _agree(self, what: int, number: int) -> tuple[int, int] | None:
        """What is done next, where this rank is about to do `what` with the thing of a `number`; None: nothing."""
        mine = self._torch.tensor([what, number])
        found = [self._torch.empty_like(mine) for _ in range(self.size)]
        with super()._together():
            self._dist.all_gather(found, mine, group=self._patient if self._led else None)
        asked = [(int(one[0]), int(one[1])) for one in found if one[0] != _NOTHING]
        return min(asked, default=None)

    def _ask(self, what: int, number: int) -> None:
        """Return when all ranks do `what` with a thing; until then take part in what others ask for."""
        while (due := self._agree(what, number)) not in ((what, number), None):
            self._serve(*due)

    def _serve(self, what: int, number: int) -> None:
        thing = self._things.get(number)
        if thing is None:
            raise RuntimeError(
                f"rank {self.rank}: all ranks must make the same algorithms and keep them, got one that another rank "
                "still uses and this one has dropped"
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
    def _together(self) -> Iterator[None]:
        self._ask(_NOTHING, 0)
        with super()._together():
            yield

    @contextmanager
    def _lost(self) -> Iterator[None]:
        """Around passes: where a rank is gone, a `RankLost`."""
        try:
            yield
        except RuntimeError as e:
            if isinstance(e, RankLost) or not (isinstance(e, self._dist.DistError) or "gloo" in str(e)):
                raise
            with super()._together():
                raise

    @contextmanager
    def _patiently(self) -> Iterator[None]:
        """Around what rank 0 may take long for; all know so once all have come here."""
        before = self._led
        if not before:
            self._ask(_NOTHING, 0)
            self._led = True
        try:
            yield
        finally:
            self._led = before

    def lead(self, algorithm: Any, hook: str, **info: Any) -> Any:
        with self._patiently():
            return super().lead(algorithm, hook, **info)

    def from_first(self, make: Callable[[], Any]) -> Any:
        with self._patiently():
            return super().from_first(make)

    # ---- what is shared out

    def _register(self, thing: Any) -> int:
        self._n_things += 1
        self._things[self._n_things] = thing
        return self._n_things

    def _register_tensor(self, tensor: torch.Tensor) -> None:
        self._numbers[tensor] = self._register(tensor)

    def place(self, module: nn.Module, device: str) -> None:
        """Nothing: it goes to the device block by block, when it is shared out."""

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
        made = _Model(0, blank, learns)
        made.number = self._register(made)
        # Before the one that gathers.
        module.register_forward_pre_hook(partial(self._before_pass, made), prepend=True)
        self._serve(_READ, made.number)  # what cannot be read so is better known now

    def _spread(self, module: nn.Module) -> None:
        """Give all ranks the weights of rank 0, tensor by tensor: each keeps a part of its own copy."""
        tensors = (*module.parameters(), *module.buffers())
        with self._together(), self._torch.no_grad():
            for tensor in tensors:
                held = tensor.detach().reshape(-1).cpu()
                self._dist.broadcast(held.view(self._torch.uint8), src=0)
                tensor.copy_(held.view_as(tensor))

    def _before_pass(self, model: _Model, module: nn.Module, args: Any) -> None:
        if not self._serving:
            self._ask(_LEARN if model.learns and self._torch.is_grad_enabled() else _READ, model.number)

    def full(self, tensor: torch.Tensor) -> torch.Tensor:
        from rlox.nn.sharding import is_sharded

        if not is_sharded(tensor):
            return tensor
        self._ask(_GATHER, self._numbers[tensor])
        shared: Any = tensor
        with self._torch.no_grad(), super()._together():
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

    def average(self, algorithm: Any) -> None:
        """Nothing, for gradients are averaged where they are shared out; a ValueError for what is not shared out."""
        from rlox.nn.optimizers import FlatOptimizer

        if any(isinstance(optimizer, FlatOptimizer) for optimizer in vars(algorithm).values()):
            raise ValueError(
                f"{type(algorithm).__name__}: distributed must be ddp, got fsdp, which shares out language models alone"
            )

    def _require_alike(self, algorithm: Any, when: str) -> None:
        """Nothing: there is one model, a part of it on each rank, and it was rank 0's."""

    @contextmanager
    def training(self, algorithm: Any) -> Iterator[None]:
        with super().training(algorithm), self._lost():
            yield
