"""Functions that a GPU replays as graphs: what can be tested on the CPU."""

import contextlib
import types
import warnings

import pytest
import torch

from rlox.nn.graphs import N_EAGER, Graphed


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
