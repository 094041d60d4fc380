"""World models: DreamerV3's model, the collector of its replay memory, and acting."""
