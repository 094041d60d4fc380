"""Native environments in gymnasium: importing this module registers them as ``rlox/<id>``.

``import rlox`` does the same where gymnasium is imported already. ``gymnasium.make("rlox.envs.gym:rlox/CartPole-v1")``
imports this module by itself. Ids that `rlox.register_env` adds later are registered as they come.
"""

import gymnasium  # noqa: F401 (without it nothing is registered)

from rlox.envs.registry import announce_all

announce_all()
