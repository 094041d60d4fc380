"""Compare GRPO that samples with a real vLLM server with the same training that samples with the model itself.

usage: served.py --vllm-python PYTHON [--seeds 0 1 2] [--updates 300] [--out benchmarks/llm_vllm.json]

The script starts one vLLM server on the loopback device. With every seed it trains on the task ``copy`` of `tasks.py`,
first with the server, which gets new weights before every update, and then with the local sampler; at the end it stops
the server. For each training it stores the mean reward of each tenth, the largest and the mean difference between the
log-probabilities of the server and of the training (in the comparison after each sync, and over all sampled tokens),
and the seconds.
"""

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import tasks
import torch
import transformers

import rlox
from rlox.llm.backends import create_backend
from rlox_cli.bench.machine import provenance

TASK, START_S = "copy", 300.0


class Watched(rlox.GRPO):
    """GRPO that records the gaps between server and training: over the tokens of an update, and after each sync."""

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.token_gaps, self.probe_gaps = [], []

    def update(self, batch):
        metrics = super().update(batch)
        self.token_gaps.append(float(metrics["sampler_gap"]))
        self.probe_gaps.append(self.compare_with_data().get("sampler/probe_gap"))
        return metrics


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def serve(python, folder, log, port=None):
    """Start a server with the model in `folder`, on any free port; return its process and its address."""
    port = port or free_port()
    words = [
        "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--host", "127.0.0.1", "--port", str(port),
        "--dtype", "float32", "--enforce-eager", "--max-model-len", "64", "--max-num-seqs", "128",
        "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1",
    ]  # fmt: skip
    settings = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1",
                "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}  # fmt: skip
    process = subprocess.Popen(
        [python, *words], env={**os.environ, **settings}, stdout=log, stderr=log, start_new_session=True
    )
    url, began = f"http://127.0.0.1:{port}", time.monotonic()
    while process.poll() is None and time.monotonic() - began < START_S:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return process, url
        except OSError:
            time.sleep(1.0)
    stop(process)
    raise SystemExit(f"vLLM must answer within {START_S:g} s, got no answer; see {log.name}")


def stop(process):
    """End a server and all of its processes."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def train(seed, updates, url):
    """Run one training, with the server at `url` or with the model itself."""
    task, clock = tasks.TASKS[TASK], tasks.Clock()
    model = tasks.model(TASK, seed)
    own = {} if url is None else {"sampler": create_backend("vllm", url=url), "sampler_correction": "token_truncate"}
    grpo = Watched(
        model, reward_fn=clock.reward, tokenizer=tasks.tokenizer(TASK), dataset=tasks.prompts(TASK),
        learning_rate=task.learning_rate, batch_size=task.batch, group_size=task.group, kl_coef=0.0,
        max_new_tokens=task.new_tokens, seed=seed, device="cpu", **own,
    )  # fmt: skip
    began = time.perf_counter()
    grpo.train(n_updates=updates)
    seconds = time.perf_counter() - began
    rewards, probes = clock.rewards, [gap for gap in grpo.probe_gaps if gap is not None]
    found = {
        "seed": seed, "updates": len(rewards), "ms_an_update": round(1e3 * seconds / len(rewards), 1),
        "reward_by_tenth": [round(statistics.mean(rewards[len(rewards) * i // 10 : len(rewards) * (i + 1) // 10]), 3)
                            for i in range(10)],
        "mean_token_gap": statistics.mean(grpo.token_gaps), "largest_mean_token_gap": max(grpo.token_gaps),
        "syncs_compared": len(probes), "largest_probe_gap": max(probes, default=None),
        "sampled": tasks.exact(model, TASK, 20), "greedy": tasks.exact(model, TASK, 0),
    }  # fmt: skip
    grpo.close()
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", required=True, help="an interpreter that has vLLM")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--updates", type=int, default=300, help="at least 10")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    asked = [args.vllm_python, "-c", "from importlib.metadata import version; print(version('vllm-cpu'))"]
    vllm = subprocess.run(asked, capture_output=True, text=True)
    runs = {"vllm": [], "local": []}
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/server.log", "w+") as log:
        tasks.random_model(TASK, 0).save_pretrained(f"{folder}/start")
        tasks.tokenizer(TASK).save_pretrained(f"{folder}/start")
        process, url = serve(args.vllm_python, f"{folder}/start", log)
        try:
            for seed in args.seeds:
                for name, where in (("vllm", url), ("local", None)):
                    runs[name].append(train(seed, args.updates, where))
                    print(name, json.dumps(runs[name][-1]), flush=True)
        finally:
            stop(process)
    if args.out:
        words = f"--seeds {' '.join(map(str, args.seeds))} --updates {args.updates}"
        versions = {"rlox": rlox.__version__, "torch": torch.__version__, "transformers": transformers.__version__,
                    "vllm-cpu": vllm.stdout.strip()}  # fmt: skip
        head = provenance(f"python benchmarks/llm/served.py --vllm-python PYTHON {words}")
        args.out.write_text(json.dumps({**head, "versions": versions, "task": TASK, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
