"""Which servers answer, so that nothing waits for the retries of a library that cannot reach its own."""

from __future__ import annotations

import os
import socket
import threading
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

HUB = "https://huggingface.co"
_TRIES = 2


def is_reachable(address: str, seconds: float = 3.0) -> bool:
    """Return whether a server, or the proxy in front of it, accepts connections within `seconds`, in two tries at most.

    A name lookup that hangs is abandoned.
    """
    parts = urlsplit(address)
    proxy = None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)
    if proxy:
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    answered = threading.Event()

    def ask() -> None:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        for _ in range(_TRIES):
            try:
                with socket.create_connection((parts.hostname, port), timeout=seconds):
                    answered.set()
                    return
            except OSError:
                continue

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds)
    return answered.is_set()


def unreachable_hub() -> str | None:
    """Return why the Hugging Face Hub cannot be asked; None if it answers."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return "HF_HUB_OFFLINE is set"
    address = os.environ.get("HF_ENDPOINT") or HUB
    return None if is_reachable(address) else f"{address} cannot be reached"
