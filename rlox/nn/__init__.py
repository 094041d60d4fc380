"""Policies, networks, losses and optimisers in PyTorch, and the batches they learn from."""
