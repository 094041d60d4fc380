"""N copies of any gymnasium environment, stepped in this process, with the same arrays as the native `VecEnv`."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, NoReturn

import numpy as np

from rlox.envs import state as env_state
from rlox.envs.failures import NO_ANSWERS, UNANSWERED, explain_env_failure, require_separate
from rlox.envs.gym_make import make_gym_env, stepped
from rlox.envs.masks import MASK, MaskReader, WrongMask, describe_blocked, find_masks, without_mask
from rlox.envs.protocols import step_arrays
from rlox.envs.registry import env_name
from rlox.envs.spec import EnvSpec, SpaceAdapter, check_actions
from rlox.envs.state import ForeignEnvs, first_seeds
from rlox.kernels.envs.foreign import ForeignSteps
from rlox.kernels.envs.native_env import Count
from rlox.processes.failures import failure_of, note_cause


class EnvGroup(env_state.EnvCopies):
    """Environments stepped one after the other into the rows of arrays, with auto-reset and episode statistics.

    Only its first reset shows whether an environment has masks of legal actions. With discrete actions, the first one
    is therefore reset early, with `seed`, and what that returned or raised is the result of the first call of `reset`
    if that has the same seed for it.
    """

    def __init__(
        self,
        env: Any,
        kwargs: dict[str, Any] | None,
        wrappers: Sequence[Any],
        n: int,
        where: str,
        first: int = 0,
        process: str = "",
        seed: int | None = None,
    ):
        from gymnasium.wrappers import FrameStackObservation

        super().__init__(env, where, first, process)
        for self.at in range(n):
            self.envs.append(make_gym_env(env, kwargs, wrappers))
        require_separate(self.envs, self.where)
        stepped.update((id(e.unwrapped), e.unwrapped) for e in self.envs)
        obs_space, act_space = self.envs[0].observation_space, self.envs[0].action_space
        self.adapter = SpaceAdapter(without_mask(obs_space, act_space, self.where), act_space, where)
        for other in self.envs:
            if other.observation_space != obs_space or other.action_space != act_space:
                raise ValueError(
                    f"{where}: all environments must have the spaces {obs_space} and {act_space} of the first, got "
                    f"{other.observation_space} and {other.action_space}"
                )
        if self.adapter.spec.image and all(isinstance(e, FrameStackObservation) for e in self.envs):
            self.adapter.spec = replace(self.adapter.spec, n_stacked=self.envs[0].stack_size)
        self._early: tuple[int | None, Any] | None = None  # seed and outcome of the reset in this constructor
        self._readers: list[MaskReader] = []  # one for each environment, or none
        if self.adapter.spec.choices:
            self._detect_masks(seed)
        # Of the current observations, and of those that the last step led to.
        self._masks, self._final_masks = np.ones((2, n, sum(self.spec.choices) if self._readers else 0), np.bool_)
        self._steps = steps = ForeignSteps(
            self.envs,
            self.adapter.to_env,
            self.adapter.row,
            self.adapter.vectors,
            self.adapter.first_action,
            NO_ANSWERS,
            UNANSWERED,
            self._take_mask if self.adapter.spec.choices else None,
            bool(self._readers),
        )
        self._returns, self._lengths = steps.returns, steps.lengths
        self._columns = {
            "rewards": steps.rewards,
            "terminated": steps.terminated,
            "truncated": steps.truncated,
            "episode_return": steps.returns,
            "episode_length": steps.lengths,
        }
        self.return_queue: deque[float] = deque(maxlen=100)  # undiscounted returns of the last episodes
        self.length_queue: deque[int] = deque(maxlen=100)  # their steps
        self._inspect()

    @property
    def spec(self) -> EnvSpec:
        return self.adapter.spec

    def _detect_masks(self, seed: int | None) -> None:
        """Reset the first environment, and determine whether the environments have masks, and where."""
        try:
            outcome = self.envs[0].reset(seed=seed)
        except Exception as e:  # raised again by the reset that the caller asks for
            outcome = e
        except BaseException as e:
            self.at = 0
            self._explain_failure("reset", e, UNANSWERED)
            raise
        self._early = seed, outcome
        if not (isinstance(outcome, tuple) and len(outcome) == 2):
            return
        choices = self.adapter.spec.choices
        readers = [find_masks(env, choices, outcome[1]) for env in self.envs]
        if readers[0] is None:
            return
        for i, reader in enumerate(readers):
            if reader is None or reader.source != readers[0].source:
                self.at = i
                self._refuse_mask(i, f"masks must come from {readers[0].source}, as in the first environment, got none")
            self._readers.append(reader)
        self.adapter.spec = replace(self.adapter.spec, masked=True, mask_source=readers[0].source)

    def action_masks(self) -> np.ndarray | None:
        """Return the legal actions of the current observations, (n, sum(choices)) bool; None without masks."""
        return self._masks.copy() if self._readers else None

    def _take_mask(self, i: int, obs: Any, info: Any, terminated: bool) -> None:
        """Read the mask of what a step of environment `i` led to. After a termination it does not matter."""
        if terminated and self._readers:
            self._final_masks[i] = True
        else:
            self._final_masks[i] = self._read_mask(i, obs, info, f"step {self._lengths[i]} of its episode")

    def _read_mask(self, i: int, obs: Any, info: Any, when: str) -> np.ndarray:
        if not self._readers:
            self._refuse_mask(
                i, f'info["{MASK}"] must come with every step, from the first reset on, or with none', when
            )
        try:
            return self._readers[i].read(obs, info)
        except WrongMask as e:
            self._refuse_mask(i, str(e), when)
        except Exception as e:  # the environment's own method
            if not failure_of(e).what:
                note_cause(e, f"environment {self._first + i} ({self._name}): action_masks() at {when}")
            raise

    def _refuse_mask(self, i: int, rule: str, when: str = "") -> NoReturn:
        what = f"environment {self._first + i} ({self._name})"
        error = ValueError(f"{self.where}: {rule} ({what}{f' at {when}' * bool(when)})")
        note_cause(error, what)
        raise error from None

    def _get_episode(self, i: int) -> dict[str, Any]:
        mask = {"mask": self._masks[i].copy()} if self._readers else {}
        return {"return": float(self._returns[i]), "length": int(self._lengths[i]), **mask}

    def set_state(self, states: Sequence[Any]) -> None:
        """Continue from the states that `env_state.unpack` returned, one for each environment."""
        self._early = None
        for i, (env, state) in enumerate(zip(self.envs, states, strict=True)):
            self.at = i
            if not isinstance(state, dict) or type(state.get("return")) is not float:
                raise ValueError(f"{self.where}: a state must contain the return so far, got {repr(state)[:80]}")
            try:
                self._lengths[i] = env_state.count(state.get("length"), "the length so far")
                env_state.set_env_state(env, state.get("env"))
            except ValueError as e:
                raise ValueError(f"{self.where}: {e}") from e
            self._returns[i] = state["return"]
            if self._readers:
                self._masks[i] = self._saved_mask(state.get("mask"))

    def _saved_mask(self, mask: Any) -> np.ndarray:
        """Return a mask of a state, after checking it."""
        like = self._masks[0]
        if not isinstance(mask, np.ndarray) or mask.dtype != like.dtype or mask.shape != like.shape:
            raise ValueError(f"{self.where}: a state must contain {len(like)} legal actions, got {repr(mask)[:80]}")
        if (wrong := describe_blocked(mask[None], self.spec.choices)) is not None:
            raise ValueError(f"{self.where}: the mask of a state must allow {wrong[1]}, got none")
        return mask

    def reset(self, seeds: Sequence[int | None], obs_out: np.ndarray) -> None:
        """Start a new episode in every environment and write the first observations (n, …)."""
        for self.at, seed in enumerate(seeds):
            self._start(self.at, seed, obs_out)

    def _start(self, i: int, seed: int | None, obs_out: np.ndarray | None) -> None:
        answer = UNANSWERED
        try:
            answer = self._reset_env(i, seed)
            obs, info = answer
            row = self.adapter.row(obs)
            if obs_out is not None:
                obs_out[i] = row
            if self._readers or (isinstance(info, Mapping) and MASK in info and self.spec.choices):
                self._masks[i] = self._read_mask(i, obs, info, "the start of its episode")
        except BaseException as e:
            self._explain_failure("reset", e, answer)
            raise
        self._returns[i], self._lengths[i] = 0.0, 0

    def _reset_env(self, i: int, seed: int | None) -> Any:
        early = None
        if i == 0:
            early, self._early = self._early, None
        if early is None or early[0] != seed:
            return self.envs[i].reset(seed=seed)
        if isinstance(early[1], Exception):
            raise early[1]
        return early[1]

    def step(self, actions: np.ndarray, out: Mapping[str, np.ndarray]) -> None:
        """Step every environment once and fill the arrays of `step_arrays` that are in `out`."""
        obs_out, final_out = out.get("obs"), out.get("final_obs")
        reached = obs_out if final_out is None else final_out
        steps = self._steps
        steps.answer = UNANSWERED
        try:
            over = steps.step(actions, reached)
        except BaseException as e:
            self.at = steps.at
            self._explain_failure("step", e, steps.answer, actions[self.at])
            raise
        for name, column in self._columns.items():
            if name in out:
                out[name][:] = column
        if obs_out is not None and obs_out is not reached:
            obs_out[:] = reached
        if self._readers:
            self._masks[:] = self._final_masks
            if "final_action_mask" in out:
                out["final_action_mask"][:] = self._final_masks
        for self.at in over:
            self.return_queue.append(float(self._returns[self.at]))
            self.length_queue.append(int(self._lengths[self.at]))
            self._start(self.at, None, obs_out)
        if self._readers and MASK in out:
            out[MASK][:] = self._masks

    def _explain_failure(self, hook: str, e: BaseException, answer: Any, action: Any = None) -> None:
        if self.at >= len(self.envs):
            return  # an environment has changed the list
        at, action = self.at, None if action is None else self.adapter.to_env(action)
        explain_env_failure(
            e,
            self.envs[at],
            hook,
            answer,
            self.where,
            f"environment {self._first + at} ({self._name}): {hook}",
            f"{self._lengths[at] + 1} of its episode" if hook == "step" else "",
            action,
        )

    def close(self) -> None:
        """Close every environment; then raise the first exception of one of them."""
        errors: list[BaseException] = []
        for i, env in enumerate(self.envs):
            stepped.pop(id(env.unwrapped), None)
            try:
                env.close()
            except BaseException as e:
                self.at = self.at if errors else i
                errors.append(e)
        if errors:
            self._explain_failure("close", errors[0], UNANSWERED)
            raise errors[0]


class ForeignVecEnv(ForeignEnvs):
    """Base of vector environments such as `GymVecEnv` and `ParallelGymVecEnv`: their input and output arrays.

    `obs_dim`, `discrete`, `n_actions`, `act_dim`, `act_low` and `act_high` are those of `spec`.
    """

    spec: EnvSpec
    # In data-parallel training: number of this rank's first copy, and the copies of all ranks (0: only these).
    first = n_joint = 0
    _saves_masks = True  # whether states contain the masks

    def __init__(self, env_id: Any, n_envs: int, seed: int):
        super().__init__(env_id, n_envs)
        self._seed = seed

    def render(self) -> None:
        """Return None: training does not draw these environments."""

    def _first_seeds(self) -> list[int]:
        """Return the seeds of the first episodes."""
        joint = first_seeds(self._seed, self.n_joint or self.n_envs, self.n_skipped)
        return joint[self.first : self.first + self.n_envs]

    def fits(self, state: dict[str, np.ndarray]) -> bool:
        """Whether `state` comes from environments like these; raise a ValueError if it is damaged.

        One saved without masks, as by rlox 0.12, does not fit environments with masks.
        """
        needs_masks = self.spec.masked and self._saves_masks
        return super().fits(state) and (not needs_masks or env_state.has_part(state, "mask"))

    def action_masks(self) -> np.ndarray | None:
        """Return the legal actions of the current observations, (N, sum(choices)) bool; None unless `spec.masked`.

        Raises ValueError before the first `reset_all`.
        """
        if not self.spec.masked:
            return None
        if not self._started:
            raise ValueError(f"{type(self).__name__}.action_masks: the environments must be reset first")
        return self._get_masks()

    def _get_masks(self) -> np.ndarray:
        """Return a new array with the masks of environments that have masks."""
        return self._group.action_masks()

    @property
    def num_envs(self) -> Count:
        """`n_envs` under gymnasium's name."""
        return Count(self.n_envs)

    obs_dim, discrete, n_actions, act_dim, act_low, act_high = (
        property(attrgetter(f"spec.{name}"))
        for name in ("obs_dim", "discrete", "n_actions", "act_dim", "act_low", "act_high")
    )

    def reset_all(self, seed: int | None = None) -> np.ndarray:
        """Start a new episode in every copy. The first call seeds the copies; later calls do only if `seed` is given.

        Returns (N, D) f32, or (N, C, H, W) uint8 images.
        """
        if seed is not None:
            self._seed, self.n_skipped = seed, 0
        seeds: list[int | None] = [None] * self.n_envs
        if seed is not None or not self._started:
            seeds = [*self._first_seeds()]
        return self.reset_each(seeds)

    def reset_each(self, seeds: list[int | None]) -> np.ndarray:
        """Start a new episode in every copy, each with its own seed; None continues with the copy's generator.

        Returns the same as `reset_all`.
        """
        obs: np.ndarray = np.empty((self.n_envs, *self.spec.obs_shape), self.spec.obs_dtype)
        self._at_rest = False
        self._reset(seeds, obs)
        self._started = self._at_rest = True
        return obs

    def step_all(self, actions, out: dict[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
        """Step every copy once. The first call starts the first episodes unless `reset_all` did.

        Parameters
        ----------
        actions : sequence or array
            (N,) integers for Discrete actions, (N, K) integers for MultiDiscrete ones, (N, A) floats for Box, in the
            environment's units and not clipped here. Integers count from 0, independent of the space's start.
        out : dict, optional
            Arrays to write into, by key; only these keys are filled, and `out` is returned.

        Returns
        -------
        dict
            ``obs`` (N, D) f32 or (N, C, H, W) uint8, from the next episode if one ended; ``rewards`` (N,) f64;
            ``terminated`` and ``truncated`` (N,) bool; ``final_obs`` like ``obs``, but the observation that the step
            led to, also at the end of an episode; ``episode_return`` (N,) f64 and ``episode_length`` (N,) int64, totals
            of the episode that the step belongs to. With masks of legal actions, ``action_mask`` and
            ``final_action_mask`` (N, sum(choices)) bool, for ``obs`` and ``final_obs``.

        Raises
        ------
        ValueError
            For a wrong number of actions, or an action out of range.
        TypeError
            For discrete actions that are not integers.
        """
        actions = check_actions(self.spec, actions, self.n_envs, f"{type(self).__name__}.step_all")
        if not self._started:
            self.reset_all()
        if out is None:
            out = step_arrays(self.spec, self.n_envs)
        at_rest, self._at_rest = self._at_rest, False
        self._step(actions, out)
        self._at_rest = at_rest
        return out


class GymVecEnv(ForeignVecEnv):
    """N copies of a gymnasium environment in this process, with same-step auto-reset.

    Parameters
    ----------
    env_id : str, callable or gymnasium.Env
        A gymnasium id, a callable that returns a ``gymnasium.Env``, or (for `n_envs` 1) an environment, which
        `close` leaves open.
    n_envs : int
        Number of copies N.
    seed : int
        Copy i is seeded with an independent mix of (seed, i).
    kwargs : dict, optional
        Passed to ``gymnasium.make`` or the callable.
    wrappers : sequence
        See `make_gym_env`.

    Attributes
    ----------
    observation_space, action_space : gymnasium.Space
        Spaces of one environment, also under gymnasium's names ``single_observation_space`` and
        ``single_action_space``. `spec` describes the arrays of `reset_all` and `step_all`.
    return_queue, length_queue : deque
        Undiscounted returns and steps of the last 100 episodes that ended, under gymnasium's names; `episode_rewards`
        and `episode_lengths` are the same as lists.

    Raises
    ------
    ValueError
        For spaces that `SpaceAdapter` does not support.
    """

    def __init__(
        self,
        env_id: Any,
        n_envs: int = 1,
        seed: int = 0,
        kwargs: dict[str, Any] | None = None,
        wrappers: Sequence[Any] = (),
    ):
        super().__init__(env_id, n_envs, seed)
        import gymnasium

        self._borrowed = isinstance(env_id, gymnasium.Env)
        if self._borrowed and n_envs > 1:
            raise ValueError(
                f"GymVecEnv: env_id must be an id or a callable for {n_envs} copies, got one environment "
                f"({env_name(env_id)}); pass lambda: {env_name(env_id.unwrapped)}(...), or n_envs=1"
            )
        self._hold(EnvGroup(env_id, kwargs, wrappers, n_envs, "GymVecEnv", seed=self._first_seeds()[0]))
        self.envs = self._group.envs
        self.observation_space = self.single_observation_space = self.envs[0].observation_space
        self.action_space = self.single_action_space = self.envs[0].action_space
        self.return_queue, self.length_queue = self._group.return_queue, self._group.length_queue

    @property
    def episode_rewards(self) -> list[float]:
        """Undiscounted returns of the last 100 episodes that ended."""
        return list(self.return_queue)

    @property
    def episode_lengths(self) -> list[int]:
        """Steps of the last 100 episodes that ended."""
        return list(self.length_queue)

    def _close(self) -> None:
        if not self._borrowed:
            self._group.close()
