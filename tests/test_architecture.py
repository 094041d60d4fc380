"""Imports point downwards, from the command line to the kernels, and no two files import each other."""

import ast
import functools
import inspect
import json
import re
import subprocess
import sys
import textwrap
from importlib import import_module
from pathlib import Path
from unittest import mock

import pytest
import record_public_names

import rlox
import rlox.kernels
import rlox_cli

ROOTS = {"rlox": Path(rlox.__file__).parent, "rlox_cli": Path(rlox_cli.__file__).parent}
# The packages from the lowest to the highest; packages in the same row may not import each other.
ROWS = (
    ("rlox", "rlox.kernels"),
    ("rlox.config",),
    ("rlox.checkpoint",),
    ("rlox.processes",),
    ("rlox.envs",),
    ("rlox.nn",),
    ("rlox.compiled",),
    ("rlox.buffers",),
    ("rlox.collectors",),
    ("rlox.distributed", "rlox.llm", "rlox.multi_agent", "rlox.tracking", "rlox.world_models"),
    ("rlox.evaluation",),
    ("rlox.offline",),
    ("rlox.exporting",),
    ("rlox.callbacks",),
    ("rlox.gpu",),
    ("rlox.algorithms.table",),
    ("rlox.training",),
    ("rlox.algorithms",),
    ("rlox_cli",),
    ("rlox_cli.terminal",),
    ("rlox_cli.records",),
    ("rlox_cli.families",),
    ("rlox_cli.config",),
    ("rlox_cli.run", "rlox_cli.report", "rlox_cli.serve", "rlox_cli.new"),
    ("rlox_cli.sweep", "rlox_cli.bench", "rlox_cli.hub", "rlox_cli.notebook"),
    ("rlox_cli.commands",),
    ("rlox_cli.main",),
    ("rlox_cli.start",),
    ("rlox.__main__",),  # the command line, by `python -m rlox`
)
FLOORS = {package: floor for floor, row in enumerate(ROWS) for package in row}
CLI_ONLY = {"typer", "hydra", "omegaconf", "rich"}
LISTS = {"rlox", "rlox.algorithms"}  # these grow by design: a package for each family, a file for each algorithm
MOST_LINES_OF_PACKAGE = 4_600  # of its own modules, not counting packages inside it
MOST_LINES = 700  # in the file of a kernel


def module_of(root, path):
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_of(root, path): path for root in ROOTS.values() for path in sorted(root.rglob("*.py"))}


def package_of(module):
    while module not in FLOORS:
        module = module.rpartition(".")[0]
    return module


def exports(package):
    """The names that the `__init__` of a package exports, with the module that each is imported from."""
    return getattr(import_module(package), "_EXPORTS", {}) if MODULES[package].name == "__init__.py" else {}


def imports(path):
    """All names that a file imports anywhere in its code, with their lines."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute here"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def target(name):
    """The module of rlox that defines an imported name; None for names from other packages."""
    if name.partition(".")[0] not in ROOTS:
        return None
    if name in MODULES:
        return name
    module, _, attribute = name.rpartition(".")
    if module.startswith("rlox.kernels"):
        return "rlox.kernels"
    assert module in MODULES, name
    return exports(module).get(attribute, module)


@functools.cache
def arrows():
    """The importing module, the imported module, and the import in words, for all imports of rlox in rlox."""
    return [
        (module, target(name), f"{path.name}:{line}: {module} imports {name}")
        for module, path in MODULES.items()
        for name, line in imports(path)
        if target(name) is not None
    ]


def test_imports_point_downwards():
    wrong = []
    for module, other, output in arrows():
        here, there = package_of(module), package_of(other)
        if here != there and FLOORS[there] >= FLOORS[here]:
            wrong.append(output)
    assert not wrong, "\n".join(wrong)
    assert len(arrows()) > 300


def test_every_package_has_a_place():
    tops = {".".join(module.split(".")[:2]) for module in MODULES}
    assert tops <= set(FLOORS), "give it a place in ROWS"


def test_no_two_files_import_each_other():
    edges = {}
    for module, other, _ in arrows():
        if other != module and MODULES.get(other) and MODULES[other].name != "__init__.py":
            edges.setdefault(module, set()).add(other)
    done, cycles = set(), []

    def walk(module, path):
        if module in path:
            cycles.append(" -> ".join([*path[path.index(module) :], module]))
        elif module not in done:
            for other in sorted(edges.get(module, ())):
                walk(other, [*path, module])
            done.add(module)

    for module in sorted(edges):
        walk(module, [])
    assert not cycles, "\n".join(cycles)


@pytest.mark.parametrize("package", sorted(name for name, path in MODULES.items() if path.name == "__init__.py"))
def test_a_package_has_a_docstring_and_stays_small(package):
    path = MODULES[package]
    entries = [entry for entry in path.parent.iterdir() if entry.suffix == ".py" or (entry / "__init__.py").exists()]
    entries = [entry.name for entry in entries if not entry.name.startswith("__")]
    assert len(entries) > 1
    n_lines = sum(module.read_text().count("\n") for module in path.parent.glob("*.py"))
    assert n_lines <= MOST_LINES_OF_PACKAGE or package in LISTS
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_no_kernel_file_is_too_long_to_read():
    lines = {path: path.read_text().count("\n") for path in Path(rlox.kernels.__file__).parent.rglob("*.p[yx][xd]")}
    assert len(lines) > 50
    assert {path.name: n for path, n in lines.items() if n > MOST_LINES} == {}


def test_files_of_rlox_are_read_as_utf8():
    """Otherwise the encoding would be that of the system. The files of Linux below /proc and /sys are ASCII."""
    of_linux = {"evaluator.py", "child.py", "header.py", "limits.py"}
    found = [path for path in MODULES.values() if ".read_text()" in path.read_text("utf-8")]
    assert {path.name for path in found} <= of_linux, found


@pytest.mark.slow
def test_only_the_command_line_imports_its_dependencies():
    for module, path in MODULES.items():
        for name, line in imports(path):
            if name.partition(".")[0] in CLI_ONLY:
                assert module.startswith("rlox_cli"), f"{path}:{line}: {module} imports {name}"


@pytest.mark.parametrize("name", sorted(rlox._ALIASES))
def test_names_of_the_original_layout_can_be_imported(name):
    module = import_module(name)
    for target_name in rlox._ALIASES[name]:
        found = import_module(target_name)
        public = [attribute for attribute in vars(found) if not attribute.startswith("_")]
        assert public
        for attribute in public:
            assert getattr(module, attribute) is not None
            assert attribute in dir(module)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        module.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("alias", "name", "module"),
    [
        ("rlox.losses", "normalized", "rlox.nn.losses"),
        ("rlox.batch", "RolloutBatch", "rlox.collectors.rollout"),
        ("rlox.networks", "mlp", "rlox.nn.policies"),
        ("rlox.networks", "DeterministicPolicy", "rlox.nn.actors"),
    ],
)
def test_setting_an_attribute_of_an_alias_sets_it_on_its_module(alias, name, module, monkeypatch):
    alias, module = import_module(alias), import_module(module)
    before = getattr(module, name)
    monkeypatch.setattr(alias, name, len)
    assert getattr(module, name) is len
    monkeypatch.undo()
    assert getattr(module, name) is before
    with mock.patch.object(alias, name, len):
        assert getattr(module, name) is len
    assert getattr(module, name) is before


def run(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()


def test_import_is_light():
    heavy = ("torch", "numpy", "gymnasium", "hydra", "typer", "mlflow", "wandb")
    assert run(f"import rlox, sys; print(*[m for m in {heavy} if m in sys.modules])") == []
    assert run(
        "import rlox, rlox.config, rlox.algorithms, sys; rlox.tuned; rlox.compute_gae; rlox.VecEnv(2, 0).reset_all();"
        f"print(*[m for m in {heavy} if m in sys.modules])"
    ) == ["numpy"]


def test_training_imports_no_tracker_and_no_cli():
    heavy = ("hydra", "typer", "omegaconf", "rich", "mlflow", "wandb")
    program = (
        "import sys; from rlox.algorithms import PPO; PPO('CartPole-v1', n_steps=8).train(64);"
        f"print(*[m for m in {heavy} if m in sys.modules])"
    )
    assert run(program) == []


@pytest.mark.slow
def test_a_native_run_imports_no_torch(tmp_path):
    program = f"""
import sys
from rlox.algorithms import DQN, PPO
from rlox.callbacks import CheckpointCallback, EvalCallback
for env in ("CartPole-v1", "Pendulum-v1"):
    callbacks = [EvalCallback(n_points=2, n_episodes=2), CheckpointCallback({str(tmp_path)!r})]
    ppo = PPO(env, n_steps=8, callbacks=callbacks, normalize_obs=env == "Pendulum-v1")
    ppo.train(128)
    ppo.predict(ppo.collector.env.observe())
    path = {str(tmp_path / "a.safetensors")!r}
    ppo.save(path)
    PPO.from_checkpoint(path).evaluate(2)
for options in (dict(), dict(prioritized=True, normalize_obs=True)):
    dqn = DQN("CartPole-v1", buffer_size=200, learning_starts=70, callbacks=callbacks, **options)
    dqn.train(128)
    dqn.predict(dqn.collector.env.observe())
    dqn.save(path)
    DQN.from_checkpoint(path).evaluate(2)
assert "torch" not in sys.modules
ppo.policy
assert "torch" in sys.modules
"""
    assert run(program) == []


def test_every_export_exists():
    for name in rlox.__all__:
        assert getattr(rlox, name) is not None


@pytest.mark.parametrize("init", sorted(ROOTS["rlox"].rglob("__init__.py")), ids=lambda path: path.parent.name)
def test_no_lazy_name_equals_the_name_of_a_sibling_module(init):
    # Importing the module sets the attribute of the package, so the name would refer to the module afterwards.
    exports = re.findall(r'^    "(\w+)": "rlox', init.read_text(), re.MULTILINE)
    assert not {path.stem for path in init.parent.glob("*.py")} & set(exports)


def test_names_are_importable_from_where_the_documents_import_them():
    from rlox import algorithms, callbacks, config, networks, policies

    shipped = [getattr(callbacks, name) for name in callbacks.__all__]
    public = [cls for cls in shipped if isinstance(cls, type) and issubclass(cls, callbacks.Callback)]
    assert len(public) >= 12
    for cls in public:
        assert getattr(rlox, cls.__name__) is cls
    assert {"Checkpoint", "Trainer"} <= set(rlox.__all__)
    for name, entry in algorithms.ALGORITHMS.items():
        found = algorithms.resolve(entry.config)
        assert getattr(algorithms, found.__name__) is getattr(config, found.__name__) is found, name
        assert found.__name__ in algorithms.__all__
    assert networks.DeterministicPolicy is policies.DeterministicPolicy


@pytest.mark.slow
def test_python_m_rlox_is_the_command_line():
    def call(*argv):
        return subprocess.run([sys.executable, "-m", "rlox", *argv], capture_output=True, text=True)

    assert call("--version").stdout == f"rlox {rlox.__version__}\n"
    assert f'version = "{rlox.__version__}"' in (Path(__file__).parents[1] / "pyproject.toml").read_text().splitlines()
    assert "a2c" in call("ls", "algos").stdout
    assert call("nonsense").returncode == 2


def test_the_public_names_equal_the_recorded_ones():
    """If this fails: describe the change in CHANGELOG, then run `python tests/record_public_names.py`."""
    kept, found = json.loads(record_public_names.PATH.read_text()), record_public_names.names()
    assert json.loads(record_public_names.text()) == found
    for name in kept["rlox"].keys() | found["rlox"].keys():
        assert found["rlox"].get(name) == kept["rlox"].get(name), name
    for module in kept["modules"].keys() | found["modules"].keys():
        assert found["modules"].get(module) == kept["modules"].get(module), module


def test_algorithms_inherit_from_a_family_and_write_out_their_update():
    """An algorithm inherits from its family alone, and calls no helpers of another class inside `update`."""
    from rlox import algorithms, training
    from rlox.algorithms.actor_critic import ActorCriticAlgorithm
    from rlox.training import Learner

    names = ("OnPolicy", "OffPolicy", "Sequence", "Offline", "LLM")
    families = [ActorCriticAlgorithm, *(getattr(training, f"{name}Algorithm") for name in names)]
    # Objects and functions of the algorithm, not steps of its mathematics, such as passes over a language model.
    allowed = {
        "_draw_noise",
        "_draw_uniform",
        "cast",
        "compiled",
        "score",
        "log_probs",
        "follow_schedule",
        "follow_reference",
    }
    for name, entry in algorithms.ALGORITHMS.items():
        cls = algorithms.resolve(entry.cls)
        assert cls.__bases__ in [(family,) for family in families], name
        assert issubclass(cls, training.Algorithm), name
        assert all(hasattr(cls, member) for member in ("name", "Config", "update")), name
        assert "update" in vars(cls), name
        inherited = {key for kind in cls.__mro__[1:] for key, value in vars(kind).items() if inspect.isfunction(value)}
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls.update)))
        called = {
            node.func.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "self"
        }
        assert not called & (inherited - allowed), name
    assert isinstance(rlox.PPO("CartPole-v1", n_envs=1), Learner)
