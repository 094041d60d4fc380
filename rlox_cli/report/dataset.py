"""Describe the contents of a dataset."""

from __future__ import annotations

import json
import re
import shlex

import numpy as np
import yaml
from hydra.core.override_parser.types import Quote, QuotedString
from rich.console import Console

from rlox.checkpoint import one_line
from rlox.envs.registry import find_module
from rlox.kernels.buffers.offline import OfflineDatasetBuffer
from rlox.offline.dataset import open_dataset
from rlox.offline.returns import episode_starts
from rlox.offline.scores import normalized_score
from rlox_cli.families.offline import format_returns
from rlox_cli.terminal.console import TextConsole

_MOST_AGENTS = 20  # maximum number of agents with a line of their own


def print_dataset(dataset: OfflineDatasetBuffer, console: Console) -> None:
    """Print what a dataset contains and where it comes from."""
    stats, known = dataset.stats(), dataset.metadata
    actions = f"{dataset.act_dim} floats" if dataset.n_actions is None else f"one of {dataset.n_actions}"
    actions += ", with masks of those that are legal" * dataset.masked
    shape = " x ".join(map(str, dataset.obs_shape))
    ends = f"{stats['n_terminated']:,} terminated, {stats['n_truncated']:,} truncated"
    lengths = f"{stats['mean_episode_length']:.1f} ({stats['min_episode_length']} to {stats['max_episode_length']})"
    lines = [
        ("rows", f"{stats['n_transitions']:,}"),
        ("episodes", f"{stats['n_episodes']:,} ({ends}{', the last unfinished' if stats['unfinished'] else ''})"),
        ("length", lengths),
        ("return", format_returns(stats, known)),
        ("obs", f"{shape} {'bytes' if dataset.sample(1, 0)['obs'].dtype == np.uint8 else 'floats'}"),
        ("actions", actions),
    ]
    lines[4:4] = [("agent", line) for line in _lives(dataset)]
    env = known.get("env", {})
    if env:
        lines.append(
            ("env", " ".join([env["id"], *(json.dumps(env[key]) for key in ("kwargs", "wrappers") if env.get(key))]))
        )
    score = normalized_score(env.get("id", ""), stats["mean_return"], known)
    if score is not None:
        lines.append(("score", f"{score:.1f} (0: random, 100: expert)"))
    for policy in known.get("policies", ()):
        details = [f"{policy['n_steps']:,} steps"] if "n_steps" in policy else []
        if "mean_return" in policy:
            details.append(f"{policy['n_episodes']} whole episodes, return {policy['mean_return']:.2f}")
        details += [f"{key} {str(policy[key])[:12]}" for key in ("algorithm", "trained_for", "sha256") if key in policy]
        lines.append(("policy", f"{policy['name']}: {', '.join(details)}"))
    if known.get("n_dropped"):
        lines.append(("dropped", f"{known['n_dropped']:,} rows whose next observation is unknown"))
    if known.get("file") not in (None, known.get("source")):
        lines.append(("mapped from", known["file"]))
    for name, value in lines:
        console.print(f"  {name:<12} {value}")


def _lives(dataset: OfflineDatasetBuffer) -> list[str]:
    """Return a line for each agent with its number of episodes and its mean return.

    If the file does not record which agent an episode belongs to, return the names of the agents, if there are any.
    """
    known = dataset.metadata
    if "episode_agents" not in known:
        return [", ".join(one_line(name, 60) for name in known["agents"])] if "agents" in known else []
    state = dataset.get_state()
    returns = np.add.reduceat(
        state["rewards"], episode_starts(state["terminated"], state["truncated"]), dtype=np.float64
    )
    whose = np.array(known["episode_agents"])
    there = [name for name in known["agents"] if (whose == name).any()]
    lines = [
        f"{one_line(name, 60)}: {int((whose == name).sum()):,} episodes, return {returns[whose == name].mean():.2f}"
        for name in there[:_MOST_AGENTS]
    ]
    return lines if len(there) <= _MOST_AGENTS else [*lines, f"and {len(there) - _MOST_AGENTS:,} others"]


def print_written(out: str) -> None:
    """Print what was written to the file, or under the id, `out`, and how to train on it."""
    console, dataset = TextConsole(), open_dataset(out)
    console.print(f"written: {out}")
    print_dataset(dataset, console)
    algo, env = "td3_bc" if dataset.n_actions is None else "bc", dataset.metadata.get("env", {})
    # Hydra reads other characters only in quotes.
    source = out if re.fullmatch(r"[\w./:+@-]+", out, re.ASCII) else QuotedString(out, Quote.single).with_quotes()
    words = ["rlox", "train", f"algo={algo}", f"dataset={source}"]
    # These must be typed again, since a file must not choose them.
    if env and (env.get("kwargs") or find_module(env["id"])) and not env.get("wrappers"):
        words.append(f"env={env['id']}")
        if env.get("kwargs"):
            kwargs = yaml.safe_dump(env["kwargs"], default_flow_style=True, width=10_000).strip()
            words.append(f"env.kwargs={kwargs}")
    console.print(f"  {'train':<12} {shlex.join(words)}")
