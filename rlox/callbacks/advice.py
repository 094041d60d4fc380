"""Advice on settings and metrics that look wrong."""

from __future__ import annotations

import math
import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rlox.callbacks.base import Callback, _count, _number


@dataclass(frozen=True)
class _Advice:
    """Advice `line`, given when `holds` was true for `updates` updates in a row; needs a `metric` that is a number."""

    metric: str
    holds: Callable[[float], bool]
    updates: int
    line: str


_ADVICE = (
    _Advice(
        "explained_variance",
        lambda value: value < -0.05,  # a critic that is as good as the mean varies around 0
        20,
        "explained variance is below 0 ({value:.2f}): the critic predicts returns worse than their mean would; "
        "raise vf_coef or learning_rate, normalise observations or rewards, or check that gamma fits the episodes",
    ),
    _Advice(
        "equal_groups",
        lambda value: value > 0.95,
        50,
        "all completions of a prompt have the same reward in {value:.0%} of the groups, which teaches nothing: raise "
        "temperature or group_size, use a reward with more levels, or choose prompts that are neither too hard nor "
        "too easy",
    ),
    _Advice(
        "approx_kl",
        lambda value: value > 0.1,
        10,
        "approx_kl is above 0.1 ({value:.2f}): each update moves the policy far from the one that collected its data; "
        "lower learning_rate or n_epochs, or set target_kl=0.02",
    ),
    _Advice(
        "clip_fraction",
        lambda value: value > 0.5,
        10,
        "clip_fraction is above 0.5 ({value:.2f}): most samples no longer contribute a gradient; lower learning_rate "
        "or n_epochs, or raise batch_size",
    ),
)
_ENTROPY = (
    "the policy's entropy fell below 1 % of its initial value ({value:.2g} of {start:.2g} nats): it has stopped "
    "exploring; if the return is still too low, raise ent_coef or lower learning_rate"
)
_GRAD_NORM = (
    "grad_norm is more than 100 times its recent median ({value:.3g} against {median:.3g}): the loss is exploding; "
    "lower learning_rate, set max_grad_norm=0.5, or normalise rewards"
)
_LASTING, _RECENT = 3, 50  # updates for which entropy and grad_norm must be out of range; updates of the median


def plan_advice(algorithm) -> Iterator[tuple[str, str]]:
    """Yield well-known problems of an algorithm's settings and environment, each as a kind and a line of advice."""
    c, spec = algorithm.config, getattr(algorithm, "spec", None)
    if spec is None:  # a language model has no spec
        return
    if getattr(c, "normalize_advantages", False) and c.n_steps * algorithm.n_envs == 1:
        yield (
            "one_row",
            "a rollout is a single transition, whose advantage has no variance and is not normalised; raise n_steps or "
            "n_envs, or set normalize_advantages=false",
        )
    normalizer = getattr(algorithm, "normalizer", None)
    scales = hasattr(c, "normalize_obs")  # a world model squashes large numbers itself
    if scales and spec.obs_bytes is not None and (normalizer is None or not normalizer.obs):
        image = len(spec.obs_bytes) == 2 and min(spec.obs_bytes) >= 36
        shape = ", ".join(map(str, (*spec.obs_bytes, 1)))
        remedy = f"for an image use the wrapper {{ReshapeObservation: {{shape: [{shape}]}}}}, else " if image else ""
        yield (
            "unscaled",
            f"observations are bytes of shape {spec.obs_bytes}, {spec.obs_dim:,} numbers from 0 to 255 that the "
            f"network sees unscaled; {remedy}set normalize_obs=true",
        )


class AdviceCallback(Callback):
    """Watches the metrics for well-known problems of training, and gives advice on each problem once.

    At the start it checks the settings, for rollouts of a single transition whose advantage should be normalised, and
    for byte observations that are neither an image nor normalised.

    ===================  ========================================================
    explained_variance   below -0.05 for 20 updates in a row
    approx_kl            above 0.1 for 10 updates in a row
    equal_groups         above 0.95 for 50 updates in a row
    clip_fraction        above 0.5 for 10 updates in a row
    entropy              of a discrete policy: below 1 % of its start, for 3
    grad_norm            above 100 times the median of the last 50, for 3
    ===================  ========================================================

    Parameters
    ----------
    tell : callable, optional
        Called with each line: what it means and what to change. None prints the lines to stderr.
    plan : bool
        Whether to check the settings; ``rlox train`` does this before the run.
    """

    def __init__(self, tell: Callable[[str], None] | None = None, plan: bool = True):
        self.tell = tell
        self.plan = plan
        self.given: list[str] = []  # kinds, by their metric
        self._streaks: dict[str, int] = {}
        self._entropy_start: float | None = None
        self._grad_norms: deque[float] = deque(maxlen=_RECENT)

    def state(self) -> dict[str, Any]:
        norms = [norm for norm in self._grad_norms if math.isfinite(norm)]
        return {"told": self.given, "streaks": self._streaks, "entropy_start": self._entropy_start, "grad_norms": norms}

    def set_state(self, state: dict[str, Any]) -> None:
        self.given = list(state["told"])
        self._streaks = {kind: _count(n) for kind, n in state["streaks"].items()}
        start = state["entropy_start"]
        self._entropy_start = None if start is None else _number(start)
        self._grad_norms.extend(map(_number, state["grad_norms"]))

    def on_training_start(self, *, algorithm=None, **info: Any) -> None:
        if self.plan and hasattr(algorithm, "config"):
            for kind, line in plan_advice(algorithm):
                self._give(kind, line)

    def on_step(self, *, metrics: dict[str, float] | None = None, algorithm=None, **info: Any) -> bool:
        if metrics is None:
            raise TypeError('AdviceCallback needs metrics=…; pass metrics={"approx_kl": …, "grad_norm": …} to on_step')
        for advice in _ADVICE:
            value = metrics.get(advice.metric, math.nan)
            # Explained variance is NaN if all returns are equal, which is neither good nor bad.
            if not math.isnan(value):
                self._check(advice.metric, advice.holds(value), advice.updates, advice.line, value=value)
        # In a hand-written loop, the kind of actions that the entropy is of is unknown.
        spec = getattr(algorithm, "spec", None)
        if "entropy" in metrics and spec is not None and spec.discrete:
            value = metrics["entropy"]
            if self._entropy_start is None:
                self._entropy_start = value
            start = self._entropy_start
            self._check("entropy", value < 0.01 * start, _LASTING, _ENTROPY, value=value, start=start)
        if "grad_norm" in metrics:
            value = metrics["grad_norm"]
            if len(self._grad_norms) >= _RECENT // 5:
                median = statistics.median(self._grad_norms)
                self._check("grad_norm", value > 100.0 * median > 0.0, _LASTING, _GRAD_NORM, value=value, median=median)
            self._grad_norms.append(value)
        return True

    def _check(self, kind: str, holds: bool, updates: int, line: str, **values: float) -> None:
        self._streaks[kind] = self._streaks.get(kind, 0) + 1 if holds else 0
        if self._streaks[kind] == updates:
            self._give(kind, line.format(**values))

    def _give(self, kind: str, text: str) -> None:
        if kind in self.given:
            return
        self.given.append(kind)
        if self.tell is None:
            print(f"advice: {text}", file=sys.stderr)
        else:
            self.tell(text)
