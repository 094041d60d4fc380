"""The server of `rlox worker`: streams of messages, each with its own session.

The protocol of a stream (messages of `rlox.envs.remote.codec`, one service with one method, `METHOD`):

1. The client's metadata contains a proof of the token, which is checked before any message is read.
2. The client sends ``hello``: fields ``protocol``, ``rlox`` (its version), ``session`` (a kind of session, a key of the
   server's table) and the fields that this kind needs.
3. The server answers ``welcome``: fields ``protocol``, ``rlox``, ``time`` (its clock, seconds since 1970), ``idle_s``
   (seconds of silence that end the session), and the fields of `Session.welcome`. Or it answers ``refused`` with the
   ``reason``, and whether that may change ``soon``, and ends the stream.
4. The client sends messages of the session, and the server answers each with one message. ``heartbeat`` shows that the
   client still runs, and ``close`` that it leaves; neither is answered. If the session fails, the answer is ``failed``
   (fields ``message what frames trace``) and the stream ends. If the server is shutting down, the answer is
   ``draining``.

Other kinds of sessions are added to the table::

    class Doubled:                                     # a Session
        def __init__(self, hello: Message): self.welcome = Message("welcome", {"base": 2})
        def handle(self, message): return Message("doubled", {}, {"x": 2 * message.arrays["x"]})
        def close(self): pass

    server = Server({"double": Doubled}, "127.0.0.1", 0).start()
    line = Connection(f"127.0.0.1:{server.port}", RemoteConfig(), "double", {})
    line.call("x", {}, {"x": np.arange(3)}, timeout=1.0)

If a constructor raises ValueError, TypeError, ImportError or MemoryError, the client is refused with that message, and
for any other exception the answer is ``failed``. All calls of one session come from one thread; different sessions have
different threads.
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from rlox import __version__
from rlox.envs.remote.codec import LARGEST_MESSAGE, VERSION, Message, ProtocolError, decode, encode
from rlox.envs.remote.refusals import Refusals
from rlox.envs.remote.security import OPEN_TO_ALL, PROOF, Proofs, grpc_module, is_loopback, read_pem, read_token
from rlox.processes.failures import failure_of, frames_of

METHOD = "/rlox.Worker/Session"
_SPARE = 8  # streams in addition to sessions: handshakes, and status queries
_HELLO_S = 10.0  # time for a client's first message
_LOOK_S = 0.25
_LONGEST_TEXT = 4000  # characters of a message or traceback that is sent
_MOST_FRAMES = 20


class Session(Protocol):
    """Interface of a session, which answers one client from its hello to its end."""

    welcome: Message  # fields and arrays to add to the server's welcome

    def handle(self, message: Message) -> Message:
        """Return the answer to a message. Exceptions end the session."""

    def close(self) -> None:
        """Release all resources; called once, whatever ended the session."""


@dataclass(eq=False)
class _Stream:
    context: Any
    peer: str
    expires: float  # time at which it ends unless something arrives; infinite while the session works
    waiting: bool = True  # for a message, not for the client to receive one
    session: bool = False
    welcome: bool = False  # whether the client was accepted
    opened: Any = None  # the session object, once it exists
    sending: bool = False  # whether gRPC is sending an answer
    broken: bool = False  # whether gRPC has ended it
    why: str = ""


class Server:
    """Serves sessions until it is stopped.

    A ValueError is raised for invalid files, an unavailable address, or one that is open to others without `insecure`.
    """

    def __init__(
        self,
        sessions: Mapping[str, Callable[[Message], Session]],  # from a client's hello, by kind
        host: str = "127.0.0.1",
        port: int = 0,  # 0: any free port
        *,
        token_file: str | None = None,  # with the token that clients need
        tls_cert: str | None = None,  # the server's certificate chain and private key, PEM
        tls_key: str | None = None,
        tls_ca: str | None = None,  # must have signed the clients' certificates
        insecure: bool = False,  # allows connections from other machines without TLS, or from everyone
        max_sessions: int = 8,
        max_message: int = LARGEST_MESSAGE,  # bytes, in both directions
        idle_s: float = 60.0,  # ends a session without a message or heartbeat, or with an answer not received
        log: Callable[[str], None] | None = None,  # called with a line for every event
    ):
        where = "Server"
        if (tls_cert is None) != (tls_key is None) or (tls_ca is not None and tls_cert is None):
            raise ValueError(
                f"{where}: tls_cert, tls_key (and tls_ca) must be given together, got {tls_cert}, {tls_key}"
            )
        open_to_all = tls_ca is None and token_file is None
        if not is_loopback(host) and not insecure and (tls_cert is None or open_to_all):
            everyone = "without a token or tls_ca, everyone who can reach the port is served"
            what = OPEN_TO_ALL if tls_cert is None else everyone
            raise ValueError(
                f"{where}: host must be local (127.0.0.1) without TLS and a token, got {host}: {what}; "
                "give a certificate and a token, or insecure"
            )
        token = None if token_file is None else read_token(where, token_file)
        pair = ca = None
        if tls_cert is not None and tls_key is not None:
            pair = (read_pem(where, "tls_key", tls_key), read_pem(where, "tls_cert", tls_cert))
            ca = None if tls_ca is None else read_pem(where, "tls_ca", tls_ca)
        self._proofs = Proofs(token)
        self._kinds = dict(sessions)
        self._grpc = grpc = grpc_module()
        self._max_sessions, self._limit, self._idle_s = max_sessions, max_message, idle_s
        # gRPC does not report which of the two, and may end a stream without an error. Clients that leave send `close`.
        self._why_broken = (
            f"the stream broke off: the other side is gone, or sent more than {max_message // 2**20} MiB at once"
        )
        self._say = log or (lambda line: None)
        self._streams: set[_Stream] = set()
        self._lock = threading.Lock()
        self._draining, self._stopped = False, threading.Event()
        self._refusals = Refusals(self._say, "streams")
        self.served = 0  # sessions so far
        n = max_sessions + _SPARE
        options = {
            "grpc.max_send_message_length": max_message,
            "grpc.max_receive_message_length": max_message,
            "grpc.max_metadata_size": 8192,
            "grpc.absolute_max_metadata_size": 16384,
            "grpc.max_concurrent_streams": n,
            "grpc.max_allowed_incoming_connections": 64 + n,
            "grpc.server_handshake_timeout_ms": 5000,
            "grpc.max_connection_idle_ms": 60_000,
            "grpc.keepalive_time_ms": 20_000,
            "grpc.keepalive_timeout_ms": 20_000,
            "grpc.http2.min_ping_interval_without_data_ms": 5000,
            "grpc.so_reuseport": 0,
        }
        self._pool = ThreadPoolExecutor(n, "rlox-session")
        self._server = grpc.server(self._pool, options=[*options.items()], maximum_concurrent_rpcs=n)
        handler = grpc.stream_stream_rpc_method_handler(self._serve)
        service, name = METHOD[1:].split("/")
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: handler}),))
        at = f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
        try:
            if pair is None:
                self.port = self._server.add_insecure_port(at)
            else:
                credentials = grpc.ssl_server_credentials([pair], ca, require_client_auth=ca is not None)
                self.port = self._server.add_secure_port(at, credentials)
        except RuntimeError as e:
            raise ValueError(f"{where}: host and port must be free to listen at, got {at}: {e}") from e
        if not self.port:
            raise ValueError(f"{where}: host and port must be free to listen at, got {at}; try another port")
        self.host = host
        self.security = _security(pair is not None, ca is not None, token is not None)
        self._watcher = threading.Thread(target=self._watch, name="rlox-watch", daemon=True)

    def start(self) -> Server:
        """Start serving."""
        self._server.start()
        self._watcher.start()
        return self

    @property
    def n_sessions(self) -> int:
        """Number of running sessions."""
        with self._lock:
            return sum(stream.session for stream in self._streams)

    def drain(self) -> None:
        """Accept no more sessions. Running sessions end with their next message, which is no longer handled."""
        self._draining = True
        with self._lock:
            for stream in self._streams:
                stream.expires = min(stream.expires, time.monotonic() + 5.0)

    def stop(self, grace_s: float = 0.0) -> None:
        """Stop: drain, wait at most `grace_s` seconds for running sessions, and release the port."""
        self.drain()
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline and self._streams:
            time.sleep(0.05)
        self._stopped.set()
        self._server.stop(0.5).wait()
        self._pool.shutdown(wait=False)
        if self._watcher.is_alive():
            self._watcher.join()
        self._refusals.tick(end=True)

    def _serve(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """Serve one stream, in its own thread."""
        stream = _Stream(context, context.peer(), time.monotonic() + _HELLO_S)
        self._admit(stream)
        with self._lock:
            self._streams.add(stream)
        # If the stream breaks while an answer is being sent, gRPC drops this generator and never resumes it.
        if not context.add_callback(lambda: self._on_stream_end(stream)):
            stream.broken = True
        try:
            try:
                hello = decode(next(requests), self._limit)
                session = stream.opened = self._make_session(hello, stream)
            except StopIteration:
                stream.why = stream.why or self._why_broken
                return
            except (ValueError, TypeError, ImportError, MemoryError) as e:
                self._log_refusal(stream, str(e))
                yield encode("refused", {"reason": str(e)[:_LONGEST_TEXT], "soon": isinstance(e, FullError)})
                return
            except self._grpc.RpcError:
                raise
            except BaseException as e:  # from an environment's code
                stream.why = _why_failed(e)
                yield encode("failed", _failure(e))
                return
            stream.welcome, welcome = True, session.welcome
            own = {"protocol": VERSION, "rlox": __version__, "time": time.time(), "idle_s": self._idle_s}
            answer: Any = encode("welcome", {**welcome.fields, **own}, welcome.arrays)
            while True:
                stream.waiting, stream.expires = False, time.monotonic() + self._idle_s
                with self._lock:
                    if stream.broken:
                        stream.why = stream.why or self._why_broken
                        return
                    stream.sending = True
                yield answer
                with self._lock:
                    stream.sending = False
                    if stream.broken:
                        return
                answer, last = self._next(stream, session, requests)
                if answer is None:
                    return
                if last:
                    stream.waiting, stream.expires = False, time.monotonic() + self._idle_s
                    yield answer
                    return
        except self._grpc.RpcError:
            stream.why = stream.why or self._why_broken
        except GeneratorExit:
            stream.why = stream.why or self._why_broken
            raise
        except ProtocolError as e:
            stream.why = f"the client sent an invalid message: {e}"
        finally:
            self._end(stream)

    def _on_stream_end(self, stream: _Stream) -> None:
        """Called by gRPC in another thread at the end of a stream. Ends it, if the stream's thread will not."""
        with self._lock:
            stream.broken, sending = True, stream.sending
        if sending:
            stream.why = stream.why or self._why_broken
            self._end(stream)

    def _end(self, stream: _Stream) -> None:
        """Close a stream and its session, once."""
        with self._lock:
            if stream not in self._streams:
                return
            self._streams.discard(stream)
        if stream.opened is not None:
            with contextlib.suppress(Exception):
                stream.opened.close()
        if stream.session:
            self._say(f"{stream.peer}: session ended{f' ({stream.why})' if stream.why else ''}")
        elif stream.why and not stream.welcome:
            self._log_refusal(stream, stream.why)

    def _next(self, stream: _Stream, session: Session, requests: Iterator[bytes]) -> tuple[bytes | None, bool]:
        """Return the answer to the next request, None at the stream's end, and whether it is the last answer."""
        while True:
            stream.waiting = True
            stream.expires = time.monotonic() + (min(5.0, self._idle_s) if self._draining else self._idle_s)
            try:
                data = next(requests)
            except StopIteration:
                stream.why = stream.why or self._why_broken
                return None, True
            message = decode(data, self._limit)
            if message.kind == "close":
                return None, True
            if message.kind != "heartbeat":
                break
        if self._draining:
            stream.why = "the worker is shutting down"
            return encode("draining"), True
        stream.expires = float("inf")
        try:
            reply = session.handle(message)
            return encode(reply.kind, reply.fields, reply.arrays), False
        except BaseException as e:  # from an environment's code, even SystemExit, or a message that does not fit
            stream.why = _why_failed(e)
            return encode("failed", _failure(e)), True

    def _admit(self, stream: _Stream) -> None:
        """Abort a stream that is not accepted."""
        codes, context = self._grpc.StatusCode, stream.context
        proof = next((value for key, value in context.invocation_metadata() if key == PROOF), None)
        refusal = self._proofs.refusal(proof if isinstance(proof, str) else None)
        if refusal is not None:
            soon, why = refusal
            self._log_refusal(stream, why)
            context.abort(codes.UNAVAILABLE if soon else codes.UNAUTHENTICATED, why)
        if self._draining:
            context.abort(codes.UNAVAILABLE, "the worker is shutting down")

    def _make_session(self, hello: Message, stream: _Stream) -> Session:
        """Create the session that a hello requests."""
        fields = hello.fields
        if hello.kind != "hello":
            raise ProtocolError(f"the first message must be hello, got {hello.kind!r}")
        if (theirs := (fields.get("protocol"), fields.get("rlox"))) != (VERSION, __version__):
            raise ValueError(
                f"both ends must run the same rlox, got {str(theirs[1])[:40]} (protocol {str(theirs[0])[:10]}) at the "
                f"learner and {__version__} (protocol {VERSION}) at the worker; install the same version on both"
            )
        kind = fields.get("session")
        if kind == "look":
            return _DoctorSession(self)
        if kind not in self._kinds:
            raise ValueError(f"session must be one of {', '.join(self._kinds)}, got {str(kind)[:40]!r}")
        with self._lock:
            if sum(other.session for other in self._streams) >= self._max_sessions:
                raise FullError(f"the worker serves at most {self._max_sessions} sessions at a time (--max-sessions)")
            stream.session = True
        try:
            stream.expires = float("inf")
            session = self._kinds[kind](hello)
        except BaseException:
            stream.session = False
            raise
        self.served += 1
        self._say(f"{stream.peer}: session {self.served} ({kind})")
        return session

    def _log_refusal(self, stream: _Stream, why: str) -> None:
        """Log a refusal in one line, since the reason may contain text from the client."""
        self._refusals.add(f"{stream.peer}: refused: {' '.join(why.split())[:500]}")

    def _watch(self) -> None:
        """End streams that have been silent for too long, and log how many refusals were not logged one by one."""
        while not self._stopped.wait(_LOOK_S):
            now = time.monotonic()
            self._refusals.tick()
            with self._lock:
                late = [stream for stream in self._streams if stream.expires < now]
            for stream in late:
                what = "sent nothing" if stream.waiting else "did not receive its answer"
                stream.why = stream.why or ("the worker is shutting down" if self._draining else f"the client {what}")
                stream.expires = float("inf")
                stream.context.cancel()


class FullError(ValueError):
    """The worker is full at the moment; the client may try again."""


class _DoctorSession:
    """The session of `rlox doctor`: reports what is served, and answers every message."""

    def __init__(self, server: Server):
        self.welcome = Message("welcome", {"sessions": server.n_sessions, "max_sessions": server._max_sessions})
        for kind in server._kinds.values():
            about = getattr(kind, "about", None)
            if about is not None:
                self.welcome.fields.update(about.fields)
                self.welcome.arrays.update(about.arrays)

    def handle(self, message: Message) -> Message:
        return Message("here", {"time": time.time()})

    def close(self) -> None:
        pass


def _why_failed(e: BaseException) -> str:
    return f"failed with {type(e).__name__}: {str(e)[:500]}"


def _failure(e: BaseException) -> dict[str, Any]:
    """Describe an exception for a client as text, without anything that could be executed there."""
    frames = [[str(value)[:300] for value in frame] for frame in frames_of(e.__traceback__)[-_MOST_FRAMES:]]
    return {
        "message": f"{type(e).__name__}: {e}"[:_LONGEST_TEXT],
        "what": failure_of(e).what[:500],
        "frames": frames,
        "trace": "".join(traceback.format_exception(e))[-_LONGEST_TEXT:],
    }


def _security(tls: bool, clients: bool, token: bool) -> str:
    """Describe the security of a server in words."""
    if not tls:
        return f"plain text, {'with a token' if token else 'no token'}"
    who = [*(["clients' certificates"] if clients else []), *(["a token"] if token else [])]
    return f"TLS, {' and '.join(who) or 'no token'}"
