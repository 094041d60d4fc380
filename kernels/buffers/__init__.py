"""Stores of experience: replay memories, tables and offline datasets."""

from rlox.kernels import prefer_level

prefer_level(__path__, "buffers")
