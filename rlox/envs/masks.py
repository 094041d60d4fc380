"""Masks of legal actions of gymnasium environments: where they come from, and how they are read.

A mask has a flag for each action of a Discrete space; for a MultiDiscrete space, the flags of its components follow
each other. An environment offers it in one of these ways, of which the first counts:

- ``info["action_mask"]``, as PettingZoo and gymnasium's Taxi do, in the info of ``reset`` and of every step;
- a method ``action_masks()``, as for sb3-contrib's MaskablePPO, of the environment or of one of its wrappers;
- a part ``action_mask`` of a Dict observation, which is then no part of what the policy sees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rlox.envs.failures import describe_answer

MASK = "action_mask"  # name of a mask of legal actions in observations, infos and the arrays of a step
METHOD = "action_masks"
_OBSERVATION, _INFO = f'observation["{MASK}"]', f'info["{MASK}"]'


class WrongMask(ValueError):
    """An environment's mask is missing, has another form, or allows nothing. The message says which."""


def without_mask(obs_space: Any, act_space: Any, where: str) -> Any:
    """Return an observation space without its mask: a Dict without the part ``action_mask``; others unchanged.

    Raises
    ------
    ValueError
        If the Dict has no other part.
    """
    from gymnasium import spaces

    if isinstance(act_space, spaces.Box) or not (isinstance(obs_space, spaces.Dict) and MASK in obs_space.spaces):
        return obs_space
    rest = {key: space for key, space in obs_space.spaces.items() if key != MASK}
    if not rest:
        raise ValueError(f"{where}: the observation space must have more parts than {MASK}, got {obs_space}")
    return spaces.Dict(rest)


def find_masks(env: Any, choices: tuple[int, ...], info: Any) -> MaskReader | None:
    """Return a reader of the masks of a gymnasium environment; None if it has none.

    `choices` are those of `rlox.envs.EnvSpec`, and `info` comes from a reset.
    """
    from gymnasium import spaces

    if not choices:
        return None
    if isinstance(info, Mapping) and MASK in info:
        return MaskReader(_INFO, choices)
    if (method := _find_method(env)) is not None:
        return MaskReader(f"{METHOD}()", choices, method=method)
    if isinstance(env.observation_space, spaces.Dict) and MASK in env.observation_space.spaces:
        space = env.observation_space[MASK]
        # Stacked observations have a mask for each frame.
        stacked = bool(space.shape) and len(space.shape) > 1 and np.prod(space.shape[1:]) == sum(choices)
        return MaskReader(_OBSERVATION, choices, stacked=bool(stacked))
    return None


def _find_method(env: Any) -> Callable[[], Any] | None:
    try:
        method = env.get_wrapper_attr(METHOD)
    except AttributeError:
        return None
    return method if callable(method) else None


class MaskReader:
    """Reads the mask of one environment after each reset and step.

    Attributes
    ----------
    source : str
        Where the masks come from: ``info["action_mask"]``, ``action_masks()`` or ``observation["action_mask"]``.
    """

    def __init__(
        self,
        source: str,
        choices: tuple[int, ...],
        method: Callable[[], Any] | None = None,
        stacked: bool = False,  # whether observations have a mask for each of several frames
    ):
        self.source, self._choices, self._method, self._stacked = source, choices, method, stacked
        self._shape = (sum(choices),)

    def read(self, obs: Any, info: Any) -> np.ndarray:
        """Return the mask, (sum(choices),) bool, for what ``reset`` or ``step`` returned.

        Raises
        ------
        WrongMask
            If there is none, it does not fit the actions, or it allows no choice of a component.
        """
        if self._method is not None:
            given = self._method()
        elif self.source == _INFO:
            if not (isinstance(info, Mapping) and MASK in info):
                raise WrongMask(f"{self.source} must come with every step, from the first reset on, or with none")
            given = info[MASK]
        else:
            given = obs[MASK][-1] if self._stacked else obs[MASK]
        if type(given) is np.ndarray and given.dtype == np.bool_ and given.shape == self._shape:
            mask = given.copy()
        else:
            mask = self._convert(given)
        if (wrong := describe_blocked(mask[None], self._choices)) is not None:
            raise WrongMask(f"{self.source} must allow {wrong[1]}, got none")
        return mask

    def _convert(self, given: Any) -> np.ndarray:
        parts = given if isinstance(given, (list, tuple)) else [given]
        try:
            flags = np.concatenate([np.asarray(part).reshape(-1) for part in parts])
        except ValueError:
            flags = np.empty(0)
        if flags.shape != self._shape or flags.dtype.kind not in "biuf" or not ((flags == 0) | (flags == 1)).all():
            several = len(self._choices) > 1
            one = f"for {self._choices} choices, one after another" if several else "one for each action"
            dtype = f" of dtype {given.dtype}" if isinstance(given, np.ndarray) else ""
            raise WrongMask(
                f"{self.source} must be {self._shape[0]} flags, {one}, got {describe_answer(given)}{dtype}"
                f"{'' if flags.shape != self._shape else ' with numbers other than 0 and 1'}; if a wrapper changes the "
                "actions, let it change their masks too"
            )
        return flags.astype(np.bool_)


def describe_blocked(masks: np.ndarray, choices: tuple[int, ...]) -> tuple[int, str] | None:
    """Return the first row of masks (N, sum(choices)) bool that allows no choice of a component, and what it should
    allow; None if every row allows some."""
    start = 0
    for k, n in enumerate(choices):
        blocked = ~masks[:, start : start + n].any(1)
        if blocked.any():
            some = "at least one action" if len(choices) == 1 else f"at least one choice of component {k}"
            return int(blocked.argmax()), some
        start += n
    return None
