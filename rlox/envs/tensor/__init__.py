"""Environments as tensor programs: N copies live on one device, a GPU or the CPU, and nothing leaves it."""
