"""The public names of an algorithm are few and can be read; its private ones are written by itself alone."""

import ast
import re
from pathlib import Path

import pytest
from packaging.version import Version

import rlox
import rlox_cli
from rlox.collectors import ReplayCollector
from rlox.collectors.exploration import ActionNoise
from rlox.evaluation import evaluate
from rlox.multi_agent.native import NativeMultiAgentVecEnv

ROOTS = [Path(rlox.__file__).parent, Path(rlox_cli.__file__).parent]


@pytest.mark.parametrize(("cls", "env", "most"), [(rlox.PPO, "CartPole-v1", 40), (rlox.SAC, "Pendulum-v1", 51)])
def test_public_names_are_few_and_can_be_read(cls, env, most):
    agent = cls(env, 1, hidden_sizes=[4])
    names = [name for name in dir(agent) if not name.startswith("_")]
    assert len(names) <= most, names
    for name in names:
        getattr(agent, name)


@pytest.mark.parametrize("name", ["learn", "set_env", "num_timesteps"])
def test_names_of_stable_baselines_are_explained(name):
    for place in (rlox.PPO, rlox.PPO("CartPole-v1", 1)):
        with pytest.raises(AttributeError, match=f"PPO has no attribute '{name}', as in Stable-Baselines3"):
            getattr(place, name)
    assert not hasattr(rlox.PPO("CartPole-v1", 1), "cast")


def test_load_returns_any_saved_agent(tmp_path):
    for cls, env in ((rlox.PPO, "CartPole-v1"), (rlox.SAC, "Pendulum-v1")):
        agent = cls(env, 1, hidden_sizes=[4])
        agent.save(tmp_path / "a.safetensors")
        loaded = rlox.load(tmp_path / "a.safetensors", device="cpu")
        assert type(loaded) is cls
        assert loaded.config == agent.config
    rlox.BC(None, 3, 2, hidden_sizes=[4]).save(tmp_path / "a.safetensors")
    assert isinstance(rlox.load(tmp_path / "a.safetensors"), rlox.BC)
    agent.save(tmp_path / "a.safetensors", algorithm="sacc")
    with pytest.raises(ValueError, match="must contain a known algorithm, got 'sacc'; did you mean 'sac'"):
        rlox.load(tmp_path / "a.safetensors")


def test_old_names_are_aliases():
    agent = rlox.PPO("CartPole-v1", 1, env_kwargs={"max_episode_steps": 9})
    collector = ReplayCollector("Pendulum-v1")
    noise = ActionNoise(collector.spec, 1, std=0.1, correlation=0.0)
    with pytest.warns(DeprecationWarning, match=r"^action_noise is deprecated, .* use exploration$"):
        collector.action_noise = noise
    assert collector.exploration is noise
    with pytest.warns(DeprecationWarning, match=r"^threads of an .* 0\.14\.0; it is no longer public$"):
        assert agent.threads == 1
    for old, new, get, value in (
        ("env_kwargs of an algorithm", "env_options.kwargs", lambda: agent.env_kwargs, {"max_episode_steps": 9}),
        ("action_noise", "exploration", lambda: collector.action_noise, noise),
        ("rlox.collectors.evaluate", "rlox.evaluation.evaluate", lambda: rlox.collectors.evaluate, evaluate),
        ("why_not", "unrestorable_reason", lambda: NativeMultiAgentVecEnv("GridPursuit-v0").why_not, None),
        ("rlox.envs.spec_of(env)", "env.spec", lambda: rlox.envs.spec_of(collector.env), collector.env.spec),
    ):
        text = f"{old} is deprecated, and will be removed in rlox 0.14.0; use {new}"
        with pytest.warns(DeprecationWarning, match=f"^{re.escape(text)}$") as caught:
            assert get() == value
        assert [one.filename for one in caught] == [__file__]


def test_old_names_are_removed_in_time():
    versions = re.findall(
        r'"(\d+\.\d+\.\d+)"',
        "".join(line for path in ROOTS[0].rglob("*.py") for line in path.open() if "warn_renamed(" in line),
    )
    assert versions
    assert [version for version in versions if Version(version) <= Version(rlox.__version__)] == []


# Attributes of objects of gymnasium and Transformers, which offer no other way to set them, or only a slow one.
OF_OTHERS = {"_attn_implementation_internal", "_elapsed_steps", "_gradient_checkpointing_func"}


def find_private_writes(tree):
    """The private attributes that code sets: their owner's name ("" for an expression), name and line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr[0] == "_" != node.attr[1]:
            yield (node.value.id if isinstance(node.value, ast.Name) else ""), node.attr, node.lineno


def find_foreign_writes(tree):
    """The private attributes that code sets outside the class that has them, with their lines."""
    own = set()
    for cls in ast.walk(tree):
        if isinstance(cls, ast.ClassDef):
            writes = list(find_private_writes(cls))
            names = {name for owner, name, _ in writes if owner in ("self", "cls")}
            own |= {(name, line) for owner, name, line in writes if owner in ("self", "cls") or name in names}
    for _, name, line in find_private_writes(tree):
        if (name, line) not in own and name not in OF_OTHERS:
            yield line, name


def test_private_attributes_are_written_by_their_own_class_alone():
    wrong = [
        f"{path.relative_to(root.parent)}:{line}: {text}"
        for root in ROOTS
        for path in sorted(root.rglob("*.py"))
        for line, text in find_foreign_writes(ast.parse(path.read_text()))
    ]
    assert not wrong, "\n".join(wrong)
