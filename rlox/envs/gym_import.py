"""Native environments under ``rlox/…`` in gymnasium's registry, without importing gymnasium.

gymnasium offers no entry point to register by (its plugins went with version 1.0), so the ids are registered when both
packages are there: at ``import rlox`` where gymnasium is imported already, else when it is imported.
``gymnasium.make_vec("rlox:rlox/CartPole-v1")`` needs no import of rlox at all.
"""

from __future__ import annotations

import sys


def announce_all() -> None:
    """Register every native id: built in, registered so far, or offered by an installed package."""
    from rlox.envs.registry import announce, native_env_ids, origin

    for env_id in native_env_ids():
        announce(env_id, origin(env_id))


class _AfterGymnasium:
    """A finder that only watches for gymnasium's import, steps aside, and lets the ids follow it."""

    def find_spec(self, name: str, path=None, target=None):
        if name != "gymnasium":
            return None
        from importlib.util import find_spec

        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module) -> None:
                run(module)
                announce_all()

            spec.loader.exec_module = exec_module
        return spec


def follow_gymnasium() -> None:
    """Register now if gymnasium is imported, else as soon as it is."""
    if "gymnasium" in sys.modules:
        announce_all()
    else:
        sys.meta_path.insert(0, _AfterGymnasium())
