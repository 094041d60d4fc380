"""Which algorithms are there, and what does each one compute? One file per algorithm, its update whole.

Adding one: a Config in `rlox.config`, a file here, a line in `rlox.training.table`, a YAML in ``conf/algo``.
"""

from rlox import lazy
from rlox.training.table import ALGORITHMS as ALGORITHMS

_EXPORTS = dict.fromkeys(("ALGORITHMS", "Entry", "algorithm_names", "entry_of", "resolve"), "rlox.training.table")
for _entry in ALGORITHMS.values():
    _EXPORTS |= {path.partition(":")[2]: path.partition(":")[0] for path in _entry}
_EXPORTS["BestOfN"] = "rlox.algorithms.best_of_n"  # it samples, and learns nothing
__getattr__, __dir__, __all__ = lazy(__name__, _EXPORTS)
