"""The check of a user's tensor environment, when it is registered: it is built and takes steps on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rlox.envs.spec import EnvSpec
from rlox.envs.tensor.base import TensorAgents, TensorEnv
from rlox.envs.tensor.vec_env import TensorVecEnv
from rlox.kernels.rng import Rng

_N = 3  # copies, a number that differs from most sizes of states and observations


def check_tensor_env(create: Callable[[], Any], where: str) -> TensorEnv:
    """Create an environment, let three copies take two steps, and return it.

    Raises
    ------
    TypeError
        If `create` does not return a `TensorEnv`.
    ValueError
        If an attribute or the result of a function has another type or shape than `TensorEnv` says.
    """
    env = create()
    if not isinstance(env, TensorEnv):
        raise TypeError(f"{where}: env must create a rlox.envs.tensor.TensorEnv, got {type(env).__name__}")
    where = f"{where}: {type(env).__name__}"
    for name, right, rule in (
        ("env_id", lambda x: isinstance(x, str), "be a str"),
        ("agents", lambda x: x is None or isinstance(x, TensorAgents), "be None or a TensorAgents"),
        ("spec", lambda x: isinstance(x, EnvSpec) and len(x.obs_shape) == 1, "be an EnvSpec of vectors"),
        ("state_size", lambda x: isinstance(x, int) and x >= 1, "be at least 1"),
        ("max_episode_steps", lambda x: x is None or (isinstance(x, int) and x >= 1), "be None or at least 1"),
        ("start_blocks", lambda x: isinstance(x, int) and x >= 1, "be at least 1"),
    ):
        if not right(value := getattr(env, name, None)):
            raise ValueError(f"{where}: {name} must {rule}, got {value!r}")
    if env.agents is not None:
        _check_agents(env.agents, env.spec, where)
    words = torch.zeros((4 * env.start_blocks, _N), dtype=torch.int64)
    state = env.start(words)
    _check(state, (env.state_size, _N), torch.float64, f"{where}.start", "the state")
    _check(env.observe(state), (_N, env.spec.obs_dim), None, f"{where}.observe", "the result")
    actions = torch.from_numpy(env.spec.random_actions(Rng(0), _N))
    before = state.clone()
    new, rewards, terminated = env.step(state, actions, *([words[:4]] if env.random_steps else []))
    if not torch.equal(state, before):
        raise ValueError(f"{where}.step: state must not be changed in place")
    _check(new, (env.state_size, _N), torch.float64, f"{where}.step", "the state")
    if not isinstance(rewards, (int, float)):
        _check(rewards, (_N,), None, f"{where}.step", "rewards")
    if not isinstance(terminated, bool):
        _check(terminated, (_N,), torch.bool, f"{where}.step", "terminated")
    copies = TensorVecEnv(_N, 0, env)
    copies.step_all(actions)
    copies.prepare(1)
    copies.step_all(actions)
    return env


def _check_agents(agents: TensorAgents, spec: EnvSpec, where: str) -> None:
    names, one = agents.names, agents.spec
    for name, value, right, rule in (
        ("names", names, isinstance(names, tuple) and names and len(set(names)) == len(names), "be different"),
        ("spec", one, len(one.obs_shape) == 1 and not one.masked, "be an EnvSpec of vectors without masks"),
        ("state_dim", agents.state_dim, isinstance(agents.state_dim, int) and agents.state_dim >= 0, "be at least 0"),
    ):
        if not right:
            raise ValueError(f"{where}: {name} of agents must {rule}, got {value!r}")
    if spec != agents.join():
        raise ValueError(f"{where}: spec must be agents.join(), {agents.join()}, got {spec}")


def _check(value: Any, shape: tuple[int, ...], dtype: torch.dtype | None, where: str, name: str) -> None:
    got = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
    kind = "floats" if dtype is None else str(dtype)
    right = isinstance(value, torch.Tensor) and value.shape == shape
    if not right or (not value.is_floating_point() if dtype is None else value.dtype != dtype):
        raise ValueError(f"{where}: {name} must be {kind} of shape {shape}, got {got}")
