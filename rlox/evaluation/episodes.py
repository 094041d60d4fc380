"""Evaluation: whole episodes in a separate environment, independent of training."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from rlox.checkpoint.streams import Stream
from rlox.config import MOST_AT_ONCE, integer, require
from rlox.envs import env_name, is_vectorised, make_vec_env
from rlox.envs.failures import NO_ANSWERS, UNANSWERED, explain_env_failure
from rlox.envs.gym_make import least_limit, limit_of_layers, make_fresh_gym_env
from rlox.envs.masks import MASK, WrongMask, find_masks, without_mask
from rlox.envs.rendering import draw_frame
from rlox.envs.spec import SpaceAdapter, check_actions
from rlox.envs.tensor import table
from rlox.kernels.rng import Rng
from rlox.kernels.stats import all_finite
from rlox.nn.acting import ActingPolicy, EpisodeActor, ModulePolicy, acting_policy

if TYPE_CHECKING:
    from torch import nn

    from rlox.collectors.exploration import ActionNoise

# Most native episodes that run in parallel. The number of rows affects the last bits of results, since matrix products
# of other shapes round differently.
_SIDE_BY_SIDE = 100

# An episode of an evaluation is cut after this many steps, or at the environment's own limit if that is higher. No
# Atari game is longer, even in frames.
MAX_STEPS = 108_000
# Without a limit of the environment's own, it is cut after this many times the length of the longest episode that
# training has seen, and after at least so many steps: policies that act deterministically may walk in circles for ever.
TIMES_LONGEST, LEAST_STEPS = 10, 1_000


@dataclass(frozen=True)
class Evaluation:
    """Undiscounted returns and lengths of whole episodes, in the order in which one environment would run them."""

    returns: np.ndarray  # (E,) f64
    lengths: np.ndarray  # (E,) int64
    seed: int
    deterministic: bool
    n_cut: int = 0  # episodes that were cut at the step limit

    def summary(self) -> dict[str, float | int]:
        """Return ``mean_return std_return min_return max_return mean_length n_episodes``; std has ddof 0."""
        return {
            "mean_return": float(self.returns.mean()),
            "std_return": float(self.returns.std()),
            "min_return": float(self.returns.min()),
            "max_return": float(self.returns.max()),
            "mean_length": float(self.lengths.mean()),
            "n_episodes": len(self.returns),
        }

    def _repr_html_(self) -> str:
        """Return a table of the summary and a curve of the sorted returns, for notebooks."""
        from rlox.evaluation.html import Line, draw_curves, write_table

        kind = "deterministic" if self.deterministic else "sampled"
        s = self.summary()
        rows: list[list[object]] = [
            ["return", s["mean_return"], s["std_return"], s["min_return"], s["max_return"]],
            ["length", *(float(of(self.lengths)) for of in (np.mean, np.std, np.min, np.max))],
        ]
        caption = f"{len(self.returns)} {kind} episodes, seed {self.seed}"
        caption += f"; {self.n_cut} cut at the step limit" if self.n_cut else ""
        table = write_table(["", "mean", "std", "min", "max"], rows, caption)
        share = (np.arange(len(self.returns)) + 1) / len(self.returns) * 100
        return table + draw_curves([Line("", share, np.sort(self.returns))], "% of the episodes", "return at most")


@dataclass
class Episodes:
    """Which episodes an evaluation runs, and where they are cut; see `evaluate`. Wrong values raise its errors."""

    env_id: Any
    n_episodes: int
    seed: int
    deterministic: bool
    frames: Callable[[np.ndarray], None] | None
    render: bool
    max_steps: int | None
    longest: int | None
    render_mode: str | None = field(init=False)  # of the environment; None if nothing is drawn

    def __post_init__(self) -> None:
        self.n_episodes = integer("evaluate", "n_episodes", self.n_episodes, 1, MOST_AT_ONCE)
        if self.max_steps is not None:
            self.max_steps = integer("evaluate", "max_steps", self.max_steps, 1)
        self.seed = integer("evaluate", "seed", self.seed, 0)
        require("evaluate", "deterministic", self.deterministic, bool)
        if self.render and self.frames is not None:
            raise ValueError(
                "evaluate: render must be False if frames are given, since an environment has one render mode"
            )
        self.render_mode = "human" if self.render else None if self.frames is None else "rgb_array"

    def show(self, env: Any) -> None:
        """Pass a picture of the environment on, if pictures are wanted."""
        if self.frames is not None:
            self.frames(draw_frame(env, f"evaluate: {env_name(self.env_id)}"))

    def step_limit(self, own: int | None) -> int:
        """Return the number of steps after which an episode is cut; `own` is the environment's limit, if it has one."""
        if self.max_steps is not None:
            return self.max_steps
        if own or self.longest is None:
            return max(MAX_STEPS, own or 0)
        return min(MAX_STEPS, max(LEAST_STEPS, TIMES_LONGEST * self.longest))

    def warn_of_cut(self, limit: int) -> None:
        """Warn that an episode was cut at `limit`."""
        warn_of_cut(self.env_id, limit, self.max_steps is None and self.longest is not None)

    def require_finite(self, returns: np.ndarray, lengths: np.ndarray) -> None:
        """Raise FloatingPointError unless the returns (E,) or (E, A) are finite; `lengths` (E,) are in the message."""
        if not all_finite(returns):
            bad = int(np.argwhere(~np.isfinite(returns))[0][0])
            raise FloatingPointError(
                f"evaluate: {env_name(self.env_id)}: rewards must be finite, got a return of {returns[bad]} in episode "
                f"{bad}, {lengths[bad]} steps long; fix the environment"
            )


def evaluate(
    policy: nn.Module | ActingPolicy,
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
    max_steps: int | None = None,
    noise: Callable[[int], ActionNoise | None] | None = None,
    longest: int | None = None,
) -> Evaluation:
    """Run `n_episodes` episodes of one new environment with the seed `seed`.

    The random streams of training are not used. PyTorch's own generators, from which custom policies draw, are seeded
    with `seed`, and their states are restored afterwards. Native episodes run in parallel, and each starts exactly as
    it would in one environment that runs all episodes in turn.

    Parameters
    ----------
    policy : Module or ActingPolicy
        Acts with ``mode``, or by sampling if not `deterministic`. A policy with a memory receives the state that it
        returned, and starts from its initial state in each episode.
    env_id : str, callable or gymnasium.Env
        An environment object stays unchanged: a new one is created from its spec.
    n_episodes, seed : int
        Number of episodes, and the seed of their starts.
    deterministic : bool
        Whether to use the policy's ``mode`` instead of samples.
    env_kwargs, wrappers
        Same as in `rlox.envs.make_vec_env`.
    device : str
        Device of the policy.
    transform : callable, optional
        Applied to (B, …) observations before the policy sees them, such as a frozen normalisation.
    frames : callable, optional
        Called with each image of the first episode, (H, W, 3) uint8. The environment is then gymnasium's, also for
        native ids.
    render : bool
        Show the episodes in a window, also with gymnasium's environment.
    max_steps : int, optional
        Steps after which an episode is cut, as if truncated, with a RuntimeWarning; None: 108,000, or the environment's
        own time limit if that is higher.
    noise : callable, optional
        Takes a number of environments and returns the noise to add to their sampled actions, or None.
    longest : int, optional
        Length of the longest episode in training. Without `max_steps`, and if the environment has no time limit of its
        own, an episode is cut after ten times as many steps, but not before 1,000.

    Raises
    ------
    TypeError
        If `n_episodes` or `seed` is not an integer, or if `deterministic` and the policy has no ``mode``.
    ValueError
        If `n_episodes` or `max_steps` < 1, the environment is unknown, or it cannot be rendered as requested.
    """
    episodes = Episodes(env_id, n_episodes, seed, deterministic, frames, render, max_steps, longest)
    actor = acting_policy(policy, device)
    if deterministic:
        actor.require_mode("evaluate")
    rng = Rng(episodes.seed, Stream.EVALUATION)
    begin = partial(EpisodeActor, actor, rng=rng, deterministic=deterministic, transform=transform, explore=noise)
    plain = not (env_kwargs or wrappers) and episodes.render_mode is None
    draws = isinstance(actor, ModulePolicy)  # it may, if it is custom or has layers of the user
    with _seeded_generators(episodes.seed, device) if draws else nullcontext():
        if isinstance(env_id, str) and env_id in table.VEC_ENVS and table.is_only_on_device(env_id):
            if not plain:
                raise ValueError(
                    f"evaluate: {env_id}, which only register_vec_env knows, has no pictures, env_kwargs or wrappers; "
                    "register it with gymnasium under the same id, too"
                )
            returns, lengths, n_cut = _play_vectorised(episodes, begin, device)
        elif is_vectorised(env_id) and plain:
            returns, lengths, n_cut = _play_vectorised(episodes, begin)
        else:
            returns, lengths, n_cut = _play_gym(episodes, begin, env_kwargs, wrappers)
    episodes.require_finite(returns, lengths)
    return Evaluation(returns, lengths, episodes.seed, deterministic, n_cut)


@contextmanager
def _seeded_generators(seed: int, device: str) -> Iterator[None]:
    """Seed PyTorch's own generators, from which custom modules draw, and restore their states afterwards."""
    import torch

    with torch.random.fork_rng(devices=[device] if device == "cuda" else []):
        torch.manual_seed(seed % 2**64)
        yield


def warn_of_cut(env_id: Any, limit: int, bounded: bool) -> None:
    """Warn that an episode did not end by itself; `bounded`: within a multiple of the longest one in training."""
    # That number changes in the course of a training, and an equal text is printed once.
    within = f"{TIMES_LONGEST} times the length of the longest one in training" if bounded else f"{limit:,} steps"
    warnings.warn(
        f"evaluate: an episode of {env_name(env_id)} did not end within {within} and was cut there; give it a "
        "time limit, such as env.wrappers=[{TimeLimit: {max_episode_steps: 1000}}], or choose where to cut it: "
        "eval.max_steps",
        RuntimeWarning,
        2,
    )


def _play_vectorised(
    episodes: Episodes, begin: Callable[[int], EpisodeActor], device: str | None = None
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return returns and lengths of the episodes, which run side by side, and the number of those cut.

    With a `device`, new copies of `rlox.envs.tensor.register_vec_env` play there, each one episode.
    """
    n_episodes = episodes.n_episodes
    returns, lengths, n_cut = np.empty(n_episodes), np.empty(n_episodes, np.int64), 0
    for first in range(0, n_episodes, _SIDE_BY_SIDE):
        n = min(_SIDE_BY_SIDE, n_episodes - first)
        env: Any
        if device is None:
            env = make_vec_env(episodes.env_id, n, episodes.seed)
            env.reset_all()
            # The rows become the episodes first, first + 1, … of the single environment with this seed.
            state = env.get_state()
            state["keys"][:] = state["keys"][0]
            state["episodes"][:] = np.arange(first, first + n)
            env.set_state(state)
        else:
            env = _make_on_device(episodes, first, n, device)
        spec = env.spec
        obs, mask = env.reset_all(), env.action_masks()
        running, agent = np.ones(n, bool), begin(n)
        limit, t = episodes.step_limit(env.max_episode_steps), 0
        while running.any():
            t += 1
            step = env.step_all(spec.clip(agent.act(obs, mask)))
            over = step["terminated"] | step["truncated"]
            agent.end(over)
            ended = running & over
            obs, mask = step["obs"], step.get(MASK)
            if t == limit and not ended[running].all():
                episodes.warn_of_cut(limit)
                n_cut += int((running & ~ended).sum())
                ended = running
            elif b"\1" not in ended.tobytes():  # fast check: in most steps no episode ends
                continue
            at = first + np.flatnonzero(ended)
            returns[at] = step["episode_return"][ended]
            lengths[at] = step["episode_length"][ended]
            running = running & ~ended
        if device is not None:
            env.close()
    return returns, lengths, n_cut


def _make_on_device(episodes: Episodes, first: int, n: int, device: str) -> Any:
    """Return new copies of `register_vec_env` with the arrays of other environments."""
    from rlox.envs.tensor.adapters import ArrayVecEnv

    return ArrayVecEnv(table.VEC_ENVS[episodes.env_id](n, (episodes.seed + first) % 2**64, device))


def _play_gym(
    episodes: Episodes, begin: Callable[[int], EpisodeActor], kwargs: dict[str, Any] | None, wrappers: Sequence[Any]
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the same as `_play_vectorised`; the episodes run one after another in one gymnasium environment."""
    env_id, n_episodes, render_mode = episodes.env_id, episodes.n_episodes, episodes.render_mode
    if render_mode is not None:
        kwargs = {**(kwargs or {}), "render_mode": render_mode}
    env = make_fresh_gym_env(env_id, kwargs, wrappers)
    returns, lengths, n_cut = np.zeros(n_episodes), np.zeros(n_episodes, np.int64), 0
    # The spec of an environment without an id is None, so the limit is that of its wrapper TimeLimit.
    limits = (getattr(env.spec, "max_episode_steps", None), limit_of_layers(env))
    limit = episodes.step_limit(least_limit(limits))
    hook, answer, action = "reset", UNANSWERED, None
    try:
        if env.render_mode != render_mode and render_mode is not None:
            modes = env.metadata.get("render_modes") or ["none"]
            raise ValueError(
                f"evaluate: {env_name(env_id)} must support the render mode {render_mode}, it has {', '.join(modes)}"
            )
        seen = without_mask(env.observation_space, env.action_space, f"evaluate: {env_name(env_id)}")
        adapter = SpaceAdapter(seen, env.action_space, "evaluate")
        spec, agent = adapter.spec, begin(1)
        for i in range(n_episodes):
            hook, answer = "reset", UNANSWERED
            answer = env.reset(seed=episodes.seed % 2**31 if i == 0 else None)
            raw, info = answer
            if i == 0:
                episodes.show(env)
                masks = find_masks(env, spec.choices, info)
            over = False
            while not over:
                # A copy, which the policy may keep: an environment may reuse its array.
                obs: np.ndarray = np.array(adapter.row(raw), spec.obs_dtype, order="C")[None]
                if not all_finite(obs):
                    at = spec.part(int(np.argmin(np.isfinite(obs).ravel())))
                    raise FloatingPointError(
                        f"evaluate: {env_name(env_id)}: observations must be finite, got "
                        f"{obs[~np.isfinite(obs)][0]} in {at} after {lengths[i]} steps of episode {i}; fix the "
                        "environment, or replace such values in a wrapper"
                    )
                mask = None if masks is None else masks.read(raw, info)[None]
                actions = check_actions(spec, spec.clip(agent.act(obs, mask)), 1, "evaluate")
                hook, answer, action = "step", UNANSWERED, adapter.to_env(actions[0])
                answer = env.step(action)
                raw, reward, terminated, truncated, info = answer
                if not NO_ANSWERS.isdisjoint(map(type, answer[1:4])):
                    raise TypeError("step must return a number and two flags")
                if i == 0:
                    episodes.show(env)
                returns[i] += float(reward)
                lengths[i] += 1
                over = terminated or truncated
                if not over and lengths[i] == limit:
                    episodes.warn_of_cut(limit)
                    n_cut += 1
                    break
            agent.end(np.ones(1, bool))
    except WrongMask as e:
        when = f"after {lengths[i]} steps of episode {i}"
        raise ValueError(f"evaluate: {env_name(env_id)}: {e} ({when})") from None
    except BaseException as e:
        # Exceptions of the policy or of rendering pass unchanged, since the environment's last answer is then correct.
        explain_env_failure(
            e, env, hook, answer, "evaluate", f"evaluation on {env_name(env_id)}: {hook}", action=action
        )
        raise
    finally:
        env.close()
    return returns, lengths, n_cut
