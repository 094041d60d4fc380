"""Record the public names and their signatures: ``python tests/record_public_names.py``.

It writes `tests/public_names.json`, which tests/test_architecture.py compares with the library. Describe each change of
this file in CHANGELOG.
"""

import inspect
import json
from importlib import import_module
from pathlib import Path

import rlox

PATH = Path(__file__).with_name("public_names.json")
# The modules from which the documents import names.
MODULES = ("rlox.algorithms", "rlox.callbacks", "rlox.collectors", "rlox.config", "rlox.losses", "rlox.networks")
MODULES += ("rlox.policies", "rlox.trainers", "rlox.gym_vec_env", "rlox.buffers", "rlox.checkpoint", "rlox.envs")


def _signature(thing):
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return None  # a compiled class with the signature of its `__init__`
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    shown = str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
    return shown if " at 0x" not in shown else None


def _described(thing):
    if not isinstance(thing, type):
        return _signature(thing) if callable(thing) else type(thing).__name__
    # Only names that classes of rlox define: names of PyTorch are not ours, and other libraries add to them.
    own = {name for cls in thing.__mro__ if cls.__module__.startswith("rlox") for name in vars(cls)}
    # A name of another library, for which there is only an error that says what to write, is no attribute.
    members = {n: getattr(thing, n) for n in sorted(own) if not n.startswith("_") and hasattr(thing, n)}
    methods = {name: _signature(member) for name, member in members.items() if callable(member)}
    return {"": _signature(thing), **methods, **{name: "attribute" for name in members.keys() - methods.keys()}}


def names():
    """The names of ``import rlox`` with signatures, and by module the other names that the documents import."""
    found = {name: _described(getattr(rlox, name)) for name in sorted(set(rlox.__all__) - {"__version__"})}
    modules = {}
    for module_name in MODULES:
        module = import_module(module_name)
        listed = getattr(module, "__all__", None) or [name for name in dir(module) if not name.startswith("_")]
        things = {name: getattr(module, name) for name in listed}
        ours = {
            name
            for name, thing in things.items()
            if not inspect.ismodule(thing) and str(getattr(thing, "__module__", "rlox")).startswith("rlox")
        }
        modules[module_name] = sorted(ours)
    return {"rlox": found, "modules": modules}


def text():
    """The record as text, with one line for each name."""
    found = names()
    lines = [f"  {json.dumps(name)}: {json.dumps(about, sort_keys=True)}" for name, about in found["rlox"].items()]
    return '{"rlox": {\n' + ",\n".join(lines) + '},\n"modules": ' + json.dumps(found["modules"], indent=1) + "}\n"


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
