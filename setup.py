"""Build the Cython kernels: each once for every machine, the same C again for newer x86-64 CPUs.

``RLOX_CPU_LEVELS=all`` builds every level, as wheels do. Otherwise only the level of this machine is built, beside a
baseline for other machines that use the same folder, which is not optimised: `rlox.kernels` warns where it is used.

``RLOX_CYTHON_DEBUG=1`` builds the baseline only, with Cython's run-time checks and asserts on. With it,
``RLOX_SANITIZE=address`` or ``address,undefined`` adds the compiler's sanitizers; Python then needs their library
preloaded, as tests/sanitize.sh does.
"""

import hashlib
import multiprocessing
import os
import re
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

DEBUG = os.environ.get("RLOX_CYTHON_DEBUG") == "1"
DIRECTIVES = {
    "language_level": 3,
    "annotation_typing": False,  # annotations are for readers; `n: int` must not refuse a numpy.int64
    "boundscheck": DEBUG,
    "initializedcheck": DEBUG,
    "nonecheck": DEBUG,
    "overflowcheck": False,  # the generators' arithmetic wraps on purpose
    "wraparound": False,
    "cdivision": not DEBUG,
}
# No contraction to FMA: the levels then give the same bits. The other two let loops with comparisons,
# selects and sqrt vectorise (twice as fast), and keep NaN and infinity as IEEE has them, unlike -ffast-math.
FLAGS = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-g0", "-Wno-psabi"]
# Kernels with networks in them: compared within a tolerance, not bit for bit, and a product without FMA takes twice
# the time.
FUSED = (".nn.", ".llm.decoder", ".llm.parts", ".llm.vocabulary")
HEADERS = ("include", "nn", "llm", "envs", "buffers")  # folders that hold some
LINK_FLAGS = []
SANITIZE = os.environ.get("RLOX_SANITIZE", "")
if SANITIZE and not DEBUG:
    raise SystemExit("setup.py: RLOX_SANITIZE needs RLOX_CYTHON_DEBUG=1, which builds apart from the release")
if DEBUG:
    FLAGS = ["-O1", "-ffp-contract=off", "-g", "-UNDEBUG", "-Wno-psabi"]
if SANITIZE:
    LINK_FLAGS = [f"-fsanitize={SANITIZE}"]
    FLAGS += [*LINK_FLAGS, "-fno-omit-frame-pointer"]
# What an x86-64 CPU of these levels must have, by the names of /proc/cpuinfo; kernels/_cpu.pyx asks the same at import.
FEATURES = {
    "_v3": {"avx2", "fma", "bmi1", "bmi2"},
    "_v4": {"avx2", "fma", "bmi1", "bmi2", "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
}
BASELINE: list[str] = []
LEVELS: dict[str, list[str]] = {}


def levels_of_this_machine() -> set[str]:
    """The best level that the CPU runs, or all where that cannot be read."""
    try:
        flags = set(re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[1].split())
    except (OSError, TypeError):
        return set(FEATURES)
    return {max((level for level, needed in FEATURES.items() if needed <= flags), default="")} - {""}


if sysconfig.get_platform() == "linux-x86_64":
    BASELINE = ["-march=x86-64-v2"]
    wanted = os.environ.get("RLOX_CPU_LEVELS", "machine")
    if wanted not in ("all", "machine"):
        raise SystemExit(f"setup.py: RLOX_CPU_LEVELS must be all or machine, got {wanted!r}")
    built = set(FEATURES) if wanted == "all" else levels_of_this_machine()
    if not DEBUG:
        LEVELS = {
            "_v3": ["-march=x86-64-v3"],
            # 512 bits: Pendulum 25 % faster than with 256, the rest alike (Sapphire Rapids, GCC 12).
            "_v4": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
        }
        LEVELS = {level: flags for level, flags in LEVELS.items() if level in built}
        if LEVELS and wanted == "machine":
            BASELINE.append("-O0")  # compiles in less than half the time of -O1


class BuildKernels(build_ext):
    """Runs Cython once per kernel and compiles its C once per CPU level.

    What was compiled is kept in build/kernels under a fingerprint of what decides it, and is copied from there while
    that is the same: by a second `pip install -e .`, whose build has folders of its own, or after a build with checks.
    """

    KEPT = Path("build", "kernels")
    MOST = 4  # versions of a kernel: at this machine's level, at all levels, with checks, with sanitizers

    def finalize_options(self) -> None:
        # Here and not at import, so that commands which compile nothing do not need Cython or NumPy.
        self.distribution.ext_modules = kernel_extensions()
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def run(self) -> None:
        folder = Path("kernels") if self.inplace else Path(self.build_lib, "rlox", "kernels")
        for level in FEATURES.keys() - LEVELS.keys():
            shutil.rmtree(folder / level, ignore_errors=True)
        extensions, self.extensions = self.extensions, []
        kept = {extension.name: self.KEPT / f"{extension.name}.{fingerprint(extension)}" for extension in extensions}
        for extension in extensions:
            target = self.target(extension)
            if kept[extension.name].exists() and not self.force:
                replace(kept[extension.name], target)
                kept[extension.name].touch()
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                # A level whose compilation fails is skipped, and an old file of it would shadow the newer baseline.
                target.unlink(missing_ok=True)
                Path(self.build_lib, self.get_ext_filename(extension.name)).unlink(missing_ok=True)
                self.extensions.append(extension)
        super().run()
        for extension in self.extensions:
            if self.target(extension).exists():
                replace(self.target(extension), kept[extension.name])
        for extension in extensions:
            versions = sorted(self.KEPT.glob(f"{extension.name}.*"), key=lambda path: path.stat().st_mtime)
            for old in versions[: -self.MOST]:
                old.unlink()
        self.extensions = extensions
        # What the kernels stand for, read once here and not by every process: see rlox/native/shadows.py.
        sys.path.insert(0, str(Path(__file__).parent.resolve()))
        from rlox.native.shadows import keep

        keep("rlox/native" if self.inplace else Path(self.build_lib, "rlox", "native"))

    def target(self, extension: Extension) -> Path:
        """Where Python finds a kernel."""
        return Path(self.get_ext_fullpath(extension.name))


def replace(source: Path, target: Path) -> None:
    """Copy a file at once: nothing ever sees half of it, and processes that have the old one loaded keep it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    shutil.copyfile(source, partial)
    shutil.copymode(source, partial)
    partial.replace(target)


def fingerprint(extension: Extension) -> str:
    """A hash of everything that decides what an extension compiles to, but for the compiler's own version."""
    import numpy

    of = hashlib.sha256(repr((extension.extra_compile_args, extension.extra_link_args)).encode())
    of.update(repr((extension.define_macros, sys.version, numpy.__version__, sysconfig.get_platform())).encode())
    of.update(repr([os.environ.get(name) for name in ("CC", "CFLAGS", "CPPFLAGS", "LDFLAGS")]).encode())
    for path in [*extension.sources, *(path for path in extension.depends if path.endswith(".h"))]:
        text = Path(path).read_text()
        # Cython notes where it found NumPy and its own files, which in pip's builds are folders of that build.
        text = re.sub(r"/\* BEGIN: Cython Metadata.*?END: Cython Metadata \*/", "", text, count=1, flags=re.DOTALL)
        of.update(re.sub(r'"[^"\n]*/site-packages/(Cython/Includes/)?', '"', text).encode())
    return of.hexdigest()[:16]


def kernel_extensions() -> list[Extension]:
    """Return every ``kernels/**/*.pyx`` as an extension of ``rlox.kernels``, at each CPU level."""
    import numpy
    from Cython.Build import cythonize

    def extension(name: str, source: str, flags: list[str], optional: bool) -> Extension:
        folders = ["include", "envs", "buffers"]
        folders += ["nn"] if any(part in name for part in FUSED) else []
        folders += ["llm"] if ".llm." in name else []
        headers = [str(path) for folder in folders for path in sorted(Path("kernels", folder).glob("*.h"))]
        contract = ["-ffp-contract=fast"] if any(part in name for part in FUSED) else []
        return Extension(
            name,
            [source],
            include_dirs=[numpy.get_include(), *(f"kernels/{folder}" for folder in HEADERS)],
            define_macros=[("NPY_NO_DEPRECATED_API", "NPY_2_0_API_VERSION")],
            extra_compile_args=FLAGS + flags + contract,
            extra_link_args=LINK_FLAGS,
            depends=headers,
            optional=optional,  # a level that an old compiler does not know is skipped, not an error
        )

    modules = sorted(Path("kernels").rglob("*.pyx"))
    names = ["rlox." + ".".join(path.with_suffix("").parts) for path in modules]
    # `from rlox.kernels.types cimport f64` reads build/names/rlox/kernels/types.pxd.
    link = Path("build/names/rlox/kernels")
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink():
        link.symlink_to("../../../kernels")
    build_dir = Path("build/cython-debug" if DEBUG else "build/cython")
    changed = Path(__file__).stat().st_mtime
    extensions = cythonize(
        [extension(n, str(p), BASELINE, False) for n, p in zip(names, modules, strict=True)],
        include_path=["build/names"],
        build_dir=str(build_dir),
        # Where processes start by forking; otherwise each would run this file first.
        nthreads=(os.cpu_count() or 1) if multiprocessing.get_start_method() == "fork" else 0,
        # Cython looks at the sources' times only; this file holds the directives.
        force=any(c.stat().st_mtime < changed for c in build_dir.rglob("*.c")),
        compiler_directives=DIRECTIVES,
    )
    for level, flags in LEVELS.items():
        for baseline in extensions[: len(modules)]:
            if baseline.name == "rlox.kernels._cpu":
                continue  # it chooses the level
            source = Path(baseline.sources[0])
            # A copy per level: the object files of one source would overwrite each other.
            copy = Path("build", level, source.name)
            copy.parent.mkdir(parents=True, exist_ok=True)
            if not copy.exists() or copy.read_bytes() != source.read_bytes():
                shutil.copy(source, copy)
            name = baseline.name.replace("rlox.kernels", f"rlox.kernels.{level}", 1)
            extensions.append(extension(name, str(copy), flags, True))
    return extensions


setup(
    packages=[
        *find_packages(include=["rlox", "rlox.*", "rlox_cli", "rlox_cli.*"]),
        "rlox.kernels",
        *(f"rlox.kernels.{name}" for name in find_packages("kernels")),
        "rlox_cli.conf",
    ],
    cmdclass={"build_ext": BuildKernels},
    # setuptools asks whether there is anything to compile before it runs build_ext, which fills this in.
    ext_modules=[Extension("rlox.kernels._cpu", ["kernels/_cpu.pyx"])],
)
