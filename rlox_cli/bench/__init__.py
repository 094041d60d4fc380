"""Is rlox fast, and does it learn? ``rlox bench`` runs the same work in every installed system, in turns."""
