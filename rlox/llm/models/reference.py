"""The frozen reference model that a policy is compared with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from rlox.config import shown
from rlox.llm.models.adapters import FrozenAdapters, fingerprint
from rlox.llm.models.language import LanguageModel, Scores
from rlox.llm.tokens import Layout


class Reference:
    """A frozen language model: a module of the user, or the policy at the start of the training.

    The latter is the policy without its adapters if they are new, with a frozen copy of its adapters if they are not,
    and a copy of the policy if it has none.

    Attributes
    ----------
    own_module : nn.Module or None
        The copy of a policy, if there is one. It must be saved, because nobody else can provide it again.
    frozen : FrozenAdapters or None
        The copy of adapters, if there is one, for which the same holds.
    lost : bool
        Whether a checkpoint was trained with a module of the user that was not passed again.
    fingerprint : str
        Hash of the weights of a user's module; else empty.
    """

    def __init__(
        self, policy: LanguageModel, ref_model: nn.Module | None, adapters: bool, device: torch.device, where: str
    ) -> None:
        """`adapters`: whether `policy` will be trained with adapters, so that it need not be copied."""
        if ref_model is not None and not isinstance(ref_model, nn.Module):
            raise TypeError(f"{where}: ref_model must be a torch.nn.Module, or left out, got {shown(ref_model)}")
        self._policy = policy
        self.own_module: nn.Module | None = None
        self.frozen: FrozenAdapters | None = None
        self._spare: FrozenAdapters | None = None
        self.lost, self.fingerprint = False, ""
        self._switched = ref_model is None and (adapters or hasattr(policy.module, "disable_adapter"))
        if self._switched:
            self._model = policy
        elif ref_model is None:
            self._model = policy.frozen_copy()
            self.own_module = self._model.module
        else:
            ref_model.to(device).requires_grad_(False)
            self.fingerprint = fingerprint(ref_model)
            self._model = LanguageModel(ref_model, policy.tokenizer, policy.eos, f"{where}: ref_model")
            ours, theirs = policy.vocabulary, self._model.vocabulary
            if ours is not None and theirs is not None and ours != theirs:
                raise ValueError(f"{where}: ref_model must have the model's vocabulary of {ours} ids, got {theirs}")

    @property
    def kind(self) -> str:
        """``switched``: adapters are switched off, or a copy of them is used; ``copy``: a copy of the policy;
        ``given``: passed by the user, or must be."""
        if self.lost:
            return "given"
        return "switched" if self._switched else "given" if self.own_module is None else "copy"

    @property
    def separate(self) -> LanguageModel | None:
        """The reference, or None if it is the policy with other adapters or without them."""
        return None if self._switched else self._model

    def changing(self, moves: bool) -> nn.Module | None:
        """Return the module that a checkpoint must store: the copy, or the user's module if it `moves`; else None.

        Raises ValueError if it must move and cannot.
        """
        if moves:
            self._require_movable()
        # In f32, like the policy that it moves towards.
        return self._model.module.float() if moves and not self._switched else self.own_module

    def require(self) -> None:
        """Raise a ValueError if the reference is lost."""
        if self.lost:
            raise ValueError(
                f"{self._policy.where}: its checkpoint was trained with a ref_model, which it does not contain; pass "
                "ref_model=… to from_checkpoint"
            )

    def _require_movable(self) -> None:
        """Raise a ValueError if `synchronise` is impossible."""
        where = f"{self._policy.where}: ref_sync_every must be null"
        if self._switched:
            raise ValueError(f"{where} with adapters: the reference shares the weights under them with the policy")
        ours = dict(self._policy.module.named_parameters())
        for name, p in self._model.module.named_parameters():
            if name not in ours or ours[name].shape != p.shape:
                raise ValueError(f"{where} unless ref_model has the model's parameters, got another {name}")

    def attach(self, policy: LanguageModel) -> None:
        """Use `policy`, which now has adapters, as the model whose adapters are switched off."""
        if self._switched:
            self._policy = self._model = policy

    def prepare_adapters(self, full: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Create the copy that `freeze_adapters` will use, since a sharded model cannot get one later."""
        if self._switched:
            self._spare = FrozenAdapters(self._policy.module, full)

    def freeze_adapters(self, full: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Use a copy of the policy's present adapters as the reference; `full` gathers a tensor that is sharded.

        If peft cannot hold a second set of these adapters, as when they train biases of the model, copy the policy.
        """
        try:
            self.frozen = FrozenAdapters(self._policy.module, full) if self._spare is None else self._spare
        except ValueError:
            self._switched, self._model = False, self._policy.frozen_copy()
            self.own_module = self._model.module

    @torch.no_grad()
    def restart(self) -> None:
        """Make the policy as it is now the reference, unless the user has passed one."""
        if self.own_module is not None:
            theirs = dict(_tensors(self._policy.module))
            for name, tensor in _tensors(self.own_module):
                tensor.copy_(theirs[name])
        elif self.frozen is not None:
            self.frozen.follow_()

    @contextlib.contextmanager
    def in_place(self) -> Iterator[LanguageModel]:
        """Yield the reference as a model. The policy must not be used meanwhile: its adapters may be switched off."""
        self.require()
        module: Any = self._policy.module
        with (
            self.frozen.in_place()
            if self.frozen is not None
            else module.disable_adapter()
            if self._switched
            else contextlib.nullcontext()
        ):
            yield self._model

    def score(self, layout: Layout, temperature: float = 1.0) -> Scores:
        """Score tokens with the reference; see `LanguageModel.score`."""
        with self.in_place() as model:
            return model.score(layout, temperature)

    @torch.no_grad()
    def synchronise(self, share: float) -> None:
        """Move a `share` of the way to the policy (TR-DPO, Gorbatovski et al. 2024, arXiv:2404.09656)."""
        theirs = dict(self._policy.module.named_parameters())
        for name, p in self._model.module.named_parameters():
            p.lerp_(theirs[name].to(p.dtype), share)


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


class ReferenceCache:
    """The reference's log-probabilities of the pairs of a dataset, (2, N) f32; NaN where they are not computed yet.

    `reference` is the fingerprint of the reference if it is not in the checkpoint, else empty.
    """

    def __init__(self, reference: str) -> None:
        self.values, self._reference = np.empty((2, 0), np.float32), np.frombuffer(reference.encode(), np.uint8)

    def reset(self, n: int) -> None:
        """Start with `n` unknown pairs."""
        self.values = np.full((2, n), np.nan, np.float32)

    def forget(self) -> None:
        """Mark all pairs as unknown, since the reference has changed."""
        self.values.fill(np.nan)

    def get(self, numbers: np.ndarray) -> np.ndarray | None:
        """Return the values of the pairs `numbers` (B,), or None unless all are known."""
        values = self.values[:, numbers]
        return None if np.isnan(values).any() else values

    def put(self, numbers: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Store `values` (2, B) of the pairs that were unknown, and return the stored values of all `numbers`.

        Known values are kept, because the last bits of a pair may differ if it is computed again in another batch.
        """
        known = self.values[:, numbers]
        self.values[:, numbers] = np.where(np.isnan(known), values, known)
        return self.values[:, numbers]

    def state(self) -> dict[str, np.ndarray]:
        return {"values": self.values, "reference": self._reference}

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Restore the result of `state`, unless it is of another reference. Without a dataset, as when the policy only
        acts, nothing is restored."""
        # Older checkpoints do not say which module the user had passed, which then reads the pairs again.
        if not np.array_equal(state.get("reference", np.empty(0, np.uint8)), self._reference):
            return
        if self.values.size:
            if state["values"].shape != self.values.shape:
                raise ValueError(
                    f"reference_log_probs must have shape {self.values.shape}, got {state['values'].shape}"
                )
            self.values = state["values"].astype(np.float32)
