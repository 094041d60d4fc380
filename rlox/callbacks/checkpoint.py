"""Save checkpoints while training."""

from __future__ import annotations

import errno
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from rlox.callbacks.base import Callback, _algorithm, _finite, _HandWritten, _score
from rlox.callbacks.evaluation import EvalCallback
from rlox.checkpoint import read_header, run_files


class _Write(threading.Thread):
    """Thread that writes a checkpoint to disk."""

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
    """Save ``last.safetensors`` (every `every_s` seconds and at the end) and ``best.safetensors`` (by evaluation).

    Training waits only for a copy; a thread writes it while training continues, and ``on_checkpoint`` is called when
    the file is safely on disk. If ``last`` is due while the previous one is still being written, it is saved right
    after that. A data-parallel training writes its first checkpoint before its first step.

    Parameters
    ----------
    folder : path
        Folder of the two files.
    every_s : float
        Seconds between two saves of ``last``.
    run : dict, optional
        The resolved configuration of the run, stored in the header.
    memory : bool
        Whether the replay memory is saved with ``last``, in ``memory/`` (off-policy).
    every_steps : int, optional
        Environment steps (offline: updates) between two saves of ``last``; `every_s` applies as well, whichever comes
        first.
    policy : nn.Module, optional
        The policy to save, for a hand-written loop that passes no algorithm. `rlox.checkpoint.load_checkpoint` reads
        the weights, and ``init_from`` of an algorithm with such a policy starts from them.

    Raises
    ------
    OSError
        From the training, at its next update, if a checkpoint could not be written or the folder is gone.
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
        if not every_s >= 0:
            raise ValueError(f"CheckpointCallback: every_s must be >= 0, got {every_s}")
        if every_steps is not None and every_steps < 1:
            raise ValueError(f"CheckpointCallback: every_steps must be >= 1, or None, got {every_steps}")
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
        self._stays: list[Path] = []  # what must not be moved or deleted during the training
        # By the step of a pending evaluation: the function that writes that step's checkpoint, and callback states.
        self._copies: dict[int, tuple[Callable[..., None], dict[str, Any]]] = {}

    def state(self) -> dict[str, Any]:
        return {"best": _finite(self.best)}

    def set_state(self, state: dict[str, Any]) -> None:
        self.best = _score(state["best"])

    def on_training_start(self, *, algorithm=None, **info: Any) -> None:
        self._saved_at = time.monotonic()
        self._copies.clear()
        with suppress(OSError):  # which the first save reports
            self.folder.mkdir(parents=True, exist_ok=True)
        self._stays = [path for path in (self.folder, self.folder.parent / run_files.RECORD) if path.exists()]
        if self._saved_step is None:
            algorithm = _algorithm(self, algorithm)
            self._saved_step, path = algorithm.counters.steps, self.folder / "last.safetensors"
            if self._saved_step and not isinstance(algorithm, _HandWritten) and path.is_file():
                # A training that went back to another checkpoint must not be resumed from the one that it left.
                kept: dict[str, int] = {}
                with suppress(ValueError):  # a damaged file is replaced, too
                    kept = read_header(path)["counters"]
                if any(kept.get(name) != getattr(algorithm.counters, name) for name in ("env_steps", "updates")):
                    self._saved_step = -1
                    self.save_last(algorithm)
        if getattr(getattr(algorithm, "ranks", None), "joined", False):
            self.save_last(algorithm)  # if a rank is killed, the others can continue from it

    def on_step(self, *, algorithm=None, **info: Any) -> bool:
        algorithm = _algorithm(self, algorithm, **info)
        if isinstance(algorithm, _HandWritten):
            algorithm.require("policy")  # fail now, not at the first save
        if self._saved_step is None:  # a loop of one's own may call `on_step` alone
            self.on_training_start(algorithm=algorithm)
        self._check_writes(algorithm)
        steps = algorithm.counters.steps - self._saved_step
        due = time.monotonic() - self._saved_at >= self.every_s or steps >= (self.every_steps or math.inf)
        # A checkpoint saved while an evaluation of an earlier step is pending would lose that evaluation.
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
            score = {**summary, "seed": evaluation.seed, "deterministic": evaluation.deterministic}
            if step is None or copied is None:
                step = algorithm.counters.steps
                write = algorithm.snapshot(self.folder / "best.safetensors", run=self.run, evaluation=score)
            else:
                snapshot, states = copied
                # Use the states of that step, except for callbacks that the evaluation itself changes.
                now, named = algorithm.callbacks.state(), algorithm.callbacks.by_name()
                scored = [name for name, callback in named.items() if isinstance(callback, (EvalCallback, type(self)))]
                states |= {name: now[name] for name in scored if name in now}
                write = partial(snapshot, evaluation=score, callbacks=states)
            self._write(algorithm, "best", step, write)

    def on_collection_error(self, *, algorithm, **info: Any) -> None:
        # A full disk must not hide the environment's error.
        with suppress(OSError):
            if not self._copies:
                self.save_last(algorithm)

    def on_training_error(self, *, algorithm, **info: Any) -> None:
        with suppress(OSError):
            # An evaluation or another callback failed, not an update: what was learned is worth keeping.
            after_update = algorithm.callbacks.failed_hook in ("on_step", "on_evaluation", "on_training_end")
            if after_update and not (self._copies or algorithm.ranks.joined):
                self.save_last(algorithm)
            self._check_writes(algorithm, wait=True)

    def on_training_end(self, *, algorithm=None, **info: Any) -> None:
        algorithm = _algorithm(self, algorithm, **info)
        self.save_last(algorithm)
        self._check_writes(algorithm, wait=True)

    def save_last(self, algorithm) -> None:
        """Start writing ``last.safetensors`` now, unless it already contains this step."""
        step, path = algorithm.counters.steps, self.folder / "last.safetensors"
        if self._saved_step != step or not path.is_file():
            self._write(algorithm, "last", step, algorithm.snapshot(path, run=self.run, memory=self.memory))
            self._saved_step = step
        self._saved_at = time.monotonic()

    def _write(self, algorithm, kind: str, step: int, write: Callable[[], None]) -> None:
        if kind in self._writes:
            self._writes[kind].join()
            self._check_writes(algorithm)
        if not all(path.exists() for path in self._stays):
            raise self._gone()
        self._writes[kind] = _Write(write, step=step, kind=kind, path=self.folder / f"{kind}.safetensors")
        self._writes[kind].start()

    def _check_writes(self, algorithm, wait: bool = False) -> None:
        """Check the running writes: report the finished ones to callbacks, and raise their errors."""
        for kind, write in list(self._writes.items()):
            if wait:
                write.join()
            if write.is_alive():
                continue
            del self._writes[kind]
            if write.error is not None:
                raise write.error if all(path.exists() for path in self._stays) else self._gone()
            algorithm.callbacks.on_checkpoint(**write.info, algorithm=algorithm)

    def _gone(self) -> FileNotFoundError:
        text = "CheckpointCallback: folder must stay where it is during the training, but was moved or deleted"
        return FileNotFoundError(errno.ENOENT, text, str(self.folder))
