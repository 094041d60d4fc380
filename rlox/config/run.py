"""Settings of a run: environment, evaluation, checkpoints, loggers, and work on other machines.

`to_plain` returns them as plain data, as ``config.yaml`` stores them.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlox.config.base import (
    BACKENDS,
    DEVICES,
    ENV_BACKENDS,
    HIDDEN,
    LARGEST_SEED,
    LONGEST_S,
    MATMUL_PRECISIONS,
    MOST_AT_ONCE,
    MOST_PROCESSES,
    MOST_STEPS,
    MOST_THREADS,
    SAMPLERS,
    WANDB_MODES,
    Config,
    _is_finite,
    is_below,
    masked,
    operational,
)
from rlox.config.packages import import_package
from rlox.config.servers import host_and_port
from rlox.config.sqlite import is_sqlite, names_file, sqlite_file, sqlite_uri

DISTRIBUTED = ("ddp", "fsdp")  # fsdp: language models only
RAY_PLACEMENTS = ("spread", "pack")
MOST_LEVELS = 32  # of nested values in a configuration
MOST_BYTES = 1 << 18  # of config.yaml; a configuration has a few kilobytes, and reading YAML can be slow
_SURELY_SHORT = MOST_BYTES // (2 * MOST_LEVELS + 4)  # of `repr`: an element of a list has a line of its own in YAML
_USER, _NO_USER = r"https?://[^/]*@", "have no user or password, which would be stored; set"  # of a server's URL
ON_FAILURE = ("stop", "wait")  # reactions of a run that lost its sampler


def is_address(text: str) -> bool:
    """Whether `text` has the form host:port."""
    return ":" in text and text.rpartition(":")[2].isdecimal()


@dataclass
class EnvConfig(Config):
    """The environment a run trains on."""

    id: str = "CartPole-v1"  # a native id (`rlox ls envs`) or any gymnasium id
    n_envs: int = 8  # environments stepped in parallel
    kwargs: dict[str, Any] = field(default_factory=dict)  # keyword arguments of gymnasium.make
    wrappers: list[Any] = field(default_factory=list)  # gymnasium wrappers in order: Name or {Name: {arg: value}}
    workers: int = operational(0)  # processes that step non-native environments; 0: the training process steps them
    backend: str = "auto"  # auto (native if available, else gymnasium), gymnasium, envpool or tensor
    reward_fn: str | None = None  # replaces the training rewards: sign, module:NAME (--import), or an installed one

    def rules(self):
        yield "id", bool(self.id), "not be empty"
        yield "reward_fn", self.reward_fn != "", "be module:NAME, the name of an installed reward, or null"
        yield "n_envs", self.n_envs >= 1, "be >= 1"
        yield "n_envs", self.n_envs <= MOST_AT_ONCE, f"be at most {MOST_AT_ONCE:,}"
        yield "kwargs", _is_finite(self.kwargs), "contain no NaN and no infinity, which checkpoints cannot store"
        yield "workers", 0 <= self.workers <= self.n_envs, "be between 0 and n_envs"
        yield "workers", self.workers <= MOST_PROCESSES, f"be at most {MOST_PROCESSES}"
        yield "backend", self.backend in ENV_BACKENDS, f"be one of {', '.join(ENV_BACKENDS)}"
        pool = self.backend == "envpool"
        yield "workers", not (pool and self.workers), "be 0 with envpool, which takes env.kwargs.num_threads"
        yield "wrappers", not (pool and self.wrappers), "be empty with envpool"


@dataclass
class EvalConfig(Config):
    """Deterministic evaluation during training, on a separate environment."""

    n_points: int = 10  # evaluations, evenly spaced, the last one at the end; 0: only the one at the end
    n_episodes: int = 20  # episodes of one evaluation
    seed: int | None = None  # seed of the evaluation environment; null: 10_000 + seed
    stop_at: float | None = None  # stop training once the mean return reaches this; null: off
    patience: int | None = None  # stop training after this many evaluations without a better one; null: off
    max_steps: int | None = None  # steps after which an episode is cut; null: its limit, or 10 x training's longest
    dataset: str | None = None  # language models: rows to evaluate on, same form as dataset=; null: the training rows
    workers: int = operational(
        -1
    )  # processes that evaluate meanwhile; 0: none; -1: if a core is free and it takes long

    def rules(self):
        yield "n_points", self.n_points >= 0, "be >= 0"
        yield "n_points", self.n_points <= MOST_AT_ONCE, f"be at most {MOST_AT_ONCE:,}"
        yield "max_steps", self.max_steps is None or self.max_steps >= 1, "be >= 1, or null"
        yield "workers", -1 <= self.workers <= MOST_PROCESSES, f"be between 0 and {MOST_PROCESSES}, or -1"
        stops = self.stop_at is not None or self.patience is not None
        yield "workers", self.workers <= 0 or not stops, "be 0 or -1 if stop_at or patience is set"
        yield "n_points", self.n_points >= 1 or not stops, "be >= 1 if stop_at or patience is set"
        yield "stop_at", self.stop_at is None or math.isfinite(self.stop_at), "be finite, or null"
        yield "patience", self.patience is None or self.patience >= 1, "be >= 1 or null"
        yield "n_episodes", self.n_episodes >= 1, "be >= 1"
        yield "n_episodes", self.n_episodes <= MOST_AT_ONCE, f"be at most {MOST_AT_ONCE:,}"
        yield "seed", self.seed is None or 0 <= self.seed < 2**63, "be in [0, 2**63) or null"


@dataclass
class CheckpointConfig(Config):
    """When `checkpoints/last.safetensors` is replaced during training; it is also written at the end."""

    every_s: float = 60.0  # seconds between two saves
    every_steps: int | None = None  # steps (offline: updates) between two saves, if sooner; null: only every_s
    memory: bool = True  # also save the replay memory, in checkpoints/memory (off-policy): each save adds what is new

    def rules(self):
        yield "every_s", self.every_s > 0, "be > 0"
        yield "every_steps", self.every_steps is None or self.every_steps >= 1, "be >= 1, or null"


@dataclass
class MlflowConfig(Config):
    """MLflow as a mirror of the run's record."""

    tracking_uri: str | None = None  # sqlite:///FILE or http(s)://SERVER; null: MLFLOW_TRACKING_URI, outputs/mlflow.db
    experiment: str = "rlox"  # experiment of the run
    run_name: str | None = None  # name shown in the UI; null: the run folder's name
    artifacts: bool = True  # upload the best and last checkpoints and config.yaml

    def rules(self):
        yield "tracking_uri", self.tracking_uri is None or _is_store(self.tracking_uri), f"{_STORE}, or null"
        yield "experiment", bool(self.experiment), "not be empty"

    @property
    def in_effect(self) -> str:
        """`tracking_uri`, or the value of the environment variable MLFLOW_TRACKING_URI if `tracking_uri` is null.

        The variable also has the password that `masked` has taken out of `tracking_uri`.

        Raises
        ------
        ValueError
            If there is no such password, or if the variable names a store that rlox cannot write.
        """
        uri = self.tracking_uri
        if uri is not None and f"{HIDDEN}@" in uri:
            if masked(os.environ.get("MLFLOW_TRACKING_URI", "")) != uri:
                raise ValueError(
                    f"MlflowConfig: tracking_uri must be given again, since passwords are not stored, got {uri}; type "
                    "logger.mlflow.tracking_uri=URL with the password, or set MLFLOW_TRACKING_URI to it"
                )
        elif uri is not None:
            return uri
        uri = os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///outputs/mlflow.db"
        if not _is_store(uri):
            raise ValueError(
                f"MlflowConfig: MLFLOW_TRACKING_URI must {_STORE}, got {masked(uri)!r}; change it, or set "
                "logger.mlflow.tracking_uri"
            )
        return uri


_STORE = (
    "be sqlite:///FILE without options, or start with http://HOST or https://HOST, where a port is a number, and a "
    "blank, /, ? or # in a password is %20, %2F, %3F or %23"
)


def _is_store(uri: str) -> bool:
    sound = host_and_port(uri) is not None and not re.search(r"\s", uri)
    return names_file(uri) or (uri.startswith(("http://", "https://")) and sound)


@dataclass
class WandbConfig(Config):
    """Weights & Biases as a mirror of the run's record."""

    project: str = "rlox"  # project of the run
    entity: str | None = None  # team or user; null: your default
    mode: str | None = None  # online; offline: files in the run folder; disabled; null: WANDB_MODE, else online
    run_name: str | None = None  # name shown in the UI; null: the run folder's name
    group: str | None = None  # group of runs, such as a sweep
    tags: list[str] = field(default_factory=list)  # tags of the run
    artifacts: bool = True  # upload the best and last checkpoints and config.yaml

    def rules(self):
        yield "project", bool(self.project), "not be empty"
        yield "mode", self.mode in (None, *WANDB_MODES), f"be one of {', '.join(WANDB_MODES)}, or null for WANDB_MODE"

    @property
    def in_effect(self) -> str:
        """`mode`, or the value of the environment variable WANDB_MODE if `mode` is null.

        Raises
        ------
        ValueError
            If the variable is not a valid mode.
        """
        if self.mode is not None:
            return self.mode
        mode_text = os.environ.get("WANDB_MODE") or "online"
        mode = {"dryrun": "offline", "run": "online"}.get(mode_text, mode_text)  # older names of W&B
        if mode not in WANDB_MODES:
            raise ValueError(f"WandbConfig: WANDB_MODE must be one of {', '.join(WANDB_MODES)}, got {mode_text!r}")
        return mode


@dataclass
class TensorboardConfig(Config):
    """TensorBoard event files, mirrored from the run's record into the run folder."""

    folder: str = "tensorboard"  # below the run folder

    def rules(self):
        yield "folder", is_below(self.folder), "be a relative path without .."


@dataclass
class CsvConfig(Config):
    """A table of the run's metrics, one row per step, mirrored from the record into the run folder."""

    file: str = "metrics.csv"  # below the run folder

    def rules(self):
        yield "file", is_below(self.file) and self.file.endswith(".csv"), "be a relative path to a .csv, without .."


@dataclass
class LoggerConfig(Config):
    """Trackers that mirror the run's record; null: not used."""

    mlflow: MlflowConfig | None = None  # MLflow (logger=mlflow)
    wandb: WandbConfig | None = None  # Weights & Biases (logger=wandb)
    tensorboard: TensorboardConfig | None = None  # TensorBoard (logger=tensorboard)
    csv: CsvConfig | None = None  # a CSV file (logger=csv)


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


@dataclass
class RunConfig(Config):
    """One training run, as `rlox train` composes it."""

    seed: int = 0  # for initialisation, environments, sampling and shuffling
    total_timesteps: int = 100_000  # environment steps, summed over all environments; offline: updates
    schedule_timesteps: int | None = None  # steps at which schedules end; null: total_timesteps, even if raised
    max_time: str | None = operational(None)  # stop after this time, then save and evaluate: 90s, 30m, 2h; null: off
    init_from: str | None = None  # run or checkpoint with the initial weights and normalisation; null: random weights
    imports: list[str] = field(default_factory=list)  # modules to import first, for custom environments (--import)
    device: str = operational("auto")  # auto (cuda for large networks, if available), cpu or cuda
    backend: str = operational("auto")  # native (compiled), torch, or auto: native wherever that is exact
    threads: int = operational(1)  # CPU threads of PyTorch during training; 0: keep PyTorch's setting
    distributed: str | None = None  # ddp: data parallelism under torchrun; fsdp: also shard the model; or null
    distributed_timeout_s: float = operational(300.0)  # seconds that a rank waits for others in a collective step
    compile: bool = operational(False)  # compile the losses with PyTorch: faster on a GPU; a start of ten seconds
    matmul_precision: str = operational("highest")  # of float32 products on a GPU: highest, high (TF32) or medium
    deterministic: bool = operational(False)  # the same bits in every run on a GPU too, which is slower
    model: str | None = None  # language models: a folder, a run, a name on the hub, or module:FUNCTION (with --import)
    model_dtype: str | None = None  # bfloat16 stores its weights in half the memory, under adapters; null: float32
    tokenizer: str | None = None  # language models: another tokenizer, by folder or name; null: the model's tokenizer
    reward: Any = None  # language models: module:FUNCTION (--import), a reward model's run, a URL, or a list of these
    reward_weights: list[float] | None = None  # one for each reward; null: all 1
    conversation: str | None = None  # GRPO, several turns: module:FUNCTION that creates the answering environment
    sampler: str | None = None  # language models: sampler: vllm, vllm-local, sglang, tgi; null: the model itself
    sampler_url: str | None = operational(None)  # its URL, such as http://127.0.0.1:8000; token: RLOX_SAMPLER_TOKEN
    sampler_folder: str | None = operational(None)  # folder of new weights, same path on the server; null: temporary
    sampler_tolerance: float | None = operational(None)  # log-probability gap that ends a run; null: 1e-3, bfloat16 0.1
    sampler_on_failure: str = operational("stop")  # if the server is lost: stop with a checkpoint, or wait 10 minutes
    algo: Any = None  # the algorithm's hyper-parameters
    env: EnvConfig = field(default_factory=EnvConfig)  # the environment
    buffer: Any = None  # the replay memory of an off-policy algorithm; null for the others
    dataset: Any = None  # transitions (offline, or beside the memory of SAC, TD3 or DreamerV3), or texts; null: none
    eval: EvalConfig = field(default_factory=EvalConfig)  # evaluation during training
    checkpoint: CheckpointConfig = operational(CheckpointConfig)  # when checkpoints are written
    logger: LoggerConfig = operational(LoggerConfig)  # where metrics are mirrored
    remote: RemoteConfig = operational(RemoteConfig)  # workers on other machines that run the environments
    ray: RayConfig = operational(RayConfig)  # placement of actors on Ray, for algo.actors=ray
    preset: str | None = operational(None)  # the preset that the settings began with, as algo=PRESET chooses it
    reference: dict[str, Any] | None = operational(None)  # score that tuned settings must reach; set by conf/tuned

    def rules(self):
        yield "seed", 0 <= self.seed <= LARGEST_SEED, "be in [0, 2**63 - 10_000)"
        yield "total_timesteps", self.total_timesteps >= 1, "be >= 1"
        yield "schedule_timesteps", self.schedule_timesteps is None or self.schedule_timesteps >= 1, "be >= 1, or null"
        for name in ("total_timesteps", "schedule_timesteps"):
            yield name, (getattr(self, name) or 1) <= MOST_STEPS, f"be at most {MOST_STEPS}"
        if self.max_time is not None:
            seconds = self.max_seconds or 0
            yield "max_time", seconds > 0, "be a time above 0 such as 90s, 30m, 2h or 1h30m, or null"
            yield "max_time", seconds <= LONGEST_S, f"be at most {LONGEST_S}s, which is 68 years"
        yield "model", self.model is None or bool(self.model), "not be empty"
        yield "model_dtype", self.model_dtype in (None, "bfloat16"), "be bfloat16, or null for float32"
        if self.reward is not None:
            named = bool(self.rewards) and all(isinstance(name, str) and name for name in self.rewards)
            yield "reward", named, "be a name, or a list of names"
            yield "reward", not any(re.match(_USER, name) for name in self.rewards), f"{_NO_USER} RLOX_REWARD_TOKEN"
        weights = self.reward_weights
        yield "reward_weights", weights is None or len(weights) == len(self.rewards), "contain a number for each reward"
        named = self.sampler is None or self.sampler in SAMPLERS
        yield "sampler", named, f"be one of {', '.join(SAMPLERS)}, or null"
        url = self.sampler_url
        yield (
            "sampler_url",
            url is None or url.startswith(("http://", "https://")),
            "be a URL such as http://127.0.0.1:8000, or null",
        )
        yield "sampler_url", not re.match(_USER, url or ""), f"{_NO_USER} RLOX_SAMPLER_TOKEN"
        yield "sampler_folder", self.sampler_folder is None or bool(self.sampler_folder), "not be empty"
        gap = self.sampler_tolerance
        yield "sampler_tolerance", gap is None or 0 < gap < math.inf, "be > 0 and finite, or null"
        known = self.sampler_on_failure in ON_FAILURE
        yield "sampler_on_failure", known, f"be one of {', '.join(ON_FAILURE)}"
        yield "device", self.device in DEVICES, f"be one of {', '.join(DEVICES)}"
        yield "backend", self.backend in BACKENDS, f"be one of {', '.join(BACKENDS)}"
        yield "threads", 0 <= self.threads <= MOST_THREADS, f"be between 0 and {MOST_THREADS}"
        known = self.matmul_precision in MATMUL_PRECISIONS
        yield "matmul_precision", known, f"be one of {', '.join(MATMUL_PRECISIONS)}"
        known = self.distributed in (None, *DISTRIBUTED)
        yield "distributed", known, f"be {' or '.join(DISTRIBUTED)}, or null"
        away = bool(self.remote.addresses)
        yield (
            "remote",
            not (away and self.env.workers),
            "have no addresses if env.workers is set; pass it to rlox worker",
        )
        yield "remote", not (away and self.env.backend != "auto"), "have no addresses unless env.backend is auto"
        few = len(self.remote.addresses) <= self.env.n_envs
        yield "remote", few, f"have at most env.n_envs ({self.env.n_envs}) addresses"
        yield "distributed_timeout_s", 0 < self.distributed_timeout_s <= LONGEST_S, f"be > 0 and at most {LONGEST_S}"

    def conditions(self):
        for name, holds, needed in () if self.algo is None else self.algo.conditions():
            yield f"algo.{name}", holds, f"algo.{needed}"
        for name in ("dataset_share", "pretrain_updates"):
            yield f"algo.{name}", self.dataset is not None, "dataset=SOURCE"
        yield "algo.max_turns", self.conversation is not None, "conversation"

    @property
    def max_seconds(self) -> int | None:
        """`max_time` in seconds; None if it is null or not a valid time."""
        parts = re.fullmatch(r"(?=\d)(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", self.max_time or "")
        return sum(unit * int(n or 0) for unit, n in zip((3600, 60, 1), parts.groups(), strict=True)) if parts else None

    @property
    def offline(self) -> bool:
        """Whether the algorithm learns only from a dataset."""
        return self.algo.uses_dataset == "must"

    @property
    def language(self) -> bool:
        """Whether the algorithm trains a language model on rows of text."""
        return self.algo.uses_dataset == "text"

    @property
    def rewards(self) -> list[str]:
        """The names in `reward`."""
        return (
            [self.reward] if isinstance(self.reward, str) else [*self.reward] if isinstance(self.reward, list) else []
        )

    @property
    def eval_seed(self) -> int:
        return 10_000 + self.seed if self.eval.seed is None else self.eval.seed


def to_plain(config: RunConfig, algo: str) -> dict[str, Any]:
    """Return `config` as plain data for ``config.yaml``, with the algorithm's name first in its section.

    Raises
    ------
    ValueError
        If a value could not be read from that file again.
    """
    plain = asdict(config)
    plain["algo"] = {"name": algo, **plain["algo"]}
    files = [(plain, "init_from"), (plain, "sampler_folder"), (plain["buffer"] or {}, "folder")]
    for section, key in (*files, *((plain["remote"], key) for key in ("token_file", "ca", "cert", "key"))):
        if section.get(key) is not None:
            section[key] = os.path.abspath(section[key])
    own = [*((plain, key) for key in ("model", "tokenizer", "reward")), (plain["eval"], "dataset")]
    for section, key in (*own, (plain["dataset"] or {}, "source")):
        if isinstance(name := section.get(key), list):
            section[key] = [_located(one) for one in name]
        elif name is not None:
            section[key] = _located(name)
    if (wandb := config.logger.wandb) is not None:
        plain["logger"]["wandb"] = None if wandb.in_effect == "disabled" else {**vars(wandb), "mode": wandb.in_effect}
    if (mlflow := config.logger.mlflow) is not None:
        typed = mlflow.tracking_uri or ""
        uri = typed if f"{HIDDEN}@" in typed else mlflow.in_effect  # the password is only needed to train
        # The mirror runs later in another process: a path must not depend on the current working directory.
        uri = sqlite_uri(Path(os.path.abspath(sqlite_file(uri)))) if is_sqlite(uri) else uri
        plain["logger"]["mlflow"]["tracking_uri"] = masked(uri)
    require_plain(plain)
    if len(repr(plain)) > _SURELY_SHORT:
        _require_short(plain)
    return plain


def _require_short(plain: dict[str, Any]) -> None:
    """Raise a ValueError if ``config.yaml`` would be too long to be read again; the message names the longest value."""
    yaml = import_package("yaml", "cli", "logger")
    n_bytes = len(yaml.safe_dump({**plain, "backend": max(BACKENDS, key=len)}, sort_keys=False).encode())
    if n_bytes > MOST_BYTES:
        flat = {key: value for key, value in plain.items() if not isinstance(value, dict)}
        for section in plain.keys() - flat.keys():
            flat |= {f"{section}.{key}": value for key, value in plain[section].items()}
        longest = max(flat, key=lambda key: len(repr(flat[key])))
        raise ValueError(
            f"{longest} must be shorter: with it, the run's config.yaml would have {n_bytes:,} bytes, but at most "
            f"{MOST_BYTES:,} are read again; put long values in a file, and pass its path"
        )


def _located(name: str) -> str:
    """Return a path that exists as an absolute one; other names are of functions, on the hub or of servers."""
    return os.path.abspath(name) if os.path.exists(name) else name


def require_plain(data: Any, key: str = "", level: int = 1) -> None:
    """Check that `data`, the value of `key`, can be written into a configuration and read from it again.

    Raises
    ------
    ValueError
        For an interpolation, a control character, a byte that is not UTF-8, an integer of more than 64 bits, more
        than 32 levels, and anything that is neither text nor number.
    """
    where = f"{key} must be plain data, got " if key else ""
    if isinstance(data, (dict, list)):
        if level > MOST_LEVELS:
            raise ValueError(f"{where}more than {MOST_LEVELS} levels")
        for name, value in data.items() if isinstance(data, dict) else enumerate(data):
            require_plain(name, key, level)
            require_plain(value, f"{key}.{name}" if key else str(name), level + 1)
    elif isinstance(data, str) and "${" in data:
        raise ValueError(f"{where}the interpolation {data[:80]!r} instead of a value")
    elif isinstance(data, str) and not all(c.isprintable() or c.isspace() for c in data):
        raise ValueError(f"{where}the text {data[:80]!a} with control characters or bytes that are not UTF-8")
    elif data is not None and not isinstance(data, (str, int, float)):
        raise ValueError(f"{where}{data!r}, which is neither text nor number")
    elif isinstance(data, int) and abs(data) >= 2**64:
        raise ValueError(f"{where}an integer of more than 64 bits")


def differences(old: Any, new: Any, prefix: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Yield the dotted keys whose values differ, as ``(key, [old, new])``."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from differences(old.get(key), new.get(key), f"{prefix}.{key}" if prefix else str(key))
    elif old != new:
        yield prefix, [old, new]
