"""Build the Cython kernels, on x86-64 for one CPU level or for several from the same C code.

``RLOX_CPU_LEVELS=all`` builds every CPU level, as for wheels. Otherwise only the level of this machine is built:
`rlox.kernels` raises an error on a machine with a lower level.

``RLOX_CYTHON_DEBUG=1`` builds only the baseline, with Cython's run-time checks and asserts. ``RLOX_SANITIZE=address``
or ``address,undefined`` then also adds the compiler's sanitizers; their library must be preloaded into Python, as in
tests/sanitize.sh.
"""

import hashlib
import multiprocessing
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

DEBUG = os.environ.get("RLOX_CYTHON_DEBUG") == "1"
DIRECTIVES = {
    "language_level": 3,
    "annotation_typing": False,  # annotations are for readers; `n: int` must accept a numpy.int64
    "boundscheck": DEBUG,
    "initializedcheck": DEBUG,
    "nonecheck": DEBUG,
    "overflowcheck": False,  # the generators' arithmetic wraps on purpose
    "wraparound": False,
    "cdivision": not DEBUG,
}
# Without contraction to FMA, all levels give the same bits. The next two flags let loops with comparisons, selects and
# sqrt vectorise (twice as fast) and, unlike -ffast-math, keep the IEEE semantics of NaN and infinity.
FLAGS = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-g0", "-Wno-psabi"]
# Kernels with networks: they are compared within a tolerance, not bit for bit, and matrix products without FMA take
# twice the time.
FUSED = (".nn.", ".llm.decoder", ".llm.parts", ".llm.vocabulary")
HEADERS = ("include", "nn", "llm", "envs", "buffers")  # folders with header files
LINK_FLAGS = []
SANITIZE = os.environ.get("RLOX_SANITIZE", "")
if SANITIZE and not DEBUG:
    raise SystemExit("setup.py: RLOX_SANITIZE needs RLOX_CYTHON_DEBUG=1, which builds separately from the release")
if DEBUG:
    FLAGS = ["-O1", "-ffp-contract=off", "-g", "-UNDEBUG", "-Wno-psabi"]
if SANITIZE:
    LINK_FLAGS = [f"-fsanitize={SANITIZE}"]
    FLAGS += [*LINK_FLAGS, "-fno-omit-frame-pointer"]
WINDOWS = sysconfig.get_platform().startswith("win")
# What distinguishes the levels x86-64-v2, -v3 and -v4, as named in /proc/cpuinfo and by the compiler's options -m...;
# kernels/_cpu.pyx tests the same features at import. Compilers from before 2021 do not know -march=x86-64-vN.
FEATURES = {
    "": ["sse4.2", "popcnt", "cx16", "sahf"],
    "_v3": ["avx2", "fma", "bmi", "bmi2"],
    "_v4": ["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"],
}
LEVELS: dict[str, list[str]] = {"": []}  # the compiler's options for each level that is built


def features_of_this_machine() -> set[str] | None:
    """Return the CPU's features, or None if they cannot be determined."""
    try:
        flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[1].split()
    except (OSError, TypeError):
        return None
    return {"bmi" if flag == "bmi1" else flag for flag in flags}


def compiles(options: list[str]) -> bool:
    """Return whether the C compiler accepts these options."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    command = [*compiler, *options, "-c", "-x", "c", "-", "-o", os.devnull]
    try:
        return not subprocess.run(command, input=b"int x;\n", capture_output=True, check=False).returncode
    except OSError:
        return False


if sysconfig.get_platform() == "linux-x86_64":
    wanted = os.environ.get("RLOX_CPU_LEVELS", "machine")
    if wanted not in ("all", "machine"):
        raise SystemExit(f"setup.py: RLOX_CPU_LEVELS must be all or machine, got {wanted!r}")
    options: list[str] = []
    for level, features in FEATURES.items():
        options = [*options, *(f"-m{feature}" for feature in features)]
        LEVELS[level] = options
    # 512 bits: Pendulum is 25 % faster than with 256, others are equal (Sapphire Rapids, GCC 12).
    LEVELS["_v4"] = [*LEVELS["_v4"], "-mprefer-vector-width=512"]
    LEVELS = {level: options for level, options in LEVELS.items() if not level or (not DEBUG and compiles(options))}
    machine = features_of_this_machine()
    if wanted == "machine" and machine is not None:
        supported = [level for level in LEVELS if not level or machine.issuperset(FEATURES[level])]
        LEVELS = {supported[-1]: LEVELS[supported[-1]]}


elif sysconfig.get_platform() == "win-amd64":
    LEVELS[""] = [f"-m{feature}" for feature in FEATURES[""]]


def options_for_platform(options: list[str]) -> list[str]:
    """Return the compiler's options as this platform spells them: clang-cl has those of Clang behind a prefix."""
    return [f"/clang:{option}" for option in options if option != "-g0"] if WINDOWS else options


def clang_cl() -> str:
    """Return the path of clang-cl, which compiles the kernels on Windows.

    They use the vector types of GCC and Clang, which cl.exe does not know. clang-cl is an option of Visual Studio's
    installer and part of LLVM, and links with what setuptools has set up for cl.exe.
    """
    path = shutil.which("clang-cl", path=os.pathsep.join([os.environ.get("PATH", ""), r"C:\Program Files\LLVM\bin"]))
    if path is None:
        raise SystemExit(
            "setup.py: building rlox on Windows needs clang-cl, which is not on the path; install LLVM, or the "
            "component 'C++ Clang tools' of Visual Studio"
        )
    return path


class BuildKernels(build_ext):
    """Runs Cython once per kernel, and compiles the C code once per CPU level.

    Compiled kernels are kept in build/kernels under a fingerprint of everything that affects them. Builds with the same
    fingerprint copy them from there: a second `pip install -e .`, which builds in other folders, or a build after one
    with checks.
    """

    KEPT = Path("build", "kernels")
    MOST = 4  # versions kept of a kernel: at this machine's level, at all levels, with checks, with sanitizers

    def finalize_options(self) -> None:
        # Not at import, so that commands that compile nothing do not need Cython or NumPy. Those of an sdist and of
        # metadata only ask for the sources, which MANIFEST.in lists.
        if not {"dist_info", "egg_info", "sdist"}.issuperset(self.distribution.commands):
            self.distribution.ext_modules = kernel_extensions()
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def run(self) -> None:
        folder = Path("kernels") if self.inplace else Path(self.build_lib, "rlox", "kernels")
        extensions, self.extensions = self.extensions, []
        # Files of a level that is not built now would take precedence, or stay behind with an older version.
        targets = {self.target(extension).resolve() for extension in extensions}
        for path in folder.rglob(f"*{sysconfig.get_config_var('EXT_SUFFIX')}"):
            if path.resolve() not in targets:
                path.unlink()
        kept = {extension.name: self.KEPT / f"{extension.name}.{fingerprint(extension)}" for extension in extensions}
        for extension in extensions:
            target = self.target(extension)
            if kept[extension.name].exists() and not self.force:
                replace(kept[extension.name], target)
                kept[extension.name].touch()
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                # If the compilation fails, no older version stays behind.
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

    def build_extensions(self) -> None:
        if WINDOWS and self.extensions:
            self.compiler.initialize()
            self.compiler.cc = clang_cl()
            # Objects of cl.exe's link-time optimisation, which clang-cl does not write.
            self.compiler.compile_options = [option for option in self.compiler.compile_options if option != "/GL"]
        super().build_extensions()

    def target(self, extension: Extension) -> Path:
        """Return the path where Python finds a kernel."""
        return Path(self.get_ext_fullpath(extension.name))


def replace(source: Path, target: Path) -> None:
    """Replace a file atomically: nothing sees half of it, and processes that have loaded the old file keep it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    shutil.copyfile(source, partial)
    shutil.copymode(source, partial)
    partial.replace(target)


def fingerprint(extension: Extension) -> str:
    """Return a hash of everything that affects an extension's compiled code, except for the compiler's version."""
    import numpy

    of = hashlib.sha256(repr((extension.extra_compile_args, extension.extra_link_args)).encode())
    of.update(repr((extension.define_macros, sys.version, numpy.__version__, sysconfig.get_platform())).encode())
    of.update(repr([os.environ.get(name) for name in ("CC", "CFLAGS", "CPPFLAGS", "LDFLAGS")]).encode())
    for path in [*extension.sources, *(path for path in extension.depends if path.endswith(".h"))]:
        text = Path(path).read_text("utf-8")
        # Cython records where it found NumPy and its own files. In pip's builds, these are temporary folders.
        text = re.sub(r"/\* BEGIN: Cython Metadata.*?END: Cython Metadata \*/", "", text, count=1, flags=re.DOTALL)
        of.update(re.sub(r'"[^"\n]*/site-packages/(Cython/Includes/)?', '"', text).encode())
    return of.hexdigest()[:16]


def kernel_extensions() -> list[Extension]:
    """Return every ``kernels/**/*.pyx`` as an extension of ``rlox.kernels``, at each CPU level."""
    import numpy
    from Cython.Build import cythonize

    def extension(name: str, source: str, options: list[str]) -> Extension:
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
            extra_compile_args=options_for_platform(FLAGS + options + contract),
            extra_link_args=LINK_FLAGS,
            depends=headers,
        )

    modules = sorted(Path("kernels").rglob("*.pyx"))
    names = ["rlox." + ".".join(path.with_suffix("").parts) for path in modules]
    # `from rlox.kernels.types cimport f64` reads build/names/rlox/kernels/types.pxd.
    link = Path("build/names/rlox/kernels")
    link.parent.mkdir(parents=True, exist_ok=True)
    if WINDOWS:  # where links are for administrators
        shutil.rmtree(link, ignore_errors=True)
        shutil.copytree("kernels", link, ignore=shutil.ignore_patterns("*.pyd"))
    elif not link.is_symlink():
        link.symlink_to("../../../kernels")
    build_dir = Path("build/cython-debug" if DEBUG else "build/cython")
    changed = Path(__file__).stat().st_mtime
    extensions = cythonize(
        [extension(n, str(p), LEVELS.get("", [])) for n, p in zip(names, modules, strict=True)],
        include_path=["build/names"],
        build_dir=str(build_dir),
        # In parallel only if processes are forked; otherwise each of them would run this file first.
        nthreads=(os.cpu_count() or 1) if multiprocessing.get_start_method() == "fork" else 0,
        # Cython only checks the modification times of the sources, but this file has the directives.
        force=any(c.stat().st_mtime < changed for c in build_dir.rglob("*.c")),
        compiler_directives=DIRECTIVES,
    )
    chooses_level = "rlox.kernels._cpu"
    built = extensions if "" in LEVELS else [one for one in extensions if one.name == chooses_level]
    for level in LEVELS.keys() - {""}:
        for one in extensions[: len(modules)]:
            if one.name == chooses_level:
                continue
            source = Path(one.sources[0])
            # One copy per level, since object files of the same source would overwrite each other.
            copy = Path("build", level, source.name)
            copy.parent.mkdir(parents=True, exist_ok=True)
            if not copy.exists() or copy.read_bytes() != source.read_bytes():
                shutil.copy(source, copy)
            name = one.name.replace("rlox.kernels", f"rlox.kernels.{level}", 1)
            built.append(extension(name, str(copy), LEVELS[level]))
    return built


def project_urls() -> dict[str, str]:
    """Return the addresses of the repository whose workflow builds the package; none for a build elsewhere."""
    repository = os.environ.get("GITHUB_REPOSITORY")
    if not repository:
        return {}
    address = f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{repository}"
    return {
        "Source": address,
        "Documentation": f"{address}/tree/main/docs",
        "Changelog": f"{address}/blob/main/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }


setup(
    project_urls=project_urls(),
    packages=[
        *find_packages(include=["rlox", "rlox.*", "rlox_cli", "rlox_cli.*"]),
        "rlox.kernels",
        *(f"rlox.kernels.{name}" for name in find_packages("kernels")),
        "rlox_cli.conf",
    ],
    cmdclass={"build_ext": BuildKernels},
    # setuptools checks whether there is anything to compile before it runs build_ext, which completes this list.
    ext_modules=[Extension("rlox.kernels._cpu", ["kernels/_cpu.pyx"])],
)
