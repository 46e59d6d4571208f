"""The folder of a run in a user's own loop: its snapshots, one file each, and the arguments it was made with.

    arguments.json      what the run was asked for, and its name; other arguments are an error that names the difference
    rewind-0060.pt      the dense run after 60 epochs, if the technique goes back there
    level-00.pt         the end of the dense run; level-03.pt that of the third level
    latest.pt           where the present level can be resumed
    example.pt          what the model was first called with, if whole units are pruned
    lock                held by the process that trains here; the system releases it when that process ends
    levels/             every level as a ticket, with a table to choose from (`tickets/kept_levels`)
    damaged/            damaged snapshots, set aside when the run went on from another

Files are written under a temporary name and renamed, so that a killed process leaves the old file or the new one. Each
has a checksum, its run and its name (`snapshot`). Earlier versions wrote neither: such files are read as they are, and
listed in arguments.json, so that no other file is accepted without a checksum.

The lock is flock's, which belongs to one open file. A record lock (lockf) belongs to the process, and is lost as soon
as the process closes any other descriptor of the same file, as copying the folder does. Forked workers of a DataLoader
inherit the open file and may outlive a killed process by seconds, so they close it first of all. Over NFS, Linux makes
flock a record lock at the server: it holds between machines, if the server supports locks. With several processes
(DistributedDataParallel) rank 0 holds the lock for all of them.

Within one process, a later run in the same thread takes the folder over, as when an interrupted cell of a notebook is
run again: the earlier run ends, and continuing it is an error. A run in another thread is refused.
"""

import fcntl
import json
import math
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, cast

from rewound.foundations.errors import InputError, few, warn
from rewound.foundations.wholefiles import remove_unfinished, write_whole
from rewound.loops.progress import Progress, progress_of
from rewound.loops.snapshot import Damaged, SavedStates, Subjects, checked_states, read_unchecked, seal_of, write_sealed
from rewound.method.pruning.mask import fits_into
from rewound.states.storage.artifacts import digest
from rewound.tasks import ranks

Arguments = Mapping[str, object]
Shapes = Mapping[str, Sequence[int]]
_DEFAULTS: Arguments = {"slim": False}
"""What arguments were that earlier versions did not write."""
VERSION = 2
"""Of arguments.json; the first had no checksum, and neither had the snapshots beside it."""


class Snapshot(NamedTuple):
    """One file: the states of the subjects, and how far the run had come."""

    states: SavedStates
    progress: Progress


@dataclass(frozen=True)
class Folder:
    """The snapshots below one path; with several processes rank 0 writes, and all must see the same folder."""

    path: Path

    def claim(
        self,
        arguments: Arguments,
        run: str,
        say: Callable[[str], None],
        may_differ: Collection[str] = (),
        *,
        check: bool = True,
    ) -> None:
        """Write the arguments of a run into its folder, or check that the folder was made with the same."""
        written = self._arguments() if check else {}
        known = {**_DEFAULTS, **written}
        for name, value in arguments.items() if written else ():
            if not _is_same(known.get(name), value) and name not in may_differ:
                if name == "weights" and isinstance(before := known.get(name), dict):
                    raise self._made_with_others(before, cast(Shapes, value), known.get("slim"))
                made = f"with {name} {known[name]}, not {value}" if name in known else f"without {name}"
                raise InputError(f"{self.path} was made {made}; give the same arguments, or another folder")
        if ranks.rank() == 0:
            content = {"version": VERSION, "run": run, "unchecked": self._unchecked(written, say), **arguments}
            text = json.dumps({**content, "checksum": digest(content)}, indent=1) + "\n"
            write_whole(self.path / "arguments.json", text.encode())
        ranks.from_first(None)  # wait for the file

    def _made_with_others(self, before: Shapes, now: Shapes, slim: object) -> InputError:
        """The error for a model whose weights have other names or shapes; a slim run may have made it small."""
        wrong = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        shown = [f"{name} {before.get(name, 'missing')} (not {now.get(name, 'missing')})" for name in wrong]
        small = slim is True and before.keys() == now.keys() and all(fits_into(now[n], before[n]) for n in wrong)
        hint = ", made anew with its optimizer if a slim run of this process has made it small" if small else ""
        return InputError(
            f"{self.path} was made with weights {few(shown, 3)}; give the same model{hint}, or another folder"
        )

    def _arguments(self) -> dict[str, object]:
        """The content of arguments.json; empty where there is no such file."""
        try:
            found = json.loads((self.path / "arguments.json").read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            raise self._unreadable(error.strerror if isinstance(error, OSError) else None) from error
        if not isinstance(found, dict) or found.get("version") not in (1, VERSION):
            raise InputError(f"{self.path} was made by another version of rewound; give another folder")
        checksum = found.pop("checksum", None)
        if (checksum is not None or found["version"] != 1) and checksum != digest(found):
            raise self._unreadable()
        return found

    def _unreadable(self, why: str | None = None) -> InputError:
        return InputError(
            f"cannot read {self.path / 'arguments.json'}: {why or 'it is damaged'}; give another folder, "
            "or remove this file if the arguments are the same as before"
        )

    def _unchecked(self, written: Arguments, say: Callable[[str], None]) -> list[str]:
        """The names of the snapshots without a checksum; a message names them the first time."""
        if written.get("version") == VERSION:
            return [name for name in cast(list[str], written["unchecked"]) if self._file(name).exists()]
        names = []
        for path in sorted(self.path.glob("*.pt")):
            try:
                names += [path.stem] if seal_of(path) is None else []
            except Damaged:  # reported when it is read
                continue
        if names:
            say(
                f"written by an earlier version, without a checksum: {few([f'{name}.pt' for name in names])} in "
                f"{self.path}; they are used as they are"
            )
        return names

    @property
    def run(self) -> str:
        """The name of the run that the folder was made for; empty where an earlier version made it."""
        return cast(str, self._arguments().get("run", ""))

    def write(self, name: str, subjects: Subjects, progress: Progress) -> None:
        """Write a snapshot of the run; afterwards every rank may read it."""
        self.write_content(name, {**subjects.states(), "progress": progress.state_dict()}, progress.run)

    def write_content(self, name: str, content: Mapping[str, object], run: str) -> None:
        """Write a file of the run that is no snapshot; afterwards every rank may read it."""
        if failed := ranks.from_first(self._write(name, content, run) if ranks.rank() == 0 else None):
            raise InputError(f"cannot write {self._file(name)}: {failed}; make room there, or give another checkpoint=")

    def _write(self, name: str, content: Mapping[str, object], run: str) -> str | None:
        """Write a snapshot, or return why not: an error raised on rank 0 alone would leave the other ranks waiting."""
        try:
            write_sealed(content, self._file(name), run)
        except OSError as error:
            return error.strerror or str(error)
        except RuntimeError as error:  # torch's writer knows only that fewer bytes arrived than it sent
            if isinstance(error.__context__, OSError):
                return error.__context__.strerror
            return f"the file ends too soon, as on a full disk ({error})"
        return None

    def read(self, name: str) -> Snapshot | None:
        """A snapshot with its tensors on the CPU, or None."""
        try:
            return self._snapshot(name)
        except Damaged as error:
            raise InputError(f"{error}; remove the folder to start again") from error

    def read_content(self, name: str) -> object:
        """What a file of the run holds that is no snapshot, or None; a damaged one is named and not used."""
        try:
            return read_unchecked(self._file(name)) if self.has(name) else None
        except Damaged as error:
            warn(f"{error}, and is not used")
            return None

    def has(self, name: str) -> bool:
        """Whether there is such a snapshot; an error or `Damaged` if it is not what this run wrote under this name."""
        path, written = self._file(name), self._arguments()
        if not path.exists():
            return False
        seal = seal_of(path)
        if seal is None and written.get("version") == VERSION and name not in cast(list[str], written["unchecked"]):
            raise Damaged(path)
        if seal is not None and seal.run != written.get("run", seal.run):
            raise InputError(
                f"{path} is a snapshot of another run; put back the one of this run, or remove it to go on from an "
                "earlier one"
            )
        if seal is not None and seal.file != name:
            raise InputError(
                f"{path} is the snapshot that was written as {seal.file}.pt; give the files their names back, or "
                "remove it to go on from an earlier one"
            )
        return True

    def _snapshot(self, name: str) -> Snapshot | None:
        if not self.has(name):
            return None
        content = read_unchecked(path := self._file(name))
        try:
            return Snapshot(checked_states(content), progress_of(cast(dict[str, object], content).get("progress")))
        except InputError as error:
            raise InputError(
                f"{path} is no snapshot that a run can go on from: {error}; give another folder"
            ) from error

    def keep(self, levels: Collection[int]) -> None:
        """Remove the ends of all levels but these, and `latest`, which was for the level that has ended."""
        if ranks.rank() == 0:
            self._file("latest").unlink(missing_ok=True)
            for level in self.levels():
                if level not in levels:
                    self._file(level_name(level)).unlink()

    def newest(self, densities: Sequence[float]) -> tuple[Snapshot | None, list[Damaged]]:
        """The newest snapshot from which a run to these densities can go on, and the damaged files.

        An error where a snapshot has been pruned further than asked for, and where only damaged ones are left.
        """
        newest: Snapshot | None = None
        sparsest, damaged = 1.0, list[Damaged]()
        for name in ("latest", *map(level_name, reversed(self.levels()))):
            try:
                found = self._snapshot(name)
            except Damaged as error:
                damaged.append(error)
                continue
            if found is None:
                continue
            sparsest = min([sparsest, *found.progress.densities])
            if found.progress.leads_to(densities):
                if newest is not None and found.progress.epoch <= newest.progress.epoch:
                    break  # earlier levels are older still
                newest = found
        if newest is None and damaged and sparsest == 1:
            raise InputError(f"{damaged[0]}; remove the folder to start again") from damaged[0]
        if sparsest < 1 and (newest is None or densities[-1] > sparsest):
            raise InputError(
                f"{self.path} holds a run pruned to {1 / sparsest:.4g}x, which cannot go on to "
                f"{1 / densities[-1]:.4g}x; give the same arguments, or another folder"
            )
        return newest, damaged

    def set_aside(self, damaged: Sequence[Damaged], start: str, say: Callable[[str], None]) -> None:
        """Name the damaged files and move them to a folder where nothing overwrites them; the run begins at `start`."""
        for error in damaged:
            aside = self.path / "damaged" / error.path.name
            while aside.exists():
                aside = aside.with_name(f"{aside.stem}-again{aside.suffix}")
            say(f"{error}; set aside as {aside}; going on from {start}")
            if ranks.rank() == 0:
                aside.parent.mkdir(exist_ok=True)
                error.path.replace(aside)

    def levels(self) -> list[int]:
        """The levels whose ends are kept, in order."""
        numbers = (path.stem.removeprefix("level-") for path in self.path.glob("level-*.pt"))
        return sorted(int(number) for number in numbers if number.isdecimal())

    def _file(self, name: str) -> Path:
        return self.path / f"{name}.pt"


def _is_same(written: object, given: object) -> bool:
    """Whether an argument has not changed; an earlier version wrote a rate of 0.2 as 0.19999999999999996."""
    if isinstance(written, float) and isinstance(given, float):
        return math.isclose(written, given, rel_tol=1e-9)
    return written == given


def level_name(level: int) -> str:
    """The name of the snapshot at the end of a level; 0 is the dense run."""
    return f"level-{level:02d}"


def rewind_name(epoch: int) -> str:
    """The name of the snapshot of the dense run after so many epochs."""
    return f"rewind-{epoch:04d}"


# The lock


@dataclass(eq=False)
class FolderLock:
    """The lock on a folder that a run of this process trains in."""

    folder: Path
    leave: Callable[[], object] = lambda: None
    """Ends the run, as leaving its loop does."""
    thread: threading.Thread = field(default_factory=threading.current_thread)
    file: int | None = None
    """The descriptor that holds the lock; None on other ranks, in forked children and where there are no locks."""
    taken_over: bool = False

    def check(self) -> None:
        """An error if a later run has taken the folder over."""
        if self.taken_over:
            raise InputError(
                f"a later run of this process trains in {self.folder}, so this one has ended; give each run a "
                "checkpoint folder of its own"
            )

    def release(self) -> None:
        """Release the folder, unless a later run has taken it over."""
        if _LOCKS.get(self.folder) is self:
            del _LOCKS[self.folder]
        if self.file is not None:
            os.close(self.file)
            self.file = None


_LOCKS: dict[Path, FolderLock] = {}


@contextmanager
def locked(folder: Path) -> Iterator[FolderLock]:
    """Inside, the folder exists, and no other run trains in it."""
    lock = FolderLock(folder.resolve())
    try:
        problem = _take_over(lock)
        if problem := ranks.from_first(problem or (None if ranks.rank() or lock.file is not None else _lock(lock))):
            raise InputError(problem)
        _LOCKS[lock.folder] = lock
        yield lock
    finally:
        lock.release()


def _take_over(lock: FolderLock) -> str | None:
    """Take the lock of an earlier run of this process in the same folder and end that run, or return why not."""
    earlier = _LOCKS.get(lock.folder)
    if earlier is None:
        return None
    if earlier.thread.is_alive() and earlier.thread is not lock.thread:
        return (
            f"another thread of this process trains in {lock.folder} ({earlier.thread.name}); wait for it, or give "
            "another checkpoint folder"
        )
    earlier.taken_over = True
    lock.file, earlier.file = earlier.file, None
    earlier.leave()
    return None


def _lock(lock: FolderLock) -> str | None:
    """Lock the folder, or return why not."""
    folder = lock.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        return f"cannot keep checkpoints in {folder}: {error.strerror}; give another folder"
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        owner = os.read(file, 200).decode(errors="replace")
        os.close(file)
        return f"another process trains in {folder} ({owner}); wait for it, or give another checkpoint folder"
    except OSError as error:
        os.close(file)
        warn(f"cannot lock {folder} ({error.strerror}): see to it that no second process trains there")
        return None
    lock.file = file
    os.ftruncate(file, 0)
    os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return None


def _in_child() -> None:
    """A forked child closes the files it inherited, so that the lock ends with the parent."""
    for lock in _LOCKS.values():
        if lock.file is not None:
            os.close(lock.file)
            lock.file = None
    _LOCKS.clear()


os.register_at_fork(after_in_child=_in_child)


@contextmanager
def opened(path: Path | None) -> Iterator[tuple[Folder, FolderLock]]:
    """The run's folder, locked; a temporary one where nobody asked to resume."""
    if path is not None:
        with locked(path) as lock:
            if lock.file is not None:
                remove_unfinished(path)
            yield Folder(path), lock
        return
    with tempfile.TemporaryDirectory() as temporary:
        shared = Path(ranks.from_first(temporary))
        yield Folder(shared), FolderLock(shared)
        ranks.from_first(None)  # by now no rank reads it any more
