"""``rlox worker``: run environments for a learner on another machine."""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from rlox.envs.remote.refusals import Refusals
from rlox.envs.remote.security import OPEN_TO_ALL, is_loopback
from rlox.envs.remote.server import Server
from rlox.envs.remote.session import EnvSessions
from rlox.envs.spec import EnvSpec
from rlox_cli.config.compose import compose_jobs
from rlox_cli.config.overrides import split_args
from rlox_cli.families.imports import import_modules
from rlox_cli.terminal.console import print_text
from rlox_cli.terminal.errors import Stopped, UsageError
from rlox_cli.terminal.signals import Signals

_DRAIN_S = 7.0
_LOOK_S = 0.1
_ONCE_S = 5.0  # without a session until --once ends: a learner may open one to look at the environment, then others
_NATIVE_LINE = re.compile(rb"[IWEF]\d{4} \d\d:")
# OpenSSL's messages about a failed handshake, and what they mean. Any other message: the client did not speak TLS.
_TLS_WORDS = (
    ("PEER_DID_NOT_RETURN_A_CERTIFICATE", "it sent no certificate"),
    ("CERTIFICATE_HAS_EXPIRED", "its certificate has expired"),
    ("certificate has expired", "its certificate has expired"),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate is not signed by --tls-ca, or has expired"),
    ("TLSV1_ALERT_UNKNOWN_CA", "it does not trust this worker's certificate (its remote.ca is another one)"),
    ("HTTP_REQUEST", "it speaks HTTP without TLS"),
    ("WRONG_VERSION_NUMBER", "it does not speak TLS"),
)


@dataclass(frozen=True)
class Options:
    """The options of the command, without the environment."""

    host: str
    port: int
    token_file: str | None
    tls_cert: str | None
    tls_key: str | None
    tls_ca: str | None
    insecure: bool
    max_sessions: int
    max_envs: int
    max_message_mb: int
    idle_s: float
    once: bool


def main(env: str, overrides: list[str], imports: list[str], options: Options) -> None:
    """Serve until a signal comes or, with ``once``, until five seconds after the last session."""
    import_modules(imports)
    if wrong := next((word for word in overrides if not word.lstrip("+").startswith("env.")), None):
        raise UsageError(f"{wrong} must be a key of the environment, such as env.kwargs.gravity=9.8 or env.workers=4")
    _, words = split_args(overrides)
    chosen = compose_jobs([], [f"env={env}", "tuned=off", *words])[0].config.env
    limit = options.max_message_mb * 2**20
    sessions = EnvSessions(
        chosen.id, chosen.kwargs, chosen.wrappers, chosen.workers, chosen.backend, options.max_envs, limit
    )
    kinds = {"env": sessions, **_actors(sessions, options.max_envs, limit)}
    with _translate_error(options.tls_cert is not None), warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: _print(f"warning: {message}")
        warnings.simplefilter("always", RuntimeWarning)
        server = Server(
            kinds,
            options.host,
            options.port,
            token_file=options.token_file,
            tls_cert=options.tls_cert,
            tls_key=options.tls_key,
            tls_ca=options.tls_ca,
            insecure=options.insecure,
            max_sessions=options.max_sessions,
            max_message=limit,
            idle_s=options.idle_s,
            log=_print,
        )
        try:
            signalled = _serve(server, chosen.id, sessions.spec, options)
        finally:
            server.stop()
        if server.n_sessions:
            # A normal exit would wait for the thread of an environment that hangs.
            sys.stderr.flush()
            os._exit(0 if signalled is None else 128 + signalled)
    if signalled is not None:
        raise Stopped(signalled)


def _serve(server: Server, env: str, spec: EnvSpec, options: Options) -> int | None:
    """Serve, and return the signal that ended it, if any."""
    with Signals(
        _print, "draining: no new sessions, running ones end with their next step; repeat the signal to stop at once"
    ) as s:
        server.start()
        _announce(server, env, spec, options)
        busy = time.monotonic()
        while s.number is None and not (options.once and server.served and time.monotonic() - busy > _ONCE_S):
            time.sleep(_LOOK_S)
            if server.n_sessions:
                busy = time.monotonic()
        s.saving()
        server.stop(_DRAIN_S)
        _print(f"stopped after {server.served:,} session{'' if server.served == 1 else 's'}")
        return s.number


def _actors(envs: EnvSessions, most_envs: int, limit: int) -> dict:
    from rlox.distributed.grpc_actors import ActorSessions

    return {"actor": ActorSessions(envs, most_envs, limit)}


def _announce(server: Server, env: str, spec: EnvSpec, options: Options) -> None:
    if options.insecure and options.tls_cert is None and not is_loopback(options.host):
        _print(f"warning: --insecure: {OPEN_TO_ALL}")
    host = options.host if options.host not in ("0.0.0.0", "::") else "THIS-HOST"
    keys = [f"env={env}", f"'remote.addresses=[{host}:{server.port}]'"]
    if options.token_file:
        keys.append("remote.token_file=FILE")
    if options.tls_cert:
        keys.append("remote.ca=FILE")
    if options.tls_ca:
        keys.append("remote.cert=FILE remote.key=FILE")
    if options.insecure and options.tls_cert is None and not is_loopback(options.host):
        keys.append("remote.insecure=true")
    for line in (
        f"serving {env} at {options.host}:{server.port} ({server.security}; at most {options.max_sessions} sessions of "
        f"{options.max_envs:,} environments)",
        f"observations {spec.obs_shape}, {spec.describe_actions()}{spec.describe_masks()}",
        f"the learner's command: rlox train algo=ppo {' '.join(keys)}",
    ):
        print_text(f"rlox worker: {line}")


def _print(line: str) -> None:
    print_text(f"rlox worker: {time.strftime('%H:%M:%S')} {line}", stderr=True)


@contextlib.contextmanager
def _translate_error(tls: bool) -> Iterator[None]:
    """While gRPC serves over TLS, log the connections that it refuses. Only gRPC's own lines on stderr report them.

    stderr goes through a pipe; everything else that this process writes to it passes unchanged.
    """
    if not tls or os.name == "nt":  # where `select` takes no pipes
        yield
        return
    verbosity = os.environ.get("GRPC_VERBOSITY")
    os.environ["GRPC_VERBOSITY"] = "INFO"
    sys.stderr.flush()
    kept, (read, write) = os.dup(2), os.pipe()
    os.dup2(write, 2)
    os.close(write)
    thread = threading.Thread(target=_translate, args=(read, kept), name="rlox-stderr", daemon=True)
    thread.start()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)  # the pipe's last writer
        thread.join(2.0)
        os.close(kept)
        if verbosity is None:
            del os.environ["GRPC_VERBOSITY"]
        else:
            os.environ["GRPC_VERBOSITY"] = verbosity


def _translate(read: int, out: int) -> None:
    refusals = Refusals(lambda text: _write(out, f"rlox worker: {text}\n".encode()), "connections")
    last = b""  # a line that is not complete yet
    with open(read, "rb", buffering=0) as pipe:
        while True:
            if select.select([pipe], [], [], 1.0)[0]:
                if not (data := pipe.read(2**16)):
                    break
                *lines, last = (last + data).split(b"\n")
                for line in lines:
                    if not _NATIVE_LINE.match(line):
                        _write(out, line + b"\n")
                    elif b"Handshake failed" in line:
                        text = line.decode(errors="replace")
                        why = next((words for sign, words in _TLS_WORDS if sign in text), "it sent no TLS handshake")
                        refusals.add(f"{time.strftime('%H:%M:%S')} refused a connection: {why}")
            refusals.tick()
    _write(out, last)
    refusals.tick(end=True)


def _write(out: int, data: bytes) -> None:
    with contextlib.suppress(OSError):
        os.write(out, data)
