"""Train language models sharded over two ranks, then in one process, and print the difference of the weights."""

import numpy as np
import pytest
import torch
from joint_batches import StopAt, short

import rlox
from rlox.distributed.ranks import current, in_one_process, join
from rlox.llm import toy

PAIRS = [{"prompt": "+" * (i % 4) + f"{i}=", "chosen": str(i) * (1 + i % 3), "rejected": str(9 - i)} for i in range(10)]
TEXTS = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in PAIRS]
# The gradients of these cancel up to rounding, and Adam makes arbitrary steps of rounding errors.
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
    # Each rank caches the reference's log-probabilities of its own pairs.
    "dpo": lambda: trained(rlox.DPO, PAIRS, ref_sync_every=3, ref_sync_share=0.5),
    "reward_model": lambda: trained(rlox.RewardModel, PAIRS),
    "grpo": lambda: trained(
        rlox.GRPO, PAIRS, group_size=4, max_new_tokens=3, kl_coef=0.1, loss_type="dapo", scale_rewards="batch",
        reward_fn=short,
    ),
    # Undecided pairs are left out, possibly all pairs of a rank.
    "online_dpo": lambda: trained(rlox.OnlineDPO, PAIRS, max_new_tokens=3, reward_fn=short),
    "lora": lambda: trained(rlox.DPO, PAIRS, lora_rank=2, gradient_checkpointing=True),
}  # fmt: skip


def held(agent):
    """The number of values on this rank and in total, for the parameters and each of the moments."""
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
        if group.rank == 0:  # the other rank continues and takes part
            agent.scored(3)
            agent.generate("1=") if name != "reward_model" else None
            agent.save(f"{name}.safetensors")
        together[name] = state(agent), agent.last
        for own, whole in held(agent):
            assert 0.45 * whole < own < 0.55 * whole, (name, own, whole)
    # Rank 0 stops and saves the training; both ranks resume it.
    arguments = {"ref_sync_every": 3, "ref_sync_share": 0.5}
    stopped = trained(rlox.DPO, PAIRS, callbacks=[StopAt(6), rlox.CheckpointCallback("dpo")], **arguments)
    assert stopped.counters.updates == 6
    again = rlox.DPO.from_checkpoint("dpo/last.safetensors", dataset=PAIRS)
    again.train()
    assert again.counters.updates == 10
    assert all(np.array_equal(x, together["dpo"][0][name]) for name, x in state(again).items())
    # The number of steps and passes differs between ranks.
    masked = {"group_size": 4, "max_new_tokens": 5, "mask_truncated": True, "n_minibatches": 2, "accumulation": 3}
    trained(rlox.GRPO, PAIRS, 4, reward_fn=short, **masked)
    half = trained(rlox.SFT, TEXTS, 4, precision="bfloat16", gradient_checkpointing=True, packing=True)
    assert all(p.dtype == torch.float32 for p in half.policy.parameters())
    # init_from makes a copy of the weights, or of the adapters alone, the reference.
    for name, lora in (("dpo", {}), ("lora", {"lora_rank": 2})):
        model, tokenizer = toy.make_model(hidden=16, layers=2)
        start = rlox.DPO(model, tokenizer=tokenizer, dataset=PAIRS, batch_size=4, learning_rate=1e-2, **lora)
        start.init_from(f"{name}.safetensors")
        start.save(f"start-{name}.safetensors")
        assert start.train(n_updates=1)["loss"] == pytest.approx(np.log(2), abs=1e-5)
        assert abs(start.train(n_updates=1)["margin"]) > 1e-6
    with pytest.raises(ValueError, match="distributed must be ddp, got fsdp, which shards only language models"):
        rlox.PPO("CartPole-v1", 4)
    with pytest.raises(ValueError, match=r"the model must not be sharded.*from_checkpoint"):
        half.save_pretrained("saved")
    with in_one_process():
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
        print("fsdp", name, difference(ours, state(alone)))
        for metric in ("loss", "grad_norm"):
            assert last[metric] == pytest.approx(alone.last[metric], rel=1e-4, abs=1e-6), (name, metric)
        # A file saved by the ranks can be loaded in a single process.
        given = {"model": toy.make_model(hidden=16, layers=2)[0]} if name == "lora" else {}
        loaded = type(alone).from_checkpoint(f"{name}.safetensors", dataset=PAIRS if name != "sft" else TEXTS, **given)
        assert all(np.array_equal(x, ours[key]) for key, x in state(loaded).items()), name
        assert loaded._parts.keys() == alone._parts.keys()
