"""Which process a thing belongs to, and whether that process lives: a claim on work, a file that is being written.

`script_hidden`, `interrupts_held` and `torch_log_held` let a process start others that do not run the user's script
again, that Ctrl-C does not reach, and that log no warnings of torch's C++ code.
"""

import hashlib
import os
import re
import secrets
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing import resource_tracker
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

_PROC = Path("/proc")
_UNSEEN = "unknown"  # the birth of a process that is there, but not shown: another user's, or without /proc
_MOST = 2**31 - 1  # the largest number that a process can have


class Owner(NamedTuple):
    """One process, for ever: a process number that is used again has another birth."""

    host: str
    """The host's name, and which boot and process numbers of it are meant."""
    pid: int
    birth: str | None

    def lives(self) -> bool | None:
        """Whether the process is alive; None where that cannot be seen from here."""
        if self.host != this_host() or (born := _birth(self.pid)) == _UNSEEN:
            return None
        return born is not None and born == self.birth

    def as_word(self) -> str:
        """The owner as a part of a file name; `owner_from` reads it again on the same host."""
        return f"{_short(self.host)}-{self.pid}-{self.birth}"


def usable_cores() -> int:
    """How many cores this process may use, which on a shared machine can be fewer than it has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def this_process() -> Owner:
    """The process that asks."""
    return _owner(os.getpid())


@cache
def _owner(pid: int) -> Owner:
    return Owner(this_host(), pid, _birth(pid))


def owner_from(word: str) -> Owner | None:
    """The owner that a file name says; None: it is no process of this host."""
    match word.split("-"):
        case [host, pid, birth] if host == _short(this_host()) and re.fullmatch("[0-9]{1,10}", pid):
            return Owner(this_host(), int(pid), birth) if is_process_number(int(pid)) else None
    return None


def is_process_number(number: int) -> bool:
    """Whether a process can have this number."""
    return 0 < number <= _MOST


@cache
def this_host() -> str:
    """This host, since it was started, and as its processes are numbered here: containers may share its name."""
    try:
        numbered = f"{(_PROC / 'sys/kernel/random/boot_id').read_text()} {(_PROC / 'self/ns/pid').readlink()}"
    except OSError:
        if sys.platform != "linux":
            return socket.gethostname()
        # A sandbox that hides them, as gVisor does: another one may have the same name and the same process numbers.
        numbered = secrets.token_hex(8)
    return f"{socket.gethostname()}/{_short(numbered)}"


def host_name(host: str) -> str:
    """The name of a host as people know it."""
    return host.partition("/")[0]


def _short(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def _birth(pid: int) -> str | None:
    """When a local process was born; None: it is dead."""
    if not _is_shown(os.getpid()):
        return _UNSEEN if _is_there(pid) else None
    try:
        fields = (_PROC / f"{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return _UNSEEN if _is_there(pid) else None
    return None if fields[0] in "ZX" else fields[19]


@cache
def _is_shown(own: int) -> bool:
    """Whether /proc has the numbers that processes have here; in a container it may have those of the host."""
    try:
        return (_PROC / "self").readlink().name == str(own)
    except OSError:
        return False


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Ctrl-C waits until the end of the block; a process started in it never sees one, not even while it imports."""
    resource_tracker.ensure_running()  # not later: multiprocessing lets Ctrl-C through when it has started its own
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def script_hidden() -> Iterator[None]:
    """A process started inside does not run the user's script again, as `multiprocessing` does to know what is in it.

    A script then needs no `if __name__ == "__main__":`, and what it defines is not there in the process.
    """
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


@contextmanager
def torch_log_held(when: bool = True) -> Iterator[None]:
    """Where torch is loaded inside, also by a process started here, its C++ code logs errors and no warnings.

    DistributedDataParallel logs one in every process, of an option that is meant (`parallel`), and Python's filters of
    warnings do not see it. A level that the user has set stays.
    """
    name = "TORCH_CPP_LOG_LEVEL"
    if not when or name in os.environ:
        yield
        return
    os.environ[name] = "ERROR"
    try:
        yield
    finally:
        os.environ.pop(name, None)
