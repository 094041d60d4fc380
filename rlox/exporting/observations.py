"""Observations of an agent's environment, with masks, states and noise, and what the agent answers to them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from rlox.checkpoint.streams import Stream
from rlox.evaluation.agents import evaluate_agents
from rlox.evaluation.episodes import evaluate
from rlox.exporting.graph import Graph
from rlox.exporting.policies import ExportedPolicy
from rlox.kernels.rng import Rng
from rlox.multi_agent.acting import Actors
from rlox.nn.acting import ActingPolicy, Inputs, acting_policy

_EPISODES = 4  # of the first evaluation
_CHUNK = 256  # rows of one call, which bounds the memory of images


class _Recorder(ActingPolicy):
    """A policy that records its inputs.

    Attributes
    ----------
    columns : dict of str to list of arrays
        Rows of ``obs``, before any normalisation, and of ``mask`` and ``state`` if there are such.
    """

    def __init__(self, policy: Any, transform: Callable[[np.ndarray], np.ndarray] | None):
        self._policy, self._transform = policy, transform
        self.state_dim, self.n_state_noise = policy.state_dim, policy.n_state_noise
        self.columns: dict[str, list[np.ndarray]] = {}

    @property
    def n(self) -> int:
        """Number of recorded rows."""
        return sum(map(len, self.columns.get("obs", ())))

    def initial(self, n: int) -> Any:
        return self._policy.initial(n)

    def noise_shape(self, n: int) -> tuple[int, ...]:
        return self._policy.noise_shape(n)

    def fill_noise(self, rng: Rng, out: np.ndarray) -> None:
        self._policy.fill_noise(rng, out)

    def require_mode(self, where: str) -> None:
        self._policy.require_mode(where)

    def mode(self, inputs: Inputs, noise: np.ndarray | None = None) -> tuple[np.ndarray, Any]:
        rows = {"obs": inputs.obs, "mask": inputs.mask}
        if inputs.state is not None:
            first = np.zeros(len(inputs.obs), np.bool_) if inputs.is_first is None else inputs.is_first
            rows["state"] = np.where(first[:, None], np.float32(0), inputs.state)
        for name, column in rows.items():
            if column is not None:
                self.columns.setdefault(name, []).append(np.array(column))
        if self._transform is not None:
            inputs.obs = np.ascontiguousarray(self._transform(inputs.obs), np.float32)
        return self._policy.mode(inputs, noise)


def record(agent: Any, policies: list[ExportedPolicy], n: int, seed: int) -> tuple[list[dict[str, np.ndarray]], str]:
    """Return, for each policy, the inputs of about `n` rows by their names in its graph, and where they come from.

    They are those of the agent's environment while it acts deterministically. Without an environment, observations are
    random numbers.
    """
    if agent.env_id is None:
        return [_random_inputs(agent, policy, n, seed) for policy in policies], "random observations"
    if getattr(agent, "several", False):
        columns = _record_agents(agent, n, seed)
    elif is_shared(agent):
        return [_random_inputs(agent, policy, n, seed) for policy in policies], "random observations"
    else:
        columns = [_record_one(agent, n, seed)]
    # All policies of several agents act until the one with the fewest rows has enough.
    rows = [{name: np.concatenate(parts) for name, parts in held.items()} for held in columns]
    kept = [_spread(held, n) for held in rows]
    inputs = [_name_inputs(policy, held, seed) for policy, held in zip(policies, kept, strict=True)]
    return inputs, f"observations of {policies[0].graph.about['env']}"


def is_shared(agent: Any) -> bool:
    """Return whether one policy, learned from a dataset, acts for agents of an environment with several."""
    return not isinstance(acting_policy(agent._evaluation_arguments(1, 0)["policy"]), ActingPolicy)


def _record_one(agent: Any, n: int, seed: int) -> dict[str, list[np.ndarray]]:
    arguments = agent._evaluation_arguments(1, seed)
    policy = acting_policy(arguments.pop("policy"), arguments.pop("device"))
    recorder = _Recorder(policy, arguments.pop("transform"))
    _play([recorder], n, seed, lambda **more: evaluate(recorder, **{**arguments, **more}))
    return recorder.columns


def _record_agents(agent: Any, n: int, seed: int) -> list[dict[str, list[np.ndarray]]]:
    arguments = agent._evaluation_arguments(1, seed)
    arguments.pop("by")
    actors = arguments.pop("policy")
    recorders = [_Recorder(policy, None) for policy in actors.policies]
    recording = Actors(actors.players, recorders)
    _play(recorders, n, seed, lambda **more: evaluate_agents(recording, **{**arguments, **more}))
    return [recorder.columns for recorder in recorders]


def _play(recorders: list[_Recorder], n: int, seed: int, play: Callable[..., Any]) -> None:
    """Run evaluations until all recorders have `n` rows, of several episodes."""
    n_episodes = _EPISODES
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "evaluate: an episode of", RuntimeWarning)
        while min(recorder.n for recorder in recorders) < n:
            play(n_episodes=n_episodes, seed=seed, max_steps=-(-2 * n // n_episodes))
            n_episodes, seed = min(2 * n_episodes, n), seed + 1


def _spread(rows: dict[str, np.ndarray], n: int) -> dict[str, np.ndarray]:
    """Return `n` rows, the first ones and others in equal distances."""
    total = len(rows["obs"])
    at = np.linspace(0, total - 1, min(n, total)).round().astype(np.int64)
    return {name: column[at] for name, column in rows.items()}


def _random_inputs(agent: Any, policy: ExportedPolicy, n: int, seed: int) -> dict[str, np.ndarray]:
    """Return inputs whose numbers vary as those that the normalisation expects, and bytes that take all values."""
    rng, spec = Rng(seed, Stream.EVALUATION), policy.player.spec
    shape = (n, *spec.obs_shape)
    if spec.image:
        rows = {"obs": (256 * rng.uniform(shape, dtype=np.float64)).astype(np.uint8)}
    else:
        obs = rng.normal(shape)
        mean, std = getattr(agent.normalizer, "mean", None), getattr(agent.normalizer, "std", None)
        rows = {"obs": obs if mean is None else (obs * std + mean).astype(np.float32)}
    if spec.masked:
        mask, edges = rng.uniform((n, sum(spec.choices))) < 0.5, np.cumsum((0, *spec.choices[:-1]))
        mask[:, edges] |= True  # each component has a legal choice
        rows["mask"] = mask
    if policy.state_dim:
        rows["state"] = np.tanh(rng.normal((n, acting_policy(agent.actor, agent.device).state_dim)))
    return _name_inputs(policy, rows, seed)


def _name_inputs(policy: ExportedPolicy, rows: dict[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """Return rows as a graph's inputs; ``state`` stays whole."""
    player, graph, obs = policy.player, policy.graph, rows["obs"]
    inputs = dict(rows)
    if player.n_ids:
        inputs["agent"] = obs[:, player.spec.obs_dim :].argmax(1)
        obs = obs[:, : player.spec.obs_dim]
    inputs["obs"] = np.ascontiguousarray(obs, player.spec.obs_dtype)
    for value in graph.inputs:
        if value.name == "noise":
            inputs["noise"] = Rng(seed, Stream.PREDICTIONS).uniform((len(obs), value.size))
        if value.name == "mask" and "mask" not in inputs:
            inputs["mask"] = np.ones((len(obs), value.size), np.bool_)
    return inputs


def answer(agent: Any, policy: ExportedPolicy, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return what the agent itself answers, by the names of the graph's outputs; scores are of the PyTorch module."""
    parts = [
        _answer(agent, policy, {name: column[start : start + _CHUNK] for name, column in inputs.items()})
        for start in range(0, len(inputs["obs"]), _CHUNK)
    ]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _answer(agent: Any, policy: ExportedPolicy, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    graph, n = policy.graph, len(inputs["obs"])
    shape = (n, *graph.outputs["action"].shape)
    mask, state = inputs.get("mask"), inputs.get("state")
    if "noise" in inputs:
        spec, adapter = policy.player.spec, policy.player.spec.adapter
        actions, state = agent.actor.mode(Inputs(inputs["obs"], mask, state), inputs["noise"])
        actions = spec.clip(actions)
        result = {"action": actions if adapter is None else adapter.write(actions), "next_state": state}
    elif getattr(agent, "several", False):
        result = _answer_for_agents(agent, policy, inputs)
    else:
        result = _name_answer(agent.predict(inputs["obs"], mask=mask, state=state))
    result["action"] = np.asarray(result["action"]).reshape(shape)
    if "next_state" in result:
        result["next_state"] = result["next_state"][:, : policy.state_dim]
    return result


def _answer_for_agents(agent: Any, policy: ExportedPolicy, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Ask `predict_all`'s way: each agent of the policy for its own rows."""
    player, n = policy.player, len(inputs["obs"])
    who = inputs.get("agent", np.zeros(n, np.int64))
    result: dict[str, np.ndarray] = {}
    for member in np.unique(who):
        rows = np.flatnonzero(who == member)
        mask, state = (None if name not in inputs else inputs[name][rows] for name in ("mask", "state"))
        given = agent.predict(inputs["obs"][rows], True, player.slots[member], mask, state=state)
        for name, column in _name_answer(given).items():
            result.setdefault(name, np.empty((n, *column.shape[1:]), column.dtype))[rows] = column
    return result


def _name_answer(given: Any) -> dict[str, np.ndarray]:
    return {"action": given[0], "next_state": given[1]} if isinstance(given, tuple) else {"action": given}


def graph_inputs(graph: Graph, policy: ExportedPolicy, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the inputs that a graph has, with the part of the state that it reads."""
    held = {value.name: inputs[value.name] for value in graph.inputs}
    if "state" in held:
        held["state"] = np.ascontiguousarray(held["state"][:, : policy.state_dim])
    return held
