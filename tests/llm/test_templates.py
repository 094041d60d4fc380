"""Where a completion begins: tokenizers that put a space before every text, unfinished messages, and what templates
read."""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from toy import model
from transformers import PreTrainedTokenizerFast

from rlox.algorithms import DPO, GRPO, SFT, OnlineDPO, RewardModel
from rlox.llm import EnsembleRewardModel, MultiObjectiveReward, RemoteReward, RewardModelServer
from rlox.llm.data import encode, encode_answers, inner_ids, pair_rows, read_rows, text_rows
from rlox.llm.encoded import encode_dataset
from rlox.llm.models.language import LanguageModel

MERGES = [("y", "e"), ("ye", "s"), ("▁", "yes"), ("n", "o"), ("▁", "no"), ("a", "b"), ("c", "d"), ("b", "c")]
SYMBOLS = [*"▁\n:.=@|<>/_?[]{}\"',-+0123456789", *"abcdefghijklmnopqrstuvwxyz", *"AINSTU"]
CHATML = (
    "{% for m in messages %}@{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}@assistant\n{% endif %}"
)
# Writes tools and calls, strips messages, and may write a thought before an answer.
FULL = (
    "{% if tools %}@tools\n{{ tools | tojson }}</s>\n{% endif %}"
    "{% for m in messages %}@{{ m.role }}\n{{ (m.content or '') | trim }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}@assistant\n{% if thinking is defined and not thinking %}-\n{% endif %}{% endif %}"
)
USER = {"role": "user", "content": "hi"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}


def said(text):
    return {"role": "assistant", "content": text}


def llama(kind="prepend", template=CHATML, bos=True):
    """A tokenizer of Llama 2's kind, whose spaces are "▁", with one before every text."""
    pairs = [a + b for a, b in MERGES]
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *SYMBOLS, *pairs])}
    made = Tokenizer(models.BPE(vocabulary, MERGES, unk_token="<pad>"))
    if kind == "prepend":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        made.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)],
        )
    elif kind == "plain":  # the same, without a space before a text
        made.normalizer = normalizers.Replace(" ", "▁")
        made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind)
        made.decoder = decoders.Metaspace(prepend_scheme=kind)
    if bos:
        made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>", bos_token="<s>")
    wrapped.chat_template = template
    return wrapped


KINDS = ["prepend", "first", "always"]
tokens = PreTrainedTokenizerFast.convert_ids_to_tokens


def network(tok):
    return model("bare", vocabulary=len(tok))


# --- texts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*KINDS, "plain"])
@pytest.mark.parametrize(
    ("prompt", "completion", "head", "rest"),
    [
        ("a:", " yes", [":"], ["▁yes", "</s>"]),  # no second space
        ("a:", "yes", [":"], ["yes", "</s>"]),  # no space at all
        ("a: ", "yes", [":"], ["▁yes", "</s>"]),  # the token of both belongs to the completion
        ("ya", "bc", ["y"], ["ab", "c", "</s>"]),
        ("a:", "", [":"], ["</s>"]),
    ],
)
def test_prompt_and_completion_are_tokenised_as_one_text(kind, prompt, completion, head, rest):
    tok = llama(kind)
    start, answer = encode(tok, prompt, completion)
    assert tokens(tok, answer) == rest
    assert tokens(tok, start)[-1].lstrip("▁") == head[-1]
    assert start[0] == tok.bos_token_id
    assert [*start, *answer] == [*tok(prompt + completion)["input_ids"], tok.eos_token_id]
    assert encode(tok, prompt, completion, ended=False)[1] == answer[:-1]


def test_one_token_for_prompt_and_completion_is_not_used():
    tok = llama("plain", bos=False)
    assert tok("ab")["input_ids"] == tok.convert_tokens_to_ids(["ab"])  # the premise
    start, answer = encode(tok, "a", "b")
    assert (tokens(tok, start), tokens(tok, answer)) == (["a"], ["b", "</s>"])


@pytest.mark.parametrize("kind", KINDS)
def test_both_answers_of_a_pair_follow_the_same_prompt(kind):
    tok = llama(kind)
    start, (chosen, rejected) = encode_answers(tok, "n: ", ["yes", ":"])
    # The prompt ends before the token of its space and "yes".
    assert tokens(tok, start)[-1] == ":"
    assert (tokens(tok, chosen), tokens(tok, rejected)) == (["▁yes", "</s>"], ["▁", ":", "</s>"])


@pytest.mark.parametrize("kind", [*KINDS, "plain"])
def test_a_text_in_the_middle_has_no_space_before_it(kind):
    tok = llama(kind)
    for text in ("yes", " yes", "\nno", "<s>", ""):
        assert tokens(tok, inner_ids(tok, text)) == {
            "yes": ["yes"], " yes": ["▁yes"], "\nno": ["\n", "no"], "<s>": ["<s>"], "": []
        }[text]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_sft_dpo_and_reward_models_learn_no_second_space(kind):
    tok = llama(kind)
    row = {"prompt": "a:", "completion": " yes", "chosen": " yes", "rejected": " no"}
    asked = {"tokenizer": tok, "dataset": [row] * 2, "batch_size": 1}
    sft, dpo, rewards = SFT(network(tok), **asked), DPO(network(tok), **asked), RewardModel(network(tok), **asked)
    assert tokens(tok, sft.rows.completions[0].tolist()) == ["▁yes", "</s>"]
    for one in (dpo, rewards):
        assert tokens(tok, one.rows.chosen[0].tolist()) == ["▁yes", "</s>"]
        assert tokens(tok, one.rows.rejected[0].tolist()) == ["▁no", "</s>"]


class Reads(torch.nn.Module):
    """Records the rows that it scores."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def forward(self, input_ids):
        self.rows += input_ids.tolist()
        return input_ids.sum(1).float()


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_completions_keep_the_space_before_them(kind):
    tok = llama(kind)
    ids = np.array([*tok.convert_tokens_to_ids(["▁yes", "▁no"]), tok.eos_token_id])
    assert tok.decode(ids, skip_special_tokens=True) == "yes no"  # the premise
    language = LanguageModel(network(tok), tok)
    prompt = encode(tok, "a:")[0]
    assert language.decode(ids, prompt) == " yes no"
    assert language.decode(ids) == "yes no"
    scorer = Reads()
    RewardModelServer(scorer, tokenizer=tok).score_batch(["a:"], [language.decode(ids, prompt)])
    assert scorer.rows == [[*prompt, *ids]]


def always(tok, *wanted):
    """A model that always writes `wanted`, one token after the other, from the length of the prompt on."""

    class Writes(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = torch.nn.Parameter(torch.zeros(()))

        def forward(self, ids):
            logits = torch.full((*ids.shape, len(tok)), -30.0) + self.bias
            logits[..., tok.convert_tokens_to_ids(wanted[0])] = 30.0
            for before, after in pairwise(wanted):
                at = ids == tok.convert_tokens_to_ids(before)
                logits[at] = -30.0
                logits[..., tok.convert_tokens_to_ids(after)][at] = 30.0
            return logits

    return Writes()


@pytest.mark.parametrize("algorithm", ["grpo", "online_dpo"])
def test_rewards_and_generate_get_completions_that_continue_the_prompt(algorithm):
    tok, heard = llama(), []

    def reward(prompts, completions):
        heard.extend(zip(prompts, completions, strict=True))
        return [0.0] * len(prompts)

    chat = [USER, said("so:")]
    made = {"grpo": GRPO, "online_dpo": OnlineDPO}[algorithm](
        always(tok, "▁yes", "</s>"), reward_fn=reward, tokenizer=tok, dataset=[{"prompt": "a:"}, {"prompt": chat}],
        batch_size=2, max_new_tokens=2, **({"group_size": 2} if algorithm == "grpo" else {}),
    )  # fmt: skip
    assert tok.decode(made.rows.prompts[1]).endswith("@assistant\nso:")
    made.train(n_updates=1)
    assert {text for _, text in heard} == {" yes"}
    assert made.generate(["a:"], temperature=0.0, max_new_tokens=2) == [[" yes"]]
    assert made.generate([{"prompt": [USER]}], temperature=0.0, max_new_tokens=2) == [["yes"]]  # a new message
    assert made.settings(stop=["\n", "no"]).stop == tuple(tok.convert_tokens_to_ids(["\n", "no"]))


# --- unfinished messages ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [CHATML, FULL])
@pytest.mark.parametrize("kind", ["plain", *KINDS])
def test_an_unfinished_message_is_continued(kind, template):
    tok = llama(kind, template)
    prompt = [USER, said("so:")]
    own = tok.apply_chat_template(prompt, continue_final_message=True, return_dict=False)
    assert tok.decode(own).endswith("@assistant\nso:")  # the premise
    for answer in (" yes", [said(" yes")]):
        start, found = encode(tok, prompt, answer)
        assert (start, tokens(tok, found)) == (own, ["▁yes", "</s>"])
    start, found = encode(tok, prompt, [said(" yes"), USER, said("no")], add_eos=False)
    whole = [USER, said("so: yes"), USER, said("no")]
    assert start == own
    assert [*start, *found] == tok.apply_chat_template(whole, return_dict=False)
    assert encode(tok, prompt) == (own, [])


@pytest.mark.parametrize("text", ["", " ", "\n"])
@pytest.mark.parametrize("template", [CHATML, FULL])
def test_an_empty_message_is_where_the_assistant_begins(template, text):
    tok = llama("plain", template)
    assert encode(tok, [USER, said(text)])[0] == encode(tok, [USER])[0]


@pytest.mark.parametrize("text", ["end", "im", "|", "user"])
def test_words_of_the_template_in_an_unfinished_message(text):
    tok = llama("plain", CHATML.replace("</s>", "|im_end|"))
    start, answer = encode(tok, [USER, said(text)], "yes")
    assert tok.decode(start) == f"@user\nhi|im_end|\n@assistant\n{text}"
    assert tok.decode(answer) == "yes|im_end|\n</s>"


def test_every_algorithm_continues_the_message():
    tok = llama("plain")
    prompt = [USER, said("so:")]
    row = {"prompt": prompt, "completion": [said(" yes")], "chosen": [said(" yes")], "rejected": [said(" no")]}
    wanted = "@user\nhi</s>\n@assistant\nso:"
    asked = {"tokenizer": tok, "dataset": [row], "batch_size": 1}
    for cls in (SFT, DPO, RewardModel):
        made = cls(model(vocabulary=len(tok)), **asked)
        assert tok.decode(made.rows.prompts[0]) == wanted
        answers = made.rows.completions or made.rows.chosen
        assert tok.decode(answers[0]) == " yes</s>"
        made.train_step([row])


def test_finished_messages_are_not_continued():
    chat = [USER, said("a"), said("b")]
    texts = text_rows(read_rows({"messages": [chat]}))
    assert (texts.prompts[0], texts.completions[0]) == ([USER], chat[1:])
    pairs = pair_rows(read_rows({"chosen": [chat], "rejected": [[USER, said("a"), said("c")]]}))
    assert (pairs.prompts[0], pairs.chosen[0]) == ([USER], chat[1:])
    assert pairs.rejected[0] == [said("a"), said("c")]


# --- what the template reads -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("task", ["prompts", "pairs", "texts"])
def test_columns_reach_the_chat_template(task, as_json):
    tok = llama("plain", FULL)
    given = {"tools": TOOLS, "chat_template_kwargs": {"thinking": False}}
    if as_json:
        given = {name: json.dumps(value) for name, value in given.items()}
    row = {"prompt": [USER], "chosen": "yes", "rejected": "no", "completion": "yes", **given}
    plain = {**row, "tools": None, "chat_template_kwargs": None}
    rows = encode_dataset([row, plain], task, LanguageModel(network(tok), tok), "here")
    shape = tok.apply_chat_template([USER], tools=TOOLS, thinking=False, add_generation_prompt=True, tokenize=False)
    assert tok.decode(rows.prompts[0]) == shape
    assert "@tools" in shape
    assert shape.endswith("-\n")
    assert tok.decode(rows.prompts[1]) == "@user\nhi</s>\n@assistant\n"
    assert rows.columns["tools"] == [row["tools"], None]  # rewards read them, too


@pytest.mark.parametrize(
    ("template", "prompt", "given", "error", "message"),
    [
        (CHATML, [USER], {"tools": TOOLS}, ValueError, "row 3: the chat template must read tools, and does not"),
        (CHATML, [USER], {"chat_template_kwargs": {"thinking": True}}, ValueError, "must read thinking, and does not"),
        (FULL, [USER], {"chat_template_kwargs": {"tokenize": True}}, ValueError, "must not have 'tokenize'"),
        (FULL, [USER], {"chat_template_kwargs": {"tools": TOOLS}}, ValueError, "must not have 'tools'; use the column"),
        (FULL, [USER], {"chat_template_kwargs": [1]}, TypeError, "chat_template_kwargs must be a mapping"),
        (FULL, [USER], {"tools": {"a": 1}}, TypeError, "tools must be a list of JSON schemas"),
        (FULL, [USER], {"tools": "[1"}, ValueError, "tools must be JSON if it is a text"),
        (FULL, "a", {"tools": TOOLS}, ValueError, "row 3: tools must be left out if a prompt is a text"),
        (FULL, "a", {"chat_template_kwargs": {"thinking": True}}, ValueError, "chat_template_kwargs must be left out"),
        (CHATML, [USER, CALL, USER], {}, ValueError, "must read tool_calls, and does not"),
        (FULL, [USER, CALL], {}, ValueError, "last message of prompt must have text to continue, got"),
        (
            FULL,
            [USER, {"role": "assistant", "content": None}],
            {},
            ValueError,
            "message 1 of prompt must have the text",
        ),
    ],
)
def test_what_a_template_ignores_is_an_error(template, prompt, given, error, message):
    with pytest.raises(error, match=message):
        encode(llama("plain", template), prompt, "yes", row=3, **given)


@pytest.mark.parametrize("call", [CALL, {k: v for k, v in CALL.items() if k != "content"}])
def test_calls_of_tools_need_no_content(call):
    tok = llama("plain", FULL)
    start, answer = encode(tok, [USER], [call], tools=TOOLS)
    assert tok.decode(answer) == "[add]</s>"
    prompt = [USER, call, {"role": "tool", "content": "3"}]
    assert tok.decode(encode(tok, prompt)[0]).endswith("@assistant\n[add]</s>\n@tool\n3</s>\n@assistant\n")
    sft = SFT(network(tok), tokenizer=tok, dataset=[{"messages": [USER, call], "tools": TOOLS}], batch_size=1)
    assert tok.decode(sft.rows.completions[0]) == "[add]</s>"
    assert start == sft.rows.prompts[0].tolist()


def test_arrow_adds_no_keys_to_chats_and_tools(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    chats = [[USER, {"role": "assistant", "content": "a", "tool_calls": CALL["tool_calls"]}], [USER, said("b")]]
    chats[0][1] = {**chats[0][1], "tool_calls": [{"function": {"name": "add", "arguments": {"x": "1"}}}]}
    tools = [[{"name": "add", "one": "1"}], [{"name": "other"}]]
    table = pa.table({"messages": chats, "tools": tools, "answer": [{"a": 1}, {"b": 2}]})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    rows = read_rows(tmp_path / "rows.parquet")
    assert (rows.columns["messages"], rows.columns["tools"]) == (chats, tools)
    assert rows.columns["answer"] == [{"a": 1, "b": None}, {"a": None, "b": 2}]  # for rewards, as Arrow has it


def of_tools(tok, thinking=False):
    prompt = tok.apply_chat_template(
        [USER], tools=TOOLS, thinking=thinking, add_generation_prompt=True, return_dict=False
    )
    return [*prompt, *tok.convert_tokens_to_ids(["yes", "</s>"])]


@pytest.mark.parametrize("kind", ["server", "ensemble", "objectives", "remote"])
def test_reward_models_read_a_chat_with_its_tools(kind):
    tok, scorer = llama("plain", FULL), Reads()
    reward = server = RewardModelServer(scorer, tokenizer=tok)
    if kind == "ensemble":
        reward = EnsembleRewardModel([scorer, server], tokenizer=tok)
    elif kind == "objectives":
        reward = MultiObjectiveReward({"a": server})
    with server.serve() as served:
        if kind == "remote":
            reward = RemoteReward(served.url)
        row = {"prompt": [USER], "tools": TOOLS, "chat_template_kwargs": {"thinking": False}}
        grpo = GRPO(
            always(tok, "yes", "</s>"), reward_fn=reward, tokenizer=tok, dataset=[row], batch_size=1, group_size=2,
            max_new_tokens=2,
        )  # fmt: skip
        grpo.train(n_updates=1)
        if kind == "ensemble":
            columns = {name: [row[name]] for name in ("tools", "chat_template_kwargs")}
            assert reward.disagreement([[USER]], ["yes"], **columns) == [0.0]
    assert scorer.rows
    assert all(ids == of_tools(tok) for ids in scorer.rows)


def test_a_trained_reward_model_reads_a_chat_with_its_tools():
    tok = llama("plain", FULL)
    judge = RewardModel(model(vocabulary=len(tok)).requires_grad_(True), tokenizer=tok)
    judge.model.context = None
    asked = {"tools": [TOOLS, None], "chat_template_kwargs": [None, None]}
    both = judge.score_batch([[USER]] * 2, ["yes"] * 2, **asked)
    assert both[0] != both[1]
    assert both[1] == pytest.approx(judge.score_batch([[USER]], ["yes"])[0], abs=1e-5)
    judge.model.tokenizer.chat_template = CHATML
    with pytest.raises(ValueError, match="row 0: the chat template must read thinking") as info:
        judge.score_batch([[USER]], ["yes"], chat_template_kwargs=[{"thinking": True}])
    assert "RewardModel.score_batch" in str(info.value)


class Answers:
    """An environment that answers once, without and with a space."""

    def reset(self, prompt):
        self.heard = []
        return ""

    def step(self, text):
        HEARD.append(text)
        self.heard.append(text)
        return " no", 0.0, len(self.heard) == 2


HEARD = []


@pytest.mark.parametrize("prompt", ["a:", [USER], [USER, said("so:")]])
def test_an_environment_gets_and_gives_texts_that_continue(prompt):
    HEARD.clear()
    tok, chat = llama("prepend", FULL), not isinstance(prompt, str)
    row = {"prompt": prompt, **({"chat_template_kwargs": {"thinking": False}} if chat else {})}
    grpo = GRPO(
        always(tok, "▁yes", "</s>"), environment=Answers, tokenizer=tok, dataset=[row], batch_size=1, group_size=2,
        max_new_tokens=2, kl_coef=0.0,
    )  # fmt: skip
    batch = grpo.sample()
    assert HEARD[:1] == ["yes" if prompt == [USER] else " yes"]
    said_before = tok.decode(batch.ids[0])
    if chat:
        assert "@assistant\n-\n" in said_before  # the template's variable also applies to the second turn
    else:
        assert "▁no" in tokens(tok, batch.ids[0].tolist())
        assert "▁" not in tokens(tok, batch.ids[0].tolist())
