"""``rlox new env``: a gymnasium environment as a package, with a test that checks it and trains on it."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

import gymnasium

from rlox.envs.registry import is_multi_agent, is_native
from rlox.envs.tensor import table
from rlox_cli.new.files import check_name, class_name, pyproject, write_package
from rlox_cli.terminal.errors import UsageError

_MODULE = '''"""{title}: an environment for `rlox train --import {name} env={cls}-v0`."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class {cls}(gymnasium.Env):
    """A point on a line that must reach a goal: replace it by your task.

    Observations are the position and the goal, in [-1, 1]. Actions: 0 moves left, 1 right. Each step costs 0.1, and the
    goal pays 1.
    """

    metadata = {{"render_modes": ["rgb_array"], "render_fps": 10}}

    def __init__(self, step: float = 0.1, render_mode: str | None = None):
        self.step_size = step  # `env.kwargs.step=0.2` on the command line
        self.render_mode = render_mode
        self.observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)  # makes self.np_random, the only source of randomness
        self.position, self.goal = self.np_random.uniform(-1, 1, 2)
        return self._observe(), {{}}

    def step(self, action):
        self.position = np.clip(self.position + (self.step_size if action == 1 else -self.step_size), -1, 1)
        reached = bool(abs(self.position - self.goal) <= self.step_size / 2)
        # terminated: the task itself has ended. The time limit below truncates, which rlox treats differently.
        return self._observe(), 1.0 if reached else -0.1, reached, False, {{}}

    def render(self):
        picture = np.full((64, 256, 3), 255, np.uint8)
        for x, colour in ((self.goal, (0, 160, 0)), (self.position, (0, 0, 200))):
            middle = int((x + 1) / 2 * 243)
            picture[16:48, middle : middle + 12] = colour
        return picture

    def _observe(self):
        return np.array([self.position, self.goal], np.float32)


gymnasium.register("{cls}-v0", {cls}, max_episode_steps=50)
'''

_TEST = '''"""Tests of {name}.py. Run them with `pytest`."""

import gymnasium
import numpy as np
from gymnasium.utils.env_checker import check_env
from rlox import PPO

from {name} import {cls}


def test_it_is_a_gymnasium_environment():
    check_env({cls}(render_mode="rgb_array"))


def test_the_same_seed_gives_the_same_episode():
    def play(seed):
        env = gymnasium.make("{cls}-v0")
        env.action_space.seed(0)
        rows = [env.reset(seed=seed)[0]]
        for _ in range(20):
            obs, _, terminated, truncated, _ = env.step(env.action_space.sample())
            rows.append(obs)
            if terminated or truncated:
                break
        return np.concatenate(rows)

    assert np.array_equal(play(1), play(1))
    assert not np.array_equal(play(1), play(2))


def test_every_episode_ends():
    env = gymnasium.make("{cls}-v0")
    env.reset(seed=0)
    for _ in range(env.spec.max_episode_steps):
        _, reward, terminated, truncated, _ = env.step(0)
        assert np.isfinite(reward)
        if terminated or truncated:
            return
    raise AssertionError("the episode is longer than its time limit")


def test_ppo_learns_on_it():
    agent = PPO("{cls}-v0", n_envs=8, seed=0, n_steps=64, learning_rate=3e-3)
    before = agent.evaluate(20, seed=1).returns.mean()
    agent.train(12_000)
    assert agent.evaluate(20, seed=1).returns.mean() > before
'''

_README = """# {title}

An environment with gymnasium's interface, in `{name}.py`.

    pytest                                              # it keeps gymnasium's rules, and PPO learns on it
    rlox train --import {name} env={cls}-v0
    rlox train --import {name} env={cls}-v0 env.kwargs.step=0.2 env.n_envs=16
    rlox eval --import {name} outputs/… --video episode.mp4

`gymnasium.register` at the end of the module sets the time limit. `--import` is recorded with the run. After
`pip install -e .`, `--import {name}` works in every folder. A step in Python takes tens of microseconds; for one that
takes nanoseconds, write a native environment (the manual's page "Native extensions").
"""


def make_environment(name: str, folder: Path | None) -> None:
    """Write a package with the environment `name`.

    Raises
    ------
    UsageError
        If the name is no name of a module, or its id is taken: rlox's own environment would be used instead.
    """
    check_name(name)
    folder = Path(name) if folder is None else folder
    cls = class_name(name)
    known = {*table.tensor_env_ids(), *table.tensor_agent_ids(), *gymnasium.registry}
    if (env_id := f"{cls}-v0") in known or is_native(env_id) or is_multi_agent(env_id):
        raise UsageError(f"NAME must give a new id, but there is an environment {env_id}; choose another, got {name}")
    commands = [
        ("change", f"{folder / name}.py"),
        ("test", f"cd {quote(str(folder))} && pytest"),
        ("train", f"cd {quote(str(folder))} && rlox train --import {name} env={cls}-v0"),
    ]
    write_package(folder, texts_of(name), commands)


def texts_of(name: str) -> dict[str, str]:
    """Return the files of the package."""
    values = {"name": name, "cls": class_name(name), "title": name.replace("_", " ").capitalize()}
    return {
        f"{name}.py": _MODULE.format(**values),
        f"test_{name}.py": _TEST.format(**values),
        "pyproject.toml": pyproject(name, f"The environment {values['cls']}-v0 for rlox and gymnasium."),
        "README.md": _README.format(**values),
    }
