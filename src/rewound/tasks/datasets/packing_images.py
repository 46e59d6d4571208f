"""From a copy of a data set of images to its folder in the cache: checked, in the pack's order, whole or not at all.

Memory is bounded however large the copy is. Each JPEG file is read once, in the order of the copy, checked by threads,
and appended to one of some temporary files: which one is decided by the first bits of its sha256, the order of the
pack. Then each of these is sorted in memory and written as one of the large files. All this happens in a folder beside
the cache's others, which is renamed when it is complete; what a killed process leaves is removed by the next one.
"""

import hashlib
import json
import shutil
import time
import zlib
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from rewound.foundations.errors import InputError, few
from rewound.foundations.owners import owner_from, this_process, usable_cores
from rewound.foundations.wholefiles import FORGOTTEN, default_cache, replacing
from rewound.tasks.datasets.image_copies import Copy, Found, check_counts, the_classes
from rewound.tasks.datasets.jpegs import Checked, Unreadable, check_installed, checked
from rewound.tasks.datasets.packed_images import (
    INDEX,
    PARTS,
    VERSION,
    Size,
    description,
    file_name,
    folder,
    loaded,
    missing,
    preparation,
    size,
)
from rewound.tasks.datasets.packed_images_sources import copy_at
from rewound.tasks.datasets.prepared import Damaged, cannot_write, check_source, publish, read

Say = Callable[[str], object]
_BYTES = {"imagenet": 115_000, "tinyimagenet": 2_500, "imagenette": 115_000}  # of a JPEG file, on average, at most
_LARGE = 800_000_000  # bytes of a large file, about
_MOST_UNREADABLE = 20
_AT_ONCE = 8  # images in memory for each thread
Records = npt.NDArray[np.void]  # an array of `_Record`


def prepare(
    name: str,
    source: Path | None = None,
    cache: Path | None = None,
    per_class: int | None = None,
    say: Say = lambda _: None,
) -> Path:
    """Pack a data set, or `per_class` images of each of its classes, unless that was done; return the folder.

    >>> prepare("imagenette", Path("nowhere"), cache=Path("no-cache"))
    Traceback (most recent call last):
    rewound.foundations.errors.InputError: no file or folder nowhere: give an archive or a folder that exists
    """
    return _prepare(name, source, cache or default_cache(), per_class, size(name, per_class), say)


def summary(name: str, cache: Path | None = None, per_class: int | None = None) -> str:
    """What is in a prepared data set, and what was made anew of it."""
    cache = cache or default_cache()
    where = folder(name, cache, per_class)
    tensors = read(where / INDEX, preparation(name, per_class))
    if tensors is None:
        raise missing(name, cache, per_class)
    return str(description(tensors, where)["summary"])


def _prepare(name: str, source: Path | None, cache: Path, per_class: int | None, expected: Size, say: Say) -> Path:
    check_source(source)
    target = folder(name, cache, per_class)
    if target.exists():
        try:
            _check_all(name, cache, per_class, expected)
        except Damaged as error:
            if source is None:
                raise
            say(f"{error.fault}: it is made anew")
        else:
            if source is not None:
                say(f"{target} is there already, and {source} was not read; remove the folder to prepare it anew")
            return target
    if source is None:
        raise missing(name, cache, per_class)
    if source.resolve().is_relative_to(target.resolve()):
        raise InputError(f"{source} lies where {name} is kept when it is prepared, {target}; move it elsewhere first")
    check_installed()
    copy = copy_at(name, source, expected, per_class)
    say(f"reading {copy.description}")
    try:
        with _unfinished(cache, target.name) as made:
            _write(name, copy, made, per_class, expected, say)
            _publish(made, target)
    except (OSError, SafetensorError) as error:
        needed = sum(_BYTES[name] * images for images in expected[:2]) // 10**6 + 10
        raise cannot_write(target, error, f"about {needed:,} MB") from error
    return target


def _check_all(name: str, cache: Path, per_class: int | None, expected: Size) -> None:
    images = loaded(name, cache, per_class, expected)
    for part in (images.train, images.held_out):
        for index in range(len(part)):
            part.jpeg(index)


@contextmanager
def _unfinished(cache: Path, name: str) -> Iterator[Path]:
    """A new folder in the cache, removed if it is still there in the end; with it, those of killed processes."""
    for left in cache.glob(f".{name}.*.part"):
        owner = owner_from(left.name.split(".")[-2])
        lives = owner.lives() if owner else None
        with suppress(FileNotFoundError):  # another process may remove it, too
            written = max(path.stat().st_mtime for path in (left, *left.iterdir()))
            if lives is False or (lives is None and time.time() - written > FORGOTTEN):
                shutil.rmtree(left, ignore_errors=True)
    made = cache / f".{name}.{this_process().as_word()}.part"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _publish(made: Path, target: Path) -> None:
    old = made.with_name(f".{target.name}.old.{this_process().as_word()}.part")
    if target.exists():  # damaged, or of another version
        target.rename(old)
    made.rename(target)
    shutil.rmtree(old, ignore_errors=True)


class _Record(NamedTuple):
    """What is known of a JPEG file when it has been read."""

    digest: int
    label: int
    height: int
    width: int
    length: int
    crc32: int


_RECORD = np.dtype([(name, np.int64) for name in _Record._fields])


@dataclass(frozen=True)
class _Notes:
    """What is said of a pack: how many images of a part are grey, and which were made anew for which reason."""

    grey: Counter[str] = field(default_factory=Counter)
    made_anew: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))


class _Draft:
    """A part while it is read: temporary files, and the records of what was appended to them."""

    def __init__(self, part: str, made: Path, files: int) -> None:
        self.part = part
        self.paths = [made / f"{part}-{number}" for number in range(files)]
        self._records = array("q")

    def read_in(self, found: Iterator[tuple[_Record, bytes]]) -> None:
        with ExitStack() as opened:
            files = [opened.enter_context(path.open("wb")) for path in self.paths]
            for record, jpeg in found:
                files[record.digest * len(files) >> 63].write(jpeg)
                self._records.extend(record)

    def records(self) -> Records:
        """What is known of each JPEG file, in the order of the pack."""
        records = self._as_they_came()
        return records[self._order(records)]

    def write_large_files(self) -> list[int]:
        """The temporary files, sorted; how many images there are in each."""
        records = self._as_they_came()
        order = self._order(records)
        bounds = [-(-(number << 63) // len(self.paths)) for number in range(1, len(self.paths))]
        number = np.searchsorted(np.array(bounds, np.int64), records["digest"], side="right")
        for each, path in enumerate(self.paths):
            content = np.fromfile(path, np.uint8)
            path.unlink()
            here = number == each
            ends = np.zeros(len(records), np.int64)
            ends[here] = records["length"][here].cumsum()
            chosen = order[here[order]]
            ranges = zip((ends - records["length"])[chosen].tolist(), ends[chosen].tolist(), strict=True)
            pieces = [content[start:end] for start, end in ranges]
            large = torch.from_numpy(np.concatenate(pieces) if pieces else content)
            with replacing(path.with_name(file_name(self.part, each))) as temporary:
                save_file({"files": large}, temporary)
        return [int(images) for images in np.bincount(number, minlength=len(self.paths))]

    def _as_they_came(self) -> Records:
        return np.frombuffer(self._records, _RECORD)

    def _order(self, records: Records) -> npt.NDArray[np.int64]:
        return np.lexsort((records["label"], records["digest"]))


def _write(name: str, copy: Copy, made: Path, per_class: int | None, expected: Size, say: Say) -> None:
    notes = _Notes()
    drafts = {
        part: _Draft(part, made, -(-images * _BYTES[name] // _LARGE))
        for part, images in zip(PARTS, expected[:2], strict=True)
    }
    for (part, draft), images in zip(drafts.items(), expected[:2], strict=True):
        draft.read_in(_inspected(copy, part, images, notes, say))
    records = {part: draft.records() for part, draft in drafts.items()}
    _check_counts(copy, records, expected)
    say("writing the pack")
    about = {
        "version": VERSION,
        "name": name,
        "per_class": per_class,
        "classes": copy.classes,
        "images": {part: draft.write_large_files() for part, draft in drafts.items()},
        "digest": hashlib.sha256(b"".join(records[part].tobytes() for part in PARTS)).hexdigest(),
        "summary": _summary(name, records, notes, per_class, expected),
    }
    tensors = {"about": torch.from_numpy(np.frombuffer(json.dumps(about).encode(), np.uint8).copy())}
    for part in PARTS:
        columns = {field: torch.from_numpy(records[part][field].copy()) for field in _Record._fields}
        tensors[f"{part}/labels"] = columns["label"].to(torch.int32)
        tensors[f"{part}/sizes"] = torch.stack([columns["height"], columns["width"]], 1).to(torch.int32)
        tensors[f"{part}/lengths"] = columns["length"].to(torch.int32)
        tensors[f"{part}/crc32"] = columns["crc32"]
    publish(dict(sorted(tensors.items())), made / INDEX)


def _inspected(copy: Copy, part: str, many: int, notes: _Notes, say: Say) -> Iterator[tuple[_Record, bytes]]:
    """Every JPEG file of a part, by threads: what is appended, and what is noted of it; an error if some are bad."""
    bad: list[str] = []
    done = 0
    with ThreadPoolExecutor(threads := usable_cores()) as pool:
        waiting: deque[tuple[Found, Future[tuple[Checked, int] | Unreadable]]] = deque()
        found = copy.images(part)
        while True:
            while len(waiting) < _AT_ONCE * threads and (each := next(found, None)):
                waiting.append((each, pool.submit(_inspect, each.data)))
            if not waiting:
                break
            each, future = waiting.popleft()
            if isinstance(result := future.result(), Unreadable):
                bad.append(f"{each.name} ({result})")
                if len(bad) >= _MOST_UNREADABLE:
                    break
                continue
            image, digest = result
            notes.grey[part] += image.grey
            if image.change:
                notes.made_anew[image.change].append(each.name)
            record = _Record(digest, each.label, image.height, image.width, len(image.jpeg), zlib.crc32(image.jpeg))
            yield record, image.jpeg
            done += 1
            if done % 100_000 == 0:
                say(f"{done:,} of {many:,} images of the {part} part read")
    if bad:
        raise InputError(f"{copy.path} has damaged images: {few(bad)}; get it again")


def _inspect(data: bytes) -> tuple[Checked, int] | Unreadable:
    try:
        return checked(data), int.from_bytes(hashlib.sha256(data).digest()[:8], "big") >> 1
    except Unreadable as error:
        return error


def _check_counts(copy: Copy, records: Mapping[str, Records], expected: Size) -> None:
    counts = [np.bincount(records[part]["label"], minlength=expected.classes) for part in PARTS]
    for each, words in zip(counts, ("image to train on", "held-out image"), strict=True):
        if empty := [name for name, images in zip(copy.classes, each, strict=True) if not images]:
            raise InputError(f"{copy.path} has no {words} of {the_classes(empty)}; get it again, whole")
    check_counts(copy.path, copy.classes, [each.tolist() for each in counts], expected)


def _summary(name: str, records: Mapping[str, Records], notes: _Notes, per_class: int | None, expected: Size) -> str:
    train, held_out = (records[part] for part in PARTS)
    both = len(np.intersect1d(train["digest"], held_out["digest"]))
    packed = sum(int(part["length"].sum()) for part in (train, held_out))
    pixels = sum(int((3 * part["height"] * part["width"]).sum()) for part in (train, held_out))
    grey = [notes.grey[part] for part in PARTS]
    changes = ", ".join(f"{len(names):,} {why} ({few(names, 3)})" for why, names in sorted(notes.made_anew.items()))
    lines = [
        f"{len(train):,} images to train on and {len(held_out):,} held out, in {expected.classes:,} classes: "
        f"together {packed / 1e6:,.1f} MB, decoded {pixels / 1e6:,.1f} MB",
        f"a subset: {per_class or 0:,} images of each class to train on, not the whole of {name}" * bool(per_class),
        f"grey: {grey[0]:,} to train on, {grey[1]:,} held out; they are decoded as RGB" * any(grey),
        f"made anew as JPEG files in RGB: {changes}" * bool(changes),
        f"in both parts, and left there, as the data set was published: {both:,}" * bool(both),
    ]
    return "\n".join(line for line in lines if line)
