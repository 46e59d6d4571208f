"""`rewound.export`: a network in a file for another runtime, which is loaded again, run and compared before it counts.

| format       | file         | who runs it                                              |
|--------------|--------------|----------------------------------------------------------|
| onnx         | .onnx        | ONNX Runtime, and whatever else reads ONNX               |
| torch-export | .pt2         | `torch.export.load`, AOTInductor, ExecuTorch             |
| safetensors  | .safetensors | tensors alone, by the names that the network's class has |
"""

import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from rewound.commands.named import batched, check_is_all, named_network, slim_network
from rewound.commands.runtimes import (
    Inputs,
    check_installed,
    eager_outputs,
    expected,
    in_words,
    inputs_in,
    machine,
    onnx_session,
    same_outputs,
    write_onnx,
)
from rewound.foundations.copying import copied
from rewound.foundations.errors import Failed, InputError, as_path, check_kind, shown
from rewound.foundations.names import unknown
from rewound.foundations.quantities import sized
from rewound.foundations.wholefiles import replacing, writable_file
from rewound.method.pruning.mask import Mask
from rewound.method.structure.examples import tensors_in
from rewound.states.storage.artifacts import DEFAULT_STORE
from rewound.states.storage.statefile import separate


@dataclass(frozen=True)
class Export:
    """A file that gives the outputs of the network that it was made of."""

    path: Path
    to: str
    bytes: int
    deviation: float
    """The largest difference between its outputs and the network's, which were computed in float64."""
    batch: int | None
    """The only batch size that it takes; None: any."""

    def __str__(self) -> str:
        batches = (
            ""
            if self.to == "safetensors"
            else "; " + ("takes batches of any size" if self.batch is None else f"takes only batches of {self.batch}")
        )
        checked = f"loaded again, its outputs differ from the network's in float64 by {self.deviation:.1e} at most"
        return f"{self.path}: {self.to}, {sized(self.bytes)}; {checked}{batches}"


def export(
    network: str | Path | nn.Module,
    out: str | Path,
    *,
    to: str | None = None,
    slim: bool = False,
    overwrite: bool = False,
    example_inputs: Tensor | Sequence[Tensor] | None = None,
    mask: Mask | None = None,
    recipe: str | None = None,
    fields: Mapping[str, object] = {},
    model: str | None = None,
    store: str | Path = DEFAULT_STORE,
    say: Callable[[str], None] = print,
) -> Export:
    """Write a pruned network to a file for another runtime, if what is read from that file equals the network.

    `network` is a module with `example_inputs` (and a `mask`), or what the command takes: the path of a ticket, the
    first digits of a key in `store`, a recipe's name; `recipe`, `fields` and `model` are as in `bench`. `to` is
    onnx, torch-export or safetensors (default: by the ending of `out`). With `slim`, units that the mask removes
    are left out. What the file puts out for the example may differ from the network's outputs by rounding alone (64
    times the error of an eager pass); otherwise nothing is written.

    >>> import tempfile
    >>> model, file = nn.Linear(4, 2), Path(tempfile.mkdtemp(), "model.safetensors")
    >>> export(model, file, example_inputs=torch.ones(1, 4)).bytes == file.stat().st_size
    True
    """
    path = writable_file(as_path("out", out))
    kind = _format(path, to)
    check_kind("overwrite", overwrite, bool, "give True or False")
    check_kind("slim", slim, bool, "give True or False")
    if path.exists() and not overwrite:
        raise InputError(f"{path} exists; choose another file, or have it replaced with overwrite (--overwrite)")
    if kind == "onnx":
        check_installed("export to ONNX", ("onnx", "onnxscript", "onnxruntime"))
    if isinstance(network, str | Path):
        if example_inputs is not None or mask is not None:
            raise InputError(f"{shown(network)} has inputs and a mask of its own; leave out example_inputs and mask")
        found = named_network(network, recipe=recipe, fields=fields, model=model, store=store, say=say)
        exported, mask, example, trained = found.model, found.mask, found.inputs(1), found.trained
    else:
        check_kind("network", network, nn.Module, "give a module, the path of a ticket, a key or a recipe's name")
        check_is_all(recipe, fields, model)
        exported, example, trained = network, inputs_in(example_inputs), True
    exported = copied(exported).eval().cpu()
    if mask is not None:
        check_kind("mask", mask, Mask, "give the rewound.Mask that the network was trained under")
        mask.apply(exported)
    if slim:
        exported = _without_units(exported, mask, example)
    if not trained:
        say(f"{network} is a recipe, whose network is not trained: its initial weights are written")
    with TemporaryDirectory() as folder, torch.no_grad():
        file = Path(folder, f"network{path.suffix}")
        deviation, batch = FORMATS[kind][1](exported, example, file)
        with replacing(path) as temporary:
            shutil.copyfile(file, temporary)
    return Export(path, kind, path.stat().st_size, deviation, batch)


def _format(path: Path, to: str | None) -> str:
    endings = {suffix: name for name, (suffix, _) in FORMATS.items()}
    if to is None:
        if path.suffix not in endings:
            known = ", ".join(f"{suffix} ({name})" for suffix, name in endings.items())
            raise InputError(f"{path} has no ending that names a format: {known}; give one, or to (--to)")
        return endings[path.suffix]
    if to not in FORMATS:
        raise InputError(unknown("format", str(to), FORMATS))
    if path.suffix != (suffix := FORMATS[to][0]):
        raise InputError(f"{path} does not end with {suffix}, as files of {to} do; give it that ending")
    return to


def _without_units(model: nn.Module, mask: Mask | None, example: Inputs) -> nn.Module:
    smaller = None if mask is None else slim_network(model, mask, example)
    if smaller is None:
        lacks = "has no mask" if mask is None else "has a mask that removes no unit wholly"
        raise InputError(f"this network {lacks}, so that there is nothing to slim; leave out slim (--slim)")
    network = smaller.for_inference()
    if not same_outputs(model, network, example):
        raise InputError(
            "the mask removes the weights of units, but not their biases or normalisation, so that the slim network "
            "would put out something else than the one that was trained; prune with pattern 'unit' or 'filter', or "
            "leave out slim (--slim)"
        )
    return network


def _write_tensors(model: nn.Module, example: Inputs, file: Path) -> tuple[float, None]:
    state: Mapping[str, object] = model.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise InputError(
                f"cannot write {name}: it is a {type(value).__name__}, and safetensors holds tensors alone; export to "
                "onnx or torch-export"
            )
    save_file(separate(model.state_dict()), file, {"format": "pt"})
    again = copied(model)
    for tensor in again.state_dict().values():
        tensor.zero_()
    again.load_state_dict(load_file(file))
    return expected(model, example).deviation(tensors_in(again(*example)), "the network in the file"), None


def _write_program(model: nn.Module, example: Inputs, file: Path) -> tuple[float, int | None]:
    def load() -> Runs:
        again = torch.export.load(file).module()
        return lambda inputs: tensors_in(again(*inputs))

    return _traced(model, example, lambda program: torch.export.save(program, file), load)


def _write_onnx(model: nn.Module, example: Inputs, file: Path) -> tuple[float, int | None]:
    def load() -> Runs:
        session = onnx_session(file, machine())
        names = [each.name for each in session.get_inputs()]
        return lambda inputs: [
            torch.from_numpy(each)
            for each in session.run(None, {name: x.numpy() for name, x in zip(names, inputs, strict=True)})
        ]

    return _traced(model, example, lambda program: write_onnx(program, file), load)


Runs: TypeAlias = Callable[[Inputs], list[Tensor]]
FORMATS: Mapping[str, tuple[str, Callable[[nn.Module, Inputs, Path], tuple[float, int | None]]]] = {
    "onnx": (".onnx", _write_onnx),
    "torch-export": (".pt2", _write_program),
    "safetensors": (".safetensors", _write_tensors),
}
"""The ending of a format's files, and what writes and checks one: it gives the deviation, and the only batch size."""


def _traced(
    model: nn.Module, example: Inputs, write: Callable[[ExportedProgram], None], load: Callable[[], Runs]
) -> tuple[float, int | None]:
    """Write the graph of a network for batches of any size, or for the example's if it takes no other."""
    eager_outputs(model, example)  # first, as torch prints pages where it traces a network that does not run
    several = batched(example, 2) if len(example[0]) == 1 else example  # a size of 1 counts as one that never changes
    failure: Exception | None = None
    for inputs, others in ((several, (several, tuple(tensor[:1] for tensor in several))), (example, (example,))):
        free = tuple({0: Dim.AUTO} for _ in inputs) if len(others) > 1 else None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                program = torch.export.export(model, inputs, dynamic_shapes=free, strict=False)
                if free:
                    _check_any_size(program)
                write(program)
                runs = load()
                found = [(expected(model, each), runs(each)) for each in others]
        except Exception as error:  # whatever exporters and runtimes raise for a network that they cannot take
            failure = error
            continue
        deviation = max(right.deviation(given, "the network in the file") for right, given in found)
        return deviation, None if free else len(example[0])
    assert failure is not None  # as neither has returned
    raise InputError(
        f"this network cannot be exported ({in_words(failure)}); safetensors takes any network"
    ) from failure


def _check_any_size(program: ExportedProgram) -> None:
    """An error for a graph that holds for some batch sizes alone, as where code takes batches apart four by four.

    Torch notes what it has taken for granted of a size that is free, in a field that is not public; a torch without it
    exports for the example's size alone. A graph of ONNX does not check the notes: for other sizes, it would put out
    something else without a word.
    """
    if conditions := program._guards_code:
        raise Failed(f"its graph is only for sizes with {conditions[0]}")
