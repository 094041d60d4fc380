"""Rewards from models: weighted sums of objectives, ensembles, and reward models that read texts."""

from __future__ import annotations

import inspect
import math
import numbers
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from rlox.config import integer, nearest, shown
from rlox.llm.data import Text, encode, template_arguments
from rlox.llm.rewards.functions import as_scores, check_pairs, pair_excerpt, taken, takes
from rlox.llm.tokens import unique_rows
from rlox.nn.modes import evaluating
from rlox.processes.failures import note_cause, require_exception

if TYPE_CHECKING:
    from rlox.llm.rewards.http import RewardHTTPServer

Scorer = Callable[..., Any]  # (prompts, completions), and its other parameters of `_call` -> N numbers


def _weight(where: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise ValueError(f"{where}: {name} must be a finite number, got {shown(value)}")
    return float(value)


def _call(
    where: str,
    name: str,
    scorer: Scorer,
    prompts: Sequence[Any],
    completions: Sequence[Any],
    rows: Mapping[str, Sequence[Any] | None],
) -> np.ndarray:
    """Call `scorer` with those of `rows` that it takes, for (N,) f64; its exceptions get a note with its name."""
    more = taken(scorer, **rows)
    try:
        result = scorer(list(prompts), list(completions), **more)
    except BaseException as e:
        require_exception(e, f"{where}: {name}", f"{where}: {name}")
        note_cause(e, f"{where}: {name}")
        raise
    return as_scores(f"{where}: {name}", result, len(completions), lambda i: pair_excerpt(prompts[i], completions[i]))


class MultiObjectiveReward:
    """The weighted sum of several rewards.

    Parameters
    ----------
    objectives : dict of callable or object with ``score_batch``
        By name; each ``(prompts, completions)`` -> (N,) numbers.
    weights : dict of float, optional
        One for each objective; 1 by default.

    Raises
    ------
    ValueError
        If there is no objective, a weight is not finite, or the keys of `weights` and `objectives` differ.
    TypeError
        If an objective is not callable and has no ``score_batch``.
    """

    def __init__(self, objectives: Mapping[str, Any], weights: Mapping[str, float] | None = None):
        where = type(self).__name__
        if not isinstance(objectives, Mapping) or not objectives:
            raise ValueError(f"{where}: objectives must be a dict of at least one reward, got {shown(objectives)}")
        if weights is None:
            weights = dict.fromkeys(objectives, 1.0)
        for name in weights:
            if name not in objectives:
                raise ValueError(
                    f"{where}: weights must have the keys of objectives, got {shown(name)}; "
                    f"{nearest(str(name), map(str, objectives))}"
                )
        for name in objectives:
            if name not in weights:
                raise ValueError(f"{where}: weights must have the key {name!r}, as objectives has, got none")
        self._scorers = {name: _scorer(f"{where}: objective {name!r}", reward) for name, reward in objectives.items()}
        self.weights = {name: _weight(where, f"weight {name!r}", weights[name]) for name in objectives}

    def score_each(
        self,
        prompts: Sequence[Text],
        completions: Sequence[str],
        ended: Sequence[bool] | None = None,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Sequence[Any] | None = None,
    ) -> dict[str, np.ndarray]:
        """Return the scores (N,) float64 of every objective, without its weight.

        `ended` is False for completions that were cut off; `tools` and `chat_template_kwargs` are those of each chat.
        Objectives with these parameters get them. Raises ValueError or TypeError if an objective returns anything but N
        finite numbers; its own exceptions are raised unchanged, with a note.
        """
        where = type(self).__name__
        check_pairs(where, prompts, completions)
        rows = {"ended": ended, "tools": tools, "chat_template_kwargs": chat_template_kwargs}
        return {
            name: _call(where, f"objective {name!r}", scorer, prompts, completions, rows)
            for name, scorer in self._scorers.items()
        }

    def score_batch(
        self,
        prompts: Sequence[Text],
        completions: Sequence[str],
        ended: Sequence[bool] | None = None,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Sequence[Any] | None = None,
    ) -> np.ndarray:
        """Return the weighted sum (N,) float64. Arguments and errors are those of `score_each`."""
        each = self.score_each(prompts, completions, ended, tools, chat_template_kwargs)
        return np.sum([self.weights[name] * scores for name, scores in each.items()], axis=0)

    __call__ = score_batch


def _scorer(what: str, reward: Any) -> Scorer:
    """Return `reward` as a function ``(prompts, completions) -> scores``."""
    if inspect.isclass(reward) or not callable(scorer := getattr(reward, "score_batch", reward)):
        raise TypeError(f"{what} must be a function of (prompts, completions) or have score_batch, got {shown(reward)}")
    return scorer


class _Reader:
    """Converts texts to the ids that networks score."""

    def __init__(self, where: str, tokenizer: Any, max_length: int | None):
        self._where, self._tokenizer = where, tokenizer
        self._max_length = None if max_length is None else integer(where, "max_length", max_length, 1)
        self._warned = False

    def read(
        self,
        prompts: Sequence[Text],
        completions: Sequence[Text],
        ended: Sequence[bool] | None,
        tools: Sequence[Any] | None,
        chat_template_kwargs: Sequence[Any] | None,
    ) -> list[list[int]]:
        """Return the ids of every prompt with its completion; only the last `max_length` ids of longer rows."""
        check_pairs(self._where, prompts, completions)
        if self._tokenizer is None and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self._where}: without a tokenizer the bytes of a text are its token ids, 0 to 255; pass tokenizer=, "
                "the reward model's tokenizer, unless the model was trained on bytes",
                RuntimeWarning,
                3,
            )
        keep, n = self._max_length or 0, len(completions)
        ends = [True] * n if ended is None else ended
        columns = {"tools": tools, "chat_template_kwargs": chat_template_kwargs}
        chats = {name: list(values) for name, values in columns.items() if values is not None}
        rows = enumerate(zip(prompts, completions, ends, strict=True))
        return [self._ids(i, *row, template_arguments(chats, i))[-keep:] for i, row in rows]

    def _ids(self, row: int, prompt: Text, completion: Text, ended: bool, template: dict[str, Any]) -> list[int]:
        if self._tokenizer is not None:
            # Without a prompt, the completion is encoded as a whole text.
            add_eos = ended and getattr(self._tokenizer, "eos_token_id", None) is not None
            options = {"add_eos": add_eos, "ended": ended, "row": row, "where": self._where, **template}
            head, rest = encode(self._tokenizer, prompt or None, completion, **options)
            return [*head, *rest]
        for name, text in (("prompt", prompt), ("completion", completion)):
            if not isinstance(text, str):
                raise ValueError(
                    f"{self._where}: row {row}: {name} must be a text if there is no tokenizer, got {shown(text)}; "
                    "pass a tokenizer with a chat template as tokenizer="
                )
        if not f"{prompt}{completion}":
            raise ValueError(f"{self._where}: row {row}: prompt and completion must not both be empty, got '' and ''")
        return list(f"{prompt}{completion}".encode(errors="replace"))


class _Network:
    """A network that scores rows of ids in batches, with the same scores as if each row were alone."""

    def __init__(self, where: str, network: Any, batch_size: int, device: Any):
        if not isinstance(network, nn.Module):
            remedy = "; an object with score_batch needs no server" if hasattr(network, "score_batch") else ""
            raise TypeError(f"{where}: reward_model must be a torch.nn.Module, got {shown(network)}{remedy}")
        self.what = f"{where}: reward model {type(network).__name__}"
        self._network = network if device is None else network.to(device)
        self._batch_size = integer(where, "batch_size", batch_size, 1)
        self._takes_mask = takes(network.forward, "attention_mask")
        config: Any = getattr(network, "config", None)
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        # Models of transformers use this id to find a row's last token.
        self._config = config if hasattr(config, "pad_token_id") else None
        self._lock = threading.Lock()

    def score(self, rows: Sequence[list[int]], prompts: Sequence[Any], completions: Sequence[Any]) -> np.ndarray:
        """Return finite scores (N,) float64 of the ids of N prompts and completions; equal ones of equal rows."""
        first, index = unique_rows(rows)
        rows, scores = [rows[i] for i in first], np.empty(len(first))
        with self._lock, torch.no_grad(), evaluating(self._network), self._with_padding() as pad:
            weights = next(self._network.parameters(), None)
            device = "cpu" if weights is None else weights.device
            for batch in self._batches(rows, pad is not None):
                tensors = [torch.tensor(rows[row], dtype=torch.int64, device="cpu") for row in batch]
                ids = pad_sequence(tensors, batch_first=True, padding_value=pad or 0)
                mask = pad_sequence([torch.ones_like(row) for row in tensors], batch_first=True)
                scores[batch] = self._forward(ids.to(device), mask.to(device))
        return as_scores(self.what, scores[index], len(index), lambda i: pair_excerpt(prompts[i], completions[i]))

    def _batches(self, rows: Sequence[list[int]], padded: bool) -> Iterator[list[int]]:
        """Yield batches of indices, shorter rows first; without `padded`, all rows of a batch have the same length."""
        batch: list[int] = []
        for row in sorted(range(len(rows)), key=lambda i: len(rows[i])):
            differs = bool(batch) and not padded and len(rows[row]) != len(rows[batch[0]])
            if differs or len(batch) == self._batch_size:
                yield batch
                batch = []
            batch.append(row)
        if batch:
            yield batch

    @contextmanager
    def _with_padding(self) -> Iterator[int | None]:
        """Yield the padding id, or None if all rows of a batch must have the same length.

        A network that takes no mask would score padding. One of transformers without ``pad_token_id`` scores the last
        column, and rejects batches; with -1, which is no token's id, it scores the last column of batches too.
        """
        if not self._takes_mask:
            yield None
        elif self._config is None:
            yield 0
        elif self._config.pad_token_id is not None and self._config.pad_token_id >= 0:
            yield self._config.pad_token_id
        else:
            before, self._config.pad_token_id = self._config.pad_token_id, -1
            try:
                yield None
            finally:
                self._config.pad_token_id = before

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor) -> np.ndarray:
        n = len(ids)
        try:
            output = self._network(ids, attention_mask=mask) if self._takes_mask else self._network(ids)
        except Exception as e:
            note_cause(e, self.what)
            raise
        scores = getattr(output, "logits", output)
        shape = tuple(scores.shape) if isinstance(scores, torch.Tensor) else type(scores).__name__
        if shape not in ((n,), (n, 1)):
            raise ValueError(
                f"{self.what} must return one score per row, ({n},) or .logits ({n}, 1), got "
                f"{shape}{'; load it with num_labels=1' if self._config is not None else ''}"
            )
        return scores.reshape(n).double().cpu().numpy()


class RewardModelServer:
    """A network as a reward that reads prompts and completions as text.

    Parameters
    ----------
    reward_model : torch.nn.Module
        ``forward(input_ids)``, (B, T) int64, returns (B,) or (B, 1), or an output with ``logits`` of such a shape, like
        the sequence classifiers of transformers. If `forward` has a parameter ``attention_mask``, rows of different
        lengths are padded on the right; if not, only rows of the same length are scored together. In both cases a
        row's score is the same as if it were scored alone.
    batch_size : int
        Maximum number of rows per forward pass.
    tokenizer : transformers.PreTrainedTokenizerBase, optional
        Encodes prompt and completion as `rlox.llm.data.encode` does, with EOS if it has one. Without it, the UTF-8
        bytes of both are the ids.
    max_length : int, optional
        Only the last `max_length` ids of longer rows are scored.
    device : str or torch.device, optional
        Device to move the model to; by default it is not moved.

    Raises
    ------
    TypeError
        If `reward_model` is not a module.
    ValueError
        If a number is not positive.
    """

    def __init__(
        self,
        reward_model: nn.Module,
        batch_size: int = 64,
        tokenizer: Any = None,
        max_length: int | None = None,
        device: str | torch.device | None = None,
    ):
        where = type(self).__name__
        self._network = _Network(where, reward_model, batch_size, device)
        self._reader = _Reader(where, tokenizer, max_length)
        self.reward_model = reward_model

    def score_batch(
        self,
        prompts: Sequence[Text],
        completions: Sequence[str],
        ended: Sequence[bool] | None = None,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Sequence[Any] | None = None,
    ) -> np.ndarray:
        """Return scores (N,) float64, computed without gradients and in evaluation mode.

        Completions with False in `ended` were cut off, and are read without an EOS. `tools` and `chat_template_kwargs`
        contain the arguments of each row's chat template, or None. Warns once if there is no tokenizer. Raises
        ValueError, with the text, if one cannot be read, the model returns other shapes, or a score is not finite.
        """
        ids = self._reader.read(prompts, completions, ended, tools, chat_template_kwargs)
        return self._network.score(ids, prompts, completions)

    __call__ = score_batch

    def serve(self, host: str = "127.0.0.1", port: int = 0, token: str | None = None) -> RewardHTTPServer:
        """Serve scores over HTTP; see `rlox.llm.rewards.http.RewardHTTPServer`."""
        from rlox.llm.rewards.http import RewardHTTPServer

        return RewardHTTPServer(self, host, port, token)


class EnsembleRewardModel:
    """The weighted sum of several reward models; by default their mean.

    Parameters
    ----------
    models : list of torch.nn.Module or of objects with ``score_batch``
        Modules as `RewardModelServer` takes them; they stay on their devices.
    weights : sequence of float, optional
        One for each model, used as given; 1 / K each by default.
    tokenizer, batch_size, max_length
        Settings for the modules, as in `RewardModelServer`.

    Raises
    ------
    ValueError
        If there is no model, or the weights are not one finite number for each.
    TypeError
        If a model is not a module and has no ``score_batch``.
    """

    def __init__(
        self,
        models: Sequence[Any],
        weights: Sequence[float] | None = None,
        tokenizer: Any = None,
        batch_size: int = 64,
        max_length: int | None = None,
    ):
        where = type(self).__name__
        if not isinstance(models, (list, tuple, nn.ModuleList)) or not len(models):
            raise ValueError(f"{where}: models must be a list of at least one model, got {shown(models)}")
        weights = [1 / len(models)] * len(models) if weights is None else list(weights)
        if len(weights) != len(models):
            raise ValueError(f"{where}: weights must be one for each of {len(models)} models, got {shown(weights)}")
        self.weights = np.array([_weight(where, f"weight {k}", weight) for k, weight in enumerate(weights)])
        self._reader = _Reader(where, tokenizer, max_length)
        self._members: list[_Network | Scorer] = []
        for k, model in enumerate(models):
            if hasattr(model, "score_batch"):
                self._members.append(_scorer(f"{where}: model {k}", model))
            elif isinstance(model, nn.Module):
                self._members.append(_Network(where, model, batch_size, None))
            else:
                raise TypeError(f"{where}: model {k} must be a torch.nn.Module or have score_batch, got {shown(model)}")

    def score_each(
        self,
        prompts: Sequence[Text],
        completions: Sequence[str],
        ended: Sequence[bool] | None = None,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Sequence[Any] | None = None,
    ) -> np.ndarray:
        """Return the unweighted scores (K, N) float64 of every model. Arguments and errors are those of
        `RewardModelServer.score_batch`."""
        where = type(self).__name__
        check_pairs(where, prompts, completions)
        reads = any(isinstance(member, _Network) for member in self._members)
        rows = {"ended": ended, "tools": tools, "chat_template_kwargs": chat_template_kwargs}
        ids = self._reader.read(prompts, completions, **rows) if reads else []
        scores = []
        for k, member in enumerate(self._members):
            if isinstance(member, _Network):
                scores.append(member.score(ids, prompts, completions))
            else:
                scores.append(_call(where, f"model {k}", member, prompts, completions, rows))
        return np.array(scores)

    def score_batch(
        self,
        prompts: Sequence[Text],
        completions: Sequence[str],
        ended: Sequence[bool] | None = None,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Sequence[Any] | None = None,
    ) -> np.ndarray:
        """Return the weighted sum (N,) float64. Arguments and errors are those of `score_each`."""
        return self.weights @ self.score_each(prompts, completions, ended, tools, chat_template_kwargs)

    __call__ = score_batch

    def disagreement(
        self,
        prompts: Sequence[Text],
        completions: Sequence[str],
        ended: Sequence[bool] | None = None,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Sequence[Any] | None = None,
    ) -> np.ndarray:
        """Return the standard deviation (N,) float64 over the models, without their weights. Arguments and errors are
        those of `score_each`."""
        return self.score_each(prompts, completions, ended, tools, chat_template_kwargs).std(axis=0)
