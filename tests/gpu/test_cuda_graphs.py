"""What rlox relies on in CUDA graphs; the pretended GPU has the same properties."""

import pytest
import torch

from rlox.nn.optimizers import FlatOptimizer


def captured(function):
    """The graph of `function`, and its result, which nothing has computed yet."""
    graph = torch.cuda.CUDAGraph()
    for _ in range(2):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            function()
        torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


def test_a_capture_has_no_effect_and_each_replay_has_it_again():
    total, step = torch.zeros(3, device="cuda"), torch.ones(3, device="cuda")
    graph, doubled = captured(lambda: total.add_(step).mul(2))
    before = total.clone()
    assert before.tolist() == [2.0, 2.0, 2.0]  # the calls before the capture
    for i in range(1, 4):
        graph.replay()
        assert total.tolist() == [2.0 + i] * 3
        assert doubled.tolist() == [4.0 + 2 * i] * 3


def test_inputs_are_read_where_they_were_and_numbers_are_constants():
    x, factor = torch.ones(2, device="cuda"), [3.0]
    scalar = torch.tensor(5.0)  # on the CPU: passed to the kernel as a number
    graph, out = captured(lambda: x * factor[0] + scalar)
    factor[0] = 10.0
    scalar.fill_(0.0)
    x.fill_(2.0)
    graph.replay()
    assert out.tolist() == [11.0, 11.0]


def test_a_result_is_overwritten_by_the_next_replay():
    x = torch.zeros(2, device="cuda")
    graph, out = captured(lambda: x + 1)
    graph.replay()
    kept, copied = out, out.clone()
    x.fill_(5.0)
    graph.replay()
    assert copied.tolist() == [1.0, 1.0]
    assert kept.tolist() == [6.0, 6.0]


def test_the_generator_of_the_gpu_draws_new_numbers_in_each_replay_and_none_in_the_capture():
    torch.cuda.manual_seed(1)
    captured_state = []
    graph, out = captured(lambda: torch.rand(4, device="cuda"))
    captured_state.append(torch.cuda.get_rng_state())
    graph.replay()
    first = out.tolist()
    graph.replay()
    assert out.tolist() != first
    assert not torch.equal(torch.cuda.get_rng_state(), captured_state[0])


def test_a_step_of_the_optimiser_is_captured_with_a_learning_rate_that_changes():
    def trained(graphed):
        torch.manual_seed(0)
        layer = torch.nn.Linear(4, 1).to("cuda")
        rate = torch.tensor(0.1, device="cuda")
        optimizer = FlatOptimizer(layer.parameters(), 0.1)
        x = torch.linspace(-1, 1, 32, device="cuda").view(8, 4)

        def update():
            torch._fused_adam_(
                [optimizer.flat], [optimizer.grad], *([m] for m in optimizer._moments.values()), [],
                [optimizer._steps], lr=rate, beta1=0.9, beta2=0.999, weight_decay=0.0, eps=1e-5, amsgrad=False,
                maximize=False,
            )  # fmt: skip

        def forward():
            loss = (layer(x) - 1).square().mean()
            grads = torch.autograd.grad(loss, optimizer.parameters)
            torch.cat([g.reshape(-1) for g in grads], out=optimizer.grad)
            optimizer._steps += 1
            update()
            return loss

        run = forward
        if graphed:
            graph, loss = captured(forward)
            run = lambda: (graph.replay(), loss)[1]  # noqa: E731
        else:
            forward(), forward()
        losses = []
        for i in range(4):
            rate.fill_(0.1 / (i + 1))
            losses.append(float(run()))
        return losses, optimizer.flat.tolist()

    ours, theirs = trained(True), trained(False)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    assert ours[1] == pytest.approx(theirs[1], rel=1e-5)
    assert len(set(ours[0])) == 4


def test_pinned_memory_is_copied_without_waiting():
    sent, received = torch.arange(4.0).pin_memory(), torch.empty(4).pin_memory()
    assert sent.is_pinned()
    assert not torch.arange(4.0).is_pinned()
    x = torch.empty(4, device="cuda")
    x.copy_(sent, non_blocking=True)
    received.copy_(x * 2, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    done.synchronize()
    assert received.tolist() == [0.0, 2.0, 4.0, 6.0]


def test_a_graph_copies_from_pinned_memory_anew():
    sent, x = torch.ones(2).pin_memory(), torch.zeros(2, device="cuda")
    graph, out = captured(lambda: x.copy_(sent, non_blocking=True) + 1)
    torch.cuda.synchronize()
    sent.fill_(7.0)
    graph.replay()
    assert out.tolist() == [8.0, 8.0]
