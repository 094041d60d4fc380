"""What a tensor environment is: three pure functions of tensors, which `TensorVecEnv` runs for N copies at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from rlox.envs.spec import EnvSpec, native_spec
from rlox.kernels.envs.vec_env import VecEnv


@dataclass(frozen=True)
class TensorAgents:
    """The A agents of a tensor environment, with equal spaces, whose episodes and rewards are common.

    Attributes
    ----------
    names : tuple of str
        Their names.
    spec : EnvSpec
        Shapes, sizes and bounds of one agent.
    state_dim : int
        S, the numbers that a central critic reads; 0: it reads the observations of all agents.
    """

    names: tuple[str, ...]
    spec: EnvSpec
    state_dim: int = 0

    def join(self) -> EnvSpec:
        """Return the `EnvSpec` of all agents as one: the observations of all, then the S numbers; all actions."""
        n, one = len(self.names), self.spec
        shape = (n * one.obs_dim + self.state_dim,)
        if one.continuous:
            low, high = (np.tile(np.asarray(bound, np.float32), n) for bound in (one.act_low, one.act_high))
            return EnvSpec(shape, act_dim=len(low), act_low=low, act_high=high)
        return EnvSpec(shape, n_choices=one.choices * n)


class TensorEnv:
    """Base class of environments whose N copies are stepped by tensor operations.

    A subclass sets the attributes below and writes the three functions. They must be pure and free of anything that
    waits for the device or depends on a number there: no `item`, no `if` on a tensor, no boolean indexing, no tensor
    made from Python numbers (Python numbers in arithmetic are fine). A CUDA graph can then record them, and
    ``torch.compile`` can fuse them. The state consists of S float64 numbers, component after component.

    Attributes
    ----------
    env_id : str
        The id, a name and a version.
    spec : EnvSpec
        Shapes, sizes and bounds.
    state_size : int
        S.
    max_episode_steps : int, optional
        The time limit; None if there is none.
    start_blocks : int
        Blocks of four random words that the start of an episode takes.
    random_steps : bool
        Whether `step` takes random words too.
    agents : TensorAgents, optional
        Its agents, if it has several: `spec` is then their ``join()``, an observation has those of all agents one after
        the other, then the numbers of a central critic, and so have actions; the reward is that of each agent.
    """

    env_id: ClassVar[str]
    spec: EnvSpec
    state_size: int
    max_episode_steps: int | None = None
    start_blocks: ClassVar[int] = 1
    random_steps: ClassVar[bool] = False
    agents: TensorAgents | None = None

    def start(self, words: torch.Tensor) -> torch.Tensor:
        """Return the states (S, M) float64 in which M episodes start.

        `words` (4 * start_blocks, M) int64 are random numbers in [0, 2**32), independent of each other and the same
        whenever this episode of this copy starts; `rlox.envs.tensor.philox.open_unit` maps them to (0, 1).
        """
        raise NotImplementedError

    def step(
        self, state: torch.Tensor, actions: torch.Tensor, words: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | float, torch.Tensor | bool]:
        """Return the states (S, N), rewards (N,) and terminations (N,) bool after one step.

        `state` (S, N) must not be changed. Discrete `actions` are (N,) int64 within range, continuous ones (N, A)
        float32, not clipped, and NaN where the policy gave NaN. With `random_steps`, `words` (4, N) are as in `start`.
        A reward or termination that is the same for all copies and steps may be a Python number.
        """
        raise NotImplementedError

    def observe(self, state: torch.Tensor) -> torch.Tensor:
        """Return the observations (N, D) of any floating data type; they are stored as float32."""
        raise NotImplementedError


class NativeTwin(TensorEnv):
    """A tensor environment with the same trajectories as the native one of its id, whose sizes and limits it reads."""

    def __init__(self) -> None:
        kernel = VecEnv(1, 0, self.env_id)
        self.spec = native_spec(kernel)
        self.state_size = len(kernel.get_state()["state"])
        self.max_episode_steps = kernel.max_episode_steps
