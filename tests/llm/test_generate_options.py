"""The options of `rlox generate` restrict the sampling as the settings of these names do."""

import json

import pytest
import torch

import rlox.llm.toy
from rlox import SFT

pytestmark = pytest.mark.slow


@pytest.fixture
def trained(command, tmp_path):
    """A run of SFT in the working folder, as `rlox.SFT`."""
    (tmp_path / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rlox.llm.toy.sum_rows()[::7]))
    words = ["algo=sft", "model=rlox.llm.toy:make_model", "dataset=sums.jsonl", "output_dir=run", "total_timesteps=2"]
    code, _, err = command("train", *words, "logger=none", "eval.n_points=1", "eval.n_episodes=2", "algo.batch_size=4")
    assert not code, err
    return SFT.from_checkpoint("run/checkpoints/last.safetensors")


OPTIONS = {
    "--top-k": ("3", {"top_k": 3}),
    "--min-p": ("0.9", {"min_p": 0.9}),
    "--top-p": ("0.4", {"top_p": 0.4}),
    "--temperature": ("0.2", {"temperature": 0.2}),
    "--max-new-tokens": ("1", {"max_new_tokens": 1}),
}


def completions(command, *words):
    code, out, err = command("generate", "run", "3+4=", "-n", "40", "--seed", "5", "--json", *words)
    assert not code, err
    return json.loads(out)["completions"]


def test_each_option_is_the_setting_of_its_name(trained, command):
    found = {name: completions(command, name, value) for name, (value, _) in OPTIONS.items()}
    found["none"] = completions(command)
    for name, (_, settings) in {**OPTIONS, "none": (None, {})}.items():
        assert found[name] == trained.generate(["3+4="], n=40, seed=5, **settings)[0], name
    assert len({tuple(texts) for texts in found.values()}) == len(found)  # so that none can stand for another


def test_top_k_and_min_p_restrict_the_tokens(trained, command):
    tokenizer, heat = trained.model.tokenizer, 3.0
    ids = torch.tensor([tokenizer("3+4=")["input_ids"]])
    with torch.no_grad():
        probs = (trained.policy(ids).logits[0, -1] / heat).softmax(-1)
    likeliest = probs.argsort(descending=True).tolist()
    allowed = {
        ("--top-k", "3"): likeliest[:3],
        ("--min-p", "0.9"): (probs >= 0.9 * probs.max()).nonzero().flatten().tolist(),
        ("--top-k", "4", "--min-p", "0.5"): [token for token in likeliest[:4] if probs[token] >= 0.5 * probs.max()],
    }
    for words, tokens in allowed.items():
        texts = set(completions(command, "--max-new-tokens", "1", "--temperature", str(heat), "-n", "400", *words))
        assert texts == set(tokenizer.batch_decode([[token] for token in tokens], skip_special_tokens=True)), words
        assert 1 < len(tokens) < len(probs)
