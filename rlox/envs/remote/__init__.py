"""Communication with processes on other machines: messages, sessions, security, and remote environments.

Importing this package does not import gRPC; servers and connections import it when they are created.
"""

from rlox import lazy

_EXPORTS = {
    "Connection": "rlox.envs.remote.client",
    "EnvSession": "rlox.envs.remote.session",
    "Message": "rlox.envs.remote.codec",
    "ProtocolError": "rlox.envs.remote.codec",
    "RemoteEnvPool": "rlox.envs.remote.pool",
    "Server": "rlox.envs.remote.server",
    "Session": "rlox.envs.remote.server",
    "Status": "rlox.envs.remote.health",
    "WorkerLost": "rlox.envs.remote.client",
    "WorkerRefused": "rlox.envs.remote.client",
    "decode": "rlox.envs.remote.codec",
    "encode": "rlox.envs.remote.codec",
    "status_of": "rlox.envs.remote.health",
}
__getattr__, __dir__, __all__ = lazy(__name__, _EXPORTS)
