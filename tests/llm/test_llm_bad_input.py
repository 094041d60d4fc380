"""Bad input raises an error of one paragraph with the remedy, before anything is learned."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import toy
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

from rlox.algorithms import DPO, GRPO, SFT, OnlineDPO, RewardModel
from rlox.algorithms.trainers import Trainer
from rlox.processes.failures import failure_of

TOKENIZER = toy.tokenizer()


def zeros(prompts, completions):
    return [0.0] * len(completions)


def grpo(model=None, **more):
    return GRPO(
        toy.model() if model is None else model,
        **{"reward_fn": zeros, "tokenizer": TOKENIZER, "dataset": toy.PROMPTS, "max_new_tokens": 4, **more},
    )


def online(**more):
    return OnlineDPO(
        toy.model(), **{"tokenizer": TOKENIZER, "dataset": toy.PROMPTS, "max_new_tokens": 4, "batch_size": 3, **more}
    )


def endless():
    tokenizer = toy.copy.deepcopy(TOKENIZER)
    tokenizer.eos_token = None
    model = toy.model()
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    return {"model": model, "tokenizer": tokenizer}


def encoder_decoder():
    return T5ForConditionalGeneration(
        T5Config(vocab_size=24, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )


class Resets:
    def reset(self, prompt):
        return ""


class Returns(nn.Module):
    """Always returns the given result."""

    def __init__(self, found):
        super().__init__()
        self.found, self.weight = found, nn.Parameter(torch.zeros(1))

    def forward(self, ids):
        return self.found(ids, self.weight)


IDS = torch.tensor([[2, 3], [4, 5]])
CASES = {
    # text, tokenizers and rows
    "no tokenizer": (
        lambda: SFT(toy.model(), dataset=toy.ROWS), ValueError,
        "SFT: text needs a tokenizer, got none; pass tokenizer=…, or token ids",
    ),
    "a reward of texts without a tokenizer": (
        lambda: grpo(tokenizer=None, dataset=IDS).train(1), ValueError,
        "GRPO: a reward that takes texts needs a tokenizer, got none; pass tokenizer=…",
    ),
    "an invalid tokenizer": (
        lambda: SFT(toy.model(), tokenizer="gpt2"), TypeError, "tokenizer must be one of Hugging Face's, got 'gpt2'",
    ),
    "no end of sequence": (
        lambda: SFT(**endless(), dataset=toy.ROWS), ValueError,
        "must have an end of sequence .eos_token.*got none; set tokenizer.eos_token, or pass eos_token_id=…",
    ),
    "an invalid end of sequence": (
        lambda: SFT(toy.model(), eos_token_id="</s>"), TypeError, "eos_token_id must be a token id",
    ),
    "a prompt longer than the context": (
        lambda: grpo(dataset=["1", "1" * 61]), ValueError,
        "GRPO: row 1 must fit in the model's context of 64 tokens, got 65, 4 of them max_new_tokens; leave such rows",
    ),
    "a text longer than the context": (
        lambda: SFT(toy.model(), tokenizer=TOKENIZER, dataset=[{"text": "1" * 64}]), ValueError,
        "SFT: row 0 must fit in the model's context of 64 tokens, got 65",
    ),
    "a prompt to generate from longer than the context": (
        lambda: grpo().generate("1" * 64), ValueError, "GRPO.generate: row 0 must fit in the model's context",
    ),
    "a missing column": (
        lambda: DPO(toy.model(), tokenizer=TOKENIZER, dataset=[{"prompt": "1", "choosen": "2", "rejected": "3"}]),
        ValueError, "must have column 'chosen', got none; did you mean 'choosen'",
    ),
    "a missing column of a reward": (
        lambda: grpo(reward_fn=lambda prompts, completions, answer: zeros(prompts, completions)).train(1), ValueError,
        "must find a column for its parameter 'answer', got none",
    ),
    "a missing column of a reward in the rows of the evaluation": (
        lambda: grpo(
            reward_fn=lambda prompts, completions, answer: zeros(prompts, completions),
            dataset=[{"prompt": "1", "answer": "2"}], eval_dataset=["1"],
        ).train(1),
        ValueError, "must find a column for its parameter 'answer', got none",
    ),
    "a missing column of a reward in the rows of the evaluation of online DPO": (
        lambda: online(
            reward_fn=lambda prompts, completions, answer: zeros(prompts, completions),
            dataset=[{"prompt": "1", "answer": "2"}], eval_dataset=["1"],
        ).train(1),
        ValueError, "must find a column for its parameter 'answer', got none",
    ),
    "an evaluation beyond the context": (
        lambda: grpo().evaluate(max_new_tokens=100), ValueError,
        "GRPO.evaluate: row 0 must fit in the model's context of 64 tokens, got 102, 100 of them max_new_tokens",
    ),
    **{
        f"the margin {margin}": (
            lambda margin=margin: RewardModel(
                toy.model(), tokenizer=TOKENIZER,
                dataset=[{**row, "margin": margin if i == 3 else 1.0} for i, row in enumerate(toy.PAIRS)],
            ),
            ValueError, "RewardModel: row 3: margin must be a finite number, got",
        )
        for margin in ("far", None, float("nan"), float("inf"), [1.0])
    },
    "no rows": (lambda: grpo(dataset=[]), ValueError, "must hold at least one row, got none"),
    "no rows of ids": (
        lambda: grpo(dataset=torch.zeros(0, 3, dtype=torch.int64)), ValueError, "must hold at least one row, got none",
    ),
    "nothing to learn from": (
        lambda: SFT(toy.model()).train(1), ValueError,
        "SFT.train: there must be rows to learn from; pass them to train, or dataset=…",
    ),
    "nothing to score": (
        lambda: SFT(toy.model()).scored(), ValueError,
        "SFT: there must be rows to evaluate on; pass them, or dataset=…",
    ),
    "scoring without rows": (
        lambda: SFT(toy.model(), tokenizer=TOKENIZER, dataset=toy.ROWS).scored(0), ValueError,
        "SFT.scored: n_episodes must be >= 1, got 0",
    ),
    "no file": (
        lambda: SFT(toy.model(), tokenizer=TOKENIZER, dataset="nowhere.jsonl"), FileNotFoundError,
        "there is no such file",
    ),
    "ids outside the vocabulary": (
        lambda: grpo(dataset=torch.tensor([[2, 24]])), ValueError,
        r"ids must be in the model's vocabulary, \[0, 24\), got 24 in row 0",
    ),
    "a tokenizer of another model": (
        lambda: SFT(toy.model(vocabulary=10), tokenizer=TOKENIZER, dataset=toy.ROWS), ValueError,
        r"vocabulary, \[0, 10\), got 13 in row 0; does the tokenizer belong to the model\?",
    ),
    "negative ids": (
        lambda: grpo(dataset=torch.tensor([[2, -1]])), ValueError, "must hold ids of at least 0, got -1 in row 0",
    ),
    "ids outside the vocabulary of a custom module": (
        lambda: SFT(toy.model("bare")).train_step([[2, 24]], [[3]]), ValueError,
        "SFT: model must accept token ids up to 24, but raised: index out of range",
    ),
    "ids that are not integers": (
        lambda: grpo(dataset=torch.rand(2, 3)), TypeError, "must hold rows of integer token ids",
    ),
    "ids of one dimension": (
        lambda: grpo(dataset=torch.tensor([2, 3])), ValueError, r"must have shape \(N, length\), got \(2,\)",
    ),
    "an empty prompt of ids": (
        lambda: grpo(dataset=[[2], []]), ValueError, "prompts must have at least one token each",
    ),
    "unequal numbers of pairs": (
        lambda: DPO(toy.model()).train_step(IDS, IDS, IDS[:1]), ValueError,
        r"as many prompts as chosen as rejected, got \[2, 2, 1\]",
    ),
    "ids of one kind where there must be three": (
        lambda: DPO(toy.model(), dataset=IDS), TypeError,
        r"must be passed as \(prompts, chosen, rejected\), got 1 of them",
    ),
    # models
    "no module": (lambda: SFT("gpt2"), TypeError, "model must be a torch.nn.Module, got 'gpt2'"),
    "an encoder and decoder": (
        lambda: SFT(encoder_decoder()), ValueError,
        "model must be a causal one, got the encoder-decoder T5ForConditionalGeneration",
    ),
    "nothing to train": (
        lambda: SFT(toy.model().requires_grad_(False)), ValueError,
        "model must have parameters that require a gradient, got none",
    ),
    "logits of another shape": (
        lambda: SFT(Returns(lambda ids, w: w + torch.zeros(len(ids), 24))).train_step(IDS, IDS), ValueError,
        r"model must return logits \(2, 3, V\), got \(2, 24\)",
    ),
    "no tensor": (
        lambda: SFT(Returns(lambda ids, w: {"logits": w})).train_step(IDS, IDS), TypeError,
        r"model must return logits \(B, T, V\), got 'dict'",
    ),
    "rewards of another shape": (
        lambda: RewardModel(Returns(lambda ids, w: w + torch.zeros(*ids.shape, 24))).train_step(IDS, IDS, IDS),
        ValueError,
        r"model must return rewards \(4,\), got \(4, 4, 24\)",
    ),
    "a reference of another vocabulary": (
        lambda: DPO(toy.model(), toy.model(vocabulary=30)), ValueError,
        "ref_model must have the model's vocabulary of 24 ids, got 30",
    ),
    "a reference that is no module": (
        lambda: DPO(toy.model(), "gpt2"), TypeError, "ref_model must be a torch.nn.Module, or left out, got 'gpt2'",
    ),
    "a reference that is trained": (
        lambda: (lambda m: DPO(m, m))(toy.model()), ValueError,
        "ref_model must not be the model itself, which is trained; leave it out, or pass a copy",
    ),
    "a reference of an algorithm without one": (
        lambda: SFT(toy.model(), toy.model()), TypeError, "ref_model must be left out, because sft has no reference",
    ),
    "a reference that moves and is the model without adapters": (
        lambda: DPO(
            toy.model(), tokenizer=TOKENIZER, dataset=toy.PAIRS, lora_rank=2, ref_sync_every=1, batch_size=4
        ),
        ValueError, "ref_sync_every must be null with adapters",
    ),
    "a reference that moves and is another model": (
        lambda: DPO(toy.model(), toy.model("gpt2"), ref_sync_every=1), ValueError,
        "ref_sync_every must be null unless ref_model has the model's parameters, got another transformer.wte.weight",
    ),
    "a reference that moves to a model with adapters": (
        lambda: DPO(toy.model(), toy.model(seed=1), lora_rank=2, ref_sync_every=1), ValueError,
        "ref_sync_every must be null unless ref_model has the model's parameters, got another",
    ),
    "adapters on a custom module": (
        lambda: SFT(toy.model("bare"), lora_rank=2), ValueError,
        "lora_rank must be null for a module of your own, got 2",
    ),
    "adapters on adapters": (
        lambda: SFT(SFT(toy.model(), lora_rank=2).policy, lora_rank=2), ValueError,
        "lora_rank must be null for a model that has adapters already",
    ),
    "adapters on nothing": (
        lambda: SFT(toy.model(), lora_rank=2, lora_targets=["nowhere"]), ValueError,
        r"lora_targets must name modules of the model, got \['nowhere'\]",
    ),
    "packing for a custom module": (
        lambda: SFT(toy.model("bare"), packing=True).train_step(IDS, IDS), ValueError,
        "packing must be false for a module of your own, whose forward takes no positions",
    ),
    "checkpointing of a custom module": (
        lambda: SFT(toy.model("bare"), gradient_checkpointing=True), ValueError,
        "gradient_checkpointing must be false for a module of your own, got true",
    ),
    "a native backend": (
        lambda: SFT(toy.model(), backend="native"), ValueError, "backend must be auto or torch, got 'native'",
    ),
    # hyper-parameters
    "an unknown hyper-parameter": (
        lambda: grpo(groop_size=8), TypeError, "'groop_size'.*did you mean 'group_size'",
    ),
    "an unknown loss": (
        lambda: grpo(loss_type="ppo"), ValueError, "loss_type must be one of grpo, bnpo, dr_grpo, dapo, got 'ppo'",
    ),
    "another unknown loss": (
        lambda: DPO(toy.model(), loss_type="kto"), ValueError, "loss_type must be one of sigmoid, hinge, ipo, robust",
    ),
    "a group of one": (
        lambda: grpo(group_size=1), ValueError, "group_size must be >= 2: one completion alone has no advantage",
    ),
    "a temperature of 0 in training": (
        lambda: grpo(temperature=0.0), ValueError,
        "temperature must be > 0 and finite: at 0 all completions would be equal, got 0.0",
    ),
    "more parts than completions": (
        lambda: grpo(batch_size=1, group_size=2, accumulation=2, n_minibatches=2), ValueError,
        "leave a completion for each part",
    ),
    "a delta within the clip": (
        lambda: grpo(delta=1.1), ValueError, r"delta must be above 1 \+ clip_eps_high, or null, got 1.1",
    ),
    "robust without wrong labels": (
        lambda: DPO(toy.model(), loss_type="robust"), ValueError, "label_smoothing must be above 0 with robust",
    ),
    "smoothing of a hinge": (
        lambda: DPO(toy.model(), loss_type="hinge", label_smoothing=0.1), ValueError,
        "label_smoothing must be 0 with hinge and ipo",
    ),
    "packing of a reward model": (
        lambda: RewardModel(toy.model(), packing=True), ValueError,
        "packing must be false: a reward is read at the end of its row",
    ),
    "targets without adapters": (
        lambda: SFT(toy.model(), lora_targets=["q_proj"]), ValueError, "lora_targets must be null if lora_rank is null",
    ),
    "no updates": (
        lambda: grpo().train(0), ValueError, "n_updates must be >= 1, got 0",
    ),
    "no passes": (
        lambda: grpo().train(IDS, n_epochs=0), ValueError, "n_epochs must be >= 1, got 0",
    ),
    "passes over no rows": (
        lambda: grpo(dataset=None).train(n_epochs=2), ValueError, "there must be rows to learn from; pass them",
    ),
    "passes and updates": (
        lambda: grpo().train(IDS, 2, n_updates=1), TypeError,
        "n_epochs must be left out with n_updates or until, got 2",
    ),
    "passes and an end": (
        lambda: grpo().train(IDS, 2, until=1), TypeError, "n_epochs must be left out with n_updates or until, got 2",
    ),
    "two numbers of updates": (
        lambda: grpo().train(5, n_updates=2), TypeError, "n_updates must be given once, got 5 and 2",
    ),
    "a trainer of a language model": (
        lambda: Trainer("grpo"), TypeError,
        r"got grpo, which trains a language model; create it with rlox.GRPO\(model, ...\)",
    ),
    "a trainer of a language model on rows of text": (
        lambda: Trainer("sft", dataset="rows.jsonl"), TypeError, r"create it with rlox.SFT\(model, ...\)",
    ),
    # completions
    "a stop of two tokens": (
        lambda: grpo(stop=["12"]).train(1), ValueError,
        "stop must contain texts of one token each, got '12', which has 2",
    ),
    "a stop that is not a list": (
        lambda: grpo().generate("1", stop="7"), TypeError, r"stop must be a list, got '7'; write \['7'\]",
    ),
    "a stop of text without a tokenizer": (
        lambda: grpo(tokenizer=None, dataset=IDS).generate([[2]], stop=["7"]), ValueError,
        "stop must be token ids without a tokenizer, got '7'",
    ),
    "an unknown setting": (
        lambda: grpo().generate("1", top_n=3), TypeError, "unknown setting 'top_n'; did you mean 'top_[pk]'",
    ),
    "a temperature below 0": (
        lambda: grpo().generate("1", temperature=-1.0), ValueError, "temperature must be >= 0 and finite.*got -1.0",
    ),
    "no new tokens": (
        lambda: grpo().generate("1", max_new_tokens=0), ValueError, "max_new_tokens must be >= 1, got 0",
    ),
    "no completions": (
        lambda: grpo().generate("1", n=0), ValueError, "GRPO.generate: n must be >= 1, got 0",
    ),
    "an observation": (
        lambda: grpo().predict(np.zeros(3)), TypeError, r"takes no observations; call generate\(prompts\)",
    ),
    # rewards and preferences
    "no reward": (
        lambda: grpo(reward_fn=None).train(1), ValueError,
        "there must be a reward_fn or an environment to learn from.*pass reward_fn=…",
    ),
    "an invalid reward": (
        lambda: grpo(reward_fn=lambda x, y: 0), TypeError, "must take texts, .* or token ids, .*name its first two",
    ),
    "a wrong number of rewards": (
        lambda: grpo(reward_fn=lambda prompts, completions: [1.0]).train(1), ValueError,
        "must return 32 numbers, one for each completion, got 1 .prompt ",
    ),
    "a reward that is not a number": (
        lambda: grpo(reward_fn=lambda prompts, completions: [float("nan")] * len(prompts)).train(1), ValueError,
        "must return finite numbers, got nan .prompt .*return None where it does not apply",
    ),
    "rewards without numbers": (
        lambda: grpo(reward_fn=lambda prompts, completions: torch.zeros(len(prompts), device="meta")).train(1),
        TypeError, "must return a dense tensor of 32 numbers, got tensor",
    ),
    "sparse rewards": (
        lambda: grpo(reward_fn=lambda prompts, completions: torch.zeros(len(prompts)).to_sparse()).train(1),
        TypeError, "must return a dense tensor of 32 numbers, got tensor",
    ),
    "half of a character": (
        lambda: grpo(dataset=["1", "2\ud800"]), ValueError, "row 1: prompt must be a text of Unicode characters, got",
    ),
    "a wrong number of weights": (
        lambda: grpo(reward_weights=[1.0, 2.0]), ValueError, r"weights must be one finite number for each of zeros",
    ),
    "no judge": (
        lambda: online().train(1), ValueError,
        "there must be a preference_fn or a reward_fn to learn from, got neither",
    ),
    "both judges": (
        lambda: online(preference_fn=zeros, reward_fn=zeros), TypeError,
        "preference_fn must not be combined with reward_fn; pass one of them",
    ),
    "an invalid judge": (
        lambda: online(preference_fn=3), TypeError, "preference_fn must be a function .*, got 3",
    ),
    "a third choice": (
        lambda: online(preference_fn=lambda prompts, completions: [0, 2, 1]).train(1), ValueError,
        "must return 0, 1 or None for each pair, got 2 .prompt",
    ),
    "choices of two dimensions": (
        lambda: online(preference_fn=lambda prompts, completions: torch.zeros(3, 2)).train(1), ValueError,
        "must return 0, 1 or None for each pair, got tensor",
    ),
    "yes and no": (
        lambda: online(preference_fn=lambda prompts, completions: [True] * 3).train(1), ValueError,
        "must return 0, 1 or None for each pair, got True",
    ),
    "too few choices": (
        lambda: online(preference_fn=lambda prompts, completions: [0]).train(1), ValueError,
        "must return one index for each of 3 prompts, got 1",
    ),
    "no list of choices": (
        lambda: online(preference_fn=lambda prompts, completions: 0).train(1), TypeError,
        "preference_fn must return a list, got 0",
    ),
    "a conversation as a prompt": (
        lambda: grpo().generate([[{"role": "user", "content": "1"}]]), TypeError,
        r'rows of integer token ids, got .* in row 0; a conversation is ."prompt": .message',
    ),
    "an environment without step": (
        lambda: grpo(reward_fn=None, environment=Resets).train(1), TypeError,
        "the environment must have reset and step, but Resets has no step",
    ),
    "unequal numbers of prompts and completions": (
        lambda: RewardModel(toy.model(), tokenizer=TOKENIZER).score_batch(["1"], ["2", "3"]), ValueError,
        "one prompt for each completion, got 1 and 2",
    ),
}  # fmt: skip


def test_a_function_may_switch_gradients_off():
    """Scoring with a model needs none; the update needs them."""

    def reward(prompts, completions):
        torch.set_grad_enabled(False)
        return [float(len(text)) for text in completions]

    def prefer(prompts, completions):
        torch.set_grad_enabled(False)
        return [0] * len(completions)

    for algorithm in (grpo(reward_fn=reward), online(preference_fn=prefer)):
        with torch.enable_grad():  # and back on afterwards
            assert algorithm.train(1)


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_an_error(name):
    act, error, output = CASES[name]
    with pytest.raises(error, match=output) as caught:
        act()
    text = str(caught.value)
    assert "\n\n" not in text
    assert len(text) < 600


@pytest.mark.parametrize("name", ["grpo", "online"])
def test_exceptions_of_a_function_are_raised_unchanged_with_a_note(name):
    class Strange(Exception):
        pass

    def fails(prompts, completions):
        raise Strange("in the middle")

    algorithm = grpo(reward_fn=fails) if name == "grpo" else online(preference_fn=fails)
    with pytest.raises(Strange, match="in the middle") as caught:
        algorithm.train(2)
    assert failure_of(caught.value).what == ("reward fails" if name == "grpo" else "preference_fn")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["bare", "qwen2"])
def test_logits_that_are_not_finite_are_an_error(kind, temperature):
    module = toy.model(kind)
    head = module.head if kind == "bare" else module.lm_head
    with torch.no_grad():
        head.weight[3] = torch.nan
    with pytest.raises(FloatingPointError, match="SFT: the model's logits must be finite, and are not"):
        SFT(module).generate([[2, 3]], temperature=temperature, max_new_tokens=2)


@pytest.mark.parametrize("cls", [SFT, DPO, GRPO])
def test_a_loss_that_is_not_finite_ends_the_training(cls):
    module = toy.model("bare")
    with torch.no_grad():
        module.head.bias[3] = torch.nan
    output = "logits must be finite" if cls is GRPO else "loss became nan at update 1; training cannot continue"
    data = (IDS, IDS, IDS + 1) if cls is DPO else (IDS, IDS) if cls is SFT else IDS
    more = {}
    if cls is GRPO:
        more = {"reward_fn": lambda completions, prompts: [float(c[0]) for c in completions], "max_new_tokens": 2}
    with pytest.raises(FloatingPointError, match=output):
        cls(module, **more).train(data)


def test_a_rejected_algorithm_does_not_change_the_model():
    module = toy.model()
    before = {name: p.clone() for name, p in module.state_dict().items()}
    for bad in ({"group_size": 1}, {"dataset": [{"text": "1"}]}):
        with pytest.raises(ValueError):
            grpo(module, **bad)
    assert all(torch.equal(p, before[name]) for name, p in module.state_dict().items())
