"""What is put into a store by its tests, and what they look at and damage in it."""

from pathlib import Path

import torch

from rewound.pruning.mask import Mask
from rewound.recipe import Position
from rewound.storage.records import CurvePoint, Result
from rewound.storage.store import Store
from rewound.training import State

KEY, OTHER = "0123456789abcdef" * 2, "fedcba9876543210" * 2
RESULT: Result = {
    "recipe": "digits",
    "history": ["start digits seed 1", "train 10 steps"],
    "after": None,
    "steps": 10,
    "seconds": 1.25,
    "curve": [CurvePoint(5, 0.1, 2.5), CurvePoint(10, 0.01, 1.5)],
    "made": {"torch": "2"},
    "val": 0.1,
    "test": 1 / 3,
    "flops": 100,
    "layers": {"conv": {"kept": 1, "total": 2, "flops": 3}},
}


def a_state(scale: float = 1.0, size: int = 3) -> State:
    model = {
        "conv.weight": scale * torch.arange(4.0 * size).reshape(4, size),
        "norm.running_var": torch.ones(4, dtype=torch.float64),
        "norm.num_batches_tracked": torch.tensor(7),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "nothing": torch.empty(0, 3),
    }
    slots = {"momentum_buffer/conv.weight": model["conv.weight"] + 1, "step/half": torch.tensor(3.0)}
    return State(model, slots, 2**62 + 1, Position(2, 10))


def a_mask() -> Mask:
    return Mask({"conv.weight": torch.tensor([[True, False, True]] * 4)})


def assert_same(found: State, expected: State) -> None:
    assert (found.seed, found.position) == (expected.seed, expected.position)
    for mine, yours in ((found.model, expected.model), (found.slots, expected.slots)):
        assert mine.keys() == yours.keys()
        for name, tensor in yours.items():
            assert (mine[name].dtype, mine[name].shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(mine[name], tensor), name


def artifact(store: Store, part: str) -> Path:
    """The only file of one kind."""
    (path,) = [path for path in store.root.joinpath(part).rglob("*") if path.is_file() and path.name != ".lock"]
    return path


def parts(store: Store) -> list[Path]:
    return list(store.root.rglob("*.part"))


def flip(path: Path, index: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[index] ^= 1 << bit
    path.write_bytes(content)
