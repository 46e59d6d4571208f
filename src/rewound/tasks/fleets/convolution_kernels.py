"""Triton kernels for convolutions of 3x3 with stride 1 whose images keep their size and number of channels.

Images lie in memory pixel by pixel, each with its C channels, so that pixel p of a batch (all images, row by row) is at
p C. With p + d for the neighbour of p in direction d, and zeros outside of the image:

    convolved       y[p, o]     = sum over d, c of x[p + d, c] w[o, d, c]
    its gradients   dx[p, c]    = sum over d, o of dy[p - d, o] w[o, d, c]      the same sum in mirrored directions
                    dw[o, d, c] = sum over p of dy[p, o] x[p + d, c]

Sums are of float32. The last has few results and many terms: each program adds up a part of the pixels, and the caller
adds the parts in a fixed order, so that a step repeats bit for bit. There are two ways to divide the work:

    by pixels   A program takes a block of pixels, and reads their neighbours direction by direction: nine times the
                images in all.
    by rows     A program takes a strip of rows, as wide as some pairs of columns. It reads each row once, and adds what
                that row gives to the rows above, at and below it. The two pixels of a pair see four pixels of a row,
                which are one stretch of memory: twice the images in all. Of the 4 x 2 weights between them, the two
                that link a pixel to one further than its neighbour are 0. This suits few channels, where the weights
                between such pairs, 24 C^2 numbers, are small.

The convolution can also give the moments of what each program puts out: the mean of every channel, and its sum of
squared differences to that mean, (programs, 2, channels).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def convolved(
    x: Tensor, weight: Tensor, *, mirrored: bool, moments: bool, each: int, warps: int, stages: int
) -> tuple[Tensor, Tensor]:
    """Images, or if mirrored gradients of images, convolved with weights (outputs, inputs, 3, 3), and the moments.

    A program takes `each` pixels, with as many loads under way as there are stages.
    """
    _, channels, height, width = x.shape
    programs = x.numel() // channels // each
    result, found = torch.empty_like(x), _room(x, programs if moments else 0, 2, channels)
    _convolved[(programs,)](
        x, weight, result, found, height, width, channels, each, mirrored, moments, stages, num_warps=warps
    )
    return result, found


def convolved_by_rows(
    x: Tensor, weight: Tensor, *, mirrored: bool, moments: bool, pairs: int, rows: int, warps: int
) -> tuple[Tensor, Tensor]:
    """The same by rows. A program takes so many pairs of columns, which may be of several images, and rows."""
    images, channels, height, width = x.shape
    programs = images * width // 2 // pairs, height // rows
    result, found = torch.empty_like(x), _room(x, programs[0] * programs[1] if moments else 0, 2, channels)
    _convolved_by_rows[programs](
        x, weight, result, found, height, width, channels, pairs, rows, mirrored, moments, num_warps=warps
    )
    return result, found


def weight_sums(x: Tensor, above: Tensor, *, each: int, block: int, warps: int, stages: int) -> Tensor:
    """The gradient of the weights as sums over `each` pixels, `block` at a time: (parts, outputs, 3, 3, inputs)."""
    _, channels, height, width = x.shape
    parts = x.numel() // channels // each
    sums = _room(x, parts, channels, 3, 3, channels)
    _sums[(parts, 9)](x, above, sums, height, width, channels, each, block, stages, num_warps=warps)
    return sums


def weight_sums_by_rows(x: Tensor, above: Tensor, *, pairs: int, rows: int, warps: int) -> Tensor:
    """The same by rows. The first pixels of a program's pairs are a part of their own, and so are the second ones."""
    images, channels, height, width = x.shape
    programs = images * width // 2 // pairs, height // rows
    sums = _room(x, 2 * programs[0] * programs[1], channels, 3, 3, channels)
    _sums_by_rows[programs](x, above, sums, height, width, channels, pairs, rows, num_warps=warps)
    return sums


def _room(x: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=x.device)


@triton.jit  # type: ignore[untyped-decorator]
def _convolved(  # type: ignore[no-untyped-def]
    x,
    weight,
    y,
    moments,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    C: tl.constexpr,
    EACH: tl.constexpr,
    MIRRORED: tl.constexpr,
    MOMENTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    pixel, channel = tl.program_id(0) * EACH + tl.arange(0, EACH), tl.arange(0, C)
    row, column = pixel // WIDTH % HEIGHT, pixel % WIDTH
    here = x + pixel[:, None] * C + channel[None, :]
    # In memory, weights are by output, direction and input; a mirrored convolution goes from outputs to inputs.
    if MIRRORED:
        weights = weight + channel[:, None] * 9 * C + channel[None, :]
    else:
        weights = weight + channel[:, None] + channel[None, :] * 9 * C
    sums = tl.zeros((EACH, C), tl.float32)
    for direction in tl.range(0, 9, num_stages=STAGES):
        down, right = direction // 3 - 1, direction % 3 - 1
        inside = (row + down >= 0) & (row + down < HEIGHT) & (column + right >= 0) & (column + right < WIDTH)
        there = tl.load(here + (down * WIDTH + right) * C, mask=inside[:, None], other=0.0)
        sums = tl.dot(there, tl.load(weights + (8 - direction if MIRRORED else direction) * C), sums)
    result = sums.to(y.dtype.element_ty)
    tl.store(y + pixel[:, None] * C + channel[None, :], result)
    if MOMENTS:  # of what is put out, as it is rounded
        values = result.to(tl.float32)
        mean = tl.sum(values, 0) / EACH
        apart = values - mean[None, :]
        own = moments + tl.program_id(0) * 2 * C + channel
        tl.store(own, mean)
        tl.store(own + C, tl.sum(apart * apart, 0))


@triton.jit  # type: ignore[untyped-decorator]
def _convolved_by_rows(  # type: ignore[no-untyped-def]
    x,
    weight,
    y,
    moments,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    C: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    MIRRORED: tl.constexpr,
    MOMENTS: tl.constexpr,
):
    pair, made, seen = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS), tl.arange(0, 2 * C), tl.arange(0, 4 * C)
    column, first = pair % (WIDTH // 2) * 2, tl.program_id(1) * ROWS
    pixel = (pair // (WIDTH // 2) * HEIGHT + first) * WIDTH + column
    # What links each of the four pixels that are seen to the two that are made, to the row below, the same and above.
    right = (seen // C)[:, None] - (made // C)[None, :]
    linked = (right >= 0) & (right < 3)
    if MIRRORED:
        links = weight + (seen % C)[:, None] * 9 * C + (made % C)[None, :] + (8 - right) * C
    else:
        links = weight + (seen % C)[:, None] + (made % C)[None, :] * 9 * C + right * C
    next_row = -3 * C if MIRRORED else 3 * C
    to_below = tl.load(links, mask=linked, other=0.0)
    to_same = tl.load(links + next_row, mask=linked, other=0.0)
    to_above = tl.load(links + 2 * next_row, mask=linked, other=0.0)
    beside = (column - 1)[:, None] + (seen // C)[None, :]
    inside = (beside >= 0) & (beside < WIDTH)
    there = x + (pixel - WIDTH - 1)[:, None] * C + seen[None, :]  # one row above the strip, one column to the left
    result = y + (pixel - 2 * WIDTH)[:, None] * C + made[None, :]
    # Of the row that is read, and of the one below: what rows gave them so far.
    same = tl.zeros((PAIRS, 2 * C), tl.float32)
    below = tl.zeros((PAIRS, 2 * C), tl.float32)
    if MOMENTS:  # of the rows that each place of the strip puts out, with the first of them as the origin
        origin = tl.zeros((PAIRS, 2 * C), tl.float32)
        total = tl.zeros((PAIRS, 2 * C), tl.float32)
        squares = tl.zeros((PAIRS, 2 * C), tl.float32)
    # The next row is read before this one is used; Triton's own pipeline (3.6, `num_stages`) gave wrong moments.
    values = tl.load(there, mask=inside & (first + 0 * column > 0)[:, None], other=0.0)
    for turn in tl.range(0, ROWS + 2, num_stages=1):
        inner = first + turn + 0 * column < HEIGHT
        next_values = tl.load(there + (turn + 1) * WIDTH * C, mask=inside & inner[:, None], other=0.0)
        above = tl.dot(values, to_above, same)
        same = tl.dot(values, to_same, below)
        below = tl.dot(values, to_below)
        done = above.to(y.dtype.element_ty)
        tl.store(result + turn * WIDTH * C, done, mask=turn >= 2)  # before, it is a row above the strip
        values = next_values
        if MOMENTS:
            value = done.to(tl.float32)
            origin = tl.where(turn == 2, value, origin)
            apart = tl.where(turn >= 2, value - origin, 0.0)
            total += apart
            squares += apart * apart
    if MOMENTS:
        means = origin + total / ROWS
        mean = tl.sum(tl.reshape(tl.sum(means, 0), (2, C)), 0) / (2 * PAIRS)
        apart = means - tl.reshape(tl.broadcast_to(mean[None, :], (2, C)), (2 * C,))[None, :]
        around = squares - total * total / ROWS + ROWS * apart * apart
        own = moments + (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * 2 * C + tl.arange(0, C)
        tl.store(own, mean)
        tl.store(own + C, tl.sum(tl.reshape(tl.sum(around, 0), (2, C)), 0))


@triton.jit  # type: ignore[untyped-decorator]
def _sums(  # type: ignore[no-untyped-def]
    x,
    above,
    sums,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    C: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Of one direction."""
    part, direction, channel = tl.program_id(0), tl.program_id(1), tl.arange(0, C)
    down, right = direction // 3 - 1, direction % 3 - 1
    total = tl.zeros((C, C), tl.float32)
    for start in tl.range(0, EACH, BLOCK, num_stages=STAGES):
        pixel = part * EACH + start + tl.arange(0, BLOCK)
        row, column = pixel // WIDTH % HEIGHT, pixel % WIDTH
        inside = (row + down >= 0) & (row + down < HEIGHT) & (column + right >= 0) & (column + right < WIDTH)
        gradient = tl.trans(tl.load(above + pixel[:, None] * C + channel[None, :]))
        there = x + (pixel + down * WIDTH + right)[:, None] * C + channel[None, :]
        total = tl.dot(gradient, tl.load(there, mask=inside[:, None], other=0.0), total)
    tl.store(sums + part * 9 * C * C + channel[:, None] * 9 * C + direction * C + channel[None, :], total)


@triton.jit  # type: ignore[untyped-decorator]
def _sums_by_rows(  # type: ignore[no-untyped-def]
    x,
    above,
    sums,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    C: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
):
    pair, made, seen = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS), tl.arange(0, 2 * C), tl.arange(0, 4 * C)
    column, first = pair % (WIDTH // 2) * 2, tl.program_id(1) * ROWS
    pixel = (pair // (WIDTH // 2) * HEIGHT + first) * WIDTH + column
    beside = (column - 1)[:, None] + (seen // C)[None, :]
    inside = (beside >= 0) & (beside < WIDTH)
    there = x + (pixel - WIDTH - 1)[:, None] * C + seen[None, :]  # one row above the strip, one column to the left
    gradient = above + pixel[:, None] * C + made[None, :]
    upper = tl.zeros((4 * C, 2 * C), tl.float32)
    level = tl.zeros((4 * C, 2 * C), tl.float32)
    lower = tl.zeros((4 * C, 2 * C), tl.float32)
    # A row of images, and gradients of the rows below, at and above it. Those of the next turn are read before these
    # are used. Gradients outside of the strip are other programs', and count as 0.
    values = tl.load(there, mask=inside & (first + 0 * column > 0)[:, None], other=0.0)
    of_below = tl.load(gradient)
    of_same = tl.zeros((PAIRS, 2 * C), above.dtype.element_ty)
    of_above = tl.zeros((PAIRS, 2 * C), above.dtype.element_ty)
    for turn in tl.range(1, ROWS + 3, num_stages=1):
        inner = first + turn - 1 + 0 * column < HEIGHT
        next_values = tl.load(there + turn * WIDTH * C, mask=inside & inner[:, None], other=0.0)
        next_below = tl.load(gradient + turn * WIDTH * C, mask=turn < ROWS, other=0.0)
        turned = tl.trans(values)
        upper = tl.dot(turned, of_below, upper)
        level = tl.dot(turned, of_same, level)
        lower = tl.dot(turned, of_above, lower)
        values, of_below, of_same, of_above = next_values, next_below, of_below, of_same
    right = (seen // C)[:, None] - (made // C)[None, :]
    linked = (right >= 0) & (right < 3)
    part = 2 * (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) + made // C
    own = sums + (part[None, :] * C + (made % C)[None, :]) * 9 * C + right * C + (seen % C)[:, None]
    tl.store(own, upper, mask=linked)
    tl.store(own + 3 * C, level, mask=linked)
    tl.store(own + 6 * C, lower, mask=linked)
