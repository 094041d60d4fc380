"""Custom reward functions: parameter names decide the form and the columns passed; wrong results are named."""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import os
import re
import signal
import threading
import time
import traceback
import warnings

import numpy as np
import pytest
import torch

from rlox.llm.rewards.functions import Rewards
from rlox.processes.failures import failure_of

PROMPTS = ["1+1=", "2+2=", "3+3="]
COMPLETIONS = ["2", "5", "six"]
PROMPT_IDS = torch.tensor([[0, 1, 2], [0, 3, 4], [5, 6, 7]])
COMPLETION_IDS = [torch.tensor([1]), torch.tensor([2, 3]), torch.tensor([4, 5, 6])]
COLUMNS = {"answer": ["2", "4", "6"], "level": [1, 2, 3]}


def scores(functions, columns=COLUMNS, **options):
    return Rewards(functions, **options).scores(PROMPT_IDS, COMPLETION_IDS, PROMPTS, COMPLETIONS, columns)


def until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


# --- forms -----------------------------------------------------------------------------------------------------------


def test_a_function_of_token_ids_gets_tensors():
    """A reward for GRPO that decodes ids, and scores how many of the required keys the JSON has."""
    texts = {1: '{"answer": 2, "reasoning": "so"}', 2: '{"answer": 2}', 4: "no JSON"}

    def json_format_reward(completions: list[torch.Tensor], prompts: torch.Tensor) -> list[float]:
        assert [type(c) for c in completions] == [torch.Tensor] * 3
        assert prompts.shape == (3, 3)
        found = []
        for completion in completions:
            try:
                parsed = json.loads(texts[completion.tolist()[0]])
            except json.JSONDecodeError:
                found.append(0.0)
            else:
                found.append(1.0 if {"answer", "reasoning"} <= parsed.keys() else 0.3)
        return found

    rewards = Rewards(json_format_reward)
    assert not rewards.needs_text
    found = rewards.scores(PROMPT_IDS, COMPLETION_IDS, None, None, {})
    assert (found.dtype, found.tolist()) == (np.float64, [[1.0, 0.3, 0.0]])


def test_a_function_of_texts_gets_texts_and_the_columns_it_names():
    def right(prompts, completions, answer, unused=7):
        assert (prompts, completions, unused) == (PROMPTS, COMPLETIONS, 7)
        return [float(a == c) for a, c in zip(answer, completions, strict=True)]

    def everything(prompts, completions, *, level, **columns):
        assert columns == {"answer": COLUMNS["answer"]}
        return level

    def default(prompts, completions, level=None):
        return [float(n) for n in level]

    def no_columns(prompts, completions):
        return [0.5, 0.5, 0.5]

    rewards = Rewards([right, everything, default, no_columns])
    assert rewards.needs_text
    found = rewards.scores(None, None, PROMPTS, COMPLETIONS, COLUMNS)
    assert found.tolist() == [[1, 0, 0], [1, 2, 3], [1, 2, 3], [0.5, 0.5, 0.5]]


def test_columns_named_like_the_texts_are_not_passed_twice():
    def reward(prompts, completions, **columns):
        assert completions == COMPLETIONS
        return [float("completions" in columns)] * 3

    assert scores(reward, {"completions": ["a", "b", "c"]}).tolist() == [[0, 0, 0]]


class Callable:
    def __call__(self, prompts, completions):
        return [1.0] * len(prompts)


class Model:
    def score_batch(self, prompts, completions):
        return np.array([len(p) + len(c) for p, c in zip(prompts, completions, strict=True)])


def by_level(prompts, completions, level, factor):
    return [n * factor for n in level]


@pytest.mark.parametrize(
    ("function", "name", "wanted"),
    [
        (Callable(), "Callable", [1, 1, 1]),
        (Callable().__call__, "__call__", [1, 1, 1]),
        (Model(), "Model", [5, 5, 7]),
        (Model().score_batch, "score_batch", [5, 5, 7]),
        (functools.partial(by_level, factor=2), "by_level", [2, 4, 6]),
        (lambda completions, prompts: [float(len(c)) for c in completions], "lambda", [1, 2, 3]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_form_of_a_reward_follows_from_its_parameters(function, name, wanted):
    assert Rewards(function).names == [name]
    assert scores(function).tolist() == [wanted]


@pytest.mark.parametrize("function", [lambda c, p: [len(ids) for ids in c], lambda *ids: [len(i) for i in ids[0]]])
def test_without_a_tokenizer_a_function_takes_ids_whatever_its_parameters_are_called(function):
    rewards = Rewards(function, tokenizer=False)
    assert not rewards.needs_text
    assert rewards.scores(PROMPT_IDS, COMPLETION_IDS, None, None).tolist() == [[1.0, 2.0, 3.0]]
    with pytest.raises(TypeError, match="must take texts"):
        Rewards(function)


def test_a_function_may_ask_which_completions_have_ended():
    def lengths(prompts, completions, ended):
        return [float(e) for e in ended]

    rewards = Rewards(lengths)
    texts = PROMPT_IDS, COMPLETION_IDS, PROMPTS, COMPLETIONS
    assert rewards.scores(*texts, {}, np.array([True, False, True])).tolist() == [[1.0, 0.0, 1.0]]
    assert rewards.scores(*texts).tolist() == [[1.0, 1.0, 1.0]]
    with pytest.raises(ValueError, match=r"no column 'ended', because reward lengths gets .* rename the column"):
        rewards.check_columns(["ended"])


def test_names_are_unique():
    def length(prompts, completions):
        return [0.0] * 3

    def length_2(prompts, completions):
        return [0.0] * 3

    rewards = Rewards([length, length_2, length, length])
    assert rewards.names == ["length", "length_2", "length_3", "length_4"]
    assert len(rewards) == 4


def takes_one(completions, **columns):
    """TRL's form, which is called with keyword arguments."""


def wrong_names(texts, answers):
    """The names do not tell prompts from completions."""


def positional(prompts, completions, answer, /):
    """The column cannot be passed by name."""


class Swapped:
    def score_batch(self, completions, prompts):
        """The order of the texts is fixed."""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            takes_one,
            r"reward takes_one must take texts, \(prompts: .*, or token ids, \(completions: .*got \(completions, \*\*",
        ),
        (
            wrong_names,
            r"reward wrong_names must take texts.*got \(texts, answers\); name its first two parameters like",
        ),
        (Swapped(), "reward Swapped must take texts"),
        (torch.nn.Linear(1, 1), r"reward Linear must take texts.*; wrap a model as RewardModelServer"),
        (Callable, "reward Callable must take texts"),
        (positional, "reward positional must take its parameter 'answer' by keyword"),
        ("length", "a reward must be a function .*, got 'length'"),
        (dict, "reward dict must have a signature|reward dict must take texts"),
    ],
)
def test_other_forms_are_errors_that_show_both_signatures(function, message):
    with pytest.raises(TypeError, match=message) as info:
        Rewards(function, where="GRPO")
    assert str(info.value).startswith("GRPO: ")


def test_a_parameter_without_a_column_is_named_with_a_suggestion():
    def reward(prompts, completions, answers):
        raise AssertionError("never called")

    rewards = Rewards(reward, where="GRPO")
    output = r"GRPO: reward reward must find a column for its parameter 'answers', got none; did you mean 'answer'\?"
    with pytest.raises(ValueError, match=output):
        rewards.check_columns(COLUMNS)
    with pytest.raises(ValueError, match=output):
        rewards.scores(PROMPT_IDS, COMPLETION_IDS, PROMPTS, COMPLETIONS, COLUMNS)
    with pytest.raises(ValueError, match="got none; the dataset has no other columns"):
        rewards.check_columns([])
    rewards.check_columns(["answers"])


def test_inputs_of_a_function_must_exist_and_have_equal_length():
    text, ids = Rewards(Model()), Rewards(lambda completions, prompts: [0.0])
    with pytest.raises(ValueError, match="prompts must be given, since reward Model takes them, got None"):
        text.scores(PROMPT_IDS, COMPLETION_IDS, None, None)
    with pytest.raises(ValueError, match="completion_ids must be given, since reward lambda takes them, got None"):
        ids.scores(None, None, PROMPTS, COMPLETIONS)
    with pytest.raises(ValueError, match="completions must have 3 rows, like prompts, got 2"):
        text.scores(None, None, PROMPTS, COMPLETIONS[:2])
    with pytest.raises(ValueError, match="column level must have 3 rows, like prompts, got 1"):
        text.scores(None, None, PROMPTS, COMPLETIONS, {"level": [1]})
    assert text.scores(None, None, [], []).shape == (1, 0)


def test_a_function_cannot_change_the_input_of_others():
    def vandal(completions, prompts, level):
        prompts.zero_()
        completions[0].zero_()
        completions.clear()
        level.clear()
        return [0.0] * 3

    def other(prompts, completions, level):
        prompts.clear()
        return [float(n) for n in level]

    before = PROMPT_IDS.clone()
    assert scores([vandal, other, Model()]).tolist() == [[0, 0, 0], [1, 2, 3], [5, 5, 7]]
    assert torch.equal(PROMPT_IDS, before)
    assert (COMPLETION_IDS[0].tolist(), COLUMNS["level"], len(PROMPTS)) == ([1], [1, 2, 3], 3)


# --- asynchronous functions ------------------------------------------------------------------------------------------


def meeting(n, wait=5.0):
    """Functions of both forms that return only if all of them run concurrently."""
    arrived = []

    async def together(value):
        arrived.append(value)
        end = time.monotonic() + wait
        while len(arrived) < n:
            assert time.monotonic() < end, "the others were not started"
            await asyncio.sleep(0)
        return [value] * 3

    async def texts(prompts, completions):
        return await together(1.0)

    async def tokens(completions, prompts):
        return await together(2.0)

    class Judge:
        async def score_batch(self, prompts, completions):
            return await together(3.0)

    return [texts, tokens, Judge()][:n]


def test_asynchronous_functions_are_awaited_together_and_with_others():
    first, second, third = meeting(3)
    assert scores([first, Model(), second, third]).tolist() == [[1] * 3, [5, 5, 7], [2] * 3, [3] * 3]


def test_asynchronous_functions_are_awaited_inside_a_running_loop():
    async def caller():
        return scores(meeting(2))

    assert asyncio.run(caller()).tolist() == [[1] * 3, [2] * 3]


def test_all_calls_use_the_same_event_loop():
    loops = []

    async def reward(prompts, completions):
        loops.append(asyncio.get_running_loop())
        return [0.0] * 3

    async def caller(rewards):
        rewards.scores(None, None, PROMPTS, COMPLETIONS)

    def calls(rewards):
        rewards.scores(None, None, PROMPTS, COMPLETIONS)
        rewards.scores(None, None, PROMPTS, COMPLETIONS)
        asyncio.run(caller(rewards))
        assert not loops[0].is_closed()

    calls(Rewards(reward))
    assert len(loops) == 3
    assert len({id(loop) for loop in loops}) == 1
    until(loops[0].is_closed)


def test_rewards_may_be_called_from_several_threads():
    rewards, found = Rewards(meeting(1)), []
    threads = [
        threading.Thread(target=lambda: found.append(rewards.scores(None, None, PROMPTS, COMPLETIONS).tolist()))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert found == [[[1.0] * 3]] * 4


@pytest.mark.slow
def test_a_coroutine_that_is_not_awaited_leaves_no_warning():
    def broken(prompts, completions):
        raise KeyError("answer")

    gc.collect()  # objects of earlier tests may warn too
    with warnings.catch_warnings(record=True) as output:
        warnings.simplefilter("always")
        with pytest.raises(KeyError):
            scores([*meeting(1), broken])
        gc.collect()
    assert [str(warning.message) for warning in output] == []


# --- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "result",
    [
        [1, 0, True],
        (1.0, 0.0, np.True_),
        np.array([1, 0, 1], dtype=np.float16),
        np.array([True, False, True]),
        np.array([1, 0.0, True], dtype=object),
        torch.tensor([1.0, 0.0, 1.0], dtype=torch.bfloat16, requires_grad=True),
        [torch.tensor(1), np.array(0.0), np.float32(1)],
    ],
    ids=lambda result: type(result).__name__,
)
def test_numbers_may_come_in_any_sequence(result):
    found = scores(lambda prompts, completions: result)
    assert (found.dtype, found.tolist()) == (np.float64, [[1, 0, 1]])


@pytest.mark.parametrize(
    ("result", "error", "message", "row"),
    [
        ([1.0, 2.0], ValueError, "must return 3 numbers, one for each completion, got 2", 2),
        ([], ValueError, "must return 3 numbers, one for each completion, got 0", 0),
        ([1.0] * 4, ValueError, "must return 3 numbers, one for each completion, got 4", 2),
        ([1.0, float("nan"), float("nan")], ValueError, "must return finite numbers, got nan", 1),
        ([1.0, float("inf"), 0], ValueError, "must return finite numbers, got inf", 1),
        (torch.tensor([1.0, 1.0, -torch.inf]), ValueError, "must return finite numbers, got -inf", 2),
        ([10**400, 0, 0], ValueError, "must return finite numbers, got 1000", 0),
        ([1.0, "0.5", 0], TypeError, "must return numbers, got '0.5'", 1),
        (np.array(["1", "2", "3"]), TypeError, "must return numbers, got ", 0),
        ([1.0, [0.5], 0], TypeError, r"must return numbers, got \[0.5\]", 1),
        ([1.0, 1j, 0], TypeError, "must return numbers, got 1j", 1),
        (np.ones((3, 1)), ValueError, r"must return one number for each of 3 completions, got shape \(3, 1\)", None),
        (torch.tensor(1.0), ValueError, r"must return one number for each of 3 completions, got shape \(\)", None),
        (1.0, TypeError, "must return a list of 3 numbers, got 1.0", None),
        (None, TypeError, "must return a list of 3 numbers, got None", None),
        ({"a": 1}, TypeError, "must return a list of 3 numbers, got {'a': 1}", None),
        ("abc", TypeError, "must return a list of 3 numbers, got 'abc'", None),
    ],
    ids=str,
)
def test_wrong_results_are_named_with_function_prompt_and_completion(result, error, message, row):
    def accuracy(prompts, completions):
        return result

    with pytest.raises(error, match=f"^GRPO: reward accuracy {message}") as info:
        scores([Model(), accuracy], where="GRPO")
    if row is not None:
        assert f"(prompt {PROMPTS[row]!r}, completion {COMPLETIONS[row]!r})" in str(info.value)


def test_messages_shorten_long_texts_and_show_ids_without_text():
    rewards = Rewards(lambda completions, prompts: [0.0, float("nan"), 0.0])
    with pytest.raises(ValueError, match=re.escape("(prompt [0, 3, 4], completion [2, 3])")):
        rewards.scores(PROMPT_IDS, COMPLETION_IDS, None, None)
    with pytest.raises(ValueError, match=r"completion 'x{70}") as info:
        rewards.scores(PROMPT_IDS, COMPLETION_IDS, ["", "y" * 10_000, ""], ["", "x" * 10_000, ""])
    assert len(str(info.value)) < 400
    assert "\n" not in str(info.value)


def test_none_is_a_reward_that_does_not_apply():
    def math(prompts, completions, level):
        return [1.0 if n == 1 else None for n in level]

    def code(prompts, completions, level):
        return [0.5 if n > 1 else None for n in level]

    rewards = Rewards([math, code], weights=[2, -3.0])
    found = rewards.scores(None, None, PROMPTS, COMPLETIONS, COLUMNS)
    np.testing.assert_array_equal(found, [[1, np.nan, np.nan], [np.nan, 0.5, 0.5]])
    assert rewards.combine(found).tolist() == [2.0, -1.5, -1.5]
    with pytest.raises(ValueError, match=r"got None from math \(prompt '2\+2=', completion '5'\)"):
        scores(math)


def test_combine_is_the_weighted_sum():
    rewards = Rewards([Model(), by_level], weights=np.array([0.5, 2.0]))
    table = np.array([[1.0, 2.0, np.nan], [3.0, np.nan, 4.0]])
    combined = rewards.combine(table)
    assert (combined.dtype, combined.tolist()) == (np.float64, [6.5, 1.0, 8.0])
    assert Rewards([Model(), by_level]).combine(table).tolist() == [4.0, 2.0, 4.0]
    with pytest.raises(ValueError, match="got none for completion 1"):
        rewards.combine(np.array([[1.0, np.nan], [1.0, np.nan]]))
    with pytest.raises(ValueError, match=r"scores must have shape \(2, N\), got \(3,\)"):
        rewards.combine(np.ones(3))


@pytest.mark.parametrize(
    "weights", [[1.0], [1.0, 2.0, 3.0], [1.0, float("nan")], [1.0, float("inf")], ["1", 2], [True, 1], 5, "ab"]
)
def test_weights_are_one_finite_number_for_each_function(weights):
    with pytest.raises(ValueError, match="GRPO: weights must be one finite number for each of Model, by_level, got "):
        Rewards([Model(), by_level], weights=weights, where="GRPO")


def test_at_least_one_function_is_required():
    with pytest.raises(ValueError, match="GRPO: there must be at least one reward function, got none"):
        Rewards([], where="GRPO")


# --- exceptions ------------------------------------------------------------------------------------------------------


class OutOfCredit(Exception):
    pass


def plain(prompts, completions):
    raise OutOfCredit("no more calls")


async def later(prompts, completions):
    await asyncio.sleep(0)
    raise OutOfCredit("no more calls")


@pytest.mark.parametrize("function", [plain, later])
def test_an_exception_keeps_its_type_and_its_traceback_and_gets_a_note(function):
    with pytest.raises(OutOfCredit, match="no more calls") as info:
        scores([Model(), function])
    name = function.__name__
    assert info.value.__notes__ == [f"rlox: reward {name} failed"]
    assert failure_of(info.value).what == f"reward {name}"
    assert traceback.extract_tb(info.value.__traceback__)[-1].name == name


async def ends(prompts, completions):
    raise SystemExit(3)


def ends_at_once(prompts, completions):
    raise SystemExit(3)


@pytest.mark.parametrize("function", [ends, ends_at_once])
def test_a_reward_does_not_end_the_process(function):
    with pytest.raises(RuntimeError, match=r"reward ends\w* must not end the process, got SystemExit\(3\)") as info:
        scores(function)
    assert isinstance(info.value.__cause__, SystemExit)
    assert failure_of(info.value).what == f"reward {function.__name__}"


@pytest.mark.parametrize("inside", [False, True], ids=["no loop", "inside a loop"])
def test_ctrl_c_cancels_awaited_functions(inside, caplog):
    started, ended, patience = threading.Event(), [], [60]

    async def slow(prompts, completions):
        started.set()
        try:
            await asyncio.sleep(sum(patience))
        finally:
            ended.append(True)
        return [0.0] * 3

    rewards = Rewards(slow)

    def presses():
        started.wait()
        os.kill(os.getpid(), signal.SIGINT)

    async def caller():
        return rewards.scores(None, None, PROMPTS, COMPLETIONS)

    # Not asyncio.run, since its handler of Ctrl-C waits for whatever blocks the loop.
    loop, user = asyncio.new_event_loop(), threading.Thread(target=presses)
    user.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(caller()) if inside else rewards.scores(None, None, PROMPTS, COMPLETIONS)
    until(lambda: ended)
    loop.close()
    assert time.monotonic() - start < 30
    assert not caplog.records
    patience.clear()
    assert rewards.scores(None, None, PROMPTS, COMPLETIONS).tolist() == [[0.0] * 3]  # and later calls work again


async def cancelled(prompts, completions):
    raise asyncio.CancelledError


async def interrupted(prompts, completions):
    raise KeyboardInterrupt


@pytest.mark.parametrize("function", [cancelled, interrupted])
def test_exceptions_of_asynchronous_functions_are_raised(function):
    rewards = Rewards([function, *meeting(1)])
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"reward {function.__name__} must not end the process, got "):
            rewards.scores(None, None, PROMPTS, COMPLETIONS)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_forked_process_awaits_too():
    rewards = Rewards(meeting(1))
    rewards.scores(None, None, PROMPTS, COMPLETIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about forking while threads run
        child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(int(rewards.scores(None, None, PROMPTS, COMPLETIONS).tolist() != [[1.0] * 3]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
