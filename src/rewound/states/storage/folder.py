"""A store in a folder, on any mounted file system."""

import os
from pathlib import Path

from rewound.foundations.wholefiles import create_whole, remove_unfinished, replacing, write_whole
from rewound.states.storage.backend import Backend, Listed, Source, refusals_explained


class Folder(Backend):
    """The files below `root`, which is made by the first write.

    A write is a temporary file and a rename, a creation a temporary file and a hard link. Names that begin with a point
    are unfinished files and not listed.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def name(self) -> str:
        return str(self.root)

    def read(self, path: str, most: int) -> bytes | None:
        with refusals_explained(self.name):
            try:
                with (self.root / path).open("rb") as file:
                    return file.read(most)
            except FileNotFoundError:
                return None

    def fetch(self, path: str) -> Path | None:
        file = self.root / path
        return file if file.exists() else None

    def write(self, path: str, source: Source, *, durable: bool = True) -> None:
        with refusals_explained(self.name):
            if isinstance(source, bytes):
                write_whole(self.root / path, source, durable=durable)
            else:
                with replacing(self.root / path) as temporary:
                    source(temporary)

    def create(self, path: str, content: bytes, *, durable: bool = True) -> bool:
        with refusals_explained(self.name):
            return create_whole(self.root / path, content, durable=durable)

    def remove(self, path: str) -> None:
        file = self.root / path
        with refusals_explained(self.name):
            if os.path.lexists(file):  # to remove what is not there is refused by a disk that can only be read
                file.unlink(missing_ok=True)

    def list(self, prefix: str) -> dict[str, Listed]:
        found: dict[str, Listed] = {}
        top, _, beginning = prefix.rpartition("/")
        waiting = [top]
        with refusals_explained(self.name):
            while waiting:
                folder = waiting.pop()
                try:
                    entries = os.scandir(self.root / folder)
                except FileNotFoundError:
                    continue
                with entries:
                    for entry in entries:
                        if entry.name.startswith(".") or (folder == top and not entry.name.startswith(beginning)):
                            continue
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append(f"{folder}/{entry.name}")
                            continue
                        try:
                            status = entry.stat()
                        except FileNotFoundError:  # removed since it was listed
                            continue
                        # A rename brings another inode; versions before this one only set the time of a claim anew.
                        version = f"{status.st_ino}-{status.st_mtime_ns}"
                        found[f"{folder}/{entry.name}"] = Listed(version, status.st_size)
        return found

    def sweep_up(self) -> None:
        with refusals_explained(self.name):
            for folder, _, _ in os.walk(self.root):
                remove_unfinished(Path(folder))
