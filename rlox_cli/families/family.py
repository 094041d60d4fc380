"""The interface of a family of algorithms, and which family a run belongs to.

Everything that depends on the kind of algorithm is a method of its family: what a run must name, how the algorithm is
built and restored, what its steps cost, how it is evaluated. Other code of the command line asks ``family_of(…)`` and
has no special cases.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rlox.algorithms import entry_of, resolve
from rlox.callbacks import Callback
from rlox.callbacks.loggers import RecordLogger
from rlox.config import RunConfig
from rlox.multi_agent import is_multi_agent

OFF_POLICY_ONLY = "on-policy algorithms have none, algo=dqn has one"
# The keys for a sampler, with the values that they have without one.
NO_SAMPLER = {item.name: item.default for item in fields(RunConfig) if item.name.partition("_")[0] == "sampler"}


@dataclass(frozen=True)
class Start:
    """CPU seconds until a training begins."""

    python: float  # interpreter, imports, composing the configuration
    building: float = 0.0  # environments and networks

    @property
    def total(self) -> float:
        return self.python + self.building


@dataclass(frozen=True)
class Estimate:
    """Costs of one run, from the start of its process to the end."""

    cpu: dict[str, float]  # CPU seconds, by part
    wall: float  # seconds, on this machine as busy as it is now
    longest_evaluation: float  # wall seconds of all evaluations if every episode lasts to its time limit
    memory: int  # bytes of the process at its peak
    disk: int  # bytes of its files
    workers: int  # processes that evaluate in parallel with training
    step: float | None = None  # CPU seconds of an environment step with its updates, if a replay memory is learned from
    update: float | None = None  # CPU seconds of an update, if a replay ratio sets the number of updates


@dataclass(frozen=True)
class Examination:
    """What ``--check`` says about a run, without what is known for every family."""

    lines: list[tuple[str, str]]  # heading and text
    warnings: list[str]
    estimate: Estimate
    limit: int | None = None  # steps after which each episode ends, if known


@dataclass(frozen=True)
class Evaluation:
    """What was typed for ``rlox eval``; None: as in the training."""

    episodes: int | None = None
    seed: int | None = None
    stochastic: bool = False
    json: bool = False
    video: Path | None = None
    render: bool = False
    imports: tuple[str, ...] = ()
    max_steps: int | None = None
    samples: int | None = None
    pass_at: float | None = None
    predictions: Path | None = None
    rewards: tuple[str, ...] = ()  # addresses to which completions may be sent


class Family(ABC):
    """What one kind of algorithm needs from the command line."""

    counted = "episodes"  # what an evaluation consists of
    digits = 1  # of a score
    usual_buffer: str | None = None  # the replay memory of an algorithm without a YAML file
    completes_prompts = False  # whether `rlox generate` can use it
    shards = False  # whether distributed=fsdp can divide a model among the ranks
    # What init_from takes over, and what starts fresh besides optimisers and counters.
    taken_over, starts_fresh = "the networks and normalisation", "the replay memory start fresh"

    @abstractmethod
    def check(self, run: RunConfig, algo: str, buffer: str | None) -> None:
        """Raise a ValueError with key, rule and value unless `run` names what this family needs, and nothing else.

        Parameters
        ----------
        algo, buffer : str
            The choices from these groups.
        """

    @abstractmethod
    def build(self, cls: Any, config: RunConfig, folder: Path) -> Any:
        """Return an untrained algorithm of the class `cls`, whose files are in `folder`."""

    @abstractmethod
    def restore(self, config: RunConfig, checkpoint: Path, trusted: bool) -> Any:
        """Return the algorithm in `checkpoint`, to train on.

        `trusted` says whether the environment may be the one in the files, whatever is imported.
        """

    def note_on_restoring(self, algorithm: Any) -> str | None:
        """Return a line about what the restored `algorithm` cannot continue, if anything."""
        return None

    def recorded_task(self, header: dict[str, Any]) -> str | None:
        """Return the environment in a checkpoint's header; None if it records none."""
        return header["env"]["id"]

    def measure(self, algorithm: str) -> str:
        """Return what an evaluation of `algorithm` measures."""
        return "return"

    @abstractmethod
    def warnings(self, algorithm: Any, config: RunConfig, folder: Path) -> Iterator[str]:
        """Yield warnings, one line each, about training `algorithm` with `config` into `folder`.

        Nothing here draws a random number or steps an environment.

        Raises
        ------
        UsageError
            If the training does not fit this machine.
        """

    def time_limit_warnings(self, algorithm: Any, config: RunConfig) -> Iterator[str]:
        """Yield a warning if nothing limits the length of an episode."""
        yield from ()

    def make_callbacks(self, algorithm: Any, folder: Path, recorder: RecordLogger) -> list[Callback]:
        """Return further callbacks of a training in `folder`, whose files and metrics `recorder` gets."""
        return []

    @abstractmethod
    def round_steps(self, config: RunConfig) -> int:
        """Return the number of environment steps from one update call to the next; 1 if updates are counted."""

    def callback_calls(self, config: RunConfig) -> int:
        """Return how often callbacks are called in the training, to evaluate, save or stop."""
        # With many updates, callbacks are called about a hundred times.
        rare = min(1000, max(1, config.total_timesteps // 100))
        return -(-config.total_timesteps // max(rare, self.round_steps(config)))

    def evaluations(self, config: RunConfig) -> int:
        """Return the number of evaluations."""
        return max(1, min(config.eval.n_points, self.callback_calls(config)))

    @abstractmethod
    def examine(self, algorithm: Any, config: RunConfig, start: Start, scratch: Path) -> Examination:
        """Train `algorithm` for a short time with files in `scratch`, and multiply."""

    @abstractmethod
    def evaluate(
        self, path: Path, header: dict[str, Any], typed: Evaluation, read_config: Callable[[], RunConfig]
    ) -> None:
        """Evaluate the checkpoint at `path` and print its score; `read_config` returns the run's configuration."""

    @abstractmethod
    def show(self, path: Path, header: dict[str, Any], typed: Evaluation) -> None:
        """Show episodes of the checkpoint's agent in a window.

        Raises
        ------
        UsageError
            If it does not act in an environment.
        """


_FAMILIES = {
    "on-policy": "rlox_cli.families.environment:OnPolicy",
    "on-policy, several agents": "rlox_cli.families.agents:Agents",
    "off-policy": "rlox_cli.families.environment:OffPolicy",
    "sequences": "rlox_cli.families.environment:Sequences",
    "offline": "rlox_cli.families.offline:Offline",
    "offline, several agents": "rlox_cli.families.agents:OfflineAgents",
    "language": "rlox_cli.families.language:Language",
}


def family_of(algo: Any, env_id: str = "") -> Family:
    """Return the family of an algorithm's configuration, or its class, on the environment `env_id`."""
    if algo.uses_dataset == "text":
        name = "language"
    elif algo.uses_dataset == "must":
        name = "offline"
    elif algo.replays == "nothing":
        name = "on-policy"
    else:
        name = "sequences" if algo.replays == "sequences" else "off-policy"
    several = f"{name}, several agents"
    return resolve(_FAMILIES[several if env_id and several in _FAMILIES and is_multi_agent(env_id) else name])()


def family_of_checkpoint(header: dict[str, Any]) -> Family:
    """Return the family of the algorithm in a checkpoint's header, which must be a known one."""
    env = header.get("env")
    env_id = env.get("id") if isinstance(env, dict) else None
    return family_of(resolve(entry_of(header["algorithm"]).config), env_id or "")
