"""Completions of several turns: a model writes, an environment answers, until the environment says that it is over."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from rlox.config import shown
from rlox.envs.failures import note_cause
from rlox.llm.models.language import LanguageModel
from rlox.llm.sampling import Completions, Settings

# Samples of a prompt, and turns of a conversation, that random numbers are kept apart for.
_MOST_SAMPLES, _MOST_TURNS = 1 << 12, 1 << 10


class TextEnvironment(Protocol):
    """What answers a model; a new one is made for each conversation."""

    def reset(self, prompt: Any) -> str:
        """Begin with a prompt of the dataset; what the model reads behind it, which may be nothing."""
        ...

    def step(self, text: str) -> tuple[str, float, bool]:
        """Take what the model wrote; return the answer, a reward, and whether the conversation is over."""
        ...


@dataclass(frozen=True)
class Conversations:
    """R conversations, the samples of a prompt together."""

    ids: list[np.ndarray]  # (C_i,) int64, all that stands behind the prompt
    written: list[np.ndarray]  # (C_i,) bool, the tokens that the model wrote: the others are the environment's
    log_probs: list[np.ndarray]  # f32, of the tokens that the model wrote
    rewards: np.ndarray  # (R,) f64, the sum of each conversation's
    ended: np.ndarray  # (R,) bool; False where turns or the context ran out
    turns: np.ndarray  # (R,) int64


def converse(
    model: LanguageModel,
    prompts: Sequence[np.ndarray],
    texts: Sequence[Any],
    rows_of: Sequence[int],
    n: int,
    step: int,
    settings: Settings,
    most_turns: int,
    make_environment: Callable[[], TextEnvironment],
    draw: Callable[[list[np.ndarray], list[int], int, Settings], Completions],
    context: int | None = None,
) -> Conversations:
    """`n` conversations for each prompt, all of them a turn at a time.

    What the model wrote is never tokenised again: answers are appended to the ids that were sampled, as the tokenizer's
    chat template sets them where `texts` are conversations, else as they are.

    Parameters
    ----------
    prompts : sequence of arrays (P_i,)
        Token ids; `texts` are the same as they were written, and `rows_of` their places in the dataset.
    step : int
        Number of the update, which with the prompt, the sample and the turn decides the random numbers.
    draw : callable
        ``draw(prompts, numbers, step, settings)``: one completion for each.
    context : int, optional
        Tokens at which a conversation ends, if the environment has not ended it before; by default the model's.

    Raises
    ------
    ValueError, TypeError
        For an environment that answers otherwise; what it raises itself is raised as it is, with a note.
    """
    rows, context = len(prompts) * n, model.context if context is None else context
    environments = [make_environment() for _ in range(rows)]
    ids: list[list[np.ndarray]] = [[] for _ in range(rows)]
    written: list[list[np.ndarray]] = [[] for _ in range(rows)]
    log_probs: list[list[np.ndarray]] = [[] for _ in range(rows)]
    rewards, ended, turns = np.zeros(rows), np.zeros(rows, bool), np.zeros(rows, np.int64)

    def answer(row: int, text: str) -> None:
        chat = not isinstance(texts[row // n], str)
        found = _answer_ids(model, text, chat)
        if context is not None:  # what no longer fits ends the conversation, and no pass over the model may read it
            found = found[: max(0, context - len(prompts[row // n]) - sum(map(len, ids[row])))]
        ids[row].append(found)
        written[row].append(np.zeros(len(found), bool))

    for row, environment in enumerate(environments):
        opening = _asked(environment.reset, texts[row // n])
        if not isinstance(opening, str):
            raise TypeError(f"{model.where}: the environment's reset must return a text, got {shown(opening)}")
        if opening:
            answer(row, opening)
    active = list(range(rows))
    for turn in range(most_turns):
        contexts = [np.concatenate([prompts[row // n], *ids[row]]) for row in active]
        room = [math.inf if context is None else context - len(whole) for whole in contexts]
        fits = [i for i, left in enumerate(room) if left >= 1]
        active, contexts = [active[i] for i in fits], [contexts[i] for i in fits]
        if not active:
            break
        length = int(min([settings.max_new_tokens, *(r for r in room if r >= 1)]))
        keys = [rows_of[row // n] * _MOST_SAMPLES + row % n for row in active]
        drawn = draw(contexts, keys, step * _MOST_TURNS + turn, replace(settings, max_new_tokens=length))
        going = []
        for row, own, found in zip(active, drawn.ids, drawn.log_probs, strict=True):
            ids[row].append(own)
            written[row].append(np.ones(len(own), bool))
            log_probs[row].append(found)
            text, reward, over = _step(environments[row], model.decode(own), model.where)
            rewards[row] += reward
            turns[row] += 1
            ended[row] = over
            if not over:
                answer(row, text)
                going.append(row)
        active = going
    return Conversations(
        [np.concatenate(parts) if parts else np.empty(0, np.int64) for parts in ids],
        [np.concatenate(parts) if parts else np.empty(0, bool) for parts in written],
        [np.concatenate(parts) if parts else np.empty(0, np.float32) for parts in log_probs],
        rewards,
        ended,
        turns,
    )


def _asked(method: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return method(*arguments)
    except Exception as e:
        note_cause(e, f"the environment's {method.__name__}")
        raise


def _step(environment: TextEnvironment, text: str, where: str) -> tuple[str, float, bool]:
    found = _asked(environment.step, text)
    if not (isinstance(found, tuple) and len(found) == 3 and isinstance(found[0], str)):
        raise TypeError(f"{where}: the environment's step must return (text, reward, done), got {shown(found)}")
    answer, reward, over = found
    if isinstance(reward, bool) or not isinstance(reward, numbers.Real) or not math.isfinite(reward):
        raise ValueError(f"{where}: the environment's reward must be a finite number, got {shown(reward)}")
    return answer, float(reward), bool(over)


def _answer_ids(model: LanguageModel, text: str, chat: bool) -> np.ndarray:
    """Token ids of what the environment says, up to where the model writes again."""
    tokenizer = model.tokenizer
    if not chat:
        return np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], np.int64)
    # What the template puts between an answer of the model and the next one.
    before = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    after = [*before, {"role": "user", "content": text}]
    first, both = (
        list(tokenizer.apply_chat_template(chat_, tokenize=True, return_dict=False, **more))
        for chat_, more in ((before, {}), (after, {"add_generation_prompt": True}))
    )
    ends = [i for i, token in enumerate(first) if token in model.eos]
    if both[: len(first)] != first:
        raise ValueError(
            f"{model.where}: the chat template must keep what was said when a message is added, and it changes it; "
            "prompts of plain text need none"
        )
    # The model's own end of a turn is among what it wrote.
    return np.asarray(both[ends[-1] + 1 if ends else len(first) :], np.int64)
