"""What the file system refuses, said to a person: one sentence with the reason and the remedy."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from rewound.foundations.errors import InputError

_REASONS = {
    errno.ENOSPC: "the disk is full; free some space and run the same command again, nothing stored is lost",
    errno.EDQUOT: "the disk quota is used up; free some and run the same command again, nothing stored is lost",
    errno.EACCES: "it is not writable; choose another with --store",
    errno.EPERM: "it is not writable; choose another with --store",
    errno.EROFS: "it is on a read-only file system; choose another with --store",
    errno.ENOTDIR: "it is a file, or lies below one; choose a folder with --store",
    errno.ELOOP: "a link stands where it keeps a file of its own; remove the link",
    errno.EEXIST: "it is a file; choose a folder with --store",
}
_READ_ONLY = {errno.EACCES, errno.EPERM, errno.EROFS}


@contextmanager
def said_of(store: Path) -> Iterator[None]:
    """Inside, what the system refuses about the files of a store is said."""
    try:
        yield
    except OSError as error:
        raise refusal(store, error) from error
    except SafetensorError as error:  # save_file wraps what the system said
        if "No space" in str(error) or "os error 28" in str(error):
            raise refusal(store, OSError(errno.ENOSPC, "no space")) from error
        raise


@contextmanager
def where_writable() -> Iterator[None]:
    """Inside is what need not be done in a store that can only be read."""
    try:
        yield
    except OSError as error:
        if error.errno not in _READ_ONLY:
            raise


def refusal(store: Path, error: OSError) -> InputError:
    """The sentence."""
    return InputError(f"cannot use store {store}: {_REASONS.get(error.errno or 0, error)}")
