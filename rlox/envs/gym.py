"""Native environments in gymnasium: importing this module registers them as ``rlox/<id>``.

``import rlox`` does the same if gymnasium is already imported. ``gymnasium.make("rlox.envs.gym:rlox/CartPole-v1")``
imports this module by itself. Ids that `rlox.register_env` adds later are registered when they are added.
"""

import gymnasium  # noqa: F401 (nothing is registered unless it is imported)

from rlox.envs.registry import announce_all

announce_all()
