"""Rewards over HTTP, so that the reward model can run in another process or on another machine.

``POST /score`` takes ``{"prompts": [...], "completions": [...]}`` and answers ``{"scores": [...]}``; ``GET /health``
answers ``{"status": "ok"}``; the answer to a rejected request is ``{"error": "..."}``. A request may contain ``ended``,
a list of booleans: false for completions that were cut off; ``tools`` and ``chat_template_kwargs``, lists of the
arguments of each prompt's chat template.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import socket
import socketserver
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from rlox.checkpoint import one_line
from rlox.config import integer, require, shown
from rlox.llm.client import Client, check_token
from rlox.llm.data import Text, check_text
from rlox.llm.rewards.functions import as_scores, check_pairs, pair_excerpt, taken
from rlox.llm.templates import COLUMNS

MOST_BYTES = 64 << 20  # of one request
MOST_ROWS = 65_536  # of one request

_REMEDIES = {
    401: "pass token= with the server's token; on the command line, set the variable RLOX_REWARD_TOKEN",
    404: "pass url= with the value of RewardHTTPServer.url",
    413: "score fewer completions at a time",
    500: "the reward of the server has failed: fix it there",
}


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Refused(Exception):
    """Raised for a request that is answered with an error."""

    def __init__(self, status: int, content: str):
        super().__init__(content)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    timeout = 60  # seconds that a client may be silent
    server_version, sys_version = "rlox", ""
    server: _Listener

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the terminal belongs to the training."""

    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer(200, {"status": "ok"})
        else:
            self._refuse(_Refused(405 if self.path == "/score" else 404, "use GET /health, or POST /score"))

    def do_POST(self) -> None:
        try:
            if self.path != "/score":
                raise _Refused(405 if self.path == "/health" else 404, "use POST /score, or GET /health")
            self._check_token()
            prompts, completions, rows = _read_request(self._body())
            score = self.server.reward.score_batch
            more = taken(score, **rows)
            try:
                with self.server.lock:
                    result = score(prompts, completions, **more)
                scores = as_scores(
                    "the reward", result, len(completions), lambda i: pair_excerpt(prompts[i], completions[i])
                )
            except Exception as e:
                raise _Refused(500, f"{type(e).__name__}: {one_line(e)}") from e
            self._answer(200, {"scores": scores.tolist()})
        except _Refused as e:
            self._refuse(e)

    def _check_token(self) -> None:
        if self.server.token is None:
            return
        kind, _, token = self.headers.get("Authorization", "").partition(" ")
        right = hmac.compare_digest(token.encode(errors="replace"), self.server.token.encode())
        if kind.lower() != "bearer" or not right:
            raise _Refused(401, "the header must be 'Authorization: Bearer TOKEN' with this server's token")

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            raise _Refused(411, "the header Content-Length must contain the length of the request")
        length = length.lstrip("0") or "0"
        if int(length[:20]) > MOST_BYTES:
            raise _Refused(413, f"a request must have at most {MOST_BYTES:,} bytes, got {length[:20]}")
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise _Refused(400, f"the request must have {length} bytes, its Content-Length, got {len(body)}")
        return body

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, e: _Refused) -> None:
        self._answer(e.status, {"error": str(e)})
        # If the connection were closed while the client still sends, it would be reset and the answer lost.
        self.connection.shutdown(socket.SHUT_WR)
        self.connection.settimeout(1)
        left = 2 * MOST_BYTES
        while left > 0 and (data := self.connection.recv(1 << 16)):
            left -= len(data)


def _read_request(body: bytes) -> tuple[list[Text], list[Text], dict[str, list | None]]:
    try:
        request = json.loads(body)
    except (ValueError, RecursionError) as e:
        raise _Refused(400, f"the request must be JSON: {one_line(e)}") from e
    rows = {name: request.pop(name, None) if isinstance(request, dict) else None for name in ("ended", *COLUMNS)}
    if not isinstance(request, dict) or request.keys() != {"prompts", "completions"}:
        raise _Refused(400, f'the request must be {{"prompts": [...], "completions": [...]}}, got {shown(request)}')
    for name, texts in request.items():
        if not isinstance(texts, list):
            raise _Refused(400, f"{name} must be a list of texts, got {shown(texts)}")
        if len(texts) > MOST_ROWS:
            raise _Refused(413, f"{name} must be at most {MOST_ROWS:,}, got {len(texts):,}")
        try:
            for row, text in enumerate(texts):
                check_text(f"row {row}", name, text)
        except ValueError as e:
            raise _Refused(400, str(e)) from e
    prompts, completions = request["prompts"], request["completions"]
    if len(prompts) != len(completions):
        raise _Refused(400, f"prompts must be as many as completions, got {len(prompts)} and {len(completions)}")
    for name, values in rows.items():
        if values is not None and not (isinstance(values, list) and len(values) == len(prompts)):
            raise _Refused(400, f"{name} must have a value for each completion, got {shown(values)}")
    if rows["ended"] is not None and not all(isinstance(e, bool) for e in rows["ended"]):
        raise _Refused(400, f"ended must be true or false for each completion, got {shown(rows['ended'])}")
    return prompts, completions, rows


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, reward: Any, host: str, port: int, token: str | None):
        self.reward, self.token, self.lock = reward, token, threading.Lock()
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        # HTTPServer.server_bind looks up this machine's name with DNS, which can take seconds.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do nothing: a client that has disconnected needs no answer."""


class RewardHTTPServer:
    """HTTP server that scores completions with a reward, one request at a time, until it is closed.

    Parameters
    ----------
    reward : object with ``score_batch``
        Such as `rlox.llm.rewards.models.RewardModelServer`.
    host : str
        Address to listen on. Every address other than a loopback address, such as ``127.0.0.1``, requires a token.
    port : int
        0 chooses a free port.
    token : str, optional
        A secret that clients must send.

    Attributes
    ----------
    url : str
        URL that the server listens on.

    Raises
    ------
    TypeError
        If `reward` has no ``score_batch``.
    ValueError
        If other machines could connect and there is no token, or an argument is out of range.
    OSError
        If the port is in use, or the address does not belong to this machine.

    Examples
    --------
    >>> with server.serve(port=8000) as http:  # doctest: +SKIP
    ...     http.wait()
    """

    def __init__(self, reward: Any, host: str = "127.0.0.1", port: int = 0, token: str | None = None):
        where = type(self).__name__
        if not callable(getattr(reward, "score_batch", None)):
            raise TypeError(f"{where}: reward must have score_batch(prompts, completions), got {shown(reward)}")
        port = integer(where, "port", port, 0, 65_535)
        token = check_token(where, token)
        require(where, "host", host, str)
        if token is None and not _is_loopback(host):
            raise ValueError(
                f"{where}: host must be a loopback address if there is no token, got {shown(host)}; pass token=, or "
                "host='127.0.0.1'"
            )
        try:
            self._listener = _Listener(reward, host, port, token)
        except OSError as e:
            raise OSError(f"{where}: cannot listen on port {port} of {host}: {e}; port=0 chooses a free one") from e
        shown_host = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown_host}:{self._listener.server_port}"
        self._thread = threading.Thread(target=self._listener.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the server is closed; Ctrl-C interrupts."""
        self._thread.join()

    def close(self) -> None:
        """Stop listening. It may be called more than once."""
        self._listener.shutdown()
        self._thread.join()
        self._listener.server_close()

    def __enter__(self) -> RewardHTTPServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RemoteReward:
    """A reward that is computed by a `RewardHTTPServer`.

    Parameters
    ----------
    url : str
        ``RewardHTTPServer.url``, or another URL of that server.
    token : str, optional
        The server's token.
    timeout : float
        Seconds to wait for data from the server.
    retries : int
        Number of retries if a connection fails or breaks, or the server is busy (429, 502, 503, 504).
    pause : float
        Longest pause in seconds before the first retry; it doubles with each later retry, up to 30 seconds.

    Raises
    ------
    ValueError
        If an argument is out of range.
    """

    def __init__(self, url: str, token: str | None = None, timeout: float = 60.0, retries: int = 3, pause: float = 0.5):
        self._client = Client(type(self).__name__, url, token, timeout, retries, pause, remedies=_REMEDIES)
        self.url = self._client.url
        self._where = f"{type(self).__name__} {self.url}"

    def score_batch(
        self,
        prompts: Sequence[Text],
        completions: Sequence[str],
        ended: Sequence[bool] | None = None,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Sequence[Any] | None = None,
    ) -> np.ndarray:
        """Return the server's scores, (N,) float64.

        `ended`, False for completions that were cut off, is sent only if there are any; so are the arguments of chat
        templates. Raises ConnectionError if the server cannot be reached, or stays busy, RuntimeError if it refuses the
        request, with its explanation and a remedy, and ValueError if its answer is not N finite numbers.
        """
        check_pairs(self._where, prompts, completions)
        body: dict[str, list[Any]] = {"prompts": list(prompts), "completions": list(completions)}
        if ended is not None and not all(ended):
            body["ended"] = [bool(e) for e in ended]
        for name, values in zip(COLUMNS, (tools, chat_template_kwargs), strict=True):
            if values is not None and any(values):
                body[name] = list(values)
        try:
            answer = self._client.send("/score", body)
        except TypeError as e:  # not serialisable as JSON
            raise TypeError(f"{self._where}: prompts and completions must be texts or chats, got {one_line(e)}") from e
        try:
            scores = json.loads(answer)["scores"]
        except (ValueError, TypeError, KeyError, RecursionError) as e:
            raise ValueError(
                f'{self._where}: the server must answer {{"scores": [...]}}, got {shown(answer)}; pass url= with the '
                "URL of a RewardHTTPServer"
            ) from e
        what = f"{self._where}: the server"
        return as_scores(what, scores, len(completions), lambda i: pair_excerpt(prompts[i], completions[i]))

    __call__ = score_batch
