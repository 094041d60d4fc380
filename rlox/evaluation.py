"""Evaluation: whole episodes on an environment of its own, apart from training."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlox.envs import env_name, is_native, make_vec_env, spec_of
from rlox.gym_vec_env import SpaceAdapter, checked_actions, make_fresh_gym_env
from rlox.kernels.rng import Rng
from rlox.native import NativeActor
from rlox.streams import Stream

if TYPE_CHECKING:
    from torch import nn

# Native episodes run side by side, at most this many. The row count is part of the result's last bits: matrix products
# of another shape round differently.
_SIDE_BY_SIDE = 100


@dataclass(frozen=True)
class Evaluation:
    """Undiscounted returns and lengths of whole episodes, in the order in which one environment would play them."""

    returns: np.ndarray  # (E,) f64
    lengths: np.ndarray  # (E,) int64
    seed: int
    deterministic: bool

    def summary(self) -> dict[str, float | int]:
        """``mean_return std_return min_return max_return mean_length n_episodes``; std is over episodes (ddof 0)."""
        return {
            "mean_return": float(self.returns.mean()),
            "std_return": float(self.returns.std()),
            "min_return": float(self.returns.min()),
            "max_return": float(self.returns.max()),
            "mean_length": float(self.lengths.mean()),
            "n_episodes": len(self.returns),
        }


@contextmanager
def torch_threads(n: int) -> Iterator[None]:
    """Run with `n` PyTorch CPU threads (0: as they are) and restore the user's number afterwards.

    One is the default for training: a network this small gains nothing from a second thread and loses severalfold as
    soon as the other core is busy.
    """
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch is not None else n
    if n in (0, before):
        yield
        return
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def unchecked_distributions() -> Iterator[None]:
    """Run without the argument checks of `torch.distributions`, and restore the user's choice afterwards.

    A policy of one's own makes a distribution at every step, and the checks take a third of its time. What they would
    find, NaN, the training loop finds in the losses.
    """
    distributions = sys.modules.get("torch.distributions")
    if distributions is None:
        yield
        return
    kind = distributions.Distribution
    before = kind._validate_args
    kind.set_default_validate_args(False)
    try:
        yield
    finally:
        kind.set_default_validate_args(before)


def evaluate(
    policy: nn.Module | NativeActor,
    env_id: str | Callable[[], Any],
    n_episodes: int = 20,
    seed: int = 10_000,
    deterministic: bool = True,
    env_kwargs: dict[str, Any] | None = None,
    device: str = "cpu",
    wrappers: Sequence[Any] = (),
    transform: Callable[[np.ndarray], np.ndarray] | None = None,
    frames: Callable[[np.ndarray], None] | None = None,
    render: bool = False,
) -> Evaluation:
    """Play `n_episodes` episodes of one fresh environment seeded `seed`.

    Nothing that training draws from is touched. Native episodes are played side by side: each starts exactly where one
    environment, played through, would start it.

    Parameters
    ----------
    policy : Module or NativeActor
        Acts by ``mode``, or by sampling if not `deterministic`.
    env_id : str, callable or gymnasium.Env
        An environment object is left as it is: another is made from its spec.
    n_episodes, seed : int
        How many episodes, and what decides their starts.
    deterministic : bool
        Whether the policy's ``mode`` acts, or a sample.
    env_kwargs, wrappers
        As `rlox.envs.make_vec_env` takes them.
    device : str
        Where the policy lives.
    transform : callable, optional
        What (B, …) observations go through before the policy sees them, such as a frozen normalisation.
    frames : callable, optional
        Given each picture of the first episode, (H, W, 3) uint8. The environment is gymnasium's then, for native ids
        too.
    render : bool
        Show the episodes in a window, likewise in gymnasium's environment.

    Raises
    ------
    TypeError
        If `deterministic` and the policy has no ``mode``.
    ValueError
        If `n_episodes` < 1, the environment is unknown, or it cannot be rendered as asked for.
    """
    if n_episodes < 1:
        raise ValueError(f"evaluate: n_episodes must be >= 1, got {n_episodes}")
    if render and frames is not None:
        raise ValueError("evaluate: render must be False where frames are given, an environment has one render mode")
    actor = policy
    if not isinstance(policy, NativeActor):
        from rlox.acting import ModuleActor, require_mode

        actor = ModuleActor(policy, device)
        if deterministic:
            require_mode(policy, "evaluate")
    rng = Rng(seed, Stream.EVALUATION)

    def act(obs: np.ndarray) -> np.ndarray:
        seen = obs if transform is None else np.ascontiguousarray(transform(obs), np.float32)
        return actor.mode(seen) if deterministic else actor.sample(seen, rng)

    native = is_native(env_id)
    if native and not (env_kwargs or wrappers or render or frames is not None):
        returns, lengths = _play_native(act, env_id, n_episodes, seed)
    else:
        mode_name = "human" if render else None if frames is None else "rgb_array"
        returns, lengths = _play_gym(act, env_id, n_episodes, seed, env_kwargs, wrappers, mode_name, frames)
    return Evaluation(returns, lengths, seed, deterministic)


def _play_native(act, env_id, n_episodes, seed) -> tuple[np.ndarray, np.ndarray]:
    returns, lengths = np.empty(n_episodes), np.empty(n_episodes, np.int64)
    for first in range(0, n_episodes, _SIDE_BY_SIDE):
        n = min(_SIDE_BY_SIDE, n_episodes - first)
        env = make_vec_env(env_id, n, seed)
        spec = spec_of(env)
        obs = env.reset_all()
        # All rows become episodes first, first + 1, … of the environment that `seed` alone makes.
        state = env.get_state()
        state["keys"][:] = state["keys"][0]
        state["episodes"][:] = np.arange(first, first + n)
        env.set_state(state)
        obs = env.reset_all()
        running = np.ones(n, bool)
        while running.any():
            actions = act(obs)
            step = env.step_all(spec.clip(actions))
            ended = running & (step["terminated"] | step["truncated"])
            at = first + np.flatnonzero(ended)
            returns[at] = step["episode_return"][ended]
            lengths[at] = step["episode_length"][ended]
            running &= ~ended
            obs = step["obs"]
    return returns, lengths


def _play_gym(act, env_id, n_episodes, seed, kwargs, wrappers, render_mode, frames) -> tuple[np.ndarray, np.ndarray]:
    if render_mode is not None:
        kwargs = {**(kwargs or {}), "render_mode": render_mode}
    env = make_fresh_gym_env(env_id, kwargs, wrappers)
    returns, lengths = np.zeros(n_episodes), np.zeros(n_episodes, np.int64)
    try:
        if env.render_mode != render_mode and render_mode is not None:
            modes = env.metadata.get("render_modes") or ["none"]
            raise ValueError(
                f"evaluate: {env_name(env_id)} must offer the render mode {render_mode}, it has {', '.join(modes)}"
            )
        adapter = SpaceAdapter(env.observation_space, env.action_space, "evaluate")
        spec = adapter.spec

        def show(episode: int) -> None:
            if frames is not None and episode == 0:
                frames(np.asarray(env.render()))

        for i in range(n_episodes):
            raw, _ = env.reset(seed=seed % 2**31 if i == 0 else None)
            show(i)
            over = False
            while not over:
                # A copy, whose rows the policy may keep; an environment may use its array again.
                obs = np.array(adapter.observe(raw), spec.obs_dtype, order="C")[None]
                actions = checked_actions(spec, spec.clip(act(obs)), 1, "evaluate")
                raw, reward, terminated, truncated, _ = env.step(adapter.to_env(actions[0]))
                show(i)
                returns[i] += float(reward)
                lengths[i] += 1
                over = terminated or truncated
    finally:
        env.close()
    return returns, lengths
