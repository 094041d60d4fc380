"""Environments on other machines, with the same arrays as all other vector environments."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from rlox.checkpoint.streams import Stream
from rlox.config import integer
from rlox.config.run import RemoteConfig
from rlox.envs import state as env_state
from rlox.envs.gym_vec_env import ForeignVecEnv
from rlox.envs.masks import MASK
from rlox.envs.protocols import step_layout
from rlox.envs.remote.client import Connection, WorkerLost, WorkerRefused
from rlox.envs.remote.codec import Message, ProtocolError
from rlox.envs.remote.spaces import MOST_ENVS, NO_SEED, describe, read_spec, require_array, require_masks
from rlox.kernels.rng import Rng

_LONGEST_WAIT = 2.0  # seconds between two rounds of attempts to reach a worker
# Arrays of what a step led to, and those that are equal where no episode ended.
_LAST = "last_obs"  # in the saved state of an environment: the observation that led to its next step
_FINALS = {"final_obs": "obs", "final_action_mask": MASK}
_T = TypeVar("_T")


@dataclass(eq=False)
class _Share:
    """The rows of one worker's environments."""

    rows: slice
    line: Connection
    lost_at: float | None = None  # time of the first missing answer
    n_replaced: int = 0  # new connections since then

    @property
    def n(self) -> int:
        return self.rows.stop - self.rows.start


class RemoteEnvPool(ForeignVecEnv):
    """N environments on workers (`rlox worker`), with the same results for a seed as `VecEnv` or `GymVecEnv`.

    Each worker has an equal share. A step is sent to all workers before the first answer is awaited. When a worker is
    lost, its share starts new episodes at the same worker once that is back, or at another one of `addresses`. The lost
    step is reported as ``truncated``, with reward 0 and the last observation as ``final_obs``, so that a learner treats
    it as a time limit and not as a failure. Each loss gives a `RuntimeWarning`.

    Parameters
    ----------
    addresses : sequence of str
        host:port of each worker; overrides `remote.addresses`.
    env_id : str, optional
        Environment that the workers must serve; None: any.
    n_envs, seed : int
        Number of environments N, at least one for each worker, and the seed of their randomness.
    remote : RemoteConfig, optional
        Security, time limits and, if `addresses` is None, the addresses.
    kwargs, wrappers
        Arguments and wrappers that the workers' environments must have, if `env_id` is given.

    Attributes
    ----------
    n_lost : int
        Episodes that were cut because their worker was lost.

    Raises
    ------
    WorkerLost
        If a worker cannot be reached initially, or a lost worker is not replaced within `remote.reconnect_s`.
    WorkerRefused
        If a worker refuses this learner, or has another version or environment.
    WorkerFailed
        If an environment raises an exception; it has the frames at the worker.
    """

    _saves_masks = False  # workers compute them from the states

    def __init__(
        self,
        addresses: Sequence[str] | None = None,
        env_id: str | None = None,
        n_envs: int = 1,
        seed: int = 0,
        remote: RemoteConfig | None = None,
        kwargs: dict[str, Any] | None = None,
        wrappers: Sequence[Any] = (),
    ):
        where = "RemoteEnvPool"
        n_envs = integer(where, "n_envs", n_envs, 1, MOST_ENVS)
        super().__init__(env_id, n_envs, seed)
        remote = remote or RemoteConfig()
        self._remote = replace(remote, addresses=remote.addresses if addresses is None else list(addresses))
        self._addresses = self._remote.addresses
        if not 1 <= len(self._addresses) <= n_envs:
            raise ValueError(
                f"{where}: addresses must be between 1 and n_envs ({n_envs}), got {len(self._addresses)}; start "
                "workers with `rlox worker --env ID`"
            )
        self.n_lost = self._n_losses = 0
        self._asked = None if env_id is None else describe(env_id, kwargs, wrappers)
        ends = [n_envs * i // len(self._addresses) for i in range(len(self._addresses) + 1)]
        rows = [slice(*pair) for pair in itertools.pairwise(ends)]
        self._shares: list[_Share] = []
        self._open = True
        with ThreadPoolExecutor(min(16, len(rows))) as pool:
            lines = [
                pool.submit(self._connect, address, own.stop - own.start, self._remote)
                for address, own in zip(self._addresses, rows, strict=True)
            ]
        try:
            for own, future in zip(rows, lines, strict=True):
                self._shares.append(_Share(own, future.result()))
        except BaseException:
            for future in lines:
                if future.exception() is None:
                    future.result().close()
            raise
        first = self._shares[0].line
        try:
            self.spec = read_spec(first.welcome)
        except ProtocolError as e:
            self.close()
            raise WorkerRefused(first.address, f"it does not describe its environment correctly: {e}") from e
        self._served = first.welcome.fields.get("env")
        if env_id is None:
            self.env_id = str(self._served.get("id") if isinstance(self._served, dict) else None)[:200]
        try:
            for share in self._shares:
                self._require_same(share.line)
        except BaseException:
            self.close()
            raise
        native = first.welcome.fields.get("restorable") is True
        self.unrestorable_reason = None if native else "it is not native, and runs on another machine"
        self._stacks = [[f"native {self.env_id}"]] * n_envs
        n_flags = sum(self.spec.choices) if self.spec.masked else 0
        self._masks: np.ndarray = np.ones((n_envs, n_flags), np.bool_)  # of the current observations
        self._last: np.ndarray = np.zeros((n_envs, *self.spec.obs_shape), self.spec.obs_dtype)
        self._returns, self._lengths = np.zeros(n_envs), np.zeros(n_envs, np.int64)

    def _connect(self, address: str, n: int, remote: RemoteConfig) -> Connection:
        return Connection(address, remote, "env", {"n_envs": n, "env": self._asked})

    def _require_same(self, line: Connection) -> None:
        """Raise a WorkerRefused unless a worker serves the same environment as the others, and as before."""
        theirs = line.welcome.fields.get("env")
        try:
            same = theirs == self._served and read_spec(line.welcome) == self.spec
        except ProtocolError:
            same = False
        if not same:
            line.close()
            name = theirs.get("id") if isinstance(theirs, dict) else theirs
            raise WorkerRefused(
                line.address,
                f"all workers must serve {self.env_id} during the whole run, with the same arguments, wrappers and "
                f"spaces, got {str(name)[:80]}; restart it with --env {self.env_id}",
            )

    def _reset(self, seeds: list[int | None], obs: np.ndarray) -> None:
        self._require_open()
        numbers = np.array([NO_SEED if seed is None else seed for seed in seeds], np.int64)
        fields = {"seed": self._seed if seeds[0] is not None else None}

        def ask(share: _Share) -> None:
            share.line.send("reset", {**fields, "first": self.first + share.rows.start}, {"seeds": numbers[share.rows]})

        for share, answer in zip(self._shares, self._all(ask, self._read_reset), strict=True):
            obs[share.rows] = self._begin(share) if isinstance(answer, WorkerLost) else answer
        self._last[...] = obs
        self._returns[:], self._lengths[:] = 0.0, 0

    def _step(self, actions: np.ndarray, out: dict[str, np.ndarray]) -> None:
        self._require_open()
        answers = self._all(
            lambda share: share.line.send("step", None, {"actions": actions[share.rows]}), self._read_step
        )
        for share, answer in zip(self._shares, answers, strict=True):
            rows = share.rows
            step = self._truncate(share) if isinstance(answer, WorkerLost) else answer
            ended = step["terminated"] | step["truncated"]
            for key in out.keys() & step.keys() - _FINALS.keys():
                out[key][rows] = step[key]
            for key in out.keys() & _FINALS.keys():
                out[key][rows] = step[_FINALS[key]]
                out[key][rows][ended] = step[key]
            if self.spec.masked:
                self._masks[rows] = step[MASK]
            self._last[rows] = step["obs"]
            self._returns[rows] = np.where(ended, 0.0, step["episode_return"])
            self._lengths[rows] = np.where(ended, 0, step["episode_length"])

    def _all(self, ask: Callable[[_Share], None], read: Callable[[_Share, Message], _T]) -> list[_T | WorkerLost]:
        """Send to every worker, then read all answers. A `WorkerLost` stands for each missing answer."""
        lost: dict[int, WorkerLost] = {}
        for i, share in enumerate(self._shares):
            try:
                ask(share)
            except WorkerLost as e:
                lost[i] = e
        answers: list[_T | WorkerLost] = []
        for i, share in enumerate(self._shares):
            if i not in lost:
                try:
                    answers.append(read(share, share.line.receive()))
                    share.lost_at, share.n_replaced = None, 0
                    continue
                except WorkerLost as e:
                    lost[i] = e
                except ProtocolError as e:
                    share.line.close()
                    lost[i] = WorkerLost(share.line.address, f"sent an invalid answer: {e}")
            self._replace(share, lost[i])
            answers.append(lost[i])
        return answers

    def _read_reset(self, share: _Share, message: Message) -> np.ndarray:
        if self.spec.masked:
            self._masks[share.rows] = require_masks(message, MASK, share.n, self.spec)
        return require_array(message, "obs", (share.n, *self.spec.obs_shape), self.spec.obs_dtype)

    def _read_step(self, share: _Share, message: Message) -> dict[str, np.ndarray]:
        n, spec = share.n, self.spec
        layout = step_layout(spec, n)
        plain = layout.keys() - _FINALS.keys()  # the others are only of the episodes that ended
        step = {name: require_array(message, name, *layout[name]) for name in plain}
        ended = int(np.count_nonzero(step["terminated"] | step["truncated"]))
        step["final_obs"] = require_array(message, "final_obs", (ended, *spec.obs_shape), spec.obs_dtype)
        if spec.masked:
            require_masks(message, MASK, n, spec)
            step["final_action_mask"] = require_masks(message, "final_action_mask", ended, spec)
        return step

    def _truncate(self, share: _Share) -> dict[str, np.ndarray]:
        """Return the result of a step lost with its worker: all its episodes are truncated, and new ones start."""
        rows, n = share.rows, share.n
        masks = self._masks[rows].copy()
        reached, returns, lengths = self._last[rows].copy(), self._returns[rows].copy(), self._lengths[rows] + 1
        obs = self._begin(share)
        return {
            "obs": obs,
            "action_mask": self._masks[rows],
            "final_action_mask": masks,
            "rewards": np.zeros(n),
            "terminated": np.zeros(n, np.bool_),
            "truncated": np.ones(n, np.bool_),
            "final_obs": reached,
            "episode_return": returns,
            "episode_length": lengths,
        }

    def _begin(self, share: _Share) -> np.ndarray:
        """Start new episodes, with new seeds, in a share whose worker was lost; return the observations."""
        while True:
            seed = int(Rng(self._seed, Stream.FOREIGN_ENVS).integers(2**62, self._n_losses + 1)[-1])
            first, last = self.first + share.rows.start, self.first + share.rows.stop
            seeds = np.array(env_state.first_seeds(seed, self.n_joint or self.n_envs)[first:last])
            fields = {"seed": seed, "first": first}
            try:
                return self._read_reset(share, share.line.call("reset", fields, {"seeds": seeds}))
            except WorkerLost as e:
                self._replace(share, e)
            except ProtocolError as e:
                share.line.close()
                self._replace(share, WorkerLost(share.line.address, f"sent an invalid answer: {e}"))

    def _replace(self, share: _Share, reason: WorkerLost) -> None:
        """Connect a share again, to the worker that it had or to any other, within `reconnect_s` of the loss."""
        share.line.close()
        self._n_losses += 1
        if share.lost_at is None:
            share.lost_at = time.monotonic()
        end, wait = share.lost_at + self._remote.reconnect_s, 0.1
        candidates = [reason.address, *(a for a in dict.fromkeys(self._addresses) if a != reason.address)]
        if (again := share.n_replaced) > 0:
            # A worker that accepts the share and then fails must not be tried again immediately, nor first.
            candidates = [*candidates[1:], candidates[0]]
            time.sleep(min(0.1 * 2 ** min(again, 5), _LONGEST_WAIT, max(0.0, end - time.monotonic())))
        last: WorkerLost = reason
        while time.monotonic() < end:
            refusals = []
            for address in candidates:
                # A hanging worker must not use up all the time.
                timeout = min(max(1.0, end - time.monotonic()), self._remote.timeout_s, 5.0)
                try:
                    line = self._connect(address, share.n, replace(self._remote, timeout_s=timeout))
                    self._require_same(line)
                except WorkerRefused as e:
                    refusals.append(e)
                    continue
                except WorkerLost as e:
                    last = e
                    continue
                line.timeout_s = self._remote.timeout_s
                share.line, share.n_replaced = line, share.n_replaced + 1
                if share.n_replaced > 1:
                    return  # this loss has already been reported and counted
                self.n_lost += share.n
                first, final = share.rows.start, share.rows.stop - 1
                refused = "".join(f"; {e}" for e in refusals)
                warnings.warn(
                    f"RemoteEnvPool: {reason}{refused}; environments {first} to {final} continue at {address} with new "
                    f"episodes, the running ones are truncated ({self.n_lost:,} so far)",
                    RuntimeWarning,
                    stacklevel=6,
                )
                return
            if len(refusals) == len(candidates):
                raise refusals[0] from reason
            time.sleep(min(wait, max(0.0, end - time.monotonic())))
            wait = min(2 * wait, _LONGEST_WAIT)
        raise WorkerLost(
            reason.address,
            f"{reason.reason}; none of {', '.join(candidates)} took over its environments within "
            f"{self._remote.reconnect_s:g} s (remote.reconnect_s); last: {last}",
        ) from reason

    def _get_state(self) -> tuple[list[Any], bytes] | None:
        self._require_open()
        nodes, data = [], bytearray()
        try:
            for share in self._shares:
                share.line.send("get_state")
            for share in self._shares:
                arrays, last = share.line.receive().arrays, self._last[share.rows]
                for i in range(share.n):
                    own = {name: array[..., i] for name, array in arrays.items()}
                    nodes.append(env_state.encode({**own, _LAST: last[i]}, data))
        except (WorkerLost, ProtocolError, IndexError):
            return None  # the lost worker is replaced in the next step
        return nodes, bytes(data)

    def _set_state(self, states: list[Any]) -> None:
        self._require_open()
        try:
            for share in self._shares:
                own = states[share.rows]
                names = [name for name in own[0] if name != _LAST]
                arrays = {name: np.stack([np.asarray(state[name]) for state in own], -1) for name in names}
                answer = share.line.call("set_state", None, arrays)
                if self.spec.masked:
                    self._masks[share.rows] = require_masks(answer, MASK, share.n, self.spec)
        except (AttributeError, KeyError, TypeError, ProtocolError) as e:
            raise ValueError(f"RemoteEnvPool.set_state: it is not a state of {self.env_id}: {e}") from e
        for i, state in enumerate(states):
            self._returns[i], self._lengths[i] = float(state["returns"]), int(state["steps"])
            if _LAST in state:  # checkpoints of 0.12.0 have none
                self._last[i] = state[_LAST]

    def _get_masks(self) -> np.ndarray:
        return self._masks.copy()

    def _require_open(self) -> None:
        if not self._open:
            raise RuntimeError(f"RemoteEnvPool: {self.env_id} is closed; create a new one")

    def _close(self) -> None:
        self._open = False
        for share in self._shares:
            share.line.close()
