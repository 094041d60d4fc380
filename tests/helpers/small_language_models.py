"""Small algorithms for language models, whose updates take a fraction of a second."""

import toy

import rlox

CLASSES = {
    "sft": rlox.SFT, "dpo": rlox.DPO, "grpo": rlox.GRPO, "online_dpo": rlox.OnlineDPO, "reward_model": rlox.RewardModel,
}  # fmt: skip
DATASETS = {"sft": toy.ROWS, "dpo": toy.PAIRS, "reward_model": toy.PAIRS}


def reward(completions, prompts):
    return [len(one) / 10 + 0.1 * float(one[0] if len(one) else 0) for one in completions]


def prefer(prompts, completions):
    return [int(len(first) < len(second)) for first, second in completions]


def arguments(name):
    """What each training of this algorithm is given: its data, and its reward or preference."""
    given = {"dataset": DATASETS.get(name, toy.PROMPTS)}
    return given | {"grpo": {"reward_fn": reward}, "online_dpo": {"preference_fn": prefer}}.get(name, {})


def make(name, kind="qwen2", **settings):
    """A small algorithm on the GPU, or on another `device`, for a model of this `kind` (see `toy.model`)."""
    sampling = {"max_new_tokens": 4} if name in ("grpo", "online_dpo") else {}
    groups = {"group_size": 3} if name == "grpo" else {}
    common = {"tokenizer": toy.tokenizer(), "seed": 1, "device": "cuda", "batch_size": 4}
    return CLASSES[name](toy.model(kind), **{**common, **sampling, **groups, **arguments(name), **settings})
