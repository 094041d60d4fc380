"""The proof of an exported file: what it computes, compared with what the agent answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlox.exporting.observations import answer, graph_inputs
from rlox.exporting.policies import ExportedPolicy
from rlox.exporting.runtimes import Arrays, Run
from rlox.nn.actors import CategoricalPolicy, QPolicy
from rlox.nn.memory import Sequences
from rlox.nn.modes import acting
from rlox.nn.policies import ActorCritic

TOLERANCE = 1e-5  # of a number; of one above 1 in size, this share of it
_CHUNK = 256  # rows of one call, which bounds the memory of images


@dataclass(frozen=True)
class Check:
    """How a file compares with the agent.

    Attributes
    ----------
    runtime : str
        What ran the file.
    n : int
        Number of observations.
    source : str
        Where they are from.
    differences : dict of str to float
        The largest difference of each output: of numbers, relative to those above 1 in size; of integers, the share of
        rows in which they differ.
    n_ties : int
        Rows in which another choice has the same score up to rounding, so that both are right.
    """

    runtime: str
    n: int
    source: str
    differences: dict[str, float]
    n_ties: int = 0

    @property
    def passed(self) -> bool:
        """Whether the file computes what the agent does."""
        return all(difference <= TOLERANCE for difference in self.differences.values())


def compare(agent: Any, policy: ExportedPolicy, run: Run, runtime: str, inputs: Arrays, source: str) -> Check:
    """Run a file with `inputs` of many rows, and compare its outputs with the answers of the agent."""
    n, held = len(inputs["obs"]), graph_inputs(policy.graph, policy, inputs)
    parts = [run({name: x[i : i + _CHUNK] for name, x in held.items()}) for i in range(0, n, _CHUNK)]
    got = {name: np.concatenate([part[name] for part in parts]) for name in policy.graph.outputs}
    expected = answer(agent, policy, inputs)
    scores = _module_scores(agent, policy, inputs)
    if scores is not None and "scores" in got:
        expected["scores"] = scores
    else:
        scores = got.get("scores")
    ties = np.zeros(n, np.bool_)
    if "noise" in inputs:
        ties |= _drawn_otherwise(agent, policy, inputs, expected["next_state"], got["next_state"])
    if scores is not None:
        ties |= _tied(policy, scores, inputs.get("mask"), expected["action"], got["action"])
    rest = ~ties
    differences = {}
    for name, x in expected.items():
        theirs = got[name]
        if theirs.shape != x.shape:
            raise RuntimeError(f"export: {name} must have the shape {x.shape}, got {theirs.shape} by {runtime}")
        rows = np.ones(n, np.bool_) if name == "scores" else rest
        differences[name] = _difference(x[rows], theirs[rows])
    return Check(runtime, n, source, differences, int(ties.sum()))


def _difference(expected: np.ndarray, got: np.ndarray) -> float:
    if not len(expected):
        return 0.0
    if expected.dtype.kind in "iub":
        return float((expected != got).reshape(len(expected), -1).any(1).mean())
    apart = np.abs(expected.astype(np.float64) - got) / np.maximum(1.0, np.abs(expected))
    return float(apart.max()) if np.isfinite(apart).all() else np.inf


def _module_scores(agent: Any, policy: ExportedPolicy, inputs: Arrays) -> np.ndarray | None:
    """Return the logits or values (B, n) of the PyTorch module; None if it is not one of rlox's with such."""
    module, player = policy.module, policy.player
    if not isinstance(module, (ActorCritic, QPolicy, CategoricalPolicy)) or player.spec.continuous:
        return None
    obs, who = inputs["obs"], inputs.get("agent")
    obs = obs if agent.normalizer is None else agent.normalizer.normalize(obs)
    rows = torch.from_numpy(player.identify(obs, who)).to(agent.device)
    results = []
    with acting(module):
        for start in range(0, len(rows), _CHUNK):
            part = rows[start : start + _CHUNK]
            if policy.state_dim:
                state = torch.from_numpy(inputs["state"][start : start + _CHUNK]).to(agent.device)
                is_first = torch.zeros(len(part), dtype=torch.bool, device=agent.device)
                sequences = Sequences(state[:, : policy.state_dim], is_first)
                if isinstance(module, ActorCritic):
                    out = module.actor.follow(module.features(part), sequences)[0]
                else:
                    out = module.follow(part, sequences)[0]
            elif isinstance(module, ActorCritic):
                out = module.actor(module.features(part))
            else:
                out = module(part)
            results.append(out.cpu().numpy())
    return np.concatenate(results)


def _tied(
    policy: ExportedPolicy, scores: np.ndarray, mask: np.ndarray | None, expected: np.ndarray, got: np.ndarray
) -> np.ndarray:
    """Return the rows (B,) in which other choices were made whose scores are equal up to rounding."""
    about = policy.graph.about
    first, edges = about["first"], np.cumsum(about["n_choices"])[:-1]
    legal = scores if mask is None else np.where(mask, scores, -np.inf)
    shape = (len(scores), -1)
    tied = (expected != got).reshape(shape).any(1)
    columns = zip(np.split(legal, edges, 1), expected.reshape(shape).T, got.reshape(shape).T, first, strict=True)
    rows = np.arange(len(scores))
    for part, ours, theirs, start in columns:
        taken, other = part[rows, ours - start], part[rows, np.clip(theirs - start, 0, part.shape[1] - 1)]
        tied &= (ours == theirs) | (taken - other <= TOLERANCE * np.maximum(1.0, np.abs(taken)))
    return tied


def _drawn_otherwise(
    agent: Any, policy: ExportedPolicy, inputs: Arrays, expected: np.ndarray, got: np.ndarray
) -> np.ndarray:
    """Return the rows (B,) in which a world model drew other latents since a number is at the edge of two of them."""
    rssm = policy.module.rssm
    latents = slice(rssm.deter, rssm.deter + rssm.stoch)
    apart = (expected[:, latents] != got[:, latents]).any(1)
    tied = np.zeros(len(apart), np.bool_)
    if (rows := np.flatnonzero(apart)).size:
        for by in (-TOLERANCE, TOLERANCE):
            nearby = {name: column[rows] for name, column in inputs.items()}
            nearby["noise"] = nearby["noise"] + np.float32(by)
            again = answer(agent, policy, nearby)["next_state"]
            tied[rows] |= (again[:, latents] == got[rows][:, latents]).all(1)
    return tied
