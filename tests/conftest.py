"""What tests of several files are given: a store, and work that has been done once for all of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rewound.store import Store
from tiny import ENTERED, POISON
from tiny_sweeps import EVERYTHING, run, sweep_of


@pytest.fixture(autouse=True)
def _forgetful() -> Iterator[None]:
    """What tiny recipes were told and have noted ends with the test."""
    yield
    POISON.clear()
    ENTERED.clear()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Everything of the tiny sweep, with all tensors; not to be changed."""
    store = Store(tmp_path_factory.mktemp("whole") / "store")
    run(sweep_of(*EVERYTHING), store, keep_all=True)
    return store
