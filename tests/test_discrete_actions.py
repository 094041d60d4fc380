"""The cells of benchmarks/discrete_actions.py."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import discrete_actions
from rlox.config import tuned

NAMES = {"buffer_size": "size", "target_update_interval": "target_update_freq"}  # theirs -> ours


@pytest.mark.parametrize("cell", discrete_actions.CELLS)
def test_both_sides_have_the_same_settings(cell):
    theirs, ours = discrete_actions.their_settings(cell), tuned(*cell.split("-", 1))
    values = {**ours["algo"], **ours["buffer"]}
    for name, value in theirs["kw"].items():
        if name == "policy_kwargs":
            assert (value["n_quantiles"], value["net_arch"]) == (values["n_atoms"], values["hidden_sizes"])
        elif isinstance(value, dict):
            assert (value["falls_from"], values["learning_rate_schedule"]) == (values["learning_rate"], "linear")
        else:
            assert value == values[NAMES.get(name, name)], name
    assert theirs["steps"] == ours["total_timesteps"]
    assert values["adam_eps"] == 0.01 / theirs["kw"]["batch_size"]  # sb3-contrib's own default
    assert f"total_timesteps={theirs['steps']}" in discrete_actions.our_words(cell)
