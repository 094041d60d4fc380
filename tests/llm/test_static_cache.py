"""A cache of fixed size gives the completions of a cache that grows, with the same work for every token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import toy
import transformers
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM

import rlox
from rlox.llm.backends import create_backend
from rlox.llm.models.adapters import with_adapters
from rlox.llm.models.language import LanguageModel
from rlox.llm.models.static_cache import static_obstacle
from rlox.llm.sampling import Settings, sample

PROMPTS = [[5, 6, 7, 2], [3], [9, 8], [4, 4, 4, 4, 4, 4], [11, 3]]
KINDS = ["qwen2-sdpa", "qwen2-eager", "llama", "gpt2", "gpt2-eager"]


def with_cache(cache, module=None, eos=None):
    model = LanguageModel(toy.model("qwen2") if module is None else module, toy.tokenizer(), eos)
    model.sample_cache = cache
    return model


def drawn_by_both(settings, prompts=PROMPTS, n=3, kind="qwen2", eos=None):
    models = [with_cache(cache, toy.model(kind), eos) for cache in ("static", "dynamic")]
    drawn = [sample(model, prompts, settings, n=n, seed=2) for model in models]
    assert models[0].static
    return drawn


def require_equal(ours, theirs):
    assert [ids.tolist() for ids in ours.ids] == [ids.tolist() for ids in theirs.ids]
    assert ours.ended.tolist() == theirs.ended.tolist()
    for one, other in zip(ours.log_probs, theirs.log_probs, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_completions_equal_those_of_a_cache_that_grows(kind, temperature):
    """After prompts of unequal lengths; some end early, others have the maximum length."""
    ours, theirs = drawn_by_both(Settings(20, temperature=temperature), kind=kind)
    require_equal(ours, theirs)
    assert temperature == 0.0 or len({len(ids) for ids in ours.ids}) > 1


@pytest.mark.parametrize(
    "settings", [{"stop": (3, 4)}, {"top_k": 4}, {"top_p": 0.8, "temperature": 1.3}, {"min_p": 0.1}]
)
def test_stops_and_restrictions_hold(settings):
    ours, theirs = drawn_by_both(Settings(20, **settings))
    require_equal(ours, theirs)
    if "stop" in settings:
        assert {int(ids[-1]) for ids in ours.ids} >= {3, 4}
        assert ours.ended.any()
        assert all(not {1, 3, 4} & {*ids[:-1].tolist()} for ids in ours.ids)


@pytest.mark.parametrize(("prompts", "n", "room"), [([[5, 6]], 1, 12), ([[5, 6], [3, 2]], 2, 1), ([[7]], 4, 9)])
def test_small_batches_and_the_maximum_length(prompts, n, room):
    ours, theirs = drawn_by_both(Settings(room), prompts, n, eos=[99])
    require_equal(ours, theirs)
    assert [len(ids) for ids in ours.ids] == [room] * len(prompts) * n
    assert not ours.ended.any()


def watched(module, calls):
    """Record the shapes of what `module` is given for each token, and where its keys are."""
    forward = module.model.forward

    def record(*args, **named):
        cache = named.get("cache", named.get("past_key_values"))
        out = forward(*args, **named)
        if cache is not None:
            where = [layer.keys.data_ptr() for layer in cache.layers]
            calls.append((tuple(named["input_ids"].shape), tuple(named["attention_mask"].shape), where))
        return out

    module.model.forward = record


def test_every_token_has_the_same_shapes_and_memory():
    model, calls = with_cache("static", eos=[99]), []
    sample(model, PROMPTS, Settings(1))  # the first sample also tries the cache
    watched(model.module, calls)
    sample(model, PROMPTS, Settings(16), n=2)
    assert len(calls) == 15  # the prompts are read into a cache of their own
    assert {(shape, mask) for shape, mask, _ in calls} == {((10, 1), (10, 1, 1, 24))}
    assert all(where == calls[0][2] for _, _, where in calls)


def test_ended_completions_are_looked_for_after_every_eighth_token():
    """All end at once: nothing more is computed. Most end: the rest continues in a smaller batch."""
    model, calls = with_cache("static", eos=[*range(24)]), []
    sample(model, PROMPTS, Settings(1))
    watched(model.module, calls)
    drawn = sample(model, PROMPTS, Settings(40, temperature=0.0), n=2)
    assert max(map(len, drawn.ids)) == 1
    assert len(calls) == 7
    model, calls = with_cache("static", eos=[1, 2, 3, 4, 5]), []
    sample(model, PROMPTS, Settings(1))
    watched(model.module, calls)
    drawn = sample(model, PROMPTS, Settings(40), n=8)
    require_equal(drawn, sample(with_cache("dynamic", eos=[1, 2, 3, 4, 5]), PROMPTS, Settings(40), n=8))
    sizes = [shape[0] for shape, _, _ in calls]
    assert sizes[:7] == [40] * 7
    assert sizes[7] == sum(len(ids) > 8 for ids in drawn.ids) <= 20


def test_adapters_are_sampled_with_it():
    models = [with_adapters(with_cache(cache), 2, 16.0, None, 1) for cache in ("static", "dynamic")]
    for model, cache in zip(models, ("static", "dynamic"), strict=True):
        model.sample_cache = cache
    require_equal(*(sample(model, PROMPTS, Settings(9), n=2) for model in models))
    assert models[0].static


class OwnModel(Qwen2ForCausalLM):
    pass


def hooked():
    module = toy.model("qwen2")
    module.model.norm.register_forward_hook(lambda *args: None)
    return module


def with_windows():
    config = transformers.MistralConfig(
        vocab_size=24, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=4, pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)


OBSTACLES = {
    "no cache": lambda: toy.model("bare"),
    "hooks or classes of your own": hooked,
    "classes of your own": lambda: OwnModel(toy.model("qwen2").config),
    "attention over all tokens": with_windows,
}


@pytest.mark.parametrize("reason", OBSTACLES)
def test_models_without_it_are_refused(reason):
    model = with_cache("static", OBSTACLES[reason]())
    for _ in range(2):
        with pytest.raises(ValueError, match=f"sample_cache must be auto or dynamic for .*{reason}"):
            sample(model, PROMPTS, Settings(3))


@torch.no_grad()
def test_a_wrong_logit_is_noticed(monkeypatch):
    from rlox.llm.models import static_cache

    model = with_cache("static")
    sample(with_cache("dynamic", model.module), PROMPTS, Settings(1))
    model.cached = True
    assert static_obstacle(model) is None
    monkeypatch.setattr(
        static_cache.StaticLayer, "update", lambda self, keys, values, *_, **__: (self.keys, self.values)
    )
    assert static_obstacle(model) == "a cache of fixed size gives other logits than whole rows"


def test_on_the_cpu_auto_takes_the_cache_that_grows():
    model = with_cache("auto")
    sample(model, PROMPTS, Settings(20))
    assert model.static is None


def grpo(**settings):
    def reward(completions, prompts):
        return [float(len(one)) for one in completions]

    return rlox.GRPO(
        toy.model("qwen2"), tokenizer=toy.tokenizer(), seed=1, batch_size=4, group_size=3, max_new_tokens=10,
        reward_fn=reward, dataset=toy.PROMPTS, **settings,
    )  # fmt: skip


def test_training_with_it_equals_training_without_it():
    ours, theirs = (grpo(sample_cache=cache) for cache in ("static", "auto"))
    metrics = [algorithm.train(n_updates=2) for algorithm in (ours, theirs)]
    assert ours.model.static
    assert theirs.model.static is None
    for name, value in metrics[0].items():
        if not name.startswith("time/"):
            assert value == pytest.approx(metrics[1][name], rel=1e-3, abs=1e-4), name


def test_wrong_values_are_errors():
    with pytest.raises(ValueError, match="sample_cache must be one of auto, static, dynamic"):
        grpo(sample_cache="fixed")
    with pytest.raises(ValueError, match="sample_cache must be auto with a sampler, got 'static'"):
        grpo(sample_cache="static", sampler=create_backend("hf", model=toy.model("qwen2"), tokenizer=toy.tokenizer()))
