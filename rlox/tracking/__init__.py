"""Trackers as mirrors of a run's record.

The trainer writes ``metrics.jsonl`` (`Record`) and never imports, calls or waits for a tracker. One
background writer per store (``rlox.tracking.writer``) copies it to MLflow, W&B, TensorBoard's event files or a
CSV table. `sync` runs the same writer later, for runs that a dead server or a killed machine left incomplete.
"""

from rlox import lazy

_EXPORTS = {
    "LOGGERS": "rlox.tracking.loggers",
    "Report": "rlox.tracking.mirrors",
    "logger_class": "rlox.tracking.loggers",
    "start_mirrors": "rlox.tracking.mirrors",
    "status": "rlox.tracking.mirrors",
    "sync": "rlox.tracking.mirrors",
    "wait": "rlox.tracking.mirrors",
    "Record": "rlox.tracking.record",
    "durable_rows": "rlox.tracking.record",
    "is_alive": "rlox.tracking.record",
    "read_rows": "rlox.tracking.record",
}
__getattr__, __dir__, __all__ = lazy(__name__, _EXPORTS)
