"""PPO and A2C with a memory, masks and both: exact gradients, and tasks whose best return is known."""

import numpy as np
import pytest
import torch

import rlox
from rlox.collectors.rollout import Rollout
from rlox.nn.losses import normalized
from rlox.nn.policies import DiscretePolicy

N_STEPS, N = 6, 2


def lstm(weights, x, h, c):
    from_input = weights["weight_ih_l0"] @ x + weights["bias_ih_l0"]
    i, f, g, o = (from_input + weights["weight_hh_l0"] @ h + weights["bias_hh_l0"]).chunk(4)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def gru(weights, x, h, c):
    (r, z, n), (hr, hz, hn) = (
        (weights[f"weight_{s}_l0"] @ v + weights[f"bias_{s}_l0"]).chunk(3) for s, v in (("ih", x), ("hh", h))
    )
    r, z = (r + hr).sigmoid(), (z + hz).sigmoid()
    return (1 - z) * (n + r * hn).tanh() + z * h, c


def walk(policy, name, kind, batch, length):
    """Outputs (T, N, n_outputs) of one network in float64, computed row by row; and its parameters by name."""
    net = getattr(policy, name)
    parameters = {key: p.detach().double().requires_grad_() for key, p in net.named_parameters()}
    weights = {key.removeprefix("memory."): p for key, p in parameters.items() if key.startswith("memory.")}
    size, start = net.memory.size, 0 if name == "actor" else policy.actor.state_dim
    obs, first = batch.obs.double().view(N_STEPS, N, -1), batch.is_first.view(N_STEPS, N)
    outputs = []
    for t in range(N_STEPS):
        for n in range(N):
            if t % length == 0:
                before = torch.as_tensor(batch.memories[t // length, n]).double()[start : start + net.state_dim]
                state = (before[:size], before[size:])
            else:
                state = outputs[(t - 1) * N + n][1]
            if first[t, n]:
                state = tuple(torch.zeros_like(part) for part in state)
            x = torch.tanh(parameters["trunk.0.weight"] @ obs[t, n] + parameters["trunk.0.bias"])
            h, c = (lstm if kind == "lstm" else gru)(weights, x, *state)
            outputs.append((parameters["head.0.weight"] @ h + parameters["head.0.bias"], (h, c)))
    return torch.stack([row[0] for row in outputs]), parameters


def rollout(policy, rng, masked, length):
    """Episodes that end at the first step, the last step and in between; rows with a single legal action."""
    b, state_dim = N_STEPS * N, policy.state_dim
    first = np.zeros((N_STEPS, N), np.bool_)
    first[0, 0] = first[1, 1] = first[3, 0] = first[-1, 1] = True
    masks = rng.random((b, 3)) < 0.6
    masks[:, 1] |= ~masks.any(1)
    masks[4] = [False, False, True]
    actions = np.array([rng.choice(np.flatnonzero(row)) if masked else rng.integers(3) for row in masks])

    def column():
        return rng.normal(size=b).astype(np.float32)

    return Rollout(
        obs=torch.from_numpy(rng.normal(size=(b, 4)).astype(np.float32)),
        actions=torch.from_numpy(actions),
        log_probs=torch.from_numpy(column() * 0.1 - 1),
        values=torch.from_numpy(column()),
        advantages=torch.from_numpy(column()),
        returns=torch.from_numpy(column()),
        rewards=torch.from_numpy(column()),
        is_first=torch.from_numpy(first.reshape(-1)),
        masks=torch.from_numpy(masks) if masked else None,
        n_envs=N,
        memories=rng.normal(size=(N_STEPS // length, N, state_dim)).astype(np.float32) * 0.5,
    )


@pytest.mark.parametrize("cls", [rlox.PPO, rlox.A2C])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("length", [6, 3, 1])
def test_gradients_equal_an_independent_computation(cls, kind, masked, length):
    if cls is rlox.A2C and length != N_STEPS:
        pytest.skip("only PPO divides rollouts")
    options = {} if cls is rlox.A2C else {"batch_size": 2 * N * N_STEPS, "n_epochs": 1}
    agent = cls(
        "CartPole-v1", n_envs=N, seed=0, n_steps=N_STEPS, memory=kind, memory_size=5, hidden_sizes=[7],
        max_grad_norm=None, policy=DiscretePolicy(4, 3, [7], memory=(kind, 5, 1, None)), **options,
    )  # fmt: skip
    policy, c = agent.policy, agent.config
    with torch.no_grad():  # larger weights of the head than at the start, so that probabilities differ
        policy.actor.head[0].weight.mul_(100)
    batch = rollout(policy, np.random.default_rng(length), masked, length)
    taken = {}

    def step(loss, max_grad_norm):
        grads = torch.autograd.grad(loss, list(policy.parameters()))
        taken.update(zip(dict(policy.named_parameters()), grads, strict=True))
        return torch.zeros(())

    agent.optimizer.step = step
    agent.update(batch)

    logits, actor = walk(policy, "actor", kind, batch, length)
    values, critic = walk(policy, "critic", kind, batch, length)
    legal = batch.masks if masked else torch.ones(len(batch), 3, dtype=torch.bool)
    log_probs, entropies = [], []
    for row, allowed, action in zip(logits, legal, batch.actions, strict=True):
        choices = torch.distributions.Categorical(logits=row[allowed])
        log_probs.append(choices.log_prob(allowed[:action].sum()))
        entropies.append(choices.entropy())
    log_probs, entropy = torch.stack(log_probs), torch.stack(entropies).mean()
    advantages = batch.advantages.double()
    if c.normalize_advantages:
        advantages = normalized(advantages)
    if cls is rlox.PPO:
        ratio = (log_probs - batch.log_probs.double()).exp()
        clipped = ratio.clamp(1 - c.clip_eps, 1 + c.clip_eps)
        policy_loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
    else:
        policy_loss = -(log_probs * advantages).mean()
    value_loss = (values.squeeze(-1) - batch.returns.double()).square().mean()
    (policy_loss + c.vf_coef * value_loss - c.ent_coef * entropy).backward()
    expected = {f"actor.{k}": p.grad for k, p in actor.items()} | {f"critic.{k}": p.grad for k, p in critic.items()}
    assert expected.keys() == taken.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(taken[name].double(), grad, rtol=2e-4, atol=2e-6, msg=name)


MAZE = {
    "memory": "gru", "memory_size": 32, "hidden_sizes": [], "n_steps": 128, "batch_size": 512, "learning_rate": 3e-3,
}  # fmt: skip


def test_a_memory_of_ten_steps_solves_the_t_maze_and_none_does_not():
    for memory, low, high in (("gru", 0.95, 1.0), ("lstm", 0.95, 1.0), ("none", -0.4, 0.4)):
        ppo = rlox.PPO("rlox/TMaze-v0", n_envs=16, seed=1, **{**MAZE, "memory": memory})
        ppo.train(60_000)
        assert low <= ppo.evaluate(50).summary()["mean_return"] <= high, memory


@pytest.mark.slow
def test_a_memory_of_fifty_steps_solves_the_long_t_maze():
    long = {**MAZE, "memory_horizon": 100, "n_steps": 256, "batch_size": 1024, "gamma": 1.0, "gae_lambda": 1.0}
    ppo = rlox.PPO("rlox/TMaze-v0", n_envs=16, seed=1, env_kwargs={"length": 50}, **long)
    ppo.train(300_000)
    assert ppo.evaluate(50).summary()["mean_return"] >= 0.95


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("cls", [rlox.PPO, rlox.A2C])
def test_a_masked_bandit_is_played_as_well_as_its_masks_allow(cls, backend):
    agent = cls("rlox/MaskedBandit-v0", n_envs=8, seed=0, learning_rate=3e-3, gamma=0.0, backend=backend)
    agent.train(16_000)
    evaluation = agent.evaluate(200)  # 0.75 per step at best; 0.5 without masks
    assert 7.2 < evaluation.returns.mean() < 7.8
    assert agent.predict(np.ones(1, np.float32), mask=[True, True, True]) == 2
    assert agent.predict(np.ones(1, np.float32), mask=[True, True, False]) == 1
    assert agent.predict(np.ones(1, np.float32), mask=[True, False, False]) == 0


def test_a_task_that_needs_both_is_solved_with_both():
    ppo = rlox.PPO("rlox/MaskedTMaze-v0", n_envs=16, seed=0, **MAZE)
    ppo.train(60_000)
    assert ppo.evaluate(50).summary()["mean_return"] >= 0.95


def test_native_and_pytorch_take_the_same_masked_update():
    agents = [rlox.PPO("rlox/MaskedBandit-v0", n_envs=4, seed=0, n_steps=32, backend=b) for b in ("native", "torch")]
    for agent in agents:
        agent.train(512)
    native, by_torch = (agent.policy.state_dict() for agent in agents)
    for name, value in native.items():
        torch.testing.assert_close(value, by_torch[name], rtol=1e-4, atol=1e-6)
