"""Names that Hydra, SQLite, SQLAlchemy or a URL would read in their own way: every file lands where it belongs."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import forked
import pytest
import yaml

from rlox.config.sqlite import sqlalchemy_uri, sqlite_file, sqlite_uri

SMALL = ["total_timesteps=64", "algo.n_steps=8", "eval.n_episodes=1", "eval.n_points=1", "env=CartPole-v1"]
LATIN_1 = os.fsdecode(b"caf\xe9")
# As the folder of a run or of the store: all must work.
NAMES = [
    *("a?b", "a#b", "a%20b", "a%3Fb", "a b", "a'b", 'a"b', "a=b", "a,b", "[x]", "~a", "a:b", "a\\b", "a&b;c", "a{b}"),
    *(
        "{0}",
        "*",
        "-a",
        "a@b",
        "a+b",
        "a|b",
        "<a>",
        "%",
        "%s",
        "日本",
        "ünï",
        "!a",
        "$HOME",
        "???",
        "null",
        "true",
        "1e6",
    ),
    *("a(b)", "^", "..b", " a", "a ", "\\", "\\'", "'a'", "b'", "file:a", ":memory:", LATIN_1, 255 * "x"),
]
WORST = ["a?b", "a%20b", LATIN_1]


@pytest.mark.parametrize("name", NAMES)
def test_the_address_of_a_database_names_that_file_for_rlox_and_for_sqlalchemy(name, tmp_path):
    sqlalchemy = pytest.importorskip("sqlalchemy")
    file = tmp_path / name / "x.db"
    file.parent.mkdir()
    address = sqlite_uri(file)
    assert address.isprintable()
    assert sqlite_file(address) == file
    with sqlalchemy.create_engine(sqlalchemy_uri(file)).connect() as connection:
        connection.execute(sqlalchemy.text("CREATE TABLE a (b)"))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [file]


@pytest.mark.parametrize("name", ["${x}", "a\n${"])
def test_the_address_of_a_database_is_no_reference(name, tmp_path):
    address = sqlite_uri(tmp_path / name)
    assert "${" not in address
    assert address.isprintable()
    assert sqlite_file(address) == tmp_path / name


@pytest.mark.parametrize("uri", ["sqlite:///", "sqlite:///a?b.db", "sqlite:///a.db?timeout=9", "sqlite:///a?uri=true"])
def test_an_address_with_options_is_an_error(uri):
    with pytest.raises(ValueError, match="without options after a question mark"):
        sqlite_file(uri)


def trains(root, name, *words):
    """Train in the working folder `name`; return the files that exist afterwards, without the small ones of Hydra."""
    (root / name).mkdir()
    done = forked.run("train", *SMALL, *words, cwd=root / name)
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in root.iterdir()] == [name]
    return {str(path.relative_to(root / name)) for path in (root / name).rglob("*") if ".hydra" not in path.parts}


@pytest.mark.slow
@pytest.mark.parametrize("name", WORST)
def test_a_working_folder_holds_the_run_and_its_mirrors(name, tmp_path):
    files = trains(tmp_path, name, "logger=[mlflow,tensorboard]", "output_dir=r")
    assert {"r/metrics.jsonl", "outputs/mlflow.db", "outputs/mlartifacts"} <= files
    assert any("events.out.tfevents" in file for file in files)
    with sqlite3.connect(tmp_path / name / "outputs" / "mlflow.db") as store:
        assert store.execute("SELECT status FROM runs").fetchall() == [("FINISHED",)]
    assert any(file.startswith("outputs/mlartifacts/") and file.endswith("last.safetensors") for file in files)


@pytest.mark.slow
def test_every_verb_reads_a_folder_whose_name_is_not_utf_8(tmp_path):
    trains(tmp_path, LATIN_1, "logger=csv", "output_dir=r")
    data = ["collect", "r", "--steps", "32", "--out", f"{LATIN_1}.arrow"]
    resumed = ["train", "resume=r", "total_timesteps=128"]
    table = ["collect", "r", "--steps", "32", "--out", f"{LATIN_1}.parquet"]
    for words in (
        ["eval", "r", "--episodes", "1"],
        ["ls", "runs", "--folder", "."],
        ["sync", "r"],
        data,
        table,
        resumed,
    ):
        done = forked.run(*words, cwd=tmp_path / LATIN_1)
        assert not done.returncode, done.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_every_name_as_working_folder_and_as_output_dir(name, tmp_path):
    files = trains(tmp_path, name, "logger=[mlflow,tensorboard]", f"output_dir=./{name}")
    assert {f"{name}/metrics.jsonl", "outputs/mlflow.db"} <= files


@pytest.mark.slow
@pytest.mark.parametrize("name", ["\\", "a\\'b", "???", LATIN_1])
def test_a_folder_is_taken_literally(name, tmp_path):
    done = forked.run("train", *SMALL, "logger=none", f"output_dir={name}", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert {path.name for path in tmp_path.iterdir()} == {name}


@pytest.mark.slow
@pytest.mark.parametrize("words", [["output_dir=r"], [], ["-m", "seed=0,1"], ["--check"]])
def test_a_working_folder_that_hydra_would_resolve_is_an_error(words, tmp_path):
    folder = tmp_path / "${x}"
    folder.mkdir()
    done = forked.run("train", *SMALL, "logger=none", *words, cwd=folder)
    assert done.returncode == 2, done.stderr
    assert "rlox train: output_dir must have no ${ in its path" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(folder.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([r"env.kwargs.value='\${x}'"], "env.kwargs.value must be plain data, got the interpolation '${x}'"),
        (["env.kwargs.value='a\ab'"], "env.kwargs.value must be plain data, got the text 'a\\x07b' with control"),
        (
            [f"logger.wandb.project='{LATIN_1}'", "logger=wandb"],
            "logger.wandb.project must be plain data, got the text",
        ),
        (["env.kwargs.value=99999999999999999999999"], "env.kwargs.value must be plain data, got an integer of more"),
        ([f"env.kwargs.value={40 * '['}{40 * ']'}"], "must be plain data, got more than 32 levels"),
        (
            ["logger.mlflow.tracking_uri='sqlite:///a?b.db'"],
            "logger.mlflow.tracking_uri must be sqlite:///FILE without",
        ),
    ],
)
def test_a_value_that_the_configuration_could_not_give_back_is_an_error_at_the_start(words, message, command, tmp_path):
    code, _, err = command("train", *SMALL, "output_dir=r", *words)
    assert code == 2
    assert message in err
    assert err.startswith("rlox train: ")
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_search_in_a_folder_that_optuna_would_format(tmp_path):
    pytest.importorskip("optuna")
    name = "a{b}?%20"
    words = ["-m", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=1", "hydra.sweeper.search=[learning_rate]"]
    done = forked.run("train", *SMALL, "logger=none", *words, f"output_dir={name}", cwd=tmp_path)
    assert not done.returncode, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name / "study.db").is_file()
    assert Path(tmp_path / name / "search.json").is_file()


@pytest.mark.slow
def test_the_store_is_the_typed_one_else_that_of_the_environment_else_the_default(command, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/theirs.db")
    words = ["train", *SMALL, "logger=mlflow"]
    assert command(*words, "output_dir=a")[0] in (0, None)
    assert yaml.safe_load((tmp_path / "a" / "config.yaml").read_text())["logger"]["mlflow"]["tracking_uri"] == (
        f"sqlite:///{tmp_path}/theirs.db"
    )
    assert (tmp_path / "theirs.db").is_file()
    assert command(*words, "output_dir=b", "logger.mlflow.tracking_uri=sqlite:///typed.db")[0] in (0, None)
    assert (tmp_path / "typed.db").is_file()
    assert not (tmp_path / "outputs").exists()
    # A run stays in its store.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "file:///nowhere")
    code, out, err = command("train", "resume=a", "total_timesteps=128")
    assert (code in (0, None), "rlox ui --store theirs.db\n" in out) == (True, True), out + err
    code, _, err = command(*words, "output_dir=c")
    assert (code, err.count("\n")) == (2, 1)
    assert "logger.mlflow.MLFLOW_TRACKING_URI must be sqlite:///FILE without options, or start with http" in err
    assert not (tmp_path / "c").exists()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    code, _, err = command("ui")
    assert (code, "the runs are at MLFLOW_TRACKING_URI=http://127.0.0.1:9" in err) == (2, True)


@pytest.mark.slow
def test_a_deleted_working_folder_is_one_error_for_every_verb(tmp_path):
    gone = tmp_path / "gone"
    for words in (["train", *SMALL], ["ls", "runs"]):
        gone.mkdir()
        start = f"import os; from rlox_cli.main import main; os.chdir({str(gone)!r}); os.rmdir({str(gone)!r}); main()"
        done = subprocess.run([sys.executable, "-c", start, *words], capture_output=True, text=True, timeout=300)
        assert done.returncode == 2, done.stderr
        assert done.stderr.startswith("rlox: the working folder must exist, but was deleted")
        assert done.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc takes no files, even of root")
@pytest.mark.parametrize("words", [["train"], ["train", "-m", "seed=0,1"], ["train", "--check"]])
def test_a_working_folder_that_takes_no_files_is_an_error_before_the_training(words, command, monkeypatch):
    monkeypatch.chdir("/proc")
    code, _, err = command(*words, *SMALL, "logger=none")
    assert code in (1, 2)
    assert "rlox train: output_dir: /proc/outputs" in err
    assert "cannot be written" in err
