"""Settings and checks that all server backends share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rlox.config import shown
from rlox.llm.backends.base import Backend
from rlox.llm.client import Client

_TOKEN = "give it the server's token: token=…, or the environment variable RLOX_SAMPLER_TOKEN"
_REMEDIES = {401: _TOKEN, 403: _TOKEN, 404: "is it a server of this kind, and is url= its root, without /v1?"}


class HTTPBackend(Backend):
    """Base class of backends that are servers.

    Parameters
    ----------
    url : str
        Root of the server, such as ``http://127.0.0.1:8000``.
    token : str, optional
        Token that the server requires.
    timeout : float
        Seconds to wait for an answer; the completions of one request may take this long.
    retries : int
        Number of retries if a connection fails or breaks, or the server is busy (429, 502, 503, 504).
    pause : float
        Longest pause in seconds before the first retry; it doubles with each later retry, up to 30 seconds.
    concurrency : int
        Maximum number of concurrent requests.
    **more
        Arguments of `Backend`.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        timeout: float = 300.0,
        retries: int = 3,
        pause: float = 0.5,
        concurrency: int = 64,
        **more: Any,
    ):
        super().__init__(**more)
        self.client = Client(self.where, url, token, timeout, retries, pause, concurrency, _REMEDIES)
        self.where = f"{self.where} {self.client.url}"

    @property
    def lost(self) -> int:
        return self.client.lost

    def is_up(self) -> bool:
        return self.client.is_up()

    def close(self) -> None:
        self.client.close()
        super().close()

    def _require_healthy(self) -> None:
        self.client.get("/health", f"url= must be the root of a server of {self.kind}")

    def _require_context(self, context: Any, longest: int, remedy: str) -> None:
        """Store `context` as the server's; raise a ValueError unless sequences of `longest` tokens fit."""
        self.context = context if isinstance(context, int) else None
        if self.context is not None and longest > self.context:
            raise ValueError(
                f"{self.where}: the server's context must hold {longest} tokens for a completion, got {context};"
                f" {remedy}, or lower max_new_tokens"
            )

    def _require_paths(self, paths: Iterable[str], remedy: str) -> None:
        """Raise a ValueError unless each of `paths` accepts a POST."""
        for path in paths:
            status = self.client.status(path)
            if status in (404, 501):
                raise ValueError(
                    f"{self.where}{path}: the server must take new weights, and has no such path; {remedy}"
                )
            if status in (401, 403):
                raise ValueError(
                    f"{self.where}{path}: the server must let the trainer give it weights, got {status}; {remedy}, or "
                    "pass the right token"
                )


def field(content: Any, name: str, kind: Any, place: str) -> Any:
    """Return the value of `name` in an object of an answer; raise a ValueError unless it is of the `kind`."""
    value = content.get(name) if isinstance(content, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
        got = f"got {shown(value)}" if isinstance(content, dict) else f"got {shown(content)} instead of an object"
        raise ValueError(f"{place} must have {name}, {got}: the server omits requested values")
    return value
