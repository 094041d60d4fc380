"""What is differentiated? Policies, networks, losses and optimisers, and the batches they learn from."""
