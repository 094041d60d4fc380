"""Security of connections to workers: TLS, the token, and a proof of the token that can be used only once.

The token itself is never sent. Every stream sends the time, a random number and their HMAC-SHA256 keyed by the token.
A worker accepts each proof once, within `WINDOW_S` of its own clock, and no proof from before it started.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import secrets
import stat
import threading
import time
import warnings
from pathlib import Path
from typing import Any

from rlox.config.run import RemoteConfig

WINDOW_S = 120.0  # how far the clocks of two machines may differ
PROOF = "rlox-proof"  # metadata key of the proof
_MOST_PROOFS = 100_000  # remembered proofs; adding one requires the token
_MOST_TOKEN = 4096  # bytes
_MOST_PEM = 2**20

OPEN_TO_ALL = (
    "without TLS, anyone on the network between the two machines can read observations, actions and rewards, change "
    "them unnoticed, and impersonate either side"
)


def grpc_module() -> Any:
    """Import gRPC, with its log output off unless GRPC_VERBOSITY is set."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        import grpc
    except ImportError as e:
        raise ImportError(
            'remote: connections need the package grpcio, which is not installed; pip install "rlox-cli[distributed]"'
        ) from e
    return grpc


def is_loopback(host: str) -> bool:
    """Whether `host` can only be reached from this machine."""
    host = host.strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _read(where: str, name: str, path: str, most: int, secret: bool) -> bytes:
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):  # reading a pipe or a device may never end
            raise ValueError(f"{where}: {name} must be a regular file, got {path}")
        data = Path(path).read_bytes()[: most + 1]
    except OSError as e:
        raise ValueError(f"{where}: {name} must be a file that can be read, got {path}: {e.strerror}") from e
    if not data.strip() or len(data) > most:
        raise ValueError(f"{where}: {name} must have between 1 and {most:,} bytes, got {len(data):,} in {path}")
    if secret and mode & 0o077:
        warnings.warn(
            f"{where}: {name} {path} can be read by other users of this machine; chmod 600 {path}",
            RuntimeWarning,
            stacklevel=4,
        )
    return data


def read_token(where: str, path: str) -> bytes:
    """Read the token in a file, without surrounding white space; else raise a ValueError."""
    return _read(where, "token_file", path, _MOST_TOKEN, secret=True).strip()


def read_pem(where: str, name: str, path: str) -> bytes:
    """Read a certificate or a private key in PEM form; else raise a ValueError."""
    data = _read(where, name, path, _MOST_PEM, secret="key" in name)
    if b"-----BEGIN " not in data:
        raise ValueError(f"{where}: {name} must be in PEM form (-----BEGIN …), got {path}")
    return data


def make_proof(token: bytes) -> str:
    """Return a proof of the token that is valid once, for a short time."""
    payload = f"{int(time.time() * 1000)}.{secrets.token_hex(16)}"
    return f"{payload}.{_signature(token, payload)}"


def _signature(token: bytes, payload: str) -> str:
    return hmac.new(token, f"rlox worker {payload}".encode(), hashlib.sha256).hexdigest()


class Proofs:
    """The proofs of its token that a worker has accepted; without a token, everyone is."""

    def __init__(self, token: bytes | None):
        self._token = token
        self._seen: dict[str, float] = {}  # used proofs, and until when they are remembered
        self._lock = threading.Lock()
        self._started = time.time()

    def refusal(self, proof: str | None) -> tuple[bool, str] | None:
        """Accept `proof` once and return None, or return why not, and whether a new proof may soon be accepted."""
        if self._token is None:
            return None
        if proof is None:
            return False, "a token is needed; set remote.token_file to a file with the worker's token"
        payload, _, signature = proof.rpartition(".")
        if not hmac.compare_digest(_signature(self._token, payload).encode(), signature.encode()):
            return False, "the token differs from the worker's; compare the two token files"
        at, now = int(payload.partition(".")[0]) / 1000, time.time()  # safe to parse: the sender has the token
        if abs(now - at) > WINDOW_S:
            return False, f"the clocks of the two machines differ by {abs(now - at):.0f} s; correct them"
        if at < self._started:
            return True, (
                f"the proof of the token is {self._started - at:.0f} s older than this worker, which accepts none from "
                "before its start: if it persists, the learner's clock is behind; correct the clocks of both machines"
            )
        with self._lock:
            if payload in self._seen:
                return False, "the proof of the token was used before"
            if len(self._seen) >= _MOST_PROOFS:
                self._seen = {key: end for key, end in self._seen.items() if end > now}
            if len(self._seen) >= _MOST_PROOFS:
                return True, "too many handshakes"
            self._seen[payload] = now + 2 * WINDOW_S
        return None


def client_credentials(grpc: Any, remote: RemoteConfig) -> Any:
    """Return gRPC's credentials of a learner; None for unencrypted connections.

    These raise a ValueError for a worker on another machine, unless `insecure` allows them.
    """
    if remote.ca is None:
        for address in remote.addresses:
            if is_loopback(address.rpartition(":")[0]):
                continue
            if not remote.insecure:
                raise ValueError(
                    f"RemoteConfig: ca must be set for a worker on another machine, got null for {address}; name the "
                    f"certificate that signed the worker's, or set insecure=true: {OPEN_TO_ALL}"
                )
            warnings.warn(f"remote.insecure: {address}: {OPEN_TO_ALL}", RuntimeWarning, stacklevel=3)
        return None
    where = "RemoteConfig"
    key = None if remote.key is None else read_pem(where, "key", remote.key)
    cert = None if remote.cert is None else read_pem(where, "cert", remote.cert)
    return grpc.ssl_channel_credentials(read_pem(where, "ca", remote.ca), key, cert)
