"""Every kind of copy gives the same pack; a copy that is not whole, or of another kind, is one sentence.

The real data sets are prepared with REWOUND_IMAGENETTE and REWOUND_TINYIMAGENET, each a folder or an archive.
"""

import io
import json
import os
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.io

from rewound.foundations.errors import InputError
from rewound.tasks.datasets import packed_images, packing_images
from rewound.tasks.datasets.packed_images import IMAGENETTE, PackedImages, load
from small_copies import CLASSES, Files, folders, images_by_class, small_sizes, written

IMAGES = images_by_class()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_images, "SIZES", small_sizes())


pytestmark = pytest.mark.usefixtures("small")


def tar_of(files: Files, mode: str = "w") -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as tar:
        for path, content in files.items():
            member = tarfile.TarInfo(path)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return file.getvalue()


def zip_of(files: Files) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
    return file.getvalue()


def tiny() -> Files:
    """As Tiny-ImageNet is published, with what else is in it."""
    train = {
        f"train/{c}/images/{c}_{i}.JPEG": j for (p, c), js in IMAGES.items() if p == "train" for i, j in enumerate(js)
    }
    val = [(name, jpeg) for (part, name), jpegs in IMAGES.items() if part == "val" for jpeg in jpegs]
    lines = "".join(f"val_{i}.JPEG\t{name}\t0\t32\t44\t62\n" for i, (name, _) in enumerate(val))
    other = {"wnids.txt": b"", "train/n00000001/n00000001_boxes.txt": b"", "test/images/test_0.JPEG": b"no label"}
    files = train | {f"val/images/val_{i}.JPEG": jpeg for i, (_, jpeg) in enumerate(val)} | other
    return {f"tiny-imagenet-200/{path}": content for path, content in files.items()} | {
        "tiny-imagenet-200/val/val_annotations.txt": lines.encode(),
        "__MACOSX/train/n00000001/images/._x.JPEG": b"",
    }


def kaggle() -> Files:
    """As Kaggle has ImageNet: the images of val lie in one folder, and a table far from it has their classes."""
    val = [(name, jpeg) for i in range(2) for name in CLASSES for jpeg in [IMAGES["val", name][i]]]
    rows = "".join(f"ILSVRC2012_val_{i:08},{name} 85 1 499 272 \n" for i, (name, _) in enumerate(val))
    files = {path: jpeg for path, jpeg in folders().items() if path.startswith("train")}
    files |= {f"val/ILSVRC2012_val_{i:08}.JPEG": jpeg for i, (_, jpeg) in enumerate(val)}
    other = {"ILSVRC/Data/CLS-LOC/test/ILSVRC2012_test_00000001.JPEG": b"", "LOC_train_solution.csv": b""}
    table = {"LOC_val_solution.csv": f"ImageId,PredictionString\n{rows}".encode()}
    return table | other | {f"ILSVRC/Data/CLS-LOC/{path}": content for path, content in files.items()}


def official() -> Files:
    """The three archives; the devkit numbers the synsets in an order of its own, and has one that is no class."""
    numbered = [CLASSES[1], "n00000009", CLASSES[0], CLASSES[2]]
    fields = [
        ("ILSVRC2012_ID", object),
        ("WNID", object),
        ("words", object),
        ("gloss", object),
        ("num_children", object),
    ]
    rows = [(i, name, "words", "gloss", 2 * (name not in CLASSES)) for i, name in enumerate(numbered, 1)]
    meta = io.BytesIO()
    scipy.io.savemat(meta, {"synsets": np.array(rows, fields)})
    val = [(name, jpeg) for i in range(2) for name in CLASSES for jpeg in [IMAGES["val", name][i]]]
    truth = "".join(f"{numbered.index(name) + 1}\n" for name, _ in val)
    inner = {name: {f"{name}_{i}.JPEG": jpeg for i, jpeg in enumerate(IMAGES["train", name])} for name in CLASSES}
    devkit = {
        "ILSVRC2012_devkit_t12/data/meta.mat": meta.getvalue(),
        "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt": truth.encode(),
        "ILSVRC2012_devkit_t12/readme.txt": b"",
    }
    return {
        "ILSVRC2012_img_train.tar": tar_of({f"{name}.tar": tar_of(inner[name]) for name in reversed(CLASSES)}),
        "ILSVRC2012_img_val.tar": tar_of({f"ILSVRC2012_val_{i:08}.JPEG": jpeg for i, (_, jpeg) in enumerate(val, 1)}),
        "ILSVRC2012_devkit_t12.tar.gz": tar_of(devkit, "w:gz"),
    }


def label_names(names: object) -> str:
    """The metadata of `datasets`."""
    features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
    return json.dumps({"info": {"features": features}})


def parquet(names: tuple[str, ...] | None = None, shift: int = 0, metadata: str | None = None) -> Files:
    """As `datasets` writes them; `names` are those of the classes, in the order of their numbers."""
    files = {}
    order = names if names and set(names) == set(CLASSES) else CLASSES
    for part, split in (("train", "train"), ("val", "validation")):
        rows = [
            {"image": {"bytes": jpeg, "path": f"{i}.JPEG"}, "label": order.index(name) + shift}
            for i in range(4)
            for name in CLASSES
            for jpeg in IMAGES[part, name][i : i + 1]
        ]
        table = pa.Table.from_pylist(rows)
        if names:
            metadata = label_names(list(names))
        if metadata is not None:
            table = table.replace_schema_metadata({"huggingface": metadata})
        half = len(rows) // 2
        for number, piece in enumerate((table[:half], table[half:])):
            file = io.BytesIO()
            pq.write_table(piece, file, row_group_size=2)
            files[f"data/{split}-0000{number}-of-00002.parquet"] = file.getvalue()
    return files


def mixed(names: tuple[str, ...] | None, others: tuple[str, ...] | None, beginning: str = "data/val") -> Files:
    """Parquet files of which those with this beginning name the classes otherwise."""
    return {
        path: parquet(others)[path] if path.startswith(beginning) else content
        for path, content in parquet(names).items()
    }


def webdataset(ending: str = "jpg") -> Files:
    files: Files = {}
    for part, split in (("train", "train"), ("val", "validation")):
        samples = [(label, jpeg) for label, name in enumerate(CLASSES) for jpeg in IMAGES[part, name]]
        for number in range(2):
            shard = {}
            for i, (label, jpeg) in list(enumerate(samples))[number::2]:
                shard |= {f"{i:06}.cls": str(label).encode(), f"{i:06}.{ending}": jpeg, f"{i:06}.json": b"{}"}
            files[f"imagenet1k-{split}-000{number}.tar"] = tar_of(shard)
    return files


SHUFFLED, WORDS = (CLASSES[2], CLASSES[0], CLASSES[1]), ("tench", "church", "French horn")
COPIES: dict[str, Callable[[], Files]] = {
    "folders": folders,
    "folders in a folder": lambda: {f"imagenette2-320/{path}": content for path, content in folders().items()},
    "a gzipped tar": lambda: {"x.tgz": tar_of({f"imagenette2/{p}": c for p, c in folders().items()}, "w:gz")},
    "the folder of a gzipped tar": lambda: {"imagenette2-320.tgz": tar_of(folders(), "w:gz"), "notes.txt": b""},
    "as Tiny-ImageNet": tiny,
    "a zip as Tiny-ImageNet": lambda: {"tiny-imagenet-200.zip": zip_of(tiny())},
    "as Kaggle has it": kaggle,
    "the official archives": official,
    "parquet": parquet,
    "parquet that names classes": lambda: parquet(CLASSES),
    "parquet that numbers classes otherwise": lambda: parquet(SHUFFLED),
    "parquet that names classes in words": lambda: parquet(WORDS),
    "parquet that names two classes by the same word": lambda: parquet(("crane", "church", "crane")),
    "parquet that numbers the classes of val otherwise": lambda: mixed(CLASSES, SHUFFLED),
    "parquet that numbers the classes of a file otherwise": lambda: mixed(CLASSES, SHUFFLED, "data/train-00001"),
    "WebDataset": webdataset,
    "WebDataset with other endings": lambda: webdataset("jpeg"),
}


def packed(files: Files, tmp_path: Path, per_class: int | None = None, name: str = "imagenette") -> PackedImages:
    folder = written(tmp_path / "copy", files)
    source = next(folder.iterdir()) if len(files) == 1 else folder
    packing_images.prepare(name, source, tmp_path / "cache", per_class)
    return load(name, tmp_path / "cache", per_class)


@pytest.mark.parametrize("kind", COPIES)
def test_every_kind_of_copy_gives_the_same_pack(kind: str, tmp_path: Path) -> None:
    images = packed(COPIES[kind](), tmp_path)
    expected = packed(folders(), tmp_path / "folders")
    assert images.digest == expected.digest
    assert images.train.labels.tolist() == expected.train.labels.tolist()
    assert [bytes(images.train.jpeg(i)) for i in range(12)] == [bytes(expected.train.jpeg(i)) for i in range(12)]
    assert [bytes(images.held_out.jpeg(i)) for i in range(6)] == [bytes(expected.held_out.jpeg(i)) for i in range(6)]


@pytest.mark.parametrize("kind", COPIES)
def test_every_kind_of_copy_gives_a_subset(kind: str, tmp_path: Path) -> None:
    images = packed(COPIES[kind](), tmp_path, per_class=1)
    assert sorted(images.train.labels.tolist()) == sorted(images.held_out.labels.tolist()) == [0, 1, 2]


def test_a_subset_of_a_copy_that_has_too_few_names_the_class(tmp_path: Path) -> None:
    sentence = (
        r"has 8 images to train on and 6 held-out ones instead of 9 and 6, too few to train on of the class n00000005; "
        r"get it again, whole, or try with --per-class 2$"
    )
    with pytest.raises(InputError, match=sentence):
        packed(without(TREE, "train/n00000005/train_1", "train/n00000005/train_2"), tmp_path, per_class=3)
    assert len(packed({}, tmp_path, per_class=2).train) == 6


def test_a_subset_does_not_read_what_it_does_not_take(tmp_path: Path) -> None:
    damaged = {path: b"" if path.endswith(("_2.JPEG", "_3.JPEG")) else jpeg for path, jpeg in folders().items()}
    assert len(packed(damaged, tmp_path, per_class=2).train) == 6


def test_classes_have_the_names_that_the_copy_gives_them(tmp_path: Path) -> None:
    assert packed(official(), tmp_path / "a").classes == CLASSES
    assert packed(parquet(SHUFFLED), tmp_path / "b").classes == CLASSES
    assert packed(parquet(WORDS), tmp_path / "c").classes == WORDS
    assert packed(webdataset(), tmp_path / "d").classes == ("0", "1", "2")


# Copies that are not whole


def counted_from_1(shard: bytes) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(shard)) as tar:
        files = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    return tar_of({path: b"%d" % (int(c) + 1) if path.endswith("cls") else c for path, c in files.items()})


def without(files: Files, *beginnings: str) -> Files:
    return {path: content for path, content in files.items() if not path.startswith(beginnings)}


TREE = folders()
KAGGLES = "".join(f"{name} tench, Tinca tinca\n" for name in CLASSES).encode()
FIRST = TREE["val/n00000001/val_0.JPEG"]
WRONG: dict[str, tuple[Callable[[], Files], str]] = {
    "a class is missing": (
        lambda: without(TREE, "train/n00000005", "val/n00000005"),
        r"has 2 classes, and imagenette has 3: give a copy that is whole, and the right one of imagenet, ",
    ),
    "a class is missing that Tiny-ImageNet's list has": (
        lambda: without(TREE, "train/n00000005", "val/n00000005") | {"x/wnids.txt": "\n".join(CLASSES[::-1]).encode()},
        r"has 2 classes, and imagenette has 3 \(missing: n00000005\): give a copy that is whole",
    ),
    "a class is missing that Kaggle's list has": (
        lambda: without(TREE, "train/n00000005", "val/n00000005") | {"LOC_synset_mapping.txt": KAGGLES},
        r"has 2 classes, and imagenette has 3 \(missing: n00000005\): give a copy that is whole",
    ),
    "a class is missing and the list is another": (
        lambda: without(TREE, "train/n00000005", "val/n00000005") | {"wnids.txt": b"n00000001\nn00000006\nn00000020"},
        r"has 2 classes, and imagenette has 3: give a copy that is whole",
    ),
    "a class is missing in train": (
        lambda: without(TREE, "train/n00000005"),
        r"has no image in train of the class n00000005; get it again, whole",
    ),
    "a class is missing in val": (
        lambda: without(TREE, "val/n00000001", "val/n00000020"),
        r"has no image in val of the classes n00000001, n00000020; get it again, whole",
    ),
    "an empty class folder": (
        lambda: without(TREE, "train/n00000005/train_", "val/n00000005") | {"train/n00000005/.DS_Store": b""},
        r"has no image in train of the class n00000005",
    ),
    "val has a class more": (
        lambda: TREE | {"val/n00000006/val_0.JPEG": FIRST},
        r"has 4 classes, and imagenette has 3 \(not of imagenette: n00000006\)",
    ),
    "val without folders": (
        lambda: without(TREE, "val/") | {"val/ILSVRC2012_val_1.JPEG": b""},
        r"nothing in .*copy says the class of val/ILSVRC2012_val_1.JPEG: give a copy that has folders of classes",
    ),
    "an image is missing": (
        lambda: without(TREE, "train/n00000005/train_1"),
        r"has 11 images to train on and 6 held-out ones instead of 12 and 6, too few to train on of the class "
        r"n00000005; get it again, whole, or try with --per-class 2$",
    ),
    "images are missing in both parts": (
        lambda: without(TREE, "train/n00000005/train_1", "val/n00000001/val_0", "val/n00000020/val_0"),
        r"has 11 images to train on and 4 held-out ones instead of 12 and 6, too few to train on of the class "
        r"n00000005, too few held out of the classes n00000001, n00000020; get it again, whole, or try with "
        r"--per-class 1$",
    ),
    "images are missing in WebDataset": (
        lambda: without(webdataset(), "imagenet1k-validation-0001"),
        r"has 12 images to train on and 3 held-out ones instead of 12 and 6, too few held out of the classes 0, 1, 2; "
        r"get it again, whole, or try with --per-class 1$",
    ),
    "an image is in the folder of another class": (
        lambda: (
            without(TREE, "train/n00000005/train_1")
            | {"train/n00000001/more.JPEG": TREE["train/n00000005/train_1.JPEG"]}
        ),
        r"copy has too few to train on of the class n00000005; get it again, whole, or try with --per-class 2$",
    ),
    "there are too many images": (
        lambda: TREE | {"train/n00000005/more.JPEG": FIRST},
        r"has 13 images to train on and 6 held-out ones instead of 12 and 6; get it again, whole$",
    ),
    "an image is missing in the official archives": (
        lambda: (
            official()
            | {"ILSVRC2012_img_val.tar": tar_of({"ILSVRC2012_val_00000001.JPEG": TREE["val/n00000001/val_0.JPEG"]})}
        ),
        r"has no held-out image of the classes n00000005, n00000020",
    ),
    "words as folders": (
        lambda: {path.replace("n00000005", "tench"): jpeg for path, jpeg in TREE.items()},
        r"has the class tench, which is not a synset id such as n01440764: labels follow the order of these",
    ),
    "other classes": (
        lambda: {path.replace("n00000005", "n00000006"): jpeg for path, jpeg in TREE.items()},
        r"has 3 classes, as imagenette has, but they are others \(n00000001, n00000006, n00000020\): give a copy of ",
    ),
    "other classes in the official archives": (
        lambda: official() | {"ILSVRC2012_img_train.tar": tar_of({f"n0000000{i}.tar": tar_of({}) for i in range(3)})},
        r"has 3 classes, as imagenette has, but they are others \(n00000000, n00000001, n00000002\)",
    ),
    "parquet that names other classes": (
        lambda: parquet(("n00000001", "n00000006", "n00000020")),
        r"has 3 classes, as imagenette has, but they are others \(n00000001, n00000006, n00000020\)",
    ),
    "several archives": (
        lambda: {f"imagenette2{size}.tgz": tar_of(TREE, "w:gz") for size in ("", "-160", "-320")},
        r"copy holds several copies of imagenette \(imagenette2-160.tgz, imagenette2-320.tgz, imagenette2.tgz\): give "
        r"the one that you want, such as .*copy/imagenette2-160.tgz, or move the others elsewhere$",
    ),
    "an archive beside folders": (
        lambda: TREE | {"imagenette2.tgz": tar_of(TREE, "w:gz")},
        r"holds several copies of imagenette \(imagenette2.tgz, train\): give the one that you want, such as .*2.tgz",
    ),
    "an archive beside what was unpacked from it": (
        lambda: {f"imagenette2/{path}": jpeg for path, jpeg in TREE.items()} | {"imagenette2.tgz": tar_of({}, "w:gz")},
        r"holds several copies of imagenette \(imagenette2.tgz, imagenette2/train\): give the one that you want",
    ),
    "two copies in folders": (
        lambda: {f"imagenette2-{size}/{path}": jpeg for size in (160, 320) for path, jpeg in TREE.items()},
        r"holds several copies \(imagenette2-160/train, imagenette2-320/train\): give the one that you want, such as "
        r".*copy/imagenette2-160$",
    ),
    "two copies in an archive": (
        lambda: {"x.zip": zip_of({f"{copy}/{path}": jpeg for copy in "ab" for path, jpeg in TREE.items()})},
        r"x.zip holds several copies \(a/train, b/train\): give the one that you want by itself$",
    ),
    "two lists that disagree": (
        lambda: tiny() | {"old/val_annotations.txt": b"val_1.JPEG\tn00000005\n"},
        r"copy gives tiny-imagenet-200/val/images/val_1.JPEG different classes, n00000005 in old/val_annotations.txt "
        r"and n00000001 in tiny-imagenet-200/val/val_annotations.txt: leave only the list that came with the images",
    ),
    "annotations are missing": (
        lambda: tiny() | {"tiny-imagenet-200/val/val_annotations.txt": b"val_0.JPEG\tn00000001\n"},
        r"nothing in .*copy says the class of tiny-imagenet-200/val/images/val_1.JPEG, .*val_annotations.txt and LOC",
    ),
    "a part of the official archives": (
        lambda: without(official(), "ILSVRC2012_devkit"),
        r"has no ILSVRC2012_devkit_t12.tar.gz: put all of ILSVRC2012_img_train.tar, ",
    ),
    "a devkit of other classes": (
        lambda: official() | {"ILSVRC2012_devkit_t12.tar.gz": tar_of({"data/meta.mat": b"no"}, "w:gz")},
        r"does not say the labels of the classes in the archives",
    ),
    "no validation files": (
        lambda: without(parquet(), "data/val"),
        r"has no parquet file with val in its name; get it again, whole",
    ),
    "a label outside the range": (
        lambda: parquet(shift=1),
        r"has the label 3, and the labels of imagenette are 0 to 2",
    ),
    "parquet of other classes": (
        lambda: parquet((*CLASSES, "n00000030")),
        r"has 4 classes, and imagenette has 3",
    ),
    "parquet whose val has words in another order": (
        lambda: mixed(WORDS, WORDS[::-1]),
        r"class 0 is French horn in .*data/validation-00000-of-00002.parquet and tench in .*data/train-00000-of-00002"
        r".parquet, and a number must mean the same class in all files; get both again, from one place$",
    ),
    "parquet whose val names no classes": (
        lambda: mixed(SHUFFLED, None),
        r"class 0 is not named in .*data/validation-00000-of-00002.parquet and n00000001 in .*data/train-00000",
    ),
    "parquet whose train alone has words": (
        lambda: mixed(WORDS, CLASSES),
        r"class 0 is n00000001 in .*data/validation-00000-of-00002.parquet and tench in .*data/train-00000",
    ),
    "a file of parquet with other classes": (
        lambda: mixed(CLASSES, ("n00000001", "n00000006", "n00000020"), "data/train-00001"),
        r"class 1 is n00000006 in .*data/train-00001-of-00002.parquet and n00000005 in .*data/train-00000",
    ),
    "parquet with other columns": (
        lambda: {path: _parquet_of_numbers() for path in parquet()},
        r"has no readable columns `image` \(with bytes\) and `label`",
    ),
    "parquet that is none": (lambda: dict.fromkeys(parquet(), b"none"), r"cannot read .*; get it again"),
    "a shard without labels": (
        lambda: webdataset() | {"imagenet1k-validation-0001.tar": tar_of({"a.jpg": b""})},
        r"a in .*validation-0001.tar has no jpg or no cls",
    ),
    "a label that is no number": (
        lambda: webdataset() | {"imagenet1k-validation-0001.tar": tar_of({"a.jpg": b"", "a.cls": b"tench"})},
        r"a in imagenet1k-validation-0001.tar has the label 'tench', and the labels of imagenette are 0 to 2",
    ),
    "WebDataset that counts from 1": (
        lambda: {name: counted_from_1(shard) for name, shard in webdataset().items()},
        r"has the label 3, and the labels of imagenette are 0 to 2: get a copy that has them",
    ),
    "a truncated archive": (
        lambda: {"x.tgz": tar_of(TREE, "w:gz")[:2000]},
        r"cannot read .*x.tgz: .*; get it again",
    ),
    "a truncated zip": (lambda: {"x.zip": zip_of(TREE)[:-2000]}, r"cannot read .*x.zip: .* not a zip .*; get it again"),
    "another archive": (lambda: {"x.zip": zip_of({"readme.txt": b""})}, r"x.zip holds no copy of imagenette: give a"),
    "another file": (lambda: {"x.txt": b"text"}, r"x.txt holds no copy of imagenette: give a folder"),
    "another folder": (lambda: {"a/b.txt": b"", "c.txt": b""}, r"copy holds no copy of imagenette: give a folder"),
}


@pytest.mark.parametrize("part", ["train", "val"])
def test_one_part_of_a_copy_names_the_folder_above(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = written(tmp_path / "copy", TREE)
    monkeypatch.chdir(copy / part)
    for source in (copy / part, Path()):
        with pytest.raises(InputError) as raised:
            packing_images.prepare("imagenette", source, tmp_path / "cache")
        assert str(raised.value) == (
            f"{source} is one part of a copy of imagenette: give the folder that holds both parts, {copy}"
        )


def _parquet_of_numbers() -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"pixels": [1, 2]}), file)
    return file.getvalue()


@pytest.mark.parametrize("case", WRONG)
def test_a_copy_that_is_not_whole_is_one_sentence(case: str, tmp_path: Path) -> None:
    files, sentence = WRONG[case]
    with pytest.raises(InputError, match=sentence):
        packed(files(), tmp_path)
    assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize("metadata", ["{not json", "null", '{"info": null}', label_names("tench"), label_names(None)])
def test_metadata_of_parquet_that_cannot_be_read_are_one_sentence(metadata: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as raised:
        packed(parquet(metadata=metadata), tmp_path)
    assert str(raised.value) == (
        f"cannot read {tmp_path}/copy/data/train-00000-of-00002.parquet: its metadata `huggingface` do not name the "
        "classes as `datasets` does; get it again"
    )


@pytest.mark.parametrize("metadata", ["{}", '{"info": {"features": {"label": {"dtype": "int64", "_type": "Value"}}}}'])
def test_metadata_of_parquet_need_not_name_the_classes(metadata: str, tmp_path: Path) -> None:
    images = packed(parquet(metadata=metadata), tmp_path)
    assert images.digest == packed(folders(), tmp_path / "folders").digest
    assert images.classes == ("0", "1", "2")


@pytest.mark.parametrize(
    "case",
    [
        *("several archives", "two copies in folders", "other classes", "two lists that disagree"),
        *("parquet whose val has words in another order", "parquet whose val names no classes"),
        *("val has a class more", "WebDataset that counts from 1"),
    ],
)
def test_nor_is_a_subset_taken_from_it(case: str, tmp_path: Path) -> None:
    files, sentence = WRONG[case]
    with pytest.raises(InputError, match=sentence):
        packed(files(), tmp_path, per_class=1)


@pytest.mark.parametrize("name", ["z_val_annotations.txt", "z/my-LOC_val_solution.csv", "z/val_annotations.txt"])
def test_only_a_list_that_agrees_says_the_classes_of_val(name: str, tmp_path: Path) -> None:
    right = name == "z/val_annotations.txt"
    images = packed(tiny() | {name: b"val_1.JPEG\tn0000000" + (b"1" if right else b"5")}, tmp_path)
    assert images.digest == packed(folders(), tmp_path / "folders").digest


def test_a_list_says_nothing_of_images_in_folders_of_classes(tmp_path: Path) -> None:
    lists = {"a/val_annotations.txt": b"val_0.JPEG\tn00000005\n", "b/val_annotations.txt": b"val_0.JPEG\tn00000001\n"}
    assert packed(folders() | lists, tmp_path).digest == packed(folders(), tmp_path / "folders").digest


READ = {
    "folders": "the folders of classes in {}/copy",
    "the folder of a gzipped tar": "the archive {}/copy/imagenette2-320.tgz",
    "a gzipped tar": "the archive {}/copy/x.tgz",
    "the official archives": "the official archives in {}/copy",
    "parquet": "the parquet files in {}/copy",
    "WebDataset": "the WebDataset shards in {}/copy",
}


@pytest.mark.parametrize("kind", READ)
def test_what_is_read_is_said(kind: str, tmp_path: Path) -> None:
    folder, said = written(tmp_path / "copy", files := COPIES[kind]()), []
    source = next(folder.iterdir()) if len(files) == 1 else folder
    packing_images.prepare("imagenette", source, tmp_path / "cache", say=said.append)
    assert said[0] == f"reading {READ[kind].format(tmp_path)}"


IMAGEWOOF = (
    *("n02086240", "n02087394", "n02088364", "n02089973", "n02093754"),
    *("n02096294", "n02099601", "n02105641", "n02111889", "n02115641"),
)


def test_other_classes_than_those_of_imagenette_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    def files(classes: tuple[str, ...]) -> Files:
        return {f"{part}/{name}/{name}.JPEG": FIRST for part in ("train", "val") for name in classes}

    assert packed(files(IMAGENETTE), tmp_path / "right", per_class=1).classes == IMAGENETTE
    sentence = (
        r"copy has 10 classes, as imagenette has, but they are others \(missing: n01440764, n02102040, n02979186 and 7 "
        r"more; not of imagenette: n02086240, n02087394, n02088364 and 7 more\): give a copy of imagenette with "
    )
    with pytest.raises(InputError, match=sentence):
        packed(files(IMAGEWOOF), tmp_path / "wrong", per_class=1)
    sentence = r"copy has 9 classes, and imagenette has 10 \(missing: n02102040\): give a copy that is whole, and the "
    with pytest.raises(InputError, match=sentence):
        packed(files((IMAGENETTE[0], *IMAGENETTE[2:])), tmp_path / "fewer", per_class=1)
    sentence = r"copy has 11 classes, and imagenette has 10 \(not of imagenette: n02086240\): give a copy that is whole"
    with pytest.raises(InputError, match=sentence):
        packed(files((*IMAGENETTE, IMAGEWOOF[0])), tmp_path / "more", per_class=1)


def test_an_archive_is_not_taken_for_a_shard_that_lies_beside_it(tmp_path: Path) -> None:
    source = written(tmp_path / "copies", webdataset() | {"imagenette2.tar": tar_of(TREE)}) / "imagenette2.tar"
    packing_images.prepare("imagenette", source, tmp_path)
    assert load("imagenette", tmp_path).classes == CLASSES


def test_a_file_that_is_far_too_large_is_not_read(tmp_path: Path) -> None:
    source = written(tmp_path / "copy", TREE)
    with (source / "train/n00000005/train_1.JPEG").open("r+b") as file:
        file.truncate(2**28 + 1)  # takes no room on the disk
    with pytest.raises(InputError, match=r"train_1.JPEG has 268,435,457 bytes, more than an image has"):
        packing_images.prepare("imagenette", source, tmp_path / "cache")


def test_a_copy_that_needs_a_package_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(InputError, match="this copy needs pyarrow to be read: `pip install pyarrow`"):
        packed(parquet(), tmp_path)


REAL = {name: os.environ.get(f"REWOUND_{name.upper()}") for name in ("imagenet", "tinyimagenet", "imagenette")}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, path in REAL.items() if path])
def test_the_real_data_set(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    packing_images.prepare(name, Path(str(REAL[name])), tmp_path)
    images = load(name, tmp_path)
    assert (len(images.train), len(images.held_out)) == packed_images.SIZES[name][:2]
    counts = [np.bincount(part.labels).min() for part in (images.train, images.held_out)]
    assert tuple(counts) == packed_images.SIZES[name].smallest
