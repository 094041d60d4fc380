"""Settings of environments on other machines."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rlox.config.base import Config


def is_address(text: str) -> bool:
    """Whether `text` is of the form host:port."""
    return ":" in text and text.rpartition(":")[2].isdecimal()


@dataclass
class RemoteConfig(Config):
    """Workers (`rlox worker`) that play the environments, and how they are reached."""

    addresses: list[str] = field(default_factory=list)  # host:port of each worker; []: environments are played here
    token_file: str | None = None  # file with the workers' token, which never travels; null: none
    ca: str | None = None  # certificate (PEM) of who signed the workers' certificates; null: no TLS
    cert: str | None = None  # this machine's own certificate (PEM), where workers ask for one
    key: str | None = None  # the private key (PEM) of that certificate
    timeout_s: float = 30.0  # seconds that a worker has for an answer
    reconnect_s: float = 60.0  # seconds that a lost worker is waited for, before the run ends; 0: not at all
    insecure: bool = (
        False  # whether workers on other machines may be reached without TLS, for anyone to read and change
    )

    def rules(self):
        yield "addresses", all(map(is_address, self.addresses)), "be of the form host:port each"
        yield "token_file", self.token_file != "", "be a file, or null"
        yield "ca", self.ca != "", "be a file, or null"
        yield "cert", self.cert is None or self.key is not None, "stand together with key"
        yield "key", self.key is None or self.cert is not None, "stand together with cert"
        yield "cert", self.cert is None or self.ca is not None, "stand together with ca"
        yield "timeout_s", 0 < self.timeout_s < math.inf, "be > 0 and finite"
        yield "reconnect_s", 0 <= self.reconnect_s < math.inf, "be >= 0 and finite"
