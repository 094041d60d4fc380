"""Behavioural cloning with a memory: sequences of a dataset, their gradients, and what only a memory can clone."""

import numpy as np
import pytest
import torch

import rlox
from rlox.algorithms import BC
from rlox.nn.acting import EpisodeActor, acting_policy
from rlox.offline.sequences import SequenceSampler


def recorded(lengths, discrete=True, seed=0, unfinished=False):
    """A dataset of random episodes of these lengths, which end in turns by themselves and by a time limit."""
    rng, n = np.random.default_rng(seed), sum(lengths)
    obs = rng.normal(size=(n, 3)).astype(np.float32)
    actions = rng.integers(3, size=n) if discrete else rng.uniform(-2, 2, (n, 2)).astype(np.float32)
    terminated, truncated = np.zeros(n, bool), np.zeros(n, bool)
    for i, end in enumerate(np.cumsum(lengths)[: -1 if unfinished else None]):
        (truncated if i % 2 else terminated)[end - 1] = True
    return rlox.OfflineDatasetBuffer(obs, obs, actions, np.zeros(n), terminated, truncated)


def cloner(data, discrete=True, **settings):
    sizes = {"continuous": False} if discrete else {"act_high": 2.0}
    settings = {"memory": "lstm", "memory_size": 5, "hidden_sizes": [4], "batch_size": 24, **settings}
    return BC(data, 3, 3 if discrete else 2, **sizes, **settings)


def cell64(kind, x, state, weights):
    """One step of an LSTM or GRU in float64, by its textbook formulas."""
    w_ih, w_hh, b_ih, b_hh = weights
    sigmoid = torch.sigmoid
    a, b = x @ w_ih.T + b_ih, state[0] @ w_hh.T + b_hh
    if kind == "lstm":
        i, f, g, o = (a + b).split(len(b) // 4)
        c = sigmoid(f) * state[1] + sigmoid(i) * torch.tanh(g)
        return sigmoid(o) * torch.tanh(c), c
    (ar, az, an), (br, bz, bn) = a.split(len(a) // 3), b.split(len(b) // 3)
    z = sigmoid(az + bz)
    return ((1 - z) * torch.tanh(an + sigmoid(ar + br) * bn) + z * state[0],)


def loss64(bc, data, starts, length, before):
    """The loss of sequences in float64, row by row; returns it with the parameters by name."""
    c, state = bc.config, data.get_state()
    p = {name: w.detach().double().requires_grad_() for name, w in bc.policy.state_dict(keep_vars=True).items()}
    ended, n = state["terminated"] | state["truncated"], len(data)
    losses = []
    for start in starts:
        memory = None
        for t in range(start - before, start + length):
            if t < start:
                torch.set_grad_enabled(False)
            row = t % n
            if memory is None or row == 0 or ended[row - 1]:
                memory = [[torch.zeros(c.memory_size).double()] * 2 for _ in range(c.memory_layers)]
            x = torch.tensor(state["obs"][row]).double()
            for k in range(len(c.hidden_sizes)):
                x = torch.relu(p[f"net.trunk.{2 * k}.weight"] @ x + p[f"net.trunk.{2 * k}.bias"])
            for layer in range(c.memory_layers):
                names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
                weights = [p[f"net.memory.{name}_l{layer}"] for name in names]
                memory[layer] = cell64(c.memory, x, memory[layer], weights)
                x = memory[layer][0]
            torch.set_grad_enabled(True)
            if t >= start:
                y = p["net.head.0.weight"] @ x + p["net.head.0.bias"]
                action = state["actions"][row]
                if bc.spec.discrete:
                    losses.append(-y.log_softmax(0)[int(action[0])])
                else:
                    losses.append(((y.tanh() - torch.tensor(action).double() / 2) ** 2).mean())
    return torch.stack(losses).mean(), p


# Episodes of one step, an end at the first and at the last row of a sequence, a sequence that runs from the data's end,
# unfinished or not, to its beginning, and steps before it that are more than the data has.
@pytest.mark.parametrize("discrete", [True, False])
@pytest.mark.parametrize(
    ("memory", "layers", "length", "before", "starts"),
    [
        ("lstm", 1, 6, 6, [0, 1, 7, 13]),
        ("gru", 2, 5, 3, [2, 6, 12, 14]),
        ("lstm", 2, 12, 0, [4, 9]),
        ("gru", 1, 4, 40, [3, 3, 15]),
        ("lstm", 1, 1, 2, [0, 5, 6, 7, 8]),
    ],
)
def test_the_gradient_is_that_of_float64(discrete, memory, layers, length, before, starts):
    data = recorded([6, 1, 1, 5, 3], discrete, unfinished=length == 5)
    bc = cloner(
        data, discrete, memory=memory, memory_layers=layers, sequence_length=length, burn_in=before, hidden_sizes=[4, 6]
    )
    batch = bc._gather(bc._sampler, np.array(starts))
    loss, metrics = bc._loss(batch)
    loss.backward()
    expected, weights = loss64(bc, data, starts, length, before)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert metrics["policy_loss"] == loss
    for name, w in bc.policy.named_parameters():
        torch.testing.assert_close(w.grad.double(), weights[name].grad, rtol=1e-4, atol=1e-6, msg=name)


def test_a_sequence_has_the_rows_before_it_and_knows_where_episodes_begin():
    data = recorded([3, 2, 4])
    sampler = SequenceSampler(data, 4, 2, "test")
    bc = cloner(data)
    batch = sampler.gather(np.array([1, 7]), bc.spec, lambda obs: obs, "cpu")
    obs = data.get_state()["obs"]
    for column, rows in ((batch.obs, [1, 7, 2, 8, 3, 0, 4, 1]), (batch.obs_before, [8, 5, 0, 6])):
        np.testing.assert_array_equal(column, obs[rows])
    assert batch.is_first.tolist() == [row in (0, 3, 5) for row in (1, 7, 2, 8, 3, 0, 4, 1)]
    assert batch.is_first_before.tolist() == [False, True, True, False]


def test_a_batch_has_as_many_transitions_as_without_a_memory():
    data = recorded([30, 70])
    assert len(cloner(data, batch_size=64).sample()) == 64
    assert len(cloner(data, batch_size=64, sequence_length=10).sample()) == 60
    assert len(cloner(data, batch_size=200).sample()) == 192


DELAY = 6  # steps of an episode in which only the first shows what the last must do


def repeat_the_cue(n_episodes, delay):
    """Episodes in which the last action is the cue of the first observation, and all others are 0."""
    cues = np.random.default_rng(1).integers(2, size=n_episodes)
    obs = np.zeros((n_episodes, delay, 3), np.float32)
    obs[:, 0, 0], obs[:, 0, 1], obs[:, -1, 2] = 2 * cues - 1, 1, 1
    actions = np.zeros((n_episodes, delay), np.int64)
    actions[:, -1] = cues
    return obs, actions


@pytest.mark.parametrize("memory", ["none", "gru", "lstm"])
def test_a_remembered_cue_is_cloned_only_with_a_memory(memory):
    obs, actions = repeat_the_cue(100, DELAY)
    rows, n = obs.reshape(-1, 3), actions.size
    ends = np.tile(np.arange(DELAY) == 7, 100)
    data = rlox.OfflineDatasetBuffer(rows, rows, actions.ravel(), np.zeros(n), ends, np.zeros(n, bool))
    lengths = {} if memory == "none" else {"sequence_length": 12}
    bc = BC(
        data, 3, 2, continuous=False, hidden=32, memory=memory, memory_size=64, learning_rate=5e-3, batch_size=128,
        **lengths,
    )  # fmt: skip
    bc.train(300)
    agent = EpisodeActor(acting_policy(bc.actor), 100, None, deterministic=True)
    for _ in range(2):  # the second time after an end
        taken = []
        for t in range(DELAY):
            taken.append(agent.act(obs[:, t]))
            agent.end(np.full(100, t == DELAY - 1))
        right = np.mean(taken[-1] == actions[:, -1])
        assert (actions[:, :-1] == np.array(taken[:-1]).T).mean() > 0.99
        assert 0.3 < right < 0.7 if memory == "none" else right == 1.0


@pytest.mark.parametrize("discrete", [True, False])
def test_a_memory_acts_and_continues_from_a_checkpoint(discrete, tmp_path):
    data = recorded([20, 1, 30], discrete)
    whole, half = (cloner(data, discrete, sequence_length=6, normalize_obs=True) for _ in range(2))
    whole.train(12, schedule_timesteps=12)
    half.train(5, schedule_timesteps=12)
    half.save(tmp_path / "half.safetensors")
    rest = BC.from_checkpoint(tmp_path / "half.safetensors", data)
    rest.train(7, schedule_timesteps=12)
    for name, w in whole.policy.state_dict().items():
        assert torch.equal(w, rest.policy.state_dict()[name]), name
    acting = BC.from_checkpoint(tmp_path / "half.safetensors")
    assert acting.policy.state_dim == 10
    action, state = acting.predict(np.zeros(3, np.float32))
    assert np.isfinite(action).all()
    assert state.shape == (10,)


def test_what_does_not_go_with_a_memory():
    data = recorded([5, 5])
    with pytest.raises(ValueError, match="backend must be auto or torch here, got 'native': PyTorch computes a memory"):
        cloner(data, backend="native")
    with pytest.raises(ValueError, match="sequence_length must be null without a memory"):
        cloner(data, memory="none", sequence_length=4)
    with pytest.raises(ValueError, match="sequence_length must be at most batch_size=24"):
        cloner(data, sequence_length=25)

    class OnlySamples:
        def sample(self, batch_size, seed):
            return data.sample(batch_size, seed)

    with pytest.raises(TypeError, match="memory must be none for a dataset without get_state"):
        cloner(OnlySamples())


def test_rows_that_are_not_finite_are_named():
    data = recorded([5, 5])
    sampler = SequenceSampler(data, 2, 3, "BC")
    sampler._columns["obs"] = np.array(sampler._columns["obs"])
    sampler._columns["obs"][4] = np.nan
    with pytest.raises(ValueError, match="BC: obs must be finite float32 numbers, got others in row 4"):
        sampler.gather(np.array([6]), cloner(data).spec, lambda obs: obs, "cpu")
