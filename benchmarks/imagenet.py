"""How many images a second ResNet-50 trains on, everything included: decoding, crops, resizing, step, update.

    PYTHONPATH=src python benchmarks/imagenet.py --budget 190            all of it, as far as 190 s go
    PYTHONPATH=src python benchmarks/imagenet.py --only tiny-256 eager   some of it
    PYTHONPATH=src python benchmarks/imagenet.py --packed imagenette --only decoders feed resident-256 streamed-256
    PYTHONPATH=src python benchmarks/imagenet.py --smoke                 whether it runs, in small, on a CPU

Pictures are drawn, in sizes like those of ImageNet (about 500 x 375) or of Tiny-ImageNet (64 x 64). With `--packed
imagenette`, the streamed and the eager run take the prepared pictures of that data set instead. Each line of results is
printed as soon as it is known. `decoders` are the decoders alone, with as many threads as training has (nvjpeg decodes
on the GPU), and `feed` is what reaches the device where no step waits for it. Streamed training should reach 85% of the
slower of resident training and the decoder. `eager` is the usual loop beside it: a DataLoader whose workers decode and
crop with Pillow, and an eager step with autocast. `waited` is the share of the time in which training waited for
pictures to be decoded.
"""

import time

STARTED = time.perf_counter()

import argparse  # noqa: E402
import io  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import statistics  # noqa: E402
import sys  # noqa: E402
import traceback  # noqa: E402
from collections.abc import Callable, Iterator, Sequence  # noqa: E402
from concurrent.futures import ThreadPoolExecutor  # noqa: E402
from contextlib import closing  # noqa: E402
from dataclasses import dataclass, replace  # noqa: E402
from functools import lru_cache, partial  # noqa: E402
from itertools import count  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any, ClassVar  # noqa: E402
from unittest.mock import patch  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

from rewound.method.schedule import Segment  # noqa: E402
from rewound.tasks.datasets import packed_images  # noqa: E402
from rewound.tasks.datasets.jpegs import decoder_version, decoders, fastest_decoder  # noqa: E402
from rewound.tasks.datasets.packed_images import Encoded, PackedFile, PackedPart, Pictures, decoded  # noqa: E402
from rewound.tasks.feed import Feed, nearly_in_sequence, threads_to_decode  # noqa: E402
from rewound.tasks.fleets.captured import program  # noqa: E402
from rewound.tasks.fleets.place import Place, Run  # noqa: E402
from rewound.tasks.recipes import resnet  # noqa: E402
from rewound.tasks.recipes.imagenet import ImageNetResNet50, PackedClassifier, TinyImageNetResNet50  # noqa: E402
from rewound.tasks.training import State, begin  # noqa: E402


@lru_cache
def drawn(n: int, height: int, width: int, classes: int, device: torch.device) -> Pictures:
    """Noise, in sizes that differ by a quarter each way."""
    draw = torch.Generator().manual_seed(0)
    spread = 0.5 + torch.rand(2, n, generator=draw) if height > 64 else torch.ones(2, n)
    heights, widths = (spread * torch.tensor([[height], [width]])).int()
    lengths = 3 * heights.long() * widths.long()
    labels = torch.randint(0, classes, (n,), generator=draw)
    pixels = torch.randint(0, 256, (int(lengths.sum()),), dtype=torch.uint8, device=device)
    rest = [each.to(device) for each in (lengths.cumsum(0) - lengths, heights, widths, labels)]
    return Pictures(pixels, *rest)


@lru_cache
def jpegs_in_memory(n: int, height: int, width: int, classes: int) -> PackedPart:
    """Pictures with the detail of photographs: about 100 kB each at 500 x 375."""
    from PIL import Image

    draws, files, sizes = np.random.default_rng(0), [], []
    for _ in range(n):
        coarse = Image.fromarray(draws.integers(0, 256, (height // 8, width // 8, 3), np.uint8))
        fine = draws.normal(0, 12, (height, width, 1))
        picture = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)) + fine
        file = io.BytesIO()
        Image.fromarray(picture.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=85)
        files.append(file.getvalue())
        sizes.append((height, width))
    import zlib

    ends = np.cumsum([len(file) for file in files])
    checks = [zlib.crc32(file) for file in files]
    places = np.stack([np.zeros(n), [0, *ends[:-1]], ends, checks], 1).astype(np.int64)
    labels = torch.from_numpy(draws.integers(0, classes, n))
    content = PackedFile(Path("memory"), memoryview(b"".join(files)), "run it again")
    return PackedPart(labels, torch.tensor(sizes, dtype=torch.int32), (content,), places)


class Drawn:
    """A recipe whose pictures are drawn."""

    pictures: ClassVar[int] = 4096
    shape: ClassVar[tuple[int, int]] = (375, 500)
    part: ClassVar[PackedPart | None] = None
    """Where pictures are decoded from; None: they are on the device."""

    @property
    def train_size(self) -> int:
        return self.pictures if self.part is None else len(self.part)

    def made_with(self) -> dict[str, str]:
        return {}

    def resident(self, device: torch.device) -> Pictures:
        assert self.part is None
        return drawn(self.pictures, *self.shape, 10, device)

    def source(self, device: torch.device) -> Encoded | None:
        return None if self.part is None else Encoded(self.part, fastest_decoder())


@dataclass(frozen=True)
class ImageNet(Drawn, ImageNetResNet50):
    """ImageNet's recipe on noise."""


@dataclass(frozen=True)
class Streamed(Drawn, ImageNetResNet50):
    """ImageNet's recipe on JPEG files that are decoded for each batch."""


@dataclass(frozen=True)
class Tiny(Drawn, TinyImageNetResNet50):
    """Tiny-ImageNet's recipe on noise."""

    pictures: ClassVar[int] = 20_000
    shape: ClassVar[tuple[int, int]] = (64, 64)


def captured(
    recipe: PackedClassifier, device: torch.device, seconds: float, *, networks: int = 1, profiling: bool = False
) -> dict[str, Any]:
    """The step that runs train with, of one network or of several side by side."""
    began = time.perf_counter()
    places = [Place(program(recipe, device)) for _ in range(networks)]
    built = time.perf_counter() - began
    chunk = max(2, 4096 // recipe.batch_size) if device.type == "cuda" else 1
    most = 100 * chunk
    for seed, place in enumerate(places):
        place.start(Run(begin(recipe, seed), None, [Segment(0.01, most)], range(chunk, most, chunk)))
    rates, waited = [], []
    end, ended = None, False
    while not ended and (end is None or time.perf_counter() < end):
        start = time.perf_counter()
        while not all(place.arrived() for place in places):
            launched = [place.launch() for place in places]
            if not any(launched):
                time.sleep(2e-4)  # as a fleet does; threads that decode need Python's lock
        reports = [place.report() for place in places]
        took, waiting, ended = time.perf_counter() - start, 0.0, reports[0][1]
        for place, (state, _) in zip(places, reports, strict=True):
            if not isinstance(state, State):
                raise SystemExit(f"it diverged: {state}")
            waiting = max(waiting, state.waited)
            place.resume()
        if end is None:  # the first is warm-up
            end = time.perf_counter() + seconds
        else:
            rates.append(networks * chunk * recipe.batch_size / took)
            waited.append(waiting / took)
    found = {
        "images_per_second": statistics.median(rates),
        "least": min(rates),
        "largest": max(rates),
        "waited": statistics.median(waited),
        "build_seconds": built,
    }
    if device.type == "cuda":
        found["gib"] = torch.cuda.max_memory_allocated() / 2**30
        if recipe.source(device) is None:
            found |= {
                "crop_ms": crop_milliseconds(places[0]),
                "step_ms": 1e3 * networks * recipe.batch_size / statistics.median(rates),
                **(where_it_goes(places[0]) if profiling else {}),
            }
    return found


def rate(work: Callable[[], int], seconds: float) -> float:
    """Pictures a second: `work` does some and says how many; the first time is before the clock runs."""
    work()
    began, done = time.perf_counter(), 0
    while (took := time.perf_counter() - began) < seconds:
        done += work()
    return done / took


def endless(part: PackedPart, size: int) -> Iterator[Tensor]:
    """Batches in the order of training, without an end."""
    for epoch in count():
        yield from (batch for batch in nearly_in_sequence(epoch, len(part)).split(size) if len(batch) == size)


def decoders_alone(part: PackedPart, device: torch.device, size: int, seconds: float) -> dict[str, Any]:
    """What each decoder gives with all threads, and torchvision's on the GPU."""
    batches, found = endless(part, size), dict[str, Any](threads=threads_to_decode())
    largest = int(Encoded(part, fastest_decoder()).lengths.topk(size).values.sum())
    room = torch.empty(largest, dtype=torch.uint8)
    with ThreadPoolExecutor(threads_to_decode()) as threads:
        for name in decoders():

            def work(name: str = name) -> int:
                decoded(part, next(batches), name, threads=threads, into=room)
                return size

            found[name] = rate(work, seconds / 2)
    if device.type == "cuda":
        try:
            found["nvjpeg"] = rate(partial(decode_on_gpu, part, batches, device), seconds / 2)
        except (ImportError, RuntimeError) as error:
            found["nvjpeg"] = str(error).strip().partition("\n")[0]
    return found


def decode_on_gpu(part: PackedPart, batches: Iterator[Tensor], device: torch.device) -> int:
    from torchvision.io import ImageReadMode, decode_jpeg

    chosen = next(batches).tolist()
    files = [torch.from_numpy(np.frombuffer(part.jpeg(index), np.uint8).copy()) for index in chosen]
    pictures = decode_jpeg(files, ImageReadMode.RGB, device)
    torch.cat([picture.permute(1, 2, 0).flatten() for picture in pictures])  # as a feed would have them
    torch.cuda.synchronize(device)
    return len(chosen)


def feed_alone(part: PackedPart, device: torch.device, size: int, seconds: float) -> dict[str, Any]:
    """What reaches the device if nobody waits for it."""
    feed = Feed(Encoded(part, fastest_decoder()), endless(part, size), device)

    def work() -> int:
        next(feed)
        return size

    with closing(feed):
        found = rate(work, seconds)
    return {"images_per_second": found, "gb_per_second": found * part.pixels / len(part) / 1e9}


def crop_milliseconds(place: Place) -> float:
    """What choosing, cropping, resizing and flipping a batch takes of a step: captured by itself, as in the step."""
    batch = partial(place.program.batch, 0, place.data, place.orders[0], place.positions[0], place.keys[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(place.stream):
        batch()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=place.stream):
        batch()
    graph.replay()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) * 50


KINDS = {  # of kernels, by what their names hold; the first that fits: Triton's name the operations around them, too
    "reductions": ("triton_red", "triton_per"),
    "pointwise": ("triton_poi",),
    "convolutions": ("cudnn", "cutlass", "xmma", "gemm", "conv", "_sums", "nvjet", "sm90", "implicit"),
    "copies": ("CatArray", "Memcpy", "Memset", "copy"),
}


def where_it_goes(place: Place) -> dict[str, Any]:
    """Milliseconds of a step by kind of kernel, and the ten longest kernels."""
    steps = 3
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        with torch.cuda.stream(place.stream):
            for _ in range(steps):
                place._replays[0]()
        torch.cuda.synchronize()
    kinds, longest = dict.fromkeys([*KINDS, "others"], 0.0), dict[str, float]()
    for event in profile.key_averages():
        took = event.self_device_time_total / 1e3 / steps
        kind = next((kind for kind, names in KINDS.items() if any(name in event.key for name in names)), "others")
        kinds[kind] += took
        longest[f"{event.key[:90]} x{event.count // steps}"] = took
    top = sorted(longest.items(), key=lambda item: -item[1])[:10]
    return {"kernels_ms": {k: round(v, 2) for k, v in kinds.items()}, "longest_ms": {k: round(v, 2) for k, v in top}}


class Files(Dataset[tuple[Tensor, int]]):
    """A data set as scripts have it: decoded, cropped, flipped and standardised by Pillow and torch."""

    def __init__(self, part: PackedPart, size: int) -> None:
        self.files = [bytes(part.jpeg(i)) for i in range(len(part))]
        self.labels, self.size = part.labels.tolist(), size

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        which = index % len(self.files)
        image = Image.open(io.BytesIO(self.files[which])).convert("RGB")
        area = image.height * image.width * float(torch.empty(()).uniform_(0.08, 1))
        aspect = float(torch.empty(()).uniform_(3 / 4, 4 / 3))
        width = min(image.width, round((area * aspect) ** 0.5))
        height = min(image.height, round((area / aspect) ** 0.5))
        left = int(torch.randint(image.width - width + 1, ()))
        top = int(torch.randint(image.height - height + 1, ()))
        box = (left, top, left + width, top + height)
        image = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        pixels = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float() / 255
        pixels = pixels.flip(2) if torch.rand(()) < 0.5 else pixels
        mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
        return (pixels - mean[:, None, None]) / deviation[:, None, None], self.labels[which]


def eager(recipe: PackedClassifier, device: torch.device, seconds: float, part: PackedPart) -> dict[str, Any]:
    """The usual loop: a DataLoader, autocast, an eager step; and the two parts of it by themselves."""
    model = replace(recipe, batch_norm_group=recipe.batch_size).model(0).to(device).train()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, nesterov=True, weight_decay=1e-4)
    workers = len(os.sched_getaffinity(0)) if device.type == "cuda" else 0
    files = Files(part, recipe.image_size)
    loader = DataLoader(
        files, recipe.batch_size, num_workers=workers, pin_memory=device.type == "cuda", persistent_workers=workers > 0
    )
    batches = iter(loader)

    def step(images: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    held = [tensor.to(device) for tensor in next(batches)]

    def per_second(work: Callable[[], object]) -> float:
        for _ in range(2):
            work()
        done, began = 0, time.perf_counter()
        while not done or time.perf_counter() - began < seconds:
            work()
            done += 1
            if device.type == "cuda":
                torch.cuda.synchronize()
        return done * recipe.batch_size / (time.perf_counter() - began)

    def both() -> None:
        step(*(tensor.to(device, non_blocking=True) for tensor in next(batches)))

    return {
        "images_per_second": per_second(both),
        "step_alone": per_second(lambda: step(*held)),
        "loader_alone": per_second(lambda: next(batches)),
        "workers": workers,
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="names of variants")
    parser.add_argument("--budget", type=float, default=190, help="no variant begins after so many seconds")
    parser.add_argument("--seconds", type=float, default=5, help="how long a variant is measured")
    parser.add_argument("--packed", choices=packed_images.SIZES, help="a prepared data set for streamed and eager runs")
    parser.add_argument("--per-class", type=int, help="the subset of it that was prepared so")
    parser.add_argument("--out", type=Path, help="a file to which the lines are added, too")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args(arguments)
    device = torch.device("cpu" if options.smoke else "cuda")
    fields: dict[str, Any] = {}
    seconds = options.seconds
    if options.smoke:
        fields, seconds = {"batch_size": 4, "batch_norm_group": 2, "image_size": 32, "precision": "float32"}, 0.1
        for kind in (ImageNet, Tiny):
            kind.pictures = 16

    @lru_cache
    def files() -> PackedPart:
        if options.packed:
            return packed_images.load(options.packed, per_class=options.per_class).train
        return jpegs_in_memory(8 if options.smoke else 512, 375, 500, 10)

    def streamed() -> dict[str, Any]:
        Streamed.part = files()
        recipe = Streamed(**{"batch_size": 256, **fields})
        return captured(recipe, device, seconds) | {"decoder": decoder_version(fastest_decoder())}

    def unchecked() -> dict[str, Any]:
        """Without torch's checks of the places that pixels are read from."""
        torch._dynamo.reset()  # with another decay it is another program, and is compiled anew
        with torch._inductor.config.patch(assert_indirect_indexing=False):
            return captured(ImageNet(**{"batch_size": 256, "weight_decay": 2e-4, **fields}), device, seconds)

    def plain() -> dict[str, Any]:
        """With the first layers as torch has them."""
        torch._dynamo.reset()
        with patch.object(resnet, "_is_compiled_training", return_value=False):
            return captured(ImageNet(**{"batch_size": 256, "weight_decay": 3e-4, **fields}), device, seconds)

    # A group as large as the batch is torch's own BatchNorm2d.
    variants: dict[str, Callable[[], dict[str, Any]]] = {
        "resident-256": lambda: captured(ImageNet(**{"batch_size": 256, **fields}), device, seconds),
        "resident-1024": lambda: captured(ImageNet(**fields), device, seconds),
        "profile-256": lambda: captured(ImageNet(**{"batch_size": 256, **fields}), device, seconds, profiling=True),
        "resident-256-plain": plain,
        "resident-256-unchecked": unchecked,
        "tiny-256": lambda: captured(Tiny(**fields), device, seconds),
        "tiny-256-two": lambda: captured(Tiny(**fields), device, seconds, networks=2),
        "eager": lambda: eager(ImageNet(**{"batch_size": 256, **fields}), device, seconds, files()),
        "decoders": lambda: decoders_alone(files(), device, 4 if options.smoke else 256, seconds),
        "feed": lambda: feed_alone(files(), device, 4 if options.smoke else 256, seconds),
        "streamed-256": streamed,
        "resident-256-one-group": lambda: captured(
            ImageNet(**{"batch_size": 256, **fields, "batch_norm_group": 256}), device, seconds
        ),
        "tiny-1024": lambda: captured(Tiny(**{"batch_size": 1024, **fields}), device, seconds),
        "resident-1024-one-group": lambda: captured(
            ImageNet(**{"batch_size": 1024, **fields, "batch_norm_group": 1024}), device, seconds
        ),
    }
    for name in options.only or variants:
        if (past := time.perf_counter() - STARTED) > options.budget:
            print(f"{name}: left out after {past:.0f} s", flush=True)
            continue
        try:
            found = variants[name]()
        except Exception as error:  # the others are still worth their time
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"[:500]}
        machine = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        line = {"variant": name, **found, "machine": machine, "torch": torch.__version__}
        line |= {"at": round(time.perf_counter() - STARTED, 1)}
        shown = json.dumps({key: round(value, 4) if isinstance(value, float) else value for key, value in line.items()})
        print(shown, flush=True)
        if options.out is not None:
            with options.out.open("a") as out:
                out.write(shown + "\n")
        if device.type == "cuda":
            drawn.cache_clear()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main(sys.argv[1:])
