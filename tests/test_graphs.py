"""Functions that a GPU replays as graphs: what can be tested on the CPU."""

import contextlib
import types
import warnings

import numpy as np
import pytest
import torch

from rlox import A2C, PPO
from rlox.gpu.capture import CapturedUpdate, find_capture_obstacle
from rlox.nn.graphs import N_EAGER, Graphed
from rlox.nn.optimizers import FlatOptimizer
from rlox.nn.policies import DiscretePolicy
from rlox.training.algorithm import choose_update, to_floats


class RecordedGraph:
    """A CUDA graph without a GPU: replays the Python function that was captured, and counts."""

    def __init__(self):
        self.replays = 0

    def replay(self):
        self.replays += 1


@pytest.fixture
def pretended(monkeypatch):
    """Replace the calls of `torch.cuda` by ones that only record in which order they were made."""
    calls = []
    stream = types.SimpleNamespace(wait_stream=lambda other: calls.append("wait"))

    @contextlib.contextmanager
    def capture(graph, **options):
        calls.append("capture")
        yield

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    return calls


def test_on_the_cpu_every_call_runs_the_function():
    total = torch.zeros(())
    graphed = Graphed(lambda: total.add_(1), "cpu", "count")
    for _ in range(N_EAGER + 3):
        result = graphed()
    assert result is total
    assert total == N_EAGER + 3
    assert graphed.obstacle == "it runs on the CPU"


def test_the_first_calls_run_and_later_ones_replay(pretended):
    """Python runs `N_EAGER` times and once to be captured; each value of an argument has a graph of its own."""
    seen = []
    graphed = Graphed(lambda *arguments: seen.append(arguments) or torch.ones(()), "cuda", "update")
    for _ in range(N_EAGER):
        graphed(True)
    assert seen == [(True,)] * N_EAGER
    assert pretended == ["wait", "wait"] * N_EAGER
    first = graphed(True)
    assert graphed(True) is first
    assert len(seen) == N_EAGER + 1
    assert graphed._captured[(True,)][0].replays == 2
    graphed(False)
    assert seen[-1] == (False,)
    assert pretended.count("capture") == 1


def test_a_function_that_cannot_be_captured_continues_without(pretended, monkeypatch):
    @contextlib.contextmanager
    def refuse(graph, **options):
        yield
        raise RuntimeError("operation not permitted when stream is capturing\nmore lines")

    monkeypatch.setattr(torch.cuda, "graph", refuse)
    total = torch.zeros(())
    graphed = Graphed(lambda: total.add_(1).clone(), "cuda", "update")
    for _ in range(N_EAGER):
        graphed()
    with pytest.warns(RuntimeWarning, match=r"^update: continuing without a CUDA graph, .*: operation not permitted"):
        graphed()
    assert graphed.obstacle == "operation not permitted when stream is capturing"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graphed()


def test_full_memory_and_errors_of_the_function_are_raised(pretended, monkeypatch):
    fails = []

    def function():
        if fails:
            raise fails[0]

    graphed = Graphed(function, "cuda", "update")
    for _ in range(N_EAGER):
        graphed()
    for error in (torch.OutOfMemoryError("full"), ValueError("its own")):
        fails[:] = [error]
        with pytest.raises(type(error), match=str(error)):
            graphed()
    assert graphed.obstacle is None


@pytest.mark.parametrize("kind", ["adam", "adamw", "rmsprop"])
def test_a_learning_rate_may_be_a_tensor(kind):
    """A graph reads it from there; the step is that of the same number."""
    steps = []
    for rate in (0.1, torch.tensor(0.1)):
        p = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 5))
        optimizer = FlatOptimizer([p], rate, kind=kind.removesuffix("w"), weight_decay=0.01 if kind == "adamw" else 0.0)
        for _ in range(3):
            optimizer.step(p.square().sum(), 0.5)
        steps.append(p.detach().numpy().copy())
    np.testing.assert_allclose(*steps, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (PPO, {"batch_size": 12, "clip_eps_schedule": "linear", "learning_rate_schedule": "linear"}),
        (A2C, {"learning_rate_schedule": "linear"}),
    ],
)
def test_an_update_for_a_graph_is_the_update(cls, settings):
    """The batch is copied to where a graph reads it, and progress is a tensor; the result is the same."""
    results = []
    for captured in (False, True):
        one = cls("CartPole-v1", 2, 0, backend="torch", n_steps=8, hidden_sizes=[8], **settings)
        one.plan(64)
        update = CapturedUpdate(one) if captured else choose_update(one)
        metrics = []
        for _ in range(3):
            batch = one.collector.collect(one.actor, 8)
            one.counters.in_round = batch.n_taken
            one.counters.env_steps += batch.n_taken
            metrics.append(to_floats(update(batch)))
        assert one.counters.captured_progress is None
        results.append((one.optimizer.flat.detach().numpy().copy(), metrics))
    (plain, reported), (graphed, told) = results
    np.testing.assert_allclose(graphed, plain, rtol=0, atol=1e-6)
    for ours, theirs in zip(told, reported, strict=True):
        assert [*ours] == [*theirs]
        assert ours == pytest.approx(theirs, abs=1e-5, nan_ok=True)


def test_there_is_a_graph_for_each_of_a_few_shapes_of_batches():
    one = A2C("CartPole-v1", 2, 0, backend="torch", n_steps=8, hidden_sizes=[8])
    one.plan(64)
    update = CapturedUpdate(one)
    sizes = (8, 6, 8, 5, 4, 3, 6)
    metrics = [to_floats(update(one.collector.collect(one.actor, n))) for n in sizes]
    assert [len(batch) for batch, _ in update.graphs.values()] == [16, 12, 10, 8]
    assert len({one["value_loss"] for one in metrics}) == len(sizes)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, None),
        ({"target_kl": 0.1}, "target_kl looks at the divergence"),
        ({"policy": DiscretePolicy(4, 2, 8)}, "the policy is custom"),
    ],
)
def test_what_stands_against_a_graph(settings, reason):
    one = PPO("CartPole-v1", 2, 0, backend="torch", **settings)
    assert find_capture_obstacle(one) == "it runs on the CPU"
    one.device = "cuda"
    obstacle = find_capture_obstacle(one)
    assert obstacle is None if reason is None else obstacle.startswith(reason)


def test_an_update_of_the_user_is_not_captured():
    class Louder(A2C):
        def update(self, batch):
            return super().update(batch)

    one = Louder("CartPole-v1", 2, 0)
    one.device = "cuda"
    assert find_capture_obstacle(one) == "the update of Louder is not rlox's own"
