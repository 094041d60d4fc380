"""Kernels run only if the Python code that they replace is the code they were compared with."""

import functools
import inspect
import os
import shutil
import subprocess
import sys
from collections import ChainMap
from functools import partial
from importlib import import_module
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

import rlox
from rlox.algorithms import A2C, BC, CQL, DQN, IQL, PPO, SAC, TD3, TD3BC
from rlox.callbacks import Callback
from rlox.collectors import RolloutCollector
from rlox.collectors.candle import CandleCollector
from rlox.compiled import NativePolicy, guard
from rlox.compiled.record import COMPARED
from rlox.nn import losses, modules, value_losses
from rlox.nn.critics import losses as critics_losses
from rlox.nn.policies import DiscretePolicy

ROOT = Path(__file__).parents[1]
SMALL = {"n_envs": 2, "n_steps": 16, "hidden_sizes": [8]}
Q_SMALL = {"hidden_sizes": [8], "buffer_size": 200, "batch_size": 8, "learning_starts": 10}
ONLINE = {PPO: ("CartPole-v1", SMALL), A2C: ("CartPole-v1", SMALL), DQN: ("CartPole-v1", Q_SMALL),
          SAC: ("Pendulum-v1", Q_SMALL), TD3: ("Pendulum-v1", Q_SMALL)}  # fmt: skip


@pytest.fixture(scope="module")
def dataset():
    rng, never = np.random.default_rng(0), np.zeros(64, bool)
    obs, next_obs = rng.standard_normal((2, 64, 3)).astype(np.float32)
    actions, rewards = rng.uniform(-1, 1, (64, 1)).astype(np.float32), rng.standard_normal(64).astype(np.float32)
    return rlox.OfflineDatasetBuffer(obs, next_obs, actions, rewards, np.arange(64) % 16 == 15, never)


@pytest.fixture
def make(dataset):
    def made(cls, **options):
        base = next((kind for kind in ONLINE if issubclass(cls, kind)), None)
        if base is None:
            return cls(dataset, 3, 1, hidden_sizes=[8], batch_size=8, **options)
        env, settings = ONLINE[base]
        return cls(env, **{**settings, **options})

    return made


# ---- the record


def test_the_record_matches_the_current_sources():
    present = guard.compute_hashes()
    differing = sorted(name for name in {*present, *COMPARED} if present.get(name) != COMPARED.get(name))
    assert not differing, (
        f"kernels were not compared with these files as they are now: {', '.join(differing)}. Let the kernels compute "
        "the same, then run `python tests/record_kernels.py`: it runs the tests that compare them and records the "
        "files in rlox/compiled/record.py if they pass"
    )


# Code that both paths call, and code that no kernel replaces.
SHARED = ("rlox.config", "rlox.processes", "rlox.nn.modes", "rlox.checkpoint.streams",
          "rlox.kernels", "rlox.compiled", "rlox.buffers", "rlox.offline.mixing", "rlox.multi_agent.self_play",
          "rlox.training.algorithm", "rlox.training.parts", "rlox.collectors.base",
          "rlox.collectors.exploration", "rlox.nn.compiling", "rlox.nn.transfers", "rlox.gpu")  # fmt: skip


def uses(code, known):
    """The objects of rlox whose names occur in the code of a function or a function in it."""
    imported = [vars(import_module(name)) for name in code.co_names if name.startswith("rlox.")]
    for name in code.co_names:
        one = ChainMap(known, *imported).get(name)
        if (getattr(one, "__module__", None) or "").startswith("rlox."):
            yield one
    for inner in code.co_consts:
        if inspect.iscode(inner):
            yield from uses(inner, known)


def functions(one, names=None):
    """The functions in a function, a property or a class; of a class only those of the `names`, if given."""
    one = one.fget if isinstance(one, property) else inspect.unwrap(getattr(one, "__func__", one))
    if inspect.isfunction(one):
        yield one
    elif isinstance(one, type):
        for name, member in vars(one).items():
            if not isinstance(member, type) and (names is None or name in names):
                yield from functions(member)


@pytest.mark.parametrize("cls", [*ONLINE, BC, TD3BC, IQL, CQL])
def test_files_that_an_update_uses_are_listed(cls):
    listed, seen = guard.KERNELS[cls.name], set()
    members = {name: getattr(cls, name) for name in guard._UPDATE if name != "_step_by_step" and hasattr(cls, name)}
    left = [function for member in members.values() for function in functions(member)]
    assert len(left) > 2
    while left:
        function = left.pop()
        for one in uses(function.__code__, function.__globals__):
            module = one.__module__
            if one in seen or module.startswith(SHARED) or inspect.isabstract(one):
                continue
            seen.add(one)
            assert module in listed, f"{function.__module__}.{function.__qualname__} uses {module}.{one.__name__}"
            left += functions(one, guard._UPDATE if module in guard._PARTLY else None)
    assert len(seen) > 5


# Members that the kernel's path calls too, or that an update does not call.
BESIDE = {"_explore", "update_native", "_rounds", "policy", "actor", "target",
          "buffer", "_own_state", "_restore", "keep", "_use_kernel", "_require_outputs", "sample",
          "_make_action_noise"}  # fmt: skip


@pytest.mark.parametrize("cls", [*ONLINE, BC, TD3BC, IQL, CQL])
def test_methods_called_by_an_update_are_listed(cls):
    for kind in cls.__mro__:
        for function in functions(kind, ("update", "setup", "make_policy")) if kind.__module__ in sys.modules else ():
            for name in set(function.__code__.co_names) - BESIDE:
                if inspect.isfunction(getattr(cls, name, None)) and kind.__module__.startswith("rlox."):
                    assert name in guard._UPDATE, f"{kind.__name__}.{name}"


# ---- code that was replaced at run time

normalized, twin_q_loss, flat_copy = losses.normalized, value_losses.twin_q_loss, modules.flat_copy
critic_loss = critics_losses.critic_loss


def doubled(advantages, total=None):
    return 2.0 * normalized(advantages)


@functools.wraps(value_losses.soft_policy_loss)
def wrapped(*arguments):
    return twin_q_loss(*arguments)


def other(self, *arguments, **options):
    raise AssertionError


def copied(module):
    return flat_copy(module)


# For each case: the replaced path, the replacement, and the affected algorithms.
PATCHES = {
    "a loss": ("rlox.nn.losses.normalized", doubled, (PPO, A2C)),
    "a loss where it is used": ("rlox.algorithms.sac.soft_policy_loss", wrapped, (SAC,)),
    "a loss within a loss": ("rlox.nn.losses.ppo_clip", other, (PPO,)),
    "a loss replaced by another": ("rlox.nn.losses.value_loss", value_losses.expectile_loss, (PPO, A2C)),
    "a decorated function": ("rlox.nn.value_losses.smoothed_actions", torch.no_grad()(other), (TD3, TD3BC)),
    "a method of a loss": ("rlox.nn.losses.PPOLoss.__call__", other, (PPO,)),
    "a class": ("rlox.nn.losses.PPOLoss", type("PPOLoss", (), {}), (PPO,)),
    "an update": ("rlox.algorithms.ppo.PPO.update", other, (PPO,)),
    "a method that an update calls": ("rlox.nn.batch.TransitionBatch.update_priorities", other, (DQN, SAC, TD3)),
    "a function that creates networks": ("rlox.nn.modules.flat_copy", copied, (SAC, TD3, TD3BC, IQL, CQL)),
    "a shared schedule": ("rlox.checkpoint.counters.follow_schedule", other, (SAC, TD3, BC, TD3BC, IQL, CQL)),
    "an optimiser": ("rlox.nn.optimizers.FlatOptimizer.descend", other, (PPO, A2C, DQN, SAC, TD3, BC, TD3BC, IQL, CQL)),
    "a schedule": ("rlox.algorithms.ppo.scheduled", other, (PPO,)),
    "progress": ("rlox.checkpoint.counters.Counters.progress", property(lambda self: 0.5), (PPO, DQN, SAC, BC)),
    "a distribution": ("rlox.nn.policies.ContinuousPolicy.distribution", other, (PPO, A2C)),
    "a method that was inherited": ("rlox.nn.policies.DiscretePolicy.get_value", other, (PPO,)),
    "critics": ("rlox.nn.critics.ensemble.CriticEnsemble.forward", other, (SAC, TD3, TD3BC, IQL, CQL)),
    "minibatches": ("rlox.collectors.rollout.Rollout.sample_minibatches", other, (PPO,)),
    "a builtin": ("rlox.algorithms.cql.sum", other, (CQL,)),
}  # fmt: skip


def patch(monkeypatch, case):
    path, value, kinds = PATCHES[case]
    monkeypatch.setattr(path, value, raising=not path.endswith((".get_value", ".sum")))
    return kinds, f"{path} differs from what the kernel was compared with"


@pytest.mark.parametrize("case", PATCHES)
def test_what_was_replaced_is_learned_by_in_pytorch(case, make, monkeypatch):
    kinds, reason = patch(monkeypatch, case)
    for kind in kinds:
        algorithm = make(kind)
        assert (algorithm.backend, algorithm.backend_reason.partition(";")[0]) == ("torch", reason), kind
        with pytest.raises(ValueError, match="backend must be auto or torch here, got 'native': " + reason):
            make(kind, backend="native")


@pytest.mark.parametrize("case", ["a loss where it is used", "an update", "a builtin"])
def test_unaffected_algorithms_stay_native(case, make, monkeypatch):
    kinds, _ = patch(monkeypatch, case)
    for kind in {*ONLINE, BC, TD3BC, IQL, CQL} - {*kinds}:
        assert make(kind).backend == "native"


@pytest.mark.parametrize("module", sorted({module for modules in guard.KERNELS.values() for module in modules}))
def test_nothing_counts_as_replaced_without_a_cause(module):
    assert guard.find_replaced(import_module(module)) == []


def test_what_the_compiler_adds_for_annotations_does_not_count_as_replaced(tmp_path, monkeypatch):
    """As Python 3.14 does, which then keeps it under another name, or drops it."""
    (tmp_path / "annotated.py").write_text("def __annotate__(format): ...\ndel __annotate__\ndef loss(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = import_module("annotated")
    assert guard.find_replaced(module) == []
    del module.loss
    assert guard.find_replaced(module) == ["loss"]


@pytest.mark.parametrize("value", [None, Mock(), partial(losses.value_loss)])
def test_what_is_no_function_counts_as_replaced(value, monkeypatch):
    monkeypatch.setattr(losses, "value_loss", value)
    assert guard.find_replaced(losses) == ["value_loss"]
    monkeypatch.setattr("rlox.algorithms.ppo.scheduled", value)
    assert guard.find_replaced(sys.modules["rlox.algorithms.ppo"]) == ["scheduled"]


def test_methods_beside_an_update_may_be_replaced(make, monkeypatch):
    monkeypatch.setattr("rlox.training.algorithm.Algorithm.save", other)
    monkeypatch.setattr(PPO, "update_native", other)
    assert make(PPO).backend == "native"


def test_training_uses_a_replaced_function(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "rlox.nn.losses.normalized", lambda advantages, total=None: seen.append(len(advantages)) or doubled(advantages)
    )
    patched = PPO("CartPole-v1", **SMALL)
    patched.train(64)
    monkeypatch.undo()
    plain = PPO("CartPole-v1", backend="torch", **SMALL)
    plain.train(64)
    assert seen
    assert any((a != b).any() for a, b in zip(patched.policy.parameters(), plain.policy.parameters(), strict=True))


@pytest.mark.parametrize("kind", [PPO, A2C, DQN, SAC, TD3, BC, TD3BC, IQL, CQL])
def test_what_is_replaced_after_the_construction_ends_the_training(kind, make, monkeypatch):
    algorithm = make(kind)
    monkeypatch.setattr("rlox.nn.optimizers.FlatOptimizer.descend", other)
    with pytest.raises(ValueError, match=rf"{kind.__name__}.train: .*rlox.nn.optimizers.FlatOptimizer.descend differs"):
        algorithm.train(40)
    monkeypatch.undo()
    algorithm.train(40)
    algorithm.update = lambda batch: {}
    with pytest.raises(ValueError, match=rf"{kind.__name__}.train: .*update of this {kind.__name__} was replaced"):
        algorithm.train(40)


def test_replacing_code_in_a_callback_is_an_error(make):
    class Patching(Callback):
        def on_training_start(self, *, algorithm, **info):
            algorithm.update = lambda batch: {}

    for kind in (PPO, DQN, BC):
        with pytest.raises(ValueError, match=r"update of this .* was replaced"):
            make(kind, callbacks=[Patching()]).train(40)


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        (PPO, "rlox.nn.losses.normalized", doubled),
        (SAC, "rlox.algorithms.sac.critic_loss", lambda *arguments: critic_loss(*arguments)),
        (TD3BC, "rlox.algorithms.td3_bc.twin_q_loss", lambda *arguments: twin_q_loss(*arguments)),
    ],
)
def test_a_checkpoint_of_a_native_run_continues_in_pytorch(kind, path, value, make, dataset, monkeypatch, tmp_path):
    algorithm, saved = make(kind), tmp_path / "a.safetensors"
    algorithm.train(40)
    algorithm.save(saved)
    given = {"dataset": dataset} if kind is TD3BC else {}
    assert kind.from_checkpoint(saved, **given).backend == "native"
    monkeypatch.setattr(path, value)
    restored = kind.from_checkpoint(saved, **given)
    assert restored.backend == "torch"
    assert "differs from what the kernel was compared with" in restored.backend_reason
    restored.train(40)
    with pytest.raises(ValueError, match="differs from what the kernel was compared with"):
        kind.from_checkpoint(saved, **given, backend="native")


# ---- methods that a subclass overrides


def overriding(cls, name):
    """A subclass that overrides the method without changing it."""

    def method(self, *arguments, **options):
        return getattr(super(own, self), name)(*arguments, **options)

    own = type(f"Own{cls.__name__}", (cls,), {name: method})
    return own


OVERRIDDEN = [
    *((kind, name) for kind in (PPO, A2C, DQN, SAC, TD3) for name in ("update", "make_policy", "setup")),
    *((kind, name) for kind in (BC, TD3BC, IQL, CQL) for name in ("update", "make_policy", "setup", "adam")),
    *((kind, "adam") for kind in (SAC, TD3)),
    *((kind, "_policy_arguments") for kind in (BC, TD3BC, IQL, CQL)),
    (DQN, "_move_target"),
    (DQN, "_move_target_when_due"),
    (CQL, "_weight"),
]


@pytest.mark.parametrize(("cls", "name"), OVERRIDDEN)
def test_overridden_methods_select_pytorch(cls, name, make):
    algorithm = make(overriding(cls, name))
    assert algorithm.backend == "torch"
    assert algorithm.backend_reason.startswith(f"Own{cls.__name__} has a{'n' * (name[0] in 'aeiou')} {name} of its own")
    algorithm.train(40)
    with pytest.raises(ValueError, match=f"got 'native': Own{cls.__name__} has an? {name} of its own"):
        make(overriding(cls, name), backend="native")


@pytest.mark.parametrize("name", ["sample", "_rows", "_explore"])
@pytest.mark.parametrize("cls", [DQN, SAC, TD3])
def test_overridden_methods_of_rounds_go_step_by_step(cls, name, make):
    algorithm = make(overriding(cls, name))
    assert (algorithm.backend, algorithm._can_run_rounds()) == ("native", False)
    assert name in algorithm.backend_reason
    algorithm.train(40)
    assert make(type("Own", (cls,), {}))._can_run_rounds()


@pytest.mark.parametrize("name", ["step", "_explore", "_act"])
def test_a_collector_that_was_replaced_is_called_at_every_step(name, make, monkeypatch):
    calls, plain = [], getattr(rlox.collectors.ReplayCollector, name)
    path = f"rlox.collectors.replay.ReplayCollector.{name}"
    monkeypatch.setattr(path, lambda self, *arguments: calls.append(1) or plain(self, *arguments))
    dqn = make(DQN)
    assert dqn.backend_reason.endswith(f"step by step, since {path} differs from what the kernel was compared with")
    dqn.train(40)
    assert len(calls) >= 30


class Counting(RolloutCollector):
    calls = 0

    def _step_by_step(self, *arguments):
        self.calls += 1
        return super()._step_by_step(*arguments)


class OwnCollector(PPO):
    def _make_collector(self, n, reward_fn):
        return Counting(self.env_options.make(self.env_id, n, self.seed), seed=self.seed, reward_fn=reward_fn)


def test_a_custom_collector_is_called(make):
    ppo = make(OwnCollector)
    assert ppo.backend_reason == "Counting has a _step_by_step of its own"
    ppo.train(64)
    assert ppo.collector.calls == 2


def test_a_replaced_policy_acts_in_collection_and_evaluation(make, monkeypatch):
    calls, act, mode = [], DiscretePolicy.act, DiscretePolicy.mode
    monkeypatch.setattr(DiscretePolicy, "act", lambda self, *arguments: calls.append("act") or act(self, *arguments))
    monkeypatch.setattr(DiscretePolicy, "mode", lambda self, obs: calls.append("mode") or mode(self, obs))
    for options in ({}, {"backend": "torch"}):
        ppo = make(PPO, **options)
        assert not ppo.backend_reason.endswith("a kernel collects")
        ppo.train(32)
        ppo.evaluate(1)
        assert {*calls} == {"act", "mode"}
        calls.clear()
    with pytest.raises(ValueError, match=r"CandleCollector: .*rlox.nn.policies.DiscretePolicy.act differs"):
        CandleCollector()


def test_a_policy_replaced_while_a_kernel_collects_for_pytorch_is_used(make, monkeypatch):
    ppo = make(PPO, backend="torch")
    assert isinstance(ppo.actor, NativePolicy)
    calls, act = [], DiscretePolicy.act
    monkeypatch.setattr(DiscretePolicy, "act", lambda self, *arguments: calls.append(1) or act(self, *arguments))
    ppo.train(32)
    assert calls


# ---- modules of a native run


def hook(module):
    module.register_forward_hook(lambda *arguments: None)


def replace(module):
    path, layer = next((path, layer) for path, layer in module.named_modules() if type(layer) is nn.Linear)
    parent, _, name = path.rpartition(".")
    setattr(module.get_submodule(parent), name, nn.Linear(layer.in_features, layer.out_features))


def shadow(module):
    module.forward = lambda *arguments: None
    module.mode = lambda *arguments: None


ALTERATIONS = {
    "double": (lambda module: module.double(), "moved or converted"),
    "half": (lambda module: module.half(), "moved or converted"),
    "to": (lambda module: module.to(torch.bfloat16), "moved or converted"),
    "frozen": (lambda module: next(module.parameters()).requires_grad_(False), "frozen"),
    "hooks": (hook, "hooks, which a kernel does not call"),
    "another layer": (replace, "not those it was created with"),
    "a method": (shadow, "a method of the policy was replaced"),
    "new data": (lambda module: [p.set_(p.clone()) for p in module.parameters()], "moved or converted"),
}


@pytest.mark.parametrize("kind", [PPO, A2C, DQN, SAC, TD3, BC, TD3BC, IQL, CQL])
@pytest.mark.parametrize("how", ALTERATIONS)
def test_a_policy_changed_after_construction_is_an_error(kind, how, make):
    change, reason = ALTERATIONS[how]
    algorithm = make(kind)
    algorithm.train(40)
    with torch.no_grad():
        change(algorithm.policy)
    with pytest.raises(ValueError, match=rf"{kind.__name__}.train: .*{reason}.*backend='torch'"):
        algorithm.train(40)
    if kind in ONLINE:
        with pytest.raises(ValueError, match=reason):
            algorithm.predict(np.zeros(algorithm.spec.obs_shape, np.float32))
        with pytest.raises(ValueError, match=reason):
            algorithm.evaluate(1)


def test_harmless_operations_on_a_policy_are_allowed(make):
    for kind in (PPO, DQN, SAC, BC):
        algorithm = make(kind)
        module = algorithm.policy
        module.to("cpu").float().train().eval().requires_grad_(True)
        module.note = "mine"
        module.zero_grad(set_to_none=False)
        with torch.no_grad():
            next(module.parameters()).mul_(0.5)
        handle = module.register_forward_hook(lambda *arguments: None)
        handle.remove()
        algorithm.train(40)


@pytest.mark.parametrize(
    ("kind", "name"),
    [(PPO, "optimizer"), (DQN, "optimizer"), (SAC, "critics"), (SAC, "target"), (SAC, "log_alpha"),
     (TD3, "target_policy"), (TD3BC, "critic_optimizer"), (IQL, "value"), (CQL, "log_cql_alpha")],
)  # fmt: skip
def test_a_network_or_optimiser_replaced_after_construction_is_an_error(kind, name, make):
    algorithm = make(kind)
    setattr(algorithm, name, nn.Parameter(torch.zeros(())))
    with pytest.raises(ValueError, match=f"{name} of this {kind.__name__} was replaced"):
        algorithm.train(40)


def test_changes_of_dqns_target_network_are_errors(make):
    dqn = make(DQN)
    dqn.target.double()
    with pytest.raises(ValueError, match="the target's parameters were moved or converted"):
        dqn.train(40)


def test_global_hooks_are_detected(make):
    ppo = make(PPO)
    module = ppo.policy
    handle = nn.modules.module.register_module_forward_hook(lambda *arguments: None)
    try:
        with pytest.raises(ValueError, match="all modules have hooks"):
            ppo.train(32)
        assert make(PPO, policy=DiscretePolicy(4, 2, 8)).backend == "torch"
    finally:
        handle.remove()
    assert module is ppo.policy
    ppo.train(32)


def test_a_policy_with_a_custom_method_is_trained_with_pytorch(make):
    policy = DiscretePolicy(4, 2, 8)
    policy.distribution = policy.distribution
    ppo = make(PPO, policy=policy)
    assert (ppo.backend, ppo.backend_reason) == ("torch", "the policy has a method of its own, distribution")


# ---- edited source code


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """A copy of the package: a function that edits files in it and runs a program with it."""
    root = tmp_path_factory.mktemp("edited")
    package = Path(rlox.__file__).parent
    shutil.copytree(package, root / "rlox", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "rlox" / "kernels").symlink_to(Path(rlox.kernels.__file__).parent)

    def run(program, *edits):
        before = {path: (root / path).read_text() for path, *_ in edits}
        try:
            for path, old, new in edits:
                text = (root / path).read_text()
                assert old in text, old
                (root / path).write_text(text.replace(old, new, 1))
            done = subprocess.run(
                [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=root,
                env={**os.environ, "PYTHONPATH": str(root)},
            )  # fmt: skip
        finally:
            for path, text in before.items():
                (root / path).write_text(text)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    run.root = root
    return run


REASONS = """
import sys
import rlox
from rlox.algorithms import A2C, DQN, PPO
for cls in (PPO, A2C, DQN):
    made = cls("CartPole-v1")
    print(made.backend_reason.partition(";")[0].removesuffix(" differs from what the kernel was compared with"))
print("torch" in sys.modules, rlox.__file__)
"""
SAC_REASON = "from rlox.algorithms import SAC; print(SAC('Pendulum-v1').backend_reason.split(' differs')[0])"
NATIVE = "perceptrons on the CPU, computed as the PyTorch update defines them"


@pytest.mark.slow
def test_an_edited_file_selects_pytorch(copied):
    *reasons, last = copied(REASONS, ("rlox/algorithms/a2c.py", "def update(self,", "def update(self, *,"))
    assert reasons == [NATIVE, "rlox/algorithms/a2c.py", NATIVE]
    assert last == f"True {copied.root / 'rlox' / '__init__.py'}"


EDITS = {
    "nn.actors:LOG_STD_RANGE": ("LOG_STD_RANGE = (-20.0, 2.0)", "LOG_STD_RANGE = (-5.0, 2.0)"),
    "algorithms.sac:SAC.update": ("losses import soft_policy_loss", "losses import cloning_loss as soft_policy_loss"),
    "nn.optimizers:FlatOptimizer.__init__": ("eps: float = 1e-5", "eps: float = 1e-4"),
    "nn.critics.ensemble:CriticEnsemble.__call__": (
        "    def first(",
        "    def __call__(self):\n        pass\n\n    def first(",
    ),
    "nn.actors:SquashedGaussianPolicy": ("Policy(BoundedPolicy)", "Policy(BoundedPolicy, Actor)"),
    "training.backend:SeparateNetworks.adam": ("eps=1e-8", "eps=1e-7"),
}

# The same for each edit separately, in forks of a process that has already imported PyTorch.
EACH_EDIT = """
import os, pathlib, sys
import torch
sys.dont_write_bytecode = True
for path, old, new in {edits}:
    file = pathlib.Path(path)
    text = file.read_text()
    assert old in text, old
    file.write_text(text.replace(old, new, 1))
    if not (pid := os.fork()):
        {program}
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(pid, 0)
    file.write_text(text)
"""


@pytest.mark.slow
def test_every_kind_of_edit_is_detected(copied):
    edits = [(f"rlox/{name.partition(':')[0].replace('.', '/')}.py", *edit) for name, edit in EDITS.items()]
    seen = copied(EACH_EDIT.format(edits=edits, program=SAC_REASON))
    assert seen == [path for path, *_ in edits]


def test_layout_comments_docstrings_and_annotations_are_ignored(copied):
    line = "    std, mean = torch.std_mean(advantages)"
    edits = [
        (line, "    # another comment\n\n    std, mean = (\n        torch.std_mean(advantages)  # here\n    )"),
        ("as it has no variance", "because it has no variance"),
        ("def normalized(advantages: torch.Tensor, total:", "def normalized(advantages, total:"),
    ]
    *reasons, last = copied(REASONS, *(("rlox/nn/losses.py", *edit) for edit in edits))
    assert reasons == [NATIVE] * 3
    assert last == f"False {copied.root / 'rlox' / '__init__.py'}"


def test_a_training_goes_on_while_its_files_are_edited(copied):
    program = """
import pathlib
from rlox.algorithms import PPO
made = PPO("CartPole-v1", n_envs=2, n_steps=8)
made.train(16)
with open("rlox/nn/losses.py", "a") as source:
    print("NEW = 1", file=source)
made.train(16)
made.evaluate(1)
print(made.backend, PPO("CartPole-v1").backend_reason.partition(";")[0])
"""
    (output,) = copied(program, ("rlox/nn/losses.py", "ppo_clip", "ppo_clip"))
    assert output == "native rlox/nn/losses.py differs from what the kernel was compared with"


def test_a_source_that_cannot_be_read_counts_as_changed(copied):
    source = copied.root / "rlox" / "nn" / "losses.py"
    program = "from rlox.algorithms import PPO; PPO('CartPole-v1', backend='native')"
    source.rename(source.with_suffix(".away"))
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=copied.root,
            env={**os.environ, "PYTHONPATH": str(copied.root)},
        )  # fmt: skip
    finally:
        source.with_suffix(".away").rename(source)
    assert "got 'native': rlox/nn/losses.py differs" in done.stderr


@pytest.mark.slow
def test_changes_are_recorded_only_if_the_kernels_compute_the_same(copied):
    (copied.root / "tests").mkdir(exist_ok=True)
    names = ("record_kernels.py", "kernels", "algorithms", "test_backends.py", "conftest.py", "helpers", "multi_agent")
    for name in names:
        if not (copied.root / "tests" / name).exists():
            (copied.root / "tests" / name).symlink_to(ROOT / "tests" / name)
    program = f"""
import runpy, sys
sys.path.insert(0, {str(copied.root)!r})
sys.argv = [{str(copied.root / "tests" / "record_kernels.py")!r}]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as e:
    print("exit code", e.code)
"""
    before = (copied.root / "rlox" / "compiled" / "record.py").read_text()
    assert copied(program)[-2:] == ["no code that a kernel stands for has changed since it was compared", "exit code 0"]
    output = copied(program, ("rlox/nn/losses.py", "1.0 - clip_eps, 1.0 + clip_eps", "1.0 - clip_eps, 1.5 + clip_eps"))
    assert output[-2:] == ["not recorded, for the comparison failed: rlox.nn.losses", "exit code 1"]
    assert (copied.root / "rlox" / "compiled" / "record.py").read_text() == before


# ---- the command line


@pytest.mark.slow
def test_the_command_line_names_the_changed_function(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import rlox.nn.losses\nplain = rlox.nn.losses.normalized\nrlox.nn.losses.normalized = lambda x: plain(x)\n"
    )
    arguments = ["algo=ppo", "env=CartPole-v1", "total_timesteps=64", "algo.n_steps=8", "algo.hidden_sizes=[8]"]
    arguments += ["logger=none", "eval.n_points=0", "--import", "mine"]
    done = subprocess.run(
        [sys.executable, "-m", "rlox_cli.main", "train", *arguments],
        capture_output=True, text=True, check=False, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    output = " ".join(done.stdout.split())
    assert "backend: torch (rlox.nn.losses.normalized differs from what the kernel was compared with" in output, (
        done.stderr
    )


@pytest.mark.slow
def test_threads_may_make_algorithms_at_once(tmp_path):
    """Python 3.11's parser fails if two threads use it at the same time."""
    program = (
        "import sys, threading, rlox.compiled.guard as guard\nsys.setswitchinterval(1e-6)\n"
        "failed = []\n"
        "def parse():\n"
        "    try:\n"
        "        guard.compute_hashes()\n"
        "    except BaseException as e:\n"
        "        failed.append(repr(e))\n"
        "threads = [threading.Thread(target=parse) for _ in range(4)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "assert not failed, failed\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path)
