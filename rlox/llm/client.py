"""A client of a server that speaks JSON over HTTP: connections that are kept, several requests at once, retries."""

from __future__ import annotations

import http.client
import json
import numbers
import queue
import random
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from rlox.checkpoint import one_line
from rlox.config import integer, shown

T = TypeVar("T")
R = TypeVar("R")

MOST_BYTES = 1 << 30  # of one answer
_AGAIN = frozenset((429, 502, 503, 504))  # statuses of a server that is busy, or starts
_LONGEST_PAUSE = 30.0  # seconds between two tries
_OF_TOKENS = (401, 403)  # statuses that say nothing of the request itself
_SOON = 10.0  # seconds that a server has for a question about itself


class ServerLost(ConnectionError):
    """A server that does not answer, or stays busy, however often it is asked."""


def is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def seconds(where: str, name: str, value: Any, least: float) -> float:
    """`value` as a float; a ValueError unless it is a number of seconds."""
    if not is_number(value) or not least <= value <= 1e6:
        raise ValueError(f"{where}: {name} must be a number of seconds >= {least:g}, got {shown(value)}")
    return float(value)


def checked_token(where: str, token: Any) -> str | None:
    """`token`; a ValueError unless it fits into a header. The message leaves it out: it is a secret."""
    if token is not None and not (
        isinstance(token, str) and token and token.isascii() and token.isprintable() and " " not in token
    ):
        raise ValueError(f"{where}: token must be a text of ASCII characters without spaces, got another")
    return token


class Client:
    """Asks a server. Threads may share it.

    Parameters
    ----------
    where : str
        Who asks, for messages.
    url : str
        Such as ``http://127.0.0.1:8000``; paths are added to it.
    token : str, optional
        Sent as ``Authorization: Bearer TOKEN``.
    timeout : float
        Seconds to wait for the server to say something.
    retries : int
        How often to ask again where no connection comes about or holds, or the server is busy (429, 502, 503, 504).
    pause : float
        Seconds before the first of these, at most; each later one waits twice as long, at most 30 seconds.
    concurrency : int
        Most requests at once by `map`.
    remedies : mapping, optional
        What to do, by the status of a refusal.

    Attributes
    ----------
    url : str
        As given, without a slash at its end.
    lost : int
        How often a connection has broken off.

    Raises
    ------
    TypeError, ValueError
        If an argument is out of range.
    """

    def __init__(
        self,
        where: str,
        url: str,
        token: str | None,
        timeout: float,
        retries: int,
        pause: float,
        concurrency: int = 1,
        remedies: Mapping[int, str] | None = None,
    ) -> None:
        self._arguments = (where, url, token, timeout, retries, pause, concurrency, remedies)
        try:
            parts = urllib.parse.urlsplit(url) if isinstance(url, str) else None
            port = None if parts is None else parts.port
        except ValueError:  # of a port that is none
            parts = None
        if parts is None or parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ValueError(f"{where}: url must be such as 'http://127.0.0.1:8000', got {shown(url)}")
        if parts.username is not None:
            raise ValueError(f"{where}: url must be without a user and a password, got one; pass token=…")
        self.url = url.rstrip("/")
        self._where = f"{where} {self.url}"
        self._host, self._port, self._base = parts.hostname, port, parts.path.rstrip("/")
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if checked_token(where, token) is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._timeout, self._pause = seconds(where, "timeout", timeout, 1e-3), seconds(where, "pause", pause, 0.0)
        self._retries = integer(where, "retries", retries, 0)
        self._concurrency = integer(where, "concurrency", concurrency, 1, 1024)
        self._remedies = remedies or {}
        self._idle: queue.LifoQueue[http.client.HTTPConnection] = queue.LifoQueue()
        self._pool: ThreadPoolExecutor | None = None
        self._lock, self._random = threading.Lock(), random.Random()
        self.lost = 0

    def __reduce__(self) -> Any:
        # A copy, in another process say, has connections of its own.
        return Client, self._arguments

    def post(self, path: str, body: Any = None, remedy: str = "") -> Any:
        """The JSON that the server answers to `body`; None where it says nothing.

        Raises
        ------
        ServerLost
            If it does not answer, or stays busy.
        RuntimeError
            If it refuses the request, with what it says, and the `remedy`.
        ValueError
            If it answers anything but JSON.
        """
        return self._json(path, self.send(path, body, remedy))

    def send(self, path: str, body: Any = None, remedy: str = "") -> bytes:
        """As `post`, whatever is answered."""
        return self._asked("POST", path, b"" if body is None else json.dumps(body).encode(), remedy)

    def get(self, path: str, remedy: str = "") -> Any:
        """As `post`, without a body; text that is no JSON, as some servers have of their health, is None."""
        answer = self._asked("GET", path, None, remedy, min(self._timeout, _SOON))
        return self._json(path, answer) if answer[:1] in (b"{", b"[") else None

    def status(self, path: str) -> int:
        """The status of a GET, whatever it is; a path that only takes a POST has 405, and one that is not there 404."""
        return self._tried("GET", path, None, min(self._timeout, _SOON))[0]

    def is_up(self) -> bool:
        """Whether ``GET /health`` is answered by 200, asked once."""
        try:
            return self._exchange("GET", "/health", None, min(self._timeout, _SOON))[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """`function` of each of `items`, at most `concurrency` at once; the first that fails ends it."""
        rows = list(items)
        if len(rows) <= 1:
            return [function(row) for row in rows]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._concurrency, thread_name_prefix="rlox-sampler")
        futures = [self._pool.submit(function, row) for row in rows]
        try:
            return [future.result() for future in futures]
        except BaseException:
            for future in futures:
                future.cancel()
            raise

    def close(self) -> None:
        """Close every connection that is idle; the next request opens new ones."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None
        while True:
            try:
                self._idle.get_nowait().close()
            except queue.Empty:
                return

    def _json(self, path: str, answer: bytes) -> Any:
        if not answer.strip():
            return None
        try:
            return json.loads(answer)
        except (ValueError, RecursionError) as e:
            raise ValueError(
                f"{self._where}{path}: the server must answer JSON, got {shown(answer[:200])}; is url= that of the "
                "server itself?"
            ) from e

    def _asked(self, method: str, path: str, data: bytes | None, remedy: str, timeout: float | None = None) -> bytes:
        status, reason, answer = self._tried(method, path, data, self._timeout if timeout is None else timeout)
        if 200 <= status < 300:
            return answer
        what = remedy if remedy and status not in _OF_TOKENS else self._remedies.get(status, "")
        raise RuntimeError(
            f"{self._where}{path}: the server must accept the request, got {status} "
            f"({one_line(_said(answer) or reason, 400)}){what and f'; {what}'}"
        )

    def _tried(self, method: str, path: str, data: bytes | None, timeout: float) -> tuple[int, str, bytes]:
        """Status, reason and body, asked again where that may help."""
        pause, last = self._pause, ""
        for tries in range(self._retries + 1):
            if tries:
                # Of several that were refused together each comes back at another time.
                time.sleep(pause * (0.5 + 0.5 * self._random.random()))
                pause = min(2 * pause, _LONGEST_PAUSE)
            try:
                status, reason, answer, later = self._exchange(method, path, data, timeout)
            except (OSError, http.client.HTTPException) as e:
                self._lose()
                last = one_line(e) or type(e).__name__
                continue
            if status not in _AGAIN:
                return status, reason, answer
            last = f"{status} ({one_line(_said(answer) or reason)})"
            pause = max(pause, min(later, _LONGEST_PAUSE))
        raise ServerLost(
            f"{self._where}{path}: the server must answer within {timeout:g} s, got {last} {self._retries + 1} times; "
            "start it, look into its log, or raise timeout or retries"
        )

    def _lose(self) -> None:
        with self._lock:
            self.lost += 1

    def _exchange(self, method: str, path: str, data: bytes | None, timeout: float) -> tuple[int, str, bytes, float]:
        """One request: status, reason, body, and the seconds to wait that the server asks for."""
        while True:
            try:
                connection, kept = self._idle.get_nowait(), True
            except queue.Empty:
                connection, kept = self._kind(self._host, self._port, timeout=timeout), False
            try:
                return self._over(connection, method, path, data, timeout)
            except TimeoutError:
                connection.close()
                raise
            except (OSError, http.client.HTTPException):
                connection.close()
                if not kept:
                    raise
                # One that was kept may have been closed meanwhile: by a server that was started anew, too.
                self._lose()
            except BaseException:
                connection.close()
                raise

    def _over(
        self, connection: http.client.HTTPConnection, method: str, path: str, data: bytes | None, timeout: float
    ) -> tuple[int, str, bytes, float]:
        if connection.sock is None:
            connection.timeout = timeout
            connection.connect()
            assert connection.sock is not None
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sock.settimeout(timeout)
        connection.request(method, self._base + path, data, self._headers)
        answer = connection.getresponse()
        # Without a bound `read` notices an answer that breaks off.
        long = answer.length is not None and answer.length > MOST_BYTES
        body = b"" if long else answer.read() if answer.length is not None else answer.read(MOST_BYTES + 1)
        if long or len(body) > MOST_BYTES:
            connection.close()
            raise ValueError(f"{self._where}{path}: an answer must have at most {MOST_BYTES:,} bytes; ask for fewer")
        later = answer.getheader("Retry-After") or ""
        if answer.will_close:
            connection.close()
        else:
            self._idle.put(connection)
        return answer.status, answer.reason, body, float(later) if later.isascii() and later.isdigit() else 0.0


def _said(answer: bytes) -> str:
    """What a server says of an error, in whichever of the usual places."""
    try:
        found = json.loads(answer)
    except (ValueError, RecursionError):
        text = answer[:400].decode(errors="replace")
        return "" if text.lstrip().startswith("<") else text  # the reason says more than a page of HTML
    for _ in range(3):
        if not isinstance(found, dict):
            break
        found = next((found[name] for name in ("error", "message", "detail") if found.get(name)), "")
    return found if isinstance(found, str) else shown(found)
