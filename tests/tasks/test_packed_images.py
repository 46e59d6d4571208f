"""Packed images: what is loaded and decoded is what was packed, and nothing else is taken for it."""

import errno
import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import rewound
from rewound.foundations.errors import InputError
from rewound.tasks.datasets import jpegs, packed_images, packing_images, prepare, prepared
from rewound.tasks.datasets.packed_images import Encoded, PackedPart, decoded, load
from rewound.tasks.feed import streamed
from small_copies import CLASSES, encoded, folders, images_by_class, picture, small_sizes, written

OURS = jpegs.decoders()


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_images, "SIZES", small_sizes())


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("copy"), folders())


@pytest.fixture
def packed(copy: Path, tmp_path: Path) -> Path:
    """A cache with the small imagenette in it."""
    packing_images.prepare("imagenette", copy, tmp_path / "cache")
    return tmp_path / "cache"


def packed_jpegs(part: PackedPart) -> list[tuple[int, bytes]]:
    return [(int(label), bytes(part.jpeg(index))) for index, label in enumerate(part.labels)]


def test_what_is_in_a_pack_is_said_of_both_parts(packed: Path) -> None:
    summary, images = packing_images.summary("imagenette", packed), load("imagenette", packed)
    parts = images.train, images.held_out
    stored = sum(len(jpeg) for part in parts for _, jpeg in packed_jpegs(part))
    pixels = sum(part.pixels for part in parts)
    assert summary == (
        "12 images to train on and 6 held out, in 3 classes: "
        f"together {stored / 1e6:.1f} MB, decoded {pixels / 1e6:.1f} MB"
    )


def test_every_file_is_packed_as_it_is_with_its_label(packed: Path) -> None:
    images = load("imagenette", packed)
    assert images.classes == CLASSES
    for part, name in ((images.train, "train"), (images.held_out, "val")):
        expected = [
            (CLASSES.index(c), jpeg) for (p, c), jpegs in images_by_class().items() if p == name for jpeg in jpegs
        ]
        assert sorted(packed_jpegs(part)) == sorted(expected)


def test_the_order_mixes_the_classes_and_does_not_depend_on_how_the_pack_was_written(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renamed = {path.replace("train_", f"{9 - int(path[-6])}_"): jpeg for path, jpeg in folders().items()}
    monkeypatch.setattr(packing_images, "_LARGE", 500_000)  # several large files, some of them perhaps empty
    packing_images.prepare("imagenette", written(tmp_path / "other", renamed), tmp_path / "several")
    one, several = load("imagenette", packed), load("imagenette", tmp_path / "several")
    assert len(one.train.files) == 1
    assert len(several.train.files) == 3
    assert packed_jpegs(one.train) == packed_jpegs(several.train)
    assert packed_jpegs(one.held_out) == packed_jpegs(several.held_out)
    assert one.digest == several.digest
    labels = one.train.labels.tolist()
    assert labels != sorted(labels)


@pytest.mark.parametrize("decoder", OURS)
def test_decoded_pictures_are_those_of_the_files(packed: Path, decoder: str) -> None:
    part = load("imagenette", packed).train
    pictures = decoded(part, [3, 0, 3, 11], decoder, threads=2)
    for number, index in enumerate([3, 0, 3, 11]):
        with Image.open(BytesIO(part.jpeg(index))) as image:
            expected = np.asarray(image.convert("RGB"))
        height, width, start = (int(t[number]) for t in (pictures.heights, pictures.widths, pictures.starts))
        pixels = pictures.pixels[start : start + 3 * height * width].reshape(height, width, 3)
        assert np.abs(pixels.numpy().astype(int) - expected).max() <= 2  # libraries may round otherwise
        assert pictures.labels[number] == part.labels[index]


def test_pixels_go_where_they_are_wanted_and_do_not_depend_on_threads(packed: Path) -> None:
    part = load("imagenette", packed).train
    memory = torch.full((part.pixels + 5,), 7, dtype=torch.uint8)
    everything = torch.arange(len(part))
    with ThreadPoolExecutor(3) as threads:
        pictures = decoded(part, everything, OURS[0], threads=threads, into=memory)
    assert pictures.pixels.data_ptr() == memory.data_ptr()
    assert len(pictures.pixels) == part.pixels
    assert memory[part.pixels :].tolist() == [7] * 5
    again = decoded(part, everything, OURS[0])
    assert all(torch.equal(a, b) for a, b in zip(pictures, again, strict=True))
    with pytest.raises(InputError, match="are too few for 12 pictures"):
        decoded(part, everything, OURS[0], into=memory[:10])
    assert len(decoded(part, [], OURS[0]).labels) == 0


def test_streamed_pictures_are_the_decoded_ones(packed: Path) -> None:
    part, order = load("imagenette", packed).train, torch.arange(12).flip(0)
    batches = list(order.split(5))
    for chosen, data in zip(batches, streamed(Encoded(part, "pillow"), batches, torch.device("cpu")), strict=True):
        for mine, theirs in zip(data, decoded(part, chosen, "pillow"), strict=True):
            assert torch.equal(mine, theirs)


def test_a_picture_that_cannot_be_decoded_is_named_wherever_it_is_decoded(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = load("imagenette", packed).train

    def refuse(data: jpegs.Data, pixels: jpegs.Pixels) -> None:
        raise ValueError("too old")

    monkeypatch.setitem(jpegs._DECODERS, "mine", lambda: refuse)  # type: ignore[index]
    named = r"mine cannot decode image 3 of .*train-000.safetensors as \d+ x \d+ pixels \(too old\)"
    with pytest.raises(InputError, match=named):
        next(streamed(Encoded(part, "mine"), [torch.tensor([3])], torch.device("cpu")))
    with pytest.raises(InputError, match=named):
        decoded(part, [3], "mine")


def test_a_decoder_is_recorded_with_its_version() -> None:
    assert "pillow" in OURS
    for name in OURS:
        assert jpegs.decoder_version(name).startswith(f"{name} ")
    assert "libjpeg" in jpegs.decoder_version("pillow")
    assert jpegs.fastest_decoder() == OURS[0]
    with pytest.raises(InputError, match="unknown decoder 'pilow'; did you mean 'pillow'"):
        decoded(PackedPart(torch.empty(0), torch.empty(0, 2), (), np.empty((0, 4), np.int64)), [], "pilow")


def test_an_absent_decoder_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    assert "simplejpeg" not in jpegs.decoders()
    with pytest.raises(InputError, match="the decoder simplejpeg is not installed: `pip install 'rewound"):
        jpegs.check_decoder("simplejpeg")


def test_torchvision_decodes_if_it_is_there(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def decode_jpeg(file: torch.Tensor, mode: str) -> torch.Tensor:  # as torchvision's, which gives channels first
        with Image.open(BytesIO(file.numpy().tobytes())) as image:
            return torch.from_numpy(np.asarray(image.convert(mode)).transpose(2, 0, 1).copy())

    stand_in = SimpleNamespace(decode_jpeg=decode_jpeg, ImageReadMode=SimpleNamespace(RGB="RGB"))
    monkeypatch.setitem(sys.modules, "torchvision.io", stand_in)
    monkeypatch.setattr(jpegs, "decoder", jpegs.decoder.__wrapped__)
    part = load("imagenette", packed).train
    pixels = [decoded(part, torch.arange(12), name).pixels for name in ("torchvision", "pillow")]
    assert torch.equal(*pixels)


# Subsets


def test_a_subset_is_another_data_set(copy: Path, tmp_path: Path) -> None:
    packing_images.prepare("imagenette", copy, tmp_path, per_class=1)
    subset = load("imagenette", tmp_path, per_class=1)
    assert sorted(subset.train.labels.tolist()) == sorted(subset.held_out.labels.tolist()) == [0, 1, 2]
    assert "a subset: 1 images of each class" in packing_images.summary("imagenette", tmp_path, 1)
    for ask in (load, packed_images.check):
        with pytest.raises(InputError, match=r"no imagenette in .* \(but its subset of 1 per class is\)"):
            ask("imagenette", tmp_path)
        with pytest.raises(InputError, match=r"no imagenette-2-per-class in .* --per-class 2`"):
            ask("imagenette", tmp_path, per_class=2)
    packed_images.check("imagenette", tmp_path, per_class=1)
    (tmp_path / "imagenette-some-per-class").mkdir()  # of somebody else
    with pytest.raises(InputError, match=r"but its subset of 1 per class is.*--per-class 2`"):
        load("imagenette", tmp_path, per_class=2)
    (tmp_path / "imagenette-1-per-class" / "train-000.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match=r"is damaged.*run `rewound data imagenette .*--per-class 1` to make it anew"):
        load("imagenette", tmp_path, per_class=1)


def test_a_subset_that_is_renamed_is_not_the_whole(copy: Path, tmp_path: Path) -> None:
    packing_images.prepare("imagenette", copy, tmp_path, per_class=1).rename(tmp_path / "imagenette")
    with pytest.raises(InputError, match=r"has 3 \+ 3 images of imagenette in 3 classes instead of 12 \+ 6"):
        load("imagenette", tmp_path)


def test_the_size_of_a_subset_is_known_without_it(copy: Path, tmp_path: Path) -> None:
    assert packed_images.size("imagenette", 3)[:4] == (9, 6, 3, (3, 2))  # all held-out images: a class has only 2
    packing_images.prepare("imagenette", copy, tmp_path, per_class=3)
    assert len(load("imagenette", tmp_path, per_class=3).held_out) == 6
    for wrong in (0, 5):
        with pytest.raises(InputError, match=f"has 1 to 4 images of each class, not {wrong}"):
            packing_images.prepare("imagenette", copy, tmp_path, per_class=wrong)


# Damage, and packs of another kind


def test_a_damaged_shard_is_found_when_it_is_read_and_made_anew(packed: Path, copy: Path) -> None:
    part = load("imagenette", packed).train
    before, file = packed_jpegs(part), part.files[0].path
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    damaged = load("imagenette", packed).train
    with pytest.raises(InputError, match=r"train-000.safetensors is damaged \(the checksum of bytes"):
        decoded(damaged, torch.arange(12), OURS[0], threads=2)
    with pytest.raises(InputError, match="is damaged"):
        packing_images.prepare("imagenette", None, packed)
    lines: list[str] = []
    packing_images.prepare("imagenette", copy, packed, say=lines.append)
    assert lines[0].startswith(f"{file} is damaged (the checksum of bytes ")
    assert lines[0].endswith(" does not hold): it is made anew")
    assert packed_jpegs(load("imagenette", packed).train) == before
    assert [path.name for path in packed.iterdir()] == ["imagenette"]


def test_a_truncated_or_missing_shard_is_one_sentence(packed: Path) -> None:
    file = packed / "imagenette" / "train-000.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    with pytest.raises(InputError, match=r"train-000.safetensors is damaged .* run `rewound data imagenette --from"):
        load("imagenette", packed)
    save_file({"files": torch.zeros(3, dtype=torch.uint8)}, file)
    with pytest.raises(InputError, match=r"it has 3 bytes instead of \d+"):
        load("imagenette", packed)
    file.unlink()
    with pytest.raises(InputError) as raised:
        load("imagenette", packed)
    assert str(raised.value) == (
        f"{packed / 'imagenette'} is damaged (it has no train-000.safetensors): "
        "run `rewound data imagenette --from FILE-OR-FOLDER` to make it anew"
    )


def test_a_damaged_index_is_one_sentence(packed: Path) -> None:
    index = packed / "imagenette" / "index.safetensors"
    content = bytearray(index.read_bytes())
    content[-1] ^= 1
    index.write_bytes(content)
    with pytest.raises(InputError, match=r"index.safetensors is damaged \(its checksum does not hold\)"):
        load("imagenette", packed)


@pytest.mark.parametrize("per_class", [None, 1])
def test_a_pack_without_its_index_is_one_sentence(copy: Path, tmp_path: Path, per_class: int | None) -> None:
    where = packing_images.prepare("imagenette", copy, tmp_path, per_class)
    (where / "index.safetensors").unlink()
    option = "" if per_class is None else f" --per-class {per_class}"
    for ask in (load, packed_images.check, packing_images.summary):
        with pytest.raises(InputError) as raised:
            ask("imagenette", tmp_path, per_class=per_class)
        assert str(raised.value) == (
            f"{where} is damaged (it has no index.safetensors): run `rewound data imagenette --from FILE-OR-FOLDER"
            f"{option}` to make it anew"
        )
    with pytest.raises(InputError, match=r"no imagenette-2-per-class in [^(]*: get "):  # nor is it offered
        load("imagenette", tmp_path, per_class=2)
    packing_images.prepare("imagenette", copy, tmp_path, per_class)
    load("imagenette", tmp_path, per_class=per_class)


def test_a_pack_of_another_version_is_refused(packed: Path, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_images, "VERSION", 2)
    with pytest.raises(InputError, match=r"was packed in version 1 of the format, and this rewound reads version 2"):
        load("imagenette", packed)
    lines: list[str] = []
    packing_images.prepare("imagenette", copy, packed, say=lines.append)
    assert lines[0].endswith("of the format, and this rewound reads version 2: it is made anew")


def change_index(index: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Write an index with another content, and with the checksum of it."""
    tensors = load_file(index)
    change(tensors)
    prepared.publish(dict(sorted(tensors.items())), index)


@pytest.mark.parametrize(("part", "label"), [("train", 3), ("held-out", -1)])
def test_a_label_of_no_class_is_one_sentence(packed: Path, copy: Path, part: str, label: int) -> None:
    index = packed / "imagenette" / "index.safetensors"
    change_index(index, lambda tensors: tensors[f"{part}/labels"][1:2].fill_(label))
    fault = f"{index} is damaged (a {part} label is {label}, and there are 3 classes, from 0)"
    for ask in (load, partial(packing_images.prepare, source=None)):
        with pytest.raises(InputError) as raised:
            ask("imagenette", cache=packed)
        assert str(raised.value) == f"{fault}: run `rewound data imagenette --from FILE-OR-FOLDER` to make it anew"
    lines: list[str] = []
    packing_images.prepare("imagenette", copy, packed, say=lines.append)
    assert lines[0] == f"{fault}: it is made anew"
    load("imagenette", packed)


@pytest.mark.parametrize("about", [{"name": "imagenette"}, None])
def test_an_index_without_a_version_is_one_sentence(packed: Path, about: dict[str, str] | None) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["about"]
        if about is not None:
            tensors["about"] = torch.frombuffer(bytearray(json.dumps(about).encode()), dtype=torch.uint8)

    change_index(packed / "imagenette" / "index.safetensors", change)
    for ask in (load, packing_images.summary):
        with pytest.raises(
            InputError, match=r"index.safetensors is not the index of packed images: remove .*imagenette"
        ):
            ask("imagenette", packed)


def test_preparing_again_reads_nothing(packed: Path, tmp_path: Path) -> None:
    (other := tmp_path / "elsewhere").touch()
    lines: list[str] = []
    packing_images.prepare("imagenette", other, packed, say=lines.append)
    assert f"is there already, and {other} was not read" in lines[0]
    with pytest.raises(InputError, match="no file or folder nowhere: give an archive or a folder that exists"):
        packing_images.prepare("imagenette", Path("nowhere"), packed)


def test_a_copy_in_the_place_of_the_pack_is_not_replaced_by_it(tmp_path: Path) -> None:
    source = written(tmp_path / "imagenette", folders())
    with pytest.raises(InputError, match=r"lies where imagenette is kept when it is prepared.*move it elsewhere first"):
        packing_images.prepare("imagenette", source, tmp_path)
    assert len(list(source.rglob("*.JPEG"))) == 18


KILLED = """
import os, signal, sys
from pathlib import Path
from rewound.tasks.feed import streamed
from small_copies import small_sizes
from rewound.tasks.datasets import packed_images, packing_images
packed_images.SIZES = small_sizes()
packing_images._check_counts = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
packing_images.prepare("imagenette", Path(sys.argv[1]), Path(sys.argv[2]))
"""


def test_a_killed_preparation_leaves_nothing_that_is_taken_for_a_pack(copy: Path, tmp_path: Path) -> None:
    support = str(Path(__file__).parents[1] / "support")
    path = os.pathsep.join([support, str(Path(rewound.__file__).parents[1])])
    subprocess.run([sys.executable, "-c", KILLED, copy, tmp_path], env=os.environ | {"PYTHONPATH": path}, check=False)
    assert len(left := list(tmp_path.iterdir())) == 1
    with pytest.raises(InputError, match="no imagenette in"):
        load("imagenette", tmp_path)
    packing_images.prepare("imagenette", copy, tmp_path)
    assert not left[0].exists()
    assert len(load("imagenette", tmp_path).train) == 12


def test_a_cache_that_cannot_be_written_is_one_sentence(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = "set REWOUND_CACHE to a folder that can be written$"
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(InputError, match=rf"cannot write .*file/imagenette: .*Not a directory: '.*'; {elsewhere}"):
        packing_images.prepare("imagenette", copy, tmp_path / "file")
    for error in (SafetensorError("No space left on device"), OSError(errno.ENOSPC, "No space left on device")):
        monkeypatch.setattr(packing_images, "save_file", Mock(side_effect=error))
        with pytest.raises(InputError, match=rf"No space left on device; free about 12 MB there, or {elsewhere}"):
            packing_images.prepare("imagenette", copy, tmp_path / "cache")
        assert not list((tmp_path / "cache").iterdir())


def test_memory_does_not_grow_with_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (12 + 6, 700, 700, 3), np.uint8)
    jpegs_of_noise = [encoded(Image.fromarray(pixels), quality=100) for pixels in noise]
    large = dict(zip(folders(), jpegs_of_noise, strict=True))
    source, total = written(tmp_path / "large", large), sum(map(len, jpegs_of_noise))
    del noise, jpegs_of_noise, large
    monkeypatch.setattr(packing_images, "_LARGE", 12 * 115_000 // 10)  # ten large files of about one image each
    monkeypatch.setattr(packing_images, "_AT_ONCE", 1)
    monkeypatch.setattr(packing_images, "usable_cores", lambda: 1)
    tracemalloc.start()
    packing_images.prepare("imagenette", source, tmp_path / "cache")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < total / 2


# Images as they come


def prepared_with(tmp_path: Path, path: str, content: bytes) -> tuple[packed_images.PackedImages, str]:
    packing_images.prepare("imagenette", written(tmp_path / "copy", folders() | {path: content}), tmp_path / "cache")
    return load("imagenette", tmp_path / "cache"), packing_images.summary("imagenette", tmp_path / "cache")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (encoded(picture(500, "CMYK")), "made anew as JPEG files in RGB: 1 in CMYK"),
        (encoded(picture(500), "PNG"), "made anew as JPEG files in RGB: 1 stored as PNG"),
        (encoded(picture(500, "P"), "PNG"), "made anew as JPEG files in RGB: 1 stored as PNG"),
    ],
)
def test_what_is_no_rgb_jpeg_becomes_one(tmp_path: Path, content: bytes, said: str) -> None:
    images, summary = prepared_with(tmp_path, "train/n00000005/train_1.JPEG", content)
    assert said in summary
    with Image.open(BytesIO(content)) as image:
        expected = np.asarray(image.convert("RGB")).astype(int)
    pictures = [decoded(images.train, [i], name) for i in range(12) for name in OURS if images.train.labels[i] == 1]
    shapes = [each.pixels.numpy().reshape(int(each.heights[0]), int(each.widths[0]), 3) for each in pictures]
    near = [np.abs(pixels - expected).max() for pixels in shapes if pixels.shape == expected.shape]
    assert min(near) < 25  # a JPEG of quality 100 of random colours; other pictures differ by more than 100
    assert sum(distance < 25 for distance in near) == len(OURS)


def test_grey_images_are_decoded_as_rgb(tmp_path: Path) -> None:
    images, summary = prepared_with(tmp_path, "val/n00000005/val_1.JPEG", grey := encoded(picture(500, "L")))
    assert "grey: 0 to train on, 1 held out" in summary
    index = packed_jpegs(images.held_out).index((1, grey))
    for name in OURS:
        pixels = decoded(images.held_out, [index], name).pixels.reshape(-1, 3)
        assert torch.equal(pixels[:, 0], pixels[:, 1])
        assert torch.equal(pixels[:, 0], pixels[:, 2])


def test_grey_values_of_16_bits_become_8_bits(tmp_path: Path) -> None:
    grey = np.linspace(0, 65535, 64 * 48).reshape(48, 64).astype(np.uint16)
    content = encoded(Image.fromarray(grey), "PNG")
    images, summary = prepared_with(tmp_path, "train/n00000005/train_1.JPEG", content)
    assert "made anew as JPEG files in RGB: 1 stored as PNG with 16 bits" in summary
    index = images.train.sizes.tolist().index([48, 64])
    for name in OURS:
        pixels = decoded(images.train, [index], name).pixels.reshape(48, 64, 3).numpy()
        assert np.abs(pixels.astype(int) - (grey // 257)[..., None]).max() <= 3  # a smooth JPEG of quality 100


@pytest.mark.parametrize(
    ("values", "range_of_them"),
    [
        (np.array([[0, 70_000]], np.int32), "0 to 70000"),
        (np.array([[-1, 5]], np.int32), "-1 to 5"),
        (np.array([[0, 0.5]], np.float32), "0 to 0.5"),
    ],
)
def test_grey_values_of_an_unknown_range_are_refused(values: np.ndarray, range_of_them: str) -> None:
    with pytest.raises(jpegs.Unreadable, match=f"its grey values go from {range_of_them}, and not from 0 to 65535"):
        jpegs._in_colours(Image.fromarray(values))  # no format that is read now has them


def test_a_chroma_subsampling_that_simplejpeg_does_not_know_is_made_anew(tmp_path: Path) -> None:
    flat = Image.new("RGB", (64, 64), (200, 40, 90))
    content = bytearray(encoded(flat))  # 4:2:0: the first component has two samples across and two down,
    content[content.index(b"\xff\xc0") + 11] = 0x14  # now one and four: 4:4:1
    images, summary = prepared_with(tmp_path, "train/n00000005/train_1.JPEG", bytes(content))
    assert "made anew as JPEG files in RGB: 1 with an unusual chroma subsampling" in summary
    index = images.train.sizes.tolist().index([64, 64])
    for name in OURS:
        pixels = decoded(images.train, [index], name).pixels.reshape(-1, 3).float()
        assert torch.allclose(pixels.mean(0), torch.tensor([200.0, 40.0, 90.0]), rtol=0, atol=3)


def test_files_that_are_made_anew_are_named(tmp_path: Path) -> None:
    whole = encoded(picture(500).resize((300, 300)), quality=95)
    damaged = whole[: len(whole) // 3] + b"\xff\xd9"  # two thirds are missing, but the end is marked
    files = folders() | {f"train/n00000005/train_{i}.JPEG": damaged for i in range(4)}
    files |= {"val/n00000001/val_1.JPEG": encoded(picture(500), "PNG")}
    packing_images.prepare("imagenette", written(tmp_path / "copy", files), tmp_path / "cache")
    assert packing_images.summary("imagenette", tmp_path / "cache").splitlines()[-1] == (
        "made anew as JPEG files in RGB: 1 stored as PNG (val/n00000001/val_1.JPEG), 4 with errors that decoders pass "
        "over and that may leave parts grey (train/n00000005/train_0.JPEG, train/n00000005/train_1.JPEG, "
        "train/n00000005/train_2.JPEG and 1 more)"
    )


@pytest.mark.parametrize("content", [encoded(picture(1))[:-60], b"", b"no picture", encoded(picture(1), "PNG")[:-60]])
def test_truncated_images_are_named(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(InputError, match=r"copy has damaged images: train/n00000005/train_1.JPEG \(.*\); get it again"):
        prepared_with(tmp_path, "train/n00000005/train_1.JPEG", content)
    assert not list((tmp_path / "cache").iterdir())


def test_a_header_that_claims_a_huge_picture_is_not_decoded(tmp_path: Path) -> None:
    content = bytearray(encoded(picture(1)))
    at = content.index(b"\xff\xc0") + 5
    content[at : at + 4] = b"\xea\x60" * 2
    with pytest.raises(InputError, match=r"train_1.JPEG \(it says that it has 60000 x 60000 pixels\)"):
        prepared_with(tmp_path, "train/n00000005/train_1.JPEG", bytes(content))


def test_an_image_in_both_parts_stays_and_is_counted(tmp_path: Path) -> None:
    twice = folders()["train/n00000005/train_1.JPEG"]
    images, summary = prepared_with(tmp_path, "val/n00000001/val_0.JPEG", twice)
    assert "in both parts, and left there, as the data set was published: 1" in summary
    assert (0, twice) in packed_jpegs(images.held_out)


def test_the_command_takes_a_subset_only_where_there_is_one() -> None:
    with pytest.raises(InputError, match="cifar10 is always prepared whole: leave out per-class"):
        prepare("cifar10", None, print, per_class=3)
