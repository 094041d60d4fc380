"""Keywords of other libraries: one table, which errors, completion and the migration page use."""

import os
import re
import subprocess
import sys
from dataclasses import fields
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import forked
import gymnasium
import pytest

import rlox
from rlox.algorithms import ALGORITHMS, DQN, GRPO, PPO, SAC, TD3, OnlineDPO, resolve
from rlox.config import DPOConfig, GRPOConfig, PrioritizedBufferConfig, RunConfig, nearest
from rlox.config.migration import CLEANRL, CONTRIB, KEYWORDS, ORIGINAL, SB3, TRL, answers, completions, table
from rlox.training.off_policy import OffPolicyAlgorithm
from rlox.training.on_policy import OnPolicyAlgorithm
from rlox.training.post_training import LLMAlgorithm
from rlox_cli.config.completion import complete

DOCS = Path(__file__).parent.parent / "docs"
FIELDS = {item.name for entry in ALGORITHMS.values() for item in fields(resolve(entry.config))}
ENVS = {"dqn": "CartPole-v1", "sac": "Pendulum-v1", "td3": "Pendulum-v1"}


def rlox_cli(*argv, **env):
    return forked.run(*argv, env={**os.environ, **env})


def test_every_suggested_name_exists():
    arguments = {*signature(OnPolicyAlgorithm.__init__).parameters, *signature(OffPolicyAlgorithm.__init__).parameters}
    arguments |= {name for cls in (GRPO, OnlineDPO, LLMAlgorithm) for name in signature(cls.__init__).parameters}
    sections = {item.name for item in fields(RunConfig)} | {"resume"}
    nested = {"env.n_envs", "eval.dataset", "eval.n_points", "checkpoint.every_steps"}
    nested |= {f"buffer.{item.name}" for item in fields(PrioritizedBufferConfig)}
    nested |= {"logger.wandb.project", "logger.wandb.entity", "logger.mlflow.run_name"}
    for row in KEYWORDS:
        assert row.ours or row.command or row.remark, row
        if row.ours is not None:
            assert row.ours.partition("=")[0] in FIELDS | arguments, row
        if row.needs is not None:
            assert row.needs in FIELDS, row
        if row.command is not None:
            key = row.command.partition("=")[0]
            assert key.removeprefix("algo.") in FIELDS if key.startswith("algo.") else key in sections | nested, row
    assert len({(row.theirs, row.of) for row in KEYWORDS}) == len(KEYWORDS)


# The arguments of CleanRL's scripts and Stable-Baselines3's classes, from their sources; each needs an answer.
CLEANRL_PPO = """exp_name seed torch_deterministic cuda track wandb_project_name wandb_entity capture_video env_id
    total_timesteps learning_rate num_envs num_steps anneal_lr gamma gae_lambda num_minibatches update_epochs norm_adv
    clip_coef clip_vloss ent_coef vf_coef max_grad_norm target_kl batch_size minibatch_size"""
CLEANRL_DQN = """exp_name seed cuda track capture_video save_model env_id total_timesteps learning_rate num_envs
    buffer_size gamma tau target_network_frequency batch_size start_e end_e exploration_fraction learning_starts
    train_frequency"""
CLEANRL_SAC = """env_id total_timesteps num_envs buffer_size gamma tau batch_size learning_starts policy_lr q_lr alpha
    autotune"""
CLEANRL_TD3 = """learning_rate buffer_size gamma tau batch_size policy_noise exploration_noise learning_starts
    policy_frequency noise_clip"""
SB3_PPO = """learning_rate n_steps batch_size n_epochs gamma gae_lambda clip_range clip_range_vf normalize_advantage
    ent_coef vf_coef max_grad_norm use_sde sde_sample_freq rollout_buffer_class rollout_buffer_kwargs target_kl
    stats_window_size tensorboard_log policy_kwargs verbose seed device net_arch activation_fn log_std_init
    ortho_init"""
SB3_DQN = """learning_rate buffer_size learning_starts batch_size tau gamma train_freq gradient_steps
    replay_buffer_class replay_buffer_kwargs optimize_memory_usage target_update_interval exploration_fraction
    exploration_initial_eps exploration_final_eps max_grad_norm stats_window_size tensorboard_log policy_kwargs verbose
    seed device"""
SB3_TD3 = """action_noise policy_delay target_policy_noise target_noise_clip train_freq gradient_steps"""
SB3_SAC = """ent_coef target_entropy use_sde sde_sample_freq use_sde_at_warmup action_noise optimize_memory_usage"""
CONTRIB_PPO = "lstm_hidden_size n_lstm_layers shared_lstm enable_critic_lstm lstm_kwargs"
ORIGINAL_PPO = """n_envs n_steps n_epochs batch_size learning_rate clip_eps vf_coef ent_coef max_grad_norm gamma
    gae_lambda normalize_advantages clip_vloss anneal_lr normalize_rewards normalize_obs"""
ORIGINAL_DQN = """learning_rate buffer_size batch_size gamma target_update_freq exploration_fraction
    exploration_initial_eps exploration_final_eps learning_starts double_dqn dueling n_step prioritized alpha beta_start
    hidden"""


@pytest.mark.parametrize(
    ("cls", "names"),
    [
        *((PPO, names) for names in (CLEANRL_PPO, SB3_PPO, CONTRIB_PPO, ORIGINAL_PPO)),
        *((DQN, names) for names in (CLEANRL_DQN, SB3_DQN, ORIGINAL_DQN)),
        *((SAC, names) for names in (CLEANRL_SAC, SB3_SAC)),
        *((TD3, names) for names in (CLEANRL_TD3, SB3_TD3)),
    ],
)
def test_every_foreign_keyword_is_known_or_has_an_answer(cls, names):
    known = {item.name for item in fields(cls.Config)}
    taken = {"seed", "device", "env_id", "n_envs", "buffer_size", "n_step", "prioritized"}
    for name in names.split():
        if name in known | taken:
            continue
        answer = answers(name, known)
        assert answer is not None, name
        with pytest.raises(TypeError) as refused:
            cls(ENVS.get(cls.name, "CartPole-v1"), **{name: 1})
        assert str(refused.value) == f"{cls.__name__}: unknown hyper-parameter {name!r}; {answer}"


@pytest.mark.parametrize("cls", [PPO, DQN, rlox.MAPPO])
def test_a_script_of_stable_baselines_is_told_what_to_write(cls):
    for arguments in (("MlpPolicy", "CartPole-v1"), ("CnnPolicy", gymnasium.make("CartPole-v1"))):
        with pytest.raises(ValueError, match=rf"{cls.__name__}: env_id must not be '{arguments[0]}', a policy of S"):
            cls(*arguments)
    with pytest.raises(ValueError, match="policy must not be 'MlpPolicy'"):
        cls("CartPole-v1", policy="MlpPolicy")
    with pytest.raises(ValueError, match=r'a policy of sb3-contrib: .*, and memory="lstm" for one with a memory'):
        cls("MlpLstmPolicy", "CartPole-v1")
    agent = cls("CartPole-v1", n_envs=1)
    for name, ours in {
        "learn": "agent.train(total_timesteps)",
        "load": f"{cls.__name__}.from_checkpoint(path)",
        "num_timesteps": "agent.counters.env_steps",
        "get_env": "agent.collector.env",
    }.items():
        for thing in (agent, cls):
            assert not hasattr(thing, name)
            with pytest.raises(AttributeError, match=f"{cls.__name__} has no attribute '{name}'.*{re.escape(ours)}"):
                getattr(thing, name)
    for name, text in (
        (
            "progress_bar",
            r"instead of progress_bar of Stable-Baselines3, write train\(total_timesteps, progress=True\)",
        ),
        ("use_masking", ".*masks are used wherever the environment has them"),
        ("callback", r".*write callbacks=\[…\] in the constructor"),
        ("total_timestep", "did you mean 'total_timesteps'"),
    ):
        with pytest.raises(TypeError, match=rf"{cls.__name__}.train: unknown argument '{name}'; {text}"):
            agent.train(16, **{name: True})
    assert agent.counters.env_steps == 0


def test_other_families_and_trainers_answer_too():
    with pytest.raises(AttributeError, match=r"write agent\.train"):
        rlox.Trainer("ppo", "CartPole-v1").learn(10)
    with pytest.raises(ValueError, match="Trainer: env must not be 'MlpPolicy'"):
        rlox.Trainer("ppo", "MlpPolicy", "CartPole-v1")
    with pytest.raises(TypeError, match=r"BC\.train: unknown argument 'n_update'; did you mean 'n_updates'"):
        rlox.BC(None, 3, 1).train(n_update=3)


def test_the_repr_says_what_learns_where_and_how_far_it_is():
    agent = PPO("CartPole-v1", n_envs=2, n_steps=8, hidden_sizes=[8])
    agent.train(32)
    # 4 x 8 + 8 hidden, then 8 x 2 + 2 for the actor and 8 + 1 for the critic.
    assert repr(agent) == (
        "PPO(CartPole-v1, hidden_sizes=[8], 107 parameters, 32 steps trained, backend=native, device=cpu)"
    )
    with_torch = PPO("CartPole-v1", n_envs=2, n_steps=8, hidden_sizes=[8], backend="torch")
    assert "107 parameters, 0 steps trained, backend=torch" in repr(with_torch)
    assert repr(rlox.BC(None, 3, 1, hidden=8)).endswith("0 updates trained, backend=native, device=cpu)")
    assert repr(PPO.__new__(PPO)) == "PPO()"
    assert repr(rlox.Trainer("ppo", "CartPole-v1")).startswith("Trainer(PPO(CartPole-v1, hidden_sizes=[64, 64]")


def test_the_error_names_the_equivalent():
    for cls, arguments, text in (
        (TD3, {"target_policy_noise": 0.2}, "did you mean target_noise? (target_policy_noise of Stable-Baselines3)"),
        (PPO, {"clip_range": 0.2}, "did you mean clip_eps?"),
        (PPO, {"clip_vloss": True}, "a distance, not a bool"),
        (PPO, {"anneal_lr": True}, "did you mean learning_rate_schedule=linear?"),
        (PPO, {"num_minibatches": 4}, "did you mean batch_size? (num_minibatches of CleanRL: n_envs * n_steps / num"),
        (PPO, {"hidden": 64}, "did you mean hidden_sizes? (hidden of the Rust rlox: [hidden, hidden]"),
        (PPO, {"use_sde": True}, "use_sde of Stable-Baselines3 has no equivalent here: there is no state-dependent"),
        (DQN, {"buffer_alpha": 0.6}, 'did you mean buffer? (buffer_alpha of the Rust rlox: {"name": "prioritized", '),
        (SAC, {"ent_coef": "auto"}, "ent_coef must be of type float, got 'auto'; did you mean auto_entropy=true?"),
        (PPO, {"learning_rate": lambda left: left}, "did you mean learning_rate_schedule=linear?"),
        (DQN, {"train_freq": (1, "episode")}, "a number of environment steps, never of episodes"),
        (PPO, {"gama": 0.9}, "PPO: unknown hyper-parameter 'gama'; did you mean 'gamma'?"),
    ):
        with pytest.raises(TypeError) as refused:
            cls(ENVS.get(cls.name, "CartPole-v1"), **arguments)
        assert text in str(refused.value)
    # Answers that do not apply to the algorithm are not given.
    with pytest.raises(TypeError, match=r"'target_policy_noise'; (did you mean 'target_kl'|try one of)"):
        PPO("CartPole-v1", target_policy_noise=0.2)
    with pytest.raises(TypeError, match=r"must be of type float, got 'abc'$"):
        SAC("Pendulum-v1", ent_coef="abc")
    with pytest.raises(TypeError, match="n_envs is an argument of the algorithm's class, not of its Config"):
        rlox.PPOConfig.from_dict({"n_envs": 4})


@pytest.mark.slow
def test_the_command_line_names_its_own_keys():
    for argv, text in (
        (
            ["algo=td3", "algo.target_policy_noise=0.2"],
            "no key of TD3Config; did you mean algo.target_noise? (target_po",
        ),
        (["algo=sac", "algo.ent_coef=auto"], "algo.ent_coef must be a number, got 'auto'; did you mean algo.auto_ent"),
        (["num_envs=4"], "num_envs is no key of RunConfig; did you mean env.n_envs? (num_envs of CleanRL)"),
        (["algo=dqn", "algo.buffer_size=100"], "did you mean buffer.size?"),
        (["tensorboard_log=runs"], "did you mean logger=tensorboard?"),
    ):
        done = rlox_cli("train", *argv, "env=Pendulum-v1")
        assert done.returncode == 2, done.stderr
        assert text in " ".join(done.stderr.split())


@pytest.mark.slow
def test_completion_offers_the_equivalent_key():
    assert completions("algo.clip_range") == ["algo.clip_eps="]
    assert completions("algo.target_policy") == ["algo.target_noise="]
    assert completions("num_env") == ["env.n_envs="]
    assert completions("algo.anneal_lr") == ["algo.learning_rate_schedule=linear"]
    assert completions("env.num_envs") == completions("algo.c") == completions("algo.nothing_at_all") == []
    assert complete(SimpleNamespace(params={}), "resu") == ["resume="]
    words = {"_RLOX_COMPLETE": "complete_bash", "COMP_WORDS": "rlox train algo.clip_range", "COMP_CWORD": "2"}
    program = "import sys; sys.argv = ['rlox']; from rlox_cli.main import app; app(prog_name='rlox')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, **words})
    assert done.stdout.split() == ["algo.clip_eps="]


# TRL's GRPOConfig and DPOConfig, as its documentation lists them.
TRL_GRPO = """num_generations max_completion_length max_prompt_length beta epsilon epsilon_high num_iterations max_steps
    num_train_epochs per_device_train_batch_size gradient_accumulation_steps lr_scheduler_type warmup_ratio warmup_steps
    bf16 steps_per_generation mask_truncated_completions sync_ref_model ref_model_mixup_alpha ref_model_sync_steps
    use_vllm report_to save_steps eval_steps log_completions disable_dropout reward_funcs peft_config"""
TRL_DPO = """precompute_ref_log_probs max_length max_steps disable_dropout sync_ref_model per_device_train_batch_size"""


@pytest.mark.parametrize(("config", "names"), [(GRPOConfig, TRL_GRPO), (DPOConfig, TRL_DPO)])
def test_every_keyword_of_trl_has_an_answer(config, names):
    known = {item.name for item in fields(config)}
    for name in names.split():
        assert (answer := answers(name, known)) is not None, name
        assert answers(name, known, cli=True) is not None
        with pytest.raises(TypeError) as refused:
            config.from_kwargs("It", **{name: 1})
        assert str(refused.value) == f"It: unknown hyper-parameter {name!r}; {answer}"


def test_keywords_of_trl_are_not_guessed():
    known = {item.name for item in fields(GRPOConfig)}
    for theirs, ours in (
        ("beta", "algo.kl_coef"),
        ("num_generations", "algo.group_size"),
        ("epsilon", "algo.clip_eps"),
        ("num_iterations", "algo.n_epochs"),
        ("max_steps", "total_timesteps"),
    ):
        assert answers(theirs, known, cli=True).startswith(f"did you mean {ours}? ({theirs} of TRL")
        assert completions(theirs) == [f"{ours}="]
    assert answers("beta", {item.name for item in fields(DPOConfig)}) is None  # it has the same name there
    assert answers("num_generations", {item.name for item in fields(PPO.Config)}) is None
    assert answers("max_steps", known) == "max_steps of TRL is train(n_updates=…) here"


@pytest.mark.parametrize(
    ("typed", "choices", "guess"),
    [
        ("beta", ["delta", "gamma"], None),
        ("epsilon", ["precision"], None),
        ("num_iterations", ["accumulation"], None),
        ("max_steps", ["max_time"], None),
        ("discount", ["device"], None),
        ("alfa", ["alpha", "beta"], "alpha"),
        ("PPO", ["ppo", "a2c"], "ppo"),
        ("cvs", ["csv", "wandb"], "csv"),
        ("smoke", ["ppo-smoke", "grpo-copy"], "ppo-smoke"),
        ("gae", ["gamma", "gae_lambda"], "gae_lambda"),
        ("total_steps", ["total_timesteps"], "total_timesteps"),
    ],
)
def test_a_guess_is_near_what_was_typed(typed, choices, guess):
    assert nearest(typed, choices) == (f"did you mean {guess!r}?" if guess else f"try one of {', '.join(choices)}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("--algo ppo", "--algo is no flag; settings are typed without dashes: algo=ppo"),
        ("--learning-rate 3e-4", "without dashes: algo.learning_rate=3e-4"),
        ("--env-id=Acrobot-v1", "without dashes: env=Acrobot-v1"),
        ("--anneal-lr", "without dashes: algo.learning_rate_schedule=linear"),
        ("--multirum", "did you mean '--multirun'?"),
        ("env=Hoper-v9", "did you mean 'Hopper-v5'?"),
        ("env=Nope-v0", "env=Nope-v0 is no environment; `rlox ls envs` lists the ids"),
        ("env=MiniGrid-Empty-5x5-v0", "pip install minigrid, then add --import minigrid"),
        ("env=dm_control/cheetah-run-v0", "pip install 'shimmy[dm-control]', then add --import shimmy"),
        ("env=dm_control:cheetah-run", "pip install 'shimmy[dm-control]', then add --import shimmy"),
    ],
)
def test_habits_from_elsewhere_get_a_hint(tmp_path, words, hint):
    done = forked.run("train", *words.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert hint in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("env", ["PongNoFrameskip-v4", "Pong-v4", "Pong-v5", "Pong-ramDeterministic-v0"])
def test_older_ids_of_atari_games_get_a_hint(tmp_path, env):
    pytest.importorskip("ale_py")
    done = forked.run("train", f"env={env}", cwd=tmp_path)
    assert f"env={env} is no environment; did you mean 'ALE/Pong-v5'?" in done.stderr


@pytest.mark.parametrize(
    ("page", "directive", "trainers"),
    [
        ("migration.md", "migration-table", (SB3, CONTRIB, CLEANRL, ORIGINAL)),
        ("guides/from-trl.md", "trl-table", (TRL,)),
    ],
)
def test_the_page_shows_the_table(page, directive, trainers):
    assert f"```{{{directive}}}" in (DOCS / page).read_text()
    rows = table(*trainers).splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == [row.theirs for row in KEYWORDS if {*row.of} & {*trainers}]
    assert all(row.count(" | ") == 4 for row in rows)
