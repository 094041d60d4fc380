"""The card of an agent: what it is, how good it is, how its training is repeated and how it is used.

It begins with the metadata that the Hugging Face Hub reads and filters by.
"""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import dataclass, field
from typing import Any

import yaml

from rlox.checkpoint.checks import visible
from rlox_cli.families.imports import import_words

NO_NAME = "OWNER/NAME"  # stands for a name that is not known yet
NO_FOLDER = "FOLDER"  # stands for the folder of -cd, which is not shared


@dataclass(frozen=True)
class Score:
    """Mean return of an agent, with what one must know to judge it."""

    mean: float
    std: float  # of the episodes
    low: float  # bounds of the mean's 95 % interval; infinite for one episode
    high: float
    n_episodes: int
    seed: int | None
    deterministic: bool
    n_choices: int | None  # evaluations in training, the best of which chose the agent; None: measured afterwards

    @property
    def text(self) -> str:
        return f"{self.mean:.2f} ± {self.std:.2f}"

    @property
    def interval(self) -> str:
        return f"[{self.low:.2f}, {self.high:.2f}]" if math.isfinite(self.low) else "unknown, from one episode"


@dataclass(frozen=True)
class Facts:
    """What a card says about an agent."""

    algorithm: str
    task: str  # the environment, or what the rows of a language model are
    step: int
    n_steps: int  # of the whole training
    unit: str  # steps, updates, …
    seed: int
    checkpoint: str  # name of its file
    command: str | None  # repeats the training; None if it is not known
    versions: dict[str, str]
    score: Score | None
    changes: list[tuple[int, str]] = field(default_factory=list)  # settings with which it was resumed, and the steps
    score_name: str = "return"
    reference: float | None = None  # that tuned settings must reach
    language: bool = False
    licence: str | None = None  # identifier, such as mit
    curve: str | None = None  # names of files
    film: str | None = None
    imports: list[str] = field(default_factory=list)  # modules of the user that it needs


def interval_of_mean(mean: float, std: float, n: int) -> tuple[float, float]:
    """Return the 95 % interval of the mean of `n` values from Student's distribution; `std` divides by `n`."""
    if n < 2:
        return -math.inf, math.inf
    from scipy import stats

    half = float(stats.t.ppf(0.975, n - 1)) * std / math.sqrt(n - 1)
    return mean - half, mean + half


def write_card(facts: Facts, name: str) -> str:
    """Return the card as Markdown, for the agent that is called `name` on the hub."""
    version = _cell(facts.versions.get("rlox", "of an unknown version"))
    head = yaml.safe_dump(metadata(facts), sort_keys=False, allow_unicode=True, width=1000)
    parts = [
        f"---\n{head}---",
        f"# {_title(facts)}",
        f"This {'model' if facts.language else 'agent'} was trained with rlox {version} (package `rlox-cli`).",
        _table(facts),
    ]
    if facts.score is not None:
        parts.append(_judge(facts.score, facts.language))
    if facts.curve is not None:
        parts.append(f"![Learning curve]({facts.curve})")
    if facts.film is not None:
        parts.append(f"An episode is filmed in [{facts.film}]({facts.film}).")
    parts += [
        "## Use",
        "The checkpoint is one safetensors file: loading it runs no code of it.",
        _code("bash", *_use(facts, name)),
        _code("python", *_python(facts, name)),
        "## Repeat the training",
    ]
    if facts.command is None:
        parts.append("The settings are in `config.yaml`.")
    else:
        parts.append(_code("bash", _install(facts), facts.command))
        if f" -cd {NO_FOLDER} " in facts.command:
            parts.append(f"{NO_FOLDER} is one with settings of the author, which is not shared; see `config.yaml`.")
    if facts.changes:
        resumed = "; ".join(f"at {facts.unit[:-1]} {step:,} `{_cell(words)}`" for step, words in facts.changes)
        parts.append(f"It was resumed with other settings, by `rlox train resume=RUN …`: {resumed}.")
    parts += [
        "On a CPU, the same versions and the same CPU level give the same numbers. The training ran with:",
        "| | version |\n|---|---|\n" + "\n".join(f"| {_cell(k)} | {_cell(v)} |" for k, v in facts.versions.items()),
        "## Licence",
        f"`{facts.licence}`" if facts.licence else "Its author has not named a licence.",
    ]
    return visible("\n\n".join(parts) + "\n")


def metadata(facts: Facts) -> dict[str, Any]:
    """Return the card's metadata in the form of the Hugging Face Hub."""
    kind = "text-generation" if facts.language else "reinforcement-learning"
    result: dict[str, Any] = {"library_name": "rlox", "pipeline_tag": kind}
    if facts.licence:
        result["license"] = facts.licence
    tags = [kind, "deep-reinforcement-learning", "rlox", facts.algorithm, _plain(facts.task)]
    result["tags"] = list(dict.fromkeys(tags))
    if facts.score is not None:
        task = _plain(facts.task)
        measure = facts.score_name if facts.language else "mean_reward"
        metric = {"type": measure, "value": f"{facts.score.mean:.2f} +/- {facts.score.std:.2f}"}
        entry = {
            "task": {"type": kind, "name": kind.replace("-", " ")},
            "dataset": {"name": task, "type": task},
            "metrics": [{**metric, "name": measure, "verified": False}],
        }
        result["model-index"] = [{"name": facts.algorithm, "results": [entry]}]
    return result


def _title(facts: Facts) -> str:
    return f"{facts.algorithm} on {_plain(facts.task)}"


def _table(facts: Facts) -> str:
    what = "rows" if facts.language else "environment"
    rows = [("algorithm", f"`{facts.algorithm}`"), (what, f"`{_plain(facts.task)}`")]
    rows.append(("trained for", f"{facts.step:,} of {facts.n_steps:,} {facts.unit}, seed {facts.seed}"))
    if (score := facts.score) is not None:
        of = f"{score.n_episodes} {'rows' if facts.language else 'episodes'}"
        if score.seed is not None:
            of += f", seed {score.seed}"
        if not facts.language:
            of += f", {'deterministic' if score.deterministic else 'sampled'} actions"
        rows.append((facts.score_name, f"**{score.text}** (standard deviation over {of})"))
        rows.append(("95 % interval of the mean", score.interval))
    if facts.reference is not None:
        rows.append(("reference of the tuned settings", f"{facts.reference:g}"))
    return "| | |\n|---|---|\n" + "\n".join(f"| {key} | {value} |" for key, value in rows)


def _judge(score: Score, language: bool) -> str:
    if score.n_choices is None:
        how = "The score was measured after the training, on episodes that it did not use."
    elif score.n_choices > 1:
        how = (
            f"The score is the best of {score.n_choices} evaluations in training, which chose this checkpoint, so it "
            "is optimistic; `rlox eval` with another `--seed` measures it again."
        )
    else:
        how = "The score is that of the evaluation in training."
    over = "rows of this one model" if language else "episodes of this one agent"
    return f"{how} The interval is over {over}, not over trainings with other seeds."


def _install(facts: Facts) -> str:
    extras = "hub,llm" if facts.language else "hub"
    version = facts.versions.get("rlox", "")
    pinned = f"=={version}" if re.fullmatch(r"[\w.]+", version) else ""
    return f'pip install "rlox-cli[{extras}]{pinned}"'


def _use(facts: Facts, name: str) -> list[str]:
    evaluated = shlex.join([name, *import_words(facts.imports)])
    return [_install(facts), f"rlox pull {name}", f"rlox eval {evaluated}"]


def _python(facts: Facts, name: str) -> list[str]:
    act = "model, tokenizer = agent.model, agent.model.tokenizer" if facts.language else "action = agent.predict(obs)"
    return [
        "import rlox",
        "from huggingface_hub import hf_hub_download",
        "",
        f'agent = rlox.load(hf_hub_download("{name}", "{facts.checkpoint}"))',
        act,
    ]


def _code(language: str, *lines: str) -> str:
    return f"```{language}\n" + "\n".join(lines) + "\n```"


def _plain(text: str) -> str:
    """Return `text` as part of a line of Markdown that it cannot leave."""
    return re.sub(r"[`|<>\[\]\s]+", " ", text).strip()[:200]


def _cell(value: Any) -> str:
    return _plain(str(value))
