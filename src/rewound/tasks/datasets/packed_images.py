"""Data sets of JPEG files in the cache: packed one after another into a few large files, which are memory-mapped.

prepare: a copy of the data set -> every file decodes, and there are as many as there must be -> the folder NAME
load:    NAME/index.safetensors, whose checksum holds, and the large files beside it -> PackedImages
decoded: indices -> files, whose checksums hold -> Pictures, by threads; a feed does so ahead of training (`Encoded`)

| name         | train     | held out | classes | smallest class: train, held out |
|--------------|-----------|----------|---------|---------------------------------|
| imagenet     | 1,281,167 | 50,000   | 1,000   | 732, 50                         |
| tinyimagenet | 100,000   | 10,000   | 200     | 500, 50                         |
| imagenette   | 9,469     | 3,925    | 10      | 858, 357                        |

Labels number the classes in the order of their synset ids. The files of a part lie in the order of the sha256 of their
contents: it is as good as random, so that a pack which is read from its beginning to its end mixes the classes, and it
is the same whatever a whole pack was made from. A subset of N images of each class, to try things out, is a data set of
its own, in the folder NAME-N-per-class.
"""

import hashlib
import json
import math
import re
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rewound.foundations.errors import InputError, as_whole
from rewound.foundations.names import unknown
from rewound.foundations.wholefiles import default_cache
from rewound.tasks.datasets.jpegs import decoder as decoder_of
from rewound.tasks.datasets.prepared import Damaged, read
from rewound.tasks.feed import begin_to_decode

VERSION: Final = 1
INDEX: Final = "index.safetensors"
PARTS: Final = ("train", "held-out")


class Size(NamedTuple):
    """How many images a data set has, and of which classes."""

    train: int
    held_out: int
    classes: int
    smallest: tuple[int, int]
    """The images of the smallest class, to train on and held out."""
    synsets: str
    """`digest_of` the classes."""


def digest_of(classes: Iterable[str]) -> str:
    """What the synset ids of a data set are recognised by, in whatever order they come."""
    return hashlib.sha256("\n".join(sorted(classes)).encode()).hexdigest()


IMAGENETTE: Final = (
    *("n01440764", "n02102040", "n02979186", "n03000684", "n03028079"),
    *("n03394916", "n03417042", "n03425413", "n03445777", "n03888257"),
)
_IMAGENET = "385e0240499426c022b773be1ae4da780f057b89c9694c7f47199f62746b6edd"  # of imagenet_synsets.txt in timm 1.0.31
_TINY = "add4bf0c8712ef7fb4bca98e3bbaf07101636c5db62cce486fd2af71cc11caf8"  # of wnids.txt in tiny-imagenet-200.zip
SIZES: Final = {
    "imagenet": Size(1_281_167, 50_000, 1_000, (732, 50), _IMAGENET),
    "tinyimagenet": Size(100_000, 10_000, 200, (500, 50), _TINY),
    "imagenette": Size(9_469, 3_925, 10, (858, 357), digest_of(IMAGENETTE)),
}
REMEDIES: Final = {
    "imagenet": "get ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and ILSVRC2012_devkit_t12.tar.gz from "
    "image-net.org into one folder (or the parquet files of Hugging Face's ILSVRC/imagenet-1k)",
    "tinyimagenet": "get tiny-imagenet-200.zip from cs231n.stanford.edu",
    "imagenette": "get imagenette2-320.tgz (or another size) from github.com/fastai/imagenette",
}


@dataclass(frozen=True, eq=False)
class PackedPart:
    """JPEG files with their labels, int64 (n,), and their (height, width) when decoded, int32 (n, 2)."""

    labels: Tensor
    sizes: Tensor
    files: tuple["PackedFile", ...]
    places: npt.NDArray[np.int64]
    """Of each JPEG file: which of `files` it is in, where it begins and ends there, and its crc32."""

    def __len__(self) -> int:
        return len(self.labels)

    def jpeg(self, index: int) -> memoryview:
        """The bytes of a JPEG file, not copied; they are those that were packed, or it is an error."""
        number, start, end, checksum = map(int, self.places[index])
        data = self.files[number].content[start:end]
        if zlib.crc32(data) != checksum:
            path, _, remedy = self.files[number]
            raise Damaged(
                f"{path} is damaged (the checksum of bytes {start} to {end} does not hold)", f"{remedy} to make it anew"
            )
        return data

    @cached_property
    def lengths(self) -> Tensor:
        """The bytes of each picture when it is decoded."""
        return 3 * self.sizes[:, 0].long() * self.sizes[:, 1].long()

    @property
    def pixels(self) -> int:
        """The bytes that all of it has when decoded."""
        return int(self.lengths.sum())


class PackedFile(NamedTuple):
    """One of the large files, mapped into memory."""

    path: Path
    content: memoryview
    remedy: str
    """What makes it anew."""


@dataclass(frozen=True, eq=False)
class PackedImages:
    """A prepared data set; those with the same digest have the same images in the same order."""

    classes: tuple[str, ...]
    train: PackedPart
    held_out: PackedPart
    digest: str


class Pictures(NamedTuple):
    """Decoded images, one after another: the bytes of each are height x width x 3, in RGB, from its start on."""

    pixels: Tensor
    starts: Tensor
    heights: Tensor
    widths: Tensor
    labels: Tensor


def size(name: str, per_class: int | None = None) -> Size:
    """How many images a data set has, or its subset of so many images of each class; known without the data.

    If a class has fewer held-out images than that, the subset has all held-out images.

    >>> size("imagenette").train, size("imagenette", 5)[:3]
    (9469, (50, 50, 10))
    >>> size("tinyimagenet", 600)
    Traceback (most recent call last):
    rewound.foundations.errors.InputError: a subset of tinyimagenet has 1 to 500 images of each class, not 600
    """
    whole = _known(name)
    if per_class is None:
        return whole
    if not 1 <= as_whole("per-class", per_class) <= whole.smallest[0]:
        raise InputError(f"a subset of {name} has 1 to {whole.smallest[0]} images of each class, not {per_class}")
    held_out = whole.classes * per_class if per_class <= whole.smallest[1] else whole.held_out
    smallest = per_class, min(per_class, whole.smallest[1])
    return Size(whole.classes * per_class, held_out, whole.classes, smallest, whole.synsets)


def load(name: str, cache: Path | None = None, per_class: int | None = None) -> PackedImages:
    """The prepared data set, or the subset of it that was prepared with the same `per_class`.

    Only the index is read here. What is damaged in a large file is found when it is read.

    >>> load("imagenette", Path("no-cache"))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    rewound.foundations.errors.InputError: no imagenette in no-cache: get imagenette2-320.tgz ...
    """
    cache = cache or default_cache()
    return loaded(name, cache, per_class, size(name, per_class))


def check(name: str, cache: Path | None = None, per_class: int | None = None) -> None:
    """An error, the one of `load`, if it was not prepared; what is there is not read."""
    cache = cache or default_cache()
    size(name, per_class)
    if not (folder(name, cache, per_class) / INDEX).exists():
        raise missing(name, cache, per_class)


@dataclass(frozen=True, eq=False)
class Encoded:
    """A part whose pictures one of `decoders()` decodes when a batch needs them, as a feed takes it (`feed.Source`)."""

    part: PackedPart
    decoder: str

    def __post_init__(self) -> None:
        decoder_of(self.decoder)  # an error if it is not there

    @property
    def lengths(self) -> Tensor:
        """The bytes of each picture when it is decoded."""
        return self.part.lengths

    def other_tensors(self, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What `Pictures` has of these beside their pixels, which lie one after another."""
        sizes, lengths = self.part.sizes[chosen], self.lengths[chosen]
        return lengths.cumsum(0) - lengths, sizes[:, 0], sizes[:, 1], self.part.labels[chosen]

    def decode(self, index: int, into: npt.NDArray[np.uint8]) -> None:
        """Put the pixels of a picture where they belong."""
        height, width = self.part.sizes[index].tolist()
        data = self.part.jpeg(index)
        try:
            decoder_of(self.decoder)(data, into.reshape(height, width, 3))
        except Exception as error:  # each decoder has its own, for data that packing has found to be whole
            path = self.part.files[self.part.places[index][0]].path
            raise InputError(
                f"{self.decoder} cannot decode image {index} of {path} as {width} x {height} pixels ({error}); "
                "prepare the data anew, or install another decoder"
            ) from error


def decoded(
    part: PackedPart,
    indices: Tensor | Sequence[int],
    decoder: str,
    *,
    threads: Executor | int = 1,
    into: Tensor | None = None,
) -> Pictures:
    """The pictures of a part with these indices, decoded by threads: so many, or those of an executor.

    `decoder` is one of `decoders()`. `into` is memory for the pixels, as much as needed or more; without it there is
    memory of its own.
    """
    if isinstance(threads, int):
        with ThreadPoolExecutor(threads) as executor:
            return decoded(part, indices, decoder, threads=executor, into=into)
    source, chosen = Encoded(part, decoder), torch.as_tensor(indices, dtype=torch.int64)
    ends = source.lengths[chosen].cumsum(0).tolist()
    total = ends[-1] if ends else 0
    pixels = torch.empty(total, dtype=torch.uint8) if into is None else into[:total]
    if len(pixels) < total:
        raise InputError(f"{len(pixels):,} bytes are too few for {len(chosen)} pictures, which have {total:,}")
    for some in begin_to_decode(source, chosen, ends, pixels, threads):
        some.result()
    return Pictures(pixels, *source.other_tensors(chosen))


def folder(name: str, cache: Path, per_class: int | None = None) -> Path:
    """Where a data set is, or its subset."""
    return cache / (name if per_class is None else f"{name}-{per_class}-per-class")


def missing(name: str, cache: Path, per_class: int | None = None) -> InputError:
    """What to do about a data set that was not prepared, or has lost its index."""
    if (where := folder(name, cache, per_class)).exists():
        return Damaged(f"{where} is damaged (it has no {INDEX})", f"{preparation(name, per_class)} to make it anew")
    subset = re.compile(rf"{name}-(\d+)-per-class")
    there = [path for path in sorted(cache.glob(f"{name}*")) if (path / INDEX).exists()]
    other = [f"the whole of {name} is" for path in there if path.name == name]
    other += [f"its subset of {found[1]} per class is" for path in there if (found := subset.fullmatch(path.name))]
    return InputError(
        f"no {where.name} in {cache}{f' (but {other[0]})' if other else ''}: {REMEDIES[name]}, "
        f"then {preparation(name, per_class)}"
    )


def preparation(name: str, per_class: int | None) -> str:
    """What prepares a data set, or its subset."""
    option = "" if per_class is None else f" --per-class {per_class}"
    return f"run `rewound data {name} --from FILE-OR-FOLDER{option}`"


def _known(name: str) -> Size:
    if name not in SIZES:
        raise InputError(unknown("data set of images", name, SIZES))
    return SIZES[name]


def loaded(name: str, cache: Path, per_class: int | None, expected: Size) -> PackedImages:
    """`load` for a data set of any size."""
    where = folder(name, cache, per_class)
    remedy = preparation(name, per_class)
    tensors = read(where / INDEX, remedy)
    if tensors is None:
        raise missing(name, cache, per_class)
    about = description(tensors, where)
    if about["version"] != VERSION:
        raise Damaged(
            f"{where} was packed in version {about['version']} of the format, and this rewound reads version {VERSION}",
            f"remove it and {remedy} to make it anew",
        )
    train, held_out = (_part(part, tensors, about, where, remedy) for part in PARTS)
    found = (about["name"], about["per_class"], len(train), len(held_out), len(about["classes"]))
    if found != (name, per_class, *expected[:3]):
        raise Damaged(
            f"{where} has {found[2]:,} + {found[3]:,} images of {found[0]} in {found[4]:,} classes instead of "
            f"{expected.train:,} + {expected.held_out:,} of {name} in {expected.classes:,}",
            f"remove it and {remedy}",
        )
    for part, labels in zip(PARTS, (train.labels, held_out.labels), strict=True):
        if len(odd := labels[(labels < 0) | (labels >= expected.classes)]):
            raise Damaged(
                f"{where / INDEX} is damaged (a {part} label is {int(odd[0])}, and there are {expected.classes:,} "
                "classes, from 0)",
                f"{remedy} to make it anew",
            )
    return PackedImages(tuple(about["classes"]), train, held_out, about["digest"])


def description(tensors: dict[str, Tensor], where: Path) -> dict[str, Any]:
    """What an index says of its pack."""
    about: dict[str, Any] = json.loads(tensors["about"].numpy().tobytes()) if "about" in tensors else {}
    if "version" not in about:
        raise Damaged(f"{where / INDEX} is not the index of packed images", f"remove {where} and prepare it anew")
    return about


def _part(part: str, tensors: dict[str, Tensor], about: dict[str, Any], where: Path, remedy: str) -> PackedPart:
    labels, sizes, lengths, checksums = (tensors[f"{part}/{name}"] for name in ("labels", "sizes", "lengths", "crc32"))
    places, files = [], []
    for number, some in enumerate(torch.split(lengths.long(), about["images"][part])):
        ends = some.cumsum(0)
        places.append(torch.stack([torch.full_like(ends, number), ends - some, ends], 1))
        files.append(_mapped(where / file_name(part, number), int(some.sum()), remedy))
    return PackedPart(labels.long(), sizes, tuple(files), torch.cat([torch.cat(places), checksums[:, None]], 1).numpy())


def file_name(part: str, number: int) -> str:
    """One of the large files."""
    return f"{part}-{number:03}.safetensors"


def _mapped(path: Path, length: int, remedy: str) -> PackedFile:
    if not path.exists():
        raise Damaged(f"{path.parent} is damaged (it has no {path.name})", f"{remedy} to make it anew")
    try:
        with safe_open(path, framework="np") as file:
            shape = file.get_slice("files").get_shape()
        with path.open("rb") as raw:
            header = int.from_bytes(raw.read(8), "little")
    except (OSError, SafetensorError) as error:
        raise Damaged(f"{path} is damaged ({error})", f"{remedy} to make it anew") from error
    if shape != [length]:
        raise Damaged(
            f"{path} is damaged (it has {math.prod(shape)} bytes instead of {length})", f"{remedy} to make it anew"
        )
    if not length:  # nothing can be mapped
        return PackedFile(path, memoryview(b""), remedy)
    content: Any = np.memmap(path, np.uint8, "r", offset=8 + header)  # whose types do not say that it is a buffer
    return PackedFile(path, memoryview(content), remedy)
