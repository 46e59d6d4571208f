"""How fast packed JPEG files are decoded, brought to the device and trained on: Imagenette, read again and again.

    PYTHONPATH=src python benchmarks/streaming.py --out FILE                   on a GPU, in about three minutes
    PYTHONPATH=src python benchmarks/streaming.py --per-class 200 --out FILE   on a subset that was prepared so
    PYTHONPATH=src python benchmarks/streaming.py --device cpu --tiny          tries it out

Lines are printed, and written to the file as they come:

    decoder NAME     pictures a second that threads decode, and do nothing else; nvjpeg decodes on the GPU
    feed             pictures a second that reach the device, in the order of training, where nobody waits for them
    resident         pictures a second that train, if all of them are in the device's memory
    streamed         the same, if they are decoded for each step; and the share of the time that it waited for data

The goal is at least 85% of the slower of `resident` and the fastest decoder of the CPU. Training is ResNet-50 at 224
pixels in bfloat16 with batches of 256, as `imagenette-resnet50` has it otherwise: the captured step, and all that
belongs to it.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rewound.method.schedule import Segment
from rewound.tasks.datasets import jpegs, packed_images
from rewound.tasks.datasets.packed_images import Encoded, Part, decoded
from rewound.tasks.feed import LIMIT, Feed, nearly_in_sequence, threads_to_decode
from rewound.tasks.fleets.captured import Program
from rewound.tasks.fleets.place import Place, Run
from rewound.tasks.recipes.imagenet import ImagenetteResNet50
from rewound.tasks.training import State, begin

STARTED = time.perf_counter()


class Report:
    """Prints lines, and writes them to a file at once: what ends in the middle has said what it knew."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        if path is not None:
            path.write_text("")

    def __call__(self, text: str) -> None:
        line = f"{time.perf_counter() - STARTED:6.1f} s  {text}"
        print(line, flush=True)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(line + "\n")


def rates(work: Callable[[], int], seconds: float, rounds: int = 3) -> list[float]:
    """Pictures a second: `work` does some and says how many, again and again; once before the clock runs."""
    work()
    found = []
    for _ in range(rounds):
        began, done = time.perf_counter(), 0
        while (took := time.perf_counter() - began) < seconds / rounds:
            done += work()
        found.append(done / took)
    return found


def spread(found: list[float]) -> str:
    return f"{statistics.median(found):8,.0f} pictures/s ({min(found):,.0f} to {max(found):,.0f})"


def endless(part: Part, size: int) -> Iterator[Tensor]:
    """Batches in the order of training, without an end."""
    for epoch in count():
        yield from (batch for batch in nearly_in_sequence(epoch, len(part)).split(size) if len(batch) == size)


def decoding(part: Part, name: str, threads: int, size: int, seconds: float) -> list[float]:
    batches, room = endless(part, size), torch.empty(0, dtype=torch.uint8)
    with ThreadPoolExecutor(threads) as executor:

        def work() -> int:
            nonlocal room
            chosen = next(batches)
            if len(room) < (needed := int(lengths[chosen].sum())):
                room = torch.empty(2 * needed, dtype=torch.uint8)
            decoded(part, chosen, name, threads=executor, into=room)
            return size

        lengths = Encoded(part, name).lengths
        return rates(work, seconds)


def nvjpeg(part: Part, device: torch.device, size: int, seconds: float) -> list[float]:
    """torchvision's decoder on the GPU, which takes many files at once."""
    import numpy as np
    from torchvision.io import ImageReadMode, decode_jpeg

    batches = endless(part, size)

    def work() -> int:
        files = [torch.from_numpy(np.frombuffer(part.jpeg(i), np.uint8).copy()) for i in next(batches).tolist()]
        pictures = decode_jpeg(files, ImageReadMode.RGB, device)
        torch.cat([picture.permute(1, 2, 0).flatten() for picture in pictures])  # as a feed would have them
        torch.cuda.synchronize(device)
        return size

    return rates(work, seconds)


def feeding(part: Part, name: str, device: torch.device, threads: int, size: int, seconds: float) -> list[float]:
    feed = Feed(Encoded(part, name), endless(part, size), device, threads=threads)

    def work() -> int:
        next(feed)
        return size

    try:
        found = rates(work, seconds)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return found
    finally:
        feed.close()


def training(recipe: ImagenetteResNet50, device: torch.device, steps: int, first: int) -> tuple[list[float], float]:
    """Pictures a second in three rounds of so many steps, and the share of the time that was spent waiting for data.

    The `first` steps come before the clock runs.
    """
    place = Place(Program(recipe, device, "inductor" if device.type == "cuda" else None))
    stops = [first + number * steps for number in range(4)]
    place.start(Run(begin(recipe, 1), None, [Segment(0.01, stops[-1])], stops=stops))
    times, waited = [], []
    for _ in stops:
        while not place.arrived():
            if not place.launch():
                time.sleep(2e-4)
        outcome, _ = place.report()
        times.append(time.perf_counter())
        waited.append(outcome.waited if isinstance(outcome, State) else float("nan"))
    took = [after - before for before, after in pairwise(times)]
    return [steps * recipe.batch_size / each for each in took], sum(waited[1:]) / sum(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--threads", type=int, default=threads_to_decode())
    parser.add_argument("--per-class", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each rate of a decoder or the feed")
    parser.add_argument("--steps", type=int, default=100, help="of each of three rounds of training")
    parser.add_argument("--tiny", action="store_true", help="small batches of small images")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device, say = torch.device(given.device), Report(given.out)
    if given.tiny:
        given.seconds, given.steps = 0.3, 1
    size = 8 if given.tiny else 256
    part = packed_images.load("imagenette", per_class=given.per_class or None).train
    mean = part.pixels / len(part)
    say(f"{len(part):,} pictures of {mean / 3:,.0f} pixels on average; torch {torch.__version__}")

    alone: dict[str, float] = {}
    for name in jpegs.decoders():
        for threads in sorted({1, given.threads}):
            found = decoding(part, name, threads, size, given.seconds)
            say(f"decoder {name:12} {threads:3} threads  {spread(found)}")
        alone[name] = statistics.median(found)
    if device.type == "cuda":
        try:
            say(f"decoder nvjpeg       on the GPU  {spread(nvjpeg(part, device, size, given.seconds))}")
        except (ImportError, RuntimeError) as error:
            say(f"decoder nvjpeg       cannot be had: {str(error).strip().splitlines()[0]}")
    name = jpegs.check_decoder(None)
    found = feeding(part, name, device, given.threads, size, given.seconds)
    moved = mean * statistics.median(found) / 1e9
    say(f"feed of {name:12} {given.threads:3} threads  {spread(found)}, {moved:.1f} GB/s")

    smaller: dict[str, Any] = {"image_size": 32, "batch_norm_group": 8, "precision": "float32"} if given.tiny else {}
    recipe = ImagenetteResNet50(batch_size=size, per_class=given.per_class, **smaller)
    trained = {}
    for kind, limit in (("resident", None), ("streamed", "0")):
        os.environ.pop(LIMIT, None)
        if limit is not None:
            os.environ[LIMIT] = limit
        found, waiting = training(recipe, device, given.steps, first=1 if given.tiny else 20)
        trained[kind] = statistics.median(found)
        say(f"training, {kind:8}  {spread(found)}, {waiting:.1%} of the time waiting for data")
    slower = min(trained["resident"], alone[name])
    say(f"streamed is {trained['streamed'] / slower:.1%} of the slower of resident and the decoder alone (goal: 85%)")


if __name__ == "__main__":
    main()
