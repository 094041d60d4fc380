"""benchmarks/llm: the rewards of the tasks, short trainings, and `rlox bench train` on them."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import forked
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


def test_every_token_except_the_end_is_visible_in_text(load):
    tasks = load("tasks")
    for task in tasks.TASKS:
        tokenizer = tasks.tokenizer(task)
        ids = range(tasks.random_model(task, 0).config.vocab_size)
        assert [i for i in ids if not tokenizer.decode([i], skip_special_tokens=True)] == [tasks.EOS]


def test_our_program_times_each_update_and_reports_scores(load):
    found = load("ours").train({"task": "dpo", "seed": 0, "steps": 3})
    assert found["steps"] == 3
    assert len(found["cpu_ms"]) == len(found["wall_ms"]) == 2
    assert len(found["curve"]) == 3
    assert 0 <= found["sampled"] <= 1


@pytest.mark.slow
def test_bench_train_grpo_times_rlox_and_writes_what_it_learned(tmp_path):
    done = forked.run("bench", "train", "grpo", "--steps", "12", "--rounds", "1", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "12 updates, rounds: 1" in done.stdout
    assert "ms per update" in done.stdout
    result = json.loads((tmp_path / "train.json").read_text())
    assert result["command"] == "rlox bench train grpo --steps 12 --rounds 1"
    ((case, runs),) = ((row["case"], row["runs"]) for row in result["results"])
    assert case == "grpo"
    (one,) = runs["rlox"]
    assert one["steps"] == 12
    assert 0 < one["cpu_ms"] < 1e3 * one["cpu_s"]
    assert len(one["curve"]) == 10
    assert 0 <= one["sampled"] <= 1
    assert (tmp_path / "train.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trl") is not None, reason="TRL is installed here")
def test_bench_train_grpo_refuses_an_interpreter_without_trl():
    done = forked.run("bench", "train", "grpo", "--peer-python", sys.executable)
    assert done.returncode != 0
    assert "rlox bench train grpo: --peer-python must name an interpreter that has TRL, got " in done.stderr
    assert "pip install 'trl==1.16.*'" in done.stderr
