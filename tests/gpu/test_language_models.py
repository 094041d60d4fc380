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


@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "qwen2-eager"])
def test_completions_are_those_of_the_cpu(kind, pretended):
    """Prompts of unequal lengths, and completions that end between two looks at them, most of them early."""
    prompts = [[1, 2, 3, 4, 5], [6], [2, 3]]
    models = [make("sft", kind, device=device).model for device in ("cuda", "cpu")]
    for settings in (Settings(20, stop=(3, 4)), Settings(32, stop=(2, 3, 4, 5, 6)), Settings(16, top_k=9, top_p=0.9)):
        ours, theirs = (sample(model, prompts, settings, n=4, seed=2) for model in models)
        assert [ids.tolist() for ids in ours.ids] == [ids.tolist() for ids in theirs.ids]
        gaps = [abs(one - other).max() for one, other in zip(ours.log_probs, theirs.log_probs, strict=True)]
        assert max(gaps) < 1e-5
    assert [model.static for model in models] == [True, None]
    assert len({len(ids) for ids in ours.ids}) > 3


def test_graphs_of_tokens_in_bfloat16():
    """They read the copies of the weights that autocast has made for the prompts."""
    models = [make("sft").model for _ in range(2)]
    models[1].sample_cache = "dynamic"
    with torch.autocast("cuda", torch.bfloat16):
        ours, theirs = (sample(model, [[1, 2, 3], [6]], Settings(16), n=2, seed=2) for model in models)
    assert models[0].static
    assert [ids.tolist() for ids in ours.ids] == [ids.tolist() for ids in theirs.ids]
    gaps = [abs(one - other).max() for one, other in zip(ours.log_probs, theirs.log_probs, strict=True)]
    assert max(gaps) < 0.05


def test_new_weights_are_sampled_after_an_update():
    """A graph reads the weights, and autocast's copies of them, where they are now."""
    ours, theirs = (make("grpo", max_new_tokens=16, learning_rate=0.05, sample_cache=c) for c in ("auto", "dynamic"))
    before = ours.generate(toy.PROMPTS[:2], seed=3)
    ours.train(n_updates=1)
    theirs.policy.load_state_dict(ours.policy.state_dict())
    after = [algorithm.generate(toy.PROMPTS[:2], seed=3) for algorithm in (ours, theirs)]
    assert after[0] == after[1] != before
    assert [algorithm.model.static for algorithm in (ours, theirs)] == [True, None]


def test_what_cannot_be_captured_is_sampled_with_a_cache_that_grows(monkeypatch):
    def draw():
        return [ids.tolist() for ids in sample(model, [[1, 2], [3]], Settings(16), n=2, seed=1).ids]

    def waiting(self, x):
        assert float(x.sum()) == float(x.sum())
        return forward(self, x)

    model = make("sft").model
    norm = type(model.module.model.norm)
    forward = norm.forward
    monkeypatch.setattr(norm, "forward", waiting)
    with pytest.warns(RuntimeWarning, match="without a CUDA graph"):
        ours = draw()
    assert model.static is False
    monkeypatch.undo()
    assert draw() == ours
    own = make("sft", "bare").model
    with pytest.warns(UserWarning, match="a module of your own has no cache"):
        sample(own, [[1, 2]], Settings(16))


def test_given_token_ids_may_be_on_either_device():
    sft = make("sft")
    for device in ("cpu", "cuda"):
        ids = [torch.tensor([[4, 5], [2, 3]], device=device), torch.tensor([[6, 1], [6, 7]], device=device)]
        sft.train_step(*ids)
