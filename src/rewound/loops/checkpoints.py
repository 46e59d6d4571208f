"""The folder of a run in a user's own loop: its snapshots, one file each, and the arguments it was made with.

    arguments.json      what the run was asked for, and its name; other arguments are an error that names the difference
    rewind-0060.pt      the dense run after 60 epochs, if the technique goes back there
    level-00.pt         the end of the dense run; level-03.pt that of the third level
    latest.pt           where the present level can be resumed
    lock                held by the process that trains here; the system lets go of it when that ends, however it does
    levels/             every level as a ticket, to choose from afterwards, with a table (`keeping`)
    damaged/            snapshots that were not what had been written, when the run went on from another

Files are written beside their place and renamed, so that a killed process leaves the old one or the new one. Each has a
checksum and is bound to the run and to its name (`sealed`). Earlier versions wrote neither: such files are read as they
are, and listed in arguments.json, so that no other file gets by without a checksum.
"""

import json
import math
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

from rewound.foundations.errors import InputError, few
from rewound.foundations.wholefiles import remove_unfinished, write_whole
from rewound.loops import ranks
from rewound.loops.lock import Held, locked
from rewound.loops.progress import Progress, progress_of
from rewound.loops.sealed import Damaged, read_unchecked, seal_of, write_sealed
from rewound.loops.snapshot import Content, Subjects, checked_content
from rewound.states.storage.artifact import digest

Arguments = Mapping[str, object]
VERSION = 2
"""Of arguments.json; the first had no checksum, and neither had the snapshots beside it."""


class Snapshot(NamedTuple):
    """One file: what was taken of the subjects, and how far the run had come."""

    content: Content
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
        """Make the folder for a run with these arguments, or check that it was made for them."""
        made = self._made() if check else {}
        for name, value in arguments.items():
            if made and not _is_same(made.get(name), value) and name not in may_differ:
                raise InputError(
                    f"{self.path} was made with {name} {made.get(name)}, not {value}; "
                    "give the same arguments, or another folder"
                )
        if ranks.rank() == 0:
            facts = {"version": VERSION, "run": run, "unchecked": self._unchecked(made, say), **arguments}
            text = json.dumps({**facts, "checksum": digest(facts)}, indent=1) + "\n"
            write_whole(self.path / "arguments.json", text.encode())
        ranks.from_first(None)  # wait for the file

    def _made(self) -> dict[str, object]:
        """What arguments.json says; nothing where there is none."""
        try:
            found = json.loads((self.path / "arguments.json").read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
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

    def _unchecked(self, made: Mapping[str, object], say: Callable[[str], None]) -> list[str]:
        """The names of the snapshots without a checksum, which is said once."""
        if made.get("version") == VERSION:
            return [name for name in cast(list[str], made["unchecked"]) if self._file(name).exists()]
        names = []
        for path in sorted(self.path.glob("*.pt")):
            try:
                names += [path.stem] if seal_of(path) is None else []
            except Damaged:  # found out when it is read
                continue
        if names:
            say(
                f"written by an earlier version, without a checksum: {few([f'{name}.pt' for name in names])} in "
                f"{self.path}; they are used as they are"
            )
        return names

    @property
    def run(self) -> str:
        """The name of the run that the folder was made for; none where an earlier version made it."""
        return cast(str, self._made().get("run", ""))

    def write(self, name: str, subjects: Subjects, progress: Progress) -> None:
        """Keep a snapshot of the run; afterwards every rank may read it."""
        content = {**subjects.taken(), "progress": progress.state_dict()}
        if failed := ranks.from_first(self._write(name, content, progress.run) if ranks.rank() == 0 else None):
            raise InputError(f"cannot write {self._file(name)}: {failed}; make room there, or give another checkpoint=")

    def _write(self, name: str, content: Mapping[str, object], run: str) -> str | None:
        """Write a snapshot, or return why not: raised on rank 0 alone, an error would leave the others waiting."""
        try:
            write_sealed(content, self._file(name), run)
        except OSError as error:
            return error.strerror or str(error)
        except RuntimeError as error:  # of torch's writer, which knows only that fewer bytes arrived than it sent
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

    def check(self, name: str) -> bool:
        """Whether there is such a snapshot; an error or `Damaged` if it is not what this run wrote under this name."""
        path, made = self._file(name), self._made()
        if not path.exists():
            return False
        seal = seal_of(path)
        if seal is None and made.get("version") == VERSION and name not in cast(list[str], made["unchecked"]):
            raise Damaged(path)
        if seal is not None and seal.run != made.get("run", seal.run):
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
        if not self.check(name):
            return None
        content = read_unchecked(path := self._file(name))
        try:
            return Snapshot(checked_content(content), progress_of(cast(dict[str, object], content).get("progress")))
        except InputError as error:
            raise InputError(
                f"{path} is no snapshot that a run can go on from: {error}; give another folder"
            ) from error

    def keep(self, levels: Collection[int]) -> None:
        """Remove the ends of all other levels, and what resumed the one that has ended."""
        if ranks.rank() == 0:
            self._file("latest").unlink(missing_ok=True)
            for level in self.levels():
                if level not in levels:
                    self._file(level_name(level)).unlink()

    def newest(self, densities: Sequence[float]) -> tuple[Snapshot | None, list[Damaged]]:
        """The newest snapshot on the way to these densities, and the files that are damaged.

        An error where one has been pruned beyond them, and where only damaged ones are left.
        """
        newest: Snapshot | None = None
        sparsest, damaged = 1.0, list[Damaged]()
        for found in self._readable(damaged):
            sparsest = min([sparsest, *found.progress.densities])
            if found.progress.is_on_the_way(densities):
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

    def _readable(self, damaged: list[Damaged]) -> Iterator[Snapshot]:
        """Where the present level stands, then the ends of levels from the last on; notes what cannot be read."""
        for name in ("latest", *map(level_name, reversed(self.levels()))):
            try:
                found = self._snapshot(name)
            except Damaged as error:
                damaged.append(error)
            else:
                if found is not None:
                    yield found

    def set_aside(self, damaged: Sequence[Damaged], epoch: int, say: Callable[[str], None]) -> None:
        """Say which files the run does not go on from, and move them where nothing is written over them."""
        for error in damaged:
            aside = self.path / "damaged" / error.path.name
            while aside.exists():
                aside = aside.with_name(f"{aside.stem}-again{aside.suffix}")
            say(f"{error}; set aside as {aside}; going on from epoch {epoch}")
            if ranks.rank() == 0:
                aside.parent.mkdir(exist_ok=True)
                error.path.replace(aside)

    def levels(self) -> list[int]:
        """The levels whose ends are kept, in order."""
        numbers = (path.stem.removeprefix("level-") for path in self.path.glob("level-*.pt"))
        return sorted(int(number) for number in numbers if number.isdecimal())

    def _file(self, name: str) -> Path:
        return self.path / f"{name}.pt"


@contextmanager
def opened(path: Path | None) -> Iterator[tuple[Folder, Held]]:
    """The run's folder, locked; a temporary one where nobody asked to resume."""
    if path is not None:
        with locked(path) as held:
            if held.file is not None:
                remove_unfinished(path)
            yield Folder(path), held
        return
    with tempfile.TemporaryDirectory() as temporary:
        shared = Path(ranks.from_first(temporary))
        yield Folder(shared), Held(shared)
        ranks.from_first(None)  # nobody reads it any more


def _is_same(made: object, given: object) -> bool:
    """Whether an argument is what it was; a rate of 0.2 was once written as 0.19999999999999996."""
    if isinstance(made, float) and isinstance(given, float):
        return math.isclose(made, given, rel_tol=1e-9)
    return made == given


def level_name(level: int) -> str:
    """The end of a level; 0 is the dense run."""
    return f"level-{level:02d}"


def rewind_name(epoch: int) -> str:
    """The dense run after so many epochs."""
    return f"rewind-{epoch:04d}"
