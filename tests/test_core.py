"""The library alone: it needs NumPy, PyTorch, gymnasium and safetensors, with what these need themselves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

from rlox_cli import start

ROOT = Path(__file__).parents[1]
CORE = ("gymnasium", "numpy", "safetensors", "torch")
# Placed in sitecustomize.py, which also child processes import at their start.
BLOCK = """
import sys

class Blocked:
    allowed = sys.stdlib_module_names | {names!r}

    def find_spec(self, name, path=None, target=None):
        if path is None and name not in self.allowed:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
"""
TRAIN = """
import rlox
ppo = rlox.PPO("CartPole-v1", n_envs=4, n_steps=32, seed=1)
ppo.train(total_timesteps=512)
ppo.save("agent.safetensors")
ppo = rlox.load("agent.safetensors")
print(type(ppo).__name__, ppo.predict([0.0, 0.0, 0.02, 0.0]) in (0, 1), ppo.counters.steps)
print(len(ppo.evaluate(2).returns))
dqn = rlox.DQN("CartPole-v1", learning_starts=40, backend="torch", env_backend="gymnasium", env_workers=1)
dqn.train(total_timesteps=64)
print(dqn.backend, dqn.counters.steps)
"""


def names_of(*packages):
    """The modules that the packages install, and those that these need without any extra."""
    names, waiting, seen = set(), list(packages), set()
    while waiting:
        package = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if package in seen:
            continue
        seen.add(package)
        installed = distribution(package)
        for file in installed.files or ():
            names.add(file.parts[0].partition(".")[0])
        waiting += [re.match(r"[\w.-]+", line)[0] for line in installed.requires or () if ";" not in line]
    return names


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    """Run a program where only the packages of the library can be imported; its output, errors and exit code."""
    folder = tmp_path_factory.mktemp("core")
    names = names_of(*CORE) | {"rlox", "rlox_cli"}
    names |= {name for name in sys.modules if name.startswith("__editable__")}
    (folder / "sitecustomize.py").write_text(BLOCK.format(names=names))

    def run(*command, cwd=folder):
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
        return subprocess.run([sys.executable, *command], cwd=cwd, env=env, capture_output=True, text=True, check=False)

    return run


@pytest.mark.slow
def test_the_library_trains_saves_loads_and_predicts_without_other_packages(core, tmp_path):
    done = core("-c", TRAIN, cwd=tmp_path)
    assert done.stderr == ""
    assert done.stdout == "PPO True 512\n2\ntorch 64\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("rlox.PPO('CartPole-v1', logger='csv')", 'logger: yaml is required; pip install "rlox-cli[cli]"'),
        (
            "rlox.PPOConfig().to_yaml('a.yaml')",
            'PPOConfig.to_yaml: yaml is required; pip install "rlox-cli[cli]"',
        ),
        ("rlox.tuned('ppo', 'CartPole-v1')", 'tuned: yaml is required; pip install "rlox-cli[cli]"'),
    ],
)
def test_what_needs_a_package_names_its_extra(core, program, message):
    done = core("-c", f"import rlox; {program}")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"ImportError: {message}"


@pytest.mark.slow
def test_the_command_line_names_its_extra(core):
    done = core("-m", "rlox", "--help")
    assert done.returncode == 1
    assert re.fullmatch(
        r'rlox: the command line needs (\w+), which is not installed; try: pip install "rlox-cli\[cli\]"\n', done.stderr
    )
    assert re.search(r"needs (\w+)", done.stderr)[1] in start.PACKAGES


@pytest.fixture
def pyproject():
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_dependencies_are_those_of_the_library_and_of_the_default_extras(pyproject):
    project = pyproject["project"]
    extras = project["optional-dependencies"]
    parts = [need for name in ("cli", "mlflow", "plot", "wandb") for need in extras[name]]
    library = [need for need in project["dependencies"] if need not in parts and ";" not in need]
    assert sorted(re.match(r"[\w-]+", need)[0] for need in library) == list(CORE)
    assert set(parts) < set(project["dependencies"])
    of_cli = {"hydra-core": "hydra", "pyyaml": "yaml"}
    names = [re.match(r"[\w-]+", need)[0] for need in extras["cli"]]
    assert sorted(of_cli.get(name, name) for name in names) == list(start.PACKAGES)


def test_the_versions_of_python_are_those_that_the_workflow_tests(pyproject):
    tested = set(re.findall(r'python(?:-version)?: "(3\.\d+)"', (ROOT / ".github/workflows/tests.yml").read_text()))
    claimed = {name.rpartition(" ")[2] for name in pyproject["project"]["classifiers"] if "Python :: 3." in name}
    assert claimed == tested
    wheels = re.findall(r"cp3(\d+)-\*", pyproject["tool"]["cibuildwheel"]["build"])
    assert {f"3.{minor}" for minor in wheels} == tested
