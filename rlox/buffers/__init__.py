"""Replay memories: the table of them, the interface that they must provide, and their files next to a checkpoint."""

from rlox import lazy

_EXPORTS = {
    "Footprint": "rlox.buffers.sizes",
    "footprint": "rlox.buffers.sizes",
    "Buffer": "rlox.buffers.protocols",
    "OfflineDataset": "rlox.buffers.protocols",
    "BUFFERS": "rlox.buffers.table",
    "buffer_class": "rlox.buffers.table",
    "buffer_config": "rlox.buffers.table",
    "buffer_config_class": "rlox.buffers.table",
    "buffer_names": "rlox.buffers.table",
    "make_buffer": "rlox.buffers.table",
    "register_buffer": "rlox.buffers.table",
    "takes_masks": "rlox.buffers.table",
}
__getattr__, __dir__, __all__ = lazy(__name__, _EXPORTS)
