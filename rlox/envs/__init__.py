"""Creating and stepping environments.

Native, gymnasium and EnvPool environments, in one process or several, all with the same arrays.
"""

from rlox import lazy

_EXPORTS = {
    "make_vec_env": "rlox.envs.make",
    "env_name": "rlox.envs.registry",
    "foreign_id": "rlox.envs.registry",
    "is_native": "rlox.envs.registry",
    "is_vectorised": "rlox.envs.registry",
    "native_env_ids": "rlox.envs.registry",
    "origin": "rlox.envs.registry",
    "register_env": "rlox.envs.registry",
    "EnvSpec": "rlox.envs.spec",
    "spec_of": "rlox.envs.spec",
}
__getattr__, __dir__, __all__ = lazy(__name__, _EXPORTS)
