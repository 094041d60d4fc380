"""A reward function in which a rank is killed, at the call that RLOX_TEST_DIES names, in its first life."""

import os
import signal

_calls = 0


def reward(obs, actions, rewards):
    global _calls
    _calls += 1
    first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
    if first_life and os.environ.get("RANK") == "1" and _calls == int(os.environ.get("RLOX_TEST_DIES", "-1")):
        os.kill(os.getpid(), signal.SIGKILL)
    return rewards / 2
