"""Time the same operations in every system, each in its own process. Runs under any interpreter with NumPy.

``python systems.py SYSTEM`` reads one JSON request per line and answers with one line each:
``{"op", "size", "samples", "sample_ns", "determined"}`` gives ``{"ns": [...], "check": number or null}``. These are
nanoseconds per call and, if the result is determined, its sum, which reveals a system that computes something else.
`rlox bench data` starts this program.
"""

import contextlib
import gc
import json
import math
import os
import sys
import time

import numpy as np

GAMMA, LAM = 0.99, 0.95
OBS_DIM, ACT_DIM = 4, 1
GROUP = 8  # rewards of one prompt
# A process that waited for its turn finds caches, branch predictor and clock frequency as other processes left them.
WARM_UP_NS = 20_000_000


class Absent(Exception):
    """Raised if the system does not have the operation, or not at this size."""


def trajectory(shape, dtype=np.float64):
    rng = np.random.default_rng(0)
    rewards, values = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
    return rewards, values, (rng.random(shape) < 0.01).astype(dtype)


def bootstraps(n, dtype=np.float64):
    """Return values after the last step of n environments; 0.5 for a single one, as in the single form."""
    return np.linspace(0.5, -0.5, n).astype(dtype)


def log_probs(n, dtype):
    rng = np.random.default_rng(1)
    p = -rng.exponential(1.0, n)
    return p.astype(dtype), (p + 0.1 * rng.standard_normal(n)).astype(dtype)


def transitions(n):
    rng = np.random.default_rng(2)
    obs, next_obs = (rng.standard_normal((n, OBS_DIM)).astype(np.float32) for _ in range(2))
    actions = rng.standard_normal((n, ACT_DIM)).astype(np.float32)
    rewards = rng.standard_normal(n).astype(np.float32)
    terminated = rng.random(n) < 0.01
    truncated = ~terminated & (rng.random(n) < 0.01)
    return obs, next_obs, actions, rewards, terminated, truncated


def token_lengths(n):
    return np.random.default_rng(3).integers(1, 513, n)


def limit(size, most):
    if size > most:
        raise Absent
    return size


def total(result):
    """Return the sum of a result's finite numbers, to compare systems."""
    parts = result if isinstance(result, tuple) else (result,)
    return float(sum(np.sum(np.asarray(part, np.float64)) for part in parts))


class Rlox:
    """rlox, and in its own interpreter the original with the same import name: the documented calls are the same."""

    original = False

    def __init__(self):
        import rlox

        self.rlox = rlox

    def versions(self):
        from importlib.metadata import version

        if self.original:
            return {"rlox (the original)": version("rlox")}
        from rlox.kernels import CPU_LEVEL

        return {"rlox": self.rlox.__version__, "numpy": np.__version__, "cpu_level": CPU_LEVEL}

    # Advantages

    def gae(self, n):
        r, v, d = trajectory(n)
        return lambda: self.rlox.compute_gae(r, v, d, 0.5, GAMMA, LAM)

    def _gae_batched(self, size, dtype, name):
        n, steps = size
        r, v, d = trajectory(n * steps, dtype)
        last = bootstraps(n, dtype)
        f = getattr(self.rlox, name)
        return lambda: f(r, v, d, last, steps, GAMMA, LAM)

    def gae_batched(self, size):
        return self._gae_batched(size, np.float64, "compute_gae_batched")

    def gae_batched_f32(self, size):
        return self._gae_batched(size, np.float32, "compute_gae_batched_f32")

    def vtrace_f32(self, n):
        r, v, d = trajectory(n, np.float32)
        rho = (0.1 * r).astype(np.float32)
        return lambda: self.rlox.compute_vtrace(rho, r, v, d, 0.5, GAMMA)

    # Tokens

    def group_advantages(self, n):
        rewards = np.random.default_rng(4).standard_normal(max(n, GROUP) // GROUP * GROUP)
        return lambda: self.rlox.compute_batch_group_advantages(rewards, GROUP)

    def token_kl(self, n):
        p, q = log_probs(n, np.float64)
        return lambda: self.rlox.compute_token_kl(p, q)

    def token_kl_f32(self, n):
        p, q = log_probs(n, np.float32)
        return lambda: self.rlox.compute_token_kl_f32(p, q)

    def token_kl_schulman(self, n):
        p, q = log_probs(n, np.float64)
        return lambda: self.rlox.compute_token_kl_schulman(p, q)

    def token_kl_schulman_f32(self, n):
        p, q = log_probs(n, np.float32)
        return lambda: self.rlox.compute_token_kl_schulman_f32(p, q)

    def _batch_kl(self, size, dtype, name):
        rows, length = size
        p, q = log_probs(rows * length, dtype)
        f = getattr(self.rlox, name)
        return lambda: f(p, q, length)

    def batch_token_kl(self, size):
        return self._batch_kl(size, np.float64, "compute_batch_token_kl")

    def batch_token_kl_f32(self, size):
        return self._batch_kl(size, np.float32, "compute_batch_token_kl_f32")

    def batch_token_kl_schulman(self, size):
        return self._batch_kl(size, np.float64, "compute_batch_token_kl_schulman")

    def batch_token_kl_schulman_f32(self, size):
        return self._batch_kl(size, np.float32, "compute_batch_token_kl_schulman_f32")

    def group_single(self, n):
        rewards = np.random.default_rng(4).standard_normal(n)
        return lambda: self.rlox.compute_group_advantages(rewards)

    def dpo_pair(self, n):
        tokens = np.arange(n, dtype=np.uint32)
        return lambda: self.rlox.DPOPair(tokens, tokens, tokens).chosen_len()

    def pack_sequences(self, n):
        sequences = [np.arange(length, dtype=np.uint32) for length in token_lengths(limit(n, 32768))]
        return lambda: len(self.rlox.pack_sequences(sequences, 2048))

    def running_stats(self, n):
        stats = self.rlox.RunningStatsVec(OBS_DIM)
        data = np.random.default_rng(5).standard_normal(n * OBS_DIM)
        return lambda: stats.batch_update(data, n)

    def running_stats_update(self, dim):
        stats = self.rlox.RunningStatsVec(dim)
        row = np.random.default_rng(5).standard_normal(dim)
        return lambda: stats.update(row)

    def running_stats_normalize(self, n):
        stats = self.rlox.RunningStatsVec(OBS_DIM)
        data = np.random.default_rng(5).standard_normal(n * OBS_DIM)
        stats.batch_update(data, n)
        stats.batch_update(data + 1, n)
        return lambda: stats.normalize_batch(data, n)

    def running_stat(self, _):
        stats = self.rlox.RunningStats()
        return lambda: stats.update(0.5)

    # Buffers

    def _fill(self, buffer, n, **more):
        obs, next_obs, actions, rewards, terminated, truncated = transitions(n)
        if self.original:
            flat = (a.ravel() for a in (obs, next_obs, actions))
            # The original's two buffers take flags of different types.
            kind = np.uint8 if isinstance(buffer, self.rlox.ReplayBuffer) else np.float32
            buffer.push_batch(*flat, rewards, terminated.astype(kind), truncated.astype(kind))
        else:
            buffer.push_batch(obs, next_obs, actions, rewards, terminated, truncated, **more)
        return buffer

    def push(self, _):
        buffer = self.rlox.ReplayBuffer(100_000, OBS_DIM, ACT_DIM)
        obs, next_obs, actions, *_ = transitions(1)
        o, n, a = obs[0], next_obs[0], actions[0]
        return lambda: buffer.push(o, a, 1.0, False, False, n)

    def push_batch(self, n):
        buffer = self.rlox.ReplayBuffer(max(100_000, n), OBS_DIM, ACT_DIM)
        obs, next_obs, actions, rewards, terminated, truncated = transitions(n)
        if self.original:
            obs, next_obs, actions = obs.ravel(), next_obs.ravel(), actions.ravel()
            terminated, truncated = terminated.astype(np.uint8), truncated.astype(np.uint8)
        return lambda: buffer.push_batch(obs, next_obs, actions, rewards, terminated, truncated)

    def _sampler(self, buffer, n):
        seed = iter(range(1 << 62))
        return lambda: buffer.sample(n, next(seed))

    def replay_100k(self, n):
        return self._sampler(self._fill(self.rlox.ReplayBuffer(100_000, OBS_DIM, ACT_DIM), 100_000), n)

    def replay_1m(self, n):
        return self._sampler(self._fill(self.rlox.ReplayBuffer(1_000_000, OBS_DIM, ACT_DIM), 1_000_000), n)

    def _prioritized(self):
        buffer = self.rlox.PrioritizedReplayBuffer(100_000, OBS_DIM, ACT_DIM, 0.6, 0.4)
        priorities = np.random.default_rng(6).random(100_000) + 0.01
        if not self.original:
            return self._fill(buffer, 100_000, priorities=priorities)
        obs, next_obs, actions, rewards, terminated, truncated = transitions(100_000)
        for k in range(100_000):
            buffer.push(
                obs[k], actions[k], float(rewards[k]), bool(terminated[k]), bool(truncated[k]), next_obs[k],
                float(priorities[k]),
            )  # fmt: skip
        return buffer

    def per_push(self, _):
        buffer = self.rlox.PrioritizedReplayBuffer(100_000, OBS_DIM, ACT_DIM, 0.6, 0.4)
        obs, next_obs, actions, *_ = transitions(1)
        o, n, a = obs[0], next_obs[0], actions[0]
        return lambda: buffer.push(o, a, 1.0, False, False, n, 0.5)

    def per_sample(self, n):
        return self._sampler(self._prioritized(), n)

    def per_update(self, n):
        buffer = self._prioritized()
        rng = np.random.default_rng(7)
        indices = rng.integers(0, 100_000, n).astype(np.uint64)
        priorities = rng.random(n) + 0.01
        return lambda: buffer.update_priorities(indices, priorities)

    def per_both(self, n):
        buffer = self._prioritized()
        priorities = np.random.default_rng(7).random(n) + 0.01
        seed = iter(range(1 << 62))

        def both():
            buffer.update_priorities(buffer.sample(n, next(seed))["indices"], priorities)

        return both

    def _mmap(self, hot):
        import tempfile

        folder = tempfile.mkdtemp(prefix="rlox-bench-")
        path = os.path.join(folder, "cold.bin")
        buffer = self.rlox.MmapReplayBuffer(hot, 100_000, OBS_DIM, ACT_DIM, path)
        self._cleanup = contextlib.ExitStack()
        self._cleanup.callback(os.rmdir, folder)
        self._cleanup.callback(buffer.close)
        return self._fill(buffer, 100_000)

    def mmap_sample(self, n):
        return self._sampler(self._mmap(10_000), n)

    def mmap_push(self, _):
        buffer = self._mmap(10_000)
        obs, next_obs, actions, *_ = transitions(1)
        o, n, a = obs[0], next_obs[0], actions[0]
        return lambda: buffer.push(o, a, 1.0, False, False, n)

    def _sequences(self):
        buffer = self.rlox.SequenceReplayBuffer(100_000, OBS_DIM, ACT_DIM)
        obs, next_obs, actions, *_ = transitions(1)
        o, n, a = obs[0], next_obs[0], actions[0]
        if self.original:
            return buffer, lambda end: buffer.push(o, n, a, 1.0, end, False)
        return buffer, lambda end: buffer.push(o, a, 1.0, end, False, n)

    def sequence_push(self, _):
        push = self._sequences()[1]
        return lambda: push(False)

    def sequence_sample(self, n):
        buffer, push = self._sequences()
        for k in range(100_000):
            push(k % 200 == 199)
        seed = iter(range(1 << 62))
        if self.original:
            return lambda: buffer.sample_sequences(n, 20, next(seed))
        # The original's sequences stay within one episode.
        return lambda: buffer.sample(n, 20, next(seed), cross_episodes=False)

    def offline_sample(self, n):
        obs, next_obs, actions, rewards, terminated, truncated = transitions(100_000)
        flags = (terminated, truncated)
        if self.original:
            flags = tuple(f.astype(np.uint8) for f in flags)
        return self._sampler(
            self.rlox.OfflineDatasetBuffer(obs.ravel(), next_obs.ravel(), actions.ravel(), rewards, *flags), n
        )

    def offline_trajectories(self, n):
        obs, next_obs, actions, rewards, terminated, truncated = transitions(100_000)
        flags = (terminated, truncated)
        if self.original:
            flags = tuple(f.astype(np.uint8) for f in flags)
        buffer = self.rlox.OfflineDatasetBuffer(obs.ravel(), next_obs.ravel(), actions.ravel(), rewards, *flags)
        seed = iter(range(1 << 62))
        return lambda: buffer.sample_trajectories(limit(n, 4096), 20, next(seed))

    def table_push(self, _):
        table = self.rlox.ExperienceTable(OBS_DIM, ACT_DIM)
        obs, _, actions, *_ = transitions(1)
        o, a = obs[0], actions[0]
        count = 0

        def push():
            nonlocal count
            table.push(o, a, 1.0, False, False)
            count += 1
            if count == 4096:
                table.clear()
                count = 0

        return push

    def table_observations(self, n):
        table = self.rlox.ExperienceTable(OBS_DIM, ACT_DIM)
        obs, _, actions, *_ = transitions(n)
        for k in range(n):
            table.push(obs[k], actions[k], 1.0, False, False)
        return table.observations

    def varlen_push(self, n):
        sequence = np.arange(n, dtype=np.uint32)
        held = []

        def push():
            if not held or held[0].total_elements() > 1_000_000:
                held[:] = [self.rlox.VarLenStore()]
            held[0].push(sequence)

        return push

    def varlen_get(self, n):
        store = self.rlox.VarLenStore()
        for _ in range(16):
            store.push(np.arange(n, dtype=np.uint32))
        return lambda: store.get(7)

    # Environments

    def _env(self, env_id, n, views=False):
        if self.original and env_id not in ("CartPole-v1", "Pendulum-v1"):
            raise Absent
        more = {"copy": False} if views and not self.original else {}
        env = self.rlox.VecEnv(n, 0, env_id)
        env.reset_all()
        rng = np.random.default_rng(8)
        if env_id in ("Pendulum-v1", "MountainCarContinuous-v0"):
            actions = rng.uniform(-1, 1, (n, 1)).astype(np.float32)
        else:
            count = {"CartPole-v1": 2, "MountainCar-v0": 3, "Acrobot-v1": 3, "GridWorld-v0": 4}[env_id]
            # Each system's fast type of action.
            actions = rng.integers(0, count, n).astype(np.uint32 if self.original else np.int64)
        return lambda: env.step_all(actions, **more)

    def cartpole(self, n):
        return self._env("CartPole-v1", n)

    def cartpole_views(self, n):
        return self._env("CartPole-v1", n, views=True)

    def cartpole_list(self, n):
        env = self.rlox.VecEnv(limit(n, 4096), 0, "CartPole-v1")
        env.reset_all()
        actions = np.random.default_rng(8).integers(0, 2, n).tolist()
        return lambda: env.step_all(actions)

    def pendulum(self, n):
        return self._env("Pendulum-v1", n)

    def mountain_car(self, n):
        return self._env("MountainCar-v0", n)

    def mountain_car_continuous(self, n):
        return self._env("MountainCarContinuous-v0", n)

    def acrobot(self, n):
        return self._env("Acrobot-v1", n)

    def grid_world(self, n):
        return self._env("GridWorld-v0", n)

    # Operations that only rlox has; a peer is measured with the form it has instead.

    def gae_out(self, size):
        if self.original:
            return self.gae_batched(size)
        n, steps = size
        r, v, d = trajectory(n * steps)
        last = bootstraps(n)
        out = (np.zeros(n * steps), np.zeros(n * steps))
        return lambda: self.rlox.compute_gae_batched(r, v, d, last, steps, GAMMA, LAM, out=out)

    def replay_packed_100k(self, n):
        if self.original:
            return self.replay_100k(n)
        buffer = self._fill(self.rlox.ReplayBuffer(100_000, OBS_DIM, ACT_DIM), 100_000)
        seed = iter(range(1 << 62))
        return lambda: buffer.sample_packed(n, next(seed))


class Original(Rlox):
    original = True


class NumPy:
    """Plain NumPy, as written without a library."""

    def versions(self):
        return {"numpy": np.__version__}

    def _gae(self, r, v, d, last):
        advantages = np.empty_like(r)
        carry, following = np.zeros_like(last), last
        for t in range(len(r) - 1, -1, -1):
            alive = 1.0 - d[t]
            carry = r[t] + GAMMA * following * alive - v[t] + GAMMA * LAM * alive * carry
            advantages[t] = carry
            following = v[t]
        return advantages, advantages + v

    def gae(self, n):
        r, v, d = trajectory(limit(n, 32768))
        last = np.float64(0.5)
        return lambda: self._gae(r, v, d, last)

    def _batched(self, size, dtype):
        n, steps = size
        r, v, d = (np.ascontiguousarray(x.reshape(n, steps).T) for x in trajectory(n * steps, dtype))
        last = bootstraps(n, dtype)
        return lambda: self._gae(r, v, d, last)

    def gae_batched(self, size):
        return self._batched(size, np.float64)

    def gae_batched_f32(self, size):
        return self._batched(size, np.float32)

    gae_out = gae_batched

    def vtrace_f32(self, n):
        r, v, d = trajectory(limit(n, 32768), np.float32)
        log_rho = (0.1 * r).astype(np.float32)

        def vtrace():
            rho = np.minimum(np.exp(log_rho), 1)
            following = np.append(v[1:], np.float32(0.5))
            discount = np.float32(GAMMA) * (1 - d)
            delta = rho * (r + discount * following - v)
            vs = np.empty_like(v)
            carry = np.float32(0)
            for t in range(n - 1, -1, -1):
                carry = delta[t] + discount[t] * rho[t] * carry
                vs[t] = v[t] + carry
            return vs, rho * (r + discount * np.append(vs[1:], np.float32(0.5)) - v)

        return vtrace

    def group_advantages(self, n):
        rewards = np.random.default_rng(4).standard_normal(max(n, GROUP) // GROUP * GROUP)

        def advantages():
            groups = rewards.reshape(-1, GROUP)
            return ((groups - groups.mean(1, keepdims=True)) / groups.std(1, keepdims=True)).ravel()

        return advantages

    def token_kl(self, n):
        p, q = log_probs(n, np.float64)
        return lambda: float(np.sum(np.exp(p) * (p - q)))

    def token_kl_f32(self, n):
        p, q = log_probs(n, np.float32)
        return lambda: float(np.sum(np.exp(p) * (p - q)))

    def _schulman(self, n, dtype):
        p, q = log_probs(n, dtype)

        def kl():
            r = q - p
            return float(np.sum(np.exp(r) - r - 1))

        return kl

    def token_kl_schulman(self, n):
        return self._schulman(n, np.float64)

    def token_kl_schulman_f32(self, n):
        return self._schulman(n, np.float32)

    def batch_token_kl(self, size):
        p, q = (x.reshape(size) for x in log_probs(size[0] * size[1], np.float64))
        return lambda: np.sum(np.exp(p) * (p - q), axis=1)

    def _replay(self, capacity, n):
        columns = transitions(capacity)
        rng = np.random.default_rng(0)

        def sample():
            at = rng.integers(0, capacity, n)
            return [column[at] for column in columns]

        return sample

    def replay_100k(self, n):
        return self._replay(100_000, n)

    def replay_1m(self, n):
        return self._replay(1_000_000, n)


class Gymnasium:
    """Gymnasium's vector environments: CartPole's own vectorised one, the loop over single ones for the others."""

    def versions(self):
        import gymnasium

        return {"gymnasium": gymnasium.__version__}

    def _env(self, env_id, n, mode, most):
        import gymnasium

        limit(n, most)
        env = gymnasium.make_vec(env_id, n, vectorization_mode=mode)
        env.reset(seed=0)
        env.action_space.seed(0)
        actions = env.action_space.sample()
        return lambda: env.step(actions)

    def cartpole(self, n):
        return self._env("CartPole-v1", n, "vector_entry_point", 1 << 20)

    cartpole_views = cartpole

    def pendulum(self, n):
        return self._env("Pendulum-v1", n, "sync", 1024)

    def mountain_car(self, n):
        return self._env("MountainCar-v0", n, "sync", 1024)

    def mountain_car_continuous(self, n):
        return self._env("MountainCarContinuous-v0", n, "sync", 1024)

    def acrobot(self, n):
        return self._env("Acrobot-v1", n, "sync", 1024)


class SB3:
    """Stable-Baselines3's buffers."""

    def versions(self):
        import stable_baselines3

        return {"stable_baselines3": stable_baselines3.__version__}

    def _rollout(self, n, steps):
        import torch
        from gymnasium.spaces import Box
        from stable_baselines3.common.buffers import RolloutBuffer

        torch.set_num_threads(1)
        box = Box(-1, 1, (1,), np.float32)
        buffer = RolloutBuffer(steps, box, box, device="cpu", gae_lambda=LAM, gamma=GAMMA, n_envs=n)
        r, v, d = (x.reshape(n, steps).T for x in trajectory(n * steps, np.float32))
        buffer.rewards[:], buffer.values[:] = r, v
        # Its flags mark steps that *begin* an episode.
        buffer.episode_starts[1:], last_done = d[:-1], d[-1]
        last = torch.from_numpy(bootstraps(n, np.float32))

        def gae():
            buffer.compute_returns_and_advantage(last, last_done)
            return buffer.advantages, buffer.returns

        return gae

    def gae(self, n):
        return self._rollout(1, limit(n, 32768))

    def gae_batched_f32(self, size):
        return self._rollout(*size)

    def _replay(self, capacity):
        import torch
        from gymnasium.spaces import Box
        from stable_baselines3.common.buffers import ReplayBuffer

        torch.set_num_threads(1)
        obs_space = Box(-np.inf, np.inf, (OBS_DIM,), np.float32)
        return ReplayBuffer(capacity, obs_space, Box(-1, 1, (ACT_DIM,), np.float32), device="cpu")

    def push(self, _):
        buffer = self._replay(100_000)
        obs, next_obs, actions, rewards, terminated, _ = transitions(1)
        return lambda: buffer.add(obs, next_obs, actions, rewards, terminated, [{}])

    def _sample(self, capacity, n):
        buffer = self._replay(capacity)
        obs, next_obs, actions, rewards, terminated, _ = transitions(capacity)
        buffer.observations[:, 0], buffer.next_observations[:, 0], buffer.actions[:, 0] = obs, next_obs, actions
        buffer.rewards[:, 0], buffer.dones[:, 0] = rewards, terminated
        buffer.full = True
        return lambda: buffer.sample(n)

    def replay_100k(self, n):
        return self._sample(100_000, n)

    replay_packed_100k = replay_100k

    def replay_1m(self, n):
        return self._sample(1_000_000, n)


class TorchRL:
    """TorchRL's estimators and replay buffer."""

    def versions(self):
        import torch
        import torchrl

        torch.set_num_threads(1)
        return {"torchrl": torchrl.__version__, "torch": torch.__version__}

    def _gae(self, n, steps, dtype):
        import torch
        from torchrl.objectives.value.functional import vec_generalized_advantage_estimate

        r, v, d = (torch.from_numpy(x.reshape(n, steps, 1)) for x in trajectory(n * steps, dtype))
        last = torch.from_numpy(bootstraps(n, dtype))
        following = torch.cat([v[:, 1:], last.reshape(n, 1, 1)], 1)
        done = d.bool()

        def gae():
            with torch.no_grad():
                advantages, returns = vec_generalized_advantage_estimate(GAMMA, LAM, v, following, r, done, done)
            return advantages.numpy(), returns.numpy()

        return gae

    def gae(self, n):
        return self._gae(1, limit(n, 32768), np.float64)

    def gae_batched(self, size):
        return self._gae(*size, np.float64)

    def gae_batched_f32(self, size):
        return self._gae(*size, np.float32)

    def _replay(self, capacity, n):
        import torch
        from tensordict import TensorDict
        from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), batch_size=n)
        names = ("obs", "next_obs", "actions", "rewards", "terminated", "truncated")
        columns = {name: torch.from_numpy(a) for name, a in zip(names, transitions(capacity), strict=True)}
        buffer.extend(TensorDict(columns, batch_size=[capacity]))
        return buffer.sample

    def replay_100k(self, n):
        return self._replay(100_000, n)

    replay_packed_100k = replay_100k

    def replay_1m(self, n):
        return self._replay(1_000_000, n)


SYSTEMS = {
    "rlox": Rlox,
    "original": Original,
    "numpy": NumPy,
    "gymnasium": Gymnasium,
    "sb3": SB3,
    "torchrl": TorchRL,
}


def sample_ns(f, samples, least):
    """Return `samples` times in nanoseconds per call; calls shorter than `least` are repeated within a sample."""
    clock = time.perf_counter_ns
    end = clock() + WARM_UP_NS
    f()
    while clock() < end:
        f()
    started = clock()
    f()
    calls = max(1, min(1000, round(least / max(1, clock() - started))))
    rounds = range(calls)
    times = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(samples):
            started = clock()
            for _ in rounds:
                f()
            times.append((clock() - started) / calls)
    finally:
        gc.enable()
    return times


def serve(system):
    systems = SYSTEMS[system]()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the output of a library must not get between the answers
    print(json.dumps({"versions": systems.versions()}), file=out, flush=True)
    held = None  # the case of the last request, since its rounds follow each other
    for line in sys.stdin:
        request = json.loads(line)
        size = request["size"]
        size = tuple(size) if isinstance(size, list) else size
        try:
            if held is None or held[:2] != (request["op"], size):
                if getattr(systems, "_cleanup", None) is not None:
                    systems._cleanup.close()
                    systems._cleanup = None
                held = None
                gc.collect()
                build = getattr(systems, request["op"], None)
                if build is None:
                    raise Absent
                held = (request["op"], size, build(size))
            result = held[2]() if request["determined"] else None
            check = None if result is None else total(result)
            answer = {"ns": sample_ns(held[2], request["samples"], request["sample_ns"]), "check": check}
            if check is not None and not math.isfinite(check):
                answer = {"error": f"the result is {check}"}
        except Absent:
            answer = {"absent": True}
        except Exception as e:
            held = None
            answer = {"error": f"{type(e).__name__}: {e}"}
        print(json.dumps(answer), file=out, flush=True)
    if getattr(systems, "_cleanup", None) is not None:
        systems._cleanup.close()


if __name__ == "__main__":
    serve(sys.argv[1])
