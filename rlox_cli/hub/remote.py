"""The way to the Hugging Face Hub and back, by its own client; ``HF_ENDPOINT`` and ``HF_TOKEN`` are honoured."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from rlox.checkpoint import locks, one_line
from rlox.config.packages import import_package
from rlox.config.servers import unreachable_hub
from rlox_cli.hub.contents import CARD, read_manifest, verify
from rlox_cli.records.pulled import MANIFEST, folder_of, is_name
from rlox_cli.terminal.errors import UsageError

ORIGIN = "pulled.json"  # where a pulled run comes from
_STALE = ["checkpoints/*", "curve.*", "replay.*", "config.yaml", "metrics.jsonl"]  # of an earlier version of the run


def require_name(name: str, owner: bool) -> None:
    """Raise a UsageError unless `name` is a name of the hub, with an owner if that is needed."""
    if not (is_name(name) or (not owner and is_name(f"owner/{name}"))):
        form = "OWNER/NAME" if owner else "OWNER/NAME, or NAME in your own account,"
        raise UsageError(f"NAME must be {form} of letters, digits, '-', '_' and '.', got {one_line(name, 100)!r}")


def require_login() -> None:
    """Raise unless the client is installed, somebody is logged in and the hub answers: see `upload`."""
    if _client("rlox push").get_token() is None:
        raise UsageError("a token that may write is needed: type `hf auth login`, or set HF_TOKEN")
    _require_reachable()


def upload(folder: Path, name: str, private: bool | None) -> tuple[str, str]:
    """Upload `folder` as one commit to the repository `name`, which is created. Return its full name and its address.

    Raises
    ------
    ImportError, UsageError, OSError
        If the client is not installed, nobody is logged in, or the hub refuses or cannot be reached.
    """
    hub = _client("rlox push")
    api = hub.HfApi()
    with _explained(hub, name, "write to"):
        made = api.create_repo(name, private=private, exist_ok=True)
        full = made.repo_id
        if private is not None and (hidden := bool(api.model_info(full).private)) is not private:
            raise UsageError(
                f"{full} exists and is {'private' if hidden else 'public'}; --{'private' if private else 'public'} is "
                "for a new repository: choose another name, leave it out, or change the repository on its page"
            )
    with _explained(hub, full, "write to"):
        api.upload_folder(
            repo_id=full, folder_path=folder, commit_message="Upload by rlox push", delete_patterns=_STALE
        )
    return full, str(made)


def download(name: str, revision: str | None) -> tuple[Path, dict[str, Any], bool]:
    """Pull a run into its folder, which is replaced only when every file is there and verified.

    Returns
    -------
    Path
        The folder.
    dict
        Its manifest.
    bool
        Whether anything was downloaded; the same commit is only verified again.

    Raises
    ------
    ImportError, UsageError, ValueError, OSError
        If the client is not installed, the hub refuses or cannot be reached, or the repository is not what
        `rlox push` writes.
    RuntimeError
        If another process pulls the same run.
    """
    hub = _client("rlox pull")
    folder = folder_of(name)
    if _partial(folder).with_suffix(".old").exists():
        with _alone(folder):  # which puts it back
            pass
    _require_reachable()
    with _explained(hub, name, "read"):
        commit = hub.HfApi().model_info(name, revision=revision).sha
    if _origin(folder).get("commit") == commit:
        try:
            manifest = read_manifest(folder)
            verify(folder, manifest)
            return folder, manifest, False
        except (ValueError, OSError):
            pass  # a file was changed or deleted here: pull it again
    with _alone(folder) as partial:
        _fetch(hub, name, commit, MANIFEST, partial)
        manifest = read_manifest(partial)
        for file in (*manifest["files"], CARD):
            _fetch(hub, name, commit, file, partial)
        verify(partial, manifest)
        shutil.rmtree(partial / ".cache", ignore_errors=True)  # the client's notes
        origin = {"name": name, "commit": commit, "endpoint": hub.constants.ENDPOINT}
        (partial / ORIGIN).write_text(json.dumps(origin) + "\n", encoding="utf-8")
        _replace(folder, partial)
    return folder, manifest, True


def _fetch(hub: Any, name: str, commit: str, file: str, folder: Path) -> None:
    with _explained(hub, name, "read"):
        try:
            hub.hf_hub_download(name, file, revision=commit, local_dir=folder)
        except hub.errors.EntryNotFoundError:
            if file == CARD:
                return
            what = "no run of rlox: it has no rlox.json" if file == MANIFEST else f"incomplete: it has no {file}"
            raise UsageError(f"{name} is {what}; rlox pull reads what rlox push has written") from None


@contextmanager
def _alone(folder: Path) -> Iterator[Path]:
    """Yield an empty folder next to `folder`, for this process alone, and remove it at the end.

    First repair what a process that was killed has left: the run that it was about to replace is put back.

    Raises
    ------
    RuntimeError
        If another process pulls a run into `folder`.
    """
    new = _partial(folder)
    old = new.with_suffix(".old")
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock_name = f".{folder.name}.lock"
    lock = locks.take_lock(folder.parent, lock_name)
    if lock is None:
        holder = locks.describe_holder(folder.parent, lock_name)
        raise RuntimeError(f"{folder} is being pulled by {holder}; wait for it")
    try:
        lock.write(f"{os.getpid()}\n")
        if old.exists() and not os.path.lexists(folder):
            os.replace(old, folder)
        for left in (old, new):
            shutil.rmtree(left, ignore_errors=True)
        new.mkdir()
        try:
            yield new
        finally:
            shutil.rmtree(new, ignore_errors=True)
    finally:
        lock.release()


def _partial(folder: Path) -> Path:
    """Return the folder for files that are not complete yet."""
    return folder.with_name(f".{folder.name}.partial")


def _replace(folder: Path, new: Path) -> None:
    """Put the folder `new` in the place of `folder`."""
    old = new.with_suffix(".old")
    if os.path.lexists(folder):
        os.replace(folder, old)
    os.replace(new, folder)
    shutil.rmtree(old, ignore_errors=True)


def _origin(folder: Path) -> dict[str, Any]:
    try:
        origin = json.loads((folder / ORIGIN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return origin if isinstance(origin, dict) else {}


def _client(where: str) -> Any:
    """Return the hub's client, with its modules `constants`, `errors` and `utils`."""
    hub = import_package("huggingface_hub", "hub", where)
    for name in ("constants", "errors", "utils"):
        import_module(f"huggingface_hub.{name}")
    if not sys.stderr.isatty():
        hub.utils.disable_progress_bars()
    return hub


def _require_reachable() -> None:
    if (why := unreachable_hub()) is not None:
        raise OSError(f"the Hugging Face Hub must be reachable, but {why}; nothing was changed")


@contextmanager
def _explained(hub: Any, name: str, action: str) -> Iterator[None]:
    """Raise the errors of the hub as a UsageError or an OSError in one line, with a remedy."""
    errors = hub.errors
    try:
        yield
    except UsageError:
        raise
    except errors.GatedRepoError:
        raise UsageError(f"{name} is gated: ask for access on its page, and log in with `hf auth login`") from None
    except errors.RepositoryNotFoundError:
        raise UsageError(
            f"{name} was not found on {hub.constants.ENDPOINT}, or is private; check the name, or log in with "
            "`hf auth login`"
        ) from None
    except errors.RevisionNotFoundError:
        raise UsageError(f"{name} has no such revision; leave --revision out for the newest") from None
    except errors.HFValidationError as e:
        raise UsageError(f"{name} must be a name of the hub: {one_line(e, 200)}") from None
    except errors.HfHubHTTPError as e:
        code = getattr(getattr(e, "response", None), "status_code", None)
        if code in (401, 403):
            raise UsageError(
                f"the hub does not let you {action} {name} (HTTP {code}); use a token that may, with `hf auth login` "
                "or HF_TOKEN"
            ) from None
        raise OSError(f"the hub answered with an error for {name}: {one_line(e, 300)}") from None
    except ValueError as e:  # of the card's metadata, such as an unknown licence
        raise UsageError(f"the hub refuses the contents for {name}: {one_line(e, 300)}") from None
    except Exception as e:
        if not _is_of_network(e):
            raise
        raise OSError(f"the connection to the hub failed: {type(e).__name__}: {one_line(e, 200)}; try again") from None


def _is_of_network(e: BaseException) -> bool:
    """Return whether a client for HTTP raised it; which client it is depends on the version of huggingface_hub."""
    names = {cls.__name__ for cls in type(e).__mro__}
    return bool(names & {"RequestException", "TransportError", "HTTPError", "ConnectionError", "TimeoutError"})
