"""Any gymnasium environment, N of them stepped in this process, with the arrays of the native `VecEnv`."""

from __future__ import annotations

import functools
import importlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlox import env_state
from rlox.config import nearest
from rlox.envs import EnvSpec, env_name, foreign_id, native_env_ids
from rlox.failures import blame, frames_of
from rlox.gym_answers import NO_ANSWERS, UNANSWERED, blame_env, described
from rlox.kernels.rng import Rng
from rlox.streams import Stream

# Which extra brings the library that a package-less gymnasium id needs; gymnasium names the module it misses.
_EXTRAS = {"Box2D": "box2d", "mujoco": "mujoco", "ale_py": "atari", "opencv": "atari"}

# What `ALE/…` ids get unless told otherwise: up to 30 no-ops, the greater of the last two of 4 frames, 84 x 84 greys,
# 4 of them stacked. A lost life is no end, as Machado et al. 2018 (arXiv:1709.06009, 4.1) advise.
ATARI_WRAPPERS = ("AtariPreprocessing", {"FrameStackObservation": {"stack_size": 4}})

# Wrappers whose effect training would have and evaluation would not, or that step what is stepped here already.
_REFUSED_WRAPPERS = {
    "NormalizeObservation": "its statistics would differ between training and evaluation; use normalize_obs=True",
    "NormalizeReward": "episode returns would no longer be the environment's; use normalize_rewards=True",
    "Autoreset": "episodes restart by themselves here",
}


def register_atari() -> None:
    """Make the ``ALE/…`` ids known to gymnasium.

    Raises
    ------
    ImportError
        If ale-py is not installed; names the extra that brings it.
    """
    try:
        import ale_py
    except ImportError as e:
        raise ImportError('ALE environments need ale-py, which is not installed; pip install "rlox-cli[atari]"') from e
    import gymnasium

    gymnasium.register_envs(ale_py)
    # Its banner would stand between the lines of whatever this process prints.
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)


def make_gym_env(env: Any, kwargs: dict[str, Any] | None = None, wrappers: Sequence[Any] = ()):
    """One gymnasium environment.

    Parameters
    ----------
    env : str, callable or gymnasium.Env
        An id, a callable that returns an environment, or an environment (which only gets the wrappers).
    kwargs : dict, optional
        Arguments of ``gymnasium.make`` or of the callable.
    wrappers : sequence
        Innermost first; each the name of one in ``gymnasium.wrappers``, a path such as
        ``my_package.wrappers:Mine``, or ``{name or path: {argument: value}}`` (a list arrives as a tuple). Ids of
        ``ALE/…`` get `ATARI_WRAPPERS` where none are given.

    Raises
    ------
    ValueError
        If the id or a wrapper is unknown (with the nearest known one), or refuses its arguments.
    ImportError
        If something is needed that is not installed; names the extra that brings it.
    TypeError
        If `env` or a wrapper is nothing of the above.
    """
    if isinstance(wrappers, (str, Mapping)):
        raise TypeError(f"make_gym_env: wrappers must be a list, got {wrappers!r}")
    try:
        return _made(env, kwargs, wrappers)
    except Exception as e:
        # What is refused here, and a package that is missing, name what is at fault themselves.
        if frames_of(e.__traceback__)[-1].module != "rlox" and not isinstance(e, ImportError):
            blame(e, f"making environment {env_name(env)}")
        raise


def _made(env: Any, kwargs: dict[str, Any] | None, wrappers: Sequence[Any]):
    import gymnasium

    if isinstance(env, gymnasium.Env):
        if kwargs:
            raise ValueError(
                f"make_gym_env: kwargs must be empty for an environment that is made already, got {kwargs}"
            )
        made = env
    elif isinstance(env, str):
        env = foreign_id(env)
        kwargs = dict(kwargs or {})
        if env.startswith("ALE/"):
            register_atari()
            wrappers = wrappers or ATARI_WRAPPERS
            if any(_parted(item)[0] == "AtariPreprocessing" for item in wrappers):
                kwargs.setdefault("frameskip", 1)  # the wrapper skips frames itself
        made = _from_id(env, kwargs)
    elif callable(env):
        made = env(**(kwargs or {}))
        if not isinstance(made, gymnasium.Env):
            raise TypeError(f"make_gym_env: env must return a gymnasium.Env, got {type(made).__name__}")
    else:
        raise TypeError(f"make_gym_env: env must be an id, a callable or a gymnasium.Env, got {env!r}")
    for item in wrappers:
        made = _wrapped(made, item)
    return made


def whole_games(wrappers: Sequence[Any]) -> list[Any]:
    """`wrappers` without what ends an episode where a life is lost: for scores, which are of whole games."""
    found = []
    for item in wrappers:
        name, arguments = _parted(item)
        ends = name == "AtariPreprocessing" and arguments.pop("terminal_on_life_loss", False)
        found.append({name: arguments} if ends else item)
    return found


def make_fresh_gym_env(env: Any, kwargs: dict[str, Any] | None = None, wrappers: Sequence[Any] = ()):
    """As `make_gym_env`, but an environment object is made anew from its spec, so that the given one stays as it is.

    Raises
    ------
    ValueError
        If the object has no spec that ``gymnasium.make`` can repeat.
    """
    import gymnasium

    if not isinstance(env, gymnasium.Env):
        return make_gym_env(env, kwargs, wrappers)
    try:
        if env.spec is None:
            raise ValueError("it has no spec")
        made = gymnasium.make(env.spec, **(kwargs or {}))
    except Exception as e:
        raise ValueError(
            f"make_fresh_gym_env: env must be an id or a callable here, got an environment ({type(env).__name__}) of "
            f"which no other can be made: {e}; pass lambda: {type(env.unwrapped).__name__}(...) instead"
        ) from e
    return make_gym_env(made, None, wrappers)


def _from_id(env: str, kwargs: dict[str, Any]):
    import gymnasium
    from gymnasium import error

    try:
        return gymnasium.make(env, **kwargs)
    except error.Error as e:
        if isinstance(e, error.DependencyNotInstalled) or isinstance(e.__cause__, ImportError):
            raise _missing(env, f"{e} {e.__cause__ or ''}") from e
        # One that is registered may itself make others that are not.
        if isinstance(e, error.UnregisteredEnv) and env.rpartition(":")[2] not in gymnasium.registry:
            raise ValueError(f"make_gym_env: env must be a registered id, got {env!r}; {_nearest_id(env)}") from e
        raise ValueError(f"make_gym_env: {env} cannot be made: {e}") from e
    except TypeError as e:
        raise ValueError(f"make_gym_env: {env} does not take kwargs {kwargs!r}: {e}") from e


def _missing(what: str, text: str) -> ImportError:
    extra = next((extra for module, extra in _EXTRAS.items() if module.lower() in text.lower()), None)
    remedy = f'pip install "rlox-cli[{extra}]"' if extra else text.strip()
    return ImportError(f"make_gym_env: {what} needs a package that is not installed; {remedy}")


def _nearest_id(env: str) -> str:
    import gymnasium

    known = [name for name in gymnasium.registry if not name.startswith("rlox/") or env.startswith("rlox/")]
    hint = nearest(env, [*native_env_ids(), *known])
    return hint if hint.startswith("did") else "`rlox ls envs` lists the ids"


def _parted(item: Any) -> tuple[str, dict[str, Any]]:
    """Name and arguments of one item of `wrappers`."""
    if isinstance(item, Mapping):
        arguments = next(iter(item.values()), None)
        if len(item) == 1 and (arguments is None or isinstance(arguments, Mapping)):
            given = {key: tuple(v) if isinstance(v, list) else v for key, v in (arguments or {}).items()}
            return str(next(iter(item))), given
    elif isinstance(item, str):
        return item, {}
    raise TypeError(
        f"make_gym_env: each of wrappers must be a name or {{name: {{argument: value}}}}, got {item!r}; what a name "
        "cannot say, a callable as env can"
    )


def _wrapper_class(name: str) -> Callable[..., Any]:
    from gymnasium import wrappers

    module, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    if not module:
        if name in _REFUSED_WRAPPERS:
            raise ValueError(f"make_gym_env: wrappers must not hold {name}: {_REFUSED_WRAPPERS[name]}")
        known = [n for n in wrappers.__all__ if n[0].isupper()]
        if name not in known:
            raise ValueError(
                f"make_gym_env: wrappers must be names of gymnasium.wrappers or paths package.module:Name, got "
                f"{name!r}; {nearest(name, known)}"
            )
        return getattr(wrappers, name)
    try:
        return functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
    except ImportError as e:
        raise ImportError(f"make_gym_env: wrapper {name!r} cannot be imported: {e}") from e
    except AttributeError as e:
        public = [n for n in vars(importlib.import_module(module)) if not n.startswith("_")]
        raise ValueError(
            f"make_gym_env: wrapper {name!r} does not exist in {module}; {nearest(attribute, public)}"
        ) from e


def _wrapped(env, item: Any):
    import gymnasium

    name, arguments = _parted(item)
    wrapper = _wrapper_class(name)
    try:
        made = wrapper(env, **arguments)
    except gymnasium.error.DependencyNotInstalled as e:
        raise _missing(f"wrapper {name}", str(e)) from e
    except (TypeError, ValueError, AssertionError, gymnasium.error.Error) as e:
        raise ValueError(f"make_gym_env: wrapper {name} refuses {env} with {arguments!r}: {e}") from e
    if not isinstance(made, gymnasium.Env):
        raise TypeError(f"make_gym_env: wrapper {name} must return a gymnasium.Env, got {type(made).__name__}")
    return made


class SpaceAdapter:
    """Between what one gymnasium environment observes and takes, and the arrays that an `EnvSpec` describes.

    - Observations: Box becomes (D,) float32, flattened if it has more dimensions; Discrete, MultiDiscrete,
      MultiBinary, Dict and Tuple as ``gymnasium.spaces.flatten`` does (choices one-hot). A uint8 Box of three
      dimensions is an image, of four a stack of images: (C, H, W) uint8, the frames of a stack one after the other
      in C. Where the channels are is told by size: the smaller of first and last dimension. A Dict or Tuple of one
      part is that part.
    - Actions: Discrete is an integer from 0; MultiDiscrete and MultiBinary K integers from 0; Box (A,) float32 in the
      environment's own units.

    Raises
    ------
    ValueError
        For any other space, with the remedy.
    """

    def __init__(self, obs_space, act_space, where: str = "SpaceAdapter"):
        self._where = where
        obs_shape, obs_dtype, self.observe = _observer(obs_space, where)
        unscaled = _bytes_shape(obs_space)
        from gymnasium import spaces

        if isinstance(act_space, spaces.Discrete):
            first = int(act_space.start)
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
            with np.errstate(over="ignore"):
                low, high = (bound.ravel().astype(np.float32) for bound in (act_space.low, act_space.high))
            bounds = {"act_low": low, "act_high": high}
            self.spec = EnvSpec(obs_shape, obs_dtype, act_dim=low.size, **bounds, obs_bytes=unscaled)
            # A copy: an environment may keep or change what it is given.
            self.to_env = lambda action: action.reshape(shape).astype(dtype)
        else:
            raise ValueError(
                f"{where}: the action space must be Discrete, MultiDiscrete, MultiBinary or a Box of floats, got "
                f"{act_space}; pass a callable that wraps the environment in "
                "gymnasium.wrappers.TransformAction(env, func, action_space), or name a wrapper of your own"
            )
        self.spec = replace(self.spec, parts=tuple(_parts(obs_space)))
        self._plain_shape = None if self.spec.image else obs_shape

    def row(self, obs: Any) -> Any:
        """`observe`, where assigning the result to a row of an array could not bend it, or lose a part of it, silently.

        Raises
        ------
        ValueError
            For another shape, and for an image of floats.
        """
        obs, spec = self.observe(obs), self.spec
        if type(obs) is np.ndarray and obs.shape == self._plain_shape and obs.dtype.kind in "fiub":
            return obs
        array = np.asarray(obs)
        if array.shape != spec.obs_shape or array.dtype.kind not in ("iub" if spec.image else "fiub"):
            raise ValueError(
                f"{self._where}: observations must have shape {spec.obs_shape} and dtype {np.dtype(spec.obs_dtype)}, "
                f"as the space says, got {described(obs)}"
            )
        return obs


def _parts(space, key: str = "") -> Iterator[tuple[str, int]]:
    """The keys of a Dict's or Tuple's parts, a part's own parts behind a dot, with the numbers that each becomes."""
    from gymnasium import spaces

    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        items = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        for name, part in items:
            yield from _parts(part, f"{key}.{name}" if key else str(name))
    elif key:
        yield key, spaces.flatdim(space)


def _observer(space, where: str) -> tuple[tuple[int, ...], type, Callable[[Any], Any]]:
    """Shape, dtype and the function that makes such an array of an observation."""
    from gymnasium import spaces

    if isinstance(space, (spaces.Dict, spaces.Tuple)) and len(space.spaces) == 1:
        key = next(iter(space.spaces)) if isinstance(space, spaces.Dict) else 0
        shape, dtype, inner = _observer(space[key], where)
        return shape, dtype, lambda obs: inner(obs[key])
    if _is_image(space):
        return _image_observer(space.shape)
    if isinstance(space, spaces.Box):
        if len(space.shape) == 1:
            return space.shape, np.float32, lambda obs: obs
        return (math.prod(space.shape),), np.float32, lambda obs: np.asarray(obs).reshape(-1)
    if _holds_image(space):
        raise ValueError(
            f"{where}: the observation space must not mix images with other parts, got {space}; keep the image or the "
            "rest with the wrapper {FilterObservation: {filter_keys: [...]}}"
        )
    if not space.is_np_flattenable:
        raise ValueError(
            f"{where}: the observation space must be one that gymnasium.spaces.flatten makes a vector of, got {space}; "
            "pass a callable that wraps the environment in "
            "gymnasium.wrappers.TransformObservation(env, func, observation_space), or name a wrapper of your own"
        )
    return (spaces.flatdim(space),), np.float32, functools.partial(spaces.flatten, space)


def _is_image(space) -> bool:
    from gymnasium import spaces

    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) in (3, 4)


def _bytes_shape(space) -> tuple[int, ...] | None:
    """Shape of a Box of bytes that is no image; None for any other space."""
    from gymnasium import spaces

    whole = isinstance(space, spaces.Box) and space.dtype == np.uint8 and not _is_image(space)
    return space.shape if whole and space.high.max(initial=0) == 255 else None


def _holds_image(space) -> bool:
    from gymnasium import spaces

    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        parts = space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces
        return any(_holds_image(part) for part in parts)
    return _is_image(space)


def _image_observer(shape: tuple[int, ...]) -> tuple[tuple[int, ...], type, Callable[[Any], Any]]:
    *stack, first, _, last = shape
    channels_last = last < first
    *_, c, h, w = (*stack, last, *shape[-3:-1]) if channels_last else shape
    out = (math.prod(stack) * c, h, w)

    def observe(obs: Any) -> np.ndarray:
        frames = np.asarray(obs)
        return (np.moveaxis(frames, -1, -3) if channels_last else frames).reshape(out)

    return out, np.uint8, observe


def checked_actions(spec: EnvSpec, actions: Any, n: int, where: str) -> np.ndarray:
    """`actions` of N environments as (N,) or (N, K) int64 or (N, A) f32.

    Raises
    ------
    TypeError
        For choices that are no integers.
    ValueError
        For another number of actions, one out of range, or one that is not a number.
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


def step_arrays(spec: EnvSpec, n: int) -> dict[str, tuple[tuple[int, ...], type]]:
    """Shape and dtype of everything that ``step_all`` of N foreign environments returns."""
    return {
        "obs": ((n, *spec.obs_shape), spec.obs_dtype),
        "rewards": ((n,), np.float64),
        "terminated": ((n,), np.bool_),
        "truncated": ((n,), np.bool_),
        "final_obs": ((n, *spec.obs_shape), spec.obs_dtype),
        "episode_return": ((n,), np.float64),
        "episode_length": ((n,), np.int64),
    }


class EnvGroup:
    """Environments stepped one after the other into the rows of arrays: auto-reset and episode statistics.

    Parameters
    ----------
    env, kwargs, wrappers
        What `make_gym_env` takes.
    n : int
        How many.
    where : str
        Whom errors name.
    first : int
        The number of the first one, as errors count them.
    process : str
        Which process steps them, where it is another than that of the training.
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
    ):
        from gymnasium.wrappers import FrameStackObservation

        self.where, self._first = f"{where}: {env_name(env)}", first
        self._name = ", ".join(filter(None, [env_name(env), process]))
        self.at = 0  # the environment that is being made, reset or stepped
        self.envs: list[Any] = []
        for self.at in range(n):
            self.envs.append(make_gym_env(env, kwargs, wrappers))
        obs_space, act_space = self.envs[0].observation_space, self.envs[0].action_space
        self.adapter = SpaceAdapter(obs_space, act_space, where)
        for other in self.envs:
            if other.observation_space != obs_space or other.action_space != act_space:
                raise ValueError(
                    f"{where}: all environments must have the spaces {obs_space} and {act_space} of the first, got "
                    f"{other.observation_space} and {other.action_space}"
                )
        if self.adapter.spec.image and all(isinstance(e, FrameStackObservation) for e in self.envs):
            self.adapter.spec = replace(self.adapter.spec, n_stacked=self.envs[0].stack_size)
        self._returns = [0.0] * n
        self._lengths = [0] * n
        self.return_queue: deque[float] = deque(maxlen=100)  # of the last episodes that ended, undiscounted
        self.length_queue: deque[int] = deque(maxlen=100)  # steps
        self.stacks = [env_state.stack_of(e) for e in self.envs]
        self.why_not = next(filter(None, map(env_state.why_not, self.envs)), None)  # why they cannot be restored

    def get_state(self) -> tuple[list[Any], bytes] | None:
        """What `env_state.encode` makes of each environment and its running episode; None where `why_not` says so."""
        nodes, data = [], bytearray()
        if self.why_not is not None:
            return None
        try:
            for i, env in enumerate(self.envs):
                self.at = i
                running = {"return": self._returns[i], "length": self._lengths[i]}
                state = {"env": env_state.get_env_state(env), **running}
                nodes.append(env_state.encode(state, data))
        except env_state.UnsavableState as e:
            self.why_not = str(e)
            return None
        return nodes, bytes(data)

    def set_state(self, states: Sequence[Any]) -> None:
        """Go on from what `env_state.unpack` found for each environment.

        Raises
        ------
        ValueError
            If one is no state of the environment.
        """
        for i, (env, state) in enumerate(zip(self.envs, states, strict=True)):
            self.at = i
            if not isinstance(state, dict) or type(state.get("return")) is not float:
                raise ValueError(f"{self.where}: a state must hold the return so far, got {repr(state)[:80]}")
            try:
                self._lengths[i] = env_state.count(state.get("length"), "the length so far")
                env_state.set_env_state(env, state.get("env"))
            except ValueError as e:
                raise ValueError(f"{self.where}: {e}") from e
            self._returns[i] = state["return"]

    def reset(self, seeds: Sequence[int | None], obs_out: np.ndarray) -> None:
        """Start a new episode everywhere; write (n, …) first observations."""
        for self.at, seed in enumerate(seeds):
            self._start(self.at, seed, obs_out)

    def _start(self, i: int, seed: int | None, obs_out: np.ndarray | None) -> None:
        answer = UNANSWERED
        try:
            answer = self.envs[i].reset(seed=seed)
            obs, _ = answer
            obs = self.adapter.row(obs)
            if obs_out is not None:
                obs_out[i] = obs
        except (Exception, SystemExit) as e:
            self._blame("reset", e, answer)
            raise
        self._returns[i], self._lengths[i] = 0.0, 0

    def step(self, actions: np.ndarray, out: Mapping[str, np.ndarray]) -> None:
        """Take one step each; fill those arrays of `step_arrays` that `out` holds."""
        row_of, to_env = self.adapter.row, self.adapter.to_env
        obs_out, final_out = out.get("obs"), out.get("final_obs")
        numbers = [out.get(key) for key in ("rewards", "terminated", "truncated", "episode_return", "episode_length")]
        answer = UNANSWERED
        try:
            for i, env in enumerate(self.envs):
                self.at, answer = i, UNANSWERED
                answer = env.step(to_env(actions[i]))
                obs, reward, terminated, truncated, _ = answer
                if not NO_ANSWERS.isdisjoint((type(reward), type(terminated), type(truncated))):
                    raise TypeError("step must return a number and two flags")
                reward = float(reward)
                self._returns[i] += reward
                self._lengths[i] += 1
                row = (reward, terminated, truncated, self._returns[i], self._lengths[i])
                for array, value in zip(numbers, row, strict=True):
                    if array is not None:
                        array[i] = value
                # Written before the reset, which may reuse the environment's own array.
                obs = row_of(obs)
                if final_out is not None:
                    final_out[i] = obs
                if terminated or truncated:
                    self.return_queue.append(self._returns[i])
                    self.length_queue.append(self._lengths[i])
                    self._start(i, None, obs_out)
                elif obs_out is not None:
                    obs_out[i] = obs
        except (Exception, SystemExit) as e:
            self._blame("step", e, answer, actions[self.at])
            raise

    def _blame(self, hook: str, e: BaseException, answer: Any, action: Any = None) -> None:
        at, action = self.at, None if action is None else self.adapter.to_env(action)
        blame_env(
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
        for env in self.envs:
            env.close()


class Count(int):
    """A number that can be called as well: ``num_envs`` is gymnasium's attribute and the documents' method."""

    def __call__(self) -> int:
        return int(self)


class ForeignVecEnv:
    """What `GymVecEnv` and `ParallelGymVecEnv` share: the arrays that go in and come out.

    Attributes
    ----------
    spec : EnvSpec
        Shapes, sizes and bounds; `obs_dim`, `discrete`, `n_actions`, `act_dim`, `act_low` and `act_high` are its own.
    why_not : str, optional
        Why the environments cannot be saved and restored exactly (see `rlox.env_state`); None where they can.
    """

    spec: EnvSpec
    why_not: str | None
    _stacks: list[list[str]]

    def __init__(self, env_id: Any, n_envs: int, seed: int):
        if n_envs < 1:
            raise ValueError(f"{type(self).__name__}: n_envs must be >= 1, got {n_envs}")
        self.env_id = env_id
        self.n_envs = n_envs
        self._seed = seed
        self._started = False
        self._at_rest = False  # whether all are open, and have taken equally many steps since they started

    def __len__(self) -> int:
        return self.n_envs

    @property
    def num_envs(self) -> Count:
        """`n_envs` by gymnasium's word."""
        return Count(self.n_envs)

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def obs_dim(self) -> int:
        return self.spec.obs_dim

    @property
    def discrete(self) -> bool:
        return self.spec.discrete

    @property
    def n_actions(self) -> int | None:
        return self.spec.n_actions

    @property
    def act_dim(self) -> int | None:
        return self.spec.act_dim

    @property
    def act_low(self) -> np.ndarray | None:
        return self.spec.act_low

    @property
    def act_high(self) -> np.ndarray | None:
        return self.spec.act_high

    def reset_all(self, seed: int | None = None) -> np.ndarray:
        """Start a new episode everywhere; the first call seeds the copies, a later one only with `seed`.

        Returns (N, D) f32, or (N, C, H, W) uint8 images.
        """
        if seed is not None:
            self._seed = seed
        seeds: list[int | None] = [None] * self.n_envs
        if seed is not None or not self._started:
            seeds = Rng(self._seed, Stream.FOREIGN_ENVS).integers(2**31, self.n_envs).tolist()
        obs = np.empty((self.n_envs, *self.spec.obs_shape), self.spec.obs_dtype)
        self._at_rest = False
        self._reset(seeds, obs)
        self._started = self._at_rest = True
        return obs

    def step_all(self, actions, out: dict[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
        """Step every copy once; the first call starts the first episodes if `reset_all` did not.

        Parameters
        ----------
        actions : sequence or array
            (N,) integers for Discrete actions, (N, K) integers for MultiDiscrete ones, (N, A) floats for Box, in the
            environment's units and not clipped here. Integers count from 0, whatever the space's start.
        out : dict, optional
            Arrays to write into, by key; only these keys are filled, and `out` is returned.

        Returns
        -------
        dict
            ``obs`` (N, D) f32 or (N, C, H, W) uint8, of the next episode where one ended; ``rewards`` (N,) f64;
            ``terminated`` and ``truncated`` (N,) bool; ``final_obs`` like ``obs``, what each step really led to;
            ``episode_return`` (N,) f64 and ``episode_length`` (N,) int64, totals of the episode the step belongs to.

        Raises
        ------
        ValueError
            For a wrong number of actions, or an action out of range.
        TypeError
            For discrete actions that are no integers.
        """
        actions = checked_actions(self.spec, actions, self.n_envs, f"{type(self).__name__}.step_all")
        if not self._started:
            self.reset_all()
        if out is None:
            out = {key: np.empty(*like) for key, like in step_arrays(self.spec, self.n_envs).items()}
        at_rest, self._at_rest = self._at_rest, False
        self._step(actions, out)
        self._at_rest = at_rest
        return out

    def get_state(self) -> dict[str, np.ndarray] | None:
        """Everything that the future of the episodes that are running depends on.

        None before there are any, after `close` or a step that failed, and where `why_not` says so.
        """
        found = self._get_state() if self._at_rest and self.why_not is None else None
        return None if found is None else env_state.pack(self._stacks, *found)

    def fits(self, state: dict[str, np.ndarray]) -> bool:
        """Whether `state` is of environments such as these, so that `set_state` is worth trying.

        Raises
        ------
        ValueError
            If it is damaged.
        """
        return self.why_not is None and env_state.fits(state, self._stacks)

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Continue exactly from what `get_state` returned, in this process or another, with workers or without.

        Raises
        ------
        ValueError
            If it is no state of such environments, or damaged. They are then to be reset with a seed before use.
        """
        if self.why_not is not None:
            raise ValueError(
                f"{type(self).__name__}.set_state: {env_name(self.env_id)} must be restorable, but {self.why_not}"
            )
        try:
            states = env_state.unpack(state, self._stacks)
        except ValueError as e:
            raise ValueError(f"{type(self).__name__}.set_state: {e}") from e
        self._started = self._at_rest = False
        self._set_state(states)
        self._started = self._at_rest = True

    def close(self) -> None:
        """End the environments; may be called again."""
        self._at_rest = False
        self._close()


class GymVecEnv(ForeignVecEnv):
    """N copies of a gymnasium environment in this process, with same-step auto-reset.

    Parameters
    ----------
    env_id : str, callable or gymnasium.Env
        A gymnasium id, a callable that returns a ``gymnasium.Env``, or (for `n_envs` 1) such an environment, which
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
        Of one environment, also by gymnasium's names ``single_observation_space`` and ``single_action_space``; what
        `reset_all` and `step_all` give and take are arrays that `spec` describes.
    return_queue, length_queue : deque
        Undiscounted returns and steps of the last 100 episodes that ended, by gymnasium's names; `episode_rewards` and
        `episode_lengths` are the same as lists.

    Raises
    ------
    ValueError
        For spaces that `SpaceAdapter` does not serve.
    """

    def __init__(
        self,
        env_id: str | Callable[..., Any],
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
        self._group = EnvGroup(env_id, kwargs, wrappers, n_envs, "GymVecEnv")
        self.envs = self._group.envs
        self.observation_space = self.single_observation_space = self.envs[0].observation_space
        self.action_space = self.single_action_space = self.envs[0].action_space
        self.return_queue, self.length_queue = self._group.return_queue, self._group.length_queue
        self.spec = self._group.adapter.spec
        self.why_not, self._stacks = self._group.why_not, self._group.stacks

    @property
    def episode_rewards(self) -> list[float]:
        """Undiscounted returns of the last 100 episodes that ended."""
        return list(self.return_queue)

    @property
    def episode_lengths(self) -> list[int]:
        """Steps of the last 100 episodes that ended."""
        return list(self.length_queue)

    def _get_state(self) -> tuple[list[Any], bytes] | None:
        found, self.why_not = self._group.get_state(), self._group.why_not
        return found

    def _set_state(self, states: list[Any]) -> None:
        self._group.set_state(states)

    def _reset(self, seeds: list[int | None], obs: np.ndarray) -> None:
        self._group.reset(seeds, obs)

    def _step(self, actions: np.ndarray, out: dict[str, np.ndarray]) -> None:
        self._group.step(actions, out)

    def _close(self) -> None:
        if not self._borrowed:
            self._group.close()
