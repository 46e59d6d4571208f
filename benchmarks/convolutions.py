"""Our kernels for convolutions with few channels beside cuDNN's, on a GPU.

    PYTHONPATH=src python benchmarks/convolutions.py

The three shapes that convolutions of the CIFAR-10 networks have, bfloat16, 2,048 images at once, as many as a fleet of
16 networks has under way. Microseconds for 128 images: the median, for the convolution (ours with the moments that
batch normalisation takes), the gradient of its input and that of its weights; and the time in which 4.3 TB/s would read
and write the images.
"""

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from rewound.tasks.fleets.convolutions import _convolved, _weight_sums

ATEN = torch.ops.aten
SETTINGS = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
IMAGES = 2048


def microseconds(work: Callable[[], object]) -> float:
    from triton.testing import do_bench

    return 128 / IMAGES * 1e3 * float(do_bench(work, warmup=5, rep=50, return_mode="median"))


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").bfloat16().contiguous(memory_format=torch.channels_last)


def row(channels: int, size: int) -> str:
    x, above = (drawn(IMAGES, channels, size, size) for _ in range(2))
    weight = drawn(channels, channels, 3, 3)

    def backward(*which: bool) -> Callable[[], object]:
        return lambda: ATEN.convolution_backward(above, x, weight, None, *SETTINGS, [*which, False])

    theirs = [lambda: ATEN.convolution(x, weight, None, *SETTINGS), backward(True, False), backward(False, True)]
    ours = [
        lambda: _convolved(x, weight, False, True),
        lambda: _convolved(above, weight, True, False),
        lambda: _weight_sums(x, above).sum(0).bfloat16(),
    ]
    times = [[microseconds(work) for work in works] for works in (theirs, ours)]
    floor = 128 / IMAGES * 2 * x.numel() * x.element_size() / 4.3e6
    both = "   ".join(" ".join(f"{time:6.2f}" for time in each) for each in times)
    return f"{channels:3} channels, {size:2} px   {both}   {sum(times[1]) / sum(times[0]):.2f}   {floor:.2f}"


def main() -> int:
    if not torch.cuda.is_available():
        print(f"this needs a CUDA GPU; torch {torch.__version__} sees none", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    print(f"{'':19}   {'cuDNN':20}   {'ours':20}   ratio   reads and writes of one alone")
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, benchmark_limit=0):
        for channels, size in ((16, 32), (32, 16), (64, 8)):
            print(row(channels, size), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
