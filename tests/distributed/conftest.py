"""Workers in this process and in others, certificates, and a network that can be interrupted."""

import contextlib
import datetime
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlox.config import RemoteConfig

# Lets any test `import two_ranks`, whatever the import mode.
sys.path.insert(0, str(Path(__file__).parent))

SERVE = """
import sys
from rlox.envs.remote import Server
from rlox.envs.remote.session import EnvSessions
server = Server({"env": EnvSessions(sys.argv[1])}, port=int(sys.argv[2])).start()
print(server.port, flush=True)
sys.stdin.read()
"""


class Proxy:
    """Forwards bytes between its port and another while `flows` is set; `cut` drops the connections."""

    def __init__(self, port):
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.flows = threading.Event()
        self.flows.set()
        self._pairs, self.sent = [], bytearray()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
                self._pairs += [near, far]
                threading.Thread(target=self._pump, args=(near, far, self.sent), daemon=True).start()
                threading.Thread(target=self._pump, args=(far, near, None), daemon=True).start()

    def _pump(self, source, sink, record):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.flows.wait()
                if record is not None:
                    record += data
                sink.sendall(data)
        self._drop(source, sink)

    def _drop(self, *sockets):
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def cut(self):
        self._drop(*self._pairs)
        self._pairs.clear()

    def close(self):
        self.flows.set()
        self._drop(self._listener)
        self.cut()


@pytest.fixture
def proxied():
    made = []

    def make(port):
        made.append(Proxy(port))
        return made[-1]

    yield make
    for proxy in made:
        proxy.close()


@pytest.fixture
def serving():
    """Starts servers in this process; the attribute `lines` contains the log of each."""
    from rlox.envs.remote import Server
    from rlox.envs.remote.session import EnvSessions

    made = []

    def start(env="CartPole-v1", sessions=None, kwargs=None, most_envs=1024, **options):
        lines = []
        kinds = sessions or {"env": EnvSessions(env, kwargs, most_envs=most_envs)}
        server = Server(kinds, log=lines.append, **options)
        made.append(server)
        server.lines, server.address = lines, f"127.0.0.1:{server.port}"
        return server.start()

    yield start
    for server in made:
        server.stop()


@pytest.fixture(scope="module")
def servers():
    """Two workers in this process that play CartPole-v1, with actors."""
    from rlox.distributed.grpc_actors import ActorSessions
    from rlox.envs.remote.server import Server
    from rlox.envs.remote.session import EnvSessions

    envs = EnvSessions("CartPole-v1")
    servers = [Server({"env": envs, "actor": ActorSessions(envs)}).start() for _ in range(2)]
    yield servers
    for server in servers:
        server.stop(0.1)


@pytest.fixture(scope="module")
def workers(servers):
    """Addresses of the two workers."""
    return [f"127.0.0.1:{server.port}" for server in servers]


@pytest.fixture
def process():
    """Starts a worker in another process, without the command line; returns the process and its port.

    ``stop`` stops such a process, and returns when all its threads have stopped.
    """
    made = []

    def stop(child):
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)

    def start(env="CartPole-v1", port=0):
        child = subprocess.Popen(
            [sys.executable, "-c", SERVE, env, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        made.append(child)
        return child, int(child.stdout.readline())

    start.stop = stop
    yield start
    for child in made:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()


@pytest.fixture
def eventually():
    """Waits until a condition holds."""

    def wait(holds, seconds=20.0):
        until = time.monotonic() + seconds
        while not (found := holds()) and time.monotonic() < until:
            time.sleep(0.02)
        assert found
        return found

    return wait


def _certificate(name, issuer=None, days=(-1, 1)):
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    begin, end = (datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(days=d) for d in days)
    builder = (
        x509.CertificateBuilder(subject_name=subject, issuer_name=issuer[1].subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
    )
    if issuer is not None:
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return key, builder.sign(issuer[0] if issuer else key, hashes.SHA256())


@pytest.fixture(scope="session")
def certificates(tmp_path_factory):
    """Certificate files: of an authority, signed by it, expired, and of a stranger."""
    from cryptography.hazmat.primitives import serialization as s

    folder, found = tmp_path_factory.mktemp("certificates"), {}
    authority, stranger = _certificate("authority"), _certificate("stranger")
    pairs = {
        "authority": authority,
        "worker": _certificate("worker", authority),
        "learner": _certificate("learner", authority),
        "expired": _certificate("learner", authority, (-3, -2)),
        "stranger": _certificate("learner", stranger),
    }
    for name, (key, certificate) in pairs.items():
        cert, secret = folder / f"{name}.pem", folder / f"{name}.key"
        cert.write_bytes(certificate.public_bytes(s.Encoding.PEM))
        secret.write_bytes(key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption()))
        secret.chmod(0o600)
        found[name], found[f"{name}_key"] = str(cert), str(secret)
    for name in ("token", "other_token"):
        path = folder / name
        path.write_text(f"{name} of the workers\n")
        path.chmod(0o600)
        found[name] = str(path)
    return SimpleNamespace(**found)


@pytest.fixture
def secured(certificates):
    """The configuration of an authorized learner."""
    c = certificates
    return RemoteConfig(token_file=c.token, ca=c.authority, cert=c.learner, key=c.learner_key, timeout_s=10.0)
