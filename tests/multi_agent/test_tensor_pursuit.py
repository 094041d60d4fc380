"""GridPursuit-v0 as tensors: the native trajectories, states and rewards."""

import numpy as np
import pytest

from rlox.kernels.envs.native_env import CONSTANTS
from rlox.multi_agent.native import NativeMultiAgentVecEnv
from rlox.multi_agent.tensor import TensorMultiAgentVecEnv

ID = "GridPursuit-v0"
ARGUMENTS = [
    {},
    {"size": 5, "n_pursuers": 6, "n_catchers": 3, "max_cycles": 17, "randomness": 0.5},
    {"size": 2, "n_pursuers": 1, "n_catchers": 1, "randomness": 1.0},
]


def pair(n=20, seed=3, kwargs=None):
    return NativeMultiAgentVecEnv(ID, n, seed, kwargs), TensorMultiAgentVecEnv(ID, n, seed, kwargs)


def require_equal(step, other, note):
    for (name, mine), theirs in zip(vars(step).items(), vars(other).values(), strict=True):
        for x, y in zip(mine, theirs, strict=True) if isinstance(mine, list) else [(mine, theirs)]:
            if x is not None:
                assert (x.shape, x.dtype) == (y.shape, y.dtype)
                np.testing.assert_array_equal(x, y, err_msg=f"{name} {note}")


def require_equal_states(one, other):
    for name, array in one.get_state().items():
        np.testing.assert_array_equal(other.get_state()[name], array)
        assert other.get_state()[name].dtype == array.dtype


@pytest.mark.parametrize("kwargs", ARGUMENTS)
def test_trajectories_are_those_of_the_native_environment(kwargs):
    native, tensor = pair(kwargs=kwargs)
    assert tensor.spec == native.spec
    rng, n_caught, n_cut = np.random.default_rng(0), 0, 0
    step, other = native.reset_all(), tensor.reset_all()
    for t in range(200):
        require_equal(step, other, f"at step {t}")
        actions = [rng.integers(0, 5, (20, native.spec.n_agents))]
        step, other = native.step_all(actions), tensor.step_all(actions)
        n_caught += step.terminated[0].any(1).sum()
        n_cut += step.truncated[0].any(1).sum()
    assert n_caught > 0
    assert n_cut > 0 or kwargs.get("size") == 2
    require_equal_states(native, tensor)


def test_states_go_both_ways_and_others_are_refused():
    native, tensor = pair()
    assert tensor.get_state() is None
    rng = np.random.default_rng(1)
    native.reset_all()
    for _ in range(30):
        native.step_all([rng.integers(0, 5, (20, 3))])
    tensor.set_state(native.get_state())
    require_equal_states(native, tensor)
    actions = [rng.integers(0, 5, (20, 3))]
    require_equal(native.step_all(actions), tensor.step_all(actions), "after set_state")
    native.set_state(tensor.get_state())
    require_equal(native.step_all(actions), tensor.step_all(actions), "after both")
    with pytest.raises(ValueError, match=r"set_state: the state must be of 20 copies of GridPursuit-v0 with 3 agents"):
        tensor.set_state(NativeMultiAgentVecEnv(ID, 4).kernel.get_state())


def test_wrong_actions_and_ids_are_refused():
    _, tensor = pair()
    with pytest.raises(ValueError, match="actions"):
        tensor.step_all([np.full((20, 3), 5)])
    with pytest.raises(ValueError, match=r"env_id must have a tensor version with several agents, got 'Hunt-v0'"):
        TensorMultiAgentVecEnv("Hunt-v0")
    with pytest.raises(ValueError, match="must have keys among size"):
        TensorMultiAgentVecEnv(ID, kwargs={"cells": 3})


def test_rewards_are_those_that_the_kernels_define():
    """The constants stand once, in kernels/envs: the reward of a step and of a catch, and what counts as one."""
    native, tensor = pair(kwargs={"size": 3})
    rng, constants = np.random.default_rng(0), CONSTANTS[ID]
    expected = {constants["step_reward"], constants["step_reward"] + constants["catch_reward"]}
    for env in (native, tensor):
        env.reset_all()
        steps = [env.step_all([rng.integers(0, 5, (20, 3))]) for _ in range(60)]
        assert {float(reward) for step in steps for reward in step.rewards[0].ravel()} == expected
        for step in steps:
            cells = np.rint(step.final_state * 2).reshape(20, 4, 2)
            np.testing.assert_array_equal(step.rewards[0][:, 0] > 0, step.terminated[0][:, 0])
            beside = np.abs(cells[:, :3] - cells[:, 3:]).sum(2) <= constants["reach"]
            assert (beside.sum(1) >= 2)[step.terminated[0][:, 0]].all()
