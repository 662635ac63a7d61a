"""How Sphinx makes a site of these pages, as ``make docs`` does; its own part is ``tools/documentation/``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from pytest_llmperf import __version__

project = "pytest-llmperf"
author = "The pytest-llmperf developers"
project_copyright = author
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "tools.documentation.extension"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
# Links to sections are written as GitHub makes them, so that they work in both places.
myst_heading_anchors = 3
myst_enable_extensions = ["deflist"]

# A link that leads nowhere is a warning, and each warning fails the build. Types of other projects are not linked:
# their pages would have to be asked for.
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r".*")]
autodoc_member_order = "bysource"
autodoc_typehints = "none"

html_theme = "furo"
html_title = f"pytest-llmperf {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
# `make docs LINKS=1` asks for each.
linkcheck_timeout = 20
linkcheck_retries = 2
