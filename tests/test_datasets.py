"""rlox.open_dataset: all formats give the same rows, files are mapped where possible, errors name the bad row."""

import json
import pickle
import subprocess
import sys
import warnings

import gymnasium as gym
import h5py
import minari
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
import torch
from gymnasium.vector.utils import concatenate, create_empty_array
from minari.data_collector import EpisodeBuffer

import rlox
from rlox.config import DatasetConfig
from rlox.envs import EnvSpec
from rlox.envs.spec import SpaceAdapter
from rlox.offline.dataset import action_bounds, convert, dataset_metadata, require_fit
from rlox.offline.export import export
from rlox.offline.rows import COLUMNS
from rlox.offline.scores import normalized_score
from rlox.offline.sources import Source

D4RL = ("observations", "next_observations", "actions", "rewards", "terminals", "timeouts")


@pytest.fixture(autouse=True)
def _own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))


def rows(n=1000, discrete=False, seed=0):
    """Complete episodes as an environment produces them: within an episode, next_obs is the next row's obs."""
    rng = np.random.default_rng(seed)
    obs = rng.normal(size=(n, 3)).astype("f4")
    terminated, truncated = np.arange(n) % 70 == 69, np.arange(n) % 333 == 332
    truncated[-1] = not terminated[-1]
    next_obs = np.concatenate([obs[1:], obs[:1]])
    ends = terminated | truncated
    next_obs[ends] = rng.normal(size=(ends.sum(), 3))
    actions = rng.integers(0, 4, n) if discrete else rng.uniform(-1, 1, (n, 2)).astype("f4")
    columns = (obs, next_obs, actions, rng.normal(size=n).astype("f4"), terminated, truncated)
    return dict(zip(COLUMNS, columns, strict=True))


def written(path, columns, metadata=None):
    convert(Source("test", iter([columns]), metadata or {}), path)
    return path


def as_table(columns, **changes):
    """A table as pandas or a user's script would write it: lists of variable length, bools, doubles."""
    return pa.table({name: list(x) if x.ndim > 1 else x for name, x in (columns | changes).items()})


def save(path, columns):
    """Save the rows with the usual library of each format instead of with rlox."""
    if path.suffix == ".npz":
        if "small" in path.name:
            np.savez_compressed(path, **{name: np.asfortranarray(column) for name, column in columns.items()})
        else:
            np.savez(path, **columns)
    elif path.suffix == ".h5":
        with h5py.File(path, "w") as file:
            for name, theirs in zip(COLUMNS, D4RL, strict=True):
                file[theirs] = columns[name]
            file["infos/qpos"] = np.zeros(3)
    elif path.suffix == ".parquet":
        pa.parquet.write_table(as_table(columns), path, row_group_size=300)
    else:
        pa.feather.write_feather(as_table(columns), path, chunksize=300)  # compressed, in batches
    return path


@pytest.mark.parametrize("discrete", [False, True])
@pytest.mark.parametrize("name", ["a.npz", "small.npz", "a.h5", "a.parquet", "a.feather", "a.arrow"])
def test_every_format_gives_the_same_rows_and_samples(tmp_path, name, discrete):
    columns = rows(discrete=discrete)
    path = written(tmp_path / name, columns) if name == "a.arrow" else save(tmp_path / name, columns)
    data = rlox.open_dataset(path, normalize=True)
    memory = rlox.OfflineDatasetBuffer(**columns, normalize=True)
    assert data.n_actions == memory.n_actions == (4 if discrete else None)
    for key, column in memory.get_state().items():
        np.testing.assert_array_equal(data.get_state()[key], column)
    for key, column in memory.sample(300, 5).items():
        np.testing.assert_array_equal(data.sample(300, 5)[key], column)
    again = pickle.loads(pickle.dumps(data))
    np.testing.assert_array_equal(again.sample(300, 5)["obs"], data.sample(300, 5)["obs"])
    assert (again.n_actions, again.metadata) == (data.n_actions, data.metadata)


@pytest.mark.parametrize("discrete", [False, True])
@pytest.mark.parametrize("dest", ["b.npz", "b.h5", "b.parquet", "minari:lab/b-v0"])
def test_an_export_reads_back_as_it_was(tmp_path, monkeypatch, dest, discrete):
    limits = {} if discrete else {"act_low": [-1, -1], "act_high": [1, 1]}
    known = {**limits, "policies": [{"name": "one"}], "reference_returns": {"random": -1.0, "expert": 2.5}}
    data = rlox.open_dataset(written(tmp_path / "a.arrow", rows(discrete=discrete), known))
    dest = dest if ":" in dest else str(tmp_path / dest)
    export(data, dest)
    back = rlox.open_dataset(dest)
    for key, column in data.get_state().items():
        np.testing.assert_array_equal(back.get_state()[key], column)
    for key in known:
        assert back.metadata[key] == known[key]
    assert back.n_actions == data.n_actions
    np.testing.assert_array_equal(back.obs_std, data.obs_std)


def test_files_are_mapped_not_copied(tmp_path):
    """For rlox's files and for one that pyarrow wrote, the buffer's arrays are the file's own pages."""
    columns = rows(discrete=False)
    ours = written(tmp_path / "ours.arrow", columns)
    theirs = tmp_path / "theirs.arrow"
    flat = {k: pa.array(x.astype("u1") if x.dtype == bool else x.reshape(-1)) for k, x in columns.items()}
    lists = {k: pa.FixedSizeListArray.from_arrays(x, len(x) // 1000) if len(x) > 1000 else x for k, x in flat.items()}
    with pa.ipc.new_file(str(theirs), pa.table(lists).schema) as writer:
        writer.write_batch(pa.record_batch(lists))
    before = pa.total_allocated_bytes()
    for path in (ours, theirs):
        data = rlox.open_dataset(path)
        pages = np.frombuffer(pa.memory_map(str(path)).read_buffer(), "u1")
        for name, column in data.get_state().items():
            if name in COLUMNS:
                # A second mapping has other addresses, so change a byte in the file to see that the arrays show it.
                assert not column.flags.owndata
                assert not column.flags.writeable
                np.testing.assert_array_equal(column.ravel(), columns[name].ravel())
        at = bytes(pages).index(columns["rewards"].tobytes())
        with open(path, "r+b") as file:
            file.seek(at)
            file.write(np.float32(123.5).tobytes())
        assert data.get_state()["rewards"][0] == 123.5
    assert pa.total_allocated_bytes() == before


def test_rows_are_checked_again_when_sampled(tmp_path):
    columns = rows()
    path = written(tmp_path / "a.arrow", columns)
    at = path.read_bytes().index(columns["rewards"].tobytes()) + 4 * 321
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(np.float32(np.nan).tobytes())
    data = rlox.open_dataset(path)  # nothing is read
    with pytest.raises(ValueError, match=r"sample: rewards must be finite float32 numbers, got nan in row 321"):
        data.sample(20_000, 0)
    with pytest.raises(ValueError, match=r"sample_trajectories: rewards must be finite .* row 321"):
        data.sample_trajectories(200, 20, 0)


def test_next_observations_are_derived_and_unknown_ones_dropped(tmp_path):
    """D4RL without next_observations: for rows that a timeout ended, the next observation is unknown."""
    obs = np.arange(12, dtype="f4")[:, None]
    terminals = np.zeros(12, bool)
    timeouts = np.zeros(12, bool)
    terminals[3] = timeouts[7] = timeouts[8] = True  # episodes 0..3, 4..7, 8 alone, 9..11 unfinished
    columns = {"observations": obs, "actions": obs, "rewards": obs[:, 0], "terminals": terminals, "timeouts": timeouts}
    np.savez(tmp_path / "a.npz", **columns)
    data = rlox.open_dataset(tmp_path / "a.npz")
    state = data.get_state()
    assert state["obs"].ravel().tolist() == [0, 1, 2, 3, 4, 5, 6, 9, 10]
    assert state["next_obs"].ravel().tolist() == [1, 2, 3, 3, 5, 6, 7, 10, 11]
    assert state["terminated"].tolist() == [0, 0, 0, 1, 0, 0, 0, 0, 0]
    assert state["truncated"].tolist() == [0, 0, 0, 0, 0, 0, 1, 0, 1]
    assert data.metadata["n_dropped"] == 3
    assert data.n_episodes() == 3


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 5, 999])
def test_derived_columns_do_not_depend_on_the_block_size(tmp_path, size):
    columns = rows(2000, seed=3)
    del columns["next_obs"]
    parts = [{name: x[i : i + size] for name, x in columns.items()} for i in range(0, 2000, size)]
    convert(Source("test", iter(parts)), tmp_path / "parts.arrow")
    one, many = rlox.open_dataset(written(tmp_path / "a.arrow", columns)), rlox.open_dataset(tmp_path / "parts.arrow")
    for key, column in one.get_state().items():
        np.testing.assert_array_equal(many.get_state()[key], column)
    full = rows(2000, seed=3)
    unknown = full["truncated"] & ~full["terminated"]
    assert len(one) == 2000 - unknown.sum() == 2000 - one.metadata["n_dropped"]
    kept = np.flatnonzero(~unknown)
    inner = ~full["terminated"][kept]
    np.testing.assert_array_equal(one.get_state()["next_obs"][inner], full["obs"][kept[inner] + 1])


def change(name, row, value, dtype=None):
    def apply(columns):
        column = columns[name].astype(dtype or columns[name].dtype)
        column[row] = value
        return columns | {name: column}

    return apply


def without(name):
    return lambda columns: {key: x for key, x in columns.items() if key != name}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (change("rewards", 421, np.nan), "column rewards must hold finite float32 numbers, got nan in row 421"),
        (change("rewards", 421, 1e300, "f8"), r"column rewards must hold finite .* got 1e\+300 in row 421"),
        (change("obs", 77, np.inf), "column obs must hold finite float32 numbers, got inf in row 77"),
        (change("next_obs", (999, 1), np.nan), "column next_obs must hold finite float32 numbers, got nan in row 999"),
        (change("terminated", 5, 2, "i8"), "column terminated must hold only 0 and 1, got 2"),
        (without("truncated"), "column truncated must be present, got .*D4RL calls it timeouts.*0 throughout"),
        (without("terminated"), "column terminated must be present, got .*D4RL calls it terminals"),
        (without("rewards"), "column rewards must be present, got actions, next_obs, obs, terminated, truncated"),
        (lambda c: c | {"timeouts": c["truncated"]}, "column truncated must be present once"),
        (lambda c: c | {"episode": np.arange(1000) // 70 % 5},
         "column episode must never decrease, got 0 after 4 in row 350"),
        (lambda c: c | {"episode": np.arange(1000) // 60},
         "column episode must change only after a row that is terminated or truncated, got 1 after 0 in row 60"),
        (lambda c: c | {"episode": np.zeros(1000, int)},
         "column episode must change after a row that is terminated or truncated, got 0 after 0 in row 70"),
        (lambda c: {name: x[:0] for name, x in c.items()}, "rewards must have at least one transition, got none"),
        (lambda c: c | {"rewards": np.array(["a"] * 1000)}, "column rewards must hold numbers"),
        (lambda c: c | {"rewards": np.zeros((1000, 2), "f4")}, "column rewards must have one number in each row"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("suffix", [".npz", ".feather"])
def test_a_bad_row_is_named_by_column_and_row(tmp_path, spoil, message, suffix):
    columns, path = spoil(rows()), tmp_path / f"a{suffix}"
    if suffix == ".npz":
        np.savez(path, **columns)
    else:
        pa.feather.write_feather(as_table(columns), path, chunksize=130)
    with pytest.raises(ValueError, match=message):
        rlox.open_dataset(path)
    assert list((tmp_path / "cache").rglob("*.arrow*")) == []


def test_actions_without_components(tmp_path):
    columns = rows() | {"actions": np.zeros((1000, 0), "f4")}
    np.savez(tmp_path / "a.npz", **columns)
    with pytest.raises(ValueError, match="column actions must have at least one number in each row, got shape"):
        rlox.open_dataset(tmp_path / "a.npz")


@pytest.mark.parametrize("name", ["obs", "next_obs", "actions", "rewards", "terminated", "truncated"])
def test_arrays_without_numbers_are_named(name):
    columns, n = rows(), 1000
    masked = np.ma.masked_array(columns[name], mask=np.arange(columns[name].size).reshape(columns[name].shape) == 3)
    for value, message in (
        (masked, f"{name} must have no masked values, got 1 of them"),
        (torch.zeros(n, device="meta"), f"{name} must be an array of numbers, got "),
        ([[1.0] * (i % 3) for i in range(n)], f"{name} must be an array of numbers, got "),
    ):
        with pytest.raises(ValueError, match=f"OfflineDatasetBuffer: {message}") as caught:
            rlox.OfflineDatasetBuffer(**{**columns, name: value})
        assert len(str(caught.value)) < 500


def test_actions_out_of_bounds(tmp_path):
    columns = change("actions", 640, (-3, 0))(rows())
    message = r"column actions must lie between \[-1.0, -1.0\] and \[1.0, 1.0\], got \[-3.0, 0.0\] in row 640"
    with pytest.raises(ValueError, match=message):
        written(tmp_path / "a.arrow", columns, {"act_low": [-1.0, -1.0], "act_high": [1.0, 1.0]})
    assert not list(tmp_path.glob("*a.arrow*"))
    # If the file has no bounds, those of the environment apply.
    data = rlox.open_dataset(written(tmp_path / "a.arrow", columns))
    with pytest.raises(ValueError, match=message):
        require_fit(data, EnvSpec((3,), act_dim=2, act_low=np.full(2, -1, "f4"), act_high=np.full(2, 1, "f4")), "IQL")


@pytest.mark.parametrize("cls", [rlox.BC, rlox.IQL, rlox.CQL, rlox.TD3BC])
def test_an_algorithm_without_bounds_takes_those_of_the_data(cls, tmp_path):
    columns = rows()
    columns["actions"] = columns["actions"] * np.float32([2, 0.5]) + np.float32([3, 0])
    data = rlox.OfflineDatasetBuffer(**columns)
    least, most = float(columns["actions"][:, 0].min()), float(columns["actions"][:, 0].max())
    message = rf"{cls.__name__}: act_low=\[{least:.4g}, -1\] and act_high=\[{most:.4g}, 1\] are taken from the dataset"
    with pytest.warns(RuntimeWarning, match=message):
        agent = cls(data, 3, 2, hidden=8)
    np.testing.assert_allclose(agent.spec.act_low, [least, -1])
    np.testing.assert_allclose(agent.spec.act_high, [most, 1])
    agent.train(2)
    agent.save(tmp_path / "a.safetensors")
    # Nothing is warned about or read from the data, because the checkpoint has the bounds.
    again = cls.from_checkpoint(tmp_path / "a.safetensors")
    np.testing.assert_array_equal(again.spec.act_low, agent.spec.act_low)
    assert again.predict(np.zeros(3))[0] > 1


def test_bounds_that_the_file_names_are_used_and_usual_ones_stay_silent(tmp_path):
    def bounds(columns, metadata=None):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.arrow"
        spec = rlox.IQL(rlox.open_dataset(written(path, columns, metadata)), 3, 2, hidden=8).spec
        return spec.act_low.tolist(), spec.act_high.tolist()

    assert bounds(rows()) == ([-1, -1], [1, 1])
    with pytest.warns(RuntimeWarning, match="are taken from the dataset"):
        assert bounds(rows(), {"act_low": [-2.0, -1.0], "act_high": [2.0, 4.0]}) == ([-2, -1], [2, 4])
    for incomplete in ({"act_low": [-2.0, -1.0]}, {"act_high": [2.0, 4.0]}):
        assert bounds(rows(), incomplete) == ([-1, -1], [1, 1])
    constant = rows()
    constant["actions"][:, 1] = -7
    with pytest.warns(RuntimeWarning, match="are taken from the dataset"):
        assert bounds(constant) == ([-1, -7], [1, 7])


def test_shape_changes_inside_a_file(tmp_path):
    columns = rows()
    ragged = list(columns["obs"])
    ragged[612] = ragged[612][:2]
    table = as_table(without("obs")(columns)).append_column("obs", [ragged])
    pa.feather.write_feather(table, tmp_path / "a.feather", compression="uncompressed")
    with pytest.raises(ValueError, match=r"column obs must have 3 numbers in every row, .*, got 2 in row 612"):
        rlox.open_dataset(tmp_path / "a.feather")
    objects = np.empty(1000, object)
    objects[:] = ragged
    np.savez(tmp_path / "a.npz", **columns | {"obs": objects})
    with pytest.raises(ValueError, match="column obs must hold numbers in rows of one shape, got Python objects"):
        rlox.open_dataset(tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", **columns | {"actions": columns["actions"][:-1]})
    with pytest.raises(ValueError, match=r"column actions must have as many rows as rewards \(1000\), got shape \(999"):
        rlox.open_dataset(tmp_path / "b.npz")
    gap = as_table(columns, rewards=np.ones(1)[[0] * 1000]).to_pydict()
    gap["rewards"][17] = None
    pa.parquet.write_table(pa.table(gap), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="column rewards must have a value in every row, got none in row 17"):
        rlox.open_dataset(tmp_path / "a.parquet")


@pytest.mark.parametrize("name", ["a.arrow", "a.feather", "a.parquet", "a.npz", "small.npz", "a.h5"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.97])
def test_a_file_that_was_cut_short(tmp_path, name, share):
    path = written(tmp_path / name, rows()) if name == "a.arrow" else save(tmp_path / name, rows())
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ValueError, match=r"cut short|the file is empty"):
        rlox.open_dataset(path)


def test_discrete_actions_as_floats_and_other_misfits(tmp_path):
    discrete = EnvSpec((3,), n_actions=4)
    box = EnvSpec((3,), act_dim=2, act_low=np.full(2, -1, "f4"), act_high=np.full(2, 1, "f4"))
    floats = rows() | {"actions": rows(discrete=True)["actions"].astype("f4")}
    whole = rlox.open_dataset(written(tmp_path / "whole.arrow", floats))
    require_fit(whole, discrete, "BC")
    known = rlox.open_dataset(written(tmp_path / "known.arrow", floats, {"n_actions": 4}))
    assert (whole.n_actions, known.n_actions) == (None, 4)
    floats["actions"][17] = 0.5
    data = rlox.open_dataset(written(tmp_path / "a.arrow", floats))
    with pytest.raises(ValueError, match=r"BC: the dataset .*a.arrow must hold integers in column actions, because the "
                       r"environment has 4 discrete actions, got 0.5 in row 17; save them as integers"):  # fmt: skip
        require_fit(data, discrete, "BC")
    with pytest.raises(
        ValueError, match=r"column actions must hold integers, because the environment has 4 discrete .* row 0"
    ):
        written(tmp_path / "b.arrow", floats, {"n_actions": 4})
    with pytest.raises(ValueError, match="column actions must hold integers from 0 to 2, got 3 in row"):
        written(tmp_path / "b.arrow", rows(discrete=True), {"n_actions": 3})
    integers = rlox.open_dataset(written(tmp_path / "c.arrow", rows(discrete=True)))
    require_fit(integers, discrete, "BC")
    for spec, message in (
        (EnvSpec((3,), n_actions=3), "must hold actions below 3, like the environment, got 3"),
        (box, "must have 2 action components, like the environment, got 4 discrete actions"),
        (EnvSpec((5,), n_actions=4), r"must have observations of shape \(5,\), like the environment, got \(3,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            require_fit(integers, spec, "BC")


def test_settings(tmp_path):
    path, columns = written(tmp_path / "a.arrow", rows()), rows()
    part = rlox.open_dataset(path, normalize=True, max_transitions=200)
    assert len(part) == 200
    np.testing.assert_allclose(part.obs_mean, columns["obs"][:200].mean(0), atol=1e-6)
    shaped = rlox.open_dataset(DatasetConfig(str(path), reward_scale=2.0, reward_shift=-1.0))
    np.testing.assert_allclose(shaped.get_state()["rewards"], 2 * columns["rewards"] - 1, rtol=1e-6)
    with pytest.raises(TypeError, match="a DatasetConfig must be the only argument"):
        rlox.open_dataset(DatasetConfig(str(path)), normalize=True)
    stats = rlox.open_dataset(path, normalize_returns=True).stats()
    assert stats["max_return"] - stats["min_return"] == pytest.approx(1000, rel=1e-5)
    for bad in ({"max_transitions": 0}, {"reward_scale": 0.0}, {"reward_shift": np.nan}):
        with pytest.raises(ValueError, match=f"DatasetConfig: {next(iter(bad))} must"):
            rlox.open_dataset(path, **bad)


def test_sources_that_do_not_exist(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "pendulum.arrow", rows())
    for source, error, message in (
        ("pendulm.arrow", FileNotFoundError, "there is no such file, .*; did you mean 'pendulum.arrow'"),
        ("minari:Pen", ValueError, r"a Minari id must be minari:\(namespace/\)name-vN"),
        (
            "minari:lab/none-v0",
            ValueError,
            r"must be on this machine or on the server; .* be downloaded \(HF_HUB_OFFLINE is set\); no dataset is on",
        ),
        (".", ValueError, "its name must end in one of .arrow, .feather"),
    ):
        with pytest.raises(error, match=message):
            rlox.open_dataset(source)
    (tmp_path / "x.arrow").write_text("no arrow at all")
    with pytest.raises(ValueError, match=r"must be an Arrow IPC .* file, but is not, or was cut short"):
        rlox.open_dataset("x.arrow")


def test_a_converted_copy_follows_its_original(tmp_path):
    path = save(tmp_path / "a.npz", rows(100))
    first = rlox.open_dataset(path).metadata["file"]
    assert rlox.open_dataset(path).metadata["file"] == first
    assert len(rlox.open_dataset(save(path, rows(120)))) == 120


def test_malicious_metadata_is_rejected(tmp_path):
    path = written(tmp_path / "a.arrow", rows(100))
    reader = pa.ipc.open_file(pa.memory_map(str(path)))
    batch = reader.get_batch(0)
    good = json.loads(reader.schema.metadata[b"rlox.dataset"])
    for harm in ({"n_actions": -1}, {"obs_shape": [10**9, 10**9]}, {"obs_shape": [-3]}, {"obs_mean": ["x"]},
                 {"obs_std": [0, 0, 0]}, {"obs_mean": [1.0]}, {"env": 3}, {"n_rows": 7}, {"format": 99},
                 {"policies": [1]}, {"reference_returns": {}}, {"env": "NESTED"}):  # fmt: skip
        text = json.dumps(good | harm).replace('"NESTED"', '{"a":' * 900 + "1" + "}" * 900)
        schema = reader.schema.with_metadata({b"rlox.dataset": text})
        with pa.ipc.new_file(str(tmp_path / "b.arrow"), schema) as writer:
            writer.write_batch(batch)
        with pytest.raises(ValueError, match=r"dataset .*b.arrow: "):
            rlox.open_dataset(tmp_path / "b.arrow", normalize=True)


def test_bounds_of_other_lengths_are_not_those_of_the_actions():
    data = rlox.OfflineDatasetBuffer(**rows(), metadata={"act_low": [-2.0, -2.0, -2.0], "act_high": [2.0, 2.0]})
    np.testing.assert_array_equal(action_bounds(data), [[-1, -1], [1, 1]])


def test_images_keep_their_bytes_and_their_shape(tmp_path):
    columns = rows(50, discrete=True)
    rng = np.random.default_rng(0)
    columns |= {name: rng.integers(0, 256, (50, 2, 4, 4), dtype="u1") for name in ("obs", "next_obs")}
    data = rlox.open_dataset(written(tmp_path / "a.arrow", columns))
    assert data.sample(7, 0)["obs"].shape == (7, 2, 4, 4)
    np.testing.assert_array_equal(data.get_state()["next_obs"], columns["next_obs"])
    for name in ("b.npz", "b.h5", "b.parquet"):
        export(data, str(tmp_path / name))
        np.testing.assert_array_equal(rlox.open_dataset(tmp_path / name).get_state()["obs"], columns["obs"])
    # A file of several batches is converted, too.
    table = pa.ipc.open_file(str(tmp_path / "a.arrow")).read_all()
    with pa.ipc.new_file(str(tmp_path / "b.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=20)
    np.testing.assert_array_equal(rlox.open_dataset(tmp_path / "b.arrow").get_state()["obs"], columns["obs"])


def test_scores():
    assert normalized_score("Hopper-v5", 3234.3) == pytest.approx(100)
    assert normalized_score("hopper-medium-replay-v2", -20.272305) == pytest.approx(0)
    assert normalized_score("Walker2d-v4", (1.629008 + 4592.3) / 2) == pytest.approx(50)
    assert normalized_score("HalfCheetah-v5", 12135.0) == pytest.approx(100)
    assert normalized_score("AdroitHandPen-v1", 3076.8331017826877) == pytest.approx(100)
    for unknown in ("CartPole-v1", "dm_control/hopper-hop-v0", "my_lab/Hopper-v0", "antmaze-umaze-v2"):
        assert normalized_score(unknown, 1.0) is None
    known = {"reference_returns": {"random": -1200.0, "expert": -200.0}}
    assert normalized_score("Pendulum-v1", -700.0, known) == pytest.approx(50)


def test_metadata_is_read_without_the_rows(tmp_path):
    path = written(tmp_path / "a.arrow", rows(), {"env": {"id": "Pendulum-v1", "kwargs": {}, "wrappers": []}})
    assert dataset_metadata(path)["env"]["id"] == "Pendulum-v1"
    assert dataset_metadata(save(tmp_path / "a.npz", rows())) == {}


@pytest.mark.slow
def test_sampling_from_a_file_takes_no_anonymous_memory(tmp_path):
    """The system may drop the file's pages when it needs memory; a copy would be anonymous memory."""
    rng, n = np.random.default_rng(0), 50_000

    def blocks():
        for _ in range(20):
            obs = rng.normal(size=(n, 17)).astype("f4")
            flags = np.arange(n) % 1000 == 999
            yield dict(zip(COLUMNS, (obs, obs, obs[:, :6], obs[:, 0], flags & False, flags), strict=True))

    path = tmp_path / "large.arrow"
    convert(Source("test", blocks()), path)
    program = f"""
import re, sys, rlox
def anonymous():
    return int(re.search(r"Anonymous: +(\\d+)", open("/proc/self/smaps_rollup").read())[1]) / 1024
rlox.open_dataset({str(tmp_path / "small.arrow")!r}, normalize=True).sample(256, 0)
before = anonymous()
data = rlox.open_dataset({str(path)!r}, normalize=True)
for seed in range(2000):
    data.sample(256, seed)
assert "pandas" not in sys.modules
print(len(data), anonymous() - before)
"""
    written(tmp_path / "small.arrow", rows())
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    size, more = done.stdout.split()
    assert int(size) == 20 * n
    assert path.stat().st_size > 150 * 2**20
    assert float(more) < 20  # MiB; flags, and the ends of episodes


ACTIONS = gym.spaces.Discrete(3, start=2)
SPACES = {
    "Discrete": gym.spaces.Discrete(5, start=1),
    "MultiDiscrete": gym.spaces.MultiDiscrete([2, 3]),
    "MultiBinary": gym.spaces.MultiBinary(4),
    "Dict": gym.spaces.Dict(
        {"b": gym.spaces.Box(-1, 1, (2, 2)), "a": gym.spaces.Discrete(3), "c": gym.spaces.Dict(x=gym.spaces.Box(0, 1))}
    ),
    "Tuple": gym.spaces.Tuple([gym.spaces.Discrete(3), gym.spaces.Box(-1, 1, (2,))]),
    "matrix": gym.spaces.Box(-1, 1, (2, 3)),
    "image": gym.spaces.Box(0, 255, (6, 5, 3), np.uint8),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SPACES)
def test_a_minari_dataset_has_the_observations_of_a_training(kind):
    space, name = SPACES[kind], f"lab/{kind.lower()}-v0"
    space.seed(0)
    seen = [[space.sample() for _ in range(8)] for _ in range(3)]
    buffers = [
        EpisodeBuffer(
            observations=concatenate(space, items, create_empty_array(space, 8)),
            actions=np.full(7, 3),
            rewards=np.ones(7),
            terminations=np.arange(7) == 6,
            truncations=np.zeros(7, bool),
        )
        for items in seen
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the author and other fields of a publisher
        minari.create_dataset_from_buffers(
            name, buffers, observation_space=space, action_space=ACTIONS, jpeg_encoding=False
        )
    data = rlox.open_dataset(f"minari:{name}")
    adapter = SpaceAdapter(space, ACTIONS)
    np.testing.assert_array_equal(
        data.get_state()["obs"], np.stack([adapter.row(obs) for items in seen for obs in items[:-1]])
    )
    np.testing.assert_array_equal(data.get_state()["actions"].ravel(), 1)
    require_fit(data, adapter.spec, "the dataset")


@pytest.mark.slow
def test_masks_in_the_observations_of_a_minari_dataset_are_split_off():
    rng, n = np.random.default_rng(0), 7
    place, actions = rng.normal(size=(n + 1, 2)).astype(np.float32), rng.integers(4, size=n)
    masks = (rng.random((n + 1, 4)) < 0.5).astype(np.int8)
    masks[np.arange(n), actions] = 1
    masks[n, 0] = 1
    episode = EpisodeBuffer(
        observations={"action_mask": masks, "place": place},
        actions=actions,
        rewards=np.ones(n),
        terminations=np.arange(n) == n - 1,
        truncations=np.zeros(n, bool),
    )
    space = gym.spaces.Dict(
        {"action_mask": gym.spaces.MultiBinary(4), "place": gym.spaces.Box(-9, 9, (2,), np.float32)}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the author and other fields of a publisher
        minari.create_dataset_from_buffers(
            "lab/masked-v0", [episode], observation_space=space, action_space=gym.spaces.Discrete(4)
        )
    state = rlox.open_dataset("minari:lab/masked-v0").get_state()
    np.testing.assert_array_equal(state["obs"], place[:-1])
    np.testing.assert_array_equal(state["action_masks"], masks[:-1])
    np.testing.assert_array_equal(state["next_action_masks"], masks[1:])
