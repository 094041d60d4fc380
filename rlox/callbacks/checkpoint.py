"""Save checkpoints while training."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from rlox.callbacks.base import Callback, _algorithm, _finite, _HandWritten, _number
from rlox.callbacks.evaluation import EvalCallback


class _Write(threading.Thread):
    """A checkpoint on its way to the disk."""

    def __init__(self, write: Callable[[], None], **info: Any):
        # A daemon, so that a process can end at once; the earlier file stays until the new one is complete.
        super().__init__(name="rlox-checkpoint", daemon=True)
        self.info = info
        self.error: BaseException | None = None
        self._write = write

    def run(self) -> None:
        try:
            self._write()
        except BaseException as e:
            self.error = e


class CheckpointCallback(Callback):
    """Keep ``last.safetensors`` (every `every_s` seconds and at the end) and ``best.safetensors`` (by evaluation).

    Training waits for a copy to be made; a thread writes it while training goes on, and ``on_checkpoint`` is called
    when it is safely on disk. A `last` that is due while the one before is still being written comes right after it.
    Of a data-parallel training the first one is written before its first step.

    Parameters
    ----------
    folder : path
        Where the two files go.
    every_s : float
        Seconds between two saves of ``last``.
    run : dict, optional
        The resolved configuration of the run, kept in the header.
    memory : bool
        Whether the replay memory is saved with ``last``, in ``memory/`` (off-policy).
    every_steps : int, optional
        Environment steps (offline: updates) between two saves of ``last``, whichever comes first.
    policy : nn.Module, optional
        In a loop written by hand, which passes no algorithm: what to save. `rlox.checkpoint.load_checkpoint` reads the
        weights again, and ``init_from`` of an algorithm with such a policy starts from them.

    Raises
    ------
    OSError
        Out of the training, at its next update, where a checkpoint could not be written.
    """

    section = "checkpoint"
    acts_on_evaluation = False

    def __init__(
        self,
        folder: str | Path,
        every_s: float = 60.0,
        run: dict[str, Any] | None = None,
        memory: bool = True,
        every_steps: int | None = None,
        policy: Any = None,
    ):
        self.policy = policy
        self.folder = Path(folder)
        self.every_s = every_s
        self.run = run
        self.memory = memory
        self.every_steps = every_steps
        self.best = -math.inf
        self._saved_at = 0.0
        self._saved_step: int | None = None
        self._writes: dict[str, _Write] = {}  # by kind
        # By the step of a pending evaluation: what writes the checkpoint of then, and the callbacks' states.
        self._copies: dict[int, tuple[Callable[..., None], dict[str, Any]]] = {}

    def state(self) -> dict[str, Any]:
        return {"best": _finite(self.best)}

    def set_state(self, state: dict[str, Any]) -> None:
        self.best = _number(state["best"])

    def on_training_start(self, *, algorithm=None, **info: Any) -> None:
        self._saved_at = time.monotonic()
        self._copies.clear()
        if self._saved_step is None:
            self._saved_step = _algorithm(self, algorithm).counters.steps
        if getattr(getattr(algorithm, "ranks", None), "joined", False):
            self.save_last(algorithm)  # where a rank is killed, the others have something to go on from

    def on_step(self, *, algorithm=None, **info: Any) -> bool:
        algorithm = _algorithm(self, algorithm, **info)
        if isinstance(algorithm, _HandWritten):
            algorithm.require("policy")  # now, not at the first save
        self._tell(algorithm)
        steps = algorithm.counters.steps - self._saved_step
        due = time.monotonic() - self._saved_at >= self.every_s or steps >= (self.every_steps or math.inf)
        # One that knows nothing of an evaluation whose step has passed would lose it.
        self.waits_for_evaluation = bool(due and steps and self._copies)
        if due and steps and "last" not in self._writes and not self._copies:
            self.save_last(algorithm)
        return True

    def on_evaluation_start(self, *, step: int, algorithm, **info: Any) -> None:
        write = algorithm.snapshot(self.folder / "best.safetensors", run=self.run)
        self._copies[step] = write, algorithm.callbacks.state()

    def on_evaluation(self, *, evaluation, step: int | None = None, algorithm=None, **info: Any) -> None:
        algorithm = _algorithm(self, algorithm, **info)
        copied = None if step is None else self._copies.pop(step, None)
        summary = evaluation.summary()
        if self.best < summary["mean_return"] < math.inf:
            self.best = summary["mean_return"]
            kept = {**summary, "seed": evaluation.seed, "deterministic": evaluation.deterministic}
            if step is None or copied is None:
                self._save(algorithm, "best", evaluation=kept)
                return
            write, states = copied
            # As of that step, but for those that the evaluation itself changes.
            now, named = algorithm.callbacks.state(), algorithm.callbacks.by_name()
            scored = [name for name, callback in named.items() if isinstance(callback, (EvalCallback, type(self)))]
            states |= {name: now[name] for name in scored if name in now}
            self._write(algorithm, "best", step, partial(write, evaluation=kept, callbacks=states))

    def on_collection_error(self, *, algorithm, **info: Any) -> None:
        # A disk that is full as well must not hide what the environment said.
        with suppress(OSError):
            if not self._copies:
                self.save_last(algorithm)

    def on_training_error(self, *, algorithm, **info: Any) -> None:
        with suppress(OSError):
            self._tell(algorithm, wait=True)

    def on_training_end(self, *, algorithm=None, **info: Any) -> None:
        algorithm = _algorithm(self, algorithm, **info)
        self.save_last(algorithm)
        self._tell(algorithm, wait=True)

    def save_last(self, algorithm) -> None:
        """Begin to write ``last.safetensors`` now, unless it already holds this step."""
        if self._saved_step != algorithm.counters.steps or not (self.folder / "last.safetensors").is_file():
            self._save(algorithm, "last", memory=self.memory)
            self._saved_step = algorithm.counters.steps
        self._saved_at = time.monotonic()

    def _save(self, algorithm, kind: str, **header: Any) -> None:
        write = algorithm.snapshot(self.folder / f"{kind}.safetensors", run=self.run, **header)
        self._write(algorithm, kind, algorithm.counters.steps, write)

    def _write(self, algorithm, kind: str, step: int, write: Callable[[], None]) -> None:
        if kind in self._writes:
            self._writes[kind].join()
            self._tell(algorithm)
        self._writes[kind] = _Write(write, step=step, kind=kind, path=self.folder / f"{kind}.safetensors")
        self._writes[kind].start()

    def _tell(self, algorithm, wait: bool = False) -> None:
        """See after what is being written: say what is there, raise what went wrong."""
        for kind, write in list(self._writes.items()):
            if wait:
                write.join()
            if write.is_alive():
                continue
            del self._writes[kind]
            if write.error is not None:
                raise write.error
            algorithm.callbacks.on_checkpoint(**write.info, algorithm=algorithm)
