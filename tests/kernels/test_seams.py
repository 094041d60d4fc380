"""`cut`: in no memory does an n-step return cross a point where environments were restarted."""

import pickle

import numpy as np
import pytest

import rlox

GAMMA, N_STEP = 0.5, 3
KINDS = ["uniform", "prioritized", "mmap", "mmap-small", "stacks"]


def make(kind, n_envs, folder, capacity=60):
    more = {"n_envs": n_envs, "n_step": N_STEP, "gamma": GAMMA}
    if kind.startswith("mmap"):
        return rlox.MmapReplayBuffer(1 if kind == "mmap-small" else capacity // 2, capacity, 2, 1, folder, **more)
    if kind == "stacks":
        more |= {"obs_shape": (2, 1, 1), "obs_dtype": np.uint8, "n_stacked": 2}
        return rlox.ReplayBuffer(capacity, None, 1, **more)
    return {"uniform": rlox.ReplayBuffer, "prioritized": rlox.PrioritizedReplayBuffer}[kind](capacity, 2, 1, **more)


class Pusher:
    """Pushes steps whose observation is (steps since the seam, number of the seam); rewards are 1."""

    def __init__(self, buffer, n_envs):
        self.buffer, self.n_envs, self.seam, self.t = buffer, n_envs, 0, 0
        self.dtype = np.uint8 if getattr(buffer, "frame_slots", 0) else np.float32

    def obs(self, t):
        return np.tile(np.array([t, self.seam], self.dtype), (self.n_envs, 1))

    def steps(self, n):
        for _ in range(n):
            zeros = np.zeros(self.n_envs)
            ends = np.zeros(self.n_envs, bool)
            self.buffer.push_batch(self.obs(self.t), self.obs(self.t + 1), zeros, zeros + 1, ends, ends)
            self.t += 1

    def restart(self):
        self.buffer.cut()
        self.t, self.seam = 0, self.seam + 1


def windows(buffer, lengths):
    """Check 500 draws against the lengths of the segments between seams, and return the segments of the draws."""
    batch = buffer.sample(500, 1)
    obs, after = (np.asarray(batch[name], float).reshape(500, 2) for name in ("obs", "next_obs"))
    steps = -np.log2(batch["discounts"])  # GAMMA is 1/2
    left = np.array(lengths)[obs[:, 1].astype(int)] - obs[:, 0]
    np.testing.assert_array_equal(steps, np.minimum(N_STEP, left))
    np.testing.assert_array_equal(after, obs + np.stack([steps, 0 * steps], 1))
    np.testing.assert_array_equal(batch["rewards"], 2 - 2 * GAMMA**steps)
    assert not np.asarray(batch["terminated"]).any()
    return set(obs[:, 1].astype(int))


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_no_return_crosses_a_seam(kind, n_envs, tmp_path):
    buffer = make(kind, n_envs, tmp_path)
    pusher = Pusher(buffer, n_envs)
    buffer.cut()  # has no effect on an empty memory
    assert len(buffer.seams) == 0
    lengths = [5, 1, 4]
    for n in lengths:
        pusher.steps(n)
        pusher.restart()
        buffer.cut()  # cutting again adds no seam
    assert windows(buffer, lengths) == {0, 1, 2}
    assert buffer.n_pushed == 10 * n_envs
    np.testing.assert_array_equal(buffer.seams, np.cumsum(lengths) * n_envs)
    # Seams are part of the saved state, also separate later transitions, and are removed with their transitions.
    state = buffer.get_state()
    if kind.startswith("mmap"):
        again = make(kind, n_envs, tmp_path)
        again.set_state(state)
    else:
        again = pickle.loads(pickle.dumps(buffer))
    for memory in (buffer, again):
        more = Pusher(memory, n_envs)
        more.seam = 3
        more.steps(6)
        assert windows(memory, [*lengths, 6]) == {0, 1, 2, 3}
        more.restart()
        more.steps(60)
        assert windows(memory, [*lengths, 6, 60]) == {4}
    assert buffer.seams.tolist() == [] == again.seams.tolist()
    assert "seams" not in buffer.get_state()
    for bad in (np.array([3, 2]), np.array([10**6]), np.array([0]), [1], np.array([1.0])):
        with pytest.raises(ValueError, match=r"state\['seams'\] must be ascending"):
            again.set_state({**state, "seams": bad})


def test_packed_and_gathered_rows_respect_seams(tmp_path):
    buffer = make("uniform", 2, tmp_path)
    pusher = Pusher(buffer, 2)
    pusher.steps(2)
    pusher.restart()
    pusher.steps(3)
    rows, sample = buffer.sample_packed(100, 5), buffer.sample(100, 5)
    for name, columns in buffer.columns.items():
        np.testing.assert_array_equal(rows[:, columns].reshape(sample[name].shape), sample[name], err_msg=name)
    np.testing.assert_array_equal(
        buffer.gather(np.arange(10))["discounts"].reshape(5, 2)[:, 0], [0.25, 0.5, 0.125, 0.25, 0.5]
    )


def test_a_state_without_seams_is_accepted(tmp_path):
    """As written by rlox 0.6.0."""
    for kind in KINDS:
        buffer = make(kind, 1, tmp_path)
        Pusher(buffer, 1).steps(7)
        state = buffer.get_state()
        assert "seams" not in state
        buffer.cut()
        buffer.set_state(state)
        assert windows(buffer, [7]) == {0}
        pusher = Pusher(buffer, 1)
        pusher.t = 7
        pusher.steps(3)
        assert windows(buffer, [10]) == {0}


def test_sequences_start_at_seams():
    buffer = rlox.SequenceReplayBuffer(40, 1, n_envs=2)
    push = lambda t: buffer.push_batch(np.full((2, 1), t), None, np.zeros((2, 1)), [t, t], [False] * 2, [False] * 2)  # noqa: E731
    for t in range(8):
        if t == 5:
            buffer.cut()
        push(t)
    batch = buffer.sample(200, 4, 0, cross_episodes=False)
    first = batch["rewards"][:, 0]
    np.testing.assert_array_equal(batch["mask"].sum(1), np.minimum(4, np.where(first < 5, 5 - first, 8 - first)))
    whole = buffer.sample(50, 8, 0)
    assert whole["is_first"].tolist() == [[t in (0, 5) for t in range(8)]] * 50
