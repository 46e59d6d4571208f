"""Triton kernels for convolutions of 3x3 with stride 1 whose images keep their size and number of channels.

Images lie in memory pixel by pixel, each with its C channels, so that pixel p of a batch (all images, row by row) is at
p C. With p + d for the neighbour of p in direction d, and zeros outside of the image:

    convolved       y[p, o]     = sum over d, c of x[p + d, c] w[o, d, c]
    its gradients   dx[p, c]    = sum over d, o of dy[p - d, o] w[o, d, c]      the same sum in mirrored directions
                    dw[o, d, c] = sum over p of dy[p, o] x[p + d, c]

Sums are of float32. The last has few results and many terms: each program adds up a part of the pixels, and the caller
adds the parts in a fixed order, so that a step repeats bit for bit. With few channels the three neighbours in a row are
read at once: they are one stretch of memory, of 3 C values, read as 4 C because Triton's shapes are powers of two.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def convolved(x: Tensor, weight: Tensor, *, mirrored: bool, block: int, warps: int, stages: int) -> Tensor:
    """Images, or if mirrored gradients of images, convolved with weights (outputs, inputs, 3, 3), channels last.

    A program makes `block` pixels, with as many loads under way as there are stages.
    """
    _, channels, height, width = x.shape
    result = torch.empty_like(x)
    programs = (x.numel() // channels // block,)
    _convolved[programs](x, weight, result, height, width, channels, block, mirrored, stages, num_warps=warps)
    return result


def weight_sums(x: Tensor, above: Tensor, *, each: int, block: int, warps: int, stages: int) -> Tensor:
    """The gradient of the weights as sums over `each` pixels, `block` at a time: (parts, outputs, 3, 3, inputs)."""
    _, channels, height, width = x.shape
    parts = x.numel() // channels // each
    sums = torch.empty((parts, channels, 3, 3, channels), dtype=torch.float32, device=x.device)
    kernel, programs = (_sums_of_windows, (parts,)) if channels <= 32 else (_sums, (parts, 3))
    kernel[programs](x, above, sums, each, height, width, channels, block, stages, num_warps=warps)
    return sums


@triton.jit  # type: ignore[untyped-decorator]
def _convolved(  # type: ignore[no-untyped-def]
    x,
    weight,
    y,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    MIRRORED: tl.constexpr,
    STAGES: tl.constexpr,
):
    pixel, channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, C)
    row, column = pixel // WIDTH % HEIGHT, pixel % WIDTH
    here = x + pixel[:, None] * C + channel[None, :]
    # In memory, weights are by output, direction and input; a mirrored convolution goes from outputs to inputs.
    if MIRRORED:
        weights = weight + channel[:, None] * 9 * C + channel[None, :]
    else:
        weights = weight + channel[:, None] + channel[None, :] * 9 * C
    sums = tl.zeros((BLOCK, C), tl.float32)
    for direction in tl.range(0, 9, num_stages=STAGES):
        down, right = direction // 3 - 1, direction % 3 - 1
        inside = (row + down >= 0) & (row + down < HEIGHT) & (column + right >= 0) & (column + right < WIDTH)
        there = tl.load(here + (down * WIDTH + right) * C, mask=inside[:, None], other=0.0)
        sums = tl.dot(there, tl.load(weights + (8 - direction if MIRRORED else direction) * C), sums)
    tl.store(y + pixel[:, None] * C + channel[None, :], sums.to(y.dtype.element_ty))


@triton.jit  # type: ignore[untyped-decorator]
def _sums(  # type: ignore[no-untyped-def]
    x,
    above,
    sums,
    EACH: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The three directions of one row."""
    part, down, channel = tl.program_id(0), tl.program_id(1), tl.arange(0, C)
    left = tl.zeros((C, C), tl.float32)
    middle = tl.zeros((C, C), tl.float32)
    right = tl.zeros((C, C), tl.float32)
    for start in tl.range(0, EACH, BLOCK, num_stages=STAGES):
        pixel = part * EACH + start + tl.arange(0, BLOCK)
        row, column = pixel // WIDTH % HEIGHT, pixel % WIDTH
        gradient = tl.trans(tl.load(above + pixel[:, None] * C + channel[None, :]))
        inside = (row + down >= 1) & (row + down <= HEIGHT)
        there = x + (pixel[:, None] + (down - 1) * WIDTH) * C + channel[None, :]
        left = tl.dot(gradient, tl.load(there - C, mask=(inside & (column > 0))[:, None], other=0.0), left)
        middle = tl.dot(gradient, tl.load(there, mask=inside[:, None], other=0.0), middle)
        right = tl.dot(gradient, tl.load(there + C, mask=(inside & (column < WIDTH - 1))[:, None], other=0.0), right)
    result = sums + part * 9 * C * C + channel[:, None] * 9 * C + down * 3 * C + channel[None, :]
    tl.store(result, left)
    tl.store(result + C, middle)
    tl.store(result + 2 * C, right)


@triton.jit  # type: ignore[untyped-decorator]
def _sums_of_windows(  # type: ignore[no-untyped-def]
    x,
    above,
    sums,
    EACH: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """All nine directions, the three of a row at once."""
    part, channel, window = tl.program_id(0), tl.arange(0, C), tl.arange(0, 4 * C)
    direction = window // C
    higher = tl.zeros((C, 4 * C), tl.float32)
    level = tl.zeros((C, 4 * C), tl.float32)
    lower = tl.zeros((C, 4 * C), tl.float32)
    for start in tl.range(0, EACH, BLOCK, num_stages=STAGES):
        pixel = part * EACH + start + tl.arange(0, BLOCK)
        row, column = pixel // WIDTH % HEIGHT, pixel % WIDTH
        gradient = tl.trans(tl.load(above + pixel[:, None] * C + channel[None, :]))
        beside = column[:, None] + direction[None, :] - 1
        inside = (direction < 3)[None, :] & (beside >= 0) & (beside < WIDTH)
        there = x + (pixel[:, None] - 1) * C + window[None, :]
        before = tl.load(there - WIDTH * C, mask=inside & (row > 0)[:, None], other=0.0)
        after = tl.load(there + WIDTH * C, mask=inside & (row < HEIGHT - 1)[:, None], other=0.0)
        higher = tl.dot(gradient, before, higher)
        level = tl.dot(gradient, tl.load(there, mask=inside, other=0.0), level)
        lower = tl.dot(gradient, after, lower)
    result = sums + part * 9 * C * C + channel[:, None] * 9 * C + window[None, :]
    used = (direction < 3)[None, :]
    tl.store(result, higher, mask=used)
    tl.store(result + 3 * C, level, mask=used)
    tl.store(result + 6 * C, lower, mask=used)
