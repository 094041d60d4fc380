"""``rlox new algorithm``: a copy of an algorithm's update and losses, as a package that trains at once."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from shlex import quote
from sys import stdlib_module_names
from typing import Any

from rlox import __version__
from rlox.algorithms import ALGORITHMS, entry_of, resolve
from rlox.algorithms.actor_critic import ActorCriticAlgorithm
from rlox.config import nearest
from rlox.training import OfflineAlgorithm, OffPolicyAlgorithm, OnPolicyAlgorithm
from rlox_cli.new.copying import copy_update
from rlox_cli.new.files import check_name, class_name, pyproject, write_package
from rlox_cli.terminal.errors import UsageError

_BASES = (OnPolicyAlgorithm, OffPolicyAlgorithm, ActorCriticAlgorithm, OfflineAlgorithm)

_MODULE = '''"""{title}: {base} with a loss of its own.

{copied}
are copies of those of rlox {version}. Until you change them, `algo={name}` learns exactly what
`algo={like} backend=torch` learns, with the same numbers.
"""

from __future__ import annotations

{imports}


@dataclass
class {cls}Config({base}Config):
    """{title}."""

    # The settings of {base}, and yours, such as this one:
    # bonus: float = 0.01  # weight of my term; `rlox show algo={name}` prints this comment


{losses}class {cls}({base}):
    """{title}; see `{cls}Config`."""

    name = "{name}"
    Config = {cls}Config

{update}


ALGORITHMS["{name}"] = Entry("{name}:{cls}", "{name}:{cls}Config")  # for --import; installed, an entry point tells
'''

_TEST = '''"""Tests of {name}.py. Run them with `pytest`."""

import math

{imports}
SMALL = {small}


{agents}
def test_it_trains_and_is_restored(tmp_path):
    agent = make({cls})
    metrics = agent.train({steps})
    assert all(math.isfinite(metrics[name]) for name in metrics if name.endswith("loss"))
    agent.save(tmp_path / "agent.safetensors")
    obs = {obs}
    restored = {cls}.from_checkpoint(tmp_path / "agent.safetensors")
    assert np.array_equal(restored.predict(obs), agent.predict(obs))


def test_without_changes_it_is_{like}():
    """Remove this once the loss differs, or better: give your change a weight, and set that to 0 here."""
    mine, theirs = make({cls}), make({base}, backend="torch")
    mine.train({steps})
    theirs.train({steps})
    for name, weight in mine.policy.state_dict().items():
        assert torch.equal(weight, theirs.policy.state_dict()[name]), name
'''

_ENV = """def make(cls, **more):
    return cls("{env}", n_envs={n_envs}, seed=0, **SMALL, **more)

"""

_DATASET = '''def make(cls, **more):
    """An agent, and a dataset of random transitions to learn from."""
    rng = np.random.default_rng(0)
    obs, next_obs = rng.normal(size=(2, 400, 3)).astype(np.float32)
    actions, rewards = rng.uniform(-1, 1, (400, 1)).astype(np.float32), rng.normal(size=400).astype(np.float32)
    ends = rng.random(400) < 0.02
    data = OfflineDatasetBuffer(obs, next_obs, actions, rewards, ends, np.zeros(400, bool))
    return cls(data, obs_dim=3, act_dim=1, seed=0, **SMALL, **more)

'''

_README = """# {title}

{base} with a loss of its own, in `{name}.py`: the losses first, then the update that calls them. Change a line, then:

    pytest                                              # it trains, and is restored
    rlox train --import {name} algo={name} {task}
    rlox show --import {name} algo={name}               # your settings, explained by their comments

With its own update it learns with PyTorch, not with the compiled kernel of `algo={like}`; environments and collection
stay compiled. Does the change help? Compare several seeds, with the same backend on both sides:

    rlox bench learn algo={like} backend=torch {task} --seeds 10 --out before
    rlox bench learn --import {name} algo={name} {task} --seeds 10 --against before/learn.json

After `pip install -e .` the algorithm is known wherever it is installed, without `--import`.
"""


def choices() -> list[str]:
    """Return the algorithms that a new one may start from: those that are a configuration and an update."""
    classes = {name: resolve(entry.cls) for name, entry in ALGORITHMS.items() if entry.cls.startswith("rlox.")}
    return [name for name, cls in classes.items() if cls.__base__ in _BASES and "__init__" not in vars(cls)]


def make_algorithm(name: str, like: str, folder: Path | None) -> None:
    """Write a package with the algorithm `name`, whose update is a copy of that of `like`.

    Raises
    ------
    UsageError
        If the name is taken or no name of a module, its class would hide another, or `like` cannot be copied.
    """
    check_name(name)
    if entry_of(name) is not None:
        raise UsageError(f"NAME must be new, but there is an algorithm {name}; choose another")
    if like not in choices():
        raise UsageError(f"--like must be one of {', '.join(choices())}, got {like!r}; {nearest(like, choices())}")
    texts = texts_of(name, like)
    folder = Path(name) if folder is None else folder
    task = _task(resolve(ALGORITHMS[like].cls))
    write_package(
        folder,
        texts,
        [
            ("change", f"{folder / name}.py"),
            ("test", f"cd {quote(str(folder))} && pytest"),
            ("train", f"cd {quote(str(folder))} && rlox train --import {name} algo={name} {task}"),
        ],
    )


def texts_of(name: str, like: str) -> dict[str, str]:
    """Return the files of the package."""
    original = resolve(ALGORITHMS[like].cls)
    base, cls, title = original.__name__, class_name(name), name.replace("_", " ").capitalize()
    copied = copy_update(original)
    names = re.findall(r"^(?:def|class) (\w+)", "\n".join(copied.losses), re.MULTILINE)
    imports = {
        *copied.imports,
        "from dataclasses import dataclass",
        f"from rlox.algorithms import {base}",
        f"from rlox.config import {base}Config",
        "from rlox.algorithms import ALGORITHMS",
        "from rlox.algorithms import Entry",
    }
    taken = {*names, *(line.split()[-1] for line in imports)}
    if clash := taken & {cls, f"{cls}Config"}:
        raise UsageError(
            f"NAME must not give the class {cls}, since the file needs another {min(clash)}; choose another, got {name}"
        )
    values: dict[str, Any] = {
        "name": name,
        "title": title,
        "like": like,
        "base": base,
        "cls": cls,
        "version": __version__,
        "copied": _wrap([*names, f"{cls}.update"]),
        "imports": _join_imports(imports),
        "losses": "".join(f"{text}\n\n\n" for text in copied.losses),
        "update": copied.update,
        "task": _task(original),
        **_test_values(original, name, cls),
    }
    entry_point = f'\n[project.entry-points."rlox.algorithms"]\n{name} = "{name}:{cls}"\n'
    return {
        f"{name}.py": _MODULE.format(**values),
        f"test_{name}.py": _TEST.format(**{**values, "imports": values["test_imports"]}),
        "pyproject.toml": pyproject(name, f"{base} with a loss of its own.", entry_point),
        "README.md": _README.format(**values),
    }


def _task(cls: Any) -> str:
    """Return the environment, or the dataset, of the commands in the README."""
    if issubclass(cls, OfflineAlgorithm):
        return "dataset=data.arrow"
    return "env=CartPole-v1" if "discrete" in cls.actions else "env=Pendulum-v1"


def _test_values(original: Any, name: str, cls: str) -> dict[str, Any]:
    """Return what the test needs: how an agent is made, small settings, steps and an observation."""
    base = original.__name__
    ours = base
    if issubclass(original, OfflineAlgorithm):
        ours = ", ".join(sorted((base, "OfflineDatasetBuffer")))
        small: dict[str, Any] = {"hidden_sizes": [16], "batch_size": 32}
        agents, steps, obs = _DATASET, 20, "np.zeros(3, np.float32)"
    else:
        discrete = "discrete" in original.actions
        rollouts = issubclass(original, OnPolicyAlgorithm)
        small = {"hidden_sizes": [16]}
        small |= {"n_steps": 32} if rollouts else {"batch_size": 32, "learning_starts": 100, "buffer_size": 1_000}
        env = "CartPole-v1" if discrete else "Pendulum-v1"
        agents = _ENV.format(env=env, n_envs=2 if rollouts else 1)
        steps, obs = 256, f"np.zeros({4 if discrete else 3}, np.float32)"
    lines = ["import numpy as np", "import torch", f"from rlox import {ours}", "", f"from {name} import {cls}", ""]
    text = "{" + ", ".join(f'"{key}": {value!r}' for key, value in small.items()) + "}"
    return {
        "test_imports": "\n".join(lines),
        "small": text,
        "agents": agents,
        "steps": steps,
        "obs": obs,
    }


def _wrap(names: list[str]) -> str:
    """Return names as prose, in lines of at most 110 characters."""
    quoted = [f"`{name}`" for name in names]
    text = quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} and {quoted[-1]}"
    return "\n".join(textwrap.wrap(text, 110, break_long_words=False))


def _join_imports(statements: set[str]) -> str:
    """Return import statements as ruff sorts them: those of Python first, then others."""
    whole = sorted(line for line in statements if line.startswith("import "))
    parts: dict[str, set[str]] = {}
    for line in statements - {*whole}:
        module, _, name = line.removeprefix("from ").partition(" import ")
        parts.setdefault(module, set()).add(name)
    lines = [*whole]
    for module, names in sorted(parts.items()):
        # Constants, classes, functions.
        ordered = sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
        lines.append(f"from {module} import {', '.join(ordered)}")
    known = [line for line in lines if line.split()[1].partition(".")[0] in stdlib_module_names]
    others = [line for line in lines if line not in known]
    return "\n\n".join("\n".join(group) for group in (known, others) if group)
