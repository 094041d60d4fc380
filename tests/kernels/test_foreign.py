"""The kernel that steps Python environments: same arrays as a loop in Python, and where an exception came from."""

import numpy as np
import pytest

from rlox.kernels.envs.foreign import ForeignSteps

UNANSWERED = object()


class Script:
    """Returns answers from a list, and keeps the actions it received."""

    def __init__(self, answers):
        self.answers, self.given = iter(answers), []

    def step(self, action):
        self.given.append(action)
        answer = next(self.answers)
        if isinstance(answer, Exception):
            raise answer
        return answer


def made(envs, vectors=True, first_action=None, to_env=lambda action: action, row=np.asarray):
    return ForeignSteps(envs, to_env, row, vectors, first_action, frozenset((str, type(None))), UNANSWERED)


def strided(values):
    return np.repeat(np.asarray(values, np.float64), 2)[::2]


OBSERVATIONS = {
    "f32": lambda x: np.asarray(x, np.float32),
    "f64": lambda x: np.asarray(x, np.float64),
    "i64": lambda x: np.asarray(x, np.int64),
    "strided": strided,
    "swapped": lambda x: np.asarray(x, ">f8"),
    "list": list,
    "subclass": lambda x: np.asarray(x, np.float32).view(np.matrix).A1,
}


@pytest.mark.parametrize("kind", OBSERVATIONS)
@pytest.mark.parametrize("vectors", [True, False])
def test_arrays_equal_those_of_a_loop(kind, vectors):
    g = np.random.default_rng(0)
    n, steps = 3, 20
    obs = g.integers(-5, 5, (steps, n, 4))
    rewards = g.standard_normal((steps, n))
    flags = g.random((steps, n, 2)) < 0.2
    as_flag = [bool, np.bool_, int, float]
    envs = [
        Script(
            [
                (OBSERVATIONS[kind](obs[t, i]), np.float32(rewards[t, i]), *map(as_flag[t % 4], flags[t, i]), {})
                for t in range(steps)
            ]
        )
        for i in range(n)
    ]
    group, reached = made(envs, vectors, first_action=7), np.empty((n, 4), np.float32)
    actions = g.integers(0, 3, (steps, n))
    returns, lengths = np.zeros(n), np.zeros(n, np.int64)
    for t in range(steps):
        over = group.step(actions[t], reached)
        returns += rewards[t].astype(np.float32)
        lengths += 1
        np.testing.assert_array_equal(reached, obs[t])
        np.testing.assert_array_equal(group.rewards, rewards[t].astype(np.float32))
        np.testing.assert_array_equal(group.terminated, flags[t, :, 0])
        np.testing.assert_array_equal(group.truncated, flags[t, :, 1])
        np.testing.assert_array_equal(group.returns, returns)
        np.testing.assert_array_equal(group.lengths, lengths)
        assert over == np.flatnonzero(flags[t].any(1)).tolist()
        returns[over] = group.returns[over] = 0.0
        lengths[over] = group.lengths[over] = 0
    assert [env.given for env in envs] == (actions.T + 7).tolist()


def test_a_vector_of_another_length_is_passed_to_the_function_for_rows():
    asked = []

    def row(obs):
        asked.append(obs.shape)
        raise ValueError("three numbers, please")

    group = made([Script([(np.zeros(2, np.float32), 0.0, False, False, {})])], row=row, first_action=0)
    with pytest.raises(ValueError, match="three numbers"):
        group.step(np.zeros(1, np.int64), np.zeros((1, 3), np.float32))
    assert asked == [(2,)]


def test_the_failed_environment_and_its_answer_are_known():
    fine = (np.zeros(1), 1.0, False, False, {})
    for answer, error in (
        (RuntimeError("mine"), RuntimeError),
        ((np.zeros(1), None, False, False, {}), TypeError),
        ((np.zeros(1), "1", False, False, {}), TypeError),
        ((np.zeros(1), 1.0, None, False, {}), TypeError),
        ((np.zeros(1), 1.0, False, "no", {}), TypeError),
        ((np.zeros(1), 1.0, False, np.zeros(2), {}), ValueError),
        ((np.zeros(1), 1.0, False, False), ValueError),
        (3, TypeError),
    ):
        group = made([Script([fine]), Script([answer])])
        with pytest.raises(error):
            group.step(np.zeros((2, 1), np.float32), np.zeros((2, 1), np.float32))
        assert group.at == 1
        assert group.answer is (UNANSWERED if isinstance(answer, Exception) else answer)


@pytest.mark.parametrize("left", [0, 1])
def test_an_environment_that_shortens_the_list_of_environments_is_an_error(left):
    class Shortens(Script):
        def step(self, action):
            del envs[left:]
            return super().step(action)

    fine = (np.zeros(1), 1.0, False, False, {})
    envs = [Shortens([fine]), Script([fine]), Script([fine])]
    with pytest.raises(RuntimeError, match=f"envs must keep its 3 environments, got {left} in the step"):
        made(envs).step(np.zeros((3, 1), np.float32), np.zeros((3, 1), np.float32))


def test_arguments_are_checked():
    for actions, reached in (
        (np.zeros(1, np.int64), None),
        (np.zeros((), np.int64), None),
        (np.zeros(2, np.int32), None),
        (np.zeros(4, np.int64)[::2], None),
        (np.zeros(2, np.int64), np.zeros((1, 1), np.float32)),
        (None, None),
    ):
        group = made([Script([]), Script([])], first_action=0)
        with pytest.raises((TypeError, ValueError), match=r"ForeignSteps.step|actions"):
            group.step(actions, reached)
    group = made([Script([(np.zeros(1), 1, 0, 1, {})])], first_action=0)
    assert group.step(np.zeros(1, np.int64), None) == [0]  # without observations
