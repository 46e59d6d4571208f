"""`rewound export`: what is read from the file puts out what the network does, or there is no file."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import rewound
from command_line import Rewound
from rewound.commands import exporting
from rewound.commands.runtimes import same_outputs
from rewound.commands.timing import OTHER_OUTPUTS
from rewound.foundations.errors import Failed
from sameness import assert_same
from tiny import Tiny

IMAGES = torch.randn(3, 2, 8, 8, generator=torch.Generator().manual_seed(0))
SUFFIXES = {"onnx": "onnx", "torch-export": "pt2", "safetensors": "safetensors"}


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 3)]
    return nn.Sequential(*layers)


def unit_mask(model: nn.Module) -> rewound.Mask:
    return rewound.Pruner(pattern="unit", score="l1")(model, density=0.6, example_inputs=(IMAGES,))


def outputs(path: Path, inputs: Tensor) -> Tensor:
    """What somebody without rewound gets from the file."""
    if path.suffix == ".pt2":
        found: Tensor = torch.export.load(path).module()(inputs)
        return found
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: inputs.numpy()})[0])


def test_a_slim_network_that_puts_out_something_else_is_not_written(tmp_path: Path) -> None:
    """A mask of a layer's rows alone keeps their biases, which go on to the next layer."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    nn.init.constant_(model[0].bias, 0.5)
    rows = torch.ones(32, 16, dtype=torch.bool)
    rows[:20] = False
    mask, path = rewound.Mask({"0.weight": rows}), tmp_path / "a.safetensors"
    with pytest.raises(rewound.InputError, match="removes the weights of units, but not their biases or normalisation"):
        rewound.export(model, path, example_inputs=torch.randn(2, 16), mask=mask, slim=True)
    assert not path.exists()


@pytest.mark.parametrize("to", ["torch-export", pytest.param("onnx", marks=pytest.mark.slow)])
@pytest.mark.parametrize("slim", [False, True])
def test_the_file_puts_out_what_the_masked_network_does(tmp_path: Path, to: str, slim: bool) -> None:
    model = network().train()
    mask = unit_mask(model)
    path = tmp_path / f"network.{SUFFIXES[to]}"
    made = rewound.export(model, path, example_inputs=IMAGES[:1], mask=mask, slim=slim)
    assert (made.to, made.batch, made.bytes) == (to, None, path.stat().st_size)
    assert "takes batches of any size" in str(made)
    assert model.training, "the given network stays as it is"
    mask.apply(model.eval())
    for batch in (1, 2, 3):
        assert torch.allclose(outputs(path, IMAGES[:batch]), model(IMAGES[:batch]), atol=1e-5)
    full = rewound.export(model, tmp_path / f"full.{SUFFIXES[to]}", example_inputs=IMAGES).bytes
    if slim:
        assert path.stat().st_size < full - 1000, "a slim network is smaller in its file"


def test_tensors_alone(tmp_path: Path) -> None:
    model = network()
    mask = unit_mask(model)
    made = rewound.export(model, tmp_path / "a.safetensors", example_inputs=IMAGES, mask=mask)
    assert str(made).startswith(f"{tmp_path}/a.safetensors: safetensors, ")
    mask.apply(model)
    assert_same(load_file(made.path), model.state_dict())
    rewound.export(model, tmp_path / "b.safetensors", example_inputs=IMAGES, mask=mask, slim=True)
    slim = rewound.slim(model, mask, (IMAGES,))
    assert_same(load_file(tmp_path / "b.safetensors"), slim.model.state_dict())


class ForOne(nn.Linear):
    """Takes a batch of one alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).reshape(1, 4)


class OfAnyNumber(nn.Linear):
    """It takes arguments without names, whose sizes torch.export cannot leave open one by one."""

    def forward(self, *inputs: Tensor) -> Tensor:
        return super().forward(inputs[0])


class Undecided(nn.Linear):
    """What it computes depends on values, which no graph can say."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else x


def test_a_network_that_takes_one_batch_size(tmp_path: Path) -> None:
    made = rewound.export(ForOne(4, 4), tmp_path / "a.pt2", example_inputs=torch.ones(1, 4))
    assert made.batch == 1
    assert str(made).endswith("takes only batches of 1")
    made = rewound.export(OfAnyNumber(4, 4), tmp_path / "b.pt2", example_inputs=torch.ones(3, 4))
    assert made.batch == 3, "as docs/deploy.md says"


class FourByFour(nn.Linear):
    """Its code takes a batch apart, so that a graph has as many parts as the example."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([super(FourByFour, self).forward(part) for part in x.split(4)])


class LargeOnesTwice(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if len(x) > 5 else 1)


@pytest.mark.parametrize("to", ["torch-export", pytest.param("onnx", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [FourByFour, LargeOnesTwice])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_graph_that_holds_for_small_batches_alone_is_not_said_to_take_all(
    tmp_path: Path, kind: type[nn.Linear], to: str, rows: int
) -> None:
    file = tmp_path / ("a.onnx" if to == "onnx" else "a.pt2")
    made = rewound.export(kind(4, 4), file, example_inputs=torch.ones(rows, 4))
    assert made.batch == rows
    assert str(made).endswith(f"takes only batches of {rows}")


class InSinglePrecision(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.float32
        return super().forward(x)


@pytest.mark.parametrize("suffix", ["pt2", "safetensors"])
def test_a_network_whose_own_code_takes_one_type_of_numbers_is_written(tmp_path: Path, suffix: str) -> None:
    made = rewound.export(InSinglePrecision(4, 4), tmp_path / f"a.{suffix}", example_inputs=torch.ones(2, 4))
    assert made.deviation < 1e-5
    with pytest.raises(rewound.InputError, match=r"\(AssertionError"):
        rewound.export(
            InSinglePrecision(4, 4), tmp_path / f"b.{suffix}", example_inputs=torch.ones(2, 4, dtype=torch.int64)
        )
    assert [path.name for path in tmp_path.iterdir()] == [f"a.{suffix}"]


def test_a_network_that_cannot_be_traced(tmp_path: Path) -> None:
    with pytest.raises(rewound.InputError, match=r"this network cannot be exported \(\w+: .*; safetensors takes any"):
        rewound.export(Undecided(4, 4), tmp_path / "a.pt2", example_inputs=torch.ones(1, 4))
    assert not list(tmp_path.iterdir())
    rewound.export(Undecided(4, 4), tmp_path / "a.safetensors", example_inputs=torch.ones(1, 4))


@pytest.mark.parametrize("to", ["torch-export", "safetensors"])
def test_a_file_that_gives_something_else_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str) -> None:
    def damaged(tensors: dict[str, Tensor], *rest: object) -> None:
        save({name: tensor * 1.001 for name, tensor in tensors.items()}, *rest)  # type: ignore[arg-type]

    save, load = exporting.save_file, torch.export.load
    monkeypatch.setattr(exporting, "save_file", damaged)
    monkeypatch.setattr(torch.export, "load", lambda file: Wrong(load(file).module()))
    path = tmp_path / f"a.{SUFFIXES[to]}"
    path.write_text("mine")
    with pytest.raises(
        rewound.Failed, match=r"the network in the file differs from the network by \S+, where rounding"
    ):
        rewound.export(network(), path, example_inputs=IMAGES, overwrite=True)
    assert path.read_text() == "mine"
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


class Wrong:
    """A program that multiplies."""

    def __init__(self, program: nn.Module) -> None:
        self.program = program

    def module(self) -> "Wrong":
        return self

    def __call__(self, *inputs: Tensor) -> Tensor:
        found: Tensor = 1.001 * self.program(*inputs)
        return found


def test_a_recipe_is_not_trained_and_a_line_says_so(rewound_command: Rewound) -> None:
    code, out, err = rewound_command("export", "tiny:Tiny", "--out", "a.safetensors")
    assert (code, err) == (0, "")
    assert out.startswith("tiny:Tiny is a recipe, whose network is not trained: its initial weights are written\n")
    assert_same(load_file("a.safetensors"), Tiny().model(0).state_dict())


def test_a_ticket_by_the_command(rewound_command: Rewound) -> None:
    task = Tiny()
    model = task.model(0)
    mask = rewound.Pruner(floor=0.1)(model, density=0.5)
    mask.apply(model)
    Path("pruned").mkdir()
    rewound.save(model, mask, "pruned/ticket.safetensors")
    words = ("export", "pruned", "--recipe", "tiny:Tiny", "--to", "torch-export", "--out", "a.pt2")
    code, out, err = rewound_command(*words)
    assert (code, err) == (0, "")
    assert out.startswith("a.pt2: torch-export, ")
    images = torch.randn(2, *task.example()[0].shape[1:])
    assert torch.allclose(outputs(Path("a.pt2"), images), model.eval()(images), atol=1e-5)
    before = Path("a.pt2").read_bytes()
    assert rewound_command(*words).code == 2
    assert Path("a.pt2").read_bytes() == before
    assert rewound_command(*words, "--overwrite").code == 0
    code, _, err = rewound_command(*words, "--overwrite", "--slim")
    assert (code, "has a mask that removes no unit wholly, so that there is nothing to slim" in err) == (2, True)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"example_inputs": None}, "example_inputs must be what the network takes, tensors with a batch, not None"),
        ({"example_inputs": 3}, "tensors with a batch, not 3; for a network that takes anything else, give a module"),
        ({"example_inputs": ({"x": 1},)}, "tensors with a batch, not {'x': 1}; for a network that takes anything else"),
        ({"mask": {}}, "mask must be of type Mask"),
        ({"network": 5}, "network must be of type Module, not 5; give a module, the path of a ticket"),
        ({"network": "digits"}, "'digits' has inputs and a mask of its own"),
        ({"out": "s3://bucket/a.pt2"}, "out must be a path, not the URL"),
    ],
)
def test_bad_calls(tmp_path: Path, options: dict[str, object], says: str) -> None:
    given = {"network": network(), "out": tmp_path / "a.pt2", "example_inputs": IMAGES, **options}
    with pytest.raises(rewound.InputError, match=says):
        rewound.export(**given)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_onnx_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(rewound.InputError, match=r"export to ONNX needs onnx and onnxscript and onnxruntime, not inst"):
        rewound.export(network(), tmp_path / "a.onnx", example_inputs=IMAGES)


class Silent(nn.Linear):
    """Puts out a number."""

    def forward(self, x: Tensor) -> float:  # type: ignore[override]
        return float(super().forward(x).sum())


def test_a_network_without_tensors_in_its_outputs_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with pytest.raises(rewound.InputError, match=r"the network puts out no tensor, but -?[0-9.]+, so that nothing"):
        rewound.export(Silent(2, 1), path, example_inputs=torch.ones(1, 2))
    assert not path.exists()


class Plotted(nn.Linear):
    """Keeps what it put out."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = super().forward(x)
        return self.seen


def test_a_network_that_keeps_what_it_computed_is_written_and_measured(tmp_path: Path) -> None:
    model, example = Plotted(2, 1), torch.ones(1, 2)
    model(example)
    rewound.export(model, tmp_path / "a.safetensors", example_inputs=example)
    assert len(rewound.bench(model, example, backend="eager", seconds=0.01).timings) == 1


def test_the_line_says_what_the_outputs_were_compared_with(tmp_path: Path) -> None:
    """A network of bfloat16 is read back bit for bit, and differs from what float64 gives."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4).bfloat16()
    made = rewound.export(model, tmp_path / "n.safetensors", example_inputs=torch.randn(4, 8, dtype=torch.bfloat16))
    assert made.deviation > 1e-4
    assert f"differ from the network's in float64 by {made.deviation:.1e} at most" in str(made)


class Masked(nn.Module):
    """Puts out what no number is: minus infinity for what may not be chosen, and complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)
        self.register_buffer("forbidden", torch.tensor([False, True, False, False]))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.b(self.a(x).relu())
        return y.masked_fill(self.forbidden, -torch.inf), torch.fft.rfft(y)


@pytest.mark.parametrize("to", ["torch-export", "safetensors"])
def test_infinite_and_complex_outputs_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str) -> None:
    torch.manual_seed(0)
    model, x = Masked(), torch.randn(4, 8)
    mask = rewound.Pruner(pattern="unit")(model, density=0.5, example_inputs=x)
    file = tmp_path / f"network{exporting.FORMATS[to][0]}"
    made = rewound.export(model, file, to=to, example_inputs=x, mask=mask, slim=True)
    assert made.deviation < 1e-6
    found = rewound.bench(model, x, mask, backend="eager", seconds=0.1)
    assert [timing.network for timing in found.timings] == ["dense", "pruned", "slim"]
    assert OTHER_OUTPUTS not in found.remarks
    wrong = Masked()
    wrong.load_state_dict(model.state_dict())
    with torch.no_grad():
        wrong.b.bias += 1e-3
    assert not same_outputs(model, wrong, (x,))
    turned = Masked()
    turned.load_state_dict(model.state_dict())
    turned.forward = lambda x: (model(x)[0], model(x)[1].conj())  # type: ignore[method-assign]
    assert not same_outputs(model, turned, (x,))
    moved = Masked()
    moved.load_state_dict({**model.state_dict(), "forbidden": torch.tensor([True, False, False, False])})
    assert not same_outputs(model, moved, (x,))


class Remembers(nn.Module):
    """Has a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.seen = nn.Linear(8, 16), nn.Linear(16, 8), 0
        self.c = nn.Linear(8, 8, bias=False)
        self.c.weight = nn.Parameter(torch.randn(8, 8))
        self.d = nn.Linear(8, 8, bias=False)
        self.d.weight = self.c.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.d(self.c(self.b(self.a(x).relu())))
        return y

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def test_a_network_with_a_state_that_is_no_tensor(tmp_path: Path) -> None:
    model, x = Remembers(), torch.randn(4, 8)
    rewound.export(model, tmp_path / "network.pt2", example_inputs=x)
    with pytest.raises(rewound.InputError, match=r"cannot write _extra_state: it is a dict, and safetensors holds"):
        rewound.export(model, tmp_path / "network.safetensors", example_inputs=x)
    (dense,) = rewound.bench(model, x, backend="eager", seconds=0.1).sizes
    assert dense.bytes == 4 * dense.parameters == 4 * (8 * 16 + 16 + 16 * 8 + 8 + 8 * 8)  # tied weights once


@pytest.mark.parametrize("wrong", [{"overwrite": "no"}, {"overwrite": None}, {"overwrite": True, "slim": "no"}])
def test_a_text_is_no_leave_to_replace_a_file(tmp_path: Path, wrong: dict[str, object]) -> None:
    path = tmp_path / "a.safetensors"
    path.write_text("precious")
    with pytest.raises(rewound.InputError, match=r"^(overwrite|slim) must be of type bool, not .*; give True or F"):
        rewound.export(nn.Linear(4, 2), path, example_inputs=torch.ones(1, 4), **wrong)  # type: ignore[arg-type]
    assert path.read_text() == "precious"


def test_outputs_that_are_no_numbers_are_not_compared(tmp_path: Path) -> None:
    says = "^the network puts out NaN for these inputs, so that the network in the file cannot be compared with it: "
    with pytest.raises(Failed, match=says):
        rewound.export(nn.Linear(4, 2), tmp_path / "a.pt2", example_inputs=torch.full((2, 4), torch.nan))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", ["pt2", "safetensors"])
def test_inputs_that_the_network_does_not_take(
    tmp_path: Path, suffix: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """That is said alone: no other format takes such a network, and a trace of it would be pages of torch's."""
    says = r"^this network does not run on its example inputs \(RuntimeError: .*\(3x5 and 4x2\)\); give inputs that it"
    with pytest.raises(rewound.InputError, match=says):
        rewound.export(nn.Linear(4, 2), tmp_path / f"a.{suffix}", example_inputs=torch.ones(3, 5))
    assert not list(tmp_path.iterdir())
    assert not caplog.records
    assert "Traceback" not in "".join(capfd.readouterr())
