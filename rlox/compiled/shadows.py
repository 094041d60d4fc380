"""The Python functions that each kernel replaces, and whether they are still those it was compared with.

PyTorch's `update` defines an algorithm, and a kernel follows it. `rlox.compiled.fingerprints` records the functions
that a kernel replaces as they were when the equivalence tests last passed; ``python tests/record_kernels.py`` runs
these tests and renews the record. If a function was edited, replaced at run time or overridden, PyTorch learns instead
of the kernel.

This module imports neither PyTorch nor the compared modules: a module that was not imported was not patched.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import hashlib
import json
import os
import sys
import threading
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from rlox.compiled.fingerprints import COMPARED

# Python 3.11's parser fails if two threads use it at once: https://github.com/python/cpython/issues/106905
_PARSING = threading.Lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_PARSING.acquire, after_in_parent=_PARSING.release, after_in_child=_PARSING.release)

_PERCEPTRONS = tuple(f"rlox.nn.networks:{name}" for name in ("mlp", "NetworkSpec", "_set_", "_NONLINEARITIES"))
_OPTIMIZER = (
    "rlox.nn.optimizers:FlatOptimizer",
    "rlox.nn.optimizers:adam_",
    "rlox.nn.optimizers:flatten_",
    "rlox.nn.optimizers:_views",
    "rlox.nn.optimizers:keeps_denormals",
)
_SCHEDULES = ("rlox.training.schedules:scheduled", "rlox.checkpoint.counters:Counters.progress")
# For algorithms with an optimiser for each network.
_SEPARATE = ("rlox.training.schedules:follow_schedule", "rlox.training.networks:SeparateNetworks.adam")
_ACTOR = (
    "rlox.nn.policies:Actor",
    "rlox.nn.modules:to_array",
    "rlox.collectors.acting:ModuleActor",
    "rlox.envs.spec:EnvSpec.clip",
)
_LOG_SQRT_2PI = "rlox.nn.policies:_LOG_SQRT_2PI"

_ACTOR_CRITIC = (
    *_PERCEPTRONS,
    *_ACTOR,
    "rlox.nn.policies:ActorCritic",
    "rlox.nn.policies:DiscretePolicy",
    "rlox.nn.policies:ContinuousPolicy",
    "rlox.nn.policies:_categorical",
    _LOG_SQRT_2PI,
    "rlox.nn.policies:policy_outputs",
    "rlox.nn.policies:mask_outputs",
    "rlox.nn.policies:_LOWEST",
    "rlox.collectors.acting:ModuleRollout",
    "rlox.collectors.acting:ModuleEvaluator",
    "rlox.collectors.rollout:RolloutCollector._step_by_step",
)
_ON_POLICY = (
    *_ACTOR_CRITIC,
    *_OPTIMIZER,
    *_SCHEDULES,
    "rlox.nn.policies:make_policy",
    "rlox.training.backend:Backend.compiled",
    "rlox.training.on_policy:OnPolicyAlgorithm.make_policy",
    "rlox.training.on_policy:OnPolicyAlgorithm.setup",
    "rlox.nn.batch:Rollout.explained_variance",
    "rlox.nn.losses:actor_critic_loss",
    "rlox.nn.losses:normalized",
    "rlox.nn.losses:value_loss",
)
_OFF_POLICY = (
    *_PERCEPTRONS,
    *_ACTOR,
    *_OPTIMIZER,
    *_SCHEDULES,
    "rlox.nn.networks:polyak_update",
    "rlox.training.backend:Backend.compiled",
    "rlox.nn.batch:TransitionBatch.update_priorities",
)
_BOUNDED = ("rlox.nn.policies:BoundedPolicy", "rlox.nn.networks:TwinQNetwork", "rlox.nn.losses:twin_q_loss")
_SQUASHED = ("rlox.nn.policies:SquashedGaussianPolicy", "rlox.nn.policies:LOG_STD_RANGE", "rlox.nn.policies:_INSIDE",
             _LOG_SQRT_2PI, "rlox.nn.losses:soft_policy_loss")  # fmt: skip
_TWIN_CRITIC = (
    *_OFF_POLICY,
    *_BOUNDED,
    *_SEPARATE,
    "rlox.nn.optimizers:flat_copy",
    "rlox.training.networks:SeparateNetworks._make_critics",
    "rlox.training.off_policy:OffPolicyAlgorithm.make_policy",
)
_OFFLINE = (
    *_PERCEPTRONS,
    *_OPTIMIZER,
    *_SCHEDULES,
    *_SEPARATE,
    "rlox.training.offline:OfflineAlgorithm._policy_arguments",
    "rlox.nn.policies:Actor",
    "rlox.nn.policies:BoundedPolicy",
)
_OFFLINE_CRITICS = (
    *_OFFLINE,
    *_BOUNDED,
    "rlox.nn.optimizers:flat_copy",
    "rlox.training.networks:SeparateNetworks._make_critics",
)


def _whole(module: str, cls: str, *losses: str, methods: tuple[str, ...] = ("update", "setup")) -> tuple[str, ...]:
    return (
        *(f"rlox.algorithms.{module}:{cls}.{name}" for name in methods),
        *(f"rlox.nn.losses:{name}" for name in losses),
    )


# By algorithm name, the functions that its update uses. ``acting``: those that `rlox.compiled.NativePolicy` replaces
# for a policy that PyTorch trains; ``rounds``: those that whole off-policy rounds replace. A class includes everything
# in its body.
KERNELS: dict[str, tuple[str, ...]] = {
    "acting": _ACTOR_CRITIC,
    "rounds": (
        "rlox.training.loops:off_policy",
        "rlox.training.schedules:interpolated",
        "rlox.collectors.replay:ReplayCollector",
        "rlox.training.off_policy:OffPolicyAlgorithm.sample",
        "rlox.training.off_policy:OffPolicyAlgorithm._rows",
        "rlox.training.off_policy:OffPolicyAlgorithm._beta",
        "rlox.training.replay:ReplayAgent.explore",
        "rlox.algorithms.dqn:DQN.explore",
        "rlox.algorithms.dqn:DQN._epsilon",
        "rlox.nn.batch:TransitionBatch.from_rows",
        "rlox.envs.spec:EnvSpec.clip",
        "rlox.envs.spec:EnvSpec.random_actions",
    ),
    "ppo": (
        *_ON_POLICY,
        "rlox.nn.batch:Rollout.sample_minibatches",
        "rlox.nn.batch:Rollout._present_columns",
        "rlox.nn.batch:_permutation",
        "rlox.nn.batch:_TRANSITION_COLUMNS",
        "rlox.nn.batch:minibatches",
        *_whole("ppo", "PPO", "PPOLoss", "ppo_clip", methods=("update",)),
    ),
    "appo": (
        *_ON_POLICY,
        "rlox.nn.batch:Rollout.sample_minibatches",
        "rlox.nn.batch:Rollout._present_columns",
        "rlox.nn.batch:_permutation",
        "rlox.nn.batch:_TRANSITION_COLUMNS",
        "rlox.nn.batch:minibatches",
        *_whole("appo", "APPO", "PPOLoss", "ppo_clip", methods=("update",)),
    ),
    "mappo": (
        *_ON_POLICY,
        "rlox.nn.batch:minibatches",
        "rlox.nn.batch:Rollout.sample_minibatches",
        "rlox.nn.batch:Rollout._present_columns",
        "rlox.nn.batch:_permutation",
        "rlox.nn.batch:_TRANSITION_COLUMNS",
        "rlox.multi_agent.players:ValueNorm",
        "rlox.multi_agent.players:_DECAY",
        "rlox.multi_agent.players:_LEAST_VARIANCE",
        "rlox.multi_agent.players:_LEAST_WEIGHT",
        "rlox.nn.modules:_ALIGNED",
        "rlox.nn.modules:_parameters",
        "rlox.nn.modules:copied",
        "rlox.nn.modules:is_module",
        "rlox.nn.players:ModulePart",
        "rlox.algorithms.mappo:_join_metrics",
        "rlox.algorithms.mappo:Optimizers",
        *_whole("mappo", "MAPPO", "PPOLoss", "ppo_clip", methods=("update", "make_policy", "setup")),
    ),
    "impala": (*_ON_POLICY, *_whole("impala", "IMPALA", "a2c_loss", "policy_gradient", methods=("update",))),
    "a2c": (*_ON_POLICY, *_whole("a2c", "A2C", "a2c_loss", "policy_gradient", methods=("update",))),
    "dqn": (
        *_OFF_POLICY,
        "rlox.nn.networks:DiscreteQNetwork",
        "rlox.nn.policies:QPolicy",
        *_whole("dqn", "DQN", "q_loss",
                methods=("update", "setup", "make_policy", "_move_target_when_due", "_move_target")),
    ),
    "sac": (*_TWIN_CRITIC, *_SQUASHED, *_whole("sac", "SAC")),
    "td3": (
        *_TWIN_CRITIC,
        "rlox.nn.policies:DeterministicPolicy",
        *_whole("td3", "TD3", "smoothed_targets", "deterministic_policy_loss"),
    ),
    "bc": (
        *_OFFLINE,
        "rlox.nn.policies:DeterministicPolicy",
        "rlox.nn.policies:CategoricalPolicy",
        "rlox.nn.policies:_categorical",
        *_whole("bc", "BC", "cloning_loss", "label_loss", methods=("update", "setup", "make_policy")),
    ),
    "td3_bc": (
        *_OFFLINE_CRITICS,
        "rlox.nn.policies:DeterministicPolicy",
        "rlox.nn.networks:polyak_update",
        *_whole("td3_bc", "TD3BC", "smoothed_targets", "regularised_policy_loss",
                methods=("update", "setup", "make_policy")),
    ),
    "iql": (
        *_OFFLINE_CRITICS,
        "rlox.nn.policies:TanhMeanPolicy",
        _LOG_SQRT_2PI,
        "rlox.algorithms.iql:_cosine",
        *_whole("iql", "IQL", "expectile_loss", "weighted_cloning_loss",
                methods=("update", "setup", "make_policy")),
    ),
    "cql": (
        *_OFFLINE_CRITICS,
        *_SQUASHED,
        "rlox.algorithms.cql:_LARGEST",
        "rlox.algorithms.cql:_ROWS",
        "rlox.algorithms.cql:_Backprop",
        *_whole("cql", "CQL", "conservative_q_loss", "conservative_penalty",
                methods=("update", "setup", "make_policy", "_weight")),
    ),
}  # fmt: skip


class _Source(NamedTuple):
    """One function, class or constant in a module's file."""

    uses: dict[str, str]  # names of the module that it uses, with their meaning: "rlox.nn.losses:value_loss", "torch"
    decorated: bool
    value: str | None  # the expression of a constant


def difference(kernel: str, *objects: object, reread: bool = True) -> str | None:
    """Return why `kernel` may not replace Python: its first function that differs from the compared one; else None.

    Parameters
    ----------
    kernel : str
        A key of `KERNELS`.
    *objects
        Objects whose methods are checked, both in their class and on the objects themselves.
    reread : bool
        Whether to also check files that were edited but not reloaded.
    """
    listed = _listed(kernel)
    for module, entries in listed.items():
        found = _differing(module, entries, reread)
        if found is not None:
            return f"{module}.{found} differs from what the kernel was compared with"
    return next((found for one in objects if (found := _overridden(one, listed)) is not None), None)


def update_difference(algorithm: object, *objects: object, reread: bool = True) -> str | None:
    """Return the `difference` of the kernel with which `algorithm` learns; None if the kernel is another package's."""
    definer: Any = next(cls for cls in type(algorithm).__mro__ if "update_native" in vars(cls))
    if not definer.__module__.startswith("rlox."):
        return None
    return difference(definer.name, algorithm, *objects, reread=reread)


def _differing(module: str, entries: frozenset[str], reread: bool) -> str | None:
    """Return the first name in `module` that was edited or replaced."""
    try:
        file = _file(module, reread)
    except (OSError, SyntaxError, ValueError):
        return min(entries)
    found = next((name for name in file.edited if _within(name, entries)), None)
    loaded = sys.modules.get(module)
    if found is not None or loaded is None:
        return found
    return next((found for name in file.names(entries) if (found := _replaced(loaded, name, file)) is not None), None)


def _within(name: str, entries: frozenset[str]) -> bool:
    return name in entries or name.rpartition(".")[0] in entries


# ---- what was replaced at run time


def _replaced(module: ModuleType, name: str, file: _File) -> str | None:
    """Return this name, or a name that the function uses, if its object in `module` is not the file's; else None."""
    source, held = file.sources[name], vars(module)
    owner, _, last = name.rpartition(".")
    if owner:
        cls = held.get(owner)
        value = vars(cls).get(last) if isinstance(cls, type) else None
    else:
        value = held.get(last)
    if source.value is not None:
        return None if value == eval(_compiled(source.value), held) else name
    if isinstance(value, type):
        own = value.__module__ == module.__name__ and value.__qualname__ == name
        return _added(value, file) if own else name
    code = _code(value, source.decorated)
    if code is None or code.co_filename != module.__file__ or _plain(value).__qualname__ != name:
        return name
    for used, target in source.uses.items():
        if used in held if target.startswith("builtins:") else held.get(used) is not _meant(target):
            return used
    return None


def _added(cls: type, file: _File) -> str | None:
    """Return a function in `cls` that its file does not define."""
    names = {f"{cls.__qualname__}.{name}": value for name, value in vars(cls).items()}
    return next((name for name, value in names.items() if name not in file.sources and _code(value) is not None), None)


def _plain(value: Any) -> Any:
    """Return the function in a static method, class method or property."""
    return value.fget if isinstance(value, property) else getattr(value, "__func__", value)


def _code(value: Any, decorated: bool = False) -> CodeType | None:
    """Return the code of a function or, if it is `decorated` by ``torch.no_grad`` or similar, of the inner function."""
    value = _plain(value)
    if not isinstance(value, FunctionType):
        return None
    inner = getattr(value, "__wrapped__", None)
    if (
        decorated
        and inner is not None
        and value.__code__.co_filename.endswith(os.path.join("torch", "utils", "_contextlib.py"))
    ):
        return inner.__code__ if isinstance(inner, FunctionType) else None
    return value.__code__


def _meant(target: str) -> Any:
    """Return the object to which an import binds a name: a module, or the current object of ``module:name``."""
    module, _, name = target.partition(":")
    found = sys.modules.get(module)
    return getattr(found, name, None) if name else found


@functools.cache
def _compiled(expression: str) -> CodeType:
    return compile(expression, "<constant>", "eval")


def _overridden(one: object, listed: dict[str, frozenset[str]]) -> str | None:
    """Describe a method of `one` that replaces or overrides a listed method; return None if there is none."""
    kind, replaced = type(one), vars(one)
    for cls in kind.__mro__:
        for name in listed.get(cls.__module__, ()):
            owner, _, method = name.rpartition(".")
            if owner != cls.__qualname__:
                continue
            if method in replaced:
                return f"{method} of this {kind.__name__} was replaced"
            definer = next(c for c in kind.__mro__ if method in vars(c))
            if f"{definer.__qualname__}.{method}" not in listed.get(definer.__module__, ()):
                return f"{definer.__name__} has {'an' if method[0] in 'aeiou' else 'a'} {method} of its own"
    return None


# ---- what was edited


@functools.cache
def _listed(kernel: str) -> dict[str, frozenset[str]]:
    """Return the entries of `kernel` by module."""
    found: dict[str, set[str]] = {}
    for entry in KERNELS[kernel]:
        module, _, name = entry.partition(":")
        found.setdefault(module, set()).add(name)
    return {module: frozenset(names) for module, names in found.items()}


@functools.cache
def _compared() -> dict[str, dict[str, str]]:
    """Return the record by module."""
    found: dict[str, dict[str, str]] = {}
    for key, fingerprint in COMPARED.items():
        module, _, name = key.partition(":")
        found.setdefault(module, {})[name] = fingerprint
    return found


@functools.cache
def _all_listed() -> dict[str, frozenset[str]]:
    """Return the entries of all kernels by module."""
    kernels = [_listed(kernel) for kernel in KERNELS]
    modules = sorted({module for listed in kernels for module in listed})
    return {module: frozenset().union(*(listed.get(module, ()) for listed in kernels)) for module in modules}


def present() -> dict[str, str]:
    """Return the current fingerprints of all listed entries, sorted, as needed for `COMPARED`."""
    found: dict[str, str] = {}
    for module, entries in _all_listed().items():
        fingerprints = _file(module).fingerprints
        if lost := sorted(entries - fingerprints.keys()):
            raise ValueError(f"rlox.compiled.shadows: KERNELS must name objects of {module}, got {', '.join(lost)}")
        found |= {f"{module}:{name}": fingerprint for name, fingerprint in fingerprints.items()}
    return dict(sorted(found.items()))


@functools.cache
def _path(module: str) -> str:
    return os.path.join(os.path.dirname(os.path.dirname(__file__)), *module.split(".")[1:]) + ".py"


class _File:
    """The contents of a module's file.

    Parameters
    ----------
    module : str
        The module's name.
    stamp : tuple
        The file's time and size.
    fingerprints : dict
        Fingerprints by the names of functions, classes and constants; methods are named ``Class.method``.
    rest : str
        JSON of each name's `_Source`, parsed when it is first needed.

    Attributes
    ----------
    edited : list of str
        Listed names that differ from the record.
    """

    def __init__(self, module: str, stamp: tuple[int, int], fingerprints: dict[str, str], rest: str):
        self.stamp = stamp
        self._rest = rest
        compared = _compared().get(module, {})
        both = {} if fingerprints == compared else {**fingerprints, **compared}
        self.edited = [name for name in both if fingerprints.get(name) != compared.get(name)]
        self.fingerprints = fingerprints
        self._names: dict[frozenset[str], list[str]] = {}

    @functools.cached_property
    def sources(self) -> dict[str, _Source]:
        return {name: _Source(*fields) for name, fields in json.loads(self._rest).items()}

    def names(self, entries: frozenset[str]) -> list[str]:
        """Return the entries, including the members of classes among them."""
        if entries not in self._names:
            self._names[entries] = [name for name in self.sources if _within(name, entries)]
        return self._names[entries]


_read: dict[str, _File] = {}


def _file(module: str, reread: bool = True) -> _File:
    """Return a module's file, which is read again if its time or size has changed."""
    known = _read.get(module)
    if known is not None and not reread:
        return known
    path = _path(module)
    stat = os.stat(path)
    stamp = (stat.st_mtime_ns, stat.st_size)
    if known is None or known.stamp != stamp:
        kept = _kept().get(module)
        if kept is None or kept[0] != [*stamp]:
            with open(path, "rb") as file:
                content = file.read()
            digest = hashlib.sha256(content).hexdigest()
            if kept is None or kept[1] != digest:
                kept = _kept()[module] = [[*stamp], digest, *_parsed(module, content)]
                if not sys.dont_write_bytecode:
                    with contextlib.suppress(OSError):
                        _write(_KEPT)
        known = _read[module] = _File(module, stamp, *kept[2:])
    return known


# Parsing takes 0.2 s. The result is stored next to this file, and is valid for files of the same time and size, or of
# the same SHA-256. setup.py writes it when the kernels are built, and a process that parses an edited file updates it.
_KEPT = Path(__file__).with_suffix(".json")


@functools.cache
def _own_digest() -> str:
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


@functools.cache
def _kept() -> dict[str, Any]:
    """Return earlier results of parsing, ``{module: [stamp, SHA-256, fingerprints, rest]}`` as in `_File`."""
    try:
        kept = json.loads(_KEPT.read_bytes())
        return kept["files"] if kept["by"] == _own_digest() else {}
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def _write(path: Path) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps({"by": _own_digest(), "files": _kept()}))
    os.replace(temporary, path)


def keep(folder: str | os.PathLike) -> None:
    """Write the parsed modules into the package's `folder`, so that no process has to parse them."""
    for module in _all_listed():
        _file(module)
    _write(Path(folder, _KEPT.name))


# ---- a file's functions


def _parsed(module: str, content: bytes) -> tuple[dict[str, str], str]:
    """Return the fingerprints of a file's listed entries, and the rest of them, as needed for `_File`."""
    with _PARSING:
        tree = ast.parse(content)
    entries = _all_listed()[module]
    names = _bound(module, tree)
    fingerprints: dict[str, str] = {}
    rest: dict[str, _Source] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            for last, part, expression in _defined(node):
                name = prefix + last
                uses: dict[str, str] = {}
                if _within(name, entries):
                    text = repr(_canonical(part, names, uses))
                    fingerprints[name] = hashlib.sha256(text.encode()).hexdigest()[:16]
                    rest[name] = _Source(uses, bool(getattr(node, "decorator_list", ())), expression)
                if isinstance(node, ast.ClassDef):
                    visit(node.body, f"{name}.")

    visit(tree.body, "")
    return fingerprints, json.dumps(rest)


def _defined(node: ast.stmt) -> list[tuple[str, Any, str | None]]:
    """Return the names that a statement defines, each with the syntax to fingerprint, and a constant's expression."""
    if isinstance(node, ast.FunctionDef):
        return [(node.name, node, None)]
    if isinstance(node, ast.ClassDef):
        return [(node.name, [*node.bases, *node.keywords, *node.decorator_list], None)]
    if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [(t.id, node.value, ast.unparse(node.value)) for t in targets if isinstance(t, ast.Name)]
    return []


def _bound(module: str, tree: ast.Module) -> dict[str, str]:
    """Return the meaning of the top-level names of a module: ``module:name``, or the imported module."""
    names: dict[str, str] = {}
    for node in tree.body:
        names.update((name, f"{module}:{name}") for name, *_ in _defined(node))
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                names[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom):
            names.update((alias.asname or alias.name, f"{node.module}:{alias.name}") for alias in node.names)
    return names


# Annotations, and fields that are irrelevant or exist only in some versions of Python.
_LEFT_OUT = {"annotation", "returns", "type_comment", "type_params", "ctx", "kind", "simple"}


def _canonical(node: Any, names: dict[str, str], uses: dict[str, str]) -> Any:
    """Return the syntax below `node` as tuples that are the same for every version of Python from 3.10 on.

    Names of the module and builtins are replaced by the objects they are bound to, and added to `uses`.
    """
    if isinstance(node, list):
        return tuple(_canonical(one, names, uses) for one in node)
    if not isinstance(node, ast.AST):
        return node
    if isinstance(node, ast.Name):
        target = names.get(node.id)
        if target is None and not hasattr(builtins, node.id):
            return ("Name", node.id)
        uses[node.id] = target or f"builtins:{node.id}"
        return ("Name", uses[node.id])
    if isinstance(node, ast.Constant):
        return ("Constant", repr(node.value))
    if isinstance(node, ast.JoinedStr):
        return ("JoinedStr", _joined(node, names, uses))
    fields = {name: value for name, value in ast.iter_fields(node) if name not in _LEFT_OUT}
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node, False) is not None:
        fields["body"] = node.body[1:]
    kept = sorted((name, value) for name, value in fields.items() if value is not None and value != [])
    return (type(node).__name__, *((name, _canonical(value, names, uses)) for name, value in kept))


def _joined(node: ast.JoinedStr, names: dict[str, str], uses: dict[str, str]) -> tuple[Any, ...]:
    """Return the parts of an f-string with merged constants, which versions of Python split differently."""
    parts: list[Any] = []
    for value in node.values:
        if isinstance(value, ast.Constant) and parts and isinstance(parts[-1], str):
            parts[-1] += str(value.value)
        elif isinstance(value, ast.Constant):
            parts.append(value.value)
        else:
            parts.append(_canonical(value, names, uses))
    return tuple(part for part in parts if part != "")
