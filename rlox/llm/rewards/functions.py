"""User-defined reward functions: their two forms, their weights, and checks of their results.

The names of its first two parameters decide the form of a function. Without a tokenizer, only the token form is
possible, and the names do not matter:

- the token form, ``(completions, prompts) -> list[float]``, takes N tensors of token ids, and (N, P) token ids;
- the text form, ``(prompts, completions, **columns) -> list[float]``, takes N texts or chats, and N texts. It may also
  be an object with such a method ``score_batch``.

Both forms get columns of the dataset by keyword: those that match a parameter's name, or all columns if the function
takes ``**kwargs``. A parameter ``ended`` gets N bools: False where `max_new_tokens` or the model's context cut the
completion off. Both may be ``async``. A result of None instead of a number means that the reward does not apply to
that completion.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import numbers
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch

from rlox.config import nearest, shown
from rlox.processes.failures import note_cause, require_exception

TOKEN_FORM = "(completions: list[Tensor], prompts: Tensor) -> list[float]"
TEXT_FORM = "(prompts: list[str], completions: list[str], **columns) -> list[float]"

_SHOWN = 80  # characters of a prompt or completion in a message


def excerpt(text: Any) -> str:
    """Shorten a text, chat or tensor of ids for a message: one line of at most 80 characters."""
    line = shown(text.tolist() if isinstance(text, torch.Tensor) else text)
    return line if len(line) <= _SHOWN else f"{line[: _SHOWN - 3]}..."


def pair_excerpt(prompt: Any, completion: Any) -> str:
    """Describe the prompt and completion that an error is about."""
    return f"prompt {excerpt(prompt)}, completion {excerpt(completion)}"


def check_pairs(where: str, prompts: Any, completions: Any) -> None:
    """Raise a TypeError or ValueError unless prompts and completions are lists of the same length."""
    for name, texts in (("prompts", prompts), ("completions", completions)):
        if isinstance(texts, str) or not isinstance(texts, Sequence):
            raise TypeError(f"{where}: {name} must be a list of texts, got {shown(texts)}")
    if len(prompts) != len(completions):
        raise ValueError(f"{where}: prompts must be as many as completions, got {len(prompts)} and {len(completions)}")


def as_scores(what: str, result: Any, n: int, describe: Callable[[int], str], optional: bool = False) -> np.ndarray:
    """Convert the result of a reward, a list, array or tensor of `n` finite numbers, to (N,) float64.

    `what` starts error messages; ``describe(row)`` returns a description of a row's prompt and completion. None is
    allowed instead of a number if `optional`, and becomes NaN.

    Raises TypeError if `result` is not a sequence of numbers, and ValueError if it does not contain N finite ones.
    """
    if isinstance(result, (torch.Tensor, np.ndarray)):
        if result.ndim != 1:
            shape = tuple(result.shape)
            raise ValueError(f"{what} must return one number for each of {n} completions, got shape {shape}")
        try:
            result = result.tolist()
        except (RuntimeError, TypeError) as e:  # a sparse tensor, or one on the device meta
            raise TypeError(f"{what} must return a dense tensor of {n} numbers, got {shown(result)}") from e
    if not isinstance(result, (list, tuple)):
        raise TypeError(f"{what} must return a list of {n} numbers, got {shown(result)}")
    if len(result) != n:
        at = f" ({describe(min(len(result), n - 1))})" if n else ""
        raise ValueError(f"{what} must return {n} numbers, one for each completion, got {len(result)}{at}")
    scores = np.empty(n)
    for i, value in enumerate(result):
        value = value.item() if isinstance(value, (torch.Tensor, np.ndarray, np.generic)) and value.ndim == 0 else value
        if value is None and optional:
            scores[i] = math.nan
            continue
        remedy = "; return None where it does not apply" if optional else ""
        if not isinstance(value, numbers.Real):
            raise TypeError(f"{what} must return numbers, got {shown(value)} ({describe(i)}){remedy}")
        try:
            scores[i] = float(value)
        except OverflowError:
            scores[i] = math.inf
        if not math.isfinite(scores[i]):
            raise ValueError(f"{what} must return finite numbers, got {shown(value)} ({describe(i)}){remedy}")
    return scores


def takes(function: Any, name: str) -> bool:
    """Return whether a function has a parameter `name`."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # a compiled function without a signature
        return False


def taken(function: Any, **rows: Sequence[Any] | None) -> dict[str, list]:
    """Return those of `rows`, values of each completion, that are given and that the function has a parameter for."""
    return {name: list(values) for name, values in rows.items() if values is not None and takes(function, name)}


@dataclass
class _Function:
    """One reward: how to call it, and the columns that it takes."""

    name: str
    call: Callable[..., Any]
    takes_ids: bool
    parameters: dict[str, bool]  # names after the first two; whether each is required
    takes_all: bool
    takes_ended: bool


def _read(function: Any, where: str, tokenizer: bool) -> _Function:
    """Determine the form of a function by its parameters; without a `tokenizer`, other names mean token ids."""
    bare, call = function, getattr(function, "score_batch", None)
    while isinstance(bare, functools.partial):
        bare = bare.func
    name = getattr(bare, "__name__", type(bare).__name__).strip("<>")
    by_method = call is not None and not inspect.isclass(function)
    call = call if by_method else function
    if not callable(call):
        raise TypeError(f"{where}: a reward must be a function {TEXT_FORM} or {TOKEN_FORM}, got {shown(function)}")
    try:
        signature = inspect.signature(call)
    except ValueError as e:  # a compiled function without a signature
        raise TypeError(f"{where}: reward {name} must have a signature, got {e}; wrap it in a function") from e
    parameters = list(signature.parameters.values())
    by_place = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    first = [p.name for p in by_place[:2]]
    module = isinstance(function, torch.nn.Module)
    takes_ids = first == ["completions", "prompts"] and not by_method
    if not tokenizer and not by_method and not module and first != ["prompts", "completions"]:
        takes_ids = len(by_place) >= 2 or any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if not takes_ids and first != ["prompts", "completions"]:
        wrap = "wrap a model as RewardModelServer(model, tokenizer=...)"
        remedy = wrap if module else "name its first two parameters like this"
        raise TypeError(
            f"{where}: reward {name} must take texts, {TEXT_FORM}, or token ids, {TOKEN_FORM}, got {signature}; "
            f"{remedy}"
        )
    rest = [p for p in parameters if p not in by_place[:2]]
    for p in rest:
        if p.kind is p.POSITIONAL_ONLY and p.default is p.empty:
            raise TypeError(f"{where}: reward {name} must take its parameter {p.name!r} by keyword, got {signature}")
    named = [p for p in rest if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "ended"]
    required, takes_all = {p.name: p.default is p.empty for p in named}, any(p.kind is p.VAR_KEYWORD for p in rest)
    return _Function(name, call, takes_ids, required, takes_all, takes(call, "ended"))


class Rewards:
    """The reward functions of a training, and their weights.

    Parameters
    ----------
    functions : callable, object with ``score_batch``, or a sequence of them
        In the token form or the text form, which the docstring of this module describes.
    weights : sequence of float, optional
        One for each function; 1 by default.
    where : str
        The name that starts error messages.
    tokenizer : bool
        Whether there is a tokenizer. Without one, a function that takes two arguments is in the token form.
    optional : bool
        Whether a completion may have no function that applies, since it has another reward, of its environment.

    Attributes
    ----------
    names : list of str
        Names of the functions or of their classes, made unique with a suffix.
    weights : (K,) float64

    Raises
    ------
    TypeError
        If a function has neither form.
    ValueError
        If there is no function, or the weights are not one finite number for each.
    """

    def __init__(
        self,
        functions: Any,
        weights: Sequence[float] | None = None,
        where: str = "Rewards",
        tokenizer: bool = True,
        optional: bool = False,
    ):
        self._where, self.optional = where, optional
        functions = list(functions) if isinstance(functions, (list, tuple)) else [functions]
        if not functions:
            raise ValueError(f"{where}: there must be at least one reward function, got none")
        self._functions = [_read(function, where, tokenizer) for function in functions]
        self.names: list[str] = []
        for function in self._functions:
            taken, n, name = {*self.names}, 2, function.name
            while function.name in taken:
                function.name, n = f"{name}_{n}", n + 1
            self.names.append(function.name)
        self.weights = self._check_weights([1.0] * len(functions) if weights is None else weights)
        # Kept between calls, because clients that a function holds are bound to the loop they first ran in.
        self._loop: _Loop | None = None
        self._lock = threading.Lock()

    def _check_weights(self, weights: Sequence[float]) -> np.ndarray:
        rule = f"be one finite number for each of {', '.join(self.names)}"
        if isinstance(weights, (str, bytes)) or not isinstance(weights, (Sequence, np.ndarray)):
            raise ValueError(f"{self._where}: weights must {rule}, got {shown(weights)}")
        fits = all(isinstance(w, numbers.Real) and not isinstance(w, bool) and math.isfinite(w) for w in weights)
        if len(weights) != len(self.names) or not fits:
            raise ValueError(f"{self._where}: weights must {rule}, got {shown(weights)}")
        return np.array(weights, dtype=np.float64)

    def __len__(self) -> int:
        return len(self._functions)

    @property
    def needs_text(self) -> bool:
        """Whether any function takes texts."""
        return not all(function.takes_ids for function in self._functions)

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raise a ValueError unless a dataset with these columns fits every function; `scores` checks this too.

        It names the parameter without a column, and the column with the nearest name; also for a column ``ended``, if a
        function has a parameter of this name.
        """
        columns = list(columns)
        for function in self._functions:
            if function.takes_ended and "ended" in columns:
                raise ValueError(
                    f"{self._where}: the dataset must have no column 'ended', because reward {function.name} gets "
                    "under this name whether completions have ended; rename the column"
                )
            for lacks in (name for name, needed in function.parameters.items() if needed and name not in columns):
                hint = nearest(lacks, columns) if columns else "the dataset has no other columns"
                raise ValueError(
                    f"{self._where}: reward {function.name} must find a column for its parameter {lacks!r}, got none; "
                    f"{hint}, or give it a default"
                )

    def scores(
        self,
        prompt_ids: Any,
        completion_ids: Any,
        prompts: Sequence[Any] | None,
        completions: Sequence[str] | None,
        columns: Mapping[str, Sequence[Any]] | None = None,
        ended: Sequence[bool] | np.ndarray | None = None,
    ) -> np.ndarray:
        """Call every function once.

        Parameters
        ----------
        prompt_ids : (N, P) int64 tensor
            Padded on the left. It and `completion_ids` may be None if every function takes texts.
        completion_ids : list of N int64 tensors (T_i,)
        prompts : sequence of N texts or chats
            It and `completions` may be None if `needs_text` is False.
        completions : sequence of N str
        columns : dict of N values each, optional
            Other columns of the dataset.
        ended : sequence of N bool, optional
            Whether completions ended; by default all have.

        Returns
        -------
        (K, N) float64
            NaN where a function does not apply.

        Raises
        ------
        ValueError, TypeError
            Unless functions return N finite numbers or None, and one applies to each completion; with the name of the
            function, the prompt and the completion. Exceptions of a function itself are raised unchanged, with a note.
        """
        columns = columns or {}
        self.check_columns(columns)
        n = self._count(prompt_ids, completion_ids, prompts, completions, columns)
        if n == 0:
            return np.zeros((len(self), 0))

        def describe(row: int) -> str:
            prompt = prompt_ids[row] if prompts is None else prompts[row]
            return pair_excerpt(prompt, completion_ids[row] if completions is None else completions[row])

        # Each function gets copies, so that it cannot change the training data or the arguments of the next function.
        calls = []
        for function in self._functions:
            arguments: tuple[Any, Any]
            if function.takes_ids:
                arguments = ([ids.clone() for ids in completion_ids], prompt_ids.clone())
            else:
                arguments = (list(prompts or ()), list(completions or ()))
            unknown = columns.keys() - {"prompts", "completions"} if function.takes_all else ()
            own = {name: list(rows) for name, rows in columns.items() if name in function.parameters or name in unknown}
            if function.takes_ended:
                own["ended"] = [True] * n if ended is None else [bool(e) for e in ended]
            calls.append(functools.partial(function.call, *arguments, **own))
        scores = np.empty((len(self), n))
        for k, answer in enumerate(self._answers(calls)):
            scores[k] = as_scores(f"{self._where}: reward {self.names[k]}", answer, n, describe, optional=True)
        if not self.optional and (idle := np.isnan(scores).all(0)).any():
            raise ValueError(
                f"{self._where}: at least one reward must apply to every completion, got None from "
                f"{', '.join(self.names)} ({describe(int(idle.argmax()))})"
            )
        return scores

    def combine(self, scores: np.ndarray) -> np.ndarray:
        """Return the weighted sum (N,) f64 of `scores` (K, N) f64 over the functions that apply, not NaN.

        Raises ValueError if the shape is different, or no function applies to a completion, unless that is `optional`.
        """
        scores = np.asarray(scores, dtype=np.float64)
        if scores.ndim != 2 or len(scores) != len(self):
            raise ValueError(f"{self._where}: scores must have shape ({len(self)}, N), got {scores.shape}")
        applies = ~np.isnan(scores)
        if not self.optional and not applies.any(0).all():
            raise ValueError(
                f"{self._where}: at least one reward must apply to every completion, got none for completion "
                f"{int(applies.any(0).argmin())}"
            )
        return self.weights @ np.where(applies, scores, 0.0)

    def _count(self, prompt_ids: Any, completion_ids: Any, prompts: Any, completions: Any, columns: Any) -> int:
        """Return N; raise an error if a required argument is missing, or lengths differ."""
        rows = {"prompts": prompts, "completions": completions} if self.needs_text else {}
        if any(function.takes_ids for function in self._functions):
            rows |= {"completion_ids": completion_ids, "prompt_ids": prompt_ids}
        for name, value in rows.items():
            if value is None:
                asks = next(f.name for f in self._functions if f.takes_ids == name.endswith("ids"))
                raise ValueError(f"{self._where}: {name} must be given, since reward {asks} takes them, got None")
        rows |= {f"column {name}": column for name, column in columns.items()}
        first, n = next((name, len(value)) for name, value in rows.items())
        for name, value in rows.items():
            if len(value) != n:
                raise ValueError(f"{self._where}: {name} must have {n} rows, like {first}, got {len(value)}")
        return n

    def _answers(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Return the result of each function; all awaitable results are awaited together."""
        answers: list[Any] = []
        waiting: dict[int, Awaitable[Any]] = {}
        for k, call in enumerate(calls):
            try:
                answers.append(call())
            except BaseException as e:
                for awaitable in filter(inspect.iscoroutine, waiting.values()):
                    awaitable.close()  # else Python warns that it was never awaited
                self._raise_named(k, e)
            if inspect.isawaitable(answers[k]):
                waiting[k] = answers[k]
        if not waiting:
            return answers
        with self._lock:
            if self._loop is None or not self._loop.is_alive():
                self._loop = _Loop()
            loop = self._loop
        for k, (answer, error) in zip(waiting, loop.wait([*waiting.values()]), strict=True):
            if error is not None:
                self._raise_named(k, error)
            answers[k] = answer
        return answers

    def _raise_named(self, k: int, e: BaseException) -> NoReturn:
        """Raise a function's exception with a note that names the function; see also `require_exception`."""
        require_exception(e, f"{self._where}: reward {self.names[k]}", f"reward {self.names[k]}")
        note_cause(e, f"reward {self.names[k]}")
        raise e


class _Loop:
    """An event loop in its own thread, so that it does not matter whether the caller already runs a loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_run, args=(self._loop,), name="rlox rewards", daemon=True)
        self._thread.start()
        self._stop = weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)

    def is_alive(self) -> bool:
        """Return False if the loop was stopped, and in a forked process, where its thread does not exist."""
        return self._stop.alive and self._thread.is_alive()

    def wait(self, awaitables: Sequence[Awaitable[Any]]) -> list[tuple[Any, BaseException | None]]:
        """Await all of `awaitables` together, and return the result or the exception of each."""
        try:
            return asyncio.run_coroutine_threadsafe(_gather(awaitables), self._loop).result()
        except BaseException:  # Ctrl-C
            self._stop()
            raise


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop until it is stopped, then cancel the remaining tasks."""
    try:
        loop.run_forever()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
    finally:
        loop.close()


async def _gather(awaitables: Sequence[Awaitable[Any]]) -> list[tuple[Any, BaseException | None]]:
    return await asyncio.gather(*map(_caught, awaitables))


async def _caught(awaitable: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    try:
        return await awaitable, None
    except BaseException as e:  # also SystemExit, which would end the loop and leave the caller waiting forever
        return None, e
