"""Saved state of a run: checkpoint files, and the counters and random streams that they contain."""

from rlox import lazy

_EXPORTS = {
    "Counters": "rlox.checkpoint.counters",
    "Checkpoint": "rlox.checkpoint.file",
    "load_checkpoint": "rlox.checkpoint.file",
    "read_header": "rlox.checkpoint.file",
    "save_checkpoint": "rlox.checkpoint.file",
    "FORMAT_VERSION": "rlox.checkpoint.header",
    "HEADER_KEYS": "rlox.checkpoint.header",
    "is_count": "rlox.checkpoint.checks",
    "one_line": "rlox.checkpoint.checks",
    "parse_json": "rlox.checkpoint.header",
    "trained_for": "rlox.checkpoint.header",
    "Stream": "rlox.checkpoint.streams",
    "versions": "rlox.checkpoint.header",
    "decode_value": "rlox.checkpoint.values",
    "encode_value": "rlox.checkpoint.values",
    "find_lost": "rlox.checkpoint.values",
}
__getattr__, __dir__, __all__ = lazy(__name__, _EXPORTS)
