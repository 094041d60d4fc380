"""State of foreign environments: which ones can be saved and restored exactly, and how checkpoints store it.

An environment can be restored if each of its layers, that is the environment itself and its wrappers, is one of these:

- gymnasium's classic control environments, and its MuJoCo environments v4 and v5. The generator of the innermost layer
  (``np_random``, a PCG64) is saved with every environment.
- gymnasium's TimeLimit, OrderEnforcing, PassiveEnvChecker, ClipAction, RescaleAction and FlattenObservation.
- The environments of mpe2 with the wrappers that ``parallel_env`` adds.
- Any layer whose class has the methods ``get_state()`` and ``set_state(state)``. ``get_state`` is called while an
  episode is running, and returns everything that the layer's future depends on, except ``np_random``. ``set_state`` is
  called on a layer that was created in the same way and may not have been reset, which must then continue from this
  state, bit for bit. Values are None, booleans, numbers, strings, NumPy arrays and scalars of numbers or booleans, and
  lists and dicts (with string keys) of these. A tuple is restored as a list, and an array without dimensions as a
  scalar. The methods of a wrapper cover only the wrapper.

A subclass counts as its own class. An environment with any other layer starts new episodes instead. A group of
environments is saved as two arrays of bytes: JSON, and the contents of all arrays that it names, one after the other.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlox.checkpoint.streams import Stream
from rlox.config.arguments import warn_renamed
from rlox.envs.registry import env_name
from rlox.kernels.rng import Rng

_JSON, _DATA = "env_json", "env_data"
_MOST_LEVELS = 100  # of lists and dicts in the state of an environment
_FORMER = {"rlox.envs.memory_tasks": "rlox.world_models.tasks"}  # modules that checkpoints know by another name
_DTYPES = {np.dtype(t).name: np.dtype(t) for t in (*"bhilqBHILQefd", np.bool_)}
_MPE_CLASS = re.compile(r"mpe2\.\w+\.\w+\.raw_env")
_MUJOCO_CLASS = re.compile(r"gymnasium\.envs\.mujoco\.\w+_v[45]\.\w+")
# Results of MuJoCo that a step reads before it computes them again: the positions of bodies at the end of the previous
# step. `mj_step` leaves them as they were before its last integration, so `mj_forward` cannot restore them.
_MUJOCO_RESULTS = ("xpos", "xipos")


class UnsavableState(Exception):
    """An environment contains something that a checkpoint cannot store; the message gives the reason."""


@dataclass(frozen=True)
class _Part:
    """Functions that read and restore the state of one layer; `put` raises ValueError for an impossible state."""

    get: Callable[[Any], Any]
    put: Callable[[Any, Any], None]


def _numbers(value: Any, like: np.ndarray, name: str) -> np.ndarray:
    if not isinstance(value, np.ndarray) or value.dtype != like.dtype or value.shape != like.shape:
        got = f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else repr(value)[:80]
        raise ValueError(f"{name} must be an array of {like.dtype} {like.shape}, got {got}")
    return value


def count(value: Any, name: str) -> int:
    """Return `value` if it is an integer >= 0, otherwise raise a ValueError with its `name`."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{name} must be an integer >= 0, got {repr(value)[:80]}")
    return value


def _put_elapsed(limit: Any, state: Any) -> None:
    limit._elapsed_steps = count(state, "the steps of TimeLimit")


def _put_checked(checker: Any, state: Any) -> None:
    # It only checks the first reset and steps, which happened in the saved run.
    checker.checked_reset = checker.checked_step = checker.checked_data_reuse = True


def _classic(size: int, bound: float = math.inf, **others: Any) -> _Part:
    """Return the `_Part` of an environment whose ``state`` has `size` numbers within `bound`.

    `others` are attributes and their values during an episode.
    """

    def put(env: Any, state: Any) -> None:
        name = f"the state of {type(env).__name__}"
        dtype = np.float32 if getattr(state, "dtype", None) == np.float32 else np.float64
        numbers = _numbers(state, np.empty(size, dtype), name)
        if not (np.isfinite(numbers) & (np.abs(numbers) <= bound)).all():
            raise ValueError(f"{name} must be finite and within {bound}, got {numbers.tolist()}")
        env.state = numbers
        for attribute, value in others.items():
            setattr(env, attribute, value)

    return _Part(lambda env: np.array(env.state), put)


def _get_mujoco(env: Any) -> dict[str, np.ndarray]:
    import mujoco

    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    state = np.empty(mujoco.mj_stateSize(env.model, kind))
    mujoco.mj_getState(env.model, env.data, state, kind)
    return {"integration": state, **{name: getattr(env.data, name).copy() for name in _MUJOCO_RESULTS}}


def _put_mujoco(env: Any, state: Any) -> None:
    import mujoco

    name = f"the state of {type(env).__name__}"
    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    likes = {"integration": np.empty(mujoco.mj_stateSize(env.model, kind))}
    likes.update({field: getattr(env.data, field) for field in _MUJOCO_RESULTS})
    if not isinstance(state, dict) or set(state) != set(likes):
        raise ValueError(f"{name} must contain {', '.join(likes)}, got {repr(state)[:80]}")
    for field, like in likes.items():
        _numbers(state[field], like, f"{name}, of this MuJoCo and model: {field}")
    mujoco.mj_setState(env.model, env.data, state["integration"], kind)
    for field in _MUJOCO_RESULTS:
        likes[field][...] = state[field]


def _mpe_objects(env: Any) -> dict[str, Any]:
    """Return all objects of an mpe2 scenario and its world, by name."""
    parts = {"scenario": env.scenario, "world": env.world}
    for kind in ("agents", "landmarks"):
        for k, entity in enumerate(getattr(env.world, kind)):
            parts |= {f"{kind}.{k}": entity, f"{kind}.{k}.state": entity.state}
            if kind == "agents":
                parts[f"{kind}.{k}.action"] = entity.action
    return parts


def _get_mpe(env: Any) -> dict[str, Any]:
    objects = _mpe_objects(env)
    names = {id(thing): name for name, thing in objects.items()}

    def plain(value: Any) -> Any:
        if id(value) in names:
            return {"is": names[id(value)]}
        if isinstance(value, np.random.Generator):
            return {"draws": _bits(value, "of mpe2's world")}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        if isinstance(value, dict):
            raise UnsavableState("mpe2's world contains a dict")
        return value

    fields = {
        name: {key: plain(value) for key, value in vars(thing).items() if not callable(value)}
        for name, thing in objects.items()
    }
    bits = _bits(env.np_random, f"of {type(env).__name__}")
    return {"objects": fields, "steps": env.steps, "range": float(env.original_cam_range), "draws": bits}


def _put_mpe(env: Any, state: Any) -> None:
    """Restore an mpe2 environment, which its wrapper has already reset."""
    name = "the state of mpe2's environment"
    objects = _mpe_objects(env)
    if not isinstance(state, dict) or set(state) != {"objects", "steps", "range", "draws"}:
        raise ValueError(f"{name} must contain objects, steps, range and draws, got {repr(state)[:80]}")
    if not isinstance(state["objects"], dict) or set(state["objects"]) != set(objects):
        raise ValueError(f"{name} must contain the objects {', '.join(objects)}, got {repr(state['objects'])[:80]}")

    def back(value: Any, now: Any, where: str) -> Any:
        if isinstance(value, dict):
            if set(value) == {"draws"}:
                return _generator(value["draws"])
            if set(value) != {"is"} or value["is"] not in objects:
                raise ValueError(f"{where} must be one of {', '.join(objects)}, got {repr(value)[:80]}")
            return objects[value["is"]]
        if isinstance(value, list):
            return [back(item, None, where) for item in value]
        if isinstance(now, np.ndarray) and isinstance(value, np.ndarray) and now.shape != value.shape:
            raise ValueError(f"{where} must have shape {now.shape}, got {value.shape}")
        return value

    restored = {}
    for key, thing in objects.items():
        fields, has = state["objects"][key], {k: v for k, v in vars(thing).items() if not callable(v)}
        if not isinstance(fields, dict) or set(fields) != set(has):
            raise ValueError(f"{name}, {key}, must contain {', '.join(has)}, got {repr(fields)[:80]}")
        restored[key] = {k: back(v, has[k], f"{name}, {key}.{k},") for k, v in fields.items()}
    draws, steps = _generator(state["draws"]), count(state["steps"], f"steps in {name}")
    for key, thing in objects.items():
        vars(thing).update(restored[key])
    env.np_random, env.steps, env.original_cam_range = draws, steps, state["range"]


def _bits(generator: Any, whose: str) -> Any:
    """Return the state of a generator, which must be a PCG64."""
    bits = generator.bit_generator.state if hasattr(generator, "bit_generator") else {}
    if bits.get("bit_generator") != "PCG64":
        raise UnsavableState(f"the np_random {whose} is not a PCG64 generator")
    return bits


def _put_pair(layer: Any, state: Any) -> None:
    try:
        layer.set_state(state)
    except Exception as e:
        raise ValueError(f"set_state of {type(layer).__name__} does not accept the saved state: {e}") from e


_STATELESS = _Part(lambda layer: None, lambda layer, state: None)
_PAIR = _Part(lambda layer: layer.get_state(), _put_pair)
_MPE = _Part(_get_mpe, _put_mpe)
_MUJOCO = _Part(_get_mujoco, _put_mujoco)
_WRAPPERS, _CLASSIC = "gymnasium.wrappers.", "gymnasium.envs.classic_control."
_ZOO = "pettingzoo.utils."
_KNOWN = {
    f"{_WRAPPERS}common.TimeLimit": _Part(lambda limit: int(limit._elapsed_steps), _put_elapsed),
    f"{_WRAPPERS}common.OrderEnforcing": _Part(lambda layer: None, lambda layer, _: setattr(layer, "_has_reset", True)),
    f"{_WRAPPERS}common.PassiveEnvChecker": _Part(lambda layer: None, _put_checked),
    f"{_WRAPPERS}transform_action.ClipAction": _STATELESS,
    f"{_WRAPPERS}transform_action.RescaleAction": _STATELESS,
    f"{_WRAPPERS}transform_observation.FlattenObservation": _STATELESS,
    f"{_CLASSIC}cartpole.CartPoleEnv": _classic(4, steps_beyond_terminated=None),
    f"{_CLASSIC}pendulum.PendulumEnv": _classic(2, last_u=None),
    # Acrobot wraps its angles in a loop, which would run forever on a large number.
    f"{_CLASSIC}acrobot.AcrobotEnv": _classic(4, 100.0),
    f"{_CLASSIC}mountain_car.MountainCarEnv": _classic(2),
    f"{_CLASSIC}continuous_mountain_car.Continuous_MountainCarEnv": _classic(2),
    # The reset starts an episode in all layers below; their states are restored after it.
    f"{_ZOO}conversions.aec_to_parallel_wrapper": _Part(lambda layer: None, lambda layer, _: layer.reset(seed=0)),
    f"{_ZOO}wrappers.order_enforcing.OrderEnforcingWrapper": _STATELESS,
    f"{_ZOO}wrappers.assert_out_of_bounds.AssertOutOfBoundsWrapper": _STATELESS,
    f"{_ZOO}wrappers.clip_out_of_bounds.ClipOutOfBoundsWrapper": _STATELESS,
}


def _layers(env: Any) -> list[Any]:
    """Return the environment and everything that it wraps, from outside to inside."""
    layers = [env]
    while (inner := _inside(layers[-1])) is not None:
        layers.append(inner)
    return layers


def _inside(layer: Any) -> Any:
    """Return what a wrapper of gymnasium or PettingZoo wraps; None for an environment."""
    import gymnasium

    if isinstance(layer, gymnasium.Wrapper):
        return layer.env
    zoo = sys.modules.get("pettingzoo.utils")  # imported if there is such a wrapper
    if zoo is not None and isinstance(layer, (zoo.BaseWrapper, zoo.BaseParallelWrapper)):
        return layer.env
    return getattr(layer, "aec_env", None) if _path(layer) == f"{_ZOO}conversions.aec_to_parallel_wrapper" else None


def _path(layer: Any) -> str:
    module = type(layer).__module__
    return f"{_FORMER.get(module, module)}.{type(layer).__qualname__}"


def _takes(function: Any, n: int) -> bool:
    """Whether `function` can be called with `n` arguments; gymnasium's MujocoEnv has a ``set_state(qpos, qvel)``."""
    try:
        inspect.signature(function).bind(*[None] * n)
    except (TypeError, ValueError):
        return False
    return True


def _part(layer: Any) -> _Part | None:
    path, cls = _path(layer), type(layer)
    if path in _KNOWN:
        return _KNOWN[path]
    if _MUJOCO_CLASS.fullmatch(path):
        return _MUJOCO
    if _MPE_CLASS.fullmatch(path):
        return _MPE
    getter, setter = getattr(cls, "get_state", None), getattr(cls, "set_state", None)
    return _PAIR if _takes(getter, 1) and _takes(setter, 2) else None


def _parts(layers: list[Any]) -> list[_Part]:
    """Return `_part` of each layer; all of them must be restorable."""
    return [part for layer in layers if (part := _part(layer)) is not None]


def stack_of(env: Any) -> list[str]:
    """Return the class names of all layers of `env`, from outside to inside: a state only fits an equal stack."""
    return [_path(layer) for layer in _layers(env)]


def explain_unrestorable(env: Any) -> str | None:
    """Return why `env` cannot be restored exactly; None if it can."""
    for layer in _layers(env):
        if _part(layer) is None:
            return f"{type(layer).__name__} has no get_state() and set_state(state)"
    return None


def get_env_state(env: Any) -> dict[str, Any]:
    """Return everything that the future of `env` depends on. It must have been reset and be restorable."""
    layers = _layers(env)
    generator, bits = getattr(layers[-1], "_np_random", None), None
    if generator is not None:
        bits = _bits(generator, f"of {type(layers[-1]).__name__}")
    states = [part.get(layer) for layer, part in zip(layers, _parts(layers), strict=True)]
    return {"layers": states, "np_random": bits}


def set_env_state(env: Any, state: Any) -> None:
    """Let `env`, which need not have been reset, continue from a state of `get_env_state`; else raise a ValueError."""
    layers = _layers(env)
    states = state.get("layers") if isinstance(state, dict) else None
    if not isinstance(states, list) or len(states) != len(layers):
        raise ValueError(f"the state of {env} must have {len(layers)} layers, got {repr(states)[:80]}")
    for layer, part, saved in zip(layers, _parts(layers), states, strict=True):
        part.put(layer, saved)
    if state.get("np_random") is not None:
        layers[-1].np_random = _generator(state["np_random"])


def _generator(state: Any) -> np.random.Generator:
    try:
        inner = state["state"]
        numbers = [inner["state"], inner["inc"], state["has_uint32"], state["uinteger"]]
        fits = all(type(x) is int and 0 <= x < 2**n for x, n in zip(numbers, (128, 128, 1, 32), strict=True))
        fits = fits and state["bit_generator"] == "PCG64" and inner["inc"] % 2 == 1
    except (TypeError, KeyError):
        fits = False
    if not fits:
        raise ValueError(f"np_random must be the state of a PCG64 generator, got {repr(state)[:200]}")
    bits = np.random.PCG64(0)
    bits.state = state
    return np.random.Generator(bits)


def encode(value: Any, data: bytearray, level: int = 0) -> Any:
    """Convert `value` to JSON types, and append the contents of its arrays to `data`; else raise `UnsavableState`."""
    if level > _MOST_LEVELS:  # too deep to be read again
        raise UnsavableState(f"its state is nested in more than {_MOST_LEVELS} levels")
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        if array.dtype.name not in _DTYPES:
            raise UnsavableState(f"its state contains an array of {array.dtype}")
        data += array.astype(_DTYPES[array.dtype.name], order="C", copy=False).tobytes()
        return {"array": [array.dtype.name, list(array.shape)]}
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise UnsavableState(f"its state contains a dict with a key that is not a string: {list(value)[:5]}")
        return {"dict": {str(key): encode(item, data, level + 1) for key, item in value.items()}}
    if isinstance(value, (list, tuple)):
        return [encode(item, data, level + 1) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise UnsavableState(f"its state contains a {type(value).__name__}")


class _Reader:
    """Reader of the arrays that `encode` appended, in order. It allocates no more memory than there is data."""

    def __init__(self, data: np.ndarray):
        self._data = data
        self._at = 0

    def array(self, dtype: Any, shape: Any) -> Any:
        left = len(self._data) - self._at
        dims = shape if isinstance(shape, list) and len(shape) <= 32 else [-1]
        kind = _DTYPES.get(dtype) if isinstance(dtype, str) else None
        if kind is None or not all(type(d) is int and 0 <= d < 2**31 for d in dims):
            raise ValueError(f"an array must have a known dtype and a shape, got {repr([dtype, shape])[:80]}")
        size = math.prod(dims) * kind.itemsize
        if size > left:
            raise ValueError(f"an array of {dtype} {dims} must have its {size} bytes in {_DATA}, got {left}")
        data = self._data[self._at : self._at + size]
        self._at += size
        # A copy. For bools, any byte becomes a valid bool.
        data = data.astype(np.bool_) if kind == np.bool_ else data.copy().view(kind)
        return data.reshape(dims)[()]

    def decode(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self.decode(item) for item in node]
        if not isinstance(node, dict):
            return node
        (kind, inner), *others = node.items() or [("", None)]
        if kind == "dict" and isinstance(inner, dict) and not others:
            return {key: self.decode(item) for key, item in inner.items()}
        if kind == "array" and isinstance(inner, list) and len(inner) == 2 and not others:
            return self.array(*inner)
        raise ValueError(f"a part of the state must be a dict or an array, got {repr(node)[:80]}")

    def finish(self) -> None:
        if self._at != len(self._data):
            raise ValueError(f"{_DATA} must have {self._at} bytes, got {len(self._data)}")


def pack(stacks: Sequence[list[str]], nodes: Sequence[Any], data: bytes) -> dict[str, np.ndarray]:
    """Convert the encoded states of all environments, in order, to arrays (B,) uint8 for a checkpoint."""
    text = json.dumps({"stacks": list(stacks), "envs": list(nodes)})
    return {_JSON: np.frombuffer(text.encode(), np.uint8), _DATA: np.frombuffer(bytearray(data), np.uint8)}


def fits(state: dict[str, np.ndarray], stacks: Sequence[list[str]]) -> bool:
    """Whether `state` comes from `pack`, for equal stacks of classes; raise a ValueError if it is damaged."""
    return _JSON in state and _read(state)["stacks"] == list(stacks)


def has_part(state: dict[str, np.ndarray], name: str) -> bool:
    """Whether `state`, from `pack`, has the part `name` of every environment; raise a ValueError if it is damaged."""
    nodes = _read(state)["envs"]
    parts = [node.get("dict") if isinstance(node, dict) else None for node in nodes] if isinstance(nodes, list) else []
    return all(isinstance(part, dict) and name in part for part in parts)


def unpack(state: dict[str, np.ndarray], stacks: Sequence[list[str]]) -> list[Any]:
    """Return the state of each environment; raise a ValueError if `state` is damaged or of others."""
    content = _read(state)
    if content["stacks"] != list(stacks):
        raise ValueError(f"the state must be of {len(stacks)} x {stacks[0]}, got {repr(content['stacks'])[:200]}")
    if not isinstance(content["envs"], list) or len(content["envs"]) != len(stacks):
        raise ValueError(f"the state must be of {len(stacks)} environments, got {repr(content['envs'])[:80]}")
    reader = _Reader(_bytes(state, _DATA))
    try:
        states = reader.decode(content["envs"])
    except RecursionError as e:
        raise ValueError(f"{_JSON} must not be nested so deeply") from e
    reader.finish()
    return states


def _bytes(state: dict[str, np.ndarray], name: str) -> np.ndarray:
    array = state.get(name)
    if not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.ndim != 1:
        raise ValueError(f"{name} must be an array (B,) of uint8, got {getattr(array, 'dtype', type(array).__name__)}")
    return array


def _read(state: dict[str, np.ndarray]) -> dict[str, Any]:
    try:
        content = json.loads(_bytes(state, _JSON).tobytes().decode())
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{_JSON} must be JSON: {e}") from e
    if not isinstance(content, dict) or set(content) != {"stacks", "envs"}:
        raise ValueError(f"{_JSON} must contain stacks and envs, got {repr(content)[:80]}")
    return content


class EnvCopies:
    """Environments that are stepped one after the other: their names in messages, and how they are saved.

    `first` is the number of the first one in messages, `process` what steps them if it is not the training process.
    """

    envs: list[Any]
    stacks: list[list[str]]  # classes that each environment is composed of
    unrestorable_reason: str | None  # why they cannot be restored exactly

    def __init__(self, env: Any, where: str, first: int, process: str):
        self.where, self._first = f"{where}: {env_name(env)}", first
        self._name = ", ".join(filter(None, [env_name(env), process]))
        self.at = 0  # the environment that is currently created, reset, stepped or saved
        self.envs = []

    def _inspect(self) -> None:
        """Determine how the created environments can be restored."""
        self.stacks = [stack_of(env) for env in self.envs]
        self.unrestorable_reason = next(filter(None, map(explain_unrestorable, self.envs)), None)

    def _get_episode(self, i: int) -> dict[str, Any]:
        """Return what must be saved of the running episode of environment `i`, in addition to its own state."""
        raise NotImplementedError

    def get_state(self) -> tuple[list[Any], bytes] | None:
        """Return `encode` of each environment and its running episode; None if they cannot be restored."""
        if self.unrestorable_reason is not None:
            return None
        nodes, data = [], bytearray()
        try:
            for i, env in enumerate(self.envs):
                self.at = i
                nodes.append(encode({"env": get_env_state(env), **self._get_episode(i)}, data))
        except UnsavableState as e:
            self.unrestorable_reason = str(e)
            return None
        return nodes, bytes(data)


def first_seeds(seed: int, n: int, n_skipped: int = 0) -> list[int]:
    """Return the seeds of the first episodes of n copies, an independent mix of (seed, i) for each.

    They come after `n_skipped` pairs of numbers, which do not seed anything.
    """
    rng = Rng(seed, Stream.FOREIGN_ENVS)
    rng.skip(n_skipped)
    return rng.integers(2**31, n).tolist()


class ForeignEnvs:
    """N copies of a foreign environment: whether they have started, and how they are saved and restored together."""

    native = False
    device: str | None = None
    unrestorable_reason: str | None
    _group: Any  # what steps the copies: environments one after the other, or workers; see `_hold`
    _stacks: list[list[str]]  # classes that each copy is composed of

    def __init__(self, env_id: Any, n_envs: int):
        if n_envs < 1:
            raise ValueError(f"{type(self).__name__}: n_envs must be >= 1, got {n_envs}")
        self.env_id = env_id
        self.n_envs = n_envs
        self.n_skipped = 0  # as of `first_seeds`; a resumed run skips some
        self._started = False
        self._at_rest = False  # whether all are open and have taken the same number of steps

    def _hold(self, group: Any) -> None:
        """Use `group` to step the copies."""
        self._group, self.spec, self._stacks = group, group.spec, group.stacks
        self.unrestorable_reason = group.unrestorable_reason

    @property
    def at_rest(self) -> bool:
        """Whether all copies have started and taken the same number of steps."""
        return self._at_rest

    @property
    def why_not(self) -> str | None:
        """Former name of `unrestorable_reason`."""
        warn_renamed("why_not", "unrestorable_reason", "0.14.0")
        return self.unrestorable_reason

    def __len__(self) -> int:
        return self.n_envs

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get_state(self) -> dict[str, np.ndarray] | None:
        """Return what the episodes depend on.

        None before the first episode, after `close` or a failed step, and if they cannot be restored.
        """
        states = self._get_state() if self._at_rest and self.unrestorable_reason is None else None
        return None if states is None else pack(self._stacks, *states)

    def fits(self, state: dict[str, np.ndarray]) -> bool:
        """Whether `state` comes from environments like these; raise a ValueError if it is damaged."""
        return self.unrestorable_reason is None and fits(state, self._stacks)

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Continue exactly from a state of `get_state`, in this process or another, with or without workers.

        Raises
        ------
        ValueError
            If it is damaged or not a state of such environments, which must then be reset with a seed before use.
        """
        name = type(self).__name__
        if self.unrestorable_reason is not None:
            reason = self.unrestorable_reason
            raise ValueError(f"{name}.set_state: {env_name(self.env_id)} must be restorable, but {reason}")
        try:
            states = unpack(state, self._stacks)
        except ValueError as e:
            raise ValueError(f"{name}.set_state: {e}") from e
        self._started = self._at_rest = False
        self._set_state(states)
        self._started = self._at_rest = True

    def close(self) -> None:
        """End the environments; may be called again."""
        self._at_rest = False
        self._close()

    # What subclasses without a `_group` override.

    def _get_state(self) -> tuple[list[Any], bytes] | None:
        states, self.unrestorable_reason = self._group.get_state(), self._group.unrestorable_reason
        return states

    def _set_state(self, states: list[Any]) -> None:
        self._group.set_state(states)

    def _reset(self, seeds: list[int | None], out: Any) -> None:
        self._group.reset(seeds, out)

    def _step(self, actions: Any, out: Any) -> None:
        self._group.step(actions, out)

    def _close(self) -> None:
        self._group.close()
