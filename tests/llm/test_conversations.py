"""Completions of several turns, with an environment that answers."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import servers
import torch
import toy
from test_command_line import done
from toy import EOS, tokenizer

from rlox.algorithms import GRPO, SFT
from rlox.llm import toy as shipped
from rlox.llm.backends import create_backend
from rlox.llm.conversations import converse
from rlox.llm.models.language import LanguageModel
from rlox.llm.sampling import Completions, Settings
from rlox_cli.families.language import _samples

CHAT = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)
GRID = {"environment": shipped.TextGridWorld, "max_turns": 6, "max_new_tokens": 1, "kl_coef": 0.0}


class Echo:
    """Repeats the turns of the model, three times."""

    def reset(self, prompt):
        self.heard = []
        return "+"

    def step(self, text):
        self.heard.append(text)
        return f"{text}=", 0.5, len(self.heard) == 3


def scripted(words):
    """A sampler that writes `words`, one for each conversation and turn; a final "." is an EOS."""
    turn = iter(words)

    def encoded(word):
        ids = tokenizer()(word.rstrip("."), add_special_tokens=False)["input_ids"]
        return np.array(ids + [EOS] * word.endswith("."))

    def draw(contexts, keys, step, settings):
        drawn.append(([c.copy() for c in contexts], keys, step))
        ids = [encoded(word) for word in next(turn)]
        return Completions(ids, [np.full(len(i), -1.0, np.float32) for i in ids], np.ones(len(ids), bool))

    drawn = []
    return draw, drawn


def talk(environment, words, prompts=("1=",), n=1, chat=False, turns=9):
    tok = tokenizer()
    model = LanguageModel(shipped.make_model()[0], tok)
    ids = [np.array(tok(p, add_special_tokens=False)["input_ids"]) for p in prompts]
    texts = [[{"role": "user", "content": p}] for p in prompts] if chat else prompts
    draw, drawn = scripted(words)
    rows = list(range(len(prompts)))
    return converse(model, ids, texts, rows, n, 7, Settings(4), turns, environment, draw), drawn


def test_sampled_tokens_are_kept_and_answers_are_appended():
    found, drawn = talk(Echo, [["2"], ["34"], ["5"]])
    assert tokenizer().decode(found.ids[0]) == "+22=3434=5"
    assert found.written[0].tolist() == [False, True, False, False, True, True, False, False, False, True]
    assert len(found.log_probs[0]) == found.written[0].sum() == 4
    assert (found.rewards[0], found.ended[0], found.turns[0]) == (1.5, True, 3)
    contexts = [tokenizer().decode(c) for (c,), _, _ in drawn]
    assert contexts == ["1=+", "1=+22=", "1=+22=3434="]
    # Every turn, sample and prompt has its own random numbers.
    assert len({(key, step) for _, keys, step in drawn for key in keys}) == 3


def test_conversations_that_ended_are_not_continued():
    class Short(Echo):
        def step(self, text):
            return "", 1.0, text == "9"

    found, drawn = talk(Short, [["9", "1", "2", "9"], ["3", "9"], ["9"]], ["1=", "2="], n=2)
    assert [len(keys) for _, keys, _ in drawn] == [4, 2, 1]
    assert found.turns.tolist() == [1, 3, 2, 1]
    assert found.rewards.tolist() == [1.0, 3.0, 2.0, 1.0]
    assert len({key for key in drawn[0][1]}) == 4


def test_the_limits_of_turns_and_context_end_a_conversation():
    class Endless(Echo):
        def step(self, text):
            return "1" * 20, 0.0, False

    found, _ = talk(Endless, [["2"]] * 9, turns=2)
    assert (found.turns[0], found.ended[0]) == (2, False)
    # With a context of 64 tokens, the space after two answers is too small for a third.
    found, drawn = talk(Endless, [["2"]] * 9)
    assert found.turns[0] == len(drawn) == 3
    assert not found.ended[0]
    # The model has no positions beyond its context, so tokens that do not fit are dropped.
    assert len("1=") + len(found.ids[0]) == 64


def chat(environment, words, **more):
    """As `talk`, with conversations and their template."""
    tok = tokenizer()
    kept, tok.chat_template = tok.chat_template, CHAT
    try:
        return talk(environment, words, chat=True, **more)
    finally:
        tok.chat_template = kept


def tokens_of(ids):
    return tokenizer().convert_ids_to_tokens(ids.tolist())


def test_a_chat_template_formats_the_answers():
    found, _ = chat(Echo, [["2."], ["3."], ["4."]])
    # "u" is not in this vocabulary, so padding replaces it; "a" starts the model's turn.
    assert tokens_of(found.ids[0]) == [
        *("2", "<eos>", "<pad>", "2", "=", "a", "3", "<eos>", "<pad>", "3", "=", "a", "4", "<eos>"),
    ]
    assert found.written[0].sum() == 6


def test_a_turn_of_a_chat_that_was_cut_off_gets_its_end():
    found, _ = chat(Echo, [["2."], ["3"], ["4"]])
    assert tokens_of(found.ids[0]) == [
        *("2", "<eos>", "<pad>", "2", "=", "a", "3", "<eos>", "<pad>", "3", "=", "a", "4"),
    ]
    assert found.written[0].nonzero()[0].tolist() == [0, 1, 6, 12]  # the end is read, not learned


def test_the_first_text_of_an_environment_belongs_to_the_users_message():
    found, drawn = chat(Echo, [["2.", "3."]] * 3, n=2)
    (contexts, _, _), *_ = drawn
    assert [tokens_of(ids) for ids in contexts] == [["<pad>", "1", "=", "+", "a"]] * 2
    assert [ids.tolist() for ids in found.prompts] == [ids.tolist() for ids in contexts]
    found, _ = talk(Echo, [["2."]] * 3)  # a text follows the prompt, and is not part of it
    assert tokens_of(found.prompts[0]) == ["1", "="]
    assert tokens_of(found.ids[0])[:2] == ["+", "2"]


@pytest.mark.parametrize(
    ("step", "error", "message"),
    [
        (lambda self, text: "text", TypeError, "step must return \\(text, reward, done\\), got 'text'"),
        (lambda self, text: ("", float("nan"), False), ValueError, "reward must be a finite number, got nan"),
        (lambda self, text: ("", True, False), ValueError, "reward must be a finite number, got True"),
        (lambda self, text: 1 / 0, ZeroDivisionError, "division by zero"),
    ],
)
def test_wrong_answers_of_an_environment_are_errors(step, error, message):
    with pytest.raises(error, match=message):
        talk(type("Wrong", (Echo,), {"step": step}), [["2"]])


def grid(**more):
    torch.manual_seed(0)
    model, tok = shipped.make_model(0)
    settings = {**GRID, "group_size": 4, "batch_size": 4, "learning_rate": 1e-3, "seed": 3, **more}
    return GRPO(model, tokenizer=tok, dataset=shipped.grid_rows(), **settings)


def test_only_tokens_of_the_model_are_learned():
    algorithm = grid(learning_rate=1e-9, max_new_tokens=2)
    batch = algorithm.sample()
    assert batch.sequences.n_scored.sum() == len(batch.sampler_log_probs)
    # A pass over each complete conversation gives the same numbers.
    found = algorithm.log_probs(batch.sequences)
    np.testing.assert_allclose(found.numpy(), batch.sampler_log_probs, atol=2e-6)
    assert all(len(ids) > n for ids, n in zip(batch.ids, batch.sequences.n_scored, strict=True) if n > 2)


class Once:
    """Begins with as many characters as the prompt says, and ends after a turn."""

    def reset(self, prompt):
        return "+" * int(prompt[:-1])

    def step(self, text):
        return "", 1.0, True


def turns_of(openings, **more):
    """The turns that are sampled after openings of these lengths, two for each. No token ends them, so they have eight
    tokens or end with the context of 64."""
    settings = {"environment": Once, "max_new_tokens": 8, "eos_token_id": 999, "kl_coef": 0.0, **more}
    rows = [{"prompt": f"{n}="} for n in openings]
    algorithm = GRPO(shipped.make_model(0)[0], tokenizer=tokenizer(), dataset=rows, group_size=2, **settings)
    ids = algorithm.sampled(len(rows), 2, 5).ids
    return [found[openings[i // 2] :].tolist() for i, found in enumerate(ids)]


def test_a_conversation_near_the_end_of_the_context_does_not_shorten_the_others():
    alone = turns_of([10, 11, 12])
    found = turns_of([10, 11, 12, 57, 59])
    assert [len(ids) for ids in found] == [8, 8, 8, 8, 8, 8, 4, 4, 2, 2]
    assert found[:6] == alone
    middle = turns_of([57, 11, 59, 12])
    assert [len(ids) for ids in middle] == [4, 4, 8, 8, 2, 2, 8, 8]
    assert len({tuple(ids) for ids in middle}) == 8


def test_a_long_prompt_does_not_shorten_the_completions_of_others():
    found = []
    for middle in ("1" * 61, "3="):
        rows = [{"prompt": prompt, "completion": "1"} for prompt in ("1=", middle, "2=")]
        sft = SFT(shipped.make_model(0)[0], tokenizer=tokenizer(), dataset=rows, eos_token_id=999)
        generated = [texts[0] for texts in sft.generate([row["prompt"] for row in rows])]
        found += [generated, [text for _, text, _ in sft.examples(3)]]
    for texts, others in zip(found[:2], found[2:], strict=True):
        assert [texts[0], texts[2]] == [others[0], others[2]]
        assert len(texts[1]) <= 3 < min(len(texts[0]), len(texts[2]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_samples_conversations_up_to_its_own_context(kind):
    fakes = {"vllm": servers.VLLM, "sglang": servers.SGLang}
    with fakes[kind](shipped.make_model(0)[0], context=12) as fake:
        algorithm = grid(group_size=2, sampler=create_backend(kind, url=fake.url))
        # A prompt of three tokens; then a token and an answer of three in each turn.
        assert algorithm.scored(4).returns.tolist() == grid(max_turns=3).scored(4).returns.tolist()
        assert algorithm.train(2)["sampler_gap"] < 1e-5
        assert fake.n_loads == 2
        batch = algorithm.sample()
        assert max(len(ids) + 3 for ids in batch.ids) == 12
        np.testing.assert_allclose(algorithm.log_probs(batch.sequences).numpy(), batch.sampler_log_probs, atol=2e-6)
        assert sum(path == "/v1/models" for _, path, _ in fake.seen) == 1  # requested once, whatever the length


def test_a_run_resumes_bit_for_bit(tmp_path):
    whole, cut = grid(), grid()
    whole.train(4)
    cut.plan(4)
    cut.train(2)
    cut.save(tmp_path / "a.safetensors")
    again = GRPO.from_checkpoint(
        tmp_path / "a.safetensors", dataset=shipped.grid_rows(), environment=shipped.TextGridWorld
    )
    again.train(2)
    for a, b in zip(whole.policy.parameters(), again.policy.parameters(), strict=True):
        assert torch.equal(a, b)


def test_rewards_read_a_chat_with_the_first_text_of_its_environment():
    tok, seen = tokenizer(), []
    kept, tok.chat_template = tok.chat_template, CHAT

    def reward(prompts, completions):
        seen.extend(prompts)
        return [0.0] * len(prompts)

    def by_ids(completions, prompts):
        seen.extend(prompts.tolist())
        return [0.0] * len(completions)

    begun = [{"role": "user", "content": "1="}, {"role": "assistant", "content": "2"}]
    try:
        rows = [{"prompt": begun[:1]}, {"prompt": begun}]
        settings = {"group_size": 2, "max_new_tokens": 2, "tokenizer": tok, "dataset": rows}
        algorithm = GRPO(toy.model(), reward_fn=[reward, by_ids], environment=Echo, **settings)
        batch = algorithm.batch(algorithm.rows, np.arange(2))
    finally:
        tok.chat_template = kept
    opened, followed = [{"role": "user", "content": "1=+"}], [*begun, {"role": "user", "content": "+"}]
    assert seen[:4] == [opened, opened, followed, followed]
    read, lengths = batch.sequences.padded_rows()[0], batch.sequences.prompt_lengths
    for own, ids, n in zip(seen[4:], read, lengths, strict=True):
        assert own[-n:] == ids[:n].tolist()


@pytest.mark.parametrize("ends", [False, True])
def test_the_check_of_a_run_knows_which_conversations_ended(ends):
    class Counts:
        def reset(self, prompt):
            self.turns = 0
            return ""

        def step(self, text):
            self.turns += 1
            return "1", float(len(text)), ends and self.turns == 2

    algorithm = grid(environment=Counts, max_turns=3)
    _, warnings = _samples(algorithm, SimpleNamespace(algo=algorithm.config, seed=0))
    cut = [text for text in warnings if "cut off" in text]
    expected = "every conversation is cut off, at max_turns=3 or where its context is full; none has ended"
    assert cut == ([] if ends else [expected])


def test_with_an_environment_a_reward_function_need_not_apply():
    algorithm = grid(reward_fn=lambda prompts, completions: [None, *[1.0] * (len(completions) - 1)])
    plain = grid()
    mine, theirs = algorithm.sample().rewards, plain.sample().rewards
    assert mine[0] == theirs[0]
    assert (mine[1:] == theirs[1:] + 1.0).all()


@pytest.mark.slow
def test_it_finds_the_way_through_a_grid():
    algorithm = grid(batch_size=8, group_size=8)
    before = algorithm.scored(8).returns.mean()
    algorithm.train(60)
    after = algorithm.scored(8).returns.mean()
    assert before < 0.5
    assert after > 0.7


@pytest.mark.slow
def test_the_command_line_names_the_environment(command):
    words = [
        *("model=rlox.llm.toy:make_model", "dataset=rlox.llm.toy:grid_rows", "total_timesteps=2", "logger=none"),
        *("conversation=rlox.llm.toy:TextGridWorld", "eval.n_points=1", "eval.n_episodes=2", "algo.batch_size=2"),
    ]
    few = ["algo.max_new_tokens=1", "algo.max_turns=3", "algo.kl_coef=0", "hydra.run.dir=run"]
    with servers.VLLM(shipped.make_model()[0]) as fake:
        sampled = ["sampler=vllm", f"sampler_url={fake.url}"]
        assert "grpo grid_rows seed 0: 2 updates" in done(command, "train", "algo=grpo", *words, *few, *sampled)
        assert fake.n_loads == 3  # two updates, and the evaluation at the end
    _, out, _ = command("eval", "run", "--json")
    assert json.loads(out)["n_episodes"] == 2
    code, _, err = command("train", "algo=online_dpo", *words)
    assert code
    assert "conversation must be null with algo=online_dpo" in err
