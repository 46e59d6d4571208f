"""What a notebook shows of an object (`_repr_html_`): tables, lines and pictures as HTML.

All text is escaped. There are no scripts and no colours of our own, so that it is read on a light and on a dark page.
"""

from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Final
from urllib.parse import quote

PICTURES: Final = {".png": "image/png", ".svg": "image/svg+xml"}
"""Kinds of files that a notebook can show as pictures, by suffix."""
_CELL: Final = "padding:0.1em 0.7em"


def html_table(rows: Iterable[Sequence[str]], header: Sequence[str] = (), title: str = "") -> str:
    """A table of texts; below a header, all columns but the first are of numbers, and aligned to the right.

    >>> html_table([["<a>", "1"]])
    '<table><tbody><tr><td style="padding:0.1em 0.7em;text-align:left">&lt;a&gt;</td>\
<td style="padding:0.1em 0.7em;text-align:left">1</td></tr></tbody></table>'
    """

    def line(cells: Sequence[str], tag: str) -> str:
        sides = ["left", *["right" if header else "left"] * len(cells)]
        texts = zip(cells, sides, strict=False)
        return "".join(f'<{tag} style="{_CELL};text-align:{side}">{escape(text)}</{tag}>' for text, side in texts)

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    head = f"<thead><tr>{line(header, 'th')}</tr></thead>" if header else ""
    caption = f'<caption style="text-align:left;font-weight:bold">{escape(title)}</caption>' if title else ""
    return f"<table>{caption}{head}<tbody>{body}</tbody></table>"


def html_line(text: str) -> str:
    """A paragraph."""
    return f"<p>{escape(text)}</p>"


def html_link(path: Path, text: str) -> str:
    """A link to a file, by its path from the current folder where it lies below that."""
    below = path.resolve().is_relative_to(here := Path.cwd().resolve())
    place = quote(path.resolve().relative_to(here).as_posix()) if below else path.resolve().as_uri()
    return f'<a href="{escape(place)}" target="_blank" style="color:inherit">{escape(text)}</a>'


def html_picture(path: Path) -> str:
    """The picture in a file, as a part of the document; it has a white ground on a dark page, too."""
    data = b64encode(path.read_bytes()).decode()
    source = f"data:{PICTURES[path.suffix]};base64,{data}"
    return f'<img src="{source}" alt="{escape(path.stem)}" style="max-width:min(100%,40em);background:#fff">'


def text_table(rows: Sequence[Sequence[str]], header: Sequence[str] = ()) -> str:
    """The same table as lines of text.

    >>> print(text_table([["rows", "12"], ["epochs to do", "8"]]))
    rows          12
    epochs to do   8
    """
    lines = [list(header), *rows] if header else list(rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines
    )
