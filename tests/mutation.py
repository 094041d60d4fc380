"""A pytest plugin for mutation runs (``-p tests.mutation``): kernels run even if the functions they replace were
changed, so that mutants are found by their results and not by their fingerprints. See benchmarks/mutation.md."""

from rlox.compiled import shadows

shadows._differing = lambda *arguments, **options: None
