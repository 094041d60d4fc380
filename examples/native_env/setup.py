"""Compile the three modules against rlox's C header and NumPy's."""

import numpy
from Cython.Build import cythonize
from setuptools import Extension, setup

import rlox

# -O3 vectorises the step; without contraction to FMA every machine computes the same bits.
FLAGS = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]

setup(
    ext_modules=cythonize(
        [
            Extension(
                f"rlox_gusts.{name}",
                [f"rlox_gusts/{name}.pyx"],
                include_dirs=[rlox.get_include(), numpy.get_include()],
                define_macros=[("NPY_NO_DEPRECATED_API", "NPY_2_0_API_VERSION")],
                extra_compile_args=FLAGS,
            )
            for name in ("buffer", "env", "reward")
        ],
        build_dir="build",
        compiler_directives={"language_level": 3, "boundscheck": False, "wraparound": False, "cdivision": True},
    )
)
