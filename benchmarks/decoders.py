"""How many images a second each decoder decodes from a pack, by one thread and by as many as there are cores.

Rounds alternate between the decoders; printed are the median of CPU time and of wall-clock time, with the extremes,
and for how many of the images the pixels are those of the first decoder. The pack is read once before.

    rewound data imagenette --from imagenette2-320.tgz
    python benchmarks/decoders.py imagenette
"""

import argparse
import os
import time
from statistics import median

import torch

from rewound.tasks.datasets.jpegs import decoder_version, decoders
from rewound.tasks.datasets.packed_images import PackedPart, Pictures, decoded, load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="a data set of packed images")
    parser.add_argument("--per-class", type=int, help="the subset that was prepared")
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    torch.set_num_threads(1)
    part = load(options.name, per_class=options.per_class).train
    chosen = torch.arange(min(options.images, len(part)))
    first = decoded(part, chosen, decoders()[0])
    memory = torch.zeros_like(first.pixels)  # used again and again, as training does
    for threads in sorted({1, options.threads}):
        cpu: dict[str, list[float]] = {name: [] for name in decoders()}
        wall: dict[str, list[float]] = {name: [] for name in decoders()}
        for name in decoders() * options.rounds:
            pictures, cpu_seconds, wall_seconds = timed(part, chosen, name, threads, memory)
            cpu[name].append(len(chosen) / cpu_seconds)
            wall[name].append(len(chosen) / wall_seconds)
            assert torch.equal(pictures.starts, first.starts)
        for name in decoders():
            same = same_pictures(first, decoded(part, chosen, name))
            print(
                f"{decoder_version(name)}, {threads} threads: {shown(cpu[name])} images/s of CPU time, "
                f"{shown(wall[name])} images/s; {same:,} of {len(chosen):,} as {decoders()[0]}",
                flush=True,
            )


def timed(
    part: PackedPart, chosen: torch.Tensor, name: str, threads: int, memory: torch.Tensor
) -> tuple[Pictures, float, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    pictures = decoded(part, chosen, name, threads=threads, into=memory)
    return pictures, time.process_time() - cpu, time.perf_counter() - wall


def same_pictures(first: Pictures, other: Pictures) -> int:
    ends = [*first.starts.tolist()[1:], len(first.pixels)]
    ranges = zip(first.starts.tolist(), ends, strict=True)
    return sum(torch.equal(first.pixels[start:end], other.pixels[start:end]) for start, end in ranges)


def shown(rates: list[float]) -> str:
    return f"{median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})"


if __name__ == "__main__":
    main()
