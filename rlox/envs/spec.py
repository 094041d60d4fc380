"""`EnvSpec`, which describes an environment to algorithms, and the conversion of gymnasium's spaces to arrays."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from rlox.config import shown
from rlox.config.arguments import warn_renamed
from rlox.envs.failures import describe_answer, wrong_observation
from rlox.envs.masks import MASK
from rlox.kernels.rng import Rng

_ONE_KIND = " with the wrapper {FilterObservation: {filter_keys: [...]}}, or take DREAMER"


@dataclass(frozen=True, eq=False)
class EnvSpec:
    """Shapes, sizes and bounds. Fields that do not apply to the environment's actions are None.

    Exactly one kind of action is set: `n_actions` (one integer), `n_choices` (K integers), or `act_dim` and its bounds.

    Attributes
    ----------
    obs_dim : int
        Size D of an observation; for images the number of values per image.
    image, discrete, continuous : bool
        Whether an observation is an image, and whether actions are Discrete or Box.
    action_kind : str
        ``discrete``, ``multi-discrete`` or ``continuous``.
    action_shape : tuple of int
        Shape of one action: () for Discrete, (K,) for MultiDiscrete, (A,) for Box.
    action_dtype : type
        np.float32 for Box, np.int64 otherwise.
    choices : tuple of int
        Number of choices of each component of an action; () for Box.
    model_width : int
        Size A of an action as input of a world model: concatenated one-hot choices, or numbers in [-1, 1].
    """

    obs_shape: tuple[int, ...]  # (D,), or (C, H, W) for images
    obs_dtype: type = np.float32  # np.float32, or np.uint8 for images
    n_stacked: int = 1  # frames in an image that advances by one frame per step (gymnasium's FrameStackObservation)
    obs_bytes: tuple[int, ...] | None = None  # shape of a uint8 Box that is not an image, whose numbers are not scaled
    n_actions: int | None = None  # Discrete: number of actions
    n_choices: tuple[int, ...] | None = None  # MultiDiscrete: number of choices of each of the K components
    act_dim: int | None = None  # Box: length A of an action
    act_low: np.ndarray | None = None  # (A,) f32, -inf where unbounded
    act_high: np.ndarray | None = None  # (A,) f32, inf where unbounded
    masked: bool = False  # whether each step says which of the discrete actions are legal
    mask_source: str = field(default="", compare=False)  # where masks come from, in words; empty if unknown
    # Parts of an observation that has several: the key of each part, and how many numbers it has.
    parts: tuple[tuple[str, int], ...] = field(default=(), compare=False)
    # For a vector of images and other numbers: index of each image's first number, C, H, W; pixels are in [0, 255].
    images: tuple[tuple[int, int, int, int], ...] = ()
    # Converts between the environment's own observations and actions and these arrays; None if they are the same.
    adapter: SpaceAdapter | None = field(default=None, compare=False, repr=False)

    # What follows from these fields, see the class.
    obs_dim: int = field(init=False, compare=False, repr=False)
    image: bool = field(init=False, compare=False, repr=False)
    discrete: bool = field(init=False, compare=False, repr=False)
    continuous: bool = field(init=False, compare=False, repr=False)
    action_kind: str = field(init=False, compare=False, repr=False)
    action_shape: tuple[int, ...] = field(init=False, compare=False, repr=False)
    action_dtype: type = field(init=False, compare=False, repr=False)
    choices: tuple[int, ...] = field(init=False, compare=False, repr=False)
    model_width: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        discrete, continuous = self.n_actions is not None, self.act_dim is not None
        choices = (self.n_actions,) if self.n_actions is not None else self.n_choices or ()
        n_components = len(self.n_choices) if self.n_choices is not None else self.act_dim
        vars(self).update(  # the instance is frozen
            obs_dim=math.prod(self.obs_shape),
            image=len(self.obs_shape) == 3 and self.obs_dtype == np.uint8,
            discrete=discrete,
            continuous=continuous,
            action_kind="discrete" if discrete else "continuous" if continuous else "multi-discrete",
            action_shape=() if n_components is None else (n_components,),
            action_dtype=np.float32 if continuous else np.int64,
            choices=choices,
            model_width=sum(choices) or self.act_dim or 0,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EnvSpec) and all(
            np.array_equal(getattr(self, item.name), getattr(other, item.name)) for item in fields(self) if item.compare
        )

    def part(self, i: int) -> str:
        """Describe where number `i` of an observation comes from: the key of its part and the index in this part."""
        for key, size in self.parts:
            if i < size:
                return f"number {i} of {key!r}"
            i -= size
        return f"number {i}"

    def refuse_mixed_images(self, where: str, remedy: str = _ONE_KIND) -> None:
        """Raise a ValueError if an observation contains images and other parts."""
        if self.images:
            raise ValueError(
                f"{where}: the observation space must not mix images with other parts, got {self.described_parts()}; "
                f"keep the image or the rest{remedy}"
            )

    def described_parts(self) -> str:
        """Describe the parts for messages: ``camera (an image), speed (3 numbers)``."""
        starts = {start for start, *_ in self.images}
        texts, i = [], 0
        for key, size in self.parts:
            texts.append(f"{key} ({'an image' if i in starts else '1 number' if size == 1 else f'{size:,} numbers'})")
            i += size
        return ", ".join(texts)

    @property
    def shows_images(self) -> bool:
        """Whether an observation is an image or contains one."""
        return self.image or bool(self.images)

    @property
    def rounded(self) -> bool:
        """Whether observations of the environment have a wider data type than float32, to which they are rounded."""
        return self.adapter is not None and self.adapter.rounds

    def describe_actions(self) -> str:
        """Describe the actions: ``2 discrete actions``, ``3 components of 2, 2, 5 choices``, ``1 action component``."""
        if self.discrete:
            return f"{self.n_actions} discrete actions"
        if self.n_choices is not None:
            return f"{len(self.n_choices)} components of {', '.join(map(str, self.n_choices))} choices"
        return f"{self.act_dim} action component{'' if self.act_dim == 1 else 's'}"

    def describe_masks(self) -> str:
        """Return where masks come from, to append to a text: ``, masks from info["action_mask"]``; empty without."""
        return f", masks from {self.mask_source}" if self.masked and self.mask_source else ", masked" * self.masked

    def clip(self, actions: np.ndarray) -> np.ndarray:
        """Clip continuous actions to their bounds; return other actions unchanged."""
        return np.clip(actions, self.act_low, self.act_high) if self.continuous else actions

    def to_unit(self, actions: np.ndarray) -> np.ndarray:
        """Scale continuous actions (B, A) from their finite bounds to [-1, 1]."""
        low, high = self.act_low, self.act_high
        return (actions - (high + low) / 2) / ((high - low) / 2)  # type: ignore[operator]  # set if continuous

    def to_model(self, actions: np.ndarray) -> np.ndarray:
        """Convert actions (B, …) to the inputs of a world model, (B, A) f32, see `model_width`."""
        if self.continuous:
            return self.to_unit(actions).astype(np.float32)
        columns = np.asarray(actions).reshape(len(actions), -1).T
        blocks = [np.eye(n, dtype=np.float32)[column] for n, column in zip(self.choices, columns, strict=True)]
        return np.concatenate(blocks, 1)

    def from_model(self, actions: np.ndarray) -> np.ndarray:
        """Invert `to_model`, (B, A) -> (B, ...); continuous actions are clipped to their bounds."""
        if self.continuous:
            low, high = self.act_low, self.act_high
            return (low + (np.clip(actions, -1, 1) + 1) / 2 * (high - low)).astype(np.float32)  # type: ignore[operator]
        edges = np.cumsum(self.choices)[:-1]
        choices = np.stack([block.argmax(1) for block in np.split(actions, edges, 1)], 1)
        return choices[:, 0] if self.discrete else choices

    def random_actions(self, rng: Rng, n: int, mask: np.ndarray | None = None) -> np.ndarray:
        """Draw `n` uniformly random actions, of those that `mask` (n, sum(choices)) allows, or of all.

        Continuous actions must be bounded.
        """
        if mask is not None:
            draws = rng.uniform((n, len(self.choices)), dtype=np.float64)
            legal = np.split(mask, np.cumsum(self.choices)[:-1], 1)
            columns = [draw_legal(flags, column) for flags, column in zip(legal, draws.T, strict=True)]
            return columns[0] if self.discrete else np.stack(columns, 1)
        if self.discrete:
            return rng.integers(self.n_actions, n)
        if self.n_choices is not None:
            return (rng.uniform((n, len(self.n_choices)), dtype=np.float64) * self.n_choices).astype(np.int64)
        # Continuous actions, which have bounds.
        return self.act_low + (self.act_high - self.act_low) * rng.uniform((n, self.act_dim))  # type: ignore[operator]


def draw_legal(flags: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Return the index of a random True in each row of `flags` (n, K), for `draws` (n,) in [0, 1).

    Products have the data type of `draws`, in which the largest number below 1 times a count rounds to less than it.
    """
    counts = flags.cumsum(1)
    place = draws * counts[:, -1].astype(draws.dtype)
    return (counts > place.astype(np.int64)[:, None]).argmax(1)


def native_spec(env) -> EnvSpec:
    """Return the `EnvSpec` of a native environment, or of one of its agents if it has several."""
    if env.discrete:
        masked = getattr(env, "masked", False)
        return EnvSpec(
            (env.obs_dim,), n_actions=env.n_actions, masked=masked, mask_source="mask_n of its C struct" * masked
        )
    return EnvSpec((env.obs_dim,), act_dim=env.act_dim, act_low=env.act_low, act_high=env.act_high)


def spec_of(vec: Any) -> EnvSpec:
    """Return ``vec.spec``. Deprecated."""
    warn_renamed("rlox.envs.spec_of(env)", "env.spec", "0.14.0")
    return vec.spec


class SpaceAdapter:
    """Conversion between one gymnasium environment's observations and actions and the arrays of an `EnvSpec`.

    - Observations: Box becomes (D,) float32, flattened if it has more dimensions; Discrete, MultiDiscrete,
      MultiBinary, Dict and Tuple as in ``gymnasium.spaces.flatten`` (choices one-hot). A uint8 Box of three dimensions
      is an image, and one of four dimensions a stack of images: (C, H, W) uint8, with the frames of a stack one after
      the other in C. The channels are the smaller of first and last dimension. A Dict or Tuple with one part becomes
      that part; with images and other parts it becomes a vector of all their numbers, see `EnvSpec.images`.
    - Actions: Discrete becomes an integer from 0; MultiDiscrete and MultiBinary become K integers from 0; Box becomes
      (A,) float32 in the environment's units.

    Raises
    ------
    ValueError
        For any other space; the message names the remedy.
    """

    def __init__(self, obs_space, act_space, where: str = "SpaceAdapter"):
        self._where = where
        self._spaces = obs_space, act_space
        obs_shape, obs_dtype, self.observe = _make_observer(obs_space, where)
        unscaled = _bytes_shape(obs_space)
        from gymnasium import spaces

        # Whether observations are vectors already, whether float32 rounds them, and the first of Discrete actions.
        self.vectors = isinstance(obs_space, spaces.Box) and len(obs_space.shape) == 1
        self.rounds = any(
            isinstance(part, spaces.Box) and np.dtype(part.dtype).itemsize >= 4 and part.dtype != np.float32
            for _, part in _leaves(obs_space)
        )
        self.first_action: int | None = None
        if isinstance(act_space, spaces.Discrete):
            self.first_action = first = int(act_space.start)
            self.spec = EnvSpec(obs_shape, obs_dtype, n_actions=int(act_space.n), obs_bytes=unscaled)
            self.to_env: Callable[[Any], Any] = lambda action: int(action) + first
        elif isinstance(act_space, (spaces.MultiDiscrete, spaces.MultiBinary)):
            shape, dtype = act_space.shape, act_space.dtype
            multi = isinstance(act_space, spaces.MultiDiscrete)
            choices = act_space.nvec.ravel().tolist() if multi else [2] * math.prod(shape)
            start = act_space.start if multi else 0
            self.spec = EnvSpec(obs_shape, obs_dtype, n_choices=tuple(choices), obs_bytes=unscaled)
            self.to_env = lambda action: (action.reshape(shape) + start).astype(dtype)
        elif isinstance(act_space, spaces.Box) and act_space.dtype.kind == "f":
            shape, dtype = act_space.shape, act_space.dtype
            low, high = _inner_bounds(act_space)
            self.spec = EnvSpec(obs_shape, obs_dtype, act_dim=low.size, act_low=low, act_high=high, obs_bytes=unscaled)
            # A copy: an environment may keep or change its action.
            self.to_env = lambda action: action.reshape(shape).astype(dtype)
        else:
            raise ValueError(
                f"{where}: the action space must be Discrete, MultiDiscrete, MultiBinary or a Box of floats, got "
                f"{act_space}; pass a callable that wraps the environment in "
                "gymnasium.wrappers.TransformAction(env, func, action_space), or name a custom wrapper"
            )
        images = () if self.spec.image else tuple(_images(obs_space))
        self.spec = replace(self.spec, parts=tuple(_parts(obs_space)), images=images, adapter=self)
        self._plain_shape = None if self.spec.image else obs_shape

    def __reduce__(self):
        # Functions cannot be pickled; the spaces determine them.
        return SpaceAdapter, (*self._spaces, self._where)

    def read(self, obs: Any, where: str) -> tuple[np.ndarray, bool]:
        """Convert one observation of the environment, or a batch of them, to rows (B, …) of the policy's arrays.

        Arrays that have the policy's shape already are rows. A batch of a Dict or Tuple contains a batch of each part,
        as in gymnasium's vector environments. A batch of Discrete observations must be one-hot rows.

        Returns
        -------
        rows, single
            The rows, and whether `obs` was one observation.

        Raises
        ------
        ValueError
            If `obs` is not an observation of the environment; `where` is the start of the message.
        """
        from gymnasium import spaces

        space, flat = self._spaces[0], self.spec.obs_shape
        single, items = True, [obs]
        if isinstance(space, spaces.Dict if isinstance(obs, Mapping) else spaces.Tuple) and not _is_array(obs):
            if wrong_observation(space, obs) is not None and (batch := _split_batch(space, obs)):
                single, items = False, batch
        elif not (isinstance(space, (spaces.Text, spaces.OneOf)) and space.contains(obs)):
            array = np.asarray(obs)
            if array.shape != space.shape:
                is_batch = space.shape is not None and array.shape[1:] == space.shape and array.shape != flat
                if not is_batch or isinstance(space, spaces.Discrete):
                    single = array.ndim == len(flat)
                    return (array[None] if single else array), single
                single, items = False, list(array)
        for item in items:
            if (wrong := wrong_observation(space, item, "obs")) is not None:
                raise ValueError(f"{where}: {wrong}")
        return np.stack([np.asarray(self.row(item)) for item in items]), single

    def write(self, actions: np.ndarray) -> np.ndarray:
        """Convert the policy's actions (B, …) to actions of the environment, (B, …)."""
        if self.first_action is not None:
            return actions + self.first_action
        return np.stack([self.to_env(action) for action in actions])

    def row(self, obs: Any) -> Any:
        """Return `observe(obs)` after checking that assigning it to a row of an array cannot silently change it.

        Raises
        ------
        ValueError
            If the shape is wrong, or an image has floats.
        """
        obs = self.observe(obs)
        if type(obs) is np.ndarray and obs.shape == self._plain_shape and obs.dtype.kind in "fiub":
            return obs
        spec, array = self.spec, np.asarray(obs)
        if array.shape != spec.obs_shape or array.dtype.kind not in ("iub" if spec.image else "fiub"):
            raise ValueError(
                f"{self._where}: observations must have shape {spec.obs_shape} and dtype {np.dtype(spec.obs_dtype)}, "
                f"as the space says, got {describe_answer(obs)}"
            )
        return obs


def read_observations(where: str, spec: EnvSpec, obs: Any) -> tuple[np.ndarray, bool]:
    """Convert the argument of `rlox.training.Agent.predict` to rows (B, …) of the policy's arrays.

    Returns
    -------
    rows, single
        The rows, and whether `obs` was one observation.

    Raises
    ------
    ValueError, TypeError
        As `rlox.training.Agent.predict`.
    """
    shape = ", ".join(map(str, spec.obs_shape))
    try:
        if spec.adapter is None:
            given = np.asarray(obs)
            single = given.ndim == len(spec.obs_shape)
            given = given[None] if single else given
        else:
            given, single = spec.adapter.read(obs, where)
        if given.dtype.kind not in "biufO":
            raise TypeError(f"it contains {given.dtype}")
        if spec.image and given.dtype.kind == "f":
            raise ValueError(
                f"{where}: obs must be of dtype uint8, since the environment shows images, got {given.dtype}"
            )
        with np.errstate(over="ignore"):
            rows: np.ndarray = np.asarray(given, spec.obs_dtype)
    except (OverflowError, TypeError, ValueError) as e:
        if str(e).startswith(where):
            raise
        raise TypeError(f"{where}: obs must be an array of numbers, got {shown(obs)}") from e
    if rows.shape[1:] != spec.obs_shape:
        own = "" if spec.adapter is None else ", or be an observation of the environment"
        raise ValueError(f"{where}: obs must have shape ({shape}) or (B, {shape}){own}, got {np.shape(obs)}")
    if not np.isfinite(rows).all():
        raise ValueError(f"{where}: obs must contain numbers that are finite as float32, got {shown(obs)}")
    return rows, single


def split_mask(spec: EnvSpec, obs: Any, mask: Any) -> tuple[Any, Any]:
    """Return an observation without the mask of legal actions that it may contain, and `mask` or that one."""
    if not spec.masked or not isinstance(obs, Mapping) or MASK not in obs:
        return obs, mask
    rest = {key: value for key, value in obs.items() if key != MASK}
    return rest, obs[MASK] if mask is None else mask


def read_mask(where: str, spec: EnvSpec, mask: Any, n: int) -> np.ndarray | None:
    """Return a mask of legal actions as (n, n_choices) bool; one row counts for all. None stays None.

    Raises
    ------
    ValueError
        If it has another shape or type, or allows no action; if the environment has no masks.
    """
    if mask is None:
        return None
    if not spec.masked:
        raise ValueError(f"{where}: mask must be None, since the environment has no action masks")
    flags, size = np.asarray(mask), sum(spec.choices)
    if flags.shape not in ((size,), (n, size)) or flags.dtype.kind not in "biu":
        raise ValueError(
            f"{where}: mask must have a flag for each of {size} choices, ({size},) or ({n}, {size}), got {shown(mask)}"
        )
    legal = np.array(np.broadcast_to(flags.astype(np.bool_), (n, size)))
    if not all(part.any(1).all() for part in np.split(legal, np.cumsum(spec.choices)[:-1], 1)):
        raise ValueError(f"{where}: mask must allow an action, got {shown(mask)}")
    return legal


def write_actions(spec: EnvSpec, actions: np.ndarray, single: bool) -> np.ndarray | int:
    """Convert the policy's actions (B, …) to those of the environment; the first one if `single`."""
    if spec.adapter is not None:
        actions = spec.adapter.write(actions)
    if single:
        return int(actions[0]) if spec.discrete else actions[0]
    return actions


def _is_array(obs: Any) -> bool:
    return isinstance(obs, np.ndarray) or not isinstance(obs, (Mapping, tuple))


def _split_batch(space, obs: Any) -> list[Any]:
    """Return the observations in a batch of a Dict or Tuple `space`; [] if `obs` is no such batch."""
    from gymnasium.vector.utils import batch_space, iterate

    try:
        part, (path, _) = obs, next(_leaves(space))
        for key in path:
            part = part[key]
        return list(iterate(batch_space(space, len(part)), obs))
    except (IndexError, KeyError, TypeError, ValueError):
        return []


def _inner_bounds(space) -> tuple[np.ndarray, np.ndarray]:
    """Return the bounds (A,) f32 of a Box of floats, rounded so that no number between them is outside of the space."""
    with np.errstate(over="ignore"):
        low, high = (bound.ravel().astype(np.float32) for bound in (space.low, space.high))
    inner_low = np.where(low < space.low.ravel(), np.nextafter(low, np.float32(np.inf)), low)
    inner_high = np.where(high > space.high.ravel(), np.nextafter(high, np.float32(-np.inf)), high)
    empty = inner_low > inner_high  # the space has one number, which is no float32
    return np.where(empty, low, inner_low), np.where(empty, high, inner_high)


def _leaves(space, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield all parts of nested Dicts and Tuples with the path of keys to each; any other space yields itself."""
    from gymnasium import spaces

    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        for name, part in _items(space):
            yield from _leaves(part, (*path, name))
    else:
        yield path, space


def _items(space) -> list[tuple[Any, Any]]:
    """Return a Dict's keys and parts, or a Tuple's indices and parts."""
    from gymnasium import spaces

    return list(space.spaces.items()) if isinstance(space, spaces.Dict) else list(enumerate(space.spaces))


def _parts(space) -> Iterator[tuple[str, int]]:
    """Yield the keys of a Dict's or Tuple's parts, nested keys joined by dots, and the size of each flattened part."""
    from gymnasium import spaces

    for path, part in _leaves(space):
        if path:
            yield ".".join(map(str, path)), spaces.flatdim(part)


def _images(space) -> Iterator[tuple[int, int, int, int]]:
    """Yield the images among a Dict's or Tuple's parts: the start of each in the flattened vector, and its shape."""
    from gymnasium import spaces

    start = 0
    for _, part in _leaves(space):
        if _is_image(part):
            channels, height, width = _make_image_observer(part.shape)[0]
            yield start, channels, height, width
        start += spaces.flatdim(part)


def _make_observer(space, where: str) -> tuple[tuple[int, ...], type, Callable[[Any], Any]]:
    """Return shape, dtype and the function that converts an observation to such an array."""
    from gymnasium import spaces

    if isinstance(space, (spaces.Dict, spaces.Tuple)) and len(space.spaces) == 1:
        ((key, part),) = _items(space)
        shape, dtype, inner = _make_observer(part, where)
        return shape, dtype, lambda obs: inner(obs[key])
    if _is_image(space):
        return _make_image_observer(space.shape)
    if isinstance(space, spaces.Box):
        if len(space.shape) == 1:
            return space.shape, np.float32, lambda obs: obs
        return (math.prod(space.shape),), np.float32, lambda obs: np.asarray(obs).reshape(-1)
    if any(_is_image(part) for _, part in _leaves(space)):
        return _make_joined_observer(space, where)
    if not space.is_np_flattenable:
        raise ValueError(
            f"{where}: the observation space must be one that gymnasium.spaces.flatten can flatten, got {space}; "
            "pass a callable that wraps the environment in "
            "gymnasium.wrappers.TransformObservation(env, func, observation_space), or name a custom wrapper"
        )
    return (spaces.flatdim(space),), np.float32, functools.partial(spaces.flatten, space)


def _is_image(space) -> bool:
    from gymnasium import spaces

    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) in (3, 4)


def _bytes_shape(space) -> tuple[int, ...] | None:
    """Return the shape of a Box of bytes that is not an image; None for any other space."""
    from gymnasium import spaces

    whole = isinstance(space, spaces.Box) and space.dtype == np.uint8 and not _is_image(space)
    return space.shape if whole and space.high.max(initial=0) == 255 else None


def _make_image_observer(shape: tuple[int, ...]) -> tuple[tuple[int, ...], type, Callable[[Any], Any]]:
    *stack, first, _, last = shape
    channels_last = last < first
    *_, c, h, w = (*stack, last, *shape[-3:-1]) if channels_last else shape
    out = (math.prod(stack) * c, h, w)

    def observe(obs: Any) -> np.ndarray:
        frames = np.asarray(obs)
        return (np.moveaxis(frames, -1, -3) if channels_last else frames).reshape(out)

    return out, np.uint8, observe


def _make_joined_observer(space, where: str) -> tuple[tuple[int, ...], type, Callable[[Any], Any]]:
    """Return the observer of a Dict or Tuple with images, which concatenates the numbers of all parts."""
    parts = [(key, *_make_observer(part, where)) for key, part in _items(space)]

    def observe(obs: Any) -> np.ndarray:
        return np.concatenate([np.asarray(inner(obs[key]), np.float32).ravel() for key, _, _, inner in parts])

    return (sum(math.prod(shape) for _, shape, _, _ in parts),), np.float32, observe


def check_actions(spec: EnvSpec, actions: Any, n: int, where: str) -> np.ndarray:
    """Return `actions` of N environments as (N,) or (N, K) int64 or (N, A) f32.

    Raises
    ------
    TypeError
        If discrete actions are not integers.
    ValueError
        If the number of actions is wrong, or an action is out of range or NaN.
    """
    actions = np.asarray(actions)
    if actions.size != n * math.prod(spec.action_shape):
        raise ValueError(f"{where}: actions must have shape {(n, *spec.action_shape)}, got {actions.shape}")
    if spec.continuous:
        actions = actions.astype(np.float32, copy=False)
        if np.isnan(actions).any():
            raise ValueError(f"{where}: actions must be numbers, got nan")
    else:
        if actions.dtype.kind not in "iub":
            raise TypeError(f"{where}: discrete actions must be integers, got dtype {actions.dtype}")
        actions = actions.astype(np.int64, copy=False)
    actions = actions.reshape(n, *spec.action_shape)
    if spec.discrete and (actions.min() < 0 or actions.max() >= spec.n_actions):
        raise ValueError(f"{where}: actions must be in [0, {spec.n_actions}), got {actions.tolist()}")
    if spec.n_choices is not None and ((actions < 0) | (actions >= spec.n_choices)).any():
        raise ValueError(f"{where}: actions must be >= 0 and below {spec.n_choices}, got {actions.tolist()}")
    return actions


def require_bounds(spec: Any, where: str) -> None:
    """Raise ValueError unless the bounds of the environment's continuous actions are finite and apart."""
    low, high = spec.act_low, spec.act_high
    if low is None or high is None:
        return
    with np.errstate(over="ignore", invalid="ignore"):
        width = high - low
    if not (np.isfinite(width) & (width > 0)).all():
        raise ValueError(
            f"{where}: the bounds of the environment's actions must be finite and apart, got {low.tolist()} to "
            f"{high.tolist()}; wrap it so that its action_space is such a Box, or take PPO, which needs no bounds"
        )
