"""Every backend does what a store relies on: the conformance suite, and what is special to one of them."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from rewound.states.storage.conformance import CHECKS, Opener
from rewound.states.storage.folder import Folder


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_folder_conforms(check: Callable[[Opener], None], tmp_path: Path) -> None:
    check(lambda: Folder(tmp_path / "store"))


def test_a_file_system_without_hard_links_creates_once_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*paths: Path) -> NoReturn:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "link", refused)
    backend = Folder(tmp_path / "store")
    assert backend.create("claims/x.1", b"mine")
    assert not backend.create("claims/x.1", b"yours")
    assert backend.read("claims/x.1", 100) == b"mine"
    assert backend.list("claims/").keys() == {"claims/x.1"}


def test_a_link_is_not_followed_to_somebody_elses_file(tmp_path: Path) -> None:
    """Whatever lies in the place of a file: what is written replaces it."""
    precious, backend = tmp_path / "precious", Folder(tmp_path / "store")
    precious.write_text("of somebody else")
    assert backend.create("claims/y.1", b"mine")
    (tmp_path / "store" / "claims" / "x.1").symlink_to(precious)
    assert not backend.create("claims/x.1", b"mine")
    backend.write("claims/x.1", b"mine")
    backend.remove("claims/x.1")
    assert precious.read_text() == "of somebody else"
