"""Language models on the GPU, in the precision that ``auto`` chooses there."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

import toy
from device_comparison import differing, require_close, weights
from small_language_models import CLASSES, arguments, make

from rlox.llm.sampling import Settings, sample


@pytest.mark.parametrize("name", CLASSES)
def test_training_equals_that_on_the_cpu(name):
    """In float32. Where the model samples its own data, rounding may choose another token: then after one update."""
    n = 1 if name in ("grpo", "online_dpo") else 3
    ours, theirs = (make(name, device=device, precision="float32") for device in ("cuda", "cpu"))
    metrics = [algorithm.train(n_updates=n) for algorithm in (ours, theirs)]
    if name == "online_dpo":
        # Policy and reference are equal before the first update: rounding decides the signs of the margins.
        metrics = [{key: value for key, value in one.items() if key != "accuracy"} for one in metrics]
    require_close(*metrics, rel=2e-3, abs=2e-3)
    assert all(p.is_cuda for p in ours.policy.parameters())


@pytest.mark.parametrize("name", CLASSES)
def test_auto_computes_in_bfloat16_and_resumes_exactly(name, tmp_path):
    straight = make(name, precision="auto")
    straight.train(n_updates=1)
    straight.save(tmp_path / "a.safetensors")
    loaded = CLASSES[name].from_checkpoint(tmp_path / "a.safetensors", device="cuda", **arguments(name))
    require_close(loaded.train(n_updates=1), straight.train(n_updates=1), rel=0, abs=0)
    assert differing(weights(loaded), weights(straight)) == []
    assert {p.dtype for p in straight.policy.parameters()} == {torch.float32}
    assert straight._precision() == "bfloat16"
    if name != "reward_model":
        assert len(straight.generate(toy.PROMPTS[:2], max_new_tokens=2)) == 2


VARIANTS = [
    ("grpo", "qwen2", {"precision": "auto", "lora_rank": 2, "gradient_checkpointing": True}),
    ("grpo", "gpt2", {"precision": "float32", "packing": True, "accumulation": 2}),
    ("grpo", "bare", {"kl_coef": 0.1, "ref_sync_every": 2}),
    ("grpo", "qwen2", {"top_k": 3}),
    ("dpo", "llama", {"lora_rank": 2, "packing": True}),
    ("sft", "bare", {}),
]


@pytest.mark.parametrize(("name", "kind", "settings"), VARIANTS)
def test_variants_train(name, kind, settings):
    metrics = make(name, kind, **settings).train(n_updates=2)
    assert metrics["loss"] == metrics["loss"]


@pytest.mark.parametrize("kind", ["qwen2", "llama", "gpt2"])
def test_masks_and_packing_are_those_of_the_cpu(kind):
    settings = {"precision": "float32", "packing": True, "accumulation": 2}
    ours, theirs = (make("sft", kind, device=device, **settings) for device in ("cuda", "cpu"))
    require_close(ours.train(n_updates=2), theirs.train(n_updates=2), rel=2e-3, abs=2e-3)


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_completions_are_those_of_the_cpu(kind, pretended):
    """Prompts of unequal lengths, and completions that end between two looks at them."""
    prompts = [[1, 2, 3, 4, 5], [6], [2, 3]]
    drawn = [
        sample(make("sft", kind, device=device).model, prompts, Settings(20, stop=(3, 4)), n=4, seed=2)
        for device in ("cuda", "cpu")
    ]
    ours, theirs = ([ids.tolist() for ids in one.ids] for one in drawn)
    assert ours == theirs
    assert len({len(ids) for ids in ours}) > 3


def test_given_token_ids_may_be_on_either_device():
    sft = make("sft")
    for device in ("cpu", "cuda"):
        ids = [torch.tensor([[4, 5], [2, 3]], device=device), torch.tensor([[6, 1], [6, 7]], device=device)]
        sft.train_step(*ids)
