"""The reference is the policy at the start of the training: after `init_from`, and with adapters that are trained."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import toy

from rlox import DPO, GRPO, SFT
from rlox.algorithms.online_dpo import OnlineDPO
from rlox.llm.models.saved import load_model

MORE = {"tokenizer": toy.tokenizer(), "learning_rate": 1e-2, "batch_size": 5, "seed": 0}
SAMPLED = {"max_new_tokens": 4, "dataset": toy.PROMPTS}


def lengths(prompts, completions):
    return [float(len(text)) + 0.1 * text.count("1") for text in completions]


KINDS = {
    "dpo": lambda model, **more: DPO(model, **{**MORE, "dataset": toy.PAIRS, **more}),
    "grpo": lambda model, **more: GRPO(model, reward_fn=lengths, **{**MORE, **SAMPLED, "kl_coef": 0.1, **more}),
    "online_dpo": lambda model, **more: OnlineDPO(model, reward_fn=lengths, **{**MORE, **SAMPLED, **more}),
}


def require_first_update_of_its_reference(kind, algorithm):
    metrics = algorithm.train(n_updates=1)
    if kind == "grpo":
        assert abs(metrics["kl"]) < 1e-6
    else:
        assert metrics["loss"] == pytest.approx(math.log(2), abs=1e-5)
    metrics = algorithm.train(n_updates=1)
    assert abs(metrics["kl" if kind == "grpo" else "margin"]) > 1e-5  # the reference has not moved


@pytest.mark.parametrize("lora", [None, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_init_from_moves_the_reference_to_the_weights_of_the_checkpoint(kind, lora, tmp_path):
    first = SFT(toy.model(), dataset=toy.ROWS, lora_rank=lora, **{**MORE, "learning_rate": 3e-2})
    first.train(n_updates=10)
    first.save(tmp_path / "start")
    algorithm = KINDS[kind](toy.model(), lora_rank=lora)
    algorithm.train(n_updates=2)  # what was learned, and log-probabilities that are kept, must not remain
    algorithm.init_from(tmp_path / "start")
    require_first_update_of_its_reference(kind, algorithm)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_of_a_peft_model_has_its_adapters(kind, trained):
    module = toy.trained_peft(trained)
    trainable = {name for name, p in module.named_parameters() if p.requires_grad}
    base = {name: p.detach().clone() for name, p in module.named_parameters() if not p.requires_grad}
    state = torch.get_rng_state()
    algorithm = KINDS[kind](module)
    assert torch.equal(torch.get_rng_state(), state)
    require_first_update_of_its_reference(kind, algorithm)
    held = dict(module.named_parameters())
    assert {name for name, p in held.items() if p.requires_grad} == trainable
    assert all(torch.equal(held[name], p) for name, p in base.items())


def test_adapters_that_train_biases_have_a_copy_of_the_policy_as_reference(tmp_path):
    """peft allows no second set of them."""
    algorithm = KINDS["dpo"](toy.trained_peft(bias="all"))
    require_first_update_of_its_reference("dpo", algorithm)
    algorithm.save(tmp_path / "a")
    again = DPO.from_checkpoint(tmp_path / "a", model=toy.trained_peft(bias="all"), dataset=toy.PAIRS)
    one, other = (trained.train(n_updates=1) for trained in (again, algorithm))
    assert (one["loss"], one["margin"]) == (other["loss"], other["margin"])
    algorithm.init_from(tmp_path / "a")
    require_first_update_of_its_reference("dpo", algorithm)


def test_the_copy_does_not_change_the_policy_and_a_later_training_replaces_it(tmp_path):
    module = toy.trained_peft(modules_to_save=["lm_head"])
    plain = SFT(copy.deepcopy(module), tokenizer=toy.tokenizer(), seed=0)
    expected = plain.generate(["1+2="], n=3, max_new_tokens=4)
    for _ in range(2):
        algorithm = KINDS["dpo"](module)
        assert algorithm.generate(["1+2="], n=3, max_new_tokens=4) == expected
        require_first_update_of_its_reference("dpo", algorithm)
        expected = algorithm.generate(["1+2="], n=3, max_new_tokens=4)
    algorithm.save_pretrained(tmp_path / "merged")
    assert (
        SFT(load_model(str(tmp_path / "merged")).module, tokenizer=toy.tokenizer(), seed=0).generate(
            ["1+2="], n=3, max_new_tokens=4
        )
        == expected
    )
