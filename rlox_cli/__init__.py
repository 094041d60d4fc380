"""The command line of rlox: the only package that uses Typer, Hydra, OmegaConf and Rich."""

# In a checkout, `python -m …` finds ./rlox_cli before the installed package, but only the latter maps conf/ into it.
__path__ = __import__("pkgutil").extend_path(__path__, __name__)
