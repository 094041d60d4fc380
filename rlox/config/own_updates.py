"""Whether an `update` from outside rlox may learn with masks of legal actions, or with a memory."""

from __future__ import annotations

from typing import Any

# By the word in `reads`: what an update that does not read it gets wrong.
_IGNORED = {
    "masks": "would count illegal actions as possible",
    "sequences": "would take every step for the first one of an episode",
}


def require_reads(algorithm: Any) -> None:
    """Raise ValueError if `update` is from outside rlox, and may ignore masks of legal actions or a memory.

    An algorithm declares what it reads in the class that defines `update`, or below:
    ``reads = ("masks", "sequences")``.
    """
    where, memory = type(algorithm).__name__, algorithm.config.memory if algorithm.config.recurrent else None
    if algorithm.spec.masked and (reason := _find_undeclared(algorithm, "masks")) is not None:
        what = "dataset" if algorithm.config.uses_dataset == "must" else "environment"
        raise ValueError(f"{where}: the {what} must not have action masks: {reason}")
    if memory is not None and (reason := _find_undeclared(algorithm, "sequences")) is not None:
        raise ValueError(f"{where}: memory must be none, got {memory}: {reason}")


def _find_undeclared(algorithm: Any, word: str) -> str | None:
    """Return why the `update` of `algorithm` may not be used; None if it is rlox's own, or declared to read `word`."""
    for kind in type(algorithm).__mro__:
        if word in vars(kind).get("reads", ()):
            return None
        if "update" in vars(kind):
            if kind.__module__.startswith("rlox."):
                return None
            return (
                f"the update of {kind.__name__} does not declare that it reads batch.{word}, without which it "
                f"{_IGNORED[word]}; if it does, write reads = ({word!r},) in the class"
            )
    return None
