"""A pretended CUDA GPU for tests on a machine without one: the numbers are computed on the CPU, by a device's rules.

After `install`, `torch.cuda.is_available()` is true for the rest of the process. Tensors that are moved to or created
on ``cuda`` become a `DeviceTensor`: a wrapper with ``device == cuda:0`` around a plain CPU tensor with the numbers.
Each operation runs on the CPU, so that control flow, ``.item()`` and whole trainings work, but as on a GPU

- operands on two devices raise (element-wise operations accept CPU scalars, and indexing accepts CPU indices),
- ``.numpy()``, ``np.asarray`` and every C kernel that takes memory refuse the tensor,
- ``.cpu()`` and ``.to("cuda")`` are copies, never aliases,
- random numbers come from a second generator (`torch.cuda.get_rng_state`),
- ``torch.autocast("cuda")`` follows CUDA's lists, because the dispatch keys are those of CUDA,
- integer matrix products, and a fused Adam with wrong dtypes, are refused,
- copies between pinned memory and the device are under way until the host waits (`pinned_memory`),
- CUDA graphs are recorded and replayed (`pretend_graphs`),
- the outputs of a function that ``torch.compile(mode="reduce-overhead")`` compiled are overwritten by its next call.

It counts kernel launches, copies and synchronisations (`device_counts`). It does not show what only real kernels have:
missing dtypes, rounding, races between streams, limits of memory, Inductor's code, NCCL.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pinned_memory
import pretend_graphs
import torch
import torch.utils._pytree as pytree
from device_counts import note
from pretend_compile import install_compile
from pretend_graphs import current_capture, wait_for_device
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

CUDA, CPU = torch.device("cuda:0"), torch.device("cpu")
MEMORY = 80 << 30  # bytes


class DeviceTensor(torch.Tensor):
    """A tensor that claims to be on cuda:0; `inner`, a plain CPU tensor, has its numbers."""

    inner: torch.Tensor
    any_created = False  # whether the process has used the device

    @staticmethod
    def __new__(cls, inner: torch.Tensor, requires_grad: bool = False) -> DeviceTensor:
        DeviceTensor.any_created = True
        # A view of a normal tensor is a normal tensor, also in inference mode.
        agree = inner.is_inference() == torch.is_inference_mode_enabled()
        with contextlib.nullcontext() if agree else torch.inference_mode(inner.is_inference()):
            self = torch.Tensor._make_wrapper_subclass(
                cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
                layout=inner.layout, device=CUDA, requires_grad=requires_grad,
            )  # fmt: skip
        self.inner = inner
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run_operation(func, args, kwargs or {})

    # nn.Module.to swaps parameters whose conversion is a "traceable wrapper", instead of setting their .data.
    def __tensor_flatten__(self):
        return ["inner"], self.requires_grad

    @staticmethod
    def __tensor_unflatten__(inner, requires_grad, *_):
        return DeviceTensor(inner["inner"], requires_grad)

    def __repr__(self, *, tensor_contents=None):
        return f"DeviceTensor({torch.Tensor.__repr__(self.inner)}, device='cuda:0')"

    def numpy(self, *, force: bool = False):
        if not force:
            raise TypeError(
                f"can't convert {CUDA} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host "
                "memory first."
            )
        return self.detach().cpu().numpy(force=True)

    def __array__(self, dtype=None, copy=None):
        return self.numpy()

    def tolist(self):
        return self.detach().cpu().tolist()

    def data_ptr(self):
        return self.inner.data_ptr()

    def untyped_storage(self):
        return self.inner.untyped_storage()

    def is_pinned(self, device=None):
        return False

    def pin_memory(self, device=None):
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")

    def __dlpack__(self, *args, **kwargs):
        raise BufferError("a tensor of the pretended GPU cannot be exported")

    @property
    def __cuda_array_interface__(self):
        raise AttributeError("__cuda_array_interface__")

    @property
    def data(self):
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, value):
        if not isinstance(value, DeviceTensor):  # nn.Module.to("cpu")
            kept = self.requires_grad
            other = value.detach()
            if getattr(self, "_is_param", False):
                other = torch.nn.Parameter(other, kept)
            torch.utils.swap_tensors(self, other)
            return
        torch.Tensor.data.__set__(self, value)
        self.inner = value.inner

    def __deepcopy__(self, memo):
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("Only Tensors created explicitly by the user support the deepcopy protocol")
        copied = DeviceTensor(copy.deepcopy(self.inner, memo), self.requires_grad)
        for name, value in self.__dict__.items():
            if name != "inner":
                copied.__dict__[name] = copy.deepcopy(value, memo)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol):
        return _restore_tensor, (self.inner.detach(), self.requires_grad, getattr(self, "_is_param", False))


def _restore_tensor(inner: torch.Tensor, requires_grad: bool, is_param: bool) -> DeviceTensor:
    install()  # the process that unpickles a tensor of the device needs the device as well
    tensor = DeviceTensor(inner, requires_grad)
    if is_param:
        tensor._is_param = True
    return tensor


class Generator:
    """The device's generator of random numbers, as `torch.cuda.manual_seed` sets it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.seed(0)

    def seed(self, seed: int) -> None:
        self._state = torch.Generator().manual_seed(int(seed) % 2**63).get_state()

    def get_state(self) -> torch.Tensor:
        return self._state.clone()

    def set_state(self, state: torch.Tensor) -> None:
        self._state = state.clone()

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Let CPU operations draw from this generator."""
        host = torch.random.default_generator
        with self._lock:
            before = host.get_state()
            host.set_state(self._state)
            try:
                yield
            finally:
                self._state = host.get_state()
                host.set_state(before)


GENERATOR = Generator()

# ---- operations

_VIEWS = {
    "view", "_unsafe_view", "expand", "permute", "transpose", "t", "slice", "select", "split", "split_with_sizes",
    "unbind", "unsqueeze", "squeeze", "alias", "detach", "as_strided", "chunk", "diagonal", "lift_fresh",
    "_reshape_alias", "unfold", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "view_as",
    "is_same_size", "sym_size", "stride",
}  # fmt: skip
_WAITING = {
    "_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "unique_consecutive", "item",
    "is_nonzero", "bincount", "histc",
}  # fmt: skip
_WITHOUT_INTEGERS = {
    "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "convolution", "linear", "_addmm_activation",
}  # fmt: skip
# Operations that add or choose in an order that changes, and how CUDA calls them.
_RANDOM_ORDER = {
    "cumsum": "cumsum_cuda_kernel", "cumsum_": "cumsum_cuda_kernel", "kthvalue": "kthvalue CUDA",
    "histc": "_histc_cuda with floating point input", "bincount": "_bincount_cuda with weights",
    "_adaptive_avg_pool2d_backward": "adaptive_avg_pool2d_backward_cuda",
    "upsample_bilinear2d_backward": "upsample_bilinear2d_backward_out_cuda",
}  # fmt: skip
_OF_INTEGERS_DETERMINISTIC = {"cumsum", "cumsum_", "histc", "bincount"}
_INDEXING = {"index", "index_put", "index_put_", "_unsafe_index", "_unsafe_index_put", "_index_put_impl_"}
_FILLING = {"fill_", "fill", "where", "masked_fill", "masked_fill_", "index_fill", "index_fill_"}
_OF_ANY_DEVICE = {"copy_", "_to_copy", "set_", "record_stream", "copy"}


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _refuse_mixed(func: Any, name: str, args: Any, plain: list[torch.Tensor]) -> None:
    """Raise as CUDA does if plain CPU tensors are among the arguments, unless this operation accepts them."""
    if name in _OF_ANY_DEVICE:
        return
    large = [x for x in plain if x.dim()]
    first = func._schema.arguments[0].alias_info if func._schema.arguments else None
    if first is not None and first.is_write and any(args[0] is x for x in plain):
        large = large or plain[:1]  # an in-place operation on a CPU tensor takes no operand from the GPU
    if not large and (torch.Tag.pointwise in func.tags or name in _FILLING):
        return
    if name in _INDEXING:
        indices = [x for x in pytree.tree_leaves(args[1]) if isinstance(x, torch.Tensor)]
        rest = [x for x in plain if not any(x is i for i in indices) and x.dim()]
        if isinstance(args[0], DeviceTensor) and not rest:
            _copy_from_pageable()
            return
    which = (large or plain)[0]
    raise RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
        f"({func} got a cpu tensor of shape {tuple(which.shape)})"
    )


def _copy_from_pageable() -> None:
    """Count a copy from ordinary memory to the device, for which the host waits."""
    if current_capture() is not None:
        raise RuntimeError(
            "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned. "
            "Please use tensor.pin_memory() or allocate the tensor with pin_memory=True."
        )
    note("h2d")
    wait_for_device("h2d")


@functools.cache
def _is_composite(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def run_operation(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation of which an argument may be on the device, or whose result is to be."""
    name = func._schema.name.partition("::")[2]
    leaves = pytree.tree_leaves((args, kwargs))
    ours = [x for x in leaves if isinstance(x, DeviceTensor)]
    asked = kwargs.get("device")
    if not ours and not _is_cuda(asked):
        return _run_on_host(func, name, args, kwargs)
    if _is_composite(func):  # in inference mode operations arrive whole
        with DeviceMode():
            return func.decompose(*args, **kwargs)
    plain = [x for x in leaves if isinstance(x, torch.Tensor) and not isinstance(x, DeviceTensor)]
    if ours and plain:
        _refuse_mixed(func, name, args, plain)
    if name == "record_stream":
        return None
    on_cuda = _is_cuda(asked) if asked is not None else bool(ours)
    if name in ("_to_copy", "copy_") and (plain or not on_cuda):
        return _copy_between(name, args, kwargs, on_cuda)
    _refuse_unsupported(name, args, ours)
    if torch.are_deterministic_algorithms_enabled():
        _refuse_random_order(name, ours)

    capture = current_capture()
    masks = name == "index" and any(
        isinstance(x, torch.Tensor) and x.dtype in (torch.bool, torch.uint8) for x in pytree.tree_leaves(args[1])
    )
    is_view = name.removesuffix("_copy") in _VIEWS
    if name in _WAITING or masks:
        wait_for_device(name)
    elif not is_view and capture is None:
        note("launch", name)

    def on_host(x: Any) -> Any:
        if isinstance(x, DeviceTensor):
            return x.inner
        if capture is not None and isinstance(x, torch.Tensor):
            return capture.constant(x)
        return CPU if isinstance(x, torch.device) and x.type == "cuda" else x

    host_args, host_kwargs = pytree.tree_map(on_host, (list(args), dict(kwargs)))
    host_kwargs.pop("pin_memory", None)
    draws = on_cuda and torch.Tag.nondeterministic_seeded in func.tags and host_kwargs.get("generator") is None
    func_here = _ONLY_CUDA.get(name, func)
    if capture is not None:
        out = capture.run(func_here, host_args, host_kwargs, draws, is_view)
    else:
        with GENERATOR.used() if draws else contextlib.nullcontext():
            out = func_here(*host_args, **host_kwargs)
    if torch.Tag.inplace_view in func.tags and ours:
        with no_dispatch():  # the same change of shape for the wrapper
            func(*args, **kwargs)

    known = {id(x.inner): x for x in ours}

    def on_device(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or isinstance(x, DeviceTensor):
            return x
        if id(x) in known:  # in place, or out=
            outer = known[id(x)]
            if outer.shape != x.shape:
                raise NotImplementedError(f"{func} resized its output from {outer.shape} to {x.shape}")
            return outer
        return DeviceTensor(x) if on_cuda else x

    return pytree.tree_map(on_device, out)


def _run_on_host(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation of CPU tensors, which may pin their memory."""
    if name == "is_pinned":
        return pinned_memory.is_pinned(args[0])
    if name == "_pin_memory":
        return pinned_memory.mark_pinned(args[0].clone())
    if kwargs.get("pin_memory"):
        return pinned_memory.mark_pinned(func(*args, **{**kwargs, "pin_memory": False}))
    return func(*args, **kwargs)


def _copy_between(name: str, args: Any, kwargs: dict[str, Any], on_cuda: bool) -> Any:
    """Run ``copy_`` or ``_to_copy`` between the host and the device."""
    if name == "copy_":
        destination, source = args[:2]
        without_wait = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        to_device = isinstance(destination, DeviceTensor)
        host, result = (source if to_device else destination), destination
    else:
        (source,), without_wait, to_device = args, bool(kwargs.get("non_blocking")), on_cuda
        # A copy into new memory of the host is a copy into pageable memory, so the host waits for it.
        host, result = source, None
    kind = "h2d" if to_device else "d2h"
    pinned = host.device == CPU and pinned_memory.is_pinned(host)
    capture = current_capture()
    if result is None:
        options = {key: value for key, value in kwargs.items() if key not in ("device", "non_blocking", "pin_memory")}
        inner = source.inner if isinstance(source, DeviceTensor) else source
        if capture is None and not (pinned and without_wait):
            _wait_for_copy(kind, pinned, source.numel())
            copied = torch.ops.aten._to_copy.default(inner, **options)
            return DeviceTensor(copied) if to_device else copied
        copied = torch.empty_like(inner, dtype=options.get("dtype"), memory_format=torch.preserve_format)
        result = DeviceTensor(copied) if to_device else copied
    ends = [x.inner if isinstance(x, DeviceTensor) else x for x in (result, source)]
    if not (pinned and without_wait):
        _wait_for_copy(kind, pinned, source.numel())
        ends[0].copy_(ends[1])
    elif capture is not None:
        capture.transfer(*ends, to_device)
    else:
        note(kind)
        pinned_memory.begin_transfer(*ends, to_device)
    return result


def _wait_for_copy(kind: str, pinned: bool, n: int) -> None:
    if not n:  # nothing is copied
        return
    if kind == "h2d" and not pinned:
        _copy_from_pageable()
        return
    wait_for_device(kind)
    note(kind)


def _refuse_unsupported(name: str, args: Any, ours: list[DeviceTensor]) -> None:
    """Raise for operations that only the CPU has."""
    if name in _WITHOUT_INTEGERS and any(not x.dtype.is_floating_point and not x.dtype.is_complex for x in ours):
        raise RuntimeError(f'"{name}_cuda" not implemented for {ours[0].dtype}')
    if name.startswith("_fused_adam"):
        for step in args[5]:
            if step.dtype != torch.float32:
                raise RuntimeError(f"expected scalar type Float but found {step.dtype}")


def _refuse_random_order(name: str, ours: list[DeviceTensor]) -> None:
    """Raise for operations without a deterministic version on a GPU."""
    is_product = name in _WITHOUT_INTEGERS and "conv" not in name
    if is_product and os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in (":4096:8", ":16:8"):
        raise RuntimeError(
            "Deterministic behavior was enabled with `torch.use_deterministic_algorithms(True)`, but this operation is "
            "not deterministic because it uses CuBLAS and you have CUDA >= 10.2. Set CUBLAS_WORKSPACE_CONFIG."
        )
    kernel = _RANDOM_ORDER.get(name)
    if kernel is not None and (ours[0].is_floating_point() or name not in _OF_INTEGERS_DETERMINISTIC):
        raise RuntimeError(
            f"{kernel} does not have a deterministic implementation, but you set "
            "'torch.use_deterministic_algorithms(True)'. You can turn off determinism just for this operation."
        )


class DeviceMode(TorchDispatchMode):
    """Catches operations that create tensors on the device or move them there."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run_operation(func, args, kwargs or {})


# ---- kernels that only CUDA has


def _gru_cell(inputs, hidden, hx, b_ih=None, b_hh=None):
    if b_ih is not None:
        inputs, hidden = inputs + b_ih, hidden + b_hh
    (ir, iz, in_), (hr, hz, hn) = inputs.chunk(3, 1), hidden.chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (in_ + r * hn).tanh()
    return n + z * (hx - n), torch.cat([r, z, n, hx, hn], 1)


def _gru_cell_backward(grad, workspace, has_bias):
    r, z, n, hx, hn = workspace.chunk(5, 1)
    dn = (1 - z) * grad * (1 - n * n)
    dr, dz = dn * hn * r * (1 - r), (hx - n) * grad * z * (1 - z)
    inputs, hidden = torch.cat([dr, dz, dn], 1), torch.cat([dr, dz, dn * r], 1)
    return inputs, hidden, grad * z, *((inputs.sum(0), hidden.sum(0)) if has_bias else (None, None))


_ONLY_CUDA = {"_thnn_fused_gru_cell": _gru_cell, "_thnn_fused_gru_cell_backward": _gru_cell_backward}

# ---- installation


def _install_guard() -> None:
    """Teach a PyTorch without a GPU that CUDA exists: a device guard that does nothing, and hooks that say "built".

    A build with CUDA needs only the first line. In a CPU-only build `_ensureCUDADeviceGuardSet` does nothing unless
    there is a guard that counts no devices; so it is shown an object whose every virtual method returns 0. The autograd
    engine then asks the CUDA hooks `isBuilt()`, the first virtual method after the destructor.
    """
    torch._C._ensureCUDADeviceGuardSet()
    folder = os.path.join(os.path.dirname(torch.__file__), "lib")
    suffix = "dylib" if sys.platform == "darwin" else "so"
    c10, cpu = (ctypes.CDLL(os.path.join(folder, f"lib{name}.{suffix}")) for name in ("c10", "torch_cpu"))
    registry = (ctypes.c_void_p * 8).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
    if not registry[1]:  # DeviceType::CUDA
        zero = ctypes.CFUNCTYPE(ctypes.c_int64)(lambda: 0)
        table = (ctypes.c_void_p * 128)(*[ctypes.cast(zero, ctypes.c_void_p).value] * 128)
        empty = (ctypes.c_void_p * 1)(ctypes.addressof(table))
        registry[1] = ctypes.addressof(empty)
        torch._C._ensureCUDADeviceGuardSet()
        if registry[1] == ctypes.addressof(empty):
            raise RuntimeError(f"pretend_cuda: PyTorch {torch.__version__} did not register its guard of CUDA devices")
    hooks = cpu._ZN2at6detail12getCUDAHooksEv
    hooks.restype, hooks.argtypes = ctypes.c_void_p, []
    vtable = ctypes.c_void_p.from_address(hooks())
    table = (ctypes.c_void_p * 98)(*(ctypes.c_void_p * 98).from_address(vtable.value - 16))  # with offset and type
    true = ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p).value  # native code that returns 1
    table[4] = table[5] = table[6] = true  # isBuilt, isAvailable, hasPrimaryContext
    vtable.value = ctypes.addressof(table) + 16
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(table))  # used until the process ends
    if torch._C._accelerator_getAccelerator().type != "cuda":
        raise RuntimeError(f"pretend_cuda: PyTorch {torch.__version__} does not believe that it was built for CUDA")


_installed = False


def install() -> None:
    """Turn the pretended GPU on, for this process and all threads that start afterwards.

    Must come before the first backward pass of the process, which starts the threads of all devices.
    """
    global _installed
    if _installed:
        return
    _installed = True
    _install_guard()
    for name, value in _replacements().items():
        setattr(torch.cuda, name, value)
    torch.backends.cudnn.enabled = False  # a PyTorch with CUDA has it, and it needs a driver
    torch.Tensor.is_pinned = lambda self, device=None: pinned_memory.is_pinned(self)
    torch.Tensor.pin_memory = lambda self, device=None: (
        self if pinned_memory.is_pinned(self) else pinned_memory.mark_pinned(self.clone())
    )
    pretend_graphs.install_graphs(GENERATOR)
    install_compile(DeviceTensor)
    torch.random.fork_rng = _fork_both(torch.random.fork_rng)
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") then reaches the mode
    _enter_in_threads()
    DeviceMode().__enter__()


def _replacements() -> dict[str, Callable[..., Any]]:
    properties = types.SimpleNamespace(
        name="Pretended GPU", major=9, minor=0, total_memory=MEMORY, multi_processor_count=132, warp_size=32,
        gcnArchName="", uuid=f"GPU-{os.environ.get('LOCAL_RANK', 0)}",
    )  # fmt: skip

    def set_device(device: Any) -> None:
        index = torch.device(device).index if isinstance(device, (str, torch.device)) else int(device)
        if index not in (None, 0, -1):
            raise torch.AcceleratorError("CUDA error: invalid device ordinal")

    def get_rng_state(device: Any = "cuda") -> torch.Tensor:
        pretend_graphs.require_no_capture()
        return GENERATOR.get_state()

    def set_rng_state(state: torch.Tensor, device: Any = "cuda") -> None:
        pretend_graphs.require_no_capture()
        GENERATOR.set_state(state)

    def constant(value: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: value

    return {
        "_is_in_bad_fork": constant(False),
        "_lazy_call": lambda function, **options: function(),
        "_lazy_init": constant(None),
        "current_device": constant(0),
        "device_count": constant(1),
        "empty_cache": constant(None),
        "get_device_capability": constant((9, 0)),
        "get_device_name": constant(properties.name),
        "get_device_properties": constant(properties),
        "get_rng_state": get_rng_state,
        "get_rng_state_all": lambda: [get_rng_state()],
        "init": constant(None),
        "is_available": constant(True),
        "is_bf16_supported": constant(True),
        "is_initialized": lambda: DeviceTensor.any_created,
        "manual_seed": GENERATOR.seed,
        "manual_seed_all": GENERATOR.seed,
        "max_memory_allocated": constant(0),
        "max_memory_reserved": constant(0),
        "mem_get_info": constant((MEMORY, MEMORY)),
        "memory_allocated": constant(0),
        "memory_reserved": constant(0),
        "reset_peak_memory_stats": constant(None),
        "seed_all": constant(None),
        "set_device": set_device,
        "set_rng_state": set_rng_state,
        "set_rng_state_all": lambda states: set_rng_state(states[0]),
        "synchronize": lambda device=None: wait_for_device("device"),
    }


def _fork_both(fork_rng: Callable[..., Any]) -> Callable[..., Any]:
    @contextlib.contextmanager
    def fork(devices: Any = None, enabled: bool = True, *args: Any, **kwargs: Any) -> Iterator[None]:
        before = GENERATOR.get_state()
        with fork_rng([], enabled):
            try:
                yield
            finally:
                if enabled and devices != []:
                    GENERATOR.set_state(before)

    return fork


def _enter_in_threads() -> None:
    run_thread = threading.Thread.run

    def run(self: threading.Thread) -> None:
        with DeviceMode():
            run_thread(self)

    threading.Thread.run = run


def install_collectives() -> None:
    """Let ``gloo`` reduce and spread tensors of the device, as NCCL does; each rank has a pretended GPU of its own."""
    import torch.distributed as dist

    def on_host(collective: Callable[..., Any]) -> Callable[..., Any]:
        def run(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(tensor, DeviceTensor):
                wait_for_device(collective.__name__)
                tensor = tensor.inner
            return collective(tensor, *args, **kwargs)

        return run

    dist.all_reduce, dist.broadcast = on_host(dist.all_reduce), on_host(dist.broadcast)
