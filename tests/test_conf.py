"""The YAML files of rlox: complete, minimal, and all of them compose."""

from dataclasses import fields
from importlib.resources import files
from pathlib import Path

import forked
import numpy as np
import pytest
import yaml
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from rlox import config as configs
from rlox import tuned
from rlox.algorithms import ALGORITHMS, resolve
from rlox.buffers import BUFFERS
from rlox.config import BufferConfig, Config, RunConfig, tuned_pairs
from rlox_cli.config.compose import compose_jobs, run_composed, run_hydra
from rlox_cli.config.overrides import as_typed, run_folder
from rlox_cli.config.presets import choice_names, config_of, preset_settings, read_presets
from rlox_cli.report.keys import comments
from rlox_cli.terminal.errors import UsageError

CONF = Path(str(files("rlox_cli.conf")))


def test_yaml_files_match_the_registry():
    assert {path.stem for path in (CONF / "algo").glob("*.yaml")} == {*ALGORITHMS, *read_presets()}
    for name, entry in ALGORITHMS.items():
        assert resolve(entry.cls).name == name
        assert resolve(entry.cls).Config is resolve(entry.config)


@pytest.mark.parametrize("name", choice_names())
def test_algo_yaml_restates_no_default(name):
    plain = yaml.safe_load((CONF / "algo" / f"{name}.yaml").read_text())
    config = config_of(name)().to_dict()
    run = {**RunConfig().to_dict(), **config, "algo": config, "buffer": BufferConfig().to_dict()}
    for key, value in plain.items():
        if isinstance(value, dict):  # a nested section, as in `env: {n_envs: 1}`
            assert all(run[key][inner] != choice for inner, choice in value.items()), key
        else:
            assert key == "defaults" or run[key] != value, key


def test_buffers_have_a_yaml_each():
    assert {path.stem for path in (CONF / "buffer").glob("*.yaml")} == set(BUFFERS)
    for name in BUFFERS:
        assert set(yaml.safe_load((CONF / "buffer" / f"{name}.yaml").read_text())) == {"defaults"}


@pytest.mark.slow
@pytest.mark.parametrize(("algo", "env"), tuned_pairs())
def test_tuned_settings_compose_apply_and_carry_their_reference(algo, env, tmp_path):
    settings = tuned(algo, env)
    offline = config_of(algo).uses_dataset == "must"
    # Offline settings have no reference score, since scores depend on the dataset.
    assert isinstance(settings["reference"]["mean_return"], type(None) if offline else float)
    assert settings["reference"]["source"]
    data = []
    if offline:
        np.savez(tmp_path / "a.npz", obs=np.zeros(1))
        data = [f"dataset={tmp_path / 'a.npz'}"]
    (job,) = compose_jobs([], [f"algo={algo}", f"env={env}", *data])
    assert job.tuned == f"{algo}/{env}"
    for key, value in settings["algo"].items():
        assert getattr(job.config.algo, key) == value
    for key, value in settings.get("buffer", {}).items():
        assert getattr(job.config.buffer, key) == value
    assert job.config.env.n_envs == settings["env"]["n_envs"]
    assert job.config.total_timesteps == settings["total_timesteps"]
    if env != next(other for name, other in tuned_pairs() if name == algo):
        return  # the rest depends only on the algorithm, so one environment is enough
    (off,) = compose_jobs([], [f"algo={algo}", f"env={env}", "tuned=off", *data])
    assert off.tuned is None
    assert off.config.algo == config_of(algo)(**(preset_settings(algo)["algo"] if algo in read_presets() else {}))
    (typed,) = compose_jobs(
        [], [f"algo={algo}", f"env={env}", "algo.learning_rate=0.5", "total_timesteps=12_000", *data]
    )
    assert (typed.config.algo.learning_rate, typed.config.total_timesteps) == (0.5, 12_000)


@pytest.mark.slow
@pytest.mark.parametrize("logger", [path.stem for path in (CONF / "logger").glob("*.yaml")])
def test_loggers_compose(logger):
    config = compose_jobs([], [f"logger={logger}"])[0].config.logger
    chosen = {item.name for item in fields(config) if getattr(config, item.name) is not None}
    assert chosen == {"both": {"mlflow", "wandb"}, "none": set()}.get(logger, {logger})


def test_several_loggers_side_by_side():
    (job,) = compose_jobs([], ["logger=[mlflow,csv]", "logger.csv.file=tables/m.csv"])
    both = configs.LoggerConfig(mlflow=configs.MlflowConfig(), csv=configs.CsvConfig("tables/m.csv"))
    assert job.config.logger == both
    assert compose_jobs([], [])[0].config.logger == configs.LoggerConfig(mlflow=configs.MlflowConfig())


@pytest.mark.parametrize("name", [path.stem for path in (CONF / "experiment").glob("*.yaml")])
def test_experiments_compose_and_have_a_description(name):
    (job,) = compose_jobs([], [f"experiment={name}"])
    assert job.algo == next((algo for algo in ("dqn", "grpo") if algo in name), "ppo")
    lines = (CONF / "experiment" / f"{name}.yaml").read_text().splitlines()
    assert lines[0] == "# @package _global_"
    assert len(lines[1]) > 20


def test_an_experiment_overrides_tuned_settings_and_typed_settings_override_it():
    (job,) = compose_jobs([], ["experiment=ppo-smoke"])
    assert (job.config.total_timesteps, job.config.env.id, job.tuned) == (5_000, "CartPole-v1", "ppo/CartPole-v1")
    assert job.config.logger == configs.LoggerConfig()
    (typed,) = compose_jobs([], ["experiment=ppo-smoke", "total_timesteps=7", "logger=csv"])
    assert typed.config.total_timesteps == 7
    assert typed.config.logger.csv is not None


@pytest.mark.slow
def test_the_sweep_of_an_experiment_is_composed_and_typed_values_replace_it():
    jobs = compose_jobs(["-m"], ["experiment=cartpole-seeds", "algo.gamma=0.9,0.99"])
    assert [(job.config.seed, job.config.algo.gamma) for job in jobs] == [(s, g) for s in range(5) for g in (0.9, 0.99)]
    assert [job.config.seed for job in compose_jobs(["-m"], ["experiment=cartpole-seeds", "seed=7,8"])] == [7, 8]


def test_a_sweep_over_choices_has_keys_of_theirs():
    jobs = compose_jobs(["-m"], ["algo=sac,td3", "env=Pendulum-v1", "algo.learning_starts=77", "algo.gamma=0.9,0.8"])
    assert [(job.algo, job.config.algo.learning_starts, job.config.algo.gamma) for job in jobs] == [
        (algo, 77, gamma) for algo in ("sac", "td3") for gamma in (0.9, 0.8)
    ]
    for choices in ("algo=dqn buffer=uniform,prioritized", "algo=dqn,qr_dqn", "algo=dqn,c51 tuned=qr_dqn/CartPole-v1"):
        (one, two) = compose_jobs(["-m"], [*choices.split(), "buffer.size=99"])
        assert (one.config.buffer.size, two.config.buffer.size) == (99, 99)
    assert two.config.algo.n_atoms == one.config.algo.n_atoms == 10
    (job,) = compose_jobs(["-m"], ["algo=td3,sac", "algo=dqn", "buffer.size=99"])
    assert (job.algo, job.config.buffer.size) == ("dqn", 99)
    with pytest.raises(
        ValueError, match=r"job 0 of the sweep \(algo=ppo .*algo.learning_starts is no key of PPOConfig"
    ):
        compose_jobs(["-m"], ["algo=ppo,dqn", "algo.learning_starts=77"])


def test_a_file_sweeps_over_choices(tmp_path):
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\nhydra: {mode: MULTIRUN, sweeper: {params: {algo: 'sac,td3'}}}\n"
    (tmp_path / "experiment" / "both.yaml").write_text(text)
    typed = ["experiment=both", "env=Pendulum-v1", "algo.learning_starts=77"]
    jobs = compose_jobs(["-m", "-cd", str(tmp_path)], typed)
    assert [(job.algo, job.config.algo.learning_starts) for job in jobs] == [("sac", 77), ("td3", 77)]
    for typed in ("+hydra.sweeper.params.algo='sac,td3'", "hydra.sweeper.params={algo: sac}"):
        with pytest.raises(UsageError, match=r"hydra.sweeper.params is null here, and a file sets it; type the keys"):
            compose_jobs(["-m"], [typed])


def test_overrides_are_shown_as_they_were_typed():
    words = run_folder(["seed=1", "output_dir=my runs"])
    assert words == ["seed=1", "hydra.run.dir='my runs'", "hydra.sweep.dir='my runs'"]
    assert as_typed(words) == "seed=1 output_dir='my runs'"
    assert as_typed(["hydra.run.dir=a", "hydra.sweep.dir=b"]) == "hydra.run.dir=a hydra.sweep.dir=b"


def test_an_environment_of_a_missing_module_is_named():
    with pytest.raises(ValueError, match=r"^env=gym:CartPole-v1 imports gym: there is no such module"):
        compose_jobs([], ["env=gym:CartPole-v1"])


def test_settings_are_shown_for_environments_without_tuned_ones(command):
    code, shown, _ = command("show", "algo=td3", "env=CartPole-v1")
    assert not code
    assert "algo.target_noise" in shown
    assert "no tuned settings for algo=td3 env=CartPole-v1; `rlox ls tuned` lists those that exist" in shown


def test_the_users_folder_overrides_built_in_settings(tmp_path):
    (tmp_path / "tuned" / "ppo").mkdir(parents=True)
    (tmp_path / "algo").mkdir()
    (tmp_path / "algo" / "ppo.yaml").write_text("defaults: [ppo_schema, _self_]\nclip_eps: 0.33\n")
    text = "# @package _global_\ntotal_timesteps: 11\nreference: {mean_return: 1.0, source: mine}\n"
    (tmp_path / "tuned" / "ppo" / "MountainCar-v0.yaml").write_text(text)
    (job,) = compose_jobs(["-cd", str(tmp_path)], ["env=MountainCar-v0"])
    assert (job.config.algo.clip_eps, job.config.total_timesteps, job.tuned) == (0.33, 11, "ppo/MountainCar-v0")
    assert compose_jobs([], ["env=MountainCar-v0"])[0].config.algo.clip_eps == 0.2


@pytest.mark.parametrize("text", ["90s", "30m", "2h", "1h30m", "1h1s"])
def test_times(text):
    seconds = {"90s": 90, "30m": 1_800, "2h": 7_200, "1h30m": 5_400, "1h1s": 3_601}[text]
    assert RunConfig(max_time=text).max_seconds == seconds
    assert compose_jobs([], [f"max_time={text}"])[0].config.max_seconds == seconds


@pytest.mark.parametrize("text", ["", "0s", "30", "1.5h", "30m1h", "-5s", "5 s", "h", "1d"])
def test_invalid_times(text):
    with pytest.raises(ValueError, match="max_time must be a time above 0 such as 90s, 30m, 2h or 1h30m"):
        RunConfig(max_time=text)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: configs.CsvConfig("../m.csv"),
        lambda: configs.CsvConfig("/m.csv"),
        lambda: configs.CsvConfig("metrics.jsonl"),
        lambda: configs.TensorboardConfig(""),
        lambda: configs.TensorboardConfig("."),
        lambda: configs.EvalConfig(stop_at=float("nan")),
        lambda: configs.EvalConfig(patience=0),
        lambda: configs.EvalConfig(n_points=0, stop_at=5.0),
    ],
)
def test_settings_around_training_have_rules(wrong):
    with pytest.raises(ValueError, match="must "):
        wrong()


def test_any_gymnasium_id_needs_no_yaml():
    jobs = compose_jobs(["-m"], ["env=MountainCar-v0,MountainCarContinuous-v0", "seed=0,1"])
    assert [(job.config.env.id, job.config.seed) for job in jobs] == [
        ("MountainCar-v0", 0),
        ("MountainCar-v0", 1),
        ("MountainCarContinuous-v0", 0),
        ("MountainCarContinuous-v0", 1),
    ]
    pairs = tuned_pairs()
    assert all((job.tuned is None) is ((job.choice, job.config.env.id) not in pairs) for job in jobs)


def test_tuned_of_the_library():
    with pytest.raises(ValueError, match=r"available: .*ppo/CartPole-v1"):
        tuned("ppo", "Nothing-v0")
    with pytest.raises(ValueError, match="no settings ship"):
        tuned("ppo", "../ppo/CartPole-v1")
    assert RunConfig(seed=5).eval_seed == 10_005


@pytest.mark.parametrize("cls", [c for c in vars(configs).values() if isinstance(c, type) and issubclass(c, Config)])
def test_every_field_has_a_description(cls):
    assert set(comments(cls)) >= {item.name for item in fields(cls)}
    assert all(len(text) > 10 for text in comments(cls).values())


@pytest.mark.slow
def test_a_run_composed_by_rlox_gets_the_same_config_as_from_hydra(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = []

    def task(cfg):
        given.append((cfg, HydraConfig.get()))
        (tmp_path / "run").rename(tmp_path / f"{len(given)}")

    words = ["algo=dqn", "env=Acrobot-v1", "algo.gamma=0.9", "hydra.run.dir=run"]
    run_hydra([], words, task)
    (job,) = compose_jobs([], words)
    run_composed([], job, task)
    (expected, theirs), (cfg, ours) = given
    assert OmegaConf.to_yaml(cfg) == OmegaConf.to_yaml(expected)
    # Hydra adds an override if no mode is given.
    assert OmegaConf.to_yaml(ours) == OmegaConf.to_yaml(theirs).replace("  - hydra.mode=RUN\n", "")
    for name in ("config.yaml", "overrides.yaml"):
        assert (tmp_path / "2/.hydra" / name).read_text() == (tmp_path / "1/.hydra" / name).read_text()
    with pytest.raises(ZeroDivisionError):
        run_composed([], job, lambda cfg: 1 / 0)


@pytest.mark.slow
def test_callbacks_of_hydra_are_called_as_by_hydra(tmp_path, monkeypatch):
    (tmp_path / "hooks.py").write_text(
        "calls = []\n"
        "class Noted:\n"
        "    def __init__(self, name): self.name = name\n"
        "    def __getattr__(self, hook):\n"
        "        if not hook.startswith('on_'): raise AttributeError(hook)\n"
        "        def note(config, **info):\n"
        "            calls.append((self.name, hook, config.env.id, sorted(info)))\n"
        "            if self.name == 'b': raise KeyError('mine')\n"
        "        return note\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    import hooks

    words = ["env=Acrobot-v1", "hydra.run.dir=run"]
    words += [f"+hydra.callbacks.{name}={{_target_: hooks.Noted, name: {name}}}" for name in "ab"]
    found = []
    for run in (lambda: run_hydra([], words, list), lambda: run_composed([], compose_jobs([], words)[0], list)):
        with pytest.warns(UserWarning, match=r"Noted\.on_job_end raised KeyError: 'mine'"):
            run()
        found.append(hooks.calls[:])
        hooks.calls.clear()
    assert found[0] == found[1]
    assert [(name, hook) for name, hook, *_ in found[1]] == [
        *(("a", "on_run_start"), ("b", "on_run_start"), ("a", "on_job_start"), ("b", "on_job_start")),
        *(("b", "on_job_end"), ("a", "on_job_end"), ("b", "on_run_end"), ("a", "on_run_end")),
    ]


def test_flags_that_choose_a_configuration_do_not_hand_the_run_to_hydra(command, monkeypatch):
    handed = []
    monkeypatch.setattr("rlox_cli.run.train._run_with_hydra", lambda flags, *_: handed.append(flags))
    words = ["env=CartPole-v1", "total_timesteps=256", "logger=none", "tuned=off"]
    assert not command("train", "-cn", "config", "-r", *words)[0]
    assert not handed
    assert not command("train", *words, "--shell-completion")[0]
    assert handed == [["--shell-completion"]]


FILES = [
    ("seed: [1,\nenv: 3\n", "must be YAML, got an error in line 3: expected ',' or ']'"),
    ("algo:\n\tgamma: 0.9\n", r"must be YAML, got an error in line 2: found character '\t'"),
    ("seed: 1\nseed: 2\n", "must be YAML, got an error in line 2: found duplicate key seed"),
    ('seed: "\x07"\n', "must be YAML, got special characters are not allowed at character 7; remove it"),
    (b"seed: \xff\n", "must be text in UTF-8, got other bytes; save it as UTF-8"),
    ("# @package _global_\nalgo: {gama: 0.9}\n", ": algo.gama is no key of PPOConfig; did you mean 'gamma'?"),
    ("# @package _global_\nenv: {n_env: 3}\n", ": env.n_env is no key of EnvConfig; did you mean 'n_envs'?"),
    ("# @package _global_\nseed: one\n", ": seed must be an integer, got 'one'"),
    ("# @package _global_\nalgo: 3\n", ": each section must be a mapping such as {seed: 1}, got a value of type int"),
    ("# @package _global_\n- 1\n", ": each section must be a mapping such as {seed: 1}, got a list"),
    ("seed: 1\n", "must begin with the line `# @package _global_`, got none"),
]


@pytest.mark.parametrize(("content", "message"), FILES, ids=[says[-40:] for _, says in FILES])
def test_an_error_in_a_file_of_the_user_names_the_file_and_what_is_wrong(content, message, command, tmp_path):
    (file := tmp_path / "mine/experiment/one.yaml").parent.mkdir(parents=True)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    for words in (["experiment=one"], ["-m", "experiment=one", "seed=0,1"]):
        code, _, err = command("train", "-cd", "mine", "logger=none", *words)
        assert (code, err.count("\n")) == (2, 1), err
        assert err.startswith(f"rlox train: {Path('mine/experiment/one.yaml')}"), err
        assert message in err


@pytest.mark.slow
def test_the_same_with_a_flag_that_only_prints(tmp_path):
    (file := tmp_path / "mine/experiment/one.yaml").parent.mkdir(parents=True)
    file.write_text("# @package _global_\nalgo: {gama: 0.9}\n")
    # In a process of its own, since Hydra changes how the process logs.
    done = forked.run("train", "-cd", "mine", "experiment=one", "--info", "config", cwd=tmp_path, timeout=60)
    assert done.returncode == 2
    assert f"rlox train: {Path('mine/experiment/one.yaml')}: algo.gama is no key of PPOConfig;" in done.stderr


def test_a_reference_to_nothing_among_the_swept_keys_of_a_file_is_named(command, tmp_path):
    (file := tmp_path / "mine/experiment/one.yaml").parent.mkdir(parents=True)
    file.write_text("# @package _global_\nhydra: {sweeper: {params: {seed: '${absent}'}}}\n")
    code, _, err = command("train", "-cd", "mine", "-m", "experiment=one")
    assert code == 2
    assert err.startswith("rlox train: hydra.sweeper.params.seed refers to 'absent', which is no key")
