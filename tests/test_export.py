"""Exported files compute what the agent does: every algorithm, with each kind of observation and action."""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from camera_world import CameraWorld
from custom_policy import CustomPolicy
from gymnasium import spaces
from masked_envs import Legal
from pseudo_terminal import on_a_terminal, too_wide
from shaped_envs import Shaped
from small_algorithms import LANGUAGE, OFF_POLICY, ON_POLICY, SEQUENCES, learner, make, recorded
from zoo_probes import MaskedZoo, Together, Zoo

import rlox
from rlox.algorithms import ALGORITHMS
from rlox.exporting import runtimes
from rlox.exporting.check import compare
from rlox.exporting.graph import Graph
from rlox.exporting.module import GraphModule
from rlox.exporting.observations import record
from rlox.exporting.policies import export_graphs
from rlox.exporting.write import SUFFIXES
from rlox.nn.critics.norms import BatchNorm
from rlox_cli.config.presets import read_presets

ROOT = Path(__file__).parents[1]
FORMATS = list(SUFFIXES)
LOADERS = {"onnx": runtimes.load_onnx, "torchscript": runtimes.load_torchscript, "c": runtimes.load_c}
IMAGE = spaces.Box(0, 255, (9, 8, 3), np.uint8)
VECTOR = spaces.Box(-2, 2, (3,), np.float32)
MEMORY = {"memory": "lstm", "memory_size": 5, "hidden_sizes": [6]}


def env(observations, actions):
    return functools.partial(Shaped, observations, actions)


def stir(agent):
    """Make the weights large enough for differences to show."""
    rng = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in agent.policy.parameters():
            noise = torch.randn(p.shape, generator=rng)
            p.add_(0.5 * noise / p[0].numel() ** 0.5 if p.dim() > 1 else 0.3 * noise)
    return agent


def on_policy(name, *args, **options):
    return make(name, *args, n_envs=2, on=options)


def world_model(observations, actions):
    return rlox.DreamerV3(env(observations, actions), n_envs=2, **SEQUENCES)


CASES = {
    "ppo": lambda: on_policy("ppo"),
    "ppo-relu": lambda: on_policy("ppo", "Pendulum-v1", activation="relu", hidden_sizes=[33, 40, 9]),
    "ppo-scaled-box": lambda: on_policy(
        "ppo", env(VECTOR, spaces.Box(np.float32([[0, -3]]), np.float32([[0.1, np.inf]]))), normalize_obs=True
    ),
    "ppo-multi-discrete": lambda: on_policy("ppo", env(VECTOR, spaces.MultiDiscrete([3, 2, 4], start=[0, 5, -1]))),
    "ppo-multi-binary": lambda: on_policy("ppo", env(VECTOR, spaces.MultiBinary((2, 2)))),
    "ppo-start": lambda: on_policy("ppo", env(VECTOR, spaces.Discrete(3, start=-4))),
    "ppo-image": lambda: on_policy("ppo", env(IMAGE, spaces.Discrete(3))),
    "ppo-dict": lambda: on_policy("ppo", env(spaces.Dict(a=VECTOR, b=spaces.Discrete(4)), spaces.Discrete(2))),
    "a2c-normalized": lambda: on_policy("a2c", "Pendulum-v1", normalize_obs=True),
    "impala": lambda: make("impala"),
    "impala-memory": lambda: make("impala", on={**MEMORY, "memory": "gru"}),
    "appo": lambda: make("appo", "Pendulum-v1"),
    "appo-image": lambda: make("appo", env(IMAGE, spaces.Discrete(3))),
    "a2c-masks-and-memory": lambda: on_policy("a2c", Legal, **MEMORY),
    "mappo-one": lambda: make("mappo"),
    "mappo": lambda: make("mappo", "GridPursuit-v0"),
    "mappo-ids": lambda: make("mappo", "GridPursuit-v0", on={"agent_id": True, "backend": "torch"}),
    "mappo-groups": lambda: rlox.MAPPO("zoo", env_fn=Zoo, n_envs=2, n_steps=16, agent_id=True, **MEMORY),
    "mappo-masks": lambda: rlox.MAPPO("zoo", env_fn=MaskedZoo, n_envs=2, share_parameters=False, **ON_POLICY),
    "mappo-masks-and-memory": lambda: rlox.MAPPO("zoo", env_fn=MaskedZoo, n_envs=2, n_steps=16, **MEMORY),
    "dqn": lambda: make("dqn"),
    "dqn-dueling": lambda: make("dqn", off={"dueling": True, "hidden_sizes": [16, 8]}),
    "dqn-image": lambda: make("dqn", env(IMAGE, spaces.Discrete(3)), off={"dueling": True}),
    "dqn-masks": lambda: make("dqn", Legal),
    "qr-dqn": lambda: make("dqn", off={"distribution": "quantile", "n_atoms": 7, "layer_norm": True}),
    "rainbow": lambda: make(
        "dqn", off={"distribution": "categorical", "n_atoms": 5, "noisy": True, "dueling": True, "activation": "tanh"}
    ),
    "noisy-image": lambda: make("dqn", env(IMAGE, spaces.Discrete(3)), off={"noisy": True, "dueling": True}),
    "dqn-memory": lambda: rlox.DQN("CartPole-v1", n_envs=2, dueling=True, **MEMORY),
    "dqn-image-and-memory": lambda: rlox.DQN(env(IMAGE, spaces.Discrete(3)), n_envs=2, **MEMORY),
    "dqn-masks-and-memory": lambda: rlox.DQN("rlox/MaskedTMaze-v0", n_envs=2, **MEMORY),
    "sac": lambda: make("sac"),
    "sac-discrete": lambda: make("sac", "CartPole-v1", normalize_obs=True),
    "sac-discrete-masks": lambda: make("sac", Legal),
    "sac-discrete-image": lambda: make("sac", env(IMAGE, spaces.Discrete(3, start=2))),
    "td3": lambda: make("td3", env(VECTOR, spaces.Box(np.float32([0, -3]), np.float32([0.1, 30])))),
    "td3-layer-norm": lambda: make("td3", off={"actor_norm": "layer", "norm_after": True}),
    "sac-layer-norm": lambda: make("sac", normalize_obs=True, off={"actor_norm": "layer"}),
    "dreamer": lambda: world_model(VECTOR, spaces.MultiDiscrete([3, 2])),
    "dreamer-image": lambda: world_model(IMAGE, spaces.Box(np.float32([0, -3]), np.float32([0.1, 30]))),
    "dreamer-vector-first": lambda: world_model(spaces.Dict(a=VECTOR, b=IMAGE), spaces.Discrete(3)),
    "dreamer-camera": lambda: rlox.DreamerV3(CameraWorld, n_envs=2, **SEQUENCES),
    "lstm": lambda: on_policy("ppo", env(VECTOR, spaces.Box(-1, 1, (2,))), memory_layers=2, **MEMORY),
    "gru-image": lambda: on_policy("ppo", env(IMAGE, spaces.Discrete(3)), **{**MEMORY, "memory": "gru"}),
    "masks": lambda: on_policy("ppo", Legal),
    "masks-of-choices": lambda: on_policy("ppo", functools.partial(Legal, choices=(3, 2))),
    "masks-and-memory": lambda: on_policy("ppo", "rlox/MaskedTMaze-v0", **MEMORY),
    "bc": lambda: learner("bc", "discrete"),
    "bc-memory": lambda: learner("bc", "discrete", **{**MEMORY, "memory": "gru"}),
    "cql": lambda: learner("cql"),
    "iql": lambda: learner("iql", dataset=recorded(seed=1), normalize_obs=False),
    "td3_bc": lambda: learner("td3_bc", dataset=recorded(normalize=True)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_files_compute_what_the_agent_does(name, tmp_path):
    agent = stir(CASES[name]())
    try:
        for to in FORMATS:
            results = rlox.export(agent, tmp_path / f"p{SUFFIXES[to]}", to, observations=70)
            assert len(results) == len(getattr(agent, "players", [0]))
            for exported in results:
                check = exported.check
                assert check.n == 70
                assert check.differences.keys() >= {"action"}
                scored = "scores" in exported.outputs and "noise" not in exported.inputs
                assert ("scores" in check.differences) == scored
                assert ("state" in exported.inputs) == ("next_state" in check.differences)
                assert all(file.stat().st_size > 0 for file in exported.files)
                assert check.n_ties <= 1
    finally:
        agent.close()


def test_every_algorithm_that_acts_is_among_the_cases():
    assert {name.partition("-")[0] for name in CASES} >= {*ALGORITHMS} - {*LANGUAGE}


@pytest.mark.slow
@pytest.mark.parametrize("name", read_presets())
def test_files_of_presets_compute_what_the_agent_does(name, tmp_path):
    """After updates, which give batch normalisation its statistics and noisy layers their noise."""
    settings = {**rlox.preset(name), **OFF_POLICY}
    if "critic_hidden_sizes" in settings:
        settings["critic_hidden_sizes"] = [16]
    if "residual_blocks" in settings:
        settings["hidden_sizes"] = [16]
    discrete = read_presets()[name] == "dqn"
    agent = (rlox.DQN if discrete else rlox.SAC)("CartPole-v1" if discrete else "Pendulum-v1", **settings)
    agent.train(200)
    stir(agent)
    for to in FORMATS:
        (exported,) = rlox.export(agent, tmp_path / f"p{SUFFIXES[to]}", to)
        assert exported.check.n == 1000
        assert exported.check.differences.keys() == ({"action", "scores"} if discrete else {"action"})
        assert max(exported.check.differences.values()) <= 1e-5


@pytest.mark.parametrize("norm_after", [False, True])
def test_batch_normalisation_of_observations_far_from_zero_keeps_its_precision(norm_after, tmp_path):
    far = spaces.Box(np.float32([1e3, -4e4, 0]), np.float32([1e3 + 1, -3e4, 1e-3]))
    options = {"actor_norm": "batch", "critic_norm": "batch", "norm_after": norm_after}
    agent = make("sac", env(far, spaces.Box(-1, 1, (2,))), off=options)
    norms = [layer for layer in agent.policy.modules() if isinstance(layer, BatchNorm)]
    rows = np.random.default_rng(0).uniform(far.low, far.high, (500, 3))
    with torch.no_grad():
        norms[0].mean.copy_(torch.from_numpy(rows.mean(0)))
        norms[0].var.copy_(torch.from_numpy(rows.var(0)))
        for layer in norms[1:]:
            layer.mean.uniform_(-1.0, 1.0)
            layer.var.uniform_(0.01, 4.0)
    assert len(norms) == 3
    for to in FORMATS:
        (exported,) = rlox.export(stir(agent), tmp_path / f"p{SUFFIXES[to]}", to, observations=200)
        assert exported.check.differences["action"] <= 1e-5


def load(to, policy, path):
    return LOADERS[to](policy.graph, path)[0]


@pytest.mark.parametrize("to", FORMATS)
def test_a_file_that_computes_something_else_is_not_written(to, tmp_path):
    agent = stir(on_policy("ppo"))
    path = tmp_path / f"p{SUFFIXES[to]}"
    rlox.export(agent, path, observations=20)
    (policy,) = export_graphs(agent)
    (inputs,), source = record(agent, [policy], 200, 0)
    assert compare(agent, policy, load(to, policy, path), "", inputs, source).passed
    stir(agent)
    check = compare(agent, policy, load(to, policy, path), "", inputs, source)
    assert not check.passed
    assert check.differences["scores"] > 0.01
    before = path.read_bytes()
    wrong = "rlox.exporting.write.export_graphs"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wrong, lambda agent: [policy])  # the graph of the weights before
        with pytest.raises(RuntimeError, match=r"must compute what predict does, up to 1e-05, but scores differs by"):
            rlox.export(agent, path, observations=200)
    assert path.read_bytes() == before
    assert {file.suffix for file in tmp_path.iterdir()} <= {path.suffix, ".h"}


@pytest.mark.parametrize("to", FORMATS)
def test_a_file_remembers_what_the_agent_does(to, tmp_path):
    agent = stir(on_policy("ppo", env(VECTOR, spaces.Box(-1, 1, (2,))), **MEMORY))
    path = tmp_path / f"p{SUFFIXES[to]}"
    rlox.export(agent, path, observations=10)
    (policy,) = export_graphs(agent)
    run, session = load(to, policy, path), agent.session()
    rows = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
    assert policy.state_dim == 10 < agent.policy.state_dim  # without that of the critic
    state, actions = np.zeros((1, policy.state_dim), np.float32), []
    for row in rows:
        outputs = run({"obs": row[None], "state": state})
        state = outputs["next_state"]
        actions.append(outputs["action"][0])
    expected = [session.predict(row) for row in rows]
    np.testing.assert_allclose(actions, expected, atol=1e-5)
    forgetting = run({"obs": rows, "state": np.zeros((60, policy.state_dim), np.float32)})["action"]
    assert np.abs(forgetting[1:] - expected[1:]).max() > 0.01


@pytest.mark.parametrize("to", FORMATS)
def test_a_file_takes_no_illegal_action(to, tmp_path):
    agent = stir(on_policy("ppo", functools.partial(Legal, choices=(3, 2))))
    path = tmp_path / f"p{SUFFIXES[to]}"
    rlox.export(agent, path, observations=10)
    run = load(to, export_graphs(agent)[0], path)
    obs = np.random.default_rng(0).normal(size=(6, 2)).astype(np.float32)
    for i in range(3):
        for j in range(2):
            only = np.zeros((6, 5), np.bool_)
            only[:, [i, 3 + j]] = True
            assert (run({"obs": obs, "mask": only})["action"] == [i, j]).all()


def test_names_of_agents_become_names_of_files(tmp_path):
    class Teams(Together):
        spans: ClassVar = {"red/one": (5, True), "red_one": (5, True)}

    agent = rlox.MAPPO("teams", env_fn=Teams, n_envs=2, share_parameters=False, **ON_POLICY)
    exported = rlox.export(agent, tmp_path / "p.pt", observations=10)
    assert [one.name for one in exported] == ["red/one", "red_one"]
    assert [one.files[0].name for one in exported] == ["p_red_one.pt", "p_red_one_.pt"]
    assert all(one.files[0].is_file() for one in exported)


def test_a_normalization_with_a_large_mean_keeps_its_precision(tmp_path):
    agent = stir(on_policy("ppo", env(spaces.Box(1e4, 1e4 + 1, (3,), np.float32), spaces.Box(-1, 1, (1,))),
                           normalize_obs=True))  # fmt: skip
    agent.train(200)
    (exported,) = rlox.export(agent, tmp_path / "p.onnx", observations=200)
    assert exported.check.differences["action"] < 1e-6


def test_policies_of_others_are_written_by_pytorch_and_not_as_c(tmp_path):
    agent = rlox.PPO("CartPole-v1", n_envs=2, policy=CustomPolicy(torch.nn.GELU), **ON_POLICY)
    (exported,) = rlox.export(agent, tmp_path / "p.pt", observations=50)
    assert exported.outputs == {"action": ("int", ())}
    with pytest.raises(ValueError, match="CustomPolicy cannot be written as C"):
        rlox.export(agent, tmp_path / "p.c", observations=0)


@pytest.mark.slow
def test_a_layer_that_rlox_does_not_know_is_written_by_pytorch(tmp_path):
    agent = rlox.PPO("CartPole-v1", n_envs=2, backend="torch", **ON_POLICY)
    agent.policy.actor.insert(1, torch.nn.GELU())
    stir(agent)
    (exported,) = rlox.export(agent, tmp_path / "p.onnx", observations=50)
    assert exported.check.differences.keys() == {"action", "scores"}
    import onnx

    model = onnx.load(tmp_path / "p.onnx")
    assert [value.name for value in model.graph.input] == ["obs"]
    assert json.loads(model.metadata_props[-1].value)["env"] == "CartPole-v1"
    with pytest.raises(ValueError, match="GELU cannot be written as C, which knows perceptrons"):
        rlox.export(agent, tmp_path / "p.c", observations=0)


def test_what_cannot_be_exported_says_why(tmp_path):
    agent = on_policy("ppo")
    for path, to, message in (
        ("p", None, "path must end in .onnx, .pt, .c, or name to="),
        ("p.onnx", "onxx", "to must be onnx, torchscript or c, got 'onxx'; did you mean 'onnx'?"),
        ("p.txt", "c", "path must end in .c, beside which the header is written"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            rlox.export(agent, tmp_path / path, to)
    with pytest.raises(TypeError, match="agent must be an agent of rlox, got str"):
        rlox.export("run", tmp_path / "p.onnx")
    sampler = CustomPolicy()
    del CustomPolicy.mode
    try:
        with pytest.raises(TypeError, match=r"CustomPolicy must define mode\(obs\) -> actions"):
            rlox.export(rlox.PPO("CartPole-v1", n_envs=1, policy=sampler), tmp_path / "p.onnx")
    finally:
        CustomPolicy.mode = lambda self, obs: self._choices(obs).logits.argmax(-1)
    assert not list(tmp_path.iterdir())


def test_missing_programs_are_errors_that_say_what_to_install(tmp_path, monkeypatch):
    agent = on_policy("ppo")
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(
        ImportError, match=r"onnx must be installed, which writes ONNX files: pip install 'rlox-cli\[exp"
    ):
        rlox.export(agent, tmp_path / "p.onnx", observations=0)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(RuntimeError, match="there must be a C compiler to check the file with"):
        rlox.export(agent, tmp_path / "p.c")
    assert [len(exported.files) for exported in rlox.export(agent, tmp_path / "p.c", observations=0)] == [2]


# ---- the C program


def program(path: Path, macro: str) -> Path:
    compiled = path.with_suffix("")
    runtimes.compile_c(runtimes.find_compiler(), path, compiled, f"-D{macro}")
    return compiled


def run_program(compiled, text):
    done = subprocess.run([compiled], input=text, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.splitlines(), done.stderr


def test_the_program_reads_observations_and_prints_actions(tmp_path):
    agent = stir(on_policy("ppo", env(VECTOR, spaces.Box(-1, 1, (2,)))))
    rlox.export(agent, tmp_path / "my-robot.c", observations=10)
    compiled = program(tmp_path / "my-robot.c", "MY_ROBOT_MAIN")
    rows = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    code, lines, _ = run_program(compiled, "\n".join(" ".join(map(str, row)) for row in rows.tolist()))
    assert code == 0
    np.testing.assert_allclose([list(map(float, line.split())) for line in lines], agent.predict(rows), atol=1e-6)
    assert run_program(compiled, "1 nan 0") == (
        1, [], "an observation that is not finite, or a mask that allows nothing\n",
    )  # fmt: skip


def test_the_program_remembers_until_it_reads_reset_and_takes_masks(tmp_path):
    agent = stir(on_policy("ppo", "rlox/MaskedTMaze-v0", **MEMORY))
    rlox.export(agent, tmp_path / "p.c", observations=10)
    compiled, n, k = program(tmp_path / "p.c", "P_MAIN"), agent.spec.obs_dim, agent.spec.n_actions
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(30, n)).astype(np.float32)
    masks = rng.integers(2, size=(30, k))
    masks[:, 1] |= masks.sum(1) == 0
    lines = [" ".join(map(str, [*row, *mask])) for row, mask in zip(rows.tolist(), masks.tolist(), strict=True)]
    code, printed, _ = run_program(compiled, "\n".join([*lines[:15], "reset", *lines[15:]]) + "\n")
    session, expected = agent.session(), []
    for i in range(30):
        if i == 15:
            session.reset()
        expected.append(str(session.predict(rows[i], mask=masks[i].astype(bool))))
    assert (code, printed) == (0, expected)
    assert run_program(compiled, " ".join(["0"] * (n + k)))[0] == 1


def test_a_world_model_as_a_program_draws_its_own_numbers(tmp_path):
    agent = world_model(VECTOR, spaces.Discrete(2))
    rlox.export(agent, tmp_path / "p.c", observations=10)
    code, lines, _ = run_program(program(tmp_path / "p.c", "P_MAIN"), "0 0 0\n1 1 1\nreset\n0 0 0\n")
    assert code == 0
    assert len(lines) == 3
    assert set(lines) <= {"0", "1"}


def test_the_c_program_of_the_manual_compiles_and_runs(tmp_path):
    agent = stir(on_policy("ppo", hidden_sizes=[8]))
    rlox.export(agent, tmp_path / "policy.c", observations=0)
    page = (ROOT / "docs/guides/export.md").read_text()
    (text,) = re.findall(r"^```c\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "main.c").write_text(text)
    command = [runtimes.find_compiler(), *runtimes.C_FLAGS, "main.c", "policy.c", "-o", "main"]
    subprocess.run(command, cwd=tmp_path, check=True)
    printed = subprocess.run([tmp_path / "main"], capture_output=True, text=True, check=True).stdout
    obs = np.array([0.01, -0.02, 0.03, 0.04], np.float32)
    assert printed.startswith(f"push {'right' if agent.predict(obs) else 'left'}: ")


# ---- the browser

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WEB = os.environ.get("ONNXRUNTIME_WEB")  # the folder of the package onnxruntime-web


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None or not WEB, reason="needs Chromium, and onnxruntime-web at ONNXRUNTIME_WEB")
def test_a_browser_balances_the_pole(tmp_path):
    agent = rlox.PPO("CartPole-v1", n_envs=8, seed=1, **rlox.tuned("ppo", "CartPole-v1")["algo"])
    agent.train(40_000)
    assert agent.evaluate(5).returns.mean() > 300
    rlox.export(agent, tmp_path / "policy.onnx")
    shutil.copy(ROOT / "examples/browser/index.html", tmp_path)
    (tmp_path / "node_modules").mkdir()
    (tmp_path / "node_modules/onnxruntime-web").symlink_to(Path(WEB).resolve())
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=30000", "--dump-dom"]
        url = f"http://127.0.0.1:{server.server_port}/index.html"
        page = subprocess.run([*command, url], capture_output=True, text=True, check=True, timeout=120).stdout
        server.shutdown()
    lengths = re.search(r"episodes before: (\d+)", page)
    assert lengths, page[-500:]
    assert int(lengths[1]) > 200


# ---- parts


def test_a_graph_computes_its_operations():
    graph = Graph({})
    x, mask = graph.input("obs", (4,)), graph.input("mask", (4,), "bool")
    graph.outputs["action"] = graph.argmax(graph.mask(x, mask))
    graph.outputs["scores"] = graph.clip(graph.arithmetic("div", x, graph.mean(x)), -1.0, np.inf)
    rows = torch.tensor([[1.0, 2.0, -4.0, 5.0]])
    action, scores = GraphModule(graph)(rows, torch.tensor([[True, True, True, False]]))
    assert action.tolist() == [1]
    assert scores.tolist() == [[1.0, 2.0, -1.0, 5.0]]
    with pytest.raises(ValueError, match="name must be one of tanh, relu"):
        graph.elementwise("cos", x)
    with pytest.raises(ValueError, match="name must be one of add, sub"):
        graph.arithmetic("pow", x, 2.0)


# ---- the command


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run of one short training."""
    import forked

    cwd = tmp_path_factory.mktemp("export")
    words = ["total_timesteps=256", "eval.n_points=1", "eval.n_episodes=2", "logger=none", "hydra.run.dir=run"]
    forked.run("train", "env.n_envs=2", "algo.hidden_sizes=[8]", *words, cwd=cwd)
    return cwd


@pytest.mark.slow
def test_the_command_prints_a_table_of_80_columns(run_folder):
    code, lines = on_a_terminal(80, "export", "run", "--observations", "50", cwd=run_folder)
    text = "\n".join(lines)
    assert code == 0, text
    assert too_wide(lines, 80) == []
    assert "run/export/policy.onnx: ppo" in text
    assert re.search(r"output +scores +float32 +2 +(none|\d\S*e-\d\d)", text)
    assert "checked with 50 observations of CartPole-v1 by ONNX Runtime" in text
    assert (run_folder / "run/export/policy.onnx").is_file()


def test_the_command_prints_json_and_explains_errors(run_folder, command, monkeypatch):
    monkeypatch.chdir(run_folder)
    code, out, _ = command("export", "run", "--out", "p.c", "--observations", "20", "--json")
    assert not code
    result = json.loads(out)
    assert result["files"] == ["p.c", "p.h"]
    assert result["inputs"] == {"obs": ["float", 4]}
    assert result["outputs"] == {"action": ["int"], "scores": ["float", 2]}
    assert result["differences"]["scores"] <= 1e-5
    for words, message in (
        (["run", "--out", "p.txt"], "--out must end in .onnx, .pt, .c if --to is left out, got p.txt"),
        (["absent"], "absent"),
        (["run", "--to", "c", "--out", "p.onnx"], "rlox export: path must end in .c"),
    ):
        code, _, error = command("export", *words)
        assert code == 2
        assert message in error
        assert "Traceback" not in error


def test_the_default_path_follows_no_link_of_the_run(run_folder, command, tmp_path):
    shutil.copytree(run_folder / "run", "run", ignore=shutil.ignore_patterns("export"))
    Path("elsewhere").mkdir()
    Path("run/export").symlink_to(tmp_path / "elsewhere")
    os.symlink("run", "link")
    for words in (["run"], ["link"], ["run/checkpoints/last.safetensors"]):
        code, _, error = command("export", *words, "--to", "c", "--observations", "0")
        assert (code, "export must be a folder, got a symbolic link; links inside a run folder" in error) == (2, True)
    code, _, error = command("export", "run", "--observations", "0", "--out", "run/export/a.c")  # typed
    assert not code, error
    assert [path.suffix for path in sorted(Path("elsewhere").iterdir())] == [".c", ".h"]
