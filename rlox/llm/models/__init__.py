"""Language models behind one interface, with their adapters, references, reward heads and files."""

from rlox import lazy

_EXPORTS = {
    "LanguageModel": "rlox.llm.models.language",
    "Reference": "rlox.llm.models.reference",
    "RewardHead": "rlox.llm.models.heads",
    "Scores": "rlox.llm.models.language",
    "load_model": "rlox.llm.models.saved",
    "load_tokenizer": "rlox.llm.models.saved",
    "save_pretrained": "rlox.llm.models.saved",
    "with_adapters": "rlox.llm.models.adapters",
}
__getattr__, __dir__, __all__ = lazy(__name__, _EXPORTS)
