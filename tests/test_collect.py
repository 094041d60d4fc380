"""rlox collect: the files contain what the environments did under the requested policies."""

import hashlib
import json
import os
import signal
import subprocess
import time

import forked
import gymnasium
import numpy as np
import pytest
from typer.testing import CliRunner

import rlox
from rlox.algorithms import DQN, PPO, SAC, TD3
from rlox.checkpoint import load_checkpoint
from rlox_cli.main import app


@pytest.fixture(autouse=True)
def _own_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of untrained policies; SAC's with its memory."""
    folder = tmp_path_factory.mktemp("saved")
    DQN("CartPole-v1", seed=1).save(folder / "dqn.safetensors")
    PPO("Pendulum-v1", seed=1).save(folder / "ppo.safetensors")
    TD3("Pendulum-v1", seed=1, noise_correlation=0.5).save(folder / "td3.safetensors")
    TD3("Pendulum-v1", seed=1).save(folder / "independent.safetensors")
    sac = SAC("Pendulum-v1", n_envs=3, seed=1, learning_starts=100, buffer_size=400, normalize_obs=True)
    sac.train(450)
    sac.save(folder / "sac.safetensors", memory=True)
    return folder


def run(*words):
    """Run the command in this process, which has already imported PyTorch."""
    return CliRunner().invoke(app, [str(word) for word in words])


def collect(*words):
    done = run("collect", *words)
    assert done.exit_code == 0, done.output
    return done.stdout


def require_dynamics(state, env_id):
    """Check each row's next observation and reward against a step of gymnasium from the row's observation."""
    env = gymnasium.make(env_id).unwrapped
    env.reset(seed=0)
    for i in range(0, len(state["rewards"]), 7):
        obs, action = state["obs"][i].astype("f8"), state["actions"][i]
        if env_id == "Pendulum-v1":
            env.state = np.array([np.arctan2(obs[1], obs[0]), obs[2]])
            following, reward, *_ = env.step(action)
        else:
            env.state, env.steps_beyond_terminated = obs, None
            following, reward, terminated, *_ = env.step(int(action[0]))
            assert terminated == state["terminated"][i]
        np.testing.assert_allclose(state["next_obs"][i], following, rtol=1e-4, atol=1e-5)
        assert state["rewards"][i] == pytest.approx(reward, rel=1e-4, abs=1e-5)


def require_chained(state):
    """Within an episode a row's next observation is the next row's observation."""
    goes_on = ~(state["terminated"] | state["truncated"]).astype(bool)[:-1]
    np.testing.assert_array_equal(state["next_obs"][:-1][goes_on], state["obs"][1:][goes_on])


@pytest.mark.slow
def test_a_mixture_contains_real_transitions_of_each_policy(saved):
    words = ("--mix", "medium:3,random:1", "--steps", 5003, "--out", "a.arrow", "--seed", 4)
    printed = collect(f"medium={saved}/ppo.safetensors", *words)
    data = rlox.open_dataset("a.arrow")
    state, (medium, random) = data.get_state(), data.metadata["policies"]
    assert len(data) == 5003
    require_dynamics(state, "Pendulum-v1")
    require_chained(state)
    assert not state["terminated"].any()
    assert (medium["n_steps"], random["n_steps"]) == (3752, 1251)
    assert data.metadata["env"] == {"id": "Pendulum-v1", "kwargs": {}, "wrappers": []}
    assert data.metadata["n_cut_episodes"] == 16
    assert "Pendulum-v1" in printed
    # The reported returns are of complete episodes, and the hash is of the weights.
    flags = (state["terminated"] | state["truncated"]).astype(bool)
    ends = np.flatnonzero(flags) + 1
    returns = [
        state["rewards"][stop - 200 : stop].sum(dtype="f8")
        for start, stop in zip([0, *ends[:-1]], ends, strict=True)
        if stop - start == 200 and stop <= 3752
    ]
    assert medium["n_episodes"] == len(returns)
    assert medium["mean_return"] == pytest.approx(np.mean(returns), rel=1e-5)
    digest = hashlib.sha256()
    weights = load_checkpoint(saved / "ppo.safetensors").tensors["policy"]
    for name in sorted(weights):
        digest.update(f"{name}\0{weights[name].dtype.str}\0{weights[name].shape}\0".encode() + weights[name].tobytes())
    assert medium["sha256"] == digest.hexdigest()
    # Random actions are uniform over the bounds; a seed decides everything.
    assert abs(state["actions"][3752:].mean()) < 0.15
    assert state["actions"][3752:].std() == pytest.approx(4 / np.sqrt(12), rel=0.05)
    for seed, same in ((4, True), (5, False)):
        collect(f"medium={saved}/ppo.safetensors", "--mix", "medium:3,random:1", "--steps", 5003, "--out", "b.arrow",
                "--seed", seed, "--force")  # fmt: skip
        assert np.array_equal(rlox.open_dataset("b.arrow").get_state()["obs"], state["obs"]) == same


@pytest.mark.parametrize(("name", "kind"), [("dqn", DQN), ("sac", SAC), ("td3", TD3), ("independent", TD3)])
def test_deterministic_and_sampled_actions(saved, name, kind):
    for flags in ([], ["--deterministic"]):
        collect(f"{saved}/{name}.safetensors", "--steps", 400, "--out", "a.npz", "--force", *flags)
        state = rlox.open_dataset("a.npz").get_state()
        require_dynamics(state, "CartPole-v1" if name == "dqn" else "Pendulum-v1")
        require_chained(state)
        best = np.reshape(kind.from_checkpoint(saved / f"{name}.safetensors").predict(state["obs"]), (400, -1))
        equal = np.isclose(best, state["actions"], rtol=1e-5, atol=1e-5).all(1)
        assert equal.all() if flags else equal.mean() < 0.8
        if kind is TD3 and not flags:
            noise = (state["actions"] - best)[np.abs(best) < 1]
            assert noise.std() == pytest.approx(0.2, rel=0.25)
            (policy,) = rlox.open_dataset("a.npz").metadata["policies"]
            expected = (False, 0.1, 0.5 if name == "td3" else 0.0)
            assert (policy["deterministic"], policy["exploration_noise"], policy["noise_correlation"]) == expected


def test_episodes_are_reassembled_from_a_replay_memory(saved):
    """Rows of three environments are interleaved in the memory, and the oldest ones have been overwritten."""
    collect("--replay", saved / "sac.safetensors", "--out", "a.arrow")
    data = rlox.open_dataset("a.arrow")
    memory = SAC.from_checkpoint(saved / "sac.safetensors").buffer
    # Of 450 transitions 400 are left; the oldest belongs to a step whose other rows are gone.
    state, held = data.get_state(), memory.gather(np.arange(51, 450) % 400)
    require_chained(state)
    require_dynamics(state, "Pendulum-v1")
    for name in ("obs", "next_obs", "actions", "rewards"):
        assert sorted(row.tobytes() for row in state[name]) == sorted(row.tobytes() for row in np.asarray(held[name]))
    assert data.metadata["n_cut_episodes"] == 3
    assert data.metadata["policies"][0]["algorithm"] == "sac"


@pytest.mark.slow
def test_all_formats_contain_the_same_data(saved):
    arguments = (f"{saved}/dqn.safetensors", "--steps", 300, "--n-envs", 3)
    states = {}
    for out in ("a.arrow", "a.npz", "a.h5", "a.parquet", "minari:lab/a-v0"):
        collect(*arguments, "--out", out)
        data = rlox.open_dataset(out)
        states[out] = data.get_state()
        assert data.n_actions == 2
        assert data.metadata["env"]["id"] == "CartPole-v1"
    for state in states.values():
        for key, column in states["a.arrow"].items():
            np.testing.assert_array_equal(state[key], column)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["sac.safetensors", "dqn.safetensors", "--steps", "9"], 2, "2 must be of the environment of 1, Pendulum-v1"),
        (["sac.safetensors", "--mix", "a:1,b:1", "--steps", "9"], 2, "b must be one of the checkpoints, as b=PATH"),
        (["sac.safetensors", "--mix", "random:1", "--steps", "9"], 2, "--mix must name every checkpoint, got no share"),
        (["sac.safetensors", "--mix", "a:0", "--steps", "9"], 2, "shares above 0, got 'a:0'"),
        (["sac.safetensors"], 2, "--steps must be given"),
        (["--steps", "9"], 2, "--env must be given if there is no checkpoint"),
        (["sac.safetensors", "--steps", "9", "--out", "a.csv"], 2, "its name must end in one of .arrow"),
        (["sac.safetensors", "--steps", "9", "--out", "there.npz"], 2, "this file already exists; --force"),
        (["--replay", "ppo.safetensors"], 2, "must have a replay memory next to it; an off-policy run saves one"),
        (["--replay", "sac.safetensors", "--steps", "9"], 2, "--replay must be used alone"),
        (["nothing.safetensors", "--steps", "9"], 2, "no file"),
    ],
)
def test_errors_of_collect(saved, tmp_path, words, code, message):
    (tmp_path / "there.npz").write_bytes(b"mine")
    words = [str(saved / word) if word.endswith("safetensors") else word for word in words]
    done = run("collect", *words)
    assert done.exit_code == code
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert sorted(os.listdir()) == ["there.npz"]


@pytest.mark.slow
@pytest.mark.parametrize("out", ["a.arrow", "a.npz"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_leaves_nothing(saved, tmp_path, out, number):
    words = [f"{saved}/ppo.safetensors", "--steps", "100000000", "--out", out]
    process = forked.Rlox("collect", *words, stdout=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size for path in tmp_path.rglob("rewards")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list(tmp_path.rglob("rewards"))
    process.send_signal(number)
    assert process.wait(20) == 128 + number
    assert "interrupted" in process.stdout.read()
    assert os.listdir() == []


@pytest.mark.slow
def test_show_and_train_read_the_dataset(saved):
    words = [f"{saved}/dqn.safetensors", "--steps", "300", "--out", "a.arrow"]
    printed = forked.run("collect", *words).stdout
    shown = run("show", "dataset=a.arrow").stdout
    assert shown.splitlines()[1:] == printed.splitlines()[1:-1]
    for part in ("rows         300", "env          CartPole-v1", "one of 2", "algorithm dqn"):
        assert part in shown
    composed = forked.run("train", "algo=bc", "dataset=a.arrow", "--cfg", "job").stdout
    assert "source: a.arrow" in composed
    assert "id: CartPole-v1" in composed
    collect("--env", "Pendulum-v1", "--steps", 10, "--out", "b.npz")
    done = run("train", "-m", "algo=bc", "dataset=a.arrow,b.npz")
    assert (done.exit_code, "env must be given for datasets of several environments" in done.stderr) == (2, True)
    done = run("train", "algo=ppo", "dataset=a.arrow")
    assert (done.exit_code, "dataset must be left out with algo=ppo" in done.stderr) == (2, True)
    done = run("train", "algo=bc", "env=CartPole-v1")
    assert (done.exit_code, "dataset must be chosen for algo=bc" in done.stderr) == (2, True)


def test_eval_prints_normalised_scores_where_they_are_defined(tmp_path):
    PPO("Hopper-v5", n_envs=1).save(tmp_path / "hopper.safetensors")
    words = ["eval", "hopper.safetensors", "--episodes", "2", "--json"]
    printed = json.loads(run(*words).stdout)
    assert printed["normalized_score"] == pytest.approx(
        100 * (printed["mean_return"] + 20.272305) / (3234.3 + 20.272305)
    )
    PPO("CartPole-v1", n_envs=1).save(tmp_path / "pole.safetensors")
    words[1] = "pole.safetensors"
    printed = json.loads(run(*words).stdout)
    assert "normalized_score" not in printed
