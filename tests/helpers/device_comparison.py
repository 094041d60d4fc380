"""Comparisons of trainings on two devices."""

from __future__ import annotations

import math

import numpy as np


def weights(algorithm):
    """Copies of all arrays of a checkpoint that the learner changes, by section and name.

    PyTorch's own generators are left out: each device has another one.
    """
    sections = algorithm._checkpoint().tensors
    return {
        f"{section}.{name}": np.array(array)
        for section, arrays in sections.items()
        if section not in ("environment", "statistics", "generators")
        for name, array in arrays.items()
    }


def differing(ours, theirs):
    """The names of arrays that are not equal in all bits."""
    assert ours.keys() == theirs.keys()
    return [name for name, array in ours.items() if not np.array_equal(array, theirs[name], equal_nan=True)]


def require_close(ours, theirs, rel=1e-3, abs=1e-4):
    """Require the metrics of two trainings to be equal up to rounding; both may be NaN, and times differ."""
    ours, theirs = ({k: v for k, v in m.items() if not k.startswith("time/")} for m in (ours, theirs))
    assert ours.keys() == theirs.keys()
    wrong = {
        name: (ours[name], theirs[name])
        for name in ours
        if not (math.isnan(ours[name]) and math.isnan(theirs[name]))
        and not math.isclose(ours[name], theirs[name], rel_tol=rel, abs_tol=abs)
    }
    assert wrong == {}
