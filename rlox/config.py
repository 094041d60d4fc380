"""Every hyper-parameter of rlox, declared once: default, meaning, check.

Free of PyTorch and Hydra, so that help, completion and validation answer at once. Each field's trailing comment is what
``rlox show`` prints. A field is never changed after construction; what derives from fields is a property.
"""

from __future__ import annotations

import difflib
import json
import math
import numbers
import os
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

SCHEDULES = ("constant", "linear")
POLICY_SCHEDULES = ("constant", "cosine")
ACTIVATIONS = ("tanh", "relu")
OPTIMIZERS = ("adam", "rmsprop")
Q_LOSSES = ("huber", "mse")
WEIGHT_NORMS = ("batch", "memory", "none")
DEVICES = ("auto", "cpu", "cuda")
BACKENDS = ("auto", "native", "torch")
WANDB_MODES = ("online", "offline", "disabled")
ENV_BACKENDS = ("auto", "gymnasium", "envpool")
LARGEST_COUNT = 2**31 - 1  # of steps, epochs, rows: what is larger ends no training
MOST_AT_ONCE = 1_000_000  # rows of one batch, steps or updates of one round, units of one layer
MOST_NOISE = 100  # deviation of noise on actions in [-1, 1]: with so much, every action is at a bound
FLOAT32_MIN, FLOAT32_MAX = 2.0**-126, (2 - 2.0**-23) * 2.0**127

# Where a sweep looks, in Hydra's grammar: the ranges that rl-zoo3 searches, less what only diverges.
LEARNING_RATES = "tag(log, interval(1e-5, 1e-2))"
DISCOUNTS = "0.9,0.95,0.98,0.99,0.995,0.999"
TRACE_DECAYS = "0.8,0.9,0.95,0.98,1.0"
ENTROPY_WEIGHTS = "tag(log, interval(1e-8, 0.1))"
TARGET_SHARES = "tag(log, interval(1e-3, 0.08))"


def usual_settings(env_id: Any) -> dict[str, Any]:
    """`reward_fn` and hyper-parameters that are usual in an environment, for where nothing else is asked for.

    In ``ALE/…`` games signs of rewards are learned from, and the network of Mnih et al. 2015 has no layer behind its
    features.
    """
    game = isinstance(env_id, str) and env_id.startswith("ALE/")
    return {"reward_fn": "sign", "hidden_sizes": []} if game else {}


def nearest(name: str, choices: Iterable[str]) -> str:
    """`` did you mean 'x'?`` for the closest of `choices`, else the sorted list of them."""
    choices = sorted(choices)
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"try one of {', '.join(choices)}"


def is_below(path: str) -> bool:
    """Whether `path` names something inside the folder it is joined to."""
    return bool(path.strip("./")) and not path.startswith("/") and ".." not in path.split("/") and "\0" not in path


def _type_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)


def _is_a(value: Any, kind: Any) -> bool:
    """Whether `value` has the annotated type; an int serves as a float, a bool never as a number."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return True
    if origin in (types.UnionType, typing.Union):
        return any(_is_a(value, arg) for arg in args)
    if kind is type(None):
        return value is None
    if origin is list:
        return isinstance(value, (list, tuple)) and all(_is_a(item, args[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict)
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def shown(value: Any) -> str:
    """`value` for a message: one line of at most 200 characters."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # an integer of more digits than Python prints, or a broken __repr__
        text = f"one of type {type(value).__name__} that cannot be printed"
    return text if len(text) <= 200 else f"{text[:197]}..."


def require(where: str, name: str, value: Any, kind: Any) -> None:
    """Raise a TypeError unless `value` has the annotated type `kind`; an int serves as a float, a bool never as a
    number."""
    if not _is_a(value, kind):
        raise TypeError(f"{where}: {name} must be of type {_type_name(kind)}, got {shown(value)}")


def _is_whole(value: Any) -> bool:
    """Whether a float is a number to count by, such as 1e6."""
    return type(value) is float and 1 <= value <= 2**53 and value.is_integer()


def integer(where: str, name: str, value: Any, least: int, most: int = 2**63 - 1) -> int:
    """`value` as an int; NumPy's integers serve too, and whole numbers such as 1e6.

    Raises
    ------
    TypeError
        For what is no integer; a bool is none.
    ValueError
        For one outside [`least`, `most`].
    """
    if _is_whole(value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{where}: {name} must be an integer, got {shown(value)}")
    if not least <= value <= most:
        bounds = f"be >= {least}" if value < least else f"be at most {most}"
        raise ValueError(f"{where}: {name} must {bounds}, got {shown(value)}")
    return int(value)


def choice(where: str, name: str, value: Any, choices: Sequence[str]) -> str:
    """`value`, one of `choices`; else a ValueError that names the nearest."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(
            f"{where}: {name} must be one of {', '.join(choices)}, got {shown(value)}; {nearest(shown(value), choices)}"
        )
    return value


def _unfit(value: Any, kind: Any, most: int) -> str | None:
    """The rule that a number breaks wherever it stands, since kernels hold no such number; None for all others."""
    if isinstance(value, (list, tuple)):
        rules = (_unfit(item, typing.get_args(kind)[0], most) for item in value) if typing.get_args(kind) else ()
        return next((rule for rule in rules if rule is not None), None)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if float not in (kind, *typing.get_args(kind)):
        return f"lie between -{most:,} and {most:,}" if isinstance(value, int) and abs(value) > most else None
    if value != value:
        return "be a number"
    if isinstance(value, float) and math.isinf(value):
        return None  # off, where a field's own rule allows it
    return f"be at most {FLOAT32_MAX:.1e} in size, which float32 holds" if abs(value) > FLOAT32_MAX else None


def _vanishes(value: Any) -> bool:
    """Whether a number that is not 0 becomes 0 as float32 has it."""
    return isinstance(value, float) and 0 < abs(value) < FLOAT32_MIN


def searched(default: Any, space: str) -> Any:
    """A field that sweeps may search: its default, and the range in Hydra's grammar, which stands in its metadata."""
    metadata = {"search": space}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class Config:
    """Base of all configurations: checks types, then the rules that `rules` yields."""

    uses_dataset: ClassVar[str] = "never"  # whether an algorithm learns from a dataset: never, may, or must
    largest: ClassVar[int] = 2**63 - 1  # no whole number is larger

    def __post_init__(self) -> None:
        where, hints = type(self).__name__, typing.get_type_hints(type(self))
        for item in fields(self):
            value, kind = getattr(self, item.name), hints[item.name]
            if isinstance(value, tuple):
                setattr(self, item.name, value := list(value))  # as a file has it
            if _is_whole(value) and not _is_a(value, kind) and _is_a(int(value), kind):
                setattr(self, item.name, value := int(value))  # 1e6 is a whole number
            try:
                require(where, item.name, value, kind)
            except TypeError as e:
                from rlox.migration import answers

                theirs = answers(item.name, hints, value=value)
                raise TypeError(f"{e}{f'; {theirs}' if theirs else ''}") from None
            rule = _unfit(value, kind, self.largest)
            if rule is not None:
                raise ValueError(f"{where}: {item.name} must {rule}, got {shown(value)}")
        for name, holds, rule in self.rules():
            if not holds:
                raise ValueError(f"{where}: {name} must {rule}, got {shown(getattr(self, name))}")
        for name in [item.name for item in fields(self) if _vanishes(getattr(self, item.name))]:
            try:
                replace(self, **{name: 0.0})
            except ValueError as e:
                least = f"{name} must be at least {FLOAT32_MIN:.1e}, which float32 holds"
                raise ValueError(f"{where}: {least}, got {shown(getattr(self, name))}") from e

    def rules(self) -> Iterable[tuple[str, bool, str]]:
        """Yield (field, whether it holds, "be > 0") for every rule a value must obey."""
        return ()

    @classmethod
    def from_kwargs(cls, owner: str, **values: Any) -> Config:
        """Build from keyword arguments; an unknown name is a TypeError that names the nearest field, or says what the
        keyword of another trainer is here."""
        known = [item.name for item in fields(cls)]
        for name in values:
            if name not in known:
                from rlox.migration import answers

                raise TypeError(
                    f"{owner}: unknown hyper-parameter {name!r}; {answers(name, known) or nearest(name, known)}"
                )
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, configurations within it as dicts too."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        """What `to_dict` returned, or a part of it, as a configuration.

        Raises
        ------
        TypeError, ValueError
            For an unknown field (with the nearest name), a value of another type, or one that breaks a rule.
        """
        if not isinstance(values, Mapping):
            raise TypeError(f"{cls.__name__}: a configuration must map fields to values, got {shown(values)}")
        hints, given = typing.get_type_hints(cls), dict(values)
        for name, value in values.items():
            kinds = [kind for kind in (hints.get(name), *typing.get_args(hints.get(name))) if isinstance(kind, type)]
            inner = next((kind for kind in kinds if issubclass(kind, Config)), None)
            if inner is not None and isinstance(value, Mapping):
                given[name] = inner.from_dict(value)
        return cls.from_kwargs(cls.__name__, **given)

    def to_yaml(self, path: str | os.PathLike) -> None:
        """Write the fields to a YAML file, from which `from_yaml` makes an equal configuration."""
        import yaml

        # By JSON, which turns tuples and NumPy's floats into what YAML knows.
        Path(path).write_text(yaml.safe_dump(json.loads(json.dumps(self.to_dict())), sort_keys=False))

    @classmethod
    def from_yaml(cls, path: str | os.PathLike) -> Config:
        """Read a YAML file of fields; what it lacks has its default. Numbers such as ``3e-4`` are numbers.

        Raises
        ------
        FileNotFoundError
            If there is no such file.
        TypeError, ValueError
            As `from_dict`; and for a file that is no YAML.
        """
        import yaml

        class Loader(yaml.SafeLoader):
            """YAML 1.1 takes 3e-4, which has no dot, for a text."""

        Loader.add_implicit_resolver(
            "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+[eE][-+]?\d+$"), list("-+0123456789")
        )
        try:
            return cls.from_dict(yaml.load(Path(path).read_text(), Loader) or {})
        except yaml.YAMLError as e:
            raise ValueError(f"{cls.__name__}.from_yaml: {path} must be a YAML file: {' '.join(str(e).split())}") from e


def _is_finite(value: Any) -> bool:
    """Whether no number in `value`, which may hold lists and mappings, is NaN or infinite."""
    if isinstance(value, Mapping):
        return all(map(_is_finite, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _width_rules(widths: list[int]) -> Iterable[tuple[str, bool, str]]:
    yield "hidden_sizes", all(width >= 1 for width in widths), "hold widths >= 1"
    yield "hidden_sizes", all(width <= MOST_AT_ONCE for width in widths), f"hold widths of at most {MOST_AT_ONCE:,}"
    few = all(one * other <= 2**30 for one, other in pairwise(widths))
    yield "hidden_sizes", few, "need at most 2**30 weights between two layers"


@dataclass
class OnPolicyConfig(Config):
    """What every on-policy actor-critic shares."""

    largest = LARGEST_COUNT

    n_steps: int = searched(128, "32,64,128,256,512,1024,2048")  # steps per environment in one rollout
    learning_rate: float = searched(2.5e-4, LEARNING_RATES)  # step size of the optimiser at the start
    learning_rate_schedule: str = "constant"  # constant, or linear: to 0 at total_timesteps
    gamma: float = searched(0.99, DISCOUNTS)  # discount factor per step, in [0, 1]
    gae_lambda: float = searched(0.95, TRACE_DECAYS)  # decay of the advantage trace per step, in [0, 1]
    ent_coef: float = searched(0.01, ENTROPY_WEIGHTS)  # weight of the entropy bonus, per nat
    vf_coef: float = searched(0.5, "interval(0.1, 1.0)")  # weight of the squared value error
    max_grad_norm: float | None = searched(0.5, "0.3,0.5,1,2,5")  # global gradient norm is clipped to this; null: off
    optimizer: str = "adam"  # adam or rmsprop, both with eps 1e-5
    normalize_advantages: bool = searched(True, "true,false")  # zero mean, unit variance in each minibatch
    hidden_sizes: list[int] = searched([64, 64], "[64,64],[256,256]")  # units per hidden layer, actor and critic alike
    activation: str = searched("tanh", "tanh,relu")  # tanh or relu
    ortho_init: bool = True  # orthogonal weights (gain sqrt 2; 0.01 at the policy head), else uniform 1/sqrt(fan_in)
    log_std_init: float = 0.0  # initial log standard deviation of continuous actions
    normalize_obs: bool = False  # running mean and variance of observations, frozen in evaluation
    normalize_rewards: bool = False  # divide rewards by the running deviation of their discounted sum
    clip_obs: float = 10.0  # normalised observations are clipped to this, in standard deviations
    clip_rewards: float = 10.0  # normalised rewards are clipped to this, in standard deviations

    def rules(self):
        yield "n_steps", self.n_steps >= 1, "be >= 1"
        yield "learning_rate", 0 < self.learning_rate < float("inf"), "be > 0 and finite"
        yield (
            "learning_rate_schedule",
            self.learning_rate_schedule in SCHEDULES,
            f"be one of {', '.join(SCHEDULES)}",
        )
        yield "optimizer", self.optimizer in OPTIMIZERS, f"be one of {', '.join(OPTIMIZERS)}"
        yield "gamma", 0 <= self.gamma <= 1, "be in [0, 1]"
        yield "gae_lambda", 0 <= self.gae_lambda <= 1, "be in [0, 1]"
        yield "ent_coef", 0 <= self.ent_coef < float("inf"), "be >= 0 and finite"
        yield "vf_coef", 0 <= self.vf_coef < float("inf"), "be >= 0 and finite"
        yield (
            "max_grad_norm",
            self.max_grad_norm is None or 0 < self.max_grad_norm < float("inf"),
            "be > 0 and finite, or null",
        )
        yield from _width_rules(self.hidden_sizes)
        yield "activation", self.activation in ACTIVATIONS, f"be one of {', '.join(ACTIVATIONS)}"
        yield "clip_obs", self.clip_obs > 0, "be > 0"
        yield "clip_rewards", self.clip_rewards > 0, "be > 0"
        yield "log_std_init", -20 <= self.log_std_init <= 2, "be in [-20, 2]"


@dataclass
class PPOConfig(OnPolicyConfig):
    """Proximal Policy Optimization (Schulman et al. 2017, arXiv:1707.06347)."""

    n_epochs: int = searched(4, "1,4,10,20")  # passes over each rollout
    batch_size: int = searched(256, "32,64,128,256,512")  # transitions per gradient step
    clip_eps: float = searched(0.2, "0.1,0.2,0.3,0.4")  # the probability ratio is clipped to [1 - eps, 1 + eps]
    clip_eps_schedule: str = "constant"  # constant, or linear: to 0 at total_timesteps
    clip_vf: float | None = None  # value changes are clipped to this, as Stable-Baselines3's (no maximum); null: off
    target_kl: float | None = (
        None  # stop the epochs once the KL to the old policy passes 1.5 times this, nats; null: off
    )

    def rules(self):
        yield from super().rules()
        yield "n_epochs", self.n_epochs >= 1, "be >= 1"
        yield "batch_size", self.batch_size >= 2, "be >= 2"
        yield "clip_eps", 0 < self.clip_eps < 1, "be in (0, 1)"
        yield (
            "clip_eps_schedule",
            self.clip_eps_schedule in SCHEDULES,
            f"be one of {', '.join(SCHEDULES)}",
        )
        yield "clip_vf", self.clip_vf is None or 0 < self.clip_vf < math.inf, "be > 0 and finite, or null"
        yield "target_kl", self.target_kl is None or 0 < self.target_kl < math.inf, "be > 0 and finite, or null"


@dataclass
class A2CConfig(OnPolicyConfig):
    """Advantage Actor-Critic, synchronous (Mnih et al. 2016, arXiv:1602.01783)."""

    n_steps: int = searched(5, "5,8,16,32,64,128")  # steps per environment in one rollout, which is one gradient step
    learning_rate: float = searched(7e-4, LEARNING_RATES)  # step size of the optimiser at the start
    gae_lambda: float = searched(1.0, TRACE_DECAYS)  # decay of the advantage trace per step, in [0, 1]
    ent_coef: float = searched(0.0, ENTROPY_WEIGHTS)  # weight of the entropy bonus, per nat
    optimizer: str = searched("rmsprop", "adam,rmsprop")  # adam or rmsprop, both with eps 1e-5
    normalize_advantages: bool = searched(False, "true,false")  # zero mean, unit variance in each rollout


@dataclass
class BatchConfig(Config):
    """What every algorithm shares that learns from samples of stored transitions."""

    largest = LARGEST_COUNT

    learning_rate: float = searched(1e-4, LEARNING_RATES)  # step size of the optimiser at the start
    learning_rate_schedule: str = "constant"  # constant, or linear: to 0 at total_timesteps
    batch_size: int = searched(64, "32,64,128,256,512")  # transitions per update
    max_grad_norm: float | None = 10.0  # global gradient norm is clipped to this; null: off
    hidden_sizes: list[int] = searched([256, 256], "[64,64],[256,256],[400,300]")  # units per hidden layer
    activation: str = "relu"  # tanh or relu
    normalize_obs: bool = False  # observations with mean 0 and variance 1

    def rules(self):
        yield "learning_rate", 0 < self.learning_rate < float("inf"), "be > 0 and finite"
        yield (
            "learning_rate_schedule",
            self.learning_rate_schedule in SCHEDULES,
            f"be one of {', '.join(SCHEDULES)}",
        )
        yield "batch_size", self.batch_size >= 1, "be >= 1"
        yield "batch_size", self.batch_size <= MOST_AT_ONCE, f"be at most {MOST_AT_ONCE:,}"
        yield (
            "max_grad_norm",
            self.max_grad_norm is None or 0 < self.max_grad_norm < float("inf"),
            "be > 0 and finite, or null",
        )
        yield from _width_rules(self.hidden_sizes)
        yield "activation", self.activation in ACTIVATIONS, f"be one of {', '.join(ACTIVATIONS)}"


@dataclass
class OffPolicyConfig(BatchConfig):
    """What every off-policy algorithm shares; its replay memory is a `BufferConfig`."""

    gamma: float = searched(0.99, DISCOUNTS)  # discount factor per step, in [0, 1]
    learning_starts: int = 1000  # environment steps of random actions, kept in the memory, before the first update
    train_freq: int = searched(1, "1,4,8,16,64,256")  # environment steps, over all environments, per round of updates
    gradient_steps: int = searched(1, "1,4,8,16,64,-1")  # updates in a round; -1: one per step taken since the last
    normalize_obs: bool = False  # running mean and variance of observations, frozen in evaluation
    clip_obs: float = 10.0  # normalised observations are clipped to this, in standard deviations

    def rules(self):
        yield from super().rules()
        yield "clip_obs", self.clip_obs > 0, "be > 0"
        yield "gamma", 0 <= self.gamma <= 1, "be in [0, 1]"
        yield "learning_starts", self.learning_starts >= 0, "be >= 0"
        yield "train_freq", self.train_freq >= 1, "be >= 1"
        yield "train_freq", self.train_freq <= MOST_AT_ONCE, f"be at most {MOST_AT_ONCE:,}"
        yield "gradient_steps", self.gradient_steps >= 1 or self.gradient_steps == -1, "be >= 1, or -1"
        yield "gradient_steps", self.gradient_steps <= MOST_AT_ONCE, f"be at most {MOST_AT_ONCE:,}"


@dataclass
class DQNConfig(OffPolicyConfig):
    """Deep Q-Network (Mnih et al. 2015, doi:10.1038/nature14236), with parts of Rainbow (arXiv:1710.02298)."""

    double_dqn: bool = True  # the online network chooses the next action, the target network values it
    dueling: bool = searched(False, "true,false")  # separate streams for the state's value and the actions' advantages
    loss: str = "huber"  # huber (quadratic to an error of 1, then linear) or mse (the squared error, no factor 1/2)
    target_update_freq: int = searched(1000, "1,250,1000,10000")  # environment steps per update of the target network
    tau: float = 1.0  # share of the online network that an update of the target takes in; 1: a copy
    exploration_fraction: float = searched(
        0.1, "interval(0.01, 0.5)"
    )  # part of total_timesteps over which epsilon falls, linearly
    exploration_initial_eps: float = 1.0  # probability of a random action at the start
    exploration_final_eps: float = searched(0.05, "interval(0.0, 0.2)")  # probability of a random action from then on

    def rules(self):
        yield from super().rules()
        yield "loss", self.loss in Q_LOSSES, f"be one of {', '.join(Q_LOSSES)}"
        yield "target_update_freq", self.target_update_freq >= 1, "be >= 1"
        yield "tau", 0 < self.tau <= 1, "be in (0, 1]"
        yield "exploration_fraction", 0 <= self.exploration_fraction <= 1, "be in [0, 1]"
        yield "exploration_initial_eps", 0 <= self.exploration_initial_eps <= 1, "be in [0, 1]"
        yield "exploration_final_eps", 0 <= self.exploration_final_eps <= 1, "be in [0, 1]"


@dataclass
class TwinCriticConfig(OffPolicyConfig):
    """What SAC and TD3 share."""

    uses_dataset = "may"

    batch_size: int = searched(256, "64,128,256,512,1024")  # transitions per update
    learning_starts: int = 100  # environment steps of random actions, kept in the memory, before the first update
    max_grad_norm: float | None = None  # norms of policy's and critics' gradients are clipped to this; null: off
    tau: float = searched(0.005, TARGET_SHARES)  # share of the online networks that an update of the targets takes in
    exploration_noise: float = 0.0  # standard deviation of the noise added to the actions taken, scaled to [-1, 1]
    noise_correlation: float = 0.0  # correlation of that noise from one step of an episode to the next; 0: independent
    dataset_share: float = 0.5  # with dataset=: part of each batch drawn from it, the rest from the replay memory

    def rules(self):
        yield from super().rules()
        yield "tau", 0 < self.tau <= 1, "be in (0, 1]"
        yield "dataset_share", 0 < self.dataset_share < 1, "be in (0, 1)"
        yield "exploration_noise", 0 <= self.exploration_noise <= MOST_NOISE, f"be in [0, {MOST_NOISE}]"
        yield "noise_correlation", 0 <= self.noise_correlation < 1, "be in [0, 1)"
        correlated = self.noise_correlation > 0
        yield "exploration_noise", self.exploration_noise > 0 or not correlated, "be > 0 where noise_correlation is"


@dataclass
class EntropyConfig(Config):
    """The temperature of SAC and CQL."""

    auto_entropy: bool = True  # learn the weight of the entropy, so that the entropy comes to target_entropy
    ent_coef: float = 1.0  # weight of the policy's entropy, per nat; with auto_entropy only where it starts
    target_entropy: float | None = None  # nats, of actions scaled to [-1, 1]; null: minus their number of components

    def rules(self):
        yield from super().rules()
        yield "ent_coef", 0 <= self.ent_coef < math.inf, "be >= 0 and finite"
        yield "ent_coef", self.ent_coef > 0 or not self.auto_entropy, "be > 0 where auto_entropy is true"
        yield "target_entropy", self.target_entropy is None or math.isfinite(self.target_entropy), "be finite, or null"


@dataclass
class DelayConfig(Config):
    """What is twin-delayed in TD3 and TD3+BC, and the smoothing of their targets."""

    policy_delay: int = searched(2, "1,2,4")  # updates of the critics for each one of the policy and of all targets
    target_noise: float = searched(
        0.2, "interval(0.0, 0.5)"
    )  # standard deviation of the noise on the target's actions, which are in [-1, 1]
    noise_clip: float = 0.5  # that noise is clipped to this

    def rules(self):
        yield from super().rules()
        yield "policy_delay", self.policy_delay >= 1, "be >= 1"
        yield "target_noise", 0 <= self.target_noise <= MOST_NOISE, f"be in [0, {MOST_NOISE}]"
        yield "noise_clip", 0 <= self.noise_clip < math.inf, "be >= 0 and finite"


@dataclass
class SACConfig(EntropyConfig, TwinCriticConfig):
    """Soft Actor-Critic (Haarnoja et al. 2018, arXiv:1812.05905)."""

    learning_rate: float = searched(3e-4, LEARNING_RATES)  # step size of policy, critics and temperature at the start


@dataclass
class TD3Config(DelayConfig, TwinCriticConfig):
    """Twin Delayed DDPG (Fujimoto et al. 2018, arXiv:1802.09477)."""

    learning_rate: float = searched(1e-3, LEARNING_RATES)  # step size of policy and critics at the start
    exploration_noise: float = searched(
        0.1, "interval(0.0, 0.5)"
    )  # standard deviation of the noise added to the actions taken, scaled to [-1, 1]


@dataclass
class OfflineConfig(BatchConfig):
    """What every algorithm shares that learns from a dataset; total_timesteps counts its updates."""

    uses_dataset = "must"

    learning_rate: float = searched(3e-4, LEARNING_RATES)  # step size of every network at the start
    batch_size: int = searched(256, "64,128,256,512,1024")  # transitions per update
    max_grad_norm: float | None = None  # each optimiser's gradient norm is clipped to this; null: off
    normalize_obs: bool = False  # observations with the dataset's mean 0 and deviation 1, in training and afterwards


@dataclass
class OfflineCriticConfig(OfflineConfig):
    """What TD3+BC, IQL and CQL share."""

    gamma: float = searched(0.99, DISCOUNTS)  # discount factor per step, in [0, 1]
    tau: float = searched(0.005, TARGET_SHARES)  # share of the online networks that an update of the targets takes in

    def rules(self):
        yield from super().rules()
        yield "gamma", 0 <= self.gamma <= 1, "be in [0, 1]"
        yield "tau", 0 < self.tau <= 1, "be in (0, 1]"


@dataclass
class BCConfig(OfflineConfig):
    """Behavioural cloning: the dataset's actions, learned as labels (Pomerleau 1988, ALVINN)."""


@dataclass
class TD3BCConfig(DelayConfig, OfflineCriticConfig):
    """TD3 with a behaviour-cloning term (Fujimoto and Gu 2021, arXiv:2106.06860)."""

    alpha: float = searched(
        2.5, "tag(log, interval(0.1, 10.0))"
    )  # weight of the values, whose mean size is made 1, beside the squared distance to the data
    normalize_obs: bool = True  # observations with the dataset's mean 0 and deviation 1, in training and afterwards

    def rules(self):
        yield from super().rules()
        yield "alpha", 0 <= self.alpha < math.inf, "be >= 0 and finite"


@dataclass
class IQLConfig(OfflineCriticConfig):
    """Implicit Q-Learning (Kostrikov et al. 2021, arXiv:2110.06169)."""

    expectile: float = searched(
        0.7, "interval(0.5, 0.95)"
    )  # of the values of the data's actions that V learns: 0.5 their mean, towards 1 their maximum
    temperature: float = searched(
        3.0, "tag(log, interval(0.1, 10.0))"
    )  # beta: actions weigh exp(beta * advantage); 0 clones the data
    max_weight: float = 100.0  # such a weight is clipped to this
    policy_schedule: str = searched(
        "constant", "constant,cosine"
    )  # of the policy's step size: constant, or cosine: to 0 at total_timesteps

    def rules(self):
        yield from super().rules()
        yield "expectile", 0 < self.expectile < 1, "be in (0, 1)"
        yield "temperature", 0 <= self.temperature < math.inf, "be >= 0 and finite"
        yield "max_weight", 0 < self.max_weight < math.inf, "be > 0 and finite"
        yield "policy_schedule", self.policy_schedule in POLICY_SCHEDULES, f"be one of {', '.join(POLICY_SCHEDULES)}"


@dataclass
class CQLConfig(EntropyConfig, OfflineCriticConfig):
    """Conservative Q-Learning, CQL(H) (Kumar et al. 2020, arXiv:2006.04779)."""

    cql_alpha: float = searched(
        5.0, "tag(log, interval(0.1, 20.0))"
    )  # weight of the penalty beside the squared TD error; with auto_alpha only where it starts
    n_random_actions: int = 10  # uniform actions per state in the penalty, and as many of the policy's own
    auto_alpha: bool = False  # learn that weight, so that the penalty comes to cql_target_value (or below, at 0)
    cql_target_value: float = -1.0  # penalty aimed at, in units of return; 0: values that tell no actions apart

    def rules(self):
        yield from super().rules()
        yield "cql_alpha", 0 <= self.cql_alpha < math.inf, "be >= 0 and finite"
        yield "cql_alpha", self.cql_alpha > 0 or not self.auto_alpha, "be > 0 where auto_alpha is true"
        yield "n_random_actions", self.n_random_actions >= 1, "be >= 1"
        yield "n_random_actions", self.n_random_actions <= 1000, "be at most 1,000"
        yield "cql_target_value", math.isfinite(self.cql_target_value), "be finite"


@dataclass
class BufferConfig(Config):
    """Uniform: every transition is as likely to be drawn as any other. The base of every memory's configuration."""

    name: str = "uniform"  # which one (`rlox ls buffers`); chosen by buffer=NAME
    size: int = 1_000_000  # transitions it holds before the oldest make room
    n_step: int = searched(1, "1,3,5")  # steps of a return before it bootstraps; episode ends and time limits cut it

    frame_stacks: ClassVar[bool] = True  # whether its class takes n_stacked, to store the frames of stacks once

    def rules(self):
        yield "name", bool(self.name), "not be empty"
        yield "size", self.size >= 1, "be >= 1"
        yield "n_step", self.n_step >= 1, "be >= 1"
        yield "n_step", self.n_step <= self.size, f"be at most size ({self.size})"

    def arguments(self) -> dict[str, Any]:
        """What the buffer's class is given beside shapes and n-step returns: ``capacity``, and every other field."""
        given = {key: value for key, value in self.to_dict().items() if key not in ("name", "size", "n_step")}
        return {"capacity": self.size, **given}


@dataclass
class OutsideBufferConfig(BufferConfig):
    """A registered memory that has no configuration class of its own."""

    name: str = "outside"  # which one (`rlox ls buffers`); chosen by buffer=NAME
    kwargs: dict[str, Any] = field(default_factory=dict)  # further arguments of its class

    frame_stacks = False

    def arguments(self):
        return {"capacity": self.size, **self.kwargs}


@dataclass
class PrioritizedBufferConfig(BufferConfig):
    """Transitions are drawn in proportion to their last TD error (Schaul et al. 2016, arXiv:1511.05952)."""

    name: str = "prioritized"  # which one (`rlox ls buffers`); chosen by buffer=NAME
    alpha: float = searched(0.6, "interval(0.3, 0.9)")  # exponent of the priorities: 0 draws uniformly, 1 in proportion
    beta: float = 0.4  # exponent of the importance weights at the start; it rises to 1 at total_timesteps, linearly
    eps: float = 1e-2  # smallest priority: a TD error below it counts as it, so that no transition is lost
    weight_norm: str = "none"  # importance weights are divided by the largest of: batch, memory; none: by nothing

    def rules(self):
        yield from super().rules()
        yield "alpha", 0 <= self.alpha <= 1, "be in [0, 1]"
        yield "beta", 0 <= self.beta <= 1, "be in [0, 1]"
        yield "eps", 0 <= self.eps < math.inf, "be >= 0 and finite"
        yield "weight_norm", self.weight_norm in WEIGHT_NORMS, f"be one of {', '.join(WEIGHT_NORMS)}"


@dataclass
class MmapBufferConfig(BufferConfig):
    """Uniform; the newest transitions in memory, older ones in a file."""

    name: str = "mmap"  # which one (`rlox ls buffers`); chosen by buffer=NAME
    hot_size: int | None = None  # transitions held in memory; null: 10_000, or size where that is smaller
    folder: str | None = None  # folder of the file; null: the run's (library: a temporary one)

    frame_stacks = False

    def rules(self):
        yield from super().rules()
        yield "hot_size", 1 <= self.n_hot <= self.size, f"be between 1 and size ({self.size}), or null"

    @property
    def n_hot(self) -> int:
        """`hot_size`, or what null stands for."""
        return min(10_000, self.size) if self.hot_size is None else self.hot_size

    def arguments(self):
        return {"hot_capacity": self.n_hot, "total_capacity": self.size, "cold_path": self.folder}


@dataclass
class DatasetConfig(Config):
    """Recorded transitions to learn from."""

    source: str  # a file (.arrow .feather .ipc .parquet .npz .h5 .hdf5), or minari:ID; chosen by dataset=SOURCE
    normalize: bool = False  # standardise observations by the dataset's mean and deviation
    max_transitions: int | None = None  # only so many rows from the beginning; null: all
    reward_scale: float = 1.0  # rewards are multiplied by this,
    reward_shift: float = 0.0  # then this is added
    normalize_returns: bool = False  # first scale rewards so that best and worst episode lie 1000 apart, as IQL does

    def rules(self):
        yield "source", bool(self.source) and "\0" not in self.source, "be a file or minari:ID"
        yield "max_transitions", self.max_transitions is None or self.max_transitions >= 1, "be >= 1, or null"
        yield "reward_scale", math.isfinite(self.reward_scale) and self.reward_scale != 0, "be finite and not 0"
        yield "reward_shift", math.isfinite(self.reward_shift), "be finite"


@dataclass
class EnvConfig(Config):
    """The environment a run trains on."""

    id: str = "CartPole-v1"  # a native id (`rlox ls envs`) or any gymnasium id
    n_envs: int = 8  # environments stepped side by side
    kwargs: dict[str, Any] = field(default_factory=dict)  # keyword arguments of gymnasium.make
    wrappers: list[Any] = field(default_factory=list)  # gymnasium wrappers in order: Name or {Name: {arg: value}}
    workers: int = 0  # processes that step foreign environments; 0: the training process does
    backend: str = "auto"  # auto (native where there is one, else gymnasium), gymnasium or envpool
    reward_fn: str | None = None  # replaces the rewards learned from: sign, module:NAME (with --import), or an offer

    def rules(self):
        yield "id", bool(self.id), "not be empty"
        yield "reward_fn", self.reward_fn != "", "be module:NAME, the name of an installed reward, or null"
        yield "n_envs", self.n_envs >= 1, "be >= 1"
        yield "kwargs", _is_finite(self.kwargs), "hold no NaN and no infinity, which checkpoints cannot store"
        yield "workers", 0 <= self.workers <= self.n_envs, "be between 0 and n_envs"
        yield "backend", self.backend in ENV_BACKENDS, f"be one of {', '.join(ENV_BACKENDS)}"
        pool = self.backend == "envpool"
        yield "workers", not (pool and self.workers), "be 0 with envpool, which takes env.kwargs.num_threads"
        yield "wrappers", not (pool and self.wrappers), "be empty with envpool"


@dataclass
class EvalConfig(Config):
    """Deterministic evaluation during training, on one environment of its own."""

    n_points: int = 10  # evaluations, evenly spaced over training, beside the one at the end; 0: only that one
    n_episodes: int = 20  # episodes of one evaluation
    seed: int | None = None  # seed of the evaluation environment; null: 10_000 + seed
    stop_at: float | None = None  # stop training once the mean return reaches this; null: off
    patience: int | None = None  # stop training after this many evaluations without a better one; null: off
    max_steps: int | None = None  # steps at which an episode is cut; null: 108,000, or the env's own limit if higher
    workers: int = -1  # processes that evaluate beside training; 0: none; -1: where a core is free and it takes long

    def rules(self):
        yield "n_points", self.n_points >= 0, "be >= 0"
        yield "max_steps", self.max_steps is None or self.max_steps >= 1, "be >= 1, or null"
        yield "workers", self.workers >= -1, "be >= 0, or -1"
        stops = self.stop_at is not None or self.patience is not None
        yield "n_points", self.n_points >= 1 or not stops, "be >= 1 where stop_at or patience is set"
        yield "stop_at", self.stop_at is None or math.isfinite(self.stop_at), "be finite, or null"
        yield "patience", self.patience is None or self.patience >= 1, "be >= 1 or null"
        yield "n_episodes", self.n_episodes >= 1, "be >= 1"
        yield "seed", self.seed is None or 0 <= self.seed < 2**63, "be in [0, 2**63) or null"


@dataclass
class CheckpointConfig(Config):
    """When `checkpoints/last.safetensors` is replaced, beside training; it is also written at the end."""

    every_s: float = 60.0  # seconds between two saves
    every_steps: int | None = None  # steps (offline: updates) between two saves, if sooner; null: seconds alone
    memory: bool = True  # the replay memory too, in checkpoints/memory (off-policy): each save writes what is new

    def rules(self):
        yield "every_s", self.every_s > 0, "be > 0"
        yield "every_steps", self.every_steps is None or self.every_steps >= 1, "be >= 1, or null"


@dataclass
class MlflowConfig(Config):
    """MLflow as a mirror of the run's record."""

    tracking_uri: str = "sqlite:///outputs/mlflow.db"  # sqlite:///FILE or http(s)://SERVER
    experiment: str = "rlox"  # experiment the run is filed under
    run_name: str | None = None  # name shown in the UI; null: the run folder's name
    artifacts: bool = True  # upload the best and last checkpoints and config.yaml

    def rules(self):
        yield (
            "tracking_uri",
            self.tracking_uri.startswith(("sqlite:///", "http://", "https://")),
            "start with sqlite:///, http:// or https://",
        )
        yield "experiment", bool(self.experiment), "not be empty"


@dataclass
class WandbConfig(Config):
    """Weights & Biases as a mirror of the run's record."""

    project: str = "rlox"  # project the run is filed under
    entity: str | None = None  # team or user; null: your default
    mode: str | None = None  # online; offline: files in the run folder; disabled; null: WANDB_MODE, else online
    run_name: str | None = None  # name shown in the UI; null: the run folder's name
    group: str | None = None  # group of runs, a sweep for example
    tags: list[str] = field(default_factory=list)  # tags of the run
    artifacts: bool = True  # upload the best and last checkpoints and config.yaml

    def rules(self):
        yield "project", bool(self.project), "not be empty"
        yield "mode", self.mode in (None, *WANDB_MODES), f"be one of {', '.join(WANDB_MODES)}, or null for WANDB_MODE"

    @property
    def in_effect(self) -> str:
        """`mode`, or what the environment variable WANDB_MODE says where that is null.

        Raises
        ------
        ValueError
            If the variable says something else than a mode.
        """
        if self.mode is not None:
            return self.mode
        said = os.environ.get("WANDB_MODE") or "online"
        found = {"dryrun": "offline", "run": "online"}.get(said, said)  # W&B's own older names
        if found not in WANDB_MODES:
            raise ValueError(f"WandbConfig: WANDB_MODE must be one of {', '.join(WANDB_MODES)}, got {said!r}")
        return found


@dataclass
class TensorboardConfig(Config):
    """TensorBoard event files, mirrored from the run's record into the run folder."""

    folder: str = "tensorboard"  # below the run folder

    def rules(self):
        yield "folder", is_below(self.folder), "be a relative path without .."


@dataclass
class CsvConfig(Config):
    """A table of the run's metrics, one row a step, mirrored from the record into the run folder."""

    file: str = "metrics.csv"  # below the run folder

    def rules(self):
        yield "file", is_below(self.file) and self.file.endswith(".csv"), "be a relative path to a .csv, without .."


@dataclass
class LoggerConfig(Config):
    """The trackers that mirror the run's record; null: not used."""

    mlflow: MlflowConfig | None = None  # MLflow (logger=mlflow)
    wandb: WandbConfig | None = None  # Weights & Biases (logger=wandb)
    tensorboard: TensorboardConfig | None = None  # TensorBoard (logger=tensorboard)
    csv: CsvConfig | None = None  # a CSV file (logger=csv)


@dataclass
class RunConfig(Config):
    """One training run, as `rlox train` composes it."""

    seed: int = 0  # decides initialisation, environments, sampling and shuffling
    total_timesteps: int = 100_000  # environment steps, over all environments together; offline: updates
    schedule_timesteps: int | None = None  # steps at which schedules end; null: total_timesteps, also once raised
    max_time: str | None = None  # stop after this long, saved and evaluated: 90s, 30m, 2h; null: off
    init_from: str | None = None  # checkpoint whose weights (and normalisation) training starts from; null: fresh
    imports: list[str] = field(default_factory=list)  # modules to import first, for environments of your own (--import)
    device: str = "auto"  # auto (cuda for large policies where there is one), cpu or cuda
    backend: str = "auto"  # native (compiled collection and updates), torch, or auto: native wherever that is exact
    threads: int = 1  # CPU threads of PyTorch while training; 0: leave PyTorch's own setting
    compile: bool = False  # PyTorch compiles the losses: pays on a GPU, costs some ten seconds at the first update
    algo: Any = None  # the algorithm's hyper-parameters
    env: EnvConfig = field(default_factory=EnvConfig)  # the environment
    buffer: Any = None  # the replay memory of an off-policy algorithm; null for the others
    dataset: Any = None  # recorded transitions, for an offline algorithm or beside SAC's and TD3's memory; null: none
    eval: EvalConfig = field(default_factory=EvalConfig)  # evaluation during training
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)  # when checkpoints are written
    logger: LoggerConfig = field(default_factory=LoggerConfig)  # where metrics are mirrored to
    reference: dict[str, Any] | None = None  # the score tuned settings must reach; set by conf/tuned, informs only

    def rules(self):
        yield "seed", 0 <= self.seed < 2**63, "be in [0, 2**63)"
        yield "total_timesteps", self.total_timesteps >= 1, "be >= 1"
        yield "schedule_timesteps", self.schedule_timesteps is None or self.schedule_timesteps >= 1, "be >= 1, or null"
        timed = self.max_time is None or bool(self.max_seconds)
        yield "max_time", timed, "be a time above 0 such as 90s, 30m, 2h or 1h30m, or null"
        yield "device", self.device in DEVICES, f"be one of {', '.join(DEVICES)}"
        yield "backend", self.backend in BACKENDS, f"be one of {', '.join(BACKENDS)}"
        yield "threads", self.threads >= 0, "be >= 0"

    @property
    def max_seconds(self) -> int | None:
        """`max_time` in seconds; None where it is null, or no time."""
        found = re.fullmatch(r"(?=\d)(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", self.max_time or "")
        return sum(unit * int(n or 0) for unit, n in zip((3600, 60, 1), found.groups(), strict=True)) if found else None

    @property
    def offline(self) -> bool:
        """Whether the algorithm learns from a dataset alone."""
        return self.algo.uses_dataset == "must"

    @property
    def eval_seed(self) -> int:
        return 10_000 + self.seed if self.eval.seed is None else self.eval.seed


def tuned(algo: str, env: str) -> dict[str, Any]:
    """Return the tuned settings that ship for (algorithm, environment).

    Parameters
    ----------
    algo, env : str
        Registry key and environment id, ``tuned("ppo", "CartPole-v1")``.

    Returns
    -------
    dict
        ``algo`` (hyper-parameters), ``env``, ``total_timesteps`` and ``reference``, the score they must reach. The
        library never applies them unasked: ``PPO(env, n_envs=t["env"]["n_envs"], **t["algo"])``.

    Raises
    ------
    ValueError
        If none ship for this pair; the message lists those that do.
    """
    from importlib.resources import files

    import yaml

    root = files("rlox_cli.conf") / "tuned"
    path = root.joinpath(algo, *f"{env}.yaml".split("/"))
    if ".." in env.split("/") or not path.is_file():
        have = ", ".join(f"{a}/{e}" for a, e in tuned_pairs()) or "none"
        raise ValueError(f"tuned: no settings ship for {algo}/{env}; there are: {have}")
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def tuned_pairs() -> list[tuple[str, str]]:
    """All (algorithm, environment) pairs with tuned settings, sorted."""
    from importlib.resources import as_file, files

    with as_file(files("rlox_cli.conf") / "tuned") as root:
        found = (path.relative_to(root).with_suffix("").as_posix().split("/", 1) for path in root.rglob("*.yaml"))
        return sorted((pair[0], pair[1]) for pair in found if len(pair) == 2)
