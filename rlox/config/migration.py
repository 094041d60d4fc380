"""Table of keywords of other trainers and their names in rlox.

The error for an unknown keyword, command-line completion, ``docs/migration.md`` and ``docs/guides/from-trl.md`` all use
`KEYWORDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

SB3, CONTRIB, CLEANRL, ORIGINAL, TRL = "Stable-Baselines3", "sb3-contrib", "CleanRL", "the Rust rlox", "TRL"


class Keyword(NamedTuple):
    """One keyword of another trainer."""

    theirs: str  # the keyword; or keyword=value, if rlox has the keyword but other values for it
    of: tuple[str, ...]  # trainers that have it
    ours: str | None  # field or argument of the library, with its value if that is fixed; None: no equivalent
    remark: str = ""  # differences in meaning
    typed: str | None = None  # key on the command line, if it is not algo.<ours>; empty: there is none
    needs: str | None = None  # field of the algorithms that this applies to, if it is not <ours>

    @property
    def key(self) -> str | None:
        """Field that an algorithm must have for this row to apply."""
        return self.needs or (None if self.typed or self.ours is None else self.ours.partition("=")[0])

    @property
    def command(self) -> str | None:
        """Key on the command line; None if there is none."""
        if self.typed is not None:
            return self.typed or None
        return None if self.ours is None else f"algo.{self.ours}"


_NO_SDE = "there is no state-dependent exploration, only exploration_noise and noise_correlation"
_OWN_MEMORY = "actor and critic always have a memory of their own"
_SIZES = "widths of all hidden layers; critic_hidden_sizes for other ones of SAC's and TD3's critics"
_ARGUMENT = "an argument of the algorithm's class, not of its Config"
_OFF_POLICY = "an argument of DQN, SAC and TD3, not of their Config"
_BATCH = "the whole batch of an update, in prompts, pairs or texts; GRPO samples batch_size * group_size completions"
_WHOLE = "rows are never truncated; one that is too long is an error with its number"
_LLM = "accumulation"  # a field that all algorithms for language models have
_PROGRESS = "write train(total_timesteps, progress=True); the command line always shows progress"
_ADAM = "adam_beta1, adam_beta2 and weight_decay in SAC and TD3, adam_eps in DQN; the others are fixed"


def _of_trl(theirs: str, ours: str | None, remark: str = "", typed: str | None = None) -> Keyword:
    """Return a row about language models."""
    return Keyword(theirs, (TRL,), ours, remark, typed, needs=_LLM if typed is not None or ours is None else None)


def _memory(theirs: str, of: tuple[str, ...], remark: str, typed: str) -> Keyword:
    """Return a row about the replay memory of off-policy algorithms."""
    return Keyword(theirs, of, "buffer", remark, typed, needs="learning_starts")


KEYWORDS = (
    # Optimiser and learning rate.
    Keyword("learning_rate=schedule", (SB3,), "learning_rate_schedule=linear", "learning_rate is the initial value"),
    Keyword("anneal_lr", (CLEANRL, ORIGINAL), "learning_rate_schedule=linear"),
    Keyword("lr", (ORIGINAL,), "learning_rate"),
    Keyword("policy_lr", (CLEANRL,), "actor_learning_rate", "or learning_rate, for policy and critics"),
    Keyword("q_lr", (CLEANRL,), "critic_learning_rate", "the temperature, which theirs is for too, has learning_rate"),
    Keyword("use_rms_prop", (SB3,), "optimizer=rmsprop", "A2C's default; optimizer=adam for False"),
    Keyword("rms_prop_eps", (SB3,), None, "always 1e-5 in PPO and A2C"),
    Keyword("optimizer_class", (SB3,), "optimizer", "adam or rmsprop, in PPO and A2C"),
    Keyword("optimizer_kwargs", (SB3,), None, _ADAM),
    # PPO and A2C.
    Keyword("num_steps", (CLEANRL,), "n_steps"),
    Keyword("update_epochs", (CLEANRL,), "n_epochs"),
    Keyword("num_minibatches", (CLEANRL,), "batch_size", "n_envs * n_steps / num_minibatches"),
    Keyword("minibatch_size", (CLEANRL,), "batch_size"),
    Keyword("clip_range", (SB3, ORIGINAL), "clip_eps", "its schedule is clip_eps_schedule=linear"),
    Keyword("clip_coef", (CLEANRL,), "clip_eps"),
    Keyword("clip_range_vf", (SB3,), "clip_vf", "the same loss: the change of the value is clipped, without a maximum"),
    Keyword(
        "clip_vloss",
        (CLEANRL, ORIGINAL),
        "clip_vf",
        "a distance, not a bool: theirs is clip_coef, with the maximum of both losses; null: off",
    ),
    Keyword("normalize_advantage", (SB3,), "normalize_advantages"),
    Keyword("norm_adv", (CLEANRL,), "normalize_advantages"),
    Keyword("rollout_buffer_class", (SB3,), None, "rollouts are kept by rlox.RolloutCollector"),
    Keyword("rollout_buffer_kwargs", (SB3,), None, "rollouts are kept by rlox.RolloutCollector"),
    # Networks.
    Keyword("policy_kwargs", (SB3,), "hidden_sizes", "and activation, log_std_init, ortho_init, optimizer"),
    Keyword("net_arch", (SB3,), "hidden_sizes", _SIZES),
    Keyword("hidden", (ORIGINAL,), "hidden_sizes", "[hidden, hidden]; the offline algorithms' classes take hidden too"),
    Keyword("hidden_dim", (ORIGINAL,), "hidden_sizes", "[hidden_dim, hidden_dim]"),
    Keyword("activation_fn", (SB3,), "activation", "tanh or relu, a string"),
    Keyword("features_extractor_class", (SB3,), None, "pass a custom module as policy="),
    Keyword("use_sde", (SB3,), None, _NO_SDE),
    Keyword("sde_sample_freq", (SB3,), None, _NO_SDE),
    Keyword("use_sde_at_warmup", (SB3,), None, _NO_SDE),
    # Memory and masks.
    Keyword("lstm_hidden_size", (CONTRIB,), "memory_size", "with memory=lstm, which MlpLstmPolicy stands for"),
    Keyword("n_lstm_layers", (CONTRIB,), "memory_layers", "with memory=lstm"),
    Keyword("shared_lstm", (CONTRIB,), None, _OWN_MEMORY, needs="memory"),
    Keyword("enable_critic_lstm", (CONTRIB,), None, _OWN_MEMORY, needs="memory"),
    Keyword("lstm_kwargs", (CONTRIB,), None, "a memory has a kind, a size and layers", needs="memory"),
    Keyword("episode_start", (CONTRIB,), None, "write agent.session(), which keeps the state until reset()"),
    Keyword("action_masks", (CONTRIB,), None, "write predict(obs, mask=…)"),
    Keyword("use_masking", (CONTRIB,), None, "masks are used wherever the environment has them"),
    # SAC, TD3 and DQN.
    Keyword("ent_coef=auto", (SB3,), "auto_entropy=true", "the default; auto_0.1: also set ent_coef=0.1"),
    Keyword("target_entropy=auto", (SB3,), "target_entropy=null", "the default: minus the number of components"),
    Keyword("autotune", (CLEANRL,), "auto_entropy"),
    Keyword("alpha", (CLEANRL,), "auto_entropy=false", "with ent_coef, the temperature"),
    Keyword("target_policy_noise", (SB3,), "target_noise"),
    Keyword("policy_noise", (CLEANRL,), "target_noise"),
    Keyword("target_noise_clip", (SB3,), "noise_clip"),
    Keyword("policy_frequency", (CLEANRL,), "policy_delay", "counts updates, not steps"),
    Keyword("action_noise", (SB3,), "exploration_noise", "a number: the standard deviation, for actions in [-1, 1]"),
    Keyword("target_update_interval", (SB3,), "target_update_freq", "environment steps; SAC: every update, by tau"),
    Keyword("target_network_frequency", (CLEANRL,), "target_update_freq", "environment steps; SAC: every update"),
    Keyword("train_frequency", (CLEANRL,), "train_freq"),
    Keyword("train_freq=(n, unit)", (SB3,), "train_freq", "a number of environment steps, never of episodes"),
    Keyword("n_quantiles", (CONTRIB,), "n_atoms", "with distribution=quantile, which QRDQN stands for"),
    Keyword("start_e", (CLEANRL,), "exploration_initial_eps"),
    Keyword("end_e", (CLEANRL,), "exploration_final_eps"),
    # Replay memory.
    Keyword("buffer_size", (SB3, CLEANRL, ORIGINAL), "buffer_size", _OFF_POLICY, typed="buffer.size"),
    Keyword("n_step", (ORIGINAL,), "n_step", _OFF_POLICY, typed="buffer.n_step"),
    Keyword("prioritized", (ORIGINAL,), "prioritized", _OFF_POLICY, typed="buffer=prioritized"),
    _memory("replay_buffer_class", (SB3,), "a name (rlox ls buffers) or an object", "buffer"),
    _memory("replay_buffer_kwargs", (SB3,), "a mapping with the name", "buffer"),
    _memory("alpha", (ORIGINAL,), 'DQN: {"name": "prioritized", "alpha": 0.6}', "buffer.alpha"),
    _memory("buffer_alpha", (ORIGINAL,), '{"name": "prioritized", "alpha": 0.6}', "buffer.alpha"),
    _memory("buffer_beta", (ORIGINAL,), '{"name": "prioritized", "beta": 0.4}', "buffer.beta"),
    _memory("beta_start", (ORIGINAL,), '{"name": "prioritized", "beta": 0.4}', "buffer.beta"),
    Keyword("optimize_memory_usage", (SB3,), None, "stacked frames are always stored once"),
    # Environment and run.
    Keyword("env_id", (CLEANRL, ORIGINAL), "env_id", _ARGUMENT, typed="env"),
    Keyword("num_envs", (CLEANRL,), "n_envs", typed="env.n_envs"),
    Keyword("n_envs", (SB3, ORIGINAL), "n_envs", _ARGUMENT, typed="env.n_envs"),
    Keyword("total_timesteps", (SB3, CLEANRL, ORIGINAL), None, "train(total_timesteps)", typed="total_timesteps"),
    Keyword("tensorboard_log", (SB3,), 'logger="tensorboard"', _ARGUMENT, typed="logger=tensorboard"),
    Keyword("verbose", (SB3,), None, _PROGRESS),
    Keyword("progress_bar", (SB3,), None, _PROGRESS),
    Keyword("callback", (SB3,), None, "write callbacks=[…] in the constructor"),
    Keyword("log_interval", (SB3,), None, "every update is logged"),
    Keyword("tb_log_name", (SB3,), None, 'write logger="FOLDER" in the constructor'),
    Keyword("reset_num_timesteps", (SB3,), None, "train() continues a training, and train(n) starts the next one"),
    Keyword("stats_window_size", (SB3,), None, "mean_reward covers the last 100 episodes"),
    Keyword("create_eval_env", (SB3,), None, "callbacks=[EvalCallback()]; the command line evaluates by default"),
    Keyword("monitor_wrapper", (SB3,), None, "episodes are counted without a wrapper"),
    Keyword(
        "torch_deterministic",
        (CLEANRL,),
        None,
        "the same seed gives the same run, bit for bit, on a CPU; on a GPU with deterministic=true of the command line",
    ),
    Keyword("cuda", (CLEANRL,), "device", "cpu, cuda or auto", typed="device"),
    Keyword("track", (CLEANRL,), 'logger="wandb"', _ARGUMENT, typed="logger=wandb"),
    Keyword("wandb_project_name", (CLEANRL,), None, typed="logger.wandb.project"),
    Keyword("wandb_entity", (CLEANRL,), None, typed="logger.wandb.entity"),
    Keyword("exp_name", (CLEANRL,), None, typed="logger.mlflow.run_name"),
    Keyword("capture_video", (CLEANRL,), None, "callbacks=[VideoCallback(folder)], or rlox eval RUN --video FILE"),
    Keyword("save_model", (CLEANRL,), None, "checkpoints are written automatically; save(path) in the library"),
    # Language models.
    _of_trl("lr_scheduler_type", "learning_rate_schedule", "constant or linear"),
    _of_trl("warmup_ratio", "warmup"),
    _of_trl("warmup_steps", "warmup", "a share of the training, not a number of updates"),
    _of_trl("per_device_train_batch_size", "batch_size", _BATCH),
    _of_trl("gradient_accumulation_steps", "accumulation", "parts of one batch, which does not get larger"),
    _of_trl("bf16", "precision=bfloat16", "auto takes it on a GPU that has it; weights that are trained stay float32"),
    _of_trl("peft_config", "lora_rank", "with lora_alpha and lora_targets; or pass a peft model as the model"),
    _of_trl("target_modules", "lora_targets"),
    _of_trl("num_generations", "group_size", "completions per prompt"),
    _of_trl("max_completion_length", "max_new_tokens"),
    _of_trl("max_prompt_length", None, _WHOLE),
    _of_trl("max_length", None, _WHOLE),
    _of_trl("beta", "kl_coef", "weight of the KL, 0.04 by default; DPO has beta"),
    _of_trl("epsilon", "clip_eps"),
    _of_trl("epsilon_high", "clip_eps_high"),
    _of_trl("num_iterations", "n_epochs", "passes over the completions of an update"),
    _of_trl("steps_per_generation", "n_minibatches", "optimiser steps per pass"),
    _of_trl("mask_truncated_completions", "mask_truncated"),
    _of_trl("sync_ref_model", "ref_sync_every", "null: never"),
    _of_trl("ref_model_sync_steps", "ref_sync_every", "null: never"),
    _of_trl("ref_model_mixup_alpha", "ref_sync_share"),
    _of_trl("precompute_ref_log_probs", None, "always on: the reference scores each pair once, when it is first used"),
    _of_trl("center_rewards_coefficient", "center"),
    _of_trl("disable_dropout", None, "dropout is always off"),
    _of_trl("reward_funcs", "reward_fn", "a function, or a list of functions", typed="reward"),
    _of_trl("judge", "preference_fn", "a function of the library", typed=""),
    _of_trl("processing_class", "tokenizer", "the model's own by default", typed="tokenizer"),
    _of_trl("train_dataset", "dataset", "rows, or a file with rows", typed="dataset"),
    _of_trl("max_steps", None, "train(n_updates=…)", typed="total_timesteps"),
    _of_trl("num_train_epochs", None, "train(rows, n_epochs=…); or count updates", typed="total_timesteps"),
    _of_trl("eval_dataset", "eval_dataset", _ARGUMENT, typed="eval.dataset"),
    _of_trl("eval_steps", None, "EvalCallback(n_points), the number of evaluations", typed="eval.n_points"),
    _of_trl("save_steps", None, "CheckpointCallback(every_steps=…)", typed="checkpoint.every_steps"),
    _of_trl("resume_from_checkpoint", None, "from_checkpoint(path)", typed="resume"),
    _of_trl("report_to", None, "logger=mlflow, wandb, tensorboard or csv on the command line", typed="logger"),
    _of_trl("log_completions", None, "completions are always kept, in completions.json"),
    _of_trl("use_vllm", None, "sampler=create_backend(…)", typed="sampler=vllm"),
    _of_trl("vllm_server_base_url", None, "sampler=create_backend(…)", typed="sampler_url"),
)


def answers(name: str, known: Collection[str], cli: bool = False, value: Any = None) -> str | None:
    """Return the equivalent of another trainer's keyword `name`, as the end of an error; None if no trainer has it.

    Parameters
    ----------
    name : str
        The keyword, as it was given.
    known : collection of str
        The names that are accepted where the keyword was given. Other names are left out of the answer, unless they
        belong to the run and not to the algorithm.
    cli : bool
        Whether it was typed on the command line.
    value : object, optional
        The value that was given, if rlox has the keyword too but not this value.
    """
    found = []
    for row in KEYWORDS:
        key, _, kind = row.theirs.partition("=")
        if key != name or (kind != "" and not _VALUES[kind](value)) or (kind == "" and name in known):
            continue
        if row.key is not None and row.key not in known:
            continue
        ours, remark = row.command if cli else row.ours, f": {row.remark}" if row.remark else ""
        whose = f"{row.theirs} of {' and '.join(row.of)}"
        if ours == name:
            found.append(f"{name} is {row.remark}")
            continue
        if ours:
            found.append(f"did you mean {ours}? ({whose}{remark})")
        elif row.remark.startswith("write "):
            found.append(f"instead of {whose}, {row.remark}")
        else:
            elsewhere = row.typed and remark  # not a keyword here, but there is something
            found.append(f"{whose} is {row.remark} here" if elsewhere else f"{whose} has no equivalent here{remark}")
    return "; ".join(found) or None


# Tests for values of another trainer, by the part after = in `KEYWORDS`.
_VALUES: dict[str, Callable[[Any], bool]] = {
    "auto": lambda value: isinstance(value, str) and value.startswith("auto"),
    "schedule": lambda value: callable(value) or (isinstance(value, str) and value.startswith("lin")),
    "(n, unit)": lambda value: isinstance(value, (list, tuple)),
}


def completions(typed: str, whole: bool = False) -> list[str]:
    """Return rlox's keys for a keyword of another trainer, or the start of one, such as ``algo.clip_range``.

    With `whole`, the start of a keyword does not count.
    """
    prefix, _, name = typed.rpartition(".")
    if prefix not in ("", "algo") or (len(name) < 3 and not whole):
        return []
    rows = [row for row in KEYWORDS if row.theirs == name] or [
        row for row in KEYWORDS if row.theirs.startswith(name) and not whole
    ]
    keys = {row.command for row in rows if row.command is not None}
    return sorted(key if "=" in key else f"{key}=" for key in keys)


def table(*trainers: str) -> str:
    """Return the rows of `KEYWORDS` about any of `trainers` as the Markdown table of a page."""
    rows = ["| theirs | of | in the library | on the command line | remark |", "|---|---|---|---|---|"]
    for row in KEYWORDS:
        if not {*row.of} & {*trainers}:
            continue
        cells = [f"`{row.theirs}`", ", ".join(row.of), *(f"`{x}`" if x else "" for x in (row.ours, row.command))]
        rows.append(f"| {' | '.join(cells)} | {row.remark} |")
    return "\n".join(rows)
