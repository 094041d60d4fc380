"""DQN with a memory: one update against an independent computation, what is stored and drawn, and what is learned."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rlox.kernels.rng import Rng
from rlox.nn.actors import QPolicy, RecurrentQNetwork
from rlox.nn.batch import SequenceBatch
from rlox.nn.sequence_losses import sequence_q_loss

D, N_ACTIONS, T = 3, 4, 9
GAMMA = 0.9
# Rows of each sequence that begin an episode, and those that are the last observation of one, by what ended it.
AWKWARD = [
    {},
    {"first": [0, 6], "terminated": [5]},
    {"first": [1], "terminated": [0]},  # the first row is the end of an episode
    {"terminated": [8]},  # the last row is
    {"truncated": [8]},  # a time limit at the end of the sequence
    {"first": [2, 5, 8], "truncated": [1, 7], "terminated": [4]},  # an episode begins while the state is warmed up
    {"first": [3, 4, 6], "truncated": [2, 3, 5]},  # at row 2, the first one learned from, and an episode of one row
]


def make_batch(generator, state_dim, masked=False):
    n = len(AWKWARD)
    flags = {name: torch.zeros(n, T, dtype=torch.bool) for name in ("first", "terminated", "truncated")}
    for i, places in enumerate(AWKWARD):
        for name, rows in places.items():
            flags[name][i, rows] = True
    ended = flags["terminated"] | flags["truncated"]
    assert torch.equal(flags["first"][:, 1:], ended[:, :-1])
    actions = F.one_hot(torch.randint(N_ACTIONS, (n, T), generator=generator), N_ACTIONS).double()
    masks = None
    if masked:
        masks = torch.rand(n, T, N_ACTIONS, generator=generator) < 0.4
        masks[..., 0] |= ~masks.any(-1)  # one action is left, or several
        masks[flags["terminated"]] = False
    return SequenceBatch(
        obs=torch.randn(n, T, D, generator=generator, dtype=torch.float64),
        actions=actions.masked_fill(ended[..., None], 0.0),
        rewards=torch.randn(n, T, generator=generator, dtype=torch.float64).masked_fill(flags["first"], 0.0),
        terminated=flags["terminated"],
        truncated=flags["truncated"],
        is_first=flags["first"],
        state=torch.randn(n, state_dim, generator=generator, dtype=torch.float64),
        masks=masks,
    )


def read_values(policy, obs, state, is_first, detach_before=0):
    """Return the values (T, n_actions) of one sequence, by PyTorch's own recurrent module, one step at a time."""
    net = policy.q.net
    memory, size = net.memory, net.memory.size
    module = {"lstm": nn.LSTM, "gru": nn.GRU}[memory.kind](memory.n_inputs, size, dtype=torch.float64)
    weights, values = dict(memory.named_parameters()), []
    for t in range(len(obs)):
        if is_first[t]:
            state = torch.zeros_like(state)
        if t == detach_before:
            state = state.detach()
        x, parts = net.trunk(obs[t : t + 1]), state.view(-1, 1, size).unbind(0)
        before = (parts[0][None].squeeze(0), parts[1][None].squeeze(0)) if memory.kind == "lstm" else parts[0]
        output, after = torch.func.functional_call(module, weights, (x, before))
        state = torch.cat([*after], 1).flatten() if memory.kind == "lstm" else after.flatten()
        outputs = net.head(output)[0]
        if policy.q.dueling:
            outputs = outputs[0] + outputs[1:] - outputs[1:].mean()
        values.append(outputs)
    return torch.stack(values)


def expected_loss(policy, target, batch, n_step, burn_in, double, kind):
    """Return the loss by its definition, one return after the other."""
    errors = []
    for i in range(len(batch)):
        rows = batch.obs[i], batch.state[i], batch.is_first[i]
        values = read_values(policy, *rows, detach_before=burn_in)
        ahead = read_values(target, *rows).detach()
        ended = batch.terminated[i] | batch.truncated[i]
        for t in range(burn_in, T - 1):
            if ended[t]:
                continue
            goal, discount, at = 0.0, 1.0, t
            while True:
                at += 1
                goal += discount * batch.rewards[i, at]
                discount *= GAMMA
                if ended[at] or at == T - 1 or at - t == n_step:
                    break
            if not batch.terminated[i, at]:
                chooser = (values if double else ahead)[at].detach()
                if batch.masks is not None:
                    chooser = torch.where(batch.masks[i, at], chooser, -torch.inf)
                goal += discount * ahead[at, chooser.argmax()]
            error = values[t, batch.actions[i, t].argmax()] - goal
            small = kind == "huber" and error.detach().abs() < 1
            errors.append(error**2 if kind == "mse" else error**2 / 2 if small else error.abs() - 0.5)
    return torch.stack(errors).mean()


@pytest.mark.parametrize(
    ("kind", "dueling", "double", "loss", "n_step", "burn_in", "masked"),
    [
        ("lstm", False, True, "huber", 1, 0, False),
        ("lstm", True, False, "mse", 3, 2, False),
        ("gru", False, False, "huber", 2, 3, True),
        ("gru", True, True, "mse", 20, 2, True),
    ],
)
def test_loss_and_gradient_are_those_of_the_definition(kind, dueling, double, loss, n_step, burn_in, masked):
    generator = torch.Generator().manual_seed(5)

    def make_policy(seed):
        q = RecurrentQNetwork(D, N_ACTIONS, [7], "tanh", dueling, (kind, 6, 1), Rng(seed))
        return QPolicy(q, N_ACTIONS).double()

    policy, target = make_policy(1), make_policy(2)
    batch = make_batch(generator, policy.state_dim, masked)
    parameters = list(policy.parameters())
    expected = expected_loss(policy, target, batch, n_step, burn_in, double, loss)
    wanted = torch.autograd.grad(expected, parameters)
    result, metrics = sequence_q_loss(policy, target, batch, GAMMA, n_step, burn_in, double, loss)
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(metrics["q_loss"], expected.detach(), rtol=1e-10, atol=1e-12)
    for grad, want in zip(torch.autograd.grad(result, parameters), wanted, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-8, atol=1e-10)
