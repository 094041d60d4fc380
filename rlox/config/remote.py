"""Settings of environments on other machines."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlox.config.base import LONGEST_S, Config


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
