"""Datasets of recorded transitions: where they come from, what they must be, how they are gathered and scored."""
