"""No algorithm spends more launches, copies or synchronisations than ``budgets.json`` allows.

``python tests/helpers/device_budgets.py --write`` lowers the limits after an improvement.
"""

import json

import pytest
from device_budgets import LIMITS, NAMES, spent

BUDGETS = json.loads(LIMITS.read_text())


def test_neither_a_step_nor_an_update_of_a_resident_training_waits_more_than_once():
    """A rollout of 16 vector steps waits once for its episodes, an update once for its metrics; nothing is sent."""
    resident = [name for name in NAMES if name.partition("-")[0] in ("ppo", "a2c", "mappo") and name != "mappo-host"]
    assert {"mappo-agents", "mappo-agents-bfloat16", "mappo-agents-deterministic", "ppo-bfloat16"} <= set(resident)
    for name in resident:
        for part in ("collection", "update"):
            work = BUDGETS[name][part]
            assert work["sync"] <= 1, (name, part)
            assert work["h2d"] == 0, (name, part)
    updates = {name: BUDGETS[name]["update"] for name in NAMES if "update" in BUDGETS[name]}
    sampled = ("dpo", "grpo", "online_dpo")  # these wait for tokens or for the reference, too
    assert all(work["sync"] <= 1 for name, work in updates.items() if name not in sampled)


@pytest.mark.parametrize("name", NAMES)
def test_the_work_of_the_host_stays_within_its_limits(name, pretended):
    found = spent(name)
    assert found.keys() == BUDGETS[name].keys()
    for part, work in found.items():
        assert work.keys() == BUDGETS[name][part].keys()
        for kind, number in work.items():
            limit = BUDGETS[name][part][kind]
            assert number <= 1.03 * limit + 0.1, f"{name}: {part}: {number} x {kind}, the limit is {limit}"
