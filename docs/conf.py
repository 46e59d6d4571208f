"""How the site is built: Markdown pages (MyST), docstrings (autodoc), the Furo theme, no request to another host.

`make docs` turns every warning into an error: a broken link, an unknown name, a missing example.
"""

import re
import sys
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import rewound

project = "rewound"
author = "the rewound contributors"
version = release = rewound.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx_copybutton"]

nitpicky = True
nitpick_ignore_regex = [
    (r"py:class", r"(?!rewound\.).*"),  # other projects'
    (r"py:obj", r".*"),
]
default_role = "py:obj"  # `code` in a docstring is a link where it names something of ours

autodoc_default_options = {"no-value": True}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_use_type_comments = False
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
maximum_signature_line_length = 88

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
copybutton_exclude = ".linenos, .gp, .go"  # commands, not prompts and output

html_theme = "furo"
pygments_style = "friendly"
pygments_dark_style = "github-dark"
html_title = "rewound"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False


def as_rst(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Docstrings are plain text with `code`; what else reStructuredText would read as markup is taken literally."""
    for number, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            pieces = re.split(r"(`[^`]*`)", line)
            lines[number] = "".join(p if p.startswith("`") else re.sub(r"([*|\\]|_\b)", r"\\\1", p) for p in pieces)


def by_public_name(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.Element
) -> nodes.Element | None:
    """`rewound.method.pruning.mask.Mask`, as an annotation says, is documented as `rewound.Mask`."""
    target = str(node.get("reftarget", ""))
    name = target.rpartition(".")[2]
    if not target.startswith("rewound.") or name not in rewound.__all__:
        return None
    return env.domains.python_domain.resolve_xref(
        env, str(node["refdoc"]), app.builder, str(node["reftype"]), f"rewound.{name}", node, content
    )


def setup(app: Sphinx) -> None:
    """Sphinx calls this."""
    app.connect("autodoc-process-docstring", as_rst)
    app.connect("missing-reference", by_public_name)
