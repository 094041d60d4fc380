"""Plain-text connections to other machines: refused, unless `insecure` allows them with a warning.

Every process of this machine reaches itself at 0.0.0.0, which is not a loopback address, as another machine's is not.
"""

import re
import shlex
import subprocess
import sys
import warnings

import numpy as np
import pytest

from rlox.checkpoint import load_checkpoint
from rlox.config import RemoteConfig
from rlox.envs.remote import RemoteEnvPool
from rlox.envs.remote.client import WorkerRefused
from rlox.envs.remote.security import OPEN_TO_ALL
from rlox.kernels.envs.vec_env import VecEnv

OTHER = "0.0.0.0"
REFUSAL = "ca must be set for a worker on another machine, got null for {}; name the certificate that signed the "
REFUSAL += "worker's, or set insecure=true: " + OPEN_TO_ALL
PROGRAM = "from rlox_cli.main import main; main()"


def elsewhere(server):
    return f"{OTHER}:{server.port}"


def test_a_learner_connects_in_plain_text_only_if_insecure_allows_it(serving):
    address = elsewhere(serving(host=OTHER, insecure=True))
    with pytest.raises(ValueError, match=re.escape(REFUSAL.format(address))):
        RemoteEnvPool([address], None, 2, 0, RemoteConfig(timeout_s=10))
    with pytest.warns(RuntimeWarning) as warned:
        pool = RemoteEnvPool([address], None, 2, 0, RemoteConfig(timeout_s=10, insecure=True))
    assert {str(one.message) for one in warned} == {f"remote.insecure: {address}: {OPEN_TO_ALL}"}
    alone = VecEnv(2, 0, "CartPole-v1")
    np.testing.assert_array_equal(pool.reset_all(), alone.reset_all())
    np.testing.assert_array_equal(pool.step_all([0, 1])["obs"], alone.step_all([0, 1])["obs"])
    pool.close()


def test_insecure_gives_no_warning_where_nobody_else_can_read(serving, certificates):
    c = certificates
    local = serving()
    encrypted = serving(host=OTHER, tls_cert=c.worker, tls_key=c.worker_key, tls_ca=c.authority, token_file=c.token)
    files = {"ca": c.authority, "cert": c.learner, "key": c.learner_key, "token_file": c.token}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for address, more in ((local.address, {}), (f"localhost:{encrypted.port}", files)):
            pool = RemoteEnvPool([address], None, 1, 0, RemoteConfig(timeout_s=10, insecure=True, **more))
            assert pool.reset_all().shape == (1, 4)
            pool.close()


def test_a_server_is_open_to_others_without_tls_and_token_only_if_insecure_allows_it(serving, certificates):
    tls = {"tls_cert": certificates.worker, "tls_key": certificates.worker_key}
    for options, reason in (
        ({}, OPEN_TO_ALL),
        ({"token_file": certificates.token}, OPEN_TO_ALL),
        (tls, "without a token or tls_ca, everyone who can reach the port is served"),
    ):
        with pytest.raises(ValueError, match="host must be local") as refused:
            serving(host=OTHER, **options)
        assert f"got {OTHER}: {reason}; give a certificate and a token, or insecure" in str(refused.value)
        serving(host=OTHER, insecure=True, **options)
    # A token is needed all the same.
    server = serving(host=OTHER, insecure=True, token_file=certificates.token)
    with (
        pytest.warns(RuntimeWarning, match=r"remote\.insecure"),
        pytest.raises(WorkerRefused, match="a token is needed"),
    ):
        RemoteEnvPool([elsewhere(server)], None, 1, 0, RemoteConfig(timeout_s=10, insecure=True))


@pytest.fixture
def worker(tmp_path):
    """An `rlox worker --insecure` that other machines can reach: the lines that it printed, and its log."""
    words = ["worker", "--env", "CartPole-v1", "--host", OTHER, "--port", "0", "--insecure"]
    with open(tmp_path / "log", "w+") as log:
        child = subprocess.Popen([sys.executable, "-c", PROGRAM, *words], stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            yield [child.stdout.readline() for _ in range(3)], tmp_path / "log"
        finally:
            child.kill()
            child.wait()
            child.stdout.close()


@pytest.mark.slow
def test_worker_and_doctor_warn_of_insecure_and_a_run_trains(worker, command, tmp_path):
    (serving, _, proposed), log = worker
    assert f"warning: --insecure: {OPEN_TO_ALL}\n" in log.read_text()
    address = re.search(r"at (0\.0\.0\.0:\d+) \(plain text, no token", serving)[1]
    code, out, err = command("doctor", address)
    assert (code, out) == (2, "")
    assert REFUSAL.format(address) in err
    warning = re.escape(f"remote.insecure: {address}: {OPEN_TO_ALL}")
    with pytest.warns(RuntimeWarning, match=warning):
        code, out, err = command("doctor", "--insecure", address)
    assert (code or 0) == 0, err
    assert re.search(rf"{re.escape(address)} +ok .*CartPole-v1", out)
    # The command that the worker proposes trains there.
    words = shlex.split(proposed.partition(": rlox ")[2].replace("THIS-HOST", OTHER))
    assert "remote.insecure=true" in words
    run = ["total_timesteps=160", "algo.n_steps=8", "tuned=off", "logger=none", "eval.n_points=0", "eval.n_episodes=1"]
    run += [f"output_dir={tmp_path}/run"]
    code, _, err = command(*(word for word in words if word != "remote.insecure=true"), *run)
    assert code == 2
    assert REFUSAL.format(address) in err
    with pytest.warns(RuntimeWarning, match=warning):
        code, _, err = command(*words, *run)
    assert (code or 0) == 0, err
    steps = load_checkpoint(tmp_path / "run" / "checkpoints" / "last.safetensors").header["counters"]["env_steps"]
    assert steps >= 160
