"""``rlox new``: the files with which an environment, an algorithm or an experiment of one's own begins."""
