"""A small task whose examples have from 1 to 60 bytes, and are decoded for each batch or stay on the device."""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from resident_recipes import Toy
from rewound import Batch
from rewound.foundations.errors import InputError
from rewound.foundations.randomness import bits, integers
from rewound.tasks.feed import stays_on

LENGTHS = 1 + integers(5, torch.arange(40), 60)
STARTS = LENGTHS.cumsum(0) - LENGTHS
BYTES = (bits(6, torch.arange(int(LENGTHS.sum()))) % 256).to(torch.uint8)


class Slow:
    """The examples; some take longer than others, so that threads end in another order than they began."""

    def __init__(self, damaged: int | None = None, seconds: float = 0.0) -> None:
        self.damaged, self.seconds, self.decoded, self.lock = damaged, seconds, 0, threading.Lock()

    @property
    def lengths(self) -> Tensor:
        return LENGTHS

    def other_tensors(self, chosen: Tensor) -> Sequence[Tensor]:
        lengths = LENGTHS[chosen]
        return lengths.cumsum(0) - lengths, lengths, chosen % 2

    def decode(self, index: int, into: NDArray[np.uint8]) -> None:
        if index == self.damaged:
            raise InputError(f"image {index} of shard 0 is damaged")
        time.sleep(self.seconds * (index % 3))
        start = int(STARTS[index])
        into[:] = BYTES[start : start + len(into)].numpy()
        with self.lock:
            self.decoded += 1


@dataclass(frozen=True)
class Ragged(Toy):
    """Five numbers of an example: some of its bytes, and one that is drawn."""

    slow: ClassVar[Slow] = Slow()
    decoder: ClassVar[str] = "decoder 1"
    data_identity: ClassVar[tuple[str, ...]] = ("decoder",)

    def made_with(self) -> Mapping[str, str]:
        return {"decoder": self.decoder}

    def resident(self, device: torch.device) -> Sequence[Tensor]:
        assert stays_on(device, len(BYTES))  # else nobody asks for it
        return [tensor.to(device) for tensor in (BYTES, STARTS, LENGTHS, torch.arange(40) % 2)]

    def source(self, device: torch.device) -> Slow | None:
        return None if stays_on(device, len(BYTES)) else self.slow

    def assembled(self, data: Sequence[Tensor], part: int, chosen: Tensor, key: Any, counters: Tensor) -> Batch:
        content, starts, lengths, labels = data
        places = bits(key, 5 * counters[:, None] + torch.arange(5, device=content.device)) % lengths[chosen][:, None]
        return content[starts[chosen][:, None] + places].to(torch.get_default_dtype()) / 128 - 1, labels[chosen]

    def network(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 2))


def decoding_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("rewound-decode")]
