"""Rewards by models: they read the text, scores do not depend on the batch, and are the same over HTTP."""

from __future__ import annotations

import http.client
import json
import pickle
import socket
import subprocess
import sys
import textwrap
import threading
import warnings
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest
import torch
from character_tokenizer import CHATML, character_tokenizer
from torch import nn

from rlox.llm.data import encode
from rlox.llm.rewards.functions import Rewards
from rlox.llm.rewards.http import RemoteReward, RewardHTTPServer
from rlox.llm.rewards.models import EnsembleRewardModel, MultiObjectiveReward, RewardModelServer

PROMPTS = ["What is 1+1?", "Hi", "Say a lot", "", "Hi"]
COMPLETIONS = ["2", "hello there", "x" * 40, "only this", "hello theme"]

# Servers without a tokenizer warn; a test below checks this.
pytestmark = pytest.mark.filterwarnings("ignore:.*without a tokenizer:RuntimeWarning")


# --- several objectives ----------------------------------------------------------------------------------------------


def helpful(prompts, completions):
    return np.array([len(c) / 10 for c in completions])


def safe(prompts, completions):
    return [float("malware" not in c) for c in completions]


def test_objectives_are_summed_by_weight():
    """Longer is better, unless a word is blocked."""
    reward = MultiObjectiveReward(
        objectives={"helpfulness": helpful, "safety": safe}, weights={"safety": 0.4, "helpfulness": 0.6}
    )
    pair = {"prompts": ["Explain X", "Explain Y"], "completions": ["some malware", "so."]}
    found = reward.score_batch(**pair)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, [0.6 * 1.2, 0.6 * 0.3 + 0.4])
    np.testing.assert_array_equal(reward(**pair), found)
    each = reward.score_each(**pair)
    assert {name: scores.tolist() for name, scores in each.items()} == {"helpfulness": [1.2, 0.3], "safety": [0.0, 1.0]}
    assert MultiObjectiveReward({"a": helpful, "b": reward}).score_batch(["p"], ["12345"]).tolist() == [0.5 + 0.7]
    rewards = Rewards([reward])
    assert rewards.names == ["MultiObjectiveReward"]
    np.testing.assert_array_equal(rewards.scores(None, None, *pair.values()), [found])


@pytest.mark.parametrize(
    ("objectives", "weights", "error", "message"),
    [
        ({"safety": safe}, {"saftey": 1.0}, ValueError, r"got 'saftey'; did you mean 'safety'\?"),
        ({"safety": safe, "b": safe}, {"safety": 1.0}, ValueError, "weights must have the key 'b'"),
        ({"safety": safe}, {"safety": float("nan")}, ValueError, "weight 'safety' must be a finite number, got nan"),
        ({"safety": safe}, {"safety": "1"}, ValueError, "weight 'safety' must be a finite number, got '1'"),
        ({}, None, ValueError, "objectives must be a dict of at least one reward"),
        ([safe], None, ValueError, "objectives must be a dict of at least one reward"),
        ({"safety": 5}, None, TypeError, r"objective 'safety' must be a function of \(prompts, completions\).*got 5"),
    ],
)
def test_wrong_objectives_are_errors(objectives, weights, error, message):
    with pytest.raises(error, match=f"^MultiObjectiveReward: .*{message}"):
        MultiObjectiveReward(objectives, weights)


@pytest.mark.parametrize("result", [[1.0], [1.0, None], [1.0, float("nan")], np.ones((2, 1)), 1.0])
def test_an_objective_returns_one_finite_number_for_each(result):
    reward = MultiObjectiveReward({"safety": lambda prompts, completions: result})
    with pytest.raises((TypeError, ValueError), match=r"^MultiObjectiveReward: objective 'safety' must return"):
        reward.score_batch(["a", "b"], ["c", "d"])


def test_exceptions_of_an_objective_name_it():
    def broken(prompts, completions):
        raise KeyError("answer")

    with pytest.raises(KeyError, match="answer") as info:
        MultiObjectiveReward({"safety": broken}).score_batch(["a"], ["b"])
    assert info.value.__notes__ == ["rlox: MultiObjectiveReward: objective 'safety' failed"]


@pytest.mark.parametrize(
    ("prompts", "completions", "error", "message"),
    [
        (["a"], ["b", "c"], ValueError, "prompts must be as many as completions, got 1 and 2"),
        ("a", ["b"], TypeError, "prompts must be a list of texts, got 'a'"),
        (["a"], 5, TypeError, "completions must be a list of texts, got 5"),
    ],
)
def test_every_reward_takes_lists_of_equal_length(prompts, completions, error, message):
    rewards = [
        MultiObjectiveReward({"safety": safe}),
        RewardModelServer(Pooled()),
        EnsembleRewardModel([Pooled()]),
        RemoteReward("http://127.0.0.1:9"),
    ]
    for reward in rewards:
        with pytest.raises(error, match=f"^{type(reward).__name__}.*: {message}"):
            reward.score_batch(prompts, completions)


# --- models ----------------------------------------------------------------------------------------------------------


class Pooled(nn.Module):
    """The mean of embeddings, including padding, through a small network."""

    def __init__(self, vocabulary=256, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(vocabulary, 8)
        self.net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))
        self.shapes = []

    def forward(self, input_ids):
        self.shapes.append(tuple(input_ids.shape))
        assert not torch.is_grad_enabled()
        return self.net(self.embed(input_ids).mean(1)).squeeze(-1)


class Masked(Pooled):
    """The same with a mask, so that padding has no effect."""

    def forward(self, input_ids, attention_mask):
        self.shapes.append(tuple(input_ids.shape))
        mask = attention_mask[..., None]
        return self.net((self.embed(input_ids) * mask).sum(1) / mask.sum(1))  # (B, 1)


class Constant(nn.Module):
    """Always returns the given result."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def forward(self, input_ids):
        return self.found(input_ids) if callable(self.found) else self.found


# Importing a model of transformers takes several seconds.
slow = pytest.mark.slow
WIDE = {"initializer_range": 0.5}  # so that every token counts


def llama(**options):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, **WIDE}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return transformers.LlamaForSequenceClassification(
        transformers.LlamaConfig(**{**sizes, **heads, "num_labels": 1, "bos_token_id": 1, "eos_token_id": 2, **options})
    )


def gpt2(**options):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, **WIDE}
    return transformers.GPT2ForSequenceClassification(
        transformers.GPT2Config(**{**sizes, "num_labels": 1, "bos_token_id": 1, "eos_token_id": 2, **options})
    )


def bert():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, **WIDE}
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(**sizes, intermediate_size=16, num_labels=1)
    )


def ids_of(tokenizer, prompt, completion):
    head, rest = encode(tokenizer, prompt or None, completion)
    return [*head, *rest]


@pytest.mark.parametrize("batch_size", [2, 64])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(Pooled, id="bare"),
        pytest.param(Masked, id="masked"),
        pytest.param(llama, id="no pad", marks=slow),
        pytest.param(lambda: llama(pad_token_id=0), id="pad", marks=slow),
        pytest.param(lambda: llama(pad_token_id=2), id="pad is EOS", marks=slow),
        pytest.param(gpt2, id="gpt2", marks=slow),
        pytest.param(bert, id="bert", marks=slow),
    ],
)
def test_a_score_does_not_depend_on_the_batch(make, batch_size):
    model, tokenizer = make(), character_tokenizer()
    server = RewardModelServer(model, batch_size=batch_size, tokenizer=tokenizer)
    found = server.score_batch(prompts=PROMPTS, completions=COMPLETIONS)
    assert (found.shape, found.dtype) == ((5,), np.float64)
    with torch.no_grad():
        for prompt, completion, score in zip(PROMPTS, COMPLETIONS, found, strict=True):
            ids = torch.tensor([ids_of(tokenizer, prompt, completion)])
            model.eval()
            alone = model(ids, torch.ones_like(ids)) if isinstance(model, Masked) else model(ids)
            alone = getattr(alone, "logits", alone)
            assert score == pytest.approx(alone.item(), abs=1e-5)
    assert len({round(score, 6) for score in found}) == 5  # one letter more or less changes the score
    np.testing.assert_allclose(server.score_batch(PROMPTS[::-1], COMPLETIONS[::-1])[::-1], found, atol=1e-5)


@slow
def test_the_config_of_a_model_is_not_changed():
    model = llama()
    RewardModelServer(model, tokenizer=character_tokenizer()).score_batch(PROMPTS, COMPLETIONS)
    assert model.config.pad_token_id is None


def test_rows_are_padded_with_a_mask_and_grouped_by_length_without():
    prompts, completions = ["a"] * 7, ["b", "bcb", "c", "bbb", "d", "bb", "bbc"]
    bare, masked = Pooled(), Masked()
    RewardModelServer(bare, batch_size=2).score_batch(prompts, completions)
    RewardModelServer(masked, batch_size=4).score_batch(prompts, completions)
    assert bare.shapes == [(2, 2), (1, 2), (1, 3), (2, 4), (1, 4)]
    assert masked.shapes == [(4, 3), (3, 4)]


def test_without_a_tokenizer_bytes_are_read_with_one_warning():
    seen = []
    model = Constant(lambda ids: seen.append(ids.tolist()) or torch.zeros(len(ids)))
    server = RewardModelServer(model, batch_size=64)
    with pytest.warns(RuntimeWarning, match="the bytes of a text are its token ids.*pass tokenizer=") as caught:
        server.score_batch(["a"], ["é"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        server.score_batch(["a"], ["b"])
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert seen == [[[97, 0xC3, 0xA9]], [[97, 98]]]
    with pytest.warns(RuntimeWarning, match="EnsembleRewardModel: without a tokenizer") as caught:
        EnsembleRewardModel([model, model]).score_batch(["a"], ["b"])
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RewardModelServer(Pooled(), tokenizer=character_tokenizer()).score_batch(["a"], ["b"])


def test_the_last_tokens_are_scored_where_a_text_is_too_long():
    seen = []
    model = Constant(lambda ids: seen.extend(ids.tolist()) or torch.zeros(len(ids)))
    RewardModelServer(model, max_length=3).score_batch(["abc", "a"], ["de", "b"])
    assert sorted(map(bytes, seen)) == [b"ab", b"cde"]


def test_chats_are_read_by_the_template():
    seen = []
    model = Constant(lambda ids: seen.extend(ids.tolist()) or torch.zeros(len(ids)))
    tokenizer = character_tokenizer(template=CHATML)
    chat = [{"role": "user", "content": "hi"}]
    RewardModelServer(model, tokenizer=tokenizer).score_batch([chat], ["hello"])
    assert tokenizer.decode(seen[0]) == "@user\nhi</s>\n@assistant\nhello</s>"
    with pytest.raises(ValueError, match="row 0: prompt must be a text if there is no tokenizer, got"):
        RewardModelServer(model).score_batch([chat], ["hello"])


def test_a_tokenizer_without_eos_is_accepted():
    model = Pooled()
    RewardModelServer(model, tokenizer=character_tokenizer(eos=None)).score_batch(["ab"], ["c"])
    assert model.shapes == [(1, 3)]


def test_scoring_restores_the_mode_of_every_module():
    model = Pooled()
    model.train()
    model.embed.eval()
    modes = [part.training for part in model.modules()]
    server = RewardModelServer(model)
    found = [server.score_batch(["a"], ["b"]).item() for _ in range(5)]
    assert len(set(found)) == 1  # no dropout
    assert [part.training for part in model.modules()] == modes
    broken = nn.Sequential(Constant(lambda ids: 1 / 0))
    with pytest.raises(ZeroDivisionError) as info:
        RewardModelServer(broken).score_batch(["a"], ["b"])
    assert broken.training
    assert info.value.__notes__ == ["rlox: RewardModelServer: reward model Sequential failed"]


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (
            Constant(torch.tensor([0.0, torch.nan])),
            ValueError,
            r"finite numbers, got nan \(prompt 'b', completion 'd'\)",
        ),
        (Constant(torch.zeros(2, 2)), ValueError, r"one score per row, \(2,\) or .logits \(2, 1\), got \(2, 2\)"),
        (Constant(torch.zeros(())), ValueError, r"one score per row, \(2,\) or .logits \(2, 1\), got \(\)"),
        (Constant(3.0), ValueError, "one score per row, .*got float"),
    ],
)
def test_results_of_a_model_are_checked(model, error, message):
    with pytest.raises(error, match=f"^RewardModelServer: reward model Constant must return {message}"):
        RewardModelServer(model).score_batch(["a", "b"], ["c", "d"])


@slow
def test_a_classifier_of_two_labels_is_an_error_with_a_remedy():
    with pytest.raises(ValueError, match=r"got \(1, 2\); load it with num_labels=1"):
        RewardModelServer(llama(num_labels=2)).score_batch(["a"], ["b"])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"reward_model": safe}, TypeError, "reward_model must be a torch.nn.Module, got <function safe"),
        ({"batch_size": 0}, ValueError, "batch_size must be >= 1, got 0"),
        ({"max_length": 0}, ValueError, "max_length must be >= 1, got 0"),
    ],
)
def test_wrong_arguments_of_a_server_are_errors(options, error, message):
    with pytest.raises(error, match=f"RewardModelServer: {message}"):
        RewardModelServer(**{"reward_model": Pooled(), **options})


def test_empty_texts_are_an_error_and_no_rows_give_no_scores():
    server = RewardModelServer(Pooled())
    with pytest.raises(ValueError, match="row 1: prompt and completion must not both be empty"):
        server.score_batch(["a", ""], ["", ""])
    assert server.score_batch([], []).shape == (0,)


def test_a_model_trained_on_pairs_prefers_the_chosen_texts():
    """Bradley and Terry's loss on pairs, then a server with that model."""
    tokenizer, model = character_tokenizer(), Pooled(128)
    model.net[2].p = 0.0
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    pairs = [("say ", "yes", "no!"), ("do ", "yes", "no!")]

    def rewards(side):
        ids = [torch.tensor([ids_of(tokenizer, pair[0], pair[side])]) for pair in pairs]
        return torch.cat([model.net(model.embed(row).mean(1)).squeeze(-1) for row in ids])

    for _ in range(30):
        loss = -nn.functional.logsigmoid(rewards(1) - rewards(2)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    server = RewardModelServer(model, batch_size=64, tokenizer=tokenizer)
    good, bad = server.score_batch(["think ", "think "], ["yes", "no!"])
    assert good > bad + 1


# --- ensembles -------------------------------------------------------------------------------------------------------


def test_an_ensemble_is_a_weighted_sum_and_reports_disagreement():
    models = [Pooled(seed=0), Masked(seed=1), MultiObjectiveReward({"length": helpful})]
    tokenizer = character_tokenizer()
    each = np.array(
        [
            *(RewardModelServer(m, tokenizer=tokenizer).score_batch(PROMPTS, COMPLETIONS) for m in models[:2]),
            helpful(PROMPTS, COMPLETIONS),
        ]
    )
    weighted = EnsembleRewardModel(models=models, weights=[0.5, 0.3, 0.2], tokenizer=tokenizer)
    np.testing.assert_allclose(weighted.score_each(PROMPTS, COMPLETIONS), each)
    np.testing.assert_allclose(weighted.score_batch(prompts=PROMPTS, completions=COMPLETIONS), [0.5, 0.3, 0.2] @ each)
    np.testing.assert_allclose(weighted.disagreement(PROMPTS, COMPLETIONS), each.std(0))
    uniform = EnsembleRewardModel(models, tokenizer=tokenizer)
    np.testing.assert_allclose(uniform(PROMPTS, COMPLETIONS), each.mean(0))
    np.testing.assert_allclose(Rewards(uniform).scores(None, None, PROMPTS, COMPLETIONS), [each.mean(0)])


@pytest.mark.parametrize(
    ("models", "weights", "error", "message"),
    [
        ([], None, ValueError, "models must be a list of at least one"),
        (Pooled(), None, ValueError, "models must be a list of at least one"),
        ([Pooled(), safe], None, TypeError, "model 1 must be a torch.nn.Module or have score_batch"),
        ([Pooled()], [1.0, 2.0], ValueError, "weights must be one for each of 1 models"),
        ([Pooled()], [float("inf")], ValueError, "weight 0 must be a finite number, got inf"),
    ],
    ids=["empty", "module", "function", "weights", "infinite"],
)
def test_wrong_ensembles_are_errors(models, weights, error, message):
    with pytest.raises(error, match=f"^EnsembleRewardModel: {message}"):
        EnsembleRewardModel(models, weights)


# --- over HTTP -------------------------------------------------------------------------------------------------------


class Lengths:
    """A reward without a model, which is slow, and raises `error` if one is given."""

    def __init__(self, error=None):
        self.error, self.inside, self.most_inside = error, 0, 0

    def score_batch(self, prompts, completions):
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        threading.Event().wait(0.01)
        self.inside -= 1
        if self.error is not None:
            raise self.error
        return [float(len(c)) for c in completions]


def ask(url, body=b"", method="POST", path="/score", headers=()):
    """Return (status, answer) of one request, without the client."""
    host = url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=10)
    connection.request(method, path, body, dict(headers))
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read())
    connection.close()
    return found


@slow
def test_a_model_in_another_process_gives_the_same_scores():
    program = textwrap.dedent(
        """
        import sys, warnings
        import torch
        from torch import nn
        from rlox.llm.rewards.models import RewardModelServer

        class Mean(nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.embed = nn.Embedding(256, 4)

            def forward(self, input_ids):
                return self.embed(input_ids).mean((1, 2))

        if __name__ == "__main__":
            warnings.simplefilter("ignore")
            with RewardModelServer(Mean()).serve(token="s3cret") as http:
                print(http.url, flush=True)
                sys.stdin.read()
        """
    )
    torch.manual_seed(0)
    weights = nn.Embedding(256, 4).weight.detach().double().numpy()
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        reward = RemoteReward(child.stdout.readline().strip(), token="s3cret", timeout=30)
        found = reward.score_batch(prompts=PROMPTS, completions=COMPLETIONS)
        wanted = [weights[list((p + c).encode())].mean() for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
        np.testing.assert_allclose(found, wanted, atol=1e-6)
        np.testing.assert_array_equal(Rewards(reward).scores(None, None, PROMPTS, COMPLETIONS), [found])
        with pytest.raises(RuntimeError, match=r"got 401 \(.*; pass token= with the server's token"):
            RemoteReward(reward.url, token="other").score_batch(["a"], ["b"])
        child.stdin.close()
    assert child.returncode == 0
    with pytest.raises(
        ConnectionError, match=rf"RemoteReward {reward.url}/score: the server must answer .* 2 times; start"
    ):
        RemoteReward(reward.url, token="s3cret", retries=1, pause=0).score_batch(["a"], ["b"])


def test_all_texts_are_transmitted_unchanged():
    seen = []

    class Keeps(Lengths):
        def score_batch(self, prompts, completions):
            seen.append((prompts, completions))
            return super().score_batch(prompts, completions)

    prompts, completions = ["é\n", [{"role": "user", "content": "日本"}]], ["\0", "🙂"]
    with RewardHTTPServer(Keeps()) as server:
        remote = pickle.loads(pickle.dumps(RemoteReward(f"{server.url}/")))
        assert remote(prompts, completions).tolist() == [1, 1]
        assert RemoteReward(server.url).score_batch([], []).shape == (0,)
        assert ask(server.url, method="GET", path="/health") == (200, {"status": "ok"})
    assert seen[0] == (prompts, completions)


def test_the_model_is_called_by_one_thread_at_a_time():
    reward = Lengths()
    with RewardHTTPServer(reward) as server:
        remote, found = RemoteReward(server.url), []
        threads = [threading.Thread(target=lambda: found.append(remote(["a"], ["bc"]).item())) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    assert (found, reward.most_inside) == ([2.0] * 6, 1)


GOOD = b'{"prompts": ["a"], "completions": ["b"]}'


@pytest.mark.parametrize(
    ("request_", "status", "message"),
    [
        ({"body": b"{"}, 400, "the request must be JSON: Expecting"),
        ({"body": b"\xff\xfe\xfd"}, 400, "the request must be JSON"),
        ({"body": b"[" * 100_000}, 400, "the request must be JSON"),
        ({"body": b"[]"}, 400, 'the request must be {"prompts": [...], "completions": [...]}, got []'),
        ({"body": b'{"prompts": []}'}, 400, 'the request must be {"prompts": [...], "completions": [...]}'),
        ({"body": b'{"prompts": "a", "completions": ["b"]}'}, 400, "prompts must be a list of texts, got 'a'"),
        ({"body": b'{"prompts": ["a", 5], "completions": []}'}, 400, "row 1: prompts must be a text, or a chat"),
        (
            {"body": b'{"prompts": ["a"], "completions": []}'},
            400,
            "prompts must be as many as completions, got 1 and 0",
        ),
        ({"body": b'{"prompts": [%s], "completions": []}' % b",".join([b'""'] * 9)}, 413, "prompts must be at most 8"),
        ({"body": b" " * 1001}, 413, "a request must have at most 1,000 bytes, got 1001"),
        ({"headers": [("Content-Length", "9" * 30)]}, 413, "at most 1,000 bytes, got 9999"),
        ({"headers": [("Content-Length", "0" * 30 + "1001")]}, 413, "at most 1,000 bytes, got 1001"),
        ({"headers": [("Content-Length", "-1")]}, 411, "Content-Length"),
        ({"headers": [("Transfer-Encoding", "chunked")]}, 411, "Content-Length"),
        ({"body": GOOD, "path": "/scores"}, 404, "use POST /score"),
        ({"body": GOOD, "path": "/health"}, 405, "GET /health"),
        ({"method": "GET"}, 405, "POST /score"),
        ({"method": "GET", "path": "/"}, 404, "use GET /health"),
    ],
    ids=str,
)
def test_wrong_requests_are_answered_with_the_error(monkeypatch, request_, status, message):
    monkeypatch.setattr("rlox.llm.rewards.http.MOST_BYTES", 1000 if len(request_.get("body", b"")) < 2000 else 1 << 20)
    monkeypatch.setattr("rlox.llm.rewards.http.MOST_ROWS", 8)
    with RewardHTTPServer(Lengths()) as server:
        found, answer = ask(server.url, **request_)
        assert (found, list(answer)) == (status, ["error"])
        assert message in answer["error"]
        assert ask(server.url, GOOD) == (200, {"scores": [1.0]})  # and the next request is served


def test_a_request_that_ends_early_is_an_error():
    with RewardHTTPServer(Lengths()) as server:
        host, _, port = server.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=10) as client:
            client.sendall(b"POST /score HTTP/1.1\r\nContent-Length: 100\r\n\r\n" + GOOD)
            client.shutdown(socket.SHUT_WR)
            answer = client.makefile("rb").read().decode()
    assert answer.startswith("HTTP/1.0 400 ")
    assert f"must have 100 bytes, its Content-Length, got {len(GOOD)}" in answer


def test_a_request_that_is_too_large_is_answered_before_the_connection_closes(monkeypatch):
    monkeypatch.setattr("rlox.llm.rewards.http.MOST_BYTES", 4 << 20)
    with (
        RewardHTTPServer(Lengths()) as server,
        pytest.raises(RuntimeError, match=r"got 413 \(.*at most 4,194,304 bytes.*; score fewer completions at a time"),
    ):
        RemoteReward(server.url, retries=0).score_batch(["a"], ["x" * (6 << 20)])


@pytest.mark.parametrize(
    "header", [None, "Bearer other", "Bearer", "Basic s3cret", "s3cret", "Bearer s3cre\xe9", "Bearer s3cret2"]
)
def test_requests_without_the_token_are_rejected(header):
    headers = [] if header is None else [("Authorization", header)]
    with RewardHTTPServer(Lengths(), token="s3cret") as server:
        assert ask(server.url, GOOD, headers=headers)[0] == 401
        assert ask(server.url, GOOD, headers=[("Authorization", "Bearer s3cret")]) == (200, {"scores": [1.0]})


def test_an_exception_of_a_reward_is_one_line_for_the_client():
    with RewardHTTPServer(Lengths(ValueError("bad\nweights"))) as server:
        remote = RemoteReward(server.url, pause=0)
        with pytest.raises(
            RuntimeError, match=r"got 500 \(ValueError: bad weights\); the reward of the server has failed"
        ):
            remote.score_batch(["a"], ["b"])


@pytest.mark.parametrize("found", [[1.0, None], [1.0], 1.0, np.ones((2, 1))], ids=str)
def test_a_server_sends_no_wrong_scores(found):
    reward = MultiObjectiveReward({"a": safe})
    reward.score_batch = lambda prompts, completions: found
    output = r"got 500 \((Type|Value)Error: the reward must return"
    with RewardHTTPServer(reward) as server, pytest.raises(RuntimeError, match=output):
        RemoteReward(server.url, pause=0).score_batch(["a", "b"], ["c", "d"])


def test_a_client_that_disconnects_prints_nothing(capfd):
    with RewardHTTPServer(Lengths()) as server:
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
        connection.request("POST", "/score", GOOD)
        connection.close()
        assert RemoteReward(server.url)(["a"], ["b"]).item() == 1.0
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"host": "0.0.0.0"},
            ValueError,
            "host must be a loopback address if there is no token, got '0.0.0.0'; pass",
        ),
        ({"host": ""}, ValueError, "host must be a loopback address"),
        ({"host": "example.com"}, ValueError, "host must be a loopback address"),
        ({"host": 5}, TypeError, "host must be of type str, got 5"),
        ({"port": 65_536}, ValueError, "port must be at most 65535, got 65536"),
        ({"token": ""}, ValueError, "token must be a text of ASCII characters"),
        ({"token": "a b"}, ValueError, "token must be a text of ASCII characters"),
        ({"reward": safe}, TypeError, "reward must have score_batch"),
    ],
)
def test_wrong_arguments_of_an_http_server_are_errors(options, error, message):
    with pytest.raises(error, match=f"^RewardHTTPServer: {message}"):
        RewardHTTPServer(**{"reward": Lengths(), **options})


def test_with_a_token_other_machines_may_connect():
    with RewardHTTPServer(Lengths(), "0.0.0.0", token="s3cret") as server:
        port = int(server.url.rpartition(":")[2])
        assert RemoteReward(f"http://127.0.0.1:{port}", token="s3cret")(["a"], ["b"]).item() == 1.0
        with pytest.raises(
            OSError, match=f"RewardHTTPServer: cannot listen on port {port} of 127.0.0.1.*port=0 chooses"
        ):
            RewardHTTPServer(Lengths(), port=port)


def test_closing_a_server_ends_wait():
    server = RewardHTTPServer(Lengths())
    waiting = threading.Thread(target=server.wait)
    waiting.start()
    assert waiting.is_alive()
    server.close()
    server.close()
    waiting.join(10)
    assert not waiting.is_alive()


class Scripted:
    """A server that returns prepared answers (status, body) one after another and repeats the last."""

    def __init__(self, *answers):
        owner = self
        self.answers, self.headers = [*answers], []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                owner.headers.append(dict(self.headers))
                self.rfile.read(int(self.headers["Content-Length"]))
                status, body = owner.answers.pop(0) if len(owner.answers) > 1 else owner.answers[0]
                if status is not None:  # None: hang up
                    self.send_response(status)
                    if status == 302:
                        self.send_header("Location", "/elsewhere")
                    self.end_headers()
                    self.wfile.write(body)

            def log_message(self, *args):
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self):
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


OK = (200, b'{"scores": [1.5]}')


@pytest.mark.parametrize("first", [(504, b"no"), (None, b"")], ids=["busy", "hangs up"])
def test_requests_to_a_busy_server_are_repeated(first):
    with Scripted(first, first, OK) as server:
        assert RemoteReward(server.url, retries=2, pause=0).score_batch(["a"], ["b"]).tolist() == [1.5]
        assert len(server.headers) == 3
        assert "Authorization" not in server.headers[0]
    with (
        Scripted(first) as server,
        pytest.raises(ConnectionError, match=r"the server must answer within 60 s, got .* 3 times"),
    ):
        RemoteReward(server.url, retries=2, pause=0).score_batch(["a"], ["b"])


def test_pauses_double_up_to_a_limit(monkeypatch):
    pauses = []
    monkeypatch.setattr("random.Random.random", lambda self: 1.0)
    monkeypatch.setattr("rlox.llm.client.time.sleep", pauses.append)
    with Scripted((503, b"")) as server, pytest.raises(ConnectionError):
        RemoteReward(server.url, retries=8).score_batch(["a"], ["b"])
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((400, b'{"error": "no such\\nthing"}'), r"got 400 \(no such thing\)$"),
        ((404, b"<html>"), r"got 404 \(Not Found\); pass url= with the value of RewardHTTPServer.url"),
        ((413, b'{"error": "too much"}'), r"got 413 \(too much\); score fewer completions at a time"),
        ((500, b""), r"got 500 \(Internal Server Error\); the reward of the server has failed"),
        ((302, b""), r"got 302 \(Found\)"),  # the token must not be sent elsewhere
    ],
)
def test_rejected_requests_are_not_repeated(answer, message):
    with Scripted(answer) as server:
        with pytest.raises(
            RuntimeError, match=f"^RemoteReward {server.url}/score: the server must accept the request, {message}"
        ):
            RemoteReward(server.url, token="s3cret", pause=0).score_batch(["a"], ["b"])
        assert len(server.headers) == 1
        assert server.headers[0]["Authorization"] == "Bearer s3cret"


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (b"<html>", ValueError, r'must answer {"scores": \[...\]}, got b\'<html>\'; pass url='),
        (b"[1.5]", ValueError, "must answer"),
        (b'{"score": [1.5]}', ValueError, "must answer"),
        (b'{"scores": [1.5, 2.5]}', ValueError, "must return 1 numbers, one for each completion, got 2"),
        (b'{"scores": [NaN]}', ValueError, "must return finite numbers, got nan .prompt 'a', completion 'b'"),
        (b'{"scores": [null]}', TypeError, "must return numbers, got None"),
        (b'{"scores": 1.5}', TypeError, "must return a list of 1 numbers, got 1.5"),
    ],
)
def test_answers_of_a_server_are_checked(answer, error, message):
    with (
        Scripted((200, answer)) as server,
        pytest.raises(error, match=f"^RemoteReward {server.url}: the server {message}"),
    ):
        RemoteReward(server.url).score_batch(["a"], ["b"])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"url": "127.0.0.1:8000"}, ValueError, "url must be such as 'http://127.0.0.1:8000', got '127.0.0.1:8000'"),
        ({"url": "file:///etc/passwd"}, ValueError, "url must be such as"),
        ({"url": "http://"}, ValueError, "url must be such as"),
        ({"url": None}, ValueError, "url must be such as"),
        ({"timeout": 0}, ValueError, "timeout must be a number of seconds >= 0.001, got 0"),
        ({"timeout": float("nan")}, ValueError, "timeout must be a number of seconds"),
        ({"pause": -1}, ValueError, "pause must be a number of seconds >= 0, got -1"),
        ({"retries": -1}, ValueError, "retries must be >= 0, got -1"),
        ({"token": "a\r\nX: y"}, ValueError, "token must be a text of ASCII characters"),
    ],
)
def test_wrong_arguments_of_a_client_are_errors(options, error, message):
    with pytest.raises(error, match=f"^RemoteReward: {message}"):
        RemoteReward(**{"url": "http://127.0.0.1:8000", **options})


def test_values_that_are_not_text_are_rejected_before_sending():
    with pytest.raises(TypeError, match="prompts and completions must be texts or chats"):
        RemoteReward("http://127.0.0.1:9").score_batch([b"a"], ["b"])
