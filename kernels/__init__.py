"""Compiled kernels, and the choice of the CPU level they run at.

Wheels have every kernel three times: for x86-64-v2 (any current x86-64 machine), and in the folders ``_v3`` and ``_v4``
for x86-64-v3 (AVX2) and x86-64-v4 (AVX-512). A build from source has only the level of the build machine, unless
``RLOX_CPU_LEVELS=all`` is set. The level is chosen here, at import: its folder goes first on the package's search path,
so that modules are found in it under their normal names.

``RLOX_CPU_LEVEL=2``, ``3`` or ``4`` forces a level, for instance to get identical bits on two machines.
"""

# Everything is guarded: with the repository root on sys.path this folder is importable as plain `kernels`,
# the name of a Hugging Face package that transformers probes for, and that probe must find nothing.
if __name__ == "rlox.kernels":
    import os
    from importlib.machinery import EXTENSION_SUFFIXES
    from pathlib import Path

    from rlox.kernels._cpu import cpu_level as _cpu_level

    _HERE = Path(__file__).parent

    def _choose_level() -> int:
        """Return the forced level if there is one, else the best one that was built and that the CPU supports."""
        cpu = _cpu_level()
        folders = {2: _HERE, 3: _HERE / "_v3", 4: _HERE / "_v4"}
        built = [n for n, folder in folders.items() if any((folder / f"rng{s}").is_file() for s in EXTENSION_SUFFIXES)]
        if built and min(built) > cpu:
            raise ImportError(
                f"rlox.kernels: these kernels were built for x86-64-v{min(built)}, and this CPU supports only "
                f"x86-64-v{cpu}. Install rlox on this machine, or build it with RLOX_CPU_LEVELS=all for machines that "
                "differ"
            )
        forced = os.environ.get("RLOX_CPU_LEVEL", "")
        if not forced:
            return max((level for level in built if level <= cpu), default=2)
        if forced not in ("2", "3", "4"):
            raise ValueError(
                f"rlox.kernels: RLOX_CPU_LEVEL must be 2, 3 or 4 (for x86-64-vN), got {forced!r}; "
                "unset it to use the best level of this machine"
            )
        level = int(forced)
        if level > cpu:
            raise ValueError(
                f"rlox.kernels: RLOX_CPU_LEVEL must be at most the level of this CPU ({cpu}), got {level}; "
                "unset it to use the best level of this machine"
            )
        if level not in built:
            raise ValueError(
                f"rlox.kernels: RLOX_CPU_LEVEL must be a level that was built {built}, got {level}; unset "
                "it, or reinstall with RLOX_CPU_LEVELS=all, without RLOX_CYTHON_DEBUG and with a compiler that "
                "supports the level"
            )
        return level

    CPU_LEVEL: int = _choose_level()

    def prefer_level(path: list[str], package: str) -> None:
        """Put the folders of the chosen CPU level in front of a kernel package's search path.

        Parameters
        ----------
        path
            The ``__path__`` of the package, changed in place.
        package
            The package's name below ``rlox.kernels``, such as ``"envs"``; ``""`` for ``rlox.kernels``.
        """
        # Lower levels stay behind the chosen one, so that a module which is missing at one level (its
        # build is optional) is still found at the next.
        levels = range(CPU_LEVEL, 2, -1)
        path[:0] = [str(_HERE / f"_v{level}" / package) for level in levels]

    prefer_level(__path__, "")

    __all__ = ["CPU_LEVEL", "prefer_level"]
