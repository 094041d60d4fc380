"""Callbacks that the training loops call: evaluation, checkpoints, progress, advice, loggers."""

from rlox import lazy

_EXPORTS = {
    "AdviceCallback": "rlox.callbacks.advice",
    "plan_advice": "rlox.callbacks.advice",
    "Callback": "rlox.callbacks.base",
    "CallbackList": "rlox.callbacks.base",
    "CheckpointCallback": "rlox.callbacks.checkpoint",
    "CompletionsCallback": "rlox.callbacks.completions",
    "EvalCallback": "rlox.callbacks.evaluation",
    "History": "rlox.callbacks.base",
    "LoggerCallback": "rlox.callbacks.loggers",
    "RecordLogger": "rlox.callbacks.loggers",
    "PredictionsCallback": "rlox.callbacks.predictions",
    "ProgressCallback": "rlox.callbacks.progress",
    "TimingCallback": "rlox.callbacks.progress",
    "EarlyStoppingCallback": "rlox.callbacks.stopping",
    "TimeLimitCallback": "rlox.callbacks.stopping",
    "VideoCallback": "rlox.callbacks.video",
}
__getattr__, __dir__, __all__ = lazy(__name__, _EXPORTS)
