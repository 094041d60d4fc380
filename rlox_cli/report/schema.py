"""JSON Schemas of configurations, made from their dataclasses, with which editors complete and check YAML.

``conf/schema`` contains them as files, to which the head of every shipped YAML file refers. ``run.json`` has all
definitions, and the other files refer to it.
"""

from __future__ import annotations

import json
import re
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from rlox.buffers import buffer_config_class, buffer_names
from rlox.checkpoint import run_files
from rlox.config import Config, DatasetConfig, EnvConfig, LoggerConfig, RunConfig, nearest
from rlox.config.base import types_of
from rlox.tracking.loggers import logger_config
from rlox_cli.config.presets import choice_names, config_of
from rlox_cli.config.ranges import OptunaConfig
from rlox_cli.config.schema import RayLauncherConfig
from rlox_cli.config.shipped import SCHEMA_FOLDER
from rlox_cli.report.keys import comments
from rlox_cli.terminal.console import TextConsole
from rlox_cli.terminal.errors import UsageError
from rlox_cli.terminal.paths import output_path, shown

DRAFT = "http://json-schema.org/draft-07/schema#"
ALL = "run"  # the file with all definitions
_LINE = 500  # characters that stay on one line of a file

_REFERENCE = r"\$\{.+\}"  # such as ${algo.gamma}
# YAML 1.2, which editors read, has neither 1_000_000 nor 1e6 as an integer; Hydra reads both.
_NUMBER = r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?\.?inf"
_BOOLEAN = "yes|no|on|off|true|false|Yes|No|On|Off|True|False"
_FLOAT = r"-?[0-9][0-9_.]*(?:e-?[0-9]+)?"
_OR_NULL = re.compile(r",? or null$")
_CHOICES = re.compile(r"be one of ((?:[\w.-]+, )*[\w.-]+)")
_AT_LEAST = re.compile(rf"be (>=|>) ({_FLOAT})(?: and finite)?(?: and at most ({_FLOAT}))?")
_AT_MOST = re.compile(rf"be at most ({_FLOAT})")
_BETWEEN = re.compile(rf"be between ({_FLOAT}) and ({_FLOAT})")
_INTERVAL = re.compile(rf"be in ([\[(])({_FLOAT}), ({_FLOAT})([\])])")


@dataclass
class _Section:
    """What a rule says about a field."""

    keywords: dict[str, Any]  # of JSON Schema
    text: str


def _limits(rule: str) -> dict[str, Any]:
    """Return a rule such as ``be in (0, 1]`` as keywords of JSON Schema; none for a rule that it cannot express."""
    rule = _OR_NULL.sub("", rule)
    if match := _CHOICES.fullmatch(rule):
        return {"enum": match[1].split(", ")}
    if match := _AT_LEAST.fullmatch(rule):
        least = {"minimum" if match[1] == ">=" else "exclusiveMinimum": _number(match[2])}
        return least | ({} if match[3] is None else {"maximum": _number(match[3])})
    if match := _AT_MOST.fullmatch(rule):
        return {"maximum": _number(match[1])}
    if match := _BETWEEN.fullmatch(rule):
        return {"minimum": _number(match[1]), "maximum": _number(match[2])}
    if match := _INTERVAL.fullmatch(rule):
        low, high = ("minimum", "exclusiveMinimum")[match[1] == "("], ("maximum", "exclusiveMaximum")[match[4] == ")"]
        return {low: _number(match[2]), high: _number(match[3])}
    return {}


def _number(text: str) -> float:
    value = float(text.replace("_", "").rstrip("."))
    return int(value) if value.is_integer() else value


def _rules(cls: type) -> dict[str, _Section]:
    """Return what the rules of a configuration say about each of its fields."""
    if not issubclass(cls, Config):
        return {}
    hints = types_of(cls)
    required = [item.name for item in fields(cls) if item.default is MISSING and item.default_factory is MISSING]
    values = {name: "x" for name in required if hints[name] is str}
    found: dict[str, _Section] = {}
    for name, _, rule in cls(**values).rules():
        section = found.setdefault(name, _Section({}, ""))
        limits = _limits(rule)
        section.keywords |= limits
        if not limits:  # else it is in the schema's own words
            section.text = "; ".join(filter(None, (section.text, f"must {rule}")))
    return found


def _kind_schema(kind: Any, limits: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of the values of one type. Any of them may also be a reference to another key."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return {}
    if origin in (types.UnionType, typing.Union):
        parts = [_kind_schema(arg, limits, definitions) for arg in args if arg is not type(None)]
        if len(parts) == 1 and type(parts[0].get("type")) in (str, list) and "enum" not in parts[0]:
            (part,) = parts
            known = part["type"] if isinstance(part["type"], list) else [part["type"]]
            return {**part, "type": [*known, "null"]}
        return {"anyOf": [*parts, {"type": "null"}]} if type(None) in args else {"anyOf": parts}
    if kind is bool:
        return {"type": ["boolean", "string"], "pattern": f"^({_BOOLEAN}|{_REFERENCE})$"}
    if kind in (int, float):
        name = "integer" if kind is int else "number"
        return {"type": [name, "string"], "pattern": f"^({_NUMBER}|{_REFERENCE})$", **limits}
    if kind is str:
        if "enum" in limits:
            return {"anyOf": [{"enum": limits["enum"]}, {"type": "string", "pattern": f"^{_REFERENCE}$"}]}
        return {"type": "string"}
    if origin is list:
        items = {} if args[0] is Any else _kind_schema(args[0], {}, definitions)
        return {"anyOf": [{"type": "array", "items": items}, {"type": "string", "pattern": f"^{_REFERENCE}$"}]}
    if origin is dict:
        return {"type": ["object"]}
    if is_dataclass(kind):
        return {"$ref": f"#/definitions/{_define(kind, definitions)}"}
    return {}


def _define(cls: Any, definitions: dict[str, Any]) -> str:
    """Add the schema of a dataclass to `definitions`, and return its name there."""
    name = cls.__name__
    if name not in definitions:
        definitions[name] = {}  # for a class that contains itself
        definitions[name] = {
            "type": "object",
            "description": " ".join((cls.__doc__ or "").split()),
            "properties": dict(_properties(cls, definitions)),
            "additionalProperties": False,
        }
    return name


def _properties(cls: Any, definitions: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each key of a dataclass with its schema: type, limits, meaning and default."""
    hints, meaning, rules = types_of(cls), comments(cls), _rules(cls)
    for item in fields(cls):
        if item.name.startswith("_"):
            continue
        rule = rules.get(item.name, _Section({}, ""))
        schema = _kind_schema(hints[item.name], rule.keywords, definitions)
        default = item.default if item.default_factory is MISSING else item.default_factory()
        if default is not MISSING and not is_dataclass(default) and not isinstance(default, Config):
            schema["default"] = _finite(default)
        text = "; ".join(filter(None, (meaning.get(item.name, ""), rule.text)))
        if "$ref" in schema:  # draft 7 ignores what stands next to a reference
            schema = {"allOf": [schema]}
        yield item.name, {**({"description": text} if text else {}), **schema}


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and value in (float("inf"), float("-inf")) else value


def _chosen(group: str, name: str) -> dict[str, Any]:
    """Return a condition: the defaults list chooses `name` from `group`."""
    keys = (group, f"override /{group}", f"override {group}", f"/{group}")
    one = {"type": "object", "anyOf": [{"properties": {key: {"const": name}}, "required": [key]} for key in keys]}
    return {"properties": {"defaults": {"contains": one}}, "required": ["defaults"]}


def schemas(algorithms: Iterable[str] | None = None, buffers: Iterable[str] | None = None) -> dict[str, dict[str, Any]]:
    """Return all schemas by name, for the given algorithms and presets, replay memories and rlox's own loggers.

    By default, they are for everything that is installed.

    The names are ``run`` (a preset, or a file of ``-cn``), ``run-ALGO`` (settings of a run of one algorithm),
    ``algo-ALGO``, ``buffer-NAME``, ``env``, ``logger``, ``sweeper-optuna`` and ``launcher-ray``. All but ``run``, which
    has the definitions, refer to the file ``run.json``.
    """
    definitions: dict[str, Any] = {}
    outside = algorithms is None
    algorithms = sorted(choice_names() if algorithms is None else algorithms)
    buffers = sorted(buffer_names() if buffers is None else buffers)
    algos = {name: _define(config_of(name), definitions) for name in algorithms}
    memories = {name: _define(buffer_config_class(name), definitions) for name in buffers}
    _define(RunConfig, definitions)
    dataset, optuna, ray = (_define(cls, definitions) for cls in (DatasetConfig, OptunaConfig, RayLauncherConfig))
    run = definitions.pop("RunConfig")
    if outside:
        logger = definitions[LoggerConfig.__name__]
        logger["properties"] = dict(_properties(logger_config(), definitions))
    defaults: dict[str, Any] = {
        "description": "choices from groups, such as `override /algo: dqn`, in the order in which they are merged",
        "type": "array",
        "items": {"type": ["string", "object"]},
    }
    hydra: dict[str, Any] = {"description": "settings of Hydra: sweeper, launcher, folders", "type": "object"}
    run["properties"] |= {
        "defaults": defaults,
        "hydra": hydra,
        "algo": _any_of(run["properties"]["algo"], algos.values(), definitions),
        "buffer": _any_of(run["properties"]["buffer"], memories.values(), definitions),
        "dataset": {**run["properties"]["dataset"], "anyOf": [_refer(dataset), {"type": "null"}]},
    }
    definitions["run"] = run
    groups = (("algo", algos), ("buffer", memories))
    choices = [
        {"if": _chosen(group, name), "then": {"properties": {group: _refer(kind)}}}
        for group, kinds in groups
        for name, kind in kinds.items()
    ]
    result: dict[str, dict[str, Any]] = {ALL: {"allOf": [_refer("run"), *choices], "definitions": definitions}}
    for name, kind in algos.items():
        own = {"allOf": [_refer("run", ALL), {"properties": {"algo": _refer(kind, ALL)}}]}
        result |= {f"run-{name}": own, f"algo-{name}": _with_defaults(kind, definitions, defaults)}
    for name, kind in memories.items():
        result[f"buffer-{name}"] = _with_defaults(kind, definitions, defaults)
    for name, kind in (
        *(("env", EnvConfig.__name__), ("logger", LoggerConfig.__name__)),
        *(("sweeper-optuna", optuna), ("launcher-ray", ray)),
    ):
        result[name] = _with_defaults(kind, definitions, defaults)
    return {name: {"$schema": DRAFT, "title": f"rlox: {name}", **schema} for name, schema in result.items()}


def _refer(kind: str, file: str = "") -> dict[str, str]:
    return {"$ref": f"{file and f'{file}.json'}#/definitions/{kind}"}


def _any_of(known: dict[str, Any], kinds: Iterable[str], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return a section that has the keys of any of `kinds`, for files that do not choose one."""
    names = sorted({name for kind in kinds for name in definitions[kind]["properties"]})
    what = {"description": known["description"]} if "description" in known else {}
    return {**what, "type": ["object", "null"], "propertyNames": {"enum": names}}


def _with_defaults(kind: str, definitions: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a file with the keys of `kind`, which may begin with a defaults list."""
    keys = {
        key: {"$ref": f"{ALL}.json#/definitions/{kind}/properties/{key}"} for key in definitions[kind]["properties"]
    }
    return {
        "description": definitions[kind]["description"],
        "type": "object",
        "properties": {"defaults": defaults, **keys},
        "additionalProperties": False,
    }


def bundle(name: str) -> dict[str, Any]:
    """Return one schema with the definitions that it refers to.

    Raises
    ------
    UsageError
        If there is no schema of that name.
    """
    known = schemas()
    if name not in known:
        raise UsageError(f"NAME must be a schema, got {name!r}; {nearest(name, known)}")
    text = json.dumps(known[name])
    definitions = known[ALL]["definitions"]
    whole = json.loads(text.replace(f"{ALL}.json#/", "#/"))
    needed: dict[str, Any] = {}
    waiting = [whole]
    while waiting:
        for kind in re.findall(r"#/definitions/(\w+)", json.dumps(waiting.pop())):
            if kind not in needed:
                needed[kind] = definitions[kind]
                waiting.append(definitions[kind])
    return {**whole, "definitions": needed}


def as_text(schema: dict[str, Any]) -> str:
    """Return a schema as the text of its file. What fits on one line is not broken, so that files compare easily."""
    return f"{_format(schema, 0)}\n"


def _format(value: Any, level: int) -> str:
    line = json.dumps(value, ensure_ascii=False)
    if (level and len(line) <= _LINE) or not isinstance(value, (dict, list)):
        return line
    items = value.items() if isinstance(value, dict) else ((None, inner) for inner in value)
    parts = (f"{'' if key is None else f'{json.dumps(key)}: '}{_format(inner, level + 1)}" for key, inner in items)
    start, end = "{}" if isinstance(value, dict) else "[]"
    inside = f",\n{' ' * (level + 1)}".join(parts)
    return f"{start}\n{' ' * (level + 1)}{inside}\n{' ' * level}{end}"


def main(name: str | None, folder: Path | None) -> None:
    """Print the schema `name`; or, with `folder`, write all."""
    if folder is None:
        print(as_text(bundle(name or ALL)), end="")
        return
    if name is not None:
        raise UsageError(f"NAME must be left out with --write, which writes all schemas, got {name!r}")
    folder = output_path("--write", folder, folder=True)
    files = schemas()
    for file, schema in files.items():
        with run_files.replace_file(folder, f"{file}.json") as out:
            out.write(as_text(schema).encode())
    console = TextConsole()
    console.print(f"wrote {len(files)} schemas to {shown(folder)}")
    console.print(f"  {'use them':<12} # yaml-language-server: $schema={SCHEMA_FOLDER}/{ALL}.json")
