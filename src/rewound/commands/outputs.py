"""Where a command will write, looked at before its work: nothing is computed in vain."""

import tempfile
from pathlib import Path

from rewound.foundations.errors import InputError, as_path


def report_folder(out: Path | None, name: str) -> Path:
    """The folder for a report of that name, if files can be written into it."""
    return writable(out or Path("rewound-report") / name)


def writable(folder: Path) -> Path:
    """The folder, which need not be there yet, if files can be written into it; nothing is left there."""
    folder = as_path("--out", folder)
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        # What a system says it allows is not all: root may write into /proc, which takes no files.
        with tempfile.TemporaryDirectory(dir=there, prefix=".rewound-"):
            return folder
    except NotADirectoryError:
        reason = f"{there} is not a folder"
    except OSError as error:
        reason = f"{there} takes no files ({error.strerror})"
    raise InputError(f"cannot write into {folder}: {reason}; choose another folder with --out")


def writable_file(path: Path) -> Path:
    """The file, if it can be written."""
    if as_path("--out", path).is_dir():
        raise InputError(f"cannot write {path}: it is a folder; give the path of a file with --out")
    writable(path.parent)
    return path
