"""What do critics predict, and how do they learn it? Ensembles, kinds of outputs, losses, normalisation."""
