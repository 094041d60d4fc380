"""Is it fast, and does it learn? ``rlox bench``: the same work in every installed system, in alternation."""
