"""Measure the scores of examples/post_training_pipeline.py over several seeds.

usage: pipeline.py [--seeds 100 101 102 103 104] [--runs FOLDER] [--out benchmarks/llm_pipeline.json]

Each seed runs in its own process with one thread; seeds whose scores are in ``--runs`` are not run again. In addition
to the scores, the script stores CPU and wall seconds, and how far the reward model can be fooled: of the wrong answers
among ten samples of each held-out prompt, the share that get a higher reward than the right answer.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers

import rlox
from rlox_cli.bench.machine import provenance
from rlox_cli.bench.peers import environment

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES))

import post_training_pipeline as pipeline  # noqa: E402  (of examples/)

POLICIES = {"sft": rlox.SFT, "grpo": rlox.GRPO, "dpo": rlox.DPO}


def wrongly_preferred(folder, held_out):
    """Return for each policy the share of its wrong answers that get a higher reward than the right answer."""
    judge, found = rlox.RewardModel.from_checkpoint(folder / "reward_model.safetensors", device="cpu"), {}
    for name, cls in POLICIES.items():
        policy = cls.from_checkpoint(folder / f"{name}.safetensors", device="cpu")
        drawn = pipeline.complete(policy, held_out, 10, 1.0, seed=1)
        wrong = [(row, text) for row, texts in zip(held_out, drawn, strict=True) for text in texts
                 if text not in (row["completion"], "")]  # fmt: skip
        prompts = [row["prompt"] for row, _ in wrong]
        theirs = judge.score_batch(prompts, [text for _, text in wrong])
        right = judge.score_batch(prompts, [row["completion"] for row, _ in wrong])
        found[name] = {"wrong": len(wrong), "preferred": float((theirs > right).mean()) if wrong else None}
    return found


def children_s():
    """Return the CPU seconds of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(seed, folder):
    """Return the results of the example's script for `seed`, run in `folder`."""
    if not (folder / "measured.json").is_file():
        began, cpu = time.perf_counter(), children_s()
        words = [sys.executable, EXAMPLES / "post_training_pipeline.py", "--seed", str(seed), "--out", folder]
        subprocess.run(words, env=environment(1), check=True)
        found = json.loads((folder / "scores.json").read_text())
        found |= {"cpu_s": round(children_s() - cpu, 1), "wall_s": round(time.perf_counter() - began, 1)}
        found["judge_fooled"] = wrongly_preferred(folder, pipeline.sums(seed)[0])
        (folder / "measured.json").write_text(json.dumps(found))
    return json.loads((folder / "measured.json").read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[100, 101, 102, 103, 104])
    parser.add_argument("--runs", type=Path, default=Path("outputs/pipeline"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = [measure(seed, args.runs / f"seed-{seed}") for seed in args.seeds]
    mean = {
        stage: {name: round(statistics.mean(run["scores"][stage][name] for run in runs), 4) for name in scores}
        for stage, scores in runs[0]["scores"].items()
    }
    print(json.dumps(mean, indent=1))
    if args.out:
        versions = {"rlox": rlox.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
        head = provenance(f"python benchmarks/llm/pipeline.py --seeds {' '.join(map(str, args.seeds))}")
        args.out.write_text(json.dumps({**head, "versions": versions, "mean": mean, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
