"""Data parallelism with torchrun, with two ranks on this machine."""

import shutil

import numpy as np
import pytest
from two_ranks import HERE, train

import rlox
from rlox.checkpoint import load_checkpoint
from rlox.distributed.group import Group
from rlox.distributed.ranks import Ranks, in_one_process

SAC = (
    *("algo=sac", "env=Pendulum-v1", "tuned=off", "distributed=ddp", "logger=[]", "env.n_envs=4", "buffer.size=400"),
    *("algo.hidden_sizes=[16]", "algo.batch_size=32", "algo.learning_starts=64", "algo.train_freq=4"),
    *("algo.gradient_steps=1", "algo.normalize_obs=true", "algo.exploration_noise=0.1", "algo.noise_correlation=0.5"),
    *("total_timesteps=1_200", "eval.n_points=2", "eval.n_episodes=2", "checkpoint.every_steps=100"),
    *("algo.dropout=0.1", "--import", "mortal", "env.reward_fn=mortal:reward"),
)


def last(run):
    """All arrays of the last checkpoint and of the memories of both ranks, and the counters and generators."""
    found = load_checkpoint(run / "checkpoints/last.safetensors")
    (other,) = found.header["ranks"]
    arrays = {f"{section}/{name}": x for section, part in found.tensors.items() for name, x in part.items()}
    for rank, entry in (("", found.header["memory"]), ("rank1", other["memory"])):
        files = [run / "checkpoints/memory" / rank / file["name"] for file in entry["files"]]
        rows = [load_checkpoint(file, ("file",)).tensors["memory"]["rows"] for file in files]
        arrays[f"rows{rank}"] = np.concatenate(rows)[-200:]
        assert {file.name for file in files} == {file.name for file in files[0].parent.glob("*.safetensors")}
    return arrays, (found.header["counters"], found.header["generators"], other["generators"])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    code, output = train(*SAC, "output_dir=run", cwd=folder)
    assert code == 0, output
    assert output.count("trained sac Pendulum-v1") == 1  # only one rank prints
    return folder / "run"


def require_same(run, undisturbed):
    ours, theirs = last(run), last(undisturbed)
    assert ours[1] == theirs[1]
    assert ours[0].keys() == theirs[0].keys()
    for name, array in ours[0].items():
        np.testing.assert_array_equal(array, theirs[0][name], err_msg=name)


@pytest.mark.slow
def test_each_rank_drops_other_outputs_of_the_critics(undisturbed):
    tensors = load_checkpoint(undisturbed / "checkpoints/last.safetensors").tensors
    ours, theirs = tensors["dropout"], {name: tensors["rank1"][f"dropout/{name}"] for name in ("key", "position")}
    assert ours["key"] != theirs["key"]
    assert ours["position"] == theirs["position"] > 0


@pytest.mark.slow
def test_killed_ranks_that_are_restarted_end_with_the_same_bits(undisturbed, tmp_path):
    code, output = train(*SAC, "output_dir=run", cwd=tmp_path, options=["--max-restarts=1"], dies=170)
    assert code == 0, output
    assert "resuming run at step" in output
    require_same(tmp_path / "run", undisturbed)


@pytest.mark.slow
def test_memories_of_policies_on_native_environments_continue_on_each_rank(tmp_path):
    words = (
        *("algo=ppo", "env=CartPole-v1", "tuned=off", "distributed=ddp", "logger=[]", "env.n_envs=4"),
        *("algo.n_steps=16", "algo.batch_size=32", "algo.hidden_sizes=[8]", "algo.memory=gru", "algo.memory_size=8"),
        *("total_timesteps=1_024", "eval.n_points=1", "eval.n_episodes=1", "checkpoint.every_steps=64"),
        *("--import", "mortal", "env.reward_fn=mortal:reward"),
    )
    found = []
    for name, options, dies in (("whole", (), None), ("killed", ("--max-restarts=1",), 150)):
        code, output = train(*words, f"output_dir={name}", cwd=tmp_path, options=options, dies=dies)
        assert code == 0, output
        assert ("resuming killed at step" in output) is (name == "killed"), output
        found.append(load_checkpoint(tmp_path / name / "checkpoints/last.safetensors").tensors)
    whole, killed = found
    assert whole["environment"]["policy_memory"].shape == (4, 16)  # of policy and values
    assert np.abs(whole["environment"]["policy_memory"]).min(1).all()
    for section in ("policy", "environment"):
        for key, array in whole[section].items():
            np.testing.assert_array_equal(killed[section][key], array, err_msg=f"{section}/{key}")


@pytest.mark.slow
def test_a_killed_rank_leaves_an_error_and_a_checkpoint_to_resume_from(tmp_path):
    code, output = train(*SAC, "output_dir=run", cwd=tmp_path, dies=170)
    assert code == 1
    assert "another rank ended without an error message" in output, output
    assert "Resume with: torchrun --standalone --nproc-per-node=2 -m rlox train resume=run" in output
    assert load_checkpoint(tmp_path / "run/checkpoints/last.safetensors").header["counters"]["env_steps"] > 0


@pytest.mark.slow
def test_a_rank_that_is_slow_to_end_reports_that_rank_0_was_killed(tmp_path, monkeypatch):
    # torchrun sends SIGTERM to rank 1 while it closes its environments, three seconds long.
    monkeypatch.setenv("RLOX_TEST_DEAD_RANK", "0")
    code, output = train(*SAC, "output_dir=run", "env.wrappers=[mortal:SlowToClose]", cwd=tmp_path, dies=40)
    assert code == 1, output
    assert "rlox train: rank 1 cannot continue: another rank ended without an error message" in output, output
    assert "Resume with: torchrun --standalone --nproc-per-node=2 -m rlox train resume=run" in output


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_that_is_stopped_before_it_notices_says_that_another_one_may_have_ended(dead, tmp_path, monkeypatch):
    monkeypatch.setenv("RLOX_TEST_DEAD_RANK", str(dead))
    code, output = train(*SAC, "output_dir=run", "env.reward_fn=mortal:slow_reward", cwd=tmp_path, dies=170)
    assert code == 1, output
    assert "stopped at once by SIGTERM, which torchrun also sends when another rank has ended. Saved before" in output
    assert ("rank 1: stopped at once" in output) == (dead == 0)
    assert "Resume with: torchrun --standalone --nproc-per-node=2 -m rlox train resume=run" in output


@pytest.mark.exhaustive
@pytest.mark.slow
def test_killed_ranks_that_are_resumed_end_with_the_same_bits(undisturbed, tmp_path):
    code, output = train(*SAC, "output_dir=run", cwd=tmp_path, dies=170)
    assert code == 1, output
    code, output = train("resume=run", "--import", "mortal", cwd=tmp_path)
    assert code == 0, output
    require_same(tmp_path / "run", undisturbed)


@pytest.mark.slow
def test_one_rank_resumes_a_checkpoint_of_two(undisturbed, tmp_path, command, monkeypatch):
    monkeypatch.syspath_prepend(HERE)
    shutil.copytree(undisturbed, tmp_path / "run")
    code, out, err = command("eval", "run/checkpoints/last.safetensors", "--episodes=2", "--import", "mortal")
    assert not code, err
    code, out, err = command("train", "resume=run", "distributed=null", "total_timesteps=1_400", "--import", "mortal")
    assert not code, err
    assert "saved by 2 ranks, resumed by 1" in out
    assert "holds the replay memory of other ranks: the memory starts empty" in out
    assert "1,400 steps" in out


def test_a_run_of_ranks_must_be_started_by_torchrun(command):
    code, _, err = command("train", "algo=ppo", "distributed=ddp")
    assert code == 2
    assert "torchrun --standalone --nproc-per-node=2 -m rlox train algo=ppo distributed=ddp" in err


def test_algorithms_that_ranks_cannot_train_together_are_errors_after_join(monkeypatch):
    group = object.__new__(Group)
    monkeypatch.setattr(Ranks, "current", group)
    for cls, words in (
        (rlox.IMPALA, {"env_id": "CartPole-v1"}),
        (rlox.CQL, {"obs_dim": 3, "act_dim": 1, "dataset": None}),
    ):
        with pytest.raises(ValueError, match=rf"{cls.__name__}: an algorithm.*create it within .*in_one_process\(\)"):
            cls(**words)
    with in_one_process():
        rlox.IMPALA("CartPole-v1").close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["algo=ppo", "backend=native"], "backend must be auto or torch with distributed=ddp, got native"),
        (["-m", "algo=ppo", "seed=0,1"], "distributed must be null in a sweep"),
        (["algo=cql", "dataset=x.arrow"], "distributed must be null with algo=cql"),
    ],
)
def test_unsupported_settings_are_errors(command, words, output):
    code, _, err = command("train", *words, "distributed=ddp")
    assert code == 2
    assert output in err
