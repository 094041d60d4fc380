"""Settings that the files of a run must not choose alone, since the run may come from somebody else.

They send data to another machine, write outside of the run's folder, or run code. Like modules (`--import`), they are
used only if they are typed again.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rlox.checkpoint import one_line
from rlox_cli.terminal.errors import UsageError
from rlox_cli.terminal.paths import shown

KEYS = ("reward", "sampler_url", "sampler_folder", "buffer.folder", "env.wrappers", "ray.address", "ray.runtime_env")
_LONGEST = 2000  # characters of what must be typed again
_LITERAL = re.compile(r"(?!(?:null|true|false|nan|inf)$)[a-z/][\w./:@+-]*", re.ASCII | re.IGNORECASE)


def is_url(name: Any) -> bool:
    """Return whether `name` is the address of a server."""
    return isinstance(name, str) and name.startswith(("http://", "https://"))


def is_remote(name: Any) -> bool:
    """Return whether `name` is an address that may be another machine's."""
    if not is_url(name):
        return False
    with suppress(ValueError):
        host = urlsplit(name).hostname
        return host != "localhost" and not ip_address(host or "").is_loopback
    return True


def find_doubtful(saved: dict[str, Any], folder: Path) -> Iterator[tuple[str, Any, str]]:
    """Yield the settings of the run in `folder` that only its user may choose: key, value, and what they do.

    `saved` is its configuration as ``config.yaml`` stores it.
    """
    found = {key: _value(saved, key) for key in KEYS}
    names = found["reward"] if isinstance(found["reward"], list) else [found["reward"]]
    if any(map(is_remote, names)):
        yield "reward", found["reward"], "sends completions to another machine"
    if saved.get("sampler") is not None and is_remote(found["sampler_url"]):
        yield "sampler_url", found["sampler_url"], "sends prompts to another machine"
    for key, what in (("sampler_folder", "weights"), ("buffer.folder", "its replay memory")):
        if isinstance(path := found[key], str) and not _is_inside(path, folder):
            yield key, path, f"writes {what} to a folder that is not the run's"
    wrappers = found["env.wrappers"]
    for wrapper in wrappers if isinstance(wrappers, list) else ():
        name = wrapper if isinstance(wrapper, str) else next(iter(wrapper), "") if isinstance(wrapper, dict) else ""
        if re.split(r"[.:]", str(name))[-1] == "RecordVideo":
            yield "env.wrappers", wrappers, "writes films with the wrapper RecordVideo"
            break
    if _value(saved, "algo.actors") == "ray":
        if found["ray.address"] not in (None, "local", "auto"):
            yield "ray.address", found["ray.address"], "lets a Ray cluster run code"
        if found["ray.runtime_env"]:
            yield "ray.runtime_env", found["ray.runtime_env"], "lets Ray install and run code"


def _value(saved: Any, key: str) -> Any:
    for name in key.split("."):
        saved = saved.get(name) if isinstance(saved, dict) else None
    return saved


def _is_inside(path: str, folder: Path) -> bool:
    """Return whether `path` is in `folder`, whatever links there are."""
    with suppress(OSError, RuntimeError, ValueError):
        return Path(path).resolve().is_relative_to(folder.resolve())
    return False


def require_again(
    saved: dict[str, Any], folder: Path, where: Path, is_typed: Callable[[str, Any], bool] = lambda key, value: False
) -> None:
    """Check that all settings that `find_doubtful` yields were typed, since a file must not decide what they do.

    Parameters
    ----------
    where : Path
        The file with the configuration.
    is_typed : callable
        Called with the key and the value of a setting.

    Raises
    ------
    UsageError
        If a setting was not typed; the message has what is missing.
    """
    missing = [setting for setting in find_doubtful(saved, folder) if not is_typed(*setting[:2])]
    if missing:
        words = shlex.join(to_word(key, value) for key, value, _ in missing)
        raise UsageError(
            f"{shown(where)} {' and '.join(what for *_, what in missing)}, which happens only if you type it again; "
            f"if you trust it, add {one_line(words, _LONGEST)}"
        )


def require_rewards(names: Iterable[str], typed: Iterable[str], path: Path) -> None:
    """Check that all addresses of other machines among a run's rewards were typed, and that `typed` are its addresses.

    Raises
    ------
    UsageError
        If not; the message has the missing flags.
    """
    addresses, typed = [name for name in names if is_url(name)], list(typed)
    if other := [name for name in typed if name not in addresses]:
        has = one_line(" and ".join(addresses)) or "none"
        raise UsageError(f"--reward must be an address that {path} has as its reward ({has}), got {other[0]}")
    missing = [name for name in dict.fromkeys(addresses) if is_remote(name) and name not in typed]
    if missing:
        flags = shlex.join(word for name in missing for word in ("--reward", name))
        raise UsageError(
            f"{path} sends completions to another machine, which happens only if you name it; if you trust it, add "
            f"{one_line(flags, _LONGEST)}"
        )


def to_word(key: str, value: Any) -> str:
    """Return a setting as it is typed, in Hydra's grammar."""
    return f"{key}={_literal(value)}"


def _literal(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_literal(item)}' for key, item in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_literal, value))}]"
    if not isinstance(value, str):
        return json.dumps(value)
    if _LITERAL.fullmatch(value):
        return value
    # Backslashes are literal, except before a quote.
    return "'{}'".format(re.sub(r"(\\*)('|$)", lambda match: 2 * match[1] + (match[2] and r"\'"), value))
