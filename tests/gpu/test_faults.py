"""A GPU whose memory is full, and one that is lost, in the middle of a training."""

import contextlib

import pytest
import torch
from small_algorithms import make, off_policy
from torch.utils._python_dispatch import TorchDispatchMode

from rlox.callbacks import Callback, CheckpointCallback
from rlox.nn.modules import out_of_memory

ERRORS = {
    "full": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "lost": lambda: torch.AcceleratorError("CUDA error: unspecified launch failure"),
}


class FailingDevice(TorchDispatchMode):
    """Lets an operation on the GPU fail: a single one if its memory is full, all later ones if it is lost."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.left = kind, None

    def fail_after(self, n):
        self.left = n

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        on_gpu = any(isinstance(x, torch.Tensor) and x.is_cuda for x in leaves)
        if self.left is not None and (on_gpu or "cuda" in str(kwargs.get("device"))):
            self.left -= 1
            if self.left <= 0:
                self.left = None if self.kind == "full" else 0
                raise ERRORS[self.kind]()
        return func(*args, **kwargs)


class Arm(Callback):
    """Lets the device fail in the next collection or in the next update."""

    def __init__(self, device, during):
        self.device, self.during = device, during

    def on_step(self, *, step, **info):
        if self.during == "collection" and step >= 120 and self.device.left is None:
            self.device.fail_after(5)
        return True

    def on_rollout_end(self, *, algorithm, **info):
        if self.during == "update" and algorithm.counters.env_steps >= 120 and self.device.left is None:
            self.device.fail_after(12)


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("during", ["collection", "update"])
@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_the_error_is_raised_as_it_is_and_checkpoints_survive(name, during, kind, tmp_path):
    device = FailingDevice(kind)
    callbacks = [CheckpointCallback(tmp_path, every_steps=20), Arm(device, during)]
    algorithm = make(name, device="cuda", callbacks=callbacks, off={"train_freq": 4, "learning_starts": 20})
    with device, pytest.raises(RuntimeError) as caught:
        algorithm.train(64 * 4 if not off_policy(name) else 200)
    assert isinstance(caught.value, type(ERRORS[kind]()))
    assert out_of_memory(caught.value) == (kind == "full")
    saved = sorted(tmp_path.glob("*.safetensors"))
    assert saved
    loaded = type(algorithm).from_checkpoint(saved[-1], device="cuda")
    assert loaded.counters.env_steps > 0
    if not off_policy(name):
        loaded.train(64)


@pytest.mark.parametrize("n", [1, 5, 12])
def test_full_memory_while_loading_is_no_damaged_checkpoint(n, tmp_path):
    ppo = make("ppo", device="cuda")
    ppo.train(64)
    ppo.save(tmp_path / "a.safetensors")
    device = FailingDevice("full")
    with device, contextlib.ExitStack() as stack:
        device.fail_after(n)
        error = stack.enter_context(pytest.raises(Exception))
        type(ppo).from_checkpoint(tmp_path / "a.safetensors", device="cuda")
    assert out_of_memory(error.value)


def test_a_real_gpu_that_is_full(tmp_path):
    """The memory that one network may have is limited; the error is PyTorch's, and the process can go on."""
    if torch.cuda.get_device_name() == "Pretended GPU":
        pytest.skip("needs a real GPU")
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    used = torch.cuda.memory_reserved()
    torch.cuda.set_per_process_memory_fraction((used + (64 << 20)) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            make("ppo", device="cuda", hidden_sizes=[4096, 4096]).train(64)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()
    make("ppo", device="cuda").train(64)
