"""Settings of work on other machines: environments on workers, actors and jobs on Ray."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from rlox.config.base import LONGEST_S, Config

RAY_PLACEMENTS = ("spread", "pack")


def is_address(text: str) -> bool:
    """Whether `text` has the form host:port."""
    return ":" in text and text.rpartition(":")[2].isdecimal()


@dataclass
class RemoteConfig(Config):
    """Workers (`rlox worker`) that run the environments, and how to connect to them."""

    addresses: list[str] = field(default_factory=list)  # host:port of each worker; []: environments run on this machine
    token_file: str | None = None  # file with the workers' token, which is never sent; null: none
    ca: str | None = None  # certificate (PEM) of the authority that signed the workers' certificates; null: no TLS
    cert: str | None = None  # certificate (PEM) of this machine, if workers require one
    key: str | None = None  # the private key (PEM) of that certificate
    timeout_s: float = 30.0  # seconds to wait for a worker's answer
    reconnect_s: float = 60.0  # seconds to wait for a lost worker before the run ends; 0: do not wait
    insecure: bool = False  # allow connections to other machines without TLS, where anyone can read and change the data

    def rules(self):
        yield "addresses", all(map(is_address, self.addresses)), "contain host:port addresses"
        yield "token_file", self.token_file != "", "be a file, or null"
        yield "ca", self.ca != "", "be a file, or null"
        yield "cert", self.cert is None or self.key is not None, "be set together with key"
        yield "key", self.key is None or self.cert is not None, "be set together with cert"
        yield "cert", self.cert is None or self.ca is not None, "be set together with ca"
        yield "timeout_s", 0 < self.timeout_s <= LONGEST_S, f"be > 0 and at most {LONGEST_S}"
        yield "reconnect_s", 0 <= self.reconnect_s <= LONGEST_S, f"be >= 0 and at most {LONGEST_S}"


@dataclass
class RayResources(Config):
    """Ray cluster, and the resources that an actor or a job reserves there."""

    address: str = "local"  # local: a new Ray instance on this machine; HOST:PORT or auto: a cluster
    num_cpus: float = 1.0  # CPUs that each reserves
    num_gpus: float = 0.0  # GPUs that each reserves; 0.5: two share one
    resources: dict[str, float] = field(default_factory=dict)  # other resources that each reserves, by name
    runtime_env: dict[str, Any] = field(default_factory=dict)  # Ray's runtime environment, for a cluster

    def rules(self):
        yield "address", bool(self.address), "not be empty"
        yield "num_cpus", 0 <= self.num_cpus < math.inf, "be >= 0 and finite"
        yield "num_gpus", 0 <= self.num_gpus < math.inf, "be >= 0 and finite"
        numbers = self.resources.values()
        sound = all(isinstance(number, (int, float)) and 0 < number < math.inf for number in numbers)
        yield "resources", sound, "contain finite numbers > 0"


@dataclass
class RayConfig(RayResources):
    """Actors on Ray (algo.actors=ray): where they are placed, and what each of them reserves."""

    placement: str = "spread"  # spread actors over the nodes, or pack them onto as few as possible
    learner_apart: bool = False  # keep actors off the learner's node
    start_timeout: float = 120.0  # seconds within which all actors must start

    def rules(self):
        yield from super().rules()
        yield "placement", self.placement in RAY_PLACEMENTS, f"be one of {', '.join(RAY_PLACEMENTS)}"
        reserves = self.num_cpus > 0 or self.num_gpus > 0 or self.resources
        yield "num_cpus", bool(reserves), "be > 0 if an actor reserves nothing else"
        yield "start_timeout", 0 < self.start_timeout < math.inf, "be > 0 and finite"
