"""Restore an algorithm that trains a language model: its model, its rows and its reference."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from rlox.checkpoint import load_checkpoint
from rlox.config import shown
from rlox.llm.models.adapters import require_base
from rlox.llm.models.saved import model_of
from rlox.training.restoring import explained, require_algorithm


def with_model(
    cls: Any,
    path: str | os.PathLike,
    model: nn.Module | None,
    ref_model: nn.Module | None,
    tokenizer: Any,
    arguments: dict[str, Any],
) -> Any:
    """Restore an algorithm of class `cls`; `arguments` are the others of its constructor.

    Raises the errors of `LLMAlgorithm.from_checkpoint`.
    """
    where, checkpoint = f"{cls.__name__}.from_checkpoint", load_checkpoint(path, mapped=True)
    header = checkpoint.header
    require_algorithm(cls, header, path)
    typed = {name: value for name, value in arguments.items() if name in cls.Config.__dataclass_fields__}
    kept = {} if "config" in arguments else header["config"]
    with explained(f"{where}: {path}", kinds=(TypeError, ValueError)):
        config = arguments.get("config") or cls.Config.from_kwargs(cls.__name__, **{**kept, **typed})
    loaded = model_of(checkpoint, model, tokenizer, where, path)
    others = {name: value for name, value in arguments.items() if name not in typed and name != "config"}
    own = {"tokenizer": loaded.tokenizer, "eos_token_id": loaded.eos, "source": loaded.source, "config": config}
    own |= {"seed": header["seed"], "threads": header["threads"], **others}
    algorithm = cls(loaded.module, ref_model if cls.has_reference else None, **own)
    require_base(header["model"], algorithm._base, where, path)
    saved = header.get("rows")
    known = saved.get("fingerprint") if isinstance(saved, Mapping) else None
    if algorithm.rows is not None and known not in (None, algorithm.rows.fingerprint):
        raise ValueError(
            f"{where}: dataset must contain the {shown(saved.get('n'))} rows that {path} was trained on, got "
            f"{len(algorithm.rows)} others; to learn from them create a new {cls.__name__} and call init_from(path)"
            f"{', which also makes these weights its reference' if cls.has_reference else ''}"
        )
    if ref_model is None and algorithm.reference is not None:
        if header.get("reference") == "given":
            algorithm.reference.lost = True
            algorithm._parts.pop("reference", None)
        elif header.get("reference") == "kept":
            algorithm._freeze_adapters()
        elif header.get("reference") == "switched":
            algorithm.reference.frozen = None
            algorithm._parts.pop("reference", None)
    if "reference" in algorithm._parts and "reference" not in checkpoint.tensors:
        raise ValueError(
            f"{where}: {path} contains no reference, and this training needs one; pass ref_model=… (without "
            f"ref_sync_every), or create a new {cls.__name__} and call init_from(path), which makes these weights its "
            "reference"
        )
    kinds = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
    with explained(f"{where}: {path} cannot be restored", kinds=kinds):  # a MemoryError is not the file's fault
        algorithm._restore(algorithm.ranks.own(checkpoint, algorithm.seed), same_env=False)
    if isinstance(saved, Mapping) and algorithm._order is not None:
        algorithm._order.start_at(saved, algorithm.counters.updates, header["config"], config.batch_size, where)
    return algorithm
