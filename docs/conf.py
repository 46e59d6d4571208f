"""How the site is built: Markdown pages (MyST), docstrings (autodoc), the Furo theme, no request to another host.

`make docs` turns every warning into an error: a broken link, an unknown name, a missing example.
"""

import ast
import io
import re
import sys
from contextlib import chdir, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FunctionType

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.logging import getLogger

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import rewound
from rewound.integrations.lightning import Rewind
from rewound.integrations.transformers import rewind

project = "rewound"
author = "the rewound contributors"
version = release = rewound.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx_copybutton"]

nitpicky = True
nitpick_ignore_regex = [
    (r"py:class", r"(?!rewound\.).*"),  # other projects'
    (r"py:obj", r".*"),
    (r"py:class", r"rewound\.method\.pruning\.scores\.Observations"),  # of scores by batches, which sweeps hand over
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


class Shown(str):
    """The default of a parameter, as a signature shows it."""

    def __repr__(self) -> str:
        return str(self)


def show_defaults(function: FunctionType) -> None:
    """Autodoc takes defaults from the source, which does not have those in a signature that a decorator has made."""
    if (made := vars(function).get("__signature__")) is not None:
        del function.__wrapped__  # type: ignore[attr-defined]  # which leads autodoc to that source
        shown = [
            each if each.default is each.empty else each.replace(default=Shown(_default(each.default)))
            for each in made.parameters.values()
        ]
        function.__signature__ = made.replace(parameters=shown)  # type: ignore[attr-defined]


def _default(value: object) -> str:
    if callable(value):
        name = getattr(value, "__name__", "...")
        return "..." if "<" in name else name
    return repr(str(value) if isinstance(value, Path) else value)


NOTEBOOK = "<!-- notebook -->\n"


def with_outputs(app: Sphinx, page: str, source: list[str]) -> None:
    """A page that begins with `<!-- notebook -->` is run, and what each Python block prints and gives follows it."""
    if not source[0].startswith(NOTEBOOK):
        return
    namespace: dict[str, object] = {"__name__": "__notebook__"}

    def with_output(block: re.Match[str]) -> str:
        try:
            return f"{block[0]}\n{output_of(block[1], namespace)}"
        except Exception as error:
            getLogger(__name__).warning("the notebook stops: %s: %s", type(error).__name__, error, location=page)
            return block[0]

    with TemporaryDirectory() as folder, chdir(folder):
        source[0] = re.sub(r"^```python\n(.*?)^```\n", with_output, source[0], flags=re.MULTILINE | re.DOTALL)


def output_of(code: str, namespace: dict[str, object]) -> str:
    """What a cell prints, and the value of its last line, as a notebook shows them."""
    *statements, last = ast.parse(code).body
    printed, value = io.StringIO(), None
    with redirect_stdout(printed):
        if isinstance(last, ast.Expr):
            exec(compile(ast.Module(statements, []), "notebook", "exec"), namespace)
            value = eval(compile(ast.Expression(last.value), "notebook", "eval"), namespace)
        else:
            exec(compile(code, "notebook", "exec"), namespace)
    text = printed.getvalue()
    if value is not None and not hasattr(value, "_repr_html_"):
        text += repr(value)
    shown = f"\n```text\n{text.rstrip()}\n```\n" if text else ""
    if hasattr(value, "_repr_html_"):
        html = re.sub(r"</?a\b[^>]*>", "", value._repr_html_())  # a link would lead to the folder that it ran in
        shown += f'\n```{{raw}} html\n<div class="notebook-output">{html}</div>\n```\n'
    return shown


def setup(app: Sphinx) -> None:
    """Sphinx calls this."""
    app.connect("source-read", with_outputs)
    for name in rewound.__all__:
        if isinstance(public := getattr(rewound, name), FunctionType):
            show_defaults(public)
    show_defaults(rewind)
    show_defaults(Rewind.__init__)
    app.connect("autodoc-process-docstring", as_rst)
    app.connect("missing-reference", by_public_name)
