"""The command line of rlox: the only room that knows Typer, Hydra, OmegaConf and Rich."""

# In a checkout, `python -m …` puts ./rlox_cli before the installed package, which alone maps conf/ in.
__path__ = __import__("pkgutil").extend_path(__path__, __name__)
