"""Environments with several agents, behind the same arrays (`MultiAgentVecEnv`).

They are PettingZoo environments or native environments, in this process or in workers.
"""

from rlox import lazy

_EXPORTS = {
    "Group": "rlox.multi_agent.spec",
    "is_multi_agent": "rlox.envs.registry",
    "make_multi_agent_env": "rlox.multi_agent.vec_env",
    "MultiAgentSpec": "rlox.multi_agent.spec",
    "MultiAgentStep": "rlox.multi_agent.spec",
    "MultiAgentVecEnv": "rlox.multi_agent.vec_env",
    "parallel_env": "rlox.multi_agent.scene",
    "ParallelPettingZooVecEnv": "rlox.multi_agent.workers",
    "PettingZooVecEnv": "rlox.multi_agent.pettingzoo",
    "NativeMultiAgentVecEnv": "rlox.multi_agent.native",
}
__getattr__, __dir__, __all__ = lazy(__name__, _EXPORTS)
