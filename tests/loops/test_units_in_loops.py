"""Own loops that remove whole units: the units are found from what the loop calls its model with."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import rewound
import rewound.loops.iteration
from rewound import InputError, Mask, Pruner
from sameness import assert_same
from training_loops import AT_ONCE, Loop, T, batch, network, one_step, redraw

UNITS = Pruner(pattern="unit")


@pytest.fixture(autouse=True)
def _save_every_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewound.loops.iteration, "SAVE_SECONDS", 0.0)


@pytest.mark.parametrize("technique", [*AT_ONCE, "gradual every=1"])
def test_whole_units_are_pruned_and_stay_so(technique: str) -> None:
    loop = Loop()
    run = loop.over(
        loop.run(compression=3, technique=technique, pruner=UNITS, retrain_epochs=2, init=redraw, final=0.1)
    )
    assert set(run.mask) == {"0.weight", "0.bias", "1.weight", "1.bias", "3.weight"}
    hidden = run.mask["0.weight"].any(1)
    assert 0 < int(hidden.sum()) <= 16 / 3
    for name, kept in run.mask.items():
        assert torch.equal(
            kept, (hidden if name == "3.weight" else hidden.reshape(-1, *[1] * (kept.ndim - 1))).expand_as(kept)
        )
        assert not loop.model.get_parameter(name)[~kept].any()
    assert [reached.density for reached in run.levels] == [
        1.0,
        *sorted((r.density for r in run.levels[1:]), reverse=True),
    ]
    small = rewound.slim(loop.model, run.mask, batch(0, 0)[0]).model.eval()
    assert torch.allclose(small(batch(0, 0)[0]), loop.model.eval()(batch(0, 0)[0]), atol=1e-5)


@pytest.mark.parametrize("pattern", ["unit", "filter"])
def test_a_run_is_resumed_with_the_units_it_had(tmp_path: Path, pattern: str) -> None:
    def loop_of(seed: int = 0) -> Loop:
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3)
        )
        return Loop(model)

    options = {
        "compression": 2,
        "technique": "weight-rewinding",
        "retrain_epochs": 2,
        "pruner": Pruner(pattern=pattern),
    }
    whole = loop_of()
    expected = whole.over(whole.run(checkpoint=tmp_path / "whole", **options))
    first = loop_of()
    first.over(first.run(checkpoint=tmp_path / "parts", **options), until=5)
    second = loop_of(seed=1)
    run = second.over(second.run(checkpoint=tmp_path / "parts", **options))
    assert second.seen[0][0] == 5
    assert run.mask == expected.mask
    assert_same(second.model.state_dict(), whole.model.state_dict())


def test_the_example_of_a_run_is_kept_and_short(tmp_path: Path) -> None:
    loop = Loop()
    loop.over(loop.run(compression=2, pruner=UNITS, checkpoint=tmp_path), until=2)
    kept = torch.load(tmp_path / "example.pt", weights_only=True)
    assert torch.equal(kept["inputs"][0], batch(0, 0)[0][:2])
    assert kept["keywords"] == {}


def test_a_loop_that_counts_steps_removes_units() -> None:
    model = network()
    sgd, seen = SGD(model.parameters(), lr=0.1, momentum=0.9), []
    run = rewound.steps(12, model, sgd, compression=2, pruner=UNITS, retrain_steps=6, say=seen.append)
    for step in run:
        one_step(model, sgd, 0, step)
    assert run.mask["0.bias"].sum() <= 8
    assert len(seen) == 2 + len(run.levels) - 1


class Named(nn.Module):
    """A network that is called with keywords, and whose code needs the size of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, *, points: dict[str, Tensor], scale: float, unused: None = None) -> Tensor:
        hidden = self.first(points["x"]).relu().reshape(16, -1)
        return self.last(hidden) * scale


def test_keywords_are_seen_too_and_a_batch_is_kept_whole_where_the_network_needs_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Named()
    sgd = SGD(model.parameters(), lr=0.1)
    run = rewound.epochs(1, model, sgd, compression=2, pruner=UNITS, checkpoint=tmp_path, say=lambda text: None)
    for _ in run:
        sgd.zero_grad()
        model(points={"x": torch.randn(16, 6)}, scale=2.0).square().mean().backward()
        sgd.step()
    assert run.mask["first.bias"].sum() <= 8
    assert torch.load(tmp_path / "example.pt", weights_only=True)["keywords"]["points"]["x"].shape == (16, 6)


def test_what_does_not_train_stays_with_all_that_belongs_to_it() -> None:
    """Law 11: the hidden units of a frozen layer neither go nor count."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3))
    model[0].requires_grad_(False)
    loop = Loop(model, SGD(model[2:].parameters(), lr=0.1))
    run = loop.over(loop.run(compression=2, pruner=UNITS, one_shot=True, retrain_epochs=1))
    assert set(run.mask) == {"2.weight", "2.bias", "4.weight"}
    assert run.mask["2.weight"].any(0).all()


def test_what_no_example_shows_is_refused(tmp_path: Path) -> None:
    example = batch(0, 0)[0]
    for options, error in (
        ({"adopt": True}, "no dense run to see it in; give example_inputs="),
        ({"pruner": None, "example_inputs": example}, "example_inputs are for pruning whole units"),
        ({"compression": 100, "example_inputs": example}, "cannot be reached by removing units"),
        ({"example_inputs": torch.zeros(2, 7)}, "does not run on the example inputs"),
        ({"example_inputs": object()}, "which cannot be kept"),
        ({"example_keywords": []}, "example_keywords must be of type Mapping"),
    ):
        with pytest.raises(InputError, match=error):
            Loop().run(**{"compression": 2, "pruner": UNITS, **options})
    model = network()
    loop = Loop(model)
    with pytest.raises(InputError, match="a compiled model does not show it; give example_inputs="):
        rewound.epochs(T, torch.compile(model, backend="eager"), loop.optimizer, loop.scheduler, pruner=UNITS)


def test_an_adopted_network_is_given_its_example() -> None:
    loop = Loop()
    run = loop.over(
        loop.run(compression=2, pruner=UNITS, adopt=True, retrain_epochs=1, example_inputs=[batch(0, 0)[0]])
    )
    assert run.mask["0.bias"].sum() <= 8


def test_what_cannot_be_pruned_is_refused_after_the_first_epoch() -> None:
    loop = Loop()
    with pytest.raises(InputError, match="cannot be reached by removing units"):
        loop.over(loop.run(compression=100, pruner=UNITS))
    assert [epoch for epoch, _, _ in loop.seen] == [0]

    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) if x.sum().item() > 0 else -self.layer(x)

    loop = Loop(Changing())
    with pytest.raises(InputError, match="cannot be traced"):
        loop.over(loop.run(compression=2, pruner=UNITS))
    assert len(loop.seen) == 1

    class Around(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.layers = inner

        def __call__(self, x: Tensor) -> Tensor:  # as a loop that calls only the layers
            return self.layers(x)

    loop = Loop(Around(network()))
    with pytest.raises(InputError, match=r"has not called the model itself; call that .* or give example_inputs="):
        loop.over(loop.run(compression=2, pruner=UNITS))


def test_units_go_to_a_part_of_the_operations() -> None:
    loop = Loop()
    run = loop.over(loop.run(compression=2, one_shot=True, retrain_epochs=1, pruner=Pruner(pattern="unit", of="flops")))
    dense = rewound.profile(network(), batch(0, 0)[0][:1]).total()
    assert rewound.profile(loop.model, batch(0, 0)[0][:1]).total(run.mask) <= dense / 2


# What the levels say of themselves


@pytest.mark.parametrize("slim", [False, True])
@pytest.mark.parametrize("of", ["weights", "flops"])
def test_the_table_and_the_lines_have_what_is_left_and_not_what_was_asked_for(
    tmp_path: Path, of: str, slim: bool
) -> None:
    def loop_of(seed: int) -> Loop:
        torch.manual_seed(seed)
        return Loop(
            nn.Sequential(
                nn.Unflatten(1, (1, 6)),
                nn.Conv1d(1, 21, 3),
                nn.ReLU(),
                nn.Conv1d(21, 13, 3),
                nn.Flatten(),
                nn.Linear(26, 3),
            )
        )

    options = {"compression": 3, "rate": 0.5, "retrain_epochs": 1, "slim": slim, "checkpoint": tmp_path}
    pruner = Pruner(pattern="unit", of=of)
    first = loop_of(0)
    first.over(first.run(pruner=pruner, **options), until=T + 1)
    loop = loop_of(0)
    run = loop.over(loop.run(pruner=pruner, **options))
    with (tmp_path / "levels" / "levels.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["ticket"] for row in rows] == [f"{each}x.safetensors" for each in ("1.00", "2.00", "3.00")]
    dense = rewound.profile(loop_of(0).model, batch(0, 0)[0][:1])
    for row, reached in zip(rows, run.levels, strict=True):
        ticket = rewound.load(tmp_path / "levels" / row["ticket"])
        mask, kept = ticket.mask, Mask({name: each for name, each in ticket.mask.items() if name.endswith("weight")})
        assert (int(row["weights"]), int(row["weights_kept"])) == (kept.total, kept.kept)
        assert float(row["compression"]) == pytest.approx(kept.total / kept.kept)
        assert reached.measured_density == pytest.approx(kept.density)
        counts, left = replace(ticket, parameters=int(row["parameters"])).counts, mask.kept + 3  # the head's biases
        assert counts is not None
        assert (*counts[:2], counts.left) == (kept.kept, kept.total, left)
        assert float(row["network_compression"]) == pytest.approx(int(row["parameters"]) / left)
        left = None if of == "weights" else pytest.approx(dense.total(mask) / dense.total())
        assert reached.flops_left == left
    measured, part = f"{1 / kept.density:.2f}x", run.levels[-1].flops_left
    assert measured != "3.00x"
    if of == "flops":
        assert part is not None
        goal = "3x of the FLOPs"
        said = f"level 2 of 2: {1 / part:.2f}x of the FLOPs, {measured} of the weights (density {kept.density:.4g})"
    else:
        goal, said = "3x (at least 2.", f"level 2 of 2: {measured} (density {kept.density:.4g})"
    assert f"by lr-rewinding to {goal}" in loop.said[0]
    assert loop.said[-1].startswith(said)


def test_a_density_that_is_met_is_the_one_that_is_said() -> None:
    """Biases go with units, and count for the whole network alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 9), nn.ReLU(), nn.Linear(9, 3))
    loop = Loop(model)
    run = loop.over(loop.run(compression=1.5, one_shot=True, retrain_epochs=1, pruner=UNITS))
    weights = [name for name in run.mask if name.endswith("weight")]
    assert len(weights) == 3
    kept, total = sum(run.mask.counts[name] for name in weights), sum(run.mask[name].numel() for name in weights)
    assert kept / total <= 1 / 1.5
    assert run.levels[1].compression == pytest.approx(total / kept, rel=1 / total)
    left = sum(p.numel() for p in model.parameters()) - run.mask.total + run.mask.kept
    assert run.levels[1].network_compression == sum(p.numel() for p in model.parameters()) / left


def test_weights_that_are_skipped_and_read_units_are_not_counted() -> None:
    torch.manual_seed(0)
    loop = Loop(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3)))
    run = loop.over(
        loop.run(compression=2, one_shot=True, retrain_epochs=1, pruner=Pruner(pattern="unit", skip=("4.*",)))
    )
    assert not run.mask["4.weight"].all()
    kept = sum(run.mask.counts[f"{layer}.weight"] for layer in (0, 2))
    assert kept <= (6 * 16 + 16 * 12) / 2
    assert run.levels[1].compression == pytest.approx((6 * 16 + 16 * 12) / kept)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other, self.head = nn.Linear(6, 16), nn.Linear(6, 16), nn.Linear(16, 3)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.one(x).relu() + self.other(x.flip(1)).relu())
        return y


@pytest.mark.parametrize("slim", [False, True])
def test_tickets_of_levels_hold_tied_weights_once(slim: bool, tmp_path: Path) -> None:
    loop = Loop(Tied())
    run = loop.over(loop.run(compression=2, one_shot=True, pruner=UNITS, slim=slim, checkpoint=tmp_path))
    for name, density in (("1.00x", 1.0), ("2.00x", run.mask.density)):
        ticket = rewound.load(tmp_path / "levels" / f"{name}.safetensors")
        assert ticket.state["one.weight"] is ticket.state["other.weight"]
        assert ticket.mask.density == density
        large = Tied()
        ticket.into(large)
        assert large.one.weight is large.other.weight
    x = batch(0, 0)[0]
    assert torch.allclose(large(x), loop.model(x), atol=1e-5)
