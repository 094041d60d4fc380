"""Run by torchrun: two ranks share out language models, then one process learns the same; prints how far the weights
are apart."""

import sys

import numpy as np
import pytest
import torch
from joint_batches import StopAt, short

import rlox
from rlox.distributed.ranks import apart, current, join
from rlox.llm import toy

PAIRS = [{"prompt": "+" * (i % 4) + f"{i}=", "chosen": str(i) * (1 + i % 3), "rejected": str(9 - i)} for i in range(10)]
TEXTS = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in PAIRS]
# Their gradients are sums that cancel: what is left is rounding, of which Adam makes steps of any size.
CANCELS = ("k_proj.bias", "head.bias")


def trained(cls, dataset, n_updates=10, **arguments):
    model, tokenizer = toy.make_model(hidden=16, layers=2)
    agent = cls(
        model, tokenizer=tokenizer, dataset=dataset, batch_size=4, learning_rate=1e-3, seed=3, threads=1, **arguments
    )
    agent.last = agent.train(n_updates=n_updates)
    return agent


def state(agent):
    return {**agent._weights(), **{f"optimizer/{name}": x for name, x in agent.optimizer.state().items()}}


def difference(ours, theirs):
    assert ours.keys() == theirs.keys()
    return max(float(np.abs(x - theirs[name]).max()) for name, x in ours.items() if not name.endswith(CANCELS))


KINDS = {
    "sft": lambda: trained(rlox.SFT, TEXTS, accumulation=2, weight_decay=0.1, max_grad_norm=0.1),
    # Which pairs the reference was asked about before, each rank knows of its own.
    "dpo": lambda: trained(rlox.DPO, PAIRS, ref_sync_every=3, ref_sync_share=0.5),
    "reward_model": lambda: trained(rlox.RewardModel, PAIRS),
    "grpo": lambda: trained(
        rlox.GRPO, PAIRS, group_size=4, max_new_tokens=3, kl_coef=0.1, loss_type="dapo", scale_rewards="batch",
        reward_fn=short,
    ),
    # Undecided pairs are left out, all of a rank's perhaps.
    "online_dpo": lambda: trained(rlox.OnlineDPO, PAIRS, max_new_tokens=3, reward_fn=short),
    "lora": lambda: trained(rlox.DPO, PAIRS, lora_rank=2, gradient_checkpointing=True),
}  # fmt: skip


def held(agent):
    """Numbers that this rank keeps, of all that there are: parameters, and each of the moments."""
    parameters, moments = list(agent.policy.parameters()), agent.optimizer._moments["exp_avg"]
    return [
        (sum(p.to_local().numel() for p in tensors), sum(p.numel() for p in tensors))
        for tensors in (parameters, moments, agent.optimizer._moments["exp_avg_sq"])
    ]


def main():
    group = join(60.0, "fsdp")
    torch.set_num_threads(1)
    together = {}
    for name, make in KINDS.items():
        agent = make()
        assert agent.counters.updates == 10
        if group.rank == 0:  # the other one has gone on, and takes part
            agent.scored(3)
            agent.generate("1=") if name != "reward_model" else None
            agent.save(f"{name}.safetensors")
        together[name] = state(agent), agent.last
        for own, whole in held(agent):
            assert 0.45 * whole < own < 0.55 * whole, (name, own, whole)
    # Stopped by rank 0 alone, saved by it, and taken up by both.
    arguments = {"ref_sync_every": 3, "ref_sync_share": 0.5}
    stopped = trained(rlox.DPO, PAIRS, callbacks=[StopAt(6), rlox.CheckpointCallback("dpo")], **arguments)
    assert stopped.counters.updates == 6
    again = rlox.DPO.from_checkpoint("dpo/last.safetensors", dataset=PAIRS)
    again.train()
    assert again.counters.updates == 10
    assert all(np.array_equal(x, together["dpo"][0][name]) for name, x in state(again).items())
    # Steps and passes whose number is another one on each rank.
    masked = {"group_size": 4, "max_new_tokens": 5, "mask_truncated": True, "n_minibatches": 2, "accumulation": 3}
    trained(rlox.GRPO, PAIRS, 4, reward_fn=short, **masked)
    half = trained(rlox.SFT, TEXTS, 4, precision="bfloat16", gradient_checkpointing=True)
    assert all(p.dtype == torch.float32 for p in half.policy.parameters())
    with pytest.raises(ValueError, match="distributed must be ddp, got fsdp, which shares out language models alone"):
        rlox.PPO("CartPole-v1", 4)
    with pytest.raises(ValueError, match=r"the model must be whole.*from_checkpoint"):
        half.save_pretrained("saved")
    with apart():
        judge = rlox.RewardModel.from_checkpoint("reward_model.safetensors")
    assert not judge.ranks.joined
    assert judge.score_batch(["1="], ["2"]).shape == (1,)
    rank = group.rank
    group.leave()
    assert not current().joined
    if rank:
        return
    for name, make in KINDS.items():
        ours, last = together[name]
        alone = make()
        print(name, difference(ours, state(alone)))
        for metric in ("loss", "grad_norm"):
            assert last[metric] == pytest.approx(alone.last[metric], rel=1e-4, abs=1e-6), (name, metric)
        # A file of theirs is one of a process that was alone.
        given = {"model": toy.make_model(hidden=16, layers=2)[0]} if name == "lora" else {}
        loaded = type(alone).from_checkpoint(f"{name}.safetensors", dataset=PAIRS if name != "sft" else TEXTS, **given)
        assert all(np.array_equal(x, ours[key]) for key, x in state(loaded).items()), name
        assert loaded.parts.keys() == alone.parts.keys()


if __name__ == "__main__":
    sys.exit(main())
