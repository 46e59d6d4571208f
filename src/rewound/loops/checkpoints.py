"""The folder of a run in a user's own loop: its snapshots, one file each, and the arguments it was made with.

    arguments.json      what the run was asked for; other arguments are an error that names the difference
    rewind-0060.pt      the dense run after 60 epochs, if the technique goes back there
    level-00.pt         the end of the dense run; level-03.pt that of the third level
    latest.pt           where the present level can be resumed
    lock                held by the process that trains here; the system lets go of it when that ends, however it does

Files are written beside their place and renamed, so that a killed process leaves the old one or the new one. They are
read by torch's `weights_only` loader, which runs no code.
"""

import errno
import json
import math
import pickle
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from rewound.errors import InputError
from rewound.loops import ranks
from rewound.loops.lock import Held, locked
from rewound.loops.progress import Progress, ProgressState
from rewound.loops.snapshot import Content, Subjects
from rewound.storage.artifact import Damaged
from rewound.wholefiles import replacing, write_whole

Arguments = Mapping[str, object]
VERSION = 1


class Snapshot(Content):
    """One file: what was taken of the subjects, and how far the run had come."""

    progress: ProgressState


@dataclass(frozen=True)
class Folder:
    """The snapshots below one path; with several processes rank 0 writes, and all must see the same folder."""

    path: Path

    def claim(self, arguments: Arguments, may_differ: Collection[str] = (), *, check: bool = True) -> None:
        """Make the folder for a run with these arguments, or check that it was made for them."""
        made = self._arguments() if check else {}
        for name, value in arguments.items():
            if made and not _is_same(made.get(name), value) and name not in may_differ:
                raise InputError(
                    f"{self.path} was made with {name} {made.get(name)}, not {value}; "
                    "give the same arguments, or another folder"
                )
        if ranks.rank() == 0:
            text = json.dumps({"version": VERSION, **arguments}, indent=1) + "\n"
            write_whole(self.path / "arguments.json", text.encode())
        ranks.from_first(None)  # wait for the file

    def _arguments(self) -> dict[str, object]:
        try:
            found = json.loads((self.path / "arguments.json").read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is damaged"
            raise InputError(
                f"cannot read {self.path / 'arguments.json'}: {why}; give another folder, "
                "or remove this file if the arguments are the same as before"
            ) from error
        if not isinstance(found, dict) or found.get("version") != VERSION:
            raise InputError(f"{self.path} was made by another version of rewound; give another folder")
        return found

    def write(self, name: str, subjects: Subjects, progress: Progress) -> None:
        """Keep a snapshot of the run; afterwards every rank may read it."""
        content: Snapshot = {**subjects.taken(), "progress": progress.state_dict()}
        if failed := ranks.from_first(self._write(name, content) if ranks.rank() == 0 else None):
            raise InputError(f"cannot write {self._file(name)}: {failed}; make room there, or give another checkpoint=")

    def _write(self, name: str, content: Snapshot) -> str | None:
        """Write a snapshot, or return why not: raised on rank 0 alone, an error would leave the others waiting."""
        try:
            with replacing(self._file(name)) as temporary:
                torch.save(content, temporary)
        except OSError as error:
            return error.strerror or str(error)
        except RuntimeError as error:  # of torch's writer, which knows only that fewer bytes arrived than it sent
            return f"the file ends too soon, as on a full disk ({error})"
        return None

    def read(self, name: str) -> Snapshot | None:
        """A snapshot with its tensors on the CPU, or None."""
        try:
            return self._content(name)
        except Damaged as error:
            raise InputError(f"{error}; remove the folder to start again") from error

    def _content(self, name: str) -> Snapshot | None:
        path = self._file(name)
        if not path.exists():
            return None
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            # A file that was cut short is an invalid argument to torch; what else a system says may pass.
            if isinstance(error, OSError) and error.errno != errno.EINVAL:
                raise InputError(f"cannot read {path}: {error.strerror}; make it readable and run again") from error
            raise Damaged(f"cannot read {path}: it is damaged") from error
        if not isinstance(content, dict) or "progress" not in content:
            raise InputError(f"cannot read {path}: it is no snapshot of a run; give another folder")
        return cast(Snapshot, content)

    def keep(self, levels: Collection[int]) -> None:
        """Remove the ends of all other levels, and what resumed the one that has ended."""
        if ranks.rank() == 0:
            self._file("latest").unlink(missing_ok=True)
            for level in self._levels():
                if level not in levels:
                    self._file(level_name(level)).unlink()

    def resumable(self, densities: Sequence[float], say: Callable[[str], None] = lambda text: None) -> Snapshot | None:
        """The newest snapshot on the way to these densities; an error where one has been pruned beyond them."""
        newest: tuple[Progress, Snapshot] | None = None
        sparsest, damaged = 1.0, list[Damaged]()
        for progress, content in self._readable(damaged):
            sparsest = min([sparsest, *progress.densities])
            if progress.is_on_the_way(densities):
                if newest is not None and progress.epoch <= newest[0].epoch:
                    break  # earlier levels are older still
                newest = progress, content
        if newest is None and damaged and sparsest == 1:
            raise InputError(f"{damaged[0]}; remove the folder to start again") from damaged[0]
        if sparsest < 1 and (newest is None or densities[-1] > sparsest):
            raise InputError(
                f"{self.path} holds a run pruned to {1 / sparsest:.4g}x, which cannot go on to "
                f"{1 / densities[-1]:.4g}x; give the same arguments, or another folder"
            )
        if newest is None:
            return None
        for passed_over in damaged:
            say(f"{passed_over}; going on from epoch {newest[0].epoch}")
        return newest[1]

    def _readable(self, damaged: list[Damaged]) -> Iterator[tuple[Progress, Snapshot]]:
        """Where the present level stands, then the ends of levels from the last on; notes what cannot be read."""
        for name in ("latest", *map(level_name, reversed(self._levels()))):
            try:
                content = self._content(name)
            except Damaged as error:
                damaged.append(error)
            else:
                if content is not None:
                    yield progress_in(content), content

    def _levels(self) -> list[int]:
        """The levels whose ends are kept, in order."""
        return sorted(int(path.stem.removeprefix("level-")) for path in self.path.glob("level-*.pt"))

    def _file(self, name: str) -> Path:
        return self.path / f"{name}.pt"


@contextmanager
def opened(path: Path | None) -> Iterator[tuple[Folder, Held]]:
    """The run's folder, locked; a temporary one where nobody asked to resume."""
    if path is not None:
        with locked(path) as held:
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


def progress_in(content: Snapshot) -> Progress:
    """How far the run had come when the snapshot was taken."""
    return Progress.from_state_dict(content["progress"])


def level_name(level: int) -> str:
    """The end of a level; 0 is the dense run."""
    return f"level-{level:02d}"


def rewind_name(epoch: int) -> str:
    """The dense run after so many epochs."""
    return f"rewind-{epoch:04d}"
