"""Status of a worker: whether it can be reached, what it serves, its latency and its clock."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from rlox.config.run import RemoteConfig
from rlox.envs.remote.client import Connection, WorkerLost, WorkerRefused
from rlox.envs.remote.codec import ProtocolError
from rlox.envs.remote.spaces import read_spec

_CALLS = 50
_LATE_CLOCK_S = 1.0


@dataclass(frozen=True)
class Status:
    """Result of `status_of`."""

    address: str
    problem: str | None = None  # why a session could not start there; None if it could
    version: str = ""
    env: str = ""
    spaces: str = ""
    sessions: int = 0
    max_sessions: int = 0
    latency_us: tuple[float, float] = (0.0, 0.0)  # median and 95th percentile of a message and its answer
    clock_s: float = 0.0  # how far its clock is ahead of this machine's

    @property
    def clock(self) -> str:
        """The clock difference in words."""
        if abs(self.clock_s) < _LATE_CLOCK_S:
            return "in sync"
        return f"{abs(self.clock_s):.1f} s {'ahead' if self.clock_s > 0 else 'behind'}"


def status_of(address: str, remote: RemoteConfig) -> Status:
    """Query the status of a worker without starting a session of its environments."""
    try:
        line = Connection(address, remote, "look")
    except (WorkerLost, WorkerRefused) as e:
        return Status(address, f"{'refuses' if isinstance(e, WorkerRefused) else 'lost'}: {e.reason}")
    try:
        times, clocks = [], []
        for _ in range(_CALLS):
            sent, started = time.time(), time.perf_counter()
            there = line.call("look").fields.get("time")
            times.append(time.perf_counter() - started)
            if not isinstance(there, float):
                raise ProtocolError(f"time must be a number, got {str(there)[:40]}")
            clocks.append(there - (sent + times[-1] / 2))
        spec, fields = read_spec(line.welcome), line.welcome.fields
    except (WorkerLost, WorkerRefused, ProtocolError) as e:
        return Status(address, str(e))
    finally:
        line.close()
    env = fields.get("env")
    n, most = fields.get("sessions"), fields.get("max_sessions")
    return Status(
        address,
        f"all {most} sessions are taken" if n == most else None,
        str(fields.get("rlox"))[:40],
        str(env.get("id"))[:200] if isinstance(env, dict) else "",
        f"observations {spec.obs_shape} {np.dtype(spec.obs_dtype).name}, {spec.describe_actions()}",
        n if isinstance(n, int) else 0,
        most if isinstance(most, int) else 0,
        (float(np.median(times)) * 1e6, float(np.percentile(times, 95)) * 1e6),
        float(np.median(clocks)),
    )
