"""`algo.lora_alpha`: the output of adapters is scaled by lora_alpha / lora_rank, in training and in what is saved."""

import json

import pytest
import torch
import toy
from transformers import AutoModelForCausalLM

import rlox.llm.toy
from rlox import SFT
from rlox.checkpoint import load_checkpoint
from rlox.llm.tokens import Sequences

SEQUENCES = Sequences([[2, 3], [4, 5, 6]], [[4, 5, 6], [7, 8]])


def made(alpha=None, scale=1.0, rank=2, **settings):
    """Adapters with the same weights for every alpha; those of their second matrices are multiplied by `scale`."""
    given = {} if alpha is None else {"lora_alpha": alpha}
    algorithm = SFT(toy.model(), tokenizer=toy.tokenizer(), dataset=toy.ROWS, lora_rank=rank, **given, **settings)
    noise = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in algorithm.policy.named_parameters():
            if "lora_B" in name:  # zeros at first
                p.copy_(scale * 0.1 * torch.randn(p.shape, generator=noise))
    return algorithm


def contributions(algorithm):
    """What each adapter adds to the output of its linear module, for the same inputs."""
    noise = torch.Generator().manual_seed(4)
    found = {}
    for name, module in algorithm.policy.named_modules():
        if hasattr(module, "lora_A"):
            x = torch.randn(5, module.in_features, generator=noise)
            found[name] = (module(x) - module.base_layer(x)).detach()
    return found


def test_twice_the_alpha_doubles_what_adapters_contribute():
    once, twice = (contributions(made(alpha)) for alpha in (4.0, 8.0))
    assert len(once) == 14  # seven linear modules in each of two layers
    for name, added in once.items():
        assert added.abs().max() > 1e-3, name
        torch.testing.assert_close(twice[name], 2 * added, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_the_scale_is_alpha_divided_by_the_rank(rank):
    algorithm = made(6.0, rank=rank)
    layers = dict(algorithm.policy.named_modules())
    noise = torch.Generator().manual_seed(4)
    for name, added in contributions(algorithm).items():
        layer = layers[name]
        x = torch.randn(5, layer.in_features, generator=noise)
        (a,), (b,) = layer.lora_A.values(), layer.lora_B.values()
        torch.testing.assert_close(added, 6.0 / rank * x @ a.weight.T @ b.weight.T, rtol=1e-4, atol=1e-5)


def test_twice_the_alpha_is_twice_the_weights_and_16_is_the_default():
    log_probs = made(8.0).log_probs(SEQUENCES)
    torch.testing.assert_close(made(4.0, scale=2.0).log_probs(SEQUENCES), log_probs, rtol=1e-5, atol=1e-6)
    assert (made(4.0).log_probs(SEQUENCES) - log_probs).abs().max() > 1e-2
    assert torch.equal(made().log_probs(SEQUENCES), made(16.0).log_probs(SEQUENCES))


def test_saved_adapters_keep_their_alpha(tmp_path):
    algorithm = made(8.0)
    log_probs = algorithm.log_probs(SEQUENCES)
    algorithm.save(tmp_path / "a.safetensors")
    assert load_checkpoint(tmp_path / "a.safetensors").header["config"]["lora_alpha"] == 8.0
    again = SFT.from_checkpoint(tmp_path / "a.safetensors", model=toy.model())
    assert again.config.lora_alpha == 8.0
    assert torch.equal(again.log_probs(SEQUENCES), log_probs)
    algorithm.save_pretrained(tmp_path / "merged")
    merged = SFT(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    torch.testing.assert_close(merged.log_probs(SEQUENCES), log_probs, rtol=0.0, atol=1e-4)


def test_another_alpha_would_change_what_the_weights_mean(tmp_path):
    made(8.0).save(tmp_path / "a.safetensors")
    made(8.0).init_from(tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"lora_alpha must be the checkpoint's, 8\.0, got 16"):
        made(16.0).init_from(tmp_path / "a.safetensors")


@pytest.mark.slow
def test_a_run_has_the_alpha_that_was_typed(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rlox.llm.toy.sum_rows()[::7]))
    data = ["model=rlox.llm.toy:make_model", "dataset=sums.jsonl", "output_dir=run", "total_timesteps=2"]
    small = ["logger=none", "eval.n_points=1", "eval.n_episodes=4", "algo.batch_size=4"]
    code, _, err = command("train", "algo=sft", *data, *small, "algo.lora_rank=4", "algo.lora_alpha=32")
    assert not code, err
    model, _ = rlox.llm.toy.make_model()
    trained = SFT.from_checkpoint("run/checkpoints/last.safetensors", model=model)
    assert trained.config.lora_alpha == 32.0
    scales = {module.scaling["default"] for module in trained.policy.modules() if hasattr(module, "lora_A")}
    assert scales == {8.0}
    code, _, err = command("train", "resume=run", "total_timesteps=3", "algo.lora_alpha=16")
    assert code == 2
    assert "algo.lora_alpha must stay 32" in err
