"""``rlox train``, ``eval``, ``generate`` and ``plot`` for language models."""

import io
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from run_results import weights

import rlox.llm.toy
from rlox.checkpoint import load_checkpoint
from rlox.llm.rewards.http import RewardHTTPServer
from rlox_cli.families import received

SMALL = ["logger=none", "eval.n_points=2", "eval.n_episodes=4", "algo.batch_size=4"]
COPY = [
    *(
        "algo=grpo",
        "model=rlox.llm.toy:make_model",
        "dataset=rlox.llm.toy:copy_rows",
        "reward=rlox.llm.toy:copy_reward",
    ),
    *("algo.group_size=4", "algo.max_new_tokens=4", "algo.kl_coef=0", "algo.learning_rate=1e-3", *SMALL),
]
REWARDS = """
def short(prompts, completions, answer):
    return [float(len(c) <= len(a)) for c, a in zip(completions, answer)]

def nothing():
    pass

def fails(prompts, completions):
    raise KeyError("the table has no such row")

def once(completions, prompts, seen=[]):
    seen.append(1)
    return [float("nan") if len(seen) > 3 else float(len(c)) for c in completions]
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with the user's rows and rewards."""
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    rows = [{**row, "chosen": row["answer"], "rejected": "9"} for row in rlox.llm.toy.sum_rows()[::7]]
    (tmp_path / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)  # from another test
    return tmp_path


def done(command, *words):
    """The output of a command, after checking that it succeeded."""
    code, out, err = command(*words)
    assert not code, err
    return out + err


def refused(command, *words):
    """The error that `rlox train` prints."""
    code, _, err = command("train", *words)
    assert code
    return " ".join(err.split())


def record(folder):
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


CHATS = """
import rlox.llm.toy

def make():
    model, tokenizer = rlox.llm.toy.make_model()
    tokenizer.chat_template = (
        "{% if tools %}9{% endif %}{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    return model, tokenizer

def rows():
    return [{"messages": [{"role": "user", "content": "1+2"}, {"role": "assistant", "content": "03"}]}]
"""


@pytest.mark.slow
def test_chats_are_completed_on_the_command_line(command, tmp_path, monkeypatch):
    (tmp_path / "my_chats.py").write_text(CHATS)
    monkeypatch.syspath_prepend(tmp_path)
    made = ["algo=sft", "model=my_chats:make", "dataset=my_chats:rows", "logger=none", "algo.batch_size=1"]
    made += ["algo.learning_rate=3e-3", "total_timesteps=60", "eval.n_points=1", "--import", "my_chats"]
    done(command, "train", *made, "hydra.run.dir=run")

    def completed(*prompts):
        words = ["--chat", "--json", "--temperature", "0", "--max-new-tokens", "4", "--import", "my_chats"]
        return [
            json.loads(line)["completions"] for line in done(command, "generate", "run", *prompts, *words).splitlines()
        ]

    user = {"role": "user", "content": "1+2"}
    begun = [user, {"role": "assistant", "content": "0"}]
    assert completed(json.dumps([user]), json.dumps({"prompt": [user]})) == [["03"], ["03"]]
    code, _, err = command("generate", "run", "--chat", "1+2", "--import", "my_chats")
    assert (code, "PROMPT 0 must be JSON with --chat, got '1+2'" in " ".join(err.split())) == (2, True)
    code, _, err = command("generate", "run", "--chat", '{"prompt": [], "tool": 1}', "--import", "my_chats")
    assert (code, "PROMPT 0 must be a list of messages with --chat" in " ".join(err.split())) == (2, True)
    assert completed(json.dumps(begun)) == [["3"]]  # without "=", the template's start of an answer


@pytest.mark.slow
def test_a_run_is_trained_evaluated_resumed_and_used_to_generate(command, tmp_path, monkeypatch):
    _, out, err = command("train", *COPY, "total_timesteps=6", "hydra.run.dir=run")
    assert "grpo copy_rows seed 0: 6 updates" in err + out
    rows = record("run")
    names = {name for row in rows for name in row}
    assert {"episode/return", "loss/total", "loss/entropy", "loss/clip_fraction", "completion/length"} <= names
    assert [row["step"] for row in rows if "eval/mean_return" in row] == [3, 6]
    table = json.loads(Path("run/completions.json").read_text())
    assert table["columns"] == ["step", "prompt", "completion", "reward"]
    assert [row[0] for row in table["data"]] == [3] * 8 + [6] * 8
    assert {row[1] for row in table["data"]} == {f"{digit}=" for digit in range(8)}
    config = yaml.safe_load(Path("run/config.yaml").read_text())
    assert (config["env"]["id"], config["model"]) == ("copy_rows", "rlox.llm.toy:make_model")

    _, out, _ = command("eval", "run", "--samples", "3", "--json")
    found = json.loads(out)
    assert (
        found["mean_return"] == load_checkpoint("run/checkpoints/best.safetensors").header["evaluation"]["mean_return"]
    )
    assert {"sampled_reward", "pass@1", "pass@3"} <= found.keys()
    assert found["pass@1"] <= found["pass@3"]
    _, out, _ = command("eval", "run")
    assert "reproduced exactly" in out

    _, out, _ = command("generate", "run", "3=", "4=", "-n", "2", "--json", "--seed", "5")
    first, second = map(json.loads, out.splitlines())
    assert (first["prompt"], second["prompt"], len(first["completions"])) == ("3=", "4=", 2)
    _, again, _ = command("generate", "run", "4=", "--json", "--temperature", "0")
    assert len(json.loads(again)["completions"]) == 1
    for words, given in ((["generate", "run"], b"3=\n\xff=\n"), (["generate", "run", "3=", "\udcff"], b"")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given), "utf-8"))
        code, _, err = command(*words)
        assert (code, err) == (2, "rlox generate: PROMPT must be text in UTF-8, got other bytes\n")

    command("plot", "run", "--out", "curves.png")
    assert Path("curves.png").stat().st_size > 20_000


@pytest.mark.slow
def test_completions_are_sent_only_to_addresses_that_were_typed(command, tmp_path, monkeypatch):
    """The files of a run do not decide where completions and a token go; this machine needs no typing."""
    asked = []

    class Counts:
        def score_batch(self, prompts, completions):
            asked.append(len(prompts))
            return [float(len(completion)) for completion in completions]

    with RewardHTTPServer(Counts(), token="secret") as server:
        monkeypatch.setenv("RLOX_REWARD_TOKEN", "secret")
        made = [word for word in COPY if not word.startswith("reward=")]
        done(command, "train", *made, f"reward={server.url}", "total_timesteps=2", "hydra.run.dir=run")
        assert "reproduced exactly" in done(command, "eval", "run")
        monkeypatch.setattr(received, "is_remote", received.is_url)  # as if the server were another machine
        asked.clear()
        more = ["train", "resume=run", "total_timesteps=3"]
        for words, says in (
            (["eval", "run"], f"happens only if you name it; if you trust it, add --reward {server.url}"),
            (["eval", "run", "--reward", "http://x"], "--reward must be an address that run/checkpoints/best.safe"),
            (more, "run/config.yaml sends completions to another machine, which happens only if you type it again; if"),
            ([*more, "reward=http://x"], f"reward must stay {server.url} in a run that is resumed, got http://x"),
            (["eval", "run", "--pass-at", "2"], f"add --reward {server.url}"),
        ):
            code, _, err = command(*words)
            assert (code, says in " ".join(err.split())) == (2, True), err
        done(command, "train", "resume=run", "--cfg", "job")
        done(command, "generate", "run", "3=")
        assert not asked
        assert "reproduced exactly" in done(command, "eval", "run", "--reward", server.url)
        done(command, *more, f"reward={server.url}")
        assert asked


@pytest.mark.slow
def test_texts_without_a_prompt_are_learned_and_completed(command, here):
    texts = [{"text": row["prompt"] + row["answer"]} for row in rlox.llm.toy.sum_rows()[::7]]
    (here / "texts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in texts))
    words = ["algo=sft", "model=rlox.llm.toy:make_model", "dataset=texts.jsonl", "total_timesteps=2", *SMALL]
    done(command, "train", *words, "hydra.run.dir=run")
    table = json.loads(Path("run/completions.json").read_text())["data"]
    assert {row[1] for row in table} == {row["text"][0] for row in texts[:8]}
    done(command, "eval", "run")


@pytest.mark.slow
def test_a_killed_run_resumes_bit_for_bit(command, here):
    words = [*COPY, "total_timesteps=12", "algo.lora_rank=4", "algo.kl_coef=0.1", "algo.n_epochs=2"]
    command("train", *words, "hydra.run.dir=whole")
    child = os.fork()
    if child == 0:
        command("train", *words, "hydra.run.dir=cut", "checkpoint.every_steps=2", "eval.n_points=0")
        os._exit(0)
    saved = Path("cut/checkpoints/last.safetensors")
    while not saved.exists():
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert load_checkpoint(saved).header["counters"]["updates"] < 12
    command("train", "resume=cut", "--import", "my_rewards")
    whole, cut = (weights(Path(name) / "checkpoints/last.safetensors") for name in ("whole", "cut"))
    assert whole.keys() == cut.keys()
    assert all(np.array_equal(whole[name], cut[name]) for name in whole)
    # Only adapters are saved: the model is created again by its function.
    assert all("lora" in name for name in load_checkpoint("cut/checkpoints/last.safetensors").tensors["policy"])


@pytest.mark.slow
def test_a_run_of_adapters_resumes_only_with_its_own_model(command, here):
    (model, tok), (other, _) = (rlox.llm.toy.make_model(seed, hidden=16, layers=1) for seed in (0, 1))
    for part in (model, tok):
        part.save_pretrained("base")
    words = ["algo=sft", "model=base", "dataset=sums.jsonl", "algo.lora_rank=2", *SMALL, "total_timesteps=2"]
    done(command, "train", *words, "hydra.run.dir=run")
    assert "reproduced exactly" in done(command, "eval", "run")
    other.save_pretrained("base")
    for output in (
        refused(command, "resume=run", "total_timesteps=3"),
        " ".join(command("eval", "run")[2].split()),
    ):
        assert "model must be the one that the adapters of" in output
        assert "got one with other weights; pass that model or put it back, or start a new training on this" in output


@pytest.mark.slow
def test_adapters_learn_on_weights_in_bfloat16(command, here):
    for part in rlox.llm.toy.make_model(0, hidden=256, layers=1):
        part.save_pretrained("base")
    words = ["algo=dpo", "model=base", "dataset=sums.jsonl", "model_dtype=bfloat16", "algo.lora_rank=2", *SMALL]
    checked = [done(command, "train", *words, f"model_dtype={name}", "--check") for name in ("null", "bfloat16")]
    float32, halved = (re.search(r"Python and PyTorch: model ([\d.]+) MiB", output) for output in checked)
    assert 0.4 * float(float32[1]) < float(halved[1]) < 0.6 * float(float32[1])
    done(command, "train", *words, "total_timesteps=4", "hydra.run.dir=whole")
    done(command, "train", *words, "total_timesteps=2", "schedule_timesteps=4", "hydra.run.dir=cut")
    assert load_checkpoint("cut/checkpoints/last.safetensors").header["model"]["dtype"] == "bfloat16"
    assert "reproduced exactly" in done(command, "eval", "cut")
    done(command, "train", "resume=cut", "total_timesteps=4")
    whole, cut = (weights(Path(name) / "checkpoints/last.safetensors") for name in ("whole", "cut"))
    assert all(np.array_equal(array, cut[name]) for name, array in whole.items())
    assert "model_dtype must stay bfloat16 in a run that is resumed" in refused(
        command, "resume=cut", "model_dtype=null", "total_timesteps=9"
    )
    plain = [word for word in words if "lora" not in word]
    assert "model_dtype must be null unless adapters learn (algo.lora_rank)" in refused(command, *plain)
    made = [word.replace("=base", "=rlox.llm.toy:make_model") for word in words]
    assert "model_dtype must be null with model=rlox.llm.toy:make_model, got bfloat16" in refused(command, *made)
    assert "model_dtype must be bfloat16, or null for float32, got 'half'" in refused(
        command, *words[:-1], "model_dtype=half"
    )


@pytest.mark.slow
def test_four_commands_make_one_pipeline(command, here):
    toy = ["dataset=sums.jsonl", "total_timesteps=4", *SMALL]
    done(command, "train", "algo=sft", "model=rlox.llm.toy:make_model", *toy, "hydra.run.dir=sft")
    done(command, "train", "algo=reward_model", "model=sft", *toy, "hydra.run.dir=judge")
    sampled = ["algo.group_size=2", "algo.max_new_tokens=3"]
    done(command, "train", "algo=grpo", "model=sft", "reward=judge", *sampled, *toy, "hydra.run.dir=grpo")
    done(command, "train", "algo=dpo", "model=grpo", "algo.lora_rank=2", *toy, "hydra.run.dir=dpo")
    done(command, "train", "algo=online_dpo", "model=dpo", "reward=my_rewards:short", "--import", "my_rewards",
            "algo.max_new_tokens=3", *toy, "hydra.run.dir=online")  # fmt: skip
    for name in ("sft", "judge", "grpo", "dpo", "online"):
        imports = ["--import", "my_rewards"] if name == "online" else []
        assert "reproduced exactly" in done(command, "eval", name, *imports), name
    # Training continued from the earlier stages: GRPO starts from the model that SFT trained.
    assert load_checkpoint("grpo/checkpoints/last.safetensors").header["model"]["source"].endswith("best.safetensors")


@pytest.mark.slow
def test_a_run_names_its_files_for_other_folders(command, here, monkeypatch):
    for part in rlox.llm.toy.make_model(0, hidden=16, layers=1):
        part.save_pretrained("base")
    Path("others.jsonl").write_bytes(Path("sums.jsonl").read_bytes())
    files = ["model=base", "tokenizer=base", "dataset=sums.jsonl", "eval.dataset=others.jsonl"]
    words = [*files, *SMALL, "total_timesteps=2"]
    done(command, "train", "algo=reward_model", *words, "hydra.run.dir=judge")
    rewards = ["reward=[judge,my_rewards:short]", "--import", "my_rewards"]
    made = ["algo.lora_rank=2", "algo.group_size=2", "algo.max_new_tokens=3", "hydra.run.dir=run"]
    done(command, "train", "algo=grpo", *words, *rewards, *made)
    config = yaml.safe_load(Path("run/config.yaml").read_text())
    assert config["reward"] == [str(here / "judge"), "my_rewards:short"]
    (here / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert "reproduced exactly" in done(command, "eval", "../run", "--import", "my_rewards")
    done(command, "train", "resume=../run", "total_timesteps=3", "--import", "my_rewards")
    assert done(command, "generate", "../run", "1+2", "--max-new-tokens", "2", "--import", "my_rewards")
    (here / "sums.jsonl").rename(here / "elsewhere/moved.jsonl")  # an evaluation needs only its own rows
    assert "  sampled " in done(command, "eval", "../run", "--import", "my_rewards")
    card = done(command, "card", "../run")
    assert "# grpo on sums\n" in card
    assert "| rows | `sums` |" in card
    assert "| reward | **" in card
    assert "actions" not in card
    assert "at update 2 `total_timesteps=3`" in done(command, "card", "../run/checkpoints/last.safetensors")
    assert "type: accuracy" in done(command, "card", "../judge")
    for word in ("../run", "../judge"):
        code, _, err = command("collect", word, "--steps", "10", "--out", "a.arrow")
        assert code
        assert "must hold a policy that acts in an environment" in " ".join(err.split())
    code, _, err = command("collect", "--replay", "../run", "--out", "a.arrow")
    assert code
    assert "must hold a policy that acts in an environment" in " ".join(err.split())


@pytest.mark.slow
@pytest.mark.parametrize("lora", ["null", "2"])
def test_init_from_moves_the_reference(command, here, lora):
    toy = ["model=rlox.llm.toy:make_model", "dataset=sums.jsonl", f"algo.lora_rank={lora}", *SMALL]
    fast = ["algo.learning_rate=1e-1", "total_timesteps=3"]
    done(command, "train", "algo=sft", *toy, *fast, "hydra.run.dir=sft")
    start = "init_from=sft/checkpoints/last.safetensors"
    output = done(command, "train", "algo=dpo", *toy, start, "total_timesteps=1", "hydra.run.dir=dpo")
    assert "init_from: the weights of sft at update 3 are taken over" in " ".join(output.split())
    rows = [json.loads(line) for line in Path("dpo/metrics.jsonl").read_text().splitlines()]
    losses = [row["loss/total"] for row in rows if "loss/total" in row]
    assert losses == [pytest.approx(np.log(2), abs=1e-5)]
    assert "reproduced exactly" in done(command, "eval", "dpo")
    for flag in ("--samples", "--pass-at"):
        code, _, err = command("eval", "dpo", flag, "3")
        assert (code, f"{flag} must be left out for dpo, which has no reward" in err) == (2, True)


@pytest.mark.slow
def test_check_reports_the_resources_of_a_run_and_trains_nothing(command, here):
    _, out, err = command("train", *COPY, "--check")
    output = out + err
    for name in ("model", "rows", "reward", "memory", "plan", "disk", "time"):
        assert f"  {name:<12} " in output, output
    assert "85,696 parameters" in output
    assert ", decoder " in output
    assert "the model is evaluated on its training rows" in output
    assert not Path("outputs").exists()
    words = [word for word in COPY if not word.startswith("reward=")]
    _, out, err = command("train", *words, "reward=my_rewards:short", "--import", "my_rewards", "dataset=sums.jsonl",
                          "algo.max_new_tokens=1", "--check")  # fmt: skip
    assert "all 16 completions earn 1" in out + err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["algo=grpo", "dataset=sums.jsonl"], "model must be chosen for algo=grpo, got null"),
        (["algo=sft", "model=rlox.llm.toy:make_model"], "dataset must be chosen for algo=sft, got null"),
        ([*COPY, "reward=null"], "reward must be given for algo=grpo, got null"),
        ([*COPY, "reward=my_rewards:short"], "add --import my_rewards"),
        ([*COPY, "reward=my_rewards:shrt", "--import", "my_rewards"], "did you mean 'short'?"),
        ([*COPY, "reward=nothing/here"], "reward=nothing/here must be module:FUNCTION, a URL, or an existing run of"),
        ([*COPY, "dataset=sum.jsonl"], "did you mean 'sums.jsonl'?"),
        ([*COPY, "env.workers=2", "env.n_envs=2"], "env.workers must be 0 with algo=grpo"),
        ([*COPY, "compile=true"], "compile must be false with algo=grpo"),
        ([*COPY, "env.backend=gymnasium"], "env.backend must be auto with algo=grpo"),
        ([*COPY, "eval.max_steps=3"], "eval.max_steps must be null with algo=grpo"),
        ([*COPY, "dataset.normalize=true"], "dataset.normalize must be false with algo=grpo"),
        ([*COPY, "dataset.max_transitions=3"], "dataset.max_transitions must be null with algo=grpo"),
        ([*COPY, "dataset.reward_shift=-1"], "dataset.reward_shift must be 0.0 with algo=grpo"),
        ([*COPY, "backend=native"], "backend must be auto or torch with algo=grpo"),
        ([*COPY, "algo.ref_sync_every=2"], "ref_sync_every must be null with kl_coef=0, which needs no reference"),
        ([*COPY, "algo.accumulation=100"], "accumulation must be at most batch_size * group_size"),
        ([*COPY, "algo.loss_type=drgrpo"], "loss_type must be one of grpo, bnpo, dr_grpo, dapo"),
        ([*COPY, "algo.group_size=1"], "group_size must be >= 2"),
        ([*COPY, "algo.temperature=0"], "temperature must be > 0"),
        ([*COPY, "reward_weights=[1.0,2.0]"], "reward_weights must contain a number for each reward"),
        ([*COPY, "model=./nowhere"], "model=./nowhere"),
        (["algo=ppo", "model=gpt2"], "model must be null with algo=ppo, which trains no language model"),
        (["algo=dpo", "model=rlox.llm.toy:make_model", "dataset=rlox.llm.toy:copy_rows", *SMALL], "'chosen'"),
        ([*COPY, "reward=my_rewards:fails", "--import", "my_rewards"], "the table has no such row"),
        ([*COPY, "reward=my_rewards:once", "--import", "my_rewards", "total_timesteps=9"], "reward once"),
        (
            [*COPY, "dataset=my_rewards:nothing", "--import", "my_rewards"],
            "my_rewards:nothing must return rows of text",
        ),
        ([*COPY, "eval.dataset=my_rewards:nothing", "--import", "my_rewards"], "must return rows of text or the path"),
        ([*COPY, "algo.max_new_tokens=63"], "must fit in the model's context of 64 tokens, got 65"),
        ([*COPY, "algo.lora_rank=2", "algo.lora_targets=[nothing]"], "lora_targets must name modules of the model"),
    ],
)
def test_errors_are_one_paragraph(command, here, words, message):
    assert message in refused(command, *words)


def test_updates_before_a_reward_failed_are_saved(command, here):
    own = ["reward=my_rewards:once", "--import", "my_rewards", "eval.n_points=0"]
    refused(command, *COPY, *own, "total_timesteps=9", "hydra.run.dir=run")
    kept = load_checkpoint("run/checkpoints/last.safetensors").header
    assert kept["counters"]["updates"] == 3
    assert record("run")[-1]["status"] == "failed"
