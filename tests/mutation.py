"""A pytest plugin for mutation runs (``-p tests.mutation``): kernels run even if the functions they replace were
changed, so that mutants are found by their results and not by their hashes. See benchmarks/mutation.md."""

from rlox.compiled import guard

guard._is_compared = lambda module: True
