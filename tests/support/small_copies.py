"""Small copies of a data set of images: three classes, four images of each to train on and two held out."""

import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image

from rewound.tasks.datasets.packed_images import SIZES, Size, digest_of

CLASSES = ("n00000001", "n00000005", "n00000020")
SMALL = Size(12, 6, 3, (4, 2), digest_of(CLASSES))
Files = dict[str, bytes]  # path -> content


def picture(number: int, mode: str = "RGB") -> Image.Image:
    """Another picture for each number; sizes differ, too."""
    draws = np.random.default_rng(number)
    small = Image.fromarray(draws.integers(0, 256, (4, 5, 3), np.uint8))
    return small.resize((20 + number % 7, 16 + number % 5)).convert(mode)


def encoded(image: Image.Image, format: str = "JPEG", quality: int = 75) -> bytes:
    file = io.BytesIO()
    image.save(file, format, quality=quality)
    return file.getvalue()


def images_by_class() -> dict[tuple[str, str], list[bytes]]:
    """(train or val, class) -> JPEG files."""
    return {
        (part, name): [encoded(picture(100 * (part == "val") + 10 * label + i)) for i in range(many)]
        for part, many in (("train", 4), ("val", 2))
        for label, name in enumerate(CLASSES)
    }


def folders() -> Files:
    return {
        f"{part}/{name}/{part}_{i}.JPEG": jpeg
        for (part, name), jpegs in images_by_class().items()
        for i, jpeg in enumerate(jpegs)
    }


def written(root: Path, files: Mapping[str, bytes]) -> Path:
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
    return root


def small_sizes() -> dict[str, Size]:
    """The table of data sets, where each has as many images as the small copies."""
    return dict.fromkeys(SIZES, SMALL)
