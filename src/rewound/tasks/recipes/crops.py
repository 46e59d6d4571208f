"""Pictures of any size to images of one size, as the authors' TensorFlow 1 does it, on the device where they lie.

For training, a random box of the picture, resized and flipped half of the time; for evaluation, the central box. The
boxes are TensorFlow's `sample_distorted_bounding_box`: up to ten tries, of which the first that fits counts.

    aspect  uniform in [3/4, 4/3]
    height  uniform over the whole numbers that give at least `smallest_area` of the picture and fit into it
    width   aspect times height, rounded
    place   uniform, but for the last row and column that the box could begin at, which TensorFlow never draws

A try fails if rounding takes the box out of the picture or below `smallest_area`, or if it covers less than a tenth of
the picture (the authors leave `min_object_covered` at 0.1, so that no box is smaller). If all fail, and also if the box
is as large as the picture, the authors take the central box instead.

The resizing is TensorFlow's `resize_bicubic` without half-pixel centres: pixel i of the result is at i * length / size
in the box, between four pixels each way, with Keys' cubic at A = -0.75, tabulated at 1024 offsets between two pixels.
Nothing is averaged when a picture shrinks, the box's own border is repeated outside of it, and values may lie outside
of 0 to 255. Offsets are computed with whole numbers, so that every device takes the same ones; TensorFlow's single
precision takes the neighbouring entry of its table now and then.

Draws are counter-based (`randomness`): the box of a picture depends on its key and counter and on nothing else. All
operations are pointwise but for one search over the ten tries, so that `torch.compile` makes a few kernels of them.
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor

from rewound.foundations.randomness import bits, integers

_TRIES: Final = 10
_DRAWS: Final = 64  # counters per picture: four for each try, then the flip
_COVERED: Final = 0.1
_ASPECTS: Final = (3 / 4, 4 / 3)
_OFFSETS: Final = 1024
_A: Final = -0.75
_AT_ONCE: Final = 1 << 22  # pixels of the result that are computed together on a GPU without compilation: 300 MB


class Boxes(NamedTuple):
    """A box in each picture, in pixels."""

    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor


def central_boxes(heights: Tensor, widths: Tensor, share: float) -> Boxes:
    """The square in the middle whose side is a share of the shorter one, rounded down.

    >>> [box.item() for box in central_boxes(torch.tensor([400]), torch.tensor([501]), 0.875)]
    [25, 76, 350, 350]
    """
    heights, widths = heights.long(), widths.long()
    side = (torch.minimum(heights, widths) * share).long().clamp_min(1)
    return Boxes((heights - side + 1) // 2, (widths - side + 1) // 2, side, side)


def random_boxes(
    heights: Tensor, widths: Tensor, key: int | Tensor, counters: Tensor, *, smallest_area: float, share: float
) -> Boxes:
    """A random box in each picture; `share` is for the central box, where no try has fitted."""
    # In float64, whose division and root are the same on every device: a box is then the same, too.
    picture_height, picture_width = (size.double()[:, None] for size in (heights, widths))
    whole = picture_height * picture_width
    first = counters * _DRAWS
    draws = first[:, None] + 4 * torch.arange(_TRIES, device=heights.device)
    low, high = _ASPECTS
    aspect = low + (bits(key, draws) >> 10).double() * 2.0**-53 * (high - low)
    tallest = (whole / aspect).sqrt().round()
    fitting = ((picture_width + (0.5 - 1e-7)) / aspect).floor()
    tallest = torch.where((tallest * aspect).round() > picture_width, fitting, tallest).minimum(picture_height)
    height = (smallest_area * whole / aspect).sqrt().round().minimum(tallest)
    height = height + integers(key, draws + 1, (tallest - height).long() + 1)
    # What rounding has taken out of the range is tried one pixel higher, then one lower.
    height = torch.where(height * (height * aspect).round() < smallest_area * whole, height + 1, height)
    height = torch.where(height * (height * aspect).round() > whole, height - 1, height)
    width = (height * aspect).round()
    area = height * width
    fits = (area >= max(smallest_area, _COVERED) * whole) & (area <= whole)
    fits &= (width <= picture_width) & (height <= picture_height) & (width > 0) & (height > 0)

    chosen = fits.to(torch.int8).argmax(1, keepdim=True)  # the first
    height, width = (size.gather(1, chosen)[:, 0].long() for size in (height, width))
    room = [(all_of_it.long() - taken) for all_of_it, taken in ((heights, height), (widths, width))]
    place = first + 4 * chosen[:, 0]
    top, left = (integers(key, place + 2 + i, space.clamp_min(1)) for i, space in enumerate(room))
    central = central_boxes(heights, widths, share)
    found = fits.any(1) & ((room[0] != 0) | (room[1] != 0))
    drawn = Boxes(top, left, height, width)
    return Boxes(*(torch.where(found, box, other) for box, other in zip(drawn, central, strict=True)))


def random_flips(key: int | Tensor, counters: Tensor) -> Tensor:
    """Whether to mirror each picture: one time in two."""
    return integers(key, counters * _DRAWS + 4 * _TRIES, 2).bool()


def resized(
    pixels: Tensor, starts: Tensor, widths: Tensor, boxes: Boxes, size: int, flipped: Tensor | None = None
) -> Tensor:
    """What the boxes show, as float32 images (n, 3, size, size) whose channels lie last in memory.

    `pixels` are the bytes of all pictures, of which each begins at its place in `starts`: rows of RGB.

    >>> grey = torch.full((2 * 2 * 3,), 7, dtype=torch.uint8)
    >>> one, two = torch.tensor([0]), torch.tensor([2])
    >>> resized(grey, one, two, Boxes(one, one, two, two), 3).round().unique()
    tensor([7.])
    """
    if flipped is None:
        flipped = torch.zeros_like(starts, dtype=torch.bool)
    if pixels.device.type == "cpu" and not torch.compiler.is_compiling():
        return _one_by_one(pixels, starts, widths, boxes, size, flipped)
    if torch.compiler.is_compiling() or len(starts) <= (at_once := max(1, _AT_ONCE // size**2)):
        return _gathered(pixels, starts, widths, boxes, size, flipped)
    pieces = zip(*(torch.split(each, at_once) for each in (starts, widths, flipped, *boxes)), strict=True)
    return torch.cat([_gathered(pixels, start, width, Boxes(*box), size, flip) for start, width, flip, *box in pieces])


def _gathered(pixels: Tensor, starts: Tensor, widths: Tensor, boxes: Boxes, size: int, flipped: Tensor) -> Tensor:
    """All images at once, sixteen bytes of a picture for each of theirs."""
    # All in one shape, whose pointwise operations become one kernel.
    rows, row_weights = _spread(_taps(boxes.height, size, torch.zeros_like(boxes.height, dtype=torch.bool)), 2)
    columns, column_weights = _spread(_taps(boxes.width, size, flipped), 1)
    corners = starts + 3 * (boxes.top * widths + boxes.left)
    lines = 3 * widths.long()[:, None, None, None]
    first = corners[:, None, None, None] + torch.arange(3, device=pixels.device)
    result = torch.zeros((), device=pixels.device)
    for column, column_weight in zip(columns, column_weights, strict=True):
        between = torch.zeros((), device=pixels.device)
        for row, row_weight in zip(rows, row_weights, strict=True):
            between = between + row_weight * pixels[first + row * lines + 3 * column].float()
        result = result + column_weight * between
    return result.permute(0, 3, 1, 2)


def _one_by_one(pixels: Tensor, starts: Tensor, widths: Tensor, boxes: Boxes, size: int, flipped: Tensor) -> Tensor:
    """The same sums, for each picture first its rows, then its columns: thirty times as fast without compilation."""
    rows, columns = _taps(boxes.height, size, torch.zeros_like(flipped)), _taps(boxes.width, size, flipped)
    images = torch.empty(len(starts), size, size, 3)
    places = zip(starts.tolist(), widths.tolist(), *(part.tolist() for part in boxes), strict=True)
    for i, (start, line, top, left, height, width) in enumerate(places):
        begin = start + (top * line + left) * 3
        box = pixels.as_strided((height, width, 3), (line * 3, 3, 1), pixels.storage_offset() + begin).float()
        for dim, (taps, weights) in enumerate((rows, columns)):
            shape = (-1, 1, 1) if dim == 0 else (-1, 1)
            terms = (weights[i, :, tap].view(shape) * box.index_select(dim, taps[i, :, tap]) for tap in range(4))
            box = sum(terms, torch.zeros(()))
        images[i] = box
    return images.permute(0, 3, 1, 2)


@torch.library.custom_op("rewound::cubic_taps", mutates_args=())
def _taps(lengths: Tensor, size: int, flipped: Tensor) -> tuple[Tensor, Tensor]:
    """For each position in the result: the four pixels of the box around it, and their weights; both (n, size, 4).

    An operation of its own, so that it stays one: inside a kernel it would be computed for every byte of the result.
    """
    positions, lengths = torch.arange(size, device=lengths.device)[None], lengths[:, None]
    positions = torch.where(flipped[:, None], size - 1 - positions, positions)
    exact = positions * lengths
    before, rest = exact // size, exact % size
    offset = ((2 * _OFFSETS * rest + size) // (2 * size)).float() / _OFFSETS
    places = [(before + step).clamp_min(0).minimum(lengths - 1) for step in (-1, 0, 1, 2)]
    weights = [_outer(1 + offset), _inner(offset), _inner(1 - offset), _outer(2 - offset)]
    return torch.stack(places, 2), torch.stack(weights, 2)


@_taps.register_fake
def _(lengths: Tensor, size: int, flipped: Tensor) -> tuple[Tensor, Tensor]:
    shape = (len(lengths), size, 4)
    return lengths.new_empty(shape), lengths.new_empty(shape, dtype=torch.float32)


def _spread(taps: tuple[Tensor, Tensor], dim: int) -> list[list[Tensor]]:
    """Places and weights of each tap, by image, row, column and colour, of which rows or columns have size 1."""
    return [[each.unsqueeze(dim).unsqueeze(3) for each in tensor.unbind(2)] for tensor in taps]


def _inner(distance: Tensor) -> Tensor:
    """Keys' cubic at most one pixel away."""
    return ((_A + 2) * distance - (_A + 3)) * distance * distance + 1


def _outer(distance: Tensor) -> Tensor:
    """Keys' cubic between one and two pixels away."""
    return ((_A * distance - 5 * _A) * distance + 8 * _A) * distance - 4 * _A
