"""A pytest plugin for mutation runs (``-p tests.mutation``): a kernel is run whatever became of the functions it stands
for, so that a mutant is found by what it computes and not by its fingerprint. See benchmarks/mutation.md."""

from rlox.native import shadows

shadows._differing = lambda *arguments, **options: None
