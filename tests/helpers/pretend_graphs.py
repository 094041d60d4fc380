"""Streams, events and CUDA graphs of the pretended GPU of `pretend_cuda`.

A capture records the operations on device tensors, with their arguments: tensors by address, Python numbers and the
values of CPU scalars as constants. A replay runs them again on the same memory, and writes results into the tensors of
the capture. As on a GPU, nothing has been computed when the capture ends: tensors that it wrote have their old values,
and new tensors contain rubbish.

Where CUDA would silently read memory that was freed after the capture, the replay raises an error.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pinned_memory
import torch
import torch.utils._pytree as pytree
from device_counts import note
from torch.utils._mode_utils import no_dispatch

_NOT_PERMITTED = "CUDA error: operation not permitted when stream is capturing"


@dataclass
class Operation:
    """One recorded kernel or copy."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    results: list[torch.Tensor | None]  # for each result, the tensor of the capture to write it to; None: in place
    draws: bool  # whether it draws from the device's generator


class Capture:
    """Operations of a graph that is being captured, and the memory that they wrote.

    Parameters
    ----------
    generator : object
        The device's generator, with ``get_state``, ``set_state`` and a context ``used``.
    """

    def __init__(self, generator: Any):
        self.operations: list[Operation] = []
        self.generator = generator
        self._generator_state = generator.get_state()
        self._allocated: dict[int, torch.Tensor] = {}  # address -> a tensor that owns that memory, from this capture
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}  # memory, and its old content
        self._constants: dict[int, torch.Tensor] = {}
        self._aliases: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # id -> the tensor, and ours of its memory
        self.inputs: dict[int, list[torch.Tensor]] = {}  # address of memory from outside -> our tensors on it

    def run(self, func: Any, args: Any, kwargs: dict[str, Any], draws: bool, is_view: bool) -> Any:
        """Execute an operation on the CPU tensors behind device tensors, and record it."""
        leaves = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        given = {_address(x) for x in leaves}
        for written in _written(func, args, kwargs):
            self._keep(written)
        out = self._execute(func, args, kwargs, draws)
        results = [x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]
        new = [None if _address(x) in given else x for x in results]
        for tensor in new:
            if tensor is not None:
                self._allocated.setdefault(_address(tensor), tensor)
        if not is_view:
            aliased = pytree.tree_map(self._own, (tuple(args), dict(kwargs)))
            self.operations.append(Operation(func, *aliased, [x if x is None else x.detach() for x in new], draws))
        return out

    def constant(self, scalar: torch.Tensor) -> torch.Tensor:
        """Return a copy of a CPU scalar, whose present value becomes a constant of the graph."""
        copied = scalar.clone()
        self._constants[id(copied)] = copied
        return copied

    def transfer(self, destination: torch.Tensor, source: torch.Tensor, to_device: bool) -> None:
        """Record a copy between pinned and device memory."""
        self.operations.append(
            Operation(
                pinned_memory.begin_transfer, (self._own(destination), self._own(source), to_device), {}, [], False
            )
        )

    def _execute(self, func: Any, args: Any, kwargs: dict[str, Any], draws: bool) -> Any:
        if not draws:
            return func(*args, **kwargs)
        with self.generator.used():
            return func(*args, **kwargs)

    def _own(self, value: Any) -> Any:
        """Return a tensor of our own on the same memory, so that the owner of the memory can be seen to drop it."""
        if not isinstance(value, torch.Tensor) or id(value) in self._constants:
            return value
        if id(value) not in self._aliases:
            alias = value.detach()
            self._aliases[id(value)] = value, alias
            if _address(value) not in self._allocated:
                self.inputs.setdefault(_address(value), []).append(alias)
        return self._aliases[id(value)][1]

    def _keep(self, tensor: torch.Tensor) -> None:
        """Keep the content of memory from outside that an operation is about to write."""
        address = _address(tensor)
        if address and address not in self._allocated and address not in self._before:
            storage = tensor.untyped_storage()
            self._before[address] = storage, storage.clone()

    def end(self) -> None:
        """Undo what the capture has written, and spoil what it has created."""
        self._aliases.clear()
        for storage, content in self._before.values():
            storage.copy_(content)
        self._before.clear()
        self.generator.set_state(self._generator_state)
        with torch.inference_mode():
            for tensor in self._allocated.values():
                pinned_memory.spoil_(tensor)
        self._allocated.clear()


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an operation writes."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return []
    written = []
    for i, argument in enumerate(schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        statistics = "batch_norm" in schema.name and argument.name.startswith("running_")  # not part of its schema
        if statistics or (argument.alias_info is not None and argument.alias_info.is_write):
            written += [x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]
    return written


_capture: Capture | None = None


def current_capture() -> Capture | None:
    """Return the capture that is under way."""
    return _capture


def require_no_capture() -> None:
    """Raise the error of CUDA for an operation that waits for the device, if a graph is being captured."""
    if _capture is not None:
        raise torch.AcceleratorError(_NOT_PERMITTED)


def wait_for_device(name: str = "") -> None:
    """Let the host wait for everything that the device was asked to do."""
    require_no_capture()
    note("sync", name)
    pinned_memory.end_transfers()


class CUDAGraph:
    """Stands in for `torch.cuda.CUDAGraph`."""

    generator: Any = None  # the device's; set at installation

    def __init__(self, keep_graph: bool = False):
        self._capture: Capture | None = None
        self._complete = False
        self._pool: object = object()

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global", **options: Any) -> None:
        global _capture
        require_no_capture()
        if self._capture is not None:
            raise RuntimeError("This CUDAGraph instance already owns a captured graph. Create another one.")
        self._pool = self._pool if pool is None else pool
        self._capture = _capture = Capture(self.generator)

    def capture_end(self, failed: bool = False) -> None:
        global _capture
        if self._capture is None or _capture is not self._capture:
            raise RuntimeError("capture_end: this graph is not being captured")
        _capture = None
        self._capture.end()
        self._complete = not failed

    def replay(self) -> None:
        if not self._complete or self._capture is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        require_no_capture()
        for tensors in self._capture.inputs.values():
            storage = tensors[0].untyped_storage()
            if storage.nbytes() and torch._C._storage_Use_Count(storage._cdata) <= len(tensors) + 1:
                raise RuntimeError(
                    f"the graph reads a tensor that was freed after its capture, such as one of {tensors[0].shape}"
                )
        note("launch", "graph")
        with no_dispatch(), torch.inference_mode():
            for one in self._capture.operations:
                out = self._capture._execute(one.function, one.arguments, one.options, one.draws)
                results = [x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]
                for tensor, result in zip(one.results, results, strict=False):
                    if tensor is not None:
                        tensor.copy_(result)

    def reset(self) -> None:
        self._capture, self._complete = None, False

    def pool(self) -> object:
        return self._pool

    def enable_debug_mode(self) -> None:
        pass


class graph:
    """Stands in for `torch.cuda.graph`."""

    def __init__(self, cuda_graph: CUDAGraph, pool: object = None, stream: Any = None, **options: Any):
        self._graph, self._pool, self._stream = cuda_graph, pool, stream or Stream()

    def __enter__(self) -> None:
        wait_for_device()
        self._outer = stream(self._stream)
        self._outer.__enter__()
        self._graph.capture_begin(self._pool)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._graph.capture_end(failed=error is not None)
        self._outer.__exit__(kind, error, trace)


class Stream:
    """Stands in for `torch.cuda.Stream`. Operations of all streams run in the order in which they were asked for."""

    def __init__(self, device: Any = None, priority: int = 0, **options: Any):
        self.device = torch.device("cuda", 0)
        self.cuda_stream = id(self)

    def synchronize(self) -> None:
        wait_for_device("stream")

    def query(self) -> bool:
        return True

    def wait_stream(self, other: Stream) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        self._outer = stream(self)
        self._outer.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._outer.__exit__(*error)


_default_stream = Stream()
_current_stream = _default_stream


class stream:
    """Stands in for `torch.cuda.stream`."""

    def __init__(self, stream: Stream | None):
        self._new = stream

    def __enter__(self) -> None:
        global _current_stream
        self._old, _current_stream = _current_stream, self._new or _current_stream

    def __exit__(self, *error: object) -> None:
        global _current_stream
        _current_stream = self._old


class Event:
    """Stands in for `torch.cuda.Event`."""

    def __init__(self, enable_timing: bool = False, **options: Any):
        self._transfers: list[pinned_memory.Transfer] = []
        self._at: float | None = None
        self._timed = enable_timing

    def record(self, stream: Stream | None = None) -> None:
        self._transfers = pinned_memory.transfers_under_way()
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        require_no_capture()
        note("sync", "event")
        pinned_memory.end_transfers(self._transfers)

    def query(self) -> bool:
        require_no_capture()
        pinned_memory.end_transfers(self._transfers)
        return True

    def wait(self, stream: Stream | None = None) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        if not (self._timed and end._timed and self._at is not None and end._at is not None):
            raise ValueError("Both events must be created with enable_timing=True and recorded")
        return 1000.0 * (end._at - self._at)


def install_graphs(generator: Any) -> None:
    """Put streams, events and graphs into `torch.cuda`."""
    CUDAGraph.generator = generator
    replaced = {
        "CUDAGraph": CUDAGraph,
        "graph": graph,
        "Stream": Stream,
        "Event": Event,
        "stream": stream,
        "current_stream": lambda device=None: _current_stream,
        "default_stream": lambda device=None: _default_stream,
        "graph_pool_handle": object,
        "is_current_stream_capturing": lambda: _capture is not None,
    }
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
        if hasattr(torch.cuda.graphs, name):
            setattr(torch.cuda.graphs, name, value)
