"""Training that is saved and resumed equals training that was never stopped, bit for bit."""

from __future__ import annotations

import json
import pickle
import struct

import numpy as np
import pytest
import torch
import toy
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from rlox.algorithms import DPO, GRPO, SFT, OnlineDPO, RewardModel
from rlox.callbacks import Callback
from rlox.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from rlox.llm import load_model, load_tokenizer
from rlox.llm.tokens import Sequences

N = 3


def lengths(prompts, completions):
    return [float(len(c)) for c in completions]


def prefers(prompts, completions):
    return [None if a == b else int(len(b) > len(a)) for a, b in completions]


SAMPLED = {"dataset": toy.PROMPTS, "max_new_tokens": 4}
KINDS = {
    "sft": (SFT, {"dataset": toy.ROWS}, {}),
    "reward_model": (RewardModel, {"dataset": toy.PAIRS}, {}),
    "dpo": (DPO, {"dataset": toy.PAIRS}, {}),
    "grpo": (GRPO, {**SAMPLED, "group_size": 3, "n_epochs": 2, "n_minibatches": 2}, {"reward_fn": lengths}),
    "online_dpo": (OnlineDPO, SAMPLED, {"preference_fn": prefers}),
}
SCHEDULED = {"learning_rate": 1e-2, "learning_rate_schedule": "linear", "warmup": 0.5, "batch_size": 7}
TIMES = ("time/",)


class Record(Callback):
    """Records all metrics of all updates; stops training after update `last`."""

    def __init__(self, last=None):
        self.rows, self.last = [], last

    def on_step(self, *, step, metrics, **info):
        self.rows.append({name: x for name, x in metrics.items() if not name.startswith(TIMES)})
        return step != self.last


def arrays(path):
    sections = load_checkpoint(path).tensors
    return {f"{s}/{k}": v for s, part in sections.items() for k, v in part.items() if s != "generators"}


def same(one, other):
    assert one.keys() == other.keys()
    for name, array in one.items():
        assert array.tobytes() == other[name].tobytes(), name


def resumed_as_never_stopped(kind, tmp_path, ref_model=None, resumed_with=(), module=toy.model, start=None, **settings):
    cls, data, functions = KINDS[kind]
    settings = {**SCHEDULED, **data, **settings}
    whole, first, second = Record(), Record(N), Record()

    def reference():
        return {} if ref_model is None else {"ref_model": ref_model()}

    def made(record):
        found = cls(module(), callbacks=[record], tokenizer=toy.tokenizer(), **reference(), **functions, **settings)
        if start is not None:
            found.init_from(start)
        return found

    algorithm = made(whole)
    algorithm.train(2 * N)
    algorithm.save(tmp_path / "whole.safetensors")
    stopped = made(first)
    stopped.train(2 * N)
    assert stopped.counters.updates == N
    stopped.save(tmp_path / "half.safetensors")
    lora = {"model": module()} if settings.get("lora_rank") or module is not toy.model else {}
    given = reference() if "ref_model" in resumed_with else {}
    again = cls.from_checkpoint(
        tmp_path / "half.safetensors", dataset=data["dataset"], callbacks=[second], **functions, **lora, **given
    )
    again.train()
    again.save(tmp_path / "again.safetensors")
    assert len(whole.rows) == 2 * N
    assert first.rows + second.rows == whole.rows
    assert len({row["learning_rate"] for row in whole.rows}) > 3
    same(arrays(tmp_path / "again.safetensors"), arrays(tmp_path / "whole.safetensors"))
    return algorithm, again


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_and_data_type_of_the_process_do_not_matter(kind):
    cls, data, functions = KINDS[kind]
    more = {"ent_coef": 0.1} if kind == "grpo" else {}  # scores by operations of PyTorch

    def learned():
        algorithm = cls(toy.model(), tokenizer=toy.tokenizer(), seed=1, batch_size=7, **data, **functions, **more)
        algorithm.train(2)
        return algorithm

    expected = learned()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            found = learned()
    finally:
        torch.set_default_dtype(torch.float32)
    for p, q in zip(found.policy.parameters(), expected.policy.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_resume_halfway(kind, lora, tmp_path):
    resumed_as_never_stopped(kind, tmp_path, lora_rank=lora)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dpo", "grpo", "online_dpo"])
@pytest.mark.parametrize("given", [False, True], ids=["own reference", "given reference"])
def test_resume_with_a_reference_that_moves(kind, given, tmp_path):
    """Given or not, a reference that moves is stored in the file."""
    ref_model = (lambda: toy.model(seed=3)) if given else None
    one, other = resumed_as_never_stopped(kind, tmp_path, ref_model=ref_model, ref_sync_every=2, ref_sync_share=0.5)
    sequences = Sequences([[2, 3]], [[4, 5]])
    assert torch.equal(one.log_probs(sequences, reference=True), other.log_probs(sequences, reference=True))


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, 2])
@pytest.mark.parametrize("kind", ["dpo", "grpo"])
def test_resume_with_a_given_reference(kind, lora, tmp_path):
    resumed_as_never_stopped(
        kind, tmp_path, ref_model=lambda: toy.model(seed=3), resumed_with=["ref_model"], lora_rank=lora
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dpo", "grpo", "online_dpo"])
def test_resume_with_the_reference_of_init_from_or_of_trained_adapters(kind, tmp_path):
    for lora in (None, 2):
        start = SFT(toy.model(), tokenizer=toy.tokenizer(), dataset=toy.ROWS, lora_rank=lora, learning_rate=3e-2)
        start.train(3)
        start.save(tmp_path / "start.safetensors")
        resumed_as_never_stopped(kind, tmp_path, start=tmp_path / "start.safetensors", lora_rank=lora)
    resumed_as_never_stopped(kind, tmp_path, module=toy.trained_peft)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"packing": True, "accumulation": 3}, {"gradient_checkpointing": True}], ids=str)
@pytest.mark.parametrize("kind", ["grpo", pytest.param("dpo", marks=pytest.mark.exhaustive)])
def test_resume_with_packing_or_checkpointing(kind, settings, tmp_path):
    resumed_as_never_stopped(kind, tmp_path, **settings)


@pytest.mark.parametrize("lora", [None, 2])
def test_training_without_the_given_reference_is_an_error(lora, tmp_path):
    algorithm = DPO(
        toy.model(), toy.model(seed=3), tokenizer=toy.tokenizer(), dataset=toy.PAIRS, batch_size=4, lora_rank=lora
    )
    algorithm.train(1)
    algorithm.save(tmp_path / "d.safetensors")
    base = {"model": toy.model()} if lora else {}
    again = DPO.from_checkpoint(tmp_path / "d.safetensors", dataset=toy.PAIRS, **base)
    assert again.generate("1+", max_new_tokens=3, seed=0) == algorithm.generate("1+", max_new_tokens=3, seed=0)
    rows = ([[2]], [[3]], [[4]])
    for use in (again.train, lambda: again.train_step(*rows), lambda: again.compute_loss(*rows), again.scored):
        with pytest.raises(ValueError, match=r"trained with a ref_model.*pass ref_model=… to from_checkpoint"):
            use()


def test_without_the_given_reference_an_algorithm_can_be_saved_again(tmp_path):
    settings = {"tokenizer": toy.tokenizer(), "dataset": toy.PAIRS, "batch_size": 4}
    DPO(toy.model(), toy.model(seed=3), **settings).save(tmp_path / "one.safetensors")
    DPO.from_checkpoint(tmp_path / "one.safetensors").save(tmp_path / "two.safetensors")
    again = DPO.from_checkpoint(tmp_path / "two.safetensors")
    with pytest.raises(ValueError, match="pass ref_model=… to from_checkpoint"):
        again.train(toy.PAIRS)


@pytest.mark.parametrize("first", [None, 3], ids=["own reference", "given reference"])
def test_what_another_reference_has_read_is_not_used(first, tmp_path):
    given = None if first is None else toy.model(seed=first)
    algorithm = DPO(toy.model(), given, tokenizer=toy.tokenizer(), dataset=toy.PAIRS, batch_size=20)
    algorithm.train(1)
    algorithm.save(tmp_path / "d.safetensors")

    def sums(seed):
        ref_model = None if seed is None else toy.model(seed=seed)
        again = DPO.from_checkpoint(tmp_path / "d.safetensors", ref_model=ref_model, dataset=toy.PAIRS)
        known, batch = not np.isnan(again._known.values).any(), again.sample()
        found = again._reference_sums(batch, known=True, keep=False)
        return known, torch.equal(found, again._reference_sums(batch, known=False))

    assert sums(first) == (True, True)
    assert sums(4) == (False, True)


def test_a_reference_that_the_checkpoint_lacks_is_named(tmp_path):
    settings = {"reward_fn": lengths, "dataset": toy.PROMPTS}
    algorithm = GRPO(toy.model(), tokenizer=toy.tokenizer(), kl_coef=0.0, max_new_tokens=2, **settings)
    algorithm.train(1)
    algorithm.save(file := tmp_path / "g.safetensors")
    with pytest.raises(ValueError, match=r"contains no reference, and this training needs one; pass ref_model=…"):
        GRPO.from_checkpoint(file, kl_coef=0.1, **settings)
    assert "kl" in GRPO.from_checkpoint(file, ref_model=toy.model(), kl_coef=0.1, **settings).train(until=2)


@pytest.mark.parametrize("lora", [None, 2])
def test_completions_that_nothing_ends_stay_so(lora, tmp_path):
    settings = {"tokenizer": toy.tokenizer(), "eos_token_id": [], "lora_rank": lora}
    algorithm = GRPO(toy.model(), reward_fn=lengths, **settings)
    assert algorithm.model.eos == ()
    algorithm.save(tmp_path / "g.safetensors")
    base = {"model": toy.model()} if lora else {}
    again = GRPO.from_checkpoint(tmp_path / "g.safetensors", reward_fn=lengths, **base)
    assert again.model.eos == again.reference._model.eos == ()


def test_resume_in_the_second_dataset_of_a_training(tmp_path):
    """A pass over rows starts when they are passed to `train`."""
    record, other = Record(), Record()
    algorithm = SFT(toy.model(), tokenizer=toy.tokenizer(), callbacks=[record], batch_size=3, learning_rate=1e-2)
    algorithm.train(toy.ROWS[:7])
    algorithm.train(toy.ROWS[7:], n_updates=2)
    algorithm.save(tmp_path / "s.safetensors")
    again = SFT.from_checkpoint(tmp_path / "s.safetensors", dataset=toy.ROWS[7:], callbacks=[other])
    record.rows.clear()
    algorithm.train(3)
    again.train(3)
    assert record.rows == other.rows


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_each_pass_over_the_same_rows_has_another_order(kind, tmp_path):
    cls, data, _ = KINDS[kind]
    rows = data["dataset"]
    settings = {"tokenizer": toy.tokenizer(), "batch_size": 5, "learning_rate": 1e-2}
    whole, parts = (cls(toy.model(), **settings) for _ in range(2))
    whole.train(rows, n_epochs=3)
    orders = []
    for _ in range(3):
        orders.append([i for update in range(4) for i in whole.numbers(4 * len(orders) + update)])
        parts.train(list(rows), n_epochs=1)
        parts.save(tmp_path / "p.safetensors")
        parts = cls.from_checkpoint(tmp_path / "p.safetensors", dataset=rows)
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert orders[0] != orders[1] != orders[2]
    assert torch.equal(whole.optimizer.flat, parts.optimizer.flat)
    parts.train(rows[::-1], n_updates=1)  # other rows start with their first pass
    assert parts.numbers(12).tolist() == whole.numbers(0).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grpo", "online_dpo"])
def test_resume_after_an_exception_in_a_custom_function(kind, tmp_path):
    cls, data, functions = KINDS[kind]
    calls = []
    ((name, function),) = functions.items()

    def fails(prompts, completions):
        calls.append(1)
        if len(calls) == N + 1:
            raise ZeroDivisionError("of the user's")
        return function(prompts, completions)

    settings = {**SCHEDULED, **data, "tokenizer": toy.tokenizer()}
    whole = cls(toy.model(), **{name: function}, **settings)
    whole.plan(2 * N)
    broken = cls(toy.model(), **{name: fails}, **settings)
    with pytest.raises(ZeroDivisionError, match="of the user's"):
        broken.train(2 * N)
    record = Record(N)
    stopped = cls(toy.model(), **{name: function}, callbacks=[record], **settings)
    stopped.train(2 * N)
    assert torch.equal(broken.optimizer.flat, stopped.optimizer.flat)
    assert broken.counters.updates == N
    broken.save(tmp_path / "b.safetensors")
    again = cls.from_checkpoint(tmp_path / "b.safetensors", dataset=data["dataset"], **{name: function})
    again.train()
    whole.train()
    assert torch.equal(again.optimizer.flat, whole.optimizer.flat)


def test_a_resume_with_another_batch_size_continues_behind_the_last_row(tmp_path):
    path = tmp_path / "a.safetensors"
    algorithm = SFT(toy.model(), tokenizer=toy.tokenizer(), dataset=toy.ROWS, batch_size=4, seed=3)
    whole = np.concatenate([algorithm.numbers(i) for i in range(15)])  # three passes over the 20 rows
    read = []
    for batch_size, n_updates in ((4, 3), (3, 5), (7, 2), (4, 1)):
        if read:
            algorithm.save(path)
            algorithm = SFT.from_checkpoint(path, dataset=toy.ROWS, batch_size=batch_size)
        for _ in range(n_updates):
            read += [*algorithm.numbers(algorithm.counters.updates)]
            algorithm.train(1)
    assert read == whole[: len(read)].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_other_rows_are_an_error(kind, tmp_path):
    cls, data, functions = KINDS[kind]
    algorithm = cls(toy.model(), tokenizer=toy.tokenizer(), **data, **functions)
    algorithm.save(tmp_path / "c.safetensors")
    with pytest.raises(ValueError, match=r"must contain the 20 rows.*got 20 others.*init_from"):
        cls.from_checkpoint(tmp_path / "c.safetensors", dataset=data["dataset"][::-1], **functions)


def test_rows_with_other_reward_columns_are_an_error(tmp_path):
    rows = [{"prompt": p, "answer": str(i)} for i, p in enumerate(toy.PROMPTS)]
    algorithm = GRPO(toy.model(), tokenizer=toy.tokenizer(), dataset=rows, max_new_tokens=4)
    algorithm.save(tmp_path / "c.safetensors")
    rows[3]["answer"] = "another"
    with pytest.raises(ValueError, match="got 20 others"):
        GRPO.from_checkpoint(tmp_path / "c.safetensors", dataset=rows)


def test_a_checkpoint_of_another_algorithm_is_an_error(tmp_path):
    SFT(toy.model()).save(tmp_path / "s.safetensors")
    with pytest.raises(ValueError, match=r"DPO.from_checkpoint: .*must contain dpo, got sft"):
        DPO.from_checkpoint(tmp_path / "s.safetensors")


def test_another_model_is_an_error(tmp_path):
    SFT(toy.model()).save(tmp_path / "s.safetensors")
    with pytest.raises(ValueError, match=r"shape \(24, 16\), as in the checkpoint, got \(24, 32\)"):
        SFT.from_checkpoint(tmp_path / "s.safetensors", model=toy.model(hidden=32))
    with pytest.raises(ValueError, match="must have the weights of the checkpoint, got others"):
        SFT.from_checkpoint(tmp_path / "s.safetensors", model=toy.model("gpt2"))


def test_custom_modules_and_models_of_adapters_must_be_passed(tmp_path):
    SFT(toy.model("bare")).save(tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match=r"a module of your own; pass model=Recurrent\(...\)"):
        SFT.from_checkpoint(tmp_path / "b.safetensors")
    again = SFT.from_checkpoint(tmp_path / "b.safetensors", model=toy.model("bare", seed=5))
    assert torch.equal(again.optimizer.flat, torch.cat([p.reshape(-1) for p in toy.model("bare").parameters()]))
    SFT(toy.model(), lora_rank=2).save(tmp_path / "l.safetensors")
    with pytest.raises(ValueError, match="contains only adapters, and their model None is not here; pass model=…"):
        SFT.from_checkpoint(tmp_path / "l.safetensors")


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_alone_is_enough_to_generate_and_contains_no_pickle(kind, tmp_path, monkeypatch):
    cls, data, functions = KINDS[kind]
    algorithm = cls(toy.model(), tokenizer=toy.tokenizer(), **{**data, **functions, "learning_rate": 1e-2})
    algorithm.train(2)
    algorithm.save(tmp_path / "c.safetensors")

    def run(algorithm):
        if kind == "reward_model":
            return algorithm.score_batch(["1+2=", "3"], ["03", "9"]).tolist()
        return algorithm.generate(["1+2=", "3"], n=2, max_new_tokens=5)

    expected = run(algorithm)
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, None)
    again = cls.from_checkpoint(tmp_path / "c.safetensors")
    assert run(again) == expected
    assert again.model.tokenizer.eos_token == "<eos>"
    assert again.model.config.hidden_size == 16


def test_a_checkpoint_holds_all_settings_of_model_and_tokenizer(tmp_path):
    templates = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=toy.tokenizer().backend_tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left",
        clean_up_tokenization_spaces=True, model_max_length=77, extra_special_tokens=["<a>"],
    )  # fmt: skip
    tokenizer.chat_template = templates
    module = toy.model()
    module.set_attn_implementation("eager")
    module.generation_config = GenerationConfig(eos_token_id=[1, 5], temperature=0.6, do_sample=True)
    SFT(module, tokenizer=tokenizer).save(tmp_path / "c.safetensors")
    again = SFT.from_checkpoint(tmp_path / "c.safetensors").model
    assert again.attention == "eager"
    kept = again.module.generation_config
    assert (kept.eos_token_id, kept.temperature, kept.do_sample) == ([1, 5], 0.6, True)
    found = again.tokenizer
    assert found.get_vocab() == tokenizer.get_vocab()
    assert found.chat_template == templates
    assert found.clean_up_tokenization_spaces
    assert (found.model_max_length, found.padding_side) == (77, "left")
    assert "<a>" in found.all_special_tokens


@pytest.mark.parametrize("name", ["../outside.json", "/tmp/outside.json", "a/b/c.json", "..", "a/../../b"])
def test_a_tokenizers_file_that_leads_out_of_its_folder_is_an_error(name, tmp_path):
    SFT(toy.model(), tokenizer=toy.tokenizer()).save(tmp_path / "c.safetensors")
    checkpoint = load_checkpoint(tmp_path / "c.safetensors")
    tensors = {section: dict(part) for section, part in checkpoint.tensors.items()}
    tensors["tokenizer"][name] = np.zeros(3, np.uint8)
    header = {key: value for key, value in checkpoint.header.items() if key != "sections"}
    save_checkpoint(tmp_path / "d.safetensors", Checkpoint(header, tensors))
    with pytest.raises(ValueError, match=r"the tokenizer is damaged: .* is no name of its files"):
        SFT.from_checkpoint(tmp_path / "d.safetensors")


def test_a_damaged_tokenizer_is_an_error(tmp_path):
    SFT(toy.model(), tokenizer=toy.tokenizer()).save(tmp_path / "c.safetensors")
    checkpoint = load_checkpoint(tmp_path / "c.safetensors")
    tensors = {section: dict(part) for section, part in checkpoint.tensors.items()}
    tensors["tokenizer"]["tokenizer.json"] = np.frombuffer(b'{"version": 3', np.uint8)
    save_checkpoint(tmp_path / "d.safetensors", Checkpoint(checkpoint.header, tensors))
    with pytest.raises(ValueError, match=r"the tokenizer is damaged: .*pass tokenizer=…"):
        SFT.from_checkpoint(tmp_path / "d.safetensors")
    assert SFT.from_checkpoint(tmp_path / "d.safetensors", tokenizer=toy.tokenizer()).model.tokenizer is not None


def test_a_checkpoint_is_a_safetensors_file_with_a_header_of_json(tmp_path):
    SFT(toy.model(), tokenizer=toy.tokenizer()).save(tmp_path / "c.safetensors")
    data = (tmp_path / "c.safetensors").read_bytes()
    (n,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + n])
    kinds = {entry["dtype"] for name, entry in header.items() if name != "__metadata__"}
    assert kinds <= {"F32", "F64", "I64", "U8"}
    assert b'"hidden_size"' in data[: 8 + n].replace(b'\\"', b'"')


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
@pytest.mark.parametrize("lora", [None, 2])
@pytest.mark.parametrize("tied", [False, True])
def test_models_saved_for_transformers_give_the_same_logits(kind, lora, tied, tmp_path):
    algorithm = SFT(
        toy.model(kind, scale=1.0, tied=tied), tokenizer=toy.tokenizer(), dataset=toy.ROWS, lora_rank=lora,
        learning_rate=1e-2,
    )  # fmt: skip
    algorithm.train(3)
    before = algorithm.optimizer.flat.clone()
    algorithm.save_pretrained(tmp_path / "m")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval()
    ids = torch.tensor([[2, 3, 4, 5, 6]])
    with torch.no_grad():
        ours, found = algorithm.policy(ids).logits, theirs(ids).logits
    assert (ours - found).abs().max() < (1e-5 if lora else 1e-7)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    assert tokenizer("1+2=")["input_ids"] == toy.tokenizer()("1+2=")["input_ids"]
    # Training continues with unchanged adapters.
    assert torch.equal(before, algorithm.optimizer.flat)
    algorithm.train(1)
    assert not torch.equal(before, algorithm.optimizer.flat)


def test_adapters_load_their_model_from_its_folder(tmp_path):
    toy.model().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    algorithm = SFT(
        base, tokenizer=toy.tokenizer(), dataset=toy.ROWS, lora_rank=2, learning_rate=1e-1,
        source=str(tmp_path / "base"),
    )  # fmt: skip
    algorithm.train(2)
    algorithm.save(tmp_path / "l.safetensors")
    again = SFT.from_checkpoint(tmp_path / "l.safetensors")
    output = algorithm.generate(["1+2="], n=4, max_new_tokens=5)
    assert again.generate(["1+2="], n=4, max_new_tokens=5) == output
    again.save_pretrained(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    sequences = Sequences([[2, 3]], [[4, 5, 6]])
    assert (SFT(merged).log_probs(sequences) - algorithm.log_probs(sequences)).abs().max() < 1e-5


def test_adapters_of_a_downloaded_model_find_it_in_the_cache(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = tmp_path / "hub" / "models--someone--toy"
    toy.model().save_pretrained(folder / "snapshots" / ("0" * 40))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)
    base = AutoModelForCausalLM.from_pretrained(folder / "snapshots" / ("0" * 40))
    algorithm = SFT(base, tokenizer=toy.tokenizer(), dataset=toy.ROWS, lora_rank=2, source="someone/toy")
    algorithm.train(1)
    algorithm.save(tmp_path / "l.safetensors")
    assert SFT.from_checkpoint(tmp_path / "l.safetensors").source == "someone/toy"
    assert load_model(str(tmp_path / "l.safetensors")).module is not None
    (folder / "refs" / "main").unlink()
    with pytest.raises(
        ValueError, match=r"their model 'someone/toy' is not here; download it first, or .* init_from=…"
    ):
        load_model(str(tmp_path / "l.safetensors"))


def test_adapters_of_a_peft_model_of_ones_own_are_no_model_to_start_from(tmp_path):
    SFT(toy.trained_peft(True), tokenizer=toy.tokenizer()).save(tmp_path / "p.safetensors")
    with pytest.raises(ValueError, match=r"those of a peft model of your own; load it with from_checkpoint"):
        load_model(str(tmp_path / "p.safetensors"))


def test_adapters_resume_only_with_the_model_they_were_trained_on(tmp_path):
    (tmp_path / "base").mkdir()
    toy.model(scale=1.0).save_pretrained(tmp_path / "base")
    file = tmp_path / "l.safetensors"
    first = SFT(toy.model(scale=1.0), source=str(tmp_path / "base"), lora_rank=2)
    first.save(file)
    for cast in (torch.float32, torch.bfloat16):  # another dtype is still the same model
        SFT.from_checkpoint(file, model=toy.model(scale=1.0).to(cast))
    load_model(str(file))
    other = toy.model(scale=1.0)
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[3, 5] += 0.01
    other.save_pretrained(tmp_path / "base")
    output = r"model must be the one that the adapters of .*l.safetensors were trained on, got one with other weights"
    with pytest.raises(ValueError, match=f"^SFT.from_checkpoint: {output}"):
        SFT.from_checkpoint(file)
    with pytest.raises(ValueError, match=f"^load_model: {output}"):
        load_model(str(file))
    SFT(other, lora_rank=2).init_from(file)  # the remedy of the message
    earlier = load_checkpoint(file)
    assert earlier.header["model"].pop("base")  # as in files of versions that did not store it
    save_checkpoint(file, earlier)
    SFT.from_checkpoint(file)


def test_weights_alone_start_another_training(tmp_path):
    first = SFT(toy.model(), tokenizer=toy.tokenizer(), dataset=toy.ROWS, learning_rate=1e-2)
    first.train(3)
    first.save(tmp_path / "s.safetensors")
    second = SFT(toy.model(seed=4), tokenizer=toy.tokenizer(), dataset=toy.ROWS[::-1])
    second.init_from(tmp_path / "s.safetensors")
    assert torch.equal(first.optimizer.flat, second.optimizer.flat)
    assert second.counters.updates == 0


def test_sampling_and_evaluation_do_not_change_training(tmp_path):
    """Completions, scores and evaluations between updates do not change the training."""
    found = []
    for looks in (False, True):
        algorithm = GRPO(
            toy.model(), reward_fn=lengths, tokenizer=toy.tokenizer(), batch_size=4, learning_rate=1e-2, **SAMPLED
        )
        for _ in range(3):
            algorithm.train(1)
            if looks:
                algorithm.generate(["1+2="], n=3)
                algorithm.scored(5)
                algorithm.evaluate(n_samples=2)
                algorithm.save(tmp_path / "x.safetensors")
        found.append((algorithm.optimizer.flat.clone(), np.array(algorithm.counters.recent_returns)))
    assert torch.equal(found[0][0], found[1][0])
    assert np.array_equal(found[0][1], found[1][1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_reproduces_training_and_another_seed_differs(kind):
    cls, data, functions = KINDS[kind]
    found = []
    for seed in (1, 1, 2):
        settings = {**SCHEDULED, **data, "batch_size": 5, "seed": seed}
        algorithm = cls(toy.model(), tokenizer=toy.tokenizer(), **functions, **settings)
        torch.manual_seed(len(found))  # must have no effect
        algorithm.train(2)
        found.append(algorithm.optimizer.flat.clone())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.slow
def test_a_model_folder_without_a_tokenizer_has_none(tmp_path):
    """transformers would make one of the class's special tokens, which encodes every text as nothing."""
    toy.model().save_pretrained(tmp_path / "base")
    assert load_model(str(tmp_path / "base")).tokenizer is None
    with pytest.raises(ValueError, match=r"tokenizer=.*base (must have a vocabulary|cannot be loaded)"):
        load_tokenizer(str(tmp_path / "base"))
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ValueError, match="gpt2 must have a vocabulary, but there is none; name the tokenizer"):
        load_tokenizer(str(tmp_path / "gpt2"))
    toy.tokenizer().save_pretrained(tmp_path / "base")
    assert load_model(str(tmp_path / "base")).tokenizer.encode("a") == toy.tokenizer().encode("a")


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["missing", "other shape", "no file"])
def test_a_damaged_model_folder_is_an_error(damage, tmp_path):
    """transformers would set missing weights to random numbers, which no seed of ours determines."""
    toy.model().save_pretrained(tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    tensors = load_file(file)
    name = min(name for name in tensors if "up_proj" in name)
    if damage == "missing":
        del tensors[name]
    else:
        tensors[name] = torch.zeros(3)
    save_file(tensors, file, metadata={"format": "pt"})
    if damage == "no file":
        file.write_text("xx")
    reason = f"must contain all weights of its config.json, but {name} is missing"
    with pytest.raises(ValueError, match=reason if damage == "missing" else "cannot be loaded: "):
        load_model(str(tmp_path / "base"))


@pytest.mark.slow
def test_adapters_resume_on_weights_of_the_type_that_they_were_trained_on(tmp_path):
    toy.model().save_pretrained(tmp_path / "base")
    source = str(tmp_path / "base")
    settings = {"tokenizer": toy.tokenizer(), "lora_rank": 2, "dataset": toy.ROWS, "batch_size": 3, "seed": 0}
    runs = [SFT(load_model(source, dtype=torch.bfloat16).module, source=source, **settings) for _ in range(2)]
    runs[0].train(4)
    runs[1].train(2)
    runs[1].save(tmp_path / "half.safetensors")
    half = SFT.from_checkpoint(tmp_path / "half.safetensors", dataset=toy.ROWS)
    assert half.model.base.dtype == torch.bfloat16
    half.train(2)
    assert torch.equal(half.optimizer.flat, runs[0].optimizer.flat)
