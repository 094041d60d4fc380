"""What CUDA refuses while a graph is captured. After a refusal, the same process can go on."""

import pytest
import torch

REFUSED = {
    "read a number": lambda x: x.sum().item(),
    "copy to the host": lambda x: x.cpu(),
    "wait for the device": lambda x: torch.cuda.synchronize(),
    "shape by value": lambda x: x[x > 0],
    "new tensor from Python": lambda x: x + torch.tensor([1.0, 2.0, 3.0], device="cuda"),
    "copy of ordinary memory": lambda x: x.copy_(torch.ones(3)),
    "index on the host": lambda x: x[torch.tensor([0, 2])],
}


def capture(function):
    """The graph of `function`, captured as rlox does."""
    graph = torch.cuda.CUDAGraph()
    # PyTorch's context does not leave the stream if the capture fails; the outer one does.
    with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        function()
    return graph


@pytest.mark.parametrize("what", REFUSED)
def test_a_capture_refuses_what_waits_for_the_device(what):
    x = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError):
        capture(lambda: REFUSED[what](x.add_(1)))
    assert not torch.cuda.is_current_stream_capturing()
    assert x.tolist() == [1.0, 1.0, 1.0]
    capture(lambda: x.add_(1)).replay()
    assert x.tolist() == [2.0, 2.0, 2.0]


def test_a_graph_that_reads_freed_memory_is_noticed(pretended):
    graph = torch.cuda.CUDAGraph()
    x = torch.ones(3, device="cuda")
    with torch.cuda.graph(graph):
        out = x + 1
    graph.replay()
    assert out.tolist() == [2.0, 2.0, 2.0]
    del x
    with pytest.raises(RuntimeError, match="reads a tensor that was freed"):
        graph.replay()


def test_memory_that_is_still_being_copied_must_not_be_written(pretended):
    sent, x = torch.ones(3).pin_memory(), torch.zeros(3, device="cuda")
    x.copy_(sent, non_blocking=True)
    sent += 1
    with pytest.raises(RuntimeError, match="overwritten before the host had waited"):
        x.sum().item()
