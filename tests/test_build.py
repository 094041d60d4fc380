"""What setup.py compiles and what it reuses from an earlier build, on a copy of the project with two kernels."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlox.kernels._cpu import cpu_level

PROJECT = Path(__file__).parents[1]
KERNELS = {"_cpu.pyx", "reward.pyx"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("gcc") is None and shutil.which("cc") is None, reason="needs a compiler"),
]


def build(folder: Path, **variables: str) -> list[str]:
    """Build in place with all checks enabled, and return the names of the compiled kernels."""
    environment = {**os.environ, "RLOX_CYTHON_DEBUG": "1", **variables}
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(re.findall(r"building 'rlox\.kernels\.(\w+)' extension", done.stdout + done.stderr))


def built(folder: Path) -> dict[str, bytes]:
    """The kernels in place, by name."""
    return {path.name.partition(".")[0]: path.read_bytes() for path in (folder / "kernels").glob("*.so")}


@pytest.fixture
def project(tmp_path) -> Path:
    def other(folder: str, names: list[str]) -> list[str]:
        kernels = [name for name in names if name.endswith(".pyx") and name not in KERNELS]
        return [*kernels, *(name for name in names if name.endswith((".so", "__pycache__")))]

    for name in ("rlox", "kernels"):
        shutil.copytree(PROJECT / name, tmp_path / name, ignore=other)
    (tmp_path / "kernels/reward.pyx").write_text("VALUE = 1\n")  # compiles faster than the real one
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(PROJECT / name, tmp_path / name)
    return tmp_path


def test_only_what_changed_is_compiled(project):
    assert build(project) == ["_cpu", "reward"]
    first = built(project)
    assert sorted(first) == ["_cpu", "reward"]
    assert build(project) == []

    # An editable install builds in temporary folders, which are removed afterwards.
    for path in [*(project / "build").glob("lib*"), *(project / "build").glob("temp*")]:
        shutil.rmtree(path)
    for path in (project / "kernels").glob("*.so"):
        path.unlink()
    assert build(project) == []
    assert built(project) == first

    # Build with other flags, and back.
    assert build(project, CFLAGS="-O0") == ["_cpu", "reward"]
    assert built(project)["reward"] != first["reward"]
    assert build(project) == []
    assert built(project) == first

    source = project / "kernels" / "reward.pyx"
    source.write_text(source.read_text() + "\nEDITED = 1\n")
    assert build(project) == ["reward"]
    assert built(project)["_cpu"] == first["_cpu"]
    assert built(project)["reward"] != first["reward"]


def test_a_kernel_that_does_not_compile_leaves_no_older_one(project):
    build(project)
    source = project / "kernels" / "reward.pyx"
    source.write_text(source.read_text() + '\ncdef extern from "nowhere.h":\n    int nowhere\n')
    with pytest.raises(AssertionError, match=r"nowhere\.h"):
        build(project)
    assert "reward" not in built(project)


@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="CPU levels of x86-64 on Linux")
def test_only_the_level_of_the_machine_and_the_compiler_is_built(project, tmp_path):
    levels = {"": 2, "_v3": 3, "_v4": 4}
    compiler = tmp_path / "old-cc"  # knows neither AVX2 nor x86-64-v2
    compiler.write_text('#!/bin/sh\ncase "$*" in *-mavx*|*-march=*) exit 1;; esac\nexec cc "$@"\n')
    compiler.chmod(0o755)
    options = {"RLOX_CYTHON_DEBUG": "", "CFLAGS": "-O0"}

    def found() -> list[int]:
        kernels = project / "kernels"
        return [n for folder, n in levels.items() if any((kernels / folder).glob("reward.*so"))]

    build(project, CC=str(compiler), **options)
    assert found() == [2]
    build(project, **options)
    assert found() == [cpu_level()]


@pytest.mark.skipif(not (PROJECT / ".git").exists(), reason="an sdist, which says nothing about itself")
def test_an_sdist_contains_every_file_of_the_project(tmp_path):
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(command, cwd=PROJECT, check=True, capture_output=True)
    listed = {*(tmp_path / "rlox_cli.egg-info/SOURCES.txt").read_text().splitlines()}
    files = subprocess.run(["git", "ls-files"], cwd=PROJECT, check=True, capture_output=True, text=True).stdout
    assert {*files.splitlines()} <= listed
    assert not [name for name in listed if name.endswith((".so", ".c", ".pyc"))]
