"""Environments as tensor programs: N copies live on one device, a GPU or the CPU, and nothing leaves it."""

from rlox import lazy

_EXPORTS = {
    "create": "rlox.envs.tensor.table",
    "JaxVecEnv": "rlox.envs.tensor.adapters",
    "open_unit": "rlox.envs.tensor.philox",
    "register_vec_env": "rlox.envs.tensor.table",
    "step_tensors": "rlox.envs.tensor.vec_env",
    "tensor_agent_ids": "rlox.envs.tensor.table",
    "tensor_env_ids": "rlox.envs.tensor.table",
    "TensorAgents": "rlox.envs.tensor.base",
    "TensorEnv": "rlox.envs.tensor.base",
    "TensorVecEnv": "rlox.envs.tensor.vec_env",
    "TorchVecEnv": "rlox.envs.tensor.adapters",
}
__getattr__, __dir__, __all__ = lazy(__name__, _EXPORTS)
