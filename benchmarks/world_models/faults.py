"""Does `rlox bench learn` find faults planted in DreamerV3? It compares short runs with runs of the sound code.

    python benchmarks/world_models/faults.py --runs outputs/faults

This trains 20 seeds of the sound code on CartPole-v1 (1,500 steps, 500 updates), then 5 other seeds of it and 5 with
each fault, lets the command judge these against the twenty, and writes benchmarks/world_models/faults.json. A fault is
planted into the imported classes, in a separate process; the library contains none of it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from rlox.algorithms.dreamer import DreamerV3
from rlox.checkpoint import versions
from rlox.world_models.rssm import RSSM
from rlox_cli.bench.machine import provenance

TASK = [
    *("algo=dreamer", "env=CartPole-v1", "total_timesteps=1500"),
    *("algo.learning_starts=500", "algo.ent_coef=3e-4", "eval.n_points=1"),
]
N_SOUND, N_JUDGED = 20, 5
SOUND_SEED, JUDGED_SEED = 1000, 2000


def latent_not_reset() -> None:
    """Keep the state and the action of the previous episode where an episode starts within a sequence."""
    original = RSSM.observe

    def observe(self, tokens, actions, is_first, start, uniform):
        return original(self, tokens, actions, torch.zeros_like(is_first), start, uniform)

    RSSM.observe = observe


def kl_not_stopped() -> None:
    """Let both halves of the KL train both the prior and the posterior."""

    def kl(self, deter, post_logits, free_nats):
        prior, post = self.mixed(self.prior(deter)), self.mixed(post_logits)
        log_prior, log_post = prior.log(), post.log()
        both = (post * (log_post - log_prior)).sum((-2, -1)).clamp(min=free_nats)
        entropies = [-(p * log_p).sum((-2, -1)).detach() for p, log_p in ((prior, log_prior), (post, log_post))]
        return both, both, *entropies

    RSSM.kl = kl


def wrong_discount() -> None:
    """Let the update discount by 0.99 instead of the configured 0.997."""
    original = DreamerV3.update

    def update(self, batch):
        asked = self.config
        self.config = replace(asked, gamma=0.99)
        try:
            return original(self, batch)
        finally:
            self.config = asked

    DreamerV3.update = update


FAULTS: dict[str, Callable[[], None]] = {
    "nothing": lambda: None,
    "latent not reset": latent_not_reset,
    "KL not stopped": kl_not_stopped,
    "wrong discount": wrong_discount,
}


def learn(fault: str, runs: Path, first_seed: int, n_seeds: int, *more: str) -> dict:
    """Return the command's result with a planted fault, from a separate process."""
    words = ["bench", "learn", *TASK, "--seeds", str(n_seeds), "--first-seed", str(first_seed), "--json"]
    words += ["--runs", str(runs / fault.replace(" ", "-")), *more]
    done = subprocess.run(
        [sys.executable, __file__, "--child", fault, *words], check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout)


def child(fault: str, words: list[str]) -> None:
    """Plant the fault, run the command, print its result."""
    from rlox_cli.main import app

    FAULTS[fault]()
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        app(words, standalone_mode=False)
    if not out.getvalue():
        raise RuntimeError(error.getvalue())
    print(out.getvalue())


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="run folders; finished ones are kept")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("faults.json"))
    given = parser.parse_args()
    sound = given.runs / "sound"
    learn("nothing", given.runs, SOUND_SEED, N_SOUND, "--score-only", "--out", str(sound))
    found = {}
    for fault in FAULTS:
        result = learn(fault, given.runs, JUDGED_SEED, N_JUDGED, "--against", str(sound / "learn.json"))
        (cell,) = result["cells"].values()
        found[fault] = {"verdict": cell["verdict"], "fingerprint": cell["fingerprint"]}
        print(f"{fault}: {cell['verdict']}", flush=True)
    result = {
        **provenance("python benchmarks/world_models/faults.py"), "versions": versions(), "task": TASK,
        "n_sound": N_SOUND, "n_judged": N_JUDGED, "faults": found,
    }  # fmt: skip
    given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
