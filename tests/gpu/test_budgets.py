"""No algorithm spends more launches, copies or synchronisations than ``budgets.json`` allows.

``python tests/helpers/device_budgets.py --write`` lowers the limits after an improvement.
"""

import json

import pytest
from device_budgets import LIMITS, NAMES, spent

BUDGETS = json.loads(LIMITS.read_text())


@pytest.mark.parametrize("name", NAMES)
def test_the_work_of_the_host_stays_within_its_limits(name, pretended):
    for part, work in spent(name).items():
        for kind, number in work.items():
            limit = BUDGETS[name][part][kind]
            assert number <= 1.03 * limit + 0.1, f"{name}: {part}: {number} x {kind}, the limit is {limit}"
