"""Configuration of the documentation site: `make docs` builds it with Sphinx, and treats every warning as an error."""

import dataclasses
import inspect
import re

from flax import nnx
from sphinx.util import inspect as sphinx_inspect

import mamba_align_jax
import pallas_kernels

project = "mamba-align-jax"
copyright = "the authors of mamba-align-jax, Apache-2.0"
html_title = "mamba-align-jax"
html_theme = "furo"
html_show_sourcelink = False
html_copy_source = False

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["figures/*.py"]

# Pages link to headings as GitHub names them, so the same links work in the repository.
myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath"]

# In docstrings, `name` is code, as it is in Markdown.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "special-members": "__call__"}
# The text of a class is followed by that of its constructor.
autoclass_content = "both"
maximum_signature_line_length = 88
napoleon_use_ivar = True
napoleon_preprocess_types = False
python_use_unqualified_type_names = True
nitpicky = False

# Names that the packages export have a page of their own; the page of the module that defines them leaves them out.
_EXPORTS = {id(getattr(mamba_align_jax, name)) for name in mamba_align_jax.__all__}
_EXPORTS |= {id(value) for name, value in vars(pallas_kernels).items() if not name.startswith("_")}


def _skip(app, what, name, obj, skip, options):
    """Leaves out exports, and the fields of named tuples, which have no text of their own."""
    doc = inspect.getdoc(obj) or ""
    has_own_entry = what == "module" and id(obj) in _EXPORTS
    return True if has_own_entry or doc.startswith("Alias for field number") else None


def _short(annotation):
    """Names arrays as the code does: Int32[Array, "rows"] instead of the module in which JAX defines the class."""
    return annotation and re.sub(r"\b(jax\.)?jaxlib\._jax\.|\bjaxtyping\.", "", annotation)


def _signature(app, what, name, obj, options, signature, returns):
    if what == "class" and issubclass(obj, nnx.Module):
        # The metaclass of flax modules hides the constructor's arguments from Sphinx.
        constructor = sphinx_inspect.signature(obj.__init__, bound_method=True)
        signature = sphinx_inspect.stringify_signature(
            constructor, show_return_annotation=False, unqualified_typehints=True
        )
    return _short(signature), _short(returns)


def _docstring(app, what, name, obj, options, lines):
    """Keeps the stars of shapes such as [blocks, *state], which reStructuredText would read as emphasis."""
    if what == "data" and isinstance(obj, int):
        lines.clear()  # The docstring of int. The page describes the number.
    for number, line in enumerate(lines):
        parts = _short(line).split("`")
        parts[::2] = [re.sub(r"(?<![\\\w*])\*(?=\w)", r"\\*", part) for part in parts[::2]]
        lines[number] = "`".join(parts)


def _options(app, what, name, obj, options, lines):
    """Lists the fields of a dataclass that say what they are as options of the command line, if the docstring doesn't."""
    if what == "class" and dataclasses.is_dataclass(obj) and not any("Attributes:" in line for line in lines):
        about = [f"    {item.name}: {item.metadata['about']}." for item in dataclasses.fields(obj) if item.metadata]
        lines += ["", "Attributes:", *about] if about else []


def setup(app):
    """Registers the rules above with Sphinx; that for options runs before napoleon's, and that for docstrings after it."""
    app.connect("autodoc-skip-member", _skip)
    app.connect("autodoc-process-signature", _signature)
    app.connect("autodoc-process-docstring", _options, priority=400)
    app.connect("autodoc-process-docstring", _docstring, priority=600)
