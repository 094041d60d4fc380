"""OfflineDatasetBuffer against the arrays it was created from."""

import os
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

import rlox
from rlox import OfflineDatasetBuffer

FULL = os.environ.get("RLOX_HYPOTHESIS") == "full"
ORDER = ("obs", "next_obs", "actions", "rewards", "terminated", "truncated")


def dataset(n=100, d=3, a=2, seed=0, ends=(9, 49, 79), cuts=(59,)):
    """A dataset whose rewards are the row numbers."""
    rng = np.random.default_rng(seed)
    flags = np.zeros((2, n), bool)
    flags[0, list(ends)] = flags[1, list(cuts)] = True
    arrays = [rng.normal(size=(n, k)).astype("f4") for k in (d, d, a)]
    return dict(zip(ORDER, [*arrays, np.arange(n, dtype="f4"), *flags], strict=True))


def bounds(data):
    """The (start, end) of every episode."""
    ends = [t + 1 for t in range(len(data["rewards"])) if data["terminated"][t] or data["truncated"][t]]
    if not ends or ends[-1] != len(data["rewards"]):
        ends.append(len(data["rewards"]))
    return list(zip([0, *ends[:-1]], ends, strict=True))


@pytest.mark.slow
@settings(max_examples=2000 if FULL else 150, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    n=st.integers(1, 60),
    d=st.sampled_from([1, 2, 3, 4, 6, 7, 8, 11, 17, 40]),
    a=st.integers(1, 3),
    b=st.integers(1, 70),
    length=st.integers(1, 12),
    p=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    kind=st.sampled_from(["flat", "rows", "converted", "images"]),
    gamma=st.sampled_from([1.0, 0.9, 0.0]),
    start=st.sampled_from(["transitions", "episodes"]),
    save=st.sampled_from([None, "pickle", "state"]),
)
def test_samples_equal_rows_of_the_arrays(seed, n, d, a, b, length, p, kind, gamma, start, save):
    rng = np.random.default_rng(seed)
    data = dataset(n, d, a, seed, (), ())
    data["terminated"], data["truncated"] = rng.random((2, n)) < p / 2
    if kind == "images":
        for k in ("obs", "next_obs"):
            data[k] = rng.integers(0, 256, size=(n, d, 2), dtype=np.uint8)
    given_ = dict(data)
    if kind == "flat":
        given_ = {k: x.ravel() for k, x in data.items()}
    elif kind == "converted":
        given_ = {k: np.asfortranarray(x.astype("f8")) for k, x in data.items()}
        given_["rewards"] = given_["rewards"][:, None]
    buffer = OfflineDatasetBuffer(**given_)
    if save == "pickle":
        buffer = pickle.loads(pickle.dumps(buffer))
    elif save == "state":
        state, buffer = buffer.get_state(), OfflineDatasetBuffer(**dataset())
        buffer.set_state(state)
    assert len(buffer) == buffer.len() == n

    batch = buffer.sample(b, seed)
    rows = batch["rewards"].astype(int)
    assert set(batch) == set(ORDER)
    for k in ORDER:
        np.testing.assert_array_equal(batch[k], data[k][rows])
        assert batch[k].dtype == data[k].dtype
        assert batch[k].flags.writeable
    np.testing.assert_array_equal(buffer.sample(b + 7, seed)["rewards"][:b], batch["rewards"])

    episodes = bounds(data)
    assert buffer.n_episodes() == len(episodes)
    traj = buffer.sample_trajectories(b, length, seed, gamma=gamma, start=start)
    assert traj["obs"].shape == (b, length, *data["obs"].shape[1:])
    assert traj["timesteps"].dtype == np.int64
    for i in range(b):
        used = int(traj["mask"][i].sum())
        first = int(traj["rewards"][i, 0])
        begin, end = next((x, y) for x, y in episodes if x <= first < y)
        assert used == min(length, end - first)
        if start == "episodes":
            assert used == min(length, end - begin)
        for k in ("obs", "actions", "rewards", "terminated", "truncated"):
            np.testing.assert_array_equal(traj[k][i, :used], data[k][first : first + used])
            assert not traj[k][i, used:].any()
        assert traj["mask"][i, :used].all()
        assert traj["timesteps"][i].tolist() == [*range(first - begin, first - begin + used), *[0] * (length - used)]
        togo = [sum(data["rewards"][t:end] * gamma ** np.arange(end - t)) for t in range(first, first + used)]
        np.testing.assert_allclose(traj["returns_to_go"][i, :used], togo, rtol=1e-5)
        assert not traj["returns_to_go"][i, used:].any()


def test_stats():
    data = dataset()
    stats = OfflineDatasetBuffer(**data).stats()
    returns = [data["rewards"][x:y].sum() for x, y in bounds(data)]
    assert returns == [45, 1180, 545, 1390, 1790]
    expected = {"n_transitions": 100, "n_episodes": 5, "obs_dim": 3, "act_dim": 2, "mean_return": 990.0}
    expected |= {"std_return": np.std(returns, ddof=1), "min_return": 45.0, "max_return": 1790.0}
    expected |= {"mean_episode_length": 20.0, "min_episode_length": 10, "max_episode_length": 40}
    expected |= {"n_terminated": 3, "n_truncated": 1, "unfinished": True, "mean_reward": 49.5}
    for k, value in expected.items():
        assert stats[k] == pytest.approx(value), k
    np.testing.assert_allclose(stats["obs_mean"], data["obs"].mean(0), atol=1e-6)
    np.testing.assert_allclose(stats["obs_std"], data["obs"].std(0) + 1e-3, rtol=1e-5)
    one = OfflineDatasetBuffer(**dataset(4, ends=(3,), cuts=())).stats()
    assert (one["n_episodes"], one["std_return"], one["unfinished"]) == (1, 0.0, False)


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e4])
def test_normalisation(scale):
    data = dataset(5000, 17, ends=(), cuts=())
    # Means far from 0: sums of squares would lose every digit in float32.
    data["obs"] = (data["obs"] * scale + 1000 * np.arange(17)).astype("f4")
    data["obs"][:, 3] = 5.0
    buffer = OfflineDatasetBuffer(**data, normalize=True)
    mean, std = data["obs"].mean(0, dtype="f8"), data["obs"].std(0, dtype="f8") + 1e-3
    np.testing.assert_allclose(buffer.obs_mean, mean, rtol=1e-6)
    np.testing.assert_allclose(buffer.obs_std, std, rtol=1e-6)
    batch = buffer.sample(64, 1)
    rows = batch["rewards"].astype(int)
    for k in ("obs", "next_obs"):
        expected = (data[k][rows] - buffer.obs_mean) / buffer.obs_std
        np.testing.assert_allclose(batch[k], expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(buffer.normalize(data[k][rows]), batch[k])
    assert (batch["obs"][:, 3] == 0).all()
    traj = buffer.sample_trajectories(5, 9, 1)
    rows = traj["rewards"].astype(int)
    np.testing.assert_array_equal(traj["obs"][traj["mask"]], buffer.normalize(data["obs"][rows[traj["mask"]]]))
    assert not traj["obs"][~traj["mask"]].any()
    again = pickle.loads(pickle.dumps(buffer))
    np.testing.assert_array_equal(again.sample(64, 1)["obs"], batch["obs"])
    assert buffer.normalize(data["obs"][0].tolist()).shape == (17,)


def test_transitions_are_uniform_and_independent():
    buffer = OfflineDatasetBuffer(**dataset(64, ends=(), cuts=()))
    rows = buffer.sample(64 * 64 * 20, 5)["rewards"].astype(int)
    assert chisquare(np.bincount(rows, minlength=64)).pvalue > 1e-4
    assert chisquare(np.bincount(rows[::2] * 64 + rows[1::2], minlength=64 * 64)).pvalue > 1e-4
    # One draw per seed: neighbouring seeds are independent.
    seeds = np.array([buffer.sample(1, s)["rewards"][0] for s in range(20_000)]).astype(int)
    assert chisquare(np.bincount(seeds, minlength=64)).pvalue > 1e-4


def test_starts_of_trajectories_are_as_documented():
    data = dataset()
    buffer = OfflineDatasetBuffer(**data)
    first = buffer.sample_trajectories(60_000, 12, 3)["rewards"][:, 0].astype(int)
    assert chisquare(np.bincount(first, minlength=100)).pvalue > 1e-4
    first = buffer.sample_trajectories(60_000, 12, 3, start="episodes")["rewards"][:, 0].astype(int)
    expected = np.zeros(100)
    for begin, end in bounds(data):
        span = max(1, end - begin - 12 + 1)
        expected[begin : begin + span] = 60_000 / 5 / span
    counts = np.bincount(first, minlength=100)
    assert (counts[expected == 0] == 0).all()
    assert chisquare(counts[expected > 0], expected[expected > 0]).pvalue > 1e-4


def test_large_arrays_are_not_copied_or_changed(tmp_path):
    data = dataset(1000)
    for k, x in data.items():
        np.save(tmp_path / f"{k}.npy", x)
    mapped = {k: np.load(tmp_path / f"{k}.npy", mmap_mode="r") for k in data}
    buffer = OfflineDatasetBuffer(**mapped)
    for k, x in buffer.get_state().items():
        if k in mapped:
            assert np.shares_memory(x, mapped[k])
            assert not x.flags.writeable
    batch = buffer.sample(100, 0)
    np.testing.assert_array_equal(batch["obs"], data["obs"][batch["rewards"].astype(int)])
    OfflineDatasetBuffer(**data, normalize=True).sample(10, 0)["obs"][:] = 9
    assert data["obs"].flags.writeable
    assert (data["obs"] != 9).all()


def test_discrete_actions_and_flags_of_every_kind():
    data = dataset(20, ends=(4,), cuts=(9,)) | {"actions": np.arange(20) % 3}
    for actions in (data["actions"], data["actions"][:, None], data["actions"].tolist()):
        batch = OfflineDatasetBuffer(**data | {"actions": actions}, act_dim=1, obs_dim=3).sample(8, 0)
        assert batch["actions"].shape == (8, 1)
        np.testing.assert_array_equal(batch["actions"][:, 0], batch["rewards"] % 3)
    for dtype in (np.uint8, np.int64, np.float32, np.float64):
        flags = {k: data[k].astype(dtype) for k in ("terminated", "truncated")}
        assert OfflineDatasetBuffer(**data | flags).n_episodes() == 3


BAD = np.zeros((100, 3), "f4")
BAD[7, 1] = np.nan


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"obs": BAD}, ValueError, "obs must be finite float32 numbers, got nan in row 7"),
        ({"next_obs": BAD.ravel()}, ValueError, "next_obs must be finite float32 numbers, got nan in row 7"),
        ({"actions": np.full(100, np.inf)}, ValueError, "actions must be finite float32 numbers, got inf in row 0"),
        ({"rewards": np.full(100, 1e300)}, ValueError, "rewards must be finite float32 numbers, got inf in row 0"),
        ({"rewards": np.zeros((100, 2))}, ValueError, r"rewards must have shape \(N,\)"),
        ({"rewards": []}, ValueError, "rewards must have at least one transition"),
        ({"rewards": np.zeros(99)}, ValueError, r"obs must have one row per transition \(99\), got shape \(100, 3\)"),
        ({"rewards": None}, TypeError, "rewards must be an array of numbers"),
        ({"obs": np.zeros((99, 3))}, ValueError, r"obs must have one row per transition \(100\), got shape \(99, 3\)"),
        ({"obs": np.zeros(299)}, ValueError, "obs must have a multiple of the 100 transitions"),
        ({"obs": np.zeros((100, 0))}, ValueError, "obs must have at least one number per row"),
        ({"obs": 1.0}, ValueError, "obs must have one row per transition"),
        ({"obs": "abc"}, TypeError, "obs must be an array of numbers"),
        ({"obs": [[1], [1, 2]]}, ValueError, "obs must be an array of numbers"),
        ({"next_obs": np.zeros((100, 4))}, ValueError, "next_obs must have the shape of obs"),
        ({"next_obs": np.zeros((100, 3), np.uint8)}, TypeError, "next_obs must have the dtype of obs"),
        ({"actions": np.zeros((100, 2, 2))}, ValueError, r"actions must have shape \(N, A\)"),
        ({"terminated": np.zeros(99)}, ValueError, "terminated must have one entry per transition"),
        ({"terminated": np.full(100, 2)}, ValueError, "terminated must hold only 0 and 1, got 2 in row 0"),
        ({"truncated": np.full(100, 2, np.uint8)}, ValueError, "truncated must hold only 0 and 1, got 2 in row 0"),
        ({"truncated": np.full(100, np.nan)}, ValueError, "truncated must hold only 0 and 1, got nan"),
        ({"truncated": ["a"] * 100}, TypeError, "truncated must be bool, uint8 or float flags"),
        ({"obs_dim": 4}, ValueError, "obs_dim must be 3, the numbers per row of obs, got 4"),
        ({"act_dim": 1.0}, TypeError, "act_dim must be an integer"),
        ({"normalize": "yes"}, TypeError, "normalize must be True or False"),
        ({"lazy": 1}, TypeError, "lazy must be True or False, got 1"),
        ({"metadata": "x"}, TypeError, "metadata must be a dict, got str"),
        ({"n_actions": 2}, ValueError, "n_actions must be None for 2 numbers per action, got 2"),
        ({"n_actions": 2, "actions": np.arange(100) % 3}, ValueError,
         r"actions must be integers below n_actions \(2\), got 2.0 in row 2"),
        ({"n_actions": 2, "actions": np.full(100, 0.5)}, ValueError, "actions must be integers .* got 0.5 in row 0"),
        ({"obs_mean": np.zeros(3)}, ValueError, "obs_mean and obs_std must be given together"),
        ({"obs_mean": np.zeros(3), "obs_std": np.zeros(3)}, ValueError, "obs_std must be finite and above 0"),
        ({"obs_mean": np.zeros(2), "obs_std": np.ones(2)}, ValueError, r"obs_mean must have shape \(3,\)"),
        ({"normalize": True, "obs": np.zeros((100, 3), "u1"), "next_obs": np.zeros((100, 3), "u1")}, ValueError,
         "normalize must be False for uint8"),
    ],
)  # fmt: skip
def test_errors_of_the_constructor(change, error, message):
    with pytest.raises(error, match="OfflineDatasetBuffer: " + message):
        OfflineDatasetBuffer(**dataset() | change)


def test_rows_of_a_lazy_buffer_are_checked_in_samples():
    data = dataset()
    np.testing.assert_array_equal(
        OfflineDatasetBuffer(**data, lazy=True).sample(50, 1)["obs"], OfflineDatasetBuffer(**data).sample(50, 1)["obs"]
    )
    for name in ("obs", "next_obs", "actions", "rewards"):
        bad = data[name].copy()
        bad[31] = np.nan
        lazy = OfflineDatasetBuffer(**data | {name: bad}, lazy=True)
        with pytest.raises(ValueError, match=rf"OfflineDatasetBuffer.sample: {name} must be finite .* nan in row 31"):
            lazy.sample(4000, 0)
        if name != "next_obs":  # trajectories have no next_obs
            with pytest.raises(ValueError, match=rf"sample_trajectories: {name} must be finite .* nan in row 31"):
                lazy.sample_trajectories(400, 5, 0)
    given = OfflineDatasetBuffer(**data, normalize=True, obs_mean=np.full(3, 2.0), obs_std=np.full(3, 4.0))
    rows = given.sample(9, 0)["rewards"].astype(int)
    np.testing.assert_allclose(given.sample(9, 0)["obs"], (data["obs"][rows] - 2) / 4, rtol=1e-6)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda b: b.sample(0, 1), ValueError, r"sample: batch_size must be at least 1 and at most 2\*\*40, got 0"),
        (lambda b: b.sample(-1, 1), ValueError, "sample: batch_size must be"),
        (lambda b: b.sample(2**70, 1), ValueError, "sample: batch_size must be"),
        (lambda b: b.sample(1.0, 1), TypeError, "sample: batch_size must be an integer"),
        (lambda b: b.sample(True, 1), TypeError, "sample: batch_size must be an integer"),
        (lambda b: b.sample(1, -1), ValueError, "sample: seed must be at least 0"),
        (lambda b: b.sample(1, None), TypeError, "sample: seed must be an integer"),
        (lambda b: b.sample_trajectories(1, 0, 1), ValueError, "sample_trajectories: seq_len must be"),
        (lambda b: b.sample_trajectories(2**39, 2**39, 1), ValueError, r"batch_size \* seq_len must be"),
        (lambda b: b.sample_trajectories(1, 1, 1, gamma=1.5), ValueError, r"gamma must lie in \[0, 1\], got 1.5"),
        (lambda b: b.sample_trajectories(1, 1, 1, gamma=np.nan), ValueError, "gamma must lie"),
        (lambda b: b.sample_trajectories(1, 1, 1, gamma="1"), TypeError, "gamma must be a number"),
        (lambda b: b.sample_trajectories(1, 1, 1, start="x"), ValueError, "start must be 'transitions' or 'episodes'"),
        (lambda b: b.normalize(np.zeros(3)), ValueError, "normalize: the buffer must be created with normalize=True"),
        (lambda b: b.set_state({}), ValueError, "set_state: state must have the keys"),
        (lambda b: b.set_state({**b.get_state(), "normalize": 2}), ValueError, "normalize must be 0 or 1"),
        (lambda b: b.set_state({**b.get_state(), "rewards": np.full(100, np.nan)}), ValueError, "rewards must be fin"),
    ],
)
def test_errors_name_the_argument_and_change_nothing(call, error, message):
    buffer = OfflineDatasetBuffer(**dataset())
    before = buffer.sample(20, 0)
    with pytest.raises(error, match=r"OfflineDatasetBuffer\..*" + message):
        call(buffer)
    np.testing.assert_array_equal(buffer.sample(20, 0)["obs"], before["obs"])


def test_wrong_shapes_to_normalize():
    buffer = OfflineDatasetBuffer(**dataset(), normalize=True)
    for bad in (np.zeros(4), np.zeros((3, 4)), 1.0):
        with pytest.raises(ValueError, match=r"normalize: obs must have shape \(..., 3\)"):
            buffer.normalize(bad)
    assert rlox.OfflineDatasetBuffer is OfflineDatasetBuffer


def test_a_state_keeps_the_number_of_actions_and_a_pickle_all_that_was_given():
    data = dataset(n=6, a=1, ends=(5,), cuts=())
    data["actions"] = np.array([0, 1, 2, 0, 1, 2])
    moments = {"obs_mean": np.ones(3, "f4"), "obs_std": np.full(3, 2, "f4")}
    buffer = OfflineDatasetBuffer(**data, metadata={"env": "X"}, n_actions=4, **moments)
    other = OfflineDatasetBuffer(**dataset())
    other.set_state(buffer.get_state())
    assert other.n_actions == 4
    copied = pickle.loads(pickle.dumps(buffer))
    assert (copied.n_actions, copied.metadata) == (4, {"env": "X"})
    np.testing.assert_array_equal(copied.obs_mean, moments["obs_mean"])
    np.testing.assert_array_equal(copied.obs_std, moments["obs_std"])
