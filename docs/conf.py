"""Builds the pages: `python -m sphinx -EW --keep-going -c docs . site`.

The source folder is the whole checkout, so that links between README.md, docs/ and the code stay as
they are. A broken link, and a public name without a docstring or a page, is a warning; -W makes it
an error. -E reads all pages again: Sphinx does not see changes of the docstrings of constants.
Nothing is fetched.
"""

import inspect
import os
import re
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from flax import linen, nnx  # noqa: E402
from public_names import MODULES, public_names  # noqa: E402
from sphinx.util import logging  # noqa: E402
from sphinx.util.inspect import stringify_signature  # noqa: E402

project = "fp8jax"
author = "the authors of fp8jax"
root_doc = "docs/index"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**", "colabs/*.ipynb"]
exclude_patterns = ["site"]
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]

html_theme = "furo"
html_title = "fp8jax"
html_static_path = ["static"]
html_css_files = ["pages.css"]
html_search_scorer = "docs/static/scorer.js"  # from the source folder
html_extra_path = ["static/index.html"]  # leads from the site's root to docs/index.html
html_copy_source = False
html_show_copyright = False
pygments_style = "friendly"

nb_execution_mode = "off"  # notebooks show the outputs that they hold
nb_merge_streams = True

myst_heading_anchors = 4  # the anchors that GitHub makes
myst_enable_extensions = ["colon_fence"]

smartquotes_action = "D"  # no dots: "..." is any axes
default_role = "py:obj"  # `name` in a docstring: a link where the name has an entry, else code
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autoclass_content = "both"
autodoc_typehints = "signature"
python_use_unqualified_type_names = True
maximum_signature_line_length = 80
napoleon_custom_sections = [("Attributes", "params_style")]
napoleon_use_rtype = False
napoleon_numpy_docstring = False

DOCUMENTED = public_names()
logger = logging.getLogger(__name__)


def read_docstring(app, what, name, obj, options, lines):
    """Take docstrings of constants from the source, and write them as napoleon reads them.

    It takes what precedes a colon in the first line of data for a type, and knows no entry of two
    attributes.
    """
    if what == "data" and name in DOCUMENTED:
        lines[:] = [*DOCUMENTED[name][1].splitlines(), ""]
    if what in ("data", "property") and ":" in lines[0]:
        logger.warning("%s: the first line may have no colon", name)
    head, attributes, rest = "\n".join(lines).partition("\nAttributes:\n")
    section, blank, rest = rest.partition("\n\n")
    section = re.sub(r"^  ((?:\w+, )+\w+)(: .*(?:\n    .*)*)", one_entry_each, section, flags=re.M)
    lines[:] = (head + attributes + section + blank + rest).split("\n")


def one_entry_each(entry):
    """Turn "a, b: text" into "a: text" and "b: text"."""
    return "\n".join(f"  {name}{entry[2]}" for name in entry[1].split(", "))


def shorten_signature(app, what, name, obj, options, signature, returned):
    """Write jaxtyping's shapes as the source does, and modules without what flax adds."""
    if what == "class" and issubclass(obj, (linen.Module, nnx.Module, nnx.Variable)):
        signature = module_signature(obj)
    return tuple(
        text and re.sub(r"\bjax(lib)?\.[\w.]*Array\b", "Array", text)
        for text in (signature, returned)
    )


def module_signature(module):
    """Return the arguments of a flax class as text; None if it has no __init__ of its own."""
    if "__init__" not in vars(module):
        return None
    parameters = [
        p
        if p.default is p.empty or repr(p.default)[0] != "<"
        else p.replace(default=Named(p.default))
        for p in inspect.signature(module.__init__).parameters.values()
        if p.name not in ("self", "parent") and not (p.name == "name" and p.default is None)
    ]
    return stringify_signature(inspect.Signature(parameters), unqualified_typehints=True)


class Named:
    """A default such as a function, which has no expression that gives it."""

    def __init__(self, value):
        self.value = value

    def __repr__(self):
        return getattr(self.value, "__name__", "...")


def check_names(app, env):
    """Warn of public names without a docstring or an entry in the reference."""
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
