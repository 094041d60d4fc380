"""Explain errors of Hydra and OmegaConf in one sentence."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import GrammarParseError, InterpolationResolutionError, OmegaConfBaseException

from rlox.algorithms.table import ALGORITHMS, resolve
from rlox.config import BufferConfig, nearest
from rlox.config.migration import answers
from rlox.tracking.loggers import logger_settings, outside_loggers
from rlox_cli.config.presets import nearest_choice
from rlox_cli.config.schema import ONE_CHOICE, SECTION_OF
from rlox_cli.families.family import OFF_POLICY_ONLY
from rlox_cli.terminal.paths import shown

_KINDS = {"Float": "a number", "Integer": "an integer", "Boolean": "true or false", "String": "a text"}


def _section(name: str) -> str:
    """Return the prefix, with its dot, of the keys of the Config class with this name."""
    kinds = [BufferConfig]
    for kind in kinds:
        kinds += kind.__subclasses__()
    loggers = {logger_settings(logger).__name__: f"logger.{logger}." for logger in outside_loggers()}
    return "buffer." if name in {kind.__name__ for kind in kinds} else {**loggers, **SECTION_OF}.get(name, "algo.")


def explain(e: BaseException) -> str:
    """Explain a Hydra or OmegaConf error: the key, what it must be, the value, the nearest valid name."""
    root: BaseException = e
    while not isinstance(root, OmegaConfBaseException) and root.__cause__ is not None:
        root = root.__cause__
    if isinstance(e, (yaml.YAMLError, UnicodeDecodeError)):
        return _explain_unreadable(e)
    if isinstance(root.__context__, OmegaConfBaseException) and (file := re.match(r"In '(.*)': \w+ raised", str(root))):
        return _explain_file(file[1], root.__context__)
    if isinstance(e, MissingConfigException) and e.missing_cfg_file:
        path = e.missing_cfg_file.removesuffix(".yaml")
        group, _, choice = path.partition("/") if path.split("/")[0] in ONE_CHOICE else path.rpartition("/")
        if group == "dataset":
            return f"dataset must name a file, or minari:ID, got {choice!r}"
        if group:
            # Hydra lists no options for an item of a list, as in logger=[mlflow,cvs].
            options = e.options or GlobalHydra.instance().config_loader().get_group_options(group)
            if group == "env":
                from rlox.envs.gym_make import nearest_id

                more = "; any gymnasium id may be given, such as Acrobot-v1"
                return f"env={choice} does not exist; {nearest_id(choice)}{more}"
            hint = nearest_choice(choice, options) if group == "algo" else nearest(choice, options)
            return f"{group}={choice} does not exist; {hint}"
    if isinstance(e, HydraException) and "Ambiguous value for argument" in str(e):
        line = re.search(r"argument '(.*?)'\n", str(e))
        return f"{line[1] if line else 'a comma list'} has several values, which need a sweep: rlox train -m …"
    if isinstance(root, OmegaConfBaseException) and root.full_key:
        first = (root.msg or str(root)).splitlines()[0]
        if isinstance(root, InterpolationResolutionError):
            found = re.search(r"Interpolation key '(.*)' not found|[Uu]nsupported interpolation type (\S+)", first)
            name = next(filter(None, found.groups()), "") if found else ""
            what = f"refers to {name!r}, which is no key" if name else f"cannot be resolved: {first}"
            return f"{root.full_key} {what}; write a reference as ${{SECTION.KEY}}, such as ${{algo.gamma}}"
        if isinstance(root, GrammarParseError):
            key = re.sub(r"hydra\.(run|sweep)\.dir", "output_dir", root.full_key)
            return f"{key} must have references of the form ${{SECTION.KEY}}, got one that cannot be read ({first})"
        if "Cannot merge DictConfig with ListConfig" in first:
            return f"{root.full_key} must be a list such as [1,2], got a mapping"
        if "is not a ListConfig" in first or "Cannot assign" in first or "Cannot convert" in first:
            kind = (
                "a list such as [1,2]"
                if "is not a ListConfig" in first
                else "a mapping such as {name: 1}"
                if "Dict[" in first
                else "a text"
            )
            got = re.search(r"(?:assigned: |Cannot assign |Cannot convert )'?(\w+)", first)
            type_name = {"ListConfig": "list", "DictConfig": "dict"}.get(got[1], got[1]) if got else "another"
            return f"{root.full_key} must be {kind}, got a value of type {type_name}"
        if "not in" in first or "not found" in first:
            known = [str(key) for key in root.parent_node] if isinstance(root.parent_node, DictConfig) else []
            if root.object_type is dict and re.fullmatch(r"buffer\.\w+", root.full_key):
                return f"{root.full_key} needs a replay memory; {OFF_POLICY_ONLY}"
            if root.object_type is dict and re.fullmatch(r"dataset\.\w+", root.full_key):
                return f"{root.full_key} needs a dataset; add dataset=data/medium.arrow or dataset=minari:ID"
            if root.object_type is dict and re.fullmatch(r"reference\.\w+", root.full_key):
                return f"{root.full_key} is not set yet; type +{root.full_key}=… to add it"
            kind = root.object_type.__name__ if isinstance(root.object_type, type) else "the configuration"
            hint = nearest(str(root.key), known) if known else "`rlox show` lists the keys"
            for section in ("algo", "env", "buffer", "dataset"):
                # People often type `gamma=0.9` first, instead of `algo.gamma=0.9`.
                if "." not in root.full_key and OmegaConf.select(root.parent_node, f"{section}.{root.key}") is not None:
                    hint = f"did you mean {section}.{root.key}?"
            section, _, name = root.full_key.rpartition(".")
            because = ""
            if section in ("", "algo"):
                algo = root.parent_node if section else root.parent_node.get("algo") or {}
                owners, reason = _owners(name), getattr(root.object_type, "lacks", {}).get(name)
                because = f": {reason}" if reason else ""
                hint = answers(name, [str(key) for key in algo], cli=True) or (
                    f"it is for {', '.join(owners)}" if section and owners else hint
                )
            return f"{root.full_key} is no key of {kind}{because}; {hint}"
        value = re.match(r"Value (.*) of type '\w+' could not be converted to (\w+)", first)
        if value:
            kind = _KINDS.get(value[2], value[2])
            hint = " (write 1_000_000, not 1e6)" if kind == "an integer" and re.match(r"'\d+\.0'", value[1]) else ""
            known = [str(key) for key in root.parent_node] if isinstance(root.parent_node, DictConfig) else []
            theirs = answers(str(root.key), known, cli=True, value=value[1].strip("'"))
            return f"{root.full_key} must be {kind}, got {value[1]}{hint}{f'; {theirs}' if theirs else ''}"
        if "is not Optional" in first:
            return f"{root.full_key} must have a value, got null; leave it out for its default"
        if not_bool := re.match(r"Value (.*) is not a valid bool", first):
            return f"{root.full_key} must be {_KINDS['Boolean']}, got {not_bool[1]}"
        return f"{root.full_key}: {first}"
    if isinstance(e, (ValueError, TypeError)) and (named := re.match(r"(\w+Config): (.*)", str(e), re.DOTALL)):
        return f"{_section(named[1])}{named[2]}"
    return " ".join(str(e).split())


def _explain_unreadable(e: yaml.YAMLError | UnicodeDecodeError) -> str:
    """Explain an error of a file that is not YAML: the file, the line and what is wrong there."""
    if isinstance(e, yaml.MarkedYAMLError) and e.problem_mark is not None:
        mark, begin = e.problem_mark, e.context_mark
        since = f" ({e.context} that begins in line {begin.line + 1})" if e.context and begin is not None else ""
        return (
            f"{shown(Path(mark.name))} must be YAML, got an error in line {mark.line + 1}: {e.problem}{since}; mend it"
        )
    if isinstance(e, yaml.reader.ReaderError):
        return f"{shown(Path(e.name))} must be YAML, got {e.reason} at character {e.position}; remove it"
    bad = [path for folder in _folders() for path in folder.rglob("*.yaml") if not _is_utf8(path)]
    return f"{' and '.join(map(shown, bad)) or 'a YAML file'} must be text in UTF-8, got other bytes; save it as UTF-8"


def _explain_file(name: str, e: OmegaConfBaseException) -> str:
    """Explain an error of merging the file `name`, which is relative to a folder that Hydra searches."""
    path = next((path for folder in _folders() if (path := folder / f"{name}.yaml").is_file()), None)
    file, group = name if path is None else shown(path), name.partition("/")[0]
    if group in ("experiment", "tuned") and e.full_key == group:
        return f"{file} must begin with the line `# @package _global_`, got none; add it, and write KEY: VALUE below"
    if not e.full_key:
        got = re.search(r"Cannot merge DictConfig with (?:List|Any)Config|Merge error: (\w+)", e.msg or "")
        what = f"a value of type {got[1]}" if got and got[1] else "a list"
        return f"{file}: each section must be a mapping such as {{seed: 1}}, got {what}" if got else f"{file}: {e.msg}"
    return f"{file}: {explain(e)}"


def _folders() -> list[Path]:
    """Return the folders of the user that Hydra searches, in order."""
    elements = GlobalHydra.instance().config_loader().get_search_path().get_path()
    return [Path(item.path.removeprefix("file://")) for item in elements if (item.path or "").startswith("file://")]


def _is_utf8(path: Path) -> bool:
    try:
        path.read_text("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _owners(name: str) -> list[str]:
    """Return the algorithms whose configuration has the key `name`."""
    return [algo for algo, entry in ALGORITHMS.items() if name in resolve(entry.config).__dataclass_fields__]
