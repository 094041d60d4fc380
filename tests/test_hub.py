"""Sharing runs: `rlox push`, `rlox pull` and `rlox card`, with the real client of the hub and a strict hub here."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import forked
import numpy as np
import pytest
import yaml
from hub_server import HubServer

import rlox
from rlox.checkpoint import load_checkpoint, locks, save_checkpoint
from rlox.tracking.record import FILE
from rlox_cli.hub.card import Facts, Score, interval_of_mean, write_card
from rlox_cli.hub.contents import _CREDENTIALS, Options, collect, describe, find_source
from rlox_cli.records.pulled import folder_of, is_name

pytest.importorskip("huggingface_hub")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with the run `run`, of CartPole."""
    folder = tmp_path_factory.mktemp("trained")
    words = [
        "algo=ppo",
        "env=CartPole-v1",
        "total_timesteps=2048",
        "logger=csv",
        "eval.n_points=3",
        "eval.n_episodes=4",
    ]
    done = forked.run("train", *words, "output_dir=run", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def hub():
    with HubServer({"secret-of-me": "me"}, ["our-team"]) as server:
        yield server


@pytest.fixture
def rlox_with(hub, trained, tmp_path):
    """Run `rlox` in the folder of the run with the hub's address, and `changes` of the environment."""

    def run(*words, cwd=trained, **changes):
        env = {
            **os.environ,
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_DISABLE_XET": "1",  # the transfer of hubs without that storage
            "HF_HUB_OFFLINE": "",
            "HF_TOKEN": "secret-of-me",
            "RLOX_PULLED": str(tmp_path / "pulled"),
            **changes,
        }
        return forked.run(*words, cwd=cwd, env={k: v for k, v in env.items() if v is not None})

    return run


def test_a_run_is_pushed_pulled_evaluated_and_trained_on(rlox_with, hub, trained, tmp_path):
    done = rlox_with("push", "run", "cartpole", "--no-film", "--licence", "mit")
    assert done.returncode == 0, done.stderr
    assert "rlox pull me/cartpole" in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    files = hub.files("me/cartpole")
    assert set(files) == {
        *("README.md", "checkpoints/best.safetensors", "config.yaml", "curve.png", "metrics.jsonl", "rlox.json")
    }
    assert files["checkpoints/best.safetensors"] == (trained / "run/checkpoints/best.safetensors").read_bytes()

    done = rlox_with("pull", "me/cartpole", HF_TOKEN=None)
    assert done.returncode == 0, done.stderr
    pulled = tmp_path / "pulled/me/cartpole"
    assert {path.name for path in pulled.rglob("*") if path.is_file()} == {
        *(name.rpartition("/")[2] for name in files),
        "pulled.json",
    }
    score = json.loads(rlox_with("eval", "run", "--json").stdout)
    assert json.loads(rlox_with("eval", "me/cartpole", "--json", cwd=tmp_path).stdout) == score
    assert not rlox_with("export", "me/cartpole", "--to", "c", "--observations", "9", cwd=tmp_path).returncode
    assert (tmp_path / "export/policy.c").is_file()

    words = ["algo=ppo", "env=CartPole-v1", "total_timesteps=256", "logger=csv", "output_dir=next"]
    done = rlox_with("train", *words, "init_from=me/cartpole", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    config = yaml.safe_load((tmp_path / "next/config.yaml").read_text())
    assert config["init_from"] == str(pulled / "checkpoints/best.safetensors")

    # The same commit is not fetched again, and a damaged file is.
    asked = len(hub.requests)
    assert "up to date and intact" in rlox_with("pull", "me/cartpole").stdout
    assert not any("resolve" in request for request in hub.requests[asked:])
    (pulled / "config.yaml").write_text("changed")
    assert rlox_with("pull", "me/cartpole").stdout.startswith("pulled me/cartpole")
    assert (pulled / "config.yaml").read_bytes() == files["config.yaml"]
    assert hub.refused == []


def test_a_second_push_replaces_the_first(rlox_with, hub, trained):
    assert rlox_with("push", "run", "our-team/agent", "--no-film").returncode == 0
    last = trained / "run/checkpoints/last.safetensors"
    assert rlox_with("push", last, "our-team/agent", "--no-film").returncode == 0
    files = hub.files("our-team/agent")
    assert [name for name in files if name.startswith("checkpoints")] == ["checkpoints/last.safetensors"]
    assert len(hub.repositories["our-team/agent"].commits) == 3


def test_a_revision_is_pulled_by_its_name(rlox_with, hub, trained, tmp_path):
    last = trained / "run/checkpoints/last.safetensors"
    commits = []
    for what in ("run", last):
        assert rlox_with("push", what, "me/agent", "--no-film").returncode == 0
        commits.append(hub.repositories["me/agent"].newest)
    pulled = tmp_path / "pulled/me/agent"

    def pull(*words):
        done = rlox_with("pull", "me/agent", *words)
        assert done.returncode == 0, done.stderr
        (checkpoint,) = (pulled / "checkpoints").iterdir()
        assert checkpoint.read_bytes() == (trained / "run/checkpoints" / checkpoint.name).read_bytes()
        return checkpoint.stem, json.loads((pulled / "pulled.json").read_text())["commit"], done.stdout

    first, second = pull("--revision", commits[0]), pull()
    assert (first[:2], second[:2]) == (("best", commits[0]), ("last", commits[1]))
    again = pull("--revision", "main")
    assert again[:2] == second[:2]
    assert "up to date and intact" in again[2]
    assert pull("--revision", commits[0])[:2] == first[:2]
    done = rlox_with("pull", "me/agent", "--revision", "v9")
    assert done.returncode == 2
    assert "me/agent has no such revision; leave --revision out for the newest" in done.stderr
    kept = pull("--revision", commits[0])  # what was pulled before is still there
    assert kept[:2] == first[:2]
    assert "up to date and intact" in kept[2]


def test_a_pull_repairs_what_a_killed_one_has_left(rlox_with, hub, tmp_path):
    assert rlox_with("push", "run", "me/agent", "--no-film").returncode == 0
    assert rlox_with("pull", "me/agent").returncode == 0
    pulled = tmp_path / "pulled/me/agent"
    partial, old = pulled.with_name(".agent.partial"), pulled.with_name(".agent.old")

    def names():
        return sorted(path.name for path in pulled.parent.iterdir())

    # Killed between the two renames: the run is put back, also if the hub cannot be reached.
    os.replace(pulled, old)
    shutil.copytree(old, partial)
    done = rlox_with("pull", "me/agent", HF_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == 1
    assert names() == [".agent.lock", "agent"]
    assert "up to date and intact" in rlox_with("pull", "me/agent").stdout
    # Killed while it downloaded, or before it removed the old run.
    for left in (partial, old):
        shutil.copytree(pulled, left)
    (pulled / "config.yaml").write_text("changed")
    assert rlox_with("pull", "me/agent").stdout.startswith("pulled me/agent")
    assert names() == [".agent.lock", "agent"]
    lock = locks.take_lock(pulled.parent, ".agent.lock")
    lock.write(f"{os.getpid()}\n")
    (pulled / "config.yaml").write_text("changed")
    done = rlox_with("pull", "me/agent")
    lock.release()
    assert done.returncode == 1
    assert f"is being pulled by process {os.getpid()}; wait for it" in done.stderr
    assert (pulled / "config.yaml").read_text() == "changed"


def test_a_dry_run_writes_the_folder_and_asks_nobody(rlox_with, hub, trained, tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    pytest.importorskip("pygame")
    out = tmp_path / "shared"
    done = rlox_with("push", "run", "me/cartpole", "--dry-run", "--out", out, HF_TOKEN=None, SDL_VIDEODRIVER="dummy")
    assert done.returncode == 0, done.stderr
    assert hub.requests == []
    manifest = json.loads((out / "rlox.json").read_text())
    assert set(manifest["files"]) == {
        *("checkpoints/best.safetensors", "config.yaml", "curve.png", "metrics.jsonl", "replay.mp4")
    }
    for name, entry in manifest["files"].items():
        data = (out / name).read_bytes()
        assert entry == {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert "[replay.mp4](replay.mp4)" in (out / "README.md").read_text()


def test_the_card_has_score_interval_versions_and_a_command_that_repeats_the_run(rlox_with, trained, tmp_path):
    done = rlox_with("card", "run", "--name", "me/cartpole", "--licence", "cc-by-4.0")
    assert done.returncode == 0, done.stderr
    head, text = done.stdout.removeprefix("---\n").split("\n---\n", 1)
    header = load_checkpoint(trained / "run/checkpoints/best.safetensors").header
    score = header["evaluation"]
    low, high = interval_of_mean(score["mean_return"], score["std_return"], 4)
    data = yaml.safe_load(head)
    assert data["license"] == "cc-by-4.0"
    (result,) = data["model-index"][0]["results"]
    assert result["dataset"]["type"] == "CartPole-v1"
    assert result["metrics"][0]["value"] == f"{score['mean_return']:.2f} +/- {score['std_return']:.2f}"
    assert f"| [{low:.2f}, {high:.2f}] |" in text
    assert f"| torch | {header['versions']['torch']} |" in text
    assert "best of 3 evaluations in training" in text
    (command,) = re.findall(r"^rlox (train .*)$", text, re.MULTILINE)
    assert rlox_with(*command.split(), "logger=csv", "output_dir=again", cwd=tmp_path).returncode == 0
    again = load_checkpoint(tmp_path / "again/checkpoints/best.safetensors")
    first = load_checkpoint(trained / "run/checkpoints/best.safetensors")
    for name, array in first.tensors["policy"].items():
        np.testing.assert_array_equal(array, again.tensors["policy"][name])


def test_the_card_of_a_run_with_settings_of_its_own_says_so(rlox_with, tmp_path):
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    text = "# @package _global_\ntotal_timesteps: 64\nalgo:\n  n_steps: 8\neval:\n  n_points: 1\n  n_episodes: 1\n"
    (tmp_path / "own" / "experiment" / "mine.yaml").write_text(text)
    words = ["experiment=mine", "env=CartPole-v1", "tuned=off"]
    assert rlox_with("train", "-cd", "own", *words, "output_dir=run", cwd=tmp_path).returncode == 0
    card = rlox_with("card", "run", cwd=tmp_path).stdout
    assert "rlox train -cd FOLDER experiment=mine env=CartPole-v1 tuned=off seed=0\n" in card
    assert "FOLDER is one with settings of the author, which is not shared; see `config.yaml`." in card
    assert "rlox eval OWNER/NAME\n" in card  # needs no folder
    shutil.rmtree(tmp_path / "own")
    assert rlox_with("eval", "run", cwd=tmp_path).returncode == 0


def test_a_licence_is_spelled_in_both_ways(rlox_with):
    texts = [rlox_with("card", "run", option, "cc-by-4.0").stdout for option in ("--licence", "--license")]
    assert texts[0] == texts[1]
    assert yaml.safe_load(texts[0].split("---\n")[1])["license"] == "cc-by-4.0"
    assert "license" not in yaml.safe_load(rlox_with("card", "run").stdout.split("---\n")[1])


def test_new_episodes_give_an_unbiased_score(rlox_with, trained):
    text = rlox_with("card", "run", "--episodes", "5").stdout
    agent = rlox.load(trained / "run/checkpoints/best.safetensors")
    summary = agent.evaluate(5, 1_010_000).summary()
    assert f"**{summary['mean_return']:.2f} ± {summary['std_return']:.2f}**" in text
    assert "measured after the training, on episodes that it did not use" in text


def test_the_python_of_the_card_works(rlox_with, hub, trained, tmp_path):
    assert rlox_with("push", "run", "me/cartpole", "--no-film").returncode == 0
    (code,) = re.findall(r"```python\n(.*?)```", hub.files("me/cartpole")["README.md"].decode(), re.DOTALL)
    program = code.replace("obs)", "[0.0, 0.0, 0.02, 0.0])") + "print(action)"
    env = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
    env["HF_HUB_OFFLINE"] = ""
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert done.stdout in ("0\n", "1\n"), done.stderr


def edit(hub, name, **changes):
    """Commit changed files to a repository, past the client; None deletes one."""
    files = {**hub.files(name), **{path.replace("__", "/"): data for path, data in changes.items()}}
    hub.repositories[name].commit({path: data for path, data in files.items() if data is not None})


def test_what_is_not_what_was_pushed_is_refused_and_not_kept(rlox_with, hub, tmp_path):
    assert rlox_with("push", "run", "me/cartpole", "--no-film").returncode == 0
    files = hub.files("me/cartpole")
    manifest = json.loads(files["rlox.json"])
    best = "checkpoints/best.safetensors"

    def outcome():
        done = rlox_with("pull", "me/cartpole")
        assert not (tmp_path / "pulled/me/cartpole").exists()
        assert [path.name for path in (tmp_path / "pulled/me").iterdir()] == [".cartpole.lock"]
        return done.returncode, done.stderr

    edit(hub, "me/cartpole", **{best: files[best][:-1] + b"x"})
    code, text = outcome()
    assert code == 2
    assert re.match(rf"rlox pull: {best} must have the SHA-256 {manifest['files'][best]['sha256'][:16]}…", text)

    evil = {**manifest, "files": {**manifest["files"], "model.pkl": {"size": 1, "sha256": "0" * 64}}}
    edit(hub, "me/cartpole", **{best: files[best], "rlox.json": json.dumps(evil).encode(), "model.pkl": b"x"})
    code, text = outcome()
    assert (code, "must list files that rlox writes, got 'model.pkl'" in text) == (2, True)
    assert not any("resolve" in request and "model.pkl" in request for request in hub.requests)

    up = {**manifest, "files": {**manifest["files"], "../../x.png": {"size": 1, "sha256": "0" * 64}}}
    edit(hub, "me/cartpole", **{"rlox.json": json.dumps(up).encode()})
    assert "must list files that rlox writes, got '../../x.png'" in outcome()[1]

    edit(hub, "me/cartpole", **{"rlox.json": None})
    assert "is no run of rlox: it has no rlox.json" in outcome()[1]

    edit(hub, "me/cartpole", **{"rlox.json": files["rlox.json"], "config.yaml": None})
    assert "is incomplete: it has no config.yaml" in outcome()[1]


@pytest.mark.parametrize(
    ("words", "changes", "message"),
    [
        (["pull", "me/none"], {}, "me/none was not found on "),
        (["pull", "cartpole"], {}, "NAME must be OWNER/NAME of letters"),
        (["push", "run", "you/cartpole"], {}, "the hub does not let you write to you/cartpole (HTTP 403)"),
        (["push", "run", "cartpole"], {"HF_TOKEN": None}, "a token that may write is needed: type `hf auth login`"),
        (["push", "run", "a b"], {}, "NAME must be OWNER/NAME, or NAME in your own account,"),
        (["push", "run", "cartpole", "--licence", "mine"], {}, "the hub refuses the contents for me/cartpole"),
        (["push", "none", "cartpole"], {}, "none must be a run folder or a checkpoint, got nothing there"),
        (["pull", "me/x"], {"HF_ENDPOINT": "http://127.0.0.1:9"}, "the Hugging Face Hub must be reachable, but http"),
        (["pull", "me/x"], {"HF_HUB_OFFLINE": "1"}, "but HF_HUB_OFFLINE is set"),
        (["eval", "me/none"], {}, "me/none must be a checkpoint or a run folder, got nothing there; if it is on the"),
        (["train", "init_from=me/none"], {}, "if it is on the Hugging Face Hub: rlox pull me/none"),
    ],
)
def test_errors_are_one_line_with_a_remedy(rlox_with, words, changes, message):
    done = rlox_with(*words, *(["--no-film"] if words[0] == "push" else []), **changes)
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_password_is_not_shared(rlox_with, trained, tmp_path):
    shutil.copytree(trained / "run", tmp_path / "run")
    config, record, typed = (tmp_path / "run" / name for name in ("config.yaml", FILE, ".hydra/overrides.yaml"))
    changed = "logger.mlflow.tracking_uri: [null, postgresql+psycopg2://me:pa/ss@host/db]"
    for file, text, name in (
        (config, config.read_text().replace("sampler_url: null", "sampler_url: http://me:pass@host/v1"), "sampler_url"),
        (record, record.read_text() + json.dumps(restarted(record, changed)) + "\n", changed.partition(":")[0]),
        (typed, typed.read_text() + "- dataset=https://hf_abc@host/data\n", "dataset"),
    ):
        before = file.read_text()
        file.write_text(text)
        done = rlox_with("push", "run", "me/x", cwd=tmp_path)
        assert done.returncode == 2
        assert re.search(rf"{name} of {file.relative_to(tmp_path)} contains a password or a token", done.stderr)
        file.write_text(before)
    agent = rlox.load(tmp_path / "run/checkpoints/best.safetensors")
    agent.save(tmp_path / "agent.safetensors", run={"logger": {"comet": {"url": "https://:pw@host"}}})
    done = rlox_with("card", "agent.safetensors", cwd=tmp_path)
    assert done.returncode == 2
    assert "run.logger.comet.url of agent.safetensors contains a password or a token" in done.stderr
    for hidden in ("https://me:***@host", "https://***@host"):
        agent.save(tmp_path / "agent.safetensors", run={"logger": {"comet": {"url": hidden}}})
        assert rlox_with("card", "agent.safetensors", cwd=tmp_path).returncode == 0


def restarted(record, changed):
    """The start row of a further segment with changed settings, given as YAML."""
    return {**json.loads(record.read_text().splitlines()[0]), "segment": 1, "changed": yaml.safe_load(changed)}


@pytest.mark.parametrize(
    ("text", "is_secret"),
    [
        ("http://me:pass@host/v1", True),
        ("http://me:123@host", True),
        ("https://:pass@host", True),
        ("https://hf_token@host", True),
        ("postgresql+psycopg2://me:pa/ss@host/db", True),
        ("http://host:5000/models@main", False),
        ("http://[::1]:5000/models@main", False),
        ("sqlite:////home/me@work/mlflow.db", False),
        ("hf://owner/name@main", False),
        ("mail me@host", False),
    ],
)
def test_what_is_taken_for_a_password(text, is_secret):
    assert bool(_CREDENTIALS.search(text)) is is_secret


@pytest.mark.parametrize("name", ["agent-v1.2.safetensors", "agent.ckpt"])
def test_a_checkpoint_of_any_name_is_pushed_pulled_and_evaluated(name, rlox_with, hub, trained, tmp_path):
    shutil.copyfile(trained / "run/checkpoints/best.safetensors", tmp_path / name)
    done = rlox_with("push", name, "me/alone", "--no-film", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert set(hub.files("me/alone")) == {"README.md", "checkpoints/last.safetensors", "rlox.json"}
    assert "checkpoints/last.safetensors" in hub.files("me/alone")["README.md"].decode()
    for words in (["pull", "me/alone"], ["eval", "me/alone"], ["card", "me/alone"]):
        done = rlox_with(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr


def test_a_lone_checkpoint_replaces_all_of_an_earlier_run(rlox_with, hub, trained, tmp_path):
    assert rlox_with("push", "run", "me/agent", "--no-film").returncode == 0
    shutil.copyfile(trained / "run/checkpoints/last.safetensors", tmp_path / "agent.safetensors")
    assert rlox_with("push", "agent.safetensors", "me/agent", "--no-film", cwd=tmp_path).returncode == 0
    assert set(hub.files("me/agent")) == {"README.md", "checkpoints/last.safetensors", "rlox.json"}


def test_private_is_refused_for_a_public_repository(rlox_with, hub):
    assert rlox_with("push", "run", "me/open", "--public", "--no-film").returncode == 0
    assert rlox_with("push", "run", "me/hidden", "--private", "--no-film").returncode == 0
    assert hub.repositories["me/hidden"].private
    before = hub.files("me/open")
    done = rlox_with("push", "run", "me/open", "--private", "--no-film")
    assert done.returncode == 2
    assert "me/open exists and is public; --private is for a new repository" in done.stderr
    assert hub.files("me/open") is before


def test_evaluations_of_the_card_are_cut_as_those_of_the_training(rlox_with, trained, tmp_path):
    agent = rlox.load(trained / "run/checkpoints/best.safetensors")
    agent.save(tmp_path / "agent.safetensors", run={"eval": {"max_steps": 7}})
    done = rlox_with("card", "agent.safetensors", "--episodes", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "**7.00 ± 0.00**" in done.stdout


def test_the_card_is_of_the_copy_that_is_shared(trained, tmp_path, monkeypatch):
    """A training that goes on may replace the checkpoint in the meantime."""
    shutil.copytree(trained / "run", tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    best, shared = tmp_path / "run/checkpoints/best.safetensors", tmp_path / "shared"
    source = find_source(tmp_path / "run")
    rlox.load(best).save(best, evaluation={"mean_return": 3.5, "std_return": 0.0, "n_episodes": 9, "seed": 1})
    shared.mkdir()
    facts, _ = collect(source, shared, "me/x", Options(film=False))
    saved = load_checkpoint(shared / "checkpoints/best.safetensors").header
    assert facts.score.mean == saved["evaluation"]["mean_return"] == 3.5


def test_an_odd_header_gives_a_card(trained, tmp_path):
    whole = load_checkpoint(trained / "run/checkpoints/best.safetensors")
    odd = {"evaluation": {"mean_return": 3}, "run": {"total_timesteps": "many", "reference": {"mean_return": "?"}}}
    header = {key: value for key, value in {**whole.header, **odd}.items() if key != "versions"}
    save_checkpoint(tmp_path / "odd.safetensors", replace(whole, header=header))
    facts, notes = describe(find_source(tmp_path / "odd.safetensors"), Options())
    card = write_card(facts, "me/x")
    assert "no score: the checkpoint records none; --episodes N measures one" in notes
    assert "trained with rlox of an unknown version" in card


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("me/a", True),
        ("a", False),
        ("a/b/c", False),
        ("../b", False),
        ("a/..", False),
        ("~/b", False),
        ("a/b.c-d_e", True),
    ],
)
def test_names_of_the_hub(text, is_one, monkeypatch, tmp_path):
    assert is_name(text) is is_one
    monkeypatch.setenv("RLOX_PULLED", str(tmp_path))
    if is_one:
        assert folder_of(text).is_relative_to(tmp_path)


def test_the_interval_is_students():
    # Of 9, 10, 11, 12: mean 10.5, sample deviation 1.29099, t = 3.18245 with 3 degrees of freedom.
    low, high = interval_of_mean(10.5, float(np.std([9, 10, 11, 12])), 4)
    assert (low, high) == pytest.approx((10.5 - 3.18245 * 1.29099 / 2, 10.5 + 3.18245 * 1.29099 / 2), abs=1e-4)
    assert interval_of_mean(1.0, 0.0, 1) == (-np.inf, np.inf)


def test_text_of_others_cannot_leave_its_line_of_the_card():
    facts = Facts(
        *("ppo", "Evil-v0`\n# Title\n[a](http://b) |", 1, 1, "steps", 0, "checkpoints/best.safetensors", None),
        versions={"rlox": "1`|\n# x"},
        score=Score(1.0, 0.0, 1.0, 1.0, 3, 7, True, 1),
    )
    card = write_card(facts, "me/x")
    assert re.findall(r"^# .*$", card, re.MULTILINE) == ["# ppo on Evil-v0 # Title a (http://b)"]
    assert "| rlox | 1 # x |" in card
