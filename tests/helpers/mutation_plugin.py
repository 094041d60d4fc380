"""A pytest plugin for mutation runs (``-p tests.helpers.mutation_plugin``): kernels run even if the functions that they
replace were changed, so that mutants are noticed by their results and not by their hashes. See
benchmarks/mutation.md.
"""

from rlox.compiled import guard

guard._is_compared = lambda module: True
