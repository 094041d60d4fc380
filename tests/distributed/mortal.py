"""Reward functions that kill a rank in the call given by RLOX_TEST_DIES, before it is restarted.

RLOX_TEST_DEAD_RANK is its number; 1 by default.
"""

import os
import signal
import time

import gymnasium

_calls = 0
_DEAD = os.environ.get("RLOX_TEST_DEAD_RANK", "1")


class SlowToClose(gymnasium.Wrapper):
    def close(self):
        time.sleep(1.5)
        super().close()


def _call():
    global _calls
    _calls += 1
    first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
    if first_life and os.environ.get("RANK") == _DEAD and _calls == int(os.environ.get("RLOX_TEST_DIES", "-1")):
        os.kill(os.getpid(), signal.SIGKILL)


def reward(obs, actions, rewards):
    _call()
    return rewards / 2


def slow_reward(obs, actions, rewards):
    _call()
    if os.environ.get("RANK") != _DEAD and _calls == int(os.environ["RLOX_TEST_DIES"]):
        time.sleep(10)
    return rewards / 2


def short(prompts, completions, **columns):
    _call()
    return [1.0 / (1 + len(text)) for text in completions]
