"""A store in one SQLite table: as unlike a folder as can be, to show that a store needs the six primitives alone."""

import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from rewound.states.storage.backend import Backend, Listed, Source

_TABLE = """CREATE TABLE IF NOT EXISTS files
(version INTEGER PRIMARY KEY AUTOINCREMENT, path TEXT UNIQUE, bytes BLOB)"""


class Table(Backend):
    """Files as rows; they are fetched into a folder beside the table's file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    @property
    def name(self) -> str:
        return str(self.file)

    @contextmanager
    def _rows(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.file, timeout=60)) as rows, rows:
            rows.execute("PRAGMA synchronous = OFF")  # a test's computer does not lose its power
            rows.execute(_TABLE)
            yield rows

    def read(self, path: str, most: int) -> bytes | None:
        with self._rows() as rows:
            found = rows.execute("SELECT substr(bytes, 1, ?) FROM files WHERE path = ?", (most, path)).fetchone()
        return None if found is None else found[0] or b""

    def fetch(self, path: str) -> Path | None:
        if (content := self.read(path, 2**30)) is None:
            return None
        fetched = self.file.with_name(f"{self.file.name}-fetched")
        fetched.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=fetched, delete=False) as file:
            file.write(content)
        return Path(file.name)

    def write(self, path: str, source: Source, *, durable: bool = True) -> None:
        if not isinstance(source, bytes):
            with tempfile.TemporaryDirectory() as folder:
                source(Path(folder, "file"))
                source = Path(folder, "file").read_bytes()
        with self._rows() as rows:
            rows.execute("INSERT OR REPLACE INTO files (path, bytes) VALUES (?, ?)", (path, source))

    def create(self, path: str, content: bytes, *, durable: bool = True) -> bool:
        with self._rows() as rows:
            return (
                rows.execute("INSERT OR IGNORE INTO files (path, bytes) VALUES (?, ?)", (path, content)).rowcount == 1
            )

    def remove(self, path: str) -> None:
        with self._rows() as rows:
            rows.execute("DELETE FROM files WHERE path = ?", (path,))

    def list(self, prefix: str) -> dict[str, Listed]:
        with self._rows() as rows:
            found = rows.execute("SELECT path, version, length(bytes) FROM files").fetchall()
        return {path: Listed(str(version), size) for path, version, size in found if path.startswith(prefix)}
