"""Small networks without a framework: forward, loss, backward and optimiser step of an actor-critic in one call."""

from rlox.kernels import prefer_level

prefer_level(__path__, "nn")
