"""Comparisons of trainings on two devices."""

from __future__ import annotations

import math

import numpy as np
from small_algorithms import OFFLINE, learner, make, of_sequences, off_policy

from rlox.nn import graphs


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
    assert not wrong, f"(ours, theirs) differ: {wrong}"


# Settings for algorithms whose updates are captured as graphs.
CAPTURED = {
    "ppo": {"n_epochs": 2, "batch_size": 16, "clip_eps_schedule": "linear", "clip_eps": 0.05},
    "a2c": {"normalize_advantages": True},
    "dqn": {"double_dqn": False},
    "td3": {"policy_delay": 2},
    "sac": {"prioritized": True},
    "sac-discrete": {"policy_delay": 2},
    "appo": {"n_epochs": 2, "batch_size": 16, "clip_eps_schedule": "linear"},
    "impala": {"replay_rollouts": 1},
    "mappo": {"n_epochs": 2, "batch_size": 16, "value_norm": True},
    "dreamer": {"precision": "float32"},
    "bc": {},
    "cql": {"auto_alpha": True},
    "iql": {"policy_schedule": "cosine"},
    "td3_bc": {"policy_delay": 2},
}


def require_same_with_and_without_graphs(name, monkeypatch, **settings):
    """Train once as usual, so that updates are replayed, and once with every update run by Python."""
    settings = {"learning_rate_schedule": "linear", "learning_rate": 1e-3, **CAPTURED[name], **settings}
    trained, metrics = [], []
    for n_eager in (graphs.N_EAGER, 1_000_000):
        monkeypatch.setattr(graphs, "N_EAGER", n_eager)
        algorithm = (learner if name in OFFLINE else make)(name, device="cuda", **settings)
        assert algorithm.backend.captures
        length = 16 if name in OFFLINE else 72 if of_sequences(name) else 168 if off_policy(name) else 6 * 64
        metrics.append(algorithm.train(length))
        trained.append(weights(algorithm))
    require_close(*metrics, rel=1e-4, abs=1e-5)
    for key, array in trained[1].items():
        np.testing.assert_allclose(trained[0][key], array, rtol=0, atol=1e-5, err_msg=key)
