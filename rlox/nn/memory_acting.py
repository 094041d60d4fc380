"""How a policy with a memory acts, and how whole sequences of its steps are evaluated.

PyTorch is imported where it is used, because native runs do not need it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from rlox.nn.modes import evaluating
from rlox.nn.modules import to_array

if TYPE_CHECKING:
    import torch

    from rlox.nn.batch import FrameStacks
    from rlox.nn.memory import Sequences

# Values and log-probabilities of a rollout are computed after it, in chunks of this many rows to bound memory.
_CHUNK = 8192
_IMAGE_CHUNK = 512


def chunk_rows(obs: torch.Tensor | FrameStacks) -> int:
    """Return the most rows of `obs` that are evaluated at once."""
    return _IMAGE_CHUNK if obs.dim() > 2 else _CHUNK


class Remembering:
    """The part of `rlox.nn.acting.MemoryPolicy` for a module of rlox with a memory (``state_dim`` > 0)."""

    module: Any
    device: str
    place: Any
    _inside: bool
    _require_logits: Any
    # Compute steps of actor and critic in `context`, with the weights from when it was entered; kept for the next one.
    _kernels: tuple[Any, Any] = (None, None)
    _packed = False  # whether they do

    @property
    def state_dim(self) -> int:
        """S, the numbers that the module carries from step to step in each environment."""
        return self.module.state_dim

    def initial(self, n: int) -> np.ndarray:
        """Return the states (N, S) f32 before an episode: zeros."""
        return np.zeros((n, self.state_dim), np.float32)

    @contextmanager
    def context(self) -> Iterator[None]:
        if self._inside:
            yield
            return
        with super().context():  # type: ignore[misc]  # of `ModulePolicy`
            self._pack()
            try:
                yield
            finally:
                self._packed = False

    def _pack(self) -> None:
        """Prepare the kernels, unless PyTorch must compute steps, as for images."""
        from rlox.nn.policies import ActorCritic

        module, kind = self.module, type(self.module)
        own = isinstance(module, ActorCritic) and (kind.follow, kind.features) == (
            ActorCritic.follow,
            ActorCritic.features,
        )
        if own and module.body is None and self.device == "cpu":
            actor, critic = self._kernels
            self._kernels = module.actor.pack(actor), module.critic.pack(critic)
            self._packed = None not in self._kernels

    def act(self, inputs: Any, noise: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return sampled actions and the next states; `noise` is an array, or a tensor on the device."""
        if not self._inside:
            with super().context():  # type: ignore[misc]  # for a single step, packing would not pay
                return self.act(inputs, noise)
        outputs, state = self._follow(inputs)
        if hasattr(self.module, "choose"):
            best = to_array(self.module.pick_mode(outputs))
            return self.module.choose(noise, lambda: best, inputs.mask), state
        return to_array(self.module.pick(outputs, self.place(noise))), state

    def mode(self, inputs: Any, noise: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return the most likely actions and the next states."""
        if not self._inside:
            with super().context():  # type: ignore[misc]
                return self.mode(inputs, noise)
        outputs, state = self._follow(inputs)
        return to_array(self.module.pick_mode(outputs)), state

    def _follow(self, inputs: Any) -> tuple[torch.Tensor, np.ndarray]:
        """Run a memory through one step. Return the actor's outputs, with masks applied, and the next states (N, S)."""
        from rlox.nn.policies import mask_outputs

        n = len(inputs.obs)
        state = self.initial(n) if inputs.state is None else inputs.state
        is_first = np.zeros(n, np.bool_) if inputs.is_first is None else inputs.is_first
        stepped = self._step_natively(inputs, state, is_first) if self._packed else None
        outputs, after = stepped or self._step(inputs, self.place(state), self.place(is_first))
        if inputs.mask is not None:
            if not hasattr(self.module, "choose"):
                self._require_logits()
            outputs = mask_outputs(outputs, self.place(inputs.mask))
        return outputs, to_array(after)

    def _step(self, inputs: Any, state: Any, is_first: Any) -> tuple[torch.Tensor, Any]:
        """Return the actor's outputs and the next states by PyTorch."""
        import torch

        from rlox.nn.memory import Sequences

        obs, sequences, module = self.place(inputs.obs), Sequences(state, is_first), self.module
        with torch.no_grad():
            if inputs.central is not None:
                outputs, _, after = module.follow(obs, sequences, self.place(inputs.central))
            elif getattr(module, "central", False):
                size = module.actor.state_dim
                own = sequences._replace(state=state[:, :size])
                outputs, acted = module.actor.follow(module.features(obs), own)
                after = torch.cat([acted, state[:, size:]], 1)
            else:
                outputs, *_, after = module.follow(obs, sequences)
        return outputs, after

    def _step_natively(self, inputs: Any, state: np.ndarray, is_first: np.ndarray) -> tuple[torch.Tensor, Any] | None:
        """Return the same by kernels; None if the arguments do not fit, which PyTorch reports."""
        import torch

        (actor, critic), obs = self._kernels, inputs.obs
        judged = inputs.central if self.module.central else obs
        for net, rows in ((actor, obs), (critic, judged)):
            if rows is not None and not (rows.shape[1:] == (net.n_inputs,) and rows.dtype == np.float32):
                return None
        after: Any = np.empty(state.shape, np.float32)
        outputs = actor.step(obs, state, is_first, after)
        if judged is None:
            after[:, actor.state_dim :] = state[:, actor.state_dim :]
        else:
            critic.step(judged, state, is_first, after, actor.state_dim)
        return torch.from_numpy(outputs), after

    def evaluate_sequences(
        self,
        obs: np.ndarray | FrameStacks,
        actions: np.ndarray,
        memories: np.ndarray,
        is_first: np.ndarray,
        after: np.ndarray,
        after_memories: np.ndarray,
        states: np.ndarray | None = None,
        masks: np.ndarray | None = None,
        running: np.ndarray | None = None,
    ) -> tuple[Any, Any, torch.Tensor, torch.Tensor, np.ndarray]:
        """Compute what `evaluate_actions` returns with a memory, whose actions have no log-probabilities before.

        The B rows are T steps of n sequences, step after step: `memories` (n, S) are the states of the memory before
        the first step, and `is_first` (B,) marks the first steps of episodes. `after_memories` (K, S) belong to the
        last K rows of `after`; if there are n more before them, these follow the last step of each sequence, with the
        states that the memory has then. With `running` (B,), only those rows are steps: `actions`, `masks` and the
        results have only these.
        """
        import torch

        from rlox.nn.memory import Sequences
        from rlox.nn.policies import mask_outputs

        rows, taken, judged, module = self.place(obs), self.place(actions), self.place(states), self.module

        def follow(part: slice, sequences: Sequences) -> tuple[torch.Tensor, ...]:
            return module.follow(rows[part], sequences, None if judged is None else judged[part])

        with torch.no_grad(), evaluating(module):
            whole = Sequences(self.place(memories), self.place(is_first), self.place(running))
            outputs, values, memory = _run_in_parts(follow, whole, chunk_rows(rows))
            if masks is not None:
                outputs = mask_outputs(outputs, self.place(masks))
            log_probs = module.distribution(outputs, taken)[0]
            ahead = torch.zeros(0)
            if len(after):
                reached = self.place(after)
                reached = reached if states is not None else module.features(reached)
                at_start = torch.zeros(len(after), dtype=torch.bool, device=self.device)
                held = self.place(after_memories)
                held = held if len(held) == len(after) else torch.cat([memory, held])
                own = held[:, module.actor.state_dim :]
                ahead, _ = module.critic.follow(reached, Sequences(own, at_start))
        return rows, taken, log_probs, values, ahead.reshape(-1).cpu().numpy()

    def sequence_log_probs(
        self,
        obs: Any,
        actions: Any,
        memories: np.ndarray,
        is_first: np.ndarray,
        masks: np.ndarray | None = None,
    ) -> torch.Tensor:
        """Return what `log_probs` returns with a memory; arguments as in `evaluate_sequences`."""
        import torch

        from rlox.nn.memory import Sequences
        from rlox.nn.policies import mask_outputs

        rows, taken, module = self.place(obs), self.place(actions), self.module

        def follow(part: slice, sequences: Sequences) -> tuple[torch.Tensor, ...]:
            return module.actor.follow(module.features(rows[part]), sequences)

        with torch.no_grad(), evaluating(module):
            whole = Sequences(self.place(memories[:, : module.actor.state_dim]), self.place(is_first))
            outputs, _ = _run_in_parts(follow, whole, chunk_rows(rows))
            if masks is not None:
                outputs = mask_outputs(outputs, self.place(masks))
            return module.distribution(outputs, taken)[0].float()


def _run_in_parts(
    follow: Callable[[slice, Sequences], tuple[torch.Tensor, ...]], sequences: Sequences, most: int
) -> tuple[torch.Tensor, ...]:
    """Run ``follow(rows, sequences) -> (…, state)`` through parts of whole steps, of about `most` rows each.

    Returns its results, joined, and the state after the last step.
    """
    import torch

    state, n, results = sequences.state, len(sequences.state), []
    rows = max(1, most // n) * n
    for start in range(0, len(sequences.is_first), rows):
        part = slice(start, start + rows)
        running = None if sequences.running is None else sequences.running[part]
        *outputs, state = follow(
            part, sequences._replace(state=state, is_first=sequences.is_first[part], running=running)
        )
        results.append(outputs)
    return *map(torch.cat, zip(*results, strict=True)), state
