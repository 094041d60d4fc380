"""benchmarks/llm: the rewards that are compared, and a training of two updates by our program."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
FOLDER = Path(__file__).parent.parent / "benchmarks" / "llm"


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "tasks", raising=False)

    def loaded(name):
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return loaded


@pytest.mark.parametrize(
    ("answer", "completion", "expected"),
    [("7", "7", 1.0), ("7", "", 0.0), ("7", "3", 0.0), ("7", "7777", 0.5), ("12", "1", 0.25), ("12", "123", 5 / 6)],
)
def test_the_reward_is_half_for_the_beginning_and_half_for_the_end(load, answer, completion, expected):
    assert load("tasks").reward(answer, completion) == pytest.approx(expected)


def test_every_token_but_the_end_can_be_seen_in_a_text(load):
    tasks = load("tasks")
    for task in tasks.TASKS:
        tokenizer = tasks.tokenizer(task)
        ids = range(tasks.random_model(task, 0).config.vocab_size)
        assert [i for i in ids if not tokenizer.decode([i], skip_special_tokens=True)] == [tasks.EOS]


@pytest.mark.parametrize("task", ["copy", "dpo"])
def test_our_program_times_each_update_and_says_what_was_learned(load, task):
    found = load("ours").train({"task": task, "seed": 0, "steps": 3})
    assert found["steps"] == 3
    assert len(found["cpu_ms"]) == len(found["wall_ms"]) == 2
    assert len(found["curve"]) == 3
    assert 0 <= found["sampled"] <= 1
