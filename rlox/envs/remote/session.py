"""The session ``env`` of a worker, which steps environments.

Hello: fields ``n_envs`` and ``env`` (the ``{"id", "kwargs", "wrappers"}`` that the learner expects, or null). Welcome:
fields ``env``, ``spec``, ``restorable`` and, for continuous actions, the arrays ``act_low`` and ``act_high``. Then:

========= ========================================= ====================================================================
message   with                                      answer
========= ========================================= ====================================================================
reset     fields ``seed`` (int or null), ``first``  ``obs`` (n, …)
          (number of the learner's environments
          before these), array ``seeds`` (n,)
          int64, -1 for none
step      array ``actions`` (n, …)                  ``obs rewards terminated truncated episode_return episode_length``
                                                    as in `step_all`, and ``final_obs`` (k, …) of the k rows whose
                                                    episode ended, in order
get_state                                           the arrays of ``VecEnv.get_state``; only native and tensor
                                                    environments
set_state those arrays                              nothing
========= ========================================= ====================================================================

Environments with masks of legal actions add ``action_mask`` (n, A) bool to the answers of reset, step and set_state,
and ``final_action_mask`` (k, A) to that of a step.

A native or tensor environment takes its keys from ``seed`` and its position among all environments of the learner; a
foreign one takes its item of ``seeds``. The trajectories are therefore the same as with environments in the learner's
process. EnvPool takes only the first item, and seeds its environments one after the other.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlox.config import integer
from rlox.envs.make import make_vec_env
from rlox.envs.masks import MASK
from rlox.envs.protocols import step_arrays
from rlox.envs.registry import is_vectorised
from rlox.envs.remote.codec import LARGEST_MESSAGE, Message, ProtocolError
from rlox.envs.remote.spaces import MOST_ENVS, NO_SEED, describe, require_array, spec_message, step_bytes
from rlox.kernels.rng import Rng


class EnvSessions:
    """Factory of the sessions of a worker, each with its own environments (see `rlox.envs.make_vec_env`)."""

    def __init__(
        self,
        env: str,
        kwargs: dict[str, Any] | None = None,
        wrappers: Sequence[Any] = (),
        workers: int = 0,
        backend: str = "auto",
        most_envs: int = 1024,  # of a session
        limit: int = LARGEST_MESSAGE,  # bytes of a message
    ):
        self.env, self.kwargs, self.wrappers = env, dict(kwargs or {}), list(wrappers)
        self.workers, self.backend = workers, backend
        self._most_envs, self._limit = most_envs, limit
        # Native environments, and a user's tensor environments, which take their keys in the same way.
        self.native = backend == "auto" and not (kwargs or wrappers or workers) and is_vectorised(env)
        probe = self.make(1, 0)
        if probe.device is not None:
            raise ValueError(
                f"EnvSessions: backend must be auto, gymnasium or envpool, got {backend} for {env}: what is sent are "
                "arrays, not tensors on a device"
            )
        self.spec = probe.spec
        probe.close()
        fields, bounds = spec_message(self.spec)
        description = describe(env, self.kwargs, self.wrappers)
        # The fields and arrays that describe the environment in a welcome.
        self.about = Message("env", {"env": description, "spec": fields, "restorable": self.native}, bounds)

    def make(self, n: int, seed: int) -> Any:
        """Create `n` environments."""
        workers = min(self.workers, n)
        return make_vec_env(self.env, n, seed, self.kwargs, self.wrappers, workers, self.backend)

    def __call__(self, hello: Message) -> EnvSession:
        fields = hello.fields
        n = integer("hello", "n_envs", fields.get("n_envs"), 1, self._most_envs)
        if step_bytes(self.spec, n) > self._limit:
            most = self._limit // step_bytes(self.spec, 1)
            raise ValueError(
                f"hello: n_envs must be small enough for a step to fit into a message, about {most}, got {n}"
            )
        self.require(fields.get("env"))
        return EnvSession(self, n)

    def require(self, asked: Any) -> None:
        """Raise a ValueError if a learner expects another environment than this one."""
        if asked is not None and asked != (own := self.about.fields["env"]):
            raise ValueError(f"the worker's environment is {_short(own)}, but the learner expects {_short(asked)}")


def _short(asked: Any) -> str:
    if not isinstance(asked, dict):
        return str(asked)[:80]
    more = ", ".join(f"{key}={json.dumps(asked[key])}" for key in ("kwargs", "wrappers") if asked.get(key))
    return f"{asked.get('id')}{f' with {more}' if more else ''}"[:300]


class EnvSession:
    """N environments that one learner steps."""

    def __init__(self, sessions: EnvSessions, n: int):
        self.welcome, self._n, self._native = sessions.about, n, sessions.native
        self._make = sessions.make
        self._vec = self._make(n, 0)
        self._out = step_arrays(sessions.spec, n)

    def _rekey(self, seed: int, first: int) -> None:
        """Set the keys of the learner's environments `first` to `first` + n."""
        state = self._make(self._n, seed).get_state()
        numbers = range(first, first + self._n)
        state["keys"] = np.fromiter((Rng(seed, i).key for i in numbers), np.uint64, self._n)
        self._vec.set_state(state)

    def handle(self, message: Message) -> Message:
        if message.kind == "step":
            actions = message.arrays.get("actions")
            if actions is None:
                raise ProtocolError("step: actions must be given")
            out = self._vec.step_all(actions.copy(), self._out)  # a view of the message cannot be written to
            ended = np.flatnonzero(out["terminated"] | out["truncated"])
            finals = {name: out[name][ended] for name in out.keys() & {"final_obs", "final_action_mask"}}
            return Message("stepped", {}, {**out, **finals})
        if message.kind == "reset":
            return Message("reset", {}, {"obs": self._reset(message), **self._masks()})
        if message.kind in ("get_state", "set_state") and not self._native:
            raise ProtocolError(f"{message.kind}: the environments must be native or tensor ones")
        if message.kind == "get_state":
            return Message("state", {}, self._vec.get_state())
        if message.kind == "set_state":
            self._vec.set_state(message.arrays)
            return Message("done", {}, self._masks())
        raise ProtocolError(f"a message must be reset, step, get_state or set_state, got {message.kind[:40]!r}")

    def _masks(self) -> dict[str, np.ndarray]:
        masks = self._vec.action_masks()
        return {} if masks is None else {MASK: masks}

    def _reset(self, message: Message) -> np.ndarray:
        seeds = require_array(message, "seeds", (self._n,), np.int64)
        seed = message.fields.get("seed")
        if not self._native:
            return self._vec.reset_each([None if s == NO_SEED else int(s) for s in seeds])
        if seed is not None:
            first = integer("reset", "first", message.fields.get("first"), 0, MOST_ENVS - self._n)
            self._rekey(integer("reset", "seed", seed, 0, 2**64 - 1), first)
        return self._vec.reset_all()

    def close(self) -> None:
        self._vec.close()
