"""How a network is run where it is used: eagerly, compiled by torch, or by ONNX Runtime; and whether the runs agree.

Under `torch.compile` networks that share the code of `forward` share its cache: the guards of one fail for the next,
and sizes that differ between them become variables of slower kernels. So each network is compiled from a function of
its own, as one graph of fixed shapes; a network that needs several graphs is refused.
"""

import importlib.util
import linecache
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from rewound.foundations.copying import copied
from rewound.foundations.errors import Failed, InputError, as_whole, shown
from rewound.method.copies import copy_in_float64
from rewound.method.structure.examples import tensors_in
from rewound.tasks.devices import device_named

Inputs: TypeAlias = tuple[Tensor, ...]
ROUNDOFF = 64
"""How many times the rounding error of an eager pass another way to compute the same network may have."""
MOST_THREADS = 1024
"""Where the system cannot start as many threads as torch is told to use, the process crashes."""
_numbers = count()


@dataclass(frozen=True)
class Machine:
    """Where and with how many threads networks are run."""

    device: torch.device
    threads: int

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside, torch has these threads and records no gradients."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            with torch.no_grad():
                yield
        finally:
            torch.set_num_threads(before)

    def clock(self) -> float:
        """Seconds: of CPU time where one thread works, which other programs disturb least; otherwise of wall time."""
        alone = self.device.type == "cpu" and self.threads == 1
        return time.process_time() if alone else time.perf_counter()

    def wait(self) -> None:
        """Wait until the device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def machine(device: str = "cpu", threads: int | None = None) -> Machine:
    """The machine of that device, with as many threads as torch takes unless another number is given."""
    usual = torch.get_num_threads()
    if threads is not None and as_whole("threads", threads) < 1:
        raise InputError(f"threads must be at least 1, not {threads}; leave it out for torch's own {usual}")
    if threads is not None and threads > MOST_THREADS:
        raise InputError(f"threads must be at most {MOST_THREADS:,}, not {threads:,}; give as many as there are cores")
    return Machine(device_named(device), threads or usual)


class Prepared(NamedTuple):
    """A network that is ready to run on fixed inputs."""

    run: Callable[[], Any]
    """One forward pass."""
    outputs: Callable[[Any], list[Tensor]]
    """The output tensors in what `run` returned."""


def prepared(backend: str, model: nn.Module, inputs: Inputs, on: Machine) -> Prepared:
    """The network on a backend, run once; `Failed` where the backend cannot run it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ready = BACKENDS[backend](model, inputs, on)
            ready.run()
            on.wait()
    except (InputError, Failed):
        raise
    except Exception as error:  # whatever compilers and exporters raise for a network that they cannot take
        raise Failed(f"{backend} cannot run this network here ({in_words(error)})") from error
    return ready


def in_words(error: Exception) -> str:
    """The kind and the first line of an error that a network's own code or a runtime raises.

    >>> in_words(RuntimeError("shapes differ")), in_words(AssertionError())
    ('RuntimeError: shapes differ', 'AssertionError')
    """
    lines = (line.strip() for line in str(error).splitlines())
    return ": ".join([type(error).__name__, *list(filter(None, lines))[:1]])


def _eager(model: nn.Module, inputs: Inputs, on: Machine) -> Prepared:
    return Prepared(lambda: model(*inputs), tensors_in)


def _compiled(model: nn.Module, inputs: Inputs, on: Machine) -> Prepared:
    forward: Callable[..., Any] = torch.compile(own_forward(model), fullgraph=True, dynamic=False)
    return Prepared(lambda: forward(*inputs), tensors_in)


def own_forward(model: nn.Module) -> Callable[..., Any]:
    """The model as a function with a code object and a file of its own.

    Torch keeps what it has compiled with the code object, and which sizes have varied under the name of its file. Where
    no source is found for that name, torch before 2.13 compiles one function of its own for all (pytorch#124269).
    """
    file, source = f"<network {next(_numbers)}>", "def forward(*inputs):\n    return model(*inputs)\n"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    scope: dict[str, Any] = {"model": model}
    exec(compile(source, file, "exec"), scope)
    forward: Callable[..., Any] = scope["forward"]
    return forward


def _onnx(model: nn.Module, inputs: Inputs, on: Machine) -> Prepared:
    with TemporaryDirectory() as folder:
        file = Path(folder, "network.onnx")
        write_onnx(torch.export.export(model, inputs, strict=False), file)
        session = onnx_session(file, on)
    names = [each.name for each in session.get_inputs()]
    if on.device.type == "cpu":
        arrays = {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)}
        return Prepared(lambda: session.run(None, arrays), lambda found: [torch.from_numpy(each) for each in found])
    binding, number = session.io_binding(), on.device.index or 0  # inputs and outputs stay on the device
    contiguous = [tensor.contiguous() for tensor in inputs]
    for name, tensor in zip(names, contiguous, strict=True):
        kind = torch.empty(0, dtype=tensor.dtype).numpy().dtype
        binding.bind_input(name, "cuda", number, kind, tuple(tensor.shape), tensor.data_ptr())
    for output in session.get_outputs():
        binding.bind_output(output.name, "cuda", number)

    def run() -> list[Tensor]:  # gives the inputs, so that they live as long as it does
        session.run_with_iobinding(binding)
        return contiguous

    return Prepared(run, lambda _: [torch.from_numpy(each) for each in binding.copy_outputs_to_cpu()])


BACKENDS: Mapping[str, Callable[[nn.Module, Inputs, Machine], Prepared]] = {
    "eager": _eager,
    "compiled": _compiled,
    "onnx": _onnx,
}


def check_installed(purpose: str, modules: Sequence[str]) -> None:
    """An error for packages that are not there."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"{purpose} needs {' and '.join(missing)}, not installed here; pip install 'rewound[onnx]'")


def write_onnx(program: ExportedProgram, file: Path) -> None:
    """Write the graph of a network as ONNX."""
    check_installed("ONNX", ("onnx", "onnxscript"))
    logs = {log: log.level for log in map(logging.getLogger, ("torch.onnx", "onnxscript", "onnx_ir"))}
    for log in logs:
        log.setLevel(logging.ERROR)  # they warn of operators that are not installed, and of constants not folded
    try:
        with redirect_stdout(StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(program, (), file, dynamo=True, external_data=False, verbose=False)
    finally:
        for log, level in logs.items():
            log.setLevel(level)


def onnx_session(file: Path, on: Machine) -> Any:
    """A session of ONNX Runtime on a machine."""
    check_installed("ONNX Runtime", ("onnxruntime",))
    import onnxruntime

    provider = "CUDAExecutionProvider" if on.device.type == "cuda" else "CPUExecutionProvider"
    if provider not in (known := onnxruntime.get_available_providers()):
        raise InputError(
            f"this ONNX Runtime has no {provider} ({', '.join(known)}); install onnxruntime-gpu, or use cpu"
        )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = on.threads, 1, 3
    return onnxruntime.InferenceSession(file, options, providers=[provider])


def inputs_in(given: Tensor | Sequence[Tensor] | None) -> Inputs:
    """The inputs of a module that was given."""
    inputs = tuple(given) if isinstance(given, list | tuple) else (given,)
    wrong = [each for each in inputs if not isinstance(each, Tensor) or not each.ndim]
    if wrong or not inputs:
        raise InputError(
            "example_inputs must be what the network takes, tensors with a batch, not "
            f"{shown(wrong[0] if wrong else given)}; for a network that takes anything else, give a module around it "
            "that takes tensors"
        )
    return inputs


class Expected(NamedTuple):
    """What a network puts out, and how far another way to compute it may be off by rounding."""

    values: list[Tensor]
    allowed: list[float]

    def deviation(self, given: Sequence[Tensor], what: str) -> float:
        """The largest deviation from what is expected; an error if rounding does not explain it."""
        if [each.shape for each in given] != [each.shape for each in self.values]:
            raise Failed(f"{what} gives outputs of other shapes than the network: nothing is written or measured")
        worst = 0.0
        for one, other, allowed in zip(given, self.values, self.allowed, strict=True):
            if other.isnan().any():
                raise Failed(
                    f"the network puts out NaN for these inputs, so that {what} cannot be compared with it: nothing is "
                    "written or measured; give other inputs"
                )
            off = _distance(one, other)
            if not off <= allowed:
                raise Failed(
                    f"{what} differs from the network by {off:.1e}, where rounding explains {allowed:.1e}: "
                    "nothing is written or measured"
                )
            worst = max(worst, off)
        return worst


@torch.no_grad()
def expected(model: nn.Module, inputs: Inputs) -> Expected:
    """The outputs in float64, with `ROUNDOFF` times the error that an eager pass has beside them.

    Every other way to compute the network sums the same products in another order, in blocks or after a transform, so
    that its error is of the size of the eager one; a wrong network is off by many orders more.
    """
    given = eager_outputs(model, inputs)
    try:
        exact = tensors_in(copy_in_float64(model)(*(_doubled(each) for each in inputs)))
    except Exception:  # its own code makes or wants tensors of another type, so that its rounding is not known
        return Expected(given, [ROUNDOFF**2 * _roundoff(each.dtype) * _largest(each) for each in given])
    return Expected(exact, [_allowed(one, other) for one, other in zip(given, exact, strict=True)])


@torch.no_grad()
def eager_outputs(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """The output tensors of one eager pass; an error if the network does not run on these inputs."""
    try:
        outputs = model(*inputs)
    except Exception as error:  # whatever its own code raises for inputs that it does not take
        raise InputError(
            f"this network does not run on its example inputs ({in_words(error)}); give inputs that it takes"
        ) from error
    return tensors_in(outputs)


@torch.no_grad()
def same_outputs(model: nn.Module, other: nn.Module, inputs: Inputs) -> bool:
    """Whether another network puts out the same as the model, in evaluation mode, but for rounding."""
    one, two = (copied(each).eval() for each in (model, other))
    try:
        expected(one, inputs).deviation(tensors_in(two(*inputs)), "the other network")
    except Failed:
        return False
    return True


def _allowed(given: Tensor, exact: Tensor) -> float:
    eps = _roundoff(given.dtype)
    return ROUNDOFF * (_distance(given, exact) + eps * _largest(exact)) if eps else 0.0


def _roundoff(dtype: torch.dtype) -> float:
    """The relative rounding error of a type; 0 for whole numbers."""
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0


def _largest(tensor: Tensor) -> float:
    """The size of its largest number that is finite."""
    sizes = tensor.abs()
    return float(sizes.where(sizes.isfinite(), 0).max()) if tensor.numel() else 0.0


def _distance(one: Tensor, other: Tensor) -> float:
    if not one.numel():
        return 0.0
    one, other = (each.cpu() if each.is_complex() else each.double().cpu() for each in (one, other))
    return float((one - other).abs().masked_fill(one == other, 0).max())  # infinity less infinity would be no number


def _doubled(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
