"""A store in a folder, on any mounted file system."""

import errno
import os
import stat
from pathlib import Path

from rewound.foundations.wholefiles import FORGOTTEN, create_whole, remove_unfinished, replacing, write_whole
from rewound.states.storage.backend import Backend, Listed, Source, refusals_explained


class Folder(Backend):
    """The files below `root`, which is made by the first write.

    A write is a temporary file and a rename, a creation a temporary file and a hard link. Names that begin with a point
    are unfinished files and not listed.

    Whoever may write into a shared folder could put a link there to a file that only its reader may see. So folders may
    be links, but a link in the place of a file has no content, nor has anything else that is no plain file.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def name(self) -> str:
        return str(self.root)

    def read(self, path: str, most: int) -> bytes | None:
        with refusals_explained(self.name):
            try:
                with open(self.root / path, "rb", opener=_opened) as file:
                    return file.read(most) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else b""
            except FileNotFoundError:
                return None
            except OSError as error:
                if error.errno == errno.ELOOP:  # a link
                    return b""
                raise

    def fetch(self, path: str) -> Path | None:
        file = self.root / path
        try:
            mode = os.lstat(file).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None
        return file if stat.S_ISREG(mode) else Path(os.devnull)

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

    def sweep_up(self, after: float = FORGOTTEN) -> None:
        with refusals_explained(self.name):
            for folder, _, _ in os.walk(self.root):
                remove_unfinished(Path(folder), after)


def _opened(path: str, flags: int) -> int:
    """The file itself, not what a link leads to; a pipe without a writer is empty instead of waited for."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
