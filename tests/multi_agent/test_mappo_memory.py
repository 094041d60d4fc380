"""MAPPO with a memory: several agents that die, wait and are cut off, each with a state of its own."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import zoo_probes
from recorded_agents import Recorded, are_equal, copy_weights, remove_bounds
from torch import nn

import rlox
from rlox.multi_agent import make_multi_agent_env
from rlox.multi_agent.turns import estimate_turns
from rlox.nn.acting import Inputs
from rlox.nn.memory import MemoryNetwork

pytest.importorskip("pettingzoo")

SMALL = {"n_steps": 8, "hidden_sizes": [8], "n_envs": 2, "batch_size": 64, "memory": "lstm", "memory_size": 6}


# ---- one update against an independent computation

CELLS = {"lstm": nn.LSTMCell, "gru": nn.GRUCell}


def run_network(network, row, state):
    """Run one step of one agent by PyTorch's cell; `state` is None before an episode."""
    memory = network.memory
    cell = CELLS[memory.kind](memory.n_inputs, memory.size, dtype=torch.float64)
    named = {name.removesuffix("_l0"): value for name, value in memory.named_parameters()}
    state = torch.func.functional_call(cell, named, (network.trunk(row[None]), state))
    return network.head(state[0] if memory.kind == "lstm" else state)[0], state


def cut_gradient(state):
    if state is None or isinstance(state, torch.Tensor):
        return state if state is None else state.detach()
    return tuple(part.detach() for part in state)


def read_inputs(algorithm, player, step, e, a, final=False):
    """The inputs of actor and critic of a player's agent `a` in environment `e`, before or after a reset."""
    c, ids = algorithm.config, np.eye(len(player.members))[a] if algorithm.config.agent_id else []
    obs = (step.final_obs if final else step.obs)[player.group][e, player.members[a]]
    state = (step.final_state if final else step.state)[e]
    seen, judged = (torch.tensor(np.r_[x, ids], dtype=torch.float64) for x in (obs, state))
    return seen, judged if c.critic == "central" else seen


def follow_agent(algorithm, player, net, recorded, e, a, since, length):
    """The rows (outputs, value, advantage, action, mask) of an agent's steps from `since` on, one step at a time."""
    c, g, member, rows = algorithm.config, player.group, player.members[a], {}
    steps, last = recorded.steps, len(recorded.actions)
    acted = judged = None
    ahead = np.zeros(last)
    for t in range(last + 1):
        if t and (steps[t].ended[e] or steps[t].terminated[g][e, member] or steps[t].truncated[g][e, member]):
            acted = judged = None
        if t >= since and (t - since) % length == 0:
            acted, judged = cut_gradient(acted), cut_gradient(judged)
        if not steps[t].alive[g][e, member]:
            continue
        x, s = read_inputs(algorithm, player, steps[t], e, a)
        value, judged_after = run_network(net.critic, s, judged)
        if t:
            ahead[t - 1] = value.item()
        if t == last:
            break
        judged = judged_after
        outputs, acted = run_network(net.actor, x, acted)
        mask = None if steps[t].masks[g] is None else steps[t].masks[g][e, member]
        rows[t] = [outputs, value, recorded.actions[t][g][e, member], mask]
        if steps[t + 1].truncated[g][e, member]:
            ahead[t] = run_network(net.critic, read_inputs(algorithm, player, steps[t + 1], e, a, True)[1], judged)[
                0
            ].item()
    trace = 0.0
    for t in reversed(range(since, last)):
        if t not in rows:
            trace = 0.0
            continue
        after = steps[t + 1]
        terminated, truncated = after.terminated[g][e, member], after.truncated[g][e, member]
        delta = after.rewards[g][e, member] + c.gamma * (not terminated) * ahead[t] - rows[t][1].item()
        trace = delta + c.gamma * c.gae_lambda * (0.0 if terminated or truncated else trace)
        rows[t].append(trace)
    return [rows[t] for t in sorted(rows) if t >= since]


def differentiate(algorithm, recorded, before, since, length):
    """Gradients of the update on the steps from `since` on in float64, by player."""
    c, gradients = algorithm.config, {}
    for player, policy in zip(algorithm.players, before, strict=True):
        net, pairs = copy.deepcopy(policy).double(), np.ndindex(algorithm.n_envs, len(player.members))
        rows = [row for e, a in pairs for row in follow_agent(algorithm, player, net, recorded, e, a, since, length)]
        outputs, values, actions, masks, advantages = zip(*rows, strict=True)
        outputs, values, advantages = torch.stack(outputs), torch.cat(values), torch.tensor(advantages)
        returns = advantages + values.detach()
        weight = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        if player.spec.discrete:
            if masks[0] is not None:
                outputs = torch.where(torch.tensor(np.array(masks)), outputs, -torch.inf)
            spread = torch.distributions.Categorical(logits=outputs.clamp(min=-1e9))
            log_prob, entropy = spread.log_prob(torch.as_tensor(np.array(actions))), spread.entropy()
        else:
            normal = torch.distributions.Normal(outputs, net.log_std.exp())
            log_prob, entropy = normal.log_prob(torch.as_tensor(np.array(actions))).sum(-1), normal.entropy().sum(-1)
        ratio = (log_prob - log_prob.detach()).exp()
        loss = -(ratio * weight).mean() + c.vf_coef * (values - returns).square().mean() - c.ent_coef * entropy.mean()
        found = torch.autograd.grad(loss, list(net.parameters()))
        gradients[player.name] = torch.cat([one.reshape(-1) for one in found]).numpy()
    return gradients


@pytest.mark.parametrize("options", [
    {}, {"critic": "local"}, {"memory": "gru", "agent_id": True}, {"share_parameters": False, "sequence_length": 3},
    {"n_steps": 14, "sequence_length": 7, "critic": "local"}, {"n_steps": 7}, {"n_steps": 1}, {"hidden_sizes": []},
])  # fmt: skip
def test_the_gradient_of_an_update_equals_an_independent_computation(options):
    # Episodes have seven steps. Of the walkers one dies after two, a time limit cuts one after five; it cuts the flyer
    # after six, which is the end of a sequence of three.
    settings = {**SMALL, "n_steps": 6, "n_epochs": 1, "batch_size": 10_000, "max_grad_norm": None, "gamma": 0.9}
    settings |= {"learning_rate": 1e-30, **options}  # the weights stay as they are
    algorithm = rlox.MAPPO("zoo", env_fn=lambda: remove_bounds(zoo_probes.MaskedZoo()), seed=5, **settings)
    n, before = settings["n_steps"], [copy.deepcopy(learner.policy) for learner in algorithm.learners]
    recorded = Recorded(algorithm)
    length = settings.get("sequence_length") or n
    for i in range(3):
        algorithm.train(2 * n)
        known = differentiate(algorithm, recorded, before, i * n, length)
        for learner in algorithm.learners:
            if learner.name in known:
                np.testing.assert_allclose(learner.optimizer.grad.numpy(), known[learner.name], atol=2e-5, rtol=2e-4)


# ---- learning, acting, and going on


@pytest.mark.parametrize("share", [True, False])
def test_a_cue_of_the_first_step_is_remembered(share):
    settings = {
        "n_envs": 16, "n_steps": 16, "learning_rate": 1e-2, "hidden_sizes": [16], "batch_size": 512, "memory_size": 16,
        "seed": 1, "share_parameters": share,
    }  # fmt: skip
    returns = {}
    for memory in ("gru", "none"):
        algorithm = rlox.MAPPO("recall", env_fn=zoo_probes.Recall, memory=memory, **settings)
        algorithm.train(16 * 16 * 30)
        returns[memory] = algorithm.evaluate(100).returns
    assert returns["gru"].mean() == 2.0
    assert returns["none"].mean() < 1.3


def test_self_play_is_switched_on_at_resume(tmp_path):
    settings = {"env_fn": zoo_probes.MaskedZoo, "seed": 5, **SMALL, "share_parameters": False}
    alone = rlox.MAPPO("zoo", **settings)
    alone.train(32)
    alone.save(tmp_path / "alone.safetensors")
    again = rlox.MAPPO.from_checkpoint(tmp_path / "alone.safetensors", env_fn=zoo_probes.MaskedZoo, self_play=True)
    assert again.train(32)


@pytest.mark.parametrize("options", [
    {}, {"share_parameters": False, "value_norm": True, "memory": "gru"}, {"critic": "local", "sequence_length": 4},
    {"share_parameters": False, "self_play": True, "self_play_every": 1, "memory_layers": 2},
])  # fmt: skip
def test_a_resumed_run_continues_bit_for_bit(tmp_path, options):
    settings = {"env_fn": zoo_probes.MaskedZoo, "seed": 5, **SMALL, **options}
    whole, part = rlox.MAPPO("zoo", **settings), rlox.MAPPO("zoo", **settings)
    whole.train(96)
    part.plan(96)
    part.train(32)
    part.evaluate(1)  # leaves no trace
    part.save(tmp_path / "part.safetensors")
    resumed = rlox.MAPPO.from_checkpoint(tmp_path / "part.safetensors", env_fn=zoo_probes.MaskedZoo)
    resumed.train(64)
    assert resumed.collector.restore_note() is None
    assert are_equal(copy_weights(whole), copy_weights(resumed))
    one, other = whole.collector.state(), resumed.collector.state()
    assert are_equal(one, other)
    assert any(name.startswith("step_memory") for name in one)
    assert np.array_equal(whole.evaluate(2).agent_returns, resumed.evaluate(2).agent_returns)


@pytest.mark.parametrize("n_envs", [2, 8])
@pytest.mark.parametrize("memory", ["lstm", "gru"])
def test_steps_of_a_rollout_are_those_of_packed_weights(memory, n_envs, monkeypatch):
    """With more rows than eight a single step computes the same bits, with fewer it sums in another order."""
    follow, calls = MemoryNetwork.follow, []

    def collect():
        settings = {**SMALL, "n_envs": n_envs, "memory": memory}
        algorithm = rlox.MAPPO("recall", env_fn=zoo_probes.Recall, seed=5, **settings)
        algorithm.train(2 * 8 * n_envs)  # the weights are no longer those of the first rollout
        calls.clear()
        (rollout,) = algorithm.collector.collect(algorithm.actor, 8).players
        return rollout, len(calls)

    monkeypatch.setattr(MemoryNetwork, "follow", lambda *inputs: calls.append(inputs) or follow(*inputs))
    packed, n_packed = collect()
    monkeypatch.setattr(MemoryNetwork, "pack", lambda net, kernel: None)
    alone, n_alone = collect()
    assert n_packed == n_alone - 2 * 8  # actor and critic in each step
    for name in ("actions", "log_probs", "values", "memories", "advantages"):
        columns = [np.asarray(getattr(one, name)) for one in (packed, alone)]
        if 2 * n_envs > 8:
            np.testing.assert_array_equal(*columns)
        else:
            np.testing.assert_allclose(*columns, rtol=1e-4, atol=1e-5)


def test_predictions_take_and_return_states():
    algorithm = rlox.MAPPO("recall", env_fn=zoo_probes.Recall, seed=5, **SMALL)
    algorithm.train(320)
    env, returns = zoo_probes.Recall(), []
    seed = np.random.default_rng(0).integers(2**31)
    for episode in range(3):
        obs, _ = env.reset(int(seed) if episode == 0 else None)
        states, total = None, 0.0
        while env.agents:
            actions, states = algorithm.predict_all(obs, states=states)
            action, state = algorithm.predict(np.stack([obs["one"]] * 2), agent_idx=0)
            assert action.shape == (2,)
            assert state.shape == (2, len(states["one"]))
            obs, rewards, *_ = env.step(actions)
            total += sum(rewards.values())
        returns.append(total)
    assert set(returns) <= {0.0, 1.0, 2.0}
    with pytest.raises(ValueError, match="state must be 1 row of"):
        algorithm.predict([0.0, 0.0], state=np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="must belong to one, two"):
        algorithm.predict_all({}, states={"three": None})


def test_a_dead_agent_keeps_no_memory_for_its_next_life_and_a_waiting_one_does():
    from rlox.multi_agent.acting import ColumnMemory

    memory = ColumnMemory(np.zeros((2, 3), np.float32))

    def add_one(inputs):
        return np.zeros(2), inputs.state + 1

    memory.act(add_one, Inputs(np.zeros((2, 1))), np.array([True, False]))
    assert memory.state.tolist() == [[1.0] * 3, [0.0] * 3]
    memory.act(add_one, Inputs(np.zeros((2, 1))), np.array([False, True]))
    assert memory.state.tolist() == [[1.0] * 3, [1.0] * 3]
    memory.is_first = np.array([True, False])
    memory.act(add_one, Inputs(np.zeros((2, 1))), np.array([True, True]))
    assert memory.state.tolist() == [[1.0] * 3, [2.0] * 3]


@pytest.mark.parametrize("memory", ["none", "gru"])
def test_masks_of_several_choices_are_respected(memory):
    algorithm = rlox.MAPPO("pairs", env_fn=zoo_probes.MaskedPairs, seed=5, **{**SMALL, "memory": memory})
    algorithm.train(160)  # the environment raises on illegal actions
    algorithm.evaluate(5, deterministic=False)
    obs = {"observation": [0.0], "action_mask": [1, 0, 0, 0, 1]}
    action = algorithm.predict(obs)
    assert np.array_equal(action if memory == "none" else action[0], [0, 2])
    with pytest.raises(ValueError, match="mask must allow an action"):
        algorithm.predict([0.0], mask=[1, 0, 0, 0, 0])


# ---- agents that take turns

TICTACTOE = "pettingzoo:pettingzoo.classic.tictactoe_v3"


def estimate_one(rewards, values, alive, terminated, truncated, goes_on, last_value, final_values, gamma, lam):
    """Advantages of one agent, by the turns that are resolved, in a list of its own turns."""
    turns = [t for t in range(len(rewards)) if alive[t]]
    advantages = {}
    for i in reversed(range(len(turns))):
        t, total, ahead, trace = turns[i], 0.0, None, 0.0
        following = turns[i + 1] if i + 1 < len(turns) else len(rewards)
        for s in range(t, following):
            total += rewards[s]
            if terminated[s] or truncated[s]:
                ahead = 0.0 if terminated[s] else final_values[s]
                break
        else:
            if following < len(rewards):
                ahead, trace = values[following], advantages.get(following, 0.0)
            elif goes_on:
                ahead = last_value
        if ahead is not None:
            advantages[t] = total + gamma * ahead - values[t] + gamma * lam * trace
    return advantages


def test_advantages_reach_from_turn_to_turn():
    rng = np.random.default_rng(3)
    rewards, values, final_values = rng.normal(size=(3, 20, 40)).astype(np.float32)
    alive = rng.random((20, 40)) < 0.4
    terminated, truncated = rng.random((2, 20, 40)) < 0.1
    truncated &= ~terminated
    goes_on, last_values = rng.random(40) < 0.5, rng.normal(size=40).astype(np.float32)
    columns = rewards, values, alive, terminated, truncated
    got, known = estimate_turns(*columns, goes_on, last_values, final_values, 0.9, 0.8)
    for m in range(40):
        own = (column[:, m] for column in columns)
        expected = estimate_one(*own, goes_on[m], last_values[m], final_values[:, m], 0.9, 0.8)
        assert sorted(expected) == np.flatnonzero(known[:, m]).tolist()
        np.testing.assert_allclose([got[t, m] for t in expected], list(expected.values()), rtol=1e-4, atol=1e-5)
    assert not known[alive].all()


@pytest.mark.parametrize("options", [
    {}, {"memory": "none"}, {"memory": "none", "backend": "torch"}, {"share_parameters": False, "sequence_length": 4},
])  # fmt: skip
def test_a_game_of_turns_is_learned_and_evaluated(options):
    algorithm = rlox.MAPPO(TICTACTOE, seed=1, **{**SMALL, **options})
    assert np.isfinite(algorithm.train(160)["value_loss"])
    batch = algorithm.collector.collect(algorithm.actor, 8)
    turns = sum(len(rows) for rows in batch.players if rows is not None)
    assert 8 < turns <= 16  # those at the end of the rollout whose outcome is open are left out
    for deterministic in (True, False):
        returns = algorithm.evaluate(3, deterministic=deterministic).agent_returns  # illegal moves are errors
        assert not returns.sum(1).any()


def test_a_central_critic_sees_the_agents_that_wait_for_their_turn():
    """Each agent sees its own pieces first, so the halves of the joined observations mirror each other."""
    env = make_multi_agent_env(TICTACTOE, 1, seed=0)
    step = env.reset_all()
    for n_moves in range(5):
        first, second = step.state.reshape(2, 3, 3, 2)
        assert np.array_equal(first, second[..., ::-1])
        assert first.sum() == n_moves
        legal = step.masks[0][0, step.alive[0][0].argmax()]
        step = env.step_all([np.full((1, 2), legal.argmax())])
        assert np.array_equal(step.final_state, step.state)
