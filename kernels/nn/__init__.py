"""Small networks without a framework: forward pass, loss, backward pass and optimiser step in one call."""

from rlox.kernels import prefer_level

prefer_level(__path__, "nn")
