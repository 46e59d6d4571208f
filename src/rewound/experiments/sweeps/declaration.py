"""A sweep as it is written, before anything in it is understood: a TOML file, or one that comes with the package.

Needs no torch, so that a misspelt name is told at once.
"""

import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from rewound.foundations.errors import InputError, as_path
from rewound.foundations.names import unknown

Table = Mapping[str, object]


class Declaration(NamedTuple):
    """What a file declares."""

    word: str
    """What it was asked for by: a path, or the name of a shipped sweep."""
    name: str
    """The name of the sweep in reports."""
    table: Table


def declared(word: str | Path) -> Declaration:
    """The table in a TOML file, or in the shipped one of that name.

    >>> declared("digits").table["recipe"]
    'digits'
    """
    shipped = shipped_sweeps()
    path, word = as_path("sweep", word), str(word)
    if path.suffix == ".toml" or path.is_file():
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            remedy = f"give the path of a TOML file, or one of {', '.join(sorted(shipped))}"
            raise InputError(f"cannot read sweep {word}: {reason}; {remedy}") from error
    elif word in shipped:
        text = shipped[word]
    else:
        raise InputError(unknown("sweep", word, shipped) + " or the path of a TOML file")
    try:
        return Declaration(word, path.stem, tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{word} is not TOML: {error}; correct it there") from error


def shipped_sweeps() -> dict[str, str]:
    """The sweeps that come with the package, by name."""
    folder = files("rewound.experiments.sweeps") / "shipped"
    return {f.name.removesuffix(".toml"): f.read_text() for f in folder.iterdir() if f.name.endswith(".toml")}
