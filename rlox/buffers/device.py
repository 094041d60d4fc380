"""Replay memories on a device: rows, draws and priorities are tensors, and nothing waits for the host.

They draw the same rows for a seed as the memories of `rlox.kernels.buffers`, and their states are interchangeable with
those. New rows are collected on the host and go to the device in one copy when they are needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rlox.envs.tensor.philox import as_signed, make_multipliers, make_round_keys, philox
from rlox.envs.tensor.sums import cumulative_sums
from rlox.kernels.buffers.prioritized import PrioritizedReplayBuffer
from rlox.kernels.buffers.replay import ReplayBuffer
from rlox.kernels.rng import Rng
from rlox.nn.transfers import upload

# The most transitions for which a draw takes one 32-bit word, as in the kernels.
MOST_ROWS = 1 << 24
_PENDING = 256  # rows on the host before they are sent
_FAN_OUT = 128  # children of a node of the tree of priorities
_UNIT = 2.0**-53
_BELOW_ONE = 1.0 - 2.0**-52
_LEAF_EXPONENTS = (-87.3, 88.7)  # float32's normal range, in e-folds


class DeviceReplayBuffer:
    """`rlox.ReplayBuffer` on a device, for observations that are vectors.

    Parameters
    ----------
    capacity, obs_dim, act_dim, n_envs, n_step, gamma, mask_dim
        As in `rlox.ReplayBuffer`; at most 2**24 transitions.
    device : str or torch.device
        Where the rows are.

    Attributes
    ----------
    rows : Tensor (capacity, 2 D + M / 4 + A + 4) f32
        Observation, next observation, its mask (M bytes in whole words, if there are masks), action, reward,
        terminated, truncated, and whether the next transition of the same environment does not continue this one (see
        `cut`). Row i % capacity is that of transition i.
    extent : Tensor (3,) int64
        Transitions ever pushed, those stored, and the row of draw 0; of the rows that have been sent.
    """

    Host: Any = ReplayBuffer  # the memory whose draws and state it shares
    domain = 0x5245_504C  # of its draws
    words_per_row = 1
    saves_news = True  # for `rlox.buffers.files`: `get_state` can leave out old rows

    def __init__(
        self,
        capacity: int,
        obs_dim: int,
        act_dim: int,
        *,
        n_envs: int = 1,
        n_step: int = 1,
        gamma: float = 0.99,
        mask_dim: int = 0,
        device: str | torch.device = "cuda",
        **weighting: Any,
    ):
        if capacity > MOST_ROWS:
            raise ValueError(f"{type(self).__name__}: capacity must be at most {MOST_ROWS}, got {capacity}")
        self._config = {
            "capacity": capacity, "obs_dim": obs_dim, "act_dim": act_dim, "n_envs": n_envs, "n_step": n_step,
            "gamma": gamma, "mask_dim": mask_dim, **weighting,
        }  # fmt: skip
        self._empty = self.Host(**self._config)  # checks the arguments; its state is the pattern of ours
        self.capacity, self.obs_dim, self.act_dim = capacity, obs_dim, act_dim
        self.n_envs, self.n_step, self.gamma, self.mask_dim = n_envs, n_step, gamma, mask_dim
        self.device = torch.device(device)
        self._action_at = 2 * obs_dim + -(-mask_dim // 4)
        self.width = self._action_at + act_dim + 4
        self.rows = torch.zeros((capacity, self.width), dtype=torch.float32, device=device)
        self.extent = torch.zeros(3, dtype=torch.int64, device=device)
        self._multipliers = make_multipliers(device)
        self._pending = np.zeros((max(_PENDING, n_envs), self.width), np.float32)
        self.clear()

    def clear(self) -> None:
        """Remove all transitions."""
        self.n_pushed = self._size = self._n_pending = 0
        self._seams: list[int] = []  # numbers of the transitions before which `cut` was called
        self.extent.zero_()

    def __len__(self) -> int:
        return self._size

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.rows.nbytes

    # ---- pushing

    def push_batch(
        self,
        obs: np.ndarray,
        next_obs: np.ndarray,
        actions: np.ndarray,
        rewards: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        *,
        next_masks: np.ndarray | None = None,
    ) -> None:
        """Append N transitions, row i from environment i; see `rlox.buffers.Buffer`."""
        n, d, pending = len(rewards), self.obs_dim, self._pending
        if n % self.n_envs:
            raise ValueError(
                f"{type(self).__name__}.push_batch: rewards must have a row for each of {self.n_envs} environments, "
                f"got {n}"
            )
        if self._n_pending + n > len(pending):
            self.flush()
        if n > len(pending):
            pending = self._pending = np.zeros((n, self.width), np.float32)
        rows = pending[self._n_pending : self._n_pending + n]
        rows[:, :d], rows[:, d : 2 * d] = obs.reshape(n, d), next_obs.reshape(n, d)
        if next_masks is not None:
            rows[:, 2 * d : self._action_at].view(np.uint8)[:, : self.mask_dim] = next_masks
        tail = rows[:, self._action_at :]
        tail[:, : self.act_dim] = actions.reshape(n, -1)
        tail[:, self.act_dim], tail[:, -3], tail[:, -2], tail[:, -1] = rewards, terminated, truncated, 0.0
        self._n_pending += n
        self.n_pushed += n
        self._size = min(self.capacity, self._size + n)

    def cut(self) -> None:
        """Mark that the next transitions do not continue the last ones; see `rlox.ReplayBuffer.cut`."""
        if self.n_pushed and (not self._seams or self._seams[-1] != self.n_pushed):
            self._seams.append(self.n_pushed)
        oldest = self.n_pushed - self._size
        self._seams = [seam for seam in self._seams if seam > oldest]
        if self.n_step == 1 or not self._size:
            return
        self.flush()
        self.rows[self._slots_of(self.n_pushed - min(self.n_envs, self._size), self.n_pushed), -1] = 1.0

    def _slots_of(self, first: int, end: int) -> torch.Tensor:
        """Return the rows of transitions `first` to `end`."""
        return torch.arange(first, end, device=self.device) % self.capacity

    @property
    def n_pending(self) -> int:
        """Rows that are still on the host."""
        return self._n_pending

    def take_pending(self) -> np.ndarray:
        """Return the rows that are still on the host, a view (n, W), for the caller to pass to `absorb`."""
        rows = self._pending[: self._n_pending]
        self._n_pending = 0
        return rows

    def host_extent(self) -> np.ndarray:
        """Return what `extent` is once all rows have been sent, (3,) int64."""
        # In a full ring, draw 0 is row 0; before, it is the oldest transition.
        start = 0 if self._size == self.capacity else (self.n_pushed - self._size) % self.capacity
        return np.array([self.n_pushed, self._size, start])

    def newest_slots(self, n: int) -> np.ndarray:
        """Return the rows of the newest `n` transitions, (n,) int64."""
        return np.arange(self.n_pushed - n, self.n_pushed) % self.capacity

    def flush(self) -> None:
        """Send the rows that are still on the host."""
        n = min(self._n_pending, self.capacity)
        if not self._n_pending:
            return
        rows = self._pending[self._n_pending - n : self._n_pending]
        self._n_pending = 0
        inputs = {"extent": self.host_extent(), "slots": self.newest_slots(n), "rows": rows}
        sent = upload(inputs, self.device)
        self.extent.copy_(sent["extent"])
        self.absorb(sent["rows"], sent["slots"])

    def absorb(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Store `rows` (n, W) at `slots` (n,), both on the device. They are the newest, and `extent` counts them."""
        self.rows.index_copy_(0, slots, rows)

    # ---- sampling

    def sample(self, batch_size: int, seed: int) -> Mapping[str, torch.Tensor]:
        """Draw `batch_size` transitions, the same as the host's memory, as tensors on the device.

        Keys as in `rlox.buffers.Buffer`; ``terminated`` and ``truncated`` are f32.

        Raises
        ------
        ValueError
            If the memory is empty.
        """
        if not self._size:
            raise ValueError(
                f"{type(self).__name__}.sample: the buffer must hold a transition, got an empty one; push first"
            )
        self.flush()
        keys = make_round_keys(torch.tensor([as_signed(Rng(seed).key)], device="cpu")).to(self.device)
        n = batch_size * self.words_per_row
        counters = torch.arange(-(-n // 4), device=self.device)
        even, odd = philox(keys, self._multipliers, counters, self.domain)
        return self.draw(torch.stack([even, odd]).permute(2, 1, 0).reshape(-1)[:n])

    def draw(self, words: torch.Tensor, beta: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Return the transitions that the random `words` (B * words_per_row,) int64 choose, as `sample`."""
        return self.gather(self._choose(words))

    def _choose(self, words: torch.Tensor) -> torch.Tensor:
        """Return the rows that random words choose, (B,) int64."""
        _, size, start = self.extent.unbind()
        return (start + (words * size >> 32)) % self.capacity

    def gather(self, slots: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the transitions in the rows `slots` (B,), with n-step returns if there are any."""
        d = self.obs_dim
        rows = ends = self.rows.index_select(0, slots)
        batch = {"obs": rows[:, :d], "next_obs": rows[:, d : 2 * d], "actions": rows[:, self._action_at : -4],
                 "rewards": rows[:, -4], "terminated": rows[:, -3], "truncated": rows[:, -2]}  # fmt: skip
        if self.n_step > 1:
            last, batch["rewards"], batch["discounts"] = self._walk(slots, rows[:, -4:])
            ends = self.rows.index_select(0, last)
            batch |= {"next_obs": ends[:, d : 2 * d], "terminated": ends[:, -3], "truncated": ends[:, -2]}
        if self.mask_dim:
            flags = ends[:, 2 * d : self._action_at].view(torch.uint8)
            batch["next_masks"] = flags[:, : self.mask_dim] != 0
        return batch

    def _walk(self, slots: torch.Tensor, tail: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sum the rewards of up to n steps in float64. Returns the rows of the last ones, the sums and the discounts.

        A sum stops at an end of an episode, before a cut, and at the environment's newest transition.
        """
        newer = (self.extent[0] - 1 - slots) % self.capacity  # transitions pushed after each
        reward = tail[:, 0].double()
        discount = torch.full_like(reward, self.gamma)
        goes_on = torch.ones_like(slots, dtype=torch.bool)
        for _ in range(self.n_step - 1):
            newer = newer - self.n_envs
            goes_on = goes_on & (tail[:, 1:].sum(1) == 0) & (newer >= 0)
            slots = torch.where(goes_on, (slots + self.n_envs) % self.capacity, slots)
            tail = self.rows.index_select(0, slots)[:, -4:]
            reward = torch.where(goes_on, reward + discount * tail[:, 0], reward)
            discount = torch.where(goes_on, discount * self.gamma, discount)
        return slots, reward.float(), discount.float()

    # ---- state

    def get_state(self, since: int = 0, since_frame: int | None = None) -> dict[str, Any]:
        """Return the state in the host memory's form, without the rows of the first `since` transitions."""
        self.flush()
        first = max(since, self.n_pushed - self._size)
        rows = self.rows.index_select(0, self._slots_of(first, max(first, self.n_pushed)))[:, :-1].contiguous()
        state = self._empty.get_state()
        state |= {"count": self.n_pushed, "rows": rows.cpu().numpy().view(np.uint8)}
        if self.n_pushed:
            state["has_next"] = 1
        else:
            state["rows"] = self._empty.get_state()["rows"]
        if seams := [seam for seam in self._seams if seam > self.n_pushed - self._size]:
            state["seams"] = np.array(seams)
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a state of this memory, or of the host's with the same configuration.

        Raises
        ------
        ValueError, TypeError
            As `rlox.ReplayBuffer.set_state`; nothing is changed then.
        """
        host = self.Host(**self._config)
        host.set_state(state)  # checks everything
        checked = host.get_state()
        if checked["columns"] != self._empty.get_state()["columns"] or checked["has_next"] == 0:
            raise ValueError(
                f"{type(self).__name__}.set_state: state must have next observations and no extra columns on a device"
            )
        rows = checked["rows"].view(np.float32).reshape(-1, self.width - 1)
        self.clear()
        self.n_pushed, self._size = checked["count"], len(rows)
        self.extent.copy_(torch.from_numpy(self.host_extent()))
        numbers = np.arange(self.n_pushed - len(rows), self.n_pushed)
        self._seams = checked["seams"].tolist() if "seams" in checked else []
        ends = np.zeros((len(rows), 1), np.float32)
        for seam in self._seams:
            ends[(numbers < seam) & (numbers >= seam - self.n_envs)] = 1.0
        if len(rows):
            slots = torch.from_numpy(self.newest_slots(len(rows)))
            self.absorb(torch.from_numpy(np.hstack([rows, ends])).to(self.device), slots.to(self.device))
        self._restore_priorities(checked)

    def _restore_priorities(self, state: dict[str, Any]) -> None:
        """Restore the priorities of a checked state."""


class PrioritizedDeviceReplayBuffer(DeviceReplayBuffer):
    """`rlox.PrioritizedReplayBuffer` on a device.

    Priorities are the leaves of a tree whose nodes are sums of `_FAN_OUT` children in float64. Every sum is computed
    anew from its children when one of them changes, so that nothing drifts.

    Parameters
    ----------
    alpha, beta, eps, weight_norm
        As in `rlox.PrioritizedReplayBuffer`; all others as in `DeviceReplayBuffer`.
    """

    Host = PrioritizedReplayBuffer
    domain = 0x5052_494F
    words_per_row = 2

    def __init__(
        self,
        capacity: int,
        obs_dim: int,
        act_dim: int,
        *,
        alpha: float = 0.6,
        beta: float = 0.4,
        eps: float = 1e-6,
        weight_norm: str = "memory",
        device: str | torch.device = "cuda",
        **keywords: Any,
    ):
        self.alpha, self.eps, self.weight_norm = alpha, eps, weight_norm
        # Leaves in float32, then sums of blocks of them, up to a level of one block.
        self._levels = [torch.zeros(_padded(capacity), dtype=torch.float32, device=device)]
        while len(self._levels[-1]) > _FAN_OUT:
            n = len(self._levels[-1]) // _FAN_OUT
            self._levels.append(torch.zeros(_padded(n), dtype=torch.float64, device=device))
        self._last = torch.zeros(capacity, dtype=torch.int64, device=device)  # where a slot was last in a batch
        self._highest = torch.ones((), dtype=torch.float64, device=device)  # the largest priority ever given
        self._beta = torch.zeros((), dtype=torch.float64, device=device)
        super().__init__(
            capacity, obs_dim, act_dim, device=device, alpha=alpha, beta=beta, eps=eps, weight_norm=weight_norm,
            **keywords,
        )  # fmt: skip
        self.set_beta(beta)

    def clear(self) -> None:
        super().clear()
        for level in self._levels:
            level.zero_()
        self._highest.fill_(1.0)

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(level.nbytes for level in self._levels) + self._last.nbytes

    def set_beta(self, beta: float) -> None:
        """Set the exponent of the importance weights, in [0, 1]."""
        self.beta = beta
        self._beta.fill_(beta)

    def absorb(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        super().absorb(rows, slots)
        self._set_leaves(slots, self._leaf(self._highest).expand(len(rows)))

    def _leaf(self, priorities: torch.Tensor) -> torch.Tensor:
        """Return priority**alpha (f32), clamped to float32's normal range; 0 stays 0."""
        p = priorities.clamp(min=self.eps)
        powers = (self.alpha * p.clamp(min=2.3e-308).log()).clamp(*_LEAF_EXPONENTS).exp()
        return torch.where(p > 0, powers, 0.0).float()

    def _set_leaves(self, slots: torch.Tensor, leaves: torch.Tensor) -> None:
        """Replace leaves (n,) f32 at `slots` (n,); if a slot is repeated, the last of its leaves counts."""
        # All writes to a slot write the same number, so that their order on a GPU does not matter.
        positions = torch.arange(len(slots), device=self.device)
        self._last.scatter_reduce_(0, slots, positions, "amax", include_self=False)
        leaves, slots = leaves[self._last[slots]], _transposed(slots)
        self._levels[0].index_copy_(0, slots, leaves)
        for below, above in zip(self._levels, self._levels[1:], strict=False):
            slots = slots // _FAN_OUT
            above.index_copy_(0, slots, below.view(-1, _FAN_OUT).index_select(0, slots).double().sum(1))

    def _leaves_of(self, slots: torch.Tensor) -> torch.Tensor:
        return self._levels[0].index_select(0, _transposed(slots))

    def draw(self, words: torch.Tensor, beta: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        slots = self._choose(words)
        return {
            **self.gather(slots),
            "weights": self._weights(slots, self._beta if beta is None else beta),
            "indices": slots,
        }

    def _choose(self, words: torch.Tensor) -> torch.Tensor:
        low, high = words.view(-1, 2).unbind(1)
        units = ((((high << 32) | low) >> 11) & ((1 << 53) - 1)).double() * _UNIT
        node = torch.zeros_like(low)
        target: torch.Tensor | None = None
        for level in reversed(self._levels):
            sums = cumulative_sums(level.view(-1, _FAN_OUT).index_select(0, node).double())
            total = sums[:, -1]
            # Below the total despite rounding, so that it leads to a child that is not empty.
            target = torch.minimum(units * total if target is None else target, total * _BELOW_ONE)
            child = (sums <= target.unsqueeze(1)).sum(1)
            before = torch.where(child > 0, sums.gather(1, (child - 1).clamp(min=0).unsqueeze(1)).squeeze(1), 0.0)
            target, node = target - before, node * _FAN_OUT + child
        return _transposed(node)

    def _weights(self, slots: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        """Return the importance weights (B,) f32, (size * P)**-beta, divided as `weight_norm` says."""
        leaves = self._levels[0]
        drawn = self._leaves_of(slots).double()
        if self.weight_norm == "none":
            unit, most = self._levels[-1].double().sum() / self.extent[1], 700.0
        elif self.weight_norm == "batch":
            unit, most = drawn.amin(), 0.0
        else:
            unit, most = torch.where(leaves > 0, leaves, torch.inf).amin().double(), 0.0
        return (beta * (unit.log() - drawn.log())).clamp(-700.0, most).exp().float()

    def update_priorities(self, indices: torch.Tensor, priorities: torch.Tensor) -> None:
        """Set the priorities (B,) of rows `indices` (B,), both on the device; all stay if any is not finite."""
        self.flush()  # new rows have priorities of their own
        finite = priorities.isfinite().all()
        given = torch.where(finite, priorities.double(), 0.0)
        leaves = torch.where(finite, self._leaf(given), self._leaves_of(indices))
        self._set_leaves(indices, leaves)
        torch.maximum(self._highest, given.amax(), out=self._highest)

    def get_state(self, since: int = 0, since_frame: int | None = None) -> dict[str, Any]:
        state = super().get_state(since, since_frame)
        slots = self._slots_of(self.n_pushed - self._size, self.n_pushed)
        leaves = self._leaves_of(slots).cpu().numpy()
        return state | {"leaves": leaves, "beta": self.beta, "highest_priority": float(self._highest)}

    def _restore_priorities(self, state: dict[str, Any]) -> None:
        self._highest.fill_(state["highest_priority"])
        self.set_beta(state["beta"])
        if self._size:
            slots = self._slots_of(self.n_pushed - self._size, self.n_pushed)
            self._set_leaves(slots, torch.from_numpy(state["leaves"]).to(self.device))


def _transposed(slots: torch.Tensor) -> torch.Tensor:
    """Return the place of each slot's leaf, and the other way round: sixteen leaves are a transposed square of four.

    That is the order in which the host's tree sums them, so that both draw the same rows.
    """
    return (slots & ~15) | ((slots & 3) << 2) | ((slots >> 2) & 3)


def _padded(n: int) -> int:
    """Return `n` as a multiple of the fan-out."""
    return _FAN_OUT * math.ceil(n / _FAN_OUT)
