"""What a training spends on the GPU's host: kernel launches, copies and synchronisations, counted on the pretended GPU.

The limits are in ``tests/gpu/budgets.json``. This program prints what is spent now:

    python tests/helpers/device_budgets.py [--write] [algorithm ...]

With ``--write``, it becomes the limit. A replay of a CUDA graph counts as one launch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import warnings
from collections import Counter
from pathlib import Path
from unittest import mock

from device_counts import count_work
from small_algorithms import LANGUAGE, OFFLINE, ONLINE, learner, make, of_sequences, off_policy

from rlox import preset
from rlox.callbacks import Callback
from rlox.gpu.numerics import DETERMINISTIC_WORKSPACES, WORKSPACE, set_numerics

LIMITS = Path(__file__).parents[1] / "gpu/budgets.json"
KINDS = ("launch", "h2d", "d2h", "sync")


# Rounds before the first that is counted: graphs are captured in them.
WARM_UP, COUNTED = 8, 5
N_AVERAGED = 4
N_TOKENS, LEAST_TOKENS = 48, 16  # of a completion; `auto` takes a static cache for at least as many
N_ENVS, N_STEPS, BATCH = 4, 16, 32  # a rollout is two minibatches


class Laps(Callback):
    """Counts work between the events of a training: the ends of collections, and reports."""

    def __init__(self, counter, n_rounds):
        self._counter, self._last, self._n_rounds = counter, Counter(), n_rounds
        self.laps = {"collected": [], "reported": []}

    def _end_lap(self, event):
        self.laps[event].append({kind: self._counter[kind] - self._last[kind] for kind in KINDS})
        self._last = Counter(self._counter)

    def on_rollout_end(self, **info):
        self._end_lap("collected")

    def on_step(self, **info):
        self._end_lap("reported")
        return len(self.laps["reported"]) < self._n_rounds

    def usual(self, event):
        """The median of the last laps that ended with `event`, by kind of work."""
        laps = self.laps[event][WARM_UP : WARM_UP + COUNTED]
        return {kind: statistics.median_low(lap[kind] for lap in laps) for kind in KINDS}


def spent_on_policy(name, settings):
    """Work of one rollout of `N_STEPS` vector steps, and of one update of one epoch, metrics included."""
    with count_work() as counter:
        laps = Laps(counter, WARM_UP + COUNTED)
        epochs = {"n_epochs": 1, "batch_size": BATCH} if name in ("ppo", "mappo", "appo") else {}
        sizes = {"n_envs": N_ENVS, "on": {"n_steps": N_STEPS}}
        algorithm = make(name, device="cuda", callbacks=[laps], **sizes, **epochs, **settings)
        algorithm.train((WARM_UP + COUNTED) * N_ENVS * N_STEPS)
    return {"collection": laps.usual("collected"), "update": laps.usual("reported")}


def spent_on_replay(name, settings):
    """Work of one vector step, and of one update: the difference of rounds with one and with two updates."""
    rounds = []
    for n in (1, 2):
        with count_work() as counter:
            laps = Laps(counter, 1)
            off = {"learning_starts": 32, "train_freq": N_ENVS, "gradient_steps": n}
            if of_sequences(name):
                off = {"learning_starts": 32, "replay_ratio": 4.0 * n}
            kind = {"precision": "float32", **settings} if of_sequences(name) else settings
            algorithm = make(name, device="cuda", n_envs=N_ENVS, off=off, callbacks=[laps], **kind)
            algorithm.train(10_000)  # until the first report, after one in a hundred
        # A lap is an update and the collection after it; TD3 updates its policy in every second one.
        ends = laps.laps["collected"][-N_AVERAGED - 1 : -1]
        rounds.append({kind: statistics.fmean(lap[kind] for lap in ends) for kind in KINDS})
    update = {kind: round(rounds[1][kind] - rounds[0][kind], 1) for kind in KINDS}
    return {"collection": {kind: round(rounds[0][kind] - update[kind], 1) for kind in KINDS}, "update": update}


def spent_offline(name, settings):
    """Work of one update on a dataset."""
    with count_work() as counter:
        laps = Laps(counter, 2)
        algorithm = learner(name, device="cuda", callbacks=[laps], **settings)
        algorithm.train(2000)  # until the second report; there is one after every 20 updates
    return {"update": {kind: round(laps.laps["reported"][1][kind] / 20, 1) for kind in KINDS}}


def spent_on_text(name, settings):
    """Work of one update of a language model, with the four tokens of each completion that it samples."""
    import small_language_models

    with count_work() as counter:
        laps = Laps(counter, 3)
        settings = {"precision": "float32", **settings}
        small_language_models.make(name, callbacks=[laps], **settings).train(n_updates=3)
    return {"update": laps.laps["reported"][-1]}


def spent_on_tokens(cache):
    """Work of one token of all completions that are sampled together, prompts and capture included."""
    import toy

    from rlox.llm.models.language import LanguageModel
    from rlox.llm.sampling import Settings, sample

    # No completion ends, but whether one has is asked.
    model = LanguageModel(toy.model("qwen2").to("cuda"), toy.tokenizer(), [toy.VOCABULARY])
    model.sample_cache = cache
    for n in (LEAST_TOKENS if cache == "auto" else 1, N_TOKENS):  # the first sample also tries the cache
        with count_work() as counter:
            sample(model, [[2, 3, 4], [5]], Settings(n), n=3)
    return {kind: round(counter[kind] / N_TOKENS, 2) for kind in KINDS}


def spent(name):
    """Return the work of the parts of a training, by part and kind."""
    base, _, kind = name.partition("-")
    settings, deterministic = KINDS_OF_TRAINING[kind], kind.endswith("deterministic")
    workspace = {WORKSPACE: DETERMINISTIC_WORKSPACES[0]} if deterministic else {}
    with (
        warnings.catch_warnings(),
        mock.patch.dict(os.environ, workspace),
        set_numerics("highest", deterministic),
    ):
        warnings.simplefilter("ignore", RuntimeWarning)  # more is planned than trained
        if base in OFFLINE:
            return spent_offline(base, settings)
        if base == SAMPLING:
            return {f"{cache}_cache": spent_on_tokens(cache) for cache in ("auto", "dynamic")}
        if base in LANGUAGE:
            return spent_on_text(base, settings)
        return (spent_on_replay if off_policy(base) else spent_on_policy)(base, settings)


# Settings by what follows the name of an algorithm.
PURSUIT = {"env": "GridPursuit-v0"}
KINDS_OF_TRAINING = {
    "": {},
    "bfloat16": {"precision": "bfloat16"},
    "deterministic": {},
    "host": {"env_backend": "gymnasium"},
    "agents": PURSUIT,
    "agents-value-norm": {**PURSUIT, "value_norm": True, "share_parameters": False},
    "agents-bfloat16": {**PURSUIT, "precision": "bfloat16"},
    "agents-deterministic": PURSUIT,
    "crossq": preset("crossq"),
    "xqc": preset("xqc"),
}
OTHERS = [
    *("mappo-host", "mappo-agents", "mappo-agents-value-norm", "mappo-agents-bfloat16", "mappo-agents-deterministic"),
    *(f"{name}-bfloat16" for name in ("appo", "dqn", "ppo", "sac")),
    *(f"{name}-deterministic" for name in ("dqn", "ppo", "sac", "iql")),
    *("sac-crossq", "sac-xqc"),
]
SAMPLING = "sampling"
NAMES = [*ONLINE, *OFFLINE, *LANGUAGE, *OTHERS, SAMPLING]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("algorithms", nargs="*", default=NAMES, metavar="algorithm")
    parser.add_argument("--write", action="store_true", help="write it to budgets.json")
    words = parser.parse_args()
    import pretend_cuda

    pretend_cuda.install()
    limits = json.loads(LIMITS.read_text()) if LIMITS.exists() else {}
    print(f"{'':39s}{''.join(f'{kind:>9s}' for kind in KINDS)}")
    for name in words.algorithms:
        parts = spent(name)
        for part, work in parts.items():
            print(f"{name:26s}{part:13s}" + "".join(f"{work[kind]:9g}" for kind in KINDS), flush=True)
        limits[name] = parts
    if words.write:
        rows = ",\n".join(
            f"  {json.dumps(name)}: {{\n"
            + ",\n".join(f"    {json.dumps(part)}: {json.dumps(work)}" for part, work in limits[name].items())
            + "\n  }"
            for name in NAMES
            if name in limits
        )
        LIMITS.write_text(f"{{\n{rows}\n}}\n")


if __name__ == "__main__":
    main()
