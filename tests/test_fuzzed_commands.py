"""Random arguments of every verb end with an exit code of the rule, and write nothing outside of the working folder."""

from __future__ import annotations

import os
import random
import subprocess

import forked
import pytest

SMALL = ["logger=none", "total_timesteps=64", "algo.n_steps=8", "eval.n_episodes=1", "eval.n_points=1"]
LONGEST_S = 120  # a command that has not ended then hangs
NUMBERS = ["0", "-1", "1", "3", "1.5", "nan", "inf", "1e30", "99999999999999999999", "' 3'", "x", "''", "[1]", "null"]
PATHS = ["absent", "run", "run/metrics.jsonl", "empty", "damaged.safetensors", "pipe", "link", ".", "a\nb", "~nobody/x"]
NO_FOLDER = f"{os.sep}no-such-folder-of-rlox"
PATHS += [f"{NO_FOLDER}/x", 300 * "x", "é", "-x", "run/checkpoints/best.safetensors", "~/x"]
FILES = [path + end for path in PATHS for end in (".arrow", ".npz", ".png", ".gif", ".html", ".txt", "")]
NAMES = ["ppo", "pppo", "CartPole-v1", "Nope-v0", "algo/ppo", "tuned/ppo/CartPole-v1", "conf", "a:b", "../x", "ünï", ""]
SWEPT = ["range(0)", "range(2)", "range(5,1)", "range(0,9,0)", "range(999999)", "1,2", "1,,2", "choice(1,2)", "glob(*)"]
SWEPT += ["interval(0,1)", "sort(2,1)", "shuffle(range(3))", "range(0,1,nan)", "[1,2]", "${oops}", "tag(a,1,2)", "x,y"]
KEYS = ["seed", "total_timesteps", "max_time", "threads", "device", "env", "env.id", "env.n_envs", "env.workers"]
KEYS += ["env.kwargs.x", "env.wrappers", "eval.workers", "eval.seed", "eval.max_steps", "algo", "algo.gamma", "buffer"]
KEYS += ["algo.learning_rate", "algo.n_steps", "algo.batch_size", "algo.hidden_sizes", "algo.nope", "nope", "tuned"]
KEYS += ["checkpoint.every_s", "init_from", "dataset", "reward", "experiment", "logger", "hydra/launcher", "resume"]
KEYS += ["buffer.folder", "sampler_folder", "logger.mlflow.tracking_uri", "hydra.sweeper.storage", "logger.csv.file"]
KEYS += ["hydra/sweeper", "hydra.sweeper.retries", "output_dir", "imports", "compile", "backend", "remote.addresses"]


def _option(draw, *options):
    """Return some of the options, each with a value from its pool; None: a flag without a value."""
    words = []
    for name, pool in options:
        if draw.random() < 0.5:
            words += [name] if pool is None else [name, draw.choice(pool)]
    return words


def _overrides(draw):
    pools = (
        NUMBERS,
        PATHS,
        [f"'sqlite:///{path}'" for path in PATHS],
        NAMES,
        ["true", "{a:1}", "auto", "1h", "99999999999999999999h"],
    )
    return [f"{draw.choice(KEYS)}={draw.choice(draw.choice(pools))}" for _ in range(draw.randint(1, 3))]


# No verb that waits for others: `worker` and `ui` get what they must refuse, and the benchmarks no work.
VERBS = {
    "train --check": lambda d: ["train", "--check", *SMALL, *_overrides(d)],
    "train --cfg": lambda d: ["train", "--cfg", "job", *_overrides(d), *_option(d, ("--resolve", None), ("-p", NAMES))],
    "train -m": lambda d: ["train", "-m", "--check", *SMALL, f"{d.choice(KEYS)}={d.choice(SWEPT)}", *_overrides(d)[:1]],
    "train optuna": lambda d: ["train", "-m", "--check", "hydra/sweeper=optuna", *SMALL,
                               f"{d.choice(KEYS)}={d.choice(SWEPT)}"],
    "train": lambda d: ["train", *SMALL, f"output_dir={d.choice(PATHS)}"],
    "resume": lambda d: ["train", f"resume={d.choice(PATHS)}", "total_timesteps=64", *_overrides(d)[:1]],
    "flags": lambda d: ["train", *SMALL, *d.sample(["--run", "-m", "--info", "--cfg", "-cd", "x", "--check"], 2)],
    "eval": lambda d: ["eval", d.choice(PATHS), *_option(
        d, ("--episodes", ["0", "1", "x"]), ("--seed", NUMBERS), ("--max-steps", ["9", *NUMBERS[:6]]), ("--json", None),
        ("--video", FILES), ("--predictions", FILES), ("--samples", NUMBERS), ("--pass-at", NUMBERS))],
    "enjoy": lambda d: ["enjoy", d.choice(PATHS), *_option(
        d, ("--episodes", ["0", "1", "x"]), ("--seed", NUMBERS), ("--max-steps", ["9", *NUMBERS[:6]]))],
    "export": lambda d: ["export", d.choice(PATHS), *_option(
        d, ("--to", ["onnx", "c", "x"]), ("--out", FILES), ("--observations", ["0", "9", "x", *NUMBERS[:6]]),
        ("--json", None))],
    "generate": lambda d: ["generate", d.choice(PATHS), "a", *_option(
        d, ("-n", NUMBERS), ("--temperature", NUMBERS), ("--top-p", NUMBERS), ("--seed", NUMBERS))],
    "collect": lambda d: ["collect", *d.choice([[], ["run"], ["absent"], ["=run"], ["a=run"]]), *_option(
        d, ("--env", ["CartPole-v1", *NAMES]), ("--out", FILES), ("--mix", ["a:1", "random:1", "a:nan", "x", ":"]),
        ("--seed", NUMBERS), ("--n-envs", ["1", "99999999999999999999"]), ("--replay", PATHS), ("--agents", NAMES)),
        *d.choice([[], ["--steps", "9"], ["--steps", d.choice(NUMBERS)]])],
    "ls": lambda d: ["ls", d.choice(["algos", "buffers", "envs", "tuned", "runs", "sweeps", *NAMES]), *_option(
        d, ("--folder", PATHS), ("--import", NAMES))],
    "show": lambda d: ["show", *d.sample([*NAMES, "eval", "algo=ppo", "algo=x", "dataset=absent"], 2)],
    "cp": lambda d: ["cp", d.choice(NAMES), d.choice(PATHS), *_option(d, ("--force", None))],
    "sync": lambda d: ["sync", d.choice(PATHS)],
    "plot": lambda d: ["plot", d.choice(PATHS), *_option(
        d, ("--metric", NAMES), ("--x", ["time", "x"]), ("--by", NAMES), ("--label", NAMES), ("--out", FILES))],
    "compare": lambda d: ["compare", d.choice(PATHS), d.choice(PATHS), *_option(
        d, ("--metric", NAMES), ("--threshold", NUMBERS), ("--json", None))],
    "sweep": lambda d: ["sweep", d.choice(["status", "resume", "x"]), d.choice(PATHS), *_option(
        d, ("--json", None), ("--retry-failed", None))],
    "doctor": lambda d: ["doctor", d.choice(["127.0.0.1:9", "x", ":", "a:b", "127.0.0.1:99999999"]), *_option(
        d, ("--timeout-s", ["0.1", *NUMBERS]), ("--ca", PATHS), ("--cert", PATHS), ("--token-file", PATHS))],
    "worker": lambda d: ["worker", "--env", d.choice(["Nope-v0", *NAMES[5:-1]]), *_option(
        d, ("--port", NUMBERS), ("--idle-s", NUMBERS), ("--tls-cert", PATHS), ("--max-envs", NUMBERS))],
    "ui": lambda d: ["ui", "--store", d.choice(PATHS), *_option(d, ("--port", NUMBERS[:2]))],
    "bench data": lambda d: ["bench", "data", "--only", d.choice(["nothing", "("]), *_option(d, ("--out", PATHS))],
    "bench train": lambda d: ["bench", "train", "nothing", *_option(d, ("--rounds", NUMBERS), ("--out", PATHS))],
    "bench learn": lambda d: ["bench", "learn", "algo=nothing", *_option(
        d, ("--seeds", NUMBERS), ("--runs", PATHS), ("--out", PATHS), ("--against", PATHS), ("--threshold", NUMBERS))],
}  # fmt: skip


def _place(folder):
    """Create the files that the arguments name, in a new working folder."""
    here = folder / "here"
    here.mkdir()
    done = forked.run("train", *SMALL, "output_dir=run", cwd=here)
    assert not done.returncode, done.stderr
    (here / "empty").mkdir()
    (here / "damaged.safetensors").write_bytes(b"no checkpoint")
    os.mkfifo(here / "pipe")
    (here / "link").symlink_to("absent")
    return here


def _outside(folder):
    """Return what is in the places that arguments name, and where a command should leave nothing."""
    absolute = [os.path.lexists(path) for path in (NO_FOLDER, os.path.expanduser("~nobody/x"))]
    return absolute, sorted(path.name for path in folder.iterdir())


def _check(words, folder, here):
    # The home folder has caches of libraries, which may be written.
    environment = {**os.environ, "HOME": str(folder / "home"), "WANDB_MODE": "offline"}
    before = _outside(folder)
    try:
        done = forked.run(*words, cwd=here, env=environment, timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        pytest.fail(f"hangs: rlox {words}")
    printed = done.stdout + done.stderr
    told = f"rlox {words}\nexit code {done.returncode}\n{printed[-3000:]}"
    assert done.returncode in (0, 1, 2), told
    assert "Traceback" not in printed, told
    assert "This is a bug in rlox" not in printed, told
    assert len(done.stderr) < 20_000, told
    assert _outside(folder) == before, told
    # What was typed is wrong, and a file that it names; the system and workers fail with 1.
    if done.returncode == 1:
        outside = ("cannot be written", "cannot be reached", "failed")
        assert any(text in printed for text in outside), told


def _cases(seed, n_each):
    draw = random.Random(seed)
    return [VERBS[verb](draw) for _ in range(n_each) for verb in VERBS]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "home").mkdir()
    return folder, _place(folder)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_random_arguments(part, place):
    for words in _cases(39, 1)[part::4]:
        _check([word for word in words if word], *place)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(int(os.environ.get("RLOX_FUZZ_ROUNDS", "8"))))
def test_more_random_arguments(seed, place):
    wrong = []
    for words in _cases(1_000 + seed, 2):
        try:
            _check([word for word in words if word], *place)
        except (AssertionError, pytest.fail.Exception) as e:
            wrong.append(str(e))
    assert not wrong, "\n\n".join(wrong)
