"""Backends that sample completions: this process, or an inference server that receives new weights during training.

`create_backend` creates a backend by its kind; `rlox.training.post_training.LLMAlgorithm` takes it as ``sampler=``.
"""

from rlox import lazy

_EXPORTS = {
    "Backend": "rlox.llm.backends.base",
    "Capabilities": "rlox.llm.backends.base",
    "HFBackend": "rlox.llm.backends.local",
    "HTTPBackend": "rlox.llm.backends.wire",
    "KINDS": "rlox.llm.backends.create",
    "SGLangBackend": "rlox.llm.backends.sglang_server",
    "Served": "rlox.llm.backends.served",
    "ServerLost": "rlox.llm.client",
    "TGIBackend": "rlox.llm.backends.tgi_server",
    "VLLMBackend": "rlox.llm.backends.vllm_server",
    "VLLMLocalBackend": "rlox.llm.backends.vllm_local",
    "create_backend": "rlox.llm.backends.create",
}
__getattr__, __dir__, __all__ = lazy(__name__, _EXPORTS)
