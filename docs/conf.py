"""Sphinx configuration of the manual. Build it with ``sphinx-build -W --keep-going -n docs build/docs``."""

import sys
from pathlib import Path

import rlox

sys.path.insert(0, str(Path(__file__).parent))

project = "rlox"
author = "the rlox developers"
copyright = "the rlox developers; MIT licence"
release = version = rlox.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "manual"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
smartquotes = False

# Docstrings: NumPy style. Types are written for people ("Tensor (B,)"), so only rlox's own names must resolve.
napoleon_google_docstring = False
napoleon_use_rtype = False
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "none"
autodoc_preserve_defaults = True
default_role = "py:obj"
nitpick_ignore_regex = [(r"py:.*", r"(?s)(?!rlox\.).*")]

html_theme = "furo"
html_title = f"rlox {release}"
html_math_renderer = "mathml"
html_theme_options = {"navigation_with_keys": True}
