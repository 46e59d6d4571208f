"""What goes over from one level of a slim run to the next, where everything becomes large and small again."""

import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import rewound
from rewound import InputError, Mask, Pruner
from rewound.loops.snapshot import Stateful
from training_loops import batch, network

UNITS = Pruner(pattern="unit")


def trained(slim: bool, every: int, also: list[Stateful] | None = None, technique: str = "lr-rewinding") -> nn.Module:
    """A network that is trained for three batches an epoch, with an optimizer step after `every` batches of the run."""
    model = network().double()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    options = {"compression": 3, "rate": 0.3, "pruner": UNITS, "technique": technique, "say": lambda text: None}
    batches = 0
    for epoch in rewound.epochs(3, model, optimizer, slim=slim, also=also or [], **options):  # type: ignore[arg-type]
        for step in range(3):
            x, labels = batch(epoch, step)
            nn.functional.cross_entropy(model(x.double()), labels).backward()
            batches += 1
            if batches % every == 0:
                optimizer.step()
                optimizer.zero_grad()
    return model.eval()


def points() -> Tensor:
    return torch.randn(32, 6, generator=torch.Generator().manual_seed(3)).double()


@pytest.mark.numeric
@pytest.mark.parametrize("technique", ["lr-rewinding", "weight-rewinding"])
def test_gradients_that_wait_for_a_step_at_the_end_of_a_level_are_those_of_a_masked_network(technique: str) -> None:
    masked, slim = (trained(slim, every=2, technique=technique) for slim in (False, True))
    assert slim[0].out_features < masked[0].out_features
    assert torch.allclose(masked(points()), slim(points()), rtol=1e-10, atol=1e-10)


class Position:
    """Where a data loader stands: nothing of the network, and it can be neither copied nor loaded in an epoch."""

    def __init__(self) -> None:
        self.lock, self.loaded = threading.Lock(), 0

    def state_dict(self) -> dict[str, object]:
        return {"batches": 0}

    def load_state_dict(self, state: dict[str, object], /) -> None:
        self.loaded += 1


def test_what_has_nothing_that_shrinks_is_left_alone() -> None:
    position = Position()
    trained(True, every=1, also=[position])
    assert position.loaded == 0


@pytest.mark.parametrize("slim", [False, True])
def test_the_level_before_one_that_diverged_is_returned(slim: bool) -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    options = {"compression": 3, "rate": 0.3, "pruner": UNITS, "max_drop": 0.1, "say": lambda text: None}
    run = rewound.epochs(2, model, optimizer, slim=slim, **options)  # type: ignore[arg-type]
    for epoch in run:
        x, labels = batch(epoch, 0)
        optimizer.zero_grad()
        (nn.functional.cross_entropy(model(x), labels) * (torch.nan if run.level == 2 else 1)).backward()
        optimizer.step()
        run.report(0.9)
    assert [level.level for level in run.levels] == [0, 1]
    assert (model[0].out_features == int(run.mask["0.weight"].any(1).sum())) == slim
    momentum = [slots["momentum_buffer"] for slots in optimizer.state.values()]
    assert all(tensor.isfinite().all() for tensor in (*model.parameters(), *momentum))
    assert [tensor.shape for tensor in momentum] == [p.shape for p in model.parameters()]


class Numbered(SGD):
    """Keeps a number for each row and each column of a matrix, as factored optimizers do: here, where it was."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step(closure)
        for parameter in (each for group in self.param_groups for each in group["params"] if each.ndim == 2):
            for dim, key in enumerate(("rows", "columns")):
                self.state[parameter].setdefault(key, torch.arange(1.0, 1 + parameter.shape[dim]))


def test_slots_of_rows_and_columns_follow_also_where_a_matrix_is_square() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = Numbered(model.parameters(), lr=0.05, momentum=0.9)
    options = {"compression": 8, "rate": 0.1, "pruner": UNITS, "slim": True, "say": lambda text: None}
    shapes = set()
    run = rewound.epochs(1, model, optimizer, **options)  # type: ignore[arg-type]
    for epoch in run:
        shapes.add(tuple(model[2].weight.shape))
        x, labels = batch(epoch, 0)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()
    assert {(16, 16), tuple(model[2].weight.shape)} < shapes
    for name, weight in ((name, p) for name, p in model.named_parameters() if p.ndim == 2):
        left = run.mask[name]
        for dim, key in enumerate(("rows", "columns")):
            assert (optimizer.state[weight][key] - 1).tolist() == left.any(1 - dim).nonzero()[:, 0].tolist(), (
                name,
                key,
            )


def test_the_mask_of_a_run_is_not_for_its_small_network(tmp_path: Path) -> None:
    small, mask = nn.Linear(6, 2), Mask({"weight": torch.ones(4, 6, dtype=torch.bool)})
    message = (
        "no parameter here has the name and shape of weight; if this is the slim network, its mask is of the large"
    )
    with pytest.raises(InputError, match=message):
        mask.apply(small)
    with pytest.raises(InputError, match=message):
        rewound.save(small, mask, tmp_path / "ticket.safetensors")
    with pytest.raises(InputError, match=r"name and shape of weight$"):
        mask.apply(nn.Linear(7, 2))
