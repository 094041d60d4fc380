"""MAPPO: with one agent it equals PPO; with several, each agent learns exactly from its own experience."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
import zoo_probes
from recorded_agents import Recorded, are_equal, copy_weights, remove_bounds

import rlox
from rlox.checkpoint import save_checkpoint
from rlox.multi_agent.players import ValueNorm

pytest.importorskip("pettingzoo")

SMALL = {"n_steps": 8, "hidden_sizes": [8, 8], "n_envs": 2, "batch_size": 64, "backend": "torch"}


# ---- one agent


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_one_agent_equals_ppo_bit_for_bit(env, backend):
    settings = {
        "n_envs": 4, "seed": 3, "n_steps": 64, "batch_size": 48, "n_epochs": 3, "learning_rate": 1e-3, "clip_vf": 0.3,
        "target_kl": 0.02, "learning_rate_schedule": "linear", "backend": backend,
    }  # fmt: skip
    ppo, mappo = rlox.PPO(env, **settings), rlox.MAPPO(env, n_agents=1, **settings)
    theirs, ours = ppo.train(2048), mappo.train(2048)
    assert mappo.backend == backend
    assert are_equal(copy_weights(ppo), copy_weights(mappo))
    timed = {name for name in theirs if name.startswith("time/")}
    assert {k: theirs[k] for k in theirs.keys() - timed} == {k: ours[k] for k in ours.keys() - timed}
    assert np.array_equal(ppo.evaluate(3).returns, mappo.evaluate(3).returns)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_one_agent_may_have_mappos_options(backend):
    algorithm = rlox.MAPPO(
        "CartPole-v1", n_steps=64, value_norm=True, value_loss="huber", clip_vf=0.2, clip_vf_max=True, backend=backend
    )
    assert math.isfinite(algorithm.train(1024)["value_loss"])
    assert algorithm.predict(np.zeros(4, np.float32)) in (0, 1)


# ---- probes


def values_of(algorithm, name, rows):
    """The values of `rows` by the critic of player `name`, in units of rewards."""
    at = next(i for i, one in enumerate(algorithm.learners) if one.name == name)
    policy, norm = algorithm.policy.players[at], algorithm.learners[at].norm
    found = policy.get_value(torch.from_numpy(np.asarray(rows, np.float32))).detach().numpy()
    return found if norm is None else norm.denormalized(found)


@pytest.mark.slow
def test_a_reward_that_needs_both_agents_is_found():
    algorithm = rlox.MAPPO(
        "together", env_fn=zoo_probes.Together, n_agents=2, n_envs=8, n_steps=20, seed=1, learning_rate=3e-3,
        hidden_sizes=[16], batch_size=320,
    )  # fmt: skip
    algorithm.train(8000)
    assert algorithm.evaluate(2).agent_returns.tolist() == [[5.0, 5.0]] * 2
    assert algorithm.predict_all({"one": [1.0], "two": [1.0]}) == {"one": 1, "two": 1}


@pytest.mark.parametrize("norm", [False, True])
def test_values_after_a_death_are_zero(norm):
    gamma = 0.9
    algorithm = rlox.MAPPO(
        "deaths", env_fn=zoo_probes.DiesHalfway, n_envs=4, n_steps=16, seed=1, gamma=gamma, critic="local",
        share_parameters=False, learning_rate=1e-2, learning_rate_schedule="linear", hidden_sizes=[32], batch_size=64,
        value_norm=norm, max_grad_norm=None, n_epochs=8,
    )  # fmt: skip
    algorithm.train(6400)
    for name, span in (("short", 4), ("long", 8)):
        known = [sum(gamma**k for k in range(span - t)) for t in range(span)]
        np.testing.assert_allclose(values_of(algorithm, name, np.eye(9)[:span]), known, atol=0.1)
    metrics = algorithm.collector.metrics()
    assert (metrics["episode/return/short"], metrics["episode/return/long"]) == (4.0, 8.0)
    assert algorithm.counters.mean_reward == 12.0
    assert algorithm.evaluate(3).returns.tolist() == [12.0] * 3


def test_a_time_limit_of_one_agent_bootstraps():
    gamma = 0.8
    algorithm = rlox.MAPPO(
        "limits", env_fn=zoo_probes.LimitForOne, n_envs=4, n_steps=16, seed=1, gamma=gamma, critic="local",
        share_parameters=False, learning_rate=1e-2, learning_rate_schedule="linear", hidden_sizes=[32], batch_size=64,
        max_grad_norm=None, n_epochs=8,
    )  # fmt: skip
    algorithm.train(6400)
    known = [sum(gamma**k for k in range(8 - t)) for t in range(8)]
    np.testing.assert_allclose(values_of(algorithm, "whole", np.eye(9)[:8]), known, atol=0.1)
    np.testing.assert_allclose(values_of(algorithm, "cut", np.eye(9)[:1]), [1 / (1 - gamma)], atol=0.1)


@pytest.mark.slow
def test_a_central_critic_sees_what_a_local_one_cannot():
    explained = {}
    for critic in ("central", "local"):
        algorithm = rlox.MAPPO(
            "bit", env_fn=zoo_probes.HiddenBit, n_envs=16, n_steps=16, seed=1, critic=critic, share_parameters=False,
            learning_rate=1e-2, hidden_sizes=[16], batch_size=256,
        )  # fmt: skip
        explained[critic] = algorithm.train(16 * 16 * 25)["explained_variance/blind"]
    assert explained["central"] > 0.95
    assert explained["local"] < 0.1


def test_illegal_actions_are_never_taken():
    algorithm = rlox.MAPPO("masked", env_fn=zoo_probes.Masked, n_envs=3, n_steps=16, seed=1)
    metrics = algorithm.train(500)  # the environment raises on illegal actions
    assert metrics["entropy"] == pytest.approx(0.0, abs=1e-6)
    for deterministic in (True, False):
        algorithm.evaluate(5, deterministic=deterministic)
        masks = {"one": [0, 0, 1], "two": [0, 1, 0]}
        found = algorithm.predict_all({name: [0.0] for name in masks}, deterministic, masks)
        assert found == {"one": 2, "two": 1}


# ---- one update against an independent computation


def perceptron(x, module):
    """The network `module` in float64, with a copy of its weights that has gradients."""
    linear = [layer for layer in module if isinstance(layer, torch.nn.Linear)]
    leaves = []
    for i, layer in enumerate(linear):
        w, b = (p.detach().double().requires_grad_() for p in (layer.weight, layer.bias))
        leaves += [w, b]
        x = x @ w.T + b
        x = torch.tanh(x) if i + 1 < len(linear) else x
    return x, leaves


def independent(algorithm, recorded, before):
    """Gradients of one update in float64 by player, computed agent by agent and step by step, where padded rows have
    weight 0 in the sums."""
    c, found, padding = algorithm.config, {}, 0
    steps = recorded.steps
    for player, policy in zip(algorithm.players, before, strict=True):
        g, n_agents = player.group, len(player.members)
        ids = np.eye(n_agents) if c.agent_id else np.zeros((n_agents, 0))
        rows = []

        def seen(step, e, a, final=False, g=g, player=player, ids=ids):
            obs = (step.final_obs if final else step.obs)[g][e, player.members[a]]
            state = (step.final_state if final else step.state)[e]
            x = torch.tensor(np.r_[obs, ids[a]], dtype=torch.float64)
            s = torch.tensor(np.r_[state, ids[a]], dtype=torch.float64) if c.critic == "central" else x
            return x, s

        def value(s, policy=policy):
            return perceptron(s[None], policy.critic)[0].item()

        for e in range(algorithm.n_envs):
            for a, member in enumerate(player.members):
                trace, column = 0.0, []
                for t in reversed(range(len(recorded.actions))):
                    step, after = steps[t], steps[t + 1]
                    alive = bool(step.alive[g][e, member])
                    x, s = seen(step, e, a)
                    v = value(s)
                    if not alive:
                        trace = 0.0
                        column.append((x, s, v, 0.0, recorded.actions[t][g][e, member], False))
                        continue
                    if after.terminated[g][e, member]:
                        ahead, trace = 0.0, 0.0
                    elif after.truncated[g][e, member]:
                        ahead, trace = value(seen(after, e, a, final=True)[1]), 0.0
                    else:
                        ahead = value(seen(after, e, a)[1])
                    delta = after.rewards[g][e, member] + c.gamma * ahead - v
                    trace = delta + c.gamma * c.gae_lambda * trace
                    column.append((x, s, v, trace, recorded.actions[t][g][e, member], True))
                rows += column[::-1]
        x, s = (torch.stack([row[i] for row in rows]) for i in (0, 1))
        v, advantage, alive = (torch.tensor([float(row[i]) for row in rows], dtype=torch.float64) for i in (2, 3, 5))
        n = alive.sum()
        mean = (alive * advantage).sum() / n
        deviation = ((alive * (advantage - mean) ** 2).sum() / (n - 1)).sqrt()
        weight = (advantage - mean) / (deviation + 1e-8)
        outputs, actor = perceptron(x, policy.actor)
        values, critic = perceptron(s, policy.critic)
        actions = np.stack([row[4] for row in rows])
        leaves = [*actor, *critic]
        if player.spec.discrete:
            log_p = torch.log_softmax(outputs, -1)
            log_prob = log_p[torch.arange(len(rows)), torch.as_tensor(actions)]
            entropy = -(log_p.exp() * log_p).sum(-1)
        else:
            log_std = policy.log_std.detach().double().requires_grad_()
            leaves = [log_std, *leaves]
            normal = torch.distributions.Normal(outputs, log_std.exp())
            log_prob = normal.log_prob(torch.as_tensor(actions, dtype=torch.float64)).sum(-1)
            entropy = normal.entropy().sum(-1)
        ratio = (log_prob - log_prob.detach()).exp()
        returns = advantage + v
        loss = (
            -(alive * ratio * weight).sum()
            + c.vf_coef * (alive * (values[:, 0] - returns) ** 2).sum()
            - c.ent_coef * (alive * entropy).sum()
        ) / n
        found[player.name] = torch.cat([grad.reshape(-1) for grad in torch.autograd.grad(loss, leaves)]).numpy()
        padding += len(rows) - int(n)
    assert padding
    return found


@pytest.mark.parametrize("options", [
    {}, {"critic": "local"}, {"agent_id": True}, {"share_parameters": False}, {"critic": "local", "agent_id": True},
])  # fmt: skip
def test_the_gradient_of_an_update_equals_an_independent_computation(options):
    settings = {**SMALL, "n_steps": 16, "n_epochs": 1, "batch_size": 10_000, "max_grad_norm": None, "gamma": 0.9}
    algorithm = rlox.MAPPO("zoo", env_fn=lambda: remove_bounds(zoo_probes.Zoo()), seed=5, **settings, **options)
    recorded = Recorded(algorithm)
    before = [copy.deepcopy(learner.policy) for learner in algorithm.learners]
    algorithm.train(32)
    known = independent(algorithm, recorded, before)
    for learner in algorithm.learners:
        np.testing.assert_allclose(learner.optimizer.grad.numpy(), known[learner.name], atol=2e-5, rtol=2e-4)


def test_batches_contain_no_rows_of_dead_agents():
    algorithm = rlox.MAPPO("zoo", env_fn=zoo_probes.Zoo, seed=5, **SMALL)
    recorded = Recorded(algorithm)
    batch = algorithm.collector.collect(algorithm.actor, 14)
    for player, rows in zip(algorithm.players, batch.players, strict=True):
        alive = np.stack([step.alive[player.group] for step in recorded.steps[:-1]])
        assert len(rows) == alive.sum() < alive.size
    walkers = batch.players[0]
    # 14 steps are two episodes of 7 steps, of which the walkers live 2, 5 and 7.
    assert len(walkers) == 2 * 2 * (2 + 5 + 7)
    assert batch.n_taken == 28
    assert len(batch) == sum(map(len, batch.players))


# ---- the kernel against PyTorch


@pytest.mark.parametrize("env", [zoo_probes.Zoo, zoo_probes.Masked])
@pytest.mark.parametrize("options", [
    {}, {"critic": "local", "agent_id": True}, {"clip_vf": 0.05, "value_norm": True}, {"optimizer": "rmsprop"},
    {"share_parameters": False, "value_norm": True, "value_loss": "huber", "huber_delta": 0.5, "activation": "relu"},
    {"value_norm": True, "clip_vf": 0.05, "clip_vf_max": True, "target_kl": 0.01, "normalize_advantages": False},
])  # fmt: skip
def test_the_kernel_learns_what_pytorch_does(env, options):
    settings = {**SMALL, "n_envs": 4, "n_steps": 32, "batch_size": 40, "n_epochs": 3, "learning_rate": 1e-3, "seed": 5}
    by = {
        backend: rlox.MAPPO("zoo", env_fn=env, **{**settings, **options, "backend": backend})
        for backend in ("torch", "native")
    }
    for _ in range(3):
        torchs, natives = (algorithm.train(128) for algorithm in by.values())
        for name, value in torchs.items():
            if not name.startswith("time/"):
                assert natives[name] == pytest.approx(value, rel=1e-3, abs=1e-4, nan_ok=True), name
    for name, value in copy_weights(by["torch"]).items():
        np.testing.assert_allclose(by["native"].native.weights()[name], value, atol=5e-4)
    for i, learner in enumerate(by["torch"].learners):
        if learner.norm is not None:
            np.testing.assert_allclose(by["native"].learners[i].norm.moments, learner.norm.moments, rtol=1e-5)


def test_training_can_continue_after_an_environment_failed(tmp_path):
    class Fails(zoo_probes.Zoo):
        def step(self, actions):
            if self.episode == 3:
                raise RuntimeError("out of fuel")
            return super().step(actions)

    algorithm = rlox.MAPPO("zoo", env_fn=Fails, seed=5, **SMALL)
    with pytest.raises(RuntimeError, match="out of fuel"):
        algorithm.train(320)
    assert algorithm.collector.state() is None
    algorithm.save(tmp_path / "kept.safetensors")
    resumed = rlox.MAPPO.from_checkpoint(tmp_path / "kept.safetensors", env_fn=zoo_probes.Zoo)
    resumed.train(32)
    assert resumed.counters.env_steps == algorithm.counters.env_steps + 32


def test_weights_that_were_moved_are_an_error():
    algorithm = rlox.MAPPO("zoo", env_fn=zoo_probes.Zoo, seed=5, **SMALL)
    algorithm.policy.double().float()
    with pytest.raises(ValueError, match="must stay in the optimiser's memory"):
        algorithm.train(16)


# ---- names, arguments, checkpoints


def test_the_number_of_agents_is_checked():
    with pytest.raises(ValueError, match="n_agents must be 2, the environment's number, got 3"):
        rlox.MAPPO("together", env_fn=zoo_probes.Together, n_agents=3)
    with pytest.raises(ValueError, match="n_agents must be 1 on 'CartPole-v1'"):
        rlox.MAPPO("CartPole-v1", n_agents=2)
    with pytest.raises(ValueError, match="must be a registered id, got 'CartPool-v1'; did you mean 'CartPole-v1'"):
        rlox.MAPPO("CartPool-v1", n_agents=3)


@pytest.mark.parametrize(("name", "value", "message"), [
    ("normalize_obs", True, "normalize_obs must be false"),
    ("normalize_rewards", True, "value_norm=true"),
    ("env_wrappers", ["ClipAction"], "env_wrappers must be empty"),
    ("reward_fn", "sign", "reward_fn must be None"),
    ("policy", torch.nn.Linear(1, 1), "policy must be None"),
])  # fmt: skip
def test_options_for_a_single_agent_are_errors(name, value, message):
    with pytest.raises(ValueError, match=message):
        rlox.MAPPO("together", env_fn=zoo_probes.Together, **{name: value})


def test_other_algorithms_suggest_mappo_for_several_agents():
    with pytest.raises(ValueError, match="PPO: env_id must have one agent"):
        rlox.PPO("pettingzoo:mpe2.simple_spread_v3")


def test_predictions_by_index_and_name_of_an_agent():
    algorithm = rlox.MAPPO("zoo", env_fn=zoo_probes.Zoo, seed=5, **SMALL)
    assert algorithm.agents == ("walker_0", "walker_1", "walker_2", "flyer")
    assert [player.name for player in algorithm.players] == ["walker", "flyer"]
    assert algorithm.predict([0.0, 0.0, 0.0]) in range(3)
    assert algorithm.predict(np.zeros((4, 5)), agent_idx=3).shape == (4, 2)
    found = algorithm.predict_all({"walker_1": [0.0] * 3, "flyer": [0.0] * 5}, deterministic=False)
    assert list(found) == ["walker_1", "flyer"]
    with pytest.raises(ValueError, match="observations must belong to walker_0"):
        algorithm.predict_all({"swimmer": [0.0]})
    with pytest.raises(ValueError, match=r"masks must belong to walker_0, .* got 'swimmer'"):
        algorithm.predict_all({"walker_1": [0.0] * 3}, masks={"swimmer": [1, 1, 0]})
    with pytest.raises(ValueError, match="agent_idx must be at most 3"):
        algorithm.predict([0.0, 0.0, 0.0], agent_idx=4)
    with pytest.raises(ValueError, match="mask must be None"):
        algorithm.predict([0.0, 0.0, 0.0], mask=[1, 1, 0])


@pytest.mark.parametrize("options", [{}, {"share_parameters": False, "value_norm": True}, {"critic": "local"}])
def test_a_resumed_run_continues_bit_for_bit(tmp_path, options):
    whole = rlox.MAPPO("zoo", env_fn=zoo_probes.Zoo, seed=5, **SMALL, **options)
    whole.train(96)
    part = rlox.MAPPO("zoo", env_fn=zoo_probes.Zoo, seed=5, **SMALL, **options)
    part.plan(96)
    part.train(32)
    part.save(tmp_path / "part.safetensors")
    resumed = rlox.MAPPO.from_checkpoint(tmp_path / "part.safetensors", env_fn=zoo_probes.Zoo)
    resumed.train(64)
    assert resumed.collector.restore_note() is None
    assert are_equal(copy_weights(whole), copy_weights(resumed))
    assert whole.collector.metrics() == resumed.collector.metrics()
    assert np.array_equal(whole.evaluate(2).agent_returns, resumed.evaluate(2).agent_returns)


def test_a_file_cannot_claim_larger_networks_than_it_contains(tmp_path):
    algorithm = rlox.MAPPO("zoo", env_fn=zoo_probes.Zoo, seed=5, **SMALL)
    algorithm.save(tmp_path / "small.safetensors")
    saved = rlox.load_checkpoint(tmp_path / "small.safetensors")
    saved.header["config"]["hidden_sizes"] = [8, 900_000]
    save_checkpoint(tmp_path / "large.safetensors", saved)
    with pytest.raises(ValueError, match="hidden_sizes does not fit the checkpoint"):
        rlox.MAPPO.from_checkpoint(tmp_path / "large.safetensors", env_fn=zoo_probes.Zoo)


def test_value_norm_follows_the_returns():
    norm, rng = ValueNorm(), np.random.default_rng(0)
    assert norm.deviation == pytest.approx(0.1)
    for _ in range(200):
        rows = rng.normal(7.0, 3.0, 1000)
        norm.update(rows.mean(), np.square(rows).mean())
    assert norm.mean == pytest.approx(7.0, abs=0.1)
    assert norm.deviation == pytest.approx(3.0, abs=0.1)
    assert norm.denormalized(np.ones(1, np.float32))[0] == pytest.approx(norm.mean + norm.deviation)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_an_evaluation_in_parallel_to_training_has_the_same_numbers(backend):
    found = []
    for workers in (0, 1):
        callback = rlox.EvalCallback(n_points=2, n_episodes=3, workers=workers, imports=["zoo_probes"])
        settings = {"seed": 5, **SMALL, "backend": backend, "callbacks": [callback]}
        rlox.MAPPO("zoo", env_fn=zoo_probes.Zoo, **settings).train(64)
        found.append([(step, one.agent_returns.tolist(), one.summary()) for step, one in callback.evaluations])
    assert found[0] == found[1]
    assert "return/walker" in found[0][0][2]


def test_the_live_view_has_a_line_for_each_agent_and_group():
    algorithm = rlox.MAPPO("zoo", env_fn=zoo_probes.Zoo, seed=5, **SMALL)
    assert algorithm.collector.lines() == []
    algorithm.train(32)
    lines = algorithm.collector.lines()
    assert [line.split()[0] for line in lines] == [*algorithm.agents, "walker"]
    assert all("return" in line for line in lines)


# ---- self-play


PLAY = {"share_parameters": False, "self_play": True, "self_play_every": 2, "self_play_pool": 3}


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_self_play_learns_against_earlier_policies(backend):
    settings = {**SMALL, **PLAY, "backend": backend}
    algorithm = rlox.MAPPO("pennies", env_fn=zoo_probes.Pennies, seed=5, **settings)
    game, moved = algorithm.collector.self_play, []
    for _ in range(10):
        before = copy_weights(algorithm)
        algorithm.train(16)
        after = copy_weights(algorithm)
        moved.append({name.split(".")[1] for name in after if not np.array_equal(before[name], after[name])})
    assert moved == [{"0"}, {"0"}, {"1"}, {"1"}] * 2 + [{"0"}, {"0"}]
    assert [len(pool) for pool in game.pools] == [3, 3]
    found = algorithm.collector.metrics()
    assert {"rating/even", "rating/odd"} <= found.keys()


def test_ratings_follow_who_wins():
    algorithm = rlox.MAPPO("pennies", env_fn=zoo_probes.Pennies, seed=5, **{**SMALL, **PLAY})
    game = algorithm.collector.self_play
    game.begin()
    game.end(np.array([[3.0, -3.0]] * 30))
    assert game.ratings[0] > 1050
    assert game.pools[1][0].rating == pytest.approx(2000 - game.ratings[0])
    game.end(np.array([[-3.0, 3.0]] * 60))
    assert game.ratings[0] < 950
    game.end(np.zeros((500, 2)))
    assert game.ratings[0] == pytest.approx(1000, abs=1)


def test_self_play_resumes_bit_for_bit(tmp_path):
    settings = {"env_fn": zoo_probes.Pennies, "seed": 5, **SMALL, **PLAY}
    whole, part = rlox.MAPPO("pennies", **settings), rlox.MAPPO("pennies", **settings)
    whole.train(16 * 9)
    part.train(16 * 5)
    part.save(tmp_path / "part.safetensors")
    resumed = rlox.MAPPO.from_checkpoint(tmp_path / "part.safetensors", env_fn=zoo_probes.Pennies)
    resumed.train(16 * 4)
    assert are_equal(copy_weights(whole), copy_weights(resumed))
    assert whole.collector.metrics() == resumed.collector.metrics()


def test_self_play_needs_two_policies():
    with pytest.raises(ValueError, match="self_play must be false where all agents share one policy"):
        rlox.MAPPO("pennies", env_fn=zoo_probes.Pennies, self_play=True)
    with pytest.raises(ValueError, match="self_play must be false with one agent"):
        rlox.MAPPO("CartPole-v1", self_play=True)
