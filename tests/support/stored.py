"""What is put into a store by its tests, and what they look at and damage in it."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rewound.method.pruning.mask import Mask
from rewound.states.storage.artifacts import CurvePoint, Result, artifact_at, digest
from rewound.states.storage.folder import Folder
from rewound.states.storage.merging import Fate, merge
from rewound.states.storage.statefile import tensor_digest
from rewound.states.storage.store import Store
from rewound.tasks.recipe import Position
from rewound.tasks.training import State

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


def merged(store: Store, name: str, content: bytes) -> Fate:
    """What becomes of an artifact that arrives."""
    with TemporaryDirectory() as folder:
        file = Path(folder, name)
        if artifact_at(name):
            file.parent.mkdir(parents=True)
            file.write_bytes(content)
        return merge(name, Folder(Path(folder)), len(content), store)


def swap(one: Path, other: Path) -> None:
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def unbind(path: Path) -> None:
    """Make an artifact what versions that did not write keys into their files wrote."""
    if path.suffix == ".json":
        result = json.loads(path.read_text())
        del result["key"], result["checksum"]
        path.write_text(json.dumps({**result, "checksum": digest(result)}, indent=1))
        return
    with safe_open(path, framework="pt") as file:
        facts = json.loads(file.metadata()["rewound"])
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a mapping)
    del facts["key"]
    header = json.dumps(facts, sort_keys=True)
    save_file(tensors, path, {"rewound": header, "checksum": tensor_digest(tensors, header)})


def unbind_all(store: Store) -> None:
    for path in [*store.root.glob("results/*/*.json"), *store.root.glob("*/**/*.safetensors")]:
        unbind(path)
