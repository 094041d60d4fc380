"""Imports point downwards: rlox_cli -> algorithms -> what happens around training -> what is differentiated ->
config."""

import ast
import subprocess
import sys
from pathlib import Path

import rlox
import rlox_cli

ROOTS = {"rlox": Path(rlox.__file__).parent, "rlox_cli": Path(rlox_cli.__file__).parent}
# Floor of each module or package of rlox; a module may import its own floor and those below.
FLOORS = {
    "rlox": 0,
    "rlox.config": 0,
    "rlox.migration": 0,
    "rlox.streams": 0,
    "rlox.kernels": 0,
    "rlox.plugins": 0,
    "rlox.failures": 0,
    "rlox.shadows": 0,
    "rlox.fingerprints": 0,
    **dict.fromkeys(
        (
            "rlox.policies",
            "rlox.networks",
            "rlox.losses",
            "rlox.batch",
            "rlox.optimizers",
            "rlox.acting",
            "rlox.initial",
            "rlox.native",
            "rlox.envs",
            "rlox.exploration",
        ),
        1,
    ),
    "rlox.gym_vec_env": 1,
    "rlox.gym_answers": 1,
    "rlox.env_state": 1,
    "rlox.gym_envs": 1,
    "rlox.gym_registration": 1,
    "rlox.parallel_env": 1,
    "rlox.envpool_env": 1,
    **dict.fromkeys(("rlox.loops", "rlox.collectors", "rlox.callbacks", "rlox.checkpoint", "rlox.evaluation"), 2),
    "rlox.evaluator": 2,
    "rlox.candle": 2,
    "rlox.logging": 2,
    "rlox.buffers": 2,
    "rlox.replay_files": 2,
    "rlox.vec_normalize": 1,
    "rlox.compiling": 1,
    "rlox.returns": 1,
    "rlox.video": 2,
    "rlox.offline": 2,
    "rlox.tracking": 2,
    "rlox.algorithms": 3,
    "rlox.trainers": 4,
    "rlox.__main__": 5,  # the command line, by `python -m rlox`
    "rlox_cli": 5,
}
CLI_ONLY = {"typer", "hydra", "omegaconf", "rich"}


def modules():
    for package, root in ROOTS.items():
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            yield ".".join([package, *(p for p in parts if p != "__init__")]), path


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def floor(module):
    while module not in FLOORS:
        module = module.rpartition(".")[0]
    return FLOORS[module]


def test_imports_point_downwards():
    seen = 0
    for module, path in modules():
        for name in imports(path):
            if name.split(".")[0] in ROOTS:
                seen += 1
                assert floor(name) <= floor(module), f"{module} imports {name}"
            if name.split(".")[0] in CLI_ONLY:
                assert module.startswith("rlox_cli"), f"{module} imports {name}"
    assert seen > 50


def test_every_module_has_a_floor_of_its_own():
    for module, _ in modules():
        top = ".".join(module.split(".")[:2]) if module.startswith("rlox.") else module.split(".")[0]
        assert top in FLOORS, f"{module}: give {top} a floor"


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


def test_names_are_where_the_documents_look_for_them():
    from rlox import algorithms, callbacks, config, logging, networks, policies

    shipped = [cls for cls in vars(callbacks).values() if isinstance(cls, type) and cls.__module__ == "rlox.callbacks"]
    public = [cls for cls in shipped if issubclass(cls, callbacks.Callback)]
    assert len(public) >= 10
    for cls in (*public, logging.LoggerCallback, logging.RecordLogger):
        assert getattr(rlox, cls.__name__) is cls
    assert {"Checkpoint", "Trainer"} <= set(rlox.__all__)
    for name, entry in algorithms.ALGORITHMS.items():
        found = algorithms.resolve(entry.config)
        assert getattr(algorithms, found.__name__) is getattr(config, found.__name__) is found, name
        assert found.__name__ in algorithms.__all__
    assert networks.DeterministicPolicy is policies.DeterministicPolicy


def test_python_m_rlox_is_the_command_line():
    def said(*argv):
        return subprocess.run([sys.executable, "-m", "rlox", *argv], capture_output=True, text=True)

    assert said("--version").stdout == f"rlox {rlox.__version__}\n"
    assert "a2c" in said("ls", "algos").stdout
    assert said("nonsense").returncode == 2


def test_no_two_algorithms_have_six_equal_lines():
    """What two of them share stands once, in a base or a function."""
    seen: dict[tuple[str, ...], str] = {}
    for path in sorted((ROOTS["rlox"] / "algorithms").glob("*.py")):
        text = [line.strip() for line in path.read_text().splitlines()]
        lines = [line for line in text if line and not line.startswith(("import ", "from "))]
        for i in range(len(lines) - 5):
            run = tuple(lines[i : i + 6])
            assert seen.setdefault(run, path.name) == path.name, run
