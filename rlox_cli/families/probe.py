"""Probe an environment: check it against its interface, and take a few random steps."""

from __future__ import annotations

import copy
import re
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import numpy as np

from rlox.config import RunConfig
from rlox.envs import EnvSpec, is_native, make_vec_env
from rlox.envs.failures import wrong_answer
from rlox.envs.masks import MASK, MaskReader, WrongMask, find_masks
from rlox.multi_agent import make_multi_agent_env
from rlox.processes.failures import no_exit, note_cause
from rlox_cli.terminal.errors import UsageError

# Limits of the probe in CPU seconds and steps.
_SECONDS, _STEPS = 0.2, 1000
_PAIR_STEPS = 200  # how many of them are taken twice to check that the same seed gives the same results
# Larger values get a warning: a learner works best with numbers around 1.
_LARGE_OBS, _LARGE_REWARD = 1e3, 1e3
# Warnings of gymnasium that are common, or reported in other words already.
_USUAL = ("This is probably too", "we recommend", "is not within the observation space")


@dataclass
class Seen:
    """What an environment did under random actions."""

    limit: int | None  # steps after which it ends an episode, if known
    lengths: list[int]  # of the episodes that ended
    reward: float  # mean per step
    constant: bool  # whether all rewards were the same
    warnings: list[str]

    @property
    def length(self) -> float:
        """About how many steps an episode has under random actions."""
        if self.lengths:
            return statistics.fmean(self.lengths)
        return float(self.limit or _STEPS)


def probe_env(family: Any, algorithm: Any, config: RunConfig) -> Seen:
    """Step one environment, and for a while a second one with the same seed and actions.

    Raises
    ------
    UsageError
        If no training could use the environment: an invalid step, numbers that are not finite, an exception.
    """
    where, limit, native = f"env={config.env.id}", family.time_limit(algorithm), _plays_native(algorithm)
    if config.env.backend == "envpool" or (algorithm.env_options.device is not None and not is_native(config.env.id)):
        return Seen(limit, [], 0.0, False, [])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lines = [] if native else [*_contract(config, where)]
        results = _play_episodes(config, where)
    messages = dict.fromkeys(_plain(str(warning.message)) for warning in caught)
    lines += [f"{where}: {text}" for text in messages if not native and not any(usual in text for usual in _USUAL)]
    if results.differs:
        lines = [line for line in lines if "determinis" not in line]  # reported below, with the remedy
    lines += _behaviour_warnings(family, results, algorithm.spec, config, where, limit)
    rewards = results.rewards
    return Seen(limit, results.lengths, statistics.fmean(rewards), len(set(rewards)) == 1, lines)


def _plain(text: str) -> str:
    """Return a warning of gymnasium's on one line, without colours and heading."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text).replace("WARN: ", "")
    return " ".join(text.split()).rstrip(".")


def _contract(config: RunConfig, where: str) -> Iterator[str]:
    """Yield the problems that gymnasium's checker finds. Raise a UsageError for invalid results of reset and step."""
    from gymnasium.utils.env_checker import check_env

    from rlox.envs.gym_make import make_gym_env

    env = make_gym_env(config.env.id, config.env.kwargs, config.env.wrappers)
    try:
        bare = env.unwrapped
        # Checked first: wrappers and checkers fail on these with less helpful messages.
        answer = _call_env(where, "reset", bare.reset, seed=config.eval_seed % 2**31)
        _require_valid(where, bare, "reset", answer)
        if (masks := find_masks(bare, _choices(bare.action_space), answer[1])) is not None:
            _require_mask(where, masks, *answer)
            _allow_only_legal(bare, masks, answer)
        bare.action_space.seed(config.seed % 2**31)
        answer = _call_env(where, "step", bare.step, bare.action_space.sample())
        _require_valid(where, bare, "step", answer)
        _require_reward(where, answer[1])
        try:
            check_env(bare, skip_render_check=True, skip_close_check=True)
        except Exception as e:
            yield f"{where}: gymnasium's checker says: {_plain(str(e)) or type(e).__name__}"
    finally:
        env.close()


def _choices(space: Any) -> tuple[int, ...]:
    """Return how many choices each component of an action has; empty if they cannot be masked."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return (int(space.n),)
    return tuple(map(int, space.nvec)) if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1 else ()


def _require_mask(where: str, masks: MaskReader, obs: Any, info: Any) -> None:
    try:
        masks.read(obs, info)
    except WrongMask as e:
        raise UsageError(f"{where}: {e}") from e


def _allow_only_legal(env: Any, masks: MaskReader, answer: tuple[Any, Any]) -> None:
    """Let `env`, whose reset has just returned `answer`, replace each action, which gymnasium's checker draws without
    its mask, by a legal one. It is the same for equal masks, since the checker repeats steps."""
    reset, step, (obs, info) = env.reset, env.step, answer

    @wraps(reset)  # the checker reads its signature
    def remembered_reset(*args: Any, **kwargs: Any) -> Any:
        nonlocal obs, info
        answer = obs, info = reset(*args, **kwargs)
        return answer

    @wraps(step)
    def legal_step(action: Any) -> Any:
        nonlocal obs, info
        space, flags = copy.deepcopy(env.action_space), masks.read(obs, info).astype(np.int8)
        space.seed(0)
        parts = np.split(flags, np.cumsum(_choices(space))[:-1])
        answer = step(space.sample(parts[0] if space.shape == () else tuple(parts)))
        if isinstance(answer, tuple) and len(answer) == 5:
            obs, *_, info = answer
        return answer

    env.reset, env.step = remembered_reset, legal_step


def _call_env(where: str, what: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        with no_exit(f"{where}: the environment"):
            return call(*args, **kwargs)
    except Exception as e:  # the user's own code
        note_cause(e, f"{where}: {what}")
        raise UsageError(f"{where}: {what} failed with {type(e).__name__}: {_plain(str(e))}") from e


def _require_valid(where: str, env: Any, hook: str, answer: Any) -> None:
    if (wrong := wrong_answer(env, hook, answer)) is not None:
        raise UsageError(f"{where}: {wrong}")


def _require_reward(where: str, reward: Any) -> None:
    if not np.isfinite(number := float(reward)):
        raise UsageError(f"{where}: rewards must be finite, got {number}; fix the environment, or set env.reward_fn")


@dataclass
class _Results:
    """Results of random actions."""

    rewards: list[float]
    lengths: list[int]  # of the episodes that ended
    truncated: int  # how many of them a time limit ended
    largest: float  # absolute value in an observation
    differs: str  # what differed with the same seed and actions; empty if nothing did


def _play_episodes(config: RunConfig, where: str) -> _Results:
    """Take random actions in one environment, and for a while in a second one with the same seed."""
    c = config.env
    # Tensor environments have the trajectories of the native ones.
    backend = "auto" if c.backend == "tensor" else c.backend
    first, second = (make_vec_env(c.id, 1, config.seed, c.kwargs, c.wrappers, 0, backend) for _ in range(2))
    spec, rng = first.spec, np.random.default_rng(config.seed)
    results, started = _Results([], [], 0, 0.0, ""), time.process_time()
    try:
        obs, other = (_call_env(where, "reset", env.reset_all) for env in (first, second))
        if not same(obs, other):
            results.differs = "observations"
        while len(results.rewards) < _STEPS and (time.process_time() - started < _SECONDS or len(results.rewards) < 20):
            actions = random_actions(spec, rng, 1, mask=first.action_masks())
            out = _call_env(where, "step", first.step_all, actions)
            if not results.differs and len(results.rewards) < _PAIR_STEPS:
                twin = _call_env(where, "step", second.step_all, actions)
                compared = [("observations", "final_obs"), ("rewards", "rewards")]
                compared += [("masks", MASK)] * spec.masked
                results.differs = next((what for what, key in compared if not same(out[key], twin[key])), "")
            _require_finite(where, out["final_obs"], len(results.rewards) + 1)
            _require_reward(where, out["rewards"][0])
            results.rewards.append(float(out["rewards"][0]))
            results.largest = max(results.largest, float(np.abs(out["final_obs"]).max(initial=0)))
            if out["terminated"][0] or out["truncated"][0]:
                results.lengths.append(int(out["episode_length"][0]))
                results.truncated += bool(out["truncated"][0])
    finally:
        for env in (first, second):
            env.close()
    return results


def _require_finite(where: str, obs: np.ndarray, step: int) -> None:
    if not np.isfinite(obs).all():
        bad = obs[~np.isfinite(obs)][0]
        raise UsageError(
            f"{where}: observations must be finite, got {bad} at step {step} of random actions; fix the environment, "
            "or clip them with a wrapper"
        )


def _behaviour_warnings(
    family: Any, results: _Results, spec: EnvSpec, config: RunConfig, where: str, limit: int | None
) -> Iterator[str]:
    """Yield warnings about behaviour that training can cope with, but that is probably not intended."""
    c, lengths = config.algo, results.lengths
    if results.differs:
        yield (
            f"{where} is not deterministic: with the same seed and actions, {results.differs} differ, so no run can be "
            "repeated; use self.np_random, which reset(seed=…) seeds"
        )
    if limit is None and not lengths:
        yield (
            f"{where}: no episode ended in {len(results.rewards):,} random steps, and without a time limit an "
            "evaluation may take long; eval.max_steps cuts off its episodes"
        )
    if len(lengths) > 1 and len(set(lengths)) == 1 and lengths[0] > 1 and not results.truncated:
        yield (
            f"{where}: every episode terminated after exactly {lengths[0]:,} steps; if that is a time limit, it must "
            "be reported as truncated, or the learner takes it for a failure"
        )
    if results.largest > _LARGE_OBS and not spec.shows_images and not getattr(c, "normalize_obs", True):
        yield f"{where}: observations reach {results.largest:.3g}; algo.normalize_obs=true brings them near 1"
    scale = max(map(abs, results.rewards))
    if not family.learns_from_env:
        return
    if scale > _LARGE_REWARD and config.env.reward_fn is None and not getattr(c, "normalize_rewards", False):
        remedy = "algo.normalize_rewards=true" if hasattr(c, "normalize_rewards") else "env.reward_fn"
        yield f"{where}: rewards reach {scale:.3g}; {remedy} can bring them near 1"


def probe_agents(family: Any, algorithm: Any, config: RunConfig) -> Seen:
    """As `probe_env`, for an environment with several agents.

    Raises
    ------
    UsageError
        If the environment breaks PettingZoo's interface, or returns numbers that are not finite.
    """
    c, where, rng = config.env, f"env={config.env.id}", np.random.default_rng(config.seed)
    limit = family.time_limit(algorithm)
    try:
        first, second = (make_multi_agent_env(c.id, 1, config.seed, c.kwargs) for _ in range(2))
        try:
            results = _play_agents(first, second, rng)
        finally:
            first.close()
            second.close()
    except (FloatingPointError, TypeError, ValueError) as e:
        raise UsageError(f"{where}: {e}") from e
    rewards, lines = results.rewards, []
    constant = len(set(rewards)) == 1
    if results.differs:
        lines.append(
            f"{where} is not deterministic: with the same seed and actions, {results.differs} differ, so no run can be "
            "repeated; use a generator that reset(seed=…) seeds"
        )
    if not results.lengths:
        lines.append(
            f"{where}: no episode ended in {len(rewards):,} random steps; without a time limit, an evaluation may take "
            "long; eval.max_steps cuts off its episodes"
        )
    if constant:
        lines.append(f"{where}: all rewards were {rewards[0]:g} under random actions, so nothing is learned from them")
    return Seen(limit, results.lengths, float(np.mean(rewards)), constant, lines)


def _play_agents(first: Any, second: Any, rng: np.random.Generator) -> _Results:
    results, started = _Results([], [], 0, 0.0, ""), time.process_time()
    step = first.reset_all()
    second.reset_all()
    while len(results.rewards) < _STEPS and (time.process_time() - started < _SECONDS or len(results.rewards) < 20):
        actions = [
            random_actions(group.spec, rng, 1, len(group.agents), mask=mask)
            for group, mask in zip(first.spec.groups, step.masks, strict=True)
        ]
        step = first.step_all(actions)
        if not results.differs and len(results.rewards) < _PAIR_STEPS:
            twin = second.step_all(actions)
            compared = (("observations", "final_obs"), ("rewards", "rewards"))
            results.differs = next(
                (what for what, name in compared if not same(getattr(step, name), getattr(twin, name))), ""
            )
        results.rewards.append(float(sum(each.sum() for each in step.rewards)))
        if step.ended[0]:
            results.lengths.append(int(step.episode_lengths[0]))
    return results


def random_actions(spec: Any, rng: np.random.Generator, *shape: int, mask: np.ndarray | None = None) -> np.ndarray:
    """Return random actions, (*shape, …), within ±1 if there are no bounds, and legal by `mask` (*shape, A)."""
    if mask is not None:
        draws = np.split(np.where(mask, rng.random(mask.shape), -1.0), np.cumsum(spec.choices)[:-1], -1)
        choices = [draw.argmax(-1) for draw in draws]
        return choices[0] if spec.discrete else np.stack(choices, -1)
    if spec.discrete:
        return rng.integers(spec.n_actions, size=shape)
    if spec.n_choices is not None:
        return rng.integers(spec.n_choices, size=(*shape, len(spec.n_choices)))
    low, high = (np.where(np.isfinite(b), b, d) for b, d in ((spec.act_low, -1.0), (spec.act_high, 1.0)))
    return rng.uniform(low, high, (*shape, spec.act_dim)).astype(np.float32)


def same(first: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> bool:
    """Return whether two sequences of arrays are equal; NaN equals NaN."""
    return all(np.array_equal(a, b, equal_nan=True) for a, b in zip(first, other, strict=True))


def _plays_native(algorithm: Any) -> bool:
    """Return whether the algorithm's environment, or offline that of its evaluations, is native."""
    if getattr(algorithm, "collector", None) is not None:
        return algorithm.collector.env.native or algorithm.env_options.device is not None
    return is_native(algorithm.env_id) and not (algorithm.env_options.kwargs or algorithm.env_options.wrappers)
