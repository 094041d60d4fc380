"""Create a backend by the name of its kind."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from rlox.config import nearest, shown
from rlox.llm.backends.base import Backend

_CLASSES = {
    "hf": ("rlox.llm.backends.local", "HFBackend"),
    "vllm": ("rlox.llm.backends.vllm_server", "VLLMBackend"),
    "vllm-local": ("rlox.llm.backends.vllm_local", "VLLMLocalBackend"),
    "sglang": ("rlox.llm.backends.sglang_server", "SGLangBackend"),
    "tgi": ("rlox.llm.backends.tgi_server", "TGIBackend"),
}
KINDS = tuple(_CLASSES)


def create_backend(kind: str, **settings: Any) -> Backend:
    """Create a backend of a `kind`, without contacting a server yet.

    Parameters
    ----------
    kind : str
        ``hf``: a model in this process. ``vllm``, ``sglang``, ``tgi``: a server at ``url=``. ``vllm-local``: vLLM in
        this process.
    **settings
        Arguments of its class: `HFBackend`, `VLLMBackend`, `VLLMLocalBackend`, `SGLangBackend` or `TGIBackend`.

    Raises
    ------
    ValueError
        If the kind is unknown, or a setting is out of range.
    TypeError
        If a setting is unknown or missing.
    ImportError
        For ``vllm-local``, if vLLM is not installed.

    Examples
    --------
    >>> backend = create_backend("vllm", url="http://127.0.0.1:8000", on_failure="wait")
    >>> backend.capabilities.weight_sync
    True
    """
    if kind not in _CLASSES:
        raise ValueError(f"create_backend: kind must be one of {', '.join(KINDS)}, got {shown(kind)}")
    module, name = _CLASSES[kind]
    cls = getattr(import_module(module), name)
    parameters = inspect.signature(cls).parameters
    known = [key for key, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD]
    if len(known) == len(parameters):
        for key in settings:
            if key not in known:
                raise TypeError(f"create_backend: {kind} has no setting {key!r}; {nearest(key, known)}")
    for key in known:
        if parameters[key].default is inspect.Parameter.empty and key not in settings:
            raise TypeError(f"create_backend: {kind} needs {key}=…")
    return cls(**settings)
