"""Returns of recorded transitions, against a loop over the steps."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlox.offline.returns import returns_to_go


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(["", "terminated", "truncated"]), min_size=1, max_size=40),
    st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    st.integers(1, 50),
)
def test_returns_are_sums_up_to_the_end_of_the_episode(ends, gamma, most):
    n = len(ends)
    rewards = np.random.default_rng(n).normal(size=n).astype(np.float32)
    flags = [np.array([end == name for end in ends]) for name in ("terminated", "truncated")]
    returns, rest, last = returns_to_go(rewards, *flags, np.arange(n), gamma, most)
    for row in range(n):
        total, discount, at = 0.0, 1.0, row
        while True:
            total += discount * float(rewards[at])
            discount *= gamma
            if ends[at] or at == n - 1 or at - row == most - 1:
                break
            at += 1
        assert returns[row] == pytest.approx(total, abs=1e-9)
        assert last[row] == at
        # The rest after a termination is worth 0; otherwise it is discounted.
        assert rest[row] == pytest.approx(0.0 if ends[at] == "terminated" else discount)
