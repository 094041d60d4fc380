"""A client for JSON over HTTP, with persistent connections, concurrent requests and retries."""

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
_AGAIN = frozenset((429, 502, 503, 504))  # statuses of a server that is busy or starting
_LONGEST_PAUSE = 30.0  # seconds between two tries
_OF_TOKENS = (401, 403)  # statuses about the token, not about the request itself
_SOON = 10.0  # timeout in seconds of requests about the server itself


class ServerLost(ConnectionError):
    """Raised when a server does not answer, or stays busy, after all retries."""


def is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def seconds(where: str, name: str, value: Any, least: float) -> float:
    """Return `value` as a float; raise a ValueError unless it is a number of seconds."""
    if not is_number(value) or not least <= value <= 1e6:
        raise ValueError(f"{where}: {name} must be a number of seconds >= {least:g}, got {shown(value)}")
    return float(value)


def check_token(where: str, token: Any) -> str | None:
    """Return `token`; raise a ValueError unless it fits into a header. It is a secret, so the message omits it."""
    if token is not None and not (
        isinstance(token, str) and token and token.isascii() and token.isprintable() and " " not in token
    ):
        raise ValueError(f"{where}: token must be a text of ASCII characters without spaces")
    return token


class Client:
    """HTTP client of one server. Threads may share it.

    `where` is the caller's name for messages, `url` the server's root, and `token` is sent as ``Authorization: Bearer
    TOKEN``. It waits `timeout` seconds for data, and retries `retries` times if a connection fails or breaks, or the
    server is busy (429, 502, 503, 504), after at most `pause` seconds, which double with each retry, up to 30 seconds.
    `map` has at most `concurrency` requests at once; `remedies` complete error messages, by HTTP status.

    Attributes
    ----------
    lost : int
        How many times a connection failed or broke.

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
        except ValueError:  # an invalid port
            parts = None
        if parts is None or parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ValueError(f"{where}: url must be such as 'http://127.0.0.1:8000', got {shown(url)}")
        if parts.username is not None:
            raise ValueError(f"{where}: url must not contain a user name or password; pass token=…")
        self.url = url.rstrip("/")
        self._where = f"{where} {self.url}"
        self._host, self._port, self._base = parts.hostname, port, parts.path.rstrip("/")
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if check_token(where, token) is not None:
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
        # A copy, for example in another process, opens its own connections.
        return Client, self._arguments

    def post(self, path: str, body: Any = None, remedy: str = "") -> Any:
        """Send `body` and return the JSON of the answer, or None if the answer is empty.

        Raises ServerLost if the server does not answer, or stays busy, RuntimeError if it refuses the request, with its
        explanation and the `remedy`, and ValueError if its answer is not JSON.
        """
        return self._json(path, self.send(path, body, remedy))

    def send(self, path: str, body: Any = None, remedy: str = "") -> bytes:
        """Send `body` as `post` does, but return the answer as bytes, whatever it contains."""
        return self._request("POST", path, b"" if body is None else json.dumps(body).encode(), remedy)

    def get(self, path: str, remedy: str = "") -> Any:
        """Send a GET and return its JSON. Other text, which some servers return for their health, gives None."""
        answer = self._request("GET", path, None, remedy, min(self._timeout, _SOON))
        return self._json(path, answer) if answer[:1] in (b"{", b"[") else None

    def status(self, path: str) -> int:
        """Return the status of a GET: 405 for a path that only accepts a POST, 404 for a path that does not exist."""
        return self._send_with_retries("GET", path, None, min(self._timeout, _SOON))[0]

    def is_up(self) -> bool:
        """Return whether ``GET /health`` is answered with status 200, without retries."""
        try:
            return self._exchange("GET", "/health", None, min(self._timeout, _SOON))[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Apply `function` to each of `items`, at most `concurrency` at once; the first exception stops it."""
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
        """Close all idle connections; the next request opens a new one."""
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
                f"{self._where}{path}: the server must answer JSON, got {shown(answer[:200])}; is url= the root of the "
                "server?"
            ) from e

    def _request(self, method: str, path: str, data: bytes | None, remedy: str, timeout: float | None = None) -> bytes:
        status, reason, answer = self._send_with_retries(
            method, path, data, self._timeout if timeout is None else timeout
        )
        if 200 <= status < 300:
            return answer
        what = remedy if remedy and status not in _OF_TOKENS else self._remedies.get(status, "")
        raise RuntimeError(
            f"{self._where}{path}: the server must accept the request, got {status} "
            f"({one_line(_error_text(answer) or reason, 400)}){what and f'; {what}'}"
        )

    def _send_with_retries(self, method: str, path: str, data: bytes | None, timeout: float) -> tuple[int, str, bytes]:
        """Send a request, with retries where they may help, and return status, reason and body."""
        pause, last = self._pause, ""
        for tries in range(self._retries + 1):
            if tries:
                # Random, so that requests that failed together do not all return at the same time.
                time.sleep(pause * (0.5 + 0.5 * self._random.random()))
                pause = min(2 * pause, _LONGEST_PAUSE)
            try:
                status, reason, answer, later = self._exchange(method, path, data, timeout)
            except (OSError, http.client.HTTPException) as e:
                self._count_lost()
                last = one_line(e) or type(e).__name__
                continue
            if status not in _AGAIN:
                return status, reason, answer
            last = f"{status} ({one_line(_error_text(answer) or reason)})"
            pause = max(pause, min(later, _LONGEST_PAUSE))
        raise ServerLost(
            f"{self._where}{path}: the server must answer within {timeout:g} s, got {last} {self._retries + 1} times; "
            "start it, check its log, or raise timeout or retries"
        )

    def _count_lost(self) -> None:
        with self._lock:
            self.lost += 1

    def _exchange(self, method: str, path: str, data: bytes | None, timeout: float) -> tuple[int, str, bytes, float]:
        """Send one request; return status, reason, body, and the seconds to wait that the server requests."""
        while True:
            try:
                connection, kept = self._idle.get_nowait(), True
            except queue.Empty:
                connection, kept = self._kind(self._host, self._port, timeout=timeout), False
            try:
                return self._send_over(connection, method, path, data, timeout)
            except TimeoutError:
                connection.close()
                raise
            except (OSError, http.client.HTTPException):
                connection.close()
                if not kept:
                    raise
                # The server may have closed an idle connection, or may have been restarted.
                self._count_lost()
            except BaseException:
                connection.close()
                raise

    def _send_over(
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
        # Only `read` without a limit notices that an answer is incomplete.
        long = answer.length is not None and answer.length > MOST_BYTES
        body = b"" if long else answer.read() if answer.length is not None else answer.read(MOST_BYTES + 1)
        if long or len(body) > MOST_BYTES:
            connection.close()
            raise ValueError(f"{self._where}{path}: an answer must have at most {MOST_BYTES:,} bytes; request less")
        later = answer.getheader("Retry-After") or ""
        if answer.will_close:
            connection.close()
        else:
            self._idle.put(connection)
        return answer.status, answer.reason, body, float(later) if later.isascii() and later.isdigit() else 0.0


def _error_text(answer: bytes) -> str:
    """Return a server's explanation of an error, from whichever of the usual fields contains it."""
    try:
        content = json.loads(answer)
    except (ValueError, RecursionError):
        text = answer[:400].decode(errors="replace")
        return "" if text.lstrip().startswith("<") else text  # the status is more helpful than a page of HTML
    for _ in range(3):
        if not isinstance(content, dict):
            break
        content = next((content[name] for name in ("error", "message", "detail") if content.get(name)), "")
    return content if isinstance(content, str) else shown(content)
