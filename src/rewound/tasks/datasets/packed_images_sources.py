"""The copies of ImageNet and its subsets that exist, each read as JPEG files with their labels.

| kind                  | what it holds                                                                               |
|-----------------------|---------------------------------------------------------------------------------------------|
| folders of classes    | train/SYNSET/*.JPEG and val/SYNSET/*.JPEG, or as Tiny-ImageNet and Kaggle have them          |
|                       | (`image_folders`); in a folder, or in a tar or zip archive                                   |
| the official archives | ILSVRC2012_img_train.tar (a tar of each class), ILSVRC2012_img_val.tar (by number) and       |
|                       | ILSVRC2012_devkit_t12.tar.gz (the labels of these, numbered as in its meta.mat)              |
| parquet files         | train-*.parquet and val*-*.parquet, as on Hugging Face: an image with its bytes, a label     |
| WebDataset shards     | *train*.tar and *val*.tar: KEY.jpg (or .jpeg, .png) and KEY.cls, a number                    |

A label is the place of its class among the sorted synset ids; copies whose labels are numbers have them in that order,
unless they name the synset ids in another one. Words say nothing of the order: there the numbers are the labels.
Where a copy has synset ids, they must be those of the data set: Imagewoof has ten classes, too, but not Imagenette's.
Nothing is unpacked to disk, and one image at a time is in memory, or one row group of a parquet file.
"""

import io
import json
import re
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, groupby, zip_longest
from pathlib import Path, PurePosixPath
from typing import Any, Final

from rewound.foundations.errors import InputError, few
from rewound.foundations.names import optional
from rewound.tasks.datasets.image_copies import (
    HELD_OUT,
    SYNSET,
    TRAIN,
    Copy,
    Found,
    Request,
    Wanted,
    check_counts,
    the_classes,
)
from rewound.tasks.datasets.image_folders import PICTURE, content, listed
from rewound.tasks.datasets.packed_images import PARTS, Size


def copy_at(name: str, path: Path, size: Size, per_class: int | None) -> Copy:
    """The copy at `path`; what kind it is shows in the names of the files in it."""
    request = Request(name, path, size, per_class)
    with _reading(path):
        for made in (_official, _parquet, _webdataset, _folders):
            if source := made(request):
                return source
    above, parts = path.resolve().parent, ("train", "val")
    if path.resolve().name in parts and all((above / part).is_dir() for part in parts):
        raise InputError(f"{path} is one part of a copy of {name}: give the folder that holds both parts, {above}")
    raise InputError(
        f"{path} holds no copy of {name}: give a folder (or a tar or zip archive) with train/SYNSET and val/SYNSET, "
        "or the folder of the official archives, of parquet files (train-*.parquet) or of WebDataset shards "
        "(*train*.tar)"
    )


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, OSError) as error:
        raise InputError(f"cannot read {path}: {error}; get it again") from error


def _package(module: str, name: str) -> Any:
    return optional(module, f"this copy needs {name} to be read: `pip install {name}`")


# Folders of classes


def _folders(request: Request) -> Copy | None:
    path = _archive_in(request.path, request.name) or request.path
    if not (found := listed(path)):
        return None
    classes = sorted(found.classes)
    request.check_classes(classes)
    counts = [Counter(name for _, name in images) for images in (found.train, found.val)]
    for part, images in zip(("train", "val"), counts, strict=True):
        if empty := sorted({*classes}.difference(images)):
            raise InputError(f"{path} has no image in {part} of {the_classes(empty)}; get it again, whole")
    if request.per_class is None:  # known before anything is read
        check_counts(path, classes, [[images[name] for name in classes] for images in counts], request.size)
    labels = {name: label for label, name in enumerate(classes)}

    def images_of(part: str) -> Iterator[Found]:
        wanted = request.wanted(part)
        with _reading(path), found.opened() as read:
            for file, name in found.train if part == TRAIN else found.val:
                if wanted.takes(labels[name]):
                    yield Found(labels[name], file, read(file))

    return Copy(path, f"{'the folders of classes in' if path.is_dir() else 'the archive'} {path}", classes, images_of)


def _archive_in(folder: Path, name: str) -> Path | None:
    """The archive that lies in a folder; an error if there are several, or folders of classes as well."""
    if not folder.is_dir():
        return None
    archives = [each for pattern in ARCHIVES[name] for each in sorted(folder.glob(pattern))]
    unpacked = [each for pattern in ("train", "*/train") for each in sorted(folder.glob(pattern)) if each.is_dir()]
    if archives and len(archives) + len(unpacked) > 1:
        there = [str(each.relative_to(folder)) for each in archives + unpacked]
        raise InputError(
            f"{folder} holds several copies of {name} ({few(there)}): give the one that you want, such as "
            f"{archives[0]}, or move the others elsewhere"
        )
    return archives[0] if archives else None


ARCHIVES: Final[Mapping[str, Sequence[str]]] = {
    "imagenet": (),
    "tinyimagenet": ("tiny-imagenet-200.zip",),
    "imagenette": ("imagenette*.tgz", "imagenette*.tar.gz"),
}


# The official archives


def _official(request: Request) -> Copy | None:
    """Labels as in torchvision's `ImageNet`: meta.mat numbers the synsets; those without children are the classes."""
    folder = request.folder
    train, val, devkit = (folder / name for name in OFFICIAL)
    if not (train.exists() if request.path.is_dir() else request.path in (train, val, devkit)):
        return None
    if absent := [path.name for path in (train, val, devkit) if not path.exists()]:
        raise InputError(f"{folder} has no {', '.join(absent)}: put all of {', '.join(OFFICIAL)} there")
    with _reading(train), tarfile.open(train) as outer:
        classes = sorted(PurePosixPath(member.name).stem for member in outer if member.name.endswith(".tar"))
    request.check_classes(classes)
    with _reading(devkit):
        truth = _truth(devkit, classes)

    def images(part: str) -> Iterator[Found]:
        wanted = request.wanted(part)
        path = train if part == TRAIN else val
        with _reading(path), tarfile.open(path) as tar:
            members = _by_class(tar, classes, wanted) if part == TRAIN else _by_number(tar, truth)
            for label, member, inside in members:
                if wanted.takes(label):
                    yield Found(label, member.name, content(inside, member))

    return Copy(folder, f"the official archives in {folder}", classes, images)


OFFICIAL: Final = ("ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar", "ILSVRC2012_devkit_t12.tar.gz")
_Member = tuple[int, tarfile.TarInfo, tarfile.TarFile]  # label, image, the archive that it is in


def _by_class(outer: tarfile.TarFile, classes: Sequence[str], wanted: Wanted) -> Iterator[_Member]:
    for member in outer:
        if member.name.endswith(".tar") and (file := outer.extractfile(member)):
            label = classes.index(PurePosixPath(member.name).stem)
            with tarfile.open(fileobj=file) as inner:
                for image in inner:
                    if wanted.enough(label):
                        break
                    if PICTURE.fullmatch(image.name):
                        yield label, image, inner


def _by_number(tar: tarfile.TarFile, truth: Sequence[int]) -> Iterator[_Member]:
    for member in tar:
        if found := re.fullmatch(r"(?:.*/)?ILSVRC2012_val_(\d+)\.JPEG", member.name):
            if not 1 <= int(found[1]) <= len(truth):
                raise InputError(f"{member.name} has no label: the devkit has {len(truth):,}; get both again")
            yield truth[int(found[1]) - 1], member, tar


def _truth(devkit: Path, classes: Sequence[str]) -> list[int]:
    """The labels of the held-out images by their numbers."""
    wanted = {"meta.mat": b"", "ILSVRC2012_validation_ground_truth.txt": b""}
    with tarfile.open(devkit) as tar:
        for member in tar:
            if (name := PurePosixPath(member.name).name) in wanted and member.isfile():
                wanted[name] = content(tar, member)
    meta, numbers = wanted.values()
    try:
        synsets = _package("scipy.io", "scipy").loadmat(io.BytesIO(meta), squeeze_me=True)["synsets"]
        leaves = synsets[synsets["num_children"] == 0]
        synset_of = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in leaves}
        return [classes.index(synset_of[int(number)]) for number in numbers.split()]
    except InputError:
        raise
    except Exception as error:  # scipy raises types of its own for damaged input
        reason = f"{type(error).__name__}: {error}"
        raise InputError(
            f"{devkit} does not say the labels of the classes in the archives ({reason}); get all three again"
        ) from error


# Parquet files and WebDataset shards


_PART = re.compile(r"(?<![a-z])(train|val)")


def _files_of_parts(request: Request, suffix: str) -> dict[str, list[Path]] | None:
    """The files with this suffix in the folder, or in folders there, whose path says train or val."""
    folder = request.folder
    if request.path.is_file() and not (request.path.suffix == suffix and _PART.search(request.path.name.lower())):
        return None
    files: dict[str, list[Path]] = {part: [] for part in PARTS}
    for path in sorted({*folder.glob(f"*{suffix}"), *folder.glob(f"*/*{suffix}"), *folder.glob(f"*/*/*{suffix}")}):
        if found := _PART.findall(path.relative_to(folder).as_posix().lower()):
            files[TRAIN if found[-1] == "train" else HELD_OUT].append(path)
    return files if any(files.values()) else None


def _check_both(request: Request, files: Mapping[str, Sequence[Path]], what: str) -> None:
    for part, word in zip(PARTS, ("train", "val"), strict=True):
        if not files[part]:
            raise InputError(f"{request.path} has no {what} with {word} in its name; get it again, whole")


def _parquet(request: Request) -> Copy | None:
    files = _files_of_parts(request, ".parquet")
    if not files:
        return None
    _check_both(request, files, "parquet file")
    names = {path: _class_names(path) for path in chain(*files.values())}
    first, *others = names
    ours = _in_our_order(names[first])
    for path in others:
        for label, (here, there) in enumerate(zip_longest(_in_our_order(names[path]), ours, fillvalue="not named")):
            if here != there:
                raise InputError(
                    f"class {label} is {here} in {path} and {there} in {first}, and a number must mean the same class "
                    "in all files; get both again, from one place"
                )
    if ours and (_are_synsets(ours) or len(ours) != request.size.classes):
        request.check_classes(ours)

    def images(part: str) -> Iterator[Found]:
        return request.found(part, chain.from_iterable(_rows(request, path, names[path]) for path in files[part]))

    return Copy(request.path, f"the parquet files in {request.folder}", ours or request.numbers, images)


def _are_synsets(names: Sequence[str]) -> bool:
    return all(map(SYNSET.fullmatch, names))


def _in_our_order(names: Sequence[str]) -> list[str]:
    """The classes by their labels, of a file that names them by its numbers."""
    return sorted(names) if _are_synsets(names) else list(names)


def _class_names(path: Path) -> list[str]:
    """The names of the classes as `datasets` writes them into its files, if it has written this one."""
    with _opened_parquet(path) as file:
        written = (file.schema_arrow.metadata or {}).get(b"huggingface", b"{}")
    try:
        found = json.loads(written)
    except ValueError:
        found = None
    for key in ("info", "features", "label", "names"):
        found = found.get(key, {}) if isinstance(found, dict) else None
    if found != {} and not (isinstance(found, list) and all(isinstance(name, str) for name in found)):
        raise InputError(
            f"cannot read {path}: its metadata `huggingface` do not name the classes as `datasets` does; get it again"
        )
    return list(found)


def _opened_parquet(path: Path) -> Any:
    try:
        return _package("pyarrow.parquet", "pyarrow").ParquetFile(path)
    except InputError:
        raise
    except Exception as error:  # pyarrow raises a dozen types for damaged input
        raise InputError(f"cannot read {path}: {error}; get it again") from error


def _rows(request: Request, path: Path, names: Sequence[str]) -> Iterator[Found]:
    """The images of a file that names its classes in that order."""
    ours = _in_our_order(names)
    with _opened_parquet(path) as file:
        number = 0
        try:
            for batch in file.iter_batches(64, columns=["image.bytes", "image.path", "label"]):
                for row in batch.to_pylist():
                    name = row["image"].get("path") or f"row {number} of {path.name}"
                    label = request.checked_label(row["label"], name)
                    label = ours.index(names[label]) if ours != names else label
                    yield Found(label, name, row["image"]["bytes"] or b"")
                    number += 1
        except InputError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise InputError(
                f"{path} has no readable columns `image` (with bytes) and `label` ({reason}); get it again"
            ) from error


def _webdataset(request: Request) -> Copy | None:
    files = _files_of_parts(request, ".tar")
    if not files or not any(".cls" in name for name in _first_names((files[TRAIN] or files[HELD_OUT])[0])):
        return None
    _check_both(request, files, "tar archive")

    def images(part: str) -> Iterator[Found]:
        return request.found(part, chain.from_iterable(_samples(request, path) for path in files[part]))

    return Copy(request.path, f"the WebDataset shards in {request.folder}", request.numbers, images)


def _first_names(path: Path) -> list[str]:
    with tarfile.open(path) as tar:
        return [member.name for member, _ in zip(tar, range(6), strict=False)]


def _samples(request: Request, path: Path) -> Iterator[Found]:
    """Files that follow one another and have the same name up to its first point are a sample."""
    with _reading(path), tarfile.open(path) as tar:
        names = ((*_divided(member.name), member) for member in tar if member.isfile())
        for key, members in groupby(names, key=lambda each: each[0]):
            sample = {ending: content(tar, member) for _, ending, member in members if ending in _ENDINGS}
            data = next((sample[ending] for ending in _ENDINGS[:-1] if ending in sample), None)
            if data is None or "cls" not in sample:
                raise InputError(f"{key} in {path} has no jpg or no cls; get it again")
            label, name = sample["cls"].decode("utf-8", "replace").strip(), f"{key} in {path.name}"
            yield Found(request.checked_label(int(label) if label.isdecimal() else label, name), name, data)


_ENDINGS = ("jpg", "jpeg", "png", "cls")


def _divided(path: str) -> tuple[str, str]:
    folder, _, name = path.rpartition("/")
    key, _, ending = name.partition(".")
    return f"{folder}/{key}" if folder else key, ending.lower()
