"""Tuned settings by algorithm and environment."""

from __future__ import annotations

from typing import Any

from rlox.config.packages import import_package


def tuned(algo: str, env: str) -> dict[str, Any]:
    """Return the tuned settings that ship with rlox for an algorithm and an environment.

    Parameters
    ----------
    algo, env : str
        Registry key and environment id, such as ``tuned("ppo", "CartPole-v1")``.

    Returns
    -------
    dict
        ``algo`` (hyper-parameters), ``env``, ``total_timesteps`` and ``reference``, the score they must reach. The
        library never applies them by itself; use ``PPO(env, n_envs=t["env"]["n_envs"], **t["algo"])``.

    Raises
    ------
    ValueError
        If there are none for this pair; the message lists the pairs that have some.
    """
    from importlib.resources import files

    yaml = import_package("yaml", "cli", "tuned")
    root = files("rlox_cli.conf") / "tuned"
    path = root.joinpath(algo, *f"{env}.yaml".split("/"))
    if ".." in env.split("/") or not path.is_file():
        have = ", ".join(f"{a}/{e}" for a, e in tuned_pairs()) or "none"
        raise ValueError(f"tuned: no settings ship for {algo}/{env}; available: {have}")
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def tuned_pairs() -> list[tuple[str, str]]:
    """All (algorithm, environment) pairs with tuned settings, sorted."""
    from importlib.resources import as_file, files

    with as_file(files("rlox_cli.conf") / "tuned") as root:
        found = (path.relative_to(root).with_suffix("").as_posix().split("/", 1) for path in root.rglob("*.yaml"))
        return sorted((pair[0], pair[1]) for pair in found if len(pair) == 2)
