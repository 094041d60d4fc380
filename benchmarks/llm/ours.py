"""Run one training with rlox: ``python ours.py REQUEST`` takes the request of `peer.py` and prints the same answer."""

import json
import sys

import tasks
import torch
import transformers

import rlox
from rlox.algorithms import DPO, GRPO
from rlox.callbacks import Callback


class Watch(Callback):
    """Collects the accuracy of each report."""

    def __init__(self):
        self.found = []

    def on_step(self, metrics=None, **_):
        self.found.append(metrics["accuracy"])


def train(request):
    name, seed = request["task"], request["seed"]
    task = tasks.TASKS[name]
    steps = request.get("steps") or task.steps
    model = tasks.model(name, seed, request.get("start"))
    clock, watch = tasks.Clock(), Watch()
    base, rows = (GRPO, tasks.prompts(name)) if task.group else (DPO, tasks.pairs())

    class Timed(base):
        def update(self, batch):
            metrics = super().update(batch)
            clock.tick()
            return metrics

    sampled = {"reward_fn": clock.reward, "group_size": task.group, "kl_coef": 0.0, "max_new_tokens": task.new_tokens}
    trainer = Timed(
        model,
        tokenizer=tasks.tokenizer(name),
        dataset=rows,
        learning_rate=task.learning_rate,
        batch_size=task.batch,
        seed=seed,
        device="cpu",
        **(sampled if task.group else {"callbacks": [watch]}),
    )
    clock.at.clear()
    clock.tick()
    trainer.train(steps)
    curve = {} if task.group else {"curve": watch.found}
    versions = {"rlox": rlox.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    return clock.answer(model, name, **curve, versions=versions)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(train(json.loads(sys.argv[1]))))
