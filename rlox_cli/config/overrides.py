"""Parse what was typed: flags, overrides, and forms that no run can have."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import fields
from decimal import Decimal
from functools import cache
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, OverrideType, Quote, QuotedString
from hydra.errors import HydraException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlox import config as config_module
from rlox.algorithms import ALGORITHMS, resolve
from rlox.buffers import buffer_config_class, buffer_names
from rlox.checkpoint import one_line
from rlox.config import RunConfig, nearest
from rlox.config.base import masked, types_of
from rlox.config.migration import completions
from rlox_cli.config.ranges import OptunaConfig
from rlox_cli.config.schema import LONGEST_NAME, ONE_CHOICE, SECTION_OF, SweeperConfig
from rlox_cli.terminal.errors import UsageError
from rlox_cli.terminal.paths import output_path

# Hydra's flags without a value, and those whose value is the next word.
_FLAGS = {
    *("-h", "--help", "--hydra-help", "--version", "--resolve", "--run", "-r", "--multirun", "-m"),
    *("--shell-completion", "-sc"),
}
# After these, Hydra prints something, and runs nothing.
HELP_FLAGS = {"-h", "--help", "--shell-completion", "-sc"}
_CHOOSING_FLAGS = ("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd")
_VALUE_FLAGS = {*_CHOOSING_FLAGS, *("--cfg", "-c", "--package", "-p", "--info", "-i")}
# Flags of which Hydra accepts one: what a command does with its configuration.
_MODES = {"--run": 1, "-r": 1, "--multirun": 2, "-m": 2, "--cfg": 3, "-c": 3, "--info": 4, "-i": 4}
_EXPONENT = r"(?<![\w.'\"+-])\d[\d_]*(?:\.\d+)?[eE]\+?\d{1,2}(?![\w.'\"])"
FOLDERS = ("hydra.run.dir", "hydra.sweep.dir")


def take_imports(args: list[str]) -> tuple[list[str], list[str]]:
    """Separate every ``--import NAME`` or ``--import=NAME`` from the other words."""
    modules, rest = [], []
    words = iter(args)
    for word in words:
        if word == "--import":
            name = next(words, None)
            if name is None or name.startswith("-"):
                raise UsageError(f"--import must be followed by a module's name, got {name or 'nothing'}")
            modules.append(name)
        elif word.startswith("--import="):
            modules.append(word.removeprefix("--import="))
        else:
            rest.append(word)
    return modules, rest


def split_args(args: list[str], own: Collection[str] = ()) -> tuple[list[str], list[str]]:
    """Split what was typed into Hydra's flags (with their values) and overrides, which Hydra takes separately.

    `own` are the other flags of the command, which messages name.

    Raises
    ------
    UsageError
        If a word is neither, or a flag has no value.
    """
    flags, overrides = [], []
    words = deque(args)
    while words:
        word = words.popleft()
        name, _, value = word.partition("=")
        if name in _VALUE_FLAGS and not value:
            flags.append(word)
            if word == name and words and not words[0].startswith("-"):
                flags.append(words.popleft())
            elif word not in ("--info", "-i"):
                got = words[0] if words and word == name else "nothing"
                raise UsageError(f"{name} must be followed by its value, got {got}; type {name} VALUE, or leave it out")
        elif word.startswith("-"):
            if name not in _FLAGS | _VALUE_FLAGS:
                known = {"--import", "--check", *_FLAGS, *_VALUE_FLAGS, *own}
                value = value or (words[0] if words else "…")
                hint = _as_setting(name, "…" if value.startswith("-") else value) or nearest(name, known)
                raise UsageError(f"{_short(name)} is no flag; {hint}")
            flags.append(word)
        elif "=" in word or word.startswith("~"):
            if re.match(r"(env|buffer)\.kwargs[.=]", word):
                word = f"++{word}"  # kwargs may have any key, but in Hydra's strict mode each key would be unknown
            elif "tracking_uri" in word:
                word = without_password(word)
            elif re.search(_EXPONENT, word):
                word = _as_integer(word)
            overrides.append(word)
        else:
            raise UsageError(f"{_short(word)!r} must be KEY=VALUE or a flag; `rlox train --help` shows how")
    modes = dict.fromkeys(word.partition("=")[0] for word in flags if word.partition("=")[0] in _MODES)
    if len({_MODES[mode] for mode in modes}) > 1:
        raise UsageError(f"{' and '.join(modes)} must not be combined; use only one of them")
    if not any(word.split("=")[0] in ("--cfg", "-c", "--info", "-i") for word in flags):
        for word in flags:
            if word.split("=")[0] in ("--resolve", "--package", "-p"):
                raise UsageError(f"{word} must be used with --cfg job, which prints the configuration")
    return flags, overrides


def _as_setting(flag: str, value: str) -> str | None:
    """Return how to type a setting that was typed as a flag, as in ``--algo ppo``; None if it is no setting."""
    key = flag.lstrip("-").replace("-", "_")
    if key.partition(".")[0] not in {*types_of(RunConfig), "tuned", "experiment"}:
        inner = {f"algo.{item.name}" for entry in ALGORITHMS.values() for item in fields(resolve(entry.config))}
        keys = [key.rstrip("=") for key in completions(key, whole=True)] or [f"algo.{key}"]
        key = keys[0]
        if key.startswith("algo.") and key.partition("=")[0] not in inner:
            return None
    return f"settings are typed without dashes: {key if '=' in key else f'{key}={_short(value)}'}"


def _as_integer(override: str) -> str:
    """Return `override` with 1e6, which Hydra reads as a float, as 1000000 if its key takes an integer."""
    key, _, value = override.partition("=")
    if not re.search(_EXPONENT, value) or key.lstrip("+").removeprefix("hydra.sweeper.params.") not in keys_with("int"):
        return override

    def digits(match: re.Match[str]) -> str:
        number = Decimal(match[0].replace("_", ""))
        return str(int(number)) if number == number.to_integral_value() else match[0]

    return f"{key}={re.sub(_EXPONENT, digits, value)}"


@cache
def keys_with(kinds: str) -> set[str]:
    """Return the dotted keys of a run whose values, or the items of whose lists, are of one of `kinds`, a pattern."""
    sections: list[tuple[str, type]] = [("", RunConfig), ("hydra.sweeper.", SweeperConfig)]
    sections += [("hydra.sweeper.", OptunaConfig)]
    sections += [("algo.", resolve(entry.config)) for entry in ALGORITHMS.values()]
    sections += [("buffer.", buffer_config_class(name)) for name in buffer_names()]
    sections += [(at, getattr(config_module, name)) for name, at in SECTION_OF.items() if at]
    return {
        at + item.name
        for at, kind in sections
        for item in fields(kind)
        if re.search(rf"\b({kinds})\b", str(types_of(kind)[item.name]))
    }


def run_folder(overrides: list[str]) -> list[str]:
    """Return `overrides` with ``output_dir=FOLDER`` in Hydra's form: the folder of the run, or of all runs of a sweep.

    Raises
    ------
    UsageError
        If nobody would name such a folder, or if ``output_dir`` is combined with one of the keys that it sets.
    """
    typed = [override for override in overrides if override.startswith("output_dir=")]
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        if key in ("output_dir", *FOLDERS) and value in ("", "''", '""', "null"):
            raise UsageError(f"{key} must name a folder, got nothing")
        if key in FOLDERS and typed:
            raise UsageError(f"output_dir must not be combined with {key}, which it sets; use only one of them")
    rest = [
        override for override in overrides if override.lstrip("+").partition("=")[0] not in ("output_dir", *FOLDERS)
    ]
    for override in overrides:
        key, _, value = override.partition("=")
        if override not in rest:
            folder = _literal_folder(key.lstrip("+"), value)
            rest += [f"{each}={folder}" for each in (FOLDERS if override in typed else [key])]
    return rest


def as_typed(overrides: Iterable[str]) -> str:
    """Return the overrides that `run_folder` returned, separated by blanks, with ``output_dir`` again."""
    words, (run, sweep) = list(overrides), (f"{key}=" for key in FOLDERS)
    both = [word for word in words if word.startswith(run) and word.replace(run, sweep, 1) in words]
    second = {word.replace(run, sweep, 1) for word in both}
    kept = (word for word in words if word not in second)
    return " ".join(word.replace(run, "output_dir=", 1) if word in both else word for word in kept)


def _literal_folder(key: str, value: str) -> str:
    """Return the folder `value`, quoted: a path is taken literally, whatever its characters mean to Hydra."""
    if value[0] in "'\"" and value[-1] == value[0] and len(value) > 1:
        value = value[1:-1].replace(f"\\{value[0]}", value[0])
    path = str(output_path(key, value, folder=True, probe=False))
    path = "./???" if path == "???" else path  # alone, it would mean that there is no value
    # Backslashes are literal, except before a quote.
    return "'{}'".format(re.sub(r"(\\*)('|$)", lambda match: 2 * match[1] + (match[2] and r"\'"), path))


def explain_unparsed(line: str) -> UsageError:
    """Return the error for an override that Hydra cannot parse."""
    return UsageError(
        f"{_short(line)!r} must be KEY=VALUE, and a value with other characters than ASCII letters, digits and "
        "-_./:+@ must be quoted: \"KEY='VALUE'\""
    )


def without_password(word: str) -> str:
    """Return an override without the password of an MLflow server, in whatever form it is typed.

    Raises
    ------
    UsageError
        If it names several servers with passwords, or in a form in which the password cannot be replaced.
    """
    if not ("mlflow" in word and "tracking_uri" in word):
        return word
    key, _, typed = word.partition("=")
    texts = _texts(word)
    secret = {text: uri for text in texts if masked(uri := _resolved(text).strip("'\"")) != uri}
    if not secret and re.match(r"\w+://", typed) and masked(typed) != typed:
        texts, secret = [typed], {typed: typed}  # not quoted, with characters that mean something else to Hydra
    if len(set(secret.values())) > 1:
        raise UsageError(
            f"{key} must name one server with a password, got {len(secret)}; start a sweep for each, or leave the "
            "passwords to MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        )
    for text, uri in secret.items():
        hidden = take_out_password(uri)
        if len(texts) == 1 and typed[0] not in "[{":
            return f"{key}={QuotedString(hidden, Quote.single).with_quotes()}"
        if text not in word:
            raise UsageError(f"{key} must have an address without backslashes, since it contains a password")
        word = word.replace(text, hidden)
    return word


def _texts(word: str) -> list[str]:
    """Return all texts in the value of an override; none if it cannot be parsed."""

    def inside(value: Any) -> Iterator[str]:
        if isinstance(value, (list, dict)):
            for item in value.values() if isinstance(value, dict) else value:
                yield from inside(item)
        elif isinstance(value := getattr(value, "text", value), str):
            yield value

    try:
        value = OverridesParser.create().parse_override(word).value()
    except (HydraException, ValueError):
        return []
    return list(inside(value.list if isinstance(value, ChoiceSweep) else value))


def _resolved(text: str) -> str:
    """Return `text` with its references, such as ``${oc.env:NAME}``, replaced if they need nothing of the run."""
    try:
        return str(OmegaConf.create([text])[0]) if "${" in text else text
    except OmegaConfBaseException as e:
        if masked(text) == text:
            return text
        raise UsageError(
            "logger.mlflow.tracking_uri must refer to nothing that is unknown before the run, since it contains a "
            f"password, got {masked(text)}; set MLFLOW_TRACKING_URI to the address"
        ) from e


def take_out_password(uri: str) -> str:
    """Return `uri` without its password, which Hydra would store. The process that writes there gets it."""
    if (hidden := masked(uri)) != uri:
        os.environ["MLFLOW_TRACKING_URI"] = uri
    return hidden


def refuse_forms(overrides: list[str]) -> None:
    """Raise a UsageError for input that Hydra's grammar allows but no run can have; the message says what to type."""
    loader = GlobalHydra.instance().config_loader()
    parser = OverridesParser.create(config_loader=loader)
    for line in overrides:
        if len(name := line.partition("=")[0]) > LONGEST_NAME:
            raise UsageError(
                f"{_short(name)} must be a key of at most {LONGEST_NAME} characters, got one of {len(name):,}"
            )
        try:
            (override,) = parser.parse_overrides([line])
        except OverrideParseException as e:
            raise explain_unparsed(line) from e
        except ValueError as e:
            raise UsageError(f"{_short(line)} must have a value that can be read: {one_line(e, 80)}") from e
        key = override.key_or_group
        if not key:
            raise UsageError(f"{_short(line)!r} must be KEY=VALUE, got no key")
        if key == "preset":
            raise UsageError(f"{_short(line)} must be left out: a preset is chosen by algo=NAME")
        # `reference` is used to judge a run and is not one of its settings, so a run does not need it.
        if override.type is OverrideType.DEL and key != "reference":
            raise UsageError(
                f"{_short(line)} must not delete a key: a run needs all of them; leave it out for its default"
            )
        if override.is_sweep_override():
            continue
        value = override.value()
        if value == "???":
            raise UsageError(f"{key} must have a value, got ???, which means no value")
        refuse_blanks(key, line.partition("=")[2])
        if isinstance(value, str):
            refuse_blanks(key, value)
        if value is None and (key in ONE_CHOICE or loader.get_group_options(key)):
            raise UsageError(f"{key} must be a name, got null; leave it out for its default")
        if key == "hydra.job.chdir" and value:
            raise UsageError(
                f"{key} must be false, got {value}: paths are relative to the folder where rlox was started"
            )
        if key not in ONE_CHOICE:
            continue
        if isinstance(value, (list, dict)):
            several = isinstance(value, list) and all(isinstance(item, str) for item in value)
            remedy = f"one run for each: -m {key}={','.join(value)}" if several else f"keys are set as {key}.KEY=VALUE"
            raise UsageError(f"{key} must be one choice, got {_short(line.partition('=')[2])}; {remedy}")
        if len(str(value)) > LONGEST_NAME and key != "dataset":
            raise UsageError(
                f"{key} must be a name of at most {LONGEST_NAME} characters, got one of {len(str(value)):,}: "
                f"{_short(str(value))}"
            )


def refuse_blanks(key: str, text: str) -> None:
    """Raise a UsageError if a number or a truth value begins or ends with a blank, which Python would overlook."""
    if text != text.strip() and key in keys_with("int|float|bool"):
        raise UsageError(f"{key} must not begin or end with a blank, got {text!r}")


def _short(text: str) -> str:
    return one_line(masked(text), 60)


def flag_value(flags: list[str], *names: str) -> str | None:
    for i, word in enumerate(flags):
        if word in names and i + 1 < len(flags):
            return flags[i + 1]
        for name in names:
            if word.startswith(f"{name}="):
                return word.split("=", 1)[1]
    return None
