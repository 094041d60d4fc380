"""``rlox ls`` and ``rlox show``: what there is and what it means, read from the code that uses it."""

from __future__ import annotations

import inspect
import io
import json
import sys
import tokenize
import typing
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.console import Console

from rlox import config as configs
from rlox.algorithms import ALGORITHMS, resolve
from rlox.buffers import buffer_class, buffer_config_class, buffer_names
from rlox.config import nearest, tuned, tuned_pairs
from rlox.kernels.buffers.offline import OfflineDatasetBuffer
from rlox.offline.dataset import open_dataset
from rlox.offline.scores import normalized_score
from rlox_cli.cp import shipped
from rlox_cli.terminal import PlainTable, make_console, make_table, print_table

_SECTIONS = {
    "env": configs.EnvConfig,
    "buffer": configs.BufferConfig,
    "dataset": configs.DatasetConfig,
    "eval": configs.EvalConfig,
    "checkpoint": configs.CheckpointConfig,
    "logger.mlflow": configs.MlflowConfig,
    "logger.wandb": configs.WandbConfig,
    "logger.tensorboard": configs.TensorboardConfig,
    "logger.csv": configs.CsvConfig,
}
# What is typed like a key of a run, and is none.
_COMMAND_KEYS = {
    "resume": "the run to go on with: its folder, or a checkpoint in it",
    "output_dir": "the run's folder; with -m, the folder of all its runs; by default a new one under outputs/",
}
_THINGS = ("algos", "buffers", "envs", "experiments", "tuned", "runs", "sweeps")


def comments(cls: type) -> dict[str, str]:
    """The trailing comment of every field, from the sources of `cls` and its bases."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not is_dataclass(base):
            continue
        name = None
        for token in tokenize.generate_tokens(io.StringIO(inspect.getsource(base)).readline):
            if token.type == tokenize.NAME and token.start[1] == 4:
                name = token.string
            elif token.type == tokenize.COMMENT and name:
                found[name] = token.string.lstrip("# ")
    return found


def _default(item) -> Any:
    return item.default_factory() if item.default_factory is not MISSING else item.default


def _plain(value: Any) -> str:
    return "required" if value is MISSING else json.dumps(value) if not isinstance(value, str) else value


def _table(cls: type, prefix: str, tuned_values: dict[str, Any] | None = None) -> PlainTable:
    searched = any("search" in item.metadata for item in fields(cls))
    columns = [
        "key",
        "type",
        "default",
        *(["tuned"] if tuned_values is not None else []),
        *(["search"] if searched else []),
        "meaning",
    ]
    table = make_table(*columns)
    hints, meaning = typing.get_type_hints(cls), comments(cls)
    for item in fields(cls):
        default = _default(item)
        if item.name == "_target_" or is_dataclass(default) or hints[item.name] in (Any, configs.LoggerConfig):
            continue
        kind = hints[item.name]
        kind_name = kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)
        row = [
            prefix + item.name,
            kind_name.replace("typing.", "").replace("None", "null"),
            _plain(default),
        ]
        if tuned_values is not None:
            row.append(_plain(tuned_values[item.name]) if item.name in tuned_values else "")
        if searched:
            row.append(item.metadata.get("search", ""))
        table.add_row(*row, meaning.get(item.name, ""))
    return table


def show_keys(topics: list[str]) -> None:
    """Print tables for the topics; all of the root's sections where none is given."""
    console = make_console()
    algo = env = None
    sections = []
    for topic in topics:
        if topic.startswith("algo="):
            algo = topic[5:]
            if algo not in ALGORITHMS:
                raise ValueError(f"algo={algo} does not exist; {nearest(algo, ALGORITHMS)}")
        elif topic.startswith("env="):
            env = topic[4:]
        elif topic.startswith("buffer="):
            cls = buffer_config_class(topic[7:])
            console.print(f"{topic}: {inspect.getdoc(cls)}")
            print_table(console, _table(cls, "buffer."))
        elif topic == "hydra.sweeper":
            from rlox_cli.sweep.search import OptunaConfig  # it takes Hydra, which nothing else here does

            console.print(f"{topic}: {inspect.getdoc(OptunaConfig)}")
            print_table(console, _table(OptunaConfig, f"{topic}."))
        elif topic.startswith("dataset="):
            console.print(topic, markup=False)
            print_dataset(open_dataset(topic[8:]), console)
        elif topic in _SECTIONS:
            sections.append(topic)
        else:
            raise ValueError(
                "topic must be algo=NAME, env=ID, buffer=NAME, dataset=SOURCE or a section, got "
                f"{topic!r}; {nearest(topic, _SECTIONS)}"
            )
    if not topics:
        table = _table(configs.RunConfig, "")
        for key, meaning in _COMMAND_KEYS.items():
            table.add_row(key, "str", "", meaning)
        print_table(console, table)
        sections = list(_SECTIONS)
    for section in sections:
        console.print(f"\n{section}: {inspect.getdoc(_SECTIONS[section])}")
        print_table(console, _table(_SECTIONS[section], f"{section}."))
    if env is not None and algo is None:
        algo = "ppo"
    if algo is not None:
        values = None
        if env is not None:
            settings = tuned(algo, env)
            values = settings.get("algo", {})
            rest = {key: value for key, value in settings.items() if key != "algo"}
        cls = resolve(ALGORITHMS[algo].config)
        console.print(f"{algo}: {inspect.getdoc(cls)}")
        print_table(console, _table(cls, "algo.", values))
        if values is not None:
            console.print(
                f"\nalso tuned: {yaml.safe_dump(rest, default_flow_style=True, width=200, allow_unicode=True).strip()}",
            )


def print_dataset(dataset: OfflineDatasetBuffer, console: Console) -> None:
    """What a dataset holds and where it comes from."""
    stats, known = dataset.stats(), dataset.metadata
    actions = f"{dataset.act_dim} floats" if dataset.n_actions is None else f"one of {dataset.n_actions}"
    shape = " x ".join(map(str, dataset.obs_shape))
    ends = f"{stats['n_terminated']:,} terminated, {stats['n_truncated']:,} truncated"
    lengths = f"{stats['mean_episode_length']:.1f} ({stats['min_episode_length']} to {stats['max_episode_length']})"
    spread = f"{stats['mean_return']:.2f} ± {stats['std_return']:.2f} ({stats['min_return']:.2f} to "
    lines = [
        ("rows", f"{stats['n_transitions']:,}"),
        ("episodes", f"{stats['n_episodes']:,} ({ends}{', the last unfinished' if stats['unfinished'] else ''})"),
        ("length", lengths),
        ("return", f"{spread}{stats['max_return']:.2f})"),
        ("obs", f"{shape} {'bytes' if dataset.sample(1, 0)['obs'].dtype == np.uint8 else 'floats'}"),
        ("actions", actions),
    ]
    env = known.get("env", {})
    if env:
        lines.append(
            ("env", " ".join([env["id"], *(json.dumps(env[key]) for key in ("kwargs", "wrappers") if env.get(key))]))
        )
    score = normalized_score(env.get("id", ""), stats["mean_return"], known)
    if score is not None:
        lines.append(("score", f"{score:.1f} (0: random, 100: expert)"))
    for policy in known.get("policies", ()):
        told = [f"{policy['n_steps']:,} steps"] if "n_steps" in policy else []
        if "mean_return" in policy:
            told.append(f"{policy['n_episodes']} whole episodes, return {policy['mean_return']:.2f}")
        told += [f"{key} {str(policy[key])[:12]}" for key in ("algorithm", "trained_for", "sha256") if key in policy]
        lines.append(("policy", f"{policy['name']}: {', '.join(told)}"))
    if known.get("n_dropped"):
        lines.append(("dropped", f"{known['n_dropped']:,} rows whose next observation is not known"))
    if known.get("file") not in (None, known.get("source")):
        lines.append(("mapped from", known["file"]))
    for name, value in lines:
        console.print(f"  {name:<12} {value}", soft_wrap=True, markup=False)


def list_things(what: str, folder: Path) -> None:
    """Print one of the lists."""
    console = make_console()
    if what == "algos":
        table = make_table("algo", "what")
        for name, entry in ALGORITHMS.items():
            table.add_row(name, inspect.getdoc(resolve(entry.config)).splitlines()[0])
        print_table(console, table)
    elif what == "buffers":
        table = make_table("buffer", "what")
        for name in buffer_names():
            cls = buffer_config_class(name)
            told = inspect.getdoc(buffer_class(name) if cls is configs.OutsideBufferConfig else cls) or ""
            table.add_row(name, told.partition("\n")[0])
        print_table(console, table)
    elif what == "envs":
        _list_envs(console)
    elif what == "tuned":
        table = make_table("settings", "steps", "must reach")
        for algo, env in tuned_pairs():
            settings = tuned(algo, env)
            reference = (settings.get("reference") or {}).get("mean_return")
            must_reach = "" if reference is None else f"{reference:g}"
            table.add_row(f"algo={algo} env={env}", f"{settings['total_timesteps']:,}", must_reach)
        print_table(console, table)
    elif what == "experiments":
        table = make_table("preset", "what")
        for name, text in shipped("experiment").items():
            table.add_row(f"experiment={name}", text.splitlines()[1].lstrip("# "))
        print_table(console, table)
    elif what == "runs":
        _list_runs(folder, console)
    elif what == "sweeps":
        _list_sweeps(folder, console)
    else:
        raise ValueError(f"the list must be known, got {what!r}; {nearest(what, _THINGS)}")


def _list_envs(console: Console) -> None:
    import gymnasium

    from rlox.envs import native_env_ids, origin
    from rlox.envs.registry import ENV_GROUP, offers
    from rlox.kernels.envs import NATIVE_ENVS

    console.print("native (compiled, same dynamics as gymnasium's):")
    for name in NATIVE_ENVS:
        console.print(f"  {name}")
    native = native_env_ids()
    outside = [name for name in native if name not in NATIVE_ENVS]
    if outside:
        console.print("native, from other packages:")
        for name in outside:
            offer = offers(ENV_GROUP).get(name)
            console.print(f"  {name} ({offer.module if offer else origin(name)})")
    groups: dict[str, list[str]] = {}
    for name, spec in gymnasium.registry.items():
        entry = spec.entry_point if isinstance(spec.entry_point, str) else "other"
        group = entry.removeprefix("gymnasium.envs.").split(".")[0].split(":")[0]
        if name not in native and not name.startswith("rlox/"):
            groups.setdefault(group, []).append(name)
    console.print("gymnasium's (one process, one core):")
    for group, names in sorted(groups.items()):
        console.print(f"  {group}: {', '.join(sorted(names))}")


def _list_sweeps(folder: Path, console: Console) -> None:
    from rlox_cli.runner import shown
    from rlox_cli.sweep.ledger import FILE, Sweep
    from rlox_cli.sweep.show import summary

    table = make_table("sweep", "jobs", "typed")
    for path in sorted(folder.rglob(FILE), key=lambda path: path.stat().st_mtime):
        try:
            sweep = Sweep.read(path.parent)
        except ValueError as e:
            # A sweep that is damaged does not hide the others.
            print(f"rlox ls: {shown(path.parent)} is left out: {e}", file=sys.stderr)
            continue
        sweep.scan()
        table.add_row(shown(path.parent), summary(sweep), " ".join(sweep.head.overrides))
    if not table.row_count:
        raise ValueError(f"no sweeps under {folder}; `rlox train -m …` makes one, or name another folder with --folder")
    print_table(console, table)


def _list_runs(folder: Path, console: Console) -> None:
    from rlox.tracking.record import is_alive, read_rows
    from rlox.tracking.store import read_config
    from rlox_cli.runner import shown
    from rlox_cli.sync import find_runs

    runs = find_runs(folder)
    if not runs:
        raise ValueError(f"no runs under {folder}; train one, or name another folder with --folder")
    table, unfinished = make_table("run", "algo", "env", "seed", "steps", "status", "best"), False
    for run in runs:
        try:
            plain = read_config(run)
            what = [str(plain["algo"]["name"]), str(plain["env"]["id"]), str(plain["seed"])]
        except (ValueError, LookupError, TypeError) as e:
            # A run that is damaged does not hide the others.
            print(f"rlox ls: {shown(run)} is left out: {e}", file=sys.stderr)
            continue
        alive = is_alive(run)
        steps, status, best = 0, "running" if alive else "killed", None
        for row, _ in read_rows(run / "metrics.jsonl"):
            event = row.get("event")
            # A checkpoint is noted when it is on the disk, which may be later.
            steps = steps if event == "checkpoint" else row["step"]
            if event in ("start", "end") and not alive:
                status = row.get("status", "killed")
            if (score := row.get("eval/mean_return")) is not None:
                best = score if best is None else max(best, score)
        shown_best = "" if best is None else f"{best:.1f}"
        table.add_row(
            shown(run),
            *what,
            f"{steps:,}",
            status,
            shown_best,
        )
        unfinished |= status in ("killed", "interrupted", "failed")
    print_table(console, table)
    if unfinished:
        console.print("what was stopped goes on by: rlox train resume=RUN")
