"""Best-of-N: of N completions, the one with the highest reward."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import toy

from rlox.algorithms import BestOfN
from rlox.llm.sampling import Settings, sample

PROMPTS = ["1+2=", "3", "4+"]


def sevens(prompts, completions):
    return [c.count("7") - 0.1 * len(c) for c in completions]


def made(**more):
    return BestOfN(toy.model(scale=1.0), sevens, **{"n": 6, "max_new_tokens": 5, "tokenizer": toy.tokenizer(), **more})


def test_the_best_of_what_was_sampled():
    chooser = made(seed=3)
    found = chooser.best(PROMPTS)
    ids = [toy.tokenizer()(p)["input_ids"] for p in PROMPTS]
    drawn = sample(chooser.model, ids, Settings(5), n=6, seed=3, step=0)
    texts = [chooser.model.decode(row) for row in drawn.ids]
    scores = np.array(sevens(None, texts)).reshape(3, 6)
    assert np.array_equal(found.all_scores, scores)
    assert np.array_equal(found.scores, scores.max(1))
    assert len(np.unique(scores.argmax(1))) > 1
    for i, k in enumerate(scores.argmax(1)):
        assert found.texts[i] == texts[6 * i + k]
        assert found.completions[i].tolist() == drawn.ids[6 * i + k].tolist()
        assert found.ids[i].tolist() == [*ids[i], *drawn.ids[6 * i + k]]


def test_a_text_is_one_prompt_and_the_name_of_a_file_is_read(tmp_path):
    (file := tmp_path / "rows.jsonl").write_text('{"prompt": "3"}')
    expected = made().best(["3"])
    for prompts in ("3", str(file)):
        assert np.array_equal(made().best(prompts).all_scores, expected.all_scores)


def test_more_samples_are_never_worse():
    means = [made(n=n).best(PROMPTS * 20).scores.mean() for n in (1, 4, 16)]
    assert means[0] < means[1] < means[2]


def test_ids_are_padded_on_the_right():
    chooser = made()
    ids, scores = chooser.generate(PROMPTS, return_scores=True)
    again = made().best(PROMPTS)
    assert ids.dtype == torch.int64
    assert ids.shape == (3, max(map(len, again.ids)))
    for row, own, score in zip(ids, again.ids, scores, strict=True):
        assert row[: len(own)].tolist() == own.tolist()
        assert set(row[len(own) :].tolist()) <= {toy.PAD}
        assert score in again.scores
    assert torch.equal(made().generate(PROMPTS), ids)


def test_every_call_draws_new_samples_and_a_seed_reproduces_them():
    one, other = made(), made()
    first = one.best(PROMPTS).all_scores
    assert not np.array_equal(first, one.best(PROMPTS).all_scores)
    assert np.array_equal(first, other.best(PROMPTS).all_scores)
    assert not np.array_equal(first, made(seed=1).best(PROMPTS).all_scores)


def test_a_module_of_the_users_own_and_a_reward_of_ids():
    seen = []

    def largest(completions, prompts):
        seen.append((completions, prompts))
        return [float(c.max()) for c in completions]

    chooser = BestOfN(toy.model("bare"), largest, n=4, max_new_tokens=3)
    ids, scores = chooser.generate(torch.tensor([[2, 3], [4, 5]]), return_scores=True)
    assert ids.shape == (2, 5)
    assert ids[:, :2].tolist() == [[2, 3], [4, 5]]
    assert scores.tolist() == [float(row[2:].max()) for row in ids]
    completions, prompts = seen[0]
    assert len(completions) == 8
    assert prompts.tolist() == [[2, 3]] * 4 + [[4, 5]] * 4


def test_settings_are_passed_to_the_sampler():
    chooser = made(temperature=0.0, n=2)
    scores = chooser.best(PROMPTS).all_scores
    assert np.array_equal(scores[:, 0], scores[:, 1])
    ended = made(stop=(9,), n=40, max_new_tokens=12).best(PROMPTS)
    assert all(9 not in row[:-1] for row in ended.completions)


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"n": 0}, ValueError, "BestOfN: n must be >= 1, got 0"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens must be >= 1, got 0"),
        ({"temprature": 0.5}, TypeError, "unknown setting 'temprature'; did you mean 'temperature'"),
        ({"temperature": -1.0}, ValueError, "temperature must be >= 0 and finite.*got -1.0"),
        ({"top_p": 0.0}, ValueError, r"top_p must be in \(0, 1\], got 0.0"),
        ({"stop": "9"}, TypeError, "stop must hold token ids, got '9'"),
        ({"tokenizer": None}, ValueError, "text needs a tokenizer, got none; pass tokenizer=…, or token ids"),
        ({"max_new_tokens": 62}, ValueError, "row 0 must fit in the model's context of 64 tokens, got 66"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_errors_name_the_setting(more, error, message):
    with pytest.raises(error, match=message):
        made(**more).best(PROMPTS)


def test_a_missing_reward_is_an_error():
    with pytest.raises(TypeError, match=r"BestOfN: a reward must be a function .*got None"):
        BestOfN(toy.model(), None)
