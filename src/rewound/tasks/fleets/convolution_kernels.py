"""Triton kernels for convolutions of 3x3 with stride 1 whose images keep their size and number of channels.

Images lie in memory pixel by pixel, each with its C channels, so that pixel p of a batch (all images, row by row) is at
p C. With p + d for the neighbour of p in direction d, and zeros outside of the image:

    convolved       y[p, o]     = sum over d, c of x[p + d, c] w[o, d, c]
    its gradients   dx[p, c]    = sum over d, o of dy[p - d, o] w[o, d, c]      the same sum in mirrored directions
                    dw[o, d, c] = sum over p of dy[p, o] x[p + d, c]

Sums are of float32. The last has few results and many terms: each program adds up a part of the pixels, and the caller
adds the parts in a fixed order, so that a step repeats bit for bit.

With few channels, two pixels beside each other are made at once (`pairs`). They see four pixels of each row, which are
one stretch of memory: 4 C values are read for 2 C sums, instead of three times C for C. Of the 4 x 2 weights between
them, the two that link a pixel to one further than its neighbour are 0.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def convolved(
    x: Tensor, weight: Tensor, *, mirrored: bool, moments: bool, pairs: bool, block: int, warps: int, stages: int
) -> tuple[Tensor, Tensor]:
    """Images, or if mirrored gradients of images, convolved with weights (outputs, inputs, 3, 3), channels last.

    A program makes `block` pixels, with as many loads under way as there are stages. The moments of each block are the
    mean of every channel and its sum of squared differences to that mean: (blocks, 2, channels).
    """
    _, channels, height, width = x.shape
    blocks = x.numel() // channels // block
    result = torch.empty_like(x)
    found = torch.empty((blocks if moments else 0, 2, channels), dtype=torch.float32, device=x.device)
    _convolved[(blocks,)](
        x, weight, result, found, height, width, channels, block, pairs, mirrored, moments, stages, num_warps=warps
    )
    return result, found


def weight_sums(x: Tensor, above: Tensor, *, pairs: bool, each: int, block: int, warps: int, stages: int) -> Tensor:
    """The gradient of the weights as sums over `each` pixels, `block` at a time: (parts, outputs, 3, 3, inputs).

    With pairs, the first pixels of all pairs are a part of their own, and so are the second ones.
    """
    _, channels, height, width = x.shape
    programs = x.numel() // channels // each
    parts = 2 * programs if pairs else programs
    sums = torch.empty((parts, channels, 3, 3, channels), dtype=torch.float32, device=x.device)
    _sums[(programs, 3 if pairs else 9)](
        x, above, sums, height, width, channels, each, block, pairs, stages, num_warps=warps
    )
    return sums


@triton.jit  # type: ignore[untyped-decorator]
def _convolved(  # type: ignore[no-untyped-def]
    x,
    weight,
    y,
    moments,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    MIRRORED: tl.constexpr,
    MOMENTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    MADE: tl.constexpr = 2 if PAIRS else 1  # pixels in a row of the product
    SEEN: tl.constexpr = 4 if PAIRS else 1  # pixels that one turn of the loop reads for them
    TURNS: tl.constexpr = 3 if PAIRS else 9
    pixel = (tl.program_id(0) * (BLOCK // MADE) + tl.arange(0, BLOCK // MADE)) * MADE
    row, column = pixel // WIDTH % HEIGHT, pixel % WIDTH
    made, seen = tl.arange(0, MADE * C), tl.arange(0, SEEN * C)
    # In memory, weights are by output, direction and input; a mirrored convolution goes from outputs to inputs.
    right = (seen // C)[:, None] - (made // C)[None, :]
    if MIRRORED:
        weights = weight + (seen % C)[:, None] * 9 * C + (made % C)[None, :] - right * C
    else:
        weights = weight + (seen % C)[:, None] + (made % C)[None, :] * 9 * C + right * C
    linked = (right >= 0) & (right < 3)
    sums = tl.zeros((BLOCK // MADE, MADE * C), tl.float32)
    for turn in tl.range(0, TURNS, num_stages=STAGES):
        direction = turn * (9 // TURNS)  # of the first pixel that is seen
        down, across = direction // 3 - 1, direction % 3 - 1
        beside = (column + across)[:, None] + (seen // C)[None, :]
        inside = (beside >= 0) & (beside < WIDTH) & ((row + down >= 0) & (row + down < HEIGHT))[:, None]
        stretch = x + (pixel + down * WIDTH + across)[:, None] * C + seen[None, :]
        there = tl.load(stretch, mask=inside, other=0.0)
        links = tl.load(weights + (8 - direction if MIRRORED else direction) * C, mask=linked, other=0.0)
        sums = tl.dot(there, links, sums)
    result = sums.to(y.dtype.element_ty)
    tl.store(y + pixel[:, None] * C + made[None, :], result)
    if MOMENTS:  # of what is put out, as it is rounded
        values = result.to(tl.float32)
        mean = tl.sum(tl.reshape(tl.sum(values, 0), (MADE, C)), 0) / BLOCK
        apart = values - tl.reshape(tl.broadcast_to(mean[None, :], (MADE, C)), (MADE * C,))[None, :]
        squares = tl.sum(tl.reshape(tl.sum(apart * apart, 0), (MADE, C)), 0)
        own = moments + tl.program_id(0) * 2 * C + tl.arange(0, C)
        tl.store(own, mean)
        tl.store(own + C, squares)


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
    PAIRS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Of one direction; with pairs, of the three directions in a row."""
    MADE: tl.constexpr = 2 if PAIRS else 1
    SEEN: tl.constexpr = 4 if PAIRS else 1
    part, direction = tl.program_id(0), tl.program_id(1) * (3 if PAIRS else 1)
    made, seen = tl.arange(0, MADE * C), tl.arange(0, SEEN * C)
    down, across = direction // 3 - 1, direction % 3 - 1
    total = tl.zeros((MADE * C, SEEN * C), tl.float32)
    for start in tl.range(0, EACH, BLOCK, num_stages=STAGES):
        pixel = part * EACH + start + tl.arange(0, BLOCK // MADE) * MADE
        row, column = pixel // WIDTH % HEIGHT, pixel % WIDTH
        beside = (column + across)[:, None] + (seen // C)[None, :]
        inside = (beside >= 0) & (beside < WIDTH) & ((row + down >= 0) & (row + down < HEIGHT))[:, None]
        stretch = x + (pixel + down * WIDTH + across)[:, None] * C + seen[None, :]
        gradient = tl.trans(tl.load(above + pixel[:, None] * C + made[None, :]))
        total = tl.dot(gradient, tl.load(stretch, mask=inside, other=0.0), total)
    right = (seen // C)[None, :] - (made // C)[:, None]
    own = sums + (part * MADE + made // C)[:, None] * 9 * C * C
    own += (made % C)[:, None] * 9 * C + (direction + right) * C + (seen % C)[None, :]
    tl.store(own, total, mask=(right >= 0) & (right < 3))
