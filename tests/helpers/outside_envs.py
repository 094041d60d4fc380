"""The C structs of rlox_native.h in ctypes, so that tests can define external environments without a compiler."""

import ctypes as c

NAME = b"rlox.env.v1"
P = c.POINTER


class Batch(c.Structure):
    _fields_ = [
        ("n", c.c_int64),
        ("state", P(c.c_double)),
        ("keys", P(c.c_uint64)),
        ("episodes", P(c.c_uint64)),
        ("steps", P(c.c_int64)),
    ]


RESET = c.CFUNCTYPE(None, c.c_void_p, P(Batch), c.c_int64, P(c.c_int64), P(c.c_float))
STEP = c.CFUNCTYPE(None, c.c_void_p, P(Batch), c.c_void_p, P(c.c_float), P(c.c_double), P(c.c_uint8))
OBSERVE = c.CFUNCTYPE(None, c.c_void_p, P(Batch), P(c.c_float))
MASKS = c.CFUNCTYPE(None, c.c_void_p, P(Batch), P(c.c_uint8))


class Spec(c.Structure):
    """The struct of versions without multi-agent environments."""

    _fields_ = [
        ("struct_size", c.c_uint32),
        ("flags", c.c_uint32),
        ("env_id", c.c_char_p),
        ("state_size", c.c_int64),
        ("obs_dim", c.c_int64),
        ("n_actions", c.c_int64),
        ("act_dim", c.c_int64),
        ("act_low", P(c.c_float)),
        ("act_high", P(c.c_float)),
        ("max_episode_steps", c.c_int64),
        ("params", c.c_void_p),
        ("reset_n", RESET),
        ("step_n", STEP),
        ("observe_n", OBSERVE),
    ]


class AgentSpec(Spec):
    _fields_ = [("n_agents", c.c_int64), ("central_dim", c.c_int64), ("central_n", OBSERVE)]


class MaskedSpec(AgentSpec):
    _fields_ = [("mask_n", MASKS)]


new_capsule = c.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = c.py_object, [c.c_void_p, c.c_char_p, c.c_void_p]
_ALIVE = []  # ctypes objects whose addresses C keeps


def capsule_of(spec):
    """The capsule of an environment. Its struct is kept alive until the process ends."""
    _ALIVE.append(spec)
    return new_capsule(c.addressof(spec), NAME, None)


def bounds(*values):
    return c.cast((c.c_float * len(values))(*values), P(c.c_float))
