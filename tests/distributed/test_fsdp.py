"""Language models sharded over two ranks on this machine, with torchrun."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from two_ranks import HERE, TWO, torchrun, train

from rlox.checkpoint import load_checkpoint

GRPO = (
    *("algo=grpo", "model=rlox.llm.toy:make_model", "dataset=rlox.llm.toy:copy_rows", "reward=mortal:short"),
    *("algo.group_size=2", "algo.batch_size=4", "algo.max_new_tokens=6", "algo.kl_coef=0.1", "algo.learning_rate=1e-3"),
    *("distributed=fsdp", "logger=[]", "total_timesteps=8", "eval.n_points=2", "eval.n_episodes=3"),
    *("checkpoint.every_steps=3", "--import", "mortal"),
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    code, output = train(*GRPO, "output_dir=run", cwd=folder)
    assert code == 0, output
    assert output.count("trained grpo copy_rows") == 1  # only one rank prints
    return folder / "run"


def require_same(run, undisturbed):
    ours, theirs = (load_checkpoint(one / "checkpoints/last.safetensors") for one in (run, undisturbed))
    assert ours.header["counters"] == theirs.header["counters"]
    for section in ("policy", "optimizer", "reference"):
        assert ours.tensors[section].keys() == theirs.tensors[section].keys() != set()
        for name, array in ours.tensors[section].items():
            np.testing.assert_array_equal(array, theirs.tensors[section][name], err_msg=name)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_killed_rank_leaves_an_error_and_a_checkpoint_that_one_process_resumes(tmp_path, command, monkeypatch):
    code, output = train(*GRPO, "output_dir=run", cwd=tmp_path, dies=6)
    assert code == 1
    assert "another rank ended without an error message" in output
    assert "Resume with: torchrun --standalone --nproc-per-node=2 -m rlox train resume=run" in output
    monkeypatch.syspath_prepend(HERE)
    code, _, err = command("eval", "run/checkpoints/last.safetensors", "--episodes=2", "--import", "mortal")
    assert not code, err
    code, out, err = command("train", "resume=run", "distributed=null", "--import", "mortal")
    assert not code, err
    assert "saved by 2 ranks, resumed by 1" in out
    assert "8 updates" in out


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_killed_rank_that_is_resumed_ends_with_the_same_bits(undisturbed, tmp_path):
    code, output = train(*GRPO, "output_dir=run", cwd=tmp_path, dies=6)
    assert code == 1, output
    code, output = train("resume=run", "--import", "mortal", cwd=tmp_path)
    assert code == 0, output
    require_same(tmp_path / "run", undisturbed)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_killed_ranks_that_are_restarted_end_with_the_same_bits(undisturbed, tmp_path):
    code, output = train(*GRPO, "output_dir=run", cwd=tmp_path, options=["--max-restarts=1"], dies=6)
    assert code == 0, output
    assert "resuming run at update" in output
    require_same(tmp_path / "run", undisturbed)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(("n", "kind"), [(2, "ddp"), (1, "fsdp"), (4, "fsdp")])
def test_another_number_of_ranks_resumes_a_sharded_checkpoint(undisturbed, tmp_path, n, kind):
    shutil.copytree(undisturbed, tmp_path / "run")
    words = ["resume=run", f"distributed={kind}", "total_timesteps=10", "--import", "mortal"]
    code, output = torchrun(TWO[0], f"--nproc-per-node={n}", "-m", "rlox", "train", *words, cwd=tmp_path)
    assert code == 0, output
    last = load_checkpoint(tmp_path / "run/checkpoints/last.safetensors")
    before = load_checkpoint(undisturbed / "checkpoints/last.safetensors")
    assert last.header["counters"]["updates"] == 10
    assert last.tensors["optimizer"]["step"] > before.tensors["optimizer"]["step"]
    assert {name: x.shape for name, x in last.tensors["policy"].items()} == {
        name: x.shape for name, x in before.tensors["policy"].items()
    }


@pytest.mark.exhaustive
@pytest.mark.slow
def test_two_ranks_resume_a_checkpoint_of_one_process(tmp_path, command, monkeypatch):
    monkeypatch.syspath_prepend(HERE)
    words = [word for word in GRPO if not word.startswith(("distributed=", "total_timesteps="))]
    code, _, err = command("train", *words, "total_timesteps=6", "output_dir=run")
    assert not code, err
    before = load_checkpoint(tmp_path / "run/checkpoints/last.safetensors")
    more = ("distributed=fsdp", "total_timesteps=7", "algo.learning_rate=1e-9", "--import", "mortal")
    code, output = train("resume=run", *more, cwd=tmp_path)
    assert code == 0, output
    assert "saved by 1 rank, resumed by 2" in output
    after = load_checkpoint(tmp_path / "run/checkpoints/last.safetensors")
    # With a negligible step size, weights and moments pass through the shards unchanged.
    for name, array in before.tensors["policy"].items():
        np.testing.assert_allclose(after.tensors["policy"][name], array, atol=1e-7, err_msg=name)
    moved = after.tensors["optimizer"]["exp_avg"] - 0.9 * before.tensors["optimizer"]["exp_avg"]
    assert 0 < np.abs(moved).max() <= 0.1
    assert after.tensors["optimizer"]["step"] == before.tensors["optimizer"]["step"] + 1


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["algo=ppo"], "distributed must be ddp with algo=ppo, got fsdp, which is for language models"),
        (["algo=cql", "dataset=x.arrow"], "distributed must be null with algo=cql"),
        (
            ["algo=sft", "model=rlox.llm.toy:make_model", "dataset=rlox.llm.toy:sum_rows"],
            "torchrun --standalone --nproc-per-node=2 -m rlox train algo=sft",
        ),
    ],
)
def test_unsupported_settings_are_errors(command, words, output):
    code, _, err = command("train", *words, "distributed=fsdp")
    assert code == 2
    assert output in " ".join(err.split())


def test_blocks_are_the_modules_that_a_model_does_not_split():
    import torch
    from torch import nn

    from rlox.llm import toy
    from rlox.llm.models.adapters import with_adapters
    from rlox.llm.models.language import LanguageModel
    from rlox.nn.sharding import blocks_of, is_sharded, put_

    model, _ = toy.make_model(hidden=16, layers=3)
    layers = [*model.model.layers]
    assert blocks_of(model) == layers
    adapted = with_adapters(LanguageModel(model), 2, 4.0, None, 0)
    assert blocks_of(adapted.module) == layers

    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(2, 2) for _ in range(9))
            self.body = nn.ModuleList(nn.Linear(9, 9) for _ in range(2))

    bare = Bare()
    assert blocks_of(bare) == [*bare.body]
    assert blocks_of(nn.Sequential(nn.Linear(2, 2))) == []
    weight = bare.body[0].weight
    assert not is_sharded(weight)
    put_(weight, np.full((9, 9), 3.0))
    assert torch.equal(weight, torch.full((9, 9), 3.0))


@pytest.mark.slow
def test_check_reports_the_shards(command):
    words = ("algo=sft", "model=rlox.llm.toy:make_model", "dataset=rlox.llm.toy:sum_rows", "logger=[]")
    code, out, err = command("train", *words, "distributed=fsdp", "--check")
    assert not code, err
    output = " ".join(out.split())
    assert re.search(r"; the ranks share 1\.\d MiB of it, and the rest depends on the rows of a rank", output)


def test_a_mapped_checkpoint_equals_a_read_one(tmp_path):
    import rlox

    agent = rlox.A2C("CartPole-v1", 2, hidden_sizes=[4])
    agent.save(path := Path(tmp_path) / "saved.safetensors")
    read, mapped = load_checkpoint(path), load_checkpoint(path, mapped=True)
    assert mapped.header == read.header
    for section, arrays in read.tensors.items():
        assert mapped.tensors[section].keys() == arrays.keys()
        for name, array in arrays.items():
            assert mapped.tensors[section][name].dtype == array.dtype
            np.testing.assert_array_equal(mapped.tensors[section][name], array)
            mapped.tensors[section][name].fill(0)
    load_checkpoint(path)  # writing to the arrays does not change the file
