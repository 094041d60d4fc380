"""Attacks on the port of a worker: each is rejected and logged, takes little memory, and others are still served."""

import contextlib
import os
import re
import secrets
import socket
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from rlox import __version__
from rlox.config import RemoteConfig
from rlox.envs.remote import Connection, RemoteEnvPool, WorkerLost, WorkerRefused, decode, encode, refusals
from rlox.envs.remote.codec import VERSION, _write_beginning
from rlox.envs.remote.security import PROOF, make_proof
from rlox.envs.remote.server import METHOD

pytestmark = pytest.mark.slow
HELLO = {"protocol": VERSION, "rlox": __version__, "session": "env", "n_envs": 2}
MOST_GROWTH = 64 * 2**20  # bytes


@pytest.fixture(scope="module")
def worker(certificates, tmp_path_factory):
    """`rlox worker` with all security options and small limits."""
    folder, c = tmp_path_factory.mktemp("worker"), certificates
    program = "from rlox_cli.main import main; main()"
    options = {"env": "CartPole-v1", "port": 0, "tls-cert": c.worker, "tls-key": c.worker_key, "tls-ca": c.authority}
    options |= {"token-file": c.token, "max-sessions": 3, "max-message-mb": 1, "idle-s": 3}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    with open(folder / "log", "wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-c", program, "worker", *words], stdout=subprocess.PIPE, stderr=log, text=True
        )
    line = child.stdout.readline()
    port = int(re.search(r"127\.0\.0\.1:(\d+) \(TLS, clients' certificates and a token", line)[1])
    found = SimpleNamespace(pid=child.pid, port=port, address=f"127.0.0.1:{port}", log=folder / "log", flooded=False)
    yield found
    child.terminate()
    assert child.wait(30) == 143
    child.stdout.close()
    log = (folder / "log").read_text()
    assert "Traceback" not in log
    assert not found.flooded or re.search("[0-9,]+ more connections were refused", log)


@pytest.fixture(scope="module")
def served(worker, certificates):
    """A learner that is connected during all attacks."""
    c = certificates
    remote = RemoteConfig(token_file=c.token, ca=c.authority, cert=c.learner, key=c.learner_key, timeout_s=20.0)
    pool = RemoteEnvPool([worker.address], "CartPole-v1", 2, 0, remote)
    pool.reset_all()
    yield pool
    pool.close()


@pytest.fixture
def attacked(worker, served, eventually):
    """The worker; afterwards the log must contain `expected`, and the learner must still have the same session."""
    resident = lambda: int(open(f"/proc/{worker.pid}/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")  # noqa: E731, SIM115
    served.step_all([0, 1])
    before, seen = resident(), len(worker.log.read_text())
    worker.expected = None
    yield worker
    served.step_all([0, 1])
    assert served.n_lost == 0
    assert resident() - before < MOST_GROWTH
    eventually(lambda: re.search(worker.expected, worker.log.read_text()[seen:]))
    time.sleep(0.3)  # let the attacked sessions end
    status = Connection(worker.address, served._remote, "look")
    eventually(lambda: status.welcome.fields["sessions"] == 1 or _look_again(status, worker, served))
    status.close()


def _look_again(status, worker, served):
    status.close()
    status.__init__(worker.address, served._remote, "look")
    return status.welcome.fields["sessions"] == 1


@pytest.fixture
def stream(certificates):
    """A raw stream to a worker: a function that sends, and the call with the answers."""
    import queue

    import grpc

    made = []

    def start(worker, proof=None):
        c = certificates
        read = lambda path: open(path, "rb").read()  # noqa: E731, SIM115
        credentials = grpc.ssl_channel_credentials(read(c.authority), read(c.learner_key), read(c.learner))
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
        channel = grpc.secure_channel(worker.address, credentials, options)
        outbox = queue.SimpleQueue()
        proof = proof or make_proof(read(c.token).strip())
        call = channel.stream_stream(METHOD)(iter(outbox.get, None), metadata=[(PROOF, proof)], timeout=30)
        made.append((channel, call, outbox))
        return outbox.put, call

    yield start
    for channel, call, outbox in made:
        outbox.put(None)
        call.cancel()
        channel.close()


STRANGERS = {
    "no TLS": ({"ca": None, "cert": None, "key": None}, WorkerLost, "it may require TLS", "it does not speak TLS"),
    "no certificate": ({"cert": None, "key": None}, WorkerLost, "cannot be reached", "it sent no certificate"),
    "a stranger's certificate": ({"who": "stranger"}, WorkerLost, "cannot be reached", "not signed by --tls-ca"),
    "an expired certificate": ({"who": "expired"}, WorkerLost, "cannot be reached", "has expired"),
    "a worker of another authority": ({"ca": "stranger"}, WorkerLost, "VERIFY_FAILED", ""),  # the learner disconnects
    "no token": ({"token_file": None}, WorkerRefused, "a token is needed", "refused: a token is needed"),
    "a wrong token": (
        {"token_file": "other_token"},
        WorkerRefused,
        "differs from the worker's",
        "the token differs from the worker's",
    ),
}


@pytest.mark.parametrize(("changes", "error", "message", "logged"), STRANGERS.values(), ids=STRANGERS)
def test_unauthorized_clients_are_rejected(attacked, certificates, secured, changes, error, message, logged):
    changes = dict(changes)
    if who := changes.pop("who", None):
        changes |= {"cert": getattr(certificates, who), "key": getattr(certificates, f"{who}_key")}
    files = {name: getattr(certificates, value, value) if value else None for name, value in changes.items()}
    attacked.expected = logged
    with pytest.raises(error, match=message):
        Connection(attacked.address, replace(secured, **files), "env", {"n_envs": 1})


def test_a_handshake_cannot_be_replayed(attacked, certificates, stream):
    import grpc

    attacked.expected = "refused: the proof of the token was used before"
    proof = make_proof(open(certificates.token, "rb").read().strip())  # noqa: SIM115
    send, call = stream(attacked, proof)
    send(encode("hello", {**HELLO, "session": "look"}))
    assert decode(next(call)).kind == "welcome"
    send, call = stream(attacked, proof)
    with pytest.raises(grpc.RpcError) as e:
        next(call)
    assert e.value.code() is grpc.StatusCode.UNAUTHENTICATED


MESSAGES = {
    "another version": (encode("hello", {**HELLO, "rlox": "0.0.1"}), "both ends must run the same rlox, got 0.0.1"),
    "no hello": (encode("step"), "the first message must be hello"),
    "no such session": (encode("hello", {**HELLO, "session": "shell"}), "session must be one of env"),
    "garbage": (secrets.token_bytes(500), "a message must begin with"),
    "a pickle": (b"cos\nsystem\n(S'true'\ntR.", "a message must begin with"),
    "many environments": (encode("hello", {**HELLO, "n_envs": 2**40}), "n_envs must be at most 1024"),
}


@pytest.mark.parametrize(("data", "message"), MESSAGES.values(), ids=MESSAGES)
def test_an_invalid_first_message_is_rejected(attacked, stream, data, message):
    send, call = stream(attacked)
    send(data)
    answer = decode(next(call))
    assert answer.kind == "refused"
    assert message in answer.fields["reason"]
    attacked.expected = f"refused: .*{message}"


LATER = {
    "a claimed shape": (
        _write_beginning("step", (("actions", "int64", (2**31 - 1, 2**31 - 1)),), "{}"),
        "actions must have its 36,893,488,",
    ),
    "wrong actions": (
        encode("step", None, {"actions": np.zeros((1000, 1000), np.int8)[:500]}),
        "actions must have shape",
    ),
    "actions out of range": (encode("step", None, {"actions": np.array([7, 7])}), r"actions must be in \[0, 2\)"),
    "a state with other keys": (encode("set_state", None, {"a": np.zeros(1)}), "state must have the keys"),
    "a first environment out of range": (
        encode("reset", {"seed": 1, "first": 2**62}, {"seeds": np.array([1, 2])}),
        "first must be at most",
    ),
    "an unknown request": (encode("eval", {"code": "1"}), "a message must be reset, step"),
}


@pytest.mark.parametrize(("data", "text"), LATER.values(), ids=LATER)
def test_an_invalid_later_message_ends_the_session(attacked, stream, data, text):
    import grpc

    send, call = stream(attacked)
    send(encode("hello", HELLO))
    assert decode(next(call)).kind == "welcome"
    send(data)
    try:
        answer = decode(next(call))
        assert answer.kind == "failed"
        assert re.search(text, answer.fields["message"])
        next(call)
    except (StopIteration, grpc.RpcError):
        pass
    attacked.expected = f"session ended .*{text}"


def test_an_oversized_message_is_not_read(attacked, stream):
    import grpc

    attacked.expected = "session ended .*sent more than 1 MiB at once"
    send, call = stream(attacked)
    send(encode("hello", HELLO))
    next(call)
    send(encode("step", None, {"actions": np.zeros(2**18)}))  # 2 MiB
    with pytest.raises(grpc.RpcError) as e:
        next(call)
    assert e.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_broken_stream_ends_its_session(attacked, proxied, secured):
    attacked.expected = "session ended .*the other side is gone"
    proxy = proxied(attacked.port)
    line = Connection(f"127.0.0.1:{proxy.port}", secured, "env", {"n_envs": 2})
    proxy.cut()
    line.send("reset", {"seed": 0, "first": 0}, {"seeds": np.array([1, 2])})
    with pytest.raises(WorkerLost):
        line.receive()


def test_a_client_that_does_not_read_is_dropped(attacked, stream, eventually):
    attacked.expected = "session ended .*the client did not receive its answer"
    send, _ = stream(attacked)
    send(encode("hello", {**HELLO, "n_envs": 1024}))
    for _ in range(400):
        send(encode("step", None, {"actions": np.zeros(1024, np.int64)}))
    eventually(lambda: "did not receive its answer" in attacked.log.read_text())


def test_a_client_that_sends_nothing_is_dropped(attacked, stream):
    import grpc

    attacked.expected = "session ended .*the client sent nothing"
    send, call = stream(attacked)
    send(encode("hello", HELLO))
    next(call)
    with pytest.raises(grpc.RpcError):
        next(call)


def test_a_thousand_connections_do_not_block_others(attacked, served, secured, eventually):
    attacked.expected = "refused a connection|more connections were refused"
    sockets = []
    try:
        for i in range(1000):
            sockets.append(socket.create_connection(("127.0.0.1", attacked.port), 5.0))
            sockets[-1].setblocking(False)
            if i % 100 == 0:
                served.step_all([0, 1])
        assert len(os.listdir(f"/proc/{attacked.pid}/fd")) < 250  # most were closed at once
        served.step_all([0, 1])
        for one in sockets[:30]:
            with contextlib.suppress(OSError):
                one.send(b"GET / HTTP/1.1\r\n\r\n" * 20)
    finally:
        for one in sockets:
            one.close()
    line = eventually(lambda: _connected(attacked.address, secured))
    line.close()


def _connected(address, secured):
    try:
        return Connection(address, secured, "env", {"n_envs": 1})
    except WorkerLost:
        return None


def test_a_burst_of_refusals_is_counted_when_it_is_over(monkeypatch):
    monkeypatch.setattr(refusals, "PERIOD_S", 0.2)
    lines = []
    log = refusals.Refusals(lines.append, "streams")
    for i in range(2 * refusals.MOST_LINES + 3):
        log.add(f"refused {i}")
    first = [f"refused {i}" for i in range(refusals.MOST_LINES)]
    assert lines == first
    log.tick()
    assert lines == first
    time.sleep(0.25)
    log.tick()
    assert lines == [*first, f"{refusals.MOST_LINES + 3} more streams were refused"]
    log.tick(end=True)
    log.add("the next")
    log.tick(end=True)
    assert lines[-1] == "the next"


@pytest.mark.parametrize("n", [100, pytest.param(1000, marks=pytest.mark.exhaustive)])
def test_connections_that_send_random_bytes(attacked, served, n):
    attacked.expected = "it does not speak TLS|it sent no TLS handshake|more connections were refused"
    attacked.flooded = True
    for i in range(n):
        with socket.create_connection(("127.0.0.1", attacked.port), 5.0) as one:
            try:
                for _ in range(10):
                    one.sendall(secrets.token_bytes(4096))
            except OSError:
                pass
        if i % 25 == 0:
            served.step_all([0, 1])
    assert attacked.log.stat().st_size < 200_000  # a flood does not fill the log
