"""Collection of rollouts in environments that live on a device: policy, environments and advantages never leave it."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import nn

from rlox.checkpoint.streams import Stream
from rlox.collectors.base import Collector
from rlox.collectors.rewards import RewardFn, reward_name, sign
from rlox.collectors.rollout import Rollout
from rlox.collectors.tensor_normalize import TensorNormalize
from rlox.envs.registry import env_name
from rlox.envs.tensor.table import TENSOR_AGENT_ENVS, tensor_agent_ids, tensor_env_ids
from rlox.envs.tensor.vec_env import TensorVecEnv
from rlox.nn.compiling import Compiled
from rlox.nn.graphs import Graphed
from rlox.nn.modes import evaluating
from rlox.nn.policies import Actor, check_policy, policy_outputs
from rlox.nn.random import DeviceRng

_ROWS = 1 << 18  # rows whose values are computed at once, which bounds memory
# Episodes that are transferred with the first copy of a rollout, as a share of its steps: random CartPole agents need
# a twentieth.
_EPISODES_PER_STEP = 1 / 16


def compute_advantages_(
    out: torch.Tensor,
    rewards: torch.Tensor,
    values: torch.Tensor,
    next_values: torch.Tensor,
    terminated: torch.Tensor,
    ended: torch.Tensor,
    gamma: float,
    gae_lambda: float,
) -> torch.Tensor:
    """Write generalised advantages (Schulman et al. 2016, arXiv:1506.02438, eq. 16) to `out`, and return it.

    All tensors are (T, N). `values` are those of the observations before the steps, and `next_values` of those that the
    steps led to, also where an episode `ended` there. Only a `terminated` one has no value after it.
    """
    torch.addcmul(rewards - values, next_values, (~terminated).to(values.dtype), value=gamma, out=out)
    decay = (~ended).to(values.dtype) * (gamma * gae_lambda)
    for t in reversed(range(len(out) - 1)):
        out[t].addcmul_(decay[t], out[t + 1])
    return out


def _act(policy: Any, obs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    return policy.act(obs, noise)


def _get_value(policy: Any, obs: torch.Tensor) -> torch.Tensor:
    return policy.get_value(obs)


class StepTensors:
    """The tensors of T steps in N environments, which every rollout overwrites."""

    def __init__(self, env: TensorVecEnv, n_steps: int):
        spec, n, device = env.spec, env.n_envs, env.device

        def empty(*shape: int, dtype: torch.dtype = torch.float32, rows: int = n_steps) -> torch.Tensor:
            return torch.empty((rows, n, *shape), dtype=dtype, device=device)

        self.obs = empty(*spec.obs_shape, rows=n_steps + 1)  # the last row are those that the next rollout starts from
        self.last = self.obs[-1]
        self.actions = empty(*spec.action_shape, dtype=torch.int64 if spec.act_dim is None else torch.float32)
        self.final_obs = empty(*spec.obs_shape)
        self.rewards = empty()
        self.terminated, self.truncated = empty(dtype=torch.bool), empty(dtype=torch.bool)
        self.ended = empty(dtype=torch.bool)
        self.episode_return, self.episode_length = empty(dtype=torch.float64), empty(dtype=torch.int64)
        # Row t of what a step of the environments fills.
        names = ("rewards", "terminated", "truncated", "final_obs", "episode_return", "episode_length")
        self.rows = [
            {"obs": self.obs[t + 1], **{name: getattr(self, name)[t] for name in names}} for t in range(n_steps)
        ]
        # Numbers of episodes, and of numbers that are not finite; then returns and lengths of the first episodes. The
        # last place of both takes what is none.
        self.n_kept = max(64, int(n_steps * n * _EPISODES_PER_STEP))
        self.summary = torch.zeros(2 + 2 * (self.n_kept + 1), dtype=torch.float64, device=device)


class Seat:
    """A policy in environments on a device: what it sees and does in T steps, as tensors that stay where they are.

    It acts for A agents of each of N environments and has M = N * A rows in each step; here for the only one, which
    sees everything, so that its columns are those of the environments.

    Parameters
    ----------
    policy : nn.Module
        Acts.
    memory : StepTensors
        What happens in the environments.
    norm : object, optional
        Its ``denormalize`` converts the critic's values to units of rewards; None: they have these units.
    n_agents : int
        A.
    """

    def __init__(self, policy: Any, memory: StepTensors, norm: Any = None, n_agents: int = 1):
        self.policy, self.norm, self._memory = policy, norm, memory
        self.custom = not isinstance(policy, Actor)
        rows = (len(memory.rows), memory.rewards.shape[1] * n_agents)

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty((*rows, *shape), dtype=torch.float32, device=memory.obs.device)

        self.noise = empty(*(() if self.custom else policy.noise_shape(rows[1])[1:]))
        self.log_probs, self.values, self.next_values = empty(), empty(), empty()
        self.advantages, self.returns = empty(), empty()
        self.obs, self.actions, self.rewards = memory.obs[:-1], memory.actions, memory.rewards
        self.terminated, self.ended = memory.terminated, memory.ended
        self.states: torch.Tensor | None = None  # (T, M, S), the critic's input; None: `obs`

    def see(self, obs: torch.Tensor) -> torch.Tensor:
        """Return what the policy sees of observations (…, N, D) of the environments."""
        return obs

    def judge(self, obs: torch.Tensor) -> torch.Tensor:
        """Return what its critic sees of them."""
        return obs

    def write_actions(self, t: int, actions: torch.Tensor) -> None:
        """Keep the actions of step `t`, and give them to the environments."""
        self.actions[t].copy_(actions)

    def write_columns(self) -> None:
        """Fill the columns that are not those of the environments, after T steps."""

    def act(self, t: int, act: Any) -> None:
        """Choose the actions of step `t`, from the observations that it starts from."""
        seen = self.see(self._memory.obs[t])
        if self.custom:
            actions, log_probs = self.policy.get_action_and_logprob(seen)
            self.log_probs[t].copy_(log_probs)
        else:
            actions = act(self.policy, seen, self.noise[t])
        self.write_actions(t, actions)

    def estimate(self, outputs: Any, get_value: Any, gamma: float, gae_lambda: float) -> None:
        """Fill log-probabilities, values of what was seen before and after each step, advantages and returns."""
        final = self.judge(self._memory.final_obs)
        tensors = (self.obs, final, self.actions, self.log_probs, self.values, self.next_values)
        parts = [x.flatten(0, 1).split(_ROWS) for x in tensors]
        states = repeat(None) if self.states is None else self.states.flatten(0, 1).split(_ROWS)
        for (obs, after, actions, log_probs, values, next_values), state in zip(zip(*parts, strict=True), states):  # noqa: B905
            if self.custom:
                values.copy_(get_value(self.policy, obs).reshape(-1))
            else:
                new_log_probs, _, new_values = outputs(self.policy, obs, actions, state)
                log_probs.copy_(new_log_probs)
                values.copy_(new_values)
            next_values.copy_(get_value(self.policy, after).reshape(-1))
        ours, theirs = self.values, self.next_values
        if self.norm is not None:
            ours, theirs = self.norm.denormalize(ours), self.norm.denormalize(theirs)
        ends = (self.terminated, self.ended)
        compute_advantages_(self.advantages, self.rewards, ours, theirs, *ends, gamma, gae_lambda)
        torch.add(self.advantages, ours, out=self.returns)

    def make_rollout(self, **more: Any) -> Rollout:
        """Return the columns of the last T steps, with `more` of its attributes."""
        columns = ("actions", "log_probs", "values", "advantages", "returns", "rewards")
        return Rollout(
            obs=self.obs.flatten(0, 1),
            **{name: getattr(self, name).flatten(0, 1) for name in columns},
            states=None if self.states is None else self.states.flatten(0, 1),
            dones=self.ended.flatten(),
            reused=True,
            **more,
        )


def find_resident_obstacle(algorithm: Any, reward_fn: RewardFn | None) -> str | None:
    """Return why the environments of `algorithm` cannot live on a device; None if they can."""
    options, env = algorithm.env_options, algorithm.env_id
    several = getattr(algorithm, "several", False)
    known = tensor_agent_ids() if several else tensor_env_ids()
    if not isinstance(env, str) or env not in known:
        which = " with several agents" if several else ""
        return f"{env_name(env)} has no tensor version{which}; those that have one are {', '.join(known)}"
    arguments = options.kwargs and env not in TENSOR_AGENT_ENVS
    if arguments or options.wrappers or options.workers or (options.remote is not None and options.remote.addresses):
        return "environments on a device have no env_kwargs, wrappers, workers or remote addresses"
    if reward_fn not in (None, "sign") and reward_fn is not sign:
        name = reward_fn if isinstance(reward_fn, str) else reward_name(reward_fn)
        return f"environments on a device cannot call the Python function {name}, only reward_fn='sign'"
    if algorithm.config.recurrent:
        return "the state of a memory is on the host"
    if getattr(algorithm.config, "self_play", False):
        return "earlier policies of self_play are on the host"
    if algorithm.ranks.joined:
        return "the ranks of distributed=ddp collect on the host"
    return None


class TensorRolloutCollector(Collector):
    """Collector that steps N environments on a device, and returns rollouts whose columns are tensors there.

    On a GPU all steps, values and advantages of a rollout are replayed as one CUDA graph; only the statistics of ended
    episodes are copied to the host. The columns of a rollout are overwritten by the next one.

    Parameters
    ----------
    env : TensorVecEnv
        The N environments.
    seed : int
        Seed of the actions. They are drawn as `rlox.RolloutCollector` draws them.
    gamma, gae_lambda : float
        Discount and trace decay of the advantages.
    reward_fn : str, optional
        ``"sign"`` takes the signs of rewards for learning; None the rewards themselves.
    compiled : bool
        Whether ``torch.compile`` fuses the operations of the policy.

    Raises
    ------
    ValueError
        For another `reward_fn`, which could not run on the device.
    """

    _where = "TensorRolloutCollector.collect"
    noise_axis = 1  # the noise of a whole rollout is drawn at once
    normalizer: TensorNormalize | None = None
    value_norm: Any = None  # whose ``denormalize`` converts the critic's values to units of rewards

    def __init__(
        self,
        env: TensorVecEnv,
        seed: int = 0,
        gamma: float = 0.99,
        gae_lambda: float = 0.95,
        reward_fn: RewardFn | None = None,
        compiled: bool = False,
    ):
        if reward_fn is not None and reward_fn != "sign" and reward_fn is not sign:
            name = reward_fn if isinstance(reward_fn, str) else reward_name(reward_fn)
            raise ValueError(
                f"TensorRolloutCollector: reward_fn must be 'sign' or None, got {name}: environments on a device "
                "call no Python functions; use env_backend=gymnasium, or define the reward in the environment"
            )
        super().__init__(env, env.n_envs, seed, reward_fn, None, env.device, (), 0, "tensor")  # type: ignore[arg-type]
        self.rng: Any = DeviceRng(seed, Stream.ACTION, env.device)
        self.gamma = gamma
        self.gae_lambda = gae_lambda
        self._compiled = compiled
        bounds = (self.spec.act_low, self.spec.act_high) if self.spec.act_dim is not None else ()
        self._bounds = [torch.as_tensor(np.asarray(bound, np.float32), device=env.device) for bound in bounds]
        self._policies: list[Any] = []
        self._memory: StepTensors | None = None
        self._seats: list[Any] = []
        self._graphed: Any = None

    def collect(self, policy: nn.Module, n_steps: int) -> Rollout:
        """Take `n_steps` steps in every environment; see `rlox.RolloutCollector.collect`.

        Raises
        ------
        TypeError
            If the policy lacks one of the three methods (see `rlox.nn.policies`).
        FloatingPointError
            If observations or rewards are not finite.
        """
        returns, lengths = self._take_steps([policy], n_steps)
        return self._seats[0].make_rollout(episode_returns=returns, episode_lengths=lengths, n_envs=self.n_envs)

    def _take_steps(self, policies: list[Any], n_steps: int) -> tuple[np.ndarray, np.ndarray]:
        """Take `n_steps` steps. Returns the returns (E,) f64 and lengths (E,) int64 of the episodes that ended."""
        same = len(policies) == len(self._policies) and all(a is b for a, b in zip(policies, self._policies))  # noqa: B905
        if self._memory is None or not same or len(self._memory.rows) != n_steps:
            self._prepare(policies, n_steps)
            if self._raw is not None:  # it may be normalised
                self._raw = self.env.observe()
        memory: Any = self._memory
        if self._raw is None:
            self._raw = self.env.reset_all()
            if self.normalizer is not None:
                self.normalizer.start(self._raw)
        if self._raw is not memory.last:
            memory.last.copy_(self._raw if self.normalizer is None else self.normalizer.normalize_tensor(self._raw))
            self._raw = memory.last
        with torch.no_grad(), ExitStack() as modes:
            for policy in policies:
                modes.enter_context(evaluating(policy))
            try:
                self._graphed()
            except BaseException:
                self._raw = None  # the environments are somewhere in this rollout: new episodes start
                raise
        episodes = self._read_episodes(memory)
        self.env_steps += n_steps * self.n_envs
        return episodes

    def _prepare(self, policies: list[Any], n_steps: int) -> None:
        """Allocate the memory of rollouts, and choose how they run."""
        if n_steps < 1:
            raise ValueError(f"{self._where}: n_steps must be >= 1, got {n_steps}")
        for policy in policies:
            check_policy(policy, self._where)
        self._policies, self._memory = policies, StepTensors(self.env, n_steps)
        self._seats = self._make_seats(policies, self._memory)
        functions: Any = (_act, policy_outputs, _get_value)
        if self._compiled:
            functions = [Compiled(one, "the policy") for one in functions]
        self._act, self._outputs, self._values = functions
        # The Python code of other classes and packages must run in each step.
        ours = all(type(policy).__module__.startswith("rlox.") for policy in policies) and self.env.capturable
        self._graphed = Graphed(self._collect, self.device, self._where) if ours else self._collect

    def _make_seats(self, policies: list[Any], memory: StepTensors) -> list[Any]:
        """Return what each policy sees and does in the environments."""
        return [Seat(policies[0], memory, self.value_norm)]

    def _collect(self) -> None:
        """Fill the memory with the next rollout. On a GPU this runs a few times and is then replayed."""
        m: Any = self._memory
        m.obs[0].copy_(m.last)
        for seat in self._seats:
            if not seat.custom:
                seat.policy.fill_noise(self.rng, seat.noise)
        self.env.prepare(len(m.rows))
        for t, row in enumerate(m.rows):
            for seat in self._seats:
                seat.act(t, self._act)
            actions = m.actions[t]
            self.env.step_all(actions.clamp(*self._bounds) if self._bounds else actions, row)
            if self.reward_fn is sign:
                row["rewards"].sign_()
            if self.normalizer is not None:
                self.normalizer.normalize_step_(row)
        torch.logical_or(m.terminated, m.truncated, out=m.ended)
        for seat in self._seats:
            seat.write_columns()
            seat.estimate(self._outputs, self._values, self.gamma, self.gae_lambda)
        self._summarise(m)

    def _summarise(self, m: StepTensors) -> None:
        """Write what the host reads to one tensor: counts, and the episodes that ended, in the order of their ends."""
        ended = m.ended.flatten()
        place = ended.cumsum(0)
        finite = m.obs.isfinite().all() & m.rewards.isfinite().all()
        m.summary[0].copy_(place[-1])
        m.summary[1].copy_(~finite)
        place = (place - 1).masked_fill_(~ended, m.n_kept).clamp_(max=m.n_kept)
        returns, lengths = m.summary[2:].view(2, -1)
        returns.scatter_(0, place, m.episode_return.flatten())
        lengths.scatter_(0, place, m.episode_length.flatten().double())

    def _read_episodes(self, m: StepTensors) -> tuple[np.ndarray, np.ndarray]:
        """Return the returns (E,) f64 and lengths (E,) int64 of the episodes that ended; this waits for the device."""
        summary = m.summary.cpu().numpy()
        if summary[1]:
            self._refuse_rollout(m)
        n = int(summary[0])
        if n > m.n_kept:
            return m.episode_return[m.ended].cpu().numpy(), m.episode_length[m.ended].cpu().numpy()
        returns, lengths = summary[2:].reshape(2, -1)[:, :n]
        return returns.copy(), lengths.astype(np.int64)

    def _refuse_rollout(self, m: StepTensors) -> None:
        """Raise for the first step whose observations or rewards are not finite."""
        obs, rewards = m.obs.cpu().numpy(), m.rewards.cpu().numpy()
        for t in range(len(rewards)):
            step = self.env_steps + (t + 1) * self.n_envs
            for what, numbers in (("observations", obs[t + 1]), ("rewards", rewards[t])):
                if not np.isfinite(numbers).all():
                    self._refuse_policy(FloatingPointError(), m.actions[: t + 1].cpu().numpy())
                    self._refuse_numbers(what, numbers, step)

    def state(self) -> dict[str, np.ndarray] | None:
        return None if self._raw is None else self.env.get_state()

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        self.env.set_state(state)
        self._raw = self.env.observe()
        self._lost = None
