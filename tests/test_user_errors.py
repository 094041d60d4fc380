"""An exception in user code shows its location; a user error is one paragraph; a bug in rlox keeps its traceback."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import failing_user_code
import forked
import gymnasium
import numpy as np
import pytest

import rlox
from rlox.callbacks import Callback
from rlox.checkpoint import load_checkpoint
from rlox.config import nearest
from rlox_cli.terminal.account import account, exit_code, format_failure, is_of_user

HERE = Path(failing_user_code.__file__)
SMALL = ["logger=none", "total_timesteps=600", "algo.n_steps=32", "env.n_envs=4", "eval.n_episodes=1"]


def line_of(source: str) -> int:
    return 1 + next(i for i, line in enumerate(HERE.read_text().splitlines()) if line.strip() == source)


def own(env: str, *args: str) -> list[str]:
    return ["train", "--import", "failing_user_code", f"env={env}", *SMALL, *args]


def frames(err: str) -> list[tuple[str, str]]:
    """The functions and source lines that are shown, after checking that each is in the user's file at that line."""
    found = re.findall(r'^  File "(.*)", line (\d+), in (\w+)\n    (.*)$', err, re.MULTILINE)
    assert all(Path(file) == HERE and line_of(source) == int(line) for file, line, _, source in found)
    return [(function, source) for *_, function, source in found]


FAILS = [
    (
        own("StepFails-v0"),
        "environment 0 (StepFails-v0): step 6 of its episode failed with RuntimeError: the simulator has lost its "
        "licence",
        [("step", 'raise RuntimeError("the simulator\\nhas lost its licence")')],
    ),
    (
        own("ResetFails-v0"),
        "environment 0 (ResetFails-v0): reset failed with KeyError: 'begin'",
        [("reset", 'return {"start": 0}["begin"]')],
    ),
    (
        own("MakingFails-v0"),
        "making environment MakingFails-v0 failed with LookupError: no such robot",
        [("__init__", 'raise LookupError("no such robot")')],
    ),
    (
        own("Exits-v0"),
        "GymVecEnv: Exits-v0: the environment must not end the process, got SystemExit(0)",
        [("step", "raise SystemExit(0)")],
    ),
    (
        own("InNumPy-v0"),
        "environment 0 (InNumPy-v0): reset failed with ValueError: all the input arrays must have same number of",
        [
            ("reset", "return self.obs(), {}"),
            ("obs", "return np.concatenate([np.zeros(2), np.zeros((1, 1))])"),
        ],
    ),
    (
        own("Sound-v0", "env.wrappers=[failing_user_code.Wrapper]"),
        "environment 0 (Sound-v0): step 1 of its episode failed with AttributeError: 'int' object has no attribute "
        "'gear'",
        [("step", "return super().step(action.gear)")],
    ),
    (
        own("Sound-v0", "env.reward_fn=failing_user_code:reward"),
        "reward_fn reward on Sound-v0 failed with TypeError: no torque there",
        [("reward", 'raise TypeError("no torque there")')],
    ),
]


@pytest.mark.parametrize(("args", "says", "shown"), FAILS, ids=[args[3] + args[-1][-9:] for args, *_ in FAILS])
def test_an_exception_in_user_code_shows_its_location(args, says, shown, command, tmp_path):
    code, _, err = command(*args)
    assert code == 1
    assert f"rlox train: {says}" in err
    assert "Traceback" not in err
    assert frames(err) == shown
    (kept,) = tmp_path.rglob("traceback.txt")
    assert f"  whole traceback: {kept.relative_to(tmp_path)}\n" in err
    assert "Traceback (most recent call last)" in kept.read_text()
    assert "/rlox/" in kept.read_text()
    if (record := kept.with_name("metrics.jsonl")).exists():
        end = json.loads(record.read_text().splitlines()[-1])
        assert end["traceback"] == "traceback.txt"
        assert end["message"].startswith(says)
        assert end["message"].endswith(f"({HERE}, line {line_of(shown[-1][1])})")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["env.workers=2"], 1, r"environment 0 \(StepFails-v0, worker 0, pid \d+\): step 6 of its episode failed with"),
        (["--check"], 1, "env=StepFails-v0: step failed with RuntimeError: the simulator has lost its licence"),
        (["-m", "seed=0,1"], 1, r"environment 0 \(StepFails-v0\): step 6 of its episode failed with RuntimeError"),
    ],
    ids=["workers", "check", "sweep"],
)
def test_exceptions_in_workers_checks_and_sweeps_show_their_location(args, code, message, command, tmp_path):
    got, out, err = command(*own("StepFails-v0"), *args)
    assert got == code
    assert re.search(message, out + err)
    assert "Traceback" not in err
    if "-m" in args:
        assert f"({HERE}, line {line_of(FAILS[0][2][0][1])})" in out
        assert len(list(tmp_path.rglob("traceback.txt"))) == 2
    else:
        assert frames(err) == FAILS[0][2]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("env", "hook", "message"),
    [
        ("RewardMissing-v0", "step", "the reward must be a number, got NoneType"),
        ("TextReward-v0", "step", "the reward must be a number, got str"),
        ("VastReward-v0", "step", "the reward must fit a float, got an integer of 1,329 bits"),
        ("TextFlag-v0", "step", "terminated must be a bool, got str"),
        ("NoFlag-v0", "step", "truncated must be a bool, got NoneType"),
        ("NoReset-v0", "reset", "reset must return (observation, info), got NoneType"),
        (
            "FourValues-v0",
            "step",
            "step must return (observation, reward, terminated, truncated, info), got a tuple of 4",
        ),
        ("Checked-v0", "step", "step must return (observation, reward, terminated, truncated, info), got a tuple of 4"),
        ("CheckedInfo-v0", "step", "step must return info as a dict, got NoneType; return {} if there is no info"),
        (
            "BareReset-v0",
            "reset",
            "reset must return (observation, info), got ndarray of shape (3,); return {} if there is no info",
        ),
        ("ShortRow-v0", "reset", "observations must have the shape of observation_space, (3,), got (1,)"),
        ("WrongText-v0", "reset", "observations must be numbers, got ndarray of shape (3,) of dtype <U1"),
        ("WrongPart-v0", "reset", "observations must have the part 'leg' of observation_space, got ['arm', 'hand']"),
        ("FloatImage-v0", "reset", "observations must be of dtype uint8, as observation_space says, got float64"),
    ],
)
def test_a_wrong_return_value_of_an_environment_is_named(env, hook, message, workers):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        rlox.PPO(env, 2, 0, n_steps=8, env_workers=workers).train(16)
    method = getattr(gymnasium.spec(env).entry_point, hook)
    process = r"(, worker 0, pid \d+)?"
    place = rf"environment 0 \({env}{process}\): {hook} at {re.escape(str(HERE))}, line "
    assert re.search(rf"{place}{method.__code__.co_firstlineno}\)", str(caught.value))
    with pytest.raises(ValueError, match=re.escape(message)):
        rlox.PPO(env, 1).evaluate(1)


@pytest.mark.slow
def test_the_command_reports_wrong_return_values_in_one_paragraph(command):
    code, _, err = command(*own("FourValues-v0"))
    assert code == 1
    assert err.startswith("rlox train: GymVecEnv: FourValues-v0: step must return (observation, reward, terminated, ")
    assert "Traceback" not in err
    assert "whole traceback: outputs/" in err
    code, _, err = command(*own("OldSignature-v0"))
    assert code == 1
    assert "environment 0 (OldSignature-v0): reset failed with TypeError: " in err
    assert "unexpected keyword argument 'seed'" in err


class Broken(Callback):
    def on_step(self, **info):
        raise KeyError("my own")


def test_the_library_raises_the_users_exception_with_a_note():
    for broken, note in (
        ({"env_id": "ResetFails-v0"}, "rlox: environment 0 (ResetFails-v0): reset failed"),
        ({"env_id": "CartPole-v1", "callbacks": [Broken()]}, "rlox: callback Broken.on_step failed"),
    ):
        with pytest.raises(KeyError) as caught:
            rlox.PPO(**broken, n_envs=2, n_steps=8).train(16)
        assert caught.value.__notes__ == [note]


def test_eval_and_collect_show_the_location_of_an_exception(command, tmp_path):
    rlox.PPO("StepFails-v0").save(tmp_path / "own.safetensors")
    for verb, where in (
        (["eval"], "evaluation on StepFails-v0: step failed with RuntimeError: the simulator has lost its licence"),
        (["collect", "--steps", "80"], "environment 0 (StepFails-v0): step 6 of its episode failed with RuntimeError"),
    ):
        code, _, err = command(*verb, "own.safetensors", "--import", "failing_user_code")
        assert code == 1
        assert f"rlox {verb[0]}: {where}" in err
        assert frames(err) == FAILS[0][2]
        assert "  whole traceback: set RLOX_TRACEBACK=1 to print it\n" in err
        assert "Traceback" not in err


def test_broken_code_that_is_imported_is_shown(command, tmp_path):
    (tmp_path / "slip.py").write_text("def f():\n    return undefined\n\n\nf()\n")
    code, _, err = command("ls", "algos", "--import", "slip")
    assert code == 1
    assert err.startswith("rlox ls: --import slip: its code failed with NameError: name 'undefined' is not defined\n")
    assert '  File "' in err
    assert 'slip.py", line 2, in f\n    return undefined\n' in err
    assert "import_module" not in err


def test_a_bug_of_rlox_keeps_its_traceback_and_asks_to_be_reported():
    with pytest.raises(TypeError) as slip:
        nearest("name", 3)
    assert exit_code(slip.value) == 1
    output = account(slip.value)
    assert output.startswith("Traceback (most recent call last)")
    assert "TypeError: 'int' object is not iterable\nThis is a bug in rlox" in output
    with pytest.raises(ValueError, match="n_envs must be") as refused:
        rlox.PPO("CartPole-v1", n_envs=0)
    assert exit_code(refused.value) == 2
    assert re.fullmatch(r".*n_envs must be .*, got 0", account(refused.value))


def test_a_command_is_not_named_twice():
    with pytest.raises(ValueError, match="export: path must end") as error:
        rlox.export(rlox.PPO("CartPole-v1", n_envs=1), "policy")
    assert format_failure("export", error.value).startswith("rlox export: path must end in .onnx")
    with pytest.raises(FileNotFoundError) as error:
        load_checkpoint("absent")
    assert format_failure("train", error.value, rank=2) == "rlox train: rank 2: no file absent"


@pytest.mark.slow
def test_the_whole_traceback_on_demand(tmp_path):
    environment = {**os.environ, "RLOX_TRACEBACK": "1", "PYTHONPATH": str(HERE.parent)}
    done = forked.run(*own("StepFails-v0"), cwd=tmp_path, env=environment)
    assert done.returncode == 1
    assert "Traceback (most recent call last)" in done.stderr
    assert "rlox: environment 0 (StepFails-v0): step 6 of its episode failed" in done.stderr
    wrong = forked.run("train", "algo=nope", cwd=tmp_path, env=environment)
    assert (wrong.returncode, wrong.stderr.startswith("Traceback")) == (
        2,
        True,
    )  # the code is the same with and without
    (saved,) = tmp_path.rglob("last.safetensors")
    assert load_checkpoint(saved).header["counters"]["env_steps"] == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_another_package_turns_into_its_own_error_stops_the_command(number, command, tmp_path):
    (tmp_path / "turning.py").write_text(
        "import os, time\ntry:\n"
        f"    os.kill(os.getpid(), {number:d})\n    time.sleep(10)\n"
        "except BaseException:\n    raise AttributeError('something else') from None\n"
    )
    assert command("train", "--import", "turning") == (128 + number, "", "rlox train: interrupted\n")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_modules_of_import_reach_the_workers(workers, command, tmp_path):
    (tmp_path / "inner_part.py").write_text(
        "import gymnasium\ngymnasium.register('Inner-v0', 'gymnasium.envs.classic_control:CartPoleEnv')\n"
    )
    (tmp_path / "outer_part.py").write_text(
        "import gymnasium\n\n\nclass Outer(gymnasium.Wrapper):\n"
        "    def __init__(self):\n        super().__init__(gymnasium.make('Inner-v0', max_episode_steps=20))\n\n\n"
        "gymnasium.register('Outer-v0', 'outer_part:Outer')\n"
    )
    sizes = ("env=Outer-v0", *SMALL, "total_timesteps=64", f"env.workers={workers}")
    code, _, err = command("train", "--import", "inner_part", "--import", "outer_part", *sizes)
    assert not code, err


class ExtraPart(failing_user_code.WrongPart):
    def obs(self):
        return {"arm": np.zeros(2, np.float32), "leg": np.zeros(1, np.float32), "hand": 0}


def test_what_only_gymnasium_finds_wrong_is_an_error_of_the_environment():
    gymnasium.register("ExtraPart-v0", ExtraPart)
    with pytest.raises(AssertionError) as caught:
        rlox.PPO("ExtraPart-v0", 1, 0, n_steps=8).train(8)
    assert is_of_user(caught.value)
    assert "environment 0 (ExtraPart-v0): reset failed with AssertionError: " in account(caught.value)


@pytest.mark.slow
def test_a_missing_package_names_the_extra_that_installs_it(tmp_path):
    def run(package, *words):
        program = f"import sys; sys.modules[{package!r}] = None; from rlox_cli.main import main; main()"
        return subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, cwd=tmp_path)

    few = ["logger=none", "total_timesteps=64", "algo.n_steps=8", "eval.n_episodes=1"]
    swept = run("matplotlib", "train", "-m", "seed=0", *few, "output_dir=sweep")
    assert not swept.returncode, swept.stderr
    assert 'pip install "rlox-cli[plot]"' in swept.stderr
    search = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=1", "hydra.sweeper.search=[learning_rate]"]
    searched = run("matplotlib", "train", "-m", *search, *few, "output_dir=search")
    assert not searched.returncode, searched.stderr
    assert 'pip install "rlox-cli[plot]"' in searched.stdout
    assert (tmp_path / "search" / "experiment" / "best.yaml").is_file()
    (tmp_path / "mlflow.db").touch()
    for package, extra, words in (
        ("matplotlib", "plot", ["plot", "sweep"]),
        ("transformers", "llm", ["train", "experiment=grpo-copy", *few[:1]]),
        ("mlflow", "mlflow", ["ui", "--store", "mlflow.db"]),
    ):
        done = run(package, *words)
        assert done.returncode in (1, 2)
        assert done.stderr.startswith(f"rlox {words[0]}: ")
        assert done.stderr.endswith(f'; pip install "rlox-cli[{extra}]"\n')
        assert done.stderr.count("\n") == 1


class NoSpaces(gymnasium.Env):
    observation_space, action_space = (3,), (2,)


def test_a_run_that_saved_nothing_leaves_no_folder(command, tmp_path):
    gymnasium.register("NoSpaces-v0", NoSpaces)
    (tmp_path / "mine").mkdir()
    for folder in ("new/run", "mine"):
        code, _, err = command("train", "env=NoSpaces-v0", "logger=none", f"output_dir={folder}")
        assert code == 2
        assert "make_gym_env: NoSpaces-v0 cannot be created: " in err
    assert [path.name for path in tmp_path.rglob("*")] == ["mine"]


def test_a_start_in_a_folder_where_another_process_trains_changes_nothing(command, tmp_path):
    class Late(failing_user_code.Sound):
        def __init__(self):
            super().__init__()
            row = {"event": "start", "step": 0, "segment": 0, "pid": os.getppid()}
            (tmp_path / "run/metrics.jsonl").write_text(json.dumps(row) + "\n")

    gymnasium.register("Late-v0", Late)
    (theirs := tmp_path / "run/.hydra/overrides.yaml").parent.mkdir(parents=True)
    theirs.write_text("- seed=7\n")
    code, _, err = command(*own("Late-v0"), "output_dir=run")
    assert code == 1
    assert "run was taken by another process in the meantime; try again" in err
    assert theirs.read_text() == "- seed=7\n"


def test_an_unknown_id_inside_an_environment_is_not_reported_as_its_own():
    def outer():
        return gymnasium.make("Nowhere-v0")

    gymnasium.register("AsksForNowhere-v0", outer)
    with pytest.raises(ValueError, match=r"AsksForNowhere-v0 cannot be created: .*Nowhere"):
        rlox.PPO("AsksForNowhere-v0", 1)
