"""Saving and loading language models: checkpoints, tokenizers, and the base models of adapters."""

from __future__ import annotations

import contextlib
import copy
import difflib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from rlox.checkpoint import Checkpoint, load_checkpoint, one_line
from rlox.config import shown
from rlox.config.servers import unreachable_hub
from rlox.llm.models.adapters import fingerprint, require_base, with_adapters
from rlox.llm.models.language import LanguageModel
from rlox.nn.sharding import Full, put_

# Settings of a tokenizer that say from where it was loaded.
_OF_LOADING = ("is_local", "local_files_only", "name_or_path")
# Types of frozen weights under adapters, besides float32.
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_MOST_TEXT = 64 << 20  # bytes of a tokenizer's file
# Settings of a tokenizer beside its file, in checkpoints of 0.12.0.
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template", "padding_side")


class LoadedModel(NamedTuple):
    """A model that was loaded for a checkpoint, or by its name."""

    module: nn.Module
    tokenizer: Any
    eos: tuple[int, ...] | None
    source: str | None


def description(model: LanguageModel, base: str | None, source: str | None, rewards: bool) -> dict[str, Any]:
    """Return the description of a model for a checkpoint's header, as JSON values.

    `base` is the fingerprint of the weights under its adapters; `rewards`: it returns rewards instead of tokens.
    """
    config = None if model.config is None else json.loads(model.config.to_json_string(use_diff=False))
    generation = getattr(model.base, "generation_config", None) if model.hugging_face else None
    return {
        "class": model.kind,
        "config": config,
        "attention": model.attention,
        "generation": None if generation is None else json.loads(generation.to_json_string()),
        "eos": list(model.eos),
        "source": source,
        "adapters": hasattr(model.module, "disable_adapter"),
        "dtype": str(getattr(model.base, "dtype", torch.float32)).removeprefix("torch."),
        "base": base,
        "rewards": rewards,
    }


def tokenizer_state(tokenizer: Any) -> dict[str, np.ndarray]:
    """Return the files that a tokenizer writes, u8 each, by their names; an empty dict if it cannot write any."""
    if not hasattr(tokenizer, "save_pretrained"):
        return {}
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.suppress(NotImplementedError):  # one without a vocabulary's file
            tokenizer.save_pretrained(folder)
        config = Path(folder, "tokenizer_config.json")
        if config.is_file():
            settings = json.loads(config.read_bytes())
            config.write_text(json.dumps({name: x for name, x in settings.items() if name not in _OF_LOADING}))
        paths = [path for path in sorted(Path(folder).rglob("*")) if path.is_file() and path.stat().st_size > 0]
        return {path.relative_to(folder).as_posix(): np.frombuffer(path.read_bytes(), np.uint8) for path in paths}


def _tokenizer(state: Mapping[str, np.ndarray], where: str) -> Any:
    if not state:
        return None
    import_transformers(where)
    if any(array.nbytes > _MOST_TEXT or array.dtype != np.uint8 for array in state.values()):
        raise ValueError(f"{where}: a file of the tokenizer must have at most {_MOST_TEXT:,} bytes")
    if "settings" in state:
        return _older_tokenizer(state, where)
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        for name, array in state.items():
            # A name must not lead out of the folder.
            if not re.fullmatch(r"([A-Za-z0-9_-]+/)?[A-Za-z0-9_-][A-Za-z0-9._-]*", name):
                raise ValueError(f"{where}: the tokenizer is damaged: {one_line(name, 60)} is no name of its files")
            path = Path(folder, name)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(array.tobytes())
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as e:  # the Rust library raises plain exceptions
            raise ValueError(f"{where}: the tokenizer is damaged: {one_line(e)}; pass tokenizer=…") from e
    tokenizer.name_or_path = ""
    return tokenizer


def _older_tokenizer(state: Mapping[str, np.ndarray], where: str) -> Any:
    """Return the tokenizer of a checkpoint of 0.12.0."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    try:
        settings = json.loads(state["settings"].tobytes().decode())
        tokenizer = Tokenizer.from_str(state["tokenizer"].tobytes().decode())
        special = {name: settings[name] for name in _SPECIAL if isinstance(settings.get(name), str)}
    except Exception as e:  # the Rust library raises plain exceptions
        raise ValueError(f"{where}: the tokenizer is damaged: {one_line(e)}") from e
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def model_of(
    checkpoint: Checkpoint,
    model: nn.Module | None,
    tokenizer: Any,
    where: str,
    path: str | os.PathLike,
    remedy: str = "pass model=…",
) -> LoadedModel:
    """Return the model for `checkpoint`: `model`, or a new one whose weights must still be replaced.

    `remedy` says what to do if the model of adapters is not here.

    Raises ValueError if a custom module was not passed, or the base model of adapters is no longer where it was.
    """
    saved = checkpoint.header.get("model")
    if not isinstance(saved, dict):
        raise ValueError(f"{where}: {path} is damaged: its header must describe its model")
    tokenizer = _tokenizer(checkpoint.tensors.get("tokenizer", {}), where) if tokenizer is None else tokenizer
    ends = saved.get("eos")
    eos = tuple(i for i in ends if isinstance(i, int)) if isinstance(ends, list) else None
    source = saved.get("source") if isinstance(saved.get("source"), str) else None
    if model is not None:
        return LoadedModel(model, tokenizer, eos, source)
    if saved.get("config") is None:
        raise ValueError(
            f"{where}: {path} holds a module of your own; pass model={one_line(saved.get('class'), 60)}(...)"
        )
    if saved.get("adapters"):
        local = None if source is None else _find_local(source)
        if local is None:
            raise ValueError(
                f"{where}: {path} contains only adapters, and their model {shown(source)} is not here; {remedy}"
            )
        dtype = _DTYPES.get(str(saved.get("dtype")), torch.float32)
        return LoadedModel(load_model(local, where, dtype).module, tokenizer, eos, source)
    return LoadedModel(_make_module(saved, where, path), tokenizer, eos, source)


def _find_local(source: str) -> str | None:
    """Return `source` if it is a path, or its folder in the cache; None if neither is here. Nothing is downloaded."""
    if Path(source).exists():
        return source
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(source, local_files_only=True)
    except (OSError, ValueError):
        return None


def _make_module(saved: Mapping[str, Any], where: str, path: Any) -> nn.Module:
    """Create a Hugging Face model from its `description`, without its weights."""
    import_transformers(where)
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    try:
        config = saved["config"]
        settings = {name: value for name, value in config.items() if name not in ("auto_map", "model_type")}
        made = AutoConfig.for_model(config["model_type"], **settings)
        module = AutoModelForCausalLM.from_config(made, attn_implementation=_attention(saved.get("attention")))
        if isinstance(generation := saved.get("generation"), dict):
            module.generation_config = GenerationConfig.from_dict(generation)
        return module
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        raise ValueError(
            f"{where}: {path} holds a model that the installed transformers cannot create: {one_line(e)}"
        ) from e


def _attention(saved: Any) -> str | None:
    """Return the name of a model's attention, for `from_config`; None if it is unknown, or not on this machine."""
    from transformers.utils import is_flash_attn_2_available

    flash = torch.cuda.is_available() and is_flash_attn_2_available()
    names = ("eager", "sdpa", "flex_attention", *(("flash_attention_2",) if flash else ()))
    return saved if saved in names else None


def load_model(source: str, where: str = "load_model", dtype: torch.dtype = torch.float32) -> LoadedModel:
    """Load a causal model and its tokenizer by folder or name.

    Parameters
    ----------
    source : str
        A folder that `save_pretrained` wrote, the folder or a checkpoint of an rlox run, or a name on the Hugging Face
        Hub (with ``HF_HUB_OFFLINE=1``, of a model that was downloaded before).
    where : str
        What asks for it, the beginning of messages.
    dtype : torch.dtype
        Type of the weights. Trained weights must be float32; under adapters, bfloat16 takes half of the memory.

    Raises
    ------
    ImportError
        If transformers is not installed.
    ValueError
        If the model does not exist, cannot be read, or lacks some of its weights.
    """
    import_transformers(where)
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    path = Path(source)
    if (file := _checkpoint_file(path)) is not None:
        loaded = _from_run(file, where)
        return loaded if dtype == torch.float32 else loaded._replace(module=loaded.module.to(dtype))
    if path.exists() and not (path / "config.json").is_file():
        raise ValueError(f"{where}: model={source} must contain config.json, or be the folder of a run; it is neither")
    # A name on the hub is NAME or OWNER/NAME.
    if not path.exists() and (source.startswith((".", "/", "~")) or source.count("/") > 1):
        raise ValueError(f"{where}: model={source} must be a folder or a name on the hub, and there is no such folder")
    located = _locate_source(where, "model", source)
    try:
        # Show progress only if a person is watching.
        with contextlib.nullcontext() if sys.stderr.isatty() else without_bars():
            module, found = AutoModelForCausalLM.from_pretrained(located, dtype=dtype, output_loading_info=True)
    except (OSError, ValueError, RuntimeError, SafetensorError) as e:
        raise ValueError(f"{where}: model={source} cannot be loaded: {one_line(e, 400)}{_hint(source)}") from e
    if missing := sorted(found["missing_keys"]):  # transformers has set them to random numbers
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(
            f"{where}: model={source} must contain all weights of its config.json, but {missing[0]}{more} is missing"
        )
    tokenizer = None  # without a tokenizer, only code that reads text raises an error
    with contextlib.suppress(ValueError):
        tokenizer = load_tokenizer(source, where)
    return LoadedModel(module, tokenizer, None, str(path.absolute()) if path.exists() else source)


def _locate_source(where: str, key: str, source: str) -> str:
    """Return `source`, or its folder in the cache if the hub cannot be asked, which would take minutes of retries."""
    reason = None if Path(source).exists() else unreachable_hub()
    if reason is None:
        return source
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(source, local_files_only=True)
    except (OSError, ValueError) as e:
        raise ValueError(
            f"{where}: {key}={source} must be a folder, or a model that was downloaded or is on the hub ({reason})"
            f"{_hint(source)}"
        ) from e


def _hint(source: str) -> str:
    """Return the nearest name of a model that is on this machine, if `source` itself is not."""
    from huggingface_hub.constants import HF_HUB_CACHE

    if Path(source).exists():
        return ""
    names = [path.name.removeprefix("models--").replace("--", "/") for path in Path(HF_HUB_CACHE).glob("models--*")]
    with contextlib.suppress(OSError):
        beside = [folder for folder in Path(source).parent.iterdir() if folder.is_dir()]
        holding = [str(f) for f in beside if (f / "config.json").is_file() or _checkpoint_file(f) is not None]
        names = [*holding, *names]
    near = difflib.get_close_matches(source, names, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Hide the progress bars that transformers draws while it reads or writes weights."""
    from transformers.utils import logging

    shown_before = logging.is_progress_bar_enabled()
    if shown_before:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown_before:
            logging.enable_progress_bar()


def load_tokenizer(source: str, where: str = "load_tokenizer") -> Any:
    """Load a tokenizer by folder or name.

    Raises
    ------
    ImportError
        If transformers is not installed.
    ValueError
        If the tokenizer does not exist, is empty, or cannot be read.
    """
    import_transformers(where)
    from transformers import AutoTokenizer

    located = _locate_source(where, "tokenizer", source)
    try:
        tokenizer = AutoTokenizer.from_pretrained(located)
    except (OSError, ValueError, KeyError) as e:
        raise ValueError(f"{where}: tokenizer={source} cannot be loaded: {one_line(e, 400)}{_hint(source)}") from e
    # For a model without a tokenizer's files, transformers makes one that has only the special tokens of its class.
    if tokenizer.get_vocab().keys() <= {*tokenizer.all_special_tokens, *tokenizer.added_tokens_encoder}:
        raise ValueError(
            f"{where}: tokenizer={source} must have a vocabulary, but there is none; name the tokenizer of the model "
            "that it was made from"
        )
    return tokenizer


def _checkpoint_file(path: Path) -> Path | None:
    if path.is_file() and path.suffix == ".safetensors":
        return path
    files = (path / "checkpoints" / f"{kind}.safetensors" for kind in ("best", "last"))
    return next((file for file in files if file.is_file()), None)


def _from_run(file: Path, where: str) -> LoadedModel:
    """Load the model of an rlox checkpoint, with its adapters merged into the weights."""
    checkpoint = load_checkpoint(file)
    saved, config = checkpoint.header.get("model"), checkpoint.header["config"]
    if not isinstance(saved, dict) or saved.get("rewards"):
        raise ValueError(
            f"{where}: model={file} must hold a language model, got {one_line(checkpoint.header['algorithm'], 40)}"
        )
    if saved.get("adapters") and config.get("lora_rank") is None:
        raise ValueError(
            f"{where}: model={file} must hold a whole model, or adapters that rlox made, got those of a peft model of "
            "your own; load it with from_checkpoint(path, model=…), and name a folder of its save_pretrained"
        )
    remedy = "download it first, or name it as model=… and pass this run as init_from=…"
    module, tokenizer, eos, _ = model_of(checkpoint, None, None, where, file, remedy)
    model = LanguageModel(module, tokenizer, eos, where)
    if saved.get("adapters"):
        model = with_adapters(model, config["lora_rank"], config["lora_alpha"], config["lora_targets"], 0)
        require_base(saved, fingerprint(model.module), where, file)
    load_weights_(model.module, checkpoint.tensors["policy"], f"{where}: {file}")
    merged: Any = model.module
    if hasattr(merged, "merge_and_unload"):
        merged = merged.merge_and_unload().requires_grad_(True)  # peft has frozen the weights under its adapters
    return LoadedModel(merged, tokenizer, eos, str(file.absolute()))


def weights(module: nn.Module, full: Full | None = None) -> dict[str, np.ndarray]:
    """Return the trained tensors, and without adapters also all others; shared tensors are returned only once.

    `full` gathers tensors that are sharded across several processes.
    """
    return {name: _numpy(tensor if full is None else full(tensor)) for name, tensor in _read_tensors(module).items()}


def _read_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that `weights` returns."""
    adapted = any(hasattr(part, "disable_adapter") for part in module.modules())
    tensors: dict[str, torch.Tensor] = {n: p for n, p in module.named_parameters() if p.requires_grad or not adapted}
    if not adapted:
        saved = module.state_dict().keys()
        tensors |= {name: buffer for name, buffer in module.named_buffers() if name in saved}
    return tensors


def load_weights_(module: nn.Module, arrays: Mapping[str, np.ndarray], where: str) -> None:
    """Load the result of `weights` into `module`; raise a ValueError that names the first tensor that does not fit."""
    expected = _read_tensors(module)
    if others := sorted(expected.keys() ^ arrays.keys()):
        raise ValueError(
            f"{where}: the model must have the weights of the checkpoint, got others: {one_line(others[0], 100)} is "
            f"only in {'the model' if others[0] in expected else 'the checkpoint'}"
        )
    for name, array in arrays.items():
        if array.shape != tuple(expected[name].shape):
            raise ValueError(
                f"{where}: {name} of the model must have shape {array.shape}, as in the checkpoint, got "
                f"{tuple(expected[name].shape)}"
            )
    for name, array in arrays.items():
        put_(expected[name], array)


def _numpy(value: torch.Tensor) -> np.ndarray:
    # NumPy has no bfloat16.
    tensor = value.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def copy_merged(model: LanguageModel) -> nn.Module:
    """Return the model's module, or if it has adapters a copy with the adapters merged into the weights."""
    has_adapters = hasattr(model.module, "merge_and_unload")
    module: Any = copy.deepcopy(model.module).merge_and_unload() if has_adapters else model.module
    return module


def save_pretrained(
    model: LanguageModel, folder: str | os.PathLike, where: str, with_tokenizer: bool = True, adapters: bool = False
) -> None:
    """Write model and tokenizer in the format of Hugging Face's libraries; training may continue afterwards.

    With `adapters`, write only the adapters; otherwise they are merged into the written weights.
    """
    if not model.hugging_face:
        raise ValueError(f"{where}.save_pretrained: model must be one of Hugging Face's, got a module of your own")
    module: Any = model.module if adapters else copy_merged(model)
    module.save_pretrained(folder, **({"selected_adapters": [module.active_adapter]} if adapters else {}))
    if with_tokenizer and model.tokenizer is not None:
        model.tokenizer.save_pretrained(folder)


def import_transformers(where: str) -> None:
    """Raise an ImportError with the command to install transformers if it is missing."""
    try:
        import transformers  # noqa: F401
    except ImportError as e:
        raise ImportError(f'{where}: language models need transformers; pip install "rlox-cli[llm]"') from e
