"""Builds the pages: `python -m sphinx -W --keep-going -c docs . site`.

The source folder is the whole checkout, so that links between README.md, docs/ and the code stay as
they are. A broken link, and a public name without a docstring or a page, is a warning; -W makes it
an error. Nothing is fetched.
"""

import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from public_names import MODULES, public_names  # noqa: E402
from sphinx.util import logging  # noqa: E402

project = "fp8jax"
author = "the authors of fp8jax"
root_doc = "docs/index"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**"]
exclude_patterns = ["site"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]

html_theme = "furo"
html_title = "fp8jax"
html_static_path = ["static"]
html_css_files = ["pages.css"]
html_extra_path = ["static/index.html"]  # leads from the site's root to docs/index.html
html_copy_source = False
html_show_copyright = False
pygments_style = "friendly"

myst_heading_anchors = 4  # the anchors that GitHub makes
myst_enable_extensions = ["colon_fence"]

default_role = "py:obj"  # `name` in a docstring: a link where the name has an entry, else code
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autoclass_content = "both"
autodoc_typehints = "signature"
python_use_unqualified_type_names = True
maximum_signature_line_length = 80
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_numpy_docstring = False

DOCUMENTED = public_names()


def read_docstring(app, what, name, obj, options, lines):
    """Take docstrings of constants from the source."""
    if what == "data" and name in DOCUMENTED:
        lines[:] = [*DOCUMENTED[name][1].splitlines(), ""]


def shorten_signature(app, what, name, obj, options, signature, returned):
    """Write jaxtyping's shapes as the source does."""
    return tuple(
        text and text.replace("jaxlib._jax.Array", "Array").replace("'", '"')
        for text in (signature, returned)
    )


def check_names(app, env):
    """Warn of public names without a docstring or an entry in the reference."""
    logger = logging.getLogger(__name__)
    entries = {entry[0] for entry in env.get_domain("py").get_objects()}
    for name, (_, text) in DOCUMENTED.items():
        if name not in MODULES and name not in entries:
            logger.warning("public name %s has no entry in docs/reference", name)
        if not text:
            logger.warning("public name %s has no docstring", name)


def setup(app):
    app.connect("autodoc-process-docstring", read_docstring, priority=100)  # before napoleon
    app.connect("autodoc-process-signature", shorten_signature)
    app.connect("env-check-consistency", check_names)
