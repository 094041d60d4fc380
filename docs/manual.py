"""Generate the parts of the manual that come from the code, the tuned settings and the committed results.

The directives return Markdown, which is parsed where they stand, so no page contains a copy of a default or a score.
The build warns about an algorithm without a page and a public name without an entry in the reference; ``-W`` turns both
warnings into errors.
"""

from __future__ import annotations

import inspect
import json
import re
import typing
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective
from typer.main import get_command

import rlox
from rlox import config
from rlox.algorithms import ALGORITHMS, resolve
from rlox.config import tuned, tuned_pairs
from rlox.config.migration import CLEANRL, CONTRIB, ORIGINAL, SB3, TRL
from rlox.config.migration import table as migration_table
from rlox_cli.main import app as command_line
from rlox_cli.report.keys import comments

ROOT = Path(__file__).parents[1]
TITLES = {"ppo": "PPO", "a2c": "A2C", "dqn": "DQN", "sac": "SAC", "td3": "TD3"}

logger = logging.getLogger(__name__)


def table(head: list[str], rows: list[list[Any]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", r"\|") for cell in row) + " |" for row in lines)


def code(value: Any) -> str:
    """Return `value` as a person would type it in YAML."""
    if value is MISSING:
        return "required"
    return f"`{value if isinstance(value, str) and value else json.dumps(value)}`"


def number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def fields_table(cls: type) -> str:
    """Return a table of the fields of a configuration: name, default, meaning, and search range."""
    meaning, hints = comments(cls), typing.get_type_hints(cls)
    searched = any("search" in item.metadata for item in fields(cls))
    rows = []
    for item in fields(cls):
        default = item.default_factory() if item.default_factory is not MISSING else item.default
        skipped = item.name.startswith("_") or is_dataclass(default) or hints[item.name] in (Any, config.LoggerConfig)
        if skipped:
            continue
        row = [f"`{item.name}`", code(default), meaning.get(item.name, "")]
        space = item.metadata.get("search")
        rows.append([*row, *([f"`{space}`" if space else ""] if searched else [])])
    return table(["key", "default", "meaning", *(["search range"] if searched else [])], rows)


def hyperparameters(name: str) -> str:
    """Return the fields of an algorithm's configuration, or of the configuration class `name`."""
    if ":" in name:
        return fields_table(resolve(name))
    return fields_table(resolve(ALGORITHMS[name].config) if name in ALGORITHMS else getattr(config, name))


def tuned_settings(algo: str) -> str:
    """Return all tuned settings of an algorithm, a column for each environment, and the scores they must reach."""
    settings = {env: tuned(algo, env) for name, env in tuned_pairs() if name == algo}
    keys = dict.fromkeys(key for values in settings.values() for key in values.get("algo", {}))
    rows = [["`total_timesteps`", *(f"{values['total_timesteps']:,}" for values in settings.values())]]
    for section in ("env", "buffer"):
        for key in dict.fromkeys(key for values in settings.values() for key in values.get(section, {})):
            rows.append([f"`{section}.{key}`", *(values.get(section, {}).get(key, "") for values in settings.values())])
    rows += [[f"`{key}`", *(_cell(values.get("algo", {}), key) for values in settings.values())] for key in keys]
    scores = [[env, *_reference(values)] for env, values in settings.items()]
    text = table(["setting", *settings], rows)
    return f"{text}\n\n{table(['environment', 'must reach', 'source of the score'], scores)}"


def _cell(values: dict[str, Any], key: str) -> str:
    return code(values[key]) if key in values else ""


def _reference(settings: dict[str, Any]) -> list[str]:
    found = settings.get("reference") or {}
    return [number(found.get("mean_return"), 0), found.get("source", "")]


def _results(file: str) -> Any:
    return json.loads((ROOT / "benchmarks" / file).read_text())


def made_by(found: dict[str, Any]) -> str:
    """Return where numbers come from: command, machine, versions and date."""
    versions = ", ".join(f"{name} {value}" for name, value in found["versions"].items())
    return f"Command: `{found['command']}`. Machine: {found['machine']}. Versions: {versions}. Date: {found['date']}."


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def learning(algo: str = "") -> str:
    """Return the scores of one algorithm, or of all, next to those of Stable-Baselines3."""
    found, rows = _results("learning.json"), []
    for cell, values in found["cells"].items():
        name, env = cell.split("-", 1)
        if algo in ("", name):
            pairs = (("iqm", "final"), ("iqm_sb3", "final_sb3"))
            sides = [f"{number(values[key])} ({_seeds(values[scores].values())})" for key, scores in pairs]
            interval = f"[{number(values['low'])}, {number(values['high'])}]"
            title = env if algo else f"{TITLES[name]} {env}"
            rows.append([title, *sides, f"{number(values['difference'])} {interval}"])
    if not rows:
        raise ValueError(f"learning: benchmarks/learning.json must contain a cell of {algo}, got none")
    head = ["environment" if algo else "cell", "rlox, IQM (seeds)", "SB3, IQM (seeds)", "difference, 95 %"]
    return f"{table(head, rows)}\n\n{made_by(found)} {_sentence(found['note'])}"


def _seeds(scores: typing.Collection[float]) -> str:
    if len(scores) <= 5:
        return " ".join(number(score, 0) for score in scores)
    return f"{len(scores)} seeds, {number(min(scores), 0)} to {number(max(scores), 0)}"


def offline_scores(env: str, algo: str = "") -> str:
    """Return the scores of one offline algorithm, or of all, on each dataset of an environment."""
    found = _results("offline.json")[env]
    cells = [cell for cell in found["cells"] if algo in ("", cell["algo"])]
    sets = {cell["set"]: cell["behaviour"] for cell in cells}
    rows = [["the data's episodes", *(number(behaviour["mean_return"], 0) for behaviour in sets.values())]]
    for name in dict.fromkeys(cell["algo"] for cell in cells):
        scores = {cell["set"]: cell["summary"]["return"] for cell in cells if cell["algo"] == name}
        rows.append([f"`{name}`", *(_with_interval(scores.get(data)) for data in sets)])
    return f"{table(['', *sets], rows)}\n\n{made_by(found)}"


def _with_interval(score: dict[str, float] | None) -> str:
    return "" if score is None else f"{number(score['mean'], 0)} ± {number(score['half'], 0)}"


def offline_values(env: str) -> str:
    """Return the critics' values of their policies' actions, and the discounted returns that followed."""
    found = _results("offline.json")[env]
    cells = [cell for cell in found["cells"] if "policy/q" in cell["summary"]]
    sets = list(dict.fromkeys(cell["set"] for cell in cells))
    rows = []
    for name in dict.fromkeys(cell["algo"] for cell in cells):
        pairs = {cell["set"]: [cell["summary"][key]["mean"] for key in ("policy/q", "policy/return")]
                 for cell in cells if cell["algo"] == name}  # fmt: skip
        rows.append([f"`{name}`", *(", ".join(number(value, 0) for value in pairs[s]) for s in sets)])
    return table(["value, return", *sets], rows)


def worker_speed() -> str:
    """Return the steps per second of environments in worker processes."""
    found = _results("parallel_envs.json")
    rows = [
        [n, *(f"{speeds[key]:,}" for key in ("rlox", "gymnasium", "in_process")), f"{speeds['ratio']:.1f}×"]
        for n, speeds in found["steps_per_second"].items()
    ]
    head = ["N", "rlox, workers", "AsyncVectorEnv", "rlox, in process", "workers over AsyncVectorEnv"]
    return f"{table(head, rows)}\n\n{made_by(found)}"


def evaluation_speed() -> str:
    """Return the seconds of trainings with evaluations in the training process and in another process."""
    rows, sources = [], []
    for case, found in _results("evaluation.json").items():
        times = [f"{found['medians'][name]['wall_s']:.1f} s" for name in ("in place", "beside")]
        rows.append([case, f"{found['env_steps']:,}", *times])
        sources.append(f"- {case}: {made_by(found)}")
    head = ["case", "steps", "in the training process", "in another process"]
    return "\n\n".join([table(head, rows), "\n".join(sources)])


def offline_speed() -> str:
    """Return the updates per CPU second of the offline algorithms."""
    found = _results("offline_speed.json")
    systems = {"rlox": "rlox, native", "pytorch": "rlox, PyTorch", "original": "Rust rlox", "sb3": "SB3's nearest"}
    rows = []
    for algo, case in found["cases"].items():
        speeds = [case[name]["updates_per_cpu_s"] if name in case else None for name in systems]
        rows.append([f"`{algo}`", *("" if speed is None else f"{speed:,.0f}" for speed in speeds)])
    return f"{table(['', *systems.values()], rows)}\n\n{made_by(found)}"


def train_speed() -> str:
    """Return the CPU seconds of whole trainings, and how many times longer the other systems take."""
    found = _results("train.json")
    systems = list(dict.fromkeys(name for result in found["results"] for name in result["median"]))
    systems.remove("control")
    rows = []
    for result in found["results"]:
        if "ratio" not in result:
            continue
        cells = []
        for name in systems:
            seconds = result["median"].get(name, {}).get("cpu_s")
            ratio = result["ratio"].get(name)
            cells.append("" if seconds is None else f"{seconds:.2f} s" + (f" ({ratio:.1f}×)" if ratio != 1 else ""))
        rows.append([f"{result['title']}, {result['steps']:,} steps", *cells])
    return f"{table(['case', *systems], rows)}\n\n{made_by(found)} {_sentence(found['note'])}"


def data_speed() -> str:
    """Return the microseconds of data operations at their middle size, and how many times longer other systems take."""
    found = _results("data.json")
    by_operation: dict[str, list[dict[str, Any]]] = {}
    for result in found["results"]:
        by_operation.setdefault(result["operation"], []).append(result)
    results = [sizes[len(sizes) // 2] for sizes in by_operation.values()]
    parts = []
    for group in dict.fromkeys(result["group"] for result in results):
        of_group = [result for result in results if result["group"] == group]
        peers = list(dict.fromkeys(name for result in of_group for name in result["ratio"]))
        rows = []
        for result in of_group:
            ratios = [f"{_ratio(result['ratio'][name])}×" if name in result["ratio"] else "" for name in peers]
            micros = f"{result['systems']['rlox']['median_us']:,.3g}"
            rows.append([result["title"], f"{_size(result['size'])} {result['unit']}", micros, *ratios])
        parts.append(f"**{group.capitalize()}**\n\n{table(['operation', 'size', 'rlox, µs', *peers], rows)}")
    return "\n\n".join([*parts, made_by(found)])


def _ratio(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.3g}"


def _size(size: int | list[int]) -> str:
    return " × ".join(f"{n:,}" for n in (size if isinstance(size, list) else [size]))


def pipeline_scores() -> str:
    """Return the held-out scores after each stage of examples/post_training_pipeline.py, seed by seed."""
    found = _results("llm_pipeline.json")
    columns = {
        "SFT, greedy": ("sft", "greedy"), "SFT, sampled": ("sft", "sampled"),
        "reward model": ("reward_model", "best"),
        "GRPO, greedy": ("grpo", "greedy"), "GRPO, sampled": ("grpo", "sampled"),
        "DPO, greedy": ("dpo", "greedy"), "DPO, sampled": ("dpo", "sampled"),
    }  # fmt: skip
    scores = [[run["scores"][stage][name] for stage, name in columns.values()] for run in found["runs"]]
    rows = [[run["seed"], *(number(x, 3) for x in of)] for run, of in zip(found["runs"], scores, strict=True)]
    rows.append(["mean", *(number(sum(of) / len(of), 3) for of in zip(*scores, strict=True))])
    rows.append(["range", *(f"{number(min(of), 3)} to {number(max(of), 3)}" for of in zip(*scores, strict=True))])
    return f"{table(['seed', *columns], rows)}\n\n{made_by(found)}"


def actor_learning(algo: str = "") -> str:
    """Return the scores of IMPALA and APPO with each kind of actor, for one algorithm or for all."""
    found, rows = _results("distributed_learn.json"), []
    for cell, values in found["cells"].items():
        name, rest = cell.split("-", 1)
        env, _, kind = rest.rpartition("-")
        if algo in ("", name):
            title = env if algo else f"{name.upper()} {env}"
            frames = f"{values['total_timesteps']:,}"
            rows.append([title, f"`{kind}`", frames, _seeds(values["final"].values()), number(values["iqm"])])
    head = ["environment", "actors", "frames", f"seeds {found['seeds']}", "IQM"]
    return f"{table(head, rows)}\n\n{made_by(found)} {_sentence(found['note'])}"


def _rate(value: float) -> str:
    """Round to three digits: such a measurement is not more precise."""
    return f"{float(f'{value:.3g}'):,.0f}"


def actor_speed() -> str:
    """Return the frames per second of IMPALA with each kind of actor, learning included."""
    found, rows = _results("distributed_speed.json"), []
    for cell, speed in found["speeds"].items():
        kind, n, backend = cell.split(", ")
        rates = [_rate(speed[key]) for key in ("frames_per_s", "frames_per_cpu_s")]
        rows.append([f"`{kind}`", n, backend, *rates, f"{speed['learner_idle']:.0%}", number(speed["lag_mean"])])
    head = ["actors", "number", "environments", "frames/s", "frames per CPU second", "learner waits", "lag"]
    return f"{table(head, rows)}\n\n{made_by(found)} {_sentence(found['note'])}"


def actor_hosts() -> str:
    """Return the frames per second of IMPALA with workers on another host, over mTLS."""
    found, rows = _results("distributed_hosts.json"), []
    for cell, speed in found["speeds"].items():
        lag = f"{number(speed['lag_mean'])} (max {speed['lag_max']:.0f})"
        rows.append([*cell.split(", "), _rate(speed["frames_per_s"]), f"{speed['learner_idle']:.0%}", lag])
    head = ["workers, one actor each", "`rollouts_ahead`", "frames/s", "learner waits", "lag"]
    return f"{table(head, rows)}\n\n{made_by(found)} {_sentence(found['note'])}"


def actor_scaling() -> str:
    """Return what the model of benchmarks/distributed/simulate.py predicts for 10, 100 and 1,000 workers."""
    found, rows = _results("distributed_simulation.json"), []
    for case, values in found["cases"].items():
        for row in values["rows"]:
            if row["workers"] >= 10:
                lag = f"{row['lag_p50']:,} / {row['lag_p95']:,} / {row['lag_max']:,}"
                rate = _rate(row["frames_per_s"])
                rows.append([case, f"{row['workers']:,}", row["variant"], rate, f"{row['learner_idle']:.0%}", lag])
    head = ["environments", "workers", "settings", "frames/s", "learner waits", "lag, median / 95 % / max"]
    return f"{table(head, rows)}\n\n{made_by(found)}"


def actor_model() -> str:
    """Return the predictions of the model next to trainings with real actors."""
    found, rows = _results("distributed_simulation.json"), []
    for row in found["check"]:
        seen, model = row["measured"], row["model"]
        setting = [row["n_actors"], row["rollouts_ahead"], row["rollouts_per_update"]]
        rates = [f"{of['frames_per_s']:,.0f}" for of in (seen, model)]
        shares = [f"{of['learner_idle']:.0%}" for of in (seen, model)]
        lags = [number(of["lag_mean"]) for of in (seen, model)]
        rows.append([*setting, *rates, f"{row['error']:+.1%}", " / ".join(shares), " / ".join(lags)])
    head = ["actors", "ahead", "per update", "frames/s", "model", "error", "learner waits, model", "lag, model"]
    return f"{table(head, rows)}\n\n{made_by(found)} {_sentence(found['check_note'])}"


def verdicts() -> str:
    """Return how often `rlox bench learn` finds each planted bug."""
    found, rows = _results("verdicts.json"), []
    for bug in found["bugs"].values():
        rows.append([bug["bug"], bug["cell"], bug["n_seeds"], f"{bug['fails']} of {bug['sets']}"])
    return f"{table(['bug', 'cell', 'seeds', 'sets that FAIL'], rows)}\n\n{made_by(found)}"


def commands() -> str:
    """Return the help of every command."""
    root = get_command(command_line)
    return "\n\n".join(_command(root, root.make_context("rlox", [], resilient_parsing=True)))


def _command(command: Any, context: Any) -> list[str]:
    parts, inner = [], getattr(command, "commands", {})
    if not inner:
        usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
        parts += [f"## {context.command_path}", f"```text\n{usage}\n```", *_paragraphs(command.help or "")]
        rows = []
        for item in command.params:
            if item.param_type_name == "option" and item.name != "help":
                names = ", ".join(f"`{name}`" for name in item.opts)
                default = item.default if isinstance(item.default, (int, float, str)) else str(item.default)
                given = "" if item.default is None or item.default is False or item.default == () else code(default)
                rows.append([names, given, (item.help or "").replace("\\[", "[")])
        parts += [table(["option", "default", "meaning"], rows)] if rows else []
    for name, below in inner.items():
        parts += _command(below, below.make_context(name, [], parent=context, resilient_parsing=True))
    return parts


def _paragraphs(text: str) -> list[str]:
    """Return help as Markdown; a paragraph that starts with a line of \\b keeps its lines."""
    found = []
    for part in inspect.cleandoc(text).replace("\\[", "[").split("\n\n"):
        kept = part.removeprefix("\b\n")
        found.append(f"```text\n{kept}\n```" if kept != part else part)
    return found


class Generated(SphinxDirective):
    """A directive whose content is the result of a function of its arguments."""

    optional_arguments = 2
    text: typing.ClassVar[typing.Callable[..., str]]

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes(type(self).text(*self.arguments), allow_section_headings=True)


def check(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn about missing pages and missing entries in the reference."""
    for name in ALGORITHMS:
        if f"algorithms/{name}" not in env.found_docs:
            logger.warning("docs: there must be a page algorithms/%s.md", name)
    known = env.get_domain("py").objects
    for name in rlox.__all__:
        if f"rlox.{name}" not in known and not name.startswith("__"):
            logger.warning("docs: the public name rlox.%s must be in docs/reference", name)


def keep_colon(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Keep napoleon from reading the words before a colon in a property's first line as its type."""
    if what in ("attribute", "property") and lines:
        lines[0] = lines[0].replace(": ", " – ", 1)


def add_arguments(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Put the arguments of a compiled class, which has no signature at run time, before its docstring."""
    module = getattr(thing, "__module__", None) or ""
    if what != "class" or not module.startswith("rlox.kernels."):
        return
    source = ROOT.joinpath("kernels", *module.split(".")[2:]).with_suffix(".pyx")
    if not source.exists():
        return
    body = re.search(rf"^(?:cdef )?class {thing.__name__}\b.*?(?=^\S|\Z)", source.read_text(), re.MULTILINE | re.DOTALL)
    found = re.search(r"^    def __c?init__\(\s*self,?\s*(.*?)\)(?: -> None)?:\n", body[0], re.MULTILINE | re.DOTALL)
    if found is not None:
        lines[:0] = [f"``{thing.__name__}({' '.join(found[1].split()).rstrip(', ')})``", ""]


def find_reference(
    app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, content: nodes.Node
) -> nodes.Node | None:
    """Link a name in a docstring to its public name in the reference, whichever module it is written with.

    Names that are not public are shown without a link. Names that do not exist cause a warning.
    """
    target = node.get("reftarget", "")
    if not target.startswith("rlox.") or node.get("refdomain") != "py":
        return None
    try:
        thing = resolve_name(target)
    except (ImportError, AttributeError):
        return None
    domain = env.get_domain("py")
    for name, entry in domain.objects.items():
        if name.count(".") == 1 and entry.objtype in ("class", "function") and getattr(rlox, name[5:], None) is thing:
            return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", name, node, content)
    return content


def inline_math(translator: Any, node: nodes.math) -> None:
    translator.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def block_math(translator: Any, node: nodes.math_block) -> None:
    translator.body.append(f'<div class="math" style="margin: 1em 0">{tex2mathml(node.astext(), as_block=True)}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    functions = {
        "hyperparameters": hyperparameters,
        "tuned-settings": tuned_settings,
        "learning": learning,
        "offline-scores": offline_scores,
        "offline-values": offline_values,
        "offline-speed": offline_speed,
        "worker-speed": worker_speed,
        "evaluation-speed": evaluation_speed,
        "train-speed": train_speed,
        "data-speed": data_speed,
        "pipeline-scores": pipeline_scores,
        "actor-learning": actor_learning,
        "actor-speed": actor_speed,
        "actor-hosts": actor_hosts,
        "actor-scaling": actor_scaling,
        "actor-model": actor_model,
        "verdicts": verdicts,
        "commands": commands,
        "migration-table": lambda: migration_table(SB3, CONTRIB, CLEANRL, ORIGINAL),
        "trl-table": lambda: migration_table(TRL),
    }
    for name, function in functions.items():
        app.add_directive(name, type("Directive", (Generated,), {"text": staticmethod(function)}))
    # MathML, which browsers render by themselves: the manual needs no script and no network.
    app.add_html_math_renderer("mathml", (inline_math, None), (block_math, None))
    app.connect("autodoc-process-docstring", keep_colon, priority=400)
    app.connect("autodoc-process-docstring", add_arguments)
    app.connect("missing-reference", find_reference)
    app.connect("env-check-consistency", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
