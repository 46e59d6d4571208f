"""What is kept of a node beside its tensors: the shape of a result, and of a draft's notes; and where, by default."""

from pathlib import Path
from typing import Final, NamedTuple, NotRequired, Required, TypedDict

DEFAULT_STORE: Final = Path("rewound-store")


class CurvePoint(NamedTuple):
    """One point of a training curve: the mean loss since the point before it."""

    step: int
    lr: float
    loss: float


class LayerCount(TypedDict):
    """What is left of one layer."""

    kept: int
    total: int
    flops: int


class Failure(TypedDict):
    """Where a run stopped being numbers."""

    step: int
    loss: str


class Result(TypedDict, total=False):
    """What is known of a node; only what a target asks for is evaluated."""

    recipe: Required[str]
    history: Required[list[str]]
    after: Required[str | None]
    """The node under the same mask that it continued."""
    steps: Required[int]
    seconds: Required[float]
    curve: Required[list[CurvePoint]]
    made: Required[dict[str, str]]
    val: float
    test: float
    flops: int
    layers: dict[str, LayerCount]
    parameters: int
    """How many the whole network has; missing in earlier results."""
    failed: Failure


class Notes(TypedDict):
    """What a draft knows beside its tensors."""

    curve: list[CurvePoint]
    seconds: float
    begin: NotRequired[int]
    """The step from which both are counted: another plan may cut the same run elsewhere."""
    after: NotRequired[str | None]
    """The node that ends there, under the same mask."""
    made: NotRequired[dict[str, str]]
    """As in a result."""
