"""`rlox worker`, and a run of `rlox train` on it, from the command line."""

import re
import signal
import subprocess
import sys
import time

import pytest
import typer

from rlox.config import RemoteConfig
from rlox.envs.remote import RemoteEnvPool
from rlox.envs.remote.codec import LARGEST_MESSAGE
from rlox.envs.remote.security import Proofs, make_proof, read_token

PROGRAM = "from rlox_cli.main import main; main()"


@pytest.fixture
def started(tmp_path):
    """Starts workers from the command line; returns the process and its address."""
    made = []

    def start(*words):
        log = open(tmp_path / f"log{len(made)}", "w+")  # noqa: SIM115
        child = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "worker", "--port", "0", *words],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        made.append((child, log))
        child.output = [child.stdout.readline() for _ in range(3)]
        child.log = tmp_path / f"log{len(made) - 1}"
        return child, re.search(r"at (127\.0\.0\.1:\d+) ", child.output[0])[1]

    yield start
    for child, log in made:
        child.kill()
        child.wait()
        child.stdout.close()
        log.close()


def trained(command, tmp_path, *words):
    words = (*words, "tuned=off", "logger=none", "eval.n_points=0", "eval.n_episodes=1", f"output_dir={tmp_path}/run")
    return command("train", *words)


@pytest.mark.slow
def test_a_run_trains_on_a_worker_that_ends_with_it(command, started, tmp_path):
    child, address = started("--env", "CartPole-v1", "--once", "env.kwargs.sutton_barto_reward=true")
    assert f"serving CartPole-v1 at {address} (plain text, no token; at most 8 sessions" in child.output[0]
    assert "observations (4,), 2 discrete actions" in child.output[1]
    assert f"rlox train algo=ppo env=CartPole-v1 'remote.addresses=[{address}]'" in child.output[2]
    keys = ("algo=a2c", "env=CartPole-v1", f"remote.addresses=[{address}]", "total_timesteps=160")
    _, _, found = trained(command, tmp_path, *keys)
    assert "but the learner expects CartPole-v1" in found
    code, _, found = trained(command, tmp_path, *keys, "env.kwargs.sutton_barto_reward=true")
    assert (code or 0) == 0, found
    assert child.wait(30) == 0
    assert "stopped after 1 session" in child.log.read_text()
    assert f"- {address}" in (tmp_path / "run" / "config.yaml").read_text()


def _step_until_cut(pool):
    while not pool.step_all([0, 0])["truncated"][0]:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_a_worker(started, number):
    child, address = started("--env", "CartPole-v1")
    _, other = started("--env", "CartPole-v1")
    pool = RemoteEnvPool([address, other], None, 2, 0, RemoteConfig(timeout_s=10))
    pool.step_all([0, 0])
    child.send_signal(number)
    with pytest.warns(RuntimeWarning, match=f"{address} is shutting down; environments 0 to 0 continue at {other}"):
        _step_until_cut(pool)
    assert child.wait(30) == 128 + number
    assert "draining: no new sessions" in child.log.read_text()
    pool.close()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--env", "CartPole-v2"], "env=CartPole-v2 is no environment"),
        (["--env", "CartPole-v1", "seed=3"], "seed=3 must be a key of the environment"),
        (["--env", "CartPole-v1", "--host", "0.0.0.0"], "without TLS, anyone on the network"),
        (
            ["--env", "CartPole-v1", "--host", "0.0.0.0", "--tls-cert", "C", "--tls-key", "K"],
            "everyone who can reach the port",
        ),
        (["--env", "CartPole-v1", "--tls-cert", "nowhere", "--tls-key", "K"], "must be a file that can be read"),
        (["--env", "CartPole-v1", "--token-file", "EMPTY"], "must have between 1 and"),
        (["--env", "CartPole-v1", "--tls-ca", "C"], "must be given together"),
    ],
)
def test_errors_of_the_worker(command, certificates, tmp_path, words, message):
    (tmp_path / "empty").write_text("\n")
    files = {"C": certificates.worker, "K": certificates.worker_key, "EMPTY": str(tmp_path / "empty")}
    code, _, err = command("worker", "--port", "0", *(files.get(word, word) for word in words))
    assert code == 2
    assert message in err


def test_messages_are_at_most_as_large_as_learners_take(command):
    with pytest.raises(typer.BadParameter, match="64"):  # which Typer prints, with the option
        command("worker", "--env", "CartPole-v1", "--max-message-mb", str(LARGEST_MESSAGE // 2**20 + 1))


def test_a_token_that_others_can_read_gives_a_warning(tmp_path):
    path = tmp_path / "token"
    path.write_text("secret\n")
    path.chmod(0o644)
    with pytest.warns(RuntimeWarning, match="can be read by other users of this machine; chmod 600"):
        assert read_token("here", str(path)) == b"secret"


def test_a_proof_from_before_the_start_of_a_worker_names_the_clocks():
    proof = make_proof(b"secret")
    time.sleep(0.002)
    soon, why = Proofs(b"secret").refusal(proof)
    assert soon
    assert "0 s older than this worker" in why
    assert "the learner's clock is behind; correct the clocks" in why


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["remote.addresses=[here]"], "remote.addresses must contain host:port addresses"),
        (["remote.timeout_s=3"], "remote.timeout_s must be left out if no worker is named"),
        (["remote.addresses=[a:1]", "env.workers=1"], "remote must have no addresses if env.workers is set"),
        (["remote.addresses=[a:1,b:2]", "env.n_envs=1"], "at most env.n_envs"),
        (["remote.addresses=[a:1]"], "ca must be set for a worker on another machine"),
        (["remote.adresses=[a:1]"], "did you mean 'addresses'"),
        (["remote.addresses=[127.0.0.1:1]"], "worker 127.0.0.1:1 cannot be reached"),
    ],
)
def test_errors_in_typed_settings_are_reported_before_the_run(command, tmp_path, keys, message):
    _, _, err = trained(command, tmp_path, "algo=ppo", "env=CartPole-v1", *keys)
    assert message in err
    assert not (tmp_path / "run" / "checkpoints").exists()
