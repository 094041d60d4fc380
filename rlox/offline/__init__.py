"""Datasets of recorded transitions: reading, checks, collection, export and scores."""
