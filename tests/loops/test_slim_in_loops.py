"""Own loops with `slim=True`: the user's own objects become small, and train what a masked network would (law 8)."""

import copy
import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.optimizer import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import rewound
import rewound.loops.iteration
from optimizers_around import Lookahead, timm_lookahead
from rewound import Epochs, InputError, Pruner
from sameness import assert_same
from training_loops import AT_ONCE, Loop, T, batch, network, redraw

UNITS = Pruner(pattern="unit")
OPTIMIZERS = {
    "sgd": lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3),
    # A bias before BatchNorm has a gradient of zero, but for rounding, which AdamW divides by its own size: more than
    # 1e-10 comes of it on some CPUs, unless a larger eps keeps it small.
    "adamw": lambda model: AdamW(model.parameters(), lr=0.01, eps=1e-3),
}


@pytest.fixture(autouse=True)
def _save_every_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewound.loops.iteration, "SAVE_SECONDS", 0.0)


class Residual(nn.Module):
    """Convolutions with BatchNorm around a residual connection, for the points of `training_loops`.

    Its buffers have a number for each channel, as frozen normalisation does; one of them is not saved.
    """

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.stem, self.norm = nn.Conv1d(1, 6, 3, padding=1), nn.BatchNorm1d(6)
        self.branch = nn.Sequential(nn.Conv1d(6, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 6, 1))
        self.head = nn.Linear(6, 3)
        self.register_buffer("variance", torch.linspace(0.5, 1.5, 6)[:, None])
        self.register_buffer("scale", torch.linspace(1.5, 0.5, 6)[:, None], persistent=False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.stem(x.double().unsqueeze(1))).relu()
        hidden = hidden * (self.variance + 0.1).rsqrt() + self.scale * self.branch(hidden)
        return self.head(hidden.relu().mean(2))


def trained(
    technique: str, kind: str, slim: bool, model: nn.Module | None = None, **options: object
) -> tuple[Loop, Epochs, AveragedModel]:
    model = model or Residual()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = OPTIMIZERS[kind](model)
    optimizer.register_step_post_hook(lambda *_: ema.update_parameters(model))
    loop = Loop(model, optimizer)
    given = {"compression": 3, "rate": 0.3, "retrain_epochs": 2, "technique": technique, "pruner": UNITS, "final": 0.01}
    run = loop.run(**{**given, "init": seeded_redraw, "also": [ema], "slim": slim, **options})
    return loop, run, ema


def seeded_redraw(model: nn.Module) -> None:
    torch.manual_seed(7)
    redraw(model)


def close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-10, atol=1e-10)


def points() -> Tensor:
    return torch.randn(32, 6, generator=torch.Generator().manual_seed(3))


@pytest.mark.numeric
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("technique", AT_ONCE)
def test_law_8_slim_levels_train_what_masked_levels_do(technique: str, kind: str) -> None:
    ends: dict[bool, list[tuple[rewound.Mask, Tensor, Tensor, dict[str, Tensor]]]] = {}
    for slim in (False, True):
        loop, run, ema = trained(technique, kind, slim)
        parameters, modules = list(loop.model.parameters()), list(loop.model.modules())
        ends[slim] = []
        for epoch in run:
            loop.train(epoch)
            if run.epochs_done + 1 in run.ends and run.level:
                outputs = copy.deepcopy(loop.model).eval()(points()), copy.deepcopy(ema).eval()(points())
                slots = loop.optimizer.state[loop.model.head.weight]
                ends[slim].append(
                    (run.mask, *(each.detach() for each in outputs), {k: v.clone() for k, v in slots.items()})
                )
        assert [*map(id, loop.model.parameters())] == [*map(id, parameters)]
        assert list(loop.model.modules()) == modules
        if slim:
            assert (
                loop.model.stem.out_channels == loop.model.stem.weight.shape[0] == int(run.mask["stem.bias"].sum()) < 6
            )
            assert ema.module.branch[0].out_channels == int(run.mask["branch.0.bias"].sum())
    assert len(ends[True]) == len(ends[False]) == len(run.levels) - 1 >= 3
    for masked, small in zip(ends[False], ends[True], strict=True):
        assert masked[0] == small[0]
        assert close(small[1], masked[1])
        assert close(small[2], masked[2])
        left = masked[0]["stem.bias"]
        for key, slot in masked[3].items():
            assert close(small[3][key], slot[:, left] if slot.ndim else slot), key


@pytest.mark.parametrize("technique", ["lr-rewinding", "weight-rewinding"])
def test_a_slim_run_is_resumed_by_a_script_with_a_new_large_model(tmp_path: Path, technique: str) -> None:
    whole, run, expected = trained(technique, "adamw", True, checkpoint=tmp_path / "whole")
    whole.over(run)
    for stop in (T + 2, T + 3, T + 5):  # at the end of a level, in it, and in the last
        first, run, _ = trained(technique, "adamw", True, checkpoint=tmp_path / str(stop))
        first.over(run, until=stop)
        second, run, ema = trained(technique, "adamw", True, Residual(1), checkpoint=tmp_path / str(stop))
        second.over(run)
        assert second.seen[0][0] <= stop
        assert_same(second.model.state_dict(), whole.model.state_dict())
        assert_same(ema.state_dict(), expected.state_dict())
        assert_same(
            [*second.optimizer.state_dict()["state"].values()], [*whole.optimizer.state_dict()["state"].values()]
        )


class Attended(nn.Module):
    """Attention over the six numbers of a point, whose branch adds nothing before it is trained."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.heads, self.places = 8, nn.Parameter(torch.randn(6, 16))
        self.first, self.qkv, self.branch, self.last = (nn.Linear(*s) for s in ((1, 16), (16, 48), (16, 16), (16, 3)))
        nn.init.zeros_(self.branch.weight)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.double().unsqueeze(2)) + self.places
        q, k, v = (each.unflatten(2, (self.heads, -1)).transpose(1, 2) for each in self.qkv(hidden).chunk(3, 2))
        found = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.last((hidden + self.branch(found)).mean(1))


def test_a_resumed_run_counts_heads_whose_branch_is_silent_before_training(tmp_path: Path) -> None:
    ends = []
    heads = Pruner(pattern="unit", only=("qkv.*",))
    for name, stop in (("whole", None), ("parts", T + 1)):
        options = {"checkpoint": tmp_path / name, "pruner": heads, "compression": 2, "rate": 0.5}
        first, run, _ = trained("lr-rewinding", "adamw", True, Attended(0), **options)
        first.over(run, until=stop)
        if stop is not None:
            first, run, _ = trained("lr-rewinding", "adamw", True, Attended(1), **options)
            first.over(run)
        assert (first.model.heads, len(first.model.qkv.weight)) == (4, 24)
        ends.append(first.model.state_dict())
    assert_same(*ends)


def test_a_finished_slim_run_gives_its_small_network_and_goes_on_to_a_larger_compression(tmp_path: Path) -> None:
    first, run, _ = trained("lr-rewinding", "sgd", True, checkpoint=tmp_path)
    first.over(run)
    again, run, _ = trained("lr-rewinding", "sgd", True, Residual(1), checkpoint=tmp_path)
    again.over(run)
    assert again.seen == []
    assert_same(again.model.state_dict(), first.model.state_dict())
    further, run, _ = trained("lr-rewinding", "sgd", True, Residual(1), checkpoint=tmp_path, compression=4)
    further.over(run)
    assert further.seen
    assert further.model.stem.out_channels <= first.model.stem.out_channels


def test_the_level_that_is_returned_has_its_own_size() -> None:
    sizes: dict[int, int] = {}
    loop, run, _ = trained("lr-rewinding", "sgd", True, max_drop=0.05)

    def accuracy(run: Epochs) -> float:
        sizes[run.level] = sum(p.numel() for p in loop.model.parameters())
        return 0.9 if run.level < 2 else 0.5

    loop.over(run, accuracy=accuracy)
    assert sum(p.numel() for p in loop.model.parameters()) == sizes[1] > sizes[2]
    assert loop.model(points()).shape == (32, 3)
    loop, run, _ = trained("lr-rewinding", "sgd", True, max_drop=0.05)
    loop.over(run, accuracy=lambda run: 0.5 if run.level else 0.9)
    assert loop.model.stem.out_channels == loop.model.stem.weight.shape[0] == 6
    assert loop.model(points()).shape == (32, 3)


@pytest.mark.numeric
@pytest.mark.parametrize("last_good", [0, 1])
def test_the_level_that_is_returned_is_that_of_a_masked_run_with_buffers_that_are_not_saved(last_good: int) -> None:
    returned = []
    for slim in (False, True):
        loop, run, ema = trained("lr-rewinding", "sgd", slim, max_drop=0.05)
        loop.over(run, accuracy=lambda run: 0.9 if run.level <= last_good else 0.5)
        assert len(run.levels) == last_good + 3, "two more levels, in which units of the returned one are gone"
        returned.append([copy.deepcopy(each).eval()(points()) for each in (loop.model, ema)])
    for masked, small in zip(*returned, strict=True):
        assert close(small, masked)


def test_a_loop_that_counts_steps_and_adopts_is_slim() -> None:
    model = Residual()
    optimizer = Adam(model.parameters(), lr=0.01)
    run = rewound.steps(
        6,
        model,
        optimizer,
        torch.optim.lr_scheduler.StepLR(optimizer, 3),
        compression=2,
        pruner=UNITS,
        slim=True,
        adopt=True,
        example_inputs=points(),
        say=lambda _: None,
    )
    for _ in run:
        optimizer.zero_grad()
        model(points()).square().mean().backward()
        optimizer.step()
    assert model.stem.out_channels == int(run.mask["stem.bias"].sum()) < 6


@pytest.mark.slow
def test_a_compiled_model_follows() -> None:
    results = []
    for compiled in (False, True):
        model = Residual()
        called = torch.compile(model, backend="aot_eager") if compiled else model
        loop = Loop(model, OPTIMIZERS["sgd"](model))
        run = rewound.epochs(
            3,
            called,
            loop.optimizer,
            loop.scheduler,
            compression=3,
            rate=0.2,
            pruner=UNITS,
            slim=True,
            retrain_epochs=1,
            example_inputs=points()[:2],
            say=lambda _: None,
        )
        loop.model = called
        for epoch in run:
            loop.train(epoch)
        results.append(model.eval()(points()).detach())
    assert close(*results)


def of_two(model: Residual) -> list[Optimizer]:
    head = list(model.head.parameters())
    rest = [parameter for parameter in model.parameters() if not any(parameter is each for each in head)]
    return [SGD(rest, lr=0.05, momentum=0.9), AdamW(head, lr=0.01)]


AROUND = {
    "lookahead": lambda model: [Lookahead(OPTIMIZERS["sgd"](model))],
    "timm's lookahead": lambda model: [timm_lookahead()(OPTIMIZERS["adamw"](model))],
    "two": of_two,
    "adafactor": lambda model: [torch.optim.Adafactor(model.parameters(), lr=0.01)],
}


@pytest.mark.numeric
@pytest.mark.parametrize("kind", AROUND)
def test_optimizers_inside_others_several_and_with_slots_of_other_shapes(kind: str) -> None:
    """Those that treat each element by itself train what they train under a mask."""
    outputs, points_seen = [], points()
    for slim in (False, True):
        model = Residual()
        optimizers = AROUND[kind](model)
        run = rewound.epochs(
            3, model, optimizers, compression=3, rate=0.3, retrain_epochs=2, pruner=UNITS, slim=slim,
            technique="weight-rewinding", say=lambda _: None,
        )  # fmt: skip
        for _ in run:
            for optimizer in optimizers:
                optimizer.zero_grad()
            model(points_seen).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
        outputs.append(copy.deepcopy(model).eval()(points_seen).detach())
        assert (model.stem.out_channels < 6) == slim
    if kind != "adafactor":
        assert close(*outputs)


@pytest.mark.parametrize(("kind", "by_shape"), [("AdamW", False), ("Adafactor", True), ("Muon", True)])
def test_steps_that_depend_on_the_shape_of_a_matrix_are_those_of_the_small_network(kind: str, by_shape: bool) -> None:
    """The exception to law 8."""
    outputs, x = [], points().double()
    for slim in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16, bias=False), nn.ReLU(), nn.Linear(16, 3, bias=False)).double()
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.02)
        options = {"compression": 2, "one_shot": True, "pruner": UNITS, "slim": slim, "say": lambda _: None}
        for _ in rewound.epochs(3, model, optimizer, **options):
            optimizer.zero_grad()
            (model(x) - x[:, :3]).square().mean().backward()
            optimizer.step()
        outputs.append(model(x).detach())
    assert close(*outputs) != by_shape


def test_a_trained_module_in_also_stays_as_it_is() -> None:
    model, critic = Residual(), nn.Linear(3, 1).double()
    optimizer = SGD([*model.parameters(), *critic.parameters()], lr=0.05, momentum=0.9)
    options = {"compression": 2, "retrain_epochs": 1, "pruner": UNITS, "slim": True, "say": lambda _: None}
    for _ in rewound.epochs(2, model, optimizer, also=[critic], **options):
        optimizer.zero_grad()
        critic(model(points())).mean().backward()
        optimizer.step()
    assert critic.weight.shape == optimizer.state[critic.weight]["momentum_buffer"].shape == (1, 3)
    assert model.branch[0].out_channels < 8


def test_the_table_counts_the_small_network(tmp_path: Path) -> None:
    loop, run, _ = trained("lr-rewinding", "sgd", True, checkpoint=tmp_path)
    loop.over(run)
    with (tmp_path / "levels" / "levels.csv").open(newline="") as file:
        row = list(csv.DictReader(file))[-1]
    parameters = sum(p.numel() for p in loop.model.parameters())
    assert int(row["flops"]) == rewound.profile(loop.model, points()[:1]).total()
    assert int(row["parameters"]) == sum(p.numel() for p in Residual().parameters())
    assert float(row["network_compression"]) == pytest.approx(int(row["parameters"]) / parameters)
    assert float(row["network_compression"]) == pytest.approx(int(row["parameters"]) / parameters)
    assert run.levels[-1].network_compression == pytest.approx(float(row["network_compression"]))


class Remembers(Residual):
    """Has a state that is no tensor."""

    seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += self.training
        return super().forward(x)

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


@pytest.mark.parametrize("technique", ["lr-rewinding", "weight-rewinding"])
def test_a_state_that_is_no_tensor_is_saved_and_rewound_with_the_others(technique: str, tmp_path: Path) -> None:
    whole, run, _ = trained(technique, "sgd", True, Remembers(), checkpoint=tmp_path / "whole")
    whole.over(run)
    assert "level 1 is not kept as a ticket: cannot save _extra_state: it is a dict, not a tensor" in whole.said
    left, run, _ = trained(technique, "sgd", True, Remembers(), checkpoint=tmp_path / "left")
    left.over(run, until=T + 1)
    again, run, _ = trained(technique, "sgd", True, Remembers(), checkpoint=tmp_path / "left")
    again.over(run)
    assert_same(again.model.state_dict(), whole.model.state_dict())


class Shadow:
    """An average as many scripts have it: a dict of tensors by name."""

    def __init__(self, model: nn.Module, fixed: bool = False, named: bool = True) -> None:
        self.values = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        self.fixed, self.named = fixed, named

    def update(self, model: nn.Module) -> None:
        for name, tensor in model.state_dict().items():
            self.values[name] = 0.5 * self.values[name] + 0.5 * tensor if tensor.is_floating_point() else tensor.clone()

    def state_dict(self) -> dict[str, object]:
        return {"shadow": self.values if self.named else dict(enumerate(self.values.values()))}

    def load_state_dict(self, state: dict[str, dict[str, Tensor]]) -> None:
        for name, tensor in state["shadow"].items():
            if self.fixed:
                self.values[name].copy_(tensor)
            else:
                self.values[name] = tensor.clone()


def test_an_average_by_names_is_cut_and_one_that_cannot_be_is_refused() -> None:
    values = {}
    for slim in (False, True):
        model = Residual()
        shadow, loop = Shadow(model), Loop(model, OPTIMIZERS["sgd"](model))
        run = loop.run(compression=3, rate=0.3, retrain_epochs=1, pruner=UNITS, slim=slim, also=[shadow])
        for epoch in run:
            loop.train(epoch)
            shadow.update(model)
        values[slim], left = shadow.values, run.mask["stem.bias"]
    assert close(values[True]["head.weight"], values[False]["head.weight"][:, left])
    assert close(values[True]["norm.running_var"], values[False]["norm.running_var"][left])
    for options, error in (
        ({"fixed": True}, "Shadow in also cannot be made smaller"),
        ({"named": False}, "but not under their names"),
    ):
        model = Residual()
        loop = Loop(model, OPTIMIZERS["sgd"](model))
        with pytest.raises(InputError, match=error):
            loop.over(loop.run(compression=2, pruner=UNITS, slim=True, also=[Shadow(model, **options)]))
        assert len(loop.seen) <= 1, "before the dense run is trained"


class Strange(SGD):
    """An optimizer with a slot of a shape of its own."""

    def step(self, closure: None = None) -> None:
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["history"] = torch.zeros(3)


class Kronecker(SGD):
    """An optimizer with a matrix for each dimension of a weight, as Shampoo and SOAP have them."""

    kind: Callable[[list[Tensor]], object] = list

    def step(self, closure: None = None) -> None:
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("factors", self.kind([torch.eye(n) for n in parameter.shape]))


class InTables(Kronecker):
    """One that keeps them by name."""

    @staticmethod
    def kind(factors: list[Tensor]) -> object:
        return {"by dimension": dict(enumerate(factors))}


@pytest.mark.parametrize("example", [None, torch.zeros(2, 6)])
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Strange, "slot history of .* is not known how it follows"),
        (Kronecker, "slot factors of .* is a list of tensors, and it is not known how they follow"),
        (InTables, "slot factors of .* is a dict of tensors, and it is not known how they follow"),
    ],
)
def test_an_optimizer_that_cannot_be_made_small_is_refused_after_its_first_steps(
    kind: type[SGD], said: str, example: Tensor | None
) -> None:
    model = network()
    loop = Loop(model, kind(model.parameters(), lr=0.1))
    with pytest.raises(InputError, match=said):
        loop.over(loop.run(compression=2, pruner=UNITS, slim=True, example_inputs=example))
    assert len(loop.seen) == 1, "before the dense run is trained"
    model = network()
    optimizer, done = kind(model.parameters(), lr=0.1), list[int]()
    options = {"compression": 2, "pruner": UNITS, "slim": True, "example_inputs": example, "say": lambda text: None}

    def train() -> None:
        for step in rewound.steps(12, model, optimizer, **options):  # type: ignore[arg-type]
            x, labels = batch(0, step)
            nn.functional.cross_entropy(model(x), labels).backward()
            done.append(step)
            if step == 2:  # gradients are accumulated before
                optimizer.step()

    with pytest.raises(InputError, match=said):
        train()
    assert done == [0, 1, 2]


def test_what_cannot_be_made_small_is_refused() -> None:
    model = Residual()
    loop = Loop(model, Strange(model.parameters(), lr=0.1))
    with pytest.raises(InputError, match=r"slot history of .* is not known how it follows"):
        loop.over(loop.run(compression=2, pruner=UNITS, slim=True))
    assert len(loop.seen) == 1
    with pytest.raises(InputError, match="slim needs whole units"):
        Loop().run(slim=True)
    loop = Loop()
    with pytest.raises(InputError, match="trained by one process"):
        rewound.epochs(T, nn.DataParallel(loop.model), loop.optimizer, loop.scheduler, pruner=UNITS, slim=True)


@pytest.mark.parametrize("version", [1, 2])
def test_a_folder_of_a_masked_run_is_not_taken_for_a_slim_one(version: int, tmp_path: Path) -> None:
    loop, run, _ = trained("lr-rewinding", "sgd", False, checkpoint=tmp_path)
    loop.over(run, until=T)
    if version == 1:  # which wrote neither a checksum nor whether the run was slim
        arguments = json.loads((file := tmp_path / "arguments.json").read_text())
        del arguments["slim"], arguments["checksum"]
        file.write_text(json.dumps({**arguments, "version": 1}))
    loop, run, _ = trained("lr-rewinding", "sgd", True, checkpoint=tmp_path)
    with pytest.raises(InputError, match="was made with slim False, not True"):
        loop.over(run)


class Plotted(Residual):
    """Keeps its features for a plot."""

    def forward(self, x: Tensor) -> Tensor:
        self.features = self.norm(self.stem(x.double().unsqueeze(1))).relu()
        return self.head((self.features + self.branch(self.features)).relu().mean(2))


def test_a_cell_that_is_run_again_with_the_small_model_is_told_to_make_it_anew(tmp_path: Path) -> None:
    loop, run, _ = trained("lr-rewinding", "sgd", True, checkpoint=tmp_path)
    loop.over(run, until=T + 2)
    _, again, _ = trained("lr-rewinding", "sgd", True, loop.model, checkpoint=tmp_path)
    message = (
        r"made with weights stem\.weight \[6, 1, 3\] \(not \[\d, 1, 3\]\).*; give the same model, made anew with its op"
    )
    with pytest.raises(InputError, match=message):
        next(iter(again))


def test_a_model_that_keeps_what_it_computed_becomes_small() -> None:
    loop, run, _ = trained("lr-rewinding", "sgd", True, Plotted())
    loop.over(run)
    assert loop.model.stem.out_channels < 6
