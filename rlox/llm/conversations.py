"""Conversations of several turns: a model writes and an environment answers until it ends the conversation."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rlox.config import shown
from rlox.llm.data import encode, inner_ids
from rlox.llm.models.language import LanguageModel
from rlox.llm.sampling import Completions, Settings
from rlox.llm.templates import Chat, Template, continues
from rlox.processes.failures import note_cause, require_exception

# Maximum numbers of samples per prompt and turns per conversation that have separate random numbers.
_MOST_SAMPLES, _MOST_TURNS = 1 << 12, 1 << 10


class TextEnvironment(Protocol):
    """An environment that answers a model; a new one is created for each conversation."""

    def reset(self, prompt: Any) -> str:
        """Start with a prompt of the dataset, and return the text that the model reads after it, which may be empty.

        After a conversation, the text is added to the last message, if it is the user's, or follows as one.
        """
        ...

    def step(self, text: str) -> tuple[str, float, bool]:
        """Take the text of the model; return the answer, a reward, and whether the conversation has ended."""
        ...


@dataclass(frozen=True)
class Conversations:
    """R conversations; the samples of a prompt are adjacent."""

    prompts: list[np.ndarray]  # (P_i,) int64 of each; in chats, with the text of `reset`
    texts: list[Any]  # the same prompts as texts or chats
    ids: list[np.ndarray]  # (C_i,) int64, all tokens after the prompt
    written: list[np.ndarray]  # (C_i,) bool, True for tokens of the model, False for those of the environment
    log_probs: list[np.ndarray]  # f32, of the tokens of the model
    rewards: np.ndarray  # (R,) f64, the sum of rewards of each conversation
    ended: np.ndarray  # (R,) bool; False where turns or the context ran out
    turns: np.ndarray  # (R,) int64


def converse(
    model: LanguageModel,
    prompts: Sequence[np.ndarray],
    texts: Sequence[Any],
    streams: Sequence[int] | np.ndarray,
    n: int,
    step: int,
    settings: Settings,
    most_turns: int,
    make_environment: Callable[[], TextEnvironment],
    draw: Callable[[list[np.ndarray], list[int], int, Settings], Completions],
    context: int | None = None,
    arguments: Sequence[Mapping[str, Any]] | None = None,
) -> Conversations:
    """Run `n` conversations for each prompt, all of them one turn at a time.

    Text of the model is never tokenised again: answers are appended to the sampled ids. If `texts` are conversations,
    the tokenizer's chat template formats the answers, and ends a turn that was cut off; otherwise they are appended
    unchanged.

    `prompts` (P_i,) are token ids, `texts` their original texts, and `streams` the unique numbers of their random
    streams, which determine the random numbers together with the number `step` of the update, the sample and the turn.
    ``draw(prompts, numbers, step, settings)`` returns one completion for each prompt, which ends at `context`: the
    number of tokens at which a conversation ends, if not ended by the environment; by default the model's context.
    `arguments` are ``tools`` and ``chat_template_kwargs`` of each prompt's chat template.

    Raises ValueError or TypeError if an answer of the environment is invalid. Exceptions of the environment itself are
    raised unchanged, with a note.
    """
    rows, context = len(prompts) * n, model.context if context is None else context
    environments = [make_environment() for _ in range(rows)]
    for name in ("reset", "step"):
        if rows and not callable(getattr(environments[0], name, None)):
            kind = type(environments[0]).__name__
            raise TypeError(f"{model.where}: the environment must have reset and step, but {kind} has no {name}")
    ids: list[list[np.ndarray]] = [[] for _ in range(rows)]
    written: list[list[np.ndarray]] = [[] for _ in range(rows)]
    log_probs: list[list[np.ndarray]] = [[] for _ in range(rows)]
    rewards, ended, turns = np.zeros(rows), np.zeros(rows, bool), np.zeros(rows, np.int64)
    starts, opened = [prompts[row // n] for row in range(rows)], [texts[row // n] for row in range(rows)]
    templates = [{}] * len(prompts) if arguments is None else arguments

    def answer(row: int, text: str, cut: bool = False) -> None:
        own = _answer_ids(model, text, None if isinstance(opened[row], str) else templates[row // n], cut)
        if context is not None:  # tokens that no longer fit end the conversation, and the model must not read them
            own = own[: max(0, context - len(starts[row]) - sum(map(len, ids[row])))]
        ids[row].append(own)
        written[row].append(np.zeros(len(own), bool))

    for row, environment in enumerate(environments):
        opening = _ask(environment.reset, opened[row])
        if not isinstance(opening, str):
            raise TypeError(f"{model.where}: the environment's reset must return a text, got {shown(opening)}")
        if opening and isinstance(opened[row], str):
            answer(row, opening)
        elif opening:
            opened[row] = _open(opened[row], opening)
            head, _ = encode(model.tokenizer, opened[row], **templates[row // n])
            starts[row] = np.asarray(head, np.int64)[:context]
    active = list(range(rows))
    for turn in range(most_turns):
        contexts = [np.concatenate([starts[row], *ids[row]]) for row in active]
        room = [math.inf if context is None else context - len(whole) for whole in contexts]
        fits = [i for i, left in enumerate(room) if left >= 1]
        active, contexts = [active[i] for i in fits], [contexts[i] for i in fits]
        if not active:
            break
        keys = [int(streams[row // n]) * _MOST_SAMPLES + row % n for row in active]
        drawn = draw(contexts, keys, step * _MOST_TURNS + turn, settings)
        going = []
        for row, before, own, own_log_probs in zip(active, contexts, drawn.ids, drawn.log_probs, strict=True):
            ids[row].append(own)
            written[row].append(np.ones(len(own), bool))
            log_probs[row].append(own_log_probs)
            continued = isinstance(opened[row], str) or (turns[row] == 0 and continues(opened[row]))
            own_text = model.decode(own, before if continued else ())
            text, reward, over = _step(environments[row], own_text, model.where)
            rewards[row] += reward
            turns[row] += 1
            ended[row] = over
            if not over:
                answer(row, text, not len(own) or own[-1] not in model.eos)
                going.append(row)
        active = going
    tokens, is_written, probabilities = (
        [np.concatenate([np.empty(0, dtype), *parts]) for parts in columns]
        for columns, dtype in ((ids, np.int64), (written, bool), (log_probs, np.float32))
    )
    return Conversations(starts, opened, tokens, is_written, probabilities, rewards, ended, turns)


def _ask(method: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return method(*arguments)
    except BaseException as e:
        what = f"the environment's {method.__name__}"
        require_exception(e, what, what)
        note_cause(e, what)
        raise


def _step(environment: TextEnvironment, text: str, where: str) -> tuple[str, float, bool]:
    result = _ask(environment.step, text)
    if not (isinstance(result, tuple) and len(result) == 3 and isinstance(result[0], str)):
        raise TypeError(f"{where}: the environment's step must return (text, reward, done), got {shown(result)}")
    answer, reward, over = result
    if isinstance(reward, bool) or not isinstance(reward, numbers.Real) or not math.isfinite(reward):
        raise ValueError(f"{where}: the environment's reward must be a finite number, got {shown(reward)}")
    return answer, float(reward), bool(over)


def _open(chat: Chat, text: str) -> Chat:
    """Return the conversation with a text that follows it: of the user, like the last message."""
    last = chat[-1]
    if last["role"] != "user":
        return [*chat, {"role": "user", "content": text}]
    return [*chat[:-1], {**last, "content": last["content"] + text}]


def _answer_ids(model: LanguageModel, text: str, arguments: Mapping[str, Any] | None, cut: bool) -> np.ndarray:
    """Return the token ids of the environment's answer, up to where the model writes again.

    `arguments` are those of the chat template (None: plain text). If the model's turn was `cut` off, it is ended first.
    """
    tokenizer = model.tokenizer
    if arguments is None:
        return np.asarray(inner_ids(tokenizer, text), np.int64)
    template = Template(model.where, tokenizer, **arguments)
    # The part that the template puts between one answer of the model and the next.
    before = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    after = [*before, {"role": "user", "content": text}]
    first, both = (
        tokenizer(written, add_special_tokens=False)["input_ids"]
        for written in (template.whole([], before, ""), template.opening(after))
    )
    ends = [i for i, token in enumerate(first) if token in model.eos]
    if both[: len(first)] != first:
        raise ValueError(
            f"{model.where}: the chat template must not change earlier messages when a message is added, and it does; "
            "prompts of plain text need no template"
        )
    # Unless the turn was cut off, the token that ends it is already part of the sampled tokens.
    return np.asarray(both[ends[-1] + (not cut) if ends else len(first) :], np.int64)
