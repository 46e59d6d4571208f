"""A task as a user writes it in one file: a small transformer that predicts the next byte of Python's own manual.

Four layers of width 256, batches of 32 x 64 bytes, AdamW at two rates, dropout, clipping, bfloat16. It is here to be
timed: `python benchmarks/gpu_fleet.py --recipe transformer:Transformer`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pydoc_data.topics import topics
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rewound import Batch, InputError, Part, ResidentRecipe, Schedule, Scores

HELD_OUT = 64  # rows for validation, and as many for testing


@lru_cache
def rows(length: int, device: torch.device) -> Tensor:
    """The text cut into rows of `length` + 1 bytes: each predicts its successor."""
    text = torch.frombuffer(bytearray("\n".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.uint8)
    return text[: len(text) // (length + 1) * (length + 1)].reshape(-1, length + 1).to(device)


class Network(nn.Module):
    """A decoder: each position sees itself and what came before."""

    def __init__(self, width: int, layers: int, heads: int, length: int, dropout: float) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, 256)
        self.register_buffer("causal", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        hidden = self.layers(self.bytes(text) + self.places(places), self.causal, is_causal=True)
        out: Tensor = self.out(self.norm(hidden))
        return out


@dataclass(frozen=True)
class Transformer(ResidentRecipe):
    """3.3 million weights."""

    name: ClassVar[str] = "transformer"

    epochs: float = 4.0
    batch_size: int = 32
    length: int = 64
    width: int = 256
    layers: int = 4
    heads: int = 4
    learning_rate: float = 1e-3
    dropout: float = 0.1
    clip_norm: float = 1.0
    precision: str = "float32"

    def __post_init__(self) -> None:
        if self.precision not in ("float32", "bfloat16"):
            raise InputError(f"precision is float32 or bfloat16, not {self.precision!r}")

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Part(len(rows(self.length, torch.device("cpu"))) - 2 * HELD_OUT, self.batch_size),)

    def resident(self, device: torch.device) -> Sequence[Tensor]:
        return (rows(self.length, device)[2 * HELD_OUT :],)

    def model(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Network(self.width, self.layers, self.heads, self.length, self.dropout)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        embeddings = [weight for name, weight in model.named_parameters() if name.startswith(("bytes", "places"))]
        others = [weight for name, weight in model.named_parameters() if not name.startswith(("bytes", "places"))]
        slower = {"params": embeddings, "lr": self.learning_rate / 2, "weight_decay": 0.0}
        return torch.optim.AdamW([slower, {"params": others}], lr=self.learning_rate, weight_decay=0.1)

    @property
    def schedule(self) -> Schedule:
        steps = round(self.epochs * self.steps_per_epoch)
        return Schedule.linear(steps, self.learning_rate, self.learning_rate / 10, warmup=steps / 10)

    @property
    def training_epochs(self) -> float:
        return self.epochs

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        (text,) = (rows.long() for rows in batch)
        with torch.autocast(text.device.type, torch.bfloat16, enabled=self.precision == "bfloat16"):
            guesses = model(text[:, :-1])
        return F.cross_entropy(guesses.float().flatten(0, 1), text[:, 1:].flatten())

    def evaluate(self, model: nn.Module) -> Scores:
        held = rows(self.length, next(model.parameters()).device)[: 2 * HELD_OUT].long()
        right = (model(held[:, :-1]).argmax(2) == held[:, 1:]).double().mean(1)
        return Scores(right[:HELD_OUT].mean().item(), right[HELD_OUT:].mean().item())

    def example(self) -> Batch:
        return (torch.zeros(1, self.length, dtype=torch.int64),)
