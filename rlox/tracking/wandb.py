"""Weights & Biases as a mirror; its files go under ``<run>/wandb``.

Each run is a store of its own, because a process handles only one W&B run well.

Online, W&B's server knows the progress of a run: `open` resumes it by its id, and rows up to the
server's step are skipped. Offline there is no server to ask and no way to continue a W&B file, so a
writer replaces the newest file by one with the same and all later rows. Files that `wandb sync` has already
uploaded are kept, and their rows do not go into the next file.
"""

from __future__ import annotations

import configparser
import contextlib
import json
import netrc
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlox.config.base import shown
from rlox.config.servers import ADDRESS, host_and_port
from rlox.tracking import store as stores

if TYPE_CHECKING:
    from rlox.tracking.writer import Job

# W&B shows 0 as finished, 255 as killed and anything else as failed.
EXIT_CODE = {"finished": 0, "interrupted": 255, "failed": 1, "died": 255}
_BEGUN = "wandb.begun"  # name of the state with which the newest offline file was begun


def has_login() -> bool:
    """Return whether W&B would find an API key or a token for its server, without a network or a question.

    It looks where W&B does: in the environment, and in the netrc file. Raises a ValueError as `base_url`.
    """
    host, _ = host_and_port(base_url()) or ("", 0)
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    files = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for file in files:
        try:
            if (entry := netrc.netrc(os.path.expanduser(file)).hosts.get(host)) is not None and entry[2]:
                return True
        except (OSError, UnicodeError, netrc.NetrcParseError):
            continue
    return False


def base_url() -> str:
    """Return the address of the server that W&B uses: from the environment, a settings file, or its own.

    Raises
    ------
    ValueError
        If it is no address.
    """
    name, address = "WANDB_BASE_URL", os.environ.get("WANDB_BASE_URL")
    if not address:
        folder = Path(os.environ.get("WANDB_CONFIG_DIR") or os.path.expanduser("~/.config/wandb"))
        settings = configparser.ConfigParser(interpolation=None)
        with contextlib.suppress(configparser.Error, OSError, UnicodeError):
            settings.read([folder / "settings", Path("wandb", "settings")])
        name = f"base_url in {folder / 'settings'} or wandb/settings"
        address = settings.get("default", "base_url", fallback="") or "https://api.wandb.ai"
    if host_and_port(address) is None:
        raise ValueError(f"{name} must {ADDRESS}, got {shown(address)}")
    return address


class WandbMirror:
    """The mirror of Weights & Biases."""

    @staticmethod
    def store(settings: Mapping[str, Any], run: Path) -> Path:
        return run / stores.MIRRORS / "wandb.store"

    def __init__(self, settings: Mapping[str, Any]):
        try:
            import wandb
        except ImportError as e:
            raise ImportError(
                "rlox.tracking: logger=wandb needs the package wandb, got none; "
                'pip install "rlox-cli[wandb]", then rlox sync'
            ) from e
        self.wandb = wandb

    def open(self, job: Job) -> WandbRun:
        return WandbRun(self.wandb, job)


class WandbRun:
    """One run in W&B; the W&B id is the record's ``run_id``."""

    uploads_while_alive = False  # W&B keeps every upload as a version, so upload only once, at the end

    def __init__(self, wandb: Any, job: Job):
        settings = job.settings
        stores.inside(job.run, "wandb")
        self._wandb = wandb
        self._folder = job.run
        self._files: list[Path] = []
        offline = settings["mode"] == "offline"
        # Its artifact staging would otherwise go to the user's home folder.
        os.environ.setdefault("WANDB_DATA_DIR", str(job.run / "wandb"))
        if offline:
            kept, begun = _drop_unsynced(job.run, job.ledger.run_id), stores.read_state(job.run, _BEGUN)
            if Path(str(begun.url)).name not in kept:
                begun = begun if kept else stores.State()
                job.state.offset, job.state.segment, job.state.step = begun.offset, begun.segment, begun.step
                job.state.artifacts = dict(begun.artifacts)
        try:
            self._run = wandb.init(
                id=job.ledger.run_id,
                project=settings["project"],
                entity=settings.get("entity"),
                name=settings.get("run_name") or stores.readable(job.run.name),
                group=settings.get("group"),
                tags=settings.get("tags") or None,
                config=job.config,
                dir=str(job.run),
                mode=settings["mode"],
                resume=None if offline else "allow",
                reinit="finish_previous",  # the run of a failed attempt
                settings=wandb.Settings(
                    silent=True,
                    console="off",
                    disable_git=True,
                    save_code=False,
                    x_disable_stats=True,  # they would be the writer's, not the trainer's
                    x_disable_meta=True,
                    init_timeout=60,
                ),
            )
        except wandb.errors.UsageError as e:
            raise ValueError(
                f"rlox.tracking: logger.wandb must be able to log in, got {str(e)!r}; wandb login, "
                f"or logger.wandb.mode=offline, then rlox sync {job.run}"
            ) from e
        job.state.remote_id = self._run.id
        # If there is no page, the folder that `wandb sync` uploads.
        job.state.url = str(Path(self._run.dir).parent) if offline else self._run.url
        if offline:
            stores.write_state(job.run, _BEGUN, job.state)
        self._artifacts = settings.get("artifacts", True)
        # The server's next step; 0 for a new run.
        self._from_step = 0 if offline else self._run.step
        if not offline:
            job.state.offset, job.state.segment, job.state.step = 0, -1, -1

    def send(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            if row["step"] < self._from_step:
                continue
            values = {k: v for k, v in row.items() if k not in ("segment", "step", "time") and v is not None}
            values["_timestamp"] = row["time"]
            self._run.log(values, step=row["step"])

    def upload(self, kind: str, path: Path) -> None:
        if kind == "completions":
            table = json.loads(path.read_text("utf-8"))
            self._run.log({"completions": self._wandb.Table(columns=table["columns"], data=table["data"])})
            return
        if kind == "predictions":
            film = path.suffix == ".gif"
            shown = self._wandb.Video(str(path), format="gif") if film else self._wandb.Image(str(path))
            self._run.log({"predictions": shown})
            return
        artifact = self._wandb.Artifact(f"checkpoint-{kind}-{self._run.id}", type="model")
        artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def finish(self, status: str, message: str, ended: float) -> None:
        if self._artifacts:
            artifact = self._wandb.Artifact(f"config-{self._run.id}", type="config")
            artifact.add_file(str(self._folder / "config.yaml"))
            self._run.log_artifact(artifact)
        if message:
            self._run.summary["message"] = message
        self._run.finish(exit_code=EXIT_CODE[status])


def _drop_unsynced(run: Path, run_id: str) -> list[str]:
    """Remove the run's offline files that were not uploaded yet. Return the names of the folders that remain."""
    kept = []
    for folder in (run / "wandb").glob(f"offline-run-*-{run_id}"):
        if any(folder.glob("*.wandb.synced")):
            kept.append(folder.name)
        else:
            shutil.rmtree(folder)
    return kept
