"""``rlox env``: what a bug report needs to know about a machine and its packages."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import textwrap
from importlib import metadata
from typing import Any

from rlox.config.offers import offers
from rlox_cli.terminal.console import TextConsole

_DISTRIBUTION = "rlox-cli"
_GROUPS = ("algorithms", "buffers", "envs", "loggers", "rewards")  # of entry points, each after ``rlox.``
_VARIABLES = re.compile(
    r"RLOX_(?!PULLED|VLLM_PYTHON)|OMP_|MKL_|OPENBLAS_|KMP_|GOMP_|CUDA_VISIBLE_DEVICES$|PYTHON(UTF8|OPTIMIZE|MALLOC|GIL)$|LC_ALL$|LANG$"
)
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD")
_GIB = 2**30
_WIDTH, _LABEL = 79, 12  # columns of the text, and of the labels in it


def cpu_model() -> str:
    """Return the processor's name according to the system."""
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def describe() -> dict[str, Any]:
    """Return versions, processor, GPU, mathematics libraries, compiler and packages as plain data.

    Values of environment variables are included if they decide about threads, devices or rlox itself, unless their
    names suggest a secret. Neither paths nor names of the machine or its user are.
    """
    from rlox import __version__
    from rlox.kernels import CPU_LEVEL

    return {
        "rlox": {"version": __version__, "installed_from": _source(), "kernels": _kernels(CPU_LEVEL)},
        "python": {
            "version": f"{platform.python_version()} ({platform.python_implementation()})",
            "gil": getattr(sys, "_is_gil_enabled", lambda: True)(),
        },
        "system": platform.platform(),
        "cpu": _cpu(),
        **_torch(),
        "numpy_blas": _numpy_blas(),
        "compiler": _compiler(),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if _VARIABLES.match(name) and not _SECRET.search(name)
        },
        **_packages(),
        "extensions": {
            group: {name: entry.value for name, entry in entries.items()}
            for group in _GROUPS
            if (entries := offers(f"rlox.{group}"))
        },
    }


def _source() -> str:
    """Return how rlox was installed: a wheel, or an editable checkout."""
    try:
        about = metadata.distribution(_DISTRIBUTION).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return "not installed, imported from a folder"
    if about is None:
        return "a package index or a wheel"
    return "a checkout, editable" if json.loads(about).get("dir_info", {}).get("editable") else "a folder or an address"


def _kernels(level: Any) -> str:
    machine = platform.machine()
    return f"{machine}-v{level}" if machine in ("x86_64", "AMD64") else f"{machine}, level {level}"


def _cpu() -> dict[str, Any]:
    """Return the processor's name, how many of its cores this process may use, and the machine's memory."""
    try:
        usable = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS, Windows
        usable = os.cpu_count() or 1
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GIB
    except (AttributeError, OSError, ValueError):
        memory = None
    return {
        "model": cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": usable,
        "memory_gib": None if memory is None else round(memory, 1),
    }


def _torch() -> dict[str, Any]:
    """Return what PyTorch says about GPUs, its mathematics library and its threads."""
    try:
        import torch
    except Exception as e:  # a broken installation is what a report is about
        return {"torch": {"error": f"{type(e).__name__}: {' '.join(str(e).split())}"}, "gpus": []}
    gpus = []
    if torch.cuda.is_available():
        driver = _first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
        for i in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(i)
            gpus.append(
                {
                    "name": about.name,
                    "memory_gib": round(about.total_memory / _GIB, 1),
                    "capability": f"{about.major}.{about.minor}",
                    "driver": driver,
                }
            )
    built = torch.version.cuda or torch.version.hip
    cudnn = torch.backends.cudnn.version() if torch.version.cuda else None
    blas = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    return {
        "torch": {
            "version": torch.__version__,
            "built_for": f"CUDA {built}" if torch.version.cuda else f"ROCm {built}" if built else "CPU only",
            "cudnn": None if cudnn is None else str(cudnn),
            "blas": blas[1] if blas else "unknown",
            "threads": torch.get_num_threads(),
            "interop_threads": torch.get_num_interop_threads(),
            "simd": torch.backends.cpu.get_cpu_capability(),
        },
        "gpus": gpus,
    }


def _numpy_blas() -> str:
    import numpy as np

    blas = np.show_config(mode="dicts").get("Build Dependencies", {}).get("blas", {})
    return " ".join(str(blas[key]) for key in ("name", "version") if blas.get(key)) or "unknown"


def _compiler() -> str:
    """Return the first line that the C compiler prints about itself; it builds rlox and native environments."""
    words = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    versions = (_first_line([command, "--version"]) for command in dict.fromkeys((words[0], "cc", "gcc", "clang")))
    return next(filter(None, versions), "none")


def _first_line(command: list[str]) -> str | None:
    """Return the first line that a program prints; None if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout.strip() else None


def _packages() -> dict[str, Any]:
    """Return the versions of the packages that rlox needs or can use, and the names of those that are missing."""
    installed, missing = {}, []
    for name in sorted(_requirements()):
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            missing.append(name)
    return {"packages": installed, "not_installed": missing}


def _requirements() -> set[str]:
    try:
        lines = metadata.requires(_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        lines = []
    names = {re.split(r"[^\w.-]", line, maxsplit=1)[0].lower() for line in lines}
    return {*names, "cython", "numpy", "torch"} - {_DISTRIBUTION}


def main(as_json: bool) -> None:
    """Print `describe`, as JSON or as text that is pasted into a report."""
    about = describe()
    if as_json:
        print(json.dumps(about, indent=2))
        return
    console = TextConsole()
    rlox, python, cpu, torch = about["rlox"], about["python"], about["cpu"], about["torch"]
    memory = "" if cpu["memory_gib"] is None else f", {cpu['memory_gib']} GiB"
    rows = [
        ("rlox", f"{rlox['version']}, from {rlox['installed_from']}; kernels {rlox['kernels']}"),
        ("python", f"{python['version']}{'' if python['gil'] else ', without the GIL'}"),
        ("system", about["system"]),
        ("cpu", f"{cpu['model']}, {cpu['usable_cores']} of {cpu['cores']} cores{memory}"),
    ]
    if "error" in torch:
        rows.append(("torch", f"cannot be imported: {torch['error']}"))
    else:
        rows += [
            ("torch", f"{torch['version']}, {torch['built_for']}, {torch['simd']}"),
            ("blas", f"torch {torch['blas']}, numpy {about['numpy_blas']}"),
            ("threads", f"{torch['threads']}, between operations {torch['interop_threads']}"),
        ]
    rows += [
        ("gpu", f"{gpu['name']}, {gpu['memory_gib']} GiB, compute {gpu['capability']}, driver {gpu['driver']}")
        for gpu in about["gpus"]
    ] or [("gpu", "none that PyTorch can use")]
    rows.append(("compiler", about["compiler"]))
    rows += [("variable", f"{name}={value}") for name, value in about["variables"].items()]
    rows.append(("packages", " ".join(f"{name}=={version}" for name, version in about["packages"].items())))
    if about["not_installed"]:
        rows.append(("missing", "  ".join(about["not_installed"])))
    rows += [
        (group, "  ".join(f"{name} ({value})" for name, value in entries.items()))
        for group, entries in about["extensions"].items()
    ]
    for label, text in rows:  # broken in files too, since it is pasted into reports
        lines = textwrap.wrap(text, _WIDTH - _LABEL, break_long_words=False, break_on_hyphens=False)
        for i, line in enumerate(lines):
            console.print(f"{'' if i else label:<{_LABEL}}{line}")
