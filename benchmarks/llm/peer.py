"""Run and time one training with TRL, under an interpreter that has it.

``python peer.py REQUEST`` takes a JSON object ``{"task", "seed"}``, optionally with ``"steps"`` instead of the task's,
a ``"start"`` (see `tasks.model`), and for DPO ``"precompute"``: whether the reference reads all pairs beforehand. The
last line of its output is a JSON object: the ``steps``, ``cpu_s`` and ``wall_s`` of all updates (imports and
construction excluded), ``cpu_ms`` and ``wall_ms`` of each update but the first, the ``curve`` (mean reward of each
update, or the pairs' accuracy), the share of right answers afterwards, ``sampled`` and ``greedy``, and the
``versions``.
"""

import copy
import json
import sys
import tempfile

import tasks
import torch
import transformers
import trl
from datasets import Dataset
from transformers import TrainerCallback


class Watch(TrainerCallback):
    def __init__(self, clock):
        self.clock, self.accuracy = clock, []

    def on_train_begin(self, args, state, control, **_):
        self.clock.at.clear()
        self.clock.tick()

    def on_step_end(self, args, state, control, **_):
        self.clock.tick()

    def on_log(self, args, state, control, logs=None, **_):
        if "rewards/accuracies" in logs:
            self.accuracy.append(float(logs["rewards/accuracies"]))


def train(request, folder):
    name, seed = request["task"], request["seed"]
    task = tasks.TASKS[name]
    steps = request.get("steps") or task.steps
    model = tasks.model(name, seed, request.get("start"))
    clock = tasks.Clock()
    watch = Watch(clock)
    # gradient_checkpointing and bf16 are on unless they are switched off.
    common = {
        "output_dir": folder, "max_steps": steps, "learning_rate": task.learning_rate, "weight_decay": 0.0,
        "lr_scheduler_type": "constant", "max_grad_norm": 1.0, "gradient_checkpointing": False, "bf16": False,
        "use_cpu": True, "seed": seed, "report_to": [], "save_strategy": "no", "disable_tqdm": True,
        "logging_steps": max(1, steps // 20),
    }  # fmt: skip
    if task.group:
        config = trl.GRPOConfig(
            **common, per_device_train_batch_size=task.batch * task.group, num_generations=task.group,
            max_completion_length=task.new_tokens, temperature=1.0, top_k=0, loss_type="dapo", beta=0.0, epsilon=0.2,
            num_iterations=1, scale_rewards="group",
        )  # fmt: skip
        trainer = trl.GRPOTrainer(
            model, clock.reward, config, Dataset.from_list(tasks.prompts(name)),
            processing_class=tasks.tokenizer(name), callbacks=[watch],
        )  # fmt: skip
    else:
        config = trl.DPOConfig(
            **common, per_device_train_batch_size=task.batch, beta=0.1,
            precompute_ref_log_probs=request.get("precompute", False),
        )  # fmt: skip
        trainer = trl.DPOTrainer(
            model, copy.deepcopy(model), args=config, train_dataset=Dataset.from_list(tasks.pairs()),
            processing_class=tasks.tokenizer(name), callbacks=[watch],
        )  # fmt: skip
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    trainer.train()
    curve = {} if task.group else {"curve": watch.accuracy}
    model.eval()
    versions = {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    return clock.answer(model, name, **curve, versions=versions)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(train(json.loads(sys.argv[1]), folder)))
