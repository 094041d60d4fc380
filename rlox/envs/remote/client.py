"""A learner's end of a stream to a worker (see `rlox.envs.remote.server`)."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np

from rlox import __version__
from rlox.config.run import RemoteConfig
from rlox.envs.remote.codec import LARGEST_MESSAGE, VERSION, Message, ProtocolError, decode, encode
from rlox.envs.remote.security import PROOF, client_credentials, grpc_module, make_proof, read_token
from rlox.envs.remote.server import METHOD
from rlox.processes.failures import Frame, add_note, failure_of, note_cause

_HEARTBEAT_S = 10.0
_LOOK_S = 0.1
_CLOSE_S = 1.0  # time for a worker to end the session by itself
_HEARTBEAT, _CLOSE = encode("heartbeat"), encode("close")


class WorkerLost(ConnectionError):
    """A worker cannot be reached, does not answer, or sends an invalid answer. It may be available again later.

    `address` is the worker's, host:port, and `reason` what happened.
    """

    def __init__(self, address: str, reason: str):
        super().__init__(f"worker {address} {reason}")
        self.address, self.reason = address, reason


class WorkerRefused(ValueError):
    """A worker refuses this learner, or does not fit it: it has another version, token or environment.

    `address` is the worker's, host:port, and `reason` what it does not accept.
    """

    def __init__(self, address: str, reason: str):
        super().__init__(f"worker {address} refused: {reason}")
        self.address, self.reason = address, reason


class WorkerFailed(RuntimeError):
    """An exception raised by the environment's code at the worker."""


class _Line:
    """The part of a connection that its background thread uses."""

    def __init__(self, channel: Any, call: Any, outbox: queue.SimpleQueue):
        self.channel, self.call, self.outbox = channel, call, outbox
        self.deadline = float("inf")
        self.late = False
        self.heartbeat_s = _HEARTBEAT_S
        self.unread = 0  # answers that have not been received yet
        self.sent_at = time.monotonic()
        self.ended = threading.Event()

    def watch(self) -> None:
        while not self.ended.wait(_LOOK_S):
            now = time.monotonic()
            if now > self.deadline:
                self.late = True
                self.call.cancel()
                return
            if now - self.sent_at > self.heartbeat_s:
                self.sent_at = now
                self.outbox.put(_HEARTBEAT)

    def close(self) -> None:
        self.ended.set()
        self.outbox.put(_CLOSE)
        self.outbox.put(None)
        until = time.monotonic() + _CLOSE_S
        while self.call.is_active() and not self.unread and time.monotonic() < until:
            time.sleep(0.001)
        self.call.cancel()
        self.channel.close()


class Connection:
    """One session at a worker, for use by one thread, which may send to many workers and then receive from all.

    `fields` and `arrays` are sent with the hello, whose answer is `welcome`. `limit` is the largest message in bytes,
    in both directions.

    Raises
    ------
    WorkerLost, WorkerRefused
        If the worker at `address` (host:port) cannot be reached or does not answer in time, or refuses this learner.
    ValueError
        For invalid files, or an unencrypted connection to another machine without `remote.insecure`.
    ImportError
        If gRPC is not installed.
    """

    def __init__(
        self,
        address: str,
        remote: RemoteConfig,
        session: str,
        fields: Mapping[str, Any] | None = None,
        arrays: Mapping[str, np.ndarray] | None = None,
        limit: int = LARGEST_MESSAGE,
    ):
        self.address, self._limit, self.timeout_s = address, limit, remote.timeout_s
        self._grpc = grpc = grpc_module()
        credentials = client_credentials(grpc, replace(remote, addresses=[address]))
        self._plain = credentials is None
        options = [
            ("grpc.max_send_message_length", limit),
            ("grpc.max_receive_message_length", limit),
            ("grpc.keepalive_time_ms", 10_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.use_local_subchannel_pool", 1),  # do not share connection state and its back-off
            ("grpc.enable_retries", 0),
        ]
        metadata = []
        if remote.token_file is not None:
            metadata.append((PROOF, make_proof(read_token("RemoteConfig", remote.token_file))))
        if credentials is None:
            channel = grpc.insecure_channel(address, options)
        else:
            channel = grpc.secure_channel(address, credentials, options)
        outbox: queue.SimpleQueue = queue.SimpleQueue()
        call = channel.stream_stream(METHOD)(iter(outbox.get, None), metadata=metadata)
        self._line = _Line(channel, call, outbox)
        self._finalizer = weakref.finalize(self, self._line.close)
        threading.Thread(target=self._line.watch, name="rlox-line", daemon=True).start()
        try:
            own = {"protocol": VERSION, "rlox": __version__, "session": session}
            self.send("hello", {**(fields or {}), **own}, arrays)
            self.welcome = self.receive()
            if self.welcome.kind != "welcome":
                raise WorkerLost(address, f"must answer welcome, got {self.welcome.kind[:40]!r}")
            idle = self.welcome.fields.get("idle_s")
            if isinstance(idle, float) and idle > 0:
                self._line.heartbeat_s = min(_HEARTBEAT_S, idle / 3)
            theirs = self.welcome.fields.get("rlox"), self.welcome.fields.get("protocol")
            if theirs != (__version__, VERSION):
                raise WorkerRefused(address, f"it runs rlox {str(theirs[0])[:40]}, but this learner runs {__version__}")
        except BaseException:
            self.close()
            raise

    def call(
        self,
        kind: str,
        fields: Mapping[str, Any] | None = None,
        arrays: Mapping[str, np.ndarray] | None = None,
        timeout: float | None = None,
    ) -> Message:
        """Send a message and return the answer."""
        self.send(kind, fields, arrays)
        return self.receive(timeout)

    def send(
        self, kind: str, fields: Mapping[str, Any] | None = None, arrays: Mapping[str, np.ndarray] | None = None
    ) -> None:
        """Send a message. Answers that were left unread by an interrupt are discarded first."""
        while self._line.unread:
            self.receive()
        data = encode(kind, fields, arrays)
        if len(data) > self._limit:
            raise ProtocolError(f"a message must have at most {self._limit:,} bytes, got {len(data):,} for {kind}")
        if not self._finalizer.alive:
            raise WorkerLost(self.address, "is no longer connected; the connection was closed")
        self._line.unread += 1
        self._line.sent_at = time.monotonic()
        self._line.outbox.put(data)

    def receive(self, timeout: float | None = None) -> Message:
        """Return the answer to the oldest unanswered message, within `timeout` seconds (`remote.timeout_s`).

        Raises
        ------
        WorkerLost
            If no answer arrives, or one that is not a message. The connection is then closed.
        WorkerRefused
            If the worker refuses.
        WorkerFailed
            If the environment's code raised an exception.
        """
        timeout = self.timeout_s if timeout is None else timeout
        line = self._line
        line.deadline = time.monotonic() + timeout
        try:
            message = decode(next(line.call), self._limit)
        except StopIteration:
            self._raise_lost("ended the session")
        except ProtocolError as e:
            self._raise_lost(f"sent an invalid message: {e}")
        except self._grpc.RpcError as e:
            self._raise_lost(*self._reason(e, timeout))
        finally:
            line.deadline = float("inf")
        self._line.unread -= 1
        if message.kind == "refused":
            self.close()
            reason = str(message.fields.get("reason", ""))[:1000]
            if message.fields.get("soon") is True:
                raise WorkerLost(self.address, f"is busy: {reason}")
            raise WorkerRefused(self.address, reason)
        if message.kind == "draining":
            self._raise_lost("is shutting down")
        if message.kind == "failed":
            self.close()
            raise self._failure(message.fields)
        return message

    def _reason(self, e: Any, timeout: float) -> tuple[str, bool]:
        """Return why a call broke, and whether that is a refusal."""
        if self._line.late:
            return f"did not answer within {timeout:g} s", False
        codes, code, details = self._grpc.StatusCode, e.code(), " ".join(str(e.details()).split())[:500]
        if code is codes.UNAUTHENTICATED:
            return details, True
        if code is codes.UNAVAILABLE:
            hint = ""
            if self._plain and "Socket closed" in details:
                hint = "; it may require TLS: set remote.ca, and remote.cert and key if it requires certificates"
            elif "handshake" in details.lower() or "Socket closed" in details:
                hint = "; compare remote.ca, cert and key with the worker's certificates"
            if "Connection refused" in details:
                return "cannot be reached: connection refused; is `rlox worker` running there?", False
            return f"is gone, or cannot be reached: {details}{hint}", False
        if code is codes.CANCELLED:
            return "ended the session", False
        if code is codes.RESOURCE_EXHAUSTED:
            return f"is busy, or a message is too large: {details}", False
        return f"broke off: {details or code.name}", False

    def _raise_lost(self, reason: str, refused: bool = False) -> NoReturn:
        self.close()
        raise (WorkerRefused if refused else WorkerLost)(self.address, reason) from None

    def _failure(self, fields: dict[str, Any]) -> WorkerFailed:
        """Return the exception of the worker's environment, with its frames at the worker."""
        e = WorkerFailed(f"worker {self.address}: {str(fields.get('message', ''))[:4000]}")
        frames, what = fields.get("frames"), fields.get("what")
        failure = failure_of(e)
        with contextlib.suppress(TypeError, ValueError, IndexError):
            failure.frames = [Frame(str(f[0]), int(f[1]), str(f[2]), str(f[3]), str(f[4])) for f in (frames or [])[:20]]
        if what:
            note_cause(e, f"{str(what)[:500]} at worker {self.address}")
        add_note(e, str(fields.get("trace", ""))[:4000])
        return e

    def close(self) -> None:
        """End the session; may be called again."""
        self._finalizer()
