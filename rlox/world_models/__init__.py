"""How does an agent learn a model of its world? DreamerV3's model, the memory's collector, acting, predictions."""
