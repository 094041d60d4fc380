"""The algorithms: one file per algorithm, which contains its whole update.

To add an algorithm, add a Config to `rlox.config`, a file here, a line to `rlox.algorithms.table`, and a YAML file to
``conf/algo``.
"""

from rlox import lazy
from rlox.algorithms.table import ALGORITHMS as ALGORITHMS

_TABLE = ("ALGORITHMS", "Entry", "algorithm_names", "class_of", "entry_of", "load", "resolve")
_EXPORTS = dict.fromkeys(_TABLE, "rlox.algorithms.table")
for _entry in ALGORITHMS.values():
    _EXPORTS |= {path.partition(":")[2]: path.partition(":")[0] for path in _entry if path}
_EXPORTS["BestOfN"] = "rlox.algorithms.best_of_n"  # it only samples and does not learn
__getattr__, __dir__, __all__ = lazy(__name__, _EXPORTS)
