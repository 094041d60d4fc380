"""When a kernel may compute instead of PyTorch: which source files it stands for, whether their code is still what it
was compared with, and which networks it can compute.

PyTorch's `update` defines an algorithm, and a kernel follows it. `rlox.compiled.record` contains a hash of each listed
file from the last time that the equivalence tests passed. If a file was edited, something in it was replaced at run
time, or a subclass overrides a method of an update, PyTorch learns instead of the kernel.

After an edit of a listed file, ``python tests/record_kernels.py`` runs these tests and renews the record.

This module imports neither PyTorch nor the listed files: what was not imported cannot have been replaced.
"""

from __future__ import annotations

import ast
import hashlib
import os
import sys
import threading
from collections.abc import Sequence
from functools import cached_property
from inspect import CO_OPTIMIZED
from itertools import pairwise
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from rlox.compiled.record import COMPARED
from rlox.kernels.nn.core import MAX_HIDDEN

if TYPE_CHECKING:
    from torch import nn

    from rlox.config import DQNConfig, OnPolicyConfig
    from rlox.envs import EnvSpec
    from rlox.nn.policies import ActorCritic

_NETWORKS = (
    "rlox.nn.policies", "rlox.nn.memory", "rlox.nn.modules", "rlox.nn.acting", "rlox.envs.spec",
    "rlox.envs.tensor.sums",
)  # fmt: skip
_LEARNER = (
    *_NETWORKS,
    "rlox.nn.optimizers",
    "rlox.training.backend",
    "rlox.checkpoint.counters",
)
_ON_POLICY = (
    *_LEARNER,
    "rlox.nn.losses",
    "rlox.training.on_policy",
    "rlox.collectors.rollout",
    "rlox.collectors.whole_sequences",
    "rlox.nn.batch",
)
_VALUES = (
    "rlox.nn.actors",
    "rlox.nn.critics.blocks",
    "rlox.nn.critics.ensemble",
    "rlox.nn.critics.heads",
    "rlox.nn.critics.layers",
    "rlox.nn.critics.losses",
    "rlox.nn.critics.norms",
    "rlox.nn.value_distributions",
    "rlox.nn.value_losses",
    "rlox.nn.value_networks",
)
_OFF_POLICY = (*_LEARNER, *_VALUES, "rlox.training.off_policy", "rlox.gpu.sampled", "rlox.nn.batch")
_ACTOR_CRITIC = (*_OFF_POLICY, "rlox.algorithms.actor_critic")
_OFFLINE = (*_LEARNER, *_VALUES, "rlox.training.offline", "rlox.gpu.sampled")

# The source files by algorithm. ``acting``: those of a policy that PyTorch trains and a kernel lets act; ``rounds``:
# those of whole off-policy rounds.
KERNELS: dict[str, tuple[str, ...]] = {
    "acting": (*_NETWORKS, "rlox.collectors.rollout"),
    "rounds": (
        "rlox.training.off_policy",
        "rlox.training.replay",
        "rlox.checkpoint.counters",
        "rlox.collectors.replay",
        "rlox.algorithms.dqn",
        "rlox.nn.batch",
        "rlox.envs.spec",
    ),
    "ppo": (*_ON_POLICY, "rlox.algorithms.ppo"),
    "appo": (*_ON_POLICY, "rlox.algorithms.appo"),
    "impala": (*_ON_POLICY, "rlox.algorithms.impala"),
    "a2c": (*_ON_POLICY, "rlox.algorithms.a2c"),
    "mappo": (*_ON_POLICY, "rlox.multi_agent.players", "rlox.algorithms.mappo"),
    "dqn": (*_OFF_POLICY, "rlox.nn.sequence_losses", "rlox.algorithms.dqn"),
    "sac": (*_ACTOR_CRITIC, "rlox.algorithms.sac"),
    "td3": (*_ACTOR_CRITIC, "rlox.algorithms.td3"),
    "bc": (*_OFFLINE, "rlox.algorithms.bc"),
    "td3_bc": (*_OFFLINE, "rlox.algorithms.td3_bc"),
    "iql": (*_OFFLINE, "rlox.algorithms.iql"),
    "cql": (*_OFFLINE, "rlox.algorithms.cql"),
}

# The methods that a kernel replaces, or that create what it computes on. Any other method may be overridden.
_UPDATE = (
    "update", "setup", "make_policy", "adam", "compiled", "progress", "clip", "sample_minibatches", "minibatches",
    "explained_variance", "draw_order", "_make_critics", "_make_ensemble", "_make_net", "_make_one", "_make_optimizer",
    "_branch", "_find_policy_option", "_draw_noise", "_draw_uniform", "_loss", "_noise_shape", "_move_target",
    "_move_target_when_due", "_moves_policy", "_policy_arguments", "_step_by_step", "_uniform_shape", "_weight",
)  # fmt: skip
_ROUND = (
    "sample", "off_policy", "clip", "random_actions", "step", "observe", "_act", "_advance", "_beta",
    "_ended", "_epsilon", "_explore", "_rows", "_where",
)  # fmt: skip
_BY_KERNEL = ("update_native", "_rounds")  # these call the kernel, so that a replaced one is used
# Files that contain much else: only functions of these names count as replaced there.
_PARTLY = (
    "rlox.collectors.rollout", "rlox.envs.spec", "rlox.algorithms.actor_critic", "rlox.training.backend",
    "rlox.training.off_policy", "rlox.training.offline", "rlox.training.on_policy",
    "rlox.training.replay",
)  # fmt: skip


def find_difference(kernel: str, *objects: object, files: bool = True) -> str | None:
    """Return why `kernel` may not replace Python: the first thing that differs from what it was compared with; or None.

    Parameters
    ----------
    kernel : str
        A key of `KERNELS`.
    *objects
        Objects whose methods the kernel replaces: neither they nor their classes may have methods of their own.
    files : bool
        Whether to look at the files, too. A training that goes on does not mind an edit, which it has not loaded.
    """
    modules, methods = KERNELS[kernel], _ROUND if kernel == "rounds" else _UPDATE
    for module in modules:
        if files and not _is_compared(module):
            return f"{module.replace('.', '/')}.py differs from what the kernel was compared with"
    for module in modules:
        for name in find_replaced(sys.modules[module]) if module in sys.modules else ():
            last = name.rpartition(".")[2]
            if last in methods or (module not in _PARTLY and last not in _BY_KERNEL):
                return f"{module}.{name} differs from what the kernel was compared with"
    return next((own for one in objects if (own := _find_override(one, modules, methods)) is not None), None)


def find_update_difference(algorithm: object, *objects: object, files: bool = True) -> str | None:
    """Return the difference of the kernel with which `algorithm` learns; None if the kernel is another package's."""
    definer: Any = next(cls for cls in type(algorithm).__mro__ if "update_native" in vars(cls))
    ours = definer.__module__.startswith("rlox.")
    return find_difference(definer.name, algorithm, *objects, files=files) if ours else None


def _find_override(one: object, modules: tuple[str, ...], methods: tuple[str, ...]) -> str | None:
    """Describe a method of `one` that replaces or overrides one of the listed files; None if there is none."""
    kind = type(one)
    for method in methods:
        definers = [cls for cls in kind.__mro__ if method in vars(cls)]
        if not any(cls.__module__ in modules for cls in definers):
            continue
        if method in vars(one):
            return f"{method} of this {kind.__name__} was replaced"
        if definers[0].__module__ not in modules:
            return f"{definers[0].__name__} has {'an' if method[0] in 'aeiou' else 'a'} {method} of its own"
    return None


# ---- functions and classes that were replaced

_LIBRARIES = ("rlox", "torch", "numpy", *sys.stdlib_module_names)
_DECORATING = ("contextlib", "torch.utils._contextlib")  # modules whose decorators keep what a function computes
# By module: its loaded version, lines by name, and the functions and classes that it imports from rlox.
_definitions: dict[str, tuple[Any, dict[str, set[int]], set[str]]] = {}


def find_replaced(module: ModuleType) -> list[str]:
    """Return the functions, methods and classes in `module` that neither its file nor a library put there.

    Methods are named ``Class.method``. Constants are not compared.
    """
    spec: Any = module.__spec__
    known = _definitions.get(module.__name__)
    if known is None or known[0] is not spec:
        code = spec.loader.get_code(spec.name)
        names = code.co_names
        origins = [vars(sys.modules[name]) for name in names if name.startswith("rlox.") and name in sys.modules]
        imported = {name for name in names for origin in origins if isinstance(origin.get(name), (FunctionType, type))}
        known = _definitions[module.__name__] = (spec, _find_definitions(code, ""), imported)
    values = dict(vars(module))
    for name, value in vars(module).items():
        if isinstance(value, type) and value.__module__ == module.__name__:
            values.update((f"{name}.{member}", held) for member, held in vars(value).items())
    _, lines, imported = known
    return [
        name
        for name in {**lines, **values}
        if not _is_own(module, name, values.get(name), lines.get(name), name in imported)
    ]


def _is_own(module: ModuleType, name: str, value: Any, lines: set[int] | None, imported: bool) -> bool:
    """Return whether the file, which defines `name` at `lines` or may import it, or a library put `value` there."""
    if lines is not None:
        code = _get_code(value)
        if code is not None:
            return code.co_filename == module.__file__ and code.co_firstlineno in lines
        return isinstance(value, type) and value.__module__ == module.__name__ and value.__qualname__ == name
    if not isinstance(value, (FunctionType, type)):
        return not imported
    origin = str(value.__module__)
    if not origin.startswith("rlox.") or origin == module.__name__ or "." in name:
        return origin.partition(".")[0] in _LIBRARIES
    return vars(sys.modules[origin]).get(name) is value


def _find_definitions(code: CodeType, prefix: str) -> dict[str, set[int]]:
    """Return the first lines of the functions and classes in the code of a module or class, by their names."""
    lines: dict[str, set[int]] = {}
    for one in code.co_consts:
        # From Python 3.14 on, the compiler adds `__annotate__`, which returns annotations and computes nothing else.
        if isinstance(one, CodeType) and not one.co_name.startswith("<") and one.co_name != "__annotate__":
            lines.setdefault(prefix + one.co_name, set()).add(one.co_firstlineno)
            if not one.co_flags & CO_OPTIMIZED:  # the body of a class
                lines.update(_find_definitions(one, f"{prefix}{one.co_name}."))
    return lines


def _get_code(value: Any) -> CodeType | None:
    """Return the code of a function, also in a property and the like, and behind ``torch.no_grad`` and similar."""
    if isinstance(value, type):
        return None
    value = value.func if isinstance(value, cached_property) else value
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    if not isinstance(value, FunctionType) or value.__globals__.get("__name__") in _DECORATING:  # or `functools.cache`
        value = getattr(value, "__wrapped__", value)
    return value.__code__ if isinstance(value, FunctionType) else None


# ---- hashes of files

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep


def compute_hashes() -> dict[str, str]:
    """Return the hashes of all listed files, sorted, as needed for `COMPARED`."""
    hashes = {}
    for module in sorted({module for modules in KERNELS.values() for module in modules}):
        with open(_ROOT + module.replace(".", os.sep) + ".py", "rb") as file:
            content = file.read()
        hashes[module] = f"{_hash(content)} {_hash_code(content)}"
    return hashes


_known: dict[str, tuple[tuple[int, int], bool]] = {}  # by module: time and size of its file, and whether it is compared


def _is_compared(module: str) -> bool:
    """Return whether a module's file is the recorded one; it is read again if its time or size has changed."""
    path = _ROOT + module.replace(".", os.sep) + ".py"
    try:
        stat = os.stat(path)
        stamp = (stat.st_mtime_ns, stat.st_size)
        known = _known.get(module)
        if known is None or known[0] != stamp:
            whole, code = COMPARED.get(module, "- -").split()
            with open(path, "rb") as file:
                content = file.read()
            known = _known[module] = (stamp, _hash(content) == whole or _hash_code(content) == code)
        return known[1]
    except (OSError, SyntaxError, ValueError):
        return False


def _hash(content: bytes) -> str:
    return hashlib.sha256(content.replace(b"\r\n", b"\n")).hexdigest()[:16]


# Python 3.11's parser fails if two threads use it at once: https://github.com/python/cpython/issues/106905
_PARSING = threading.Lock()


def _hash_code(content: bytes) -> str:
    """Return a hash that does not depend on layout, comments, docstrings and annotations."""
    with _PARSING:
        tree = ast.parse(content)
    return _hash(repr(_to_tuples(tree)).encode())


# Annotations, and fields that are irrelevant or exist only in some versions of Python.
_LEFT_OUT = {"annotation", "returns", "type_comment", "type_ignores", "type_params", "ctx", "kind", "simple"}


def _to_tuples(node: Any) -> Any:
    """Return the syntax below `node` as tuples that are the same for every version of Python from 3.10 on."""
    if isinstance(node, list):
        return tuple(_to_tuples(one) for one in node)
    if not isinstance(node, ast.AST):
        return node
    if isinstance(node, ast.Constant):
        return ("Constant", repr(node.value))
    fields = {name: value for name, value in ast.iter_fields(node) if name not in _LEFT_OUT}
    if isinstance(node, ast.JoinedStr):  # versions of Python split the text between two values differently
        fields["values"] = _merge_texts(node.values)
    elif isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)) and ast.get_docstring(node, False) is not None:
        fields["body"] = node.body[1:]
    kept = sorted((name, value) for name, value in fields.items() if value is not None and value != [])
    return (type(node).__name__, *((name, _to_tuples(value)) for name, value in kept))


def _merge_texts(values: list[ast.expr]) -> list[Any]:
    parts: list[Any] = []
    for value in values:
        if isinstance(value, ast.Constant) and parts and isinstance(parts[-1], str):
            parts[-1] += str(value.value)
        else:
            parts.append(value.value if isinstance(value, ast.Constant) else value)
    return [part for part in parts if part != ""]


# ---- sizes, layers and changes of networks that a kernel cannot compute


class Perceptron(NamedTuple):
    """A perceptron within a module."""

    name: str  # its name in the module
    widths: list[int]  # widths of its input, its hidden layers and its output
    activated: bool = False  # whether an activation also follows the last layer


def actor_critic(obs_dim: int, n_outputs: int, hidden: Sequence[int], state_dim: int | None = None) -> list[Perceptron]:
    seen = obs_dim if state_dim is None else state_dim
    return [Perceptron("actor", [obs_dim, *hidden, n_outputs]), Perceptron("critic", [seen, *hidden, 1])]


def q_network(obs_dim: int, n_actions: int, hidden: Sequence[int], dueling: bool) -> list[Perceptron]:
    """Return the perceptrons of a `QPolicy` around a `DiscreteQNetwork`; a trunk without layers has no parameters."""
    widths = [obs_dim, *hidden]
    if not dueling:
        return [Perceptron("q.head", [*widths, n_actions])]
    trunk = widths[:-1] if hidden else widths
    heads = (("q.head", n_actions), ("q.value", 1))
    return [Perceptron("q.trunk", trunk, True), *(Perceptron(name, [*widths[-2:], n]) for name, n in heads)]


def layout(nets: list[Perceptron], n_std: int = 0) -> list[tuple[str, tuple[int, ...]]]:
    """Return names and shapes of the parameters of a policy in their order: `n_std` deviations and perceptrons."""
    shapes: list[tuple[str, tuple[int, ...]]] = [("log_std", (n_std,))] if n_std else []
    for net in nets:
        for i, (n_in, n_out) in enumerate(pairwise(net.widths)):
            shapes += [(f"{net.name}.{2 * i}.weight", (n_out, n_in)), (f"{net.name}.{2 * i}.bias", (n_out,))]
    return shapes


def obstacle(spec: EnvSpec, config: OnPolicyConfig, policy: ActorCritic | None) -> str | None:
    """Return why the kernel cannot compute this policy exactly; None if it can."""
    if config.recurrent:
        return "PyTorch computes a memory, with a kernel for its steps"
    if not (spec.discrete or spec.continuous):
        return f"the actions are {spec.action_kind}"
    if len(spec.obs_shape) != 1:
        return "images go through a convolutional network"
    if policy is None:
        return None if len(config.hidden_sizes) <= MAX_HIDDEN else _describe_depth(config.hidden_sizes)
    from rlox.nn.policies import ContinuousPolicy, DiscretePolicy

    if type(policy) is not (DiscretePolicy if spec.discrete else ContinuousPolicy):
        return f"the policy is a custom module ({type(policy).__name__})"
    hidden = read_perceptron(policy.actor)[0]
    nets = actor_critic(spec.obs_dim, spec.n_actions if spec.discrete else spec.act_dim, hidden)
    change = _find_change(policy, nets, layout(nets, spec.act_dim or 0))
    return change if change is not None or len(hidden) <= MAX_HIDDEN else _describe_depth(hidden)


def q_obstacle(spec: EnvSpec, config: DQNConfig, policy: nn.Module | None) -> str | None:
    """Return why the kernel cannot compute this value network exactly; None if it can.

    `policy` is a `DiscreteQNetwork`, or the `QPolicy` around one.
    """
    if config.recurrent:
        return "PyTorch computes a memory, with a kernel for its steps"
    if (option := config.value_option) is not None:
        return f"PyTorch computes {option}"
    if len(spec.obs_shape) != 1:
        return "images go through a convolutional network"
    if policy is None:
        return None if len(config.hidden_sizes) <= MAX_HIDDEN else _describe_depth(config.hidden_sizes)
    from rlox.nn.actors import DiscreteQNetwork, QPolicy

    q = policy.q if type(policy) is QPolicy else policy
    if type(q) is not DiscreteQNetwork:
        return f"the policy is a custom module ({type(q).__name__})"
    hidden = read_perceptron(q.trunk, q.head)[0]
    nets = q_network(spec.obs_dim, spec.n_actions, hidden, q.dueling)
    change = _find_change(policy if q is not policy else QPolicy(q, spec.n_actions), nets, layout(nets))
    return change if change is not None or len(hidden) <= MAX_HIDDEN else _describe_depth(hidden)


def _describe_depth(hidden: Sequence[int]) -> str:
    return f"the kernel supports at most {MAX_HIDDEN} hidden layers, but there are {len(hidden)}"


def read_perceptron(*nets: nn.Module) -> tuple[list[int], str]:
    """Return the widths of the hidden layers of consecutive perceptrons, and their activation: ``tanh`` or ``relu``."""
    from torch import nn

    layers = [layer for net in nets for layer in net.modules()]
    widths = [layer.out_features for layer in layers if type(layer) is nn.Linear]
    return widths[:-1], "relu" if any(type(layer) is nn.ReLU for layer in layers) else "tanh"


def _find_change(module: nn.Module, nets: list[Perceptron], shapes: list[tuple[str, tuple[int, ...]]]) -> str | None:
    """Return how a module of the right class differs from the perceptrons it was created with; None if it does not."""
    import torch
    from torch import nn

    parts = [module.get_submodule(net.name) for net in nets]
    kinds = [[type(layer) for layer in (part if type(part) is nn.Sequential else [part])] for part in parts]
    activation = next((kind for each in kinds for kind in each if kind is not nn.Linear), nn.Tanh)
    expected = [[nn.Linear, activation] * (len(net.widths) - 1) for net in nets]
    parameters = list(module.named_parameters())
    if (
        kinds != [each if net.activated else each[:-1] for net, each in zip(nets, expected, strict=True)]
        or activation not in (nn.Tanh, nn.ReLU)
        or [(name, tuple(p.shape)) for name, p in parameters] != shapes
        or list(module.buffers())
    ):
        return "the policy's networks are not those it was created with for this environment"
    if any(p.dtype != torch.float32 or p.device.type != "cpu" for _, p in parameters):
        return "the policy's parameters are not float32 on the CPU"
    if not all(p.requires_grad for _, p in parameters):
        return "some of the policy's parameters are frozen"
    return ModuleWatch("policy", module).altered()


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class ModuleWatch:
    """Detects changes to a module because of which a kernel on its memory would compute something else.

    Parameters
    ----------
    what : str
        The module's name, for messages.
    module : nn.Module
        The module, whose parameters are at their final addresses.
    """

    def __init__(self, what: str, module: nn.Module):
        self._what = what
        self._parts = []
        for part in module.modules():
            held = vars(part)
            # The callable attributes of the object itself, without those of its class.
            functions = {name: value for name, value in held.items() if callable(value)}
            members = [*map(id, held["_modules"].values()), *map(id, held["_parameters"].values())]
            self._parts.append((part, type(part), members, len(held), functions))
        # Instance attributes that override methods of the class, which the kernel would not call.
        self._own = next((name for part, kind, *_, own in self._parts for name in own if hasattr(kind, name)), None)
        self._parameters = [(p, p.data_ptr(), p.requires_grad) for p in module.parameters()]

    def altered(self) -> str | None:
        """Return what has changed; None if nothing relevant has. Takes a few microseconds."""
        from torch.nn.modules.module import _has_any_global_hook

        what = self._what
        if self._own is not None:
            return f"the {what} has a method of its own, {self._own}"
        for part, kind, members, size, functions in self._parts:
            held = vars(part)
            present = [*map(id, held["_modules"].values()), *map(id, held["_parameters"].values())]
            if type(part) is not kind or present != members:
                return f"the {what}'s networks are not those it was created with"
            if any(held.get(name) is not own for name, own in functions.items()) or (
                len(held) != size and any(callable(x) for name, x in held.items() if name not in functions)
            ):
                return f"a method of the {what} was replaced"
            if any(held[name] for name in _HOOKS):
                return f"the {what} has hooks, which a kernel does not call"
        if _has_any_global_hook():
            return "all modules have hooks, which a kernel does not call"
        for p, address, learns in self._parameters:
            if p.data_ptr() != address:
                return f"the {what}'s parameters were moved or converted"
            if p.requires_grad is not learns:
                return f"some of the {what}'s parameters were frozen or unfrozen"
            if p._backward_hooks or p._post_accumulate_grad_hooks:
                return f"the {what}'s parameters have hooks, which a kernel does not call"
        return None
