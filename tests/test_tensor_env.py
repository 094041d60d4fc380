"""Tensor environments on the CPU: the trajectories of the native ones, protocol, state, and what a step costs."""

from __future__ import annotations

import ast
import copy
import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import rlox
from rlox.collectors import RolloutCollector
from rlox.distributed.group import Group
from rlox.envs import make_vec_env, registry
from rlox.envs.protocols import step_arrays, step_layout
from rlox.envs.tensor import table
from rlox.envs.tensor.table import TENSOR_AGENT_ENVS, TENSOR_ENVS, create, tensor_env_ids
from rlox.envs.tensor.vec_env import TensorVecEnv, step_tensors
from rlox.kernels.envs.native_env import CONSTANTS
from rlox.kernels.rng import Rng

IDS = list(TENSOR_ENVS)


def module_file(path):
    return importlib.import_module(path.partition(":")[0]).__file__


# The acrobot is chaotic: a difference of 1e-16 between two sines grows past float32 within an episode.
STEPS_APART = {"Acrobot-v1": 40}


def pair(env_id, n=32, seed=5):
    native, tensor = rlox.VecEnv(n, seed, env_id), TensorVecEnv(n, seed, env_id)
    np.testing.assert_allclose(tensor.reset_all().numpy(), native.reset_all(), rtol=1e-6, atol=1e-7)
    return native, tensor


def check_equal(tensors, arrays, note=""):
    assert set(tensors) == set(arrays)
    for name, array in arrays.items():
        assert tensors[name].numpy().dtype == array.dtype
        np.testing.assert_allclose(tensors[name].numpy(), array, rtol=2e-5, atol=2e-6, err_msg=f"{name} {note}")


def wide_actions(native, rng):
    """Random actions, continuous ones beyond their bounds too."""
    return native.spec.random_actions(rng, native.n_envs) * (1 if native.discrete else 1.5)


@pytest.mark.parametrize("env_id", IDS)
def test_trajectories_are_those_of_the_native_environment(env_id):
    native, tensor = pair(env_id)
    rng, limits, ends = Rng(1), 0, 0
    for t in range(2500):
        if t % STEPS_APART.get(env_id, 10_000) == 0:
            tensor.set_state(native.get_state())
        if t % 50 == 10:
            tensor.prepare(30)  # the other steps compute their starts themselves
        actions = wide_actions(native, rng)
        arrays = native.step_all(actions)
        check_equal(tensor.step_all(torch.from_numpy(actions)), arrays, f"at step {t}")
        ends += arrays["terminated"].sum()
        limits += arrays["truncated"].sum()
    assert ends + limits > 0
    assert env_id not in ("CartPole-v1", "GridWorld-v0") or ends > 0
    assert env_id not in ("Pendulum-v1", "MountainCar-v0", "GridWorld-v0") or limits > 0
    np.testing.assert_allclose(tensor.observe().numpy(), native.observe(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("env_id", IDS)
def test_state_goes_both_ways(env_id):
    native, tensor = pair(env_id, n=300)  # more than a block of the native loop
    rng = Rng(2)
    for _ in range(30):
        actions = wide_actions(native, rng)
        native.step_all(actions)
    tensor.set_state(native.get_state())
    for name, array in native.get_state().items():
        np.testing.assert_array_equal(tensor.get_state()[name], array)
        assert tensor.get_state()[name].dtype == array.dtype
    other = rlox.VecEnv(300, 0, env_id)
    for _ in range(20):
        actions = wide_actions(native, rng)
        check_equal(tensor.step_all(torch.from_numpy(actions)), native.step_all(actions))
    other.set_state(tensor.get_state())
    for _ in range(20):
        actions = wide_actions(native, rng)
        check_equal(tensor.step_all(torch.from_numpy(actions)), other.step_all(actions))


def test_time_limit_and_statistics():
    native, tensor = pair("CartPole-v1", n=3)
    state = native.get_state()
    state["steps"][:] = 497, 498, 499
    state["returns"][:] = 0.5, 10.0, 499.0
    state["state"][:, 0] = 2.399, 50.0, 0.0, 0.0  # terminates in the next step
    for _ in range(2):
        native.set_state(state)
        tensor.set_state(state)
        for _ in range(3):
            actions = np.array([0, 1, 0])
            arrays = native.step_all(actions)
            check_equal(tensor.step_all(torch.from_numpy(actions)), arrays)
        assert arrays["episode_length"].tolist() == [2, 1, 2]


def test_reset_with_and_without_a_seed():
    native, tensor = pair("CartPole-v1", n=5)
    for seed in (None, 8, None, 8):
        np.testing.assert_allclose(tensor.reset_all(seed).numpy(), native.reset_all(seed), rtol=1e-6)
    assert tensor.seed == native.seed == 8
    # The first step starts the first episodes.
    actions = np.ones(5, np.int64)
    check_equal(
        TensorVecEnv(5, 9).step_all(torch.from_numpy(actions)), rlox.VecEnv(5, 9, "CartPole-v1").step_all(actions)
    )


@pytest.mark.parametrize("env_id", IDS)
def test_everything_stays_in_place(env_id):
    """A recorded graph reads and writes the same tensors in each replay."""
    tensor = TensorVecEnv(4, 0, env_id)
    tensor.reset_all()
    names = ("state", "steps", "returns", "episodes", "_round_keys", "_before")
    before = {name: getattr(tensor, name).data_ptr() for name in names}
    tensor.prepare(3)
    table = tensor._table.data_ptr()
    for _ in range(4):
        tensor.step_all(torch.from_numpy(tensor.spec.random_actions(Rng(0), 4)))
    tensor.set_state(tensor.get_state())
    tensor.reset_all(3)
    tensor.prepare(3)
    assert before == {name: getattr(tensor, name).data_ptr() for name in names}
    assert table == tensor._table.data_ptr()


def test_results_go_where_the_caller_wants_them():
    tensor, other = TensorVecEnv(6, 1), TensorVecEnv(6, 1)
    tensor.reset_all(), other.reset_all()
    actions = torch.ones(6, dtype=torch.int64)
    obs = torch.zeros(3, 6, 4)
    out = {"obs": obs[1], "rewards": torch.zeros(6, dtype=torch.float32)}
    expected = other.step_all(actions)
    assert tensor.step_all(actions, out) is out
    assert torch.equal(obs[1], expected["obs"])
    assert out["rewards"].tolist() == [1.0] * 6
    first = tensor.step_all(actions, copy=False)
    second = tensor.step_all(actions, copy=False)
    assert first["obs"] is second["obs"]
    assert tensor.step_all(actions)["obs"] is not tensor.step_all(actions)["obs"]


def test_actions_out_of_range_count_as_the_nearest():
    tensor, other = TensorVecEnv(2, 1), TensorVecEnv(2, 1)
    wrong, right = torch.tensor([-7, 9]), torch.tensor([0, 1])
    assert torch.equal(tensor.step_all(wrong)["obs"], other.step_all(right)["obs"])


def test_refusals():
    with pytest.raises(ValueError, match="n must be"):
        TensorVecEnv(0)
    with pytest.raises(ValueError, match="seed must be"):
        TensorVecEnv(1, -1)
    with pytest.raises(ValueError, match=r"tensor version, got 'Walker-v9'; those that have one are CartPole-v1, "):
        TensorVecEnv(1, 0, "Walker-v9")
    tensor = TensorVecEnv(3)
    with pytest.raises(ValueError, match="reset first"):
        tensor.observe()
    with pytest.raises(ValueError, match="reset first"):
        tensor.prepare(2)
    with pytest.raises(ValueError, match=r"actions must have shape \(3,\)"):
        tensor.step_all(torch.zeros(4, dtype=torch.int64))
    with pytest.raises(TypeError, match="integers"):
        tensor.step_all(torch.zeros(3))
    with pytest.raises(ValueError, match="actions must be on cpu, got meta"):
        tensor.step_all(torch.zeros(3, dtype=torch.int64, device="meta"))
    with pytest.raises(ValueError, match="out must have keys among"):
        tensor.step_all(torch.zeros(3, dtype=torch.int64), {"reward": torch.zeros(3)})
    with pytest.raises(ValueError, match="copy must be True"):
        tensor.step_all(torch.zeros(3, dtype=torch.int64), {}, copy=False)
    state = tensor.get_state()
    with pytest.raises(ValueError, match="steps must lie in"):
        tensor.set_state({**state, "steps": np.full(3, 500)})
    with pytest.raises(ValueError, match="shape"):
        TensorVecEnv(2).set_state(state)


@pytest.mark.parametrize("env_id", IDS)
def test_copies_and_pickles_continue(env_id):
    tensor = TensorVecEnv(3, 2, env_id)
    tensor.reset_all()
    actions = torch.from_numpy(tensor.spec.random_actions(Rng(4), 3))
    tensor.step_all(actions)
    other = copy.deepcopy(tensor)
    for name, result in tensor.step_all(actions).items():
        assert torch.equal(result, other.step_all(actions, {name: torch.empty_like(result)})[name]) or name != "obs"


class Launches(TorchDispatchMode):
    """Counts operations that would launch a kernel, and forbids those that wait for a device."""

    FREE = ("view", "unbind", "select", "slice", "t", "expand", "squeeze", "unsqueeze", "empty", "detach", "alias")
    WAITS = ("_local_scalar_dense", "nonzero", "item", "masked_select", "equal", "is_nonzero")

    def __init__(self):
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        assert name not in self.WAITS
        self.n += name not in self.FREE
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("env_id", IDS)
def test_launches_of_a_step(env_id):
    tensor = TensorVecEnv(4, 0, env_id)
    tensor.reset_all()
    actions = torch.from_numpy(tensor.spec.random_actions(Rng(0), 4))
    out = step_tensors(tensor.spec, 4, "cpu")
    with Launches() as preparing:
        tensor.prepare(64)
    with Launches() as stepping:
        tensor.step_all(actions, out)
    budgets = {"CartPole-v1": 38, "Acrobot-v1": 150}
    assert stepping.n <= budgets.get(env_id, 45)
    assert preparing.n <= 85


@pytest.mark.parametrize("path", sorted(set(map(module_file, [*TENSOR_ENVS.values(), *TENSOR_AGENT_ENVS.values()]))))
def test_numbers_that_define_an_environment_stand_in_the_kernels(path):
    """Tensors read them (`CONSTANTS`); only small factors of formulas are written a second time."""
    tree = ast.parse(Path(path).read_text())
    numbers = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert {x for x in numbers if isinstance(x, float)} <= {0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            assert any(isinstance(part, ast.Name) for part in ast.walk(node.value)), ast.unparse(node)


def test_constants_decide_what_the_kernels_do():
    native = rlox.VecEnv(64, 0, "GridWorld-v0")
    native.reset_all()
    rng, rewards = Rng(0), set()
    for _ in range(100):
        rewards |= set(native.step_all(native.spec.random_actions(rng, 64))["rewards"].tolist())
    assert rewards == {CONSTANTS["GridWorld-v0"]["step_reward"], CONSTANTS["GridWorld-v0"]["goal_reward"]}
    assert CONSTANTS.keys() == {*TENSOR_ENVS, *TENSOR_AGENT_ENVS}


def test_a_compiled_step_is_the_same():
    plain, fused = TensorVecEnv(8, 0), TensorVecEnv(8, 0, compiled=True)
    out = step_tensors(plain.spec, 8, "cpu")
    plain.reset_all()
    fused.reset_all()
    rng = Rng(0)
    for _ in range(60):
        actions = torch.from_numpy(plain.spec.random_actions(rng, 8))
        fused.prepare(1)  # does nothing
        fused.step_all(actions, out)
        check_equal(out, {name: value.numpy() for name, value in plain.step_all(actions).items()})


@pytest.mark.parametrize("env_id", IDS)
def test_results_are_laid_out_as_in_every_vector_environment(env_id):
    tensor = TensorVecEnv(3, 0, env_id)
    results = tensor.step_all(torch.from_numpy(tensor.spec.random_actions(Rng(0), 3)))
    arrays = step_arrays(tensor.spec, 3)
    assert list(results) == list(arrays)
    for name, (shape, dtype) in step_layout(tensor.spec, 3).items():
        assert results[name].shape == shape
        assert results[name].numpy().dtype == dtype
    assert create(env_id).env_id == env_id


def test_ways_to_create_them():
    made = rlox.VecEnv(3, 1, "CartPole-v1", device="cpu")
    assert isinstance(made, TensorVecEnv)
    assert made.device == "cpu"
    for arguments in ({"backend": "tensor"}, {"device": "cpu"}, {"backend": "tensor", "device": "cpu"}):
        other = make_vec_env("CartPole-v1", 3, 1, **arguments)
        assert torch.equal(made.reset_all(1), other.reset_all())
    assert rlox.VecEnv(3).device is None
    assert make_vec_env("CartPole-v1", 3, 1).device is None
    assert make_vec_env("CartPole-v1", 3, 1, backend="gymnasium").device is None
    with pytest.raises(ValueError, match="kwargs and wrappers must be empty"):
        make_vec_env("CartPole-v1", 3, 1, {"render_mode": None}, device="cpu")
    with pytest.raises(ValueError, match="backend auto or tensor"):
        make_vec_env("CartPole-v1", 3, 1, backend="gymnasium", device="cpu")
    with pytest.raises(ValueError, match="tensor version, got 'Hopper-v5'"):
        make_vec_env("Hopper-v5", 3, 1, backend="tensor")
    with pytest.raises(TypeError, match="env must be an id or a TensorEnv, got function"):
        make_vec_env(lambda: None, 3, 1, backend="tensor")


@pytest.fixture
def rocket(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples" / "tensor_env"))
    yield importlib.import_module("rlox_rocket").Rocket
    del sys.modules["rlox_rocket"]
    table.REGISTERED.clear()
    registry._ORIGINS.pop("Rocket-v0")


def test_the_environment_of_a_user(rocket):
    assert tensor_env_ids() == [*IDS, "Rocket-v0"]
    assert rlox.register_env(rocket) == "Rocket-v0"
    tensors = rlox.VecEnv(5, 3, "Rocket-v0", device="cpu")
    alone = TensorVecEnv(1, 3, "Rocket-v0")
    assert torch.equal(tensors.reset_all()[:1], alone.reset_all())
    rng, landings = Rng(0), 0
    for t in range(300):
        if t % 20 == 0:
            tensors.prepare(10)
        actions = torch.from_numpy(tensors.spec.random_actions(rng, 5))
        results, other = tensors.step_all(actions), alone.step_all(actions[:1])
        # Copy 0 is a function of its own seed, also where its steps are random.
        assert all(torch.equal(results[name][:1], other[name]) for name in results)
        landings += int(results["terminated"].sum())
    assert landings > 5


def test_the_environment_of_a_user_on_the_host(rocket):
    """It can be trained and evaluated like any other, with arrays."""
    tensors, arrays = TensorVecEnv(4, 1, "Rocket-v0"), make_vec_env("Rocket-v0", 4, 1)
    assert arrays.device is None
    np.testing.assert_array_equal(arrays.reset_all(), tensors.reset_all().numpy())
    actions = np.array([0, 1, 2, 0])
    check_equal(tensors.step_all(torch.from_numpy(actions)), arrays.step_all(actions))
    out = step_arrays(arrays.spec, 4)
    assert arrays.step_all(actions, out) is out
    check_equal(tensors.step_all(torch.from_numpy(actions)), out)
    other = copy.deepcopy(arrays)
    np.testing.assert_array_equal(other.step_all(actions)["obs"], arrays.step_all(actions)["obs"])
    for arguments in ({}, {"env_backend": "tensor"}):
        ppo = rlox.PPO("Rocket-v0", n_envs=4, n_steps=16, **arguments)
        ppo.train(128)
        assert np.isfinite(ppo.evaluate(2).returns).all()


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (rlox.PPO, {"n_steps": 16}),
        (rlox.DQN, {"learning_starts": 32, "batch_size": 8}),
        (rlox.IMPALA, {"n_actors": 1, "n_steps": 16}),
    ],
)
def test_a_training_in_the_environment_of_a_user_continues_exactly(cls, options, rocket, tmp_path):
    whole = cls("Rocket-v0", n_envs=2, hidden_sizes=[8], **options)
    whole.train(64)
    saved = whole.collector.state()
    whole.save(tmp_path / "memory" / "a.safetensors", memory=cls is rlox.DQN)
    whole.train(64)
    again = cls.from_checkpoint(tmp_path / "memory" / "a.safetensors")
    assert again.collector.restore_note() is None
    again.train(64)
    for name, array in whole.collector.state().items():
        np.testing.assert_array_equal(again.collector.state()[name], array, err_msg=name)
    for ours, theirs in zip(again.policy.parameters(), whole.policy.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    if cls is rlox.PPO:  # a checkpoint from before
        again.collector.set_state({**saved, "env_obs": np.zeros((2, 2), np.float32)})
        assert again.collector.state().keys() == saved.keys()
    whole.close(), again.close()


def test_ranks_step_different_copies_of_the_environment_of_a_user(rocket):
    group = object.__new__(Group)
    group.size, seen = 2, []
    for group.rank in range(2):
        collector = RolloutCollector("Rocket-v0", 3, seed=5)
        group._share_envs(collector)
        obs = [collector.env.reset_all()]
        for _ in range(40):
            obs.append(collector.env.step_all(np.zeros(3, np.int64))["obs"])
        seen.append(obs)
    joint = make_vec_env("Rocket-v0", 6, 5)
    expected = [joint.reset_all(), *(joint.step_all(np.zeros(6, np.int64))["obs"] for _ in range(40))]
    np.testing.assert_array_equal(np.concatenate(seen, axis=1), expected)


def test_processes_import_the_module_of_an_environment_of_a_user(rocket):
    impala = rlox.IMPALA("Rocket-v0", n_envs=2, n_actors=1, n_steps=8, actors="processes", hidden_sizes=[8])
    impala.train(32)
    impala.close()
    assert impala.counters.env_steps == 32
    for arguments in ({"workers": 1}, {"backend": "gymnasium"}, {"wrappers": ["ClipReward"]}):
        with pytest.raises(ValueError, match="workers 0 and backend auto or tensor for Rocket-v0, whose copies"):
            make_vec_env("Rocket-v0", 2, 0, **arguments)


def test_wrong_environments_of_users(rocket):
    def changed(**attributes):
        return type("Changed", (rocket,), {"env_id": "Changed-v0", **attributes})

    for wrong, message in (
        (changed(env_id="CartPole-v1"), "must be new, got 'CartPole-v1'"),
        (changed(env_id="Rocket-v0"), "must be new, got 'Rocket-v0'"),
        (changed(env_id="rocket"), "a name and a version"),
        (changed(state_size=0), "state_size must be at least 1, got 0"),
        (changed(state_size=3), r"the state must be torch.float64 of shape \(3, 3\), got torch.float64 \(2, 3\)"),
        (changed(observe=lambda self, state: state), r"the result must be floats of shape \(3, 2\)"),
        (changed(step=lambda self, state, *_: (state, 0, 0)), "terminated must be torch.bool"),
        (changed(step=lambda self, state, *_: (state.add_(1), 0, False)), "must not be changed in place"),
    ):
        with pytest.raises(ValueError, match=message):
            rlox.register_env(wrong)
    with pytest.raises(TypeError, match=r"must create a rlox\.envs\.tensor\.TensorEnv, got int"):
        rlox.register_env(int)
