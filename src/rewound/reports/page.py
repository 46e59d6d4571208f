"""One self-contained HTML page from tables: it opens from disk, needs no network, and asks for none.

The charts are drawn by Vega-Lite, whose JavaScript `vl_convert` bundles when the page is written. Data stand in the
page as JSON, and its script turns them into text nodes only. Its security policy names the two scripts by their hashes
and allows nothing to be fetched.
"""

import base64
import hashlib
import html
import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Final

from rewound.conclusions.evidence import Evidence
from rewound.foundations.wholefiles import write_whole
from rewound.reports.payload import story

PAGE: Final = "index.html"
_SCRIPTS: Final = (
    "elements",
    "story",
    "state",
    "panels",
    "figures",
    "conformance",
    "run",
    "table",
    "page",
)  # one script, in this order


@dataclass(frozen=True)
class Origin:
    """What a page says about where its tables come from."""

    title: str
    facts: tuple[tuple[str, str], ...] = ()
    """Names and values of the footer."""
    run: str = ""
    """The command that computes the rows again, if one does."""
    show: str = ""
    """The command that shows a run, given its key behind it."""


def write_page(evidence: Evidence, path: Path, origin: Origin) -> Path:
    """Write the page of a table; a compared one is drawn over it, with how near the two come."""
    library = _library()
    content = {
        **story(evidence),
        "commands": {"run": origin.run, "show": origin.show},
        "provenance": origin.facts,
    }
    script = "\n".join(_asset(f"{name}.js") for name in _SCRIPTS)
    page = Template(_asset("page.html")).substitute(
        policy=_policy(library, script),
        title=html.escape(origin.title),
        style=_asset("page.css"),
        story=as_json(content),
        library=library,
        script=script,
    )
    write_whole(path, page.encode(), durable=False)
    return path


@cache
def _library() -> str:
    import vl_convert

    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;").replace("</script", "<\\/script")


def _policy(*scripts: str) -> str:
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'"


def _asset(name: str) -> str:
    return (files("rewound.reports") / "assets" / name).read_text(encoding="utf-8")


def as_json(value: object) -> str:
    """JSON that may stand inside a <script> element: nothing in it can end the element or begin another.

    >>> as_json({"recipe": "</script>&"})
    '{"recipe":"\\\\u003c/script\\\\u003e\\\\u0026"}'
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)  # ASCII: U+2028 and U+2029 are escaped, too
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
