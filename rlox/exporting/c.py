"""A graph as a C header and a C source file, in C99 and without dependencies."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rlox.exporting.c_functions import FUNCTIONS, NEED_MATH, SMALL, TILE, with_needs
from rlox.exporting.graph import ARITHMETIC, ELEMENTWISE, Graph, Operation, Value

_SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_TYPES = {"float": "float", "byte": "unsigned char", "bool": "unsigned char", "int": "int"}
_PER_LINE = 8  # constants


def write_c(graph: Graph, path: Path) -> list[Path]:
    """Write ``NAME.c``, which is `path`, and ``NAME.h``. Return both.

    Raises
    ------
    ValueError
        If PyTorch modules are among the operations.
    """
    if graph.foreign_modules:
        modules = ", ".join(dict.fromkeys(graph.foreign_modules))
        raise ValueError(
            f"export: {modules} cannot be written as C, which knows perceptrons, convolutions and memories of rlox's "
            "layers; onnx and torchscript can hold other modules"
        )
    source = _Source(graph, c_name(path.stem))
    header = path.with_suffix(".h")
    header.write_text(source.header(), encoding="utf-8")
    path.write_text(source.source(header.name), encoding="utf-8")
    return [path, header]


def c_name(stem: str) -> str:
    """Return the start of all names of a file with this stem: a C identifier."""
    name = re.sub(r"\W", "_", stem, flags=re.ASCII)
    return name if re.match(r"[A-Za-z]", name) else f"policy_{name}"


class _Source:
    """The text of both files."""

    def __init__(self, graph: Graph, name: str):
        self._graph, self._name = graph, name
        self._used: set[str] = set()  # functions
        self._tables: list[str] = []  # weights
        self._body: list[str] = []
        self._declared: list[str] = []
        self._names = {value.name: value.name for value in graph.inputs}
        self._left = Counter(x.name for op in graph.operations for x in op.inputs)
        self._left.update(value.name for value in graph.outputs.values())
        self._inputs = {value.name: value for value in graph.inputs}
        for op in graph.operations:
            self._write(op)

    # ---- the header

    def header(self) -> str:
        """Return the text of the header."""
        guard = self._macro("H")
        lines = [
            *self._title(),
            f"#ifndef {guard}",
            f"#define {guard}",
            "#ifdef __cplusplus",
            'extern "C" {',
            "#endif",
            "",
            *(f"#define {self._macro(name)} {n}" for name, n in self._sizes().items()),
            "",
            "/* Choose the action for an observation.",
            " *",
            *(f" * {name:<7} {text}" for name, text in self._arguments()),
            " *",
            " * Returns 0; 1 if a number of the observation is not finite"
            + ("; 2 if the mask allows nothing" if "mask" in self._inputs else "")
            + ("; 3 if there is no such agent" if "agent" in self._inputs else "")
            + ".",
            " */",
            f"{self._signature()};",
            "",
            "#ifdef __cplusplus",
            "}",
            "#endif",
            "#endif",
        ]
        return "\n".join(lines) + "\n"

    def _title(self) -> list[str]:
        about = self._graph.about
        where = f" on {about['env']}" if about["env"] else ""
        return [
            f"/* The policy of {_comment(about['algorithm'] + where)}, written by rlox {about['rlox']}.",
            f" * {_comment(json.dumps(about))}",
            " */",
        ]

    def _macro(self, name: str) -> str:
        return f"{self._name.upper()}_{name}"

    def _sizes(self) -> dict[str, int]:
        graph, sizes = self._graph, {}
        for name in ("obs", "mask", "state", "noise"):
            if name in self._inputs:
                sizes[f"{name.upper()}_SIZE"] = self._inputs[name].size
        sizes["ACTION_SIZE"] = graph.outputs["action"].size
        if "scores" in graph.outputs:
            sizes["SCORES_SIZE"] = graph.outputs["scores"].size
        return sizes

    def _arguments(self) -> Iterator[tuple[str, str]]:
        """Yield the arguments and what they are."""
        about, graph = self._graph.about, self._graph
        yield "obs", _comment(about["observation"])
        if "mask" in self._inputs:
            yield "mask", "1 for each legal choice, 0 for the others"
        if "agent" in self._inputs:
            yield "agent", _comment(f"index of the agent: {', '.join(about['agents'])}")
        if "state" in self._inputs:
            yield "state", "the memory: zeros at the start of an episode; is replaced by the next one"
        if "noise" in self._inputs:
            yield "noise", "random numbers, uniform in [0, 1)"
        if graph.outputs["action"].kind == "float":
            yield "action", "result: in the environment's units, within its bounds"
        else:
            choices = ", ".join(map(str, about["n_choices"]))
            yield "action", f"result: one of {choices} choices, counted from {', '.join(map(str, about['first']))}"
        if "scores" in graph.outputs:
            yield "scores", "result: the score of each choice, or NULL"

    def _signature(self) -> str:
        parts = []
        for value in self._graph.inputs:
            kind = _TYPES[value.kind]
            constant = "" if value.name == "state" else "const "
            parts.append("int agent" if value.name == "agent" else f"{constant}{kind} *{value.name}")
        parts.append(f"{_TYPES[self._graph.outputs['action'].kind]} *action")
        if "scores" in self._graph.outputs:
            parts.append("float *scores")
        return f"int {self._name}_act({', '.join(parts)})"

    # ---- the source

    def source(self, header: str) -> str:
        """Return the text of the source file, which includes the `header`."""
        checks = self._checks()
        endings = self._endings()
        functions = with_needs(self._used)
        compiled = f"cc -std=c99 -O3 -march=native -c {Path(header).stem}.c"
        needs_math = any(name in NEED_MATH for name in functions)
        lines = [
            *self._title(),
            f"/* Compile it with `{compiled}`" + (", and link with -lm." if needs_math else ".")
            + f" With -D{self._macro('MAIN')} it is a program\n * that reads observations and prints actions.\n */",
            f'#include "{header}"',
            *(["", "#include <math.h>"] if needs_math else []),
            "",
            *(FUNCTIONS[name][1].replace("CONV_CHANNELS", str(self._most_channels())) for name in functions),
            *self._tables,
            f"{self._signature()}",
            "{",
            *(f"    {line}" for line in self._declared),
            *(["    int i;"] if any("for (i" in line for line in [*self._body, *endings, *checks]) else []),
            *(f"    {line}" for line in [*checks, *self._body, *endings]),
            "    return 0;",
            "}",
            "",
            *self._main(),
        ]  # fmt: skip
        return "\n".join(lines) + "\n"

    def _most_channels(self) -> int:
        return max((op.output.shape[0] for op in self._graph.operations if op.name == "conv"), default=1)

    def _checks(self) -> list[str]:
        lines = []
        if self._inputs["obs"].kind == "float":
            self._used.add("all_finite")
            lines.append(f"if (!all_finite(obs, {self._inputs['obs'].size})) return 1;")
        if "mask" in self._inputs:
            start = 0
            for n in self._graph.about["n_choices"]:
                any_legal = " && ".join(f"!mask[{i}]" for i in range(start, start + n))
                lines.append(f"if ({any_legal}) return 2;")
                start += n
        if "agent" in self._inputs:
            lines.append(f"if (agent < 0 || agent >= {len(self._graph.about['agents'])}) return 3;")
        return lines

    def _endings(self) -> list[str]:
        """Return the lines that copy results to the caller's arrays."""
        lines = []
        for name, target in (("action", "action"), ("scores", "scores"), ("next_state", "state")):
            if name not in self._graph.outputs:
                continue
            value = self._graph.outputs[name]
            text = f"for (i = 0; i < {value.size}; i++) {target}[i] = {_at(self._names[value.name])}[i];"
            lines.append(f"if (scores) {text}" if name == "scores" else text)
        return lines

    # ---- operations

    def _write(self, op: Operation) -> None:
        inputs = [self._names[value.name] for value in op.inputs]
        self._left.subtract(value.name for value in op.inputs)
        if op.name in ELEMENTWISE:
            out = self._reuse(op, inputs)
            self._call(f"apply_{op.name}", out, inputs[0], op.output.size)
        elif op.name in ARITHMETIC:
            self._write_arithmetic(op, inputs)
        else:
            getattr(self, f"_write_{op.name}")(op, *inputs)

    def _call(self, function: str, *arguments: Any) -> None:
        self._used.add(function)
        self._body.append(f"{function}({', '.join(map(str, arguments))});")

    def _new(self, op: Operation) -> str:
        """Declare the array of the result."""
        output = op.output
        self._names[output.name] = output.name
        self._declared.append(f"{_TYPES[output.kind]} {output.name}[{output.size}];")
        return output.name

    def _reuse(self, op: Operation, inputs: list[str]) -> str:
        """Return the array of an input that nobody needs later and has the same size, or a new one."""
        for value, name in zip(op.inputs, inputs, strict=True):
            own = name not in self._inputs and "+" not in name
            shared = sum(self._left[other] > 0 for other, held in self._names.items() if held.split(" + ")[0] == name)
            if own and not shared and value.size == op.output.size and value.kind == op.output.kind:
                self._names[op.output.name] = name
                return name
        return self._new(op)

    def _table(self, op: Operation, name: str, array: np.ndarray) -> str:
        """Write a constant array. Return its name."""
        table = f"{op.output.name}_{name}"
        texts = [_number(x) for x in array.ravel().tolist()]
        lines = [", ".join(texts[i : i + _PER_LINE]) for i in range(0, len(texts), _PER_LINE)]
        body = ",\n    ".join(lines)
        self._tables.append(f"static const float {table}[{len(texts)}] = {{\n    {body}\n}};\n")
        return table

    def _write_linear(self, op: Operation, x: str) -> None:
        weight, bias = op.arrays["weight"], op.arrays["bias"]
        tables = self._table(op, "weight", tile_weights(weight)), self._table(op, "bias", bias)
        n_out, n_in = weight.shape
        self._call("linear", self._new(op), x, *tables, n_in, n_out)

    def _write_block_linear(self, op: Operation, x: str) -> None:
        weight = op.arrays["weight"]
        n_blocks, n_in, n_out = weight.shape
        tiled = np.stack([tile_weights(block.T) for block in weight])
        tables = self._table(op, "weight", tiled), self._table(op, "bias", op.arrays["bias"])
        out = self._new(op)
        self._used.add("linear")
        at = f"{out} + {n_out} * i, {x} + {n_in} * i, {tables[0]} + {tiled[0].size} * i, {tables[1]} + {n_out} * i"
        self._body.append(f"for (i = 0; i < {n_blocks}; i++) linear({at}, {n_in}, {n_out});")

    def _write_conv(self, op: Operation, x: str) -> None:
        weight = op.arrays["weight"]
        tables = self._table(op, "weight", weight.transpose(1, 2, 3, 0)), self._table(op, "bias", op.arrays["bias"])
        top, left, _, _ = op.settings["border"]
        sizes = (*op.inputs[0].shape, *op.output.shape, *weight.shape[2:], *op.settings["stride"], top, left)
        self._call("conv", self._new(op), x, *tables, *sizes)

    def _write_rms_norm(self, op: Operation, x: str) -> None:
        scale, n = self._table(op, "scale", op.arrays["scale"]), op.output.shape[0]
        eps = _number(op.settings["eps"])
        self._call("rms_norm", self._reuse(op, [x]), x, scale, eps, n, op.output.size // n)

    def _write_layer_norm(self, op: Operation, x: str) -> None:
        tables = self._table(op, "scale", op.arrays["scale"]), self._table(op, "bias", op.arrays["bias"])
        self._call("layer_norm", self._reuse(op, [x]), x, *tables, _number(op.settings["eps"]), op.output.size)

    def _write_expectation(self, op: Operation, logits: str) -> None:
        numbers = op.arrays["numbers"]
        self._call("expectation", self._new(op), logits, self._table(op, "of", numbers), op.output.size, len(numbers))

    def _write_arithmetic(self, op: Operation, inputs: list[str]) -> None:
        values = list(op.inputs)
        if len(inputs) == 1:
            b = op.arrays["b"]
            single = b.size == 1
            second = _number(float(b.ravel()[0])) if single else f"{self._table(op, 'b', b)}[i]"
        else:
            second = f"{_at(inputs[1])}[{'i' if values[1].size == op.output.size else '0'}]"
        first = f"{_at(inputs[0])}[{'i' if values[0].size == op.output.size else '0'}]"
        n, sign = op.output.size, _SIGNS[op.name]
        # The array of a vector may be overwritten place by place.
        out = self._reuse(op, inputs)
        self._body.append(f"for (i = 0; i < {n}; i++) {out}[i] = {first} {sign} {second};")

    def _write_affine(self, op: Operation, x: str) -> None:
        tables = self._table(op, "scale", op.arrays["scale"]), self._table(op, "shift", op.arrays["shift"])
        self._call("affine", self._reuse(op, [x]), x, *tables, op.output.size)

    def _write_clip(self, op: Operation, x: str) -> None:
        bounds: list[Any] = []
        for name in ("low", "high"):
            array = np.nan_to_num(op.arrays[name], nan=0.0, posinf=np.inf, neginf=-np.inf)
            array = np.clip(array, np.finfo(np.float32).min, np.finfo(np.float32).max)
            bounds += [self._table(op, name, array), int(array.size > 1)]
        self._call("clip", self._reuse(op, [x]), x, *bounds, op.output.size)

    def _write_scale_bytes(self, op: Operation, x: str) -> None:
        out = self._new(op)
        self._body.append(f"for (i = 0; i < {op.output.size}; i++) {out}[i] = (float){x}[i] / 255.0f;")

    def _write_mean(self, op: Operation, x: str) -> None:
        self._used.add("mean")
        self._body.append(f"{self._new(op)}[0] = mean({x}, {op.inputs[0].size});")

    def _write_reshape(self, op: Operation, x: str) -> None:
        self._alias(op, x, 0)

    def _write_slice(self, op: Operation, x: str) -> None:
        self._alias(op, x, op.settings["start"])

    def _alias(self, op: Operation, x: str, start: int) -> None:
        """Let a part of an array stand for the result."""
        name, _, offset = x.partition(" + ")
        total = start + int(offset or 0)
        self._names[op.output.name] = f"{name} + {total}" if total else name

    def _write_concat(self, op: Operation, *parts: str) -> None:
        out, start = self._new(op), 0
        for value, part in zip(op.inputs, parts, strict=True):
            place = f"{start} + i" if start else "i"
            self._body.append(f"for (i = 0; i < {value.size}; i++) {out}[{place}] = {_at(part)}[i];")
            start += value.size

    def _write_mask(self, op: Operation, x: str, flags: str) -> None:
        out = self._new(op)
        self._body.append(f"for (i = 0; i < {op.output.size}; i++) {out}[i] = {flags}[i] ? {_at(x)}[i] : -3.0e38f;")

    def _write_argmax(self, op: Operation, x: str) -> None:
        self._used.add("argmax")
        self._body.append(f"{self._new(op)}[0] = argmax({x}, {op.inputs[0].size});")

    def _write_stack(self, op: Operation, *parts: str) -> None:
        out = self._new(op)
        self._body += [f"{out}[{i}] = {_at(part)}[0];" for i, part in enumerate(parts)]

    def _write_shift(self, op: Operation, x: str) -> None:
        self._body += [f"{_at(x)}[{i}] += {by};" for i, by in enumerate(op.arrays["by"].ravel().tolist()) if by]
        self._names[op.output.name] = x

    def _write_as_floats(self, op: Operation, x: str) -> None:
        out = self._new(op)
        source = "agent" if op.inputs[0].name == "agent" else f"{_at(x)}[i]"
        self._body.append(f"for (i = 0; i < {op.output.size}; i++) {out}[i] = (float){source};")

    def _write_one_hot(self, op: Operation, x: str) -> None:
        self._call("one_hot", self._new(op), x, op.inputs[0].size, op.settings["n"])

    def _write_draw(self, op: Operation, logits: str, uniform: str) -> None:
        n = op.output.size
        mix = _number(op.settings["unimix"])
        self._call("draw", self._new(op), logits, uniform, mix, n, op.inputs[0].size // n)

    # ---- the program

    def _main(self) -> list[str]:
        """Return the lines of a program that reads observations, each as its numbers, and prints actions."""
        declared, reads, arguments = [], [], []
        for value in self._graph.inputs:
            if value.name == "agent":
                declared.append("int agent;")
                reads.append("if (!next(&number)) break;\n        agent = (int)number;")
                arguments.append("agent")
                continue
            start = " = {0}" if value.name == "state" else ""
            declared.append(f"static {_TYPES[value.kind]} {value.name}[{value.size}]{start};")
            arguments.append(value.name)
            if value.name == "noise":
                reads.append(f"for (i = 0; i < {value.size}; i++) noise[i] = (float)(rand() / (RAND_MAX + 1.0));")
            elif value.name != "state":
                cast = f"({_TYPES[value.kind]})"
                reads.append(
                    f"for (i = 0; i < {value.size} && next(&number); i++) {value.name}[i] = {cast}number;\n"
                    f"        if (i < {value.size}) break;"
                )
        action = self._graph.outputs["action"]
        declared.append(f"{_TYPES[action.kind]} action[{action.size}];")
        arguments.append("action")
        if "scores" in self._graph.outputs:
            arguments.append("NULL")
        conversion = "%.9g" if action.kind == "float" else "%d"
        each = "(double)action[{i}]" if action.kind == "float" else "action[{i}]"
        printed = ", ".join(each.format(i=i) for i in range(action.size))
        pattern = " ".join([conversion] * action.size)
        has_state = "state" in self._inputs
        reset = [
            "        if (c == 'r') { /* the word \"reset\": a new episode */",
            "            for (c = 0; c < STATE; c++) state[c] = 0.0f;".replace("STATE", str(self._size_of("state"))),
            "            if (scanf(\"%*s\") == EOF) return 0;",
            "            continue;",
            "        }",
        ] if has_state else []  # fmt: skip
        outside = [line for line in declared if line.startswith("static") and " state[" in line]
        inside = [line for line in declared if line not in outside]
        stdlib = ["#include <stdlib.h>"] if "noise" in self._inputs else []
        reader = [
            "/* Read a number" + (', or start anew at the word "reset"' if has_state else "") + ". */",
            "static int next(double *number)",
            "{",
            *(
                [
                    "    for (;;) {",
                    "        int c;",
                    '        if (scanf(" ") == EOF || (c = getchar()) == EOF) return 0;',
                    *reset,
                    "        ungetc(c, stdin);",
                    '        return scanf("%lf", number) == 1;',
                    "    }",
                ]
                if has_state
                else ['    return scanf("%lf", number) == 1;']
            ),
            "}",
        ]
        loops = any("i <" in text for text in reads)
        return [
            f"#ifdef {self._macro('MAIN')}",
            "#include <stdio.h>",
            *stdlib,
            "",
            *outside,
            *([""] if outside else []),
            *reader,
            "",
            "int main(void)",
            "{",
            *(f"    {line}" for line in inside),
            "    double number;",
            *(["    int i;"] if loops else []),
            "    for (;;) {",
            *(f"        {text}" for text in reads),
            f"        if ({self._name}_act({', '.join(arguments)})) {{",
            '            fputs("an observation that is not finite, or a mask that allows nothing\\n", stderr);',
            "            return 1;",
            "        }",
            f'        printf("{pattern}\\n", {printed});',
            "        fflush(stdout);",
            "    }",
            "    return 0;",
            "}",
            "#endif",
        ]

    def _size_of(self, name: str) -> int:
        value: Value | None = self._inputs.get(name)
        return 0 if value is None else value.size


def tile_weights(weight: np.ndarray) -> np.ndarray:
    """Return weights (n_out, n_in) in the order in which the C function ``linear`` reads them, as one vector."""
    n_out, n_in = weight.shape
    whole = n_out // TILE * TILE
    rest = -(n_out - whole) % SMALL
    padded = np.concatenate([weight, np.zeros((rest, n_in), np.float32)])
    parts = [padded[o : o + TILE].T for o in range(0, whole, TILE)]
    parts += [padded[o : o + SMALL].T for o in range(whole, len(padded), SMALL)]
    return np.concatenate([part.ravel() for part in parts])


def _comment(text: str) -> str:
    """Return a text without the signs that begin or end a comment."""
    return text.replace("*/", "* /").replace("/*", "/ *")


def _at(name: str) -> str:
    """Return an expression that can be indexed."""
    return f"({name})" if " + " in name else name


def _number(x: float) -> str:
    """Return a float constant that is read as exactly this float32."""
    text = f"{x:.9g}"
    return f"{text}f" if "." in text or "e" in text else f"{text}.0f"
