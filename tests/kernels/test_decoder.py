"""The decoder of Llama's shape against NumPy in float64, and sampling, scoring and gradients over a vocabulary."""

import numpy as np
import pytest

from rlox.kernels.llm.decoder import Decoder
from rlox.kernels.llm.vocabulary import draw_tokens, score_gradient, score_tokens

EPS = 1e-5
# Number of heads, of key heads, D, whether there are biases, and whether queries and keys have norms.
SHAPES = [(4, 2, 6, True, False), (3, 3, 48, False, False), (2, 1, 80, True, True), (4, 1, 16, False, True)]


def made(shape, hidden=20, inner=24, vocabulary=37, n_layers=2, seed=0):
    """The arguments of a decoder with random weights."""
    n_heads, n_key_heads, d, bias, normed = shape
    rng = np.random.default_rng(seed)

    def pair(n_out, n_in):
        added = rng.normal(size=n_out).astype("f4") if bias else None
        return (rng.normal(size=(n_out, n_in)) / np.sqrt(n_in)).astype("f4"), added

    def norm(n):
        return rng.uniform(0.5, 1.5, n).astype("f4")

    layers = [
        {
            "input_norm": norm(hidden), "post_norm": norm(hidden),
            "query_norm": norm(d) if normed else None, "key_norm": norm(d) if normed else None,
            "query": pair(n_heads * d, hidden), "key": pair(n_key_heads * d, hidden),
            "value": pair(n_key_heads * d, hidden), "output": pair(hidden, n_heads * d),
            "gate": pair(inner, hidden), "up": pair(inner, hidden), "down": pair(hidden, inner),
        }
        for _ in range(n_layers)
    ]  # fmt: skip
    embedding = rng.normal(size=(vocabulary, hidden)).astype("f4")
    return {
        "embedding": embedding, "layers": layers, "norm": norm(hidden), "head": pair(vocabulary, hidden)[0],
        "head_dim": d, "eps": EPS,
    }  # fmt: skip


def angles(length, d):
    turned = np.arange(length)[:, None] / 100.0 ** (np.arange(0, d, 2) / d)
    both = np.concatenate([turned, turned], 1)
    return np.cos(both).astype("f4"), np.sin(both).astype("f4")


def oracle(given, ids):
    """Logits (T, V) of one sequence, and the keys and values of each layer (heads, T, D), in float64."""
    d, t = given["head_dim"], len(ids)
    cosine, sine = (x.astype("f8") for x in angles(t, d))

    def norm(x, weight):
        return x if weight is None else x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight

    def product(x, pair):
        return x @ pair[0].T.astype("f8") + (0 if pair[1] is None else pair[1])

    def heads(x, pair, weight):
        y = norm(product(x, pair).reshape(t, -1, d), weight)
        turned = np.concatenate([-y[..., d // 2 :], y[..., : d // 2]], -1)
        return (y * cosine[:, None] + turned * sine[:, None]).transpose(1, 0, 2)

    x, kept = given["embedding"][ids].astype("f8"), []
    for layer in given["layers"]:
        h = norm(x, layer["input_norm"])
        q, k = heads(h, layer["query"], layer["query_norm"]), heads(h, layer["key"], layer["key_norm"])
        v = product(h, layer["value"]).reshape(t, -1, d).transpose(1, 0, 2)
        kept.append((k, v))
        times = len(q) // len(k)
        scores = q @ np.repeat(k, times, 0).transpose(0, 2, 1) / np.sqrt(d)
        scores = np.where(np.tri(t, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        seen = (weights @ np.repeat(v, times, 0)).transpose(1, 0, 2).reshape(t, -1)
        x = x + product(seen, layer["output"])
        h = norm(x, layer["post_norm"])
        gate = product(h, layer["gate"])
        x = x + product(gate / (1 + np.exp(-gate)) * product(h, layer["up"]), layer["down"])
    return norm(x, given["norm"]) @ given["head"].T.astype("f8"), kept


def begun(given, prompts, n, room):
    """A decoder that continues `prompts`, whose keys and values come from the oracle."""
    width, d = max(map(len, prompts)), given["head_dim"]
    padding = np.array([width - len(p) for p in prompts])
    found = [oracle(given, p)[1] for p in prompts]
    held = []
    for kind in range(2):
        held.append([])
        for layer in range(len(given["layers"])):
            rows = np.full((len(prompts), found[0][layer][0].shape[0], width, d), np.nan, np.float32)
            for b, of in enumerate(found):
                rows[b, :, padding[b] :] = of[layer][kind]
            held[-1].append(rows)
    decoder = Decoder(**given)
    decoder.begin(*held, padding, n, room, *angles(width + room, d))
    return decoder


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_logits_equal_those_of_complete_sequences(shape):
    """Over more tokens than a tile, with padding, and while rows are removed."""
    given, rng = made(shape), np.random.default_rng(1)
    prompts = [rng.integers(0, 37, n) for n in (5, 1, 19)]
    n, room = 3, 20
    decoder = begun(given, prompts, n, room)
    assert (
        np.abs(decoder.again(np.array([p[-1] for p in prompts])) - [oracle(given, p)[0][-1] for p in prompts]).max()
        < 2e-5
    )
    rows, written = np.arange(9), [list(prompts[i // n]) for i in range(9)]
    for t in range(room):
        tokens = rng.integers(0, 37, len(rows))
        got = decoder.next(tokens, rows)
        assert got.shape == (len(rows), 37)
        for row, token in zip(rows, tokens, strict=True):
            written[row].append(token)
        for k in range(0, len(rows), 2):
            np.testing.assert_allclose(got[k], oracle(given, written[rows[k]])[0][-1], atol=2e-5, rtol=2e-5)
        if t in (4, 16):
            rows = np.delete(rows, [0, len(rows) // 2])


def test_a_row_does_not_depend_on_the_batch():
    given = made(SHAPES[0])
    prompts = [np.arange(1, 6), np.arange(7, 9)]
    both, alone = begun(given, prompts, 4, 6), begun(given, prompts, 4, 6)
    for t in range(6):
        tokens = (np.arange(8) * 3 + t) % 37
        whole = both.next(tokens, np.arange(8)).copy()
        assert np.array_equal(whole[[2, 5]], alone.next(tokens[[2, 5]], np.array([2, 5])))


def test_the_decoder_names_a_wrong_argument():
    given = made(SHAPES[0])
    layer = given["layers"][0]
    for change, words in (
        ({"embedding": given["embedding"][0]}, r"embedding must be \(V, H\)"),
        ({"embedding": given["embedding"].astype("f8")}, "embedding must have dtype float32"),
        ({"norm": np.ones(3, np.float32)}, r"norm must have shape \(20,\)"),
        ({"head": given["head"][:, 1:]}, "head must have shape"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"head_dim": 10}, "multiples of head_dim"),
        ({"eps": -1.0}, "eps must be finite"),
        ({"layers": [{**layer, "up": (layer["gate"][0][1:], None)}]}, r"layers\[0\].up must have shape"),
        ({"layers": [{**layer, "key": (layer["key"][0], np.ones(3, np.float32))}]}, r"layers\[0\].key's bias must"),
        ({"layers": [{**layer, "post_norm": None}]}, r"layers\[0\].post_norm must be a NumPy array"),
        ({"layers": [{**layer, "more": None}]}, r"layers\[0\] must have the keys"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"Decoder: .*{words}|Decoder: {words}"):
            Decoder(**{**given, **change})
    decoder = Decoder(**given)
    with pytest.raises(ValueError, match=r"Decoder.next: there must be rows"):
        decoder.next(np.zeros(1, int), np.zeros(1, int))
    keys = [np.zeros((2, 2, 4, 6), np.float32)] * 2
    right = {
        "keys": keys, "values": keys, "padding": np.array([0, 3]), "n": 2, "room": 2,
        "cosine": angles(6, 6)[0], "sine": angles(6, 6)[1],
    }  # fmt: skip
    for change, words in (
        ({"keys": keys[:1]}, "keys and values must contain 2"),
        ({"keys": [k[:, :1] for k in keys]}, "keys must have shape"),
        ({"values": [k[:1] for k in keys]}, r"values\[0\] must have shape"),
        ({"padding": np.array([0, 4])}, r"padding must be in \[0, 4\)"),
        ({"n": 0}, "n and room must be >= 1"),
        ({"cosine": angles(5, 6)[0]}, "cosine must have shape"),
        ({"sine": angles(7, 6)[0]}, "sine must have shape"),
    ):
        with pytest.raises(ValueError, match=f"Decoder.begin: {words}"):
            decoder.begin(**{**right, **change})
    decoder.begin(**right)
    for tokens, rows, words in (
        ([37], [0], r"tokens must be in \[0, 37\)"),
        ([0], [4], r"rows must be in \[0, 4\)"),
        ([0, 0], [1, 1], "rows must be ascending"),
        ([0, 0], [1], "tokens must have shape"),
    ):
        with pytest.raises(ValueError, match=f"Decoder.next: {words}"):
            decoder.next(np.array(tokens), np.array(rows))
    for _ in range(2):
        decoder.next(np.zeros(1, int), np.array([3]))
    with pytest.raises(ValueError, match="rows must have room left, got 3"):
        decoder.next(np.zeros(1, int), np.array([3]))


def logits_of(seed, n=40, vocabulary=131):
    found = 4 * np.random.default_rng(seed).standard_normal((n, vocabulary)).astype("f4")
    found[:, 7] = -np.inf
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.5])
@pytest.mark.parametrize("vocabulary", [1, 5, 64, 131])
def test_tokens_follow_the_inverse_distribution_function(vocabulary, temperature):
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(200, vocabulary)).astype("f4") * 3
    noise = 1 - rng.random(200)
    scaled = logits.astype("f8") / temperature
    log_probs = scaled - scaled.max(1, keepdims=True)
    log_probs -= np.log(np.exp(log_probs).sum(1, keepdims=True))
    reached = np.exp(log_probs).cumsum(1)
    expected = (reached < noise[:, None] * reached[:, -1:]).sum(1)
    # Rows need not be contiguous, as in padded results.
    apart = np.zeros((200, vocabulary + 9), np.float32)
    apart[:, :vocabulary] = logits
    for given in (logits, apart[:, :vocabulary]):
        tokens, found = draw_tokens(given, noise, temperature)
        assert np.array_equal(tokens, expected)
        np.testing.assert_allclose(found, log_probs[np.arange(200), tokens], atol=4e-6)


def test_tokens_of_probability_0_are_never_drawn():
    """With the smallest and the largest random number."""
    logits = np.full((1, 200), -np.inf, np.float32)
    logits[0, [20, 90, 150]] = [0.3, 1.0, -20.0]
    for number, token in ((1e-300, 20), (0.5, 90), (1.0, 150)):
        assert draw_tokens(logits, np.array([number]))[0] == [token]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_logits_give_a_non_finite_log_probability(bad):
    logits = np.zeros((1, 70), np.float32)
    logits[0, 66] = bad
    tokens, found = draw_tokens(logits, np.array([0.5]))
    assert 0 <= tokens[0] < 70
    assert np.isnan(found[0])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_and_their_gradient_agree_with_the_oracle(temperature):
    logits, rng = logits_of(5), np.random.default_rng(6)
    rows, targets = rng.permutation(40)[:31], rng.integers(8, 131, 31)
    log_probs, totals, entropies = score_tokens(logits, rows, targets, temperature)
    scaled = logits[rows].astype("f8") / temperature
    total = np.log(np.exp(scaled).sum(1))
    probs = np.exp(scaled - total[:, None])
    np.testing.assert_allclose(totals, total, rtol=1e-6)
    np.testing.assert_allclose(log_probs, scaled[np.arange(31), targets] - total, rtol=1e-6, atol=2e-6)
    np.testing.assert_allclose(entropies, total - (probs * np.where(probs > 0, scaled, 0)).sum(1), rtol=1e-5, atol=1e-6)
    slopes, got = rng.normal(size=31).astype("f4"), np.full_like(logits, np.nan)
    score_gradient(logits, rows, targets, totals, slopes, got, temperature)
    expected = np.zeros(logits.shape)
    expected[rows] = -probs * slopes[:, None] / temperature
    expected[rows, targets] += slopes / temperature
    np.testing.assert_allclose(got, expected, atol=5e-6)


def test_the_vocabularys_kernels_name_a_wrong_argument():
    logits, ids = logits_of(0, 3), np.array([0, 1])
    for given, words in (
        ((logits.astype("f8"), np.ones(3)), "logits must have dtype float32"),
        ((logits[0], np.ones(3)), r"logits must have shape \(M, V\)"),
        ((logits, np.ones(2)), "noise must have shape"),
        ((logits, np.ones(3), 0.0), "temperature must be > 0"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"draw_tokens: {words}"):
            draw_tokens(*given)
    for given, words in (
        ((logits, np.array([0, 3]), ids), r"rows must be in \[0, 3\)"),
        ((logits, ids, np.array([0, 131])), r"targets must be in \[0, 131\)"),
    ):
        with pytest.raises(ValueError, match=f"score_tokens: {words}"):
            score_tokens(*given)
    some, room = np.ones(2, np.float32), np.empty_like(logits)
    for given, words in (
        ((logits, np.array([1, 1]), ids, some, some, room), "rows must be distinct, got 1 twice"),
        ((logits, ids, ids, some[:1], some, room), "totals must have shape"),
        ((logits, ids, ids, some, some, room[:2]), "out must have shape"),
    ):
        with pytest.raises(ValueError, match=f"score_gradient: {words}"):
            score_gradient(*given)
