"""Sphinx configuration."""

from quasar import __version__

project = "Quasar"
author = "The Quasar authors"
copyright = "The Quasar authors. Apache-2.0"
release = version = __version__

extensions = ["myst_parser"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"Quasar {release}"
myst_heading_anchors = 3
nitpicky = True
