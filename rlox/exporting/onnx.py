"""A graph as an ONNX file, with a free number of rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from rlox.exporting.graph import Graph, Operation, Value
from rlox.exporting.module import GraphModule, example_inputs

OPSET = 17  # of ONNX 1.12; runtimes since 2022 read it
_IR_VERSION = 8
_LOWEST = np.float32(-3.0e38)  # of a number without a flag
_NODES = {
    "tanh": "Tanh", "relu": "Relu", "sigmoid": "Sigmoid", "abs": "Abs",
    "add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div", "shift": "Add",
}  # fmt: skip


def write_onnx(graph: Graph, path: Path) -> None:
    """Write an ONNX file, with what the graph is about among its metadata.

    Raises
    ------
    ImportError
        Without the package ``onnx``, and for a policy with modules of its own, without ``onnxscript``.
    """
    onnx = require("onnx", "writes ONNX files")
    if graph.foreign_modules:
        _export_module(graph, path)
        model = onnx.load(str(path))
    else:
        model = _Writer(onnx, graph).model()
    onnx.helper.set_model_props(model, {"rlox": json.dumps(graph.about)})
    onnx.checker.check_model(model)
    onnx.save(model, str(path))


def require(package: str, does: str) -> Any:
    """Import an optional package, or raise an ImportError that says what it is for."""
    from importlib import import_module

    try:
        return import_module(package)
    except ImportError as e:
        raise ImportError(f"export: {package} must be installed, which {does}: pip install 'rlox-cli[export]'") from e


def _export_module(graph: Graph, path: Path) -> None:
    """Let PyTorch write the file, which knows the operations of modules from outside."""
    import logging
    import warnings

    import torch

    require("onnxscript", f"PyTorch needs to write the policy's {graph.foreign_modules[0]}")
    axes = tuple({0: torch.export.Dim("batch")} for _ in graph.inputs)
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                GraphModule(graph).eval(),
                tuple(example_inputs(graph)),
                str(path),
                dynamo=True,
                external_data=False,
                verbose=False,
                input_names=[value.name for value in graph.inputs],
                output_names=list(graph.outputs),
                dynamic_shapes=(axes,),
            )
    except Exception as e:
        raise ValueError(
            f"export: PyTorch cannot write the policy's {graph.foreign_modules[0]} as ONNX: {type(e).__name__}: "
            f"{str(e).strip().splitlines()[0][:200]}; torchscript may work"
        ) from e
    finally:
        logger.setLevel(level)


class _Writer:
    """Collects the nodes and constants of a model."""

    def __init__(self, onnx: Any, graph: Graph):
        self._onnx, self._helper, self._graph = onnx, onnx.helper, graph
        self._nodes: list[Any] = []
        self._constants: dict[str, np.ndarray] = {}

    def model(self) -> Any:
        """Return the whole model."""
        helper, graph = self._helper, self._graph
        for op in graph.operations:
            self._write(op)
        outputs = []
        for name, value in graph.outputs.items():
            self._node("Identity", [value.name], name)
            outputs.append(self._declare(name, value))
        inputs = [self._declare(value.name, value) for value in graph.inputs]
        constants = [self._onnx.numpy_helper.from_array(array, name) for name, array in self._constants.items()]
        made = helper.make_graph(self._nodes, "policy", inputs, outputs, constants)
        made_by = {"producer_name": "rlox", "producer_version": str(graph.about.get("rlox", ""))}
        opset = helper.make_opsetid("", OPSET)
        return helper.make_model(made, opset_imports=[opset], ir_version=_IR_VERSION, **made_by)

    def _declare(self, name: str, value: Value) -> Any:
        proto = self._onnx.TensorProto
        kinds = {"float": proto.FLOAT, "byte": proto.UINT8, "bool": proto.BOOL, "int": proto.INT64}
        return self._helper.make_tensor_value_info(name, kinds[value.kind], ["batch", *value.shape])

    def _node(self, kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self._nodes.append(self._helper.make_node(kind, inputs, [output], **attributes))
        return output

    def _constant(self, name: str, array: Any, dtype: Any = None) -> str:
        self._constants[name] = np.asarray(array, dtype)
        return name

    def _write(self, op: Operation) -> None:
        output, inputs = op.output.name, [value.name for value in op.inputs]
        arrays = {name: self._constant(f"{output}_{name}", array) for name, array in op.arrays.items()}
        if op.name in _NODES:
            self._node(_NODES[op.name], [*inputs, *arrays.values()], output)
        else:
            getattr(self, f"_write_{op.name}")(op, output, *inputs, **arrays)

    def _write_linear(self, op: Operation, out: str, x: str, weight: str, bias: str) -> None:
        self._node("Gemm", [x, weight, bias], out, transB=1)

    def _write_block_linear(self, op: Operation, out: str, x: str, weight: str, bias: str) -> None:
        n_blocks, n_in, n_out = op.arrays["weight"].shape
        self._constant(bias, op.arrays["bias"].reshape(n_blocks, 1, n_out))
        shape = self._constant(f"{out}_shape", [0, n_blocks, 1, n_in], np.int64)
        blocks = self._node("Reshape", [x, shape], f"{out}_blocks")
        product = self._node("MatMul", [blocks, weight], f"{out}_product")
        self._reshape(self._node("Add", [product, bias], f"{out}_sum"), out, op.output.shape)

    def _write_conv(self, op: Operation, out: str, x: str, weight: str, bias: str) -> None:
        strides, pads = list(op.settings["stride"]), list(op.settings["border"])
        self._node("Conv", [x, weight, bias], out, strides=strides, pads=pads)

    def _write_rms_norm(self, op: Operation, out: str, x: str, scale: str) -> None:
        self._constant(scale, op.arrays["scale"].reshape(-1, *[1] * (len(op.output.shape) - 1)))
        squares = self._node("Mul", [x, x], f"{out}_squares")
        mean = self._node("ReduceMean", [squares], f"{out}_mean", axes=[1], keepdims=1)
        eps = self._constant(f"{out}_eps", op.settings["eps"], np.float32)
        root = self._node("Sqrt", [self._node("Add", [mean, eps], f"{out}_positive")], f"{out}_root")
        self._node("Mul", [self._node("Div", [x, root], f"{out}_unit"), scale], out)

    def _write_layer_norm(self, op: Operation, out: str, x: str, scale: str, bias: str) -> None:
        self._node("LayerNormalization", [x, scale, bias], out, axis=-1, epsilon=op.settings["eps"])

    def _write_expectation(self, op: Operation, out: str, logits: str, numbers: str) -> None:
        n = len(op.arrays["numbers"])
        shape = self._constant(f"{out}_shape", [0, op.output.size, n], np.int64)
        chances = self._node("Softmax", [self._node("Reshape", [logits, shape], f"{out}_table")], f"{out}_p", axis=2)
        self._node("MatMul", [chances, numbers], out)

    def _write_silu(self, op: Operation, out: str, x: str) -> None:
        self._node("Mul", [x, self._node("Sigmoid", [x], f"{out}_gate")], out)

    def _write_symlog(self, op: Operation, out: str, x: str) -> None:
        size = self._node("Abs", [x], f"{out}_size")
        one = self._constant(f"{out}_one", 1, np.float32)
        log = self._node("Log", [self._node("Add", [size, one], f"{out}_above")], f"{out}_log")
        self._node("Mul", [self._node("Sign", [x], f"{out}_sign"), log], out)

    def _write_affine(self, op: Operation, out: str, x: str, scale: str, shift: str) -> None:
        # ONNX has no multiplication with addition; a product of two float32 is exact in float64.
        proto = self._onnx.TensorProto
        for name, array in ((scale, op.arrays["scale"]), (shift, op.arrays["shift"])):
            self._constant(name, array, np.float64)
        product = self._node("Mul", [self._node("Cast", [x], f"{out}_wide", to=proto.DOUBLE), scale], f"{out}_product")
        self._node("Cast", [self._node("Add", [product, shift], f"{out}_sum")], out, to=proto.FLOAT)

    def _write_clip(self, op: Operation, out: str, x: str, low: str, high: str) -> None:
        self._node("Min", [self._node("Max", [x, low], f"{out}_above"), high], out)

    def _write_scale_bytes(self, op: Operation, out: str, x: str) -> None:
        numbers = self._node("Cast", [x], f"{out}_numbers", to=self._onnx.TensorProto.FLOAT)
        self._node("Div", [numbers, self._constant(f"{out}_255", 255, np.float32)], out)

    def _write_mean(self, op: Operation, out: str, x: str) -> None:
        self._node("ReduceMean", [x], out, axes=[1], keepdims=1)

    def _reshape(self, x: str, out: str, shape: tuple[int, ...]) -> None:
        self._node("Reshape", [x, self._constant(f"{out}_rows", [0, *shape], np.int64)], out)

    def _write_reshape(self, op: Operation, out: str, x: str) -> None:
        self._reshape(x, out, op.output.shape)

    def _write_slice(self, op: Operation, out: str, x: str) -> None:
        start = op.settings["start"]
        ends = {"start": start, "stop": start + op.output.size, "axis": 1}
        self._node("Slice", [x, *(self._constant(f"{out}_{k}", [v], np.int64) for k, v in ends.items())], out)

    def _write_concat(self, op: Operation, out: str, *parts: str) -> None:
        self._node("Concat", list(parts), out, axis=1)

    def _write_mask(self, op: Operation, out: str, x: str, flags: str) -> None:
        self._node("Where", [flags, x, self._constant(f"{out}_lowest", _LOWEST)], out)

    def _write_argmax(self, op: Operation, out: str, x: str) -> None:
        self._node("ArgMax", [x], out, axis=1, keepdims=0)

    def _write_stack(self, op: Operation, out: str, *parts: str) -> None:
        axis = self._constant(f"{out}_axis", [1], np.int64)
        columns = [self._node("Unsqueeze", [part, axis], f"{out}_{i}") for i, part in enumerate(parts)]
        self._node("Concat", columns, out, axis=1)

    def _write_as_floats(self, op: Operation, out: str, x: str) -> None:
        numbers = self._node("Cast", [x], f"{out}_numbers", to=self._onnx.TensorProto.FLOAT)
        shape = self._constant(f"{out}_shape", [-1, op.output.size], np.int64)
        self._node("Reshape", [numbers, shape], out)

    def _write_one_hot(self, op: Operation, out: str, x: str) -> None:
        column = self._node("Unsqueeze", [x, self._constant(f"{out}_axis", [2], np.int64)], f"{out}_column")
        classes = self._constant(f"{out}_classes", np.arange(1, op.settings["n"] + 1), np.float32)
        flags = self._node("Equal", [column, classes], f"{out}_equal")
        self._reshape(
            self._node("Cast", [flags], f"{out}_flags", to=self._onnx.TensorProto.FLOAT), out, op.output.shape
        )

    def _write_draw(self, op: Operation, out: str, logits: str, uniform: str) -> None:
        n, unimix = op.output.size, op.settings["unimix"]
        classes = op.inputs[0].size // n
        table = self._node(
            "Reshape", [logits, self._constant(f"{out}_shape", [0, n, classes], np.int64)], f"{out}_table"
        )
        softmax = self._node("Softmax", [table], f"{out}_softmax", axis=2)
        scaled = self._node("Mul", [softmax, self._constant(f"{out}_rest", 1 - unimix, np.float32)], f"{out}_scaled")
        mixed = self._node("Add", [scaled, self._constant(f"{out}_mix", unimix / classes, np.float32)], f"{out}_mixed")
        axis = self._constant(f"{out}_axis", 2, np.int64)
        sums = self._node("CumSum", [mixed, axis], f"{out}_sums")
        first, last, along = (
            self._constant(f"{out}_{k}", [v], np.int64) for k, v in (("first", 0), ("last", classes - 1), ("along", 2))
        )
        inner = self._node("Slice", [sums, first, last, along], f"{out}_inner")
        column = self._node("Unsqueeze", [uniform, along], f"{out}_column")
        below = self._node("Less", [inner, column], f"{out}_below")
        flags = self._node("Cast", [below], f"{out}_flags", to=self._onnx.TensorProto.FLOAT)
        count = self._node("ReduceSum", [flags, along], f"{out}_count", keepdims=0)
        self._node("Add", [count, self._constant(f"{out}_one", 1, np.float32)], out)
