"""Jobs in this process: the function that Hydra or a launcher calls, and runs on the ranks of torchrun.

Launchers pickle the function by its name.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console

from rlox.config import RunConfig
from rlox.distributed.ranks import Group, join
from rlox_cli.config.imports import import_modules
from rlox_cli.config.schema import to_run_config
from rlox_cli.run.resume import prepare
from rlox_cli.run.runner import Outcome, resume, run
from rlox_cli.terminal.console import make_console
from rlox_cli.terminal.errors import UsageError

# Results of the jobs of this process, since hydra.main returns nothing. `rlox train` creates the lists. If they are
# None, a launcher runs the job in another process and reports its failures.
OUTCOMES: list[Outcome] | None = None
FAILURES: list[Exception] | None = None


def train(cfg: DictConfig) -> dict[str, float]:
    """Train one composed job. Return the final evaluation, which a sweeper may optimise."""
    hydra = HydraConfig.get()
    try:
        import_modules(cfg.imports)  # a launcher's process has imported nothing yet
        outcome = run(to_run_config(cfg), hydra.runtime.choices.algo, Path(hydra.runtime.output_dir), make_console())
    except Exception as e:
        if FAILURES is None:
            raise
        # The other jobs of a sweep continue, and Hydra does not print its own report of the error.
        FAILURES.append(e)
        return {}
    if OUTCOMES is not None:
        OUTCOMES.append(outcome)
    return outcome.final


@contextmanager
def _reporting(group: Group) -> Iterator[None]:
    """Report exceptions to the other ranks. Then torchrun's SIGTERM must not end this process before it prints them."""
    with group.reporting_errors():
        try:
            yield
        except Exception:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun kills a process that does not end within 30 s
            raise


def train_on_ranks(config: RunConfig, algo: str, make_folder: Callable[[], Path], console: Console) -> Outcome | None:
    """Train a new run on the ranks that torchrun has started. Every rank calls this; only rank 0 gets the outcome.

    If torchrun has restarted the ranks, the run of the previous attempt continues from its last checkpoint.
    """
    assert config.distributed is not None
    group = join(config.distributed_timeout_s, config.distributed)
    with _reporting(group):
        name, again = group.shared_text("folder", lambda: str(make_folder()))
        folder = Path(name)
        if again and group.from_first((folder / "checkpoints" / "last.safetensors").is_file):
            return _resumed(group, name, [], [], config.imports, console)
        outcome = run(config, algo, folder, console, again=again or group.rank > 0)
        group.leave()
    return None if group.rank else outcome


def resume_on_ranks(
    name: str,
    flags: list[str],
    overrides: list[str],
    modules: list[str],
    timeout_s: float,
    distributed: str,
    console: Console,
) -> Outcome | None:
    """Resume the run `name` on the ranks that torchrun has started, in the mode `distributed`; see `train_on_ranks`."""
    group = join(timeout_s, distributed)
    with _reporting(group):
        import_modules(modules)
        name, again = group.shared_text("run", lambda: name)
        if again and Path(name).is_file():
            name = str(Path(name).parent.parent)  # the previous attempt has come further
        return _resumed(group, name, flags, overrides, modules, console)


def _resumed(
    group: Group, name: str, flags: list[str], overrides: list[str], modules: list[str], console: Console
) -> Outcome | None:
    found = group.from_first(lambda: prepare(name, flags, overrides, modules, console))
    if found is not None and found.config.distributed is None:
        raise UsageError(
            f"distributed must be ddp or fsdp when torchrun has started {group.size} processes, got null; add "
            "distributed=ddp"
        )
    outcome = None if found is None else resume(found, console)
    group.leave()
    return None if group.rank else outcome
