"""An agent without networks, whose state shows what it has observed."""

import numpy as np


class Counting:
    """Random actions; the state is [steps in this episode, sum of the previous observation | previous action]."""

    def __init__(self, spec):
        self.spec, self.width = spec, spec.model_width
        self.seen = []

    def initial(self, n):
        return np.zeros((n, 2 + self.width), np.float32)

    def act(self, carry, obs, is_first, rng, deterministic=False):
        n, spec = len(obs), self.spec
        carry = np.where(is_first[:, None], np.float32(0), carry)
        self.seen.append((carry.copy(), obs.copy(), is_first.copy()))
        if not deterministic:
            actions = spec.random_actions(rng, n)
        elif spec.continuous:
            actions = np.repeat((spec.act_low + spec.act_high)[None] / 2, n, 0)
        else:
            actions = np.zeros((n, *spec.action_shape), np.int64)
        taken, sums = spec.to_model(actions), obs.reshape(n, -1).sum(1, dtype=np.float32)
        return actions, taken, np.concatenate([carry[:, :1] + 1, sums[:, None], taken], 1)


class Foreseeing(Counting):
    """Predicts that observations increase by 1 in each step after the last one it observed."""

    def open_loop(self, carry, obs, actions, context, rng):
        assert actions.shape == (*obs.shape[:2], self.width)
        assert 0 < rng.uniform(1)[0] < 1
        self.carried = carry
        horizon = obs.shape[1] - context
        after = np.arange(1, horizon + 1).reshape(1, -1, *[1] * (obs.ndim - 2))
        return obs[:, context - 1 : context].astype(np.float32) + after.astype(np.float32)
