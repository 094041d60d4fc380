"""Chats as text: what a tokenizer's chat template makes of a prompt and of the answers to it."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlox.checkpoint import one_line
from rlox.config import shown
from rlox.processes.failures import note_cause

Chat = list[dict[str, Any]]  # messages: texts for "role" and "content", and whatever else the template reads

COLUMNS = ("tools", "chat_template_kwargs")  # columns of a dataset that the chat template reads


@dataclass(frozen=True)
class Template:
    """The chat template of a tokenizer, with the arguments of one row.

    Raises ValueError if there is no template, or it does not read an argument, and TypeError for a wrong type.
    """

    where: str
    tokenizer: Any
    tools: Any = None  # a list of JSON schemas or of functions, or a list of schemas written as JSON
    chat_template_kwargs: Any = None  # values of the template's own variables, also as JSON
    _arguments: dict[str, Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise ValueError(
                f"{self.where}: tokenizer must have a chat template if a prompt is a chat, got None; set "
                "tokenizer.chat_template, or give prompts as texts"
            )
        tools = _from_json(self.where, "tools", self.tools)
        if tools is not None and not isinstance(tools, (list, tuple)):
            raise TypeError(f"{self.where}: tools must be a list of JSON schemas, got {shown(tools)}")
        more = _from_json(self.where, "chat_template_kwargs", self.chat_template_kwargs)
        if more is not None and not isinstance(more, Mapping):
            raise TypeError(f"{self.where}: chat_template_kwargs must be a mapping, got {shown(more)}")
        own = inspect.signature(self.tokenizer.apply_chat_template).parameters.keys() - {"documents", "kwargs"}
        for name in more or {}:
            if name in own:
                remedy = "use the column 'tools'" if name == "tools" else "leave it out"
                raise ValueError(f"{self.where}: chat_template_kwargs must not have {name!r}; {remedy}")
        self._arguments.update({name: value for name, value in (more or {}).items() if value is not None})
        if tools:
            self._arguments["tools"] = list(tools)
        for name in self._arguments:
            self._require_read(name)

    def _require_read(self, name: str) -> None:
        """Raise a ValueError if `name` does not occur in the template, which would ignore it."""
        chosen = getattr(self.tokenizer, "get_chat_template", None)
        text = str(self.tokenizer.chat_template) if chosen is None else chosen(tools=self._arguments.get("tools"))
        if not re.search(rf"\b{re.escape(name)}\b", text):
            raise ValueError(
                f"{self.where}: the chat template must read {name}, and does not; leave it out, or set another "
                "tokenizer.chat_template"
            )

    def _write(self, chat: Chat, **options: bool) -> str:
        if any(message.get("tool_calls") for message in chat):
            self._require_read("tool_calls")
        try:
            return self.tokenizer.apply_chat_template(chat, tokenize=False, **options, **self._arguments)
        except Exception as e:
            note_cause(e, f"{self.where}: the tokenizer's chat template")
            raise

    def opening(self, prompt: Chat) -> str:
        """Return the prompt up to where the assistant writes: within its last message, if that is the assistant's.

        Raises ValueError if the assistant's last message calls tools, so that it cannot be continued.
        """
        last = prompt[-1]
        if last["role"] != "assistant":
            return self._write(prompt, add_generation_prompt=True)
        if last.get("tool_calls") or last.get("content") is None:
            raise ValueError(
                f"{self.where}: the last message of prompt must have text to continue, got {shown(last)}; add the "
                "tools' answers"
            )
        # Where a template strips messages, transformers would also remove the white space before an empty one.
        if not last["content"].strip() and len(prompt) > 1 and last.keys() == {"role", "content"}:
            return self._write(prompt[:-1], add_generation_prompt=True)
        return self._write(prompt, continue_final_message=True)

    def whole(self, prompt: Chat, answer: str | Chat, opening: str) -> str:
        """Return the prompt with its answer; `opening` is the prompt alone.

        If the template writes the prompt otherwise once messages follow, only the answer's content follows `opening`.
        Raises ValueError if the answer then consists of several messages or calls tools.
        """
        messages = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
        whole = self._write(_join_chat(prompt, messages))
        if whole.startswith(opening):
            return whole
        if len(messages) > 1 or messages[0].get("tool_calls"):
            raise ValueError(
                f"{self.where}: the chat template must render the prompt the same when messages follow, and does not; "
                f"got {len(messages)} messages as the completion; pass only one, without tool_calls"
            )
        return f"{opening}{messages[0]['content']}"


def continues(prompt: Any) -> bool:
    """Return whether the model continues a text: a prompt that is a text, the beginning of a text without a prompt
    (None), or the assistant's unfinished message."""
    if prompt is None or isinstance(prompt, str):
        return True
    return prompt[-1]["role"] == "assistant" and bool(prompt[-1]["content"].strip())


def _join_chat(prompt: Chat, messages: Sequence[dict[str, Any]]) -> Chat:
    """Return the prompt with the messages that follow; the first completes an unfinished message of the assistant."""
    if not prompt or prompt[-1]["role"] != "assistant":
        return [*prompt, *messages]
    both = {**prompt[-1], **messages[0], "content": prompt[-1]["content"] + (messages[0].get("content") or "")}
    return [*prompt[:-1], both, *messages[1:]]


def _from_json(where: str, name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{where}: {name} must be JSON if it is a text, got {shown(value)} ({one_line(e)})") from e
