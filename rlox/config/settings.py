"""Settings that ship with rlox: presets of algorithms, and tuned settings by algorithm and environment."""

from __future__ import annotations

import re
from typing import Any

from rlox.config.packages import import_package


def preset(name: str) -> dict[str, Any]:
    """Return the hyper-parameters of a preset that ships with rlox, an algorithm with other settings.

    Parameters
    ----------
    name : str
        As after ``algo=``: ``crossq``, ``xqc``, ``flashsac``, ``droq``, ``redq`` and ``tqc`` of SAC, and others;
        ``rlox ls algos`` lists them with their algorithms.

    Returns
    -------
    dict
        For the algorithm's class: ``SAC(env, **preset("crossq"))``. If the preset chooses another memory, they include
        ``buffer``, the memory and its settings.

    Raises
    ------
    ValueError
        If there is no such preset; the message names the nearest.
    """
    from importlib.resources import files

    import yaml

    from rlox.config.base import choice

    root = files("rlox_cli.conf") / "algo"
    texts = {file.name.removesuffix(".yaml"): file.read_text(encoding="utf-8") for file in root.iterdir()}
    # The first default of a preset is the schema of another algorithm.
    presets = sorted(one for one, text in texts.items() if not re.search(rf"\b{one}_schema\b", text))
    content = yaml.safe_load(texts[choice("preset", "name", name, presets)])
    chosen = next(one["override /buffer"] for one in content["defaults"] if "override /buffer" in one)
    memory = {"name": chosen, **content.get("buffer", {})}
    return content["algo"] | ({} if memory == {"name": "uniform"} else {"buffer": memory})


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
