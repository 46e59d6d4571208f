"""What is pruned as one: single weights, blocks of a matrix, all but N of every M; or whole units (`structure`).

| pattern      | what is pruned as one                                                                               |
|--------------|-----------------------------------------------------------------------------------------------------|
| `weight`     | a weight                                                                                            |
| `block RxC`  | R x C weights of the matrix of a layer: outputs x all the rest, so 4 x 9 of a 3x3 convolution is    |
|              | 4 filters of one input channel                                                                      |
| `N:M`        | nothing; of every M neighbours along the inputs N stay, in each row and at each place of a kernel,  |
|              | as sparse tensor cores (2:4) want them                                                              |
| `unit`       | what the network's graph ties together: filters, heads, hidden units, with all that reads them      |
| `filter`     | a unit that convolutions produce                                                                    |

A weight whose shape a block or M does not divide is neither pruned nor counted, and a warning names it.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from rewound.foundations.errors import InputError
from rewound.foundations.names import check_function, lookup, unknown
from rewound.method.pruning.mask import plain_name

Pattern = Callable[[Tensor], Tensor]  # scores of weights -> scores of pieces, in a shape that expands to the weight's
PATTERNS: Mapping[str, Pattern] = {"weight": lambda scores: scores}
UNIT_PATTERNS = ("unit", "filter")
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Pieces:
    """A pattern that is a function: the user's own, or the one of single weights."""

    function: Pattern

    def fits(self, shape: tuple[int, ...], inputs: int) -> bool:
        """Whether a weight of that shape can be pruned so; `inputs` is its dimension that reads."""
        return True

    def pieces(self, scores: Tensor) -> Tensor:
        """The score of each piece."""
        return self.function(scores)

    def left(self, mask: Tensor, pieces: torch.Size) -> Tensor:
        """Which pieces are left: those of which any weight is."""
        return mask.sum_to_size(pieces).bool()

    def spread(self, kept: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Which weights are kept, by which pieces are."""
        return kept.expand(shape)


@dataclass(frozen=True)
class Blocks:
    """Rectangles of a layer's matrix, each scored by the mean of its weights."""

    rows: int
    columns: int

    @property
    def size(self) -> int:
        """How many weights a block has."""
        return self.rows * self.columns

    def fits(self, shape: tuple[int, ...], inputs: int) -> bool:
        """Whether the matrix of a weight is made of whole blocks."""
        return len(shape) > 1 and shape[0] % self.rows == 0 and prod(shape[1:]) % self.columns == 0

    def pieces(self, scores: Tensor) -> Tensor:
        """The score of each block."""
        matrix = scores.reshape(scores.shape[0], -1)
        rows, columns = matrix.shape[0] // self.rows, matrix.shape[1] // self.columns
        tiles = matrix.reshape(rows, self.rows, columns, self.columns)
        return torch.empty(rows, columns, device="meta") if scores.is_meta else tiles.mean((1, 3))

    def left(self, mask: Tensor, pieces: torch.Size) -> Tensor:
        """Which blocks are left: those of which any weight is."""
        return self.pieces(mask.float()) > 0

    def spread(self, kept: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Which weights are kept, by which blocks are."""
        matrix = kept.repeat_interleave(self.rows, 0).repeat_interleave(self.columns, 1)
        return matrix.reshape(shape)


@dataclass(frozen=True)
class NofM:
    """Of every M neighbours along the inputs of a layer N stay, those with the largest scores."""

    n: int
    m: int

    @property
    def density(self) -> float:
        """The fraction that stays, of any weight."""
        return self.n / self.m

    def fits(self, shape: tuple[int, ...], inputs: int) -> bool:
        """Whether there are whole numbers of M inputs."""
        return len(shape) > 1 and shape[inputs] % self.m == 0

    def kept(self, scores: Tensor, inputs: int, left: Tensor | None) -> Tensor:
        """Which weights stay; among equals the later index does, and nothing that is gone comes back."""
        if left is not None:
            scores = scores.masked_fill(~left.to(scores.device), -1.0)
        rows = scores.movedim(inputs, -1)
        neighbours = rows.reshape(*rows.shape[:-1], -1, self.m)
        if not bool(neighbours.isfinite().all()):
            raise InputError(
                "cannot prune weights that are NaN or infinite, the network has diverged; "
                "train it again with a lower learning rate"
            )
        order = neighbours.argsort(dim=-1, stable=True)
        stays = torch.zeros_like(neighbours, dtype=torch.bool).scatter_(-1, order[..., self.m - self.n :], True)
        found = stays.reshape(rows.shape).movedim(-1, inputs).cpu().contiguous()
        return found if left is None else found & left.cpu()


def pattern_named(name: str) -> Pieces | Blocks | NofM | None:
    """The pattern of that name; None for one of whole units.

    >>> pattern_named("2:4"), pattern_named("block 4x1")
    (NofM(n=2, m=4), Blocks(rows=4, columns=1))
    """
    if name in UNIT_PATTERNS:
        return None
    if isinstance(name, str) and (found := re.fullmatch(r"(\d+):(\d+)", name)):
        n, m = map(int, found.groups())
        if not 0 < n < m:
            raise InputError(f"pattern {name!r} keeps {n} of every {m} weights; keep at least 1, and fewer than all")
        return NofM(n, m)
    if isinstance(name, str) and (found := re.fullmatch(r"block (\d+)x(\d+)", name)):
        rows, columns = map(int, found.groups())
        if rows * columns < 2:
            raise InputError(f"pattern {name!r} has blocks of less than two weights; use pattern 'weight'")
        return Blocks(rows, columns)
    known = [*PATTERNS, *UNIT_PATTERNS, "2:4", "block 4x4"]
    if isinstance(name, str) and re.fullmatch(r"\d+:\d+", meant := "".join(name.split())):
        raise InputError(f"unknown pattern {name!r}; did you mean {meant!r}? (known: {', '.join(sorted(known))})")
    if not isinstance(name, str) or (":" not in name and name not in PATTERNS):
        raise InputError(unknown("pattern", name, known))
    function = lookup("pattern", name, PATTERNS)
    if name not in PATTERNS:
        check_function("pattern", name, function, ("scores",))
    return Pieces(function)


def input_dimensions(model: nn.Module) -> dict[str, int]:
    """The dimension of a weight that reads, where it is not dimension 1."""
    return {
        plain_name(f"{path}.weight".lstrip(".")): 0
        for path, module in model.named_modules()
        if isinstance(module, _TRANSPOSED) or (type(module).__name__ == "Conv1D" and hasattr(module, "nf"))
    }
