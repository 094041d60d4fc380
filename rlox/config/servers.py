"""Which servers answer, so that nothing waits for the retries of a library that cannot reach its own."""

from __future__ import annotations

import os
import socket
import threading
from urllib.parse import urlsplit

from rlox.config.base import masked

HUB = "https://huggingface.co"
ADDRESS = "be an address such as https://HOST or http://HOST:5000"  # the rule of `host_and_port`
_TRIES = 2


def host_and_port(address: str) -> tuple[str, int] | None:
    """Return the host and the port in the address of a server; None if there is no host, or the port is no number."""
    try:
        parts = urlsplit(address)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        return None
    return (parts.hostname, port) if parts.hostname else None


def is_reachable(name: str, address: str, seconds: float = 3.0) -> bool:
    """Return whether a server, or the proxy in front of it, accepts connections within `seconds`, in two tries at most.

    A name lookup that hangs is abandoned. `name` is the setting that has the address.

    Raises
    ------
    ValueError
        If there is no host in the address, or in that of the proxy.
    """
    from urllib.request import getproxies, proxy_bypass

    place, scheme = host_and_port(address), address.partition(":")[0].lower()
    if place is not None and not proxy_bypass(place[0]) and (proxy := getproxies().get(scheme)):
        name, address = f"{scheme}_proxy", proxy if "://" in proxy else f"http://{proxy}"
        place = host_and_port(address)
    if place is None:
        raise ValueError(f"{name} must {ADDRESS}, got {masked(address)!r}")
    answered = threading.Event()

    def ask() -> None:
        for _ in range(_TRIES):
            try:
                with socket.create_connection(place, timeout=seconds):
                    answered.set()
                    return
            except (OSError, UnicodeError):  # a host that is no name
                continue

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds)
    return answered.is_set()


def unreachable_hub() -> str | None:
    """Return why the Hugging Face Hub cannot be asked; None if it answers. Raises a ValueError as `is_reachable`."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return "HF_HUB_OFFLINE is set"
    address = os.environ.get("HF_ENDPOINT") or HUB
    return None if is_reachable("HF_ENDPOINT", address) else f"{masked(address)} cannot be reached"
