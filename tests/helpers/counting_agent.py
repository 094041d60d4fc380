"""An agent without networks, whose state shows what it has observed."""

import numpy as np

from rlox.nn.acting import ActingPolicy


class Counting(ActingPolicy):
    """Random actions; the state is [steps in this episode, sum of the previous observation | previous action]."""

    def __init__(self, spec):
        self.spec, self.width = spec, spec.model_width
        self.state_dim = 2 + self.width
        self.seen = []

    def initial(self, n):
        return np.zeros((n, self.state_dim), np.float32)

    def noise_shape(self, n):
        return (n, len(self.spec.choices) or self.width)

    def fill_noise(self, rng, out):
        rng.uniform(out=out)

    def act(self, inputs, noise):
        spec = self.spec
        if spec.continuous:
            actions = spec.act_low + (spec.act_high - spec.act_low) * noise
        else:
            actions = (noise * np.array(spec.choices)).astype(np.int64).reshape(-1, *spec.action_shape)
        return self._next(inputs, actions)

    def mode(self, inputs, noise=None):
        n, spec = len(inputs.obs), self.spec
        if spec.continuous:
            return self._next(inputs, np.repeat((spec.act_low + spec.act_high)[None] / 2, n, 0))
        return self._next(inputs, np.zeros((n, *spec.action_shape), np.int64))

    def _next(self, inputs, actions):
        obs = inputs.obs
        state = self.initial(len(obs)) if inputs.state is None else inputs.state
        state = state if inputs.is_first is None else np.where(inputs.is_first[:, None], np.float32(0), state)
        self.seen.append((state.copy(), obs.copy(), inputs.is_first))
        taken, sums = self.spec.to_model(actions), obs.reshape(len(obs), -1).sum(1, dtype=np.float32)
        return actions, np.concatenate([state[:, :1] + 1, sums[:, None], taken], 1)


class Foreseeing(Counting):
    """Predicts that observations increase by 1 in each step after the last one it observed."""

    def open_loop(self, carry, obs, actions, context, rng):
        assert actions.shape == (*obs.shape[:2], self.width)
        assert 0 < rng.uniform(1)[0] < 1
        self.carried = carry
        horizon = obs.shape[1] - context
        after = np.arange(1, horizon + 1).reshape(1, -1, *[1] * (obs.ndim - 2))
        return obs[:, context - 1 : context].astype(np.float32) + after.astype(np.float32)
