"""Crops and resizing against a second implementation, one picture at a time in float64."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rewound.foundations.randomness import bits
from rewound.tasks.recipes import crops
from rewound.tasks.recipes.crops import Boxes, central_boxes, random_boxes, random_flips, resized

SHARE = 0.875


def boxes_of(
    heights: list[int], widths: list[int], key: int = 3, counters: Tensor | None = None, **other: float
) -> Boxes:
    counters = torch.arange(len(heights)) if counters is None else counters
    sizes = (torch.tensor(sides, dtype=torch.int32) for sides in (heights, widths))
    return random_boxes(*sizes, key, counters, **{"smallest_area": 0.08, "share": SHARE, **other})


def listed(boxes: Boxes) -> list[tuple[int, ...]]:
    return list(zip(*(side.tolist() for side in boxes), strict=True))


def pictures(*sizes: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Noise: the bytes, where each picture begins, heights and widths."""
    bytes_of = torch.tensor([0, *(height * width * 3 for height, width in sizes)])
    pixels = torch.randint(
        0, 256, (int(bytes_of.sum()),), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    heights, widths = torch.tensor(sizes, dtype=torch.int32).unbind(1)
    return pixels, bytes_of.cumsum(0)[:-1], heights, widths


# The second implementation, from TensorFlow's description of its kernels


def central_box(height: int, width: int) -> tuple[int, int, int, int]:
    side = math.floor(SHARE * min(height, width))
    return (height - side + 1) // 2, (width - side + 1) // 2, side, side


def random_box(height: int, width: int, key: int, counter: int, area: float) -> tuple[int, int, int, int]:
    def draw(number: int) -> int:
        return int(bits(key, torch.tensor([counter * 64 + number])))

    for attempt in range(10):
        aspect = 3 / 4 + (draw(4 * attempt) >> 10) / 2**53 * (4 / 3 - 3 / 4)
        low = round(math.sqrt(area * height * width / aspect))
        high = round(math.sqrt(height * width / aspect))
        if round(high * aspect) > width:
            high = int((width + 0.5 - 1e-7) / aspect)
        high = min(high, height)
        low = min(low, high)
        tall = low + draw(4 * attempt + 1) % (high - low + 1)
        broad = round(tall * aspect)
        if tall * broad < area * height * width:
            tall += 1
            broad = round(tall * aspect)
        if tall * broad > height * width:
            tall -= 1
            broad = round(tall * aspect)
        inside = 0 < tall <= height and 0 < broad <= width and tall * broad >= area * height * width
        if not inside or tall * broad < 0.1 * height * width:
            continue
        if (tall, broad) == (height, width):
            break
        top = draw(4 * attempt + 2) % (height - tall) if tall < height else 0
        left = draw(4 * attempt + 3) % (width - broad) if broad < width else 0
        return top, left, tall, broad
    return central_box(height, width)


def cubic(distance: np.ndarray) -> np.ndarray:
    x = np.abs(distance)
    near = 1.25 * x**3 - 2.25 * x**2 + 1
    return np.where(x <= 1, near, -0.75 * (x**3 - 5 * x**2 + 8 * x - 4))


def matrix(length: int, size: int) -> np.ndarray:
    """What each pixel of a result is made of, by the pixels of the box."""
    weights = np.zeros((size, length))
    for i in range(size):
        before, rest = divmod(i * length, size)
        offset = math.floor(rest / size * 1024 + 0.5) / 1024
        for step in (-1, 0, 1, 2):
            weights[i, min(max(before + step, 0), length - 1)] += cubic(np.array(offset - step))
    return weights


def resize(picture: np.ndarray, size: int) -> np.ndarray:
    rows, columns = (matrix(length, size) for length in picture.shape[:2])
    return np.einsum("ih,hwc,jw->cij", rows, picture.astype(np.float64), columns, optimize=True)


# Boxes


@pytest.mark.parametrize("area", [0.08, 0.25, 1.0])
def test_boxes_are_those_of_the_second_implementation(area: float) -> None:
    draws = np.random.default_rng(1)
    heights, widths = (draws.integers(1, 700, 300).tolist() for _ in range(2))
    found = listed(boxes_of(heights, widths, smallest_area=area))
    assert found == [random_box(*each, 3, i, area) for i, each in enumerate(zip(heights, widths, strict=True))]


def test_boxes_are_drawn_in_float64() -> None:
    """In single precision these four would be others, which a kernel that rounds once less would also give."""
    counters = [19_194, 66_753, 118_770, 261_443]
    found = listed(boxes_of([375] * 4, [500] * 4, 3, torch.tensor(counters)))
    assert found == [random_box(375, 500, 3, counter, 0.08) for counter in counters]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 2000), st.integers(1, 2000), st.integers(0, 2**62), st.integers(0, 2**40))
def test_a_box_lies_in_the_picture_and_has_the_area_and_aspect_asked_for(
    height: int, width: int, key: int, counter: int
) -> None:
    ((top, left, tall, broad),) = listed(boxes_of([height], [width], key, torch.tensor([counter])))
    assert 0 <= top <= height - tall
    assert 0 <= left <= width - broad
    assert min(tall, broad) >= 1
    if (top, left, tall, broad) != (central := central_box(height, width)) and min(height, width) > 1:
        assert 0.1 * height * width <= tall * broad <= height * width, central
        assert tall * 3 / 4 - 0.5 <= broad <= tall * 4 / 3 + 0.5


def test_pictures_that_no_box_fits_are_cropped_in_their_middle() -> None:
    """A strip of a thousand pixels has no box with a tenth of its area and such an aspect."""
    assert listed(boxes_of([10, 1000], [1000, 10])) == [(1, 496, 8, 8), (496, 1, 8, 8)]


def test_a_box_as_large_as_the_picture_becomes_the_central_one() -> None:
    """The authors take it for the sign that no try has fitted."""
    boxes = listed(boxes_of([40] * 400, [40] * 400, smallest_area=0.99))
    assert set(boxes) <= {
        (3, 3, 35, 35),
        *((top, left, tall, broad) for top, left, tall, broad in boxes if tall != broad),
    }
    assert (0, 0, 40, 40) not in boxes
    assert (3, 3, 35, 35) in boxes


def test_heights_are_spread_evenly_and_places_too() -> None:
    """Of a square, 4,000 boxes: each tenth of what can be drawn has its share, within five standard deviations."""
    n = 4000
    boxes = boxes_of([500] * n, [500] * n)
    place = boxes.top / (500 - boxes.height)
    for low, high in pairwise(np.linspace(0, 1, 11)):
        count = int(((place >= low) & (place < high)).sum())
        assert abs(count - n / 10) < 5 * math.sqrt(n / 10)
    aspect = boxes.width / boxes.height
    assert 0.74 < aspect.min() < 0.76
    assert 1.31 < aspect.max() < 1.35
    assert boxes.height.min() < 160
    assert (boxes.height * boxes.width).min() >= 0.1 * 500**2


def test_a_box_does_not_depend_on_the_other_pictures() -> None:
    heights, widths = [300, 400, 500], [350, 250, 600]
    together = listed(boxes_of(heights, widths))
    alone = [listed(boxes_of(heights[i : i + 1], widths[i : i + 1], counters=torch.tensor([i])))[0] for i in range(3)]
    assert together == alone
    assert listed(boxes_of(heights, widths, key=4)) != together


def test_central_boxes_are_the_authors() -> None:
    sizes = [(256, 256), (375, 500), (500, 333), (1, 5)]
    heights, widths = torch.tensor(sizes).unbind(1)
    assert listed(central_boxes(heights, widths, SHARE)) == [*(central_box(*each) for each in sizes[:3]), (0, 2, 1, 1)]


def test_half_of_the_pictures_are_flipped() -> None:
    assert abs(int(random_flips(1, torch.arange(10_000)).sum()) - 5000) < 250


# Resizing


@pytest.mark.parametrize("size", [16, 224])
def test_images_are_those_of_the_second_implementation(size: int) -> None:
    pixels, starts, heights, widths = pictures((150, 200), (37, 61), (300, 40), (7, 5))
    boxes = random_boxes(heights, widths, 3, torch.arange(4), smallest_area=0.08, share=SHARE)
    flips = torch.tensor([False, True, True, False])
    images = resized(pixels, starts, widths, boxes, size, flips)
    assert images.is_contiguous(memory_format=torch.channels_last)
    for i, (top, left, tall, broad) in enumerate(listed(boxes)):
        picture = pixels[starts[i] :][: heights[i] * widths[i] * 3].view(int(heights[i]), int(widths[i]), 3).numpy()
        expected = resize(picture[top : top + tall, left : left + broad], size)
        expected = expected[:, :, ::-1] if flips[i] else expected
        # Sixteen products of a byte and weights below 2, in single precision: far below a thousandth of a byte.
        assert np.abs(images[i].numpy() - expected).max() < 1e-3


def test_a_box_of_the_size_asked_for_is_copied() -> None:
    pixels, starts, _, widths = pictures((9, 12))
    box = Boxes(*(torch.tensor([side]) for side in (1, 2, 8, 8)))
    image = resized(pixels, starts, widths, box, 8)
    assert torch.equal(image[0].permute(1, 2, 0), pixels.view(9, 12, 3)[1:9, 2:10].float())


def test_all_at_once_equals_one_by_one() -> None:
    """What a GPU computes, and what a CPU computes."""
    pixels, starts, heights, widths = pictures((30, 20), (37, 61), (12, 40), (7, 5), (64, 64))
    boxes, flips = central_boxes(heights, widths, SHARE), torch.tensor([True, False] * 2 + [True])
    alone = resized(pixels, starts, widths, boxes, 16, flips)
    assert torch.equal(crops._gathered(pixels, starts, widths, boxes, 16, flips), alone)
    assert torch.equal(resized(pixels, starts, widths, boxes, 16)[1], alone[1])
