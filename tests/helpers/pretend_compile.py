"""A stand-in for ``torch.compile`` on the pretended GPU of `pretend_cuda`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pinned_memory
import torch
import torch.utils._pytree as pytree

_compiled: set[Compiled] = set()


class Compiled:
    """Runs a function as it is. With `graphs`, the next call overwrites its last outputs, as a CUDA graph does."""

    def __init__(self, function: Callable[..., Any], graphs: bool, tensor_type: type):
        self._function, self._graphs, self._tensor_type = function, graphs, tensor_type
        self._last: list[torch.Tensor] = []
        functools.update_wrapper(self, function, updated=())

    def spoil(self) -> None:
        """Overwrite the last outputs."""
        for inner in self._last:
            pinned_memory.spoil_(inner)
        self._last = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._graphs:
            return self._function(*args, **kwargs)
        self.spoil()
        out = self._function(*args, **kwargs)
        given = {x.inner.untyped_storage().data_ptr() for x in self._tensors_in((args, kwargs))}
        results = [x.inner for x in pytree.tree_leaves(out) if isinstance(x, self._tensor_type)]
        self._last = [x.detach() for x in results if x.untyped_storage().data_ptr() not in given]
        _compiled.add(self)
        return out

    def _tensors_in(self, tree: Any) -> Iterator[Any]:
        for leaf in pytree.tree_leaves(tree):
            if isinstance(leaf, self._tensor_type):
                yield leaf
            elif isinstance(leaf, torch.nn.Module):
                yield from (x for x in (*leaf.parameters(), *leaf.buffers()) if isinstance(x, self._tensor_type))


def install_compile(tensor_type: type) -> None:
    """Replace ``torch.compile`` by a stand-in, for tensors of `tensor_type`, which have an attribute ``inner``."""
    compile_really = torch.compile

    def compile_(model: Any = None, **options: Any) -> Any:
        if model is None:
            return lambda one: compile_(one, **options)
        if options.get("backend") not in (None, "inductor"):
            return compile_really(model, **options)
        return Compiled(model, options.get("mode") in ("reduce-overhead", "max-autotune"), tensor_type)

    def begin_step() -> None:
        for one in _compiled:
            one.spoil()
        _compiled.clear()

    torch.compile = compile_
    torch.compiler.cudagraph_mark_step_begin = begin_step
