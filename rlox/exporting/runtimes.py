"""Programs that run exported files: ONNX Runtime, TorchScript, and C through the compiler of this machine."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rlox.exporting.c import c_name
from rlox.exporting.graph import Graph
from rlox.exporting.onnx import require

Arrays = dict[str, np.ndarray]
Run = Callable[[Arrays], Arrays]  # from inputs (B, …) by name to outputs by name
C_FLAGS = ("-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic", "-O2")
_COMPILERS = ("cc", "gcc", "clang")


def load_onnx(graph: Graph, path: Path) -> tuple[Run, str]:
    """Return a function that runs an ONNX file, and the name of its runtime.

    Raises
    ------
    ImportError
        Without ONNX Runtime.
    """
    runtime = require("onnxruntime", "runs ONNX files to check them")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = list(graph.outputs)
    return (
        lambda inputs: dict(zip(names, session.run(names, inputs), strict=True)),
        f"ONNX Runtime {runtime.__version__}",
    )


def load_torchscript(graph: Graph, path: Path) -> tuple[Run, str]:
    """Return a function that runs TorchScript, and the name of its runtime."""
    import warnings

    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        module = torch.jit.load(str(path), map_location="cpu")

    def run(inputs: Arrays) -> Arrays:
        with torch.inference_mode():
            results = module(*(torch.from_numpy(inputs[value.name]) for value in graph.inputs))
        return {name: result.numpy() for name, result in zip(graph.outputs, results, strict=True)}

    return run, f"TorchScript of PyTorch {torch.__version__}"


def find_compiler() -> str | None:
    """Return the C compiler of ``CC`` or of this machine; None without one."""
    named = os.environ.get("CC", "").split()
    return next((path for name in (*named[:1], *_COMPILERS) if (path := shutil.which(name))), None)


def compile_c(compiler: str, path: Path, out: Path, *flags: str) -> None:
    """Compile a C file with all warnings as errors, which are part of the RuntimeError."""
    command = [compiler, *C_FLAGS, *flags, "-o", str(out), str(path), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"export: {compiler} must compile {path.name}, but says: {done.stderr.strip()[:500]}")


def load_c(graph: Graph, path: Path) -> tuple[Run, str]:
    """Compile a C file as a library. Return a function that runs it row by row, and the name of the compiler.

    Raises
    ------
    RuntimeError
        If there is no compiler, or if it refuses the file.
    """
    compiler = find_compiler()
    if compiler is None:
        raise RuntimeError("export: there must be a C compiler to check the file with (cc, gcc or clang; CC names one)")
    with tempfile.TemporaryDirectory(prefix="rlox-export-") as folder:
        library = Path(folder) / "policy.so"
        compile_c(compiler, path, library, "-shared", "-fPIC")
        act = getattr(ctypes.CDLL(str(library)), f"{c_name(path.stem)}_act")

    def run(inputs: Arrays) -> Arrays:
        n = len(inputs["obs"])
        outputs = {
            name: np.zeros((n, *value.shape), np.int32 if value.kind == "int" else np.float32)
            for name, value in graph.outputs.items()
        }
        rows = {name: np.ascontiguousarray(x) for name, x in inputs.items()}
        if "state" in rows:
            outputs["next_state"][:] = rows["state"]
            rows["state"] = outputs["next_state"]
        arrays = [rows[value.name] for value in graph.inputs if value.name != "agent"]
        for i in range(n):
            arguments: list[ctypes.c_void_p | ctypes.c_int] = [_pointer(x, i) for x in arrays]
            if "agent" in rows:
                at = [value.name for value in graph.inputs].index("agent")
                arguments.insert(at, ctypes.c_int(int(rows["agent"][i])))
            results = [_pointer(outputs[name], i) for name in ("action", "scores") if name in outputs]
            if code := act(*arguments, *results):
                raise RuntimeError(f"export: {path} must accept row {i} of the observations, but returns {code}")
        return outputs

    return run, f"{Path(compiler).name} -std=c99"


def _pointer(array: np.ndarray, row: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data + row * array.strides[0])
