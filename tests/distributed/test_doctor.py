"""`rlox doctor`: its output for healthy workers and for others."""

import pytest


@pytest.mark.slow
def test_each_worker_has_a_line(command, serving, certificates, process):
    import signal

    well, busy = serving(max_sessions=2), serving("Pendulum-v1", max_sessions=1)
    c = certificates
    secured = serving(tls_cert=c.worker, tls_key=c.worker_key, tls_ca=c.authority, token_file=c.token)
    hung, port = process()
    process.stop(hung)
    from rlox.config import RemoteConfig
    from rlox.envs.remote import Connection

    line = Connection(busy.address, RemoteConfig(), "env", {"n_envs": 1})
    addresses = [well.address, busy.address, secured.address, f"127.0.0.1:{port}", "127.0.0.1:1"]
    code, out, err = command("doctor", *addresses, "--timeout-s", "2")
    hung.send_signal(signal.SIGCONT)
    line.close()
    rows = {row.split()[0]: " ".join(row.split()) for row in out.splitlines()[1:]}
    assert (code, err) == (1, "")
    assert "ok" in rows[well.address]
    assert "CartPole-v1 observations (4,) float32, 2 discrete actions 0 of 2" in rows[well.address]
    assert rows[well.address].endswith("in sync")
    assert "busy" in rows[busy.address]
    assert "Pendulum-v1 observations (3,) float32, 1 action component 1 of 1" in rows[busy.address]
    assert "failed" in rows[secured.address]
    assert "it may require TLS" in rows[secured.address]
    assert "did not answer within 2 s" in rows[f"127.0.0.1:{port}"]
    assert "connection refused; is `rlox worker` running there?" in rows["127.0.0.1:1"]
    files = ("--ca", c.authority, "--cert", c.learner, "--key", c.learner_key, "--token-file", c.token)
    code, out, _ = command("doctor", secured.address, *files)
    assert (code or 0, " ok " in out) == (0, True)
