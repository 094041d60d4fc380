"""Shared code of SFT, reward models, GRPO and DPO: a language model, rows of text to learn from, a reference."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from rlox.callbacks import Callback
from rlox.callbacks.loggers import LoggerCallback
from rlox.checkpoint import Checkpoint
from rlox.checkpoint.counters import scheduled
from rlox.checkpoint.meaning import require_same_meaning
from rlox.checkpoint.streams import Stream
from rlox.config import LLMConfig, integer, shown
from rlox.evaluation.episodes import Evaluation
from rlox.gpu.devices import choose_device, device_for
from rlox.gpu.numerics import autocast, precision_of
from rlox.kernels.rng import Rng
from rlox.llm import backends
from rlox.llm.backends import Served
from rlox.llm.encoded import Encoded, RowOrder, encode_dataset
from rlox.llm.models.adapters import fingerprint, with_adapters
from rlox.llm.models.heads import RewardHead
from rlox.llm.models.language import LanguageModel, Scores
from rlox.llm.models.packing import require_packing
from rlox.llm.models.reference import Reference
from rlox.llm.models.saved import description, load_weights_, save_pretrained, tokenizer_state, weights
from rlox.llm.rewards.scoring import Scored, completions_of, texts_of
from rlox.llm.sampling import (
    AT_ONCE,
    Completions,
    Settings,
    sample_in_parts,
    sample_within,
    settings_of,
    unique_numbers,
)
from rlox.llm.tokens import Sequences, in_parts
from rlox.nn.modes import torch_threads
from rlox.nn.modules import generator_states
from rlox.nn.optimizers import FlatOptimizer
from rlox.nn.sharding import ShardedAdam
from rlox.nn.transfers import send
from rlox.training import loops
from rlox.training.algorithm import Algorithm, require_finite, to_floats
from rlox.training.backend import Backend
from rlox.training.restoring_models import with_model


class LLMAlgorithm(Algorithm):
    """Base class of algorithms that train a language model.

    Training is counted in updates, each on `batch_size` rows of the dataset; callbacks receive their number as
    ``step``. Every pass over the rows has a new order, determined by the seed and the number of the pass.

    Parameters
    ----------
    model : nn.Module
        A causal Hugging Face model, a peft model with adapters around one, or a module whose ``forward(ids)`` returns
        logits (B, T, V), where each column depends on the columns up to it. It is trained in place. Completions are
        sampled from these logits; a ``generate`` of the model is never called.
    ref_model : nn.Module, optional
        The frozen reference, for algorithms that have one; by default the model as it is at the start of the training,
        which is after `init_from`. It is stored as a copy, of the adapters alone if there are any; adapters that are
        new are switched off instead.
    callbacks : list of Callback, optional
        Called in order, the logger last.
    logger : LoggerCallback, path, str or list, optional
        As for `rlox.training.on_policy.OnPolicyAlgorithm`.
    tokenizer : optional
        A Hugging Face tokenizer; required for text.
    dataset : optional
        Rows to learn from, instead of the argument of `train`: a path, a list of dicts, or tensors.
    eval_dataset : optional
        Rows that are not learned from, on which `scored` evaluates; by default the dataset.
    eos_token_id : int or list of int, optional
        Ids that end a completion; by default the model's and the tokenizer's.
    seed : int
        Determines the order of rows, every completion, and the adapters' initial weights.
    device : str
        ``cpu``, ``cuda``, or ``auto``: CUDA if it is available and the model has a million parameters or more.
    threads : int
        PyTorch's CPU threads while training, restored afterwards; 0 leaves them unchanged.
    source : str, optional
        The folder or name from which the model was loaded; checkpoints of adapters then refer to it.
    sampler : Backend, optional
        Backend, created by `rlox.llm.backends.create_backend`, that samples completions instead of the model and
        receives its weights before it does. Only for algorithms that sample. `close` closes it.
    config : Config, optional
        All hyper-parameters, as the algorithm's ``Config``.
    **hyper_parameters
        Instead of `config`: any of its fields; the others have their defaults.

    Raises
    ------
    TypeError, ValueError
        For an unknown hyper-parameter, a value of the wrong type or out of range, an invalid model, rows without the
        columns that the algorithm reads, adapters on a custom module, or a reference with another vocabulary.
    """

    _loop = staticmethod(loops.offline)
    _stream = Stream.PROMPTS
    _length = "n_updates"
    task: ClassVar[str]  # kind of rows: prompts, pairs or texts
    has_reference: ClassVar[bool] = False

    config: Any  # an LLMConfig
    optimizer: FlatOptimizer | ShardedAdam
    reference: Reference | None = None

    def __init__(
        self,
        model: nn.Module,
        ref_model: nn.Module | None = None,
        callbacks: Iterable[Callback] | None = None,
        logger: LoggerCallback | None = None,
        *,
        tokenizer: Any = None,
        dataset: Any = None,
        eval_dataset: Any = None,
        eos_token_id: int | Iterable[int] | None = None,
        seed: int = 42,
        device: str = "auto",
        backend: str = "auto",
        threads: int = 1,
        source: str | None = None,
        sampler: backends.Backend | None = None,
        config: LLMConfig | None = None,
        **hyper_parameters: Any,
    ):
        where = type(self).__name__
        settings = {"config": config, **hyper_parameters}
        super().__init__(
            seed, logger, callbacks, settings, device=device, backend=backend, threads=threads, clock="updates"
        )
        if backend == "native":
            raise ValueError(f"{where}: backend must be auto or torch, got 'native': language models need PyTorch")
        if ref_model is not None and not self.has_reference:
            raise TypeError(f"{where}: ref_model must be left out, because {self.name} has no reference")
        if ref_model is not None and ref_model is model:
            raise ValueError(
                f"{where}: ref_model must not be the model itself, which is trained; leave it out, or pass a copy"
            )
        self.backend = Backend("torch", "language models need PyTorch")
        self.source = source
        plain = LanguageModel(model, tokenizer, eos_token_id, where)
        if self.task == "prompts" and sampler is None:
            plain.warn_of_own_generate()
        self.device = choose_device(device_for(device, plain.module, where), plain.module, where, self.ranks)
        self.ranks.place(plain.module, self.device)
        # Trained weights are float32, regardless of the precision of passes.
        if self.config.lora_rank is None and not hasattr(plain.module, "disable_adapter"):
            plain.module.float()
        if self._needs_reference():
            self.reference = Reference(plain, ref_model, self.config.lora_rank is not None, plain.device, where)
        self.model = plain
        if (rank := self.config.lora_rank) is not None:
            self.model = with_adapters(plain, rank, self.config.lora_alpha, self.config.lora_targets, self.seed)
            if self.reference is not None:
                self.reference.attach(self.model)
        # Fingerprint of the base weights, which checkpoints of adapters leave out.
        self._base = fingerprint(self.model.module) if hasattr(self.model.module, "disable_adapter") else None
        if rank is None:  # only adapters that are created here are known to be new
            self._freeze_adapters()
        elif self.reference is not None and self.ranks.sharded:
            self.reference.prepare_adapters(self.ranks.full)
        self.model.sample_cache = getattr(self.config, "sample_cache", "auto")
        if sampler is not None and self.model.sample_cache != "auto":
            raise ValueError(f"{where}: sample_cache must be auto with a sampler, got {self.model.sample_cache!r}")
        if self.config.gradient_checkpointing:
            self.model.checkpoint_activations()
        self.rng = Rng(self.seed, self._stream)
        self._served = None if sampler is None else self._served_by(sampler)
        self._n_loads = 0  # how often weights were loaded into the model
        self._policy = self.model.module
        self.setup(Rng(self.seed, Stream.INIT))
        if self.ranks.joined:
            self.ranks.prepare(self)
        if self.config.packing:
            for packed in (self.model, None if self.reference is None else self.reference.separate):
                if packed is not None:
                    require_packing(packed, self.cast)
        self.rows: Encoded | None = None
        self._order: RowOrder | None = None
        self.eval_rows: Encoded | None = None
        if dataset is not None:
            self.use(dataset)
        if eval_dataset is not None:
            self.eval_rows = self._encode(eval_dataset)

    def _needs_reference(self) -> bool:
        return self.has_reference

    def _freeze_adapters(self) -> None:
        """If the reference is the policy without its adapters, use a copy of the present adapters from now on."""
        if self.reference is not None and self.reference.kind == "switched" and self.reference.frozen is None:
            self.reference.freeze_adapters(self.ranks.full)
            if self.reference.frozen is not None:
                self.keep("reference", self.reference.frozen)

    def _served_by(self, sampler: backends.Backend) -> Served:
        where = type(self).__name__
        if self.task != "prompts":
            raise TypeError(f"{where}: sampler must be left out, because {self.name} samples nothing to learn from")
        if self.ranks.joined:
            raise ValueError(f"{where}: sampler must be left out when several ranks train")
        tolerance = 1e-3 if self._precision() == "float32" else 0.1
        exact = getattr(self.config, "sampler_correction", "none") != "none"
        return Served(sampler, self.model, where, self.log_probs, tolerance, exact=exact)

    def setup(self, rng: Rng) -> None:
        """Create the optimiser, and add the reference to checkpoints if it changes."""
        c = self.config
        trained = [p for p in self.policy.parameters() if p.requires_grad]
        if not trained:
            raise ValueError(f"{type(self).__name__}: model must have parameters that require a gradient, got none")
        for p in trained:
            p.data = p.data.float()
        moved = None if self.reference is None else self.reference.changing(c.ref_sync_every is not None)
        self._share_out()
        self.optimizer = self.ranks.adam(self.policy.parameters(), c.learning_rate, 1e-8, c.weight_decay)
        if moved is not None:
            self.keep("reference", self.ranks.part(moved))

    def _share_out(self) -> None:
        """Shard the model, and a separate reference, over the ranks if sharding is enabled."""
        read = self.policy.blank if isinstance(self.policy, RewardHead) else self.model.blank
        separate = None if self.reference is None else self.reference.separate
        passes = [(self.policy, read), *([] if separate is None else [(separate.module, separate.blank)])]
        for module, blank in passes:
            self.ranks.shard(module, partial(self._blank, blank), self.device, self._precision() == "bfloat16")
        self.model.one_pass = self.ranks.sharded

    def _blank(self, read: Callable[[], torch.Tensor], learn: bool) -> None:
        """Run a pass over a model because the other ranks need it; with `learn`, with a gradient of zeros."""
        # The caller may be inside a no_grad block.
        with torch.set_grad_enabled(learn):
            with self.cast(), self.model.learning() if learn else nullcontext():
                output = read()
            if learn:
                (output.float().sum() * 0.0).backward()

    # ---- rows

    def use(self, dataset: Any) -> None:
        """Learn from `dataset` from now on, starting with a new pass over it.

        Raises TypeError, ValueError or FileNotFoundError if rows lack columns that the algorithm reads, have text but
        there is no tokenizer, or are longer than the model's context.
        """
        before, self.rows = self.rows, self._encode(dataset)
        again = self._order if before is not None and before.fingerprint == self.rows.fingerprint else None
        number = 0 if again is None else again.next_pass(self.counters.updates, self.config.batch_size)
        self._order = RowOrder(len(self.rows), self.rng, self.counters.updates, number)

    def _encode(self, dataset: Any) -> Encoded:
        return encode_dataset(dataset, self.task, self.model, type(self).__name__, self._longest())

    def _longest(self) -> int:
        """Return the number of tokens that the algorithm adds to those of a row."""
        return 0

    def _most_completions(self) -> int:
        """Return how many completions are sampled at once: those of an update, or `AT_ONCE` if they are fewer."""
        return max(AT_ONCE, self.config.batch_size)

    def numbers(self, update: int) -> np.ndarray:
        """Return the rows (B,) int64 from which the update with this number learns."""
        assert self._order is not None
        return self._order.numbers(update, self.config.batch_size)

    def sample(self) -> Any:
        """Return the batch of the next update."""
        numbers = self.numbers(self.counters.updates)
        return self._own_batch(self.rows, self.ranks.own_rows(numbers), self.ranks.own_rows(unique_numbers(numbers)))

    def batch(self, rows: Any, numbers: np.ndarray) -> Any:
        """Return the batch of the rows with these `numbers`."""
        raise NotImplementedError

    def _own_batch(self, rows: Any, numbers: np.ndarray, streams: np.ndarray) -> Any:
        """Return this rank's batch. Algorithms that sample use `streams`, which are unique on all ranks, as the numbers
        of the rows' random streams."""
        batch: Callable[..., Any] = self.batch
        return batch(rows, numbers, streams) if self.task == "prompts" else batch(rows, numbers)

    # ---- passes over the model

    def _precision(self) -> str:
        """Return ``float32`` or ``bfloat16``."""
        return precision_of(self.config.precision, self.device)

    def cast(self) -> AbstractContextManager[Any]:
        """Return a context that sets the precision of passes over a model; trained weights stay float32."""
        return autocast(self.config.precision, self.device)

    def _row_length(self, sequences: Sequences) -> int | None:
        """Return the number of tokens of a packed row; None if sequences are not packed."""
        return int(sequences.lengths.max(initial=1)) if self.config.packing else None

    def score(self, sequences: Sequences, temperature: float = 1.0, **asked: bool) -> Scores:
        """Return differentiable scores of the scored tokens of `sequences`; `asked` is as for `LanguageModel.score`."""
        layout = self.model.layout(sequences, self._row_length(sequences))
        with self.cast(), self.model.learning():
            return self.model.score(layout, temperature, **asked)

    @torch.no_grad()
    def log_probs(
        self, sequences: Sequences, temperature: float = 1.0, reference: bool = False, n_parts: int | None = None
    ) -> torch.Tensor:
        """Return log-probabilities f32 (N,) of the scored tokens, without gradient, by the model or the `reference`.

        They are computed in `n_parts` parts, by default in `accumulation`, like the gradient.
        """
        log_probs = torch.empty(int(sequences.n_scored.sum()), dtype=torch.float32, device=self.device)
        separate = None if self.reference is None else self.reference.separate
        reader = self.model if not reference or separate is None else separate
        for rows in in_parts(len(sequences), self.config.accumulation if n_parts is None else n_parts):
            part, tokens = sequences.take(rows)
            layout = reader.layout(part, self._row_length(part))
            with self.cast():
                score = self.reference.score if reference else self.model.score  # type: ignore[union-attr]
                log_probs[send(tokens, self.device)] = score(layout, temperature).log_probs
        return log_probs

    # ---- completions

    def settings(self, **changed: Any) -> Settings:
        """Return the configuration's settings for completions, overridden by `changed` (see `settings_of`)."""
        return settings_of(self.config, changed, self.model.tokenizer, f"{type(self).__name__}.generate")

    def complete(
        self,
        prompts: Sequence[Any],
        numbers: Sequence[int] | np.ndarray,
        n: int,
        step: int,
        settings: Settings,
        seed: int,
        model: LanguageModel | None = None,
        context: int | None = None,
    ) -> Completions:
        """Sample `n` completions for each of `prompts` (P_i,), as `rlox.llm.sampling.sample`.

        By default they are sampled from the trained model, by the `sampler` if there is one. With `context`, each
        completion also ends where it and its prompt have that many tokens; others may be longer.
        """
        streams, most = unique_numbers(numbers), settings.max_new_tokens

        def draw(places: Sequence[int] | range, limit: int) -> Completions:
            own, some = replace(settings, max_new_tokens=limit), [prompts[i] for i in places]
            if model is None and self._served is not None:
                # A server's random numbers depend on a prompt's place among the others.
                return self._complete_there(some, n, step, own, seed if limit == most else Rng(seed, limit).key)
            with self.cast():
                chosen = [streams[i] for i in places]
                at_once = self._most_completions()
                return sample_in_parts(model or self.model, some, own, n, seed, step, chosen, at_once)

        room = [most if context is None else context - len(prompt) for prompt in prompts]
        return sample_within([max(1, min(most, left)) for left in room], n, draw)

    def _complete_there(self, prompts: Sequence[Any], n: int, step: int, settings: Settings, seed: int) -> Completions:
        """Sample completions with the `sampler`."""
        assert self._served is not None
        version = (self.counters.updates, self._n_loads)
        try:
            return self._served.complete(prompts, n, settings, seed, step, version)
        except ConnectionError as e:
            if self._trains:  # also during an evaluation: the last update's weights are worth keeping
                self.callbacks.on_collection_error(algorithm=self, error=e)
            raise

    def _context(self) -> int | None:
        """Return the most tokens of a sequence: the model's, or the `sampler`'s if that is smaller; None if unknown."""
        return self.model.context if self._served is None else self._served.context()

    def generate(self, prompts: Any, n: int = 1, *, seed: int | None = None, **settings: Any) -> list[list[str]]:
        """Complete prompts, without affecting training.

        Parameters
        ----------
        prompts
            One or several texts, or prompts in any form accepted by `train`.
        n : int
            Completions per prompt.
        seed : int, optional
            Determines the completions; by default 10_000 + the algorithm's own.
        **settings
            ``max_new_tokens``, ``temperature`` (0: always the most likely token), ``top_k``, ``top_p``, ``min_p`` and
            ``stop``, instead of the configuration's.

        Returns
        -------
        list of list of str
            `n` completions for each prompt, without special tokens; without a tokenizer, the ids as text.
        """
        where = f"{type(self).__name__}.generate"
        n, chosen = integer(where, "n", n, 1), self.settings(**settings)
        # If max_new_tokens was not given, each completion has as many tokens as fit.
        context = self._context() if settings.get("max_new_tokens") is None else None
        longest = chosen.max_new_tokens if context is None else 1
        rows = encode_dataset([prompts] if isinstance(prompts, str) else prompts, "prompts", self.model, where, longest)
        seed = 10_000 + self.seed if seed is None else seed
        with torch_threads(self._threads):
            drawn = self.complete(rows.prompts, range(len(rows)), n, 0, chosen, seed, context=context)
        texts = completions_of(rows, np.repeat(np.arange(len(rows)), n), drawn.ids, self.model)
        return [texts[i : i + n] for i in range(0, len(texts), n)]

    # ---- training

    def schedule_values(self, progress: float) -> dict[str, float]:
        c, steps = self.config, self.counters.schedule_steps
        if not steps:  # direct calls of `train_step` have no planned end
            return {"learning_rate": c.learning_rate}
        rising = min(1.0, (progress + 1.0 / steps) / c.warmup) if c.warmup else 1.0
        since = max(0.0, progress - c.warmup) / (1.0 - c.warmup)  # the schedule begins where the warm-up ends
        return {"learning_rate": rising * scheduled(c.learning_rate, c.learning_rate_schedule, since)}

    def follow_schedule(self) -> None:
        """Set the optimiser's learning rate to its scheduled value."""
        self.optimizer.learning_rate = self.schedule_values(self.counters.progress)["learning_rate"]

    def plan(
        self, n_updates: int | None = None, *, until: int | None = None, schedule_timesteps: int | None = None
    ) -> None:
        """Set the end of the training and of its schedules as `train` does, which then needs no arguments."""
        self._plan(n_updates, until, schedule_timesteps)

    def train(  # type: ignore[override]  # the first argument may be the data
        self,
        data: Any = None,
        n_epochs: int | None = None,
        *,
        n_updates: int | None = None,
        until: int | None = None,
        schedule_timesteps: int | None = None,
        prompts: Any = None,
        progress: bool = False,
        **unknown: Any,
    ) -> dict[str, float]:
        """Train for `n_updates` more updates, or for `n_epochs` passes over the rows.

        Without either, continue an interrupted training, or the one in progress when a checkpoint was saved, up to its
        planned end.

        Parameters
        ----------
        data : optional
            Rows to learn from: a tensor of token ids (N, P), a list of token ids (P_i,), texts, dicts, or a path. An
            integer is taken as `n_updates`.
        n_epochs : int, optional
            Passes over `data` (by default 1) or `dataset`; rows of the next pass fill the last update's batch.
        n_updates : int, optional
            Start a new training of this many updates.
        until, schedule_timesteps : int, optional
            As for `rlox.training.offline.OfflineAlgorithm.train`, in updates.
        prompts : optional
            Another name of `data`, for algorithms that learn from prompts.
        progress : bool
            As for `rlox.training.algorithm.Algorithm.train`.

        Returns
        -------
        dict
            The last metrics; see the algorithm.

        Raises
        ------
        FloatingPointError
            If a loss or a gradient is no longer finite.
        TypeError, ValueError
            If there are no rows to learn from, or the length is given twice; also as `OfflineAlgorithm.train`.
        """
        where = f"{type(self).__name__}.train"
        if prompts is not None:
            if data is not None or self.task != "prompts":
                other = "data, which is given" if data is not None else f"data: {self.name} learns from {self.task}"
                raise TypeError(f"{where}: prompts must be passed as {other}")
            data = prompts
        if isinstance(data, (int, np.integer)) and not isinstance(data, bool):
            if n_updates is not None:
                raise TypeError(f"{where}: n_updates must be given once, got {data} and {n_updates}")
            data, n_updates = None, int(data)
        if n_epochs is not None:
            if n_updates is not None or until is not None:
                raise TypeError(f"{where}: n_epochs must be left out with n_updates or until, got {shown(n_epochs)}")
            data = self.rows if data is None else data
        if data is not None:
            self.use(data)
            assert self.rows is not None
            if n_updates is None and until is None:
                n = 1 if n_epochs is None else integer(where, "n_epochs", n_epochs, 1)
                n_updates = -(-len(self.rows) * n // self.config.batch_size)
        return self._train(n_updates, until, schedule_timesteps, progress, unknown)

    def _prepare_training(self) -> None:
        if self.rows is None:
            raise ValueError(
                f"{type(self).__name__}.train: there must be rows to learn from; pass them to train, or "
                "dataset=… to the constructor"
            )
        if self.reference is not None:
            self.reference.require()
        if self._served is not None:
            self._served.require_training()
            prompts = [*self.rows.prompts, *(self.eval_rows or self.rows).prompts]
            self._served.start(max(map(len, prompts)) + self._longest())

    def train_step(self, *data: Any, **named: Any) -> dict[str, float]:
        """Take one update on the given rows. Returns its metrics. See the algorithm for the arguments."""
        if self._served is not None:
            self._served.require_training()
        batch = self._batch_of(*data, **named)
        with torch_threads(self._threads):
            tensors = {name: torch.as_tensor(x, device=self.device) for name, x in self.update(batch).items()}
            metrics = to_floats(tensors)
        self.counters.updates += 1
        require_finite(metrics, self)
        return metrics

    def _batch_of(self, *data: Any, **named: Any) -> Any:
        """Return the batch for `train_step`."""
        rows = self._encode(*data, **named)
        numbers = np.arange(len(rows))
        return self._own_batch(rows, numbers, numbers + (self.ranks.rank << 32))

    def follow_reference(self) -> bool:
        """Move the reference towards the policy if that is due after this update. Returns whether it was due."""
        every = self.config.ref_sync_every
        if every is None or self.reference is None or (self.counters.updates + 1) % every:
            return False
        self.reference.synchronise(self.config.ref_sync_share)
        return True

    def _compare_with_data(self) -> dict[str, float]:
        """Return metrics that compare the `sampler`, if there is one, with the model; an update compares the rows."""
        return {} if self._served is None else self._served.metrics()

    # ---- evaluation

    def scored(self, n_episodes: int = 20, seed: int | None = None, **options: Any) -> Evaluation:
        """Score the first `n_episodes` rows of `eval_dataset`, or of the dataset (see `row_scores`).

        Returns one number per row, where larger is better, and the lengths in tokens.
        """
        rows = self._require_rows()
        n_episodes = integer(f"{type(self).__name__}.scored", "n_episodes", n_episodes, 1)
        numbers = np.arange(min(n_episodes, len(rows)))
        seed = 10_000 + self.seed if seed is None else seed
        with torch_threads(self._threads):
            returns, lengths = self.row_scores(rows, numbers, seed)
        return Evaluation(np.asarray(returns, float), np.asarray(lengths, np.int64), seed, True)

    @property
    def rewarded(self) -> bool:
        """Whether completions are scored."""
        return False

    def _require_rows(self) -> Encoded:
        """Return the rows for evaluation; raise ValueError if there are none."""
        rows = self.rows if self.eval_rows is None else self.eval_rows
        if rows is None:
            raise ValueError(
                f"{type(self).__name__}: there must be rows to evaluate on; pass them, or dataset=… or eval_dataset=… "
                "to the constructor"
            )
        return rows

    def sampled(self, n_rows: int, n: int, seed: int) -> Scored:
        """Sample `n` completions of each of the first `n_rows` prompts of `scored`. Returns them with their rewards.

        Raises ValueError if there are no prompts or no reward.
        """
        raise ValueError(f"{type(self).__name__}.sampled: there must be a reward")

    def examples(self, n: int) -> list[tuple[Any, str, float | None]]:
        """Return completions of the first `n` prompts of `scored`: prompt, text, and reward or None.

        If there is a reward, completions are sampled, else they are generated at temperature 0.
        """
        if self.rewarded:
            scored = self.sampled(n, 1, 10_000 + self.seed)
            return list(zip(scored.prompts, scored.texts, scored.rewards.tolist(), strict=True))
        rows = self.rows if self.eval_rows is None else self.eval_rows
        if rows is None:
            return []
        numbers = range(min(n, len(rows)))
        prompts, settings = [rows.prompts[i] for i in numbers], self.settings(temperature=0.0)
        with torch_threads(self._threads):
            drawn = self.complete(prompts, numbers, 1, 0, settings, self.seed, context=self._context())
        texts = completions_of(rows, numbers, drawn.ids, self.model)
        return [(p, text, None) for p, text in zip(texts_of(rows, numbers, self.model), texts, strict=True)]

    def row_scores(self, rows: Any, numbers: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the model's score on each of the rows `numbers`, f64 (M,), and their lengths in tokens (M,)."""
        raise NotImplementedError

    def predict(self, obs: Any, deterministic: bool = True) -> Any:
        """Raise TypeError: a language model has no actions; `generate` completes prompts."""
        raise TypeError(f"{type(self).__name__}.predict: the model takes no observations; call generate(prompts)")

    # ---- checkpoints

    def _generators(self) -> dict[str, dict[str, int]]:
        return {self._stream.name.lower(): self.rng.get_state()}

    def _torch_generators(self) -> dict[str, np.ndarray]:
        return generator_states(self.device)  # dropout draws from them

    def _weights(self) -> dict[str, np.ndarray]:
        return weights(self.policy, self.ranks.full)

    def _load_weights(self, arrays: dict[str, np.ndarray], where: str) -> None:
        load_weights_(self.policy, arrays, where)
        self._n_loads += 1

    def _own_state(self) -> tuple[dict[str, Any], dict[str, dict[str, np.ndarray]]]:
        header, tensors = super()._own_state()
        rewards = isinstance(self.policy, RewardHead)
        info: dict[str, Any] = {"model": description(self.model, self._base, self.source, rewards)}
        if self.rows is not None and self._order is not None:
            info["rows"] = {"n": len(self.rows), "fingerprint": self.rows.fingerprint, **self._order.start()}
        if self.reference is not None:
            info["reference"] = "kept" if "reference" in self._parts else self.reference.kind
        return {**header, **info}, {**tensors, "tokenizer": tokenizer_state(self.model.tokenizer)}

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike,
        model: nn.Module | None = None,
        ref_model: nn.Module | None = None,
        callbacks: Iterable[Callback] | None = None,
        logger: LoggerCallback | None = None,
        device: str = "auto",
        *,
        tokenizer: Any = None,
        dataset: Any = None,
        **arguments: Any,
    ):
        """Restore an algorithm; `train` without arguments continues as if it had never stopped.

        Parameters
        ----------
        path : path
            The checkpoint.
        model : nn.Module, optional
            Required for a custom module, and for adapters whose model is no longer at its source; its weights are
            replaced.
        ref_model : nn.Module, optional
            Required, if the saved training had one, for everything that compares the model with it: further training,
            and evaluation with `DPO` or a `preference_fn`.
        tokenizer : optional
            By default the one in the checkpoint.
        dataset : optional
            Required for further training; it must contain the same rows.
        **arguments
            Further arguments of the class, including hyper-parameters, which override the saved values.

        Raises
        ------
        FileNotFoundError, ValueError
            See `rlox.checkpoint.load_checkpoint`; also for another algorithm's checkpoint, a model that does not fit or
            is not the one on which adapters were trained, or different rows.
        """
        arguments |= {"callbacks": callbacks, "logger": logger, "device": device, "dataset": dataset}
        return with_model(cls, path, model, ref_model, tokenizer, arguments)

    def _start_from(self, checkpoint: Checkpoint, where: str) -> None:
        require_same_meaning(self, checkpoint.header, where)
        self._load_weights(checkpoint.tensors["policy"], where)
        self._freeze_adapters()
        if self.reference is not None:
            self.reference.restart()

    def close(self) -> None:
        """Close the `sampler`, if there is one. The trained model remains usable."""
        if self._served is not None:
            self._served.close()
        super().close()

    def save_pretrained(self, folder: str | os.PathLike) -> None:
        """Write model and tokenizer in Hugging Face's format, with adapters merged into the weights.

        Raises ValueError for a custom module, and if the model is sharded over ranks.
        """
        if self.ranks.sharded:
            where = type(self).__name__
            raise ValueError(
                f"{where}.save_pretrained: the model must not be sharded over ranks; call save(path), and "
                f"{where}.from_checkpoint(path).save_pretrained(folder) in a single process"
            )
        save_pretrained(self.model, folder, type(self).__name__)
