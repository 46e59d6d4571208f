"""Names of devices, as they are given on the command line."""

import platform
from functools import cache
from pathlib import Path

import torch

from rewound.foundations.errors import InputError


def device_kind(name: str) -> str:
    """Whether that is a name of a cpu or of a cuda device, here or elsewhere."""
    try:
        kind = torch.device(name).type
    except (RuntimeError, TypeError) as error:
        raise InputError(f"unknown device {name!r}; use cpu or cuda") from error
    if kind not in ("cpu", "cuda"):
        raise InputError(f"device {name!r} is not supported; use cpu or cuda")
    return kind


@cache
def cpu_kind() -> str:
    """This CPU's model and the vector instructions that torch uses on it; other CPUs add in another order.

    `ATEN_CPU_CAPABILITY` sets the latter.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:  # not Linux
        lines = []
    named = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    # An ARM CPU has numbers for its maker and model.
    numbers = " ".join(named[name] for name in ("CPU implementer", "CPU part") if name in named)
    model = named.get("model name") or numbers or platform.processor() or platform.machine()
    kind = f" (family {named['cpu family']}, model {named['model']})" if {"cpu family", "model"} <= named.keys() else ""
    return f"{model}{kind}, {torch.backends.cpu.get_cpu_capability()}"


@cache
def device_named(name: str) -> torch.device:
    """The device of that name, if it is there; asked for a GPU, it turns TF32 convolutions off in this process."""
    kind, device = device_kind(name), torch.device(name)
    if kind == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device {name!r} is not there: torch {torch.__version__} sees no CUDA GPU; use cpu")
    if kind == "cuda":
        torch.backends.cudnn.allow_tf32 = False  # float32 means float32
    return device
