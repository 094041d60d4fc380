"""Environments stepped by worker processes, with exactly the same results as in this process.

Observations, rewards, flags and actions are in memory that all processes share; messages only say what to do.
"""

from __future__ import annotations

import itertools
import os
import pickle
import sys
import warnings
import weakref
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

from rlox.envs.registry import env_name, origin, worker_imports
from rlox.processes.channel import CREATE, FAILED
from rlox.processes.failures import dumps, raise_packed
from rlox.processes.memory import Layout, map_arrays, open_nameless
from rlox.processes.parent import LATE_AFTER, Child, ChildDied, stop_children

_CLOSE_WITHIN = 3.0  # seconds for environments to close before their worker is killed
_CLOSE_AFTER_FAILURE_WITHIN = 0.2  # the same after a failure, when the caller waits for the error
_ATTACH, _STEP, RESET, _SAVE, RESTORE, _RENDER, _SETTLE = b"a", b"s", b"r", b"g", b"p", b"v", b"="
_NO_SEED = -1


class Share:
    """A worker's environments, and their rows of the shared arrays. Answers the messages of `WorkerGroup`."""

    _seeds: Any  # this worker's rows of the shared arrays, once they are attached
    _actions: Any
    _out: Any
    _first: Any

    # `sent`: what the environments are made of, see `pack_with_imports`; `index`: number of this worker
    def __init__(self, memory_fd: int, sent: bytes, rows: slice, index: int):
        self._memory_fd, self.rows = memory_fd, rows
        self.group = self.make(unpack_imports(sent), f"worker {index}, pid {os.getpid()}")

    @staticmethod
    def layout(spec: Any, n: int) -> Layout:
        """Return the shapes and dtypes of the shared arrays, by name, for `n` environments of a spec."""
        raise NotImplementedError

    def make(self, value: Any, process: str) -> Any:
        """Create the environments, an object as in `rlox.envs.state.ForeignEnvs`."""
        raise NotImplementedError

    def select(self, arrays: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
        """Return this worker's rows of the shared arrays: seeds, actions, and what a step and a reset write."""
        raise NotImplementedError

    def hello(self) -> tuple[Any, str | None, list[list[str]]]:
        return self.group.spec, self.group.unrestorable_reason, self.group.stacks

    def answer(self, kind: bytes, value: Any) -> Any:
        if kind == _STEP:
            return self.group.step(self._actions, self._out)
        if kind == RESET:
            return self.group.reset([None if seed == _NO_SEED else seed for seed in self._seeds.tolist()], self._first)
        if kind == _ATTACH:
            arrays = map_arrays(self._memory_fd, self.layout(self.group.spec, value))
            self._seeds, self._actions, self._out, self._first = self.select(arrays)
            return None
        if kind == _SAVE:
            return self.group.get_state(), self.group.unrestorable_reason
        if kind == RESTORE:
            return self.group.set_state(value)
        return self.group.render() if kind == _RENDER and self.rows.start == 0 else None

    def close(self) -> None:
        self.group.close()


class WorkerGroup:
    """Processes that each step a part of N environments and share memory with this process.

    A worker ignores Ctrl-C, computes with one thread, and ends when its parent process ends for any reason. In each, a
    `share` creates its environments from `value`; the N environments are divided equally. `where` starts messages.

    Attributes
    ----------
    spec, stacks, unrestorable_reason
        Of the environments, as in `rlox.envs.state.EnvCopies`; the spec is the same in all workers.
    arrays : dict
        The shared arrays of `Share.layout`, by name.

    Raises
    ------
    ValueError
        If `workers` is out of range, or not all environments have the same spec.
    TypeError
        If `env` is neither an id nor a callable, or cannot be sent.
    """

    def __init__(self, where: str, env: Any, share: type[Share], value: Any, n_envs: int, workers: int):
        if not 1 <= workers <= n_envs:
            raise ValueError(f"{where}: workers must be between 1 and n_envs ({n_envs}), got {workers}")
        if not isinstance(env, str) and not callable(env):
            raise TypeError(f"{where}: env_id must be an id or a callable, which every worker calls, got {env!r}")
        try:
            sent = pack_with_imports(value, env)
        except Exception as e:
            raise TypeError(
                f"{where}: env_id {env_name(env)} and its kwargs must be picklable by cloudpickle, to be sent "
                f"to another process: {e}; pass an id, or a function that creates everything itself"
            ) from e
        ends = [n_envs * i // workers for i in range(workers + 1)]
        self._rows = [slice(*pair) for pair in itertools.pairwise(ends)]
        self._where, self._env = where, env
        self.children: list[Child] = []
        self._failed = False  # whether a worker died or raised
        self._unsettled = False  # whether answers may be outstanding, because an exception was raised before they came
        # Also runs at interpreter exit. It refers to the list and not to this object, which can therefore be collected.
        self._owner = os.getpid()
        self._finalizer = weakref.finalize(self, stop_children, self.children, self._owner, _CLOSE_WITHIN)
        try:
            with open_nameless() as memory:
                for index, rows in enumerate(self._rows):
                    self.children.append(Child(share, memory, (sent, rows, index)))
                specs, reasons, stacks = zip(*self._receive_all(CREATE), strict=True)
                self.spec, self.unrestorable_reason = specs[0], next(filter(None, reasons), None)
                self.stacks = [stack for part in stacks for stack in part]
                other = next((spec for spec in specs if spec != self.spec), None)
                if other is not None:
                    raise ValueError(
                        f"{where}: all environments must have the same spaces, got {other} and {self.spec}"
                    )
                self.arrays = map_arrays(memory.fileno(), share.layout(self.spec, n_envs), enlarge=True)
                self._command(_ATTACH, [n_envs] * workers)
        except BaseException:
            self.stop()
            raise

    def step(self) -> None:
        """Let every worker step its environments."""
        self._command(_STEP)

    def reset(self, seeds: list[int | None]) -> None:
        """Let every worker start new episodes with its seeds."""
        self.arrays["seeds"][:] = [_NO_SEED if seed is None else seed for seed in seeds]
        self._command(RESET)

    def get_state(self) -> tuple[list[Any], bytes] | None:
        """Return the states of all environments; None if they cannot be restored, or a worker has died."""
        if not self._finalizer.alive:
            return None
        shares, reasons = zip(*self._command(_SAVE), strict=True)
        self.unrestorable_reason = next(filter(None, reasons), None)
        if self.unrestorable_reason is not None:
            return None
        return [node for nodes, _ in shares for node in nodes], b"".join(data for _, data in shares)

    def set_state(self, states: list[Any]) -> None:
        """Send each worker the states of its environments."""
        self._command(RESTORE, [states[rows] for rows in self._rows])

    def render(self) -> Any:
        """Return what the first environment renders."""
        return self._command(_RENDER)[0]

    def _command(self, kind: bytes, values: Sequence[Any] | None = None) -> list[Any]:
        """Send a message to every worker, with its item of `values`, and return the answers of all workers."""
        if not self._finalizer.alive:
            raise RuntimeError(f"{self._where}: {env_name(self._env)} is closed; create a new one")
        try:
            self._failed = False
            if self._unsettled:
                self._exchange(_SETTLE)
            self._unsettled = True
            answers = self._exchange(kind, values)
            self._unsettled = False
        except Exception as e:
            # A state that does not fit, or an exception from a signal handler, leaves the environments unchanged.
            if self._failed and not (kind == RESTORE and isinstance(e, ValueError)):
                self.stop()
            raise
        return answers

    def _exchange(self, kind: bytes, values: Sequence[Any] | None = None) -> list[Any]:
        for i, child in enumerate(self.children):
            try:
                child.send(kind, None if values is None else values[i])
            except BaseException:
                if values is not None:  # the worker would read the rest of this message as its next one
                    self.stop()
                raise
        return self._receive_all(kind)

    def _receive_all(self, kind: bytes) -> list[Any]:
        """Return the value of each worker's answer of this kind."""
        answers = []
        for child in self.children:
            try:
                answered, value = child.receive(self.children, self._warn_late)
                while answered not in (kind, FAILED):  # an answer to a message from before an interrupt
                    answered, value = child.receive(self.children, self._warn_late)
            except ChildDied as e:
                self._failed = True
                hint = f"{e.hint}: try fewer workers or envs" if e.hint else ""
                worker, envs = self._name(e.child)
                raise RuntimeError(f"{self._where}: {worker} died ({e.how}) with {envs}{hint}") from None
            if answered == FAILED:
                self._failed = True
                raise_packed(*value)
            answers.append(value)
        return answers

    def _name(self, child: Child) -> tuple[str, str]:
        """Return which worker a child is, and which environments it has."""
        index = self.children.index(child)
        rows = self._rows[index]
        envs = f"environments {rows.start} to {rows.stop - 1} of {env_name(self._env)}"
        return f"worker {index} (pid {child.process.pid})", envs

    def _warn_late(self, child: Child) -> None:
        worker, envs = self._name(child)
        warnings.warn(
            f"{self._where}: {worker} has not answered for {LATE_AFTER:g} s and is waited for: {envs} are slow, or "
            "one of them hangs; Ctrl-C ends the wait",
            RuntimeWarning,
            stacklevel=2,
        )

    def close(self) -> None:
        """End the workers; may be called again."""
        if self._unsettled:  # interrupted while workers step: do not wait for them
            self.stop()
        self._finalizer()

    def stop(self) -> None:
        """End the workers without waiting for them to finish."""
        if self._finalizer.detach() is not None:
            stop_children(self.children, self._owner, _CLOSE_AFTER_FAILURE_WITHIN)


def pack_with_imports(value: Any, env_id: Any, imports: Iterable[str] = worker_imports) -> bytes:
    """Pickle `value` for `unpack_imports` in another process.

    The modules that it must import, and those that registered `env_id` with rlox, are included, and so is its entry in
    gymnasium's registry.
    """
    names, registered = [*imports], None
    # A new interpreter does not know ids that the user's code registered; ale-py registers its own.
    if isinstance(env_id, str):
        names += filter(None, [origin(env_id)])
        if "gymnasium" in sys.modules and not env_id.startswith("ALE/"):
            registered = sys.modules["gymnasium"].registry.get(env_id)
    # The inner pickle may need the modules, which are therefore imported before it is loaded.
    return dumps((names, dumps((value, registered))))


def unpack_imports(data: bytes) -> Any:
    """Return the value that was given to `pack_with_imports`."""
    imports, inner = pickle.loads(data)
    for name in imports:
        import_module(name)
    value, registered = pickle.loads(inner)
    if registered is not None:
        import gymnasium

        gymnasium.registry.setdefault(registered.id, registered)
    return value
