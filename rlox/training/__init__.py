"""How does a training go? Construction, backends, loops, saving and loading: what all algorithms of a family share."""
