"""Bugs of the kind that only a GPU shows, planted one at a time into rlox: each makes a training fail or differ."""

import json
from dataclasses import replace

import pytest
import torch
from custom_policy import CustomPolicy
from device_budgets import LIMITS, spent
from device_comparison import differing, require_close, require_same_with_and_without_graphs, weights
from small_algorithms import make, of_sequences
from small_language_models import make as make_language_model

from rlox.algorithms import dreamer, ppo
from rlox.checkpoint import counters
from rlox.gpu import acting as host_acting
from rlox.gpu import collection, replay, value_norm
from rlox.llm import sampling
from rlox.llm.models import static_cache
from rlox.nn import acting, compiling, optimizers, random
from rlox.nn.transfers import upload
from rlox.training import agent

N_STEPS = {"ppo": 128, "mappo": 128, "dreamer": 40}


def train_on_both(name, compile=False, **settings):
    """Require that a training on the GPU equals that on the CPU."""
    kind = {"precision": "float32"} if of_sequences(name) else {}
    ours = make(name, device="cuda", compile=compile, **kind, **settings)
    theirs = make(name, device="cpu", backend="torch", **kind, **settings)
    require_close(ours.train(N_STEPS[name]), theirs.train(N_STEPS[name]), rel=1e-2, abs=1e-3)


def train_twice(folder, custom=False):
    """Require that a loaded PPO continues with the same bits."""
    policy = (lambda: {"policy": CustomPolicy()}) if custom else dict
    straight = make("ppo", device="cuda", **policy())
    straight.train(128)
    straight.save(folder / "a.safetensors")
    straight.train(128)  # first, since a custom policy draws from the process's generator, which loading restores
    torch.cuda.manual_seed(5)
    loaded = type(straight).from_checkpoint(folder / "a.safetensors", device="cuda", **policy())
    loaded.train(128)
    assert differing(weights(loaded), weights(straight)) == []


def stay_within_budget(name):
    limits = json.loads(LIMITS.read_text())[name]
    for part, work in spent(name).items():
        for kind, number in work.items():
            assert number <= limits[part][kind], f"{part} {kind}"


def wrapped(monkeypatch, owner, name, wrap):
    monkeypatch.setattr(owner, name, wrap(getattr(owner, name)))


def forget_cpu(monkeypatch):
    monkeypatch.setattr(host_acting, "MOST_WORK", 0)  # the GPU acts
    monkeypatch.setattr(acting, "to_array", lambda tensor: tensor.detach().numpy())


def leave_a_buffer_behind(monkeypatch):
    monkeypatch.setattr(dreamer.Returns, "to", lambda self, device: self)


def report_a_tensor_of_the_host(monkeypatch):
    wrapped(
        monkeypatch, ppo.PPO, "update",
        lambda update: lambda self, batch: {**update(self, batch), "clip_eps": torch.tensor(0.2)},
    )  # fmt: skip


def keep_graph_outputs(monkeypatch):
    def without_clones(create):
        def init(self, *arguments):
            create(self, *arguments)
            self._graphs = False

        return init

    wrapped(monkeypatch, compiling.CompiledLoss, "__init__", without_clones)


def count_steps_on_the_host(monkeypatch):
    def after(create):
        def init(self, *args, **kwargs):
            create(self, *args, **kwargs)
            self._steps = self._steps.cpu()

        return init

    wrapped(monkeypatch, optimizers.FlatOptimizer, "__init__", after)


def restore_into_a_copy(monkeypatch):
    monkeypatch.setattr(optimizers.FlatOptimizer, "_state", lambda self: {
        name: value.cpu() for name, value in {**self._moments, "step": self._steps}.items()
    })  # fmt: skip


def save_the_generator_of_the_host_only(monkeypatch):
    wrapped(monkeypatch, agent, "generator_states", lambda states: lambda device: states("cpu"))


def read_a_metric_in_every_minibatch(monkeypatch):
    def reading(step):
        def read(self, loss, max_grad_norm):
            norm = step(self, loss, max_grad_norm)
            assert float(norm) >= 0
            return norm

        return read

    wrapped(monkeypatch, optimizers.FlatOptimizer, "step", reading)


def bake_the_schedule(monkeypatch):
    """A number of the host, which is a constant of the graph, instead of the tensor that is filled before a replay."""
    progress = counters.Counters.progress.fget

    def of_the_host(self):
        kept, self.captured_progress = self.captured_progress, None
        try:
            return progress(self)
        finally:
            self.captured_progress = kept

    monkeypatch.setattr(counters.Counters, "progress", property(of_the_host))


def repeat_the_noise(monkeypatch):
    """The position of the generator is counted on the host."""
    n_drawn = {}

    def counted(draw):
        def words(self, n, *arguments, **options):
            self.position.fill_(n_drawn.get(id(self), 0))
            n_drawn[id(self)] = n_drawn.get(id(self), 0) + n
            return draw(self, n, *arguments, **options)

        return words

    wrapped(monkeypatch, random.DeviceRng, "words", counted)


def read_the_first_batch_again(monkeypatch):
    """The graph reads the columns of the batch of its capture, into which later ones are not copied."""

    def find(place):
        first = []

        def again(self, batch):
            first.append(place(self, batch))
            return replace(first[0], episode_returns=batch.episode_returns, episode_lengths=batch.episode_lengths)

        return again

    wrapped(monkeypatch, collection.Uploads, "place", find)


def read_each_token(monkeypatch):
    def reading(pick):
        def read(logits, noise, settings):
            tokens, log_probs = pick(logits, noise, settings)
            assert int(tokens[0]) >= 0
            return tokens, log_probs

        return read

    wrapped(monkeypatch, sampling, "pick", reading)


def look_for_ends_after_each_token(monkeypatch):
    monkeypatch.setattr(sampling, "_LOOK_EVERY", 1)


def count_columns_on_the_host(monkeypatch):
    """The column of the next token in the cache is a constant of the graph."""

    def counted(step):
        def next(self, tokens):
            if tokens is not None:
                width = self._prompts.ids.shape[1]
                self._counted = getattr(self, "_counted", width - 1) + 1
                self._column.fill_(self._counted)
            return step(self, tokens)

        return next

    wrapped(monkeypatch, static_cache.StaticRows, "next", counted)


def sample_on_both():
    """Require that completions on the GPU are those of the CPU."""
    models = [make_language_model("sft", device=device).model for device in ("cuda", "cpu")]
    ours, theirs = (sampling.sample(model, [[2, 3], [4]], sampling.Settings(20), n=3) for model in models)
    assert [ids.tolist() for ids in ours.ids] == [ids.tolist() for ids in theirs.ids]


BUGS = {
    forget_cpu: lambda folder: train_on_both("ppo", env_backend="gymnasium"),
    leave_a_buffer_behind: lambda folder: train_on_both("dreamer"),
    report_a_tensor_of_the_host: lambda folder: train_on_both("ppo"),
    # With environments on the host, which decides the order of minibatches too.
    keep_graph_outputs: lambda folder: train_on_both(
        "mappo", compile=True, batch_size=16, target_kl=100.0, env_backend="gymnasium"
    ),
    count_steps_on_the_host: lambda folder: train_on_both("ppo"),
    restore_into_a_copy: train_twice,
    save_the_generator_of_the_host_only: lambda folder: train_twice(folder, custom=True),
    read_a_metric_in_every_minibatch: lambda folder: stay_within_budget("ppo"),
    read_each_token: lambda folder: stay_within_budget("sampling"),
    look_for_ends_after_each_token: lambda folder: stay_within_budget("sampling"),
    count_columns_on_the_host: lambda folder: sample_on_both(),
}


def reuse_memory_that_is_still_being_copied(monkeypatch):
    """One block of pinned memory for all updates, without an event."""
    blocks = {}

    def shared(stage):
        def take(n_bytes, device):
            return blocks.setdefault(n_bytes, stage(n_bytes, device))

        return take

    wrapped(monkeypatch, replay, "stage", shared)


def read_the_noise_of_the_first_update_again(monkeypatch):
    """The index of the update's numbers is a number of the host."""

    def baked(noise):
        def first(self):
            return self._numbers.normals[self._numbers._used - 1]

        return first

    wrapped(monkeypatch, replay.CapturedReplay, "noise", baked)


def read_the_uniform_numbers_of_the_first_update_again(monkeypatch):
    def baked(uniform):
        return lambda self: self._numbers.uniforms[self._numbers._used - 1]

    wrapped(monkeypatch, replay.CapturedReplay, "uniform", baked)


def normalize_returns_by_numbers_of_the_host(monkeypatch):
    """The moments of the last collection, which are constants of the graph."""

    def baked(follow):
        return lambda self, returns: (follow(self, returns), (returns - self.mean) / self.deviation)[1]

    wrapped(monkeypatch, value_norm.DeviceValueNorm, "follow", baked)


def draw_on_the_host_within_the_graph(monkeypatch):
    monkeypatch.setattr(
        dreamer.DreamerV3, "draw_numbers", lambda self: list(upload(self._host_numbers(), self.device).values())
    )


IN_GRAPHS = {
    bake_the_schedule: "ppo",
    repeat_the_noise: "ppo",
    read_the_first_batch_again: "ppo",
    reuse_memory_that_is_still_being_copied: "dqn",
    read_the_noise_of_the_first_update_again: "sac",
    read_the_uniform_numbers_of_the_first_update_again: "cql",
    normalize_returns_by_numbers_of_the_host: "mappo",
    draw_on_the_host_within_the_graph: "dreamer",
}


@pytest.mark.parametrize("bug", IN_GRAPHS, ids=lambda bug: bug.__name__)
def test_a_bug_that_only_replays_show_is_noticed(bug, pretended, monkeypatch):
    bug(monkeypatch)
    # With environments on the host, so that each rollout has new memory, and moments that the host reads.
    on_host = (read_the_first_batch_again, normalize_returns_by_numbers_of_the_host)
    host = {"env_backend": "gymnasium"} if bug in on_host else {}
    with pytest.raises((AssertionError, RuntimeError)):
        require_same_with_and_without_graphs(IN_GRAPHS[bug], monkeypatch, **host)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_noticed(bug, pretended, monkeypatch, tmp_path):
    bug(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, TypeError, FloatingPointError)):
        BUGS[bug](tmp_path)


@pytest.mark.parametrize("custom", [False, True])
def test_a_training_without_a_bug_continues_with_the_same_bits(custom, pretended, tmp_path):
    train_twice(tmp_path, custom)
