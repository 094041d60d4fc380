"""DQN with a memory: one update against an independent computation, what is stored and drawn, and what is learned."""

import numpy as np
import probes
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rlox import DQN
from rlox.checkpoint import load_checkpoint
from rlox.kernels.rng import Rng
from rlox.nn.actors import QPolicy, RecurrentQNetwork
from rlox.nn.batch import SequenceBatch
from rlox.nn.memory import Sequences
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
        q = RecurrentQNetwork(D, N_ACTIONS, [7], "tanh", dueling, (kind, 6, 1, None), Rng(seed))
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


SMALL = {"memory": "lstm", "memory_size": 8, "hidden_sizes": [16], "sequence_length": 12, "burn_in": 3,
         "batch_size": 48, "learning_starts": 60, "buffer_size": 600, "train_freq": 4, "seed": 3}  # fmt: skip


def rows_of(dqn, env):
    """Return the rows of one environment, by column."""
    state = dqn.buffer.get_state()
    return {name: state[name][env, : state["sizes"][env]] for name in ("obs", "actions", "is_first", "state", "rewards",
                                                                      "terminated", "truncated")}  # fmt: skip


@pytest.mark.parametrize("random", [True, False])
def test_the_stored_states_are_those_of_the_network_also_while_actions_are_random(random):
    dqn = DQN("CartPole-v1", n_envs=2, **{**SMALL, "learning_starts": 200}, exploration_final_eps=0.3)
    for _ in range(60):
        dqn.collector.step(dqn.actor, dqn.buffer, random)
    for env in range(2):
        rows = rows_of(dqn, env)
        assert rows["is_first"].sum() > 1
        over = rows["terminated"] | rows["truncated"]
        assert np.array_equal(over[:-1], rows["is_first"][1:])
        assert (rows["actions"].sum(1) == ~over).all()
        obs, first = (torch.from_numpy(rows[name]) for name in ("obs", "is_first"))
        with torch.no_grad():
            state = torch.zeros(1, dqn.policy.state_dim)
            for t in range(len(obs)):
                state = state.masked_fill(first[t], 0.0)
                np.testing.assert_allclose(rows["state"][t], state[0], rtol=1e-5, atol=1e-6)
                state = dqn.policy.follow(obs[t : t + 1], Sequences(state, first[t : t + 1]))[1]


def test_only_legal_actions_are_taken_and_their_flags_are_stored():
    dqn = DQN("rlox/MaskedTMaze-v0", n_envs=2, env_kwargs={"length": 3}, **SMALL)
    dqn.train(400)
    for env in range(2):
        rows = rows_of(dqn, env)
        actions, legal = rows["actions"][:, :4], rows["actions"][:, 4:] == 1
        over = rows["terminated"]
        assert over.any()
        assert (actions.sum(1) == ~over).all()
        assert not (actions.astype(bool) & ~legal).any()
        junction = (rows["obs"][:, 1] == 1) & ~over
        assert (legal[junction].sum(1) == 2).all()
        assert legal[~junction & ~over].all()
    batch = dqn.sample()
    assert batch.masks.shape == batch.actions.shape == (4, 13, 4)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize(
    ("env", "options"),
    [("CartPole-v1", {"n_step": 3, "dueling": True, "normalize_obs": True}), ("rlox/MaskedTMaze-v0", {})],
)
def test_a_run_in_two_parts_equals_one_in_one_part(kind, env, options, tmp_path):
    options = {**SMALL, "memory": kind, **options}
    whole = DQN(env, n_envs=2, **options)
    whole.train(600)
    first = DQN(env, n_envs=2, **options)
    first.train(300, schedule_timesteps=600)
    first.evaluate(2)  # leaves no trace
    first.save(tmp_path / "half.safetensors", memory=True)
    second = DQN.from_checkpoint(tmp_path / "half.safetensors")
    second.train(until=600)
    for part, dqn in (("whole", whole), ("second", second)):
        dqn.save(tmp_path / f"{part}.safetensors")
    one, other = (load_checkpoint(tmp_path / f"{part}.safetensors") for part in ("whole", "second"))
    for section in ("policy", "target", "optimizer", "environment"):
        assert one.tensors[section].keys() == other.tensors[section].keys()
        for name, array in one.tensors[section].items():
            np.testing.assert_array_equal(other.tensors[section][name], array, err_msg=f"{section} {name}")
    assert one.header["generators"] == other.header["generators"]


def test_images_go_through_the_convolutions_and_the_memory():
    dqn = DQN(probes.BrightSide, n_envs=2, **SMALL, dueling=True)
    dqn.train(120)
    assert dqn.sample().obs.dtype == torch.uint8
    assert dqn.evaluate(2).lengths.min() >= 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buffer": "prioritized"}, "buffer must be uniform with a memory, .* got prioritized"),
        ({"buffer": "mmap"}, "buffer must be uniform with a memory"),
        ({"buffer": "sequence"}, "buffer must hold transitions"),
        ({"backend": "native"}, "backend must be auto or torch here, got 'native': PyTorch computes a memory"),
        ({"compile": True}, "compile must be false with memory=lstm"),
        ({"burn_in": 12}, r"burn_in must be below sequence_length \(12\)"),
        ({"batch_size": 11}, r"batch_size must be >= sequence_length \(12\)"),
        ({"buffer_size": 25}, r"at least sequence_length \+ 1 \(13\) for each of the 2 environments, 26"),
        ({"memory": "rnn"}, "memory must be one of none, lstm, gru"),
        ({"policy": nn.Linear(4, 2)}, "memory must be none for a policy without one, got lstm"),
    ],
)
def test_what_cannot_be_combined_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DQN("CartPole-v1", n_envs=2, **{**SMALL, **({"buffer_size": None} if "buffer" in options else {}), **options})


@pytest.mark.slow
@pytest.mark.parametrize("env", ["rlox/TMaze-v0", "rlox/MaskedTMaze-v0"])
def test_the_side_of_the_goal_is_remembered(env):
    dqn = DQN(
        env, n_envs=4, seed=0, memory="gru", memory_size=32, hidden_sizes=[32], sequence_length=24, burn_in=0,
        batch_size=480, train_freq=8, learning_starts=500, buffer_size=20_000, learning_rate=2e-3, n_step=5,
        target_update_freq=200, exploration_fraction=0.5, exploration_final_eps=0.02,
    )  # fmt: skip
    dqn.train(16_000)
    assert dqn.evaluate(20).returns.mean() > 0.9
