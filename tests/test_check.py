"""``rlox train … --check``: its output for configurations that cannot work and for those that can."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import forked
import gymnasium
import numpy as np
import pytest
from masked_envs import SOURCES, Legal

import rlox as rlox_library
from rlox.algorithms import DQN, PPO
from rlox.buffers import footprint, make_buffer
from rlox.config import BufferConfig, MmapBufferConfig, PrioritizedBufferConfig
from rlox.envs import EnvSpec
from rlox_cli.config.compose import compose_jobs
from rlox_cli.families import estimate, limits, probe
from rlox_cli.families.family import family_of
from rlox_cli.main import commands
from rlox_cli.run import check
from rlox_cli.run.train import announce
from rlox_cli.terminal.console import TextConsole

OWN = ("--import", "faulty_envs")
DQN_ARGS = ("algo=dqn", "env=CartPole-v1")


def own(env: str, *args: str) -> list[str]:
    return [*OWN, f"env={env}-v0", *args]


# The arguments, and the error on stderr; nothing may be trained.
BAD = [
    (["algo.clip_epz=1"], "algo.clip_epz is no key of PPOConfig; did you mean 'clip_eps'?"),
    (["algo.gamma=high"], "algo.gamma must be a number, got 'high'"),
    (["algo.gamma=1.5"], "algo.gamma must be in [0, 1], got 1.5"),
    (["algo.hidden_sizes=[0]"], "algo.hidden_sizes must contain widths >= 1, got [0]"),
    (["total_timesteps=0"], "total_timesteps must be >= 1, got 0"),
    (["max_time=30"], "max_time must be a time above 0 such as 90s, 30m, 2h or 1h30m, or null, got '30'"),
    (["algo=pppo"], "algo=pppo does not exist; did you mean 'ppo'?"),
    (["env=CartPol-v1"], "env=CartPol-v1 is no environment; did you mean 'CartPole-v1'?"),
    (["env=GymV21Environment-v0"], 'run `pip install "shimmy[gym-v21]"`'),
    (["experiment=smoke"], "experiment=smoke does not exist; did you mean 'ppo-smoke'?"),
    (["tuned=best"], "tuned=best does not exist"),
    (["logger=tensorbored"], "logger=tensorbored does not exist; did you mean 'tensorboard'?"),
    (["-cd", "absent"], "--config-dir must be a folder of YAML, got absent"),
    (["--import", "absent_package"], "--import absent_package: there is no such module"),
    (["--cfg", "job"], "--check must not be combined with a flag that only prints"),
    (["init_from=absent.safetensors"], "init_from=absent.safetensors must be a checkpoint that loads"),
    (["init_from=garbage.safetensors"], "init_from=garbage.safetensors must be a checkpoint that loads"),
    (["init_from=acrobot.safetensors"], "the policy does not fit the checkpoint"),
    ([*DQN_ARGS, "init_from=acrobot.safetensors"], "the policy must have the networks of dqn, got those of ppo"),
    (["resume=absent"], "resume=absent does not exist; name a run folder"),
    (["algo=dqn", "env=Pendulum-v1"], "actions must be discrete, got 1 action component; continuous actions are for"),
    (["algo=td3", "env=CartPole-v1"], "actions must be continuous, got 2 discrete actions; discrete actions are for"),
    (
        own("Choices", "algo=td3"),
        "got 2 components of 2, 3 choices; multi-discrete actions are for A2C, APPO, DREAMER, IMPALA, MAPPO, PPO",
    ),
    (own("Unbounded", "algo=sac"), "must be finite and apart, got [-inf, -inf] to [inf, inf]; wrap it"),
    (own("Picture", "algo=sac"), "observations must be vectors, got images of shape (3, 48, 48); take PPO"),
    (own("Picture", "algo.normalize_obs=true"), "normalize_obs must be false for images"),
    (own("OddSpace"), "the observation space must be one that gymnasium.spaces.flatten can flatten"),
    (own("OddActions"), "the action space must be Discrete, MultiDiscrete, MultiBinary or a Box of floats"),
    (own("Picture", "backend=native"), "backend must be auto or torch here, got 'native': "),
    (["env.workers=9"], "env.workers must be between 0 and n_envs, got 9"),
    (own("Held", "env.workers=2"), "must be picklable by cloudpickle, to be sent to another process"),
    (own("Good", "env.backend=envpool"), "known EnvPool id" if find_spec("envpool") else "envpool is not available"),
    (own("Good", "env.wrappers=[FlattenObservatio]"), "did you mean 'FlattenObservation'?"),
    (own("Good", "env.wrappers=[NormalizeReward]"), "wrappers must not contain NormalizeReward: episode returns would"),
    (own("Good", "env.kwargs.speed=2"), "does not take kwargs {'speed': 2}"),
    (own("Good", "env.reward_fn=faulty_envs:scald"), "faulty_envs has no such name; did you mean 'scaled'?"),
    (own("Good", "env.reward_fn=faulty_envs:NOT_A_REWARD"), "must be a callable or a 'rlox.reward.v1' capsule"),
    (own("Good", "env.reward_fn=faulty_envs:scaled"), "reward_fn must return an array of shape (8,), got (7,)"),
    (own("Nan"), "observations must be finite, got nan at step 7 of random actions; fix the environment"),
    (own("NanReward"), "rewards must be finite, got nan; fix the environment, or set env.reward_fn"),
    (own("NoReward"), "the reward must be a number, got NoneType"),
    (own("WrongShape"), "observations must have the shape of observation_space, (3,), got (4,)"),
    (own("NoInfo"), "reset must return (observation, info), got ndarray of shape (3,); return {} if there is no info"),
    (own("OldStep"), "got a tuple of 4; this is the form of old gym: split done into terminated"),
    (own("OldReset"), "reset failed with TypeError: OldReset.reset() got an unexpected keyword argument 'seed'"),
    (own("Breaks"), "env=Breaks-v0: step failed with KeyError: \"the joint 'knee'\""),
    (own("NoConstructor"), "making environment NoConstructor-v0 failed with OSError: no such simulator: /opt/sim"),
    (own("Locked", "env.n_envs=1"), "the simulator runs only once"),
    (["buffer=uniform"], "buffer must be left out with algo=ppo, got uniform; on-policy algorithms have none"),
    ([*DQN_ARGS, "buffer.size=32"], "buffer.size must be at least algo.batch_size and env.n_envs (64), got 32"),
    ([*DQN_ARGS, "algo.learning_starts=50_000"], "algo.learning_starts must be below total_timesteps (50000), or"),
    ([*DQN_ARGS, "buffer.size=1_000_000_000_000"], "transitions of 64 bytes, 58 TiB, but there are"),
    (["algo.n_steps=1_000_000_000"], "algo.n_steps must fit in memory, got 1,000,000,000 in 8 environments"),
    (
        [*DQN_ARGS, "buffer=mmap", "buffer.size=10_000_000_000_000", "total_timesteps=10_000_000_000_000"],
        "must have room for the replay memory's files, 582 TiB, but",
    ),
    (["hydra.run.dir=blocked/run"], "hydra.run.dir must be in a folder, got blocked/run: "),
    (["hydra.run.dir=done"], "output_dir=done must be a new folder, but contains a run; choose another, or resume it"),
    (["-m", "seed=0,1", "algo.gamma=0.9,2"], "job 1 of the sweep (seed=0 algo.gamma=2): algo.gamma must be in"),
    (["-m", "algo=sac,dqn", "env=Pendulum-v1"], "job 1 of the sweep (algo=dqn env=Pendulum-v1): DQN: the environ"),
]

# The arguments, and a warning; the job is otherwise valid.
ODD = [
    (own("Unseeded"), "env=Unseeded-v0 is not deterministic: with the same seed and actions, observations differ"),
    (own("UnseededReward"), "with the same seed and actions, rewards differ, so no run can be repeated"),
    (own("Endless"), "env=Endless-v0: no episode ended in "),  # as many as the probe's time allows, at most 1,000
    (own("Endless"), " random steps, and without a time limit an evaluation may take long"),
    (
        own("Terminates"),
        "every episode terminated after exactly 10 steps; if that is a time limit, it must be",
    ),
    (own("Large"), "observations reach 1e+06; algo.normalize_obs=true brings them near 1"),
    (own("Large"), "rewards reach 1e+05; algo.normalize_rewards=true can bring them near 1"),
    (own("Large", "algo=dqn"), "rewards reach 1e+05; env.reward_fn can bring them near 1"),
    (
        own("Bytes"),
        "observations are bytes of shape (40, 36), 1,440 numbers from 0 to 255 that the network sees unscaled; for an "
        "image use the wrapper {ReshapeObservation: {shape: [40, 36, 1]}}, else set normalize_obs=true",
    ),
    (own("Outside"), "gymnasium's checker says: The first element returned by `env.reset()` is not within"),
    (own("WrongType"), "was expecting numpy array dtype to be float32, actual type: float64"),
    (["total_timesteps=100"], "total_timesteps=100 is less than one rollout of env.n_envs x algo.n_steps, 256 steps"),
    ([*DQN_ARGS, "algo.train_freq=60_000"], "is less than one round of train_freq, 60,000 steps"),
    (["algo.batch_size=1000"], "algo.batch_size=1,000 is more than a rollout has, 256 transitions"),
    (["algo.n_steps=1", "env.n_envs=1"], "a rollout is a single transition, whose advantage has no variance"),
    (["eval.n_points=1000"], "eval.n_points=1,000 is more than the training can evaluate: only 391"),
    (["schedule_timesteps=1000"], "takes algo.learning_rate to 0 before total_timesteps=100,000: nothing is learned"),
    ([*DQN_ARGS, "algo.learning_starts=40_000"], "leaves 20% of total_timesteps=50,000 for learning"),
    ([*DQN_ARGS, "algo.target_update_freq=50_000"], "the target network is never updated"),
    (
        ["logger=mlflow", "logger.mlflow.tracking_uri=http://127.0.0.1:9"],
        "logger=mlflow: http://127.0.0.1:9 does not answer within 1 s; training does not wait for it",
    ),
]

# The same for algorithms that learn from a dataset.
OFFLINE_BAD = [
    (["algo=td3_bc"], "dataset must be chosen for algo=td3_bc, got null; try dataset=data/medium.arrow"),
    (
        ["algo=td3_bc", "dataset=pand.arrow"],
        "there is no such file, and a Minari id is minari:(namespace/)name-vN; did",
    ),
    (["algo=td3_bc", "dataset=cut.arrow", "env=Pendulum-v1"], "dataset cut.arrow: "),
    (["algo=iql", "dataset=pend.arrow", "env=MountainCarContinuous-v0"], "must have observations of shape (2,)"),
    (["algo=td3_bc", "dataset=cart.arrow"], "actions must be continuous, got discrete actions; BC can learn"),
    (["algo=ppo", "dataset=pend.arrow"], "dataset must be left out with algo=ppo, which collects its own data"),
    (["algo=bc", "dataset=pend.arrow", "env.backend=gymnasium"], "env.backend must be auto with algo=bc, which learns"),
    (
        ["-m", "algo=bc,td3_bc", "dataset=cart.arrow"],
        "job 1 of the sweep (algo=td3_bc dataset=cart.arrow env=CartPole-v1): TD3BC: actions must be continuous",
    ),
]
OFFLINE_ODD = [
    (["algo.batch_size=400"], "algo.batch_size=400 is more than the dataset has, 300 transitions: batches repeat"),
    (["eval.n_points=500"], "eval.n_points=500 is more than the training can evaluate: only 100"),
    (
        ["algo=iql", "algo.policy_schedule=cosine", "schedule_timesteps=50"],
        "takes the policy's step size to 0 before total_timesteps=200: the policy does not change after that",
    ),
    (
        own("Large", "algo=bc", "dataset=own.arrow"),
        "observations reach 1e+06; algo.normalize_obs=true brings them near 1",
    ),
    (own("Endless", "algo=bc", "dataset=own.arrow"), "without a time limit an evaluation may take long"),
    (
        own("Large", "algo=bc", "dataset=own.arrow"),
        "the dataset was gathered in Good-v0, but the policy is evaluated in Large-v0",
    ),
]


def prepare(cwd: Path) -> None:
    """Create the files that the tables above name."""
    (cwd / "blocked").touch()
    (cwd / "garbage.safetensors").write_bytes(b"no header")
    (cwd / "done").mkdir()
    (cwd / "done" / "metrics.jsonl").touch()
    PPO("Acrobot-v1").save(cwd / "acrobot.safetensors")


def listing(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.fixture
def rlox(tmp_path, monkeypatch, capfd):
    """Runs the command in this process, since starting Python each time would take minutes; probes are shortened."""
    prepare(tmp_path)
    scratch = tmp_path.parent / f"{tmp_path.name}-scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name, seconds in forked.BRIEF.items():
        monkeypatch.setattr(estimate, name, seconds)
    monkeypatch.setattr(probe, "_SECONDS", 0.1)
    if (faulty := sys.modules.get("faulty_envs")) is not None:
        faulty.Locked.made = 0

    def run(*args: str) -> tuple[int, str, str]:
        before = listing(tmp_path)
        code = commands()(["train", *args], prog_name="rlox", standalone_mode=False)
        if "--check" in args:
            assert listing(tmp_path) == before
            assert not list(scratch.iterdir())
        return code, *capfd.readouterr()

    return run


# tests/test_cli.py tests these without --check, and other tests cover mistakes of environments in the library: here, by
# default, only one case for each place that raises.
ELSEWHERE = {
    "algo.gamma=high", "algo.hidden_sizes=[0]", "algo=pppo", "experiment=smoke", "tuned=best", "logger=tensorbored",
    "-cd absent", "--import absent_package", "total_timesteps=0", "init_from=garbage.safetensors",
    "--import faulty_envs env=NoInfo-v0", "--import faulty_envs env=OldStep-v0",
    "--import faulty_envs env=Picture-v0 algo.normalize_obs=true", "algo=td3 env=CartPole-v1",
    "--import faulty_envs env=Choices-v0 algo=td3", "resume=absent",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "message"),
    [
        pytest.param(
            args, message, id=(typed := " ".join(args)), marks=pytest.mark.exhaustive if typed in ELSEWHERE else ()
        )
        for args, message in BAD
    ],
)
def test_what_cannot_work_is_refused_in_one_paragraph(args, message, rlox):
    code, _, err = rlox(*args, "--check")
    assert message in err
    assert err.startswith("rlox train: ")
    raised = any(f"env={name}-v0" in args for name in ("Breaks", "NoConstructor", "Locked", "OldReset"))
    assert code == (1 if raised else 2)
    # Exceptions of the environment are followed by their location; all other errors are one paragraph.
    assert all(line.startswith("  ") for line in err.splitlines()[1:])
    assert ('faulty_envs.py", line ' in err) == (raised and "env=OldReset-v0" not in args)
    assert err.count("\n") == 1 or raised


@pytest.mark.slow
@pytest.mark.parametrize(("args", "message"), ODD, ids=[" ".join(args) for args, _ in ODD])
def test_what_is_odd_is_a_warning(args, message, rlox):
    code, out, err = rlox("logger=none", *args, "--check")
    assert not code, err
    assert any(line.startswith("  warning ") and message in line for line in out.splitlines())
    assert out.endswith("nothing was trained or saved; leave out --check to train\n")
    assert err == ""


class Strict(Legal):
    """Takes an illegal action for a mistake."""

    def step(self, action):
        answer = super().step(action)
        assert not self.n_illegal, f"{action} is illegal"
        return answer


gymnasium.register("Strict-v0", Strict)


@pytest.mark.slow
@pytest.mark.parametrize("choices", [(4,), (3, 2, 2)])
@pytest.mark.parametrize("source", SOURCES)
def test_only_legal_actions_are_tried(source, choices, rlox):
    sizes = ",".join(map(str, choices))
    start = ["env.kwargs.start=2"] * (len(choices) == 1)
    words = ["env=Strict-v0", f"env.kwargs.source={source}", f"env.kwargs.choices=[{sizes}]", *start]
    code, out, err = rlox("logger=none", *words, "--check")
    assert not code, err
    assert "checker says" not in out
    assert "not deterministic" not in out


@pytest.mark.slow
def test_only_legal_actions_of_several_agents_are_tried(rlox):
    pytest.importorskip("pettingzoo")
    for name in ("Masked", "MaskedPairs", "MaskedZoo"):
        code, _, err = rlox("logger=none", "algo=mappo", f"env=pettingzoo:zoo_probes:{name}", "--check")
        assert not code, err


def test_a_mask_that_allows_nothing_is_refused(rlox):
    class Blocked(Strict):
        def mask(self):
            return np.zeros(4, bool)

    gymnasium.register("Blocked-v0", Blocked)
    code, _, err = rlox("logger=none", "env=Blocked-v0", "--check")
    assert code == 2
    assert 'Blocked-v0: info["action_mask"] must allow ' in err


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """Random steps of three environments, and one file cut short."""
    folder = tmp_path_factory.mktemp("datasets")
    for name, env in (("pend", "Pendulum-v1"), ("cart", "CartPole-v1"), ("own", "Good-v0")):
        words = ["collect", *OWN, "--env", env, "--steps", "300", "--out", str(folder / f"{name}.arrow")]
        assert not commands()(words, prog_name="rlox", standalone_mode=False)
    (folder / "cut.arrow").write_bytes((folder / "pend.arrow").read_bytes()[:2000])
    return folder


@pytest.fixture
def offline(datasets, rlox, tmp_path, monkeypatch):
    """The command in the folder with the datasets."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path.parent / "cache"))
    shutil.copytree(datasets, tmp_path, dirs_exist_ok=True)
    return rlox


@pytest.mark.slow
@pytest.mark.parametrize(("args", "message"), OFFLINE_BAD, ids=[" ".join(args) for args, _ in OFFLINE_BAD])
def test_offline_configurations_that_cannot_work_are_errors(args, message, offline):
    test_what_cannot_work_is_refused_in_one_paragraph(args, message, offline)


@pytest.mark.slow
@pytest.mark.parametrize(("args", "message"), OFFLINE_ODD, ids=[" ".join(args) for args, _ in OFFLINE_ODD])
def test_odd_offline_configurations_are_warnings(args, message, offline):
    small = ["algo=td3_bc", "dataset=pend.arrow", "tuned=off", "total_timesteps=200", "eval.n_episodes=2"]
    test_what_is_odd_is_a_warning([*small, "algo.hidden_sizes=[16]", "algo.batch_size=32", *args], message, offline)


@pytest.mark.slow
def test_each_offline_algorithm_is_reported(offline):
    words = ["algo=bc,td3_bc,iql,cql", "dataset=pend.arrow", "seed=0,1", "tuned=off", "logger=none"]
    small = ["algo.hidden_sizes=[16]", "algo.batch_size=32", "total_timesteps=2000", "eval.n_points=4"]
    code, out, err = offline("-m", *words, *small, "eval.n_episodes=3", "--check")
    assert not code, err
    assert "warning" not in out
    titles = [line for line in out.splitlines() if " on " in line and not line.startswith(" ")]
    assert titles == [f"{algo} on Pendulum-v1, 2 jobs" for algo in ("bc", "td3_bc", "iql", "cql")]
    data = rlox_library.open_dataset("pend.arrow")
    returns = data.stats()
    reported = (
        f"300 transitions in {returns['n_episodes']} episodes of Pendulum-v1, return {returns['mean_return']:.2f}"
    )
    assert out.count(reported) == 4
    plan = "2,000 updates in batches of 32 from 300 transitions; 4 evaluations of 3 episodes"
    assert out.count(f"  plan         {plan}\n") == 4
    assert out.count("KiB, is read from its file as it is used") + out.count("MiB, is read from its file") == 4
    assert "8 jobs: " in out


@pytest.mark.slow
def test_a_good_custom_environment_gives_no_warning(rlox):
    code, out, _ = rlox(*own("Good"), "logger=none", "--check")
    assert not code
    assert "warning" not in out
    # gymnasium's checker warns about common cases: action spaces and observations without bounds.
    code, out, _ = rlox("env=Pendulum-v1", "env.backend=gymnasium", "logger=none", "--check")
    assert not code
    assert "warning" not in out


@pytest.mark.slow
def test_every_bad_job_of_a_sweep_is_reported_and_the_good_ones_are_estimated(rlox):
    code, out, err = rlox("-m", "algo=ppo,dqn,td3", "env=Pendulum-v1,CartPole-v1", "logger=none", "--check")
    assert code == 2
    bad = ["algo=dqn env=Pendulum-v1 logger=none)", "algo=td3 env=CartPole-v1 logger=none)"]
    assert [line.split(":")[1].split("(")[1] for line in err.splitlines()] == bad
    titles = [line for line in out.splitlines() if " on " in line and not line.startswith(" ")]
    assert titles == ["ppo on Pendulum-v1", "ppo on CartPole-v1", "dqn on CartPole-v1", "td3 on Pendulum-v1"]


@pytest.mark.slow
def test_the_jobs_of_a_sweep_are_summed_and_seeds_are_checked_once(rlox):
    code, out, _ = rlox("-m", "seed=0,1,2", "env=CartPole-v1", "logger=none", "--check")
    assert not code
    assert out.count("ppo on CartPole-v1, 3 jobs\n") == 1
    assert "3 jobs: " in out
    assert "one after the other, the longest" in out


@pytest.mark.slow
def test_a_sweep_with_an_invalid_job_does_not_start(rlox, tmp_path):
    code, _, err = rlox("-m", "algo=ppo,dqn", "env=Pendulum-v1", "logger=none", "total_timesteps=2000")
    assert code == 2
    assert "job 1 of the sweep (algo=dqn env=Pendulum-v1 logger=none total_timesteps=2000): DQN: " in err
    assert not (tmp_path / "outputs").exists()


@pytest.mark.slow
def test_the_report_of_a_new_process(tmp_path):
    # Check the imports: a native run does not import PyTorch.
    command = [sys.executable, "-X", "importtime", "-m", "rlox_cli.main", "train", "algo=dqn", "env=CartPole-v1"]
    words = ["max_time=1s", "--check"]
    done = subprocess.run([*command, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert "rlox.kernels.nn.dqn" in imported
    assert "torch" not in imported
    for text in (
        "dqn on CartPole-v1\n",
        "observations of 4 numbers; 2 discrete actions",
        "native (perceptrons on the CPU",
        "50,176 steps in 1 environment, learning every 256 in batches of 64; 10 evaluations of 20 episodes",
        "the replay memory takes 3.1 MiB",
        "mlflow",
        "max_time=1s ends it earlier",
        "outputs/",
    ):
        assert text in done.stdout
    assert not list(tmp_path.iterdir())
    done = forked.run(*command[5:], *words, "algo.learning_starts=50_000", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert not list(tmp_path.iterdir())


def record(run: Path) -> list[dict]:
    """The metrics of a run without times."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("time")} for row in rows if "event" not in row]


@pytest.mark.slow
@pytest.mark.parametrize("args", [["algo=ppo"], ["algo=dqn", "algo.learning_starts=100"], own("Good")])
def test_checks_before_a_run_do_not_change_it(args, rlox, tmp_path, monkeypatch):
    common = ["logger=none", "total_timesteps=1000", "eval.n_points=2", "eval.n_episodes=2"]
    code, out, _ = rlox(*args, *common, "hydra.run.dir=one")
    assert not code
    monkeypatch.setattr("rlox_cli.run.session.training_warnings", lambda *_: [])
    rlox(*args, *common, "hydra.run.dir=other")
    assert record(tmp_path / "one") == record(tmp_path / "other") != []
    assert ("warning: env=Good-v0 has no time limit" in out) == (args[0] == "--import")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (
            ["env=LunarLander-v3"],
            "total_timesteps=300,000 is a short budget: the source of the settings trains for 1,0",
        ),
        (
            ["env=LunarLander-v3", "total_timesteps=9000"],
            "total_timesteps=9,000 is short: the tuned settings are for 300",
        ),
        (["env=LunarLander-v3", "total_timesteps=1000000"], None),
        (
            ["env=CartPole-v1", "total_timesteps=9000"],
            "total_timesteps=9,000 is short: the tuned settings are for 100,0",
        ),
        (["env=CartPole-v1"], None),
        (["env=CartPole-v1", "tuned=off", "total_timesteps=9000"], None),
    ],
)
def test_the_announcement_of_tuned_settings_says_that_a_budget_is_short(args, says, capsys):
    announce(compose_jobs([], args), TextConsole())
    out = capsys.readouterr().out
    assert ("tuned settings: ppo/" in out) == ("tuned=off" not in args)
    assert (says in out) if says else ("is short" not in out and "short budget" not in out)


@pytest.mark.slow
def test_checks_restore_global_generators(rlox):
    np.random.seed(3)  # noqa: NPY002
    random.seed(3)
    expected = np.random.RandomState(3).uniform(), random.Random(3).random()
    jobs = compose_jobs(["-m"], ["algo=ppo,a2c", "imports=[faulty_envs]", "env=Draws-v0"])
    check.require_buildable(jobs)
    assert (np.random.uniform(), random.random()) == expected  # noqa: NPY002


@pytest.mark.slow
def test_resume_is_checked_without_touching_the_run(rlox, tmp_path):
    small = ["logger=none", "total_timesteps=1000", "algo.learning_starts=100", "eval.n_episodes=1", "tuned=off"]
    rlox("algo=dqn", "env=CartPole-v1", *small, "hydra.run.dir=run")
    code, out, _ = rlox("resume=run", "total_timesteps=2000", "--check")
    assert not code
    assert "resuming run at step 1,000 of 2,000" in out
    assert out.endswith("the run can be resumed; nothing was trained or written, leave out --check to resume it\n")
    for path in (tmp_path / "run" / "checkpoints" / "memory").iterdir():
        path.unlink()
    code, out, _ = rlox("resume=run", "total_timesteps=2000", "--check")
    assert "the replay memory starts empty" in out
    code, _, err = rlox("resume=run", "total_timesteps=2000", "algo.learning_rate=0", "--check")
    assert code == 2
    assert "algo.learning_rate must be > 0" in err


SPECS = {
    "vector": EnvSpec((4,), n_actions=2),
    "stacks": EnvSpec((4, 84, 84), np.uint8, n_stacked=4, n_actions=6),
    "image": EnvSpec((3, 64, 64), np.uint8, act_dim=2, act_low=-np.ones(2), act_high=np.ones(2)),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("config", [BufferConfig(size=20_000), PrioritizedBufferConfig(size=20_000, n_step=3)])
def test_a_replay_memory_is_as_large_as_predicted(config, spec):
    found = footprint(config, spec, 4, 0.99, n_pushed=5_000)
    assert found.reserved == pytest.approx(make_buffer(config, spec, 4, 0.99).nbytes, rel=0.01)
    assert found.resident == found.reserved // 4
    assert footprint(config, spec, 4, 0.99, n_pushed=10**9).resident == found.reserved


def test_a_memory_with_a_file_is_as_large_as_predicted(tmp_path):
    config = MmapBufferConfig(size=40_000, hot_size=2_000, folder=str(tmp_path))
    found = footprint(config, SPECS["vector"], 1, 0.99, n_pushed=30_000)
    buffer, n = make_buffer(config, SPECS["vector"], 1, 0.99), 10_000
    assert found.resident == pytest.approx(buffer.ram_budget, rel=0.01)
    obs, ends = np.zeros((n, 4), np.float32), np.zeros(n, bool)
    for _ in range(3):
        buffer.push_batch(obs, obs, np.zeros((n, 1), np.float32), np.zeros(n, np.float32), ends, ends)
    written = 512 * Path(buffer.cold_path).stat().st_blocks
    buffer.close()
    assert found.disk == pytest.approx(written, rel=0.1)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_predicted_resident_memory_equals_the_growth_of_the_process():
    """The prediction, compared with the numbers of the operating system."""
    program = """
import numpy as np
from rlox.buffers import footprint, make_buffer
from rlox.config import BufferConfig
from rlox.envs import EnvSpec
spec, config, n = EnvSpec((100,), n_actions=2), BufferConfig(size=200_000), 1000
obs, ends = np.ones((n, 100), np.float32), np.zeros(n, bool)
push = lambda b: b.push_batch(obs, obs, np.ones((n, 1), np.float32), np.ones(n, np.float32), ends, ends)
push(make_buffer(BufferConfig(size=n), spec, 1, 0.99))
resident = lambda: 4096 * int(open("/proc/self/statm").read().split()[1])
before = resident()
buffer = make_buffer(config, spec, 1, 0.99)
for _ in range(60): push(buffer)
print((resident() - before) / footprint(config, spec, 1, 0.99, 60_000).resident)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert float(done.stdout) == pytest.approx(1.0, abs=0.1)


def test_warnings_about_memory_and_disk(monkeypatch, tmp_path):
    (job,) = compose_jobs([], ["algo=dqn", "env=CartPole-v1", "logger=none"])
    algorithm = DQN("CartPole-v1", buffer_size=100_000)
    needed = family_of(job.config.algo).replay_footprint(algorithm, job.config, 50_000).resident

    def at(name, free, total=2**40):
        value = (free, total) if name == "memory" else free
        monkeypatch.setattr(limits, name, lambda *_: value)
        return [*family_of(job.config.algo).warnings(algorithm, job.config, tmp_path)]

    monkeypatch.setattr(limits, "free_disk", lambda *_: 2**40)
    assert at("memory", 2 * needed) == []
    (warning,) = at("memory", needed + 1)
    assert warning.startswith("memory is tight: 3.1 MiB of experience, and 3.1 MiB are free")
    with pytest.raises(ValueError, match=r"of which the training fills 3\.1 MiB, but only .* are free; lower it to"):
        at("memory", needed - 1)
    with pytest.raises(ValueError, match=r"got 100,000 transitions of 64 bytes, 6\.1 MiB, but there are"):
        at("memory", 2 * needed, total=needed)
    at("memory", 2 * needed)
    (warning,) = at("free_disk", needed + 100_000)
    assert warning.startswith("the disk is nearly full")
    with pytest.raises(ValueError, match=r"or set checkpoint\.memory=false, or choose another folder with output_dir"):
        at("free_disk", needed - 100_000)
    config = replace(job.config, checkpoint=replace(job.config.checkpoint, memory=False))
    assert [*family_of(config.algo).warnings(algorithm, config, tmp_path)] == []


def test_the_memory_limit_of_a_container_is_used(tmp_path):
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 150\nother 3\n")
    assert limits.memory(tmp_path) == (450, 1000)
    (tmp_path / "memory.max").write_text("max\n")
    assert limits.memory(tmp_path)[1] > 1000  # that of the machine
    free, total = limits.memory()
    assert 0 < free <= total


def test_initial_costs_and_costs_per_step_are_separated():
    watch = estimate._Watch(1.0)
    # (CPU, wall, steps): 5 s at first, then 2 s of CPU and 3 s of wall time for each 100 steps.
    watch.rows = [(0.0, 0.0, 0), (7.0, 8.0, 100), (9.0, 11.0, 200), (11.0, 14.0, 300)]
    once, each = watch.costs()
    np.testing.assert_allclose(once, [5.0, 5.0])
    np.testing.assert_allclose(each, [0.02, 0.03])


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_cpu_seconds_include_running_children():
    before = limits.cpu_seconds()
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        while limits.cpu_seconds() - before < 0.5:
            time.sleep(0.02)
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()
