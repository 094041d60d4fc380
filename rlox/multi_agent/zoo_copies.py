"""PettingZoo environments stepped one after the other into rows of the arrays of a `MultiAgentStep`."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import numpy as np

from rlox.config import shown
from rlox.envs import state as env_state
from rlox.envs.failures import NO_ANSWERS, UNANSWERED, describe_answer, require_separate
from rlox.envs.masks import MASK, without_mask
from rlox.envs.rendering import draw_frame
from rlox.envs.spec import SpaceAdapter
from rlox.multi_agent.spec import MultiAgentSpec, MultiAgentStep, group_agents
from rlox.multi_agent.zoo_answers import wrong_answer
from rlox.multi_agent.zoo_make import make_zoo_env, takes_turns
from rlox.processes.failures import failure_of, frames_of, note_cause, require_exception

STATES = ("auto", "environment", "observations")
# Classes whose ``state()`` only computes the observations of all agents again and joins them.
_JOINS = ("mpe2._mpe_utils.simple_env.SimpleEnv.state",)


class _Agent(NamedTuple):
    """One possible agent."""

    name: Any  # name in the environment
    slot: int
    group: int
    column: int
    row: Callable[[Any], Any]  # converts its observation to a row of an array
    to_env: Callable[[Any], Any]


@dataclass
class _Space:
    """Spaces of one agent's observations and actions."""

    observation: Any
    action: Any
    adapter: SpaceAdapter
    masked: bool  # whether a mask of legal actions comes with the observation


class ZooCopies(env_state.EnvCopies):
    """PettingZoo environments stepped one after the other into rows of arrays, with auto-reset and episode statistics.

    Each copy is reset once with its item of `seeds`, to inspect its observations and infos.
    """

    spec: MultiAgentSpec

    def __init__(
        self,
        env: str | Callable[..., Any],
        kwargs: Mapping[str, Any] | None,
        seeds: Sequence[int],
        where: str,
        first: int = 0,
        process: str = "",
        state: str = "auto",
    ):
        if state not in STATES:
            raise ValueError(f"{where}: state must be one of {', '.join(STATES)}, got {state!r}")
        super().__init__(env, where, first, process)
        n = len(seeds)
        self._lengths = [0] * n
        self._agents: dict[Any, _Agent] = {}
        for self.at in range(n):
            self.envs.append(make_zoo_env(env, kwargs))
        require_separate(self.envs, self.where)
        answers = [self._first_answer(i, seed) for i, seed in enumerate(seeds)]
        names = self._possible(0)
        for i in range(1, n):
            if (others := self._possible(i)) != names:
                self._refuse(i, f"its agents must be those of the first copy, {names}, got {others}")
        self._spaces = [self._space(name) for name in names]
        for i in range(n):
            self._check_spaces(i)
        self._describe(names, answers[0][1], state)
        # For each copy: the agents that act next, all agents that it lists, and each agent's return in this episode.
        self._live: list[list[_Agent]] = [[] for _ in range(n)]
        self._listed: list[list[Any]] = [[] for _ in range(n)]
        self._returns = [[0.0] * len(names) for _ in range(n)]
        self._alive = [np.zeros((n, len(group.agents)), np.bool_) for group in self.spec.groups]
        self._present = [alive.copy() for alive in self._alive]  # with those that wait for their turn
        self._inspect()

    def _first_answer(self, i: int, seed: int) -> tuple[Any, Any]:
        answer = UNANSWERED
        try:
            answer = self.envs[i].reset(seed=seed)
            obs, infos = answer
            if not (isinstance(obs, Mapping) and isinstance(infos, Mapping)):
                raise TypeError("reset must return two dicts")
        except BaseException as e:
            self._explain_failure(i, "reset", e, answer, list(getattr(self.envs[i], "agents", ())))
            raise
        return obs, infos

    def _possible(self, i: int) -> list[Any]:
        names = getattr(self.envs[i], "possible_agents", None)
        if names is None:
            self._refuse(i, "it must have possible_agents, a list of all that may act, got none; set it in __init__")
        names = list(names)
        if not names:
            self._refuse(i, "possible_agents must hold at least one agent, got none")
        twice = [name for name, count in Counter(map(str, names)).items() if count > 1]
        if twice:
            self._refuse(i, f"possible_agents must name each agent once, got {twice[0]!r} more than once in {names}")
        return names

    def _space(self, name: Any) -> _Space:
        from gymnasium import spaces

        for method in ("observation_space", "action_space"):
            if not callable(value := getattr(self.envs[0], method, None)):
                self._refuse(
                    0, f"{method} must be a method that takes an agent's name, got {shown(value)}; name it {method}s"
                )
        observation, action = self.envs[0].observation_space(name), self.envs[0].action_space(name)
        where = f"{self.where}: agent {name!r}"
        masked = isinstance(observation, spaces.Dict) and MASK in observation.spaces
        adapter = SpaceAdapter(without_mask(observation, action, where), action, where)
        adapter.spec.refuse_mixed_images(where, remedy="")
        return _Space(observation, action, adapter, masked)

    def _check_spaces(self, i: int) -> None:
        """Raise an error unless the spaces of copy `i` are unchanged, and equal to those of the first copy."""
        env = self.envs[i]
        for slot, name in enumerate(self._possible(i)):
            for kind in ("observation", "action"):
                space, now = getattr(self._spaces[slot], kind), getattr(env, f"{kind}_space")(name)
                if now is not space and now != space:
                    self._refuse(
                        i,
                        f"the {kind} space of agent {name!r} must stay unchanged, {space}, got {now}; "
                        "pad what the agent sees or may do to the largest size",
                    )

    def _describe(self, names: list[Any], infos: Any, state: str) -> None:
        """Determine the groups, the masks and the state."""
        pairs = [(space.observation, space.action) for space in self._spaces]
        kinds = [pairs.index(pair) for pair in pairs]  # equal for equal spaces
        groups = group_agents([str(name) for name in names], kinds, [space.adapter.spec for space in self._spaces])
        places = {slot: (g, a) for g, group in enumerate(groups) for a, slot in enumerate(group.slots)}
        self._agents = {
            name: _Agent(name, slot, *places[slot], space.adapter.row, space.adapter.to_env)
            for slot, (name, space) in enumerate(zip(names, self._spaces, strict=True))
        }
        # Source of each group's masks of legal actions: "observation", "info", or "" for none.
        offered = [_mask_in(infos, name) for name in names]
        self._masks = []
        for group in groups:
            first = self._spaces[group.slots[0]]
            at_info = "info" if any(offered[slot] for slot in group.slots) else ""
            self._masks.append("observation" if first.masked else at_info)
            if self._masks[-1] and not group.spec.choices:
                raise ValueError(
                    f"{self.where}: {MASK} of agent {names[group.slots[0]]!r} must come with Discrete or MultiDiscrete "
                    f"actions, got {first.action}"
                )
        groups = tuple(
            replace(group, spec=replace(group.spec, masked=bool(masks)))
            for group, masks in zip(groups, self._masks, strict=True)
        )
        dims = [space.adapter.spec.obs_dim for space in self._spaces]
        self._reads_state = state != "observations" and self._has_state(state)
        dim = self._read_state(0).size if self._reads_state else sum(dims)
        source = "environment" if self._reads_state else "observations"
        self.spec = MultiAgentSpec(tuple(map(str, names)), groups, dim, source, takes_turns(self.envs[0]))
        ends = enumerate(itertools.accumulate(dims))
        self._joints = [(slice(end - dims[slot], end), *places[slot]) for slot, end in ends]

    def _has_state(self, state: str) -> bool:
        """Return whether to read the state of the copies: it must exist and be more than their joined observations."""
        env = self.envs[0]
        method = getattr(type(getattr(env, "unwrapped", env)), "state", None)
        path = f"{getattr(method, '__module__', '')}.{getattr(method, '__qualname__', '')}"
        if state == "auto" and (method is None or path in _JOINS):
            return False
        try:
            env.state()
        except (NotImplementedError, AttributeError) as e:  # PettingZoo's own base classes raise the first
            if state == "environment":
                raise ValueError(
                    f"{self.where}: state must be observations if the environment has no state(), got 'environment'"
                ) from e
            return False
        except BaseException as e:
            self._explain_failure(0, "state", e, UNANSWERED, ())
            raise
        return True

    def _read_state(self, i: int) -> np.ndarray:
        answer = self.envs[i].state()
        state = np.asarray(answer)
        if state.dtype.kind not in "fiub":
            self._refuse(
                i,
                f"state() must return an array of numbers, got {describe_answer(answer)}; or use state=observations",
            )
        return state.reshape(-1)

    def reset(self, seeds: Sequence[int | None], out: MultiAgentStep) -> None:
        """Start a new episode in all copies, and write the inputs for the first actions."""
        out.clear()
        for i, seed in enumerate(seeds):
            self._start(i, seed, out)
        self._finish(out, list(range(len(self.envs))))

    def step(self, actions: Sequence[np.ndarray], out: MultiAgentStep) -> None:
        """Step every copy once, and write every array."""
        out.clear()
        # Scalar actions as Python numbers, since reading NumPy scalars from an array one by one is slower.
        chosen: list[Any] = [array.tolist() if array.ndim == 2 else array for array in actions]
        over = []
        for i, env in enumerate(self.envs):
            answer, live = UNANSWERED, self._live[i]
            self._lengths[i] += 1
            try:
                answer = env.step({agent.name: agent.to_env(chosen[agent.group][i][agent.column]) for agent in live})
                self._take(i, answer, out)
                if self._reads_state:
                    self._put_state(i, out.final_state)
            except BaseException as e:
                self._explain_failure(i, "step", e, answer, [agent.name for agent in live])
                raise
            if not self._live[i]:
                over.append(i)
        self._check_finite(out, "final_obs", range(len(self.envs)))
        for obs, final, present in zip(out.obs, out.final_obs, self._present, strict=True):
            obs[...] = final
            if not present.all():
                obs[~present] = 0
        for alive, now in zip(out.alive, self._alive, strict=True):
            alive[...] = now
        if self._reads_state:
            out.state[...] = out.final_state
        else:
            self._join(out.final_obs, out.final_state)
            for part, g, a in self._joints:
                if out.terminated[g][:, a].any():
                    out.final_state[out.terminated[g][:, a], part] = 0
        for i in over:
            out.ended[i] = True
            out.episode_returns[i] = self._returns[i]
            out.episode_lengths[i] = self._lengths[i]
            for mask in out.masks:
                if mask is not None:
                    mask[i] = True
            self._start(i, None, out)
        self._finish(out, over)

    def _start(self, i: int, seed: int | None, out: MultiAgentStep) -> None:
        """Start an episode of copy `i`; write its rows of ``obs``, ``masks`` and the environment's ``state``."""
        answer, env = UNANSWERED, self.envs[i]
        self._lengths[i] = 0
        self._returns[i] = [0.0] * len(self._agents)
        try:
            answer = env.reset(seed=seed)
            obs, infos = answer
            self._check_spaces(i)
            self._update_listed(i, list(env.agents), ())
            if not self._live[i]:
                self._refuse(i, "reset must leave at least one agent in agents, got none")
            for agent in self._live[i]:
                out.obs[agent.group][i, agent.column] = agent.row(obs[agent.name])
            self._put_masks(i, obs, infos, out)
            if self._reads_state:
                self._put_state(i, out.state)
        except BaseException as e:
            self._explain_failure(i, "reset", e, answer, [agent.name for agent in self._live[i]])
            raise

    def _finish(self, out: MultiAgentStep, started: Sequence[int]) -> None:
        """Write values that depend on all observations; the copies `started` have started an episode."""
        if started:
            self._check_finite(out, "obs", started)
            for alive, now in zip(out.alive, self._alive, strict=True):
                alive[...] = now
        if not self._reads_state:
            self._join(out.obs, out.state)

    def _take(self, i: int, answer: Any, out: MultiAgentStep) -> None:
        """Write the results of a step of copy `i`, and determine which agents continue."""
        obs, rewards, terminated, truncated, infos = answer
        names, returns, listed = self.envs[i].agents, self._returns[i], self._listed[i]
        same, flagged = names == listed, []
        reward_rows, final_rows = out.rewards, out.final_obs
        for name, slot, g, a, row, _ in self._live[i]:
            if same or name in names:
                reward, done, cut = rewards[name], terminated[name], truncated[name]
            else:
                done, cut = terminated.get(name, False), truncated.get(name, False)
                # An agent may be removed without flags, but if it has a flag, it must have a reward.
                reward = rewards[name] if name in rewards or done or cut else 0.0
                done = done or not cut
            if type(reward) is not float:
                if type(reward) in NO_ANSWERS:
                    raise TypeError("step must return a number for each agent")
                reward = float(reward)
            reward_rows[g][i, a] = reward
            returns[slot] += reward
            if done or cut or done is None or cut is None:
                if not NO_ANSWERS.isdisjoint((type(done), type(cut))):
                    raise TypeError("step must return two flags for each agent")
                out.terminated[g][i, a] = done
                out.truncated[g][i, a] = cut
                flagged.append(name)
            if not done or name in obs:
                final_rows[g][i, a] = row(obs[name])
        if flagged or not same or self.spec.turns:
            for agent in self._update_listed(i, list(names), flagged):
                out.final_obs[agent.group][i, agent.column] = agent.row(obs[agent.name])
        self._put_masks(i, obs, infos, out)

    def _update_listed(self, i: int, names: list[Any], flagged: Sequence[Any]) -> list[_Agent]:
        """Determine which of the agents that copy `i` lists act next, and return those that did not act before.

        An agent with a flag is dead until it has been missing from the list.
        """
        if len(set(map(str, names))) != len(names):
            twice = next(name for name, count in Counter(map(str, names)).items() if count > 1)
            self._refuse(i, f"agents must name each agent once, got {twice!r} more than once in {names}")
        unknown = next((name for name in names if name not in self._agents), None)
        if unknown is not None:
            self._refuse(
                i,
                f"agents must be among possible_agents, {list(self._agents)}, got {unknown!r}; list all agents there "
                "that may appear",
            )
        before = {agent.name for agent in self._live[i]} if self._lengths[i] else set()
        known = set(self._listed[i]) if self._lengths[i] else set()
        came = [self._agents[name] for name in names if name not in known]
        stayed = before.difference(flagged)
        self._live[i] = [self._agents[name] for name in names if name in stayed or name not in known]
        self._listed[i] = names
        self._mark_alive(i)
        return came

    def _mark_alive(self, i: int) -> None:
        """Mark the agents that act next: all that live, or where they take turns the one whose turn it is."""
        for flags in (*self._alive, *self._present):
            flags[i] = False
        for agent in self._live[i]:
            turn = not self.spec.turns or agent.name == self.envs[i].aec_env.agent_selection
            self._alive[agent.group][i, agent.column] = turn
            self._present[agent.group][i, agent.column] = True

    def _put_masks(self, i: int, obs: Any, infos: Any, out: MultiAgentStep) -> None:
        """Write the masks of legal actions for the agents of copy `i` that act next."""
        for name, _, g, a, _, _ in self._live[i]:
            mask, kind = out.masks[g], self._masks[g]
            if not self._alive[g][i, a]:
                continue
            if kind != "observation" and _mask_in(infos, name) != (kind == "info"):
                self._refuse(
                    i, f"the info of agent {name!r} must hold {MASK} in every step, from the first reset on, or in none"
                )
            if mask is None:
                continue
            flags = np.asarray((obs if kind == "observation" else infos)[name][MASK])
            if flags.shape != mask.shape[2:] or flags.dtype.kind not in "biu":
                self._refuse(
                    i,
                    f"{MASK} of agent {name!r} must be {mask.shape[2]} flags, one for each choice, got "
                    f"{describe_answer(flags)} of dtype {flags.dtype}",
                )
            mask[i, a] = flags
            choices = self.spec.groups[g].spec.choices
            if not all(part.any() for part in np.split(mask[i, a], np.cumsum(choices)[:-1])):
                self._refuse(i, f"{MASK} of agent {name!r} must allow at least one action, got none")

    def _put_state(self, i: int, to: np.ndarray) -> None:
        state = self._read_state(i)
        if state.size != to.shape[1]:
            self._refuse(
                i,
                f"state() must keep its shape, {to.shape[1]} numbers, got {state.size}; pad it, or use "
                "state=observations",
            )
        to[i] = state
        if not np.isfinite(to[i]).all():
            at = int(np.flatnonzero(~np.isfinite(to[i]))[0])
            raise FloatingPointError(
                f"{self.where}: state() must be finite, got {to[i, at]} in number {at} from environment "
                f"{self._first + i} at step {self._lengths[i]} of its episode; fix the environment"
            )

    def _join(self, arrays: Sequence[np.ndarray], to: np.ndarray) -> None:
        """Write the joined observations of all agents in order."""
        for part, g, a in self._joints:
            to[:, part] = arrays[g][:, a].reshape(len(to), -1)

    def _check_finite(self, out: MultiAgentStep, name: str, rows: Sequence[int]) -> None:
        """Raise a FloatingPointError if an observation or reward is not finite."""
        for g, group in enumerate(self.spec.groups):
            checks = [("observations", getattr(out, name)[g])] if group.spec.obs_dtype == np.float32 else []
            if name == "final_obs":
                checks.append(("rewards", out.rewards[g]))
            for what, array in checks:
                if np.isfinite(array).all():
                    continue
                i, a, *place = next(at for at in np.argwhere(~np.isfinite(array)).tolist() if at[0] in rows)
                where = f"in {group.spec.part(place[0])} " if place else ""
                raise FloatingPointError(
                    f"{self.where}: {what} of agent {group.agents[a]!r} must be finite, got "
                    f"{array.item(i, a, *place)} {where}from environment {self._first + i} at step "
                    f"{self._lengths[i]} of its episode; fix the environment"
                )

    def _get_episode(self, i: int) -> dict[str, Any]:
        return {
            "live": [agent.slot for agent in self._live[i]],
            "listed": [self._agents[name].slot for name in self._listed[i]],
            "returns": np.array(self._returns[i]),
            "length": self._lengths[i],
        }

    def set_state(self, states: Sequence[Any]) -> None:
        """Continue from the states that `rlox.envs.state.unpack` returned for each copy."""
        agents = list(self._agents.values())
        for i, (env, state) in enumerate(zip(self.envs, states, strict=True)):
            try:
                live, listed, returns = self._running(state)
                self._lengths[i] = env_state.count(state.get("length"), "the length so far")
                env_state.set_env_state(env, state.get("env"))
            except ValueError as e:
                raise ValueError(f"{self.where}: {e}") from e
            self._listed[i] = [agents[slot].name for slot in listed]
            self._live[i] = [agents[slot] for slot in live]
            self._returns[i] = returns.tolist()
            self._mark_alive(i)

    def _running(self, state: Any) -> tuple[list[int], list[int], np.ndarray]:
        """Return the agents that act next, the agents that are listed, and the returns so far."""
        content = state if isinstance(state, dict) else {}
        for key in ("live", "listed"):
            slots = content.get(key)
            if not isinstance(slots, list) or not set(map(repr, slots)) <= set(map(repr, range(len(self._agents)))):
                raise ValueError(f"a state must contain the agents that are {key}, got {repr(slots)[:80]}")
        returns = content.get("returns")
        if not isinstance(returns, np.ndarray) or returns.shape != (len(self._agents),) or returns.dtype != float:
            raise ValueError(f"a state must contain the return of each agent so far, got {repr(returns)[:80]}")
        return content["live"], content["listed"], returns

    def render(self) -> np.ndarray | None:
        """Return a picture of the first copy, (H, W, 3) uint8; None without ``render_mode="rgb_array"``."""
        if getattr(self.envs[0], "render_mode", None) != "rgb_array":
            return None
        return draw_frame(self.envs[0], f"{self.where}: {self._what(0)}")

    def close(self) -> None:
        for env in self.envs:
            if hasattr(env, "close"):
                env.close()

    def _what(self, i: int, hook: str = "") -> str:
        return f"environment {self._first + i} ({self._name}){f': {hook}' if hook else ''}"

    def _refuse(self, i: int, rule: str) -> NoReturn:
        """Raise a ValueError for a copy that breaks the interface."""
        when = f" at step {self._lengths[i]} of its episode" if self._lengths[i] else ""
        error = ValueError(f"{self.where}: {rule} ({self._what(i)}{when})")
        note_cause(error, self._what(i))
        raise error

    def _explain_failure(self, i: int, hook: str, e: BaseException, answer: Any, live: Sequence[Any]) -> None:
        """Note on `e` which copy raised it; raise a ValueError from it if that copy's answer is invalid.

        An environment must not end the process: see `require_exception`.
        """
        what = self._what(i, f"step {self._lengths[i]} of its episode" if hook == "step" else hook)
        require_exception(e, f"{self.where}: the environment", what)
        if not isinstance(e, Exception):
            return  # Ctrl-C
        if failure_of(e).what or (answer is UNANSWERED and frames_of(e.__traceback__)[-1].module == "rlox"):
            return
        spaces = {name: self._spaces[agent.slot].observation for name, agent in self._agents.items()}
        wrong = None if answer is UNANSWERED else wrong_answer(self.envs[i], hook, answer, live, spaces)
        if wrong is None:
            note_cause(e, what)
            return
        error = ValueError(f"{self.where}: {wrong} ({what})")
        note_cause(error, what)
        raise error from e


def _mask_in(infos: Any, name: Any) -> bool:
    """Return whether the info of an agent contains a mask of legal actions."""
    info = infos.get(name)
    return bool(info) and MASK in info
