"""The JSON Schemas of configurations agree with the dataclasses, with shipped YAML, and with what rlox accepts."""

import dataclasses
import functools
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import rlox.config as configs
from rlox.algorithms import ALGORITHMS, resolve
from rlox.buffers import buffer_config_class
from rlox.config.base import types_of
from rlox_cli.report import schema

jsonschema = pytest.importorskip("jsonschema", reason='pip install "rlox-cli[dev]"')
referencing = pytest.importorskip("referencing")

CONF = Path(__file__).parents[1] / "conf"
FILES = sorted(CONF.rglob("*.yaml"))
SHIPPED = [path.stem for path in sorted((CONF / "algo").glob("*.yaml"))]
MEMORIES = [path.stem for path in sorted((CONF / "buffer").glob("*.yaml"))]
HEAD = re.compile(r"^# yaml-language-server: \$schema=(\S+)$", re.MULTILINE)
CONFIGS = [resolve(ALGORITHMS[name].config) for name in SHIPPED if name in ALGORITHMS] + [
    buffer_config_class(name) for name in MEMORIES
]
CONFIGS += [configs.RunConfig, configs.EnvConfig, configs.EvalConfig, configs.CheckpointConfig, configs.RemoteConfig]


@functools.cache
def expected():
    return schema.schemas(SHIPPED, MEMORIES)


def check(name, data):
    """The errors of `data` according to the schema `name`, as an editor finds them: from the files."""
    resources = [
        (path.name, referencing.Resource.from_contents(json.loads(path.read_text())))
        for path in (CONF / "schema").glob("*.json")
    ]
    registry = referencing.Registry().with_resources(resources)
    validator = jsonschema.Draft7Validator({"$ref": f"{name}.json"}, registry=registry)
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in validator.iter_errors(data)]


def test_shipped_schemas_are_those_of_the_dataclasses():
    """If this fails: `rlox schema --write conf/schema`, where no other package adds algorithms."""
    there = {path.stem: path.read_text() for path in (CONF / "schema").glob("*.json")}
    assert there.keys() == expected().keys()
    for name, one in expected().items():
        assert there[name] == schema.as_text(one), name
        jsonschema.Draft7Validator.check_schema(one)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(CONF).as_posix())
def test_shipped_yaml_names_its_schema_and_fits_it(path):
    text = path.read_text()
    assert HEAD.search(text), (
        "it needs a line `# yaml-language-server: $schema=…` after its first comments, as others do"
    )
    (named,) = HEAD.findall(text)
    file = (path.parent / named).resolve()
    assert file.is_file()
    assert file.parent == (CONF / "schema").resolve()
    if "@package" in text:  # Hydra stops at the first line that is not of this form
        assert text.startswith("# @package _global_\n")
    relative = path.relative_to(CONF).parts
    if relative[0] in ("algo", "tuned") and len(relative) + (relative[0] == "algo") == 3:
        assert file.stem.partition("-")[2] == (path.stem if relative[0] == "algo" else relative[1])
    assert check(file.stem, yaml.safe_load(text)) == []


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run-ppo", "algo: {clip_esp: 0.1}", "'clip_esp' was unexpected"),
        ("run-ppo", "algo: {clip_eps: 2}", "less than or equal|maximum|greater than or equal"),
        ("run-ppo", "algo: {activation: sine}", "sine"),
        ("run-ppo", "total_timesteps: many", "many"),
        ("run-ppo", "env: {n_env: 4}", "'n_env' was unexpected"),
        ("run-dqn", "algo: {clip_eps: 0.1}", "'clip_eps' was unexpected"),
        ("run", "defaults: [{override /algo: dqn}]\nalgo: {clip_eps: 0.1}", "'clip_eps' was unexpected"),
        ("run", "algo: {nothing_has_this: 1}", "nothing_has_this"),
        ("run", "eval: {n_points: -1}", "minimum"),
        ("run", "device: gpu", "gpu"),
        ("algo-ppo", "gamma: [0.9]", "not of type"),
        ("buffer-prioritized", "alpha: high", "high"),
    ],
)
def test_what_rlox_would_refuse_is_marked(name, text, message):
    errors = check(name, yaml.safe_load(text))
    assert errors
    assert re.search(message, " ".join(errors)), errors


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run-ppo", "total_timesteps: 1_000_000\nalgo: {learning_rate: 3e-4, clip_eps: '${algo.ent_coef}'}"),
        ("run-ppo", "algo: {clip_vf: null, hidden_sizes: [64, 64], normalize_obs: yes}"),
        ("run", "defaults: [{override /algo: dqn}, {override /buffer: prioritized}]\nbuffer: {alpha: 0.5}"),
        ("run", "hydra: {sweeper: {params: {seed: '0,1'}}}\nlogger: {mlflow: {experiment: mine}, wandb: null}"),
        ("env", "id: CartPole-v1\nwrappers: [{TimeLimit: {max_episode_steps: 9}}]\nreward_fn: null"),
    ],
)
def test_what_rlox_accepts_is_not_marked(name, text):
    assert check(name, yaml.safe_load(text)) == []


@pytest.mark.parametrize("cls", CONFIGS, ids=lambda cls: cls.__name__)
def test_limits_in_a_schema_are_limits_of_the_class(cls):
    """A bound is read from the text of a rule, so each is tried on the class itself."""
    properties = dict(schema._properties(cls, {}))
    assert properties.keys() == {item.name for item in dataclasses.fields(cls) if item.name[0] != "_"}
    default, tried = cls(), 0
    for name, one in properties.items():
        whole = int in (types_of(cls)[name], *getattr(types_of(cls)[name], "__args__", ()))
        step = 1 if whole else 1e-3
        outside = []
        for keyword, value in one.items():
            outside += [value - step] if keyword == "minimum" else [value] if keyword == "exclusiveMinimum" else []
            outside += [value + step] if keyword == "maximum" else [value] if keyword == "exclusiveMaximum" else []
            outside += ["no such choice"] if keyword == "anyOf" and any("enum" in part for part in value) else []
        for value in outside:
            tried += 1
            with pytest.raises((ValueError, TypeError), match=name):
                dataclasses.replace(default, **{name: value})
    assert tried or cls is configs.RemoteConfig


def test_every_key_has_a_description():
    for name, one in expected()["run"]["definitions"].items():
        for key, about in one["properties"].items():
            assert about.get("description"), f"{name}.{key}"


def test_the_command_prints_and_writes_schemas(command, tmp_path):
    code, out, _ = command("schema", "buffer-mmap")
    printed = json.loads(out)
    assert not code
    assert not re.search(r'"\$ref": "(?!#/)', out)  # complete
    validator = jsonschema.Draft7Validator(printed)
    assert validator.is_valid({"hot_size": 5})
    assert not validator.is_valid({"hot_sise": 5})
    assert not command("schema", "--write", "mine")[0]
    assert json.loads((tmp_path / "mine" / "run.json").read_text())["definitions"]["PPOConfig"]
    done = __import__("forked").run("schema", "algo-ppu", cwd=tmp_path)
    assert done.returncode == 2
    assert "did you mean 'algo-ppo'?" in done.stderr


def test_copied_files_find_their_schema(command, tmp_path):
    assert not command("cp", "tuned/ppo/CartPole-v1", "mine")[0]
    copied = tmp_path / "mine" / "tuned" / "ppo" / "CartPole-v1.yaml"
    (named,) = HEAD.findall(copied.read_text())
    assert json.loads((copied.parent / named).read_text())["title"] == "rlox: run-ppo"
    assert {path.name for path in (tmp_path / "mine" / "schema").iterdir()} == {"run-ppo.json", "run.json"}
    # Another file from there; the schemas are there already.
    assert not command("cp", "experiment/ppo-smoke", "mine")[0]


def test_schemas_are_no_group_of_choices():
    from rlox_cli.config.completion import complete

    assert complete(SimpleNamespace(params={}), "sch") == ["schedule_timesteps="]
