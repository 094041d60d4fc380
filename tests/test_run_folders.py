"""Run folders from somebody else: links, pipes, cut and edited files are errors; nothing outside of them changes."""

import errno
import json
import os
import shutil

import damaged_folders
import forked
import pytest
import yaml
from safetensors.numpy import save

from rlox.checkpoint import load_checkpoint, run_files, save_checkpoint
from rlox.checkpoint.file import _digest
from rlox.tracking.record import Record

pytestmark = pytest.mark.slow
RESUME = "total_timesteps=128"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """The folder of the runs that tests copy."""
    folder = tmp_path_factory.mktemp("pristine")
    damaged_folders.make(folder)
    return folder


@pytest.fixture
def root(pristine, tmp_path):
    shutil.copytree(pristine, tmp_path, symlinks=True, dirs_exist_ok=True)
    return tmp_path


def refused(words, root, *parts):
    """Run a command that must end with exit code 2 and a line that contains `parts`; return the line."""
    before = damaged_folders.contents(root / "outside")
    done = forked.run(*words, cwd=root, timeout=60)
    assert done.returncode == 2, done.stdout + done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith(f"rlox {words[0]}: ")
    for part in parts:
        assert part in line
    assert "Traceback" not in done.stderr
    assert damaged_folders.contents(root / "outside") == before
    return line


def check_cases(numbers, pristine, tmp_path):
    failed = []
    for number in numbers:
        folder = tmp_path / str(number)
        text, wrong = damaged_folders.case(number, pristine, folder)
        failed += ["\n".join([text, *wrong])] if wrong else []
        shutil.rmtree(folder)
    assert not failed, "\n\n".join(failed)


def test_damaged_run_folders_are_errors_and_change_nothing_outside(pristine, tmp_path):
    check_cases(range(20), pristine, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", range(20, 2000, 20))
def test_more_damaged_run_folders(first, pristine, tmp_path):
    check_cases(range(first, first + 20), pristine, tmp_path)


@pytest.mark.parametrize(
    "name",
    ["run.lock", "metrics.jsonl", "traceback.txt", "config.yaml", "checkpoints", "checkpoints/memory"],
)
def test_a_resume_follows_no_links(name, root):
    path, copy = root / "runs/dqn" / name, root / "outside/copy"
    if not path.exists():
        path.write_text("before")
    shutil.move(path, copy)
    path.symlink_to(copy)
    rule = "must be a folder" if copy.is_dir() else "must be a regular file"
    refused(["train", "resume=runs/dqn", RESUME], root, f"{name} {rule}, got a symbolic link")


def test_a_traceback_is_not_written_through_a_link(root):
    (root / "fails.py").write_text("def reward(*_):\n    raise RuntimeError('no reward')\n")
    folder = root / "new"
    folder.mkdir()
    (folder / "traceback.txt").symlink_to(root / "outside/secret")
    words = ["train", *damaged_folders.PPO, "env.reward_fn=fails:reward", "--import", "fails", "output_dir=new"]
    refused(words, root, "traceback.txt must be a regular file, got a symbolic link")


def test_a_new_run_writes_through_no_link(root):
    (root / "new/.hydra").mkdir(parents=True)
    (root / "new/.hydra/config.yaml").symlink_to(root / "outside/secret")
    words = ["train", *damaged_folders.PPO, "output_dir=new"]
    refused(words, root, ".hydra/config.yaml must be a regular file, got a symbolic link")


def test_a_file_in_place_of_a_job_hides_no_other_sweep(root):
    job = root / "sweep/1-ppo-CartPole-v1-s1"
    shutil.rmtree(job)
    job.write_text("x")
    done = forked.run("ls", "sweeps", "--folder", ".", cwd=root, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "sweep" in done.stdout
    done = forked.run("sweep", "status", "sweep", cwd=root, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "sweep/1-ppo-CartPole-v1-s1 must be a folder" in " ".join(done.stdout.split())


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "run.lock", "checkpoints/last.safetensors"])
def test_a_pipe_in_place_of_a_file_blocks_no_command(name, root):
    run = root / "runs/ppo"
    (run / name).unlink()
    os.mkfifo(run / name)
    refused(["train", "resume=runs/ppo", RESUME], root, f"{name} must be a regular file, got a named pipe")
    done = forked.run("ls", "runs", cwd=root, timeout=60)
    hides = name != "checkpoints/last.safetensors"
    assert "good" in forked.run("ls", "runs", "--folder", ".", cwd=root, timeout=60).stdout
    assert done.returncode == 2  # nothing is under outputs/
    done = forked.run("compare", "runs", "good", cwd=root, timeout=60)
    assert done.returncode == 0, done.stderr
    assert ("runs/ppo is left out" in done.stderr) == hides


def edit_yaml(path, change):
    plain = yaml.safe_load(path.read_text())
    change(plain)
    path.write_text(yaml.safe_dump(plain, sort_keys=False))


def test_a_buffer_in_the_configuration_of_ppo_is_an_error(root):
    edit_yaml(root / "runs/ppo/config.yaml", lambda plain: plain.update(buffer={"name": "uniform", "size": 10}))
    refused(["train", "resume=runs/ppo", RESUME], root, "buffer")


def test_a_text_of_the_config_that_became_a_list_is_named(root):
    edit_yaml(root / "runs/ppo/config.yaml", lambda plain: plain.update(preset=[1]))
    refused(["train", "resume=runs/ppo", RESUME], root, "preset must be a text, got a value of type list")


@pytest.mark.parametrize("key", ["seed", "total_timesteps"])
def test_a_number_of_400_digits_is_an_error(key, root):
    edit_yaml(root / "runs/ppo/config.yaml", lambda plain: plain.update({key: 10**400}))
    refused(["train", "resume=runs/ppo", RESUME], root, "config.yaml", "an integer of more than 64 bits")
    done = forked.run("ls", "runs", "--folder", ".", cwd=root)
    assert "runs/ppo is left out" in done.stderr
    assert "runs/dqn" in done.stdout


@pytest.mark.parametrize("value", ["1" * 400, "NaN", "-Infinity", "true", '"1"', "[1]"])
def test_a_record_holds_finite_numbers(value, root):
    path = root / "runs/ppo/metrics.jsonl"
    lines = path.read_text().splitlines()
    number = next(i for i, line in enumerate(lines) if "eval/mean_return" in line)
    row = json.loads(lines[number])
    lines[number] = json.dumps({**row, "eval/mean_return": 0}).replace(
        '"eval/mean_return": 0', f'"eval/mean_return": {value}'
    )
    path.write_text("".join(f"{line}\n" for line in lines))
    done = forked.run("ls", "runs", "--folder", ".", cwd=root)
    assert done.returncode == 0
    assert f"line {number + 1} must have a valid 'eval/mean_return'" in done.stderr
    assert "good" in done.stdout


@pytest.mark.parametrize("evaluation", [None, [], {}, {"mean_return": None}, {"mean_return": "x"}])
def test_a_best_checkpoint_without_its_evaluation_is_an_error(evaluation, root):
    path = root / "runs/ppo/checkpoints/best.safetensors"
    checkpoint = load_checkpoint(path)
    text = json.dumps({**checkpoint.header, "evaluation": evaluation})
    flat = {f"{name}/{key}": x for name, arrays in checkpoint.tensors.items() for key, x in arrays.items()}
    path.write_bytes(save(flat, {"rlox": text, "sha256": _digest(text, flat)}))
    refused(["train", "resume=runs/ppo", RESUME], root, "best.safetensors must hold the evaluation")


@pytest.mark.parametrize(
    ("callback", "key", "value"),
    [
        ("CheckpointCallback", "best", "x"),
        ("EvalCallback", "best", [1]),
        ("AdviceCallback", "streaks", {"approx_kl": "x"}),
        ("AdviceCallback", "grad_norms", ["x"]),
    ],
)
def test_a_state_of_a_callback_that_does_not_fit_changes_no_record(callback, key, value, root):
    path, record = root / "runs/ppo/checkpoints/last.safetensors", root / "runs/ppo/metrics.jsonl"
    checkpoint, before = load_checkpoint(path), record.read_bytes()
    checkpoint.header["callbacks"][callback][key] = value
    save_checkpoint(path, checkpoint)
    refused(["train", "resume=runs/ppo", RESUME], root, f"{callback}: its state in the checkpoint does not fit")
    assert record.read_bytes() == before


def test_a_resume_writes_elsewhere_only_if_that_is_typed_again(root):
    outside, run = root / "outside/folder", root / "runs/mmap"
    shutil.copytree(run, root / "runs/other")
    edit_yaml(root / "runs/other/config.yaml", lambda plain: plain["buffer"].update(folder=str(root / "runs/other/x")))
    done = forked.run("train", "resume=runs/other", RESUME, cwd=root)  # a folder inside
    assert done.returncode == 0, done.stderr
    edit_yaml(run / "config.yaml", lambda plain: plain["buffer"].update(folder=str(outside)))
    words = ["train", "resume=runs/mmap", RESUME]
    rule = "runs/mmap/config.yaml writes its replay memory to a folder that is not the run's, which happens only if"
    refused(words, root, rule, f"if you trust it, add buffer.folder={outside}")
    refused([*words, "--check"], root, rule)
    # A link inside leads out, and a path may be written in another way.
    (run / "inside").symlink_to(outside)
    for name in ("inside", "checkpoints/../../../outside"):
        edit_yaml(run / "config.yaml", lambda plain, name=name: plain["buffer"].update(folder=str(run / name)))
        refused(words, root, rule)
    (run / "inside").unlink()
    edit_yaml(run / "config.yaml", lambda plain: plain["buffer"].update(folder=str(outside)))
    done = forked.run(*words, f"buffer.folder={outside}", cwd=root)
    assert done.returncode == 0, done.stderr


def test_films_of_a_received_run_are_written_only_if_they_are_typed_again(root):
    wrappers = [{"RecordVideo": {"video_folder": str(root / "outside/films")}}]
    path = root / "runs/ppo/checkpoints/last.safetensors"
    checkpoint = load_checkpoint(path)
    checkpoint.header["env"]["wrappers"] = checkpoint.header["run"]["env"]["wrappers"] = wrappers
    save_checkpoint(path, checkpoint)
    edit_yaml(root / "runs/ppo/config.yaml", lambda plain: plain["env"].update(wrappers=wrappers))
    words = ["train", "resume=runs/ppo", RESUME]
    again = f"env.wrappers=[{{RecordVideo:{{video_folder:{root}/outside/films}}}}]"
    rule = "runs/ppo/config.yaml writes films with the wrapper RecordVideo, which happens only if you type it again"
    refused(words, root, rule, f"if you trust it, add '{again}'")
    refused([*words, "--import", "json"], root, rule)
    refused(["eval", path], root, "the wrapper RecordVideo of")
    assert rule not in forked.run(*words, again, "--check", cwd=root).stderr


def test_a_resume_may_choose_another_tracker(root):
    """The logger is what should be looked at first in a folder of somebody else."""
    received = {"mlflow": {"tracking_uri": "http://127.0.0.1:9"}, "csv": {"file": "other.csv"}}
    edit_yaml(root / "runs/ppo/config.yaml", lambda plain: plain.update(logger=received))
    done = forked.run("train", "resume=runs/ppo", RESUME, "logger=none", cwd=root)
    assert done.returncode == 0, done.stderr
    assert not (root / "runs/ppo/mirrors").exists()
    assert not (root / "runs/ppo/other.csv").exists()


def test_a_training_that_cannot_begin_leaves_a_folder_that_can_be_used(root):
    words = ["train", *damaged_folders.PPO, "output_dir=new"]
    left = root / "new/checkpoints/.last.safetensors.1.partial"
    left.mkdir(parents=True)  # which should be a file
    done = forked.run(*words, cwd=root)
    assert done.returncode == 1
    assert ".last.safetensors.1.partial" in done.stderr
    assert not (root / "new/metrics.jsonl").exists()
    left.rmdir()
    assert forked.run(*words, cwd=root).returncode == 0
    # A run that goes on keeps its record, with the failure.
    left.mkdir()
    done = forked.run("train", "resume=new", RESUME, cwd=root)
    assert done.returncode == 1
    assert [json.loads(line) for line in (root / "new/metrics.jsonl").open()][-1]["status"] == "failed"
    left.rmdir()
    assert forked.run("train", "resume=new", RESUME, cwd=root).returncode == 0


def test_a_store_that_cannot_be_written_does_not_stop_the_training(root):
    (root / "outputs").mkdir()
    (root / "outputs/mlflow.db.rlox").write_text("where a folder should be")
    words = [word for word in damaged_folders.PPO if word != "logger=none"]
    env = {key: value for key, value in os.environ.items() if key != "MLFLOW_TRACKING_URI"}
    done = forked.run("train", *words, "logger=[mlflow,csv]", "output_dir=new", cwd=root, env=env)
    assert done.returncode == 0, done.stderr
    assert "warning: mlflow is not filled: " in done.stderr
    assert (root / "new/metrics.csv").is_file()
    (root / "outputs/mlflow.db.rlox").unlink()
    assert forked.run("train", "resume=new", RESUME, "logger=csv", cwd=root, env=env).returncode == 0


def test_sync_leaves_a_damaged_run_out(root):
    odd = "[/red]\x1b[2J"
    shutil.move(root / "good", root / odd)
    edit_yaml(root / odd / "config.yaml", lambda plain: plain.update(logger={"csv": {}}))
    (root / "runs/ppo/config.yaml").write_text("logger: [1")
    done = forked.run("sync", "runs/ppo", odd, "runs/dqn", cwd=root)
    assert done.returncode == 1
    assert "rlox sync: runs/ppo is left out: " in done.stderr
    assert "1 run could not be synced; see above" in done.stderr
    assert "[/red]\\x1b[2J: csv complete" in done.stdout
    assert "runs/dqn: no tracker configured" in done.stdout
    assert (root / odd / "metrics.csv").is_file()
    refused(["sync", "runs/ppo"], root, "runs/ppo/config.yaml must be YAML as rlox writes it")


def test_a_run_folder_may_be_reached_through_a_link(root):
    (root / "disk").mkdir()
    (root / "outputs").symlink_to("disk")
    shutil.move(root / "runs/dqn", root / "disk/dqn")
    (root / "link").symlink_to("disk/dqn")
    for words in (
        ["train", "resume=outputs/dqn", RESUME],
        ["eval", "link"],
        ["eval", "outputs/dqn/checkpoints/last.safetensors"],
        ["train", *damaged_folders.PPO, "output_dir=outputs/new"],
        ["train", "resume=link", "total_timesteps=256"],
        ["collect", "--replay", "link", "--out", "data.arrow"],
        ["compare", "outputs/new", "good"],
    ):
        done = forked.run(*words, cwd=root)
        assert done.returncode == 0, (words, done.stderr)
    listed = forked.run("ls", "runs", cwd=root).stdout
    assert "outputs/dqn" in listed
    assert "outputs/new" in listed


def test_a_link_to_a_checkpoint_outside_of_runs_is_followed(root):
    (root / "agent.safetensors").symlink_to(root / "runs/ppo/checkpoints/best.safetensors")
    assert forked.run("eval", "agent.safetensors", cwd=root).returncode == 0


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path):
    def write():
        with run_files.replace_file(tmp_path / "run", "a/b"):
            raise OSError(errno.ENOSPC, "No space left on device")  # as the file's `write` does

    with pytest.raises(OSError, match=r"No space left on device: '.*/run/a/b'"):
        write()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_files_are_opened_and_replaced_only_inside(tmp_path):
    run, outside = tmp_path / "run", tmp_path / "outside"
    (run / "a").mkdir(parents=True)
    outside.mkdir()
    (outside / "secret").write_text("secret")
    (run / "link").symlink_to(outside)
    (run / "file").symlink_to(outside / "secret")
    (run / "new").symlink_to(outside / "new")
    for name in ("link/secret", "link/new", "file", "new"):
        for open_ in (
            lambda name=name: run_files.open_descriptor(run, name, os.O_RDWR | os.O_CREAT),
            lambda name=name: run_files.is_file(run, name),
        ):
            with pytest.raises(ValueError, match="symbolic link"):
                open_()
    with pytest.raises(ValueError, match="symbolic link"), run_files.replace_file(run, "link/secret"):
        pass
    with pytest.raises(FileNotFoundError, match="a/b"):
        run_files.open_file(run, "a/b")
    # The link itself is replaced, and the name of an unfinished file is not followed either.
    partial = run / f".file.{os.getpid()}-{run_files.threading.get_ident()}.partial"
    partial.symlink_to(outside / "secret")
    with run_files.replace_file(run, "file") as file:
        file.write(b"mine")
    assert (run / "file").read_bytes() == b"mine"
    assert not (run / "file").is_symlink()
    assert (outside / "secret").read_text() == "secret"
    with pytest.raises(KeyError), run_files.replace_file(run, "file"):
        raise KeyError
    assert (run / "file").read_bytes() == b"mine"
    assert not [path for path in run.iterdir() if path.suffix == ".partial"]
    assert sorted(path.name for path in outside.iterdir()) == ["secret"]


@pytest.mark.parametrize("name", ["run.lock", "metrics.jsonl"])
def test_the_record_of_the_library_follows_no_links(name, tmp_path):
    (tmp_path / "secret").write_text("secret")
    run = tmp_path / "run"
    run.mkdir()
    (run / name).symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match=f"{name} must be a regular file, got a symbolic link"):
        Record(run)
    assert (tmp_path / "secret").read_text() == "secret"


def test_a_sweep_follows_no_links(root):
    job = root / "sweep/0-ppo-CartPole-v1-s0"
    shutil.move(job, root / "outside/job")
    job.symlink_to(root / "outside/job")
    for words in (["sweep", "resume", "sweep"], ["sweep", "status", "sweep"]):
        refused(words, root, "0-ppo-CartPole-v1-s0 must be a file or a folder, got a symbolic link")
    job.unlink()
    shutil.move(root / "outside/job", job)
    (root / "sweep/plot.png").symlink_to(root / "outside/secret")
    refused(["plot", "sweep"], root, "plot.png must be a regular file, got a symbolic link")
    (root / "sweep/sweep.jsonl").unlink()
    os.mkfifo(root / "sweep/sweep.jsonl")
    refused(["sweep", "status", "sweep"], root, "sweep.jsonl must be a regular file, got a named pipe")


def test_cp_writes_through_no_link(root):
    (root / "mine/algo").mkdir(parents=True)
    (root / "mine/algo/ppo.yaml").symlink_to(root / "outside/new")
    refused(["cp", "algo/ppo", "mine"], root, "must not exist yet")
    assert not (root / "outside/new").exists()
