"""Checks of a dataset's rows for all file formats; rows are checked and completed block by block."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np

from rlox.envs import EnvSpec
from rlox.kernels.stats import RunningStatsVec

# In the order of OfflineDatasetBuffer's arguments.
COLUMNS = ("obs", "next_obs", "actions", "rewards", "terminated", "truncated")
# Flags of the legal actions in ``obs`` and ``next_obs``, (n_actions,) each, if the environment masks actions.
MASKS = ("action_masks", "next_action_masks")
# The agent of a row, if several agents acted: an index in the metadata's list ``agents``.
AGENT = "agent"
# Other names of the columns, in D4RL, Minari and gymnasium's recorders.
ALIASES = {
    "obs": ("observations", "observation"),
    "next_obs": ("next_observations", "next_observation"),
    "actions": ("action",),
    "rewards": ("reward",),
    "terminated": ("terminals", "terminations"),
    "truncated": ("timeouts", "truncations"),
    "episode": ("episode_id", "episode_ids"),
    "action_masks": ("action_mask",),
    "next_action_masks": ("next_action_mask",),
}
_OPTIONAL = ("next_obs", "episode", *MASKS)
_REMEDIES = {
    "truncated": "; give every row a flag that says whether a time limit or the recording, not the task, ended its "
    "episode there (D4RL calls it timeouts), 0 throughout if none did",
    "terminated": "; give every row a flag that says whether the task itself ended there (D4RL calls it terminals)",
}
# Same as in OfflineDatasetBuffer: features that never change stay finite.
STD_EPS = 1e-3
# Tolerance for actions that were stored as float32, or clipped in another precision, relative to the bounds' distance.
_BOUND_SLACK = 1e-5

Block = dict[str, np.ndarray]


def allocate_block(spec: EnvSpec, shape: tuple[int, ...]) -> Block:
    """Return new arrays for all columns of `shape` rows of an environment with this `spec`."""
    dtypes: dict[str, tuple[tuple[int, ...], Any]] = {
        "obs": (spec.obs_shape, spec.obs_dtype),
        "next_obs": (spec.obs_shape, spec.obs_dtype),
        "actions": (spec.action_shape, spec.action_dtype),
        "rewards": ((), np.float32),
        "terminated": ((), np.bool_),
        "truncated": ((), np.bool_),
    }
    if spec.masked:
        dtypes |= dict.fromkeys(MASKS, ((sum(spec.choices),), np.bool_))
    return {name: np.empty((*shape, *own), dtype) for name, (own, dtype) in dtypes.items()}


def names_of(present: list[str], where: str, metadata: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Return the file's name for each column; ``next_obs``, ``episode`` and masks may be missing.

    ``agent`` is included only if the `metadata` names the agents. Raises ValueError for a column that is missing, or
    exists under two names.
    """
    chosen: dict[str, str] = {}
    for name, others in ALIASES.items():
        spellings = [known for known in (name, *others) if known in present]
        if len(spellings) > 1:
            raise ValueError(f"{where}: column {name} must be present once, got {' and '.join(spellings)}")
        if spellings:
            chosen[name] = spellings[0]
        elif name not in _OPTIONAL:
            raise ValueError(
                f"{where}: column {name} must be present, got {', '.join(sorted(present)) or 'no columns'}"
                f"{_REMEDIES.get(name, '')}"
            )
    if MASKS[1] in chosen and MASKS[0] not in chosen:
        raise ValueError(f"{where}: column {MASKS[0]} must be present if {MASKS[1]} is")
    if AGENT in present and (metadata or {}).get("agents"):
        chosen[AGENT] = AGENT
    return chosen


def check_bounds(actions: np.ndarray, low: Any, high: Any, where: str, first: int) -> None:
    """Raise ValueError, with the row, if continuous actions (n, A) leave their bounds; `first` is the first row."""
    low, high = np.ravel(low), np.ravel(high)
    if low.shape != actions.shape[1:]:
        raise ValueError(f"{where}: column actions must have {len(low)} numbers in each row, got {actions.shape[1]}")
    slack = _BOUND_SLACK * np.where(np.isfinite(high - low), high - low, 0)
    wrong = ((actions < low - slack) | (actions > high + slack)).any(1)
    if wrong.any():
        row = int(wrong.argmax())
        raise ValueError(
            f"{where}: column actions must lie between {low.tolist()} and {high.tolist()}, got "
            f"{actions[row].tolist()} in row {first + row}"
        )


class Rows:
    """Checks blocks of rows in order, and passes them on complete, with next observations.

    Missing next observations are taken from the next row of the episode. After a row that terminated, the next
    observation does not matter, and the row's own observation is used. Where an episode was truncated (or the data
    ends), it is unknown: that row is dropped, and the row before it becomes the truncated one.

    Parameters
    ----------
    where : str
        Name at the beginning of error messages.
    write : callable
        Receives every finished block: the six columns with equal dtypes and shapes throughout, and masks and ``agent``
        if they are present.
    n_actions : int, optional
        Number of discrete actions, if known.
    act_low, act_high : array (A,), optional
        Bounds of continuous actions.
    n_agents : int, optional
        Number of agents; the column ``agent`` counts from 0.
    """

    def __init__(
        self,
        where: str,
        write: Callable[[Block], Any],
        n_actions: int | None = None,
        act_low: Any = None,
        act_high: Any = None,
        n_agents: int | None = None,
    ):
        self._where = where
        self._write = write
        self._n_actions = n_actions
        self._n_agents = n_agents
        self._largest = -1  # largest discrete action
        self._bounds = None if act_low is None else (np.asarray(act_low), np.asarray(act_high))
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, np.dtype] = {}
        self._n = 0  # rows seen
        self._stats: RunningStatsVec | None = None
        self._pending: Block | None = None
        self._episode: Any = None
        self._flagged = True  # whether the previous row ended its episode
        self.dropped = 0

    def push(self, raw: Block) -> None:
        """Process the next rows of every column."""
        n = len(raw["rewards"])
        if n == 0:
            return
        masks = {name: self._flags(name, raw[name], n) for name in MASKS if name in raw}
        apart = ("episode", AGENT, *MASKS)
        block = {name: self._numbers(name, column, n) for name, column in raw.items() if name not in apart}
        if AGENT in raw:
            block[AGENT] = self._places(np.asarray(raw[AGENT]), n)
        for name in ("terminated", "truncated"):
            self._refuse_where((block[name] != 0) & (block[name] != 1), name, "hold only 0 and 1", block[name])
            block[name] = block[name].astype(np.uint8)
        block["actions"] = self._actions(block["actions"])
        if masks:
            self._require_legal(block["actions"], masks[MASKS[0]])
            block |= masks
        if "episode" in raw:
            self._check_episodes(np.asarray(raw["episode"]), block)
        self._n += n
        if "next_obs" in block:
            self._emit(block)
            return
        # Rows wait for the next block, which contains their continuation.
        if self._pending is not None and n >= 2:
            self._derive(self._pending, block)
            self._pending = block
        elif self._pending is not None:
            self._pending = {name: np.concatenate([column, block[name]]) for name, column in self._pending.items()}
        else:
            self._pending = block

    def finish(self) -> dict[str, Any]:
        """Pass on the waiting rows. Returns data on all rows, for the file's metadata; ValueError if there are none."""
        if self._pending is not None:
            if not self._pending["terminated"][-1] | self._pending["truncated"][-1]:
                self._pending["truncated"] = self._pending["truncated"].copy()
                self._pending["truncated"][-1] = 1
            self._derive(self._pending, None)
        if self._n == 0:
            raise ValueError(f"{self._where}: rewards must have at least one transition, got none")
        if self._n == self.dropped:
            raise ValueError(
                f"{self._where}: column next_obs must be present, because every episode has one row and was truncated "
                "after it"
            )
        metadata: dict[str, Any] = {"obs_shape": list(self._shapes["obs"]), "n_dropped": self.dropped}
        if self._discrete:
            metadata["n_actions"] = self._n_actions or self._largest + 1
        elif self._bounds is not None:
            metadata["act_low"], metadata["act_high"] = (np.ravel(bound).tolist() for bound in self._bounds)
        if self._stats is not None:
            metadata["obs_mean"] = self._stats.mean().tolist()
            metadata["obs_std"] = (self._stats.std() + STD_EPS).tolist()
        return metadata

    @property
    def _discrete(self) -> bool:
        return self._dtypes["actions"].kind == "i"

    def _refuse(self, name: str, rule: str, got: Any, row: int) -> NoReturn:
        raise ValueError(f"{self._where}: column {name} must {rule}, got {got} in row {self._n + row}")

    def _refuse_where(self, wrong: np.ndarray, name: str, rule: str, column: np.ndarray) -> None:
        if wrong.any():
            self._refuse(name, rule, column[wrong.argmax()], int(wrong.argmax()))

    def _numbers(self, name: str, raw: Any, n: int) -> np.ndarray:
        """Convert a column to float32, uint8 (images) or int64 (discrete actions), of finite values in equal shapes."""
        column = np.asarray(raw)
        if column.dtype.kind not in "biuf":
            kind = "rows of different shapes" if column.dtype.kind == "O" else f"dtype {column.dtype}"
            raise ValueError(f"{self._where}: column {name} must hold numbers in rows of one shape, got {kind}")
        if len(column) != n:
            raise ValueError(
                f"{self._where}: column {name} must have as many rows as rewards ({self._n + n}), got "
                f"{self._n + len(column)}"
            )
        if name not in ("obs", "next_obs"):
            column = column[:, 0] if column.ndim == 2 and column.shape[1] == 1 else column
        elif column.ndim == 1:
            column = column[:, None]
        shape = self._shapes.setdefault(name, self._shapes["obs"] if name == "next_obs" else column.shape[1:])
        if column.shape[1:] != shape:
            self._refuse(name, f"have rows of shape {shape}", column.shape[1:], 0)
        if 0 in shape:
            self._refuse(name, "have at least one number in each row", f"shape {shape}", 0)
        if name not in ("obs", "next_obs", "actions") and shape:
            self._refuse(name, "have one number in each row", f"shape {shape}", 0)
        dtype: np.dtype = np.dtype(np.float32)
        if name in ("obs", "next_obs") and column.dtype == np.uint8:
            dtype = column.dtype
        elif name == "actions" and self._bounds is None and (column.dtype.kind in "biu" or self._counts(column)):
            dtype = np.dtype(np.int64)
        if self._dtypes.setdefault(name, dtype) != dtype:
            self._refuse(name, f"be {self._dtypes[name]} in all rows", dtype, 0)
        if name == "next_obs" and dtype != self._dtypes["obs"]:
            self._refuse(name, f"be {self._dtypes['obs']}, like obs", dtype, 0)
        with np.errstate(over="ignore"):
            numbers = np.ascontiguousarray(column, dtype)
        if dtype.kind == "f" and not np.isfinite(numbers).all():
            bad = np.argwhere(~np.isfinite(numbers))[0]
            self._refuse(name, "hold finite float32 numbers", column[tuple(bad)], int(bad[0]))
        return numbers

    def _counts(self, column: np.ndarray) -> bool:
        """Return whether floats are the whole numbers of a known number of discrete actions."""
        return self._n_actions is not None and bool((column == np.floor(column)).all())

    def _flags(self, name: str, raw: Any, n: int) -> np.ndarray:
        """Check masks of legal actions, and return them as (n, n_actions) uint8."""
        column = np.asarray(raw)
        width = self._n_actions or (column.shape[1] if column.ndim == 2 else 1)
        if column.dtype.kind not in "biuf" or column.shape != (n, width):
            self._refuse(name, f"have a flag for each of {width} actions", f"{column.dtype} of shape {column.shape}", 0)
        self._refuse_where(((column != 0) & (column != 1)).any(1), name, "hold only 0 and 1", column)
        self._n_actions = width
        return np.ascontiguousarray(column, np.uint8)

    def _require_legal(self, actions: np.ndarray, masks: np.ndarray) -> None:
        if not self._discrete:
            raise ValueError(f"{self._where}: column {MASKS[0]} must be left out for continuous actions")
        illegal = masks[np.arange(len(actions)), actions] == 0
        if illegal.any():
            row = int(illegal.argmax())
            rule = f"be legal by {MASKS[0]}, which allows {np.flatnonzero(masks[row]).tolist()}"
            self._refuse("actions", rule, actions[row], row)

    def _places(self, column: np.ndarray, n: int) -> np.ndarray:
        """Check indices of agents in their list, and return them as int32."""
        if column.shape != (n,) or column.dtype.kind not in "iu":
            self._refuse(AGENT, "hold one integer for each row", f"shape {column.shape} of {column.dtype}", 0)
        wrong = (column < 0) | (column >= (math.inf if self._n_agents is None else self._n_agents))
        self._refuse_where(wrong, AGENT, f"hold indices in the list of {self._n_agents} agents", column)
        return column.astype(np.int32)

    def _actions(self, column: np.ndarray) -> np.ndarray:
        if self._discrete:
            if column.ndim > 1:
                self._refuse("actions", "hold one integer in each row, or floats", f"{column.shape[1]} integers", 0)
            wrong = (column < 0) | (column >= (math.inf if self._n_actions is None else self._n_actions))
            rule = ">= 0" if self._n_actions is None else f"from 0 to {self._n_actions - 1}"
            self._refuse_where(wrong, "actions", f"hold integers {rule}", column)
            self._largest = max(self._largest, int(column.max()))
            return column
        if self._n_actions is not None:
            rule = f"hold integers, because the environment has {self._n_actions} discrete actions"
            self._refuse("actions", rule, f"{column.dtype} ({column.flat[0]})", 0)
        column = column.reshape(len(column), -1)
        if self._bounds is not None:
            check_bounds(column, *self._bounds, self._where, self._n)
        return column

    def _check_episodes(self, ids: np.ndarray, block: Block) -> None:
        """Check that episode numbers rise exactly where a flag ends an episode."""
        if len(ids) != len(block["rewards"]) or ids.dtype.kind not in "iu":
            self._refuse("episode", "hold one integer for each row", f"{len(ids)} of {ids.dtype}", 0)
        before = np.concatenate([ids[:1] if self._episode is None else [self._episode], ids[:-1]])
        ended = (block["terminated"] | block["truncated"]).astype(bool)
        starts = np.concatenate([[self._flagged], ended[:-1]])
        starts[0] &= self._episode is not None
        for wrong, rule in (
            (ids < before, "never decrease"),
            ((ids != before) & ~starts, "change only after a row that is terminated or truncated"),
            ((ids == before) & starts, "change after a row that is terminated or truncated"),
        ):
            if wrong.any():
                row = int(wrong.argmax())
                self._refuse("episode", rule, f"{ids[row]} after {before[row]}", row)
        self._episode, self._flagged = ids[-1], ended[-1]

    def _derive(self, block: Block, after: Block | None) -> None:
        """Pass on `block` with its next observations; `after` is the next block."""
        obs, terminated, cut = block["obs"], block["terminated"].astype(bool), block["truncated"].astype(bool)
        following = obs[-1:] if after is None else after["obs"][:1]
        next_obs = np.concatenate([obs[1:], following])
        next_obs[terminated] = obs[terminated]
        unknown = cut & ~terminated
        goes_on = ~(terminated | cut)
        later = after is not None and bool(after["truncated"][0]) and not after["terminated"][0]
        leads_to_unknown = np.concatenate([unknown[1:], [later]]) & goes_on
        truncated = (cut & terminated) | leads_to_unknown
        kept = ~unknown
        self.dropped += int(unknown.sum())
        full = {**block, "next_obs": next_obs, "truncated": truncated.astype(np.uint8)}
        self._emit({name: column[kept] for name, column in full.items()})

    def _emit(self, block: Block) -> None:
        obs = block["obs"]
        if len(obs) == 0:
            return
        if obs.dtype != np.uint8:
            if self._stats is None:
                self._stats = RunningStatsVec(math.prod(obs.shape[1:]))
            self._stats.batch_update(obs.reshape(len(obs), -1))
        self._write({name: block[name] for name in (*COLUMNS, *MASKS, AGENT) if name in block})
