"""One interface to causal language models: Hugging Face models, and any module with ``forward(ids) -> logits``."""

from __future__ import annotations

import contextlib
import copy
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from rlox.config import shown
from rlox.llm.models.fused import fuse_parts
from rlox.llm.models.masks import mask_packed, takes_final_masks, without_masks
from rlox.llm.models.token_scores import token_scores
from rlox.llm.tokens import Layout, Sequences

_DROPOUT = ("attention_dropout", "attn_dropout", "dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop")

# Tokens times parameters that another pass over the model must save to be worthwhile.
_WORTH = 2e8
_DECODED_BEFORE = 8  # tokens before others that are decoded with them


class Scores(NamedTuple):
    """A model's log-probabilities and entropies of N scored tokens, f32 (N,) each."""

    log_probs: torch.Tensor
    entropies: torch.Tensor | None  # of each token's distribution, in nats; None if not requested


class LanguageModel:
    """A causal language model and its tokenizer.

    A Hugging Face model is recognised by its configuration and its ``attention_mask``. For every other module,
    ``forward(ids)`` must return logits (B, T, V) in which each column depends only on the columns up to it.

    Dropout is always off: probability ratios are only defined if the policy is the same in every pass.

    Parameters
    ----------
    module : nn.Module
        The model; a peft model counts as a Hugging Face model.
    tokenizer : optional
        A Hugging Face tokenizer; without one, prompts are token ids.
    eos_token_id : int or list of int, optional
        Ids that end a sequence; by default those of the model's generation settings, or the tokenizer's.
    where : str
        Name of the caller that the model was passed to, for messages.

    Attributes
    ----------
    hugging_face : bool
        Whether it accepts masks, positions and a cache.
    cache_name : str
        Keyword of the cache in the model's forward, and its name in the result.
    eos : tuple of int
        Ids that end a sequence; may be empty.
    pad : int
        Id of padding; never seen by the model.
    context : int or None
        Maximum number of tokens of a sequence; None if the model does not specify it.
    size : int
        Number of parameters.
    native : bool
        Whether the native decoder, if it supports the module, may replace it for sampling.
    cached : bool or None
        Whether sampling uses the model's cache; None until the first sample, which finds out.
    sample_cache : str
        How keys and values are stored while completions are sampled: ``static``, in memory of fixed size, so that a
        GPU replays the work of each token as one graph; ``dynamic``, in memory that grows; ``auto``: ``static`` on a
        GPU.
    static : bool or None
        Whether the model can be sampled with a static cache; None until that is tried.
    """

    def __init__(
        self,
        module: nn.Module,
        tokenizer: Any = None,
        eos_token_id: int | Iterable[int] | None = None,
        where: str = "LanguageModel",
    ) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"{where}: model must be a torch.nn.Module, got {shown(module)}")
        if tokenizer is not None and not (callable(tokenizer) and hasattr(tokenizer, "decode")):
            raise TypeError(f"{where}: tokenizer must be one of Hugging Face's, got {shown(tokenizer)}")
        self.module, self.tokenizer, self.where = module, tokenizer, where
        self.native = True
        self.cached: bool | None = None
        self.sample_cache = "auto"
        self.static: bool | None = None
        self.stream: Any = None  # of the graphs of sampled tokens: each stream has a workspace of its own
        self.checkpointed = False  # whether activations are recomputed for the gradient
        self._recomputed: list[nn.Module] = []  # the modules whose activations are recomputed
        self.one_pass = False  # whether a gradient must involve only a single pass over the module
        base = self.base
        self.kind = type(base).__name__
        parameters = inspect.signature(base.forward).parameters
        self.hugging_face = hasattr(base, "config") and "attention_mask" in parameters
        # transformers 5.24 renamed it and warns about the old name.
        self.cache_name = "cache" if "cache" in parameters else "past_key_values"
        self.config = getattr(base, "config", None) if self.hugging_face else None
        if self.hugging_face and getattr(self.config, "is_encoder_decoder", False):
            raise ValueError(f"{where}: model must be a causal one, got the encoder-decoder {type(base).__name__}")
        self.eos = self._eos(eos_token_id)
        pad = getattr(tokenizer, "pad_token_id", None)
        self.pad = int(pad) if pad is not None else (self.eos[0] if self.eos else 0)
        limits = (getattr(self.config, name, None) for name in ("max_position_embeddings", "n_positions"))
        self.context: int | None = next((limit for limit in limits if limit is not None), None)
        self.size = sum(p.numel() for p in module.parameters())
        self._without_dropout()

    @property
    def base(self) -> nn.Module:
        """The model itself, without the wrapper of peft."""
        return self.module.get_base_model() if hasattr(self.module, "get_base_model") else self.module

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def vocabulary(self) -> int | None:
        """Number of token ids; None if only a forward pass would show it."""
        return None if self.config is None else self.config.get_text_config().vocab_size

    def _eos(self, chosen: int | Iterable[int] | None) -> tuple[int, ...]:
        generation = getattr(self.base, "generation_config", None) if self.hugging_face else None
        sources = (getattr(x, "eos_token_id", None) for x in (generation, self.tokenizer, self.config))
        eos: Any = next((x for x in (chosen, *sources) if x is not None), ())
        ids = tuple(eos) if isinstance(eos, Iterable) else (eos,)
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise TypeError(f"{self.where}: eos_token_id must be a token id, or several, got {shown(eos)}")
        own = getattr(self.tokenizer, "eos_token_id", None)
        # Completions that the tokenizer encodes end with its own id.
        return ids if chosen is not None or own is None or own in ids else (*ids, own)

    def _without_dropout(self) -> None:
        self._evaluate()
        for part in self.module.modules():
            for name in _DROPOUT:
                if isinstance(getattr(part, name, None), float):
                    setattr(part, name, 0.0)
            if isinstance(part, nn.Dropout):
                part.p = 0.0

    def checkpoint_activations(self) -> None:
        """Recompute activations for the gradient instead of keeping them; raises a ValueError for a custom module."""
        if not hasattr(self.base, "gradient_checkpointing_enable"):
            raise ValueError(
                f"{self.where}: gradient_checkpointing must be false for a module of your own, got true; call "
                "torch.utils.checkpoint in its forward"
            )
        base: Any = self.base
        if hasattr(base, "activation_checkpointing_enable"):  # the name since transformers 5.24
            base.activation_checkpointing_enable({"use_reentrant": False})
        else:
            base.gradient_checkpointing_enable({"use_reentrant": False})
        base.enable_input_require_grads()
        from transformers.modeling_layers import GradientCheckpointingLayer

        marked: list[Any] = [part for part in base.modules() if getattr(part, "gradient_checkpointing", False)]
        # Models of older code have no such layers, and checkpoint in a module that contains the layers.
        layers = [part for part in marked if isinstance(part, GradientCheckpointingLayer)] or marked
        for layer in layers:
            layer._gradient_checkpointing_func = partial(_recompute, layer, layer._gradient_checkpointing_func)
        self.checkpointed, self._recomputed = True, layers

    @contextlib.contextmanager
    def learning(self) -> Iterator[None]:
        """Use this context around passes that are differentiated.

        If activations are checkpointed, it sets the training mode of the layers alone, because Hugging Face's layers
        checkpoint in no other mode. What they compute, they compute in evaluation mode, without dropout.
        """
        self.evaluation_mode()
        for layer in self._recomputed:
            layer.training = True
        try:
            yield
        finally:
            for layer in self._recomputed:
                layer.training = False

    def warn_of_own_generate(self) -> None:
        """Warn that a custom module's ``generate`` is not called to sample completions."""
        if not self.hugging_face and callable(getattr(self.module, "generate", None)):
            warnings.warn(
                f"{self.where}: {self.kind}.generate is not called: completions are sampled from the logits of "
                "forward, so that a seed determines them and their probabilities are known. A generate that takes the "
                "likeliest token would return equal completions, which teach nothing",
                stacklevel=4,
            )

    def evaluation_mode(self) -> None:
        """Switch dropout off again if the user's code has called ``train()`` on the module meanwhile."""
        if self.module.training:
            self._evaluate()

    def _evaluate(self) -> None:
        self.module.eval()
        for part in self.module.modules():
            if isinstance(part, nn.RNNBase):
                part.train()  # cuDNN differentiates it in this mode only; without dropout both compute the same

    @property
    def attention(self) -> str:
        """Name of the attention of a Hugging Face model, such as ``sdpa``."""
        return "none" if self.config is None else str(self.config.get_text_config()._attn_implementation)

    @property
    def needs_one_row(self) -> bool:
        """Whether packed sequences must form a single row: FlashAttention finds boundaries in no other batch."""
        return "flash" in self.attention

    def layout(self, sequences: Sequences, max_length: int | None = None) -> Layout:
        """Return `sequences` as this model reads them; with `max_length`, pack them into rows of that many tokens.

        With FlashAttention, they are packed into a single row. Raises ValueError if a custom module would have to read
        packed rows, which need positions.
        """
        if max_length is None:
            return sequences.padded().to(self.device)
        if not self.hugging_face:
            raise ValueError(
                f"{self.where}: packing must be false for a module of your own, whose forward takes no positions, "
                "got true"
            )
        length = int(sequences.lengths.sum()) if self.needs_one_row else max_length
        return sequences.packed(length).to(self.device)

    def logits(self, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits (R, C, V) of the last columns, and which of these columns (N,) predict the scored tokens."""
        self.evaluation_mode()
        if self.hugging_face:
            # A mask, or an unnecessary cache, would let sequences in the same row attend to each other.
            width, first = layout.ids.shape[1], layout.first_column
            # Activations are recomputed later, outside `fused`, and must then be computed by the same functions.
            with contextlib.ExitStack() as stack:
                if not self.checkpointed:
                    stack.enter_context(fuse_parts(self.module, self.config))
                cache, mask = self._beginnings(layout), None
                if layout.positions is not None and takes_final_masks(self):
                    mask = mask_packed(layout.positions)
                elif cache is None:
                    stack.enter_context(without_masks(self))
                whole = self.module(
                    input_ids=layout.ids if cache is None else layout.ids[:, first:],
                    attention_mask=mask,
                    position_ids=layout.positions,
                    use_cache=cache is not None,
                    logits_to_keep=width - first,
                    **{self.cache_name: cache},
                ).logits
            return whole, layout.column - (width - whole.shape[1])
        return self.bare_logits(layout.ids), layout.column

    def _beginnings(self, layout: Layout) -> Any:
        """Return a cache of the columns before all scored columns, computed once for rows with the same beginning.

        Returns None if that costs more than it saves.
        """
        first, rows = layout.first_column, len(layout.ids)
        if layout.positions is not None or self.checkpointed or rows * first * self.size < _WORTH:
            return None
        if self.one_pass and torch.is_grad_enabled():
            return None
        from transformers.cache_utils import DynamicCache, DynamicLayer

        cache: Any = DynamicCache(config=self.config)
        if not all(type(layer) is DynamicLayer for layer in cache.layers):
            return None
        unique, row = torch.unique(layout.ids[:, :first], dim=0, return_inverse=True)
        if (rows - len(unique)) * first * self.size < _WORTH:
            return None
        self.module(input_ids=unique, use_cache=True, logits_to_keep=1, **{self.cache_name: cache})
        cache.batch_select_indices(row)
        return cache

    def blank(self) -> torch.Tensor:
        """Run a forward pass on one token, for a rank that only takes part in another rank's pass."""
        return self.row_logits(torch.zeros((1, 1), dtype=torch.int64, device=self.device))

    def row_logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits (B, T, V) of whole rows of ids (B, T)."""
        return self.module(input_ids=ids, use_cache=False).logits if self.hugging_face else self.bare_logits(ids)

    def bare_logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits (B, T, V) of a custom module; raises a TypeError or ValueError for anything else."""
        try:
            logits = self.module(ids)
        except IndexError as e:
            raise ValueError(
                f"{self.where}: model must accept token ids up to {int(ids.max())}, but raised: {e}"
            ) from e
        if not isinstance(logits, torch.Tensor):
            raise TypeError(f"{self.where}: model must return logits (B, T, V), got {shown(type(logits).__name__)}")
        if logits.ndim != 3 or logits.shape[:2] != ids.shape:
            raise ValueError(
                f"{self.where}: model must return logits ({ids.shape[0]}, {ids.shape[1]}, V), got {tuple(logits.shape)}"
            )
        return logits

    def score(
        self, layout: Layout, temperature: float = 1.0, entropy: bool = False, entropy_gradient: bool = False
    ) -> Scores:
        """Return the log-probabilities of the scored tokens at a temperature.

        With `entropy`, also return the entropies of their distributions. Entropies have no gradient unless
        `entropy_gradient` is set.
        """
        whole, column = self.logits(layout)
        asked = (temperature, entropy, entropy_gradient)
        return Scores(*token_scores(whole, layout.row, column, layout.targets, *asked))

    def decode(self, ids: Any, after: Any = ()) -> str:
        """Return the text of token ids, without special tokens; without a tokenizer, the ids themselves as text.

        `after` contains the ids of the text that they continue: some tokenizers leave out a space at the start of a
        text.
        """
        listed = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        if self.tokenizer is None:
            return " ".join(map(str, listed))
        text = self.tokenizer.decode(listed, skip_special_tokens=True)
        last = [int(i) for i in after[-_DECODED_BEFORE:]]
        before = self.tokenizer.decode(last, skip_special_tokens=True) if last else ""
        whole = self.tokenizer.decode([*last, *listed], skip_special_tokens=True) if before else ""
        return whole[len(before) :] if before and whole.startswith(before) else text

    def frozen_copy(self) -> LanguageModel:
        """Return a copy that is never trained, for example a reference."""
        module = copy.deepcopy(self.module).requires_grad_(False)
        return LanguageModel(module, self.tokenizer, self.eos, self.where)


def _recompute(layer: nn.Module, checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any) -> Any:
    """Call `checkpoint`, which keeps the arguments of `function` instead of its activations, without dropout."""

    def run(*inputs: Any) -> Any:
        before, layer.training = layer.training, False
        try:
            return function(*inputs)
        finally:
            layer.training = before

    return checkpoint(run, *args)
