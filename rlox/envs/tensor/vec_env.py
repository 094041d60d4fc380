"""N copies of a tensor environment on one device: automatic reset, time limit, statistics, state."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rlox.config import integer
from rlox.envs.protocols import step_layout
from rlox.envs.spec import EnvSpec
from rlox.envs.tensor.base import TensorEnv
from rlox.envs.tensor.philox import ROUNDS, make_multipliers, make_round_keys, philox
from rlox.envs.tensor.table import VEC_ENVS, create
from rlox.kernels.envs.snapshot import restore
from rlox.kernels.rng import Rng

# Domains of random words, see kernels/philox.pxd.
_START, _STEP = 1, 2
# Blocks of random words that `prepare` computes at a time, which bounds its memory to some 100 MB.
_AT_ONCE = 1 << 20


def step_tensors(spec: EnvSpec, n: int, device: torch.device | str) -> dict[str, torch.Tensor]:
    """Return new tensors on `device` for the results of `TensorVecEnv.step_all`, see `step_layout`."""
    layout = step_layout(spec, n).items()
    return {
        name: torch.empty(shape, dtype=getattr(torch, np.dtype(dtype).name), device=device)
        for name, (shape, dtype) in layout
    }


class TensorVecEnv:
    """N copies of one tensor environment that live on one device. Each restarts as soon as its episode ends.

    Starts and random steps are the same functions of seed, index of the copy and number of the episode as in the native
    `VecEnv`, so that both run through the same trajectories, to rounding. No method but `get_state`, `set_state` and a
    reset with a seed waits for the device. The state is updated in place: a CUDA graph that has recorded steps goes on
    from wherever the copies are when it is replayed.

    Parameters
    ----------
    n : int
        Number of copies, at least 1.
    seed : int
        0 <= seed < 2**64.
    env : str or TensorEnv
        An id with a tensor version (`rlox.envs.tensor.table.tensor_env_ids`), or an environment.
    device : str or torch.device
        Where the copies live.
    compiled : bool
        Whether ``torch.compile`` fuses a step into a few kernels. It takes seconds at the first step.

    Attributes
    ----------
    n_envs, num_envs, seed, env_id
        As given (a reset with a seed changes `seed`).
    spec : EnvSpec
        Shapes, sizes and bounds.
    device : str
        Where observations, results and actions are.
    capturable : bool
        Whether a CUDA graph can record steps.
    max_episode_steps : int, optional
        The time limit; None if there is none.
    state, steps, returns, episodes : torch.Tensor
        (S, N) float64 state; (N,) int64 steps and (N,) float64 return of the running episodes; (N,) int64 number of the
        running episode, from 0.

    Raises
    ------
    ValueError
        If `n` or `seed` is out of range, or the id has no tensor version; the message names those that have one.
    """

    native = False
    capturable = True
    unrestorable_reason: str | None = None

    def __init__(
        self,
        n: int,
        seed: int = 0,
        env: str | TensorEnv = "CartPole-v1",
        device: torch.device | str = "cpu",
        compiled: bool = False,
    ):
        n = self.n_envs = self.num_envs = integer("TensorVecEnv", "n", n, 1)
        if isinstance(env, TensorEnv):
            self.env = env
        elif isinstance(env, str):
            self.env = create(env)
        else:
            raise TypeError(f"TensorVecEnv: env must be an id or a TensorEnv, got {type(env).__name__}")
        self.env_id, self.spec = self.env.env_id, self.env.spec
        self.max_episode_steps = self.env.max_episode_steps
        self.state = torch.zeros((self.env.state_size, n), dtype=torch.float64, device=device)
        self.steps = torch.zeros(n, dtype=torch.int64, device=device)
        self.returns = torch.zeros(n, dtype=torch.float64, device=device)
        self.episodes = torch.empty(n, dtype=torch.int64, device=device)
        self._device = self.state.device
        self.device: str | None = str(self._device)
        self._multipliers = make_multipliers(self._device)
        self._round_keys = torch.empty((ROUNDS, 2, n), dtype=torch.int64, device=device)
        self._key_seed(seed)
        self._advance = torch.compile(self._step, fullgraph=True, dynamic=False) if compiled else self._step
        self._compiled = compiled
        self._ready = False
        self._names = tuple(step_layout(self.spec, n))
        self._results: dict[str, torch.Tensor] = {}  # what copy=False returns
        # Starts of the next episodes (S, K, N) by the number of steps they were prepared for, the number of the episode
        # before the first of them, how many steps they last, and whether a CUDA graph is being recorded that has them.
        self._tables: dict[int, torch.Tensor] = {}
        self._table = torch.empty(0)
        self._before = torch.zeros_like(self.episodes)
        self._steps_left = 0
        self._within_graph = False

    def __len__(self) -> int:
        return self.n_envs

    def __repr__(self) -> str:
        return f"TensorVecEnv(n={self.n_envs}, seed={self.seed}, env={self.env_id!r}, device={self.device!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.n_envs, self.seed, self.env, self.device, self._compiled), self.get_state()

    def __setstate__(self, state: dict[str, np.ndarray]) -> None:
        self.set_state(state)

    def reset_all(self, seed: int | None = None) -> torch.Tensor:
        """Start a new episode in every copy and return the observations (N, D) float32.

        With a seed, the copies get new keys, and the first episodes of that seed start.
        """
        if seed is not None:
            self._key_seed(seed)
        self._steps_left = 0
        self._ready = True
        self.episodes += 1
        self.state.copy_(self._starts())
        self.steps.zero_()
        self.returns.zero_()
        return self._observe()

    def observe(self) -> torch.Tensor:
        """Return the current observations (N, D) float32, recomputed from the state."""
        self._require_ready("observe")
        return self._observe()

    def _observe(self) -> torch.Tensor:
        return self.env.observe(self.state).to(torch.float32, copy=True).contiguous()

    def action_masks(self) -> None:
        """Return None: these environments have no masks of legal actions."""

    def prepare(self, n_steps: int) -> None:
        """Compute the starts of all episodes that can begin in the next `n_steps` steps, in one go.

        Without it every step computes random words for every copy, whether its episode ends or not: some 80 launches a
        step, where `prepare` needs as many for all steps together, and 8 * S * N * n_steps bytes. The results are the
        same. A function that is recorded in a CUDA graph must take the steps that it prepares. With `compiled`, whose
        fused step computes the words along the way, this does nothing.
        """
        self._require_ready("prepare")
        if self._compiled:
            return
        n_steps = integer("TensorVecEnv.prepare", "n_steps", n_steps, 1)
        size = self.env.state_size
        if n_steps not in self._tables:
            shape = (size, n_steps, self.n_envs)
            self._tables[n_steps] = torch.empty(shape, dtype=torch.float64, device=self._device)
        self._table = self._tables[n_steps]
        self._before.copy_(self.episodes)
        at_once = max(1, _AT_ONCE // self.n_envs)
        for first in range(0, n_steps, at_once):
            last = min(first + at_once, n_steps)
            episodes = self.episodes + torch.arange(first + 1, last + 1, device=self._device).unsqueeze(1)
            words = self._words(episodes, _START, self.env.start_blocks).view(-1, (last - first) * self.n_envs)
            self._table[:, first:last].copy_(self.env.start(words).view(size, last - first, self.n_envs))
        self._steps_left = n_steps
        self._within_graph = self._recording()

    def step_all(
        self, actions: Any, out: dict[str, torch.Tensor] | None = None, copy: bool = True
    ) -> dict[str, torch.Tensor]:
        """Take one step in every copy. Those whose episode ends start the next one at once.

        Parameters
        ----------
        actions : torch.Tensor
            (N,) integers or (N, A) floats on the device; also (N,) for A = 1. Other arrays are copied there, for which
            the host waits. Since nobody looks at the numbers, a discrete action out of range counts as the nearest one
            in range, and NaN makes the state of its copy NaN until the episode ends.
        out : dict, optional
            Tensors to write to, by the names of `step_layout`; absent ones are not computed. Rewards and returns may be
            float32 here. Without a `reset_all` before it, the first call starts the first episodes.
        copy : bool
            False returns tensors that every call overwrites. Not allowed together with `out`.

        Returns
        -------
        dict
            `out`, or the tensors of `step_layout`.

        Raises
        ------
        ValueError
            For actions of another shape or on another device, or another key in `out`.
        TypeError
            If discrete actions are not integers.
        RuntimeError
            If a CUDA graph records this step, but not the `prepare` that it depends on.
        """
        actions = self._check_actions(actions)
        if out is None:
            if copy or not self._results:
                self._results = step_tensors(self.spec, self.n_envs, self._device)
            out = self._results
        elif not copy:
            raise ValueError("TensorVecEnv.step_all: copy must be True if out is given, got False")
        elif wrong := [name for name in out if name not in self._names]:
            raise ValueError(f"TensorVecEnv.step_all: out must have keys among {list(self._names)}, got {wrong}")
        if not self._ready:
            self.reset_all()
        prepared = self._steps_left > 0
        if prepared:
            self._steps_left -= 1
            if self._recording() != self._within_graph:
                raise RuntimeError(
                    "TensorVecEnv.step_all: prepare must be recorded in the same CUDA graph as the steps it prepares"
                )
        self._advance(actions, out, prepared)
        return dict(out) if out is self._results else out

    def _step(self, actions: torch.Tensor, out: dict[str, torch.Tensor], prepared: bool) -> None:
        """Step all copies, in place and without a decision that depends on a number on the device."""
        env, steps, limit = self.env, self.steps, self.max_episode_steps
        if self.spec.discrete:
            actions = actions.clamp(0, self.spec.choices[0] - 1)
        words = (self._words(self.episodes, _STEP, 1, steps),) if env.random_steps else ()
        state, rewards, terminated = env.step(self.state, actions, *words)
        steps += 1
        self.returns += rewards
        truncated = steps >= limit if limit is not None else False
        ended = terminated | truncated
        for name, value in (("rewards", rewards), ("terminated", terminated), ("truncated", truncated)):
            if name in out:
                _write(out[name], value)
        if "final_obs" in out:
            out["final_obs"].copy_(env.observe(state))
        if "episode_return" in out:
            out["episode_return"].copy_(self.returns)
        if "episode_length" in out:
            out["episode_length"].copy_(steps)
        if isinstance(ended, torch.Tensor):
            starts = self._next_starts(prepared)
            self.episodes += ended
            steps.masked_fill_(ended, 0)
            self.returns.masked_fill_(ended, 0.0)
            torch.where(ended, starts, state, out=self.state)
        else:
            self.state.copy_(state)
        if "obs" in out:
            out["obs"].copy_(env.observe(self.state))

    def _next_starts(self, prepared: bool) -> torch.Tensor:
        """Return the states (S, N) in which the next episode of each copy starts."""
        if not prepared:
            return self._starts(self.episodes + 1)
        rows = (self.episodes - self._before).view(1, 1, -1).expand(self.env.state_size, 1, -1)
        return self._table.gather(1, rows).squeeze(1)

    def _starts(self, episodes: torch.Tensor | None = None) -> torch.Tensor:
        """Return the states (S, N) in which these episodes of the copies start, by default the running ones."""
        words = self._words(self.episodes if episodes is None else episodes, _START, self.env.start_blocks)
        return self.env.start(words)

    def _words(
        self, episodes: torch.Tensor, domain: int, n_blocks: int, steps: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return random words (4 * n_blocks, ...) for episodes (..., N) of the copies."""
        blocks = []
        for block in range(n_blocks):
            high = block if steps is None else steps
            even, odd = philox(self._round_keys, self._multipliers, episodes, domain, high)
            blocks.append(torch.stack([even, odd], 1).flatten(0, 1))
        return blocks[0] if n_blocks == 1 else torch.cat(blocks)

    def _check_actions(self, actions: Any) -> torch.Tensor:
        """Return the actions as a tensor (N,) or (N, A) on the device."""
        where = "TensorVecEnv.step_all"
        if not isinstance(actions, torch.Tensor):
            actions = torch.as_tensor(np.asarray(actions), device=self._device)
        if actions.device != self._device:
            raise ValueError(f"{where}: actions must be on {self._device}, got {actions.device}")
        shape = (self.n_envs, *self.spec.action_shape)
        if actions.shape == (self.n_envs,) and shape == (self.n_envs, 1):
            actions = actions.unsqueeze(1)
        if actions.shape != shape:
            raise ValueError(f"{where}: actions must have shape {shape}, got {tuple(actions.shape)}")
        if self.spec.continuous:
            return actions.to(torch.float32)
        if actions.is_floating_point():
            raise TypeError(f"{where}: actions must be integers (the environment is discrete), got {actions.dtype}")
        return actions

    def get_state(self) -> dict[str, np.ndarray]:
        """Return the complete state in the arrays of the native `VecEnv.get_state`; waits for the device."""
        return {
            "state": self.state.cpu().numpy().copy(),
            "keys": self._keys.copy(),
            "episodes": (self.episodes + 1).cpu().numpy().view(np.uint64),
            "steps": self.steps.cpu().numpy().copy(),
            "returns": self.returns.cpu().numpy().copy(),
        }

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Restore a state of `get_state`, or of the native environments of the same id, in place.

        Raises
        ------
        ValueError
            For other keys or shapes, values that are not finite, or steps outside [0, max_episode_steps).
        TypeError
            If a value is not an array or has another dtype.
        """
        n = self.n_envs
        arrays: dict[str, np.ndarray] = {
            "state": np.empty(self.state.numel()),
            "keys": np.empty(n, np.uint64),
            "episodes": np.empty(n, np.uint64),
            "steps": np.empty(n, np.int64),
            "returns": np.empty(n),
        }
        limit = self.max_episode_steps or np.iinfo(np.int64).max
        self._ready = restore(arrays, state, self.env.state_size, n, limit, "TensorVecEnv.set_state")
        self._set_keys(arrays["keys"])
        self.state.copy_(torch.from_numpy(arrays["state"]).view(self.state.shape))
        self.episodes.copy_(torch.from_numpy(arrays["episodes"].view(np.int64)))
        self.steps.copy_(torch.from_numpy(arrays["steps"]))
        self.returns.copy_(torch.from_numpy(arrays["returns"]))
        self._steps_left = 0

    def fits(self, state: dict[str, np.ndarray]) -> bool:
        """Return whether `state` comes from native or tensor environments."""
        return not state.keys().isdisjoint({"state", "keys", "episodes", "steps", "returns"})

    def render(self) -> None:
        """Return None: tensor environments are not drawn."""

    def close(self) -> None:
        """Do nothing: the memory is freed with the object."""

    def _key_seed(self, seed: int) -> None:
        """Give every copy a new key, and restart its count of episodes."""
        self.seed = integer("TensorVecEnv", "seed", seed, 0, 2**64 - 1)
        self._set_keys(np.fromiter((Rng(self.seed, i).key for i in range(self.n_envs)), np.uint64, self.n_envs))
        self.episodes.fill_(-1)

    def _set_keys(self, keys: np.ndarray) -> None:
        self._keys = keys
        self._round_keys.copy_(make_round_keys(torch.from_numpy(keys.view(np.int64))))

    def _recording(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _require_ready(self, method: str) -> None:
        if not self._ready:
            raise ValueError(f"TensorVecEnv.{method}: the environments must be reset first; call reset_all()")


def make_on_device(
    env: str | TensorEnv,
    n: int,
    seed: int,
    device: torch.device | str,
    compiled: bool = False,
    arguments: dict[str, Any] | None = None,
) -> Any:
    """Create N copies that live on `device`: a `TensorVecEnv`, or what `register_vec_env` says for this id.

    `arguments` are those of an environment with several agents.
    """
    if isinstance(env, str) and env in VEC_ENVS:
        return VEC_ENVS[env](n, seed, str(device))
    if isinstance(env, str) and arguments:
        env = create(env, **arguments)
    return TensorVecEnv(n, seed, env, device, compiled)


class HostVecEnv(TensorVecEnv):
    """Copies of a tensor environment on the CPU with the interface of other environments: arrays instead of tensors.

    Parameters and attributes are those of `TensorVecEnv`; `device` is None.
    """

    def __init__(self, n: int, seed: int = 0, env: str | TensorEnv = "CartPole-v1"):
        super().__init__(n, seed, env)
        self.device = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.n_envs, self.seed, self.env), self.get_state()

    def reset_all(self, seed: int | None = None) -> Any:
        """Start a new episode in every copy and return the observations (N, D) float32."""
        return super().reset_all(seed).numpy()

    def observe(self) -> Any:
        """Return the current observations (N, D) float32."""
        return super().observe().numpy()

    def step_all(self, actions: Any, out: dict[str, Any] | None = None, copy: bool = True) -> dict[str, Any]:
        """Take one step in every copy, as `TensorVecEnv.step_all` does, with arrays."""
        tensors = None if out is None else {name: torch.from_numpy(array) for name, array in out.items()}
        results = super().step_all(actions, tensors, copy)
        return {name: tensor.numpy() for name, tensor in results.items()} if out is None else out


def _write(to: torch.Tensor, value: torch.Tensor | float) -> None:
    if isinstance(value, torch.Tensor):
        to.copy_(value)
    else:
        to.fill_(value)
