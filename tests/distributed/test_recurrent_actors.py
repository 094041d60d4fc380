"""IMPALA and APPO with a memory and with masks of legal actions, against exact computations step by step."""

from __future__ import annotations

import math
import sys

import actor_runs
import cloudpickle
import numpy as np
import pytest
import torch
from actor_runs import Answer, train
from gymnasium import spaces
from torch import nn

import rlox
from rlox.compiled import NativePolicy
from rlox.config import IMPALAConfig, OnPolicyConfig, RemoteConfig
from rlox.distributed import Actor, ActorCollector, ActorPlan, Trajectory, Weights
from rlox.distributed.grpc_actors import ActorSessions
from rlox.envs.remote import codec
from rlox.envs.remote.client import Connection, WorkerLost
from rlox.envs.remote.codec import Message
from rlox.envs.remote.server import Server
from rlox.envs.remote.session import EnvSessions
from rlox.kernels.rng import Rng
from rlox.nn.acting import acting_policy

# Processes cannot import a test module by its name; a user's main module is sent by value anyway.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

D, ACTIONS = 3, 3
MEMORY = {"hidden_sizes": [6], "memory": "lstm", "memory_size": 5, "memory_layers": 2}
SMALL = {"n_actors": 2, "n_envs": 3, "n_steps": 8, "seed": 3, **MEMORY}
KINDS = pytest.mark.parametrize("memory", ["lstm", "gru"])


class Ends(actor_runs.Ends):
    action_space = spaces.Discrete(ACTIONS)
    largest = 1


# ---- exact computations, for one environment


def follow(network, rows, state, is_first):
    """Return outputs (T, …) and states (T, S) of a network in float64 by PyTorch's own memory, step after step."""
    memory = network.memory
    module = (nn.LSTM if memory.kind == "lstm" else nn.GRU)(memory.n_inputs, memory.size, memory.n_layers).double()
    outputs, states = [], []
    for row, first in zip(rows, is_first, strict=True):
        parts = (state * (0.0 if first else 1.0)).view(memory.n_layers, -1, memory.size).unbind(1)
        parts = tuple(part.contiguous() for part in parts)
        arguments = network.trunk(row)[None], parts if memory.kind == "lstm" else parts[0]
        output, after = torch.func.functional_call(module, dict(memory.named_parameters()), arguments)
        state = torch.stack(after if memory.kind == "lstm" else (after,), 1).flatten()
        outputs.append(network.head(output[0]))
        states.append(state)
    return torch.stack(outputs), torch.stack(states)


def log_softmax(logits, masks):
    """Log-probabilities (T, n) and entropies (T,) over the legal actions only; -inf for the others."""
    rows = []
    for logit, mask in zip(logits, masks, strict=True):
        rows.append((logit[mask] - logit[mask].logsumexp(0), mask))
    lowest = torch.full_like(logits, -math.inf)
    log_probs = torch.stack([row.masked_scatter(mask, r) for row, (r, mask) in zip(lowest, rows, strict=True)])
    return log_probs, torch.stack([-(r.exp() * r).sum() for r, _ in rows])


def exact_copy(policy):
    copy = rlox.DiscretePolicy(D, ACTIONS, [6], memory=memory_of(policy)).double()
    copy.load_state_dict({name: x.double() for name, x in policy.state_dict().items()})
    return copy


def memory_of(policy):
    memory = policy.actor.memory
    return memory.kind, memory.size, memory.n_layers, None


def tensor(array):
    return torch.from_numpy(np.asarray(array, np.float64))


def vtrace_of(policy, one, i, c, weighted):
    """Value targets and advantages (T,) of environment i of a rollout."""
    n_steps, size = len(one.rewards), policy.actor.state_dim
    masks = torch.ones(n_steps, ACTIONS, dtype=torch.bool) if one.masks is None else torch.from_numpy(one.masks[:, i])
    obs, before = tensor(one.obs[:, i]), tensor(one.memories[0, i])
    with torch.no_grad():
        value, _ = follow(policy.critic, obs, before[size:], [*one.is_first[:, i], False])
        logits, _ = follow(policy.actor, obs[:-1], before[:size], one.is_first[:, i])
        taken = torch.from_numpy(one.actions[:, i])
        log_probs = log_softmax(logits, masks)[0].gather(1, taken[:, None])[:, 0].numpy()
        at_limit = {}
        for k, (t, n) in enumerate(one.limits.tolist()):
            held = tensor(one.limit_memories[k])[size:]
            at_limit[t, n] = float(follow(policy.critic, tensor(one.reached[k : k + 1]), held, [False])[0])
    value, ratio = value[:, 0].numpy(), np.exp(log_probs - one.log_probs[:, i])
    targets, advantages = np.zeros(n_steps), np.zeros(n_steps)
    ahead, v_next, target_next = 0.0, value[-1], value[-1]
    for t in reversed(range(n_steps)):
        if one.terminated[t, i]:
            ahead = v_next = target_next = 0.0
        elif one.truncated[t, i]:
            ahead, v_next = 0.0, at_limit[t, i]
            target_next = v_next
        rho, trace = min(ratio[t], c.rho_bar), c.gae_lambda * min(ratio[t], c.c_bar)
        advantages[t] = (rho if weighted else 1.0) * (one.rewards[t, i] + c.gamma * target_next - value[t])
        ahead = rho * (one.rewards[t, i] + c.gamma * v_next - value[t]) + c.gamma * trace * ahead
        targets[t] = value[t] + ahead
        v_next, target_next = value[t], targets[t]
    return targets, advantages


def vtrace(policy, rollouts, c, weighted=True):
    pairs = [vtrace_of(policy, one, i, c, weighted) for one in rollouts for i in range(one.rewards.shape[1])]
    return [np.stack(columns, 1).ravel() for columns in zip(*pairs, strict=True)]


# ---- rollouts


def shaken(policy, seed, by):
    """Change the weights by normal noise."""
    with torch.no_grad():
        for p in policy.parameters():
            p += torch.from_numpy(by * Rng(seed).normal(p.shape)).float()
            seed += 100
    return policy


def make_policy(memory="lstm", seed=0):
    return shaken(rlox.DiscretePolicy(D, ACTIONS, [6], memory=(memory, 5, 2, None), rng=Rng(seed)), 1, 0.4)


def acted(config, policy, n_rollouts=2, **options):
    """Rollouts of an actor, one after the other, with weights that differ a little from the learner's `policy`."""
    behaviour = shaken(acting_policy(policy).copy().module, 50, 0.3)
    actor = Actor(ActorPlan(Ends, 4, 12, 7, make_policy(config.memory), config, **options), 0)
    rollouts = [actor.rollout(Weights(0, acting_policy(behaviour).weights())) for _ in range(n_rollouts)]
    actor.close()
    return rollouts, behaviour


def awkward(policy, n_parts=1, seed=0):
    """A rollout of 6 steps: episodes that end at the first and at the last step, by a termination and by a time limit,
    and steps with one legal action."""
    rng = np.random.default_rng(seed)
    n_steps, n = 6, 4
    terminated, truncated = np.zeros((2, n_steps, n), np.bool_)
    terminated[[0, -1, 3], [0, 0, 2]] = True
    truncated[[-1, 0, 2], [1, 2, 3]] = True
    ended = terminated | truncated
    is_first = np.concatenate([[[True, False, False, True]], ended[:-1]])
    memories = rng.normal(0, 0.5, (n_parts, n, policy.state_dim)).astype(np.float32)
    memories[is_first[:: n_steps // n_parts]] = 0.0
    actions = rng.integers(0, ACTIONS, (n_steps, n))
    masks = rng.random((n_steps, n, ACTIONS)) < 0.5
    masks[1::2, 1] = False
    np.put_along_axis(masks, actions[..., None], True, -1)
    assert (masks.sum(-1) == 1).any()
    assert (masks.sum(-1) > 1).any()
    limits = np.argwhere(truncated)
    return Trajectory(
        rng.normal(0, 1, (n_steps + 1, n, D)).astype(np.float32),
        actions,
        rng.uniform(-1.5, -0.3, (n_steps, n)).astype(np.float32),
        rng.normal(0, 1, (n_steps, n)).astype(np.float32),
        terminated,
        truncated,
        limits,
        rng.normal(0, 1, (len(limits), D)).astype(np.float32),
        np.zeros(0),
        np.zeros(0, np.int64),
        0,
        masks=masks,
        memories=memories,
        is_first=is_first,
        limit_memories=rng.normal(0, 0.5, (len(limits), policy.state_dim)).astype(np.float32),
    )


# ---- what actors collect


@KINDS
def test_an_actor_keeps_its_memory_over_rollouts_and_forgets_it_at_ends(memory):
    config = IMPALAConfig(**{**MEMORY, "memory": memory})
    (first, second), behaviour = acted(config, make_policy(memory), sequence_length=4)
    exact = exact_copy(behaviour)
    size = exact.actor.state_dim
    assert first.memories.shape == (3, 4, exact.state_dim)
    assert first.is_first[0].all()
    assert (first.memories[0] == 0).all()
    ended = np.concatenate([first.terminated | first.truncated, second.terminated | second.truncated])
    assert ended[11].any()  # an end at the last step of a rollout
    is_first = np.concatenate([first.is_first, second.is_first])
    np.testing.assert_array_equal(is_first[1:], ended[:-1])
    obs = np.concatenate([first.obs[:-1], second.obs[:-1]])
    states = []
    for i in range(4):
        start = torch.zeros(exact.state_dim, dtype=torch.float64)
        with torch.no_grad():
            rows = tensor(obs[:, i])
            logits, acted_ = follow(exact.actor, rows, start[:size], is_first[:, i])
            _, judged = follow(exact.critic, rows, start[size:], is_first[:, i])
        states.append(torch.cat([acted_, judged], 1).numpy())
        taken = np.concatenate([first.actions, second.actions])[:, i]
        expected = logits.log_softmax(1).numpy()[np.arange(24), taken]
        got = np.concatenate([first.log_probs, second.log_probs])[:, i]
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    after = np.stack(states, 1)  # (24, N, S)
    for part, start in enumerate((4, 8, 12, 16, 20), 1):
        before = np.where(is_first[start][:, None], 0.0, after[start - 1])
        got = np.concatenate([first.memories, second.memories])[part]
        np.testing.assert_allclose(got, before, rtol=1e-4, atol=1e-5)
    for one, start in ((first, 0), (second, 12)):
        assert len(one.limits)
        for (t, i), state in zip(one.limits, one.limit_memories, strict=True):
            np.testing.assert_allclose(state, after[start + t, i], rtol=1e-4, atol=1e-5)


@KINDS
@pytest.mark.parametrize("weighted", [True, False])
def test_a_batch_is_vtrace_with_the_learners_memory(memory, weighted):
    config = IMPALAConfig(**{**MEMORY, "memory": memory}, rho_bar=1.1, c_bar=0.9, gae_lambda=0.9, gamma=0.8)
    policy = make_policy(memory)
    rollouts, _ = acted(config, policy)
    collector = ActorCollector(Ends, 4, 0, config=config, weighted=weighted)
    batch = collector.estimate(policy, rollouts[:1], rollouts[1:])
    targets, advantages = vtrace(exact_copy(policy), rollouts, config, weighted)
    np.testing.assert_allclose(batch.returns.numpy(), targets, rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(batch.advantages.numpy(), advantages, rtol=1e-4, atol=2e-5)
    assert (len(batch), batch.n_taken, batch.n_envs) == (96, 48, 8)
    assert batch.memories.shape == (1, 8, policy.state_dim)
    assert 0 < collector.metrics()["actors/ratio_clipped"] < 1
    collector.close()


def test_illegal_actions_have_no_share_in_the_values_of_a_batch():
    policy, config = make_policy(), IMPALAConfig(**MEMORY)
    rollouts = [awkward(policy, seed=seed) for seed in (0, 1)]
    collector = ActorCollector(Ends, 4, 0, config=config)
    batch = collector.estimate(policy, rollouts)
    targets, advantages = vtrace(exact_copy(policy), rollouts, config)
    np.testing.assert_allclose(batch.returns.numpy(), targets, rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(batch.advantages.numpy(), advantages, rtol=1e-4, atol=2e-5)
    collector.close()


# ---- updates


def outputs_of(policy, rollouts, length):
    """Log-probabilities of the actions, entropies and values of all rows, in sequences of `length` steps, as columns of
    environments."""
    size, columns = policy.actor.state_dim, []
    for one in rollouts:
        for i in range(one.rewards.shape[1]):
            parts = []
            for part, start in enumerate(range(0, len(one.rewards), length)):
                rows = slice(start, start + length)
                obs, before, first = tensor(one.obs[rows, i]), tensor(one.memories[part, i]), one.is_first[rows, i]
                logits, _ = follow(policy.actor, obs, before[:size], first)
                values, _ = follow(policy.critic, obs, before[size:], first)
                log_probs, entropy = log_softmax(logits, torch.from_numpy(one.masks[rows, i]))
                taken = torch.from_numpy(one.actions[rows, i])[:, None]
                parts.append((log_probs.gather(1, taken)[:, 0], entropy, values[:, 0]))
            columns.append([torch.cat(column) for column in zip(*parts, strict=True)])
    return [torch.stack(column, 1).flatten() for column in zip(*columns, strict=True)]


def gradient_of_update(algorithm, batch):
    gradients = []
    algorithm.optimizer.reduce = lambda gradient: gradients.append(gradient.numpy().copy())
    metrics = algorithm.update(batch)
    algorithm.close()
    return gradients, metrics


@KINDS
def test_the_gradient_of_impala_over_awkward_rollouts(memory):
    settings = {**MEMORY, "memory": memory}
    impala = rlox.IMPALA(Ends, 1, 4, policy=make_policy(memory), ent_coef=0.03, backend="torch", **settings)
    rollouts = [awkward(impala.policy, seed=seed) for seed in (0, 1)]
    batch = impala.collector.estimate(impala.policy, rollouts[:1], rollouts[1:])
    exact = exact_copy(impala.policy)
    log_probs, entropy, values = outputs_of(exact, rollouts, 6)
    advantages, returns = batch.advantages.double(), batch.returns.double()
    loss = -(log_probs * advantages).mean() + impala.config.vf_coef * (values - returns).square().mean()
    (loss - 0.03 * entropy.mean()).backward()
    (gradient,), metrics = gradient_of_update(impala, batch)
    expected = torch.cat([p.grad.flatten() for p in exact.parameters()]).numpy()
    np.testing.assert_allclose(gradient, expected, rtol=1e-3, atol=1e-5 * np.abs(expected).max())
    assert float(metrics["entropy"]) == pytest.approx(entropy.mean().item(), rel=1e-5)


@KINDS
@pytest.mark.parametrize("length", [6, 3])
def test_the_gradient_of_appo_over_awkward_rollouts(memory, length):
    settings = {**MEMORY, "memory": memory, "n_steps": 6, "sequence_length": length}
    appo = rlox.APPO(
        Ends, 1, 4, policy=make_policy(memory), ent_coef=0.03, clip_eps=0.3, n_epochs=1, batch_size=48, backend="torch",
        **settings,
    )  # fmt: skip
    rollouts = [awkward(appo.policy, 6 // length, seed=seed) for seed in (0, 1)]
    batch = appo.collector.estimate(appo.policy, rollouts)
    exact = exact_copy(appo.policy)
    log_probs, entropy, values = outputs_of(exact, rollouts, length)
    advantages, returns = batch.advantages.double(), batch.returns.double()
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    ratio = (log_probs - batch.log_probs.double()).exp()
    clipped = ratio.clamp(0.7, 1.3)
    assert (ratio != clipped).any()
    loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
    loss = loss + appo.config.vf_coef * (values - returns).square().mean() - 0.03 * entropy.mean()
    loss.backward()
    (gradient,), metrics = gradient_of_update(appo, batch)
    expected = torch.cat([p.grad.flatten() for p in exact.parameters()]).numpy()
    np.testing.assert_allclose(gradient, expected, rtol=1e-3, atol=1e-5 * np.abs(expected).max())
    assert float(metrics["entropy"]) == pytest.approx(entropy.mean().item(), rel=1e-5)


def test_minibatches_of_appo_are_whole_sequences():
    appo = rlox.APPO(Ends, 2, 3, n_steps=8, sequence_length=4, batch_size=9, n_epochs=1, backend="torch", **MEMORY)
    sizes = []
    appo.optimizer.reduce = lambda gradient: sizes.append(len(gradient))
    appo.train(24)
    appo.close()
    assert len(sizes) == 3  # of 6 sequences of 4 steps, at most two fit in 9 rows


@pytest.mark.slow
def test_impala_learns_cart_pole_without_velocities():
    """Without a memory, the mean return is about 50 at best."""
    learning = {"learning_rate": 2e-3, "ent_coef": 0.01, "hidden_sizes": [32], "memory": "lstm", "memory_size": 32}
    impala = rlox.IMPALA("rlox/CartPoleHidden-v1", 2, 8, seed=1, n_steps=32, **learning)
    assert train(impala, 50_000)[1]["mean_reward"] > 120


@KINDS
def test_without_lag_and_clipping_an_update_equals_a2cs(memory):
    common = {**SMALL, "memory": memory, "learning_rate": 7e-4, "ent_coef": 0.01}
    del common["n_actors"]
    ours = rlox.IMPALA("CartPole-v1", 1, max_grad_norm=0.5, rho_bar=math.inf, c_bar=math.inf, **common)
    theirs = rlox.A2C("CartPole-v1", **common)
    np.testing.assert_allclose(train(ours, 480)[0], train(theirs, 480)[0], rtol=0, atol=1e-5)


# ---- where actors run


def test_a_seed_determines_the_run_whatever_the_actors_run_in():
    settings = {**SMALL, "memory": "gru", "normalize_obs": True, "replay_rollouts": 1}
    threads, metrics = train(rlox.IMPALA("CartPole-v1", actors="threads", **settings), 480)
    assert metrics["actors/lag_max"] >= 1.0
    processes, _ = train(rlox.IMPALA("CartPole-v1", actors="processes", **settings), 480)
    np.testing.assert_array_equal(threads, processes)


@pytest.mark.parametrize("kind", ["threads", "processes"])
@pytest.mark.parametrize("algo", [rlox.IMPALA, rlox.APPO])
def test_a_saved_run_continues_with_the_memory_of_its_actors(algo, kind, tmp_path):
    more = {"sequence_length": 4, "batch_size": 16} if algo is rlox.APPO else {"replay_rollouts": 1}
    settings = {**SMALL, "actors": kind, **more}
    whole, _ = train(algo("CartPole-v1", **settings), 480)
    half = algo("CartPole-v1", **settings)
    half.train(240)
    half.save(tmp_path / "half.safetensors")
    half.close()
    rest = algo.from_checkpoint(tmp_path / "half.safetensors")
    assert rest.collector.state() is not None
    assert any(name.endswith("/policy_memory") for name in rest.collector.state())
    np.testing.assert_array_equal(train(rest, 240)[0], whole)


# ---- masks of legal actions


class _Masks(rlox.Callback):
    """Checks that every action of each batch was legal, and that some were not."""

    def on_rollout_end(self, *, batch, **info):
        masks, actions = batch.array("masks"), batch.array("actions")
        assert np.take_along_axis(masks, actions[:, None], 1).all()
        self.some = not masks.all()


def masked(algo, env="rlox/MaskedTMaze-v0", **settings):
    callback = _Masks()
    algorithm = algo(env, seed=3, n_envs=3, n_steps=12, callbacks=[callback], **settings)
    weights, metrics = train(algorithm, 432)
    assert callback.some
    return weights, metrics


@pytest.mark.parametrize("algo", [rlox.IMPALA, rlox.APPO])
def test_the_kernel_learns_with_masks_as_pytorch_does(algo):
    assert algo("rlox/MaskedTMaze-v0").backend == "native"
    native, torch_ = (masked(algo, hidden_sizes=[16], backend=backend)[0] for backend in ("native", "torch"))
    np.testing.assert_allclose(native, torch_, rtol=0, atol=1e-5)


@pytest.mark.parametrize("settings", [{"hidden_sizes": [16]}, MEMORY], ids=["masks", "both"])
def test_masks_come_from_actors_in_processes(settings):
    threads, processes = (masked(rlox.IMPALA, actors=kind, **settings)[0] for kind in ("threads", "processes"))
    np.testing.assert_array_equal(threads, processes)


def test_masks_come_from_workers():
    envs = EnvSessions("rlox/MaskedTMaze-v0")
    server = Server({"env": envs, "actor": ActorSessions(envs)}).start()
    for settings in ({"hidden_sizes": [16]}, MEMORY):
        threads, _ = masked(rlox.APPO, **settings)
        remote, _ = masked(
            rlox.APPO, worker_addresses=[f"127.0.0.1:{server.port}"], actor_order="fixed", **settings
        )  # fmt: skip
        np.testing.assert_array_equal(threads, remote)
    server.stop(0.1)


def test_illegal_actions_of_a_worker_are_errors():
    policy = rlox.DiscretePolicy(2, 4, [6])
    plan = ActorPlan("rlox/MaskedTMaze-v0", 2, 12, 0, policy, OnPolicyConfig(hidden_sizes=[6]))
    answer = Answer(plan)
    illegal = np.eye(4, dtype=np.bool_)[(answer.arrays["actions"] + 1) % 4]
    answer.require_refused("masks", lambda masks: illegal, "actions must be legal by the masks")


def test_a_saved_run_with_masks_and_memory_continues(tmp_path):
    settings = {"seed": 3, "n_envs": 3, "n_steps": 8, **MEMORY}
    whole, _ = train(rlox.IMPALA("rlox/MaskedTMaze-v0", **settings), 480)
    half = rlox.IMPALA("rlox/MaskedTMaze-v0", **settings)
    half.train(240)
    half.save(tmp_path / "half.safetensors")
    half.close()
    rest = rlox.IMPALA.from_checkpoint(tmp_path / "half.safetensors")
    np.testing.assert_array_equal(train(rest, 240)[0], whole)


def test_workers_give_the_same_run_as_threads(workers):
    for algo, more in ((rlox.IMPALA, {}), (rlox.APPO, {"sequence_length": 4, "batch_size": 16})):
        threads, _ = train(algo("CartPole-v1", **SMALL, **more), 320)
        remote, _ = train(algo("CartPole-v1", worker_addresses=workers, actor_order="fixed", **SMALL, **more), 320)
        np.testing.assert_array_equal(remote, threads)


def test_a_worker_limits_memories():
    sessions = ActorSessions(EnvSessions("CartPole-v1"))
    fields = {"n_envs": 1, "n_steps": 6, "seed": 0}
    config = {"memory": "lstm", "memory_size": 2048, "memory_layers": 4}
    with pytest.raises(ValueError, match="hidden_sizes must need at most"):
        sessions(Message("hello", {**fields, "config": config}))
    config = {"memory": "lstm", "memory_size": 256, "memory_layers": 16}
    with pytest.raises(ValueError, match="a rollout fits in a message"):
        sessions(Message("hello", {**fields, "n_envs": 1024, "config": config}))
    with pytest.raises(ValueError, match="sequence_length must divide n_steps=6, got 4"):
        sessions(Message("hello", {**fields, "sequence_length": 4, "config": {"memory": "gru"}}))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("memories", lambda x: x[:1], "memories must be"),
        ("memories", lambda x: x * np.nan, "finite"),
        ("is_first", lambda x: x.astype(np.float32), "is_first must be"),
        ("limit_memories", lambda x: x[:, :-1], "limit_memories must be"),
        ("memories", lambda x: None, "must be a trajectory"),
        ("masks", lambda x: np.ones((6, 2, ACTIONS), np.bool_), "must be a trajectory"),
    ],
)
def test_answers_of_a_worker_are_validated(name, change, message):
    plan = ActorPlan(Ends, 2, 6, 0, make_policy(), OnPolicyConfig(**MEMORY), sequence_length=3)
    Answer(plan).require_refused(name, change, message)


def test_a_worker_without_memories_is_told_apart(workers, monkeypatch):
    """A worker of the protocol before memories and masks answers in it, and refuses the learner's."""
    assert codec.VERSION == 2
    monkeypatch.setattr("rlox.envs.remote.server.VERSION", 1)
    message = r"the same rlox, got .* \(protocol 2\) at the learner and .* \(protocol 1\) at the worker"
    with pytest.raises(ValueError, match=message):
        rlox.IMPALA("CartPole-v1", worker_addresses=workers, **SMALL).train(24)
    monkeypatch.undo()
    written = codec._write_beginning

    def write(*arguments):
        return written(*arguments).replace(b"rlox\2\0", b"rlox\1\0")

    monkeypatch.setattr(codec, "_write_beginning", write)
    with pytest.raises(WorkerLost, match="must have version 2, got 1; install one rlox-cli on both ends"):
        Connection(workers[0], RemoteConfig(addresses=workers), "actor", {})


def test_rollouts_that_do_not_fit_together_are_errors():
    arrays = awkward(make_policy()).arrays()
    assert {"masks", "memories", "is_first", "limit_memories"} <= set(arrays)
    again = Trajectory.of(arrays)
    np.testing.assert_array_equal(again.memories, arrays["memories"])
    for name, array in (
        ("masks", arrays["masks"][1:]),
        ("memories", arrays["memories"][:, 1:]),
        ("is_first", arrays["is_first"][1:]),
        ("limit_memories", arrays["limit_memories"][1:]),
    ):
        with pytest.raises(ValueError, match=f"Trajectory: {name.split('_')[-1]}|Trajectory: memories must fit"):
            Trajectory.of({**arrays, name: array})


def test_rollouts_saved_before_there_were_memories_are_read():
    actor = Actor(ActorPlan("CartPole-v1", 2, 5, 0, NativePolicy(4, 2, [8], False), IMPALAConfig(hidden_sizes=[8])), 0)
    rollout = actor.rollout(Weights(0, acting_policy(NativePolicy(4, 2, [8], False)).weights()))
    actor.close()
    arrays = rollout.arrays()
    assert not {"masks", "memories", "is_first", "limit_memories"} & set(arrays)
    assert Trajectory.of(arrays).memories is None
