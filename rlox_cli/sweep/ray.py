"""Run the jobs of a sweep as Ray tasks, on this machine or on a cluster whose nodes share the sweep's folder."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from rlox.distributed.ray_actors import connect, first_sentence
from rlox_cli.config.schema import RayLauncherConfig
from rlox_cli.records.ledger import FILE
from rlox_cli.terminal.errors import UsageError

_POLL_S = 0.1
_STORE_BYTES = 128 << 20  # of a Ray that we start: it only carries configurations and outcomes


def execute(shared: dict[str, Any], number: int, overrides: list[str]) -> JobReturn:
    """Run one job in a Ray process; `shared` contains what all jobs of a launch have in common."""
    config, context = shared["config"], shared["context"]
    ledger = Path(config.hydra.sweep.dir, FILE)
    if not ledger.is_file():
        raise UsageError(
            f"{ledger} must be on a file system that all nodes of the Ray cluster share, but {platform.node()} "
            "has no such file; choose another hydra.sweep.dir"
        )
    os.chdir(shared["cwd"])
    setup_globals()
    Singleton.set_state(shared["singletons"])
    job = context.config_loader.load_sweep_config(config, overrides)
    with open_dict(job):
        job.hydra.job.id = f"{job.hydra.job.name}_{number}"
        job.hydra.job.num = number
    return run_job(shared["task"], job, "hydra.sweep.dir", "hydra.sweep.subdir", context)


class RayLauncher(Launcher):
    """Hands jobs to Ray, which tries each of them once. The sweep's ledger decides which jobs are retried.

    The connection to Ray is made with the first jobs and ended by `close`, which stops Ray only if this object has
    started it.

    Parameters
    ----------
    settings : RayLauncherConfig
        The address of Ray, and the resources that a job reserves.
    """

    def __init__(self, settings: RayLauncherConfig):
        self.settings = settings
        self._connected = False

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._context, self._task, self._config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run all jobs, as many at once as fit.

        Returns
        -------
        list of JobReturn
            One for each job, in order; failed ones hold their exception.

        Raises
        ------
        UsageError
            If a job reserves more than this machine has.
        ConnectionError
            If there is no Ray at the address.
        """
        self._connect()
        import ray

        try:
            remote = ray.remote(
                num_cpus=self.settings.num_cpus,
                num_gpus=self.settings.num_gpus,
                resources=self.settings.resources,
                max_retries=0,
            )(execute)
            shared = ray.put(
                {
                    "config": self._config,
                    "context": self._context,
                    "task": self._task,
                    "singletons": Singleton.get_state(),
                    "cwd": os.getcwd(),
                }
            )
            results: list[Any] = [None] * len(job_overrides)
            waiting = list(enumerate(map(list, job_overrides)))[::-1]
            most = len(waiting) if self.settings.n_jobs == -1 else self.settings.n_jobs
            running: dict[Any, int] = {}
            while waiting or running:
                while waiting and len(running) < most:
                    place, overrides = waiting.pop()
                    running[remote.remote(shared, initial_job_idx + place, overrides)] = place
                # Without a timeout to wait for: Ray would not pass on the exception of a signal unchanged.
                done, _ = ray.wait(list(running), num_returns=len(running), timeout=0)
                for reference in done:
                    results[running.pop(reference)] = _outcome(reference)
                if not done:
                    time.sleep(_POLL_S)
            return results
        except Exception:
            self.close()  # the next launch starts with a working Ray
            raise

    def _connect(self) -> None:
        if self._connected:
            return
        n_cpus = None if self.settings.n_jobs == -1 else math.ceil(self.settings.n_jobs * self.settings.num_cpus)
        self._connected = connect(self.settings, "hydra.launcher.address", n_cpus, object_store_memory=_STORE_BYTES)
        if self.settings.address == "local":
            import ray

            self._require_room(ray.cluster_resources())

    def _require_room(self, available: dict[str, float]) -> None:
        """Raise a UsageError for resources that this machine does not have; on a cluster, Ray waits for them."""
        reserved = {"num_cpus": ("CPU", self.settings.num_cpus), "num_gpus": ("GPU", self.settings.num_gpus)}
        reserved |= {f"resources.{name}": (name, number) for name, number in self.settings.resources.items()}
        for key, (name, number) in reserved.items():
            if number > (most := available.get(name, 0.0)):
                self.close()
                raise UsageError(
                    f"hydra.launcher.{key} must be at most {most:g}, as many as this machine has, got {number:g}; "
                    "use hydra.launcher.address=HOST:PORT for a cluster"
                )

    def close(self) -> None:
        """Disconnect from the cluster, or stop the Ray that `launch` has started."""
        if self._connected:
            import ray

            self._connected = False
            ray.shutdown()


def _outcome(reference: Any) -> JobReturn:
    """Return the result of a task; a failed job if it did not end normally."""
    import ray

    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as e:
        return JobReturn(status=JobStatus.FAILED, _return_value=e.cause)
    except ray.exceptions.RayError as e:
        lost = ConnectionError(f"Ray lost the job: {first_sentence(e)}")
        return JobReturn(status=JobStatus.FAILED, _return_value=lost)
