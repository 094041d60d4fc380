"""The code behind ``rlox bench``: the same work in every installed system, in alternation."""
