"""Masks of legal actions in datasets: recorded, written in every format, checked, and followed by cloning."""

import json
import os

import forked
import numpy as np
import pytest
import torch

import rlox
from rlox.algorithms import BC, PPO
from rlox.algorithms.dreamer import DreamerV3
from rlox.nn.acting import Inputs, acting_policy, draw_noise
from rlox.offline.collect import Behaviour, collect
from rlox.offline.dataset import open_dataset
from rlox.offline.export import export

ENV = {"id": "rlox/MaskedTMaze-v0", "kwargs": {}, "wrappers": []}
MASKS = ("action_masks", "next_action_masks")


@pytest.fixture(autouse=True)
def _own_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))


def masked(n=120, width=4, seed=0):
    """Columns of episodes of 10 steps with random masks, whose actions are legal."""
    rng = np.random.default_rng(seed)
    obs = rng.normal(size=(n, 3)).astype(np.float32)
    masks, actions = rng.random((n, width)) < 0.5, rng.integers(width, size=n)
    masks[np.arange(n), actions] = True
    ends = np.arange(n) % 10 == 9
    return {
        "obs": obs, "next_obs": obs, "actions": actions, "rewards": np.zeros(n), "terminated": ends,
        "truncated": np.zeros(n, bool), "action_masks": masks, "next_action_masks": np.roll(masks, -1, 0),
    }  # fmt: skip


def test_samples_have_the_masks_of_their_rows():
    columns = masked()
    data, without = (
        rlox.OfflineDatasetBuffer(**{name: x for name, x in columns.items() if kept or name not in MASKS})
        for kept in (True, False)
    )
    batch, plain = data.sample(50, 3), without.sample(50, 3)
    rows = [int(np.flatnonzero((columns["obs"] == obs).all(1))[0]) for obs in batch["obs"]]
    for name, column in (("masks", "action_masks"), ("next_masks", "next_action_masks")):
        np.testing.assert_array_equal(batch[name], columns[column][rows])
        assert name not in plain
    np.testing.assert_array_equal(batch["obs"], plain["obs"])
    assert data.masked
    assert not without.masked


@pytest.mark.parametrize("dest", ["a.npz", "a.h5", "a.parquet", "minari:masked/test-v0"])
@pytest.mark.parametrize("memory", ["none", "lstm"])
def test_what_a_policy_collects_has_legal_actions_in_every_format(dest, memory):
    lengths = {} if memory == "none" else {"sequence_length": 8}
    agent = PPO(ENV["id"], n_envs=2, n_steps=16, batch_size=16, memory=memory, **lengths)
    if dest.startswith("minari"):
        pytest.importorskip("minari")
    collect([Behaviour("ppo", 1, agent), Behaviour("random", 1)], ENV, 301, "a.arrow", n_envs=3)
    data = open_dataset("a.arrow")
    state = data.get_state()
    n = len(data)
    assert state["action_masks"][np.arange(n), state["actions"][:, 0].astype(int)].all()
    assert not state["action_masks"].all()
    goes_on = ~(state["terminated"] | state["truncated"]).astype(bool)[:-1]
    np.testing.assert_array_equal(state["next_action_masks"][:-1][goes_on], state["action_masks"][1:][goes_on])
    export(data, dest)
    again = open_dataset(dest)
    for name in (*MASKS, "actions", "obs"):
        np.testing.assert_array_equal(again.get_state()[name], state[name])
    assert again.masked


def test_a_file_may_have_only_the_masks_of_its_observations():
    columns = masked()
    np.savez("a.npz", **{name: x for name, x in columns.items() if name not in ("next_obs", MASKS[1])})
    data = open_dataset("a.npz")
    np.testing.assert_array_equal(data.get_state()[MASKS[0]], columns[MASKS[0]])
    assert "next_masks" not in data.sample(4, 0)
    assert np.isfinite(list(BC(data, 3, 4, continuous=False).train(3).values())).all()


def spoiled(how):
    columns = masked()
    if how == "illegal":
        columns["action_masks"][37, columns["actions"][37]] = False
    elif how == "numbers":
        columns["action_masks"] = columns["action_masks"] * 3.0
    elif how == "width":
        columns["action_masks"] = columns["action_masks"][:, :2]
    else:
        del columns["action_masks"]
    return columns


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("illegal", r"column actions must be legal by action_masks, which allows \[.*\], got \d in row 37"),
        ("numbers", "column action_masks must hold only 0 and 1, got .* in row 0"),
        ("width", "column next_action_masks must have a flag for each of 2 actions"),
        ("alone", "column action_masks must be present if next_action_masks is"),
    ],
)
def test_bad_masks_are_named(how, message):
    np.savez("a.npz", **spoiled(how))
    with pytest.raises(ValueError, match=message):
        open_dataset("a.npz")


def test_an_illegal_action_is_named_without_a_file():
    with pytest.raises(ValueError, match=r"actions must be legal by action_masks, got . in row 37, whose mask allows"):
        rlox.OfflineDatasetBuffer(**spoiled("illegal"))


@pytest.mark.parametrize("memory", ["none", "gru"])
def test_the_loss_is_the_cross_entropy_over_legal_actions(memory):
    data = rlox.OfflineDatasetBuffer(**masked())
    bc = BC(data, 3, 4, continuous=False, hidden=8, memory=memory, batch_size=40)
    assert "masks" in bc.backend.reason or memory != "none"
    batch = bc.sample()
    policy = bc.policy
    logits = policy(batch.obs) if memory == "none" else policy.follow(batch.obs, bc._read_before(batch))[0]
    z = logits.detach().double().numpy()
    weights = np.exp(z) * batch.masks.numpy()
    p = weights[np.arange(len(z)), batch.actions.numpy()] / weights.sum(1)
    assert bc._loss(batch)[0].item() == pytest.approx(-np.log(p).mean(), rel=1e-5)
    bc._loss(batch)[0].backward()
    assert all(torch.isfinite(w.grad).all() for w in bc.policy.parameters())


def test_masks_are_in_the_checkpoint_and_its_policy_follows_them(tmp_path):
    data = rlox.OfflineDatasetBuffer(**masked())
    bc = BC(data, 3, 4, continuous=False, hidden=8)
    bc.train(5, schedule_timesteps=10)
    bc.save(tmp_path / "a.safetensors")
    acting = BC.from_checkpoint(tmp_path / "a.safetensors")
    assert acting.spec.masked
    policy, inputs = acting_policy(acting.actor), Inputs(np.zeros((4, 3), np.float32), np.eye(4, dtype=bool))
    for actions, _ in (policy.mode(inputs), policy.act(inputs, draw_noise(policy, 4))):
        np.testing.assert_array_equal(actions, np.arange(4))
    rest = BC.from_checkpoint(tmp_path / "a.safetensors", data)
    rest.train(5, schedule_timesteps=10)
    bc.train(5, schedule_timesteps=10)
    for name, w in bc.policy.state_dict().items():
        assert torch.equal(w, rest.policy.state_dict()[name])


def test_other_learners_refuse_masks():
    data = rlox.OfflineDatasetBuffer(**masked(width=2))
    with pytest.raises(ValueError, match="must have masks of 3 actions"):
        BC(data, 3, 3, continuous=False)
    columns = {**masked(width=2), "obs": np.zeros((120, 4), "f4"), "next_obs": np.zeros((120, 4), "f4")}
    with pytest.raises(ValueError, match="must have no masks of legal actions, which dreamer cannot follow"):
        DreamerV3("CartPole-v1", dataset=rlox.OfflineDatasetBuffer(**columns))
    actions = np.zeros((120, 1), np.float32)
    with pytest.raises(ValueError, match=r"actions must be integers below n_actions \(2\), got 0.5 in row 0"):
        rlox.OfflineDatasetBuffer(**{**masked(width=2), "actions": actions + 0.5})


@pytest.mark.slow
def test_masks_pass_from_collect_to_eval_on_the_command_line():
    def run(*words):
        done = forked.run(*words, cwd=os.getcwd())
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    # Random legal moves reach the maze's end only by chance; what is cloned here is that no move is illegal.
    run("collect", "--env", ENV["id"], "--steps", "600", "--out", "a.npz")
    for memory in ("none", "gru"):
        run(
            "train", "algo=bc", "dataset=a.npz", "total_timesteps=30", f"output_dir={memory}", "eval.n_episodes=4",
            f"algo.memory={memory}",
        )  # fmt: skip
        result = json.loads(run("eval", memory, "--episodes", "5", "--json"))
        assert np.isfinite(result["mean_return"] if "mean_return" in result else result["mean"])
