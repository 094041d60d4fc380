"""The settings of ``hydra/sweeper=optuna`` and the range of every key that it searches, read without Optuna."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from rlox.checkpoint import decode_value, encode_value, run_files
from rlox.config import Config, nearest
from rlox.config.sqlite import names_file, sqlite_file, sqlite_uri
from rlox_cli.terminal.errors import UsageError
from rlox_cli.terminal.paths import output_path, shown

FILE = "search.json"
OBJECTIVES = ("final", "best")
PRUNERS = ("median", "hyperband", "none")
_MOST_BYTES = 1 << 20  # of the file
# Sections in which trials may differ; any other difference would make their values incomparable.
_SECTIONS = ("algo", "buffer", "env")


@dataclass
class OptunaConfig(Config):
    """A hyper-parameter search with Optuna: rlox train -m hydra/sweeper=optuna …"""

    n_trials: int = 20  # total number of trials, including failed ones and those that the study already has
    n_jobs: int = 1  # trials that the launcher is given at once
    n_seeds: int = 1  # runs per trial, with the seeds seed, seed + 1, ...; the trial's value is their mean
    search: list[str] | None = None  # fields to search in their own ranges, or all; null: all, unless ranges are typed
    params: dict[str, Any] | None = None  # ranges in Hydra's grammar by key, for a YAML file; typed ones override them
    objective: str = "final"  # the mean return to maximise: of the final evaluation, or of the best
    pruner: str = "median"  # what stops poor trials early: median (of five or more finished trials), hyperband or none
    n_startup_trials: int = 10  # random trials before the sampler learns from them
    seed: int = 0  # of the sampler; trials that run one after another are the same for the same seed
    retries: int = 2  # how often in a row a run that died without progress is tried again
    storage: str | None = None  # where the study is stored, as sqlite:///FILE; null: study.db in the sweep's folder
    study: str = "rlox"  # name of the study in its storage

    def rules(self):
        for name in ("n_trials", "n_jobs", "n_seeds"):
            yield name, getattr(self, name) >= 1, "be >= 1"
        for name in ("n_startup_trials", "retries"):
            yield name, getattr(self, name) >= 0, "be >= 0"
        yield "objective", self.objective in OBJECTIVES, f"be one of {', '.join(OBJECTIVES)}"
        yield "pruner", self.pruner in PRUNERS, f"be one of {', '.join(PRUNERS)}"
        yield "seed", 0 <= self.seed < 2**63, "be in [0, 2**63)"
        yield "storage", self.storage is None or names_file(self.storage), "be sqlite:///FILE, or null"
        yield "study", bool(self.study), "not be empty"


def optuna_config(cfg: DictConfig) -> OptunaConfig:
    """Return the sweeper's settings from a composed configuration, with every rule checked."""
    try:
        settings = OptunaConfig.from_kwargs("hydra.sweeper", **OmegaConf.to_container(cfg.hydra.sweeper))
        if settings.storage is None:
            return settings
        # Absolute, because a later process may have another working directory.
        file = output_path("hydra.sweeper.storage", sqlite_file(settings.storage), probe=False)
        return replace(settings, storage=sqlite_uri(file.absolute()))
    except (ValueError, TypeError) as e:
        raise UsageError(str(e).replace("OptunaConfig: ", "hydra.sweeper.")) from e


def count_values(line: str, sweep: RangeSweep) -> int:
    """Return how many numbers a range has, without listing them. `line` is the override as typed, for errors.

    Raises
    ------
    UsageError
        If the range has no numbers, or no end.
    """
    numbers = (sweep.start, sweep.stop, sweep.step)
    if not all(map(math.isfinite, numbers)):
        raise UsageError(f"{line} must have finite numbers as its ends and its step")
    start, stop, step = (Fraction(str(number)) for number in numbers)  # as typed: 0.4 is 4 times 0.1
    if not step:
        raise UsageError(f"{line} must have a step that is not 0")
    n = math.ceil((stop - start) / step)
    if n < 1:
        raise UsageError(f"{line} must contain a number, got an empty range: range(START,STOP) ends before STOP")
    return n


def number_at(sweep: RangeSweep, i: int) -> int | float:
    """Return number `i` of a range as it would be typed: 0.3 and not 0.30000000000000004."""
    if all(isinstance(number, int) for number in (sweep.start, sweep.stop, sweep.step)):
        return sweep.start + i * sweep.step
    return float(Decimal(str(sweep.start)) + i * Decimal(str(sweep.step)))


@dataclass(frozen=True)
class Space:
    """The range of one key: strings to choose from, or numbers from `low` to `high`, both included.

    Attributes
    ----------
    text : str
        The range as it is typed, in Hydra's grammar.
    step : int or float, optional
        Distance between the numbers; None: all floats in between (ints: 1).
    log : bool
        Whether numbers are drawn uniformly on a logarithmic scale.
    """

    key: str
    text: str
    choices: tuple[str, ...] = ()
    low: float = 0
    high: float = 0
    step: float | None = None
    log: bool = False

    def ends(self) -> tuple[Any, ...]:
        """Return every choice, or the lowest and the highest number."""
        return self.choices or (self.low, self.high)

    def suggest(self, trial) -> Any:
        """Return the value of this key in an Optuna trial."""
        if self.choices:
            return trial.suggest_categorical(self.key, self.choices)
        if isinstance(self.low, int) and isinstance(self.high, int):
            return trial.suggest_int(self.key, self.low, self.high, step=self.step or 1, log=self.log)
        return trial.suggest_float(self.key, self.low, self.high, step=self.step, log=self.log)


@dataclass(frozen=True)
class Search:
    """A search: the overrides of every trial, and the ranges of the keys in which trials differ.

    `links` are the values that refer to searched keys, such as ``${.n_steps}``, by the key that has them.
    """

    settings: OptunaConfig
    fixed: list[str]
    spaces: list[Space]
    links: dict[str, str] = field(default_factory=dict)

    def overrides(self, values: dict[str, Any], seed: int | None = None) -> list[str]:
        """Return the overrides of a trial with these `values`, as they are typed; a `seed` replaces the typed one."""
        chosen = [f"{space.key}={values[space.key]}" for space in self.spaces]
        # kwargs may have any key, but in Hydra's strict mode each key would be unknown.
        lines = [*self.fixed, *(f"++{line}" if ".kwargs." in line else line for line in chosen)]
        return lines if seed is None else [*(line for line in lines if not line.startswith("seed=")), f"seed={seed}"]

    def _corners(self) -> list[tuple[dict[str, Any], int]]:
        """Return the values and the run's number of each of the `corners`."""
        n = max(len(space.ends()) for space in self.spaces)
        values = [{s.key: s.ends()[i % len(s.ends())] for s in self.spaces} for i in range(n)]
        return [*((each, 0) for each in values), *([(values[0], 1)] if self.settings.n_seeds > 1 else [])]

    def corners(self, seed: int) -> list[list[str]]:
        """Return the overrides of a few jobs that cover every choice and both ends of every range.

        If trials have several runs, the last job has another seed than `seed`, which the others have.
        """
        return [self.overrides(values, seed + run if run else None) for values, run in self._corners()]

    def require_independent(self, configs: list[dict[str, Any]], cfg: DictConfig) -> None:
        """Raise a UsageError if `configured` would miss a change: a key that refers to another one, which differs, but
        is not one of the `links`.

        Parameters
        ----------
        configs : list of dict
            The resolved configurations of the `corners`.
        cfg : DictConfig
            The configuration composed from the fixed values, where references are not resolved.
        """
        from rlox_cli.records.runs import flatten

        for (values, run), config in zip(self._corners(), configs, strict=True):
            known = dict(flatten(self.configured(configs[0], values, run)))
            for key, value in flatten(config):
                if key not in values and known.get(key) != value:
                    raise UsageError(
                        f"{key} must not depend on {'the seed' if run else 'a searched key'} in a search, got "
                        f"{dict(flatten(OmegaConf.to_container(cfg))).get(key)}; type its value, or leave it out"
                    )

    def configured(self, config: dict[str, Any], values: dict[str, Any], run: int) -> dict[str, Any]:
        """Return the resolved `config`, changed for run number `run` of a trial with these `values`."""
        config = copy.deepcopy(config)
        for override in OverridesParser.create().parse_overrides([f"{key}={value}" for key, value in values.items()]):
            *sections, name = override.key_or_group.split(".")
            inner = config
            for section in sections:
                inner = inner[section]
            inner[name] = override.value()
        config["seed"] += run
        if self.links:
            whole = OmegaConf.create(config)
            for key, text in self.links.items():
                OmegaConf.update(whole, key, text)
            config = cast(dict[str, Any], OmegaConf.to_container(whole, resolve=True))
        return config

    def write(self, folder: Path, config: dict[str, Any]) -> None:
        """Write the search, and the resolved `config` of one of its jobs, into the sweep's folder."""
        plain = {
            "settings": self.settings.to_dict(),
            "fixed": self.fixed,
            "ranges": {space.key: space.text for space in self.spaces},
            "links": self.links,
            "config": encode_value(config),
        }
        with run_files.replace_file(folder, FILE) as file:
            file.write(json.dumps(plain, indent=1).encode())

    @classmethod
    def read(cls, folder: Path) -> tuple[Search, dict[str, Any]]:
        """Read what `write` has written.

        Raises
        ------
        UsageError
            If the file does not contain it.
        """
        path = folder / FILE
        try:
            plain = json.loads(run_files.read_bytes(folder, FILE, _MOST_BYTES))
            plain["settings"].pop("_target_", None)  # of rlox before 0.8
            settings = OptunaConfig.from_kwargs("settings", **plain["settings"])
            ranges = OverridesParser.create().parse_overrides([f"{k}={v}" for k, v in plain["ranges"].items()])
            spaces = [_space(override) for override in ranges]
            search = cls(settings, list(map(str, plain["fixed"])), spaces, dict(plain.get("links", {})))
            return search, dict(decode_value(plain["config"]))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError, HydraException) as e:
            raise UsageError(f"{shown(path)} must be as `rlox train -m hydra/sweeper=optuna` wrote it: {e}") from e


def read_search(arguments: list[str], cfg: DictConfig) -> Search:
    """Split `arguments`, the overrides as typed, into fixed values and ranges to search.

    Parameters
    ----------
    arguments : list of str
        Overrides; those of Hydra itself are left out.
    cfg : DictConfig
        The configuration composed from the fixed values, including Hydra's own section.

    Raises
    ------
    UsageError
        If a name has no range, a range is invalid, a key cannot be searched, or nothing is searched.
    """
    settings = optuna_config(cfg)
    typed = [o for o in _parse(arguments) if not o.is_hydra_override()]
    fixed = {o.key_or_group: o.input_line for o in typed if not o.is_sweep_override()}
    params = _parse([f"{key}={value}" for key, value in (settings.params or {}).items()])
    filed = [o for o in params if o.key_or_group not in fixed]
    ranges = {o.key_or_group: o for o in [*filed, *(o for o in typed if o.is_sweep_override())]}
    offered = dict(_suggest_keys(cfg))
    for key in _select(settings.search, offered, fixed, bool(ranges)):
        ranges.setdefault(key, _parse([f"{key}={offered[key]}"])[0])
    if not ranges:
        raise UsageError(
            "hydra/sweeper=optuna must have something to search; try algo.learning_rate='interval(LOW,HIGH)'"
        )
    spaces = [_space(override) for override in ranges.values()]
    return Search(settings, list(fixed.values()), spaces, _links(cfg, ranges))


def _links(cfg: DictConfig, searched: Iterable[str]) -> dict[str, str]:
    """Return the values of `cfg` that refer to a searched key, by the key that has them."""
    from rlox_cli.records.runs import flatten

    names = "|".join(re.escape(key.rpartition(".")[2]) for key in searched)
    reference = re.compile(rf"\$\{{([\w.]*\.)?({names})\}}")
    values = flatten(OmegaConf.to_container(cfg))
    return {key: x for key, x in values if key.split(".")[0] in _SECTIONS and reference.search(str(x))}


def is_search(folder: Path) -> bool:
    """Return whether the sweep in `folder` is a search."""
    return run_files.is_file(folder, FILE)


def _parse(lines: list[str]) -> list[Override]:
    try:
        return OverridesParser.create().parse_overrides(lines)
    except HydraException as e:
        raise UsageError(" ".join(str(e).split())) from e


def _suggest_keys(cfg: DictConfig) -> Iterator[tuple[str, str]]:
    """Yield the ranges in the field metadata of the chosen algorithm, replay memory and environment, by key."""
    for section in _SECTIONS:
        kind = OmegaConf.get_type(cfg, section)
        if isinstance(kind, type) and issubclass(kind, Config):
            for item in fields(kind):
                if "search" in item.metadata:
                    yield f"{section}.{item.name}", item.metadata["search"]


def _select(search: list[str] | None, offered: dict[str, str], fixed: dict[str, str], has_ranges: bool) -> list[str]:
    """Return the keys whose own ranges ``hydra.sweeper.search`` requests."""
    if search == ["all"] or (search is None and not has_ranges):
        return [key for key in offered if key not in fixed]
    keys = []
    for name in search or []:
        key = name if "." in name else f"algo.{name}"
        if key not in offered:
            hint = nearest(key, offered).replace("algo.", "")
            raise UsageError(
                f"hydra.sweeper.search must name fields that have a range of their own, got {name}; {hint}; or type "
                f"one: {key}='interval(LOW,HIGH)'"
            )
        if key in fixed:
            raise UsageError(f"{fixed[key]} must not be combined with hydra.sweeper.search, which names it; omit one")
        keys.append(key)
    return keys


def _space(override: Override) -> Space:
    """Return the range that an override describes."""
    key, text, sweep = override.key_or_group, override.input_line.split("=", 1)[1], override.value()
    if key.split(".")[0] not in _SECTIONS or "." not in key or key == "env.id":
        remedy = "; for several seeds: hydra.sweeper.n_seeds=N" if key == "seed" else ""
        raise UsageError(
            f"{key} must have one value in a search: trials differ only in keys of {', '.join(_SECTIONS)}, got "
            f"{text}{remedy}"
        )
    if not override.is_sweep_override():
        raise UsageError(f"hydra.sweeper.params.{key} must be a range such as 0.9,0.99 or interval(0,1), got {text}")
    log = "log" in sweep.tags
    if isinstance(sweep, IntervalSweep):
        space = Space(key, text, (), sweep.start, sweep.end, None, log)
    elif isinstance(sweep, RangeSweep):
        if log:
            raise UsageError(f"{key} must be tag(log,interval(LOW,HIGH)), or with int(interval(…)) in it, got {text}")
        n = count_values(override.input_line, sweep)
        low, high = sorted((sweep.start, number_at(sweep, n - 1)))
        space = Space(key, text, (), low, high, abs(sweep.step))
    else:
        return Space(key, text, tuple(override.sweep_string_iterator()))
    if not space.low < space.high or (log and space.low <= 0):
        rule = "be a range from a lower number to a higher one" + (", both above 0 for tag(log, …)" if log else "")
        raise UsageError(f"{key} must {rule}, got {text}")
    return space
